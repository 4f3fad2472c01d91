//! The manager, as the RPC layer uses it.

use crate::common::{BLOCK, CLUSTER, PER_CLUSTER, Rig, options, read_tags, tagged};
use bdev::testing::{Fault, FaultBdev};
use bdev::{Bdev, Event, IoError, Malloc, MallocOptions, Op, Registry, SyncChannel};
use lvol::{Error, LvolOptions, LvolSizes, LvstoreOptions, Lvstores, NewLvol};
use std::sync::{Arc, Mutex};
use std::time::Duration;
use uuid::Uuid;

#[test]
fn an_lvol_is_a_bdev_by_uuid_and_alias_and_comes_back_after_a_restart() {
    let rig = Rig::with_lvs(64);
    let thick = rig.create("thick", 4, false).unwrap();
    let thin = rig.create("thin", 1000, true).unwrap();
    assert_eq!((thick.alias.as_str(), thick.num_allocated_clusters), ("lvs0/thick", 4));
    assert_eq!((thin.size, thin.num_allocated_clusters), (1000 * CLUSTER, 0));
    let bdev = rig.bdev("lvs0/thick");
    assert_eq!(bdev.name(), thick.uuid.to_string());
    assert_eq!(
        (bdev.product_name(), bdev.geometry().num_blocks),
        ("Logical Volume", 4 * PER_CLUSTER)
    );
    assert_eq!(bdev.driver_specific()["lvol"]["base_bdev"], "disk0");
    let free = rig.lvstores.lvstore("lvs0").unwrap().free_clusters;

    let mut channel = rig.open("lvs0/thick");
    channel.write(3, &tagged(7, 2)).unwrap();
    let mut sparse = rig.open("lvs0/thin");
    sparse.write(999 * PER_CLUSTER, &tagged(8, 1)).unwrap();
    sparse.flush().unwrap();
    assert_eq!(rig.lvstores.lvstore("lvs0").unwrap().free_clusters, free - 1);
    drop((channel, sparse));

    let rig = rig.restart();
    assert!(rig.registry.get("lvs0/thick").is_none());
    let uuid = rig.lvstores.examine("disk0").unwrap().unwrap();
    assert_eq!(rig.lvstores.examine("disk0").unwrap(), Some(uuid), "twice is the same");
    let all = rig.lvstores.lvols(Some("lvs0")).unwrap();
    assert_eq!(all.iter().map(|l| l.uuid).collect::<Vec<_>>(), [thick.uuid, thin.uuid]);
    assert_eq!(all[1].num_allocated_clusters, 1);
    assert_eq!(read_tags(&mut rig.open("lvs0/thick"), 2, 4), [0, 7, 7, 0]);
    assert_eq!(read_tags(&mut rig.open("lvs0/thin"), 999 * PER_CLUSTER, 2), [8, 0]);
}

#[test]
fn listings_have_spdk_s_fields() {
    let rig = Rig::with_lvs(64);
    let lvol = rig.create("a", 1, true).unwrap();
    let lvs = serde_json::to_value(rig.lvstores.lvstores()).unwrap();
    for field in [
        "uuid",
        "name",
        "base_bdev",
        "total_data_clusters",
        "free_clusters",
        "block_size",
        "cluster_size",
    ] {
        assert!(lvs[0].get(field).is_some(), "{field} of {lvs}");
    }
    let value = serde_json::to_value(lvol).unwrap();
    for field in [
        "alias",
        "uuid",
        "name",
        "is_thin_provisioned",
        "is_snapshot",
        "is_clone",
        "is_esnap_clone",
        "is_degraded",
        "num_allocated_clusters",
        "lvs",
    ] {
        assert!(value.get(field).is_some(), "{field} of {value}");
    }
    assert_eq!(value["lvs"]["name"], "lvs0");
}

#[test]
fn what_cannot_be_done_says_why_in_one_sentence_and_changes_nothing() {
    let rig = Rig::with_lvs(64);
    let l = &rig.lvstores;
    rig.create("a", 2, false).unwrap();
    let before = (l.lvstores(), l.lvols(None).unwrap());
    let said = |e: Error, errno: i32| {
        assert_eq!(e.errno(), -errno, "{e}");
        let text = e.to_string();
        assert!(!text.contains('\n') && text.len() < 300, "{text}");
        text
    };
    let create = |name: &str, size, uuid| {
        l.create_lvol(
            "lvs0",
            &LvolOptions {
                dif_type: None,
                name: name.into(),
                size,
                thin: false,
                uuid,
                xattrs: Default::default(),
                key: None,
            },
        )
    };
    assert_eq!(
        said(create("a", CLUSTER, None).unwrap_err(), 17),
        "cannot create lvol lvs0/a: it already exists; choose another name or use the existing one"
    );
    let uuid = l.lvol("lvs0/a").unwrap().uuid;
    assert!(said(create("b", CLUSTER, Some(uuid)).unwrap_err(), 17).contains(&uuid.to_string()));
    let text = said(create("big", 1000 * CLUSTER, None).unwrap_err(), 28);
    assert!(
        text.starts_with("cannot create lvol lvs0/big: 65536000 bytes are needed but only"),
        "{text}"
    );
    said(create("", CLUSTER, None).unwrap_err(), 22);
    said(create("a b", CLUSTER, None).unwrap_err(), 22);
    said(create("zero", 0, None).unwrap_err(), 22);
    let text = said(create(&"x".repeat(64), CLUSTER, None).unwrap_err(), 22);
    assert!(text.contains("64 characters, but at most 63"), "{text}");
    said(
        l.create_lvol(
            "nope",
            &LvolOptions {
                dif_type: None,
                name: "a".into(),
                size: 1,
                thin: true,
                uuid: None,
                xattrs: Default::default(),
                key: None,
            },
        )
        .unwrap_err(),
        19,
    );
    said(l.lvol("lvs0/nope").unwrap_err(), 19);
    said(l.lvol("nonsense").unwrap_err(), 19);
    said(l.resize_lvol("lvs0/a", 1000 * CLUSTER).unwrap_err(), 28);
    said(l.delete_lvol(&Uuid::nil().to_string()).unwrap_err(), 19);
    said(l.create_lvstore("nope", "x", &options()).unwrap_err(), 19);
    assert_eq!(
        said(l.create_lvstore("disk0", "x", &options()).unwrap_err(), 16),
        "cannot create lvstore x on bdev disk0: it is in use by lvstore lvs0; detach it there first"
    );
    said(l.create_lvstore("disk0", "lvs0", &options()).unwrap_err(), 17);
    let tiny = FaultBdev::new("tiny", 512, 100);
    rig.registry.register(tiny).unwrap();
    let text = said(l.create_lvstore("tiny", "t", &options()).unwrap_err(), 22);
    assert!(text.contains("at least"), "{text}");
    let odd = LvstoreOptions { cluster_size: Some(3 << 20), ..options() };
    said(l.create_lvstore("tiny", "t", &odd).unwrap_err(), 22);
    assert_eq!(l.examine("tiny").unwrap(), None);
    rig.registry.claim("tiny", "x").map(drop).unwrap();

    let claim = rig.registry.claim("lvs0/a", "controller vm-1").unwrap();
    let text = said(l.delete_lvol("lvs0/a").unwrap_err(), 16);
    assert!(text.contains("in use by controller vm-1"), "{text}");
    said(l.set_read_only("lvs0/a").unwrap_err(), 16);
    said(l.destroy_lvstore("lvs0").unwrap_err(), 16);
    drop(claim);
    assert_eq!((l.lvstores(), l.lvols(None).unwrap()), before);
}

#[test]
fn renames_follow_into_aliases_and_the_medium() {
    let rig = Rig::with_lvs(64);
    let l = &rig.lvstores;
    rig.create("a", 1, true).unwrap();
    rig.create("b", 1, true).unwrap();
    assert_eq!(l.rename_lvol("lvs0/a", "b").unwrap_err().errno(), -17);
    assert_eq!(l.rename_lvol("lvs0/a", "c").unwrap().alias, "lvs0/c");
    assert_eq!(l.rename_lvol("lvs0/c", "c").unwrap().alias, "lvs0/c", "twice is the same");
    l.rename_lvstore("lvs0", "fast").unwrap();
    assert!(rig.registry.get("fast/c").is_some() && rig.registry.get("lvs0/c").is_none());
    let rig = rig.restart();
    rig.lvstores.examine("disk0").unwrap().unwrap();
    let names: Vec<_> = rig.lvstores.lvols(None).unwrap().into_iter().map(|l| l.alias).collect();
    assert_eq!(names, ["fast/b", "fast/c"]);
}

#[test]
fn xattrs_are_kept_with_the_lvol() {
    let rig = Rig::with_lvs(64);
    rig.create("a", 1, true).unwrap();
    let l = &rig.lvstores;
    l.set_xattr("lvs0/a", "owner", b"vm-1").unwrap();
    l.set_xattr("lvs0/a", "big", &[9; 3072]).unwrap();
    assert_eq!(l.set_xattr("lvs0/a", "huge", &[9; 3073]).unwrap_err().errno(), -22);
    assert_eq!(l.xattrs("lvs0/a").unwrap(), ["big", "owner"]);
    l.remove_xattr("lvs0/a", "big").unwrap();
    let rig = rig.restart();
    rig.lvstores.examine("disk0").unwrap();
    assert_eq!(rig.lvstores.xattr("lvs0/a", "owner").unwrap(), b"vm-1");
    let e = rig.lvstores.xattr("lvs0/a", "big").unwrap_err();
    assert_eq!((e.errno(), e.to_string().contains("has no xattr big")), (-61, true));
}

/// What is not set is known without the thread of the lvstore.
#[test]
fn which_xattrs_an_lvol_lacks_is_known_at_once() {
    let rig = Rig::with_lvs(64);
    rig.create("a", 1, true).unwrap();
    let may = |rig: &Rig, lvol: &str| {
        ["owner", "big", "mark"].map(|name| rig.lvstores.may_have_xattr(lvol, name).unwrap())
    };
    assert_eq!(may(&rig, "lvs0/a"), [false; 3]);
    let l = &rig.lvstores;
    l.set_xattr("lvs0/a", "owner", b"vm-1").unwrap();
    l.set_xattr_soon("lvs0/a", "big", b"", Duration::from_secs(60)).unwrap();
    assert_eq!(may(&rig, "lvs0/a"), [true, true, false]);
    assert!(l.remove_xattr("lvs0/a", "mark").is_err());
    l.remove_xattr("lvs0/a", "big").unwrap();
    assert_eq!(may(&rig, "lvs0/a"), [true, false, false]);
    let new = |name: &str, xattr: &str| NewLvol {
        name: name.into(),
        uuid: None,
        xattrs: [(xattr.to_owned(), b"x".to_vec())].into(),
    };
    l.snapshot("lvs0/a", &new("s", "mark")).unwrap();
    assert_eq!(may(&rig, "lvs0/s"), [false, false, true]);
    assert_eq!(may(&rig, "lvs0/a"), [true, false, false], "which stay its own");
    l.clone_lvol("lvs0/s", &new("c", "big")).unwrap();
    assert_eq!(may(&rig, "lvs0/c"), [false, true, false]);
    // One that may have failed may be there.
    rig.disk.inject(Fault { count: 1, ..Fault::always(Op::Write, IoError::WriteMedium) });
    assert!(l.set_xattr("lvs0/a", "mark", b"").is_err());
    assert_eq!(may(&rig, "lvs0/a"), [true, false, true]);
    // And one that was refused is not.
    assert!(l.set_xattr("lvs0/a", "big", b"").is_err());
    assert!(l.set_xattr_soon("lvs0/a", "big", b"", Duration::from_secs(60)).is_err());
    assert_eq!(may(&rig, "lvs0/a"), [true, false, true]);
    l.remove_xattr_if("lvs0/a", "big", |_| true).unwrap();
    for is in [true, false] {
        assert!(
            l.remove_xattr_if("lvs0/a", "mark", move |_| is).is_err(),
            "nobody knows what lasts"
        );
    }
    let latch = rig.disk.flush_latch().unwrap();
    latch.clear();
    l.reload_on(latch).unwrap();
    let there = l.xattrs("lvs0/a").unwrap();
    assert_eq!(may(&rig, "lvs0/a"), ["owner", "big", "mark"].map(|n| there.contains(&n.into())));
    let rig = rig.restart();
    rig.lvstores.examine("disk0").unwrap();
    assert_eq!(may(&rig, "lvs0/c"), [false, true, false]);
    assert_eq!(may(&rig, "lvs0/s"), [false, false, true]);
    let none = rig.lvstores.may_have_xattr("lvs0/none", "owner").unwrap_err();
    assert!(matches!(none, Error::NoLvol { .. }), "{none}");
}

#[test]
fn an_xattr_is_removed_only_where_it_has_the_value_that_is_meant() {
    let rig = Rig::with_lvs(64);
    rig.create("a", 1, true).unwrap();
    let l = &rig.lvstores;
    l.set_xattr("lvs0/a", "owner", b"vm-1").unwrap();
    l.remove_xattr_if("lvs0/a", "owner", |value| value == b"vm-2").unwrap();
    assert_eq!(l.xattr("lvs0/a", "owner").unwrap(), b"vm-1");
    assert!(l.may_have_xattr("lvs0/a", "owner").unwrap());
    l.remove_xattr_if("lvs0/a", "owner", |value| value == b"vm-1").unwrap();
    assert!(!l.may_have_xattr("lvs0/a", "owner").unwrap());
    assert!(l.xattrs("lvs0/a").unwrap().is_empty());
    l.remove_xattr_if("lvs0/a", "owner", |_| true).unwrap();
    let none = l.remove_xattr_if("lvs0/none", "owner", |_| true).unwrap_err();
    assert!(matches!(none, Error::NoLvol { .. }), "{none}");
}

#[test]
fn an_lvol_is_made_with_its_xattrs_or_not_at_all() {
    let rig = Rig::with_lvs(64);
    let with = |name: &str, value: usize| {
        let xattrs = [("owner".to_owned(), vec![b'x'; value])].into();
        let options = LvolOptions {
            dif_type: None,
            name: name.into(),
            size: 1,
            thin: false,
            uuid: None,
            xattrs,
            key: None,
        };
        rig.lvstores.create_lvol("lvs0", &options)
    };
    let free = rig.lvstores.lvstore("lvs0").unwrap().free_clusters;
    let e = with("a", 3073).unwrap_err();
    assert_eq!((e.errno(), e.to_string().contains("at most 3072")), (-22, true), "{e}");
    assert_eq!(rig.lvstores.lvols(None).unwrap().len(), 0);
    assert_eq!(rig.lvstores.lvstore("lvs0").unwrap().free_clusters, free);
    with("a", 3072).unwrap();
    let rig = rig.restart();
    rig.lvstores.examine("disk0").unwrap();
    assert_eq!(rig.lvstores.xattr("lvs0/a", "owner").unwrap(), vec![b'x'; 3072]);
}

#[test]
fn a_read_only_lvol_refuses_writes_and_changes_for_good() {
    let rig = Rig::with_lvs(64);
    rig.create("a", 2, false).unwrap();
    rig.open("lvs0/a").write(0, &tagged(5, 1)).unwrap();
    assert!(rig.lvstores.set_read_only("lvs0/a").unwrap().is_read_only);
    let rig = rig.restart();
    rig.lvstores.examine("disk0").unwrap();
    assert!(rig.bdev("lvs0/a").features().read_only);
    let mut channel = rig.open("lvs0/a");
    assert_eq!(channel.write(0, &tagged(6, 1)).unwrap_err().cause, IoError::ReadOnly);
    assert_eq!(read_tags(&mut channel, 0, 1), [5]);
    assert_eq!(rig.lvstores.resize_lvol("lvs0/a", CLUSTER).unwrap_err().errno(), -1);
}

#[test]
fn sizes_are_those_of_the_lvols_that_are_there_by_the_name_that_was_given() {
    let rig = Rig::with_lvs(64);
    let uuid = rig.create("a", 2, false).unwrap().uuid.to_string();
    rig.create("t", 3, true).unwrap();
    rig.open("lvs0/t").write(0, &tagged(1, 1)).unwrap();
    let asked = ["lvs0/t", "lvs0/none", "nonsense", &uuid].map(str::to_owned);
    let mut found = rig.lvstores.sizes(&asked);
    found.sort_unstable_by_key(|(name, _)| *name != "lvs0/t");
    let sizes = |size, allocated| LvolSizes { size, allocated };
    let expected =
        [("lvs0/t", sizes(3 * CLUSTER, CLUSTER)), (&*uuid, sizes(2 * CLUSTER, 2 * CLUSTER))];
    assert_eq!(found, expected);
}

#[test]
fn resize_while_in_use_shows_at_once_and_is_told() {
    let rig = Rig::with_lvs(64);
    rig.create("a", 2, false).unwrap();
    rig.create("t", 2, true).unwrap();
    let told = Arc::new(Mutex::new(Vec::new()));
    let _sub = {
        let told = told.clone();
        rig.registry.subscribe(move |e| {
            if let Event::Resized(b) = e {
                told.lock().unwrap().push(b.geometry().num_blocks);
            }
        })
    };
    for name in ["lvs0/a", "lvs0/t"] {
        let mut channel = rig.open(name);
        channel.write(0, &tagged(1, 2 * PER_CLUSTER)).unwrap();
        let after = rig.lvstores.resize_lvol(name, 5 * CLUSTER - 1).unwrap();
        assert_eq!(after.size, 5 * CLUSTER, "rounded up");
        channel.write(4 * PER_CLUSTER, &tagged(2, PER_CLUSTER)).unwrap();
        assert_eq!(read_tags(&mut channel, 2 * PER_CLUSTER - 1, 3), [1, 0, 0]);
        rig.lvstores.resize_lvol(name, CLUSTER).unwrap();
        let beyond = channel.write(PER_CLUSTER, &tagged(3, 1)).unwrap_err();
        assert_eq!(beyond.cause, IoError::OutOfRange);
        rig.lvstores.resize_lvol(name, 5 * CLUSTER).unwrap();
        let mut expected = vec![1; PER_CLUSTER as usize];
        expected.resize(5 * PER_CLUSTER as usize, 0);
        assert_eq!(read_tags(&mut channel, 0, 5 * PER_CLUSTER), expected, "regrown is zero");
        rig.lvstores.resize_lvol(name, 5 * CLUSTER).unwrap();
    }
    let n = PER_CLUSTER;
    assert_eq!(*told.lock().unwrap(), [5 * n, n, 5 * n, 5 * n, n, 5 * n]);
}

#[test]
fn a_deleted_lvol_gives_its_clusters_back_and_its_channels_end() {
    let rig = Rig::with_lvs(64);
    let free = rig.lvstores.lvstore("lvs0").unwrap().free_clusters;
    rig.create("a", free, false).unwrap();
    let mut channel = rig.open("lvs0/a");
    channel.write(0, &tagged(9, free * PER_CLUSTER)).unwrap();
    assert_eq!(rig.create("b", 1, false).unwrap_err().errno(), -28);
    rig.lvstores.delete_lvol("lvs0/a").unwrap();
    let mut buf = tagged(0, 1);
    assert_eq!(channel.read(0, &mut buf).unwrap_err().cause, IoError::Removed);
    rig.create("b", free, false).unwrap();
    let all = read_tags(&mut rig.open("lvs0/b"), 0, free * PER_CLUSTER);
    assert!(all.iter().all(|t| *t == 0), "the new volume shows the old one's data");
    rig.lvstores.delete_lvol("lvs0/b").unwrap();
    assert_eq!(rig.lvstores.lvstore("lvs0").unwrap().free_clusters, free);
}

#[test]
fn thin_volumes_allocate_on_write_and_give_whole_clusters_back_on_unmap() {
    let rig = Rig::with_lvs(64);
    rig.create("t", 100, true).unwrap();
    let allocated = || rig.lvstores.lvol("lvs0/t").unwrap().num_allocated_clusters;
    let mut channel = rig.open("lvs0/t");
    assert_eq!(read_tags(&mut channel, 0, 100 * PER_CLUSTER), vec![0; 100 * PER_CLUSTER as usize]);
    assert_eq!(allocated(), 0);
    channel.write(PER_CLUSTER - 1, &tagged(1, 2)).unwrap();
    channel.write(10 * PER_CLUSTER + 5, &tagged(2, 3 * PER_CLUSTER)).unwrap();
    assert_eq!(allocated(), 6);
    // Cluster 11 and 12 are whole in it, 10 and 13 are not.
    channel.unmap(10 * PER_CLUSTER + 6, 3 * PER_CLUSTER - 2).unwrap();
    assert_eq!(allocated(), 4);
    let mut expected = vec![0; 3 * PER_CLUSTER as usize + 2];
    expected[1] = 2;
    *expected.last_mut().unwrap() = 0;
    expected[3 * PER_CLUSTER as usize] = 2;
    assert_eq!(read_tags(&mut channel, 10 * PER_CLUSTER + 4, 3 * PER_CLUSTER + 2), expected);
    channel.write_zeroes(0, 100 * PER_CLUSTER).unwrap();
    assert_eq!(allocated(), 0);
    assert_eq!(read_tags(&mut channel, 0, 20 * PER_CLUSTER), vec![0; 20 * PER_CLUSTER as usize]);
}

#[test]
fn a_full_store_refuses_thin_writes_with_no_space_and_goes_on() {
    let rig = Rig::with_lvs(40);
    let free = rig.lvstores.lvstore("lvs0").unwrap().free_clusters;
    rig.create("t", 100, true).unwrap();
    let mut channel = rig.open("lvs0/t");
    channel.write(0, &tagged(1, free * PER_CLUSTER)).unwrap();
    let full = channel.write(free * PER_CLUSTER, &tagged(2, 1)).unwrap_err();
    assert_eq!(full.cause, IoError::NoSpace);
    channel.write(0, &tagged(3, 1)).unwrap();
    channel.unmap(PER_CLUSTER, PER_CLUSTER).unwrap();
    channel.write(free * PER_CLUSTER, &tagged(2, 1)).unwrap();
    assert_eq!(read_tags(&mut channel, free * PER_CLUSTER, 2), [2, 0]);
    assert_eq!(read_tags(&mut channel, PER_CLUSTER, 1), [0]);
}

#[test]
fn after_a_failed_metadata_write_the_store_takes_no_changes_but_serves_its_data() {
    let rig = Rig::with_lvs(64);
    rig.create("a", 2, false).unwrap();
    rig.create("t", 2, true).unwrap();
    let mut channel = rig.open("lvs0/a");
    channel.write(0, &tagged(4, 1)).unwrap();
    rig.disk.inject(Fault::always(Op::Flush, IoError::Flush));
    let e = rig.lvstores.rename_lvol("lvs0/a", "b").unwrap_err();
    assert!(matches!(&e, Error::Io { .. }), "{e}");
    rig.disk.clear_faults();
    let e = rig.lvstores.rename_lvol("lvs0/a", "b").unwrap_err();
    assert!(matches!(&e, Error::Stopped { .. }), "{e}");
    assert!(e.to_string().contains("takes no") || e.to_string().contains("stopped taking"), "{e}");
    assert!(rig.lvstores.lvstore("lvs0").unwrap().stopped.is_some());
    assert_eq!(read_tags(&mut channel, 0, 1), [4]);
    channel.write(1, &tagged(5, 1)).unwrap();
    let mut thin = rig.open("lvs0/t");
    assert_eq!(thin.write(0, &tagged(6, 1)).unwrap_err().cause, IoError::WriteMedium);
    assert_eq!(rig.lvstores.delete_lvol("lvs0/a").unwrap_err().errno(), -5);
    assert!(rig.registry.get("lvs0/a").is_some(), "it is still there");
    drop((channel, thin));
    let rig = rig.restart();
    rig.lvstores.examine("disk0").unwrap().unwrap();
    assert_eq!(rig.lvstores.lvols(None).unwrap().len(), 2);
}

#[test]
fn a_data_write_error_while_zeroing_fails_the_operation_alone() {
    let rig = Rig::with_lvs(64);
    rig.disk.inject(Fault { count: 1, ..Fault::always(Op::WriteZeroes, IoError::WriteMedium) });
    assert!(matches!(rig.create("a", 2, false), Err(Error::Io { .. })));
    rig.create("a", 2, false).unwrap();
    let free = rig.lvstores.lvstore("lvs0").unwrap();
    assert_eq!(free.total_data_clusters - free.free_clusters, 2);
}

#[test]
fn an_lvstore_in_use_grows_with_its_bdev_while_its_lvols_do_io() {
    let rig = Rig::with_lvs(64);
    rig.create("thick", 5, false).unwrap();
    rig.create("thin", 100, true).unwrap();
    let l = &rig.lvstores;
    assert_eq!(l.grow_lvstore("lvs0").unwrap(), l.lvstore("lvs0").unwrap());
    assert_eq!(l.lvstore("lvs0").unwrap().free_clusters, 36);
    let stop = std::sync::atomic::AtomicBool::new(false);
    std::thread::scope(|scope| {
        let writer = scope.spawn(|| {
            let mut channel = rig.open("lvs0/thick");
            let mut rounds = 0;
            while !stop.load(std::sync::atomic::Ordering::Relaxed) {
                rounds += 1;
                channel.write(rounds % 600, &tagged(rounds, 3)).unwrap();
                assert_eq!(read_tags(&mut channel, rounds % 600, 3), [rounds; 3]);
            }
            rounds
        });
        // A channel that was open before reaches the new clusters too.
        let mut thin = rig.open("lvs0/thin");
        thin.write(0, &tagged(1, 36 * PER_CLUSTER)).unwrap();
        let full = thin.write(36 * PER_CLUSTER, &tagged(2, 1)).unwrap_err();
        assert_eq!(full.cause, IoError::NoSpace);
        rig.disk.resize(84 * PER_CLUSTER);
        assert_eq!(l.lvstore("lvs0").unwrap().total_data_clusters, 41, "not unless it is told");
        let uuid = l.lvstore("lvs0").unwrap().uuid.to_string();
        let grown = l.grow_lvstore(&uuid).unwrap();
        assert_eq!((grown.total_data_clusters, grown.free_clusters), (61, 20));
        thin.write(36 * PER_CLUSTER, &tagged(2, 20 * PER_CLUSTER)).unwrap();
        assert_eq!(read_tags(&mut thin, 56 * PER_CLUSTER - 1, 2), [2, 0]);
        assert_eq!(l.lvstore("lvs0").unwrap().free_clusters, 0);
        stop.store(true, std::sync::atomic::Ordering::Relaxed);
        assert!(writer.join().unwrap() > 0);
        thin.flush().unwrap();
    });
    let before = l.lvstores();
    rig.disk.resize(70 * PER_CLUSTER);
    let e = l.grow_lvstore("lvs0").unwrap_err();
    assert_eq!(e.errno(), -84);
    assert_eq!(
        e.to_string(),
        "cannot grow lvstore lvs0: the store cannot become smaller: the device has 4587520 bytes \
         but the store needs 5505024; give the whole device back"
    );
    assert_eq!(l.grow_lvstore("none").unwrap_err().errno(), -19);
    assert_eq!(l.lvstores(), before);
}

#[test]
fn an_lvstore_on_a_bdev_that_has_grown_is_loaded_and_can_be_grown() {
    let rig = Rig::with_lvs(64);
    rig.create("a", 41, false).unwrap();
    rig.open("lvs0/a").write(40 * PER_CLUSTER, &tagged(7, 1)).unwrap();
    let rig = rig.restart();
    rig.disk.resize(80 * PER_CLUSTER);
    rig.lvstores.examine("disk0").unwrap().unwrap();
    assert_eq!(rig.lvstores.lvstore("lvs0").unwrap().total_data_clusters, 41);
    assert_eq!(rig.lvstores.grow_lvstore("lvs0").unwrap().free_clusters, 16);
    let rig = rig.restart();
    rig.lvstores.examine("disk0").unwrap().unwrap();
    let info = rig.lvstores.lvstore("lvs0").unwrap();
    assert_eq!((info.total_data_clusters, info.free_clusters), (57, 16));
    assert_eq!(read_tags(&mut rig.open("lvs0/a"), 40 * PER_CLUSTER, 2), [7, 0]);
    rig.create("b", 16, false).unwrap();
}

#[test]
fn a_failure_while_an_lvstore_grows_stops_its_changes_and_shows_the_old_size() {
    let rig = Rig::with_lvs(64);
    rig.disk.resize(80 * PER_CLUSTER);
    rig.disk.inject(Fault { count: 1, ..Fault::always(Op::Write, IoError::WriteMedium) });
    assert_eq!(rig.lvstores.grow_lvstore("lvs0").unwrap_err().errno(), -5);
    let info = rig.lvstores.lvstore("lvs0").unwrap();
    assert_eq!((info.total_data_clusters, info.free_clusters), (41, 41));
    assert!(info.stopped.is_some());
    assert!(matches!(rig.lvstores.grow_lvstore("lvs0"), Err(Error::Stopped { .. })));
}

#[test]
fn a_truncated_foreign_or_damaged_device_is_one_sentence_and_stays_as_it_is() {
    let rig = Rig::with_lvs(64);
    rig.create("a", 2, false).unwrap();
    let disk = rig.restart().disk;
    let image = disk.image();
    let examine = |image: Vec<u8>| {
        let disk = FaultBdev::with_image("disk0", 512, image.clone());
        let rig = Rig::on(disk.clone());
        let found = rig.lvstores.examine("disk0");
        assert!(disk.image() == image, "the device was changed");
        found
    };
    let e = examine(image[..image.len() / 2].to_vec()).unwrap_err();
    assert!(e.to_string().contains("truncated"), "{e}");
    assert_eq!(examine(vec![0; 4 << 20]).unwrap(), None);
    assert_eq!(examine(vec![0x55; 4 << 20]).unwrap(), None);
    // The journal is replayed over pages of the region; both are damaged here.
    let mut bad = image.clone();
    bad[32 * 4096..(32 + 64 + 3) * 4096].fill(0x77);
    let e = examine(bad).unwrap_err();
    assert!(e.to_string().contains("metadata page 0 at byte 393216 is damaged"), "{e}");
    // One superblock copy is enough.
    for copy in [0, 16 * 4096] {
        let mut one = image.clone();
        one[copy + 100] ^= 1;
        let rig = Rig::on(FaultBdev::with_image("disk0", 512, one));
        rig.lvstores.examine("disk0").unwrap().unwrap();
        assert_eq!(rig.lvstores.lvols(None).unwrap().len(), 1);
    }
}

#[test]
fn an_lvstore_is_not_created_over_another_one() {
    let rig = Rig::with_lvs(64);
    let rig = rig.restart();
    let e = rig.lvstores.create_lvstore("disk0", "new", &options()).unwrap_err();
    assert!(matches!(&e, Error::HoldsLvstore { name, .. } if name == "lvs0"), "{e}");
    rig.lvstores.examine("disk0").unwrap().unwrap();
    rig.lvstores.destroy_lvstore("lvs0").unwrap();
    assert_eq!(rig.lvstores.examine("disk0").unwrap(), None);
    rig.lvstores.create_lvstore("disk0", "new", &options()).unwrap();
    assert_eq!(rig.lvstores.lvstores()[0].name, "new");
}

#[test]
fn several_lvstores_live_side_by_side_and_one_leaves_with_its_bdev() {
    let rig = Rig::with_lvs(64);
    let options_4k = MallocOptions {
        name: "ram".into(),
        block_size: 4096,
        physical_block_size: 0,
        num_blocks: 16 << 10,
        uuid: None,
    };
    rig.registry.register(Malloc::create(options_4k).unwrap()).unwrap();
    let options = LvstoreOptions::default();
    rig.lvstores.create_lvstore("ram", "lvs1", &options).unwrap();
    rig.create("a", 1, true).unwrap();
    let other = LvolOptions {
        dif_type: None,
        name: "a".into(),
        size: 3 << 20,
        thin: true,
        uuid: None,
        xattrs: Default::default(),
        key: None,
    };
    rig.lvstores.create_lvol("lvs1", &other).unwrap();
    let bdev = rig.bdev("lvs1/a");
    assert_eq!((bdev.geometry().block_size, bdev.geometry().num_blocks), (4096, 768));
    let mut channel = SyncChannel::open(&*bdev).unwrap();
    channel.write(255, &tagged(3, 16)).unwrap();
    assert_eq!(read_tags(&mut channel, 254, 32), [[0; 8], [3; 8], [3; 8], [0; 8]].concat());
    drop((channel, bdev));
    rig.registry.unregister("ram").unwrap();
    assert!(rig.registry.get("lvs1/a").is_none());
    assert_eq!(rig.lvstores.lvstores().len(), 1);
    assert_eq!(BLOCK, 512);
}

#[test]
fn a_subscriber_may_examine_every_new_bdev() {
    let rig = Rig::with_lvs(64);
    rig.create("a", 40, false).unwrap();
    let Rig { registry, disk, lvstores, .. } = rig;
    drop((registry, lvstores));
    let registry = bdev::Registry::new();
    let lvstores = Arc::new(lvol::Lvstores::new(registry.clone()));
    let _sub = {
        let weak = Arc::downgrade(&lvstores);
        registry.subscribe(move |e| {
            if let (Event::Registered(b), Some(l)) = (e, weak.upgrade()) {
                l.examine(b.name()).unwrap();
            }
        })
    };
    registry.register(disk).unwrap();
    assert!(registry.get("lvs0/a").is_some());
}

#[test]
fn operations_do_not_wait_for_ever_behind_one_whose_bdev_does_not_answer() {
    let disk = FaultBdev::new("disk0", BLOCK as u32, 400 * PER_CLUSTER);
    disk.defer(Some(1));
    let registry = Registry::new();
    registry.register(disk.clone()).unwrap();
    let lvstores = Lvstores::with_timeout(registry.clone(), Duration::from_millis(500));
    lvstores.create_lvstore("disk0", "lvs0", &options()).unwrap();
    let rig = Rig { registry, disk, lvstores, kind: None, own: None };
    for name in ["a", "b", "c"] {
        rig.create(name, 1, true).unwrap();
    }
    let all = rig.lvstores.lvols(None).unwrap();
    rig.disk.hold();
    std::thread::scope(|scope| {
        let stuck = scope.spawn(|| rig.lvstores.delete_lvol("lvs0/a"));
        while rig.disk.held() == 0 {
            std::thread::yield_now();
        }
        let lvs = &rig.lvstores;
        let refused = [
            lvs.delete_lvol("lvs0/b"),
            lvs.rename_lvol("lvs0/b", "d").map(drop),
            lvs.resize_lvol("lvs0/b", 5 * CLUSTER).map(drop),
            lvs.set_read_only("lvs0/b").map(drop),
            lvs.set_xattr("lvs0/b", "owner", b"me"),
            lvs.xattrs("lvs0/b").map(drop),
            lvs.grow_lvstore("lvs0").map(drop),
            lvs.rename_lvstore("lvs0", "lvs1"),
            lvs.unload("lvs0"),
            rig.create("d", 1, true).map(drop),
        ];
        // Which it lacks is known without the thread.
        assert!(!lvs.may_have_xattr("lvs0/b", "owner").unwrap());
        for (nth, refused) in refused.into_iter().enumerate() {
            let e = refused.unwrap_err();
            assert!(matches!(e, Error::Waiting { .. }), "{nth}: {e}");
            assert_eq!(e.errno(), -16);
        }
        assert!(!stuck.is_finished());
        rig.disk.release();
        stuck.join().unwrap().unwrap();
    });
    // Nothing of what was refused was done, then or later.
    assert_eq!(rig.lvstores.lvols(None).unwrap(), all[1..]);
    assert!(rig.lvstores.xattrs("lvs0/b").unwrap().is_empty());
    assert!(rig.registry.get("lvs0/b").is_some());
    rig.lvstores.delete_lvol("lvs0/b").unwrap();
    rig.lvstores.unload("lvs0").unwrap();
}
