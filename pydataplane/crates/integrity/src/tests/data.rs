//! A bdev with checksums is a byte array, whatever its users do at a time.

use super::{BLOCKS, BY_HAND, Host, Pages, pattern};
use crate::disk::{How, Integrity, probe};
use crate::keeper::Times;
use crate::layout::{HEAD, PAGE, REGION_BLOCKS, ZONE_PAGES};
use bdev::testing::FaultBdev;
use bdev::{AlignedBuf, Bdev, Event, IoError, Null, Op, OwnedChannel, Registry, SyncChannel};
use proptest::prelude::*;
use std::sync::mpsc;
use std::time::Duration;

#[test]
fn it_shows_what_its_base_has_less_the_checksums() {
    for block_size in [512, 4096] {
        let host = Host::new(block_size);
        let disk = host.create();
        let geometry = disk.geometry();
        assert_eq!(geometry.bytes(), BLOCKS * PAGE as u64);
        assert_eq!((geometry.block_size, geometry.physical_block_size), (block_size, 4096));
        let mut c = SyncChannel::open(&*disk).unwrap();
        let mut buf = AlignedBuf::zeroed(block_size as usize);
        c.read(geometry.num_blocks - 1, &mut buf).unwrap();
        assert_eq!(c.read(geometry.num_blocks, &mut buf).unwrap_err().cause, IoError::OutOfRange);
        assert_eq!(disk.product_name(), crate::PRODUCT);
    }
}

#[test]
fn it_is_found_on_its_base_with_name_and_identity_and_deleted_from_it() {
    let host = Host::new(512);
    assert!(Integrity::load(&host.registry, "base").unwrap().is_none());
    let disk = host.create();
    let uuid = disk.uuid();
    let e = Integrity::create(&host.registry, "other", "base").err().unwrap().to_string();
    assert_eq!(e, "bdev base is in use by integrity bdev sums: release it there first");
    drop(disk);
    let e = Integrity::create(&host.registry, "other", "base").err().unwrap().to_string();
    assert_eq!(e, "bdev base holds the checksums of bdev sums already: delete that first");
    let disk = host.load();
    assert_eq!((disk.name(), disk.uuid()), ("sums", uuid));
    disk.destroy().unwrap();
    assert!(probe(&*host.base).unwrap().is_none());
    for name in ["", "a b", "a/b", &"x".repeat(64)] {
        let e = Integrity::create(&host.registry, name, "base").err().unwrap().to_string();
        assert!(e.contains("cannot be the name of a bdev with checksums"), "{e}");
    }
    let registry = Registry::new();
    registry.register(Null::create("small", 4096, HEAD, None).unwrap()).unwrap();
    let e = Integrity::create(&registry, "s", "small").err().unwrap().to_string();
    assert_eq!(e, "bdev small has 256 pages of 4096 bytes, which is too small for checksums");
}

#[test]
fn more_regions_than_there_is_memory_for_are_written_and_verified() {
    let host = Host::new(4096);
    let how = How { pages: 2, ..BY_HAND };
    let disk = Integrity::create_as(&host.registry, "sums", "base", how).unwrap();
    let mut c = Pages::open(&disk);
    let starts = || (0..4).map(|region| region * u64::from(REGION_BLOCKS));
    for round in 0..3 {
        for start in starts() {
            c.write(start + 3 * round, &pattern(2, start + round)).unwrap();
        }
        for start in starts() {
            for earlier in 0..=round {
                c.is(start + 3 * earlier, &pattern(2, start + earlier));
            }
        }
        assert!(disk.counted().cached_regions <= 2);
    }
    host.base.corrupt(Host::at(u64::from(REGION_BLOCKS) + 1), 1);
    c.is(0, &pattern(2, 0));
    assert_eq!(c.read(u64::from(REGION_BLOCKS), 2).unwrap_err(), IoError::ReadMedium);
}

/// Many at a time, of several channels, on the same blocks, over a base that ends I/Os in any order: two of
/// a block's writes never leave the checksum of one and the data of the other.
#[test]
fn overlapping_ios_of_several_channels_leave_no_block_that_looks_damaged() {
    const DEPTH: u16 = 40;
    for seed in 1..4 {
        let host = Host::new(512);
        let disk = host.create();
        host.base.defer(Some(seed));
        std::thread::scope(|s| {
            for thread in 0..3u64 {
                let disk = &disk;
                s.spawn(move || {
                    let mut c = OwnedChannel::open(&**disk, DEPTH).unwrap();
                    let mut over = Vec::new();
                    for nth in 0..600u64 {
                        let x = (nth * 7919 + thread * 104_729 + seed).wrapping_mul(0x9e37_79b9);
                        let (lba, blocks) = (8 * 1000 + x % 90, 1 + (x >> 8) % 40);
                        let mut buf = AlignedBuf::zeroed(blocks as usize * 512);
                        buf.fill(x as u8);
                        while c.is_full() {
                            if c.poll(&mut over) == 0 {
                                c.wait(&mut over, 100);
                            }
                        }
                        let (op, buf) = match (x >> 16) % 5 {
                            0 | 1 => (Op::Read, Some(buf)),
                            2 => (Op::WriteZeroes, None),
                            _ => (Op::Write, Some(buf)),
                        };
                        over.extend(c.submit(op, lba, blocks, buf, nth));
                        over.drain(..).for_each(|f| assert_eq!(f.result, Ok(()), "{}", f.token));
                    }
                    while c.in_flight() > 0 {
                        if c.poll(&mut over) == 0 {
                            c.wait(&mut over, 100);
                        }
                    }
                    over.drain(..).for_each(|f| assert_eq!(f.result, Ok(()), "{}", f.token));
                });
            }
        });
        host.base.defer(None);
        let mut c = SyncChannel::open(&*disk).unwrap();
        c.read(8 * 1000, &mut AlignedBuf::zeroed(140 * 512)).unwrap();
        assert_eq!(disk.counted().mismatches, 0);
    }
}

#[test]
fn more_than_there_is_room_for_waits_and_comes_out_right() {
    const DEPTH: u16 = 400;
    for (seed, blocks) in [(1, 1), (2, 20)] {
        let host = Host::new(4096);
        let disk = host.create();
        host.base.defer(Some(seed));
        let mut c = OwnedChannel::open(&*disk, DEPTH).unwrap();
        let mut over = Vec::new();
        let count = u64::from(DEPTH).min(BLOCKS / blocks);
        for op in [Op::Write, Op::Read] {
            over.clear();
            for nth in 0..count {
                let buf = match op {
                    Op::Write => pattern(blocks as usize, nth),
                    _ => AlignedBuf::zeroed(blocks as usize * PAGE),
                };
                over.extend(c.submit(op, nth * blocks, blocks, Some(buf), nth));
            }
            while c.in_flight() > 0 {
                if c.poll(&mut over) == 0 {
                    c.wait(&mut over, 100);
                }
            }
            assert_eq!(over.len() as u64, count);
            for f in &over {
                assert_eq!(f.result, Ok(()));
                let data = f.buf.as_ref().unwrap();
                assert!(data[..] == pattern(blocks as usize, f.token)[..], "{op:?} {}", f.token);
            }
        }
    }
}

#[test]
fn a_channel_that_is_dropped_with_io_under_way_holds_nothing_up() {
    let host = Host::new(4096);
    let disk = host.create();
    let mut first = Pages::open(&disk);
    first.write(0, &pattern(64, 1)).unwrap();
    host.base.defer(Some(5));
    let mut c = OwnedChannel::open(&*disk, 64).unwrap();
    for nth in 0..32 {
        let _ = c.submit(Op::Write, nth * 2, 2, Some(pattern(2, 2)), nth);
    }
    drop(c);
    host.base.defer(None);
    first.write(0, &pattern(64, 3)).unwrap();
    first.is(0, &pattern(64, 3));
    while disk.clean_all() > 0 {}
    assert_eq!(disk.counted().dirty_regions, 0);
}

#[test]
fn what_is_quiet_becomes_clean_by_itself() {
    let host = Host::new(4096);
    let times = Times { turn: Duration::from_millis(2), quiet: 2 };
    let how = How { pages: 8, times };
    let disk = Integrity::create_as(&host.registry, "sums", "base", how).unwrap();
    let mut c = Pages::open(&disk);
    c.write(0, &pattern(8, 1)).unwrap();
    while disk.counted().dirty_regions > 0 {
        std::thread::sleep(Duration::from_millis(1));
    }
    // The map that says so need not be durable before.
    c.channel.flush().unwrap();
    host.base.die_after(0);
    drop((c, disk));
    host.base.power_cut(0);
    let disk = host.load();
    assert_eq!(disk.counted().stale_regions, 0);
    host.base.corrupt(Host::at(7), 1);
    let mut c = Pages::open(&disk);
    c.is(0, &pattern(8, 1)[..7 * PAGE]);
    assert_eq!(c.read(7, 1).unwrap_err(), IoError::ReadMedium);
}

#[test]
fn writes_in_order_are_marked_ahead_and_a_flush_is_no_more_than_the_bases() {
    let host = Host::new(4096);
    let disk = host.create();
    let mut c = Pages::open(&disk);
    let before = host.base.changes();
    for start in (0..BLOCKS - 8).step_by(8) {
        c.write(start, &pattern(8, start)).unwrap();
    }
    let writes = (BLOCKS - 8).div_ceil(8);
    // The first region, the second, and with that those that follow.
    assert_eq!(host.base.changes() - before, writes + 2);
    let before = host.base.changes();
    c.channel.flush().unwrap();
    assert_eq!(host.base.changes() - before, 1);
}

#[test]
fn it_grows_with_its_base_into_the_last_zone_and_into_another() {
    let pages = ZONE_PAGES + HEAD;
    let registry = Registry::new();
    // Nothing is written there, so no memory is needed.
    let null = Null::create("n0", 4096, pages, None).unwrap();
    registry.register(null.clone()).unwrap();
    drop(Integrity::create(&registry, "s", "n0"));
    drop((registry, null));
    let host = Host::on(FaultBdev::new("base", 4096, HEAD + 50));
    let disk = host.create();
    host.registry.register(disk.clone()).unwrap();
    let _follow = Integrity::follow(&host.registry);
    let (tell, told) = mpsc::channel();
    let tell = std::sync::Mutex::new(tell);
    let _heard = host.registry.subscribe(move |event| {
        if let Event::Resized(bdev) = event {
            let _ = tell.lock().unwrap().send((bdev.name().to_owned(), bdev.geometry().num_blocks));
        }
    });
    let mut c = Pages::open(&disk);
    c.write(0, &pattern(50, 1)).unwrap();
    host.base.resize(HEAD + BLOCKS);
    host.registry.notify_resized("base");
    let mut heard = vec![told.recv().unwrap(), told.recv().unwrap()];
    heard.sort();
    assert_eq!(heard, [("base".to_owned(), HEAD + BLOCKS), ("sums".to_owned(), BLOCKS)]);
    c.write(49, &pattern(200, 2)).unwrap();
    c.is(49, &pattern(200, 2));
    host.registry.unregister("sums").unwrap();
    drop((c, disk));
    let disk = host.load();
    assert_eq!(disk.geometry().num_blocks, BLOCKS);
    let mut c = Pages::open(&disk);
    c.is(0, &pattern(50, 1)[..49 * PAGE]);
    c.is(49, &pattern(200, 2));
    drop((c, disk));
    host.base.resize(HEAD + 50);
    let e = Integrity::load(&host.registry, "base").err().unwrap().to_string();
    assert!(e.ends_with("when its checksums were made: it was cut off"), "{e}");
}

#[derive(Clone, Debug)]
enum Step {
    Read(u64, u64),
    Write(u64, u64, u64),
    Unmap(u64, u64),
    Zero(u64, u64),
    Clean,
    Reload,
}

/// Sectors in which steps begin: around the border of two regions.
const FROM: u64 = 8 * (REGION_BLOCKS as u64) - 200;

fn step() -> impl Strategy<Value = Step> {
    let range = || (0..300u64, 1..300u64);
    prop_oneof![
        4 => range().prop_map(|(l, n)| Step::Read(l, n)),
        5 => (range(), any::<u64>()).prop_map(|((l, n), v)| Step::Write(l, n, v)),
        1 => range().prop_map(|(l, n)| Step::Unmap(l, n)),
        1 => range().prop_map(|(l, n)| Step::Zero(l, n)),
        1 => Just(Step::Clean),
        1 => Just(Step::Reload),
    ]
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(24))]

    #[test]
    fn behaves_as_a_byte_array(steps in prop::collection::vec(step(), 1..30)) {
        let host = Host::new(512);
        let mut disk = host.create();
        let mut c = SyncChannel::open(&*disk).unwrap();
        let mut model = vec![0u8; 600 * 512];
        for s in steps {
            match s {
                Step::Read(l, n) => {
                    let mut buf = AlignedBuf::zeroed(n as usize * 512);
                    c.read(FROM + l, &mut buf).unwrap();
                    prop_assert!(buf[..] == model[l as usize * 512..][..buf.len()]);
                }
                Step::Write(l, n, v) => {
                    let buf = pattern((n as usize).div_ceil(8), v);
                    let buf = &buf[..n as usize * 512];
                    c.write(FROM + l, buf).unwrap();
                    model[l as usize * 512..][..buf.len()].copy_from_slice(buf);
                }
                Step::Unmap(l, n) | Step::Zero(l, n) => {
                    if matches!(s, Step::Zero(..)) {
                        c.write_zeroes(FROM + l, n).unwrap();
                    } else {
                        c.unmap(FROM + l, n).unwrap();
                    }
                    model[l as usize * 512..][..n as usize * 512].fill(0);
                }
                Step::Clean => _ = disk.clean_all(),
                Step::Reload => {
                    drop((c, disk));
                    disk = host.load();
                    c = SyncChannel::open(&*disk).unwrap();
                }
            }
        }
        prop_assert_eq!(disk.counted().mismatches, 0);
    }
}
