//! What the bytes of a request mean: the one part of the I/O path that virtio-scsi and virtio-blk do
//! not share.
//!
//! A front end reads a request out of the chain in its slot and says which unit it is for, and writes the
//! response when it ended. Rings, order, room, what is in flight, migration and every end of a session are
//! the poller's, whoever the guest's driver is. The poller is compiled once for each front end, so that
//! none costs the other anything.

mod blk;
mod scsi;

use ::scsi::Outcome;
use virtqueue::Segments;

use super::DevicePoller;
use super::slot::Slot;

pub(super) use blk::Blk;
pub(super) use scsi::{ProtectedScsi, Scsi};

/// What a chain is.
pub(super) enum Read {
    /// A request for a unit, which is in its slot.
    Request,
    /// One that ends at once; `Err`: with a response code of virtio-scsi's.
    End(Result<Outcome, u8>),
    /// Too short to be one.
    Nothing,
}

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

    /// Reads the request of slot `index`, whose chain was walked: what it asks, of which unit, how it is to be
    /// ordered, its data and their length.
    fn read(poller: &mut DevicePoller, index: u16) -> Read;

    /// Writes the response of a request that ended so; `stopping`: its queue is.
    fn answer(slot: &mut Slot, end: Result<Outcome, u8>, stopping: bool) -> Answer;

    /// How the request of slot `index` ends that [cannot be done a second time](Task::is_unrepeatable) and had begun in
    /// another process; `None`: there are none such.
    fn interrupted(poller: &mut DevicePoller, index: u16) -> Option<Outcome>;

    /// Answers a chain that is too short to be a request. Returns how many bytes were written.
    fn refuse(segments: &Segments) -> u32;
}
