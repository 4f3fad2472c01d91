//! What becomes of a command whose I/O failed: the initiator is told, or it waits.
//!
//! The words are libvirt's (`error_policy`, `rerror_policy`) and QEMU's (`werror`, `rerror`). A command
//! that waits is not answered: whoever runs the guest makes room or mends the disk, and then it begins
//! again. That is only for causes that can go away; what the command itself is wrong about is told
//! always.
//!
//! So is a flush that failed. What it was to make durable was acknowledged before and may be lost, and no
//! second flush brings it back: one that succeeds, once an administrator has let flushes through again,
//! would tell the guest that all is well.

use bdev::IoError;

use crate::response::{Outcome, Response};
use crate::sense::of_io_error;

/// For which errors a command waits.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum WaitFor {
    /// None: each is told to the initiator.
    #[default]
    Nothing,
    /// Want of room in a thin volume, or in the file system below it.
    Room,
    /// Whatever can be mended: room, the medium, resources.
    Repair,
}

/// What an I/O that failed was to do.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Failed {
    /// A read.
    Read,
    /// A change of blocks, whatever it makes of them.
    Write,
    /// A flush.
    Flush,
}

/// For which errors commands of a unit wait.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct ErrorPolicy {
    /// Those that write, flushes among them.
    pub write: WaitFor,
    /// Those that read.
    pub read: WaitFor,
}

impl ErrorPolicy {
    /// Whether a command waits whose I/O, `failed`, ended as `error`.
    pub(crate) const fn waits(self, failed: Failed, error: IoError) -> bool {
        let wait_for = if matches!(failed, Failed::Read) { self.read } else { self.write };
        match error {
            IoError::NoSpace => !matches!(wait_for, WaitFor::Nothing),
            IoError::Resources => matches!(wait_for, WaitFor::Repair),
            IoError::ReadMedium | IoError::WriteMedium => {
                matches!(wait_for, WaitFor::Repair) && !matches!(failed, Failed::Flush)
            }
            // Also of a write that was to be durable: what others had written before may be lost.
            IoError::Flush => false,
            // The initiator's own data may be what is wrong, and it can tell.
            IoError::Guard | IoError::AppTag | IoError::RefTag | IoError::Miscompare => false,
            // What was asked for is wrong, or is not to be done.
            IoError::OutOfRange
            | IoError::BadLength
            | IoError::ReadOnly
            | IoError::Unsupported
            | IoError::Removed
            | IoError::Aborted
            | IoError::Reserved => false,
        }
    }
}

/// How a command ends that was to wait ([`Outcome::Suspended`]), where it cannot.
#[cold]
pub fn told(error: IoError) -> Outcome {
    Outcome::Done(Response::check(of_io_error(error)))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_what_can_be_mended_is_waited_for() {
        let of = |write, read| ErrorPolicy { write, read };
        let waiting = |policy: ErrorPolicy, failed| {
            IoError::ALL.into_iter().filter(|e| policy.waits(failed, *e)).collect::<Vec<_>>()
        };
        let mendable =
            [IoError::NoSpace, IoError::ReadMedium, IoError::WriteMedium, IoError::Resources];
        assert!(waiting(ErrorPolicy::default(), Failed::Write).is_empty());
        let policy = of(WaitFor::Room, WaitFor::Repair);
        assert_eq!(waiting(policy, Failed::Write), [IoError::NoSpace]);
        assert_eq!(waiting(policy, Failed::Read), mendable);
        let policy = of(WaitFor::Repair, WaitFor::Nothing);
        assert_eq!(waiting(policy, Failed::Write), mendable);
        assert_eq!(waiting(policy, Failed::Flush), [IoError::NoSpace, IoError::Resources]);
        assert!(waiting(policy, Failed::Read).is_empty());
    }
}
