//! Memory for the data of one command at a time.

use std::ops::{Deref, DerefMut};

use bdev::AlignedBuf;
use guestmem::{IoVec, Sg};

use crate::conversation::Data;

/// See the file's comment.
pub(crate) struct Buffer {
    data: AlignedBuf,
    run: Box<[IoVec; 1]>,
}

impl Buffer {
    /// `len` bytes, which are zero.
    pub(crate) fn new(len: usize) -> Buffer {
        let mut data = AlignedBuf::zeroed(len);
        // SAFETY: all of the buffer, which goes with the list.
        let run = unsafe { Box::new([IoVec::new(data.as_mut_ptr(), len)]) };
        Buffer { data, run }
    }

    /// All of it, for a command that fills it.
    ///
    /// # Safety
    /// It is neither dropped nor used by anything else before the command is over.
    pub(crate) unsafe fn fill(&self) -> Data {
        // SAFETY: the list is boxed and never changed; the caller.
        Data::In(unsafe { Sg::new(&*self.run) }, 0, self.data.len())
    }

    /// Its first `len` bytes, for a command that they are the data of.
    ///
    /// # Safety
    /// As of [`Buffer::fill`].
    pub(crate) unsafe fn send(&self, len: usize) -> Data {
        // SAFETY: as above.
        Data::Out(unsafe { Sg::new(&*self.run) }, 0, len.min(self.data.len()))
    }
}

impl Deref for Buffer {
    type Target = [u8];

    fn deref(&self) -> &[u8] {
        &self.data
    }
}

impl DerefMut for Buffer {
    fn deref_mut(&mut self) -> &mut [u8] {
        &mut self.data
    }
}
