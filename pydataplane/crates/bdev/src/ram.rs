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
pub(crate) const DISCARD_MIN: usize = 2 << 20;

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

    /// Copies from `offset` on into `to`, all of it.
    ///
    /// # Panics
    /// When that is not all within the memory.
    pub(crate) fn copy_to(&self, offset: usize, to: &mut [u8]) {
        let from = self.at(offset, to.len());
        // SAFETY: `at` checked the length; `to` is Rust's own memory, outside of this mapping.
        unsafe { std::ptr::copy_nonoverlapping(from, to.as_mut_ptr(), to.len()) }
    }

    /// Copies all of `from` to `offset`.
    ///
    /// # Panics
    /// When that is not all within the memory.
    pub(crate) fn copy_from(&self, offset: usize, from: &[u8]) {
        let to = self.at(offset, from.len());
        // SAFETY: as in `copy_to`, the other way.
        unsafe { std::ptr::copy_nonoverlapping(from.as_ptr(), to, from.len()) }
    }

    /// Copies `len` bytes from `offset` on into `sg`, from its byte `at` on.
    ///
    /// # Panics
    /// When they are not all within the memory.
    #[inline]
    pub(crate) fn read(&self, offset: usize, sg: &Sg, at: usize, len: usize) {
        let mut from = self.at(offset, len);
        parts(sg, at, len, |to, n| {
            // SAFETY: the parts' lengths add up to `len` at most, which `Ram::at` checked; a part is
            // valid memory (`Sg::new`) outside of this mapping.
            unsafe {
                std::ptr::copy_nonoverlapping(from, to, n);
                from = from.add(n);
            }
        });
    }

    /// Copies `len` bytes of `sg`, from its byte `at` on, to `offset`.
    ///
    /// # Panics
    /// When they do not all fit into the memory.
    #[inline]
    pub(crate) fn write(&self, offset: usize, sg: &Sg, at: usize, len: usize) {
        let mut to = self.at(offset, len);
        parts(sg, at, len, |from, n| {
            // SAFETY: as in `read`, the other way.
            unsafe {
                std::ptr::copy_nonoverlapping(from, to, n);
                to = to.add(n);
            }
        });
    }

    /// Bytes from `offset` to the end of the huge page that it lies in.
    #[inline]
    pub(crate) fn to_huge_page(&self, offset: usize) -> usize {
        DISCARD_MIN - (self.base.as_ptr() as usize + offset) % DISCARD_MIN
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

/// Calls `f` with address and length of each run that has some of the `len` bytes of `sg` from its
/// byte `at` on.
#[inline]
fn parts(sg: &Sg, mut at: usize, mut len: usize, mut f: impl FnMut(*mut u8, usize)) {
    for run in sg.as_slice() {
        if at >= run.len() {
            at -= run.len();
            continue;
        }
        let n = len.min(run.len() - at);
        // SAFETY: `at` is within the run.
        f(unsafe { run.base().add(at) }, n);
        (at, len) = (0, len - n);
        if len == 0 {
            return;
        }
    }
}

impl Drop for Ram {
    fn drop(&mut self) {
        // SAFETY: the mapping of `new`, which nobody can reach any more.
        let _ = unsafe { munmap(self.base.as_ptr().cast(), self.len) };
    }
}
