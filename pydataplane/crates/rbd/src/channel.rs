//! A queue pair on an image.
//!
//! An I/O is one asynchronous call of librbd's, which puts it into a queue of its own and returns. Data
//! goes to and from the guest's memory as librbd does it: what is read is written there by librbd's
//! threads; what is written is copied by librbd first, as a guest may change it while it is on its way
//! (`rbd_disable_zero_copy_writes`). What librbd would do all at once, such as to discard a terabyte, is
//! done in parts, one after the other.

use std::ptr;
use std::sync::Arc;
use std::thread;
use std::time::Duration;

use bdev::{
    Channel, ChannelStats, Completion, Features, Geometry, Io, IoError, Late, Op, Slots, Submit,
};
use guestmem::IoVec;
use libc::{c_int, c_void};
use reactor::IoContext;

use crate::errno::to_error;
use crate::ffi::{Aio, EBLOCKLISTED};
use crate::image::Image;
use crate::ring::{Outcome, Ring};

/// I/Os in flight on a channel at most.
const DEPTH: u16 = 256;
/// Objects that one call unmaps or zeroes at most: each is a message of its own.
const OBJECTS_AT_ONCE: u64 = 64;
/// Runs of memory that one call takes at most (`IOV_MAX`).
const RUNS_AT_ONCE: usize = 1024;
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
}

/// See [`Channel`].
pub(crate) struct RbdChannel {
    image: Arc<Image>,
    features: Features,
    slots: Slots<InFlight>,
    ring: Arc<Ring>,
    late: Late,
    stats: ChannelStats,
}

impl RbdChannel {
    pub(crate) fn new(
        image: Arc<Image>,
        features: Features,
        stats: ChannelStats,
        io: &IoContext,
    ) -> RbdChannel {
        let free = InFlight { io: Io::flush(0), begun: 0, done: 0, runs: 0, part: 0 };
        RbdChannel {
            image,
            features,
            slots: Slots::new(DEPTH, |_| free),
            ring: Ring::new(DEPTH, io.waker()),
            late: Late::with_capacity(DEPTH),
            stats,
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

    /// Gives the next part of an I/O to librbd; its end comes through the ring.
    fn start(&mut self, at: u16) {
        let place = self.ring.begin(at);
        let mut aio: Aio = ptr::null_mut();
        let library = self.image.library();
        // SAFETY: `place` goes to the callback once, or back below.
        let made = unsafe { (library.rbd_aio_create_completion)(place, ended, &mut aio) };
        if made < 0 {
            // SAFETY: nobody else has it.
            return unsafe { Ring::end(place, Outcome::from(made)) };
        }
        let taken = self.call(at, aio);
        if taken < 0 {
            // SAFETY: a call that was not taken has no callback: the completion is released and `place`
            // given back by nobody else.
            unsafe {
                (library.rbd_aio_release)(aio);
                Ring::end(place, Outcome::from(taken));
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
        let checked = io.check(&self.geometry(), &self.features);
        let checked = match self.image.is_fenced() {
            true => Err(IoError::Removed),
            false => checked,
        };
        if let Err(error) = checked {
            self.stats.error(error);
            return Submit::Done(Err(error));
        }
        if io.blocks == 0 && io.op != Op::Flush {
            return Submit::Done(Ok(()));
        }
        let Some(at) = self.slots.take() else { return Submit::Full };
        let begun = reactor::ticks::now();
        self.slots[at] = InFlight { io: *io, begun, done: 0, runs: 0, part: 0 };
        self.start(at);
        Submit::Pending
    }

    fn poll(&mut self, done: &mut Vec<Completion>) -> u32 {
        let before = done.len();
        if !self.late.is_empty() && !self.late.hand_over(done) {
            return (done.len() - before) as u32;
        }
        while done.len() < done.capacity() {
            let Some((at, outcome)) = self.ring.pop() else { break };
            let Some(result) = self.ended(at, outcome) else { continue };
            let InFlight { io, begun, .. } = self.slots[at];
            let ended = reactor::ticks::now();
            let ticks = ended.saturating_sub(begun);
            self.stats.record(io.op, io.bytes(self.image.block_size()), ticks, result);
            self.slots.give_back(at);
            done.push(Completion { tag: io.tag, result, ticks, ended });
        }
        (done.len() - before) as u32
    }
}

impl Drop for RbdChannel {
    /// Whoever closes a channel waits first until nothing is in flight. Where one did not, librbd still has
    /// memory of his.
    fn drop(&mut self) {
        while self.slots.taken() > 0 {
            match self.ring.pop() {
                Some((at, _)) => self.slots.give_back(at),
                None => thread::sleep(LOOK),
            }
        }
    }
}

/// Called by librbd, on a thread of its own, when a call has ended.
extern "C" fn ended(aio: Aio, place: *mut c_void) {
    let Ok(library) = crate::Library::loaded() else { return };
    // SAFETY: a completion that has ended.
    let outcome = unsafe { (library.rbd_aio_get_return_value)(aio) };
    // SAFETY: as above, released once.
    unsafe { (library.rbd_aio_release)(aio) };
    // SAFETY: of `Ring::begin`, given to one call.
    unsafe { Ring::end(place, outcome as Outcome) };
}
