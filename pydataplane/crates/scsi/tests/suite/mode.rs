//! MODE SENSE (SPC-4 6.13, 6.14, 7.5; SBC-3 6.5).

use crate::rig::*;
use bdev::Features;
use scsi::LunOptions;

fn sense6(rig: &mut Rig, flags: u8, page: u8, subpage: u8) -> Answer {
    rig.input(&[0x1A, flags, page, subpage, 255, 0], 255)
}

fn sense10(rig: &mut Rig, flags: u8, page: u8) -> Answer {
    rig.input(&[0x5A, flags, page, 0, 0, 0, 0, 1, 0, 0], 256)
}

const CACHING: [u8; 20] = [8, 18, 4, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0];
const CONTROL: [u8; 12] = [10, 10, 0x22, 0x10, 0, 0x40, 0, 0, 0, 0, 0, 0];
const EXCEPTIONS: [u8; 12] = [0x1C, 10, 8, 0, 0, 0, 0, 0, 0, 0, 0, 0];
const DBD: u8 = 0x08;

/// Control extension: its head, and nothing.
fn extension() -> Vec<u8> {
    [&[0x4A, 1, 0, 28][..], &[0; 28]].concat()
}

#[test]
fn pages_by_code_and_all_of_them() {
    let mut rig = Rig::new();
    let all = [&CACHING[..], &CONTROL, &EXCEPTIONS].concat();
    let extension = extension();
    let with_subpages = [&CACHING[..], &CONTROL, &extension, &EXCEPTIONS].concat();
    let both = [&CONTROL[..], &extension].concat();
    let cases: [(u8, u8, &[u8]); 7] = [
        (0x08, 0, &CACHING),
        (0x0A, 0, &CONTROL),
        (0x1C, 0, &EXCEPTIONS),
        (0x3F, 0, &all),
        (0x3F, 0xFF, &with_subpages),
        (0x0A, 0xFF, &both),
        (0x0A, 1, &extension),
    ];
    for (page, subpage, expected) in cases {
        let answer = sense6(&mut rig, DBD, page, subpage);
        let data = answer.good();
        assert_eq!(data[..4], [data.len() as u8 - 1, 0, 0x10, 0]);
        assert_eq!(&data[4..], expected);
    }
}

#[test]
fn sbc3_6_5_5_wce_is_the_disks_volatile_cache() {
    for volatile_cache in [false, true] {
        let features = Features { volatile_cache, ..ALL_FEATURES };
        let mut rig = Setup { features, ..Setup::default() }.build();
        assert_eq!(sense6(&mut rig, DBD, 8, 0).good()[6], if volatile_cache { 4 } else { 0 });
    }
}

#[test]
fn sbc3_6_5_1_device_specific_parameter_has_wp_and_dpofua() {
    let options = LunOptions { read_only: true, ..LunOptions::default() };
    let mut rig = Setup { options, ..Setup::default() }.build();
    assert_eq!(sense6(&mut rig, 0, 0x3F, 0).good()[2], 0x90);
    assert_eq!(sense10(&mut rig, 0, 0x3F).good()[3], 0x90);
    // FUA is emulated where the disk has none.
    let features = Features { fua: false, ..ALL_FEATURES };
    let mut rig = Setup { features, ..Setup::default() }.build();
    assert_eq!(sense6(&mut rig, 0, 0x3F, 0).good()[2], 0x10);
}

#[test]
fn sbc3_6_5_2_block_descriptors() {
    let mut rig = Rig::new();
    let short = [0, 0, 0x10, 0, 0, 0, 2, 0];
    let answer = sense6(&mut rig, 0, 8, 0);
    assert_eq!(answer.good()[..4], [31, 0, 0x10, 8]);
    assert_eq!(answer.good()[4..12], short);
    let answer = sense10(&mut rig, 0, 8);
    assert_eq!(answer.good()[..8], [0, 34, 0, 0x10, 0, 0, 0, 8]);
    assert_eq!(answer.good()[8..16], short);
    assert_eq!(answer.good()[16..], CACHING);
    let answer = sense10(&mut rig, 0x10, 8); // LLBAA
    assert_eq!(answer.good()[..8], [0, 42, 0, 0x10, 1, 0, 0, 16]);
    assert_eq!(answer.good()[8..24], [0, 0, 0, 0, 0, 0, 0x10, 0, 0, 0, 0, 0, 0, 0, 2, 0]);
    let answer = sense10(&mut rig, 0x10 | DBD, 8);
    assert_eq!(answer.good()[..8], [0, 26, 0, 0x10, 0, 0, 0, 0]);

    let mut rig = Setup { num_blocks: 1 << 33, ..Setup::default() }.build();
    assert_eq!(sense6(&mut rig, 0, 8, 0).good()[4..8], [0xFF; 4]);
    assert_eq!(sense10(&mut rig, 0x10, 8).good()[8..16], (1u64 << 33).to_be_bytes());
}

#[test]
fn spc4_6_13_page_control() {
    let mut rig = Rig::new();
    let current = sense6(&mut rig, DBD, 0x3F, 0).good().to_vec();
    assert_eq!(sense6(&mut rig, DBD, 0x80 | 0x3F, 0).good(), current); // default
    let changeable = sense6(&mut rig, DBD, 0x40 | 0x3F, 0).good().to_vec();
    // WCE; D_SENSE and SWP.
    let mut mask = [[0; 4].to_vec(), vec![8, 18, 4], vec![0; 17]].concat();
    mask.extend([10, 10, 4, 0, 8, 0, 0, 0, 0, 0, 0, 0]);
    mask.extend([0x1C, 10]);
    mask.extend([0; 10]);
    assert_eq!(changeable[4..], mask[4..]);
    assert_eq!(sense6(&mut rig, DBD, 0xC0 | 0x3F, 0).sense(), (0x5, 0x3900)); // saved
}

#[test]
fn pages_that_are_not_there_are_invalid_fields() {
    let mut rig = Rig::new();
    sense6(&mut rig, 0, 0x04, 0).invalid_cdb(2, Some(5)); // SeaBIOS asks for the geometry
    sense6(&mut rig, 0, 0x3F, 2).invalid_cdb(3, None);
    sense6(&mut rig, 0, 0x08, 1).invalid_cdb(3, None);
    sense10(&mut rig, 0, 0x1A).invalid_cdb(2, Some(5));
    sense6(&mut rig, 0x10, 0x3F, 0).invalid_cdb(1, Some(4)); // LLBAA is of the 10-byte form
}

#[test]
fn allocation_lengths_cut() {
    let mut rig = Rig::new();
    let whole = sense6(&mut rig, 0, 0x3F, 0).good().to_vec();
    for allocation in [0, 4, 12, 13] {
        let answer = rig.input(&[0x1A, 0, 0x3F, 0, allocation, 0], allocation.into());
        assert_eq!(answer.good(), &whole[..usize::from(allocation)]);
    }
}
