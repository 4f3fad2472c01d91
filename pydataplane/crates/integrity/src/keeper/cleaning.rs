//! Writing checksums to the base, so that their regions need not be made anew after a crash.

use super::Keeper;
use super::states::State;
use crate::format;
use crate::layout::{self, REGIONS};
use bdev::{Bdev, FlushLatch};
use std::collections::BTreeSet;
use std::sync::atomic::Ordering;

/// Regions that are cleaned at a time.
const AT_ONCE: usize = 512;

/// One that is being cleaned, and its cache page if it has one.
#[derive(Clone, Copy)]
struct Closed {
    region: u32,
    page: Option<u16>,
}

impl Keeper {
    /// Cleans regions that have not been written to for a while, or `all`; returns how many.
    ///
    /// Their checksums are written, and then, with their data, made durable by a flush. Only then their maps
    /// say clean, which need not be durable.
    pub(super) fn clean(&mut self, all: bool) -> usize {
        if self.is_latched() || self.base.features().read_only {
            return 0;
        }
        let mut closed = self.close_quiet(all);
        if closed.is_empty() {
            return 0;
        }
        let failures = |base: &dyn Bdev| base.flush_latch().map_or(0, FlushLatch::failures);
        let before = failures(&*self.base);
        self.write_sums(&mut closed);
        let flushed = self.medium.flush();
        let well = flushed.is_ok() && failures(&*self.base) == before;
        if !well {
            if let Err(e) = flushed {
                tracing::warn!("checksums are not durable yet: {e}");
            }
            closed.iter().for_each(|each| self.reopen(*each));
            return 0;
        }
        for each in &closed {
            self.states.clean(each.region);
        }
        self.write_maps(&closed);
        closed.len()
    }

    /// Has no more writes go to regions that can be cleaned.
    fn close_quiet(&self, all: bool) -> Vec<Closed> {
        let clock = self.table.clock.load(Ordering::Relaxed);
        let mut closed = Vec::new();
        for (region, since) in self.states.dirty() {
            if closed.len() == AT_ONCE {
                break;
            }
            let page = self.table.peek(*region);
            let last = match page {
                Some(at) => self.table.page(at).last.load(Ordering::Relaxed).max(*since),
                None => *since,
            };
            if !all && clock.wrapping_sub(last) < self.times.quiet {
                continue;
            }
            if page.is_none_or(|at| self.table.page(at).gate.close()) {
                closed.push(Closed { region: *region, page });
            }
        }
        closed
    }

    /// Writes may go on; the map still says so.
    fn reopen(&self, each: Closed) {
        // One that is only marked ahead has none.
        if let Some(at) = each.page.filter(|_| self.states.get(each.region) == State::Dirty) {
            self.table.page(at).gate.open();
        }
    }

    /// Writes the checksums that are not on the medium; keeps those regions of which they are then.
    fn write_sums(&mut self, closed: &mut Vec<Closed>) {
        let is_changed = |each: &&Closed| {
            let page = each.page.map(|at| self.table.page(at));
            page.is_some_and(|page| page.changed.load(Ordering::Acquire))
                && self.states.get(each.region) == State::Dirty
        };
        let changed: Vec<Closed> = closed.iter().filter(is_changed).copied().collect();
        let places: Vec<u64> = changed.iter().map(|each| layout::sums_page(each.region)).collect();
        let (table, store) = (&self.table, self.superblock.store());
        let mut failed = BTreeSet::new();
        self.medium.write_all(
            &places,
            |nth| {
                let page = table.page(changed[nth].page.unwrap_or_default());
                format::encode_sums(store, changed[nth].region, |at| page.entry(at))
            },
            |nth, written| match written {
                Ok(()) => {
                    let page = table.page(changed[nth].page.unwrap_or_default());
                    page.changed.store(false, Ordering::Release);
                }
                Err(e) => {
                    tracing::warn!("checksums of region {}: {e}", changed[nth].region);
                    failed.insert(changed[nth].region);
                }
            },
        );
        closed.iter().filter(|each| failed.contains(&each.region)).for_each(|e| self.reopen(*e));
        closed.retain(|each| !failed.contains(&each.region));
    }

    /// Writes the maps of the zones of regions that are clean now.
    fn write_maps(&mut self, closed: &[Closed]) {
        let zones: BTreeSet<usize> =
            closed.iter().map(|each| (each.region / REGIONS) as usize).collect();
        let zones: Vec<usize> = zones.into_iter().collect();
        let places: Vec<u64> = zones.iter().map(|zone| layout::map_page(*zone)).collect();
        let (states, store) = (&self.states, self.superblock.store());
        let mut failed = BTreeSet::new();
        self.medium.write_all(
            &places,
            |nth| states.encode(zones[nth], store),
            |nth, written| {
                if let Err(e) = written {
                    tracing::warn!("the map of zone {}: {e}", zones[nth]);
                    failed.insert(zones[nth]);
                }
            },
        );
        let clock = self.table.clock.load(Ordering::Relaxed);
        for each in closed.iter().filter(|e| failed.contains(&((e.region / REGIONS) as usize))) {
            self.states.unclean(each.region, clock);
        }
    }
}
