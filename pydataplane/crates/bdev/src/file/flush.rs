//! Flushes of one file by many threads: one fdatasync at a time.
//!
//! A flush is answered by an fdatasync that begins after the flush was asked for, whoever asked: it
//! covers all writes that were acknowledged before (SBC-4 5.29, SYNCHRONIZE CACHE). So what is asked
//! for while one is under way waits for its end and then shares the next one, however many they are.
//! - A disk that does not answer keeps one of the kernel's workers waiting, not one for each flush.
//! - Two fdatasyncs of one open file that run at the same time share one report of a writeback error:
//!   one of them fails, the other succeeds although what its caller wrote is lost. No two do.
//!
//! No lock: one word counts the fdatasyncs, and those who wait are told of each end.

use std::sync::atomic::{AtomicU64, Ordering};

use crate::Waiters;

/// Bits of the word: whether an fdatasync is under way, how many have begun.
const UNDER_WAY: u64 = 1;
const ONE: u64 = 2;

/// Number of an fdatasync of a file, from 1 on.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct Number(u64);

/// The fdatasyncs of a file.
pub(super) struct Flushes {
    word: AtomicU64,
    /// The last one that counts: it has succeeded, or its failure is latched.
    through: AtomicU64,
    /// Who is told when one has ended. It looks at [`Flushes::under_way`] after it began to wait.
    pub(super) waiters: Waiters,
}

impl Flushes {
    pub fn new() -> Self {
        Flushes { word: AtomicU64::new(0), through: AtomicU64::new(0), waiters: Waiters::default() }
    }

    /// The first fdatasync that answers a flush which is asked for now: the next that begins.
    #[inline]
    pub fn next(&self) -> Number {
        Number(self.word.load(Ordering::Acquire) / ONE + 1)
    }

    /// Begins an fdatasync, which the caller has to [`Flushes::end`]; `None`: one is under way.
    #[inline]
    pub fn begin(&self) -> Option<Number> {
        let begun = |word: u64| (word & UNDER_WAY == 0).then_some((word + ONE) | UNDER_WAY);
        let before = self.word.fetch_update(Ordering::SeqCst, Ordering::SeqCst, begun).ok()?;
        Some(Number(before / ONE + 1))
    }

    /// The fdatasync `number` has ended. `counts`: it has succeeded, or its failure is latched, so that
    /// the latch says what became of all that waited for it; else they begin another.
    pub fn end(&self, number: Number, counts: bool) {
        if counts {
            self.through.fetch_max(number.0, Ordering::AcqRel);
        }
        self.word.fetch_and(!UNDER_WAY, Ordering::SeqCst);
        self.waiters.tell();
    }

    /// Whether `number`, or a later one, has ended and counts.
    #[inline]
    pub fn is_through(&self, number: Number) -> bool {
        self.through.load(Ordering::Acquire) >= number.0
    }

    /// The one under way.
    pub fn under_way(&self) -> Option<Number> {
        let word = self.word.load(Ordering::SeqCst);
        (word & UNDER_WAY != 0).then_some(Number(word / ONE))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_flush_is_answered_by_an_fdatasync_that_begins_after_it() {
        let f = Flushes::new();
        let early = f.next();
        assert_eq!(f.begin(), Some(early));
        assert_eq!(f.under_way(), Some(early));
        assert_eq!(f.begin(), None, "one at a time");
        let late = f.next();
        assert!(late > early);
        f.end(early, true);
        assert!(f.is_through(early) && !f.is_through(late) && f.under_way().is_none());
        // One that does not count answers nobody, and the next answers all.
        assert_eq!(f.begin(), Some(late));
        f.end(late, false);
        assert!(!f.is_through(late));
        let next = f.begin().unwrap();
        f.end(next, true);
        assert!(f.is_through(late) && f.is_through(next));
    }

    #[test]
    fn what_was_written_before_a_flush_is_covered_in_many_threads() {
        // `written` counts up; an fdatasync makes durable what was written when it began.
        let f = Flushes::new();
        let (written, durable) = (AtomicU64::new(0), AtomicU64::new(0));
        let under_way = AtomicU64::new(0);
        std::thread::scope(|scope| {
            for _ in 0..4 {
                scope.spawn(|| {
                    for _ in 0..2000 {
                        let mine = written.fetch_add(1, Ordering::SeqCst) + 1;
                        let number = f.next();
                        while !f.is_through(number) {
                            let Some(begun) = f.begin() else {
                                std::thread::yield_now();
                                continue;
                            };
                            assert_eq!(under_way.fetch_add(1, Ordering::SeqCst), 0);
                            let covered = written.load(Ordering::SeqCst);
                            std::thread::yield_now();
                            durable.fetch_max(covered, Ordering::SeqCst);
                            under_way.fetch_sub(1, Ordering::SeqCst);
                            f.end(begun, true);
                        }
                        assert!(durable.load(Ordering::SeqCst) >= mine);
                    }
                });
            }
        });
    }
}
