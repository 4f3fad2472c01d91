//! What a channel asks of the metadata thread, what the two share, and which volumes have channels.

use crate::data::{Buffers, Data, Writes};
use crate::gauges::Gauges;
use bdev::IoError;
use blobstore::BlobId;
use crossbeam_queue::ArrayQueue;
use parking_lot::Mutex;
use reactor::{Bell, Waker};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

/// I/Os that a channel can have under way, and so the length of its request queue.
pub(crate) const SLOTS: usize = 256;

/// What a channel asks of the metadata thread.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Want {
    /// Clusters to write to.
    Allocate,
    /// As [`Want::Allocate`], durably.
    AllocateDurably,
    /// Clusters that are not needed any more.
    Unmap,
    /// What was written, and the clusters that it was written to, durably.
    Flush,
    /// The volume's map, which is not in memory.
    Map,
}

impl Want {
    /// Whether something is to be written.
    pub fn writes(self) -> bool {
        matches!(self, Want::Allocate | Want::AllocateDurably)
    }
}

/// A request of one parked I/O.
pub(crate) struct Request {
    /// The channel's slot of that I/O.
    pub slot: u16,
    pub want: Want,
    /// First cluster of the volume.
    pub first: u64,
    /// Number of clusters.
    pub count: u64,
    /// What is to be written to the first one, which is the only one, at this byte of it.
    pub data: Option<(u64, Data)>,
}

impl Request {
    /// One without data.
    pub fn of(slot: u16, want: Want, first: u64, count: u64) -> Self {
        Request { slot, want, first, count, data: None }
    }

    /// Its clusters.
    pub fn range(&self) -> std::ops::Range<u64> {
        self.first..self.first.saturating_add(self.count)
    }
}

/// The answer to a [`Request`].
#[derive(Clone, Copy, Debug)]
pub(crate) struct Reply {
    pub slot: u16,
    pub result: Result<(), IoError>,
    /// [`Request::data`] was written, too.
    pub written: bool,
}

/// What a channel shares with the metadata thread.
pub(crate) struct ChannelShared {
    /// The version of the map to use now, which is the volume's.
    pub version: Arc<AtomicU64>,
    /// 0: the channel has nothing in flight on the base bdev; else everything that it has in flight
    /// was translated with this version of the map or a later one.
    pub active: AtomicU64,
    pub requests: ArrayQueue<Request>,
    pub replies: ArrayQueue<Reply>,
    /// What of its data the metadata thread writes.
    pub writes: Arc<Writes>,
    pub waker: Waker,
}

/// The metadata thread of an lvstore, as its volumes, which are `V`, reach it.
pub(crate) struct MetaThread<V> {
    bell: Bell,
    open: Arc<Open<V>>,
    /// The last round all of whose allocations are durable.
    durable: Arc<AtomicU64>,
    pub buffers: Arc<Buffers>,
    pub gauges: Arc<Gauges>,
}

struct Open<V> {
    volumes: Mutex<Vec<Arc<V>>>,
    changes: AtomicU64,
    /// Volumes whose maps somebody waits for who has no channel.
    wanted: Mutex<Vec<BlobId>>,
}

impl<V> Clone for MetaThread<V> {
    fn clone(&self) -> Self {
        MetaThread {
            bell: self.bell.clone(),
            open: self.open.clone(),
            durable: self.durable.clone(),
            buffers: self.buffers.clone(),
            gauges: self.gauges.clone(),
        }
    }
}

impl<V> MetaThread<V> {
    pub fn new(bell: Bell, gauges: Arc<Gauges>) -> Self {
        let (volumes, changes, wanted) = Default::default();
        let open = Arc::new(Open { volumes, changes, wanted });
        MetaThread { bell, open, durable: Arc::default(), buffers: Buffers::new(), gauges }
    }

    /// All that was allocated up to this round is durable.
    pub fn set_durable(&self, round: u64) {
        self.durable.store(round, Ordering::Release);
    }

    /// Whether what was allocated in this round is durable.
    #[inline]
    pub fn is_durable(&self, round: u64) -> bool {
        round <= self.durable.load(Ordering::Acquire)
    }

    /// Has it look at what the channels ask for.
    pub fn ring(&self) {
        self.bell.ring();
    }

    /// Has it read the map of the volume with this blob.
    pub fn want_map(&self, blob: BlobId) {
        self.open.wanted.lock().push(blob);
        self.ring();
    }

    /// The blobs whose volumes' maps are wanted.
    pub fn take_wanted(&self) -> Vec<BlobId> {
        std::mem::take(&mut self.open.wanted.lock())
    }

    /// A volume has its first channel. It has not asked for anything yet.
    pub fn opened(&self, volume: &Arc<V>) {
        self.open.volumes.lock().push(volume.clone());
        self.open.changes.fetch_add(1, Ordering::Release);
    }

    /// The last channel of a volume is gone.
    pub fn closed(&self, volume: &V) {
        self.open.volumes.lock().retain(|other| !std::ptr::eq(&**other, volume));
        self.open.changes.fetch_add(1, Ordering::Release);
    }

    /// How often the answer of [`MetaThread::open`] has changed.
    pub fn changes(&self) -> u64 {
        self.open.changes.load(Ordering::Acquire)
    }

    /// The volumes that have channels: a few of all that there are.
    pub fn open(&self) -> Vec<Arc<V>> {
        self.open.volumes.lock().clone()
    }
}
