//! The logical units of a session as one reactor has them: which there are, and how they come and go. What
//! they have in flight, and when a request may begin on one, is in `in_flight`; what a device does not take for now, in
//! `full`.

use std::sync::Arc;
use std::time::Duration;

use bdev::{Limits, OpenError};
use guestmem::Sg;
use reactor::{Cx, Owner};
use scsi::{CDB_LEN, Lun, LunShared, Nexus, Outcome};

use super::heads::Heads;
use super::in_flight::{Load, Room};
use super::lists::Waiting;
use super::slot::Slot;
use super::task_set::Place;
use crate::defs::{LunAddress, MAX_TARGETS, task_attribute};
use crate::stats::LunCounters;

/// LUN 0 of one target on one reactor.
pub(crate) struct Unit {
    pub(super) lun: Lun,
    pub(super) counters: Arc<LunCounters>,
    /// The volume's.
    pub(super) limits: Arc<Limits>,
    /// Requests that wait for the device.
    pub(super) in_flight: Load,
    /// Why what is taken does not begin at once: [`OF_ORDERED`], [`OF_OTHERS`], [`OF_HEADS`], [`OF_ENDING`].
    pub(super) bars: u8,
    /// Its requests that are HEAD OF QUEUE.
    pub(super) heads: Heads,
    /// Its task set, where several reactors take requests of it that may be ORDERED.
    pub(super) place: Option<Place>,
    /// When a device that takes no more, though nothing is in flight, is asked again, in ticks; 0: it takes what
    /// comes, or something is.
    pub(super) again: u64,
    /// How long it was left alone the last time, in ticks; 0: it took what came then.
    pub(super) pause: u64,
    /// Requests that were taken and do not begin yet.
    pub(super) waiting: Waiting,
    /// How often all its tasks had been ended when those that wait were last looked at for that
    /// ([`LunShared::epoch`]).
    pub(super) epoch: u32,
    /// An I/O failed, and what waits begins when somebody says so.
    pub(super) suspended: bool,
    /// Nothing begins: it is about to go on with another channel.
    pub(super) halted: bool,
    /// Who is told when nothing is with the device any more, while it is halted.
    pub(super) idle: Option<Box<dyn FnOnce() + Send>>,
    /// What it is to go on with.
    next: Option<(Lun, Arc<Limits>)>,
    /// Not yet to be found by new requests, or no longer.
    pub(super) hidden: bool,
}

impl Unit {
    /// Opens the logical unit on the reactor of `cx`, for the session `nexus`, whose I/O is `owner`'s;
    /// hidden until [`Units::show`].
    pub(crate) fn open(
        cx: &Cx,
        owner: Owner,
        shared: &Arc<LunShared>,
        nexus: Arc<Nexus>,
        (counters, limits): (Arc<LunCounters>, Arc<Limits>),
        place: Option<Place>,
    ) -> Result<Unit, OpenError> {
        let channel = shared.bdev().open(&cx.io().owned_by(owner))?;
        let lun = Lun::new(Arc::clone(shared), nexus, channel);
        Ok(Unit::new(lun, counters, limits, place))
    }

    pub(super) fn new(
        lun: Lun,
        counters: Arc<LunCounters>,
        limits: Arc<Limits>,
        place: Option<Place>,
    ) -> Self {
        Unit {
            epoch: lun.shared().epoch(),
            lun,
            counters,
            limits,
            in_flight: Load::default(),
            bars: 0,
            heads: Heads::NONE,
            place,
            again: 0,
            pause: 0,
            waiting: Waiting::NOBODY,
            suspended: false,
            halted: false,
            idle: None,
            next: None,
            hidden: true,
        }
    }

    /// A request with an attribute that has others wait is with its device; `waited`: it did not begin at once.
    #[cold]
    pub(super) fn holds_back(&mut self, slot: &mut Slot, waited: bool) {
        if slot.attribute == task_attribute::ORDERED {
            self.bars |= OF_ORDERED;
            return;
        }
        if !waited && let Some(place) = &mut self.place {
            slot.key = place.key(slot.attribute);
        }
        self.add_head(slot);
    }

    /// One such is not with its device any more.
    #[cold]
    pub(super) fn lets_go_on(&mut self, slot: &Slot) {
        match slot.attribute {
            task_attribute::ORDERED => self.bars &= !OF_ORDERED,
            _ => self.remove_head(slot),
        }
    }

    fn add_head(&mut self, slot: &mut Slot) {
        slot.group = self.heads.add(slot.order, slot.key);
        self.bars |= OF_HEADS;
        self.heads_have_changed();
    }

    fn remove_head(&mut self, slot: &Slot) {
        self.heads.remove(slot.group);
        if self.heads.is_empty() {
            self.bars &= !OF_HEADS;
        }
        self.heads_have_changed();
    }

    fn heads_have_changed(&mut self) {
        if let Some(place) = &mut self.place {
            place.set_changed();
        }
    }
}

/// A request of the unit that is with its device has the task attribute ORDERED, or the device takes no more until one
/// has ended, or until [`Unit::again`].
pub(super) const OF_ORDERED: u8 = 1;
/// One that other reactors received earlier is ORDERED or HEAD OF QUEUE.
pub(super) const OF_OTHERS: u8 = 2;
/// One that was taken here and has not ended is HEAD OF QUEUE.
pub(super) const OF_HEADS: u8 = 4;
/// Some are about to be ended here and on other reactors: nothing that waits begins.
pub(super) const OF_ENDING: u8 = 8;

/// All targets, by number, and which of them have requests in flight.
pub(super) struct Units {
    pub(super) units: Box<[Option<Unit>]>,
    /// Targets with requests in flight, in no order; capacity for all.
    pub(super) active: Vec<u8>,
    /// How much data they may have with devices, and have.
    pub(super) room: Room,
    /// How many requests wait for a device or to begin.
    pub(super) taken: u32,
    /// Targets with requests that do not begin yet, in no order; capacity for all.
    pub(super) backlog: Vec<u8>,
    /// When a limit lets something begin that waits, or a device is asked again, in ticks.
    pub(super) limited_until: u64,
    /// How often a device is still asked for a queue that stops.
    pub(super) asks_of_stop: u32,
}

impl Units {
    /// No units; `answer`: [`crate::Timeouts::answer`].
    pub(super) fn new(answer: Duration) -> Self {
        Units {
            units: (0..MAX_TARGETS).map(|_| None).collect(),
            active: Vec::with_capacity(MAX_TARGETS),
            room: Room::new(answer),
            taken: 0,
            backlog: Vec::with_capacity(MAX_TARGETS),
            limited_until: u64::MAX,
            asks_of_stop: 0,
        }
    }

    /// The unit that new requests for `target` go to.
    #[inline]
    pub(super) fn find(&mut self, target: u8) -> Option<&mut Unit> {
        self.at(target).filter(|unit| !unit.hidden)
    }

    /// The unit of `target`, even if it is being removed.
    #[inline]
    pub(super) fn at(&mut self, target: u8) -> Option<&mut Unit> {
        self.units.get_mut(usize::from(target))?.as_mut()
    }

    /// Nothing of `target` begins any more; calls `idle` as soon as nothing is with its device, perhaps
    /// at once.
    pub(super) fn halt(&mut self, target: u8, idle: Box<dyn FnOnce() + Send>) {
        match self.at(target) {
            Some(unit) if unit.in_flight.requests > 0 => {
                (unit.halted, unit.idle) = (true, Some(idle));
            }
            Some(unit) => {
                unit.halted = true;
                idle();
            }
            None => idle(),
        }
    }

    /// What waited since [`Units::halt`] begins again.
    pub(super) fn go_on(&mut self, target: u8) {
        if let Some(unit) = self.at(target) {
            (unit.halted, unit.idle, unit.next) = (false, None, None);
        }
    }

    /// `target` is to go on with `lun`, of a volume with these limits, after [`Units::switch`].
    pub(super) fn prepare(&mut self, target: u8, lun: Lun, limits: Arc<Limits>) {
        if let Some(unit) = self.at(target) {
            unit.next = Some((lun, limits));
        }
    }

    /// `target`, which is halted and has nothing with its device, has what it was to go on with.
    pub(super) fn switch(&mut self, target: u8) {
        if let Some(unit) = self.at(target) {
            assert!(unit.halted && unit.in_flight.requests == 0, "target {target} is in use");
            if let Some(next) = unit.next.take() {
                (unit.lun, unit.limits) = next;
                unit.again = unit.again.min(1);
            }
        }
    }

    /// The request of `slot` stands in one of the lists of `target` of those that do not begin yet.
    pub(super) fn postponed(&mut self, target: u8, slot: &mut Slot) {
        self.taken += 1;
        if let Some(unit) = self.at(target) {
            if let Some(place) = &mut unit.place {
                place.waits(slot.attribute);
            }
            if slot.attribute == task_attribute::HEAD_OF_QUEUE {
                unit.add_head(slot);
            }
        }
        if !self.backlog.contains(&target) {
            self.backlog.push(target);
        }
    }

    /// The request of `slot` failed when it was started, perhaps to wait; `waited`: it did not begin when it was taken.
    #[cold]
    pub(super) fn waits_anew(&mut self, slot: &mut Slot, waited: bool) {
        let place = self.at(slot.target).and_then(|unit| unit.place.as_mut());
        if let Some(place) = place.filter(|_| !waited) {
            slot.key = place.key(slot.attribute);
        }
    }

    /// The request of `slot` left that list.
    pub(super) fn begins(&mut self, target: u8, slot: &Slot) {
        self.taken -= 1;
        if let Some(unit) = self.at(target) {
            if let Some(place) = &mut unit.place {
                place.begins(slot.attribute);
            }
            if slot.attribute == task_attribute::HEAD_OF_QUEUE {
                unit.remove_head(slot);
            }
            if !unit.waiting.is_empty() {
                return;
            }
            if unit.again != 0 {
                (unit.again, unit.pause) = (0, 0);
                unit.bars &= !OF_ORDERED;
            }
        }
        self.room.forget(target);
        if let Some(nth) = self.backlog.iter().position(|t| *t == target) {
            self.backlog.swap_remove(nth);
        }
    }

    /// Puts a unit in place; the place must be free.
    pub(super) fn insert(&mut self, target: u8, unit: Unit) {
        let place = &mut self.units[usize::from(target)];
        assert!(place.is_none(), "target {target} is there already");
        *place = Some(unit);
    }

    /// New requests find `target` from now on.
    pub(super) fn show(&mut self, target: u8) {
        if let Some(unit) = self.at(target) {
            unit.hidden = false;
        }
    }

    /// Whether the unit of `target` is suspended.
    pub(super) fn is_suspended(&self, target: u8) -> bool {
        let unit = self.units.get(usize::from(target)).and_then(Option::as_ref);
        unit.is_some_and(|unit| unit.suspended)
    }

    /// Whether nothing of `target` begins though nothing is with its device, and nobody knows for how long: it is
    /// suspended, or others have all of its device's queue.
    pub(super) fn stands_still(&self, target: u8) -> bool {
        let unit = self.units.get(usize::from(target)).and_then(Option::as_ref);
        unit.is_some_and(|unit| unit.suspended || unit.again != 0)
    }

    /// Whether the unit of `target` is being removed, or not yet in use.
    pub(super) fn is_hidden(&self, target: u8) -> bool {
        let unit = self.units.get(usize::from(target)).and_then(Option::as_ref);
        unit.is_none_or(|unit| unit.hidden)
    }

    /// New requests no longer find `target`.
    pub(super) fn leave(&mut self, target: u8) {
        if let Some(unit) = self.at(target) {
            unit.hidden = true;
        }
    }

    /// Takes the unit of `target` out; nothing is in flight on it.
    pub(super) fn remove(&mut self, target: u8) -> Option<Unit> {
        let unit = self.units[usize::from(target)].take();
        let idle = |u: &Unit| u.in_flight.requests == 0 && u.waiting.is_empty();
        assert!(unit.as_ref().is_none_or(idle), "target {target} is in use");
        unit
    }

    /// Answers the REPORT LUNS well-known logical unit: it lists LUN 0 of every target.
    #[cold]
    pub(super) fn well_known(&self, cdb: &[u8; CDB_LEN], data_in: &Sg) -> Outcome {
        let there = |(_, unit): &(usize, &Option<Unit>)| unit.as_ref().is_some_and(|u| !u.hidden);
        let luns = self.units.iter().enumerate().filter(there);
        let luns = luns.map(|(target, _)| LunAddress::flat(target as u8, 0));
        scsi::report_luns_unit(cdb, data_in, luns)
    }
}
