//! The on-disk format, as `schemas/integrity.md` describes it, in the same order.

use crate::layout::{HEAD, PAGE, REGION_BLOCKS, REGIONS, ZONES_MAX};
use crc_fast::{CrcAlgorithm, Digest};
use uuid::Uuid;
use zerocopy::little_endian::{U32, U64};
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout, Unaligned};

/// Longest name, in bytes.
pub const NAME_MAX: usize = 63;
/// Pages of the copies of the superblock.
pub(crate) const COPIES: [u64; 2] = [0, 8];
/// The version of this program.
const VERSION: u32 = 1;
/// Generations stay below: a count that none ever reaches.
const COUNT_MAX: u64 = 1 << 62;
/// Offset of the checksum of each structure.
const CRC_AT: usize = 8;

/// CRC-32C of `bytes`.
#[inline]
pub(crate) fn crc32c(bytes: &[u8]) -> u32 {
    crc_fast::checksum(CrcAlgorithm::Crc32Iscsi, bytes) as u32
}

/// The entry of a block with that content: its CRC-32C, where 0, which says that there is none, stands as
/// all ones.
#[inline]
pub(crate) fn entry(block: &[u8]) -> u32 {
    match crc32c(block) {
        0 => u32::MAX,
        crc => crc,
    }
}

fn crc_of_page(bytes: &[u8]) -> u32 {
    let mut digest = Digest::new(CrcAlgorithm::Crc32Iscsi);
    digest.update(&bytes[..CRC_AT]);
    digest.update(&[0; 4]);
    digest.update(&bytes[CRC_AT + 4..]);
    digest.finalize() as u32
}

/// Puts the checksum of a page into it.
fn seal(page: &mut [u8]) {
    let crc = crc_of_page(page);
    page[CRC_AT..CRC_AT + 4].copy_from_slice(&crc.to_le_bytes());
}

/// Why a page does not count; each is a clause.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Fault {
    /// All zeros.
    #[error("it is empty")]
    Zero,
    /// Something else.
    #[error("it is not what should be there")]
    Magic,
    /// Damaged.
    #[error("its checksum does not match")]
    Checksum,
    /// Whole, but of another bdev, or of another place.
    #[error("it belongs to another place")]
    Misplaced,
    /// Whole, but out of range.
    #[error("its field {0} is out of range")]
    Field(&'static str),
    /// Whole, but not for this version.
    #[error("{0}")]
    Unsupported(String),
}

fn check(page: &[u8], magic: &[u8; 8]) -> Result<(), Fault> {
    if page.len() != PAGE {
        return Err(Fault::Magic);
    }
    if page.iter().all(|byte| *byte == 0) {
        return Err(Fault::Zero);
    }
    if page[..8] != magic[..] {
        return Err(Fault::Magic);
    }
    let crc = u32::from_le_bytes(page[CRC_AT..CRC_AT + 4].try_into().unwrap_or_default());
    if crc != crc_of_page(page) {
        return Err(Fault::Checksum);
    }
    Ok(())
}

#[derive(FromBytes, IntoBytes, KnownLayout, Immutable, Unaligned)]
#[repr(C)]
struct RawSuper {
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
    head_pages: U32,
    zone_regions: U32,
    region_blocks: U32,
    device_pages: U64,
    reserved: [u8; 3944],
}
const _: () = assert!(size_of::<RawSuper>() == PAGE);

const SUPER: [u8; 8] = *b"VLINTEGR";

/// What a bdev with checksums is: made here, or read and verified.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Superblock {
    /// Of two copies the one with the higher one counts.
    pub generation: u64,
    /// Its identity.
    pub uuid: Uuid,
    /// Name of the bdev.
    pub name: String,
    /// Pages of the base that are used.
    pub device_pages: u64,
}

impl Superblock {
    /// First 8 bytes of the UUID: what the other pages carry.
    pub(crate) fn store(&self) -> u64 {
        let [a, b, c, d, e, f, g, h, ..] = *self.uuid.as_bytes();
        u64::from_le_bytes([a, b, c, d, e, f, g, h])
    }

    /// As a page.
    pub fn encode(&self) -> Vec<u8> {
        let mut name = [0; NAME_MAX + 1];
        name[..self.name.len()].copy_from_slice(self.name.as_bytes());
        let raw = RawSuper {
            magic: SUPER,
            crc: 0.into(),
            version: VERSION.into(),
            generation: self.generation.into(),
            compat: 0.into(),
            incompat: 0.into(),
            ro_compat: 0.into(),
            uuid: *self.uuid.as_bytes(),
            name,
            page_size: (PAGE as u32).into(),
            head_pages: (HEAD as u32).into(),
            zone_regions: REGIONS.into(),
            region_blocks: u32::from(REGION_BLOCKS).into(),
            device_pages: self.device_pages.into(),
            reserved: [0; 3944],
        };
        let mut page = raw.as_bytes().to_vec();
        seal(&mut page);
        page
    }

    /// Of a page.
    ///
    /// # Errors
    /// [`Fault`].
    pub fn decode(page: &[u8]) -> Result<Superblock, Fault> {
        check(page, &SUPER)?;
        let raw = RawSuper::ref_from_bytes(page).map_err(|_| Fault::Magic)?;
        if raw.version.get() != VERSION {
            let version = raw.version.get();
            let why = format!("it is of version {version}, which this program does not know");
            return Err(Fault::Unsupported(why));
        }
        if raw.incompat.get() | raw.ro_compat.get() != 0 {
            return Err(Fault::Unsupported("it has features this program does not know".into()));
        }
        let sizes = (raw.page_size.get(), raw.head_pages.get(), raw.zone_regions.get());
        if sizes != (PAGE as u32, HEAD as u32, REGIONS) {
            return Err(Fault::Field("page_size, head_pages or zone_regions"));
        }
        if raw.region_blocks.get() != u32::from(REGION_BLOCKS) {
            return Err(Fault::Field("region_blocks"));
        }
        let device_pages = raw.device_pages.get();
        if device_pages <= HEAD || device_pages > ZONES_MAX * crate::layout::ZONE_PAGES {
            return Err(Fault::Field("device_pages"));
        }
        let generation = raw.generation.get();
        if generation == 0 || generation >= COUNT_MAX {
            return Err(Fault::Field("generation"));
        }
        let name = decode_name(&raw.name).ok_or(Fault::Field("name"))?;
        let uuid = Uuid::from_bytes(raw.uuid);
        Ok(Superblock { generation, uuid, name, device_pages })
    }
}

/// Bytes in which a damaged copy A may differ from copy B.
const ALIKE: usize = 64;

/// Of the two copies on a base the one that counts; `None`: there is none of either.
///
/// Where A is not whole, B counts only if A is a damaged copy still, and not what somebody else put there.
///
/// # Errors
/// There is one, but it cannot be used.
pub fn choose(a: &[u8], b: &[u8]) -> Result<Option<Superblock>, Fault> {
    let (first, second) = (Superblock::decode(a), Superblock::decode(b));
    let damaged = a.starts_with(&SUPER)
        || a.iter().zip(b).filter(|(x, y)| x != y).count() <= ALIKE && a.iter().any(|x| *x != 0);
    match (first, second) {
        (Ok(a), Ok(b)) if b.generation > a.generation && b.uuid == a.uuid => Ok(Some(b)),
        (Ok(a), _) => Ok(Some(a)),
        (Err(why @ Fault::Unsupported(_)), _) => Err(why),
        (Err(_), Ok(b)) if damaged => Ok(Some(b)),
        (Err(why), _) if a.starts_with(&SUPER) => Err(why),
        (Err(_), _) => Ok(None),
    }
}

/// Whether it may be the name of a bdev with checksums: what a field of the superblock holds.
pub(crate) fn is_name(name: &str) -> bool {
    let printable = |byte: u8| byte.is_ascii_graphic() && byte != b'/';
    (1..=NAME_MAX).contains(&name.len()) && name.bytes().all(printable)
}

fn decode_name(field: &[u8; NAME_MAX + 1]) -> Option<String> {
    let len = field.iter().position(|byte| *byte == 0)?;
    let (name, rest) = field.split_at(len);
    let name = std::str::from_utf8(name).ok().filter(|name| is_name(name))?;
    rest.iter().all(|byte| *byte == 0).then(|| name.to_owned())
}

/// What a map says of a region.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Mark {
    /// Nothing was ever written to it: it has no checksums.
    Unused,
    /// It may be written to: its checksums on the medium do not count.
    Dirty,
    /// Its checksums on the medium are right.
    Clean,
}

#[derive(FromBytes, IntoBytes, KnownLayout, Immutable, Unaligned)]
#[repr(C)]
struct RawMap {
    magic: [u8; 8],
    crc: U32,
    zone: U32,
    store: U64,
    reserved: U64,
    marks: [u8; REGIONS as usize / 4],
    reserved_end: [u8; 4004],
}
const _: () = assert!(size_of::<RawMap>() == PAGE);

const MAP: [u8; 8] = *b"VLINTMAP";

/// The marks of a zone's regions.
pub type Marks = [Mark; REGIONS as usize];

/// A zone's map as a page. All of it but zeros is in its first 512 bytes.
pub fn encode_map(store: u64, zone: u32, marks: &Marks) -> Vec<u8> {
    let mut bits = [0; REGIONS as usize / 4];
    for (at, mark) in marks.iter().enumerate() {
        bits[at / 4] |= (*mark as u8) << (at % 4 * 2);
    }
    let raw = RawMap {
        magic: MAP,
        crc: 0.into(),
        zone: zone.into(),
        store: store.into(),
        reserved: 0.into(),
        marks: bits,
        reserved_end: [0; 4004],
    };
    let mut page = raw.as_bytes().to_vec();
    seal(&mut page);
    page
}

/// The marks in a zone's map.
///
/// # Errors
/// [`Fault`].
pub fn decode_map(page: &[u8], store: u64, zone: u32) -> Result<Marks, Fault> {
    check(page, &MAP)?;
    let raw = RawMap::ref_from_bytes(page).map_err(|_| Fault::Magic)?;
    if (raw.store.get(), raw.zone.get()) != (store, zone) {
        return Err(Fault::Misplaced);
    }
    let mut marks = [Mark::Unused; REGIONS as usize];
    for (at, mark) in marks.iter_mut().enumerate() {
        *mark = match raw.marks[at / 4] >> (at % 4 * 2) & 3 {
            0 => Mark::Unused,
            1 => Mark::Dirty,
            2 => Mark::Clean,
            _ => return Err(Fault::Field("marks")),
        };
    }
    Ok(marks)
}

#[derive(FromBytes, IntoBytes, KnownLayout, Immutable, Unaligned)]
#[repr(C)]
struct RawSums {
    magic: [u8; 8],
    crc: U32,
    region: U32,
    store: U64,
    reserved: [u8; 40],
    entries: [U32; REGION_BLOCKS as usize],
}
const _: () = assert!(size_of::<RawSums>() == PAGE);

const SUMS: [u8; 8] = *b"VLINTSUM";

/// A region's checksums.
pub type Sums = [u32; REGION_BLOCKS as usize];

/// Checksums of a region, counted over all zones, as a page.
pub fn encode_sums(store: u64, region: u32, sums: impl Fn(usize) -> u32) -> Vec<u8> {
    let raw = RawSums {
        magic: SUMS,
        crc: 0.into(),
        region: region.into(),
        store: store.into(),
        reserved: [0; 40],
        entries: std::array::from_fn(|at| sums(at).into()),
    };
    let mut page = raw.as_bytes().to_vec();
    seal(&mut page);
    page
}

/// The checksums in a page, and why that does not count, if it does not. Then each is taken as it is, since a
/// block that has its checksum proves both; but none is taken as missing.
pub fn decode_sums(page: &[u8], store: u64, region: u32) -> (Sums, Option<Fault>) {
    let Ok(raw) = RawSums::ref_from_bytes(page) else {
        return ([1; REGION_BLOCKS as usize], Some(Fault::Magic));
    };
    let fault = match check(page, &SUMS) {
        Ok(()) if (raw.store.get(), raw.region.get()) != (store, region) => Some(Fault::Misplaced),
        checked => checked.err(),
    };
    let missing = u32::from(fault.is_some());
    let sums = std::array::from_fn(|at| match raw.entries[at].get() {
        0 => missing,
        entry => entry,
    });
    (sums, fault)
}

#[cfg(test)]
mod tests;
