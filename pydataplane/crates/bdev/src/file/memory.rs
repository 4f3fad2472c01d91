//! Files that live in memory (tmpfs): a read or write is a copy, so the call is made at once, for a long
//! one piece by piece.
//!
//! io_uring has no non-blocking path into tmpfs and hands every single I/O to a kernel thread,
//! which costs three times as much as the copy itself and a wake-up at low queue depth.

use std::os::fd::{AsFd, AsRawFd};

use guestmem::IoVec;

use crate::{COPY_AT_ONCE, Io, Op};

use super::Shared;

/// `f_type` of tmpfs and ramfs (statfs(2)).
const MEMORY_FILE_SYSTEMS: [i64; 2] = [0x0102_1994, 0x8584_58f6];

/// Whether the file lives in memory.
pub(super) fn is_in_memory(fd: impl AsFd) -> bool {
    rustix::fs::fstatfs(fd).is_ok_and(|s| MEMORY_FILE_SYSTEMS.contains(&s.f_type))
}

/// Runs of one piece; a piece that is scattered over more of them becomes shorter.
const PIECE_RUNS: usize = 64;

/// Reads or writes the next piece of `io` after `at` bytes: how many, or `None` if it failed, and then
/// it is to be tried the ordinary way, which knows what to do with errors.
#[inline]
pub(super) fn copy(io: &Io, at: usize, shared: &Shared) -> Option<usize> {
    let left = io.sg.len() - at;
    if at == 0 && left <= COPY_AT_ONCE {
        return transfer(io, io.sg.as_slice(), left, 0, shared);
    }
    let mut runs = [IoVec::EMPTY; PIECE_RUNS];
    let mut len = left.min(COPY_AT_ONCE);
    let used = loop {
        if let Some(used) = io.sg.slice_into(at, len, &mut runs) {
            break used;
        }
        len = len / 2 / 512 * 512;
    };
    match len {
        0 => None,
        _ => transfer(io, &runs[..used], len, at, shared),
    }
}

/// Reads or writes `len` bytes, which are those of `runs`.
#[inline]
fn transfer(io: &Io, runs: &[IoVec], len: usize, at: usize, shared: &Shared) -> Option<usize> {
    let iov = runs.as_ptr().cast::<libc::iovec>();
    let count = runs.len() as libc::c_int;
    let offset = (io.lba * u64::from(shared.block_size)) as libc::off64_t + at as libc::off64_t;
    let fd = shared.fd.as_raw_fd();
    let moved = match io.op {
        // SAFETY: `count` runs that are valid until the I/O completes (`Sg::new`).
        Op::Read => unsafe { libc::preadv64v2(fd, iov, count, offset, 0) },
        Op::Write => {
            let flags = if io.fua { libc::RWF_DSYNC } else { 0 };
            // SAFETY: as above.
            unsafe { libc::pwritev64v2(fd, iov, count, offset, flags) }
        }
        Op::Flush | Op::Unmap | Op::WriteZeroes => return None,
    };
    (usize::try_from(moved) == Ok(len)).then_some(len)
}
