//! Protection information (SBC-4 4.22): what the field of a CDB asks for, and the commands that have one.

use crate::block::{Extent, PlanContext, check_writable, fill_with, write_durably};
use crate::job::{Compare, Job, Kind};
use crate::opcode::{Cdb, Command};
use crate::response::Fail;
use crate::sense::{Field, Sense, of_io_error};
use crate::shared::MAX_WRITE_SAME_BLOCKS;
use crate::task::Task;
use bdev::{AppTags, Checks, Op, Protected, TUPLE_LEN, Tuples};
use protection::Tuple;

/// Where the field is: bits 7 to 5 of byte 1 (RDPROTECT, WRPROTECT, VRPROTECT).
pub(crate) const FIELD: u8 = 0xE0;

/// What a command with the field asks for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Protect {
    pub(crate) checks: Checks,
    /// The transport has the tuples in a list of their own; else each lies behind its block.
    pub(crate) apart: bool,
}

impl Protect {
    /// The field of the CDB, which is not 0 (SBC-4 5.12, table of RDPROTECT; the others are like it).
    fn parse(cdb: &Cdb, apart: bool) -> Result<Protect, Sense> {
        let (guard, reference) = match cdb.byte(1) >> 5 {
            0b001 | 0b101 => (true, true),
            0b010 => (false, true),
            0b011 => (false, false),
            0b100 => (true, false),
            _ => return Err(Sense::invalid_cdb(1, Some(7))),
        };
        Ok(Protect { checks: Checks { guard, reference, app_tag: None }, apart })
    }

    /// The application tags of blocks as they are checked: with each value of the field where reference tags are.
    pub(crate) fn checked(checks: Checks, tags: AppTags) -> AppTags {
        if checks.reference { tags } else { AppTags::NONE }
    }

    /// What a step of `task` is for the bdev, whose blocks are to have those application tags.
    pub(crate) fn of(self, op: Op, task: &Task, tags: AppTags) -> Protected {
        let list = if op == Op::Read { task.tuples_in } else { task.tuples_out };
        let tuples = if self.apart { Tuples::Apart(list, 0) } else { Tuples::Behind };
        Protected::new(tuples, self.checks).tagged(Protect::checked(self.checks, tags))
    }

    /// The same of a step that only checks.
    pub(crate) fn of_checks(checks: Checks, tags: AppTags) -> Protected {
        Protected::new(Tuples::None, checks).tagged(Protect::checked(checks, tags))
    }

    /// Bytes of a block in the list of the data.
    pub(crate) fn block(self, block_size: u32) -> u32 {
        block_size + if self.apart { 0 } else { TUPLE_LEN as u32 }
    }
}

impl Command {
    /// Whether it takes the field on a unit with protection information.
    pub(crate) fn has_field(self) -> bool {
        use Command as C;
        matches!(self, C::Read10 | C::Read12 | C::Read16 | C::Write10 | C::Write12 | C::Write16)
            || matches!(self, C::WriteAndVerify10 | C::WriteAndVerify12 | C::WriteAndVerify16)
            || matches!(self, C::Verify10 | C::Verify12 | C::Verify16)
            || matches!(self, C::WriteSame10 | C::WriteSame16)
    }
}

/// A command whose field is not 0.
pub(crate) fn plan(cx: &mut PlanContext, command: Command, task: &Task) -> Result<Job, Fail> {
    use Command as C;
    let cdb = &task.cdb;
    let at = match command {
        C::Read10 | C::Write10 | C::WriteAndVerify10 | C::Verify10 | C::WriteSame10 => {
            Extent::of10(cdb)
        }
        C::Read12 | C::Write12 | C::WriteAndVerify12 | C::Verify12 => Extent::of12(cdb),
        _ => Extent::of16(cdb),
    };
    let fua = cdb.bit(1, 3);
    match command {
        C::Read10 | C::Read12 | C::Read16 => read(cx, at, fua, task),
        C::Write10 | C::Write12 | C::Write16 => write(cx, at, fua, task),
        C::WriteAndVerify10 | C::WriteAndVerify12 | C::WriteAndVerify16 => {
            write_and_verify(cx, at, task)
        }
        C::WriteSame10 => write_same(cx, at, false, task),
        C::WriteSame16 => write_same(cx, at, cdb.bit(1, 0), task),
        _ => verify(cx, at, cdb),
    }
}

/// READ: blocks and tuples go to the initiator.
fn read(cx: &mut PlanContext, at: Extent, fua: bool, task: &Task) -> Result<Job, Fail> {
    let protect = Protect::parse(&task.cdb, !task.tuples_in.is_empty())?;
    at.check(cx.unit, cx.max_transfer)?;
    check_lists(cx, at, protect, (task.data_in.len(), task.tuples_in.len()))?;
    let kind = Kind::Protected(Op::Read, protect);
    let mut job = Job { kind, lba: at.lba, left: at.blocks, ..Job::IDLE };
    job.flush_before = fua && !cx.unit.read_only && at.blocks > 0;
    Ok(job)
}

/// WRITE: blocks and tuples come from the initiator.
fn write(cx: &mut PlanContext, at: Extent, fua: bool, task: &Task) -> Result<Job, Fail> {
    let protect = Protect::parse(&task.cdb, !task.tuples_out.is_empty())?;
    check_writable(cx.unit)?;
    at.check(cx.unit, cx.max_transfer)?;
    check_lists(cx, at, protect, (task.data_out.len(), task.tuples_out.len()))?;
    let kind = Kind::Protected(Op::Write, protect);
    let mut job = Job { kind, lba: at.lba, left: at.blocks, ..Job::IDLE };
    if at.blocks > 0 {
        write_durably(cx.unit, &mut job, fua);
    }
    Ok(job)
}

/// The lists have what the command takes, or more.
fn check_lists(
    cx: &PlanContext,
    at: Extent,
    protect: Protect,
    (data, tuples): (usize, usize),
) -> Result<(), Fail> {
    let needed = at.blocks * u64::from(protect.block(cx.unit.block_size));
    let of_tuples = if protect.apart { at.blocks * TUPLE_LEN as u64 } else { 0 };
    match (data as u64) < needed || (tuples as u64) < of_tuples {
        true => Err(Fail::Overrun),
        false => Ok(()),
    }
}

/// WRITE AND VERIFY: what is on the medium is read and checked as what came; it is not compared with it.
fn write_and_verify(cx: &mut PlanContext, at: Extent, task: &Task) -> Result<Job, Fail> {
    if task.cdb.bit(1, 1) {
        return Err(Sense::invalid_cdb(1, Some(1)).into()); // BYTCHK
    }
    let mut job = write(cx, at, false, task)?;
    if at.blocks > 0 {
        cx.take_bounce(&mut job)?;
        job.verify = Some((at.blocks, Compare::Nothing));
        (job.fua, job.flush_after) = (false, true);
    }
    Ok(job)
}

/// WRITE SAME (SBC-4 5.54): one block and its tuple, which is that of each; the reference tag counts the
/// blocks with type 1. Where application tags are checked each block gets that of its range, if any, as one tag cannot
/// be right in several. They are written, also with UNMAP.
fn write_same(cx: &mut PlanContext, at: Extent, no_data: bool, task: &Task) -> Result<Job, Fail> {
    let unit = cx.unit;
    let protect = Protect::parse(&task.cdb, !task.tuples_out.is_empty())?;
    let kind = unit.protection.ok_or(Sense::invalid_cdb(1, Some(7)))?;
    if no_data {
        return Err(Sense::invalid_cdb(1, Some(0)).into()); // NDOB
    }
    check_writable(unit)?;
    if at.blocks == 0 {
        return Err(Sense::invalid_cdb(at.length_at, None).into()); // WSNZ
    }
    at.check(unit, MAX_WRITE_SAME_BLOCKS)?;
    let (block, given) = (unit.block_size as usize, protect.block(unit.block_size));
    let of_tuples = if protect.apart { TUPLE_LEN } else { 0 };
    if task.data_out.len() != given as usize || task.tuples_out.len() != of_tuples {
        return Err(Sense::invalid_cdb(at.length_at, None).into());
    }
    // All of the initiator's is copied, then looked at.
    let (mut data, mut tuple) = ([0u8; 4096], [0u8; TUPLE_LEN]);
    let data = &mut data[..block];
    task.data_out.copy_to_slice(0, data);
    match protect.apart {
        true => task.tuples_out.copy_to_slice(0, &mut tuple),
        false => task.data_out.copy_to_slice(block, &mut tuple),
    };
    let tuple = Tuple::from_bytes(tuple);
    let tags = Protect::checked(protect.checks, unit.tags_of(at.lba, 1));
    let checks = Checks { app_tag: tags.of(0), ..protect.checks };
    tuple.check(kind, checks, at.lba, data).map_err(|mismatch| Sense {
        field: Some(Field::Block(at.lba)),
        ..of_io_error(mismatch.into())
    })?;
    let like = Kind::FillLike(tuple.like(kind, at.lba).to_bytes(), protect.checks);
    let mut job = Job { kind: like, lba: at.lba, left: at.blocks, moved: given, ..Job::IDLE };
    job.flush_after = unit.writes_through();
    cx.take_bounce(&mut job)?;
    fill_with(cx, data);
    Ok(job)
}

/// VERIFY: the blocks are read and checked; they are not compared with data of the initiator's.
fn verify(cx: &mut PlanContext, at: Extent, cdb: &Cdb) -> Result<Job, Fail> {
    let protect = Protect::parse(cdb, true)?;
    if cdb.byte(1) & 0x06 != 0 {
        return Err(Sense::invalid_cdb(1, Some(2)).into()); // BYTCHK
    }
    at.check(cx.unit, cx.max_transfer)?;
    let kind = Kind::Checked(protect.checks);
    let mut job = Job { kind, lba: at.lba, left: at.blocks, ..Job::IDLE };
    if at.blocks > 0 {
        cx.take_bounce(&mut job)?;
    }
    Ok(job)
}
