//! Whether the medium still has what memory has, page by page, and repair from memory.
//!
//! A page that has gone bad shows at the next load, which refuses the store. Looked for while the store
//! is loaded it can be written anew.

use crate::bitmap::Run;
use crate::blob::{Blob, Part};
use crate::disk::Disk;
use crate::error::Error;
use crate::format::{COPY_A, COPY_B, PAGE_SIZE, Page, Superblock};
use crate::load::choose_superblock;
use crate::store::Store;
use std::collections::BTreeMap;
use std::ops::Range;

/// Metadata pages that one step looks at, and reads with one call.
const STEP_PAGES: u64 = 256;

/// An extents page that memory let go of: (blob, number in it, page).
type Away = (u64, u32, u32);

/// Something on the medium that is not as it should be.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Problem {
    /// Where.
    pub place: String,
    /// What is wrong.
    pub cause: String,
    /// It was written anew, and is durable.
    pub repaired: bool,
}

/// What one step of [`Store::check`] found.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Checked {
    /// Metadata pages that were compared.
    pub pages: u64,
    /// What was wrong with them.
    pub problems: Vec<Problem>,
    /// The page to go on with; `None`: that was all.
    pub next: Option<u64>,
}

impl<D: Disk> Store<D> {
    /// Compares some of the metadata in its places on the medium, from page `from` on, with memory; with the
    /// first pages also the superblock, and what a load would take from the journal. With `repair` what
    /// differs is written anew from memory: a power cut meanwhile leaves it as it was or repaired. Makes
    /// durable what was not. After the last pages of a store that shares clusters their owners are counted; `lost`
    /// are those that were lost and not released yet.
    ///
    /// # Errors
    /// [`Error::Stopped`], [`Error::Metadata`], or the device's failure to read.
    pub fn check(&mut self, from: u64, repair: bool, lost: &[Run]) -> Result<Checked, Error> {
        self.alive()?;
        if from >= self.sb.md_pages {
            return Ok(self.recount_step(from, lost));
        }
        if self.has_tentative() {
            // The journal's image of a page may else not count, and what is in its place is not compared.
            self.sync()?;
        }
        let mut found = Checked::default();
        if from == 0 {
            let sb = self.sb.clone();
            check_superblock(&mut self.disk, &sb, &mut found.problems);
            found.problems.extend(self.check_journal()?);
        }
        let end = self.sb.md_pages.min(from + STEP_PAGES);
        let (expected, away) = self.expected(from..end);
        let mut bytes = vec![0; (end - from) as usize * PAGE_SIZE];
        let mut unreadable = BTreeMap::new();
        if self.disk.read(self.sb.page_offset(from as u32), &mut bytes).is_err() {
            for (page, number) in bytes.chunks_exact_mut(PAGE_SIZE).zip(from as u32..) {
                if let Err(e) = self.disk.read(self.sb.page_offset(number), page) {
                    unreadable.insert(number, format!("it cannot be read: {e}"));
                }
            }
        }
        let mut bad = BTreeMap::new();
        for (number, mut page) in expected {
            if self.dirty.contains_key(&number) {
                continue;
            }
            found.pages += 1;
            let at = (u64::from(number) - from) as usize * PAGE_SIZE;
            let there = match unreadable.remove(&number) {
                Some(cause) => Err(cause),
                None => Page::verify(&bytes[at..at + PAGE_SIZE], self.sb.store_id(), number),
            };
            let same = |there: &Page| {
                (there.id(), there.used(), there.payload())
                    == (page.id(), page.used(), page.payload())
            };
            let cause = match there {
                Ok(there) if same(&there) => continue,
                Ok(_) => "it says otherwise than memory does".to_owned(),
                Err(cause) => cause,
            };
            let place = self.place(number);
            found.problems.push(Problem { place, cause, repaired: false });
            // Newer than all that the journal has, which has nothing of it; older than what comes.
            page.seal(self.journal.seq.saturating_sub(1));
            bad.insert(number, page);
        }
        if repair && !found.problems.is_empty() {
            self.dirty.extend(bad);
            self.checkpoint()?;
            found.problems.iter_mut().for_each(|problem| problem.repaired = true);
        }
        for (id, n, number) in away {
            if self.dirty.contains_key(&number) {
                continue;
            }
            found.pages += 1;
            match self.bring(id, n..n + 1) {
                Ok(_) => self.leave(id, n),
                Err(Error::Damaged { place, cause }) => {
                    let cause = format!("{cause}; it was let go of in memory");
                    found.problems.push(Problem { place, cause, repaired: false });
                }
                Err(e) => {
                    let cause = format!("it cannot be read: {e}; it was let go of in memory");
                    let place = self.place(number);
                    found.problems.push(Problem { place, cause, repaired: false });
                }
            }
        }
        found.next = (end < self.sb.md_pages || self.sb.shares).then_some(end);
        Ok(found)
    }

    /// Reads the journal as a load would. A record that is damaged, or that the medium never took, ends it
    /// there: the load would know neither that record nor a later one.
    fn check_journal(&mut self) -> Result<Option<Problem>, Error> {
        let at = (self.sb.journal_start + self.sb.tail_page) * PAGE_SIZE as u64;
        let mut there = Store::empty(&mut self.disk, self.sb.clone());
        let replayed = match there.replay(true) {
            Ok(replayed) => replayed.pages,
            Err(Error::Damaged { place, cause }) => {
                return Ok(Some(Problem { place, cause, repaired: false }));
            }
            Err(e) => return Err(e),
        };
        let (end, seq) = (there.journal.seq, self.journal.seq);
        let whole = |(number, page): (&u32, &Page)| {
            replayed.get(number).is_some_and(|there| there.bytes() == page.bytes())
        };
        let cause = match end == seq {
            true if self.dirty.iter().all(whole) => return Ok(None),
            true => "its images are not those that memory has".to_owned(),
            false => format!("it ends before record {end}, and should end before record {seq}"),
        };
        let place = format!("the journal, from byte {at} on");
        Ok(Some(Problem { place, cause, repaired: false }))
    }

    /// What should be in those pages of a range that are in use, and those of which memory has a checksum
    /// only.
    fn expected(&self, range: Range<u64>) -> (BTreeMap<u32, Page>, Vec<Away>) {
        let store = self.sb.store_id();
        let (mut all, mut away) = (BTreeMap::new(), Vec::new());
        for index in range.start.min(self.sb.bitmap_pages)..range.end.min(self.sb.bitmap_pages) {
            all.insert(index as u32, self.render_bitmap(index as u32, 0));
        }
        for blob in self.blobs.values() {
            for part in parts(blob) {
                let number = blob.page_of(part).expect("it is one of its parts");
                if !range.contains(&u64::from(number)) {
                    continue;
                }
                match part {
                    Part::Extents(n) if blob.chunks[&n].extents.is_away() => {
                        away.push((blob.id, n, number));
                    }
                    _ => _ = all.insert(number, blob.render(part, store)),
                }
            }
        }
        (all, away)
    }

    /// Looks at a store that is not loaded. Returns what is wrong with it: each page that cannot be read, and
    /// if there is none the first contradiction between pages. Where no more is wrong than a copy of the
    /// superblock, `repair` writes that anew, durably, from the other one; else nothing is written, as there is
    /// nothing to make a page of.
    ///
    /// # Errors
    /// [`Error::NotAStore`], [`Error::Unsupported`], or the device's failure.
    pub fn examine(mut disk: D, repair: bool) -> Result<Checked, Error> {
        let mut found = Checked::default();
        let first = |e: Error, found: &mut Checked| match e {
            Error::Damaged { place, cause } => {
                found.problems.push(Problem { place, cause, repaired: false });
                Ok(())
            }
            Error::Truncated { .. } => {
                let (place, cause) = ("the device".into(), e.to_string());
                found.problems.push(Problem { place, cause, repaired: false });
                Ok(())
            }
            other => Err(other),
        };
        let sb = match choose_superblock(&mut disk) {
            Ok(sb) => sb,
            Err(e) => return first(e, &mut found).map(|()| found),
        };
        let copies = check_superblock(&mut disk, &sb, &mut found.problems);
        let superblock = sb.encode();
        let (md_pages, bitmap_pages) = (sb.md_pages, sb.bitmap_pages);
        let mut store = Store::empty(&mut disk, sb);
        let replayed = match store.replay(true) {
            Ok(replayed) => replayed,
            Err(e) => return first(e, &mut found).map(|()| found),
        };
        let mut bytes = vec![0; STEP_PAGES as usize * PAGE_SIZE];
        let mut at = 0;
        while at < md_pages {
            // The bitmap's pages are the first, so all others are known when it is their turn.
            let is_bitmap = at < bitmap_pages;
            let longest = if is_bitmap { 1 } else { STEP_PAGES.min(md_pages - at) };
            let in_use = |page: &u64| is_bitmap || store.pages.get(*page);
            let run = (at..at + longest).take_while(in_use).count() as u64;
            if run == 0 {
                at += 1;
                continue;
            }
            found.pages += run;
            let bytes = &mut bytes[..run as usize * PAGE_SIZE];
            store.disk.read(store.sb.page_offset(at as u32), bytes).map_err(Error::Data)?;
            for (i, bytes) in bytes.chunks_exact(PAGE_SIZE).enumerate() {
                let number = at as u32 + i as u32;
                match store.verified(number, bytes, &replayed.pages) {
                    Ok(page) if is_bitmap => store.mark(number, &page),
                    Ok(_) => {}
                    Err(e) => first(e, &mut found)?,
                }
            }
            at += run;
        }
        drop(store);
        if found.problems.len() == copies.len()
            && let Err(e) = Store::read_all(&mut disk, true)
        {
            first(e, &mut found)?;
        }
        if repair && found.problems.len() == copies.len() {
            for (copy, problem) in copies.iter().zip(&mut found.problems) {
                disk.write(copy * PAGE_SIZE as u64, &superblock).map_err(Error::Metadata)?;
                disk.flush().map_err(Error::Metadata)?;
                problem.repaired = true;
            }
        }
        Ok(found)
    }
}

/// Compares both copies of the superblock with `sb`; returns the pages of those with a problem.
fn check_superblock<D: Disk>(
    disk: &mut D,
    sb: &Superblock,
    problems: &mut Vec<Problem>,
) -> Vec<u64> {
    let mut bad = Vec::new();
    for (name, copy) in [("A", COPY_A), ("B", COPY_B)] {
        let mut bytes = [0; PAGE_SIZE];
        let offset = copy * PAGE_SIZE as u64;
        let cause = match disk.read(offset, &mut bytes).map(|()| Superblock::decode(&bytes)) {
            Ok(Ok(there)) if there == *sb => continue,
            Ok(Ok(_)) => "it is not the newest".to_owned(),
            Ok(Err(fault)) => fault.to_string(),
            Err(e) => format!("it cannot be read: {e}"),
        };
        let place = format!("superblock copy {name} at byte {offset}");
        problems.push(Problem { place, cause, repaired: false });
        bad.push(copy);
    }
    bad
}

fn parts(blob: &Blob) -> impl Iterator<Item = Part> + '_ {
    std::iter::once(Part::Root)
        .chain((0..blob.xattr_pages.len() as u32).map(Part::Xattrs))
        .chain(blob.chunks.keys().copied().map(Part::Extents))
        .chain(blob.indexes.keys().copied().map(Part::Index))
}
