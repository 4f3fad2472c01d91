//! What goes on when a channel is polled: what ended below, and what waited for that.

use super::{AreaChannel, BELOW_DONE, PASSED};
use bdev::{Completion, Pieces};
use reactor::ticks;

impl AreaChannel {
    /// Takes all that the device below finished: what stayed there would not keep a thread awake.
    pub(super) fn poll_below(&mut self, done: &mut Vec<Completion>) {
        let mut below_done = std::mem::take(&mut self.below_done);
        loop {
            below_done.clear();
            self.pieces.poll(&mut below_done);
            for c in &below_done {
                let Some(piece) = Pieces::tagged(c.tag) else {
                    self.finish((c.tag & !PASSED) as u16, c.result, c.ticks, c.ended, done);
                    continue;
                };
                let slot = self.parts[usize::from(self.part_of[usize::from(piece)])].slot;
                self.ended(piece, c.result);
                self.finish_if_over(slot, done);
            }
            if below_done.len() < BELOW_DONE {
                break;
            }
        }
        self.below_done = below_done;
    }

    /// Gives the device below what it had no room for.
    pub(super) fn poll_unsent(&mut self, done: &mut Vec<Completion>) {
        for _ in 0..self.unsent.len() {
            let Some(piece) = self.unsent.pop_front() else { return };
            let slot = self.parts[usize::from(self.part_of[usize::from(piece)])].slot;
            let left = self.unsent.len();
            self.send(piece);
            if self.unsent.len() > left {
                // Still no room: it stays the first.
                self.unsent.rotate_right(1);
                return;
            }
            self.finish_if_over(slot, done);
        }
    }

    /// Goes on with what did not match while somebody changed it.
    pub(super) fn poll_doubtful(&mut self, done: &mut Vec<Completion>) {
        for _ in 0..self.doubtful.len() {
            let Some(part) = self.doubtful.pop_front() else { return };
            let slot = self.parts[usize::from(part)].slot;
            self.recheck(part);
            self.finish_if_over(slot, done);
        }
    }

    /// Goes on with what had no room, no region or no answer, or whose turn was over.
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
        slot.pending == 0 && !slot.waits && slot.cursor == slot.till
    }

    /// Ends an I/O if nothing of it is under way any more.
    pub(super) fn finish_if_over(&mut self, at: u16, done: &mut Vec<Completion>) {
        if self.is_over(at) {
            let (result, ended) = (self.slots[at].result, ticks::now());
            let ticks = ended.saturating_sub(self.slots[at].started);
            self.finish(at, result, ticks, ended, done);
        }
    }
}
