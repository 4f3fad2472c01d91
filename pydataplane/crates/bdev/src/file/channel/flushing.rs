//! Flushes of a channel, which go in groups with those of other channels of the file
//! ([`crate::file::flush`]): a success counts when all that ran beside it have ended and none failed.

use std::sync::Arc;

use reactor::Full;

use super::FileChannel;
use super::slot::Step;
use crate::file::{Shared, errno};
use crate::{Completion, FlushCause, IoError, Op};

/// Flushes of a channel that are in the kernel, each a member of its file's group.
pub(super) struct Joined {
    pub count: u32,
    pub shared: Arc<Shared>,
}

impl Drop for Joined {
    fn drop(&mut self) {
        for _ in 0..self.count {
            let _ = self.shared.flushes.leave();
        }
    }
}

impl FileChannel {
    /// Pushes the fdatasync of slot `n`, if its file's group is open.
    pub(super) fn push_flush(&mut self, n: u16) -> Result<(), Full> {
        if !self.shared.flushes.join() {
            return Err(Full);
        }
        let (entry, weight) = self.slots[n].entry(&self.shared, &mut self.bounces, self.zeroes);
        #[cfg(test)]
        self.pushed.push(super::tests::Pushed::of(&entry));
        // SAFETY: as in `push`: the file lives as long as this channel; there is no buffer.
        let pushed = unsafe { self.uring.push(entry, u32::from(n), weight) };
        match pushed {
            Ok(()) => self.joined.count += 1,
            Err(Full) => drop(self.shared.flushes.leave()),
        }
        pushed
    }

    /// The kernel is through with the fdatasync of slot `n`: the end of its I/O, or `None` if that
    /// has to wait.
    pub(super) fn flushed(&mut self, n: u16, result: i32) -> Option<Result<(), IoError>> {
        self.joined.count -= 1;
        let errno = result.wrapping_neg();
        let slot = &mut self.slots[n];
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
    pub(super) fn end_held(&mut self, done: &mut Vec<Completion>) {
        let now = reactor::ticks::now();
        let mut i = 0;
        while done.len() < done.capacity()
            && let Some(&(n, group)) = self.held.get(i)
        {
            if self.shared.flushes.is_over(group) {
                self.held.swap_remove(i);
                let verdict = self.verdict();
                let completion = self.finish(n, verdict, now);
                done.push(completion);
            } else {
                i += 1;
            }
        }
    }

    /// Has the thread woken when the group is over that one of its flushes waits for.
    #[cold]
    pub(super) fn await_group(&mut self) {
        let flush = |n: &u16| self.slots[*n].step == Step::Syncing;
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
}
