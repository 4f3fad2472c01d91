//! The regions of one guest.

use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::ptr::NonNull;
use std::sync::Arc;

use crate::log::{DirtyLog, LogError};
use crate::mapping::{Accounts, Beside, Failure, Mapping, Whole};
use crate::range::{GuestRange, IoVec};

/// Regions that a guest may have (the memory slots of KVM; GET_MAX_MEM_SLOTS).
pub const MAX_REGIONS: usize = 509;

/// Bytes that a guest may have, over all regions.
pub const MAX_BYTES: u64 = 16 << 40;

/// One entry of a vhost-user memory table (SET_MEM_TABLE, ADD_MEM_REG).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RegionSpec {
    /// Guest physical address of the first byte.
    pub guest_addr: u64,
    /// Bytes.
    pub size: u64,
    /// The same byte in the peer's own address space.
    pub user_addr: u64,
    /// Byte of the file where the region starts.
    pub mmap_offset: u64,
}

/// Why a memory table was refused. Nothing changed.
#[derive(Debug, thiserror::Error)]
pub enum MapError {
    /// More regions than [`MAX_REGIONS`].
    #[error("{0} memory regions: at most {MAX_REGIONS} are supported")]
    TooMany(usize),
    /// A region of no bytes.
    #[error("the memory region at {0:#x} has no bytes")]
    Empty(u64),
    /// Addresses beyond 2^64.
    #[error("the memory region at {0:#x} ends beyond the address space")]
    Overflow(u64),
    /// Two regions share guest addresses.
    #[error("the memory regions at {0:#x} and {1:#x} overlap")]
    Overlap(u64, u64),
    /// The file is too short: an access would raise SIGBUS.
    #[error("the memory region at {at:#x} ends beyond its file of {file} bytes")]
    BeyondFile {
        /// Guest address of the region.
        at: u64,
        /// Bytes of the file.
        file: u64,
    },
    /// More bytes than [`MAX_BYTES`], or more bytes or regions than others leave to one guest.
    #[error(
        "the memory region at {0:#x} is too much: a guest may have 16 TiB, and a sixth of what other \
         guests leave of the addresses and mappings of the target's process"
    )]
    TooLarge(u64),
    /// The file may keep whoever reads it waiting.
    #[error(
        "the memory region at {at:#x} is a file of a file system of type {kind:#x}, whose pages may \
         have to be read from a disk; give the VM memory of a memfd, of /dev/shm or of huge pages"
    )]
    FileSystem {
        /// Guest address of the region.
        at: u64,
        /// `f_type` of statfs(2).
        kind: i64,
    },
    /// A device can keep whoever reads it waiting, too.
    #[error(
        "the memory region at {0:#x} is not a regular file; give the VM memory of a memfd, of \
         /dev/shm or of huge pages"
    )]
    NotAFile(u64),
    /// No region has these addresses.
    #[error("there is no memory region at {0:#x} with that size and user address")]
    NoSuchRegion(u64),
    /// The kernel refused the mapping, or too many are mapped in all.
    #[error("cannot map the memory region at {at:#x}: {why}")]
    Map {
        /// Guest address of the region.
        at: u64,
        /// The cause.
        why: io::Error,
    },
}

#[derive(Clone, Debug)]
struct Region {
    spec: RegionSpec,
    mapping: Arc<Mapping>,
    /// What is mapped, for another process that goes on with this guest; none of memory without a
    /// file.
    file: Option<Arc<OwnedFd>>,
}

/// What a lookup needs of a region, and no more.
#[derive(Clone, Copy, Debug)]
struct Lookup {
    start: u64,
    size: u64,
    host: usize,
}

/// All regions of a guest. Immutable and shared by `Arc`; the mappings go when the last
/// `GuestMemory` that has them is dropped.
#[derive(Clone, Debug)]
pub struct GuestMemory {
    /// Sorted by guest address; `lookup[i]` belongs to `regions[i]`.
    lookup: Box<[Lookup]>,
    regions: Vec<Region>,
    log: Option<Arc<DirtyLog>>,
    /// The guest's, which is made with its first memory.
    accounts: Arc<Accounts>,
    /// It is no table ([`GuestMemory::beside`]).
    #[allow(dead_code, reason = "held")]
    beside: Option<Arc<Beside>>,
}

impl GuestMemory {
    /// A guest without memory: every lookup fails.
    pub fn empty() -> GuestMemory {
        GuestMemory {
            lookup: Box::default(),
            regions: Vec::new(),
            log: None,
            accounts: Arc::default(),
            beside: None,
        }
    }

    /// Maps a whole memory table, in any order, of a guest that had none.
    pub fn map(table: Vec<(RegionSpec, OwnedFd)>) -> Result<GuestMemory, MapError> {
        GuestMemory::empty().replaced(table)
    }

    /// The memory of the same guest after it gave a whole memory table (SET_MEM_TABLE), in any order.
    pub fn replaced(&self, table: Vec<(RegionSpec, OwnedFd)>) -> Result<GuestMemory, MapError> {
        if table.len() > MAX_REGIONS {
            return Err(MapError::TooMany(table.len()));
        }
        let mut regions = Vec::with_capacity(table.len());
        for (spec, fd) in table {
            check(&spec)?;
            regions.push((spec, fd));
        }
        regions.sort_by_key(|(spec, _)| spec.guest_addr);
        let mut total = 0;
        for (spec, _) in &regions {
            total = sum(total, spec)?;
        }
        for pair in regions.windows(2) {
            overlap(&pair[0].0, &pair[1].0)?;
        }
        let whole = self.accounts.with_table(total, regions.len());
        let regions = regions
            .into_iter()
            .map(|(spec, fd)| Region::map(spec, fd, &self.accounts, whole))
            .collect::<Result<Vec<_>, _>>()?;
        Ok(self.build(regions, None))
    }

    /// This memory and one more region (ADD_MEM_REG).
    pub fn with_region(&self, spec: RegionSpec, fd: &OwnedFd) -> Result<GuestMemory, MapError> {
        if self.regions.len() >= MAX_REGIONS {
            return Err(MapError::TooMany(self.regions.len() + 1));
        }
        check(&spec)?;
        let bytes = sum(self.regions.iter().map(|r| r.spec.size).sum(), &spec)?;
        let whole = self.accounts.with_table(bytes, self.regions.len() + 1);
        let at = self.regions.partition_point(|r| r.spec.guest_addr < spec.guest_addr);
        if let Some(next) = self.regions.get(at) {
            overlap(&spec, &next.spec)?;
        }
        if at > 0 {
            overlap(&self.regions[at - 1].spec, &spec)?;
        }
        let copy = fd.try_clone();
        let copy = copy.map_err(|why| MapError::Map { at: spec.guest_addr, why })?;
        let mut regions = self.regions.clone();
        regions.insert(at, Region::map(spec, copy, &self.accounts, whole)?);
        Ok(self.build(regions, self.log.clone()))
    }

    /// This memory without the region of these guest address, size and user address
    /// (REM_MEM_REG; the file offset is not compared, as the protocol says).
    pub fn without_region(&self, spec: RegionSpec) -> Result<GuestMemory, MapError> {
        let same = |r: &Region| {
            let has = r.spec;
            (has.guest_addr, has.size, has.user_addr)
                == (spec.guest_addr, spec.size, spec.user_addr)
        };
        let at = self.regions.iter().position(same);
        let at = at.ok_or(MapError::NoSuchRegion(spec.guest_addr))?;
        let mut regions = self.regions.clone();
        regions.remove(at);
        Ok(self.build(regions, self.log.clone()))
    }

    /// One more file of the same guest, which is not of its memory table: what it keeps of its requests
    /// in flight. It counts as the guest's, with its table, as long as it is mapped.
    ///
    /// # Errors
    /// As [`GuestMemory::replaced`].
    pub fn beside(&self, spec: RegionSpec, fd: OwnedFd) -> Result<GuestMemory, MapError> {
        check(&spec)?;
        let (counted, whole) = self.count_beside(spec.size);
        let region = Region::map(spec, fd, &self.accounts, whole)?;
        let mut memory = self.build(vec![region], None);
        memory.beside = Some(Arc::new(counted));
        Ok(memory)
    }

    /// A dirty log of this guest (SET_LOG_BASE): `size` bytes of `fd` from byte `offset`. It counts as the
    /// guest's, with its table.
    ///
    /// # Errors
    /// As [`DirtyLog::new`].
    pub fn make_log(
        &self,
        fd: BorrowedFd<'_>,
        offset: u64,
        size: u64,
    ) -> Result<DirtyLog, LogError> {
        let (counted, whole) = self.count_beside(size);
        DirtyLog::map(fd, offset, size, &self.accounts, whole, Some(counted))
    }

    /// Whether what this guest maps from now on, it had in the process before: then it gets it as long
    /// as there is room, whatever other guests had first here.
    pub fn set_inherits(&self, inherits: bool) {
        self.accounts.set_inherits(inherits);
    }

    /// Counts so many bytes more beside the table, and what the guest has with them.
    fn count_beside(&self, bytes: u64) -> (Beside, Whole) {
        let table = self.regions.iter().map(|r| r.spec.size).sum();
        let counted = Beside::new(&self.accounts, bytes);
        (counted, self.accounts.with_table(table, self.regions.len()))
    }

    /// The same memory with another dirty log, or none.
    pub fn with_log(&self, log: Option<Arc<DirtyLog>>) -> GuestMemory {
        GuestMemory { log, ..self.clone() }
    }

    /// Memory of our own, one memfd for each (guest address, bytes): tests and the initiator.
    #[cfg(not(miri))]
    pub fn memfd(areas: &[(u64, u64)]) -> Result<GuestMemory, MapError> {
        let mut table = Vec::with_capacity(areas.len());
        for (guest_addr, size) in areas {
            let at = *guest_addr;
            let fd = rustix::fs::memfd_create("guestmem", rustix::fs::MemfdFlags::CLOEXEC)
                .and_then(|fd| rustix::fs::ftruncate(&fd, *size).map(|()| fd))
                .map_err(|e| MapError::Map { at, why: e.into() })?;
            let spec = RegionSpec { guest_addr: at, size: *size, user_addr: at, mmap_offset: 0 };
            table.push((spec, fd));
        }
        GuestMemory::map(table)
    }

    /// As above, without a file.
    #[cfg(miri)]
    pub fn memfd(areas: &[(u64, u64)]) -> Result<GuestMemory, MapError> {
        let mut regions = Vec::with_capacity(areas.len());
        for (at, size) in areas {
            let spec = RegionSpec { guest_addr: *at, size: *size, user_addr: *at, mmap_offset: 0 };
            check(&spec)?;
            let mapping = Mapping::anonymous(*size as usize)
                .map_err(|e| MapError::Map { at: *at, why: io::Error::other(format!("{e:?}")) })?;
            regions.push(Region { spec, mapping: Arc::new(mapping), file: None });
        }
        regions.sort_by_key(|r| r.spec.guest_addr);
        Ok(GuestMemory::empty().build(regions, None))
    }

    /// Another memory of the same guest.
    fn build(&self, regions: Vec<Region>, log: Option<Arc<DirtyLog>>) -> GuestMemory {
        let lookup = regions.iter().map(|r| Lookup {
            start: r.spec.guest_addr,
            size: r.spec.size,
            host: r.mapping.data().as_ptr() as usize,
        });
        let accounts = Arc::clone(&self.accounts);
        GuestMemory { lookup: lookup.collect(), regions, log, accounts, beside: None }
    }

    /// The memory table, sorted by guest address.
    pub fn regions(&self) -> impl ExactSizeIterator<Item = RegionSpec> + '_ {
        self.regions.iter().map(|r| r.spec)
    }

    /// The memory table with the file of each region, sorted by guest address: what
    /// [`GuestMemory::map`] takes, in this process or another. Memory without files is left out.
    pub fn files(&self) -> impl Iterator<Item = (RegionSpec, BorrowedFd<'_>)> + '_ {
        self.regions.iter().filter_map(|r| Some((r.spec, r.file.as_deref()?.as_fd())))
    }

    /// The dirty log, if migration is under way.
    #[inline]
    pub fn log(&self) -> Option<&DirtyLog> {
        self.log.as_deref()
    }

    /// Whether the peer truncated a file of this memory or its log (see [`crate::faults`]): what
    /// is read may be zeros, and the session must end.
    pub fn is_broken(&self) -> bool {
        self.regions.iter().any(|r| r.mapping.is_broken())
            || self.log.as_ref().is_some_and(|l| l.is_broken())
    }

    /// The bytes at guest address `gpa` up to the end of its region, `most` at most; `None`: they are in
    /// no region. What goes on in the next region is another run.
    #[inline(always)]
    pub fn run(&self, gpa: u64, most: u64) -> Option<GuestRange<'_>> {
        /// Below this many regions a scan beats a binary search.
        const SCAN: usize = 8;
        let found = if self.lookup.len() <= SCAN {
            self.lookup.iter().find(|r| gpa.wrapping_sub(r.start) < r.size)?
        } else {
            let after = self.lookup.partition_point(|r| r.start <= gpa);
            self.lookup.get(after.checked_sub(1)?)?
        };
        let offset = gpa.wrapping_sub(found.start);
        if offset >= found.size {
            return None;
        }
        let ptr = NonNull::new((found.host + offset as usize) as *mut u8)?;
        // SAFETY: within a region that self keeps mapped.
        Some(unsafe { GuestRange::new(ptr, most.min(found.size - offset) as usize) })
    }

    /// `len` bytes at guest address `gpa`, if they lie in one region. A range of no bytes is one
    /// too, anywhere in a region.
    #[inline(always)]
    pub fn range(&self, gpa: u64, len: u64) -> Option<GuestRange<'_>> {
        let run = self.run(gpa, len)?;
        if run.len() as u64 == len { Some(run) } else { None }
    }

    /// `len` bytes at the peer's own address `uva` (SET_VRING_ADDR), if they lie in one region.
    pub fn range_uva(&self, uva: u64, len: u64) -> Option<GuestRange<'_>> {
        self.range(self.uva_to_gpa(uva)?, len)
    }

    /// The guest address of the peer's own address `uva`.
    pub fn uva_to_gpa(&self, uva: u64) -> Option<u64> {
        let inside = |r: &&Region| uva.wrapping_sub(r.spec.user_addr) < r.spec.size;
        let spec = self.regions.iter().find(inside)?.spec;
        Some(spec.guest_addr + (uva - spec.user_addr))
    }

    /// Marks `len` bytes at guest address `gpa` as written, if a log is on.
    #[inline]
    pub fn mark_dirty(&self, gpa: u64, len: u64) {
        if let Some(log) = &self.log {
            log.mark(gpa, len);
        }
    }

    /// Marks `len` bytes of `run`, from byte `offset`, as written, if a log is on. `run` came
    /// from this memory; other addresses are left out.
    #[inline]
    pub fn mark_dirty_host(&self, run: &IoVec, offset: usize, len: usize) {
        let Some(log) = &self.log else { return };
        let host = run.base() as usize + offset;
        let inside = |r: &&Lookup| ((host.wrapping_sub(r.host)) as u64) < r.size;
        if let Some(r) = self.lookup.iter().find(inside) {
            log.mark(r.start + (host - r.host) as u64, len as u64);
        }
    }
}

impl Region {
    fn map(
        spec: RegionSpec,
        fd: OwnedFd,
        accounts: &Accounts,
        whole: Whole,
    ) -> Result<Region, MapError> {
        let at = spec.guest_addr;
        let len = usize::try_from(spec.size).map_err(|_| MapError::Overflow(at))?;
        let mapping = Mapping::new(fd.as_fd(), spec.mmap_offset, len, accounts, whole);
        let mapping = mapping.map_err(|e| match e {
            Failure::Overflow => MapError::Overflow(at),
            Failure::BeyondFile(file) => MapError::BeyondFile { at, file },
            Failure::TooMuch => MapError::TooLarge(at),
            Failure::FileSystem(kind) => MapError::FileSystem { at, kind },
            Failure::NotAFile => MapError::NotAFile(at),
            Failure::NoGuard => MapError::Map { at, why: io::ErrorKind::OutOfMemory.into() },
            Failure::Os(why) => MapError::Map { at, why },
        })?;
        Ok(Region { spec, mapping: Arc::new(mapping), file: Some(Arc::new(fd)) })
    }
}

fn check(spec: &RegionSpec) -> Result<(), MapError> {
    if spec.size == 0 {
        return Err(MapError::Empty(spec.guest_addr));
    }
    let ends = [spec.guest_addr, spec.user_addr, spec.mmap_offset];
    if ends.iter().any(|start| start.checked_add(spec.size).is_none()) {
        return Err(MapError::Overflow(spec.guest_addr));
    }
    Ok(())
}

/// The bytes of a guest that has `total` already and gets one more region.
fn sum(total: u64, spec: &RegionSpec) -> Result<u64, MapError> {
    let sum = total.checked_add(spec.size).filter(|sum| *sum <= MAX_BYTES);
    sum.ok_or(MapError::TooLarge(spec.guest_addr))
}

/// `low` starts at or below `high`.
fn overlap(low: &RegionSpec, high: &RegionSpec) -> Result<(), MapError> {
    if low.guest_addr + low.size > high.guest_addr {
        return Err(MapError::Overlap(low.guest_addr, high.guest_addr));
    }
    Ok(())
}
