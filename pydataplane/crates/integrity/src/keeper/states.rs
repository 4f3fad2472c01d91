//! What is known of each region, and what its zone's map says of it.

use crate::error::Error;
use crate::format::{self, Mark, Superblock};
use crate::layout::{self, PAGE, REGIONS};
use crate::medium::Medium;
use crate::table::Table;
use bdev::{IoError, Op, SyncError};
use std::collections::{BTreeMap, BTreeSet};
use std::sync::atomic::Ordering;

/// A region.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum State {
    /// It has no checksums.
    Unused,
    /// Its checksums are on the medium.
    Clean,
    /// It may be written to; its checksums are in memory, or on the medium as of this process.
    Dirty,
    /// As [`State::Unused`], but marked: it may be written to next.
    AheadUnused,
    /// As [`State::Clean`], but marked.
    AheadClean,
    /// It was dirty when the process before ended: its checksums are still to be made anew.
    Stale,
}

impl State {
    fn mark(self) -> Mark {
        match self {
            State::Unused => Mark::Unused,
            State::Clean => Mark::Clean,
            State::Dirty | State::AheadUnused | State::AheadClean | State::Stale => Mark::Dirty,
        }
    }

    /// Whether it is written to in this process.
    pub fn is_written(self) -> bool {
        matches!(self, State::Dirty | State::Stale)
    }
}

pub(super) type Zone = [State; REGIONS as usize];

/// All of them.
#[derive(Default)]
pub(super) struct States {
    zones: Vec<Zone>,
    /// Whether the marks of a zone that say dirty are durable.
    durable: Vec<bool>,
    /// Regions that are marked in this process, and since when, by [`Table::clock`].
    dirty: BTreeMap<u32, u32>,
    stale: BTreeSet<u32>,
}

impl States {
    /// Of the maps on a base. Where one does not count all of its regions may have been written to.
    pub fn read(
        medium: &mut Medium,
        superblock: &Superblock,
        zones: usize,
        table: &Table,
        bdev: &str,
    ) -> Result<States, Error> {
        let mut states = States {
            zones: vec![[State::Unused; REGIONS as usize]; zones],
            durable: vec![false; zones],
            ..States::default()
        };
        let places: Vec<u64> = (0..zones).map(layout::map_page).collect();
        let mut failed: Option<(u64, IoError)> = None;
        medium.read_all(&places, |zone, read| match read {
            Err(e) => failed = Some((places[zone], e)),
            Ok(page) => {
                let marks = format::decode_map(page, superblock.store(), zone as u32);
                let marks = marks.unwrap_or_else(|fault| {
                    table.counts.damaged_maps.fetch_add(1, Ordering::Relaxed);
                    tracing::error!(
                        "the map of zone {zone} on bdev {bdev}, at byte {}, is damaged: {fault}; the \
                         zone's checksums are made anew",
                        places[zone] * PAGE as u64
                    );
                    [Mark::Dirty; REGIONS as usize]
                });
                for (nth, mark) in marks.iter().enumerate() {
                    states.zones[zone][nth] = match mark {
                        Mark::Unused => State::Unused,
                        Mark::Clean => State::Clean,
                        Mark::Dirty => {
                            states.stale.insert(zone as u32 * REGIONS + nth as u32);
                            State::Stale
                        }
                    };
                }
            }
        });
        if let Some((lba, cause)) = failed {
            let name = bdev.to_owned();
            return Err(SyncError { name, op: Op::Read, lba, blocks: 1, cause }.into());
        }
        // What is behind the end has nothing.
        let blocks = layout::data_blocks(superblock.device_pages);
        states.stale.retain(|region| first_block(*region) < blocks);
        Ok(states)
    }

    pub fn zones(&self) -> usize {
        self.zones.len()
    }

    pub fn add_zone(&mut self) {
        self.zones.push([State::Unused; REGIONS as usize]);
        self.durable.push(false);
    }

    pub fn remove_zones(&mut self, from: usize) {
        self.zones.truncate(from);
        self.durable.truncate(from);
    }

    pub fn get(&self, region: u32) -> State {
        self.zones[(region / REGIONS) as usize][(region % REGIONS) as usize]
    }

    fn set(&mut self, region: u32, state: State) {
        self.zones[(region / REGIONS) as usize][(region % REGIONS) as usize] = state;
    }

    /// The states of a zone, for [`States::set_zone`].
    pub fn zone(&self, zone: usize) -> Zone {
        self.zones[zone]
    }

    /// Takes back what was done since.
    pub fn set_zone(&mut self, zone: usize, states: Zone) {
        self.zones[zone] = states;
        for (nth, state) in states.iter().enumerate() {
            if matches!(state, State::Unused | State::Clean) {
                self.dirty.remove(&(zone as u32 * REGIONS + nth as u32));
            }
        }
    }

    pub fn set_durable(&mut self, zone: usize, durable: bool) {
        self.durable[zone] = durable;
    }

    /// Whether a power cut leaves it marked.
    pub fn is_durably_dirty(&self, region: u32) -> bool {
        self.durable[(region / REGIONS) as usize] && self.get(region).mark() == Mark::Dirty
    }

    /// It is written to from now on.
    pub fn write_to(&mut self, region: u32, clock: u32) {
        if self.get(region) != State::Stale {
            self.set(region, State::Dirty);
            self.dirty.insert(region, clock);
        }
    }

    /// It is marked, as it may be written to soon.
    pub fn go_ahead(&mut self, region: u32, clock: u32) {
        let ahead = match self.get(region) {
            State::Unused => State::AheadUnused,
            State::Clean => State::AheadClean,
            State::Dirty | State::AheadUnused | State::AheadClean | State::Stale => return,
        };
        self.set(region, ahead);
        self.dirty.insert(region, clock);
    }

    /// Its checksums are on the medium, as far as it has any.
    pub fn clean(&mut self, region: u32) {
        let state = match self.get(region) {
            State::Dirty | State::AheadClean => State::Clean,
            State::AheadUnused => State::Unused,
            State::Unused | State::Clean | State::Stale => return,
        };
        self.set(region, state);
        self.dirty.remove(&region);
    }

    /// Its map may not say so: it is dirty again, but not durably.
    pub fn unclean(&mut self, region: u32, clock: u32) {
        self.set(region, State::Dirty);
        self.dirty.insert(region, clock);
        self.set_durable((region / REGIONS) as usize, false);
    }

    /// It was stale, and all of its checksums are in memory.
    pub fn filled(&mut self, region: u32, clock: u32) {
        self.stale.remove(&region);
        self.set(region, State::Dirty);
        self.dirty.insert(region, clock);
    }

    /// Marked regions, and since when.
    pub fn dirty(&self) -> &BTreeMap<u32, u32> {
        &self.dirty
    }

    /// How many are stale.
    pub fn stale(&self) -> usize {
        self.stale.len()
    }

    /// A stale one; the first for which `f` is true, else any.
    pub fn next_stale(&self, f: impl Fn(u32) -> bool) -> Option<u32> {
        self.stale.iter().copied().take(4096).find(|r| f(*r)).or(self.stale.first().copied())
    }

    /// A zone's map as a page.
    pub fn encode(&self, zone: usize, store: u64) -> Vec<u8> {
        format::encode_map(store, zone as u32, &self.zones[zone].map(State::mark))
    }
}

/// The first block of a region.
pub(super) fn first_block(region: u32) -> u64 {
    u64::from(region / REGIONS) * layout::ZONE_BLOCKS
        + u64::from(region % REGIONS) * u64::from(layout::REGION_BLOCKS)
}
