//! A run: operations by chance on a device with faults, with crashes and loads, beside the model.

use super::device::{Device, Failed, Fault, Image, Instant, PAGE, Plan, Rng, WAYS, Zeros};
use super::model::{CLUSTER, Model, PER_CLUSTER, one_owner};
use super::ops::{self, Chooser, Op, check};
use blobstore::{Disk, DiskError, Error, Freed, HOLE, Store, StoreOptions};
use std::collections::BTreeSet;
use uuid::Uuid;

/// Bytes of a device when its store is created: 41 clusters for data.
const DEVICE: u64 = 4 << 20;

/// What was tried.
#[derive(Clone, Copy, Debug, Default)]
pub struct Tried {
    pub seeds: u64,
    pub operations: u64,
    /// Power cuts and ends of the process, each followed by a load and compared.
    pub crashes: u64,
    /// Accesses that failed.
    pub errors: u64,
    /// Writes that went elsewhere.
    pub misdirected: u64,
    /// Writes that went nowhere.
    pub lost: u64,
    /// Pages that were damaged.
    pub rotten: u64,
    /// Loads that refused what was damaged.
    pub refused: u64,
    /// Clusters that were known to read as zeros, after each operation.
    pub zeros: u64,
    /// Ranges of clusters that were shared.
    pub shares: u64,
    /// Loads that could not know of a write that went elsewhere or nowhere. [`Store::check`] did.
    pub stale: u64,
}

impl Tried {
    /// Adds what another run tried.
    pub fn add(&mut self, other: &Tried) {
        self.seeds += other.seeds;
        self.operations += other.operations;
        self.crashes += other.crashes;
        self.errors += other.errors;
        self.misdirected += other.misdirected;
        self.lost += other.lost;
        self.rotten += other.rotten;
        self.refused += other.refused;
        self.stale += other.stale;
        self.zeros += other.zeros;
        self.shares += other.shares;
    }
}

/// An empty store on a device, and where things are there.
#[derive(Clone)]
pub struct Base {
    pub instant: Instant,
    /// Bytes before the data.
    pub metadata: u64,
    pub journal: std::ops::Range<u64>,
    pub first_data: u64,
}

impl Base {
    /// A store of that version of the format.
    pub fn new(version: u8) -> Base {
        let options = StoreOptions {
            name: "lvs".into(),
            uuid: Uuid::from_u128(1),
            cluster_size: CLUSTER as u32,
        };
        let instant = Instant::of(Image::foreign(DEVICE), DEVICE);
        let device = Device::new(instant, 0, 0..0, Rng::new(0));
        let store = Store::create_store(device.clone(), &options).unwrap();
        let first_data = store.info().first_data_cluster;
        store.close().unwrap();
        let mut instant = device.instant();
        let superblock = *instant.page(0);
        let number = |at: usize| u64::from_le_bytes(superblock[at..at + 8].try_into().unwrap());
        let (start, pages) = (number(152), number(160));
        for copy in [0, 16] {
            instant.rot(copy, |page| set_version(page, version));
        }
        let page = PAGE as u64;
        let journal = start * page..(start + pages) * page;
        Base { instant, metadata: first_data * CLUSTER, journal, first_data }
    }

    fn device(&self, at: Instant, rng: Rng) -> Device {
        Device::new(at, self.metadata, self.journal.clone(), rng)
    }
}

/// A store of version 1 without snapshots is one of version 2 with another number.
fn set_version(page: &mut [u8; PAGE], version: u8) {
    page[12] = version;
    let mut digest = crc_fast::Digest::new(crc_fast::CrcAlgorithm::Crc32Iscsi);
    [&page[..8], &[0; 4], &page[12..]].iter().for_each(|part| digest.update(part));
    page[8..12].copy_from_slice(&(digest.finalize() as u32).to_le_bytes());
}

/// Whether it writes to clusters that the blob has, and to no others.
fn is_within_own(store: &mut Store<Device>, op: &Op) -> bool {
    let Op::Write { serial, first, count, .. } = op else { return false };
    let Some(id) = store.by_uuid(super::model::uuid_of(*serial)) else { return false };
    let last = (first + count - 1) / PER_CLUSTER;
    (first / PER_CLUSTER..=last)
        .all(|cluster| store.entry(id, cluster).is_ok_and(|to| !matches!(to, 0 | HOLE)))
}

/// Loads what a device is. That a flush of it failed is known beyond the end of a process.
fn load(device: &Device) -> Result<Store<Device>, Error> {
    match device.failed_flushes() {
        0 => Store::load(device.clone()),
        _ => Store::load_durable(device.clone()),
    }
}

/// Loads what a device is after a crash, checks it, and finds which of `candidates` that is. `sure`: the device was
/// without power, so no cache can show what is not on the medium.
pub fn load_and_compare(
    device: &Device,
    candidates: &[Model],
    sure: bool,
) -> Result<(Store<Device>, Model), String> {
    let mut store = load(device).map_err(|e| format!("load: {e}"))?;
    device.forget_failed_flushes();
    let model = compare(&mut store, candidates, sure)?;
    one_owner(&mut store, 0)?;
    let wrong = check(&mut store, false, &[]).map_err(|e| format!("check: {e}"))?;
    match wrong.is_empty() {
        true => Ok((store, model)),
        false => Err(format!("check: {wrong:?}")),
    }
}

/// Finds which of `candidates`, the last ones first, a store holds.
pub fn compare(
    store: &mut Store<Device>,
    candidates: &[Model],
    sure: bool,
) -> Result<Model, String> {
    let mut why = Vec::new();
    for candidate in candidates.iter().rev() {
        let mut model = candidate.clone();
        if sure {
            model.be_sure();
        }
        match model.same_faces(store).and_then(|()| model.same_contents(store)) {
            Ok(()) => return Ok(model),
            Err(e) => why.push(e),
        }
    }
    Err(why.join("; and "))
}

struct Simulation<'a> {
    base: &'a Base,
    device: Device,
    rng: Rng,
    chooser: Chooser,
    model: Model,
    store: Option<Store<Device>>,
    /// Clusters that nobody has any more but that are not free yet.
    freed: Vec<Freed>,
    tried: Tried,
    log: Vec<String>,
}

/// Runs `steps` operations that `seed` names; an error is what went wrong, with the last of them.
pub fn simulate(seed: u64, steps: u64, bases: &[Base; 2]) -> Result<Tried, String> {
    let mut rng = Rng::new(seed);
    let base = &bases[usize::from(rng.one_in(6))];
    let mut instant = base.instant.clone();
    instant.zeros = Zeros { unmapped: !rng.one_in(4), told: !rng.one_in(4) };
    if rng.one_in(2) {
        instant.empty(base.metadata);
    }
    let device = base.device(instant, Rng::new(seed ^ 0xd15c));
    let mut store = Store::load(device.clone()).map_err(|e| e.to_string())?;
    if store.info().version == 2 && rng.one_in(2) {
        store.share_clusters().map_err(|e| e.to_string())?;
    }
    let model = Model::of(&store);
    let chooser = Chooser::new(Rng::new(seed ^ 0x0b5), base.first_data, DEVICE);
    let (store, tried) = (Some(store), Tried { seeds: 1, ..Tried::default() });
    let (freed, log) = (Vec::new(), Vec::new());
    let mut run = Simulation { base, device, rng, chooser, model, store, freed, tried, log };
    for _ in 0..steps {
        if let Err(why) = run.step() {
            let from = run.log.len().saturating_sub(12);
            return Err(format!("{}\n{why}", run.log[from..].join("\n")));
        }
    }
    run.tried.errors = run.device.faults() - run.tried.misdirected - run.tried.lost;
    Ok(run.tried)
}

impl Simulation<'_> {
    fn store(&mut self) -> &mut Store<Device> {
        self.store.as_mut().expect("it is loaded")
    }

    fn note(&mut self, what: impl Into<String>) {
        let mut what: String = what.into();
        what.truncate(200);
        self.log.push(what);
    }

    fn plan(&mut self) -> Option<Plan> {
        if !self.rng.one_in(9) {
            return None;
        }
        let failed = [Failed::Kept, Failed::LostReadable, Failed::Lost, Failed::Half];
        let flush = Fault::Flush(self.rng.of(&failed));
        let fault = self.rng.of(&[Fault::Read, Fault::Write, Fault::NoSpace, flush, flush]);
        let (after, times) = (self.rng.below(8), self.rng.of(&[1, 1, 3, u64::MAX]));
        Some(Plan { fault, after, times })
    }

    fn step(&mut self) -> Result<(), String> {
        if self.rng.one_in(2) {
            self.store().let_go_all();
        }
        let chance = self.rng.below(40);
        if chance < 4 {
            // What was let go of in memory cannot be repaired.
            bring_all(self.store())?;
        }
        match chance {
            0 | 1 => return self.rot_in_use(),
            2 => return self.write_astray(Fault::Misdirected),
            3 => return self.write_astray(Fault::Lost),
            _ => {}
        }
        self.chooser.free = self.store().info().free_clusters;
        let op = self.chooser.next(&self.model);
        if let Op::SetParent { .. } | Op::SetParentExternal { .. } = op {
            // Its clusters are looked at beside the store.
            bring_all(self.store())?;
        }
        let plan = self.plan();
        self.device.plan(plan);
        self.device.watch();
        let (result, candidates) = self.operate(&op);
        let seen = self.device.seen();
        let failed = plan.map(|plan| format!("with {plan:?} "));
        let outcome = result.as_ref().err().map_or("done".to_owned(), Error::to_string);
        self.note(format!("{op:?}: {}{outcome}", failed.unwrap_or_default()));
        self.crash_in_copies(&seen, &candidates, result.is_ok())?;
        let stopped = self.store().stopped().is_some();
        if stopped {
            self.changes_are_refused()?;
        } else {
            self.device.plan(None);
            let held = self.freed.iter().flat_map(|f| f.runs()).map(|run| run.count).sum();
            let store = self.store.as_mut().expect("it is loaded");
            self.model.same_faces(store)?;
            one_owner(store, held)?;
            if self.rng.one_in(2) {
                self.release();
            }
            self.zeros_are_zeros()?;
        }
        if stopped || self.rng.one_in(7) {
            let candidates = if result.is_ok() { vec![self.model.clone()] } else { candidates };
            self.restart(seen, candidates, stopped)?;
        }
        Ok(())
    }

    /// Frees what was lost, most of it unmapped.
    fn release(&mut self) {
        let (fault, after) = (Fault::Write, self.rng.below(3));
        self.device.plan(self.rng.one_in(6).then_some(Plan { fault, after, times: 1 }));
        for freed in std::mem::take(&mut self.freed) {
            let store = self.store.as_mut().expect("it is loaded");
            if !self.rng.one_in(4) {
                for run in freed.runs() {
                    // One that fails did a part.
                    _ = store.discard(*run);
                }
            }
            store.release(freed);
        }
        self.device.plan(None);
    }

    /// What the store knows to be zeros is, as it is read and as it is on the medium after a flush.
    fn zeros_are_zeros(&mut self) -> Result<(), String> {
        let (at, store) = (self.device.instant(), self.store());
        let (first, clusters) = (store.info().first_data_cluster, store.info().data_clusters);
        let known = (first..first + clusters).filter(|n| store.is_known_zero(*n as u32));
        let known: Vec<u64> = known.collect();
        for cluster in &known {
            if at.is_zero(cluster * CLUSTER, CLUSTER) != [true; 2] {
                return Err(format!("cluster {cluster} is known to be zeros, but is not"));
            }
        }
        self.tried.zeros += known.len() as u64;
        Ok(())
    }

    /// Does `op`. Returns with its result what the store may hold at any instant of that, and after it
    /// if it failed; sets what it holds afterwards if it is in use then.
    fn operate(&mut self, op: &Op) -> (Result<(), Error>, Vec<Model>) {
        self.tried.operations += 1;
        let store = self.store.as_mut().expect("it is loaded");
        let mut owned = BTreeSet::new();
        if let Op::SetParent { serial, .. } | Op::SetParentExternal { serial, .. } = op
            && let Some(id) = store.by_uuid(super::model::uuid_of(*serial))
        {
            owned.extend(store.clusters(id).expect("it is there").map(|(cluster, _)| cluster));
        }
        let mut before = self.model.clone();
        let (mut after, mut part) = (before.clone(), before.clone());
        // What a blob has is written to whatever room there is, also where others have it, too.
        let has_room = self.freed.is_empty() && is_within_own(store, op);
        let result = ops::run(store, op, &mut self.freed);
        let lacks_room = matches!(result, Err(Error::NoSpace { .. }));
        assert!(!(has_room && lacks_room), "no room is kept: {result:?}");
        if let Op::Grow { bytes, .. } = op {
            self.chooser.device += bytes;
        }
        self.tried.shares += u64::from(result.is_ok() && matches!(op, Op::Share { .. }));
        let failed = matches!(result, Err(Error::Metadata(_)));
        if failed {
            [&mut before, &mut after, &mut part].into_iter().for_each(Model::doubt);
        }
        after.apply(op, &owned, true);
        part.apply(op, &owned, false);
        let mut candidates = vec![before, after];
        if matches!(op, Op::Unmap(_)) {
            candidates.push(part);
        }
        match (&result, op) {
            (Ok(()), _) => self.model = candidates[1].clone(),
            (Err(_), _) if failed => candidates.iter_mut().for_each(Model::doubt),
            // What they did until then stays.
            (
                Err(Error::Data(_) | Error::NoSpace { .. }),
                Op::Write { serial, first, count, .. },
            ) => {
                candidates[1].doubt_write(*serial, *first..first + count);
                self.model = candidates[1].clone();
            }
            (Err(Error::Data(_)), Op::Together { .. }) => self.model = candidates[1].clone(),
            (Err(Error::NoMetadataSpace { .. }), Op::Unmap(_)) => {
                self.model = candidates[2].clone()
            }
            (Err(_), _) => {}
        }
        (result, candidates)
    }

    /// Crashes, in copies of the device, at some of the instants that were seen.
    fn crash_in_copies(
        &mut self,
        seen: &[Instant],
        candidates: &[Model],
        done: bool,
    ) -> Result<(), String> {
        for (n, instant) in seen.iter().enumerate() {
            if !self.rng.one_in(3) {
                continue;
            }
            let last = [self.model.clone()];
            let may = if done && n + 1 == seen.len() { &last[..] } else { candidates };
            let left = self.rng.of(&WAYS);
            let after = instant.after_power_cut(left, &mut self.rng);
            let place = format!("power cut after access {} of {}, {left:?}", n + 1, seen.len());
            self.crash(after, may, true).map_err(|why| format!("{place}: {why}"))?;
        }
        Ok(())
    }

    /// Loads a copy of the device as it is after a crash, and sometimes crashes in that again.
    fn crash(&mut self, after: Instant, may: &[Model], sure: bool) -> Result<Model, String> {
        self.tried.crashes += 1;
        let copy = self.base.device(after.clone(), self.rng.clone());
        let again = self.rng.one_in(12);
        if again {
            copy.watch();
            only_superblocks(&after)?;
        }
        let (store, model) = load_and_compare(&copy, may, sure)?;
        drop(store);
        let seen = copy.seen();
        for (n, instant) in seen.iter().enumerate() {
            self.tried.crashes += 1;
            let left = self.rng.of(&WAYS);
            let after = instant.after_power_cut(left, &mut self.rng);
            let copy = self.base.device(after, self.rng.clone());
            // What only a cache had until the load may still be lost.
            let may = if n + 1 == seen.len() { std::slice::from_ref(&model) } else { may };
            load_and_compare(&copy, may, true)
                .map_err(|why| format!("in the load after it, too, {left:?}: {why}"))?;
        }
        Ok(model)
    }

    /// A store that stopped says so, and what it said before is still read.
    fn changes_are_refused(&mut self) -> Result<(), String> {
        let store = self.store();
        match store.rename_store("other") {
            Err(Error::Stopped { .. }) => Ok(()),
            other => Err(format!("a stopped store was renamed: {other:?}")),
        }
    }

    /// Ends the process, or the power, or both in order; then loads the store.
    fn restart(
        &mut self,
        seen: Vec<Instant>,
        mut candidates: Vec<Model>,
        stopped: bool,
    ) -> Result<(), String> {
        self.freed.clear();
        let store = self.store.take().expect("it is loaded");
        if !stopped && self.rng.one_in(3) {
            store.close().map_err(|e| format!("close: {e}"))?;
            self.note("closed");
        } else {
            drop(store);
            // Not all that was done before is surely acknowledged at an earlier instant.
            if !seen.is_empty() && self.rng.one_in(2) && candidates.len() > 1 {
                let earlier = self.rng_of(&seen);
                self.device.set(earlier);
                self.note("the process ended earlier");
            }
        }
        let mut sure = false;
        if self.rng.one_in(2) {
            let left = self.rng.of(&WAYS);
            let after = self.device.instant().after_power_cut(left, &mut self.rng);
            self.device.set(after);
            self.note(format!("power cut, {left:?}"));
            sure = true;
        } else if self.rng.one_in(3) {
            self.device.change(Instant::evict);
        }
        if stopped && self.rng.one_in(3) {
            self.load_stopped(&candidates, sure)?;
        }
        self.device.plan(None);
        if self.rng.one_in(4) {
            self.rot_and_load(&candidates, sure)?;
        }
        let plan = self.plan();
        self.device.plan(plan);
        if plan.is_some() && load(&self.device).is_err() {
            self.note(format!("a load failed with {plan:?}"));
            candidates.iter_mut().for_each(Model::doubt);
            sure = false;
            if self.rng.one_in(2) {
                let left = self.rng.of(&WAYS);
                let after = self.device.instant().after_power_cut(left, &mut self.rng);
                self.device.set(after);
                self.note(format!("power cut, {left:?}"));
                sure = true;
            }
        }
        self.device.plan(None);
        self.tried.crashes += 1;
        let (store, model) = load_and_compare(&self.device, &candidates, sure)?;
        (self.store, self.model) = (Some(store), model);
        self.zeros_are_zeros()?;
        self.chooser.device = self.device.instant().size();
        Ok(())
    }

    fn rng_of(&mut self, seen: &[Instant]) -> Instant {
        seen[self.rng.below(seen.len() as u64) as usize].clone()
    }

    /// Loads the store without writing, as is done while flushes fail.
    fn load_stopped(&mut self, candidates: &[Model], sure: bool) -> Result<(), String> {
        let no_space = false;
        let why = DiskError { op: "flush", offset: 0, len: 0, cause: "it failed".into(), no_space };
        let copy = self.base.device(self.device.instant(), self.rng.clone());
        copy.watch();
        let mut store = Store::load_stopped(copy.clone(), why).map_err(|e| e.to_string())?;
        compare(&mut store, candidates, sure).map_err(|why| format!("load_stopped: {why}"))?;
        match (store.rename_store("other"), copy.seen().is_empty()) {
            (Err(Error::Stopped { .. }), true) => Ok(()),
            (other, _) => Err(format!("a store loaded as stopped was changed: {other:?}")),
        }
    }

    /// Damages a page or two of the metadata. `spare_last`: not those of the last record, whose damage looks
    /// like a write that was cut short.
    fn rot(&mut self, instant: &mut Instant, spare_last: bool) -> Vec<usize> {
        let mut pages = Vec::new();
        for _ in 0..1 + self.rng.below(2) {
            let any = (0..50).map(|_| self.rng.below(self.base.metadata / PAGE as u64) as usize);
            let used = |page: &usize| *instant.page(*page) != [0; PAGE];
            let Some(page) = any.into_iter().find(used) else { continue };
            // One copy of the superblock is whole, or it is no store any more.
            if spare_last && instant.is_last_record(page)
                || page == 16 && pages.contains(&0)
                || pages.contains(&16)
            {
                continue;
            }
            let (at, change) = (self.rng.below(PAGE as u64) as usize, 1 + self.rng.below(255));
            let whole = self.rng.one_in(3);
            instant.rot(page, |bytes| match whole {
                true => bytes.fill(change as u8),
                false => bytes[at] ^= change as u8,
            });
            self.tried.rotten += 1;
            pages.push(page);
        }
        pages
    }

    /// Pages of a store that is not loaded go bad: it is refused, or loaded as it was.
    fn rot_and_load(&mut self, candidates: &[Model], sure: bool) -> Result<(), String> {
        let mut instant = self.device.instant();
        let pages = self.rot(&mut instant, true);
        let copy = self.base.device(instant.clone(), self.rng.clone());
        match Store::load(copy.clone()) {
            Ok(mut store) => {
                compare(&mut store, candidates, sure)
                    .map_err(|why| format!("pages {pages:?} went bad: {why}"))?;
            }
            Err(Error::Damaged { .. } | Error::NotAStore { .. }) => {
                self.tried.refused += 1;
                let copy = self.base.device(instant, self.rng.clone());
                match Store::examine(copy, false) {
                    Ok(found) if found.problems.is_empty() => {
                        return Err(format!("pages {pages:?} went bad; examine finds nothing"));
                    }
                    _ => {}
                }
            }
            Err(e) => return Err(format!("pages {pages:?} went bad: {e}")),
        }
        Ok(())
    }

    /// Pages go bad under a store in use: a check finds and repairs all that a load would need.
    fn rot_in_use(&mut self) -> Result<(), String> {
        let mut instant = self.device.instant();
        let pages = self.rot(&mut instant, false);
        self.device.set(instant);
        self.note(format!("pages {pages:?} go bad"));
        self.is_found_and_repaired(&format!("pages {pages:?} went bad")).map(drop)
    }

    /// What a load of a copy would find wrong is found by a check of the store in use, and repaired; whether
    /// a load would have been wrong without a word.
    fn is_found_and_repaired(&mut self, what: &str) -> Result<bool, String> {
        let may = [self.model.clone()];
        let copy = self.base.device(self.device.instant(), self.rng.clone());
        let loaded = Store::load(copy);
        let refused = loaded.is_err();
        self.tried.refused += u64::from(refused);
        let wrong = match loaded {
            Ok(mut store) => compare(&mut store, &may, false).err(),
            Err(e) => Some(e.to_string()),
        };
        let found = check(self.store.as_mut().expect("it is loaded"), false, &self.freed)
            .map_err(|e| format!("{what}: check: {e}"))?;
        if let Some(wrong) = &wrong
            && found.is_empty()
        {
            return Err(format!("{what}: a check finds nothing, but a load: {wrong}"));
        }
        let mended = check(self.store.as_mut().expect("it is loaded"), true, &self.freed)
            .map_err(|e| format!("{what}: repair: {e}"))?;
        if !mended.iter().all(|problem| problem.repaired) {
            return Err(format!("{what}: not all is repaired: {mended:?}"));
        }
        let left = check(self.store.as_mut().expect("it is loaded"), false, &self.freed)
            .map_err(|e| format!("{what}: check: {e}"))?;
        if !left.is_empty() {
            return Err(format!("{what}: after the repair there is {left:?}"));
        }
        for sure in [false, true] {
            let mut after = self.device.instant();
            if sure {
                after = after.after_power_cut(self.rng.of(&WAYS), &mut self.rng);
            }
            self.crash(after, &may, sure).map_err(|why| format!("{what}, repaired: {why}"))?;
        }
        Ok(wrong.is_some() && !refused)
    }

    /// A write of metadata goes to another page, or nowhere: the store in use finds what it lacks.
    fn write_astray(&mut self, fault: Fault) -> Result<(), String> {
        let plan = Plan { fault, after: self.rng.below(6), times: 1 };
        let faults = self.device.faults();
        self.device.plan(Some(plan));
        for _ in 0..4 {
            self.chooser.free = self.store().info().free_clusters;
            let op = self.chooser.next(&self.model);
            if matches!(op, Op::Check) {
                continue;
            }
            let (result, _) = self.operate(&op);
            self.note(format!("{op:?}: with {plan:?} {result:?}"));
            if self.device.faults() > faults {
                break;
            }
        }
        self.device.plan(None);
        if self.device.faults() > faults {
            let (count, what) = match fault {
                Fault::Lost => (&mut self.tried.lost, "a write went nowhere"),
                _ => (&mut self.tried.misdirected, "a write went elsewhere"),
            };
            *count += 1;
            let stale = self.is_found_and_repaired(what)?;
            self.tried.stale += u64::from(stale);
        }
        Ok(())
    }
}

/// Has all in memory that blobs have.
fn bring_all(store: &mut Store<Device>) -> Result<(), String> {
    let blobs: Vec<_> = store.blobs().collect();
    blobs.iter().try_for_each(|blob| store.clusters(blob.id).map(drop)).map_err(|e| e.to_string())
}

/// A power cut leaves no damage but an old or torn copy of the superblock.
fn only_superblocks(after: &Instant) -> Result<(), String> {
    let mut disk = Device::new(after.clone(), 0, 0..0, Rng::new(0));
    assert!(disk.size() > 0 && disk.flush().is_ok());
    let found = Store::examine(disk, false).map_err(|e| format!("examine: {e}"))?;
    match found.problems.iter().find(|p| !p.place.starts_with("superblock copy")) {
        None => Ok(()),
        Some(other) => Err(format!("examine: {other:?}")),
    }
}
