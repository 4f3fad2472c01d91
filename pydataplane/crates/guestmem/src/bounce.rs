//! Host memory for the rare I/O that cannot use the guest's own buffers.

use crate::range::{IoVec, Sg};
use parking_lot::Mutex;
use std::alloc::{Layout, handle_alloc_error};
use std::ptr;

/// 64 KiB of page-aligned host memory, handed out as [`Sg`]s from its first byte.
///
/// The memory comes from a process-wide pool and goes back to it, never to the system: an [`Sg`]
/// of it names valid memory for ever, which is what lets [`Bounce::sg`] be safe. Who reuses the
/// buffer while an I/O on it is in flight gets wrong data, nothing worse. Pages cost nothing
/// until they are used.
#[derive(Debug)]
pub struct Bounce {
    runs: &'static [IoVec],
}

/// Buffers whose owners are gone. Bounded by the most that were ever alive at once.
static POOL: Mutex<Vec<&'static [IoVec]>> = Mutex::new(Vec::new());

impl Bounce {
    /// Bytes of a buffer.
    pub const LEN: usize = 64 << 10;
    /// Lengths come in multiples of this many bytes.
    pub const GRAIN: usize = 512;

    /// A buffer of zeros. Takes a lock and may map memory: for control paths. Ends the process,
    /// as any allocation does, when the system has no memory.
    pub fn new() -> Self {
        let free = POOL.lock().pop();
        Bounce { runs: free.unwrap_or_else(map) }
    }

    /// The first `len` bytes as a list; `None` unless `len` is a multiple of [`Bounce::GRAIN`]
    /// and at most [`Bounce::LEN`].
    #[inline]
    pub fn sg(&self, len: usize) -> Option<Sg> {
        if len == 0 {
            return Some(Sg::EMPTY);
        }
        if !len.is_multiple_of(Self::GRAIN) {
            return None;
        }
        let run = self.runs.get(len / Self::GRAIN - 1)?;
        // SAFETY: the run is part of a leaked slice that nobody changes, and its memory is never
        // unmapped.
        Some(unsafe { Sg::new(std::slice::from_ref(run)) })
    }
}

impl Default for Bounce {
    fn default() -> Self {
        Self::new()
    }
}

impl Drop for Bounce {
    fn drop(&mut self) {
        let base = self.runs[0].base();
        // Its pages read as zeros afterwards, so that the next owner sees nothing of this one. Miri
        // does not know the advice.
        let cleared = !cfg!(miri)
            // SAFETY: the range is this buffer's own private anonymous mapping.
            && unsafe {
                rustix::mm::madvise(base.cast(), Self::LEN, rustix::mm::Advice::LinuxDontNeed)
            }
            .is_ok();
        if !cleared {
            // SAFETY: the mapping is LEN writable bytes.
            unsafe { ptr::write_bytes(base, 0, Self::LEN) };
        }
        POOL.lock().push(self.runs);
    }
}

/// Maps a new buffer for ever, with one run for each length.
fn map() -> &'static [IoVec] {
    use rustix::mm::{MapFlags, ProtFlags, mmap_anonymous};
    // SAFETY: a fresh private mapping at an address of the kernel's choice touches nothing else.
    let mapped = unsafe {
        mmap_anonymous(
            ptr::null_mut(),
            Bounce::LEN,
            ProtFlags::READ | ProtFlags::WRITE,
            MapFlags::PRIVATE,
        )
    };
    let Ok(base) = mapped else { handle_alloc_error(Layout::new::<[u8; Bounce::LEN]>()) };
    let runs: Vec<IoVec> = (1..=Bounce::LEN / Bounce::GRAIN)
        // SAFETY: the mapping is LEN bytes and is never unmapped.
        .map(|n| unsafe { IoVec::new(base.cast(), n * Bounce::GRAIN) })
        .collect();
    runs.leak()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lengths_are_whole_grains_up_to_the_end() {
        let buffer = Bounce::new();
        assert_eq!(buffer.sg(0).unwrap().len(), 0);
        assert_eq!(buffer.sg(512).unwrap().len(), 512);
        assert_eq!(buffer.sg(Bounce::LEN).unwrap().len(), Bounce::LEN);
        assert!(buffer.sg(513).is_none());
        assert!(buffer.sg(Bounce::LEN + 512).is_none());
        assert_eq!(buffer.sg(512).unwrap().as_slice()[0].base() as usize % 4096, 0);
    }

    #[test]
    fn a_reused_buffer_shows_nothing_of_its_last_owner() {
        for _ in 0..4 {
            let buffer = Bounce::new();
            let sg = buffer.sg(Bounce::LEN).unwrap();
            let mut seen = vec![1u8; Bounce::LEN];
            sg.copy_to_slice(0, &mut seen);
            assert!(seen.iter().all(|b| *b == 0));
            sg.copy_from_slice(0, &vec![0xA5; Bounce::LEN]);
        }
    }
}
