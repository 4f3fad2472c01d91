//! How a change becomes durable: a record in the journal, and at a checkpoint all pages in their places.
//!
//! Most changes are final when they are acknowledged: what they stand on is flushed, then the record is.
//! An allocation need not be, as a disk's writes are not durable before a flush either: its record is
//! only written, and counts as long as the host's boot goes on, so that it survives the process. The next
//! final record makes it durable, too ([`Store::sync`] writes one without images).

use super::{Store, Tentative, Txn, WRITE_RUN_PAGES};
use crate::blob::Part;
use crate::disk::{Disk, DiskError};
use crate::error::Error;
use crate::format::{BITMAP_BITS, PAGE_SIZE, Page, RECORD_IMAGES_MAX, RecordHeader, images_crc};
use std::collections::{BTreeMap, BTreeSet};

/// The first version of the format with records that are not final.
const TENTATIVE_VERSION: u32 = 2;

/// What a transaction writes.
struct Change {
    /// All its pages as they are from then on.
    images: BTreeMap<u32, Page>,
    /// Pages that are free then.
    freed: Vec<u32>,
    /// Those of `images` that were free before.
    fresh: BTreeSet<u32>,
}

impl<D: Disk> Store<D> {
    /// Most extents pages that one transaction may change.
    pub(crate) fn batch_max(&self) -> usize {
        let record = (self.sb.journal_pages as usize - 1).min(RECORD_IMAGES_MAX);
        // Each may bring its index page; the root and all bitmap pages may change too. A final record
        // must fit behind one that is not.
        (record - 1 - self.sb.bitmap_pages as usize - 1) / 2
    }

    /// Makes a change durable: fresh pages in place, flush, record, flush.
    pub(crate) fn commit(&mut self, txn: Txn) -> Result<(), Error> {
        let change = self.render_all(txn);
        self.commit_final(change)
    }

    fn commit_final(&mut self, change: Change) -> Result<(), Error> {
        let Change { images, freed, fresh } = change;
        let (in_place, images): (BTreeMap<_, _>, _) =
            images.into_iter().partition(|(number, _)| fresh.contains(number));
        self.make_room(images.len() as u64 + 1)?;
        self.write_pages(&in_place)?;
        if self.unflushed {
            self.flush()?;
        }
        self.write_record(&images, None)?;
        self.flush()?;
        self.tentative = None;
        self.note(images, freed);
        Ok(())
    }

    /// Makes a change that is durable with the next final one only, but survives the process: a record
    /// with all images, without a flush. Final at once where nobody knows what survives. `failures`: how many
    /// flushes of the device had failed before what it stands on was written.
    pub(crate) fn commit_tentative(&mut self, txn: Txn, failures: u64) -> Result<(), Error> {
        let change = self.render_all(txn);
        // The final record that must be able to follow has one page.
        let pages = change.images.len() as u64 + 2;
        let fits = pages <= self.sb.journal_pages && change.images.len() <= RECORD_IMAGES_MAX;
        let boot = self.disk.boot().filter(|_| fits && self.sb.version >= TENTATIVE_VERSION);
        let Some(boot) = boot else { return self.commit_final(change) };
        self.make_room(pages)?;
        self.unflushed = true;
        let tentative = self.tentative.get_or_insert(Tentative { failures, records: 0 });
        let records = tentative.records + 1;
        self.write_record(&change.images, Some(boot))?;
        self.tentative.iter_mut().for_each(|tentative| tentative.records = records);
        self.note(change.images, change.freed);
        Ok(())
    }

    /// Makes everything durable that was written, and all changes.
    ///
    /// # Errors
    /// [`Error::Metadata`]: what was written since the last one may be lost.
    pub fn sync(&mut self) -> Result<(), Error> {
        // A full device has kept what it has.
        if let Some(cause) = self.stopped().filter(|e| !e.no_space) {
            return Err(Error::Stopped { cause: cause.to_string() });
        }
        self.flush()?;
        if self.tentative.is_some() {
            self.end_tentative()?;
        }
        Ok(())
    }

    /// Makes the records final that are in the journal, which was flushed.
    pub(crate) fn end_tentative(&mut self) -> Result<(), Error> {
        self.write_record(&BTreeMap::new(), None)?;
        self.flush()?;
        self.tentative = None;
        Ok(())
    }

    /// Whether there are changes that are not durable yet.
    pub fn has_tentative(&self) -> bool {
        self.tentative.is_some()
    }

    fn flush(&mut self) -> Result<(), Error> {
        let flushed = self.disk.flush();
        self.must(flushed)?;
        // Somebody else's may have failed meanwhile, which this one is not told of.
        let overtaken = self.stopped().filter(|e| !e.no_space && self.tentative.is_some());
        self.must(overtaken.map_or(Ok(()), Err))?;
        self.unflushed = false;
        Ok(())
    }

    /// The pages in the journal are newer than those in their places.
    fn note(&mut self, images: BTreeMap<u32, Page>, freed: Vec<u32>) {
        for page in &freed {
            self.dirty.remove(page);
        }
        self.dirty.extend(images);
    }

    fn render_all(&mut self, txn: Txn) -> Change {
        let seq = self.journal.seq;
        let mut bitmaps = BTreeSet::new();
        for page in &txn.freed {
            self.pages.clear(u64::from(*page));
            bitmaps.insert(page / BITMAP_BITS as u32);
        }
        bitmaps.extend(txn.fresh.iter().map(|page| page / BITMAP_BITS as u32));
        let mut images = BTreeMap::new();
        for (id, part) in txn.parts {
            let Some(blob) = self.blobs.get(&id) else { continue };
            let Some(number) = blob.page_of(part) else { continue };
            let mut page = blob.render(part, self.sb.store_id());
            if let Part::Extents(n) = part {
                self.brought.insert((id, n));
            }
            page.seal(seq);
            images.insert(number, page);
        }
        for i in bitmaps {
            images.insert(i, self.render_bitmap(i, seq));
        }
        assert!(images.keys().any(|n| !txn.fresh.contains(n)), "a change touches a page in use");
        Change { images, freed: txn.freed, fresh: txn.fresh }
    }

    /// Writes one record; `boot` is that during which it counts, `None` if it is final.
    fn write_record(
        &mut self,
        images: &BTreeMap<u32, Page>,
        boot: Option<u128>,
    ) -> Result<(), Error> {
        assert!(images.len() <= RECORD_IMAGES_MAX, "{} images in a record", images.len());
        let header = RecordHeader {
            store: self.sb.store_id(),
            mount: self.sb.mount,
            seq: self.journal.seq,
            images_crc: images_crc(images.values()),
            boot: boot.unwrap_or(0),
            open: boot.and(self.tentative.as_ref()).map_or(0, |tentative| tentative.records),
            targets: images.keys().copied().collect(),
        };
        let mut bytes = Vec::with_capacity((images.len() + 1) * PAGE_SIZE);
        bytes.extend_from_slice(&header.encode());
        images.values().for_each(|p| bytes.extend_from_slice(p.bytes()));
        let total = images.len() as u64 + 1;
        let ring = self.sb.journal_pages;
        let written = self.write_ring(self.journal.head, &bytes);
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
        if self.tentative.is_some() {
            // Pages that are torn in their places are taken from the journal, which must count then.
            self.sync()?;
        }
        let dirty = std::mem::take(&mut self.dirty);
        let written = self.write_pages(&dirty);
        if let Err(e) = written.and_then(|()| self.flush()) {
            // What was let go of in memory is read from there.
            self.dirty = dirty;
            return Err(e);
        }
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
