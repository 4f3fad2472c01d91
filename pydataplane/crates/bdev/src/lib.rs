//! Block devices.
//!
//! Owns: the [`Bdev`] and [`Channel`] traits, the registry with its claims and events, I/O
//! statistics, and the backends `malloc`, `null` and `file`. Never knows SCSI, vhost or lvols.
//!
//! A bdev is shared and thread-safe; a channel is a queue pair that belongs to one thread, with
//! `submit` and `poll`, and a layer above owns one channel of the layer below.

use guestmem::Sg;
use reactor::IoContext;
use serde_json::Value;
use uuid::Uuid;

/// What an I/O does.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Op {
    /// Fill `sg` from the medium.
    Read,
    /// Write `sg` to the medium.
    Write,
    /// Make every write that completed before durable; `lba`, `blocks` and `sg` are not used.
    Flush,
    /// Deallocate; afterwards the blocks read as zeros where [`Features::unmap_zeroes`].
    Unmap,
    /// Make the blocks read as zeros.
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
    /// A flush failed: earlier acknowledged writes may not be durable.
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
}

/// A queue pair on a bdev, owned by the thread that opened it.
pub trait Channel {
    /// Starts an I/O. Never blocks, allocates or locks.
    fn submit(&mut self, io: &Io) -> Submit;
    /// Appends finished I/Os to `done` (never beyond its capacity); returns how many.
    fn poll(&mut self, done: &mut Vec<Completion>) -> u32;
}

/// Size of a device.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Geometry {
    /// Bytes of a logical block: 512 or 4096.
    pub block_size: u32,
    /// Bytes of a physical block, a power-of-two multiple of `block_size`.
    pub physical_block_size: u32,
    /// Logical blocks. Can change while the device is open; channels see the new value at once.
    pub num_blocks: u64,
}

/// What a device can do.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Features {
    /// Writes are refused.
    pub read_only: bool,
    /// Completed writes may be lost on power loss until a flush: report WCE=1.
    pub volatile_cache: bool,
    /// [`Io::fua`] is honoured.
    pub fua: bool,
    /// [`Op::Unmap`] works.
    pub unmap: bool,
    /// Unmapped blocks read as zeros.
    pub unmap_zeroes: bool,
    /// [`Op::WriteZeroes`] works.
    pub write_zeroes: bool,
    /// Blocks are allocated on first write: report LBPME.
    pub thin: bool,
    /// Best alignment of unmap, in blocks (0: none).
    pub unmap_granularity: u32,
    /// Largest I/O of one submit in blocks (0: no limit).
    pub max_blocks: u32,
}

/// Why a channel could not be opened.
#[derive(Debug, thiserror::Error)]
#[error("cannot open {name}: {why}")]
pub struct OpenError {
    /// Name of the bdev.
    pub name: String,
    /// The cause, as a clause.
    pub why: String,
}

/// A block device. At most ten methods: all that a layer above may know.
pub trait Bdev: Send + Sync + 'static {
    /// Unique name; never changes while registered (an lvol's is its UUID).
    fn name(&self) -> &str;
    /// Other names (an lvol's `LVSTORE/LVOL`); may change.
    fn aliases(&self) -> Vec<String>;
    /// Identity across hosts and restarts.
    fn uuid(&self) -> Uuid;
    /// SPDK's `product_name`: "Malloc disk", "Null disk", "AIO disk", "URING bdev", "Logical Volume".
    fn product_name(&self) -> &'static str;
    /// Size now.
    fn geometry(&self) -> Geometry;
    /// Abilities; fixed while registered.
    fn features(&self) -> Features;
    /// Opens a queue pair for the calling thread.
    fn open(&self, io: &IoContext) -> Result<Box<dyn Channel>, OpenError>;
    /// SPDK's `driver_specific` object of `bdev_get_bdevs`.
    fn driver_specific(&self) -> Value;
}
