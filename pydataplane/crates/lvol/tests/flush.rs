//! A flush that failed is told to all volumes of the lvstore, which takes no more changes until
//! somebody cleared it; then memory and medium agree again, whatever had failed half-way.

use crate::common::{CLUSTER, PER_CLUSTER, Rig, read_tags, tagged};
use bdev::testing::Fault;
use bdev::{Bdev, FlushCause, IoError, Op};
use lvol::Error;

fn one(op: Op, error: IoError, skip: u64) -> Fault {
    Fault { count: 1, skip, ..Fault::always(op, error) }
}

fn clear(rig: &Rig) -> FlushCause {
    let latch = rig.disk.flush_latch().unwrap();
    let failure = latch.clear().expect("a failure is latched");
    rig.lvstores.reload_on(latch).unwrap();
    failure.cause
}

#[test]
fn a_flush_of_one_volume_that_fails_is_told_to_the_others_and_stops_changes() {
    let rig = Rig::with_lvs(64);
    rig.create("a", 2, false).unwrap();
    rig.create("b", 2, false).unwrap();
    rig.create("t", 4, true).unwrap();
    let (mut a, mut b, mut t) = (rig.open("lvs0/a"), rig.open("lvs0/b"), rig.open("lvs0/t"));
    b.write(0, &tagged(1, 1)).unwrap();
    rig.disk.inject(one(Op::Flush, IoError::Flush, 0));
    assert_eq!(a.flush().unwrap_err().cause, IoError::Flush);
    // The disk would flush again; what it lost was b's, perhaps.
    for _ in 0..2 {
        assert_eq!(b.flush().unwrap_err().cause, IoError::Flush);
    }
    assert_eq!(t.write(0, &tagged(2, 1)).unwrap_err().cause, IoError::WriteMedium);
    let e = rig.create("c", 1, true).unwrap_err();
    assert!(matches!(&e, Error::Stopped { .. }), "{e}");
    let stopped = rig.lvstores.lvstore("lvs0").unwrap().stopped.unwrap();
    assert!(stopped.contains("on bdev disk0 a flush failed"), "{stopped}");
    assert_eq!(rig.lvstores.xattrs("lvs0/a").unwrap(), [""; 0], "looking is possible");
    assert_eq!(clear(&rig), FlushCause::Flush);
    b.flush().unwrap();
    assert_eq!(rig.lvstores.lvstore("lvs0").unwrap().stopped, None);
    t.write(0, &tagged(2, 1)).unwrap();
    rig.create("c", 1, true).unwrap();
}

#[test]
fn a_metadata_write_that_fails_is_told_to_all_volumes() {
    let rig = Rig::with_lvs(64);
    rig.create("a", 2, false).unwrap();
    let mut a = rig.open("lvs0/a");
    rig.disk.inject(one(Op::Write, IoError::WriteMedium, 0));
    assert!(matches!(rig.create("b", 2, true), Err(Error::Io { .. })));
    assert_eq!(a.flush().unwrap_err().cause, IoError::Flush);
    assert_eq!(clear(&rig), FlushCause::Metadata);
    a.flush().unwrap();
    rig.create("b", 2, true).unwrap();
}

#[test]
fn a_full_disk_below_stops_changes_but_not_flushes() {
    let rig = Rig::with_lvs(64);
    rig.create("a", 2, false).unwrap();
    rig.disk.inject(one(Op::Write, IoError::NoSpace, 0));
    assert!(rig.create("b", 2, true).is_err());
    assert!(rig.lvstores.lvstore("lvs0").unwrap().stopped.is_some());
    rig.open("lvs0/a").flush().unwrap();
    rig.lvstores.reload_on(rig.disk.flush_latch().unwrap()).unwrap();
    rig.create("b", 2, true).unwrap();
}

/// Whatever metadata write or flush of whatever operation fails: after it was cleared the volumes in
/// use are as before the operation or as after it, nothing is lost, and all goes on.
#[test]
fn after_a_failure_at_any_point_volumes_in_use_go_on_with_what_the_medium_says() {
    type Change = fn(&Rig) -> Result<(), String>;
    let changes: [(&str, Change); 7] = [
        ("create", |r| r.create("new", 3, false).map(drop).map_err(|e| e.to_string())),
        ("delete", |r| r.lvstores.delete_lvol("lvs0/spare").map_err(|e| e.to_string())),
        ("grow", |r| {
            r.lvstores.resize_lvol("lvs0/a", 5 * CLUSTER).map(drop).map_err(|e| e.to_string())
        }),
        ("shrink", |r| {
            r.lvstores.resize_lvol("lvs0/a", 2 * CLUSTER).map(drop).map_err(|e| e.to_string())
        }),
        ("rename", |r| {
            r.lvstores.rename_lvol("lvs0/spare", "other").map(drop).map_err(|e| e.to_string())
        }),
        ("allocate", |r| {
            let mut t = r.open("lvs0/t");
            let written = t.write(3 * PER_CLUSTER, &tagged(8, 1)).and_then(|()| t.flush());
            written.map_err(|e| e.to_string())
        }),
        ("unmap", |r| r.open("lvs0/t").unmap(0, 2 * PER_CLUSTER).map_err(|e| e.to_string())),
    ];
    for (what, change) in changes {
        let mut struck = 0;
        for op in [Op::Write, Op::Flush] {
            for skip in 0..6 {
                let error = if op == Op::Flush { IoError::Flush } else { IoError::WriteMedium };
                let rig = Rig::with_lvs(64);
                for (name, thin) in [("a", false), ("spare", false), ("t", true)] {
                    rig.create(name, 4, thin).unwrap();
                    rig.open(&format!("lvs0/{name}"))
                        .write(0, &tagged(7, 2 * PER_CLUSTER))
                        .unwrap();
                }
                let mut a = rig.open("lvs0/a");
                rig.disk.inject(one(op, error, skip));
                let _ = change(&rig);
                rig.disk.clear_faults();
                if !rig.disk.flush_latch().unwrap().is_set() {
                    // Nothing was struck, or a guest's own write.
                    continue;
                }
                struck += 1;
                clear(&rig);
                let says = format!("{what}, {op:?} {skip}");
                let blocks = rig.bdev("lvs0/a").geometry().num_blocks / PER_CLUSTER;
                let sizes: &[u64] = match what {
                    "grow" => &[4, 5],
                    "shrink" => &[4, 2],
                    _ => &[4],
                };
                assert!(sizes.contains(&blocks), "{says}: {blocks} clusters");
                let whole = read_tags(&mut a, 0, 2 * PER_CLUSTER);
                assert!(whole.iter().all(|tag| *tag == 7), "{says}");
                let t = read_tags(&mut rig.open("lvs0/t"), 0, 4 * PER_CLUSTER);
                assert!(t.iter().all(|tag| [0, 7, 8].contains(tag)), "{says}");
                a.flush().unwrap();
                // All that is free can be had, and is zero; a reload from the medium agrees.
                let free = rig.lvstores.lvstore("lvs0").unwrap().free_clusters;
                rig.create("rest", free, false).unwrap_or_else(|e| panic!("{says}: {e}"));
                let rest = read_tags(&mut rig.open("lvs0/rest"), 0, free * PER_CLUSTER);
                assert!(rest.iter().all(|tag| *tag == 0), "{says}");
                let listed = rig.lvstores.lvols(None).unwrap();
                drop(a);
                let rig = rig.restart();
                rig.lvstores.examine("disk0").unwrap().unwrap();
                assert_eq!(rig.lvstores.lvols(None).unwrap(), listed, "{says}");
            }
        }
        assert!(struck >= 2, "{what} was struck {struck} times");
    }
}

/// A process that knows of the failed flush of the one before.
fn restart_knowing(rig: Rig) -> Rig {
    let failure = rig.disk.flush_latch().unwrap().failure().expect("a failure is latched");
    let rig = rig.restart();
    rig.disk.flush_latch().unwrap().restore(failure);
    rig
}

#[test]
fn an_lvstore_is_loaded_in_spite_of_a_latched_failure_and_nothing_is_written() {
    let rig = Rig::with_lvs(64);
    rig.create("a", 2, false).unwrap();
    rig.create("t", 4, true).unwrap();
    rig.open("lvs0/t").write(0, &tagged(3, 1)).unwrap();
    rig.open("lvs0/t").flush().unwrap();
    rig.disk.inject(one(Op::Flush, IoError::Flush, 0));
    assert!(rig.open("lvs0/a").flush().is_err());
    let rig = restart_knowing(rig);
    let changes = rig.disk.changes();
    rig.lvstores.examine("disk0").unwrap().unwrap();
    assert_eq!(rig.disk.changes(), changes, "nothing is written");
    let stopped = rig.lvstores.lvstore("lvs0").unwrap().stopped.unwrap();
    assert!(stopped.contains("on bdev disk0 a flush failed"), "{stopped}");
    let (mut a, mut t) = (rig.open("lvs0/a"), rig.open("lvs0/t"));
    // What is allocated can be read and overwritten; nothing else changes, nothing is durable.
    a.write(0, &tagged(4, 1)).unwrap();
    assert_eq!(read_tags(&mut a, 0, 1), [4]);
    assert_eq!(read_tags(&mut t, 0, 1), [3]);
    assert_eq!(t.write(PER_CLUSTER, &tagged(5, 1)).unwrap_err().cause, IoError::WriteMedium);
    assert!(matches!(rig.create("b", 1, true), Err(Error::Stopped { .. })));
    assert_eq!(a.flush().unwrap_err().cause, IoError::Flush);
    // An orderly end has nothing to write either, and the next one is as this one.
    rig.lvstores.unload("lvs0").unwrap();
    rig.lvstores.examine("disk0").unwrap().unwrap();
    assert!(rig.create("b", 1, true).is_err());
    assert_eq!(clear(&rig), FlushCause::Flush);
    assert_eq!(rig.lvstores.lvstore("lvs0").unwrap().stopped, None);
    let (mut a, mut t) = (rig.open("lvs0/a"), rig.open("lvs0/t"));
    t.write(PER_CLUSTER, &tagged(5, 1)).unwrap();
    rig.create("b", 1, true).unwrap();
    a.flush().unwrap();
    assert!(!rig.disk.flush_latch().unwrap().is_set());
}

/// What a failed flush did not make durable may still be read, as from the page cache. An lvstore that
/// is loaded then must not stand on it, wherever the power fails meanwhile.
#[test]
fn a_power_cut_while_an_lvstore_is_loaded_after_a_failed_flush_loses_nothing_acknowledged() {
    type Change = fn(&Rig);
    let changes: [(&str, Change); 4] = [
        ("delete", |r| drop(r.lvstores.delete_lvol("lvs0/spare"))),
        ("resize", |r| drop(r.lvstores.resize_lvol("lvs0/spare", 9 * CLUSTER))),
        ("allocate", |r| {
            let mut t = r.open("lvs0/t");
            drop(t.write(PER_CLUSTER, &tagged(8, 1)).and_then(|()| t.flush()));
        }),
        ("close", |r| drop(r.lvstores.unload("lvs0"))),
    ];
    for (what, change) in changes {
        let mut struck = 0;
        for skip in 0..4 {
            for seed in [0, 1, 2, 3, u64::MAX] {
                for alive in 0.. {
                    let rig = Rig::with_lvs(64);
                    for (name, thin) in [("a", false), ("spare", false), ("t", true)] {
                        rig.create(name, 4, thin).unwrap();
                    }
                    rig.open("lvs0/a").write(0, &tagged(7, 1)).unwrap();
                    rig.open("lvs0/t").write(0, &tagged(7, 1)).unwrap();
                    rig.open("lvs0/a").flush().unwrap();
                    rig.open("lvs0/t").flush().unwrap();
                    rig.disk.inject(one(Op::Flush, IoError::Flush, skip));
                    change(&rig);
                    rig.disk.clear_faults();
                    if !rig.disk.flush_latch().unwrap().is_set() {
                        break;
                    }
                    struck += 1;
                    let rig = rig.restart();
                    rig.disk.die_after(alive);
                    let loaded = rig.lvstores.examine("disk0");
                    let died = rig.disk.is_dead();
                    let disk = rig.disk.clone();
                    drop(rig);
                    disk.power_cut(seed);
                    let rig = Rig::on(disk);
                    let says = format!("{what}, flush {skip}, cut {alive}, seed {seed}");
                    let found = rig.lvstores.examine("disk0");
                    found.unwrap_or_else(|e| panic!("{says}: {e}")).expect("an lvstore");
                    for name in ["lvs0/a", "lvs0/t"] {
                        assert_eq!(read_tags(&mut rig.open(name), 0, 1), [7], "{says}: {name}");
                    }
                    let names = rig.lvstores.lvols(None).unwrap().len();
                    assert!(names == 3 || (what, names) == ("delete", 2), "{says}: {names}");
                    if !died {
                        loaded.unwrap().expect("an lvstore");
                        break;
                    }
                }
            }
        }
        assert!(struck > 0, "{what} was never struck");
    }
}
