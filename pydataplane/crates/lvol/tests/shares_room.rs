//! The room that a write to a shared cluster has in a full lvstore, however late other owners' I/O ends, and what becomes of
//! clusters that their last owners lose together.

use crate::common::late::Late;
use crate::common::sharing::{done, free, read, share, share_if, sharing, write};
use crate::common::{BLOCK, CLUSTER, PER_CLUSTER, Rig, tagged};
use bdev::testing::Fault;
use bdev::{AlignedBuf, Bdev, IoError, Op, OwnedChannel};
use lvol::NewLvol;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

/// Longer than a write waits that has no room kept.
const LONG: Duration = Duration::from_millis(1500);
/// Microseconds in which something begins.
const SOON: u64 = 20_000;
const DEADLINE: Duration = Duration::from_secs(60);

/// Thin volumes of 12 clusters, of which the first one is full of 1, and no room besides but for so many clusters.
fn full(names: &[&str], room: u64) -> Rig {
    let rig = sharing(23 + 60);
    for name in names {
        rig.create(name, 12, true).unwrap();
    }
    write(&rig, names[0], 0, 6, 1);
    let rest = free(&rig) - room;
    rig.create("rest", rest, false).unwrap();
    rig
}

/// One write over clusters that are the same, each for the other one's sake not written in its place.
#[test]
fn a_write_over_both_places_of_what_is_twice_in_a_volume_has_room() {
    let rig = full(&["a"], 6);
    assert_eq!(share(&rig, ("a", 0), ("a", 6), 6), done(6));
    assert_eq!(free(&rig), 0);
    write(&rig, "a", 0, 12, 2);
    assert_eq!(read(&rig, "a", 12), [2; 12]);
}

/// A volume's clusters are replaced, and it still reads what it had before: the other owner waits for that, and for
/// more than a second.
#[test]
fn a_write_waits_for_the_room_that_is_kept_for_it_as_long_as_it_takes() {
    let rig = full(&["a", "b"], 1);
    assert_eq!(share(&rig, ("a", 0), ("b", 0), 1), done(1));
    let late = Late::read(&rig, "a");
    write(&rig, "a", 0, 1, 2);
    let mut waits = OwnedChannel::open(&*rig.bdev("lvs0/b"), 1).unwrap();
    let mut buf = AlignedBuf::zeroed(CLUSTER as usize);
    buf.copy_from_slice(&tagged(3, PER_CLUSTER));
    assert!(waits.submit(Op::Write, 0, PER_CLUSTER, Some(buf), ()).is_none());
    let (begun, mut over) = (Instant::now(), Vec::new());
    while begun.elapsed() < LONG && over.is_empty() {
        waits.wait(&mut over, 100);
    }
    let early = over.len();
    late.end();
    while over.is_empty() {
        if begun.elapsed() > DEADLINE {
            // Its drop would wait for the write.
            std::mem::forget(waits);
            panic!("the write is forgotten");
        }
        waits.wait(&mut over, 1000);
    }
    assert_eq!((early, over[0].result), (0, Ok(())));
    assert_eq!((read(&rig, "a", 1), read(&rig, "b", 1)), (vec![2], vec![3]));
}

/// Others are served while a share waits for I/O of its source, and get what is freed meanwhile.
#[test]
fn what_is_freed_while_a_share_waits_is_somebody_elses_at_once() {
    let rig = full(&["a", "b", "c", "d"], 2);
    write(&rig, "b", 0, 2, 2);
    let [of_a, of_b] = ["a", "b"].map(|name| Late::read(&rig, name));
    rig.open("lvs0/b").unmap(0, 2 * PER_CLUSTER).unwrap();
    let mut waits = OwnedChannel::open(&*rig.bdev("lvs0/c"), 1).unwrap();
    let mut buf = AlignedBuf::zeroed(CLUSTER as usize);
    buf.copy_from_slice(&tagged(3, PER_CLUSTER));
    assert!(waits.submit(Op::Write, 0, PER_CLUSTER, Some(buf), ()).is_none());
    let (begun, mut over) = (Instant::now(), Vec::new());
    waits.wait(&mut over, SOON);
    assert_eq!(over.len(), 0, "there is no room");
    std::thread::scope(|scope| {
        scope.spawn(|| share(&rig, ("a", 0), ("d", 0), 1));
        waits.wait(&mut over, SOON);
        of_b.end();
        while over.is_empty() && begun.elapsed() < DEADLINE {
            waits.wait(&mut over, 1000);
        }
        of_a.end();
    });
    assert_eq!(over.pop().map(|over| over.result), Some(Ok(())));
    assert_eq!(read(&rig, "c", 2), [3, 0]);
}

/// What was submitted before is written, though nothing that comes after is.
#[test]
fn a_share_waits_for_what_its_source_wrote_before_it_was_read_only() {
    let rig = full(&["a", "b"], 12);
    let late = Late::begin(&rig, "a", Op::Write);
    rig.lvstores.set_read_only("lvs0/a").unwrap();
    let ended = Arc::new(AtomicBool::new(false));
    std::thread::scope(|scope| {
        let (rig, its) = (&rig, ended.clone());
        let still = move || its.load(Ordering::Acquire);
        let sharing = scope.spawn(move || share_if(rig, ("a", 0), ("b", 0), 2, still));
        std::thread::sleep(Duration::from_micros(SOON));
        ended.store(true, Ordering::Release);
        late.end();
        assert_eq!(sharing.join().unwrap(), done(2));
    });
}

/// Whoever has room that nobody keeps is not kept from it by those who wait for theirs.
#[test]
fn a_first_write_beside_one_to_what_is_shared_has_the_room_that_there_is() {
    let rig = full(&["a", "b", "c"], 3);
    assert_eq!(share(&rig, ("a", 0), ("b", 0), 2), done(2));
    assert_eq!(free(&rig), 1);
    std::thread::scope(|scope| {
        for (name, count, tag) in [("a", 2, 2), ("b", 2, 3), ("c", 1, 4)] {
            let rig = &rig;
            scope.spawn(move || write(rig, name, 0, count, tag));
        }
    });
    let found = ["a", "b", "c"].map(|name| read(&rig, name, 2));
    assert_eq!(found, [[2, 2], [3, 3], [4, 0]]);
    assert_eq!(free(&rig), 0);
}

/// After a load a volume has what it had, and a snapshot below it what that has: nothing of this counts twice, though
/// the volume is read meanwhile.
#[test]
fn a_load_counts_what_snapshots_have_once() {
    let rig = sharing(23 + 60);
    for name in ["a", "b"] {
        rig.create(name, 12, true).unwrap();
    }
    write(&rig, "a", 0, 10, 1);
    rig.lvstores.snapshot("lvs0/a", &NewLvol::named("s")).unwrap();
    write(&rig, "a", 0, 1, 2);
    assert_eq!(share(&rig, ("a", 0), ("b", 0), 1), done(1));
    rig.open("lvs0/a").flush().unwrap();
    // All but what a load that is wrong would take for lost.
    let rest = free(&rig) - 5;
    rig.create("rest", rest, false).unwrap();
    let late = Late::read(&rig, "a");
    rig.disk.inject(Fault { count: 1, ..Fault::always(Op::Write, IoError::NoSpace) });
    assert!(rig.create("other", 1, true).is_err());
    rig.disk.clear_faults();
    let latch = rig.disk.flush_latch().unwrap();
    latch.clear();
    assert_eq!(rig.lvstores.reload_on(latch).unwrap(), ["lvs0"]);
    let blocks = 5 * PER_CLUSTER;
    let written = rig.open("lvs0/b").write(PER_CLUSTER, &tagged(3, blocks));
    late.end();
    assert_eq!(written, Ok(()));
    assert_eq!(read(&rig, "a", 12)[..2], [2, 1]);
    assert_eq!(read(&rig, "b", 12)[..2], [2, 3]);
}

/// The disk below is told of a cluster that a deleted volume had in two places.
#[test]
fn what_a_volume_had_twice_is_given_back_to_the_disk_below() {
    let rig = sharing(23 + 60);
    rig.create("a", 12, true).unwrap();
    write(&rig, "a", 0, 6, 7);
    assert_eq!(share(&rig, ("a", 0), ("a", 6), 6), done(6));
    rig.open("lvs0/a").flush().unwrap();
    let there = || {
        let of = |block: &[u8]| block.iter().all(|byte| [0, 7].contains(byte)) && block[0] == 7;
        rig.disk.image().chunks(BLOCK as usize).filter(|block| of(block)).count() as u64
    };
    assert_eq!(there(), 6 * PER_CLUSTER);
    rig.lvstores.delete_lvol("lvs0/a").unwrap();
    // It needs all that is free, and waits until the disk was told of what was freed.
    rig.create("next", free(&rig), true).unwrap();
    let begun = Instant::now();
    while there() > 0 {
        assert!(begun.elapsed() < DEADLINE, "{} blocks are left", there());
        std::thread::sleep(Duration::from_millis(1));
    }
}
