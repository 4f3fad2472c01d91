//! What a reactor runs.

use std::any::Any;

/// What a reactor runs in its loop: in each turn while it handles something, else in turn with others that
/// do not. Owned by one reactor thread.
pub trait Poller: Any {
    /// Name shown by `thread_get_pollers`.
    fn name(&self) -> &str;
    /// Does what can be done now without blocking; returns how many events were handled
    /// (0 means idle).
    fn poll(&mut self) -> u32;
    /// Others of the reactor have work, too, from now on, or none has: one that polls for long should do so
    /// for a shorter time while they do. At first none has.
    fn set_contended(&mut self, _contended: bool) {}
    /// The reactor is about to sleep: ask for wake-ups (enable kicks). Returns `false` if work
    /// arrived meanwhile, or if nothing would wake the reactor for work that is under way, and
    /// then the reactor does not sleep. Every `arm` is followed by one `disarm`.
    fn arm(&mut self) -> bool {
        true
    }
    /// Whether something that it has begun is under way, so that what comes next may be the end of that rather
    /// than a new request. Asked when a turn has found nothing.
    fn is_waiting(&self) -> bool {
        false
    }
    /// When the reactor is to poll it at the latest, though nothing woke it; in ticks, `u64::MAX`: only when
    /// something does. Asked after [`Poller::arm`].
    fn wake_at(&self) -> u64 {
        u64::MAX
    }
    /// The reactor is awake again: wake-ups are no longer needed (suppress kicks).
    fn disarm(&mut self) {}
}

/// Identifies a poller within its reactor.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct PollerId(pub u64);
