//! Commands that do more than one thing: WRITE AND VERIFY, COMPARE AND WRITE, ORWRITE; and PRE-FETCH.

use crate::rig::*;
use crate::unit::{DEADLINE, Unit};
use bdev::{Bdev, Features, IoError, Malloc, MallocOptions, Op};
use scsi::{ErrorPolicy, LunOptions, Outcome, Response, Status, Task, WaitFor};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::time::{Duration, Instant};

fn pattern(seed: u8, len: usize) -> Vec<u8> {
    (0..len).map(|i| (i * 3 + i / 512) as u8 ^ seed).collect()
}

/// COMPARE AND WRITE of `blocks` blocks.
fn compare_and_write(flags: u8, lba: u64, blocks: u8) -> [u8; 16] {
    let mut cdb = cdb16(0x89, flags, lba, 0);
    cdb[13] = blocks;
    cdb
}

const MISCOMPARE: (u8, u16) = (0xE, 0x1D00);

#[test]
fn sbc3_5_38_write_and_verify_writes_flushes_and_reads_by_every_form() {
    for (flags, mode) in [(0, Mode::AtOnce), (0x02, Mode::Later)] {
        let mut rig = Setup { mode, ..Setup::default() }.build();
        let forms = [
            cdb10(0x2E, flags, 100, 300).to_vec(),
            cdb12(0xAE, flags, 100, 300).to_vec(),
            cdb16(0x8E, flags, 100, 300).to_vec(),
        ];
        for (i, cdb) in forms.iter().enumerate() {
            let data = pattern(i as u8, 300 * 512);
            let answer = rig.output(cdb, &data);
            answer.good();
            assert_eq!(answer.response().transferred as usize, data.len());
            assert_eq!(rig.medium()[100 * 512..400 * 512], data);
            let asked = rig.asked();
            assert_eq!(asked[..2], [(Op::Write, 100, 300, false), (Op::Flush, 0, 0, false)]);
            // Through the bounce buffer, in steps.
            assert_eq!(asked[2..].iter().map(|(_, _, blocks, _)| blocks).sum::<u64>(), 300);
            assert!(asked[2..].iter().all(|(op, ..)| *op == Op::Read));
        }
    }
}

#[test]
fn write_and_verify_tells_what_did_not_go_well() {
    let mut rig = Rig::new();
    let cdb = cdb10(0x2E, 0x02, 8, 2);
    for (skip, error, sense) in [
        (0, IoError::WriteMedium, (0x3, 0x0C00)),
        (1, IoError::Flush, (0x4, 0x0300)),
        (2, IoError::ReadMedium, (0x3, 0x1100)),
    ] {
        rig.fail(skip, error);
        assert_eq!(rig.output(&cdb, &pattern(1, 1024)).sense(), sense);
    }
    // BYTCHK 10b and 11b are reserved, and so is WRPROTECT without protection information.
    rig.output(&cdb10(0x2E, 0x04, 8, 2), &pattern(1, 1024)).invalid_cdb(1, Some(2));
    rig.output(&cdb10(0x2E, 0x20, 8, 2), &pattern(1, 1024)).invalid_cdb(1, Some(5));
    assert_eq!(rig.output(&cdb, &pattern(1, 1000)).outcome, Outcome::Overrun);
    assert_eq!(rig.output(&cdb10(0x2E, 0, 4095, 2), &pattern(1, 1024)).sense(), OUT_OF_RANGE);
    rig.asked();
    rig.run(&cdb10(0x2E, 0, 8, 0)).good();
    assert_eq!(rig.asked(), []);
    // The buffer is free again after each of them.
    rig.output(&cdb, &pattern(2, 1024)).good();
    // More data than is written stays where it is.
    let answer = rig.output(&cdb, &pattern(3, 1024 + 50));
    answer.good();
    assert_eq!(answer.response().transferred, 1024);
}

#[test]
fn sbc3_5_2_compare_and_write_writes_where_the_blocks_are_as_expected() {
    for (block_size, mode) in [(512, Mode::AtOnce), (4096, Mode::Later)] {
        let mut rig = Setup { block_size, mode, ..Setup::default() }.build();
        rig.scribble();
        let (bytes, at) = (3 * block_size as usize, 17 * block_size as usize);
        let before = rig.medium()[at..at + bytes].to_vec();
        let after = pattern(9, bytes);
        let cdb = compare_and_write(0, 17, 3);
        let answer = rig.output(&cdb, &[&before[..], &after[..]].concat());
        answer.good();
        assert_eq!(answer.response().transferred as usize, 2 * bytes);
        assert_eq!(rig.medium()[at..at + bytes], after);
        assert_eq!(rig.asked(), [(Op::Read, 17, 3, false), (Op::Write, 17, 3, false)]);

        // Now they are not, in one byte.
        let mut wrong = after.clone();
        *wrong.last_mut().unwrap() ^= 1;
        let answer = rig.output(&cdb, &[&wrong[..], &before[..]].concat());
        assert_eq!(answer.sense(), MISCOMPARE);
        assert_eq!(rig.medium()[at..at + bytes], after);
        assert_eq!(rig.asked(), [(Op::Read, 17, 3, false)]);
    }
}

#[test]
fn sbc3_5_2_compare_and_write_with_fua_is_durable() {
    let zeros = [0; 1024];
    let mut rig = Rig::new();
    rig.output(&compare_and_write(0x08, 0, 1), &zeros).good();
    assert_eq!(rig.asked(), [(Op::Read, 0, 1, false), (Op::Write, 0, 1, true)]);
    let features = Features { fua: false, ..ALL_FEATURES };
    let mut rig = Setup { features, ..Setup::default() }.build();
    rig.output(&compare_and_write(0x08, 0, 1), &zeros).good();
    let asked = [(Op::Read, 0, 1, false), (Op::Write, 0, 1, false), (Op::Flush, 0, 0, false)];
    assert_eq!(rig.asked(), asked);
}

/// A COMPARE AND WRITE with FUA of zeros that become sevens, on a disk that has none, when its turn has come to write.
fn about_to_write(rig: &mut Rig) -> (Box<Task>, Buffer) {
    let (mut task, out) =
        begin(rig, 1, &compare_and_write(0x08, 0, 1), &[[0; 512], [7; 512]].concat());
    let mut done = Vec::with_capacity(1);
    while !task.is_unrepeatable() {
        assert_eq!(rig.asked().iter().find(|(op, ..)| *op == Op::Write), None);
        done.clear();
        if rig.lun.poll(&mut done) > 0 {
            assert_eq!(rig.lun.resume(&mut task, done[0].result), Outcome::Pending);
        }
    }
    (task, out)
}

fn without_fua(options: LunOptions) -> Rig {
    let features = Features { fua: false, ..ALL_FEATURES };
    Setup { features, options, mode: Mode::Later, ..Setup::default() }.build()
}

#[test]
fn a_compare_and_write_that_has_begun_to_write_does_not_stop_before_its_end() {
    const WRITTEN: [(Op, u64, u64, bool); 2] = [(Op::Write, 0, 1, false), (Op::Flush, 0, 0, false)];
    // Before it writes, and before it flushes.
    for steps in [0, 1] {
        let mut rig = without_fua(LunOptions::default());
        let (mut task, _out) = about_to_write(&mut rig);
        rig.asked();
        let mut done = Vec::with_capacity(1);
        for _ in 0..steps {
            rig.lun.poll(&mut done);
            assert_eq!(rig.lun.resume(&mut task, done[0].result), Outcome::Pending);
        }
        task.stop();
        to_the_end(&mut rig, &mut task);
        assert_eq!(rig.asked(), WRITTEN);
    }
    // Nor where the disk has no room for its flush at once.
    let mut rig = without_fua(LunOptions::default());
    let (mut task, _out) = about_to_write(&mut rig);
    let mut done = Vec::with_capacity(1);
    rig.lun.poll(&mut done);
    assert_eq!(rig.lun.resume(&mut task, done[0].result), Outcome::Pending);
    rig.state.borrow_mut().mode = Mode::Full;
    for _ in 0..3 {
        done.clear();
        assert_eq!(rig.lun.poll(&mut done), 1);
        assert_eq!(rig.lun.resume(&mut task, done[0].result), Outcome::Pending);
    }
    rig.state.borrow_mut().mode = Mode::Later;
    rig.asked();
    to_the_end(&mut rig, &mut task);
    assert_eq!(rig.asked(), WRITTEN[1..]);
    // One that has only read stops.
    let mut rig = without_fua(LunOptions::default());
    let (mut task, _out) = begin(&mut rig, 1, &compare_and_write(0x08, 0, 1), &[0; 1024]);
    task.stop();
    done.clear();
    assert_eq!(rig.lun.poll(&mut done), 1);
    let outcome = rig.lun.resume(&mut task, done[0].result);
    assert_eq!(outcome, Outcome::Done(Response::bare(Status::TaskAborted)));
}

#[test]
fn a_compare_and_write_whose_write_or_flush_fails_is_told_and_does_not_begin_again() {
    let error_policy = ErrorPolicy { write: WaitFor::Repair, read: WaitFor::Repair };
    for (step, error, told) in [
        (0, IoError::NoSpace, (7, 0x2707)),
        (0, IoError::Resources, (0xB, 0x5503)),
        (1, IoError::Resources, (0xB, 0x5503)),
    ] {
        let mut rig = without_fua(LunOptions { error_policy, ..LunOptions::default() });
        let (mut task, _out) = about_to_write(&mut rig);
        rig.fail(step, error);
        let outcome = outcome(&mut rig, &mut task);
        assert_eq!(Answer { outcome, data: Vec::new() }.sense(), told);
    }
    // As it reads it waits, and begins again.
    let mut rig = without_fua(LunOptions { error_policy, ..LunOptions::default() });
    rig.fail(0, IoError::ReadMedium);
    let (mut task, _out) = begin(&mut rig, 1, &compare_and_write(0x08, 0, 1), &[0; 1024]);
    assert_eq!(outcome(&mut rig, &mut task), Outcome::Suspended(IoError::ReadMedium));
}

#[test]
fn what_another_host_writes_between_compare_and_write_is_a_miscompare() {
    for mode in [Mode::AtOnce, Mode::Later] {
        let mut rig = Setup { mode, ..Setup::default() }.build();
        let data = [[0; 512], [7; 512]].concat();
        rig.state.borrow_mut().other_host = Some((5, 9));
        assert_eq!(rig.output(&compare_and_write(0, 5, 1), &data).sense(), MISCOMPARE);
        assert_eq!(rig.medium()[5 * 512], 9);
        // Elsewhere it does not matter.
        rig.state.borrow_mut().other_host = Some((5, 8));
        rig.output(&compare_and_write(0, 6, 1), &data).good();
        assert_eq!(rig.medium()[6 * 512..7 * 512], [7; 512]);
    }
}

#[test]
fn sbc3_6_6_3_compare_and_write_has_a_maximum_length() {
    for (block_size, most) in [(512, 128), (4096, 16)] {
        let mut rig = Setup { block_size, ..Setup::default() }.build();
        assert_eq!(rig.input(&[0x12, 1, 0xB0, 0, 64, 0], 64).good()[5], most);
        let bytes = 2 * usize::from(most) * block_size as usize;
        rig.output(&compare_and_write(0, 0, most), &vec![0; bytes]).good();
        let longer = vec![0; bytes + 2 * block_size as usize];
        rig.output(&compare_and_write(0, 0, most + 1), &longer).invalid_cdb(13, None);
    }
    let features = Features { max_blocks: 8, ..ALL_FEATURES };
    let mut rig = Setup { features, ..Setup::default() }.build();
    assert_eq!(rig.input(&[0x12, 1, 0xB0, 0, 64, 0], 64).good()[5], 8);
}

#[test]
fn compare_and_write_refuses_what_it_cannot_do() {
    let mut rig = Rig::new();
    rig.run(&compare_and_write(0, 5, 0)).good();
    assert_eq!(rig.output(&compare_and_write(0, 4095, 2), &[0; 2048]).sense(), OUT_OF_RANGE);
    assert_eq!(rig.output(&compare_and_write(0, 0, 2), &[0; 2047]).outcome, Outcome::Overrun);
    rig.fail(0, IoError::ReadMedium);
    assert_eq!(rig.output(&compare_and_write(0, 0, 1), &[0; 1024]).sense(), (0x3, 0x1100));
    rig.fail(1, IoError::WriteMedium);
    assert_eq!(rig.output(&compare_and_write(0, 0, 1), &[0; 1024]).sense(), (0x3, 0x0C00));
    let options = LunOptions { read_only: true, ..LunOptions::default() };
    let mut rig = rig.another_unit(options);
    assert_eq!(rig.output(&compare_and_write(0, 0, 1), &[0; 1024]).sense(), WRITE_PROTECTED);
}

#[test]
fn one_compare_and_write_of_a_volume_at_a_time_whoever_asks() {
    let mut rig = Setup { mode: Mode::Later, ..Setup::default() }.build();
    let mut other = rig.another_unit(LunOptions::default());
    let out = Buffer::new(&[0; 1024], 512);
    let mut task = Task::new(1);
    task.prepare(&pad(&compare_and_write(0, 0, 1)), out.sg(), Buffer::new(&[], 1).sg());
    assert_eq!(rig.lun.start(&mut task), Outcome::Pending);
    for cdb in [compare_and_write(0, 9, 1), cdb16(0x8B, 0, 9, 1)] {
        let answer = other.output(&cdb, &[0; 1024]);
        assert_eq!(answer.response().status, Status::Busy);
    }
    let mut done = Vec::with_capacity(1);
    to_the_end(&mut rig, &mut task);
    other.output(&compare_and_write(0, 9, 1), &[0; 1024]).good();

    // A session that ends in the middle keeps nobody out.
    assert_eq!(rig.lun.start(&mut task), Outcome::Pending);
    assert_eq!(rig.lun.poll(&mut done), 1);
    drop(rig);
    other.output(&compare_and_write(0, 9, 1), &[0; 1024]).good();
}

/// Goes on with a task until it is over, GOOD.
#[track_caller]
fn to_the_end(rig: &mut Rig, task: &mut Task) {
    let outcome = outcome(rig, task);
    assert!(matches!(outcome, Outcome::Done(r) if r.status == Status::Good), "{outcome:?}");
}

/// Goes on with a task until it has one.
fn outcome(rig: &mut Rig, task: &mut Task) -> Outcome {
    let begun = Instant::now();
    let mut done = Vec::with_capacity(1);
    let mut outcome = Outcome::Pending;
    while outcome == Outcome::Pending {
        assert!(begun.elapsed() < DEADLINE, "it does not end");
        done.clear();
        if rig.lun.poll(&mut done) > 0 {
            outcome = rig.lun.resume(task, done[0].result);
        }
    }
    outcome
}

/// Looks after a task as often as it takes to see that it waits.
fn waits(rig: &mut Rig, task: &mut Task) {
    let mut done = Vec::with_capacity(1);
    for _ in 0..20 {
        std::thread::sleep(Duration::from_millis(1));
        done.clear();
        if rig.lun.poll(&mut done) > 0 {
            assert_eq!(rig.lun.resume(task, done[0].result), Outcome::Pending);
        }
    }
}

fn begin(rig: &mut Rig, tag: u64, cdb: &[u8], data: &[u8]) -> (Box<Task>, Buffer) {
    let out = Buffer::new(data, data.len().max(1));
    let mut task = Box::new(Task::new(tag));
    task.prepare(&pad(cdb), out.sg(), Buffer::new(&[], 1).sg());
    assert_eq!(rig.lun.start(&mut task), Outcome::Pending);
    (task, out)
}

#[test]
fn what_would_change_the_blocks_of_a_compare_and_write_waits_until_it_is_over() {
    let mut rig = Setup { mode: Mode::Later, ..Setup::default() }.build();
    let mut other = rig.another_unit(LunOptions::default());
    let new = [[0; 1024], [7; 1024]].concat();
    let (mut both, _data) = begin(&mut rig, 1, &compare_and_write(0, 8, 2), &new);
    rig.asked();
    // Each of them has a block of it.
    let unmap = [&[0, 22, 0, 16, 0, 0, 0, 0][..], &8u64.to_be_bytes(), &[0, 0, 0, 1, 0, 0, 0, 0]];
    for (cdb, data) in [
        (cdb10(0x2A, 0, 9, 4).to_vec(), vec![9; 2048]),
        (cdb16(0x93, 0, 9, 1).to_vec(), vec![9; 512]),
        (vec![0x42, 0, 0, 0, 0, 0, 0, 0, 24, 0], unmap.concat()),
    ] {
        let (mut task, _out) = begin(&mut other, 2, &cdb, &data);
        waits(&mut other, &mut task);
        assert_eq!(other.asked(), []);
        task.abort();
        let mut done = Vec::with_capacity(1);
        other.lun.poll(&mut done);
        _ = other.lun.resume(&mut task, Ok(()));
    }
    let (mut write, _out) = begin(&mut other, 2, &cdb10(0x2A, 0, 9, 4), &[9; 2048]);
    waits(&mut other, &mut write);
    // Others do not.
    let mut third = rig.another_unit(LunOptions::default());
    let (mut apart, _more) = begin(&mut third, 3, &cdb10(0x2A, 0, 10, 1), &[5; 512]);
    assert_eq!(third.asked(), [(Op::Write, 10, 1, false)]);
    to_the_end(&mut third, &mut apart);
    to_the_end(&mut rig, &mut both);
    to_the_end(&mut other, &mut write);
    let medium = rig.medium();
    assert_eq!((medium[8 * 512], medium[9 * 512], medium[10 * 512]), (7, 9, 9));
}

#[test]
fn a_compare_and_write_waits_for_the_writes_that_began_before() {
    let mut rig = Setup { mode: Mode::Later, ..Setup::default() }.build();
    let mut other = rig.another_unit(LunOptions::default());
    let (mut write, _out) = begin(&mut other, 2, &cdb10(0x2A, 0, 8, 1), &[9; 512]);
    // While what one that was given up has waited for goes on, the next one is refused.
    for given_up in [false, true] {
        let mut done = Vec::with_capacity(1);
        let data = [[9; 512], [7; 512]].concat();
        rig.asked();
        let out = Buffer::new(&data, 512);
        let mut both = Task::new(1);
        both.prepare(&pad(&compare_and_write(0, 8, 1)), out.sg(), Buffer::new(&[], 1).sg());
        let outcome = rig.lun.start(&mut both);
        if given_up {
            assert_eq!(outcome, Outcome::Done(Response::bare(Status::Busy)));
            continue;
        }
        waits(&mut rig, &mut both);
        assert_eq!(rig.asked(), []);
        both.abort();
        rig.lun.poll(&mut done);
        _ = rig.lun.resume(&mut both, Ok(()));
    }
    to_the_end(&mut other, &mut write);
    let data = [[9; 512], [7; 512]].concat();
    let (mut both, _data) = begin(&mut rig, 1, &compare_and_write(0, 8, 1), &data);
    to_the_end(&mut rig, &mut both);
    assert_eq!(rig.medium()[8 * 512], 7);
}

#[test]
fn no_plain_write_is_lost_beside_compare_and_write_of_other_threads() {
    const ROUNDS: u32 = 1500;
    /// Many, so that there is time between comparing and writing them.
    const BLOCKS: u8 = 100;
    const BYTES: usize = BLOCKS as usize * 512;
    const COUNTERS: u8 = 2;
    let options = MallocOptions {
        name: "counted".to_owned(),
        block_size: 512,
        physical_block_size: 0,
        num_blocks: 256,
        uuid: None,
    };
    let disk: Arc<dyn Bdev> = Malloc::create(options).unwrap();
    let over = AtomicBool::new(false);
    let counted = AtomicU32::new(0);
    let read =
        |unit: &mut Unit| unit.io(&cdb10(0x28, 0, 8, BLOCKS.into()), &[], BYTES).good().to_vec();
    std::thread::scope(|scope| {
        // They count in the first byte, and change nothing of which that byte is odd.
        for _ in 0..COUNTERS {
            scope.spawn(|| {
                let mut unit = Unit::new(&disk, LunOptions::default());
                while !over.load(Ordering::Relaxed) {
                    let now = read(&mut unit);
                    if now[0] % 2 == 0 {
                        let next = vec![now[0].wrapping_add(2); BYTES];
                        let data = [now, next].concat();
                        let done = unit.io(&compare_and_write(0, 8, BLOCKS), &data, 0);
                        counted.fetch_add(
                            u32::from(done.response().status == Status::Good),
                            Ordering::Relaxed,
                        );
                    }
                }
            });
        }
        let mut unit = Unit::new(&disk, LunOptions::default());
        // Where others use the processors a counter may not have had its turn yet.
        let goes_on = |round: &u32| {
            *round < ROUNDS || (counted.load(Ordering::Relaxed) == 0 && *round < 100 * ROUNDS)
        };
        let lost: u32 = (0..)
            .take_while(goes_on)
            .map(|round: u32| {
                let data = vec![(round as u8) | 1; BYTES];
                unit.io(&cdb10(0x2A, 0, 8, BLOCKS.into()), &data, 0).good();
                let is_lost = read(&mut unit) != data;
                unit.io(&cdb10(0x2A, 0, 8, BLOCKS.into()), &[0; BYTES], 0).good();
                u32::from(is_lost)
            })
            .sum();
        over.store(true, Ordering::Relaxed);
        assert_eq!(lost, 0);
        assert_ne!(counted.load(Ordering::Relaxed), 0, "nobody counted anything");
    });
}

#[test]
fn sbc3_5_9_orwrite_sets_bits() {
    for mode in [Mode::AtOnce, Mode::Later] {
        let mut rig = Setup { mode, ..Setup::default() }.build();
        rig.scribble();
        let bytes = 300 * 512;
        let before = rig.medium()[3 * 512..3 * 512 + bytes].to_vec();
        let data = pattern(0x5A, bytes);
        let answer = rig.output(&cdb16(0x8B, 0x08, 3, 300), &data);
        answer.good();
        assert_eq!(answer.response().transferred as usize, bytes);
        let ored: Vec<u8> = before.iter().zip(&data).map(|(a, b)| a | b).collect();
        assert_eq!(rig.medium()[3 * 512..3 * 512 + bytes], ored);
        let asked = rig.asked();
        assert_eq!(asked[..2], [(Op::Read, 3, 128, false), (Op::Write, 3, 128, true)]);
        assert_eq!(asked.len(), 6);
    }
    let mut rig = Rig::new();
    assert_eq!(rig.output(&cdb16(0x8B, 0, 4095, 2), &[0; 1024]).sense(), OUT_OF_RANGE);
    assert_eq!(rig.output(&cdb16(0x8B, 0, 0, 2), &[0; 1023]).outcome, Outcome::Overrun);
    rig.run(&cdb16(0x8B, 0, 0, 0)).good();
    assert_eq!(rig.asked(), []);
}

#[test]
fn sbc3_5_7_pre_fetch_checks_its_range() {
    let mut rig = Rig::new();
    for immed in [0, 0x02] {
        rig.run(&cdb10(0x34, immed, 0, 0)).good();
        rig.run(&cdb10(0x34, immed, 4000, 96)).good();
        rig.run(&cdb16(0x90, immed, 4000, 96)).good();
        assert_eq!(rig.run(&cdb10(0x34, immed, 4000, 97)).sense(), OUT_OF_RANGE);
        assert_eq!(rig.run(&cdb16(0x90, immed, u64::MAX, 2)).sense(), OUT_OF_RANGE);
    }
    assert_eq!(rig.asked(), []);
}
