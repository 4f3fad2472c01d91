//! What goes bad in the journal, or is hidden by it, is found: by a load, and by a check of the store
//! in use.

use blobstore::{BlobOptions, Disk, Error, MemDisk, PAGE_SIZE, Problem, Store, StoreOptions};
use std::ops::Range;
use uuid::Uuid;

fn new_store() -> Store<MemDisk> {
    let options =
        StoreOptions { name: "s".into(), uuid: Uuid::from_u128(1), cluster_size: 64 << 10 };
    Store::create_store(MemDisk::new(4 << 20), &options).unwrap()
}

fn thin(name: &str) -> BlobOptions {
    let xattrs = Default::default();
    BlobOptions { dif: None, name: name.into(), uuid: Uuid::new_v4(), size: 3, thin: true, xattrs }
}

fn number(bytes: &[u8], at: usize, len: usize) -> u64 {
    bytes[at..at + len].iter().rev().fold(0, |all, byte| all << 8 | u64::from(*byte))
}

/// Bytes of each record of the journal, by the format's document; it has not gone round.
fn records(disk: &[u8]) -> Vec<Range<usize>> {
    let page = PAGE_SIZE as u64;
    let mut at = ((number(disk, 152, 8) + number(disk, 208, 8)) * page) as usize;
    let mut found = Vec::new();
    while disk[at..].starts_with(b"VLJOURNL") {
        let pages = 1 + number(disk, at + 40, 4) as usize;
        found.push(at..at + pages * PAGE_SIZE);
        at += pages * PAGE_SIZE;
    }
    found
}

fn names<D: Disk>(store: &Store<D>) -> Vec<String> {
    store.blobs().map(|blob| blob.name).collect()
}

fn checked(store: &mut Store<MemDisk>, repair: bool) -> Vec<Problem> {
    let (mut problems, mut from) = (Vec::new(), Some(0));
    while let Some(at) = from {
        let found = store.check(at, repair, &[]).unwrap();
        problems.extend(found.problems);
        from = found.next;
    }
    problems
}

#[test]
fn a_record_that_goes_bad_under_a_store_in_use_is_found_and_no_longer_needed_after_a_repair() {
    let mut store = new_store();
    for name in ["a", "b", "c"] {
        store.create(&thin(name)).unwrap();
    }
    let whole = store.disk_mut().bytes().to_vec();
    let records = records(&whole);
    assert_eq!(records.len(), 3);
    for at in records.iter().flat_map(|record| record.clone().step_by(PAGE_SIZE)) {
        let mut store = new_store();
        for name in ["a", "b", "c"] {
            store.create(&thin(name)).unwrap();
        }
        assert_eq!(checked(&mut store, false), []);
        store.disk_mut().bytes_mut()[at + 70] ^= 1;
        let found = checked(&mut store, false);
        assert_eq!(found.len(), 1, "byte {at}: {found:?}");
        assert!(found[0].place.contains("journal") && !found[0].repaired, "{found:?}");
        assert!(checked(&mut store, true).iter().all(|problem| problem.repaired));
        assert_eq!(checked(&mut store, false), [], "byte {at}");
        let medium = MemDisk::from_bytes(store.disk_mut().bytes().to_vec());
        assert_eq!(names(&Store::load(medium).unwrap()), ["a", "b", "c"], "byte {at}");
    }
}

#[test]
fn a_record_before_the_last_that_goes_bad_is_named_and_its_successors_are_not_forgotten() {
    let mut store = new_store();
    for name in ["a", "b", "c", "d"] {
        store.create(&thin(name)).unwrap();
    }
    let whole = store.disk_mut().bytes().to_vec();
    let records = records(&whole);
    let (last, before) = records.split_last().unwrap();
    for record in before {
        for at in record.clone().step_by(PAGE_SIZE) {
            let mut bytes = whole.clone();
            bytes[at + 100] ^= 1;
            let examined = Store::examine(MemDisk::from_bytes(bytes.clone()), false).unwrap();
            let place = &examined.problems[0].place;
            let said = Store::load(MemDisk::from_bytes(bytes)).map(drop).unwrap_err();
            assert!(matches!(&said, Error::Damaged { place: p, .. } if p == place), "{said}");
            assert!(place.contains("journal record"), "{said}");
            assert!(place.ends_with(&format!("at byte {}", record.start)), "{said}");
        }
    }
    // Of the last one it cannot be told from a write that a power cut has cut short.
    for at in last.clone().step_by(PAGE_SIZE) {
        let mut bytes = whole.clone();
        bytes[at + 100] ^= 1;
        let store = Store::load(MemDisk::from_bytes(bytes)).unwrap();
        assert_eq!(names(&store), ["a", "b", "c"], "byte {at}");
    }
}

#[test]
fn a_page_that_goes_bad_is_not_taken_for_what_it_was_before_it_was_freed_and_used_anew() {
    let mut store = new_store();
    let first = store.create(&thin("first")).unwrap();
    // The journal has its root now.
    store.rename(first, "renamed").unwrap();
    let deleted = store.delete(first).unwrap();
    store.release(deleted.freed);
    store.create(&thin("second")).unwrap();
    let mut bytes = store.disk_mut().bytes().to_vec();
    assert_eq!(names(&Store::load(MemDisk::from_bytes(bytes.clone())).unwrap()), ["second"]);
    // The second one's root is in the same page: the first that is not the bitmap's.
    let root = (number(&bytes, 168, 8) as usize + 1) * PAGE_SIZE;
    assert!(bytes[root..root + PAGE_SIZE].windows(6).any(|name| name == b"second"));
    bytes[root + 100] ^= 1;
    let said = Store::load(MemDisk::from_bytes(bytes)).map(|store| names(&store)).unwrap_err();
    assert!(said.to_string().contains("metadata page 1 at byte"), "{said}");
}
