//! Clusters change hands only when nobody uses them any more. The disk below executes I/O when it
//! is polled, so a write that is in flight reaches the medium as late as the test likes.

use crate::common::{BLOCK, CLUSTER, PER_CLUSTER, Rig, read_tags, tagged};
use bdev::{AlignedBuf, Channel, Completion, Io, IoError, Op, OwnedChannel, Submit};
use guestmem::Bounce;
use lvol::NewLvol;
use reactor::IoContext;
use std::time::{Duration, Instant};

/// Long enough for the metadata thread to do wrong.
const A_WHILE: Duration = Duration::from_millis(50);

/// A channel with one write of a cluster in flight, whose data is `tag`.
struct Late {
    channel: Box<dyn Channel>,
    _buf: Bounce,
    _io: IoContext,
}

fn late_write(rig: &Rig, key: &str, lba: u64, tag: u64) -> Late {
    rig.disk.defer(Some(1));
    let io = IoContext::new().unwrap();
    let mut channel = rig.bdev(key).open(&io).unwrap();
    rig.disk.defer(None);
    let buf = Bounce::new();
    let sg = buf.sg(CLUSTER as usize).unwrap();
    sg.copy_from_slice(0, &tagged(tag, PER_CLUSTER));
    let write = Io { op: Op::Write, fua: false, lba, blocks: PER_CLUSTER, sg, tag };
    assert_eq!(channel.submit(&write), Submit::Pending);
    Late { channel, _buf: buf, _io: io }
}

impl Late {
    fn land(&mut self) {
        let mut done: Vec<Completion> = Vec::with_capacity(8);
        for _ in 0..8 {
            self.channel.poll(&mut done);
        }
        assert_eq!(done.len(), 1);
    }
}

/// Takes every free cluster for a new volume while `late` is in flight, then lets it land; the new
/// volume must not show it.
fn another_takes_all(rig: &Rig, late: &mut Late, free: u64) {
    let created = std::thread::scope(|scope| {
        let create = scope.spawn(|| rig.create("other", free, false));
        std::thread::sleep(A_WHILE);
        late.land();
        create.join().unwrap()
    });
    created.unwrap();
    let all = read_tags(&mut rig.open("lvs0/other"), 0, free * PER_CLUSTER);
    let foreign = all.iter().filter(|t| **t != 0).count();
    assert_eq!(foreign, 0, "blocks of the former owner's late write");
}

fn free(rig: &Rig) -> u64 {
    rig.lvstores.lvstore("lvs0").unwrap().free_clusters
}

#[test]
fn a_write_that_lands_after_a_shrink_hits_nobody_else() {
    let rig = Rig::with_lvs(40);
    rig.create("a", 4, false).unwrap();
    let mut late = late_write(&rig, "lvs0/a", 3 * PER_CLUSTER, 7);
    rig.lvstores.resize_lvol("lvs0/a", CLUSTER).unwrap();
    let all = free(&rig);
    another_takes_all(&rig, &mut late, all);
}

#[test]
fn a_write_that_lands_after_a_delete_hits_nobody_else() {
    let rig = Rig::with_lvs(40);
    rig.create("a", 4, false).unwrap();
    let mut late = late_write(&rig, "lvs0/a", 3 * PER_CLUSTER, 7);
    rig.lvstores.delete_lvol("lvs0/a").unwrap();
    let all = free(&rig);
    another_takes_all(&rig, &mut late, all);
}

#[test]
fn a_write_that_lands_after_an_unmap_by_another_channel_hits_nobody_else() {
    let rig = Rig::with_lvs(40);
    rig.create("t", 4, true).unwrap();
    let mut other = rig.open("lvs0/t");
    other.write(0, &tagged(1, 4 * PER_CLUSTER)).unwrap();
    let mut late = late_write(&rig, "lvs0/t", 3 * PER_CLUSTER, 7);
    other.unmap(2 * PER_CLUSTER, 2 * PER_CLUSTER).unwrap();
    assert_eq!(read_tags(&mut other, 3 * PER_CLUSTER, 1), [0]);
    let all = free(&rig);
    another_takes_all(&rig, &mut late, all);
}

#[test]
fn a_write_that_waits_for_room_goes_on_when_the_last_io_to_freed_clusters_ended() {
    let rig = Rig::with_lvs(40);
    rig.create("t", 4, true).unwrap();
    rig.create("u", 60, true).unwrap();
    rig.open("lvs0/t").write(0, &tagged(1, 4 * PER_CLUSTER)).unwrap();
    let all = free(&rig);
    rig.open("lvs0/u").write(0, &tagged(2, all * PER_CLUSTER)).unwrap();
    assert_eq!(free(&rig), 0);
    let mut late = late_write(&rig, "lvs0/t", 3 * PER_CLUSTER, 7);
    rig.open("lvs0/t").unmap(2 * PER_CLUSTER, 2 * PER_CLUSTER).unwrap();
    let mut waits = OwnedChannel::open(&*rig.bdev("lvs0/u"), 1).unwrap();
    let buf = Some(AlignedBuf::zeroed(BLOCK as usize));
    let begun = Instant::now();
    assert!(waits.submit(Op::Write, all * PER_CLUSTER, 1, buf, ()).is_none());
    std::thread::sleep(A_WHILE);
    late.land();
    let mut over = Vec::new();
    while waits.poll(&mut over) == 0 && over.is_empty() {
        if begun.elapsed() > Duration::from_secs(60) {
            // Its drop would wait for the write.
            std::mem::forget(waits);
            panic!("the write is forgotten");
        }
        waits.wait(&mut over, 1000);
    }
    // On a machine that is slow it may have given up, as it says, after a second.
    let gave_up = begun.elapsed() > Duration::from_secs(1);
    let result = over[0].result;
    assert!(result == Ok(()) || (gave_up && result == Err(IoError::NoSpace)), "{result:?}");
}

#[test]
fn clusters_that_wait_do_not_hold_up_anything_else() {
    let rig = Rig::with_lvs(60);
    rig.create("a", 4, false).unwrap();
    let mut late = late_write(&rig, "lvs0/a", 3 * PER_CLUSTER, 7);
    rig.lvstores.delete_lvol("lvs0/a").unwrap();
    // The write is still in flight; others allocate, resize, write and unmap.
    rig.create("t", 8, true).unwrap();
    let mut thin = rig.open("lvs0/t");
    thin.write(0, &tagged(2, 2 * PER_CLUSTER)).unwrap();
    thin.unmap(0, PER_CLUSTER).unwrap();
    rig.lvstores.resize_lvol("lvs0/t", 2 * CLUSTER).unwrap();
    late.land();
    assert_eq!(read_tags(&mut thin, PER_CLUSTER - 1, 2), [0, 2]);
}

#[test]
fn a_channel_that_is_closed_with_io_in_flight_lets_its_clusters_go() {
    let rig = Rig::with_lvs(40);
    rig.create("a", 4, false).unwrap();
    let late = late_write(&rig, "lvs0/a", 3 * PER_CLUSTER, 7);
    rig.lvstores.delete_lvol("lvs0/a").unwrap();
    let all = free(&rig);
    drop(late);
    rig.create("other", all, false).unwrap();
}

#[test]
fn an_io_in_flight_over_a_grow_goes_on_and_the_new_size_can_be_used_at_once() {
    let rig = Rig::with_lvs(60);
    rig.create("a", 2, false).unwrap();
    let mut late = late_write(&rig, "lvs0/a", 0, 7);
    rig.lvstores.resize_lvol("lvs0/a", 6 * CLUSTER).unwrap();
    let mut other = rig.open("lvs0/a");
    other.write(5 * PER_CLUSTER, &tagged(8, PER_CLUSTER)).unwrap();
    late.land();
    assert_eq!(read_tags(&mut other, PER_CLUSTER - 1, 2), [7, 0]);
    assert_eq!(read_tags(&mut other, 6 * PER_CLUSTER - 1, 1), [8]);
    assert_eq!(BLOCK, 512);
}

/// A volume that was deleted is unmapped below when a snapshot has been taken, whose volume takes no writes meanwhile.
#[test]
fn what_was_freed_does_not_hold_up_a_snapshot() {
    let rig = Rig::with_lvs(200);
    for name in ["a", "large"] {
        rig.create(name, 40, false).unwrap();
    }
    // So both have their maps.
    rig.open("lvs0/a").write(0, &tagged(1, 1)).unwrap();
    rig.open("lvs0/large").write(0, &tagged(7, 39 * PER_CLUSTER)).unwrap();
    let there = || {
        let seven = tagged(7, 1);
        rig.disk.image().chunks(BLOCK as usize).filter(|block| **block == seven[..]).count() as u64
    };
    let mut of_large = late_write(&rig, "lvs0/large", 39 * PER_CLUSTER, 7);
    let mut of_a = late_write(&rig, "lvs0/a", 0, 1);
    rig.lvstores.delete_lvol("lvs0/large").unwrap();
    let mut writes = OwnedChannel::open(&*rig.bdev("lvs0/a"), 1).unwrap();
    std::thread::scope(|scope| {
        let taking = scope.spawn(|| rig.lvstores.snapshot("lvs0/a", &NewLvol::named("s")));
        // What is written to a volume's own cluster is over at once, until the snapshot has begun.
        let write = |writes: &mut OwnedChannel<()>| {
            let buf = Some(AlignedBuf::zeroed(BLOCK as usize));
            writes.submit(Op::Write, PER_CLUSTER, 1, buf, ())
        };
        while write(&mut writes).is_some() {
            std::thread::yield_now();
        }
        of_large.land();
        std::thread::sleep(A_WHILE);
        let left = there();
        // On a machine that is slow the snapshot may have given up, as it does after a second.
        assert!(left == 40 * PER_CLUSTER || taking.is_finished(), "{left} blocks are left");
        of_a.land();
        _ = taking.join().unwrap();
    });
    let begun = Instant::now();
    while there() > 0 {
        assert!(begun.elapsed() < Duration::from_secs(60), "{} blocks are left", there());
        std::thread::sleep(Duration::from_millis(1));
    }
}
