//! Commands that report, and the ones that nobody knows.

use crate::rig::*;
use bdev::Features;
use scsi::{Outcome, missing_lun};

#[test]
fn sbc3_5_15_read_capacity_10() {
    let mut rig = Rig::new();
    assert_eq!(rig.input(&cdb10(0x25, 0, 0, 0), 8).good(), [0, 0, 0x0F, 0xFF, 0, 0, 2, 0]);
    // FFFFFFFFh is "ask READ CAPACITY(16)": for 2^32 blocks by value, beyond by rule.
    for (num_blocks, last) in
        [(u64::from(u32::MAX), u32::MAX - 1), (1 << 32, u32::MAX), (1 << 40, u32::MAX)]
    {
        let mut rig = Setup { num_blocks, ..Setup::default() }.build();
        assert_eq!(rig.input(&cdb10(0x25, 0, 0, 0), 8).good()[..4], last.to_be_bytes());
    }
    assert_eq!(rig.input(&cdb10(0x25, 0, 0, 0), 4).outcome, Outcome::Overrun);
    rig.input(&cdb10(0x25, 0, 1, 0), 8).invalid_cdb(5, Some(0)); // an address without PMI
}

#[test]
fn sbc3_5_16_read_capacity_16() {
    for (block_size, physical, exponent) in [(512, 4096, 3), (512, 512, 0), (4096, 4096, 0)] {
        let setup = Setup {
            block_size,
            physical_block_size: physical,
            num_blocks: 1 << 36,
            ..Setup::default()
        };
        let mut rig = setup.build();
        let answer = rig.input(&cdb16(0x9E, 0x10, 0, 255), 255);
        let data = answer.good();
        assert_eq!(data.len(), 32);
        assert_eq!(data[..8], ((1u64 << 36) - 1).to_be_bytes());
        assert_eq!(data[8..12], block_size.to_be_bytes());
        assert_eq!(data[12..16], [0, exponent, 0xC0, 0]);
        assert_eq!(rig.input(&cdb16(0x9E, 0x10, 0, 12), 12).good(), &data[..12]);
    }
}

#[test]
fn spc4_4_2_5_2_every_other_service_action_is_an_invalid_field() {
    let mut rig = Rig::new();
    for (opcode, known) in [(0x9E, 0x10), (0xA3, 0x0C)] {
        for action in (0..32).filter(|a| *a != known) {
            rig.run(&cdb16(opcode, action, 0, 0)).invalid_cdb(1, Some(4));
        }
    }
}

#[test]
fn a_disk_of_no_blocks_has_no_medium() {
    let mut rig = Setup { num_blocks: 0, ..Setup::default() }.build();
    assert_eq!(rig.input(&cdb10(0x25, 0, 0, 0), 8).sense(), (0x2, 0x3A00));
    assert_eq!(rig.input(&cdb16(0x9E, 0x10, 0, 32), 32).sense(), (0x2, 0x3A00));
    assert_eq!(rig.input(&cdb10(0x28, 0, 0, 1), 512).sense(), OUT_OF_RANGE);
}

#[test]
fn spc4_6_39_request_sense_in_both_formats() {
    let mut rig = Rig::new();
    let answer = rig.input(&[3, 0, 0, 0, 252, 0], 252);
    assert_eq!(answer.good()[..8], [0x70, 0, 0, 0, 0, 0, 0, 10]);
    assert_eq!(answer.good().len(), 18);
    assert_eq!(rig.input(&[3, 1, 0, 0, 252, 0], 252).good(), [0x72, 0, 0, 0, 0, 0, 0, 0]);
    assert_eq!(rig.input(&[3, 0, 0, 0, 4, 0], 4).good(), [0x70, 0, 0, 0]);
}

#[test]
fn spc4_6_33_report_luns_lists_lun_0() {
    let mut rig = Rig::new();
    let lun0 = [0, 0, 0, 8, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0];
    let select = |report: u8, allocation: u32| {
        let mut cdb = cdb12(0xA0, 0, 0, allocation);
        cdb[2] = report;
        cdb
    };
    assert_eq!(rig.input(&select(0, 4096), 4096).good(), lun0);
    assert_eq!(rig.input(&select(2, 16), 16).good(), lun0);
    assert_eq!(rig.input(&select(1, 16), 16).good(), [0; 8]);
    assert_eq!(rig.input(&select(0, 8), 8).good(), &lun0[..8]);
    rig.input(&select(3, 16), 16).invalid_cdb(2, None);
}

#[test]
fn sam5_4_7_4_a_missing_lun_says_so() {
    let answer = |cdb: &[u8], len: usize| {
        let buffer = Buffer::new(&vec![0xEE; len], 5);
        let outcome = missing_lun(&pad(cdb), &buffer.sg());
        Answer { outcome, data: buffer.bytes() }
    };
    const NO_LUN: (u8, u16) = (0x5, 0x2500);
    let inquiry = answer(&[0x12, 0, 0, 0, 36, 0], 36);
    assert_eq!(inquiry.good()[..5], [0x7F, 0, 6, 0x12, 91]);
    answer(&[0x12, 1, 0x83, 0, 255, 0], 255).invalid_cdb(1, None);
    assert_eq!(answer(&cdb12(0xA0, 0, 0, 64), 64).good()[..4], [0, 0, 0, 8]);
    assert_eq!(key_code(answer(&[3, 0, 0, 0, 18, 0], 18).good()), NO_LUN);
    assert_eq!(answer(&[3, 1, 0, 0, 18, 0], 18).good()[..4], [0x72, 5, 0x25, 0]);
    assert_eq!(answer(&[0; 6], 0).sense(), NO_LUN);
    assert_eq!(answer(&cdb10(0x28, 0, 0, 1), 512).sense(), NO_LUN);
    assert_eq!(answer(&[0xFF; 16], 0).sense(), NO_LUN);
}

/// Every operation code that the unit must know, with its length.
const COMMANDS: [(u8, u8); 27] = [
    (0x00, 6),
    (0x03, 6),
    (0x08, 6),
    (0x0A, 6),
    (0x12, 6),
    (0x1A, 6),
    (0x1B, 6),
    (0x1E, 6),
    (0x25, 10),
    (0x28, 10),
    (0x2A, 10),
    (0x2F, 10),
    (0x35, 10),
    (0x41, 10),
    (0x42, 10),
    (0x5A, 10),
    (0x88, 16),
    (0x8A, 16),
    (0x8F, 16),
    (0x91, 16),
    (0x93, 16),
    (0x9E, 16),
    (0xA0, 12),
    (0xA3, 12),
    (0xA8, 12),
    (0xAA, 12),
    (0xAF, 12),
];

fn opcodes(rig: &mut Rig, options: u8, opcode: u8, action: u16) -> Answer {
    let [high, low] = action.to_be_bytes();
    rig.input(&[0xA3, 0x0C, options, opcode, high, low, 0, 0, 8, 0, 0, 0], 2048)
}

#[test]
fn spc4_4_2_5_1_every_other_operation_code_is_refused() {
    let mut rig = Rig::new();
    for opcode in 0..=255 {
        if COMMANDS.iter().all(|c| c.0 != opcode) {
            assert_eq!(rig.run(&[opcode; 1]).sense(), ILLEGAL_OPCODE, "{opcode:x}");
        }
    }
}

#[test]
fn spc4_6_35_2_all_commands() {
    for (unmap, count) in [(true, 27), (false, 26)] {
        let features = Features { unmap, ..ALL_FEATURES };
        let mut rig = Setup { features, ..Setup::default() }.build();
        let answer = opcodes(&mut rig, 0, 0, 0);
        let data = answer.good();
        assert_eq!(data[..4], (count * 8u32).to_be_bytes());
        let listed: Vec<(u8, u8)> = data[4..].chunks(8).map(|d| (d[0], d[7])).collect();
        let expected: Vec<(u8, u8)> =
            COMMANDS.into_iter().filter(|c| unmap || c.0 != 0x42).collect();
        assert_eq!(listed, expected);
        // Service actions: READ CAPACITY(16) and this command.
        let actions: Vec<&[u8]> = data[4..].chunks(8).filter(|d| d[5] == 1).collect();
        assert_eq!(actions, [[0x9E, 0, 0, 0x10, 0, 1, 0, 16], [0xA3, 0, 0, 0x0C, 0, 1, 0, 12]]);

        let timed = opcodes(&mut rig, 0x80, 0, 0); // RCTD
        assert_eq!(timed.good()[..4], (count * 20u32).to_be_bytes());
        assert_eq!(timed.good()[4..][..20][5], 2);
        assert_eq!(timed.good()[12..16], [0, 10, 0, 0]);
    }
}

#[test]
fn spc4_6_35_3_one_command() {
    let mut rig = Rig::new();
    let read10 = [0, 3, 0, 10, 0x28, 0x18, 0xFF, 0xFF, 0xFF, 0xFF, 0x3F, 0xFF, 0xFF, 0];
    assert_eq!(opcodes(&mut rig, 1, 0x28, 0).good(), read10);
    assert_eq!(opcodes(&mut rig, 3, 0x28, 0).good(), read10);
    let timed = opcodes(&mut rig, 0x81, 0x28, 0);
    assert_eq!(timed.good()[1], 0x83);
    assert_eq!(timed.good().len(), read10.len() + 12);
    let capacity16 = opcodes(&mut rig, 2, 0x9E, 0x10);
    assert_eq!(capacity16.good()[..6], [0, 3, 0, 16, 0x9E, 0x10]);
    assert_eq!(opcodes(&mut rig, 3, 0x9E, 0x10).good(), capacity16.good());
    for (options, opcode, action) in
        [(1, 0x55, 0), (2, 0x9E, 0x12), (3, 0x9E, 0), (3, 0x28, 1), (2, 0x7F, 9)]
    {
        assert_eq!(opcodes(&mut rig, options, opcode, action).good(), [0, 1, 0, 0]);
    }
    // By code alone although it has service actions, and the other way round.
    opcodes(&mut rig, 1, 0x9E, 0).invalid_cdb(2, Some(2));
    opcodes(&mut rig, 2, 0x28, 0).invalid_cdb(2, Some(2));
    opcodes(&mut rig, 4, 0x28, 0).invalid_cdb(2, Some(2));
    rig.run(&[0xA3, 0x0D, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0]).invalid_cdb(1, Some(4));
}

/// The usage map is the mask of reserved bits: a bit outside of it is refused, at its byte.
#[test]
fn spc4_6_35_3_usage_maps_are_true() {
    for (opcode, length) in COMMANDS {
        let mut rig = Rig::new();
        let action = match opcode {
            0x9E => 0x10,
            0xA3 => 0x0C,
            _ => 0,
        };
        let answer = opcodes(&mut rig, 3, opcode, action);
        let usage = answer.good()[4..].to_vec();
        assert_eq!(usage.len(), usize::from(length));
        assert_eq!(usage[0], opcode);
        for at in 1..usage.len() {
            for bit in 0..8 {
                let service_action = at == 1 && action != 0 && bit < 5;
                if usage[at] & (1 << bit) == 0 && !service_action {
                    let mut cdb = [0; 16];
                    (cdb[0], cdb[1]) = (opcode, action as u8);
                    cdb[at] |= 1 << bit;
                    rig.io(&cdb, &[], 0).invalid_cdb(at as u8, Some(bit));
                }
            }
        }
    }
}
