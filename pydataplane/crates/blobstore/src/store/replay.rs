//! The journal, read again: which records count, and what a replay must not believe: an end that is none,
//! and images that are out of date.

use super::{Journal, READ_RUN_PAGES, Store};
use crate::disk::Disk;
use crate::error::Error;
use crate::format::{BITMAP_BITS, Kind, PAGE_SIZE, Page, RecordHeader, crc32c};
use std::collections::BTreeMap;

/// What the journal holds.
#[derive(Default)]
pub(crate) struct Replayed {
    /// The newest image of each page, unless a later one was written in place.
    pub pages: BTreeMap<u32, Page>,
    /// The last final record that counts and what comes after it, each with its page of the journal:
    /// their flush may have failed.
    last: Vec<(u64, Vec<u8>)>,
    /// Some of these are not final yet.
    tentative: bool,
}

/// A record of the journal.
struct Record {
    /// During which boot it counts; 0: it is final.
    boot: u128,
    /// Its page of the journal.
    at: u64,
    bytes: Vec<u8>,
    pages: Vec<(u32, Page)>,
}

impl Record {
    /// The page of the journal behind it.
    fn next(&self, journal_pages: u64) -> u64 {
        (self.at + (self.bytes.len() / PAGE_SIZE) as u64) % journal_pages
    }

    fn count(self, newest: &mut BTreeMap<u32, Page>, last: &mut Vec<(u64, Vec<u8>)>) {
        let bitmaps = self.pages.iter().filter(|(_, page)| page.id().kind == Kind::Bitmap);
        let bitmaps: Vec<u32> = bitmaps.map(|(number, _)| *number).collect();
        newest.extend(self.pages);
        bitmaps.into_iter().for_each(|index| forget_free(newest, index));
        last.push((self.at, self.bytes));
    }
}

impl<D: Disk> Store<D> {
    /// Reads the journal. Sets the next record's number.
    pub(crate) fn replay(&mut self, tentative: bool) -> Result<Replayed, Error> {
        let boot = self.disk.boot().filter(|_| tentative);
        let mut newest = BTreeMap::new();
        let mut last = Vec::new();
        // Records after the last final one.
        let mut open: Vec<Record> = Vec::new();
        let mut seq = self.journal.seq;
        let (mut at, mut left) = (self.sb.tail_page, self.sb.journal_pages);
        while left > 0 {
            let mut bytes = [0; PAGE_SIZE];
            self.read_ring(at, &mut bytes)?;
            let Some(header) = RecordHeader::decode(&bytes) else { break };
            if header.store != self.sb.store_id() || header.mount != self.sb.mount {
                break;
            }
            if header.seq != seq {
                if seq == self.sb.tail_seq && header.seq > seq {
                    return Err(Error::Damaged {
                        place: "the newer superblock copy".into(),
                        cause: "the other one is older than the journal".into(),
                    });
                }
                break;
            }
            let count = header.targets.len() as u64;
            if count + 1 > left {
                break;
            }
            let mut images = vec![0; count as usize * PAGE_SIZE];
            self.read_ring((at + 1) % self.sb.journal_pages, &mut images)?;
            if crc32c(&[&images]) != header.images_crc {
                break;
            }
            let mut pages = Vec::new();
            for (target, image) in header.targets.iter().zip(images.chunks_exact(PAGE_SIZE)) {
                if u64::from(*target) >= self.sb.md_pages {
                    return Err(Error::Damaged {
                        place: format!("journal record {}", header.seq),
                        cause: format!("it changes page {target}, which does not exist"),
                    });
                }
                let page = Page::verify(image, self.sb.store_id(), *target).map_err(|cause| {
                    let place =
                        format!("journal record {}, its metadata page {target}", header.seq);
                    Error::Damaged { place, cause }
                })?;
                pages.push((*target, page));
            }
            open.push(Record {
                boot: header.boot,
                at,
                bytes: [&bytes[..], &images].concat(),
                pages,
            });
            at = (at + count + 1) % self.sb.journal_pages;
            left -= count + 1;
            seq += 1;
            if header.boot == 0 {
                // All before it was flushed.
                last.clear();
                open.drain(..).for_each(|record| record.count(&mut newest, &mut last));
                last.drain(..last.len() - 1);
                self.journal.seq = seq;
            }
        }
        self.nothing_later_follows(seq, at, left)?;
        let mut is_tentative = false;
        for record in open.into_iter().take_while(|record| Some(record.boot) == boot) {
            self.journal.head = record.next(self.sb.journal_pages);
            record.count(&mut newest, &mut last);
            self.journal.seq += 1;
            is_tentative = true;
        }
        // What was freed and used anew in place is not replayed. What is in place already is: a flush
        // of it may have failed, and then it can be read but is not on the medium.
        let mut bytes = [0; PAGE_SIZE];
        let mut stale = Vec::new();
        for (number, image) in &newest {
            self.disk.read(self.sb.page_offset(*number), &mut bytes).map_err(Error::Data)?;
            if let Ok(there) = Page::verify(&bytes, self.sb.store_id(), *number)
                && there.lsn() > image.lsn()
            {
                stale.push(*number);
            }
        }
        stale.iter().for_each(|n| drop(newest.remove(n)));
        Ok(Replayed { pages: newest, last, tentative: is_tentative })
    }

    /// Reads pages of the journal, going round at its end.
    pub(crate) fn read_ring(&mut self, at: u64, bytes: &mut [u8]) -> Result<(), Error> {
        let before_end = (self.sb.journal_pages - at) as usize * PAGE_SIZE;
        let (front, back) = bytes.split_at_mut(before_end.min(bytes.len()));
        let offset = |page: u64| (self.sb.journal_start + page) * PAGE_SIZE as u64;
        self.disk.read(offset(at), front).map_err(Error::Data)?;
        if back.is_empty() {
            return Ok(());
        }
        self.disk.read(offset(0), back).map_err(Error::Data)
    }

    /// Writes what was replayed in place and begins a new journal.
    ///
    /// The record that nobody was told of may be in a cache alone, also where its flush failed: it is
    /// made durable first, since pages in place without their record would be a change in part.
    pub(crate) fn begin_new_journal(&mut self, replayed: &Replayed) -> Result<(), Error> {
        for (at, record) in &replayed.last {
            let written = self.write_ring(*at, record);
            self.must(written)?;
        }
        if !replayed.last.is_empty() {
            let flushed = self.disk.flush();
            self.must(flushed)?;
        }
        if replayed.tentative {
            // If the power fails now, pages that are torn in their places are taken from the journal.
            self.end_tentative()?;
        }
        self.write_pages(&replayed.pages)?;
        let flushed = self.disk.flush();
        self.must(flushed)?;
        // A record that was lost may have left a page in its place. Each took a page of the ring or more, so
        // its number is below this: what comes is newer than that page.
        let seq = self.journal.seq + self.sb.journal_pages;
        self.journal = Journal { head: 0, used: 0, seq };
        self.sb.tail_page = 0;
        self.sb.tail_seq = self.journal.seq;
        self.sb.mount += 1;
        self.write_superblock()
    }

    /// Refuses where the `left` pages of the journal from page `at` on have a record that was written when
    /// record `seq` was durable, which should be at `at`: it is damaged then, and not cut short.
    ///
    /// # Errors
    /// [`Error::Damaged`], or the device's failure.
    fn nothing_later_follows(&mut self, seq: u64, at: u64, left: u64) -> Result<(), Error> {
        let mut done = 0;
        while done < left {
            let mut bytes = vec![0; READ_RUN_PAGES.min(left - done) as usize * PAGE_SIZE];
            self.read_ring((at + done) % self.sb.journal_pages, &mut bytes)?;
            for page in bytes.as_chunks::<PAGE_SIZE>().0 {
                let Some(later) = RecordHeader::decode(page) else { continue };
                let same = (later.store, later.mount) == (self.sb.store_id(), self.sb.mount);
                if same && later.seq.saturating_sub(later.open.into()) > seq {
                    let offset = (self.sb.journal_start + at) * PAGE_SIZE as u64;
                    let later = later.seq;
                    return Err(Error::Damaged {
                        place: format!("journal record {seq} at byte {offset}"),
                        cause: format!("it was durable before record {later}, but is not whole"),
                    });
                }
            }
            done += (bytes.len() / PAGE_SIZE) as u64;
        }
        Ok(())
    }
}

/// Forgets the images of pages that the newest image of bitmap page `index` says are free: who uses such a
/// page anew writes it in place, and it must not be taken for what it was if that goes bad.
fn forget_free(newest: &mut BTreeMap<u32, Page>, index: u32) {
    let Some(bitmap) = newest.get(&index).cloned() else { return };
    let bits = BITMAP_BITS as u32;
    let first = index.saturating_mul(bits);
    let covered = newest.range(first..first.saturating_add(bits)).map(|(number, _)| *number);
    let used = |bit: u32| bitmap.payload()[(bit / 8) as usize] >> (bit % 8) & 1 == 1;
    let free: Vec<u32> = covered.filter(|number| !used(number - first)).collect();
    free.iter().for_each(|number| drop(newest.remove(number)));
}
