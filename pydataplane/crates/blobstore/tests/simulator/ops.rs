//! Everything that can be done with a store: chosen by chance, and done.

use super::device::{Device, Rng, SECTOR};
use super::model::{CLUSTER, EXTERNAL, Model, PER_CLUSTER, some_blob, tag, uuid_of};
use blobstore::{BlobId, BlobOptions, Error, Freed, HistoryOptions, Run, Store};
use std::collections::BTreeMap;

/// Clusters of a blob.
#[derive(Clone, Copy, Debug)]
pub struct Range {
    pub serial: u32,
    pub first: u64,
    pub count: u64,
}

/// One thing to do. Blobs are named by their serial numbers in a run.
#[derive(Clone, Debug)]
pub enum Op {
    /// With `beside` its clusters are reserved first, and zeroed past the store.
    Create {
        serial: u32,
        size: u64,
        thin: bool,
        xattrs: BTreeMap<String, Vec<u8>>,
        beside: bool,
    },
    Delete(u32),
    Resize {
        serial: u32,
        size: u64,
        beside: bool,
    },
    Rename(u32, String),
    SetXattr(u32, String, Vec<u8>),
    RemoveXattr(u32, String),
    ReadOnly(u32),
    /// Sectors; `write`: which write of the run it is.
    Write {
        serial: u32,
        first: u64,
        count: u64,
        write: u32,
    },
    Unmap(Range),
    /// In one record.
    Together {
        unmaps: Vec<Range>,
        allocations: Vec<Range>,
    },
    /// At one instant: of each first the second.
    Snapshot(Vec<(u32, u32)>),
    Clone {
        of: u32,
        serial: u32,
    },
    /// Of what is outside of the store.
    CloneExternal {
        serial: u32,
        size: u64,
    },
    /// Supplies what it lacks, of all or of its parent's, and takes the parent from it.
    Detach {
        serial: u32,
        all: bool,
    },
    SetParent {
        serial: u32,
        parent: u32,
    },
    /// What is outside of the store, which has that size.
    SetParentExternal {
        serial: u32,
        size: u64,
    },
    /// At one instant: each first to the snapshot that is the second.
    RollBack(Vec<(u32, u32)>),
    Sync,
    RenameStore(String),
    /// The device gains so many bytes; the store has so many clusters for data then.
    Grow {
        bytes: u64,
        clusters: u64,
    },
    Upgrade,
    /// The store shares clusters from now on.
    ShareClusters,
    /// The range reads as that blob from its cluster `first` on.
    Share {
        from: u32,
        first: u64,
        to: Range,
    },
    Read(u32),
    /// Compares all metadata, and repairs.
    Check,
    Checkpoint,
}

/// The xattrs of a snapshot or clone with that number.
pub fn made(serial: u32) -> BTreeMap<String, Vec<u8>> {
    let len = if serial.is_multiple_of(3) { 2100 } else { 20 };
    BTreeMap::from([("made".to_owned(), vec![serial as u8; len])])
}

fn named(serial: u32) -> HistoryOptions {
    let (name, uuid) = (format!("blob{serial}"), uuid_of(serial));
    HistoryOptions { name, uuid, xattrs: made(serial) }
}

/// What chooses.
pub struct Chooser {
    pub rng: Rng,
    next_serial: u32,
    next_write: u32,
    /// First data cluster, and bytes of the device.
    pub first_data: u64,
    pub device: u64,
    /// Clusters of blobs where writes begin: in few places of several extents pages.
    far: bool,
    /// Both places of what was last shared.
    shared: Vec<Range>,
    /// Free clusters of the store.
    pub free: u64,
}

/// Most bytes of a device.
const DEVICE_MAX: u64 = 6 << 20;
/// First clusters of extents pages, those past the root's among them.
const FAR: [u64; 6] = [1007, 1008, 2016, 256 * 1008 - 1, 256 * 1008, 257 * 1008 + 3];

impl Chooser {
    pub fn new(mut rng: Rng, first_data: u64, device: u64) -> Self {
        let far = rng.one_in(4);
        let (next_serial, next_write, shared, free) = (0, 0, Vec::new(), 0);
        Chooser { rng, next_serial, next_write, first_data, device, far, shared, free }
    }

    fn serial(&mut self) -> u32 {
        self.next_serial += 1;
        self.next_serial - 1
    }

    fn cluster(&mut self) -> u64 {
        match self.far && self.rng.one_in(3) {
            true => self.rng.of(&FAR),
            false => self.rng.below(9),
        }
    }

    fn size(&mut self) -> u64 {
        match self.far && self.rng.one_in(2) {
            true => self.rng.of(&FAR) + self.rng.below(9),
            false => self.rng.below(13),
        }
    }

    fn range(&mut self, model: &Model) -> Option<Range> {
        let serial = some_blob(model, &mut self.rng, |face| !face.read_only)?;
        let (first, count) = (self.cluster(), 1 + self.rng.below(4));
        let count = if self.rng.one_in(9) { 1100 } else { count };
        let size = model.faces[&uuid_of(serial)].size;
        let first = first.min(size.saturating_sub(1));
        Some(Range { serial, first, count: count.min(size - first) })
    }

    fn ranges(&mut self, model: &Model) -> Vec<Range> {
        (0..self.rng.below(3)).filter_map(|_| self.range(model)).collect()
    }

    fn share(&mut self, model: &Model, any: u32) -> Option<Op> {
        let mut to = self.range(model)?;
        let from = if self.rng.one_in(3) { to.serial } else { any };
        let size = model.faces.get(&uuid_of(from))?.size;
        to.count = to.count.min(size).min(70);
        let first = self.cluster().min(size - to.count);
        self.shared = vec![Range { serial: from, first, count: to.count }, to];
        (to.count > 0).then_some(Op::Share { from, first, to })
    }

    fn write(&mut self, model: &Model) -> Option<Op> {
        let serial = some_blob(model, &mut self.rng, |face| !face.read_only && face.size > 0)?;
        let size = model.faces[&uuid_of(serial)].size;
        let first = self.cluster().min(size - 1) * PER_CLUSTER + self.rng.below(PER_CLUSTER);
        let most = self.rng.of(&[1, 9, 30, 2 * PER_CLUSTER]);
        let count = (1 + self.rng.below(most)).min(size * PER_CLUSTER - first);
        self.next_write += 1;
        Some(Op::Write { serial, first, count, write: self.next_write })
    }

    fn create(&mut self) -> Op {
        let (serial, thin, beside) = (self.serial(), self.rng.below(3) > 0, self.rng.one_in(3));
        let size = match thin {
            true => self.size(),
            // All that there is, or a part.
            false if self.rng.one_in(6) => self.free,
            false => self.rng.below(12),
        };
        let mut xattrs = BTreeMap::new();
        for n in 0..self.rng.below(3) {
            xattrs.insert(format!("x{n}"), self.value());
        }
        Op::Create { serial, size, thin, xattrs, beside }
    }

    fn value(&mut self) -> Vec<u8> {
        let most = self.rng.of(&[8, 8, 3000]);
        vec![self.rng.below(256) as u8; self.rng.below(most) as usize]
    }

    /// What is done next with a store that holds `model`.
    pub fn next(&mut self, model: &Model) -> Op {
        loop {
            if let Some(op) = self.perhaps(model) {
                return op;
            }
        }
    }

    fn perhaps(&mut self, model: &Model) -> Option<Op> {
        let any = some_blob(model, &mut self.rng, |_| true).unwrap_or(99);
        let snapshot = some_blob(model, &mut self.rng, |face| face.snapshot).unwrap_or(any);
        Some(match self.rng.below(56) {
            0..=3 => self.create(),
            4..=6 => Op::Delete(any),
            7 => Op::Delete(snapshot),
            8 | 9 => {
                let thin = model.faces.get(&uuid_of(any)).is_some_and(|face| face.thin);
                let size = if thin { self.size() } else { self.rng.below(14) };
                Op::Resize { serial: any, size, beside: self.rng.one_in(3) }
            }
            10 => Op::Rename(any, format!("name{}", self.rng.below(5))),
            11 | 12 => {
                let (name, value) = (format!("x{}", self.rng.below(4)), self.value());
                Op::SetXattr(any, name, value)
            }
            13 => Op::RemoveXattr(any, format!("x{}", self.rng.below(4))),
            14 if self.rng.one_in(3) => Op::ReadOnly(any),
            15..=17 => Op::Unmap(self.range(model)?),
            18 | 19 => {
                let (unmaps, mut allocations) = (self.ranges(model), self.ranges(model));
                if self.rng.one_in(2) {
                    // All owners at a time.
                    allocations.extend(self.shared.iter().copied());
                }
                Op::Together { unmaps, allocations }
            }
            20..=23 => {
                let of = some_blob(model, &mut self.rng, |face| !face.read_only)?;
                let mut all = vec![(of, self.serial())];
                if any != of && self.rng.one_in(2) {
                    all.push((any, self.serial()));
                }
                Op::Snapshot(all)
            }
            24..=26 => Op::Clone { of: snapshot, serial: self.serial() },
            27 | 28 => Op::Detach { serial: any, all: self.rng.one_in(3) },
            29 => Op::SetParent { serial: any, parent: snapshot },
            30 => Op::RollBack(vec![(any, snapshot)]),
            31 => {
                let child = some_blob(model, &mut self.rng, |face| face.parent.is_some())?;
                let parent = model.faces[&uuid_of(child)].parent.expect("it has one");
                let mut all = vec![(child, (parent.as_u128() - 0xb10b_0000) as u32)];
                if any != child && self.rng.one_in(2) {
                    all.push((any, snapshot));
                }
                Op::RollBack(all)
            }
            32..=34 => Op::Sync,
            35 => Op::RenameStore(format!("lvs{}", self.rng.below(3))),
            36 => {
                let most = (DEVICE_MAX - self.device) / 4096;
                let bytes = self.rng.below(3 * CLUSTER / 4096).min(most) * 4096;
                let clusters = (self.device + bytes) / CLUSTER - self.first_data;
                Op::Grow { bytes, clusters }
            }
            37 if model.version == 1 => Op::Upgrade,
            37 if self.rng.one_in(3) => Op::ShareClusters,
            50..=55 => return self.share(model, any),
            38 => Op::Check,
            39 if self.rng.one_in(2) => Op::Checkpoint,
            40 => Op::Read(any),
            48 if self.rng.one_in(3) => {
                let serial = some_blob(model, &mut self.rng, |face| face.size < 20)?;
                Op::SetParentExternal { serial, size: model.faces[&uuid_of(serial)].size }
            }
            48 | 49 => Op::CloneExternal { serial: self.serial(), size: self.rng.below(7) },
            41..=47 => return self.write(model),
            _ => return None,
        })
    }
}

/// Does `op`. What is lost goes into `freed`. With an error it is not done, or by halves where the
/// device failed.
pub fn run(store: &mut Store<Device>, op: &Op, freed: &mut Vec<Freed>) -> Result<(), Error> {
    let id = |store: &Store<Device>, serial: u32| {
        store.by_uuid(uuid_of(serial)).ok_or(Error::NoBlob { id: u64::from(serial) })
    };
    match op {
        Op::Create { serial, size, thin, xattrs, beside } => {
            let (name, uuid) = (format!("blob{serial}"), uuid_of(*serial));
            let (size, thin, xattrs) = (*size, *thin, xattrs.clone());
            let options = BlobOptions { dif: None, name, uuid, size, thin, xattrs };
            if !beside || thin {
                return store.create(&options).map(drop);
            }
            store.check_create(&options)?;
            let reserved = store.reserve(size)?;
            let zeroed = reserved.runs().to_vec().into_iter().try_for_each(|run| zero(store, run));
            if let Err(e) = zeroed {
                store.unreserve(reserved);
                return Err(e);
            }
            store.create_reserved(&options, reserved).map(drop)
        }
        Op::Delete(serial) => {
            let deleted = store.delete(id(store, *serial)?)?;
            freed.push(deleted.freed);
            Ok(())
        }
        Op::Resize { serial, size, beside } => {
            let id = id(store, *serial)?;
            if !beside {
                freed.push(store.resize(id, *size)?);
                return Ok(());
            }
            let needed = store.check_resize(id, *size)?;
            let reserved = store.reserve(needed)?;
            let zeroed = reserved.runs().to_vec().into_iter().try_for_each(|run| zero(store, run));
            if let Err(e) = zeroed {
                store.unreserve(reserved);
                return Err(e);
            }
            freed.push(store.resize_reserved(id, *size, reserved)?);
            Ok(())
        }
        Op::Rename(serial, name) => store.rename(id(store, *serial)?, name),
        Op::SetXattr(serial, name, value) => store.set_xattr(id(store, *serial)?, name, value),
        Op::RemoveXattr(serial, name) => store.remove_xattr(id(store, *serial)?, name),
        Op::ReadOnly(serial) => store.set_read_only(id(store, *serial)?),
        Op::Write { serial, first, count, write } => {
            let words = (*first..first + count).map(|sector| tag(*write, sector).to_le_bytes());
            let bytes: Vec<u8> = words.flat_map(|word| word.repeat(SECTOR / 8)).collect();
            store.write(id(store, *serial)?, first * SECTOR as u64, &bytes)
        }
        Op::Unmap(Range { serial, first, count }) => {
            freed.push(store.unmap(id(store, *serial)?, *first, *count)?);
            Ok(())
        }
        Op::Together { unmaps, allocations } => together(store, unmaps, allocations, freed),
        Op::Snapshot(all) => {
            let all = all.iter().map(|(of, to)| Ok((id(store, *of)?, named(*to))));
            let all: Result<Vec<_>, Error> = all.collect();
            store.snapshot(&all?).map(drop)
        }
        Op::Clone { of, serial } => store.clone_of(id(store, *of)?, &named(*serial)).map(drop),
        Op::CloneExternal { serial, size } => {
            store.clone_external(EXTERNAL, *size, &named(*serial)).map(drop)
        }
        Op::Detach { serial, all } => detach(store, id(store, *serial)?, *all),
        Op::SetParent { serial, parent } => {
            store.set_parent(id(store, *serial)?, id(store, *parent)?)
        }
        Op::SetParentExternal { serial, size } => {
            store.set_external_parent(id(store, *serial)?, EXTERNAL, *size)
        }
        Op::RollBack(all) => {
            let all = all.iter().map(|(serial, to)| Ok((id(store, *serial)?, id(store, *to)?)));
            let all: Result<Vec<_>, Error> = all.collect();
            freed.push(store.roll_back(&all?)?);
            Ok(())
        }
        Op::Sync => store.sync(),
        Op::RenameStore(name) => store.rename_store(name),
        Op::Grow { bytes, .. } => {
            store.disk_mut().gain(*bytes);
            store.grow().map(drop)
        }
        Op::Upgrade => store.upgrade(),
        Op::ShareClusters => store.share_clusters(),
        Op::Share { from, first, to: Range { serial, first: at, count } } => {
            let shared =
                store.share(id(store, *from)?, *first, id(store, *serial)?, *at, *count)?;
            freed.push(shared.freed);
            Ok(())
        }
        Op::Read(serial) => {
            let id = id(store, *serial)?;
            let size = store.blob(id)?.size.min(16) * CLUSTER;
            store.read(id, 0, &mut vec![0; size as usize])
        }
        Op::Check => {
            let before = store.disk_mut().faults();
            let mut found = check(store, true, freed)?;
            // What the device failed to read is told, and written anew, but for what is read to count owners.
            let uncounted = |cause: &str| cause.starts_with("not counted: the device failed");
            let unread = found.extract_if(.., |problem| {
                problem.cause.contains("cannot be read") || uncounted(&problem.cause)
            });
            let unread = unread.inspect(|problem| {
                let away = problem.cause.contains("let go of in memory");
                assert!(problem.repaired || away || uncounted(&problem.cause), "{problem:?}");
            });
            let unread = unread.count();
            assert!(unread as u64 <= store.disk_mut().faults() - before, "it was read");
            assert_eq!(found, [], "nothing was damaged");
            Ok(())
        }
        Op::Checkpoint => store.checkpoint(),
    }
}

/// Compares all metadata; `freed` was lost and is not released.
pub fn check(
    store: &mut Store<Device>,
    repair: bool,
    freed: &[Freed],
) -> Result<Vec<blobstore::Problem>, Error> {
    let (mut problems, mut from) = (Vec::new(), Some(0));
    let lost: Vec<Run> = freed.iter().flat_map(Freed::runs).copied().collect();
    while let Some(at) = from {
        let found = store.check(at, repair, &lost)?;
        problems.extend(found.problems);
        from = found.next;
    }
    Ok(problems)
}

fn zero(store: &mut Store<Device>, run: Run) -> Result<(), Error> {
    use blobstore::Disk;
    let (offset, len) = (run.first * CLUSTER, run.count * CLUSTER);
    store.disk_mut().write_zeroes(offset, len).map_err(Error::Data)?;
    store.zeroed_elsewhere();
    Ok(())
}

fn detach(store: &mut Store<Device>, id: BlobId, all: bool) -> Result<(), Error> {
    // A large thin blob cannot have all its clusters.
    if all && store.blob(id)?.size > 100 {
        return Err(Error::NoSpace { needed: 100, free: 0 });
    }
    let all_of_it = store.lacking(id, all, 0, usize::MAX)?.len() as u64;
    assert_eq!(store.count_lacking(id, all), Ok(all_of_it));
    loop {
        let lacking = store.lacking(id, all, 0, 3)?;
        if lacking.is_empty() {
            return store.detach(id, all);
        }
        store.supply(id, &lacking)?;
    }
}

fn together(
    store: &mut Store<Device>,
    unmaps: &[Range],
    allocations: &[Range],
    freed: &mut Vec<Freed>,
) -> Result<(), Error> {
    let mut batch = store.batch();
    let added = (|| {
        let full = Err(Error::TooMany { count: 0, most: 0 });
        for Range { serial, first, count } in unmaps {
            let id = store.by_uuid(uuid_of(*serial)).ok_or(Error::NoBlob { id: 0 })?;
            if store.add_unmap(&mut batch, id, *first, *count)? != *count {
                return full;
            }
        }
        for Range { serial, first, count } in allocations {
            let id = store.by_uuid(uuid_of(*serial)).ok_or(Error::NoBlob { id: 0 })?;
            for cluster in *first..first + count {
                if !store.add_allocation(&mut batch, id, cluster)? {
                    // Another owner has to lose it first. What there is is done.
                    return if store.shares_clusters() { Ok(()) } else { full };
                }
            }
        }
        Ok(())
    })();
    if let Err(e) = added {
        store.drop_batch(batch);
        // Nothing of it is done, unlike where the data's device fails.
        return Err(match e {
            Error::Data(_) => Error::TooMany { count: 0, most: 0 },
            e => e,
        });
    }
    let done = store.commit_batch(batch);
    freed.extend(done.replaced.into_iter().map(|(_, freed)| freed));
    // Unmaps are done where allocations alone failed.
    for lost in done.unmapped? {
        freed.push(lost.freed);
    }
    done.allocated.map(drop)
}
