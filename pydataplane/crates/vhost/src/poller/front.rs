//! What the bytes of a request mean: the one part of the I/O path that virtio-scsi and virtio-blk do
//! not share.
//!
//! A front end reads a request out of the chain in its slot and says which unit it is for, and writes the
//! response when it ended. Rings, order, room, what is in flight, migration and every end of a session are
//! the poller's, whoever the guest's driver is. The poller is compiled once for each front end, so that
//! none costs the other anything.

mod blk;
mod scsi;

use ::scsi::{Lun, Outcome, Task};
use virtqueue::Segments;

use super::DevicePoller;
use super::slot::Slot;

pub(super) use blk::Blk;
pub(super) use scsi::{ProtectedScsi, Scsi};

/// How a request was answered.
pub(super) struct Answer {
    /// As it was meant to.
    pub(super) is_good: bool,
    /// Bytes of data that were moved.
    pub(super) transferred: u32,
    /// Bytes of the chain that count as written.
    pub(super) used: u32,
}

/// A front end.
pub(super) trait FrontEnd {
    /// What a device does not take for now (TASK SET FULL, BUSY) is not told, but waits: its driver has
    /// no status for that.
    const WAITS_FOR_DEVICE: bool;

    /// Begins the request of slot `index`, whose chain was walked: header, unit. Whether it ended.
    fn begin(poller: &mut DevicePoller, at: usize, index: u16, now: u64) -> bool;

    /// Gives a request with that task attribute to its unit.
    fn start(lun: &mut Lun, task: &mut Task, attribute: u8) -> Outcome;

    /// Writes the response of a request that ended so; `stopping`: its queue is.
    fn answer(slot: &mut Slot, end: Result<Outcome, u8>, stopping: bool) -> Answer;

    /// Answers a chain that is too short to be a request. Returns how many bytes were written.
    fn refuse(segments: &Segments) -> u32;
}
