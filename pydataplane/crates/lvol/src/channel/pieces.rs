//! I/Os that cannot be passed on as a whole: cut into pieces, or parked until the metadata thread
//! has answered.
//!
//! An I/O goes on from its cursor, a run of the device at a time, until something of it has to be
//! waited for; whatever ends the waiting takes it further. A request goes into a queue that has room
//! for every slot; the metadata thread answers and wakes this thread.

use super::{LvolChannel, PART_TAG, Run, Slot};
use crate::asked::{Reply, Request, Want};
use crate::data::Data;
use bdev::{COPY_AT_ONCE, Completion, Io, IoError, Op, Protected, Submit};
use guestmem::Sg;
use reactor::ticks;
use std::sync::atomic::{Ordering, fence};

/// What became of a step of an I/O.
pub(super) enum Step {
    /// The I/O's cursor moved on.
    On,
    /// It goes on when a reply or a completion came.
    Parked,
    /// It goes on when the base bdev or the pieces have room.
    Wait,
}

impl LvolChannel {
    /// Takes a slot for an I/O that cannot be passed on as a whole, and goes as far as it can.
    pub(super) fn take(&mut self, io: &Io, with: Option<&Protected>) -> Submit {
        let Some(at) = self.slots.take() else { return Submit::Full };
        let begun = self.stats.begin();
        self.slots[at] = Slot::new(*io, with.copied(), begun.unwrap_or_else(ticks::now));
        self.advance(at);
        if !self.is_over(at) {
            return Submit::Pending;
        }
        let slot = &self.slots[at];
        let result = slot.result;
        self.slots.give_back(at);
        self.stats.end(io, self.geometry.block_size, begun, result);
        Submit::Done(result)
    }

    /// Takes an I/O as far as it goes now. The map was chosen.
    fn advance(&mut self, at: u16) {
        // What an earlier part of the I/O met ends it, and so does a smaller or deleted volume.
        while self.slots[at].cursor < self.slots[at].io.blocks {
            let Slot { io, with, result, .. } = self.slots[at];
            let result = result.and(self.usable);
            if let Err(e) = result.and_then(|()| self.check(&io, with.as_ref())) {
                self.slots[at].result = Err(e);
                self.slots[at].cursor = io.blocks;
                return;
            }
            if self.view.is_away() {
                self.ask_for_map(at, &io);
                return;
            }
            match self.step(at, &io) {
                Step::On => {}
                Step::Parked => return,
                Step::Wait => {
                    if !self.slots[at].waits {
                        self.slots[at].waits = true;
                        self.waiting.push_back(at);
                    }
                    return;
                }
            }
        }
    }

    fn step(&mut self, at: u16, io: &Io) -> Step {
        let Slot { cursor, with, .. } = self.slots[at];
        let run = self.run(io.op, io.lba + cursor, io.blocks - cursor);
        let block = self.geometry.block_size as usize;
        let in_list = with.map_or(block, |with| with.in_list(block));
        match (io.op, run.lba) {
            (Op::Read, None) => {
                let (outside, alike) = self.unallocated(io.lba + cursor, run.blocks);
                if outside {
                    return self.read_outside(at, io, alike);
                }
                // A piece a turn: zeroing megabytes at once would keep everybody else waiting.
                let blocks = alike.min((COPY_AT_ONCE / block) as u64);
                io.sg.zero(cursor as usize * in_list, blocks as usize * in_list);
                if let Some(with) = with {
                    with.give_unwritten(&io.sg, cursor, blocks, block);
                }
                let slot = &mut self.slots[at];
                slot.cursor += blocks;
                if blocks < alike {
                    self.pins.shared().waker.wake();
                    return Step::Wait;
                }
                Step::On
            }
            (Op::Write, None) => {
                let shift = self.volume.id.shift;
                let first = (io.lba + cursor) >> shift;
                let last = (io.lba + cursor + run.blocks - 1) >> shift;
                let want = if io.fua { Want::AllocateDurably } else { Want::Allocate };
                // The last cluster of the write, or its only one.
                let ends = first == last && cursor + run.blocks == io.blocks;
                let data = if ends { self.copied(io, cursor, first) } else { None };
                self.ask(Request { slot: at, want, first, count: last - first + 1, data })
            }
            (Op::Unmap | Op::WriteZeroes, None) => self.hide_step(at, io, run),
            (Op::Read | Op::Write, Some(lba)) => {
                let offset = cursor as usize * in_list;
                let Some(cut) = self.parts.cut(at, &io.sg, offset, run.blocks, in_list) else {
                    return Step::Wait;
                };
                if cut.blocks == 0 {
                    let slot = &mut self.slots[at];
                    slot.result = Err(IoError::Resources);
                    return Step::On;
                }
                let with = with.map(|with| with.further(io.lba, cursor));
                self.send(at, cut.part, Io { lba, blocks: cut.blocks, sg: cut.sg, ..*io }, with)
            }
            (Op::Unmap | Op::WriteZeroes, Some(lba)) => self.unmap_step(at, io, run, lba),
            (Op::Flush, _) => unreachable!("a flush has no blocks"),
        }
    }

    /// What a write has from `cursor` on, all of it in `cluster`, with its first byte there. `None`: it is
    /// written when the cluster is there. So it is where that shows zeros: a disk is told of those without
    /// data, and two more copies of the guest's cost more than what a second write does. And where blocks
    /// have protection information, which is compared with the data by the base, and copied without.
    fn copied(&self, io: &Io, cursor: u64, cluster: u64) -> Option<(u64, Data)> {
        let block = u64::from(self.geometry.block_size);
        let shift = self.volume.id.shift;
        let view = &self.view;
        // Without its map it may show a parent.
        if !self.merges
            || !view.is_away() && view.source(cluster) == 0 && !view.is_external(cluster)
        {
            return None;
        }
        let at = io.lba + cursor - (cluster << shift);
        let (offset, len) = (cursor * block, (io.blocks - cursor) * block);
        let data = self.volume.thread.buffers.copy(&io.sg, offset as usize, len as usize)?;
        Some((at * block, data))
    }

    /// One step of an unmap or write of zeros where the volume has nothing of its own: what a snapshot
    /// shows there is hidden, in whole clusters, or copied to be written to.
    fn hide_step(&mut self, at: u16, io: &Io, run: Run) -> Step {
        let shift = self.volume.id.shift;
        let from = io.lba + self.slots[at].cursor;
        let (first, last) = (from >> shift, (from + run.blocks - 1) >> shift);
        let shows = |cluster: u64| self.view.source(cluster) != 0 || self.view.is_external(cluster);
        let alike = |cluster: &u64| shows(*cluster) == shows(first);
        let end = first + (first..=last).take_while(alike).count() as u64;
        // Blocks of the run in clusters before `end`.
        let blocks = run.blocks.min((end << shift) - from);
        if !shows(first) {
            self.slots[at].cursor += blocks;
            return Step::On;
        }
        let whole = if (first << shift) == from { blocks >> shift } else { 0 };
        if self.gives_back && whole > 0 {
            return self.ask(Request::of(at, Want::Unmap, first, whole));
        }
        if io.op == Op::Unmap {
            // A part of a cluster stays as it is, which an unmap may do.
            self.slots[at].cursor += blocks.min(((first + 1) << shift) - from);
            return Step::On;
        }
        self.ask(Request::of(at, Want::Allocate, first, 1))
    }

    /// One step of an unmap or write of zeros over an allocated run: whole clusters of a thin volume
    /// go back to the store, the rest goes to the base bdev.
    fn unmap_step(&mut self, at: u16, io: &Io, run: Run, lba: u64) -> Step {
        let shift = self.volume.id.shift;
        let per_cluster = 1u64 << shift;
        let from = io.lba + self.slots[at].cursor;
        let mut blocks = run.blocks;
        if self.gives_back {
            let before = from.next_multiple_of(per_cluster) - from;
            let whole = blocks.saturating_sub(before) >> shift;
            if before == 0 && whole > 0 {
                let first = from >> shift;
                return self.ask(Request::of(at, Want::Unmap, first, whole));
            }
            // Up to the first whole cluster, or to the end where there is none.
            if before > 0 {
                blocks = blocks.min(before);
            }
        }
        if io.op == Op::Unmap && !(self.gives_back && self.volume.base_unmaps()) {
            self.slots[at].cursor += blocks;
            return Step::On;
        }
        let Some(cut) = self.parts.cut(at, &Sg::EMPTY, 0, 1, 0) else { return Step::Wait };
        self.send(at, cut.part, Io { lba, blocks, ..*io }, None)
    }

    /// Parks an I/O until the volume's map is in memory, and what it writes to is allocated.
    #[cold]
    fn ask_for_map(&mut self, at: u16, io: &Io) {
        let shift = self.volume.id.shift;
        let from = io.lba + self.slots[at].cursor;
        let (first, last) = (from >> shift, (io.lba + io.blocks - 1) >> shift);
        let want = match io.op {
            Op::Write if io.fua => Want::AllocateDurably,
            Op::Write => Want::Allocate,
            _ => Want::Map,
        };
        let whole = io.op == Op::Write && first == last;
        let data = if whole { self.copied(io, self.slots[at].cursor, first) } else { None };
        self.ask(Request { slot: at, want, first, count: last - first + 1, data });
    }

    /// Parks an I/O until the metadata thread answered.
    pub(super) fn ask(&mut self, request: Request) -> Step {
        let at = request.slot;
        let pushed = self.pins.shared().requests.push(request);
        assert!(pushed.is_ok(), "the queue has room for every slot");
        self.slots[at].pending += 1;
        self.asked += 1;
        self.volume.thread.ring();
        // The metadata thread marks a volume as removed, then answers what was asked for the last
        // time; here it is the other way round, so one of the two sees the other.
        fence(Ordering::SeqCst);
        if self.volume.is_removed() {
            self.pins.shared().waker.wake();
        }
        Step::Parked
    }

    /// Sends a piece to the base bdev.
    fn send(&mut self, at: u16, part: u16, io: Io, with: Option<Protected>) -> Step {
        let io = Io { tag: PART_TAG | u64::from(part), ..io };
        let submit = match &with {
            None => self.base.submit(&io),
            Some(with) => self.base.submit_protected(&io, with),
        };
        match submit {
            Submit::Done(result) => {
                self.note_part(at, io.tag, self.slots[at].cursor, result);
                self.parts.give_back(part);
                self.slots[at].cursor += io.blocks;
                self.merge(at, result);
            }
            Submit::Pending => {
                let pin = self.pins.begin();
                self.parts.pin(part, pin, self.slots[at].cursor);
                self.slots[at].cursor += io.blocks;
                self.slots[at].pending += 1;
            }
            Submit::Full => {
                self.parts.give_back(part);
                return Step::Wait;
            }
        }
        Step::On
    }

    /// Keeps which block was wrong, if a piece is the first of its I/O that failed.
    #[inline]
    fn note_part(&mut self, at: u16, tag: u64, cursor: u64, result: Result<(), IoError>) {
        if let (Err(error), Ok(())) = (result, self.slots[at].result) {
            self.note(error, tag, self.slots[at].io.tag, cursor);
        }
    }

    /// Keeps the first error.
    pub(super) fn merge(&mut self, at: u16, result: Result<(), IoError>) {
        let slot = &mut self.slots[at];
        slot.result = slot.result.and(result);
    }

    /// Whether nothing of an I/O is under way any more. Before it is, what must be durable is asked for.
    fn is_over(&mut self, at: u16) -> bool {
        let slot = &self.slots[at];
        if slot.pending > 0 || slot.waits {
            return false;
        }
        let unsettled = || slot.io.fua && !self.volume.is_settled();
        let lacks = matches!(slot.io.op, Op::Flush) || unsettled();
        if lacks && !slot.flushed && slot.result.is_ok() {
            self.slots[at].flushed = true;
            self.ask(Request::of(at, Want::Flush, 0, 0));
            return false;
        }
        true
    }

    /// Ends an I/O if nothing of it is under way any more.
    pub(super) fn finish_if_over(&mut self, at: u16, done: &mut Vec<Completion>) {
        if self.is_over(at) {
            let slot = &self.slots[at];
            let (result, ended) = (slot.result, ticks::now());
            let ticks = ended.saturating_sub(slot.started);
            self.finish(at, result, ticks, ended, done);
        }
    }

    /// The base bdev finished a piece.
    pub(super) fn part_ended(&mut self, c: &Completion, done: &mut Vec<Completion>) {
        let cursor = self.parts.cursor(c.tag as u16);
        let (at, pin) = self.parts.give_back(c.tag as u16);
        self.note_part(at, c.tag, cursor, c.result);
        self.pins.end(pin);
        self.slots[at].pending -= 1;
        self.merge(at, c.result);
        self.finish_if_over(at, done);
    }

    /// Goes on with what the metadata thread answered.
    pub(super) fn poll_replies(&mut self, done: &mut Vec<Completion>) {
        if self.volume.is_removed() {
            self.answer_removed();
        }
        while let Some(reply) = self.pins.shared().replies.pop() {
            self.asked -= 1;
            self.slots[reply.slot].pending -= 1;
            self.merge(reply.slot, reply.result);
            if reply.written {
                // It was the rest of the write.
                self.slots[reply.slot].cursor = self.slots[reply.slot].io.blocks;
            }
            self.choose_map();
            self.advance(reply.slot);
            self.finish_if_over(reply.slot, done);
        }
    }

    /// Ends what was asked for a volume that is gone: its metadata thread may look no more.
    #[cold]
    fn answer_removed(&self) {
        let shared = self.pins.shared();
        while let Some(request) = shared.requests.pop() {
            let reply = Reply { slot: request.slot, result: Err(IoError::Removed), written: false };
            let pushed = shared.replies.push(reply);
            assert!(pushed.is_ok(), "the queue has room for every slot");
        }
    }

    /// Goes on with what had no room below.
    pub(super) fn poll_waiting(&mut self, done: &mut Vec<Completion>) {
        for _ in 0..self.waiting.len() {
            let Some(at) = self.waiting.pop_front() else { return };
            self.slots[at].waits = false;
            self.choose_map();
            self.advance(at);
            if self.slots[at].waits {
                // Still no room: it stays the first.
                self.waiting.rotate_right(1);
                return;
            }
            self.finish_if_over(at, done);
        }
    }
}
