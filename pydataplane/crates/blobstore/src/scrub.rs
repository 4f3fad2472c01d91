//! Whether all data can still be read: clusters that belong to blobs, step by step, while they are used.
//!
//! What the medium returns is not compared with anything here: an error of the device shows, which wrong data
//! is where the device has checksums.

use crate::blob::BlobId;
use crate::disk::Disk;
use crate::format::PAGE_SIZE;
use crate::store::Store;
use std::time::{Duration, Instant};

/// Bytes that one step reads at most.
const STEP: u64 = 1 << 20;
/// Bytes of the pieces that are read one by one where something fails.
const PIECE: u64 = 64 << 10;
/// A device that fails a piece within that time is asked for each page of it; one that tries for
/// long is not.
const QUICK: Duration = Duration::from_millis(250);
/// Free clusters that one step passes over at most.
const PASSED: u64 = 1 << 20;

/// Data that cannot be read.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Unreadable {
    /// Where it begins on the device, in bytes.
    pub offset: u64,
    /// Bytes.
    pub length: u64,
    /// What the device says.
    pub cause: String,
    /// Whose it is, and where it begins there, in bytes.
    pub blobs: Vec<(BlobId, u64)>,
}

/// What one step of [`Store::scrub`] found.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Scrubbed {
    /// Bytes that were read, or could not be.
    pub bytes: u64,
    /// What could not be.
    pub unreadable: Vec<Unreadable>,
    /// Byte of the device to go on with; `None`: that was all.
    pub next: Option<u64>,
}

impl<D: Disk> Store<D> {
    /// Reads some of what blobs have, from byte `from` of the device on. Writes nothing.
    pub fn scrub(&mut self, from: u64) -> Scrubbed {
        let size = u64::from(self.sb.cluster_size);
        let first = self.sb.first_data_cluster;
        let end = first + self.sb.data_clusters;
        let mut found = Scrubbed::default();
        let start = from.max(first * size);
        let mut cluster = start / size;
        let most = cluster.saturating_add(PASSED).min(end);
        while cluster < most && self.is_free(cluster as u32) {
            cluster += 1;
        }
        if cluster < most {
            let begin = start.max(cluster * size);
            let mut stop = ((cluster + 1) * size).min(begin + STEP);
            while stop.is_multiple_of(size)
                && stop - begin < STEP
                && stop / size < most
                && !self.is_free((stop / size) as u32)
            {
                stop += size;
            }
            let stop = stop.min(begin + STEP);
            found.bytes = stop - begin;
            found.unreadable = self.unreadable(begin, stop);
            found.next = (stop < end * size).then_some(stop);
        } else {
            found.next = (cluster < end).then_some(cluster * size);
        }
        found
    }

    /// Reads a part of the device; returns what of it cannot be read.
    fn unreadable(&mut self, begin: u64, stop: u64) -> Vec<Unreadable> {
        let mut bytes = vec![0; (stop - begin) as usize];
        if self.disk.read(begin, &mut bytes).is_ok() {
            return Vec::new();
        }
        let mut found: Vec<Unreadable> = Vec::new();
        for offset in (begin..stop).step_by(PIECE as usize) {
            let length = PIECE.min(stop - offset);
            let begun = Instant::now();
            let Err(e) = self.disk.read(offset, &mut bytes[..length as usize]) else { continue };
            let mut pages = Vec::new();
            if begun.elapsed() < QUICK {
                pages = self.unreadable_pages(offset, offset + length, &mut bytes);
            }
            if pages.is_empty() {
                let blobs = self.owners(offset);
                pages.push(Unreadable { offset, length, cause: e.to_string(), blobs });
            }
            found.append(&mut pages);
        }
        found
    }

    /// What cannot be read of a piece, page by page; what follows each other in a cluster is one.
    fn unreadable_pages(&mut self, begin: u64, stop: u64, bytes: &mut [u8]) -> Vec<Unreadable> {
        let (page, cluster) = (PAGE_SIZE as u64, u64::from(self.sb.cluster_size));
        let mut found: Vec<Unreadable> = Vec::new();
        for offset in (begin..stop).step_by(PAGE_SIZE) {
            let length = page.min(stop - offset);
            let Err(e) = self.disk.read(offset, &mut bytes[..length as usize]) else { continue };
            match found.last_mut() {
                Some(last) if last.offset + last.length == offset && offset % cluster != 0 => {
                    last.length += length;
                }
                _ => {
                    let blobs = self.owners(offset);
                    found.push(Unreadable { offset, length, cause: e.to_string(), blobs });
                }
            }
        }
        found
    }

    /// Which blob has a byte of the device, and where.
    fn owners(&mut self, offset: u64) -> Vec<(BlobId, u64)> {
        let size = u64::from(self.sb.cluster_size);
        let (cluster, within) = ((offset / size) as u32, offset % size);
        let mut found = Vec::new();
        for id in self.blobs.keys().copied().collect::<Vec<_>>() {
            // Of one whose map cannot be read it is not known, which its own users hear.
            _ = self.visit(id, 0, |at, to| {
                if to == cluster {
                    found.push((BlobId(id), at * size + within));
                }
            });
        }
        found
    }
}

#[cfg(test)]
mod tests {
    use crate::testing::{Wrap, Wrapped, failed};
    use crate::{BlobOptions, DiskError, MemDisk, Store, StoreOptions};
    use std::collections::BTreeMap;
    use uuid::Uuid;

    const CLUSTER: u32 = 128 << 10;

    /// Some bytes cannot be read.
    struct Bad(std::ops::Range<u64>);

    impl Wrap for Bad {
        fn before(&mut self, op: &'static str, offset: u64, len: u64) -> Result<(), DiskError> {
            match op == "read" && offset < self.0.end && offset + len > self.0.start {
                true => Err(failed(op, offset, len)),
                false => Ok(()),
            }
        }
    }

    #[test]
    fn each_cluster_is_read_once_and_what_is_bad_has_a_name() {
        let options =
            StoreOptions { name: "s".into(), uuid: Uuid::from_u128(1), cluster_size: CLUSTER };
        let disk = Wrapped { disk: MemDisk::new(64 << 20), with: Bad(0..0) };
        let mut store = Store::create_store(disk, &options).unwrap();
        let blob = |name: &str, clusters: u64| BlobOptions {
            dif: None,
            name: name.into(),
            uuid: Uuid::new_v4(),
            size: clusters,
            thin: false,
            xattrs: BTreeMap::default(),
        };
        let one = store.create(&blob("one", 20)).unwrap();
        let two = store.create(&blob("two", 3)).unwrap();
        let freed = store.delete(one).unwrap().freed;
        store.release(freed);
        let three = store.create(&blob("three", 2)).unwrap();
        let size = u64::from(CLUSTER);
        let bad = store.clusters(two).unwrap().nth(1).unwrap().1;
        let at = u64::from(bad) * size + 70_000;
        store.disk_mut().with.0 = at..at + 1;
        let (mut from, mut bytes, mut found) = (0, 0, Vec::new());
        loop {
            let step = store.scrub(from);
            bytes += step.bytes;
            found.extend(step.unreadable);
            match step.next {
                Some(next) => from = next,
                None => break,
            }
        }
        assert_eq!(bytes, 5 * size);
        let [one] = &found[..] else { panic!("{found:?}") };
        // 70,000 is in page 17 of the cluster.
        assert_eq!((one.offset, one.length), (u64::from(bad) * size + 17 * 4096, 4096));
        assert_eq!(one.blobs, [(two, size + 17 * 4096)]);
        assert_ne!(three, two);
        assert_eq!(store.scrub(u64::MAX).next, None);
    }
}
