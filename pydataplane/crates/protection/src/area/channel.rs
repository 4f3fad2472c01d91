//! The data path: one queue pair on a volume that keeps its tuples itself, on top of one on the device below.
//!
//! An I/O is done in parts, each within one region, in memory of the channel's own. A read has data and
//! page of tuples read together, and holds nothing; what does not match may have met a write, and is read
//! again while nobody else has that region. A write holds the region: it reads the page, changes its
//! own tuples there, and gives both to the device below; it is over when both are. So a flush of the device is
//! all that a flush takes.
//!
//! A part that changes something goes through the gate of its unit, which is open while the map says durably
//! that this is being written to. First it has its memory, then it is let in, then it holds its regions: who
//! holds something has all that he needs but the device below. Where anything is lacking, an I/O waits in its
//! slot and has nothing. No path allocates, locks or waits.

mod part;
mod polling;

use super::layout::{Layout, PAGE, REGION_BLOCKS};
use super::shared::{Shared, Unit, Want};
use crate::block;
use crate::tuple::Mismatch;
use bdev::{
    Bdev, COPY_AT_ONCE, Channel, ChannelStats, Checks, Completion, Ear, Features, FlushLatch,
    Geometry, Io, IoError, Late, Mismatches, Op, PIECES, Pieces, Protected, Run, Slots, Stats,
    Submit, TUPLE_LEN, Tuples,
};
use part::{Kind, Part};
use reactor::{Waker, ticks};
use std::collections::VecDeque;
use std::sync::Arc;
use std::sync::atomic::Ordering;

/// I/Os that a channel can have in flight.
const SLOTS: u16 = 256;
/// Completions taken from the device below at a time.
const BELOW_DONE: usize = 64;
/// What a part without data counts of a turn.
const CLEARED: usize = COPY_AT_ONCE / 16;
/// Marks the tag of an I/O below that was passed on as it is.
const PASSED: u64 = 1 << 31;

pub(crate) struct AreaChannel {
    /// With the channel below.
    pieces: Pieces,
    /// By the number of the piece with the page of tuples.
    parts: Box<[Part]>,
    /// By the number of the piece with the data: that of its part.
    part_of: Box<[u16]>,
    shared: Arc<Shared>,
    below: Arc<dyn Bdev>,
    ear: Arc<Ear>,
    /// What the volume can do.
    features: Features,
    /// Blocks that the device below takes at a time.
    longest: u64,
    slots: Slots<Slot>,
    /// Slots that could not go on, in order.
    waiting: VecDeque<u16>,
    /// Pieces that the device below had no room for, in order.
    unsent: VecDeque<u16>,
    /// Parts of which all is read.
    came: VecDeque<u16>,
    /// Parts that did not match, and whose region somebody has.
    doubtful: VecDeque<u16>,
    /// Parts that hold regions.
    holding: u32,
    /// A part ended since those that wait tried last.
    freed: bool,
    /// Finished I/Os that did not fit in the caller's list.
    late: Late,
    below_done: Vec<Completion>,
    mismatches: Mismatches,
    /// Bytes that may still be looked at in this turn.
    turn: usize,
    /// Keeps the thread awake while something is left for its next turn.
    waker: Waker,
    stats: ChannelStats,
}

/// An I/O under way.
#[derive(Clone, Copy)]
struct Slot {
    io: Io,
    with: Protected,
    /// Blocks from the start that parts were made of.
    cursor: u64,
    /// Where that ends.
    till: u64,
    /// Parts that are not over.
    pending: u32,
    result: Result<(), IoError>,
    started: u64,
    /// In [`AreaChannel::waiting`].
    waits: bool,
    /// The keeper was asked; again not before that round.
    again: u64,
}

impl Slot {
    /// An I/O of which nothing is done yet, begun at `started` (in ticks).
    fn new(io: Io, with: Protected, started: u64) -> Self {
        let till = io.blocks;
        Slot {
            io,
            with,
            cursor: 0,
            till,
            pending: 0,
            result: Ok(()),
            started,
            waits: false,
            again: 0,
        }
    }
}

/// What became of the next part of an I/O.
enum Next {
    Part(u16),
    /// It was zeros without tuples.
    Cleared,
    /// It waits until something ends that this thread polls, or the keeper answers.
    Wait,
    /// Its turn is over.
    Again,
    Failed(IoError),
}

impl Channel for AreaChannel {
    fn submit(&mut self, io: &Io) -> Submit {
        self.begin(io, &Protected::PLAIN)
    }

    fn submit_protected(&mut self, io: &Io, with: &Protected) -> Submit {
        self.begin(io, with)
    }

    fn mismatch(&mut self, tag: u64) -> Option<u64> {
        self.mismatches.take(tag)
    }

    fn poll(&mut self, done: &mut Vec<Completion>) -> u32 {
        let before = done.len();
        if !self.late.hand_over(done) {
            return (done.len() - before) as u32;
        }
        self.turn = COPY_AT_ONCE;
        if self.pieces.in_flight() > 0 {
            self.poll_below(done);
        }
        while self.turn > 0
            && let Some(part) = self.came.pop_front()
        {
            let slot = self.parts[usize::from(part)].slot;
            self.receive(part);
            self.finish_if_over(slot, done);
        }
        if !self.came.is_empty() {
            self.waker.wake();
        }
        self.freed = false;
        self.poll_doubtful(done);
        self.poll_unsent(done);
        self.poll_waiting(done);
        self.wake_who_waits();
        (done.len() - before) as u32
    }

    fn sparse_run(&mut self, lba: u64, blocks: u64) -> Run {
        let most = within_zone(&self.shared.layout, lba, blocks);
        self.pieces.sparse_run(self.shared.layout.locate(lba).lba, most)
    }
}

/// Blocks from `lba` on that lie one after the other below.
pub(super) fn within_zone(layout: &Layout, lba: u64, blocks: u64) -> u64 {
    blocks.min(layout.zone_blocks() - layout.locate(lba).within)
}

impl AreaChannel {
    pub fn new(
        (channel, below): (Box<dyn Channel>, Arc<dyn Bdev>),
        shared: Arc<Shared>,
        features: Features,
        stats: &Arc<Stats>,
        waker: Waker,
    ) -> Self {
        let pieces = || VecDeque::with_capacity(usize::from(PIECES));
        let longest = match u64::from(below.features().max_blocks) {
            0 => u64::MAX,
            blocks => blocks,
        };
        let ear = Ear::new(waker.clone());
        shared.wants.add_ear(&ear);
        AreaChannel {
            pieces: Pieces::new(channel),
            parts: vec![Part::default(); usize::from(PIECES)].into(),
            part_of: vec![0; usize::from(PIECES)].into(),
            shared,
            below,
            ear,
            features,
            longest,
            slots: Slots::new(SLOTS, |_| Slot::new(Io::flush(0), Protected::PLAIN, 0)),
            waiting: VecDeque::with_capacity(usize::from(SLOTS)),
            unsent: pieces(),
            came: pieces(),
            doubtful: pieces(),
            holding: 0,
            freed: false,
            late: Late::with_capacity(SLOTS),
            below_done: Vec::with_capacity(BELOW_DONE),
            mismatches: Mismatches::default(),
            turn: 0,
            waker,
            stats: stats.channel(),
        }
    }

    fn geometry(&self) -> Geometry {
        let below = self.below.geometry();
        Geometry { num_blocks: self.shared.layout.data_blocks(below.num_blocks), ..below }
    }

    fn begin(&mut self, io: &Io, with: &Protected) -> Submit {
        if io.op == Op::Flush {
            return self.pass(io);
        }
        let geometry = self.geometry();
        let checked = match io.op {
            Op::Read | Op::Write => with.check(io, &geometry, &self.features),
            _ => io.check(&geometry, &self.features),
        };
        if let Err(e) = checked {
            self.stats.error(e);
            return Submit::Done(Err(e));
        }
        if io.blocks == 0 {
            return Submit::Done(Ok(()));
        }
        let Some(at) = self.slots.take() else { return Submit::Full };
        let begun = self.stats.begin();
        self.slots[at] = Slot::new(*io, *with, begun.unwrap_or_else(ticks::now));
        if io.op == Op::Unmap {
            self.leave_parts_of_clusters(at);
        }
        self.turn = COPY_AT_ONCE;
        self.freed = false;
        self.advance(at);
        self.wake_who_waits();
        if !self.is_over(at) {
            return Submit::Pending;
        }
        let result = self.slots[at].result;
        self.slots.give_back(at);
        self.stats.end(io, geometry.block_size, begun, result);
        Submit::Done(result)
    }

    /// Passes a flush on: the device below has all that was answered.
    fn pass(&mut self, io: &Io) -> Submit {
        if self.shared.takes_owed() {
            self.stats.error(IoError::Flush);
            return Submit::Done(Err(IoError::Flush));
        }
        let Some(at) = self.slots.next_free() else { return Submit::Full };
        let begun = self.stats.begin();
        let submit = self.pieces.pass(&Io { tag: PASSED | u64::from(at), ..*io });
        match submit {
            Submit::Done(result) => {
                if result.is_err() {
                    self.shared.flush_failed();
                }
                self.stats.end(io, self.block() as u32, begun, result);
            }
            Submit::Pending => {
                self.slots.take();
                let started = begun.unwrap_or_else(ticks::now);
                self.slots[at] = Slot::new(*io, Protected::PLAIN, started);
            }
            Submit::Full => {}
        }
        submit
    }

    /// Bytes of a block.
    fn block(&self) -> usize {
        self.shared.layout.block_size() as usize
    }

    /// The unit of a part, and which of its regions is the part's first.
    fn unit_of(&self, part: &Part) -> (&Unit, u32) {
        self.shared.unit_at(part.zone, part.within).expect("a part is in a zone that was used")
    }

    /// Takes an I/O as far as it goes now.
    fn advance(&mut self, at: u16) {
        loop {
            let slot = &mut self.slots[at];
            if slot.result.is_err() {
                // What an earlier part met ends it.
                slot.cursor = slot.till;
            }
            if slot.cursor == slot.till {
                return;
            }
            match self.prepare(at) {
                Next::Part(part) => self.start(part),
                Next::Cleared => {}
                Next::Failed(e) => self.slots[at].result = Err(e),
                Next::Wait => return self.wait(at),
                Next::Again => {
                    self.waker.wake();
                    return self.wait(at);
                }
            }
        }
    }

    /// What is unmapped of a cluster in part stays as it is, with its tuples: nothing would be deallocated
    /// ([`Features::unmap_skips`]).
    fn leave_parts_of_clusters(&mut self, at: u16) {
        let slot = &mut self.slots[at];
        let (lba, cluster) = (slot.io.lba, self.shared.layout.cluster_blocks());
        slot.cursor = (lba.next_multiple_of(cluster) - lba).min(slot.io.blocks);
        let left_over = (lba + slot.io.blocks) % cluster;
        slot.till = slot.io.blocks.saturating_sub(left_over).max(slot.cursor);
    }

    fn wait(&mut self, at: u16) {
        if !self.slots[at].waits {
            self.slots[at].waits = true;
            self.waiting.push_back(at);
        }
    }

    /// Those that wait may go on, of which nothing else tells this thread.
    fn wake_who_waits(&self) {
        if self.freed && !(self.waiting.is_empty() && self.doubtful.is_empty()) {
            self.waker.wake();
        }
    }

    /// Asks the keeper, unless it was asked and may still answer.
    fn ask(&mut self, at: u16, want: Want) -> Next {
        let wants = &self.shared.wants;
        if wants.is_closed() {
            return Next::Failed(IoError::Removed);
        }
        let slot = &mut self.slots[at];
        if slot.again == 0 || wants.is_round(slot.again) {
            slot.again = wants.ask(want, &self.ear);
        } else {
            wants.remind(&self.ear);
        }
        Next::Wait
    }

    /// The next part of an I/O, which has what it needs.
    fn prepare(&mut self, at: u16) -> Next {
        if self.turn == 0 {
            return Next::Again;
        }
        let Slot { io, cursor, till, .. } = self.slots[at];
        let layout = self.shared.layout;
        let location = layout.locate(io.lba + cursor);
        let (zone, within) = (location.zone, location.within);
        let found = self.shared.zone(zone);
        if !found.is_some_and(super::shared::Zone::is_known) {
            return match found.and_then(super::shared::Zone::take_failed) {
                Some(error) => Next::Failed(error),
                // It was made smaller meanwhile.
                None if io.lba + cursor >= self.geometry().num_blocks => {
                    Next::Failed(IoError::OutOfRange)
                }
                None => self.ask(at, Want::Look(zone)),
            };
        }
        let left = till - cursor;
        let in_region = left.min(REGION_BLOCKS - within % REGION_BLOCKS).min(self.longest);
        let (kind, blocks) = match io.op {
            Op::Read => (Kind::Read, in_region),
            Op::Write | Op::Flush => (Kind::Write, in_region),
            Op::Unmap | Op::WriteZeroes => self.clear(within, left),
        };
        let mut part = Part {
            kind,
            used: true,
            slot: at,
            zone,
            within,
            lba: location.lba,
            blocks,
            cursor,
            ..Part::default()
        };
        if matches!(kind, Kind::Clear | Kind::ClearRegions) && !io.fua && self.is_hole(&part) {
            self.turn = self.turn.saturating_sub(CLEARED);
            let slot = &mut self.slots[at];
            (slot.cursor, slot.again) = (cursor + blocks, 0);
            return Next::Cleared;
        }
        let Some((page, data)) = self.take_pieces(&part) else { return Next::Wait };
        part.data = data;
        let mut counts = CLEARED;
        if matches!(kind, Kind::Read | Kind::Write) {
            part.blocks = (self.pieces.of(data).2 / self.block()) as u64;
            counts = part.blocks as usize * self.block();
        }
        if kind != Kind::Read
            && let Err(next) = self.enter(at, &mut part)
        {
            self.pieces.give_back(data);
            self.pieces.give_back(page);
            return next;
        }
        self.turn = self.turn.saturating_sub(counts);
        self.part_of[usize::from(data)] = page;
        self.part_of[usize::from(page)] = page;
        self.parts[usize::from(page)] = part;
        let slot = &mut self.slots[at];
        slot.cursor += part.blocks;
        slot.pending += 1;
        slot.again = 0;
        Next::Part(page)
    }

    /// Has a part that changes something let in, and hold its regions; else it has nothing.
    fn enter(&mut self, at: u16, part: &mut Part) -> Result<(), Next> {
        let (unit, _) = self.unit_of(part);
        if !unit.gate.admit() {
            if let Some(error) = unit.gate.take_refused() {
                return Err(Next::Failed(error));
            }
            let number = part.within / self.shared.layout.unit_blocks();
            return Err(self.ask(at, Want::Write(part.zone, number)));
        }
        unit.touch();
        part.admitted = true;
        if !self.hold(part) {
            self.release(part);
            return Err(Next::Wait);
        }
        Ok(())
    }

    /// Holds the regions of a part; `false`: somebody has one of them, and this thread is woken when that
    /// may be over.
    fn hold(&mut self, part: &mut Part) -> bool {
        let (unit, first) = self.unit_of(part);
        let mut held = unit.holds.hold(first, part.regions());
        if !held && self.holding == 0 {
            // It is another thread's.
            self.shared.wants.listen(&self.ear);
            self.shared.contend();
            held = unit.holds.hold(first, part.regions());
        }
        part.held = held;
        self.holding += u32::from(held);
        held
    }

    /// Lets go of what a part has of its unit.
    fn release(&mut self, part: &mut Part) {
        let (unit, first) = self.unit_of(part);
        if part.held {
            self.shared.let_go(unit, first, part.regions());
        }
        if part.admitted {
            unit.gate.leave();
        }
        self.holding -= u32::from(part.held);
        (part.held, part.admitted) = (false, false);
    }

    /// What of `left` blocks is cleared at a time: all of some regions within their unit, which may be whole
    /// clusters, or some of one region.
    fn clear(&self, within: u64, left: u64) -> (Kind, u64) {
        let layout = &self.shared.layout;
        let (zone, unit) = (layout.zone_blocks(), layout.unit_blocks());
        let end = (within + left).min(zone).min((within / unit + 1) * unit);
        let end = if end == zone { end } else { end / REGION_BLOCKS * REGION_BLOCKS };
        let whole = within.is_multiple_of(REGION_BLOCKS) && end > within;
        let end = match self.longest / REGION_BLOCKS {
            // All of it where that can be, else as many regions as can be.
            _ if end.saturating_sub(within) <= self.longest => end,
            regions => within + regions * REGION_BLOCKS,
        };
        if whole && end > within {
            return (Kind::ClearRegions, end - within);
        }
        let in_region = left.min(REGION_BLOCKS - within % REGION_BLOCKS).min(self.longest);
        (Kind::Clear, in_region)
    }

    /// Whether the blocks of a part have no room below, and no tuples: to make them zeros would take some, for a
    /// map that says so.
    fn is_hole(&mut self, part: &Part) -> bool {
        let layout = self.shared.layout;
        let page = layout.page(part.zone, part.within / REGION_BLOCKS);
        let pages = u64::from(part.regions()) * layout.page_blocks();
        [(part.lba, part.blocks), (page, pages)].into_iter().all(|(lba, blocks)| {
            let run = self.pieces.sparse_run(lba, blocks);
            run.hole && run.blocks >= blocks
        })
    }

    /// Memory for a page of tuples, and for the data of a part.
    fn take_pieces(&mut self, part: &Part) -> Option<(u16, u16)> {
        let bytes = match part.kind {
            Kind::Read | Kind::Write => (part.blocks as usize).saturating_mul(self.block()),
            Kind::Clear | Kind::ClearRegions => self.block(),
        };
        let page = self.pieces.take(part.slot, part.cursor, PAGE)?;
        let Some(data) = self.pieces.take(part.slot, part.cursor, bytes) else {
            self.pieces.give_back(page);
            return None;
        };
        Some((page, data))
    }

    /// Gives a part to the device below: what it reads first, or all that it changes.
    fn start(&mut self, at: u16) {
        let part = &mut self.parts[usize::from(at)];
        let data = part.data;
        match part.kind {
            Kind::Read => {
                part.pending = 2;
                self.send(data);
                self.send(at);
            }
            Kind::Write | Kind::Clear => {
                part.pending = 1;
                self.send(at);
            }
            Kind::ClearRegions => {
                (part.pending, part.changes) = (2, true);
                self.send(data);
                self.send(at);
            }
        }
    }

    /// The I/O of a piece below.
    fn io_of(&self, piece: u16) -> Io {
        let part = &self.parts[usize::from(self.part_of[usize::from(piece)])];
        let layout = &self.shared.layout;
        let (op, lba, blocks) = if piece == part.data {
            let op = match part.kind {
                Kind::Read => Op::Read,
                Kind::Write => Op::Write,
                // Of an unmap, too: it gives whole clusters back, and leaves nothing where it was.
                Kind::Clear | Kind::ClearRegions => Op::WriteZeroes,
            };
            (op, part.lba, part.blocks)
        } else {
            let op = match part.kind {
                Kind::ClearRegions => Op::WriteZeroes,
                _ if part.changes => Op::Write,
                _ => Op::Read,
            };
            let region = part.within / REGION_BLOCKS;
            let blocks = u64::from(part.regions()) * layout.page_blocks();
            (op, layout.page(part.zone, region), blocks)
        };
        let fua = op.is_write() && self.slots[part.slot].io.fua;
        Io { op, fua, lba, blocks, ..Io::flush(0) }
    }

    /// Gives a piece to the device below, now or when that has room.
    fn send(&mut self, piece: u16) {
        match self.pieces.submit(piece, &self.io_of(piece)) {
            Submit::Done(result) => self.ended(piece, result),
            Submit::Pending => {}
            Submit::Full => self.unsent.push_back(piece),
        }
    }

    /// The device below is through with a piece.
    fn ended(&mut self, piece: u16, result: Result<(), IoError>) {
        let at = self.part_of[usize::from(piece)];
        let part = &mut self.parts[usize::from(at)];
        part.pending -= 1;
        part.result = part.result.or(result.err());
        if part.pending > 0 {
            return;
        }
        match part.result {
            Some(IoError::ReadMedium) if part.kind != Kind::Read && !part.changes => {
                self.without_page(at);
            }
            Some(error) => self.over(at, Err(error)),
            None if part.changes => self.over(at, Ok(())),
            None if self.turn > 0 => self.receive(at),
            None => {
                self.came.push_back(at);
                self.waker.wake();
            }
        }
    }

    /// What a part has to read is there.
    fn receive(&mut self, at: u16) {
        let part = self.parts[usize::from(at)];
        let mut page = [0; PAGE];
        self.each(at, |_, bytes| page.copy_from_slice(bytes));
        let first = (part.within % REGION_BLOCKS) as usize * TUPLE_LEN;
        match part.kind {
            Kind::Read => {
                let bytes = part.blocks as usize * self.block();
                self.turn = self.turn.saturating_sub(bytes);
                match self.give(&part, &page[first..]) {
                    Ok(()) => self.over(at, Ok(())),
                    Err(_) if !part.held => self.recheck(at),
                    Err((nth, mismatch)) => self.mismatched(at, nth, mismatch),
                }
            }
            Kind::Write => match self.fill(&part, &mut page[first..]) {
                Ok(()) => self.change(at, &page),
                Err((nth, mismatch)) => self.mismatched(at, nth, mismatch),
            },
            Kind::Clear | Kind::ClearRegions => {
                page[first..][..part.blocks as usize * TUPLE_LEN].fill(0);
                self.change(at, &page);
            }
        }
    }

    /// The page of a part that is to be changed cannot be read: it is written anew, or nothing of its region
    /// could ever be written again. Other blocks of that have no tuple then.
    #[cold]
    fn without_page(&mut self, at: u16) {
        self.shared.lost_page();
        self.parts[usize::from(at)].result = None;
        self.each(at, |_, bytes| bytes.fill(0));
        self.receive(at);
    }

    fn each(&mut self, piece: u16, mut f: impl FnMut(usize, &mut [u8])) {
        let _ = self.pieces.each::<()>(piece, |begin, bytes| {
            f(begin, bytes);
            Ok(())
        });
    }

    /// Writes the data of a part, and its page.
    fn change(&mut self, at: u16, page: &[u8; PAGE]) {
        self.each(at, |_, bytes| bytes.copy_from_slice(page));
        let part = &mut self.parts[usize::from(at)];
        (part.pending, part.changes) = (2, true);
        let data = part.data;
        self.send(data);
        self.send(at);
    }

    /// Takes the data of a part, and its tuples, from whoever writes.
    fn fill(&mut self, part: &Part, page: &mut [u8]) -> Result<(), (u64, Mismatch)> {
        let Slot { io, with, .. } = self.slots[part.slot];
        let (kind, block) = (self.shared.kind, self.block());
        self.pieces.each(part.data, |begin, bytes| {
            let first = begin / block;
            let tuples = page.as_chunks_mut::<TUPLE_LEN>().0[first..].iter_mut();
            for ((nth, data), stored) in
                (first as u64..).zip(bytes.chunks_exact_mut(block)).zip(tuples)
            {
                let of_io = part.cursor + nth;
                let numbers = (of_io as usize, io.lba + of_io);
                block::take((data, stored), kind, numbers, &io.sg, &with)
                    .map_err(|e| (of_io, e))?;
            }
            Ok(())
        })
    }

    /// Compares what was read, and gives it to whoever reads.
    fn give(&mut self, part: &Part, page: &[u8]) -> Result<(), (u64, Mismatch)> {
        let Slot { io, with, .. } = self.slots[part.slot];
        let (kind, block) = (self.shared.kind, self.block());
        // What was read beside a write is read again first.
        let tolerant = part.held && self.is_doubtful(part);
        // Nor does anybody get a tuple that is not its block's because he does not look at it himself.
        let shown = matches!(with.tuples, Tuples::Apart(..) | Tuples::Behind);
        let compared =
            tolerant || !part.held && shown && !(with.checks.guard && with.checks.reference);
        self.pieces.each(part.data, |begin, bytes| {
            let first = begin / block;
            let tuples = page.as_chunks::<TUPLE_LEN>().0[first..].iter();
            for ((nth, data), stored) in (first as u64..).zip(bytes.chunks_exact(block)).zip(tuples)
            {
                let of_io = part.cursor + nth;
                let lba = io.lba + of_io;
                let found = match compared {
                    true => block::lying(stored).check(kind, Checks::ALL, lba, data),
                    false => Ok(()),
                };
                let stored = match found {
                    Ok(()) => stored,
                    Err(_) if tolerant => &block::NOTHING,
                    Err(e) => return Err((of_io, e)),
                };
                block::give((data, stored), kind, (of_io as usize, lba), &io.sg, &with)
                    .map_err(|e| (of_io, e))?;
            }
            Ok(())
        })
    }

    /// Whether a block of a part that has another tuple may have been being written.
    fn is_doubtful(&self, part: &Part) -> bool {
        let failures = self.below.flush_latch().map_or(0, FlushLatch::failures);
        self.unit_of(part).0.doubts() > 0
            || self.shared.unsettled().is_some()
            || self.shared.failures.load(Ordering::SeqCst) != failures
    }

    /// Keeps what was found at a block of a part's I/O, if it is the first; that ends it.
    #[cold]
    fn mismatched(&mut self, at: u16, nth: u64, mismatch: Mismatch) {
        let slot = &self.slots[self.parts[usize::from(at)].slot];
        if slot.result.is_ok() {
            self.mismatches.keep(slot.io.tag, nth);
        }
        self.over(at, Err(mismatch.into()));
    }

    /// Reads a part again while nobody changes its region: what was found may be a write under way.
    #[cold]
    fn recheck(&mut self, at: u16) {
        let mut part = self.parts[usize::from(at)];
        if !self.hold(&mut part) {
            self.doubtful.push_back(at);
            return;
        }
        part.pending = 2;
        self.parts[usize::from(at)] = part;
        self.send(part.data);
        self.send(at);
    }

    /// Ends a part.
    fn over(&mut self, at: u16, result: Result<(), IoError>) {
        let mut part = std::mem::take(&mut self.parts[usize::from(at)]);
        if part.changes && result.is_err() {
            self.shared.suspect(self.unit_of(&part).0);
        }
        self.release(&mut part);
        let slot = &mut self.slots[part.slot];
        slot.pending -= 1;
        slot.result = slot.result.and(result);
        self.pieces.give_back(part.data);
        self.pieces.give_back(at);
        self.freed = true;
    }

    fn finish(
        &mut self,
        at: u16,
        result: Result<(), IoError>,
        ticks: u64,
        ended: u64,
        done: &mut Vec<Completion>,
    ) {
        self.slots.give_back(at);
        let io = &self.slots[at].io;
        if io.op == Op::Flush && result.is_err() {
            self.shared.flush_failed();
        }
        self.stats.record(io.op, io.bytes(self.block() as u32), ticks, result);
        self.late.push(Completion { tag: io.tag, result, ticks, ended }, done);
    }
}

/// What the device below has of it is waited for; what is not over may be there or not.
impl Drop for AreaChannel {
    fn drop(&mut self) {
        self.pieces.end();
        for at in 0..self.parts.len() {
            let mut part = std::mem::take(&mut self.parts[at]);
            if part.used {
                if part.changes {
                    self.shared.suspect(self.unit_of(&part).0);
                }
                self.release(&mut part);
            }
        }
        self.shared.wants.remove_ear(&self.ear);
    }
}
