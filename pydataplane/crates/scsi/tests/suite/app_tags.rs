//! The Application Tag mode page (SBC-4 6.5.3): which application tag blocks are to have, and what follows from it.

use crate::protect::{BLOCK, Unit, With, data, disk, failed};
use crate::rig::*;
use crate::select::{Keeper, options};
use ProtectionType::{Type1, Type3};
use bdev::{Bdev, ProtectionType};
use protection::Tuple;
use reactor::IoContext;
use scsi::{Lun, LunOptions};
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

const APPLICATION_TAG: u16 = 0x1002;
const GUARD: u16 = 0x1001;
const CHANGED: (u8, u16) = (0x6, 0x2A01);
const GOOD: (u8, u16) = (0, 0);
const LIST_FIELD: (u8, u16) = (0x5, 0x2600);
const PF: u8 = 0x10;
const SP: u8 = 0x01;
const ATMPE: u8 = 0x20;
/// Blocks of a unit.
const BLOCKS: u64 = 1024;
/// A range each, of 40 blocks, one and three; behind them nothing is known.
const RANGES: [(u16, u64); 3] = [(0x1111, 40), (0x2222, 1), (0x3333, 3)];

/// The Control mode page, with ATMPE or without.
fn control(enabled: bool) -> [u8; 12] {
    [10, 10, 0x22, 0x10, 0, 0xC0 | if enabled { ATMPE } else { 0 }, 0, 0, 0, 0, 0, 0]
}

/// The Application Tag mode page with these ranges from block 0 on.
fn page(ranges: &[(u16, u64)]) -> Vec<u8> {
    let mut page = vec![0; 16 + 4 * 24];
    page[..4].copy_from_slice(&[0x4A, 2, 0, 108]);
    let mut lba = 0u64;
    for (at, (tag, blocks)) in page[16..].chunks_exact_mut(24).zip(ranges) {
        at[6..8].copy_from_slice(&tag.to_be_bytes());
        at[8..16].copy_from_slice(&lba.to_be_bytes());
        at[16..].copy_from_slice(&blocks.to_be_bytes());
        lba += blocks;
    }
    page[16 + ranges.len().saturating_sub(1) * 24] = 0x80;
    page
}

/// How MODE SELECT(10) of these pages ends.
fn select(unit: &mut Unit, flags: u8, pages: &[&[u8]]) -> (u8, u16) {
    let list = [&[0; 8], &pages.concat()[..]].concat();
    let answer = unit.run(&cdb10(0x55, flags, 0, list.len() as u16), &list, 0);
    if answer.response().sense_len == 0 { GOOD } else { answer.sense() }
}

/// Application tags of the mode page are compared from now on.
fn enable(unit: &mut Unit, ranges: &[(u16, u64)]) {
    assert_eq!(select(unit, PF, &[&page(ranges), &control(true)]), GOOD);
}

/// A page, with values as the page control asks for.
fn sense(unit: &mut Unit, values: u8, subpage: u8) -> Vec<u8> {
    let cdb = [0x1A, 8, values << 6 | 10, subpage, 255, 0];
    unit.run(&cdb, &[], 255).good()[4..].to_vec()
}

fn tag_of(lba: u64) -> u16 {
    let mut end = 0;
    let found = RANGES.iter().find(|(_, blocks)| {
        end += blocks;
        lba < end
    });
    found.map_or(0x7777, |(tag, _)| *tag)
}

/// The tuples of blocks with the tags that they are to have.
fn tuples(kind: ProtectionType, lba: u64, data: &[u8]) -> Vec<u8> {
    let each = (lba..).zip(data.chunks(BLOCK));
    each.flat_map(|(lba, block)| {
        Tuple { app_tag: tag_of(lba), ..Tuple::of(kind, lba, block) }.to_bytes()
    })
    .collect()
}

/// The application tags of blocks, unchecked.
fn tags(unit: &mut Unit, lba: u32, blocks: u16) -> Vec<u16> {
    let len = usize::from(blocks);
    let read = cdb10(0x28, 0x60, lba, blocks);
    let (answer, came) = unit.carry(&read, &[], len * BLOCK, With::In(len * 8));
    answer.good();
    came.chunks(8).map(|tuple| u16::from_be_bytes([tuple[2], tuple[3]])).collect()
}

fn expected(lbas: std::ops::Range<u64>) -> Vec<u16> {
    lbas.map(|lba| match tag_of(lba) {
        0x7777 => 0,
        tag => tag,
    })
    .collect()
}

#[test]
fn the_page_is_there_where_blocks_have_tags() {
    for kind in [Type1, Type3] {
        let mut unit = Unit::new(kind);
        assert_eq!(sense(&mut unit, 0, 0), control(false));
        assert_eq!(sense(&mut unit, 1, 0), [10, 10, 4, 0, 8, ATMPE, 0, 0, 0, 0, 0, 0]);
        assert_eq!(sense(&mut unit, 0, 2), page(&[]));
        let mut mask = page(&[]);
        for descriptor in mask[16..].chunks_exact_mut(24) {
            descriptor[0] = 0x80;
            descriptor[6..].fill(0xFF);
        }
        assert_eq!(sense(&mut unit, 1, 2), mask);
        enable(&mut unit, &RANGES);
        assert_eq!(
            (sense(&mut unit, 0, 0), sense(&mut unit, 0, 2)),
            (control(true).to_vec(), page(&RANGES))
        );
        assert_eq!(
            (sense(&mut unit, 2, 0), sense(&mut unit, 2, 2)),
            (control(false).to_vec(), page(&[]))
        );
        // All pages fit a MODE SENSE(6).
        let all = unit.run(&[0x1A, 0, 0x3F, 0xFF, 255, 0], &[], 255).good().to_vec();
        assert_eq!(usize::from(all[0]) + 1, all.len());
        assert!(all.windows(page(&RANGES).len()).any(|part| part == page(&RANGES)));
    }
    let mut rig = Rig::new();
    rig.input(&[0x1A, 8, 10, 2, 255, 0], 255).invalid_cdb(3, None);
    assert_eq!(rig.input(&[0x1A, 8, 0x40 | 10, 0, 255, 0], 255).good()[4 + 5], 0);
}

#[test]
fn ranges_that_do_not_fit_are_refused_and_change_nothing() {
    let mut unit = Unit::new(Type1);
    enable(&mut unit, &RANGES);
    let before = page(&RANGES);
    let with = |at: usize, value: u8| {
        let mut page = before.clone();
        page[at] = value;
        page
    };
    for wrong in [
        with(16, 1),            // reserved
        with(16 + 5, 1),        // reserved
        with(4, 1),             // reserved
        with(16 + 15, 1),       // the first one not from block 0 on
        with(16 + 24 + 15, 41), // a gap
        with(16 + 24 + 15, 39), // they overlap
        with(16 + 48 + 22, 4),  // beyond the end
        with(16 + 48, 0),       // none is the last one
        page(&[(1, BLOCKS + 1)]),
        page(&[(1, 40), (0xFFFF, 1)]), // its blocks would not be checked
    ] {
        assert_eq!(select(&mut unit, PF, &[&control(false), &wrong]), LIST_FIELD, "{wrong:x?}");
    }
    assert_eq!((sense(&mut unit, 0, 0), sense(&mut unit, 0, 2)), (control(true).to_vec(), before));
    // The whole medium, and one that is shorter than its page.
    assert_eq!(select(&mut unit, PF, &[&page(&[(1, BLOCKS)])]), GOOD);
    assert_eq!(select(&mut unit, PF, &[&page(&[])[..40]]), (0x5, 0x1A00));
}

/// The value of the field, and whether application tags are checked.
const FIELDS: [(u8, bool); 5] = [(1, true), (2, true), (3, false), (4, false), (5, true)];

#[test]
fn sbc4_5_12_tags_are_checked_both_ways_as_the_field_says() {
    for kind in [Type1, Type3] {
        let mut unit = Unit::new(kind);
        enable(&mut unit, &RANGES);
        // Over all borders.
        let (lba, data) = (38, data(8, 3));
        let good = tuples(kind, lba, &data);
        for (field, checked) in FIELDS {
            let flags = field << 5;
            let write = cdb10(0x2A, flags, lba as u32, 8);
            let read = cdb10(0x28, flags, lba as u32, 8);
            // Of the second range, the third, and of a block that no range has.
            for (nth, known) in [(2, true), (5, true), (6, false)] {
                let mut bad = good.clone();
                bad[nth * 8 + 2] ^= 0x40;
                let fails = checked && known;
                unit.carry(&write, &data, 0, With::Out(&good)).0.good();
                let (answer, _) = unit.carry(&write, &data, 0, With::Out(&bad));
                match fails {
                    true => failed(&answer, APPLICATION_TAG, (lba + nth as u64) as u32),
                    false => _ = answer.good(),
                }
                // Of a write that failed, nothing from there on is on the medium.
                let (_, came) =
                    unit.carry(&cdb10(0x28, 0x60, lba as u32, 8), &[], data.len(), With::In(64));
                assert!(came == if fails { good.clone() } else { bad.clone() });
                unit.carry(&cdb10(0x2A, 0x60, lba as u32, 8), &data, 0, With::Out(&bad)).0.good();
                let (answer, came) = unit.carry(&read, &[], data.len(), With::In(64));
                let verified = unit.run(&cdb10(0x2F, flags, lba as u32, 8), &[], 0);
                // Without the field, all is checked that is known.
                let plain = unit.run(&cdb10(0x28, 0, lba as u32, 8), &[], data.len());
                match fails {
                    true => {
                        failed(&answer, APPLICATION_TAG, (lba + nth as u64) as u32);
                        failed(&verified, APPLICATION_TAG, (lba + nth as u64) as u32);
                    }
                    false => {
                        assert!(answer.good() == data && came == bad);
                        verified.good();
                    }
                }
                match known {
                    true => failed(&plain, APPLICATION_TAG, (lba + nth as u64) as u32),
                    false => assert!(plain.good() == data),
                }
                // WRITE AND VERIFY checks both times.
                let verify = cdb10(0x2E, flags, lba as u32, 8);
                let (answer, _) = unit.carry(&verify, &data, 0, With::Out(&bad));
                match fails {
                    true => failed(&answer, APPLICATION_TAG, (lba + nth as u64) as u32),
                    false => _ = answer.good(),
                }
            }
        }
        // The guard comes first, and without ATMPE there is nothing to check.
        let mut bad = good.clone();
        (bad[0], bad[2]) = (!bad[0], !bad[2]);
        let write = cdb10(0x2A, 0x20, lba as u32, 8);
        failed(&unit.carry(&write, &data, 0, With::Out(&bad)).0, GUARD, 38);
        assert_eq!(select(&mut unit, PF, &[&control(false)]), GOOD);
        bad[0] = !bad[0];
        unit.carry(&write, &data, 0, With::Out(&bad)).0.good();
        assert!(unit.run(&cdb10(0x28, 0, lba as u32, 8), &[], data.len()).good() == data);
    }
}

#[test]
fn what_escapes_is_not_checked() {
    let data = data(1, 1);
    let escapes =
        |kind| Tuple { guard: 1, app_tag: 0xFFFF, ..Tuple::of(kind, !0, &data) }.to_bytes();
    for kind in [Type1, Type3] {
        let mut unit = Unit::new(kind);
        enable(&mut unit, &RANGES);
        let (write, read) = (cdb10(0x2A, 0x20, 5, 1), cdb10(0x28, 0x20, 5, 1));
        unit.carry(&write, &data, 0, With::Out(&escapes(kind))).0.good();
        let (answer, came) = unit.carry(&read, &[], BLOCK, With::In(8));
        assert!(answer.good() == data && came == escapes(kind));
        // With type 3 the reference tag has to say so, too.
        let half = Tuple { app_tag: 0xFFFF, ref_tag: 5, ..Tuple::of(kind, 5, &data) }.to_bytes();
        let (answer, _) = unit.carry(&write, &data, 0, With::Out(&half));
        match kind {
            Type1 => _ = answer.good(),
            Type3 => failed(&answer, APPLICATION_TAG, 5),
        }
        // Nobody has written, or it was unmapped.
        assert!(
            unit.run(&cdb10(0x28, 0x20, 30, 9), &[], 9 * 520)
                .good()
                .chunks(520)
                .all(|b| b[512..] == [0xFF; 8])
        );
        // WRITE SAME leaves it such a block.
        unit.carry(&cdb10(0x41, 0x20, 5, 9), &data, 0, With::Out(&escapes(kind))).0.good();
        assert_eq!(tags(&mut unit, 5, 9), [0xFFFF; 9]);
    }
}

#[test]
fn what_the_device_makes_has_the_tags_of_the_page() {
    for kind in [Type1, Type3] {
        let mut unit = Unit::new(kind);
        unit.run(&cdb10(0x2A, 0, 30, 20), &data(20, 1), 0).good();
        assert_eq!(tags(&mut unit, 30, 20), [0; 20]);
        enable(&mut unit, &RANGES);
        // What was there before has other tags.
        failed(&unit.run(&cdb10(0x28, 0, 30, 20), &[], 20 * BLOCK), APPLICATION_TAG, 30);
        let both = [data(20, 4), data(20, 5)].concat();
        let writes: [(&[u8], Vec<u8>); 5] = [
            (&cdb10(0x2A, 0, 30, 20), data(20, 2)),
            (&[&[0x0A, 0, 0, 30, 20, 0][..], &[0; 26]].concat(), data(20, 3)),
            (&cdb10(0x2E, 0x02, 30, 20), data(20, 4)),
            (&cdb16(0x89, 0, 30, 0), both),
            (&cdb10(0x41, 0, 30, 20), data(1, 9)),
        ];
        for (cdb, out) in writes {
            let mut cdb = pad(cdb);
            if cdb[0] == 0x89 {
                cdb[13] = 20; // COMPARE AND WRITE
            }
            unit.run(&cdb, &out, 0).good();
            assert_eq!(tags(&mut unit, 30, 20), expected(30..50), "{:x}", cdb[0]);
            let written = &out[out.len() - out.len().min(20 * BLOCK)..];
            assert!(unit.run(&cdb10(0x28, 0, 30, 20), &[], 20 * BLOCK).good().starts_with(written));
        }
        unit.run(&cdb16(0x8B, 0, 30, 20), &data(20, 7), 0).good(); // ORWRITE
        unit.run(&cdb10(0x28, 0, 30, 20), &[], 20 * BLOCK).good();
        assert_eq!(tags(&mut unit, 30, 20), expected(30..50));
        // Buffers that are longer than the transfer go another way.
        unit.run(&cdb10(0x2A, 0, 30, 20), &data(21, 8), 0).good();
        assert_eq!(tags(&mut unit, 30, 20), expected(30..50));
        assert!(
            unit.run(&cdb10(0x28, 0, 30, 20), &[], 21 * BLOCK).good().starts_with(&data(20, 8))
        );
        // COMPARE AND WRITE and ORWRITE check what they read.
        let wrong = Tuple { app_tag: 1, ..Tuple::of(kind, 31, &data(1, 2)) }.to_bytes();
        unit.carry(&cdb10(0x2A, 0x60, 31, 1), &data(1, 2), 0, With::Out(&wrong)).0.good();
        let mut compare = pad(&cdb16(0x89, 0, 30, 0));
        compare[13] = 2;
        failed(&unit.run(&compare, &[0; 2048], 0), APPLICATION_TAG, 31);
        failed(&unit.run(&cdb16(0x8B, 0, 30, 2), &[0; 1024], 0), APPLICATION_TAG, 31);
        // So does VERIFY, with data of its own or without.
        failed(&unit.run(&cdb10(0x2F, 0, 30, 2), &[], 0), APPLICATION_TAG, 31);
        failed(&unit.run(&cdb10(0x2F, 2, 30, 2), &[0; 1024], 0), APPLICATION_TAG, 31);
    }
}

#[test]
fn sbc4_5_54_write_same_gives_each_block_the_tag_of_its_range() {
    for kind in [Type1, Type3] {
        let mut unit = Unit::new(kind);
        enable(&mut unit, &RANGES);
        let block = data(1, 9);
        let of = tuples(kind, 39, &block);
        // More than a bounce buffer holds.
        unit.carry(&cdb10(0x41, 0x20, 39, 700), &block, 0, With::Out(&of)).0.good();
        let mut all = expected(39..44);
        all.resize(700, 0x1111); // where nothing is known it is that of the tuple
        assert_eq!(tags(&mut unit, 39, 700), all);
        unit.run(&cdb10(0x28, 0, 39, 700), &[], 700 * BLOCK).good();
        let mut bad = of.clone();
        bad[3] ^= 1;
        failed(
            &unit.carry(&cdb10(0x41, 0x20, 39, 2), &block, 0, With::Out(&bad)).0,
            APPLICATION_TAG,
            39,
        );
        // Where it is not checked it is the initiator's, as with WRITE.
        for field in [0x60, 0x80] {
            unit.carry(&cdb10(0x41, 0x20, 39, 9), &block, 0, With::Out(&of)).0.good();
            unit.carry(&cdb10(0x41, field, 39, 9), &block, 0, With::Out(&bad)).0.good();
            assert_eq!(tags(&mut unit, 39, 9), [0x1110; 9], "{field:x}");
        }
    }
}

#[test]
fn copies_and_sanitized_blocks_have_the_tags_too() {
    let mut unit = Unit::new(Type1);
    enable(&mut unit, &RANGES);
    unit.run(&cdb10(0x2A, 0, 38, 8), &data(8, 1), 0).good();
    // EXTENDED COPY of blocks 38 to 45 to 0 on and to 500 on.
    let (high, low) = unit.lun.shared().identity().as_u64_pair();
    let naa = ((high ^ low) & (u64::MAX >> 4)) | 3 << 60;
    let mut list = vec![9, 0, 0, 32, 0, 0, 0, 0, 0, 0, 0, 56, 0, 0, 0, 0];
    list.extend([0xE4, 0, 0, 0, 1, 3, 0, 8]);
    list.extend(naa.to_be_bytes());
    list.extend([&[0; 14][..], &[2, 0]].concat());
    for to in [0u64, 500] {
        list.extend([2, 0, 0, 0x18, 0, 0, 0, 0, 0, 0, 0, 8]);
        list.extend([38u64.to_be_bytes(), to.to_be_bytes()].concat());
    }
    let mut cdb = cdb16(0x83, 0, 0, 0);
    cdb[13] = list.len() as u8;
    unit.run(&cdb, &list, 0).good();
    assert_eq!(tags(&mut unit, 0, 8), [0x1111; 8]);
    assert_eq!(tags(&mut unit, 500, 8), [0; 8]);
    assert!(unit.run(&cdb10(0x28, 0, 0, 8), &[], 8 * BLOCK).good() == data(8, 1));
    // A block with another one's tag is not copied.
    let wrong = Tuple { app_tag: 1, ..Tuple::of(Type1, 40, &data(1, 2)) }.to_bytes();
    unit.carry(&cdb10(0x2A, 0x60, 40, 1), &data(1, 2), 0, With::Out(&wrong)).0.good();
    assert_eq!(unit.run(&cdb, &list, 0).sense(), (0xA, 0));
    // SANITIZE with OVERWRITE.
    let overwrite = [[1, 0, 0, 4], [0xAB; 4]].concat();
    unit.run(&[0x48, 1, 0, 0, 0, 0, 0, 0, 8, 0], &overwrite, 0).good();
    assert_eq!(unit.run(&cdb10(0x28, 0, 0, 60), &[], 60 * BLOCK).good(), vec![0xAB; 60 * BLOCK]);
    assert_eq!(tags(&mut unit, 0, 60), expected(0..60));
}

#[test]
fn a_change_is_told_to_others_and_counts_for_them() {
    let disk = disk(Type1, 512);
    let mut unit = Unit::on(disk.clone(), LunOptions::default());
    let mut other = Unit::on(disk.clone(), LunOptions::default());
    let io = IoContext::new().unwrap();
    let nexus = unit.lun.shared().connect();
    let session = Lun::new(unit.lun.shared().clone(), nexus, disk.open(&io).unwrap());
    let first = std::mem::replace(&mut unit.lun, session);
    assert_eq!(unit.run(&[0; 6], &[], 0).sense(), (0x6, 0x2900));
    let second = std::mem::replace(&mut unit.lun, first);
    enable(&mut unit, &RANGES);
    assert_eq!(other.run(&[0; 6], &[], 0).sense(), CHANGED);
    other.run(&cdb10(0x2A, 0, 38, 8), &data(8, 1), 0).good();
    assert_eq!(tags(&mut unit, 38, 8), expected(38..46));
    // The other ranges count at once, also where a command has already used those before.
    let others = [(0x4444, 100)];
    assert_eq!(select(&mut other, PF, &[&page(&others)]), GOOD);
    assert_eq!(unit.run(&[0; 6], &[], 0).sense(), CHANGED);
    failed(&unit.run(&cdb10(0x28, 0, 38, 8), &[], 8 * BLOCK), APPLICATION_TAG, 38);
    failed(&other.run(&cdb10(0x28, 0, 38, 8), &[], 8 * BLOCK), APPLICATION_TAG, 38);
    unit.lun = second;
    assert_eq!(unit.run(&[0; 6], &[], 0).sense(), CHANGED);
    // A unit with larger blocks has none to show, and its own numbers.
    let larger = LunOptions { block_size: Some(4096), ..LunOptions::default() };
    let mut larger = Unit::on(disk, larger);
    larger.run(&[0x1A, 8, 10, 2, 255, 0], &[], 255).invalid_cdb(3, None);
    assert_eq!(larger.run(&[0x1A, 8, 10, 0, 255, 0], &[], 255).good()[4 + 5], 0x40);
    larger.run(&cdb10(0x28, 0, 4, 2), &[], 8192).good();
    let swp = [10, 10, 0x22, 0x10, 8, 0x40, 0, 0, 0, 0, 0, 0];
    assert_eq!(select(&mut larger, PF, &[&swp]), GOOD);
    assert_eq!(other.run(&[0; 6], &[], 0).sense(), CHANGED);
    assert_eq!(sense(&mut other, 0, 0)[5], 0xC0 | ATMPE);
}

#[test]
fn what_was_saved_outlives_reset_and_process() {
    let keeper: Arc<Keeper> = Arc::default();
    let disk = disk(Type1, 512);
    let mut unit = Unit::on(disk.clone(), options(&keeper));
    assert_eq!(select(&mut unit, PF | SP, &[&page(&RANGES), &control(true)]), GOOD);
    assert_eq!((sense(&mut unit, 3, 0)[5], sense(&mut unit, 3, 2)[0]), (0xC0 | ATMPE, 0x80 | 0x4A));
    // Not saved: it ends with a reset.
    assert_eq!(select(&mut unit, PF, &[&page(&[]), &control(false)]), GOOD);
    unit.lun.shared().reset();
    assert_eq!(unit.run(&[0; 6], &[], 0).sense(), (0x6, 0x2900));
    assert_eq!(sense(&mut unit, 0, 2)[4..], page(&RANGES)[4..]);
    drop(unit);
    let mut unit = Unit::on(disk.clone(), options(&keeper));
    assert_eq!(
        (sense(&mut unit, 0, 0)[5], &sense(&mut unit, 0, 2)[4..]),
        (0xC0 | ATMPE, &page(&RANGES)[4..])
    );
    unit.run(&cdb10(0x2A, 0, 38, 8), &data(8, 1), 0).good();
    assert_eq!(tags(&mut unit, 38, 8), expected(38..46));
    assert_eq!(select(&mut unit, PF | SP, &[&page(&[]), &control(false)]), GOOD);
    assert_eq!(*keeper.text.lock(), None);
    // A record without them is that of a version that did not know them, and they are not in it where nobody set them.
    let mut swp = control(false);
    swp[4] = 8;
    assert_eq!(select(&mut unit, PF | SP, &[&swp]), GOOD);
    assert!(!keeper.text.lock().as_ref().unwrap().contains("tags"));
    drop(unit);
    let mut unit = Unit::on(disk, options(&keeper));
    assert_eq!((sense(&mut unit, 0, 0)[4], &sense(&mut unit, 0, 2)[4..]), (8, &page(&[])[4..]));
}

#[test]
fn nothing_is_written_before_it_is_known_which_tags_blocks_are_to_have() {
    const NOT_READY: (u8, u16) = (0x2, 0x0401);
    let keeper: Arc<Keeper> = Arc::default();
    let disk = disk(Type1, 512);
    let mut unit = Unit::on(disk.clone(), options(&keeper));
    assert_eq!(select(&mut unit, PF | SP, &[&page(&RANGES), &control(true)]), GOOD);
    drop(unit);
    keeper.is_unreadable.store(true, Ordering::Relaxed);
    let mut unit = Unit::unattended(disk.clone(), options(&keeper));
    unit.run(&[0x12, 0, 0, 0, 96, 0], &[], 96).good();
    assert_eq!(unit.run(&[0; 6], &[], 0).sense(), (0x6, 0x2900));
    assert_eq!(unit.run(&[0; 6], &[], 0).sense(), NOT_READY);
    for field in [0, 0x60] {
        let write = cdb10(0x2A, field, 38, 8);
        let (answer, _) = unit.carry(&write, &data(8, 1), 0, With::Out(&[0; 64]));
        assert_eq!(answer.sense(), NOT_READY);
    }
    assert_eq!(select(&mut unit, PF | SP, &[&page(&[]), &control(false)]), NOT_READY);
    // It is read again, without another session.
    keeper.is_unreadable.store(false, Ordering::Relaxed);
    let until = Instant::now() + Duration::from_secs(60);
    loop {
        let answer = unit.run(&[0; 6], &[], 0);
        if answer.response().sense_len == 0 {
            break;
        }
        assert_eq!(answer.sense(), NOT_READY);
        assert!(Instant::now() < until, "it is never read");
        std::thread::sleep(Duration::from_millis(1));
    }
    unit.run(&cdb10(0x2A, 0, 38, 8), &data(8, 1), 0).good();
    assert_eq!(tags(&mut unit, 38, 8), expected(38..46));
    // What is known stays so.
    keeper.is_unreadable.store(true, Ordering::Relaxed);
    drop(unit.lun.shared().connect());
    unit.run(&cdb10(0x2A, 0, 38, 8), &data(8, 2), 0).good();
    assert_eq!(tags(&mut unit, 38, 8), expected(38..46));
}
