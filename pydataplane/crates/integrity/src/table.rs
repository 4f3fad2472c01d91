//! What channels and the keeper share: which regions have their checksums in memory, and those.
//!
//! A cache page holds the checksums of one region. Channels find it, pin it, read and change it with atomic
//! operations alone; only the keeper loads, marks and evicts. A block whose content is being changed is
//! held by who does it, so that there is one at a time, and what it will be has one checksum.

mod page;

use crate::layout::REGIONS;
use bdev::{IoError, Wants};
use crossbeam_queue::ArrayQueue;
use parking_lot::Mutex;
use std::collections::BTreeSet;
use std::sync::OnceLock;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};

pub(crate) use page::Page;

/// Damaged blocks that wait to be logged; what is more is only counted.
const FOUND: usize = 64;
/// Of a region: its checksums are not in memory.
const ABSENT: u32 = 0;
/// Of a region: they could not be read; with the number of the error. Else it is a page's number and 1.
const FAILED: u32 = 1 << 31;

/// What a channel asks of the keeper: the checksums of a region.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Want {
    pub region: u32,
    /// And that it may be written to.
    pub write: bool,
}

/// What was found and done, for people.
#[derive(Default)]
pub(crate) struct Counts {
    /// Reads of a block that was not what its checksum says.
    pub mismatches: AtomicU64,
    /// Pages of checksums that do not count.
    pub damaged_sums: AtomicU64,
    /// Maps that do not count.
    pub damaged_maps: AtomicU64,
    /// Regions that may be written to.
    pub dirty: AtomicU64,
    /// Regions whose checksums are still to be made of what is on the medium.
    pub stale: AtomicU64,
    /// Cache pages in use.
    pub cached: AtomicU64,
}

/// All of it.
pub(crate) struct Table {
    zones: Box<[OnceLock<Box<[AtomicU32]>>]>,
    pages: Box<[Page]>,
    /// Blocks of data.
    blocks: AtomicU64,
    pub wants: Wants<Want>,
    /// Blocks that were not what their checksums say.
    pub found: ArrayQueue<u64>,
    /// The first of them.
    pub damaged: Mutex<BTreeSet<u64>>,
    /// Coarse time, in the keeper's turns.
    pub clock: AtomicU32,
    pub counts: Counts,
}

/// What there is of a region.
pub(crate) enum Got {
    /// Its page, pinned.
    Page(u16),
    /// Not yet: ask.
    Absent,
    /// It cannot be had.
    Failed(IoError),
}

fn error_of(number: u32) -> IoError {
    IoError::ALL.get(number as usize).copied().unwrap_or(IoError::ReadMedium)
}

impl Table {
    /// For `blocks` blocks of data in one of so many zones at most, with a cache of so many pages.
    pub fn new(blocks: u64, zones: u64, pages: u16) -> Table {
        Table {
            zones: (0..zones).map(|_| OnceLock::new()).collect(),
            pages: (0..pages).map(|_| Page::new()).collect(),
            blocks: AtomicU64::new(blocks),
            wants: Wants::default(),
            found: ArrayQueue::new(FOUND),
            damaged: Mutex::default(),
            clock: AtomicU32::new(0),
            counts: Counts::default(),
        }
    }

    /// Blocks of data.
    pub fn blocks(&self) -> u64 {
        self.blocks.load(Ordering::Acquire)
    }

    /// The base has grown.
    pub fn set_blocks(&self, blocks: u64) {
        self.blocks.store(blocks, Ordering::Release);
    }

    /// Zones that there is room for.
    pub fn zones_max(&self) -> usize {
        self.zones.len()
    }

    /// A zone is there from now on, one of [`Table::zones_max`].
    pub fn add_zone(&self, zone: usize) {
        let make = || (0..REGIONS).map(|_| AtomicU32::new(ABSENT)).collect();
        let _ = self.zones[zone].get_or_init(make);
    }

    #[inline]
    fn word(&self, region: u32) -> Option<&AtomicU32> {
        let zone = self.zones.get((region / REGIONS) as usize)?.get()?;
        zone.get((region % REGIONS) as usize)
    }

    /// A page by its number.
    #[inline]
    pub fn page(&self, at: u16) -> &Page {
        &self.pages[usize::from(at)]
    }

    /// The checksums of a region, pinned, if they are in memory.
    #[inline]
    pub fn pin(&self, region: u32) -> Got {
        let Some(word) = self.word(region) else { return Got::Failed(IoError::OutOfRange) };
        loop {
            let found = word.load(Ordering::SeqCst);
            if found == ABSENT {
                return match self.wants.is_closed() {
                    true => Got::Failed(IoError::Removed),
                    false => Got::Absent,
                };
            }
            if found & FAILED != 0 {
                // Told once: the next I/O has it tried again.
                let told =
                    word.compare_exchange(found, ABSENT, Ordering::AcqRel, Ordering::Acquire);
                match told {
                    Ok(_) => return Got::Failed(error_of(found & !FAILED)),
                    Err(_) => continue,
                }
            }
            let at = (found - 1) as u16;
            let page = self.page(at);
            page.pins.fetch_add(1, Ordering::SeqCst);
            if word.load(Ordering::SeqCst) == found {
                if !page.used.load(Ordering::Relaxed) {
                    page.used.store(true, Ordering::Relaxed);
                }
                return Got::Page(at);
            }
            page.unpin();
        }
    }

    /// The page of a region, for the keeper, which alone takes it away.
    pub fn peek(&self, region: u32) -> Option<u16> {
        let found = self.word(region)?.load(Ordering::SeqCst);
        (found != ABSENT && found & FAILED == 0).then(|| (found - 1) as u16)
    }

    /// Shows the page of a region to all.
    pub fn publish(&self, region: u32, at: u16) {
        if let Some(word) = self.word(region) {
            word.store(u32::from(at) + 1, Ordering::SeqCst);
        }
    }

    /// The checksums of a region cannot be read.
    pub fn fail(&self, region: u32, error: IoError) {
        if let Some(word) = self.word(region) {
            word.store(FAILED | error as u32, Ordering::SeqCst);
        }
    }

    /// Takes the page of a region away, unless somebody uses it.
    pub fn take_away(&self, region: u32, at: u16) -> bool {
        let Some(word) = self.word(region) else { return false };
        word.store(ABSENT, Ordering::SeqCst);
        if self.page(at).pins.load(Ordering::SeqCst) == 0 {
            return true;
        }
        word.store(u32::from(at) + 1, Ordering::SeqCst);
        false
    }

    /// A block is not what its checksum says.
    #[cold]
    pub fn note_mismatch(&self, block: u64) {
        self.counts.mismatches.fetch_add(1, Ordering::Relaxed);
        let _ = self.found.push(block);
        self.wants.ring();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_page_is_taken_away_only_from_nobody() {
        let table = Table::new(5000, 1, 4);
        table.add_zone(0);
        assert!(matches!(table.pin(3), Got::Absent));
        assert!(matches!(table.pin(REGIONS), Got::Failed(IoError::OutOfRange)));
        table.page(2).fill(|at| at as u32);
        table.publish(3, 2);
        let Got::Page(at) = table.pin(3) else { panic!("it is there") };
        assert_eq!((at, table.page(at).entry(7)), (2, 7));
        assert!(!table.take_away(3, at));
        assert_eq!(table.peek(3), Some(2));
        table.page(at).unpin();
        assert!(table.take_away(3, at));
        assert!(matches!(table.pin(3), Got::Absent));
        table.fail(3, IoError::NoSpace);
        assert!(matches!(table.pin(3), Got::Failed(IoError::NoSpace)));
        assert!(matches!(table.pin(3), Got::Absent), "it is told once");
        table.wants.close();
        assert!(matches!(table.pin(3), Got::Failed(IoError::Removed)));
    }
}
