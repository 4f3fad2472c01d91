//! One shared mapping of a peer's file, unmapped when the last user is gone.

use std::io;
use std::os::fd::{AsFd, BorrowedFd};
use std::ptr::NonNull;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering::Relaxed};

use rustix::fs::{FileType, fstat, fstatfs};
use rustix::mm::{Advice, MapFlags, ProtFlags, madvise, mmap, munmap};

use crate::quota::{Account, Pool, Share};
use crate::sigbus::{Guard, MAX_GUARDED};

/// `statfs` type of hugetlbfs, whose mappings are aligned to its block size (linux/magic.h).
const HUGETLBFS_MAGIC: i64 = 0x958458f6;
/// File systems whose regular files can be guest memory: those whose pages are in memory, where an
/// access waits for nobody. On a disk's, a page that is not cached keeps the reactor that touches it
/// from all other guests until it was read; on FUSE the peer decides how long that takes, as it
/// does behind a device that can be mapped. What the host swaps out, it waits for all the same.
const FILE_SYSTEMS: [i64; 2] = [
    0x01021994, // tmpfs: memfd, /dev/shm
    HUGETLBFS_MAGIC,
];
/// Bytes that may be mapped in all, of the 128 TiB that a process can address: guests that ask for more
/// must not leave the allocator without addresses. The first may have [`crate::MAX_BYTES`], and each
/// 64 GiB, and room for a log and an in-flight region.
static BYTES: Pool = Pool::new(97 << 40, 66 << 30);
/// Mappings, of which the kernel lets a process have some ten thousand (`vm.max_map_count`). VMs
/// have a handful, unless memory is plugged in.
static MAPPINGS: Pool = Pool::new(MAX_GUARDED as u64, 18);
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
    _shares: Shares,
}

/// What one peer has of the process's addresses.
#[derive(Debug, Default)]
pub(crate) struct Accounts {
    bytes: Arc<Account>,
    mappings: Arc<Account>,
    /// Of that, what is not of its memory table.
    beside_bytes: AtomicU64,
    beside_mappings: AtomicUsize,
    /// It had what it asks for in the process before.
    inherits: AtomicBool,
}

/// A mapping beside the memory table, while it is there.
#[derive(Debug)]
pub(crate) struct Beside {
    accounts: Arc<Accounts>,
    bytes: u64,
}

impl Beside {
    /// Of `bytes` bytes, of the peer with these accounts.
    pub(crate) fn new(accounts: &Arc<Accounts>, bytes: u64) -> Beside {
        accounts.beside_bytes.fetch_add(bytes, Relaxed);
        accounts.beside_mappings.fetch_add(1, Relaxed);
        Beside { accounts: Arc::clone(accounts), bytes }
    }
}

impl Drop for Beside {
    fn drop(&mut self) {
        self.accounts.beside_bytes.fetch_sub(self.bytes, Relaxed);
        self.accounts.beside_mappings.fetch_sub(1, Relaxed);
    }
}

/// What the peer will have in all, with a mapping that is to be made.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Whole {
    pub(crate) bytes: u64,
    pub(crate) mappings: usize,
}

/// A mapping's share of both.
#[derive(Debug)]
struct Shares(
    #[allow(dead_code, reason = "held")] Share,
    #[allow(dead_code, reason = "held")] Share,
);

impl Accounts {
    /// What the peer will have with a memory table of that much.
    pub(crate) fn with_table(&self, bytes: u64, mappings: usize) -> Whole {
        Whole {
            bytes: bytes.saturating_add(self.beside_bytes.load(Relaxed)),
            mappings: mappings + self.beside_mappings.load(Relaxed),
        }
    }

    /// Whether what it asks for from now on is what it had in another process.
    pub(crate) fn set_inherits(&self, inherits: bool) {
        self.inherits.store(inherits, Relaxed);
    }

    fn take(&self, whole: Whole, mapped: usize) -> Option<Shares> {
        // All had room there, and may have come in another order than they do here.
        let Whole { bytes, mappings } = match self.inherits.load(Relaxed) {
            true => Whole { bytes: 0, mappings: 0 },
            false => whole,
        };
        let bytes = BYTES.take(&self.bytes, bytes, mapped as u64)?;
        Some(Shares(bytes, MAPPINGS.take(&self.mappings, mappings as u64, 1)?))
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
    /// More bytes or mappings than the peer may have.
    TooMuch,
    /// A file of a file system that may keep us waiting; its `statfs` type.
    FileSystem(i64),
    /// Not a regular file: a device, perhaps.
    NotAFile,
    /// The kernel refused.
    Os(io::Error),
}

impl Mapping {
    /// Maps `len` bytes of `fd` from byte `offset`, shared and writable, without reserving swap,
    /// left out of core dumps and guarded against truncation. With it the peer has `whole`.
    pub(crate) fn new(
        fd: BorrowedFd<'_>,
        offset: u64,
        len: usize,
        accounts: &Accounts,
        whole: Whole,
    ) -> Result<Mapping, Failure> {
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
        if FileType::from_raw_mode(stat.st_mode) != FileType::RegularFile {
            return Err(Failure::NotAFile);
        }
        if (stat.st_size as u64) < end {
            return Err(Failure::BeyondFile(stat.st_size as u64));
        }
        let lead = (offset % page as u64) as usize;
        let mapped = len
            .checked_add(lead)
            .and_then(|n| n.checked_next_multiple_of(page))
            .filter(|n| *n <= isize::MAX as usize)
            .ok_or(Failure::Overflow)?;
        let shares = accounts.take(whole, mapped).ok_or(Failure::TooMuch)?;
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
        let mut mapping = Mapping { base, len: mapped, data, guard: None, _shares: shares };
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
        let whole = Whole { bytes: len as u64, mappings: 1 };
        let shares = Accounts::default().take(whole, len).ok_or(Failure::TooMuch)?;
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
        Ok(Mapping { base, len, data: base, guard: None, _shares: shares })
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
