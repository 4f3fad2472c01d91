//! `file`: a regular file or a block device through the thread's io_uring.
//!
//! Data goes straight between the caller's memory and the kernel, with O_DIRECT where the file
//! system has it. Buffers that are not aligned for that are copied through preallocated bounce
//! buffers. Flush is fdatasync, FUA is RWF_DSYNC, or an fdatasync after a write in pieces, unmap punches a hole, write zeroes is
//! FALLOC_FL_ZERO_RANGE or, where that is missing, plain writes of zeros, 1 MiB at a time. Nothing here
//! blocks the thread: fallocate and fsync run in the kernel's own workers, and so do reads and writes of
//! files on FUSE. Files in memory are the exception that proves it: there the copy is made within `submit`.
//!
//! | file | noun |
//! | --- | --- |
//! | `open` | opening it, ahead of its use too, finding out what it is, and locking it |
//! | `channel` | I/Os in flight on one thread |
//! | `channel/large` | those of them that are too large for one submission, piece by piece |
//! | `channel/ranges` | unmaps and zeroing, part by part |
//! | `channel/steps` | those that do not end with their first step |
//! | `channel/flushing` | its flushes |
//! | `bounce` | aligned copies of unaligned buffers |
//! | `memory` | the short way into files that live in memory |
//! | `owners` | how many requests each guest may have with a disk that several share |
//! | `larges` | how many pieces of large transfers, which are bounded for each file |
//! | `room` | what a guest may have at a time, given to its channels in turn |
//! | `flush` | one fdatasync at a time, shared by all who wait for one |
//! | `errno` | the one table from errno to [`crate::IoError`] |

mod bounce;
mod channel;
mod errno;
mod flush;
mod larges;
mod memory;
mod open;
mod owners;
mod room;

use std::io;
use std::os::fd::OwnedFd;
use std::path::PathBuf;
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering::Relaxed};
use std::sync::{Arc, Weak};
use std::time::{Duration, Instant};

use reactor::IoContext;
use rustix::fs::{FlockOperation, flock};
use serde_json::{Value, json};
use uuid::Uuid;

use self::flush::Flushes;
use self::larges::Larges;
pub use self::open::OpenedFile;
use self::owners::Owners;
use crate::{
    Bdev, Channel, Features, FlushFailure, FlushLatch, Geometry, Op, OpenError, Registry, Stats,
};

/// How often it is looked whether a file is closed.
const CLOSING_POLL: Duration = Duration::from_micros(200);

/// Which of SPDK's two file backends it answers for; they differ in name only.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum FileKind {
    /// `bdev_aio_*`.
    Aio,
    /// `bdev_uring_*`.
    Uring,
}

/// What `bdev_aio_create` and `bdev_uring_create` ask for.
#[derive(Clone, Debug)]
pub struct FileOptions {
    /// Name of the device.
    pub name: String,
    /// The file or block device.
    pub path: PathBuf,
    /// Bytes of a logical block, 512 or 4096; `None`: the least that direct I/O allows there.
    pub block_size: Option<u32>,
    /// Refuse writes, and open the file for reading only.
    pub read_only: bool,
    /// Identity; `None`: a random one.
    pub uuid: Option<Uuid>,
    /// Which RPC made it.
    pub kind: FileKind,
}

/// What the device and its channels share. Nobody drops the last of them while the kernel has I/O of
/// theirs.
struct Shared {
    fd: OwnedFd,
    features: Features,
    block_size: u32,
    physical_block_size: u32,
    num_blocks: AtomicU64,
    /// O_DIRECT is on.
    direct: bool,
    /// Alignment of memory for direct I/O, in bytes; 1 without.
    mem_align: usize,
    /// The file lives in memory: see `memory`.
    in_memory: bool,
    /// The call that hands a read or write to the kernel may wait for the disk: one of the kernel's workers
    /// makes it.
    submit_waits: bool,
    /// The file system has not yet refused FALLOC_FL_ZERO_RANGE.
    zero_range: AtomicBool,
    /// A fallocate goes to the kernel as it is, however long.
    ranges_whole: bool,
    flushes: Flushes,
    /// I/Os of all channels that one of the kernel's workers may be waiting for.
    workers: AtomicU32,
    larges: Larges,
    owners: Owners,
    latch: FlushLatch,
    /// After `fd`: see [`Closing`].
    open: Arc<()>,
}

impl Drop for Shared {
    /// Unlocks the file at once. Closing alone does not while anybody else has it: a child between fork
    /// and exec, or the kernel's worker that ended the last I/O. Whoever opens it next finds it in use.
    fn drop(&mut self) {
        // Where there are no locks there is nothing to do.
        _ = flock(&self.fd, FlockOperation::Unlock);
    }
}

/// The end of a [`FileBdev`] whose last users may not all have let go of it yet.
#[must_use]
pub struct Closing(Weak<()>);

impl Closing {
    /// Waits until the file is closed, for another process to open it; `timeout` at most. Whether it
    /// is.
    pub fn wait(&self, timeout: Duration) -> bool {
        let end = Instant::now() + timeout;
        while self.0.strong_count() > 0 {
            if Instant::now() >= end {
                return false;
            }
            std::thread::sleep(CLOSING_POLL);
        }
        true
    }
}

impl Shared {
    /// Whether the kernel makes `op` durable by itself (RWF_DSYNC). Through the page cache a write's
    /// own failure could not be told from that of the fdatasync within it, which is everybody's.
    #[inline]
    fn syncs(&self, op: Op) -> bool {
        op == Op::Write && self.direct
    }

    #[inline]
    fn geometry(&self) -> Geometry {
        Geometry {
            block_size: self.block_size,
            physical_block_size: self.physical_block_size,
            num_blocks: self.num_blocks.load(Relaxed),
        }
    }
}

/// A disk in a file, or a block device of the host.
pub struct FileBdev {
    name: String,
    path: PathBuf,
    uuid: Uuid,
    kind: FileKind,
    block_size_given: bool,
    shared: Arc<Shared>,
    stats: Arc<Stats>,
}

impl FileBdev {
    /// Opens and locks the file.
    ///
    /// # Errors
    /// It is missing, a directory, not a file, not permitted, in use, too small, or asked for with
    /// an impossible block size: each in one sentence.
    pub fn create(options: FileOptions) -> Result<Arc<Self>, OpenError> {
        FileBdev::create_of(options, None)
    }

    /// As [`FileBdev::create`]; `ahead`: the file, if it was opened already, by the same path.
    ///
    /// # Errors
    /// As there.
    pub fn create_of(
        options: FileOptions,
        ahead: Option<OpenedFile>,
    ) -> Result<Arc<Self>, OpenError> {
        FileBdev::with_metadata(options, 0, ahead)
    }

    /// As [`FileBdev::create_of`], with so many bytes of metadata behind each block, for a layer that shows the
    /// blocks without: a block is as long as both, and `block_size` 512 where nothing else is asked for.
    ///
    /// # Errors
    /// As there, or the path is a block device.
    pub fn with_metadata(
        options: FileOptions,
        metadata: u32,
        ahead: Option<OpenedFile>,
    ) -> Result<Arc<Self>, OpenError> {
        let FileOptions { name, path, block_size, read_only, uuid, kind } = options;
        let shared = open::open(&path, block_size, metadata, read_only, ahead)
            .map_err(|why| OpenError { name: name.clone(), why })?;
        Ok(Arc::new(FileBdev {
            name,
            path,
            uuid: uuid.unwrap_or_else(Uuid::new_v4),
            kind,
            block_size_given: block_size.is_some(),
            shared: Arc::new(shared),
            stats: Stats::new(),
        }))
    }

    /// Looks at the file's size again, and tells `registry` if it changed. Returns whether it did.
    ///
    /// # Errors
    /// The size cannot be read, or is less than a block; then nothing changed.
    pub fn rescan(&self, registry: &Registry) -> Result<bool, OpenError> {
        let fail = |why| OpenError { name: self.name.clone(), why };
        let blocks = open::count_blocks(&self.shared.fd, &self.path, self.shared.block_size)
            .map_err(fail)?;
        let changed = self.shared.num_blocks.swap(blocks, Relaxed) != blocks;
        if changed {
            registry.notify_resized(&self.name);
        }
        Ok(changed)
    }

    /// Lets flushes through again after one has failed, if the file can be flushed now. Returns
    /// what was latched. What was written before that failure may be lost all the same.
    ///
    /// # Errors
    /// The flush fails again; then the latch stays.
    pub fn clear_flush_failure(&self) -> io::Result<Option<FlushFailure>> {
        rustix::fs::fdatasync(&self.shared.fd)?;
        Ok(self.shared.latch.clear())
    }

    /// To wait for its end with, for which nothing may hold it any more.
    pub fn closing(&self) -> Closing {
        Closing(Arc::downgrade(&self.shared.open))
    }

    /// Which RPC made it.
    pub fn kind(&self) -> FileKind {
        self.kind
    }

    /// The file or block device.
    pub fn path(&self) -> &std::path::Path {
        &self.path
    }

    /// Whether it bypasses the host's page cache.
    pub fn is_direct(&self) -> bool {
        self.shared.direct
    }
}

impl Bdev for FileBdev {
    fn name(&self) -> &str {
        &self.name
    }
    fn aliases(&self) -> Vec<String> {
        Vec::new()
    }
    fn uuid(&self) -> Uuid {
        self.uuid
    }
    fn product_name(&self) -> &'static str {
        match self.kind {
            FileKind::Aio => "AIO disk",
            FileKind::Uring => "URING bdev",
        }
    }
    fn geometry(&self) -> Geometry {
        self.shared.geometry()
    }
    fn features(&self) -> Features {
        self.shared.features
    }
    fn open(&self, io: &IoContext) -> Result<Box<dyn Channel>, OpenError> {
        let channel = channel::FileChannel::new(self.shared.clone(), self.stats.channel(), io)
            .map_err(|e| OpenError {
                name: self.name.clone(),
                why: format!(
                    "the kernel gives no io_uring ({e}): check kernel.io_uring_disabled and seccomp"
                ),
            })?;
        Ok(Box::new(channel))
    }
    fn driver_specific(&self) -> Value {
        let filename = self.path.to_string_lossy();
        let direct = self.shared.direct;
        match self.kind {
            FileKind::Aio => json!({"aio": {
                "filename": filename,
                "block_size_override": self.block_size_given,
                "readonly": self.shared.features.read_only,
                "fallocate": self.shared.features.unmap,
                "virtlun_direct": direct,
            }}),
            FileKind::Uring => json!({"uring": {"filename": filename, "virtlun_direct": direct}}),
        }
    }
    fn stats(&self) -> Option<&Arc<Stats>> {
        Some(&self.stats)
    }
    fn flush_latch(&self) -> Option<&FlushLatch> {
        Some(&self.shared.latch)
    }
}

#[cfg(test)]
mod tests;
