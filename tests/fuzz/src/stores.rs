//! What a device may hold where an lvstore should be: any metadata, with checksums that match.

use std::collections::{BTreeMap, HashSet};
use std::sync::OnceLock;

use blobstore::{
    BlobId, BlobOptions, Disk, DiskError, Error, HOLE, HistoryOptions, MemDisk, PAGE_SIZE, Store,
    StoreOptions,
};
use uuid::Uuid;

use crate::input::Input;

const CLUSTER: u32 = 64 << 10;
/// Bytes of the device.
const DEVICE: u64 = 8 << 20;
/// Pages that hold all metadata of the sample, and some data.
const METADATA: usize = (2 << 20) / PAGE_SIZE;
/// Bytes that one input may write, so that a store that is taken for a huge one takes no memory.
const MOST_WRITTEN: u64 = 32 << 20;

type Page = Box<[u8; PAGE_SIZE]>;

/// A device of pages over the sample's; zeros elsewhere.
struct Layers {
    bottom: &'static [Page],
    top: BTreeMap<u64, Page>,
    size: u64,
    written: u64,
}

impl Layers {
    fn page(&self, number: u64) -> &[u8; PAGE_SIZE] {
        static ZEROS: [u8; PAGE_SIZE] = [0; PAGE_SIZE];
        let below = || usize::try_from(number).ok().and_then(|n| self.bottom.get(n));
        self.top.get(&number).or_else(below).map_or(&ZEROS, |page| page)
    }

    fn page_mut(&mut self, number: u64) -> &mut [u8; PAGE_SIZE] {
        let copy = *self.page(number);
        self.top.entry(number).or_insert_with(|| Box::new(copy))
    }

    /// The pages of a range, each with the part of it: number, first byte, bytes.
    fn parts(
        &self,
        op: &'static str,
        offset: u64,
        len: u64,
    ) -> Result<impl Iterator<Item = (u64, usize, usize)> + use<>, DiskError> {
        let end = offset.checked_add(len).filter(|end| *end <= self.size);
        let failed =
            |cause: &str| DiskError { op, offset, len, cause: cause.into(), no_space: false };
        let end = end.ok_or_else(|| failed("it ends beyond the device"))?;
        let page = PAGE_SIZE as u64;
        Ok((offset / page..end.div_ceil(page)).map(move |number| {
            let from = offset.max(number * page) - number * page;
            let to = end.min((number + 1) * page) - number * page;
            (number, from as usize, (to - from) as usize)
        }))
    }

    fn may_write(&mut self, op: &'static str, offset: u64, len: u64) -> Result<(), DiskError> {
        self.written = self.written.saturating_add(len);
        match self.written <= MOST_WRITTEN {
            true => Ok(()),
            false => {
                let cause = "enough was written".into();
                Err(DiskError { op, offset, len, cause, no_space: false })
            }
        }
    }
}

impl Disk for Layers {
    fn size(&self) -> u64 {
        self.size
    }

    fn read(&mut self, offset: u64, buf: &mut [u8]) -> Result<(), DiskError> {
        let mut at = 0;
        for (number, from, len) in self.parts("read", offset, buf.len() as u64)? {
            buf[at..at + len].copy_from_slice(&self.page(number)[from..from + len]);
            at += len;
        }
        Ok(())
    }

    fn write(&mut self, offset: u64, buf: &[u8]) -> Result<(), DiskError> {
        self.may_write("write", offset, buf.len() as u64)?;
        let mut at = 0;
        for (number, from, len) in self.parts("write", offset, buf.len() as u64)? {
            self.page_mut(number)[from..from + len].copy_from_slice(&buf[at..at + len]);
            at += len;
        }
        Ok(())
    }

    fn write_zeroes(&mut self, offset: u64, len: u64) -> Result<(), DiskError> {
        self.may_write("write_zeroes", offset, len)?;
        for (number, from, len) in self.parts("write_zeroes", offset, len)? {
            self.page_mut(number)[from..from + len].fill(0);
        }
        Ok(())
    }

    fn flush(&mut self) -> Result<(), DiskError> {
        Ok(())
    }
}

fn crc(parts: &[&[u8]]) -> [u8; 4] {
    let mut digest = crc_fast::Digest::new(crc_fast::CrcAlgorithm::Crc32Iscsi);
    parts.iter().for_each(|part| digest.update(part));
    (digest.finalize() as u32).to_le_bytes()
}

/// Makes the checksum of a page match, and those of the images of a journal record.
fn seal(disk: &mut Layers, number: u64) {
    let page = *disk.page(number);
    let at = match &page[..4] {
        b"VLPG" => 4,
        b"VLBL" => 8,
        b"VLJO" => {
            let count = u64::from(u32::from_le_bytes(page[40..44].try_into().expect("4 bytes")));
            let images: Vec<_> = (1..=count.min(1008)).map(|n| *disk.page(number + n)).collect();
            let sum = crc(&images.iter().map(|image| &image[..]).collect::<Vec<_>>());
            disk.page_mut(number)[12..16].copy_from_slice(&sum);
            8
        }
        _ => return,
    };
    let page = disk.page_mut(number);
    let sum = crc(&[&page[..at], &[0; 4], &page[at + 4..]]);
    page[at..at + 4].copy_from_slice(&sum);
}

fn blob(serial: u32, size: u64, thin: bool) -> BlobOptions {
    let xattrs = match serial % 3 {
        0 => BTreeMap::from([("origin".into(), vec![7; 300])]),
        _ => BTreeMap::new(),
    };
    let name = format!("b{serial}");
    BlobOptions { dif: None, name, uuid: Uuid::from_u128(serial.into()), size, thin, xattrs }
}

fn named(serial: u32) -> HistoryOptions {
    let BlobOptions { name, uuid, xattrs, .. } = blob(serial, 0, true);
    HistoryOptions { name, uuid, xattrs }
}

/// A store with blobs, snapshots and clones, xattrs inline and in pages, and records in its journal; and which of its pages
/// hold metadata.
fn sample() -> &'static (Vec<Page>, Vec<u64>) {
    static SAMPLE: OnceLock<(Vec<Page>, Vec<u64>)> = OnceLock::new();
    SAMPLE.get_or_init(|| {
        let make = || -> Result<Vec<u8>, Error> {
            let uuid = Uuid::from_u128(1);
            let options = StoreOptions { name: "lvs".into(), uuid, cluster_size: CLUSTER };
            let mut store = Store::create_store(MemDisk::new(DEVICE as usize), &options)?;
            let thick = store.create(&blob(1, 9, false))?;
            let thin = store.create(&blob(2, 300_000, true))?;
            store.create(&blob(3, 0, true))?;
            for n in 0..6 {
                store.set_xattr(thin, &format!("user.{n}"), &[n; 900])?;
            }
            for (id, cluster) in [(thick, 0), (thin, 0), (thin, 299_000)] {
                store.write(id, cluster * u64::from(CLUSTER), &[7; PAGE_SIZE])?;
            }
            store.checkpoint()?;
            let gone = store.create(&blob(4, 2, false))?;
            let deleted = store.delete(gone)?;
            store.release(deleted.freed);
            store.rename(thick, "other")?;
            let now = store.snapshot(&[(thin, named(5)), (thick, named(6))])?;
            let freed = store.unmap(now[0], 0, 1)?;
            store.release(freed);
            store.write(now[1], 0, &[9; PAGE_SIZE])?;
            store.clone_of(thin, &named(7))?;
            store.snapshot(&[(now[1], named(8))])?;
            Ok(store.disk_mut().bytes().to_vec())
        };
        let bytes = make().expect("a store");
        let pages: Vec<Page> = bytes
            .chunks_exact(PAGE_SIZE)
            .take(METADATA)
            .map(|page| Box::new(page.try_into().expect("a page")))
            .collect();
        let known = |page: &Page| [b"VLPG", b"VLBL", b"VLJO"].iter().any(|m| page.starts_with(*m));
        let used = (0..pages.len()).filter(|n| known(&pages[*n])).map(|n| n as u64).collect();
        (pages, used)
    })
}

/// No two blobs have the same cluster, none has one beyond the data area or beyond its own end, and
/// none of theirs is free.
fn check(store: &mut Store<Layers>) {
    let info = store.info();
    let blobs: Vec<_> = store.blobs().collect();
    let mut owned = HashSet::new();
    for blob in blobs {
        let has: Vec<_> = store.clusters(blob.id).expect("it is there").collect();
        for (index, cluster) in has.into_iter().filter(|(_, cluster)| *cluster != HOLE) {
            assert!(owned.insert(cluster), "cluster {cluster} has two owners");
            assert!(index < blob.size, "cluster {index} of {} is beyond its end", blob.name);
            let place = u64::from(cluster).checked_sub(info.first_data_cluster);
            assert!(place.is_some_and(|n| n < info.data_clusters), "{cluster} is no data cluster");
            assert!(!store.is_free(cluster), "cluster {cluster} is free and has an owner");
        }
    }
    assert!(info.free_clusters + owned.len() as u64 <= info.data_clusters);
}

/// Byte of the `nth` word of a page that is not 0, behind its checksum.
fn words(page: &[u8; PAGE_SIZE], nth: u8) -> usize {
    let some = |at: &usize| page[*at..at + 4] != [0; 4];
    let count = (12..PAGE_SIZE - 8).step_by(4).filter(some).take(256).count();
    let nth = usize::from(nth) % count.max(1);
    (12..PAGE_SIZE - 8).step_by(4).filter(some).nth(nth).unwrap_or(12)
}

/// Changes to the metadata of a store, whose checksums are made to match, and what is then done with
/// it. No input may make it panic, take memory without bound, or give a cluster to two blobs.
pub fn stores(data: &[u8]) {
    let mut input = Input(data);
    let (bottom, used) = sample();
    let setup = input.u8();
    let mut disk = Layers { bottom, top: BTreeMap::new(), size: DEVICE, written: 0 };
    if setup & 1 != 0 {
        // A large device, nearly all of it zeros, as a sparse file is.
        disk.size = 1 << (20 + input.u8() % 36);
    }
    let mut changed = Vec::new();
    for _ in 0..setup >> 1 & 15 {
        let page = used[usize::from(input.u8()) % used.len()];
        if input.once_in(3) {
            // What stands in another page of its kind, so that two point to the same.
            let kind = |page: u64| disk.page(page)[..10].split_at(8).1.to_vec();
            let alike: Vec<_> = used.iter().filter(|other| kind(**other) == kind(page)).collect();
            let from = disk.page(*alike[usize::from(input.u8()) % alike.len()]);
            let word = words(from, input.u8());
            let word: [u8; 4] = from[word..word + 4].try_into().expect("4 bytes");
            let at = words(disk.page(page), input.u8());
            disk.page_mut(page)[at..at + 4].copy_from_slice(&word);
            changed.push(page);
            continue;
        }
        let at = match input.u8() % 4 {
            0 => input.below(4088),
            1 => 12 + input.below(52),
            // What is not 0: fields, pointers.
            _ => words(disk.page(page), input.u8()) as u16,
        };
        let width = [4, 4, 8, 2][usize::from(input.u8() % 4)];
        let value = match input.u8() % 4 {
            0 => input.u64(),
            1 => 1 << (input.u8() % 64),
            2 => u64::from(input.u8()).wrapping_neg(),
            _ => u64::from(input.u8()),
        };
        // The two superblocks alike, or the other one is taken.
        let pages = if page == used[0] { vec![page, 16] } else { vec![page] };
        for page in pages {
            let at = usize::from(at);
            disk.page_mut(page)[at..at + width].copy_from_slice(&value.to_le_bytes()[..width]);
            changed.push(page);
        }
    }
    // Images first: a record's checksum is over theirs.
    changed.sort_unstable_by(|a, b| b.cmp(a));
    changed.dedup();
    changed.iter().for_each(|page| seal(&mut disk, *page));
    for page in used.iter().rev().filter(|page| bottom[**page as usize].starts_with(b"VLJO")) {
        seal(&mut disk, *page);
    }
    _ = Store::probe(&mut disk);
    for from in [0, 200, u64::MAX] {
        _ = Store::dump(&mut disk, from);
    }
    let Ok(mut store) = Store::load(disk) else { return };
    check(&mut store);
    while !input.is_empty() {
        // What an operation looks at has to be read again.
        store.let_go_all();
        act(&mut store, &mut input);
        check(&mut store);
    }
    _ = store.checkpoint();
    if let Ok(mut disk) = store.close() {
        disk.written = 0;
        if let Ok(mut store) = Store::load(disk) {
            check(&mut store);
        }
    }
}

/// Something that can be done with a store; what fails, fails with an error.
fn act(store: &mut Store<Layers>, input: &mut Input<'_>) {
    let ids: Vec<BlobId> = store.blobs().map(|blob| blob.id).collect();
    let what = input.u8() % 16;
    let number = u64::from(input.u16()) >> (input.u8() % 16);
    if what == 0 || ids.is_empty() {
        _ = store.create(&blob(u32::from(input.u8()) + 70, number % 64, input.once_in(2)));
        return;
    }
    let id = ids[usize::from(input.u8()) % ids.len()];
    let size = store.blob(id).expect("it is there").size;
    let mut page = [3; PAGE_SIZE];
    let offset = if input.once_in(2) { number } else { size.saturating_sub(number) };
    let offset = offset.saturating_mul(CLUSTER.into());
    match what {
        1 => _ = store.delete(id).map(|deleted| store.release(deleted.freed)),
        10 => _ = store.snapshot(&[(id, named(100 + number as u32 % 64))]),
        11 => _ = store.clone_of(id, &named(200 + number as u32 % 64)),
        12 => {
            let all = input.once_in(2);
            if let Ok(lacking) = store.lacking(id, all, number, 8) {
                _ = store.supply(id, &lacking);
            }
            _ = store.detach(id, all);
        }
        13 => _ = store.set_parent(id, ids[number as usize % ids.len()]),
        14 => {
            let to = ids[number as usize % ids.len()];
            _ = store.roll_back(&[(id, to)]).map(|freed| store.release(freed));
        }
        15 => _ = store.upgrade(),
        2 => _ = store.resize(id, number).map(|freed| store.release(freed)),
        3 => _ = store.resize(id, size.saturating_add(number)).map(|freed| store.release(freed)),
        4 => _ = store.unmap(id, number, size).map(|freed| store.release(freed)),
        5 => _ = store.read(id, offset, &mut page),
        6 => _ = store.set_xattr(id, &format!("u{}", number % 16), &page[..number as usize % 3500]),
        7 => _ = store.rename(id, &format!("b{}", number % 8)),
        8 => _ = store.grow(),
        _ => _ = store.write(id, offset, &page),
    }
}
