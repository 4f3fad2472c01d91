//! What the channels of a volume and its keeper share: what is known of its zones, and who changes which
//! regions.

use super::layout::Layout;
use bdev::{Gate, Holds, IoError, ProtectionType, Wants};
use std::sync::OnceLock;
use std::sync::atomic::{AtomicBool, AtomicU8, AtomicU64, Ordering};

/// Zones that are in memory together or not at all.
const CHUNK: u64 = 2048;
/// So many zones in all: more than the most clusters of a volume have.
pub(crate) const ZONES_MAX: u64 = CHUNK * 2048;

/// A unit: what has one mark in the map.
pub(crate) struct Unit {
    /// Open while the map says durably that it is being written to.
    pub gate: Gate,
    /// Its regions that somebody changes, or looks at while nobody does.
    pub holds: Holds,
    /// How often it was found that blocks may have the tuple of another content, since each was compared.
    doubts: AtomicU64,
    /// Written to since the keeper looked.
    touched: AtomicBool,
}

impl Unit {
    fn new(layout: &Layout) -> Unit {
        Unit {
            gate: Gate::default(),
            holds: Holds::new(layout.unit_regions() as u32),
            doubts: AtomicU64::new(0),
            touched: AtomicBool::new(false),
        }
    }

    /// A block may have the tuple of another content. Such a one is taken for a block without a tuple.
    pub fn suspect(&self) {
        self.doubts.fetch_add(1, Ordering::SeqCst);
    }

    /// How often that was said; 0: what is wrong is damaged.
    #[inline]
    pub fn doubts(&self) -> u64 {
        self.doubts.load(Ordering::SeqCst)
    }

    /// Each of its blocks was compared with its tuple since that was said so often; `false`: it was said again.
    pub fn trust(&self, doubts: u64) -> bool {
        self.doubts.compare_exchange(doubts, 0, Ordering::SeqCst, Ordering::SeqCst).is_ok()
    }

    /// It is written to.
    #[inline]
    pub fn touch(&self) {
        if !self.touched.load(Ordering::Relaxed) {
            self.touched.store(true, Ordering::Relaxed);
        }
    }

    /// Whether it was since the last call.
    pub fn take_touched(&self) -> bool {
        self.touched.swap(false, Ordering::Relaxed)
    }
}

/// Of a zone: its map was not read.
const UNKNOWN: u8 = 0;
/// Of a zone: its map was read. More is the number of an error and 2.
const KNOWN: u8 = 1;

/// A zone, whose map is read when something of it is first used.
pub(crate) struct Zone {
    state: AtomicU8,
    pub units: Box<[Unit]>,
}

impl Zone {
    fn new(layout: &Layout) -> Zone {
        let units = (0..layout.units()).map(|_| Unit::new(layout)).collect();
        Zone { state: AtomicU8::new(UNKNOWN), units }
    }

    #[inline]
    pub fn is_known(&self) -> bool {
        self.state.load(Ordering::Acquire) == KNOWN
    }

    /// What the map says is in its units.
    pub fn set_known(&self) {
        self.state.store(KNOWN, Ordering::Release);
    }

    /// Its map is to be read anew, before anybody uses more of it.
    pub fn shut(&self) {
        self.state.store(UNKNOWN, Ordering::Release);
        self.units.iter().for_each(|unit| unit.gate.shut());
    }

    /// What was known of it does not count any more: its clusters are gone.
    pub fn forget(&self) {
        self.shut();
        for unit in &self.units {
            unit.trust(unit.doubts());
        }
    }

    /// Its map cannot be read, which one I/O is told: the next one has it tried again.
    pub fn fail(&self, error: IoError) {
        self.state.store(error as u8 + 2, Ordering::Release);
    }

    /// Why its map cannot be read.
    pub fn take_failed(&self) -> Option<IoError> {
        let found = self.state.load(Ordering::Acquire);
        let error = IoError::ALL.get(usize::from(found.checked_sub(2)?)).copied()?;
        let told = self.state.compare_exchange(found, UNKNOWN, Ordering::AcqRel, Ordering::Acquire);
        told.ok().map(|_| error)
    }
}

/// A zone of those in memory together, once it was used.
type Chunk = Box<[OnceLock<Zone>]>;

/// What a channel asks of the keeper.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Want {
    /// That the map of a zone is looked at.
    Look(u64),
    /// That a unit of a zone may be written to.
    Write(u64, u64),
}

pub(crate) struct Shared {
    pub layout: Layout,
    pub kind: ProtectionType,
    zones: Box<[OnceLock<Chunk>]>,
    pub wants: Wants<Want>,
    /// Somebody waits for a region that another thread has.
    contended: AtomicBool,
    /// A unit is to be looked through.
    pub suspects: AtomicBool,
    /// Flushes that failed here, and of which the keeper has drawn the consequences.
    failed: AtomicU64,
    settled: AtomicU64,
    /// Flushes that failed of the device below, whosever, as far as the keeper has.
    pub failures: AtomicU64,
    /// A flush of the keeper's was told that writes were lost, which the next one of a user's is to be.
    owed: AtomicBool,
    /// Pages of tuples that could not be read and were written anew, since the keeper said so.
    lost_pages: AtomicU64,
}

impl Shared {
    pub fn new(layout: Layout, kind: ProtectionType) -> Shared {
        Shared {
            layout,
            kind,
            zones: (0..ZONES_MAX / CHUNK).map(|_| OnceLock::new()).collect(),
            wants: Wants::default(),
            contended: AtomicBool::new(false),
            suspects: AtomicBool::new(false),
            failed: AtomicU64::new(0),
            settled: AtomicU64::new(0),
            failures: AtomicU64::new(0),
            owed: AtomicBool::new(false),
            lost_pages: AtomicU64::new(0),
        }
    }

    /// A zone that was used.
    #[inline]
    pub fn zone(&self, number: u64) -> Option<&Zone> {
        let chunk = self.zones.get((number / CHUNK) as usize)?.get()?;
        chunk[(number % CHUNK) as usize].get()
    }

    /// A zone; `None`: no volume has so many.
    pub fn make_zone(&self, number: u64) -> Option<&Zone> {
        let chunk = self.zones.get((number / CHUNK) as usize)?;
        let chunk = chunk.get_or_init(|| (0..CHUNK).map(|_| OnceLock::new()).collect());
        Some(chunk[(number % CHUNK) as usize].get_or_init(|| Zone::new(&self.layout)))
    }

    /// A unit of a zone that was used.
    #[inline]
    pub fn unit(&self, zone: u64, unit: u64) -> Option<&Unit> {
        self.zone(zone)?.units.get(unit as usize)
    }

    /// The unit of a zone's block, and which of its regions that is in.
    #[inline]
    pub fn unit_at(&self, zone: u64, within: u64) -> Option<(&Unit, u32)> {
        let unit = self.layout.unit_blocks();
        let region = within % unit / super::layout::REGION_BLOCKS;
        Some((self.unit(zone, within / unit)?, region as u32))
    }

    /// Has whoever lets go of a region tell the keeper, which tells all that listen.
    pub fn contend(&self) {
        self.contended.store(true, Ordering::SeqCst);
    }

    /// Lets go of regions of a unit.
    #[inline]
    pub fn let_go(&self, unit: &Unit, first: u32, count: u32) {
        unit.holds.let_go(first, count);
        if self.contended.load(Ordering::SeqCst) && self.contended.swap(false, Ordering::SeqCst) {
            self.tell_contenders();
        }
    }

    #[cold]
    fn tell_contenders(&self) {
        match self.wants.is_closed() {
            false => self.wants.ring(),
            // There is no keeper any more.
            true => self.wants.answered(),
        }
    }

    /// A page of tuples could not be read, and is written anew.
    pub fn lost_page(&self) {
        self.lost_pages.fetch_add(1, Ordering::Relaxed);
        self.wants.ring();
    }

    /// How many of these there were since the last call.
    pub fn take_lost_pages(&self) -> u64 {
        match self.lost_pages.load(Ordering::Relaxed) {
            0 => 0,
            _ => self.lost_pages.swap(0, Ordering::Relaxed),
        }
    }

    /// A write did not end well: data may be on the medium and not its tuples, or the other way.
    #[cold]
    pub fn suspect(&self, unit: &Unit) {
        unit.suspect();
        self.suspects.store(true, Ordering::SeqCst);
        self.wants.ring();
    }

    /// A flush failed: all that was written since the last one may not be as it was answered.
    #[cold]
    pub fn flush_failed(&self) {
        self.failed.fetch_add(1, Ordering::SeqCst);
        self.wants.ring();
    }

    /// The keeper was told what is said once, and to nobody else.
    pub fn owe_failure(&self) {
        self.owed.store(true, Ordering::SeqCst);
    }

    /// Whether a flush is to fail for that.
    #[inline]
    pub fn takes_owed(&self) -> bool {
        self.owed.load(Ordering::SeqCst) && self.owed.swap(false, Ordering::SeqCst)
    }

    /// Such flushes of which the keeper has not drawn the consequences; they are said to it with the number.
    pub fn unsettled(&self) -> Option<u64> {
        let failed = self.failed.load(Ordering::SeqCst);
        (failed != self.settled.load(Ordering::SeqCst)).then_some(failed)
    }

    /// It has.
    pub fn settle(&self, failed: u64) {
        self.settled.store(failed, Ordering::SeqCst);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use bdev::Ear;

    #[test]
    fn a_zone_is_there_once_it_was_used_and_known_until_it_is_forgotten() {
        let shared = Shared::new(Layout::new(512, 1 << 20), ProtectionType::Type1);
        assert!(shared.zone(5000).is_none() && shared.unit(5000, 3).is_none());
        let zone = shared.make_zone(5000).unwrap();
        assert!(!zone.is_known() && zone.take_failed().is_none());
        assert_eq!(zone.units.len(), 16);
        zone.fail(IoError::RefTag);
        assert_eq!((zone.take_failed(), zone.take_failed()), (Some(IoError::RefTag), None));
        zone.set_known();
        let (unit, region) = shared.unit_at(5000, 3 * 8192 + 1025).unwrap();
        assert!(std::ptr::eq(unit, &raw const zone.units[3]) && region == 2);
        unit.gate.open();
        unit.suspect();
        zone.forget();
        assert!(!zone.is_known() && !unit.gate.is_open() && unit.doubts() == 0);
        assert!(shared.make_zone(ZONES_MAX - 1).is_some() && shared.make_zone(ZONES_MAX).is_none());
        assert!(shared.zone(ZONES_MAX).is_none());
    }

    #[test]
    fn what_is_suspected_meanwhile_is_not_trusted() {
        let unit = Unit::new(&Layout::new(512, 64 << 10));
        unit.suspect();
        let looked_at = unit.doubts();
        unit.suspect();
        assert!(!unit.trust(looked_at) && unit.doubts() == 2);
        assert!(unit.trust(2) && unit.doubts() == 0);
    }

    #[test]
    fn who_lets_go_on_a_closed_volume_tells_who_waits_for_that() {
        let shared = Shared::new(Layout::new(512, 64 << 10), ProtectionType::Type1);
        let unit = Unit::new(&shared.layout);
        let ear = Ear::new(reactor::IoContext::new().unwrap().waker());
        shared.wants.add_ear(&ear);
        assert!(unit.holds.hold(0, 1));
        shared.wants.close();
        shared.wants.listen(&ear);
        shared.contend();
        assert!(!shared.wants.is_round(2));
        shared.let_go(&unit, 0, 1);
        assert!(shared.wants.is_round(2), "nobody answered");
    }
}
