//! The kernel's table of a queue's requests, which it shows to the one who serves it.

use rustix::mm::{MapFlags, ProtFlags, mmap, munmap};
use std::ffi::c_void;
use std::io;
use std::os::fd::BorrowedFd;
use std::ptr::{self, NonNull};

use crate::abi::IoDesc;

/// Bytes of a page: the table is whole ones.
const PAGE: usize = 4096;

/// The table, mapped to be read.
pub(crate) struct Table {
    at: NonNull<c_void>,
    depth: u16,
}

impl Table {
    /// Of the first queue of the device that `device` is the `/dev/ublkcN` of.
    ///
    /// # Errors
    /// The kernel refuses: another process has mapped it.
    pub fn new(device: BorrowedFd<'_>, depth: u16) -> io::Result<Table> {
        let (read, shared) = (ProtFlags::READ, MapFlags::SHARED);
        // SAFETY: a new mapping at a place that the kernel chooses.
        let at = unsafe { mmap(ptr::null_mut(), bytes(depth), read, shared, device, 0) }?;
        let at = NonNull::new(at).ok_or(io::ErrorKind::AddrNotAvailable)?;
        Ok(Table { at, depth })
    }

    /// What the kernel has written for a tag, each field read once. It means something while the tag
    /// is ours.
    ///
    /// # Panics
    /// There is no such tag.
    pub fn read(&self, tag: u16) -> IoDesc {
        assert!(tag < self.depth, "a queue has the tags that it was made with");
        let desc = self.at.cast::<IoDesc>().as_ptr().wrapping_add(usize::from(tag));
        // SAFETY: `depth` entries are mapped as long as `self` is there, all of plain numbers and
        // aligned, as the table begins at a page. The kernel writes one only while the tag is its own;
        // did it all the same, each field would be an old or a new number.
        unsafe {
            IoDesc {
                op_flags: (&raw const (*desc).op_flags).read_volatile(),
                nr_sectors: (&raw const (*desc).nr_sectors).read_volatile(),
                start_sector: (&raw const (*desc).start_sector).read_volatile(),
                addr: (&raw const (*desc).addr).read_volatile(),
            }
        }
    }
}

fn bytes(depth: u16) -> usize {
    (usize::from(depth) * size_of::<IoDesc>()).next_multiple_of(PAGE)
}

impl Drop for Table {
    fn drop(&mut self) {
        // SAFETY: mapped in `new` with this length, and nothing of it is borrowed.
        _ = unsafe { munmap(self.at.as_ptr(), bytes(self.depth)) };
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::fd::AsFd;
    use zerocopy::IntoBytes;

    #[test]
    fn a_request_is_read_at_its_tag() {
        let flags = rustix::fs::MemfdFlags::CLOEXEC;
        let file = rustix::fs::memfd_create("table", flags).unwrap();
        rustix::fs::ftruncate(&file, bytes(171) as u64).unwrap();
        assert_eq!((bytes(64), bytes(170), bytes(171)), (4096, 4096, 8192));
        let desc = IoDesc { op_flags: 1, nr_sectors: 2, start_sector: 3, addr: 4 };
        rustix::io::pwrite(&file, desc.as_bytes(), 170 * 24).unwrap();
        let table = Table::new(file.as_fd(), 171).unwrap();
        assert_eq!((table.read(170), table.read(0)), (desc, IoDesc::default()));
        assert!(std::panic::catch_unwind(move || table.read(171)).is_err());
    }
}
