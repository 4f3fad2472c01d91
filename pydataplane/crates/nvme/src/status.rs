//! What becomes of a command that a controller has answered.

use bdev::{IoError, Op};

use crate::wire::Completion;

/// Do Not Retry.
const DNR: u16 = 1 << 14;

/// What is to be done then.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Verdict {
    Done,
    /// Send it again in a moment: it was not carried out, or may be once more.
    Later,
    /// It was not carried out, as the namespace cannot be reached by this controller now: send it by another.
    Elsewhere,
    Failed(IoError),
}

impl Completion {
    /// Whether it succeeded.
    pub(crate) fn is_good(&self) -> bool {
        self.code() == 0
    }

    /// Type (three bits) and code (eight).
    pub(crate) fn code(&self) -> u16 {
        self.status & 0x7FF
    }

    /// Whether it is a command that the controller does not have: invalid opcode or field, which no repetition changes.
    pub(crate) fn is_unknown(&self) -> bool {
        matches!(self.code(), 0x001 | 0x002) && self.status & DNR != 0
    }

    /// Whether there is no such namespace.
    pub(crate) fn is_of_none(&self) -> bool {
        self.code() == 0x00B
    }

    /// Whether it is for the path that the command went by (status code type 3h): another may do.
    pub(crate) fn is_of_path(&self) -> bool {
        self.code() >> 8 == 3
    }

    /// Whether one of two fused commands was not carried out for the other.
    pub(crate) fn is_of_other(&self) -> bool {
        matches!(self.code(), 0x009 | 0x00A)
    }

    /// Of a command of `op` (base specification 2.1, 4.2.3; NVM command set specification 1.1, 3.1).
    pub(crate) fn verdict(&self, op: Op) -> Verdict {
        use Verdict::{Done, Elsewhere, Failed, Later};
        let (code, may_retry) = (self.code(), self.status & DNR == 0);
        let error = match code {
            0 => return Done,
            // ANA: persistent loss, inaccessible, transition; an internal or other error of the path.
            0x300..=0x303 | 0x360 | 0x370 => return Elsewhere,
            // Interrupted, transport error, not ready, sanitize or format under way: later is better. Data transfer
            // error, internal error, aborted.
            0x004 | 0x006..=0x008 | 0x01D | 0x021 | 0x022 | 0x082 | 0x084 if may_retry => {
                return Later;
            }
            // Invalid namespace.
            0x00B => IoError::Removed,
            // Write protected.
            0x020 if op.is_write() => IoError::ReadOnly,
            0x080 => IoError::OutOfRange,
            0x081 if op.is_write() => IoError::NoSpace,
            0x083 => IoError::Reserved,
            0x182 if op.is_write() => IoError::ReadOnly,
            0x285 => IoError::Miscompare,
            // Invalid opcode or field.
            0x001 | 0x002 if op.is_write() => IoError::Unsupported,
            _ => op.failed(),
        };
        match op {
            Op::Flush => Failed(IoError::Flush),
            _ => Failed(error),
        }
    }
}

/// A status in words, for logs.
pub(crate) fn words(completion: &Completion) -> String {
    let code = completion.code();
    let what = match code {
        0x002 => "invalid field",
        0x00B => "invalid namespace",
        0x180 => "incompatible format",
        0x181 => "the controller is busy",
        0x182 => "invalid parameters: has the subsystem that name, and may this host connect?",
        0x183 => "the controller is to be connected anew elsewhere",
        0x184 => "the controller does not let this host in",
        0x191 => "authentication is required, which is not supported",
        _ => return format!("status {code:#05x}"),
    };
    format!("{what} (status {code:#05x})")
}

#[cfg(test)]
mod tests {
    use super::*;

    fn of(status: u16) -> Completion {
        Completion { result: 0, status }
    }

    #[test]
    fn no_status_but_0_is_a_success_and_a_flush_fails_as_one() {
        for op in Op::ALL {
            for code in 1..0x800 {
                for dnr in [0, DNR] {
                    match of(code | dnr).verdict(op) {
                        Verdict::Done => panic!("{code:#x} is a success"),
                        Verdict::Failed(e) => {
                            assert_eq!(e == IoError::Flush, op == Op::Flush, "{code:#x}");
                        }
                        Verdict::Later => assert_eq!(dnr, 0),
                        Verdict::Elsewhere => assert_eq!(code >> 8, 3),
                    }
                }
            }
            assert_eq!(of(DNR).verdict(op), Verdict::Done);
        }
        assert_eq!(of(0x281).verdict(Op::Read), Verdict::Failed(IoError::ReadMedium));
        assert_eq!(of(0x083).verdict(Op::Write), Verdict::Failed(IoError::Reserved));
    }

    #[test]
    fn a_refused_connection_is_told_in_words() {
        assert!(words(&of(0x184)).contains("does not let this host in"));
        assert_eq!(words(&of(0x7FF)), "status 0x7ff");
    }
}
