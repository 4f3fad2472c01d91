//! The power fails at every write and flush that the disk under an lvstore sees, while volumes are
//! created, written, resized, renamed and deleted through the manager. (Every cut of the format
//! itself, torn pages included, is in the blobstore's tests.)
//!
//! A failing cut prints its reproduction: the number of changes before the cut, and the seed.

use crate::common::{CLUSTER, PER_CLUSTER, Rig, options, read_tags, tagged};
use bdev::testing::FaultBdev;
use lvol::Error;
use std::collections::BTreeMap;

/// What must be there: size in clusters, and contents by block (known to be durable).
type Expected = BTreeMap<String, (u64, Vec<u64>)>;

/// Runs the workload until something fails. Returns what is certain, and what was being done: the
/// state that may be found instead.
fn workload(rig: &Rig) -> (Expected, Expected) {
    let mut sure = Expected::new();
    let mut maybe;
    macro_rules! step {
        ($change:expr, $run:expr) => {{
            maybe = sure.clone();
            let change: fn(&mut Expected) = $change;
            change(&mut maybe);
            if $run.is_err() {
                return (sure, maybe);
            }
            sure = maybe.clone();
        }};
    }
    fn zeros(clusters: u64) -> Vec<u64> {
        vec![0; (clusters * PER_CLUSTER) as usize]
    }
    fn blank(e: &mut Expected, name: &str, clusters: u64) {
        e.insert(name.into(), (clusters, zeros(clusters)));
    }
    let l = &rig.lvstores;
    // Data is certain once it was flushed; between write and flush a block is old or new.
    let write =
        |sure: &mut Expected, maybe: &mut Expected, name: &str, lba: u64, n: u64, tag: u64| {
            *maybe = sure.clone();
            let range = lba as usize..(lba + n) as usize;
            maybe.get_mut(name).unwrap().1[range].fill(tag);
            let run = || -> Result<(), String> {
                let mut channel = bdev::SyncChannel::open(&*rig.bdev(&format!("lvs0/{name}")))
                    .map_err(|e| e.to_string())?;
                channel.write(lba, &tagged(tag, n)).map_err(|e| e.to_string())?;
                channel.flush().map_err(|e| e.to_string())
            };
            let done = run().is_ok();
            if done {
                *sure = maybe.clone();
            }
            done
        };
    macro_rules! write {
        ($name:literal, $lba:expr, $n:expr, $tag:expr) => {{
            let mut maybe = Expected::new();
            if !write(&mut sure, &mut maybe, $name, $lba, $n, $tag) {
                return (sure, maybe);
            }
        }};
    }
    step!(|e| blank(e, "thick", 5), rig.create("thick", 5, false));
    write!("thick", 0, 5 * PER_CLUSTER, 1);
    step!(|e| blank(e, "thin", 9), rig.create("thin", 9, true));
    write!("thin", PER_CLUSTER - 2, 2 * PER_CLUSTER, 2);
    step!(
        |e| {
            let t = e.get_mut("thick").unwrap();
            t.0 = 8;
            t.1.resize(8 * PER_CLUSTER as usize, 0);
        },
        l.resize_lvol("lvs0/thick", 8 * CLUSTER)
    );
    write!("thick", 7 * PER_CLUSTER, 9, 3);
    step!(
        |e| {
            let t = e.get_mut("thick").unwrap();
            t.0 = 2;
            t.1.truncate(2 * PER_CLUSTER as usize);
        },
        l.resize_lvol("lvs0/thick", 2 * CLUSTER)
    );
    step!(
        |e| {
            let t = e.remove("thin").unwrap();
            e.insert("slim".into(), t);
        },
        l.rename_lvol("lvs0/thin", "slim")
    );
    // The clusters that `thick` lost are allocated again here.
    step!(|e| blank(e, "next", 25), rig.create("next", 25, false));
    step!(|e| drop(e.remove("thick")), l.delete_lvol("lvs0/thick"));
    write!("slim", 5 * PER_CLUSTER, 3, 4);
    (sure.clone(), sure)
}

fn found(rig: &Rig) -> Expected {
    let lvols = rig.lvstores.lvols(Some("lvs0")).unwrap();
    let all = lvols.into_iter().map(|info| {
        let clusters = info.size / CLUSTER;
        let contents = read_tags(&mut rig.open(&info.alias), 0, clusters * PER_CLUSTER);
        (info.name, (clusters, contents))
    });
    all.collect()
}

/// Whether each volume is as in one of the two states, and the set of volumes is one of theirs.
fn agrees(found: &Expected, sure: &Expected, maybe: &Expected) -> Result<(), String> {
    let shape = |e: &Expected| e.iter().map(|(n, (s, _))| (n.clone(), *s)).collect::<Vec<_>>();
    if shape(found) != shape(sure) && shape(found) != shape(maybe) {
        return Err(format!("{:?}, not {:?} or {:?}", shape(found), shape(sure), shape(maybe)));
    }
    for (name, (_, contents)) in found {
        for (block, tag) in contents.iter().enumerate() {
            let of = |e: &Expected| e.get(name).and_then(|(_, c)| c.get(block).copied());
            if Some(*tag) != of(sure) && Some(*tag) != of(maybe) {
                return Err(format!(
                    "block {block} of {name} has {tag}, not {:?} or {:?}",
                    of(sure),
                    of(maybe)
                ));
            }
        }
    }
    Ok(())
}

#[test]
fn crash_at_every_change_of_a_workload_leaves_each_operation_done_or_not() {
    let fresh = || {
        let rig = Rig::new(60);
        rig.lvstores.create_lvstore("disk0", "lvs0", &options()).unwrap();
        let disk = rig.disk.clone();
        drop(rig);
        disk.image()
    };
    let image = fresh();
    let total = {
        let rig = Rig::on(FaultBdev::with_image("disk0", 512, image.clone()));
        rig.lvstores.examine("disk0").unwrap().unwrap();
        let before = rig.disk.changes();
        workload(&rig);
        rig.disk.changes() - before
    };
    assert!(total > 40, "the workload makes only {total} changes");
    for changes in 0..=total {
        for seed in [0, 1, 2, u64::MAX] {
            let disk = FaultBdev::with_image("disk0", 512, image.clone());
            // One that says where it has zeros, before the power cut and after it, has none written there.
            let tells = seed % 2 == 1;
            if tells {
                disk.tell_zeros();
            }
            let rig = Rig::on(disk.clone());
            rig.lvstores.examine("disk0").unwrap().unwrap();
            disk.die_after(changes);
            let (sure, maybe) = workload(&rig);
            drop(rig);
            disk.power_cut(seed);
            let disk = FaultBdev::with_image("disk0", 512, disk.image());
            if tells {
                disk.tell_zeros();
            }
            let rig = Rig::on(disk);
            let loaded = rig.lvstores.examine("disk0");
            let result = match loaded {
                Ok(Some(_)) => agrees(&found(&rig), &sure, &maybe),
                other => Err(format!("{other:?}")),
            };
            if let Err(why) = result {
                panic!("die_after({changes}), power_cut({seed}): {why}");
            }
            // And it goes on: what is free can be had, and is zero.
            let free = rig.lvstores.lvstore("lvs0").unwrap().free_clusters;
            rig.create("rest", free, tells).unwrap();
            let mut channel = rig.open("lvs0/rest");
            for cluster in 0..if tells { free } else { 0 } {
                channel.write(cluster * PER_CLUSTER + 9, &tagged(0, 1)).unwrap();
            }
            let rest = read_tags(&mut channel, 0, free * PER_CLUSTER);
            assert!(rest.iter().all(|t| *t == 0), "die_after({changes}), power_cut({seed})");
        }
    }
}

#[test]
fn crash_by_a_killed_process_loses_nothing_that_was_written() {
    let rig = Rig::with_lvs(60);
    let (expected, _) = workload(&rig);
    let mut channel = rig.open("lvs0/slim");
    channel.write(0, &tagged(9, 1)).unwrap();
    // Not closed in order, not flushed: only the volatile half has it.
    let disk = FaultBdev::with_image("disk0", 512, rig.disk.image());
    let after = Rig::on(disk);
    after.lvstores.examine("disk0").unwrap().unwrap();
    let mut expected = expected;
    expected.get_mut("slim").unwrap().1[0] = 9;
    assert_eq!(found(&after), expected);
}

#[test]
fn crash_while_an_lvstore_grows_leaves_the_old_size_or_the_new_one() {
    for changes in 0..8 {
        for seed in [0, 5, u64::MAX] {
            let rig = Rig::with_lvs(60);
            rig.create("a", 2, false).unwrap();
            let before = rig.lvstores.lvstore("lvs0").unwrap().total_data_clusters;
            let disk = rig.disk.clone();
            disk.resize(80 * PER_CLUSTER);
            disk.die_after(changes);
            let grown = rig.lvstores.grow_lvstore("lvs0");
            drop(rig);
            disk.power_cut(seed);
            let rig = Rig::on(disk);
            rig.lvstores.examine("disk0").unwrap().unwrap();
            let found = rig.lvstores.lvstore("lvs0").unwrap().total_data_clusters;
            assert!(found == before + 20 || (found == before && grown.is_err()), "{found}");
            let again = rig.lvstores.grow_lvstore("lvs0").unwrap();
            assert_eq!(
                (again.total_data_clusters, again.free_clusters),
                (before + 20, before + 18)
            );
        }
    }
}

#[test]
fn crash_while_an_lvstore_is_deleted_leaves_it_or_none() {
    for changes in 0..8 {
        for seed in [0, 5, u64::MAX] {
            let rig = Rig::with_lvs(60);
            rig.create("a", 2, false).unwrap();
            let disk = rig.restart().disk;
            let rig = Rig::on(disk.clone());
            rig.lvstores.examine("disk0").unwrap().unwrap();
            disk.die_after(changes);
            let deleted: Result<(), Error> = rig.lvstores.destroy_lvstore("lvs0");
            drop(rig);
            disk.power_cut(seed);
            let rig = Rig::on(disk);
            match rig.lvstores.examine("disk0").unwrap() {
                Some(_) => {
                    assert!(deleted.is_err(), "it was acknowledged, but it is there");
                    assert_eq!(rig.lvstores.lvols(None).unwrap().len(), 1);
                }
                None => assert!(rig.lvstores.lvstores().is_empty()),
            }
        }
    }
}
