//! Parameter data to the initiator, cut at the allocation length.

use crate::response::Fail;
use guestmem::Sg;

/// Writes parameter data piece by piece. What goes beyond the allocation length is dropped, which
/// is never an error (SPC-4 4.2.5.6).
pub(crate) struct Reply<'a> {
    data_in: &'a Sg,
    allocation: usize,
    length: usize,
}

impl<'a> Reply<'a> {
    /// A reply of at most `allocation` bytes.
    pub(crate) fn new(data_in: &'a Sg, allocation: usize) -> Self {
        Reply { data_in, allocation, length: 0 }
    }

    /// Appends `bytes`.
    pub(crate) fn put(&mut self, bytes: &[u8]) {
        let room = self.allocation.saturating_sub(self.length).min(bytes.len());
        self.data_in.copy_from_slice(self.length, &bytes[..room]);
        self.length += bytes.len();
    }

    /// Bytes that the initiator gets; [`Fail::Overrun`] if its buffer is shorter than that.
    pub(crate) fn end(self) -> Result<u32, Fail> {
        let sent = self.length.min(self.allocation);
        if sent > self.data_in.len() { Err(Fail::Overrun) } else { Ok(sent as u32) }
    }
}

/// Sends `bytes`, cut at `allocation`.
pub(crate) fn send(data_in: &Sg, allocation: usize, bytes: &[u8]) -> Result<u32, Fail> {
    let mut reply = Reply::new(data_in, allocation);
    reply.put(bytes);
    reply.end()
}
