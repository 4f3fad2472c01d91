//! The on-disk format, as `schemas/blobstore.md` describes it, in the same order.

mod page;
mod record;
mod root;
mod superblock;
mod xattr;

pub(crate) use page::{BITMAP_BITS, Kind, PAYLOAD, POINTERS, Page, PageId};
pub(crate) use record::{RECORD_IMAGES_MAX, RecordHeader, images_crc};
pub(crate) use root::{
    DIRECT, EXTENTS_MAX, FLAG_DELETING, FLAG_DIF_1, FLAG_DIF_3, FLAG_DIF_4096, FLAG_EXTERNAL,
    FLAG_READ_ONLY, FLAG_SNAPSHOT, FLAG_THIN, FLAGS_1, FLAGS_2, FLAGS_DIF, INLINE_XATTRS, Root,
    XATTR_PAGES,
};
pub(crate) use superblock::{COPY_A, COPY_B, Superblock, SuperblockFault, VERSION};
pub(crate) use xattr::{pack, unpack};

/// Bytes of a page.
pub const PAGE_SIZE: usize = 4096;
/// Smallest cluster, in bytes.
pub const CLUSTER_MIN: u32 = 16 << 10;
/// Largest cluster, in bytes.
pub const CLUSTER_MAX: u32 = 1 << 30;
/// Stands for a cluster that reads as zeros, whatever the blob's parent has.
pub const HOLE: u32 = u32::MAX;
/// Longest name of a store or blob, in bytes.
pub const NAME_MAX: usize = 63;
/// Longest name of an xattr, in bytes.
pub const XATTR_NAME_MAX: usize = 255;
/// Longest value of an xattr, in bytes.
pub const XATTR_VALUE_MAX: usize = 3072;

/// Fewest pages of a journal.
pub(crate) const JOURNAL_PAGES_MIN: u64 = 64;
/// What counts (generations, mounts, records, blobs) stays below: a count that no store ever
/// reaches, and from which none gets to the end of 64 bits.
pub(crate) const COUNT_MAX: u64 = 1 << 62;

/// CRC-32C of several parts.
pub(crate) fn crc32c(parts: &[&[u8]]) -> u32 {
    let mut digest = crc_fast::Digest::new(crc_fast::CrcAlgorithm::Crc32Iscsi);
    for part in parts {
        digest.update(part);
    }
    digest.finalize() as u32
}

/// CRC-32C of `bytes` with the four bytes at `at` taken as zero.
pub(crate) fn crc32c_without(bytes: &[u8], at: usize) -> u32 {
    crc32c(&[&bytes[..at], &[0; 4], &bytes[at + 4..]])
}

/// A name field: bytes, then zeros.
pub(crate) fn encode_name(name: &str) -> [u8; NAME_MAX + 1] {
    let mut field = [0; NAME_MAX + 1];
    field[..name.len()].copy_from_slice(name.as_bytes());
    field
}

/// The reverse of [`encode_name`]; `None` where the rules for names are broken.
pub(crate) fn decode_name(field: &[u8; NAME_MAX + 1]) -> Option<String> {
    let len = field.iter().position(|b| *b == 0)?;
    let name = std::str::from_utf8(&field[..len]).ok()?;
    let zeros = field[len..].iter().all(|b| *b == 0);
    (zeros && name_fault(name).is_none()).then(|| name.to_owned())
}

/// What is wrong with a name, apart from its length.
pub(crate) fn name_fault(name: &str) -> Option<&'static str> {
    if name.is_empty() {
        return Some("it is empty");
    }
    let good = |b: u8| b.is_ascii_graphic() && b != b'/';
    (!name.bytes().all(good)).then_some("only printable ASCII without space and slash is possible")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_checksum_is_that_of_iscsi() {
        assert_eq!(crc32c(&[b"123456789"]), 0xe306_9283, "RFC 3720, CRC-32C check value");
        assert_eq!(crc32c(&[b"1234", b"56789"]), 0xe306_9283);
        assert_eq!(crc32c_without(b"1234\xff\xff\xff\xff9", 4), crc32c(&[b"1234\0\0\0\x009"]));
    }

    #[test]
    fn names_are_checked_in_both_directions() {
        assert_eq!(decode_name(&encode_name("lvs0")).as_deref(), Some("lvs0"));
        assert!(decode_name(&encode_name("")).is_none());
        assert!(decode_name(&[b'a'; 64]).is_none(), "no zero at the end");
        let mut field = encode_name("a");
        field[9] = b'x';
        assert!(decode_name(&field).is_none(), "bytes after the zero");
        for bad in ["a b", "a/b", "\u{e9}", "a\n"] {
            assert!(name_fault(bad).is_some(), "{bad:?}");
        }
    }
}
