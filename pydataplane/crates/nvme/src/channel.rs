//! A queue pair: it hands I/Os to the controller's thread through a queue, and has completions back through one of
//! its own.

use std::sync::Arc;
use std::thread;
use std::time::Duration;

use bdev::{AlignedBuf, Channel, ChannelStats, Completion, Io, IoError, Op, Slots, Submit};
use crossbeam_queue::ArrayQueue;
use guestmem::{IoVec, Sg};
use reactor::{IoContext, Waker, ticks};

use crate::disk::{Shared, StopOnDrop, Unit};
use crate::identify::COMPARED_MAX;
use crate::requests::{How, Request};
use crate::status::failed;

/// I/Os of a channel at a time at most.
const CHANNEL_DEPTH: u16 = 128;
/// Between two looks at I/Os that a channel waits for as it is closed.
const CLOSING_POLL: Duration = Duration::from_micros(200);

/// A channel, as the thread sees it.
pub(crate) struct Completions {
    /// Has room for all its I/Os.
    done: ArrayQueue<Completion>,
    waker: Waker,
}

impl Completions {
    pub(crate) fn new(io: &IoContext) -> Completions {
        Completions { done: ArrayQueue::new(usize::from(CHANNEL_DEPTH)), waker: io.waker() }
    }

    pub(crate) fn give(&self, completion: Completion) {
        let pushed = self.done.push(completion);
        debug_assert!(pushed.is_ok(), "a channel has more completions than I/Os");
        self.waker.wake();
    }
}

/// The end of an I/O, for its channel.
pub(crate) fn ended(io: &Io, result: Result<(), IoError>) -> Completion {
    Completion { tag: io.tag, result, ticks: 0, ended: 0 }
}

#[derive(Clone, Copy)]
struct Slot {
    io: Io,
    begun: u64,
    /// Of the latch, when it was submitted.
    failures: u64,
    compared: bool,
}

/// What is compared and written in one step: what is expected, then what is written.
struct Compared {
    data: AlignedBuf,
    run: Box<[IoVec; 1]>,
    in_use: bool,
}

/// See [`Channel`].
pub(crate) struct NvmeChannel {
    completions: Arc<Completions>,
    shared: Arc<Shared>,
    unit: u16,
    slots: Slots<Slot>,
    stats: ChannelStats,
    /// Where the controller has the fused commands.
    compared: Option<Compared>,
    _stop: Arc<StopOnDrop>,
}

impl NvmeChannel {
    pub(crate) fn new(
        shared: &Arc<Shared>,
        unit: u16,
        io: &IoContext,
        stats: ChannelStats,
        stop: Arc<StopOnDrop>,
    ) -> NvmeChannel {
        let free = Slot { io: Io::flush(0), begun: 0, failures: 0, compared: false };
        let compares = shared.units[usize::from(unit)].most.compared > 0;
        let compared = compares.then(|| Compared {
            data: AlignedBuf::zeroed(2 * COMPARED_MAX as usize),
            run: Box::new([IoVec::EMPTY]),
            in_use: false,
        });
        NvmeChannel {
            completions: Arc::new(Completions::new(io)),
            shared: Arc::clone(shared),
            unit,
            slots: Slots::new(CHANNEL_DEPTH, |_| free),
            stats,
            compared,
            _stop: stop,
        }
    }

    #[inline]
    fn unit(&self) -> &Unit {
        &self.shared.units[usize::from(self.unit)]
    }

    fn is_durable(io: &Io) -> bool {
        io.op == Op::Flush || io.fua
    }

    /// Whether an I/O is to begin.
    ///
    /// # Errors
    /// It is over, and how.
    fn check(&mut self, io: &Io) -> Result<(), Result<(), IoError>> {
        let shared = &self.shared;
        let unit = self.unit();
        let checked = io.check(&unit.geometry(), &unit.features).and_then(|()| {
            match NvmeChannel::is_durable(io) && shared.latch.is_set() {
                true => Err(IoError::Flush),
                false => Ok(()),
            }
        });
        if let Err(error) = checked {
            self.stats.error(error);
            return Err(Err(error));
        }
        if io.op == Op::Flush && !shared.cache || io.op != Op::Flush && io.blocks == 0 {
            return Err(Ok(()));
        }
        if shared.has_given_up() {
            let error = failed(io.op);
            self.stats.error(error);
            return Err(Err(error));
        }
        Ok(())
    }

    fn carry(&mut self, io: &Io, sg: Sg, how: How) -> Submit {
        let Some(at) = self.slots.next_free() else { return Submit::Full };
        let failures = self.shared.latch.failures();
        let compared = how == How::Compared;
        self.slots[at] = Slot { io: *io, begun: ticks::now(), failures, compared };
        let io = Io { tag: u64::from(at), sg, ..*io };
        let request =
            Request { completions: Arc::clone(&self.completions), unit: self.unit, io, how };
        if !self.shared.carry(request) {
            return Submit::Full;
        }
        self.slots.take();
        Submit::Pending
    }
}

impl Channel for NvmeChannel {
    fn submit(&mut self, io: &Io) -> Submit {
        match self.check(io) {
            Err(ended) => Submit::Done(ended),
            Ok(()) => self.carry(io, io.sg, How::Plain),
        }
    }

    fn submit_if(&mut self, io: &Io, expected: &Sg) -> Submit {
        let unit = self.unit();
        let (most, block_size) = (unit.most.compared, unit.block_size());
        // Such a namespace is for one host, who has looked.
        let Some(of) = &mut self.compared else { return self.submit(io) };
        if of.in_use {
            return Submit::Full;
        }
        let bytes = io.bytes(block_size as u32) as usize;
        if io.blocks > most || bytes > of.data.len() / 2 {
            self.stats.error(IoError::Unsupported);
            return Submit::Done(Err(IoError::Unsupported));
        }
        expected.copy_to_slice(0, &mut of.data[..bytes]);
        io.sg.copy_to_slice(0, &mut of.data[bytes..2 * bytes]);
        // SAFETY: this channel's memory, which it keeps until nothing is in flight.
        of.run[0] = unsafe { IoVec::new(of.data.as_mut_ptr(), 2 * bytes) };
        // SAFETY: as above; the list is boxed, and in use by one I/O at a time.
        let sg = unsafe { Sg::new(&*of.run) };
        if let Err(ended) = self.check(io) {
            return Submit::Done(ended);
        }
        let submitted = self.carry(io, sg, How::Compared);
        if let Some(of) = &mut self.compared {
            of.in_use = submitted == Submit::Pending;
        }
        submitted
    }

    fn poll(&mut self, done: &mut Vec<Completion>) -> u32 {
        let before = done.len();
        while done.len() < done.capacity()
            && let Some(over) = self.completions.done.pop()
        {
            let at = over.tag as u16;
            let Slot { io, begun, failures, compared } = self.slots[at];
            let mut result = over.result;
            // A failed flush was told to one; what others wait for may be lost as well.
            if result.is_ok()
                && NvmeChannel::is_durable(&io)
                && self.shared.latch.failures() != failures
            {
                result = Err(IoError::Flush);
            }
            if compared && let Some(of) = &mut self.compared {
                of.in_use = false;
            }
            let ended = ticks::now();
            let took = ended.saturating_sub(begun);
            let bytes = io.bytes(self.unit().block_size() as u32);
            self.stats.record(io.op, bytes, took, result);
            self.slots.give_back(at);
            done.push(Completion { tag: io.tag, result, ticks: took, ended });
        }
        (done.len() - before) as u32
    }
}

impl Drop for NvmeChannel {
    /// Waits for what is in flight: its memory is the caller's.
    fn drop(&mut self) {
        let mut left = self.slots.taken();
        while left > 0 {
            match self.completions.done.pop() {
                Some(_) => left -= 1,
                None => thread::sleep(CLOSING_POLL),
            }
        }
    }
}
