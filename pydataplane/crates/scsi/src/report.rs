//! Commands that report: capacity, sense, LUNs, operation codes.

use crate::medium::NOT_PRESENT;
use crate::opcode::{Cdb, Command, Entry, TABLE, entries};
use crate::protect::FIELD;
use crate::reply::{Reply, send};
use crate::response::Fail;
use crate::sense::{Code, Key, Sense};
use crate::shared::LunShared;
use bdev::{Channel, ProtectionType};
use guestmem::Sg;
use std::time::SystemTime;

/// READ CAPACITY(10) (SBC-3 5.15): FFFFFFFFh where only READ CAPACITY(16) can tell.
pub(crate) fn capacity10(unit: &LunShared, data_in: &Sg) -> Result<u32, Fail> {
    let last = u32::try_from(last_block(unit)?).unwrap_or(u32::MAX);
    let mut data = [0u8; 8];
    data[..4].copy_from_slice(&last.to_be_bytes());
    data[4..].copy_from_slice(&unit.block_size.to_be_bytes());
    send(data_in, data.len(), &data)
}

/// READ CAPACITY(16) (SBC-3 5.16).
pub(crate) fn capacity16(unit: &LunShared, cdb: &Cdb, data_in: &Sg) -> Result<u32, Fail> {
    let mut data = [0u8; 32];
    data[..8].copy_from_slice(&last_block(unit)?.to_be_bytes());
    data[8..12].copy_from_slice(&unit.block_size.to_be_bytes());
    // P_TYPE, PROT_EN. A tuple is of a whole block: P_I_EXPONENT 0.
    data[12] = match unit.protection {
        None => 0,
        Some(ProtectionType::Type1) => 0x01,
        Some(ProtectionType::Type3) => 0b010 << 1 | 0x01,
    };
    data[13] = unit.physical_exponent;
    if unit.features.unmap {
        data[14] = 0x80; // LBPME: SBC-3 4.7.3 allows UNMAP only with it
        if unit.features.unmap_zeroes {
            data[14] |= 0x40; // LBPRZ
        }
    }
    send(data_in, cdb.be32(10) as usize, &data)
}

/// Address of the last block. A device of no blocks has no medium.
fn last_block(unit: &LunShared) -> Result<u64, Fail> {
    unit.num_blocks().checked_sub(1).ok_or(Fail::Check(NOT_PRESENT))
}

/// REQUEST SENSE (SPC-4 6.39): `sense` as parameter data, in the format that the DESC bit asks for.
pub(crate) fn request_sense(sense: Option<Sense>, cdb: &Cdb, data_in: &Sg) -> Result<u32, Fail> {
    let sense = sense.unwrap_or(Sense::new(Key::NoSense, Code::NO_ADDITIONAL_SENSE));
    let allocation = usize::from(cdb.byte(4));
    if cdb.bit(1, 0) {
        send(data_in, allocation, &sense.descriptor())
    } else {
        send(data_in, allocation, &sense.fixed())
    }
}

/// REPORT LUNS (SPC-4 6.33): each target has LUN 0 and nothing else.
pub(crate) fn report_luns(cdb: &Cdb, data_in: &Sg) -> Result<u32, Fail> {
    /// SELECT REPORT: logical units but well known ones; well known ones; both.
    const UNITS: u8 = 0x00;
    const WELL_KNOWN: u8 = 0x01;
    const BOTH: u8 = 0x02;
    let mut data = [0u8; 16];
    let length = match cdb.byte(2) {
        UNITS | BOTH => {
            data[3] = 8;
            16
        }
        WELL_KNOWN => 8,
        _ => return Err(Sense::invalid_cdb(2, None).into()),
    };
    send(data_in, cdb.be32(6) as usize, &data[..length])
}

/// Descriptors of one GET LBA STATUS at most, and clusters that one of them looks at: bounds the time.
const STATUS_DESCRIPTORS: usize = 32;

/// GET LBA STATUS (SBC-3 5.4): which blocks from an address on have room of their own, in runs.
pub(crate) fn lba_status(
    unit: &LunShared,
    channel: &mut dyn Channel,
    cdb: &Cdb,
    data_in: &Sg,
) -> Result<u32, Fail> {
    const MAPPED: u8 = 0;
    const DEALLOCATED: u8 = 1;
    const HEADER: usize = 8;
    const DESCRIPTOR: usize = 16;
    let (mut lba, end) = (cdb.be64(2), unit.num_blocks());
    if lba >= end {
        return Err(Sense::illegal(Code::LBA_OUT_OF_RANGE).into());
    }
    let allocation = cdb.be32(10) as usize;
    let most = (allocation.saturating_sub(HEADER) / DESCRIPTOR).clamp(1, STATUS_DESCRIPTORS);
    let mut data = [0u8; HEADER + STATUS_DESCRIPTORS * DESCRIPTOR];
    let mut length = HEADER;
    while lba < end && length < HEADER + most * DESCRIPTOR {
        let left = (end - lba).min(u32::MAX.into());
        let run = channel.sparse_run(lba << unit.bdev_shift, left << unit.bdev_shift);
        // A block of which a part is there is mapped.
        let (mapped, blocks) = match run.blocks >> unit.bdev_shift {
            0 => (true, 1),
            blocks => (!run.hole, blocks),
        };
        let descriptor = &mut data[length..length + DESCRIPTOR];
        descriptor[..8].copy_from_slice(&lba.to_be_bytes());
        descriptor[8..12].copy_from_slice(&(blocks as u32).to_be_bytes());
        descriptor[12] = if mapped { MAPPED } else { DEALLOCATED };
        (lba, length) = (lba + blocks, length + DESCRIPTOR);
    }
    data[..4].copy_from_slice(&((length - 4) as u32).to_be_bytes());
    send(data_in, allocation, &data[..length])
}

/// READ DEFECT DATA(10) (SBC-3 5.17): both lists are there, and empty.
pub(crate) fn defects10(cdb: &Cdb, data_in: &Sg) -> Result<u32, Fail> {
    send(data_in, usize::from(cdb.be16(7)), &[0, cdb.byte(2) & 0x1F, 0, 0])
}

/// READ DEFECT DATA(12) (SBC-3 5.18).
pub(crate) fn defects12(cdb: &Cdb, data_in: &Sg) -> Result<u32, Fail> {
    send(data_in, cdb.be32(6) as usize, &[0, cdb.byte(1) & 0x1F, 0, 0, 0, 0, 0, 0])
}

/// REPORT SUPPORTED TASK MANAGEMENT FUNCTIONS (SPC-4 6.36): those of virtio 1.2 5.6.6.2.
pub(crate) fn task_management(cdb: &Cdb, data_in: &Sg) -> Result<u32, Fail> {
    // ABORT TASK, ABORT TASK SET, CLEAR TASK SET, LOGICAL UNIT RESET, QUERY TASK; not CLEAR ACA.
    const FIRST: u8 = 0x80 | 0x40 | 0x10 | 0x08 | 0x04;
    // QUERY TASK SET, I_T NEXUS RESET; not QUERY ASYNCHRONOUS EVENT, which is not virtio's.
    const SECOND: u8 = 0x02 | 0x01;
    let extended = cdb.bit(2, 7);
    let mut data = [0u8; 16];
    (data[0], data[1]) = (FIRST, SECOND);
    data[3] = if extended { 12 } else { 0 };
    send(data_in, cdb.be32(6) as usize, &data[..if extended { 16 } else { 4 }])
}

/// REPORT TIMESTAMP (SPC-4 6.38): milliseconds since the epoch, of the host's clock.
pub(crate) fn timestamp(cdb: &Cdb, data_in: &Sg) -> Result<u32, Fail> {
    /// TIMESTAMP ORIGIN: set by other means than SET TIMESTAMP.
    const HOST: u8 = 0b011;
    let now = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).unwrap_or_default();
    let ms = u64::try_from(now.as_millis()).unwrap_or(u64::MAX).to_be_bytes();
    let mut data = [0u8; 12];
    data[1] = 10;
    data[2] = HOST;
    data[4..10].copy_from_slice(&ms[2..]);
    send(data_in, cdb.be32(6) as usize, &data)
}

/// REPORT SUPPORTED OPERATION CODES (SPC-4 6.35).
pub(crate) fn opcodes(unit: &LunShared, cdb: &Cdb, data_in: &Sg) -> Result<u32, Fail> {
    let timeouts = cdb.bit(2, 7);
    let wanted = (cdb.byte(3), cdb.be16(4));
    let mut reply = Reply::new(data_in, cdb.be32(6) as usize);
    let found = match cdb.byte(2) & 0x07 {
        0 => {
            all(unit, timeouts, &mut reply);
            return reply.end();
        }
        1 => match known(unit, wanted.0).next() {
            Some(e) if e.action.is_some() => return Err(Sense::invalid_cdb(2, Some(2)).into()),
            found => found,
        },
        2 => match known(unit, wanted.0).next() {
            Some(e) if e.action.is_none() => return Err(Sense::invalid_cdb(2, Some(2)).into()),
            _ => with_action(unit, wanted),
        },
        3 => with_action(unit, wanted),
        _ => return Err(Sense::invalid_cdb(2, Some(2)).into()),
    };
    one(unit, found, timeouts, &mut reply);
    reply.end()
}

/// The supported entries of an operation code.
fn known(unit: &LunShared, opcode: u8) -> impl Iterator<Item = &'static Entry> {
    entries(opcode).filter(move |e| e.command.supported(&unit.abilities))
}

fn with_action(unit: &LunShared, (opcode, action): (u8, u16)) -> Option<&'static Entry> {
    known(unit, opcode).find(|e| u16::from(e.action.unwrap_or(0)) == action)
}

/// One command descriptor for each command (SPC-4 6.35.2).
fn all(unit: &LunShared, timeouts: bool, reply: &mut Reply) {
    let supported = || TABLE.iter().filter(|e| e.command.supported(&unit.abilities));
    let each = if timeouts { 8 + TIMEOUTS.len() } else { 8 };
    reply.put(&((supported().count() * each) as u32).to_be_bytes());
    for entry in supported() {
        let flags = (u8::from(timeouts) << 1) | u8::from(entry.action.is_some());
        let action = entry.action.unwrap_or(0);
        reply.put(&[entry.opcode, 0, 0, action, 0, flags, 0, entry.length]);
        if timeouts {
            reply.put(&TIMEOUTS);
        }
    }
}

/// The one command format (SPC-4 6.35.3).
fn one(unit: &LunShared, entry: Option<&Entry>, timeouts: bool, reply: &mut Reply) {
    const UNSUPPORTED: u8 = 0b001;
    const SUPPORTED: u8 = 0b011;
    let Some(entry) = entry else {
        reply.put(&[0, UNSUPPORTED, 0, 0]);
        return;
    };
    reply.put(&[0, (u8::from(timeouts) << 7) | SUPPORTED, 0, entry.length]);
    let mut usage = entry.usage_data();
    if unit.abilities.protection && entry.command.has_field() {
        usage[1] |= FIELD;
    }
    if entry.command == Command::StartStopUnit && !unit.removable {
        usage[4] &= !0x02; // LOEJ
    }
    reply.put(&usage[..usize::from(entry.length)]);
    if timeouts {
        reply.put(&TIMEOUTS);
    }
}

/// A command timeouts descriptor that states none (SPC-4 6.35.4).
const TIMEOUTS: [u8; 12] = [0, 10, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0];
