//! What goes on when a channel is polled: what ended below, and what waited for that.

use super::{BASE_DONE, IntegrityChannel};
use bdev::{Completion, IoError, Op, Pieces};
use reactor::ticks;

impl IntegrityChannel {
    /// Takes all that the base bdev finished: what stayed there would not keep a thread awake.
    pub(super) fn poll_base(&mut self, done: &mut Vec<Completion>) {
        let mut base_done = std::mem::take(&mut self.base_done);
        loop {
            base_done.clear();
            self.pieces.poll(&mut base_done);
            for c in &base_done {
                let Some(piece) = Pieces::tagged(c.tag) else {
                    self.finish(c.tag as u16, c.result, c.ticks, c.ended, done);
                    continue;
                };
                let part = &self.parts[usize::from(piece)];
                let slot = part.slot;
                if c.result.is_ok() && part.op() == Op::Read {
                    self.came.push_back(piece);
                    continue;
                }
                self.over(piece, c.result);
                self.finish_if_over(slot, done);
            }
            if base_done.len() < BASE_DONE {
                break;
            }
        }
        self.base_done = base_done;
    }

    /// Goes on with what did not match while somebody else changed it.
    pub(super) fn poll_doubtful(&mut self, done: &mut Vec<Completion>) {
        for _ in 0..self.doubtful.len() {
            let Some(piece) = self.doubtful.pop_front() else { return };
            let slot = self.parts[usize::from(piece)].slot;
            self.recheck(piece);
            self.finish_if_over(slot, done);
        }
    }

    /// Gives the base bdev what it had no room for.
    pub(super) fn poll_unsent(&mut self, done: &mut Vec<Completion>) {
        for _ in 0..self.unsent.len() {
            let Some(piece) = self.unsent.pop_front() else { return };
            let (slot, left) = (self.parts[usize::from(piece)].slot, self.unsent.len());
            self.send(piece);
            if self.unsent.len() > left {
                // Still no room: it stays the first.
                self.unsent.rotate_right(1);
                return;
            }
            self.finish_if_over(slot, done);
        }
    }

    /// Goes on with what had no room or no answer, or whose turn was over.
    pub(super) fn poll_waiting(&mut self, done: &mut Vec<Completion>) {
        for _ in 0..self.waiting.len() {
            let Some(at) = self.waiting.pop_front() else { return };
            self.slots[at].waits = false;
            self.advance(at);
            self.finish_if_over(at, done);
        }
    }

    /// Whether nothing of an I/O is under way any more.
    pub(super) fn is_over(&self, at: u16) -> bool {
        let slot = &self.slots[at];
        slot.pending == 0 && !slot.waits && slot.cursor == slot.io.bytes(self.shape.block_size)
    }

    /// Ends an I/O if nothing of it is under way any more.
    pub(super) fn finish_if_over(&mut self, at: u16, done: &mut Vec<Completion>) {
        if self.is_over(at) {
            let (result, ended) = (self.slots[at].result, ticks::now());
            let ticks = ended.saturating_sub(self.slots[at].started);
            self.finish(at, result, ticks, ended, done);
        }
    }

    /// Ends an I/O that took `ticks` and was over at `ended`, in ticks.
    #[inline]
    pub(super) fn finish(
        &mut self,
        at: u16,
        result: Result<(), IoError>,
        ticks: u64,
        ended: u64,
        done: &mut Vec<Completion>,
    ) {
        self.slots.give_back(at);
        let io = &self.slots[at].io;
        self.stats.record(io.op, io.bytes(self.shape.block_size), ticks, result);
        self.late.push(Completion { tag: io.tag, result, ticks, ended }, done);
    }
}
