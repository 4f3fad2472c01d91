//! Where the bdev below is known to read as zeros, the first write to a thin volume's cluster writes none.
//! In a file the zeros are written, as room is taken with them.

use crate::common::{BLOCK, CLUSTER, PER_CLUSTER, Rig, options, read_tags, tagged};
use bdev::testing::{Fault, FaultBdev};
use bdev::{
    Bdev, FileBdev, FileKind, FileOptions, IoError, Op, ProtectionType, Registry, SyncChannel,
};
use lvol::{ClearMethod, LvolOptions, LvstoreOptions, Lvstores};
use std::os::unix::fs::MetadataExt;

/// The clusters of a disk, of which all but 23 are for data.
const CLUSTERS: u64 = 64;
const FREE: u64 = CLUSTERS - 23;

/// A disk that is full of somebody's data.
fn full() -> Rig {
    let bytes = tagged(0x5ec_2e7, CLUSTERS * PER_CLUSTER).to_vec();
    Rig::on(FaultBdev::with_image("disk0", BLOCK as u32, bytes))
}

fn create(rig: &Rig, clear: ClearMethod) {
    let options = LvstoreOptions { clear, ..options() };
    rig.lvstores.create_lvstore("disk0", "lvs0", &options).unwrap();
}

/// Changes of the disk for first writes to all that is free, each a block to another cluster of a new thin
/// volume, which shows nothing else.
fn changes_of_first_writes(rig: &Rig) -> u64 {
    let free = rig.lvstores.lvstore("lvs0").unwrap().free_clusters;
    rig.create("thin", free, true).unwrap();
    let mut channel = rig.open("lvs0/thin");
    channel.flush().unwrap();
    let before = rig.disk.changes();
    for cluster in 0..free {
        channel.write(cluster * PER_CLUSTER + 7, &tagged(cluster + 1, 1)).unwrap();
    }
    let changes = rig.disk.changes() - before;
    for (block, tag) in (0..).zip(read_tags(&mut channel, 0, free * PER_CLUSTER)) {
        let written = block % PER_CLUSTER == 7;
        assert_eq!(tag, if written { block / PER_CLUSTER + 1 } else { 0 }, "block {block}");
    }
    changes
}

/// Whether those are written with zeros, or without.
#[track_caller]
fn writes_zeros(rig: &Rig, zeros: bool) {
    let changes = changes_of_first_writes(rig);
    // Its record and its data, now and then a flush and a superblock.
    let fits = if zeros { 3 * FREE..3 * FREE + 20 } else { 2 * FREE..2 * FREE + 20 };
    assert!(fits.contains(&changes), "{changes} changes for {FREE} first writes");
}

#[test]
fn of_an_lvstore_that_was_cleared_nothing_more_has_to_be() {
    for (tells, clear, zeros) in [
        (true, ClearMethod::None, true),
        (true, ClearMethod::Unmap, false),
        (false, ClearMethod::Unmap, true),
        (false, ClearMethod::WriteZeroes, false),
    ] {
        let rig = full();
        if tells {
            rig.disk.tell_zeros();
        }
        create(&rig, clear);
        writes_zeros(&rig, zeros);
    }
}

#[test]
fn what_the_disk_tells_counts_when_nothing_is_cleared() {
    let rig = Rig::new(CLUSTERS);
    rig.disk.tell_zeros();
    create(&rig, ClearMethod::None);
    writes_zeros(&rig, false);
}

#[test]
fn what_the_disk_tells_at_load_counts() {
    for tells in [false, true] {
        let rig = full();
        create(&rig, ClearMethod::Unmap);
        let rig = rig.restart();
        if tells {
            rig.disk.tell_zeros();
        }
        rig.lvstores.examine("disk0").unwrap().unwrap();
        writes_zeros(&rig, !tells);
    }
}

#[test]
fn what_a_deleted_volume_had_is_unmapped_and_needs_no_zeros() {
    let rig = full();
    rig.disk.tell_zeros();
    create(&rig, ClearMethod::None);
    rig.create("former", FREE, false).unwrap();
    rig.open("lvs0/former").write(0, &tagged(9, FREE * PER_CLUSTER)).unwrap();
    rig.lvstores.delete_lvol("lvs0/former").unwrap();
    // It waits until they are free.
    let free = || rig.lvstores.lvstore("lvs0").unwrap().free_clusters;
    assert_eq!(free(), FREE);
    writes_zeros(&rig, false);
}

#[test]
fn what_could_not_be_unmapped_is_zeroed() {
    let rig = full();
    rig.disk.tell_zeros();
    create(&rig, ClearMethod::None);
    rig.create("former", FREE, false).unwrap();
    rig.open("lvs0/former").write(0, &tagged(9, FREE * PER_CLUSTER)).unwrap();
    rig.disk.inject(Fault::always(Op::Unmap, IoError::WriteMedium));
    rig.lvstores.delete_lvol("lvs0/former").unwrap();
    writes_zeros(&rig, true);
}

#[test]
fn blocks_with_protection_information_are_zeroed() {
    let rig = Rig::of_kind(CLUSTERS, Some(ProtectionType::Type1));
    rig.disk.tell_zeros();
    create(&rig, ClearMethod::Unmap);
    writes_zeros(&rig, true);
}

#[test]
fn after_a_failed_flush_all_is_zeroed_also_when_it_was_cleared() {
    let rig = full();
    rig.disk.tell_zeros();
    create(&rig, ClearMethod::Unmap);
    rig.create("other", 1, true).unwrap();
    let fault = Fault { count: 1, ..Fault::always(Op::Flush, IoError::Flush) };
    rig.disk.inject(fault);
    assert!(rig.open("lvs0/other").flush().is_err());
    let latch = rig.disk.flush_latch().unwrap();
    latch.clear();
    rig.lvstores.reload_on(latch).unwrap();
    rig.lvstores.delete_lvol("lvs0/other").unwrap();
    writes_zeros(&rig, true);
}

#[test]
fn what_an_lvstore_gains_is_asked_about() {
    let rig = full();
    create(&rig, ClearMethod::None);
    rig.create("former", FREE, true).unwrap();
    rig.open("lvs0/former").write(0, &tagged(9, FREE * PER_CLUSTER)).unwrap();
    rig.disk.tell_zeros();
    rig.disk.resize((CLUSTERS + FREE) * PER_CLUSTER);
    let grown = rig.lvstores.grow_lvstore("lvs0").unwrap();
    assert_eq!(grown.free_clusters * CLUSTER, FREE * CLUSTER);
    writes_zeros(&rig, false);
}

#[test]
fn in_a_file_a_cluster_has_its_room_from_the_first_write_on_and_an_inflated_volume_all() {
    let file = tempfile::NamedTempFile::new_in("/var/tmp").unwrap();
    file.as_file().set_len(CLUSTERS * CLUSTER).unwrap();
    let disk = FileBdev::create(FileOptions {
        name: "disk0".into(),
        path: file.path().into(),
        block_size: Some(512),
        read_only: false,
        uuid: None,
        kind: FileKind::Aio,
    });
    let registry = Registry::new();
    registry.register(disk.unwrap()).unwrap();
    let lvstores = Lvstores::new(registry.clone());
    lvstores.create_lvstore("disk0", "lvs0", &options()).unwrap();
    let volume = LvolOptions {
        name: "thin".into(),
        size: FREE / 2 * CLUSTER,
        thin: true,
        uuid: None,
        xattrs: Default::default(),
        key: None,
        dif_type: None,
    };
    lvstores.create_lvol("lvs0", &volume).unwrap();
    let room = || file.as_file().metadata().unwrap().blocks() * 512;
    let before = room();
    let mut channel = SyncChannel::open(&*registry.get("lvs0/thin").unwrap()).unwrap();
    channel.write(0, &tagged(1, 1)).unwrap();
    assert!(room() - before >= CLUSTER, "{}", room() - before);
    drop(channel);
    lvstores.inflate("lvs0/thin").unwrap();
    assert!(room() - before >= FREE / 2 * CLUSTER, "{}", room() - before);
}
