//! The journal's record header, which is also its commit record.

use super::{PAGE_SIZE, POINTERS, Page, crc32c, crc32c_without};
use zerocopy::little_endian::{U32, U64};
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout, Unaligned};

const MAGIC: [u8; 8] = *b"VLJOURNL";
const CRC_AT: usize = 8;
/// Most page images of one record.
pub(crate) const RECORD_IMAGES_MAX: usize = POINTERS;

#[derive(FromBytes, IntoBytes, KnownLayout, Immutable, Unaligned)]
#[repr(C)]
struct Raw {
    magic: [u8; 8],
    crc: U32,
    images_crc: U32,
    store: U64,
    mount: U64,
    seq: U64,
    count: U32,
    boot: [u8; 16],
    open: U32,
    target: [U32; RECORD_IMAGES_MAX],
}
const _: () = assert!(size_of::<Raw>() == PAGE_SIZE);

/// A record header that was made here, or read and verified (its images are not yet).
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct RecordHeader {
    pub store: u64,
    pub mount: u64,
    pub seq: u64,
    pub images_crc: u32,
    /// During which boot it counts without a final record after it; 0: it is final.
    pub boot: u128,
    /// How many records right before it are not final and were not flushed when it was written.
    pub open: u32,
    /// Which metadata page each image is; at most [`RECORD_IMAGES_MAX`], and none only in a final one.
    pub targets: Vec<u32>,
}

/// Checksum over a record's images.
pub(crate) fn images_crc<'a>(images: impl Iterator<Item = &'a Page>) -> u32 {
    let parts: Vec<&[u8]> = images.map(|p| &p.bytes()[..]).collect();
    crc32c(&parts)
}

impl RecordHeader {
    pub fn encode(&self) -> [u8; PAGE_SIZE] {
        let mut raw = Raw {
            magic: MAGIC,
            crc: U32::ZERO,
            images_crc: U32::new(self.images_crc),
            store: U64::new(self.store),
            mount: U64::new(self.mount),
            seq: U64::new(self.seq),
            count: U32::new(self.targets.len() as u32),
            boot: self.boot.to_le_bytes(),
            open: U32::new(self.open),
            target: [U32::ZERO; RECORD_IMAGES_MAX],
        };
        for (to, from) in raw.target.iter_mut().zip(&self.targets) {
            *to = U32::new(*from);
        }
        raw.crc = U32::new(crc32c_without(raw.as_bytes(), CRC_AT));
        raw.as_bytes().try_into().expect("a raw header is a page")
    }

    /// `None`: no record header, or a torn one. The images are still to be checked.
    pub fn decode(bytes: &[u8; PAGE_SIZE]) -> Option<RecordHeader> {
        let raw = Raw::ref_from_bytes(bytes).expect("a raw header is a page");
        let count = raw.count.get() as usize;
        if raw.magic != MAGIC
            || raw.crc.get() != crc32c_without(bytes, CRC_AT)
            || count > RECORD_IMAGES_MAX
        {
            return None;
        }
        Some(RecordHeader {
            store: raw.store.get(),
            mount: raw.mount.get(),
            seq: raw.seq.get(),
            images_crc: raw.images_crc.get(),
            boot: u128::from_le_bytes(raw.boot),
            open: raw.open.get(),
            targets: raw.target[..count].iter().map(|t| t.get()).collect(),
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_header_survives_only_unchanged() {
        let (store, mount, seq, images_crc) = (1, 2, 3, 4);
        let targets = vec![9, 8, 7];
        let h = RecordHeader { store, mount, seq, images_crc, boot: 5, open: 6, targets };
        let bytes = h.encode();
        assert_eq!(RecordHeader::decode(&bytes), Some(h));
        for at in [0, 9, 13, 20, 41, 50, 61, 65, 4095] {
            let mut bad = bytes;
            bad[at] ^= 1;
            assert_eq!(RecordHeader::decode(&bad), None, "byte {at}");
        }
    }
}
