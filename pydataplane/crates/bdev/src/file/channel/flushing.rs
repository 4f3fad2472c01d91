//! Flushes of a channel. Those that wait share one fdatasync, with those of other channels of the
//! file ([`crate::file::flush`]).

use std::os::fd::AsRawFd;
use std::sync::Arc;

use io_uring::{opcode, types};
use reactor::{Full, Waker};

use super::steps::TRIES_MAX;
use super::{DEPTH, FileChannel, Step};
use crate::file::flush::Number;
use crate::file::{Shared, errno};
use crate::{Completion, FlushCause, IoError, Waiter};

/// What the kernel calls this channel's fdatasync; a slot's number is less.
pub(super) const FDATASYNC: u16 = DEPTH;

/// Flushes that wait, and the channel's own fdatasync.
pub(super) struct Flushing {
    /// Never grows.
    pub(super) waiting: Vec<Waiting>,
    own: Own,
    /// Is told at the end of another channel's.
    waiter: Arc<Waiter>,
    /// Failures in a row of the channel's own that may pass.
    tries: u8,
}

/// A flush that waits.
#[derive(Clone, Copy)]
pub(super) struct Waiting {
    slot: u16,
    /// The fdatasync that answers it.
    number: Number,
    /// Failures that there had been when it was asked for.
    failures: u64,
}

/// The fdatasync that this channel has in the kernel.
struct Own {
    number: Option<Number>,
    shared: Arc<Shared>,
}

impl Own {
    /// Ends it, if there is one.
    fn end(&mut self, counts: bool) {
        if let Some(number) = self.number.take() {
            self.shared.flushes.end(number, counts);
        }
    }
}

impl Drop for Own {
    /// After the channel's ring: the kernel is through. Others that waited begin another.
    fn drop(&mut self) {
        self.end(false);
    }
}

impl Flushing {
    pub fn new(shared: Arc<Shared>, waker: Waker) -> Flushing {
        Flushing {
            waiting: Vec::with_capacity(usize::from(DEPTH)),
            own: Own { number: None, shared },
            waiter: Waiter::new(waker),
            tries: 0,
        }
    }
}

impl FileChannel {
    /// Slot `n` waits for a flush from now on.
    #[inline]
    pub(super) fn flush(&mut self, n: u16) {
        let slot = &mut self.slots[n];
        slot.step = Step::Syncing;
        // A durable write: since it was submitted. Who clears a failure meanwhile does not know of it.
        let failures = if slot.io.fua { slot.failures } else { self.shared.latch.failures() };
        let number = self.shared.flushes.next();
        self.flushing.waiting.push(Waiting { slot: n, number, failures });
        self.begin_flush();
    }

    /// Begins an fdatasync, or has the thread woken when that is worth a try.
    pub(super) fn begin_flush(&mut self) {
        let flushes = &self.shared.flushes;
        let Some(number) = flushes.begin() else { return self.await_flush() };
        // Another channel's may have begun and ended since this one looked. Nobody here would wait for
        // an fdatasync now: a thread that does nothing else would never see its end, and all other
        // channels would wait for that.
        if self.flushing.waiting.iter().all(|w| flushes.is_through(w.number)) {
            flushes.end(number, false);
            return self.waker.wake();
        }
        let fd = types::Fd(self.shared.fd.as_raw_fd());
        let entry = opcode::Fsync::new(fd).flags(types::FsyncFlags::DATASYNC).build();
        #[cfg(test)]
        self.pushed.push(super::tests::Pushed::of(&entry));
        self.flushing.own.number = Some(number);
        // SAFETY: as in `push`: the file lives as long as this channel; there is no buffer.
        if let Err(Full) = unsafe { self.uring.push(entry, u32::from(FDATASYNC), 0) } {
            self.flushing.own.end(false);
            self.waker.wake();
        }
    }

    /// The kernel is through with the channel's fdatasync.
    pub(super) fn flushed(&mut self, result: i32) {
        let errno = result.wrapping_neg();
        if result >= 0 {
            self.flushing.tries = 0;
            return self.flushing.own.end(true);
        }
        if errno::is_transient(errno) && self.flushing.tries < TRIES_MAX {
            self.flushing.tries += 1;
            return self.flushing.own.end(false);
        }
        self.flushing.tries = 0;
        // Also where it was given up: what was to be durable may not be.
        self.shared.latch.set(FlushCause::Flush, Some(errno));
        self.flushing.own.end(true);
    }

    /// Ends the flushes that have been answered, and goes on with the others.
    pub(super) fn end_flushes(&mut self, done: &mut Vec<Completion>) {
        let mut now = None;
        let mut i = 0;
        while let Some(&Waiting { slot: n, number, failures }) = self.flushing.waiting.get(i) {
            // First: whoever ends one that failed has said so before.
            let through = self.shared.flushes.is_through(number);
            // One that failed fails all, and so does an earlier one that nobody has looked into; who
            // clears that does not know of those that wait. Not before the channel's own has ended, as
            // somebody here has to wait for that.
            let latch = &self.shared.latch;
            let failed = latch.is_set() || latch.failures() != failures;
            if !through && (!failed || self.flushing.own.number.is_some()) {
                i += 1;
            } else if done.len() == done.capacity() {
                return self.waker.wake();
            } else {
                self.flushing.waiting.swap_remove(i);
                let result = if failed { Err(IoError::Flush) } else { Ok(()) };
                let now = *now.get_or_insert_with(reactor::ticks::now);
                let completion = self.finish(n, result, now);
                done.push(completion);
            }
        }
        if !self.flushing.waiting.is_empty() && self.flushing.own.number.is_none() {
            self.begin_flush();
        }
    }

    /// Has the thread woken at the end of another channel's fdatasync.
    #[cold]
    fn await_flush(&mut self) {
        if self.flushing.own.number.is_some() {
            return;
        }
        let flushes = &self.shared.flushes;
        let under_way = flushes.under_way();
        // It may have ended in between, and then nobody wakes this thread.
        if flushes.waiters.wait(&self.flushing.waiter)
            && (under_way.is_none() || flushes.under_way() != under_way)
        {
            self.waker.wake();
        }
    }
}
