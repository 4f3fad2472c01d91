//! Snapshots and clones: who shows where a blob has nothing of its own.
//!
//! A snapshot keeps the root page, the number and the clusters of the blob that it is taken of; the
//! blob goes on with an empty root of another number, whose parent the snapshot is. So it takes two
//! pages, whatever the size. A snapshot with one clone is deleted by handing over what the clone lacks.

use crate::blob::{Blob, BlobId, Chunk, Part, index_of, place};
use crate::brought::WINDOW;
use crate::disk::Disk;
use crate::error::Error;
use crate::format::{
    FLAG_DELETING, FLAG_READ_ONLY, FLAG_SNAPSHOT, FLAG_THIN, FLAGS_DIF, HOLE, POINTERS, VERSION,
    pack,
};
use crate::ops::{BlobOptions, xattr_areas};
use crate::store::{Freed, Store, Txn, check_name};
use std::collections::{BTreeMap, BTreeSet};
use std::ops::Range;
use uuid::Uuid;

/// Extents pages that one record hands over at most: a record of megabytes would keep others waiting.
const HAND_OVER_PAGES: usize = 64;

/// How to create a snapshot or a clone.
#[derive(Clone, Debug)]
pub struct HistoryOptions {
    /// Name, unique in the store: 1 to 63 printable ASCII characters without space and slash.
    pub name: String,
    /// Identity, unique in the store.
    pub uuid: Uuid,
    /// Xattrs that it has from the beginning. Those of a blob stay with it when a snapshot is taken.
    pub xattrs: BTreeMap<String, Vec<u8>>,
}

/// What [`Store::delete`] leaves.
#[derive(Debug)]
#[must_use]
pub struct Deleted {
    /// Clusters of the device that nobody has any more; free after [`Store::release`].
    pub freed: Freed,
    /// The clone that has what the deleted snapshot had, and another parent or none.
    pub heir: Option<BlobId>,
}

impl<D: Disk> Store<D> {
    /// Takes snapshots of several blobs, all at one instant. What was written to them before is durable
    /// then, and belongs to the snapshots. Returns, in the order given, the new number of each blob: the
    /// number that it had is its snapshot's.
    ///
    /// # Errors
    /// [`Error::OldFormat`], [`Error::ReadOnly`], [`Error::NameTaken`], [`Error::UuidTaken`],
    /// [`Error::NoMetadataSpace`] and others; then no snapshot was taken.
    pub fn snapshot(&mut self, all: &[(BlobId, HistoryOptions)]) -> Result<Vec<BlobId>, Error> {
        self.check_snapshot(all)?;
        let mut txn = Txn::default();
        let numbers =
            all.iter().map(|(id, options)| self.turn_into_snapshot(&mut txn, *id, options));
        let numbers = numbers.collect();
        // What is in the caches belongs to the snapshots.
        self.unflushed = true;
        self.commit(txn)?;
        Ok(numbers)
    }

    /// Whether [`Store::snapshot`] can be done.
    ///
    /// # Errors
    /// As [`Store::snapshot`].
    pub fn check_snapshot(&self, all: &[(BlobId, HistoryOptions)]) -> Result<(), Error> {
        self.alive()?;
        self.check_version()?;
        let (mut names, mut uuids, mut blobs) = (BTreeSet::new(), BTreeSet::new(), BTreeSet::new());
        let mut pages = 0;
        for (id, options) in all {
            let blob = self.get(*id)?;
            if blob.read_only() || !blobs.insert(*id) {
                return Err(Error::ReadOnly { name: blob.name.clone() });
            }
            self.check_identity(&options.name, options.uuid)?;
            if !names.insert(&options.name) {
                return Err(Error::NameTaken { name: options.name.clone() });
            }
            if !uuids.insert(options.uuid) {
                return Err(Error::UuidTaken { uuid: options.uuid });
            }
            pages += xattr_areas(&options.name, &options.xattrs)?.len() as u64;
            pages += 1 + blob.xattr_pages.len() as u64;
        }
        // Each changes its root, and all bitmap pages may change.
        let most = self.batch_max() as u64;
        if all.len() as u64 > most {
            return Err(Error::TooMany { count: all.len() as u64, most });
        }
        self.need_pages(pages)
    }

    fn turn_into_snapshot(
        &mut self,
        txn: &mut Txn,
        id: BlobId,
        options: &HistoryOptions,
    ) -> BlobId {
        let number = self.next_id;
        self.next_id += 1;
        let root = self.take_page(txn);
        let fresh = |store: &mut Self, txn: &mut Txn, areas: usize| -> Vec<u32> {
            (1..areas).map(|_| store.take_page(txn)).collect()
        };
        let areas = pack(&self.blobs[&id.0].xattrs).expect("was checked when it was set").len();
        let live_pages = fresh(self, txn, areas);
        let areas = pack(&options.xattrs).expect("check_snapshot packed them").len();
        let snapshot_pages = fresh(self, txn, areas);
        let snapshot = self.blob_mut(id.0);
        let live = Blob {
            id: number,
            root,
            uuid: std::mem::replace(&mut snapshot.uuid, options.uuid),
            name: std::mem::replace(&mut snapshot.name, options.name.clone()),
            size: snapshot.size,
            allocated: 0,
            flags: FLAG_THIN | snapshot.flags & FLAGS_DIF,
            parent: id.0,
            external: None,
            parent_clusters: snapshot.size,
            clones: BTreeSet::new(),
            xattrs: std::mem::replace(&mut snapshot.xattrs, options.xattrs.clone()),
            xattr_pages: live_pages,
            chunks: BTreeMap::new(),
            indexes: BTreeMap::new(),
        };
        snapshot.flags |= FLAG_READ_ONLY | FLAG_SNAPSHOT;
        snapshot.clones.insert(number);
        for page in std::mem::replace(&mut snapshot.xattr_pages, snapshot_pages) {
            txn.free(page);
        }
        for blob in [&live, &self.blobs[&id.0]] {
            txn.touch(blob.id, Part::Root);
            (0..blob.xattr_pages.len() as u32).for_each(|i| txn.touch(blob.id, Part::Xattrs(i)));
        }
        self.by_name.insert(live.name.clone(), number);
        self.by_uuid.insert(live.uuid, number);
        self.by_name.insert(options.name.clone(), id.0);
        self.by_uuid.insert(options.uuid, id.0);
        self.blobs.insert(number, live);
        BlobId(number)
    }

    /// Creates a clone of a snapshot: a thin blob of its size that reads as it does.
    ///
    /// # Errors
    /// [`Error::NotASnapshot`], [`Error::NameTaken`], [`Error::UuidTaken`],
    /// [`Error::NoMetadataSpace`] and others; then there is no clone.
    pub fn clone_of(&mut self, of: BlobId, options: &HistoryOptions) -> Result<BlobId, Error> {
        let parent = self.parent_to_be(of)?;
        let (size, dif) = (parent.size, parent.dif());
        let HistoryOptions { name, uuid, xattrs } = options.clone();
        let options = BlobOptions { name, uuid, size, thin: true, dif, xattrs };
        self.create_child(&options, of)
    }

    /// The snapshot `id`, to be somebody's parent.
    fn parent_to_be(&self, id: BlobId) -> Result<&Blob, Error> {
        self.check_version()?;
        let blob = self.get(id)?;
        match blob.snapshot() && !blob.deleting() {
            true => Ok(blob),
            false => Err(Error::NotASnapshot { name: blob.name.clone() }),
        }
    }

    /// Whether a blob of that name and UUID may come to be.
    pub(crate) fn check_identity(&self, name: &str, uuid: Uuid) -> Result<(), Error> {
        check_name(name)?;
        if self.by_name.contains_key(name) {
            return Err(Error::NameTaken { name: name.to_owned() });
        }
        match self.by_uuid.contains_key(&uuid) {
            true => Err(Error::UuidTaken { uuid }),
            false => Ok(()),
        }
    }

    pub(crate) fn check_version(&self) -> Result<(), Error> {
        match self.sb.version < VERSION {
            true => Err(Error::OldFormat { store: self.sb.name.clone(), version: self.sb.version }),
            false => Ok(()),
        }
    }

    /// Gives the store the newest version of the format, in which it can have snapshots. Programs that
    /// know the first version only refuse it from then on.
    ///
    /// # Errors
    /// [`Error::Stopped`], [`Error::Metadata`].
    pub fn upgrade(&mut self) -> Result<(), Error> {
        self.alive()?;
        if self.sb.version == VERSION {
            return Ok(());
        }
        self.sb.version = VERSION;
        self.write_superblock()
    }

    /// Clusters from `from` on, at most `most`, that a blob must have of its own before it can be
    /// [detached](Store::detach): `all` that it lacks, or only those that its parent itself has.
    ///
    /// # Errors
    /// [`Error::NoBlob`], [`Error::NoParent`].
    pub fn lacking(
        &mut self,
        id: BlobId,
        all: bool,
        from: u64,
        most: usize,
    ) -> Result<Vec<u64>, Error> {
        let mut found = Vec::new();
        self.each_lacking(id, all, from, |lacking| {
            found.extend(lacking.take(most - found.len()));
            found.len() < most
        })?;
        Ok(found)
    }

    /// How many clusters [`Store::lacking`] names in all.
    ///
    /// # Errors
    /// As there.
    pub fn count_lacking(&mut self, id: BlobId, all: bool) -> Result<u64, Error> {
        let blob = self.get(id)?;
        if all {
            return Ok(blob.size - blob.allocated);
        }
        let mut count = 0;
        self.each_lacking(id, all, 0, |lacking| {
            count += lacking.count() as u64;
            true
        })?;
        Ok(count)
    }

    /// Calls `f` with what [`Store::lacking`] names from `from` on, some of it at a time, until it says
    /// `false`.
    fn each_lacking(
        &mut self,
        id: BlobId,
        all: bool,
        from: u64,
        mut f: impl FnMut(&mut dyn Iterator<Item = u64>) -> bool,
    ) -> Result<(), Error> {
        let blob = self.get(id)?;
        let (parent, end) = (blob.parent, blob.size);
        let mut at = from.min(end);
        loop {
            let chunk = place(at).0;
            let next = u64::from(chunk + WINDOW) * POINTERS as u64;
            self.bring(id.0, chunk..chunk + WINDOW)?;
            self.bring(parent, chunk..chunk + WINDOW)?;
            let goes_on = f(&mut self.lack(id, all, at..next)?);
            if !goes_on || next >= end {
                return Ok(());
            }
            at = next;
        }
    }

    /// What a blob lacks of some clusters, whose extents pages are in memory.
    fn lack(
        &self,
        id: BlobId,
        all: bool,
        range: Range<u64>,
    ) -> Result<Box<dyn Iterator<Item = u64> + '_>, Error> {
        let blob = self.get(id)?;
        if all {
            let clusters = range.start..range.end.min(blob.size);
            return Ok(Box::new(clusters.filter(|cluster| blob.cluster(*cluster) == 0)));
        }
        if blob.external.is_some() {
            // What it has is not known: all of it.
            let clusters = range.start..range.end.min(blob.parent_clusters);
            return Ok(Box::new(clusters.filter(|cluster| blob.entry(*cluster) == 0)));
        }
        let none = || Error::NoParent { name: blob.name.clone() };
        let parent = self.blobs.get(&blob.parent).ok_or_else(none)?;
        // A hole matters where the parent has a parent, which would show through.
        let hides = |entry: u32| entry != HOLE || parent.has_below();
        let has = parent.entries(range).filter(move |(_, entry)| hides(*entry));
        let has = has.map(|(cluster, _)| cluster);
        let has = has.take_while(|cluster| blob.shows_parent(*cluster));
        Ok(Box::new(has.filter(|cluster| blob.entry(*cluster) == 0)))
    }

    /// Takes a blob's parent from it: it has the parent's parent from then on, or with `all` none, and
    /// then it is thick. It has all that it needs for that; its contents stay the same.
    ///
    /// # Errors
    /// [`Error::NoParent`], [`Error::StillShared`]: allocate what [`Store::lacking`] names first.
    pub fn detach(&mut self, id: BlobId, all: bool) -> Result<(), Error> {
        self.alive()?;
        if !self.lacking(id, all, 0, 1)?.is_empty() {
            return Err(Error::StillShared { name: self.get(id)?.name.clone() });
        }
        let blob = self.get(id)?;
        let (old, grand) = match self.blobs.get(&blob.parent) {
            Some(p) if !all => (p.id, (p.parent, p.external, p.parent_clusters)),
            parent => (parent.map_or(0, |p| p.id), (0, None, 0)),
        };
        let mut txn = Txn::default();
        let blob = self.blob_mut(id.0);
        (blob.parent, blob.external) = (grand.0, grand.1);
        blob.parent_clusters = grand.2.min(blob.parent_clusters);
        if all {
            blob.flags &= !FLAG_THIN;
        }
        self.moved(id.0, old, grand.0);
        txn.touch(id.0, Part::Root);
        self.commit(txn)
    }

    /// Gives a blob another parent: a snapshot of its size. Where it has nothing of its own it reads as
    /// that does from then on.
    ///
    /// # Errors
    /// [`Error::NotASnapshot`], [`Error::OtherSize`], [`Error::OtherDif`], [`Error::ReadOnly`].
    pub fn set_parent(&mut self, id: BlobId, parent: BlobId) -> Result<(), Error> {
        self.alive()?;
        let (blob, new) = (self.get(id)?, self.parent_to_be(parent)?);
        if blob.read_only() || !blob.thin() {
            return Err(Error::ReadOnly { name: blob.name.clone() });
        }
        if blob.size != new.size {
            let (name, parent) = (blob.name.clone(), new.name.clone());
            return Err(Error::OtherSize { name, parent });
        }
        same_dif(blob, new)?;
        let (old, size) = (blob.parent, blob.size);
        let mut txn = Txn::default();
        let blob = self.blob_mut(id.0);
        (blob.parent, blob.external, blob.parent_clusters) = (parent.0, None, size);
        self.moved(id.0, old, parent.0);
        txn.touch(id.0, Part::Root);
        self.commit(txn)
    }

    /// Has each first blob read as the snapshot beside it does, of its size, all at one instant: what they
    /// have of their own is free after [`Store::release`]. Other snapshots stay, so that they can be gone
    /// back to as well. Whose snapshot it is, is the caller's to know.
    ///
    /// # Errors
    /// [`Error::NotASnapshot`], [`Error::OtherDif`], [`Error::ReadOnly`], [`Error::TooMany`] and others; then
    /// all read as before.
    pub fn roll_back(&mut self, all: &[(BlobId, BlobId)]) -> Result<Freed, Error> {
        self.alive()?;
        let mut blobs = BTreeSet::new();
        for (id, to) in all {
            let blob = self.get(*id)?;
            if blob.read_only() || !blobs.insert(*id) {
                return Err(Error::ReadOnly { name: blob.name.clone() });
            }
            same_dif(self.get(*id)?, self.parent_to_be(*to)?)?;
        }
        let most = self.batch_max() as u64;
        if all.len() as u64 > most {
            return Err(Error::TooMany { count: all.len() as u64, most });
        }
        let mut freed = Freed::default();
        for (id, _) in all {
            freed.append(self.all_of(id.0)?);
        }
        let mut txn = Txn::default();
        let before: Vec<Blob> =
            all.iter().map(|(id, to)| self.put_back(&mut txn, id.0, to.0)).collect();
        if all.is_empty() {
            return Ok(freed);
        }
        if let Err(e) = self.commit(txn) {
            // Until the store is loaded again all of them are read as they were.
            for blob in before {
                self.moved(blob.id, self.blobs[&blob.id].parent, blob.parent);
                self.blobs.insert(blob.id, blob);
            }
            return Err(e);
        }
        Ok(freed)
    }

    /// A blob has nothing of its own any more, and reads as the snapshot `to`. Returns what it was.
    fn put_back(&mut self, txn: &mut Txn, id: u64, to: u64) -> Blob {
        let size = self.blobs[&to].size;
        let before = self.blobs.remove(&id).expect("the caller looked it up");
        before.chunks.values().for_each(|chunk| txn.free(chunk.page));
        before.indexes.values().for_each(|index| txn.free(index.page));
        let now = Blob {
            id,
            root: before.root,
            uuid: before.uuid,
            name: before.name.clone(),
            size,
            allocated: 0,
            flags: before.flags | FLAG_THIN,
            parent: to,
            external: None,
            parent_clusters: size,
            clones: BTreeSet::new(),
            xattrs: before.xattrs.clone(),
            xattr_pages: before.xattr_pages.clone(),
            chunks: BTreeMap::new(),
            indexes: BTreeMap::new(),
        };
        self.blobs.insert(id, now);
        self.moved(id, before.parent, to);
        txn.touch(id, Part::Root);
        before
    }

    pub(crate) fn moved(&mut self, blob: u64, from: u64, to: u64) {
        if let Some(parent) = self.blobs.get_mut(&from) {
            parent.clones.remove(&blob);
        }
        if let Some(parent) = self.blobs.get_mut(&to) {
            parent.clones.insert(blob);
        }
    }

    /// Deletes a blob. Its clusters are free after [`Store::release`]; of a snapshot with one clone
    /// those that the clone shows are the clone's.
    ///
    /// # Errors
    /// [`Error::NoBlob`], [`Error::HasClones`], [`Error::Stopped`], [`Error::Metadata`].
    pub fn delete(&mut self, id: BlobId) -> Result<Deleted, Error> {
        self.alive()?;
        let blob = self.get(id)?;
        let mut clones = blob.clones.iter();
        let heir = match (clones.next(), clones.next()) {
            (heir, None) => heir.copied(),
            _ => {
                let names = blob.clones.iter().map(|id| self.blobs[id].name.clone()).collect();
                return Err(Error::HasClones { name: blob.name.clone(), clones: names });
            }
        };
        let mut freed = Freed::default();
        if let Some(heir) = heir {
            // The pages that point to extents pages which the heir takes over.
            let lacks = blob.indexes.keys().filter(|x| !self.blobs[&heir].indexes.contains_key(x));
            self.need_pages(lacks.count() as u64)?;
            while !self.hand_over(id.0, heir, &mut freed)? {}
        } else {
            freed = self.all_of(id.0)?;
            let mut txn = Txn::default();
            self.remove(&mut txn, id.0);
            self.commit(txn)?;
        }
        Ok(Deleted { freed, heir: heir.map(BlobId) })
    }

    /// The clusters that a blob has.
    fn all_of(&mut self, id: u64) -> Result<Freed, Error> {
        let mut freed = Freed::default();
        self.visit(id, 0, |_, cluster| match cluster {
            HOLE => {}
            cluster => freed.push(cluster),
        })?;
        Ok(freed)
    }

    /// Takes a blob and its pages away.
    fn remove(&mut self, txn: &mut Txn, id: u64) {
        let blob = self.blobs.remove(&id).expect("the caller looked it up");
        self.by_name.remove(&blob.name);
        self.by_uuid.remove(&blob.uuid);
        if let Some(parent) = self.blobs.get_mut(&blob.parent) {
            parent.clones.remove(&id);
        }
        blob.pages().for_each(|page| txn.free(page));
    }

    /// One record of the deletion of a snapshot: its only clone takes over what it lacks of some extents
    /// pages, and with the last ones the parent. Whether that were the last ones.
    fn hand_over(&mut self, id: u64, heir: u64, freed: &mut Freed) -> Result<bool, Error> {
        // Each changes its own page and those that point to it, of both.
        let most = (self.batch_max() * 2 / 3).saturating_sub(1).clamp(1, HAND_OVER_PAGES);
        let numbers: Vec<u32> = self.blobs[&id].chunks.keys().copied().take(most).collect();
        let last = numbers.len() == self.blobs[&id].chunks.len();
        if let (Some(first), Some(last)) = (numbers.first(), numbers.last()) {
            let brought = self.bring(id, *first..last + 1);
            if let Err(e) = brought.and_then(|_| self.bring(heir, *first..last + 1)) {
                // A half of it is done, which only a load can end.
                return Err(if self.blobs[&id].deleting() { self.stop(&e) } else { e });
            }
        }
        let mut txn = Txn::default();
        for n in numbers {
            self.hand_over_chunk(&mut txn, (id, heir), n, freed);
        }
        txn.touch(heir, Part::Root);
        if last {
            let gone = &self.blobs[&id];
            let (parent, external, clusters) = (gone.parent, gone.external, gone.parent_clusters);
            self.remove(&mut txn, id);
            let blob = self.blob_mut(heir);
            (blob.parent, blob.external) = (parent, external);
            blob.parent_clusters = clusters.min(blob.parent_clusters);
            self.moved(heir, 0, parent);
        } else {
            // From here on it is not what it was, and only good to be deleted.
            self.blob_mut(id).flags |= FLAG_DELETING | FLAG_THIN;
            txn.touch(id, Part::Root);
        }
        self.commit(txn)?;
        Ok(last)
    }

    fn hand_over_chunk(
        &mut self,
        txn: &mut Txn,
        (id, heir): (u64, u64),
        n: u32,
        freed: &mut Freed,
    ) {
        let given = self.take_chunk(txn, id, n);
        let has_parent = self.blobs[&id].has_below();
        let blob = &self.blobs[&heir];
        let first = u64::from(n) * POINTERS as u64;
        let entries = (first..).zip(given.extents.iter()).filter(|(_, entry)| *entry != 0);
        let (shown, hidden): (Vec<_>, Vec<_>) = entries
            .partition(|(cluster, _)| blob.entry(*cluster) == 0 && blob.shows_parent(*cluster));
        let hidden = hidden.into_iter().filter(|(_, entry)| *entry != HOLE);
        hidden.for_each(|(_, entry)| freed.push(entry));
        let mut shown =
            shown.into_iter().filter(|(_, entry)| *entry != HOLE || has_parent).peekable();
        if shown.peek().is_some() && !blob.chunks.contains_key(&n) {
            self.add_chunk(txn, heir, n, given.page);
        } else {
            txn.free(given.page);
        }
        shown.for_each(|(cluster, entry)| self.map(txn, heir, cluster, entry));
    }

    /// Removes an extents page from a blob; the page itself is the caller's.
    fn take_chunk(&mut self, txn: &mut Txn, id: u64, n: u32) -> Chunk {
        let blob = self.blob_mut(id);
        let chunk = blob.chunks.remove(&n).expect("the caller looked it up");
        let real = chunk.extents.iter().filter(|entry| !matches!(*entry, 0 | HOLE)).count();
        blob.allocated -= real as u64;
        if let Some(x) = index_of(n) {
            let index = blob.indexes.get_mut(&x).expect("a chunk has its index");
            index.used -= 1;
            if index.used == 0 {
                txn.free(index.page);
                blob.indexes.remove(&x);
            } else {
                txn.touch(id, Part::Index(x));
            }
        }
        txn.touch(id, Part::Root);
        chunk
    }

    /// Ends the deletions that the end of a process cut short. Nobody has I/O in flight yet.
    pub(crate) fn finish_deletions(&mut self) -> Result<(), Error> {
        let cut: Vec<u64> = self.blobs.values().filter(|b| b.deleting()).map(|b| b.id).collect();
        for id in cut {
            let deleted = self.delete(BlobId(id))?;
            self.release(deleted.freed);
        }
        Ok(())
    }
}

/// Refuses a parent whose clusters mean something else.
fn same_dif(blob: &Blob, parent: &Blob) -> Result<(), Error> {
    if blob.dif() == parent.dif() {
        return Ok(());
    }
    Err(Error::OtherDif { name: blob.name.clone(), parent: parent.name.clone() })
}
