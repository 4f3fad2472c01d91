//! How I/Os of channels go to the thread that carries them, and come back.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};

use bdev::{Completion, Io, ThreadQueue};
use crossbeam_queue::ArrayQueue;
use reactor::Waker;

/// A channel's part of the carrier.
pub(crate) struct Lane {
    /// Has room for all its I/Os.
    pub(crate) done: ArrayQueue<Completion>,
    pub(crate) waker: Waker,
}

/// An I/O, and whose it is.
pub(crate) struct Carried {
    pub(crate) lane: Arc<Lane>,
    pub(crate) io: Io,
}

/// The thread that carries, as channels see it.
pub(crate) struct Carrier {
    pub(crate) queue: ThreadQueue<Carried>,
    pub(crate) waker: Waker,
    pub(crate) stop: AtomicBool,
}

impl Carrier {
    pub(crate) fn stop(&self) {
        self.stop.store(true, Relaxed);
        self.waker.wake();
    }
}

impl Lane {
    pub(crate) fn give(&self, completion: Completion) {
        let pushed = self.done.push(completion);
        debug_assert!(pushed.is_ok(), "a channel has more completions than I/Os");
        self.waker.wake();
    }
}
