//! Finding out what a path is, how direct I/O works there, and locking it.

use std::fs::{File, OpenOptions};
use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::fs::{FileExt, FileTypeExt, MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64};
use std::time::{Duration, Instant};

use rustix::fs::{
    AtFlags, FallocateFlags, FlockOperation, OFlags, SeekFrom, StatxFlags, fallocate, fcntl_getfl,
    fcntl_setfl, flock, major, minor, seek, statx,
};
use rustix::io::Errno;

use super::Shared;
use super::flush::Flushes;
use super::larges::Larges;
use super::memory::is_in_memory;
use super::owners::Owners;
use crate::device::host_boot;
use crate::{AlignedBuf, BUF_ALIGN, Features, FlushLatch};

/// Largest physical block that is reported, in bytes: what a page cache works with.
const PHYSICAL_MAX: u32 = 4096;

/// `f_type` of FUSE (statfs(2)).
const FUSE: i64 = 0x6573_5546;

/// How long a lock that outlives its process is waited for, and how often it is tried.
const DEAD_OWNER_WAIT: Duration = Duration::from_secs(10);
const HELD_POLL: Duration = Duration::from_millis(2);
/// How long a block device is waited for that a living process has locked, or that is held: udev locks one
/// for a moment whenever somebody closed the device after writing, a target that is started again for
/// instance; and the kernel lets go of what a target has closed after it is done with that one's io_uring.
const HELD_WAIT: Duration = Duration::from_secs(1);

/// A file that is open and not locked: whoever uses it goes on.
#[derive(Debug)]
pub struct OpenedFile {
    path: PathBuf,
    read_only: bool,
    block_device: bool,
    file: File,
    /// O_DIRECT is on.
    direct: bool,
    align: Option<Align>,
}

impl OpenedFile {
    /// Opens `path`, for reading alone if it is `read_only`, and finds out how direct I/O works there: a
    /// file that another process uses and lets go of soon. `None`: a block device, which only one process at
    /// a time has for itself.
    ///
    /// # Errors
    /// It cannot be opened: a clause that goes after "cannot open NAME:".
    pub fn ahead(path: &Path, read_only: bool) -> Result<Option<OpenedFile>, String> {
        match check_type(path)? {
            true => Ok(None),
            false => OpenedFile::new(path, read_only, false).map(Some),
        }
    }

    fn new(path: &Path, read_only: bool, block_device: bool) -> Result<OpenedFile, String> {
        let (file, direct) = open_file(path, read_only, block_device)?;
        let align = if direct { alignment(&file, block_device) } else { None };
        Ok(OpenedFile { path: path.into(), read_only, block_device, file, direct, align })
    }

    /// Reads its first block, which waits until its disk answers.
    ///
    /// # Errors
    /// As read(2).
    pub fn ask(&self) -> io::Result<()> {
        self.file.read_at(&mut AlignedBuf::zeroed(BUF_ALIGN), 0).map(drop)
    }
}

/// Opens, checks and locks `path`; an error is a clause that goes after "cannot open NAME:". `ahead`: the
/// same path, if it was opened already. `metadata`: bytes behind each block, which is as long as both; then
/// it goes through the page cache.
pub(super) fn open(
    path: &Path,
    block_size: Option<u32>,
    metadata: u32,
    read_only: bool,
    ahead: Option<OpenedFile>,
) -> Result<Shared, String> {
    let p = path.display();
    if let Some(b) = block_size
        && !matches!(b, 512 | 4096)
    {
        return Err(format!("a block is 512 or 4096 bytes, not {b}"));
    }
    // A block with metadata is no multiple of what a disk has.
    let block_size = match metadata {
        0 => block_size,
        more => Some(block_size.unwrap_or(512) + more),
    };
    let opened = match ahead.filter(|o| o.path == path && o.read_only == read_only) {
        Some(opened) => opened,
        None => OpenedFile::new(path, read_only, check_type(path)?)?,
    };
    let OpenedFile { block_device, file, mut direct, mut align, .. } = opened;
    if metadata > 0 && block_device {
        return Err(format!("{p} is a block device: only a file can have metadata in its blocks"));
    }
    lock(&file, path, read_only, block_device)?;
    // Blocks smaller than direct I/O takes, or no direct I/O after all: through the page cache.
    let too_small = align.is_some_and(|a| block_size.is_some_and(|b| metadata > 0 || b < a.offset));
    if direct && (align.is_none() || too_small) {
        let flags = fcntl_getfl(&file).and_then(|f| fcntl_setfl(&file, f - OFlags::DIRECT));
        flags.map_err(|e| format!("{p} cannot be switched to buffered I/O: {e}"))?;
        (direct, align) = (false, None);
    }
    let logical = if block_device {
        rustix::fs::ioctl_blksszget(&file).map_err(|e| format!("{p}: no block size: {e}"))?
    } else {
        512
    };
    let least = align.map_or(logical, |a| a.offset.max(logical));
    let block_size = block_size.unwrap_or(if least <= 512 { 512 } else { 4096 });
    let meta = file.metadata().map_err(|e| format!("{p} cannot be examined: {e}"))?;
    let physical = if block_device {
        rustix::fs::ioctl_blkpbszget(&file).unwrap_or(block_size)
    } else {
        u32::try_from(meta.blksize()).unwrap_or(PHYSICAL_MAX)
    };
    let physical_block_size = if physical.is_power_of_two() {
        physical.clamp(block_size, PHYSICAL_MAX.max(block_size))
    } else {
        block_size
    };
    let fd = OwnedFd::from(file);
    let blocks = count_blocks(&fd, path, block_size)?;
    let submit_waits = !block_device && is_on_fuse(&fd);
    let unmap = !read_only && can_unmap(&fd, &meta, block_device, logical, block_size, blocks);
    let features = Features {
        read_only,
        // Direct I/O bypasses the host's cache, not the disk's, and a file's metadata always
        // needs fdatasync.
        volatile_cache: true,
        fua: true,
        unmap,
        unmap_zeroes: unmap,
        unmap_skips: false,
        write_zeroes: true,
        thin: unmap,
        unmap_granularity: if unmap { physical_block_size / block_size } else { 0 },
        optimal_blocks: 0,
        max_blocks: 0,
        // What a FUSE server keeps in its own memory ends with it.
        boot: if submit_waits { None } else { host_boot() },
        remote: false,
    };
    let in_memory = !block_device && is_in_memory(&fd);
    Ok(Shared {
        in_memory,
        submit_waits,
        fd,
        features,
        block_size,
        physical_block_size,
        num_blocks: AtomicU64::new(blocks),
        direct,
        mem_align: align.filter(|_| !in_memory).map_or(1, |a| a.memory as usize),
        zero_range: AtomicBool::new(true),
        ranges_whole: block_device,
        flushes: Flushes::new(),
        workers: AtomicU32::new(0),
        larges: Larges::new(),
        owners: Owners::new(),
        latch: FlushLatch::default(),
        open: Arc::default(),
    })
}

/// Whether the file is on FUSE (or virtiofs). There a read or write that is not to wait waits all the same:
/// for the file's lock, which a flush, a hole or zeroing has until the server answers, and for room among
/// the requests that a server has at a time (`max_background`), reads too.
fn is_on_fuse(fd: impl AsFd) -> bool {
    rustix::fs::fstatfs(fd).is_ok_and(|s| s.f_type == FUSE)
}

/// Whole blocks in the file or device.
pub(super) fn count_blocks(fd: &OwnedFd, path: &Path, block_size: u32) -> Result<u64, String> {
    let p = path.display();
    // Works for block devices too; nobody uses the file position.
    let bytes = seek(fd, SeekFrom::End(0)).map_err(|e| format!("{p} has no size: {e}"))?;
    match bytes / u64::from(block_size) {
        0 => Err(format!(
            "{p} has {bytes} bytes, less than one block of {block_size}: make it larger, for \
             example with truncate -s 1G"
        )),
        n => Ok(n),
    }
}

/// Whether `path` is a block device; an error for anything but that and a regular file. Looks
/// before opening, because opening a FIFO or a tape has effects.
fn check_type(path: &Path) -> Result<bool, String> {
    let p = path.display();
    let meta = std::fs::metadata(path).map_err(|e| open_error(path, true, &e))?;
    let t = meta.file_type();
    if t.is_dir() {
        return Err(format!("{p} is a directory: give a file or a block device in it"));
    }
    if t.is_file() || t.is_block_device() {
        return Ok(t.is_block_device());
    }
    Err(format!("{p} is neither a regular file nor a block device"))
}

fn open_error(path: &Path, read_only: bool, e: &io::Error) -> String {
    let p = path.display();
    let how = if read_only { "reading" } else { "reading and writing" };
    match e.raw_os_error() {
        Some(libc::ENOENT) => {
            format!("{p} does not exist: create it, for example with truncate -s 1G")
        }
        Some(libc::ENOTDIR) => format!("{p} does not exist: a part of the path is not a directory"),
        Some(libc::EACCES | libc::EPERM) => {
            format!("{p} may not be opened for {how}: check its owner and mode")
        }
        Some(libc::EROFS) => {
            format!(
                "{p} is on a file system that the target may only read: ask for a read-only device, \
                 or name its folder in ReadWritePaths= of the target's systemd service"
            )
        }
        Some(libc::EBUSY) => {
            format!("{p} is in use by the system (mounted, swap or RAID): release it there first")
        }
        Some(libc::ENXIO | libc::ENOMEDIUM) => format!("{p} has no device or medium behind it"),
        _ => format!("{p} cannot be opened for {how}: {e}"),
    }
}

fn open_with(
    path: &Path,
    read_only: bool,
    block_device: bool,
    flags: i32,
) -> io::Result<(File, bool)> {
    // Without O_CREAT, O_EXCL on a block device means: not while it is mounted or held.
    let exclusive = if block_device && !read_only { libc::O_EXCL } else { 0 };
    let file = OpenOptions::new()
        .read(true)
        .write(!read_only)
        .custom_flags(flags | exclusive | libc::O_CLOEXEC | libc::O_NOCTTY)
        .open(path)?;
    if file.metadata()?.file_type().is_block_device() != block_device {
        return Err(io::Error::other("it was replaced meanwhile"));
    }
    Ok((file, flags & libc::O_DIRECT != 0))
}

/// Opens for direct I/O, or buffered where the file system refuses that.
fn open_file(path: &Path, read_only: bool, block_device: bool) -> Result<(File, bool), String> {
    let begun = Instant::now();
    loop {
        let opened = match open_with(path, read_only, block_device, libc::O_DIRECT) {
            Err(e) if e.raw_os_error() == Some(libc::EINVAL) => {
                open_with(path, read_only, block_device, 0)
            }
            r => r,
        };
        let held = |e: &io::Error| block_device && e.raw_os_error() == Some(libc::EBUSY);
        if !opened.as_ref().is_err_and(held) || begun.elapsed() >= HELD_WAIT {
            return opened.map_err(|e| open_error(path, read_only, &e));
        }
        std::thread::sleep(HELD_POLL);
    }
}

/// Locks out other processes, and other devices of this one. Readers share.
fn lock(file: &File, path: &Path, read_only: bool, block_device: bool) -> Result<(), String> {
    let how = if read_only {
        FlockOperation::NonBlockingLockShared
    } else {
        FlockOperation::NonBlockingLockExclusive
    };
    let begun = Instant::now();
    loop {
        let locked = flock(file, how);
        if locked != Err(Errno::WOULDBLOCK) {
            return match locked {
                Ok(()) => Ok(()),
                // Some network file systems have no locks; going without is what they offer.
                Err(Errno::OPNOTSUPP | Errno::NOSYS | Errno::NOLCK) => {
                    tracing::warn!("{} cannot be locked against other processes", path.display());
                    Ok(())
                }
                Err(e) => Err(format!("{} cannot be locked: {e}", path.display())),
            };
        }
        // Looked at once a round: who is said to have it is who it was left to. The kernel ends a killed
        // process's io_uring, and with it the lock, after the process itself.
        let owner = lock_owner(file);
        let timeout = match owner {
            Some(pid) if !peer::is_ending(pid) && block_device => HELD_WAIT,
            Some(pid) if !peer::is_ending(pid) => Duration::ZERO,
            _ => DEAD_OWNER_WAIT,
        };
        if begun.elapsed() >= timeout {
            let by = match owner {
                Some(pid) if pid == std::process::id() => "another device of this target".into(),
                Some(pid) => format!("process {pid}"),
                None => "another process".into(),
            };
            return Err(format!("{} is in use by {by}: stop that first", path.display()));
        }
        std::thread::sleep(HELD_POLL);
    }
}

/// The process that holds a lock on the file, from `/proc/locks` (see proc(5)).
fn lock_owner(file: &File) -> Option<u32> {
    let meta = file.metadata().ok()?;
    let (dev, inode) = (meta.dev(), meta.ino());
    let want = format!("{:02x}:{:02x}:{inode}", major(dev), minor(dev));
    std::fs::read_to_string("/proc/locks").ok()?.lines().find_map(|line| {
        let f: Vec<&str> = line.split_whitespace().collect();
        (f.get(1) == Some(&"FLOCK") && f.get(5) == Some(&want.as_str()))
            .then(|| f.get(4)?.parse().ok())?
    })
}

/// What direct I/O wants, in bytes.
#[derive(Clone, Copy, Debug)]
struct Align {
    /// Of offsets and lengths.
    offset: u32,
    /// Of memory.
    memory: u32,
}

/// How direct I/O works on the open file; `None`: it does not.
fn alignment(file: &File, block_device: bool) -> Option<Align> {
    if let Ok(s) = statx(file.as_fd(), c"", AtFlags::EMPTY_PATH, StatxFlags::DIOALIGN)
        && s.stx_mask & StatxFlags::DIOALIGN.bits() != 0
    {
        let (offset, memory) = (s.stx_dio_offset_align, s.stx_dio_mem_align);
        return (offset > 0 && memory > 0).then_some(Align { offset, memory });
    }
    if block_device {
        let logical = rustix::fs::ioctl_blksszget(file).ok()?;
        return Some(Align { offset: logical, memory: logical });
    }
    // Before Linux 6.1, and file systems that do not say: try.
    let mut buf = AlignedBuf::zeroed(8192);
    for size in [512, 4096] {
        // An address aligned to `size` and to nothing more.
        if file.read_at(&mut buf[size..2 * size], 0).is_ok() {
            return Some(Align { offset: size as u32, memory: size as u32 });
        }
    }
    None
}

/// Whether FALLOC_FL_PUNCH_HOLE works.
fn can_unmap(
    fd: &OwnedFd,
    meta: &std::fs::Metadata,
    block_device: bool,
    logical: u32,
    block_size: u32,
    blocks: u64,
) -> bool {
    if block_device {
        // A hole in a block device is a discard that must zero; it cannot be tried without harm.
        let limit = |name| queue_limit(meta.rdev(), name).unwrap_or(0);
        return block_size >= logical
            && limit("discard_max_bytes") > 0
            && limit("write_zeroes_max_bytes") > 0;
    }
    // Beyond the end there is nothing to lose.
    let block = u64::from(block_size);
    let mode = FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE;
    fallocate(fd, mode, (blocks + 1) * block, block).is_ok()
}

/// A number from the block device's queue directory; a partition's is its disk's.
fn queue_limit(rdev: u64, name: &str) -> Option<u64> {
    let dir = format!("/sys/dev/block/{}:{}", major(rdev), minor(rdev));
    [format!("{dir}/queue/{name}"), format!("{dir}/../queue/{name}")]
        .iter()
        .find_map(|p| std::fs::read_to_string(p).ok()?.trim().parse().ok())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_file_that_is_open_ahead_is_used_when_whoever_has_it_lets_go() {
        let file = tempfile::NamedTempFile::new_in("/var/tmp").unwrap();
        file.as_file().set_len(1 << 20).unwrap();
        let path = file.path();
        let ahead = |read_only| OpenedFile::ahead(path, read_only).unwrap();
        let there = open(path, None, 0, false, None).unwrap();
        let early = ahead(false).unwrap();
        early.ask().unwrap();
        let why = open(path, None, 0, false, Some(early)).err().unwrap();
        assert!(why.contains("is in use by another device"), "{why}");
        let early = ahead(false).unwrap();
        let (dev, inode) =
            (early.file.metadata().unwrap().dev(), early.file.metadata().unwrap().ino());
        drop(there);
        // It stays the file that it was, with the size that it has by now.
        file.as_file().set_len(2 << 20).unwrap();
        std::fs::rename(path, path.with_extension("moved")).unwrap();
        let shared = open(path, Some(512), 0, false, Some(early)).unwrap();
        let meta = File::from(shared.fd.try_clone().unwrap()).metadata().unwrap();
        assert_eq!((meta.dev(), meta.ino()), (dev, inode));
        assert_eq!(shared.num_blocks.load(std::sync::atomic::Ordering::Relaxed), 4096);
        std::fs::rename(path.with_extension("moved"), path).unwrap();
        drop(shared);
        // For another path, or another use, it is opened anew.
        let shared = open(path, None, 0, true, ahead(false)).unwrap();
        assert!(shared.features.read_only);
        assert!(OpenedFile::ahead(Path::new("/nowhere"), false).is_err());
    }
}
