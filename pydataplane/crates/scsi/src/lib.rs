//! A SCSI direct-access disk on a bdev channel.
//!
//! Owns: command decoding, INQUIRY and VPD pages, mode pages, sense data, unit attentions and the
//! one table from [`bdev::IoError`] to sense. Never knows vhost or virtqueues; works for any
//! transport that gives it a CDB and two scatter-gather lists.

#![forbid(unsafe_code)]

use bdev::{Channel, Completion, IoError};
use guestmem::Sg;

/// Longest CDB that virtio-scsi carries, in bytes (virtio 1.2 5.6.4, cdb_size default).
pub const CDB_LEN: usize = 32;
/// Fixed-format sense data with 18 bytes (SPC-4 4.5.3).
pub const SENSE_LEN: usize = 18;

/// SCSI status (SAM-5 5.3.1).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
pub enum Status {
    /// The command succeeded.
    Good = 0x00,
    /// Sense data says what happened.
    CheckCondition = 0x02,
    /// Try again later.
    Busy = 0x08,
    /// Another initiator holds a reservation.
    ReservationConflict = 0x18,
    /// Too many commands: try again when some finished.
    TaskSetFull = 0x28,
    /// Ended by a task management function.
    TaskAborted = 0x40,
}

/// The end of a command.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Response {
    /// SCSI status.
    pub status: Status,
    /// Bytes moved to or from the data buffers (the transport derives the residual).
    pub transferred: u32,
    /// Valid bytes of `sense`: 0 or [`SENSE_LEN`].
    pub sense_len: u8,
    /// Fixed-format sense data.
    pub sense: [u8; SENSE_LEN],
}

/// One command in flight. The transport embeds it in its preallocated request slot, fills the
/// public fields and leaves the rest to [`Lun`].
pub struct Task {
    /// Name of this task, unique in flight on the channel; given to the bdev as [`bdev::Io::tag`].
    pub tag: u64,
    /// The CDB, copied once out of guest memory.
    pub cdb: [u8; CDB_LEN],
    /// Data from the initiator.
    pub data_out: Sg,
    /// Space for data to the initiator.
    pub data_in: Sg,
}

/// What [`Lun::start`] or [`Lun::resume`] did.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[must_use]
pub enum Outcome {
    /// The command is over.
    Done(Response),
    /// A completion with the task's tag follows from [`Lun::poll`]; give it to [`Lun::resume`].
    Pending,
}

/// A logical unit as one thread sees it: shared identity and attentions, and a channel of its own.
pub struct Lun {}

impl Lun {
    /// Starts `task`. Never blocks or allocates.
    pub fn start(&mut self, _task: &mut Task) -> Outcome {
        todo!()
    }
    /// Collects the channel's completions; each names a task by its tag.
    pub fn poll(&mut self, _done: &mut Vec<Completion>) -> u32 {
        todo!()
    }
    /// Goes on with `task` after its I/O ended: answers, or starts the next step.
    pub fn resume(&mut self, _task: &mut Task, _result: Result<(), IoError>) -> Outcome {
        todo!()
    }
}

fn _uses(_: Box<dyn Channel>) {}
