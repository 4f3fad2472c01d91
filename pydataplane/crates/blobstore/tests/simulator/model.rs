//! What a store should hold: blobs with their sectors, and what of those may be lost.

use super::device::{Rng, SECTOR};
use super::ops::{Op, Range};
use blobstore::{Disk, HOLE, Store};
use std::collections::{BTreeMap, BTreeSet};
use std::rc::Rc;
use uuid::Uuid;

/// Bytes of a cluster.
pub const CLUSTER: u64 = 64 << 10;
/// Sectors of a cluster.
pub const PER_CLUSTER: u64 = CLUSTER / SECTOR as u64;

/// The identity of the blob with that number in a run.
pub fn uuid_of(serial: u32) -> Uuid {
    Uuid::from_u128(0xb10b_0000 + u128::from(serial))
}

/// What a blob is, apart from its contents.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Face {
    pub name: String,
    pub size: u64,
    pub thin: bool,
    pub read_only: bool,
    pub snapshot: bool,
    pub parent: Option<Uuid>,
    pub external: Option<Uuid>,
    pub xattrs: BTreeMap<String, Vec<u8>>,
}

/// A sector of a blob.
#[derive(Clone, Debug, Default)]
struct Cell {
    /// What was written last; 0: zeros.
    last: u64,
    /// What it may have instead after a power cut.
    older: Vec<u64>,
    /// A flush failed since: whatever is read is not surely there.
    unsure: bool,
}

type Cells = BTreeMap<u64, Cell>;

/// All that a store holds.
#[derive(Clone, Debug)]
pub struct Model {
    pub name: String,
    pub version: u32,
    /// Clusters for data.
    pub clusters: u64,
    pub faces: BTreeMap<Uuid, Face>,
    /// By blob; a sector that is not there is zeros.
    cells: BTreeMap<Uuid, Rc<Cells>>,
}

/// The word that fills sector `sector` in write number `write` of a run.
pub fn tag(write: u32, sector: u64) -> u64 {
    u64::from(write) << 32 | sector
}

/// What is outside of the store.
pub const EXTERNAL: Uuid = Uuid::from_u128(0xe001);

/// The word that fills a sector of that.
pub fn external_word(sector: u64) -> u64 {
    1 << 63 | sector
}

/// A sector of a blob that shows what is outside of the store.
fn external_cell(sector: u64) -> (u64, Cell) {
    (sector, Cell { last: external_word(sector), ..Cell::default() })
}

impl Model {
    /// What `store`, without any blob, holds.
    pub fn of<D: Disk>(store: &Store<D>) -> Model {
        let info = store.info();
        assert_eq!(store.blobs().count(), 0);
        let (faces, cells) = (BTreeMap::new(), BTreeMap::new());
        let (name, version, clusters) = (info.name, info.version, info.data_clusters);
        Model { name, version, clusters, faces, cells }
    }

    /// Those whose parent `uuid` is.
    pub fn clones(&self, uuid: Uuid) -> impl Iterator<Item = Uuid> + '_ {
        self.faces.iter().filter(move |(_, f)| f.parent == Some(uuid)).map(|(uuid, _)| *uuid)
    }

    fn cells_mut(&mut self, uuid: Uuid) -> &mut Cells {
        Rc::make_mut(self.cells.entry(uuid).or_default())
    }

    /// Sectors of a blob read as zeros from now on, surely.
    fn drop_cells(&mut self, uuid: Uuid, range: std::ops::Range<u64>) {
        self.cells_mut(uuid).retain(|sector, _| !range.contains(sector));
    }

    /// As [`Model::drop_cells`], or as before.
    fn perhaps_drop_cells(&mut self, uuid: Uuid, range: std::ops::Range<u64>) {
        for (_, cell) in self.cells_mut(uuid).range_mut(range) {
            let last = std::mem::take(&mut cell.last);
            cell.older.push(last);
            cell.unsure = true;
        }
    }

    fn face_mut(&mut self, serial: u32) -> Option<&mut Face> {
        self.faces.get_mut(&uuid_of(serial))
    }

    /// Does what `op` does if it succeeds; `owned`: what the blob has of its own. Without `whole` it may
    /// have done a part.
    pub fn apply(&mut self, op: &Op, owned: &BTreeSet<u64>, whole: bool) {
        let sectors = |first: u64, count: u64| first * PER_CLUSTER..(first + count) * PER_CLUSTER;
        match op {
            Op::Create { serial, size, thin, xattrs, .. } => {
                let name = format!("blob{serial}");
                let (size, thin, xattrs) = (*size, *thin, xattrs.clone());
                let (read_only, snapshot, parent, external) = (false, false, None, None);
                let face = Face { name, size, thin, read_only, snapshot, parent, external, xattrs };
                self.faces.insert(uuid_of(*serial), face);
            }
            Op::Delete(serial) => {
                let uuid = uuid_of(*serial);
                let Some(gone) = self.faces.remove(&uuid) else { return };
                let clones: Vec<_> = self.clones(uuid).collect();
                for clone in clones {
                    let heir = self.faces.get_mut(&clone).expect("found");
                    (heir.parent, heir.external) = (gone.parent, gone.external);
                }
                self.cells.remove(&uuid);
            }
            Op::Resize { serial, size, .. } => {
                if let Some(face) = self.face_mut(*serial) {
                    face.size = *size;
                    self.drop_cells(uuid_of(*serial), size * PER_CLUSTER..u64::MAX);
                }
            }
            Op::Rename(serial, name) => {
                if let Some(face) = self.face_mut(*serial) {
                    face.name.clone_from(name);
                }
            }
            Op::SetXattr(serial, name, value) => {
                if let Some(face) = self.face_mut(*serial) {
                    face.xattrs.insert(name.clone(), value.clone());
                }
            }
            Op::RemoveXattr(serial, name) => {
                if let Some(face) = self.face_mut(*serial) {
                    face.xattrs.remove(name);
                }
            }
            Op::ReadOnly(serial) => {
                if let Some(face) = self.face_mut(*serial) {
                    face.read_only = true;
                }
            }
            Op::Write { serial, first, count, write } => {
                let cells = self.cells_mut(uuid_of(*serial));
                for sector in *first..first + count {
                    let cell = cells.entry(sector).or_default();
                    let before = std::mem::replace(&mut cell.last, tag(*write, sector));
                    cell.older.push(before);
                    cell.unsure = false;
                }
            }
            Op::Unmap(Range { serial, first, count }) => {
                let (uuid, range) = (uuid_of(*serial), sectors(*first, *count));
                match whole {
                    true => self.drop_cells(uuid, range),
                    false => self.perhaps_drop_cells(uuid, range),
                }
            }
            Op::Together { unmaps, .. } => {
                for Range { serial, first, count } in unmaps {
                    self.drop_cells(uuid_of(*serial), sectors(*first, *count));
                }
            }
            Op::Snapshot(all) => {
                self.settle();
                for (serial, snapshot) in all {
                    self.take_snapshot(*serial, *snapshot);
                }
            }
            Op::Clone { of, serial } => {
                let Some(size) = self.face_mut(*of).map(|face| face.size) else { return };
                let (name, xattrs) = (format!("blob{serial}"), super::ops::made(*serial));
                let (thin, read_only, snapshot, parent) = (true, false, false, Some(uuid_of(*of)));
                let external = None;
                let face = Face { name, size, thin, read_only, snapshot, parent, external, xattrs };
                self.faces.insert(uuid_of(*serial), face);
                self.copy_cells(*of, *serial);
            }
            Op::CloneExternal { serial, size } => {
                let (name, xattrs) = (format!("blob{serial}"), super::ops::made(*serial));
                let (size, thin, read_only, snapshot, parent) = (*size, true, false, false, None);
                let external = Some(EXTERNAL);
                let face = Face { name, size, thin, read_only, snapshot, parent, external, xattrs };
                self.faces.insert(uuid_of(*serial), face);
                let shown = (0..size * PER_CLUSTER).map(external_cell);
                self.cells_mut(uuid_of(*serial)).extend(shown);
            }
            Op::Detach { serial, all } => self.detach(*serial, *all),
            Op::SetParent { serial, parent } => {
                let (uuid, parent) = (uuid_of(*serial), uuid_of(*parent));
                if let Some(face) = self.face_mut(*serial) {
                    (face.parent, face.external) = (Some(parent), None);
                }
                let own = |sector: &u64| owned.contains(&(sector / PER_CLUSTER));
                let shown = self.cells.get(&parent).cloned().unwrap_or_default();
                let cells = self.cells_mut(uuid);
                cells.retain(|sector, _| own(sector));
                let shown = shown.iter().filter(|(sector, _)| !own(sector));
                cells.extend(shown.map(|(sector, cell)| (*sector, cell.clone())));
            }
            Op::SetParentExternal { serial, size } => {
                if let Some(face) = self.face_mut(*serial) {
                    (face.parent, face.external) = (None, Some(EXTERNAL));
                }
                let own = |sector: &u64| owned.contains(&(sector / PER_CLUSTER));
                let cells = self.cells_mut(uuid_of(*serial));
                cells.retain(|sector, _| own(sector));
                let shown = (0..size * PER_CLUSTER).filter(|sector| !own(sector));
                cells.extend(shown.map(external_cell));
            }
            Op::RollBack(all) => all.iter().for_each(|(serial, to)| self.roll_back(*serial, *to)),
            Op::Sync => self.settle(),
            Op::RenameStore(name) => self.name.clone_from(name),
            Op::Grow { clusters, .. } => self.clusters = *clusters,
            Op::Upgrade => self.version = 2,
            Op::Share { from, first, to: Range { serial, first: at, count } } => {
                self.settle();
                let source = self.cells.get(&uuid_of(*from)).cloned().unwrap_or_default();
                self.drop_cells(uuid_of(*serial), sectors(*at, *count));
                let shown = source.range(sectors(*first, *count));
                let there = |sector: &u64| sector - first * PER_CLUSTER + at * PER_CLUSTER;
                let shown = shown.map(|(sector, cell)| (there(sector), cell.clone()));
                self.cells_mut(uuid_of(*serial)).extend(shown);
            }
            Op::Read { .. } | Op::Check | Op::Checkpoint | Op::ShareClusters => {}
        }
    }

    fn take_snapshot(&mut self, serial: u32, snapshot: u32) {
        let (uuid, of) = (uuid_of(serial), uuid_of(snapshot));
        let Some(face) = self.faces.get_mut(&uuid) else { return };
        let mut taken = face.clone();
        (taken.name, taken.xattrs) = (format!("blob{snapshot}"), super::ops::made(snapshot));
        (taken.read_only, taken.snapshot) = (true, true);
        (face.thin, face.parent, face.external) = (true, Some(of), None);
        self.faces.insert(of, taken);
        self.copy_cells(serial, snapshot);
    }

    fn roll_back(&mut self, serial: u32, to: u32) {
        let Some(size) = self.face_mut(to).map(|face| face.size) else { return };
        if let Some(face) = self.face_mut(serial) {
            (face.size, face.thin) = (size, true);
            (face.parent, face.external) = (Some(uuid_of(to)), None);
        }
        self.copy_cells(to, serial);
    }

    fn copy_cells(&mut self, from: u32, to: u32) {
        let cells = self.cells.get(&uuid_of(from)).cloned().unwrap_or_default();
        self.cells.insert(uuid_of(to), cells);
    }

    fn detach(&mut self, serial: u32, all: bool) {
        let parent = self.face_mut(serial).and_then(|face| face.parent);
        let parent = parent.and_then(|parent| self.faces.get(&parent)).filter(|_| !all);
        let grand = parent.map_or((None, None), |face| (face.parent, face.external));
        if let Some(face) = self.face_mut(serial) {
            (face.parent, face.external) = grand;
            face.thin &= !all;
        }
    }

    /// What was written is durable now, but where a flush failed since.
    pub fn settle(&mut self) {
        self.each_cell(|cell| {
            if !cell.unsure {
                cell.older.clear();
            }
        });
    }

    /// A flush or a write of metadata failed: what was not durable may never be, whatever is read.
    pub fn doubt(&mut self) {
        self.each_cell(|cell| cell.unsure |= !cell.older.is_empty());
    }

    /// What was unsure is as it is read, since the device has no cache that says otherwise.
    pub fn be_sure(&mut self) {
        self.each_cell(|cell| cell.unsure = false);
    }

    /// A write to a blob failed: its sectors have what it wrote or what they had.
    pub fn doubt_write(&mut self, serial: u32, sectors: std::ops::Range<u64>) {
        for (_, cell) in self.cells_mut(uuid_of(serial)).range_mut(sectors) {
            cell.unsure = true;
        }
    }

    fn each_cell(&mut self, mut f: impl FnMut(&mut Cell)) {
        for cells in self.cells.values_mut() {
            if cells.values().any(|cell| !cell.older.is_empty()) {
                Rc::make_mut(cells).values_mut().for_each(&mut f);
            }
        }
    }

    /// Whether `store` holds this as far as it can be told without reading contents; else why not.
    pub fn same_faces<D: Disk>(&self, store: &Store<D>) -> Result<(), String> {
        let info = store.info();
        let (this, that) = (
            (&self.name, self.version, self.clusters),
            (&info.name, info.version, info.data_clusters),
        );
        if this != that {
            return Err(format!("the store is {that:?}, not {this:?}"));
        }
        if store.blobs().count() != self.faces.len() {
            let names: Vec<_> = store.blobs().map(|b| b.name).collect();
            let expected: Vec<_> = self.faces.values().map(|f| &f.name).collect();
            return Err(format!("there are {names:?}, not {expected:?}"));
        }
        for blob in store.blobs() {
            let xattrs = store.xattrs(blob.id).expect("it is there").into_iter();
            let value = |n: &str| store.xattr(blob.id, n).expect("it is there").to_vec();
            let face = Face {
                name: blob.name.clone(),
                size: blob.size,
                thin: blob.thin,
                read_only: blob.read_only,
                snapshot: blob.snapshot,
                parent: blob.parent.map(|parent| store.blob(parent).expect("it is there").uuid),
                external: blob.external,
                xattrs: xattrs.map(|n| (n.clone(), value(&n))).collect(),
            };
            if self.faces.get(&blob.uuid) != Some(&face) {
                return Err(format!("{face:?} is not {:?}", self.faces.get(&blob.uuid)));
            }
        }
        Ok(())
    }

    /// Whether every sector of every blob has what it may have; else which has not. What was seen is
    /// what it has from then on, but where that is unsure.
    pub fn same_contents<D: Disk>(&mut self, store: &mut Store<D>) -> Result<(), String> {
        let blobs: Vec<_> = store.blobs().collect();
        let mut bytes = vec![0; CLUSTER as usize];
        for blob in &blobs {
            let mut clusters = BTreeSet::new();
            let mut at = Some(blob.id);
            while let Some(id) = at {
                let shown = store.clusters(id).map_err(|e| e.to_string())?;
                clusters.extend(shown.map(|(cluster, _)| cluster).filter(|c| *c < blob.size));
                let info = store.blob(id).map_err(|e| e.to_string())?;
                if info.external.is_some() {
                    clusters.extend(0..info.parent_clusters.min(blob.size));
                }
                at = info.parent;
            }
            let cells = self.cells.entry(blob.uuid).or_default();
            clusters.extend(cells.keys().map(|sector| sector / PER_CLUSTER));
            let mut settled = None;
            for cluster in clusters {
                store.read(blob.id, cluster * CLUSTER, &mut bytes).map_err(|e| e.to_string())?;
                let all = (cluster * PER_CLUSTER..).zip(bytes.chunks_exact(SECTOR));
                for (sector, found) in all {
                    let word = u64::from_le_bytes(found[..8].try_into().expect("8 bytes"));
                    if found[..SECTOR - 8] != found[8..] {
                        return Err(format!("sector {sector} of {} is mixed", blob.name));
                    }
                    let known = cells.get(&sector);
                    let fits = known
                        .map_or(word == 0, |cell| cell.last == word || cell.older.contains(&word));
                    if !fits {
                        let name = &blob.name;
                        return Err(format!(
                            "sector {sector} of {name} has {word:#x}, not {known:x?}"
                        ));
                    }
                    if known.is_some_and(|cell| !cell.older.is_empty() && !cell.unsure) {
                        settled.get_or_insert_with(Vec::new).push((sector, word));
                    }
                }
            }
            for (sector, last) in settled.into_iter().flatten() {
                let cell = Cell { last, ..Cell::default() };
                Rc::make_mut(cells).insert(sector, cell);
            }
        }
        Ok(())
    }
}

/// Whether each cluster has one owner or none, `held` being nobody's but not free; where the store shares clusters,
/// whether there is room for all that could be written.
pub fn one_owner<D: Disk>(store: &mut Store<D>, held: u64) -> Result<(), String> {
    let (mut seen, mut owned) = (BTreeSet::new(), 0);
    let (blobs, info): (Vec<_>, _) = (store.blobs().collect(), store.info());
    for blob in blobs {
        let mut own = 0;
        let all = store.clusters(blob.id).map_err(|e| e.to_string())?;
        let all: Vec<_> = all.filter(|(_, cluster)| *cluster != HOLE).collect();
        for (_, cluster) in all {
            own += 1;
            let another = !seen.insert(cluster);
            if another && !(info.shares_clusters && store.is_shared(cluster))
                || store.is_free(cluster)
            {
                return Err(format!("cluster {cluster} has two owners, or is free, too"));
            }
        }
        if own != blob.allocated {
            return Err(format!("{} has {own} clusters, but says {}", blob.name, blob.allocated));
        }
        owned += own;
    }
    // What was shared until now takes room that comes when it is released.
    let free = info.free_clusters;
    let waits = info.shares_clusters && free == 0 && owned <= info.data_clusters;
    match owned + free + held == info.data_clusters || waits {
        true => Ok(()),
        false => Err(format!("{owned} owned, {free} free, {held} held of {}", info.data_clusters)),
    }
}

/// A serial number of a blob that is there, or any.
pub fn some_blob(model: &Model, rng: &mut Rng, filter: impl Fn(&Face) -> bool) -> Option<u32> {
    let fit: Vec<_> = model.faces.iter().filter(|(_, f)| filter(f)).map(|(u, _)| *u).collect();
    if fit.is_empty() {
        return None;
    }
    Some((rng.of(&fit).as_u128() - 0xb10b_0000) as u32)
}
