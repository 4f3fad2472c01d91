//! I/Os in flight on one thread.
//!
//! An I/O is a slot. Usually it is pushed once and done: the caller's own iovecs go to the kernel.
//! A large direct one goes piece by piece (`large`). Everything else (a short transfer, an unaligned
//! buffer, more runs than the kernel takes, a file system without ZERO_RANGE, EAGAIN) makes it go on in
//! steps: a slot that cannot be pushed now waits in `again` for the next poll. All flushes that wait share one fdatasync (`flushing`), and after
//! one has failed no further one succeeds until the device's latch is cleared. Of the kernel's workers,
//! which all files of the thread share, a file takes no more than [`WORKERS_MAX`].

mod flushing;
mod large;
mod slot;

use std::collections::VecDeque;
use std::io;
use std::sync::Arc;
use std::sync::atomic::Ordering::Relaxed;

use reactor::{Full, IoContext, UringClient, Waker};

use self::flushing::{FDATASYNC, Flushing};
use self::large::{Large, PIECES_MAX};
use self::slot::{Slot, Step, zeroes};
use super::bounce::Bounces;
use super::{Shared, errno, memory};
use crate::ram::Ram;
use crate::{
    COPY_AT_ONCE, Channel, ChannelStats, Completion, FlushCause, Geometry, Io, IoError, Op, Slots,
    Submit,
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
    slots: Slots<Slot>,
    /// Slots whose next step could not be pushed yet.
    again: Vec<u16>,
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
            Op::Read | Op::Write if self.is_large(io) => {
                self.slots.take();
                self.slots[n] = Slot::new(*io, Step::Pieces, begun);
                self.begin_large(n);
                return Submit::Pending;
            }
            Op::WriteZeroes if !self.shared.zero_range.load(Relaxed) => Step::Zeroing,
            _ => Step::Plain,
        };
        self.slots[n] = Slot::new(*io, step, begun);
        if self.push(n).is_err() {
            if self.slots[n].worker {
                // Its own come first: one of them ends before it is tried again.
                self.slots.take();
                self.again.push(n);
                return Submit::Pending;
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
            let end = match self.slots[n].step {
                Step::Pieces => self.piece_ended(n, token, result),
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
        if !self.large.is_empty() {
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
        Ok(FileChannel {
            uring: io.uring()?.client(u32::from(DEPTH) + 1 + PIECES_MAX),
            slots: Slots::new(DEPTH, |_| Slot::new(Io::flush(0), Step::Plain, 0)),
            again: Vec::with_capacity(usize::from(DEPTH)),
            copying: VecDeque::with_capacity(usize::from(DEPTH)),
            large: Large::new(shared.clone()),
            waker: io.waker(),
            bounces: Bounces::new()?,
            zeroes: zeroes()?,
            stats,
            flushing: Flushing::new(shared.clone()),
            working: Working { count: 0, shared: shared.clone() },
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
        let waits = !self.shared.direct || !matches!(slot.io.op, Op::Read | Op::Write);
        if waits && self.working.is_full() {
            slot.worker = true;
            return Err(Full);
        }
        let (entry, weight) = slot.entry(&self.shared, &mut self.bounces, self.zeroes);
        let waits = waits || self.uring.needs_worker(weight);
        if waits && self.working.is_full() {
            slot.worker = true;
            return Err(Full);
        }
        #[cfg(test)]
        self.pushed.push(tests::Pushed::of(&entry));
        // SAFETY: the caller's memory is valid until the I/O completes (`Sg::new`); bounce
        // buffers, zeros and the file live as long as this channel, whose client waits in its
        // drop, which comes first.
        unsafe { self.uring.push(entry, u32::from(n), weight) }?;
        if waits {
            slot.worker = true;
            self.working.add();
        }
        Ok(())
    }

    /// The next piece of a read or write of a file in memory, of whichever has its turn.
    fn copy_piece(&mut self, done: &mut Vec<Completion>) {
        let Some(n) = self.copying.pop_front() else { return };
        let slot = &mut self.slots[n];
        match memory::copy(&slot.io, slot.done as usize, &self.shared) {
            Some(copied) => slot.done += copied as u64,
            // From where it is, in the way that knows about errors.
            None => {
                slot.step = if slot.done == 0 { Step::Plain } else { Step::Bounced };
                return self.again.push(n);
            }
        }
        if slot.done < slot.io.bytes(self.shared.block_size) {
            self.copying.push_back(n);
        } else {
            done.push(self.finish(n, Ok(()), reactor::ticks::now()));
        }
    }

    /// Pushes what waits in `again`, in this same poll, so that the kernel has it before the
    /// thread can fall asleep. A slot stays only for want of a bounce buffer or of one of the kernel's
    /// workers, which one that is in flight gives back, or of room in the ring, which keeps the thread
    /// awake.
    #[inline]
    fn go_on(&mut self) {
        let mut i = 0;
        while let Some(&n) = self.again.get(i) {
            match self.push(n) {
                Ok(()) => {
                    self.again.swap_remove(i);
                }
                Err(Full) => i += 1,
            }
        }
    }

    /// The kernel is through with a step of slot `n`: the end of its I/O, or `None` if there is
    /// more to do, and then it stands in `again`.
    fn stepped(&mut self, n: u16, result: i32) -> Option<Result<(), IoError>> {
        if self.slots[n].worker {
            self.working.remove(1);
        }
        let end = match u32::try_from(result) {
            Ok(moved) => self.moved(n, moved),
            Err(_) => self.refused(n, result.wrapping_neg()),
        };
        if end.is_none() {
            match self.slots[n].step {
                Step::Syncing => self.flush(n),
                _ => self.again.push(n),
            }
        }
        end
    }

    fn refused(&mut self, n: u16, errno: i32) -> Option<Result<(), IoError>> {
        let slot = &mut self.slots[n];
        if errno::is_transient(errno) {
            return slot.try_again(IoError::Resources);
        }
        match (slot.io.op, slot.step) {
            (Op::WriteZeroes, Step::Plain) if errno::is_unsupported(errno) => {
                self.shared.zero_range.store(false, Relaxed);
                slot.step = Step::Zeroing;
                None
            }
            // A block device whose own blocks are larger than ours, behind the page cache.
            (Op::WriteZeroes, Step::Plain) if errno == libc::EINVAL => {
                slot.step = Step::Zeroing;
                None
            }
            // The file system wants more alignment than it says.
            (Op::Read | Op::Write, Step::Plain) if errno == libc::EINVAL && self.shared.direct => {
                slot.step = Step::Bounced;
                None
            }
            (op, _) => {
                let error = errno::to_error(op, errno);
                // RWF_DSYNC: it may have taken the one report of a writeback error.
                if slot.io.fua && error == IoError::WriteMedium {
                    self.shared.latch.set(FlushCause::DurableWrite, Some(errno));
                }
                Some(Err(error))
            }
        }
    }

    fn moved(&mut self, n: u16, bytes: u32) -> Option<Result<(), IoError>> {
        let slot = &mut self.slots[n];
        let total = slot.io.bytes(self.shared.block_size);
        match (slot.io.op, slot.step) {
            (Op::Unmap | Op::WriteZeroes, Step::Plain) => slot.done = total,
            // The end of the file, before the end of the device: somebody truncated it.
            (Op::Read, _) if bytes == 0 => return Some(Err(IoError::ReadMedium)),
            _ => {
                if let (Op::Read, Some(b)) = (slot.io.op, slot.bounce) {
                    self.bounces.drain(b, &slot.io.sg, slot.done as usize, bytes as usize);
                }
                // Direct I/O goes on at whole blocks only.
                let block = u64::from(self.shared.block_size);
                let done = (slot.done + u64::from(bytes)) / block * block;
                if done == slot.done {
                    let error = errno::to_error(slot.io.op, libc::EIO);
                    return slot.try_again(error);
                }
                (slot.done, slot.tries) = (done, 0);
            }
        }
        if slot.done < total {
            if slot.step == Step::Plain {
                slot.step = Step::Bounced;
            }
            return None;
        }
        if slot.io.fua && slot.io.op.is_write() && !self.shared.syncs(slot.io.op) {
            slot.step = Step::Syncing;
            return None;
        }
        Some(Ok(()))
    }

    /// Ends the I/O of slot `n` at `now`, in ticks.
    #[inline]
    fn finish(&mut self, n: u16, result: Result<(), IoError>, now: u64) -> Completion {
        let slot = &mut self.slots[n];
        if let Some(b) = slot.bounce.take() {
            self.bounces.give_back(b);
        }
        let ticks = now.saturating_sub(slot.begun);
        let bytes = slot.io.bytes(self.shared.block_size);
        self.stats.record(slot.io.op, bytes, ticks, result);
        let completion = Completion { tag: slot.io.tag, result, ticks };
        self.slots.give_back(n);
        completion
    }
}

#[cfg(test)]
mod tests;
