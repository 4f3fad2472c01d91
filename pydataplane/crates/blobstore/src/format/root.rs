//! The payload of a blob's root page.

use super::{NAME_MAX, PAYLOAD, POINTERS};
use zerocopy::little_endian::{U16, U32, U64};
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout, Unaligned};

/// Extents pages that the root points to itself.
pub(crate) const DIRECT: usize = 256;
/// Index pages that the root points to.
pub(crate) const INDIRECT: usize = 192;
/// Most extents pages of a blob.
pub(crate) const EXTENTS_MAX: u64 = (DIRECT + INDIRECT * POINTERS) as u64;
/// Overflow xattr pages.
pub(crate) const XATTR_PAGES: usize = 8;
/// Bytes of xattrs in the root page itself.
pub(crate) const INLINE_XATTRS: usize = 2048;

/// Clusters are allocated on first write only.
pub(crate) const FLAG_THIN: u32 = 1;
/// Refuses writes.
pub(crate) const FLAG_READ_ONLY: u32 = 2;
/// Others may have it as their parent; read-only, too.
pub(crate) const FLAG_SNAPSHOT: u32 = 4;
/// A snapshot whose clusters go over to its only clone, record by record, before it is gone.
pub(crate) const FLAG_DELETING: u32 = 8;
/// Its parent is outside of the store, and named by `external`.
pub(crate) const FLAG_EXTERNAL: u32 = 16;
/// It has protection information of type 1, or 3, in an area of its own, which the store knows nothing of.
pub(crate) const FLAG_DIF_1: u32 = 32;
pub(crate) const FLAG_DIF_3: u32 = 64;
/// That is of blocks of 4096 bytes; without, of 512.
pub(crate) const FLAG_DIF_4096: u32 = 128;
/// What its snapshots and clones have as well.
pub(crate) const FLAGS_DIF: u32 = FLAG_DIF_1 | FLAG_DIF_3 | FLAG_DIF_4096;
/// Flags of version 1, and of version 2.
pub(crate) const FLAGS_1: u32 = FLAG_THIN | FLAG_READ_ONLY;
pub(crate) const FLAGS_2: u32 = FLAGS_1 | FLAG_SNAPSHOT | FLAG_DELETING | FLAG_EXTERNAL | FLAGS_DIF;

/// A root page from byte 64 on.
#[derive(FromBytes, IntoBytes, KnownLayout, Immutable, Unaligned)]
#[repr(C)]
pub(crate) struct Root {
    pub uuid: [u8; 16],
    pub name: [u8; NAME_MAX + 1],
    pub size: U64,
    pub parent_clusters: U64,
    pub parent: U64,
    pub flags: U32,
    pub xattr_pages: U16,
    pub xattr_bytes: U16,
    pub xattr_page: [U32; XATTR_PAGES],
    pub external: [u8; 16],
    pub reserved_mid: [u8; 32],
    pub direct: [U32; DIRECT],
    pub indirect: [U32; INDIRECT],
    pub inline_xattrs: [u8; INLINE_XATTRS],
}
const _: () = assert!(size_of::<Root>() == PAYLOAD);
const _: () = assert!(std::mem::offset_of!(Root, external) == 208 - 64);
const _: () = assert!(std::mem::offset_of!(Root, direct) == 256 - 64);
const _: () = assert!(std::mem::offset_of!(Root, inline_xattrs) == 2048 - 64);

impl Root {
    pub fn of(payload: &[u8]) -> &Root {
        Root::ref_from_bytes(payload).expect("a root is a page's payload")
    }

    pub fn of_mut(payload: &mut [u8]) -> &mut Root {
        Root::mut_from_bytes(payload).expect("a root is a page's payload")
    }
}
