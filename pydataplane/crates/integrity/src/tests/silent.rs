//! A disk that lies: bits rot, writes are lost or go elsewhere, at random and without an error. No read gives
//! anything but what was written last, or fails; and none fails of a block that is as it should be.

use super::crash::{PER, Random, seeds};
use super::{BLOCKS, Host, PAGE, Pages, pattern};
use crate::disk::Integrity;
use crate::layout::REGION_BLOCKS;
use bdev::{IoError, SyncChannel};
use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

const SECTOR: usize = 512;
const STEPS: u64 = 120;

#[derive(Default)]
struct Model {
    /// What was written last to each block that ever was.
    blocks: BTreeMap<u64, Vec<u8>>,
    /// Regions that are perhaps marked, so that a crash has their checksums made anew.
    marked: BTreeSet<u64>,
    /// Damaged blocks of which a crash may have done so: nobody can tell.
    unsure: BTreeSet<u64>,
}

impl Model {
    fn write(&mut self, block: u64, page: &[u8]) {
        self.blocks.insert(block, page.to_vec());
        self.unsure.remove(&block);
        self.mark(block);
    }

    /// Before a write, also one that is refused then: its region, and those behind it where it is written in
    /// order.
    fn mark(&mut self, block: u64) {
        let region = block / u64::from(REGION_BLOCKS);
        if region > 0 && self.marked.contains(&(region - 1)) {
            self.marked.extend(region..=BLOCKS / u64::from(REGION_BLOCKS));
        }
        self.marked.insert(region);
    }

    /// Whether the base has something else than what was written.
    fn is_damaged(&self, host: &Host, block: u64) -> bool {
        self.blocks.get(&block).is_some_and(|page| page[..] != *on_base(host, block))
    }

    fn crash(&mut self, host: &Host) {
        let of = |block: &u64| block / u64::from(REGION_BLOCKS);
        let lost = self.blocks.keys().filter(|block| self.marked.contains(&of(block)));
        let lost: Vec<u64> = lost.copied().filter(|block| self.is_damaged(host, *block)).collect();
        lost.iter().for_each(|block| _ = self.blocks.remove(block));
        self.unsure.extend(lost);
    }
}

fn on_base(host: &Host, block: u64) -> Vec<u8> {
    let mut buf = bdev::AlignedBuf::zeroed(PAGE);
    let mut base = SyncChannel::open(&*host.base).unwrap();
    base.read((Host::at(block) / SECTOR) as u64, &mut buf).unwrap();
    buf.to_vec()
}

/// Writes a block behind the back of whoever has the checksums.
fn put_on_base(host: &Host, block: u64, page: &[u8]) {
    let mut buf = bdev::AlignedBuf::zeroed(PAGE);
    buf.copy_from_slice(page);
    let mut base = SyncChannel::open(&*host.base).unwrap();
    base.write((Host::at(block) / SECTOR) as u64, &buf).unwrap();
    base.flush().unwrap();
}

/// One disk, its model, and what happens to both.
struct Run {
    host: Host,
    disk: Arc<Integrity>,
    model: Model,
    random: Random,
    tag: u64,
    found: u64,
}

impl Run {
    fn new(seed: u64) -> Run {
        let host = Host::new(SECTOR as u32);
        let disk = host.create();
        let random = Random(seed);
        Run { host, disk, model: Model::default(), random, tag: seed << 20, found: 0 }
    }

    fn some_block(&mut self) -> u64 {
        let region = self.random.below(BLOCKS / u64::from(REGION_BLOCKS) + 1);
        region * u64::from(REGION_BLOCKS) + self.random.below(12)
    }

    fn some_written(&mut self) -> Option<u64> {
        let nth = self.random.below(self.model.blocks.len().max(1) as u64);
        self.model.blocks.keys().nth(nth as usize).copied()
    }

    fn write(&mut self, first: u64, count: u64) {
        self.tag += 1;
        let data = pattern(count as usize, self.tag);
        Pages::open(&self.disk).write(first, &data).unwrap();
        for (block, page) in (first..).zip(data.chunks_exact(PAGE)) {
            self.model.write(block, page);
        }
    }

    /// A write of which one block does not get where it should, but nowhere or to another block.
    fn write_that_goes_wrong(&mut self) {
        let (first, count) = (self.some_block(), 1 + self.random.below(5));
        let block = first + self.random.below(count);
        let before = on_base(&self.host, block);
        self.write(first, count);
        put_on_base(&self.host, block, &before);
        if self.random.below(2) == 0
            && let Some(other) = self.some_written()
        {
            let page = self.model.blocks[&block].clone();
            put_on_base(&self.host, other, &page);
        }
    }

    /// Writes a few sectors of one block, which is refused where the rest of it is not right.
    fn write_a_part(&mut self) {
        let block = self.some_block();
        if self.model.unsure.contains(&block) {
            return;
        }
        let sector = self.random.below(7);
        self.tag += 1;
        let data = &pattern(1, self.tag)[..SECTOR];
        let mut buf = bdev::AlignedBuf::zeroed(SECTOR);
        buf.copy_from_slice(data);
        let wrong = self.model.is_damaged(&self.host, block);
        let done = SyncChannel::open(&*self.disk).unwrap().write(block * PER + sector, &buf);
        if wrong {
            assert_eq!(done.unwrap_err().cause, IoError::ReadMedium, "block {block}");
            self.found += 1;
            self.model.mark(block);
            return;
        }
        done.unwrap();
        let mut page = self.model.blocks.get(&block).cloned().unwrap_or(vec![0; PAGE]);
        page[sector as usize * SECTOR..][..SECTOR].copy_from_slice(data);
        self.model.write(block, &page);
    }

    fn zero(&mut self) {
        let block = self.some_block();
        let mut c = SyncChannel::open(&*self.disk).unwrap();
        match self.random.below(2) {
            0 => c.write_zeroes(block * PER, PER).unwrap(),
            _ => c.unmap(block * PER, PER).unwrap(),
        }
        self.model.write(block, &[0; PAGE]);
    }

    fn rot(&mut self) {
        let Some(block) = self.some_written() else { return };
        let at = Host::at(block) + self.random.below(PAGE as u64) as usize;
        self.host.base.corrupt(at, 1 << self.random.below(8));
    }

    fn restart(&mut self, killed: bool) {
        if killed {
            SyncChannel::open(&*self.host.base).unwrap().flush().unwrap();
            self.host.base.die_after(0);
        }
        self.disk.close();
        if killed {
            match self.random.below(2) {
                0 => self.host.base.revive(),
                _ => self.host.base.power_cut(self.random.below(u64::MAX)),
            }
            self.model.crash(&self.host);
        } else {
            self.model.marked.clear();
        }
        self.host = Host::on(self.host.base.clone());
        self.disk = self.host.load();
        // What comes to a region before its checksums were made anew is not seen.
        while killed && self.disk.counted().stale_regions > 0 {
            std::thread::sleep(std::time::Duration::from_micros(100));
        }
    }

    fn clean(&mut self) {
        while self.disk.clean_all() > 0 {}
        self.model.marked.clear();
    }

    /// Reads each block that was ever written, alone and together with its neighbour.
    fn check(&mut self, what: &str) {
        let mut c = Pages::open(&self.disk);
        for (block, page) in &self.model.blocks {
            let wrong = self.model.is_damaged(&self.host, *block);
            match c.read(*block, 1) {
                Ok(found) => assert!(!wrong && found[..] == page[..], "{what}: block {block}"),
                Err(e) => assert!(wrong && e == IoError::ReadMedium, "{what}: block {block}: {e}"),
            }
            self.found += u64::from(wrong);
            if self.model.blocks.contains_key(&(block + 1)) {
                let wrong = wrong || self.model.is_damaged(&self.host, block + 1);
                assert_eq!(c.read(*block, 2).is_err(), wrong, "{what}: from block {block}");
            }
        }
    }
}

#[test]
fn whatever_a_disk_loses_garbles_or_puts_elsewhere_is_found_and_nothing_else() {
    let mut found = 0;
    for seed in seeds(10) {
        let mut run = Run::new(seed);
        for step in 0..STEPS {
            let what = format!("VIRTLUN_INTEGRITY_SEED={seed}, step {step}");
            match run.random.below(20) {
                0 => run.restart(false),
                1 => run.restart(true),
                2 | 3 => run.clean(),
                4 | 5 => run.rot(),
                6..=8 => run.write_that_goes_wrong(),
                9..=11 => run.write_a_part(),
                12 => run.zero(),
                13 => SyncChannel::open(&*run.disk).unwrap().flush().unwrap(),
                14 => run.check(&what),
                _ => {
                    let (first, count) = (run.some_block(), 1 + run.random.below(5));
                    run.write(first, count);
                }
            }
        }
        run.check(&format!("VIRTLUN_INTEGRITY_SEED={seed}"));
        found += run.found;
    }
    println!("silent: {found} damaged blocks were found");
    assert!(found > 0);
}
