//! Memory that many threads copy in and out of at once, like the medium of a disk: concurrent
//! I/Os to the same blocks leave a mix of their bytes, never anything worse.
//!
//! All `unsafe` of the memory disk is here. No Rust reference to the memory is ever made.

use std::io;
use std::ptr::NonNull;

use guestmem::Sg;
use rustix::mm::{Advice, MapFlags, ProtFlags, madvise, mmap_anonymous, munmap};

/// Ranges from this size on are given back to the kernel instead of being overwritten, in bytes:
/// the size of a huge page.
const DISCARD_MIN: usize = 2 << 20;

/// Zero-initialised anonymous memory, huge pages preferred, allocated on first touch.
pub(crate) struct Ram {
    base: NonNull<u8>,
    len: usize,
}

// SAFETY: the memory is only accessed by copies through raw pointers within its bounds; what
// races do to its content is what they do to a disk's.
unsafe impl Send for Ram {}
// SAFETY: as above.
unsafe impl Sync for Ram {}

impl Ram {
    /// Maps `len` bytes (at least one).
    pub(crate) fn new(len: usize) -> io::Result<Self> {
        // Miri knows neither this flag nor the advice below.
        let more = if cfg!(miri) { MapFlags::empty() } else { MapFlags::NORESERVE };
        let flags = MapFlags::PRIVATE | more;
        // SAFETY: a new anonymous mapping at an address of the kernel's choice.
        let base = unsafe {
            mmap_anonymous(std::ptr::null_mut(), len, ProtFlags::READ | ProtFlags::WRITE, flags)
        }?;
        if !cfg!(miri) {
            // SAFETY: the mapping made above; the advice does not change its content. A kernel
            // without huge pages refuses, and then small ones do.
            let _ = unsafe { madvise(base, len, Advice::LinuxHugepage) };
        }
        let base = NonNull::new(base.cast()).ok_or(io::ErrorKind::OutOfMemory)?;
        Ok(Ram { base, len })
    }

    /// Address of `len` bytes from `offset` on.
    ///
    /// # Panics
    /// When they are not all within the memory.
    #[inline]
    pub(crate) fn at(&self, offset: usize, len: usize) -> *mut u8 {
        assert!(offset <= self.len && len <= self.len - offset, "beyond the memory");
        // SAFETY: within the mapping, checked above.
        unsafe { self.base.as_ptr().add(offset) }
    }

    /// Copies from `offset` on into `sg`, all of it.
    #[inline]
    pub(crate) fn read(&self, offset: usize, sg: &Sg) {
        let mut from = self.at(offset, sg.len());
        for run in sg.as_slice() {
            // SAFETY: the runs' lengths add up to `sg.len()`, which `at` checked; a run is valid
            // memory (`Sg::new`) outside of this mapping.
            unsafe {
                std::ptr::copy_nonoverlapping(from, run.base(), run.len());
                from = from.add(run.len());
            }
        }
    }

    /// Copies all of `sg` to `offset`.
    #[inline]
    pub(crate) fn write(&self, offset: usize, sg: &Sg) {
        let mut to = self.at(offset, sg.len());
        for run in sg.as_slice() {
            // SAFETY: as in `read`, the other way.
            unsafe {
                std::ptr::copy_nonoverlapping(run.base(), to, run.len());
                to = to.add(run.len());
            }
        }
    }

    /// Makes `len` bytes from `offset` read as zeros; whole huge pages are given back.
    pub(crate) fn zero(&self, offset: usize, len: usize) {
        let start = self.at(offset, len);
        let head = start.align_offset(DISCARD_MIN).min(len);
        let body = (len - head) / DISCARD_MIN * DISCARD_MIN;
        let fill = |at: usize, n: usize| {
            // SAFETY: `at + n` is at most `offset + len`, which `at` checked.
            unsafe { std::ptr::write_bytes(start.add(at), 0, n) }
        };
        fill(0, head);
        if body > 0 {
            let given = !cfg!(miri)
                // SAFETY: whole pages of this private anonymous mapping; they read as zeros next.
                && unsafe { madvise(start.add(head).cast(), body, Advice::LinuxDontNeed) }.is_ok();
            if !given {
                fill(head, body);
            }
        }
        fill(head + body, len - head - body);
    }
}

impl Drop for Ram {
    fn drop(&mut self) {
        // SAFETY: the mapping of `new`, which nobody can reach any more.
        let _ = unsafe { munmap(self.base.as_ptr().cast(), self.len) };
    }
}
