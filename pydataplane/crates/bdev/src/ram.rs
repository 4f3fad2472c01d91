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

/// Bytes that are looked at before they are overwritten with zeros.
const LOOK: usize = 4096;

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

    /// Whether `len` bytes from `offset` on are zeros.
    ///
    /// # Panics
    /// When they are not all within the memory.
    pub(crate) fn is_zero(&self, offset: usize, len: usize) -> bool {
        // SAFETY: `at` checked the length.
        unsafe { is_zero(self.at(offset, len), len) }
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

    /// Makes `len` bytes from `offset` read as zeros; whole huge pages are given back. What is zeros
    /// already is only read: memory that was never written, or was given back, would be taken for it,
    /// and the kernel clears a huge page for its first byte, for which other guests had to wait.
    pub(crate) fn zero(&self, offset: usize, len: usize) {
        let start = self.at(offset, len);
        let head = start.align_offset(DISCARD_MIN).min(len);
        let body = (len - head) / DISCARD_MIN * DISCARD_MIN;
        let fill = |mut at: usize, n: usize| {
            let end = at + n;
            while at < end {
                // SAFETY: `end` is at most `offset + len`, which `at` checked.
                let from = unsafe { start.add(at) };
                let part = (LOOK - from as usize % LOOK).min(end - at);
                // SAFETY: as above, for `part` bytes.
                unsafe {
                    if !is_zero(from, part) {
                        std::ptr::write_bytes(from, 0, part);
                    }
                }
                at += part;
            }
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

/// Whether `len` bytes from `at` on are zeros. Others may write them meanwhile.
///
/// # Safety
/// They are mapped and readable.
unsafe fn is_zero(at: *const u8, len: usize) -> bool {
    const WORD: usize = size_of::<u64>();
    /// Words between two looks at what was found.
    const WORDS: usize = 8;
    let head = at.align_offset(WORD).min(len);
    let (words, tail) = ((len - head) / WORD, (len - head) % WORD);
    // SAFETY: `from + n` is at most `len` in both calls, as the caller promises.
    let bytes = |from: usize, n: usize| unsafe {
        (from..from + n).fold(0, |all, nth| all | at.add(nth).read_volatile())
    };
    if bytes(0, head) | bytes(len - tail, tail) != 0 {
        return false;
    }
    for first in (0..words).step_by(WORDS) {
        let mut all = 0;
        for nth in first..words.min(first + WORDS) {
            // SAFETY: a whole word before the tail, aligned as the head ends where one begins.
            all |= unsafe { at.add(head + nth * WORD).cast::<u64>().read_volatile() };
        }
        if all != 0 {
            return false;
        }
    }
    true
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

#[cfg(test)]
mod tests {
    use super::*;

    /// Bytes of the mapping that the kernel has taken memory for.
    #[cfg(not(miri))]
    fn taken(ram: &Ram) -> u64 {
        let maps = std::fs::read_to_string("/proc/self/smaps").unwrap();
        let begins = |line: &&str| line.starts_with(&format!("{:x}-", ram.base.as_ptr() as usize));
        let mut lines = maps.lines().skip_while(|line| !begins(line));
        let line = lines.find(|line| line.starts_with("Anonymous:")).expect("it is mapped");
        let kib = line.split_whitespace().nth(1).and_then(|kib| kib.parse::<u64>().ok());
        kib.expect("a number of KiB") << 10
    }

    #[cfg(not(miri))]
    #[test]
    fn zeros_over_zeros_take_no_memory() {
        let ram = Ram::new(4 * DISCARD_MIN + 512).unwrap();
        // The kernel shows mappings that differ in nothing and lie side by side as one: another
        // test's memory may lie beside this one. So this one differs.
        // SAFETY: the mapping made above; the advice does not change its content.
        unsafe { madvise(ram.base.as_ptr().cast(), ram.len, Advice::LinuxDontDump) }.unwrap();
        let _beside = Ram::new(LOOK).unwrap();
        for offset in [0, 512, DISCARD_MIN - 4096, DISCARD_MIN + 7] {
            ram.zero(offset, 3 * DISCARD_MIN);
        }
        assert_eq!(taken(&ram), 0);
        ram.copy_from(5000, &[7]);
        assert_ne!(taken(&ram), 0);
    }

    #[test]
    fn every_byte_that_is_not_zero_becomes_it_and_no_other_changes() {
        const BYTES: usize = 4 * LOOK;
        let ram = Ram::new(BYTES).unwrap();
        for (offset, len) in [(0, BYTES), (1, 1), (3, LOOK), (LOOK - 1, 2), (9, 2 * LOOK + 5)] {
            for at in [0, 1, 7, 8, 63, 64, len / 2, len - 1].map(|at: usize| at.min(len - 1)) {
                ram.copy_from(0, &[0; BYTES]);
                for beside in [offset.wrapping_sub(1), offset + at, offset + len] {
                    if beside < BYTES {
                        ram.copy_from(beside, &[9]);
                    }
                }
                ram.zero(offset, len);
                let mut bytes = [0; BYTES];
                ram.copy_to(0, &mut bytes);
                let left: Vec<_> = (0..BYTES).filter(|n| bytes[*n] != 0).collect();
                let outside = [offset.wrapping_sub(1), offset + len];
                let outside: Vec<_> = outside.into_iter().filter(|n| *n < BYTES).collect();
                assert_eq!(left, outside, "{len} from {offset}, {at}");
            }
        }
    }
}
