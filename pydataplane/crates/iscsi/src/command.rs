//! SCSI commands as they are sent: SBC-4, SPC-5.

/// A command descriptor block, as far as it is sent.
pub(crate) type Cdb = [u8; 16];

/// Bytes of what READ CAPACITY (16) tells.
pub(crate) const CAPACITY_LEN: usize = 32;
/// UNMAP's operation code.
pub(crate) const UNMAP: u8 = 0x42;
/// Bytes of an UNMAP's list of one range.
pub(crate) const UNMAP_LEN: usize = 24;

/// How many bytes a block of this operation code has (SPC-5 4.2.5.1).
pub(crate) fn len(cdb: &Cdb) -> usize {
    match cdb[0] >> 5 {
        0 => 6,
        1 | 2 => 10,
        5 => 12,
        _ => 16,
    }
}

fn of(opcode: u8, flags: u8, lba: u64, count: u32) -> Cdb {
    let mut cdb = [0; 16];
    (cdb[0], cdb[1]) = (opcode, flags);
    cdb[2..10].copy_from_slice(&lba.to_be_bytes());
    cdb[10..14].copy_from_slice(&count.to_be_bytes());
    cdb
}

/// READ (16).
pub(crate) fn read(lba: u64, blocks: u32) -> Cdb {
    of(0x88, 0, lba, blocks)
}

/// WRITE (16).
pub(crate) fn write(lba: u64, blocks: u32, fua: bool) -> Cdb {
    of(0x8A, u8::from(fua) << 3, lba, blocks)
}

/// COMPARE AND WRITE, of 255 blocks at most.
pub(crate) fn compare_and_write(lba: u64, blocks: u8, fua: bool) -> Cdb {
    let mut cdb = of(0x89, u8::from(fua) << 3, lba, 0);
    cdb[13] = blocks;
    cdb
}

/// SYNCHRONIZE CACHE (16), of all blocks from `lba` on where `blocks` is 0.
pub(crate) fn synchronize_cache(lba: u64, blocks: u32) -> Cdb {
    of(0x91, 0, lba, blocks)
}

/// WRITE SAME (16) of one block of data; `unmap`: deallocated, if that reads as the block.
pub(crate) fn write_same(lba: u64, blocks: u32, unmap: bool) -> Cdb {
    of(0x93, u8::from(unmap) << 3, lba, blocks)
}

/// UNMAP, with its list of one range.
pub(crate) fn unmap(lba: u64, blocks: u32) -> (Cdb, [u8; UNMAP_LEN]) {
    let (mut cdb, mut list) = ([0; 16], [0; UNMAP_LEN]);
    cdb[0] = UNMAP;
    cdb[8] = UNMAP_LEN as u8;
    list[1] = UNMAP_LEN as u8 - 2;
    list[3] = UNMAP_LEN as u8 - 8;
    list[8..16].copy_from_slice(&lba.to_be_bytes());
    list[16..20].copy_from_slice(&blocks.to_be_bytes());
    (cdb, list)
}

/// READ CAPACITY (16).
pub(crate) fn read_capacity() -> Cdb {
    let mut cdb = [0; 16];
    (cdb[0], cdb[1], cdb[13]) = (0x9E, 0x10, CAPACITY_LEN as u8);
    cdb
}

/// REPORT LUNS, of all but well known ones.
pub(crate) fn report_luns(len: u32) -> Cdb {
    let mut cdb = [0; 16];
    cdb[0] = 0xA0;
    cdb[6..10].copy_from_slice(&len.to_be_bytes());
    cdb
}

/// TEST UNIT READY.
pub(crate) fn test_unit_ready() -> Cdb {
    [0; 16]
}

/// INQUIRY, of a page of vital product data or the standard data.
pub(crate) fn inquiry(page: Option<u8>, len: u16) -> Cdb {
    let mut cdb = [0; 16];
    (cdb[0], cdb[1], cdb[2]) = (0x12, u8::from(page.is_some()), page.unwrap_or(0));
    cdb[3..5].copy_from_slice(&len.to_be_bytes());
    cdb
}

/// MODE SENSE (6) of a page, without block descriptors.
pub(crate) fn mode_sense(page: u8, len: u8) -> Cdb {
    let mut cdb = [0; 16];
    (cdb[0], cdb[1], cdb[2], cdb[4]) = (0x1A, 8, page, len);
    cdb
}

/// REPORT SUPPORTED OPERATION CODES, whether one is.
pub(crate) fn report_opcode(opcode: u8, len: u32) -> Cdb {
    let mut cdb = [0; 16];
    (cdb[0], cdb[1], cdb[2], cdb[3]) = (0xA3, 0x0C, 1, opcode);
    cdb[6..10].copy_from_slice(&len.to_be_bytes());
    cdb
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn blocks_are_where_the_standard_has_them() {
        let (lba, at) = (0x0102_0304_0506_0708, 0x0A0B_0C0D);
        let sixteen = |opcode, flags| {
            let mut cdb = [opcode, flags, 1, 2, 3, 4, 5, 6, 7, 8, 0xA, 0xB, 0xC, 0xD, 0, 0];
            cdb[14] = 0;
            cdb
        };
        assert_eq!(read(lba, at), sixteen(0x88, 0));
        assert_eq!(write(lba, at, true), sixteen(0x8A, 8));
        assert_eq!(write_same(lba, at, true), sixteen(0x93, 8));
        assert_eq!(synchronize_cache(lba, at), sixteen(0x91, 0));
        assert_eq!(
            compare_and_write(lba, 9, false),
            [0x89, 0, 1, 2, 3, 4, 5, 6, 7, 8, 0, 0, 0, 9, 0, 0]
        );
        let (cdb, list) = unmap(lba, at);
        assert_eq!((cdb[0], cdb[7], cdb[8], len(&cdb)), (0x42, 0, 24, 10));
        assert_eq!(list[..8], [0, 22, 0, 16, 0, 0, 0, 0]);
        assert_eq!(list[8..20], [1, 2, 3, 4, 5, 6, 7, 8, 0xA, 0xB, 0xC, 0xD]);
        assert_eq!(inquiry(Some(0xB0), 0x102)[..6], [0x12, 1, 0xB0, 1, 2, 0]);
        let sizes = [inquiry(None, 96), test_unit_ready(), mode_sense(8, 64)].map(|cdb| len(&cdb));
        assert_eq!(sizes, [6, 6, 6]);
        assert_eq!(len(&report_opcode(0x93, 20)), 12);
        assert_eq!(report_luns(0x102)[..10], [0xA0, 0, 0, 0, 0, 0, 0, 0, 1, 2]);
        assert_eq!(len(&report_luns(8)), 12);
        assert_eq!(len(&read_capacity()), 16);
    }
}
