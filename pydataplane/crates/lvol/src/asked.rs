//! What a channel asks of the metadata thread, and what the two share.

use bdev::IoError;
use crossbeam_queue::ArrayQueue;
use reactor::Waker;
use std::sync::Arc;
use std::sync::atomic::AtomicU64;

/// I/Os that a channel can have under way, and so the length of its request queue.
pub(crate) const SLOTS: usize = 256;

/// What a channel asks of the metadata thread.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Want {
    /// Clusters to write to.
    Allocate,
    /// Clusters that are not needed any more.
    Unmap,
}

/// A request of one parked I/O.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Request {
    /// The channel's slot of that I/O.
    pub slot: u16,
    pub want: Want,
    /// First cluster of the volume.
    pub first: u64,
    /// Number of clusters.
    pub count: u64,
}

/// The answer to a [`Request`].
#[derive(Clone, Copy, Debug)]
pub(crate) struct Reply {
    pub slot: u16,
    pub result: Result<(), IoError>,
}

/// What a channel shares with the metadata thread.
pub(crate) struct ChannelShared {
    /// The version of the map to use now: [`crate::volume::Volume::bump`].
    pub version: Arc<AtomicU64>,
    /// 0: the channel has nothing in flight on the base bdev; else everything that it has in flight
    /// was translated with this version of the map or a later one.
    pub active: AtomicU64,
    pub requests: ArrayQueue<Request>,
    pub replies: ArrayQueue<Reply>,
    pub waker: Waker,
}
