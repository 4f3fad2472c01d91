//! The protocol's numbers, requests and simple replies (the NBD project's `doc/proto.md`). All numbers are
//! big-endian.

use bdev::{IoError, Op};

/// Flags of an export ("transmission flags").
pub(crate) mod flag {
    pub const READ_ONLY: u16 = 1 << 1;
    pub const SEND_FLUSH: u16 = 1 << 2;
    pub const SEND_FUA: u16 = 1 << 3;
    pub const SEND_TRIM: u16 = 1 << 5;
    pub const SEND_WRITE_ZEROES: u16 = 1 << 6;
    pub const CAN_MULTI_CONN: u16 = 1 << 8;
}

/// Bytes of a request, without data.
pub(crate) const REQUEST: usize = 28;
/// Bytes of a simple reply, without data.
pub(crate) const REPLY: usize = 16;

const REQUEST_MAGIC: u32 = 0x2560_9513;
const REPLY_MAGIC: u32 = 0x6744_6698;

/// NBD_CMD_FLAG_FUA.
const FUA: u16 = 1;

/// NBD_CMD_DISC.
const DISCONNECT: u16 = 2;

/// NBD_ESHUTDOWN: the server is going away.
pub(crate) const GOES_AWAY: u32 = 108;

fn command(op: Op) -> u16 {
    match op {
        Op::Read => 0,
        Op::Write => 1,
        Op::Flush => 3,
        Op::Unmap => 4,
        // Without NO_HOLE: whether the blocks are deallocated is the server's choice.
        Op::WriteZeroes => 6,
    }
}

/// A request.
pub(crate) fn request(op: Op, fua: bool, handle: u64, offset: u64, len: u32) -> [u8; REQUEST] {
    let flags = if fua && op.is_write() { FUA } else { 0 };
    encoded(command(op), flags, handle, offset, len)
}

/// The request after which the server ends the connection.
pub(crate) fn disconnect() -> [u8; REQUEST] {
    encoded(DISCONNECT, 0, 0, 0, 0)
}

fn encoded(command: u16, flags: u16, handle: u64, offset: u64, len: u32) -> [u8; REQUEST] {
    let mut bytes = [0; REQUEST];
    bytes[..4].copy_from_slice(&REQUEST_MAGIC.to_be_bytes());
    bytes[4..6].copy_from_slice(&flags.to_be_bytes());
    bytes[6..8].copy_from_slice(&command.to_be_bytes());
    bytes[8..16].copy_from_slice(&handle.to_be_bytes());
    bytes[16..24].copy_from_slice(&offset.to_be_bytes());
    bytes[24..].copy_from_slice(&len.to_be_bytes());
    bytes
}

/// A simple reply: the error (0: none) and the handle; `None`: it is none.
pub(crate) fn reply(bytes: &[u8; REPLY]) -> Option<(u32, u64)> {
    let word =
        |at: usize| u32::from_be_bytes([bytes[at], bytes[at + 1], bytes[at + 2], bytes[at + 3]]);
    let handle = u64::from(word(8)) << 32 | u64::from(word(12));
    (word(0) == REPLY_MAGIC).then(|| (word(4), handle))
}

/// What the guest's I/O ends with when the server says `error`. Never a success.
pub(crate) fn io_error(op: Op, error: u32) -> IoError {
    match (op, error) {
        (Op::Flush, _) => IoError::Flush,
        // NBD_EPERM, of a change: the export is read-only.
        (Op::Write | Op::Unmap | Op::WriteZeroes, 1) => IoError::ReadOnly,
        // NBD_ENOMEM.
        (_, 12) => IoError::Resources,
        // NBD_ENOSPC.
        (Op::Write | Op::Unmap | Op::WriteZeroes, 28) => IoError::NoSpace,
        // NBD_ENOTSUP.
        (_, 95) => IoError::Unsupported,
        (Op::Read, _) => IoError::ReadMedium,
        (Op::Write | Op::Unmap | Op::WriteZeroes, _) => IoError::WriteMedium,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_request_is_as_the_protocol_says() {
        let bytes = request(Op::WriteZeroes, true, 0x0102_0304_0506_0708, 1 << 40, 4096);
        assert_eq!(bytes[..8], [0x25, 0x60, 0x95, 0x13, 0, 1, 0, 6]);
        assert_eq!(bytes[8..16], [1, 2, 3, 4, 5, 6, 7, 8]);
        assert_eq!(bytes[16..], [0, 0, 1, 0, 0, 0, 0, 0, 0, 0, 0x10, 0]);
        // FUA has no meaning there.
        assert_eq!(request(Op::Read, true, 0, 0, 512)[4..8], [0; 4]);
    }

    #[test]
    fn no_error_of_a_server_is_a_success_and_a_flush_fails_as_one() {
        for op in Op::ALL {
            for error in [1, 5, 12, 22, 28, 75, 95, 108, u32::MAX] {
                let is_flush = io_error(op, error) == IoError::Flush;
                assert_eq!(is_flush, op == Op::Flush, "{op:?} {error}");
            }
        }
        assert_eq!(io_error(Op::Read, 28), IoError::ReadMedium);
        assert_eq!(io_error(Op::Write, 28), IoError::NoSpace);
    }
}
