//! Waking a thread, with a system call only when it sleeps.
//!
//! One atomic word says awake, asleep or notified, and both sides change it by read-modify-write
//! only, so that one of two things is always true: the sleeper's attempt to go from awake to
//! asleep comes after the waker's swap and fails, or it comes before, and the waker finds
//! `ASLEEP` and writes the eventfd. What was published before [`Waker::wake`] is visible after
//! [`Sleeper::take`] or [`Sleeper::awake`]. A notification is sticky: one that arrives while the
//! thread runs makes its next attempt to sleep fail, so a wake-up between the last look at a
//! queue and the sleep is not lost. There is therefore no timeout as a safety net.

use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::Arc;
use std::sync::atomic::{AtomicU8, Ordering};

use rustix::event::{EventfdFlags, eventfd};

const AWAKE: u8 = 0;
const ASLEEP: u8 = 1;
const NOTIFIED: u8 = 2;

struct Inner {
    state: AtomicU8,
    /// Watched edge-triggered and so never read: its counter only has to move.
    event: OwnedFd,
}

/// Wakes a thread that sleeps in its reactor's epoll or in [`crate::IoContext::wait`]. Costs one
/// atomic swap when that thread is awake. Publish the work first, then wake.
#[derive(Clone)]
pub struct Waker {
    inner: Arc<Inner>,
}

impl Waker {
    /// Wakes the thread.
    pub fn wake(&self) {
        if self.inner.state.swap(NOTIFIED, Ordering::AcqRel) == ASLEEP {
            // It cannot fail before 2^64 - 1 wake-ups.
            let _ = rustix::io::write(&self.inner.event, &1u64.to_ne_bytes());
        }
    }
}

/// The other end of a [`Waker`], owned by the thread that sleeps.
pub(crate) struct Sleeper {
    inner: Arc<Inner>,
}

impl Sleeper {
    pub(crate) fn new() -> io::Result<Self> {
        let event = eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)?;
        let state = AtomicU8::new(AWAKE);
        Ok(Sleeper { inner: Arc::new(Inner { state, event }) })
    }

    pub(crate) fn waker(&self) -> Waker {
        Waker { inner: self.inner.clone() }
    }

    /// Becomes readable (edge-triggered) when the thread is woken.
    pub(crate) fn event(&self) -> BorrowedFd<'_> {
        self.inner.event.as_fd()
    }

    /// Whether the thread was notified since the last call; what was published before is visible.
    #[inline]
    pub(crate) fn take(&self) -> bool {
        if self.inner.state.load(Ordering::Relaxed) == AWAKE {
            return false;
        }
        self.inner.state.swap(AWAKE, Ordering::Acquire) == NOTIFIED
    }

    /// Announces sleep; `false` if the thread was notified and must look again.
    pub(crate) fn asleep(&self) -> bool {
        let state = &self.inner.state;
        state.compare_exchange(AWAKE, ASLEEP, Ordering::AcqRel, Ordering::Acquire).is_ok()
    }

    /// The sleep is over. A notification stays for [`Sleeper::take`].
    pub(crate) fn awake(&self) {
        let state = &self.inner.state;
        let _ = state.compare_exchange(ASLEEP, AWAKE, Ordering::AcqRel, Ordering::Acquire);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_notification_is_sticky_and_taken_once() {
        let s = Sleeper::new().unwrap();
        assert!(!s.take());
        s.waker().wake();
        assert!(!s.asleep(), "notified: must not sleep");
        assert!(s.take());
        assert!(!s.take());
        assert!(s.asleep());
        s.waker().wake();
        s.awake();
        assert!(s.take());
        assert!(s.asleep());
        s.awake();
        assert!(!s.take(), "nobody called");
    }

    #[test]
    fn the_eventfd_is_written_only_when_asleep() {
        let s = Sleeper::new().unwrap();
        let mut count = [0; 8];
        s.waker().wake();
        assert!(rustix::io::read(s.event(), &mut count).is_err());
        assert!(s.take() && s.asleep());
        s.waker().wake();
        s.waker().wake();
        assert_eq!(rustix::io::read(s.event(), &mut count), Ok(8));
        assert_eq!(u64::from_ne_bytes(count), 1);
    }
}
