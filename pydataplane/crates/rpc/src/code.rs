//! The code table: every error code that a reply can carry.
//!
//! Protocol errors have JSON-RPC 2.0's codes (section 5.1), operation errors SPDK's: the negated
//! Linux errno, with `strerror`'s text in front of the message so that clients which look for that
//! text find it. SPDK answers some failures of vhost and lvol methods with -32602 and the text
//! alone; here the code is the errno everywhere, because an errno in a code can be matched.

use std::fmt;

macro_rules! errnos {
    ($($variant:ident = $number:literal, $name:literal, $text:literal;)*) => {
        /// A Linux errno that an operation can fail with.
        #[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
        #[repr(i32)]
        pub enum Errno {
            $(#[doc = $text] $variant = $number,)*
        }

        impl Errno {
            /// Every errno of the table, in numeric order.
            pub const ALL: &'static [Errno] = &[$(Errno::$variant),*];

            /// The symbol, as in errno(3).
            pub fn name(self) -> &'static str {
                match self { $(Errno::$variant => $name,)* }
            }

            /// What strerror(3) says.
            pub fn text(self) -> &'static str {
                match self { $(Errno::$variant => $text,)* }
            }
        }
    };
}

errnos! {
    Perm = 1, "EPERM", "Operation not permitted";
    NoEnt = 2, "ENOENT", "No such file or directory";
    Io = 5, "EIO", "Input/output error";
    Again = 11, "EAGAIN", "Resource temporarily unavailable";
    NoMem = 12, "ENOMEM", "Cannot allocate memory";
    Access = 13, "EACCES", "Permission denied";
    Busy = 16, "EBUSY", "Device or resource busy";
    Exist = 17, "EEXIST", "File exists";
    NoDev = 19, "ENODEV", "No such device";
    Inval = 22, "EINVAL", "Invalid argument";
    FBig = 27, "EFBIG", "File too large";
    NoSpc = 28, "ENOSPC", "No space left on device";
    RoFs = 30, "EROFS", "Read-only file system";
    Range = 34, "ERANGE", "Numerical result out of range";
    NameTooLong = 36, "ENAMETOOLONG", "File name too long";
    NoData = 61, "ENODATA", "No data available";
    IlSeq = 84, "EILSEQ", "Invalid or incomplete multibyte or wide character";
    NotSup = 95, "EOPNOTSUPP", "Operation not supported";
    TimedOut = 110, "ETIMEDOUT", "Connection timed out";
    Canceled = 125, "ECANCELED", "Operation canceled";
    NoKey = 126, "ENOKEY", "Required key not available";
}

impl Errno {
    /// The code of the table for an errno of the operating system; [`Errno::Io`] if it is not there.
    pub fn from_raw(errno: i32) -> Errno {
        Errno::ALL.iter().copied().find(|e| *e as i32 == errno).unwrap_or(Errno::Io)
    }
}

/// The `code` of an error object.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Code {
    /// -32700: the text is no JSON. The connection is closed after it.
    Parse,
    /// -32600: JSON, but no request.
    InvalidRequest,
    /// -32601: no such method.
    MethodNotFound,
    /// -32602: a parameter is unknown, missing, or of the wrong type.
    InvalidParams,
    /// -32603: a fault of this program.
    Internal,
    /// -1: the method cannot be called before, or after, initialisation (SPDK's own).
    InvalidState,
    /// The negated errno: the operation failed.
    Os(Errno),
}

impl Code {
    /// The number in the reply.
    pub fn number(self) -> i32 {
        match self {
            Code::Parse => -32700,
            Code::InvalidRequest => -32600,
            Code::MethodNotFound => -32601,
            Code::InvalidParams => -32602,
            Code::Internal => -32603,
            Code::InvalidState => -1,
            Code::Os(errno) => -(errno as i32),
        }
    }

    /// The name shown in the schemas.
    pub fn name(self) -> &'static str {
        match self {
            Code::Parse => "parse error",
            Code::InvalidRequest => "invalid request",
            Code::MethodNotFound => "method not found",
            Code::InvalidParams => "invalid params",
            Code::Internal => "internal error",
            Code::InvalidState => "invalid state",
            Code::Os(errno) => errno.name(),
        }
    }
}

/// An error object: a code and one sentence.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Error {
    /// What programs match.
    pub code: Code,
    /// What people read: object, operation, cause and next step.
    pub message: String,
}

impl Error {
    /// An operation that failed with `errno`; the message is strerror's text and `detail`.
    pub fn os(errno: Errno, detail: impl fmt::Display) -> Error {
        Error { code: Code::Os(errno), message: format!("{}: {detail}", errno.text()) }
    }

    /// An error of the operating system while doing `what` (a clause such as "cannot open /x").
    pub fn io(what: impl fmt::Display, e: &std::io::Error) -> Error {
        let errno = Errno::from_raw(e.raw_os_error().unwrap_or(Errno::Io as i32));
        Error::os(errno, format_args!("{what}: {e}"))
    }

    /// A parameter that is unknown, missing or of the wrong type.
    pub fn params(message: impl Into<String>) -> Error {
        Error { code: Code::InvalidParams, message: message.into() }
    }

    /// A request that is none.
    pub fn request(message: impl Into<String>) -> Error {
        Error { code: Code::InvalidRequest, message: message.into() }
    }

    /// A fault of this program.
    pub fn internal(message: impl Into<String>) -> Error {
        Error { code: Code::Internal, message: message.into() }
    }

    /// The wrong phase for the method.
    pub fn state(message: impl Into<String>) -> Error {
        Error { code: Code::InvalidState, message: message.into() }
    }
}

impl fmt::Display for Error {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.message)
    }
}

impl std::error::Error for Error {}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_table_agrees_with_the_operating_system() {
        for errno in Errno::ALL {
            let os = std::io::Error::from_raw_os_error(*errno as i32).to_string();
            assert_eq!(os, format!("{} (os error {})", errno.text(), *errno as i32));
        }
    }

    #[test]
    fn operation_errors_are_negated_errnos_with_their_text_in_front() {
        let e = Error::os(Errno::NoDev, "there is no bdev \"m0\"");
        assert_eq!(e.code.number(), -19);
        assert_eq!(e.message, "No such device: there is no bdev \"m0\"");
    }

    #[test]
    fn an_errno_outside_the_table_is_an_input_output_error() {
        assert_eq!(Errno::from_raw(71), Errno::Io);
        assert_eq!(Errno::from_raw(28), Errno::NoSpc);
    }
}
