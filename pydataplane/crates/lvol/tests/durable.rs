//! Clusters that come with a write are the volume's when only the process ends, flushed or not, and after a
//! power cut when somebody flushed the volume or wrote with FUA; a flush that failed takes back what
//! was not durable, and says so to whoever wrote it.

use crate::common::{PER_CLUSTER, Rig, read_tags, tagged};
use bdev::testing::{Fault, FaultBdev};
use bdev::{AlignedBuf, Bdev, IoError, Op};
use std::sync::Arc;

/// The number of clusters that each test writes to.
const CLUSTERS: u64 = 6;

fn thin() -> Rig {
    let rig = Rig::with_lvs(64);
    rig.create("a", CLUSTERS, true).unwrap();
    rig.create("b", CLUSTERS, true).unwrap();
    rig
}

/// Writes a block of each cluster.
fn write(rig: &Rig, name: &str, tag: u64) {
    let mut channel = rig.open(name);
    for cluster in 0..CLUSTERS {
        channel.write(cluster * PER_CLUSTER, &tagged(tag, 1)).unwrap();
    }
}

/// The tag of the first block of each cluster; all others are zeros.
fn read(rig: &Rig, name: &str) -> Vec<u64> {
    let all = read_tags(&mut rig.open(name), 0, CLUSTERS * PER_CLUSTER);
    let (mut first, mut rest) = (Vec::new(), Vec::new());
    for (block, tag) in all.into_iter().enumerate() {
        if block.is_multiple_of(PER_CLUSTER as usize) { &mut first } else { &mut rest }.push(tag);
    }
    assert!(rest.iter().all(|tag| *tag == 0), "what was not written is not zero");
    first
}

fn load(disk: Arc<FaultBdev>) -> Rig {
    let rig = Rig::on(disk);
    rig.lvstores.examine("disk0").unwrap().unwrap();
    rig
}

/// The power fails, `seed` says what it leaves.
fn cut(rig: Rig, seed: u64) -> Rig {
    let disk = rig.disk.clone();
    disk.die_after(0);
    drop(rig);
    disk.power_cut(seed);
    load(disk)
}

#[test]
fn a_write_to_a_new_cluster_flushes_nothing() {
    let rig = thin();
    let before = rig.disk.flushes();
    write(&rig, "lvs0/a", 5);
    assert_eq!(rig.disk.flushes(), before);
    rig.open("lvs0/a").flush().unwrap();
    assert_eq!(rig.disk.flushes(), before + 2, "what was written, and that it counts");
    rig.open("lvs0/a").flush().unwrap();
    assert_eq!(rig.disk.flushes(), before + 3, "there was nothing new");
}

#[test]
fn what_was_not_flushed_is_there_when_the_process_was_killed() {
    let rig = thin();
    write(&rig, "lvs0/a", 5);
    let disk = FaultBdev::with_image("disk0", 512, rig.disk.image());
    drop(rig);
    let rig = load(disk);
    assert_eq!(read(&rig, "lvs0/a"), [5; CLUSTERS as usize]);
    // It was made durable by the load.
    let rig = cut(rig, 0);
    assert_eq!(read(&rig, "lvs0/a"), [5; CLUSTERS as usize]);
}

#[test]
fn what_was_not_flushed_is_new_or_old_after_a_power_cut_and_free_where_it_is_old() {
    for seed in (0..40).chain([u64::MAX]) {
        let rig = thin();
        let free = |rig: &Rig| rig.lvstores.lvstore("lvs0").unwrap().free_clusters;
        let before = free(&rig);
        write(&rig, "lvs0/a", 5);
        assert_eq!(free(&rig), before - CLUSTERS);
        let rig = cut(rig, seed);
        assert!(read(&rig, "lvs0/a").iter().all(|tag| [0, 5].contains(tag)), "{seed}");
        let has = rig.lvstores.lvols(None).unwrap()[0].num_allocated_clusters;
        assert_eq!(free(&rig), before - has);
    }
}

#[test]
fn what_was_flushed_is_there_after_a_power_cut_and_another_volume_s_flush_is_its_own() {
    for seed in 0..20 {
        let rig = thin();
        write(&rig, "lvs0/a", 5);
        rig.open("lvs0/a").flush().unwrap();
        write(&rig, "lvs0/b", 6);
        let rig = cut(rig, seed);
        assert_eq!(read(&rig, "lvs0/a"), [5; CLUSTERS as usize], "{seed}");
        assert!(read(&rig, "lvs0/b").iter().all(|tag| [0, 6].contains(tag)), "{seed}");
    }
}

#[test]
fn a_write_with_fua_is_durable_in_a_new_cluster_and_in_one_that_was_not_flushed() {
    for seed in 0..20 {
        let rig = thin();
        rig.open("lvs0/a").write_fua(0, &tagged(7, 1)).unwrap();
        let rig = cut(rig, seed);
        assert_eq!(read_tags(&mut rig.open("lvs0/a"), 0, 1), [7], "{seed}");
        rig.open("lvs0/b").write(3, &tagged(8, 1)).unwrap();
        rig.open("lvs0/b").write_fua(4, &tagged(9, 1)).unwrap();
        let rig = cut(rig, seed);
        assert_eq!(read_tags(&mut rig.open("lvs0/b"), 4, 1), [9], "{seed}");
    }
}

#[test]
fn a_change_of_another_kind_makes_allocations_durable_too() {
    let rig = thin();
    write(&rig, "lvs0/a", 5);
    rig.lvstores.rename_lvol("lvs0/b", "other").unwrap();
    let flushes = rig.disk.flushes();
    rig.open("lvs0/a").flush().unwrap();
    assert_eq!(rig.disk.flushes(), flushes + 1, "only what was written");
    let rig = cut(rig, 0);
    assert_eq!(read(&rig, "lvs0/a"), [5; CLUSTERS as usize]);
}

#[test]
fn a_flush_that_failed_takes_back_what_was_not_durable_and_says_so_to_who_wrote_it() {
    let rig = thin();
    write(&rig, "lvs0/a", 5);
    rig.open("lvs0/a").flush().unwrap();
    let mut b = rig.open("lvs0/b");
    b.write(0, &tagged(6, 1)).unwrap();
    // The flush of another; b does not flush while it is latched.
    rig.disk.inject(Fault { count: 1, ..Fault::always(Op::Flush, IoError::Flush) });
    assert_eq!(rig.open("lvs0/a").flush().unwrap_err().cause, IoError::Flush);
    let latch = rig.disk.flush_latch().unwrap();
    latch.clear().unwrap();
    assert_eq!(rig.lvstores.reload_on(latch).unwrap(), ["lvs0"]);
    assert_eq!(read_tags(&mut b, 0, 1), [0]);
    assert_eq!(b.flush().unwrap_err().cause, IoError::Flush, "its write is lost");
    b.flush().unwrap();
    rig.open("lvs0/a").flush().unwrap();
    assert_eq!(read(&rig, "lvs0/a"), [5; CLUSTERS as usize]);
    b.write(0, &tagged(6, 1)).unwrap();
    b.flush().unwrap();
    let rig = cut(rig, 0);
    assert_eq!(read_tags(&mut rig.open("lvs0/b"), 0, 1), [6]);
}

#[test]
fn a_full_disk_takes_nothing_back() {
    let rig = thin();
    write(&rig, "lvs0/a", 5);
    rig.disk.inject(Fault { count: 1, ..Fault::always(Op::Write, IoError::NoSpace) });
    assert!(rig.create("c", 1, true).is_err());
    assert!(rig.lvstores.lvstore("lvs0").unwrap().stopped.is_some());
    rig.open("lvs0/a").flush().unwrap();
    write_more_is_refused(&rig);
    let reloaded = rig.lvstores.reload_on(rig.disk.flush_latch().unwrap()).unwrap();
    assert_eq!(reloaded, ["lvs0"]);
    assert_eq!(read(&rig, "lvs0/a"), [5; CLUSTERS as usize]);
    rig.open("lvs0/a").flush().unwrap();
    let rig = cut(rig, 0);
    assert_eq!(read(&rig, "lvs0/a"), [5; CLUSTERS as usize]);
}

fn write_more_is_refused(rig: &Rig) {
    assert!(rig.open("lvs0/b").write(0, &AlignedBuf::zeroed(512)).is_err());
}

#[test]
fn copies_for_a_clone_are_durable_with_the_flush_and_what_it_shows_never_changes() {
    for seed in (0..30).chain([u64::MAX]) {
        let rig = thin();
        write(&rig, "lvs0/a", 5);
        rig.lvstores.snapshot("lvs0/a", &lvol::NewLvol::named("s")).unwrap();
        rig.lvstores.clone_lvol("lvs0/s", &lvol::NewLvol::named("c")).unwrap();
        rig.open("lvs0/c").write(1, &tagged(6, 1)).unwrap();
        let rig = cut(rig, seed);
        let tags = read_tags(&mut rig.open("lvs0/c"), 0, CLUSTERS * PER_CLUSTER);
        assert!(tags[0] == 5 && [0, 6].contains(&tags[1]), "{seed}: {:?}", &tags[..3]);
        assert!(tags[2..PER_CLUSTER as usize].iter().all(|tag| *tag == 0));
        assert_eq!(tags[PER_CLUSTER as usize], 5);
        rig.open("lvs0/c").write(1, &tagged(7, 1)).unwrap();
        rig.open("lvs0/c").flush().unwrap();
        let rig = cut(rig, seed);
        assert_eq!(read_tags(&mut rig.open("lvs0/c"), 0, 3), [5, 7, 0], "{seed}");
    }
}
