//! Maps of volumes come and go: what is read and written is the same, and a map that cannot be read again is
//! an error of the I/O that needs it.

use crate::common::{BLOCK, CLUSTER, PER_CLUSTER, Rig, options, read_tags, tagged};
use bdev::testing::{Fault, FaultBdev};
use bdev::{IoError, Op, SyncChannel};
use lvol::{NewLvol, Range};

const CLUSTERS: u64 = 40;

/// A rig with a volume in which each second cluster is allocated, and a clone of a snapshot of it.
fn rig() -> (Rig, SyncChannel) {
    let rig = Rig::with_lvs(200);
    rig.create("vm", CLUSTERS, true).unwrap();
    let mut vm = rig.open("lvs0/vm");
    for cluster in (0..CLUSTERS).step_by(2) {
        vm.write(cluster * PER_CLUSTER, &tagged(cluster + 1, 1)).unwrap();
    }
    vm.flush().unwrap();
    rig.lvstores.snapshot("lvs0/vm", &NewLvol::named("s")).unwrap();
    rig.lvstores.clone_lvol("lvs0/s", &NewLvol::named("clone")).unwrap();
    (rig, vm)
}

fn shows(channel: &mut SyncChannel) -> Vec<u64> {
    (0..CLUSTERS).map(|cluster| read_tags(channel, cluster * PER_CLUSTER, 1)[0]).collect()
}

#[test]
fn a_volume_in_use_and_closed_ones_show_the_same_without_their_maps() {
    let (rig, mut vm) = rig();
    let before = shows(&mut vm);
    assert_eq!(before[..4], [1, 0, 3, 0]);
    let let_go = || rig.lvstores.let_go_maps("lvs0").unwrap();
    let_go();
    assert_eq!(shows(&mut vm), before);
    let_go();
    vm.write(PER_CLUSTER, &tagged(77, 1)).unwrap();
    let_go();
    vm.unmap(2 * PER_CLUSTER, PER_CLUSTER).unwrap();
    let_go();
    let mut now = before.clone();
    (now[1], now[2]) = (77, 0);
    assert_eq!(shows(&mut vm), now);
    let_go();
    assert_eq!(shows(&mut rig.open("lvs0/clone")), before);
    let_go();
    // Without a channel: what is told by maps.
    let told = |of: &str, since| rig.lvstores.ranges(of, since, 0, 99).unwrap().ranges;
    assert_eq!(told("lvs0/s", None).len() as u64, CLUSTERS / 2);
    let_go();
    let changed = [Range { offset: CLUSTER, length: 2 * CLUSTER }];
    assert_eq!(told("lvs0/vm", Some("lvs0/s")), changed);
    let_go();
    let sparse = rig.bdev("lvs0/clone");
    let run = sparse.sparse().unwrap().run(PER_CLUSTER);
    assert_eq!((run.hole, run.blocks), (true, PER_CLUSTER));
    let_go();
    let space = rig.lvstores.space("lvs0/vm").unwrap();
    assert_eq!((space.exclusive, space.shared), (CLUSTER, (CLUSTERS / 2 - 1) * CLUSTER));
    // And changed.
    let_go();
    rig.lvstores.resize_lvol("lvs0/clone", 2 * CLUSTERS * CLUSTER).unwrap();
    let_go();
    rig.lvstores.inflate("lvs0/clone").unwrap();
    let_go();
    assert_eq!(shows(&mut rig.open("lvs0/clone")), before);
    let_go();
    rig.lvstores.delete_lvol("lvs0/s").unwrap();
    let_go();
    assert_eq!(shows(&mut vm), now);
}

#[test]
fn a_map_that_cannot_be_read_fails_the_io_that_needs_it_and_is_read_later() {
    let (rig, mut vm) = rig();
    let before = shows(&mut vm);
    rig.lvstores.let_go_maps("lvs0").unwrap();
    rig.disk.inject(Fault::always(Op::Read, IoError::ReadMedium));
    let mut buf = tagged(0, 1);
    assert_eq!(vm.read(0, &mut buf).unwrap_err().cause, IoError::ReadMedium);
    assert!(vm.write(0, &buf).is_err());
    assert!(rig.lvstores.ranges("lvs0/s", None, 0, 9).is_err());
    rig.disk.clear_faults();
    assert_eq!(shows(&mut vm), before);
}

#[test]
fn a_parent_of_another_lvstore_keeps_its_map() {
    let (rig, _vm) = rig();
    let disk = FaultBdev::new("disk1", BLOCK as u32, 200 * PER_CLUSTER);
    rig.registry.register(disk).unwrap();
    rig.lvstores.create_lvstore("disk1", "lvs1", &options()).unwrap();
    rig.lvstores.clone_bdev("lvs0/s", "lvs1", &NewLvol::named("far")).unwrap();
    rig.create("other", 2, false).unwrap();
    rig.lvstores.let_go_maps("lvs0").unwrap();
    let mut parent = rig.open("lvs0/s");
    rig.disk.inject(Fault::always(Op::Read, IoError::ReadMedium));
    // Zeros, for which only the map is needed.
    assert_eq!(read_tags(&mut parent, PER_CLUSTER, 1), [0]);
    assert!(rig.lvstores.ranges("lvs0/other", None, 0, 9).is_err());
    // What the metadata thread of the other one copies needs no map to be read here.
    let mut far = rig.open("lvs1/far");
    far.write(PER_CLUSTER, &tagged(5, 1)).unwrap();
}
