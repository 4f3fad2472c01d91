//! Files that live in memory (tmpfs): a read or write is a copy, so the call is made at once.
//!
//! io_uring has no non-blocking path into tmpfs and hands every single I/O to a kernel thread,
//! which costs three times as much as the copy itself and a wake-up at low queue depth.

use std::os::fd::{AsFd, AsRawFd};

use crate::{Io, Op};

use super::Shared;

/// `f_type` of tmpfs and ramfs (statfs(2)).
const MEMORY_FILE_SYSTEMS: [i64; 2] = [0x0102_1994, 0x8584_58f6];

/// Whether the file lives in memory.
pub(super) fn is_in_memory(fd: impl AsFd) -> bool {
    rustix::fs::fstatfs(fd).is_ok_and(|s| MEMORY_FILE_SYSTEMS.contains(&s.f_type))
}

/// Reads or writes all of `io`, whose list the kernel takes as it is; `false` if any of it
/// failed, and then it is to be tried the ordinary way, which knows what to do with errors.
#[inline]
pub(super) fn copy(io: &Io, shared: &Shared) -> bool {
    let runs = io.sg.as_slice();
    let iov = runs.as_ptr().cast::<libc::iovec>();
    let count = runs.len() as libc::c_int;
    let offset = (io.lba * u64::from(shared.block_size)) as libc::off64_t;
    let fd = shared.fd.as_raw_fd();
    let moved = match io.op {
        // SAFETY: `count` runs that are valid until the I/O completes (`Sg::new`).
        Op::Read => unsafe { libc::preadv64v2(fd, iov, count, offset, 0) },
        Op::Write => {
            let flags = if io.fua { libc::RWF_DSYNC } else { 0 };
            // SAFETY: as above.
            unsafe { libc::pwritev64v2(fd, iov, count, offset, flags) }
        }
        Op::Flush | Op::Unmap | Op::WriteZeroes => return false,
    };
    usize::try_from(moved) == Ok(io.sg.len())
}
