//! The logical units of a session as one reactor has them.

use std::sync::Arc;

use guestmem::Sg;
use scsi::{CDB_LEN, Lun, Outcome, Response, SENSE_LEN, Status};

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

    /// Answers the REPORT LUNS well-known logical unit (SPC-4 8.2): it lists the units of all
    /// targets, in the addressing of virtio-scsi.
    #[cold]
    pub(super) fn well_known(&self, cdb: &[u8; CDB_LEN], data_in: &Sg) -> Outcome {
        const TEST_UNIT_READY: u8 = 0x00;
        const REQUEST_SENSE: u8 = 0x03;
        const INQUIRY: u8 = 0x12;
        const REPORT_LUNS: u8 = 0xa0;
        let mut data = Vec::new();
        let mut allocation = usize::MAX;
        match cdb[0] {
            TEST_UNIT_READY => {}
            REQUEST_SENSE => {
                allocation = usize::from(cdb[4]);
                data = vec![0x70, 0, 0, 0, 0, 0, 0, 10];
                data.resize(SENSE_LEN, 0);
            }
            // Vital product data pages are not there.
            INQUIRY if cdb[1] & 1 == 0 => {
                allocation = usize::from(u16::from_be_bytes([cdb[3], cdb[4]]));
                // Peripheral device type 1Eh: well known logical unit; version SPC-4.
                data = vec![0x1e, 0, 6, 2, 31, 0, 0, 2];
                data.extend_from_slice(b"virtlun REPORT LUNS     0001");
            }
            REPORT_LUNS => {
                allocation = u32::from_be_bytes([cdb[6], cdb[7], cdb[8], cdb[9]]) as usize;
                let there = self.units.iter().enumerate();
                let there = there.filter(|(_, u)| u.as_ref().is_some_and(|u| !u.hidden));
                let list: Vec<u8> =
                    there.flat_map(|(target, _)| LunAddress::flat(target as u8, 0)).collect();
                data.extend_from_slice(&(list.len() as u32).to_be_bytes());
                data.extend_from_slice(&[0; 4]);
                data.extend_from_slice(&list);
            }
            _ => return Outcome::Done(illegal_request()),
        }
        data.truncate(allocation);
        let transferred = data_in.copy_from_slice(0, &data) as u32;
        let sense = [0; SENSE_LEN];
        Outcome::Done(Response { status: Status::Good, transferred, sense_len: 0, sense })
    }
}

/// CHECK CONDITION, ILLEGAL REQUEST, INVALID COMMAND OPERATION CODE (20h/00h).
fn illegal_request() -> Response {
    let mut sense = [0; SENSE_LEN];
    sense[0] = 0x70;
    sense[2] = 0x05;
    sense[7] = (SENSE_LEN - 8) as u8;
    sense[12] = 0x20;
    let status = Status::CheckCondition;
    Response { status, transferred: 0, sense_len: SENSE_LEN as u8, sense }
}
