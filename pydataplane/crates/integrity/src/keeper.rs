//! The thread that keeps the checksums: has those in memory that are needed, makes regions writable before
//! the first write to them, and writes what has changed to the base, later.
//!
//! It alone changes maps and pages of checksums, in memory and on the medium, and may wait for the base.
//! Channels ask it with [`Want`]s; what it did, they see in the [`Table`].

mod cleaning;
mod filling;
mod states;

use crate::error::Error;
use crate::format::{self, Superblock};
use crate::layout::{self, REGIONS};
use crate::medium::Medium;
use crate::table::{Table, Want};
use bdev::{Bdev, FlushLatch};
use reactor::{Next, Work};
use states::{State, States};
use std::collections::{BTreeMap, BTreeSet, HashSet};
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

/// Requests that are answered at a time.
const WANTS_AT_ONCE: usize = 256;
/// Regions after one that is written to which are marked with it, where the one before it is written to,
/// too: what is written in order costs a durable write for so many of them.
const AHEAD: u32 = 16;
/// Blocks that are logged, each once.
const LOGGED: usize = 1024;

/// How long a region stays writable.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Times {
    /// The keeper looks for regions to clean this often.
    pub turn: Duration,
    /// Turns without a change after which a region is cleaned.
    pub quiet: u32,
}

impl Default for Times {
    fn default() -> Self {
        Times { turn: Duration::from_secs(1), quiet: 5 }
    }
}

pub(crate) struct Keeper {
    table: Arc<Table>,
    base: Arc<dyn Bdev>,
    medium: Medium,
    superblock: Superblock,
    states: States,
    /// By cache page: its region.
    owners: Vec<Option<u32>>,
    free: Vec<u16>,
    /// Where the search for a page to evict goes on.
    hand: usize,
    /// The region whose checksums are made anew, and the block to go on with.
    filling: Option<(u32, u16)>,
    logged: HashSet<u64>,
    times: Times,
    next_turn: Instant,
}

impl Keeper {
    /// Reads the maps. Writes nothing.
    pub fn open(
        base: Arc<dyn Bdev>,
        superblock: Superblock,
        table: Arc<Table>,
        pages: u16,
        times: Times,
    ) -> Result<Keeper, Error> {
        let mut medium = Medium::open(&*base)?;
        let zones = layout::zones(superblock.device_pages) as usize;
        let states = States::read(&mut medium, &superblock, zones, &table, base.name())?;
        (0..zones).for_each(|zone| table.add_zone(zone));
        let keeper = Keeper {
            table,
            base,
            medium,
            superblock,
            states,
            owners: vec![None; usize::from(pages)],
            free: (0..pages).rev().collect(),
            hand: 0,
            filling: None,
            logged: HashSet::new(),
            times,
            next_turn: Instant::now() + times.turn,
        };
        keeper.count();
        Ok(keeper)
    }

    fn store(&self) -> u64 {
        self.superblock.store()
    }

    /// Answers what is asked for.
    fn serve(&mut self) {
        let mut wants = Vec::new();
        while wants.len() < WANTS_AT_ONCE
            && let Some(want) = self.table.wants.next_want()
        {
            wants.push(want);
        }
        if wants.is_empty() {
            return;
        }
        let absent: BTreeSet<u32> =
            wants.iter().map(|w| w.region).filter(|r| self.table.peek(*r).is_none()).collect();
        self.load(&absent);
        self.mark(&wants);
        self.count();
    }

    /// Brings the checksums of regions into memory.
    fn load(&mut self, regions: &BTreeSet<u32>) {
        let mut reads: Vec<(u32, u16)> = Vec::new();
        for region in regions {
            // Where all pages are in use it is asked for again.
            let Some(at) = self.free.pop().or_else(|| self.evict()) else { break };
            match self.states.get(*region) {
                State::Unused | State::AheadUnused | State::Stale => {
                    self.table.page(at).fill(|_| 0);
                    self.owners[usize::from(at)] = Some(*region);
                    self.table.publish(*region, at);
                }
                State::Clean | State::AheadClean | State::Dirty => reads.push((*region, at)),
            }
        }
        let places: Vec<u64> = reads.iter().map(|(region, _)| layout::sums_page(*region)).collect();
        let (table, store, base) = (&self.table, self.superblock.store(), &self.base);
        let (owners, free) = (&mut self.owners, &mut self.free);
        self.medium.read_all(&places, |nth, read| {
            let (region, at) = reads[nth];
            let page = match read {
                Ok(page) => page,
                Err(e) => {
                    free.push(at);
                    return table.fail(region, e);
                }
            };
            let (sums, fault) = format::decode_sums(page, store, region);
            if let Some(fault) = fault {
                table.counts.damaged_sums.fetch_add(1, Ordering::Relaxed);
                tracing::error!(
                    "the checksums of region {region} on bdev {}, at byte {}, are damaged: {fault}",
                    base.name(),
                    places[nth] * layout::PAGE as u64
                );
            }
            table.page(at).fill(|nth| sums[nth]);
            owners[usize::from(at)] = Some(region);
            table.publish(region, at);
        });
    }

    /// A cache page that nobody needs now; `None`: all are in use.
    fn evict(&mut self) -> Option<u16> {
        for _ in 0..2 * self.owners.len() {
            let at = self.hand as u16;
            self.hand = (self.hand + 1) % self.owners.len();
            let Some(region) = self.owners[usize::from(at)] else { continue };
            let page = self.table.page(at);
            let filled = self.filling.is_some_and(|(filled, _)| filled == region);
            if filled || page.used.swap(false, Ordering::Relaxed) {
                continue;
            }
            if !self.table.take_away(region, at) {
                continue;
            }
            // What a stale region has is made anew; else it is needed while the process lives.
            let kept = self.states.get(region) != State::Stale;
            if kept && page.changed.load(Ordering::Acquire) {
                let sums = format::encode_sums(self.store(), region, |nth| page.entry(nth));
                if let Err(e) = self.medium.write(layout::sums_page(region), &sums) {
                    tracing::error!("checksums stay in memory: {e}");
                    self.table.publish(region, at);
                    continue;
                }
            }
            self.owners[usize::from(at)] = None;
            return Some(at);
        }
        None
    }

    /// Makes regions that are in memory writable, durably first.
    fn mark(&mut self, wants: &[Want]) {
        let mut zones: BTreeMap<usize, BTreeSet<u32>> = BTreeMap::new();
        for want in wants.iter().filter(|want| want.write) {
            let Some(at) = self.table.peek(want.region) else { continue };
            if self.table.page(at).gate.is_open() {
                continue;
            }
            if self.states.is_durably_dirty(want.region) {
                self.write_to(want.region, at);
                self.count();
                self.table.page(at).gate.open();
                continue;
            }
            zones.entry((want.region / REGIONS) as usize).or_default().insert(want.region);
        }
        for (zone, regions) in zones {
            self.mark_zone(zone, &regions);
        }
    }

    /// A region, of which cache page `at` is, is written to from now on.
    fn write_to(&mut self, region: u32, at: u16) {
        if matches!(self.states.get(region), State::Unused | State::AheadUnused) {
            // There are none on the medium.
            self.table.page(at).changed.store(true, Ordering::Release);
        }
        self.states.write_to(region, self.table.clock.load(Ordering::Relaxed));
    }

    fn mark_zone(&mut self, zone: usize, regions: &BTreeSet<u32>) {
        let clock = self.table.clock.load(Ordering::Relaxed);
        let before = self.states.zone(zone);
        let end = (zone as u32 + 1) * REGIONS;
        for region in regions {
            let in_order =
                !region.is_multiple_of(REGIONS) && self.states.get(region - 1).is_written();
            if let Some(at) = self.table.peek(*region) {
                self.write_to(*region, at);
            }
            if in_order {
                for next in region + 1..(region + AHEAD).min(end) {
                    self.states.go_ahead(next, clock);
                }
            }
        }
        let map = self.states.encode(zone, self.store());
        let written = self.medium.write_durably(layout::map_page(zone), &map);
        self.states.set_durable(zone, written.is_ok());
        if let Err(e) = &written {
            self.states.set_zone(zone, before);
            tracing::error!("regions of zone {zone} take no writes: {e}");
        }
        // Who writes then finds it counted.
        self.count();
        for region in regions {
            let Some(at) = self.table.peek(*region) else { continue };
            match &written {
                Ok(()) => self.table.page(at).gate.open(),
                Err(e) => self.table.page(at).gate.refuse(e.cause),
            }
        }
    }

    /// Logs what channels found, each block once.
    fn log_found(&mut self) {
        while let Some(block) = self.table.found.pop() {
            if self.logged.len() < LOGGED && self.logged.insert(block) {
                let page = layout::locate(block).page;
                self.table.damaged.lock().insert(block);
                tracing::error!(
                    "block {block} of 4096 bytes, at byte {} of bdev {}, is damaged: it is not what \
                     was written to it",
                    page * layout::PAGE as u64,
                    self.base.name()
                );
            }
        }
    }

    /// Whether a flush failed and nobody looked into it: nothing can be made durable.
    fn is_latched(&self) -> bool {
        self.base.flush_latch().is_some_and(FlushLatch::is_set)
    }

    fn count(&self) {
        let cached = self.owners.iter().flatten().count() as u64;
        let counts = &self.table.counts;
        counts.cached.store(cached, Ordering::Relaxed);
        counts.dirty.store(self.states.dirty().len() as u64, Ordering::Relaxed);
        counts.stale.store(self.states.stale() as u64, Ordering::Relaxed);
    }

    /// Cleans all that can be, and answers nobody any more. Safe to repeat.
    pub fn close(&mut self) {
        if self.table.wants.is_closed() {
            return;
        }
        while self.clean(true) > 0 {}
        let left = self.states.dirty().len() + self.states.stale();
        if left > 0 && !self.base.features().read_only {
            tracing::warn!(
                "{left} regions of bdev {} are left without checksums, which are made anew when it is \
                 loaded",
                self.superblock.name
            );
        }
        self.table.wants.close();
    }

    /// Cleans all that can be; returns how many regions.
    pub fn clean_all(&mut self) -> usize {
        let cleaned = self.clean(true);
        self.count();
        cleaned
    }

    /// Takes what the base has gained. Returns whether there was anything.
    ///
    /// # Errors
    /// [`Error::GrewTooMuch`], [`Error::Size`], [`Error::Io`]: then the size stays as it was.
    pub fn grow(&mut self) -> Result<bool, Error> {
        let geometry = self.base.geometry();
        let pages = geometry.bytes() / layout::PAGE as u64;
        let blocks = layout::data_blocks(pages);
        if pages <= self.superblock.device_pages || blocks <= self.table.blocks() {
            return Ok(false);
        }
        let (from, to) = (self.states.zones(), layout::zones(pages));
        if to > self.table.zones_max() as u64 {
            return Err(Error::GrewTooMuch { bdev: self.base.name().to_owned(), from, to });
        }
        for zone in from..to as usize {
            self.states.add_zone();
            let map = self.states.encode(zone, self.store());
            if let Err(e) = self.medium.write(layout::map_page(zone), &map) {
                self.states.remove_zones(from);
                return Err(e.into());
            }
        }
        let grown = Superblock {
            generation: self.superblock.generation + 1,
            device_pages: pages,
            ..self.superblock.clone()
        };
        let written = self.medium.flush().and_then(|()| write_superblock(&mut self.medium, &grown));
        if let Err(e) = written {
            self.states.remove_zones(from);
            return Err(e.into());
        }
        self.superblock = grown;
        (from..to as usize).for_each(|zone| self.table.add_zone(zone));
        self.table.set_blocks(blocks);
        Ok(true)
    }
}

/// Writes both copies of a superblock, each durably.
pub(crate) fn write_superblock(
    medium: &mut Medium,
    superblock: &Superblock,
) -> Result<(), bdev::SyncError> {
    // What was written before is durable before it.
    for page in format::COPIES {
        medium.write(page, &superblock.encode())?;
        medium.flush()?;
    }
    Ok(())
}

impl Work for Keeper {
    fn round(&mut self) -> Next {
        if self.table.wants.is_closed() {
            return Next::WhenRung;
        }
        self.serve();
        self.table.wants.answered();
        self.log_found();
        let now = Instant::now();
        if now >= self.next_turn {
            self.next_turn = now + self.times.turn;
            self.table.clock.fetch_add(1, Ordering::Relaxed);
            self.clean(false);
            self.count();
        }
        if self.table.wants.is_asked() || self.fill() {
            return Next::Now;
        }
        match self.states.dirty().is_empty() {
            true => Next::WhenRung,
            false => Next::Within(self.next_turn.saturating_duration_since(now)),
        }
    }

    fn end(mut self) {
        self.close();
    }
}
