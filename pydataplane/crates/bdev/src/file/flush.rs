//! Flushes of one file by many threads, in groups.
//!
//! Two fdatasyncs of one open file that run at the same time share one report of a writeback error:
//! one of them fails, the other succeeds although what its caller wrote is lost. Which of the two
//! ends first is a matter of luck, so a success counts only when all that ran beside it have ended
//! and none has failed. That is made finite by groups: as soon as a member waits for the others,
//! no further flush joins, and what comes meanwhile begins together when the group is over.
//!
//! No lock: one word counts the group, and those who wait leave their waker.

use std::sync::atomic::{AtomicU64, Ordering};

use crossbeam_queue::ArrayQueue;
use reactor::Waker;

/// Threads that can wait for the end of a group without looking again and again.
const WAKERS: usize = 1024;

/// Bits of the word: members under way, whether the group is closed, its number.
const CLOSED: u64 = 1 << 31;
const MEMBERS: u64 = CLOSED - 1;
const NEXT: u64 = 1 << 32;

/// The group of flushes under way on a file.
pub(super) struct Flushes {
    word: AtomicU64,
    waiting: ArrayQueue<Waker>,
}

/// Number of a group.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Group(u64);

impl Flushes {
    pub fn new() -> Self {
        Flushes { word: AtomicU64::new(0), waiting: ArrayQueue::new(WAKERS) }
    }

    /// Joins the group; `false`: it is closed, and the flush has to wait for its end.
    pub fn join(&self) -> bool {
        let joined = |word: u64| (word & CLOSED == 0).then_some(word + 1);
        self.word.fetch_update(Ordering::AcqRel, Ordering::Acquire, joined).is_ok()
    }

    /// A member has ended, and its failure is latched where it failed. `None`: it was the last, so
    /// the latch says what became of all. Else the latch is to be asked when the group
    /// [`Flushes::is_over`].
    pub fn leave(&self) -> Option<Group> {
        let left = |word: u64| {
            let alone = word & MEMBERS == 1;
            Some(if alone { (word >> 32 << 32).wrapping_add(NEXT) } else { (word - 1) | CLOSED })
        };
        let before = self.word.fetch_update(Ordering::AcqRel, Ordering::Acquire, left);
        let before = before.unwrap_or_else(|word| word);
        if before & MEMBERS > 1 {
            return Some(Group(before >> 32));
        }
        if before & CLOSED != 0 {
            while let Some(waker) = self.waiting.pop() {
                waker.wake();
            }
        }
        None
    }

    /// The group under way, or the next.
    pub fn group(&self) -> Group {
        Group(self.word.load(Ordering::Acquire) >> 32)
    }

    /// Whether a group has ended.
    pub fn is_over(&self, group: Group) -> bool {
        self.word.load(Ordering::Acquire) >> 32 != group.0
    }

    /// Has the thread woken at the end of the group. It must look once more afterwards.
    pub fn wake_at_end(&self, waker: &Waker) {
        if self.waiting.push(waker.clone()).is_err() {
            // Too many wait already: this one looks again and again.
            waker.wake();
        }
    }

    /// Whether a group is closed, so that its end wakes who waits.
    pub fn is_closed(&self) -> bool {
        self.word.load(Ordering::Acquire) & CLOSED != 0
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_member_that_is_not_the_last_closes_the_group_and_waits_for_it() {
        let f = Flushes::new();
        assert!(f.join() && f.join() && f.join());
        let group = f.leave().expect("two are under way");
        assert!(f.is_closed() && !f.is_over(group));
        assert!(!f.join(), "the group is closed");
        assert_eq!(f.leave(), Some(group));
        assert!(!f.is_over(group));
        assert_eq!(f.leave(), None, "the last one");
        assert!(f.is_over(group) && !f.is_closed());
        assert!(f.join());
        assert_eq!(f.leave(), None);
    }

    #[test]
    fn no_flush_of_many_threads_ends_before_those_that_ran_beside_it() {
        // Each flush has an interval [join, leave]; a success is reported at or after the end of every
        // flush that was under way when it left.
        let f = Flushes::new();
        let under_way = AtomicU64::new(0);
        let overlaps = AtomicU64::new(0);
        std::thread::scope(|scope| {
            for _ in 0..4 {
                scope.spawn(|| {
                    for _ in 0..2000 {
                        while !f.join() {
                            std::thread::yield_now();
                        }
                        under_way.fetch_add(1, Ordering::SeqCst);
                        std::thread::yield_now();
                        under_way.fetch_sub(1, Ordering::SeqCst);
                        if let Some(group) = f.leave() {
                            overlaps.fetch_add(1, Ordering::SeqCst);
                            while !f.is_over(group) {
                                std::thread::yield_now();
                            }
                        }
                    }
                });
            }
        });
        assert_eq!(under_way.load(Ordering::SeqCst), 0);
        assert_eq!(f.word.load(Ordering::SeqCst) & (CLOSED | MEMBERS), 0);
    }
}
