//! What is promised, on the device for tests.

use super::keeper::{Keeper, Times};
use super::shared::Want;
use super::*;
use crate::{Tuple, guard};
use ProtectionType::{Type1, Type3};
use bdev::testing::{Fault, FaultBdev};
use bdev::{AlignedBuf, Checks, Op, OwnedChannel, Protection, SyncChannel, TUPLE_LEN};
use serde_json::Value;
use std::sync::atomic::{AtomicU8, Ordering};
use std::time::{Duration, Instant};
use uuid::Uuid;

const CLUSTER: u32 = 16 << 10;

/// Cleans only when it is told to.
const BY_HAND: Times =
    Times { turn: Duration::from_secs(3600), quiet: 1, again: Duration::from_millis(1) };

/// A volume as its owner shows it.
struct Disk {
    area: Area,
    stats: Arc<Stats>,
}

impl Bdev for Disk {
    fn name(&self) -> &'static str {
        "disk"
    }
    fn aliases(&self) -> Vec<String> {
        Vec::new()
    }
    fn uuid(&self) -> Uuid {
        Uuid::nil()
    }
    fn product_name(&self) -> &'static str {
        "test"
    }
    fn geometry(&self) -> Geometry {
        self.area.geometry()
    }
    fn features(&self) -> Features {
        self.area.features()
    }
    fn open(&self, io: &IoContext) -> Result<Box<dyn Channel>, OpenError> {
        self.area.open(&self.stats, io)
    }
    fn driver_specific(&self) -> Value {
        Value::Null
    }
    fn protection(&self) -> Option<Protection> {
        Some(Protection { kind: self.area.kind(), interleaved: false, at_head: false })
    }
}

/// A device of so many clusters, and the volume on it.
struct Host {
    base: Arc<FaultBdev>,
    block: u32,
    kind: ProtectionType,
}

impl Host {
    fn new(block: u32, kind: ProtectionType, data: u64) -> Host {
        let clusters = Layout::new(block, CLUSTER).clusters(data);
        let base = FaultBdev::new("base", block, clusters * u64::from(CLUSTER / block));
        Host { base, block, kind }
    }

    fn layout(&self) -> Layout {
        Layout::new(self.block, CLUSTER)
    }

    fn load(&self) -> Disk {
        self.load_on(self.base.clone())
    }

    fn load_on(&self, below: Arc<dyn Bdev>) -> Disk {
        self.load_within(below, Duration::from_secs(60))
    }

    /// Nothing waits longer for the keeper.
    fn load_within(&self, below: Arc<dyn Bdev>, timeout: Duration) -> Disk {
        let keepers = Arc::new(Keepers::start(timeout).unwrap());
        let area = Area::with(&keepers, below, self.layout(), self.kind, BY_HAND);
        Disk { area, stats: Stats::new() }
    }

    /// Byte of the device where block `lba` lies, and its tuple.
    fn at(&self, lba: u64) -> (usize, usize) {
        let (layout, block) = (self.layout(), self.block as usize);
        let location = layout.locate(lba);
        let page = layout.page(location.zone, location.within / 512) as usize * block;
        (location.lba as usize * block, page + (location.within % 512) as usize * TUPLE_LEN)
    }

    fn data(&self, lba: u64, seed: u64) -> Vec<u8> {
        let word = (seed << 40 | lba).wrapping_mul(0x9e37_79b9_7f4a_7c15).to_le_bytes();
        let byte = |n: usize| word[n % 8].wrapping_add(n as u8);
        (0..self.block as usize).map(byte).collect()
    }

    /// A tuple as a guest makes it that has something to say in each of the tags that are its own.
    fn tuple(&self, lba: u64, seed: u64) -> Tuple {
        let data = self.data(lba, seed);
        let tuple = Tuple { app_tag: seed as u16 & 0x7FFF, ..Tuple::of(self.kind, lba, &data) };
        match self.kind {
            Type1 => tuple,
            Type3 => Tuple { ref_tag: 0xABCD_0000 | seed as u32, ..tuple },
        }
    }

    /// Blocks with their tuples behind them.
    fn both(&self, lba: u64, count: u64, seed: u64) -> AlignedBuf {
        let whole = self.block as usize + TUPLE_LEN;
        let mut both = AlignedBuf::zeroed(count as usize * whole);
        for (at, one) in (lba..).zip(both.chunks_mut(whole)) {
            one[..whole - TUPLE_LEN].copy_from_slice(&self.data(at, seed));
            one[whole - TUPLE_LEN..].copy_from_slice(&self.tuple(at, seed).to_bytes());
        }
        both
    }
}

fn open(disk: &Disk) -> SyncChannel {
    SyncChannel::open(disk).unwrap()
}

/// SplitMix64.
struct Random(u64);

impl Random {
    fn below(&mut self, n: u64) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        (z ^ (z >> 31)) % n
    }
}

/// What a block has, or had: its data, and its tuple.
type Version = (Arc<[u8]>, Tuple);

/// What each block may have: what it was written with since the last flush, and what it had then.
struct Model(Vec<Vec<Version>>);

impl Model {
    fn new(disk: &Disk) -> Model {
        let geometry = disk.geometry();
        let zeros: Version = (vec![0; geometry.block_size as usize].into(), Tuple::UNWRITTEN);
        Model(vec![vec![zeros]; geometry.num_blocks as usize])
    }

    fn put(&mut self, lba: u64, count: u64, version: impl Fn(u64) -> Version) {
        (lba..lba + count).for_each(|lba| self.0[lba as usize].push(version(lba)));
    }

    /// Nothing of what was answered can be lost any more.
    fn settle(&mut self, from: u64, count: u64) {
        for of in &mut self.0[from as usize..(from + count) as usize] {
            of.drain(..of.len() - 1);
        }
    }

    fn settle_all(&mut self) {
        self.settle(0, self.0.len() as u64);
    }

    /// Each block is as it was written one time, with the tuple that it had then, and none is taken for damaged.
    /// One that was written since the last flush may be any mix of sectors, without a tuple. What is found is
    /// there from now on.
    fn check(&mut self, channel: &mut SyncChannel, what: &str) {
        let whole = channel.block_size() as usize + TUPLE_LEN;
        let mut all = AlignedBuf::zeroed(self.0.len() * whole);
        channel
            .read_protected(0, &mut all, Checks::ALL)
            .unwrap_or_else(|e| panic!("{what}: {e}, block {:?}", channel.mismatch()));
        for ((lba, of), both) in (0..).zip(&mut self.0).zip(all.chunks(whole)) {
            let (data, tuple) = both.split_last_chunk::<TUPLE_LEN>().unwrap();
            let found: Version = (data.into(), Tuple::from_bytes(*tuple));
            if !of.contains(&found) {
                // It was being written: any mix of sectors, without a tuple, or with one of those that has
                // the same guard, as one in 65,536 has.
                assert!(of.len() > 1, "{what}: block {lba} has {:?}", found.1);
                for (at, sector) in data.chunks(512).enumerate() {
                    let is = |version: &Version| version.0.chunks(512).nth(at) == Some(sector);
                    assert!(of.iter().any(is), "{what}: block {lba} has data that it never had");
                }
                let has = of.iter().any(|version| version.1 == found.1);
                let known = has && found.1.guard == guard(data);
                assert!(found.1 == Tuple::UNWRITTEN || known, "{what}: block {lba}: {:?}", found.1);
            }
            *of = vec![found];
        }
    }
}

#[derive(Clone, Copy, Debug)]
enum Step {
    Write,
    WriteDurably,
    Unmap,
    WriteZeroes,
    Flush,
    Clean,
}

fn some_blocks(host: &Host, random: &mut Random, most: u64) -> (u64, u64) {
    let blocks = host.layout().data_blocks(host.base.geometry().num_blocks);
    let lba = random.below(blocks);
    (lba, 1 + random.below(most.min(blocks - lba)))
}

/// Does things until the base is dead; `each` is told when one was answered.
fn script(
    host: &Host,
    disk: &Disk,
    model: &mut Model,
    (random, steps): (&mut Random, u64),
    kept: bool,
) {
    let mut channel = open(disk);
    for nth in 0..steps {
        let seed = (random.below(1 << 20) << 8) | (nth + 1);
        let (lba, count) = some_blocks(host, random, 700);
        let zeros: Version = (vec![0; host.block as usize].into(), Tuple::UNWRITTEN);
        let step = match random.below(12) {
            0 => Step::Unmap,
            1 => Step::WriteZeroes,
            2 => Step::Clean,
            3 | 4 => Step::Flush,
            5 => Step::WriteDurably,
            _ => Step::Write,
        };
        let done = match step {
            Step::Write => {
                model.put(lba, count, |lba| (host.data(lba, seed).into(), host.tuple(lba, seed)));
                channel.write_protected(lba, &host.both(lba, count, seed), Checks::ALL)
            }
            Step::WriteDurably => {
                // Without tuples: the disk makes them.
                let made = |lba| {
                    let data = host.data(lba, seed);
                    let tuple = Tuple::of(host.kind, lba, &data);
                    (data.into(), tuple)
                };
                model.put(lba, count, made);
                let mut data = AlignedBuf::zeroed((count * u64::from(host.block)) as usize);
                for (at, block) in (lba..).zip(data.chunks_mut(host.block as usize)) {
                    block.copy_from_slice(&host.data(at, seed));
                }
                channel.write_fua(lba, &data).map(|()| model.settle(lba, count))
            }
            Step::Unmap => {
                // What is not a whole cluster stays.
                let cluster = u64::from(CLUSTER / host.block);
                let (from, to) = (lba.next_multiple_of(cluster), (lba + count) / cluster * cluster);
                model.put(from, to.saturating_sub(from), |_| zeros.clone());
                channel.unmap(lba, count)
            }
            Step::WriteZeroes => {
                model.put(lba, count, |_| zeros.clone());
                channel.write_zeroes(lba, count)
            }
            Step::Flush => channel.flush().map(|()| model.settle_all()),
            Step::Clean => {
                disk.area.clean();
                Ok(())
            }
        };
        if done.is_err() {
            assert!(host.base.is_dead(), "{step:?}: {done:?}");
            return;
        }
        if kept {
            model.settle_all();
        }
    }
}

#[test]
fn what_a_guest_writes_beside_its_blocks_comes_back_with_them() {
    for (block, kind) in [(512, Type1), (512, Type3), (4096, Type1), (4096, Type3)] {
        let host = Host::new(block, kind, 100);
        let disk = host.load();
        let mut model = Model::new(&disk);
        model.check(&mut open(&disk), "at first");
        script(&host, &disk, &mut model, (&mut Random(u64::from(block)), 60), true);
        model.check(&mut open(&disk), "written");
        disk.area.close();
        model.check(&mut open(&host.load()), "closed and loaded again");
    }
}

fn crashes(block: u32, kind: ProtectionType, seeds: u64, kept: bool, end: impl Fn(&Host, u64)) {
    let mut points = 0;
    for seed in 1..=seeds {
        // Until it lives through all of it.
        for point in (0..).step_by(2) {
            let host = Host::new(block, kind, 60);
            let disk = host.load();
            let mut model = Model::new(&disk);
            // Some of it is clean, some was never used.
            script(&host, &disk, &mut model, (&mut Random(seed), 8), true);
            open(&disk).flush().unwrap();
            host.base.die_after(point);
            script(&host, &disk, &mut model, (&mut Random(seed ^ 0x5555), 10), kept);
            let survived = !host.base.is_dead();
            disk.area.close();
            drop(disk);
            end(&host, seed * 1000 + point + 1);
            let what = format!("seed {seed}, point {point}");
            let disk = host.load();
            model.check(&mut open(&disk), &what);
            disk.area.close();
            // And once it was closed in order.
            let disk = host.load();
            model.check(&mut open(&disk), &what);
            if survived {
                break;
            }
            points += 1;
        }
    }
    assert!(points > 10 * seeds, "{points}");
}

/// Seeds of the day; `VIRTLUN_PROTECTION_SEEDS` says how many.
fn seeds(few: u64) -> u64 {
    let given = std::env::var("VIRTLUN_PROTECTION_SEEDS").ok();
    given.map_or(few, |n| n.parse().expect("a number"))
}

#[test]
fn no_power_cut_loses_what_was_flushed_or_makes_a_block_look_damaged() {
    crashes(512, Type1, seeds(1), false, |host, seed| host.base.power_cut(seed));
    crashes(4096, Type3, seeds(1), false, |host, seed| host.base.power_cut(seed));
}

#[test]
fn a_power_cut_that_loses_all_or_nothing_does_neither() {
    crashes(512, Type3, seeds(1), false, |host, _| host.base.power_cut(0));
    crashes(512, Type1, seeds(1), false, |host, _| host.base.power_cut(u64::MAX));
}

#[test]
fn a_killed_process_loses_nothing_and_makes_no_block_look_damaged() {
    crashes(512, Type1, seeds(1), true, |host, _| host.base.revive());
}

/// How a read of a block ends, and which was wrong.
fn read(channel: &mut SyncChannel, lba: u64, count: u64) -> Result<(), (IoError, Option<u64>)> {
    let mut data = AlignedBuf::zeroed((count * u64::from(channel.block_size())) as usize);
    channel.read(lba, &mut data).map_err(|e| (e.cause, channel.mismatch()))
}

#[test]
fn what_is_damaged_misplaced_or_of_before_is_found_and_written_over() {
    for block in [512, 4096] {
        let host = Host::new(block, Type1, 100);
        let disk = host.load();
        let mut channel = open(&disk);
        channel.write_protected(0, &host.both(0, 300, 1), Checks::ALL).unwrap();
        let older = host.base.image();
        channel.write_protected(0, &host.both(0, 300, 2), Checks::ALL).unwrap();
        disk.area.clean();
        let put = |from: &[u8], at: usize, bytes: usize| {
            let now = host.base.image();
            (0..bytes).for_each(|nth| host.base.corrupt(at + nth, now[at + nth] ^ from[nth]));
        };
        let (data, tuple) = host.at(7);
        host.base.corrupt(data + 100, 4);
        assert_eq!(read(&mut channel, 3, 20), Err((IoError::Guard, Some(4))));
        host.base.corrupt(data + 100, 4);
        // The data that it had before: a write that was lost.
        put(&older[data..], data, block as usize);
        assert_eq!(read(&mut channel, 3, 20), Err((IoError::Guard, Some(4))));
        // Another block, with its tuple.
        let now = host.base.image();
        let (other, its) = host.at(9);
        put(&now[other..], data, block as usize);
        put(&now[its..], tuple, TUPLE_LEN);
        assert_eq!(read(&mut channel, 3, 20), Err((IoError::RefTag, Some(4))));
        // It stays so, also after a crash: nobody was writing there.
        host.base.power_cut(u64::MAX);
        drop((channel, disk));
        let disk = host.load();
        let mut channel = open(&disk);
        assert_eq!(read(&mut channel, 3, 20), Err((IoError::RefTag, Some(4))));
        channel.write_protected(7, &host.both(7, 1, 3), Checks::ALL).unwrap();
        assert_eq!(read(&mut channel, 3, 20), Ok(()));
    }
}

#[test]
fn a_tuple_that_is_not_its_blocks_is_not_written() {
    let host = Host::new(512, Type1, 48);
    let disk = host.load();
    let mut channel = open(&disk);
    channel.write_protected(0, &host.both(0, 8, 1), Checks::ALL).unwrap();
    let before = host.base.image();
    let mut wrong = host.both(0, 8, 2);
    wrong[3 * 520 + 5] ^= 1;
    let failed = channel.write_protected(0, &wrong, Checks::ALL).unwrap_err().cause;
    assert_eq!((failed, channel.mismatch()), (IoError::Guard, Some(3)));
    assert!(host.base.image() == before);
    // Who asks for no check has it written, and finds it so.
    channel.write_protected(0, &wrong, Checks::NONE).unwrap();
    assert_eq!(read(&mut channel, 0, 8), Err((IoError::Guard, Some(3))));
    let mut found = AlignedBuf::zeroed(wrong.len());
    channel.read_protected(0, &mut found, Checks::NONE).unwrap();
    assert!(found[..] == wrong[..]);
}

#[test]
fn a_block_whose_write_failed_is_not_taken_for_damaged() {
    let host = Host::new(512, Type1, 48);
    let disk = host.load();
    let mut channel = open(&disk);
    channel.write_protected(0, &host.both(0, 8, 1), Checks::ALL).unwrap();
    // The data arrives, and the tuples do not.
    let page = host.at(0).1 as u64 / 512;
    let fault = Fault { lba: page..page + 1, ..Fault::always(Op::Write, IoError::WriteMedium) };
    host.base.inject(fault);
    let failed = channel.write_protected(0, &host.both(0, 8, 2), Checks::ALL).unwrap_err();
    assert_eq!(failed.cause, IoError::WriteMedium);
    assert_eq!(read(&mut channel, 0, 8), Ok(()));
    host.base.clear_faults();
    disk.area.close();
    let disk = host.load();
    let mut channel = open(&disk);
    assert_eq!(read(&mut channel, 0, 8), Ok(()));
    assert_eq!(guard(&host.data(0, 2)), host.tuple(0, 2).guard);
}

#[test]
fn a_map_that_cannot_be_written_fails_the_write_and_nothing_is_changed() {
    let host = Host::new(512, Type1, 48);
    let disk = host.load();
    let mut channel = open(&disk);
    host.base.inject(Fault { count: 1, ..Fault::always(Op::Write, IoError::NoSpace) });
    let both = host.both(0, 8, 1);
    let failed = channel.write_protected(0, &both, Checks::ALL).unwrap_err();
    assert_eq!(failed.cause, IoError::NoSpace);
    assert!(host.base.image().iter().all(|byte| *byte == 0));
    channel.write_protected(0, &both, Checks::ALL).unwrap();
}

#[test]
fn a_damaged_map_has_its_zone_looked_through_and_loses_no_data() {
    let host = Host::new(512, Type1, 60);
    let disk = host.load();
    open(&disk).write_protected(0, &host.both(0, 60, 1), Checks::ALL).unwrap();
    disk.area.close();
    host.base.corrupt(20, 1);
    host.base.corrupt(host.at(5).0, 1);
    let disk = host.load();
    let mut channel = open(&disk);
    // Nothing tells any more that nobody was writing it.
    let mut found = AlignedBuf::zeroed(60 * 520);
    channel.read_protected(0, &mut found, Checks::ALL).unwrap();
    let tuples: Vec<_> = found.chunks(520).map(|both| both[512..] == [0xFF; 8]).collect();
    assert_eq!(tuples.iter().position(|without| *without), Some(5));
    assert_eq!(tuples.iter().filter(|without| **without).count(), 1);
}

#[test]
fn who_reads_beside_those_who_write_never_takes_a_block_for_damaged() {
    let host = Host::new(512, Type1, 48);
    let disk = &host.load();
    host.base.defer(Some(7));
    let (host, ends) = (&host, &std::sync::atomic::AtomicU32::new(0));
    std::thread::scope(|scope| {
        for thread in 0..3u64 {
            scope.spawn(move || {
                let mut channel = OwnedChannel::open(disk, 8).unwrap();
                let (mut random, mut over) = (Random(thread), Vec::new());
                for seed in 1..300 {
                    while channel.is_full() {
                        if channel.poll(&mut over) == 0 {
                            channel.wait(&mut over, 1000);
                        }
                    }
                    let (lba, count) = (random.below(600), 1 + random.below(40));
                    let (op, buf) = match (thread, random.below(8)) {
                        (0, _) => (Op::Read, Some(AlignedBuf::zeroed(40 * 512))),
                        (_, 0) => (Op::Unmap, None),
                        (_, 1) => (Op::WriteZeroes, None),
                        _ => {
                            let mut data = AlignedBuf::zeroed(40 * 512);
                            data.fill(((thread << 6) | (seed % 60)) as u8 + 1);
                            (Op::Write, Some(data))
                        }
                    };
                    let count = if op == Op::Unmap { 600 } else { count };
                    over.extend(channel.submit(op, lba, count, buf, ()));
                }
                while channel.in_flight() > 0 {
                    if channel.poll(&mut over) == 0 {
                        channel.wait(&mut over, 1000);
                    }
                }
                assert_eq!(over.len(), 299);
                let failed: Vec<_> = over.iter().filter_map(|f| f.result.err()).collect();
                assert_eq!(failed, [], "thread {thread}");
                ends.fetch_add(1, std::sync::atomic::Ordering::SeqCst);
            });
        }
    });
    assert_eq!(ends.load(std::sync::atomic::Ordering::SeqCst), 3);
    host.base.defer(None);
    assert_eq!(read(&mut open(disk), 0, disk.geometry().num_blocks), Ok(()));
}

#[test]
fn it_grows_and_shrinks_with_the_device() {
    let host = Host::new(512, Type1, 20);
    let disk = host.load();
    let mut channel = open(&disk);
    assert_eq!(disk.geometry().num_blocks, 20 * 32);
    channel.write_protected(600, &host.both(600, 40, 1), Checks::ALL).unwrap();
    // What it had beyond its end has no tuples when that comes back, as zeros.
    host.base.resize(host.layout().clusters(10) * 32);
    host.base.resize(host.layout().clusters(15) * 32);
    disk.area.forget_beyond().unwrap();
    host.base.resize(host.layout().clusters(100) * 32);
    assert_eq!(disk.geometry().num_blocks, 100 * 32);
    let mut channel = open(&disk);
    channel.write_protected(3000, &host.both(3000, 200, 2), Checks::ALL).unwrap();
    assert_eq!(read(&mut channel, 0, 3200), Ok(()));
    let mut found = AlignedBuf::zeroed(40 * 520);
    channel.read_protected(600, &mut found, Checks::ALL).unwrap();
    assert!(found.chunks(520).all(|both| both[512..] == [0xFF; 8]));
}

#[test]
fn nothing_of_what_a_failed_flush_may_have_lost_is_taken_for_damaged() {
    let host = Host::new(512, Type1, 48);
    let disk = host.load();
    let mut channel = open(&disk);
    channel.write_protected(0, &host.both(0, 64, 1), Checks::ALL).unwrap();
    channel.flush().unwrap();
    let before = host.base.image();
    channel.write_protected(0, &host.both(0, 64, 2), Checks::ALL).unwrap();
    host.base.inject(Fault { count: 1, ..Fault::always(Op::Flush, IoError::Flush) });
    assert_eq!(channel.flush().unwrap_err().cause, IoError::Flush);
    // The kernel lets go of what it could not write; the tuples it had written already.
    let (now, (at, _)) = (host.base.image(), host.at(0));
    (at..at + 64 * 512).for_each(|byte| host.base.corrupt(byte, now[byte] ^ before[byte]));
    assert_eq!(read(&mut channel, 0, 64), Ok(()));
    host.base.flush_latch().unwrap().clear();
    assert_eq!(read(&mut channel, 0, 64), Ok(()));
}

/// Of [`Lying`]: a write of the first block that is not durable ends with an error, and may have got there or not.
const MAP: u8 = 1;
/// A flush fails, once, which nobody remembers.
const FLUSH: u8 = 2;

/// A device that says what is not so.
struct Lying(Arc<FaultBdev>, Arc<AtomicU8>);

struct LyingChannel(Box<dyn Channel>, Arc<AtomicU8>);

impl Channel for LyingChannel {
    fn submit(&mut self, io: &bdev::Io) -> bdev::Submit {
        let did = self.0.submit(io);
        let lie = match (self.1.load(Ordering::SeqCst), io.op) {
            (MAP, Op::Write) if !io.fua && io.lba == 0 => IoError::Aborted,
            (FLUSH, Op::Flush) => {
                self.1.store(0, Ordering::SeqCst);
                IoError::Flush
            }
            _ => return did,
        };
        bdev::Submit::Done(Err(lie))
    }

    fn poll(&mut self, done: &mut Vec<bdev::Completion>) -> u32 {
        self.0.poll(done)
    }
}

impl Bdev for Lying {
    fn name(&self) -> &'static str {
        "lying"
    }
    fn aliases(&self) -> Vec<String> {
        Vec::new()
    }
    fn uuid(&self) -> Uuid {
        Uuid::nil()
    }
    fn product_name(&self) -> &'static str {
        "test"
    }
    fn geometry(&self) -> Geometry {
        self.0.geometry()
    }
    fn features(&self) -> Features {
        self.0.features()
    }
    fn open(&self, io: &IoContext) -> Result<Box<dyn Channel>, OpenError> {
        Ok(Box::new(LyingChannel(self.0.open(io)?, self.1.clone())))
    }
    fn driver_specific(&self) -> Value {
        Value::Null
    }
}

/// Whether the map of the first zone says that its first unit is being written to.
fn is_marked(host: &Host) -> bool {
    host.base.image()[32] & 1 != 0
}

#[test]
fn a_map_that_may_say_clean_is_written_again_before_the_next_write() {
    let host = Host::new(512, Type1, 48);
    let lies = Arc::new(AtomicU8::new(0));
    let disk = host.load_on(Arc::new(Lying(host.base.clone(), lies.clone())));
    let mut channel = open(&disk);
    channel.write_protected(0, &host.both(0, 8, 1), Checks::ALL).unwrap();
    assert!(is_marked(&host));
    lies.store(MAP, Ordering::SeqCst);
    disk.area.clean();
    lies.store(0, Ordering::SeqCst);
    assert!(!is_marked(&host), "it got there");
    channel.write_protected(0, &host.both(0, 8, 2), Checks::ALL).unwrap();
    assert!(is_marked(&host));
    // And what failed is tried again.
    disk.area.clean();
    assert!(!is_marked(&host));
}

/// Waits for the end of all that a channel has; `false`: that does not come.
fn drain<T: Copy>(channel: &mut OwnedChannel<T>, over: &mut Vec<bdev::Finished<T>>) -> bool {
    let until = Instant::now() + Duration::from_secs(30);
    while channel.in_flight() > 0 && Instant::now() < until {
        if channel.poll(over) == 0 {
            channel.wait(over, 1000);
        }
    }
    channel.in_flight() == 0
}

#[test]
fn who_waits_for_memory_has_nothing_that_others_wait_for() {
    let host = Host::new(512, Type1, 48);
    let disk = host.load();
    let mut channel = open(&disk);
    for at in (0..1536).step_by(256) {
        channel.write_protected(at, &host.both(at, 256, 1), Checks::ALL).unwrap();
    }
    disk.area.clean();
    (0..1536).for_each(|lba| host.base.corrupt(host.at(lba).0, 1));
    channel.write_protected(1535, &host.both(1535, 1, 2), Checks::ALL).unwrap();
    drop(channel);
    // Reads have all memory, and each wants its region for itself, as no block is right; an unmap wants all.
    host.base.defer(Some(7));
    host.base.hold();
    let mut channel = OwnedChannel::open(&disk, 128).unwrap();
    let mut over = Vec::new();
    for n in 0..100u64 {
        let data = Some(AlignedBuf::zeroed(256 * 512));
        over.extend(channel.submit(Op::Read, n % 5 * 256, 256, data, n));
    }
    over.extend(channel.submit(Op::Unmap, 0, 1536, None, 100));
    assert!(host.base.held() > 100);
    host.base.release();
    if !drain(&mut channel, &mut over) {
        // Their end would be waited for.
        std::mem::forget((channel, disk));
        panic!("all but {} of the I/Os wait for each other", over.len());
    }
    assert_eq!(over.len(), 101);
    let unmapped = over.iter().find(|f| f.token == 100).unwrap();
    assert_eq!(unmapped.result, Ok(()));
    assert_eq!(read(&mut open(&disk), 0, 1536), Ok(()));
    disk.area.clean();
    assert!(!is_marked(&host), "somebody is still let in");
}

/// The device as a killed process leaves it.
fn killed(host: &Host) -> Host {
    let base = FaultBdev::with_image("base", host.block, host.base.image());
    Host { base, block: host.block, kind: host.kind }
}

/// Waits until all of the first unit is known to be as its tuples say, or not.
fn wait_until_clean(host: &Host, disk: &Disk) {
    let until = Instant::now() + Duration::from_secs(60);
    while is_marked(host) {
        assert!(Instant::now() < until, "it is never looked through");
        disk.area.clean();
        std::thread::sleep(Duration::from_millis(1));
    }
}

#[test]
fn what_could_not_be_looked_through_is_looked_through_later() {
    for op in [Op::Read, Op::Write] {
        let host = Host::new(512, Type1, 48);
        let disk = host.load();
        open(&disk).write_protected(0, &host.both(0, 200, 1), Checks::ALL).unwrap();
        let host = killed(&host);
        host.base.corrupt(host.at(30).0, 1);
        // Its tuples can be read, but not the data; or not be written.
        let at = if op == Op::Read { host.at(0).0 } else { host.at(0).1 } as u64 / 512;
        host.base.inject(Fault {
            lba: at..at + 1,
            count: 3,
            ..Fault::always(op, IoError::ReadMedium)
        });
        let disk = host.load();
        let mut channel = open(&disk);
        assert_eq!(read(&mut channel, 100, 1), Ok(()));
        wait_until_clean(&host, &disk);
        host.base.corrupt(host.at(100).0, 1);
        assert_eq!(read(&mut channel, 100, 1), Err((IoError::Guard, Some(0))));
        assert_eq!(read(&mut channel, 30, 1), Ok(()), "it was being written");
    }
}

#[test]
fn a_flush_that_fails_while_it_is_looked_through_has_it_looked_through_again() {
    let host = Host::new(512, Type1, 48);
    let disk = host.load();
    let mut channel = open(&disk);
    channel.write_protected(0, &host.both(0, 64, 1), Checks::ALL).unwrap();
    let unit = disk.area.shared.unit(0, 0).unwrap();
    unit.suspect();
    let looked_at = unit.doubts();
    host.base.inject(Fault { count: 1, ..Fault::always(Op::Flush, IoError::Flush) });
    assert_eq!(channel.flush().unwrap_err().cause, IoError::Flush);
    disk.area.clean();
    assert!(!unit.trust(looked_at) && unit.doubts() > looked_at);
    host.base.flush_latch().unwrap().clear();
    wait_until_clean(&host, &disk);
    assert_eq!(unit.doubts(), 0);
}

#[test]
fn a_zones_map_is_read_when_something_of_the_zone_is_used_first() {
    let host = Host::new(512, Type1, 48 * 50);
    let disk = host.load();
    let mut channel = open(&disk);
    let reads = || host.base.stats().unwrap().snapshot().op(Op::Read).ops;
    let before = reads();
    assert_eq!(read(&mut channel, 30 * 48 * 32, 1), Ok(()));
    assert_eq!(reads() - before, 3, "a map, a page of tuples and a block");
    assert_eq!(read(&mut channel, 30 * 48 * 32 + 9, 1), Ok(()));
    assert_eq!(reads() - before, 5);
}

#[test]
fn a_map_that_cannot_be_read_is_an_error_and_no_damage_is_hidden_by_it() {
    let host = Host::new(512, Type1, 60);
    let disk = host.load();
    open(&disk).write_protected(0, &host.both(0, 60, 1), Checks::ALL).unwrap();
    disk.area.close();
    host.base.corrupt(host.at(5).0, 1);
    let fault = Fault { lba: 0..1, count: 2, ..Fault::always(Op::Read, IoError::ReadMedium) };
    host.base.inject(fault);
    let disk = host.load();
    let mut channel = open(&disk);
    assert_eq!(read(&mut channel, 0, 1), Err((IoError::ReadMedium, None)));
    let failed = channel.write_protected(0, &host.both(0, 1, 2), Checks::ALL).unwrap_err();
    assert_eq!(failed.cause, IoError::ReadMedium);
    assert_eq!(read(&mut channel, 0, 60), Err((IoError::Guard, Some(5))));
    assert_eq!(read(&mut channel, 48 * 32, 60), Ok(()), "another zone");
}

#[test]
fn zeros_that_are_to_be_durable_are_and_so_is_that_they_have_no_tuples() {
    for (op, from, count) in
        [(Op::WriteZeroes, 5, 20), (Op::WriteZeroes, 0, 1536), (Op::Unmap, 32, 64)]
    {
        let host = Host::new(512, Type1, 48);
        let disk = host.load();
        let mut channel = open(&disk);
        (0..1536).step_by(256).for_each(|at| {
            channel.write_protected(at, &host.both(at, 256, 1), Checks::ALL).unwrap();
        });
        channel.flush().unwrap();
        let (io, mut done) = (IoContext::new().unwrap(), Vec::with_capacity(1));
        let mut raw = disk.open(&io).unwrap();
        let io = bdev::Io { op, fua: true, lba: from, blocks: count, ..bdev::Io::flush(1) };
        let mut ended = raw.submit(&io);
        while ended == bdev::Submit::Pending {
            if raw.poll(&mut done) > 0 {
                ended = bdev::Submit::Done(done[0].result);
            }
        }
        assert_eq!(ended, bdev::Submit::Done(Ok(())));
        drop((raw, channel, disk));
        host.base.power_cut(0);
        let mut found = AlignedBuf::zeroed(count as usize * 520);
        open(&host.load()).read_protected(from, &mut found, Checks::ALL).unwrap();
        for both in found.chunks(520) {
            assert!(both[..512] == [0; 512] && both[512..] == [0xFF; 8], "{op:?}");
        }
    }
}

#[test]
fn an_unmap_of_a_part_of_a_cluster_leaves_it_and_says_so_beforehand() {
    let host = Host::new(512, Type1, 48);
    let disk = host.load();
    let features = disk.features();
    assert!(features.unmap && features.unmap_zeroes && features.unmap_skips);
    assert_eq!(features.zeroing(), Some(Op::WriteZeroes));
    let mut channel = open(&disk);
    channel.write_protected(0, &host.both(0, 128, 1), Checks::ALL).unwrap();
    channel.unmap(20, 80).unwrap();
    let mut found = AlignedBuf::zeroed(128 * 520);
    channel.read_protected(0, &mut found, Checks::ALL).unwrap();
    let is_left = |lba: usize| found[lba * 520..][..520] == host.both(lba as u64, 1, 1)[..];
    assert!((0..128).all(|lba| is_left(lba) != (32..96).contains(&lba)));
    channel.write_zeroes(20, 80).unwrap();
    channel.read_protected(0, &mut found, Checks::ALL).unwrap();
    assert!((20..100).all(|lba: usize| found[lba * 520..][..512] == [0; 512]));
}

#[test]
fn what_was_being_written_beyond_the_end_is_marked_anew_when_that_is_back() {
    let host = Host::new(512, Type1, 49);
    let disk = host.load();
    let mut channel = open(&disk);
    let lba = 48 * 32;
    channel.write_protected(lba, &host.both(lba, 8, 1), Checks::ALL).unwrap();
    host.base.resize(host.layout().clusters(20) * 32);
    disk.area.shrunk();
    assert_eq!(read(&mut channel, lba, 1), Err((IoError::OutOfRange, None)));
    disk.area.forget_beyond().unwrap();
    host.base.resize(host.layout().clusters(49) * 32);
    channel.write_protected(lba, &host.both(lba, 8, 2), Checks::ALL).unwrap();
    channel.flush().unwrap();
    // Of what follows the data is lost and the tuples are not.
    let data = host.base.image();
    channel.write_protected(lba, &host.both(lba, 8, 3), Checks::ALL).unwrap();
    let (now, (at, _)) = (host.base.image(), host.at(lba));
    (at..at + 8 * 512).for_each(|byte| host.base.corrupt(byte, now[byte] ^ data[byte]));
    let host = killed(&host);
    assert_eq!(read(&mut open(&host.load()), lba, 8), Ok(()));
}

#[test]
fn nothing_is_begun_while_it_is_paused_and_all_that_was_begun_is_whole() {
    let host = Host::new(512, Type1, 48);
    let disk = &host.load();
    let mut channel = open(disk);
    channel.write_protected(0, &host.both(0, 64, 1), Checks::ALL).unwrap();
    let host = &host;
    std::thread::scope(|scope| {
        let paused = disk.area.pause().unwrap();
        assert!(!is_marked(host));
        scope.spawn(move || {
            open(disk).write_protected(0, &host.both(0, 64, 2), Checks::ALL).unwrap();
        });
        let until = Instant::now() + Duration::from_secs(60);
        while !disk.area.is_waited_for() {
            assert!(Instant::now() < until, "it was begun");
        }
        // Reads go on.
        assert_eq!(read(&mut channel, 0, 64), Ok(()));
        let image = host.base.image();
        drop(paused);
        let taken = Host { base: FaultBdev::with_image("base", 512, image), ..*host };
        taken.base.corrupt(taken.at(3).0, 1);
        let disk = taken.load();
        assert_eq!(read(&mut open(&disk), 0, 64), Err((IoError::Guard, Some(3))));
    });
    let mut found = AlignedBuf::zeroed(64 * 520);
    channel.read_protected(0, &mut found, Checks::ALL).unwrap();
    assert!(found[..] == host.both(0, 64, 2)[..]);
}

#[test]
fn what_a_flush_of_the_keepers_was_told_the_next_one_of_a_user_is_told() {
    let host = Host::new(512, Type1, 48);
    let lies = Arc::new(AtomicU8::new(0));
    let disk = host.load_on(Arc::new(Lying(host.base.clone(), lies.clone())));
    let mut channel = open(&disk);
    channel.write_protected(0, &host.both(0, 8, 1), Checks::ALL).unwrap();
    lies.store(FLUSH, Ordering::SeqCst);
    disk.area.clean();
    assert!(is_marked(&host), "it may have lost something");
    assert_eq!(channel.flush().unwrap_err().cause, IoError::Flush);
    channel.flush().unwrap();
    wait_until_clean(&host, &disk);
}

/// All blocks can be read, whatever they have.
fn none_looks_damaged(disk: &Disk, what: &str) {
    let mut channel = open(disk);
    let read = read(&mut channel, 0, disk.geometry().num_blocks);
    assert_eq!(read, Ok(()), "{what}");
}

#[test]
fn no_io_that_fails_makes_a_block_look_damaged() {
    for op in [Op::Read, Op::Write, Op::Flush, Op::WriteZeroes] {
        for skip in (0..).step_by(3) {
            let host = Host::new(512, Type1, 60);
            let disk = host.load();
            let mut channel = open(&disk);
            for at in (0..1792).step_by(256) {
                channel.write_protected(at, &host.both(at, 256, 1), Checks::ALL).unwrap();
            }
            disk.area.clean();
            host.base.inject(Fault { skip, count: 1, ..Fault::always(op, IoError::WriteMedium) });
            let (mut random, mut failed) = (Random(skip + 1), 0);
            for seed in 2..14 {
                let (lba, count) = some_blocks(&host, &mut random, 300);
                let done = match random.below(6) {
                    0 => channel.write_zeroes(lba, count),
                    1 => channel.unmap(lba, count),
                    2 => channel.flush(),
                    3 => read(&mut channel, lba, count).map_err(|(cause, _)| bdev::SyncError {
                        name: String::new(),
                        op: Op::Read,
                        lba,
                        blocks: count,
                        cause,
                    }),
                    _ => channel.write_protected(lba, &host.both(lba, count, seed), Checks::ALL),
                };
                let mismatch = done.as_ref().is_err_and(|e| e.cause.is_mismatch());
                assert!(!mismatch, "{op:?} {skip}: {done:?}");
                failed += u32::from(done.is_err());
                if seed % 4 == 0 {
                    disk.area.clean();
                }
            }
            let struck = failed > 0 || host.base.flush_latch().unwrap().is_set();
            host.base.clear_faults();
            let what = format!("{op:?} {skip}");
            none_looks_damaged(&disk, &what);
            if op == Op::Flush {
                host.base.flush_latch().unwrap().clear();
                none_looks_damaged(&disk, &what);
            } else {
                drop((channel, disk));
                host.base.power_cut(skip + 1);
                none_looks_damaged(&host.load(), &what);
            }
            if !struck && skip > 60 {
                break;
            }
        }
    }
}

/// A volume that was killed while it wrote 200 blocks, of which block 30 has data without its tuple. The map
/// takes no writes, so that it is not looked through.
fn with_a_torn_block() -> (Host, Disk) {
    let host = Host::new(512, Type1, 48);
    let disk = host.load();
    open(&disk).write_protected(0, &host.both(0, 200, 1), Checks::ALL).unwrap();
    let host = killed(&host);
    host.base.corrupt(host.at(30).0, 1);
    host.base.inject(Fault { lba: 0..1, ..Fault::always(Op::Write, IoError::WriteMedium) });
    let disk = host.load();
    (host, disk)
}

#[test]
fn who_checks_less_than_all_gets_no_tuple_of_what_was_being_written() {
    for checks in [
        Checks::NONE,
        Checks { guard: false, ..Checks::ALL },
        Checks { reference: false, ..Checks::ALL },
        Checks::ALL,
    ] {
        let (host, disk) = with_a_torn_block();
        let mut both = AlignedBuf::zeroed(8 * 520);
        open(&disk).read_protected(24, &mut both, checks).unwrap();
        for (lba, both) in (24..).zip(both.chunks(520)) {
            let its = if lba == 30 { Tuple::UNWRITTEN } else { host.tuple(lba, 1) };
            assert_eq!(both[512..], its.to_bytes(), "block {lba}, {checks:?}");
        }
        // So it can be copied, as a mirror does.
        let other = Host::new(512, Type1, 48).load();
        let mut to = open(&other);
        to.write_protected(24, &both, Checks::NONE).unwrap();
        assert_eq!(read(&mut to, 24, 8), Ok(()));
    }
}

/// A device that takes so many blocks at once.
struct Short(Arc<FaultBdev>, u32);

impl Bdev for Short {
    fn name(&self) -> &'static str {
        "short"
    }
    fn aliases(&self) -> Vec<String> {
        Vec::new()
    }
    fn uuid(&self) -> Uuid {
        Uuid::nil()
    }
    fn product_name(&self) -> &'static str {
        "test"
    }
    fn geometry(&self) -> Geometry {
        self.0.geometry()
    }
    fn features(&self) -> Features {
        Features { max_blocks: self.1, ..self.0.features() }
    }
    fn open(&self, io: &IoContext) -> Result<Box<dyn Channel>, OpenError> {
        self.0.open(io)
    }
    fn driver_specific(&self) -> Value {
        Value::Null
    }
}

#[test]
fn an_unmap_on_a_device_that_takes_less_at_once_clears_whole_clusters() {
    for (most, from, count) in [(24, 0, 64), (24, 20, 100), (600, 40, 1490), (1024, 0, 1536)] {
        let host = Host::new(512, Type1, 48);
        let disk = host.load_on(Arc::new(Short(host.base.clone(), most)));
        let mut channel = open(&disk);
        for at in (0..1536).step_by(256) {
            channel.write_protected(at, &host.both(at, 256, 1), Checks::ALL).unwrap();
        }
        channel.unmap(from, count).unwrap();
        let mut found = AlignedBuf::zeroed(1536 * 520);
        channel.read_protected(0, &mut found, Checks::ALL).unwrap();
        let whole = from.next_multiple_of(32)..(from + count) / 32 * 32;
        for (lba, both) in (0..).zip(found.chunks(520)) {
            let is_zero = both[..512] == [0; 512] && both[512..] == [0xFF; 8];
            assert_eq!(is_zero, whole.contains(&lba), "block {lba}, {most} at once");
        }
    }
}

#[test]
fn a_page_of_tuples_that_cannot_be_read_is_written_anew() {
    for (from, count) in [(0, 512), (100, 8)] {
        let host = Host::new(512, Type1, 48);
        let disk = host.load();
        let mut channel = open(&disk);
        channel.write_protected(0, &host.both(0, 512, 1), Checks::ALL).unwrap();
        let page = host.at(0).1 as u64 / 512;
        // Until it is written, as a sector of a disk.
        let unreadable = Fault::always(Op::Read, IoError::ReadMedium);
        host.base.inject(Fault { lba: page..page + 1, count: 2, ..unreadable });
        assert_eq!(read(&mut channel, 100, 1), Err((IoError::ReadMedium, None)));
        channel.write_protected(from, &host.both(from, count, 2), Checks::ALL).unwrap();
        let mut found = AlignedBuf::zeroed(512 * 520);
        channel.read_protected(0, &mut found, Checks::ALL).unwrap();
        for (lba, both) in (0..).zip(found.chunks(520)) {
            let is_written = (from..from + count).contains(&lba);
            let (seed, tuple) = match is_written {
                true => (2, host.tuple(lba, 2)),
                false => (1, Tuple::UNWRITTEN),
            };
            assert!(both[..512] == host.data(lba, seed)[..], "block {lba}");
            assert_eq!(both[512..], tuple.to_bytes(), "block {lba}");
        }
    }
}

#[test]
fn a_map_that_can_never_be_read_is_written_anew_with_all_of_it_marked() {
    let host = Host::new(512, Type1, 60);
    let disk = host.load();
    open(&disk).write_protected(0, &host.both(0, 60, 1), Checks::ALL).unwrap();
    disk.area.close();
    assert!(!is_marked(&host));
    host.base.inject(Fault { lba: 0..1, ..Fault::always(Op::Read, IoError::ReadMedium) });
    let disk = host.load();
    let mut channel = open(&disk);
    let until = Instant::now() + Duration::from_secs(60);
    let mut failed = 0;
    while let Err(e) = read(&mut channel, 0, 60) {
        assert_eq!(e, (IoError::ReadMedium, None));
        assert!(Instant::now() < until, "it is never taken for lost");
        failed += 1;
        std::thread::sleep(Duration::from_millis(1));
    }
    assert!(failed >= 7, "after {failed} it may come back");
    channel.write_protected(0, &host.both(0, 8, 2), Checks::ALL).unwrap();
    assert!(is_marked(&host));
    // As a disk does with a sector that was written.
    host.base.clear_faults();
    wait_until_clean(&host, &disk);
    let disk = host.load();
    host.base.corrupt(host.at(5).0, 1);
    assert_eq!(read(&mut open(&disk), 0, 60), Err((IoError::Guard, Some(5))));
}

/// Never answers a flush while it is told not to.
struct Stuck(Arc<FaultBdev>, Arc<AtomicU8>);
struct StuckChannel(Box<dyn Channel>, Arc<AtomicU8>);
impl Channel for StuckChannel {
    fn submit(&mut self, io: &bdev::Io) -> bdev::Submit {
        match (self.1.load(Ordering::SeqCst), io.op) {
            (1, Op::Flush) => bdev::Submit::Full,
            _ => self.0.submit(io),
        }
    }
    fn poll(&mut self, done: &mut Vec<bdev::Completion>) -> u32 {
        self.0.poll(done)
    }
}
impl Bdev for Stuck {
    fn name(&self) -> &'static str {
        "stuck"
    }
    fn aliases(&self) -> Vec<String> {
        Vec::new()
    }
    fn uuid(&self) -> Uuid {
        Uuid::nil()
    }
    fn product_name(&self) -> &'static str {
        "test"
    }
    fn geometry(&self) -> Geometry {
        self.0.geometry()
    }
    fn features(&self) -> Features {
        self.0.features()
    }
    fn open(&self, io: &IoContext) -> Result<Box<dyn Channel>, OpenError> {
        Ok(Box::new(StuckChannel(self.0.open(io)?, self.1.clone())))
    }
    fn driver_specific(&self) -> Value {
        Value::Null
    }
}

#[test]
fn nobody_waits_for_ever_for_a_device_that_does_not_answer() {
    let host = Host::new(512, Type1, 48);
    let stuck = Arc::new(AtomicU8::new(0));
    let below = Arc::new(Stuck(host.base.clone(), stuck.clone()));
    let disk = Arc::new(host.load_within(below, Duration::from_millis(50)));
    let mut channel = open(&disk);
    channel.write_protected(0, &host.both(0, 8, 1), Checks::ALL).unwrap();
    stuck.store(1, Ordering::SeqCst);
    let (tell, told) = std::sync::mpsc::channel();
    let its = disk.clone();
    std::thread::spawn(move || {
        let _ = tell.send(its.area.pause().is_err());
        its.area.close();
        let _ = tell.send(true);
    });
    assert_eq!(told.recv_timeout(Duration::from_secs(60)), Ok(true), "the pause");
    assert_eq!(told.recv_timeout(Duration::from_secs(60)), Ok(true), "the close");
    assert_eq!(read(&mut channel, 0, 8), Ok(()));
    stuck.store(0, Ordering::SeqCst);
    // What nobody waits for any more is done.
    let until = Instant::now() + Duration::from_secs(60);
    while is_marked(&host) {
        assert!(Instant::now() < until, "it is never cleaned");
        std::thread::sleep(Duration::from_millis(1));
    }
}

#[test]
fn a_pause_that_came_too_late_is_undone() {
    let host = Host::new(512, Type1, 48);
    let stuck = Arc::new(AtomicU8::new(0));
    let below = Arc::new(Stuck(host.base.clone(), stuck.clone()));
    let disk = Arc::new(host.load_within(below, Duration::from_millis(50)));
    let mut channel = open(&disk);
    channel.write_protected(0, &host.both(0, 8, 1), Checks::ALL).unwrap();
    stuck.store(1, Ordering::SeqCst);
    assert!(disk.area.pause().is_err());
    // Nobody who writes waits for the flush.
    let (tell, told) = std::sync::mpsc::channel();
    let (its, data) = (disk.clone(), host.both(0, 8, 3));
    std::thread::spawn(move || {
        let _ = tell.send(open(&its).write_protected(0, &data, Checks::ALL).is_ok());
    });
    assert_eq!(told.recv_timeout(Duration::from_secs(20)), Ok(true), "the write waits");
    stuck.store(0, Ordering::SeqCst);
    channel.write_protected(0, &host.both(0, 8, 2), Checks::ALL).unwrap();
    assert_eq!(read(&mut channel, 0, 8), Ok(()));
}

/// A keeper without a thread, each of whose rounds is a turn, of a device whose first unit of each zone is writable.
fn keeper_of(host: &Host, zones: u64) -> (Arc<Shared>, Keeper) {
    let shared = Arc::new(Shared::new(host.layout(), host.kind));
    let times = Times { turn: Duration::ZERO, quiet: 2, again: Duration::from_secs(3600) };
    let mut keeper = Keeper::new(shared.clone(), host.base.clone(), times);
    let ear = bdev::Ear::new(IoContext::new().unwrap().waker());
    for zone in 0..zones {
        shared.wants.ask(Want::Look(zone), &ear);
        shared.wants.ask(Want::Write(zone, 0), &ear);
    }
    let _ = keeper.round();
    assert!((0..zones).all(|zone| shared.unit(zone, 0).unwrap().gate.is_open()));
    (shared, keeper)
}

#[test]
fn few_maps_are_written_while_others_wait_and_a_pause_ends_in_time() {
    let host = Host::new(512, Type1, 48 * 40);
    let (shared, mut keeper) = keeper_of(&host, 40);
    let marked = || {
        let (image, layout) = (host.base.image(), host.layout());
        let is_marked = |zone: &u64| image[layout.map(*zone) as usize * 512 + 32] & 1 != 0;
        (0..40).filter(is_marked).count()
    };
    assert_eq!(marked(), 40);
    // One that has no time leaves them as they were.
    keeper.clean_all(Some(Instant::now()));
    let is_open = |zone: &u64| shared.unit(*zone, 0).unwrap().gate.is_open();
    assert_eq!((marked(), (0..40).filter(is_open).count()), (40, 40));
    for left in [24, 8, 0] {
        let _ = keeper.round();
        assert_eq!((marked(), (0..40).filter(is_open).count()), (left, left));
    }
}

#[test]
fn a_map_that_cannot_be_written_is_not_written_again_at_once() {
    let host = Host::new(512, Type1, 48);
    let (_, mut keeper) = keeper_of(&host, 1);
    host.base.inject(Fault::always(Op::Write, IoError::WriteMedium));
    let flushes = || host.base.stats().unwrap().snapshot().op(Op::Flush).ops;
    let before = flushes();
    for _ in 0..10 {
        let _ = keeper.round();
    }
    assert_eq!(flushes() - before, 1);
}

#[test]
fn behind_what_cannot_be_looked_through_the_rest_is() {
    let host = Host::new(512, Type1, 48);
    let disk = host.load();
    let mut channel = open(&disk);
    for at in (0..1536).step_by(256) {
        channel.write_protected(at, &host.both(at, 256, 1), Checks::ALL).unwrap();
    }
    let host = killed(&host);
    let (data, tuple) = host.at(1100);
    host.base.corrupt(data, 1);
    let unreadable = host.at(0).0 as u64 / 512;
    let fault = Fault::always(Op::Read, IoError::ReadMedium);
    host.base.inject(Fault { lba: unreadable..unreadable + 1, ..fault });
    let (shared, mut keeper) = keeper_of(&host, 1);
    for _ in 0..20 {
        let _ = keeper.round();
    }
    assert_eq!(host.base.image()[tuple..][..TUPLE_LEN], [0; TUPLE_LEN]);
    assert_ne!(host.base.image()[host.at(0).1..][..TUPLE_LEN], [0; TUPLE_LEN]);
    assert!(shared.unit(0, 0).unwrap().doubts() > 0, "not all of it was compared");
}

#[test]
fn blocks_that_can_never_be_read_are_the_only_ones_that_are_not_compared() {
    let host = Host::new(512, Type1, 48);
    let disk = host.load();
    let mut channel = open(&disk);
    for at in (0..1024).step_by(256) {
        channel.write_protected(at, &host.both(at, 256, 1), Checks::ALL).unwrap();
    }
    let host = killed(&host);
    host.base.corrupt(host.at(30).0, 1);
    let fault = Fault::always(Op::Read, IoError::ReadMedium);
    let bad = |lba: u64, blocks: u64| {
        let at = host.at(lba).0 as u64 / 512;
        host.base.inject(Fault { lba: at..at + blocks, ..fault.clone() });
    };
    bad(8, 8);
    bad(600, 1);
    let disk = host.load();
    let mut channel = open(&disk);
    assert_eq!(read(&mut channel, 0, 8), Ok(()));
    wait_until_clean(&host, &disk);
    assert_eq!(read(&mut channel, 8, 1), Err((IoError::ReadMedium, None)));
    host.base.corrupt(host.at(7).0, 1);
    host.base.corrupt(host.at(16).0, 1);
    assert_eq!(read(&mut channel, 7, 1), Err((IoError::Guard, Some(0))));
    assert_eq!(read(&mut channel, 16, 1), Err((IoError::Guard, Some(0))));
    assert_eq!(read(&mut channel, 30, 1), Ok(()), "it was being written");
    // Should they come back, nobody knows whether they are what was written last.
    host.base.clear_faults();
    host.base.corrupt(host.at(8).0, 1);
    assert_eq!(read(&mut channel, 8, 8), Ok(()));
    assert_eq!(host.base.image()[host.at(600).1..][..TUPLE_LEN], [0; TUPLE_LEN]);
    assert_ne!(host.base.image()[host.at(601).1..][..TUPLE_LEN], [0; TUPLE_LEN]);
}

#[test]
fn a_block_loses_its_tuple_only_when_its_region_could_not_be_read_twice() {
    let host = Host::new(512, Type1, 48);
    let disk = host.load();
    let mut channel = open(&disk);
    for at in (0..1024).step_by(256) {
        channel.write_protected(at, &host.both(at, 256, 1), Checks::ALL).unwrap();
    }
    let host = killed(&host);
    let bad = |lba: u64| {
        let at = host.at(lba).0 as u64 / 512;
        let fault = Fault::always(Op::Read, IoError::ReadMedium);
        host.base.inject(Fault { lba: at..at + 1, ..fault });
    };
    let has_tuple = |lba: u64| host.base.image()[host.at(lba).1..][..TUPLE_LEN] != [0; TUPLE_LEN];
    bad(8);
    let (_shared, mut keeper) = keeper_of(&host, 1);
    let mut look = || {
        for _ in 0..20 {
            let _ = keeper.round();
        }
        keeper.look_again();
    };
    look();
    assert!(has_tuple(8));
    // Another region, for the first time.
    bad(600);
    look();
    assert_eq!((has_tuple(8), has_tuple(600)), (false, true));
    look();
    assert_eq!([9, 600, 601].map(has_tuple), [true, false, true]);
}

#[test]
fn what_cannot_be_read_at_all_loses_no_tuples() {
    let host = Host::new(512, Type1, 48);
    let disk = host.load();
    open(&disk).write_protected(0, &host.both(0, 256, 1), Checks::ALL).unwrap();
    let host = killed(&host);
    let at = host.at(0).0 as u64 / 512;
    let fault = Fault::always(Op::Read, IoError::ReadMedium);
    host.base.inject(Fault { lba: at..at + 100, ..fault });
    let (shared, mut keeper) = keeper_of(&host, 1);
    for _ in 0..3 {
        for _ in 0..20 {
            let _ = keeper.round();
        }
        keeper.look_again();
    }
    assert!(shared.unit(0, 0).unwrap().doubts() > 0);
    for lba in 0..256 {
        assert_ne!(host.base.image()[host.at(lba).1..][..TUPLE_LEN], [0; TUPLE_LEN], "{lba}");
    }
}
