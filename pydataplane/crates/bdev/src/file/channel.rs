//! I/Os in flight on one thread.
//!
//! An I/O is a slot. Usually it is pushed once and done: the caller's own iovecs go to the kernel.
//! Everything else (a short transfer, an unaligned buffer, more runs than the kernel takes, a file
//! system without ZERO_RANGE, EAGAIN) makes it go on in steps: a slot that cannot be pushed now
//! waits in `again` for the next poll. Flushes go in groups (`flush`), and after one has failed no
//! further one succeeds until the device's latch is cleared.

use std::collections::VecDeque;
use std::io;
use std::os::fd::AsRawFd;
use std::sync::atomic::Ordering::Relaxed;
use std::sync::{Arc, OnceLock};

use io_uring::{opcode, squeue, types};
use reactor::{Full, IoContext, UringClient, Waker};

use super::bounce::{BOUNCE_SIZE, Bounce, Bounces};
use super::flush::Group;
use super::{Shared, errno, memory};
use crate::ram::Ram;
use crate::{COPY_AT_ONCE, Channel, ChannelStats, Completion, FlushCause, Io, IoError, Op, Submit};

/// I/Os in flight on one channel at most.
pub(super) const DEPTH: u32 = 256;

/// Runs that the kernel takes in one call (UIO_MAXIOV); more go through a bounce buffer.
const IOV_MAX: usize = 1024;

/// Largest single read or write, in bytes: MAX_RW_COUNT rounded down to whole MiB.
const TRANSFER_MAX: usize = 2047 << 20;

/// Steps without progress (EAGAIN, EINTR, nothing written) before an I/O is given up.
const TRIES_MAX: u8 = 16;

/// Bytes of zeros written at once where ZERO_RANGE is missing.
const ZEROES: usize = 1 << 20;

/// Memory that is never written, so that it is the kernel's shared page of zeros.
fn zeroes() -> io::Result<&'static Ram> {
    static ZERO: OnceLock<Ram> = OnceLock::new();
    if let Some(z) = ZERO.get() {
        return Ok(z);
    }
    let ram = Ram::new(ZEROES)?;
    Ok(ZERO.get_or_init(|| ram))
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
    /// An fdatasync that makes what was written durable (FUA), where the write itself cannot.
    Syncing,
}

struct Slot {
    io: Io,
    /// When it was submitted, in ticks.
    begun: u64,
    step: Step,
    /// Bytes done.
    done: u64,
    tries: u8,
    bounce: Option<Bounce>,
}

const IDLE: Slot = Slot {
    io: Io { op: Op::Flush, fua: false, lba: 0, blocks: 0, sg: guestmem::Sg::EMPTY, tag: 0 },
    begun: 0,
    step: Step::Plain,
    done: 0,
    tries: 0,
    bounce: None,
};

/// Flushes of a channel that are in the kernel, each a member of its file's group.
struct Joined {
    count: u32,
    shared: Arc<Shared>,
}

impl Drop for Joined {
    fn drop(&mut self) {
        for _ in 0..self.count {
            let _ = self.shared.flushes.leave();
        }
    }
}

pub(super) struct FileChannel {
    // First, because dropping it waits until the kernel has let go of all the rest.
    uring: UringClient,
    slots: Box<[Slot]>,
    free: Vec<u32>,
    /// Slots whose next step could not be pushed yet.
    again: Vec<u32>,
    /// Slots that copy, in turn.
    copying: VecDeque<u32>,
    /// Keeps the thread awake while there are any, and wakes it at the end of a group of flushes.
    waker: Waker,
    bounces: Bounces,
    zeroes: &'static Ram,
    stats: ChannelStats,
    /// Flushes that succeeded, until all that ran beside them have ended.
    held: Vec<(u32, Group)>,
    /// The group at whose end this thread is woken.
    woken_after: Option<Group>,
    /// After `uring`: what the kernel still does when it is dropped leaves its group then.
    joined: Joined,
    shared: Arc<Shared>,
    /// All that went to the kernel.
    #[cfg(test)]
    pushed: Vec<tests::Pushed>,
}

impl Channel for FileChannel {
    fn submit(&mut self, io: &Io) -> Submit {
        let checked = io.check(&self.shared.geometry(), &self.shared.features);
        if let Err(e) = checked {
            self.stats.error(e);
            return Submit::Done(Err(e));
        }
        if io.blocks == 0 && io.op != Op::Flush {
            return Submit::Done(Ok(()));
        }
        if io.op == Op::Flush && self.shared.latch.is_set() {
            self.stats.error(IoError::Flush);
            return Submit::Done(Err(IoError::Flush));
        }
        let Some(&n) = self.free.last() else { return Submit::Full };
        let begun = reactor::ticks::now();
        let step = match io.op {
            Op::Read | Op::Write if !self.fits(io) => Step::Bounced,
            Op::Read | Op::Write if self.shared.in_memory && io.sg.len() > COPY_AT_ONCE => {
                Step::Copying
            }
            Op::Read | Op::Write
                if self.shared.in_memory && memory::copy(io, 0, &self.shared).is_some() =>
            {
                let ticks = reactor::ticks::now().saturating_sub(begun);
                self.stats.record(io.op, io.bytes(self.shared.block_size), ticks, Ok(()));
                return Submit::Done(Ok(()));
            }
            Op::WriteZeroes if !self.shared.zero_range.load(Relaxed) => Step::Zeroing,
            _ => Step::Plain,
        };
        self.slots[n as usize] = Slot { io: *io, begun, step, done: 0, tries: 0, bounce: None };
        if step == Step::Copying {
            self.free.pop();
            self.copying.push_back(n);
            self.waker.wake();
            return Submit::Pending;
        }
        if self.push(n).is_err() {
            if io.op == Op::Flush {
                // Its group is closed, or the ring is full.
                self.free.pop();
                self.again.push(n);
                self.await_group();
                return Submit::Pending;
            }
            if let Some(b) = self.slots[n as usize].bounce.take() {
                self.bounces.give_back(b);
            }
            return Submit::Full;
        }
        self.free.pop();
        Submit::Pending
    }

    fn poll(&mut self, done: &mut Vec<Completion>) -> u32 {
        let before = done.len();
        while done.len() < done.capacity() {
            let Some((n, result)) = self.uring.next_completion() else { break };
            if let Some(end) = self.stepped(n, result) {
                let completion = self.finish(n, end);
                done.push(completion);
            }
        }
        if !self.copying.is_empty() && done.len() < done.capacity() {
            self.copy_piece(done);
            if !self.copying.is_empty() {
                self.waker.wake();
            }
        }
        if !self.held.is_empty() {
            self.end_held(done);
        }
        self.go_on();
        if !(self.held.is_empty() && self.again.is_empty()) {
            self.await_group();
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
            uring: io.uring()?.client(DEPTH),
            slots: (0..DEPTH).map(|_| IDLE).collect(),
            free: (0..DEPTH).rev().collect(),
            again: Vec::with_capacity(DEPTH as usize),
            copying: VecDeque::with_capacity(DEPTH as usize),
            waker: io.waker(),
            bounces: Bounces::new()?,
            zeroes: zeroes()?,
            stats,
            held: Vec::with_capacity(DEPTH as usize),
            woken_after: None,
            joined: Joined { count: 0, shared: shared.clone() },
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

    /// Pushes the next step of slot `n`.
    fn push(&mut self, n: u32) -> Result<(), Full> {
        let slot = &mut self.slots[n as usize];
        if slot.is_flush() {
            return self.push_flush(n);
        }
        if slot.step == Step::Bounced && slot.bounce.is_none() {
            slot.bounce = Some(self.bounces.take().ok_or(Full)?);
        }
        // What the kernel pins or copies before the call returns.
        let weight = match (slot.io.op, slot.step) {
            (Op::Read | Op::Write, Step::Bounced) => BOUNCE_SIZE as u32,
            (Op::Read | Op::Write, _) => slot.io.sg.len() as u32,
            // A fallocate goes to a worker by itself.
            _ => 0,
        };
        let entry = entry(slot, &self.shared, &mut self.bounces, self.zeroes);
        #[cfg(test)]
        self.pushed.push(tests::Pushed::of(&entry));
        // SAFETY: the caller's memory is valid until the I/O completes (`Sg::new`); bounce
        // buffers, zeros and the file live as long as this channel, whose client waits in its
        // drop, which comes first.
        unsafe { self.uring.push(entry, n, weight) }
    }

    /// The next piece of a read or write of a file in memory, of whichever has its turn.
    fn copy_piece(&mut self, done: &mut Vec<Completion>) {
        let Some(n) = self.copying.pop_front() else { return };
        let slot = &mut self.slots[n as usize];
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
            let completion = self.finish(n, Ok(()));
            done.push(completion);
        }
    }

    /// Pushes the fdatasync of slot `n`, if its file's group is open.
    fn push_flush(&mut self, n: u32) -> Result<(), Full> {
        if !self.shared.flushes.join() {
            return Err(Full);
        }
        let slot = &self.slots[n as usize];
        let entry = entry(slot, &self.shared, &mut self.bounces, self.zeroes);
        #[cfg(test)]
        self.pushed.push(tests::Pushed::of(&entry));
        // SAFETY: as in `push`: the file lives as long as this channel; there is no buffer.
        let pushed = unsafe { self.uring.push(entry, n, 0) };
        match pushed {
            Ok(()) => self.joined.count += 1,
            Err(Full) => drop(self.shared.flushes.leave()),
        }
        pushed
    }

    /// The kernel is through with the fdatasync of slot `n`: the end of its I/O, or `None` if that
    /// has to wait.
    fn flushed(&mut self, n: u32, result: i32) -> Option<Result<(), IoError>> {
        self.joined.count -= 1;
        let errno = result.wrapping_neg();
        let slot = &mut self.slots[n as usize];
        if result < 0 && errno::is_transient(errno) {
            let _ = self.shared.flushes.leave();
            let end = slot.try_again(IoError::Resources);
            if end.is_none() {
                self.again.push(n);
            }
            return end;
        }
        let failed = (result < 0).then(|| errno::to_error(Op::Flush, errno));
        if failed == Some(IoError::Flush) {
            self.shared.latch.set(FlushCause::Flush, Some(errno));
        }
        match (failed, self.shared.flushes.leave()) {
            (Some(error), _) => Some(Err(error)),
            (None, None) => Some(self.verdict()),
            (None, Some(group)) => {
                self.held.push((n, group));
                None
            }
        }
    }

    /// What became of a flush that succeeded and beside which none runs any more.
    fn verdict(&self) -> Result<(), IoError> {
        if self.shared.latch.is_set() { Err(IoError::Flush) } else { Ok(()) }
    }

    /// Ends the flushes whose group is over.
    #[cold]
    fn end_held(&mut self, done: &mut Vec<Completion>) {
        let mut i = 0;
        while done.len() < done.capacity()
            && let Some(&(n, group)) = self.held.get(i)
        {
            if self.shared.flushes.is_over(group) {
                self.held.swap_remove(i);
                let verdict = self.verdict();
                let completion = self.finish(n, verdict);
                done.push(completion);
            } else {
                i += 1;
            }
        }
    }

    /// Has the thread woken when the group is over that one of its flushes waits for.
    #[cold]
    fn await_group(&mut self) {
        let flush = |n: &u32| self.slots[*n as usize].is_flush();
        let flushes = &self.shared.flushes;
        let group = flushes.group();
        let waits = !self.held.is_empty() || self.again.iter().any(flush);
        if !waits || self.woken_after == Some(group) {
            return;
        }
        self.woken_after = Some(group);
        flushes.wake_at_end(&self.waker);
        // It may have ended in between, and then nobody wakes this thread.
        if flushes.is_over(group) || !flushes.is_closed() {
            self.waker.wake();
        }
    }

    /// Pushes what waits in `again`, in this same poll, so that the kernel has it before the
    /// thread can fall asleep. A slot stays only for want of a bounce buffer, which one that is in
    /// flight gives back, of room in the ring, which keeps the thread awake, or of an open group of
    /// flushes, whose end wakes the thread.
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
    fn stepped(&mut self, n: u32, result: i32) -> Option<Result<(), IoError>> {
        if self.slots[n as usize].is_flush() {
            return self.flushed(n, result);
        }
        let end = match u32::try_from(result) {
            Ok(moved) => self.moved(n, moved),
            Err(_) => self.refused(n, result.wrapping_neg()),
        };
        if end.is_none() {
            self.again.push(n);
        }
        end
    }

    fn refused(&mut self, n: u32, errno: i32) -> Option<Result<(), IoError>> {
        let slot = &mut self.slots[n as usize];
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

    fn moved(&mut self, n: u32, bytes: u32) -> Option<Result<(), IoError>> {
        let slot = &mut self.slots[n as usize];
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

    /// Ends the I/O of slot `n`.
    #[inline]
    fn finish(&mut self, n: u32, result: Result<(), IoError>) -> Completion {
        let slot = &mut self.slots[n as usize];
        if let Some(b) = slot.bounce.take() {
            self.bounces.give_back(b);
        }
        let ticks = reactor::ticks::now().saturating_sub(slot.begun);
        let bytes = slot.io.bytes(self.shared.block_size);
        self.stats.record(slot.io.op, bytes, ticks, result);
        self.free.push(n);
        Completion { tag: slot.io.tag, result }
    }
}

impl Slot {
    /// Whether its next step, or the one under way, is an fdatasync.
    #[inline]
    fn is_flush(&self) -> bool {
        self.io.op == Op::Flush || self.step == Step::Syncing
    }

    fn try_again(&mut self, give_up: IoError) -> Option<Result<(), IoError>> {
        self.tries += 1;
        (self.tries > TRIES_MAX).then_some(Err(give_up))
    }
}

/// The submission entry of a slot's next step.
#[inline]
fn entry(slot: &Slot, shared: &Shared, bounces: &mut Bounces, zeroes: &Ram) -> squeue::Entry {
    let fd = types::Fd(shared.fd.as_raw_fd());
    let io = &slot.io;
    if io.op == Op::Flush || slot.step == Step::Syncing {
        return opcode::Fsync::new(fd).flags(types::FsyncFlags::DATASYNC).build();
    }
    let block = u64::from(shared.block_size);
    let offset = io.lba * block + slot.done;
    let left = io.blocks * block - slot.done;
    let dsync = if io.fua && shared.syncs(io.op) { libc::RWF_DSYNC } else { 0 };
    match (io.op, slot.step) {
        (Op::Flush, _) => unreachable!("see above"),
        (Op::Unmap, _) => {
            let mode = libc::FALLOC_FL_PUNCH_HOLE | libc::FALLOC_FL_KEEP_SIZE;
            opcode::Fallocate::new(fd, left).offset(offset).mode(mode).build()
        }
        (Op::WriteZeroes, Step::Zeroing) => {
            let len = left.min(ZEROES as u64) as u32;
            let from = zeroes.at(0, ZEROES);
            opcode::Write::new(fd, from, len).offset(offset).build()
        }
        (Op::WriteZeroes, _) => {
            let mode = libc::FALLOC_FL_ZERO_RANGE | libc::FALLOC_FL_KEEP_SIZE;
            opcode::Fallocate::new(fd, left).offset(offset).mode(mode).build()
        }
        (Op::Read | Op::Write, _) => match (slot.step, slot.bounce) {
            (Step::Bounced, Some(b)) => {
                let len = left.min(BOUNCE_SIZE as u64) as usize;
                if io.op == Op::Read {
                    opcode::Read::new(fd, bounces.base(b), len as u32).offset(offset).build()
                } else {
                    bounces.fill(b, &io.sg, slot.done as usize, len);
                    let from = bounces.base(b);
                    opcode::Write::new(fd, from, len as u32).offset(offset).rw_flags(dsync).build()
                }
            }
            _ => whole(io, fd, offset, dsync),
        },
    }
}

/// The whole of a read or write, from or to the caller's own memory.
#[inline]
fn whole(io: &Io, fd: types::Fd, offset: u64, dsync: i32) -> squeue::Entry {
    let runs = io.sg.as_slice();
    match (io.op, runs) {
        (Op::Read, [one]) => {
            opcode::Read::new(fd, one.base(), one.len() as u32).offset(offset).build()
        }
        (_, [one]) => opcode::Write::new(fd, one.base(), one.len() as u32)
            .offset(offset)
            .rw_flags(dsync)
            .build(),
        (op, _) => {
            // An IoVec is laid out as `struct iovec`.
            let iov = runs.as_ptr().cast::<libc::iovec>();
            let count = runs.len() as u32;
            if op == Op::Read {
                opcode::Readv::new(fd, iov, count).offset(offset).build()
            } else {
                opcode::Writev::new(fd, iov, count).offset(offset).rw_flags(dsync).build()
            }
        }
    }
}

#[cfg(test)]
mod tests;
