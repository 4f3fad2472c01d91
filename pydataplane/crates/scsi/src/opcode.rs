//! The commands: the fields of a CDB, and one table for decoding, reserved bits and REPORT SUPPORTED
//! OPERATION CODES.

use crate::protect::FIELD;
use crate::sense::{Code, Sense};

/// Longest CDB that virtio-scsi carries, in bytes (virtio 1.2 5.6.4, cdb_size default).
pub const CDB_LEN: usize = 32;

/// A CDB with its big-endian fields.
#[derive(Clone, Copy)]
pub(crate) struct Cdb(pub(crate) [u8; CDB_LEN]);

impl Cdb {
    #[inline]
    pub(crate) fn byte(&self, at: usize) -> u8 {
        self.0[at]
    }

    #[inline]
    pub(crate) fn bit(&self, at: usize, bit: u8) -> bool {
        self.0[at] & (1 << bit) != 0
    }

    #[inline]
    pub(crate) fn be16(&self, at: usize) -> u16 {
        u16::from_be_bytes([self.0[at], self.0[at + 1]])
    }

    #[inline]
    pub(crate) fn be32(&self, at: usize) -> u32 {
        u32::from_be_bytes([self.0[at], self.0[at + 1], self.0[at + 2], self.0[at + 3]])
    }

    #[inline]
    pub(crate) fn be64(&self, at: usize) -> u64 {
        u64::from_be_bytes(*self.0[at..].first_chunk().expect("a field lies in the CDB"))
    }
}

/// The commands that the unit knows.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Command {
    TestUnitReady,
    RequestSense,
    FormatUnit,
    Read6,
    Write6,
    Inquiry,
    Reserve6,
    Release6,
    ModeSelect6,
    ModeSense6,
    StartStopUnit,
    SendDiagnostic,
    PreventAllow,
    ReadCapacity10,
    Read10,
    Write10,
    WriteAndVerify10,
    Verify10,
    PreFetch10,
    SynchronizeCache10,
    ReadDefectData10,
    WriteSame10,
    Unmap,
    LogSense,
    ModeSelect10,
    ModeSense10,
    PersistentReserveIn,
    PersistentReserveOut,
    ExtendedCopy1,
    ExtendedCopy4,
    PopulateToken,
    WriteUsingToken,
    AbortCopy,
    CopyStatus1,
    CopyParameters,
    CopyFailure1,
    CopyStatus4,
    TokenInformation,
    Read16,
    CompareAndWrite,
    Write16,
    WriteAtomic16,
    OrWrite16,
    WriteAndVerify16,
    Verify16,
    PreFetch16,
    SynchronizeCache16,
    WriteSame16,
    ReadCapacity16,
    GetLbaStatus,
    ReportLuns,
    ReportPortGroups,
    ReportOpcodes,
    ReportTaskManagement,
    ReportTimestamp,
    Read12,
    Write12,
    WriteAndVerify12,
    Verify12,
    ReadDefectData12,
    SanitizeOverwrite,
    SanitizeBlockErase,
    SanitizeExit,
}

/// Commands that a unit has or has not.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Abilities {
    /// UNMAP.
    pub(crate) unmap: bool,
    /// WRITE ATOMIC: its blocks are not larger than physical ones.
    pub(crate) atomic: bool,
    /// SANITIZE with BLOCK ERASE: it has UNMAP, and tells what it has.
    pub(crate) block_erase: bool,
    /// The field of [`Command::has_field`].
    pub(crate) protection: bool,
}

impl Command {
    /// Whether a unit with these abilities has the command.
    #[inline]
    pub(crate) fn supported(self, abilities: &Abilities) -> bool {
        match self {
            Command::Unmap => abilities.unmap,
            Command::SanitizeBlockErase => abilities.block_erase,
            Command::WriteAtomic16 => abilities.atomic,
            _ => true,
        }
    }

    /// Whether a pending unit attention lets the command through (SAM-5 5.14.1).
    #[inline]
    pub(crate) fn ignores_attention(self) -> bool {
        matches!(self, Command::Inquiry | Command::ReportLuns | Command::RequestSense)
    }
}

/// What a command counts as in statistics.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    /// It gives the initiator blocks.
    Read,
    /// It changes blocks, with data of the initiator: WRITE, WRITE SAME, COMPARE AND WRITE, ORWRITE.
    Write,
    /// SYNCHRONIZE CACHE.
    Flush,
    /// Any other, and those that are refused.
    Other,
}

impl Kind {
    /// Of an operation code.
    #[inline]
    pub fn of(opcode: u8) -> Kind {
        KINDS[usize::from(opcode)]
    }

    const fn of_command(command: Command) -> Kind {
        use Command as C;
        match command {
            C::Read6 | C::Read10 | C::Read12 | C::Read16 => Kind::Read,
            C::Write6 | C::Write10 | C::Write12 | C::Write16 => Kind::Write,
            C::WriteAtomic16 => Kind::Write,
            C::WriteAndVerify10 | C::WriteAndVerify12 | C::WriteAndVerify16 => Kind::Write,
            C::WriteSame10 | C::WriteSame16 | C::CompareAndWrite | C::OrWrite16 => Kind::Write,
            C::SynchronizeCache10 | C::SynchronizeCache16 => Kind::Flush,
            C::TestUnitReady | C::RequestSense | C::Inquiry | C::ModeSense6 | C::ModeSense10 => {
                Kind::Other
            }
            C::ModeSelect6 | C::ModeSelect10 => Kind::Other,
            C::StartStopUnit | C::PreventAllow | C::ReadCapacity10 | C::ReadCapacity16 => {
                Kind::Other
            }
            C::Verify10 | C::Verify12 | C::Verify16 | C::Unmap => Kind::Other,
            C::ReadDefectData10 | C::ReadDefectData12 => Kind::Other,
            C::PreFetch10 | C::PreFetch16 | C::GetLbaStatus | C::LogSense => Kind::Other,
            C::ReportLuns | C::ReportOpcodes | C::ReportPortGroups => Kind::Other,
            C::Reserve6 | C::Release6 | C::FormatUnit | C::SendDiagnostic => Kind::Other,
            C::ExtendedCopy1 | C::ExtendedCopy4 | C::AbortCopy => Kind::Other,
            C::PopulateToken | C::WriteUsingToken => Kind::Other,
            C::CopyStatus1 | C::CopyStatus4 | C::TokenInformation => Kind::Other,
            C::CopyParameters | C::CopyFailure1 => Kind::Other,
            C::PersistentReserveIn | C::PersistentReserveOut => Kind::Other,
            C::ReportTaskManagement | C::ReportTimestamp => Kind::Other,
            C::SanitizeOverwrite | C::SanitizeBlockErase | C::SanitizeExit => Kind::Other,
        }
    }
}

/// One command of the table.
#[derive(Debug)]
pub(crate) struct Entry {
    pub(crate) opcode: u8,
    /// Service action in byte 1 bits 4..0, for the operation codes that have them.
    pub(crate) action: Option<u8>,
    pub(crate) command: Command,
    /// Bytes of the CDB.
    pub(crate) length: u8,
    /// Bits of the CDB that mean something (SPC-4 6.35.3 CDB usage data); a set bit outside is an
    /// invalid field. Byte 0 is all ones here.
    pub(crate) usage: [u8; 16],
}

impl Entry {
    /// The usage map as REPORT SUPPORTED OPERATION CODES shows it: with the operation code and
    /// service action in place.
    pub(crate) fn usage_data(&self) -> [u8; 16] {
        let mut usage = self.usage;
        usage[0] = self.opcode;
        if let Some(action) = self.action {
            usage[1] = (usage[1] & 0xE0) | action;
        }
        usage
    }
}

/// `opcode` with the usage of bytes 1 and on; the control byte's bits (NACA above all) are unused.
const fn entry<const N: usize>(opcode: u8, command: Command, usage: [u8; N]) -> Entry {
    let mut all = [0u8; 16];
    all[0] = 0xFF;
    let mut i = 0;
    while i < N {
        all[i + 1] = usage[i];
        i += 1;
    }
    Entry { opcode, action: None, command, length: N as u8 + 1, usage: all }
}

/// As [`entry`], for an operation code with service actions.
const fn action<const N: usize>(opcode: u8, action: u8, command: Command, usage: [u8; N]) -> Entry {
    let mut e = entry(opcode, command, usage);
    e.action = Some(action);
    e
}

/// The service action; the allocation length.
const RESERVE_IN: [u8; 9] = [0x1F, 0, 0, 0, 0, 0, 0xFF, 0xFF, 0];
/// The service action; scope and type; the parameter list's length.
const RESERVE_OUT: [u8; 9] = [0x1F, 0xFF, 0, 0, 0xFF, 0xFF, 0xFF, 0xFF, 0];

/// IMMED, AUSE, the service action; the parameter list's length.
const SANITIZE: [u8; 9] = [0xBF, 0, 0, 0, 0, 0, 0xFF, 0xFF, 0];

/// In order of operation code. Byte 1 of reads: DPO 10h, FUA 08h (RDPROTECT is for units that have
/// protection information: [`Decoded::check_protected`]). Group numbers are taken and have no effect.
#[rustfmt::skip]
pub(crate) static TABLE: [Entry; TABLE_LEN] = [
    entry(0x00, Command::TestUnitReady,      [0, 0, 0, 0, 0]),
    entry(0x03, Command::RequestSense,       [0x01, 0, 0, 0xFF, 0]),
    // FMTPINFO, LONGLIST, FMTDATA, CMPLST; short block addresses, as no block is defective.
    entry(0x04, Command::FormatUnit,         [0xF8, 0, 0, 0, 0]),
    entry(0x08, Command::Read6,              [0x1F, 0xFF, 0xFF, 0xFF, 0]),
    entry(0x0A, Command::Write6,             [0x1F, 0xFF, 0xFF, 0xFF, 0]),
    entry(0x12, Command::Inquiry,            [0x01, 0xFF, 0xFF, 0xFF, 0]),
    // PF, SP.
    entry(0x15, Command::ModeSelect6,        [0x11, 0, 0, 0xFF, 0]),
    // Of the whole unit, for oneself.
    entry(0x16, Command::Reserve6,           [0, 0, 0, 0, 0]),
    entry(0x17, Command::Release6,           [0, 0, 0, 0, 0]),
    entry(0x1A, Command::ModeSense6,         [0x08, 0xFF, 0xFF, 0xFF, 0]),
    // IMMED; NO_FLUSH, LOEJ where the medium is removable, START. No power conditions.
    entry(0x1B, Command::StartStopUnit,      [0x01, 0, 0, 0x07, 0]),
    // PF, SELFTEST, DEVOFFL, UNITOFFL: the default self-test.
    entry(0x1D, Command::SendDiagnostic,     [0x17, 0, 0, 0, 0]),
    // PREVENT; its values 2 and 3 are obsolete.
    entry(0x1E, Command::PreventAllow,       [0, 0, 0, 0x01, 0]),
    entry(0x25, Command::ReadCapacity10,     [0, 0, 0, 0, 0, 0, 0, 0, 0]),
    entry(0x28, Command::Read10,             [0x18, 0xFF, 0xFF, 0xFF, 0xFF, 0x3F, 0xFF, 0xFF, 0]),
    entry(0x2A, Command::Write10,            [0x18, 0xFF, 0xFF, 0xFF, 0xFF, 0x3F, 0xFF, 0xFF, 0]),
    // DPO, BYTCHK 01b.
    entry(0x2E, Command::WriteAndVerify10,   [0x12, 0xFF, 0xFF, 0xFF, 0xFF, 0x3F, 0xFF, 0xFF, 0]),
    // DPO, BYTCHK.
    entry(0x2F, Command::Verify10,           [0x16, 0xFF, 0xFF, 0xFF, 0xFF, 0x3F, 0xFF, 0xFF, 0]),
    // IMMED.
    entry(0x34, Command::PreFetch10,         [0x02, 0xFF, 0xFF, 0xFF, 0xFF, 0x3F, 0xFF, 0xFF, 0]),
    // SYNC_NV (obsolete: we always go to the medium), IMMED.
    entry(0x35, Command::SynchronizeCache10, [0x06, 0xFF, 0xFF, 0xFF, 0xFF, 0x3F, 0xFF, 0xFF, 0]),
    // REQ_PLIST, REQ_GLIST, format.
    entry(0x37, Command::ReadDefectData10,   [0, 0x1F, 0, 0, 0, 0, 0xFF, 0xFF, 0]),
    // UNMAP; not ANCHOR.
    entry(0x41, Command::WriteSame10,        [0x08, 0xFF, 0xFF, 0xFF, 0xFF, 0x3F, 0xFF, 0xFF, 0]),
    entry(0x42, Command::Unmap,              [0, 0, 0, 0, 0, 0x3F, 0xFF, 0xFF, 0]),
    // IMMED, AUSE; not CRYPTO ERASE, as the keys are not ours.
    action(0x48, 0x01, Command::SanitizeOverwrite,  SANITIZE),
    action(0x48, 0x02, Command::SanitizeBlockErase, SANITIZE),
    action(0x48, 0x1F, Command::SanitizeExit,       SANITIZE),
    // PC and page code, subpage code, parameter pointer; not SP, PPC.
    entry(0x4D, Command::LogSense,           [0, 0xFF, 0xFF, 0, 0xFF, 0xFF, 0xFF, 0xFF, 0]),
    // PF, SP.
    entry(0x55, Command::ModeSelect10,       [0x11, 0, 0, 0, 0, 0, 0xFF, 0xFF, 0]),
    // LLBAA, DBD.
    entry(0x5A, Command::ModeSense10,        [0x18, 0xFF, 0xFF, 0, 0, 0, 0xFF, 0xFF, 0]),
    action(0x5E, 0x00, Command::PersistentReserveIn,  RESERVE_IN),
    action(0x5E, 0x01, Command::PersistentReserveIn,  RESERVE_IN),
    action(0x5E, 0x02, Command::PersistentReserveIn,  RESERVE_IN),
    action(0x5E, 0x03, Command::PersistentReserveIn,  RESERVE_IN),
    action(0x5F, 0x00, Command::PersistentReserveOut, RESERVE_OUT),
    action(0x5F, 0x01, Command::PersistentReserveOut, RESERVE_OUT),
    action(0x5F, 0x02, Command::PersistentReserveOut, RESERVE_OUT),
    action(0x5F, 0x03, Command::PersistentReserveOut, RESERVE_OUT),
    action(0x5F, 0x04, Command::PersistentReserveOut, RESERVE_OUT),
    action(0x5F, 0x05, Command::PersistentReserveOut, RESERVE_OUT),
    action(0x5F, 0x06, Command::PersistentReserveOut, RESERVE_OUT),
    action(0x5F, 0x07, Command::PersistentReserveOut, RESERVE_OUT),
    action(0x5F, 0x08, Command::PersistentReserveOut, RESERVE_OUT),
    action(0x83, 0x00, Command::ExtendedCopy1,
        [0x1F, 0, 0, 0, 0, 0, 0, 0, 0, 0xFF, 0xFF, 0xFF, 0xFF, 0, 0]),
    action(0x83, 0x01, Command::ExtendedCopy4,
        [0x1F, 0, 0, 0, 0, 0, 0, 0, 0, 0xFF, 0xFF, 0xFF, 0xFF, 0, 0]),
    // LIST IDENTIFIER.
    action(0x83, 0x10, Command::PopulateToken,
        [0x1F, 0, 0, 0, 0, 0xFF, 0xFF, 0xFF, 0xFF, 0xFF, 0xFF, 0xFF, 0xFF, 0x3F, 0]),
    action(0x83, 0x11, Command::WriteUsingToken,
        [0x1F, 0, 0, 0, 0, 0xFF, 0xFF, 0xFF, 0xFF, 0xFF, 0xFF, 0xFF, 0xFF, 0x3F, 0]),
    action(0x83, 0x1C, Command::AbortCopy,
        [0x1F, 0xFF, 0xFF, 0xFF, 0xFF, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0]),
    action(0x84, 0x00, Command::CopyStatus1,
        [0x1F, 0xFF, 0, 0, 0, 0, 0, 0, 0, 0xFF, 0xFF, 0xFF, 0xFF, 0, 0]),
    action(0x84, 0x03, Command::CopyParameters,
        [0x1F, 0, 0, 0, 0, 0, 0, 0, 0, 0xFF, 0xFF, 0xFF, 0xFF, 0, 0]),
    action(0x84, 0x04, Command::CopyFailure1,
        [0x1F, 0xFF, 0, 0, 0, 0, 0, 0, 0, 0xFF, 0xFF, 0xFF, 0xFF, 0, 0]),
    action(0x84, 0x05, Command::CopyStatus4,
        [0x1F, 0xFF, 0xFF, 0xFF, 0xFF, 0, 0, 0, 0, 0xFF, 0xFF, 0xFF, 0xFF, 0, 0]),
    action(0x84, 0x07, Command::TokenInformation,
        [0x1F, 0xFF, 0xFF, 0xFF, 0xFF, 0, 0, 0, 0, 0xFF, 0xFF, 0xFF, 0xFF, 0, 0]),
    entry(0x88, Command::Read16,
        [0x18, 0xFF, 0xFF, 0xFF, 0xFF, 0xFF, 0xFF, 0xFF, 0xFF, 0xFF, 0xFF, 0xFF, 0xFF, 0x3F, 0]),
    // DPO, FUA; one byte of NUMBER OF LOGICAL BLOCKS.
    entry(0x89, Command::CompareAndWrite,
        [0x18, 0xFF, 0xFF, 0xFF, 0xFF, 0xFF, 0xFF, 0xFF, 0xFF, 0, 0, 0, 0xFF, 0x3F, 0]),
    entry(0x8A, Command::Write16,
        [0x18, 0xFF, 0xFF, 0xFF, 0xFF, 0xFF, 0xFF, 0xFF, 0xFF, 0xFF, 0xFF, 0xFF, 0xFF, 0x3F, 0]),
    entry(0x8B, Command::OrWrite16,
        [0x18, 0xFF, 0xFF, 0xFF, 0xFF, 0xFF, 0xFF, 0xFF, 0xFF, 0xFF, 0xFF, 0xFF, 0xFF, 0x3F, 0]),
    entry(0x8E, Command::WriteAndVerify16,
        [0x12, 0xFF, 0xFF, 0xFF, 0xFF, 0xFF, 0xFF, 0xFF, 0xFF, 0xFF, 0xFF, 0xFF, 0xFF, 0x3F, 0]),
    entry(0x8F, Command::Verify16,
        [0x16, 0xFF, 0xFF, 0xFF, 0xFF, 0xFF, 0xFF, 0xFF, 0xFF, 0xFF, 0xFF, 0xFF, 0xFF, 0x3F, 0]),
    entry(0x90, Command::PreFetch16,
        [0x02, 0xFF, 0xFF, 0xFF, 0xFF, 0xFF, 0xFF, 0xFF, 0xFF, 0xFF, 0xFF, 0xFF, 0xFF, 0x3F, 0]),
    entry(0x91, Command::SynchronizeCache16,
        [0x06, 0xFF, 0xFF, 0xFF, 0xFF, 0xFF, 0xFF, 0xFF, 0xFF, 0xFF, 0xFF, 0xFF, 0xFF, 0x3F, 0]),
    // UNMAP, NDOB.
    entry(0x93, Command::WriteSame16,
        [0x09, 0xFF, 0xFF, 0xFF, 0xFF, 0xFF, 0xFF, 0xFF, 0xFF, 0xFF, 0xFF, 0xFF, 0xFF, 0x3F, 0]),
    // DPO, FUA; two bytes of TRANSFER LENGTH; no ATOMIC BOUNDARY.
    entry(0x9C, Command::WriteAtomic16,
        [0x18, 0xFF, 0xFF, 0xFF, 0xFF, 0xFF, 0xFF, 0xFF, 0xFF, 0, 0, 0xFF, 0xFF, 0x3F, 0]),
    action(0x9E, 0x10, Command::ReadCapacity16,
        [0x1F, 0, 0, 0, 0, 0, 0, 0, 0, 0xFF, 0xFF, 0xFF, 0xFF, 0, 0]),
    action(0x9E, 0x12, Command::GetLbaStatus,
        [0x1F, 0xFF, 0xFF, 0xFF, 0xFF, 0xFF, 0xFF, 0xFF, 0xFF, 0xFF, 0xFF, 0xFF, 0xFF, 0, 0]),
    entry(0xA0, Command::ReportLuns,         [0, 0xFF, 0, 0, 0, 0xFF, 0xFF, 0xFF, 0xFF, 0, 0]),
    // Formats 000b and 001b.
    action(0xA3, 0x0A, Command::ReportPortGroups,
        [0x3F, 0, 0, 0, 0, 0xFF, 0xFF, 0xFF, 0xFF, 0, 0]),
    action(0xA3, 0x0C, Command::ReportOpcodes,
        [0x1F, 0x87, 0xFF, 0xFF, 0xFF, 0xFF, 0xFF, 0xFF, 0xFF, 0, 0]),
    // REPD.
    action(0xA3, 0x0D, Command::ReportTaskManagement,
        [0x1F, 0x80, 0, 0, 0, 0xFF, 0xFF, 0xFF, 0xFF, 0, 0]),
    action(0xA3, 0x0F, Command::ReportTimestamp,
        [0x1F, 0, 0, 0, 0, 0xFF, 0xFF, 0xFF, 0xFF, 0, 0]),
    entry(0xA8, Command::Read12,
        [0x18, 0xFF, 0xFF, 0xFF, 0xFF, 0xFF, 0xFF, 0xFF, 0xFF, 0x3F, 0]),
    entry(0xAA, Command::Write12,
        [0x18, 0xFF, 0xFF, 0xFF, 0xFF, 0xFF, 0xFF, 0xFF, 0xFF, 0x3F, 0]),
    entry(0xAE, Command::WriteAndVerify12,
        [0x12, 0xFF, 0xFF, 0xFF, 0xFF, 0xFF, 0xFF, 0xFF, 0xFF, 0x3F, 0]),
    entry(0xAF, Command::Verify12,
        [0x16, 0xFF, 0xFF, 0xFF, 0xFF, 0xFF, 0xFF, 0xFF, 0xFF, 0x3F, 0]),
    entry(0xB7, Command::ReadDefectData12,
        [0x1F, 0xFF, 0xFF, 0xFF, 0xFF, 0xFF, 0xFF, 0xFF, 0xFF, 0, 0]),
];

/// Row of the first entry of each operation code, plus one; 0 where there is none.
static ROW: [u8; 256] = {
    let mut rows = [0u8; 256];
    let mut i = TABLE_LEN;
    while i > 0 {
        i -= 1;
        rows[OPCODES[i] as usize] = i as u8 + 1;
    }
    rows
};

/// Bits of each entry's CDB that must be zero, byte 0 lowest.
static REJECT: [u128; TABLE_LEN] = {
    let table = &TABLE;
    let mut reject = [0u128; TABLE_LEN];
    let mut i = 0;
    while i < TABLE_LEN {
        let mut byte = 0;
        while byte < table[i].length as usize {
            reject[i] |= (!table[i].usage[byte] as u128) << (8 * byte);
            byte += 1;
        }
        i += 1;
    }
    reject
};

/// [`Kind`] of each operation code; with service actions, of the first.
static KINDS: [Kind; 256] = {
    let table = &TABLE;
    let mut kinds = [Kind::Other; 256];
    let mut i = TABLE_LEN;
    while i > 0 {
        i -= 1;
        kinds[table[i].opcode as usize] = Kind::of_command(table[i].command);
    }
    kinds
};

const TABLE_LEN: usize = 74;

/// The operation codes of [`TABLE`].
const OPCODES: [u8; TABLE_LEN] = {
    let table = &TABLE;
    let mut opcodes = [0u8; TABLE_LEN];
    let mut i = 0;
    while i < TABLE_LEN {
        opcodes[i] = table[i].opcode;
        i += 1;
    }
    opcodes
};

/// A decoded command.
#[derive(Clone, Copy)]
pub(crate) struct Decoded {
    pub(crate) command: Command,
    /// Bits of the CDB that are set and mean nothing to the command, byte 0 lowest: reserved ones, and
    /// features that the unit does not have. It is refused for them ([`Decoded::check`]), after unit attentions.
    pub(crate) wrong: u128,
}

/// Finds the command; an unknown one is INVALID COMMAND OPERATION CODE, an unknown service action
/// INVALID FIELD IN CDB (SPC-4 4.2.5.2).
#[inline]
pub(crate) fn decode(cdb: &Cdb, abilities: &Abilities) -> Result<Decoded, Sense> {
    let opcode = cdb.byte(0);
    let row = usize::from(ROW[usize::from(opcode)]);
    if row == 0 {
        return Err(Sense::illegal(Code::INVALID_COMMAND_OPERATION_CODE));
    }
    let mut row = row - 1;
    if TABLE[row].action.is_some() {
        let of = |e: &Entry| e.opcode == opcode && e.action == Some(cdb.byte(1) & 0x1F);
        let further = TABLE[row..].iter().position(of).ok_or(Sense::invalid_cdb(1, Some(4)))?;
        row += further;
    }
    let found = &TABLE[row];
    if !found.command.supported(abilities) {
        return Err(match found.action {
            Some(_) => Sense::invalid_cdb(1, Some(4)),
            None => Sense::illegal(Code::INVALID_COMMAND_OPERATION_CODE),
        });
    }
    let low = u64::from_le_bytes(*cdb.0.first_chunk().expect("a CDB has 32 bytes"));
    let high = u64::from_le_bytes(*cdb.0[8..].first_chunk().expect("a CDB has 32 bytes"));
    let wrong = (u128::from(high) << 64 | u128::from(low)) & REJECT[row];
    Ok(Decoded { command: found.command, wrong })
}

impl Decoded {
    /// Refuses bits that mean nothing.
    pub(crate) fn check(self) -> Result<(), Sense> {
        if self.wrong == 0 { Ok(()) } else { Err(first_wrong(self.wrong)) }
    }

    /// As [`Decoded::check`], of a command to a unit with protection information, whose field means something
    /// although the table says no.
    pub(crate) fn check_protected(self) -> Result<(), Sense> {
        let field = if self.command.has_field() { FIELD } else { 0 };
        Decoded { wrong: self.wrong & !(u128::from(field) << 8), ..self }.check()
    }
}

/// The first wrong byte and its left-most wrong bit.
#[cold]
fn first_wrong(wrong: u128) -> Sense {
    let byte = wrong.trailing_zeros() / 8;
    let bits = (wrong >> (8 * byte)) as u8;
    Sense::invalid_cdb(byte as u16, Some(7 - bits.leading_zeros() as u8))
}

/// The entries of an operation code.
pub(crate) fn entries(opcode: u8) -> impl Iterator<Item = &'static Entry> {
    TABLE.iter().filter(move |e| e.opcode == opcode)
}
