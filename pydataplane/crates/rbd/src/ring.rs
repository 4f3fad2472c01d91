//! The way back of an I/O: from a thread of librbd's to the reactor that asked.

use std::ptr;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use crossbeam_queue::ArrayQueue;
use libc::c_void;
use reactor::{Waker, ticks};

/// What an I/O that has ended came to: bytes read, 0, or an errno that is negative.
pub(crate) type Outcome = i64;

/// Ended I/Os of one channel, by the number of their slot. Any thread puts them in, without a lock or an
/// allocation, and wakes the channel's thread if that sleeps.
pub(crate) struct Ring {
    ended: ArrayQueue<(u16, Outcome)>,
    waker: Waker,
    contexts: Box<[IoContext]>,
}

/// What a thread of librbd's knows of an I/O.
struct IoContext {
    ring: *const Ring,
    slot: u16,
    /// Since when it is with librbd, in ticks; 0: it is not. For whoever looks how long that is.
    since: AtomicU64,
}

// SAFETY: the pointer is to the ring that the context is a part of, and is used by `Ring::end` alone.
unsafe impl Send for IoContext {}
// SAFETY: as above; nothing else of a context changes but an atomic.
unsafe impl Sync for IoContext {}

impl Ring {
    /// For a channel with so many slots.
    pub(crate) fn new(slots: u16, waker: Waker) -> Arc<Ring> {
        Arc::new_cyclic(|ring| Ring {
            ended: ArrayQueue::new(usize::from(slots)),
            waker,
            contexts: (0..slots)
                .map(|slot| IoContext { ring: ring.as_ptr(), slot, since: 0.into() })
                .collect(),
        })
    }

    /// An I/O begins: what its callback is to give to [`Ring::end`], once. The ring stays until then.
    pub(crate) fn begin(self: &Arc<Ring>, slot: u16) -> *mut c_void {
        std::mem::forget(Arc::clone(self));
        let context = &self.contexts[usize::from(slot)];
        context.since.store(ticks::now().max(1), Ordering::Relaxed);
        ptr::from_ref(context).cast_mut().cast()
    }

    /// An I/O that was begun has ended, or was not taken.
    ///
    /// # Safety
    /// `context` is what [`Ring::begin`] gave, and was not given here before.
    pub(crate) unsafe fn end(context: *mut c_void, outcome: Outcome) {
        // SAFETY: a part of the ring, which stays as long as `begin`'s reference.
        let IoContext { ring, slot, since } = unsafe { &*context.cast::<IoContext>() };
        // Before the slot is free for the next.
        since.store(0, Ordering::Relaxed);
        // SAFETY: the reference of `begin`, taken back once.
        let ring = unsafe { Arc::from_raw(*ring) };
        let pushed = ring.ended.push((*slot, outcome));
        debug_assert!(pushed.is_ok(), "a slot is in flight once");
        ring.waker.wake();
    }

    /// Has the channel's thread look.
    pub(crate) fn wake(&self) {
        self.waker.wake();
    }

    /// For how long the oldest I/O is with librbd; `None`: none is. Looks at every slot.
    pub(crate) fn unanswered(&self) -> Option<Duration> {
        let begun = self.contexts.iter().map(|context| context.since.load(Ordering::Relaxed));
        let oldest = begun.filter(|since| *since != 0).min()?;
        Some(Duration::from_nanos(ticks::to_ns(ticks::now().saturating_sub(oldest))))
    }

    /// The next one that has ended.
    #[inline]
    pub(crate) fn pop(&self) -> Option<(u16, Outcome)> {
        self.ended.pop()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use reactor::IoContext;
    use std::collections::BTreeMap;

    #[test]
    fn what_other_threads_end_comes_back_once_each_and_wakes_who_sleeps() {
        const SLOTS: u16 = 64;
        const ROUNDS: i64 = 200;
        let io = IoContext::new().unwrap();
        let ring = Ring::new(SLOTS, io.waker());
        for round in 0..ROUNDS {
            let contexts: Vec<usize> = (0..SLOTS).map(|slot| ring.begin(slot) as usize).collect();
            let (left, right) = contexts.split_at(usize::from(SLOTS / 2));
            let ended = std::thread::scope(|scope| {
                for part in [left, right] {
                    scope.spawn(move || {
                        for (n, context) in part.iter().enumerate() {
                            // SAFETY: of `begin`, each once.
                            unsafe { Ring::end(*context as *mut c_void, round * 1000 + n as i64) };
                        }
                    });
                }
                let mut ended = BTreeMap::new();
                while ended.len() < usize::from(SLOTS) {
                    // Ten minutes: a wake-up that is lost would show as a hang.
                    io.wait(600_000_000).unwrap();
                    while let Some((slot, outcome)) = ring.pop() {
                        assert!(ended.insert(slot, outcome).is_none(), "slot {slot} came twice");
                    }
                }
                ended
            });
            for (slot, outcome) in ended {
                assert_eq!(outcome, round * 1000 + i64::from(slot % (SLOTS / 2)));
            }
            assert!(ring.pop().is_none());
        }
    }

    #[test]
    fn how_long_the_oldest_has_not_ended_is_told() {
        let io = IoContext::new().unwrap();
        let ring = Ring::new(3, io.waker());
        assert_eq!(ring.unanswered(), None);
        let first = ring.begin(2);
        std::thread::sleep(Duration::from_millis(20));
        let second = ring.begin(0);
        assert!(ring.unanswered().unwrap() >= Duration::from_millis(19));
        // SAFETY: of `begin`, each once.
        unsafe { Ring::end(first, 0) };
        assert!(ring.unanswered().is_some());
        // SAFETY: as above.
        unsafe { Ring::end(second, 0) };
        assert_eq!(ring.unanswered(), None);
    }

    #[test]
    fn the_ring_outlives_its_channel_until_the_last_io_has_ended() {
        let io = IoContext::new().unwrap();
        let ring = Ring::new(2, io.waker());
        let gone = Arc::downgrade(&ring);
        let (first, second) = (ring.begin(0), ring.begin(1));
        drop(ring);
        // SAFETY: of `begin`, each once.
        unsafe { Ring::end(first, 0) };
        assert!(gone.upgrade().is_some());
        // SAFETY: as above.
        unsafe { Ring::end(second, -5) };
        assert!(gone.upgrade().is_none());
    }
}
