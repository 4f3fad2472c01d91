//! Requests (virtio 1.2, 5.2.6): a header, data in one direction, and a byte for the status at the end.

use bdev::Op;
use guestmem::Sg;
use zerocopy::little_endian::{U32, U64};
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout, Unaligned};

use crate::SECTOR;

/// Values of the status byte (5.2.6).
pub mod status {
    /// Done.
    pub const OK: u8 = 0;
    /// It failed, or is not possible.
    pub const IOERR: u8 = 1;
    /// There is no such request, or not of this disk.
    pub const UNSUPP: u8 = 2;
}

/// Types of requests (5.2.6).
mod kind {
    pub(super) const IN: u32 = 0;
    pub(super) const OUT: u32 = 1;
    pub(super) const FLUSH: u32 = 4;
    pub(super) const GET_ID: u32 = 8;
    pub(super) const DISCARD: u32 = 11;
    pub(super) const WRITE_ZEROES: u32 = 13;
}

/// Bytes of a request before its data.
pub const HEADER_SIZE: usize = size_of::<Header>();
/// Bytes of the disk's serial number in an answer; a shorter one ends with zeros.
pub const ID_SIZE: usize = 20;
/// Most that one discard can name, in bytes.
pub const MAX_DISCARD_BYTES: u64 = 512 << 20;
/// Most that one write zeroes can name, in bytes: a disk may have to write them.
pub const MAX_WRITE_ZEROES_BYTES: u64 = 64 << 20;

/// `struct virtio_blk_req` before its data.
#[derive(Clone, Copy, Debug, FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned)]
#[repr(C)]
pub struct Header {
    /// What is asked for.
    pub kind: U32,
    /// Unused: priorities have no effect.
    pub reserved: U32,
    /// First sector of a read or write.
    pub sector: U64,
}
const _: () = assert!(HEADER_SIZE == 16);

/// `struct virtio_blk_discard_write_zeroes`.
#[derive(Clone, Copy, Debug, FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned)]
#[repr(C)]
struct Segment {
    sector: U64,
    num_sectors: U32,
    flags: U32,
}
const _: () = assert!(size_of::<Segment>() == 16);

/// Flag of a [`Segment`]: a write zeroes may deallocate.
const FLAG_UNMAP: u32 = 1;

/// What a driver asks for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Request {
    /// Something with blocks.
    Access(Access),
    /// The serial number, into the space for data.
    Id,
}

/// A request for blocks. Its range may lie anywhere, and need not be whole blocks.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Access {
    /// What to do with them.
    pub op: Op,
    /// The blocks may be deallocated if they read as zeros then ([`Op::WriteZeroes`]).
    pub may_unmap: bool,
    /// First sector.
    pub sector: u64,
    /// Sectors.
    pub sectors: u64,
}

impl Request {
    /// What the header and its data ask for: `data_out` is what follows the header, `data_in` the space
    /// before the status byte.
    ///
    /// # Errors
    /// The status of a request that is none: nothing is to be done.
    #[inline]
    pub fn decode(header: &Header, data_out: &Sg, data_in: &Sg) -> Result<Request, u8> {
        let sector = header.sector.get();
        let (op, data, none) = match header.kind.get() {
            kind::IN => (Op::Read, data_in, data_out),
            kind::OUT => (Op::Write, data_out, data_in),
            kind => return other(kind, data_out, data_in),
        };
        let bytes = data.len() as u64;
        if !none.is_empty() || !bytes.is_multiple_of(SECTOR) {
            return Err(status::IOERR);
        }
        Ok(Request::Access(Access { op, may_unmap: false, sector, sectors: bytes / SECTOR }))
    }
}

/// Requests without data of the disk's.
fn other(kind: u32, data_out: &Sg, data_in: &Sg) -> Result<Request, u8> {
    let (op, most) = match kind {
        kind::FLUSH => {
            let nothing = Access { op: Op::Flush, may_unmap: false, sector: 0, sectors: 0 };
            return Ok(Request::Access(nothing));
        }
        kind::GET_ID => {
            return if data_out.is_empty() { Ok(Request::Id) } else { Err(status::IOERR) };
        }
        kind::DISCARD => (Op::Unmap, MAX_DISCARD_BYTES),
        kind::WRITE_ZEROES => (Op::WriteZeroes, MAX_WRITE_ZEROES_BYTES),
        _ => return Err(status::UNSUPP),
    };
    let mut bytes = [0u8; size_of::<Segment>()];
    // One segment: max_discard_seg and max_write_zeroes_seg.
    if data_out.len() != bytes.len() || !data_in.is_empty() {
        return Err(status::IOERR);
    }
    data_out.copy_to_slice(0, &mut bytes);
    let segment: Segment = zerocopy::transmute!(bytes);
    let (flags, sectors) = (segment.flags.get(), u64::from(segment.num_sectors.get()));
    // 5.2.6.2: unknown flags, and this one of a discard, are not supported.
    if flags & !FLAG_UNMAP != 0 || (op == Op::Unmap && flags != 0) {
        return Err(status::UNSUPP);
    }
    if sectors > most / SECTOR {
        return Err(status::IOERR);
    }
    let may_unmap = flags & FLAG_UNMAP != 0;
    Ok(Request::Access(Access { op, may_unmap, sector: segment.sector.get(), sectors }))
}
