//! Clusters on demand: allocation and unmapping within a thin blob.

use crate::blob::{BlobId, place};
use crate::disk::Disk;
use crate::error::Error;
use crate::store::{Freed, Run, Store, Txn};
use std::collections::{BTreeMap, BTreeSet};

/// What [`Store::allocate`] answers for one cluster: the device's cluster that holds it now.
pub type Allocated = Result<u32, Error>;

impl<D: Disk> Store<D> {
    /// Allocates clusters on demand, as few transactions as possible for all of `wants`, each the
    /// (blob, cluster of the blob). One that is allocated already is answered with what it has. A
    /// new one reads as zeros, durably, before its blob owns it.
    ///
    /// The answers are in the order of `wants`: [`Error::NoSpace`], [`Error::OutOfRange`],
    /// [`Error::ReadOnly`], [`Error::NoBlob`], or the device's failure.
    pub fn allocate(&mut self, wants: &[(BlobId, u64)]) -> Vec<Allocated> {
        let batch = self.batch_max();
        wants.chunks(batch).flat_map(|wants| self.allocate_batch(wants)).collect()
    }

    fn allocate_batch(&mut self, wants: &[(BlobId, u64)]) -> Vec<Allocated> {
        let mut new: BTreeMap<(u64, u64), u32> = BTreeMap::new();
        let mut pages = 0;
        let mut answers: Vec<Allocated> = Vec::with_capacity(wants.len());
        for (id, cluster) in wants {
            let answer = self.want(*id, *cluster, &mut new, &mut pages);
            answers.push(answer);
        }
        if new.is_empty() {
            return answers;
        }
        let done = self.allocate_new(&new);
        if let Err(e) = done {
            for ((id, cluster), answer) in wants.iter().zip(&mut answers) {
                if new.contains_key(&(id.0, *cluster)) {
                    *answer = Err(e.clone());
                }
            }
        }
        answers
    }

    /// Takes a cluster for one want, if it needs one and there is one.
    fn want(
        &mut self,
        id: BlobId,
        cluster: u64,
        new: &mut BTreeMap<(u64, u64), u32>,
        pages: &mut u64,
    ) -> Allocated {
        self.alive()?;
        let blob = self.get(id)?;
        if cluster >= blob.size {
            let size = blob.size * u64::from(self.sb.cluster_size);
            let end = (cluster + 1) * u64::from(self.sb.cluster_size);
            return Err(Error::OutOfRange { name: blob.name.clone(), size, end });
        }
        if let Some(taken) = new.get(&(id.0, cluster)) {
            return Ok(*taken);
        }
        match blob.cluster(cluster) {
            0 => {}
            there => return Ok(there),
        }
        if blob.read_only() {
            return Err(Error::ReadOnly { name: blob.name.clone() });
        }
        if !blob.chunks.contains_key(&place(cluster).0) {
            self.need_pages(*pages + 2)?;
            *pages += 2;
        }
        let bit = self.clusters.take_one().ok_or(Error::NoSpace { needed: 1, free: 0 })?;
        let taken = (self.sb.first_data_cluster + bit) as u32;
        new.insert((id.0, cluster), taken);
        Ok(taken)
    }

    /// Zeroes the taken clusters and makes them the blobs' own, or gives them back.
    fn allocate_new(&mut self, new: &BTreeMap<(u64, u64), u32>) -> Result<(), Error> {
        let mut taken = Freed::default();
        let mut sorted: Vec<u32> = new.values().copied().collect();
        sorted.sort_unstable();
        sorted.iter().for_each(|cluster| taken.push(*cluster));
        let runs: Vec<Run> = taken.runs.clone();
        for run in runs {
            if let Err(e) = self.zero(run) {
                self.release(taken);
                return Err(e);
            }
        }
        let mut txn = Txn::default();
        for ((blob, cluster), to) in new {
            self.map(&mut txn, *blob, *cluster, *to);
        }
        self.commit(txn)
    }

    /// Takes clusters `first` .. `first + count` from a thin blob; they read as zeros then. The
    /// device's clusters are free after [`Store::release`]. Each extents page's worth is atomic
    /// by itself, so a power cut can leave a part done.
    ///
    /// # Errors
    /// [`Error::NoBlob`], [`Error::ReadOnly`], [`Error::OutOfRange`], [`Error::Stopped`],
    /// [`Error::Metadata`].
    pub fn unmap(&mut self, id: BlobId, first: u64, count: u64) -> Result<Freed, Error> {
        self.alive()?;
        let blob = self.get(id)?;
        if blob.read_only() || !blob.thin() {
            return Err(Error::ReadOnly { name: blob.name.clone() });
        }
        let end = first.saturating_add(count);
        if end > blob.size {
            let cluster = u64::from(self.sb.cluster_size);
            let (size, end) = (blob.size * cluster, end.saturating_mul(cluster));
            return Err(Error::OutOfRange { name: blob.name.clone(), size, end });
        }
        let all: Vec<u64> = blob
            .allocated_from(first)
            .map(|(cluster, _)| cluster)
            .take_while(|cluster| *cluster < end)
            .collect();
        let mut freed = Freed::default();
        let mut at = 0;
        while at < all.len() {
            let mut txn = Txn::default();
            let mut chunks = BTreeSet::new();
            while let Some(cluster) = all.get(at) {
                chunks.insert(place(*cluster).0);
                if chunks.len() > self.batch_max() {
                    break;
                }
                freed.push(self.unmap_one(&mut txn, id.0, *cluster).expect("it is allocated"));
                at += 1;
            }
            self.commit(txn)?;
        }
        Ok(freed)
    }

    /// Frees `other` together with `freed`.
    pub fn join(mut freed: Freed, other: Freed) -> Freed {
        freed.append(other);
        freed
    }
}
