//! FORMAT UNIT (SBC-3 4.9, 5.3), and the default self-test of SEND DIAGNOSTIC (SPC-4 6.42).

use crate::protect::{self, With, data, tuples};
use crate::rig::*;
use crate::sanitize::{
    BLOCKS, ERASE, EXIT, FORMAT_IN_PROGRESS as IN_PROGRESS, KEPT_NOT, LIST_FIELD, kept_unit,
    medium, settled, unit,
};
use crate::unit::Unit;
use bdev::testing::{Fault, FaultBdev};
use bdev::{Bdev, IoError, Op, ProtectionType, SyncChannel};
use scsi::{Characteristics, LunOptions, Outcome, Status, Task};
use std::sync::Arc;
use std::sync::atomic::Ordering;

const CORRUPTED: (u8, u16) = (0x3, 0x3100);
const FAILED: (u8, u16) = (0x3, 0x3101);
const LIST_LENGTH: (u8, u16) = (0x5, 0x1A00);
const LONGLIST: u8 = 0x20;
const FMTDATA: u8 = 0x10;
const CMPLST: u8 = 0x08;
const FOV: u8 = 0x80;
const IMMED: u8 = 0x02;

/// Without parameters.
const FORMAT: [u8; 6] = [0x04, 0, 0, 0, 0, 0];
/// With them.
const WITH: [u8; 6] = [0x04, FMTDATA, 0, 0, 0, 0];
const SELF_TEST: [u8; 6] = [0x1D, 0x04, 0, 0, 0, 0];

#[test]
fn after_it_all_reads_as_zeros() {
    for (cdb, list) in [
        (FORMAT, &[][..]),
        (WITH, &[0; 4][..]),
        ([0x04, FMTDATA | CMPLST, 0, 0, 0, 0], &[0, FOV | 0x70, 0, 0][..]),
        ([0x04, FMTDATA | LONGLIST, 0, 0, 0, 0], &[0; 8][..]),
        (WITH, &[0, IMMED, 0, 0][..]),
    ] {
        let (disk, keeper, mut unit) = unit();
        assert_ne!(medium(&disk)[..512], [0; 512]);
        let answer = unit.io(&cdb, list, 0);
        assert_eq!((answer.response().transferred, answer.good()), (list.len() as u32, &[][..]));
        assert_eq!(settled(&mut unit), None);
        assert!(medium(&disk) == vec![0; BLOCKS as usize * 512]);
        assert_eq!(*keeper.text.lock(), None);
        // What is written then stays, whoever comes.
        unit.io(&cdb10(0x2A, 0, 5, 1), &[7; 512], 0).good();
        drop(unit);
        let mut unit = kept_unit(&disk, &keeper, LunOptions::default());
        assert_eq!(unit.io(&cdb10(0x28, 0, 5, 1), &[], 512).good(), [7; 512]);
    }
}

#[test]
fn nothing_else_is_done_while_it_runs_and_the_next_process_does_not_go_on() {
    let (disk, keeper, mut unit) = unit();
    let mut other = kept_unit(&disk, &keeper, LunOptions::default());
    let held = keeper.gate.lock();
    let nothing = Buffer::new(&[], 1);
    let mut format = Task::new(8);
    format.prepare(&pad(&FORMAT), nothing.sg(), nothing.sg());
    assert_eq!(unit.lun.start(&mut format), Outcome::Pending);
    let refused: [&[u8]; 6] =
        [&[0; 6], &cdb10(0x28, 0, 0, 1), &cdb10(0x25, 0, 0, 0), &ERASE, &FORMAT, &SELF_TEST];
    for cdb in refused {
        let answer = other.io(cdb, &[], 512);
        assert_eq!(answer.sense(), IN_PROGRESS, "{cdb:x?}");
        assert_eq!(answer.response().sense[15..18], [0x80, 0, 0], "PROGRESS INDICATION");
    }
    assert_eq!(key_code(other.io(&[3, 0, 0, 0, 18, 0], &[], 18).good()), IN_PROGRESS);
    other.io(&[0x12, 0, 0, 0, 96, 0], &[], 96).good();
    drop(held);
    let ended = unit.until_over(&mut format, Outcome::Pending);
    assert!(matches!(ended, Outcome::Done(r) if r.status == Status::Good), "{ended:?}");
    assert_eq!(settled(&mut other), None);
    assert!(medium(&disk) == vec![0; BLOCKS as usize * 512]);

    unit.io(&cdb10(0x2A, 0, 5, 1), &[7; 512], 0).good();
    drop((unit, other));
    let text = r#"{"method": "format", "block_size": 512, "unrestricted": false, "failed": false}"#;
    *keeper.text.lock() = Some(text.to_owned());
    // What was restored since would be lost.
    let mut unit = kept_unit(&disk, &keeper, LunOptions::default());
    assert_eq!(unit.run(&[0; 6]).sense(), CORRUPTED);
    assert_eq!(medium(&disk)[5 * 512..6 * 512], [7; 512]);
    unit.run(&FORMAT).good();
    assert_eq!(settled(&mut unit), None);
    assert!(medium(&disk) == vec![0; BLOCKS as usize * 512]);
    assert_eq!(*keeper.text.lock(), None);
}

#[test]
fn one_that_failed_is_told_until_another_one_or_a_sanitize_is_done() {
    let (disk, keeper, mut unit) = unit();
    for helps in [&FORMAT[..], &ERASE] {
        keeper.fails_to_forget.store(true, Ordering::Relaxed);
        assert_eq!(unit.run(&FORMAT).sense(), FAILED);
        assert_eq!(unit.io(&cdb10(0x28, 0, 0, 1), &[], 512).sense(), CORRUPTED);
        assert_eq!(key_code(unit.io(&[3, 0, 0, 0, 18, 0], &[], 18).good()), CORRUPTED);
        unit.io(&cdb10(0x25, 0, 0, 0), &[], 8).good();
        // So it is after a restart; EXIT FAILURE MODE is of SANITIZE.
        drop(unit);
        unit = kept_unit(&disk, &keeper, LunOptions::default());
        assert_eq!(unit.run(&EXIT).sense(), CORRUPTED);
        keeper.fails_to_forget.store(false, Ordering::Relaxed);
        unit.run(helps).good();
        assert_eq!(settled(&mut unit), None);
        unit.io(&cdb10(0x28, 0, 0, 1), &[], 512).good();
    }
    // In turn it does not mend a SANITIZE.
    keeper.fails_to_forget.store(true, Ordering::Relaxed);
    assert_eq!(unit.run(&ERASE).sense(), (0x3, 0x3103));
    keeper.fails_to_forget.store(false, Ordering::Relaxed);
    assert_eq!(unit.run(&FORMAT).sense(), (0x3, 0x3103));
    unit.run(&ERASE).good();
    assert_eq!(settled(&mut unit), None);
}

#[test]
fn what_is_refused_changes_nothing() {
    let (disk, keeper, mut unit) = unit();
    for (flags, bit) in [(0x40, 7), (0x80, 7), (0xC0, 7), (LONGLIST, 5), (CMPLST, 3)] {
        unit.run(&[0x04, flags, 0, 0, 0, 0]).invalid_cdb(1, Some(bit));
    }
    unit.io(&[0x04, FMTDATA | 5, 0, 0, 0, 0], &[0; 4], 0).invalid_cdb(1, Some(2));
    for (at, value) in [
        (0, 1),          // PROTECTION FIELD USAGE
        (1, 0x70),       // DPRY, DCRT and STPF without FOV
        (1, FOV | 0x08), // IP
        (1, 0x04),
        (1, 0x01),
        (2, 1), // a list of defects
        (3, 8),
    ] {
        let mut list = [0; 4];
        list[at] = value;
        assert_eq!(unit.io(&WITH, &list, 0).sense(), LIST_FIELD, "byte {at}: {value:#x}");
    }
    let long = [0x04, FMTDATA | LONGLIST, 0, 0, 0, 0];
    for at in 2..8 {
        let mut list = [0; 8];
        list[at] = 1;
        let answer = unit.io(&long, &list, 0);
        assert_eq!(answer.sense(), LIST_FIELD);
        assert_eq!(answer.response().sense[15..18], [0x80, 0, at as u8]);
    }
    assert_eq!(unit.io(&WITH, &[0; 3], 0).sense(), LIST_LENGTH);
    assert_eq!(unit.io(&long, &[0; 7], 0).sense(), LIST_LENGTH);
    keeper.fails_to_keep.store(true, Ordering::Relaxed);
    assert_eq!(unit.run(&FORMAT).sense(), KEPT_NOT);
    assert_eq!(settled(&mut unit), None);
    assert_eq!(medium(&disk)[..512], [0xA5; 512]);
    let read_only = LunOptions { read_only: true, ..LunOptions::default() };
    let mut unit = Unit::new(&disk, read_only);
    assert_eq!(unit.run(&FORMAT).sense(), WRITE_PROTECTED);
}

#[test]
fn protection_stays_and_nothing_checks_what_nobody_wrote() {
    for (kind, flags, usage) in [(ProtectionType::Type1, 0x80, 0), (ProtectionType::Type3, 0xC0, 1)]
    {
        let mut unit = protect::Unit::new(kind);
        let written = data(8, 3);
        let write = cdb10(0x2A, 0x20, 8, 8);
        let with = With::Out(&tuples(kind, 8, &written));
        unit.carry(&write, &written, 0, with).0.good();
        let format = [0x04, flags | FMTDATA, 0, 0, 0, 0];
        for (flags, usage) in [(FMTDATA, 0), (0x40 | FMTDATA, 0)] {
            let other = [0x04, flags, 0, 0, 0, 0];
            unit.run(&other, &[usage, 0, 0, 0], 0).invalid_cdb(1, Some(7));
        }
        assert_eq!(unit.run(&format, &[usage ^ 1, 0, 0, 0], 0).sense(), LIST_FIELD);
        unit.run(&format, &[usage, 0, 0, 0], 0).good();
        let read = unit.carry(&cdb10(0x28, 0x20, 8, 8), &[], written.len(), With::In(64));
        assert_eq!(read.0.good(), vec![0; written.len()]);
        assert_eq!(read.1, [0xFF; 64]);
        // Type 1 can be named without parameters, type 3 cannot.
        let bare = unit.run(&[0x04, flags, 0, 0, 0, 0], &[], 0);
        match kind {
            ProtectionType::Type1 => assert!(bare.good().is_empty()),
            ProtectionType::Type3 => bare.invalid_cdb(1, Some(7)),
        }
    }
}

#[test]
fn spc4_6_42_the_self_test_reads_a_block() {
    let (_, _, mut unit) = unit();
    for flags in [0x04, 0x14, 0x07, 0, 0x10] {
        unit.run(&[0x1D, flags, 0, 0, 0, 0]).good();
    }
    // Background and foreground tests, and pages, are not there.
    unit.run(&[0x1D, 0x20, 0, 0, 0, 0]).invalid_cdb(1, Some(5));
    unit.io(&[0x1D, 0x10, 0, 0, 4, 0], &[0; 4], 0).invalid_cdb(4, Some(2));
    let mut rig = Rig::new();
    rig.run(&[0x1D, 0, 0, 0, 0, 0]).good();
    assert_eq!(rig.asked(), []);
    rig.run(&SELF_TEST).good();
    assert_eq!(rig.asked(), [(Op::Read, 0, 1, false)]);
    rig.fail(0, IoError::ReadMedium);
    assert_eq!(rig.run(&SELF_TEST).sense(), (0x3, 0x1100));
}

/// An UNMAP and a flush; not of a disk that is to keep its room.
#[test]
fn blocks_are_given_back_where_the_unit_has_unmap() {
    for no_unmap in [false, true] {
        let disk = FaultBdev::with_image("f", 512, vec![0xA5; 64 * 512]);
        let characteristics = Characteristics { no_unmap, ..Characteristics::default() };
        let options = LunOptions { characteristics, ..LunOptions::default() };
        let mut unit = Unit::new(&(disk.clone() as Arc<dyn Bdev>), options);
        disk.inject(Fault::always(Op::Unmap, IoError::WriteMedium));
        let answer = unit.run(&FORMAT);
        match no_unmap {
            false => assert_eq!(answer.sense(), FAILED),
            true => assert!(answer.good().is_empty()),
        }
        disk.clear_faults();
        let before = disk.changes();
        unit.run(&FORMAT).good();
        assert_eq!(disk.changes() - before, 2);
        let mut data = vec![1; 64 * 512];
        SyncChannel::open(&*disk).unwrap().read(0, &mut data).unwrap();
        assert!(data == vec![0; 64 * 512]);
    }
}
