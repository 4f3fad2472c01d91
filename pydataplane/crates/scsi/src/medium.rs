//! A removable medium: who prevents its removal, eject and load (SBC-4 4.11, 5.18, 5.27).
//!
//! The medium of a unit is a volume, which stays where it is: an eject makes the unit NOT READY, MEDIUM NOT PRESENT
//! to its initiators until one loads it, its driver starts afresh, or another session begins. It does not outlive
//! the process.

use crate::block::flush;
use crate::job::{Job, Kind};
use crate::nexus::{Nexus, UnitAttention};
use crate::opcode::{Cdb, Command};
use crate::sense::{Code, Key, Sense};
use crate::shared::{Gate, LunShared};
use std::sync::Arc;

/// What commands that need the medium end with while it is ejected, and REQUEST SENSE tells then.
pub(crate) const NOT_PRESENT: Sense = Sense::new(Key::NotReady, Code::MEDIUM_NOT_PRESENT);

/// What START STOP UNIT asks for.
pub(crate) enum StartStop {
    /// Nothing but these I/Os.
    Job(Job),
    /// The medium in, which may be there.
    Load,
    /// The medium out, after these I/Os: then [`eject`].
    Eject(Job),
}

/// START STOP UNIT (SBC-4 5.27): the unit never stops, but a stop promises that the cache was flushed unless
/// NO_FLUSH is set. LOEJ is of removable media: without START it ejects, after a flush, which is refused while
/// anybody prevents it, unless the medium is out already; with START it loads.
pub(crate) fn start_stop(unit: &LunShared, cdb: &Cdb) -> Result<StartStop, Sense> {
    let (start, eject_or_load, no_flush) = (cdb.bit(4, 0), cdb.bit(4, 1), cdb.bit(4, 2));
    if eject_or_load && !unit.removable {
        return Err(Sense::invalid_cdb(4, Some(1)));
    }
    match (eject_or_load, start) {
        (true, true) => Ok(StartStop::Load),
        (true, false) if unit.is_at(Gate::Ejected) => Ok(StartStop::Job(Job::IDLE)),
        (true, false) if unit.removal_prevented() => Err(prevented()),
        (true, false) => {
            let flush_before = !unit.read_only;
            Ok(StartStop::Eject(Job { kind: Kind::Settle, flush_before, ..Job::IDLE }))
        }
        // There is nothing that a flush could be of.
        (false, false) if !no_flush && !unit.is_at(Gate::Ejected) => Ok(StartStop::Job(flush())),
        (false, _) => Ok(StartStop::Job(Job::IDLE)),
    }
}

/// Takes the medium out; refused if anybody has come to prevent it. What prevents it later, on whichever thread,
/// is answered when it is out. Out already, as another has ejected it meanwhile, it stays so: to take it in again is
/// what [`LunShared::load_medium`] does, with a word to all.
pub(crate) fn eject(unit: &LunShared) -> Result<(), Sense> {
    if unit.is_at(Gate::Ejected) {
        return Ok(());
    }
    // First, so that nobody who prevents it already finds the medium out for a moment.
    if unit.removal_prevented() {
        return Err(prevented());
    }
    if unit.shut(Gate::Ejected) && unit.removal_prevented() {
        unit.set_gate(Gate::Ejected, false);
        return Err(prevented());
    }
    Ok(())
}

fn prevented() -> Sense {
    Sense::illegal(Code::MEDIUM_REMOVAL_PREVENTED)
}

/// PREVENT ALLOW MEDIUM REMOVAL (SBC-4 5.18) of one nexus. Without a removable medium there is nothing to prevent.
/// ALLOW flushes (SBC-4 4.11): a unit is only taken away when that has ended. PREVENT is refused once it is decided
/// that the unit goes.
pub(crate) fn prevent_allow(unit: &LunShared, nexus: &Nexus, cdb: &Cdb) -> Result<Job, Sense> {
    if !unit.removable {
        return Ok(Job::IDLE);
    }
    if cdb.bit(4, 0) {
        let refused = Sense::illegal(Code::LOGICAL_UNIT_NOT_SUPPORTED);
        return if nexus.prevent() { Ok(Job::IDLE) } else { Err(refused) };
    }
    nexus.forget_prevention();
    Ok(if unit.read_only || unit.is_at(Gate::Ejected) { Job::IDLE } else { flush() })
}

/// Whether the command is for a unit without its medium (SBC-4 4.11): what tells of the unit, or is of its
/// initiators, is.
///
/// # Errors
/// NOT READY, MEDIUM NOT PRESENT.
pub(crate) fn check(command: Command) -> Result<(), Sense> {
    use Command as C;
    let of_the_unit = matches!(
        command,
        C::Inquiry
            | C::ReportLuns
            | C::RequestSense
            | C::StartStopUnit
            | C::PreventAllow
            | C::ModeSense6
            | C::ModeSense10
            | C::ModeSelect6
            | C::ModeSelect10
            | C::LogSense
            | C::Reserve6
            | C::Release6
            | C::PersistentReserveIn
            | C::PersistentReserveOut
            | C::ReportPortGroups
            | C::ReportOpcodes
            | C::ReportTaskManagement
            | C::ReportTimestamp
            | C::AbortCopy
            | C::CopyStatus1
            | C::CopyStatus4
            | C::CopyParameters
            | C::CopyFailure1
            | C::TokenInformation
    );
    if of_the_unit { Ok(()) } else { Err(NOT_PRESENT) }
}

impl LunShared {
    /// Whether an initiator has ejected the medium, and none has loaded it. Takes a lock: for control threads.
    pub fn is_ejected(&self) -> bool {
        self.is_at(Gate::Ejected) && !self.present().is_empty()
    }

    /// The medium is in, if it was out: told to every session but that one (28h/00h, SAM-5 5.14), which asked for
    /// it. Whoever had the medium in use had prevented that it went, so that what Linux does then with a mounted
    /// disk ([`Nexus`]) does not happen. Takes a lock where it was out.
    pub fn load_medium(&self, by: Option<&Arc<Nexus>>) {
        if !self.is_at(Gate::Ejected) {
            return;
        }
        self.set_gate(Gate::Ejected, false);
        let present = self.present();
        let others = present.iter().filter(|nexus| by.is_none_or(|by| !Arc::ptr_eq(by, nexus)));
        others.for_each(|nexus| nexus.post(UnitAttention::MediumChanged));
    }
}
