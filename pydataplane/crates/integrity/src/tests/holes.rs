//! What the base has nothing of is told as that, where it is.

use super::BY_HAND;
use crate::disk::Integrity;
use crate::layout::{HEAD, PAGE, ZONE_BLOCKS, ZONE_PAGES};
use bdev::testing::Holes;
use bdev::{Bdev, Malloc, MallocOptions, Registry, Run};
use reactor::IoContext;
use std::ops::Range;
use std::sync::Arc;

/// On a base of two zones, the second with a hundred blocks of data, and with these holes, in pages.
fn on_base_with(holes: &[Range<u64>], block_size: u32) -> Arc<Integrity> {
    let per = PAGE as u64 / u64::from(block_size);
    let disk = Malloc::create(MallocOptions {
        name: "base".into(),
        block_size,
        physical_block_size: 0,
        num_blocks: (ZONE_PAGES + HEAD + 100) * per,
        uuid: None,
    });
    let holes: Vec<_> = holes.iter().map(|hole| hole.start * per..hole.end * per).collect();
    let registry = Registry::new();
    registry.register(Holes::new(disk.unwrap(), &holes)).unwrap();
    Integrity::create_as(&registry, "sums", "base", BY_HAND).unwrap()
}

/// One within the first zone, and one from its last blocks over the metadata of the second to that's seventh.
const HOLES: [Range<u64>; 2] = [HEAD + 10..HEAD + 20, ZONE_PAGES - 5..ZONE_PAGES + HEAD + 7];

#[test]
fn holes_of_the_base_are_where_their_blocks_are() {
    for block_size in [512, 4096] {
        let per = PAGE as u64 / u64::from(block_size);
        let disk = on_base_with(&HOLES, block_size);
        let sparse = disk.sparse().unwrap();
        let (mut at, mut runs) = (0, Vec::new());
        while at < disk.geometry().num_blocks {
            let Run { hole, blocks } = sparse.run(at);
            runs.push((at / per, hole));
            at += blocks;
        }
        let zone = ZONE_BLOCKS;
        let expected = [
            (0, false),
            (10, true),
            (20, false),
            (zone - 5, true),
            (zone, true),
            (zone + 7, false),
        ];
        assert_eq!(runs, expected);
        assert_eq!((at, sparse.run(at).blocks), (disk.geometry().num_blocks, 0));
        let within = sparse.run(12 * per + per - 1);
        assert_eq!(within, Run { hole: true, blocks: 7 * per + 1 });
        let holes: u64 = HOLES.iter().map(|hole| hole.end - hole.start).sum();
        let all = (ZONE_PAGES + HEAD + 100) * PAGE as u64;
        let room = (all - holes * PAGE as u64).min(disk.geometry().bytes());
        assert_eq!(sparse.allocated_bytes(), room);
    }
}

#[test]
fn a_queue_pair_tells_them_as_far_as_it_is_asked() {
    let disk = on_base_with(&HOLES, 512);
    let io = IoContext::new().unwrap();
    let mut channel = disk.open(&io).unwrap();
    let end = disk.geometry().num_blocks;
    let zone = ZONE_BLOCKS * 8;
    for (lba, blocks, hole, found) in [
        (0, end, false, 80),
        (81, 8, true, 8),
        (81, end - 81, true, 79),
        (zone - 40, end, true, 40),
        (zone, end - zone, true, 56),
        (zone + 56, end - zone - 56, false, 93 * 8),
    ] {
        assert_eq!(channel.sparse_run(lba, blocks), Run { hole, blocks: found }, "{lba}");
    }
}

#[test]
fn on_a_base_that_does_not_tell_all_is_data() {
    let host = super::Host::new(512);
    assert!(host.create().sparse().is_none());
}
