//! One shared mapping of a peer's file, unmapped when the last user is gone.

use std::io;
use std::os::fd::{AsFd, BorrowedFd};
use std::ptr::NonNull;
use std::sync::atomic::{AtomicUsize, Ordering};

use rustix::fs::{FileType, fstat, fstatfs};
use rustix::mm::{Advice, MapFlags, ProtFlags, madvise, mmap, munmap};

use crate::sigbus::Guard;

/// `statfs` type of hugetlbfs, whose mappings are aligned to its block size (linux/magic.h).
const HUGETLBFS_MAGIC: i64 = 0x958458f6;
/// File systems whose files can be guest memory: those where an access waits for nobody but the
/// kernel and the host's own disks. On FUSE, and on what can lie over it (overlayfs), the peer
/// decides when a page arrives, and until then the reactor that touches it serves no other guest.
const FILE_SYSTEMS: [i64; 8] = [
    0x01021994, // tmpfs: memfd, /dev/shm; devtmpfs: device DAX
    HUGETLBFS_MAGIC,
    0x858458f6, // ramfs
    0xef53,     // ext2, ext3, ext4
    0x58465342, // XFS
    0x9123683e, // Btrfs
    0x2fc12fc1, // ZFS
    0xf2f52010, // F2FS
];
/// Bytes that may be mapped in all, of the 128 TiB that a process can address: guests that ask
/// for more must not leave the allocator without addresses.
const MAX_MAPPED: usize = 64 << 40;
/// Bytes mapped now.
static MAPPED: AtomicUsize = AtomicUsize::new(0);
/// Bytes of an ordinary page.
const PAGE: usize = 4096;

/// Bytes of a file mapped shared; access only through checked ranges.
#[derive(Debug)]
pub(crate) struct Mapping {
    base: NonNull<u8>,
    len: usize,
    /// First wanted byte, behind the alignment of the file offset.
    data: NonNull<u8>,
    guard: Option<Guard>,
    /// Given back after the memory is unmapped.
    _share: Share,
}

/// Some of [`MAX_MAPPED`].
#[derive(Debug)]
struct Share(usize);

impl Share {
    fn new(bytes: usize) -> Option<Share> {
        let more = |now: usize| now.checked_add(bytes).filter(|sum| *sum <= MAX_MAPPED);
        MAPPED.fetch_update(Ordering::Relaxed, Ordering::Relaxed, more).ok()?;
        Some(Share(bytes))
    }
}

impl Drop for Share {
    fn drop(&mut self) {
        MAPPED.fetch_sub(self.0, Ordering::Relaxed);
    }
}

// SAFETY: the mapping is plain memory of the process; only its owner unmaps it, once.
unsafe impl Send for Mapping {}
// SAFETY: as above; nothing hands out references into it.
unsafe impl Sync for Mapping {}

/// Why a file could not be mapped.
#[derive(Debug)]
pub(crate) enum Failure {
    /// Size or offset overflow.
    Overflow,
    /// The file ends before the mapping does; its size in bytes.
    BeyondFile(u64),
    /// Too many mappings are guarded.
    NoGuard,
    /// More than [`MAX_MAPPED`] bytes in all.
    TooMuch,
    /// A file of a file system that may keep us waiting; its `statfs` type.
    FileSystem(i64),
    /// The kernel refused.
    Os(io::Error),
}

impl Mapping {
    /// Maps `len` bytes of `fd` from byte `offset`, shared and writable, without reserving swap,
    /// left out of core dumps and guarded against truncation.
    pub(crate) fn new(fd: BorrowedFd<'_>, offset: u64, len: usize) -> Result<Mapping, Failure> {
        let os = |e: rustix::io::Errno| Failure::Os(e.into());
        let fs = fstatfs(fd).map_err(os)?;
        if !FILE_SYSTEMS.contains(&fs.f_type) {
            return Err(Failure::FileSystem(fs.f_type));
        }
        let page = match fs.f_type {
            HUGETLBFS_MAGIC => (fs.f_bsize as usize).max(PAGE),
            _ => PAGE,
        };
        let end = offset.checked_add(len as u64).ok_or(Failure::Overflow)?;
        let stat = fstat(fd).map_err(os)?;
        if FileType::from_raw_mode(stat.st_mode) == FileType::RegularFile
            && (stat.st_size as u64) < end
        {
            return Err(Failure::BeyondFile(stat.st_size as u64));
        }
        let lead = (offset % page as u64) as usize;
        let mapped = len
            .checked_add(lead)
            .and_then(|n| n.checked_next_multiple_of(page))
            .filter(|n| *n <= isize::MAX as usize)
            .ok_or(Failure::Overflow)?;
        let share = Share::new(mapped).ok_or(Failure::TooMuch)?;
        // SAFETY: a new mapping at a place of the kernel's choice.
        let base = unsafe {
            mmap(
                std::ptr::null_mut(),
                mapped,
                ProtFlags::READ | ProtFlags::WRITE,
                MapFlags::SHARED | MapFlags::NORESERVE,
                fd.as_fd(),
                offset - lead as u64,
            )
        }
        .map_err(os)?;
        let base = NonNull::new(base.cast::<u8>()).ok_or(Failure::Overflow)?;
        // SAFETY: `lead` < `mapped`.
        let data = unsafe { base.add(lead) };
        let mut mapping = Mapping { base, len: mapped, data, guard: None, _share: share };
        // SAFETY: the range is the mapping made above. Advice only: a failure changes nothing.
        let _ = unsafe { madvise(base.as_ptr().cast(), mapped, Advice::LinuxDontDump) };
        mapping.guard =
            Some(Guard::new(base.as_ptr() as usize, mapped, page).ok_or(Failure::NoGuard)?);
        Ok(mapping)
    }

    /// Memory of our own for Miri, which maps no files and knows no signals.
    #[cfg(miri)]
    pub(crate) fn anonymous(len: usize) -> Result<Mapping, Failure> {
        let len = len.next_multiple_of(PAGE);
        let share = Share::new(len).ok_or(Failure::TooMuch)?;
        // SAFETY: a new mapping at a place of the kernel's choice.
        let base = unsafe {
            rustix::mm::mmap_anonymous(
                std::ptr::null_mut(),
                len,
                ProtFlags::READ | ProtFlags::WRITE,
                MapFlags::PRIVATE,
            )
        }
        .map_err(|e| Failure::Os(e.into()))?;
        let base = NonNull::new(base.cast::<u8>()).ok_or(Failure::Overflow)?;
        Ok(Mapping { base, len, data: base, guard: None, _share: share })
    }

    /// The first byte that was asked for.
    #[inline]
    pub(crate) fn data(&self) -> NonNull<u8> {
        self.data
    }

    /// Whether the file was truncated under us.
    pub(crate) fn is_broken(&self) -> bool {
        self.guard.as_ref().is_some_and(Guard::is_broken)
    }
}

impl Drop for Mapping {
    fn drop(&mut self) {
        self.guard = None;
        // SAFETY: this value owns the mapping and nothing borrowed from it outlives it.
        let _ = unsafe { munmap(self.base.as_ptr().cast(), self.len) };
    }
}
