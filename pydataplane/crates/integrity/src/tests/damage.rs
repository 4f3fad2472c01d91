//! What goes bad on the medium is found.

use super::{BLOCKS, Host, Pages, pattern};
use crate::disk::{Counted, probe};
use crate::layout::{PAGE, REGION_BLOCKS, map_page, sums_page};
use bdev::testing::Fault;
use bdev::{Bdev, IoError, Op, SyncChannel};

#[test]
fn a_flipped_bit_of_a_block_is_a_medium_error_until_the_block_is_written_anew() {
    for block_size in [512, 4096] {
        let host = Host::new(block_size);
        let disk = host.create();
        let mut c = Pages::open(&disk);
        let data = pattern(20, 1);
        c.write(1000, &data).unwrap();
        host.base.corrupt(Host::at(1011) + 4095, 0x10);
        assert_eq!(c.read(1000, 20).unwrap_err(), IoError::ReadMedium);
        assert_eq!(c.read(1011, 1).unwrap_err(), IoError::ReadMedium);
        c.is(1000, &data[..11 * PAGE]);
        c.is(1012, &data[12 * PAGE..]);
        assert_eq!(disk.counted().mismatches, 2);
        // Its thread has noted it by the time that it answers.
        disk.clean_all();
        disk.clean_all();
        let shown = disk.driver_specific()["integrity"].clone();
        assert_eq!(shown["damaged_blocks"], serde_json::json!([1011]));
        if block_size == 512 {
            // Of a part of it the rest would be taken for right.
            let sector = bdev::AlignedBuf::zeroed(512);
            let failed = c.channel.write(1011 * 8 + 1, &sector).unwrap_err();
            assert_eq!(failed.cause, IoError::ReadMedium);
        }
        c.write(1011, &data[..PAGE]).unwrap();
        c.is(1011, &data[..PAGE]);
    }
}

#[test]
fn a_write_that_went_elsewhere_or_nowhere_is_found_at_both_places() {
    let host = Host::new(4096);
    let disk = host.create();
    let mut c = Pages::open(&disk);
    c.write(5, &pattern(1, 1)).unwrap();
    c.write(2000, &pattern(1, 2)).unwrap();
    // As if the second write to 5 had gone to 2000.
    c.write(5, &pattern(1, 3)).unwrap();
    let mut medium = SyncChannel::open(&*host.base).unwrap();
    medium.write((Host::at(5) / PAGE) as u64, &pattern(1, 1)).unwrap();
    medium.write((Host::at(2000) / PAGE) as u64, &pattern(1, 3)).unwrap();
    assert_eq!(c.read(5, 1).unwrap_err(), IoError::ReadMedium);
    assert_eq!(c.read(2000, 1).unwrap_err(), IoError::ReadMedium);
}

#[test]
fn checksums_that_were_written_find_damage_after_a_crash_and_a_restart() {
    for power_cut in [false, true] {
        let host = Host::new(512);
        let disk = host.create();
        let mut c = Pages::open(&disk);
        let data = pattern(4, 7);
        c.write(10, &data).unwrap();
        c.write(u64::from(REGION_BLOCKS) + 10, &data).unwrap();
        while disk.clean_all() > 0 {}
        // Another region is being written to when it happens.
        c.write(2 * u64::from(REGION_BLOCKS), &data).unwrap();
        host.base.die_after(0);
        drop((c, disk));
        match power_cut {
            true => host.base.power_cut(3),
            false => host.base.revive(),
        }
        host.base.corrupt(Host::at(11), 1);
        let disk = host.load();
        let mut c = Pages::open(&disk);
        assert_eq!(c.read(11, 1).unwrap_err(), IoError::ReadMedium);
        c.is(u64::from(REGION_BLOCKS) + 10, &data);
        c.read(2 * u64::from(REGION_BLOCKS), 4).unwrap();
        assert_eq!(disk.counted().mismatches, 1);
    }
}

#[test]
fn a_flipped_bit_of_a_checksum_costs_its_block_and_is_counted() {
    let host = Host::new(4096);
    let disk = host.create();
    let mut c = Pages::open(&disk);
    let data = pattern(8, 1);
    c.write(0, &data).unwrap();
    drop((c, disk));
    host.base.corrupt(sums_page(0) as usize * PAGE + 64 + 4 * 3, 2);
    let disk = host.load();
    let mut c = Pages::open(&disk);
    assert_eq!(c.read(3, 1).unwrap_err(), IoError::ReadMedium);
    c.is(0, &data[..3 * PAGE]);
    c.is(4, &data[4 * PAGE..]);
    let counted = disk.counted();
    assert_eq!((counted.damaged_checksum_pages, counted.mismatches), (1, 1));
}

#[test]
fn a_page_of_checksums_that_is_lost_or_elsewhere_makes_no_block_pass_unseen() {
    for from in [None, Some(sums_page(1))] {
        let host = Host::new(4096);
        let disk = host.create();
        let mut c = Pages::open(&disk);
        c.write(0, &pattern(8, 1)).unwrap();
        c.write(u64::from(REGION_BLOCKS), &pattern(8, 2)).unwrap();
        drop((c, disk));
        let mut medium = SyncChannel::open(&*host.base).unwrap();
        let mut page = bdev::AlignedBuf::zeroed(PAGE);
        if let Some(from) = from {
            medium.read(from, &mut page).unwrap();
        }
        medium.write(sums_page(0), &page).unwrap();
        let disk = host.load();
        let mut c = Pages::open(&disk);
        for block in 0..9 {
            assert_eq!(c.read(block, 1).unwrap_err(), IoError::ReadMedium, "{block}");
        }
        c.is(u64::from(REGION_BLOCKS), &pattern(8, 2));
        c.write(0, &pattern(8, 3)).unwrap();
        c.is(0, &pattern(8, 3));
    }
}

#[test]
fn a_damaged_map_has_the_checksums_of_its_zone_made_anew() {
    let host = Host::new(512);
    let disk = host.create();
    let mut c = Pages::open(&disk);
    let data = pattern(8, 1);
    c.write(0, &data).unwrap();
    drop((c, disk));
    host.base.corrupt(map_page(0) as usize * PAGE + 40, 1);
    let disk = host.load();
    assert_eq!(disk.counted().damaged_maps, 1);
    let mut c = Pages::open(&disk);
    c.is(0, &data);
    // The last of the regions, which is a short one, is made anew last.
    while disk.counted().stale_regions > 0 || disk.counted().cached_regions == 0 {
        std::thread::sleep(std::time::Duration::from_millis(1));
    }
    host.base.corrupt(Host::at(2), 1);
    assert_eq!(c.read(2, 1).unwrap_err(), IoError::ReadMedium);
    host.base.corrupt(Host::at(BLOCKS - 1), 1);
    assert_eq!(c.read(BLOCKS - 1, 1).unwrap_err(), IoError::ReadMedium);
}

#[test]
fn a_damaged_copy_of_the_superblock_is_replaced_and_two_are_told() {
    let host = Host::new(4096);
    drop(host.create());
    host.base.corrupt(100, 1);
    let found = probe(&*host.base).unwrap().unwrap();
    assert_eq!(found.name, "sums");
    drop(host.load());
    host.base.corrupt(8 * PAGE + 100, 1);
    let e = probe(&*host.base).unwrap_err().to_string();
    assert_eq!(
        e,
        "the checksums on bdev base cannot be used: the superblock: its checksum does not match"
    );
}

#[test]
fn errors_of_the_base_are_passed_on_and_leave_no_false_checksum() {
    let host = Host::new(512);
    let disk = host.create();
    let mut c = Pages::open(&disk);
    c.write(0, &pattern(8, 1)).unwrap();
    host.base.inject(Fault::always(Op::Write, IoError::NoSpace));
    assert_eq!(c.write(0, &pattern(8, 2)).unwrap_err(), IoError::NoSpace);
    host.base.clear_faults();
    c.is(0, &pattern(8, 1));
    host.base.inject(Fault::always(Op::Read, IoError::ReadMedium));
    assert_eq!(c.read(0, 8).unwrap_err(), IoError::ReadMedium);
    host.base.clear_faults();
    c.is(0, &pattern(8, 1));
    assert_eq!(disk.counted().mismatches, 0);
    // A region that cannot be marked takes no write, and does when it can.
    host.base.inject(Fault::always(Op::Write, IoError::WriteMedium));
    let other = u64::from(REGION_BLOCKS);
    assert_eq!(c.write(other, &pattern(8, 2)).unwrap_err(), IoError::WriteMedium);
    host.base.clear_faults();
    c.write(other, &pattern(8, 2)).unwrap();
    c.is(other, &pattern(8, 2));
}

#[test]
fn checksums_do_not_become_clean_by_a_flush_that_fails() {
    let host = Host::new(512);
    let disk = host.create();
    let mut c = Pages::open(&disk);
    c.write(0, &pattern(8, 1)).unwrap();
    host.base.inject(Fault::always(Op::Flush, IoError::Flush));
    assert_eq!(disk.clean_all(), 0);
    host.base.clear_faults();
    assert_eq!(disk.clean_all(), 0, "it is latched");
    c.write(0, &pattern(8, 2)).unwrap();
    assert!(host.base.flush_latch().unwrap().clear().is_some());
    assert_eq!(disk.clean_all(), 1);
    let expected = Counted { dirty_regions: 0, cached_regions: 1, ..Counted::default() };
    assert_eq!(disk.counted(), expected);
    c.is(0, &pattern(8, 2));
}
