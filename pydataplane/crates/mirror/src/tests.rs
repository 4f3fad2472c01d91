//! A bdev is copied while it is written to: whatever happens to either side, the guest's I/O goes on, and
//! what is ready is the same on both.

mod skipping;

use crate::{MapPage, Mirror, MirrorError, Options, Phase};
use bdev::testing::{Fault, FaultBdev};
use bdev::{AlignedBuf, Bdev, Finished, IoError, Op, OwnedChannel, SyncChannel};
use proptest::prelude::*;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::{Duration, Instant};

const DEADLINE: Duration = Duration::from_secs(60);
const BLOCK: usize = 512;
/// Blocks of the source: ten chunks and a bit.
const BLOCKS: u64 = 10 * 512 + 24;
const CHUNK: u64 = 512;
const MOMENT: Duration = Duration::from_millis(20);

/// A source with data, an old destination, and the copy of one to the other.
struct Pair {
    source: Arc<FaultBdev>,
    destination: Arc<FaultBdev>,
    mirror: Arc<Mirror>,
}

fn image(seed: u8) -> Vec<u8> {
    let byte = |at: usize| (at / BLOCK) as u8 ^ (at / BLOCK / 251) as u8 ^ seed;
    (0..BLOCKS as usize * BLOCK).map(byte).collect()
}

impl Pair {
    fn new(options: Options) -> Pair {
        Pair::of(image(0), image(0x55), options)
    }

    fn of(source: Vec<u8>, destination: Vec<u8>, options: Options) -> Pair {
        let source = FaultBdev::with_image("source", BLOCK as u32, source);
        let destination = FaultBdev::with_image("destination", BLOCK as u32, destination);
        let mirror = Mirror::new(source.clone(), destination.clone(), options).unwrap();
        Pair { source, destination, mirror }
    }

    /// Runs `f` while the copy runs, and stops it.
    fn run<R>(&self, f: impl FnOnce(&Pair) -> R) -> R {
        thread::scope(|scope| {
            let stop = StopsAtEnd(&self.mirror);
            scope.spawn(|| self.mirror.run());
            let result = f(self);
            drop(stop);
            result
        })
    }

    fn phase(&self) -> Phase {
        self.mirror.progress().phase
    }

    fn wait_for(&self, phase: Phase) {
        wait_until(&format!("{phase:?}"), || self.phase() == phase);
    }

    fn failure(&self) -> String {
        self.wait_for(Phase::Failed);
        self.mirror.progress().failure.unwrap()
    }

    fn are_same(&self) {
        assert!(self.source.image() == self.destination.image(), "they differ");
    }
}

struct StopsAtEnd<'a>(&'a Mirror);

impl Drop for StopsAtEnd<'_> {
    fn drop(&mut self) {
        self.0.stop();
    }
}

fn wait_until(what: &str, mut is: impl FnMut() -> bool) {
    let since = Instant::now();
    while !is() {
        assert!(since.elapsed() < DEADLINE, "{what}: never");
        thread::sleep(Duration::from_millis(1));
    }
}

fn filled(blocks: u64, byte: u8) -> AlignedBuf {
    let mut buf = AlignedBuf::zeroed(blocks as usize * BLOCK);
    buf.fill(byte);
    buf
}

/// Slow enough to write meanwhile: a chunk at a time.
fn slow() -> Options {
    Options { limit: 20 << 20, ..Options::default() }
}

/// No more than the first chunk for now.
fn stalled() -> Options {
    Options { limit: 1, ..Options::default() }
}

fn drain(channel: &mut OwnedChannel<u64>) -> Vec<Finished<u64>> {
    let (mut over, since) = (Vec::new(), Instant::now());
    while channel.in_flight() > 0 {
        assert!(since.elapsed() < DEADLINE, "an I/O never ended");
        // Not asleep: a device of these tests does one I/O each time it is looked at.
        if channel.poll(&mut over) == 0 {
            thread::yield_now();
        }
    }
    over
}

#[test]
fn what_is_not_written_to_is_copied_as_it_is() {
    let pair = Pair::new(Options::default());
    pair.run(|pair| {
        pair.wait_for(Phase::Ready);
        pair.are_same();
        let progress = pair.mirror.progress();
        assert_eq!((progress.copied, progress.total), (progress.total, BLOCKS * BLOCK as u64));
        assert!(pair.destination.durable_image() == pair.source.image(), "ready is durable");
    });
    assert_eq!(pair.phase(), Phase::Stopped);
}

/// One channel's writes of all kinds, on blocks that nobody else writes to.
fn write_at_random(bdev: &dyn Bdev, mut seed: u64, ends: &AtomicBool) {
    let mut channel = OwnedChannel::open(bdev, 32).unwrap();
    let (mut over, mut n) = (Vec::new(), 0);
    while !ends.load(Ordering::Relaxed) {
        while channel.is_full() {
            if channel.poll(&mut over) == 0 {
                thread::yield_now();
            }
        }
        seed = seed.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        let random = seed >> 20;
        let blocks = 1 + random % if random & 0x700 == 0 { 700 } else { 17 };
        let lba = (random >> 12) % (BLOCKS - blocks);
        n += 1;
        let (op, buf) = match random >> 32 & 15 {
            0 => (Op::Unmap, None),
            1 => (Op::WriteZeroes, None),
            2 => (Op::Flush, None),
            3 => (Op::Read, Some(filled(blocks, 0))),
            _ => (Op::Write, Some(filled(blocks, (random >> 36) as u8))),
        };
        over.extend(channel.submit(op, lba, blocks, buf, n));
        over.drain(..).for_each(|f: Finished<u64>| f.result.unwrap());
    }
    assert!(drain(&mut channel).iter().all(|f| f.result.is_ok()));
}

#[test]
fn what_is_written_while_it_is_copied_is_on_both_in_whatever_order_they_answer() {
    for seed in 1..=6 {
        let pair = Pair::new(slow());
        pair.source.defer(Some(seed));
        pair.destination.defer(Some(seed + 100));
        pair.run(|pair| {
            let ends = AtomicBool::new(false);
            thread::scope(|scope| {
                scope.spawn(|| write_at_random(&*pair.mirror, seed, &ends));
                pair.wait_for(Phase::Ready);
                thread::sleep(MOMENT);
                ends.store(true, Ordering::Relaxed);
            });
            assert_eq!(pair.phase(), Phase::Ready, "{:?}", pair.mirror.progress());
            pair.mirror.seal(DEADLINE).unwrap();
            pair.are_same();
            // Nothing of it is only in a cache.
            pair.destination.power_cut(0);
            pair.are_same();
        });
    }
}

#[test]
fn channels_of_several_threads_write_while_it_is_copied() {
    // Each to its own half of each chunk: what two wrote to one block at a time could be either's.
    struct Half(Arc<Mirror>, u64);
    let pair = Pair::new(slow());
    let halves = [0, 1].map(|half| Half(pair.mirror.clone(), half));
    pair.run(|pair| {
        let ends = AtomicBool::new(false);
        thread::scope(|scope| {
            for Half(mirror, half) in &halves {
                let ends = &ends;
                scope.spawn(move || {
                    let mut channel = SyncChannel::open(&**mirror).unwrap();
                    let mut n = *half;
                    while !ends.load(Ordering::Relaxed) {
                        n = n.wrapping_mul(25_214_903_917).wrapping_add(11);
                        let lba = (n >> 16) % (BLOCKS / CHUNK) * CHUNK + half * CHUNK / 2;
                        let blocks = 1 + (n >> 40) % 200;
                        channel.write(lba, &filled(blocks, (n >> 24) as u8)).unwrap();
                    }
                });
            }
            pair.wait_for(Phase::Ready);
            thread::sleep(MOMENT);
            ends.store(true, Ordering::Relaxed);
        });
        pair.are_same();
    });
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 40, ..ProptestConfig::default() })]

    #[test]
    fn of_writes_to_the_same_blocks_the_last_one_counts_on_both(
        seed in any::<u64>(),
        writes in prop::collection::vec((0..12u64, 1..4u64, any::<u8>()), 2..30),
    ) {
        let pair = Pair::of(vec![0; 16 * BLOCK], vec![1; 16 * BLOCK], Options::default());
        pair.run(|pair| {
            pair.wait_for(Phase::Ready);
            pair.source.defer(Some(seed));
            pair.destination.defer(Some(!seed));
            let mut channel = OwnedChannel::open(&*pair.mirror, 32).unwrap();
            for (n, (lba, blocks, byte)) in writes.iter().enumerate() {
                let buf = Some(filled(*blocks, *byte));
                assert!(channel.submit(Op::Write, *lba, *blocks, buf, n as u64).is_none());
            }
            assert!(drain(&mut channel).iter().all(|f| f.result.is_ok()));
            pair.are_same();
        });
    }
}

#[test]
fn a_write_to_a_chunk_that_is_being_copied_waits_for_that_and_reads_do_not() {
    let pair = Pair::new(Options::default());
    pair.source.defer(Some(1));
    pair.source.hold();
    pair.run(|pair| {
        wait_until("the copier reads", || pair.source.held() > 0);
        let copier = pair.source.held();
        let mut channel = OwnedChannel::open(&*pair.mirror, 4).unwrap();
        assert!(channel.submit(Op::Write, 3, 1, Some(filled(1, 9)), 1).is_none());
        assert!(channel.submit(Op::Read, 3, 1, Some(filled(1, 0)), 2).is_none());
        channel.poll(&mut Vec::new());
        assert_eq!(pair.source.held(), copier + 1, "the read alone");
        pair.source.release();
        assert_eq!(drain(&mut channel).len(), 2);
        pair.wait_for(Phase::Ready);
        assert_eq!(pair.destination.image()[3 * BLOCK], 9);
        pair.are_same();
    });
}

#[test]
fn an_error_of_the_destination_ends_the_copy_and_not_the_guests_io() {
    for (op, when) in
        [(Op::Write, Phase::Ready), (Op::Write, Phase::Copying), (Op::Flush, Phase::Ready)]
    {
        let pair = Pair::new(if when == Phase::Ready { Options::default() } else { stalled() });
        pair.run(|pair| {
            match when {
                Phase::Ready => pair.wait_for(Phase::Ready),
                _ => wait_until("a chunk", || pair.mirror.progress().copied > 0),
            }
            let mut channel = SyncChannel::open(&*pair.mirror).unwrap();
            pair.destination.inject(Fault::always(op, IoError::NoSpace));
            channel.write(5, &filled(3, 7)).unwrap();
            channel.flush().unwrap();
            let why = pair.failure();
            assert!(why.contains("bdev source") && why.contains("bdev destination"), "{why}");
            assert!(why.contains("no space left"), "{why}");
            // And goes on without it.
            channel.write(6, &filled(1, 8)).unwrap();
            let mut buf = filled(3, 0);
            channel.read(5, &mut buf).unwrap();
            assert_eq!((buf[0], buf[BLOCK], buf[2 * BLOCK]), (7, 8, 7));
            assert!(pair.mirror.seal(DEADLINE).unwrap_err().contains("no space left"));
        });
        assert_eq!(pair.phase(), Phase::Failed, "why it ended stays");
    }
}

#[test]
fn an_error_while_copying_ends_the_copy() {
    let faults = [
        (Op::Read, "bdev source at byte 262144: the medium could not be read"),
        (Op::Write, "bdev destination at byte 262144: the medium could not be read"),
    ];
    for (op, says) in faults {
        let pair = Pair::new(Options::default());
        let lba = CHUNK..CHUNK + 1;
        let fault = Fault { lba, ..Fault::always(op, IoError::ReadMedium) };
        if op == Op::Read {
            pair.source.inject(fault)
        } else {
            pair.destination.inject(fault)
        }
        pair.run(|pair| {
            let why = pair.failure();
            assert!(why.contains(says), "{why}");
            let mut channel = SyncChannel::open(&*pair.mirror).unwrap();
            channel.write(0, &filled(1, 3)).unwrap();
        });
    }
    let pair = Pair::new(Options::default());
    pair.destination.inject(Fault::always(Op::Flush, IoError::Flush));
    pair.run(|pair| assert!(pair.failure().contains("could not be flushed")));
}

#[test]
fn an_error_of_the_source_is_the_guests_and_the_copy_goes_on() {
    let pair = Pair::new(Options::default());
    pair.run(|pair| {
        pair.wait_for(Phase::Ready);
        let mut channel = SyncChannel::open(&*pair.mirror).unwrap();
        pair.source.inject(Fault { count: 1, ..Fault::always(Op::Write, IoError::NoSpace) });
        let refused = channel.write(5, &filled(1, 7)).unwrap_err();
        assert_eq!(refused.cause, IoError::NoSpace);
        pair.wait_for(Phase::Ready);
        pair.are_same();
        channel.write(5, &filled(1, 7)).unwrap();
        assert_eq!(pair.phase(), Phase::Ready);
        pair.are_same();
        let beyond = channel.write(BLOCKS, &filled(1, 7)).unwrap_err();
        assert_eq!(beyond.cause, IoError::OutOfRange);
    });
}

#[test]
fn a_destination_that_hangs_is_given_up_and_keeps_nothing_of_the_guests() {
    let pair = Pair::new(Options::default());
    pair.destination.defer(Some(1));
    pair.run(|pair| {
        pair.wait_for(Phase::Ready);
        let mut channel = OwnedChannel::open(&*pair.mirror, 8).unwrap();
        pair.destination.hold();
        for n in 0..4 {
            // The last one waits for the first.
            assert!(channel.submit(Op::Write, n % 3, 1, Some(filled(1, n as u8)), n).is_none());
        }
        assert_eq!(drain(&mut channel).len(), 4, "without an answer of the destination");
        assert!(pair.failure().contains("bdev destination has not answered"));
        assert!(!pair.mirror.is_quiet());
        assert_eq!(pair.source.image()[0], 3);
        // It answers after all: whoever polls hears of it.
        pair.destination.release();
        wait_until("quiet", || {
            channel.poll(&mut Vec::new());
            pair.mirror.is_quiet()
        });
        // Or never: nobody waits for it.
    });
    let pair = Pair::new(Options::default());
    pair.destination.defer(Some(1));
    pair.run(|pair| {
        pair.wait_for(Phase::Ready);
        let mut channel = OwnedChannel::open(&*pair.mirror, 8).unwrap();
        pair.destination.hold();
        assert!(channel.submit(Op::Write, 1, 1, Some(filled(1, 1)), 1).is_none());
        drain(&mut channel);
        drop(channel);
        assert!(!pair.mirror.is_quiet());
        pair.destination.release();
    });
}

#[test]
fn a_disk_that_hangs_under_the_copier_lets_go_of_the_guests_writes() {
    let pair = Pair::new(Options::default());
    pair.destination.defer(Some(1));
    pair.destination.hold();
    pair.run(|pair| {
        wait_until("the copier writes", || pair.destination.held() > 0);
        let mut channel = OwnedChannel::open(&*pair.mirror, 8).unwrap();
        assert!(channel.submit(Op::Write, 1, 1, Some(filled(1, 1)), 1).is_none());
        assert!(drain(&mut channel)[0].result.is_ok());
        assert!(pair.failure().contains("bdev destination has not answered"));
        // The thread of the copier waits for it, which is none of the guest's.
        pair.destination.release();
    });
}

#[test]
fn a_long_write_goes_to_the_destination_in_turns() {
    let pair = Pair::new(Options::default());
    pair.run(|pair| {
        pair.wait_for(Phase::Ready);
        let mut channel = SyncChannel::open(&*pair.mirror).unwrap();
        let mut buf = AlignedBuf::zeroed(1 << 20);
        buf.iter_mut().enumerate().for_each(|(at, byte)| *byte = (at / 77) as u8);
        channel.write(11, &buf).unwrap();
        pair.are_same();
    });
}

#[test]
fn only_what_is_there_is_read_and_the_rest_is_zeros() {
    // Data in the third chunk and in a part of the fifth; old data in the destination's second and seventh.
    let bytes = |blocks: u64| blocks * BLOCK as u64;
    let (mut source, mut old) =
        (vec![0; BLOCKS as usize * BLOCK], vec![0; BLOCKS as usize * BLOCK]);
    let chunk = CHUNK as usize * BLOCK;
    source[2 * chunk..3 * chunk].fill(1);
    source[4 * chunk + 4096..4 * chunk + 8192].fill(2);
    old[chunk..2 * chunk].fill(3);
    old[6 * chunk..7 * chunk].fill(4);
    let page = move |from: u64, parts: &[(u64, u64)]| {
        // Two pages, of which the first ends in the fourth chunk.
        let next = (from < bytes(3 * CHUNK + 9)).then_some(bytes(3 * CHUNK + 9));
        let within = |(at, _): &&(u64, u64)| (*at >= bytes(3 * CHUNK + 9)) == next.is_none();
        Some(MapPage { parts: parts.iter().filter(within).copied().collect(), next })
    };
    let options = Options {
        limit: 0,
        source_map: Some(Box::new(move |from| {
            page(from, &[(bytes(2 * CHUNK), bytes(CHUNK)), (bytes(4 * CHUNK), bytes(CHUNK))])
        })),
        destination_map: Some(Box::new(move |from| {
            page(from, &[(bytes(CHUNK), bytes(CHUNK)), (bytes(6 * CHUNK), bytes(CHUNK))])
        })),
    };
    let pair = Pair::of(source, old, options);
    pair.run(|pair| {
        pair.wait_for(Phase::Ready);
        pair.are_same();
        let read = pair.source.stats().unwrap().snapshot().op(Op::Read).bytes;
        assert_eq!(read, bytes(2 * CHUNK));
        let stats = pair.destination.stats().unwrap().snapshot();
        // One chunk of ones, and the other with zeros in it; the old ones are unmapped.
        assert_eq!(stats.op(Op::Write).bytes, bytes(2 * CHUNK));
        assert_eq!(stats.op(Op::Unmap).ops, 2);
        assert_eq!(stats.op(Op::WriteZeroes).ops, 0);
    });
}

#[test]
fn zeros_are_not_written_where_the_destination_is_thin() {
    let pair = Pair::of(vec![0; 4 << 20], vec![9; 4 << 20], Options::default());
    pair.run(|pair| {
        pair.wait_for(Phase::Ready);
        pair.are_same();
        let stats = pair.destination.stats().unwrap().snapshot();
        assert_eq!((stats.op(Op::Write).ops, stats.op(Op::Unmap).bytes), (0, 4 << 20));
    });
}

#[test]
fn what_was_written_before_the_copy_came_by_is_copied_whatever_the_map_says() {
    let empty: fn(u64) -> Option<MapPage> = |_| Some(MapPage::default());
    let options = Options {
        limit: 1,
        source_map: Some(Box::new(empty)),
        destination_map: Some(Box::new(empty)),
    };
    let pair = Pair::of(vec![0; 4 << 20], vec![0; 4 << 20], options);
    // Before the copier looks.
    let mut channel = SyncChannel::open(&*pair.mirror).unwrap();
    channel.write(1000, &filled(4, 5)).unwrap();
    assert_eq!(pair.destination.image()[1000 * BLOCK], 0, "it is the copier's to bring it there");
    pair.mirror.set_limit(0);
    pair.run(|pair| {
        pair.wait_for(Phase::Ready);
        pair.are_same();
        assert_eq!(pair.source.stats().unwrap().snapshot().op(Op::Read).bytes, 256 << 10);
    });
}

#[test]
fn a_limit_counts_and_is_changed_while_it_copies() {
    let pair = Pair::new(stalled());
    pair.run(|pair| {
        wait_until("a chunk", || pair.mirror.progress().copied > 0);
        thread::sleep(MOMENT);
        let progress = pair.mirror.progress();
        assert_eq!((progress.copied, progress.limit), (256 << 10, 1));
        let early = pair.mirror.seal(DEADLINE).unwrap_err();
        assert!(early.contains("262144 of 2633728 bytes"), "{early}");
        pair.mirror.set_limit(0);
        pair.wait_for(Phase::Ready);
        pair.are_same();
    });
}

#[test]
fn a_copy_that_was_stopped_leaves_the_source_alone_with_the_writes() {
    let pair = Pair::new(Options::default());
    pair.run(|pair| {
        pair.wait_for(Phase::Ready);
        let mut channel = SyncChannel::open(&*pair.mirror).unwrap();
        pair.mirror.stop();
        channel.write(1, &filled(1, 9)).unwrap();
        assert_eq!((pair.source.image()[BLOCK], pair.destination.image()[BLOCK]), (9, 1));
        assert!(pair.mirror.seal(DEADLINE).unwrap_err().contains("is over"));
    });
    // One that is opened now does without the destination.
    let mut channel = SyncChannel::open(&*pair.mirror).unwrap();
    channel.write(2, &filled(1, 9)).unwrap();
    channel.flush().unwrap();
}

#[test]
fn somebody_else_ends_it_for_a_reason() {
    let pair = Pair::new(stalled());
    pair.run(|pair| {
        pair.mirror.fail("bdev destination was removed".into());
        pair.mirror.fail("and more".into());
        assert_eq!(pair.failure(), "bdev destination was removed");
    });
}

#[test]
fn a_destination_that_cannot_take_it_is_refused() {
    let source = FaultBdev::new("source", 512, 4096);
    let refused = |destination| {
        Mirror::new(source.clone(), destination, Options::default()).map(drop).unwrap_err()
    };
    let small = refused(FaultBdev::new("small", 512, 4095));
    let (have, need) = (4095 * 512, 4096 * 512);
    assert_eq!(small, MirrorError::TooSmall { name: "small".into(), have, need });
    assert!(refused(FaultBdev::new("long", 4096, 4096)).to_string().contains("blocks of 4096"));
    // Shorter blocks, and more of them, are fine.
    let long = FaultBdev::with_image("long", 4096, image(3)[..640 * 4096].to_vec());
    let shorter = FaultBdev::new("shorter", 512, 8000);
    let mirror = Mirror::new(long.clone(), shorter.clone(), Options::default()).unwrap();
    thread::scope(|scope| {
        let _stop = StopsAtEnd(&mirror);
        scope.spawn(|| mirror.run());
        wait_until("ready", || mirror.progress().phase == Phase::Ready);
        let mut channel = SyncChannel::open(&*mirror).unwrap();
        channel.write(100, &filled(8, 1)).unwrap();
        channel.write_zeroes(300, 2).unwrap();
        assert!(shorter.image()[..640 * 4096] == long.image());
        assert_eq!((mirror.geometry(), mirror.name()), (long.geometry(), "long"));
    });
}

#[test]
fn a_channel_takes_no_more_than_it_has_room_for_and_loses_none() {
    let pair = Pair::new(Options::default());
    pair.source.defer(Some(3));
    pair.destination.defer(Some(4));
    pair.run(|pair| {
        pair.wait_for(Phase::Ready);
        let mut channel = OwnedChannel::open(&*pair.mirror, 300).unwrap();
        for n in 0..300 {
            channel.submit(Op::Write, 4 * n, 4, Some(filled(4, n as u8)), n);
        }
        assert_eq!(drain(&mut channel).len(), 300);
        pair.are_same();
    });
}
