//! The data of first writes, copied, so that the metadata thread writes it with the cluster that it is for: the
//! channel has nothing left to write when the cluster is there.
//!
//! The buffers are the lvstore's, and as many as there will ever be: where none is free, a write waits for
//! its cluster and is done after it.

use bdev::AlignedBuf;
use crossbeam_queue::ArrayQueue;
use guestmem::Sg;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::thread;
use std::time::Duration;

/// Buffers of an lvstore. They take no memory before they are used.
const BUFFERS: usize = 64;
/// Bytes of one, and so of the longest write that is copied.
const BUFFER: usize = 64 << 10;
/// How often the end of a round is looked for by a channel that goes away.
const LET_GO_POLL: Duration = Duration::from_micros(50);

/// The buffers of an lvstore that are free.
pub(crate) struct Buffers(ArrayQueue<AlignedBuf>);

/// Data of one write. Its buffer is free when this is gone.
pub(crate) struct Data {
    /// `None` only while it is dropped.
    buf: Option<AlignedBuf>,
    len: usize,
    home: Arc<Buffers>,
}

impl Buffers {
    pub fn new() -> Arc<Self> {
        let free = ArrayQueue::new(BUFFERS);
        (0..BUFFERS).for_each(|_| _ = free.push(AlignedBuf::untouched(BUFFER)));
        Arc::new(Buffers(free))
    }

    /// Copies `len` bytes from byte `offset` of `sg`, once. `None`: they are too many, or no buffer is
    /// free.
    pub fn copy(self: &Arc<Self>, sg: &Sg, offset: usize, len: usize) -> Option<Data> {
        if len > BUFFER {
            return None;
        }
        let mut data = Data { buf: Some(self.0.pop()?), len, home: self.clone() };
        let copied = data.buf.as_mut().map_or(0, |buf| sg.copy_to_slice(offset, &mut buf[..len]));
        (copied == len).then_some(data)
    }
}

impl AsRef<[u8]> for Data {
    fn as_ref(&self) -> &[u8] {
        self.buf.as_ref().map_or(&[], |buf| &buf[..self.len])
    }
}

impl Drop for Data {
    fn drop(&mut self) {
        if let Some(buf) = self.buf.take() {
            _ = self.home.0.push(buf);
        }
    }
}

/// Whose data the metadata thread writes: nothing of a channel's is written any more when that is gone.
#[derive(Default)]
pub(crate) struct Writes {
    /// Data that the metadata thread has taken.
    taken: AtomicU32,
    closed: AtomicBool,
}

/// Data that the metadata thread writes.
pub(crate) struct Taken {
    data: Data,
    writes: Arc<Writes>,
}

impl Taken {
    /// `None`: the channel is gone, and so is who wanted it written.
    pub fn of(data: Data, writes: &Arc<Writes>) -> Option<Self> {
        // Said, then looked: one of the two sees the other (Dekker, with `Writes::close`).
        writes.taken.fetch_add(1, Ordering::SeqCst);
        let taken = Taken { data, writes: writes.clone() };
        (!writes.closed.load(Ordering::SeqCst)).then_some(taken)
    }
}

impl AsRef<[u8]> for Taken {
    fn as_ref(&self) -> &[u8] {
        self.data.as_ref()
    }
}

impl Drop for Taken {
    fn drop(&mut self) {
        self.writes.taken.fetch_sub(1, Ordering::SeqCst);
    }
}

impl Writes {
    /// The channel goes away: waits for the round that has data of it, as for I/O in flight.
    pub fn close(&self) {
        self.closed.store(true, Ordering::SeqCst);
        while self.taken.load(Ordering::SeqCst) > 0 {
            thread::sleep(LET_GO_POLL);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use guestmem::Bounce;

    #[test]
    fn there_are_as_many_buffers_as_there_are_and_each_comes_back() {
        let buffers = Buffers::new();
        let memory = Bounce::new();
        let sg = memory.sg(4096).unwrap();
        sg.copy_from_slice(1024, &[7; 512]);
        for _ in 0..2 {
            let lent: Vec<_> = (0..BUFFERS).map(|_| buffers.copy(&sg, 1024, 512)).collect();
            assert!(lent.iter().flatten().all(|data| data.as_ref() == [7; 512]));
            assert_eq!(lent.iter().flatten().count(), BUFFERS);
            assert!(buffers.copy(&sg, 1024, 512).is_none());
        }
        assert!(buffers.copy(&sg, 0, BUFFER + 1).is_none(), "it is too long");
        assert!(buffers.copy(&sg, 4096 - 511, 512).is_none(), "the guest has not so much");
        assert_eq!(buffers.0.len(), BUFFERS);
    }

    #[test]
    fn of_a_channel_that_is_gone_nothing_is_taken_and_its_buffer_is_free() {
        let (buffers, memory) = (Buffers::new(), Bounce::new());
        let data = || buffers.copy(&memory.sg(512).unwrap(), 0, 512).unwrap();
        let writes = Arc::new(Writes::default());
        let taken = Taken::of(data(), &writes).unwrap();
        thread::scope(|scope| {
            let closing = scope.spawn(|| writes.close());
            while !writes.closed.load(Ordering::SeqCst) {
                thread::yield_now();
            }
            assert!(Taken::of(data(), &writes).is_none());
            assert!(!closing.is_finished(), "the first is being written");
            drop(taken);
        });
        assert_eq!(buffers.0.len(), BUFFERS);
    }
}
