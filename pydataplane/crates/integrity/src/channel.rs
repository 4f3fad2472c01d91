//! The data path: one queue pair on a bdev with checksums, on top of one queue pair on its base.
//!
//! An I/O is done in parts, each within one region, in memory of the channel's own: what a guest does to
//! its memory meanwhile neither reaches the medium nor makes a difference to the checksum, and no guest
//! sees what was not verified.
//!
//! A read is verified in that memory and copied to the guest. One that does not match may have met a
//! write: it is read again while the channel holds its blocks, so that nobody changes them, and what does not
//! match then is damaged. A write holds its blocks from before the base has it until their checksums are set. Of
//! a block that is written in part the rest is read and verified first.
//!
//! A thread takes the checksums of at most [`COPY_AT_ONCE`] bytes within `submit` or one `poll`; the rest has
//! its turn in the next. Where memory, room below or the keeper's answer is lacking, an I/O waits in its
//! slot. No path allocates, locks or waits.

mod part;
mod polling;

use crate::layout::{PAGE, clipped, locate, on_base};
use crate::table::{Got, Table, Want};
use bdev::{
    COPY_AT_ONCE, Channel, ChannelStats, Completion, Ear, Features, Geometry, Io, IoError, Late,
    Op, PIECES, Pieces, Run, Slots, Stats, Submit,
};
use part::{Kind, Part};
use reactor::{Waker, ticks};
use std::collections::VecDeque;
use std::sync::Arc;

/// I/Os that a channel can have in flight.
const SLOTS: u16 = 256;
/// Completions taken from the base bdev at a time.
const BASE_DONE: usize = 64;

pub(crate) struct IntegrityChannel {
    /// With the base bdev's channel.
    pieces: Pieces,
    /// What each piece is for.
    parts: Box<[Part]>,
    table: Arc<Table>,
    ear: Arc<Ear>,
    shape: Shape,
    slots: Slots<Slot>,
    /// Slots that could not go on for want of room, an answer, or as their turn was over.
    waiting: VecDeque<u16>,
    /// Parts that the base bdev had no room for, in order.
    unsent: VecDeque<u16>,
    /// Parts whose data was read, to be verified.
    came: VecDeque<u16>,
    /// Parts that did not match, and whose blocks somebody else changes.
    doubtful: VecDeque<u16>,
    /// Finished I/Os that did not fit in the caller's list.
    late: Late,
    base_done: Vec<Completion>,
    /// Bytes that may still be looked at in this turn.
    turn: usize,
    /// Keeps the thread awake while something is left for its next turn.
    waker: Waker,
    stats: ChannelStats,
}

/// What a bdev shows, but for its size, which may change.
#[derive(Clone, Copy)]
pub(crate) struct Shape {
    pub block_size: u32,
    pub features: Features,
    /// Blocks of [`PAGE`] bytes that the base takes at a time.
    pub longest: u64,
}

/// An I/O under way.
#[derive(Clone, Copy)]
struct Slot {
    io: Io,
    /// Bytes from the start that parts were made of.
    cursor: u64,
    /// Parts that are not over.
    pending: u32,
    result: Result<(), IoError>,
    started: u64,
    /// In [`IntegrityChannel::waiting`].
    waits: bool,
    /// The keeper was asked; again not before that round.
    again: u64,
}

impl Slot {
    /// An I/O of which nothing is done yet, begun at `started` (in ticks).
    fn new(io: Io, started: u64) -> Self {
        Slot { io, cursor: 0, pending: 0, result: Ok(()), started, waits: false, again: 0 }
    }
}

/// What became of the next part of an I/O.
enum Next {
    Part(u16),
    /// It waits until something ends that this thread polls, or the keeper answers.
    Wait,
    /// It waits for another thread, or its turn is over.
    Again,
    Failed(IoError),
}

impl Channel for IntegrityChannel {
    #[inline]
    fn submit(&mut self, io: &Io) -> Submit {
        if io.op == Op::Flush {
            return self.pass(io);
        }
        // The whole of it, before a part is written.
        if let Err(e) = io.check(&self.geometry(), &self.shape.features) {
            self.stats.error(e);
            return Submit::Done(Err(e));
        }
        if io.blocks == 0 {
            return Submit::Done(Ok(()));
        }
        let Some(at) = self.slots.take() else { return Submit::Full };
        let begun = self.stats.begin();
        self.slots[at] = Slot::new(*io, begun.unwrap_or_else(ticks::now));
        self.turn = COPY_AT_ONCE;
        self.advance(at);
        if !self.is_over(at) {
            return Submit::Pending;
        }
        let result = self.slots[at].result;
        self.slots.give_back(at);
        self.stats.end(io, self.shape.block_size, begun, result);
        Submit::Done(result)
    }

    #[inline]
    fn poll(&mut self, done: &mut Vec<Completion>) -> u32 {
        let before = done.len();
        if !self.late.hand_over(done) {
            return (done.len() - before) as u32;
        }
        self.turn = COPY_AT_ONCE;
        if self.pieces.in_flight() > 0 || !self.unsent.is_empty() {
            self.poll_base(done);
        }
        while self.turn > 0
            && let Some(part) = self.came.pop_front()
        {
            self.receive(part);
            self.finish_if_over(self.parts[usize::from(part)].slot, done);
        }
        if !self.came.is_empty() {
            self.waker.wake();
        }
        self.poll_doubtful(done);
        self.poll_unsent(done);
        self.poll_waiting(done);
        (done.len() - before) as u32
    }

    fn sparse_run(&mut self, lba: u64, blocks: u64) -> Run {
        let (at, most) = on_base(lba, blocks, PAGE as u64 / u64::from(self.shape.block_size));
        clipped(self.pieces.sparse_run(at, most), most)
    }
}

impl IntegrityChannel {
    /// On a queue pair of the base; `stats` counts what it does.
    pub fn new(
        base: Box<dyn Channel>,
        table: Arc<Table>,
        shape: Shape,
        stats: &Arc<Stats>,
        waker: Waker,
    ) -> Self {
        let ear = Ear::new(waker.clone());
        table.wants.add_ear(&ear);
        let pieces = || VecDeque::with_capacity(usize::from(PIECES));
        IntegrityChannel {
            pieces: Pieces::new(base),
            parts: vec![Part::default(); usize::from(PIECES)].into(),
            table,
            ear,
            shape,
            slots: Slots::new(SLOTS, |_| Slot::new(Io::flush(0), 0)),
            waiting: VecDeque::with_capacity(usize::from(SLOTS)),
            unsent: pieces(),
            came: pieces(),
            doubtful: pieces(),
            late: Late::with_capacity(SLOTS),
            base_done: Vec::with_capacity(BASE_DONE),
            turn: 0,
            waker,
            stats: stats.channel(),
        }
    }

    fn geometry(&self) -> Geometry {
        let (block_size, bytes) = (self.shape.block_size, PAGE as u64);
        let num_blocks = self.table.blocks() * (bytes / u64::from(block_size));
        Geometry { block_size, physical_block_size: PAGE as u32, num_blocks }
    }

    /// Passes an I/O without blocks on: a flush makes data durable, which is all that it has to.
    fn pass(&mut self, io: &Io) -> Submit {
        let Some(at) = self.slots.next_free() else { return Submit::Full };
        let begun = self.stats.begin();
        let submit = self.pieces.pass(&Io { tag: u64::from(at), ..*io });
        match submit {
            Submit::Done(result) => self.stats.end(io, self.shape.block_size, begun, result),
            Submit::Pending => {
                self.slots.take();
                self.slots[at] = Slot::new(*io, begun.unwrap_or_else(ticks::now));
            }
            Submit::Full => {}
        }
        submit
    }

    /// Takes an I/O as far as it goes now.
    fn advance(&mut self, at: u16) {
        loop {
            let slot = &mut self.slots[at];
            let whole = slot.io.bytes(self.shape.block_size);
            if slot.result.is_err() {
                // What an earlier part met ends it.
                slot.cursor = whole;
            }
            if slot.cursor == whole {
                return;
            }
            match self.prepare(at) {
                Next::Part(part) => self.send(part),
                Next::Failed(e) => self.slots[at].result = Err(e),
                Next::Wait => return self.wait(at),
                Next::Again => {
                    self.waker.wake();
                    return self.wait(at);
                }
            }
        }
    }

    /// Has an I/O wait.
    fn wait(&mut self, at: u16) {
        if !self.slots[at].waits {
            self.slots[at].waits = true;
            self.waiting.push_back(at);
        }
    }

    /// The next part of an I/O, with its data and checksums if it writes.
    fn prepare(&mut self, at: u16) -> Next {
        if self.turn == 0 {
            return Next::Again;
        }
        let Slot { io, cursor, .. } = self.slots[at];
        let from = io.lba * u64::from(self.shape.block_size) + cursor;
        let left = io.bytes(self.shape.block_size) - cursor;
        let (block, skip) = (from / PAGE as u64, (from % PAGE as u64) as usize);
        let location = locate(block);
        let mut part = Part::cut(io.op, location, skip, left, self.shape.longest);
        let page_at = match self.table.pin(location.region) {
            Got::Page(at) => at,
            Got::Absent => return self.ask(at, Want { region: location.region, write: false }),
            Got::Failed(e) => return Next::Failed(e),
        };
        let page = self.table.page(page_at);
        if part.kind != Kind::Read && !page.gate.admit() {
            let refused = page.gate.take_refused();
            page.unpin();
            return match refused {
                Some(e) => Next::Failed(e),
                None if self.table.wants.is_closed() => Next::Failed(IoError::Removed),
                None => self.ask(at, Want { region: location.region, write: true }),
            };
        }
        part.page = page_at;
        part.slot = at;
        part.from = cursor as usize;
        part.admitted = part.kind != Kind::Read;
        let Some(piece) = self.pieces.take(at, cursor, part.memory()) else {
            part.release(&self.table);
            return Next::Wait;
        };
        part.fit(self.pieces.of(piece).2);
        if part.admitted && !part.hold(page) {
            self.pieces.give_back(piece);
            part.release(&self.table);
            // By this channel, another, or the keeper: soon over.
            return Next::Again;
        }
        part.held = part.admitted;
        if part.kind == Kind::Write {
            part.take_data(&mut self.pieces, piece, &io);
            self.turn = self.turn.saturating_sub(part.bytes);
        }
        let slot = &mut self.slots[at];
        slot.cursor += part.bytes as u64;
        slot.pending += 1;
        slot.again = 0;
        self.parts[usize::from(piece)] = part;
        Next::Part(piece)
    }

    /// Asks the keeper, unless it was asked and may still answer.
    fn ask(&mut self, at: u16, want: Want) -> Next {
        let slot = &mut self.slots[at];
        if slot.again == 0 || self.table.wants.is_round(slot.again) {
            slot.again = self.table.wants.ask(want, &self.ear);
        } else {
            // It may have been too busy to see this, or what it did is undone already.
            self.table.wants.remind(&self.ear);
        }
        Next::Wait
    }

    /// Gives a part to the base bdev, now or when that has room.
    fn send(&mut self, piece: u16) {
        let part = self.parts[usize::from(piece)];
        let io = &self.slots[part.slot].io;
        let fua = io.fua && part.op().is_write();
        let per = PAGE as u64 / u64::from(self.shape.block_size);
        let io = Io {
            op: part.op(),
            fua,
            lba: part.location.page * per,
            blocks: u64::from(part.count) * per,
            ..*io
        };
        match self.pieces.submit(piece, &io) {
            Submit::Done(result) => self.ended(piece, result),
            Submit::Pending => {}
            Submit::Full => self.unsent.push_back(piece),
        }
    }

    /// The base bdev is through with a part.
    fn ended(&mut self, piece: u16, result: Result<(), IoError>) {
        if result.is_err() || self.parts[usize::from(piece)].op() != Op::Read {
            self.over(piece, result);
        } else if self.turn > 0 {
            self.receive(piece);
        } else {
            self.came.push_back(piece);
            self.waker.wake();
        }
    }

    /// Verifies the data of a part that was read.
    fn receive(&mut self, piece: u16) {
        let part = &mut self.parts[usize::from(piece)];
        let io = self.slots[part.slot].io;
        self.turn = self.turn.saturating_sub(usize::from(part.count) * PAGE);
        let page = self.table.page(part.page);
        let mismatch = part.verify(&mut self.pieces, piece, page, &io).err();
        match (part.kind, mismatch) {
            (Kind::Merge, None) => {
                part.kind = Kind::Write;
                part.take_data(&mut self.pieces, piece, &io);
                self.send(piece);
            }
            (Kind::Read, Some(_)) => self.recheck(piece),
            (_, Some(nth)) => {
                self.table.note_mismatch(crate::layout::block_at(part.location.page) + nth as u64);
                self.over(piece, Err(IoError::ReadMedium));
            }
            (_, None) => self.over(piece, Ok(())),
        }
    }

    /// Reads a part again while nobody changes it: what was found may be a change under way.
    #[cold]
    fn recheck(&mut self, piece: u16) {
        let part = &mut self.parts[usize::from(piece)];
        if part.hold(self.table.page(part.page)) {
            part.held = true;
            part.kind = Kind::Recheck;
            self.send(piece);
        } else {
            self.doubtful.push_back(piece);
            self.waker.wake();
        }
    }

    /// Ends a part: sets the checksums of what it changed.
    fn over(&mut self, piece: u16, result: Result<(), IoError>) {
        let part = &mut self.parts[usize::from(piece)];
        part.set_entries(&self.table, result.is_ok(), self.shape.features.unmap_zeroes);
        part.release(&self.table);
        let slot = &mut self.slots[part.slot];
        slot.pending -= 1;
        slot.result = slot.result.and(result);
        self.pieces.give_back(piece);
    }
}

/// What the base had of it is waited for; what is not over has no checksum, as it may be there or not.
impl Drop for IntegrityChannel {
    fn drop(&mut self) {
        self.pieces.end();
        for part in &mut self.parts {
            part.set_entries(&self.table, false, false);
            part.release(&self.table);
        }
        self.table.wants.remove_ear(&self.ear);
    }
}
