//! A removable medium: RMB, PREVENT ALLOW MEDIUM REMOVAL, eject (SBC-3 4.11, 5.10, 5.25).

use crate::rig::*;
use bdev::Op;
use scsi::{LunOptions, UnitAttention};
use std::sync::atomic::Ordering;

const PREVENT: [u8; 6] = [0x1E, 0, 0, 0, 1, 0];
const ALLOW: [u8; 6] = [0x1E, 0, 0, 0, 0, 0];
const EJECT: [u8; 6] = [0x1B, 0, 0, 0, 0x02, 0];
const LOAD: [u8; 6] = [0x1B, 0, 0, 0, 0x03, 0];
const FLUSHED: Asked = (Op::Flush, 0, 0, false);
/// ILLEGAL REQUEST, MEDIUM REMOVAL PREVENTED.
const PREVENTED: (u8, u16) = (0x5, 0x5302);

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
    // The medium is still there: who owns the unit takes it away.
    rig.input(&cdb10(0x28, 0, 0, 1), 512).good();
    rig.run(&[0x1E, 0, 0, 0, 2, 0]).invalid_cdb(4, Some(1)); // obsolete
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
