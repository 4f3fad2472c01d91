//! What a command takes: bdev I/Os, one after the other.

use crate::protect::Protect;
use bdev::{Checks, Op, TUPLE_LEN};

/// What the steps of a job do.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Kind {
    /// One Read or Write between the initiator's buffers and the medium.
    Direct(Op),
    /// As that, with protection information of the initiator's.
    Protected(Op, Protect),
    /// Reads into the bounce buffer with these checks, and that is all.
    Checked(Checks),
    /// Reads through the bounce buffer: the initiator's is longer than the transfer.
    ReadBounced,
    /// Writes through the bounce buffer, for the same reason.
    WriteBounced,
    /// Writes the bounce buffer, which holds copies of one block, again and again.
    Fill,
    /// As that, with this tuple ([`bdev::Tuples::Like`]), of which that was checked.
    FillLike([u8; TUPLE_LEN], Checks),
    /// Unmap or WriteZeroes of one range, in steps.
    Range(Op),
    /// Unmap of `count` ranges out of the parameter list, each in steps.
    UnmapList,
    /// Reads into the bounce buffer and compares.
    Verify(Compare),
    /// Reads all into the bounce buffer and compares it with the first half of the initiator's data;
    /// then it is [`Kind::WriteBounced`] of the second.
    CompareThenWrite,
    /// Reads into the bounce buffer and ORs the initiator's data into it; then it is
    /// [`Kind::OrWrite`] of the same blocks.
    OrRead,
    /// Writes what [`Kind::OrRead`] has made; then it is that again.
    OrWrite,
    /// Nothing but to wait for what the thread has been told to await.
    Settle,
}

/// What VERIFY compares the medium with (BYTCHK, SBC-3 5.29).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Compare {
    /// Nothing: it only has to be readable.
    Nothing,
    /// As many blocks of data.
    Data,
    /// One block of data, with each.
    OneBlock,
}

/// The bdev I/Os of one command, one after the other: `[flush] [step ...] [flush] [verify step ...]`.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Job {
    pub(crate) kind: Kind,
    /// A flush is still to be done before the first step.
    pub(crate) flush_before: bool,
    /// A flush is still to be done after the last step.
    pub(crate) flush_after: bool,
    /// Steps are writes with force unit access.
    pub(crate) fua: bool,
    /// Next (or outstanding) block.
    pub(crate) lba: u64,
    /// Blocks not yet done, the outstanding ones included.
    pub(crate) left: u64,
    /// Blocks of the outstanding step; 0 while a flush is outstanding.
    pub(crate) step: u64,
    /// When all is written, these blocks are verified: those before `lba`, and how.
    pub(crate) verify: Option<(u64, Compare)>,
    /// Bytes of the initiator's buffers that were used.
    pub(crate) moved: u32,
    /// [`Kind::UnmapList`]: descriptors done, and in all.
    pub(crate) index: u16,
    pub(crate) count: u16,
    /// The task owns the unit's bounce buffer.
    pub(crate) bounce: bool,
    /// The task owns the volume's [`crate::volume::Exclusive`].
    pub(crate) exclusive: bool,
    /// From the task's next turn on it cannot be done a second time: it changes what it goes by.
    pub(crate) unrepeatable: bool,
}

impl Job {
    /// Nothing to do.
    pub(crate) const IDLE: Job = Job {
        kind: Kind::Direct(Op::Read),
        flush_before: false,
        flush_after: false,
        fua: false,
        lba: 0,
        left: 0,
        step: 0,
        verify: None,
        moved: 0,
        index: 0,
        count: 0,
        bounce: false,
        exclusive: false,
        unrepeatable: false,
    };

    /// Whether nothing is left to be done or waited for, when a step has ended.
    #[inline]
    pub(crate) fn is_over(&self) -> bool {
        self.left == 0
            && !self.flush_after
            && self.verify.is_none()
            && !matches!(self.kind, Kind::UnmapList | Kind::Settle)
    }
}
