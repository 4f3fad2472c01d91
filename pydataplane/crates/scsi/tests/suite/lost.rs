//! Persistent reservations of which nobody knows what was kept (SPC-4 5.13.5.2, 5.13.5.3, 5.13.11.3).

use crate::reserve::*;
use crate::rig::*;
use bdev::Op;
use scsi::{Lun, LunOptions, NotKnown, Outcome, Response, Status, Task, Transport};
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::{Duration, Instant};

const REPLACE_LOST: u8 = 8;
const LOST: (u8, u16) = (0x7, 0x4401);
const NOT_READY: (u8, u16) = (0x2, 0x0401);
const NOTHING_LOST: (u8, u16) = (0x5, 0x2604);
const CAPACITY: (u8, u16) = (0x6, 0x2A09);

/// A keeper of what cannot be read.
fn of(not_known: NotKnown) -> Arc<Keeper> {
    let keeper: Arc<Keeper> = Arc::default();
    *keeper.not_known.lock() = Some(not_known);
    keeper
}

fn replace(unit: &mut Rig, kind: u8, flags: u8) -> Answer {
    out(unit, REPLACE_LOST, kind, 0, 0xA, flags)
}

/// It has not learned the capacity while nobody was told, and asks for it now.
#[track_caller]
fn asks_again(unit: &mut Rig) {
    assert_eq!(unit.run(&[0; 6]).sense(), CAPACITY);
}

/// Until what was not known is read again.
#[track_caller]
fn until(mut is_so: impl FnMut() -> bool) {
    let begun = Instant::now();
    while !is_so() {
        assert!(begun.elapsed() < Duration::from_secs(60), "it is not read again");
        std::thread::sleep(Duration::from_millis(10));
    }
}

/// All commands but those of the list in SPC-4 5.13.5.2 end so, and ask nothing of the disk.
#[track_caller]
fn keeps_out(unit: &mut Rig, sense: (u8, u16)) {
    unit.asked();
    for cdb in [
        vec![0; 6],
        cdb10(0x28, 0, 0, 1).to_vec(),
        cdb10(0x2A, 0, 0, 1).to_vec(),
        cdb10(0x25, 0, 0, 0).to_vec(),
        cdb10(0x35, 0, 0, 0).to_vec(),
        cdb10(0x42, 0, 0, 0).to_vec(),
        cdb16(0x89, 0, 0, 0).to_vec(),
        vec![0x16, 0, 0, 0, 0, 0],
        vec![0x17, 0, 0, 0, 0, 0],
        vec![0x1A, 0, 0x3F, 0, 255, 0],
        vec![0x1B, 0, 0, 0, 0, 0],
        vec![0x1E, 0, 0, 0, 0, 0],
        vec![0x5E, 0, 0, 0, 0, 0, 0, 0, 255, 0],
        vec![0x5E, 2, 0, 0, 0, 0, 0, 0, 255, 0],
        vec![0xA3, 0x0C, 0, 0, 0, 0, 0, 0, 8, 0, 0, 0],
    ] {
        assert_eq!(unit.io(&cdb, &[0; 512], 512).sense(), sense, "{cdb:x?}");
    }
    for action in [REGISTER, RESERVE, CLEAR, PREEMPT, REGISTER_AND_IGNORE] {
        assert_eq!(out(unit, action, WRITE_EXCLUSIVE, 0, 0xA, 0).sense(), sense, "{action}");
    }
    for cdb in [
        vec![0x03, 0, 0, 0, 18, 0],
        vec![0x12, 0, 0, 0, 36, 0],
        vec![0x1B, 0, 0, 0, 1, 0],
        vec![0x4D, 0, 0x40, 0, 0, 0, 0, 0, 255, 0],
        vec![0xA0, 0, 0, 0, 0, 0, 0, 0, 16, 0, 0, 0],
        vec![0xA3, 0x0A, 0, 0, 0, 0, 0, 0, 64, 0, 0, 0],
    ] {
        goes(unit.input(&cdb, 255).outcome);
    }
    assert_eq!(unit.asked(), []);
}

#[test]
fn spc4_5_13_5_3_2_what_is_lost_keeps_everybody_out_until_one_replaces_it() {
    let keeper = of(NotKnown::Lost);
    let [mut a, mut b] = two(&keeper);
    for _ in 0..2 {
        keeps_out(&mut a, LOST);
        keeps_out(&mut b, LOST);
        // However long it is so.
        std::thread::sleep(Duration::from_millis(250));
    }
    out(&mut a, REPLACE_LOST, 2, 0, 0xA, 0).invalid_cdb(2, None);
    for (key, new, flags) in [(1, 0xA, 0), (0, 0, 0), (0, 0xA, 4), (0, 0xA, 8)] {
        let answer = out(&mut a, REPLACE_LOST, WRITE_EXCLUSIVE, key, new, flags);
        assert_eq!(answer.sense(), LIST_FIELD);
    }
    keeps_out(&mut a, LOST);

    replace(&mut a, WRITE_EXCLUSIVE, 1).good();
    assert!(!keeper.kept.lock().as_ref().unwrap().is_empty());
    [&mut a, &mut b].into_iter().for_each(asks_again);
    // PRGENERATION 0, and nobody else is told of it.
    assert_eq!(read(&mut b, 0), [&[0, 0, 0, 0, 0, 0, 0, 8][..], &0xA_u64.to_be_bytes()].concat());
    assert_eq!(read(&mut b, 1)[8..22], [0, 0, 0, 0, 0, 0, 0, 0xA, 0, 0, 0, 0, 0, WRITE_EXCLUSIVE]);
    assert_eq!(read(&mut b, 2)[2..4], [0x81, 0x81], "RLR_C, PTPL_C, PTPL_A");
    goes(write(&mut a));
    assert_eq!(write(&mut b), CONFLICT);
    for unit in [&mut a, &mut b] {
        assert_eq!(replace(unit, WRITE_EXCLUSIVE, 0).sense(), NOTHING_LOST);
    }
    // It outlives the process, as was asked for.
    let disk = a.disk.clone();
    drop((a, b));
    let mut last = serde_json::to_value(keeper.kept.lock().as_ref().unwrap()).unwrap();
    last["boot"] = serde_json::Value::Null;
    *keeper.kept.lock() = Some(serde_json::from_value(last).unwrap());
    let again =
        |nexus| Setup { options: options(nexus, &keeper), ..Setup::default() }.of(disk.clone());
    let [mut a, mut b] = ["vm-a:0", "vm-b:0"].map(again);
    assert_eq!(write(&mut b), CONFLICT);
    out(&mut a, CLEAR, 0, 0xA, 0, 0).good();
    goes(write(&mut b));
}

#[test]
fn spc4_5_13_5_2_what_cannot_be_read_for_now_is_read_again_and_replaced_by_nobody() {
    let keeper = of(NotKnown::Unread);
    *keeper.kept.lock() = Some(held_by("vm-a:0"));
    let [mut a, mut b] = two(&keeper);
    keeps_out(&mut a, NOT_READY);
    assert_eq!(replace(&mut a, WRITE_EXCLUSIVE, 0).sense(), NOT_READY);
    *keeper.not_known.lock() = None;
    until(|| write(&mut b) == CONFLICT);
    asks_again(&mut a);
    goes(write(&mut a));
    assert_eq!(read(&mut b, 0)[8..], 7_u64.to_be_bytes());
}

#[test]
fn what_is_lost_may_be_mended_instead() {
    let keeper = of(NotKnown::Lost);
    let [mut a, mut b] = two(&keeper);
    keeps_out(&mut b, LOST);
    *keeper.kept.lock() = Some(held_by("vm-a:0"));
    *keeper.not_known.lock() = None;
    until(|| write(&mut b) == CONFLICT);
    asks_again(&mut a);
    goes(write(&mut a));
    assert_eq!(replace(&mut b, WRITE_EXCLUSIVE, 0).sense(), NOTHING_LOST);
}

#[test]
fn what_is_lost_is_replaced_once_that_is_kept_and_not_before() {
    let keeper = of(NotKnown::Lost);
    let [mut a, mut b] = two(&keeper);
    let list = [0u64.to_be_bytes(), 0xA_u64.to_be_bytes(), [0; 8]].concat();
    let list = Buffer::new(&list, 24);
    let mut task = Task::new(4);
    let cdb = [0x5F, REPLACE_LOST, WRITE_EXCLUSIVE, 0, 0, 0, 0, 0, 24, 0];
    task.prepare(&pad(&cdb), list.sg(), Buffer::new(&[], 1).sg());
    let disk = keeper.disk.lock();
    let mut outcome = a.lun.start(&mut task);
    assert_eq!(outcome, Outcome::Pending);
    let begun = Instant::now();
    while begun.elapsed() < Duration::from_millis(300) {
        keeps_out(&mut b, LOST);
    }
    let busy = Outcome::Done(Response::bare(Status::Busy));
    assert_eq!(replace(&mut b, WRITE_EXCLUSIVE, 0).outcome, busy);
    drop(disk);
    let mut done = Vec::with_capacity(1);
    until(|| {
        done.clear();
        assert_eq!(a.lun.poll(&mut done), 1);
        outcome = a.lun.resume(&mut task, done[0].result);
        outcome != Outcome::Pending
    });
    goes(outcome);
    [&mut a, &mut b].into_iter().for_each(asks_again);
    assert_eq!(write(&mut b), CONFLICT);
    goes(write(&mut a));
}

#[test]
fn what_was_thrown_away_is_not_good_because_anothers_is_kept() {
    let keeper = of(NotKnown::Lost);
    let [mut a, mut b] = two(&keeper);
    let list = [0u64.to_be_bytes(), 0xA_u64.to_be_bytes(), [0; 8]].concat();
    let list = Buffer::new(&list, 24);
    let mut task = Task::new(4);
    let cdb = [0x5F, REPLACE_LOST, WRITE_EXCLUSIVE, 0, 0, 0, 0, 0, 24, 0];
    task.prepare(&pad(&cdb), list.sg(), Buffer::new(&[], 1).sg());
    let disk = keeper.disk.lock();
    let mut outcome = a.lun.start(&mut task);
    assert_eq!(outcome, Outcome::Pending);
    keeper.fails.store(true, Ordering::Relaxed);
    drop(disk);
    let busy = Outcome::Done(Response::bare(Status::Busy));
    until(|| replace(&mut b, WRITE_EXCLUSIVE, 0).outcome != busy);
    keeper.fails.store(false, Ordering::Relaxed);
    replace(&mut b, WRITE_EXCLUSIVE, 0).good();
    let mut done = Vec::with_capacity(1);
    until(|| {
        done.clear();
        assert_eq!(a.lun.poll(&mut done), 1);
        outcome = a.lun.resume(&mut task, done[0].result);
        outcome != Outcome::Pending
    });
    let Outcome::Done(response) = outcome else { panic!("{outcome:?}") };
    assert_eq!(response.status, Status::CheckCondition);
    [&mut a, &mut b].into_iter().for_each(asks_again);
    assert_eq!(write(&mut a), CONFLICT);
    goes(write(&mut b));
}

#[test]
fn what_cannot_be_kept_replaces_nothing() {
    let keeper = of(NotKnown::Lost);
    let [mut a, mut b] = two(&keeper);
    keeper.fails.store(true, Ordering::Relaxed);
    for _ in 0..2 {
        assert_eq!(replace(&mut a, WRITE_EXCLUSIVE, 0).sense(), (0x4, 0x4400));
        keeps_out(&mut a, LOST);
    }
    // A kill in between leaves it lost, too.
    let disk = a.disk.clone();
    drop((a, b));
    let again =
        |nexus| Setup { options: options(nexus, &keeper), ..Setup::default() }.of(disk.clone());
    let mut a;
    [a, b] = ["vm-a:0", "vm-b:0"].map(again);
    keeps_out(&mut b, LOST);
    keeper.fails.store(false, Ordering::Relaxed);
    replace(&mut b, WRITE_EXCLUSIVE, 0).good();
    [&mut a, &mut b].into_iter().for_each(asks_again);
    assert_eq!(write(&mut a), CONFLICT);
    goes(write(&mut b));
}

#[test]
fn who_takes_over_from_another_program_and_cannot_read_what_that_did_lets_nobody_in() {
    let keeper: Arc<Keeper> = Arc::default();
    let [mut a, b] = two(&keeper);
    out(&mut a, REGISTER, 0, 0, 0xB, 0).good();
    let disk = a.disk.clone();
    drop((a, b));
    let _early = early(&disk, "vm-a:0", &keeper);
    *keeper.not_known.lock() = Some(NotKnown::Lost);
    let again = |nexus| {
        Setup { options: options(nexus, &keeper), ..Setup::default() }.fresh_of(disk.clone())
    };
    let [mut a, mut b] = ["vm-a:0", "vm-b:0"].map(again);
    for unit in [&mut a, &mut b] {
        assert_eq!(unit.run(&[0; 6]).sense(), (0x6, 0x2900));
    }
    keeps_out(&mut b, LOST);
    keeps_out(&mut a, LOST);
    replace(&mut b, WRITE_EXCLUSIVE, 0).good();
    asks_again(&mut a);
    assert_eq!(write(&mut a), CONFLICT);
    assert_eq!(read(&mut a, 0)[4..], [&[0, 0, 0, 8][..], &0xA_u64.to_be_bytes()].concat());
}

/// What becomes of a record while the target serves.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Spoiled {
    Damaged,
    Removed,
    /// For now only.
    Unread,
}

impl Spoiled {
    const ALL: [Spoiled; 3] = [Spoiled::Damaged, Spoiled::Removed, Spoiled::Unread];

    fn at(self, keeper: &Keeper) {
        *keeper.not_known.lock() = match self {
            Spoiled::Damaged => Some(NotKnown::Lost),
            Spoiled::Removed => None,
            Spoiled::Unread => Some(NotKnown::Unread),
        };
        if self == Spoiled::Removed {
            *keeper.kept.lock() = None;
        }
    }
}

#[test]
fn what_is_known_since_a_restart_stays_so_and_is_kept_anew_when_a_vm_boots() {
    for spoiled in Spoiled::ALL {
        let keeper: Arc<Keeper> = Arc::default();
        *keeper.kept.lock() = Some(held_by("vm-a:0"));
        let [mut a, mut b] = two(&keeper);
        for times in 1..3 {
            spoiled.at(&keeper);
            let mut booted = b.another();
            assert_eq!(booted.run(&[0; 6]).sense(), (0x6, 0x2900));
            assert_eq!(write(&mut booted), CONFLICT, "{spoiled:?}");
            assert_eq!(write(&mut b), CONFLICT, "{spoiled:?}");
            goes(write(&mut a));
            let is_anew = spoiled != Spoiled::Unread;
            assert_eq!(keeper.spoiled.load(Ordering::Relaxed), u32::from(is_anew) * times);
            assert_eq!(keeper.not_known.lock().is_none(), is_anew);
        }
        *keeper.not_known.lock() = None;
        let disk = a.disk.clone();
        drop((a, b));
        let again =
            |nexus| Setup { options: options(nexus, &keeper), ..Setup::default() }.of(disk.clone());
        let [mut a, mut b] = ["vm-a:0", "vm-b:0"].map(again);
        assert_eq!(write(&mut b), CONFLICT, "{spoiled:?}");
        goes(write(&mut a));
    }
}

#[test]
fn a_volume_without_a_record_goes_on_whatever_opens_when_a_vm_boots() {
    for spoiled in Spoiled::ALL {
        let keeper: Arc<Keeper> = Arc::default();
        let [mut a, b] = two(&keeper);
        spoiled.at(&keeper);
        let mut booted = b.another();
        assert_eq!(booted.run(&[0; 6]).sense(), (0x6, 0x2900));
        goes(write(&mut booted));
        goes(write(&mut a));
    }
}

#[test]
fn what_was_changed_here_counts_whatever_can_be_read() {
    let keeper: Arc<Keeper> = Arc::default();
    let [mut a, mut b] = two(&keeper);
    out(&mut a, REGISTER, 0, 0, 0xA, 0).good();
    *keeper.not_known.lock() = Some(NotKnown::Lost);
    let _again = b.another();
    goes(write(&mut b));
}

/// How often the initiators of a unit were told to ask for its parameters.
#[derive(Default)]
struct Told(AtomicU32);

impl Transport for Told {
    fn parameters_changed(&self) {
        self.0.fetch_add(1, Ordering::Relaxed);
    }
}

/// `two`, of which b tells its initiators by that.
fn two_told(keeper: &Arc<Keeper>) -> ([Rig; 2], Arc<Told>) {
    let told: Arc<Told> = Arc::default();
    let a = Setup { options: options("vm-a:0", keeper), ..Setup::default() }.build();
    let transport: Option<Arc<dyn Transport>> = Some(told.clone());
    let b = a.another_unit(LunOptions { transport, ..options("vm-b:0", keeper) });
    ([a, b], told)
}

const READ_CAPACITY: [u8; 10] = [0x25, 0, 0, 0, 0, 0, 0, 0, 0, 0];

#[test]
fn who_could_not_ask_for_the_capacity_is_told_to_ask_again_when_what_is_lost_is_replaced() {
    let keeper = of(NotKnown::Lost);
    let ([mut a, mut b], told) = two_told(&keeper);
    assert_eq!(b.input(&READ_CAPACITY, 8).sense(), LOST);
    keeper.fails.store(true, Ordering::Relaxed);
    assert_eq!(replace(&mut a, WRITE_EXCLUSIVE, 0).sense(), (0x4, 0x4400));
    assert_eq!(told.0.load(Ordering::Relaxed), 0);
    keeper.fails.store(false, Ordering::Relaxed);
    replace(&mut a, WRITE_EXCLUSIVE, 0).good();
    assert_eq!(told.0.load(Ordering::Relaxed), 1);
    asks_again(&mut b);
    b.input(&READ_CAPACITY, 8).good();
    asks_again(&mut a);
    out(&mut a, REGISTER, 0, 0xA, 0xB, 0).good();
    assert_eq!(told.0.load(Ordering::Relaxed), 1);
}

#[test]
fn who_asks_nothing_any_more_is_told_when_the_record_is_mended_or_removed() {
    for (not_known, mended) in [
        (NotKnown::Lost, Some(held_by("vm-a:0"))),
        (NotKnown::Lost, None),
        (NotKnown::Unread, Some(held_by("vm-a:0"))),
    ] {
        let keeper = of(not_known);
        let ([a, mut b], told) = two_told(&keeper);
        assert_eq!(a.shared.reservations_not_known(), Some(not_known));
        std::thread::sleep(Duration::from_millis(1500));
        assert_eq!(told.0.load(Ordering::Relaxed), 0);
        let reserved = mended.is_some();
        *keeper.kept.lock() = mended;
        *keeper.not_known.lock() = None;
        until(|| told.0.load(Ordering::Relaxed) == 1);
        assert_eq!(a.shared.reservations_not_known(), None);
        asks_again(&mut b);
        assert_eq!(write(&mut b) == CONFLICT, reserved);
    }
}

#[test]
fn who_knows_the_capacity_keeps_it_and_is_told_by_the_transport_alone() {
    let keeper = of(NotKnown::Lost);
    let told: Arc<Told> = Arc::default();
    let disk = Setup::default().build().disk.clone();
    let transport: Option<Arc<dyn Transport>> = Some(told.clone());
    let options = LunOptions { transport, ..options("vm-b:0", &keeper) };
    let shared = scsi::LunShared::new(disk, options).unwrap();
    let state = scsi::NexusState { seen_us: 7, ..scsi::NexusState::default() };
    let nexus = shared.connect_as(state);
    *keeper.not_known.lock() = None;
    until(|| told.0.load(Ordering::Relaxed) == 1);
    assert_eq!(nexus.state(), state);
}

#[test]
fn who_could_not_ask_the_process_before_is_told_by_one_that_knows() {
    for removable in [false, true] {
        let keeper = of(NotKnown::Lost);
        let disk = Setup::default().build().disk.clone();
        let unit = |told: &Arc<Told>| {
            let transport: Option<Arc<dyn Transport>> = Some(told.clone());
            let options = LunOptions { transport, removable, ..options("vm-b:0", &keeper) };
            scsi::LunShared::new(disk.clone(), options).unwrap()
        };
        let told: Arc<Told> = Arc::default();
        let first = unit(&told);
        let state = first.connect().state();
        assert!(state.could_not_ask);
        drop(first);
        // It knows no more, and says so to the one after it, even where it has told in the last moment.
        let second = unit(&told);
        let nexus = second.connect_as(scsi::NexusState { attentions: 0, ..state });
        assert_eq!((nexus.state().attentions, told.0.load(Ordering::Relaxed)), (0, 0));
        *keeper.not_known.lock() = None;
        until(|| told.0.load(Ordering::Relaxed) == 1);
        let state = nexus.state();
        assert!(state.could_not_ask);
        drop((nexus, second));
        let third = unit(&told);
        let nexus = third.connect_as(scsi::NexusState { attentions: 0, ..state });
        assert_eq!(told.0.load(Ordering::Relaxed), 2);
        let capacity_changed = scsi::UnitAttention::CapacityChanged as u32;
        assert_eq!(nexus.state().attentions, if removable { 0 } else { capacity_changed });
        assert!(!nexus.state().could_not_ask);
        drop((nexus, third));
        // Nor is anybody told who knows the capacity, or was not kept from asking.
        let fourth = unit(&told);
        for state in [scsi::NexusState { seen_us: 7, ..state }, scsi::NexusState::default()] {
            let could_not_ask = false;
            let nexus = fourth.connect_as(scsi::NexusState { could_not_ask, ..state });
            assert_eq!(
                nexus.state().attentions & capacity_changed,
                state.attentions & capacity_changed
            );
        }
        assert_eq!(told.0.load(Ordering::Relaxed), 2);
    }
}

#[test]
fn what_is_read_while_nobody_asks_is_read_again_when_a_session_begins() {
    let keeper = of(NotKnown::Unread);
    let first = Setup { options: options("vm-a:0", &keeper), ..Setup::default() }.build();
    let disk = first.disk.clone();
    drop(first);
    // As in a program that is about to take over from one that still serves.
    let unit = early(&disk, "vm-b:0", &keeper);
    *keeper.not_known.lock() = None;
    until(|| unit.reservations_not_known().is_none());
    *keeper.kept.lock() = Some(held_by("vm-a:0"));
    let again =
        |nexus| Setup { options: options(nexus, &keeper), ..Setup::default() }.of(disk.clone());
    let [mut a, mut b] = ["vm-a:0", "vm-b:0"].map(again);
    assert_eq!(write(&mut b), CONFLICT);
    goes(write(&mut a));
}

#[test]
fn what_is_read_while_nobody_asks_stays_known_when_a_vm_boots() {
    for spoiled in Spoiled::ALL {
        let keeper = of(NotKnown::Unread);
        let [mut a, mut b] = two(&keeper);
        *keeper.kept.lock() = Some(held_by("vm-a:0"));
        *keeper.not_known.lock() = None;
        // No command is refused meanwhile, which would have it read for a session.
        until(|| b.shared.reservations_not_known().is_none());
        spoiled.at(&keeper);
        let mut booted = b.another();
        assert_eq!(booted.run(&[0; 6]).sense(), (0x6, 0x2900));
        assert_eq!(write(&mut booted), CONFLICT, "{spoiled:?}");
        [&mut a, &mut b].into_iter().for_each(asks_again);
        assert_eq!(write(&mut b), CONFLICT, "{spoiled:?}");
        goes(write(&mut a));
    }
}

#[test]
fn without_a_keeper_nothing_is_lost() {
    let mut a = Rig::new();
    goes(write(&mut a));
    assert_eq!(replace(&mut a, WRITE_EXCLUSIVE, 0).sense(), NOTHING_LOST);
}

#[test]
fn what_has_no_cdb_is_kept_out_too() {
    for not_known in [NotKnown::Unread, NotKnown::Lost] {
        let [mut a, _] = two(&of(not_known));
        for op in [Op::Read, Op::Write, Op::Flush, Op::Unmap, Op::WriteZeroes] {
            plain(&mut a.lun, op);
        }
        assert_eq!(a.asked(), []);
    }
}

#[track_caller]
fn plain(lun: &mut Lun, op: Op) {
    let (data, mut task) = (Buffer::new(&[0; 512], 512), Task::new(5));
    task.prepare_plain(scsi::Plain { op, durable: false, lba: 0, blocks: 1 }, data.sg(), data.sg());
    let Outcome::Done(response) = lun.start(&mut task) else { panic!("{op:?} goes") };
    assert_eq!(response.status, Status::CheckCondition, "{op:?}");
}

/// What was kept of a reservation that everybody's writes but this nexus' meet, registered with the key 7.
fn held_by(nexus: &str) -> scsi::KeptReservations {
    let kept = serde_json::json!({
        "reservations": {
            "generation": 3,
            "registrants": [{"nexus": nexus, "key": 7}],
            "held": {"by": nexus, "kind": "write-exclusive"},
            "persist": true,
        },
        "boot": null,
    });
    serde_json::from_value(kept).unwrap()
}
