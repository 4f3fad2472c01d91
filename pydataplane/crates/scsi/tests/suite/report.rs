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
    for opcode in [0x5E, 0x5F, 0x9E, 0xA3] {
        let known: Vec<u8> =
            COMMANDS.into_iter().filter(|c| c.0 == opcode).filter_map(|c| c.1).collect();
        for action in (0..32).filter(|a| !known.contains(a)) {
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
const COMMANDS: [(u8, Option<u8>, u8); 73] = [
    (0x00, None, 6),
    (0x03, None, 6),
    (0x04, None, 6),
    (0x08, None, 6),
    (0x0A, None, 6),
    (0x12, None, 6),
    (0x15, None, 6),
    (0x16, None, 6),
    (0x17, None, 6),
    (0x1A, None, 6),
    (0x1B, None, 6),
    (0x1D, None, 6),
    (0x1E, None, 6),
    (0x25, None, 10),
    (0x28, None, 10),
    (0x2A, None, 10),
    (0x2E, None, 10),
    (0x2F, None, 10),
    (0x34, None, 10),
    (0x35, None, 10),
    (0x37, None, 10),
    (0x41, None, 10),
    (0x42, None, 10),
    (0x48, Some(0x01), 10),
    (0x48, Some(0x1F), 10),
    (0x4D, None, 10),
    (0x55, None, 10),
    (0x5A, None, 10),
    (0x5E, Some(0x00), 10),
    (0x5E, Some(0x01), 10),
    (0x5E, Some(0x02), 10),
    (0x5E, Some(0x03), 10),
    (0x5F, Some(0x00), 10),
    (0x5F, Some(0x01), 10),
    (0x5F, Some(0x02), 10),
    (0x5F, Some(0x03), 10),
    (0x5F, Some(0x04), 10),
    (0x5F, Some(0x05), 10),
    (0x5F, Some(0x06), 10),
    (0x5F, Some(0x07), 10),
    (0x5F, Some(0x08), 10),
    (0x83, Some(0x00), 16),
    (0x83, Some(0x01), 16),
    (0x83, Some(0x10), 16),
    (0x83, Some(0x11), 16),
    (0x83, Some(0x1C), 16),
    (0x84, Some(0x00), 16),
    (0x84, Some(0x03), 16),
    (0x84, Some(0x04), 16),
    (0x84, Some(0x05), 16),
    (0x84, Some(0x07), 16),
    (0x88, None, 16),
    (0x89, None, 16),
    (0x8A, None, 16),
    (0x8B, None, 16),
    (0x8E, None, 16),
    (0x8F, None, 16),
    (0x90, None, 16),
    (0x91, None, 16),
    (0x93, None, 16),
    (0x9C, None, 16),
    (0x9E, Some(0x10), 16),
    (0x9E, Some(0x12), 16),
    (0xA0, None, 12),
    (0xA3, Some(0x0A), 12),
    (0xA3, Some(0x0C), 12),
    (0xA3, Some(0x0D), 12),
    (0xA3, Some(0x0F), 12),
    (0xA8, None, 12),
    (0xAA, None, 12),
    (0xAE, None, 12),
    (0xAF, None, 12),
    (0xB7, None, 12),
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
    for (unmap, count) in [(true, 73), (false, 72)] {
        let features = Features { unmap, ..ALL_FEATURES };
        let mut rig = Setup { features, ..Setup::default() }.build();
        let answer = opcodes(&mut rig, 0, 0, 0);
        let data = answer.good();
        assert_eq!(data[..4], (count * 8u32).to_be_bytes());
        let listed = data[4..].chunks(8).map(|d| (d[0], (d[5] == 1).then_some(d[3]), d[7]));
        let expected = COMMANDS.into_iter().filter(|c| unmap || c.0 != 0x42);
        assert!(listed.eq(expected));

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
        [(1, 0x56, 0), (2, 0x9E, 0x13), (3, 0x9E, 0), (3, 0x28, 1), (2, 0x7F, 9)]
    {
        assert_eq!(opcodes(&mut rig, options, opcode, action).good(), [0, 1, 0, 0]);
    }
    // By code alone although it has service actions, and the other way round.
    opcodes(&mut rig, 1, 0x9E, 0).invalid_cdb(2, Some(2));
    opcodes(&mut rig, 2, 0x28, 0).invalid_cdb(2, Some(2));
    opcodes(&mut rig, 4, 0x28, 0).invalid_cdb(2, Some(2));
    rig.run(&[0xA3, 0x0E, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0]).invalid_cdb(1, Some(4));
}

/// The usage map is the mask of reserved bits: a bit outside of it is refused, at its byte.
#[test]
fn spc4_6_35_3_usage_maps_are_true() {
    for (opcode, action, length) in COMMANDS {
        let mut rig = Rig::new();
        let (has_action, action) = (action.is_some(), u16::from(action.unwrap_or(0)));
        let answer = opcodes(&mut rig, 3, opcode, action);
        let usage = answer.good()[4..].to_vec();
        assert_eq!(usage.len(), usize::from(length));
        assert_eq!(usage[0], opcode);
        for at in 1..usage.len() {
            for bit in 0..8 {
                let service_action = at == 1 && has_action && bit < 5;
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

/// A CDB with the service action in byte 1 and the allocation length in bytes 6 to 9.
fn maintenance_in(action: u8, allocation: u32) -> [u8; 12] {
    cdb12(0xA3, action, 0, allocation)
}

#[test]
fn spc4_6_36_task_management_functions_are_those_of_virtio() {
    let mut rig = Rig::new();
    assert_eq!(rig.input(&maintenance_in(0x0D, 64), 64).good(), [0xDC, 0x03, 0, 0]);
    let mut extended = maintenance_in(0x0D, 64);
    extended[2] = 0x80;
    let data = [0xDC, 0x03, 0, 12, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0];
    assert_eq!(rig.input(&extended, 64).good(), data);
    assert_eq!(rig.input(&maintenance_in(0x0D, 1), 1).good(), [0xDC]);
}

#[test]
fn spc4_6_37_the_timestamp_is_the_hosts() {
    let now = || {
        let since = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH).unwrap();
        since.as_millis() as u64
    };
    let mut rig = Rig::new();
    let before = now();
    let answer = rig.input(&maintenance_in(0x0F, 64), 64);
    let data = answer.good();
    assert_eq!((data.len(), &data[..4], &data[10..]), (12, &[0, 10, 3, 0][..], &[0, 0][..]));
    let told = data[4..10].iter().fold(0, |all, byte| all << 8 | u64::from(*byte));
    assert!((before..=now()).contains(&told), "{told} is not {before}");
}

#[test]
fn sbc3_5_17_no_block_is_defective() {
    let mut rig = Rig::new();
    let mut cdb = cdb10(0x37, 0, 0, 32);
    cdb[2] = 0x1D;
    assert_eq!(rig.input(&cdb, 32).good(), [0, 0x1D, 0, 0]);
    assert_eq!(rig.input(&cdb12(0xB7, 0x1D, 0, 32), 32).good(), [0, 0x1D, 0, 0, 0, 0, 0, 0]);
}

fn log_sense(page: u8, subpage: u8, pointer: u16, allocation: u16) -> [u8; 10] {
    let (p, a) = (pointer.to_be_bytes(), allocation.to_be_bytes());
    [0x4D, 0, page, subpage, 0, p[0], p[1], a[0], a[1], 0]
}

#[test]
fn spc4_6_11_log_sense_lists_its_pages_and_knows_no_temperature() {
    let mut rig = Rig::new();
    assert_eq!(rig.input(&log_sense(0x40, 0, 0, 255), 255).good(), [0, 0, 0, 3, 0, 0x0D, 0x2F]);
    let all = [0x40, 0xFF, 0, 8, 0, 0, 0, 0xFF, 0x0D, 0, 0x2F, 0];
    assert_eq!(rig.input(&log_sense(0x40, 0xFF, 0, 255), 255).good(), all);
    let temperature = [0x0D, 0, 0, 6, 0, 0, 3, 2, 0, 0xFF];
    assert_eq!(rig.input(&log_sense(0x4D, 0, 0, 255), 255).good(), temperature);
    assert_eq!(rig.input(&log_sense(0x4D, 0, 0, 4), 4).good(), &temperature[..4]);
    let exceptions = [0x2F, 0, 0, 8, 0, 0, 3, 4, 0, 0, 0xFF, 0];
    assert_eq!(rig.input(&log_sense(0x6F, 0, 0, 255), 255).good(), exceptions);
    rig.run(&log_sense(0x0D, 0, 0, 255)).invalid_cdb(2, Some(7)); // thresholds
    rig.run(&log_sense(0x42, 0, 0, 255)).invalid_cdb(2, Some(5));
    rig.run(&log_sense(0x4D, 1, 0, 255)).invalid_cdb(3, None);
    rig.run(&log_sense(0x4D, 0, 1, 255)).invalid_cdb(5, None);
}

#[test]
fn sbc3_5_4_lba_status_of_a_disk_that_does_not_allocate_is_one_run() {
    let mut rig = Rig::new();
    let answer = rig.input(&cdb16(0x9E, 0x12, 96, 255), 255);
    let mut expected = [0; 24];
    expected[3] = 20;
    expected[8..16].copy_from_slice(&96u64.to_be_bytes());
    expected[16..20].copy_from_slice(&4000u32.to_be_bytes());
    assert_eq!(answer.good(), expected);
    assert_eq!(rig.input(&cdb16(0x9E, 0x12, 96, 4), 4).good(), &expected[..4]);
    assert_eq!(rig.run(&cdb16(0x9E, 0x12, BLOCKS, 255)).sense(), OUT_OF_RANGE);
}
