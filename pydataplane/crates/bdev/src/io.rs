//! One I/O: what is asked, how it ends, and the queue pair that takes it.

use std::fmt;

use guestmem::Sg;

use crate::{Features, Geometry, Protected, Run};

/// What an I/O does.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Op {
    /// Fill `sg` from the medium.
    Read,
    /// Write `sg` to the medium.
    Write,
    /// Make every write that completed before durable; `lba`, `blocks` and `sg` are not used.
    Flush,
    /// Deallocate; what was then reads as zeros where [`Features::unmap_zeroes`], and all of it was unless
    /// [`Features::unmap_skips`].
    Unmap,
    /// Make the blocks read as zeros, deallocated or not.
    WriteZeroes,
}

/// One I/O as given to [`Channel::submit`].
#[derive(Clone, Copy, Debug)]
pub struct Io {
    /// What to do.
    pub op: Op,
    /// Force unit access: complete only when the data is durable (only if [`Features::fua`]).
    pub fua: bool,
    /// First block, in blocks of [`Geometry::block_size`].
    pub lba: u64,
    /// Number of blocks.
    pub blocks: u64,
    /// Data of Read and Write: exactly `blocks * block_size` bytes.
    pub sg: Sg,
    /// The submitter's name for this I/O, given back in its [`Completion`]; unique in flight.
    pub tag: u64,
}

/// Why an I/O failed. Every consumer matches it without a wildcard.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum IoError {
    /// Beyond the end of the device.
    #[error("the I/O ends beyond the device")]
    OutOfRange,
    /// The length of the data and the number of blocks disagree, or are not whole blocks.
    #[error("the data is not the length of the blocks")]
    BadLength,
    /// The device does not take writes.
    #[error("the device is read-only")]
    ReadOnly,
    /// A thin device, or the file system under it, has no room left.
    #[error("no space left for the write")]
    NoSpace,
    /// The medium failed to read (errno EIO and the like).
    #[error("the medium could not be read")]
    ReadMedium,
    /// The medium failed to write.
    #[error("the medium could not be written")]
    WriteMedium,
    /// A flush failed, this one or an earlier one ([`crate::FlushLatch`]): acknowledged writes may
    /// not be durable.
    #[error("the medium could not be flushed")]
    Flush,
    /// The operation is not one of this device's.
    #[error("the device has no such operation")]
    Unsupported,
    /// The device went away.
    #[error("the device is gone")]
    Removed,
    /// Given up because of a reset.
    #[error("the I/O was aborted")]
    Aborted,
    /// Out of memory or kernel resources.
    #[error("out of resources")]
    Resources,
    /// The guard of a block's protection information is not that of its data.
    #[error("the data of a block is not what its guard says")]
    Guard,
    /// The application tag of a block's protection information is another one.
    #[error("a block has another application tag")]
    AppTag,
    /// The reference tag of a block's protection information is another block's.
    #[error("a block is another one than its reference tag says")]
    RefTag,
    /// The blocks did not hold what they were to hold before they were written ([`Channel::submit_if`]).
    #[error("the blocks do not hold what was expected")]
    Miscompare,
    /// The device is reserved for another host.
    #[error("the device is reserved for another host")]
    Reserved,
}

/// What [`Channel::submit`] did with the I/O.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[must_use]
pub enum Submit {
    /// It is over; no completion follows.
    Done(Result<(), IoError>),
    /// A [`Completion`] with its tag follows from [`Channel::poll`].
    Pending,
    /// Not taken: too much in flight. Poll, then submit again.
    Full,
}

/// The end of an I/O that was [`Submit::Pending`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Completion {
    /// The tag given with the [`Io`].
    pub tag: u64,
    /// How it ended.
    pub result: Result<(), IoError>,
    /// How long it took from submit to poll, in ticks, so that a layer that passes I/Os on as they
    /// are does not read the clock again; 0 where it was not measured.
    pub ticks: u64,
    /// When it was over, in ticks, for the same reason; 0 where it was not measured.
    pub ended: u64,
}

/// A queue pair on a bdev, owned by the thread that opened it.
pub trait Channel {
    /// Starts an I/O. Never blocks, allocates or locks.
    fn submit(&mut self, io: &Io) -> Submit;
    /// Appends finished I/Os to `done` (never beyond its capacity); returns how many.
    fn poll(&mut self, done: &mut Vec<Completion>) -> u32;
    /// As [`Channel::submit`], with protection information ([`crate::Bdev::protection`]). The lists may be
    /// longer than what the I/O takes.
    fn submit_protected(&mut self, _io: &Io, _with: &Protected) -> Submit {
        Submit::Done(Err(IoError::Unsupported))
    }
    /// As [`Channel::submit`] of a write that is to be done where the blocks hold what `expected` begins with,
    /// and to end as [`IoError::Miscompare`] where they do not. The caller has looked, and nobody in this process
    /// writes to them meanwhile; so only a device that other hosts write to has to look again, in one step
    /// with the write.
    fn submit_if(&mut self, io: &Io, _expected: &Sg) -> Submit {
        self.submit(io)
    }
    /// How many blocks [`Channel::submit_same`] writes at most; 0: it does not.
    fn same_at_once(&self) -> u64 {
        0
    }
    /// As [`Channel::submit`] of a write whose data is that of its list, again and again.
    fn submit_same(&mut self, _io: &Io) -> Submit {
        Submit::Done(Err(IoError::Unsupported))
    }
    /// Which block of the I/O named `tag`, counted from its first one, is the first whose protection
    /// information is what it failed for, once, and soon after it ended.
    fn mismatch(&mut self, _tag: u64) -> Option<u64> {
        None
    }
    /// What begins at block `lba`, of at most `blocks`, which lie on the device: as [`crate::Sparse::run`], for
    /// the channel's thread, which it does not keep. A device that does not tell holds something everywhere.
    fn sparse_run(&mut self, _lba: u64, blocks: u64) -> Run {
        Run { hole: false, blocks }
    }
}

impl Op {
    /// Number of operations.
    pub const COUNT: usize = 5;
    /// All operations, in the order of their discriminants.
    pub const ALL: [Op; Op::COUNT] = [Op::Read, Op::Write, Op::Flush, Op::Unmap, Op::WriteZeroes];

    /// Whether the operation changes the medium.
    #[inline]
    pub fn is_write(self) -> bool {
        matches!(self, Op::Write | Op::Unmap | Op::WriteZeroes)
    }

    /// What I/O ends with that a server has not answered, or with nothing that says more.
    pub fn failed(self) -> IoError {
        match self {
            Op::Read => IoError::ReadMedium,
            Op::Flush => IoError::Flush,
            Op::Write | Op::Unmap | Op::WriteZeroes => IoError::WriteMedium,
        }
    }
}

impl IoError {
    /// Number of kinds.
    pub const COUNT: usize = 16;
    /// All kinds, in the order of their discriminants.
    pub const ALL: [IoError; IoError::COUNT] = [
        IoError::OutOfRange,
        IoError::BadLength,
        IoError::ReadOnly,
        IoError::NoSpace,
        IoError::ReadMedium,
        IoError::WriteMedium,
        IoError::Flush,
        IoError::Unsupported,
        IoError::Removed,
        IoError::Aborted,
        IoError::Resources,
        IoError::Guard,
        IoError::AppTag,
        IoError::RefTag,
        IoError::Miscompare,
        IoError::Reserved,
    ];

    /// Short name for statistics and logs.
    pub fn name(self) -> &'static str {
        match self {
            IoError::OutOfRange => "out_of_range",
            IoError::BadLength => "bad_length",
            IoError::ReadOnly => "read_only",
            IoError::NoSpace => "no_space",
            IoError::ReadMedium => "read_medium",
            IoError::WriteMedium => "write_medium",
            IoError::Flush => "flush",
            IoError::Unsupported => "unsupported",
            IoError::Removed => "removed",
            IoError::Aborted => "aborted",
            IoError::Resources => "resources",
            IoError::Guard => "guard",
            IoError::AppTag => "application_tag",
            IoError::RefTag => "reference_tag",
            IoError::Miscompare => "miscompare",
            IoError::Reserved => "reserved",
        }
    }
}

impl Io {
    /// A flush, named `tag`.
    #[inline]
    pub const fn flush(tag: u64) -> Io {
        Io { op: Op::Flush, fua: false, lba: 0, blocks: 0, sg: Sg::EMPTY, tag }
    }

    /// Whether what it stands for is durable once it has ended well: a flush, or an I/O with FUA.
    #[inline]
    pub fn is_durable(&self) -> bool {
        self.op == Op::Flush || self.fua
    }

    /// Checks the I/O against a device: range, length of the data, read-only, ability. Every
    /// device calls it first, once, against its own size and abilities (a volume's are others than
    /// those of what it lies on, and each may change alone), so the rest of it may take these for
    /// granted.
    #[inline]
    pub fn check(&self, geometry: &Geometry, features: &Features) -> Result<(), IoError> {
        if matches!(self.op, Op::Flush) {
            return Ok(());
        }
        match self.lba.checked_add(self.blocks) {
            Some(end) if end <= geometry.num_blocks => {}
            _ => return Err(IoError::OutOfRange),
        }
        if matches!(self.op, Op::Read | Op::Write) {
            let bytes = self.blocks.checked_mul(u64::from(geometry.block_size));
            if bytes != Some(self.sg.len() as u64) {
                return Err(IoError::BadLength);
            }
        }
        if matches!(self.op, Op::Read) { Ok(()) } else { self.check_change(features) }
    }

    /// As [`Io::check`], of one whose list may be longer than its blocks ([`Channel::submit_protected`]).
    pub fn check_room(&self, geometry: &Geometry, features: &Features) -> Result<(), IoError> {
        match self.check(geometry, features) {
            Err(IoError::BadLength) if self.bytes(geometry.block_size) < self.sg.len() as u64 => {
                self.check_change(features)
            }
            checked => checked,
        }
    }

    /// Whether the device does what this asks for, beside reading.
    #[inline]
    fn check_change(&self, features: &Features) -> Result<(), IoError> {
        match self.op {
            Op::Read | Op::Flush => return Ok(()),
            Op::Unmap if !features.unmap => return Err(IoError::Unsupported),
            Op::WriteZeroes if !features.write_zeroes => return Err(IoError::Unsupported),
            Op::Write | Op::Unmap | Op::WriteZeroes => {}
        }
        if features.read_only {
            return Err(IoError::ReadOnly);
        }
        if self.fua && !features.fua {
            return Err(IoError::Unsupported);
        }
        Ok(())
    }

    /// Bytes that the I/O names: of data, or to unmap or zero.
    #[inline]
    pub fn bytes(&self, block_size: u32) -> u64 {
        match self.op {
            Op::Flush => 0,
            _ => self.blocks.saturating_mul(u64::from(block_size)),
        }
    }
}

impl fmt::Debug for dyn Channel {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Channel")
    }
}
