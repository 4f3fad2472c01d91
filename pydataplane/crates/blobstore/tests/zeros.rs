//! Clusters that are known to read as zeros: a first write to one writes none, and nobody is ever shown
//! what another one had there, whatever fails and whenever the power does.

use crate::simulator::device::{
    Device, Failed, Fault, Instant, Left, Plan, Rng, SECTOR, WAYS, Zeros,
};
use crate::simulator::model::CLUSTER;
use crate::simulator::run::Base;
use blobstore::{BlobId, BlobOptions, Disk, DiskError, Freed, Run, Store};
use uuid::Uuid;

/// What the former owner of all clusters wrote.
const SECRET: u8 = 0x77;
const BOTH: Zeros = Zeros { unmapped: true, told: true };

thread_local! {
    static BASE: Base = Base::new(2);
}

fn device(zeros: Zeros) -> Device {
    let base = BASE.with(Base::clone);
    let mut at = base.instant.clone();
    at.zeros = zeros;
    Device::new(at, base.metadata, base.journal.clone(), Rng::new(1))
}

fn thin(store: &mut Store<Device>, name: &str) -> BlobId {
    let (name, uuid, xattrs) = (name.to_owned(), Uuid::new_v4(), Default::default());
    store.create(&BlobOptions { name, uuid, size: 60, thin: true, xattrs, dif: None }).unwrap()
}

/// A store of which another had all clusters, durably, and lost them, durably; and what he lost.
fn lost(device: &Device) -> (Store<Device>, Freed) {
    let mut store = Store::load(device.clone()).unwrap();
    let blob = thin(&mut store, "former");
    let all = (store.info().free_clusters * CLUSTER) as usize;
    store.write(blob, 0, &vec![SECRET; all]).unwrap();
    store.sync().unwrap();
    let freed = store.delete(blob).unwrap().freed;
    (store, freed)
}

/// The same, with all unmapped and free.
fn unmapped(device: &Device) -> Store<Device> {
    let (mut store, freed) = lost(device);
    freed.runs().iter().for_each(|run| store.discard(*run).unwrap());
    store.release(freed);
    store
}

fn known(store: &Store<Device>) -> u64 {
    let info = store.info();
    let all = info.first_data_cluster..info.first_data_cluster + info.data_clusters;
    all.filter(|cluster| store.is_known_zero(*cluster as u32)).count() as u64
}

/// Writes a sector to each of the first `count` clusters of a blob.
fn write(store: &mut Store<Device>, blob: BlobId, count: u64) {
    for cluster in 0..count {
        store.write(blob, cluster * CLUSTER + 4096, &[1; SECTOR]).unwrap();
    }
}

/// Whether nothing but zeros and what [`write`] wrote is in any blob.
fn shows_no_secret(store: &mut Store<Device>) {
    let blobs: Vec<_> = store.blobs().collect();
    for blob in blobs {
        let mut bytes = vec![0; (blob.size * CLUSTER) as usize];
        store.read(blob.id, 0, &mut bytes).unwrap();
        let strange = bytes.iter().position(|byte| !matches!(byte, 0 | 1));
        assert_eq!(strange, None, "in {}", blob.name);
    }
}

/// Loads what a power cut left, which shows nobody the secret, and has a blob write to all clusters.
fn goes_on_after(at: &Instant, left: Left, seed: u64) {
    let device = device(BOTH);
    device.set(at.after_power_cut(left, &mut Rng::new(seed)));
    let mut store = Store::load(device.clone()).unwrap();
    shows_no_secret(&mut store);
    let blob = thin(&mut store, "later");
    let free = store.info().free_clusters;
    write(&mut store, blob, free);
    shows_no_secret(&mut store);
    store.sync().unwrap();
    device.set(device.instant().after_power_cut(Left::Nothing, &mut Rng::new(seed)));
    shows_no_secret(&mut Store::load(device).unwrap());
}

/// After each access of `f`, and each way in which a power cut leaves what was not flushed.
fn survives_power_cuts(device: &Device, f: impl FnOnce()) {
    device.watch();
    f();
    let seen = device.seen();
    assert!(!seen.is_empty());
    for (n, at) in seen.iter().enumerate() {
        for (way, left) in WAYS.into_iter().enumerate() {
            if !at.pending.is_empty() || left == Left::Nothing {
                goes_on_after(at, left, (n * WAYS.len() + way) as u64);
            }
        }
    }
}

/// Bytes of the longest write that was not flushed, after the first `skip` ones.
fn longest_write(device: &Device, skip: usize) -> usize {
    device.instant().pending.iter().skip(skip).map(|write| write.len).max().unwrap_or(0)
}

#[test]
fn a_first_write_writes_no_zeros_where_there_are_some() {
    let device = device(BOTH);
    let mut store = unmapped(&device);
    assert_eq!(known(&store), store.info().free_clusters);
    let blob = thin(&mut store, "blob");
    store.sync().unwrap();
    write(&mut store, blob, 9);
    assert!(longest_write(&device, 0) < CLUSTER as usize);
    shows_no_secret(&mut store);
    assert_eq!(known(&store), store.info().free_clusters);

    // What it is given back is not known before it was unmapped again.
    let freed = store.unmap(blob, 0, 9).unwrap();
    let first = freed.runs()[0];
    store.release(freed);
    assert_eq!(known(&store), store.info().free_clusters - 9);
    store.discard(Run { first: first.first, count: 1 }).unwrap();
    assert_eq!(known(&store), store.info().free_clusters - 8);
}

#[test]
fn what_an_unmap_leaves_is_known_only_where_it_is_zeros() {
    for zeros in [Zeros { unmapped: false, told: false }, Zeros { unmapped: false, told: true }] {
        let device = device(zeros);
        let mut store = unmapped(&device);
        assert_eq!(known(&store), 0);
        let blob = thin(&mut store, "blob");
        write(&mut store, blob, 9);
        assert_eq!(longest_write(&device, 0), CLUSTER as usize);
        shows_no_secret(&mut store);
    }
}

#[test]
fn an_unmap_that_failed_or_did_a_part_leaves_nothing_known() {
    let device = device(BOTH);
    let (mut store, freed) = lost(&device);
    device.plan(Some(Plan { fault: Fault::Write, after: 0, times: 1 }));
    let run = freed.runs()[0];
    assert!(store.discard(run).is_err());
    assert_eq!(known(&store), 0);
    // Of what was known before, too.
    store.discard(run).unwrap();
    assert_eq!(known(&store), run.count);
    device.plan(Some(Plan { fault: Fault::Write, after: 0, times: 1 }));
    assert!(store.discard(run).is_err());
    assert_eq!(known(&store), 0);
    store.release(freed);
    let blob = thin(&mut store, "blob");
    survives_power_cuts(&device, || write(&mut store, blob, 2));
    shows_no_secret(&mut store);
}

#[test]
fn a_power_cut_that_takes_an_unmap_back_shows_nobody_what_was_there() {
    let device = device(BOTH);
    let mut store = unmapped(&device);
    let blob = thin(&mut store, "blob");
    survives_power_cuts(&device, || {
        write(&mut store, blob, 5);
        store.sync().unwrap();
        write(&mut store, blob, 7);
        // A snapshot makes all of it final, and so does what is durable at once.
        let mut batch = store.batch();
        assert!(store.add_allocation(&mut batch, blob, 8).unwrap());
        batch.set_durable();
        assert_eq!(store.commit_batch(batch).allocated.unwrap().len(), 1);
    });
}

#[test]
fn an_allocation_that_is_durable_at_once_has_its_zeros_durable_first() {
    let device = device(BOTH);
    let (mut store, freed) = lost(&device);
    let blob = thin(&mut store, "blob");
    for run in freed.runs() {
        store.discard(*run).unwrap();
    }
    store.release(freed);
    survives_power_cuts(&device, || {
        let mut batch = store.batch();
        assert!(store.add_allocation(&mut batch, blob, 0).unwrap());
        assert_eq!(batch.filled(), 0);
        batch.set_durable();
        assert_eq!(store.commit_batch(batch).allocated.unwrap().len(), 1);
    });
    // Of a process that ended and a load that found holes, the same.
    drop(store);
    let mut store = Store::load(device.clone()).unwrap();
    assert_ne!(known(&store), 0);
    survives_power_cuts(&device, || {
        let mut batch = store.batch();
        assert!(store.add_allocation(&mut batch, blob, 1).unwrap());
        batch.set_durable();
        assert_eq!(store.commit_batch(batch).allocated.unwrap().len(), 1);
    });
}

#[test]
fn what_was_written_but_never_durably_a_blob_s_is_not_taken_for_zeros_after_a_power_cut() {
    let device = device(BOTH);
    let mut store = unmapped(&device);
    let blob = thin(&mut store, "blob");
    store.sync().unwrap();
    let free = store.info().free_clusters;
    for cluster in 0..9 {
        store.write(blob, cluster * CLUSTER, &[SECRET; SECTOR]).unwrap();
    }
    drop(store);
    // All of it is on the medium, and yet it is of an earlier boot.
    device.set(device.instant().after_power_cut(Left::All, &mut Rng::new(1)));
    let mut store = Store::load(device.clone()).unwrap();
    assert_eq!((store.info().free_clusters, known(&store)), (free, free - 9));
    write(&mut store, blob, free);
    shows_no_secret(&mut store);
}

#[test]
fn after_a_failed_flush_nothing_is_known_whoever_asked_for_it() {
    for failed in [Failed::Kept, Failed::LostReadable, Failed::Lost, Failed::Half] {
        for when in 0..3 {
            let device = device(BOTH);
            let mut store = unmapped(&device);
            let blob = thin(&mut store, "blob");
            // The loss is durable, as is the new blob: the unmap is not, as far as the device knows.
            let runs = [Run { first: store.info().first_data_cluster, count: 20 }];
            store.discard(runs[0]).unwrap();
            let fails = || {
                device.plan(Some(Plan { fault: Fault::Flush(failed), after: 0, times: 1 }));
                assert!(device.clone().flush().is_err());
                device.plan(None);
            };
            let mut batch = store.batch();
            match when {
                // Before a cluster is taken, or after that.
                0 => fails(),
                _ => assert!(store.add_allocation(&mut batch, blob, 0).unwrap()),
            }
            match when {
                0 => assert!(store.add_allocation(&mut batch, blob, 0).unwrap()),
                1 => fails(),
                // And something else was learnt since.
                _ => {
                    fails();
                    store.discard(Run { first: runs[0].first + 19, count: 1 }).unwrap();
                }
            }
            assert!(known(&store) <= 1);
            let before = device.instant().pending.len();
            assert_eq!(store.commit_batch(batch).allocated.unwrap().len(), 1);
            // The zeros of this allocation were written after the failure.
            let longest = longest_write(&device, before);
            assert_eq!(longest, CLUSTER as usize, "{failed:?}, {when}");
            write(&mut store, blob, 1);
            store.sync().unwrap();
            let at = device.instant();
            goes_on_after(&at, Left::Nothing, 1);

            // Nor is it by the next one that loads the store in this boot.
            drop(store);
            let store = Store::load_durable(device.clone()).unwrap();
            assert_eq!(known(&store), 0);
        }
    }
}

#[test]
fn a_store_that_was_loaded_as_stopped_knows_nothing() {
    let device = device(BOTH);
    drop(unmapped(&device));
    let cause = "it failed".into();
    let why = DiskError { op: "flush", offset: 0, len: 0, cause, no_space: false };
    assert_eq!(known(&Store::load_stopped(device.clone(), why).unwrap()), 0);
    assert_ne!(known(&Store::load(device).unwrap()), 0);
}

#[test]
fn clusters_that_somebody_may_be_writing_to_are_not_known() {
    let device = device(BOTH);
    let mut store = unmapped(&device);
    let free = known(&store);
    // Reserved, zeroed by halves elsewhere, and given back.
    let reserved = store.reserve(5).unwrap();
    assert_eq!(known(&store), free - 5);
    store.unreserve(reserved);
    assert_eq!(known(&store), free - 5);
    // Free for a store that is loaded, but in use.
    drop(store);
    let mut store = Store::load(device).unwrap();
    assert_eq!(known(&store), free);
    let first = store.info().first_data_cluster as u32;
    let held = store.hold([first, first + 2]);
    assert_eq!(known(&store), free - 2);
    store.release(held);
    assert_eq!(known(&store), free - 2);
}

#[test]
fn of_a_cluster_that_has_zeros_in_part_nothing_is_known() {
    let device = device(BOTH);
    drop(unmapped(&device));
    let first = BASE.with(|base| base.first_data);
    let mut at = device.instant();
    // The last page of the first, the first page of the third, one within the fifth.
    let pages = [CLUSTER - 4096, 2 * CLUSTER, 4 * CLUSTER + 8192];
    pages.map(|at| (first * CLUSTER + at) / 4096).iter().for_each(|page| {
        at.rot(*page as usize, |bytes| bytes[4000] = SECRET);
    });
    device.set(at);
    let mut store = Store::load(device).unwrap();
    let unknown: Vec<_> = (0..9).filter(|n| !store.is_known_zero((first + n) as u32)).collect();
    assert_eq!(unknown, [0, 2, 4]);
    let blob = thin(&mut store, "blob");
    write(&mut store, blob, 9);
    shows_no_secret(&mut store);
}

#[test]
fn what_a_device_gains_is_asked_about_and_may_be_anything() {
    for told in [true, false] {
        let device = device(Zeros { unmapped: true, told });
        let mut store = Store::load(device.clone()).unwrap();
        assert_eq!(known(&store), 0, "what another left");
        device.gain(3 * CLUSTER);
        assert!(store.grow().unwrap());
        assert_eq!(known(&store), if told { 3 } else { 0 });
        let blob = thin(&mut store, "blob");
        let free = store.info().free_clusters;
        write(&mut store, blob, free);
        shows_no_secret(&mut store);
    }
}

#[test]
fn clusters_that_were_zeroed_are_known() {
    let device = device(Zeros { unmapped: false, told: false });
    let mut store = Store::load(device.clone()).unwrap();
    let info = store.info();
    store.wipe(Run { first: info.first_data_cluster, count: info.data_clusters }).unwrap();
    assert_eq!(known(&store), info.data_clusters);
    let blob = thin(&mut store, "blob");
    survives_power_cuts(&device, || {
        write(&mut store, blob, 3);
        store.sync().unwrap();
    });
    device.plan(Some(Plan { fault: Fault::Write, after: 0, times: 1 }));
    assert!(store.wipe(Run { first: info.first_data_cluster + 30, count: 3 }).is_err());
    assert_eq!(known(&store), info.data_clusters - 6);
}
