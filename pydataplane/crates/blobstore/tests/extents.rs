//! What was let go of in memory is read again, and is what it was or an error.

use blobstore::{
    BlobId, BlobOptions, Disk, DiskError, Error, HistoryOptions, MemDisk, PAGE_SIZE, Store,
    StoreOptions,
};
use uuid::Uuid;

const CLUSTER: u32 = 16 << 10;
/// Clusters of the blob, of two extents pages.
const SIZE: u64 = 1200;

/// A device that counts reads, and loses writes to one place.
struct Counted {
    disk: MemDisk,
    reads: u64,
    fails: bool,
    lost: Option<u64>,
}

impl Disk for Counted {
    fn size(&self) -> u64 {
        self.disk.size()
    }
    fn read(&mut self, offset: u64, buf: &mut [u8]) -> Result<(), DiskError> {
        if self.fails {
            let (len, cause) = (buf.len() as u64, "bad".to_owned());
            return Err(DiskError { op: "read", offset, len, cause, no_space: false });
        }
        self.reads += 1;
        self.disk.read(offset, buf)
    }
    fn write(&mut self, offset: u64, buf: &[u8]) -> Result<(), DiskError> {
        if self.lost == Some(offset) {
            return Ok(());
        }
        self.disk.write(offset, buf)
    }
    fn write_zeroes(&mut self, offset: u64, len: u64) -> Result<(), DiskError> {
        self.disk.write_zeroes(offset, len)
    }
    fn flush(&mut self) -> Result<(), DiskError> {
        Ok(())
    }
}

/// A store with a thin blob none of whose clusters is beside that of its neighbour.
fn store() -> (Store<Counted>, BlobId) {
    let disk = Counted { disk: MemDisk::new(64 << 20), reads: 0, fails: false, lost: None };
    let uuid = Uuid::from_u128(1);
    let options = StoreOptions { name: "s".into(), uuid, cluster_size: CLUSTER };
    let mut store = Store::create_store(disk, &options).unwrap();
    let (name, xattrs) = ("blob".into(), Default::default());
    let blob =
        BlobOptions { dif: None, name, uuid: Uuid::from_u128(2), size: SIZE, thin: true, xattrs };
    let blob = store.create(&blob).unwrap();
    let wants: Vec<_> = (0..SIZE).rev().map(|cluster| (blob, cluster)).collect();
    store.allocate(&wants).into_iter().for_each(|answer| _ = answer.unwrap());
    store.checkpoint().unwrap();
    (store, blob)
}

fn clusters(store: &mut Store<Counted>, blob: BlobId) -> Result<Vec<(u64, u32)>, Error> {
    store.clusters(blob).map(Iterator::collect)
}

/// Bytes of the device where the page with these entries is.
fn place_of(store: &mut Store<Counted>, entries: &[(u64, u32)]) -> u64 {
    let entries: Vec<u8> = entries.iter().flat_map(|(_, to)| to.to_le_bytes()).collect();
    let bytes = store.disk_mut().disk.bytes();
    let is = |page: &[u8]| page[64..].starts_with(&entries);
    let at = bytes.chunks_exact(PAGE_SIZE).rposition(is).expect("it is on the medium");
    (at * PAGE_SIZE) as u64
}

#[test]
fn few_runs_stay_and_others_are_read_again_when_they_are_wanted() {
    let (mut store, blob) = store();
    let all = clusters(&mut store, blob).unwrap();
    assert_eq!(all.len() as u64, SIZE);
    let reads = |store: &mut Store<Counted>| std::mem::take(&mut store.disk_mut().reads);
    reads(&mut store);
    // Two pages may stay.
    store.let_go(2, 16);
    assert_eq!((clusters(&mut store, blob).unwrap(), reads(&mut store)), (all.clone(), 0));
    store.let_go(1, 16);
    assert_eq!(clusters(&mut store, blob).unwrap(), all);
    assert!((1..=2).contains(&reads(&mut store)), "once each");
    assert_eq!((clusters(&mut store, blob).unwrap(), reads(&mut store)), (all.clone(), 0));
    // As many runs as clusters are few if somebody says so.
    store.let_go(0, 1008);
    assert_eq!((clusters(&mut store, blob).unwrap(), reads(&mut store)), (all.clone(), 0));
    // A look at all does not keep them, and one cluster needs one page only.
    store.let_go_all();
    for _ in 0..2 {
        let mut seen = Vec::new();
        store.each_cluster(blob, 0, |cluster, to| seen.push((cluster, to))).unwrap();
        assert_eq!(seen, all);
        assert!(reads(&mut store) > 0);
    }
    assert_eq!((store.entry(blob, 5), reads(&mut store)), (Ok(all[5].1), 1));
    assert_eq!((store.entry(blob, 6), reads(&mut store)), (Ok(all[6].1), 0));
}

#[test]
fn a_change_that_the_journal_has_is_read_from_there() {
    let (mut store, blob) = store();
    let freed = store.unmap(blob, 3, 1).unwrap();
    store.release(freed);
    let all = clusters(&mut store, blob).unwrap();
    assert_eq!(all.len() as u64, SIZE - 1);
    store.let_go_all();
    assert_eq!(clusters(&mut store, blob).unwrap(), all);
    store.let_go_all();
    store.checkpoint().unwrap();
    assert_eq!(clusters(&mut store, blob).unwrap(), all);
}

#[test]
fn what_cannot_be_read_again_fails_its_operation_and_nothing_else() {
    let (mut store, blob) = store();
    let all = clusters(&mut store, blob).unwrap();
    let options = || HistoryOptions {
        name: "snapshot".into(),
        uuid: Uuid::from_u128(3),
        xattrs: Default::default(),
    };
    store.let_go_all();
    store.disk_mut().fails = true;
    let failed = |e: &Error| matches!(e, Error::Data(_));
    assert!(clusters(&mut store, blob).is_err_and(|e| failed(&e)));
    assert!(store.unmap(blob, 0, 9).is_err_and(|e| failed(&e)));
    assert!(store.resize(blob, 3).is_err_and(|e| failed(&e)));
    assert!(store.delete(blob).is_err_and(|e| failed(&e)));
    assert!(store.allocate(&[(blob, 7)]).pop().unwrap().is_err_and(|e| failed(&e)));
    assert_eq!(store.stopped(), None);
    let live = store.snapshot(&[(blob, options())]).unwrap()[0];
    store.disk_mut().fails = false;
    assert_eq!((clusters(&mut store, blob), clusters(&mut store, live)), (Ok(all), Ok(vec![])));
}

#[test]
fn what_was_lost_or_went_bad_on_the_medium_is_not_taken_for_what_it_was() {
    let (mut store, blob) = store();
    let all = clusters(&mut store, blob).unwrap();
    let at = place_of(&mut store, &all[..1008]);
    // A write that never came to the medium: there is an older page, whole, but not the one that it was.
    store.disk_mut().lost = Some(at);
    let freed = store.unmap(blob, 3, 1).unwrap();
    store.release(freed);
    store.checkpoint().unwrap();
    store.let_go_all();
    let Err(Error::Damaged { cause, .. }) = clusters(&mut store, blob) else {
        panic!("an old page was taken");
    };
    assert_eq!(cause, "it says otherwise than when it was written");
    let check = |store: &mut Store<Counted>, repair| {
        let problems = store.check(0, repair, &[]).unwrap().problems;
        let [problem] = &problems[..] else { panic!("{problems:?}") };
        assert!(problem.cause.contains("it was let go of in memory"), "{problem:?}");
        assert!(!problem.repaired, "memory does not have it either");
    };
    check(&mut store, false);
    check(&mut store, true);
    // The other page, and other blobs, can be used.
    store.entry(blob, 1100).unwrap();
    store.disk_mut().disk.bytes_mut()[at as usize + 100] ^= 1;
    let Err(Error::Damaged { cause, .. }) = store.entry(blob, 0) else { panic!("it was read") };
    assert_eq!(cause, "its checksum does not match");
}
