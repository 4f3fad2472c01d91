//! Commands on blocks: each is checked here and becomes a [`Job`] of bdev I/Os.

use crate::job::{Compare, Job, Kind};
use crate::mode::Modes;
use crate::opcode::Cdb;
use crate::response::{Fail, Status};
use crate::sense::{Code, Key, Sense};
use crate::shared::{LunShared, MAX_UNMAP_BYTES, MAX_UNMAP_DESCRIPTORS, MAX_WRITE_SAME_BLOCKS};
use crate::volume::Exclusive;
use bdev::Op;
use guestmem::{Bounce, Sg};

/// Any number of blocks that lie on the medium.
const NO_LIMIT: u64 = u64::MAX;

/// Where a command has its transfer length, for the field pointer.
#[derive(Clone, Copy)]
pub(crate) struct Extent {
    pub(crate) lba: u64,
    pub(crate) blocks: u64,
    /// First byte of the transfer length in the CDB.
    pub(crate) length_at: u16,
}

impl Extent {
    /// READ(6), WRITE(6) (SBC-2 5.7): 0 means 256 blocks.
    #[inline]
    pub(crate) fn of6(cdb: &Cdb) -> Self {
        let blocks = match cdb.byte(4) {
            0 => 256,
            n => u64::from(n),
        };
        Extent { lba: u64::from(cdb.be32(0) & 0x1F_FFFF), blocks, length_at: 4 }
    }

    #[inline]
    pub(crate) fn of10(cdb: &Cdb) -> Self {
        Extent { lba: u64::from(cdb.be32(2)), blocks: u64::from(cdb.be16(7)), length_at: 7 }
    }

    #[inline]
    pub(crate) fn of12(cdb: &Cdb) -> Self {
        Extent { lba: u64::from(cdb.be32(2)), blocks: u64::from(cdb.be32(6)), length_at: 6 }
    }

    #[inline]
    pub(crate) fn of16(cdb: &Cdb) -> Self {
        Extent { lba: cdb.be64(2), blocks: u64::from(cdb.be32(10)), length_at: 10 }
    }

    /// The extent is no longer than `limit` blocks and lies on the medium.
    ///
    /// Each layer checks a range once, against a size of its own: here it is the unit's, as the initiators
    /// know it, in the unit's blocks, before anything is done and also for a command of no blocks, with the
    /// sense that says what is wrong. A volume and the device below it do so in
    /// [`bdev::Io::check`], as their own sizes change by themselves and they have other users.
    #[inline]
    pub(crate) fn check(&self, unit: &LunShared, limit: u64) -> Result<(), Sense> {
        if self.blocks > limit {
            return Err(Sense::invalid_cdb(self.length_at, None));
        }
        match self.lba.checked_add(self.blocks) {
            Some(end) if end <= unit.num_blocks() => Ok(()),
            _ => Err(Sense::illegal(Code::LBA_OUT_OF_RANGE)),
        }
    }
}

/// What planning a command's job takes from the unit and its thread: limits, and the bounce buffer
/// while it is free.
pub(crate) struct PlanContext<'a> {
    pub(crate) unit: &'a LunShared,
    pub(crate) exclusive: &'a mut Exclusive,
    pub(crate) bounce: &'a Bounce,
    pub(crate) bounce_free: &'a mut bool,
    /// `unit.max_transfer_blocks()`.
    pub(crate) max_transfer: u64,
}

impl PlanContext<'_> {
    /// The bounce buffer for `job`; BUSY while another task has it.
    pub(crate) fn take_bounce(&mut self, job: &mut Job) -> Result<(), Fail> {
        if !*self.bounce_free {
            return Err(Fail::Bare(Status::Busy));
        }
        *self.bounce_free = false;
        job.bounce = true;
        Ok(())
    }

    /// As [`PlanContext::take_bounce`], for a job that nothing may come between which changes its blocks; BUSY
    /// while another one is such, or a ROD token is made.
    fn take_alone(&mut self, job: &mut Job) -> Result<(), Fail> {
        let range = self.unit.range(job.lba, job.left);
        if !*self.bounce_free || !self.exclusive.take(range) {
            return Err(Fail::Bare(Status::Busy));
        }
        job.exclusive = true;
        self.take_bounce(job)
    }

    #[inline]
    fn bytes(&self, blocks: u64) -> usize {
        (blocks * u64::from(self.unit.block_size)) as usize
    }
}

#[inline]
pub(crate) fn check_writable(unit: &LunShared) -> Result<(), Sense> {
    match () {
        () if unit.read_only => Err(Sense::new(Key::DataProtect, Code::WRITE_PROTECTED)),
        () if unit.has_mode(Modes::WRITE_PROTECTED) => {
            Err(Sense::new(Key::DataProtect, Code::SOFTWARE_WRITE_PROTECTED))
        }
        () => Ok(()),
    }
}

/// READ (SBC-3 5.11 to 5.13). With FUA the blocks come from the medium, so what a volatile cache
/// holds of them goes there first.
#[inline]
pub(crate) fn read(cx: &mut PlanContext, at: Extent, fua: bool, data_in: &Sg) -> Result<Job, Fail> {
    at.check(cx.unit, cx.max_transfer)?;
    let bytes = cx.bytes(at.blocks);
    let mut job = Job { kind: Kind::Direct(Op::Read), lba: at.lba, left: at.blocks, ..Job::IDLE };
    if data_in.len() != bytes {
        job.kind = Kind::ReadBounced;
        transfer_partly(cx, &mut job, data_in, bytes)?;
    }
    job.flush_before = fua && !cx.unit.read_only && at.blocks > 0;
    Ok(job)
}

/// WRITE (SBC-3 5.33 to 5.35). FUA is the bdev's if it has it, else a flush after the write.
#[inline]
pub(crate) fn write(
    cx: &mut PlanContext,
    at: Extent,
    fua: bool,
    data_out: &Sg,
) -> Result<Job, Fail> {
    check_writable(cx.unit)?;
    at.check(cx.unit, cx.max_transfer)?;
    let bytes = cx.bytes(at.blocks);
    let mut job = Job { kind: Kind::Direct(Op::Write), lba: at.lba, left: at.blocks, ..Job::IDLE };
    if data_out.len() != bytes {
        job.kind = Kind::WriteBounced;
        transfer_partly(cx, &mut job, data_out, bytes)?;
    }
    if at.blocks > 0 {
        write_durably(cx.unit, &mut job, fua);
    }
    Ok(job)
}

/// WRITE ATOMIC(16) (SBC-4 5.48): a write within one physical block, in one I/O of the bdev's.
pub(crate) fn write_atomic(cx: &mut PlanContext, cdb: &Cdb, data_out: &Sg) -> Result<Job, Fail> {
    const LBA_AT: u16 = 2;
    let most = u64::from(cx.unit.atomic_blocks());
    let at = Extent { lba: cdb.be64(2), blocks: u64::from(cdb.be16(12)), length_at: 12 };
    // Beyond the end is told first, whatever the length.
    at.check(cx.unit, NO_LIMIT)?;
    at.check(cx.unit, most)?;
    if at.blocks > 0 && !at.lba.is_multiple_of(most) {
        return Err(Sense::invalid_cdb(LBA_AT, None).into());
    }
    write(cx, at, cdb.bit(1, 3), data_out)
}

/// Has the writes of `job` durable when it ends, where FUA or the unit's cache asks for that.
#[inline]
pub(crate) fn write_durably(unit: &LunShared, job: &mut Job, fua: bool) {
    if fua || unit.writes_through() {
        job.fua = unit.features.fua;
        job.flush_after = !job.fua;
    }
}

/// The buffers are not as long as the transfer: shorter cannot be done, and longer goes through
/// the bounce buffer, because a bdev takes lists of exactly the I/O's length.
#[cold]
fn transfer_partly(
    cx: &mut PlanContext,
    job: &mut Job,
    data: &Sg,
    bytes: usize,
) -> Result<(), Fail> {
    if data.len() < bytes {
        return Err(Fail::Overrun);
    }
    if bytes > 0 { cx.take_bounce(job) } else { Ok(()) }
}

/// WRITE AND VERIFY (SBC-3 5.38 to 5.40): a write, a flush, and then VERIFY of what the medium has.
pub(crate) fn write_and_verify(
    cx: &mut PlanContext,
    at: Extent,
    cdb: &Cdb,
    data_out: &Sg,
) -> Result<Job, Fail> {
    let mut job = write(cx, at, false, data_out)?;
    if at.blocks == 0 {
        return Ok(job);
    }
    if !job.bounce {
        cx.take_bounce(&mut job)?;
    }
    let compare = if cdb.bit(1, 1) { Compare::Data } else { Compare::Nothing };
    job.verify = Some((at.blocks, compare));
    (job.fua, job.flush_after) = (false, true);
    Ok(job)
}

/// Most blocks of a COMPARE AND WRITE (SBC-3 6.6.3, MAXIMUM COMPARE AND WRITE LENGTH): what the bounce
/// buffer holds and the bdev does at once.
pub(crate) fn max_compare_and_write(unit: &LunShared) -> u64 {
    unit.blocks(Bounce::LEN as u64).min(unit.max_transfer_blocks()).min(u8::MAX.into())
}

/// COMPARE AND WRITE (SBC-3 5.2): writes the second half of the data where the medium has the first.
pub(crate) fn compare_and_write(
    cx: &mut PlanContext,
    cdb: &Cdb,
    data_out: &Sg,
) -> Result<Job, Fail> {
    check_writable(cx.unit)?;
    let at = Extent { lba: cdb.be64(2), blocks: u64::from(cdb.byte(13)), length_at: 13 };
    at.check(cx.unit, max_compare_and_write(cx.unit))?;
    let mut job = Job { kind: Kind::CompareThenWrite, lba: at.lba, left: at.blocks, ..Job::IDLE };
    if at.blocks == 0 {
        return Ok(job);
    }
    if data_out.len() < 2 * cx.bytes(at.blocks) {
        return Err(Fail::Overrun);
    }
    cx.take_alone(&mut job)?;
    write_durably(cx.unit, &mut job, cdb.bit(1, 3));
    Ok(job)
}

/// ORWRITE (SBC-3 5.9): the blocks become the OR of what they are and the data. (ORWRITE(32), with its
/// generations, is not there.)
pub(crate) fn or_write(
    cx: &mut PlanContext,
    at: Extent,
    fua: bool,
    data_out: &Sg,
) -> Result<Job, Fail> {
    check_writable(cx.unit)?;
    at.check(cx.unit, cx.max_transfer)?;
    let mut job = Job { kind: Kind::OrRead, lba: at.lba, left: at.blocks, ..Job::IDLE };
    if at.blocks == 0 {
        return Ok(job);
    }
    if data_out.len() < cx.bytes(at.blocks) {
        return Err(Fail::Overrun);
    }
    cx.take_alone(&mut job)?;
    write_durably(cx.unit, &mut job, fua);
    Ok(job)
}

/// PRE-FETCH (SBC-3 5.7, 5.8): there is no cache of ours to fill, so it is GOOD and not CONDITION MET:
/// not all of the blocks were put there.
pub(crate) fn pre_fetch(unit: &LunShared, at: Extent) -> Result<Job, Fail> {
    at.check(unit, NO_LIMIT)?;
    Ok(Job::IDLE)
}

/// SYNCHRONIZE CACHE (SBC-3 5.26, 5.27) of everything, whatever blocks were named. IMMED has no
/// effect: a status before the flush ended could not tell that it failed.
pub(crate) fn synchronize(unit: &LunShared, at: Extent) -> Result<Job, Fail> {
    at.check(unit, NO_LIMIT)?;
    Ok(flush())
}

/// Deallocates or zeroes blocks, for a transport without CDBs.
pub(crate) fn range(unit: &LunShared, at: Extent, op: Op, durable: bool) -> Result<Job, Fail> {
    check_writable(unit)?;
    at.check(unit, NO_LIMIT)?;
    let kind = Kind::Range(op);
    let flush_after = at.blocks > 0 && (durable || unit.characteristics.write_through);
    Ok(Job { kind, lba: at.lba, left: at.blocks, flush_after, ..Job::IDLE })
}

/// A job of one flush.
pub(crate) fn flush() -> Job {
    Job { flush_after: true, ..Job::IDLE }
}

/// VERIFY (SBC-3 5.29 to 5.31): the blocks are read; with BYTCHK they are compared, too.
pub(crate) fn verify(
    cx: &mut PlanContext,
    at: Extent,
    cdb: &Cdb,
    data_out: &Sg,
) -> Result<Job, Fail> {
    let (compare, needed) = match (cdb.byte(1) >> 1) & 0b11 {
        0 => (Compare::Nothing, 0),
        1 => (Compare::Data, at.blocks),
        3 => (Compare::OneBlock, at.blocks.min(1)),
        _ => return Err(Sense::invalid_cdb(1, Some(2)).into()),
    };
    at.check(cx.unit, cx.max_transfer)?;
    if data_out.len() < cx.bytes(needed) {
        return Err(Fail::Overrun);
    }
    let mut job = Job { kind: Kind::Verify(compare), lba: at.lba, left: at.blocks, ..Job::IDLE };
    if at.blocks > 0 {
        cx.take_bounce(&mut job)?;
    }
    if compare == Compare::OneBlock {
        job.moved = cx.bytes(needed) as u32;
    }
    Ok(job)
}

/// WRITE SAME (SBC-3 5.43, 5.44). Zeros become WriteZeroes, or Unmap where the initiator asks for
/// that and unmapped blocks read as zeros; anything else is really written. The data is one block: more or
/// less of it is refused, as it may mean another block size.
pub(crate) fn write_same(
    cx: &mut PlanContext,
    at: Extent,
    cdb: &Cdb,
    no_data_out: bool,
    data_out: &Sg,
) -> Result<Job, Fail> {
    let unit = cx.unit;
    let unmap = cdb.bit(1, 3);
    if unmap && !unit.features.unmap {
        return Err(Sense::invalid_cdb(1, Some(3)).into());
    }
    check_writable(unit)?;
    if at.blocks == 0 {
        return Err(Sense::invalid_cdb(at.length_at, None).into()); // WSNZ
    }
    at.check(unit, MAX_WRITE_SAME_BLOCKS)?;
    let block = unit.block_size as usize;
    let given = if no_data_out { 0 } else { block };
    if !no_data_out && data_out.len() != given {
        return Err(Sense::invalid_cdb(at.length_at, None).into());
    }
    let zero = no_data_out || is_zero(data_out, block);
    let op = match () {
        () if !zero => None,
        () if unmap => unit.features.zeroing(),
        () if unit.features.write_zeroes => Some(Op::WriteZeroes),
        () => None,
    };
    let mut job =
        Job { kind: op.map_or(Kind::Fill, Kind::Range), lba: at.lba, left: at.blocks, ..Job::IDLE };
    job.moved = given as u32;
    job.flush_after = unit.writes_through();
    if op.is_none() {
        cx.take_bounce(&mut job)?;
        fill(cx, if zero { None } else { Some(data_out) });
    }
    Ok(job)
}

/// Whether the first `len` bytes (whole 512-byte sectors) of `sg` are zero.
fn is_zero(sg: &Sg, len: usize) -> bool {
    let mut sector = [0u8; 512];
    (0..len).step_by(sector.len()).all(|at| {
        sg.copy_to_slice(at, &mut sector);
        sector == [0; 512]
    })
}

/// Fills the bounce buffer with copies of the block in `data`, or zeros.
fn fill(cx: &PlanContext, data: Option<&Sg>) {
    let all = cx.bounce.sg(Bounce::LEN).expect("a bounce buffer has its own length");
    let Some(data) = data else {
        all.zero(0, Bounce::LEN);
        return;
    };
    let mut copy = [0u8; 4096];
    let copy = &mut copy[..cx.unit.block_size as usize];
    data.copy_to_slice(0, copy);
    fill_with(cx, copy);
}

/// Fills the bounce buffer with copies of `block`.
pub(crate) fn fill_with(cx: &PlanContext, block: &[u8]) {
    let all = cx.bounce.sg(Bounce::LEN).expect("a bounce buffer has its own length");
    for at in (0..Bounce::LEN).step_by(block.len()) {
        all.copy_from_slice(at, block);
    }
}

/// Bytes before the descriptors of an UNMAP parameter list, and of each descriptor (SBC-3 5.28.2).
const UNMAP_HEADER: usize = 8;
const UNMAP_DESCRIPTOR: usize = 16;

/// UNMAP (SBC-3 5.28). Every descriptor is checked before the first one is acted on; each is
/// fetched again, and its range checked again, when its turn comes.
pub(crate) fn unmap(unit: &LunShared, cdb: &Cdb, data_out: &Sg) -> Result<Job, Fail> {
    check_writable(unit)?;
    let length = usize::from(cdb.be16(7));
    if length == 0 {
        return Ok(Job::IDLE);
    }
    if length < UNMAP_HEADER {
        return Err(Sense::illegal(Code::PARAMETER_LIST_LENGTH_ERROR).into());
    }
    if data_out.len() < length {
        return Err(Fail::Overrun);
    }
    let mut header = [0u8; UNMAP_HEADER];
    data_out.copy_to_slice(0, &mut header);
    let data_length = usize::from(u16::from_be_bytes([header[0], header[1]]));
    let descriptors_length = usize::from(u16::from_be_bytes([header[2], header[3]]));
    if data_length + 2 > length || descriptors_length + UNMAP_HEADER > length {
        return Err(Sense::illegal(Code::PARAMETER_LIST_LENGTH_ERROR).into());
    }
    // A last descriptor that is not whole is ignored.
    let count = (descriptors_length / UNMAP_DESCRIPTOR) as u16;
    if count > MAX_UNMAP_DESCRIPTORS {
        return Err(Sense::invalid_parameter(2).into());
    }
    let mut total = 0;
    for index in 0..count {
        let (_, blocks) = unmap_descriptor(unit, data_out, index)?;
        total += blocks;
        if total > unit.blocks(MAX_UNMAP_BYTES) {
            let at = UNMAP_HEADER + usize::from(index) * UNMAP_DESCRIPTOR + 8;
            return Err(Sense::invalid_parameter(at as u16).into());
        }
    }
    let mut job = Job { kind: Kind::UnmapList, ..Job::IDLE };
    job.count = count;
    job.moved = length as u32;
    job.flush_after = unit.writes_through();
    Ok(job)
}

/// First block and number of blocks of descriptor `index`, which lie on the medium.
pub(crate) fn unmap_descriptor(
    unit: &LunShared,
    data_out: &Sg,
    index: u16,
) -> Result<(u64, u64), Sense> {
    let mut raw = [0u8; UNMAP_DESCRIPTOR];
    data_out.copy_to_slice(UNMAP_HEADER + usize::from(index) * UNMAP_DESCRIPTOR, &mut raw);
    let number = |at: usize, n: usize| {
        raw[at..at + n].iter().fold(0u64, |all, byte| (all << 8) | u64::from(*byte))
    };
    let at = Extent { lba: number(0, 8), blocks: number(8, 4), length_at: 0 };
    at.check(unit, NO_LIMIT)?;
    Ok((at.lba, at.blocks))
}
