//! A store: its state. The one way in which a change becomes durable is in `journal`.

use crate::bitmap::{Bitmap, Run};
use crate::blob::{Blob, Part};
use crate::disk::{Disk, DiskError};
use crate::error::Error;
use crate::format::{
    COPY_A, COPY_B, Kind, NAME_MAX, PAGE_SIZE, PAYLOAD, Page, PageId, Superblock, name_fault,
};
use crate::layout::plan;
use crate::owners::{Owners, Recount};
use crate::zeros::Zeros;
use std::collections::{BTreeMap, BTreeSet, HashMap};
use uuid::Uuid;

mod journal;
mod replay;

pub(crate) use replay::Replayed;

/// Clusters taken for a blob that does not own them yet: zero them, then hand them to
/// [`Store::create_reserved`] or [`Store::resize_reserved`], or back to [`Store::unreserve`].
#[derive(Debug, Default)]
#[must_use]
pub struct Reservation {
    pub(crate) runs: Vec<Run>,
}

impl Reservation {
    /// The clusters.
    pub fn runs(&self) -> &[Run] {
        &self.runs
    }
}

/// Clusters that a blob durably lost. They are nobody's until [`Store::release`]: whoever still has
/// I/O in flight to them waits for its end first.
#[derive(Debug, Default)]
#[must_use]
pub struct Freed {
    pub(crate) runs: Vec<Run>,
}

impl Freed {
    /// The clusters.
    pub fn runs(&self) -> &[Run] {
        &self.runs
    }

    /// Whether there are none.
    pub fn is_empty(&self) -> bool {
        self.runs.is_empty()
    }

    pub(crate) fn push(&mut self, cluster: u32) {
        let cluster = u64::from(cluster);
        match self.runs.last_mut() {
            Some(r) if r.first + r.count == cluster => r.count += 1,
            _ => self.runs.push(Run { first: cluster, count: 1 }),
        }
    }

    /// Takes some of them out, neighbours, at most so many.
    pub fn take(&mut self, most: u64) -> Option<Freed> {
        let run = self.runs.last_mut()?;
        let piece = Run { first: run.first, count: run.count.min(most) };
        run.first += piece.count;
        run.count -= piece.count;
        if run.count == 0 {
            self.runs.pop();
        }
        Some(Freed { runs: vec![piece] })
    }

    pub(crate) fn append(&mut self, mut other: Freed) {
        self.runs.append(&mut other.runs);
    }
}

/// How to create a store.
#[derive(Clone, Debug)]
pub struct StoreOptions {
    /// Name: 1 to 63 printable ASCII characters without space and slash.
    pub name: String,
    /// Identity.
    pub uuid: Uuid,
    /// Bytes of a cluster: a power of two from 16 KiB to 1 GiB.
    pub cluster_size: u32,
}

/// Which store a device holds.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Identity {
    /// Identity.
    pub uuid: Uuid,
    /// Name for people.
    pub name: String,
}

/// What a store is now.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct StoreInfo {
    /// Identity.
    pub uuid: Uuid,
    /// Name for people.
    pub name: String,
    /// Bytes of a cluster.
    pub cluster_size: u32,
    /// First cluster of the data area; clusters before it hold metadata.
    pub first_data_cluster: u64,
    /// Clusters of the data area.
    pub data_clusters: u64,
    /// Those of them that are nobody's, but for those that are kept for writes to shared ones.
    pub free_clusters: u64,
    /// Metadata pages that are nobody's.
    pub free_pages: u64,
    /// Bytes of the largest device that [`Store::grow`] can take over.
    pub max_device_size: u64,
    /// Version of its format: only from 2 on it has snapshots.
    pub version: u32,
    /// Whether clusters can have several owners.
    pub shares_clusters: bool,
    /// Why the store takes no more changes, if it does not.
    pub stopped: Option<String>,
}

/// The journal's present state; its place is in the superblock.
pub(crate) struct Journal {
    /// Where the next record goes, in pages from the journal's start.
    pub head: u64,
    /// Pages from the tail to the head.
    pub used: u64,
    /// Number of the next record.
    pub seq: u64,
}

/// Records at the journal's end that are not final.
pub(crate) struct Tentative {
    /// How many flushes of the device had failed before what the first of them stands on was written.
    pub failures: u64,
    /// How many they are.
    pub records: u32,
}

/// One change in the making. The in-memory state is changed first; [`Store::commit`] then writes
/// what this names. If that fails the store stops, so nobody sees the state that was not written.
#[derive(Default)]
pub(crate) struct Txn {
    /// Pages to write, by blob.
    parts: BTreeSet<(u64, Part)>,
    /// Pages that were free until now: written in place.
    fresh: BTreeSet<u32>,
    /// Pages that are free from now on.
    freed: Vec<u32>,
}

impl Txn {
    pub fn touch(&mut self, blob: u64, part: Part) {
        self.parts.insert((blob, part));
    }

    pub fn is_empty(&self) -> bool {
        self.parts.is_empty() && self.freed.is_empty()
    }

    pub fn free(&mut self, page: u32) {
        self.freed.push(page);
    }
}

/// A blobstore on a device that it owns. One thread owns the store.
pub struct Store<D> {
    pub(crate) disk: D,
    pub(crate) sb: Superblock,
    pub(crate) journal: Journal,
    /// Metadata pages in use.
    pub(crate) pages: Bitmap,
    /// Data clusters in use; bit 0 is the first data cluster.
    pub(crate) clusters: Bitmap,
    /// Of those, the ones with several owners.
    pub(crate) owners: Owners,
    pub(crate) recount: Option<Recount>,
    pub(crate) zeros: Zeros,
    pub(crate) blobs: BTreeMap<u64, Blob>,
    pub(crate) by_name: HashMap<String, u64>,
    pub(crate) by_uuid: HashMap<Uuid, u64>,
    pub(crate) next_id: u64,
    /// Newest image of each page that is in the journal but not in its place.
    pub(crate) dirty: BTreeMap<u32, Page>,
    /// Zeros, pages in place or a record were written since the last flush.
    pub(crate) unflushed: bool,
    /// The journal ends with records that are not final.
    pub(crate) tentative: Option<Tentative>,
    /// Extents pages, as (blob, number), whose entries were read or changed since the last
    /// [`Store::let_go`].
    pub(crate) brought: BTreeSet<(u64, u32)>,
    /// The one of these that is let go of next, or the first one after it.
    pub(crate) next_to_go: (u64, u32),
    /// The first metadata failure.
    pub(crate) stopped: Option<DiskError>,
}

/// Metadata pages read with one call.
pub(crate) const READ_RUN_PAGES: u64 = 256;
/// Pages written with one call when they are neighbours.
const WRITE_RUN_PAGES: usize = 256;

impl<D: Disk> Store<D> {
    /// Creates a store on `disk`; whatever was there is lost.
    ///
    /// # Errors
    /// [`Error::BadName`], [`Error::BadOption`], or the device's failure; then there is no store.
    pub fn create_store(disk: D, options: &StoreOptions) -> Result<Self, Error> {
        check_name(&options.name)?;
        let (size, block_size) = (disk.size(), disk.block_size());
        let sb = plan(&options.name, options.uuid, size, block_size, options.cluster_size)?;
        let mut store = Store::empty(disk, sb);
        store.lay_out().map_err(Error::Data)?;
        store.write_superblock()?;
        Ok(store)
    }

    /// Writes everything that a new store has, except its superblock.
    fn lay_out(&mut self) -> Result<(), DiskError> {
        wipe_copies(&mut self.disk)?;
        // Records of a former store with the same UUID must not be replayed, and on a sparse device
        // metadata must not run out of room later.
        let (start, end) = (self.sb.journal_start, self.sb.md_start + self.sb.md_pages);
        let page = PAGE_SIZE as u64;
        self.disk.write_zeroes(start * page, (end - start) * page)?;
        let bitmaps = 0..self.sb.bitmap_pages as u32;
        for i in bitmaps.clone() {
            self.pages.set(u64::from(i));
        }
        for i in bitmaps {
            let page = self.render_bitmap(i, 0);
            self.disk.write(self.sb.page_offset(i), page.bytes())?;
        }
        self.disk.flush()
    }

    /// A store without anything in it, as far as memory goes.
    pub(crate) fn empty(disk: D, sb: Superblock) -> Self {
        Store {
            disk,
            journal: Journal { head: sb.tail_page, used: 0, seq: sb.tail_seq },
            pages: Bitmap::new(sb.md_pages),
            clusters: Bitmap::new(sb.data_clusters),
            owners: Owners::default(),
            recount: None,
            zeros: Zeros::default(),
            sb,
            blobs: BTreeMap::new(),
            by_name: HashMap::new(),
            by_uuid: HashMap::new(),
            next_id: 1,
            dirty: BTreeMap::new(),
            unflushed: false,
            tentative: None,
            brought: BTreeSet::new(),
            next_to_go: (0, 0),
            stopped: None,
        }
    }

    pub(crate) fn render_bitmap(&self, index: u32, lsn: u64) -> Page {
        let id = PageId { kind: Kind::Bitmap, owner: 0, index };
        let mut page = Page::new(id, self.sb.store_id(), index);
        self.pages.part(index as usize, PAYLOAD, page.payload_mut());
        page.seal(lsn);
        page
    }

    /// Ends the use of the store in order: nothing is left to replay. Returns the device.
    ///
    /// # Errors
    /// [`Error::Metadata`]; what was acknowledged is in the journal all the same.
    pub fn close(mut self) -> Result<D, Error> {
        if self.stopped().is_none() && self.journal.used > 0 {
            self.checkpoint()?;
        }
        Ok(self.disk)
    }

    /// Deletes the store with everything in it. Returns the device.
    ///
    /// # Errors
    /// [`Error::Data`]: the store may be there or not.
    pub fn destroy(self) -> Result<D, Error> {
        let mut disk = self.disk;
        wipe_copies(&mut disk).map_err(Error::Data)?;
        Ok(disk)
    }

    /// Gives the store another name.
    ///
    /// # Errors
    /// [`Error::BadName`], [`Error::NameTooLong`], [`Error::Stopped`], [`Error::Metadata`].
    pub fn rename_store(&mut self, name: &str) -> Result<(), Error> {
        self.alive()?;
        check_name(name)?;
        self.sb.name = name.to_owned();
        self.write_superblock()
    }

    /// What the store is now.
    pub fn info(&self) -> StoreInfo {
        StoreInfo {
            uuid: self.sb.uuid,
            name: self.sb.name.clone(),
            cluster_size: self.sb.cluster_size,
            first_data_cluster: self.sb.first_data_cluster,
            data_clusters: self.clusters.len(),
            free_clusters: self.available(),
            free_pages: self.pages.free(),
            max_device_size: self.max_device_size(),
            version: self.sb.version,
            shares_clusters: self.sb.shares,
            stopped: self.stopped().map(|e| e.to_string()),
        }
    }

    /// The device, to read and write blobs' clusters beside the store. Writing anything else
    /// destroys the store.
    pub fn disk_mut(&mut self) -> &mut D {
        &mut self.disk
    }

    /// The failure after which the store takes no more changes, if there was one: also that of a flush
    /// which somebody else asked for, while there are changes that are not durable.
    pub fn stopped(&self) -> Option<DiskError> {
        let overtaken = || {
            let since = self.tentative.as_ref()?.failures;
            let cause = "one failed, and what changes stand on may be lost".into();
            let (offset, len, no_space) = (0, 0, false);
            let failed = DiskError { op: "flush", offset, len, cause, no_space };
            (self.disk.failed_flushes() != since).then_some(failed)
        };
        overtaken().or_else(|| self.stopped.clone())
    }

    /// Marks clusters as taken that no blob owns but somebody still uses, in a store that was just
    /// loaded. They are free after [`Store::release`]. One that has an owner, which a store that shares clusters
    /// may have, has one more until then.
    ///
    /// # Panics
    /// When one of them has an owner in another store, or is outside of the data area.
    pub fn hold(&mut self, clusters: impl IntoIterator<Item = u32>) -> Freed {
        let mut held = Freed::default();
        for cluster in clusters {
            let bit = u64::from(cluster) - self.sb.first_data_cluster;
            if self.clusters.set(bit) {
                self.zeros.take(bit);
            } else {
                let counted = self.sb.shares && self.owners.add(cluster);
                assert!(counted, "cluster {cluster} has an owner");
            }
            held.push(cluster);
        }
        held
    }

    /// Whether a cluster of the device belongs to no blob.
    pub fn is_free(&self, cluster: u32) -> bool {
        let bit = u64::from(cluster).checked_sub(self.sb.first_data_cluster);
        bit.is_some_and(|bit| bit < self.clusters.len() && !self.clusters.get(bit))
    }

    /// Refuses when an earlier failure stopped the store.
    pub(crate) fn alive(&self) -> Result<(), Error> {
        match self.stopped() {
            None => Ok(()),
            Some(cause) => Err(Error::Stopped { cause: cause.to_string() }),
        }
    }

    /// Stops the store when a metadata access failed.
    pub(crate) fn must<T>(&mut self, result: Result<T, DiskError>) -> Result<T, Error> {
        result.map_err(|e| {
            self.stopped.get_or_insert_with(|| e.clone());
            Error::Metadata(e)
        })
    }

    /// Stops the store because what it has cannot be read.
    pub(crate) fn stop(&mut self, why: &Error) -> Error {
        let (cause, no_space) = (why.to_string(), false);
        let failed = DiskError { op: "read", offset: 0, len: PAGE_SIZE as u64, cause, no_space };
        self.stopped.get_or_insert_with(|| failed.clone());
        Error::Metadata(failed)
    }

    /// Writes the superblock with the next generation: A, flush, B, flush.
    pub(crate) fn write_superblock(&mut self) -> Result<(), Error> {
        self.sb.generation += 1;
        let bytes = self.sb.encode();
        for copy in [COPY_A, COPY_B] {
            let written = self.disk.write(copy * PAGE_SIZE as u64, &bytes);
            let written = written.and_then(|()| self.disk.flush());
            self.must(written)?;
        }
        self.unflushed = false;
        Ok(())
    }

    /// Free metadata pages must be at least `needed`, worst case of the change that follows.
    pub(crate) fn need_pages(&self, needed: u64) -> Result<(), Error> {
        let free = self.pages.free();
        if free < needed { Err(Error::NoMetadataSpace { needed, free }) } else { Ok(()) }
    }

    /// Takes a metadata page; [`Store::need_pages`] was asked before.
    pub(crate) fn take_page(&mut self, txn: &mut Txn) -> u32 {
        let page = self.pages.take_lowest().expect("need_pages was asked") as u32;
        txn.fresh.insert(page);
        page
    }

    pub(crate) fn blob_mut(&mut self, blob: u64) -> &mut Blob {
        self.blobs.get_mut(&blob).expect("the caller looked it up")
    }
}

/// Writes zeros over both superblock copies, one after the other.
fn wipe_copies<D: Disk>(disk: &mut D) -> Result<(), DiskError> {
    for copy in [COPY_A, COPY_B] {
        disk.write(copy * PAGE_SIZE as u64, &[0; PAGE_SIZE])?;
        disk.flush()?;
    }
    Ok(())
}

/// Checks the name of a store or a blob.
pub(crate) fn check_name(name: &str) -> Result<(), Error> {
    if name.len() > NAME_MAX {
        return Err(Error::NameTooLong { name: name.to_owned(), len: name.len(), max: NAME_MAX });
    }
    match name_fault(name) {
        None => Ok(()),
        Some(why) => Err(Error::BadName { name: name.to_owned(), why }),
    }
}
