//! A queue pair that does its reads and writes in pieces, with memory of its own, as a layer does that
//! changes data on its way or has to see it first: what such layers have in common.
//!
//! A write is copied out of the guest's memory once, in pieces, into memory that the channel below gets:
//! what the guest does to its memory meanwhile makes no difference. A read comes into such memory, and the
//! layer gives the guest what it is to have of it. What has no data is passed on as it is.
//!
//! A thread works at most [`COPY_AT_ONCE`] bytes within a begin or one `poll`; the rest has its turn in the
//! next. Where memory or room below is lacking, an I/O waits in its slot. No path allocates, locks or waits.

use crate::{
    COPY_AT_ONCE, ChannelStats, Completion, Io, IoError, Late, Op, PIECES, Pieces, Slots, Submit,
};
use reactor::{Waker, ticks};
use std::collections::VecDeque;

/// I/Os that a queue pair can have in flight.
const SLOTS: u16 = 256;
/// Completions taken from the channel below at a time.
const BELOW_DONE: usize = 64;

/// What a layer does with the data of its I/Os. An I/O's blocks are those of the same numbers below.
pub trait Layer {
    /// What comes with an I/O.
    type With: Copy;
    /// What comes with one that comes with nothing.
    const PLAIN: Self::With;

    /// Bytes of a block of the layer.
    fn block(&self) -> usize;
    /// Bytes of a block below.
    fn block_below(&self) -> usize;
    /// Blocks of a piece at most. More than memory takes is cut by [`Pieces`].
    fn longest(&self) -> u64;
    /// Checks the whole of a read or write, before a part of it is begun.
    ///
    /// # Errors
    /// It is over with that.
    fn check(&self, io: &Io, with: &Self::With) -> Result<(), IoError>;
    /// Puts into a piece what is to be written there.
    ///
    /// # Errors
    /// The I/O ends with that.
    fn fill(&mut self, piece: Part<'_, Self::With>) -> Result<(), IoError>;
    /// A piece is about to be read.
    fn reads(&mut self, _piece: u16) {}
    /// Gives the guest what was read.
    fn received(&mut self, piece: Part<'_, Self::With>) -> Received;
    /// The channel below is about to change those blocks.
    fn begins(&mut self, _lba: u64, _blocks: u64) {}
    /// It has, or did not begin.
    fn ends(&mut self, _lba: u64, _blocks: u64) {}
}

/// A piece of an I/O that a layer works on.
pub struct Part<'a, W> {
    /// The I/O.
    pub io: Io,
    /// What came with it.
    pub with: W,
    /// Whether nothing of it has failed yet.
    pub is_well: bool,
    /// Number of the piece.
    pub at: u16,
    /// Where in the I/O it begins, in blocks.
    pub cursor: u64,
    /// All pieces.
    pub pieces: &'a mut Pieces,
}

/// What became of a piece that was read.
pub enum Received {
    /// It is over.
    Over(Result<(), IoError>),
    /// It is to be read again.
    Again,
}

/// The queue pair.
pub struct InPieces<L: Layer> {
    /// With the channel below. Dropped first: it waits for what is under way.
    pub pieces: Pieces,
    /// The layer.
    pub layer: L,
    slots: Slots<Slot<L::With>>,
    /// Slots that could not go on for want of room, or as their turn was over, in order.
    waiting: VecDeque<u16>,
    /// Pieces of reads whose data is there.
    came: VecDeque<u16>,
    /// Finished I/Os that did not fit in the caller's list.
    late: Late,
    below_done: Vec<Completion>,
    /// Bytes that may still be worked on in this turn.
    turn: usize,
    /// Keeps the thread awake while something is left for its next turn.
    waker: Waker,
    stats: ChannelStats,
}

/// An I/O under way.
#[derive(Clone, Copy)]
struct Slot<W> {
    io: Io,
    with: W,
    /// Blocks from the start that were given to the channel below.
    cursor: u64,
    /// Pieces that are not over.
    pending: u32,
    /// A piece that the channel below had no room for.
    prepared: Option<u16>,
    result: Result<(), IoError>,
    started: u64,
    /// In [`InPieces::waiting`].
    waits: bool,
}

impl<W> Slot<W> {
    /// An I/O of which nothing is done yet, begun at `started` (in ticks).
    fn new(io: Io, with: W, started: u64) -> Self {
        let (result, prepared) = (Ok(()), None);
        Slot { io, with, cursor: 0, pending: 0, prepared, result, started, waits: false }
    }
}

impl<L: Layer> InPieces<L> {
    /// On the channel of `pieces`; `stats` counts what it does.
    pub fn new(pieces: Pieces, layer: L, stats: ChannelStats, waker: Waker) -> Self {
        InPieces {
            pieces,
            layer,
            slots: Slots::new(SLOTS, |_| Slot::new(Io::flush(0), L::PLAIN, 0)),
            waiting: VecDeque::with_capacity(usize::from(SLOTS)),
            came: VecDeque::with_capacity(usize::from(PIECES)),
            late: Late::with_capacity(SLOTS),
            below_done: Vec::with_capacity(BELOW_DONE),
            turn: 0,
            waker,
            stats,
        }
    }

    /// As [`crate::Channel::submit`].
    #[inline]
    pub fn submit(&mut self, io: &Io) -> Submit {
        match io.op {
            Op::Read | Op::Write => self.submit_with(io, &L::PLAIN),
            Op::Flush | Op::Unmap | Op::WriteZeroes => self.pass(io),
        }
    }

    /// The same of a read or write that comes with something.
    #[inline]
    pub fn submit_with(&mut self, io: &Io, with: &L::With) -> Submit {
        if let Err(e) = self.layer.check(io, with) {
            self.stats.error(e);
            return Submit::Done(Err(e));
        }
        if io.blocks == 0 {
            return Submit::Done(Ok(()));
        }
        let Some(at) = self.slots.take() else { return Submit::Full };
        let begun = self.stats.begin();
        self.slots[at] = Slot::new(*io, *with, begun.unwrap_or_else(ticks::now));
        self.turn = COPY_AT_ONCE;
        self.advance(at);
        if !self.is_over(at) {
            return Submit::Pending;
        }
        let result = self.slots[at].result;
        self.slots.give_back(at);
        self.stats.end(io, self.layer.block() as u32, begun, result);
        Submit::Done(result)
    }

    /// As [`crate::Channel::poll`].
    #[inline]
    pub fn poll(&mut self, done: &mut Vec<Completion>) -> u32 {
        let before = done.len();
        if !self.late.hand_over(done) {
            return (done.len() - before) as u32;
        }
        self.turn = COPY_AT_ONCE;
        if self.pieces.in_flight() > 0 {
            self.poll_below(done);
        }
        while self.turn > 0
            && let Some(piece) = self.came.pop_front()
        {
            let at = self.pieces.of(piece).0;
            if self.receive(piece) {
                self.slots[at].pending -= 1;
                self.finish_if_over(at, done);
            }
        }
        if !self.came.is_empty() {
            self.waker.wake();
        }
        self.poll_waiting(done);
        (done.len() - before) as u32
    }

    /// Passes an I/O without data on.
    fn pass(&mut self, io: &Io) -> Submit {
        let Some(at) = self.slots.next_free() else { return Submit::Full };
        let begun = self.stats.begin();
        self.layer.begins(io.lba, io.blocks);
        let submit = self.pieces.pass(&Io { tag: u64::from(at), ..*io });
        if submit != Submit::Pending {
            self.layer.ends(io.lba, io.blocks);
        }
        match submit {
            Submit::Done(result) => {
                self.stats.end(io, self.layer.block() as u32, begun, result);
            }
            Submit::Pending => {
                self.slots.take();
                self.slots[at] = Slot::new(*io, L::PLAIN, begun.unwrap_or_else(ticks::now));
            }
            Submit::Full => {}
        }
        submit
    }

    /// Takes an I/O as far as it goes now.
    fn advance(&mut self, at: u16) {
        loop {
            let slot = &mut self.slots[at];
            if slot.result.is_err() {
                // What an earlier piece met ends it.
                slot.cursor = slot.io.blocks;
                if let Some(piece) = slot.prepared.take() {
                    self.pieces.give_back(piece);
                }
                return;
            }
            if slot.cursor == slot.io.blocks {
                return;
            }
            // What is read may be there at once, and worked on.
            let may_go = self.turn > 0 || slot.io.op == Op::Write;
            let prepared = if may_go { slot.prepared.take() } else { None };
            let Some(piece) = prepared.or_else(|| self.prepare(at)) else {
                if self.slots[at].result.is_err() {
                    continue;
                }
                return self.wait(at);
            };
            if !self.send(at, piece) {
                return self.wait(at);
            }
        }
    }

    /// Has an I/O wait until there is room, or its next turn.
    fn wait(&mut self, at: u16) {
        if !self.slots[at].waits {
            self.slots[at].waits = true;
            self.waiting.push_back(at);
        }
        if self.turn == 0 {
            self.waker.wake();
        }
    }

    /// The next piece of an I/O, with its data if it writes; `None`: its turn is over, there is no memory for
    /// it, or it failed.
    fn prepare(&mut self, at: u16) -> Option<u16> {
        if self.turn == 0 {
            return None;
        }
        let Slot { io, cursor, .. } = self.slots[at];
        let blocks = (io.blocks - cursor).min(self.layer.longest());
        let piece = self.pieces.take(at, cursor, blocks as usize * self.layer.block_below())?;
        if io.op == Op::Read {
            self.layer.reads(piece);
            return Some(piece);
        }
        let filled = self.layer.fill(part(&self.slots, &mut self.pieces, piece));
        self.turn = self.turn.saturating_sub(self.pieces.of(piece).2);
        if filled.is_err() {
            self.pieces.give_back(piece);
            self.merge(at, filled);
            return None;
        }
        Some(piece)
    }

    /// Gives a piece to the channel below; false: it has no room.
    fn send(&mut self, at: u16, piece: u16) -> bool {
        let (_, _, bytes) = self.pieces.of(piece);
        let blocks = (bytes / self.layer.block_below()) as u64;
        match self.give(at, piece) {
            Submit::Done(result) => {
                self.slots[at].cursor += blocks;
                if !self.ended(piece, result) {
                    self.slots[at].pending += 1;
                }
            }
            Submit::Pending => {
                let slot = &mut self.slots[at];
                slot.cursor += blocks;
                slot.pending += 1;
            }
            Submit::Full => {
                self.slots[at].prepared = Some(piece);
                return false;
            }
        }
        true
    }

    /// Submits a piece to the channel below.
    fn give(&mut self, at: u16, piece: u16) -> Submit {
        let io = self.slots[at].io;
        let (_, cursor, bytes) = self.pieces.of(piece);
        let (lba, blocks) = (io.lba + cursor, (bytes / self.layer.block_below()) as u64);
        if io.op == Op::Write {
            self.layer.begins(lba, blocks);
        }
        let submit = self.pieces.submit(piece, &Io { lba, blocks, ..io });
        if io.op == Op::Write && submit != Submit::Pending {
            self.layer.ends(lba, blocks);
        }
        submit
    }

    /// The channel below did a piece. Whether it is over.
    fn ended(&mut self, piece: u16, result: Result<(), IoError>) -> bool {
        let at = self.pieces.of(piece).0;
        if result.is_ok() && self.slots[at].io.op == Op::Read {
            return self.receive(piece);
        }
        self.merge(at, result);
        self.pieces.give_back(piece);
        true
    }

    /// Gives what was read to where it is wanted. Whether the piece is over: else it is read again.
    fn receive(&mut self, piece: u16) -> bool {
        let (at, _, bytes) = self.pieces.of(piece);
        let received = self.layer.received(part(&self.slots, &mut self.pieces, piece));
        self.turn = self.turn.saturating_sub(bytes);
        let result = match received {
            Received::Over(result) => result,
            Received::Again => match self.give(at, piece) {
                Submit::Pending => return false,
                Submit::Done(Err(error)) => Err(error),
                // In the next turn, or when there is room.
                Submit::Done(Ok(())) | Submit::Full => {
                    self.came.push_back(piece);
                    self.waker.wake();
                    return false;
                }
            },
        };
        self.merge(at, result);
        self.pieces.give_back(piece);
        true
    }

    /// Keeps the first error.
    fn merge(&mut self, at: u16, result: Result<(), IoError>) {
        let slot = &mut self.slots[at];
        slot.result = slot.result.and(result);
    }

    /// Takes all that the channel below finished: what stayed there would not keep a thread awake.
    fn poll_below(&mut self, done: &mut Vec<Completion>) {
        let mut below_done = std::mem::take(&mut self.below_done);
        loop {
            below_done.clear();
            self.pieces.poll(&mut below_done);
            for c in &below_done {
                let Some(piece) = Pieces::tagged(c.tag) else {
                    // Passed on as a whole: as it was done below, so it is.
                    let io = self.slots[c.tag as u16].io;
                    self.layer.ends(io.lba, io.blocks);
                    self.finish(c.tag as u16, c.result, c.ticks, c.ended, done);
                    continue;
                };
                let (at, cursor, bytes) = self.pieces.of(piece);
                let io = self.slots[at].io;
                if c.result.is_ok() && io.op == Op::Read {
                    self.came.push_back(piece);
                    continue;
                }
                if io.op == Op::Write {
                    let blocks = (bytes / self.layer.block_below()) as u64;
                    self.layer.ends(io.lba + cursor, blocks);
                }
                self.ended(piece, c.result);
                self.slots[at].pending -= 1;
                self.finish_if_over(at, done);
            }
            if below_done.len() < BELOW_DONE {
                break;
            }
        }
        self.below_done = below_done;
    }

    /// Goes on with what had no room, or whose turn was over.
    fn poll_waiting(&mut self, done: &mut Vec<Completion>) {
        for _ in 0..self.waiting.len() {
            let Some(at) = self.waiting.pop_front() else { return };
            self.slots[at].waits = false;
            self.advance(at);
            if !self.slots[at].waits {
                self.finish_if_over(at, done);
                continue;
            }
            if self.turn > 0 {
                // Still no room: it stays the first.
                self.waiting.rotate_right(1);
                if self.slots[at].prepared.is_none() {
                    self.send_prepared();
                }
            }
            return;
        }
    }

    /// Gives the channel below pieces that it had no room for, as long as the turn lasts: what was read at once is
    /// worked on. The first that waits lacks memory, and these have all of it.
    #[cold]
    fn send_prepared(&mut self) {
        for nth in 1..self.waiting.len() {
            if self.turn == 0 {
                return self.waker.wake();
            }
            let at = self.waiting[nth];
            let Some(piece) = self.slots[at].prepared.take() else { continue };
            if !self.send(at, piece) {
                return;
            }
            // It may have ended at once.
            self.waker.wake();
        }
    }

    /// Whether nothing of an I/O is under way any more.
    fn is_over(&self, at: u16) -> bool {
        let slot = &self.slots[at];
        slot.pending == 0 && !slot.waits
    }

    /// Ends an I/O if nothing of it is under way any more.
    fn finish_if_over(&mut self, at: u16, done: &mut Vec<Completion>) {
        if self.is_over(at) {
            let (result, ended) = (self.slots[at].result, ticks::now());
            let ticks = ended.saturating_sub(self.slots[at].started);
            self.finish(at, result, ticks, ended, done);
        }
    }

    /// Ends an I/O that took `ticks` and was over at `ended`, in ticks.
    #[inline]
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
        self.stats.record(io.op, io.bytes(self.layer.block() as u32), ticks, result);
        let completion = Completion { tag: io.tag, result, ticks, ended };
        self.late.push(completion, done);
    }
}

/// A piece, for its layer.
fn part<'a, W: Copy>(slots: &Slots<Slot<W>>, pieces: &'a mut Pieces, at: u16) -> Part<'a, W> {
    let (slot, cursor, _) = pieces.of(at);
    let Slot { io, with, result, .. } = slots[slot];
    Part { io, with, is_well: result.is_ok(), at, cursor, pieces }
}

#[cfg(test)]
mod tests;
