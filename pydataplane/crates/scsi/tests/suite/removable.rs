//! A removable medium: RMB, PREVENT ALLOW MEDIUM REMOVAL, eject (SBC-3 4.11, 5.10, 5.25).

use crate::rig::*;
use bdev::{IoError, Op};
use scsi::{LunOptions, LunShared, Outcome, Status, Task, UnitAttention};
use std::sync::atomic::Ordering;

const PREVENT: [u8; 6] = [0x1E, 0, 0, 0, 1, 0];
const ALLOW: [u8; 6] = [0x1E, 0, 0, 0, 0, 0];
const EJECT: [u8; 6] = [0x1B, 0, 0, 0, 0x02, 0];
const LOAD: [u8; 6] = [0x1B, 0, 0, 0, 0x03, 0];
const FLUSHED: Asked = (Op::Flush, 0, 0, false);
/// ILLEGAL REQUEST, MEDIUM REMOVAL PREVENTED.
const PREVENTED: (u8, u16) = (0x5, 0x5302);
/// NOT READY, MEDIUM NOT PRESENT.
const NOT_PRESENT: (u8, u16) = (0x2, 0x3A00);

fn removable() -> Rig {
    let options = LunOptions { removable: true, ..LunOptions::default() };
    Setup { options, ..Setup::default() }.fresh()
}

#[test]
fn spc4_6_6_2_rmb_says_so() {
    let rmb = |rig: &mut Rig| rig.input(&[0x12, 0, 0, 0, 36, 0], 36).good()[1];
    assert_eq!(rmb(&mut removable()), 0x80);
    assert_eq!(rmb(&mut Rig::new()), 0);
}

#[test]
fn sbc3_5_10_what_is_prevented_is_not_ejected_until_it_is_allowed() {
    let mut rig = removable();
    assert!(rig.shared.is_removable() && !rig.shared.removal_prevented());
    for _ in 0..2 {
        rig.run(&PREVENT).good();
        assert!(rig.shared.removal_prevented());
        assert_eq!(rig.run(&EJECT).sense(), PREVENTED);
        // A stop without eject, and a load, are no removal.
        rig.run(&[0x1B, 0, 0, 0, 0x04, 0]).good();
        rig.run(&LOAD).good();
    }
    assert_eq!(rig.asked(), []);
    rig.run(&ALLOW).good();
    assert!(!rig.shared.removal_prevented());
    assert_eq!(rig.asked(), [FLUSHED], "SBC-3 4.11");
    rig.run(&EJECT).good();
    assert_eq!(rig.asked(), [FLUSHED]);
    rig.run(&[0x1E, 0, 0, 0, 2, 0]).invalid_cdb(4, Some(1)); // obsolete
}

#[test]
fn sbc4_5_27_what_is_ejected_is_not_present_until_it_is_loaded() {
    let mut rig = removable();
    rig.run(&EJECT).good();
    assert_eq!(rig.asked(), [FLUSHED]);
    assert!(rig.shared.is_ejected());
    let block = [0; 512];
    let medium = rig.medium();
    let (one, zeros) = (cdb10(0x28, 0, 0, 1), cdb16(0x93, 0x01, 0, 1));
    let of_the_medium: [(&[u8], &[u8]); 9] = [
        (&[0; 6], &[]),
        (&one, &[]),
        (&cdb10(0x2A, 0, 0, 1), &block),
        (&zeros, &[]),
        (&cdb10(0x35, 0, 0, 0), &[]),
        (&cdb10(0x25, 0, 0, 0), &[]),
        (&cdb16(0x9E, 0x10, 0, 32), &[]),
        (&[0x04, 0, 0, 0, 0, 0], &[]),
        (&[0x48, 0x9F, 0, 0, 0, 0, 0, 0, 0, 0], &[]),
    ];
    for (cdb, data) in of_the_medium {
        assert_eq!(rig.io(cdb, data, 512).sense(), NOT_PRESENT, "{cdb:x?}");
    }
    assert_eq!(rig.asked(), []);
    assert_eq!(rig.medium(), medium);
    // What is of the unit, or of its initiators, is answered.
    assert_eq!(rig.input(&[0x12, 0, 0, 0, 36, 0], 36).good()[1], 0x80);
    let sense = rig.input(&[0x03, 0, 0, 0, 18, 0], 18);
    let told = sense.good();
    assert_eq!((told[2], told[12], told[13]), (0x02, 0x3A, 0));
    rig.input(&[0x1A, 0, 0x08, 0, 64, 0], 64).good();
    for stop_or_allow in [[0x1B, 0, 0, 0, 0, 0], ALLOW] {
        rig.run(&stop_or_allow).good();
    }
    assert_eq!(rig.asked(), [], "there is nothing to flush");
    rig.run(&EJECT).good();

    // What is out is not removed, and to load is no removal, so that nobody prevents either.
    rig.run(&PREVENT).good();
    rig.run(&EJECT).good();
    assert_eq!(rig.asked(), []);
    rig.run(&LOAD).good();
    assert!(!rig.shared.is_ejected());
    rig.run(&[0; 6]).good();
    rig.input(&one, 512).good();
    assert_eq!(rig.run(&EJECT).sense(), PREVENTED);
}

#[test]
fn sam5_5_14_the_others_are_told_that_the_medium_may_have_changed() {
    let mut first = removable();
    let mut second = first.another();
    first.run(&EJECT).good();
    assert_eq!(second.run(&[0; 6]).sense(), NOT_PRESENT);
    first.run(&LOAD).good();
    first.run(&[0; 6]).good();
    assert_eq!(second.run(&[0; 6]).sense(), (0x6, 0x2800));
    second.run(&[0; 6]).good();
    first.run(&LOAD).good();
    second.run(&[0; 6]).good();
}

#[test]
fn an_eject_whose_flush_fails_or_that_is_prevented_meanwhile_leaves_the_medium() {
    let mut first = removable();
    let mut second = first.another();
    first.fail(0, IoError::Flush);
    assert_eq!(first.run(&EJECT).sense(), (0x4, 0x0300));
    assert!(!first.shared.is_ejected());
    first.run(&[0; 6]).good();

    first.state.borrow_mut().mode = Mode::Later;
    let nothing = Buffer::new(&[], 512);
    let mut task = Task::new(9);
    task.prepare(&pad(&EJECT), nothing.sg(), nothing.sg());
    assert_eq!(first.lun.start(&mut task), Outcome::Pending);
    second.run(&PREVENT).good();
    let mut done = Vec::with_capacity(1);
    assert_eq!(first.lun.poll(&mut done), 1);
    let outcome = first.lun.resume(&mut task, done[0].result);
    let Outcome::Done(response) = outcome else { panic!("{outcome:?}") };
    assert_eq!((response.sense[2], response.sense[12], response.sense[13]), (5, 0x53, 2));
    assert!(!first.shared.is_ejected());
    second.input(&cdb10(0x28, 0, 0, 1), 512).good();
}

#[test]
fn an_eject_that_finds_the_medium_out_leaves_it_so_though_that_is_prevented_by_now() {
    let mut first = removable();
    let mut second = first.another();
    first.state.borrow_mut().mode = Mode::Later;
    let nothing = Buffer::new(&[], 512);
    let mut task = Task::new(9);
    task.prepare(&pad(&EJECT), nothing.sg(), nothing.sg());
    assert_eq!(first.lun.start(&mut task), Outcome::Pending);
    first.state.borrow_mut().mode = Mode::AtOnce;
    second.run(&EJECT).good();
    second.run(&PREVENT).good();
    let mut done = Vec::with_capacity(1);
    assert_eq!(first.lun.poll(&mut done), 1);
    let outcome = first.lun.resume(&mut task, done[0].result);
    let Outcome::Done(response) = outcome else { panic!("{outcome:?}") };
    assert_eq!(response.status, Status::Good);
    assert!(first.shared.is_ejected());
    // Nobody has it in again without being told.
    second.run(&LOAD).good();
    assert_eq!(first.run(&[0; 6]).sense(), (0x6, 0x2800));
}

#[test]
fn a_medium_is_in_again_for_another_session() {
    let mut rig = removable();
    rig.run(&EJECT).good();
    let shared = rig.shared.clone();
    drop(rig);
    assert!(!shared.is_ejected());
    let nexus = shared.connect();
    assert!(!shared.is_ejected());
    drop(nexus);
}

#[test]
fn a_unit_that_takes_the_place_of_another_has_its_medium_out_as_well() {
    let mut rig = removable();
    rig.run(&EJECT).good();
    let other = LunShared::new(rig.disk.clone(), rig.shared.options()).unwrap();
    other.replace(&rig.shared);
    let nexus = other.connect();
    other.follow_medium(&rig.shared);
    assert!(other.is_ejected());
    other.load_medium(Some(&nexus));
    assert!(!other.is_ejected());
    // It is in by then where that was loaded meanwhile.
    rig.run(&LOAD).good();
    other.follow_medium(&rig.shared);
    assert!(!other.is_ejected());
}

#[test]
fn sbc3_4_11_each_nexus_prevents_for_itself_until_it_is_lost() {
    let mut first = removable();
    let mut second = first.another();
    first.run(&PREVENT).good();
    second.run(&PREVENT).good();
    first.run(&ALLOW).good();
    assert!(first.shared.removal_prevented());
    assert_eq!(first.run(&EJECT).sense(), PREVENTED);
    let shared = first.shared.clone();
    drop(second);
    assert!(!shared.removal_prevented());
    first.run(&EJECT).good();
}

#[test]
fn sbc3_4_11_a_reset_ends_it_for_all() {
    let mut rig = removable();
    let mut other = rig.another();
    rig.run(&PREVENT).good();
    other.run(&PREVENT).good();
    rig.shared.reset();
    assert!(!rig.shared.removal_prevented());
    // And it counts from zero again.
    rig.run(&PREVENT).good();
    rig.run(&ALLOW).good();
    assert!(!rig.shared.removal_prevented());
}

#[test]
fn a_unit_goes_unless_it_is_prevented_and_then_nobody_prevents_it() {
    let mut first = removable();
    let mut second = first.another();
    first.run(&PREVENT).good();
    first.run(&PREVENT).good();
    second.run(&PREVENT).good();
    assert!(!first.shared.leave_unless_prevented());
    first.run(&ALLOW).good();
    assert!(!first.shared.leave_unless_prevented());
    second.run(&ALLOW).good();
    for _ in 0..2 {
        assert!(first.shared.leave_unless_prevented());
        for rig in [&mut first, &mut second] {
            assert_eq!(rig.run(&PREVENT).sense(), (5, 0x2500));
            assert!(!rig.shared.removal_prevented());
            rig.run(&ALLOW).good();
        }
        first.shared.reset();
    }
    first.input(&cdb10(0x28, 0, 0, 1), 512).good();
}

#[test]
fn a_nexus_reset_is_of_that_nexus_alone() {
    let mut rig = removable();
    let nexus = rig.shared.connect();
    rig.run(&PREVENT).good();
    rig.shared.reset_nexus(&nexus);
    assert!(rig.shared.removal_prevented());
    drop(nexus);
    assert!(rig.shared.removal_prevented());
}

/// Linux takes one as a changed medium and fails the command that met it.
#[test]
fn no_attention_meets_a_removable_unit() {
    let mut rig = removable();
    rig.run(&[0; 6]).good(); // no POWER ON
    rig.shared.reset();
    rig.run(&[0; 6]).good();
    rig.disk.num_blocks.store(2 * BLOCKS, Ordering::Relaxed);
    rig.shared.notify_resized();
    rig.shared.post(UnitAttention::InquiryChanged);
    rig.run(&[0; 6]).good();
    assert_eq!(rig.input(&cdb10(0x25, 0, 0, 0), 8).good()[..4], [0, 0, 0x1F, 0xFF]);
}

#[test]
fn a_fixed_medium_has_nothing_to_prevent_and_no_eject() {
    let mut rig = Rig::new();
    rig.run(&PREVENT).good();
    assert!(!rig.shared.removal_prevented());
    rig.run(&EJECT).invalid_cdb(4, Some(1));
    rig.run(&ALLOW).good();
    assert_eq!(rig.asked(), []);
    // REPORT SUPPORTED OPERATION CODES shows LOEJ where it means something.
    let usage = |rig: &mut Rig| rig.input(&cdb12(0xA3, 0x0C, 0x011B_0000, 64), 64).good()[8];
    assert_eq!((usage(&mut rig), usage(&mut removable())), (0x05, 0x07));
}

#[test]
fn the_first_read_capacity_of_a_session_is_when_it_was_seen() {
    let mut rig = removable();
    rig.input(&[0x12, 0, 0, 0, 36, 0], 36).good();
    assert_eq!(rig.shared.seen_at(), None);
    rig.input(&cdb10(0x25, 0, 0, 0), 8).good();
    let seen = rig.shared.seen_at().unwrap();
    rig.input(&cdb16(0x9E, 0x10, 0, 32), 32).good();
    assert_eq!(rig.shared.seen_at(), Some(seen));
    let shared = rig.shared.clone();
    drop(rig);
    assert_eq!(shared.seen_at(), None);
}
