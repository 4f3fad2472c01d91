//! What the channels of a unit and the copier share.

use crate::chunks::Chunks;
use bdev::{Bdev, Features};
use parking_lot::{Condvar, Mutex};
use reactor::{Call, Waker};
use std::ops::RangeInclusive;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU8, AtomicU32, AtomicU64, Ordering};
use std::time::Duration;

/// How far a copy is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
pub enum Phase {
    /// The source is being copied.
    Copying = 0,
    /// Source and destination have the same, and go on having it; after a write that failed it is copying again.
    Ready = 1,
    /// The copy is over, with a sentence; the source has all.
    Failed = 2,
    /// The copy was ended; the source has all.
    Stopped = 3,
}

/// How far a copy is.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Progress {
    /// Whether it goes on.
    pub phase: Phase,
    /// Bytes from the start of the source that were dealt with.
    pub copied: u64,
    /// Bytes of the source.
    pub total: u64,
    /// Bytes a second that are read, at most; 0: as many as the disks can.
    pub limit: u64,
    /// Why it failed.
    pub failure: Option<String>,
}

/// What the copier is asked.
#[derive(Default)]
pub(crate) struct Asked {
    /// Makes the destination durable, and answers.
    pub seal: Option<Call<(), Result<(), String>>>,
}

/// One channel of the unit, as the copier sees it.
pub(crate) struct Watched {
    waker: Waker,
    /// Since when the oldest write waits for the destination or the copier, in ticks; 0: none does.
    pub since: AtomicU64,
}

/// What all have in common.
pub(crate) struct Shared {
    pub source: Arc<dyn Bdev>,
    pub destination: Arc<dyn Bdev>,
    pub chunks: Chunks,
    /// Bytes of the source.
    pub bytes: u64,
    /// Bytes of a block of each.
    pub source_block: u64,
    pub block: u64,
    /// Of the destination.
    pub features: Features,
    /// Both have protection information, of blocks of the same length.
    pub tuples: bool,
    phase: AtomicU8,
    /// Chunks that were copied are to be copied again; it changes while `asked` is locked, as the phase does then.
    again: AtomicBool,
    /// Bytes that were dealt with.
    pub copied: AtomicU64,
    /// Bytes a second, 0: no limit.
    pub limit: AtomicU64,
    failure: Mutex<Option<String>>,
    asked: Mutex<Asked>,
    changed: Condvar,
    channels: Mutex<Vec<Arc<Watched>>>,
    /// Writes that wait for the copier.
    pub parked: AtomicU32,
    /// I/Os with the destination that nobody waits for any more.
    pub orphans: AtomicU32,
}

impl Shared {
    pub fn new(source: Arc<dyn Bdev>, destination: Arc<dyn Bdev>, limit: u64) -> Self {
        let bytes = source.geometry().bytes();
        Shared {
            chunks: Chunks::of(bytes),
            bytes,
            source_block: u64::from(source.geometry().block_size),
            block: u64::from(destination.geometry().block_size),
            features: destination.features(),
            tuples: source.protection().is_some(),
            source,
            destination,
            phase: AtomicU8::new(Phase::Copying as u8),
            again: AtomicBool::new(false),
            copied: AtomicU64::new(0),
            limit: AtomicU64::new(limit),
            failure: Mutex::default(),
            asked: Mutex::default(),
            changed: Condvar::new(),
            channels: Mutex::default(),
            parked: AtomicU32::new(0),
            orphans: AtomicU32::new(0),
        }
    }

    #[inline]
    pub fn phase(&self) -> Phase {
        match self.phase.load(Ordering::Acquire) {
            0 => Phase::Copying,
            1 => Phase::Ready,
            2 => Phase::Failed,
            _ => Phase::Stopped,
        }
    }

    /// Whether writes go to the source alone, whatever was copied.
    #[inline]
    pub fn is_over(&self) -> bool {
        matches!(self.phase(), Phase::Failed | Phase::Stopped)
    }

    /// All is copied, unless the copy is over, or some of it is to be copied again: then `false`.
    pub fn ready(&self) -> bool {
        let _asked = self.asked.lock();
        let again = self.again.load(Ordering::Relaxed);
        if !again {
            self.go_on_to(Phase::Copying, Phase::Ready);
        }
        !again
    }

    /// A write to these chunks, which is in flight, was done in part, perhaps not the same on both: they are copied
    /// again, and until then the copy is not ready.
    #[cold]
    pub fn copy_again(&self, chunks: RangeInclusive<u32>) {
        chunks.for_each(|at| self.chunks.copy_again(at));
        let _asked = self.asked.lock();
        self.again.store(true, Ordering::Relaxed);
        self.go_on_to(Phase::Ready, Phase::Copying);
        self.changed.notify_all();
    }

    /// Whether chunks are to be copied again since this was asked last.
    pub fn take_again(&self) -> bool {
        let _asked = self.asked.lock();
        self.again.swap(false, Ordering::Relaxed)
    }

    fn go_on_to(&self, from: Phase, to: Phase) -> bool {
        let (from, to) = (from as u8, to as u8);
        self.phase.compare_exchange(from, to, Ordering::AcqRel, Ordering::Acquire).is_ok()
    }

    /// Ends the copy for that reason, unless it is over; writes that wait go on.
    pub fn fail(&self, why: String) {
        let mut failure = self.failure.lock();
        if self.go_on_to(Phase::Copying, Phase::Failed)
            || self.go_on_to(Phase::Ready, Phase::Failed)
        {
            *failure = Some(why);
        }
        drop(failure);
        self.wake_all();
    }

    /// Ends the copy.
    pub fn stop(&self) {
        let failure = self.failure.lock();
        if failure.is_none() {
            self.phase.store(Phase::Stopped as u8, Ordering::Release);
        }
        drop(failure);
        self.wake_all();
    }

    pub fn progress(&self) -> Progress {
        // Locked first, so that the phase and the sentence agree.
        let failure = self.failure.lock().clone();
        Progress {
            phase: self.phase(),
            copied: self.copied.load(Ordering::Relaxed).min(self.bytes),
            total: self.bytes,
            limit: self.limit.load(Ordering::Relaxed),
            failure,
        }
    }

    /// Wakes the copier and all channels.
    pub fn wake_all(&self) {
        let asked = self.asked.lock();
        self.changed.notify_all();
        drop(asked);
        self.channels.lock().iter().for_each(|channel| channel.waker.wake());
    }

    /// Chunks were copied: writes that waited for that go on.
    pub fn wake_parked(&self) {
        if self.parked.load(Ordering::Acquire) > 0 {
            self.channels.lock().iter().for_each(|channel| channel.waker.wake());
        }
    }

    /// Has the copier do something.
    pub fn ask(&self, ask: impl FnOnce(&mut Asked)) {
        ask(&mut self.asked.lock());
        self.changed.notify_all();
    }

    /// What the copier was asked since, after waiting for it for `most`, unless the copy is not in that phase any more.
    pub fn wait(&self, phase: Phase, most: Duration) -> Asked {
        let mut asked = self.asked.lock();
        if asked.seal.is_none() && self.phase() == phase {
            self.changed.wait_for(&mut asked, most);
        }
        std::mem::take(&mut *asked)
    }

    /// A channel of the unit came.
    pub fn add_channel(&self, waker: Waker) -> Arc<Watched> {
        let channel = Arc::new(Watched { waker, since: AtomicU64::new(0) });
        self.channels.lock().push(channel.clone());
        channel
    }

    /// It is gone.
    pub fn drop_channel(&self, channel: &Arc<Watched>) {
        self.channels.lock().retain(|other| !Arc::ptr_eq(other, channel));
    }

    /// Since when the oldest write of the unit waits for the destination or the copier, in ticks.
    pub fn oldest_wait(&self) -> Option<u64> {
        let channels = self.channels.lock();
        let all = channels.iter().map(|channel| channel.since.load(Ordering::Relaxed));
        all.filter(|since| *since != 0).min()
    }
}
