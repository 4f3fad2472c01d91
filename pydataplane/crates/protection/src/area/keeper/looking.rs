//! Comparing blocks with their tuples, of units that were being written to when the process, or the host, ended,
//! or in which a write or a flush failed; and letting go of tuples of blocks that are no more.

use super::{Keeper, Number, PATIENCE};
use crate::area::layout::{PAGE, REGION_BLOCKS};
use crate::block;
use bdev::{AlignedBuf, Checks, IoError, SyncChannel, TUPLE_LEN};
use reactor::Next;
use std::collections::BTreeSet;
use std::time::{Duration, Instant};

/// Bytes of data that are read at a time.
const AT_ONCE: usize = 256 << 10;
/// Blocks of a region that may be unreadable, at most, for the others to be compared: more is no bad sector.
const UNREADABLE: usize = 16;
/// A region that somebody has is tried again after so long.
const HELD: Duration = Duration::from_millis(1);

/// A unit that is looked through.
pub(super) struct Looking {
    number: Number,
    /// Its next region.
    region: u64,
    /// How often it was doubted when this began.
    doubts: u64,
    /// Blocks that have no tuple any more.
    wrong: u64,
    /// A region could not be compared.
    failed: Option<IoError>,
    /// Of which blocks could not be read, each as a bit, and of which some time ago: what cannot be read of those even
    /// now is left out.
    unreadable: u64,
    before: u64,
}

/// That of a region of a unit.
fn bit(region: u64) -> u64 {
    1 << region
}

/// What became of a region.
enum Looked {
    /// So many blocks were wrong.
    Through(u64),
    /// It cannot be compared. Others can, perhaps.
    Failed(IoError),
    /// Somebody has it.
    Held,
    /// It has no blocks.
    Beyond,
}

impl Keeper {
    /// Goes on with a region of a unit that is doubted: a block whose tuple is not its own gets that of a block
    /// that nobody wrote. Says when there is more to do.
    pub(super) fn look_through(&mut self) -> Next {
        if self.is_read_only() || self.is_latched() || self.paused {
            return Next::WhenRung;
        }
        let Some(mut looking) = self.looking.take().or_else(|| self.next_to_look_through()) else {
            return Next::WhenRung;
        };
        match self.look_at_region(&looking) {
            Ok(Looked::Through(wrong)) => {
                looking.region += 1;
                looking.wrong += wrong;
                self.looking = Some(looking);
            }
            Ok(Looked::Failed(e)) => {
                if e == IoError::ReadMedium {
                    looking.unreadable |= bit(looking.region);
                }
                looking.region += 1;
                looking.failed = Some(e);
                self.looking = Some(looking);
            }
            Ok(Looked::Held) => {
                self.looking = Some(looking);
                return Next::Within(HELD);
            }
            Ok(Looked::Beyond) => match looking.failed {
                None => self.looked_through(&looking),
                Some(e) => self.not_looked_through(&looking, e),
            },
            Err(e) => self.not_looked_through(&looking, e),
        }
        Next::Now
    }

    /// A unit could not be compared, or not all of it.
    fn not_looked_through(&mut self, looking: &Looking, error: IoError) {
        let (zone, name) = (looking.number.0, self.below.name());
        tracing::error!("a part of zone {zone} of {name} is not looked through: {error}");
        self.delay(looking.number);
        if let Some(its) = self.marked.get_mut(&looking.number) {
            // Where not all of it was tried, what was known of the rest still counts.
            let rest = if looking.failed.is_some() { 0 } else { looking.before };
            its.unreadable = looking.unreadable | rest;
        }
    }

    /// All of a unit was compared: what is wrong from now on is damaged, unless it was doubted again.
    fn looked_through(&mut self, looking: &Looking) {
        let trusted = self.unit(looking.number).is_some_and(|unit| unit.trust(looking.doubts));
        self.suspects |= !trusted;
        if looking.wrong > 0 {
            tracing::warn!(
                "{} blocks of {} that were being written have no protection information until they \
                 are written again",
                looking.wrong,
                self.below.name()
            );
        }
        // Nobody has to have written to it: it may be cleaned in the next turn.
        if let Some(its) = self.marked.get_mut(&looking.number) {
            its.quiet = self.times.quiet;
            its.not_before = None;
            its.unreadable = 0;
        }
    }

    /// A unit that is doubted, and was not found unreadable a moment ago.
    fn next_to_look_through(&mut self) -> Option<Looking> {
        if !self.suspects {
            return None;
        }
        let now = Instant::now();
        let mut put_off = false;
        for (number, its) in &self.marked {
            let doubts = self.unit(*number).map_or(0, |unit| unit.doubts());
            if doubts == 0 {
                continue;
            }
            if its.not_before.is_none_or(|time| time <= now) {
                return Some(Looking {
                    number: *number,
                    region: 0,
                    doubts,
                    wrong: 0,
                    failed: None,
                    unreadable: 0,
                    before: its.unreadable,
                });
            }
            put_off = true;
        }
        self.suspects = put_off;
        None
    }

    fn look_at_region(&mut self, looking: &Looking) -> Result<Looked, IoError> {
        let layout = self.shared.layout;
        let (zone, nth) = looking.number;
        let first = zone * layout.zone_blocks();
        let end = layout.data_blocks(self.below.geometry().num_blocks).saturating_sub(first);
        let end = end.min(layout.zone_blocks()).min((nth + 1) * layout.unit_blocks());
        let within = nth * layout.unit_blocks() + looking.region * REGION_BLOCKS;
        if within >= end {
            return Ok(Looked::Beyond);
        }
        self.look(zone);
        if !self.knows(zone) {
            return Err(IoError::ReadMedium);
        }
        // What said so may have been read from a cache.
        self.mark(zone, &BTreeSet::from([nth]))?;
        let (shared, region) = (self.shared.clone(), looking.region as u32);
        let Some(unit) = shared.unit(zone, nth) else { return Ok(Looked::Beyond) };
        if !unit.holds.hold(region, 1) {
            return Ok(Looked::Held);
        }
        let leaves_out = looking.before & bit(looking.region) != 0;
        let wrong = self.compare(zone, (within, end.min(within + REGION_BLOCKS)), leaves_out);
        shared.let_go(unit, region, 1);
        Ok(wrong.map_or_else(Looked::Failed, Looked::Through))
    }

    /// Blocks that are read at a time.
    fn at_once(&self) -> u64 {
        let most = AT_ONCE as u64 / u64::from(self.shared.layout.block_size());
        match u64::from(self.below.features().max_blocks) {
            0 => most,
            blocks => most.min(blocks),
        }
    }

    /// Reads blocks of data from block `lba` on. With `lost` those that cannot be read are left out and noted there,
    /// [`UNREADABLE`] at most.
    fn read(
        &mut self,
        lba: u64,
        bytes: &mut [u8],
        mut lost: Option<&mut Vec<u64>>,
    ) -> Result<(), IoError> {
        let (layout, block) = (self.shared.layout, self.shared.layout.block_size() as usize);
        let read = self.with(|channel| channel.read(layout.locate(lba).lba, bytes));
        let Some(lost) = lost.as_mut().filter(|_| read == Err(IoError::ReadMedium)) else {
            return read;
        };
        let half = bytes.len() / block / 2;
        if half == 0 {
            lost.push(lba);
            return if lost.len() > UNREADABLE { read } else { Ok(()) };
        }
        let (first, second) = bytes.split_at_mut(half * block);
        self.read(lba, first, Some(lost))?;
        self.read(lba + half as u64, second, Some(lost))
    }

    /// Compares the blocks of a region, which nobody else changes; returns how many have no tuple any more. Those that
    /// cannot be read are an error, unless they are to be left out: such a block has none, either, should it come back.
    fn compare(
        &mut self,
        zone: u64,
        (from, till): (u64, u64),
        leaves_out: bool,
    ) -> Result<u64, IoError> {
        let (layout, kind) = (self.shared.layout, self.shared.kind);
        let block = layout.block_size() as usize;
        let page_at = layout.page(zone, from / REGION_BLOCKS);
        let mut page = AlignedBuf::zeroed(PAGE);
        self.with(|channel| channel.read(page_at, &mut page))?;
        let mut data = AlignedBuf::zeroed(AT_ONCE);
        let (mut wrong, mut within, mut lost) = (0, from, Vec::new());
        while within < till {
            let blocks = (till - within).min(self.at_once());
            let bytes = &mut data[..blocks as usize * block];
            let lba = zone * layout.zone_blocks() + within;
            self.read(lba, bytes, leaves_out.then_some(&mut lost))?;
            let tuples = page.as_chunks_mut::<TUPLE_LEN>().0.iter_mut();
            let tuples = tuples.skip((within - from) as usize);
            for ((at, data), stored) in (lba..).zip(bytes.chunks_exact(block)).zip(tuples) {
                let its = block::lying(stored).check(kind, Checks::ALL, at, data);
                if *stored != block::NOTHING && (its.is_err() || lost.contains(&at)) {
                    *stored = block::NOTHING;
                    wrong += 1;
                }
            }
            within += blocks;
        }
        if wrong > 0 {
            self.with(|channel| channel.write(page_at, &page))?;
        }
        Ok(wrong)
    }

    /// Makes the tuples of blocks beyond the end, as far as its last zone has them, those of blocks that nobody
    /// wrote, durably: they may come back, without what they had.
    pub fn forget_beyond(&mut self) -> Result<(), IoError> {
        self.forget_zones();
        let layout = self.shared.layout;
        let end = layout.data_blocks(self.below.geometry().num_blocks);
        let (zone, within) = (end / layout.zone_blocks(), end % layout.zone_blocks());
        if within == 0 {
            return Ok(());
        }
        let shared = self.shared.clone();
        shared.make_zone(zone).ok_or(IoError::OutOfRange)?;
        let region = within / REGION_BLOCKS;
        let (unit, nth) = shared.unit_at(zone, within).ok_or(IoError::OutOfRange)?;
        // The page of the last block is that of others as well.
        let until = Instant::now() + PATIENCE;
        while !unit.holds.hold(nth, 1) {
            if Instant::now() > until {
                return Err(IoError::Aborted);
            }
            std::thread::sleep(Duration::from_micros(100));
        }
        let first = (within % REGION_BLOCKS) as usize * TUPLE_LEN;
        let done = self.forget(layout.page(zone, region), PAGE, first);
        shared.let_go(unit, nth, 1);
        done?;
        // Those of the rest are nobody's.
        let mut next = region + 1;
        while next < layout.regions() {
            let most = (self.at_once() / layout.page_blocks()).max(1);
            let pages = (layout.regions() - next).min(most);
            self.forget(layout.page(zone, next), pages as usize * PAGE, 0)?;
            next += pages;
        }
        self.with(SyncChannel::flush)
    }

    /// Makes tuples zeros, of `bytes` bytes of pages those from byte `first` on.
    fn forget(&mut self, page_at: u64, bytes: usize, first: usize) -> Result<(), IoError> {
        let mut pages = AlignedBuf::zeroed(bytes);
        self.with(|channel| channel.read(page_at, &mut pages))?;
        if pages[first..].iter().any(|byte| *byte != 0) {
            pages[first..].fill(0);
            self.with(|channel| channel.write(page_at, &pages))?;
        }
        Ok(())
    }
}
