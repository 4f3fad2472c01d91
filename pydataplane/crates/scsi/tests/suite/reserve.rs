//! Persistent reservations and RESERVE(6), by several units of one volume. (Their rules for themselves:
//! `src/reservations/state.rs`; that it is not known what was kept: `lost`.)

use crate::rig::*;
use parking_lot::Mutex;
use scsi::{
    KeptReservations, LunOptions, LunShared, NotKnown, Outcome, ReservationKeeper, Response,
    Status, Task,
};
use std::io;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use uuid::Uuid;

pub const REGISTER: u8 = 0;
pub const RESERVE: u8 = 1;
const RELEASE: u8 = 2;
pub const CLEAR: u8 = 3;
pub const PREEMPT: u8 = 4;
const PREEMPT_AND_ABORT: u8 = 5;
pub const REGISTER_AND_IGNORE: u8 = 6;
const REGISTER_AND_MOVE: u8 = 7;

pub const WRITE_EXCLUSIVE: u8 = 1;
const EXCLUSIVE_ACCESS: u8 = 3;
const WRITE_EXCLUSIVE_REGISTRANTS: u8 = 5;

pub const CONFLICT: Outcome = Outcome::Done(Response::bare(Status::ReservationConflict));
pub const LIST_FIELD: (u8, u16) = (0x5, 0x2600);

/// Keeps in memory, with all that a disk does: it may fail, take its time, and not be readable.
#[derive(Default)]
pub struct Keeper {
    pub kept: Mutex<Option<KeptReservations>>,
    pub fails: AtomicBool,
    /// It is held as long as nothing can be kept.
    pub disk: Mutex<()>,
    /// What is kept cannot be read until something else is kept.
    pub not_known: Mutex<Option<NotKnown>>,
    /// How often it was told that what is kept is not what is known.
    pub spoiled: AtomicU32,
}

impl ReservationKeeper for Keeper {
    fn keep(&self, _: Uuid, kept: &KeptReservations) -> io::Result<()> {
        let _disk = self.disk.lock();
        if self.fails.load(Ordering::Relaxed) {
            return Err(io::Error::other("no room"));
        }
        *self.kept.lock() = Some(kept.clone());
        *self.not_known.lock() = None;
        Ok(())
    }

    fn kept(&self, _: Uuid) -> Result<Option<KeptReservations>, NotKnown> {
        self.look(Uuid::nil())
    }

    fn look(&self, _: Uuid) -> Result<Option<KeptReservations>, NotKnown> {
        self.not_known.lock().map_or_else(|| Ok(self.kept.lock().clone()), Err)
    }

    fn tell_spoiled(&self, _: Uuid) {
        self.spoiled.fetch_add(1, Ordering::Relaxed);
    }
}

/// A unit of the nexus that no session has begun with, as a program has it that is about to take over.
pub fn early(disk: &Arc<Disk>, nexus: &str, keeper: &Arc<Keeper>) -> Arc<LunShared> {
    LunShared::new(disk.clone(), options(nexus, keeper)).unwrap()
}

pub fn options(nexus: &str, keeper: &Arc<Keeper>) -> LunOptions {
    let keeper: Arc<dyn ReservationKeeper> = keeper.clone();
    LunOptions { nexus: Some(nexus.to_owned()), keeper: Some(keeper), ..LunOptions::default() }
}

/// Units a and b of one volume.
pub fn two(keeper: &Arc<Keeper>) -> [Rig; 2] {
    let a = Setup { options: options("vm-a:0", keeper), ..Setup::default() }.build();
    let b = a.another_unit(options("vm-b:0", keeper));
    [a, b]
}

pub fn out(unit: &mut Rig, action: u8, kind: u8, key: u64, action_key: u64, flags: u8) -> Answer {
    let mut list = [key.to_be_bytes(), action_key.to_be_bytes(), [0; 8]].concat();
    list[20] = flags;
    unit.output(&[0x5F, action, kind, 0, 0, 0, 0, 0, 24, 0], &list)
}

pub fn read(unit: &mut Rig, action: u8) -> Vec<u8> {
    unit.input(&[0x5E, action, 0, 0, 0, 0, 0, 2, 0, 0], 512).good().to_vec()
}

pub fn write(unit: &mut Rig) -> Outcome {
    unit.output(&cdb10(0x2A, 0, 0, 1), &[0; 512]).outcome
}

#[track_caller]
pub fn goes(outcome: Outcome) {
    assert!(matches!(outcome, Outcome::Done(r) if r.status == Status::Good), "{outcome:?}");
}

#[test]
fn spc4_6_15_what_is_registered_and_reserved_is_told_to_everybody() {
    let keeper = Arc::default();
    let [mut a, mut b] = two(&keeper);
    assert_eq!(read(&mut b, 0), [0; 8]);
    assert_eq!(read(&mut b, 1), [0; 8]);
    let answer = out(&mut a, REGISTER, 0, 0, 0xA, 0);
    answer.good();
    assert_eq!(answer.response().transferred, 24);
    out(&mut b, REGISTER, 0, 0, 0xB, 0).good();
    assert_eq!(out(&mut b, REGISTER, 0, 0xA, 0xC, 0).outcome, CONFLICT);
    out(&mut b, RESERVE, WRITE_EXCLUSIVE, 0xB, 0, 0).good();
    let keys = [&[0, 0, 0, 2, 0, 0, 0, 16][..], &0xA_u64.to_be_bytes(), &0xB_u64.to_be_bytes()];
    assert_eq!(read(&mut a, 0), keys.concat());
    let held = [0, 0, 0, 2, 0, 0, 0, 16, 0, 0, 0, 0, 0, 0, 0, 0xB, 0, 0, 0, 0, 0, 1, 0, 0];
    assert_eq!(read(&mut a, 1), held);
    assert_eq!(read(&mut a, 2), [0, 8, 0x81, 0x80, 0xEA, 1, 0, 0]);
    let all = read(&mut a, 3);
    assert_eq!((all.len(), &all[..8]), (8 + 2 * 48, &[0, 0, 0, 2, 0, 0, 0, 96][..]));
    // b: its key, that it holds one, of which type, at its port, and a SAS TransportID.
    assert_eq!(
        all[56..80],
        [0, 0, 0, 0, 0, 0, 0, 0xB, 0, 0, 0, 0, 1, 1, 0, 0, 0, 0, 197, 195, 0, 0, 0, 24]
    );
    assert_eq!((all[20], all[80], all[84] >> 4), (0, 6, 3));
    assert_ne!(all[32..56], all[80..104]);
    // Cut at the allocation length, with the whole length told.
    let cut = a.input(&[0x5E, 0, 0, 0, 0, 0, 0, 0, 10, 0], 10);
    assert_eq!(cut.good(), &keys.concat()[..10]);
}

#[test]
fn spc4_5_13_1_a_reservation_keeps_others_out_until_it_is_released() {
    let keeper = Arc::default();
    let [mut a, mut b] = two(&keeper);
    out(&mut a, REGISTER, 0, 0, 0xA, 0).good();
    for (kind, reads) in [(WRITE_EXCLUSIVE, true), (EXCLUSIVE_ACCESS, false)] {
        out(&mut a, RESERVE, kind, 0xA, 0, 0).good();
        goes(write(&mut a));
        b.asked();
        for (cdb, is_read) in [
            (cdb10(0x2A, 0, 0, 0).to_vec(), false),
            (cdb16(0x89, 0, 0, 0).to_vec(), false),
            (cdb10(0x41, 0, 0, 1).to_vec(), false),
            (cdb10(0x42, 0, 0, 0).to_vec(), false),
            (cdb10(0x35, 0, 0, 0).to_vec(), false),
            (cdb10(0x28, 0, 0, 0).to_vec(), true),
            (cdb10(0x2F, 0, 0, 1).to_vec(), true),
            (vec![0x5F, RESERVE, kind, 0, 0, 0, 0, 0, 24, 0], false),
            (vec![0x1E, 0, 0, 0, 1, 0], false),
            (vec![0x16, 0, 0, 0, 0, 0], false),
        ] {
            let outcome = b.io(&cdb, &[0; 24], 0).outcome;
            match is_read && reads {
                true => goes(outcome),
                false => assert_eq!(outcome, CONFLICT, "{cdb:x?}"),
            }
        }
        assert!(b.asked().iter().all(|asked| asked.0 == bdev::Op::Read));
        // What tells about the unit goes.
        for cdb in [
            vec![0; 6],
            vec![0x12, 0, 0, 0, 0, 0],
            cdb10(0x25, 0, 0, 0).to_vec(),
            vec![0x1E, 0, 0, 0, 0, 0],
        ] {
            goes(b.input(&cdb, 8).outcome);
        }
        assert_eq!(read(&mut b, 1)[21], kind);
        out(&mut a, RELEASE, kind, 0xA, 0, 0).good();
        goes(write(&mut b));
    }
}

#[test]
fn spc4_5_13_11_4_a_preempted_nexus_is_told_and_kept_out() {
    let keeper = Arc::default();
    let [mut a, mut b] = two(&keeper);
    out(&mut a, REGISTER, 0, 0, 0xA, 0).good();
    out(&mut b, REGISTER, 0, 0, 0xB, 0).good();
    out(&mut a, RESERVE, WRITE_EXCLUSIVE_REGISTRANTS, 0xA, 0, 0).good();
    goes(write(&mut b));
    assert_eq!(out(&mut b, PREEMPT, WRITE_EXCLUSIVE_REGISTRANTS, 0xB, 0, 0).sense(), LIST_FIELD);
    out(&mut b, PREEMPT, WRITE_EXCLUSIVE_REGISTRANTS, 0xB, 0xA, 0).good();
    assert_eq!(a.run(&[0; 6]).sense(), (0x6, 0x2A05));
    assert_eq!(write(&mut a), CONFLICT);
    assert_eq!(out(&mut a, RESERVE, WRITE_EXCLUSIVE_REGISTRANTS, 0xA, 0, 0).outcome, CONFLICT);
    // It may register again, and then work.
    out(&mut a, REGISTER_AND_IGNORE, 0, 0, 0xAA, 0).good();
    goes(write(&mut a));
    out(&mut b, CLEAR, 0, 0xB, 0, 0).good();
    assert_eq!(a.run(&[0; 6]).sense(), (0x6, 0x2A03));
    assert_eq!(read(&mut a, 0)[4..], [0; 4]);
}

#[test]
fn spc4_5_13_11_5_preempt_and_abort_ends_when_nothing_of_the_victim_is_under_way() {
    let keeper = Arc::default();
    let mut a =
        Setup { options: options("vm-a:0", &keeper), mode: Mode::Later, ..Setup::default() }
            .build();
    let mut b = a.another_unit(options("vm-b:0", &keeper));
    out(&mut a, REGISTER, 0, 0, 0xA, 0).good();
    out(&mut b, REGISTER, 0, 0, 0xB, 0).good();
    out(&mut a, RESERVE, WRITE_EXCLUSIVE_REGISTRANTS, 0xA, 0, 0).good();

    let data = Buffer::new(&[7; 512], 512);
    let mut victim = Task::new(3);
    victim.prepare(&pad(&cdb10(0x2A, 0, 9, 1)), data.sg(), Buffer::new(&[], 1).sg());
    assert_eq!(a.lun.start(&mut victim), Outcome::Pending);

    let list = [0xB_u64.to_be_bytes(), 0xA_u64.to_be_bytes(), [0; 8]].concat();
    let list = Buffer::new(&list, 24);
    let mut preempt = Task::new(4);
    let cdb = [0x5F, PREEMPT_AND_ABORT, WRITE_EXCLUSIVE, 0, 0, 0, 0, 0, 24, 0];
    preempt.prepare(&pad(&cdb), list.sg(), Buffer::new(&[], 1).sg());
    assert_eq!(b.lun.start(&mut preempt), Outcome::Pending);
    let mut done = Vec::with_capacity(1);
    let mut turn = |unit: &mut Rig, task: &mut Task| {
        done.clear();
        assert_eq!(unit.lun.poll(&mut done), 1);
        unit.lun.resume(task, done[0].result)
    };
    // The I/O of the other one is not over, however long it takes.
    std::thread::sleep(std::time::Duration::from_millis(20));
    for _ in 0..3 {
        assert_eq!(turn(&mut b, &mut preempt), Outcome::Pending);
    }
    assert_eq!(turn(&mut a, &mut victim), Outcome::Done(Response::bare(Status::TaskAborted)));
    goes(turn(&mut b, &mut preempt));
    assert_eq!(a.run(&[0; 6]).sense(), (0x6, 0x2A05));
    assert_eq!(write(&mut a), CONFLICT);
}

#[test]
fn spc4_5_13_8_register_and_move_to_another_units_transport_id() {
    let keeper = Arc::default();
    let [mut a, mut b] = two(&keeper);
    out(&mut a, REGISTER, 0, 0, 0xA, 0).good();
    out(&mut b, REGISTER, 0, 0, 0xB, 0).good();
    let id = read(&mut a, 3)[80..104].to_vec();
    out(&mut b, REGISTER, 0, 0xB, 0, 0).good();
    out(&mut a, RESERVE, WRITE_EXCLUSIVE, 0xA, 0, 0).good();
    let mut list =
        [0xA_u64.to_be_bytes(), 0xBB_u64.to_be_bytes(), [0, 2, 0, 1, 0, 0, 0, 24]].concat();
    list.extend(&id);
    let cdb = [0x5F, REGISTER_AND_MOVE, 0, 0, 0, 0, 0, 0, 48, 0];
    let mut foreign = list.clone();
    foreign[30] ^= 1;
    assert_eq!(a.output(&cdb, &foreign).sense(), LIST_FIELD);
    a.output(&cdb, &list).good();
    goes(write(&mut b));
    assert_eq!(write(&mut a), CONFLICT);
    assert_eq!(read(&mut a, 0)[8..], 0xBB_u64.to_be_bytes());
}

#[test]
fn spc4_6_16_what_cannot_be_is_refused_and_changes_nothing() {
    let keeper = Arc::default();
    let [mut a, _b] = two(&keeper);
    out(&mut a, REGISTER, 0, 0, 0xA, 0).good();
    for kind in [0, 2, 4, 9, 0x11] {
        out(&mut a, RESERVE, kind, 0xA, 0, 0).invalid_cdb(2, None);
    }
    for flags in [0x08, 0x04] {
        assert_eq!(out(&mut a, REGISTER, 0, 0xA, 0xB, flags).sense(), LIST_FIELD);
    }
    for length in [0, 23, 25] {
        let cdb = [0x5F, REGISTER, 0, 0, 0, 0, 0, 0, length, 0];
        assert_eq!(a.output(&cdb, &[0; 48]).sense(), (0x5, 0x1A00));
    }
    let cdb = [0x5F, REGISTER, 0, 0, 0, 0, 0, 0, 24, 0];
    assert_eq!(a.output(&cdb, &[0; 23]).outcome, Outcome::Overrun);
    assert_eq!(read(&mut a, 0), [&[0, 0, 0, 1, 0, 0, 0, 8][..], &0xA_u64.to_be_bytes()].concat());
    out(&mut a, RESERVE, WRITE_EXCLUSIVE, 0xA, 0, 0).good();
    assert_eq!(out(&mut a, RELEASE, EXCLUSIVE_ACCESS, 0xA, 0, 0).sense(), (0x5, 0x2604));
}

#[test]
fn a_change_is_kept_before_it_is_acknowledged_and_a_restart_ends_none() {
    let keeper: Arc<Keeper> = Arc::default();
    let [mut a, b] = two(&keeper);
    out(&mut a, REGISTER, 0, 0, 0xA, 0x01).good();
    out(&mut a, RESERVE, EXCLUSIVE_ACCESS, 0xA, 0, 0).good();
    assert_eq!(read(&mut a, 2)[3], 0x81, "APTPL");
    assert!(!keeper.kept.lock().as_ref().unwrap().is_empty());
    let disk = a.disk.clone();
    drop((a, b));
    let again =
        |nexus| Setup { options: options(nexus, &keeper), ..Setup::default() }.of(disk.clone());
    let [mut a, mut b] = ["vm-a:0", "vm-b:0"].map(again);
    assert_eq!(write(&mut b), CONFLICT);
    goes(write(&mut a));
    // What cannot be kept is told.
    keeper.fails.store(true, Ordering::Relaxed);
    assert_eq!(out(&mut a, RELEASE, EXCLUSIVE_ACCESS, 0xA, 0, 0).sense(), (0x4, 0x4400));
    keeper.fails.store(false, Ordering::Relaxed);
    out(&mut a, REGISTER, 0, 0xA, 0, 0).good();
    assert!(keeper.kept.lock().as_ref().unwrap().is_empty());
}

#[test]
fn who_takes_over_from_another_program_knows_what_that_did_last() {
    let keeper: Arc<Keeper> = Arc::default();
    let [mut a, b] = two(&keeper);
    out(&mut a, REGISTER, 0, 0, 0xA, 0).good();
    let disk = a.disk.clone();
    drop((a, b));
    // The next program has its units, and the one before goes on for a while.
    let _early = early(&disk, "vm-a:0", &keeper);
    let mut last = serde_json::to_value(keeper.kept.lock().as_ref().unwrap()).unwrap();
    last["reservations"]["held"] = serde_json::json!({"by": "vm-a:0", "kind": "exclusive-access"});
    *keeper.kept.lock() = Some(serde_json::from_value(last).unwrap());
    let again =
        |nexus| Setup { options: options(nexus, &keeper), ..Setup::default() }.of(disk.clone());
    let [mut a, mut b] = ["vm-a:0", "vm-b:0"].map(again);
    assert_eq!(write(&mut b), CONFLICT);
    goes(write(&mut a));
}

#[test]
fn without_a_keeper_nothing_outlives_a_loss_of_power() {
    let mut a = Rig::new();
    assert_eq!(out(&mut a, REGISTER, 0, 0, 0xA, 0x01).sense(), LIST_FIELD);
    assert_eq!(read(&mut a, 2)[2..4], [0x80, 0x80]);
    out(&mut a, REGISTER, 0, 0, 0xA, 0).good();
}

#[test]
fn spc2_7_21_reserve_6_lasts_until_release_reset_or_the_end_of_the_session() {
    let keeper = Arc::default();
    let [mut a, mut b] = two(&keeper);
    let reserve = [0x16, 0, 0, 0, 0, 0];
    let release = [0x17, 0, 0, 0, 0, 0];
    a.run(&reserve).good();
    assert_eq!((b.run(&reserve).outcome, write(&mut b)), (CONFLICT, CONFLICT));
    assert_eq!(b.run(&[0; 6]).outcome, CONFLICT);
    b.run(&release).good();
    assert_eq!(write(&mut b), CONFLICT);
    a.run(&release).good();
    goes(write(&mut b));

    a.run(&reserve).good();
    a.shared.reset();
    assert_eq!(b.run(&[0; 6]).sense(), (0x6, 0x2900));
    goes(write(&mut b));
    b.run(&reserve).good();
    assert_eq!(a.run(&[0; 6]).sense(), (0x6, 0x2900));
    assert_eq!(write(&mut a), CONFLICT);
    drop(b);
    goes(write(&mut a));
}

#[test]
fn sessions_end_while_others_reset_the_volume_and_order_reservations() {
    // Whoever lets a nexus go last ends it, which takes the lock of the reservations: nobody has that then.
    const ROUNDS: u64 = 3000;
    let keeper = Arc::default();
    let [mut a, b] = two(&keeper);
    let over = AtomicBool::new(false);
    std::thread::scope(|scope| {
        let (b, over) = (&b.shared, &over);
        let until_over = |each: fn(&LunShared)| {
            scope.spawn(move || {
                while !over.load(Ordering::Relaxed) {
                    each(b);
                }
            });
        };
        until_over(|unit| drop(unit.connect()));
        until_over(LunShared::reset);
        for key in 1..=ROUNDS {
            out(&mut a, REGISTER_AND_IGNORE, 0, 0, key, 0);
            out(&mut a, CLEAR, 0, key, 0, 0);
        }
        over.store(true, Ordering::Relaxed);
    });
    // What was told meanwhile does not matter: a reservation is as before.
    while !matches!(a.run(&[0; 6]).outcome, Outcome::Done(r) if r.status == Status::Good) {}
    out(&mut a, REGISTER_AND_IGNORE, 0, 0, 7, 0).good();
    assert_eq!(read(&mut a, 0)[8..], 7_u64.to_be_bytes());
}
