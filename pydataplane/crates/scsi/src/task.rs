//! One command in flight.

use bdev::Op;
use guestmem::Sg;

/// Longest CDB that virtio-scsi carries, in bytes (virtio 1.2 5.6.4, cdb_size default).
pub const CDB_LEN: usize = 32;

/// One command in flight. The transport embeds it in its preallocated request slot, calls
/// [`Task::prepare`] for each new command and leaves the rest to [`crate::Lun`].
pub struct Task {
    pub(crate) tag: u64,
    pub(crate) cdb: Cdb,
    pub(crate) data_out: Sg,
    pub(crate) data_in: Sg,
    pub(crate) job: Job,
    /// Value of the unit's reset count when the command started.
    pub(crate) epoch: u32,
    pub(crate) aborted: bool,
    /// No further step starts.
    pub(crate) stopped: bool,
}

impl Task {
    /// A task for the slot named `tag`: unique in flight on the channel, given to the bdev as
    /// [`bdev::Io::tag`] and so back in [`bdev::Completion::tag`].
    pub const fn new(tag: u64) -> Self {
        Task {
            tag,
            cdb: Cdb([0; CDB_LEN]),
            data_out: Sg::EMPTY,
            data_in: Sg::EMPTY,
            job: Job::IDLE,
            epoch: 0,
            aborted: false,
            stopped: false,
        }
    }

    /// Makes this the task of a new command: the CDB (copied once out of guest memory, padded
    /// with zeros), the data from the initiator and the space for data to it. Both lists stay
    /// valid until the task is done.
    #[inline]
    pub fn prepare(&mut self, cdb: &[u8; CDB_LEN], data_out: Sg, data_in: Sg) {
        self.cdb = Cdb(*cdb);
        self.data_out = data_out;
        self.data_in = data_in;
        self.aborted = false;
        self.stopped = false;
    }

    /// The name given with [`Task::new`].
    #[inline]
    pub fn tag(&self) -> u64 {
        self.tag
    }

    /// Marks the task as ended by a task management function (ABORT TASK, ABORT TASK SET): its
    /// outstanding I/O is still waited for, no further step starts, and it ends as
    /// [`crate::Status::TaskAborted`].
    pub fn abort(&mut self) {
        self.aborted = true;
    }

    /// Whether [`Task::abort`] was called for the present command.
    pub fn is_aborted(&self) -> bool {
        self.aborted
    }

    /// Starts no further step: a task whose outstanding I/O is its last one ends as that does, any
    /// other as [`crate::Status::TaskAborted`], for the transport to do it again later.
    pub fn stop(&mut self) {
        self.stopped = true;
    }
}

/// A CDB with its big-endian fields.
#[derive(Clone, Copy)]
pub(crate) struct Cdb(pub(crate) [u8; CDB_LEN]);

impl Cdb {
    #[inline]
    pub(crate) fn byte(&self, at: usize) -> u8 {
        self.0[at]
    }

    #[inline]
    pub(crate) fn bit(&self, at: usize, bit: u8) -> bool {
        self.0[at] & (1 << bit) != 0
    }

    #[inline]
    pub(crate) fn be16(&self, at: usize) -> u16 {
        u16::from_be_bytes([self.0[at], self.0[at + 1]])
    }

    #[inline]
    pub(crate) fn be32(&self, at: usize) -> u32 {
        u32::from_be_bytes([self.0[at], self.0[at + 1], self.0[at + 2], self.0[at + 3]])
    }

    #[inline]
    pub(crate) fn be64(&self, at: usize) -> u64 {
        u64::from_be_bytes(*self.0[at..].first_chunk().expect("a field lies in the CDB"))
    }
}

/// What the steps of a job do.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Kind {
    /// One Read or Write between the initiator's buffers and the medium.
    Direct(Op),
    /// Reads through the bounce buffer: the initiator's is longer than the transfer.
    ReadBounced,
    /// Writes through the bounce buffer, for the same reason.
    WriteBounced,
    /// Writes the bounce buffer, which holds copies of one block, again and again.
    Fill,
    /// Unmap or WriteZeroes of one range, in steps.
    Range(Op),
    /// Unmap of `count` ranges out of the parameter list, each in steps.
    UnmapList,
    /// Reads into the bounce buffer and compares.
    Verify(Compare),
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

/// The bdev I/Os of one command, one after the other: `[flush] [step ...] [flush]`.
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
    /// Bytes of the initiator's buffers that were used.
    pub(crate) moved: u32,
    /// [`Kind::UnmapList`]: descriptors done, and in all.
    pub(crate) index: u16,
    pub(crate) count: u16,
    /// The task owns the unit's bounce buffer.
    pub(crate) bounce: bool,
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
        moved: 0,
        index: 0,
        count: 0,
        bounce: false,
    };

    /// `kind` on `left` blocks from `lba`.
    #[inline]
    pub(crate) const fn new(kind: Kind, lba: u64, left: u64) -> Job {
        Job { kind, lba, left, ..Job::IDLE }
    }
}
