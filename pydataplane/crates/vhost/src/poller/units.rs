//! The logical units of a session as one reactor has them.

use std::sync::Arc;

use guestmem::Sg;
use scsi::{CDB_LEN, Lun, Outcome};

use crate::defs::{LunAddress, MAX_TARGETS};
use crate::stats::LunCounters;

/// LUN 0 of one target on one reactor.
pub(crate) struct Unit {
    pub(super) lun: Lun,
    pub(super) counters: Arc<LunCounters>,
    /// Requests that wait for the device.
    in_flight: u32,
    /// Not yet to be found by new requests, or no longer.
    hidden: bool,
}

impl Unit {
    /// Hidden until [`Units::show`].
    pub(crate) fn new(lun: Lun, counters: Arc<LunCounters>) -> Self {
        Unit { lun, counters, in_flight: 0, hidden: true }
    }
}

/// All targets, by number, and which of them have requests in flight.
pub(super) struct Units {
    units: Box<[Option<Unit>]>,
    /// Targets with requests in flight, in no order; capacity for all.
    active: Vec<u8>,
}

impl Units {
    pub(super) fn new() -> Self {
        Units {
            units: (0..MAX_TARGETS).map(|_| None).collect(),
            active: Vec::with_capacity(MAX_TARGETS),
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

    #[inline]
    pub(super) fn any_active(&self) -> bool {
        !self.active.is_empty()
    }

    /// The `nth` target with requests in flight.
    #[inline]
    pub(super) fn active(&self, nth: usize) -> Option<u8> {
        self.active.get(nth).copied()
    }

    /// A request of `target` waits for the device.
    #[inline]
    pub(super) fn started(&mut self, target: u8) {
        if let Some(unit) = self.at(target) {
            unit.in_flight += 1;
            if unit.in_flight == 1 {
                self.active.push(target);
            }
        }
    }

    /// A request of `target` that waited has ended.
    #[inline]
    pub(super) fn ended(&mut self, target: u8) {
        if let Some(unit) = self.at(target) {
            unit.in_flight -= 1;
            if unit.in_flight == 0
                && let Some(nth) = self.active.iter().position(|t| *t == target)
            {
                self.active.swap_remove(nth);
            }
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

    /// New requests no longer find `target`.
    pub(super) fn leave(&mut self, target: u8) {
        if let Some(unit) = self.at(target) {
            unit.hidden = true;
        }
    }

    /// Takes the unit of `target` out; nothing is in flight on it.
    pub(super) fn remove(&mut self, target: u8) -> Option<Unit> {
        let unit = self.units[usize::from(target)].take();
        assert!(unit.as_ref().is_none_or(|u| u.in_flight == 0), "target {target} is in use");
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
