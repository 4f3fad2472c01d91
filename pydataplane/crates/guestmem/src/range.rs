//! A bounds-checked run of guest memory.

use std::marker::PhantomData;
use std::ptr::NonNull;
use std::sync::atomic::{AtomicU8, AtomicU16, Ordering};

use zerocopy::{FromBytes, Immutable, IntoBytes};

use crate::iov::IoVec;

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
        unsafe { std::ptr::copy_nonoverlapping(src, dst.as_mut_ptr(), dst.len()) };
        Ok(())
    }

    /// Copies `src` to the bytes from `offset`.
    #[inline]
    pub fn write_slice(&self, offset: usize, src: &[u8]) -> Result<(), BadAccess> {
        let dst = self.check(offset, src.len())?;
        // SAFETY: in bounds; a Rust slice never overlaps guest memory.
        unsafe { std::ptr::copy_nonoverlapping(src.as_ptr(), dst, src.len()) };
        Ok(())
    }

    /// Sets every byte to `value`.
    pub fn fill(&self, value: u8) {
        // SAFETY: the whole range.
        unsafe { std::ptr::write_bytes(self.ptr.as_ptr(), value, self.len) };
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
