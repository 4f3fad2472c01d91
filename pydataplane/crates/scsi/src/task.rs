//! One command in flight.

use guestmem::Sg;

/// Longest CDB that virtio-scsi carries, in bytes (virtio 1.2 5.6.4, cdb_size default).
pub const CDB_LEN: usize = 32;

/// One command in flight. The transport embeds it in its preallocated request slot, calls
/// [`Task::prepare`] for each new command and leaves the rest to [`crate::Lun`].
pub struct Task {
    pub(crate) tag: u64,
    pub(crate) cdb: [u8; CDB_LEN],
    pub(crate) data_out: Sg,
    pub(crate) data_in: Sg,
    pub(crate) aborted: bool,
}

impl Task {
    /// A task for the slot named `tag`: unique in flight on the channel, given to the bdev as
    /// [`bdev::Io::tag`] and so back in [`bdev::Completion::tag`].
    pub const fn new(tag: u64) -> Self {
        Task { tag, cdb: [0; CDB_LEN], data_out: Sg::EMPTY, data_in: Sg::EMPTY, aborted: false }
    }

    /// Makes this the task of a new command: the CDB (copied once out of guest memory, padded
    /// with zeros), the data from the initiator and the space for data to it. Both lists stay
    /// valid until the task is done.
    #[inline]
    pub fn prepare(&mut self, cdb: &[u8; CDB_LEN], data_out: Sg, data_in: Sg) {
        self.cdb = *cdb;
        self.data_out = data_out;
        self.data_in = data_in;
        self.aborted = false;
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
}
