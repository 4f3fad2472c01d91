//! A power cut, or the end of the process, at every point of a workload.
//!
//! [`record`] runs a workload once on a disk that writes down every write and flush. [`cut`] then
//! makes, for a point in that list, what the medium may hold after the power fell there: all that was flushed,
//! and of the rest an arbitrary subset of 512-byte sectors. [`check`] loads that and compares it with
//! the model: each operation happened or did not, no cluster has two owners, flushed data is there,
//! and no blob shows data that was never its own. Where only the process ended, all is there that was
//! acknowledged, flushed or not.

use blobstore::{
    BlobId, BlobOptions, Disk, DiskError, Error, Freed, HOLE, HistoryOptions, Store, StoreOptions,
};
use std::cell::RefCell;
use std::collections::{BTreeMap, BTreeSet};
use std::rc::Rc;
use uuid::Uuid;

pub const SECTOR: usize = 512;
pub const CLUSTER: u32 = 64 << 10;
/// Sectors of a cluster.
pub const PER_CLUSTER: u64 = CLUSTER as u64 / SECTOR as u64;
/// 41 data clusters beside 1.4 MiB of metadata.
pub const DEVICE: usize = 4 << 20;
/// What the device can grow to: 24 data clusters more, and the half of one.
pub const GROWN: usize = DEVICE + 24 * CLUSTER as usize + CLUSTER as usize / 2;

/// A reproducible source of chance (xorshift64*).
pub struct Rng(pub u64);

impl Rng {
    pub fn new(seed: u64) -> Self {
        Rng(seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1)
    }
    pub fn next(&mut self) -> u64 {
        self.0 ^= self.0 >> 12;
        self.0 ^= self.0 << 25;
        self.0 ^= self.0 >> 27;
        self.0.wrapping_mul(0x2545_f491_4f6c_dd1d)
    }
    pub fn below(&mut self, n: u64) -> u64 {
        self.next() % n.max(1)
    }
}

/// Bytes that are copied when they are first changed.
const PAGE: usize = 4096;

/// The contents of a device. A clone shares what neither changes: thousands are made.
#[derive(Clone)]
pub struct Image {
    /// What of `base` the device has now.
    size: u64,
    base: Rc<Vec<u8>>,
    changed: BTreeMap<usize, Box<[u8; PAGE]>>,
}

impl Image {
    pub fn new(size: usize) -> Self {
        Image { size: size as u64, base: Rc::new(vec![0; size]), changed: BTreeMap::new() }
    }

    /// Makes room for a device of `size` bytes, which holds somebody else's data past its present end.
    pub fn reserve(&mut self, size: usize) {
        Rc::make_mut(&mut self.base).resize(size, 0xa5);
    }

    /// Folds the changes into the shared part, which nobody else uses now.
    fn fold(&mut self) {
        let base = Rc::make_mut(&mut self.base);
        for (page, bytes) in std::mem::take(&mut self.changed) {
            base[page * PAGE..(page + 1) * PAGE].copy_from_slice(&bytes[..]);
        }
    }

    /// Calls `f` with each page's bytes in the range and where they are in the range.
    fn change(&mut self, offset: usize, len: usize, mut f: impl FnMut(usize, &mut [u8])) {
        let mut at = offset;
        while at < offset + len {
            let (page, within) = (at / PAGE, at % PAGE);
            let n = (PAGE - within).min(offset + len - at);
            let base = &self.base[page * PAGE..(page + 1) * PAGE];
            let bytes = self
                .changed
                .entry(page)
                .or_insert_with(|| Box::new(base.try_into().expect("a page")));
            f(at - offset, &mut bytes[within..within + n]);
            at += n;
        }
    }
}

impl Disk for Image {
    fn size(&self) -> u64 {
        self.size
    }
    fn read(&mut self, offset: u64, buf: &mut [u8]) -> Result<(), DiskError> {
        let (offset, mut done) = (offset as usize, 0);
        while done < buf.len() {
            let (page, within) = ((offset + done) / PAGE, (offset + done) % PAGE);
            let n = (PAGE - within).min(buf.len() - done);
            let from = match self.changed.get(&page) {
                Some(bytes) => &bytes[within..within + n],
                None => &self.base[offset + done..offset + done + n],
            };
            buf[done..done + n].copy_from_slice(from);
            done += n;
        }
        Ok(())
    }
    fn write(&mut self, offset: u64, buf: &[u8]) -> Result<(), DiskError> {
        self.change(offset as usize, buf.len(), |at, to| {
            to.copy_from_slice(&buf[at..at + to.len()]);
        });
        Ok(())
    }
    fn write_zeroes(&mut self, offset: u64, len: u64) -> Result<(), DiskError> {
        self.change(offset as usize, len as usize, |_, to| to.fill(0));
        Ok(())
    }
    fn flush(&mut self) -> Result<(), DiskError> {
        Ok(())
    }
}

#[derive(Clone, Debug)]
pub enum Event {
    Write(u64, Vec<u8>),
    Zero(u64, u64),
    Flush,
    /// An operation was acknowledged.
    Mark,
}

/// A disk that writes down what was done to it.
#[derive(Clone)]
pub struct TraceDisk {
    now: Image,
    boot: u128,
    pub trace: Rc<RefCell<Vec<Event>>>,
}

/// The boot in which a workload runs, and the one after the power failed.
pub const BOOT: u128 = 1;
pub const NEXT_BOOT: u128 = 2;

/// What is outside of the store, and what its sectors hold.
pub const EXTERNAL: Uuid = Uuid::from_u128(0xe001);
fn external_tag(sector: u64) -> u64 {
    (1 << 40) + sector
}

impl TraceDisk {
    pub fn new(now: Image, boot: u128) -> Self {
        TraceDisk { now, boot, trace: Rc::default() }
    }
}

impl Disk for TraceDisk {
    fn size(&self) -> u64 {
        self.now.size()
    }
    fn read(&mut self, offset: u64, buf: &mut [u8]) -> Result<(), DiskError> {
        self.now.read(offset, buf)
    }
    fn write(&mut self, offset: u64, buf: &[u8]) -> Result<(), DiskError> {
        self.trace.borrow_mut().push(Event::Write(offset, buf.to_vec()));
        self.now.write(offset, buf)
    }
    fn write_zeroes(&mut self, offset: u64, len: u64) -> Result<(), DiskError> {
        self.trace.borrow_mut().push(Event::Zero(offset, len));
        self.now.write_zeroes(offset, len)
    }
    fn read_external(
        &mut self,
        parent: Uuid,
        offset: u64,
        buf: &mut [u8],
    ) -> Result<(), DiskError> {
        assert_eq!(parent, EXTERNAL);
        let first = offset / SECTOR as u64;
        for (sector, bytes) in (first..).zip(buf.chunks_exact_mut(SECTOR)) {
            bytes.copy_from_slice(&sectors(external_tag(sector), 1));
        }
        Ok(())
    }
    /// An unmap is a write of zeros, as to a power cut, too.
    fn unmap(&mut self, offset: u64, len: u64) -> Result<(), DiskError> {
        self.write_zeroes(offset, len)
    }
    fn unmap_zeroes(&self) -> bool {
        true
    }
    fn flush(&mut self) -> Result<(), DiskError> {
        self.trace.borrow_mut().push(Event::Flush);
        self.now.flush()
    }
    fn boot(&self) -> Option<u128> {
        Some(self.boot)
    }
}

/// One step of a workload. Blobs are named by their serial number in the workload.
#[derive(Clone, Debug)]
pub enum Step {
    Create {
        serial: u32,
        size: u64,
        thin: bool,
    },
    /// A thick one with these xattrs.
    CreateWith {
        serial: u32,
        size: u64,
        xattrs: BTreeMap<String, Vec<u8>>,
    },
    Delete(u32),
    Resize(u32, u64),
    Rename(u32, String),
    SetXattr(u32, String, Vec<u8>),
    RemoveXattr(u32, String),
    /// First sector and number of sectors.
    Write(u32, u64, u64),
    /// First cluster and number of clusters.
    Unmap(u32, u64, u64),
    /// In one record: clusters (blob, first, count) to unmap, and to allocate.
    Together(Vec<(u32, u64, u64)>, Vec<(u32, u64, u64)>),
    /// At one instant: of each of the first the second.
    Snapshot(Vec<(u32, u32)>),
    /// Of the first the second.
    Clone(u32, u32),
    /// Of what is outside of the store, with a size in clusters.
    CloneExternal(u32, u64),
    /// Gives a blob all that it lacks, or only what its parent itself has, and takes the parent from it.
    Detach(u32, bool),
    /// At one instant: each first to the snapshot that is the second.
    RollBack(Vec<(u32, u32)>),
    /// The first a clone of the second, whatever it was of.
    SetParent(u32, u32),
    /// The same, of what is outside of the store and has so many clusters.
    SetParentExternal(u32, u64),
    ReadOnly(u32),
    /// The store shares clusters from now on.
    ShareClusters,
    /// Clusters of the first, from that one on, for so many of the second from that one on.
    Share((u32, u64), (u32, u64), u64),
    Sync,
    RenameStore(String),
    /// Clusters that the device gains before the store takes them over.
    Grow(u64),
}

/// What a blob is, apart from its contents.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Face {
    pub name: String,
    pub size: u64,
    pub thin: bool,
    pub snapshot: bool,
    pub read_only: bool,
    pub parent: Option<Uuid>,
    pub external: Option<Uuid>,
    pub xattrs: BTreeMap<String, Vec<u8>>,
}

/// The store's name, the faces of all blobs, and the data clusters.
pub type State = (String, BTreeMap<Uuid, Face>, u64);

/// From when on a sector may have, and from when on it has, some contents, whatever ends: the process
/// alone, or the power. In trace positions.
#[derive(Clone, Copy, Debug)]
struct Version {
    possible: usize,
    acknowledged: usize,
    sure: usize,
    tag: u64,
}

/// A workload that ran, and what may be found after a cut anywhere in it.
pub struct Recorded {
    pub before: Image,
    pub trace: Vec<Event>,
    /// The state after so many acknowledged operations.
    pub states: Vec<State>,
    /// By blob and sector.
    versions: BTreeMap<(Uuid, u64), Vec<Version>>,
}

pub fn uuid_of(serial: u32) -> Uuid {
    Uuid::from_u128(0xb10b_0000 + u128::from(serial))
}

/// A device with an empty store on it.
pub fn empty_store() -> Image {
    let options =
        StoreOptions { name: "lvs".into(), uuid: Uuid::from_u128(1), cluster_size: CLUSTER };
    let mut image = Store::create_store(Image::new(DEVICE), &options).unwrap().close().unwrap();
    image.reserve(GROWN);
    image
}

pub fn state_of<D: Disk>(store: &Store<D>) -> State {
    let faces = store.blobs().map(|b| {
        let xattrs = store.xattrs(b.id).unwrap().into_iter();
        let xattrs = xattrs.map(|n| (n.clone(), store.xattr(b.id, &n).unwrap().to_vec())).collect();
        let parent = b.parent.map(|parent| store.blob(parent).unwrap().uuid);
        let (size, thin, snapshot, external) = (b.size, b.thin, b.snapshot, b.external);
        let (name, read_only) = (b.name, b.read_only);
        (b.uuid, Face { name, size, thin, snapshot, read_only, parent, external, xattrs })
    });
    let info = store.info();
    (info.name, faces.collect(), info.data_clusters)
}

fn sectors(tag: u64, count: u64) -> Vec<u8> {
    tag.to_le_bytes().repeat(SECTOR / 8 * count as usize)
}

/// Runs `steps`, of which those that cannot be done (no room, no such blob) do nothing.
pub fn record(before: Image, steps: &[Step]) -> Recorded {
    let disk = TraceDisk::new(before.clone(), BOOT);
    let trace = disk.trace.clone();
    let mut store = Store::load(disk).unwrap();
    let mut states = vec![state_of(&store)];
    let mut versions: BTreeMap<(Uuid, u64), Vec<Version>> = BTreeMap::new();
    let mut tag = 0;
    for step in steps {
        let start = trace.borrow().len();
        let done = run(&mut store, step, &mut tag);
        trace.borrow_mut().push(Event::Mark);
        let mark = trace.borrow().len();
        states.push(state_of(&store));
        if done.is_err() {
            continue;
        }
        let mut version = |serial: u32, range: std::ops::Range<u64>, sure: usize, tag: u64| {
            for sector in range {
                let v = versions.entry((uuid_of(serial), sector)).or_default();
                v.push(Version { possible: start, acknowledged: mark, sure, tag });
            }
        };
        match step {
            // Its durability comes with the next flush; patched below.
            Step::Write(serial, first, count) => {
                version(*serial, *first..first + count, usize::MAX, tag);
            }
            Step::Unmap(serial, first, count) => {
                version(*serial, first * PER_CLUSTER..(first + count) * PER_CLUSTER, mark, 0);
            }
            Step::Together(unmaps, _) => {
                for (serial, first, count) in unmaps {
                    let sectors = first * PER_CLUSTER..(first + count) * PER_CLUSTER;
                    version(*serial, sectors, mark, 0);
                }
            }
            Step::Resize(serial, size) => {
                version(*serial, size * PER_CLUSTER..64 * PER_CLUSTER, mark, 0);
            }
            Step::Snapshot(all) => {
                for (serial, snapshot) in all {
                    history(&mut versions, *serial, *snapshot);
                }
            }
            Step::RollBack(all) => {
                for (serial, snapshot) in all {
                    let of = |uuid: Uuid| move |((of, _), _): &(&(Uuid, u64), _)| *of == uuid;
                    let sectors: BTreeSet<u64> = versions
                        .iter()
                        .filter(|e| of(uuid_of(*serial))(e) || of(uuid_of(*snapshot))(e))
                        .map(|((_, sector), _)| *sector)
                        .collect();
                    for sector in sectors {
                        let there = versions.get(&(uuid_of(*snapshot), sector));
                        let tag = there.and_then(|all| all.last()).map_or(0, |v| v.tag);
                        let v = versions.entry((uuid_of(*serial), sector)).or_default();
                        v.push(Version { possible: start, acknowledged: mark, sure: mark, tag });
                    }
                }
            }
            Step::CloneExternal(serial, size) => {
                for sector in 0..size * PER_CLUSTER {
                    version(*serial, sector..sector + 1, mark, external_tag(sector));
                }
            }
            Step::Clone(snapshot, serial) => history(&mut versions, *snapshot, *serial),
            Step::Share((from, first), (to, at), count) => {
                let tag = |sector| {
                    let all = versions.get(&(uuid_of(*from), first * PER_CLUSTER + sector));
                    all.and_then(|all| all.last()).map_or(0, |v| v.tag)
                };
                let tags: Vec<u64> = (0..count * PER_CLUSTER).map(tag).collect();
                for (sector, tag) in (at * PER_CLUSTER..).zip(tags) {
                    let v = versions.entry((uuid_of(*to), sector)).or_default();
                    v.push(Version { possible: start, acknowledged: mark, sure: mark, tag });
                }
            }
            Step::SetParent(serial, parent) => {
                for sector in lacking(&mut store, *serial) {
                    let shown =
                        versions.get(&(uuid_of(*parent), sector)).and_then(|all| all.last());
                    let tag = shown.map_or(0, |v| v.tag);
                    let v = versions.entry((uuid_of(*serial), sector)).or_default();
                    v.push(Version { possible: start, acknowledged: mark, sure: mark, tag });
                }
            }
            Step::SetParentExternal(serial, _) => {
                for sector in lacking(&mut store, *serial) {
                    version(*serial, sector..sector + 1, mark, external_tag(sector));
                }
            }
            _ => {}
        }
        if matches!(step, Step::Sync | Step::Snapshot(_) | Step::Share(..)) {
            for v in versions.values_mut().flatten().filter(|v| v.sure == usize::MAX) {
                v.sure = mark;
            }
        }
    }
    drop(store);
    let trace = Rc::try_unwrap(trace).unwrap().into_inner();
    Recorded { before, trace, states, versions }
}

/// The second blob has had what the first one has.
fn history(versions: &mut BTreeMap<(Uuid, u64), Vec<Version>>, from: u32, to: u32) {
    let all = versions.iter().filter(|((uuid, _), _)| *uuid == uuid_of(from));
    let copies: Vec<_> = all.map(|((_, sector), v)| ((uuid_of(to), *sector), v.clone())).collect();
    versions.extend(copies);
}

/// The sectors of a blob in clusters that it has not itself.
fn lacking(store: &mut Store<TraceDisk>, serial: u32) -> Vec<u64> {
    let blob = store.blobs().find(|blob| blob.uuid == uuid_of(serial)).expect("a blob");
    let own = store.clusters(blob.id).unwrap().filter(|(_, cluster)| *cluster != HOLE);
    let own: BTreeSet<u64> = own.map(|(at, _)| at).collect();
    (0..blob.size * PER_CLUSTER).filter(|sector| !own.contains(&(sector / PER_CLUSTER))).collect()
}

fn named(serial: u32) -> HistoryOptions {
    let xattrs = BTreeMap::from([("made".to_owned(), vec![serial as u8; 2100])]);
    HistoryOptions { name: format!("blob{serial}"), uuid: uuid_of(serial), xattrs }
}

fn detach(store: &mut Store<TraceDisk>, id: BlobId, all: bool) -> Result<(), Error> {
    loop {
        let lacking = store.lacking(id, all, 0, 3)?;
        if lacking.is_empty() {
            return store.detach(id, all);
        }
        store.supply(id, &lacking)?;
    }
}

fn run(store: &mut Store<TraceDisk>, step: &Step, tag: &mut u64) -> Result<(), Error> {
    let id = |store: &Store<TraceDisk>, serial: u32| {
        store.by_uuid(uuid_of(serial)).ok_or(Error::NoBlob { id: u64::from(serial) })
    };
    match step {
        Step::Create { serial, size, thin } => {
            let options = BlobOptions {
                dif: None,
                name: format!("blob{serial}"),
                uuid: uuid_of(*serial),
                size: *size,
                thin: *thin,
                xattrs: Default::default(),
            };
            store.create(&options).map(drop)
        }
        Step::CreateWith { serial, size, xattrs } => {
            let options = BlobOptions {
                dif: None,
                name: format!("blob{serial}"),
                uuid: uuid_of(*serial),
                size: *size,
                thin: false,
                xattrs: xattrs.clone(),
            };
            store.create(&options).map(drop)
        }
        Step::Delete(serial) => {
            let deleted = store.delete(id(store, *serial)?)?;
            release(store, deleted.freed);
            Ok(())
        }
        Step::Snapshot(all) => {
            let all: Result<Vec<_>, Error> = all
                .iter()
                .map(|(serial, snapshot)| Ok((id(store, *serial)?, named(*snapshot))))
                .collect();
            store.snapshot(&all?).map(drop)
        }
        Step::Clone(snapshot, serial) => {
            store.clone_of(id(store, *snapshot)?, &named(*serial)).map(drop)
        }
        Step::CloneExternal(serial, size) => {
            store.clone_external(EXTERNAL, *size, &named(*serial)).map(drop)
        }
        Step::RollBack(all) => {
            let all: Result<Vec<_>, Error> =
                all.iter().map(|(serial, to)| Ok((id(store, *serial)?, id(store, *to)?))).collect();
            let freed = store.roll_back(&all?)?;
            release(store, freed);
            Ok(())
        }
        Step::SetParent(serial, parent) => {
            store.set_parent(id(store, *serial)?, id(store, *parent)?)
        }
        Step::SetParentExternal(serial, size) => {
            store.set_external_parent(id(store, *serial)?, EXTERNAL, *size)
        }
        Step::ReadOnly(serial) => store.set_read_only(id(store, *serial)?),
        Step::ShareClusters => store.share_clusters(),
        Step::Share((from, first), (to, at), count) => {
            let shared = store.share(id(store, *from)?, *first, id(store, *to)?, *at, *count)?;
            release(store, shared.freed);
            Ok(())
        }
        Step::Detach(serial, all) => detach(store, id(store, *serial)?, *all),
        Step::Resize(serial, size) => {
            let freed = store.resize(id(store, *serial)?, *size)?;
            release(store, freed);
            Ok(())
        }
        Step::Rename(serial, name) => store.rename(id(store, *serial)?, name),
        Step::SetXattr(serial, name, value) => store.set_xattr(id(store, *serial)?, name, value),
        Step::RemoveXattr(serial, name) => store.remove_xattr(id(store, *serial)?, name),
        Step::Write(serial, first, count) => {
            *tag += 1;
            let id = id(store, *serial)?;
            store.write(id, first * SECTOR as u64, &sectors(*tag, *count))
        }
        Step::Unmap(serial, first, count) => {
            let freed = store.unmap(id(store, *serial)?, *first, *count)?;
            release(store, freed);
            Ok(())
        }
        Step::Together(unmaps, allocations) => together(store, unmaps, allocations),
        Step::Sync => store.sync(),
        Step::RenameStore(name) => store.rename_store(name),
        Step::Grow(clusters) => {
            let now = &mut store.disk_mut().now;
            now.size = (now.size + clusters * u64::from(CLUSTER)).min(GROWN as u64);
            store.grow().map(drop)
        }
    }
}

/// Frees clusters that were lost, unmapped first.
fn release(store: &mut Store<TraceDisk>, freed: Freed) {
    freed.runs().iter().for_each(|run| store.discard(*run).unwrap());
    store.release(freed);
}

/// One batch of unmaps and allocations; those that cannot be done make it do nothing.
fn together(
    store: &mut Store<TraceDisk>,
    unmaps: &[(u32, u64, u64)],
    allocations: &[(u32, u64, u64)],
) -> Result<(), Error> {
    let mut batch = store.batch();
    let added = (|| {
        for (serial, first, count) in unmaps {
            let id = store.by_uuid(uuid_of(*serial)).ok_or(Error::NoBlob { id: 0 })?;
            assert_eq!(store.add_unmap(&mut batch, id, *first, *count)?, *count);
        }
        for (serial, first, count) in allocations {
            let id = store.by_uuid(uuid_of(*serial)).ok_or(Error::NoBlob { id: 0 })?;
            for cluster in *first..first + count {
                assert!(store.add_allocation(&mut batch, id, cluster)?);
            }
        }
        Ok(())
    })();
    if let Err(e) = added {
        store.drop_batch(batch);
        return Err(e);
    }
    let done = store.commit_batch(batch);
    done.replaced.into_iter().for_each(|(_, freed)| release(store, freed));
    for lost in done.unmapped? {
        release(store, lost.freed);
    }
    done.allocated.map(drop)
}

/// What the medium may hold when the power falls after `at` events: flushed events wholly, of the
/// later ones each sector with `chance` in 8.
pub fn cut(before: &Image, trace: &[Event], at: usize, chance: u64, rng: &mut Rng) -> Image {
    let mut image = before.clone();
    let flushed = trace[..at].iter().rposition(|e| matches!(e, Event::Flush)).unwrap_or(0);
    for event in &trace[..flushed] {
        apply(&mut image, event, 8, rng);
    }
    for event in &trace[flushed..at] {
        apply(&mut image, event, chance, rng);
    }
    image
}

/// A write's pages, each a write of its own; one of a cluster or more is one.
fn pages_of(event: &Event) -> Vec<Event> {
    match event {
        Event::Write(offset, bytes) if bytes.len() < CLUSTER as usize => bytes
            .chunks(PAGE)
            .enumerate()
            .map(|(n, page)| Event::Write(offset + (n * PAGE) as u64, page.to_vec()))
            .collect(),
        Event::Flush | Event::Mark => vec![],
        whole => vec![whole.clone()],
    }
}

fn apply(image: &mut Image, event: &Event, chance: u64, rng: &mut Rng) {
    let (offset, len) = match event {
        Event::Write(offset, bytes) => (*offset as usize, bytes.len()),
        Event::Zero(offset, len) => (*offset as usize, *len as usize),
        Event::Flush | Event::Mark => return,
    };
    if chance == 0 {
        return;
    }
    image.change(offset, len, |at, to| {
        for (i, sector) in to.chunks_mut(SECTOR).enumerate() {
            if chance < 8 && rng.below(8) >= chance {
                continue;
            }
            match event {
                Event::Write(_, bytes) => {
                    let from = at + i * SECTOR;
                    sector.copy_from_slice(&bytes[from..from + sector.len()]);
                }
                _ => sector.fill(0),
            }
        }
    });
}

impl Recorded {
    /// Cuts the power at every event, several ways each, and ends the process there; `Err` says where.
    pub fn survives_every_cut(&self, seed: u64) -> Result<(), String> {
        // Flushed prefixes are applied once, as the cut moves on.
        let mut durable = self.before.clone();
        let mut flushed = 0;
        for at in 0..=self.trace.len() {
            if at > 0 && matches!(self.trace[at - 1], Event::Flush) {
                for event in &self.trace[flushed..at] {
                    apply(&mut durable, event, 8, &mut Rng::new(0));
                }
                durable.fold();
                flushed = at;
            }
            // None, all, and some of the sectors that were not flushed.
            let pending = at > flushed && !matches!(self.trace[at - 1], Event::Mark);
            let chances: &[u64] = if pending { &[0, 8, 2, 4, 7] } else { &[0] };
            for (i, chance) in chances.iter().enumerate() {
                let mut rng = Rng::new(seed ^ (at as u64) << 8 ^ i as u64);
                let image = cut(&durable, &self.trace[flushed..], at - flushed, *chance, &mut rng);
                self.check(image, at, NEXT_BOOT, i == 2 && at % 3 == 0).map_err(|why| {
                    format!("power cut after event {at} of {}, {chance}/8 of the unflushed sectors written: {why}", self.trace.len())
                })?;
            }
            let image = cut(&durable, &self.trace[flushed..], at - flushed, 8, &mut Rng::new(0));
            self.check(image, at, BOOT, at % 11 == 0).map_err(|why| {
                format!("end of the process after event {at} of {}: {why}", self.trace.len())
            })?;
        }
        Ok(())
    }

    /// Cuts the power at every event after the first `prefix` operations, with every subset of the pages that
    /// were not flushed (of the cluster-sized writes: whole), or `most` of them by chance where there are
    /// more. Returns how many images were tried.
    pub fn survives_every_subset(&self, prefix: usize, most: u64) -> Result<u64, String> {
        let marks = self.trace.iter().enumerate().filter(|(_, e)| matches!(e, Event::Mark));
        let begin = marks.take(prefix).last().map_or(0, |(at, _)| at + 1);
        let (mut tried, mut rng) = (0, Rng::new(prefix as u64));
        for at in begin..=self.trace.len() {
            let is_flush = |e: &Event| matches!(e, Event::Flush);
            let flushed = self.trace[..at].iter().rposition(is_flush).map_or(0, |at| at + 1);
            let parts: Vec<Event> = self.trace[flushed..at].iter().flat_map(pages_of).collect();
            // Without a new write there is nothing new to lose.
            if at > begin && !matches!(self.trace[at - 1], Event::Write(..) | Event::Zero(..)) {
                continue;
            }
            let mut durable = self.before.clone();
            for event in &self.trace[..flushed] {
                apply(&mut durable, event, 8, &mut rng);
            }
            durable.fold();
            let all = 1u64.checked_shl(parts.len() as u32).unwrap_or(u64::MAX);
            for n in 0..all.min(most) {
                let subset = if all <= most { n } else { rng.next() };
                let mut image = durable.clone();
                for (bit, part) in parts.iter().enumerate() {
                    if subset >> (bit % 64) & 1 == 1 {
                        apply(&mut image, part, 8, &mut rng);
                    }
                }
                self.check(image, at, NEXT_BOOT, false).map_err(|why| {
                    format!(
                        "power cut after event {at}, subset {subset:#x} of {} pages: {why}",
                        parts.len()
                    )
                })?;
                tried += 1;
            }
        }
        Ok(tried)
    }

    /// Loads an image made by a cut after `at` events, in this boot, and compares it with what may be
    /// there.
    pub fn check(
        &self,
        mut image: Image,
        at: usize,
        boot: u128,
        thorough: bool,
    ) -> Result<(), String> {
        // The device keeps what it gained, and may have gained more before the store is loaded again.
        image.size = GROWN as u64;
        let acked = self.trace[..at].iter().filter(|e| matches!(e, Event::Mark)).count();
        let disk = TraceDisk::new(image.clone(), boot);
        let load_trace = disk.trace.clone();
        let mut store = Store::load(disk).map_err(|e| e.to_string())?;
        if at.is_multiple_of(2) {
            store.let_go_all();
        }
        let state = state_of(&store);
        let (this, next) = (&self.states[acked], self.states.get(acked + 1));
        if state != *this && Some(&state) != next {
            return Err(format!("{state:?} is neither {this:?} nor {next:?}"));
        }
        self.check_contents(&mut store, at, boot == BOOT)?;
        check_owners(&mut store)?;
        if thorough {
            // The power falls again while the store loads.
            let loading = load_trace.borrow().clone();
            let mut rng = Rng::new(at as u64);
            for again in 0..=loading.len() {
                let image = cut(&image, &loading, again, 4, &mut rng);
                let store = Store::load(image).map_err(|e| format!("second load: {e}"))?;
                if state_of(&store) != state {
                    return Err(format!("after {again} events of a second load it is another"));
                }
            }
            return check_goes_on(store);
        }
        Ok(())
    }

    fn check_contents<D: Disk>(
        &self,
        store: &mut Store<D>,
        at: usize,
        same_boot: bool,
    ) -> Result<(), String> {
        let sure = |v: &Version| if same_boot { v.acknowledged } else { v.sure };
        let blobs: Vec<_> = store.blobs().collect();
        for blob in blobs {
            let mut bytes = vec![0; (blob.size * u64::from(CLUSTER)) as usize];
            store.read(blob.id, 0, &mut bytes).map_err(|e| e.to_string())?;
            for (sector, found) in bytes.chunks_exact(SECTOR).enumerate() {
                let tag = u64::from_le_bytes(found[..8].try_into().unwrap());
                if found.chunks_exact(8).any(|w| w != &found[..8]) {
                    return Err(format!("sector {sector} of {} is mixed", blob.name));
                }
                let all = self.versions.get(&(blob.uuid, sector as u64));
                let all = all.map(Vec::as_slice).unwrap_or_default();
                let base = all.iter().rposition(|v| sure(v) <= at);
                let may = &all[base.unwrap_or(0)..];
                let zero = base.is_none() && tag == 0;
                if !zero && !may.iter().any(|v| v.possible <= at && v.tag == tag) {
                    return Err(format!(
                        "sector {sector} of {} has {tag}, not of {may:?}",
                        blob.name
                    ));
                }
            }
        }
        Ok(())
    }
}

fn check_owners<D: Disk>(store: &mut Store<D>) -> Result<(), String> {
    let (mut seen, mut owned) = (BTreeSet::new(), 0);
    let blobs: Vec<BlobId> = store.blobs().map(|b| b.id).collect();
    let info = store.info();
    for id in blobs {
        let all: Vec<(u64, u32)> = store.clusters(id).unwrap().collect();
        for (_, cluster) in all.into_iter().filter(|(_, cluster)| *cluster != HOLE) {
            owned += 1;
            let may = info.shares_clusters && store.is_shared(cluster);
            if !seen.insert(cluster) && !may {
                return Err(format!("cluster {cluster} has two owners"));
            }
        }
    }
    if owned + info.free_clusters != info.data_clusters {
        return Err(format!(
            "{owned} clusters owned and {} free of {}",
            info.free_clusters, info.data_clusters
        ));
    }
    Ok(())
}

/// The recovered store takes over the whole device and a blob of all that is free; it is zero, writable and there after a load.
fn check_goes_on(mut store: Store<TraceDisk>) -> Result<(), String> {
    let grown = store.info().data_clusters < 41 + 24;
    if store.grow() != Ok(grown) || store.info().data_clusters != 41 + 24 {
        return Err(format!("it did not grow to the device: {:?}", store.info()));
    }
    let size = store.info().free_clusters;
    let options = BlobOptions {
        dif: None,
        name: "after".into(),
        uuid: Uuid::from_u128(2),
        size,
        thin: false,
        xattrs: Default::default(),
    };
    let id = store.create(&options).map_err(|e| format!("create after the cut: {e}"))?;
    let mut bytes = vec![1; (size * u64::from(CLUSTER)) as usize];
    store.read(id, 0, &mut bytes).map_err(|e| e.to_string())?;
    if bytes.iter().any(|b| *b != 0) {
        return Err("a new blob shows what was there before".into());
    }
    let expected = state_of(&store);
    // Not closed: everything acknowledged is in the journal.
    let trace = store.disk_mut().trace.clone();
    let image = store.disk_mut().now.clone();
    drop((store, trace));
    let mut store = Store::load(image).map_err(|e| format!("load after going on: {e}"))?;
    if state_of(&store) != expected {
        return Err("what was done after the cut is not there".into());
    }
    check_owners(&mut store)
}

/// A workload of `len` steps from a seed.
pub fn random_steps(seed: u64, len: usize) -> Vec<Step> {
    let mut rng = Rng::new(seed);
    let mut next_serial = 0;
    let mut steps = Vec::new();
    for _ in 0..len {
        let any = rng.below(u64::from(next_serial.max(1))) as u32;
        // Rather recent ones: they are more likely to exist.
        let serial = any.max(rng.below(u64::from(next_serial.max(1))) as u32);
        steps.push(match rng.below(37) {
            0..=3 => {
                next_serial += 1;
                let thin = rng.below(2) == 0;
                Step::Create { serial: next_serial - 1, size: rng.below(12), thin }
            }
            4 | 5 => Step::Delete(serial),
            6 | 7 => Step::Resize(serial, rng.below(14)),
            8 => Step::Rename(serial, format!("name{}", rng.below(5))),
            9 => Step::SetXattr(
                serial,
                format!("x{}", rng.below(4)),
                vec![rng.below(256) as u8; rng.below(3000) as usize],
            ),
            10 => Step::RemoveXattr(serial, format!("x{}", rng.below(4))),
            11 => Step::Unmap(serial, rng.below(8), 1 + rng.below(4)),
            12 | 13 => Step::Sync,
            14 => Step::RenameStore(format!("lvs{}", rng.below(3))),
            20 => Step::Grow(rng.below(5)),
            21 | 22 => {
                let mut some = || -> Vec<(u32, u64, u64)> {
                    let any = 0..1 + rng.below(4);
                    any.map(|_| {
                        let serial = rng.below(u64::from(next_serial.max(1))) as u32;
                        (serial, rng.below(6), 1 + rng.below(3))
                    })
                    .collect()
                };
                Step::Together(some(), some())
            }
            23..=25 => {
                next_serial += 2;
                Step::Snapshot(match rng.below(3) {
                    0 => vec![(serial, next_serial - 1), (any, next_serial - 2)],
                    _ => vec![(serial, next_serial - 1)],
                })
            }
            26 | 27 => {
                next_serial += 1;
                Step::Clone(any, next_serial - 1)
            }
            33 => {
                next_serial += 1;
                Step::CloneExternal(next_serial - 1, rng.below(9))
            }
            28 => Step::Detach(serial, rng.below(2) == 0),
            29 => Step::Delete(any),
            30 => Step::RollBack(vec![(any, serial)]),
            31 => Step::RollBack(vec![(serial, any)]),
            32 => {
                let mut some = || rng.below(u64::from(next_serial.max(1))) as u32;
                Step::RollBack(vec![(serial, some()), (any, some())])
            }
            34 => Step::SetParent(serial, any),
            35 => Step::SetParentExternal(serial, rng.below(9)),
            36 if rng.below(3) == 0 => Step::ReadOnly(any),
            _ => Step::Write(serial, rng.below(8 * PER_CLUSTER), 1 + rng.below(2 * PER_CLUSTER)),
        });
    }
    steps
}
