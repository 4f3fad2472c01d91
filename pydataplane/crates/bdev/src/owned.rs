//! Many I/Os at a time for a thread that is no reactor: exports, copies.

mod rows;

use std::os::fd::BorrowedFd;
use std::sync::Arc;

use guestmem::{IoVec, Sg};
use reactor::{IoContext, Owner, Waker, ticks};

use crate::{
    AlignedBuf, Bdev, Channel, Completion, Io, IoError, Limits, Op, OpenError, Protected, Slots,
    Submit,
};
use rows::Rows;

/// Longest single wait for a completion before the device is polled again, in microseconds.
const WAIT_US: u64 = 100_000;

/// What was asked of an [`OwnedChannel`], over now.
#[derive(Debug)]
pub struct Finished<T> {
    /// As given to [`OwnedChannel::submit`].
    pub token: T,
    /// The buffer given, with the data of a read.
    pub buf: Option<AlignedBuf>,
    /// How it ended.
    pub result: Result<(), IoError>,
}

struct Slot<T> {
    io: Io,
    with: Option<Protected>,
    /// What `io.sg` points to; its address is stable because slots are boxed as a whole.
    iov: [IoVec; 1],
    buf: Option<AlignedBuf>,
    /// `Some` while the I/O is not over.
    token: Option<T>,
    /// It counts in the limits.
    counted: bool,
}

/// A channel on an I/O context of its own that owns the buffers of its I/Os until they end, so
/// that its use is safe. Belongs to the thread that opened it. Each I/O carries a token of the
/// caller's. Dropping it waits for what is in flight. Where a device is shared, it has a share of its own.
pub struct OwnedChannel<T> {
    channel: Box<dyn Channel>,
    io: IoContext,
    block_size: u32,
    slots: Slots<Slot<T>>,
    /// Slots that the channel was too full to take, or that a limit keeps from it.
    refused: Rows,
    done: Vec<Completion>,
    /// What the device does at most.
    limits: Arc<Limits>,
    /// Nobody heeds that now.
    unlimited: bool,
}

impl<T> OwnedChannel<T> {
    /// Opens `bdev` for the calling thread, for at most `depth` I/Os at a time.
    ///
    /// # Errors
    /// What [`Bdev::open`] says, or that the kernel has no I/O context left.
    pub fn open(bdev: &dyn Bdev, depth: u16) -> Result<Self, OpenError> {
        OwnedChannel::open_within(bdev, depth, Arc::default())
    }

    /// As [`OwnedChannel::open`], of I/O that waits while the device does as much as `limits` let it: reads in
    /// their order, and all else in its own.
    ///
    /// # Errors
    /// See there.
    pub fn open_within(
        bdev: &dyn Bdev,
        depth: u16,
        limits: Arc<Limits>,
    ) -> Result<Self, OpenError> {
        let io = IoContext::new().map_err(|e| OpenError {
            name: bdev.name().to_owned(),
            why: format!("no I/O context for this thread: {e}"),
        })?;
        let channel = bdev.open(&io.owned_by(Owner::new()))?;
        let slot = |_| Slot {
            io: Io::flush(0),
            with: None,
            iov: [IoVec::EMPTY],
            buf: None,
            token: None,
            counted: false,
        };
        Ok(OwnedChannel {
            channel,
            io,
            block_size: bdev.geometry().block_size,
            slots: Slots::new(depth, slot),
            refused: Rows::new(depth),
            done: Vec::with_capacity(usize::from(depth)),
            limits,
            unlimited: false,
        })
    }

    /// Wakes the thread out of [`OwnedChannel::wait`].
    pub fn waker(&self) -> Waker {
        self.io.waker()
    }

    /// Ends [`OwnedChannel::wait`] also when `fd` becomes readable (edge triggered: the caller reads
    /// until nothing is left). Its owner keeps it open as long as the channel.
    ///
    /// # Errors
    /// It is watched already, or cannot be.
    pub fn watch(&self, fd: BorrowedFd<'_>) -> std::io::Result<()> {
        self.io.watch_always(fd)
    }

    /// Whether no further I/O is taken now.
    pub fn is_full(&self) -> bool {
        self.slots.is_full()
    }

    /// I/Os that are not over.
    pub fn in_flight(&self) -> usize {
        self.slots.taken()
    }

    /// Starts an I/O on the first `blocks` blocks of `buf`. Returns it if it is over at once.
    /// Only when not [`OwnedChannel::is_full`].
    ///
    /// # Panics
    /// When it is full: the caller looks first.
    pub fn submit(
        &mut self,
        op: Op,
        lba: u64,
        blocks: u64,
        buf: Option<AlignedBuf>,
        token: T,
    ) -> Option<Finished<T>> {
        self.submit_with(op, lba, blocks, buf, None, token)
    }

    /// As [`OwnedChannel::submit`], with protection information, which lies in `buf` as `with` says.
    ///
    /// # Panics
    /// See there.
    pub fn submit_with(
        &mut self,
        op: Op,
        lba: u64,
        blocks: u64,
        buf: Option<AlignedBuf>,
        with: Option<Protected>,
        token: T,
    ) -> Option<Finished<T>> {
        let block = self.block_size as usize;
        let block = with.map_or(block, |with| with.in_list(block));
        let at = self.slots.take().expect("the caller looked whether there is room");
        let slot = &mut self.slots[at];
        slot.buf = buf;
        slot.token = Some(token);
        let data = matches!(op, Op::Read | Op::Write);
        let len = usize::try_from(blocks).ok().and_then(|b| b.checked_mul(block));
        let mut sg = Sg::EMPTY;
        if data {
            let Some((len, buf)) = len.zip(slot.buf.as_mut()).filter(|(l, b)| *l <= b.len()) else {
                return Some(self.finish(at, Err(IoError::BadLength)));
            };
            // SAFETY: the slot keeps the buffer until the I/O is over.
            slot.iov = unsafe { [IoVec::new(buf.as_mut_ptr(), len)] };
            // SAFETY: `iov` is in a boxed slot, not touched until the I/O is over.
            sg = unsafe { Sg::new(&slot.iov) };
        }
        slot.io = Io { op, fua: false, lba, blocks, sg, tag: u64::from(at) };
        slot.with = with;
        slot.counted = false;
        if self.refused.limited_until(op).is_some() || self.is_over_limit(at) {
            self.refused.push(op, at);
            return None;
        }
        self.start(at)
    }

    /// Has everything begin whatever the limits say, or heeds them again: for who waits for the end of what
    /// was submitted.
    pub fn set_unlimited(&mut self, unlimited: bool) {
        self.unlimited = unlimited;
    }

    /// Whether a limit keeps an I/O from beginning, which its row is told; else it counts.
    fn is_over_limit(&mut self, at: u16) -> bool {
        let slot = &mut self.slots[at];
        let heeded = self.limits.is_on() && !self.unlimited && !slot.counted;
        let admitted = match heeded {
            true => self.limits.admit(slot.io.op, slot.io.bytes(self.block_size), ticks::now()),
            false => Ok(()),
        };
        slot.counted |= heeded && admitted.is_ok();
        self.refused.limit(slot.io.op, admitted.err());
        admitted.is_err()
    }

    fn start(&mut self, at: u16) -> Option<Finished<T>> {
        let slot = &self.slots[at];
        let submit = match &slot.with {
            None => self.channel.submit(&slot.io),
            Some(with) => self.channel.submit_protected(&slot.io, with),
        };
        match submit {
            Submit::Done(result) => return Some(self.finish(at, result)),
            Submit::Pending => {}
            Submit::Full => self.refused.push(self.slots[at].io.op, at),
        }
        None
    }

    fn finish(&mut self, at: u16, result: Result<(), IoError>) -> Finished<T> {
        let slot = &mut self.slots[at];
        let token = slot.token.take().expect("an I/O ends once");
        let buf = slot.buf.take();
        self.slots.give_back(at);
        Finished { token, buf, result }
    }

    /// Appends what is over to `over`; returns how many. Whatever the kernel has told by then is
    /// among it, so that [`OwnedChannel::wait`] may follow.
    pub fn poll(&mut self, over: &mut Vec<Finished<T>>) -> usize {
        let before = over.len();
        self.io.flush();
        loop {
            self.collect(over);
            // What this submits may be over when it returns, and then nothing would end the sleep.
            if self.io.flush() == 0 {
                return over.len() - before;
            }
        }
    }

    fn collect(&mut self, over: &mut Vec<Finished<T>>) {
        let mut done = std::mem::take(&mut self.done);
        done.clear();
        self.channel.poll(&mut done);
        for c in &done {
            let at = u16::try_from(c.tag).expect("a tag is the number of a slot");
            over.push(self.finish(at, c.result));
        }
        self.done = done;
        // What the channel has no room for is behind the others then.
        for _ in 0..self.refused.len() {
            let Some(at) =
                self.refused.firsts().into_iter().flatten().find(|at| !self.is_over_limit(*at))
            else {
                break;
            };
            self.refused.begin(self.slots[at].io.op);
            over.extend(self.start(at));
        }
    }

    /// Submits what [`OwnedChannel::submit`] was given and sleeps, with one system call, until
    /// something may be over, the waker was used, or the wait was long: at most 100 ms with I/O in
    /// flight, else `idle_us` microseconds. Does not sleep when something is over already, which is
    /// then appended to `over`; the rest is for [`OwnedChannel::poll`].
    pub fn wait(&mut self, over: &mut Vec<Finished<T>>, idle_us: u64) {
        let before = over.len();
        self.io.harvest();
        self.collect(over);
        if over.len() > before {
            return;
        }
        let mut limit = if self.in_flight() > 0 { WAIT_US } else { idle_us };
        if let Some(until) = self.refused.until() {
            let ticks = until.saturating_sub(ticks::now());
            limit = limit.min(ticks::to_ns(ticks).div_ceil(1000));
        }
        if self.io.wait(limit).is_err() {
            std::thread::yield_now();
        }
    }
}

impl<T> Drop for OwnedChannel<T> {
    fn drop(&mut self) {
        // The kernel may still write into the buffers of what is in flight.
        self.unlimited = true;
        let mut over = Vec::new();
        while self.in_flight() > 0 {
            if self.poll(&mut over) == 0 {
                self.wait(&mut over, WAIT_US);
            }
        }
    }
}

#[cfg(test)]
mod tests;
