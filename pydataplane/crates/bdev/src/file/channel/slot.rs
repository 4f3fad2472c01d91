//! One I/O of a channel, and what the kernel is asked to do for it next.

use std::io;
use std::os::fd::AsRawFd;
use std::sync::OnceLock;

use guestmem::IoVec;
use io_uring::{opcode, squeue, types};

use super::large::{Cut, Piece};
use crate::file::Shared;
use crate::file::bounce::{BOUNCE_SIZE, Bounce, Bounces};
use crate::ram::Ram;
use crate::{Io, IoError, Op};

/// Steps without progress (EAGAIN, EINTR, nothing written) before an I/O is given up.
pub(super) const TRIES_MAX: u8 = 16;

/// Bytes of zeros written at once where ZERO_RANGE is missing.
const ZEROES: usize = 1 << 20;

/// Memory that is never written, so that it is the kernel's shared page of zeros.
pub(super) fn zeroes() -> io::Result<&'static Ram> {
    static ZERO: OnceLock<Ram> = OnceLock::new();
    if let Some(z) = ZERO.get() {
        return Ok(z);
    }
    let ram = Ram::new(ZEROES)?;
    Ok(ZERO.get_or_init(|| ram))
}

/// What a slot does now.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum Step {
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
pub(super) struct Slot {
    pub io: Io,
    /// When it was submitted, in ticks.
    pub begun: u64,
    pub step: Step,
    /// Bytes done.
    pub done: u64,
    pub tries: u8,
    pub bounce: Option<Bounce>,
    /// One of the kernel's workers may be waiting for its step.
    pub worker: bool,
    /// How far it is, where it goes in pieces.
    pub cut: Cut,
}

impl Slot {
    /// An I/O of which nothing is done yet.
    #[inline]
    pub const fn new(io: Io, step: Step, begun: u64) -> Slot {
        Slot { io, begun, step, done: 0, tries: 0, bounce: None, worker: false, cut: Cut::NONE }
    }

    /// After a step without progress: another one (`None`), or the end of the I/O.
    pub fn try_again(&mut self, give_up: IoError) -> Option<Result<(), IoError>> {
        self.tries += 1;
        (self.tries > TRIES_MAX).then_some(Err(give_up))
    }

    /// The submission entry of a piece.
    pub fn piece(&self, shared: &Shared, piece: &Piece) -> squeue::Entry {
        let fd = types::Fd(shared.fd.as_raw_fd());
        let offset = self.io.lba * u64::from(shared.block_size) + piece.at;
        let runs = &self.io.sg.as_slice()[piece.first..piece.first + piece.runs];
        match runs {
            [run] => {
                // SAFETY: a piece is within its run.
                let (at, len) = (unsafe { run.base().add(piece.within) }, piece.len as u32);
                match self.io.op {
                    Op::Read => opcode::Read::new(fd, at, len).offset(offset).build(),
                    _ => opcode::Write::new(fd, at, len).offset(offset).build(),
                }
            }
            runs => of_runs(self.io.op, runs, fd, offset, 0),
        }
    }

    /// The submission entry of the next step, and its weight: the bytes that the kernel pins or copies
    /// before the call returns.
    #[inline]
    pub fn entry(
        &self,
        shared: &Shared,
        bounces: &mut Bounces,
        zeroes: &Ram,
    ) -> (squeue::Entry, u32) {
        let fd = types::Fd(shared.fd.as_raw_fd());
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
                (entry, BOUNCE_SIZE as u32)
            }
            (Op::Read | Op::Write, _) => (whole(io, fd, offset, dsync), io.sg.len() as u32),
            // A fallocate goes to a worker by itself, and zeros are not pinned.
            (Op::Unmap, _) => {
                let mode = libc::FALLOC_FL_PUNCH_HOLE | libc::FALLOC_FL_KEEP_SIZE;
                (opcode::Fallocate::new(fd, left).offset(offset).mode(mode).build(), 0)
            }
            (Op::WriteZeroes, Step::Zeroing) => {
                let len = left.min(ZEROES as u64) as u32;
                (opcode::Write::new(fd, zeroes.at(0, ZEROES), len).offset(offset).build(), 0)
            }
            (Op::WriteZeroes, _) => {
                let mode = libc::FALLOC_FL_ZERO_RANGE | libc::FALLOC_FL_KEEP_SIZE;
                (opcode::Fallocate::new(fd, left).offset(offset).mode(mode).build(), 0)
            }
        }
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
        (op, _) => of_runs(op, runs, fd, offset, dsync),
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
