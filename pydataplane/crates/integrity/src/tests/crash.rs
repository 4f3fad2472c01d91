//! The power fails, or the process is killed, at each write and each flush: what was flushed is there, and no
//! block is taken for damaged that is not.

use super::{BLOCKS, Host, Pages, pattern};
use crate::layout::{PAGE, REGION_BLOCKS};
use bdev::SyncChannel;
use std::sync::Arc;

/// SplitMix64.
pub(super) struct Random(pub(super) u64);

impl Random {
    pub(super) fn below(&mut self, n: u64) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        (z ^ (z >> 31)) % n
    }
}

/// Contents that each 512 bytes may have: those since the last flush, and that of then.
struct Model(Vec<Vec<[u8; 512]>>);

pub(super) const PER: u64 = PAGE as u64 / 512;

impl Model {
    fn new() -> Model {
        Model(vec![vec![[0; 512]]; (BLOCKS * PER) as usize])
    }

    fn write(&mut self, sector: u64, data: &[u8]) {
        for (nth, bytes) in data.chunks_exact(512).enumerate() {
            self.0[sector as usize + nth].push(bytes.try_into().unwrap());
        }
    }

    fn flush(&mut self) {
        for versions in &mut self.0 {
            versions.drain(..versions.len() - 1);
        }
    }

    /// What is there now is one of them each, and from now on that alone.
    fn check(&mut self, c: &mut SyncChannel, what: &str) {
        let mut all = bdev::AlignedBuf::zeroed((BLOCKS * PER * 512) as usize);
        c.read(0, &mut all).unwrap_or_else(|e| panic!("{what}: {e}"));
        for (at, (versions, found)) in self.0.iter_mut().zip(all.chunks_exact(512)).enumerate() {
            assert!(versions.iter().any(|v| v[..] == *found), "{what}: sector {at} is another");
            *versions = vec![found.try_into().unwrap()];
        }
    }
}

/// Does things until the base is dead; returns how many I/Os it had.
fn script(host: &Host, model: &mut Model, seed: u64) {
    let mut random = Random(seed);
    let disk = host.load();
    let mut c = Pages::open(&disk);
    for step in 0..14 {
        let region = random.below(4) * u64::from(REGION_BLOCKS);
        let sector = region * PER + random.below(30);
        let sectors = 1 + random.below(20);
        let done = match random.below(9) {
            0 | 1 => c.channel.flush().map(|()| model.flush()),
            2 => {
                disk.clean_all();
                Ok(())
            }
            3 => {
                model.write(sector, &vec![0; (sectors * 512) as usize]);
                match random.below(2) {
                    0 => c.channel.unmap(sector, sectors),
                    _ => c.channel.write_zeroes(sector, sectors),
                }
            }
            _ => {
                let data = pattern(3, seed << 8 | step);
                let data = &data[..(sectors * 512) as usize];
                model.write(sector, data);
                c.channel.write(sector, data)
            }
        };
        if done.is_err() {
            assert!(host.base.is_dead(), "{done:?}");
            return;
        }
    }
}

fn crashes(seeds: std::ops::Range<u64>, end: impl Fn(&Host, u64)) {
    for seed in seeds {
        // Until it lives through all of it.
        for point in 0.. {
            let host = Host::new(512);
            drop(host.create());
            let mut model = Model::new();
            // Some of it is clean, some was never used.
            script(&host, &mut model, seed);
            model.check(&mut SyncChannel::open(&*host.load()).unwrap(), "before");
            SyncChannel::open(&*host.base).unwrap().flush().unwrap();
            host.base.die_after(point);
            script(&host, &mut model, seed ^ 0x5555);
            let survived = !host.base.is_dead();
            end(&host, seed * 1000 + point + 1);
            let what = format!("seed {seed}, point {point}");
            let disk = host.load();
            let mut c = SyncChannel::open(&*disk).unwrap();
            model.check(&mut c, &what);
            drop(c);
            assert_eq!(disk.counted().mismatches, 0, "{what}");
            assert_eq!(disk.counted().damaged_checksum_pages, 0, "{what}");
            drop(disk);
            // And once it was closed in order.
            let disk = host.load();
            model.check(&mut SyncChannel::open(&*disk).unwrap(), &what);
            assert_eq!(disk.counted().mismatches, 0, "{what}");
            if survived {
                break;
            }
        }
    }
}

/// Seeds of the day; `VIRTLUN_INTEGRITY_SEEDS` says how many, and `VIRTLUN_INTEGRITY_SEED` which one.
pub(super) fn seeds(few: u64) -> std::ops::Range<u64> {
    let given = |name| std::env::var(name).ok().map(|n| n.parse().expect("a number"));
    match given("VIRTLUN_INTEGRITY_SEED") {
        Some(seed) => seed..seed + 1,
        None => 1..1 + given("VIRTLUN_INTEGRITY_SEEDS").unwrap_or(few),
    }
}

#[test]
fn no_power_cut_loses_what_was_flushed_or_makes_a_block_look_damaged() {
    crashes(seeds(2), |host, seed| host.base.power_cut(seed));
}

#[test]
fn a_power_cut_that_loses_all_or_nothing_does_neither() {
    crashes(seeds(1), |host, _| host.base.power_cut(0));
    crashes(seeds(1), |host, _| host.base.power_cut(u64::MAX));
}

#[test]
fn a_killed_process_loses_nothing_and_makes_no_block_look_damaged() {
    crashes(seeds(1), |host, _| host.base.revive());
}

#[test]
fn what_was_killed_and_then_lost_its_power_is_right_too() {
    for seed in 1..40 {
        let host = Host::new(512);
        let disk = host.create();
        let mut model = Model::new();
        let mut c = Pages::open(&disk);
        let data = pattern(4, seed);
        c.write(7, &data).unwrap();
        model.write(7 * PER, &data);
        host.base.die_after(0);
        drop((c, disk));
        host.base.revive();
        let disk = host.load();
        let mut c = Pages::open(&disk);
        let data = pattern(4, seed + 1000);
        c.write(9, &data).unwrap();
        model.write(9 * PER, &data);
        host.base.die_after(0);
        drop((c, disk));
        host.base.power_cut(seed);
        let disk: Arc<_> = host.load();
        model.check(&mut SyncChannel::open(&*disk).unwrap(), &format!("seed {seed}"));
        assert_eq!(disk.counted().mismatches, 0);
    }
}
