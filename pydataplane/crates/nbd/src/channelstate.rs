//! What channels and the keeper tell each other: who wants a connection, who has waited for too long.

use std::os::fd::OwnedFd;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering::Relaxed};
use std::sync::{Arc, Weak};
use std::time::Instant;

use crossbeam_queue::{ArrayQueue, SegQueue};
use reactor::{Waker, ticks};
use rustix::event::{EventfdFlags, eventfd};

/// A channel, as the keeper sees it.
pub(crate) struct ChannelState {
    pub(crate) waker: Waker,
    /// A connection for it.
    pub(crate) arrived: ArrayQueue<OwnedFd>,
    /// Somebody has waited for too long; the channel looks for itself.
    pub(crate) expired: AtomicBool,
    /// When it was given a connection last, in ticks; 0: never.
    pub(crate) given: AtomicU64,
    /// Since when nothing was answered although something is in flight, in ticks; 0: nothing is.
    since: AtomicU64,
}

impl ChannelState {
    pub(crate) fn new(waker: Waker) -> ChannelState {
        ChannelState {
            waker,
            arrived: ArrayQueue::new(1),
            expired: AtomicBool::new(false),
            given: AtomicU64::new(0),
            since: AtomicU64::new(0),
        }
    }

    /// Only called by the channel.
    #[inline]
    pub(crate) fn waits_since(&self, ticks: u64) {
        self.since.store(ticks, Relaxed);
    }

    pub(crate) fn is_late(&self, give_up: u64) -> bool {
        let since = self.since.load(Relaxed);
        since != 0 && ticks::now().saturating_sub(since) >= give_up
    }
}

/// A channel that wants a connection.
pub(crate) struct Wanted {
    pub(crate) state: Weak<ChannelState>,
    /// The one before, whose end at the server's side has not been seen.
    pub(crate) old: Option<OwnedFd>,
    /// Not before that: the one before was of no use for long.
    pub(crate) from: Instant,
}

impl Wanted {
    pub(crate) fn is_due(&self) -> bool {
        self.old.is_none() && Instant::now() >= self.from
    }
}

/// What the keeper is told, from any thread.
pub(crate) struct Orders {
    pub(crate) wanted: SegQueue<Wanted>,
    pub(crate) stop: AtomicBool,
    pub(crate) event: OwnedFd,
}

impl Orders {
    pub(crate) fn new() -> std::io::Result<Orders> {
        let event = eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)?;
        Ok(Orders { wanted: SegQueue::new(), stop: AtomicBool::new(false), event })
    }

    pub(crate) fn want(&self, state: &Arc<ChannelState>, old: Option<OwnedFd>) {
        self.wanted.push(Wanted { state: Arc::downgrade(state), old, from: Instant::now() });
        self.wake();
    }

    pub(crate) fn stop(&self) {
        self.stop.store(true, Relaxed);
        self.wake();
    }

    pub(crate) fn wake(&self) {
        _ = rustix::io::write(&self.event, &1u64.to_ne_bytes());
    }
}

/// Tells the channels of `states` that have waited for too long.
pub(crate) fn tell_late(states: &[Weak<ChannelState>], give_up: u64) {
    for state in states.iter().filter_map(Weak::upgrade) {
        if state.is_late(give_up) {
            state.expired.store(true, Relaxed);
            state.waker.wake();
        }
    }
}
