//! Volumes whose parent is a bdev outside of the lvstore.

use crate::common::{
    BLOCK, CLUSTER, IMAGE, PER_CLUSTER, Rig, image, image_tags, options, read_tags, tagged,
};
use bdev::testing::{Fault, FaultBdev};
use bdev::{Bdev, ClaimMode, IoError, Op, SyncChannel};
use lvol::NewLvol;
use std::sync::Arc;

fn with_clone() -> (Rig, Arc<FaultBdev>) {
    let rig = Rig::with_lvs(200);
    let image = image();
    rig.registry.register(image.clone()).unwrap();
    let made = rig.lvstores.clone_bdev("image", "lvs0", &NewLvol::named("vm")).unwrap();
    assert_eq!((made.size, made.num_allocated_clusters), (IMAGE * CLUSTER, 0));
    assert!(made.is_esnap_clone && made.is_thin_provisioned && !made.is_clone && !made.is_degraded);
    (rig, image)
}

fn write(channel: &mut SyncChannel, lba: u64, tag: u64) {
    channel.write(lba, &tagged(tag, 1)).unwrap();
}

/// What the image has, with these changes.
fn expected(changes: &[(u64, u64)]) -> Vec<u64> {
    let mut all = image_tags();
    changes.iter().for_each(|(lba, tag)| all[*lba as usize] = *tag);
    all
}

fn all_of(rig: &Rig, name: &str) -> Vec<u64> {
    read_tags(&mut rig.open(&format!("lvs0/{name}")), 0, IMAGE * PER_CLUSTER)
}

#[test]
fn a_clone_of_a_bdev_reads_as_it_and_has_what_is_written_to_it() {
    let (rig, _image) = with_clone();
    assert_eq!(all_of(&rig, "vm"), expected(&[]));
    let mut vm = rig.open("lvs0/vm");
    write(&mut vm, 3 * PER_CLUSTER + 5, 7777);
    assert_eq!(rig.lvstores.lvol("lvs0/vm").unwrap().num_allocated_clusters, 1);
    let changed = [(3 * PER_CLUSTER + 5, 7777)];
    assert_eq!(all_of(&rig, "vm"), expected(&changed));
    let specific = rig.bdev("lvs0/vm").driver_specific();
    let uuid = rig.bdev("image").uuid().to_string();
    assert_eq!(specific["lvol"]["external_snapshot_name"], uuid);
    assert_eq!(
        (&specific["lvol"]["esnap_clone"], &specific["lvol"]["clone"]),
        (&true.into(), &false.into())
    );
    // Nobody may write to it meanwhile; others may clone it.
    assert!(rig.registry.claim("image", "somebody").is_err());
    assert!(rig.registry.claim_as("image", "somebody", ClaimMode::Shared).is_err());
    rig.lvstores.clone_bdev(&uuid, "lvs0", &NewLvol::named("other")).unwrap();
    assert_eq!(all_of(&rig, "other"), expected(&[]));
    drop(vm);
    rig.lvstores.delete_lvol("lvs0/vm").unwrap();
    assert!(rig.registry.claim("image", "somebody").is_err());
    rig.lvstores.inflate("lvs0/other").unwrap();
    drop(rig.registry.claim("image", "somebody").unwrap());
    rig.registry.unregister("image").unwrap();
    let info = rig.lvstores.lvol("lvs0/other").unwrap();
    assert!(!info.is_esnap_clone && !info.is_thin_provisioned && !info.is_degraded);
    assert_eq!(info.num_allocated_clusters, IMAGE);
    assert_eq!(all_of(&rig, "other"), expected(&[]));
}

#[test]
fn holes_hide_the_bdev_and_sizes_cut_it_off() {
    let (rig, _image) = with_clone();
    let mut vm = rig.open("lvs0/vm");
    // A hole of two clusters and parts beside it, which are copied first.
    vm.write_zeroes(PER_CLUSTER - 2, 2 * PER_CLUSTER + 4).unwrap();
    let zeros: Vec<_> = (PER_CLUSTER - 2..3 * PER_CLUSTER + 2).map(|lba| (lba, 0)).collect();
    assert_eq!(all_of(&rig, "vm"), expected(&zeros));
    assert_eq!(rig.lvstores.lvol("lvs0/vm").unwrap().num_allocated_clusters, 2);
    rig.lvstores.resize_lvol("lvs0/vm", 5 * CLUSTER).unwrap();
    rig.lvstores.resize_lvol("lvs0/vm", 12 * CLUSTER).unwrap();
    let mut there = expected(&zeros)[..(5 * PER_CLUSTER) as usize].to_vec();
    there.resize((12 * PER_CLUSTER) as usize, 0);
    assert_eq!(read_tags(&mut vm, 0, 12 * PER_CLUSTER), there);
    let ranges = rig.lvstores.ranges("lvs0/vm", None, 0, 100).unwrap().ranges;
    let told: Vec<_> = ranges.iter().map(|r| (r.offset / CLUSTER, r.length / CLUSTER)).collect();
    assert_eq!(told, [(0, 1), (3, 2)], "the image shows in 4 and in none after it");
}

#[test]
fn chains_on_a_bdev_are_read_parted_merged_and_rolled_back() {
    let (rig, image) = with_clone();
    let mut vm = rig.open("lvs0/vm");
    write(&mut vm, 0, 9000);
    vm.unmap(PER_CLUSTER, PER_CLUSTER).unwrap();
    let hole: Vec<_> = (PER_CLUSTER..2 * PER_CLUSTER).map(|lba| (lba, 0)).collect();
    let before = [&hole[..], &[(0, 9000)]].concat();
    rig.lvstores.snapshot("lvs0/vm", &NewLvol::named("s0")).unwrap();
    write(&mut vm, 2 * PER_CLUSTER, 9001);
    rig.lvstores.snapshot("lvs0/vm", &NewLvol::named("s1")).unwrap();
    write(&mut vm, 3 * PER_CLUSTER, 9002);
    rig.lvstores.clone_lvol("lvs0/s0", &NewLvol::named("c")).unwrap();
    drop(vm);
    let esnap = |rig: &Rig, name: &str| {
        let info = rig.lvstores.lvol(&format!("lvs0/{name}")).unwrap();
        (info.is_snapshot, info.is_clone, info.is_esnap_clone)
    };
    let s1 = [&before[..], &[(2 * PER_CLUSTER, 9001)]].concat();
    let now = [&s1[..], &[(3 * PER_CLUSTER, 9002)]].concat();
    let check = |rig: &Rig| {
        assert_eq!(esnap(rig, "s0"), (true, false, true));
        assert_eq!(esnap(rig, "vm"), (false, true, false));
        for (name, changes) in [("s0", &before), ("c", &before), ("s1", &s1), ("vm", &now)] {
            assert_eq!(all_of(rig, name), expected(changes), "{name}");
        }
    };
    check(&rig);
    let changed = rig.lvstores.ranges("lvs0/s1", Some("lvs0/s0"), 0, 100).unwrap().ranges;
    assert_eq!(changed.iter().map(|r| r.offset / CLUSTER).collect::<Vec<_>>(), [2]);
    let rig = restart(rig, Some(image));
    check(&rig);
    // Its heir becomes the clone of the bdev.
    rig.lvstores.delete_lvol("lvs0/c").unwrap();
    rig.lvstores.delete_lvol("lvs0/s0").unwrap();
    assert_eq!(esnap(&rig, "s1"), (true, false, true));
    assert_eq!((all_of(&rig, "s1"), all_of(&rig, "vm")), (expected(&s1), expected(&now)));
    rig.lvstores.roll_back("lvs0/vm", "lvs0/s1").unwrap();
    assert_eq!(all_of(&rig, "vm"), expected(&s1));
    // From the snapshot, which is the bdev's clone; then from the bdev.
    rig.lvstores.decouple_parent("lvs0/vm").unwrap();
    assert_eq!(esnap(&rig, "vm"), (false, false, true));
    assert_eq!(all_of(&rig, "vm"), expected(&s1));
    rig.lvstores.delete_lvol("lvs0/s1").unwrap();
    rig.lvstores.decouple_parent("lvs0/vm").unwrap();
    let info = rig.lvstores.lvol("lvs0/vm").unwrap();
    assert!(info.is_thin_provisioned && !info.is_esnap_clone);
    rig.registry.unregister("image").unwrap();
    assert_eq!(all_of(&rig, "vm"), expected(&s1));
}

/// Another process, in which the image is there before the lvstore, or is not.
fn restart(rig: Rig, image: Option<Arc<FaultBdev>>) -> Rig {
    let rig = rig.restart();
    if let Some(image) = image {
        rig.registry.register(image).unwrap();
    }
    rig.lvstores.examine("disk0").unwrap().unwrap();
    rig
}

#[test]
fn a_volume_without_its_bdev_is_degraded_until_that_comes() {
    let (rig, image) = with_clone();
    write(&mut rig.open("lvs0/vm"), 0, 9000);
    rig.lvstores.snapshot("lvs0/vm", &NewLvol::named("s0")).unwrap();
    rig.lvstores.clone_bdev("image", "lvs0", &NewLvol::named("other")).unwrap();
    rig.lvstores.clone_bdev("image", "lvs0", &NewLvol::named("own")).unwrap();
    rig.open("lvs0/own").write(0, &tagged(5, IMAGE * PER_CLUSTER)).unwrap();
    rig.open("lvs0/own").flush().unwrap();
    let uuid = image.uuid();
    let rig = restart(rig, None);
    for name in ["vm", "s0", "other"] {
        let info = rig.lvstores.lvol(&format!("lvs0/{name}")).unwrap();
        assert!(info.is_degraded && rig.registry.get(&info.alias).is_none(), "{name}");
    }
    let told = rig.lvstores.lvol("lvs0/s0").unwrap().external_snapshot_name;
    assert_eq!(told, Some(uuid.to_string()));
    // It can be deleted all the same.
    rig.lvstores.delete_lvol("lvs0/other").unwrap();
    // One that has all of its own needs it no more.
    rig.lvstores.inflate("lvs0/own").unwrap();
    assert_eq!(all_of(&rig, "own"), vec![5; (IMAGE * PER_CLUSTER) as usize]);
    let e = rig.lvstores.inflate("lvs0/vm").unwrap_err();
    assert!(e.errno() == -5 && e.to_string().contains("is not there"), "{e}");
    rig.registry.register(image).unwrap();
    rig.lvstores.examine("image").unwrap();
    assert_eq!(all_of(&rig, "vm"), expected(&[(0, 9000)]));
    assert!(!rig.lvstores.lvol("lvs0/vm").unwrap().is_degraded);
    assert!(rig.registry.claim("image", "somebody").is_err());
}

#[test]
fn what_a_removed_bdev_shows_cannot_be_read_and_all_else_goes_on() {
    let (rig, image) = with_clone();
    rig.create("plain", 2, true).unwrap();
    let mut vm = rig.open("lvs0/vm");
    write(&mut vm, 0, 9000);
    rig.registry.unregister("image").unwrap();
    let mut buf = tagged(0, 1);
    assert_eq!(vm.read(PER_CLUSTER, &mut buf).unwrap_err().cause, IoError::ReadMedium);
    assert_eq!(vm.write(PER_CLUSTER, &buf).unwrap_err().cause, IoError::WriteMedium);
    assert_eq!(read_tags(&mut vm, 0, 1), [9000]);
    write(&mut vm, 1, 9001);
    write(&mut rig.open("lvs0/plain"), 5, 1);
    vm.unmap(2 * PER_CLUSTER, PER_CLUSTER).unwrap();
    assert_eq!(read_tags(&mut vm, 2 * PER_CLUSTER, 1), [0]);
    assert!(rig.lvstores.lvol("lvs0/vm").unwrap().is_degraded);
    assert_eq!(rig.lvstores.lvstore("lvs0").unwrap().stopped, None);
    // It is there again, and so is what it shows, for who has the volume open.
    rig.registry.register(image).unwrap();
    rig.lvstores.examine("image").unwrap();
    assert_eq!(read_tags(&mut vm, PER_CLUSTER, 1), [PER_CLUSTER + 1]);
    write(&mut vm, PER_CLUSTER, 9002);
    assert_eq!(read_tags(&mut vm, PER_CLUSTER, 2), [9002, PER_CLUSTER + 2]);
}

#[test]
fn a_write_whose_copy_fails_fails_alone() {
    let (rig, image) = with_clone();
    rig.create("plain", 2, true).unwrap();
    let free = rig.lvstores.lvstore("lvs0").unwrap().free_clusters;
    let mut vm = rig.open("lvs0/vm");
    image.inject(Fault::always(Op::Read, IoError::ReadMedium));
    assert_eq!(vm.write(9, &tagged(1, 1)).unwrap_err().cause, IoError::WriteMedium);
    write(&mut rig.open("lvs0/plain"), 5, 1);
    image.clear_faults();
    let info = rig.lvstores.lvstore("lvs0").unwrap();
    assert_eq!((info.stopped, info.free_clusters), (None, free - 1));
    write(&mut vm, 9, 9000);
    assert_eq!(all_of(&rig, "vm"), expected(&[(9, 9000)]));
}

#[test]
fn what_cannot_be_a_parent_is_refused_in_a_sentence() {
    let (rig, image) = with_clone();
    let new = NewLvol::named("x");
    let refused = |bdev: &str| {
        let e = rig.lvstores.clone_bdev(bdev, "lvs0", &new).unwrap_err();
        (e.errno(), e.to_string())
    };
    let odd = FaultBdev::new("odd", BLOCK as u32, PER_CLUSTER + 1);
    let wide = FaultBdev::new("wide", 4096, PER_CLUSTER);
    for bdev in [odd, wide] {
        rig.registry.register(bdev).unwrap();
    }
    assert!(refused("odd").1.contains("whole clusters"));
    assert!(refused("wide").1.contains("4096 bytes"));
    assert_eq!(refused("none").0, -19);
    assert!(refused("lvs0/vm").1.contains("same lvstore"));
    let held = rig.registry.claim("odd", "a guest").unwrap();
    assert_eq!(refused("odd").0, -16);
    drop(held);
    drop(rig.registry.claim("odd", "nothing is kept").unwrap());
    let e = rig.lvstores.set_parent_bdev("lvs0/vm", "image").unwrap_err();
    assert_eq!(e.errno(), -17, "{e}");
    // Another volume of that size, which has something of its own.
    rig.create("plain", IMAGE, true).unwrap();
    write(&mut rig.open("lvs0/plain"), 3, 9000);
    rig.lvstores.set_parent_bdev("lvs0/plain", "image").unwrap();
    let zeros: Vec<_> =
        (0..PER_CLUSTER).map(|lba| (lba, if lba == 3 { 9000 } else { 0 })).collect();
    assert_eq!(all_of(&rig, "plain"), expected(&zeros));
    rig.create("small", IMAGE - 1, true).unwrap();
    let e = rig.lvstores.set_parent_bdev("lvs0/small", "image").unwrap_err();
    assert!(e.errno() == -22 && e.to_string().contains("size"), "{e}");
    drop(image);
}

#[test]
fn an_lvol_of_another_lvstore_is_a_parent_that_comes_when_its_lvstore_does() {
    let (rig, _image) = with_clone();
    let other = FaultBdev::new("disk1", BLOCK as u32, 100 * PER_CLUSTER);
    rig.registry.register(other.clone()).unwrap();
    rig.lvstores.create_lvstore("disk1", "lvs1", &options()).unwrap();
    write(&mut rig.open("lvs0/vm"), 5, 9000);
    rig.lvstores.snapshot("lvs0/vm", &NewLvol::named("golden")).unwrap();
    rig.lvstores.clone_bdev("lvs0/golden", "lvs1", &NewLvol::named("far")).unwrap();
    let far = |rig: &Rig| {
        read_tags(&mut rig.open("lvs1/far"), 0, IMAGE * PER_CLUSTER) == expected(&[(5, 9000)])
    };
    assert!(far(&rig));
    write(&mut rig.open("lvs1/far"), PER_CLUSTER, 9001);
    assert_eq!(read_tags(&mut rig.open("lvs0/golden"), PER_CLUSTER, 1), [PER_CLUSTER + 1]);
    let e = rig.lvstores.delete_lvol("lvs0/golden").unwrap_err();
    assert_eq!(e.errno(), -16, "{e}");
    let e = rig.lvstores.destroy_lvstore("lvs0").unwrap_err();
    assert_eq!(e.errno(), -16, "{e}");
    // Unloaded it is missing, and loaded again it is there.
    rig.lvstores.unload("lvs0").unwrap();
    assert!(rig.lvstores.lvol("lvs1/far").unwrap().is_degraded);
    rig.lvstores.examine("disk0").unwrap().unwrap();
    while rig.lvstores.lvol("lvs1/far").unwrap().is_degraded {
        std::thread::yield_now();
    }
    assert_eq!(read_tags(&mut rig.open("lvs1/far"), 5, 1), [9000]);
}
