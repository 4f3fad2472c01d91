//! The superblock.

use super::{
    CLUSTER_MAX, CLUSTER_MIN, COUNT_MAX, JOURNAL_PAGES_MIN, NAME_MAX, PAGE_SIZE, crc32c_without,
    decode_name, encode_name,
};
use uuid::Uuid;
use zerocopy::little_endian::{U32, U64};
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout, Unaligned};

const MAGIC: [u8; 8] = *b"VLBLOBST";
/// The version of new stores; the first one is loaded, too.
pub(crate) const VERSION: u32 = 2;
/// `incompat`: a cluster may have several owners.
const SHARED_CLUSTERS: u64 = 1;
const CRC_AT: usize = 8;
/// Page of copy A.
pub(crate) const COPY_A: u64 = 0;
/// Page of copy B.
pub(crate) const COPY_B: u64 = 16;

#[derive(FromBytes, IntoBytes, KnownLayout, Immutable, Unaligned)]
#[repr(C)]
struct Raw {
    magic: [u8; 8],
    crc: U32,
    version: U32,
    generation: U64,
    compat: U64,
    incompat: U64,
    ro_compat: U64,
    uuid: [u8; 16],
    name: [u8; NAME_MAX + 1],
    page_size: U32,
    cluster_size: U32,
    block_size: U32,
    reserved: [u8; 4],
    device_pages: U64,
    journal_start: U64,
    journal_pages: U64,
    md_start: U64,
    md_pages: U64,
    bitmap_pages: U64,
    first_data_cluster: U64,
    data_clusters: U64,
    tail_page: U64,
    tail_seq: U64,
    mount: U64,
    reserved_end: [u8; 3864],
}
const _: () = assert!(size_of::<Raw>() == PAGE_SIZE);

/// A superblock that was made here, or read and verified.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Superblock {
    pub version: u32,
    pub generation: u64,
    pub uuid: Uuid,
    pub name: String,
    pub cluster_size: u32,
    pub block_size: u32,
    pub device_pages: u64,
    pub journal_start: u64,
    pub journal_pages: u64,
    pub md_start: u64,
    pub md_pages: u64,
    pub bitmap_pages: u64,
    pub first_data_cluster: u64,
    pub data_clusters: u64,
    pub tail_page: u64,
    pub tail_seq: u64,
    pub mount: u64,
    /// A cluster may have several owners.
    pub shares: bool,
}

/// Why a superblock copy does not count; each is a clause.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub(crate) enum SuperblockFault {
    #[error("it is empty")]
    Zero,
    #[error("it is not a blobstore's superblock")]
    Magic,
    #[error("its checksum does not match")]
    Checksum,
    #[error("its field {0} is out of range")]
    Field(&'static str),
    /// Whole, but not for this version: never to be replaced by the other copy.
    #[error("{0}")]
    Unsupported(String),
}

impl Superblock {
    /// First 8 bytes of the UUID: what pages and records carry.
    pub fn store_id(&self) -> u64 {
        u64::from_le_bytes(self.uuid.as_bytes()[..8].try_into().expect("8 of 16 bytes"))
    }

    /// Byte of a metadata page.
    pub fn page_offset(&self, page: u32) -> u64 {
        (self.md_start + u64::from(page)) * PAGE_SIZE as u64
    }

    pub fn encode(&self) -> [u8; PAGE_SIZE] {
        let mut raw = Raw {
            magic: MAGIC,
            crc: U32::ZERO,
            version: U32::new(self.version),
            generation: U64::new(self.generation),
            compat: U64::ZERO,
            incompat: U64::new(if self.shares { SHARED_CLUSTERS } else { 0 }),
            ro_compat: U64::ZERO,
            uuid: self.uuid.into_bytes(),
            name: encode_name(&self.name),
            page_size: U32::new(PAGE_SIZE as u32),
            cluster_size: U32::new(self.cluster_size),
            block_size: U32::new(self.block_size),
            reserved: [0; 4],
            device_pages: U64::new(self.device_pages),
            journal_start: U64::new(self.journal_start),
            journal_pages: U64::new(self.journal_pages),
            md_start: U64::new(self.md_start),
            md_pages: U64::new(self.md_pages),
            bitmap_pages: U64::new(self.bitmap_pages),
            first_data_cluster: U64::new(self.first_data_cluster),
            data_clusters: U64::new(self.data_clusters),
            tail_page: U64::new(self.tail_page),
            tail_seq: U64::new(self.tail_seq),
            mount: U64::new(self.mount),
            reserved_end: [0; 3864],
        };
        raw.crc = U32::new(crc32c_without(raw.as_bytes(), CRC_AT));
        raw.as_bytes().try_into().expect("a raw superblock is a page")
    }

    pub fn decode(bytes: &[u8; PAGE_SIZE]) -> Result<Superblock, SuperblockFault> {
        use SuperblockFault::{Checksum, Field, Magic, Unsupported, Zero};
        let raw = Raw::ref_from_bytes(bytes).expect("a raw superblock is a page");
        if raw.magic != MAGIC {
            return Err(if bytes.iter().all(|b| *b == 0) { Zero } else { Magic });
        }
        if raw.crc.get() != crc32c_without(bytes, CRC_AT) {
            return Err(Checksum);
        }
        if !(1..=VERSION).contains(&raw.version.get()) {
            let why = format!("its version is {}, not 1 to {VERSION}", raw.version);
            return Err(Unsupported(why));
        }
        let incompat = raw.incompat.get();
        let shares = incompat & SHARED_CLUSTERS != 0;
        if incompat & !SHARED_CLUSTERS != 0
            || raw.ro_compat.get() != 0
            || shares && raw.version.get() == 1
        {
            let bits = (raw.incompat.get(), raw.ro_compat.get());
            return Err(Unsupported(format!(
                "it has features that are not known (incompat {:#x}, ro_compat {:#x})",
                bits.0, bits.1
            )));
        }
        let s = Superblock {
            version: raw.version.get(),
            generation: raw.generation.get(),
            uuid: Uuid::from_bytes(raw.uuid),
            name: decode_name(&raw.name).ok_or(Field("name"))?,
            cluster_size: raw.cluster_size.get(),
            block_size: raw.block_size.get(),
            device_pages: raw.device_pages.get(),
            journal_start: raw.journal_start.get(),
            journal_pages: raw.journal_pages.get(),
            md_start: raw.md_start.get(),
            md_pages: raw.md_pages.get(),
            bitmap_pages: raw.bitmap_pages.get(),
            first_data_cluster: raw.first_data_cluster.get(),
            data_clusters: raw.data_clusters.get(),
            tail_page: raw.tail_page.get(),
            tail_seq: raw.tail_seq.get(),
            mount: raw.mount.get(),
            shares,
        };
        if raw.page_size.get() as usize != PAGE_SIZE {
            return Err(Unsupported(format!("its page size is {}", raw.page_size)));
        }
        s.check_layout().map(|()| s)
    }

    /// Whether the regions lie one after the other within the device.
    fn check_layout(&self) -> Result<(), SuperblockFault> {
        let field = |good: bool, name| good.then_some(()).ok_or(SuperblockFault::Field(name));
        let (min, max) = (CLUSTER_MIN, CLUSTER_MAX);
        let size = self.cluster_size;
        field(size.is_power_of_two() && (min..=max).contains(&size), "cluster_size")?;
        let ends_by =
            |start: u64, count: u64, end: u64| start.checked_add(count).is_some_and(|e| e <= end);
        let cluster_pages = u64::from(size) / PAGE_SIZE as u64;
        field(self.device_pages <= u64::MAX / PAGE_SIZE as u64, "device_pages")?;
        field(self.journal_start > COPY_B, "journal_start")?;
        field(ends_by(self.journal_start, self.journal_pages, self.md_start), "journal_pages")?;
        field(self.md_pages <= u64::from(u32::MAX), "md_pages")?;
        let bitmap_pages = self.md_pages.div_ceil(super::BITMAP_BITS);
        field(self.md_pages > bitmap_pages && self.bitmap_pages == bitmap_pages, "bitmap_pages")?;
        // What one transaction may change fits in one record.
        let least = JOURNAL_PAGES_MIN.max(2 * self.bitmap_pages + 1);
        field(self.journal_pages >= least, "journal_pages")?;
        let data = self.first_data_cluster.checked_mul(cluster_pages);
        let data = data.ok_or(SuperblockFault::Field("first_data_cluster"))?;
        field(ends_by(self.md_start, self.md_pages, data), "md_start")?;
        let clusters = self.device_pages / cluster_pages;
        field(ends_by(self.first_data_cluster, self.data_clusters, clusters), "data_clusters")?;
        field(clusters <= u64::from(u32::MAX), "data_clusters")?;
        field(self.tail_page < self.journal_pages, "tail_page")?;
        field(self.generation < COUNT_MAX, "generation")?;
        field(self.tail_seq < COUNT_MAX, "tail_seq")?;
        field(self.mount < COUNT_MAX, "mount")
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::layout::plan;

    fn sample() -> Superblock {
        plan("lvs0", Uuid::from_u128(7), 64 << 20, 512, 1 << 20).unwrap()
    }

    #[test]
    fn what_is_written_is_read_and_every_changed_bit_shows() {
        let s = sample();
        let bytes = s.encode();
        assert_eq!(Superblock::decode(&bytes).unwrap(), s);
        for at in (0..300).chain([4095]) {
            let mut bad = bytes;
            bad[at] ^= 0x10;
            assert!(Superblock::decode(&bad).is_err(), "byte {at}");
        }
        assert_eq!(Superblock::decode(&[0; PAGE_SIZE]), Err(SuperblockFault::Zero));
        assert_eq!(Superblock::decode(&[1; PAGE_SIZE]), Err(SuperblockFault::Magic));
    }

    #[test]
    fn features_are_known_or_the_store_is_refused() {
        let mut s = sample();
        s.shares = true;
        let mut bytes = s.encode();
        assert_eq!(bytes[32], 1);
        assert_eq!(Superblock::decode(&bytes).unwrap(), s);
        bytes[32] = 3;
        let crc = crc32c_without(&bytes, CRC_AT);
        bytes[CRC_AT..CRC_AT + 4].copy_from_slice(&crc.to_le_bytes());
        let refused = Superblock::decode(&bytes);
        assert!(matches!(refused, Err(SuperblockFault::Unsupported(_))), "{refused:?}");
        s.version = 1;
        let refused = Superblock::decode(&s.encode());
        assert!(matches!(refused, Err(SuperblockFault::Unsupported(_))), "{refused:?}");
    }

    #[test]
    fn a_layout_that_overlaps_is_refused_even_with_a_right_checksum() {
        let good = sample();
        let broken: [fn(&mut Superblock); 9] = [
            |s| s.cluster_size = 12345,
            |s| s.journal_start = 3,
            |s| s.journal_pages = u64::MAX,
            |s| s.md_pages += 100_000,
            |s| s.bitmap_pages = 2,
            |s| s.first_data_cluster = 0,
            |s| s.first_data_cluster = u64::MAX,
            |s| s.data_clusters += 1,
            |s| s.tail_page = s.journal_pages,
        ];
        for (i, change) in broken.iter().enumerate() {
            let mut s = good.clone();
            change(&mut s);
            let fault = Superblock::decode(&s.encode());
            assert!(matches!(fault, Err(SuperblockFault::Field(_))), "case {i}: {fault:?}");
        }
    }
}
