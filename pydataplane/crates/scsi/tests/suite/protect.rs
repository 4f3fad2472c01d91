//! Protection information (SBC-4 4.22): what a unit says of its own, and commands that carry it.

use crate::rig::*;
use ProtectionType::{Type1, Type3};
use bdev::{AlignedBuf, Bdev, Malloc, MallocOptions, Protection, ProtectionType, SyncChannel};
use guestmem::Sg;
use protection::{ProtectedDisk, Tuple, guard};
use reactor::IoContext;
use scsi::{Lun, LunOptions, LunShared, Outcome, Task};
use std::sync::Arc;
use uuid::Uuid;

/// A unit on memory with protection information, past its first unit attention.
pub struct Unit {
    pub lun: Lun,
    below: Arc<dyn Bdev>,
    _io: IoContext,
}

pub const BLOCK: usize = 512;

/// What an initiator has beside its data.
pub enum With<'a> {
    Nothing,
    /// Tuples for the unit.
    Out(&'a [u8]),
    /// Room for so many bytes of them.
    In(usize),
}

pub fn disk(kind: ProtectionType, block_size: u32) -> Arc<ProtectedDisk> {
    let options = MallocOptions {
        name: "m0".to_owned(),
        block_size,
        physical_block_size: 0,
        num_blocks: 1024,
        uuid: Some(Uuid::new_v4()),
    };
    let below = Malloc::with_metadata(options, 8).unwrap();
    ProtectedDisk::new(below, Protection { kind, interleaved: false, at_head: false })
}

impl Unit {
    pub fn new(kind: ProtectionType) -> Unit {
        Unit::on(disk(kind, 512), LunOptions::default())
    }

    pub fn on(disk: Arc<ProtectedDisk>, options: LunOptions) -> Unit {
        let mut unit = Unit::unattended(disk, options);
        assert_eq!(unit.run(&[0; 6], &[], 0).sense(), (0x6, 0x2900));
        unit
    }

    /// One that nobody has sent a command to.
    pub fn unattended(disk: Arc<ProtectedDisk>, options: LunOptions) -> Unit {
        let io = IoContext::new().unwrap();
        let channel = disk.open(&io).unwrap();
        let below = disk.bare().unwrap();
        let shared = LunShared::new(disk, options).unwrap();
        let nexus = shared.connect();
        Unit { lun: Lun::new(shared, nexus, channel), below, _io: io }
    }

    pub fn run(&mut self, cdb: &[u8], data: &[u8], len: usize) -> Answer {
        self.carry(cdb, data, len, With::Nothing).0
    }

    /// A command with tuples in lists of their own, and those that came.
    pub fn carry(&mut self, cdb: &[u8], data: &[u8], len: usize, with: With) -> (Answer, Vec<u8>) {
        let (out, into) = (Buffer::new(data, 700), Buffer::new(&vec![0xEE; len], 900));
        let (tuples_out, tuples_in) = match with {
            With::Nothing => (&[][..], 0),
            With::Out(tuples) => (tuples, 0),
            With::In(len) => (&[][..], len),
        };
        let tuples_out = Buffer::new(tuples_out, 13);
        let tuples_in = Buffer::new(&vec![0xEE; tuples_in], 11);
        let mut task = Task::new(1);
        task.prepare(&pad(cdb), out.sg(), into.sg());
        task.set_tuples(tuples_out.sg(), tuples_in.sg());
        let mut outcome = self.lun.start(&mut task);
        let mut done = Vec::with_capacity(1);
        while outcome == Outcome::Pending {
            done.clear();
            if self.lun.poll(&mut done) > 0 {
                outcome = self.lun.resume(&mut task, done[0].result);
            }
        }
        task.set_tuples(Sg::EMPTY, Sg::EMPTY);
        assert_eq!(out.bytes(), data, "data from the initiator was changed");
        (Answer { outcome, data: into.bytes() }, tuples_in.bytes())
    }

    /// A block as it lies below, with its tuple inverted.
    fn raw(&self, lba: u64) -> Vec<u8> {
        let mut raw = AlignedBuf::zeroed(BLOCK + 8);
        SyncChannel::open(&*self.below).unwrap().read(lba, &mut raw).unwrap();
        raw.to_vec()
    }

    fn put(&self, lba: u64, raw: &[u8]) {
        SyncChannel::open(&*self.below).unwrap().write(lba, raw).unwrap();
    }
}

pub fn data(blocks: usize, seed: usize) -> Vec<u8> {
    (0..blocks * BLOCK).map(|i| ((i / BLOCK + seed) * 7 + i) as u8).collect()
}

pub fn tuples(kind: ProtectionType, lba: u64, data: &[u8]) -> Vec<u8> {
    let of = |(n, one): (usize, &[u8])| Tuple {
        app_tag: 0xA5A5,
        ..Tuple::of(kind, lba + n as u64, one)
    };
    data.chunks(BLOCK).enumerate().flat_map(|one| of(one).to_bytes()).collect()
}

fn interleaved(data: &[u8], tuples: &[u8]) -> Vec<u8> {
    let both = data.chunks(BLOCK).zip(tuples.chunks(8));
    both.flat_map(|(data, tuple)| [data, tuple].concat()).collect()
}

/// The sense of a check that failed at a block.
#[track_caller]
pub fn failed(answer: &Answer, code: u16, lba: u32) {
    assert_eq!(answer.sense(), (0xB, code));
    let sense = answer.response().sense;
    assert_eq!((sense[0], &sense[3..7]), (0xF0, &lba.to_be_bytes()[..]), "INFORMATION");
}

const GUARD: u16 = 0x1001;
const REFERENCE_TAG: u16 = 0x1003;

#[test]
fn a_unit_says_what_its_blocks_have() {
    for (kind, p_type, checks) in [(Type1, 0x01, 0x07), (Type3, 0x05, 0x26)] {
        let mut unit = Unit::new(kind);
        assert_eq!(unit.run(&[0x12, 0, 0, 0, 96, 0], &[], 96).good()[5] & 1, 1, "PROTECT");
        let extended = unit.run(&[0x12, 1, 0x86, 0, 64, 0], &[], 64).good().to_vec();
        assert_eq!((extended[4], extended[7]), (checks, 0x21), "NO_PI_CHK");
        let capacity = unit.run(&cdb16(0x9E, 0x10, 0, 32), &[], 32);
        assert_eq!(capacity.good()[8..14], [0, 0, 2, 0, p_type, 0]);
        // ATO.
        assert_eq!(unit.run(&[0x1A, 8, 10, 0, 255, 0], &[], 255).good()[4 + 5], 0xC0);
        for (opcode, field) in
            [(0x28, 0xF8), (0x8A, 0xF8), (0xAF, 0xF6), (0x41, 0xE8), (0x89, 0x18)]
        {
            let cdb = [0xA3, 0x0C, 1, opcode, 0, 0, 0, 0, 0, 64, 0, 0];
            assert_eq!(unit.run(&cdb, &[], 64).good()[4 + 1], field, "{opcode:x}");
        }
        // No atomic writes: a block with its tuple may be torn.
        assert_eq!(unit.run(&cdb16(0x9C, 0, 0, 1), &[0; 512], 0).sense(), ILLEGAL_OPCODE);
        // Commands of 32 bytes are not there.
        assert_eq!(unit.run(&[0x7F; 32], &[], 0).sense(), ILLEGAL_OPCODE);
    }
}

#[test]
fn a_unit_without_it_or_with_larger_blocks_refuses_the_field() {
    let larger = LunOptions { block_size: Some(4096), ..LunOptions::default() };
    let mut unit = Unit::on(disk(Type1, 512), larger);
    assert_eq!(unit.run(&[0x12, 0, 0, 0, 96, 0], &[], 96).good()[5] & 1, 0);
    assert_eq!(unit.run(&cdb16(0x9E, 0x10, 0, 32), &[], 32).good()[12], 0);
    assert_eq!(unit.run(&[0x12, 1, 0x86, 0, 64, 0], &[], 64).good()[4], 0);
    unit.run(&cdb10(0x28, 0x20, 0, 1), &[], 4096 + 8).invalid_cdb(1, Some(5));
    // Its blocks are checked all the same.
    unit.run(&cdb10(0x2A, 0, 1, 1), &[7; 4096], 0).good();
    let mut raw = unit.raw(11);
    raw[5] ^= 1;
    unit.put(11, &raw);
    failed(&unit.run(&cdb10(0x28, 0, 1, 1), &[], 4096), GUARD, 1);
    let mut rig = Rig::new();
    rig.input(&cdb10(0x28, 0x20, 0, 1), 520).invalid_cdb(1, Some(5));
    rig.output(&cdb10(0x2A, 0xE0, 0, 1), &[0; 520]).invalid_cdb(1, Some(7));
}

#[test]
fn blocks_and_tuples_go_both_ways_apart_and_together() {
    for kind in [Type1, Type3] {
        let mut unit = Unit::new(kind);
        for (n, (write, read)) in [
            (cdb10(0x2A, 0x20, 100, 300).to_vec(), cdb10(0x28, 0x20, 100, 300).to_vec()),
            (cdb12(0xAA, 0x28, 100, 300).to_vec(), cdb12(0xA8, 0x28, 100, 300).to_vec()),
            (cdb16(0x8A, 0xB0, 100, 300).to_vec(), cdb16(0x88, 0xB0, 100, 300).to_vec()),
            (cdb16(0x8E, 0x20, 100, 300).to_vec(), cdb16(0x88, 0x60, 100, 300).to_vec()),
        ]
        .into_iter()
        .enumerate()
        {
            let data = data(300, n);
            let of = tuples(kind, 100, &data);
            let (answer, _) = unit.carry(&write, &data, 0, With::Out(&of));
            answer.good();
            assert_eq!(answer.response().transferred as usize, data.len());
            let (answer, came) = unit.carry(&read, &[], data.len(), With::In(of.len()));
            assert!(answer.good() == data && came == of);
            // Without a list of their own, tuples lie behind their blocks.
            let both = interleaved(&data, &of);
            assert!(unit.run(&read, &[], both.len()).good() == both);
            let answer = unit.run(&write, &both, 0);
            answer.good();
            assert_eq!(answer.response().transferred as usize, both.len());
            // Without the field, they stay where they are.
            assert!(unit.run(&cdb10(0x28, 0, 100, 300), &[], data.len()).good() == data);
            // Lists that are too long serve, those that are too short do not.
            let (answer, came) = unit.carry(&read, &[], data.len() + 9, With::In(of.len() + 9));
            assert!(answer.good() == data && came[..of.len()] == of);
            assert!(came[of.len()..].iter().all(|byte| *byte == 0xEE));
            for (len, of_tuples) in [(data.len() - 1, of.len()), (data.len(), of.len() - 1)] {
                let (answer, _) = unit.carry(&read, &[], len, With::In(of_tuples));
                assert_eq!(answer.outcome, Outcome::Overrun);
                let with = With::Out(&of[..of_tuples]);
                let (answer, _) = unit.carry(&write, &data[..len], 0, with);
                assert_eq!(answer.outcome, Outcome::Overrun);
            }
            assert_eq!(unit.run(&read, &[], both.len() - 1).outcome, Outcome::Overrun);
        }
        let none = unit.run(&cdb10(0x28, 0x20, 0, 0), &[], 0);
        assert_eq!(none.response().transferred, 0);
        let beyond = unit.run(&cdb10(0x28, 0x20, 1023, 2), &[], 1040);
        assert_eq!(beyond.sense(), OUT_OF_RANGE);
    }
}

/// The value of the field, and whether guard and reference tag are checked.
const FIELDS: [(u8, bool, bool); 5] =
    [(1, true, true), (2, false, true), (3, false, false), (4, true, false), (5, true, true)];

#[test]
fn sbc4_5_12_each_value_of_the_field_checks_what_it_says() {
    for kind in [Type1, Type3] {
        let mut unit = Unit::new(kind);
        let data = data(8, 3);
        let good = tuples(kind, 40, &data);
        for (field, guard_checked, tag_checked) in FIELDS {
            let flags = field << 5;
            for (byte, code, checked) in [
                (5 * 8, GUARD, guard_checked),
                (5 * 8 + 2, 0, false), // application tags are the initiators'
                (5 * 8 + 7, REFERENCE_TAG, tag_checked && kind == Type1),
            ] {
                let mut bad = good.clone();
                bad[byte] ^= 0x40;
                // To the unit; what was there before is not touched.
                unit.carry(&cdb10(0x2A, 0x20, 40, 8), &data, 0, With::Out(&good)).0.good();
                let other: Vec<u8> = data.iter().map(|b| b ^ 0xFF).collect();
                let (answer, _) = unit.carry(&cdb10(0x2A, flags, 40, 8), &data, 0, With::Out(&bad));
                if checked {
                    failed(&answer, code, 45);
                    assert_eq!(
                        unit.raw(45)[BLOCK..],
                        good[40..48].iter().map(|b| !b).collect::<Vec<_>>()
                    );
                } else {
                    answer.good();
                }
                // From the unit, with whatever is there.
                unit.carry(&cdb10(0x2A, 0x60, 40, 8), &data, 0, With::Out(&bad)).0.good();
                let (answer, came) =
                    unit.carry(&cdb10(0x28, flags, 40, 8), &[], data.len(), With::In(64));
                let verified = unit.run(&cdb10(0x2F, flags, 40, 8), &[], 0);
                if checked {
                    failed(&answer, code, 45);
                    failed(&verified, code, 45);
                } else {
                    assert!(answer.good() == data && came == bad);
                    verified.good();
                }
                // WRITE AND VERIFY checks both times.
                let (answer, _) = unit.carry(&cdb10(0x2E, flags, 40, 8), &data, 0, With::Out(&bad));
                if checked {
                    failed(&answer, code, 45)
                } else {
                    _ = answer.good()
                }
                assert_ne!(other, data);
            }
        }
        for field in [6, 7] {
            for opcode in [0x28, 0x2A, 0x2E, 0x2F] {
                let answer = unit.run(&cdb10(opcode, field << 5, 0, 1), &[0; 520], 520);
                answer.invalid_cdb(1, Some(7));
            }
        }
    }
}

#[test]
fn what_goes_bad_below_is_told_to_whoever_reads() {
    let mut unit = Unit::new(Type1);
    let data = data(300, 1);
    unit.run(&cdb10(0x2A, 0, 200, 300), &data, 0).good();
    let (one, two) = (unit.raw(210), unit.raw(480));
    let mut damaged = one.clone();
    damaged[100] ^= 1;
    for (raw, code) in [(&damaged, GUARD), (&two, REFERENCE_TAG)] {
        unit.put(210, raw);
        failed(&unit.run(&cdb10(0x28, 0, 200, 300), &[], 300 * BLOCK), code, 210);
        failed(&unit.run(&[8, 0, 0, 210, 1, 0], &[], BLOCK), code, 210);
        failed(&unit.run(&cdb10(0x28, 0x20, 200, 300), &[], 300 * 520), code, 210);
        failed(&unit.run(&cdb10(0x2F, 0, 200, 300), &[], 0), code, 210);
        failed(&unit.run(&cdb10(0x2F, 0x20, 200, 300), &[], 0), code, 210);
        failed(&unit.run(&cdb16(0x8B, 0, 210, 1), &[1; 512], 0), code, 210);
        unit.run(&cdb10(0x28, 0, 211, 200), &[], 200 * BLOCK).good();
        // In descriptors.
        let d_sense = [0, 0, 0, 0, 10, 10, 0x26, 0x10, 0, 0xC0, 0, 0, 0, 0, 0, 0];
        unit.run(&[0x15, 0x10, 0, 0, 16, 0], &d_sense, 0).good();
        let response = unit.run(&cdb10(0x28, 0, 200, 300), &[], 300 * BLOCK).response();
        let [asc, ascq] = code.to_be_bytes();
        let head = [0x72, 0xB, asc, ascq, 0, 0, 0, 12, 0, 10, 0x80, 0, 0, 0, 0, 0, 0, 0, 0, 210];
        assert_eq!((response.sense_len, response.sense), (20, head));
        let mut plain = d_sense;
        plain[6] = 0x22;
        unit.run(&[0x15, 0x10, 0, 0, 16, 0], &plain, 0).good();
    }
    unit.put(210, &one);
    assert!(unit.run(&cdb10(0x28, 0, 200, 300), &[], 300 * BLOCK).good() == data);
}

#[test]
fn what_is_written_without_tuples_gets_them_and_what_is_unmapped_has_none() {
    for kind in [Type1, Type3] {
        let mut unit = Unit::new(kind);
        let zeros = vec![0; BLOCK];
        unit.run(&cdb10(0x2A, 0, 0, 64), &data(64, 1), 0).good();
        // WRITE SAME of 10 with ones, of 20 and 21 with zeros, UNMAP of 30.
        unit.run(&cdb10(0x41, 0, 10, 1), &[1; BLOCK], 0).good();
        unit.run(&cdb10(0x41, 0, 20, 1), &zeros, 0).good();
        unit.run(&cdb16(0x93, 0x09, 21, 1), &[], 0).good();
        let list = [0, 22, 0, 16, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 30, 0, 0, 0, 1, 0, 0, 0, 0];
        unit.run(&cdb10(0x42, 0, 0, 24), &list, 0).good();
        let (answer, came) = unit.carry(&cdb10(0x28, 0x20, 0, 64), &[], 64 * BLOCK, With::In(512));
        let read = answer.good();
        for (lba, (data, tuple)) in read.chunks(BLOCK).zip(came.chunks(8)).enumerate() {
            if [20, 21, 30].contains(&lba) {
                assert_eq!((data, tuple), (&zeros[..], &[0xFF; 8][..]), "{lba}");
            } else {
                assert_eq!(tuple, Tuple::of(kind, lba as u64, data).to_bytes(), "{lba}");
            }
        }
        assert_eq!(read[10 * BLOCK..11 * BLOCK], [1; BLOCK]);
        assert_eq!(guard(&[1; BLOCK]).to_be_bytes(), came[80..82]);
        // These carry no tuples here.
        for cdb in [cdb16(0x8B, 0x20, 10, 1).to_vec(), cdb16(0x89, 0x20, 10, 1).to_vec()] {
            unit.run(&cdb, &[0; 520], 0).invalid_cdb(1, Some(5));
        }
        unit.run(&cdb16(0x93, 0x21, 10, 1), &[], 0).invalid_cdb(1, Some(0)); // NDOB
        // Nor do these compare them with data.
        unit.run(&cdb10(0x2F, 0x22, 10, 1), &[1; 520], 0).invalid_cdb(1, Some(2));
        unit.run(&cdb10(0x2E, 0x22, 10, 1), &[1; 520], 0).invalid_cdb(1, Some(1));
    }
}

#[test]
fn sbc4_5_54_write_same_gives_each_block_the_tuple_and_counts_with_type_1() {
    for kind in [Type1, Type3] {
        let mut unit = Unit::new(kind);
        let block = data(1, 9);
        let of = tuples(kind, 100, &block);
        // More than a bounce buffer holds.
        for cdb in [cdb10(0x41, 0x20, 100, 700).to_vec(), cdb16(0x93, 0x28, 100, 700).to_vec()] {
            unit.run(&cdb10(0x2A, 0, 100, 700), &data(700, 1), 0).good();
            let (answer, _) = unit.carry(&cdb, &block, 0, With::Out(&of));
            answer.good();
            assert_eq!(answer.response().transferred, 512);
            let (answer, came) =
                unit.carry(&cdb10(0x28, 0x20, 100, 700), &[], 700 * BLOCK, With::In(5600));
            assert!(answer.good().chunks(BLOCK).all(|one| one == block));
            for (n, tuple) in came.chunks(8).enumerate() {
                assert_eq!(tuple, tuples(kind, 100 + n as u64, &block), "{n}");
            }
        }
        // Behind the block, and with each check.
        unit.run(&cdb10(0x41, 0x20, 100, 2), &interleaved(&block, &of), 0).good();
        for (byte, code) in [(0, GUARD), (7, REFERENCE_TAG)] {
            let mut bad = of.clone();
            bad[byte] ^= 1;
            let (answer, _) = unit.carry(&cdb10(0x41, 0x20, 100, 2), &block, 0, With::Out(&bad));
            match (code, kind) {
                (REFERENCE_TAG, Type3) => _ = answer.good(),
                _ => failed(&answer, code, 100),
            }
            // Unchecked, it is what lies there.
            unit.carry(&cdb10(0x41, 0x60, 100, 2), &block, 0, With::Out(&bad)).0.good();
            let read = cdb10(0x28, 0x60, 100, 2);
            let (answer, came) = unit.carry(&read, &[], 2 * BLOCK, With::In(16));
            answer.good();
            assert_eq!(came[..8], bad);
        }
        for (len, of_tuples) in [(511, 8), (512, 7), (512, 16), (1024, 8)] {
            let (data, of) = (vec![1; len], vec![1; of_tuples]);
            let (answer, _) = unit.carry(&cdb10(0x41, 0x20, 100, 2), &data, 0, With::Out(&of));
            answer.invalid_cdb(7, None);
        }
        unit.run(&cdb10(0x41, 0x20, 100, 2), &block, 0).invalid_cdb(7, None);
        unit.carry(&cdb10(0x41, 0x20, 100, 0), &block, 0, With::Out(&of)).0.invalid_cdb(7, None);
        let (answer, _) = unit.carry(&cdb10(0x41, 0x20, 1023, 2), &block, 0, With::Out(&of));
        assert_eq!(answer.sense(), OUT_OF_RANGE);
    }
}
