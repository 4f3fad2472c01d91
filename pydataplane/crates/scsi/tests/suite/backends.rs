//! The unit on the disks that ship: malloc, null, and one that loses its power.

use crate::rig::*;
use bdev::testing::FaultBdev;
use bdev::{Bdev, Malloc, MallocOptions, Null};
use reactor::IoContext;
use scsi::{Lun, LunOptions, LunShared, Outcome, Task};
use std::sync::Arc;

/// A unit on a disk of its own, past its first unit attention.
struct Unit {
    lun: Lun,
    _io: IoContext,
}

impl Unit {
    fn on(disk: Arc<dyn Bdev>) -> Self {
        let io = IoContext::new().unwrap();
        let channel = disk.open(&io).unwrap();
        let shared = LunShared::new(disk, LunOptions::default()).unwrap();
        let nexus = shared.connect();
        let mut unit = Unit { lun: Lun::new(shared, nexus, channel), _io: io };
        assert_eq!(unit.run(&[0; 6], &[], 0).sense(), (0x6, 0x2900));
        unit
    }

    fn run(&mut self, cdb: &[u8], data: &[u8], len: usize) -> Answer {
        let (out, into) = (Buffer::new(data, 4096), Buffer::new(&vec![0xEE; len], 4096));
        let mut task = Task::new(1);
        task.prepare(&pad(cdb), out.sg(), into.sg());
        let mut outcome = self.lun.start(&mut task);
        let mut done = Vec::with_capacity(1);
        while outcome == Outcome::Pending {
            done.clear();
            if self.lun.poll(&mut done) > 0 {
                outcome = self.lun.resume(&mut task, done[0].result);
            }
        }
        Answer { outcome, data: into.bytes() }
    }
}

fn malloc(block_size: u32) -> Arc<Malloc> {
    let options = MallocOptions {
        name: "m0".to_owned(),
        block_size,
        physical_block_size: 0,
        num_blocks: 4096,
        uuid: None,
    };
    Malloc::create(options).unwrap()
}

#[test]
fn malloc_keeps_what_is_written_and_forgets_what_is_unmapped() {
    for block_size in [512, 4096] {
        let n = block_size as usize;
        let mut unit = Unit::on(malloc(block_size));
        let data: Vec<u8> = (0..8 * n).map(|i| (i % 251) as u8).collect();
        unit.run(&cdb10(0x2A, 0x08, 64, 8), &data, 0).good();
        assert_eq!(unit.run(&cdb16(0x88, 0, 64, 8), &[], 8 * n).good(), data);
        unit.run(&cdb10(0x2F, 2, 64, 8), &data, 0).good();
        // UNMAP of block 65, WRITE SAME of 66 with zeros, of 67 with ones.
        let list = [0, 22, 0, 16, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 65, 0, 0, 0, 1, 0, 0, 0, 0];
        unit.run(&cdb10(0x42, 0, 0, 24), &list, 0).good();
        unit.run(&cdb16(0x93, 0x08, 66, 1), &vec![0; n], 0).good();
        unit.run(&cdb10(0x41, 0, 67, 1), &vec![1; n], 0).good();
        let mut expected = data.clone();
        expected[n..3 * n].fill(0);
        expected[3 * n..4 * n].fill(1);
        assert_eq!(unit.run(&cdb10(0x28, 0, 64, 8), &[], 8 * n).good(), expected);
    }
}

#[test]
fn null_takes_every_command() {
    let mut unit = Unit::on(Null::create("n0", 512, 1 << 40, None).unwrap());
    assert_eq!(unit.run(&cdb10(0x25, 0, 0, 0), &[], 8).good()[..4], [0xFF; 4]);
    unit.run(&cdb16(0x88, 0, (1 << 40) - 8, 8), &[], 4096).good();
    unit.run(&cdb16(0x8A, 0x08, 0, 8), &[0; 4096], 0).good();
    unit.run(&cdb16(0x91, 0, 0, 0), &[], 0).good();
    unit.run(&cdb16(0x93, 0x09, 0, 1 << 15), &[], 0).good();
}

/// GOOD of a write with FUA, or of SYNCHRONIZE CACHE, is a promise.
#[test]
fn what_was_promised_survives_a_power_cut() {
    for seed in 0..20 {
        let disk = FaultBdev::new("f0", 512, 64);
        disk.defer(Some(seed));
        let mut unit = Unit::on(disk.clone());
        unit.run(&cdb10(0x2A, 0x08, 1, 1), &[1; 512], 0).good();
        unit.run(&cdb10(0x2A, 0, 2, 1), &[2; 512], 0).good();
        unit.run(&cdb10(0x35, 0, 0, 0), &[], 0).good();
        unit.run(&cdb10(0x2A, 0, 3, 1), &[3; 512], 0).good();
        unit.run(&[0x1B, 0, 0, 0, 0, 0], &[], 0).good(); // a stop flushes, too
        unit.run(&cdb10(0x2A, 0, 4, 1), &[4; 512], 0).good();
        disk.power_cut(seed);
        let image = disk.durable_image();
        for block in 1..4 {
            assert_eq!(image[block * 512..][..512], [block as u8; 512], "seed {seed}");
        }
    }
}
