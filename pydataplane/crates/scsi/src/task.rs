//! One command in flight, as the transport holds it.

use crate::job::Job;
use crate::opcode::{CDB_LEN, Cdb};
use crate::shared::LunShared;
use bdev::Op;
use guestmem::Sg;

/// What a transport without CDBs, such as virtio-blk, asks of a unit: any range is checked here.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Plain {
    /// What to do.
    pub op: Op,
    /// It is durable when it ends.
    pub durable: bool,
    /// First block, in the unit's blocks.
    pub lba: u64,
    /// Blocks. The data of a read or write is as long.
    pub blocks: u64,
}

/// What is left of a [`Plain`] that was begun.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Rest {
    /// Next block.
    pub(crate) lba: u64,
    /// Blocks not yet done.
    pub(crate) left: u64,
    /// Bytes of the initiator's buffers that were used.
    pub(crate) moved: u32,
    /// A flush is owed for what was done, whatever the unit's bdev is by the time it goes on.
    pub(crate) flush: bool,
}

/// One command in flight. The transport embeds it in its preallocated request slot, calls
/// [`Task::prepare`] for each new command and leaves the rest to [`crate::Lun`].
pub struct Task {
    pub(crate) tag: u64,
    pub(crate) cdb: Cdb,
    /// What it is instead of a CDB.
    pub(crate) plain: Option<Plain>,
    /// Where it goes on when it is started again, as it ended for want of room in the midst of its steps.
    pub(crate) rest: Option<Rest>,
    pub(crate) data_out: Sg,
    pub(crate) data_in: Sg,
    /// Protection information in lists of its own; empty where the transport has none.
    pub(crate) tuples_out: Sg,
    pub(crate) tuples_in: Sg,
    pub(crate) job: Job,
    /// Value of the unit's reset count when the command started.
    pub(crate) epoch: u32,
    /// Where it is counted as under way (`watch`).
    pub(crate) side: u32,
    /// It is not waited for there.
    pub(crate) waits: bool,
    pub(crate) aborted: bool,
    /// No further step starts.
    pub(crate) stopped: bool,
    /// It was received, or began ([`Outcome::Suspended`]), and waits to begin.
    pub(crate) suspended: bool,
}

impl Task {
    /// A task for the slot named `tag`: unique in flight on the channel, given to the bdev as
    /// [`bdev::Io::tag`] and so back in [`bdev::Completion::tag`].
    pub const fn new(tag: u64) -> Self {
        Task {
            tag,
            cdb: Cdb([0; CDB_LEN]),
            plain: None,
            rest: None,
            data_out: Sg::EMPTY,
            data_in: Sg::EMPTY,
            tuples_out: Sg::EMPTY,
            tuples_in: Sg::EMPTY,
            job: Job::IDLE,
            epoch: 0,
            side: 0,
            waits: false,
            aborted: false,
            stopped: false,
            suspended: false,
        }
    }

    /// Makes this the task of a new command: the CDB (copied once out of guest memory, padded
    /// with zeros), the data from the initiator and the space for data to it. Both lists stay
    /// valid until the task is done.
    #[inline]
    pub fn prepare(&mut self, cdb: &[u8; CDB_LEN], data_out: Sg, data_in: Sg) {
        self.cdb = Cdb(*cdb);
        self.plain = None;
        self.data_out = data_out;
        self.data_in = data_in;
        self.aborted = false;
        self.stopped = false;
        self.suspended = false;
    }

    /// Protection information from the initiator and space for some, in lists of their own, after
    /// [`Task::prepare`]; until they are given again. They stay valid as those do.
    #[inline]
    pub fn set_tuples(&mut self, out: Sg, into: Sg) {
        self.tuples_out = out;
        self.tuples_in = into;
    }

    /// Bytes of the lists of [`Task::set_tuples`].
    #[inline]
    pub fn tuples(&self) -> (usize, usize) {
        (self.tuples_out.len(), self.tuples_in.len())
    }

    /// As [`Task::prepare`], for a transport without CDBs.
    #[inline]
    pub fn prepare_plain(&mut self, plain: Plain, data_out: Sg, data_in: Sg) {
        self.plain = Some(plain);
        self.rest = None;
        self.data_out = data_out;
        self.data_in = data_in;
        self.aborted = false;
        self.stopped = false;
        self.suspended = false;
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

    /// Whether it cannot be done a second time: COMPARE AND WRITE would find what it has written itself, a copy onto
    /// its own source would copy what it has copied. So it is before its first change, when [`crate::Lun::resume`]
    /// says that it is pending: a transport that has requests done again after a crash notes that then
    /// ([`crate::interrupted`]).
    pub fn is_unrepeatable(&self) -> bool {
        self.job.unrepeatable
    }

    /// Starts no further step: a task whose outstanding I/O is its last one ends as that does, any
    /// other as [`crate::Status::TaskAborted`], for the transport to do it again later. One that
    /// [cannot be](Task::is_unrepeatable) goes on to its end if that is soon (COMPARE AND WRITE), or is told
    /// (COPY ABORTED).
    pub fn stop(&mut self) {
        self.stopped = true;
    }

    /// It has ended, is not answered, and waits to begin again, as after [`crate::Outcome::Suspended`]: all
    /// of it may be done twice.
    pub fn suspend(&mut self) {
        self.suspended = true;
    }

    /// It was received by `unit` and waits to begin: what ends the unit's tasks until then ends it, too.
    pub fn wait(&mut self, unit: &LunShared) {
        (self.suspended, self.epoch) = (true, unit.epoch());
    }

    /// Whether the tasks of `unit` were ended since it began, or since [`Task::wait`]: by a reset, by PREEMPT AND ABORT
    /// or by SANITIZE.
    pub fn is_reset(&self, unit: &LunShared) -> bool {
        self.epoch != unit.epoch()
    }

    /// Undoes [`Task::stop`], for one that has not ended yet. A copy that is to end for that does all the same: as
    /// [`crate::Status::Busy`], or as is said there.
    pub fn go_on(&mut self) {
        self.stopped = false;
    }
}
