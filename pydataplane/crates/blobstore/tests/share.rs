//! Clusters with several owners: none of them writes to one, none loses it with another, and there is always the
//! room that a write takes. (Power cuts are in `crash` and `simulate`.)

use crate::testing::{Wrap, Wrapped, failed};
use blobstore::{
    BlobId, BlobOptions, Disk, DiskError, Error, HistoryOptions, MemDisk, Problem, Store,
    StoreOptions,
};
use std::collections::BTreeMap;
use uuid::Uuid;

const CLUSTER: u64 = 64 << 10;

fn empty(bytes: usize) -> Store<MemDisk> {
    let options =
        StoreOptions { name: "lvs".into(), uuid: Uuid::from_u128(1), cluster_size: CLUSTER as u32 };
    Store::create_store(MemDisk::new(bytes), &options).unwrap()
}

fn sharing(bytes: usize) -> Store<MemDisk> {
    let mut store = empty(bytes);
    store.share_clusters().unwrap();
    store
}

fn blob(store: &mut Store<impl Disk>, name: &str, size: u64, thin: bool) -> BlobId {
    let (name, uuid, xattrs) = (name.into(), Uuid::new_v4(), BTreeMap::new());
    store.create(&BlobOptions { dif: None, name, uuid, size, thin, xattrs }).unwrap()
}

fn named(name: &str) -> HistoryOptions {
    HistoryOptions { name: name.into(), uuid: Uuid::new_v4(), xattrs: BTreeMap::new() }
}

/// Fills clusters of a blob with that byte.
fn fill(store: &mut Store<impl Disk>, id: BlobId, first: u64, count: u64, with: u8) {
    for cluster in first..first + count {
        store.write(id, cluster * CLUSTER, &[with; CLUSTER as usize]).unwrap();
    }
}

/// The byte that each cluster of a blob is full of.
fn bytes_of(store: &mut Store<impl Disk>, id: BlobId) -> Vec<u8> {
    let size = store.blob(id).unwrap().size;
    let mut all = vec![0; (size * CLUSTER) as usize];
    store.read(id, 0, &mut all).unwrap();
    let one = |cluster: &[u8]| {
        assert!(cluster.iter().all(|byte| *byte == cluster[0]), "a cluster is a mixture");
        cluster[0]
    };
    all.chunks(CLUSTER as usize).map(one).collect()
}

fn share(
    store: &mut Store<impl Disk>,
    from: (BlobId, u64),
    to: (BlobId, u64),
    count: u64,
) -> Result<(), Error> {
    let shared = store.share(from.0, from.1, to.0, to.1, count)?;
    let runs = shared.freed.runs().to_vec();
    runs.into_iter().for_each(|run| store.discard(run).unwrap());
    store.release(shared.freed);
    Ok(())
}

fn delete(store: &mut Store<impl Disk>, id: BlobId) {
    let freed = store.delete(id).unwrap().freed;
    let runs = freed.runs().to_vec();
    runs.into_iter().for_each(|run| store.discard(run).unwrap());
    store.release(freed);
}

fn problems(store: &mut Store<impl Disk>) -> Vec<Problem> {
    let (mut all, mut from) = (Vec::new(), Some(0));
    while let Some(at) = from {
        let found = store.check(at, false, &[]).unwrap();
        all.extend(found.problems);
        from = found.next;
    }
    all
}

/// The same device, loaded by another process.
fn again(store: &mut Store<MemDisk>) -> Store<MemDisk> {
    Store::load(MemDisk::from_bytes(store.disk_mut().bytes().to_vec())).unwrap()
}

#[test]
fn a_share_is_read_as_the_source_and_each_side_writes_for_itself() {
    let mut s = sharing(16 << 20);
    let (a, b) = (blob(&mut s, "a", 6, true), blob(&mut s, "b", 8, true));
    fill(&mut s, a, 0, 3, 1);
    fill(&mut s, b, 1, 4, 2);
    let free = s.info().free_clusters;
    // Three of a, and one that it has not.
    share(&mut s, (a, 0), (b, 2), 4).unwrap();
    assert_eq!(bytes_of(&mut s, b), [0, 2, 1, 1, 1, 0, 0, 0]);
    assert_eq!(s.info().free_clusters, free, "three were freed, and three are kept for writes");
    let of = |s: &mut Store<MemDisk>, id, at| s.entry(id, at).unwrap();
    assert_eq!(of(&mut s, a, 1), of(&mut s, b, 3));
    fill(&mut s, a, 1, 1, 3);
    fill(&mut s, b, 2, 1, 4);
    assert_ne!(of(&mut s, a, 1), of(&mut s, b, 3));
    let before = of(&mut s, b, 3);
    fill(&mut s, b, 3, 1, 5);
    assert_eq!(of(&mut s, b, 3), before, "it was the only owner, and wrote in its place");
    assert_eq!(bytes_of(&mut s, a), [1, 3, 1, 0, 0, 0]);
    assert_eq!(bytes_of(&mut s, b), [0, 2, 4, 5, 1, 0, 0, 0]);
    assert_eq!(s.info().free_clusters, free);
    // The same as it is already: nothing changes.
    share(&mut s, (a, 2), (b, 4), 1).unwrap();
    assert_eq!(s.info().free_clusters, free);
    assert_eq!(problems(&mut s), []);
}

#[test]
fn parts_of_one_blob_can_be_the_same_but_not_where_it_is_read() {
    let mut s = sharing(16 << 20);
    let a = blob(&mut s, "a", 8, true);
    fill(&mut s, a, 0, 2, 1);
    share(&mut s, (a, 0), (a, 4), 2).unwrap();
    fill(&mut s, a, 4, 1, 2);
    assert_eq!(bytes_of(&mut s, a), [1, 1, 0, 0, 2, 1, 0, 0]);
    let e = share(&mut s, (a, 0), (a, 1), 2).unwrap_err();
    assert!(matches!(e, Error::CannotShare { .. }), "{e}");
    assert_eq!(bytes_of(&mut s, a), [1, 1, 0, 0, 2, 1, 0, 0]);
}

#[test]
fn what_one_owner_loses_the_others_keep() {
    let mut s = sharing(16 << 20);
    let (a, b) = (blob(&mut s, "a", 4, true), blob(&mut s, "b", 4, true));
    let empty = s.info().free_clusters;
    fill(&mut s, a, 0, 4, 7);
    share(&mut s, (a, 0), (b, 0), 4).unwrap();
    // Unmapped, cut off, deleted, and given to somebody else, who writes.
    let freed = s.unmap(b, 0, 1).unwrap();
    freed.runs().iter().for_each(|run| s.discard(*run).unwrap());
    s.release(freed);
    let freed = s.resize(a, 3).unwrap();
    freed.runs().iter().for_each(|run| s.discard(*run).unwrap());
    s.release(freed);
    assert_eq!((bytes_of(&mut s, a), bytes_of(&mut s, b)), (vec![7; 3], vec![0, 7, 7, 7]));
    delete(&mut s, a);
    let rest = s.info().free_clusters;
    let c = blob(&mut s, "c", rest, false);
    fill(&mut s, c, 0, rest, 9);
    assert_eq!(bytes_of(&mut s, b), [0, 7, 7, 7]);
    delete(&mut s, c);
    delete(&mut s, b);
    assert_eq!(s.info().free_clusters, empty);
    assert_eq!(problems(&mut s), []);
}

#[test]
fn snapshots_of_what_is_shared_are_merged_parted_and_deleted_and_nobody_loses() {
    let mut s = sharing(16 << 20);
    let (a, b) = (blob(&mut s, "a", 4, true), blob(&mut s, "b", 4, true));
    fill(&mut s, a, 0, 4, 1);
    share(&mut s, (a, 0), (b, 0), 4).unwrap();
    let (snapshot, live) = (b, s.snapshot(&[(b, named("snap"))]).unwrap()[0]);
    fill(&mut s, live, 0, 1, 2);
    // Of what shows through a snapshot, too.
    share(&mut s, (live, 0), (a, 2), 2).unwrap();
    assert_eq!(bytes_of(&mut s, a), [1, 1, 2, 1]);
    // The heir gets clusters which others have as well.
    let deleted = s.delete(snapshot).unwrap();
    s.release(deleted.freed);
    assert_eq!(bytes_of(&mut s, live), [2, 1, 1, 1]);
    fill(&mut s, live, 1, 1, 3);
    fill(&mut s, live, 0, 1, 4);
    assert_eq!(bytes_of(&mut s, a), [1, 1, 2, 1]);
    let snapshot = live;
    let live = s.snapshot(&[(live, named("snap"))]).unwrap()[0];
    let lacking = s.lacking(live, true, 0, 99).unwrap();
    s.supply(live, &lacking).unwrap();
    s.detach(live, true).unwrap();
    delete(&mut s, snapshot);
    assert_eq!(bytes_of(&mut s, live), [4, 3, 1, 1]);
    assert_eq!(bytes_of(&mut s, a), [1, 1, 2, 1]);
    // One that was inflated with shared clusters is thick, and written to all the same.
    share(&mut s, (live, 0), (a, 0), 4).unwrap();
    fill(&mut s, live, 0, 4, 5);
    assert_eq!(bytes_of(&mut s, a), [4, 3, 1, 1]);
    assert_eq!(problems(&mut s), []);
    let mut s = again(&mut s);
    assert_eq!((bytes_of(&mut s, a), bytes_of(&mut s, live)), (vec![4, 3, 1, 1], vec![5; 4]));
}

#[test]
fn a_load_knows_all_owners_again() {
    let mut s = sharing(16 << 20);
    let ids = ["a", "b", "c"].map(|name| blob(&mut s, name, 5, true));
    fill(&mut s, ids[0], 0, 5, 1);
    share(&mut s, (ids[0], 0), (ids[1], 0), 5).unwrap();
    share(&mut s, (ids[1], 1), (ids[2], 0), 3).unwrap();
    share(&mut s, (ids[2], 0), (ids[2], 3), 2).unwrap();
    let free = s.info().free_clusters;
    for checkpoint in [false, true] {
        if checkpoint {
            s.checkpoint().unwrap();
        }
        let mut s = again(&mut s);
        assert_eq!(s.info().free_clusters, free);
        assert!(s.info().shares_clusters);
        s.let_go_all();
        fill(&mut s, ids[1], 1, 1, 2);
        delete(&mut s, ids[0]);
        fill(&mut s, ids[2], 0, 1, 3);
        assert_eq!(bytes_of(&mut s, ids[1]), [1, 2, 1, 1, 1]);
        assert_eq!(bytes_of(&mut s, ids[2]), [3, 1, 1, 1, 1]);
        assert_eq!(problems(&mut s), []);
    }
}

#[test]
fn a_write_to_what_is_shared_always_has_room() {
    let mut s = sharing(8 << 20);
    let (a, b) = (blob(&mut s, "a", 20, true), blob(&mut s, "b", 20, true));
    fill(&mut s, a, 0, 20, 1);
    let room = s.info().free_clusters;
    blob(&mut s, "rest", room - 19, false);
    let e = share(&mut s, (a, 0), (b, 0), 20).unwrap_err();
    assert_eq!(e, Error::NoSpace { needed: 20, free: 19 });
    share(&mut s, (a, 0), (b, 0), 19).unwrap();
    assert_eq!(s.info().free_clusters, 0);
    // What is kept is nobody else's.
    let e = s.write(b, 19 * CLUSTER, &[1]).unwrap_err();
    assert!(matches!(e, Error::NoSpace { .. }), "{e}");
    let e = s.reserve(1).unwrap_err();
    assert_eq!(e, Error::NoSpace { needed: 1, free: 0 });
    let pages = s.info().free_pages;
    fill(&mut s, a, 0, 20, 2);
    fill(&mut s, b, 0, 19, 3);
    assert_eq!(s.info().free_pages, pages, "no metadata page was needed");
    assert_eq!(bytes_of(&mut s, a), [2; 20]);
    // What is written over has its room until the share is done.
    let e = share(&mut s, (a, 0), (b, 0), 19).unwrap_err();
    assert_eq!(e, Error::NoSpace { needed: 19, free: 0 });
    let freed = s.unmap(b, 0, 19).unwrap();
    s.release(freed);
    // So it is after a load, when all that is kept must be.
    share(&mut s, (a, 0), (b, 0), 19).unwrap();
    let mut s = again(&mut s);
    assert_eq!(s.info().free_clusters, 0);
    fill(&mut s, b, 0, 19, 4);
    fill(&mut s, a, 0, 20, 5);
    assert_eq!(problems(&mut s), []);
}

/// The first cluster takes the last entry of an extents page with it, the second needs one there again.
#[test]
fn a_share_that_could_need_a_metadata_page_is_refused_without_one() {
    let mut s = sharing(8 << 20);
    let (a, b) = (blob(&mut s, "a", 2, true), blob(&mut s, "b", 2, true));
    fill(&mut s, a, 1, 1, 1);
    fill(&mut s, b, 0, 1, 2);
    let pages = s.info().free_pages;
    let made: Vec<_> = (0..pages).map(|n| blob(&mut s, &format!("{n}"), 0, true)).collect();
    assert_eq!(s.info().free_pages, 0);
    let e = share(&mut s, (a, 0), (b, 0), 2).unwrap_err();
    assert_eq!(e, Error::NoMetadataSpace { needed: 2, free: 0 });
    assert_eq!((bytes_of(&mut s, a), bytes_of(&mut s, b)), (vec![0, 1], vec![2, 0]));
    assert!(s.stopped().is_none());
    made.into_iter().take(2).for_each(|id| delete(&mut s, id));
    share(&mut s, (a, 0), (b, 0), 2).unwrap();
    assert_eq!(bytes_of(&mut s, b), [0, 1]);
    assert_eq!(problems(&mut s), []);
}

#[test]
fn all_owners_of_a_cluster_that_write_at_a_time_have_room() {
    let mut s = sharing(8 << 20);
    let (a, b) = (blob(&mut s, "a", 8, true), blob(&mut s, "b", 4, true));
    fill(&mut s, a, 0, 4, 1);
    let room = s.info().free_clusters;
    blob(&mut s, "rest", room - 8, false);
    share(&mut s, (a, 0), (b, 0), 4).unwrap();
    share(&mut s, (a, 0), (a, 4), 4).unwrap();
    assert_eq!(s.info().free_clusters, 0);
    let wants: Vec<_> = (0..8).map(|n| (a, n)).chain((0..4).map(|n| (b, n))).collect();
    let got: Vec<u32> = s.allocate(&wants).into_iter().map(Result::unwrap).collect();
    assert!(got.iter().all(|cluster| !s.is_shared(*cluster)));
    assert_eq!(got.iter().collect::<std::collections::BTreeSet<_>>().len(), 12);
    assert_eq!((bytes_of(&mut s, a), bytes_of(&mut s, b)), (vec![1; 8], vec![1; 4]));
    assert_eq!(problems(&mut s), []);
}

#[test]
fn what_cannot_be_shared_is_refused_and_nothing_is_done() {
    let mut plain = empty(16 << 20);
    let ids = ["a", "b"].map(|name| blob(&mut plain, name, 4, true));
    let e = share(&mut plain, (ids[0], 0), (ids[1], 0), 1).unwrap_err();
    assert!(e.to_string().contains("its store was not made for that"), "{e}");
    let mut s = sharing(16 << 20);
    let (a, b) = (blob(&mut s, "a", 4, true), blob(&mut s, "b", 5000, true));
    let (thick, read_only) = (blob(&mut s, "thick", 4, false), blob(&mut s, "read-only", 4, true));
    s.set_read_only(read_only).unwrap();
    let image = s.clone_external(Uuid::from_u128(7), 4, &named("image")).unwrap();
    for (from, to, count) in [
        ((a, 0), (thick, 0), 1),
        ((a, 0), (read_only, 0), 1),
        ((image, 0), (a, 0), 1),
        ((a, 3), (b, 0), 2),
        ((a, 0), (b, 4999), 2),
        ((a, u64::MAX), (b, 0), 2),
        ((b, 0), (b, 4100), 4097),
    ] {
        let before = s.disk_mut().bytes().to_vec();
        assert!(share(&mut s, from, to, count).is_err(), "{from:?} {to:?} {count}");
        assert!(s.disk_mut().bytes() == before && s.stopped().is_none());
    }
    share(&mut s, (b, 0), (a, 0), 0).unwrap();
}

/// `incompat` of both copies of the superblock.
fn marks(store: &mut Store<MemDisk>) -> [u64; 2] {
    let bytes = store.disk_mut().bytes();
    [0, 16 * 4096].map(|copy| u64::from_le_bytes(bytes[copy + 32..copy + 40].try_into().unwrap()))
}

#[test]
fn a_store_that_nobody_has_share_clusters_is_never_marked() {
    let mut s = empty(16 << 20);
    let (a, b) = (blob(&mut s, "a", 4, true), blob(&mut s, "b", 4, true));
    fill(&mut s, a, 0, 4, 1);
    s.upgrade().unwrap();
    let a = s.snapshot(&[(a, named("s"))]).unwrap()[0];
    for count in [0, 4] {
        let refused = share(&mut s, (a, 0), (b, 0), count);
        assert!(matches!(refused, Err(Error::CannotShare { .. })), "{refused:?}");
    }
    let mut s = again(&mut s);
    fill(&mut s, a, 0, 4, 2);
    s.checkpoint().unwrap();
    assert_eq!((marks(&mut s), s.shares_clusters()), ([0, 0], false));
    s.share_clusters().unwrap();
    assert_eq!(marks(&mut s), [1, 1]);
    let mut s = again(&mut s);
    s.upgrade().unwrap();
    s.checkpoint().unwrap();
    assert_eq!((marks(&mut s), s.shares_clusters()), ([1, 1], true));
}

/// Writes fail when so many were done.
struct Failing(Option<u64>);

impl Wrap for Failing {
    fn before(&mut self, op: &'static str, offset: u64, len: u64) -> Result<(), DiskError> {
        if let Some(left) = self.0.as_mut().filter(|_| op == "write") {
            *left = left.checked_sub(1).ok_or_else(|| failed(op, offset, len))?;
        }
        Ok(())
    }
}

#[test]
fn after_a_share_that_failed_both_read_as_before_and_the_source_is_shared_until_a_load() {
    for writes in 0..2 {
        let mut made = sharing(16 << 20);
        let (a, b) = (blob(&mut made, "a", 3, true), blob(&mut made, "b", 2000, true));
        fill(&mut made, a, 0, 2, 1);
        fill(&mut made, b, 1, 2, 2);
        fill(&mut made, b, 1008, 1, 3);
        let mut s =
            Store::load(Wrapped { disk: made.close().unwrap(), with: Failing(None) }).unwrap();
        s.disk_mut().with.0 = Some(writes);
        // One of a page that goes, one of a page that comes, and some of one that stays.
        for (first, at, count) in [(2, 1008, 1), (0, 1, 3)] {
            let e = share(&mut s, (a, first), (b, at), count);
            let Err(e) = e else { continue };
            assert!(matches!(e, Error::Metadata(_)) || count == 3, "{e}");
            if matches!(e, Error::Metadata(_)) && count == 3 {
                let of = [0, 1].map(|at| s.entry(a, at).unwrap());
                assert!(of.iter().all(|of| s.is_shared(*of)));
            }
        }
        assert!(s.stopped().is_some(), "{writes}");
        assert_eq!(bytes_of(&mut s, b)[..4], [0, 2, 2, 0]);
        assert_eq!(bytes_of(&mut s, a), [1, 1, 0]);
        s.disk_mut().with.0 = None;
        let e = s.write(a, 9, &[1]);
        // What was never shared is written in its place, as ever.
        let of = s.entry(a, 0).unwrap();
        assert_eq!(e.is_err(), s.is_shared(of), "{e:?}");
    }
}

/// Makes the checksum at byte `at` of a page match.
fn seal(page: &mut [u8], at: usize) {
    let mut digest = crc_fast::Digest::new(crc_fast::CrcAlgorithm::Crc32Iscsi);
    [&page[..at], &[0; 4], &page[at + 4..]].iter().for_each(|part| digest.update(part));
    page[at..at + 4].copy_from_slice(&(digest.finalize() as u32).to_le_bytes());
}

#[test]
fn two_owners_in_a_store_that_does_not_share_are_found() {
    let mut s = sharing(16 << 20);
    let (a, b) = (blob(&mut s, "a", 3, true), blob(&mut s, "b", 3, true));
    fill(&mut s, a, 0, 2, 1);
    share(&mut s, (a, 0), (b, 0), 2).unwrap();
    s.checkpoint().unwrap();
    let mut bytes = s.disk_mut().bytes().to_vec();
    assert_eq!(Store::examine(MemDisk::from_bytes(bytes.clone()), false).unwrap().problems, []);
    for copy in [0, 16 * 4096] {
        let page: &mut [u8] = &mut bytes[copy..copy + 4096];
        assert_eq!(page[32], 1, "the bit that a program which does not know it refuses");
        page[32] = 0;
        seal(page, 8);
    }
    let found = Store::examine(MemDisk::from_bytes(bytes.clone()), false).unwrap().problems;
    assert!(found[0].cause.contains("has another owner too"), "{found:?}");
    let e = Store::load(MemDisk::from_bytes(bytes)).err().unwrap();
    assert!(matches!(e, Error::Damaged { .. }), "{e}");
}
