//! Guest memory of the front end's own: memory files, their table and a bump allocator.

use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::Arc;

use guestmem::{GuestMemory, GuestRange, RegionSpec};
use rustix::fs::{MemfdFlags, ftruncate, memfd_create};

use crate::error::Error;

/// What the peer is told as our own address of a guest address: any fixed distance will do.
pub const USER_BASE: u64 = 0x7e00_0000_0000;
/// First guest address that is given out.
const FIRST: u64 = 0x1000;

/// Guest memory, of which the first region is for the session's own use.
#[derive(Debug)]
pub struct Arena {
    memory: Arc<GuestMemory>,
    files: Vec<(RegionSpec, OwnedFd)>,
    next: u64,
    end: u64,
    huge: bool,
}

impl Arena {
    /// One region of `bytes` at guest address 0, of huge pages (2 MiB) if `huge`.
    pub fn new(bytes: u64, huge: bool) -> Result<Arena, Error> {
        let memory = Arc::new(GuestMemory::empty());
        let mut arena = Arena { memory, files: Vec::new(), next: FIRST, end: bytes, huge };
        arena.add_region(0, bytes)?;
        Ok(arena)
    }

    /// The memory as it is now.
    pub fn memory(&self) -> &Arc<GuestMemory> {
        &self.memory
    }

    /// The regions with their files, as for SET_MEM_TABLE.
    pub fn table(&self) -> impl Iterator<Item = (RegionSpec, BorrowedFd<'_>)> {
        self.files.iter().map(|(spec, fd)| (*spec, fd.as_fd()))
    }

    /// One more region of `bytes` at `guest_addr`.
    pub fn add_region(&mut self, guest_addr: u64, bytes: u64) -> Result<RegionSpec, Error> {
        let flags = if self.huge { MemfdFlags::HUGETLB } else { MemfdFlags::empty() };
        let fd = memfd_create("virtlun-bench", MemfdFlags::CLOEXEC | flags)
            .map_err(|e| Error::os("make a memory file")(e.into()))?;
        ftruncate(&fd, bytes).map_err(|e| Error::os("size a memory file")(e.into()))?;
        let user_addr = USER_BASE.wrapping_add(guest_addr);
        let spec = RegionSpec { guest_addr, size: bytes, user_addr, mmap_offset: 0 };
        self.memory = Arc::new(self.memory.with_region(spec, &fd)?);
        self.files.push((spec, fd));
        Ok(spec)
    }

    /// Forgets the region at `guest_addr`.
    pub fn remove_region(&mut self, guest_addr: u64) -> Result<RegionSpec, Error> {
        let at = self.files.iter().position(|(spec, _)| spec.guest_addr == guest_addr);
        let at = at.ok_or(guestmem::MapError::NoSuchRegion(guest_addr))?;
        let spec = self.files[at].0;
        self.memory = Arc::new(self.memory.without_region(spec)?);
        self.files.remove(at);
        Ok(spec)
    }

    /// Cuts the file of the region at `guest_addr` to `bytes`, under the peer's feet.
    pub fn truncate(&self, guest_addr: u64, bytes: u64) -> Result<(), Error> {
        let found = self.files.iter().find(|(spec, _)| spec.guest_addr == guest_addr);
        let (_, fd) = found.ok_or(guestmem::MapError::NoSuchRegion(guest_addr))?;
        ftruncate(fd, bytes).map_err(|e| Error::os("truncate a memory file")(e.into()))
    }

    /// `bytes` of the first region, aligned to `align`; given back only by [`Arena::rewind`].
    pub fn alloc(&mut self, bytes: u64, align: u64) -> Result<u64, Error> {
        let at = self.next.next_multiple_of(align);
        match at.checked_add(bytes) {
            Some(next) if next <= self.end => {
                self.next = next;
                Ok(at)
            }
            _ => Err(Error::NoRoom { wanted: bytes }),
        }
    }

    /// Where the next allocation starts, for [`Arena::rewind`].
    pub fn mark(&self) -> u64 {
        self.next
    }

    /// Gives back all that was allocated since `mark`.
    pub fn rewind(&mut self, mark: u64) {
        self.next = mark;
    }

    /// `len` bytes at `gpa`.
    pub fn range(&self, gpa: u64, len: u64) -> Result<GuestRange<'_>, Error> {
        self.memory.range(gpa, len).ok_or(Error::Access(guestmem::BadAccess))
    }

    /// Copies `bytes` to `gpa`.
    pub fn write(&self, gpa: u64, bytes: &[u8]) -> Result<(), Error> {
        Ok(self.range(gpa, bytes.len() as u64)?.write_slice(0, bytes)?)
    }

    /// Copies `len` bytes at `gpa` out.
    pub fn read(&self, gpa: u64, len: usize) -> Result<Vec<u8>, Error> {
        let mut bytes = vec![0; len];
        self.range(gpa, len as u64)?.read_slice(0, &mut bytes)?;
        Ok(bytes)
    }
}
