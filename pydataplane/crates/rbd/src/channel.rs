//! A queue pair on an image.
//!
//! An I/O is one asynchronous call of librbd's, which puts it into a queue of its own and returns. Data
//! goes to and from the guest's memory as librbd does it: what is read is written there by librbd's
//! threads; what is written is copied by librbd first, as a guest may change it while it is on its way
//! (`rbd_disable_zero_copy_writes`). What librbd would do all at once, such as to discard a terabyte, is
//! done in parts, one after the other.

use std::collections::VecDeque;
use std::ptr;
use std::sync::Arc;
use std::thread;
use std::time::Duration;

use bdev::{
    AlignedBuf, Channel, ChannelStats, Completion, Features, Geometry, Io, IoError, Late, Op,
    Slots, Submit,
};
use guestmem::{IoVec, Sg};
use libc::{c_int, c_void};
use reactor::IoContext;

use crate::errno::to_error;
use crate::ffi::{Aio, EBLOCKLISTED};
use crate::hold::Wish;
use crate::image::Image;
use crate::ring::{Outcome, Ring};

/// I/Os in flight on a channel at most.
const DEPTH: u16 = 256;
/// Objects that one call unmaps or zeroes at most: each is a message of its own.
const OBJECTS_AT_ONCE: u64 = 64;
/// Runs of memory that one call takes at most (`IOV_MAX`).
const RUNS_AT_ONCE: usize = 1024;
/// Bytes that are compared and written in one step at most.
const COMPARED_AT_ONCE: usize = 64 << 10;
/// How often the end of what is in flight is looked for where a channel is closed too early.
const LOOK: Duration = Duration::from_millis(1);

// A list of runs is one of `struct iovec`.
const _: () = assert!(size_of::<IoVec>() == size_of::<libc::iovec>());

/// An I/O in flight.
#[derive(Clone, Copy)]
struct InFlight {
    io: Io,
    begun: u64,
    /// Bytes that are done.
    done: u64,
    /// Runs of memory that are done.
    runs: usize,
    /// Bytes of the part that is with librbd.
    part: u64,
    how: How,
}

/// Which of librbd's calls a write is.
#[derive(Clone, Copy, PartialEq, Eq)]
enum How {
    Plain,
    /// Only where the blocks are as expected.
    Compared,
    /// One piece of data again and again.
    Same,
}

/// What is compared and written in one step, in one piece each, as librbd wants it.
struct Compared {
    expected: AlignedBuf,
    written: AlignedBuf,
    /// Where librbd says at which byte they differ, which nobody asks.
    mismatch: Box<u64>,
    in_use: bool,
}

impl InFlight {
    fn new(io: Io, begun: u64) -> InFlight {
        InFlight { io, begun, done: 0, runs: 0, part: 0, how: How::Plain }
    }
}

/// See [`Channel`].
pub(crate) struct RbdChannel {
    image: Arc<Image>,
    features: Features,
    slots: Slots<InFlight>,
    ring: Arc<Ring>,
    late: Late,
    /// I/Os that wait for the image to be locked, or held back no more, in order.
    parked: VecDeque<u16>,
    /// How often what waited had been given up when they began to.
    given_up: u64,
    stats: ChannelStats,
    /// Of an image that other hosts write to.
    compared: Option<Compared>,
}

impl RbdChannel {
    pub(crate) fn new(
        image: Arc<Image>,
        features: Features,
        stats: ChannelStats,
        io: &IoContext,
    ) -> RbdChannel {
        let compared = image.source().shared.then(|| Compared {
            expected: AlignedBuf::untouched(COMPARED_AT_ONCE),
            written: AlignedBuf::untouched(COMPARED_AT_ONCE),
            mismatch: Box::new(0),
            in_use: false,
        });
        let free = InFlight::new(Io::flush(0), 0);
        let ring = Ring::new(DEPTH, io.waker());
        image.hold.add(Arc::downgrade(&ring));
        RbdChannel {
            image,
            features,
            slots: Slots::new(DEPTH, |_| free),
            ring,
            late: Late::with_capacity(DEPTH),
            parked: VecDeque::with_capacity(usize::from(DEPTH)),
            given_up: 0,
            stats,
            compared,
        }
    }

    fn geometry(&self) -> Geometry {
        let block_size = self.image.block_size();
        Geometry {
            block_size,
            physical_block_size: block_size,
            num_blocks: self.image.num_blocks(),
        }
    }

    /// Whether an I/O is to begin.
    ///
    /// # Errors
    /// It is over, and how.
    fn check(&mut self, io: &Io) -> Result<(), Result<(), IoError>> {
        let checked = match self.image.is_fenced() {
            true => Err(IoError::Removed),
            false => io.check(&self.geometry(), &self.features),
        };
        if let Err(error) = checked {
            self.stats.error(error);
            return Err(Err(error));
        }
        if io.blocks == 0 && io.op != Op::Flush { Err(Ok(())) } else { Ok(()) }
    }

    /// Begins an I/O, unless it has to wait until the image is locked, or not held back any more.
    #[inline]
    fn begin(&mut self, at: u16) {
        // Reads as well: what the other host has acknowledged may be in its librbd until it has let go.
        match self.image.hold.may_begin() {
            true => self.start(at),
            false => self.park(at),
        }
    }

    #[cold]
    fn park(&mut self, at: u16) {
        if self.parked.is_empty() {
            self.given_up = self.image.hold.given_up();
        }
        self.parked.push_back(at);
        if !self.image.hold.is_held() {
            self.image.wish(Wish::Take);
        }
    }

    /// Begins what waited until the image is locked, or ends it if nobody wants it any more.
    #[cold]
    fn look_at_parked(&mut self, done: &mut Vec<Completion>) {
        let given_up = self.image.is_fenced() || self.image.hold.given_up() != self.given_up;
        if given_up {
            while done.len() < done.capacity() {
                let Some(at) = self.parked.pop_front() else { break };
                done.push(self.over(at, Err(IoError::Removed)));
            }
        } else if self.image.hold.may_begin() {
            while let Some(at) = self.parked.pop_front() {
                self.start(at);
            }
        }
    }

    /// An I/O is over: its slot is free.
    fn over(&mut self, at: u16, result: Result<(), IoError>) -> Completion {
        let InFlight { io, begun, how, .. } = self.slots[at];
        let ended = reactor::ticks::now();
        let ticks = ended.saturating_sub(begun);
        self.stats.record(io.op, io.bytes(self.image.block_size()), ticks, result);
        if how == How::Compared
            && let Some(compared) = &mut self.compared
        {
            compared.in_use = false;
        }
        self.slots.give_back(at);
        Completion { tag: io.tag, result, ticks, ended }
    }

    /// Gives the next part of an I/O to librbd; its end comes through the ring.
    fn start(&mut self, at: u16) {
        let context = self.ring.begin(at);
        let mut aio: Aio = ptr::null_mut();
        let library = self.image.library();
        // SAFETY: `context` goes to the callback once, or back below.
        let made = unsafe { (library.rbd_aio_create_completion)(context, ended, &mut aio) };
        if made < 0 {
            // SAFETY: nobody else has it.
            return unsafe { Ring::end(context, Outcome::from(made)) };
        }
        let taken = self.call(at, aio);
        if taken < 0 {
            // SAFETY: a call that was not taken has no callback: the completion is released and `context`
            // given back by nobody else.
            unsafe {
                (library.rbd_aio_release)(aio);
                Ring::end(context, Outcome::from(taken));
            }
        }
    }

    fn call(&mut self, at: u16, aio: Aio) -> c_int {
        let (image, library) = (self.image.handle(), self.image.library());
        let block_size = self.image.block_size();
        let flight = &mut self.slots[at];
        let io = flight.io;
        let left = io.bytes(block_size) - flight.done;
        let offset = io.lba * u64::from(block_size) + flight.done;
        match io.op {
            Op::Write if flight.how == How::Compared => {
                let Some(of) = &mut self.compared else { return -libc::EINVAL };
                flight.part = left;
                let (expected, written) = (of.expected.as_ptr(), of.written.as_ptr());
                // SAFETY: an open image; buffers of that many bytes, which stay until the I/O has ended, as
                // does where the context is to be told.
                let taken = unsafe {
                    (library.rbd_aio_compare_and_write)(
                        image,
                        offset,
                        left as usize,
                        expected.cast(),
                        written.cast(),
                        aio,
                        &raw mut *of.mismatch,
                        0,
                    )
                };
                taken.min(0) as c_int
            }
            Op::Write if flight.how == How::Same => {
                let [piece] = io.sg.as_slice() else { return -libc::EOPNOTSUPP };
                flight.part = left;
                let (base, len) = (piece.base().cast_const().cast(), piece.len());
                // SAFETY: an open image; the piece stays as it is until the I/O has ended (`Sg::new`).
                unsafe {
                    (library.rbd_aio_writesame)(image, offset, left as usize, base, len, aio, 0)
                }
            }
            Op::Read | Op::Write => {
                let runs = &io.sg.as_slice()[flight.runs..];
                let runs = &runs[..runs.len().min(RUNS_AT_ONCE)];
                flight.part = match flight.runs + runs.len() == io.sg.as_slice().len() {
                    true => left,
                    false => runs.iter().map(|run| run.len() as u64).sum(),
                };
                let call =
                    if io.op == Op::Read { library.rbd_aio_readv } else { library.rbd_aio_writev };
                let (list, count) = (runs.as_ptr().cast::<libc::iovec>(), runs.len() as c_int);
                // SAFETY: an open image; the list and its memory stay as they are until the I/O has ended
                // (`Sg::new`).
                unsafe { call(image, list, count, offset, aio) }
            }
            // SAFETY: an open image.
            Op::Flush => unsafe { (library.rbd_aio_flush)(image, aio) },
            Op::Unmap | Op::WriteZeroes => {
                let most = OBJECTS_AT_ONCE * self.image.object_size();
                flight.part = left.min(most - offset % most);
                match io.op {
                    // SAFETY: an open image.
                    Op::Unmap => unsafe {
                        (library.rbd_aio_discard)(image, offset, flight.part, aio)
                    },
                    // SAFETY: an open image.
                    _ => unsafe {
                        (library.rbd_aio_write_zeroes)(
                            image,
                            offset,
                            flight.part as usize,
                            aio,
                            0,
                            0,
                        )
                    },
                }
            }
        }
    }

    /// A part of an I/O has ended: how the I/O has, if it has.
    fn ended(&mut self, at: u16, outcome: Outcome) -> Option<Result<(), IoError>> {
        let flight = &mut self.slots[at];
        let Io { op, .. } = flight.io;
        if outcome < 0 {
            let errno = i32::try_from(-outcome).unwrap_or(libc::EIO);
            if errno == EBLOCKLISTED {
                self.image.fence();
            }
            return Some(Err(to_error(op, errno)));
        }
        if op == Op::Read && outcome as u64 != flight.part {
            // The image has become smaller meanwhile.
            return Some(Err(IoError::OutOfRange));
        }
        flight.done += flight.part;
        if op == Op::Flush || flight.done == flight.io.bytes(self.image.block_size()) {
            return Some(Ok(()));
        }
        if matches!(op, Op::Read | Op::Write) {
            flight.runs += RUNS_AT_ONCE;
        }
        if self.image.is_fenced() {
            return Some(Err(IoError::Removed));
        }
        self.start(at);
        None
    }
}

impl Channel for RbdChannel {
    fn submit(&mut self, io: &Io) -> Submit {
        if let Err(ended) = self.check(io) {
            return Submit::Done(ended);
        }
        let Some(at) = self.slots.take() else { return Submit::Full };
        self.slots[at] = InFlight::new(*io, reactor::ticks::now());
        self.begin(at);
        Submit::Pending
    }

    fn same_at_once(&self) -> u64 {
        OBJECTS_AT_ONCE * self.image.object_size() / u64::from(self.image.block_size())
    }

    fn submit_same(&mut self, io: &Io) -> Submit {
        let bytes = io.bytes(self.image.block_size());
        let piece = io.sg.len() as u64;
        // Its list is not as long as its blocks.
        let checked = self.check(&Io { op: Op::WriteZeroes, ..*io });
        match checked {
            Err(ended) => Submit::Done(ended),
            Ok(()) if piece == 0 || !bytes.is_multiple_of(piece) => {
                self.stats.error(IoError::BadLength);
                Submit::Done(Err(IoError::BadLength))
            }
            Ok(()) => {
                let Some(at) = self.slots.take() else { return Submit::Full };
                self.slots[at] =
                    InFlight { how: How::Same, ..InFlight::new(*io, reactor::ticks::now()) };
                self.begin(at);
                Submit::Pending
            }
        }
    }

    fn submit_if(&mut self, io: &Io, expected: &Sg) -> Submit {
        // Who has the image alone has looked already.
        let Some(of) = &mut self.compared else { return self.submit(io) };
        if of.in_use {
            return Submit::Full;
        }
        let (block_size, object_size) = (self.image.block_size(), self.image.object_size());
        let bytes = io.bytes(block_size) as usize;
        let first = io.lba.saturating_mul(u64::from(block_size));
        let last = first.saturating_add(bytes as u64).saturating_sub(1);
        // What is in two objects is not written in one step.
        if bytes > COMPARED_AT_ONCE || first / object_size != last / object_size {
            self.stats.error(IoError::Unsupported);
            return Submit::Done(Err(IoError::Unsupported));
        }
        expected.copy_to_slice(0, &mut of.expected[..bytes]);
        io.sg.copy_to_slice(0, &mut of.written[..bytes]);
        let Err(ended) = self.check(io) else {
            let Some(at) = self.slots.take() else { return Submit::Full };
            self.slots[at] =
                InFlight { how: How::Compared, ..InFlight::new(*io, reactor::ticks::now()) };
            if let Some(of) = &mut self.compared {
                of.in_use = true;
            }
            self.start(at);
            return Submit::Pending;
        };
        Submit::Done(ended)
    }

    fn poll(&mut self, done: &mut Vec<Completion>) -> u32 {
        let before = done.len();
        if !self.late.is_empty() && !self.late.hand_over(done) {
            return (done.len() - before) as u32;
        }
        if !self.parked.is_empty() {
            self.look_at_parked(done);
        }
        while done.len() < done.capacity() {
            let Some((at, outcome)) = self.ring.pop() else { break };
            let Some(result) = self.ended(at, outcome) else { continue };
            let over = self.over(at, result);
            done.push(over);
        }
        (done.len() - before) as u32
    }
}

impl Drop for RbdChannel {
    /// Whoever closes a channel waits first until nothing is in flight. Where one did not, librbd still has
    /// memory of his.
    fn drop(&mut self) {
        while let Some(at) = self.parked.pop_front() {
            self.slots.give_back(at);
        }
        while self.slots.taken() > 0 {
            match self.ring.pop() {
                Some((at, _)) => self.slots.give_back(at),
                None => thread::sleep(LOOK),
            }
        }
    }
}

/// Called by librbd, on a thread of its own, when a call has ended.
extern "C" fn ended(aio: Aio, context: *mut c_void) {
    let Ok(library) = crate::Library::loaded() else { return };
    // SAFETY: a completion that has ended.
    let outcome = unsafe { (library.rbd_aio_get_return_value)(aio) };
    // SAFETY: as above, released once.
    unsafe { (library.rbd_aio_release)(aio) };
    // SAFETY: of `Ring::begin`, given to one call.
    unsafe { Ring::end(context, outcome as Outcome) };
}
