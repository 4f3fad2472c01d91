//! A device: what it is, how big it is, what it can do.

use std::any::Any;
use std::fmt;
use std::sync::{Arc, OnceLock};

use reactor::IoContext;
use serde_json::Value;
use uuid::Uuid;

use crate::{Channel, FlushLatch, IoError, Op, Protection, Stats};

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

impl Geometry {
    /// Checks what a user asked for; `physical_block_size` 0 means as `block_size`.
    ///
    /// # Errors
    /// A clause that says what is wrong.
    pub fn checked(
        block_size: u32,
        physical_block_size: u32,
        num_blocks: u64,
    ) -> Result<Self, String> {
        if !matches!(block_size, 512 | 4096) {
            return Err(format!("a block is 512 or 4096 bytes, not {block_size}"));
        }
        let physical_block_size =
            if physical_block_size == 0 { block_size } else { physical_block_size };
        if physical_block_size < block_size || !physical_block_size.is_power_of_two() {
            return Err(format!(
                "a physical block is a power-of-two multiple of {block_size} bytes, \
                 not {physical_block_size}"
            ));
        }
        if num_blocks == 0 {
            return Err("it would have no blocks".to_owned());
        }
        Ok(Geometry { block_size, physical_block_size, num_blocks })
    }

    /// Bytes of the device.
    pub fn bytes(&self) -> u64 {
        self.num_blocks.saturating_mul(u64::from(self.block_size))
    }
}

/// What a device can do.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Features {
    /// Writes are refused.
    pub read_only: bool,
    /// Completed writes may be lost on power loss until a flush: report WCE=1.
    pub volatile_cache: bool,
    /// [`crate::Io::fua`] is honoured.
    pub fua: bool,
    /// [`crate::Op::Unmap`] works.
    pub unmap: bool,
    /// Unmapped blocks read as zeros.
    pub unmap_zeroes: bool,
    /// An unmap may leave some of its blocks as they were, which are not unmapped then, such as parts of
    /// clusters: [`Features::zeroing`] is what makes all of them read as zeros.
    pub unmap_skips: bool,
    /// [`crate::Op::WriteZeroes`] works.
    pub write_zeroes: bool,
    /// Blocks are allocated on first write: report LBPME.
    pub thin: bool,
    /// Best alignment of unmap, in blocks (0: none).
    pub unmap_granularity: u32,
    /// Best length and alignment of long I/Os, in blocks (0: none is better than others).
    pub optimal_blocks: u32,
    /// Largest I/O of one submit in blocks (0: no limit).
    pub max_blocks: u32,
    /// The time in which completed writes stay readable without a flush, whatever becomes of this
    /// process: the boot of the host whose page cache or disk holds them, as its number. `None`: not
    /// known, or nothing has to be flushed.
    pub boot: Option<u128>,
    /// The medium is a server's: another host may have used it since this one did.
    pub remote: bool,
}

impl Features {
    /// What makes each block of a range read as zeros and deallocates what it can: an unmap only where that
    /// leaves none as it was.
    pub fn zeroing(&self) -> Option<Op> {
        if self.unmap && self.unmap_zeroes && !self.unmap_skips {
            return Some(Op::Unmap);
        }
        self.write_zeroes.then_some(Op::WriteZeroes)
    }
}

/// The number of this host's boot (`/proc/sys/kernel/random/boot_id`); `None` where it cannot be read.
pub fn host_boot() -> Option<u128> {
    static BOOT: OnceLock<Option<u128>> = OnceLock::new();
    *BOOT.get_or_init(|| {
        let text = std::fs::read_to_string("/proc/sys/kernel/random/boot_id").ok()?;
        Uuid::parse_str(text.trim()).ok().map(|id| id.as_u128()).filter(|number| *number != 0)
    })
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

/// A run of blocks that are alike.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Run {
    /// They have no room and read as zeros; else they may hold anything.
    pub hole: bool,
    /// How many there are at least; what follows may be like them.
    pub blocks: u64,
}

/// A device that tells which of its blocks hold nothing, without reading them.
pub trait Sparse: Send + Sync {
    /// What begins at block `lba`; no blocks at or beyond the end. Costs some milliseconds at most, and
    /// what was written and answered before the call is no hole.
    fn run(&self, lba: u64) -> Run;
    /// Bytes that hold something, or more; 0 only where none do. Cheap.
    fn allocated_bytes(&self) -> u64;
    /// Bytes that there is room for beside those, which others may take as well; `None`: not known. Cheap.
    fn free_bytes(&self) -> Option<u64> {
        None
    }
}

/// What became of [`Sharing::share`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Shared {
    /// So many blocks, from the first one on, read as the source's did.
    Done(u64),
    /// It is not possible, or not now: nothing was done.
    Not,
    /// Who wanted it no longer does: nothing was done.
    Cancelled,
}

/// A device that can have what another one has without a copy of the data: both then have the same, until one is
/// written to.
pub trait Sharing: Send + Sync {
    /// Of a copy of `blocks` blocks from block `from_lba` of `from` to block `lba`: how many have to be copied before
    /// those that could be shared, and how many these are. `None`: none could. Cheap.
    fn part(
        &self,
        from: &Arc<dyn Bdev>,
        from_lba: u64,
        lba: u64,
        blocks: u64,
    ) -> Option<(u64, u64)>;
    /// Has such a part read as the source's does, or its beginning; durably, with what was written to the source before.
    /// `still` is asked when what was begun before on the source has ended and nothing of it can change, and
    /// before anything is done. Waits: not on a reactor.
    ///
    /// # Errors
    /// Whether it was done is not known.
    fn share(
        &self,
        from: &Arc<dyn Bdev>,
        from_lba: u64,
        lba: u64,
        blocks: u64,
        still: Box<dyn FnOnce() -> bool + Send>,
    ) -> Result<Shared, IoError>;
}

/// What becomes of a guest whose disk a device is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum GuestEvent {
    /// It runs, or is about to.
    Runs,
    /// It has stopped, with nothing in flight, to go on at another host, or here again if that fails.
    Leaves,
    /// Its front end is gone: what it still waits for is not to be done any more.
    Gone,
}

/// A block device. At most ten methods, and some for what only few have: all that a layer above may know.
pub trait Bdev: Any + Send + Sync {
    /// Unique name; never changes while registered (an lvol's is its UUID).
    fn name(&self) -> &str;
    /// Other names (an lvol's `LVSTORE/LVOL`); may change, and then [`crate::aliases_changed`] is
    /// called. The registry asks every device for them, with no lock of its own held: take no lock
    /// here that is ever held while the registry is called.
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
    /// I/O statistics, where the device keeps any.
    fn stats(&self) -> Option<&Arc<Stats>> {
        None
    }
    /// What remembers a failed flush, where one can fail: that of the device itself, so a device
    /// on top of another has the other's.
    fn flush_latch(&self) -> Option<&FlushLatch> {
        None
    }
    /// What tells where it holds nothing, where the device knows.
    fn sparse(&self) -> Option<&dyn Sparse> {
        None
    }
    /// What has it share blocks with another device, where it can.
    fn sharing(&self) -> Option<&dyn Sharing> {
        None
    }
    /// What begins at block `lba`: blocks that are known to read as zeros (a `hole`), now and durably after the
    /// next flush that does not fail, or others. `None`, for every block: such things are not known, or to
    /// write zeros does more than that, as to a file, which has the room from then on. Asked by who has the
    /// device for himself, and it holds for blocks that nobody is writing to. Not on a reactor: it may take
    /// a while.
    fn known_zeros(&self, _lba: u64) -> Option<Run> {
        None
    }
    /// The protection information that its blocks have.
    fn protection(&self) -> Option<Protection> {
        None
    }
    /// The device that this one is but for its protection information, with the same name.
    fn bare(&self) -> Option<Arc<dyn Bdev>> {
        None
    }
    /// What becomes of the guest whose disk it is, for a device that one host at a time has. Must not wait.
    fn on_guest(&self, _event: GuestEvent) {}
    /// Name of the device that this one shows as a whole, under a name of its own, and has for itself
    /// ([`crate::Registry::above`]); never changes.
    fn below(&self) -> Option<&str> {
        None
    }
}

impl fmt::Debug for dyn Bdev {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} {}", self.product_name(), self.name())
    }
}
