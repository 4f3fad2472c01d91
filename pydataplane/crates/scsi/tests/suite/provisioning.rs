//! UNMAP and WRITE SAME.

use crate::rig::*;
use bdev::{Features, Op};
use scsi::{LunOptions, MAX_UNMAP_BYTES, MAX_UNMAP_DESCRIPTORS, MAX_WRITE_SAME_BLOCKS};

/// An UNMAP parameter list (SBC-3 5.28.2).
fn list(descriptors: &[(u64, u32)]) -> Vec<u8> {
    let mut data = Vec::new();
    let length = descriptors.len() * 16;
    data.extend_from_slice(&(length as u16 + 6).to_be_bytes());
    data.extend_from_slice(&(length as u16).to_be_bytes());
    data.extend_from_slice(&[0; 4]);
    for (lba, blocks) in descriptors {
        data.extend_from_slice(&lba.to_be_bytes());
        data.extend_from_slice(&blocks.to_be_bytes());
        data.extend_from_slice(&[0; 4]);
    }
    data
}

fn unmap(rig: &mut Rig, data: &[u8]) -> Answer {
    rig.output(&cdb10(0x42, 0, 0, data.len() as u16), data)
}

const LIST_LENGTH: (u8, u16) = (0x5, 0x1A00);
const LIST_FIELD: (u8, u16) = (0x5, 0x2600);

#[test]
fn sbc3_5_28_each_descriptor_is_a_step() {
    for mode in [Mode::AtOnce, Mode::Later] {
        let mut rig = Setup { mode, ..Setup::default() }.build();
        rig.scribble();
        let answer = unmap(&mut rig, &list(&[(8, 8), (100, 0), (4095, 1), (1000, 24)]));
        answer.good();
        let asked = rig.asked();
        assert_eq!(
            asked,
            [(Op::Unmap, 8, 8, false), (Op::Unmap, 4095, 1, false), (Op::Unmap, 1000, 24, false)]
        );
        let medium = rig.medium();
        assert!(medium[8 * 512..16 * 512].iter().all(|b| *b == 0));
        assert!(medium[16 * 512..4095 * 512].iter().any(|b| *b != 0));
    }
}

#[test]
fn sbc3_5_28_2_every_length_of_the_list_is_checked() {
    let mut rig = Rig::new();
    unmap(&mut rig, &[]).good();
    assert_eq!(unmap(&mut rig, &[0; 7]).sense(), LIST_LENGTH);
    unmap(&mut rig, &list(&[])).good();
    // Data length or descriptor length beyond the list.
    let mut data = list(&[(0, 1)]);
    data[1] += 1;
    assert_eq!(unmap(&mut rig, &data).sense(), LIST_LENGTH);
    let mut data = list(&[(0, 1)]);
    data[3] += 1;
    assert_eq!(unmap(&mut rig, &data).sense(), LIST_LENGTH);
    let mut data = list(&[(0, 1)]);
    data[..4].fill(0xFF);
    assert_eq!(unmap(&mut rig, &data).sense(), LIST_LENGTH);
    assert_eq!(rig.asked(), []);
    // A descriptor that is not whole is ignored.
    let mut data = list(&[(0, 1), (1, 1)]);
    data[3] -= 1;
    unmap(&mut rig, &data).good();
    assert_eq!(rig.asked(), [(Op::Unmap, 0, 1, false)]);
}

#[test]
fn one_bad_descriptor_and_nothing_is_unmapped() {
    let mut rig = Rig::new();
    rig.scribble();
    let before = rig.medium();
    for bad in [(BLOCKS, 1), (BLOCKS - 1, 2), (u64::MAX, 2), (0, u32::MAX)] {
        assert_eq!(unmap(&mut rig, &list(&[(0, 8), bad])).sense(), OUT_OF_RANGE);
    }
    assert_eq!(rig.asked(), []);
    assert_eq!(rig.medium(), before);
}

#[test]
fn sbc3_6_6_3_more_than_the_limits_is_an_invalid_field_of_the_list() {
    let mut rig = Setup { num_blocks: 1 << 40, ..Setup::default() }.build();
    let many = vec![(0, 1); usize::from(MAX_UNMAP_DESCRIPTORS) + 1];
    let answer = unmap(&mut rig, &list(&many));
    assert_eq!(answer.sense(), LIST_FIELD);
    assert_eq!(answer.response().sense[15..18], [0x80, 0, 2]);
    let most = (MAX_UNMAP_BYTES / 512) as u32;
    let answer = unmap(&mut rig, &list(&[(0, most), (1 << 30, 1)]));
    assert_eq!(answer.sense(), LIST_FIELD);
    assert_eq!(answer.response().sense[15..18], [0x80, 0, 8 + 16 + 8]);
    assert_eq!(rig.asked(), []);
}

#[test]
fn a_long_range_goes_in_steps_that_do_not_cut_clusters() {
    for mode in [Mode::AtOnce, Mode::Later] {
        let (step, num_blocks) = (8192u64, 16_384);
        let mut rig = Setup { num_blocks, mode, block_size: 4096, ..Setup::default() }.build();
        rig.run(&cdb16(0x93, 0x09, 1000, 16_384 - 1000)).good();
        assert_eq!(
            rig.asked(),
            [(Op::Unmap, 1000, step - 1000, false), (Op::Unmap, step, step, false)]
        );
        let features = Features { max_blocks: 64, ..ALL_FEATURES };
        let mut rig = Setup { features, mode, ..Setup::default() }.build();
        unmap(&mut rig, &list(&[(0, 4096)])).good();
        assert_eq!(rig.asked().len(), 64);
    }
}

#[test]
fn sbc3_4_7_3_without_unmap_the_commands_and_bits_are_not_there() {
    let features = Features { unmap: false, ..ALL_FEATURES };
    let mut rig = Setup { features, ..Setup::default() }.build();
    assert_eq!(unmap(&mut rig, &list(&[(0, 1)])).sense(), ILLEGAL_OPCODE);
    rig.output(&cdb10(0x41, 0x08, 0, 1), &[0; 512]).invalid_cdb(1, Some(3));
    rig.output(&cdb16(0x93, 0x08, 0, 1), &[0; 512]).invalid_cdb(1, Some(3));
    rig.output(&cdb16(0x93, 0x00, 0, 1), &[0; 512]).good();
    assert_eq!(rig.asked(), [(Op::WriteZeroes, 0, 1, false)]);
}

#[test]
fn sbc3_5_43_zeros_are_zeroed_or_unmapped() {
    let only_zero = Features { unmap_zeroes: false, ..ALL_FEATURES };
    let skips = Features { unmap_skips: true, ..ALL_FEATURES };
    // (features, UNMAP bit, what it becomes)
    for (features, flag, op) in [
        (ALL_FEATURES, 0x00, Op::WriteZeroes),
        (ALL_FEATURES, 0x08, Op::Unmap),
        (only_zero, 0x00, Op::WriteZeroes),
        // Unmapped blocks may read as anything: UNMAP is then a wish that is not granted.
        (only_zero, 0x08, Op::WriteZeroes),
        // So it is where an unmap may leave blocks as they were.
        (skips, 0x08, Op::WriteZeroes),
    ] {
        let mut rig = Setup { features, mode: Mode::Later, ..Setup::default() }.build();
        rig.scribble();
        rig.output(&cdb10(0x41, flag, 5, 10), &[0; 512]).good();
        rig.output(&cdb16(0x93, flag, 5, 10), &[0; 512]).good();
        rig.run(&cdb16(0x93, flag | 0x01, 5, 10)).good(); // NDOB: no data out, zeros
        assert_eq!(rig.asked(), [(op, 5, 10, false); 3]);
        let medium = rig.medium();
        assert!(medium[5 * 512..15 * 512].iter().all(|b| *b == 0));
        assert!(medium[..5 * 512].iter().chain(&medium[15 * 512..]).all(|b| *b != 0));
    }
}

#[test]
fn sbc3_5_43_anything_else_is_really_written() {
    for (block_size, mode, flag) in
        [(512, Mode::AtOnce, 0), (512, Mode::Later, 8), (4096, Mode::Later, 0)]
    {
        let mut rig = Setup { block_size, mode, ..Setup::default() }.build();
        let block: Vec<u8> = (0..block_size).map(|i| (i / 3) as u8).collect();
        rig.scribble();
        let before = rig.medium();
        let n = block.len();
        // Many steps through the bounce buffer, more than one turn of the thread.
        rig.output(&cdb16(0x93, flag, 3, 2500), &block).good();
        let after = rig.medium();
        assert!(after[3 * n..2503 * n].chunks(n).all(|b| b == block));
        assert_eq!(after[..3 * n], before[..3 * n]);
        assert_eq!(after[2503 * n..], before[2503 * n..]);
        let asked = rig.asked();
        assert!(asked.iter().all(|a| a.0 == Op::Write && a.2 * n as u64 <= 65_536));
        assert_eq!(asked.iter().map(|a| a.2).sum::<u64>(), 2500);
    }
}

#[test]
fn zeros_are_written_where_the_disk_has_no_write_zeroes() {
    let features = Features { write_zeroes: false, unmap: false, ..ALL_FEATURES };
    let mut rig = Setup { features, ..Setup::default() }.build();
    rig.scribble();
    rig.output(&cdb10(0x41, 0, 0, 2), &[7; 512]).good();
    rig.run(&cdb16(0x93, 0x01, 0, 200)).good();
    assert!(rig.medium()[..200 * 512].iter().all(|b| *b == 0));
    assert!(rig.asked().iter().all(|a| a.0 == Op::Write));
}

#[test]
fn write_same_of_a_pattern_is_one_call_of_a_disk_that_has_one() {
    for block_size in [512, 4096] {
        let mut rig = Setup { block_size, ..Setup::default() }.build();
        rig.state.borrow_mut().same_at_once = 1000;
        let block: Vec<u8> = (0..block_size).map(|byte| byte as u8 ^ 0x5A).collect();
        rig.output(&cdb16(0x93, 0, 3, 2500), &block).good();
        let asked = [(3, 1000), (1003, 1000), (2003, 500)];
        assert_eq!(rig.asked(), asked.map(|(lba, blocks)| (Op::Write, lba, blocks, false)));
        let medium = rig.medium();
        let size = block_size as usize;
        assert!(medium[3 * size..2503 * size].chunks(size).all(|there| *there == block[..]));
        assert!(medium[..3 * size].iter().all(|byte| *byte == 0) && medium[2503 * size] == 0);
    }
}

#[test]
fn sbc3_6_6_3_write_same_of_0_blocks_or_too_many_and_anchors_are_invalid_fields() {
    let mut rig = Setup { num_blocks: 1 << 40, ..Setup::default() }.build();
    rig.output(&cdb10(0x41, 0, 0, 0), &[0; 512]).invalid_cdb(7, None);
    rig.output(&cdb16(0x93, 0, 0, 0), &[0; 512]).invalid_cdb(10, None);
    let most = MAX_WRITE_SAME_BLOCKS as u32;
    rig.output(&cdb16(0x93, 0, 0, most + 1), &[0; 512]).invalid_cdb(10, None);
    rig.output(&cdb16(0x93, 0x18, 0, 1), &[0; 512]).invalid_cdb(1, Some(4)); // ANCHOR
    rig.output(&cdb10(0x41, 0x10, 0, 1), &[0; 512]).invalid_cdb(1, Some(4));
    rig.output(&cdb10(0x42, 0x01, 0, 0), &[]).invalid_cdb(1, Some(0)); // UNMAP's ANCHOR
    assert_eq!(rig.asked(), []);
}

#[test]
fn write_same_takes_one_block_of_data_neither_less_nor_more() {
    let mut rig = Rig::new();
    for bytes in [0, 256, 511, 513, 1024] {
        rig.output(&cdb10(0x41, 0x08, 0, 1), &vec![0; bytes]).invalid_cdb(7, None);
        rig.output(&cdb16(0x93, 0, 0, 4), &vec![7; bytes]).invalid_cdb(10, None);
    }
    assert_eq!(rig.asked(), []);
}

#[test]
fn vpd_pages_b0_and_b2_and_read_capacity_tell_what_is_there() {
    let none = Features {
        unmap: false,
        unmap_zeroes: false,
        thin: false,
        unmap_granularity: 0,
        ..ALL_FEATURES
    };
    let thick = Features { thin: false, ..ALL_FEATURES };
    let dirty = Features { unmap_zeroes: false, ..ALL_FEATURES };
    // (features, LBPU.., provisioning type, READ CAPACITY(16) byte 14)
    for (features, flags, kind, capacity) in [
        (ALL_FEATURES, 0xE4, 2, 0xC0),
        (thick, 0xE4, 1, 0xC0),
        (dirty, 0xE0, 2, 0x80),
        (none, 0x00, 0, 0x00),
    ] {
        let options = LunOptions::default();
        let mut rig = Setup { features, options, ..Setup::default() }.build();
        let page = rig.input(&[0x12, 1, 0xB2, 0, 255, 0], 255);
        assert_eq!(page.good(), [0, 0xB2, 0, 4, 0, flags, kind, 0]);
        let data = rig.input(&cdb16(0x9E, 0x10, 0, 32), 32);
        assert_eq!(data.good()[14], capacity);
        let limits = rig.input(&[0x12, 1, 0xB0, 0, 255, 0], 255);
        let at = |i: usize| u32::from_be_bytes(limits.good()[i..i + 4].try_into().unwrap());
        assert_eq!(limits.good().len(), 64);
        assert_eq!(limits.good()[..8], [0, 0xB0, 0, 60, 1, 128, 0, 8]);
        assert_eq!(at(8), 8192);
        let expected = if features.unmap { [1 << 20, 256, 8, 0x8000_0000] } else { [0; 4] };
        assert_eq!([at(20), at(24), at(28), at(32)], expected);
        assert_eq!([at(36), at(40)], [0, 1 << 15]);
    }
}

/// A thin disk that has 5 MiB and a half, with room for `free` bytes more.
fn thin(free: u64, thin: bool) -> Rig {
    let features = Features { thin, ..ALL_FEATURES };
    Setup { features, room: Some((11 << 19, free)), ..Setup::default() }.build()
}

/// LOG SENSE of page 0Ch, from a parameter on.
fn room_from(pointer: u8) -> [u8; 10] {
    [0x4D, 0, 0x4C, 0, 0, 0, pointer, 0, 255, 0]
}

#[test]
fn sbc3_6_4_4_the_room_of_a_thin_disk_is_told_in_sets_of_blocks() {
    let mut rig = thin(300 << 20, true);
    let available = [0, 1, 3, 8, 0, 0, 1, 44, 2, 0, 0, 0];
    let used = [0, 2, 3, 8, 0, 0, 0, 6, 1, 0, 0, 0];
    let both = [&[0x0C, 0, 0, 24][..], &available, &used].concat();
    assert_eq!(rig.input(&room_from(0), 255).good(), both);
    assert_eq!(rig.input(&room_from(1), 255).good(), both);
    assert_eq!(rig.input(&room_from(2), 255).good(), [&[0x0C, 0, 0, 12][..], &used].concat());
    rig.run(&room_from(3)).invalid_cdb(5, None);
    let list = rig.input(&[0x4D, 0, 0x40, 0, 0, 0, 0, 0, 255, 0], 255);
    assert_eq!(list.good(), [0, 0, 0, 4, 0, 0x0C, 0x0D, 0x2F]);
    let list = rig.input(&[0x4D, 0, 0x40, 0xFF, 0, 0, 0, 0, 255, 0], 255);
    assert_eq!(list.good(), [0x40, 0xFF, 0, 10, 0, 0, 0, 0xFF, 0x0C, 0, 0x0D, 0, 0x2F, 0]);
    // Sets of 2^11 blocks of 512 bytes: 1 MiB.
    let page = rig.input(&[0x12, 1, 0xB2, 0, 255, 0], 255);
    assert_eq!(page.good()[..7], [0, 0xB2, 0, 4, 11, 0xE4, 2]);
    // More than the field can tell.
    let mut rig = thin(u64::MAX, true);
    assert_eq!(rig.input(&room_from(0), 255).good()[8..12], [0xFF; 4]);
}

#[test]
fn sbc3_6_5_8_no_threshold_is_enabled_or_can_be() {
    let mut rig = thin(1 << 30, true);
    let sense = |rig: &mut Rig, control: u8| {
        let answer = rig.input(&[0x1A, 8, control | 0x1C, 2, 255, 0], 255);
        answer.good()[4..].to_vec()
    };
    let mut page = [0; 32];
    page[..4].copy_from_slice(&[0x5C, 2, 0, 28]);
    assert_eq!(sense(&mut rig, 0x40), page, "nothing can be changed");
    (page[17], page[24], page[25]) = (1, 1, 2);
    assert_eq!(sense(&mut rig, 0), page);
    assert_eq!(sense(&mut rig, 0x80), page);
    // It can be given as it is, and not otherwise.
    let select = |rig: &mut Rig, page: &[u8]| {
        rig.output(&[0x15, 0x10, 0, 0, 36, 0], &[&[0; 4][..], page].concat())
    };
    select(&mut rig, &page).good();
    page[16] |= 0x80;
    assert_eq!(select(&mut rig, &page).sense(), LIST_FIELD);
}

#[test]
fn what_is_not_thin_or_does_not_tell_has_no_page_of_its_room() {
    for mut rig in [thin(1 << 30, false), Rig::new()] {
        rig.run(&room_from(0)).invalid_cdb(2, Some(5));
        rig.run(&[0x1A, 8, 0x1C, 2, 255, 0]).invalid_cdb(3, None);
        assert_eq!(rig.input(&[0x12, 1, 0xB2, 0, 255, 0], 255).good()[4], 0);
    }
}
