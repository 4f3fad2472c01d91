//! The checksums of one region, and who changes which of its blocks.

use crate::layout::REGION_BLOCKS;
use bdev::{Gate, Holds};
use std::sync::OnceLock;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};

/// The checksums of one region, in memory.
pub(crate) struct Page {
    /// Parts of I/Os that use it.
    pub(super) pins: AtomicU32,
    /// Open while the region is dirty.
    pub gate: Gate,
    /// The entries are not those on the medium.
    pub changed: AtomicBool,
    /// Used since the keeper last looked for one to evict.
    pub used: AtomicBool,
    /// When it was changed last, by [`Table::clock`].
    pub last: AtomicU32,
    /// Blocks that somebody changes.
    pub holds: Holds,
    /// In memory once it was first needed.
    entries: OnceLock<Box<[AtomicU32]>>,
}

impl Page {
    pub(super) fn new() -> Page {
        Page {
            pins: AtomicU32::new(0),
            gate: Gate::default(),
            changed: AtomicBool::new(false),
            used: AtomicBool::new(false),
            last: AtomicU32::new(0),
            holds: Holds::new(u32::from(REGION_BLOCKS)),
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
        self.gate.shut();
        let _ = self.gate.take_refused();
        self.changed.store(false, Ordering::Release);
        self.used.store(true, Ordering::Relaxed);
    }
}
