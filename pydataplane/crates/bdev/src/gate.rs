//! Who may write where, for layers that keep something beside the blocks of a device and so have to say,
//! durably and before the first write to a part of it, that this part is being written to.
//!
//! A thread that keeps what is said opens the [`Gate`] of a part once that is durable, and closes it to take it
//! back. A writer goes through the gate, holds what it changes ([`Holds`]), and leaves. Nobody waits here.

use crate::IoError;
use std::sync::atomic::{AtomicBool, AtomicU8, AtomicU32, AtomicU64, Ordering};

/// Lets writers in while it is open.
#[derive(Debug, Default)]
pub struct Gate {
    open: AtomicBool,
    /// Writers that are in.
    writers: AtomicU32,
    /// The number of an error and 1: it could not be opened.
    refused: AtomicU8,
}

impl Gate {
    /// Lets a writer in, if it is open.
    #[inline]
    pub fn admit(&self) -> bool {
        self.writers.fetch_add(1, Ordering::SeqCst);
        if self.open.load(Ordering::SeqCst) {
            return true;
        }
        self.leave();
        false
    }

    /// One that was let in is through.
    #[inline]
    pub fn leave(&self) {
        self.writers.fetch_sub(1, Ordering::SeqCst);
    }

    /// Whether it is open.
    pub fn is_open(&self) -> bool {
        self.open.load(Ordering::SeqCst)
    }

    /// Whether nobody is in.
    pub fn is_empty(&self) -> bool {
        self.writers.load(Ordering::SeqCst) == 0
    }

    /// Opens it.
    pub fn open(&self) {
        // Who was to be told of an earlier failure may be gone.
        self.refused.store(0, Ordering::Release);
        self.open.store(true, Ordering::SeqCst);
    }

    /// Lets nobody in any more, whoever is in.
    pub fn shut(&self) {
        self.open.store(false, Ordering::SeqCst);
    }

    /// Closes it if nobody is in.
    pub fn close(&self) -> bool {
        let was = self.open.swap(false, Ordering::SeqCst);
        if self.is_empty() {
            return true;
        }
        if was {
            self.open();
        }
        false
    }

    /// It could not be opened, which one writer is told.
    pub fn refuse(&self, error: IoError) {
        self.refused.store(error as u8 + 1, Ordering::Release);
    }

    /// Why it could not be opened, once.
    #[inline]
    pub fn take_refused(&self) -> Option<IoError> {
        if self.refused.load(Ordering::Relaxed) == 0 {
            return None;
        }
        let number = self.refused.swap(0, Ordering::AcqRel).checked_sub(1)?;
        Some(IoError::ALL.get(usize::from(number)).copied().unwrap_or(IoError::Aborted))
    }
}

/// Things in a row, each of which one has at a time.
#[derive(Debug)]
pub struct Holds(Box<[AtomicU64]>);

impl Holds {
    /// So many, which nobody has.
    pub fn new(count: u32) -> Holds {
        let words = count.div_ceil(64) as usize;
        Holds(std::iter::repeat_with(AtomicU64::default).take(words).collect())
    }

    /// Takes `count` from `first` on, if nobody has one of them.
    #[inline]
    pub fn hold(&self, first: u32, count: u32) -> bool {
        let mut taken = first;
        for (word, mask) in words(first, count) {
            let before = self.0[word].fetch_or(mask, Ordering::SeqCst);
            if before & mask != 0 {
                self.0[word].fetch_and(before | !mask, Ordering::SeqCst);
                self.let_go(first, taken - first);
                return false;
            }
            taken += mask.count_ones();
        }
        true
    }

    /// Lets go of what [`Holds::hold`] took.
    #[inline]
    pub fn let_go(&self, first: u32, count: u32) {
        for (word, mask) in words(first, count) {
            self.0[word].fetch_and(!mask, Ordering::SeqCst);
        }
    }
}

/// Words and bits of a range.
#[inline]
fn words(first: u32, count: u32) -> impl Iterator<Item = (usize, u64)> {
    let (mut at, end) = (first, first + count);
    std::iter::from_fn(move || {
        if at >= end {
            return None;
        }
        let (word, bit) = ((at / 64) as usize, at % 64);
        let bits = (end - at).min(64 - bit);
        at += bits;
        Some((word, (u64::MAX >> (64 - bits)) << bit))
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn things_are_held_by_one_at_a_time_and_all_or_none() {
        let holds = Holds::new(1008);
        assert!(holds.hold(60, 70));
        for (first, count) in [(0, 61), (129, 1), (60, 1), (100, 900), (0, 1008)] {
            assert!(!holds.hold(first, count), "{first} {count}");
        }
        assert!(holds.hold(0, 60) && holds.hold(130, 878));
        holds.let_go(60, 70);
        assert!(holds.hold(60, 70));
        for (first, count) in [(0, 60), (60, 70), (130, 878)] {
            holds.let_go(first, count);
        }
        assert!(holds.hold(0, 1008));
    }

    #[test]
    fn a_writer_is_let_in_while_it_is_open_and_keeps_it_so() {
        let gate = Gate::default();
        assert!(!gate.admit());
        gate.open();
        assert!(gate.admit());
        assert!(!gate.close() && gate.is_open());
        gate.shut();
        assert!(!gate.admit() && !gate.is_empty());
        gate.leave();
        assert!(gate.is_empty() && gate.close() && !gate.is_open() && !gate.admit());
        gate.refuse(IoError::Flush);
        assert_eq!((gate.take_refused(), gate.take_refused()), (Some(IoError::Flush), None));
    }
}
