//! Descriptors, and what can be wrong with a chain of them.

use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout};

/// Descriptors that a queue may have here (2.7: at most 32768; QEMU's limit is 1024).
pub const MAX_QUEUE_SIZE: u16 = 1024;

/// Bytes of a descriptor.
pub(crate) const DESC_LEN: usize = 16;

/// `struct virtq_desc` (2.7.5), as the guest wrote it: little-endian.
#[derive(
    Clone, Copy, Debug, Default, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout,
)]
#[repr(C)]
pub struct Desc {
    addr: u64,
    len: u32,
    flags: u16,
    next: u16,
}

impl Desc {
    /// Goes on with the descriptor `next`.
    pub const NEXT: u16 = 1;
    /// The device may write the buffer (and not read it).
    pub const WRITE: u16 = 2;
    /// The buffer is a table of descriptors.
    pub const INDIRECT: u16 = 4;

    /// A descriptor in guest byte order.
    pub fn new(addr: u64, len: u32, flags: u16, next: u16) -> Desc {
        Desc { addr: addr.to_le(), len: len.to_le(), flags: flags.to_le(), next: next.to_le() }
    }
    /// Guest physical address of the buffer.
    #[inline(always)]
    pub fn addr(&self) -> u64 {
        u64::from_le(self.addr)
    }
    /// Bytes of the buffer.
    #[inline(always)]
    pub fn len(&self) -> u32 {
        u32::from_le(self.len)
    }
    /// Whether the buffer has no bytes.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }
    /// [`Desc::NEXT`], [`Desc::WRITE`], [`Desc::INDIRECT`].
    #[inline(always)]
    pub fn flags(&self) -> u16 {
        u16::from_le(self.flags)
    }
    /// Index of the next descriptor in the same table.
    #[inline(always)]
    pub fn next(&self) -> u16 {
        u16::from_le(self.next)
    }
}

const _: () = assert!(size_of::<Desc>() == DESC_LEN);

/// A chain taken from the available ring: the index to give back, and its first descriptor, read
/// once.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Head {
    pub(crate) index: u16,
    pub(crate) first: Desc,
}

impl Head {
    /// The chain's name in the used ring.
    #[inline]
    pub fn index(&self) -> u16 {
        self.index
    }
}

/// What is wrong with a chain. The driver broke the clause named; no byte of the chain was used.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum ChainError {
    /// The available ring names a descriptor beyond the table (2.7.6).
    #[error("head {head} is beyond the queue of {size} descriptors")]
    BadHead {
        /// What the ring says.
        head: u16,
        /// Descriptors of the queue.
        size: u16,
    },
    /// A descriptor names a next one beyond its table (2.7.5).
    #[error("descriptor {next} is beyond the table of {size} descriptors")]
    BadNext {
        /// What the descriptor says.
        next: u16,
        /// Descriptors of the table.
        size: u32,
    },
    /// A buffer or an indirect table is not, or not wholly, in guest memory.
    #[error("{len} bytes at {addr:#x} are not in guest memory")]
    BadAddress {
        /// Guest physical address.
        addr: u64,
        /// Bytes.
        len: u32,
    },
    /// More descriptors than the table has: the chain loops (2.7.5.2).
    #[error("the chain loops")]
    Loop,
    /// VIRTIO_F_INDIRECT_DESC was not negotiated (2.7.5.3.1).
    #[error("an indirect descriptor, though the feature was not negotiated")]
    IndirectNotNegotiated,
    /// An indirect descriptor within an indirect table (2.7.5.3.1).
    #[error("an indirect table within an indirect table")]
    NestedIndirect,
    /// INDIRECT and NEXT in one descriptor (2.7.5.3.1).
    #[error("an indirect descriptor with a next one")]
    IndirectWithNext,
    /// The length of an indirect table is zero or not a multiple of 16 (2.7.5.3).
    #[error("an indirect table of {0} bytes: not a multiple of 16, or none")]
    IndirectLength(u32),
    /// A device-readable descriptor behind a device-writable one (2.7.4.2).
    #[error("a device-readable descriptor behind a device-writable one")]
    ReadableAfterWritable,
    /// More runs than the device offered (seg_max).
    #[error("more than {limit} runs of memory")]
    TooManySegments {
        /// Runs that fit.
        limit: u32,
    },
    /// A buffer of no bytes.
    #[error("a descriptor of no bytes")]
    ZeroLength,
    /// More than 2^32 - 1 bytes in all (2.7.5).
    #[error("a chain of 4 GiB or more")]
    TooLong,
}
