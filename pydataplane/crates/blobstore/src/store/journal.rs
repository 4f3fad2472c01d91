//! How a change becomes durable: a record in the journal, and at a checkpoint all pages in their places.

use super::{Store, Txn, WRITE_RUN_PAGES};
use crate::disk::{Disk, DiskError};
use crate::error::Error;
use crate::format::{BITMAP_BITS, PAGE_SIZE, Page, RECORD_IMAGES_MAX, RecordHeader, images_crc};
use std::collections::{BTreeMap, BTreeSet};

impl<D: Disk> Store<D> {
    /// Most extents pages that one transaction may change.
    pub(crate) fn batch_max(&self) -> usize {
        let record = (self.sb.journal_pages as usize - 1).min(RECORD_IMAGES_MAX);
        // Each may bring its index page; the root and all bitmap pages may change too.
        (record - self.sb.bitmap_pages as usize - 1) / 2
    }

    /// Makes a change durable: fresh pages in place, flush, record, flush.
    pub(crate) fn commit(&mut self, txn: Txn) -> Result<(), Error> {
        let seq = self.journal.seq;
        let mut bitmaps = BTreeSet::new();
        for page in &txn.freed {
            self.pages.clear(u64::from(*page));
            bitmaps.insert(page / BITMAP_BITS as u32);
        }
        bitmaps.extend(txn.fresh.iter().map(|page| page / BITMAP_BITS as u32));
        let mut fresh = BTreeMap::new();
        let mut images = BTreeMap::new();
        for (id, part) in txn.parts {
            let Some(blob) = self.blobs.get(&id) else { continue };
            let Some(number) = blob.page_of(part) else { continue };
            let mut page = blob.render(part, self.sb.store_id());
            page.seal(seq);
            let to = if txn.fresh.contains(&number) { &mut fresh } else { &mut images };
            to.insert(number, page);
        }
        for i in bitmaps {
            images.insert(i, self.render_bitmap(i, seq));
        }
        assert!(!images.is_empty(), "a change touches a page that is in use");
        self.make_room(images.len() as u64 + 1)?;
        if !fresh.is_empty() {
            self.write_pages(&fresh)?;
        }
        if self.unflushed {
            let flushed = self.disk.flush();
            self.must(flushed)?;
            self.unflushed = false;
        }
        self.write_record(&images)?;
        for page in &txn.freed {
            self.dirty.remove(page);
        }
        self.dirty.extend(images);
        Ok(())
    }

    /// Writes one record and flushes it.
    fn write_record(&mut self, images: &BTreeMap<u32, Page>) -> Result<(), Error> {
        assert!(images.len() <= RECORD_IMAGES_MAX, "{} images in a record", images.len());
        let header = RecordHeader {
            store: self.sb.store_id(),
            mount: self.sb.mount,
            seq: self.journal.seq,
            images_crc: images_crc(images.values()),
            targets: images.keys().copied().collect(),
        };
        let mut bytes = Vec::with_capacity((images.len() + 1) * PAGE_SIZE);
        bytes.extend_from_slice(&header.encode());
        images.values().for_each(|p| bytes.extend_from_slice(p.bytes()));
        let total = images.len() as u64 + 1;
        let ring = self.sb.journal_pages;
        let written = self.write_ring(self.journal.head, &bytes);
        let written = written.and_then(|()| self.disk.flush());
        self.must(written)?;
        self.journal.head = (self.journal.head + total) % ring;
        self.journal.used += total;
        self.journal.seq += 1;
        Ok(())
    }

    /// Writes pages of the journal from its page `at` on, going round at its end.
    pub(crate) fn write_ring(&mut self, at: u64, bytes: &[u8]) -> Result<(), DiskError> {
        let before_end = (self.sb.journal_pages - at) as usize * PAGE_SIZE;
        let (front, back) = bytes.split_at(before_end.min(bytes.len()));
        let offset = |page: u64| (self.sb.journal_start + page) * PAGE_SIZE as u64;
        self.disk.write(offset(at), front)?;
        if back.is_empty() { Ok(()) } else { self.disk.write(offset(0), back) }
    }

    /// Sees to it that `pages` more fit in the journal.
    fn make_room(&mut self, pages: u64) -> Result<(), Error> {
        assert!(pages <= self.sb.journal_pages, "a record of {pages} pages");
        if self.journal.used + pages > self.sb.journal_pages {
            self.checkpoint()?;
        }
        Ok(())
    }

    /// Writes every changed page in its place and empties the journal.
    ///
    /// # Errors
    /// [`Error::Stopped`], [`Error::Metadata`].
    pub fn checkpoint(&mut self) -> Result<(), Error> {
        self.alive()?;
        let dirty = std::mem::take(&mut self.dirty);
        self.write_pages(&dirty)?;
        let flushed = self.disk.flush();
        self.must(flushed)?;
        self.sb.tail_page = self.journal.head;
        self.sb.tail_seq = self.journal.seq;
        self.write_superblock()?;
        self.journal.used = 0;
        Ok(())
    }

    /// Writes pages in place, neighbours together.
    pub(crate) fn write_pages(&mut self, pages: &BTreeMap<u32, Page>) -> Result<(), Error> {
        let mut all = pages.iter().peekable();
        while let Some((first, page)) = all.next() {
            let mut bytes = page.bytes().to_vec();
            let mut last = *first;
            while bytes.len() < WRITE_RUN_PAGES * PAGE_SIZE {
                let Some((_, page)) = all.next_if(|(n, _)| **n == last + 1) else { break };
                bytes.extend_from_slice(page.bytes());
                last += 1;
            }
            let written = self.disk.write(self.sb.page_offset(*first), &bytes);
            self.unflushed = true;
            self.must(written)?;
        }
        Ok(())
    }
}
