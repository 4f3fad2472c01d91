//! Which extents pages are in memory: brought when they are wanted, and let go of.
//!
//! A full store of 10 TiB has 160 million entries. Those of a page that are few runs, as where a blob was
//! allocated at one go, stay as these. Others are let go of between two operations, and read from
//! the page again by the next one that looks at them: it says so first ([`Store::bring`]), and ends there if
//! that fails.

use crate::blob::{Blob, BlobId, place};
use crate::disk::Disk;
use crate::error::Error;
use crate::extents::Extents;
use crate::format::{Kind, PAGE_SIZE, POINTERS, PageId, crc32c};
use crate::store::{READ_RUN_PAGES, Store};
use std::ops::Range;

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
        let chunks = |(id, blob): (&u64, &Blob)| {
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
