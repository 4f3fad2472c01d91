//! The data path: one queue pair on an lvol, on top of one queue pair on its base bdev.
//!
//! An I/O that lies in one run of the device (one cluster, or neighbours) goes down with another
//! LBA and nothing else. One that does not is cut into pieces, in order. What needs the metadata
//! thread (a write to an unallocated cluster, unmapping whole clusters) is parked in its slot: a
//! request goes into a queue that has room for every slot, the metadata thread answers and wakes
//! this thread, and the next poll goes on where the I/O stopped. No path allocates, locks or waits;
//! only a changed map (a resize) takes a lock, once.
//!
//! Order: a cluster belongs durably to the volume before data is written to it, so a flush of
//! the base bdev makes everything durable that was acknowledged before.

use crate::map::Map;
use crate::parts::Parts;
use crate::pins::{Pin, Pins};
use crate::volume::{Reply, Request, SLOTS, Volume, Want};
use bdev::{
    COPY_AT_ONCE, Channel, ChannelStats, Completion, Features, Geometry, Io, IoError, Op, Submit,
};
use guestmem::Sg;
use reactor::{Waker, ticks};
use std::collections::VecDeque;
use std::sync::Arc;
use std::sync::atomic::{Ordering, fence};

/// Completions taken from the base bdev at a time.
const BASE_DONE: usize = 64;
/// Marks a base I/O's tag as that of a piece; else it is a slot's.
const PART_TAG: u64 = 1 << 32;

/// An I/O under way.
#[derive(Clone, Copy)]
struct Slot {
    io: Io,
    /// Blocks from the start that were dealt with: done, or sent on.
    cursor: u64,
    /// Base I/Os and requests that are not over.
    pending: u32,
    result: Result<(), IoError>,
    /// For an I/O that was passed on as a whole.
    pin: Pin,
    started: u64,
    /// In [`LvolChannel::waiting`].
    waits: bool,
}

/// Where a range lies.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Run {
    /// First block on the base bdev; `None`: unallocated.
    lba: Option<u64>,
    blocks: u64,
}

/// What became of a step of an I/O.
enum Step {
    /// The I/O's cursor moved on.
    On,
    /// It goes on when a reply or a completion came.
    Parked,
    /// It goes on when the base bdev or the pieces have room.
    Wait,
}

pub(crate) struct LvolChannel {
    /// Dropped first: it waits for what is in flight, which uses `parts`.
    base: Box<dyn Channel>,
    parts: Parts,
    volume: Arc<Volume>,
    pins: Pins,
    map: Arc<Map>,
    /// Version of `map`.
    version: u64,
    geometry: Geometry,
    features: Features,
    removed: bool,
    slots: Box<[Slot]>,
    free: Vec<u16>,
    /// Slots that could not go on for want of room below, in order.
    waiting: VecDeque<u16>,
    /// Requests that were not answered.
    asked: u32,
    /// Finished I/Os that did not fit in the caller's list.
    late: VecDeque<Completion>,
    base_done: Vec<Completion>,
    stats: ChannelStats,
}

impl LvolChannel {
    pub fn new(volume: Arc<Volume>, base: Box<dyn Channel>, waker: Waker) -> Self {
        let shared = volume.add_channel(waker);
        let io = Io { op: Op::Flush, fua: false, lba: 0, blocks: 0, sg: Sg::EMPTY, tag: 0 };
        let slot = Slot {
            io,
            cursor: 0,
            pending: 0,
            result: Ok(()),
            pin: Pin::default(),
            started: 0,
            waits: false,
        };
        LvolChannel {
            base,
            parts: Parts::new(),
            pins: Pins::new(shared),
            map: volume.map(),
            // Looked at before the first I/O.
            version: 0,
            geometry: volume.geometry(),
            features: volume.features(),
            removed: false,
            slots: vec![slot; SLOTS].into_boxed_slice(),
            free: (0..SLOTS as u16).rev().collect(),
            waiting: VecDeque::with_capacity(SLOTS),
            asked: 0,
            late: VecDeque::with_capacity(SLOTS),
            base_done: Vec::with_capacity(BASE_DONE),
            stats: volume.stats.channel(),
            volume,
        }
    }

    /// Settles which map the next translation uses.
    #[inline]
    fn settle(&mut self) {
        let volume = &self.volume;
        let version = self.pins.settle(|| volume.version());
        if version != self.version {
            self.refresh(version);
        }
    }

    #[cold]
    fn refresh(&mut self, version: u64) {
        self.version = version;
        self.map = self.volume.map();
        self.geometry = self.volume.geometry();
        // The size of the map that is used, whatever came after it.
        self.geometry.num_blocks = self.map.clusters() << self.volume.id.shift;
        self.features = self.volume.features();
        self.removed = self.volume.is_removed();
    }

    #[inline]
    fn check(&self, io: &Io) -> Result<(), IoError> {
        if self.removed {
            return Err(IoError::Removed);
        }
        io.check(&self.geometry, &self.features)
    }

    /// The longest run at block `lba`, at most `blocks`; both are within the volume.
    #[inline]
    fn run(&self, lba: u64, blocks: u64) -> Run {
        let shift = self.volume.id.shift;
        let per_cluster = 1u64 << shift;
        let within = lba & (per_cluster - 1);
        let mut cluster = lba >> shift;
        let first = self.map.get(cluster);
        let mut len = (per_cluster - within).min(blocks);
        let mut expected = first;
        while len < blocks {
            cluster += 1;
            expected = if first == 0 { 0 } else { expected + 1 };
            if self.map.get(cluster) != expected {
                break;
            }
            len += per_cluster.min(blocks - len);
        }
        let lba = (first != 0).then(|| (u64::from(first) << shift) + within);
        Run { lba, blocks: len }
    }

    /// Passes an I/O on as a whole, at another LBA.
    #[inline]
    fn pass(&mut self, io: &Io, lba: u64, begun: Option<u64>) -> Submit {
        let Some(&at) = self.free.last() else { return Submit::Full };
        let down = Io { lba, tag: u64::from(at), ..*io };
        let submit = self.base.submit(&down);
        match submit {
            Submit::Done(result) => {
                self.stats.end(io, self.geometry.block_size, begun, result);
            }
            Submit::Pending => {
                self.free.pop();
                let slot = &mut self.slots[usize::from(at)];
                slot.io = *io;
                slot.cursor = io.blocks;
                slot.pending = 1;
                slot.result = Ok(());
                slot.started = begun.unwrap_or_else(ticks::now);
                slot.pin = self.pins.begin();
            }
            Submit::Full => {}
        }
        submit
    }

    /// Takes a slot for an I/O that cannot be passed on as a whole, and goes as far as it can.
    fn take(&mut self, io: &Io, begun: Option<u64>) -> Submit {
        let Some(at) = self.free.pop() else { return Submit::Full };
        self.slots[usize::from(at)] = Slot {
            io: *io,
            cursor: 0,
            pending: 0,
            result: Ok(()),
            pin: Pin::default(),
            started: begun.unwrap_or_else(ticks::now),
            waits: false,
        };
        self.advance(at);
        let slot = &self.slots[usize::from(at)];
        if slot.pending > 0 || slot.waits {
            return Submit::Pending;
        }
        let result = slot.result;
        self.free.push(at);
        self.stats.end(io, self.geometry.block_size, begun, result);
        Submit::Done(result)
    }

    /// Takes an I/O as far as it goes now. The map was settled.
    fn advance(&mut self, at: u16) {
        let index = usize::from(at);
        // What an earlier part of the I/O met ends it, and so does a smaller or deleted volume.
        while self.slots[index].cursor < self.slots[index].io.blocks {
            let io = self.slots[index].io;
            if let Err(e) = self.slots[index].result.and_then(|()| self.check(&io)) {
                self.slots[index].result = Err(e);
                self.slots[index].cursor = io.blocks;
                return;
            }
            match self.step(at, &io) {
                Step::On => {}
                Step::Parked => return,
                Step::Wait => {
                    if !self.slots[index].waits {
                        self.slots[index].waits = true;
                        self.waiting.push_back(at);
                    }
                    return;
                }
            }
        }
    }

    fn step(&mut self, at: u16, io: &Io) -> Step {
        let cursor = self.slots[usize::from(at)].cursor;
        let run = self.run(io.lba + cursor, io.blocks - cursor);
        let block = self.geometry.block_size as usize;
        match (io.op, run.lba) {
            (Op::Read, None) => {
                // A piece a turn: zeroing megabytes at once would keep everybody else waiting.
                let blocks = run.blocks.min((COPY_AT_ONCE / block) as u64);
                io.sg.zero(cursor as usize * block, blocks as usize * block);
                let slot = &mut self.slots[usize::from(at)];
                slot.cursor += blocks;
                if blocks < run.blocks {
                    self.pins.shared().waker.wake();
                    return Step::Wait;
                }
                Step::On
            }
            (Op::Write, None) => {
                let shift = self.volume.id.shift;
                let first = (io.lba + cursor) >> shift;
                let last = (io.lba + cursor + run.blocks - 1) >> shift;
                self.ask(Request { slot: at, want: Want::Allocate, first, count: last - first + 1 })
            }
            (Op::Unmap | Op::WriteZeroes, None) => {
                self.slots[usize::from(at)].cursor += run.blocks;
                Step::On
            }
            (Op::Read | Op::Write, Some(lba)) => {
                let offset = cursor as usize * block;
                let Some(cut) = self.parts.cut(at, &io.sg, offset, run.blocks, block) else {
                    return Step::Wait;
                };
                if cut.blocks == 0 {
                    let slot = &mut self.slots[usize::from(at)];
                    slot.result = Err(IoError::Resources);
                    return Step::On;
                }
                self.send(at, cut.part, Io { lba, blocks: cut.blocks, sg: cut.sg, ..*io })
            }
            (Op::Unmap | Op::WriteZeroes, Some(lba)) => self.unmap_step(at, io, run, lba),
            (Op::Flush, _) => unreachable!("a flush is passed on as a whole"),
        }
    }

    /// One step of an unmap or write of zeros over an allocated run: whole clusters of a thin volume
    /// go back to the store, the rest goes to the base bdev.
    fn unmap_step(&mut self, at: u16, io: &Io, run: Run, lba: u64) -> Step {
        let shift = self.volume.id.shift;
        let per_cluster = 1u64 << shift;
        let from = io.lba + self.slots[usize::from(at)].cursor;
        let mut blocks = run.blocks;
        if self.volume.id.thin {
            let before = from.next_multiple_of(per_cluster) - from;
            let whole = blocks.saturating_sub(before) >> shift;
            if before == 0 && whole > 0 {
                let first = from >> shift;
                return self.ask(Request { slot: at, want: Want::Unmap, first, count: whole });
            }
            // Up to the first whole cluster, or to the end where there is none.
            if before > 0 {
                blocks = blocks.min(before);
            }
        }
        if io.op == Op::Unmap && !self.volume.base_unmaps() {
            self.slots[usize::from(at)].cursor += blocks;
            return Step::On;
        }
        let Some(cut) = self.parts.cut(at, &Sg::EMPTY, 0, 1, 0) else { return Step::Wait };
        self.send(at, cut.part, Io { lba, blocks, ..*io })
    }

    /// Parks an I/O until the metadata thread answered.
    fn ask(&mut self, request: Request) -> Step {
        let pushed = self.pins.shared().requests.push(request);
        assert!(pushed.is_ok(), "the queue has room for every slot");
        self.slots[usize::from(request.slot)].pending += 1;
        self.asked += 1;
        self.volume.bell.ring();
        // The metadata thread marks a volume as removed, then answers what was asked for the last
        // time; here it is the other way round, so one of the two sees the other.
        fence(Ordering::SeqCst);
        if self.volume.is_removed() {
            self.pins.shared().waker.wake();
        }
        Step::Parked
    }

    /// Sends a piece to the base bdev.
    fn send(&mut self, at: u16, part: u16, io: Io) -> Step {
        let io = Io { tag: PART_TAG | u64::from(part), ..io };
        let index = usize::from(at);
        match self.base.submit(&io) {
            Submit::Done(result) => {
                self.parts.give_back(part);
                self.slots[index].cursor += io.blocks;
                self.merge(index, result);
            }
            Submit::Pending => {
                let pin = self.pins.begin();
                self.parts.pin(part, pin);
                self.slots[index].cursor += io.blocks;
                self.slots[index].pending += 1;
            }
            Submit::Full => {
                self.parts.give_back(part);
                return Step::Wait;
            }
        }
        Step::On
    }

    /// Keeps the first error.
    fn merge(&mut self, index: usize, result: Result<(), IoError>) {
        let slot = &mut self.slots[index];
        slot.result = slot.result.and(result);
    }

    /// Ends an I/O if nothing of it is under way any more.
    fn finish(&mut self, at: u16, done: &mut Vec<Completion>) {
        let slot = &self.slots[usize::from(at)];
        if slot.pending > 0 || slot.waits {
            return;
        }
        let (io, result) = (slot.io, slot.result);
        let took = ticks::now().saturating_sub(slot.started);
        self.free.push(at);
        self.stats.record(io.op, io.bytes(self.geometry.block_size), took, result);
        let completion = Completion { tag: io.tag, result };
        if done.len() < done.capacity() {
            done.push(completion);
        } else {
            self.late.push_back(completion);
        }
    }

    /// Takes all that the base bdev finished: what stayed there would not keep a thread awake whose
    /// I/Os have further pieces under way.
    fn poll_base(&mut self, done: &mut Vec<Completion>) {
        let mut base_done = std::mem::take(&mut self.base_done);
        loop {
            base_done.clear();
            self.base.poll(&mut base_done);
            for c in &base_done {
                self.ended(c, done);
            }
            if base_done.len() < BASE_DONE {
                break;
            }
        }
        self.base_done = base_done;
    }

    /// The base bdev finished an I/O, or a piece of one.
    #[inline]
    fn ended(&mut self, c: &Completion, done: &mut Vec<Completion>) {
        let at = if c.tag & PART_TAG == 0 {
            let at = c.tag as u16;
            self.pins.end(self.slots[usize::from(at)].pin);
            at
        } else {
            let (at, pin) = self.parts.give_back(c.tag as u16);
            self.pins.end(pin);
            at
        };
        let index = usize::from(at);
        self.slots[index].pending -= 1;
        self.merge(index, c.result);
        self.finish(at, done);
    }

    /// Goes on with what the metadata thread answered.
    fn poll_replies(&mut self, done: &mut Vec<Completion>) {
        if self.volume.is_removed() {
            self.answer_removed();
        }
        while let Some(reply) = self.pins.shared().replies.pop() {
            let index = usize::from(reply.slot);
            self.asked -= 1;
            self.slots[index].pending -= 1;
            self.merge(index, reply.result);
            self.settle();
            self.advance(reply.slot);
            self.finish(reply.slot, done);
        }
    }

    /// Ends what was asked for a volume that is gone: its metadata thread may look no more.
    #[cold]
    fn answer_removed(&self) {
        let shared = self.pins.shared();
        while let Some(request) = shared.requests.pop() {
            let reply = Reply { slot: request.slot, result: Err(IoError::Removed) };
            let pushed = shared.replies.push(reply);
            assert!(pushed.is_ok(), "the queue has room for every slot");
        }
    }

    /// Goes on with what had no room below.
    fn poll_waiting(&mut self, done: &mut Vec<Completion>) {
        for _ in 0..self.waiting.len() {
            let Some(at) = self.waiting.pop_front() else { return };
            self.slots[usize::from(at)].waits = false;
            self.settle();
            self.advance(at);
            if self.slots[usize::from(at)].waits {
                // Still no room: it stays the first.
                self.waiting.rotate_right(1);
                return;
            }
            self.finish(at, done);
        }
    }
}

impl Channel for LvolChannel {
    #[inline]
    fn submit(&mut self, io: &Io) -> Submit {
        let begun = self.stats.begin();
        self.settle();
        let submit = match self.check(io) {
            Err(e) => {
                self.stats.error(e);
                Submit::Done(Err(e))
            }
            Ok(()) if io.op == Op::Flush => self.pass(io, 0, begun),
            Ok(()) if io.blocks == 0 => Submit::Done(Ok(())),
            Ok(()) => {
                let run = self.run(io.lba, io.blocks);
                match run.lba {
                    Some(lba)
                        if run.blocks == io.blocks
                            && (matches!(io.op, Op::Read | Op::Write) || !self.volume.id.thin) =>
                    {
                        self.pass(io, lba, begun)
                    }
                    _ => self.take(io, begun),
                }
            }
        };
        self.pins.relax();
        submit
    }

    #[inline]
    fn poll(&mut self, done: &mut Vec<Completion>) -> u32 {
        let before = done.len();
        while done.len() < done.capacity()
            && let Some(c) = self.late.pop_front()
        {
            done.push(c);
        }
        if !self.late.is_empty() {
            return (done.len() - before) as u32;
        }
        if self.pins.in_flight() > 0 {
            self.poll_base(done);
        }
        if self.asked > 0 {
            self.poll_replies(done);
        }
        if !self.waiting.is_empty() {
            self.poll_waiting(done);
        }
        self.pins.relax();
        (done.len() - before) as u32
    }
}

impl Drop for LvolChannel {
    fn drop(&mut self) {
        // Nobody translates any more, but the base may still write to the old clusters: the pin
        // stays until it was dropped too.
        let nothing: Box<dyn Channel> = Box::new(Closed);
        drop(std::mem::replace(&mut self.base, nothing));
        self.volume.drop_channel(self.pins.shared());
    }
}

/// What a channel has instead of its base while it is dropped.
struct Closed;

impl Channel for Closed {
    fn submit(&mut self, _io: &Io) -> Submit {
        Submit::Done(Err(IoError::Removed))
    }
    fn poll(&mut self, _done: &mut Vec<Completion>) -> u32 {
        0
    }
}

#[cfg(test)]
mod tests;
