//! Foreign and damaged devices: whatever the metadata says, with checksums that match, a load ends
//! with a store or an error, and so does everything that is then done with the store.

use std::collections::BTreeMap;
use std::sync::OnceLock;

use blobstore::{
    BlobId, BlobOptions, Dif, DifType, Disk, Error, HistoryOptions, MemDisk, PAGE_SIZE, Store,
    StoreOptions,
};
use proptest::prelude::*;
use uuid::Uuid;

const CLUSTER: u32 = 64 << 10;
/// Bytes of the device.
const DEVICE: usize = 8 << 20;
/// Bytes that hold all metadata, and some data.
const METADATA: usize = 2 << 20;

fn crc(parts: &[&[u8]]) -> [u8; 4] {
    let mut digest = crc_fast::Digest::new(crc_fast::CrcAlgorithm::Crc32Iscsi);
    parts.iter().for_each(|part| digest.update(part));
    (digest.finalize() as u32).to_le_bytes()
}

/// Makes the checksum at byte `at` of a page match.
fn seal(page: &mut [u8], at: usize) {
    let sum = crc(&[&page[..at], &[0; 4], &page[at + 4..]]);
    page[at..at + 4].copy_from_slice(&sum);
}

/// Makes every checksum of the device match: superblocks, pages, journal records.
fn seal_all(disk: &mut [u8]) {
    let pages = METADATA / PAGE_SIZE;
    for at in (0..pages).map(|n| n * PAGE_SIZE) {
        let page = &mut disk[at..at + PAGE_SIZE];
        match &page[..4] {
            b"VLPG" => seal(page, 4),
            _ if page.starts_with(b"VLBLOBST") => seal(page, 8),
            _ => {}
        }
    }
    for n in 0..pages {
        let at = n * PAGE_SIZE;
        if !disk[at..].starts_with(b"VLJOURNL") {
            continue;
        }
        let count = u32::from_le_bytes(disk[at + 40..at + 44].try_into().unwrap()) as usize;
        let images = at + PAGE_SIZE..at + PAGE_SIZE * (1 + count.min(1008));
        if let Some(images) = disk.get(images) {
            let sum = crc(&[images]);
            disk[at + 12..at + 16].copy_from_slice(&sum);
        }
        seal(&mut disk[at..at + PAGE_SIZE], 8);
    }
}

fn blob(serial: u32, size: u64, thin: bool) -> BlobOptions {
    BlobOptions {
        dif: None,
        name: format!("b{serial}"),
        uuid: Uuid::from_u128(serial.into()),
        size,
        thin,
        xattrs: Default::default(),
    }
}

/// A copy of [`make_sample`]'s, of which only the metadata area holds something.
fn sample(shares: bool) -> Vec<u8> {
    static SAMPLES: [OnceLock<Vec<u8>>; 2] = [OnceLock::new(), OnceLock::new()];
    let whole = SAMPLES[usize::from(shares)].get_or_init(|| make_sample(shares));
    let mut disk = vec![0; DEVICE];
    disk[..METADATA].copy_from_slice(&whole[..METADATA]);
    disk
}

/// A store with blobs, xattrs inline and in pages, and records in its journal; one that shares clusters has some with
/// several owners, in its pages and in its journal.
fn make_sample(shares: bool) -> Vec<u8> {
    let options =
        StoreOptions { name: "lvs".into(), uuid: Uuid::from_u128(1), cluster_size: CLUSTER };
    let mut store = Store::create_store(MemDisk::new(DEVICE), &options).unwrap();
    let thick = store.create(&blob(1, 9, false)).unwrap();
    let thin = store.create(&blob(2, 300_000, true)).unwrap();
    store.create(&blob(3, 0, true)).unwrap();
    for n in 0..6 {
        store.set_xattr(thin, &format!("user.{n}"), &[n; 900]).unwrap();
    }
    let data = [7; PAGE_SIZE];
    store.write(thick, 0, &data).unwrap();
    store.write(thin, 0, &data).unwrap();
    store.write(thin, 299_000 * u64::from(CLUSTER), &data).unwrap();
    if shares {
        store.share_clusters().unwrap();
        share(&mut store, (thick, 0), (thin, 7), 3).unwrap();
    }
    store.checkpoint().unwrap();
    let gone = store.create(&blob(4, 2, false)).unwrap();
    let deleted = store.delete(gone).unwrap();
    store.release(deleted.freed);
    store.rename(thick, "other").unwrap();
    let now = store.snapshot(&[(thin, named("snap"))]).unwrap()[0];
    let freed = store.unmap(now, 0, 1).unwrap();
    store.release(freed);
    store.clone_of(thin, &named("clone")).unwrap();
    store.clone_external(Uuid::from_u128(9), 200, &named("outside")).unwrap();
    if shares {
        share(&mut store, (now, 7), (now, 2000), 2).unwrap();
    }
    store.disk_mut().bytes().to_vec()
}

fn named(name: &str) -> HistoryOptions {
    let uuid = Uuid::new_v4();
    HistoryOptions { name: name.into(), uuid, xattrs: BTreeMap::new() }
}

/// Has clusters of the first be the second's, too.
fn share<D: Disk>(
    store: &mut Store<D>,
    (from, first): (BlobId, u64),
    (to, at): (BlobId, u64),
    count: u64,
) -> Result<(), Error> {
    store.share(from, first, to, at, count).map(|shared| store.release(shared.freed))
}

/// Everything that can be done with a store; what fails, fails with an error.
fn use_all<D: Disk>(mut store: Store<D>) {
    let ids: Vec<BlobId> = store.blobs().map(|b| b.id).collect();
    let mut page = [0; PAGE_SIZE];
    for id in &ids {
        let size = store.blob(*id).unwrap().size;
        store.clusters(*id).unwrap().count();
        for name in store.xattrs(*id).unwrap() {
            store.xattr(*id, &name).unwrap();
        }
        for cluster in [0, size / 2, size.saturating_sub(1)] {
            _ = store.read(*id, cluster * u64::from(CLUSTER), &mut page);
            _ = store.write(*id, cluster * u64::from(CLUSTER), &page);
        }
        for to in &ids {
            _ = share(&mut store, (*id, 0), (*to, 6), 5);
        }
        _ = store.set_xattr(*id, "more", &[1; 3000]);
        _ = store.resize(*id, size + 3).map(|freed| store.release(freed));
        _ = store.unmap(*id, 0, size).map(|freed| store.release(freed));
        _ = store.snapshot(&[(*id, named(&format!("snap{}", store.blobs().count())))]);
        _ = store.clone_of(*id, &named(&format!("clone{}", store.blobs().count())));
    }
    let ids: Vec<BlobId> = store.blobs().map(|b| b.id).collect();
    for id in &ids {
        if let Ok(lacking) = store.lacking(*id, false, 0, 8) {
            _ = store.supply(*id, &lacking);
        }
        _ = store.detach(*id, false);
    }
    _ = store.create(&blob(77, 5, false));
    for id in ids {
        _ = store.resize(id, 1).map(|freed| store.release(freed));
        _ = store.delete(id).map(|deleted| store.release(deleted.freed));
    }
    store.info();
    _ = store.rename_store("again");
    _ = store.checkpoint();
    _ = store.close();
}

/// A change of the device: where, by preference in what is used, and to what.
fn change() -> impl Strategy<Value = (usize, usize, Vec<u8>)> {
    let number = prop_oneof![
        4 => 0u64..40,
        2 => prop::sample::select(vec![
            127, 128, 255, 256, 1007, 1008, 4096, 65535, 1 << 31, u64::from(u32::MAX) - 1,
            u64::from(u32::MAX), 1 << 32, 1 << 52, 1 << 63, u64::MAX - 1, u64::MAX,
        ]),
        1 => any::<u64>(),
    ];
    let bytes = (number, prop::sample::select(vec![1usize, 2, 4, 8]))
        .prop_map(|(number, width)| number.to_le_bytes()[..width].to_vec());
    let at = prop_oneof![3 => 0usize..320, 1 => 320usize..PAGE_SIZE];
    (any::<prop::sample::Index>().prop_map(|i| i.index(1 << 16)), at, bytes)
}

/// Pages of `disk` that hold metadata.
fn used(disk: &[u8]) -> Vec<usize> {
    let magic = |n: &usize| {
        let page = &disk[n * PAGE_SIZE..];
        [&b"VLPG"[..], b"VLBLOBST", b"VLJOURNL"].iter().any(|m| page.starts_with(m))
    };
    (0..METADATA / PAGE_SIZE).filter(magic).collect()
}

proptest! {
    #![proptest_config(ProptestConfig {
        cases: 500,
        failure_persistence: None,
        ..ProptestConfig::default()
    })]

    #[test]
    fn a_device_with_any_metadata_is_loaded_or_refused(
        changes in prop::collection::vec(change(), 1..5),
        both in any::<bool>(),
        sealed in prop::bool::weighted(0.9),
        shares in any::<bool>(),
    ) {
        let mut disk = sample(shares);
        let used = used(&disk);
        for (page, at, bytes) in &changes {
            let page = used[page % used.len()];
            // The two superblocks alike, or the other one is taken.
            let pages = match (both, page) {
                (true, 0 | 16) => vec![0, 16],
                _ => vec![page],
            };
            for page in pages {
                let from = page * PAGE_SIZE + at;
                let to = (from + bytes.len()).min((page + 1) * PAGE_SIZE);
                disk[from..to].copy_from_slice(&bytes[..to - from]);
            }
        }
        if sealed {
            seal_all(&mut disk);
        }
        _ = Store::probe(&mut MemDisk::from_bytes(disk.clone()));
        if let Ok(store) = Store::load(MemDisk::from_bytes(disk)) {
            use_all(store);
        }
    }

    #[test]
    fn a_device_cut_anywhere_is_loaded_or_refused(len in 0usize..=DEVICE, shares in any::<bool>()) {
        let mut disk = sample(shares);
        disk.truncate(len);
        match Store::load(MemDisk::from_bytes(disk)) {
            Ok(store) => use_all(store),
            Err(why) => prop_assert!(
                matches!(why, Error::NotAStore { .. } | Error::Truncated { .. }),
                "{why}"
            ),
        }
    }
}

#[test]
fn the_sample_is_a_store_and_sealing_it_changes_nothing() {
    for shares in [false, true] {
        let disk = sample(shares);
        let mut sealed = disk.clone();
        seal_all(&mut sealed);
        assert!(disk == sealed);
        let store = Store::load(MemDisk::from_bytes(disk)).unwrap();
        assert_eq!((store.blobs().count(), store.info().shares_clusters), (6, shares));
        use_all(store);
    }
}

#[test]
fn every_field_at_its_limits_is_loaded_or_refused() {
    const LIMITS: [u64; 9] =
        [0, 1, 3, 20, 1 << 31, u32::MAX as u64, 1 << 63, u64::MAX - 1, u64::MAX];
    let whole = sample(true);
    // One page of each kind, by magic and the kind of a metadata page.
    let kind = |page: &usize| (whole[page * PAGE_SIZE + 2], whole[page * PAGE_SIZE + 8]);
    let mut pages = used(&whole);
    pages.sort_by_key(|page| (whole[page * PAGE_SIZE + 2] == b'P', kind(page)));
    pages.dedup_by_key(|page| match whole[*page * PAGE_SIZE + 2] {
        b'P' => kind(page),
        magic => (magic, 0),
    });
    assert_eq!(pages.len(), 2 + 5, "superblock, record; bitmap, root, extents, index, xattrs");
    let mut loaded = 0;
    for page in pages {
        for (at, limit) in (12..320).step_by(4).flat_map(|at| LIMITS.map(|limit| (at, limit))) {
            let width = if at < 64 { 4 } else { 8 };
            let mut disk = sample(true);
            // Both superblocks alike, or the other one is taken.
            for page in [page, if page == 0 { 16 } else { page }] {
                let from = page * PAGE_SIZE + at;
                disk[from..from + width].copy_from_slice(&limit.to_le_bytes()[..width]);
            }
            seal_all(&mut disk);
            if let Ok(store) = Store::load(MemDisk::from_bytes(disk)) {
                loaded += 1;
                use_all(store);
            }
        }
    }
    assert!(loaded > 0);
}

#[test]
fn flags_of_protection_information_that_cannot_be_are_refused() {
    let options =
        StoreOptions { name: "lvs".into(), uuid: Uuid::from_u128(1), cluster_size: CLUSTER };
    let mut store = Store::create_store(MemDisk::new(DEVICE), &options).unwrap();
    let dif = Some(Dif { kind: DifType::Type1, large_blocks: true });
    let id = store.create(&BlobOptions { dif, ..blob(1, 3, true) }).unwrap();
    store.snapshot(&[(id, named("snap"))]).unwrap();
    store.create(&blob(2, 3, true)).unwrap();
    store.checkpoint().unwrap();
    let disk = store.disk_mut().bytes().to_vec();
    // Thin, of type 1, with blocks of 4096 bytes; the snapshot is read-only and one as well.
    let flags = |at: usize| disk[at + 168..at + 172].try_into().map(u32::from_le_bytes).unwrap();
    let pages = || {
        (0..METADATA / PAGE_SIZE)
            .map(|n| n * PAGE_SIZE)
            .filter(|at| disk[*at..].starts_with(b"VLPG"))
    };
    let the = |wanted: u32| {
        let [at] = pages().filter(|at| flags(*at) == wanted).collect::<Vec<_>>()[..] else {
            panic!("there is not one root page with the flags {wanted}")
        };
        at
    };
    let (live, plain) = (the(1 | 32 | 128), the(1));
    assert!(pages().any(|at| flags(at) == 1 | 2 | 4 | 32 | 128));
    let refused = |at: usize, flags: u32| {
        let mut disk = disk.clone();
        disk[at + 168..at + 172].copy_from_slice(&flags.to_le_bytes());
        seal_all(&mut disk);
        match Store::load(MemDisk::from_bytes(disk)) {
            Err(Error::Damaged { cause, .. }) => Some(cause),
            Err(e) => panic!("{e}"),
            Ok(_) => None,
        }
    };
    assert_eq!(refused(live, 1 | 32 | 128), None);
    assert_eq!(refused(plain, 1 | 64), None);
    for (at, flags, why) in [
        (live, 1 | 32 | 64 | 128, "its flags are not possible together"),
        (plain, 1 | 128, "its flags are not possible together"),
        (plain, 1 | 16 | 32, "its flags are not possible together"),
        (live, 1, "its parent has other protection information"),
        (live, 1 | 64 | 128, "its parent has other protection information"),
        (live, 1 | 32, "its parent has other protection information"),
    ] {
        let told = refused(at, flags).unwrap_or_else(|| panic!("{flags} is loaded"));
        assert!(told.contains(why), "{flags}: {told}");
    }
}
