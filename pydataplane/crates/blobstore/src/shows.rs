//! What a blob is read from where it has nothing of its own: a snapshot's cluster, whatever the depth
//! of the chain, or what is outside of the store.

use crate::blob::place;
use crate::disk::Disk;
use crate::format::HOLE;
use crate::store::Store;
use std::collections::BTreeSet;
use uuid::Uuid;

/// What a cluster of a blob shows.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Shows {
    /// It reads as zeros.
    Zeros,
    /// A cluster of the device, the blob's own or that of a snapshot.
    Cluster(u32),
    /// The same place of a parent outside of the store.
    External(Uuid),
}

impl<D: Disk> Store<D> {
    /// What `cluster` of a blob shows.
    pub(crate) fn source(&self, blob: u64, cluster: u64) -> Shows {
        let mut blob = &self.blobs[&blob];
        loop {
            match (blob.entry(cluster), blob.external) {
                (0, Some(parent)) if blob.shows_parent(cluster) => return Shows::External(parent),
                (0, _) if blob.shows_parent(cluster) => blob = &self.blobs[&blob.parent],
                (0 | HOLE, _) => return Shows::Zeros,
                (to, _) => return Shows::Cluster(to),
            }
        }
    }

    /// As [`Store::source`] where the blob had nothing of its own there.
    pub(crate) fn shown(&self, blob: u64, cluster: u64) -> Shows {
        let blob = &self.blobs[&blob];
        match blob.external {
            _ if !blob.shows_parent(cluster) => Shows::Zeros,
            Some(parent) => Shows::External(parent),
            None => self.source(blob.parent, cluster),
        }
    }

    /// Extents pages `first` .. of which some cluster before `end` is shown by a parent, or the blob's.
    pub(crate) fn chunks_shown(&self, blob: u64, first: u32, end: u64) -> BTreeSet<u32> {
        let mut all = BTreeSet::new();
        let (mut blob, mut end) = (&self.blobs[&blob], end);
        loop {
            if end > 0 && place(end - 1).0 >= first {
                all.extend(blob.chunks.range(first..=place(end - 1).0).map(|(n, _)| *n));
            }
            end = end.min(blob.parent_clusters);
            if blob.external.is_some() && end > 0 {
                all.extend(first..=place(end - 1).0);
            }
            match self.blobs.get(&blob.parent) {
                Some(parent) => blob = parent,
                None => return all,
            }
        }
    }
}
