//! RECEIVE COPY FAILURE DETAILS (SPC-4 6.23).

use crate::copy::{ABORTED, NOT_REACHABLE, cdb, copy, cscd, list, segment, status};
use crate::rig::*;
use crate::unit::{Unit, disk, medium, two, two_of};
use bdev::testing::{Fault, FaultBdev};
use bdev::{Bdev, IoError, Op};
use scsi::{Outcome, Status, Task};
use std::sync::Arc;

const LENGTH: usize = 60 + 18;

/// With room for so many bytes.
fn details(unit: &mut Unit, list_id: u8, room: u8) -> Answer {
    let mut cdb = cdb16(0x84, 4, 0, 0);
    (cdb[2], cdb[13]) = (list_id, room);
    unit.io(&cdb, &[], usize::from(room))
}

/// The status and the sense that are told.
#[track_caller]
fn told(unit: &mut Unit) -> (u8, (u8, u16)) {
    let answer = details(unit, 9, 255);
    let data = answer.good();
    assert_eq!((data.len(), &data[..4]), (LENGTH, &[0, 0, 0, LENGTH as u8 - 4][..]));
    assert_eq!((&data[4..56], data[57], &data[58..60]), (&[0; 52][..], 0, &[0, 18][..]));
    assert_eq!(data[60], 0x70);
    (data[56], key_code(&data[60..]))
}

const NOTHING: [u8; 4] = [0; 4];

/// A unit whose disk fails to write, and the parameter list of a copy within it.
fn failing() -> (Arc<FaultBdev>, Unit, Vec<u8>) {
    let disk = FaultBdev::new("failing", 512, 8192);
    let of: Arc<dyn Bdev> = disk.clone();
    let [(_, unit), _] = two_of([of.clone(), crate::unit::disk(1)]);
    disk.inject(Fault::always(Op::Write, IoError::WriteMedium));
    let list = list(&[cscd(&of, false)], &[segment((0, 0), (0, 4096), 8)]);
    (disk, unit, list)
}

#[test]
fn spc4_6_23_why_a_copy_failed_is_told_once_as_a_whole() {
    let (disk, mut unit, list) = failing();
    details(&mut unit, 9, 255).invalid_cdb(2, None);
    for _ in 0..2 {
        assert_eq!(copy(&mut unit, &list).sense(), ABORTED);
        // Cut, it is not over; of another identifier there is none.
        assert_eq!(details(&mut unit, 9, 60).good().len(), 60);
        details(&mut unit, 8, 255).invalid_cdb(2, None);
        assert_eq!(told(&mut unit), (Status::CheckCondition as u8, ABORTED));
        assert_eq!(details(&mut unit, 9, 255).good(), NOTHING);
        assert_eq!(status(&mut unit, 9).good()[4], 2);
    }
    // Without room it is not to be told any more.
    assert_eq!(copy(&mut unit, &list).sense(), ABORTED);
    assert!(details(&mut unit, 9, 0).good().is_empty());
    assert_eq!(details(&mut unit, 9, 255).good(), NOTHING);
    disk.clear_faults();
    copy(&mut unit, &list).good();
    assert_eq!(details(&mut unit, 9, 255).good(), NOTHING);
}

#[test]
fn what_its_segments_are_about_is_told_too_and_what_is_no_list_is_not() {
    let [(a, mut unit), _] = two();
    let cscds = [cscd(&a, false), cscd(&disk(3), false)];
    let mut wrong = list(&cscds, &[segment((0, 0), (1, 0), 1)]);
    wrong[16] = 0xE0;
    assert_eq!(copy(&mut unit, &wrong).sense(), (0x5, 0x2607));
    details(&mut unit, 9, 255).invalid_cdb(2, None);
    for (from, to, sense) in [((0, 0), (1, 0), NOT_REACHABLE), ((0, 8191), (0, 0), ABORTED)] {
        let list = list(&cscds, &[segment(from, to, 2)]);
        assert_eq!(copy(&mut unit, &list).sense(), sense);
        assert_eq!(told(&mut unit), (Status::CheckCondition as u8, sense));
        assert_eq!(status(&mut unit, 9).good()[4..7], [2, 0, 0]);
    }
    // Nobody can ask for it.
    let mut unnamed = list(&cscds, &[segment((0, 0), (1, 0), 1)]);
    (unnamed[0], unnamed[1]) = (0, 0x18);
    assert_eq!(copy(&mut unit, &unnamed).sense(), NOT_REACHABLE);
    details(&mut unit, 0, 255).invalid_cdb(2, None);
    assert_eq!(medium(&a), medium(&disk(0)));
}

#[test]
fn while_a_copy_goes_on_there_are_no_details_and_who_ends_it_is_told_until_a_reset() {
    let [(a, mut unit), _] = two();
    let many = vec![segment((0, 0), (0, 4096), 4096); 64];
    let list = list(&[cscd(&a, false)], &many);
    let out = Buffer::new(&list, list.len());
    for reset in [false, true] {
        let mut task = Task::new(7);
        task.prepare(&pad(&cdb(list.len())), out.sg(), Buffer::new(&[], 1).sg());
        let outcome = unit.lun.start(&mut task);
        assert_eq!(outcome, Outcome::Pending);
        let mut asks = Task::new(8);
        let mut details_cdb = cdb16(0x84, 4, 0, 0);
        (details_cdb[2], details_cdb[13]) = (9, 255);
        let into = Buffer::new(&[0; 255], 255);
        asks.prepare(&pad(&details_cdb), Buffer::new(&[], 1).sg(), into.sg());
        let Outcome::Done(refused) = unit.lun.start(&mut asks) else { panic!() };
        assert_eq!(key_code(&refused.sense), ILLEGAL_CDB);
        if reset {
            unit.shared.reset()
        } else {
            task.abort()
        }
        let Outcome::Done(ended) = unit.until_over(&mut task, outcome) else { panic!() };
        assert_eq!(ended.status, Status::TaskAborted);
        if reset {
            assert_eq!(unit.run(&[0; 6]).sense(), (0x6, 0x2900));
            assert_eq!(details(&mut unit, 9, 255).good(), NOTHING);
        } else {
            let answer = details(&mut unit, 9, 255);
            let data = answer.good();
            assert_eq!((data.len(), data[3], data[56]), (60, 56, Status::TaskAborted as u8));
            assert_eq!(data[57..], [0; 3]);
        }
    }
}

#[test]
fn a_reset_or_the_end_of_the_session_ends_what_is_told() {
    for ends in
        [|unit: &mut Unit| unit.shared.reset(), |unit: &mut Unit| drop(unit.shared.connect())]
    {
        let (_disk, mut unit, list) = failing();
        assert_eq!(copy(&mut unit, &list).sense(), ABORTED);
        ends(&mut unit);
        _ = unit.run(&[0; 6]);
        assert_eq!(details(&mut unit, 9, 255).good(), NOTHING);
    }
}

#[test]
fn a_copy_of_four_bytes_of_identifier_has_none() {
    let (_disk, mut unit, short) = failing();
    let mut list = vec![0; 48];
    (list[0], list[3], list[16], list[23]) = (1, 32, 0xFF, 9);
    list[42..46].copy_from_slice(&[0, 32, 0, 28]);
    list.extend(&short[16..]);
    let mut four = cdb(list.len());
    four[1] = 1;
    assert_eq!(unit.io(&four, &list, 0).sense(), ABORTED);
    assert_eq!(status(&mut unit, 9).good()[4], 2);
    details(&mut unit, 9, 255).invalid_cdb(2, None);
}
