//! Clusters on demand: allocation and unmapping within thin blobs, many changes in one record.

use crate::bitmap::Run;
use crate::blob::{BlobId, place};
use crate::brought::the;
use crate::disk::Disk;
use crate::error::Error;
use crate::fill::{Fill, Over, covers};
use crate::format::POINTERS;
use crate::shows::Shows;
use crate::store::{Freed, Store, Txn};
use std::collections::{BTreeMap, BTreeSet, HashMap};

/// What [`Store::allocate`] answers for one cluster: the device's cluster that holds it now.
pub type Allocated = Result<u32, Error>;

/// What lies over clusters that are taken, by (blob, its cluster).
pub(crate) type Overs = BTreeMap<(u64, u64), Vec<Over>>;

/// Allocations and unmaps of any thin blobs that become durable together, in one record: after a
/// power cut all of them happened or none. Made by [`Store::batch`], filled by
/// [`Store::add_allocation`] and [`Store::add_unmap`], and done by [`Store::commit_batch`].
#[derive(Default)]
#[must_use]
pub struct Batch {
    /// Clusters with several owners, and how many of these get others.
    replaces: HashMap<u32, u32>,
    /// (blob, its cluster) to the device's cluster that was taken for it.
    new: BTreeMap<(u64, u64), u32>,
    overs: Overs,
    /// Those of `new` that are known to read as zeros, as long as no more flushes have failed than so many.
    zeros: BTreeSet<u32>,
    failures: u64,
    /// How many of `new` are to be filled with something.
    filled: u64,
    /// (blob, first, count).
    unmaps: Vec<(u64, u64, u64)>,
    /// Extents pages that change, by blob: those of allocations, and those of unmaps.
    gaining: BTreeSet<(u64, u32)>,
    losing: BTreeSet<(u64, u32)>,
    /// Metadata pages that allocations need at most.
    pages: u64,
    /// What it does is durable when it is done.
    durable: bool,
}

impl Batch {
    /// Whether there is nothing to do.
    pub fn is_empty(&self) -> bool {
        self.new.is_empty() && self.unmaps.is_empty()
    }

    /// Has it durable when it is done, and not only with the next [`Store::sync`].
    pub fn set_durable(&mut self) {
        self.durable = true;
    }

    /// Clusters that are to be zeroed or copied, or were when they were added.
    pub fn filled(&self) -> u64 {
        self.filled
    }

    /// Extents pages that change at most.
    pub fn extents_pages(&self) -> usize {
        self.gaining.union(&self.losing).count()
    }
}

/// What became of a [`Batch`].
#[derive(Debug)]
#[must_use]
pub struct BatchDone {
    /// (blob, its cluster, the device's cluster) of each allocation; an error where none was made.
    pub allocated: Result<Vec<(BlobId, u64, u32)>, Error>,
    /// (blob, its cluster) of allocations that were not made because what the blob's external parent
    /// shows there could not be copied.
    pub failed: Vec<(BlobId, u64, Error)>,
    /// What each blob lost by unmaps; an error where nothing was unmapped.
    pub unmapped: Result<Vec<Lost>, Error>,
    /// Clusters with several owners that each blob has no more, since it got others of `allocated` for them.
    pub replaced: Vec<(BlobId, Freed)>,
}

/// What a blob lost with a [`Batch`].
#[derive(Debug)]
#[must_use]
pub struct Lost {
    /// Which one.
    pub blob: BlobId,
    /// Its clusters that read as zeros now, with what stands there: 0, or [`HOLE`](crate::HOLE).
    pub clusters: Vec<(u64, u32)>,
    /// The device's clusters that held them; free after [`Store::release`].
    pub freed: Freed,
}

impl<D: Disk> Store<D> {
    /// An empty batch.
    pub fn batch(&self) -> Batch {
        Batch::default()
    }

    /// Extents pages that one batch may change.
    pub fn batch_limit(&self) -> usize {
        self.batch_max()
    }

    /// Adds the allocation of one cluster, if it needs one: it has none, or one with other owners, too. It reads as
    /// before, durably, before its blob durably owns it. `false`: the batch is full, and nothing was added.
    ///
    /// # Errors
    /// [`Error::NoSpace`], [`Error::NoMetadataSpace`], [`Error::OutOfRange`], [`Error::ReadOnly`],
    /// [`Error::NoBlob`], [`Error::Stopped`]; then nothing was added.
    pub fn add_allocation(
        &mut self,
        batch: &mut Batch,
        id: BlobId,
        cluster: u64,
    ) -> Result<bool, Error> {
        self.bring(id.0, the(cluster))?;
        let blob = self.get(id)?;
        let read_only = blob.read_only() && blob.cluster(cluster) == 0;
        match read_only && cluster < blob.size {
            true => Err(Error::ReadOnly { name: blob.name.clone() }),
            false => self.add_cluster(batch, id, cluster),
        }
    }

    /// As [`Store::add_allocation`], of a read-only blob, too. What that has stays.
    fn add_cluster(&mut self, batch: &mut Batch, id: BlobId, cluster: u64) -> Result<bool, Error> {
        self.alive()?;
        self.bring_shown(id.0, the(cluster))?;
        let blob = self.get(id)?;
        if cluster >= blob.size {
            let size = blob.size * u64::from(self.sb.cluster_size);
            let end = cluster.saturating_add(1).saturating_mul(u64::from(self.sb.cluster_size));
            return Err(Error::OutOfRange { name: blob.name.clone(), size, end });
        }
        let has = blob.cluster(cluster);
        let stays = has != 0 && (blob.read_only() || !self.is_shared(has));
        if batch.new.contains_key(&(id.0, cluster)) || stays {
            return Ok(true);
        }
        let chunk = (id.0, place(cluster).0);
        let known = batch.gaining.contains(&chunk);
        if has != 0 && batch.losing.contains(&chunk) {
            // It needs no page as long as there is the one that it has.
            return Ok(false);
        }
        if !known && !batch.losing.contains(&chunk) && batch.extents_pages() == self.batch_max() {
            return Ok(false);
        }
        // An unmap of the same batch may free the page first.
        let fresh = !blob.chunks.contains_key(&chunk.1) || batch.losing.contains(&chunk);
        let pages = if fresh && !known { 2 } else { 0 };
        self.need_pages(batch.pages + pages)?;
        let claims = batch.replaces.get(&has).copied().unwrap_or_default();
        if has != 0 && claims >= self.owners.more(has) {
            // One owner is left when the others have lost it, and needs no other one.
            return Ok(false);
        }
        // For what is shared one is kept.
        let room = has != 0 || self.available() > 0;
        let bit = if room { self.clusters.take_one() } else { None };
        let Some(bit) = bit else {
            // What the batch replaces gives room when it is released.
            let comes = !batch.replaces.is_empty();
            return if comes { Ok(false) } else { Err(Error::NoSpace { needed: 1, free: 0 }) };
        };
        let taken = (self.sb.first_data_cluster + bit) as u32;
        let failures = self.disk.failed_flushes();
        self.zeros.check(failures);
        if batch.failures != failures {
            batch.zeros.clear();
            batch.failures = failures;
        }
        if self.zeros.take(bit) && self.source(id.0, cluster) == Shows::Zeros {
            batch.zeros.insert(taken);
        } else {
            batch.filled += 1;
        }
        batch.pages += pages;
        batch.gaining.insert(chunk);
        batch.new.insert((id.0, cluster), taken);
        if has != 0 {
            batch.replaces.insert(has, claims + 1);
        }
        Ok(true)
    }

    /// Adds data to a cluster that the batch allocates: who shows it then shows that, too, and it is as durable
    /// as the allocation. `false`: it is not taken, and to be written when the batch is done. The cluster was
    /// there before, or it is zeroed, which costs a device less than a write of zeros with the data.
    ///
    /// # Panics
    /// It is not within the cluster.
    pub fn add_data(&self, batch: &mut Batch, id: BlobId, cluster: u64, over: Over) -> bool {
        let (len, size) = ((*over.data).as_ref().len() as u64, u64::from(self.sb.cluster_size));
        assert!(over.at + len <= size, "{len} bytes at byte {} of a cluster", over.at);
        let key = (id.0, cluster);
        if !batch.new.contains_key(&key) {
            return false;
        }
        if len < size && self.source(id.0, cluster) == Shows::Zeros {
            return false;
        }
        batch.overs.entry(key).or_default().push(over);
        true
    }

    /// Adds the unmapping of clusters `first` .. `first + count`. Returns how many of them, from the
    /// first on, are dealt with: fewer than `count` where the batch is full.
    ///
    /// # Errors
    /// [`Error::NoBlob`], [`Error::ReadOnly`], [`Error::OutOfRange`], [`Error::Stopped`]; then
    /// nothing was added.
    pub fn add_unmap(
        &mut self,
        batch: &mut Batch,
        id: BlobId,
        first: u64,
        count: u64,
    ) -> Result<u64, Error> {
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
        self.bring_shown(id.0, place(first).0..place(end).0 + 1)?;
        let blob = self.get(id)?;
        let max = self.batch_max();
        let mut dealt_with = count;
        let mut pages = batch.extents_pages();
        for chunk in self.chunks_shown(id.0, place(first).0, end).into_iter().map(|n| (id.0, n)) {
            let starts = u64::from(chunk.1) * POINTERS as u64;
            if batch.losing.contains(&chunk) {
                continue;
            }
            // Its page may go, and then what is allocated in it needs pages that were not counted.
            let gaining = batch.gaining.contains(&chunk);
            // Holes need a page where the parent shows, and the blob has none.
            let fresh = if blob.chunks.contains_key(&chunk.1) { 0 } else { 2 };
            let room = self.need_pages(batch.pages + fresh);
            if gaining || pages == max || room.is_err() {
                dealt_with = starts.saturating_sub(first).min(count);
                if dealt_with == 0 && batch.is_empty() {
                    room?;
                }
                break;
            }
            pages += 1;
            batch.pages += fresh;
            batch.losing.insert(chunk);
        }
        if dealt_with > 0 {
            batch.unmaps.push((id.0, first, dealt_with));
        }
        Ok(dealt_with)
    }

    /// Does what was added, unmaps before allocations, with one record. Allocations survive the process,
    /// but are durable with the next [`Store::sync`] or other change only, as what is written to them is;
    /// unmaps are durable at once, as somebody else gets their clusters, and so are allocations in the place of
    /// clusters with several owners, of which the last one writes to them.
    pub fn commit_batch(&mut self, batch: Batch) -> BatchDone {
        let Batch { mut new, overs, mut zeros, unmaps, durable, .. } = batch;
        let failures = self.disk.failed_flushes();
        if batch.failures != failures {
            zeros.clear();
        }
        let durable = durable || !unmaps.is_empty();
        if let Err(e) = self.bring_batch(&new, &unmaps) {
            self.give_back(&new);
            let (allocated, failed) = (Err(e.clone()), Vec::new());
            return BatchDone { allocated, failed, unmapped: Err(e), replaced: Vec::new() };
        }
        let failed = self.fill_from_external(&mut new, &unmaps, &overs);
        let mut zeroed = Ok(());
        if let Err(e) = self.fill_new(&new, &unmaps, &overs, &zeros) {
            self.give_back(&new);
            new.clear();
            zeroed = Err(e);
        }
        // What lies over them is written: whoever lent it may have it again.
        drop(overs);
        let mut txn = Txn::default();
        // What each blob had, where, and what stands there now.
        let mut lost: BTreeMap<u64, Vec<(u32, u64, u32)>> = BTreeMap::new();
        for (id, first, count) in unmaps {
            let Some(blob) = self.blobs.get(&id) else { continue };
            let end = (first + count).min(blob.size);
            let lost = lost.entry(id).or_default();
            for n in self.chunks_shown(id, place(first).0, end) {
                for cluster in clusters_of(n, first, end) {
                    let from = self.unmap_one(&mut txn, id, cluster);
                    let now = self.blobs[&id].entry(cluster);
                    if from.is_some() || now != 0 {
                        lost.push((from.unwrap_or(0), cluster, now));
                    }
                }
            }
        }
        let mut replaced: BTreeMap<u64, Freed> = BTreeMap::new();
        for ((blob, cluster), to) in &new {
            let had = self.remap(&mut txn, *blob, *cluster, *to);
            had.into_iter().for_each(|had| replaced.entry(*blob).or_default().push(had));
        }
        let durable = durable || !replaced.is_empty();
        let committed = match () {
            () if txn.is_empty() => Ok(()),
            () if durable => self.commit(txn),
            () => self.commit_tentative(txn, failures),
        };
        let lost = lost.into_iter().map(|(id, mut all)| {
            all.sort_unstable();
            let mut freed = Freed::default();
            all.iter().filter(|l| l.0 != 0).for_each(|(from, ..)| freed.push(*from));
            let clusters = all.into_iter().map(|(_, cluster, now)| (cluster, now)).collect();
            Lost { blob: BlobId(id), clusters, freed }
        });
        let allocated = new.into_iter().map(|((id, cluster), to)| (BlobId(id), cluster, to));
        if committed.is_err() {
            replaced.clear();
        }
        let replaced = replaced.into_iter().map(|(id, freed)| (BlobId(id), freed)).collect();
        BatchDone {
            allocated: zeroed.and(committed.clone()).map(|()| allocated.collect()),
            failed,
            unmapped: committed.map(|()| lost.collect()),
            replaced,
        }
    }

    /// Brings what a batch looks at into memory.
    fn bring_batch(
        &mut self,
        new: &BTreeMap<(u64, u64), u32>,
        unmaps: &[(u64, u64, u64)],
    ) -> Result<(), Error> {
        for (id, first, count) in unmaps {
            self.bring_shown(*id, place(*first).0..place(first + count).0 + 1)?;
        }
        let chunks: BTreeSet<_> =
            new.keys().map(|(id, cluster)| (*id, place(*cluster).0)).collect();
        chunks.into_iter().try_for_each(|(id, n)| self.bring_shown(id, n..n + 1))
    }

    /// Gives up a batch.
    pub fn drop_batch(&mut self, batch: Batch) {
        self.give_back(&batch.new);
    }

    pub(crate) fn give_back(&mut self, new: &BTreeMap<(u64, u64), u32>) {
        for cluster in new.values() {
            self.clusters.clear(u64::from(*cluster) - self.sb.first_data_cluster);
        }
    }

    /// Fills taken clusters: with what a snapshot shows there, the others with zeros, neighbours together.
    /// What the same batch unmaps is zeros, too. Those in `zeros` are zeros already.
    fn fill_new(
        &mut self,
        new: &BTreeMap<(u64, u64), u32>,
        unmaps: &[(u64, u64, u64)],
        overs: &Overs,
        zeros: &BTreeSet<u32>,
    ) -> Result<(), Error> {
        let size = u64::from(self.sb.cluster_size);
        let at = |cluster: u32| u64::from(cluster) * size;
        let (mut zeroed, mut fills) = (Vec::new(), Vec::new());
        for ((id, cluster), to) in new {
            let (over, to) = (over(overs, *id, *cluster), *to);
            let unmapped = is_unmapped(unmaps, *id, *cluster);
            let from = match self.source(*id, *cluster) {
                _ if unmapped || covers(over, 0, size) => None,
                Shows::Cluster(from) => Some(at(from)),
                Shows::Zeros => None,
                Shows::External(_) => continue, // filled before
            };
            match from.is_none() && over.is_empty() {
                true if zeros.contains(&to) => {}
                true => zeroed.push(to),
                false => fills.push(Fill { from, to: at(to), over }),
            }
        }
        zeroed.sort_unstable();
        let mut taken = Freed::default();
        zeroed.into_iter().for_each(|cluster| taken.push(cluster));
        taken.runs.into_iter().try_for_each(|run: Run| self.zero(run))?;
        if fills.is_empty() {
            return Ok(());
        }
        self.unflushed = true;
        self.disk.fill(&fills, size).map_err(Error::Data)
    }

    /// Allocates clusters on demand, as few transactions as possible for all of `wants`, each the
    /// (blob, cluster of the blob). One that is allocated already, and is its blob's alone, is answered with what it
    /// has. A
    /// new one reads as it did before, durably, before its blob durably owns it. They are durable after
    /// [`Store::sync`].
    ///
    /// The answers are in the order of `wants`: [`Error::NoSpace`], [`Error::OutOfRange`],
    /// [`Error::ReadOnly`], [`Error::NoBlob`], or the device's failure.
    pub fn allocate(&mut self, wants: &[(BlobId, u64)]) -> Vec<Allocated> {
        self.allocate_by(wants, Store::add_allocation)
    }

    /// Gives a blob clusters of its own that [`Store::lacking`] named; it reads as before, so it may be
    /// read-only. Returns the device's, in that order.
    ///
    /// # Errors
    /// [`Error::NoSpace`], [`Error::OutOfRange`] and others; then it has some of them.
    pub fn supply(&mut self, id: BlobId, clusters: &[u64]) -> Result<Vec<u32>, Error> {
        let wants: Vec<_> = clusters.iter().map(|cluster| (id, *cluster)).collect();
        self.allocate_by(&wants, Store::add_cluster).into_iter().collect()
    }

    pub(crate) fn allocate_by(
        &mut self,
        wants: &[(BlobId, u64)],
        mut add: impl FnMut(&mut Self, &mut Batch, BlobId, u64) -> Result<bool, Error>,
    ) -> Vec<Allocated> {
        let mut answers: Vec<Result<(), Error>> = Vec::with_capacity(wants.len());
        let mut begin = 0;
        while begin < wants.len() {
            let mut batch = self.batch();
            let mut added = Vec::new();
            for (id, cluster) in &wants[begin..] {
                match add(self, &mut batch, *id, *cluster) {
                    Ok(true) => added.push(Ok(())),
                    Ok(false) => break,
                    Err(e) => added.push(Err(e)),
                }
            }
            begin += added.len();
            let BatchDone { allocated, failed, replaced, .. } = self.commit_batch(batch);
            // Nobody has I/O in flight: what is written here is written by the thread that has the store.
            replaced.into_iter().for_each(|(_, freed)| self.release(freed));
            let failed: BTreeMap<_, _> =
                failed.into_iter().map(|(id, cluster, e)| ((id, cluster), e)).collect();
            let done = allocated.map(drop);
            let of = |(answer, want): (Result<(), Error>, &(BlobId, u64))| {
                answer.and(done.clone()).and(failed.get(want).cloned().map_or(Ok(()), Err))
            };
            let wanted = wants[begin - added.len()..begin].iter();
            answers.extend(added.into_iter().zip(wanted).map(of));
        }
        let of = |(answer, (id, cluster)): (Result<(), Error>, &(BlobId, u64))| {
            answer.and_then(|()| Ok(self.get(*id)?.cluster(*cluster)))
        };
        answers.into_iter().zip(wants).map(of).collect()
    }

    /// Takes clusters `first` .. `first + count` from a thin blob; they read as zeros then. The
    /// device's clusters are free after [`Store::release`]. What one record holds is atomic by
    /// itself, so a power cut can leave a part done.
    ///
    /// # Errors
    /// [`Error::NoBlob`], [`Error::ReadOnly`], [`Error::OutOfRange`], [`Error::Stopped`],
    /// [`Error::Metadata`].
    pub fn unmap(&mut self, id: BlobId, first: u64, count: u64) -> Result<Freed, Error> {
        let end = first.saturating_add(count);
        if end <= self.get(id)?.size {
            // Before a part is done.
            self.bring_shown(id.0, place(first).0..place(end).0 + 1)?;
        }
        let mut freed = Freed::default();
        let mut done = 0;
        loop {
            let mut batch = self.batch();
            done += self.add_unmap(&mut batch, id, first + done, count - done)?;
            for lost in self.commit_batch(batch).unmapped? {
                freed.append(lost.freed);
            }
            if done == count {
                return Ok(freed);
            }
        }
    }
}

/// What lies over a blob's cluster.
pub(crate) fn over(overs: &Overs, id: u64, cluster: u64) -> &[Over] {
    overs.get(&(id, cluster)).map_or(&[], Vec::as_slice)
}

/// Whether a blob's cluster is in one of these unmaps (blob, first, count).
pub(crate) fn is_unmapped(unmaps: &[(u64, u64, u64)], id: u64, cluster: u64) -> bool {
    let covers = |(of, first, count): &(u64, u64, u64)| {
        *of == id && (*first..first + count).contains(&cluster)
    };
    unmaps.iter().any(covers)
}

/// The clusters of an extents page in `first` .. `end`.
fn clusters_of(chunk: u32, first: u64, end: u64) -> std::ops::Range<u64> {
    let starts = u64::from(chunk) * POINTERS as u64;
    first.max(starts)..end.min(starts + POINTERS as u64)
}
