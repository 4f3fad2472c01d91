//! Runs of checked memory: one of guest memory, each access to which is checked, and lists of them for I/O,
//! laid out as the kernel's `struct iovec`.

use std::marker::PhantomData;
use std::mem::offset_of;
use std::ptr::{self, NonNull};
use std::sync::atomic::{AtomicU8, AtomicU16, Ordering};

use zerocopy::{FromBytes, FromZeros, Immutable, IntoBytes};

/// An access beyond the end of a range, or a misaligned atomic one.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("access outside the guest range, or misaligned")]
pub struct BadAccess;

/// A run of guest memory that lies within one region. Every access is checked against its
/// length, and copies: the guest may change the bytes at any time.
#[derive(Clone, Copy, Debug)]
pub struct GuestRange<'m> {
    ptr: NonNull<u8>,
    len: usize,
    memory: PhantomData<&'m ()>,
}

// SAFETY: plain memory that stays mapped for 'm; all access is by volatile or atomic copies.
unsafe impl Send for GuestRange<'_> {}
// SAFETY: as above.
unsafe impl Sync for GuestRange<'_> {}

impl<'m> GuestRange<'m> {
    /// `len` bytes at `ptr`.
    ///
    /// # Safety
    /// The bytes are mapped, readable and writable during `'m`.
    #[inline]
    pub unsafe fn new(ptr: NonNull<u8>, len: usize) -> Self {
        GuestRange { ptr, len, memory: PhantomData }
    }

    /// The same range without its lifetime, for a holder that keeps the memory itself.
    ///
    /// # Safety
    /// The holder keeps the `GuestMemory` (by `Arc`) for at least as long as the result.
    #[inline]
    pub unsafe fn detach(self) -> GuestRange<'static> {
        GuestRange { ptr: self.ptr, len: self.len, memory: PhantomData }
    }

    /// Length in bytes.
    #[inline]
    pub fn len(&self) -> usize {
        self.len
    }

    /// Whether the range has no bytes.
    #[inline]
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// Host address of the first byte.
    #[inline]
    pub fn as_ptr(&self) -> *mut u8 {
        self.ptr.as_ptr()
    }

    /// `len` bytes from byte `offset`, or `None` beyond the end.
    #[inline]
    pub fn slice(&self, offset: usize, len: usize) -> Option<GuestRange<'m>> {
        self.check(offset, len).ok()?;
        // SAFETY: within this range.
        Some(unsafe { GuestRange::new(self.ptr.add(offset), len) })
    }

    /// The range as a run for scatter-gather lists.
    ///
    /// # Safety
    /// As [`IoVec::new`]: the memory outlives every use of the result.
    #[inline]
    pub unsafe fn to_iovec(self) -> IoVec {
        // SAFETY: the caller's promise.
        unsafe { IoVec::new(self.ptr.as_ptr(), self.len) }
    }

    #[inline(always)]
    fn check(&self, offset: usize, len: usize) -> Result<*mut u8, BadAccess> {
        match offset.checked_add(len) {
            // SAFETY: offset <= len of the range.
            Some(end) if end <= self.len => Ok(unsafe { self.ptr.as_ptr().add(offset) }),
            _ => Err(BadAccess),
        }
    }

    /// Reads a value once, at byte `offset`, in guest byte order (no conversion).
    #[inline(always)]
    pub fn get<T: FromBytes + Copy>(&self, offset: usize) -> Result<T, BadAccess> {
        let ptr = self.check(offset, size_of::<T>())?.cast::<T>();
        if ptr.is_aligned() {
            // SAFETY: in bounds, aligned, and any bytes are a T (FromBytes).
            return Ok(unsafe { ptr.read_volatile() });
        }
        let mut value = T::new_zeroed();
        let (src, dst) = (ptr.cast::<u8>(), (&raw mut value).cast::<u8>());
        for i in 0..size_of::<T>() {
            // SAFETY: both are size_of::<T>() bytes; any bytes are a T (FromBytes).
            unsafe { dst.add(i).write(src.add(i).read_volatile()) };
        }
        Ok(value)
    }

    /// Writes a value at byte `offset`, in guest byte order (no conversion).
    #[inline(always)]
    pub fn put<T: IntoBytes + Immutable + Copy>(
        &self,
        offset: usize,
        value: T,
    ) -> Result<(), BadAccess> {
        let ptr = self.check(offset, size_of::<T>())?.cast::<T>();
        if ptr.is_aligned() {
            // SAFETY: in bounds and aligned.
            unsafe { ptr.write_volatile(value) };
            return Ok(());
        }
        for (i, byte) in value.as_bytes().iter().enumerate() {
            // SAFETY: in bounds.
            unsafe { ptr.cast::<u8>().add(i).write_volatile(*byte) };
        }
        Ok(())
    }

    /// Loads a little-endian u16 with acquire ordering; `offset` must be even in memory.
    #[inline(always)]
    pub fn load_acquire_u16(&self, offset: usize) -> Result<u16, BadAccess> {
        Ok(u16::from_le(self.atomic_u16(offset)?.load(Ordering::Acquire)))
    }

    /// Stores a little-endian u16 with release ordering; `offset` must be even in memory.
    #[inline(always)]
    pub fn store_release_u16(&self, offset: usize, value: u16) -> Result<(), BadAccess> {
        self.atomic_u16(offset)?.store(value.to_le(), Ordering::Release);
        Ok(())
    }

    #[inline(always)]
    fn atomic_u16(&self, offset: usize) -> Result<&AtomicU16, BadAccess> {
        let ptr = self.check(offset, 2)?.cast::<u16>();
        if !ptr.is_aligned() {
            return Err(BadAccess);
        }
        // SAFETY: in bounds, aligned, and shared with the guest, whose accesses are atomic.
        Ok(unsafe { AtomicU16::from_ptr(ptr) })
    }

    /// The byte at `offset` as an atomic (bitmaps shared with the peer).
    #[inline(always)]
    pub(crate) fn atomic_u8(&self, offset: usize) -> Result<&AtomicU8, BadAccess> {
        let ptr = self.check(offset, 1)?;
        // SAFETY: in bounds; one byte is always aligned.
        Ok(unsafe { AtomicU8::from_ptr(ptr) })
    }

    /// Copies the bytes from `offset` into `dst`.
    #[inline]
    pub fn read_slice(&self, offset: usize, dst: &mut [u8]) -> Result<(), BadAccess> {
        let src = self.check(offset, dst.len())?;
        // SAFETY: in bounds; a Rust slice never overlaps guest memory.
        unsafe { ptr::copy_nonoverlapping(src, dst.as_mut_ptr(), dst.len()) };
        Ok(())
    }

    /// Copies `src` to the bytes from `offset`.
    #[inline]
    pub fn write_slice(&self, offset: usize, src: &[u8]) -> Result<(), BadAccess> {
        let dst = self.check(offset, src.len())?;
        // SAFETY: in bounds; a Rust slice never overlaps guest memory.
        unsafe { ptr::copy_nonoverlapping(src.as_ptr(), dst, src.len()) };
        Ok(())
    }

    /// Sets every byte to `value`.
    pub fn fill(&self, value: u8) {
        // SAFETY: the whole range.
        unsafe { ptr::write_bytes(self.ptr.as_ptr(), value, self.len) };
    }

    /// Asks the processor to fetch the cache line at `offset`; beyond the end it does nothing.
    #[inline(always)]
    pub fn prefetch(&self, offset: usize) {
        if offset < self.len {
            prefetch(self.ptr.as_ptr().wrapping_add(offset));
        }
    }
}

/// As [`prefetch`], for a line that is going to be written: it comes without a copy elsewhere.
#[inline(always)]
#[allow(clippy::pointers_in_nomem_asm_block)] // it touches no memory that anybody can see
pub fn prefetch_write(ptr: *const u8) {
    #[cfg(all(target_arch = "x86_64", not(miri)))]
    // SAFETY: a prefetch has no architectural effect; processors without this one do nothing.
    unsafe {
        std::arch::asm!("prefetchw [{}]", in(reg) ptr, options(nomem, nostack, preserves_flags));
    }
    #[cfg(not(all(target_arch = "x86_64", not(miri))))]
    prefetch(ptr);
}

/// Asks the processor to fetch the cache line of `ptr`; never faults, whatever the address.
#[inline(always)]
pub fn prefetch(ptr: *const u8) {
    #[cfg(target_arch = "x86_64")]
    // SAFETY: a prefetch has no architectural effect.
    unsafe {
        use std::arch::x86_64::{_MM_HINT_T0, _mm_prefetch};
        _mm_prefetch::<_MM_HINT_T0>(ptr.cast());
    }
    #[cfg(not(target_arch = "x86_64"))]
    let _ = ptr;
}

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
        let (used, taken) = self.slice_as_far(offset, len, out);
        (taken == len).then_some(used)
    }

    /// As [`Sg::slice_into`], as far as the list and `out` reach: how many runs were used, and their
    /// bytes.
    pub fn slice_as_far(&self, offset: usize, len: usize, out: &mut [IoVec]) -> (usize, usize) {
        let (mut used, mut taken) = (0, 0);
        self.walk(offset, len, |p, n| {
            if let Some(slot) = out.get_mut(used) {
                // SAFETY: a part of a run that is valid for as long as this list is.
                *slot = unsafe { IoVec::new(p, n) };
                used += 1;
                taken += n;
            }
        });
        (used, taken)
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
        assert_eq!(sg.slice_into(1, 4, &mut parts[..1]), None);
        assert_eq!(sg.slice_as_far(1, 4, &mut parts[..1]), (1, 2));
        assert_eq!(sg.slice_as_far(1, 9, &mut parts), (2, 7));
        assert_eq!(sg.slice_as_far(9, 1, &mut parts), (0, 0));
        assert_eq!((a, b), ([1, 7, 8], [9, 2, 2, 2, 0]));
    }
}
