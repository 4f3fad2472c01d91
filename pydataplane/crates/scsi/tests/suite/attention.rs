//! Unit attentions (SAM-5 5.14).

use crate::rig::*;
use scsi::{LunOptions, UnitAttention};
use std::sync::atomic::Ordering;

const POWER_ON: (u8, u16) = (0x6, 0x2900);
const LUNS: (u8, u16) = (0x6, 0x3F0E);
const CAPACITY: (u8, u16) = (0x6, 0x2A09);
const INQUIRY: (u8, u16) = (0x6, 0x3F03);
const TEST_UNIT_READY: [u8; 6] = [0; 6];

#[test]
fn sam5_5_14_the_first_command_of_a_session_learns_of_power_on_once() {
    for cdb in [&TEST_UNIT_READY[..], &cdb10(0x28, 0, 0, 1), &cdb10(0x25, 0, 0, 0), &[0xFF]] {
        let mut rig = Setup::default().fresh();
        assert_eq!(rig.input(cdb, 512).sense(), POWER_ON);
        rig.run(&TEST_UNIT_READY).good();
    }
}

#[test]
fn sam5_5_14_1_inquiry_and_report_luns_neither_report_nor_clear_it() {
    let mut rig = Setup::default().fresh();
    rig.input(&[0x12, 0, 0, 0, 36, 0], 36).good();
    rig.input(&cdb12(0xA0, 0, 0, 16), 16).good();
    // Nor when they fail.
    rig.input(&[0x12, 1, 0x77, 0, 36, 0], 36).invalid_cdb(2, None);
    assert_eq!(rig.run(&TEST_UNIT_READY).sense(), POWER_ON);
}

#[test]
fn spc4_6_39_request_sense_reports_it_as_data_and_clears_it() {
    let mut rig = Setup::default().fresh();
    rig.shared.post(UnitAttention::CapacityChanged);
    assert_eq!(key_code(rig.input(&[3, 0, 0, 0, 18, 0], 18).good()), POWER_ON);
    assert_eq!(rig.input(&[3, 1, 0, 0, 18, 0], 18).good()[..4], [0x72, 6, 0x2A, 9]);
    assert_eq!(key_code(rig.input(&[3, 0, 0, 0, 18, 0], 18).good()), (0, 0));
    rig.run(&TEST_UNIT_READY).good();
}

#[test]
fn they_come_one_at_a_time_by_precedence() {
    let mut rig = Setup::default().fresh();
    rig.shared.post(UnitAttention::InquiryChanged);
    rig.shared.post(UnitAttention::CapacityChanged);
    rig.shared.post(UnitAttention::CapacityChanged);
    rig.shared.post(UnitAttention::LunsChanged);
    for expected in [POWER_ON, LUNS, CAPACITY, INQUIRY] {
        assert_eq!(rig.run(&TEST_UNIT_READY).sense(), expected);
    }
    rig.run(&TEST_UNIT_READY).good();
}

#[test]
fn spc4_6_33_report_luns_clears_the_change_that_it_shows() {
    let mut rig = Rig::new();
    rig.shared.post(UnitAttention::LunsChanged);
    rig.input(&cdb12(0xA0, 0, 0, 16), 16).good();
    rig.run(&TEST_UNIT_READY).good();
}

#[test]
fn sbc3_4_10_a_resize_is_announced_once_and_then_seen() {
    let mut rig = Rig::new();
    rig.disk.num_blocks.store(2 * BLOCKS, Ordering::Relaxed);
    rig.state.borrow_mut().medium.resize(2 * BLOCKS as usize * 512, 0);
    // Not before it is announced.
    assert_eq!(rig.input(&cdb10(0x28, 0, BLOCKS as u32, 1), 512).sense(), OUT_OF_RANGE);
    rig.shared.notify_resized();
    rig.shared.notify_resized();
    assert_eq!(rig.run(&TEST_UNIT_READY).sense(), CAPACITY);
    rig.run(&TEST_UNIT_READY).good();
    assert_eq!(rig.input(&cdb10(0x25, 0, 0, 0), 8).good()[..4], [0, 0, 0x1F, 0xFF]);
    rig.input(&cdb10(0x28, 0, BLOCKS as u32, 1), 512).good();
    // A notification without a change is none.
    rig.shared.notify_resized();
    rig.run(&TEST_UNIT_READY).good();
}

#[test]
fn each_session_has_its_own() {
    let mut rig = Rig::new();
    let other = rig.shared.connect();
    rig.run(&TEST_UNIT_READY).good();
    rig.shared.post(UnitAttention::CapacityChanged);
    assert_eq!(rig.run(&TEST_UNIT_READY).sense(), CAPACITY);
    let mut second = Setup { options: LunOptions::default(), ..Setup::default() }.fresh();
    // A session that ended is forgotten, not told.
    drop(other);
    rig.shared.post(UnitAttention::InquiryChanged);
    assert_eq!(rig.run(&TEST_UNIT_READY).sense(), INQUIRY);
    assert_eq!(second.run(&TEST_UNIT_READY).sense(), POWER_ON);
}

#[test]
fn an_attention_comes_before_anything_is_done() {
    let mut rig = Setup::default().fresh();
    rig.scribble();
    let before = rig.medium();
    assert_eq!(rig.output(&cdb10(0x2A, 0, 0, 1), &[0; 512]).sense(), POWER_ON);
    assert_eq!(rig.asked(), []);
    assert_eq!(rig.medium(), before);
}
