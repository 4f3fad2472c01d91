//! The work of a copy, on a thread of its own with blocking I/O.

mod shared;

use super::operation::Operation;
pub(crate) use super::order::Segment;
use super::order::aborted;
use super::token::Token;
use crate::opcode::{Cdb, Command};
use crate::reservations::is_allowed;
use crate::sense::{Code, Sense};
use crate::shared::{Gate, LunShared};
use crate::watch::{InFlight, Range};
use bdev::{AlignedBuf, AppTags, Op, SyncChannel, SyncError};
use std::sync::Arc;
use std::thread;
use std::time::Duration;

/// Bytes of one read and write: whole blocks of any unit.
const STEP: u64 = 1 << 20;
/// Bytes of one WriteZeroes or Unmap. It ends at multiples of it, so that it does not cut clusters.
const ZEROES_STEP: u64 = 32 << 20;

/// Between two looks at what is waited for.
const PAUSE: Duration = Duration::from_millis(1);

/// Why the work ended before its end.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Ended {
    /// The initiator is told.
    Failed(Sense),
    /// Its task was, or a reset of one of the units ended it.
    Cancelled,
}

/// An operation that goes on.
pub(crate) struct Run {
    pub(crate) operation: Arc<Operation>,
    /// Who has ordered it.
    unit: Arc<LunShared>,
    epoch: u32,
}

impl Run {
    pub(crate) fn new(unit: &Arc<LunShared>, operation: &Arc<Operation>) -> Self {
        Run { operation: Arc::clone(operation), unit: Arc::clone(unit), epoch: unit.epoch() }
    }

    /// Whether it is still to go on.
    ///
    /// # Errors
    /// It was cancelled, or the unit was reset.
    pub(crate) fn check(&self) -> Result<(), Ended> {
        let over = self.operation.is_cancelled() || self.unit.epoch() != self.epoch;
        if over { Err(Ended::Cancelled) } else { Ok(()) }
    }

    /// Waits until it may change something.
    ///
    /// # Errors
    /// As of [`Run::check`].
    pub(crate) fn wait_to_begin(&self) -> Result<(), Ended> {
        while !self.operation.may_begin() {
            self.check()?;
            thread::sleep(PAUSE);
        }
        Ok(())
    }
}

/// A unit that is copied from or to: commands of it count there, for whoever waits until it has none.
struct Party {
    unit: Arc<LunShared>,
    channel: SyncChannel,
    in_flight: InFlight,
    epoch: u32,
    writes: bool,
}

impl Party {
    fn new(unit: &Arc<LunShared>, writes: bool) -> Result<Self, Ended> {
        let failed = Ended::Failed(aborted(Code::COPY_TARGET_NOT_REACHABLE));
        let channel = SyncChannel::open(&**unit.bdev()).map_err(|_| failed)?;
        let in_flight = InFlight::default();
        unit.counts(in_flight.shared());
        Ok(Party { unit: Arc::clone(unit), channel, in_flight, epoch: unit.epoch(), writes })
    }

    /// One I/O of it, if that is still for now; `changes`: the bytes that it changes. Waits while they are kept.
    fn io(
        &mut self,
        run: &Run,
        changes: Option<Range>,
        io: impl FnOnce(&mut SyncChannel) -> Result<(), SyncError>,
    ) -> Result<(), Ended> {
        self.work(run, changes, |channel| {
            io(channel).map_err(|_| Ended::Failed(aborted(Code::NO_ADDITIONAL_SENSE)))
        })
    }

    /// The same, of something else that is done with its bdev.
    fn work<T>(
        &mut self,
        run: &Run,
        changes: Option<Range>,
        work: impl FnOnce(&mut SyncChannel) -> Result<T, Ended>,
    ) -> Result<T, Ended> {
        let unit = Arc::clone(&self.unit);
        loop {
            run.check()?;
            // Held as long as the I/O takes. Whoever holds another unit's must not wait for who waits for that.
            let replaced = unit.copies.replaced.read();
            if *replaced {
                return Err(Ended::Failed(aborted(Code::COPY_TARGET_NOT_REACHABLE)));
            }
            let side = self.in_flight.begin(&unit);
            if changes.is_some_and(|range| unit.is_range_kept_from(side, range)) {
                self.in_flight.end(side, false);
                drop(replaced);
                thread::sleep(PAUSE);
                continue;
            }
            let done = match may_use(&unit, self.writes) {
                Err(sense) => Err(Ended::Failed(sense)),
                Ok(()) if unit.epoch() != self.epoch => Err(Ended::Cancelled),
                Ok(()) => {
                    changes.iter().for_each(|range| unit.range_changes(*range));
                    work(&mut self.channel)
                }
            };
            self.in_flight.end(side, false);
            return done;
        }
    }

    fn is(&self, unit: &Arc<LunShared>) -> bool {
        Arc::ptr_eq(&self.unit, unit)
    }

    fn lba(&self, at: u64) -> u64 {
        at / self.block()
    }

    /// The application tags that blocks with this data are to have.
    fn tags(&self, lba: u64, data: &[u8]) -> AppTags {
        self.unit.tags_of(lba, data.len() as u64 / self.block())
    }

    /// Bytes of a block of its bdev.
    fn block(&self) -> u64 {
        self.channel.block_size().into()
    }

    /// Whether the bytes from `at` on have no room, and read as zeros, or may hold anything; and how many there are at
    /// least, of at most `most`, that are so.
    fn alike(&mut self, run: &Run, at: u64, most: u64) -> Result<(bool, u64), Ended> {
        let (lba, blocks) = (self.lba(at), self.lba(most));
        let (mut hole, mut bytes) = (false, 0);
        let block = self.block();
        self.io(run, None, |channel| {
            let found = channel.sparse_run(lba, blocks);
            (hole, bytes) = (found.hole, found.blocks.min(blocks) * block);
            Ok(())
        })?;
        Ok((hole, bytes))
    }

    /// Whether zeros need not be written to it as data.
    fn can_zero(&self) -> bool {
        self.unit.features().write_zeroes
    }

    /// Bytes from `at` on that are zeroed at a time: whole blocks of it.
    fn most_zeros(&self, at: u64) -> u64 {
        let features = self.unit.features();
        let most = match (features.write_zeroes, features.max_blocks) {
            (false, _) => STEP,
            (true, 0) => ZEROES_STEP,
            (true, blocks) => ZEROES_STEP.min(u64::from(blocks) * u64::from(self.unit.block_size)),
        };
        most - at % most
    }

    /// Makes bytes of it read as zeros, if that is still for now; where it is thin, they need no room then. All of
    /// them, in as many steps as it takes.
    fn zero(&mut self, run: &Run, range: Range) -> Result<(), Ended> {
        let features = *self.unit.features();
        let unmaps = features.thin && features.zeroing() == Some(Op::Unmap);
        let (mut at, end) = (range.at, range.at + range.bytes);
        while at < end {
            let bytes = (end - at).min(self.most_zeros(at));
            let (lba, blocks) = (self.lba(at), self.lba(bytes));
            self.io(run, Some(Range { at, bytes }), |channel| match unmaps {
                true => channel.unmap(lba, blocks),
                false => channel.write_zeroes(lba, blocks),
            })?;
            at += bytes;
        }
        Ok(())
    }
}

/// Whether a unit can be copied from, or to, by its own nexus.
pub(crate) fn may_use(unit: &LunShared, writes: bool) -> Result<(), Sense> {
    let (command, cdb) = (if writes { Command::Write16 } else { Command::Read16 }, Cdb([0; 32]));
    let reserved = unit.has_gates() && !is_allowed(unit.access(), command, &cdb);
    let gates = [Gate::Sanitize, Gate::Ejected, Gate::Modes];
    if reserved || gates.iter().any(|gate| unit.is_at(*gate)) {
        return Err(aborted(Code::COPY_TARGET_NOT_REACHABLE));
    }
    if writes { crate::block::check_writable(unit) } else { Ok(()) }
}

/// What is copied next of a segment.
struct Next {
    /// From the segment's beginning, in bytes.
    at: u64,
    bytes: u64,
    /// The source has nothing there.
    hole: bool,
}

/// The next bytes of a segment of which `left` are left, from its end on if it goes `backwards`.
fn next(
    run: &Run,
    segment: &Segment,
    (from, to): (&mut Party, &Party),
    left: u64,
    backwards: bool,
) -> Result<Next, Ended> {
    let at = if backwards { left.saturating_sub(STEP) } else { segment.bytes - left };
    let most = if backwards { left - at } else { left };
    let (hole, alike) = from.alike(run, segment.from_at + at, most)?;
    // Whole blocks of both: the larger ones are a multiple of the smaller ones.
    let block = from.block().max(to.block());
    let alike = alike / block * block;
    let next = match (hole && to.can_zero(), alike) {
        // All that is looked at, or what lies before the rest of it would count as done.
        (true, 1..) if backwards && alike == most => Next { at, bytes: alike, hole: true },
        (true, 1..) if !backwards => {
            let at_once = to.most_zeros(segment.to_at + at) / block * block;
            Next { at, bytes: alike.min(at_once.max(block)), hole: true }
        }
        (_, 1..) if !backwards => Next { at, bytes: alike.min(STEP), hole: false },
        _ => Next { at, bytes: most.min(STEP), hole: false },
    };
    debug_assert!(!backwards || next.at + next.bytes == left, "the end of it comes first");
    Ok(next)
}

/// Copies one segment after the other, as it is counted. What is copied within a volume to where it overlaps is as
/// if all of it had been read first. What the source has no room for is neither read nor written, but zeroed. Of a
/// token, nothing is written that is not what it stands for.
pub(crate) fn carry_out(
    segments: &[Segment],
    token: Option<&Arc<Token>>,
    run: &Run,
) -> Result<(), Ended> {
    let mut buffer = AlignedBuf::zeroed(STEP as usize);
    let mut parties: Option<(Party, Party)> = None;
    for segment in segments {
        let (mut from, mut to) = match parties.take() {
            Some((from, to)) if from.is(&segment.from) && to.is(&segment.to) => (from, to),
            _ => (Party::new(&segment.from, false)?, Party::new(&segment.to, true)?),
        };
        for part in shared::parts(segment, &from, &to) {
            let rest = match part.can_share {
                true => {
                    let left = shared::share(&part.segment, token, run, (&mut from, &mut to))?;
                    part.segment.last(left)
                }
                false => part.segment,
            };
            copy(&rest, &mut buffer, token, run, (&mut from, &mut to))?;
        }
        if segment.to.writes_through() && segment.bytes > 0 {
            to.io(run, None, SyncChannel::flush)?;
        }
        run.operation.count_segment();
        parties = Some((from, to));
    }
    Ok(())
}

/// Copies a segment.
fn copy(
    segment: &Segment,
    buffer: &mut AlignedBuf,
    token: Option<&Arc<Token>>,
    run: &Run,
    (from, to): (&mut Party, &mut Party),
) -> Result<(), Ended> {
    let check = || token.map_or(Ok(()), |token| token.check_amid());
    let backwards = segment.is_within_one() && segment.to_at > segment.from_at;
    let mut left = segment.bytes;
    while left > 0 {
        let parties = (&mut *from, &*to);
        let Next { at, bytes, hole } = next(run, segment, parties, left, backwards)?;
        let (from_lba, to_at) = (from.lba(segment.from_at + at), segment.to_at + at);
        if hole {
            check()?;
            to.zero(run, Range { at: to_at, bytes })?;
        } else {
            let data = &mut buffer[..bytes as usize];
            let tags = from.tags(from_lba, data);
            from.io(run, None, |channel| channel.read_tagged(from_lba, data, tags))?;
            check()?;
            let to_lba = to.lba(to_at);
            let changes = Some(Range { at: to_at, bytes });
            let tags = to.tags(to_lba, data);
            to.io(run, changes, |channel| channel.write_tagged(to_lba, data, tags))?;
        }
        left -= bytes;
        run.operation.count(bytes);
    }
    Ok(())
}

/// Writes zeros, by the bdev's own means where it has some.
pub(crate) fn write_zeroes(
    unit: &Arc<LunShared>,
    ranges: &[Range],
    run: &Run,
) -> Result<(), Ended> {
    let buffer = AlignedBuf::zeroed(STEP as usize);
    let mut to = Party::new(unit, true)?;
    for range in ranges {
        let (mut at, end) = (range.at, range.at + range.bytes);
        while at < end {
            let bytes = (end - at).min(to.most_zeros(at));
            if to.can_zero() {
                to.zero(run, Range { at, bytes })?;
            } else {
                let lba = to.lba(at);
                let data = &buffer[..bytes as usize];
                let tags = to.tags(lba, data);
                let changes = Some(Range { at, bytes });
                to.io(run, changes, |channel| channel.write_tagged(lba, data, tags))?;
            }
            at += bytes;
            run.operation.count(bytes);
        }
        run.operation.count_segment();
    }
    if unit.writes_through() && !ranges.is_empty() {
        to.io(run, None, SyncChannel::flush)?;
    }
    Ok(())
}

#[cfg(test)]
mod tests;
