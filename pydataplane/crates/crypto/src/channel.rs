//! The data path: one queue pair on an encrypted bdev, on top of one queue pair on its base.
//!
//! A write is copied out of the guest's memory once, in pieces, and encrypted in memory of the
//! channel's own, which the base bdev gets: what the guest does to its memory meanwhile neither reaches
//! the medium nor makes a difference between pieces. A read comes into such memory, is decrypted there
//! and copied to the guest, which never sees encrypted data nor can have other data decrypted. What has
//! no data is passed on as it is.
//!
//! A thread encrypts and decrypts at most [`COPY_AT_ONCE`] bytes within `submit` or one `poll`; the rest
//! has its turn in the next. Where memory or room below is lacking, an I/O waits in its slot. No path
//! allocates, locks or waits.

use crate::Key;
use crate::pieces::{PIECES, Pieces};
use crate::xts::Xts;
use bdev::{
    Bdev, COPY_AT_ONCE, Channel, ChannelStats, Completion, Io, IoError, Late, Op, Slots, Stats,
    Submit,
};
use reactor::{Waker, ticks};
use std::collections::VecDeque;
use std::sync::Arc;

/// I/Os that a channel can have in flight.
const SLOTS: u16 = 256;
/// Completions taken from the base bdev at a time.
const BASE_DONE: usize = 64;
/// Marks a base I/O's tag as that of a piece; else it is a slot's.
const PIECE_TAG: u64 = 1 << 32;

pub(crate) struct CryptoChannel {
    /// Dropped first: it waits for what is in flight, which uses `pieces`.
    base: Box<dyn Channel>,
    pieces: Pieces,
    xts: Xts,
    /// Bytes of a block.
    block: usize,
    slots: Slots<Slot>,
    /// Slots that could not go on for want of room, or as their turn was over, in order.
    waiting: VecDeque<u16>,
    /// Pieces of reads whose data is there, to be decrypted.
    came: VecDeque<u16>,
    /// Finished I/Os that did not fit in the caller's list.
    late: Late,
    base_done: Vec<Completion>,
    /// I/Os that the base bdev has.
    in_flight: u32,
    /// Bytes that may still be encrypted or decrypted in this turn.
    turn: usize,
    /// Keeps the thread awake while something is left for its next turn.
    waker: Waker,
    stats: ChannelStats,
    disk: Arc<dyn Bdev>,
    /// As long as it is used.
    _key: Arc<Key>,
}

/// An I/O under way.
#[derive(Clone, Copy)]
struct Slot {
    io: Io,
    /// Blocks from the start that were given to the base bdev.
    cursor: u64,
    /// Pieces that are not over.
    pending: u32,
    /// A piece that the base bdev had no room for.
    prepared: Option<u16>,
    result: Result<(), IoError>,
    started: u64,
    /// In [`CryptoChannel::waiting`].
    waits: bool,
}

impl Slot {
    /// An I/O of which nothing is done yet, begun at `started` (in ticks).
    fn new(io: Io, started: u64) -> Self {
        let (result, prepared) = (Ok(()), None);
        Slot { io, cursor: 0, pending: 0, prepared, result, started, waits: false }
    }
}

impl Channel for CryptoChannel {
    fn sparse_run(&mut self, lba: u64, blocks: u64) -> bdev::Run {
        self.base.sparse_run(lba, blocks)
    }

    #[inline]
    fn submit(&mut self, io: &Io) -> Submit {
        if !matches!(io.op, Op::Read | Op::Write) {
            return self.pass(io);
        }
        // The whole of it, before a part is written.
        if let Err(e) = io.check(&self.disk.geometry(), &self.disk.features()) {
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
        self.stats.end(io, self.block as u32, begun, result);
        Submit::Done(result)
    }

    #[inline]
    fn poll(&mut self, done: &mut Vec<Completion>) -> u32 {
        let before = done.len();
        if !self.late.hand_over(done) {
            return (done.len() - before) as u32;
        }
        self.turn = COPY_AT_ONCE;
        if self.in_flight > 0 {
            self.poll_base(done);
        }
        while self.turn > 0
            && let Some(piece) = self.came.pop_front()
        {
            let at = self.pieces.of(piece).0;
            self.receive(piece);
            self.slots[at].pending -= 1;
            self.finish_if_over(at, done);
        }
        if !self.came.is_empty() {
            self.waker.wake();
        }
        self.poll_waiting(done);
        (done.len() - before) as u32
    }
}

impl CryptoChannel {
    /// On a queue pair of `disk`, of which it shows the blocks decrypted.
    pub fn new(
        disk: Arc<dyn Bdev>,
        base: Box<dyn Channel>,
        (xts, key): (Xts, Arc<Key>),
        stats: &Arc<Stats>,
        waker: Waker,
    ) -> Self {
        CryptoChannel {
            base,
            pieces: Pieces::new(),
            xts,
            block: disk.geometry().block_size as usize,
            slots: Slots::new(SLOTS, |_| Slot::new(Io::flush(0), 0)),
            waiting: VecDeque::with_capacity(usize::from(SLOTS)),
            came: VecDeque::with_capacity(usize::from(PIECES)),
            late: Late::with_capacity(SLOTS),
            base_done: Vec::with_capacity(BASE_DONE),
            in_flight: 0,
            turn: 0,
            waker,
            stats: stats.channel(),
            disk,
            _key: key,
        }
    }

    /// Passes an I/O without data on.
    fn pass(&mut self, io: &Io) -> Submit {
        let Some(at) = self.slots.next_free() else { return Submit::Full };
        let begun = self.stats.begin();
        let submit = self.base.submit(&Io { tag: u64::from(at), ..*io });
        match submit {
            Submit::Done(result) => self.stats.end(io, self.block as u32, begun, result),
            Submit::Pending => {
                self.slots.take();
                self.slots[at] = Slot::new(*io, begun.unwrap_or_else(ticks::now));
                self.in_flight += 1;
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
            let prepared = slot.prepared.take();
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

    /// The next piece of an I/O, with its encrypted data if it writes; `None`: its turn is over, there is
    /// no memory for it, or it failed.
    fn prepare(&mut self, at: u16) -> Option<u16> {
        if self.turn == 0 {
            return None;
        }
        let Slot { io, cursor, .. } = self.slots[at];
        let longest = match self.disk.features().max_blocks {
            0 => u64::MAX,
            blocks => u64::from(blocks),
        };
        // More than memory takes is cut by `Pieces`.
        let blocks = (io.blocks - cursor).min(longest).min((COPY_AT_ONCE / self.block) as u64);
        let piece = self.pieces.take(at, cursor, blocks as usize * self.block)?;
        if io.op == Op::Read {
            return Some(piece);
        }
        let (block, xts) = (self.block, &mut self.xts);
        let from = cursor as usize * block;
        let encrypted = self.pieces.each(piece, |begin, bytes| {
            io.sg.copy_to_slice(from + begin, bytes);
            xts.encrypt(io.lba + ((from + begin) / block) as u64, bytes)
        });
        self.turn = self.turn.saturating_sub(self.pieces.of(piece).2);
        if encrypted.is_err() {
            self.pieces.give_back(piece);
            self.slots[at].result = Err(IoError::Resources);
            return None;
        }
        Some(piece)
    }

    /// Gives a piece to the base bdev; false: it has no room.
    fn send(&mut self, at: u16, piece: u16) -> bool {
        let io = self.slots[at].io;
        let (_, cursor, bytes) = self.pieces.of(piece);
        let blocks = (bytes / self.block) as u64;
        let (lba, sg) = (io.lba + cursor, self.pieces.sg(piece));
        let tag = PIECE_TAG | u64::from(piece);
        match self.base.submit(&Io { lba, blocks, sg, tag, ..io }) {
            Submit::Done(result) => {
                self.slots[at].cursor += blocks;
                self.ended(piece, result);
            }
            Submit::Pending => {
                let slot = &mut self.slots[at];
                slot.cursor += blocks;
                slot.pending += 1;
                self.in_flight += 1;
            }
            Submit::Full => {
                self.slots[at].prepared = Some(piece);
                return false;
            }
        }
        true
    }

    /// The base bdev did a piece at once.
    fn ended(&mut self, piece: u16, result: Result<(), IoError>) {
        let at = self.pieces.of(piece).0;
        if result.is_ok() && self.slots[at].io.op == Op::Read {
            return self.receive(piece);
        }
        self.merge(at, result);
        self.pieces.give_back(piece);
    }

    /// Decrypts the data of a piece that was read, and copies it to where it is wanted.
    fn receive(&mut self, piece: u16) {
        let (at, cursor, bytes) = self.pieces.of(piece);
        let io = self.slots[at].io;
        let (block, xts) = (self.block, &mut self.xts);
        let from = cursor as usize * block;
        let decrypted = self.pieces.each(piece, |begin, bytes| {
            xts.decrypt(io.lba + ((from + begin) / block) as u64, bytes)?;
            io.sg.copy_from_slice(from + begin, bytes);
            Ok::<_, crate::xts::Failed>(())
        });
        self.turn = self.turn.saturating_sub(bytes);
        self.merge(at, decrypted.map_err(|_| IoError::Resources));
        self.pieces.give_back(piece);
    }

    /// Keeps the first error.
    fn merge(&mut self, at: u16, result: Result<(), IoError>) {
        let slot = &mut self.slots[at];
        slot.result = slot.result.and(result);
    }

    /// Takes all that the base bdev finished: what stayed there would not keep a thread awake.
    fn poll_base(&mut self, done: &mut Vec<Completion>) {
        let mut base_done = std::mem::take(&mut self.base_done);
        loop {
            base_done.clear();
            self.base.poll(&mut base_done);
            self.in_flight -= base_done.len() as u32;
            for c in &base_done {
                if c.tag & PIECE_TAG == 0 {
                    // Passed on as a whole: as the base did it, so it is.
                    self.finish(c.tag as u16, c.result, c.ticks, c.ended, done);
                    continue;
                }
                let piece = c.tag as u16;
                let at = self.pieces.of(piece).0;
                if c.result.is_ok() && self.slots[at].io.op == Op::Read {
                    self.came.push_back(piece);
                    continue;
                }
                self.ended(piece, c.result);
                self.slots[at].pending -= 1;
                self.finish_if_over(at, done);
            }
            if base_done.len() < BASE_DONE {
                break;
            }
        }
        self.base_done = base_done;
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
            }
            return;
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
        self.stats.record(io.op, io.bytes(self.block as u32), ticks, result);
        let completion = Completion { tag: io.tag, result, ticks, ended };
        self.late.push(completion, done);
    }
}
