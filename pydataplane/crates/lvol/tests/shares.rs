//! Copies by metadata alone, under I/O and over failures.

use crate::common::sharing::{done, free, read, share, share_if, sharing, write};
use crate::common::{BLOCK, CLUSTER, PER_CLUSTER, Rig, read_tags, tagged};
use bdev::testing::Fault;
use bdev::{Bdev, IoError, Op, Shared};
use lvol::NewLvol;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::thread;

#[test]
fn a_share_moves_no_data_and_each_side_writes_for_itself() {
    let rig = sharing(200);
    for name in ["a", "b"] {
        rig.create(name, 32, true).unwrap();
    }
    write(&rig, "a", 0, 30, 1);
    write(&rig, "b", 5, 3, 2);
    let (before, image) = (free(&rig), rig.disk.image());
    assert_eq!(share(&rig, ("a", 0), ("b", 0), 32), done(32));
    // No data was written; but what the other one had, and nobody has now, is unmapped below, now or later.
    let metadata = 23 * CLUSTER as usize;
    let [image, now] = [image, rig.disk.image()].map(|image| image[metadata..].to_vec());
    let lost = tagged(2, 1);
    for (was, is) in image.chunks(BLOCK as usize).zip(now.chunks(BLOCK as usize)) {
        assert!(is == was || was == &lost[..] && is.iter().all(|byte| *byte == 0));
    }
    assert_eq!(free(&rig), before - 27, "as a copy would have taken");
    let mut shown = vec![1; 32];
    shown[30..].fill(0);
    assert_eq!((read(&rig, "a", 32), read(&rig, "b", 32)), (shown.clone(), shown.clone()));
    write(&rig, "a", 3, 2, 3);
    write(&rig, "b", 4, 2, 4);
    write(&rig, "b", 31, 1, 5);
    let (mut a, mut b) = (shown.clone(), shown);
    a[3..5].fill(3);
    b[4..6].fill(4);
    b[31] = 5;
    assert_eq!((read(&rig, "a", 32), read(&rig, "b", 32)), (a.clone(), b.clone()));
    // What is unmapped on one side is the other's alone, and written in its place.
    let mut channel = rig.open("lvs0/a");
    channel.unmap(10 * PER_CLUSTER, 4 * PER_CLUSTER).unwrap();
    a[10..14].fill(0);
    write(&rig, "b", 10, 2, 6);
    b[10..12].fill(6);
    assert_eq!((read(&rig, "a", 32), read(&rig, "b", 32)), (a.clone(), b.clone()));
    rig.lvstores.let_go_maps("lvs0").unwrap();
    assert_eq!((read(&rig, "a", 32), read(&rig, "b", 32)), (a, b.clone()));
    drop(channel);
    let rig = rig.restart();
    rig.lvstores.examine("disk0").unwrap().unwrap();
    rig.lvstores.delete_lvol("lvs0/a").unwrap();
    write(&rig, "b", 0, 1, 7);
    b[0] = 7;
    assert_eq!(read(&rig, "b", 32), b);
}

#[test]
fn what_has_room_of_its_own_or_depends_on_the_place_is_not_shared() {
    let rig = sharing(200);
    for (name, thin) in [("a", true), ("b", true), ("thick", false)] {
        rig.create(name, 8, thin).unwrap();
    }
    let part = |from: &str, to: &str, from_lba, lba, blocks| {
        let (from, to) = (rig.bdev(&format!("lvs0/{from}")), rig.bdev(&format!("lvs0/{to}")));
        to.sharing().unwrap().part(&from, from_lba, lba, blocks)
    };
    assert_eq!(part("a", "b", 0, 0, 1000), Some((0, 7 * PER_CLUSTER)));
    assert_eq!(part("a", "b", 3, PER_CLUSTER + 3, 500), Some((PER_CLUSTER - 3, 2 * PER_CLUSTER)));
    assert_eq!(part("a", "b", 3, PER_CLUSTER + 3, 200), None, "less than a cluster");
    assert_eq!(part("a", "b", 3, 4, 1000), None, "it would move within clusters");
    assert_eq!(part("thick", "b", 0, 0, 1000), None);
    assert_eq!(part("a", "thick", 0, 0, 1000), None);
    assert_eq!(part("a", "a", 0, PER_CLUSTER, 2 * PER_CLUSTER), None, "it overlaps");
    assert_eq!(part("a", "a", 0, 2 * PER_CLUSTER, 2 * PER_CLUSTER), Some((0, 2 * PER_CLUSTER)));
    rig.lvstores.set_read_only("lvs0/b").unwrap();
    assert_eq!(part("a", "b", 0, 0, 1000), None);
    let plain = Rig::with_lvs(100);
    for name in ["a", "b"] {
        plain.create(name, 8, true).unwrap();
    }
    let (a, b) = (plain.bdev("lvs0/a"), plain.bdev("lvs0/b"));
    assert_eq!(b.sharing().unwrap().part(&a, 0, 0, 1000), None);
    assert_eq!(b.sharing().unwrap().part(&rig.bdev("lvs0/a"), 0, 0, 1000), None);
    let info = plain.lvstores.upgrade_lvstore("lvs0", false).unwrap();
    assert!(!info.shares_clusters);
    assert_eq!(b.sharing().unwrap().part(&a, 0, 0, 1000), None);
    for shares in [true, false] {
        let info = plain.lvstores.upgrade_lvstore("lvs0", shares).unwrap();
        assert!(info.shares_clusters, "from the first one on");
    }
    assert!(b.sharing().unwrap().part(&a, 0, 0, 1000).is_some());
}

/// Blocks of the source are written in turn, each with a larger number, while its clusters are shared: what the
/// other one has then is of one instant, with all that was acknowledged before and nothing that came after.
#[test]
fn a_share_is_of_one_instant_while_the_source_is_written() {
    const CLUSTERS: u64 = 6;
    const BLOCKS: u64 = CLUSTERS * PER_CLUSTER;
    let rig = sharing(300);
    for name in ["a", "b"] {
        rig.create(name, CLUSTERS, true).unwrap();
    }
    let (stop, written) = (AtomicBool::new(false), AtomicU64::new(0));
    thread::scope(|scope| {
        scope.spawn(|| {
            let mut channel = rig.open("lvs0/a");
            for n in 1.. {
                let end = stop.load(Ordering::Acquire);
                channel.write(n * 37 % BLOCKS, &tagged(n, 1)).unwrap();
                written.store(n, Ordering::Release);
                if end {
                    break;
                }
            }
        });
        for _ in 0..30 {
            let before = written.load(Ordering::Acquire);
            while written.load(Ordering::Acquire) < before + 20 {
                thread::yield_now();
            }
            let acked = written.load(Ordering::Acquire);
            assert_eq!(share(&rig, ("a", 0), ("b", 0), CLUSTERS), done(CLUSTERS));
            let after = written.load(Ordering::Acquire) + 1;
            let all = read_tags(&mut rig.open("lvs0/b"), 0, BLOCKS);
            let last = all.iter().copied().max().unwrap();
            assert!((acked..=after).contains(&last), "{last} of {acked} .. {after}");
            for n in 1..=last {
                let there = all[(n * 37 % BLOCKS) as usize];
                assert!(there >= n, "entry {n} is missing, though {last} is there: {there}");
            }
        }
        stop.store(true, Ordering::Release);
    });
}

#[test]
fn who_no_longer_wants_it_gets_nothing_and_the_source_has_its_own() {
    let rig = sharing(100);
    for name in ["a", "b"] {
        rig.create(name, 4, true).unwrap();
    }
    write(&rig, "a", 0, 4, 1);
    let before = free(&rig);
    let cancelled = share_if(&rig, ("a", 0), ("b", 0), 4, || false);
    assert_eq!(cancelled, Ok(Shared::Cancelled));
    write(&rig, "a", 1, 1, 2);
    assert_eq!(free(&rig), before, "it was written in its place");
    assert_eq!((read(&rig, "a", 4), read(&rig, "b", 4)), (vec![1, 2, 1, 1], vec![0; 4]));
}

#[test]
fn a_write_to_what_is_shared_has_room_in_a_full_lvstore() {
    let rig = sharing(23 + 40);
    for name in ["a", "b", "c"] {
        rig.create(name, 12, true).unwrap();
    }
    write(&rig, "a", 0, 12, 1);
    write(&rig, "c", 0, 12, 9);
    let rest = free(&rig) - 12;
    rig.create("rest", rest, false).unwrap();
    assert_eq!(share(&rig, ("a", 0), ("b", 0), 12), done(12));
    assert_eq!(free(&rig), 0);
    assert_eq!(share(&rig, ("a", 0), ("c", 0), 1), Ok(Shared::Not), "c is copied to in its place");
    for (round, name) in ["a", "b", "a", "b"].into_iter().enumerate() {
        for cluster in 0..12 {
            write(&rig, name, cluster, 1, round as u64 + 20);
        }
    }
    let found = ["a", "b", "c"].map(|name| read(&rig, name, 12)[0]);
    assert_eq!(found, [22, 23, 9]);
}

#[test]
fn snapshots_of_shared_volumes_keep_what_they_show() {
    let rig = sharing(200);
    for name in ["a", "b"] {
        rig.create(name, 6, true).unwrap();
    }
    write(&rig, "a", 0, 6, 1);
    assert_eq!(share(&rig, ("a", 0), ("b", 0), 6), done(6));
    rig.lvstores.snapshot("lvs0/b", &NewLvol::named("s")).unwrap();
    write(&rig, "b", 0, 2, 2);
    // What a snapshot shows, by its clone and by itself.
    assert_eq!(share(&rig, ("b", 0), ("a", 3), 3), done(3));
    assert_eq!(share(&rig, ("s", 5), ("b", 5), 1), done(1));
    write(&rig, "a", 4, 1, 3);
    let found = ["a", "b", "s"].map(|name| read(&rig, name, 6));
    assert_eq!(found, [vec![1, 1, 1, 2, 3, 1], vec![2, 2, 1, 1, 1, 1], vec![1; 6]]);
    rig.lvstores.delete_lvol("lvs0/s").unwrap();
    write(&rig, "b", 2, 1, 4);
    write(&rig, "b", 0, 1, 5);
    let found = ["a", "b"].map(|name| read(&rig, name, 6));
    assert_eq!(found, [vec![1, 1, 1, 2, 3, 1], vec![5, 2, 4, 1, 1, 1]]);
    rig.lvstores.snapshot("lvs0/b", &NewLvol::named("s")).unwrap();
    rig.lvstores.inflate("lvs0/b").unwrap();
    rig.lvstores.delete_lvol("lvs0/s").unwrap();
    assert_eq!(share(&rig, ("a", 0), ("b", 0), 6), Ok(Shared::Not), "it is thick");
    write(&rig, "b", 3, 1, 6);
    let rig = rig.restart();
    rig.lvstores.examine("disk0").unwrap().unwrap();
    let found = ["a", "b"].map(|name| read(&rig, name, 6));
    assert_eq!(found, [vec![1, 1, 1, 2, 3, 1], vec![5, 2, 4, 6, 1, 1]]);
}

/// The record of a share fails, at each of its writes: until the lvstore is loaded anew the source does not
/// write to what the other one may have, and then both are as the medium says.
#[test]
fn a_share_that_failed_leaves_both_as_before_or_after() {
    let mut seen = [0, 0];
    for skip in 0..4 {
        let rig = sharing(200);
        for name in ["a", "b"] {
            rig.create(name, 4, true).unwrap();
        }
        write(&rig, "a", 0, 4, 1);
        write(&rig, "b", 0, 2, 2);
        rig.open("lvs0/a").flush().unwrap();
        let op = if skip < 2 { Op::Write } else { Op::Flush };
        rig.disk.inject(Fault {
            skip: skip % 2,
            count: 1,
            ..Fault::always(op, IoError::WriteMedium)
        });
        let failed = share(&rig, ("a", 0), ("b", 0), 4);
        rig.disk.clear_faults();
        if failed == done(4) {
            continue;
        }
        let mut a = rig.open("lvs0/a");
        let written = a.write(0, &tagged(3, PER_CLUSTER)).is_ok();
        // What it had may be nobody's after the load: no write to that is acknowledged.
        let mut b = rig.open("lvs0/b");
        assert_eq!(b.write(0, &tagged(4, PER_CLUSTER)).is_err(), failed.is_err(), "{failed:?}");
        assert_eq!(read_tags(&mut b, 0, 2 * PER_CLUSTER), [2; 2 * PER_CLUSTER as usize]);
        let latch = rig.disk.flush_latch().unwrap();
        latch.clear();
        _ = rig.lvstores.reload_on(latch).unwrap();
        let (found, other) = (read(&rig, "a", 4), read(&rig, "b", 4));
        assert!(found == [1; 4] || written && found == [3, 1, 1, 1], "{found:?}");
        let after = other == [1; 4];
        assert!(after || other == [2, 2, 0, 0], "{other:?}, {failed:?}");
        seen[usize::from(after)] += 1;
        write(&rig, "a", 0, 4, 5);
        assert_eq!((read(&rig, "a", 4), read(&rig, "b", 4)), (vec![5; 4], other));
    }
    assert!(seen[0] > 0, "{seen:?}");
}

/// The record of a first write to a shared cluster fails: the guest's next try fails, too, until the lvstore is
/// loaded anew, and is not lost then.
#[test]
fn after_a_first_write_that_failed_none_is_done_before_a_load() {
    let mut stopped = 0;
    for (skip, error) in (0..4).flat_map(|n| [(n, IoError::WriteMedium), (n, IoError::NoSpace)]) {
        let rig = sharing(200);
        for name in ["a", "b"] {
            rig.create(name, 4, true).unwrap();
        }
        write(&rig, "a", 0, 4, 1);
        assert_eq!(share(&rig, ("a", 0), ("b", 0), 4), done(4));
        let mut a = rig.open("lvs0/a");
        rig.disk.inject(Fault { skip, count: 1, ..Fault::always(Op::Write, error) });
        let failed = a.write(0, &tagged(3, PER_CLUSTER)).is_err();
        rig.disk.clear_faults();
        if !failed || rig.lvstores.lvstore("lvs0").unwrap().stopped.is_none() {
            continue;
        }
        stopped += 1;
        assert!(a.write(0, &tagged(4, PER_CLUSTER)).is_err(), "{skip} {error:?}");
        assert_eq!(read(&rig, "b", 4), [1; 4]);
    }
    assert!(stopped > 0);
}
