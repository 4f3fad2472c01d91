//! A small log-structured key-value store on blobs.
//!
//! All that is put goes to the end of a log, which is cut into segments: thick blobs of some MiB. Where a
//! key's newest value is stands in memory, and is found again by reading the log. When half of the log is
//! values that were put anew since, the oldest segments are emptied: what still counts of them is put
//! again. An empty segment is used anew, so that a sync writes data and no metadata, of the store or of
//! the file under it.

use blobstore::{BlobId, BlobOptions, Disk, Error, Store};
use std::collections::{BTreeMap, HashMap};
use uuid::Uuid;

/// Clusters of a segment.
const SEGMENT_CLUSTERS: u64 = 16;
/// checksum, number of the entry, length of the key, length of the value.
const HEADER: usize = 4 + 8 + 4 + 4;
/// The length of a value that is none: the key was deleted.
const DELETED: u32 = u32::MAX;
/// The xattr of a segment with the number of its first entry, as text.
const FIRST: &str = "first";

/// Where a value is.
#[derive(Clone, Copy)]
struct Place {
    /// The segment's first entry.
    segment: u64,
    /// Bytes from the segment's start, of the entry.
    at: u64,
    key: u32,
    value: u32,
}

impl Place {
    fn bytes(&self) -> u64 {
        (HEADER as u64) + u64::from(self.key) + u64::from(self.value)
    }
}

struct Segment {
    blob: BlobId,
    /// Bytes that entries have.
    used: u64,
    /// Bytes of entries that still count.
    live: u64,
}

/// Keys and values on a device that it owns.
pub struct Kv<D> {
    store: Store<D>,
    index: HashMap<Box<[u8]>, Place>,
    /// By the number of their first entry; the last is written to.
    segments: BTreeMap<u64, Segment>,
    empty: Vec<BlobId>,
    /// Number of the next entry.
    next: u64,
    size: u64,
    /// What is put and not yet in the log: it is written with the next sync, or when it is much.
    pending: Vec<u8>,
}

/// Bytes that are put without a sync before they are written.
const PENDING: usize = 1 << 20;

impl<D: Disk> Kv<D> {
    /// Takes over a store, reading the log that it has.
    pub fn open(store: Store<D>) -> Result<Self, Error> {
        let size = SEGMENT_CLUSTERS * u64::from(store.info().cluster_size);
        let mut kv = Kv {
            store,
            index: HashMap::new(),
            segments: BTreeMap::new(),
            empty: Vec::new(),
            next: 1,
            size,
            pending: Vec::new(),
        };
        let blobs: Vec<BlobId> = kv.store.blobs().map(|blob| blob.id).collect();
        let mut begun = BTreeMap::new();
        for blob in blobs {
            match kv.store.xattr(blob, FIRST) {
                Ok(first) => {
                    let first = std::str::from_utf8(first).ok().and_then(|text| text.parse().ok());
                    begun.insert(first.unwrap_or(0), blob);
                }
                Err(_) => kv.empty.push(blob),
            }
        }
        for (first, blob) in begun {
            kv.read_log(first, blob)?;
        }
        // What lies behind the end of the last one was never acknowledged: it must not be read behind
        // what is put from now on.
        if kv.segments.values().next_back().is_none_or(|last| last.used > 0) {
            kv.begin_segment()?;
        }
        Ok(kv)
    }

    /// Reads a segment up to the first entry that is not whole: the end of what was synced, or of more.
    fn read_log(&mut self, first: u64, blob: BlobId) -> Result<(), Error> {
        let mut bytes = vec![0; self.size as usize];
        self.store.read(blob, 0, &mut bytes)?;
        self.segments.insert(first, Segment { blob, used: 0, live: 0 });
        let (mut at, mut number) = (0, first);
        while let Some((key, value)) = decode(&bytes[at..], number) {
            let place = Place {
                segment: first,
                at: at as u64,
                key: key.len() as u32,
                value: value.len() as u32,
            };
            let deleted = bytes[at + 16..at + 20] == DELETED.to_le_bytes();
            let key: Box<[u8]> = key.into();
            self.account(key, (!deleted).then_some(place));
            at += HEADER + place.key as usize + place.value as usize;
            number += 1;
        }
        self.segments.get_mut(&first).expect("it was inserted").used = at as u64;
        self.next = number;
        Ok(())
    }

    /// Notes where a key's value is now, or that it has none.
    fn account(&mut self, key: Box<[u8]>, place: Option<Place>) {
        let before = match place {
            Some(place) => {
                self.segments.get_mut(&place.segment).expect("it is its").live += place.bytes();
                self.index.insert(key, place)
            }
            None => self.index.remove(&key),
        };
        if let Some(before) = before
            && let Some(segment) = self.segments.get_mut(&before.segment)
        {
            segment.live -= before.bytes();
        }
    }

    /// The value of a key.
    pub fn get(&mut self, key: &[u8]) -> Result<Option<Vec<u8>>, Error> {
        let Some(place) = self.index.get(key).copied() else {
            return Ok(None);
        };
        let mut value = vec![0; place.value as usize];
        let (segment, last) = (&self.segments[&place.segment], self.last());
        let (from, written) = (place.at + HEADER as u64 + u64::from(place.key), segment.used);
        let pending = (place.segment == last).then(|| written - self.pending.len() as u64);
        match pending {
            Some(begin) if place.at >= begin => {
                let from = (from - begin) as usize;
                value.copy_from_slice(&self.pending[from..from + place.value as usize]);
            }
            _ => self.store.read(segment.blob, from, &mut value)?,
        }
        Ok(Some(value))
    }

    /// Gives a key a value; durable after a [`Kv::sync`].
    pub fn put(&mut self, key: &[u8], value: &[u8]) -> Result<(), Error> {
        self.append(key, Some(value))?;
        self.compact()
    }

    /// Takes a key's value; durable after a [`Kv::sync`].
    pub fn delete(&mut self, key: &[u8]) -> Result<(), Error> {
        self.append(key, None)?;
        self.compact()
    }

    /// Makes all that was put durable.
    pub fn sync(&mut self) -> Result<(), Error> {
        self.write_pending()?;
        self.store.sync()
    }

    /// Keys that have a value.
    pub fn count(&self) -> usize {
        self.index.len()
    }

    /// Ends the use; gives the store back.
    pub fn close(mut self) -> Result<Store<D>, Error> {
        self.sync()?;
        Ok(self.store)
    }

    fn last(&self) -> u64 {
        *self.segments.last_key_value().expect("there is always one").0
    }

    fn append(&mut self, key: &[u8], value: Option<&[u8]>) -> Result<(), Error> {
        let bytes = HEADER as u64 + key.len() as u64 + value.map_or(0, <[u8]>::len) as u64;
        assert!(bytes <= self.size, "an entry of {bytes} bytes is longer than a segment");
        if self.segments[&self.last()].used + bytes > self.size {
            self.sync()?;
            self.begin_segment()?;
        }
        let last = self.last();
        encode(&mut self.pending, self.next, key, value);
        let segment = self.segments.get_mut(&last).expect("it is the last");
        let at = segment.used;
        segment.used += bytes;
        self.next += 1;
        let value = value.map(|value| value.len() as u32);
        let place = value.map(|value| Place { segment: last, at, key: key.len() as u32, value });
        self.account(key.into(), place);
        if self.pending.len() >= PENDING { self.write_pending() } else { Ok(()) }
    }

    fn write_pending(&mut self) -> Result<(), Error> {
        if self.pending.is_empty() {
            return Ok(());
        }
        let segment = &self.segments[&self.last()];
        let at = segment.used - self.pending.len() as u64;
        self.store.write(segment.blob, at, &self.pending)?;
        self.pending.clear();
        Ok(())
    }

    /// Begins a segment: an empty one, or a new one.
    fn begin_segment(&mut self) -> Result<(), Error> {
        let blob = match self.empty.pop() {
            Some(blob) => blob,
            None => self.store.create(&BlobOptions {
                dif: None,
                name: format!("segment-{}", self.next),
                uuid: Uuid::new_v4(),
                size: SEGMENT_CLUSTERS,
                thin: false,
                xattrs: Default::default(),
            })?,
        };
        self.store.set_xattr(blob, FIRST, self.next.to_string().as_bytes())?;
        self.segments.insert(self.next, Segment { blob, used: 0, live: 0 });
        Ok(())
    }

    /// Empties the oldest segment where less than half of the log counts.
    fn compact(&mut self) -> Result<(), Error> {
        let live: u64 = self.segments.values().map(|segment| segment.live).sum();
        if self.segments.len() < 4 || live * 2 > self.segments.len() as u64 * self.size {
            return Ok(());
        }
        let (first, blob) = {
            let (first, segment) = self.segments.first_key_value().expect("there are some");
            (*first, segment.blob)
        };
        let its = self.index.iter().filter(|(_, place)| place.segment == first);
        let keys: Vec<Box<[u8]>> = its.map(|(key, _)| key.clone()).collect();
        for key in keys {
            let value = self.get(&key)?;
            self.append(&key, value.as_deref())?;
        }
        // They are elsewhere, durably, before they are no more here. A deletion of a key that an older
        // segment has needs no entry any more: this was the oldest.
        self.sync()?;
        self.segments.remove(&first);
        self.store.remove_xattr(blob, FIRST)?;
        self.empty.push(blob);
        Ok(())
    }
}

fn encode(to: &mut Vec<u8>, number: u64, key: &[u8], value: Option<&[u8]>) {
    let begin = to.len();
    to.extend_from_slice(&[0; 4]);
    to.extend_from_slice(&number.to_le_bytes());
    to.extend_from_slice(&(key.len() as u32).to_le_bytes());
    to.extend_from_slice(&value.map_or(DELETED, |value| value.len() as u32).to_le_bytes());
    to.extend_from_slice(key);
    to.extend_from_slice(value.unwrap_or_default());
    let sum = checksum(&to[begin + 4..]);
    to[begin..begin + 4].copy_from_slice(&sum.to_le_bytes());
}

/// The key and value of entry `number`, if it is there and whole.
fn decode(bytes: &[u8], number: u64) -> Option<(&[u8], &[u8])> {
    let word = |at: usize| {
        Some(u32::from_le_bytes(bytes.get(at..at + 4)?.try_into().expect("4 bytes")) as usize)
    };
    let (key, value) = (word(12)?, word(16)?);
    let value = if value == DELETED as usize { 0 } else { value };
    let end = HEADER.checked_add(key)?.checked_add(value)?;
    let entry = bytes.get(..end)?;
    let whole = entry[4..12] == number.to_le_bytes() && word(0)? == checksum(&entry[4..]) as usize;
    whole.then(|| entry[HEADER..].split_at(key))
}

fn checksum(bytes: &[u8]) -> u32 {
    crc_fast::checksum(crc_fast::CrcAlgorithm::Crc32Iscsi, bytes) as u32
}

#[cfg(test)]
mod tests {
    use super::*;
    use blobstore::{MemDisk, StoreOptions};
    use proptest::prelude::*;

    fn options() -> StoreOptions {
        StoreOptions { name: "kv".into(), uuid: Uuid::from_u128(1), cluster_size: 64 << 10 }
    }

    /// What a process finds after one that was killed.
    fn killed(kv: &mut Kv<MemDisk>) -> Kv<MemDisk> {
        let bytes = kv.store.disk_mut().bytes().to_vec();
        Kv::open(Store::load(MemDisk::from_bytes(bytes)).unwrap()).unwrap()
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(24))]

        /// Whatever is put, deleted and synced, and whenever it is killed: what was synced is there, and
        /// what was put since is there up to some put, in order.
        #[test]
        fn what_was_synced_is_found_again(
            steps in prop::collection::vec((0..12u8, 0..40u8, 1..30_000usize), 1..400)
        ) {
            let mut kv = Kv::open(Store::create_store(MemDisk::new(24 << 20), &options()).unwrap()).unwrap();
            // What it may hold: as it was after the last sync, and after each change since.
            let mut held: Vec<HashMap<u8, (u8, usize)>> = vec![HashMap::new()];
            for (n, (what, key, length)) in steps.into_iter().enumerate() {
                let mut now = held.last().unwrap().clone();
                match what {
                    0 => {
                        kv.sync().unwrap();
                        held = vec![now];
                        continue;
                    }
                    1 => {
                        kv = killed(&mut kv);
                        let is = |state: &&HashMap<u8, (u8, usize)>| {
                            let mut says = |key: u8| kv.get(&[key]).unwrap();
                            (0..40).all(|k| {
                                let expected = state.get(&k).map(|(fill, length)| vec![*fill; *length]);
                                says(k) == expected
                            })
                        };
                        let found = held.iter().find(is).cloned();
                        prop_assert!(found.is_some(), "step {n}");
                        held = vec![found.unwrap()];
                        continue;
                    }
                    2 => {
                        kv.delete(&[key]).unwrap();
                        now.remove(&key);
                    }
                    _ => {
                        kv.put(&[key], &vec![n as u8; length]).unwrap();
                        now.insert(key, (n as u8, length));
                    }
                }
                held.push(now);
            }
            prop_assert!(kv.segments.len() <= 20, "old values go");
        }
    }
}
