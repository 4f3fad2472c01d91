//! Commands that do more than one thing: WRITE AND VERIFY, COMPARE AND WRITE, ORWRITE; and PRE-FETCH.

use crate::rig::*;
use bdev::{Features, IoError, Op};
use scsi::{LunOptions, Outcome, Status, Task};

fn pattern(seed: u8, len: usize) -> Vec<u8> {
    (0..len).map(|i| (i * 3 + i / 512) as u8 ^ seed).collect()
}

/// COMPARE AND WRITE of `blocks` blocks.
fn compare_and_write(flags: u8, lba: u64, blocks: u8) -> [u8; 16] {
    let mut cdb = cdb16(0x89, flags, lba, 0);
    cdb[13] = blocks;
    cdb
}

const MISCOMPARE: (u8, u16) = (0xE, 0x1D00);

#[test]
fn sbc3_5_38_write_and_verify_writes_flushes_and_reads_by_every_form() {
    for (flags, mode) in [(0, Mode::AtOnce), (0x02, Mode::Later)] {
        let mut rig = Setup { mode, ..Setup::default() }.build();
        let forms = [
            cdb10(0x2E, flags, 100, 300).to_vec(),
            cdb12(0xAE, flags, 100, 300).to_vec(),
            cdb16(0x8E, flags, 100, 300).to_vec(),
        ];
        for (i, cdb) in forms.iter().enumerate() {
            let data = pattern(i as u8, 300 * 512);
            let answer = rig.output(cdb, &data);
            answer.good();
            assert_eq!(answer.response().transferred as usize, data.len());
            assert_eq!(rig.medium()[100 * 512..400 * 512], data);
            let asked = rig.asked();
            assert_eq!(asked[..2], [(Op::Write, 100, 300, false), (Op::Flush, 0, 0, false)]);
            // Through the bounce buffer, in steps.
            assert_eq!(asked[2..].iter().map(|(_, _, blocks, _)| blocks).sum::<u64>(), 300);
            assert!(asked[2..].iter().all(|(op, ..)| *op == Op::Read));
        }
    }
}

#[test]
fn write_and_verify_tells_what_did_not_go_well() {
    let mut rig = Rig::new();
    let cdb = cdb10(0x2E, 0x02, 8, 2);
    for (skip, error, sense) in [
        (0, IoError::WriteMedium, (0x3, 0x0C00)),
        (1, IoError::Flush, (0x4, 0x0300)),
        (2, IoError::ReadMedium, (0x3, 0x1100)),
    ] {
        rig.fail(skip, error);
        assert_eq!(rig.output(&cdb, &pattern(1, 1024)).sense(), sense);
    }
    // BYTCHK 10b and 11b are reserved, and so is WRPROTECT without protection information.
    rig.output(&cdb10(0x2E, 0x04, 8, 2), &pattern(1, 1024)).invalid_cdb(1, Some(2));
    rig.output(&cdb10(0x2E, 0x20, 8, 2), &pattern(1, 1024)).invalid_cdb(1, Some(5));
    assert_eq!(rig.output(&cdb, &pattern(1, 1000)).outcome, Outcome::Overrun);
    assert_eq!(rig.output(&cdb10(0x2E, 0, 4095, 2), &pattern(1, 1024)).sense(), OUT_OF_RANGE);
    rig.asked();
    rig.run(&cdb10(0x2E, 0, 8, 0)).good();
    assert_eq!(rig.asked(), []);
    // The buffer is free again after each of them.
    rig.output(&cdb, &pattern(2, 1024)).good();
    // More data than is written stays where it is.
    let answer = rig.output(&cdb, &pattern(3, 1024 + 50));
    answer.good();
    assert_eq!(answer.response().transferred, 1024);
}

#[test]
fn sbc3_5_2_compare_and_write_writes_where_the_blocks_are_as_expected() {
    for (block_size, mode) in [(512, Mode::AtOnce), (4096, Mode::Later)] {
        let mut rig = Setup { block_size, mode, ..Setup::default() }.build();
        rig.scribble();
        let (bytes, at) = (3 * block_size as usize, 17 * block_size as usize);
        let before = rig.medium()[at..at + bytes].to_vec();
        let after = pattern(9, bytes);
        let cdb = compare_and_write(0, 17, 3);
        let answer = rig.output(&cdb, &[&before[..], &after[..]].concat());
        answer.good();
        assert_eq!(answer.response().transferred as usize, 2 * bytes);
        assert_eq!(rig.medium()[at..at + bytes], after);
        assert_eq!(rig.asked(), [(Op::Read, 17, 3, false), (Op::Write, 17, 3, false)]);

        // Now they are not, in one byte.
        let mut wrong = after.clone();
        *wrong.last_mut().unwrap() ^= 1;
        let answer = rig.output(&cdb, &[&wrong[..], &before[..]].concat());
        assert_eq!(answer.sense(), MISCOMPARE);
        assert_eq!(rig.medium()[at..at + bytes], after);
        assert_eq!(rig.asked(), [(Op::Read, 17, 3, false)]);
    }
}

#[test]
fn sbc3_5_2_compare_and_write_with_fua_is_durable() {
    let zeros = [0; 1024];
    let mut rig = Rig::new();
    rig.output(&compare_and_write(0x08, 0, 1), &zeros).good();
    assert_eq!(rig.asked(), [(Op::Read, 0, 1, false), (Op::Write, 0, 1, true)]);
    let features = Features { fua: false, ..ALL_FEATURES };
    let mut rig = Setup { features, ..Setup::default() }.build();
    rig.output(&compare_and_write(0x08, 0, 1), &zeros).good();
    let asked = [(Op::Read, 0, 1, false), (Op::Write, 0, 1, false), (Op::Flush, 0, 0, false)];
    assert_eq!(rig.asked(), asked);
}

#[test]
fn sbc3_6_6_3_compare_and_write_has_a_maximum_length() {
    for (block_size, most) in [(512, 128), (4096, 16)] {
        let mut rig = Setup { block_size, ..Setup::default() }.build();
        assert_eq!(rig.input(&[0x12, 1, 0xB0, 0, 64, 0], 64).good()[5], most);
        let bytes = 2 * usize::from(most) * block_size as usize;
        rig.output(&compare_and_write(0, 0, most), &vec![0; bytes]).good();
        let longer = vec![0; bytes + 2 * block_size as usize];
        rig.output(&compare_and_write(0, 0, most + 1), &longer).invalid_cdb(13, None);
    }
    let features = Features { max_blocks: 8, ..ALL_FEATURES };
    let mut rig = Setup { features, ..Setup::default() }.build();
    assert_eq!(rig.input(&[0x12, 1, 0xB0, 0, 64, 0], 64).good()[5], 8);
}

#[test]
fn compare_and_write_refuses_what_it_cannot_do() {
    let mut rig = Rig::new();
    rig.run(&compare_and_write(0, 5, 0)).good();
    assert_eq!(rig.output(&compare_and_write(0, 4095, 2), &[0; 2048]).sense(), OUT_OF_RANGE);
    assert_eq!(rig.output(&compare_and_write(0, 0, 2), &[0; 2047]).outcome, Outcome::Overrun);
    rig.fail(0, IoError::ReadMedium);
    assert_eq!(rig.output(&compare_and_write(0, 0, 1), &[0; 1024]).sense(), (0x3, 0x1100));
    rig.fail(1, IoError::WriteMedium);
    assert_eq!(rig.output(&compare_and_write(0, 0, 1), &[0; 1024]).sense(), (0x3, 0x0C00));
    let options = LunOptions { read_only: true, ..LunOptions::default() };
    let mut rig = rig.another_unit(options);
    assert_eq!(rig.output(&compare_and_write(0, 0, 1), &[0; 1024]).sense(), WRITE_PROTECTED);
}

#[test]
fn one_compare_and_write_of_a_volume_at_a_time_whoever_asks() {
    let mut rig = Setup { mode: Mode::Later, ..Setup::default() }.build();
    let mut other = rig.another_unit(LunOptions::default());
    let out = Buffer::new(&[0; 1024], 512);
    let mut task = Task::new(1);
    task.prepare(&pad(&compare_and_write(0, 0, 1)), out.sg(), Buffer::new(&[], 1).sg());
    assert_eq!(rig.lun.start(&mut task), Outcome::Pending);
    for cdb in [compare_and_write(0, 9, 1), cdb16(0x8B, 0, 9, 1)] {
        let answer = other.output(&cdb, &[0; 1024]);
        assert_eq!(answer.response().status, Status::Busy);
    }
    let mut done = Vec::with_capacity(1);
    for last in [false, true] {
        done.clear();
        assert_eq!(rig.lun.poll(&mut done), 1);
        let outcome = rig.lun.resume(&mut task, Ok(()));
        assert_eq!(matches!(outcome, Outcome::Done(r) if r.status == Status::Good), last);
    }
    other.output(&compare_and_write(0, 9, 1), &[0; 1024]).good();

    // A session that ends in the middle keeps nobody out.
    assert_eq!(rig.lun.start(&mut task), Outcome::Pending);
    done.clear();
    assert_eq!(rig.lun.poll(&mut done), 1);
    drop(rig);
    other.output(&compare_and_write(0, 9, 1), &[0; 1024]).good();
}

#[test]
fn sbc3_5_9_orwrite_sets_bits() {
    for mode in [Mode::AtOnce, Mode::Later] {
        let mut rig = Setup { mode, ..Setup::default() }.build();
        rig.scribble();
        let bytes = 300 * 512;
        let before = rig.medium()[3 * 512..3 * 512 + bytes].to_vec();
        let data = pattern(0x5A, bytes);
        let answer = rig.output(&cdb16(0x8B, 0x08, 3, 300), &data);
        answer.good();
        assert_eq!(answer.response().transferred as usize, bytes);
        let ored: Vec<u8> = before.iter().zip(&data).map(|(a, b)| a | b).collect();
        assert_eq!(rig.medium()[3 * 512..3 * 512 + bytes], ored);
        let asked = rig.asked();
        assert_eq!(asked[..2], [(Op::Read, 3, 128, false), (Op::Write, 3, 128, true)]);
        assert_eq!(asked.len(), 6);
    }
    let mut rig = Rig::new();
    assert_eq!(rig.output(&cdb16(0x8B, 0, 4095, 2), &[0; 1024]).sense(), OUT_OF_RANGE);
    assert_eq!(rig.output(&cdb16(0x8B, 0, 0, 2), &[0; 1023]).outcome, Outcome::Overrun);
    rig.run(&cdb16(0x8B, 0, 0, 0)).good();
    assert_eq!(rig.asked(), []);
}

#[test]
fn sbc3_5_7_pre_fetch_checks_its_range() {
    let mut rig = Rig::new();
    for immed in [0, 0x02] {
        rig.run(&cdb10(0x34, immed, 0, 0)).good();
        rig.run(&cdb10(0x34, immed, 4000, 96)).good();
        rig.run(&cdb16(0x90, immed, 4000, 96)).good();
        assert_eq!(rig.run(&cdb10(0x34, immed, 4000, 97)).sense(), OUT_OF_RANGE);
        assert_eq!(rig.run(&cdb16(0x90, immed, u64::MAX, 2)).sense(), OUT_OF_RANGE);
    }
    assert_eq!(rig.asked(), []);
}
