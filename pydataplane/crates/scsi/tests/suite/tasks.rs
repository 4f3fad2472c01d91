//! Several tasks at once: resets, aborts, the shared buffer, turns.

use crate::rig::*;
use bdev::{COPY_AT_ONCE, Completion, IoError, Op};
use scsi::{ErrorPolicy, LunOptions, Outcome, Response, Status, Task, WaitFor};

fn bare(status: Status) -> Outcome {
    Outcome::Done(Response { status, transferred: 0, sense_len: 0, sense: [0; 20] })
}

/// A task that stays in flight, with its buffers.
struct InFlight {
    task: Task,
    out: Buffer,
    _into: Buffer,
}

fn start(rig: &mut Rig, tag: u64, cdb: &[u8], out: &[u8], into: usize) -> (InFlight, Outcome) {
    let (out, into) = (Buffer::new(out, 4096), Buffer::new(&vec![0; into], 4096));
    let mut task = Task::new(tag);
    task.prepare(&pad(cdb), out.sg(), into.sg());
    let outcome = rig.lun.start(&mut task);
    assert_eq!(task.tag(), tag);
    (InFlight { task, out, _into: into }, outcome)
}

fn poll(rig: &mut Rig) -> Vec<Completion> {
    let mut done = Vec::with_capacity(16);
    let count = rig.lun.poll(&mut done);
    assert_eq!(count as usize, done.len());
    done
}

fn later() -> Rig {
    Setup { mode: Mode::Later, ..Setup::default() }.build()
}

#[test]
fn sam5_7_7_after_a_reset_tasks_in_flight_end_as_aborted_and_new_ones_see_the_attention() {
    let mut rig = later();
    let (mut a, outcome) = start(&mut rig, 1, &cdb10(0x28, 0, 0, 1), &[], 512);
    assert_eq!(outcome, Outcome::Pending);
    let (mut b, outcome) = start(&mut rig, 2, &cdb10(0x2A, 0x08, 0, 1), &[0; 600], 0);
    assert_eq!(outcome, Outcome::Pending);
    rig.fail(0, IoError::WriteMedium);
    let (mut c, outcome) = start(&mut rig, 3, &cdb10(0x2A, 0, 0, 1), &[0; 512], 0);
    assert_eq!(outcome, Outcome::Pending);
    rig.asked();

    rig.shared.reset();
    // Good or bad, late is aborted; no further step starts.
    let done = poll(&mut rig);
    assert_eq!(done.iter().map(|c| c.tag).collect::<Vec<_>>(), [1, 2, 3]);
    for (task, completion) in [&mut a, &mut b, &mut c].into_iter().zip(done) {
        let outcome = rig.lun.resume(&mut task.task, completion.result);
        assert_eq!(outcome, bare(Status::TaskAborted));
    }
    assert_eq!(rig.asked(), []);
    assert_eq!(rig.run(&[0; 6]).sense(), (0x6, 0x2900));
    // The bounce buffer of the second one is free again.
    rig.input(&cdb10(0x28, 0, 0, 1), 600).good();
}

#[test]
fn sam5_7_7_a_reset_is_of_all_that_show_the_volume() {
    let options = LunOptions { removable: true, ..LunOptions::default() };
    let mut a = Setup { options, mode: Mode::Later, ..Setup::default() }.fresh();
    let mut b = a.another_unit(LunOptions::default());
    let mut c = a.another_unit(LunOptions::default());
    let mut other = later();
    a.run(&[0x1E, 0, 0, 0, 1, 0]).good();
    assert!(a.shared.removal_prevented());
    // WCE is 0, and not saved.
    let no_cache = [&[0; 4][..], &[8, 18, 0], &[0; 17]].concat();
    b.output(&[0x15, 0x10, 0, 0, no_cache.len() as u8, 0], &no_cache).good();
    assert_eq!(c.run(&[0; 6]).sense(), (0x6, 0x2A01));
    let write = cdb10(0x2A, 0, 0, 1);
    let (mut of_c, outcome) = start(&mut c, 1, &write, &[1; 512], 0);
    assert_eq!(outcome, Outcome::Pending);
    let (mut of_other, outcome) = start(&mut other, 1, &write, &[1; 512], 0);
    assert_eq!(outcome, Outcome::Pending);

    b.shared.reset();
    let done = poll(&mut c);
    assert_eq!(c.lun.resume(&mut of_c.task, done[0].result), bare(Status::TaskAborted));
    for told in [&mut b, &mut c] {
        assert_eq!(told.run(&[0; 6]).sense(), (0x6, 0x2900));
    }
    assert_eq!(c.input(&[0x1A, 8, 8, 0, 255, 0], 255).good()[6], 4);
    // A removable unit has no attentions; the rest is reset.
    a.run(&[0; 6]).good();
    assert!(!a.shared.removal_prevented());
    // Another volume's goes on.
    let done = poll(&mut other);
    let outcome = other.lun.resume(&mut of_other.task, done[0].result);
    assert!(matches!(outcome, Outcome::Done(r) if r.status == Status::Good));
    other.run(&[0; 6]).good();
}

#[test]
fn sam5_7_7_a_reset_ends_tasks_that_wait_because_their_io_failed() {
    let error_policy = ErrorPolicy { write: WaitFor::Room, read: WaitFor::Nothing };
    let options = LunOptions { error_policy, ..LunOptions::default() };
    let mut rig = Setup { options, ..Setup::default() }.build();
    let write = cdb10(0x2A, 0, 0, 1);
    rig.fail(0, IoError::NoSpace);
    let (mut old, outcome) = start(&mut rig, 1, &write, &[1; 512], 0);
    assert_eq!(outcome, Outcome::Suspended(IoError::NoSpace));
    // By whichever session; what is written afterwards is newer.
    rig.shared.reset();
    assert_eq!(rig.run(&[0; 6]).sense(), (0x6, 0x2900));
    let (_, outcome) = start(&mut rig, 2, &write, &[2; 512], 0);
    assert!(matches!(outcome, Outcome::Done(r) if r.status == Status::Good));
    assert_eq!(rig.lun.start(&mut old.task), bare(Status::TaskAborted));
    assert_eq!(rig.medium()[..512], [2; 512]);
    // The slot's next command is another one.
    old.task.prepare(&pad(&write), old.out.sg(), guestmem::Sg::EMPTY);
    assert!(matches!(rig.lun.start(&mut old.task), Outcome::Done(r) if r.status == Status::Good));
    // Without a reset it begins again.
    rig.fail(0, IoError::NoSpace);
    let (mut again, outcome) = start(&mut rig, 1, &write, &[3; 512], 0);
    assert_eq!(outcome, Outcome::Suspended(IoError::NoSpace));
    assert!(matches!(rig.lun.start(&mut again.task), Outcome::Done(r) if r.status == Status::Good));
    assert_eq!(rig.medium()[..512], [3; 512]);
}

#[test]
fn sam5_7_7_a_reset_ends_what_was_received_before_and_has_not_begun() {
    let mut rig = Rig::new();
    let write = cdb10(0x2A, 0, 0, 1);
    let out = Buffer::new(&[1; 512], 4096);
    let mut task = Task::new(1);
    let received = |task: &mut Task, rig: &Rig| {
        task.prepare(&pad(&write), out.sg(), guestmem::Sg::EMPTY);
        task.wait(&rig.shared);
        assert!(!task.is_reset(&rig.shared));
    };
    received(&mut task, &rig);
    rig.shared.reset();
    assert!(task.is_reset(&rig.shared));
    // Before the unit attention, which is for what comes after it.
    assert_eq!(rig.lun.start(&mut task), bare(Status::TaskAborted));
    assert_eq!(rig.asked(), []);
    assert_eq!(rig.run(&[0; 6]).sense(), (0x6, 0x2900));
    received(&mut task, &rig);
    assert!(matches!(rig.lun.start(&mut task), Outcome::Done(r) if r.status == Status::Good));
    assert_eq!(rig.medium()[..512], [1; 512]);
    // What does not wait begins after it.
    task.prepare(&pad(&[0; 6]), guestmem::Sg::EMPTY, guestmem::Sg::EMPTY);
    rig.shared.reset();
    let outcome = rig.lun.start(&mut task);
    assert!(matches!(outcome, Outcome::Done(r) if r.status == Status::CheckCondition));
}

#[test]
fn sam5_7_2_an_aborted_task_takes_no_further_step_and_the_slot_can_be_used_again() {
    let mut rig = later();
    let (mut a, _) = start(&mut rig, 1, &cdb10(0x28, 0x08, 0, 1), &[], 512);
    a.task.abort();
    let done = poll(&mut rig);
    assert_eq!(rig.lun.resume(&mut a.task, done[0].result), bare(Status::TaskAborted));
    assert_eq!(rig.asked(), [(Op::Flush, 0, 0, false)]);
    a.task.prepare(&pad(&[0; 6]), guestmem::Sg::EMPTY, guestmem::Sg::EMPTY);
    let again = rig.lun.start(&mut a.task);
    assert!(matches!(again, Outcome::Done(r) if r.status == Status::Good));
}

#[test]
fn the_bounce_buffer_has_one_owner_and_others_are_busy() {
    let mut rig = later();
    let (mut a, outcome) = start(&mut rig, 1, &cdb16(0x93, 0, 0, 300), &[5; 512], 0);
    assert_eq!(outcome, Outcome::Pending);
    for (cdb, out, into) in [
        (cdb10(0x28, 0, 0, 1), 0, 513),
        (cdb10(0x2A, 0, 0, 1), 513, 0),
        (cdb10(0x2F, 0, 0, 1), 0, 0),
        (cdb10(0x41, 0, 0, 1), 512, 0),
    ] {
        let (_, outcome) = start(&mut rig, 2, &cdb, &vec![1; out], into);
        assert_eq!(outcome, bare(Status::Busy), "{cdb:x?}");
    }
    // Who does not need it is not held up.
    let (mut b, outcome) = start(&mut rig, 3, &cdb10(0x28, 0, 0, 1), &[], 512);
    assert_eq!(outcome, Outcome::Pending);
    let mut ended = 0;
    while ended < 2 {
        for completion in poll(&mut rig) {
            let task = if completion.tag == 1 { &mut a.task } else { &mut b.task };
            if let Outcome::Done(response) = rig.lun.resume(task, completion.result) {
                assert_eq!(response.status, Status::Good);
                ended += 1;
            }
        }
    }
    assert!(rig.medium()[..300 * 512].iter().all(|b| *b == 5));
    rig.run(&cdb10(0x2F, 0, 0, 1)).good();
}

#[test]
fn a_task_of_many_steps_that_end_at_once_lets_others_run() {
    let mut rig = Rig::new();
    let (mut a, outcome) = start(&mut rig, 1, &cdb16(0x93, 0, 0, 4096), &[5; 512], 0);
    assert_eq!(outcome, Outcome::Pending);
    let first = rig.asked().len();
    assert!((1..32).contains(&first));
    rig.input(&cdb10(0x28, 0, 0, 1), 512).good();
    let mut none = Vec::new();
    assert_eq!(rig.lun.poll(&mut none), 0, "no room, so nothing is handed out");
    let mut turns = 1;
    loop {
        let asked = rig.asked().len();
        assert!(asked <= 1, "64 KiB a turn, as copies take time: {asked} steps");
        assert_eq!(poll(&mut rig), [Completion { tag: 1, result: Ok(()), ticks: 0, ended: 0 }]);
        match rig.lun.resume(&mut a.task, Ok(())) {
            Outcome::Pending => turns += 1,
            end => break assert!(matches!(end, Outcome::Done(r) if r.status == Status::Good)),
        }
    }
    assert_eq!(turns, 4096 * 512 / COPY_AT_ONCE);
    assert!(rig.medium().iter().all(|b| *b == 5));
}

#[test]
fn too_many_tasks_that_wait_for_their_turn_are_busy() {
    let mut rig = Setup { num_blocks: 1 << 14, block_size: 4096, ..Setup::default() }.build();
    let zero = cdb16(0x93, 0x01, 0, 1 << 14); // two steps of 32 MiB
    let mut tasks: Vec<InFlight> = Vec::new();
    let mut busy = 0;
    for tag in 0..130 {
        let (task, outcome) = start(&mut rig, tag, &zero, &[], 0);
        match outcome {
            Outcome::Pending => tasks.push(task),
            other => {
                assert_eq!(other, bare(Status::Busy));
                busy += 1;
            }
        }
    }
    assert_eq!((tasks.len(), busy), (128, 2));
}

#[test]
fn parameter_data_changed_by_the_guest_between_check_and_use_is_checked_again() {
    let mut rig = later();
    let mut list = vec![0, 38, 0, 32, 0, 0, 0, 0];
    for lba in [1u64, 2] {
        list.extend(lba.to_be_bytes());
        list.extend([0, 0, 0, 1, 0, 0, 0, 0]);
    }
    let (mut a, outcome) = start(&mut rig, 1, &cdb10(0x42, 0, 0, 40), &list, 0);
    assert_eq!(outcome, Outcome::Pending);
    a.out.sg().copy_from_slice(24, &[0xFF; 12]);
    let done = poll(&mut rig);
    let Outcome::Done(response) = rig.lun.resume(&mut a.task, done[0].result) else { panic!() };
    assert_eq!(key_code(&response.sense), OUT_OF_RANGE);
    assert_eq!(rig.asked(), [(Op::Unmap, 1, 1, false)]);
}
