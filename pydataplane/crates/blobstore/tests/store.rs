//! The store as a library: operations, limits, and what a damaged medium gives.

use crate::testing::{Wrap, Wrapped, failed};
use blobstore::{
    BlobId, BlobOptions, Dif, DifType, Disk, DiskError, Error, HistoryOptions, MemDisk, PAGE_SIZE,
    Store, StoreOptions,
};
use proptest::prelude::*;
use std::collections::HashMap;
use uuid::Uuid;

const CLUSTER: u64 = 64 << 10;

fn options() -> StoreOptions {
    StoreOptions { name: "lvs".into(), uuid: Uuid::from_u128(1), cluster_size: CLUSTER as u32 }
}

fn store(bytes: usize) -> Store<MemDisk> {
    Store::create_store(MemDisk::new(bytes), &options()).unwrap()
}

fn blob(name: &str, size: u64, thin: bool) -> BlobOptions {
    BlobOptions {
        dif: None,
        name: name.into(),
        uuid: Uuid::new_v4(),
        size,
        thin,
        xattrs: Default::default(),
    }
}

/// What the device would hold if the process ended now.
fn named(name: &str) -> HistoryOptions {
    HistoryOptions { name: name.into(), uuid: Uuid::new_v4(), xattrs: Default::default() }
}

fn is_live(store: &Store<MemDisk>, id: BlobId) -> bool {
    !store.blob(id).unwrap().read_only
}

/// Takes the parent from a blob, as far as there is room for what it lacks then.
fn detach(store: &mut Store<MemDisk>, id: BlobId, all: bool) {
    while let Ok(lacking) = store.lacking(id, all, 0, 5) {
        if lacking.is_empty() {
            return store.detach(id, all).unwrap();
        }
        if store.supply(id, &lacking).is_err() {
            return;
        }
    }
}

fn image<D: Disk>(store: &mut Store<D>) -> MemDisk {
    let mut bytes = vec![0; store.disk_mut().size() as usize];
    store.disk_mut().read(0, &mut bytes).unwrap();
    MemDisk::from_bytes(bytes)
}

#[test]
fn a_large_thin_blob_uses_index_pages_and_comes_back() {
    let mut s = store(16 << 20);
    // The largest possible: 256 direct and 192 * 1008 indirect extents pages.
    let most = (256 + 192 * 1008) * 1008;
    assert!(matches!(s.create(&blob("too", most + 1, true)), Err(Error::TooLarge { .. })));
    let id = s.create(&blob("large", most, true)).unwrap();
    let places = [0, 1007, 1008, 255 * 1008, 256 * 1008, 1264 * 1008 - 1, 1264 * 1008, most - 1];
    for (i, cluster) in places.into_iter().enumerate() {
        s.write(id, cluster * CLUSTER + 9, &[i as u8 + 1; 30]).unwrap();
    }
    let pages = s.info().free_pages;
    let mut s = Store::load(image(&mut s)).unwrap();
    assert_eq!(s.info().free_pages, pages);
    assert_eq!(s.blob(id).unwrap().allocated, places.len() as u64);
    for (i, cluster) in places.into_iter().enumerate() {
        let mut bytes = [0; 32];
        s.read(id, cluster * CLUSTER + 8, &mut bytes).unwrap();
        assert_eq!((bytes[0], bytes[1], bytes[30], bytes[31]), (0, i as u8 + 1, i as u8 + 1, 0));
    }
    // Cutting it frees extents and index pages, and all of it can be had again.
    let freed = s.resize(id, 256 * 1008).unwrap();
    s.release(freed);
    assert_eq!(s.blob(id).unwrap().allocated, 4);
    let freed = s.unmap(id, 0, 256 * 1008).unwrap();
    s.release(freed);
    let info = s.info();
    assert_eq!(info.free_clusters, info.data_clusters);
    assert!(s.delete(id).unwrap().freed.is_empty());
    let s = Store::load(image(&mut s)).unwrap();
    assert_eq!(s.blobs().count(), 0);
    assert_eq!(s.info().free_pages, pages + 1 + 7 + 3, "root, extents and index pages");
}

/// A device says that it has another size than the memory behind it.
struct Sized(u64);

impl Wrap for Sized {
    fn size(&self, _: u64) -> u64 {
        self.0
    }
}

fn sized(disk: MemDisk, size: u64) -> Wrapped<Sized> {
    Wrapped { disk, with: Sized(size) }
}

#[test]
fn a_store_grows_to_its_device_up_to_what_its_metadata_is_good_for_and_never_shrinks() {
    let mut s = Store::create_store(sized(MemDisk::new(4 << 20), 4 << 20), &options()).unwrap();
    s.create(&blob("a", 5, false)).unwrap();
    let before = s.info();
    assert_eq!((before.data_clusters, before.free_clusters), (41, 36));
    let medium = s.disk_mut().disk.bytes().to_vec();
    assert_eq!(s.grow(), Ok(false), "the device is as it was");
    s.disk_mut().with.0 += CLUSTER - 4096;
    assert_eq!(s.grow(), Ok(false), "it gained no whole cluster");
    s.disk_mut().with.0 = (4 << 20) - 4096;
    let e = s.grow().unwrap_err();
    assert!(matches!(e, Error::Shrunk { need: 0x40_0000, have: 0x3f_f000, .. }), "{e:?}");
    // 260 metadata pages are good for 252 clusters each, and 23 clusters are before them.
    let most = (23 + 260 * 252 + 1) * CLUSTER - 4096;
    assert_eq!(before.max_device_size, most);
    s.disk_mut().with.0 = most + 4096;
    let e = s.grow().unwrap_err();
    assert!(matches!(e, Error::CannotGrow { max, .. } if max == most), "{e:?}");
    assert_eq!(s.info(), before);
    assert!(s.disk_mut().disk.bytes() == medium, "a refused growth wrote something");
    s.disk_mut().with.0 = 6 << 20;
    assert_eq!((s.grow(), s.grow()), (Ok(true), Ok(false)));
    let grown = s.info();
    assert_eq!((grown.data_clusters, grown.free_clusters), (41 + 32, 36 + 32));
    assert_eq!(grown.max_device_size, most, "the limit is the metadata's");
    s.disk_mut().with.0 = most;
    assert_eq!(s.grow(), Ok(true));
    assert_eq!(s.info().data_clusters, 260 * 252);
    let medium = s.disk_mut().disk.bytes().to_vec();
    let again = Store::load(sized(MemDisk::from_bytes(medium.clone()), most + CLUSTER)).unwrap();
    assert_eq!(again.info().free_clusters, 260 * 252 - 5, "on a device that has grown further");
    let e = Store::load(sized(MemDisk::from_bytes(medium), most - 4096)).err().unwrap();
    assert!(matches!(e, Error::Truncated { .. }), "{e:?}");
}

#[test]
fn metadata_room_runs_out_with_an_error_and_nothing_half_done() {
    let mut s = store(4 << 20);
    let mut made = 0;
    let e = loop {
        match s.create(&blob(&format!("b{made}"), 1, true)) {
            Ok(_) => made += 1,
            Err(e) => break e,
        }
    };
    assert_eq!(e, Error::NoMetadataSpace { needed: 1, free: 0 });
    let first = s.by_name("b0").unwrap();
    assert!(matches!(s.write(first, 0, &[1]), Err(Error::NoMetadataSpace { .. })));
    assert!(matches!(s.set_xattr(first, "a", &[0; 3000]), Err(Error::NoMetadataSpace { .. })));
    let deleted = s.delete(s.by_name("b1").unwrap()).unwrap();
    s.release(deleted.freed);
    let deleted = s.delete(s.by_name("b2").unwrap()).unwrap();
    s.release(deleted.freed);
    s.write(first, 0, &[1]).unwrap();
    let s = Store::load(image(&mut s)).unwrap();
    assert_eq!(s.blobs().count(), made - 2);
}

#[test]
fn every_damaged_metadata_page_is_refused_by_name() {
    let mut s = store(4 << 20);
    let id = s.create(&blob("a", 5, false)).unwrap();
    for i in 0..3 {
        s.set_xattr(id, &format!("x{i}"), &[7; 2000]).unwrap();
    }
    s.create(&blob("b", 2000, true)).unwrap();
    let last = s.by_name("b").unwrap();
    s.write(last, 1500 * CLUSTER, &[1]).unwrap();
    let free = s.info().free_pages;
    let all = store(4 << 20).info().free_pages + 1;
    let used = (all - free) as usize;
    let closed = s.close().unwrap();
    let md_start = (32 + 64) * PAGE_SIZE;
    let mut damaged = 0;
    for page in 0..all as usize {
        for at in [0, 7, 100, 4095] {
            let mut bad = closed.clone();
            bad.bytes_mut()[md_start + page * PAGE_SIZE + at] ^= 0x40;
            let before = bad.bytes().to_vec();
            match Store::load(&mut bad) {
                Ok(_) => continue,
                Err(e) => {
                    let e = e.to_string();
                    assert!(e.contains(&format!("metadata page {page} at byte")), "{e}");
                    assert!(bad.bytes() == before, "a damaged store was changed");
                    damaged += 1;
                }
            }
        }
    }
    assert_eq!(damaged, used * 4, "each page in use, and no other");
}

#[test]
fn a_misdirected_or_stale_page_is_not_taken_for_the_right_one() {
    let mut s = store(4 << 20);
    s.create(&blob("a", 3, false)).unwrap();
    s.create(&blob("b", 3, false)).unwrap();
    let closed = s.close().unwrap();
    let page = |n: usize| (96 + n) * PAGE_SIZE..(97 + n) * PAGE_SIZE;
    // Pages: 0 bitmap, 1 and 2 of a, 3 and 4 of b.
    for (to, from) in [(1, 3), (2, 4), (4, 2), (0, 1), (1, 0)] {
        let mut bad = closed.clone();
        bad.bytes_mut().copy_within(page(from), page(to).start);
        let e = Store::load(bad).err().expect("it is refused").to_string();
        assert!(e.contains(&format!("says that it is metadata page {from}")), "{e}");
    }
}

#[test]
fn both_superblocks_damaged_is_damage_and_one_is_not() {
    let mut s = store(4 << 20);
    s.create(&blob("a", 1, true)).unwrap();
    let closed = s.close().unwrap();
    let mut bad = closed.clone();
    bad.bytes_mut()[200] ^= 1;
    assert_eq!(Store::load(bad.clone()).unwrap().blobs().count(), 1);
    bad.bytes_mut()[16 * PAGE_SIZE + 200] ^= 1;
    let e = Store::load(&mut bad).err().unwrap();
    assert!(matches!(&e, Error::Damaged { place, .. } if place == "the superblock"), "{e}");
    assert!(matches!(Store::probe(&mut bad), Err(Error::Damaged { .. })));
}

#[test]
fn an_older_superblock_copy_than_the_journal_is_refused() {
    let mut s = store(4 << 20);
    let id = s.create(&blob("a", 1, true)).unwrap();
    let old = image(&mut s).bytes()[16 * PAGE_SIZE..17 * PAGE_SIZE].to_vec();
    // Far enough for a checkpoint and the ring to have come round over the old tail.
    (0..60).for_each(|i| s.rename(id, &format!("n{i}")).unwrap());
    let mut now = image(&mut s);
    now.bytes_mut()[100] ^= 1;
    now.bytes_mut()[16 * PAGE_SIZE..17 * PAGE_SIZE].copy_from_slice(&old);
    let e = Store::load(now).err().expect("it is refused").to_string();
    assert!(e.contains("older than the journal"), "{e}");
}

/// Writes and flushes fail when so many were done.
struct Failing(u32);

impl Wrap for Failing {
    fn before(&mut self, op: &'static str, offset: u64, len: u64) -> Result<(), DiskError> {
        if ["write", "flush"].contains(&op) {
            self.0 = self.0.checked_sub(1).ok_or_else(|| failed(op, offset, len))?;
        }
        Ok(())
    }
}

fn failing(disk: &MemDisk, left: u32) -> Store<Wrapped<Failing>> {
    Store::load(Wrapped { disk: disk.clone(), with: Failing(left) }).unwrap()
}

#[test]
fn after_any_failed_metadata_access_the_store_refuses_every_change() {
    let closed = store(4 << 20).close().unwrap();
    for left in 0..20 {
        let mut s = failing(&closed, 1000);
        let id = s.create(&blob("a", 2, true)).unwrap();
        s.disk_mut().with.0 = left;
        let mut work = || -> Result<(), Error> {
            s.rename(id, "b")?;
            s.write(id, 0, &[1])?;
            s.set_xattr(id, "x", &[2; 3000])?;
            s.create(&blob("c", 2, false))?;
            s.checkpoint()?;
            s.rename_store("other")
        };
        let Err(e) = work() else { continue };
        if matches!(e, Error::Data(_)) {
            // The blob's own data: the metadata is whole, and changes go on.
            s.disk_mut().with.0 = 1000;
            s.rename(id, "z").unwrap();
            continue;
        }
        assert!(matches!(e, Error::Metadata(_)), "{left}: {e}");
        s.disk_mut().with.0 = 1000;
        let stopped = |r: Result<(), Error>| {
            assert!(
                matches!(&r, Err(Error::Stopped { cause }) if cause.contains("injected")),
                "{r:?}"
            );
        };
        stopped(s.rename(id, "z"));
        stopped(s.create(&blob("z", 1, true)).map(drop));
        stopped(s.delete(id).map(drop));
        stopped(s.resize(id, 9).map(drop));
        stopped(s.set_xattr(id, "z", &[]));
        stopped(s.unmap(id, 0, 1).map(drop));
        stopped(s.allocate(&[(id, 1)]).remove(0).map(drop));
        stopped(s.rename_store("z"));
        stopped(s.checkpoint());
        assert!(s.info().stopped.is_some());
        // What is on the medium is a store.
        Store::load(image(&mut s)).unwrap();
    }
}

#[test]
fn blobs_whose_rollback_cannot_be_recorded_read_as_before() {
    let closed = store(4 << 20).close().unwrap();
    let mut failures = 0;
    for left in 0..20 {
        let mut s = failing(&closed, 1000);
        let snapshot = |name: &str| HistoryOptions {
            name: name.into(),
            uuid: Uuid::new_v4(),
            xattrs: Default::default(),
        };
        let olds = ["a", "b"].map(|name| s.create(&blob(name, 2, true)).unwrap());
        olds.iter().for_each(|old| s.write(*old, 0, &[1; 9]).unwrap());
        let all = [(olds[0], snapshot("a1")), (olds[1], snapshot("b1"))];
        let news = s.snapshot(&all).unwrap();
        // One of them has no parent any more.
        news.iter().for_each(|new| s.write(*new, 0, &[2; 9]).unwrap());
        let lacking = s.lacking(news[1], true, 0, 5).unwrap();
        s.supply(news[1], &lacking).unwrap();
        s.detach(news[1], true).unwrap();
        let infos = |s: &Store<Wrapped<Failing>>| {
            let all = olds.iter().chain(&news);
            all.map(|id| s.blob(*id).unwrap()).collect::<Vec<_>>()
        };
        let before = infos(&s);
        s.disk_mut().with.0 = left;
        let done = s.roll_back(&[(news[0], olds[0]), (news[1], olds[1])]);
        s.disk_mut().with.0 = 1000;
        let expected = if done.is_err() { 2 } else { 1 };
        if let Err(e) = done {
            failures += 1;
            assert!(matches!(e, Error::Metadata(_)), "{left}: {e}");
            assert_eq!(infos(&s), before);
        }
        for new in &news {
            let mut found = [0; 9];
            s.read(*new, 0, &mut found).unwrap();
            assert_eq!(found, [expected; 9], "{left}");
        }
    }
    assert!((1..20).contains(&failures), "{failures}");
}

#[test]
fn what_a_first_write_has_is_written_with_its_cluster() {
    let closed = store(4 << 20).close().unwrap();
    let mut s = failing(&closed, 1 << 20);
    let id = s.create(&blob("a", 8, true)).unwrap();
    let cluster = s.info().cluster_size as usize;
    s.write(id, 0, &vec![1; 6 * cluster]).unwrap();
    let (name, uuid, xattrs) = ("before".into(), Uuid::from_u128(77), Default::default());
    let id = s.snapshot(&[(id, HistoryOptions { name, uuid, xattrs })]).unwrap()[0];
    let mut changes = |change: &dyn Fn(&mut Store<Wrapped<Failing>>)| {
        let before = s.disk_mut().with.0;
        change(&mut s);
        before - s.disk_mut().with.0
    };
    let whole = vec![3; cluster];
    // The first cluster comes with a page of its own.
    changes(&|s| _ = s.allocate(&[(id, 0)]).remove(0).unwrap());
    let alone = changes(&|s| _ = s.allocate(&[(id, 1)]).remove(0).unwrap());
    let at = 2 * cluster as u64 + 1000;
    assert_eq!(changes(&|s| s.write(id, at, &[2; 5000]).unwrap()), alone);
    assert_eq!(changes(&|s| s.write(id, 3 * cluster as u64, &whole).unwrap()), alone);
    // Zeros are not counted: this is the data.
    assert_eq!(changes(&|s| s.write(id, 6 * cluster as u64, &whole).unwrap()), alone);
    let mut found = vec![9; 8 * cluster];
    s.read(id, 0, &mut found).unwrap();
    let mut expected = vec![1; 6 * cluster];
    expected.resize(8 * cluster, 0);
    expected[2 * cluster + 1000..][..5000].fill(2);
    [3, 6].iter().for_each(|n| expected[n * cluster..][..cluster].fill(3));
    assert!(found == expected);
}

#[test]
fn garbage_is_not_a_store_and_never_a_panic() {
    for byte in [0u8, 1, 0xff] {
        let e = Store::load(MemDisk::from_bytes(vec![byte; 1 << 20])).err().unwrap();
        assert!(matches!(e, Error::NotAStore { .. }), "{e}");
    }
    let e = Store::load(MemDisk::new(4096)).err().unwrap();
    assert!(e.to_string().contains("it has only 4096 bytes"), "{e}");
}

#[test]
fn a_snapshot_takes_two_pages_whatever_its_size_and_its_clones_read_as_it_does() {
    let mut s = store(16 << 20);
    let live = s.create(&blob("live", 1 << 20, true)).unwrap();
    s.write(live, 0, &[1; 100]).unwrap();
    s.write(live, 3 * CLUSTER, &[2; 100]).unwrap();
    let before = s.info();
    let now = s.snapshot(&[(live, named("snap"))]).unwrap()[0];
    assert_eq!(s.info().free_pages, before.free_pages - 1, "one more root");
    assert_eq!(s.info().free_clusters, before.free_clusters);
    let (snapshot, blob) = (s.blob(live).unwrap(), s.blob(now).unwrap());
    assert_eq!((snapshot.name.as_str(), blob.name.as_str()), ("snap", "live"));
    assert!(snapshot.snapshot && snapshot.read_only && !blob.read_only && !blob.snapshot);
    assert_eq!((snapshot.clones, blob.parent), (vec![now], Some(live)));
    assert_eq!((snapshot.allocated, blob.allocated), (2, 0));
    // A write has a cluster of its own, with the rest of what was there; the snapshot stays.
    s.write(now, 50, &[3; 10]).unwrap();
    let bytes = |s: &mut Store<MemDisk>, id, at| {
        let mut bytes = [9; 100];
        s.read(id, at, &mut bytes).unwrap();
        bytes
    };
    assert_eq!(bytes(&mut s, live, 0), [1; 100]);
    let mixed = bytes(&mut s, now, 0);
    assert_eq!((mixed[49], mixed[50], mixed[59], mixed[60]), (1, 3, 3, 1));
    // Zeros hide what the parent has, and cost no cluster.
    let free = s.info().free_clusters;
    let freed = s.unmap(now, 0, 4).unwrap();
    s.release(freed);
    assert_eq!((bytes(&mut s, now, 0), bytes(&mut s, now, 3 * CLUSTER)), ([0; 100], [0; 100]));
    assert_eq!((s.info().free_clusters, s.blob(now).unwrap().allocated), (free + 1, 0));
    let clone = s.clone_of(live, &named("clone")).unwrap();
    let e = s.delete(live).unwrap_err();
    assert_eq!(
        e,
        Error::HasClones { name: "snap".into(), clones: vec!["live".into(), "clone".into()] }
    );
    assert!(e.to_string().contains("live, clone"), "{e}");
    let mut s = Store::load(image(&mut s)).unwrap();
    assert_eq!(bytes(&mut s, clone, 3 * CLUSTER), [2; 100]);
    // What a clone loses by being made smaller is not its parent's when it grows again.
    for size in [2, 8] {
        let freed = s.resize(clone, size).unwrap();
        s.release(freed);
    }
    assert_eq!((bytes(&mut s, clone, 0), bytes(&mut s, clone, 3 * CLUSTER)), ([1; 100], [0; 100]));
    // The last but one goes, and the last one takes over what it needs.
    let deleted = s.delete(now).unwrap();
    assert!(deleted.freed.is_empty() && deleted.heir.is_none());
    let deleted = s.delete(live).unwrap();
    assert_eq!(deleted.heir, Some(clone));
    s.release(deleted.freed);
    assert_eq!((bytes(&mut s, clone, 0), bytes(&mut s, clone, 3 * CLUSTER)), ([1; 100], [0; 100]));
    let info = s.blob(clone).unwrap();
    assert_eq!((info.allocated, info.parent), (1, None));
    assert_eq!(s.info().free_clusters, s.info().data_clusters - 1);
}

#[test]
fn what_cannot_be_a_snapshot_a_clone_or_a_parent_is_refused() {
    let mut s = store(16 << 20);
    let live = s.create(&blob("live", 4, false)).unwrap();
    assert_eq!(s.clone_of(live, &named("clone")), Err(Error::NotASnapshot { name: "live".into() }));
    assert_eq!(s.detach(live, false), Err(Error::NoParent { name: "live".into() }));
    let taken = s.snapshot(&[(live, named("live"))]);
    assert_eq!(taken, Err(Error::NameTaken { name: "live".into() }));
    let twice = [(live, named("a")), (live, named("b"))];
    assert_eq!(s.snapshot(&twice), Err(Error::ReadOnly { name: "live".into() }));
    let now = s.snapshot(&[(live, named("snap"))]).unwrap()[0];
    assert_eq!(s.write(live, 0, &[1]), Err(Error::ReadOnly { name: "snap".into() }));
    let of_it = s.snapshot(&[(live, named("other"))]);
    assert_eq!(of_it, Err(Error::ReadOnly { name: "snap".into() }));
    assert_eq!(s.detach(now, false), Err(Error::StillShared { name: "live".into() }));
    let small = s.create(&blob("small", 3, true)).unwrap();
    let (name, parent) = ("small".to_owned(), "snap".to_owned());
    assert_eq!(s.set_parent(small, live), Err(Error::OtherSize { name, parent }));
    let freed = s.resize(small, 4).unwrap();
    assert!(freed.is_empty());
    s.set_parent(small, live).unwrap();
    assert_eq!(s.blob(live).unwrap().clones, [now, small]);
    let s = Store::load(image(&mut s)).unwrap();
    assert_eq!(s.blob(small).unwrap().parent, Some(live));
}

#[derive(Clone, Debug)]
enum Step {
    Create(u64, bool),
    Delete(usize),
    Resize(usize, u64),
    Write(usize, u64, u16, u8),
    Unmap(usize, u64, u64),
    Snapshot(usize),
    Clone(usize),
    Detach(usize, bool),
    Reload,
    Close,
}

fn step() -> impl Strategy<Value = Step> {
    prop_oneof![
        2 => (0..9u64, any::<bool>()).prop_map(|(n, t)| Step::Create(n, t)),
        1 => (0..8usize).prop_map(Step::Delete),
        2 => (0..8usize, 0..12u64).prop_map(|(b, n)| Step::Resize(b, n)),
        6 => (0..8usize, 0..12 * CLUSTER, any::<u16>(), 1..255u8)
            .prop_map(|(b, at, n, v)| Step::Write(b, at, n, v)),
        2 => (0..8usize, 0..12u64, 1..6u64).prop_map(|(b, f, n)| Step::Unmap(b, f, n)),
        2 => (0..8usize).prop_map(Step::Snapshot),
        2 => (0..8usize).prop_map(Step::Clone),
        1 => (0..8usize, any::<bool>()).prop_map(|(b, all)| Step::Detach(b, all)),
        1 => Just(Step::Reload),
        1 => Just(Step::Close),
    ]
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 100, ..ProptestConfig::default() })]

    /// A store is a map from blob to bytes.
    #[test]
    fn a_store_behaves_as_a_map_of_byte_arrays(
        steps in prop::collection::vec(step(), 1..60)
    ) {
        let mut s = store(4 << 20);
        let mut model: HashMap<BlobId, Vec<u8>> = HashMap::new();
        let mut ids: Vec<BlobId> = Vec::new();
        for (i, step) in steps.into_iter().enumerate() {
            let pick = |b: usize| ids.get(b % ids.len().max(1)).copied();
            match step {
                Step::Create(size, thin) => {
                    match s.create(&blob(&format!("b{i}"), size, thin)) {
                        Ok(id) => {
                            ids.push(id);
                            model.insert(id, vec![0; (size * CLUSTER) as usize]);
                        }
                        Err(e) => prop_assert!(matches!(e, Error::NoSpace { .. }), "{}", e),
                    }
                }
                Step::Delete(b) => if let Some(id) = pick(b) {
                    match s.delete(id) {
                        Ok(deleted) => {
                            s.release(deleted.freed);
                            model.remove(&id);
                            ids.retain(|other| *other != id);
                        }
                        Err(e) => prop_assert!(matches!(e, Error::HasClones { .. }), "{}", e),
                    }
                },
                Step::Snapshot(b) => if let Some(id) = pick(b).filter(|id| is_live(&s, *id)) {
                    let new = s.snapshot(&[(id, named(&format!("b{i}")))]).unwrap()[0];
                    ids.push(new);
                    let bytes = model[&id].clone();
                    model.insert(new, bytes);
                },
                Step::Clone(b) => if let Some(id) = pick(b) {
                    match s.clone_of(id, &named(&format!("b{i}"))) {
                        Ok(new) => {
                            ids.push(new);
                            let bytes = model[&id].clone();
                            model.insert(new, bytes);
                        }
                        Err(e) => prop_assert!(matches!(e, Error::NotASnapshot { .. }), "{}", e),
                    }
                },
                Step::Detach(b, all) => if let Some(id) = pick(b) {
                    detach(&mut s, id, all);
                },
                Step::Resize(b, size) => if let Some(id) = pick(b).filter(|id| is_live(&s, *id)) {
                    match s.resize(id, size) {
                        Ok(freed) => {
                            s.release(freed);
                            model.get_mut(&id).unwrap().resize((size * CLUSTER) as usize, 0);
                        }
                        Err(e) => prop_assert!(matches!(e, Error::NoSpace { .. }), "{}", e),
                    }
                },
                Step::Write(b, at, n, value) => if let Some(id) = pick(b).filter(|id| is_live(&s, *id)) {
                    let bytes = model.get_mut(&id).unwrap();
                    let end = (at as usize + usize::from(n) * 4).min(bytes.len());
                    if let Some(to) = bytes.get_mut(at as usize..end) {
                        match s.write(id, at, &vec![value; to.len()]) {
                            Ok(()) => to.fill(value),
                            Err(e) => {
                                prop_assert!(matches!(e, Error::NoSpace { .. }), "{}", e);
                                // What was copied from a parent has it already: whole clusters.
                                let mut found = vec![0; to.len()];
                                s.read(id, at, &mut found).unwrap();
                                let first = (CLUSTER - at % CLUSTER) as usize;
                                let mut begin = 0;
                                while begin < to.len() {
                                    let next = if begin == 0 { first } else { begin + CLUSTER as usize };
                                    let part = begin..next.min(to.len());
                                    let is_new = found[part.clone()].iter().all(|b| *b == value);
                                    prop_assert!(is_new || found[part.clone()] == to[part.clone()]);
                                    begin = part.end;
                                }
                                to.copy_from_slice(&found);
                            }
                        }
                    }
                },
                Step::Unmap(b, first, count) => if let Some(id) = pick(b) {
                    let info = s.blob(id).unwrap();
                    if info.thin && !info.read_only && first + count <= info.size {
                        let freed = s.unmap(id, first, count).unwrap();
                        s.release(freed);
                        let range = (first * CLUSTER) as usize..((first + count) * CLUSTER) as usize;
                        model.get_mut(&id).unwrap()[range].fill(0);
                    }
                },
                Step::Reload => s = Store::load(image(&mut s)).unwrap(),
                Step::Close => s = Store::load(s.close().unwrap()).unwrap(),
            }
        }
        prop_assert_eq!(s.blobs().count(), model.len());
        for (id, bytes) in model {
            let mut found = vec![1; bytes.len()];
            s.read(id, 0, &mut found).unwrap();
            prop_assert!(found == bytes, "blob {:?}", s.blob(id));
        }
    }
}

#[test]
fn a_blob_keeps_its_protection_information_for_ever_and_so_do_those_made_of_it() {
    let mut s = store(16 << 20);
    let kinds = [DifType::Type1, DifType::Type3];
    let some = kinds
        .into_iter()
        .flat_map(|kind| [false, true].map(|large_blocks| Some(Dif { kind, large_blocks })));
    let all: Vec<_> = [None].into_iter().chain(some).collect();
    let mut made = Vec::new();
    for (nth, dif) in all.iter().enumerate() {
        let options = BlobOptions { dif: *dif, ..blob(&format!("b{nth}"), 3, true) };
        let snapshot = s.create(&options).unwrap();
        let live = s.snapshot(&[(snapshot, named(&format!("s{nth}")))]).unwrap()[0];
        let clone = s.clone_of(snapshot, &named(&format!("c{nth}"))).unwrap();
        detach(&mut s, clone, true);
        let freed = s.roll_back(&[(live, snapshot)]).unwrap();
        s.release(freed);
        made.push((live, snapshot));
    }
    // Nobody gets a parent whose clusters mean something else.
    for (nth, (live, _)) in made.iter().enumerate() {
        for (other, (_, snapshot)) in made.iter().enumerate().filter(|(other, _)| *other != nth) {
            let refused =
                || Error::OtherDif { name: format!("b{nth}"), parent: format!("s{other}") };
            assert_eq!(s.set_parent(*live, *snapshot), Err(refused()));
            assert_eq!(s.roll_back(&[(*live, *snapshot)]).err(), Some(refused()));
        }
        let outside = s.set_external_parent(*live, Uuid::from_u128(7), 3);
        assert_eq!(matches!(outside, Err(Error::OtherDif { .. })), all[nth].is_some());
    }
    let s = Store::load(image(&mut s)).unwrap();
    for (nth, dif) in all.into_iter().enumerate() {
        for name in ["b", "s", "c"] {
            let id = s.by_name(&format!("{name}{nth}")).unwrap();
            assert_eq!(s.blob(id).unwrap().dif, dif, "{name}{nth}");
        }
    }
}
