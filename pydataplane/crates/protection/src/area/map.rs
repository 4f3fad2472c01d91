//! The map of a zone: which parts of it may be being written, as `schemas/protection.md` describes it.

use super::layout::{MARKS, PAGE};
use crc_fast::{CrcAlgorithm, Digest};

const MAGIC: &[u8; 8] = b"VLDIFMAP";
/// All that is not zero is in so many bytes, which no power cut tears apart.
const SECTOR: usize = 512;
const CRC_AT: usize = 8;
const MARKS_AT: usize = 32;

const _: () = assert!(MARKS as usize == (SECTOR - MARKS_AT) * 8);

fn crc(sector: &[u8]) -> u32 {
    let mut digest = Digest::new(CrcAlgorithm::Crc32Iscsi);
    digest.update(&sector[..CRC_AT]);
    digest.update(&[0; 4]);
    digest.update(&sector[CRC_AT + 4..SECTOR]);
    digest.finalize() as u32
}

/// The map of a zone whose units of these numbers may be being written.
pub(crate) fn encode(zone: u64, dirty: impl Iterator<Item = u64>, page: &mut [u8]) {
    page[..PAGE].fill(0);
    page[..8].copy_from_slice(MAGIC);
    page[12..16].copy_from_slice(&(zone as u32).to_le_bytes());
    for unit in dirty {
        page[MARKS_AT + unit as usize / 8] |= 1 << (unit % 8);
    }
    let crc = crc(page);
    page[CRC_AT..CRC_AT + 4].copy_from_slice(&crc.to_le_bytes());
}

/// Whether a unit may have been being written; one that was never written has zeros for a map. Of a map
/// that is not whole all may have been.
pub(crate) fn decode(zone: u64, page: &[u8]) -> Result<impl Fn(u64) -> bool, &'static str> {
    let sector = &page[..SECTOR];
    let written = sector.iter().any(|byte| *byte != 0);
    if written {
        if sector[..8] != MAGIC[..] {
            return Err("it is not what should be there");
        }
        if sector[CRC_AT..CRC_AT + 4] != crc(sector).to_le_bytes() {
            return Err("its checksum does not match");
        }
        if sector[12..16] != (zone as u32).to_le_bytes() {
            return Err("it belongs to another place");
        }
    }
    Ok(move |unit: u64| sector[MARKS_AT + unit as usize / 8] & 1 << (unit % 8) != 0)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_map_is_read_as_it_was_written_and_every_changed_bit_shows() {
        let mut page = [0xEE; PAGE];
        encode(7, [0, 9, MARKS - 1].into_iter(), &mut page);
        assert!(page[SECTOR..].iter().all(|byte| *byte == 0));
        let dirty = decode(7, &page).unwrap();
        let found: Vec<u64> = (0..MARKS).filter(|unit| dirty(*unit)).collect();
        assert_eq!(found, [0, 9, MARKS - 1]);
        assert!(decode(8, &page).is_err());
        for at in 0..SECTOR {
            let mut bad = page;
            bad[at] ^= 0x10;
            assert!(decode(7, &bad).is_err(), "byte {at}");
        }
        assert!((0..MARKS).all(|unit| !decode(3, &[0; PAGE]).unwrap()(unit)));
    }
}
