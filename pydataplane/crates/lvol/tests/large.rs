//! A store of 10 TiB with 10,000 lvols all of whose clusters are mapped: how much memory it takes. Half of
//! them have their clusters in one piece, half of them each apart from its neighbours, the worst that a map
//! can be. With `VIRTLUN_LARGE` that is said to be so for clusters of 64 KiB, which takes minutes.

use bdev::{FileBdev, FileKind, FileOptions, Registry, SyncChannel};
use blobstore::{BlobOptions, Disk, DiskError, FileDisk, Store, StoreOptions};
use lvol::Lvstores;
use std::collections::BTreeMap;
use std::fs::{self, File};
use std::time::Instant;
use uuid::Uuid;

const SIZE: u64 = 10 << 40;
const LVOLS: u64 = 10_000;
/// What the issue allows for maps, and what a loaded store may take in all.
const MAPS: u64 = 64 << 20;

/// A sparse file, which is zeros, and which no power cut meets.
struct Fresh(FileDisk);

impl Disk for Fresh {
    fn size(&self) -> u64 {
        self.0.size()
    }
    fn read(&mut self, offset: u64, buf: &mut [u8]) -> Result<(), DiskError> {
        self.0.read(offset, buf)
    }
    fn write(&mut self, offset: u64, buf: &[u8]) -> Result<(), DiskError> {
        self.0.write(offset, buf)
    }
    fn write_zeroes(&mut self, _offset: u64, _len: u64) -> Result<(), DiskError> {
        Ok(())
    }
    fn flush(&mut self) -> Result<(), DiskError> {
        Ok(())
    }
}

/// Creates the store. Returns the lvols in one piece, and those in as many pieces as clusters.
fn make(file: &std::path::Path, cluster_size: u32) -> [Vec<Uuid>; 2] {
    let made = File::options().create_new(true).read(true).write(true).open(file).unwrap();
    made.set_len(SIZE).unwrap();
    let options = StoreOptions { name: "lvs0".into(), uuid: Uuid::new_v4(), cluster_size };
    let mut store = Store::create_store(Fresh(FileDisk::new(made).unwrap()), &options).unwrap();
    let info = store.info();
    let each = info.data_clusters / LVOLS;
    let mut lvols = [Vec::new(), Vec::new()];
    for (n, of) in (0..LVOLS).zip((0..2).flat_map(|of| vec![of; LVOLS as usize / 2])) {
        if n == LVOLS / 2 {
            // Each second cluster of the rest is not to be had.
            let end = info.first_data_cluster + info.data_clusters;
            let rest = end - store.info().free_clusters..end;
            _ = store.hold(rest.step_by(2).map(|cluster| cluster as u32));
        }
        let size = each / (1 + of as u64);
        let uuid = Uuid::new_v4();
        let reserved = store.reserve(size).unwrap();
        let (name, xattrs) = (format!("lvol{n}"), BTreeMap::default());
        let blob = BlobOptions { dif: None, name, uuid, size, thin: false, xattrs };
        store.create_reserved(&blob, reserved).unwrap();
        lvols[of].push(uuid);
        store.let_go(0, 0);
    }
    store.close().unwrap();
    lvols
}

/// Bytes of memory of this process that are its own.
fn memory() -> u64 {
    let status = fs::read_to_string("/proc/self/status").unwrap();
    let line = status.lines().find(|line| line.starts_with("RssAnon:")).unwrap();
    line.split_whitespace().nth(1).unwrap().parse::<u64>().unwrap() << 10
}

#[test]
fn a_full_store_of_10_tib_has_few_of_its_maps_in_memory() {
    if std::env::var("RUSTFLAGS").is_ok_and(|flags| flags.contains("sanitizer")) {
        println!("not here: a sanitizer has memory of its own");
        return;
    }
    let dir = tempfile::tempdir().unwrap();
    let file = dir.path().join("lvs0");
    let small = std::env::var("VIRTLUN_LARGE").is_ok();
    let cluster_size = if small { 64 << 10 } else { 1 << 20 };
    let [whole, apart] = make(&file, cluster_size);
    let registry = Registry::new();
    let options = FileOptions {
        name: "disk0".into(),
        path: file,
        block_size: Some(4096),
        read_only: false,
        uuid: None,
        kind: FileKind::Aio,
    };
    registry.register(FileBdev::create(options).unwrap()).unwrap();
    let lvstores = Lvstores::new(registry.clone());
    let before = memory();
    let begun = Instant::now();
    lvstores.examine("disk0").unwrap().unwrap();
    let took = begun.elapsed();
    let loaded = memory() - before;
    // All are looked at, one after the other, as by who tells the space of each.
    for uuid in whole.iter().chain(&apart) {
        let found = lvstores.ranges(&uuid.to_string(), None, 0, 1 << 20).unwrap();
        assert_eq!(found.ranges.len(), 1, "a thick volume is allocated");
    }
    let looked_at = memory() - before;
    lvstores.let_go_maps("lvs0").unwrap();
    let idle = memory() - before;
    let mut block = bdev::AlignedBuf::zeroed(4096);
    for uuid in whole.iter().step_by(500).chain(apart.iter().step_by(500)) {
        let bdev = registry.get(&uuid.to_string()).unwrap();
        let mut channel = SyncChannel::open(&*bdev).unwrap();
        channel.read(0, &mut block).unwrap();
        channel.read(bdev.geometry().num_blocks - 1, &mut block).unwrap();
    }
    let mib = |bytes: u64| bytes >> 20;
    println!(
        "clusters of {} KiB: loaded in {took:?} with {} MiB, {} MiB after a look at all, {} MiB idle",
        cluster_size >> 10,
        mib(loaded),
        mib(looked_at),
        mib(idle)
    );
    // Beside the maps: a bit for each cluster, and 1 KiB for each lvol and its bdev.
    let beside = (SIZE / u64::from(cluster_size)).div_ceil(8) + LVOLS * 1024;
    assert!(loaded < MAPS + beside, "{loaded} bytes after the load");
    assert!(looked_at < 2 * MAPS + beside, "{looked_at} bytes after a look at all");
    assert!(idle < MAPS + beside, "{idle} bytes when idle");
}
