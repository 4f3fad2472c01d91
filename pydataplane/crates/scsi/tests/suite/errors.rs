//! What the initiator sees when the disk fails.

use crate::rig::*;
use bdev::{Features, IoError, Op};
use scsi::{Outcome, Plain, Response, Status, Task};

/// Each error with its sense key and code. The match is exhaustive: a new error fails to compile
/// here until someone decides what a guest is to see.
fn expected(error: IoError) -> (u8, u16) {
    match error {
        IoError::OutOfRange => (0x5, 0x2100),
        IoError::BadLength => (0x4, 0x4400),
        IoError::ReadOnly => (0x7, 0x2700),
        IoError::NoSpace => (0x7, 0x2707),
        IoError::ReadMedium => (0x3, 0x1100),
        IoError::WriteMedium => (0x3, 0x0C00),
        IoError::Flush => (0x4, 0x0300),
        IoError::Unsupported => (0x5, 0x2000),
        IoError::Removed => (0x5, 0x2500),
        IoError::Aborted => (0xB, 0x0006),
        IoError::Resources => (0xB, 0x5503),
        IoError::Guard => (0xB, 0x1001),
        IoError::AppTag => (0xB, 0x1002),
        IoError::RefTag => (0xB, 0x1003),
        IoError::Miscompare => (0xE, 0x1D00),
        IoError::Reserved => unreachable!("it is a status without sense"),
    }
}

/// Commands with data, and how many I/Os each takes on a disk without FUA.
fn commands() -> Vec<(Vec<u8>, usize, usize, usize)> {
    let unmap = cdb10(0x42, 0, 0, 40).to_vec();
    vec![
        // CDB, bytes out, bytes in, I/Os
        (cdb10(0x28, 0, 0, 4).to_vec(), 0, 2048, 1),
        (cdb10(0x28, 0x08, 0, 4).to_vec(), 0, 2048, 2),
        (cdb10(0x28, 0, 0, 256).to_vec(), 0, (256 * 512) + 9, 2),
        (cdb10(0x2A, 0, 0, 4).to_vec(), 2048, 0, 1),
        (cdb10(0x2A, 0x08, 0, 4).to_vec(), 2048, 0, 2),
        (cdb10(0x2A, 0x08, 0, 256).to_vec(), (256 * 512) + 9, 0, 3),
        (cdb10(0x35, 0, 0, 0).to_vec(), 0, 0, 1),
        (vec![0x1B, 0, 0, 0, 0, 0], 0, 0, 1),
        (cdb10(0x2F, 0, 0, 256).to_vec(), 0, 0, 2),
        (cdb10(0x2F, 2, 0, 4).to_vec(), 2048, 0, 1),
        (cdb10(0x41, 0, 0, 256).to_vec(), 512, 0, 1),
        (cdb10(0x41, 0x08, 0, 256).to_vec(), 512, 0, 1),
        (cdb16(0x93, 0x01, 0, 256).to_vec(), 0, 0, 1),
        (unmap, 40, 0, 2),
    ]
}

/// Zeros, which is also an UNMAP list of two descriptors where that is asked for.
fn data_for(cdb: &[u8], len: usize) -> Vec<u8> {
    let mut data = vec![0; len];
    if cdb[0] == 0x42 {
        (data[1], data[3]) = (38, 32);
        (data[8 + 11], data[24 + 11]) = (1, 1);
    }
    data
}

#[test]
fn no_error_of_the_disk_becomes_good_whichever_io_it_hits() {
    let features = Features { fua: false, ..ALL_FEATURES };
    for mode in [Mode::AtOnce, Mode::Later] {
        for (cdb, out, into, ios) in commands() {
            let mut rig = Setup { features, mode, ..Setup::default() }.build();
            let data = data_for(&cdb, out);
            rig.io(&cdb, &data, into).good();
            assert_eq!(rig.asked().len(), ios, "{cdb:x?}");
            for nth in 0..ios {
                for error in IoError::ALL {
                    rig.fail(nth, error);
                    let answer = rig.io(&cdb, &data, into);
                    let what = format!("{error:?} of I/O {nth} of {cdb:x?}");
                    match error {
                        IoError::Reserved => {
                            let response = answer.response();
                            let told = (response.status, response.sense_len);
                            assert_eq!(told, (Status::ReservationConflict, 0), "{what}");
                        }
                        error => assert_eq!(answer.sense(), expected(error), "{what}"),
                    }
                    assert_eq!(rig.asked().len(), nth + 1, "went on after an error");
                    // The unit is as good as before.
                    rig.io(&cdb, &data, into).good();
                    rig.asked();
                }
            }
        }
    }
}

#[test]
fn a_failed_flush_after_a_fua_write_is_not_a_write() {
    let features = Features { fua: false, ..ALL_FEATURES };
    let mut rig = Setup { features, ..Setup::default() }.build();
    rig.fail(1, IoError::Flush);
    let answer = rig.output(&cdb10(0x2A, 0x08, 0, 1), &[1; 512]);
    assert_eq!(answer.sense(), (0x4, 0x0300));
    assert_eq!(rig.asked(), [(Op::Write, 0, 1, false), (Op::Flush, 0, 0, false)]);
}

const FULL: Response =
    Response { status: Status::TaskSetFull, transferred: 0, sense_len: 0, sense: [0; 20] };

#[test]
fn sam5_5_3_1_a_full_channel_is_task_set_full() {
    for (cdb, out, into, _) in commands() {
        let mut rig = Rig::new();
        let data = data_for(&cdb, out);
        rig.state.borrow_mut().mode = Mode::Full;
        assert_eq!(rig.io(&cdb, &data, into).response(), FULL, "{cdb:x?}");
        rig.state.borrow_mut().mode = Mode::AtOnce;
        rig.io(&cdb, &data, into).good();
    }
}

/// What a full channel makes of a task without a CDB.
const PUT_OFF: Outcome = Outcome::Done(FULL);

/// The disk takes one I/O more of the task, which ends.
fn one_step(rig: &mut Rig, task: &mut Task) -> Outcome {
    rig.state.borrow_mut().mode = Mode::Later;
    assert_eq!(rig.lun.start(task), Outcome::Pending);
    rig.state.borrow_mut().mode = Mode::Full;
    let mut done = Vec::with_capacity(4);
    assert_eq!(rig.lun.poll(&mut done), 1);
    rig.lun.resume(task, done[0].result)
}

#[test]
fn what_a_full_channel_put_off_in_the_midst_goes_on_there_without_a_cdb() {
    let features = Features { fua: false, max_blocks: 1024, ..ALL_FEATURES };
    let range = |op| [0, 1024, 2048, 3072].map(|lba| (op, lba, 1024, false)).to_vec();
    for (op, blocks, steps) in [
        (Op::WriteZeroes, 4096, range(Op::WriteZeroes)),
        (Op::Unmap, 4096, range(Op::Unmap)),
        (Op::Write, 4, vec![(Op::Write, 0, 4, false)]),
    ] {
        let mut rig = Setup { features, ..Setup::default() }.build();
        rig.asked();
        let data = vec![7; if op == Op::Write { 2048 } else { 0 }];
        let (out, into) = (Buffer::new(&data, 700), Buffer::new(&[], 1));
        let mut task = Task::new(7);
        task.prepare_plain(Plain { op, durable: true, lba: 0, blocks }, out.sg(), into.sg());
        rig.state.borrow_mut().mode = Mode::Full;
        assert_eq!(rig.lun.start(&mut task), PUT_OFF);
        assert_eq!(rig.lun.start(&mut task), PUT_OFF, "as often as it is asked");
        for _ in &steps {
            assert_eq!(one_step(&mut rig, &mut task), PUT_OFF);
        }
        let good = Response { status: Status::Good, transferred: data.len() as u32, ..FULL };
        assert_eq!(one_step(&mut rig, &mut task), Outcome::Done(good), "{op:?}");
        let flush = (Op::Flush, 0, 0, false);
        assert_eq!(rig.asked(), [steps, vec![flush]].concat(), "{op:?}: each once");
        // The next of the same slot is done as a whole.
        rig.state.borrow_mut().mode = Mode::AtOnce;
        let whole = Plain { op: Op::Write, durable: false, lba: 8, blocks: 4 };
        let four = Buffer::new(&[9; 2048], 700);
        task.prepare_plain(whole, four.sg(), into.sg());
        let outcome = rig.lun.start(&mut task);
        assert!(matches!(outcome, Outcome::Done(Response { status: Status::Good, .. })));
        assert_eq!(rig.asked(), [(Op::Write, 8, 4, false)]);
    }
}

/// What was written without FUA is durable after a flush, and not by FUA of the disk that it goes on with.
#[test]
fn a_flush_that_was_put_off_is_done_by_another_disk_which_has_fua() {
    let features = Features { fua: false, ..ALL_FEATURES };
    for (op, lba, blocks) in [(Op::Write, 0, 4), (Op::Flush, 0, 0)] {
        let mut rig = Setup { features, ..Setup::default() }.build();
        let data = vec![7; 512 * blocks as usize];
        let (out, into) = (Buffer::new(&data, 700), Buffer::new(&[], 1));
        let mut task = Task::new(7);
        task.prepare_plain(
            Plain { op, durable: op == Op::Write, lba, blocks },
            out.sg(),
            into.sg(),
        );
        rig.state.borrow_mut().mode = Mode::Full;
        assert_eq!(rig.lun.start(&mut task), PUT_OFF);
        if op == Op::Write {
            assert_eq!(one_step(&mut rig, &mut task), PUT_OFF);
        }
        let mut after = Setup { uuid: rig.disk.uuid, ..Setup::default() }.build();
        after.shared.replace(&rig.shared);
        after.asked();
        let good = Response { status: Status::Good, transferred: data.len() as u32, ..FULL };
        assert_eq!(one_step(&mut after, &mut task), Outcome::Done(good), "{op:?}");
        assert_eq!(after.asked(), [(Op::Flush, 0, 0, false)], "{op:?}");
    }
}

/// A write that was put off before it began is one with FUA there, and nothing more.
#[test]
fn a_write_that_was_put_off_is_done_by_another_disk_with_the_fua_that_it_has() {
    for fua in [false, true] {
        let of = |fua| Features { fua, ..ALL_FEATURES };
        let mut rig = Setup { features: of(!fua), ..Setup::default() }.build();
        let (out, into) = (Buffer::new(&[7; 2048], 700), Buffer::new(&[], 1));
        let mut task = Task::new(7);
        let plain = Plain { op: Op::Write, durable: true, lba: 0, blocks: 4 };
        task.prepare_plain(plain, out.sg(), into.sg());
        rig.state.borrow_mut().mode = Mode::Full;
        assert_eq!(rig.lun.start(&mut task), PUT_OFF);
        let uuid = rig.disk.uuid;
        let mut after = Setup { uuid, features: of(fua), ..Setup::default() }.build();
        after.shared.replace(&rig.shared);
        after.asked();
        let outcome = after.lun.start(&mut task);
        assert!(matches!(outcome, Outcome::Done(Response { status: Status::Good, .. })));
        let flushes = (!fua).then_some((Op::Flush, 0, 0, false));
        let expected: Vec<_> = [(Op::Write, 0, 4, fua)].into_iter().chain(flushes).collect();
        assert_eq!(after.asked(), expected);
    }
}

#[test]
fn a_reset_ends_what_was_put_off_only_if_some_of_it_was_done() {
    let features = Features { max_blocks: 1024, ..ALL_FEATURES };
    let mut rig = Setup { features, ..Setup::default() }.build();
    let none = Buffer::new(&[], 1);
    let mut task = Task::new(7);
    let plain = Plain { op: Op::WriteZeroes, durable: false, lba: 0, blocks: 2048 };
    task.prepare_plain(plain, none.sg(), none.sg());
    rig.state.borrow_mut().mode = Mode::Full;
    assert_eq!(rig.lun.start(&mut task), PUT_OFF);
    rig.shared.reset();
    assert_eq!(one_step(&mut rig, &mut task), PUT_OFF);
    rig.shared.reset();
    rig.asked();
    rig.state.borrow_mut().mode = Mode::AtOnce;
    let outcome = rig.lun.start(&mut task);
    assert!(matches!(outcome, Outcome::Done(Response { status: Status::TaskAborted, .. })));
    assert_eq!(rig.asked(), [], "others may have written there since");
}
