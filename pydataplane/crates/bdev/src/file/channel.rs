//! I/Os in flight on one thread.
//!
//! An I/O is a slot. Usually it is pushed once and done: the caller's own iovecs go to the kernel.
//! A large direct one goes piece by piece (`large`), and so does a range to unmap or zero (`ranges`).
//! Everything else (a short transfer, an unaligned buffer, more runs than the kernel takes, a file
//! system without ZERO_RANGE, EAGAIN) makes it go on in steps (`steps`): a slot that cannot be pushed
//! now waits in `again` for the next poll. With direct I/O, reads, writes and parts of ranges beyond
//! what their owner may have with the disk wait in `held`. All flushes that wait share one fdatasync
//! (`flushing`), and after one has failed no further one succeeds until the device's latch is cleared.
//! Of the kernel's workers, which all files of the thread share, a file takes no more than
//! [`WORKERS_MAX`].

mod flushing;
mod large;
mod ranges;
mod steps;

use std::collections::VecDeque;
use std::io;
use std::os::fd::{AsFd, AsRawFd};
use std::sync::Arc;
use std::sync::atomic::Ordering::Relaxed;

use guestmem::IoVec;
use io_uring::{opcode, squeue, types};
use reactor::{FileName, Full, IoContext, UringClient, Waker};

use self::flushing::{FDATASYNC, Flushing};
use self::large::{Cut, Large, SMALL};
use self::ranges::Parts;
use self::steps::{ZEROES, zeroes};
use super::bounce::{BOUNCE_SIZE, Bounce, Bounces};
use super::larges::{PIECES_MAX, Pieces};
use super::room::Share;
use super::{Shared, memory};
use crate::ram::Ram;
use crate::{
    COPY_AT_ONCE, Channel, ChannelStats, Completion, Geometry, Io, IoError, Op, Slots, Submit,
};

/// I/Os in flight on one channel at most.
pub(super) const DEPTH: u16 = 256;

/// I/Os of a file that the kernel's workers may wait for at a time; others wait here. Well below what a
/// ring has, so that a disk that does not answer leaves some to other disks. A channel may always have
/// one, whose end lets it go on.
pub(super) const WORKERS_MAX: u32 = 64;

/// Runs that the kernel takes in one call (UIO_MAXIOV); more go through a bounce buffer.
const IOV_MAX: usize = 1024;

/// Largest single read or write, in bytes: MAX_RW_COUNT rounded down to whole MiB.
const TRANSFER_MAX: usize = 2047 << 20;

pub(super) struct FileChannel {
    // First, because dropping it waits until the kernel has let go of all the rest.
    uring: UringClient,
    /// How reads and writes name the file.
    file: FileName,
    slots: Slots<Slot>,
    /// Slots whose next step could not be pushed yet.
    again: Vec<u16>,
    /// Slots that wait for their owner's share of the disk, in order.
    held: VecDeque<u16>,
    /// Slots that copy, in turn.
    copying: VecDeque<u16>,
    large: Large,
    /// Keeps the thread awake while there are any of these, and wakes it at the end of an fdatasync.
    waker: Waker,
    bounces: Bounces,
    zeroes: &'static Ram,
    stats: ChannelStats,
    /// After `uring`: what the kernel still does when it is dropped ends then.
    flushing: Flushing,
    /// After `uring` too.
    working: Working,
    /// After `uring` too.
    share: Share,
    shared: Arc<Shared>,
    /// As when it was opened: only the number of blocks changes.
    geometry: Geometry,
    /// All that went to the kernel.
    #[cfg(test)]
    pushed: Vec<tests::Pushed>,
}

/// I/Os of a channel that one of the kernel's workers may be waiting for.
struct Working {
    count: u32,
    shared: Arc<Shared>,
}

impl Working {
    /// Whether another one has to wait for one of this channel.
    #[inline]
    fn is_full(&self) -> bool {
        self.count > 0 && self.shared.workers.load(Relaxed) >= WORKERS_MAX
    }

    #[inline]
    fn add(&mut self) {
        self.count += 1;
        self.shared.workers.fetch_add(1, Relaxed);
    }

    #[inline]
    fn remove(&mut self, count: u32) {
        self.count -= count;
        self.shared.workers.fetch_sub(count, Relaxed);
    }
}

impl Drop for Working {
    fn drop(&mut self) {
        self.remove(self.count);
    }
}

impl Channel for FileChannel {
    fn submit(&mut self, io: &Io) -> Submit {
        let num_blocks = self.shared.num_blocks.load(Relaxed);
        let geometry = Geometry { num_blocks, ..self.geometry };
        if let Err(e) = io.check(&geometry, &self.shared.features) {
            self.stats.error(e);
            return Submit::Done(Err(e));
        }
        if io.blocks == 0 && !matches!(io.op, Op::Flush) {
            return Submit::Done(Ok(()));
        }
        // What lies below a durable write, such as the allocation of its cluster, may be lost.
        if (matches!(io.op, Op::Flush) || io.fua) && self.shared.latch.is_set() {
            self.stats.error(IoError::Flush);
            return Submit::Done(Err(IoError::Flush));
        }
        let Some(n) = self.slots.next_free() else { return Submit::Full };
        let begun = reactor::ticks::now();
        if matches!(io.op, Op::Flush) {
            self.slots.take();
            self.slots[n] = Slot::new(*io, Step::Syncing, begun);
            self.flush(n);
            return Submit::Pending;
        }
        let step = match io.op {
            Op::Read | Op::Write if !self.fits(io) => Step::Bounced,
            Op::Read | Op::Write if self.shared.in_memory && io.sg.len() > COPY_AT_ONCE => {
                self.slots.take();
                self.slots[n] = Slot::new(*io, Step::Copying, begun);
                self.slots[n].failures = self.shared.latch.failures();
                self.copying.push_back(n);
                self.waker.wake();
                return Submit::Pending;
            }
            Op::Read | Op::Write
                if self.shared.in_memory && memory::copy(io, 0, &self.shared).is_some() =>
            {
                let ticks = reactor::ticks::now().saturating_sub(begun);
                self.stats.record(io.op, io.bytes(self.shared.block_size), ticks, Ok(()));
                return Submit::Done(Ok(()));
            }
            Op::Read | Op::Write if io.sg.len() > SMALL && self.is_large(io) => {
                self.slots.take();
                self.slots[n] = Slot::new(*io, Step::Pieces, begun);
                self.slots[n].failures = self.shared.latch.failures();
                self.begin_large(n);
                return Submit::Pending;
            }
            Op::WriteZeroes if !self.shared.zero_range.load(Relaxed) => Step::Zeroing,
            _ => Step::Plain,
        };
        self.slots[n] = Slot::new(*io, step, begun);
        if io.fua {
            self.slots[n].failures = self.shared.latch.failures();
        }
        if self.shared.direct {
            if !self.held.is_empty() || !self.share.begin(begun) {
                self.slots.take();
                self.held.push_back(n);
                self.share.wait();
                return Submit::Pending;
            }
            self.slots[n].shares = true;
        }
        if self.push(n).is_err() {
            if self.slots[n].worker {
                // Its own come first: one of them ends before it is tried again.
                self.slots.take();
                self.again.push(n);
                return Submit::Pending;
            }
            if self.slots[n].shares {
                self.share.end(None);
            }
            if let Some(b) = self.slots[n].bounce.take() {
                self.bounces.give_back(b);
            }
            return Submit::Full;
        }
        self.slots.take();
        Submit::Pending
    }

    fn poll(&mut self, done: &mut Vec<Completion>) -> u32 {
        let before = done.len();
        // Read once, for all that the kernel finished.
        let mut now = None;
        while done.len() < done.capacity() {
            let Some((token, result)) = self.uring.next_completion() else { break };
            let n = token as u16;
            if n == FDATASYNC {
                self.flushed(result);
                continue;
            }
            let slot = &self.slots[n];
            let (io, is_all) = (&slot.io, usize::try_from(result) == Ok(slot.io.sg.len()));
            let end = match (slot.step, io.op) {
                // All of its bytes at once, as most have it.
                (Step::Plain, Op::Read | Op::Write) if is_all && !io.fua && !slot.worker => {
                    Some(Ok(()))
                }
                (Step::Pieces, _) => self.piece_ended(n, token, result),
                _ => self.stepped(n, result),
            };
            if let Some(end) = end {
                let now = *now.get_or_insert_with(reactor::ticks::now);
                done.push(self.finish(n, end, now));
            }
        }
        if !self.copying.is_empty() && done.len() < done.capacity() {
            self.copy_piece(done);
            if !self.copying.is_empty() {
                self.waker.wake();
            }
        }
        if !self.flushing.waiting.is_empty() {
            self.end_flushes(done);
        }
        if !self.again.is_empty() {
            self.go_on();
        }
        if !self.held.is_empty() {
            self.let_go(*now.get_or_insert_with(reactor::ticks::now));
        }
        if !self.large.queue.is_empty() {
            self.push_pieces();
        }
        (done.len() - before) as u32
    }
}

impl FileChannel {
    pub(super) fn new(
        shared: Arc<Shared>,
        stats: ChannelStats,
        io: &IoContext,
    ) -> io::Result<Self> {
        let mut uring = io.uring()?.client_of(io.owner(), u32::from(DEPTH) + 1 + PIECES_MAX);
        // Their workers, or nobody, would look it up.
        let file = match shared.in_memory || shared.submit_waits {
            true => FileName::of(shared.fd.as_fd()),
            false => uring.use_file(shared.fd.as_fd()),
        };
        Ok(FileChannel {
            uring,
            file,
            slots: Slots::new(DEPTH, |_| Slot::new(Io::flush(0), Step::Plain, 0)),
            again: Vec::with_capacity(usize::from(DEPTH)),
            held: VecDeque::with_capacity(usize::from(DEPTH)),
            copying: VecDeque::with_capacity(usize::from(DEPTH)),
            large: Large::new(Pieces::new(shared.clone(), io.owner(), io.waker())),
            waker: io.waker(),
            bounces: Bounces::new()?,
            zeroes: zeroes()?,
            stats,
            flushing: Flushing::new(shared.clone(), io.waker()),
            working: Working { count: 0, shared: shared.clone() },
            share: Share::new(shared.clone(), io.owner(), io.waker()),
            geometry: shared.geometry(),
            shared,
            #[cfg(test)]
            pushed: Vec::new(),
        })
    }

    /// Whether the kernel takes the caller's memory as it is.
    #[inline]
    fn fits(&self, io: &Io) -> bool {
        let mask = self.shared.mem_align - 1;
        let runs = io.sg.as_slice();
        runs.len() <= IOV_MAX
            && io.sg.len() <= TRANSFER_MAX
            && (mask == 0 || runs.iter().all(|r| (r.base() as usize | r.len()) & mask == 0))
    }

    /// Pushes the next step of slot `n`. `Err` with the slot's `worker` set: the file has as many of the
    /// kernel's workers as it may, some of them by this channel.
    fn push(&mut self, n: u16) -> Result<(), Full> {
        let slot = &mut self.slots[n];
        slot.worker = false;
        if slot.step == Step::Bounced && slot.bounce.is_none() {
            slot.bounce = Some(self.bounces.take().ok_or(Full)?);
        }
        // Through the page cache any I/O may wait, and a fallocate always does.
        let waits = self.shared.submit_waits
            || !self.shared.direct
            || !matches!(slot.io.op, Op::Read | Op::Write);
        if waits && self.working.is_full() {
            slot.worker = true;
            return Err(Full);
        }
        if slot.is_range() {
            slot.next_part(&self.shared);
        }
        let (mut entry, mut weight) =
            slot.entry(&self.shared, self.file, &mut self.bounces, self.zeroes);
        if self.shared.submit_waits {
            (entry, weight) = (entry.flags(squeue::Flags::ASYNC), 0);
        }
        if self.working.is_full() && self.uring.needs_worker(weight) {
            slot.worker = true;
            return Err(Full);
        }
        #[cfg(test)]
        self.pushed.push(tests::Pushed::of(&entry));
        // SAFETY: the caller's memory is valid until the I/O completes (`Sg::new`); bounce
        // buffers, zeros and the file live as long as this channel, whose client waits in its
        // drop, which comes first.
        let by_worker = unsafe { self.uring.push(entry, u32::from(n), weight) }?;
        if waits || by_worker {
            slot.worker = true;
            self.working.add();
        }
        Ok(())
    }

    /// Ends the I/O of slot `n` at `now`, in ticks.
    #[inline]
    fn finish(&mut self, n: u16, result: Result<(), IoError>, now: u64) -> Completion {
        let slot = &mut self.slots[n];
        if let Some(b) = slot.bounce.take() {
            self.bounces.give_back(b);
        }
        let ticks = now.saturating_sub(slot.begun);
        if slot.shares {
            // What went as it is says how long the disk takes.
            let plain = slot.step == Step::Plain && !slot.is_range() && result.is_ok();
            self.share.end(plain.then(|| now.saturating_sub(slot.sent)));
        }
        let bytes = slot.io.bytes(self.shared.block_size);
        self.stats.record(slot.io.op, bytes, ticks, result);
        let completion = Completion { tag: slot.io.tag, result, ticks, ended: now };
        self.slots.give_back(n);
        completion
    }
}

/// What a slot does now.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Step {
    /// The I/O itself, with the caller's memory.
    Plain,
    /// A long read or write of a file in memory, piece by piece.
    Copying,
    /// A read or write through its bounce buffer.
    Bounced,
    /// Writing zeros.
    Zeroing,
    /// A large read or write, piece by piece with the kernel (`large`).
    Pieces,
    /// Waiting for an fdatasync (`flushing`): a flush, or what makes a write durable (FUA) where the
    /// write itself cannot.
    Syncing,
}

/// An I/O in flight.
struct Slot {
    io: Io,
    /// When it was submitted, in ticks.
    begun: u64,
    /// When the kernel had it first, in ticks; of a large one or a range, its last piece.
    sent: u64,
    /// It is counted in its owner's share.
    shares: bool,
    step: Step,
    /// Bytes done.
    done: u64,
    tries: u8,
    bounce: Option<Bounce>,
    /// One of the kernel's workers may be waiting for its step.
    worker: bool,
    /// How far it is, where it goes in pieces.
    cut: Cut,
    /// What the kernel has of a range.
    parts: Parts,
    /// Of a durable one (FUA): failures of the device to make things durable when it was submitted.
    failures: u64,
}

impl Slot {
    /// An I/O of which nothing is done yet.
    #[inline]
    const fn new(io: Io, step: Step, begun: u64) -> Slot {
        Slot {
            io,
            begun,
            sent: begun,
            shares: false,
            step,
            done: 0,
            tries: 0,
            bounce: None,
            worker: false,
            cut: Cut::NONE,
            parts: Parts::NONE,
            failures: 0,
        }
    }

    /// The submission entry of the next step, and its weight: the bytes that the kernel pins or copies
    /// before the call returns.
    #[inline]
    fn entry(
        &self,
        shared: &Shared,
        file: FileName,
        bounces: &mut Bounces,
        zeroes: &Ram,
    ) -> (squeue::Entry, u32) {
        let fd = file.number();
        let io = &self.io;
        let block = u64::from(shared.block_size);
        let offset = io.lba * block + self.done;
        let left = io.blocks * block - self.done;
        let dsync = if io.fua && shared.syncs(io.op) { libc::RWF_DSYNC } else { 0 };
        match (io.op, self.step) {
            (Op::Flush, _) | (_, Step::Syncing) => unreachable!("an fdatasync has no slot"),
            (Op::Read | Op::Write, Step::Bounced) => {
                let b = self.bounce.expect("`push` took a buffer before");
                let len = left.min(BOUNCE_SIZE as u64) as usize;
                let entry = if matches!(io.op, Op::Read) {
                    opcode::Read::new(fd, bounces.base(b), len as u32).offset(offset).build()
                } else {
                    bounces.fill(b, &io.sg, self.done as usize, len);
                    let from = bounces.base(b);
                    opcode::Write::new(fd, from, len as u32).offset(offset).rw_flags(dsync).build()
                };
                (file.mark(entry), BOUNCE_SIZE as u32)
            }
            // The whole of it, from or to the caller's own memory.
            (Op::Read | Op::Write, _) => {
                let entry = match (io.op, io.sg.as_slice()) {
                    (Op::Read, [one]) => {
                        opcode::Read::new(fd, one.base(), one.len() as u32).offset(offset).build()
                    }
                    (_, [one]) => opcode::Write::new(fd, one.base(), one.len() as u32)
                        .offset(offset)
                        .rw_flags(dsync)
                        .build(),
                    (op, runs) => of_runs(op, runs, fd, offset, dsync),
                };
                (file.mark(entry), io.sg.len() as u32)
            }
            // Zeros are not pinned.
            (Op::WriteZeroes, Step::Zeroing) => {
                let len = left.min(ZEROES as u64) as u32;
                let entry = opcode::Write::new(fd, zeroes.at(0, ZEROES), len).offset(offset);
                (file.mark(entry.build()), 0)
            }
            (Op::Unmap | Op::WriteZeroes, _) => {
                let mode = libc::FALLOC_FL_KEEP_SIZE
                    | match io.op {
                        Op::Unmap => libc::FALLOC_FL_PUNCH_HOLE,
                        _ => libc::FALLOC_FL_ZERO_RANGE,
                    };
                // It goes to a worker by itself, which looks the file up.
                let fd = types::Fd(shared.fd.as_raw_fd());
                (opcode::Fallocate::new(fd, self.parts.len()).offset(offset).mode(mode).build(), 0)
            }
        }
    }
}

/// A read or write of several runs of the caller's list.
#[inline]
fn of_runs(op: Op, runs: &[IoVec], fd: types::Fd, offset: u64, dsync: i32) -> squeue::Entry {
    // An IoVec is laid out as `struct iovec`.
    let iov = runs.as_ptr().cast::<libc::iovec>();
    let count = runs.len() as u32;
    if op == Op::Read {
        opcode::Readv::new(fd, iov, count).offset(offset).build()
    } else {
        opcode::Writev::new(fd, iov, count).offset(offset).rw_flags(dsync).build()
    }
}

#[cfg(test)]
mod tests;
