//! Requests whose I/O failed and that wait, as the error policy of their unit has it (`scsi::ErrorPolicy`).
//!
//! Such a request stays in its slot, marked as in flight where that is tracked, and goes back into the
//! list of its unit, where it was taken. The unit is suspended: nothing of it begins, new requests stand
//! behind, until [`DevicePoller::resume_unit`], after which all begin in their order. A unit is suspended
//! on each reactor by itself, by a failure there.
//!
//! Nobody waits for ever for a suspended request. Task management ends it as any other; what the target
//! goes away with ends it; a queue that stops, a change of memory or another process that goes on ends it
//! as BUSY, which has an initiator send it again (SAM-5 5.3.1), or leaves it marked, and it is submitted
//! again. QEMU stops all queues of a guest that it pauses, so a guest that was paused because of an error
//! sends its requests again when it goes on.

use bdev::IoError;
use scsi::{Outcome, Response, Status};

use super::DevicePoller;
use super::units::{NONE, Waiting};
use crate::defs::{MAX_TARGETS, response};

impl DevicePoller {
    /// The I/O of a request failed with `error`, for which it is to wait. It is not with its unit.
    #[cold]
    pub(super) fn suspend(&mut self, at: usize, index: u16, error: IoError) {
        let queue = &self.queues[at];
        let target = self.slots[index].target;
        let end = if self.units.is_hidden(target) {
            scsi::told(error)
        } else if queue.muted || queue.leaving {
            // Not told: it stays marked.
            Outcome::Done(Response::bare(Status::TaskAborted))
        } else if queue.stopping || self.lets_go {
            Outcome::Done(Response::bare(Status::Busy))
        } else {
            self.insert(target, index);
            let Some(unit) = self.units.at(target) else { return };
            if !std::mem::replace(&mut unit.suspended, true) {
                self.notice.suspended(target, error);
            }
            return;
        };
        self.finish(at, index, Ok(end), None);
    }

    /// Puts a request where it stood among those of `target` that wait: before all that were taken
    /// later.
    fn insert(&mut self, target: u8, index: u16) {
        let (tag, order) = (self.slots[index].task.tag(), self.slots[index].order);
        let Some(unit) = self.units.at(target) else { return };
        let (mut before, mut after) = (NONE, unit.waiting.first);
        while after != NONE && self.slots[after as u16].order < order {
            (before, after) = (after, self.slots[after as u16].next);
        }
        let slot = &mut self.slots[index];
        (slot.waits, slot.next) = (true, after);
        if before != NONE {
            self.slots[before as u16].next = tag;
        }
        let Some(unit) = self.units.at(target) else { return };
        if before == NONE {
            unit.waiting.first = tag;
        }
        if after == NONE {
            unit.waiting.last = tag;
        }
        self.units.postponed(target);
    }

    /// Whether the unit of `target` is suspended.
    pub(crate) fn is_suspended(&self, target: u8) -> bool {
        self.units.is_suspended(target)
    }

    /// What waits because an I/O of `target` failed begins again.
    pub(crate) fn resume_unit(&mut self, target: u8) {
        if let Some(unit) = self.units.at(target) {
            unit.suspended = false;
        }
    }

    /// Somebody waits for what is in flight: while `on`, no request is suspended, and those that are end
    /// as BUSY.
    pub(crate) fn let_go(&mut self, on: bool) {
        self.lets_go = on;
        if !on {
            return;
        }
        for target in (0..MAX_TARGETS).map(|target| target as u8) {
            if self.units.is_suspended(target) {
                self.end_suspended(target, Ok(Outcome::Done(Response::bare(Status::Busy))));
            }
        }
        (0..self.queues.len()).for_each(|at| self.publish(at));
    }

    /// Ends what waits because an I/O of `target`, which is being removed, failed: as new requests for
    /// it.
    pub(super) fn end_removed(&mut self, target: u8) {
        if self.units.is_suspended(target) {
            self.end_suspended(target, Err(response::BAD_TARGET));
            (0..self.queues.len()).for_each(|at| self.publish(at));
        }
    }

    /// Ends all that waits for a suspended unit, which then is not any more.
    fn end_suspended(&mut self, target: u8, end: Result<Outcome, u8>) {
        let Some(unit) = self.units.at(target) else { return };
        unit.suspended = false;
        let mut tag = std::mem::replace(&mut unit.waiting, Waiting::NOBODY).first;
        while tag != NONE {
            let (at, index) = self.position(tag);
            let slot = &mut self.slots[index];
            slot.waits = false;
            tag = std::mem::replace(&mut slot.next, NONE);
            self.units.begins(target);
            self.finish(at, index, end, None);
        }
    }
}
