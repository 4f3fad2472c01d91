//! Scatter-gather lists of checked memory, laid out as the kernel's `struct iovec`.

use std::mem::offset_of;
use std::ptr;

use zerocopy::FromZeros;

/// One run of readable and writable memory, with the layout of the kernel's `struct iovec`. Zeros are
/// a run of no bytes.
#[repr(C)]
#[derive(Clone, Copy, Debug, FromZeros)]
pub struct IoVec {
    base: *mut u8,
    len: usize,
}

const _: () = {
    assert!(size_of::<IoVec>() == size_of::<libc::iovec>());
    assert!(align_of::<IoVec>() == align_of::<libc::iovec>());
    assert!(offset_of!(IoVec, base) == offset_of!(libc::iovec, iov_base));
    assert!(offset_of!(IoVec, len) == offset_of!(libc::iovec, iov_len));
};

// SAFETY: an IoVec is an address and a length; the contract of `IoVec::new` makes the memory
// behind it valid for as long as it is used, on whichever thread.
unsafe impl Send for IoVec {}
// SAFETY: as above; shared access only copies the two words.
unsafe impl Sync for IoVec {}

impl IoVec {
    /// A run of no bytes.
    pub const EMPTY: IoVec = IoVec { base: ptr::null_mut(), len: 0 };

    /// `count` runs of no bytes, in memory whose pages the system provides when they are first used.
    pub fn empty(count: usize) -> Box<[IoVec]> {
        <[IoVec]>::new_box_zeroed_with_elems(count).expect("there is memory for lists of runs")
    }

    /// `len` bytes at `base`.
    ///
    /// # Safety
    /// The bytes stay mapped, readable and writable until the last use of this value or of any
    /// [`Sg`] that contains it (for I/O: until its completion was polled).
    #[inline]
    pub unsafe fn new(base: *mut u8, len: usize) -> Self {
        IoVec { base, len }
    }

    /// Address of the first byte.
    #[inline]
    pub fn base(&self) -> *mut u8 {
        self.base
    }

    /// Length in bytes.
    #[inline]
    pub fn len(&self) -> usize {
        self.len
    }

    /// Whether the run has no bytes.
    #[inline]
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }
}

/// A borrowed list of [`IoVec`]s whose lifetime is that of an I/O, not of a scope.
#[derive(Clone, Copy, Debug)]
pub struct Sg {
    iov: *const IoVec,
    count: u32,
    len: usize,
}

// SAFETY: the contract of `Sg::new` covers use on any thread.
unsafe impl Send for Sg {}

impl Sg {
    /// The list of no bytes.
    pub const EMPTY: Sg = Sg { iov: ptr::NonNull::dangling().as_ptr(), count: 0, len: 0 };

    /// The list `iov`.
    ///
    /// # Safety
    /// `iov` itself stays in place and unchanged, and the memory it names valid (see
    /// [`IoVec::new`]), until the I/O that carries this value has completed.
    #[inline]
    pub unsafe fn new(iov: &[IoVec]) -> Self {
        let len = iov.iter().map(IoVec::len).sum();
        Sg { iov: iov.as_ptr(), count: iov.len() as u32, len }
    }

    /// As [`Sg::new`], where the runs are known to have `len` bytes in all.
    ///
    /// # Safety
    /// As there, and `len` is the sum of their lengths.
    #[inline]
    pub unsafe fn with_len(iov: &[IoVec], len: usize) -> Self {
        debug_assert_eq!(len, iov.iter().map(IoVec::len).sum::<usize>());
        Sg { iov: iov.as_ptr(), count: iov.len() as u32, len }
    }

    /// Total length in bytes.
    #[inline]
    pub fn len(&self) -> usize {
        self.len
    }

    /// Whether the list has no bytes.
    #[inline]
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// The runs, in order.
    #[inline]
    pub fn as_slice(&self) -> &[IoVec] {
        // SAFETY: `Sg::new`'s contract.
        unsafe { std::slice::from_raw_parts(self.iov, self.count as usize) }
    }

    /// Copies out of the list, from byte `offset`, into `dst`; returns the bytes copied, fewer
    /// than `dst.len()` only where the list ends first.
    pub fn copy_to_slice(&self, offset: usize, dst: &mut [u8]) -> usize {
        let mut done = 0;
        self.walk(offset, dst.len(), |p, n| {
            // SAFETY: `p` is `n` valid bytes (`Sg::new`), `dst` has `n` bytes left, and a Rust
            // slice never overlaps guest memory.
            unsafe { ptr::copy_nonoverlapping(p, dst.as_mut_ptr().add(done), n) };
            done += n;
        });
        done
    }

    /// Copies `src` into the list at byte `offset`; returns the bytes copied.
    pub fn copy_from_slice(&self, offset: usize, src: &[u8]) -> usize {
        let mut done = 0;
        self.walk(offset, src.len(), |p, n| {
            // SAFETY: as in `copy_to_slice`, the other way.
            unsafe { ptr::copy_nonoverlapping(src.as_ptr().add(done), p, n) };
            done += n;
        });
        done
    }

    /// Writes zeros over `len` bytes from byte `offset`; returns the bytes written.
    pub fn zero(&self, offset: usize, len: usize) -> usize {
        let mut done = 0;
        self.walk(offset, len, |p, n| {
            // SAFETY: `p` is `n` valid bytes (`Sg::new`).
            unsafe { ptr::write_bytes(p, 0, n) };
            done += n;
        });
        done
    }

    /// Fills `out` with the runs that make up `len` bytes from byte `offset`; returns how many
    /// were used, or `None` where the list is too short or `out` too small.
    pub fn slice_into(&self, offset: usize, len: usize, out: &mut [IoVec]) -> Option<usize> {
        if offset.checked_add(len)? > self.len {
            return None;
        }
        let mut used = 0;
        let mut fits = true;
        self.walk(offset, len, |p, n| {
            if let Some(slot) = out.get_mut(used) {
                // SAFETY: a part of a run that is valid for as long as this list is.
                *slot = unsafe { IoVec::new(p, n) };
                used += 1;
            } else {
                fits = false;
            }
        });
        fits.then_some(used)
    }

    #[inline]
    fn walk(&self, mut offset: usize, mut len: usize, mut f: impl FnMut(*mut u8, usize)) {
        for run in self.as_slice() {
            if len == 0 {
                return;
            }
            if offset >= run.len() {
                offset -= run.len();
                continue;
            }
            let n = (run.len() - offset).min(len);
            // SAFETY: offset + n is within the run.
            f(unsafe { run.base().add(offset) }, n);
            offset = 0;
            len -= n;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn copies_cross_run_boundaries_and_stop_at_the_end() {
        let (mut a, mut b) = ([1u8; 3], [2u8; 5]);
        // SAFETY: both arrays outlive the list.
        let iov = unsafe { [IoVec::new(a.as_mut_ptr(), 3), IoVec::new(b.as_mut_ptr(), 5)] };
        // SAFETY: as above.
        let sg = unsafe { Sg::new(&iov) };
        let mut out = [0u8; 10];
        assert_eq!(sg.copy_to_slice(2, &mut out), 6);
        assert_eq!(out, [1, 2, 2, 2, 2, 2, 0, 0, 0, 0]);
        assert_eq!(sg.copy_from_slice(1, &[7, 8, 9]), 3);
        assert_eq!(sg.zero(7, 9), 1);
        let mut parts = [IoVec::EMPTY; 2];
        assert_eq!(sg.slice_into(1, 4, &mut parts), Some(2));
        assert_eq!((parts[0].len(), parts[1].len()), (2, 2));
        assert_eq!(sg.slice_into(1, 8, &mut parts), None);
        assert_eq!((a, b), ([1, 7, 8], [9, 2, 2, 2, 0]));
    }
}
