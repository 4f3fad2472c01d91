//! Which commands a reservation keeps from a nexus (SPC-4 5.13.1, table 48; SBC-3 4.17, table 13), and which it
//! may send while nobody knows what is reserved (SPC-4 5.13.5.2, 5.13.5.3.2).

use super::{Access, REPLACE_LOST_RESERVATION};
use crate::opcode::{Cdb, Command};
use crate::response::{Fail, Status};
use crate::sense::{Code, Key, Sense};

/// Whether a nexus with `access` may send the command.
pub(crate) fn is_allowed(access: Access, command: Command, cdb: &Cdb) -> bool {
    match (access, needs(command, cdb)) {
        (Access::Unread, _) => is_of_no_reservation(command, cdb),
        (Access::Lost, _) => is_of_no_reservation(command, cdb) || replaces(command, cdb),
        (Access::Full, _) | (_, Needs::Nothing) => true,
        (Access::Reserved, needs) => needs == Needs::NotReserved,
        (Access::Nothing, needs) => matches!(needs, Needs::NotReserved | Needs::NotReserved6),
        (Access::Read, needs) => needs != Needs::All,
    }
}

/// How a command ends that is not allowed.
pub(crate) fn refused(access: Access) -> Fail {
    match access {
        Access::Unread => Sense::new(Key::NotReady, Code::BECOMING_READY).into(),
        Access::Lost => {
            Sense::new(Key::DataProtect, Code::PERSISTENT_RESERVATION_INFORMATION_LOST).into()
        }
        _ => Fail::Bare(Status::ReservationConflict),
    }
}

/// Those of the list in SPC-4 5.13.5.2.
fn is_of_no_reservation(command: Command, cdb: &Cdb) -> bool {
    use Command as C;
    match command {
        C::Inquiry | C::LogSense | C::ReportLuns | C::ReportPortGroups | C::RequestSense => true,
        C::StartStopUnit => cdb.bit(4, 0),
        _ => false,
    }
}

fn replaces(command: Command, cdb: &Cdb) -> bool {
    command == Command::PersistentReserveOut && cdb.byte(1) & 0x1F == REPLACE_LOST_RESERVATION
}

/// What a command needs.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Needs {
    /// It always goes.
    Nothing,
    /// As `NotReserved6`, and it goes beside RESERVE(6) of another, too.
    NotReserved,
    /// It goes whoever holds a persistent reservation.
    NotReserved6,
    /// It reads the medium.
    Read,
    /// It changes something, or is as good as that.
    All,
}

fn needs(command: Command, cdb: &Cdb) -> Needs {
    use Command as C;
    match command {
        C::Inquiry | C::ReportLuns | C::RequestSense => Needs::Nothing,
        // Without effect for who does not hold it.
        C::Release6 => Needs::NotReserved,
        C::TestUnitReady | C::ReadCapacity10 | C::ReadCapacity16 | C::LogSense => {
            Needs::NotReserved6
        }
        C::ReportPortGroups | C::ReportTaskManagement | C::ReportTimestamp => Needs::NotReserved6,
        // They check who asks themselves.
        C::PersistentReserveIn | C::PersistentReserveOut | C::Reserve6 => Needs::NotReserved6,
        C::PreventAllow if !cdb.bit(4, 0) => Needs::NotReserved6,
        C::StartStopUnit if cdb.bit(4, 0) => Needs::NotReserved6,
        C::Read6 | C::Read10 | C::Read12 | C::Read16 => Needs::Read,
        C::Verify10 | C::Verify12 | C::Verify16 | C::PreFetch10 | C::PreFetch16 => Needs::Read,
        C::GetLbaStatus | C::ReadDefectData10 | C::ReadDefectData12 => Needs::Read,
        C::ModeSelect6 | C::ModeSelect10 => Needs::All,
        C::PreventAllow | C::StartStopUnit | C::ModeSense6 | C::ModeSense10 => Needs::All,
        C::ReportOpcodes => Needs::All,
        C::WriteAtomic16 | C::ExtendedCopy1 | C::ExtendedCopy4 => Needs::All,
        C::WriteUsingToken | C::AbortCopy => Needs::All,
        C::PopulateToken | C::CopyParameters => Needs::Read,
        C::CopyStatus1 | C::CopyStatus4 | C::CopyFailure1 | C::TokenInformation => Needs::Read,
        C::Write6 | C::Write10 | C::Write12 | C::Write16 => Needs::All,
        C::WriteAndVerify10 | C::WriteAndVerify12 | C::WriteAndVerify16 => Needs::All,
        C::WriteSame10 | C::WriteSame16 | C::Unmap => Needs::All,
        C::CompareAndWrite | C::OrWrite16 => Needs::All,
        C::SynchronizeCache10 | C::SynchronizeCache16 => Needs::All,
        C::FormatUnit | C::SendDiagnostic => Needs::All,
        C::SanitizeOverwrite | C::SanitizeBlockErase | C::SanitizeExit => Needs::All,
    }
}
