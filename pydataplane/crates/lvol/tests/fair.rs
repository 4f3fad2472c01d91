//! The metadata thread serves volumes in turn, many changes in one record, and zeroes new thick
//! volumes beside all that.

use crate::common::{CLUSTER, PER_CLUSTER, Rig, options, read_tags, tagged};
use bdev::testing::Fault;
use bdev::{AlignedBuf, Finished, IoError, Op, OwnedChannel};
use lvol::{Error, Lvstores};
use std::time::{Duration, Instant};

/// Where the journal of a small lvstore is, in blocks: 64 pages from page 32 on.
const JOURNAL: u64 = 32 * 8;
const JOURNAL_BLOCKS: u64 = 64 * 8;
const LONG: Duration = Duration::from_secs(120);

/// Waits for something that happens soon, on a machine that is busy.
fn until(what: &str, mut happened: impl FnMut() -> bool) {
    let end = Instant::now() + LONG;
    while !happened() {
        assert!(Instant::now() < end, "{what}");
        std::thread::sleep(Duration::from_millis(1));
    }
}

/// A rig whose metadata thread does its I/O when the disk is not held.
fn held_rig(clusters: u64) -> Rig {
    let rig = Rig::new(clusters);
    rig.disk.defer(Some(1));
    rig.lvstores.create_lvstore("disk0", "lvs0", &options()).unwrap();
    rig.disk.defer(None);
    rig
}

fn open(rig: &Rig, name: &str) -> OwnedChannel<u64> {
    OwnedChannel::open(&*rig.bdev(&format!("lvs0/{name}")), 256).unwrap()
}

/// Asks for one cluster.
fn ask(channel: &mut OwnedChannel<u64>, op: Op, cluster: u64) {
    let (blocks, buf) = match op {
        Op::Write => (1, Some(AlignedBuf::zeroed(512))),
        _ => (PER_CLUSTER, None),
    };
    let over = channel.submit(op, cluster * PER_CLUSTER, blocks, buf, cluster);
    assert!(over.is_none(), "it waits for the metadata thread");
}

fn all(channel: &mut OwnedChannel<u64>) -> Vec<Finished<u64>> {
    let mut over = Vec::new();
    until("I/O ends", || {
        channel.poll(&mut over);
        channel.in_flight() == 0
    });
    over
}

/// Keeps the metadata thread busy with a request of the volume `first` until the disk is released.
fn busy(rig: &Rig, first: &mut OwnedChannel<u64>) {
    rig.disk.hold();
    ask(first, Op::Write, 0);
    until("the metadata thread begins", || rig.disk.held() > 0);
}

#[test]
fn what_many_volumes_ask_for_meanwhile_becomes_durable_with_one_record() {
    let rig = held_rig(200);
    let names: Vec<String> = (0..8).map(|i| format!("v{i}")).collect();
    let mut channels = Vec::new();
    for name in &names {
        rig.create(name, 20, true).unwrap();
        rig.open(&format!("lvs0/{name}")).write(0, &tagged(1, 4 * PER_CLUSTER)).unwrap();
        channels.push(open(&rig, name));
    }
    rig.create("first", 4, true).unwrap();
    let mut first = open(&rig, "first");
    busy(&rig, &mut first);
    let before = rig.disk.flushes();
    for channel in &mut channels {
        for cluster in 0..4 {
            ask(channel, Op::Unmap, cluster);
            ask(channel, Op::Write, 10 + cluster);
        }
    }
    rig.disk.release();
    for channel in channels.iter_mut().chain([&mut first]) {
        assert!(all(channel).iter().all(|f| f.result.is_ok()));
    }
    // 64 changes of 8 volumes, after the one that kept the thread busy: two flushes each round.
    let flushes = rig.disk.flushes() - before;
    assert!(flushes <= 4, "{flushes} flushes");
    for name in &names {
        let mut channel = rig.open(&format!("lvs0/{name}"));
        let tags = read_tags(&mut channel, 0, 20 * PER_CLUSTER);
        assert!(tags.iter().all(|tag| *tag == 0));
    }
}

#[test]
fn a_volume_that_asks_for_much_does_not_keep_one_waiting_that_asks_for_little() {
    for op in [Op::Write, Op::Unmap] {
        let rig = held_rig(700);
        for (name, clusters) in [("flood", 600), ("victim", 4), ("first", 4)] {
            rig.create(name, clusters, true).unwrap();
        }
        if op == Op::Unmap {
            let mut flood = rig.open("lvs0/flood");
            for cluster in 0..256 {
                flood.write(cluster * PER_CLUSTER, &tagged(1, 1)).unwrap();
            }
        }
        let (mut flood, mut victim, mut first) =
            (open(&rig, "flood"), open(&rig, "victim"), open(&rig, "first"));
        busy(&rig, &mut first);
        for cluster in 0..256 {
            ask(&mut flood, op, cluster);
        }
        ask(&mut victim, Op::Write, 0);
        // After the round that is under way and the next one, nothing is done any more. One of
        // allocations writes a record, one with an unmap flushes twice.
        let (first, last) = (JOURNAL, JOURNAL + JOURNAL_BLOCKS);
        let fault = match op {
            Op::Write => {
                let fault = Fault { lba: first..last, ..Fault::always(op, IoError::WriteMedium) };
                Fault { skip: 2, ..fault }
            }
            _ => Fault { skip: 4, ..Fault::always(Op::Flush, IoError::Flush) },
        };
        rig.disk.inject(fault);
        rig.disk.release();
        assert_eq!(all(&mut victim)[0].result, Ok(()), "beside {op:?}");
        let over = all(&mut flood);
        let done = over.iter().filter(|f| f.result.is_ok()).count();
        assert_eq!(over.len(), 256);
        match op {
            Op::Write => assert!((1..256).contains(&done), "{done} of the flood in one round"),
            _ => assert!(done > 0),
        }
    }
}

#[test]
fn a_thick_volume_is_zeroed_beside_everything_else_and_can_be_cancelled() {
    let rig = Rig::with_lvs(200);
    rig.create("thin", 8, true).unwrap();
    rig.create("thick", 2, false).unwrap();
    let free = || rig.lvstores.lvstore("lvs0").unwrap().free_clusters;
    let before = free();
    for what in ["create", "grow"] {
        // The channel that is opened next, to write the zeros, is the one that is held up.
        rig.disk.defer(Some(1));
        rig.disk.hold();
        std::thread::scope(|scope| {
            let long = scope.spawn(|| match what {
                "create" => rig.create("large", 100, false).map(drop),
                _ => rig.lvstores.resize_lvol("lvs0/thick", 90 * CLUSTER).map(drop),
            });
            until("zeroing begins", || rig.disk.held() > 0);
            rig.disk.defer(None);
            let lvs = rig.lvstores.lvstore("lvs0").unwrap();
            let (zeroing, total) = (&lvs.zeroing[0], lvs.zeroing[0].total);
            assert!(zeroing.done < total && total >= 80 * CLUSTER, "{zeroing:?}");
            // Others allocate, come, change and go.
            rig.open("lvs0/thin").write(0, &tagged(1, 2 * PER_CLUSTER)).unwrap();
            rig.create("other", 3, true).unwrap();
            rig.lvstores.rename_lvol("lvs0/other", "renamed").unwrap();
            rig.lvstores.delete_lvol("lvs0/renamed").unwrap();
            let busy = match what {
                "create" => rig.create("large", 1, true).unwrap_err(),
                _ => rig.lvstores.delete_lvol("lvs0/thick").unwrap_err(),
            };
            assert!(matches!(&busy, Error::Underway { .. }), "{busy}");
            assert_eq!(busy.errno(), -16);
            // Another process finds nothing of it.
            let after = Rig::on(bdev::testing::FaultBdev::with_image(
                "disk0",
                512,
                rig.disk.durable_image(),
            ));
            after.lvstores.examine("disk0").unwrap().unwrap();
            let names: Vec<_> = after.lvstores.lvols(None).unwrap();
            let names: Vec<_> = names.iter().map(|v| (v.name.as_str(), v.size / CLUSTER)).collect();
            assert_eq!(names, [("thick", 2), ("thin", 8)]);
            let lvol = if what == "create" { "lvs0/large" } else { "lvs0/thick" };
            rig.lvstores.cancel(lvol).unwrap();
            rig.disk.release();
            let e = long.join().unwrap();
            assert!(matches!(&e, Err(Error::Cancelled { .. })), "{e:?}");
        });
        rig.open("lvs0/thin").unmap(0, 8 * PER_CLUSTER).unwrap();
        until("clusters are given back", || free() == before);
        assert!(matches!(rig.lvstores.cancel("lvs0/large"), Err(Error::NoLvol { .. })));
    }
}

#[test]
fn an_lvstore_is_not_unloaded_while_zeros_may_still_be_written() {
    let rig = Rig::with_lvs(100);
    let disk = rig.disk.clone();
    drop(rig);
    let registry = bdev::Registry::new();
    registry.register(disk.clone()).unwrap();
    let lvstores = Lvstores::with_timeout(registry.clone(), Duration::from_secs(2));
    lvstores.examine("disk0").unwrap().unwrap();
    disk.defer(Some(1));
    disk.hold();
    let (name, size) = ("large".into(), 50 * CLUSTER);
    let large = lvol::LvolOptions {
        dif_type: None,
        name,
        size,
        thin: false,
        uuid: None,
        xattrs: Default::default(),
        key: None,
    };
    std::thread::scope(|scope| {
        let create = scope.spawn(|| lvstores.create_lvol("lvs0", &large).map(drop));
        until("zeroing begins", || disk.held() > 0);
        let e = lvstores.unload("lvs0").unwrap_err();
        assert!(matches!(&e, Error::Waiting { .. }), "{e}");
        disk.release();
        let _ = create.join().unwrap();
    });
    lvstores.unload("lvs0").unwrap();
}
