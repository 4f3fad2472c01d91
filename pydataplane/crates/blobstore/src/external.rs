//! Parents outside of the store: what shows is read through [`Disk::read_external`], and copied into
//! clusters of the store when it is written to for the first time. Only the parent's UUID is kept.

use crate::blob::{BlobId, Part};
use crate::disk::Disk;
use crate::error::Error;
use crate::fill::{Fill, covers};
use crate::history::HistoryOptions;
use crate::ops::BlobOptions;
use crate::shows::Shows;
use crate::store::{Store, Txn};
use crate::thin::{Overs, is_unmapped, over};
use std::collections::BTreeMap;
use uuid::Uuid;

/// Clusters of one parent to be filled: (blob, its cluster), and the device's.
type Copies = Vec<((u64, u64), u32)>;

impl<D: Disk> Store<D> {
    /// Creates a clone of what is outside of the store and has `size` clusters: a thin blob that reads
    /// as it does.
    ///
    /// # Errors
    /// [`Error::OldFormat`], [`Error::NameTaken`], [`Error::UuidTaken`], [`Error::NoMetadataSpace`]
    /// and others; then there is no clone.
    pub fn clone_external(
        &mut self,
        parent: Uuid,
        size: u64,
        options: &HistoryOptions,
    ) -> Result<BlobId, Error> {
        self.check_version()?;
        let HistoryOptions { name, uuid, xattrs } = options.clone();
        let options = BlobOptions { name, uuid, size, thin: true, dif: None, xattrs };
        self.check_create(&options)?;
        let mut txn = Txn::default();
        let id = self.insert_new(&mut txn, &options, 0);
        let blob = self.blob_mut(id);
        (blob.external, blob.parent_clusters) = (Some(parent), size);
        self.commit(txn)?;
        Ok(BlobId(id))
    }

    /// Gives a blob a parent outside of the store, of its size. Where it has nothing of its own it reads
    /// as that does from then on.
    ///
    /// # Errors
    /// [`Error::OldFormat`], [`Error::OtherSize`], [`Error::OtherDif`], [`Error::ReadOnly`].
    pub fn set_external_parent(
        &mut self,
        id: BlobId,
        parent: Uuid,
        size: u64,
    ) -> Result<(), Error> {
        self.alive()?;
        self.check_version()?;
        let blob = self.get(id)?;
        if blob.read_only() || !blob.thin() {
            return Err(Error::ReadOnly { name: blob.name.clone() });
        }
        if blob.size != size {
            let (name, parent) = (blob.name.clone(), parent.to_string());
            return Err(Error::OtherSize { name, parent });
        }
        if blob.dif().is_some() {
            let (name, parent) = (blob.name.clone(), parent.to_string());
            return Err(Error::OtherDif { name, parent });
        }
        let old = blob.parent;
        let mut txn = Txn::default();
        let blob = self.blob_mut(id.0);
        (blob.parent, blob.external, blob.parent_clusters) = (0, Some(parent), size);
        self.moved(id.0, old, 0);
        txn.touch(id.0, Part::Root);
        self.commit(txn)
    }

    /// Fills those of the taken clusters that an external parent shows. One that cannot be filled is
    /// given back and told: others do not fail with it.
    pub(crate) fn fill_from_external(
        &mut self,
        new: &mut BTreeMap<(u64, u64), u32>,
        unmaps: &[(u64, u64, u64)],
        overs: &Overs,
    ) -> Vec<(BlobId, u64, Error)> {
        let mut by_parent: BTreeMap<Uuid, Copies> = BTreeMap::new();
        let size = u64::from(self.sb.cluster_size);
        for ((id, cluster), to) in new.iter() {
            if let Shows::External(parent) = self.source(*id, *cluster)
                && !is_unmapped(unmaps, *id, *cluster)
                && !covers(over(overs, *id, *cluster), 0, size)
            {
                by_parent.entry(parent).or_default().push(((*id, *cluster), *to));
            }
        }
        let mut failed = Vec::new();
        let fill = |((id, cluster), to): &((u64, u64), u32)| Fill {
            from: Some(cluster * size),
            to: u64::from(*to) * size,
            over: over(overs, *id, *cluster),
        };
        for (parent, copies) in by_parent {
            self.unflushed = true;
            let fills: Vec<_> = copies.iter().map(fill).collect();
            if self.disk.fill_external(parent, &fills, size).is_ok() {
                continue;
            }
            // Which of them it was is found one by one.
            for copy in copies {
                let Err(e) = self.disk.fill_external(parent, &[fill(&copy)], size) else {
                    continue;
                };
                let ((id, cluster), to) = copy;
                new.remove(&(id, cluster));
                self.give_back(&BTreeMap::from([((id, cluster), to)]));
                failed.push((BlobId(id), cluster, Error::Data(e)));
            }
        }
        failed
    }
}
