//! What becomes of a command whose I/O failed: the initiator is told, or it waits.
//!
//! The words are libvirt's (`error_policy`, `rerror_policy`) and QEMU's (`werror`, `rerror`). A command
//! that waits is not answered: whoever runs the guest makes room or mends the disk, and then it begins
//! again. That is only for causes that can go away; what the command itself is wrong about is told
//! always.

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
    /// Whatever can be mended: room, the medium, a flush, resources.
    Repair,
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
    /// Whether a command waits whose I/O failed so; `writes`: that I/O was no read.
    pub(crate) const fn waits(self, writes: bool, error: IoError) -> bool {
        let wait_for = if writes { self.write } else { self.read };
        match error {
            IoError::NoSpace => !matches!(wait_for, WaitFor::Nothing),
            IoError::ReadMedium | IoError::WriteMedium | IoError::Flush | IoError::Resources => {
                matches!(wait_for, WaitFor::Repair)
            }
            // What was asked for is wrong, or is not to be done.
            IoError::OutOfRange
            | IoError::BadLength
            | IoError::ReadOnly
            | IoError::Unsupported
            | IoError::Removed
            | IoError::Aborted => false,
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
        let waiting = |policy: ErrorPolicy, writes| {
            IoError::ALL.into_iter().filter(|e| policy.waits(writes, *e)).collect::<Vec<_>>()
        };
        let mendable = [
            IoError::NoSpace,
            IoError::ReadMedium,
            IoError::WriteMedium,
            IoError::Flush,
            IoError::Resources,
        ];
        assert!(waiting(ErrorPolicy::default(), true).is_empty());
        let policy = of(WaitFor::Room, WaitFor::Repair);
        assert_eq!(waiting(policy, true), [IoError::NoSpace]);
        assert_eq!(waiting(policy, false), mendable);
        let policy = of(WaitFor::Repair, WaitFor::Nothing);
        assert_eq!(waiting(policy, true), mendable);
        assert!(waiting(policy, false).is_empty());
    }
}
