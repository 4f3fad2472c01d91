//! Any sequence of operations gives what a map from volume to bytes gives.
//!
//! The disk below completes I/O late and in any order, so resizes, deletions and unmaps happen with
//! I/O in flight; clusters go from volume to volume, and a write that came late to a cluster which
//! meanwhile belongs to another volume would show.

use crate::common::{CLUSTER, PER_CLUSTER, Rig, WITH_TUPLE, tags};
use bdev::testing::FaultBdev;
use bdev::{
    Channel, Checks, Completion, Io, IoError, Op, Protected, ProtectionType, Shared, Submit,
    TUPLE_LEN, Tuples,
};
use guestmem::{Bounce, Sg};
use lvol::{LvstoreOptions, NewLvol};
use proptest::prelude::*;
use protection::Tuple;
use reactor::IoContext;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use uuid::Uuid;

/// Largest volume, in clusters.
const LARGEST: u64 = 12;
/// Volumes and snapshots at a time.
const VOLUMES: usize = 7;
/// Contents of a block of which more than one value is right.
const UNKNOWN: u64 = u64::MAX;
/// The first one of an I/O's; before it are those of the image.
const FIRST_TAG: u64 = 4096;
const _: () = assert!(FIRST_TAG > crate::common::IMAGE * PER_CLUSTER);
/// Blocks of one I/O whose tuples lie behind them: as many as fit into its buffer.
const BEHIND: u64 = (Bounce::LEN / WITH_TUPLE) as u64 - 1;

#[derive(Clone, Debug)]
enum Step {
    Create {
        size: u64,
        thin: bool,
    },
    Delete(usize),
    Resize(usize, u64),
    Snapshot(usize),
    Clone(usize),
    /// Of a bdev that is not in the lvstore.
    CloneImage,
    /// Whether from all its snapshots.
    Detach(usize, bool),
    /// Volume, first block, blocks.
    Write(usize, u64, u64),
    Read(usize, u64, u64),
    Unmap(usize, u64, u64),
    Zero(usize, u64, u64),
    Flush(usize),
    /// Volume and cluster, of which so many are to be the other's as well.
    Share((usize, u64), (usize, u64), u64),
    /// Polls every channel so many times.
    Poll(u32),
    /// Of all that is in memory and can be read again.
    LetGo,
    Restart,
}

fn step() -> impl Strategy<Value = Step> {
    let volume = || 0..VOLUMES;
    let small = || (0..LARGEST * PER_CLUSTER, 1..=128u64);
    let large = || (0..LARGEST * PER_CLUSTER, 1..=4 * PER_CLUSTER);
    prop_oneof![
        3 => (1..=LARGEST, any::<bool>()).prop_map(|(size, thin)| Step::Create { size, thin }),
        1 => volume().prop_map(Step::Delete),
        3 => (volume(), 1..=LARGEST).prop_map(|(v, size)| Step::Resize(v, size)),
        2 => volume().prop_map(Step::Snapshot),
        2 => volume().prop_map(Step::Clone),
        2 => Just(Step::CloneImage),
        1 => (volume(), any::<bool>()).prop_map(|(v, all)| Step::Detach(v, all)),
        10 => (volume(), small()).prop_map(|(v, (l, n))| Step::Write(v, l, n)),
        5 => (volume(), small()).prop_map(|(v, (l, n))| Step::Read(v, l, n)),
        2 => (volume(), large()).prop_map(|(v, (l, n))| Step::Unmap(v, l, n)),
        2 => (volume(), large()).prop_map(|(v, (l, n))| Step::Zero(v, l, n)),
        1 => volume().prop_map(Step::Flush),
        4 => ((volume(), 0..LARGEST), (volume(), 0..LARGEST), 1..=4u64)
            .prop_map(|(from, to, count)| Step::Share(from, to, count)),
        4 => (1..6u32).prop_map(Step::Poll),
        4 => Just(Step::LetGo),
        1 => Just(Step::Restart),
    ]
}

/// An I/O under way, with its own buffer.
struct Flight {
    tag: u64,
    op: Op,
    lba: u64,
    blocks: u64,
    value: u64,
    /// The volume was cut or removed below it: it may fail, and what it wrote is not known.
    doomed: bool,
    buf: Bounce,
    carried: Carried,
}

/// How an I/O has tuples.
enum Carried {
    Not,
    Apart(Bounce),
    Behind,
}

/// Those of a write with that value, by the number of the I/O: every third has none.
fn carried(value: u64, blocks: u64) -> Carried {
    match value % 3 {
        1 => Carried::Apart(Bounce::new()),
        2 if blocks <= BEHIND => Carried::Behind,
        _ => Carried::Not,
    }
}

/// The first `len` bytes of a buffer, or more.
fn room(buf: &Bounce, len: usize) -> Sg {
    buf.sg(len.next_multiple_of(Bounce::GRAIN)).unwrap()
}

/// The tuple of a block with that value, which was written with it.
fn tuple(kind: ProtectionType, lba: u64, value: u64) -> Tuple {
    let data = crate::common::tagged(value, 1);
    let tuple = Tuple { app_tag: value as u16 & 0x7FFF, ..Tuple::of(kind, lba, &data) };
    match kind {
        ProtectionType::Type1 => tuple,
        ProtectionType::Type3 => Tuple { ref_tag: value as u32 * 7, ..tuple },
    }
}

/// The tuple that a block has which has that value: its writer's, or the one that was made for it. Zeros
/// were never written, or are not any more; and nobody knows of the image.
fn is_its(kind: ProtectionType, lba: u64, value: u64, found: Tuple) -> bool {
    let made = Tuple::of(kind, lba, &crate::common::tagged(value, 1));
    let given = tuple(kind, lba, value);
    match (value, value % 3) {
        (0, _) => found == Tuple::UNWRITTEN,
        (1..FIRST_TAG, _) => found == Tuple::UNWRITTEN || found == made,
        (_, 0) => found == made,
        (_, 1) => found == given,
        _ => found == given || found == made,
    }
}

impl Flight {
    /// Its blocks that are there.
    fn range(&self, model: &[u64]) -> std::ops::Range<usize> {
        let end = ((self.lba + self.blocks) as usize).min(model.len());
        (self.lba as usize).min(end)..end
    }
}

struct Live {
    uuid: Uuid,
    name: String,
    thin: bool,
    /// Whether it was thin when its bdev was made.
    unmaps: bool,
    /// What is unmapped may stay as it is: it has had a snapshot, or became thick.
    vague: bool,
    read_only: bool,
    kind: Option<ProtectionType>,
    channel: Box<dyn Channel>,
    /// By block.
    model: Vec<u64>,
    flights: Vec<Flight>,
}

struct World {
    rig: Rig,
    image: Arc<FaultBdev>,
    io: IoContext,
    volumes: Vec<Option<Live>>,
    next_tag: u64,
    names: u64,
}

impl World {
    fn new(seed: u64, kind: Option<ProtectionType>) -> World {
        let rig = Rig::of_kind(80, kind);
        rig.disk.defer(Some(seed));
        let options =
            LvstoreOptions { share_clusters: !seed.is_multiple_of(4), ..crate::common::options() };
        rig.lvstores.create_lvstore("disk0", "lvs0", &options).unwrap();
        let image = crate::common::image();
        image.defer(Some(seed ^ 1));
        rig.registry.register(image.clone()).unwrap();
        let io = IoContext::new().unwrap();
        World {
            rig,
            image,
            io,
            volumes: (0..VOLUMES).map(|_| None).collect(),
            next_tag: FIRST_TAG,
            names: 0,
        }
    }

    fn run(&mut self, step: &Step) {
        match *step {
            Step::Create { size, thin } => self.create(size, thin),
            Step::Delete(v) => self.delete(v),
            Step::Resize(v, size) => self.resize(v, size),
            Step::Snapshot(v) => self.snapshot(v),
            Step::Clone(v) => self.clone_of(v),
            Step::CloneImage => self.clone_image(),
            Step::Detach(v, all) => self.detach(v, all),
            Step::Write(v, lba, n) => self.start(v, Op::Write, lba, n),
            Step::Read(v, lba, n) => self.start(v, Op::Read, lba, n),
            Step::Unmap(v, lba, n) => self.start(v, Op::Unmap, lba, n),
            Step::Zero(v, lba, n) => self.start(v, Op::WriteZeroes, lba, n),
            Step::Flush(v) => self.start(v, Op::Flush, 0, 0),
            Step::Share(from, to, count) => self.share(from, to, count),
            Step::Poll(times) => (0..times).for_each(|_| self.poll()),
            Step::LetGo => self.control(|rig| rig.lvstores.let_go_maps("lvs0")).unwrap(),
            Step::Restart => self.restart(),
        }
    }

    /// Runs a control operation on a thread of its own, as in life; polls meanwhile only after a
    /// while, so that I/O stays in flight over most operations.
    fn control<R: Send>(&mut self, f: impl FnOnce(&Rig) -> R + Send) -> R {
        let World { rig, volumes, .. } = self;
        let done = AtomicBool::new(false);
        std::thread::scope(|scope| {
            let thread = scope.spawn(|| {
                let result = f(rig);
                done.store(true, Ordering::Release);
                result
            });
            let begun = std::time::Instant::now();
            while !done.load(Ordering::Acquire) {
                if begun.elapsed() > std::time::Duration::from_millis(20) {
                    volumes.iter_mut().flatten().for_each(poll_one);
                }
                std::thread::yield_now();
            }
            thread.join().unwrap()
        })
    }

    fn create(&mut self, size: u64, thin: bool) {
        if self.volumes.iter().all(Option::is_some) {
            return;
        }
        self.names += 1;
        let name = format!("v{}", self.names);
        let created = self.control(move |rig| rig.create(&name, size, thin));
        match created {
            Ok(info) => {
                let model = vec![0; (size * PER_CLUSTER) as usize];
                let made = self.add(&info, model, false);
                made.vague = false;
            }
            Err(e) => {
                assert!(matches!(e, lvol::Error::NoSpace { .. }), "{e}");
                let free = self.rig.lvstores.lvstore("lvs0").unwrap().free_clusters;
                assert!(!thin && size > free, "{size} of {free} clusters: {e}");
            }
        }
    }

    /// A new volume, which is read as `model`, and may share what it has with another one.
    fn add(&mut self, info: &lvol::LvolInfo, model: Vec<u64>, read_only: bool) -> &mut Live {
        let at = self.volumes.iter().position(Option::is_none).expect("looked for before");
        let channel = self.rig.bdev(&info.alias).open(&self.io).unwrap();
        let (uuid, name, thin) = (info.uuid, info.name.clone(), info.is_thin_provisioned);
        let (unmaps, vague, flights) = (thin, true, Vec::new());
        let kind = self.rig.kind;
        self.volumes[at].insert(Live {
            uuid,
            name,
            thin,
            unmaps,
            vague,
            read_only,
            kind,
            channel,
            model,
            flights,
        })
    }

    fn snapshot(&mut self, v: usize) {
        if self.volumes.iter().all(Option::is_some) {
            return;
        }
        let Some(live) = self.volumes[v].as_ref().filter(|live| !live.read_only) else { return };
        self.names += 1;
        let (key, name) = (live.uuid.to_string(), format!("s{}", self.names));
        // What is in flight is in it or not.
        let mut model = live.model.clone();
        for flight in live.flights.iter().filter(|f| f.op != Op::Read) {
            model[flight.range(&live.model)].fill(UNKNOWN);
        }
        let info = self
            .control(|rig| rig.lvstores.snapshot(&key, &NewLvol::named(name.as_str())))
            .unwrap();
        assert!(info.is_snapshot && info.is_read_only, "{info:?}");
        let live = self.volumes[v].as_mut().unwrap();
        (live.thin, live.vague) = (true, true);
        self.add(&info, model, true);
    }

    fn clone_of(&mut self, v: usize) {
        if self.volumes.iter().all(Option::is_some) {
            return;
        }
        let Some(live) = self.volumes[v].as_ref() else { return };
        self.names += 1;
        let (key, name) = (live.uuid.to_string(), format!("c{}", self.names));
        let (model, snapshot) = (live.model.clone(), live.read_only);
        match self.control(|rig| rig.lvstores.clone_lvol(&key, &NewLvol::named(name.as_str()))) {
            Ok(info) => {
                assert!(snapshot && info.is_clone && info.is_thin_provisioned, "{info:?}");
                self.add(&info, model, false);
            }
            Err(e) => assert!(matches!(e, lvol::Error::NotASnapshot { .. }) && !snapshot, "{e}"),
        }
    }

    fn clone_image(&mut self) {
        if self.volumes.iter().all(Option::is_some) {
            return;
        }
        self.names += 1;
        let new = NewLvol::named(format!("e{}", self.names));
        let info = self.control(|rig| rig.lvstores.clone_bdev("image", "lvs0", &new)).unwrap();
        assert!(info.is_esnap_clone && !info.is_degraded, "{info:?}");
        self.add(&info, crate::common::image_tags(), false);
    }

    fn detach(&mut self, v: usize, all: bool) {
        let Some(live) = self.volumes[v].as_ref() else { return };
        let key = live.uuid.to_string();
        let parted = self.control(|rig| match all {
            true => rig.lvstores.inflate(&key),
            false => rig.lvstores.decouple_parent(&key),
        });
        let live = self.volumes[v].as_mut().unwrap();
        match parted {
            Ok(()) => (live.thin, live.vague) = (live.thin && !all, true),
            Err(lvol::Error::NoSpace { .. }) => {}
            Err(e) => assert!(matches!(e, lvol::Error::NoParent { .. }) && !all, "{e}"),
        }
    }

    fn share(&mut self, (from, first): (usize, u64), (to, at): (usize, u64), count: u64) {
        let key = |v: usize| self.volumes[v].as_ref().map(|live| live.uuid.to_string());
        let (Some(source), Some(target)) = (key(from), key(to)) else { return };
        let [first, at, blocks] = [first, at, count].map(|clusters| clusters * PER_CLUSTER);
        let (source, target) = (self.rig.bdev(&source), self.rig.bdev(&target));
        let sharing = target.sharing().expect("an lvol");
        let Some((0, blocks)) = sharing.part(&source, first, at, blocks) else { return };
        let live = self.volumes[to].as_mut().unwrap();
        let overlaps = |f: &Flight| at < f.lba + f.blocks && f.lba < at + blocks;
        while live.flights.iter().any(overlaps) {
            poll_one(live);
        }
        // What is in flight is in it or not.
        let live = self.volumes[from].as_ref().unwrap();
        let mut model = live.model.clone();
        for flight in live.flights.iter().filter(|f| f.op != Op::Read) {
            model[flight.range(&live.model)].fill(UNKNOWN);
        }
        let shared = self.control(|_| {
            let sharing = target.sharing().expect("an lvol");
            sharing.share(&source, first, at, blocks, Box::new(|| true))
        });
        match shared.unwrap() {
            Shared::Not => {}
            Shared::Cancelled => panic!("it was wanted"),
            Shared::Done(blocks) => {
                let range = |begin: u64| begin as usize..(begin + blocks) as usize;
                let (from_range, range) = (range(first), range(at));
                let live = self.volumes[to].as_mut().unwrap();
                live.model[range].copy_from_slice(&model[from_range]);
                live.vague = true;
                self.volumes[from].as_mut().unwrap().vague = true;
            }
        }
    }

    fn delete(&mut self, v: usize) {
        let Some(mut live) = self.volumes[v].take() else { return };
        if live.read_only {
            let info = self.rig.bdev(&live.uuid.to_string()).driver_specific();
            if info["lvol"]["clones"].as_array().is_some_and(|clones| clones.len() > 1) {
                let deleted = self.rig.lvstores.delete_lvol(&live.uuid.to_string());
                assert!(matches!(deleted, Err(lvol::Error::HasClones { .. })), "{deleted:?}");
                self.volumes[v] = Some(live);
                return;
            }
        }
        live.flights.iter_mut().for_each(|f| f.doomed = true);
        let key = format!("lvs0/{}", live.name);
        let mut lives = vec![Some(live)];
        std::mem::swap(&mut self.volumes, &mut lives);
        self.control(|rig| rig.lvstores.delete_lvol(&key)).unwrap();
        std::mem::swap(&mut self.volumes, &mut lives);
        // Its late I/O ends somehow, and the channel outlives the volume.
        let mut live = lives.pop().unwrap().unwrap();
        while !live.flights.is_empty() {
            poll_one(&mut live);
        }
    }

    fn resize(&mut self, v: usize, size: u64) {
        let Some(live) = self.volumes[v].as_mut().filter(|live| !live.read_only) else { return };
        let key = live.uuid.to_string();
        let blocks = size * PER_CLUSTER;
        for flight in live.flights.iter_mut().filter(|f| f.lba + f.blocks > blocks) {
            flight.doomed = true;
            if flight.op != Op::Read {
                let range = flight.range(&live.model);
                live.model[range].fill(UNKNOWN);
            }
        }
        let before = live.model.len() as u64 / PER_CLUSTER;
        let thin = live.thin;
        match self.control(|rig| rig.lvstores.resize_lvol(&key, size * CLUSTER)) {
            Ok(info) => {
                assert_eq!(info.size, size * CLUSTER);
                let live = self.volumes[v].as_mut().unwrap();
                live.model.resize(blocks as usize, 0);
            }
            Err(e) => {
                assert!(matches!(e, lvol::Error::NoSpace { .. }), "{e}");
                let free = self.rig.lvstores.lvstore("lvs0").unwrap().free_clusters;
                assert!(!thin && size - before > free, "{size} - {before} of {free}: {e}");
            }
        }
    }

    fn start(&mut self, v: usize, op: Op, lba: u64, blocks: u64) {
        let Some(live) = &mut self.volumes[v] else { return };
        if live.read_only && !matches!(op, Op::Read | Op::Flush) {
            return;
        }
        let blocks = if op == Op::Flush {
            0
        } else {
            blocks.min((live.model.len() as u64).saturating_sub(lba))
        };
        if blocks == 0 && op != Op::Flush {
            return;
        }
        // I/Os that overlap have no order among each other: wait for those in flight.
        let overlaps = |f: &Flight| lba < f.lba + f.blocks && f.lba < lba + blocks;
        while live.flights.iter().any(overlaps) {
            poll_one(live);
        }
        let buf = Bounce::new();
        let value = self.next_tag;
        let sg = match op {
            Op::Read | Op::Write => buf.sg((blocks * crate::common::BLOCK) as usize).unwrap(),
            _ => Sg::EMPTY,
        };
        let mut io = Io { op, fua: value.is_multiple_of(7), lba, blocks, sg, tag: value };
        self.next_tag += 1;
        let kind = self.rig.kind.filter(|_| matches!(op, Op::Read | Op::Write));
        let carried = kind.map_or(Carried::Not, |_| carried(value, blocks));
        let (per_block, tuples) = match &carried {
            Carried::Not => (crate::common::BLOCK as usize, Tuples::None),
            // From the third on.
            Carried::Apart(buf) => (
                crate::common::BLOCK as usize,
                Tuples::Apart(room(buf, (blocks as usize + 2) * TUPLE_LEN), 2),
            ),
            Carried::Behind => {
                io.sg = room(&buf, blocks as usize * WITH_TUPLE);
                (WITH_TUPLE, Tuples::Behind)
            }
        };
        if op == Op::Write {
            let block = crate::common::tagged(value, 1);
            for nth in 0..blocks as usize {
                io.sg.copy_from_slice(nth * per_block, &block);
                let Some(kind) = kind else { continue };
                let tuple = tuple(kind, lba + nth as u64, value).to_bytes();
                match tuples {
                    Tuples::Apart(list, at) => {
                        list.copy_from_slice((nth + at as usize) * TUPLE_LEN, &tuple)
                    }
                    Tuples::Behind => io.sg.copy_from_slice(nth * per_block + block.len(), &tuple),
                    Tuples::None | Tuples::Like(_) => 0,
                };
            }
        }
        let with = Protected::new(tuples, Checks::ALL);
        let flight = Flight { tag: value, op, lba, blocks, value, doomed: false, buf, carried };
        loop {
            let submit = match flight.carried {
                Carried::Not => live.channel.submit(&io),
                Carried::Apart(_) | Carried::Behind => live.channel.submit_protected(&io, &with),
            };
            match submit {
                Submit::Done(result) => {
                    let abilities = (live.unmaps, live.vague, live.kind);
                    finish(abilities, &mut live.model, &flight, result);
                    return;
                }
                Submit::Pending => break,
                Submit::Full => poll_one(live),
            }
        }
        live.flights.push(flight);
    }

    fn poll(&mut self) {
        self.volumes.iter_mut().flatten().for_each(poll_one);
    }

    fn drain(&mut self) {
        while self.volumes.iter().flatten().any(|live| !live.flights.is_empty()) {
            self.poll();
        }
    }

    fn restart(&mut self) {
        self.drain();
        let models: Vec<_> = self
            .volumes
            .iter_mut()
            .map(|v| v.take().map(|l| (l.uuid, l.name, l.thin, l.vague, l.read_only, l.model)))
            .collect();
        let rig = std::mem::replace(&mut self.rig, Rig::new(1));
        self.rig = rig.restart();
        self.rig.registry.register(self.image.clone()).unwrap();
        self.rig.lvstores.examine("disk0").unwrap().unwrap();
        let open = |(uuid, name, thin, vague, read_only, model): (Uuid, _, bool, _, _, _)| {
            let channel = self.rig.bdev(&uuid.to_string()).open(&self.io).unwrap();
            let (unmaps, flights) = (thin, Vec::new());
            let kind = self.rig.kind;
            Live { uuid, name, thin, unmaps, vague, read_only, kind, channel, model, flights }
        };
        self.volumes = models.into_iter().map(|m| m.map(open)).collect();
    }

    /// Where a snapshot differs from another lvol, the ranges that changed say so; where it has anything
    /// but zeros, those that are allocated.
    fn check_ranges(&self) {
        let told = |of: &Live, since: Option<&Live>| {
            let [of, since] = [Some(of), since].map(|l| l.map(|l| l.uuid.to_string()));
            let found = self.rig.lvstores.ranges(&of.unwrap(), since.as_deref(), 0, usize::MAX);
            found.unwrap().ranges
        };
        let known = |tag: u64| tag != UNKNOWN;
        let snapshots = || self.volumes.iter().flatten().filter(|live| live.read_only);
        for snapshot in snapshots() {
            for since in snapshots().map(Some).chain([None]) {
                let ranges = told(snapshot, since);
                for (lba, tag) in snapshot.model.iter().copied().enumerate() {
                    let before = since.map_or(0, |s| s.model.get(lba).copied().unwrap_or(0));
                    let at = lba as u64 * crate::common::BLOCK;
                    let says = ranges.iter().any(|r| (r.offset..r.offset + r.length).contains(&at));
                    let same = tag == before || !known(tag) || !known(before);
                    assert!(says || same, "block {lba}: {before} is {tag} now, {ranges:?}");
                }
            }
        }
    }

    /// Everything is as the model says, and every cluster is somebody's or free.
    fn check(&mut self) {
        self.drain();
        for v in 0..self.volumes.len() {
            let Some(blocks) = self.volumes[v].as_ref().map(|l| l.model.len() as u64) else {
                continue;
            };
            for lba in (0..blocks).step_by(128) {
                self.start(v, Op::Read, lba, 128);
            }
        }
        self.drain();
        let lvols = self.rig.lvstores.lvols(None).unwrap();
        assert_eq!(lvols.len(), self.volumes.iter().flatten().count());
        for (live, info) in
            self.volumes.iter().flatten().map(|live| {
                (live, lvols.iter().find(|l| l.uuid == live.uuid).expect("it is listed"))
            })
        {
            assert_eq!(info.size / crate::common::BLOCK, live.model.len() as u64);
            let clusters = info.size / CLUSTER;
            assert_eq!(info.is_thin_provisioned, live.thin, "{info:?}");
            if live.thin && live.vague {
                assert!(info.num_allocated_clusters <= clusters);
            } else if live.thin {
                let used = live.model.chunks(PER_CLUSTER as usize);
                let used = used.filter(|c| c.iter().any(|t| *t != 0 && *t != UNKNOWN)).count();
                assert!((used as u64..=clusters).contains(&info.num_allocated_clusters));
            } else {
                assert_eq!(info.num_allocated_clusters, clusters);
            }
        }
        self.check_ranges();
        let lvs = &self.rig.lvstores.lvstores()[0];
        let owned: u64 = lvols.iter().map(|l| l.num_allocated_clusters).sum();
        assert_eq!(lvs.free_clusters + owned, lvs.total_data_clusters);
    }
}

fn poll_one(live: &mut Live) {
    let mut done: Vec<Completion> = Vec::with_capacity(2);
    live.channel.poll(&mut done);
    for c in done {
        let at = live.flights.iter().position(|f| f.tag == c.tag).expect("it was submitted");
        let flight = live.flights.swap_remove(at);
        finish((live.unmaps, live.vague, live.kind), &mut live.model, &flight, c.result);
    }
}

/// Compares a finished I/O with the model, and the model follows it.
fn finish(
    (unmaps, vague, kind): (bool, bool, Option<ProtectionType>),
    model: &mut [u64],
    flight: &Flight,
    result: Result<(), IoError>,
) {
    let range = flight.range(model);
    match result {
        // A thick volume keeps its room.
        Err(IoError::Unsupported) if flight.op == Op::Unmap && !unmaps => {}
        _ if flight.doomed => {
            assert!(
                matches!(
                    result,
                    Ok(()) | Err(IoError::OutOfRange | IoError::Removed | IoError::NoSpace)
                ),
                "{result:?}"
            );
            if flight.op != Op::Read {
                model[range].fill(UNKNOWN);
            }
        }
        Ok(()) => match flight.op {
            Op::Read => {
                let found = read_by(flight, kind);
                for (i, (found, expected)) in tags(&found).iter().zip(&model[range]).enumerate() {
                    assert!(
                        expected == found || *expected == UNKNOWN,
                        "block {} has {found}, not {expected}",
                        flight.lba + i as u64
                    );
                }
            }
            Op::Write => model[range].fill(flight.value),
            Op::Unmap if vague => {
                model[range].iter_mut().filter(|tag| **tag != 0).for_each(|tag| *tag = UNKNOWN);
            }
            Op::Unmap | Op::WriteZeroes => model[range].fill(0),
            Op::Flush => {}
        },
        Err(IoError::NoSpace) if flight.op != Op::Read => model[range].fill(UNKNOWN),
        Err(e) => panic!("{:?} at {}: {e}", flight.op, flight.lba),
    }
}

/// The data of a read, whose blocks have their tuples.
fn read_by(flight: &Flight, kind: Option<ProtectionType>) -> Vec<u8> {
    let (block, blocks) = (crate::common::BLOCK as usize, flight.blocks as usize);
    let mut data = vec![0; blocks * block];
    for (nth, data) in data.chunks_mut(block).enumerate() {
        let mut tuple = [0; TUPLE_LEN];
        match &flight.carried {
            Carried::Not => {
                flight.buf.sg(blocks * block).unwrap().copy_to_slice(nth * block, data);
                continue;
            }
            Carried::Apart(list) => {
                flight.buf.sg(blocks * block).unwrap().copy_to_slice(nth * block, data);
                let list = room(list, (blocks + 2) * TUPLE_LEN);
                list.copy_to_slice((nth + 2) * TUPLE_LEN, &mut tuple);
            }
            Carried::Behind => {
                let list = room(&flight.buf, blocks * WITH_TUPLE);
                list.copy_to_slice(nth * WITH_TUPLE, data);
                list.copy_to_slice(nth * WITH_TUPLE + block, &mut tuple);
            }
        }
        let (lba, value, tuple) =
            (flight.lba + nth as u64, tags(data)[0], Tuple::from_bytes(tuple));
        assert!(is_its(kind.unwrap(), lba, value, tuple), "block {lba}: {value} with {tuple:?}");
    }
    data
}

/// So many cases by day; `VIRTLUN_LVOL_CASES` says another number, as the night does.
fn cases(few: u32) -> ProptestConfig {
    let given = std::env::var("VIRTLUN_LVOL_CASES").ok();
    ProptestConfig {
        cases: given.map_or(few, |n| n.parse().expect("a number")),
        ..ProptestConfig::default()
    }
}

proptest! {
    #![proptest_config(cases(60))]

    #[test]
    fn volumes_behave_as_byte_arrays(
        seed in any::<u64>(),
        steps in prop::collection::vec(step(), 1..90),
    ) {
        let mut world = World::new(seed, None);
        for step in &steps {
            world.run(step);
        }
        world.check();
    }
}

proptest! {
    #![proptest_config(cases(12))]

    /// And those on a disk with protection information have what each block was written with.
    #[test]
    fn volumes_keep_the_protection_information_of_their_blocks(
        seed in any::<u64>(),
        third in any::<bool>(),
        steps in prop::collection::vec(step(), 1..90),
    ) {
        let kind = if third { ProtectionType::Type3 } else { ProtectionType::Type1 };
        let mut world = World::new(seed, Some(kind));
        for step in &steps {
            world.run(step);
        }
        world.check();
    }
}
