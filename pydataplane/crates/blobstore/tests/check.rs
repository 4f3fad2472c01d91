//! Metadata that went bad on the medium is found beside memory, and written anew; a power cut at any
//! point of that makes nothing worse.

use blobstore::{
    BlobOptions, Checked, Disk, DiskError, Error, HistoryOptions, MemDisk, PAGE_SIZE, Store,
    StoreOptions,
};
use proptest::prelude::*;
use proptest::sample::Index;
use std::collections::BTreeSet;
use std::sync::OnceLock;
use uuid::Uuid;

const CLUSTER: u32 = 64 << 10;
const SECTOR: usize = 512;

/// A device that writes down each write; `None`: a flush.
struct Recorder {
    now: MemDisk,
    events: Vec<Option<(u64, Vec<u8>)>>,
    /// Bytes where a page begins that cannot be read before it is written.
    unreadable: BTreeSet<u64>,
}

impl Disk for Recorder {
    fn size(&self) -> u64 {
        self.now.size()
    }
    fn read(&mut self, offset: u64, buf: &mut [u8]) -> Result<(), DiskError> {
        let len = buf.len() as u64;
        if self.unreadable.range(offset..offset + len).next().is_some() {
            let cause = "rotten".into();
            return Err(DiskError { op: "read", offset, len, cause, no_space: false });
        }
        self.now.read(offset, buf)
    }
    fn write(&mut self, offset: u64, buf: &[u8]) -> Result<(), DiskError> {
        let end = offset + buf.len() as u64;
        self.unreadable.retain(|page| !(offset..end).contains(page));
        self.events.push(Some((offset, buf.to_vec())));
        self.now.write(offset, buf)
    }
    fn write_zeroes(&mut self, offset: u64, len: u64) -> Result<(), DiskError> {
        self.write(offset, &vec![0; len as usize])
    }
    fn flush(&mut self) -> Result<(), DiskError> {
        self.events.push(None);
        Ok(())
    }
}

/// A store with all kinds of metadata pages, checkpointed, and what it holds.
fn store() -> Store<Recorder> {
    let disk =
        Recorder { now: MemDisk::new(8 << 20), events: Vec::new(), unreadable: BTreeSet::new() };
    let options =
        StoreOptions { name: "s".into(), uuid: Uuid::from_u128(1), cluster_size: CLUSTER };
    let mut s = Store::create_store(disk, &options).unwrap();
    let blob = |name: &str, size, thin, bytes| BlobOptions {
        dif: None,
        name: name.into(),
        uuid: Uuid::from_u128(bytes as u128 + 2),
        size,
        thin,
        xattrs: [("note".to_owned(), vec![7; bytes])].into(),
    };
    s.create(&blob("thick", 5, false, 100)).unwrap();
    let thin = s.create(&blob("thin", 300 * 1008, true, 3000)).unwrap();
    for answer in s.allocate(&[(thin, 0), (thin, 2000), (thin, 300 * 1008 - 1)]) {
        answer.unwrap();
    }
    let named = HistoryOptions {
        name: "snapshot".into(),
        uuid: Uuid::from_u128(9),
        xattrs: Default::default(),
    };
    let thin = s.snapshot(&[(thin, named)]).unwrap()[0];
    s.allocate(&[(thin, 1)]).pop().unwrap().unwrap();
    s.checkpoint().unwrap();
    s
}

/// All that a store says of its blobs.
fn said<D: Disk>(store: &mut Store<D>) -> Vec<String> {
    let blobs: Vec<_> = store.blobs().collect();
    let mut of = |blob: blobstore::BlobInfo| {
        let clusters: Vec<_> = store.clusters(blob.id).unwrap().collect();
        format!("{blob:?} {clusters:?}")
    };
    blobs.into_iter().map(&mut of).collect()
}

fn checked(store: &mut Store<Recorder>, repair: bool) -> Checked {
    let mut all = Checked { next: Some(0), ..Checked::default() };
    while let Some(from) = all.next {
        let step = store.check(from, repair, &[]).unwrap();
        all.pages += step.pages;
        all.problems.extend(step.problems);
        all.next = step.next;
    }
    all
}

#[test]
fn each_page_that_cannot_be_read_is_found_and_repaired_and_one_superblock_is_enough() {
    let mut s = store();
    let before = said(&mut s);
    for at in in_use() {
        s.disk_mut().unreadable.insert(*at);
        let found = checked(&mut s, false).problems;
        let [one] = &found[..] else { panic!("{at}: {found:?}") };
        assert!(one.place.ends_with(&format!("at byte {at}")), "{at}: {one:?}");
        assert!(one.cause.starts_with("it cannot be read: "), "{one:?}");
        let mended = checked(&mut s, true).problems;
        assert!(mended.len() == 1 && mended[0].repaired, "{at}: {mended:?}");
        assert_eq!(checked(&mut s, false).problems, [], "{at}");
    }
    for at in [0, 16 * PAGE_SIZE as u64] {
        let now = MemDisk::from_bytes(s.disk_mut().now.bytes().to_vec());
        let disk = Recorder { now, events: Vec::new(), unreadable: BTreeSet::from([at]) };
        assert_eq!(said(&mut Store::load(disk).unwrap()), before, "{at}");
    }
    let now = MemDisk::from_bytes(s.disk_mut().now.bytes().to_vec());
    let unreadable = BTreeSet::from([0, 16 * PAGE_SIZE as u64]);
    let disk = Recorder { now, events: Vec::new(), unreadable };
    assert!(matches!(Store::load(disk), Err(Error::Data(_))));
}

/// Where the pages and superblock copies are that [`store`] uses, in bytes.
fn in_use() -> &'static [u64] {
    static FOUND: OnceLock<Vec<u64>> = OnceLock::new();
    FOUND.get_or_init(|| {
        let bytes = store().disk_mut().now.bytes().to_vec();
        let ruined = |at: usize| {
            let mut bytes = bytes.clone();
            bytes[at..at + PAGE_SIZE].fill(0xee);
            let found = Store::examine(MemDisk::from_bytes(bytes), false);
            !found.is_ok_and(|found| found.problems.is_empty())
        };
        (0..2 << 20).step_by(PAGE_SIZE).filter(|at| ruined(*at)).map(|at| at as u64).collect()
    })
}

#[test]
fn each_page_that_goes_bad_is_found_and_repaired() {
    let mut s = store();
    let before = said(&mut s);
    let clean = checked(&mut s, false);
    assert_eq!(clean.problems, []);
    let used = in_use();
    assert_eq!(used.len() as u64, clean.pages + 2, "two copies of the superblock");
    for at in used {
        for (from, to) in [(0, PAGE_SIZE), (100, 101), (PAGE_SIZE - 1, PAGE_SIZE)] {
            let range = *at as usize + from..*at as usize + to;
            s.disk_mut().now.bytes_mut()[range].iter_mut().for_each(|byte| *byte ^= 0x5a);
            let place = format!("at byte {at}");
            let found = checked(&mut s, false);
            assert_eq!(found.problems.len(), 1, "{place}: {found:?}");
            assert!(found.problems[0].place.ends_with(&place) && !found.problems[0].repaired);
            let examined =
                Store::examine(MemDisk::from_bytes(s.disk_mut().now.bytes().to_vec()), false);
            let examined = examined.unwrap().problems;
            assert_eq!(examined, found.problems, "{place}");
            let mended = checked(&mut s, true);
            assert!(mended.problems.iter().all(|p| p.repaired) && mended.problems.len() == 1);
            assert_eq!(checked(&mut s, true).problems, [], "{place}");
            let loaded = Store::load(MemDisk::from_bytes(s.disk_mut().now.bytes().to_vec()));
            assert_eq!(said(&mut loaded.unwrap()), before, "{place}");
        }
        assert_eq!(said(&mut s), before);
    }
}

#[test]
fn a_store_that_is_not_loaded_has_a_copy_of_its_superblock_mended_and_nothing_else() {
    let mut s = store();
    let before = said(&mut s);
    let whole = s.disk_mut().now.bytes().to_vec();
    let recorder = |bytes: Vec<u8>| Recorder {
        now: MemDisk::from_bytes(bytes),
        events: Vec::new(),
        unreadable: BTreeSet::new(),
    };
    for at in in_use() {
        let mut bytes = whole.clone();
        bytes[*at as usize + 200] ^= 1;
        let mut disk = recorder(bytes.clone());
        let found = Store::examine(&mut disk, true).unwrap().problems;
        let [one] = &found[..] else { panic!("{at}: {found:?}") };
        let is_superblock = one.place.starts_with("superblock copy");
        assert_eq!(one.repaired, is_superblock, "{one:?}");
        if !is_superblock {
            assert!(disk.events.is_empty() && disk.now.bytes() == bytes, "{one:?}");
            // With a copy of the superblock gone as well nothing is written either.
            bytes[100] ^= 1;
            let mut disk = recorder(bytes);
            let found = Store::examine(&mut disk, true).unwrap().problems;
            assert!(found.len() == 2 && disk.events.is_empty(), "{found:?}");
            continue;
        }
        assert_eq!(disk.now.bytes(), whole, "{one:?}");
        assert!(disk.events.last().unwrap().is_none(), "it is durable");
        // A power cut in the middle of it.
        for events in 0..=disk.events.len() {
            for chance in 0..8 {
                let after = cut(&bytes, &disk.events[..events], chance << 61 | chance);
                assert_eq!(said(&mut Store::load(after).unwrap()), before, "{one:?}");
            }
        }
    }
}

/// Whatever of the writes since the last flush the medium took.
fn cut(before: &[u8], events: &[Option<(u64, Vec<u8>)>], chance: u64) -> MemDisk {
    let last = events.iter().rposition(Option::is_none).map_or(0, |at| at + 1);
    let mut bytes = before.to_vec();
    let mut state = chance | 1;
    for (n, (offset, data)) in events.iter().enumerate().filter_map(|(n, e)| Some((n, e.as_ref()?)))
    {
        for (i, sector) in data.chunks(SECTOR).enumerate() {
            state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
            if n < last || state >> 63 == 0 {
                let at = *offset as usize + i * SECTOR;
                bytes[at..at + sector.len()].copy_from_slice(sector);
            }
        }
    }
    MemDisk::from_bytes(bytes)
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(24))]

    #[test]
    fn a_power_cut_during_repair_makes_nothing_worse(
        damaged in prop::collection::vec((any::<Index>(), 0..PAGE_SIZE, 1..=255u8), 1..5),
        chance in any::<u64>(),
    ) {
        let mut s = store();
        let before = said(&mut s);
        // One copy of the superblock has to be left, or it is no store any more.
        let used: Vec<_> = in_use().iter().copied().filter(|at| *at != 0).collect();
        for (which, byte, change) in damaged {
            let at = *which.get(&used) as usize + byte;
            s.disk_mut().now.bytes_mut()[at] ^= change;
        }
        let places = |problems: &[blobstore::Problem]| -> BTreeSet<String> {
            problems.iter().map(|p| p.place.clone()).collect()
        };
        let bad = places(&checked(&mut s, false).problems);
        let medium = s.disk_mut().now.bytes().to_vec();
        s.disk_mut().events.clear();
        checked(&mut s, true);
        let events = std::mem::take(&mut s.disk_mut().events);
        for at in 0..=events.len() {
            let after = cut(&medium, &events[..at], chance.wrapping_add(at as u64));
            let found = Store::examine(MemDisk::from_bytes(after.bytes().to_vec()), false).unwrap();
            let worse: Vec<_> =
                places(&found.problems).difference(&bad).filter(|p| !p.starts_with("superblock")).cloned().collect();
            prop_assert!(worse.is_empty(), "after {at} of {}: {worse:?}", events.len());
            match Store::load(after) {
                Ok(mut loaded) => prop_assert_eq!(said(&mut loaded), before.clone()),
                Err(e) => prop_assert!(matches!(e, Error::Damaged { .. }) && at < events.len(), "{e}"),
            }
        }
    }
}
