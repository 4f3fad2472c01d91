//! What extents pages say, in memory: all of it, a few runs, or only a checksum until it is wanted again.
//!
//! A full store of 10 TiB has 160 million entries. Those of a page that are few runs, as where a blob was
//! allocated at one go, stay as these. Others are let go of between two operations, and read from
//! the page again by the next one that looks at them: it says so first ([`Store::bring`]), and ends there if
//! that fails.

use crate::blob::{BlobId, place};
use crate::disk::Disk;
use crate::error::Error;
use crate::format::{HOLE, Kind, PAGE_SIZE, POINTERS, PageId, crc32c};
use crate::load::READ_RUN_PAGES;
use crate::store::Store;
use std::ops::Range;
use zerocopy::IntoBytes;
use zerocopy::little_endian::U32;

/// Runs of a page's entries that stay in memory at most, when a store is loaded: 128 bytes.
pub(crate) const RUNS_MAX: usize = 16;
/// Extents pages that are looked at in one go, where all of a blob is.
pub(crate) const WINDOW: u32 = 64;
/// Extents pages that are let go of in one go.
const STEP: usize = 512;
/// All extents pages of a blob.
pub(crate) const ALL: Range<u32> = 0..u32::MAX;

/// The extents page of a cluster.
pub(crate) fn the(cluster: u64) -> Range<u32> {
    let n = place(cluster).0;
    n..n.saturating_add(1)
}

/// Entries from `first` on: of one value if that is 0 or [`HOLE`], else of ascending ones.
#[derive(Clone, Copy)]
pub(crate) struct Piece {
    first: u16,
    value: u32,
}

/// The entries of an extents page.
pub(crate) enum Extents {
    All(Box<[u32; POINTERS]>),
    Runs(Box<[Piece]>),
    /// In the page only; the CRC-32C that they have there.
    Away(u32),
}

impl Extents {
    /// Without any.
    pub fn new() -> Self {
        Extents::All(Box::new([0; POINTERS]))
    }

    /// Those of a page; more than `most` runs of them are left in the page.
    pub fn of(entries: &[U32; POINTERS], most: usize) -> Self {
        match pieces(entries.iter().map(|entry| entry.get()), most) {
            Some(runs) => Extents::Runs(runs),
            None => Extents::Away(crc32c(&[entries.as_bytes()])),
        }
    }

    pub fn is_away(&self) -> bool {
        matches!(self, Extents::Away(_))
    }

    /// One of the entries.
    ///
    /// # Panics
    /// When they are not in memory: whoever looks at them brings them first.
    pub fn get(&self, entry: usize) -> u32 {
        match self {
            Extents::All(all) => all[entry],
            Extents::Runs(runs) => {
                let at = runs.partition_point(|piece| usize::from(piece.first) <= entry);
                let piece = runs[at - 1];
                match piece.value {
                    0 | HOLE => piece.value,
                    value => value + (entry - usize::from(piece.first)) as u32,
                }
            }
            Extents::Away(_) => panic!("an extents page was not brought into memory"),
        }
    }

    /// All entries.
    pub fn iter(&self) -> impl Iterator<Item = u32> + '_ {
        (0..POINTERS).map(|entry| self.get(entry))
    }

    /// Sets an entry; returns what it was.
    pub fn replace(&mut self, entry: usize, to: u32) -> u32 {
        if let Extents::Runs(_) = self {
            let mut all = Box::new([0; POINTERS]);
            all.iter_mut().zip(self.iter()).for_each(|(to, from)| *to = from);
            *self = Extents::All(all);
        }
        match self {
            Extents::All(all) => std::mem::replace(&mut all[entry], to),
            _ => panic!("an extents page was not brought into memory"),
        }
    }

    /// Lets go of them where they are more than `most` runs, if `away`.
    fn shrink(&mut self, most: usize, away: bool) {
        let entries: [U32; POINTERS] = match self {
            Extents::Away(_) => return,
            Extents::Runs(runs) if runs.len() <= most => return,
            _ => std::array::from_fn(|entry| U32::new(self.get(entry))),
        };
        let small = Extents::of(&entries, most);
        if away || !small.is_away() {
            *self = small;
        }
    }
}

/// Entries as at most `most` runs.
fn pieces(entries: impl Iterator<Item = u32>, most: usize) -> Option<Box<[Piece]>> {
    let mut all: Vec<Piece> = Vec::with_capacity(most.min(RUNS_MAX));
    let mut last = None;
    for (first, value) in (0..).zip(entries) {
        let goes_on = match (last, value) {
            (None, _) => false,
            (Some(before), 0 | HOLE) => before == value,
            (Some(before), _) => before != 0 && before != HOLE && before + 1 == value,
        };
        last = Some(value);
        if goes_on {
            continue;
        }
        if all.len() == most {
            return None;
        }
        all.push(Piece { first, value });
    }
    Some(all.into_boxed_slice())
}

impl<D: Disk> Store<D> {
    /// Sees to it that those extents pages of a blob are in memory. Returns those that were not.
    pub(crate) fn bring(&mut self, id: u64, chunks: Range<u32>) -> Result<Vec<u32>, Error> {
        let Some(blob) = self.blobs.get(&id).filter(|_| !chunks.is_empty()) else {
            return Ok(Vec::new());
        };
        let away = blob.chunks.range(chunks).filter(|(_, chunk)| chunk.extents.is_away());
        let mut away: Vec<(u32, u32)> = away.map(|(n, chunk)| (chunk.page, *n)).collect();
        if away.is_empty() {
            return Ok(Vec::new());
        }
        away.sort_unstable();
        let mut bytes = Vec::new();
        let mut rest = &away[..];
        while let Some((first, _)) = rest.first() {
            let neighbour = |(i, (page, _)): &(usize, &(u32, u32))| *page == first + *i as u32;
            let most = READ_RUN_PAGES as usize;
            let run = rest.iter().enumerate().take(most).take_while(neighbour).count();
            bytes.resize(run * PAGE_SIZE, 0);
            self.disk.read(self.sb.page_offset(*first), &mut bytes).map_err(Error::Data)?;
            for ((page, n), bytes) in rest[..run].iter().zip(bytes.chunks_exact(PAGE_SIZE)) {
                self.take_back(id, *n, *page, bytes)?;
            }
            rest = &rest[run..];
        }
        Ok(away.into_iter().map(|(_, n)| n).collect())
    }

    /// Takes the entries of an extents page that was read from its place.
    fn take_back(&mut self, id: u64, n: u32, number: u32, bytes: &[u8]) -> Result<(), Error> {
        // What is in the journal is newer.
        let page = self.verified(number, bytes, &self.dirty)?;
        let is = PageId { kind: Kind::Extents, owner: id, index: n };
        let chunk = self.blobs.get_mut(&id).and_then(|blob| blob.chunks.get_mut(&n));
        let chunk = chunk.expect("the caller found it");
        let whole = match chunk.extents {
            Extents::Away(crc) => crc32c(&[page.payload()]) == crc,
            _ => true,
        };
        if page.id() != is || page.used() != chunk.used || !whole {
            return Err(self.damaged(number, "it says otherwise than when it was written"));
        }
        let mut all = Box::new([0; POINTERS]);
        all.iter_mut().zip(page.pointers()).for_each(|(to, from)| *to = from.get());
        chunk.extents = Extents::All(all);
        self.brought.insert((id, n));
        Ok(())
    }

    /// As [`Store::bring`], also of all that shows through.
    pub(crate) fn bring_shown(&mut self, id: u64, chunks: Range<u32>) -> Result<(), Error> {
        let mut at = id;
        while let Some(parent) = self.blobs.get(&at).map(|blob| blob.parent) {
            self.bring(at, chunks.clone())?;
            at = parent;
        }
        Ok(())
    }

    /// Calls `f` for all entries of a blob but 0 from `first` on, in order, without having more of them in
    /// memory afterwards.
    pub(crate) fn visit(
        &mut self,
        id: u64,
        first: u64,
        mut f: impl FnMut(u64, u32),
    ) -> Result<(), Error> {
        let mut chunk = place(first).0;
        while let Some(blob) = self.blobs.get(&id)
            && let Some((next, _)) = blob.chunks.range(chunk..).next()
        {
            let chunks = *next..next.saturating_add(WINDOW);
            let brought = self.bring(id, chunks.clone())?;
            let blob = &self.blobs[&id];
            let from = first.max(u64::from(chunks.start) * POINTERS as u64);
            let to = u64::from(chunks.end) * POINTERS as u64;
            blob.entries(from..to).for_each(|(cluster, to)| f(cluster, to));
            brought.into_iter().for_each(|n| self.leave(id, n));
            chunk = chunks.end;
        }
        Ok(())
    }

    /// Lets go of an extents page that was brought, and not changed since.
    pub(crate) fn leave(&mut self, id: u64, n: u32) {
        let chunk = self.blob_mut(id).chunks.get_mut(&n);
        chunk.into_iter().for_each(|chunk| chunk.extents.shrink(0, true));
        self.brought.remove(&(id, n));
    }

    /// Lets go of what was read of extents pages, or changed in them, where that is more than `pages` of
    /// them; of what is at most `runs` runs in a page these stay. Operations read it again, which takes
    /// time and can fail. Without calls of this it stays in memory. One call lets go of so many that it
    /// takes a millisecond or two; whether there are more.
    pub fn let_go(&mut self, pages: usize, runs: usize) -> bool {
        // What is on the medium is not known after a failure.
        let away = self.stopped().is_none();
        let over = self.brought.len().saturating_sub(pages);
        for _ in 0..over.min(STEP) {
            let next = self.brought.range(self.next_to_go..).next();
            let Some((id, n)) = next.or_else(|| self.brought.first()).copied() else { break };
            self.next_to_go = (id, n + 1);
            self.brought.remove(&(id, n));
            let chunk = self.blobs.get_mut(&id).and_then(|blob| blob.chunks.get_mut(&n));
            chunk.into_iter().for_each(|chunk| chunk.extents.shrink(runs, away));
        }
        over > STEP
    }

    /// Extents pages that [`Store::let_go`] could let go of.
    pub fn in_memory(&self) -> usize {
        self.brought.len()
    }

    /// As [`Store::let_go`] of everything that is in memory, few runs, too.
    pub fn let_go_all(&mut self) {
        let chunks = |(id, blob): (&u64, &crate::blob::Blob)| {
            let id = *id;
            blob.chunks.keys().map(move |n| (id, *n)).collect::<Vec<_>>()
        };
        self.brought = self.blobs.iter().flat_map(chunks).collect();
        while self.let_go(0, 0) {}
    }

    /// Calls `f` for what a blob has itself from cluster `first` on, in order: its clusters with the
    /// device's, or [`HOLE`](crate::HOLE) for one that reads as zeros whatever its parent has. Unlike
    /// [`Store::clusters`] it never has all of it in memory.
    ///
    /// # Errors
    /// [`Error::NoBlob`], [`Error::Data`], [`Error::Damaged`].
    pub fn each_cluster(
        &mut self,
        id: BlobId,
        first: u64,
        f: impl FnMut(u64, u32),
    ) -> Result<(), Error> {
        self.get(id)?;
        self.visit(id.0, first, f)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn runs_go_on_only_where_the_entries_do() {
        let of = |entries: &[u32]| pieces(entries.iter().copied(), 99).unwrap().len();
        assert_eq!(of(&[5, 6, 7, 0, 0, HOLE, HOLE, 9]), 4);
        assert_eq!(of(&[0, 1, 2]), 2, "0 is not before 1");
        assert_eq!(of(&[HOLE - 1, HOLE]), 2, "a hole is not behind a cluster");
        assert!(pieces([1, 3, 5].into_iter(), 2).is_none());
    }

    proptest! {
        /// Whatever the entries, they are the same as runs, and after a change.
        #[test]
        fn runs_are_the_same_entries(
            starts in prop::collection::vec((0..POINTERS, 0..6u32, 1..400usize), 0..12),
            change in (0..POINTERS, 0..9u32),
        ) {
            let mut entries = [0; POINTERS];
            for (at, value, count) in starts {
                for (i, entry) in entries.iter_mut().skip(at).take(count).enumerate() {
                    *entry = match value {
                        0 => 0,
                        1 => HOLE,
                        value => value * 1000 + i as u32,
                    };
                }
            }
            let words = entries.map(U32::new);
            let mut extents = Extents::of(&words, POINTERS);
            prop_assert!(extents.iter().eq(entries));
            prop_assert_eq!(extents.replace(change.0, change.1), entries[change.0]);
            entries[change.0] = change.1;
            prop_assert!(extents.iter().eq(entries));
            extents.shrink(RUNS_MAX, true);
            if !extents.is_away() {
                prop_assert!(extents.iter().eq(entries));
            }
        }
    }
}
