//! libiscsi as it is called here: types, functions, and how they are found at run time.
//!
//! Declared after `iscsi/iscsi.h` and `iscsi/scsi-lowlevel.h` of libiscsi 1.19, whose soname the file has. The
//! program is not linked with it, so that it starts without. All `unsafe` calls of it are in `session`.

use libc::{c_char, c_int, c_uchar, c_void, size_t};
use std::ffi::CStr;
use std::sync::OnceLock;

/// `struct iscsi_context`: a session, used by one thread.
pub(crate) type Context = *mut c_void;
/// `iscsi_command_cb`: called within [`Library::iscsi_service`] when something has ended.
pub(crate) type Ended = extern "C" fn(Context, c_int, *mut c_void, *mut c_void);

/// `ISCSI_SESSION_NORMAL`.
pub(crate) const SESSION_NORMAL: c_int = 2;
/// `SCSI_STATUS_ERROR`, `_CANCELLED` and `_TIMEOUT` are that or more: there was no answer.
pub(crate) const STATUS_NO_ANSWER: c_int = 0x0f00_0000;
/// `SCSI_XFER_NONE`, `_READ`, `_WRITE`.
pub(crate) const XFER: [c_int; 3] = [0, 1, 2];

/// The beginning of `struct scsi_task`: what is read of it.
#[repr(C)]
pub(crate) struct Task {
    status: c_int,
    cdb_size: c_int,
    /// One of [`XFER`].
    pub xfer_dir: c_int,
    /// Bytes that were to go over.
    pub expxferlen: c_int,
    pub cdb: [c_uchar; 16],
    /// `enum scsi_residual`: 1, fewer bytes went over than were asked for; 2, more would have.
    pub residual_status: c_int,
    pub residual: size_t,
    /// `struct scsi_sense`: also what the library makes of an answer without one.
    sense: [c_int; 4],
    /// `struct scsi_data`: what came with CHECK CONDITION, two bytes of length and sense data.
    pub datain_len: c_int,
    pub datain: *mut c_uchar,
}

/// Why the library cannot be used.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum LibraryError {
    /// There is no such library, or it cannot be loaded.
    #[error(
        "LUNs of iSCSI targets need {LIBRARY}, which cannot be loaded ({0}): install Debian's package \
         {PACKAGE}"
    )]
    Missing(String),
    /// It lacks a function that is called.
    #[error("{LIBRARY} has no {0}: install Debian's package {PACKAGE} of libiscsi 1.19")]
    Older(&'static str),
    /// Nobody asked for it when the process began.
    #[error("this target is no iSCSI initiator: start it with --iscsi")]
    NotLoaded,
}

const LIBRARY: &str = "libiscsi.so.7";
const PACKAGE: &str = "libiscsi7";

fn open(library: &CStr) -> Result<*mut c_void, LibraryError> {
    // SAFETY: a zero-terminated name; the library's constructors run, as they do in every program that is
    // linked with it.
    let handle = unsafe { libc::dlopen(library.as_ptr(), libc::RTLD_NOW | libc::RTLD_LOCAL) };
    if !handle.is_null() {
        return Ok(handle);
    }
    // SAFETY: no arguments; the text is this thread's until its next call.
    let text = unsafe { libc::dlerror() };
    if text.is_null() {
        return Err(LibraryError::Missing("no reason given".to_owned()));
    }
    // SAFETY: a zero-terminated text, copied at once.
    let why = unsafe { CStr::from_ptr(text) }.to_string_lossy().into_owned();
    Err(LibraryError::Missing(why))
}

fn symbol(handle: *mut c_void, name: &'static CStr) -> Result<*mut c_void, LibraryError> {
    // SAFETY: a handle of dlopen that is never closed, and a zero-terminated name.
    let found = unsafe { libc::dlsym(handle, name.as_ptr()) };
    match found.is_null() {
        false => Ok(found),
        true => Err(LibraryError::Older(name.to_str().unwrap_or_default())),
    }
}

/// Declares the functions, and how each is found.
macro_rules! functions {
    ($($name:ident($($arg:ty),*) $(-> $result:ty)?;)*) => {
        /// The functions of the library.
        #[allow(missing_docs, reason = "they are libiscsi's")]
        pub struct Library {
            $(pub(crate) $name: unsafe extern "C" fn($($arg),*) $(-> $result)?,)*
        }

        impl Library {
            fn find() -> Result<Library, LibraryError> {
                let handle = open(c"libiscsi.so.7")?;
                Ok(Library {
                    $($name: {
                        const NAME: &CStr =
                            match CStr::from_bytes_with_nul(concat!(stringify!($name), "\0").as_bytes()) {
                                Ok(name) => name,
                                Err(_) => panic!("a name has no zero byte"),
                            };
                        let found = symbol(handle, NAME)?;
                        // SAFETY: the function of that name, whose type is declared after the header.
                        unsafe {
                            std::mem::transmute::<
                                *mut c_void,
                                unsafe extern "C" fn($($arg),*) $(-> $result)?,
                            >(found)
                        }
                    },)*
                })
            }
        }
    };
}

functions! {
    iscsi_create_context(*const c_char) -> Context;
    iscsi_destroy_context(Context) -> c_int;
    iscsi_get_error(Context) -> *const c_char;
    iscsi_set_targetname(Context, *const c_char) -> c_int;
    iscsi_set_session_type(Context, c_int) -> c_int;
    iscsi_set_isid_random(Context, u32, u32) -> c_int;
    iscsi_set_initiator_username_pwd(Context, *const c_char, *const c_char) -> c_int;
    iscsi_set_target_username_pwd(Context, *const c_char, *const c_char) -> c_int;
    iscsi_set_noautoreconnect(Context, c_int);
    iscsi_set_tcp_user_timeout(Context, c_int);
    iscsi_set_tcp_keepidle(Context, c_int);
    iscsi_set_tcp_keepcnt(Context, c_int);
    iscsi_set_tcp_keepintvl(Context, c_int);
    iscsi_full_connect_async(Context, *const c_char, c_int, Ended, *mut c_void) -> c_int;
    iscsi_logout_async(Context, Ended, *mut c_void) -> c_int;
    iscsi_get_fd(Context) -> c_int;
    iscsi_which_events(Context) -> c_int;
    iscsi_service(Context, c_int) -> c_int;
    iscsi_scsi_command_async(Context, c_int, *mut Task, Ended, *mut c_void, *mut c_void) -> c_int;
    scsi_create_task(c_int, *mut c_uchar, c_int, c_int) -> *mut Task;
    scsi_free_scsi_task(*mut Task);
    scsi_task_set_iov_in(*mut Task, *mut libc::iovec, c_int);
    scsi_task_set_iov_out(*mut Task, *mut libc::iovec, c_int);
}

static LOADED: OnceLock<Result<Library, LibraryError>> = OnceLock::new();

impl Library {
    /// Loads the library, once. To be called before the process confines itself, as the dynamic linker makes
    /// memory executable.
    ///
    /// # Errors
    /// It is missing, or is another one.
    pub fn load() -> Result<&'static Library, LibraryError> {
        LOADED.get_or_init(Library::find).as_ref().map_err(Clone::clone)
    }

    /// The library, if [`Library::load`] was called.
    ///
    /// # Errors
    /// As there; or it was not.
    pub fn loaded() -> Result<&'static Library, LibraryError> {
        match LOADED.get() {
            Some(loaded) => loaded.as_ref().map_err(Clone::clone),
            None => Err(LibraryError::NotLoaded),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_library_that_is_missing_is_named_with_its_package() {
        let missing = open(c"libiscsi.so.999").unwrap_err().to_string();
        assert!(missing.starts_with("LUNs of iSCSI targets need libiscsi.so.7, which cannot be"));
        assert!(missing.ends_with("): install Debian's package libiscsi7"), "{missing}");
    }

    #[test]
    fn a_library_that_lacks_a_function_is_another_one() {
        let libc = open(c"libc.so.6").unwrap();
        assert!(symbol(libc, c"getpid").is_ok());
        let older = symbol(libc, c"iscsi_service").unwrap_err().to_string();
        assert!(older.starts_with("libiscsi.so.7 has no iscsi_service: install"), "{older}");
    }

    #[test]
    fn what_nobody_loaded_is_said_to_need_an_option() {
        // Another test of this process may have loaded it.
        if LOADED.get().is_none() {
            let why = Library::loaded().err().unwrap().to_string();
            assert_eq!(why, "this target is no iSCSI initiator: start it with --iscsi");
        }
    }
}
