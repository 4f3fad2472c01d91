//! WRITE ATOMIC(16) (SBC-4 5.48) and its limits (SBC-4 6.6.4).

use crate::rig::*;
use bdev::Op;
use scsi::{LunOptions, Outcome};

fn cdb(flags: u8, lba: u64, blocks: u16) -> [u8; 16] {
    let mut cdb = cdb16(0x9C, flags, lba, 0);
    cdb[12..14].copy_from_slice(&blocks.to_be_bytes());
    cdb
}

fn limits(rig: &mut Rig) -> Vec<u8> {
    rig.input(&[0x12, 1, 0xB0, 0, 64, 0], 64).good()[44..64].to_vec()
}

#[test]
fn one_physical_block_is_written_as_a_whole() {
    let mut rig = Rig::new();
    assert_eq!(limits(&mut rig)[..12], [0, 0, 0, 8, 0, 0, 0, 8, 0, 0, 0, 0]);
    assert_eq!(limits(&mut rig)[12..], [0; 8]);
    rig.output(&cdb(0, 8, 8), &[7; 8 * 512]).good();
    rig.output(&cdb(0x18, 16, 3), &[8; 3 * 512]).good();
    assert_eq!(rig.asked(), [(Op::Write, 8, 8, false), (Op::Write, 16, 3, true)]);
    assert_eq!(rig.medium()[8 * 512..16 * 512], [7; 8 * 512]);
    rig.output(&cdb(0, 8, 9), &[7; 9 * 512]).invalid_cdb(12, None);
    rig.output(&cdb(0, 9, 2), &[7; 2 * 512]).invalid_cdb(2, None);
    // An ATOMIC BOUNDARY.
    let mut bounded = cdb(0, 8, 8);
    bounded[11] = 4;
    rig.output(&bounded, &[7; 8 * 512]).invalid_cdb(11, Some(2));
    assert_eq!(rig.run(&cdb(0, BLOCKS, 1)).sense(), OUT_OF_RANGE);
    assert_eq!(rig.run(&cdb(0, BLOCKS - 8, 200)).sense(), OUT_OF_RANGE);
    assert_eq!(rig.run(&cdb(0, BLOCKS + 1, 0)).sense(), OUT_OF_RANGE);
    rig.run(&cdb(0, 1, 0)).good();
    assert_eq!(rig.output(&cdb(0, 8, 8), &[7; 100]).outcome, Outcome::Overrun);
    assert!(rig.asked().is_empty());
}

#[test]
fn without_larger_physical_blocks_one_block_is_all() {
    let mut rig = Setup { physical_block_size: 512, ..Setup::default() }.build();
    assert_eq!(limits(&mut rig), [[0, 0, 0, 1].as_slice(), &[0; 16]].concat());
    rig.output(&cdb(0, 3, 1), &[7; 512]).good();
    rig.output(&cdb(0, 3, 2), &[7; 1024]).invalid_cdb(12, None);
    // A block of several physical ones may be written in part.
    let options = LunOptions { block_size: Some(4096), ..LunOptions::default() };
    let mut rig = Setup { physical_block_size: 512, options, ..Setup::default() }.build();
    assert_eq!(limits(&mut rig), [0; 20]);
    assert_eq!(rig.output(&cdb(0, 0, 1), &[7; 4096]).sense(), ILLEGAL_OPCODE);
}
