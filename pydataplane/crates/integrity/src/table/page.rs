//! The checksums of one region, and who changes which of its blocks.

use super::error_of;
use crate::layout::REGION_BLOCKS;
use bdev::IoError;
use std::sync::OnceLock;
use std::sync::atomic::{AtomicBool, AtomicU8, AtomicU32, AtomicU64, Ordering};

/// Words of [`Page::held`].
const WORDS: usize = (REGION_BLOCKS as usize).div_ceil(64);

/// Of a page: no write is admitted.
const CLEAN: u8 = 0;
/// Of a page: writes are admitted.
const DIRTY: u8 = 1;

/// The checksums of one region, in memory.
pub(crate) struct Page {
    /// Parts of I/Os that use it.
    pub(super) pins: AtomicU32,
    /// [`CLEAN`] or [`DIRTY`].
    mark: AtomicU8,
    /// Changes under way.
    writers: AtomicU32,
    /// The number of an error and 1: the region could not be marked for writing.
    refused: AtomicU8,
    /// The entries are not those on the medium.
    pub changed: AtomicBool,
    /// Used since the keeper last looked for one to evict.
    pub used: AtomicBool,
    /// When it was changed last, by [`Table::clock`].
    pub last: AtomicU32,
    /// A bit for each block: somebody changes it.
    held: [AtomicU64; WORDS],
    /// In memory once it was first needed.
    entries: OnceLock<Box<[AtomicU32]>>,
}

impl Page {
    pub(super) fn new() -> Page {
        Page {
            pins: AtomicU32::new(0),
            mark: AtomicU8::new(CLEAN),
            writers: AtomicU32::new(0),
            refused: AtomicU8::new(0),
            changed: AtomicBool::new(false),
            used: AtomicBool::new(false),
            last: AtomicU32::new(0),
            held: std::array::from_fn(|_| AtomicU64::new(0)),
            entries: OnceLock::new(),
        }
    }

    fn entries(&self) -> &[AtomicU32] {
        let make = || (0..REGION_BLOCKS).map(|_| AtomicU32::new(0)).collect();
        self.entries.get_or_init(make)
    }

    /// The entry of a block; 0: it has none.
    #[inline]
    pub fn entry(&self, at: usize) -> u32 {
        self.entries()[at].load(Ordering::Acquire)
    }

    /// Sets the entry of a block, which the caller holds.
    #[inline]
    pub fn set_entry(&self, at: usize, entry: u32) {
        self.entries()[at].store(entry, Ordering::Release);
    }

    /// Begins a change, if it is admitted.
    #[inline]
    pub fn admit(&self) -> bool {
        self.writers.fetch_add(1, Ordering::SeqCst);
        if self.mark.load(Ordering::SeqCst) == DIRTY {
            return true;
        }
        self.leave();
        false
    }

    /// Ends a change.
    #[inline]
    pub fn leave(&self) {
        self.writers.fetch_sub(1, Ordering::SeqCst);
    }

    /// Whether changes are admitted.
    pub fn is_dirty(&self) -> bool {
        self.mark.load(Ordering::SeqCst) == DIRTY
    }

    /// Admits changes from now on.
    pub fn set_dirty(&self) {
        // Who was to be told of an earlier failure may be gone.
        self.refused.store(0, Ordering::Release);
        self.mark.store(DIRTY, Ordering::SeqCst);
    }

    /// Admits no more changes, if none is under way.
    pub fn close(&self) -> bool {
        let dirty = self.mark.swap(CLEAN, Ordering::SeqCst) == DIRTY;
        if self.writers.load(Ordering::SeqCst) == 0 {
            return true;
        }
        if dirty {
            self.set_dirty();
        }
        false
    }

    /// Changes of it are refused, once.
    pub fn refuse(&self, error: IoError) {
        self.refused.store(error as u8 + 1, Ordering::Release);
    }

    /// Why a change was refused.
    #[inline]
    pub fn take_refused(&self) -> Option<IoError> {
        if self.refused.load(Ordering::Relaxed) == 0 {
            return None;
        }
        let number = self.refused.swap(0, Ordering::AcqRel).checked_sub(1)?;
        Some(error_of(u32::from(number)))
    }

    /// Takes `count` blocks from `first` on for a change, if nobody has one of them.
    #[inline]
    pub fn hold(&self, first: u16, count: u16) -> bool {
        let mut taken = first;
        for (word, mask) in words(first, count) {
            let before = self.held[word].fetch_or(mask, Ordering::AcqRel);
            if before & mask != 0 {
                self.held[word].fetch_and(before | !mask, Ordering::AcqRel);
                self.let_go(first, taken - first);
                return false;
            }
            taken += mask.count_ones() as u16;
        }
        true
    }

    /// The change is over.
    #[inline]
    pub fn let_go(&self, first: u16, count: u16) {
        for (word, mask) in words(first, count) {
            self.held[word].fetch_and(!mask, Ordering::AcqRel);
        }
    }

    /// Lets go of what [`Table::pin`] returned.
    #[inline]
    pub fn unpin(&self) {
        self.pins.fetch_sub(1, Ordering::SeqCst);
    }

    /// Makes it that of another region, with these entries.
    pub fn fill(&self, entry: impl Fn(usize) -> u32) {
        for (at, place) in self.entries().iter().enumerate() {
            place.store(entry(at), Ordering::Release);
        }
        self.mark.store(CLEAN, Ordering::SeqCst);
        self.refused.store(0, Ordering::Release);
        self.changed.store(false, Ordering::Release);
        self.used.store(true, Ordering::Relaxed);
    }
}

/// Words and bits of blocks of a region.
#[inline]
fn words(first: u16, count: u16) -> impl Iterator<Item = (usize, u64)> {
    let (mut at, end) = (u32::from(first), u32::from(first) + u32::from(count));
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
    fn blocks_are_held_by_one_at_a_time_and_all_or_none() {
        let page = Page::new();
        assert!(page.hold(60, 70));
        for (first, count) in [(0, 61), (129, 1), (60, 1), (100, 900), (0, 1008)] {
            assert!(!page.hold(first, count), "{first} {count}");
        }
        assert!(page.hold(0, 60) && page.hold(130, 878));
        page.let_go(60, 70);
        assert!(page.hold(60, 70));
        for (first, count) in [(0, 60), (60, 70), (130, 878)] {
            page.let_go(first, count);
        }
        assert!(page.hold(0, 1008));
    }

    #[test]
    fn a_change_is_admitted_while_the_region_is_dirty_and_keeps_it_so() {
        let page = Page::new();
        assert!(!page.admit());
        page.set_dirty();
        assert!(page.admit());
        assert!(!page.close() && page.is_dirty());
        page.leave();
        assert!(page.close() && !page.is_dirty() && !page.admit());
        page.refuse(IoError::Flush);
        assert_eq!((page.take_refused(), page.take_refused()), (Some(IoError::Flush), None));
    }
}
