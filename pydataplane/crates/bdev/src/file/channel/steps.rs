//! I/Os that do not end with their first step: a copy in memory, piece by piece; a short transfer, an
//! unaligned buffer, a file system without ZERO_RANGE, EAGAIN.

use std::io;
use std::sync::OnceLock;
use std::sync::atomic::Ordering::Relaxed;

use reactor::Full;

use super::{FileChannel, Slot, Step};
use crate::file::{errno, memory};
use crate::ram::Ram;
use crate::{Completion, FlushCause, IoError, Op};

/// Steps without progress (EAGAIN, EINTR, nothing written) before an I/O is given up.
pub(super) const TRIES_MAX: u8 = 16;

/// Bytes of zeros written at once where ZERO_RANGE is missing.
pub(super) const ZEROES: usize = 1 << 20;

/// Memory that is never written, so that it is the kernel's shared page of zeros.
pub(super) fn zeroes() -> io::Result<&'static Ram> {
    static ZERO: OnceLock<Ram> = OnceLock::new();
    if let Some(z) = ZERO.get() {
        return Ok(z);
    }
    let ram = Ram::new(ZEROES)?;
    Ok(ZERO.get_or_init(|| ram))
}

impl Slot {
    /// After a step without progress: another one (`None`), or the end of the I/O.
    fn try_again(&mut self, give_up: IoError) -> Option<Result<(), IoError>> {
        self.tries += 1;
        (self.tries > TRIES_MAX).then_some(Err(give_up))
    }
}

impl FileChannel {
    /// The next piece of a read or write of a file in memory, of whichever has its turn.
    pub(super) fn copy_piece(&mut self, done: &mut Vec<Completion>) {
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
    pub(super) fn go_on(&mut self) {
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

    /// Pushes what waits for its owner's share of the disk, as far as there is room at `now`, in ticks.
    pub(super) fn let_go(&mut self, now: u64) {
        while let Some(&n) = self.held.front() {
            if !self.share.begin(now) {
                return self.share.wait();
            }
            let slot = &mut self.slots[n];
            (slot.sent, slot.shares) = (now, true);
            if self.push(n).is_ok() {
                self.held.pop_front();
            } else if self.slots[n].worker {
                self.held.pop_front();
                self.again.push(n);
            } else {
                // For want of a bounce buffer or of room in the ring, as in `go_on`.
                self.slots[n].shares = false;
                self.share.end(None);
                return;
            }
        }
    }

    /// A part of slot `n`'s range is no longer in the kernel: what follows has its turn behind all that waits
    /// for the owner's share.
    fn next_turn(&mut self, n: u16) {
        self.slots[n].shares = false;
        self.share.end(None);
        if self.slots[n].step == Step::Syncing {
            return self.flush(n);
        }
        if self.held.is_empty() && self.share.begin(reactor::ticks::now()) {
            self.slots[n].shares = true;
            return self.again.push(n);
        }
        self.held.push_back(n);
        self.share.wait();
    }

    /// The kernel is through with a step of slot `n`: the end of its I/O, or `None` if there is
    /// more to do, and then it stands in `again`.
    pub(super) fn stepped(&mut self, n: u16, result: i32) -> Option<Result<(), IoError>> {
        if self.slots[n].worker {
            self.working.remove(1);
        }
        let end = match u32::try_from(result) {
            Ok(moved) => self.moved(n, moved),
            Err(_) => self.refused(n, result.wrapping_neg()),
        };
        if end.is_none() {
            let slot = &self.slots[n];
            match slot.step {
                _ if slot.shares && !matches!(slot.io.op, Op::Read | Op::Write) => {
                    self.next_turn(n)
                }
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
            (Op::Unmap | Op::WriteZeroes, Step::Plain) => {
                slot.part_done();
                slot.tries = 0;
            }
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
            if slot.step == Step::Plain && !slot.is_range() {
                slot.step = Step::Bounced;
            }
            return None;
        }
        if slot.io.fua && slot.io.op.is_write() {
            if !self.shared.syncs(slot.io.op) {
                slot.step = Step::Syncing;
                return None;
            }
            // It may have waited for long, and another one have taken the report of what was lost below
            // it: as with a flush that waits.
            if self.shared.latch.failures() != slot.failures {
                return Some(Err(IoError::Flush));
            }
        }
        Some(Ok(()))
    }
}
