//! What a command takes: its CDB is decoded and checked, and it is answered from memory or becomes a job.

use super::{Awaited, Lun, MAX_AWAITED, Plan};
use crate::block::{self, Extent, PlanContext};
use crate::job::{Job, Kind};
use crate::medium::StartStop;
use crate::mode::Modes;
use crate::nexus::UnitAttention;
use crate::opcode::{Cdb, Command, Decoded, decode};
use crate::protect::{self, FIELD};
use crate::reservations::{self, Access};
use crate::response::{Fail, Status};
use crate::sense::Sense;
use crate::shared::{Gate, LunShared};
use crate::task::Task;
use crate::{copy, diagnostic, inquiry, log, medium, mode, ports, report, sanitize};
use std::sync::Arc;

impl Lun {
    /// Checks the command and says what it takes.
    #[inline]
    pub(super) fn plan(&mut self, task: &Task) -> Result<Plan, Fail> {
        let (unit, cdb) = (&*self.shared, &task.cdb);
        let decoded = decode(cdb, &unit.abilities);
        if self.nexus.has_attention()
            && !decoded.as_ref().is_ok_and(|d| d.command.ignores_attention())
            && let Some(sense) = self.nexus.take()
        {
            return Err(sense.into());
        }
        let decoded = decoded?;
        if decoded.wrong != 0 {
            return self.plan_protected(task, decoded);
        }
        if unit.has_gates() {
            check_gates(unit, decoded.command, cdb)?;
        }
        let (data_in, data_out) = (&task.data_in, &task.data_out);
        let fua = cdb.bit(1, 3);
        let mut cx = PlanContext {
            unit,
            exclusive: &mut self.exclusive,
            bounce: &self.bounce,
            bounce_free: &mut self.bounce_free,
            max_transfer: self.max_transfer,
        };
        let job = match decoded.command {
            Command::Read6 => block::read(&mut cx, Extent::of6(cdb), false, data_in)?,
            Command::Read10 => block::read(&mut cx, Extent::of10(cdb), fua, data_in)?,
            Command::Read12 => block::read(&mut cx, Extent::of12(cdb), fua, data_in)?,
            Command::Read16 => block::read(&mut cx, Extent::of16(cdb), fua, data_in)?,
            Command::Write6 => block::write(&mut cx, Extent::of6(cdb), false, data_out)?,
            Command::Write10 => block::write(&mut cx, Extent::of10(cdb), fua, data_out)?,
            Command::Write12 => block::write(&mut cx, Extent::of12(cdb), fua, data_out)?,
            Command::Write16 => block::write(&mut cx, Extent::of16(cdb), fua, data_out)?,
            Command::WriteAtomic16 => block::write_atomic(&mut cx, cdb, data_out)?,
            Command::WriteAndVerify10 => {
                block::write_and_verify(&mut cx, Extent::of10(cdb), cdb, data_out)?
            }
            Command::WriteAndVerify12 => {
                block::write_and_verify(&mut cx, Extent::of12(cdb), cdb, data_out)?
            }
            Command::WriteAndVerify16 => {
                block::write_and_verify(&mut cx, Extent::of16(cdb), cdb, data_out)?
            }
            Command::CompareAndWrite => block::compare_and_write(&mut cx, cdb, data_out)?,
            Command::OrWrite16 => block::or_write(&mut cx, Extent::of16(cdb), fua, data_out)?,
            Command::PreFetch10 => block::pre_fetch(unit, Extent::of10(cdb))?,
            Command::PreFetch16 => block::pre_fetch(unit, Extent::of16(cdb))?,
            Command::SynchronizeCache10 => block::synchronize(unit, Extent::of10(cdb))?,
            Command::SynchronizeCache16 => block::synchronize(unit, Extent::of16(cdb))?,
            Command::Verify10 => block::verify(&mut cx, Extent::of10(cdb), cdb, data_out)?,
            Command::Verify12 => block::verify(&mut cx, Extent::of12(cdb), cdb, data_out)?,
            Command::Verify16 => block::verify(&mut cx, Extent::of16(cdb), cdb, data_out)?,
            Command::WriteSame10 => {
                block::write_same(&mut cx, Extent::of10(cdb), cdb, false, data_out)?
            }
            Command::WriteSame16 => {
                block::write_same(&mut cx, Extent::of16(cdb), cdb, cdb.bit(1, 0), data_out)?
            }
            Command::Unmap => block::unmap(unit, cdb, data_out)?,
            Command::StartStopUnit => return self.start_stop(task),
            Command::SendDiagnostic => diagnostic::send(&mut cx, cdb)?,
            Command::PreventAllow => medium::prevent_allow(unit, &self.nexus, cdb)?,
            Command::TestUnitReady => Job::IDLE,
            Command::Inquiry => return inquiry::inquiry(unit, cdb, data_in).map(Plan::Done),
            Command::ModeSense6 => return mode::sense6(unit, cdb, data_in).map(Plan::Done),
            Command::ModeSense10 => return mode::sense10(unit, cdb, data_in).map(Plan::Done),
            Command::ModeSelect6 | Command::ModeSelect10 => {
                return self.mode_select(task, decoded.command == Command::ModeSelect10);
            }
            Command::ReadCapacity10 => {
                self.nexus.note_seen();
                return report::capacity10(unit, data_in).map(Plan::Done);
            }
            Command::ReadCapacity16 => {
                self.nexus.note_seen();
                return report::capacity16(unit, cdb, data_in).map(Plan::Done);
            }
            Command::GetLbaStatus => {
                return report::lba_status(unit, &mut *self.channel, cdb, data_in).map(Plan::Done);
            }
            Command::Reserve6 | Command::Release6 => {
                let release = decoded.command == Command::Release6;
                return unit.volume.reserve_unit(unit, release).map(|()| Plan::Done(0));
            }
            Command::PersistentReserveIn => {
                let (volume, data_in) = (&unit.volume, &task.data_in);
                let can = volume.can_persist();
                let answer = |of: &_| reservations::persistent_reserve_in(of, can, cdb, data_in);
                return volume.look(answer).map(Plan::Done);
            }
            Command::PersistentReserveOut => return self.reserve_out(task),
            Command::SanitizeOverwrite | Command::SanitizeBlockErase | Command::SanitizeExit => {
                return self.sanitize(task, decoded.command);
            }
            Command::FormatUnit => return self.format(task),
            Command::ReadDefectData10 => return report::defects10(cdb, data_in).map(Plan::Done),
            Command::ReadDefectData12 => return report::defects12(cdb, data_in).map(Plan::Done),
            Command::LogSense => return log::sense(unit, cdb, data_in).map(Plan::Done),
            Command::ReportTaskManagement => {
                return report::task_management(cdb, data_in).map(Plan::Done);
            }
            Command::ExtendedCopy1
            | Command::ExtendedCopy4
            | Command::PopulateToken
            | Command::WriteUsingToken => return self.copy(task, decoded.command),
            Command::AbortCopy => return copy::abort(unit, cdb).map(Plan::Done),
            Command::CopyStatus1 => return copy::status1(unit, cdb, data_in).map(Plan::Done),
            Command::CopyFailure1 => return copy::failure1(unit, cdb, data_in).map(Plan::Done),
            Command::CopyStatus4 | Command::TokenInformation => {
                let tokens = decoded.command == Command::TokenInformation;
                return copy::status4(unit, cdb, tokens, data_in).map(Plan::Done);
            }
            Command::CopyParameters => return copy::parameters(unit, cdb, data_in).map(Plan::Done),
            Command::ReportPortGroups => {
                return ports::report_groups(unit, cdb, data_in).map(Plan::Done);
            }
            Command::ReportTimestamp => return report::timestamp(cdb, data_in).map(Plan::Done),
            Command::ReportOpcodes => return report::opcodes(unit, cdb, data_in).map(Plan::Done),
            Command::RequestSense => {
                // A pending attention is reported as data and gone (SPC-4 6.39).
                let pending = self.nexus.take().or_else(|| unit.volume.sanitize.sense());
                let ejected = || unit.is_at(Gate::Ejected).then_some(medium::NOT_PRESENT);
                let pending = pending.or_else(ejected);
                return report::request_sense(pending, cdb, data_in).map(Plan::Done);
            }
            Command::ReportLuns => {
                let sent = report::report_luns(cdb, data_in)?;
                // Whoever read the list knows of its change (SPC-4 6.33).
                self.nexus.clear(UnitAttention::LunsChanged);
                return Ok(Plan::Done(sent));
            }
        };
        Ok(Plan::Work(job))
    }

    /// A command with bits that mean nothing, for which it is refused, unless what is wrong is the field of
    /// protection information, and the unit has some.
    #[cold]
    fn plan_protected(&mut self, task: &Task, decoded: Decoded) -> Result<Plan, Fail> {
        let (unit, cdb) = (&*self.shared, &task.cdb);
        if unit.protection.is_none() || cdb.byte(1) & FIELD == 0 {
            decoded.check()?;
        }
        decoded.check_protected()?;
        if unit.has_gates() {
            check_gates(unit, decoded.command, cdb)?;
        }
        let mut cx = PlanContext {
            unit,
            exclusive: &mut self.exclusive,
            bounce: &self.bounce,
            bounce_free: &mut self.bounce_free,
            max_transfer: self.max_transfer,
        };
        protect::plan(&mut cx, decoded.command, task).map(Plan::Work)
    }

    /// START STOP UNIT (SBC-4 5.27): an eject waits until what was written is on the medium.
    #[cold]
    fn start_stop(&mut self, task: &Task) -> Result<Plan, Fail> {
        match medium::start_stop(&self.shared, &task.cdb)? {
            StartStop::Job(job) => Ok(Plan::Work(job)),
            StartStop::Load => {
                self.shared.load_medium(Some(&self.nexus));
                Ok(Plan::Done(0))
            }
            StartStop::Eject(job) => {
                self.check_can_wait()?;
                self.waits_for(task, Awaited::Eject(Arc::clone(&self.shared)));
                Ok(Plan::Work(job))
            }
        }
    }

    /// PERSISTENT RESERVE OUT (SPC-4 6.16): the change is made, and the task waits until it is saved, and
    /// until nothing of those that it aborts is under way.
    #[cold]
    fn reserve_out(&mut self, task: &Task) -> Result<Plan, Fail> {
        self.check_can_wait()?;
        let volume = &self.shared.volume;
        let order = reservations::parse(&task.cdb, &task.data_out, volume.can_persist())?;
        self.waits_for(task, Awaited::Settling(volume.order(&self.shared, order)?));
        Ok(Plan::Work(Job { kind: Kind::Settle, moved: task.cdb.be32(5), ..Job::IDLE }))
    }

    /// EXTENDED COPY (SPC-4 6.4, 6.5), POPULATE TOKEN and WRITE USING TOKEN (SBC-3 5.8, 5.48): the task waits
    /// until that is done; POPULATE TOKEN with IMMED does not.
    #[cold]
    fn copy(&mut self, task: &Task, command: Command) -> Result<Plan, Fail> {
        self.check_can_wait()?;
        let moved = task.cdb.be32(10);
        let begun = copy::begin(&self.shared, command, &task.cdb, &task.data_out)?;
        let Some(copying) = begun else { return Ok(Plan::Done(moved)) };
        self.waits_for(task, Awaited::Copy(copying));
        Ok(Plan::Work(Job { kind: Kind::Settle, moved, ..Job::IDLE }))
    }

    /// MODE SELECT (SPC-4 6.10, 6.11): it counts at once, and the task waits until that is kept. A cache that is
    /// turned off is flushed (SBC-3 6.5.5).
    #[cold]
    fn mode_select(&mut self, task: &Task, is_long: bool) -> Result<Plan, Fail> {
        const SP: u8 = 0;
        self.check_can_wait()?;
        let (unit, cdb) = (&*self.shared, &task.cdb);
        let save = cdb.bit(1, SP);
        if save && unit.volume.records().is_none() {
            return Err(Sense::invalid_cdb(1, Some(SP)).into());
        }
        let list = mode::List::read(unit, cdb, &task.data_out, is_long)?;
        let Some(list) = list else { return Ok(Plan::Done(0)) };
        let moved = if is_long { u32::from(cdb.be16(7)) } else { cdb.byte(4).into() };
        let change = |modes| list.apply(unit, modes);
        let (before, keeping) = unit.volume.select_modes(&self.nexus, save, change)?;
        let flush_before = !before.no_cache && unit.has_mode(Modes::NO_CACHE);
        self.waits_for(task, Awaited::Modes(keeping));
        Ok(Plan::Work(Job { kind: Kind::Settle, flush_before, moved, ..Job::IDLE }))
    }

    /// SANITIZE (SBC-3 5.22): it begins, and the task waits until that is kept, or with IMMED 0 until it has
    /// ended.
    #[cold]
    fn sanitize(&mut self, task: &Task, command: Command) -> Result<Plan, Fail> {
        self.check_can_wait()?;
        let (unit, cdb) = (&*self.shared, &task.cdb);
        block::check_writable(unit)?;
        let immediate = cdb.bit(1, 7);
        let overwrite = command == Command::SanitizeOverwrite;
        let order = sanitize::parse(cdb, overwrite, &task.data_out, unit.block_size)?;
        let awaited = match command {
            Command::SanitizeExit => unit.volume.exit_sanitize_failure(immediate)?,
            _ => Some(unit.volume.sanitize(order, immediate)?),
        };
        let moved = u32::from(cdb.be16(7));
        let Some(awaited) = awaited else { return Ok(Plan::Done(moved)) };
        self.waits_for(task, Awaited::Sanitize(awaited));
        Ok(Plan::Work(Job { kind: Kind::Settle, moved, ..Job::IDLE }))
    }

    /// FORMAT UNIT (SBC-3 5.3): as [`Lun::sanitize`].
    #[cold]
    fn format(&mut self, task: &Task) -> Result<Plan, Fail> {
        self.check_can_wait()?;
        let (unit, cdb) = (&*self.shared, &task.cdb);
        block::check_writable(unit)?;
        let format = sanitize::parse_format(cdb, &task.data_out, unit.block_size, unit.protection)?;
        let sanitize::Format { order, immediate, length: moved } = format;
        self.waits_for(task, Awaited::Sanitize(unit.volume.sanitize(order, immediate)?));
        Ok(Plan::Work(Job { kind: Kind::Settle, moved, ..Job::IDLE }))
    }

    /// A command can begin that will have to wait; BUSY where it could not, before it has changed anything.
    fn check_can_wait(&self) -> Result<(), Fail> {
        match self.awaited.len() < MAX_AWAITED {
            true => Ok(()),
            false => Err(Fail::Bare(Status::Busy)),
        }
    }

    fn waits_for(&mut self, task: &Task, awaited: Awaited) {
        self.awaited.push((task.tag, awaited));
    }
}

/// Whether the command is kept from the unit by a reservation, as the volume is sanitized, or as its reservations or
/// modes are not known.
#[cold]
pub(super) fn check_gates(unit: &LunShared, command: Command, cdb: &Cdb) -> Result<(), Fail> {
    let access = unit.access();
    if access != Access::Full && !reservations::is_allowed(access, command, cdb) {
        unit.volume.read_again(access);
        return Err(reservations::refused(access));
    }
    if unit.is_at(Gate::Sanitize) {
        unit.volume.sanitize.check(command)?;
    }
    if unit.is_at(Gate::Ejected) {
        medium::check(command)?;
    }
    if unit.is_at(Gate::Modes) {
        unit.volume.check_modes(command)?;
    }
    Ok(())
}
