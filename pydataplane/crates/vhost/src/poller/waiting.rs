//! Requests that were taken and do not begin yet.
//!
//! A request waits in its slot, in a list of its unit ([`super::lists`]), while the unit or the session has as much
//! with devices as it may ([`super::in_flight`]), while the volume does as much as it may
//! ([`bdev::Limits`]), or while its task attribute says so (SAM-5 8.6): a
//! request that is ORDERED begins when all earlier ones of the unit have ended, and later ones begin
//! when it has; one that is HEAD OF QUEUE goes before all that wait. So a unit whose disk does not answer
//! keeps no other one waiting, and a guest with much to transfer has the device for a bounded time
//! before it is another's turn. Which of two requests of different virtqueues comes first is said in
//! [`super::task_set`], as it may be different reactors that take them.

use scsi::{Outcome, Response, Status};

use super::DevicePoller;
use super::front::FrontEnd;
use super::in_flight::Obstacle;
use super::lists::NONE;
use super::queue::RequestQueue;

impl DevicePoller {
    /// A request that was taken waits.
    #[cold]
    pub(super) fn postpone(&mut self, index: u16) {
        let of = &mut self.slots[index];
        let (tag, target, attribute) = (of.task.tag(), of.target, of.attribute);
        let Some(unit) = self.units.at(target) else { return };
        if let Some(place) = &mut unit.place {
            of.key = place.key(attribute);
        }
        if self.front.knows_busy() {
            of.task.wait(unit.lun.shared());
        }
        unit.waiting.push(&mut self.slots, tag);
        self.units.postponed(target, &mut self.slots[index]);
    }

    /// A request that its device does not take for now, or not all of it, stands where it was taken. It goes on when
    /// another of its unit has ended, or if there is no other in a moment; until then none of the unit begins.
    #[cold]
    pub(super) fn put_off(&mut self, index: u16) {
        let target = self.slots[index].target;
        self.insert(target, index);
        let is_alone = self.units.bar(target);
        // Where it is suspended nothing begins when another has ended, either.
        if is_alone || self.units.is_suspended(target) {
            self.stand_still(target);
        }
    }

    /// Begins requests that waited, one of each unit in turn, until none may or the turn is over.
    /// Returns how many; not 0 either if there is more room now, as their devices do not answer others.
    pub(super) fn begin_waiting<F: FrontEnd>(&mut self, turn_end: u64) -> u32 {
        let (mut count, mut refused) = (0, 0);
        // A stop, a change of memory or another process waits for all that was taken: limits, as long
        // as they are, do not keep it waiting.
        let ends = |q: &RequestQueue| q.stopping || q.leaving;
        let unlimited = self.unlimited || self.paused || self.queues.iter().any(ends);
        self.units.look_anew();
        if let Some(nth) = self.units.next_in_backlog() {
            self.next_backlog = nth;
        }
        while refused < self.units.backlog.len() {
            let nth = self.next_backlog % self.units.backlog.len();
            let (target, units) = (self.units.backlog[nth], self.units.backlog.len());
            if !self.begin_next::<F>(target, unlimited) {
                refused += 1;
                self.next_backlog = nth + 1;
                continue;
            }
            (count, refused) = (count + 1, 0);
            // A unit that has none left made room in the list for another.
            self.next_backlog = nth + usize::from(self.units.backlog.len() == units);
            if reactor::ticks::now() > turn_end {
                break;
            }
        }
        // One look at the clock for all that lacks room.
        if self.units.is_short() && self.units.age(reactor::ticks::now()) {
            count += 1;
        }
        count
    }

    /// Begins the next request of `target` that waits, if it may; `unlimited`: whatever limits say. Where that one waits
    /// for a limit or for another reactor, the next one of the other direction.
    fn begin_next<F: FrontEnd>(&mut self, target: u8, unlimited: bool) -> bool {
        if self.units.is_ending(target) {
            return false;
        }
        if self.end_reset(target) {
            return true;
        }
        let Some(unit) = self.units.at(target) else { return false };
        for tag in unit.waiting.next(&self.slots, unit.limits.is_on()) {
            if tag == NONE {
                break;
            }
            let next = &self.slots[tag as u16];
            match self.units.lets_go(target, next.wants(), unlimited) {
                Ok(()) => {
                    self.begin_waited::<F>(target, tag);
                    return true;
                }
                // Where this one waits for what another reactor received, that may wait for the other direction.
                Err(Obstacle::Limit(_) | Obstacle::Order) => {}
                Err(Obstacle::Nowhere | Obstacle::Room) => break,
            }
        }
        false
    }

    /// Begins the request `tag` of `target`, which waited and may begin.
    fn begin_waited<F: FrontEnd>(&mut self, target: u8, tag: u64) {
        let Some(unit) = self.units.at(target) else { return };
        unit.waiting.take(&mut self.slots, tag);
        let (at, index) = self.position(tag);
        self.units.begins(target, &self.slots[index]);
        self.slots[index].counted = true;
        self.start::<F>(at, index, reactor::ticks::now(), true);
        self.units.has_asked(target);
    }

    /// Ends the requests of `target` that wait and were aborted.
    pub(super) fn end_aborted(&mut self, target: u8) {
        let Some(unit) = self.units.at(target) else { return };
        let mut ended = unit.waiting.take_out(&mut self.slots, |of| of.task.is_aborted());
        unit.suspended &= !unit.waiting.is_empty();
        while ended != NONE {
            let (at, index) = self.position(ended);
            ended = std::mem::replace(&mut self.slots[index].next, NONE);
            self.units.begins(target, &self.slots[index]);
            self.end(at, index, Ok(Outcome::Done(Response::bare(Status::TaskAborted))));
        }
    }
}
