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
//!
//! A driver of virtio-blk knows no BUSY, so there such a request is *kept*: it leaves its slot and is not
//! answered. A queue that goes on with new memory takes what it kept once more. One that ends gives it
//! back ([`DevicePoller::give_back`]), by the first of these that is possible:
//!
//! 1. The queue's base is the used index, if the available ring has from there on just what was kept. So
//!    whoever goes on takes it again, on another host, too, where QEMU has a new in-flight region.
//! 2. Requests that were taken later were used before it failed (virtio 1.2 2.7.8 has them in any order; what
//!    ends later than that is done again behind it, so that this is rare, but where it waited for a limit of its
//!    direction and those of the other one went on), but the front end has an in-flight region: it stays marked, and who goes on with that region submits it again. QEMU,
//!    as of 10.0, does not migrate the region, so not while it migrates the guest.
//! 3. Else nobody could know of it, and it ends with an error.
//!
//! So it is as well with what waits there as others have all of the queue of its device, which has nothing of
//! this unit whose end one could wait for ([`DevicePoller::put_off`]): the unit *stands still*, as one that is
//! suspended does, but nobody is told, and the device is asked again before long. What was begun of such a request
//! is only done again if it was kept. Where the first of these is not possible, a queue that stops has it asked some
//! times more, in no longer than it is left alone for otherwise, and what waits is kept after that.

use bdev::IoError;
use scsi::{Outcome, Response, Status};

use super::DevicePoller;
use super::front::{Blk, FrontEnd};
use super::lists::NONE;
use super::queue::RequestQueue;
use super::slot::Slot;
use crate::defs::{MAX_TARGETS, response, task_attribute};
use crate::front::DISK;

impl DevicePoller {
    /// The I/O of a request failed with `error`, for which it is to wait. It is not with its unit.
    #[cold]
    pub(super) fn suspend(&mut self, at: usize, index: u16, error: IoError) {
        let queue = &self.queues[at];
        let target = self.slots[index].target;
        let waited_for = queue.muted || queue.leaving || queue.stopping || self.lets_go;
        let end = if self.units.is_hidden(target) {
            scsi::told(error)
        } else if waited_for && !self.front.knows_busy() {
            let only = (!self.lets_go).then_some(queue.index);
            self.keep(at, index);
            // None of those that were taken later is done before it.
            self.keep_waiting(target, only);
            return;
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
            self.stand_still(target);
            return;
        };
        self.end(at, index, Ok(end));
    }

    /// Nothing of `target` begins for now, and no end of what it has in flight would change that. What
    /// somebody waits for does not wait with the rest.
    #[cold]
    pub(super) fn stand_still(&mut self, target: u8) {
        if self.front.knows_busy() {
            return;
        }
        if self.units.is_hidden(target) {
            return self.end_removed(target);
        }
        if self.lets_go {
            return self.keep_waiting(target, None);
        }
        let is_asked = self.units.asks_for_stop(target);
        for at in 0..self.queues.len() {
            let queue = &self.queues[at];
            // Where the unit is suspended a move of the queue is given up soon: the other reactor has it fail, too.
            let moves = queue.parked && !self.units.is_suspended(target);
            // What could not be given back may have room in a moment.
            let stops = queue.stopping && !(is_asked && queue.is_overtaken());
            if queue.muted || queue.leaving || stops || moves {
                self.keep_waiting(target, Some(queue.index));
            }
        }
    }

    /// Whether a request of virtio-blk that has ended as `outcome` is not answered, but waits behind an
    /// earlier one that does: it is done again after that.
    #[inline(always)]
    pub(super) fn overtakes(&mut self, at: usize, index: u16, outcome: &Outcome) -> bool {
        let slot = &self.slots[index];
        let waits = self.units.is_suspended(slot.target) || self.queues[at].kept_before(slot.order);
        waits && self.waits_behind(at, index, outcome)
    }

    #[cold]
    fn waits_behind(&mut self, at: usize, index: u16, outcome: &Outcome) -> bool {
        let (queue, slot) = (&self.queues[at], &mut self.slots[index]);
        let aborted = matches!(outcome, Outcome::Done(of) if of.status == Status::TaskAborted);
        if queue.muted || queue.leaving || aborted || self.units.is_hidden(slot.target) {
            return false;
        }
        let (target, order) = (slot.target, slot.order);
        if queue.kept_before(order) {
            self.keep(at, index);
            return true;
        }
        // Nothing of its own queue waits: that was kept. Queues have no order among each other.
        if queue.stopping {
            return false;
        }
        let waits = self.units.at(target).map(|unit| unit.waiting.oldest(&self.slots));
        let behind = waits.is_some_and(|oldest| oldest < order);
        if behind {
            self.slots[index].task.suspend();
            self.insert(target, index);
        }
        behind
    }

    /// Puts a request where it stood among those of `target` that wait.
    pub(super) fn insert(&mut self, target: u8, index: u16) {
        let tag = self.slots[index].task.tag();
        let Some(unit) = self.units.at(target) else { return };
        let slot = &mut self.slots[index];
        if !task_attribute::has_others_wait(slot.attribute) {
            // It had begun.
            slot.key = 0;
        }
        unit.waiting.insert(&mut self.slots, tag);
        self.units.postponed(target, &mut self.slots[index]);
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

    /// Whether the unit of `target` stands still, also after its device was asked for a queue that stops.
    pub(crate) fn stands_still(&self, target: u8) -> bool {
        self.units.stands_still(target) && !self.units.asks_for_stop(target)
    }

    /// A queue of a driver that knows no BUSY is about to stop: its device is asked some times more, if it is full.
    pub(crate) fn ask_for_stop(&mut self) {
        self.units.ask_for_stop(DISK);
    }

    /// Somebody waits for what is in flight: while `on`, no request is suspended, and those that are end
    /// as BUSY, or are kept.
    pub(crate) fn let_go(&mut self, on: bool) {
        self.lets_go = on;
        if !on {
            return;
        }
        for target in (0..MAX_TARGETS).map(|target| target as u8) {
            if !self.units.stands_still(target) {
                continue;
            }
            if !self.front.knows_busy() {
                self.keep_waiting(target, None);
            } else {
                self.end_suspended(target, Ok(Outcome::Done(Response::bare(Status::Busy))));
            }
        }
        (0..self.queues.len()).for_each(|at| self.publish(at));
    }

    /// Ends what waits where `target`, which is being removed, stands still: as new requests for it.
    pub(super) fn end_removed(&mut self, target: u8) {
        if self.units.stands_still(target) {
            self.end_suspended(target, Err(response::BAD_TARGET));
            (0..self.queues.len()).for_each(|at| self.publish(at));
        }
    }

    /// Ends all that waits for a unit that stands still, which then does not any more.
    fn end_suspended(&mut self, target: u8, end: Result<Outcome, u8>) {
        let Some(unit) = self.units.at(target) else { return };
        unit.suspended = false;
        let mut tag = unit.waiting.take_out(&mut self.slots, |_| true);
        while tag != NONE {
            let (at, index) = self.position(tag);
            tag = std::mem::replace(&mut self.slots[index].next, NONE);
            self.units.begins(target, &self.slots[index]);
            self.end(at, index, end);
        }
    }

    /// The request of a slot, which stands in no list, is kept.
    fn keep(&mut self, at: usize, index: u16) {
        self.queues[at].keep(&self.slots[index]);
        self.vacate(at, index);
    }

    /// Keeps what waits to begin on `target`, of one queue `only` or of all.
    pub(super) fn keep_waiting(&mut self, target: u8, only: Option<u16>) {
        let Some(unit) = self.units.at(target) else { return };
        let is_meant = |of: &Slot| only.is_none_or(|queue| queue == of.queue);
        let mut kept = unit.waiting.take_out(&mut self.slots, is_meant);
        unit.suspended &= !unit.waiting.is_empty();
        while kept != NONE {
            let (at, index) = self.position(kept);
            kept = std::mem::replace(&mut self.slots[index].next, NONE);
            self.units.begins(target, &self.slots[index]);
            self.keep(at, index);
        }
    }

    /// Takes again what was kept, of all queues that go on.
    pub(super) fn take_kept_again(&mut self) {
        self.queues.iter_mut().for_each(RequestQueue::take_again);
    }

    /// A queue without requests in flight is about to end: what it kept is for whoever goes on with it.
    /// `marks_last`: with the peer's region.
    pub(super) fn give_back(&mut self, at: usize, marks_last: bool) {
        let queue = &mut self.queues[at];
        if self.front.knows_busy() || queue.muted || queue.in_flight != 0 {
            return;
        }
        let mut heads = queue.take_kept();
        heads.extend(queue.ring.unreplayed());
        if queue.ring.give_back(&heads) || (marks_last && queue.ring.is_tracking()) {
            return;
        }
        for head in heads {
            // The queue has none now, and others have left its.
            let slot = self
                .slots
                .take()
                .expect("there is a slot for each descriptor, or for all that wait");
            let segments = &mut self.slots[slot].segments;
            let written = match queue.ring.walk(&queue.ring.head(head), segments) {
                Ok(()) => Blk::refuse(segments),
                Err(_) => 0,
            };
            queue.ring.push_used(head, written);
            self.slots.give_back(slot);
            self.counters.errors.add(1);
        }
        self.publish(at);
    }
}
