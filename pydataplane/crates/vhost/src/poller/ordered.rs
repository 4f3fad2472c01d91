//! Requests that are ORDERED or HEAD OF QUEUE, where several reactors take requests of their unit: see `task_set`.

use super::DevicePoller;
use super::lists::NONE;
use super::task_set::{First, Here};
use super::units::{OF_ENDING, OF_ORDERED, OF_OTHERS};
use crate::defs::task_attribute;

impl DevicePoller {
    /// Looks at the task sets that others told of, and at those of this poller whose requests wait for others or
    /// have others wait. Returns 1 if others told something: what waits here may begin.
    #[cold]
    pub(super) fn keep_order(&mut self) -> u32 {
        let told = self.member.take(&mut self.in_order);
        let mut from = 0;
        while let Some(target) = self.in_order.next(from) {
            if !self.look_at_order(target) {
                self.in_order.remove(target);
            }
            from = usize::from(target) + 1;
        }
        if !self.in_order.is_empty() {
            self.member.look_again();
        }
        u32::from(told)
    }

    /// Looks at the task set of `target`. Whether to look again, though nothing is told.
    fn look_at_order(&mut self, target: u8) -> bool {
        let Some(unit) = self.units.at(target) else { return false };
        let Some(place) = &mut unit.place else { return false };
        let first = match unit.waiting.first(&self.slots) {
            NONE => First::Nothing,
            tag => {
                let slot = &self.slots[tag as u16];
                match slot.attribute {
                    task_attribute::HEAD_OF_QUEUE => First::HeadOfQueue,
                    _ => First::Key(slot.key),
                }
            }
        };
        let ordered = unit.bars & OF_ORDERED != 0;
        let mut first_ordered = None;
        if place.has_changed() && !ordered {
            let tag = unit.waiting.first_ordered(&self.slots);
            first_ordered = (tag != NONE).then(|| self.slots[tag as u16].key);
        }
        let again = place.look(&Here {
            in_flight: unit.in_flight.requests > 0,
            ordered,
            first,
            first_ordered,
            first_head: unit.heads.first_ticket(),
            ending: unit.bars & OF_ENDING != 0,
        });
        match place.is_barred() {
            true => unit.bars |= OF_OTHERS,
            false => unit.bars &= !OF_OTHERS,
        }
        again
    }
}
