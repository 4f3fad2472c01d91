//! Snapshots and clones under I/O.

use crate::common::{BLOCK, CLUSTER, PER_CLUSTER, Rig, read_tags, tagged};
use bdev::testing::Fault;
use bdev::{AlignedBuf, IoError, Op, SyncChannel};
use lvol::{Lvstores, NewLvol};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::thread;

fn write(channel: &mut SyncChannel, lba: u64, tag: u64) {
    channel.write(lba, &tagged(tag, 1)).unwrap();
}

/// Two volumes of one log: entry `n` is in one or the other, written when the one before was acknowledged.
/// Snapshots of both together hold a prefix of it, however they come while it is written.
#[test]
fn snapshots_taken_together_are_of_one_instant() {
    const ENTRIES: u64 = 8 * PER_CLUSTER;
    let rig = Rig::with_lvs(300);
    for name in ["a", "b"] {
        rig.create(name, 8, name == "a").unwrap();
    }
    let (stop, written) = (AtomicBool::new(false), AtomicU64::new(0));
    thread::scope(|scope| {
        scope.spawn(|| {
            let mut channels = [rig.open("lvs0/a"), rig.open("lvs0/b")];
            for n in 1.. {
                let end = stop.load(Ordering::Acquire);
                write(&mut channels[n as usize % 2], (n * 37) % ENTRIES, n);
                written.store(n, Ordering::Release);
                if end {
                    break;
                }
            }
        });
        for round in 0..12 {
            let [a, b] = ["a", "b"].map(|name| NewLvol::named(format!("{name}{round}")));
            let before = written.load(Ordering::Acquire);
            while written.load(Ordering::Acquire) < before + 20 {
                thread::yield_now();
            }
            let acked = written.load(Ordering::Acquire);
            let of = [("lvs0/a", &a), ("lvs0/b", &b)];
            let taken = rig.lvstores.snapshot_together(&of).unwrap();
            let after = written.load(Ordering::Acquire) + 1;
            let all: Vec<Vec<u64>> = taken
                .iter()
                .map(|info| read_tags(&mut rig.open(&info.alias), 0, ENTRIES))
                .collect();
            let last = all.iter().flatten().copied().max().unwrap();
            assert!((acked..=after).contains(&last), "{last} of {acked} .. {after}");
            // Each entry up to that one is where it belongs, unless a later one is there.
            for n in 1..=last {
                let there = all[n as usize % 2][(n * 37 % ENTRIES) as usize];
                assert!(there >= n, "entry {n} is missing, though {last} is there: {there}");
            }
        }
        stop.store(true, Ordering::Release);
    });
}

#[test]
fn an_lvol_that_is_named_twice_is_told() {
    let rig = Rig::with_lvs(60);
    rig.create("a", 2, true).unwrap();
    let [one, other] = ["s1", "s2"].map(NewLvol::named);
    let e = rig.lvstores.snapshot_together(&[("lvs0/a", &one), ("lvs0/a", &other)]).unwrap_err();
    assert!(e.errno() == -22 && e.to_string().contains("lvs0/a is there twice"), "{e}");
    assert!(!rig.lvstores.lvol("lvs0/a").unwrap().is_clone);
}

#[test]
fn what_there_is_no_room_for_takes_none_from_others() {
    let rig = Rig::with_lvs(63);
    rig.create("vm", 30, true).unwrap();
    let mut vm = rig.open("lvs0/vm");
    (0..30).for_each(|cluster| write(&mut vm, cluster * PER_CLUSTER, cluster + 1));
    rig.lvstores.snapshot("lvs0/vm", &NewLvol::named("s")).unwrap();
    let free = || rig.lvstores.lvstore("lvs0").unwrap().free_clusters;
    let before = free();
    assert!((2..30).contains(&before), "{before}");
    for part in [Lvstores::inflate, Lvstores::decouple_parent] {
        let e = part(&rig.lvstores, "lvs0/vm").unwrap_err();
        let needed = format!("{} bytes are needed", 30 * CLUSTER);
        assert!(e.errno() == -28 && e.to_string().contains(&needed), "{e}");
        assert_eq!(free(), before);
    }
    // What is its own is not needed twice.
    (0..before).for_each(|cluster| write(&mut vm, cluster * PER_CLUSTER, 100 + cluster));
    assert_eq!(free(), 0);
    rig.lvstores.resize_lvol("lvs0/vm", before * CLUSTER).unwrap();
    rig.lvstores.inflate("lvs0/vm").unwrap();
    assert!(!rig.lvstores.lvol("lvs0/vm").unwrap().is_clone);
}

#[test]
fn what_changed_is_told_and_no_data_is_read() {
    let rig = Rig::with_lvs(60);
    rig.create("vm", 8, true).unwrap();
    let mut vm = rig.open("lvs0/vm");
    [0, 1, 5].into_iter().for_each(|cluster| write(&mut vm, cluster * PER_CLUSTER, 1));
    rig.lvstores.snapshot("lvs0/vm", &NewLvol::named("s")).unwrap();
    write(&mut vm, 5 * PER_CLUSTER, 2);
    rig.disk.inject(Fault::always(Op::Read, IoError::ReadMedium));
    vm.read(0, &mut AlignedBuf::zeroed(BLOCK as usize)).unwrap_err();
    let told = |name: &str, since: Option<&str>| -> Vec<(u64, u64)> {
        let found = rig.lvstores.ranges(name, since, 0, 10).unwrap();
        assert_eq!(found.next_offset, None);
        found.ranges.iter().map(|r| (r.offset / CLUSTER, r.length / CLUSTER)).collect()
    };
    assert_eq!(told("lvs0/s", None), [(0, 2), (5, 1)]);
    assert_eq!(told("lvs0/vm", Some("lvs0/s")), [(5, 1)]);
}

#[test]
fn a_hundred_clones_of_an_image_take_nothing_until_they_are_written() {
    let rig = Rig::with_lvs(200);
    rig.create("image", 20, false).unwrap();
    let mut image = rig.open("lvs0/image");
    (0..20).for_each(|cluster| write(&mut image, cluster * PER_CLUSTER, cluster + 1));
    let snapshot = rig.lvstores.snapshot("lvs0/image", &NewLvol::named("golden")).unwrap();
    assert_eq!((snapshot.num_allocated_clusters, snapshot.is_snapshot), (20, true));
    let free = rig.lvstores.lvstore("lvs0").unwrap().free_clusters;
    for n in 0..100 {
        let clone =
            rig.lvstores.clone_lvol("lvs0/golden", &NewLvol::named(format!("vm{n}"))).unwrap();
        assert!(clone.is_clone && clone.size == 20 * CLUSTER && clone.num_allocated_clusters == 0);
    }
    assert_eq!(rig.lvstores.lvstore("lvs0").unwrap().free_clusters, free);
    let mut vm = rig.open("lvs0/vm7");
    write(&mut vm, 3 * PER_CLUSTER + 5, 77);
    assert_eq!(rig.lvstores.lvol("lvs0/vm7").unwrap().num_allocated_clusters, 1);
    let mut expected = vec![0; PER_CLUSTER as usize];
    (expected[0], expected[5]) = (4, 77);
    assert_eq!(read_tags(&mut vm, 3 * PER_CLUSTER, PER_CLUSTER), expected);
    expected[5] = 0;
    for other in ["vm8", "golden", "image"] {
        let there =
            read_tags(&mut rig.open(&format!("lvs0/{other}")), 3 * PER_CLUSTER, PER_CLUSTER);
        assert_eq!(there, expected, "{other}");
    }
    let e = rig.lvstores.delete_lvol("lvs0/golden").unwrap_err();
    assert!(e.errno() == -1 && e.to_string().contains("lvs0/vm99"), "{e}");
    let specific = rig.bdev("lvs0/vm7").driver_specific();
    assert_eq!(specific["lvol"]["base_snapshot"], "golden");
    assert_eq!(rig.bdev("lvs0/golden").driver_specific()["lvol"]["clones"][0], "image");
    // Zeros hide what the image has; a part of a cluster gets a copy first.
    let mut zeroed = rig.open("lvs0/vm8");
    zeroed.write_zeroes(2, 3 * PER_CLUSTER).unwrap();
    let there = read_tags(&mut zeroed, 0, 4 * PER_CLUSTER);
    assert_eq!(there.iter().filter(|tag| **tag != 0).collect::<Vec<_>>(), [&1, &4][..1].to_vec());
    assert_eq!(rig.lvstores.lvol("lvs0/vm8").unwrap().num_allocated_clusters, 2);
    drop((vm, zeroed, image));
    let rig = rig.restart();
    rig.lvstores.examine("disk0").unwrap().unwrap();
    assert_eq!(read_tags(&mut rig.open("lvs0/vm7"), 3 * PER_CLUSTER + 5, 1), [77]);
    assert_eq!(read_tags(&mut rig.open("lvs0/vm99"), 19 * PER_CLUSTER, 1), [20]);
    assert!(rig.lvstores.lvol("lvs0/vm99").unwrap().is_clone);
}

#[test]
fn a_chain_is_read_as_one_and_can_be_parted_and_merged() {
    let rig = Rig::with_lvs(120);
    rig.create("vm", 6, true).unwrap();
    let mut vm = rig.open("lvs0/vm");
    for level in 0..6u64 {
        write(&mut vm, level * PER_CLUSTER, level + 1);
        write(&mut vm, 9, 100 + level);
        rig.lvstores.snapshot("lvs0/vm", &NewLvol::named(format!("s{level}"))).unwrap();
    }
    let shows = |rig: &Rig, name: &str, upto: u64| {
        let mut channel = rig.open(&format!("lvs0/{name}"));
        for level in 0..6 {
            let tag = if level <= upto { level + 1 } else { 0 };
            assert_eq!(read_tags(&mut channel, level * PER_CLUSTER, 1), [tag], "{name} {level}");
        }
        assert_eq!(read_tags(&mut channel, 9, 1), [100 + upto], "{name}");
    };
    let all = |rig: &Rig, gone: &[u64]| {
        (0..6).filter(|level| !gone.contains(level)).for_each(|l| shows(rig, &format!("s{l}"), l));
        shows(rig, "vm", 5);
    };
    all(&rig, &[]);
    for (i, level) in [2, 0, 5].into_iter().enumerate() {
        rig.lvstores.delete_lvol(&format!("lvs0/s{level}")).unwrap();
        all(&rig, &[2, 0, 5][..=i]);
    }
    rig.lvstores.decouple_parent("lvs0/vm").unwrap();
    assert_eq!(rig.bdev("lvs0/vm").driver_specific()["lvol"]["base_snapshot"], "s3");
    let e = rig.lvstores.decouple_parent("lvs0/s1").unwrap_err();
    assert_eq!(e.errno(), -22, "{e}");
    rig.lvstores.inflate("lvs0/vm").unwrap();
    let vm_info = rig.lvstores.lvol("lvs0/vm").unwrap();
    assert_eq!((vm_info.num_allocated_clusters, vm_info.is_clone), (6, false));
    assert!(!vm_info.is_thin_provisioned);
    all(&rig, &[2, 0, 5]);
    // A guest that was told that it may unmap goes on to; a thick volume keeps its room.
    vm.unmap(0, 6 * PER_CLUSTER).unwrap();
    vm.write_zeroes(PER_CLUSTER, PER_CLUSTER).unwrap();
    assert_eq!(read_tags(&mut vm, PER_CLUSTER, 1), [0]);
    assert_eq!(rig.lvstores.lvol("lvs0/vm").unwrap().num_allocated_clusters, 6);
    drop(vm);
    let rig = rig.restart();
    rig.lvstores.examine("disk0").unwrap().unwrap();
    for level in [1, 3, 4] {
        shows(&rig, &format!("s{level}"), level);
    }
    // From the top: nobody shows them any more.
    for level in [4, 3, 1] {
        rig.lvstores.delete_lvol(&format!("lvs0/s{level}")).unwrap();
    }
    rig.lvstores.delete_lvol("lvs0/vm").unwrap();
    let info = rig.lvstores.lvstore("lvs0").unwrap();
    assert_eq!(info.free_clusters, info.total_data_clusters);
}

#[test]
fn who_gets_clusters_of_a_deleted_snapshot_is_said_to_have_them() {
    let rig = Rig::with_lvs(120);
    rig.create("vm", 6, true).unwrap();
    write(&mut rig.open("lvs0/vm"), 0, 1);
    rig.lvstores.snapshot("lvs0/vm", &NewLvol::named("s")).unwrap();
    write(&mut rig.open("lvs0/vm"), 2 * PER_CLUSTER, 2);
    let has = |name: &str| rig.lvstores.lvol(name).unwrap().num_allocated_clusters;
    assert_eq!((has("lvs0/vm"), has("lvs0/s")), (1, 1));
    // Nobody has it open.
    rig.lvstores.delete_lvol("lvs0/s").unwrap();
    assert_eq!(has("lvs0/vm"), 2);
}

/// The runs of a volume, in clusters: where each begins, and whether it is a hole.
fn runs(rig: &Rig, name: &str) -> Vec<(u64, bool)> {
    let bdev = rig.bdev(name);
    let sparse = bdev.sparse().unwrap();
    let (mut found, mut at) = (Vec::new(), 0);
    while at < bdev.geometry().num_blocks {
        let run = sparse.run(at);
        if found.last().is_none_or(|(_, hole)| *hole != run.hole) {
            found.push((at / PER_CLUSTER, run.hole));
        }
        at += run.blocks;
    }
    assert_eq!((at, sparse.run(at).blocks), (bdev.geometry().num_blocks, 0));
    found
}

#[test]
fn a_volume_tells_where_it_shows_nothing() {
    let rig = Rig::with_lvs(120);
    rig.create("vm", 10, true).unwrap();
    rig.create("thick", 2, false).unwrap();
    assert_eq!(runs(&rig, "lvs0/vm"), [(0, true)]);
    assert_eq!(runs(&rig, "lvs0/thick"), [(0, false)]);
    let room = |name: &str| rig.bdev(name).sparse().unwrap().allocated_bytes() / CLUSTER;
    assert_eq!((room("lvs0/vm"), room("lvs0/thick")), (0, 2));
    let mut vm = rig.open("lvs0/vm");
    write(&mut vm, 2 * PER_CLUSTER, 1);
    write(&mut vm, 7 * PER_CLUSTER, 2);
    rig.lvstores.snapshot("lvs0/vm", &NewLvol::named("s")).unwrap();
    rig.lvstores.clone_lvol("lvs0/s", &NewLvol::named("clone")).unwrap();
    let as_it_was = [(0, true), (2, false), (3, true), (7, false), (8, true)];
    for name in ["lvs0/vm", "lvs0/s", "lvs0/clone"] {
        assert_eq!(runs(&rig, name), as_it_was, "{name}");
        assert_eq!(room(name), 2, "{name}: what its snapshot has, it shows");
    }
    // A hole of its own hides what the snapshot has.
    vm.unmap(2 * PER_CLUSTER, PER_CLUSTER).unwrap();
    write(&mut vm, 8 * PER_CLUSTER, 3);
    assert_eq!(runs(&rig, "lvs0/vm"), [(0, true), (7, false), (9, true)]);
    assert_eq!(runs(&rig, "lvs0/clone"), as_it_was);
    let within = rig.bdev("lvs0/vm").sparse().unwrap().run(7 * PER_CLUSTER + 5);
    assert_eq!((within.hole, within.blocks), (false, 2 * PER_CLUSTER - 5));
}

#[test]
fn a_volume_is_rolled_back_to_any_of_its_snapshots_when_nobody_uses_it() {
    let rig = Rig::with_lvs(120);
    rig.create("vm", 4, false).unwrap();
    let content = |rig: &Rig| read_tags(&mut rig.open("lvs0/vm"), 7, 1)[0];
    for level in 1..4u64 {
        write(&mut rig.open("lvs0/vm"), 7, level);
        rig.lvstores.snapshot("lvs0/vm", &NewLvol::named(format!("s{level}"))).unwrap();
    }
    rig.lvstores.resize_lvol("lvs0/vm", 6 * CLUSTER).unwrap();
    write(&mut rig.open("lvs0/vm"), 5 * PER_CLUSTER, 9);
    let claim = rig.registry.claim("lvs0/vm", "a VM").unwrap();
    let e = rig.lvstores.roll_back("lvs0/vm", "lvs0/s2").unwrap_err();
    assert!(e.errno() == -16 && e.to_string().contains("in use by a VM"), "{e}");
    assert_eq!(content(&rig), 3);
    drop(claim);
    let uuid = rig.lvstores.lvol("lvs0/vm").unwrap().uuid;
    let info = rig.lvstores.roll_back("lvs0/vm", "lvs0/s3").unwrap();
    assert_eq!((content(&rig), info.size, info.uuid), (3, 4 * CLUSTER, uuid));
    rig.lvstores.roll_back("lvs0/vm", "lvs0/s1").unwrap();
    assert_eq!(content(&rig), 1);
    let e = rig.lvstores.roll_back("lvs0/vm", "lvs0/s3").unwrap_err();
    assert!(e.to_string().contains("s3 is not a snapshot of it"), "{e}");
    write(&mut rig.open("lvs0/vm"), 7, 50);
    assert_eq!(read_tags(&mut rig.open("lvs0/s3"), 7, 1), [3]);
    let rig = rig.restart();
    rig.lvstores.examine("disk0").unwrap().unwrap();
    assert_eq!(content(&rig), 50);
}

#[test]
fn volumes_are_rolled_back_together_to_snapshots_of_any_branch_or_none_is() {
    let rig = Rig::with_lvs(120);
    let names = ["root", "data"];
    let content =
        |rig: &Rig| names.map(|n| read_tags(&mut rig.open(&format!("lvs0/{n}")), 7, 1)[0]);
    names.iter().for_each(|name| drop(rig.create(name, 4, false).unwrap()));
    for level in 1..3u64 {
        for (name, tag) in names.iter().zip([level, 10 * level]) {
            write(&mut rig.open(&format!("lvs0/{name}")), 7, tag);
        }
        let taken = names.map(|n| (format!("lvs0/{n}"), NewLvol::named(format!("{n}{level}"))));
        let taken: Vec<_> = taken.iter().map(|(of, new)| (of.as_str(), new)).collect();
        rig.lvstores.snapshot_together(&taken).unwrap();
    }
    let back = |rig: &Rig, level: u64| {
        let all = names.map(|n| (format!("lvs0/{n}"), format!("lvs0/{n}{level}")));
        let all: Vec<_> = all.iter().map(|(of, to)| (of.as_str(), to.as_str())).collect();
        rig.lvstores.roll_back_together(&all)
    };
    back(&rig, 1).unwrap();
    assert_eq!(content(&rig), [1, 10]);
    // They are not made of the second ones any more; one of them, thick then, has no parent at all.
    rig.lvstores.inflate("lvs0/data").unwrap();
    back(&rig, 2).unwrap();
    assert_eq!(content(&rig), [2, 20]);
    write(&mut rig.open("lvs0/data"), 7, 77);

    // Whatever is wrong with one of them, the other keeps what it has, and both are there.
    let unchanged = |rig: &Rig| assert_eq!(content(rig), [2, 77]);
    let claim = rig.registry.claim("lvs0/data", "a VM").unwrap();
    let e = back(&rig, 1).unwrap_err();
    assert!(e.errno() == -16 && e.to_string().contains("in use by a VM"), "{e}");
    unchanged(&rig);
    drop(claim);
    for (second, to, said) in [
        ("lvs0/data", "lvs0/root", "is not a snapshot"),
        ("lvs0/root", "lvs0/root2", "twice"),
        ("lvs0/data", "lvs0/none", "none"),
        ("lvs0/data1", "lvs0/data2", "read-only"),
    ] {
        let all = [("lvs0/root", "lvs0/root1"), (second, to)];
        let e = rig.lvstores.roll_back_together(&all).unwrap_err();
        assert!(e.to_string().contains(said), "{e}");
        unchanged(&rig);
    }
    let rig = rig.restart();
    rig.lvstores.examine("disk0").unwrap().unwrap();
    unchanged(&rig);
    back(&rig, 2).unwrap();
    assert_eq!(content(&rig), [2, 20]);

    // Where it cannot be recorded they read as before, with a map that is read anew as well.
    for (name, tag) in names.iter().zip([5, 55]) {
        write(&mut rig.open(&format!("lvs0/{name}")), 7, tag);
    }
    rig.disk.inject(Fault::always(Op::Write, IoError::WriteMedium));
    let e = back(&rig, 1).unwrap_err();
    assert_eq!(e.errno(), -5, "{e}");
    assert_eq!(content(&rig), [5, 55]);
    rig.lvstores.let_go_maps("lvs0").unwrap();
    assert_eq!(content(&rig), [5, 55]);
}

#[test]
fn another_parent_shows_where_nothing_is_of_its_own() {
    let rig = Rig::with_lvs(120);
    rig.create("image", 3, true).unwrap();
    write(&mut rig.open("lvs0/image"), 0, 5);
    rig.lvstores.snapshot("lvs0/image", &NewLvol::named("golden")).unwrap();
    rig.create("vm", 3, true).unwrap();
    write(&mut rig.open("lvs0/vm"), PER_CLUSTER, 6);
    let e = rig.lvstores.set_parent("lvs0/vm", "lvs0/image").unwrap_err();
    assert!(e.to_string().contains("is not a snapshot"), "{e}");
    rig.lvstores.set_parent("lvs0/vm", "lvs0/golden").unwrap();
    // As SPDK has it: EEXIST and EINVAL.
    let e = rig.lvstores.set_parent("lvs0/vm", "lvs0/golden").unwrap_err();
    assert!(e.errno() == -17 && e.to_string().contains("its parent already"), "{e}");
    rig.create("thick", 3, false).unwrap();
    let e = rig.lvstores.set_parent("lvs0/thick", "lvs0/golden").unwrap_err();
    assert!(e.errno() == -22 && e.to_string().contains("it is thick"), "{e}");
    let tags = read_tags(&mut rig.open("lvs0/vm"), 0, 2 * PER_CLUSTER);
    assert_eq!((tags[0], tags[PER_CLUSTER as usize]), (5, 6));
    assert_eq!(rig.bdev("lvs0/vm").geometry().num_blocks, 3 * CLUSTER / BLOCK);
}

/// What a clone read through a snapshot of the snapshot's parent, it reads of the snapshot itself once that
/// was parted: the parent's clusters are free when it is deleted, and somebody else's.
#[test]
fn clones_of_a_snapshot_that_was_parted_do_not_need_its_parent() {
    for all in [false, true] {
        let rig = Rig::with_lvs(60);
        rig.create("vm", 4, true).unwrap();
        (0..4).for_each(|c| write(&mut rig.open("lvs0/vm"), c * PER_CLUSTER, 1));
        rig.lvstores.snapshot("lvs0/vm", &NewLvol::named("old")).unwrap();
        write(&mut rig.open("lvs0/vm"), 0, 2);
        rig.lvstores.snapshot("lvs0/vm", &NewLvol::named("new")).unwrap();
        rig.lvstores.clone_lvol("lvs0/new", &NewLvol::named("clone")).unwrap();
        let mut clone = rig.open("lvs0/clone");
        let reads = |clone: &mut SyncChannel| -> Vec<u64> {
            (0..4).map(|c| read_tags(clone, c * PER_CLUSTER, 1)[0]).collect()
        };
        assert_eq!(reads(&mut clone), [2, 1, 1, 1]);
        match all {
            true => rig.lvstores.inflate("lvs0/new").unwrap(),
            false => rig.lvstores.decouple_parent("lvs0/new").unwrap(),
        }
        rig.lvstores.delete_lvol("lvs0/old").unwrap();
        let free = rig.lvstores.lvstore("lvs0").unwrap().free_clusters;
        rig.create("other", free, false).unwrap();
        let mut other = rig.open("lvs0/other");
        (0..free).for_each(|c| write(&mut other, c * PER_CLUSTER, 99));
        assert_eq!(reads(&mut clone), [2, 1, 1, 1], "all: {all}");
        assert_eq!(reads(&mut rig.open("lvs0/vm")), [2, 1, 1, 1], "all: {all}");
    }
}

/// A snapshot's clusters are read by a clone until the moment that it is gone, and by nobody who gets
/// them next.
#[test]
fn a_read_in_flight_of_a_deleted_snapshot_never_sees_who_came_next() {
    let rig = Rig::with_lvs(60);
    rig.create("vm", 8, true).unwrap();
    let mut vm = rig.open("lvs0/vm");
    (0..8).for_each(|cluster| write(&mut vm, cluster * PER_CLUSTER, 1));
    let stop = AtomicBool::new(false);
    thread::scope(|scope| {
        let reader = scope.spawn(|| {
            let mut channel = rig.open("lvs0/vm");
            let mut reads = 0u64;
            while !stop.load(Ordering::Acquire) {
                for cluster in 0..8 {
                    let tag = read_tags(&mut channel, cluster * PER_CLUSTER, 1)[0];
                    assert!((1..=40).contains(&tag), "{tag}");
                    reads += 1;
                }
            }
            reads
        });
        for round in 2..40 {
            let name = format!("s{round}");
            rig.lvstores.snapshot("lvs0/vm", &NewLvol::named(name.as_str())).unwrap();
            (0..8).for_each(|cluster| write(&mut vm, cluster * PER_CLUSTER, round));
            // The snapshot's eight clusters are free then, and somebody else's.
            rig.lvstores.delete_lvol(&format!("lvs0/{name}")).unwrap();
            rig.create("other", 8, true).unwrap();
            let mut other = rig.open("lvs0/other");
            (0..8).for_each(|cluster| write(&mut other, cluster * PER_CLUSTER, 1000 + round));
            drop(other);
            rig.lvstores.delete_lvol("lvs0/other").unwrap();
        }
        stop.store(true, Ordering::Release);
        assert!(reader.join().unwrap() > 0);
    });
}
