//! Aligned copies of buffers that direct I/O does not take, preallocated by each channel.

use std::io;

use guestmem::Sg;

use crate::ram::Ram;

/// Bytes of one bounce buffer; a larger I/O goes through it in several steps.
pub(super) const BOUNCE_SIZE: usize = 64 << 10;

/// Bounce buffers of a channel; touched, and so taken from memory, only when needed.
const BOUNCES: usize = 16;

/// A bounce buffer that belongs to a slot until it is given back.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Bounce(u8);

/// The bounce buffers of a channel.
pub(super) struct Bounces {
    memory: Ram,
    free: Vec<Bounce>,
}

impl Bounces {
    pub(super) fn new() -> io::Result<Self> {
        let free = (0..BOUNCES as u8).map(Bounce).collect();
        Ok(Bounces { memory: Ram::new(BOUNCES * BOUNCE_SIZE)?, free })
    }

    pub(super) fn take(&mut self) -> Option<Bounce> {
        self.free.pop()
    }

    pub(super) fn give_back(&mut self, b: Bounce) {
        self.free.push(b);
    }

    pub(super) fn base(&self, b: Bounce) -> *mut u8 {
        self.memory.at(usize::from(b.0) * BOUNCE_SIZE, BOUNCE_SIZE)
    }

    #[cfg(test)]
    pub(super) fn base_of_all(&self) -> *mut u8 {
        self.base(Bounce(0))
    }

    /// Copies `len` bytes of `sg` from `offset` on into `b`.
    pub(super) fn fill(&mut self, b: Bounce, sg: &Sg, offset: usize, len: usize) {
        sg.copy_to_slice(offset, self.bytes(b, len));
    }

    /// Copies the first `len` bytes of `b` into `sg` at `offset`.
    pub(super) fn drain(&mut self, b: Bounce, sg: &Sg, offset: usize, len: usize) {
        sg.copy_from_slice(offset, self.bytes(b, len));
    }

    fn bytes(&mut self, b: Bounce, len: usize) -> &mut [u8] {
        assert!(len <= BOUNCE_SIZE);
        // SAFETY: `len` bytes of initialised memory of this channel, borrowed exclusively; the
        // kernel uses a bounce buffer only between an I/O's push and its completion, and the
        // slot that owns `b` copies only outside of that.
        unsafe { std::slice::from_raw_parts_mut(self.base(b), len) }
    }
}
