//! Copies by metadata alone, on the metadata thread: a volume has clusters of another, or others of its own, as
//! its own, too ([`Store::share`](blobstore::Store::share)).
//!
//! The source is treated as when a snapshot of it is taken: first it may not write to those clusters any more, which
//! stand below its map then; what was translated before is waited for; then the record is written. Who writes to one
//! of them from then on, of whichever volume, asks this thread, and gets one of his own, or the same one once the
//! others have lost it and nobody of theirs has anything in flight to it.

use crate::error::Error;
use crate::map::{Entry, View};
use crate::meta::Meta;
use crate::volume::Volume;
use bdev::Shared;
use blobstore::{BlobId, Error as StoreError, HOLE};
use std::iter::successors;
use std::ops::Range;
use std::sync::Arc;

/// Clusters of a volume, from this one on.
pub(crate) type Clusters = (Arc<Volume>, u64);

/// What a volume may write to of some clusters, as what it may not.
fn not_own(view: &View, clusters: Range<u64>) -> Vec<Entry> {
    let own = clusters.map(|cluster| (cluster, view.own(cluster))).filter(|(_, own)| *own != 0);
    own.map(|(cluster, to)| Entry::shared(cluster, to)).collect()
}

impl Meta {
    /// Has `count` clusters of the second volume read as those of the first do. `still` is asked when these cannot
    /// change any more.
    ///
    /// # Errors
    /// It is not known whether it was done. Nobody writes to what may have several owners until the lvstore was loaded
    /// again.
    pub fn share(
        &mut self,
        (from, first): &Clusters,
        (to, at): &Clusters,
        count: u64,
        still: Box<dyn FnOnce() -> bool + Send>,
    ) -> Result<Shared, Error> {
        let op = format!("share clusters of lvol {} with lvol {}", from.alias(), to.alias());
        if from.is_removed() || to.is_removed() || !self.shares_clusters() {
            return Ok(Shared::Not);
        }
        let views = self.view_of(&op, from).and_then(|view| Ok((view, self.view_of(&op, to)?)));
        let (Ok((view, its)), Ok(_)) = (views, self.store(&op)) else { return Ok(Shared::Not) };
        let end = |first: u64| first.saturating_add(count);
        if end(*first) > view.clusters() || end(*at) > its.clusters() {
            return Ok(Shared::Not);
        }
        // What a snapshot has nobody writes to, and what was written before is waited for when it is taken, or here
        // where that seemed to fail.
        let mut versions = self.written_before(from);
        let own = match from.kin(|kin| kin.snapshot) {
            true => Vec::new(),
            false => not_own(&view, *first..end(*first)),
        };
        self.frozen.extend([from.clone(), to.clone()]);
        if !own.is_empty() {
            versions.push((from.clone(), from.replace_view(view.changed(&own))));
        }
        let versions: Vec<_> =
            versions.iter().map(|(volume, version)| (volume, *version)).collect();
        let shared = match self.wait_quiet(&versions) {
            false => Ok(Shared::Not),
            true if !still() => Ok(Shared::Cancelled),
            true => self.record_share(&op, (from, *first), (to, *at), count),
        };
        if !own.is_empty() && matches!(shared, Ok(Shared::Not | Shared::Cancelled)) {
            // Its own clusters are its own again: nobody wrote to others meanwhile.
            from.replace_view(view);
        }
        self.frozen.clear();
        shared
    }

    /// Whose I/O in flight may be a write to what snapshots have that a volume shows, and the version of each before
    /// which it was translated.
    fn written_before(&mut self, from: &Arc<Volume>) -> Vec<(Arc<Volume>, u64)> {
        self.found.retain(|(_, of, version)| !of.quiet(*version));
        let up = |volume: &Arc<Volume>| volume.kin(|kin| kin.parent.clone());
        let shows = |snapshot: &Arc<Volume>| {
            successors(Some(from.clone()), up).any(|volume| Arc::ptr_eq(&volume, snapshot))
        };
        let found = self.found.iter().filter(|(snapshot, ..)| shows(snapshot));
        found.map(|(_, of, version)| (of.clone(), *version)).collect()
    }

    fn record_share(
        &mut self,
        op: &str,
        (from, first): (&Arc<Volume>, u64),
        (to, at): (&Arc<Volume>, u64),
        count: u64,
    ) -> Result<Shared, Error> {
        let store = self.store(op)?;
        let cluster_size = store.info().cluster_size;
        let shared = match store.share(from.blob(), first, to.blob(), at, count) {
            Ok(shared) => shared,
            Err(e @ StoreError::Metadata(_)) => {
                // What was to be lost may be: a write to it must not be acknowledged.
                let view = to.view();
                to.replace_view(view.changed(&not_own(&view, at..at + count)));
                return Err(crate::translate::refused(e, op, cluster_size));
            }
            Err(e) => {
                tracing::debug!("{op}: {e}");
                return Ok(Shared::Not);
            }
        };
        let entries = shared.clusters.into_iter();
        let entries: Vec<_> = entries.map(|(cluster, now)| Entry::shared(cluster, now)).collect();
        let version = to.replace_view(to.view().changed(&entries));
        self.retire(vec![(to.clone(), version)], shared.freed);
        Ok(Shared::Done(count << to.id.shift))
    }

    /// Clusters that a volume wanted to write to, and that have no other owner any more, are what it may write to.
    pub fn own_alone(&mut self, blob: BlobId, clusters: Range<u64>) {
        let Some(volume) = self.volumes.get(&blob) else { return };
        let view: View = volume.view();
        let Some(store) = self.store.as_mut().filter(|_| view.shares) else { return };
        if store.stopped().is_some() {
            return;
        }
        for cluster in clusters.start..clusters.end.min(view.clusters()) {
            if view.own(cluster) != 0 {
                continue;
            }
            // What cannot be read was not to be written to either.
            match store.entry(blob, cluster) {
                Ok(0 | HOLE) | Err(_) => {}
                Ok(to) if store.is_shared(to) => {}
                Ok(to) => view.own.set(cluster, to),
            }
        }
    }
}
