//! What the guest's I/O ends with when librbd says no.

use bdev::{IoError, Op};

use crate::ffi::EBLOCKLISTED;

/// The error of `op` that failed with `errno` (positive). Never a success.
pub(crate) fn to_error(op: Op, errno: i32) -> IoError {
    match errno {
        // The cluster does not take anything from this client any more, or the image was deleted.
        EBLOCKLISTED | libc::ENOENT | libc::ENODEV | libc::ENXIO => return IoError::Removed,
        libc::ECANCELED => return IoError::Aborted,
        _ if op == Op::Flush => return IoError::Flush,
        _ => {}
    }
    match errno {
        libc::ENOSPC | libc::EDQUOT => IoError::NoSpace,
        // The lock is another's, or the user may not write to the pool.
        libc::EROFS | libc::EPERM | libc::EACCES if op.is_write() => IoError::ReadOnly,
        libc::ENOMEM | libc::EAGAIN | libc::EBUSY => IoError::Resources,
        libc::EOPNOTSUPP | libc::ENOSYS => IoError::Unsupported,
        // The image has become smaller since the I/O was checked.
        libc::EINVAL => IoError::OutOfRange,
        // Of a write that looks what is there; and who reads gets no such answer.
        libc::EILSEQ if op == Op::Write => IoError::Miscompare,
        // EIO, EILSEQ, ETIMEDOUT (`rados_osd_op_timeout`) and the like.
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
            (Op::Unmap, libc::ETIMEDOUT, WriteMedium),
            (Op::Flush, libc::EIO, Flush),
            (Op::Flush, libc::ESHUTDOWN, Removed),
            (Op::Write, libc::ESHUTDOWN, Removed),
            (Op::Read, libc::ESHUTDOWN, Removed),
            (Op::Read, libc::ENOENT, Removed),
            (Op::Write, libc::ENOSPC, NoSpace),
            (Op::WriteZeroes, libc::EDQUOT, NoSpace),
            (Op::Write, libc::EROFS, ReadOnly),
            (Op::Read, libc::EROFS, ReadMedium),
            (Op::Write, libc::ECANCELED, Aborted),
            (Op::Read, libc::ENOMEM, Resources),
            (Op::Write, libc::EINVAL, OutOfRange),
            (Op::Unmap, libc::EOPNOTSUPP, Unsupported),
            (Op::Write, libc::EILSEQ, Miscompare),
            (Op::Read, libc::EILSEQ, ReadMedium),
            (Op::Read, 4095, ReadMedium),
        ];
        for (op, errno, want) in cases {
            assert_eq!(to_error(op, errno), want, "{op:?} {errno}");
        }
    }
}
