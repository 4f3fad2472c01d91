//! A key-value store on blobs at work, as RocksDB's `db_bench` has its stores work.
//!
//! ```text
//! cargo run --release -p blobstore --example kv -- FILE MIB WORKLOAD COUNT
//! ```
//!
//! Makes a store of MIB in FILE, whose contents are lost, does COUNT operations, looks whether all is
//! there after the store was opened again, and prints how many there were a second, as JSON. A key has 16
//! bytes, of COUNT keys by chance, a value 100. The workloads: `fillsync` puts and syncs each; `overwrite`
//! puts all keys first, and is measured while it puts them anew; `readwrite` as that, but nine of ten
//! operations get.

mod kv;

use blobstore::{FileDisk, Store, StoreOptions};
use kv::Kv;
use std::collections::HashMap;
use std::fs::OpenOptions;
use std::path::Path;
use std::time::Instant;
use uuid::Uuid;

type Outcome<T> = Result<T, Box<dyn std::error::Error>>;

const VALUE: usize = 100;
const USAGE: &str = "usage: kv FILE MIB fillsync|overwrite|readwrite COUNT";

/// Keys and values by chance, the same each time.
struct Chance(u64);

impl Chance {
    fn below(&mut self, n: u64) -> u64 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        self.0 % n
    }
}

fn key(number: u64) -> [u8; 16] {
    let mut key = [b'0'; 16];
    key[8..].copy_from_slice(&number.to_be_bytes());
    key
}

fn value(number: u64, round: u64) -> [u8; VALUE] {
    let mut value = [round as u8; VALUE];
    value[..8].copy_from_slice(&number.to_le_bytes());
    value[8..16].copy_from_slice(&round.to_le_bytes());
    value
}

fn disk(path: &Path) -> Outcome<FileDisk> {
    Ok(FileDisk::new(OpenOptions::new().read(true).write(true).open(path)?)?)
}

/// Does the operations; returns how many a second, and the round in which each key was put last.
fn work(kv: &mut Kv<FileDisk>, workload: &str, count: u64) -> Outcome<(f64, HashMap<u64, u64>)> {
    let mut held = HashMap::new();
    if workload != "fillsync" {
        for number in 0..count {
            kv.put(&key(number), &value(number, 0))?;
            held.insert(number, 0);
        }
        kv.sync()?;
    }
    let mut chance = Chance(0x9e37_79b9_7f4a_7c15);
    let begun = Instant::now();
    for round in 1..=count {
        let number = chance.below(count);
        if workload == "readwrite" && round % 10 != 0 {
            assert!(kv.get(&key(number))?.is_some(), "key {number} is gone");
            continue;
        }
        kv.put(&key(number), &value(number, round))?;
        held.insert(number, round);
        if workload == "fillsync" {
            kv.sync()?;
        }
    }
    Ok((count as f64 / begun.elapsed().as_secs_f64(), held))
}

fn main() -> Outcome<()> {
    let words: Vec<String> = std::env::args().skip(1).collect();
    let [path, mib, workload, count] = &words[..] else {
        return Err(USAGE.into());
    };
    if !["fillsync", "overwrite", "readwrite"].contains(&workload.as_str()) {
        return Err(USAGE.into());
    }
    let (mib, count): (u64, u64) = (mib.parse()?, count.parse()?);
    let path = Path::new(path);
    let file = OpenOptions::new().create(true).truncate(false).write(true).open(path)?;
    file.set_len(mib << 20)?;
    let options = StoreOptions { name: "kv".into(), uuid: Uuid::new_v4(), cluster_size: 1 << 20 };
    let mut kv = Kv::open(Store::create_store(disk(path)?, &options)?)?;
    let (rate, mut held) = work(&mut kv, workload, count)?;
    let gone = *held.keys().next().ok_or("COUNT is 0")?;
    kv.delete(&key(gone))?;
    held.remove(&gone);
    drop(kv.close()?);
    let mut kv = Kv::open(Store::load(disk(path)?)?)?;
    assert_eq!((kv.count(), kv.get(&key(gone))?), (held.len(), None));
    for (number, round) in held {
        let found = kv.get(&key(number))?;
        assert_eq!(found.as_deref(), Some(&value(number, round)[..]), "key {number}");
    }
    println!(
        "{{\"workload\": \"{workload}\", \"operations\": {count}, \"per_second\": {rate:.0}}}"
    );
    Ok(())
}
