//! Operations on blobs. Each is one transaction: after a power cut it happened or it did not.

use crate::bitmap::Run;
use crate::blob::{Blob, BlobId, BlobInfo, Dif, Part, dif_flags, index_of, place};
use crate::brought::{ALL, the};
use crate::disk::Disk;
use crate::error::Error;
use crate::format::{
    EXTENTS_MAX, FLAG_READ_ONLY, FLAG_THIN, POINTERS, XATTR_NAME_MAX, XATTR_VALUE_MAX, pack,
};
use crate::store::{Freed, Reservation, Store, Txn, check_name};
use std::collections::{BTreeMap, BTreeSet};
use uuid::Uuid;

/// How to create a blob.
#[derive(Clone, Debug)]
pub struct BlobOptions {
    /// Name, unique in the store: 1 to 63 printable ASCII characters without space and slash.
    pub name: String,
    /// Identity, unique in the store.
    pub uuid: Uuid,
    /// Size in clusters.
    pub size: u64,
    /// Whether clusters are allocated on first write only.
    pub thin: bool,
    /// The protection information that it keeps in itself.
    pub dif: Option<Dif>,
    /// Xattrs that it has from the beginning: there is never a blob without them.
    pub xattrs: BTreeMap<String, Vec<u8>>,
}

/// Most xattr pages change at once, plus the root.
const XATTR_CHANGE_PAGES: u64 = 9;

impl<D: Disk> Store<D> {
    /// All blobs, in the order of their creation.
    pub fn blobs(&self) -> impl Iterator<Item = BlobInfo> + '_ {
        self.blobs.values().map(Blob::info)
    }

    /// One blob.
    ///
    /// # Errors
    /// [`Error::NoBlob`].
    pub fn blob(&self, id: BlobId) -> Result<BlobInfo, Error> {
        self.get(id).map(Blob::info)
    }

    /// The blob of that name.
    pub fn by_name(&self, name: &str) -> Option<BlobId> {
        self.by_name.get(name).map(|id| BlobId(*id))
    }

    /// The blob of that UUID.
    pub fn by_uuid(&self, uuid: Uuid) -> Option<BlobId> {
        self.by_uuid.get(&uuid).map(|id| BlobId(*id))
    }

    /// What a blob has itself, in order: its clusters with the device's, or [`HOLE`](crate::HOLE) for
    /// one that reads as zeros whatever its parent has.
    ///
    /// # Errors
    /// [`Error::NoBlob`]; [`Error::Data`] and [`Error::Damaged`] where that had to be read again.
    pub fn clusters(&mut self, id: BlobId) -> Result<impl Iterator<Item = (u64, u32)> + '_, Error> {
        self.bring(id.0, ALL)?;
        self.get(id).map(|blob| blob.entries(0..u64::MAX))
    }

    /// What a blob itself has for one of its clusters: the device's, 0 for none, or
    /// [`HOLE`](crate::HOLE).
    ///
    /// # Errors
    /// As [`Store::clusters`].
    pub fn entry(&mut self, id: BlobId, cluster: u64) -> Result<u32, Error> {
        self.bring(id.0, the(cluster))?;
        self.get(id).map(|blob| blob.entry(cluster))
    }

    /// Takes `count` free clusters for a blob that is about to own them.
    ///
    /// # Errors
    /// [`Error::NoSpace`], [`Error::Stopped`].
    pub fn reserve(&mut self, count: u64) -> Result<Reservation, Error> {
        self.alive()?;
        let free = self.available();
        let runs = if count <= free { self.clusters.take_runs(count) } else { None };
        let runs = runs.ok_or(Error::NoSpace { needed: count, free })?;
        let first = self.sb.first_data_cluster;
        let runs = runs.iter().map(|r| Run { first: first + r.first, count: r.count });
        let runs: Vec<Run> = runs.collect();
        runs.iter().for_each(|run| self.forget_zeros(*run));
        Ok(Reservation { runs })
    }

    /// Gives a reservation back.
    pub fn unreserve(&mut self, reservation: Reservation) {
        self.release(Freed { runs: reservation.runs });
    }

    /// Makes clusters free that a blob lost, once nobody has I/O in flight to them; of one with several
    /// owners that is one less.
    pub fn release(&mut self, freed: Freed) {
        for run in freed.runs {
            for cluster in run.first..run.first + run.count {
                if !self.owners.remove(cluster as u32) {
                    self.clusters.clear(cluster - self.sb.first_data_cluster);
                }
            }
        }
    }

    /// Says that reserved clusters were zeroed through another channel of the device: the next
    /// commit flushes before its blob owns them.
    pub fn zeroed_elsewhere(&mut self) {
        self.unflushed = true;
    }

    /// Writes zeros over reserved clusters. They are durable before the blob owns the clusters.
    ///
    /// # Errors
    /// [`Error::Data`].
    pub fn zero(&mut self, run: Run) -> Result<(), Error> {
        let cluster = u64::from(self.sb.cluster_size);
        self.unflushed = true;
        self.disk.write_zeroes(run.first * cluster, run.count * cluster).map_err(Error::Data)
    }

    /// Creates a blob. All of it reads as zeros.
    ///
    /// # Errors
    /// [`Error::NameTaken`], [`Error::UuidTaken`], [`Error::NoSpace`] and others; then there is no
    /// such blob.
    pub fn create(&mut self, options: &BlobOptions) -> Result<BlobId, Error> {
        self.check_create(options)?;
        let reservation = self.reserve_zeroed(if options.thin { 0 } else { options.size })?;
        self.create_reserved(options, reservation)
    }

    /// Whether a blob can be created, apart from room for its clusters.
    ///
    /// # Errors
    /// As [`Store::create`].
    pub fn check_create(&self, options: &BlobOptions) -> Result<(), Error> {
        self.alive()?;
        self.check_identity(&options.name, options.uuid)?;
        check_size(options.size)?;
        if options.dif.is_some() {
            self.check_version()?;
        }
        let mut pages = xattr_areas(&options.name, &options.xattrs)?.len() as u64;
        if !options.thin {
            pages += pages_for(options.size);
        }
        self.need_pages(pages)
    }

    /// Reserves and zeroes at once.
    fn reserve_zeroed(&mut self, count: u64) -> Result<Reservation, Error> {
        let reservation = self.reserve(count)?;
        for run in reservation.runs.clone() {
            if let Err(e) = self.zero(run) {
                self.unmap_reserved(&reservation);
                self.unreserve(reservation);
                return Err(e);
            }
        }
        Ok(reservation)
    }

    /// Tells the disk that what zeroing may have allocated under a reservation is not needed. It is
    /// only room: who gets the clusters next zeroes them first.
    fn unmap_reserved(&mut self, reservation: &Reservation) {
        let cluster = u64::from(self.sb.cluster_size);
        for run in &reservation.runs {
            _ = self.disk.unmap(run.first * cluster, run.count * cluster);
        }
    }

    /// As [`Store::create`], with clusters that were reserved and zeroed: `size` of them, or none
    /// for a thin blob. On an error they are given back.
    ///
    /// # Errors
    /// As [`Store::create`].
    pub fn create_reserved(
        &mut self,
        options: &BlobOptions,
        reservation: Reservation,
    ) -> Result<BlobId, Error> {
        if let Err(e) = self.check_create(options) {
            self.unreserve(reservation);
            return Err(e);
        }
        let reserved: u64 = reservation.runs.iter().map(|r| r.count).sum();
        assert_eq!(reserved, if options.thin { 0 } else { options.size }, "clusters reserved");
        let mut txn = Txn::default();
        let id = self.insert_new(&mut txn, options, 0);
        self.map_runs(&mut txn, id, 0, &reservation.runs);
        self.commit(txn)?;
        Ok(BlobId(id))
    }

    /// Creates a thin blob with a snapshot as its parent.
    pub(crate) fn create_child(
        &mut self,
        options: &BlobOptions,
        parent: BlobId,
    ) -> Result<BlobId, Error> {
        self.check_create(options)?;
        let mut txn = Txn::default();
        let id = self.insert_new(&mut txn, options, parent.0);
        self.commit(txn)?;
        Ok(BlobId(id))
    }

    /// A blob that has nothing yet but its root and its xattrs.
    pub(crate) fn insert_new(&mut self, txn: &mut Txn, options: &BlobOptions, parent: u64) -> u64 {
        let id = self.next_id;
        self.next_id += 1;
        let root = self.take_page(txn);
        let areas = pack(&options.xattrs).expect("check_create packed them");
        let xattr_pages: Vec<u32> = areas[1..].iter().map(|_| self.take_page(txn)).collect();
        let xattr_parts = 0..xattr_pages.len() as u32;
        self.by_name.insert(options.name.clone(), id);
        self.by_uuid.insert(options.uuid, id);
        self.blobs.insert(
            id,
            Blob {
                id,
                root,
                uuid: options.uuid,
                name: options.name.clone(),
                size: options.size,
                allocated: 0,
                flags: if options.thin { FLAG_THIN } else { 0 } | dif_flags(options.dif),
                parent,
                external: None,
                parent_clusters: if parent == 0 { 0 } else { options.size },
                clones: BTreeSet::new(),
                xattrs: options.xattrs.clone(),
                xattr_pages,
                chunks: BTreeMap::new(),
                indexes: BTreeMap::new(),
            },
        );
        txn.touch(id, Part::Root);
        xattr_parts.for_each(|i| txn.touch(id, Part::Xattrs(i)));
        if let Some(parent) = self.blobs.get_mut(&parent) {
            parent.clones.insert(id);
        }
        id
    }

    fn map_runs(&mut self, txn: &mut Txn, blob: u64, first: u64, runs: &[Run]) {
        let clusters = runs.iter().flat_map(|r| r.first..r.first + r.count);
        for (i, cluster) in clusters.enumerate() {
            self.map(txn, blob, first + i as u64, cluster as u32);
        }
    }

    /// Changes a blob's size to `size` clusters. What is added reads as zeros; clusters cut off are
    /// free after [`Store::release`].
    ///
    /// # Errors
    /// [`Error::NoBlob`], [`Error::ReadOnly`], [`Error::NoSpace`] and others; then the size is
    /// what it was.
    pub fn resize(&mut self, id: BlobId, size: u64) -> Result<Freed, Error> {
        let needed = self.check_resize(id, size)?;
        let reservation = self.reserve_zeroed(needed)?;
        self.resize_reserved(id, size, reservation)
    }

    /// Whether a blob can be resized, apart from room; returns how many clusters must be reserved.
    ///
    /// # Errors
    /// As [`Store::resize`].
    pub fn check_resize(&self, id: BlobId, size: u64) -> Result<u64, Error> {
        self.alive()?;
        let blob = self.get(id)?;
        if blob.read_only() {
            return Err(Error::ReadOnly { name: blob.name.clone() });
        }
        check_size(size)?;
        let more = if blob.thin() { 0 } else { size.saturating_sub(blob.size) };
        // Two partial pages at the ends, and the index pages that come with them.
        self.need_pages(if more == 0 { 0 } else { pages_for(more) + 2 })?;
        Ok(more)
    }

    /// As [`Store::resize`], with clusters that were reserved and zeroed: as many as
    /// [`Store::check_resize`] said. On an error they are given back.
    ///
    /// # Errors
    /// As [`Store::resize`].
    pub fn resize_reserved(
        &mut self,
        id: BlobId,
        size: u64,
        reservation: Reservation,
    ) -> Result<Freed, Error> {
        let reserved: u64 = reservation.runs.iter().map(|r| r.count).sum();
        match self.check_resize(id, size) {
            Ok(needed) => assert_eq!(reserved, needed, "clusters reserved"),
            Err(e) => {
                self.unreserve(reservation);
                return Err(e);
            }
        }
        let old = self.blob_mut(id.0).size;
        let mut freed = Freed::default();
        if size == old {
            return Ok(freed);
        }
        let chunks = if size > old { the(old) } else { place(size).0..ALL.end };
        if let Err(e) = self.bring(id.0, chunks) {
            self.unreserve(reservation);
            return Err(e);
        }
        let mut txn = Txn::default();
        self.blob_mut(id.0).size = size;
        txn.touch(id.0, Part::Root);
        if size > old {
            self.map_runs(&mut txn, id.0, old, &reservation.runs);
        } else {
            let blob = self.blob_mut(id.0);
            // What is added again later reads as zeros.
            blob.parent_clusters = blob.parent_clusters.min(size);
            let cut: Vec<u64> = blob.entries(size..u64::MAX).map(|(cluster, _)| cluster).collect();
            for cluster in cut {
                let had = self.forget_one(&mut txn, id.0, cluster);
                had.into_iter().for_each(|cluster| freed.push(cluster));
            }
        }
        self.commit(txn)?;
        Ok(freed)
    }

    /// Gives a blob another name.
    ///
    /// # Errors
    /// [`Error::NoBlob`], [`Error::NameTaken`], [`Error::BadName`] and others.
    pub fn rename(&mut self, id: BlobId, name: &str) -> Result<(), Error> {
        self.alive()?;
        check_name(name)?;
        let old = self.get(id)?.name.clone();
        if old == name {
            return Ok(());
        }
        if self.by_name.contains_key(name) {
            return Err(Error::NameTaken { name: name.to_owned() });
        }
        self.by_name.remove(&old);
        self.by_name.insert(name.to_owned(), id.0);
        self.blob_mut(id.0).name = name.to_owned();
        self.commit_root(id)
    }

    /// Makes a blob read-only for good.
    ///
    /// # Errors
    /// [`Error::NoBlob`], [`Error::Stopped`], [`Error::Metadata`].
    pub fn set_read_only(&mut self, id: BlobId) -> Result<(), Error> {
        self.alive()?;
        self.get(id)?;
        self.blob_mut(id.0).flags |= FLAG_READ_ONLY;
        self.commit_root(id)
    }

    fn commit_root(&mut self, id: BlobId) -> Result<(), Error> {
        let mut txn = Txn::default();
        txn.touch(id.0, Part::Root);
        self.commit(txn)
    }

    /// The value of an xattr.
    ///
    /// # Errors
    /// [`Error::NoBlob`], [`Error::NoXattr`].
    pub fn xattr(&self, id: BlobId, name: &str) -> Result<&[u8], Error> {
        let blob = self.get(id)?;
        let none = || Error::NoXattr { blob: blob.name.clone(), name: name.to_owned() };
        blob.xattrs.get(name).map(Vec::as_slice).ok_or_else(none)
    }

    /// The names of a blob's xattrs, in order.
    ///
    /// # Errors
    /// [`Error::NoBlob`].
    pub fn xattrs(&self, id: BlobId) -> Result<Vec<String>, Error> {
        Ok(self.get(id)?.xattrs.keys().cloned().collect())
    }

    /// Sets an xattr.
    ///
    /// # Errors
    /// [`Error::NoBlob`], [`Error::BadXattr`], [`Error::NoMetadataSpace`] and others.
    pub fn set_xattr(&mut self, id: BlobId, name: &str, value: &[u8]) -> Result<(), Error> {
        self.alive()?;
        let blob = self.get(id)?;
        check_xattr(&blob.name, name, value)?;
        let mut xattrs = blob.xattrs.clone();
        xattrs.insert(name.to_owned(), value.to_vec());
        if pack(&xattrs).is_none() {
            let why = "all xattrs of a blob together do not fit; remove others first".into();
            let blob = blob.name.clone();
            return Err(Error::BadXattr { blob, name: name.to_owned(), why });
        }
        self.need_pages(XATTR_CHANGE_PAGES)?;
        self.replace_xattrs(id, xattrs)
    }

    /// Removes an xattr.
    ///
    /// # Errors
    /// [`Error::NoBlob`], [`Error::NoXattr`] and others.
    pub fn remove_xattr(&mut self, id: BlobId, name: &str) -> Result<(), Error> {
        self.alive()?;
        self.xattr(id, name)?;
        let mut xattrs = self.get(id)?.xattrs.clone();
        xattrs.remove(name);
        // First fit by name order: fewer records can need one page more.
        if pack(&xattrs).is_none_or(|areas| areas.len() > 1 + self.blobs[&id.0].xattr_pages.len()) {
            self.need_pages(XATTR_CHANGE_PAGES)?;
        }
        self.replace_xattrs(id, xattrs)
    }

    fn replace_xattrs(
        &mut self,
        id: BlobId,
        xattrs: BTreeMap<String, Vec<u8>>,
    ) -> Result<(), Error> {
        let Some(areas) = pack(&xattrs) else {
            let blob = self.get(id)?.name.clone();
            let why = "the others do not fit without it; remove the largest first".into();
            return Err(Error::BadXattr { blob, name: "(others)".into(), why });
        };
        let mut txn = Txn::default();
        let pages = areas.len() - 1;
        while self.blobs[&id.0].xattr_pages.len() < pages {
            let page = self.take_page(&mut txn);
            self.blob_mut(id.0).xattr_pages.push(page);
        }
        for page in self.blob_mut(id.0).xattr_pages.split_off(pages) {
            txn.free(page);
        }
        self.blob_mut(id.0).xattrs = xattrs;
        txn.touch(id.0, Part::Root);
        (0..pages as u32).for_each(|i| txn.touch(id.0, Part::Xattrs(i)));
        self.commit(txn)
    }

    pub(crate) fn get(&self, id: BlobId) -> Result<&Blob, Error> {
        self.blobs.get(&id.0).ok_or(Error::NoBlob { id: id.0 })
    }
}

/// Refuses an xattr that no blob can have.
fn check_xattr(blob: &str, name: &str, value: &[u8]) -> Result<(), Error> {
    let bad =
        |why: String| Err(Error::BadXattr { blob: blob.to_owned(), name: name.to_owned(), why });
    if name.is_empty() || name.len() > XATTR_NAME_MAX {
        return bad(format!("a name has 1 to {XATTR_NAME_MAX} characters; choose another"));
    }
    if !name.bytes().all(|b| b.is_ascii_graphic()) {
        return bad("a name is printable ASCII without space; choose another".into());
    }
    if value.len() > XATTR_VALUE_MAX {
        let len = value.len();
        return bad(format!("its value has {len} bytes, at most {XATTR_VALUE_MAX} are possible"));
    }
    Ok(())
}

/// The areas, the root's first, that a new blob's xattrs take.
pub(crate) fn xattr_areas(
    blob: &str,
    xattrs: &BTreeMap<String, Vec<u8>>,
) -> Result<Vec<Vec<u8>>, Error> {
    for (name, value) in xattrs {
        check_xattr(blob, name, value)?;
    }
    pack(xattrs).ok_or_else(|| {
        let why = "all xattrs of a blob together do not fit; give fewer".into();
        Error::BadXattr { blob: blob.to_owned(), name: "(all)".into(), why }
    })
}

fn check_size(clusters: u64) -> Result<(), Error> {
    let max = EXTENTS_MAX * POINTERS as u64;
    if clusters > max { Err(Error::TooLarge { clusters, max }) } else { Ok(()) }
}

/// Extents and index pages that `clusters` consecutive clusters from 0 need.
fn pages_for(clusters: u64) -> u64 {
    let Some(last) = clusters.checked_sub(1) else { return 0 };
    let (chunk, _) = place(last);
    u64::from(chunk) + 1 + index_of(chunk).map_or(0, |i| u64::from(i) + 1)
}
