//! What a command takes: its CDB is decoded and checked, and it is answered from memory or becomes a job.

use super::{Lun, Plan};
use crate::block::{self, Extent, PlanContext};
use crate::job::{Job, Kind};
use crate::nexus::UnitAttention;
use crate::opcode::{Command, decode};
use crate::reservations::{self, Access};
use crate::response::{Fail, Status};
use crate::task::Task;
use crate::{inquiry, log, mode, report};

impl Lun {
    /// Checks the command and says what it takes.
    #[inline]
    pub(super) fn plan(&mut self, task: &Task) -> Result<Plan, Fail> {
        let (unit, cdb) = (&*self.shared, &task.cdb);
        let decoded = decode(cdb, &unit.features);
        if self.nexus.has_attention()
            && !decoded.as_ref().is_ok_and(|d| d.command.ignores_attention())
            && let Some(sense) = self.nexus.take()
        {
            return Err(sense.into());
        }
        let decoded = decoded?;
        decoded.check(cdb)?;
        let access = unit.access();
        if access != Access::Full && !reservations::is_allowed(access, decoded.command, cdb) {
            return Err(Fail::Bare(Status::ReservationConflict));
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
            Command::StartStopUnit => block::start_stop(unit, cdb)?,
            Command::PreventAllow => block::prevent_allow(unit, &self.nexus, cdb)?,
            Command::TestUnitReady => Job::IDLE,
            Command::Inquiry => return inquiry::inquiry(unit, cdb, data_in).map(Plan::Done),
            Command::ModeSense6 => return mode::sense6(unit, cdb, data_in).map(Plan::Done),
            Command::ModeSense10 => return mode::sense10(unit, cdb, data_in).map(Plan::Done),
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
            Command::ReadDefectData10 => return report::defects10(cdb, data_in).map(Plan::Done),
            Command::ReadDefectData12 => return report::defects12(cdb, data_in).map(Plan::Done),
            Command::LogSense => return log::sense(cdb, data_in).map(Plan::Done),
            Command::ReportTaskManagement => {
                return report::task_management(cdb, data_in).map(Plan::Done);
            }
            Command::ReportTimestamp => return report::timestamp(cdb, data_in).map(Plan::Done),
            Command::ReportOpcodes => return report::opcodes(unit, cdb, data_in).map(Plan::Done),
            Command::RequestSense => {
                // A pending attention is reported as data and gone (SPC-4 6.39).
                let pending = self.nexus.take();
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

    /// PERSISTENT RESERVE OUT (SPC-4 6.16): the change is made, and the task waits until it is saved, and
    /// until nothing of those that it aborts is under way.
    #[cold]
    fn reserve_out(&mut self, task: &Task) -> Result<Plan, Fail> {
        if self.settling.is_some() {
            return Err(Fail::Bare(Status::Busy));
        }
        let volume = &self.shared.volume;
        let order = reservations::parse(&task.cdb, &task.data_out, volume.can_persist())?;
        self.settling = Some(volume.order(&self.shared, order)?);
        Ok(Plan::Work(Job { kind: Kind::Settle, moved: task.cdb.be32(5), ..Job::IDLE }))
    }
}
