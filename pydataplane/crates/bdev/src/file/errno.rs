//! What the guest's I/O ends with when the kernel says no.

use crate::{IoError, Op};

/// Whether the same call may succeed a moment later.
pub(super) fn is_transient(errno: i32) -> bool {
    matches!(errno, libc::EINTR | libc::EAGAIN)
}

/// Whether the file system has no such operation (ENOTTY, EINVAL: some FUSE file systems).
pub(super) fn is_unsupported(errno: i32) -> bool {
    matches!(errno, libc::EOPNOTSUPP | libc::ENOSYS | libc::ENOTTY)
}

/// The error of `op` that failed with `errno` (positive). Never a success.
pub(super) fn to_error(op: Op, errno: i32) -> IoError {
    match errno {
        libc::ECANCELED => return IoError::Aborted,
        // After any other failed flush, writes that were acknowledged may be gone.
        _ if op == Op::Flush => return IoError::Flush,
        _ => {}
    }
    match errno {
        // EFBIG: the process's or the file system's limit of a file's size.
        libc::ENOSPC | libc::EDQUOT | libc::EFBIG => IoError::NoSpace,
        libc::EROFS | libc::EPERM | libc::EACCES | libc::ETXTBSY if op.is_write() => {
            IoError::ReadOnly
        }
        libc::ENXIO | libc::ENODEV | libc::ENOMEDIUM | libc::ESTALE | libc::ESHUTDOWN => {
            IoError::Removed
        }
        libc::ENOMEM | libc::ENOBUFS | libc::EAGAIN | libc::EINTR | libc::EBUSY => {
            IoError::Resources
        }
        e if is_unsupported(e) => IoError::Unsupported,
        // EIO, ENODATA, EILSEQ, EBADMSG, EUCLEAN, EREMOTEIO, ETIMEDOUT, ENOLINK, and whatever
        // else a file system thinks of.
        _ if op == Op::Read => IoError::ReadMedium,
        _ => IoError::WriteMedium,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_kind_by_operation() {
        use IoError::*;
        let cases = [
            (Op::Read, libc::EIO, ReadMedium),
            (Op::Write, libc::EIO, WriteMedium),
            (Op::Unmap, libc::EIO, WriteMedium),
            (Op::Flush, libc::EIO, Flush),
            (Op::Flush, libc::ENOSPC, Flush),
            (Op::Flush, libc::ECANCELED, Aborted),
            (Op::Write, libc::ENOSPC, NoSpace),
            (Op::WriteZeroes, libc::EDQUOT, NoSpace),
            (Op::Write, libc::EROFS, ReadOnly),
            (Op::Read, libc::EACCES, ReadMedium),
            (Op::Read, libc::ENXIO, Removed),
            (Op::Read, libc::ENOMEM, Resources),
            (Op::Unmap, libc::EOPNOTSUPP, Unsupported),
            (Op::Write, libc::EFAULT, WriteMedium),
            (Op::Read, 4095, ReadMedium),
        ];
        for (op, errno, want) in cases {
            assert_eq!(to_error(op, errno), want, "{op:?} {errno}");
        }
    }
}
