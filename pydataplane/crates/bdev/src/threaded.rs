//! A queue pair of a device whose I/O a thread of its own carries out: it hands I/Os over through a queue of the
//! device's, and has completions back through one of its own.

mod queue;

use std::sync::Arc;
use std::thread;
use std::time::Duration;

use crossbeam_queue::ArrayQueue;
use guestmem::{IoVec, Sg};
use reactor::{IoContext, Waker, ticks};

use crate::{
    AlignedBuf, COPY_AT_ONCE, Channel, ChannelStats, Completion, Features, FlushLatch, Geometry,
    Io, IoError, Op, Slots, Submit, Waiter,
};

pub use queue::ThreadQueue;

/// I/Os of a channel at a time at most.
const DEPTH: u16 = 128;
/// Between two looks at I/Os that a channel waits for as it is closed.
const CLOSING_POLL: Duration = Duration::from_micros(200);

/// What a [`ThreadChannel`] asks of its device, or of the part of it that it is on. Nothing of it may block, lock or
/// allocate.
pub trait Threaded {
    /// Size now.
    fn geometry(&self) -> Geometry;
    /// Abilities.
    fn features(&self) -> &Features;
    /// What remembers a failed flush.
    fn latch(&self) -> &FlushLatch;
    /// Whether there is anything to flush.
    fn flushes(&self) -> bool;
    /// Whether nobody has answered for too long, so that further I/O fails at once.
    fn has_given_up(&self) -> bool;
    /// Blocks that the device compares and writes in one step at most; 0: it does not.
    fn compared_max(&self) -> u64;
    /// Hands an I/O to the thread; has it back where there is no room ([`ThreadQueue::push`]).
    fn hand_over(
        &self,
        request: ThreadRequest,
        waiter: Option<&Arc<Waiter>>,
    ) -> Result<(), ThreadRequest>;
}

/// Which command a write is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum WriteHow {
    /// A write; or no write at all.
    Plain,
    /// What compares and writes in one step: its list has what is expected, then what is written.
    Compared,
}

/// An I/O on its way to the thread, which ends it by [`ThreadRequest::end`]; one that is dropped is aborted.
pub struct ThreadRequest {
    /// Until it has ended.
    completions: Option<Arc<Completions>>,
    /// Its tag is the channel's, of no meaning for the thread.
    pub io: Io,
    /// Which command it is.
    pub how: WriteHow,
}

impl ThreadRequest {
    /// Tells the channel how it ended. Nothing of its memory may be used any more.
    pub fn end(mut self, result: Result<(), IoError>) {
        self.give(result);
    }

    fn give(&mut self, result: Result<(), IoError>) {
        if let Some(completions) = self.completions.take() {
            completions.give(Completion { tag: self.io.tag, result, ticks: 0, ended: 0 });
        }
    }
}

impl Drop for ThreadRequest {
    fn drop(&mut self) {
        self.give(Err(IoError::Aborted));
    }
}

/// A channel, as the thread sees it.
pub struct Completions {
    /// Has room for all its I/Os.
    done: ArrayQueue<Completion>,
    waker: Waker,
}

impl Completions {
    /// Of a channel that is polled where `io` is.
    pub fn new(io: &IoContext) -> Arc<Completions> {
        Arc::new(Completions { done: ArrayQueue::new(usize::from(DEPTH)), waker: io.waker() })
    }

    /// An I/O as if of the channel.
    pub fn request(self: &Arc<Self>, io: Io, how: WriteHow) -> ThreadRequest {
        ThreadRequest { completions: Some(Arc::clone(self)), io, how }
    }

    /// The next one that has ended.
    pub fn take(&self) -> Option<Completion> {
        self.done.pop()
    }

    fn give(&self, completion: Completion) {
        let pushed = self.done.push(completion);
        debug_assert!(pushed.is_ok(), "a channel has more completions than I/Os");
        self.waker.wake();
    }
}

#[derive(Clone, Copy)]
struct Slot {
    io: Io,
    begun: u64,
    /// Of the latch, when it was submitted.
    failures: u64,
    how: WriteHow,
}

/// What is compared and written in one step: what is expected, then what is written.
struct Compared {
    data: AlignedBuf,
    run: Box<[IoVec; 1]>,
    in_use: bool,
}

/// See the file's comment.
pub struct ThreadChannel<D: Threaded> {
    device: D,
    completions: Arc<Completions>,
    waiter: Arc<Waiter>,
    slots: Slots<Slot>,
    stats: ChannelStats,
    /// Where the device compares and writes in one step.
    compared: Option<Compared>,
}

impl<D: Threaded> ThreadChannel<D> {
    /// Of a device, whose thread carries out what it is given as long as `device` lives.
    pub fn new(device: D, io: &IoContext, stats: ChannelStats) -> ThreadChannel<D> {
        let free = Slot { io: Io::flush(0), begun: 0, failures: 0, how: WriteHow::Plain };
        let compared = (device.compared_max() > 0).then(|| Compared {
            data: AlignedBuf::zeroed(2 * COPY_AT_ONCE),
            run: Box::new([IoVec::EMPTY]),
            in_use: false,
        });
        ThreadChannel {
            device,
            completions: Completions::new(io),
            waiter: Waiter::new(io.waker()),
            slots: Slots::new(DEPTH, |_| free),
            stats,
            compared,
        }
    }

    /// Whether an I/O may begin.
    ///
    /// # Errors
    /// It is over, and how.
    fn may_begin(&mut self, io: &Io) -> Result<(), Result<(), IoError>> {
        let device = &self.device;
        let mut checked = io.check(&device.geometry(), device.features());
        if checked.is_ok() && io.is_durable() && device.latch().is_set() {
            checked = Err(IoError::Flush);
        }
        let is_nothing = match io.op {
            Op::Flush => !device.flushes(),
            _ => io.blocks == 0,
        };
        match checked {
            Ok(()) if is_nothing => return Err(Ok(())),
            Ok(()) if device.has_given_up() => checked = Err(io.op.failed()),
            _ => {}
        }
        checked.map_err(|error| {
            self.stats.error(error);
            Err(error)
        })
    }

    fn hand_over(&mut self, io: &Io, sg: Sg, how: WriteHow) -> Submit {
        let Some(at) = self.slots.next_free() else { return Submit::Full };
        let failures = self.device.latch().failures();
        self.slots[at] = Slot { io: *io, begun: ticks::now(), failures, how };
        let request = self.completions.request(Io { tag: u64::from(at), sg, ..*io }, how);
        // Else one of its own ends, and it looks again.
        let waiter = (self.slots.taken() == 0).then_some(&self.waiter);
        if let Err(mut request) = self.device.hand_over(request, waiter) {
            // It has not begun, so it does not end.
            request.completions = None;
            return Submit::Full;
        }
        self.slots.take();
        Submit::Pending
    }
}

impl<D: Threaded> Channel for ThreadChannel<D> {
    fn submit(&mut self, io: &Io) -> Submit {
        match self.may_begin(io) {
            Err(ended) => Submit::Done(ended),
            Ok(()) => self.hand_over(io, io.sg, WriteHow::Plain),
        }
    }

    fn submit_if(&mut self, io: &Io, expected: &Sg) -> Submit {
        let most = self.device.compared_max();
        let bytes = io.bytes(self.device.geometry().block_size) as usize;
        // Such a device is for one host, who has looked.
        let Some(of) = &mut self.compared else { return self.submit(io) };
        if of.in_use {
            return Submit::Full;
        }
        if io.blocks > most || bytes > COPY_AT_ONCE {
            self.stats.error(IoError::Unsupported);
            return Submit::Done(Err(IoError::Unsupported));
        }
        expected.copy_to_slice(0, &mut of.data[..bytes]);
        io.sg.copy_to_slice(0, &mut of.data[bytes..2 * bytes]);
        // SAFETY: this channel's memory, which it keeps until nothing is in flight.
        of.run[0] = unsafe { IoVec::new(of.data.as_mut_ptr(), 2 * bytes) };
        // SAFETY: as above; the list is boxed, and in use by one I/O at a time.
        let sg = unsafe { Sg::new(&*of.run) };
        if let Err(ended) = self.may_begin(io) {
            return Submit::Done(ended);
        }
        let submitted = self.hand_over(io, sg, WriteHow::Compared);
        if let Some(of) = &mut self.compared {
            of.in_use = submitted == Submit::Pending;
        }
        submitted
    }

    fn poll(&mut self, done: &mut Vec<Completion>) -> u32 {
        let before = done.len();
        while done.len() < done.capacity()
            && let Some(over) = self.completions.take()
        {
            let at = over.tag as u16;
            let Slot { io, begun, failures, how } = self.slots[at];
            let mut result = over.result;
            // A failed flush was told to one; what others wait for may be lost as well.
            if result.is_ok() && io.is_durable() && self.device.latch().failures() != failures {
                result = Err(IoError::Flush);
            }
            if how == WriteHow::Compared
                && let Some(of) = &mut self.compared
            {
                of.in_use = false;
            }
            let ended = ticks::now();
            let took = ended.saturating_sub(begun);
            let bytes = io.bytes(self.device.geometry().block_size);
            self.stats.record(io.op, bytes, took, result);
            self.slots.give_back(at);
            done.push(Completion { tag: io.tag, result, ticks: took, ended });
        }
        (done.len() - before) as u32
    }
}

impl<D: Threaded> Drop for ThreadChannel<D> {
    /// Waits for what is in flight: its memory is the caller's.
    fn drop(&mut self) {
        let mut left = self.slots.taken();
        while left > 0 {
            match self.completions.take() {
                Some(_) => left -= 1,
                None => thread::sleep(CLOSING_POLL),
            }
        }
    }
}

#[cfg(test)]
mod tests;
