//! Large direct reads and writes, which go to the kernel piece by piece.
//!
//! The kernel pins every page of a transfer before the submission returns, and lets go of them in the
//! disk's interrupt. Whole, 4 MiB keep a CPU for a fifth of a millisecond at each end, be it the
//! reactor's or, by way of one of the kernel's workers, one that a guest's processor runs on; a kernel
//! without preemption lets nobody else have it meanwhile. So all channels of a thread together hand over
//! [`TURN_BYTES`] a turn, in rotation of their owners, and all guests of the reactor have their turn in
//! between. The pieces of an I/O are with the disk side by side, but no more than the file's owners have room
//! for ([`crate::file::larges`]).
//!
//! Seen on two CPUs (`python -m tests.bench.noisy`): a guest that reads 4 KiB of memory at a time, beside
//! one with 256 READs of 4 MiB of a disk, has a p99 of 0.1 ms where it was 0.4 to 0.5 ms with workers; the
//! disk is no slower. If those READs are of 64 LUNs, it is 0.13 to 0.15 ms, where a budget and 64 pieces of
//! each channel made it 0.07 to 10 ms.
//!
//! Pieces are written without FUA. When the last one of a write that is to be durable has ended, one
//! fdatasync makes all of them so, which other flushes share, and only then the write is acknowledged.
//!
//! A piece that does not end as it should says nothing about what is to be done: when the others have
//! ended, the I/O begins again as a whole, in the way that knows about errors.

use std::collections::VecDeque;

use guestmem::Sg;
use io_uring::{opcode, squeue};
use reactor::{FileName, TURN_BYTES};

use super::{DEPTH, FileChannel, Shared, Slot, Step, of_runs};
use crate::file::larges::Pieces;
use crate::{Io, IoError, Op};

/// Bytes of one piece at most.
pub(super) const PIECE: usize = TURN_BYTES as usize;
/// What is no longer is no large transfer: it goes as it is.
pub(super) const SMALL: usize = 16 << 10;
/// A piece's length is in its token, in these units.
const UNIT: u32 = 512;

/// The large transfers of a channel.
pub(super) struct Large {
    /// Slots with pieces that the kernel has not been given, in order.
    pub(super) queue: VecDeque<u16>,
    /// Those in the kernel.
    pub(super) pieces: Pieces,
}

/// How far a transfer is.
#[derive(Clone, Copy)]
pub(super) struct Cut {
    /// The next byte is in this run, so many bytes behind its start.
    run: usize,
    within: usize,
    /// Bytes handed to the kernel.
    sent: u64,
    /// Pieces in the kernel.
    flying: u32,
    /// A piece did not end as it should.
    broken: bool,
}

impl Large {
    pub(super) fn new(pieces: Pieces) -> Self {
        Large { queue: VecDeque::with_capacity(usize::from(DEPTH)), pieces }
    }

    /// Counts the channel, or no longer, after transfers or pieces of them came or went.
    fn count(&mut self) {
        if self.queue.is_empty() {
            self.pieces.release();
        }
        self.pieces.count(self.pieces.flying() > 0 || !self.queue.is_empty());
    }
}

/// A piece of a list of runs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Piece {
    /// Its first run.
    pub first: usize,
    /// Bytes of that which are before it.
    pub within: usize,
    /// Whole runs, as the caller's list of them goes to the kernel; 1: perhaps a part of it.
    pub runs: usize,
    /// Bytes.
    pub len: usize,
    /// Bytes of the transfer before it.
    pub at: u64,
}

impl Cut {
    /// Nothing was handed over.
    pub(super) const NONE: Cut = Cut { run: 0, within: 0, sent: 0, flying: 0, broken: false };

    /// The next piece of `sg`, of at most [`PIECE`] bytes.
    fn next(&self, sg: &Sg) -> Piece {
        let runs = sg.as_slice();
        let &Cut { run: first, within, sent: at, .. } = self;
        let left = runs[first].len() - within;
        if within > 0 || left > PIECE {
            return Piece { first, within, runs: 1, len: left.min(PIECE), at };
        }
        let (mut count, mut len) = (1, left);
        while let Some(run) = runs.get(first + count)
            && len + run.len() <= PIECE
        {
            len += run.len();
            count += 1;
        }
        Piece { first, within, runs: count, len, at }
    }

    /// `piece`, the next one of `sg`, is in the kernel.
    fn pass(&mut self, piece: &Piece, sg: &Sg) {
        self.sent += piece.len as u64;
        self.flying += 1;
        self.within += piece.len;
        if piece.runs > 1 || self.within == sg.as_slice()[self.run].len() {
            (self.run, self.within) = (self.run + piece.runs, 0);
        }
    }
}

impl Slot {
    /// The submission entry of a piece.
    fn piece(&self, shared: &Shared, file: FileName, piece: &Piece) -> squeue::Entry {
        let fd = file.number();
        let offset = self.io.lba * u64::from(shared.block_size) + piece.at;
        let runs = &self.io.sg.as_slice()[piece.first..piece.first + piece.runs];
        let entry = match runs {
            [run] => {
                // SAFETY: a piece is within its run.
                let (at, len) = (unsafe { run.base().add(piece.within) }, piece.len as u32);
                match self.io.op {
                    Op::Read => opcode::Read::new(fd, at, len).offset(offset).build(),
                    _ => opcode::Write::new(fd, at, len).offset(offset).build(),
                }
            }
            runs => of_runs(self.io.op, runs, fd, offset, 0),
        };
        file.mark(entry)
    }
}

impl FileChannel {
    /// Whether a read or write of more than [`SMALL`] bytes goes piece by piece. A write that is to be
    /// durable at its end (FUA) and is one piece goes as it is, as then the kernel needs no fdatasync.
    #[inline]
    pub(super) fn is_large(&self, io: &Io) -> bool {
        let block = self.shared.block_size as usize;
        self.shared.direct
            && (io.sg.len() > PIECE || !(io.fua && io.op == Op::Write))
            && io.sg.as_slice().iter().all(|run| !run.is_empty() && run.len().is_multiple_of(block))
    }

    /// Begins the transfer of slot `n`.
    pub(super) fn begin_large(&mut self, n: u16) {
        self.large.queue.push_back(n);
        self.large.count();
        self.push_pieces();
    }

    /// Hands pieces to the kernel, as many bytes as it may have of this channel in this turn. When it takes
    /// none, the end of one that it has is what is waited for.
    pub(super) fn push_pieces(&mut self) {
        while let Some(&n) = self.large.queue.front() {
            let slot = &mut self.slots[n];
            // One of the channel's that waits for a worker ends first, as in `push`.
            let submit_waits = self.shared.submit_waits;
            if submit_waits && self.working.is_full() || !self.large.pieces.reserve() {
                break;
            }
            let piece = slot.cut.next(&slot.io.sg);
            let now = reactor::ticks::now();
            if !self.share.begin(now) {
                self.share.wait();
                break;
            }
            if !self.uring.spend_share(piece.len as u32) {
                self.share.end(None);
                // Whoever looks again must not be asleep until the disk is through.
                return self.waker.wake();
            }
            let mut entry = slot.piece(&self.shared, self.file, &piece);
            if submit_waits {
                entry = entry.flags(squeue::Flags::ASYNC);
            }
            #[cfg(test)]
            self.pushed.push(super::tests::Pushed::of(&entry));
            let token = u32::from(n) | (piece.len as u32 / UNIT) << 16;
            // SAFETY: as in `push`; the list of runs is the caller's.
            if unsafe { self.uring.push(entry, token, 0) }.is_err() {
                self.share.end(None);
                if self.large.pieces.flying() == 0 {
                    self.waker.wake();
                }
                break;
            }
            self.large.pieces.pushed();
            if submit_waits {
                self.working.add();
            }
            slot.sent = now;
            slot.cut.pass(&piece, &slot.io.sg);
            if slot.cut.sent == slot.io.sg.len() as u64 {
                self.large.queue.pop_front();
            }
        }
        self.uring.leave_shares();
    }

    /// The kernel is through with a piece of slot `n`, whose length `token` tells: the end of its I/O, or
    /// `None` if there is more to do.
    pub(super) fn piece_ended(
        &mut self,
        n: u16,
        token: u32,
        result: i32,
    ) -> Option<Result<(), IoError>> {
        self.large.pieces.ended();
        if self.shared.submit_waits {
            self.working.remove(1);
        }
        let slot = &mut self.slots[n];
        slot.cut.flying -= 1;
        // Of others it is not known when which piece was sent.
        let only = slot.io.sg.len() <= PIECE && result >= 0;
        self.share.end(only.then(|| reactor::ticks::now().saturating_sub(slot.sent)));
        if u32::try_from(result) != Ok((token >> 16) * UNIT) && !slot.cut.broken {
            slot.cut.broken = true;
            if slot.cut.sent < slot.io.sg.len() as u64 {
                self.large.queue.retain(|&queued| queued != n);
                if self.large.queue.is_empty() {
                    self.uring.leave_shares();
                }
            }
        }
        self.large.count();
        if slot.cut.flying > 0 {
            return None;
        }
        if slot.cut.broken {
            slot.step = Step::Plain;
            self.again.push(n);
            return None;
        }
        if slot.cut.sent < slot.io.sg.len() as u64 {
            return None;
        }
        if slot.io.fua && slot.io.op == Op::Write {
            self.flush(n);
            return None;
        }
        Some(Ok(()))
    }
}
