//! A unit whose blocks are larger than the disk's.

use crate::fuzz::{cdbs, data, features};
use crate::rig::*;
use bdev::{Features, IoError, Op};
use proptest::prelude::*;
use scsi::{LunError, LunOptions, LunShared, MAX_TRANSFER_BYTES, MAX_UNMAP_BYTES, Status};
use std::sync::Arc;
use std::sync::atomic::Ordering;

/// Blocks of the disk in one of the unit's.
const RATIO: u64 = 8;

fn large() -> LunOptions {
    LunOptions { block_size: Some(4096), ..LunOptions::default() }
}

/// A unit with blocks of 4096 bytes on a disk with blocks of 512.
fn setup() -> Setup {
    Setup { options: large(), ..Setup::default() }
}

/// The features of a disk that has the same limits in smaller blocks.
fn in_small_blocks(features: Features) -> Features {
    Features {
        optimal_blocks: features.optimal_blocks * RATIO as u32,
        max_blocks: features.max_blocks * RATIO as u32,
        unmap_granularity: features.unmap_granularity * RATIO as u32,
        ..features
    }
}

fn pattern(len: usize) -> Vec<u8> {
    (0..len).map(|i| (i * 13 + i / 512) as u8).collect()
}

/// What a command answered; of REPORT TIMESTAMP (SPC-4 6.38) without the time, bytes 4 to 9.
fn without_time(cdb: &[u8; 32], mut data: Vec<u8>) -> Vec<u8> {
    if (cdb[0], cdb[1] & 0x1F) == (0xA3, 0x0F) {
        data.iter_mut().skip(4).take(6).for_each(|byte| *byte = 0);
    }
    data
}

#[test]
fn every_command_counts_blocks_of_the_unit_and_the_disk_its_own() {
    for mode in [Mode::AtOnce, Mode::Later] {
        let mut rig = Setup { mode, ..setup() }.build();
        let written = pattern(3 * 4096);
        rig.output(&cdb10(0x2A, 0x08, 5, 3), &written).good();
        assert_eq!(rig.asked(), [(Op::Write, 40, 24, true)]);
        assert_eq!(rig.medium()[5 * 4096..8 * 4096], written);
        assert_eq!(rig.input(&cdb16(0x88, 0, 5, 3), 3 * 4096).good(), written);
        // More room than blocks: through the bounce buffer.
        assert_eq!(rig.input(&cdb16(0x88, 0, 6, 1), 5000).good(), &written[4096..2 * 4096]);
        rig.output(&cdb10(0x2F, 2, 5, 3), &written).good();
        rig.asked();
        // WRITE SAME: of zeros to unmap, of zeros to write, of a pattern.
        rig.output(&cdb16(0x93, 0x08, 5, 1), &[0; 4096]).good();
        rig.output(&cdb16(0x93, 0, 6, 1), &[0; 4096]).good();
        rig.output(&cdb10(0x41, 0, 7, 2), &written[..4096]).good();
        assert_eq!(
            rig.asked(),
            [
                (Op::Unmap, 40, 8, false),
                (Op::WriteZeroes, 48, 8, false),
                (Op::Write, 56, 16, false)
            ]
        );
        let medium = rig.medium();
        assert!(medium[5 * 4096..7 * 4096].iter().all(|b| *b == 0));
        assert_eq!(medium[7 * 4096..8 * 4096], medium[8 * 4096..9 * 4096]);
        assert_eq!(medium[7 * 4096..8 * 4096], written[..4096]);
        // UNMAP of block 8.
        let list = [0, 22, 0, 16, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 8, 0, 0, 0, 1, 0, 0, 0, 0];
        rig.output(&cdb10(0x42, 0, 0, 24), &list).good();
        assert_eq!(rig.asked(), [(Op::Unmap, 64, 8, false)]);
        assert!(rig.medium()[8 * 4096..9 * 4096].iter().all(|b| *b == 0));
    }
}

#[test]
fn what_one_block_size_wrote_the_other_reads() {
    let mut rig = setup().build();
    let mut small = rig.another_unit(LunOptions::default());
    let written = pattern(2 * 4096);
    rig.output(&cdb10(0x2A, 0, 3, 2), &written).good();
    assert_eq!(small.input(&cdb10(0x28, 0, 24, 16), 2 * 4096).good(), written);
    small.output(&cdb10(0x2A, 0, 31, 1), &[0xAB; 512]).good();
    let read = rig.input(&cdb10(0x28, 0, 3, 1), 4096);
    assert_eq!(read.good()[..7 * 512], written[..7 * 512]);
    assert_eq!(read.good()[7 * 512..], [0xAB; 512]);
}

#[test]
fn sbc3_5_16_the_capacity_is_in_blocks_of_the_unit() {
    // The disk has 3 blocks more than 500 of the unit's.
    let mut rig = Setup { num_blocks: 500 * RATIO + 3, ..setup() }.build();
    let answer = rig.input(&cdb16(0x9E, 0x10, 0, 32), 32);
    let long = answer.good();
    assert_eq!(u64::from_be_bytes(long[..8].try_into().unwrap()), 499);
    assert_eq!(u32::from_be_bytes(long[8..12].try_into().unwrap()), 4096);
    assert_eq!(long[13], 0, "a physical block is a logical one");
    let short = rig.input(&cdb10(0x25, 0, 0, 0), 8);
    assert_eq!(short.good(), [0, 0, 1, 0xF3, 0, 0, 0x10, 0]);
    let mode = rig.input(&[0x1A, 0, 0x3F, 0, 255, 0], 255);
    assert_eq!(mode.good()[4..12], [0, 0, 1, 0xF4, 0, 0, 0x10, 0]);
    // The rest of the disk is out of reach, with the last block just before it.
    rig.output(&cdb10(0x2A, 0, 499, 1), &[1; 4096]).good();
    assert_eq!(rig.output(&cdb10(0x2A, 0, 500, 1), &[1; 4096]).sense(), OUT_OF_RANGE);
    assert_eq!(rig.medium()[500 * 4096..], [0; 3 * 512]);
    rig.run(&cdb16(0x91, 0, 500, 0)).good();
    assert_eq!(rig.run(&cdb16(0x91, 0, 501, 0)).sense(), OUT_OF_RANGE);
}

#[test]
fn a_disk_smaller_than_one_block_has_no_medium() {
    let mut rig = Setup { num_blocks: RATIO - 1, ..setup() }.build();
    assert_eq!(rig.input(&cdb10(0x25, 0, 0, 0), 8).sense(), (0x2, 0x3A00));
    assert_eq!(rig.input(&cdb10(0x28, 0, 0, 1), 4096).sense(), OUT_OF_RANGE);
}

#[test]
fn sbc3_6_6_3_limits_are_in_blocks_of_the_unit() {
    let limits = |features: Features, physical_block_size: u32| {
        let mut rig = Setup { features, physical_block_size, ..setup() }.build();
        rig.input(&[0x12, 1, 0xB0, 0, 64, 0], 64).good().to_vec()
    };
    let field = |page: &[u8], at: usize| u32::from_be_bytes(page[at..at + 4].try_into().unwrap());
    let page = limits(ALL_FEATURES, 16384);
    assert_eq!(page[6..8], [0, 4], "optimal granularity: a physical block");
    assert_eq!(u64::from(field(&page, 8)), MAX_TRANSFER_BYTES / 4096);
    assert_eq!(u64::from(field(&page, 20)), MAX_UNMAP_BYTES / 4096);
    // Granularity: 8 of the disk's blocks are 1; 4096 are 512; 12 and 8 have 24 in common.
    for (disks, units) in [(8, 1), (4096, 512), (1, 1), (12, 3), (0, 0)] {
        let page = limits(Features { unmap_granularity: disks, ..ALL_FEATURES }, 512);
        assert_eq!((field(&page, 28), page[32] != 0), (units, units != 0), "{disks}");
        assert_eq!(page[6..8], [0, 1]);
    }
    let page = limits(Features { optimal_blocks: 8192, ..ALL_FEATURES }, 4096);
    assert_eq!(field(&page, 12), 1024);
    let page = limits(Features { max_blocks: 100, ..ALL_FEATURES }, 4096);
    assert_eq!(field(&page, 8), 12);
}

#[test]
fn growth_counts_when_it_is_a_whole_block() {
    let mut rig = Setup { num_blocks: 100 * RATIO, ..setup() }.build();
    rig.state.borrow_mut().medium.resize(102 * 4096, 0);
    let last = |rig: &mut Rig| rig.input(&cdb10(0x25, 0, 0, 0), 8).good()[3];
    rig.disk.num_blocks.store(101 * RATIO - 1, Ordering::Relaxed);
    rig.shared.notify_resized();
    assert_eq!(last(&mut rig), 99);
    rig.disk.num_blocks.store(101 * RATIO, Ordering::Relaxed);
    rig.shared.notify_resized();
    assert_eq!(rig.run(&[0; 6]).sense(), (0x6, 0x2A09));
    assert_eq!(last(&mut rig), 100);
    rig.output(&cdb10(0x2A, 0, 100, 1), &[1; 4096]).good();
}

#[test]
fn blocks_that_cannot_be_are_refused() {
    let made = |block_size: u32, max_blocks: u32, asked: u32| {
        let features = Features { max_blocks, ..ALL_FEATURES };
        let disk = Disk {
            uuid: uuid::Uuid::new_v4(),
            features,
            block_size,
            physical_block_size: block_size,
            num_blocks: BLOCKS.into(),
            room: None,
        };
        let options = LunOptions { block_size: Some(asked), ..LunOptions::default() };
        LunShared::new(Arc::new(disk), options).map(|unit| unit.block_size())
    };
    for (own, asked) in [(512, 512), (512, 4096), (4096, 4096)] {
        assert_eq!(made(own, 0, asked).ok(), Some(asked));
    }
    for (own, asked) in [(512, 0), (512, 1), (512, 1024), (512, 8192), (4096, 512)] {
        let error = made(own, 0, asked).unwrap_err();
        assert!(matches!(error, LunError::LogicalBlockSize { .. }), "{error}");
        assert_eq!(
            error.to_string(),
            format!(
                "bdev disk with blocks of {own} bytes cannot be a SCSI disk with blocks of {asked}: \
                 ask for 512 or 4096, and for no less than the bdev has"
            )
        );
    }
    assert_eq!(made(512, 8, 4096).ok(), Some(4096));
    assert!(matches!(made(512, 7, 4096), Err(LunError::Transfer { max_blocks: 7, .. })));
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 1000, failure_persistence: None, ..Default::default() })]

    /// A disk with blocks of 4096 bytes and a unit with such on one with 512 are the same.
    #[test]
    fn any_command_does_what_it_does_on_a_disk_with_such_blocks(
        commands in prop::collection::vec((cdbs(), data(), 0usize..70_000), 1..6),
        features in features(),
        later in any::<bool>(),
        rest in 0..RATIO,
        fail in prop::option::of((0usize..4, prop::sample::select(IoError::ALL.to_vec()))),
    ) {
        let mode = if later { Mode::Later } else { Mode::AtOnce };
        // Of one volume at one port: what tells who they are is the same.
        let at_port = |options| LunOptions { nexus: Some("port:0".to_string()), ..options };
        let whole = Setup {
            features,
            block_size: 4096,
            mode,
            num_blocks: 300,
            options: at_port(LunOptions::default()),
            ..Setup::default()
        };
        let made = Setup {
            uuid: whole.uuid,
            features: in_small_blocks(features),
            mode,
            num_blocks: 300 * RATIO + rest,
            options: at_port(large()),
            ..Setup::default()
        };
        let (mut whole, mut made) = (whole.build(), made.build());
        for rig in [&whole, &made] {
            rig.scribble();
            rig.state.borrow_mut().fail = fail;
        }
        for (cdb, out, into) in commands {
            let (one, other) = (whole.io(&cdb, &out, into), made.io(&cdb, &out, into));
            prop_assert_eq!(one.outcome, other.outcome);
            prop_assert_eq!(without_time(&cdb, one.data), without_time(&cdb, other.data));
            let asked = |(op, lba, blocks, fua)| (op, lba * RATIO, blocks * RATIO, fua);
            let expected: Vec<_> = whole.asked().into_iter().map(asked).collect();
            prop_assert_eq!(expected, made.asked());
        }
        prop_assert!(whole.medium() == made.medium()[..300 * 4096]);
    }
}

#[test]
fn the_bounce_buffer_takes_whole_blocks() {
    // 12 of the disk's blocks at a time are one of the unit's.
    let features = Features { max_blocks: 12, write_zeroes: false, ..ALL_FEATURES };
    let mut rig = Setup { features, ..setup() }.build();
    let answer = rig.output(&cdb10(0x41, 0, 1, 3), &[7; 4096]);
    assert_eq!(answer.response().status, Status::Good);
    let one = |lba| (Op::Write, lba, RATIO, false);
    assert_eq!(rig.asked(), [one(8), one(16), one(24)]);
    assert_eq!(rig.medium()[4096..4 * 4096], [7; 3 * 4096]);
}
