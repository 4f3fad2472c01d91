//! The end of many requests of a unit at a time, of which other reactors have some, by a task management function or
//! with the session. It has two steps, each of which is one call of every reactor: [`DevicePoller::hold_back`], and
//! when all have done that [`DevicePoller::end_marked`], or whatever else has them go on. Between the two nothing that
//! waits begins on any of them, and what ends there is not shown to the others (`task_set`). Else one that is ORDERED
//! could begin, and end as if all were well, as that which it waits for was ended elsewhere, just before it is ended
//! itself.
//!
//! Both are calls of the controller's thread, one after the other, so that of what else it does nothing comes between
//! them: no end of the session, no move of a queue, no removal of the disk. What is taken meanwhile is not meant.
//!
//! A reset is of all that show the volume, through whichever controllers, whose pollers are not called. It is
//! one step there ([`scsi::LunShared::reset`]): what was received before is ended when its turn comes
//! ([`DevicePoller::end_reset`]), or its I/O has ended, and whoever sees that one has ended by it sees the reset.

use std::sync::Arc;

use super::lists::NONE;
use super::units::OF_ENDING;
use super::{DevicePoller, ProtectedScsi, Scsi, Selector, Slot};
use crate::defs::MAX_TARGETS;

impl DevicePoller {
    /// Nothing that waits begins of the units of the selected requests, and nobody is shown what ends there, until
    /// [`DevicePoller::end_marked`] or [`DevicePoller::hold_back_no_more`].
    pub(crate) fn hold_back(&mut self, selector: Selector) {
        let only = selector.target();
        for target in (0..MAX_TARGETS).map(|target| target as u8) {
            if only.is_none_or(|only| only == target)
                && let Some(unit) = self.units.at(target)
            {
                unit.bars |= OF_ENDING;
            }
        }
    }

    /// Undoes it, of all units.
    pub(crate) fn hold_back_no_more(&mut self) {
        let units = self.units.units.iter_mut().flatten();
        units.for_each(|unit| unit.bars &= !OF_ENDING);
    }

    /// Marks the selected requests as ended by a task management function, with the response code `code`, and holds
    /// back what waits.
    pub(crate) fn mark_ended(&mut self, selector: Selector, code: u8) {
        self.in_flight().filter(|slot| selector.has(slot)).for_each(|slot| {
            slot.task.abort();
            slot.ended_by = code;
        });
        self.hold_back(selector);
    }

    /// Ends what was marked, or was reset meanwhile: what waits at once, all else when its I/O has ended. Returns how
    /// many of them there are.
    pub(crate) fn end_marked(&mut self, selector: Selector, code: u8) -> u32 {
        self.hold_back_no_more();
        let mut found = 0;
        let unit = selector.target().and_then(|target| self.units.at(target));
        let shared = unit.map(|unit| Arc::clone(unit.lun.shared()));
        let is_reset = |slot: &Slot| shared.as_ref().is_some_and(|unit| slot.task.is_reset(unit));
        for slot in self.slots.iter_mut().filter(|slot| selector.has(slot)) {
            if slot.task.is_aborted() || is_reset(slot) {
                slot.task.abort();
                slot.ended_by = code;
                found += 1;
            }
        }
        self.end_all_aborted();
        (0..self.queues.len()).for_each(|at| self.publish(at));
        found
    }

    /// Ends all requests with the response code `code`: what waits at once, all else when its I/O has ended.
    pub(crate) fn abort_all(&mut self, code: u8) {
        self.mark_ended(Selector::All, code);
        self.end_marked(Selector::All, code);
    }

    /// Ends the requests of `target` that wait and were received before its tasks were ended, by a reset for instance.
    /// Whether that has been since this was called last. Those of virtio-blk, whose driver knows of no reset, begin.
    #[inline]
    pub(super) fn end_reset(&mut self, target: u8) -> bool {
        let is_new = self.units.at(target).is_some_and(|u| u.epoch != u.lun.shared().epoch());
        if is_new && self.front.knows_busy() {
            self.end_waiting_of_old(target);
        }
        is_new && self.front.knows_busy()
    }

    #[cold]
    fn end_waiting_of_old(&mut self, target: u8) {
        let Some(unit) = self.units.at(target) else { return };
        let shared = Arc::clone(unit.lun.shared());
        unit.epoch = shared.epoch();
        let mut ended = unit.waiting.take_out(&mut self.slots, |of| of.task.is_reset(&shared));
        unit.suspended &= !unit.waiting.is_empty();
        while ended != NONE {
            let (at, index) = self.position(ended);
            ended = std::mem::replace(&mut self.slots[index].next, NONE);
            self.units.begins(target, &self.slots[index]);
            // Nothing of it is done.
            let now = reactor::ticks::now();
            _ = match self.protected {
                true => self.start::<ProtectedScsi>(at, index, now, true),
                false => self.start::<Scsi>(at, index, now, true),
            };
        }
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use bdev::testing::FaultBdev;
    use reactor::IoContext;
    use scsi::{Lun, LunOptions, LunShared};

    use super::super::in_flight::{Obstacle, Wants};
    use super::super::slot::{Chains, make};
    use super::super::units::{Unit, Units};
    use super::*;
    use crate::defs::task_attribute::{HEAD_OF_QUEUE, ORDERED};

    /// There is no other reactor, and nothing is in flight any more: what is taken between the two steps waits.
    #[test]
    fn on_one_reactor_what_is_taken_between_the_steps_begins_after_them() {
        let disk = FaultBdev::new("disk", 512, 8);
        let shared = LunShared::new(disk, LunOptions::default()).unwrap();
        let channel = shared.bdev().open(&IoContext::new().unwrap()).unwrap();
        let lun = Lun::new(Arc::clone(&shared), shared.connect(), channel);
        let mut units = Units::new(Duration::from_secs(1));
        units.insert(0, Unit::new(lun, Arc::default(), Arc::default(), None));
        units.show(0);
        let wants = make(0..1, Chains::Plain)[0].wants();
        let admitted = |units: &Units| {
            [0, ORDERED, HEAD_OF_QUEUE]
                .map(|attribute| units.admit(0, Wants { attribute, ..wants }, false))
        };
        assert_eq!(admitted(&units), [Ok(()); 3]);
        units.at(0).unwrap().bars |= OF_ENDING;
        assert_eq!(admitted(&units), [Err(Obstacle::Order), Err(Obstacle::Order), Ok(())]);
    }
}
