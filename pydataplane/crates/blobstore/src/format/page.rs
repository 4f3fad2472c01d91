//! Metadata pages: the common header and the bitmap, extents, index and xattr payloads.

use super::{PAGE_SIZE, crc32c_without};
use zerocopy::little_endian::{U16, U32, U64};
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout, Unaligned};

const MAGIC: [u8; 4] = *b"VLPG";
const CRC_AT: usize = 4;
/// Bytes of the header.
const HEADER: usize = 64;
/// Bytes after the header.
pub(crate) const PAYLOAD: usize = PAGE_SIZE - HEADER;
/// Entries of an extents or index page.
pub(crate) const POINTERS: usize = PAYLOAD / 4;
/// Bits of a bitmap page.
pub(crate) const BITMAP_BITS: u64 = PAYLOAD as u64 * 8;

#[derive(FromBytes, IntoBytes, KnownLayout, Immutable, Unaligned)]
#[repr(C)]
struct Header {
    magic: [u8; 4],
    crc: U32,
    kind: U16,
    reserved: [u8; 2],
    index: U32,
    store: U64,
    page: U32,
    used: U32,
    lsn: U64,
    owner: U64,
    reserved_end: [u8; 16],
}
const _: () = assert!(size_of::<Header>() == HEADER);
const _: () = assert!(POINTERS == 1008 && BITMAP_BITS == 32256);

/// What a page holds.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Kind {
    Bitmap = 1,
    Root = 2,
    Extents = 3,
    Index = 4,
    Xattrs = 5,
}

impl Kind {
    fn of(raw: u16) -> Option<Kind> {
        [Kind::Bitmap, Kind::Root, Kind::Extents, Kind::Index, Kind::Xattrs]
            .into_iter()
            .find(|k| *k as u16 == raw)
    }
}

/// Which page of which owner.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct PageId {
    pub kind: Kind,
    /// Blob id; 0 for a bitmap page.
    pub owner: u64,
    /// Which one of its kind in its owner.
    pub index: u32,
}

/// A page of this store: made here, or read and verified.
#[derive(Clone)]
pub(crate) struct Page(Box<[u8; PAGE_SIZE]>);

impl Page {
    /// A page with an empty payload, to be filled and sealed.
    pub fn new(id: PageId, store: u64, page: u32) -> Self {
        let mut p = Page(Box::new([0; PAGE_SIZE]));
        let h = p.header_mut();
        h.magic = MAGIC;
        h.kind = U16::new(id.kind as u16);
        h.index = U32::new(id.index);
        h.store = U64::new(store);
        h.page = U32::new(page);
        h.owner = U64::new(id.owner);
        p
    }

    /// Sets the transaction's number and the checksum: the page is ready to be written.
    pub fn seal(&mut self, lsn: u64) {
        self.header_mut().lsn = U64::new(lsn);
        let crc = crc32c_without(&self.0[..], CRC_AT);
        self.header_mut().crc = U32::new(crc);
    }

    /// Checks what was read from where page `page` of the store should be; the error is a clause.
    pub fn verify(bytes: &[u8], store: u64, page: u32) -> Result<Page, String> {
        let bytes: &[u8; PAGE_SIZE] = bytes.try_into().expect("a page was read");
        let p = Page(Box::new(*bytes));
        let h = p.header();
        if h.magic != MAGIC {
            return Err("it is not a metadata page".into());
        }
        if h.crc.get() != crc32c_without(&p.0[..], CRC_AT) {
            return Err("its checksum does not match".into());
        }
        if h.store.get() != store {
            return Err("it belongs to another store".into());
        }
        if h.page.get() != page {
            return Err(format!("it says that it is metadata page {}", h.page));
        }
        if Kind::of(h.kind.get()).is_none() {
            return Err(format!("its kind {} is not known", h.kind));
        }
        Ok(p)
    }

    fn header(&self) -> &Header {
        Header::ref_from_prefix(&self.0[..]).expect("a page is longer than its header").0
    }

    fn header_mut(&mut self) -> &mut Header {
        Header::mut_from_prefix(&mut self.0[..]).expect("a page is longer than its header").0
    }

    pub fn id(&self) -> PageId {
        let h = self.header();
        let kind = Kind::of(h.kind.get()).expect("made or verified here");
        PageId { kind, owner: h.owner.get(), index: h.index.get() }
    }

    pub fn lsn(&self) -> u64 {
        self.header().lsn.get()
    }

    /// Entries or bytes in use, by kind.
    pub fn used(&self) -> u32 {
        self.header().used.get()
    }

    pub fn set_used(&mut self, used: u32) {
        self.header_mut().used = U32::new(used);
    }

    pub fn bytes(&self) -> &[u8; PAGE_SIZE] {
        &self.0
    }

    pub fn payload(&self) -> &[u8] {
        &self.0[HEADER..]
    }

    pub fn payload_mut(&mut self) -> &mut [u8] {
        &mut self.0[HEADER..]
    }

    /// The payload of an extents or index page.
    pub fn pointers(&self) -> &[U32; POINTERS] {
        FromBytes::ref_from_bytes(self.payload()).expect("the payload is 1008 words")
    }

    pub fn pointers_mut(&mut self) -> &mut [U32; POINTERS] {
        FromBytes::mut_from_bytes(self.payload_mut()).expect("the payload is 1008 words")
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_sealed_page_verifies_only_unchanged_and_in_its_place() {
        let id = PageId { kind: Kind::Extents, owner: 7, index: 3 };
        let mut p = Page::new(id, 99, 12);
        p.pointers_mut()[1007] = U32::new(5);
        p.set_used(1);
        p.seal(42);
        let q = Page::verify(p.bytes(), 99, 12).ok().unwrap();
        assert_eq!((q.id(), q.lsn(), q.used(), q.pointers()[1007].get()), (id, 42, 1, 5));
        assert_eq!(Page::verify(p.bytes(), 98, 12).err().unwrap(), "it belongs to another store");
        assert!(Page::verify(p.bytes(), 99, 13).err().unwrap().contains("metadata page 12"));
        for at in [0, 5, 9, 40, 63, 64, 4095] {
            let mut bad = *p.bytes();
            bad[at] ^= 1;
            assert!(Page::verify(&bad, 99, 12).is_err(), "byte {at}");
        }
        assert!(Page::verify(&[0; PAGE_SIZE], 0, 0).is_err());
    }
}
