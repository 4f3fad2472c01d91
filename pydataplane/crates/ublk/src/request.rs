//! What the kernel asks for, checked. Pure functions of numbers.

use bdev::AlignedBuf;

use crate::abi::{IO_FUA, IoDesc, SECTOR, op};

/// What a request may be at most.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Limits {
    /// Requests at a time, 1 to 4096.
    pub depth: u16,
    /// Bytes of one read or write at most, a multiple of a page.
    pub max_io_bytes: u32,
    /// Bytes of a block, 512 to 4096.
    pub block_size: u32,
}

/// What to do.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Op {
    /// To read into the request's buffer.
    Read,
    /// To write from it; `durably`: before it is answered it is to be on the medium.
    Write {
        /// FUA.
        durably: bool,
    },
    /// To make durable what was written.
    Flush,
    /// To give up what is stored.
    Discard,
    /// To write zeros.
    WriteZeroes,
}

/// The right to answer one request, once: [`crate::Queue::commit`].
#[derive(Debug)]
pub struct Ticket {
    /// The kernel's name of it.
    pub(crate) tag: u16,
    /// What it is answered with when it was done.
    pub(crate) done: i32,
}

/// One request.
#[derive(Debug)]
pub struct Request {
    /// To be given back with its answer.
    pub ticket: Ticket,
    /// What to do.
    pub op: Op,
    /// First byte, a multiple of a block.
    pub offset: u64,
    /// Bytes, a multiple of a block; not 0 but for [`Op::Flush`]. Of a read or write at most
    /// [`Limits::max_io_bytes`].
    pub bytes: u64,
    /// Of [`Limits::max_io_bytes`]: data of a write, room for a read. To be given back, too, or one as
    /// long.
    pub buf: AlignedBuf,
}

/// A request in the kernel's table that is none.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Malformed;

impl Limits {
    /// The operation, first byte and number of bytes of a request whose buffer is at `addr`.
    ///
    /// # Errors
    /// [`Malformed`]: not an operation that was announced, not whole blocks, too long, beyond what
    /// can be counted, or another buffer. Where the device ends is for who serves it to know.
    pub fn check(&self, desc: &IoDesc, addr: u64) -> Result<(Op, u64, u64), Malformed> {
        let op = match (desc.op_flags & 0xff) as u8 {
            op::READ => Op::Read,
            op::WRITE => Op::Write { durably: desc.op_flags & IO_FUA != 0 },
            op::FLUSH => return Ok((Op::Flush, 0, 0)),
            op::DISCARD => Op::Discard,
            op::WRITE_ZEROES => Op::WriteZeroes,
            _ => return Err(Malformed),
        };
        let bytes = u64::from(desc.nr_sectors) * SECTOR;
        let offset = desc.start_sector.checked_mul(SECTOR).ok_or(Malformed)?;
        offset.checked_add(bytes).ok_or(Malformed)?;
        let block = u64::from(self.block_size);
        let whole = bytes > 0 && bytes.is_multiple_of(block) && offset.is_multiple_of(block);
        let fits = match op {
            Op::Read | Op::Write { .. } => {
                bytes <= u64::from(self.max_io_bytes) && desc.addr == addr
            }
            Op::Flush | Op::Discard | Op::WriteZeroes => true,
        };
        if whole && fits { Ok((op, offset, bytes)) } else { Err(Malformed) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    const LIMITS: Limits = Limits { depth: 64, max_io_bytes: 512 << 10, block_size: 4096 };
    const ADDR: u64 = 0x7000_0000_0000;

    fn desc(op_flags: u32, nr_sectors: u32, start_sector: u64) -> IoDesc {
        IoDesc { op_flags, nr_sectors, start_sector, addr: ADDR }
    }

    #[test]
    fn requests_are_what_the_kernel_means() {
        let check = |desc| LIMITS.check(&desc, ADDR);
        assert_eq!(check(desc(0, 8, 16)), Ok((Op::Read, 8192, 4096)));
        // FAILFAST_DEV does not matter here.
        let durably = Op::Write { durably: true };
        assert_eq!(check(desc(1 | 1 << 13 | 1 << 8, 1024, 0)), Ok((durably, 0, 512 << 10)));
        assert_eq!(check(desc(2, 0, 0)), Ok((Op::Flush, 0, 0)));
        assert_eq!(check(desc(3, 1 << 21, 8)), Ok((Op::Discard, 4096, 1 << 30)));
        assert_eq!(check(desc(5, 8, 8)), Ok((Op::WriteZeroes, 4096, 4096)));
    }

    #[test]
    fn what_is_no_request_is_refused() {
        let refused = |desc| assert_eq!(LIMITS.check(&desc, ADDR), Err(Malformed), "{desc:?}");
        refused(desc(4, 8, 0)); // WRITE_SAME
        refused(desc(18, 8, 0)); // REPORT_ZONES
        refused(desc(0, 0, 0));
        refused(desc(0, 1, 0));
        refused(desc(0, 8, 1));
        refused(desc(1, 1032, 0));
        refused(desc(0, 8, u64::MAX / 512 + 1));
        refused(desc(3, 8, (u64::MAX / 512) & !7));
        refused(IoDesc { addr: ADDR + 4096, ..desc(1, 8, 0) });
    }

    proptest! {
        /// Whatever stands in the table: within what was agreed, or refused.
        #[test]
        fn anything_is_within_bounds_or_refused(
            op_flags in prop_oneof![0u32..8, any::<u32>()],
            nr_sectors in prop_oneof![0u32..2048, any::<u32>()],
            start_sector in prop_oneof![0u64..4096, any::<u64>()],
            addr in prop_oneof![Just(ADDR), any::<u64>()],
        ) {
            let desc = IoDesc { op_flags, nr_sectors, start_sector, addr };
            if let Ok((op, offset, bytes)) = LIMITS.check(&desc, ADDR) {
                prop_assert!(offset.checked_add(bytes).is_some());
                prop_assert!(offset % 4096 == 0 && bytes % 4096 == 0);
                match op {
                    Op::Flush => prop_assert_eq!((offset, bytes), (0, 0)),
                    Op::Read | Op::Write { .. } => {
                        prop_assert!(bytes <= 512 << 10 && addr == ADDR && bytes > 0);
                    }
                    Op::Discard | Op::WriteZeroes => prop_assert!(bytes > 0),
                }
            }
        }
    }
}
