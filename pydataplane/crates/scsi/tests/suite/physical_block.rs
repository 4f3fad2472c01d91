//! A physical block whose size its owner chose, and what else tells of it.

use crate::rig::*;
use bdev::Features;
use scsi::{Characteristics, LunError, LunOptions, LunShared};

fn options(block_size: Option<u32>, physical_block_size: u32) -> LunOptions {
    let physical_block_size = Some(physical_block_size);
    let characteristics = Characteristics { physical_block_size, ..Default::default() };
    LunOptions { block_size, characteristics, ..Default::default() }
}

/// LOGICAL BLOCKS PER PHYSICAL BLOCK EXPONENT.
fn exponent(rig: &mut Rig) -> u8 {
    rig.input(&cdb16(0x9E, 0x10, 0, 32), 32).good()[13]
}

fn limits(rig: &mut Rig) -> Vec<u8> {
    rig.input(&[0x12, 1, 0xB0, 0, 64, 0], 64).good().to_vec()
}

/// MAXIMUM ATOMIC TRANSFER LENGTH of block limits, and ATOMIC ALIGNMENT.
fn atomic(page: &[u8]) -> (u32, u32) {
    let field = |at: usize| u32::from_be_bytes(page[at..at + 4].try_into().unwrap());
    (field(44), field(48))
}

/// WRITE ATOMIC(16) of `blocks` from 0 on.
fn write_atomic(rig: &mut Rig, blocks: u16) -> Answer {
    let mut cdb = cdb16(0x9C, 0, 0, 0);
    cdb[12..14].copy_from_slice(&blocks.to_be_bytes());
    rig.output(&cdb, &vec![7; usize::from(blocks) * 512])
}

#[test]
fn sbc3_5_16_2_the_exponent_is_the_owners_choice() {
    // The disk's own has 4096 bytes.
    for (logical, physical, shown) in
        [(512, 512, 0), (512, 4096, 3), (512, 16384, 5), (512, 2 << 20, 12), (4096, 65536, 4)]
    {
        let options = options(Some(logical), physical);
        let mut rig = Setup { options, ..Setup::default() }.build();
        assert_eq!(exponent(&mut rig), shown, "{logical} {physical}");
        // OPTIMAL TRANSFER LENGTH GRANULARITY, SBC-3 6.6.3.
        assert_eq!(limits(&mut rig)[6..8], (physical / logical).to_be_bytes()[2..]);
    }
}

#[test]
fn sbc4_4_29_no_more_is_written_as_a_whole_than_the_disk_does() {
    let mut smaller = Setup { options: options(None, 1024), ..Setup::default() }.build();
    assert_eq!(atomic(&limits(&mut smaller)), (2, 2));
    write_atomic(&mut smaller, 2).good();
    write_atomic(&mut smaller, 3).invalid_cdb(12, None);
    let mut same = Setup { options: options(None, 4096), ..Setup::default() }.build();
    assert_eq!(atomic(&limits(&mut same)), (8, 8));
    let mut larger = Setup { options: options(None, 8192), ..Setup::default() }.build();
    assert_eq!(atomic(&limits(&mut larger)), (0, 0));
    assert_eq!(write_atomic(&mut larger, 1).sense(), ILLEGAL_OPCODE);
}

#[test]
fn sbc3_6_6_3_an_optimal_length_is_one_of_whole_physical_blocks() {
    let optimal = |optimal_blocks: u32, physical: u32| {
        let features = Features { optimal_blocks, ..ALL_FEATURES };
        let options = options(None, physical);
        let mut rig = Setup { features, options, ..Setup::default() }.build();
        u32::from_be_bytes(limits(&mut rig)[12..16].try_into().unwrap())
    };
    assert_eq!([optimal(2048, 16384), optimal(100, 16384), optimal(24, 16384)], [2048, 96, 0]);
    assert_eq!(optimal(100, 4096), 100, "as the disk has it");
}

#[test]
fn it_stays_when_the_unit_goes_on_with_another_disk() {
    let rig = Setup { options: options(None, 16384), ..Setup::default() }.build();
    let other = Setup { physical_block_size: 512, ..Setup::default() }.build();
    let next = LunShared::new(other.disk.clone(), rig.shared.options()).unwrap();
    assert_eq!(next.physical_exponent(), 5);
}

#[test]
fn sizes_that_cannot_be_are_refused_in_one_sentence() {
    let refused = |max_blocks: u32, logical: Option<u32>, asked: u32| {
        let features = Features { max_blocks, ..ALL_FEATURES };
        let rig = Setup { features, ..Setup::default() }.build();
        LunShared::new(rig.disk.clone(), options(logical, asked)).map(|_| ()).err()
    };
    for (logical, asked) in [
        (512, 0),
        (512, 256),
        (512, 513),
        (512, 4 << 20),
        (512, 1 << 31),
        (4096, 512),
        (4096, 2048),
    ] {
        let error = refused(0, Some(logical), asked).unwrap();
        assert!(matches!(error, LunError::PhysicalBlockSize { .. }), "{error}");
        assert_eq!(
            error.to_string(),
            format!(
                "bdev disk cannot be a SCSI disk with physical blocks of {asked} bytes: ask for a power of \
                 two from {logical}, its logical block, to 2097152"
            )
        );
    }
    // No larger than what a command can write.
    assert_eq!(refused(256, None, 128 << 10), None);
    let error = refused(256, None, 256 << 10).unwrap();
    assert!(matches!(error, LunError::PhysicalBlockSize { longest: 131_072, .. }), "{error}");
    assert_eq!(refused(300, None, 128 << 10), None);
    assert!(refused(300, None, 256 << 10).is_some());
}
