//! READ, WRITE, SYNCHRONIZE CACHE, VERIFY, START STOP UNIT.

use crate::rig::*;
use bdev::{Features, Op};
use scsi::{LunOptions, MAX_TRANSFER_BYTES, Outcome};

fn pattern(len: usize) -> Vec<u8> {
    (0..len).map(|i| (i * 7 + i / 512) as u8).collect()
}

/// READ and WRITE of each length of CDB, at the same place.
fn forms(opcodes: [u8; 4], flags: u8, lba: u32, blocks: u8) -> Vec<Vec<u8>> {
    let l = lba.to_be_bytes();
    vec![
        vec![opcodes[0], l[1], l[2], l[3], blocks, 0],
        cdb10(opcodes[1], flags, lba, blocks.into()).to_vec(),
        cdb12(opcodes[2], flags, lba, blocks.into()).to_vec(),
        cdb16(opcodes[3], flags, lba.into(), blocks.into()).to_vec(),
    ]
}

const READS: [u8; 4] = [0x08, 0x28, 0xA8, 0x88];
const WRITES: [u8; 4] = [0x0A, 0x2A, 0xAA, 0x8A];

#[test]
fn what_is_written_is_read_back_by_every_form_sbc3_5_11_to_5_13_and_5_33_to_5_35() {
    for (block_size, mode) in [(512, Mode::AtOnce), (4096, Mode::Later)] {
        let mut rig = Setup { block_size, mode, ..Setup::default() }.build();
        for (i, write) in forms(WRITES, 0, 100, 5).iter().enumerate() {
            let mut data = pattern(5 * block_size as usize);
            data[0] = i as u8;
            let answer = rig.output(write, &data);
            answer.good();
            assert_eq!(answer.response().transferred as usize, data.len());
            for read in forms(READS, 0, 100, 5) {
                assert_eq!(rig.input(&read, data.len()).good(), data);
            }
            let at = 100 * block_size as usize;
            assert_eq!(rig.medium()[at..at + data.len()], data);
            let asked = rig.asked();
            assert_eq!(asked[0], (Op::Write, 100, 5, false));
            assert_eq!(asked[1..], [(Op::Read, 100, 5, false); 4]);
        }
    }
}

#[test]
fn sbc2_5_7_read_6_of_0_blocks_is_256() {
    let mut rig = Rig::new();
    assert_eq!(rig.input(&[0x08, 0, 0, 9, 0, 0], 256 * 512).good().len(), 256 * 512);
    rig.output(&[0x0A, 0, 0, 9, 0, 0], &pattern(256 * 512)).good();
    assert_eq!(rig.asked(), [(Op::Read, 9, 256, false), (Op::Write, 9, 256, false)]);
}

#[test]
fn sbc3_5_11_other_lengths_of_0_move_nothing_but_check_the_address() {
    let mut rig = Rig::new();
    for opcodes in [READS, WRITES] {
        for cdb in forms(opcodes, 0x08, BLOCKS as u32, 0).iter().skip(1) {
            assert!(rig.run(cdb).good().is_empty());
        }
        for cdb in forms(opcodes, 0, BLOCKS as u32 + 1, 0).iter().skip(1) {
            assert_eq!(rig.run(cdb).sense(), OUT_OF_RANGE);
        }
    }
    assert_eq!(rig.asked(), []);
}

#[test]
fn sbc3_4_5_blocks_beyond_the_end_are_out_of_range() {
    let mut rig = Rig::new();
    let end = BLOCKS as u32;
    for (opcodes, lba, blocks) in [(READS, end, 1), (READS, end - 1, 2), (WRITES, end - 3, 4)] {
        for cdb in forms(opcodes, 0, lba, blocks) {
            assert_eq!(rig.io(&cdb, &[0; 2048], 1024).sense(), OUT_OF_RANGE, "{cdb:x?}");
        }
    }
    for lba in [u64::MAX, u64::MAX - 1, 1 << 63] {
        for opcode in [0x88, 0x8A, 0x8F, 0x91, 0x93] {
            let answer = rig.io(&cdb16(opcode, 0, lba, 2), &[0; 1024], 1024);
            assert_eq!(answer.sense(), OUT_OF_RANGE, "{opcode:x}");
        }
    }
    assert_eq!(rig.asked(), []);
}

#[test]
fn sbc3_6_6_3_longer_than_the_maximum_transfer_length_is_an_invalid_field() {
    let most = (MAX_TRANSFER_BYTES / 512) as u32;
    let mut rig = Setup { num_blocks: 1 << 15, ..Setup::default() }.build();
    let len = MAX_TRANSFER_BYTES as usize;
    assert_eq!(rig.input(&cdb10(0x28, 0, 0, most as u16), len).good().len(), len);
    rig.input(&cdb10(0x28, 0, 0, most as u16 + 1), len + 512).invalid_cdb(7, None);
    rig.input(&cdb12(0xA8, 0, 0, most + 1), len + 512).invalid_cdb(6, None);
    rig.input(&cdb16(0x88, 0, 0, most + 1), len + 512).invalid_cdb(10, None);
    rig.output(&cdb16(0x8A, 0, 0, u32::MAX), &[0; 512]).invalid_cdb(10, None);
    rig.run(&cdb16(0x8F, 0, 0, most + 1)).invalid_cdb(10, None);

    let features = Features { max_blocks: 8, ..ALL_FEATURES };
    let mut rig = Setup { features, ..Setup::default() }.build();
    rig.input(&cdb10(0x28, 0, 0, 8), 4096).good();
    rig.input(&cdb10(0x28, 0, 0, 9), 4608).invalid_cdb(7, None);
    rig.input(&[0x08, 0, 0, 0, 9, 0], 4608).invalid_cdb(4, None);
}

#[test]
fn a_buffer_longer_than_the_transfer_keeps_its_rest() {
    for mode in [Mode::AtOnce, Mode::Later] {
        let mut rig = Setup { mode, ..Setup::default() }.build();
        rig.scribble();
        // 300 blocks: more than one step through the bounce buffer.
        let answer = rig.input(&cdb10(0x28, 0, 17, 300), 300 * 512 + 100);
        assert_eq!(answer.good(), &rig.medium()[17 * 512..317 * 512]);
        assert!(answer.data[300 * 512..].iter().all(|b| *b == 0xEE));
        assert!(rig.asked().len() > 1);

        let (before, data) = (rig.medium(), pattern(300 * 512 + 77));
        let answer = rig.output(&cdb10(0x2A, 0, 17, 300), &data);
        assert_eq!(answer.response().transferred, 300 * 512);
        answer.good();
        let after = rig.medium();
        assert_eq!(after[17 * 512..317 * 512], data[..300 * 512]);
        assert_eq!(after[317 * 512..], before[317 * 512..]);
        // The buffer is free again.
        rig.input(&cdb10(0x28, 0, 0, 1), 513).good();
        // And 0 blocks need none.
        assert!(rig.input(&cdb10(0x28, 0, 0, 0), 513).good().is_empty());
    }
}

#[test]
fn virtio_5_6_6_1_a_buffer_shorter_than_the_transfer_is_an_overrun() {
    let mut rig = Rig::new();
    assert_eq!(rig.input(&cdb10(0x28, 0, 0, 2), 1023).outcome, Outcome::Overrun);
    assert_eq!(rig.output(&cdb10(0x2A, 0, 0, 2), &[0; 1023]).outcome, Outcome::Overrun);
    assert_eq!(rig.output(&cdb10(0x2F, 2, 0, 2), &[0; 1023]).outcome, Outcome::Overrun);
    assert_eq!(rig.output(&cdb10(0x42, 0, 0, 24), &[0; 23]).outcome, Outcome::Overrun);
    // A buffer in the wrong direction is none.
    assert_eq!(rig.output(&cdb10(0x28, 0, 0, 1), &[0; 512]).outcome, Outcome::Overrun);
    assert_eq!(rig.asked(), []);
}

#[test]
fn sbc3_5_33_fua_is_the_disks_or_a_flush_after_the_write() {
    for mode in [Mode::AtOnce, Mode::Later] {
        let mut rig = Setup { mode, ..Setup::default() }.build();
        for cdb in forms(WRITES, 0x08, 3, 1).iter().skip(1) {
            rig.output(cdb, &[1; 512]).good();
            assert_eq!(rig.asked(), [(Op::Write, 3, 1, true)]);
        }
        let features = Features { fua: false, ..ALL_FEATURES };
        let mut rig = Setup { mode, features, ..Setup::default() }.build();
        for cdb in forms(WRITES, 0x08, 3, 1).iter().skip(1) {
            rig.output(cdb, &[1; 512]).good();
            assert_eq!(rig.asked(), [(Op::Write, 3, 1, false), (Op::Flush, 0, 0, false)]);
        }
        // Through the bounce buffer, too; and DPO (10h) means nothing here.
        rig.output(&cdb10(0x2A, 0x18, 3, 1), &[1; 600]).good();
        assert_eq!(rig.asked(), [(Op::Write, 3, 1, false), (Op::Flush, 0, 0, false)]);
    }
}

#[test]
fn sbc3_5_11_a_read_with_fua_flushes_first() {
    let mut rig = Setup { mode: Mode::Later, ..Setup::default() }.build();
    rig.input(&cdb16(0x88, 0x08, 3, 1), 512).good();
    assert_eq!(rig.asked(), [(Op::Flush, 0, 0, false), (Op::Read, 3, 1, false)]);
}

#[test]
fn a_group_number_has_no_effect() {
    let mut rig = Rig::new();
    let mut cdb = cdb10(0x28, 0, 0, 1);
    cdb[6] = 0x1F;
    rig.input(&cdb, 512).good();
    let mut cdb = cdb16(0x8A, 0, 0, 1);
    cdb[14] = 0x3F;
    rig.output(&cdb, &[0; 512]).good();
}

#[test]
fn reserved_bits_and_absent_features_are_invalid_fields_by_byte_and_bit() {
    let mut rig = Rig::new();
    // RDPROTECT: the unit has no protection information (SBC-3 5.11).
    rig.input(&cdb10(0x28, 0x20, 0, 1), 512).invalid_cdb(1, Some(5));
    rig.output(&cdb16(0x8A, 0xE0, 0, 1), &[0; 512]).invalid_cdb(1, Some(7));
    // NACA, in the control byte (SAM-5 5.2).
    rig.run(&[0, 0, 0, 0, 0, 0x04]).invalid_cdb(5, Some(2));
    rig.input(&[0x28, 0, 0, 0, 0, 0, 0, 0, 1, 0x04], 512).invalid_cdb(9, Some(2));
    rig.run(&[0, 0, 0x12, 0, 0, 0]).invalid_cdb(2, Some(4));
    // What follows the CDB is not looked at.
    let mut long = pad(&[0; 6]);
    long[6..].fill(0xFF);
    rig.run(&long).good();
    assert_eq!(rig.asked(), []);
}

#[test]
fn a_read_only_unit_refuses_what_writes_and_nothing_else() {
    let by_disk = Features { read_only: true, ..ALL_FEATURES };
    let by_option = LunOptions { read_only: true, ..LunOptions::default() };
    for (features, options) in [(by_disk, LunOptions::default()), (ALL_FEATURES, by_option)] {
        let mut rig = Setup { features, options, ..Setup::default() }.build();
        assert!(rig.shared.is_read_only());
        let mut refused = forms(WRITES, 0x08, 0, 1);
        refused.push(cdb10(0x41, 0, 0, 1).to_vec());
        refused.push(cdb16(0x93, 0x09, 0, 1).to_vec());
        refused.push(cdb10(0x42, 0, 0, 0).to_vec());
        for cdb in refused {
            assert_eq!(rig.output(&cdb, &[0; 512]).sense(), WRITE_PROTECTED, "{cdb:x?}");
        }
        rig.input(&cdb10(0x28, 0x08, 0, 1), 512).good();
        rig.output(&cdb10(0x2F, 0x02, 0, 1), &[0; 512]).good();
        rig.run(&cdb10(0x35, 0, 0, 0)).good();
        let ops: Vec<Op> = rig.asked().iter().map(|a| a.0).collect();
        assert_eq!(ops, [Op::Read, Op::Read, Op::Flush]);
    }
}

#[test]
fn sbc3_5_26_synchronize_cache_is_a_flush_even_without_a_volatile_cache() {
    for volatile_cache in [false, true] {
        let features = Features { volatile_cache, ..ALL_FEATURES };
        let mut rig = Setup { features, mode: Mode::Later, ..Setup::default() }.build();
        // IMMED and SYNC_NV change nothing.
        for flags in [0, 0x02, 0x04] {
            rig.run(&cdb10(0x35, flags, 5, 9)).good();
            rig.run(&cdb16(0x91, flags, 5, 9)).good();
            assert_eq!(rig.asked(), [(Op::Flush, 0, 0, false); 2]);
        }
        assert_eq!(rig.run(&cdb10(0x35, 0, BLOCKS as u32, 1)).sense(), OUT_OF_RANGE);
    }
}

#[test]
fn sbc3_5_29_verify_reads_the_medium() {
    for mode in [Mode::AtOnce, Mode::Later] {
        let mut rig = Setup { mode, ..Setup::default() }.build();
        rig.run(&cdb10(0x2F, 0x10, 4, 300)).good();
        rig.run(&cdb12(0xAF, 0, 4, 1)).good();
        rig.run(&cdb16(0x8F, 0, 4, 1)).good();
        rig.run(&cdb16(0x8F, 0, 4, 0)).good();
        let asked = rig.asked();
        assert!(asked.iter().all(|a| a.0 == Op::Read));
        assert_eq!(asked.iter().map(|a| a.2).sum::<u64>(), 302);
        rig.run(&cdb10(0x2F, 0x04, 0, 1)).invalid_cdb(1, Some(2)); // BYTCHK 10b is reserved
    }
}

#[test]
fn sbc3_5_29_verify_with_bytchk_compares_every_byte() {
    const MISCOMPARE: (u8, u16) = (0xE, 0x1D00);
    let mut rig = Setup { mode: Mode::Later, ..Setup::default() }.build();
    rig.scribble();
    let mut data = rig.medium()[8 * 512..308 * 512].to_vec();
    rig.output(&cdb10(0x2F, 0x02, 8, 300), &data).good();
    for at in [0, 511, 512, 65_536, 300 * 512 - 1] {
        data[at] ^= 0x80;
        assert_eq!(rig.output(&cdb10(0x2F, 0x02, 8, 300), &data).sense(), MISCOMPARE, "{at}");
        data[at] ^= 0x80;
    }
    // BYTCHK 11b: one block for all.
    rig.state.borrow_mut().medium[..200 * 512].fill(9);
    rig.output(&cdb16(0x8F, 0x06, 0, 200), &[9; 512]).good();
    rig.state.borrow_mut().medium[199 * 512 + 3] = 8;
    assert_eq!(rig.output(&cdb16(0x8F, 0x06, 0, 200), &[9; 512]).sense(), MISCOMPARE);
    rig.output(&cdb16(0x8F, 0x06, 0, 199), &[9; 512]).good();
}

#[test]
fn sbc3_5_25_a_stop_flushes_and_nothing_ever_stops() {
    let mut rig = Rig::new();
    rig.run(&[0x1B, 0, 0, 0, 0x01, 0]).good();
    rig.run(&[0x1B, 0, 0, 0, 0x04, 0]).good(); // NO_FLUSH
    assert_eq!(rig.asked(), []);
    rig.run(&[0x1B, 1, 0, 0, 0x00, 0]).good();
    assert_eq!(rig.asked(), [(Op::Flush, 0, 0, false)]);
    rig.run(&[0x1B, 0, 0, 0, 0x02, 0]).invalid_cdb(4, Some(1)); // LOEJ
    rig.run(&[0x1B, 0, 0, 0, 0x30, 0]).invalid_cdb(4, Some(5)); // POWER CONDITION: STANDBY
    rig.run(&[0, 0, 0, 0, 0, 0]).good();
    rig.run(&[0x1E, 0, 0, 0, 1, 0]).good();
    rig.run(&[0x1E, 0, 0, 0, 0, 0]).good();
}

/// "Cannot happen" here means the medium changed size between the check and the I/O.
#[test]
fn a_shrunk_disk_says_out_of_range_even_before_the_unit_knows() {
    let mut rig = Rig::new();
    rig.disk.num_blocks.store(10, std::sync::atomic::Ordering::Relaxed);
    assert_eq!(rig.input(&cdb10(0x28, 0, 10, 1), 512).sense(), OUT_OF_RANGE);
    assert_eq!(rig.asked().len(), 1);
}
