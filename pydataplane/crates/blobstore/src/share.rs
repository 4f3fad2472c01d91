//! Clusters with several owners, in a store that was made for them: what a blob has can stand for clusters
//! of another, too, or for others of its own, without a copy. Whoever writes to such a cluster gets one of his
//! own first, as a clone does.
//!
//! How many owners a cluster has is not on the medium: it follows from the extents pages, and is counted when the
//! store is loaded. In memory it also counts who has lost it but may have I/O in flight to it, until
//! [`Store::release`]. A loss of one owner is as durable before another is the only one as that of
//! a whole cluster is before somebody else gets it.
//!
//! For each owner but one a free cluster is kept, which only a first write to a cluster with several owners takes. So a
//! share needs the room of a copy, and no write to what was shared lacks any.

use crate::bitmap::Run;
use crate::blob::{BlobId, Part, place};
use crate::disk::Disk;
use crate::error::Error;
use crate::format::HOLE;
use crate::shows::Shows;
use crate::store::{Freed, Store, Txn};
use std::collections::BTreeSet;

/// Most clusters of one [`Store::share`]: it changes five extents pages at most.
pub const SHARE_MAX: u64 = 4096;

/// What [`Store::share`] did.
#[derive(Debug)]
#[must_use]
pub struct Shared {
    /// Clusters of the blob that changed, with what stands there now: the device's, 0 or
    /// [`HOLE`](crate::HOLE).
    pub clusters: Vec<(u64, u32)>,
    /// What it had there; free after [`Store::release`], or another's alone.
    pub freed: Freed,
}

impl<D: Disk> Store<D> {
    /// Has the store share clusters from now on. Programs that do not know that refuse it then.
    ///
    /// # Errors
    /// [`Error::OldFormat`], [`Error::Stopped`], [`Error::Metadata`].
    pub fn share_clusters(&mut self) -> Result<(), Error> {
        self.alive()?;
        self.check_version()?;
        if self.sb.shares {
            return Ok(());
        }
        self.sb.shares = true;
        self.write_superblock()
    }

    /// Whether [`Store::share`] is possible.
    pub fn shares_clusters(&self) -> bool {
        self.sb.shares
    }

    /// Whether a cluster of the device has several owners, so that none may write to it.
    #[inline]
    pub fn is_shared(&self, cluster: u32) -> bool {
        self.owners.are_several(cluster)
    }

    /// Whether room is kept for a write to a blob's cluster, because it has other owners, too: what is free, or what
    /// was lost and not released yet.
    pub fn is_room_kept(&self, id: BlobId, cluster: u64) -> bool {
        self.get(id).is_ok_and(|blob| {
            !blob.read_only() && cluster < blob.size && self.is_shared(blob.cluster(cluster))
        })
    }

    /// Whether a blob, or one that it is a clone of, has that cluster of the device at `cluster`. What cannot be read
    /// has not.
    pub fn has_in_chain(&mut self, id: BlobId, cluster: u64, to: u32) -> bool {
        let mut at = Some(id.0);
        while let Some(id) = at.filter(|id| self.blobs.contains_key(id)) {
            if self.entry(BlobId(id), cluster) == Ok(to) {
                return true;
            }
            at = self.blobs.get(&id).map(|blob| blob.parent);
        }
        false
    }

    /// Free clusters that are not kept for those with several owners.
    pub(crate) fn available(&self) -> u64 {
        self.free_after(0)
    }

    /// The same, when so many that were lost are released.
    pub fn free_after(&self, released: u64) -> u64 {
        (self.clusters.free() + released).saturating_sub(self.owners.kept())
    }

    /// Has `count` clusters of `to`, from `at` on, read as those of `from` from `first` on do, without a copy;
    /// durably, with what was written to these before. Of one blob's own the ranges must not overlap. Whoever wrote to
    /// them before must have ended, and must not write to what has several owners then.
    ///
    /// # Errors
    /// [`Error::CannotShare`], [`Error::NoSpace`], [`Error::NoMetadataSpace`], [`Error::ReadOnly`],
    /// [`Error::OutOfRange`], [`Error::OtherDif`] and others: nothing was done. [`Error::Metadata`]: it is not known
    /// whether it was; the clusters have several owners until the store is loaded again.
    pub fn share(
        &mut self,
        from: BlobId,
        first: u64,
        to: BlobId,
        at: u64,
        count: u64,
    ) -> Result<Shared, Error> {
        self.alive()?;
        self.check_share((from, first), (to, at), count)?;
        let nothing = Shared { clusters: Vec::new(), freed: Freed::default() };
        let Some(last) = count.checked_sub(1) else { return Ok(nothing) };
        self.bring_shown(from.0, place(first).0..place(first + last).0 + 1)?;
        self.bring_shown(to.0, place(at).0..place(at + last).0 + 1)?;
        let mut changes = Vec::new();
        for (cluster, of) in (at..).zip(first..first + count) {
            let had = self.blobs[&to.0].cluster(cluster);
            match self.source(from.0, of) {
                Shows::Cluster(now) if now == had => {}
                Shows::Cluster(now) => changes.push((cluster, now)),
                Shows::Zeros => changes.push((cluster, 0)),
                Shows::External(_) => return Err(self.cannot_share(from, "it is a bdev's clone")),
            }
        }
        let gained = changes.iter().filter(|(_, now)| *now != 0).count() as u64;
        if gained > self.available() {
            return Err(Error::NoSpace { needed: gained, free: self.available() });
        }
        let chunks: BTreeSet<u32> = changes.iter().map(|(cluster, _)| place(*cluster).0).collect();
        // Of a chunk that `to` has, what is lost may be the last, and its page go, before something is gained.
        self.need_pages(2 * chunks.len() as u64)?;
        self.do_share(to.0, &changes)
    }

    fn check_share(
        &self,
        (from, first): (BlobId, u64),
        (to, at): (BlobId, u64),
        count: u64,
    ) -> Result<(), Error> {
        let (source, blob) = (self.get(from)?, self.get(to)?);
        if !self.sb.shares {
            return Err(self.cannot_share(to, "its store was not made for that"));
        }
        if blob.read_only() || !blob.thin() {
            return Err(Error::ReadOnly { name: blob.name.clone() });
        }
        if source.dif().is_some() || blob.dif().is_some() {
            let (name, parent) = (blob.name.clone(), source.name.clone());
            return Err(Error::OtherDif { name, parent });
        }
        for (of, begin) in [(source, first), (blob, at)] {
            let end = begin.saturating_add(count);
            if end > of.size {
                let cluster = u64::from(self.sb.cluster_size);
                let (size, end) = (of.size * cluster, end.saturating_mul(cluster));
                return Err(Error::OutOfRange { name: of.name.clone(), size, end });
            }
        }
        if from == to && first < at + count && at < first + count {
            return Err(self.cannot_share(to, "it would be copied to where it is read"));
        }
        let pages = count.div_ceil(crate::format::POINTERS as u64) + 1;
        if count > SHARE_MAX || pages > self.batch_max() as u64 {
            return Err(self.cannot_share(to, "these are more clusters than one record takes"));
        }
        Ok(())
    }

    fn cannot_share(&self, id: BlobId, why: &'static str) -> Error {
        let name = self.blobs.get(&id.0).map(|blob| blob.name.clone()).unwrap_or_default();
        Error::CannotShare { name, why }
    }

    /// Maps clusters of a blob to those that others have, 0 to nothing.
    fn do_share(&mut self, id: u64, changes: &[(u64, u32)]) -> Result<Shared, Error> {
        let mut done = Shared { clusters: Vec::new(), freed: Freed::default() };
        let mut txn = Txn::default();
        let mut before = Vec::new();
        for (cluster, now) in changes.iter().copied() {
            before.push((cluster, self.blobs[&id].entry(cluster)));
            let had = match now {
                0 => self.unmap_one(&mut txn, id, cluster),
                now => {
                    // Fewer owners than entries, of which there are fewer than 2^32 in clusters that are kept.
                    assert!(self.owners.add(now), "cluster {now} has too many owners");
                    self.remap(&mut txn, id, cluster, now)
                }
            };
            had.into_iter().for_each(|cluster| done.freed.push(cluster));
            done.clusters.push((cluster, self.blobs[&id].entry(cluster)));
        }
        if txn.is_empty() {
            return self.sync().map(|()| done);
        }
        // What is in the caches belongs to both.
        self.unflushed = true;
        if let Err(e) = self.commit(txn) {
            // Until the store is loaded again it is read as it was. What it may have stays shared.
            self.put_entries_back(id, &before);
            return Err(e);
        }
        Ok(done)
    }

    /// Points a cluster of a blob to another of the device; returns which it had.
    pub(crate) fn remap(&mut self, txn: &mut Txn, id: u64, cluster: u64, to: u32) -> Option<u32> {
        let was = self.blobs[&id].cluster(cluster);
        if was == 0 {
            self.map(txn, id, cluster, to);
            return None;
        }
        let (n, entry) = place(cluster);
        let chunk = self.blob_mut(id).chunks.get_mut(&n).expect("it has the cluster");
        chunk.extents.replace(entry, to);
        txn.touch(id, Part::Extents(n));
        Some(was)
    }

    /// Has a blob of a store that has stopped read as before a change that failed.
    fn put_entries_back(&mut self, id: u64, before: &[(u64, u32)]) {
        let blob = self.blob_mut(id);
        for (cluster, was) in before {
            let (n, entry) = place(*cluster);
            let chunk = blob.chunks.entry(n).or_insert_with(|| crate::blob::Chunk {
                page: 0,
                used: 0,
                extents: crate::extents::Extents::new(),
            });
            let is = |entry: u32| u64::from(!matches!(entry, 0 | HOLE));
            let now = chunk.extents.replace(entry, *was);
            blob.allocated = blob.allocated + is(*was) - is(now);
        }
    }

    /// As [`Store::discard`], but for clusters that somebody else has as well.
    pub(crate) fn alone(&self, run: Run) -> Vec<Run> {
        if self.owners.are_single() {
            return vec![run];
        }
        let mut runs: Vec<Run> = Vec::new();
        let all = run.first..run.first + run.count;
        for cluster in all.filter(|cluster| !self.is_shared(*cluster as u32)) {
            match runs.last_mut() {
                Some(last) if last.first + last.count == cluster => last.count += 1,
                _ => runs.push(Run { first: cluster, count: 1 }),
            }
        }
        runs
    }
}
