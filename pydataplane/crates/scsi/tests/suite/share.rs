//! Copies of which a disk shares whole clusters with the source instead of moving their data.

use crate::copy::{ABORTED, NOT_REACHABLE, cdb, copy, cscd, list, segment, status};
use crate::rig::*;
use crate::token::{REVOKED, ended, token, write_list};
use crate::unit::{BLOCKS, DEADLINE, Held, Unit, disk, medium, on, two_of};
use bdev::{
    Bdev, Channel, Features, Geometry, IoError, Op, OpenError, Shared, Sharing, SyncChannel,
};
use reactor::IoContext;
use scsi::{Outcome, Response, Status, Task};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::mpsc::{Receiver, SyncSender, sync_channel};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};
use uuid::Uuid;

pub const CLUSTER: u64 = 128;

/// What a share meets before it is asked whether it is still wanted.
pub type Amid = Box<dyn FnMut() + Send>;

/// A disk that shares whole clusters with one other, and with itself. Without several owners of them: it has them copied
/// by itself.
pub struct Sharer {
    disk: Arc<dyn Bdev>,
    source: Arc<dyn Bdev>,
    /// What one share does at most, in blocks; 0: it is not possible. Or it fails.
    most: Result<u64, IoError>,
    /// How many shares are possible.
    shares: AtomicUsize,
    amid: Mutex<Amid>,
    /// First block of the source, first block, and blocks of each share.
    asked: Mutex<Vec<(u64, u64, u64)>>,
}

impl Sharer {
    fn new(source: &Arc<dyn Bdev>, most: Result<u64, IoError>, amid: Amid) -> Arc<Self> {
        Sharer::on(disk(1), source, most, amid)
    }

    pub fn on(
        disk: Arc<dyn Bdev>,
        source: &Arc<dyn Bdev>,
        most: Result<u64, IoError>,
        amid: Amid,
    ) -> Arc<Self> {
        let (source, amid, asked) = (Arc::clone(source), Mutex::new(amid), Mutex::default());
        let shares = AtomicUsize::new(usize::MAX);
        Arc::new(Sharer { disk, source, most, shares, amid, asked })
    }

    pub fn asked(&self) -> Vec<(u64, u64, u64)> {
        self.asked.lock().unwrap().clone()
    }
}

impl Sharing for Sharer {
    fn part(
        &self,
        from: &Arc<dyn Bdev>,
        from_lba: u64,
        lba: u64,
        blocks: u64,
    ) -> Option<(u64, u64)> {
        let known = [self.source.uuid(), self.uuid()].contains(&from.uuid());
        if !known || from_lba % CLUSTER != lba % CLUSTER {
            return None;
        }
        let before = lba.next_multiple_of(CLUSTER) - lba;
        let whole = blocks.checked_sub(before)? / CLUSTER * CLUSTER;
        (whole > 0).then_some((before, whole))
    }

    fn share(
        &self,
        from: &Arc<dyn Bdev>,
        from_lba: u64,
        lba: u64,
        blocks: u64,
        still: Box<dyn FnOnce() -> bool + Send>,
    ) -> Result<Shared, IoError> {
        assert_eq!(self.part(from, from_lba, lba, blocks), Some((0, blocks)));
        self.asked.lock().unwrap().push((from_lba, lba, blocks));
        (self.amid.lock().unwrap())();
        let count = self.most?.min(blocks);
        let less = |shares: usize| shares.checked_sub(1);
        let possible = self.shares.fetch_update(Ordering::Relaxed, Ordering::Relaxed, less);
        if count == 0 || possible.is_err() {
            return Ok(Shared::Not);
        }
        if !still() {
            return Ok(Shared::Cancelled);
        }
        let mut data = vec![0; count as usize * 512];
        // As it is itself: what the copy reads is told.
        let from = if from.uuid() == self.uuid() { &self.disk } else { &self.source };
        SyncChannel::open(&**from).unwrap().read(from_lba, &mut data).unwrap();
        SyncChannel::open(&*self.disk).unwrap().write(lba, &data).unwrap();
        Ok(Shared::Done(count))
    }
}

impl Bdev for Sharer {
    fn name(&self) -> &str {
        self.disk.name()
    }
    fn aliases(&self) -> Vec<String> {
        Vec::new()
    }
    fn uuid(&self) -> Uuid {
        self.disk.uuid()
    }
    fn product_name(&self) -> &'static str {
        self.disk.product_name()
    }
    fn geometry(&self) -> Geometry {
        self.disk.geometry()
    }
    fn features(&self) -> Features {
        self.disk.features()
    }
    fn open(&self, io: &IoContext) -> Result<Box<dyn Channel>, OpenError> {
        self.disk.open(io)
    }
    fn driver_specific(&self) -> serde_json::Value {
        serde_json::Value::Null
    }
    fn sharing(&self) -> Option<&dyn Sharing> {
        Some(self)
    }
}

/// A source, and a disk that shares with it, on one controller; what is read and written of each is told.
struct Pair {
    sharer: Arc<Sharer>,
    held: [Arc<Held>; 2],
    units: [(Arc<dyn Bdev>, Unit); 2],
}

fn pair(most: Result<u64, IoError>, amid: Amid) -> Pair {
    let source = disk(0);
    let sharer = Sharer::new(&source, most, amid);
    let held = [Held::new(source), Held::new(sharer.clone())];
    held.iter().for_each(|held| held.let_go(u64::MAX));
    let units = two_of([held[0].clone(), held[1].clone()]);
    Pair { sharer, held, units }
}

/// Blocks that the threads that copy have read, or written.
fn moved(held: &Held, of: Op) -> Vec<(u64, u64)> {
    held.asked().into_iter().filter(|io| io.0 == of).map(|io| (io.1, io.2)).collect()
}

/// Of a copy of 1000 blocks, 28 lie before the first whole cluster and 76 behind the last one.
const FROM: u64 = 100;
const TO: u64 = FROM + 3 * CLUSTER;
const COUNT: u64 = 1000;
const SHARED: (u64, u64, u64) = (128, 512, 7 * CLUSTER);
const TAIL: u64 = 512 + 7 * CLUSTER;

fn order(units: &[(Arc<dyn Bdev>, Unit); 2]) -> Vec<u8> {
    let cscds = [cscd(&units[0].0, false), cscd(&units[1].0, false)];
    list(&cscds, &[segment((0, FROM), (1, TO), COUNT as u16)])
}

/// What the second disk has then.
fn copied(units: &[(Arc<dyn Bdev>, Unit); 2], blocks: u64) -> Vec<u8> {
    let mut expected = medium(&units[1].0);
    let bytes = |lba: u64| lba as usize * 512..(lba + blocks) as usize * 512;
    expected[bytes(TO)].copy_from_slice(&medium(&units[0].0)[bytes(FROM)]);
    expected
}

#[test]
fn whole_clusters_are_shared_and_what_lies_before_and_behind_is_copied() {
    // All at once, and a part at a time.
    for most in [BLOCKS, 3 * CLUSTER] {
        let Pair { sharer, held, mut units } = pair(Ok(most), Box::new(|| ()));
        let (order, expected) = (order(&units), copied(&units, COUNT));
        copy(&mut units[0].1, &order).good();
        assert!(medium(&units[1].0) == expected);
        let (from, to, all) = SHARED;
        let steps: Vec<_> = (0..all)
            .step_by(most as usize)
            .map(|done| (from + done, to + done, all - done))
            .collect();
        assert_eq!(sharer.asked(), steps);
        assert_eq!(moved(&held[0], Op::Read), [(FROM, 28), (FROM + 28 + all, 76)]);
        assert_eq!(moved(&held[1], Op::Write), [(TO, 28), (TAIL, 76)]);
        // TRANSFER COUNT: 1000 blocks, in bytes.
        let told = status(&mut units[0].1, 9);
        assert_eq!(told.good()[8..12], (COUNT as u32 * 512).to_be_bytes());
    }
}

#[test]
fn what_cannot_be_shared_now_is_copied() {
    let Pair { sharer, held, mut units } = pair(Ok(0), Box::new(|| ()));
    let (order, expected) = (order(&units), copied(&units, COUNT));
    copy(&mut units[0].1, &order).good();
    assert!(medium(&units[1].0) == expected);
    assert_eq!(sharer.asked(), [SHARED]);
    let written: u64 = moved(&held[1], Op::Write).iter().map(|(_, blocks)| blocks).sum();
    assert_eq!(written, COUNT);
}

/// Within a disk, to behind what is read, which a copy begins with the end of.
#[test]
fn what_a_share_leaves_is_copied_in_whichever_order_that_is_done() {
    for (from, to) in [(0, 8 * CLUSTER), (8 * CLUSTER, 0)] {
        let Pair { sharer, mut units, .. } = pair(Ok(CLUSTER), Box::new(|| ()));
        sharer.shares.store(1, Ordering::Relaxed);
        let cscds = [cscd(&units[1].0, false)];
        let order = list(&cscds, &[segment((0, from), (0, to), 4 * CLUSTER as u16)]);
        let mut expected = medium(&units[1].0);
        let bytes = |lba: u64| lba as usize * 512..(lba + 4 * CLUSTER) as usize * 512;
        expected.copy_within(bytes(from), bytes(to).start);
        copy(&mut units[1].1, &order).good();
        assert_eq!(
            sharer.asked(),
            [(from, to, 4 * CLUSTER), (from + CLUSTER, to + CLUSTER, 3 * CLUSTER)]
        );
        assert!(medium(&units[1].0) == expected, "from {from} to {to}");
    }
}

#[test]
fn of_a_share_that_fails_the_initiator_is_told_and_nothing_behind_it_is_copied() {
    let Pair { held, mut units, .. } = pair(Err(IoError::WriteMedium), Box::new(|| ()));
    let (order, expected) = (order(&units), copied(&units, 28));
    assert_eq!(copy(&mut units[0].1, &order).sense(), ABORTED);
    assert!(medium(&units[1].0) == expected);
    assert_eq!(moved(&held[1], Op::Write), [(TO, 28)]);
}

#[test]
fn nothing_is_shared_of_a_source_that_is_replaced_or_that_somebody_else_has_for_himself() {
    for replaced in [true, false] {
        let Pair { sharer, mut units, .. } = pair(Ok(BLOCKS), Box::new(|| ()));
        let cscds = [cscd(&units[0].0, false), cscd(&units[1].0, false)];
        // Nothing else than what is shared.
        let order = list(&cscds, &[segment((0, 0), (1, CLUSTER), CLUSTER as u16)]);
        let before = medium(&units[1].0);
        let mut holder = Unit::new(&units[0].0, on("holder:0"));
        if replaced {
            let token = token(&mut units[0].1, &[(0, CLUSTER as u32)]);
            units[0].1.shared.set_replaced(true);
            let using = write_list(0, 0, &token, &[(CLUSTER, CLUSTER as u32)]);
            assert_eq!(crate::token::write(&mut units[1].1, 2, &using).sense(), (0x5, 0x2304));
        } else {
            let keys = |key: u64, new: u64| [key.to_be_bytes(), new.to_be_bytes(), [0; 8]].concat();
            holder.io(&[0x5F, 0, 0, 0, 0, 0, 0, 0, 24, 0], &keys(0, 1), 0).good();
            holder.io(&[0x5F, 1, 3, 0, 0, 0, 0, 0, 24, 0], &keys(1, 0), 0).good();
        }
        assert_eq!(copy(&mut units[1].1, &order).sense(), NOT_REACHABLE);
        assert!(medium(&units[1].0) == before);
        assert_eq!(sharer.asked(), []);
    }
}

/// Has a share wait: the first end is told that it does, and lets it go on.
fn waits() -> (Amid, Receiver<()>, SyncSender<()>) {
    let ((tell, told), (let_go, go)) = (sync_channel(1), sync_channel(1));
    let amid = move || {
        // Those after the first one do not wait.
        if tell.send(()).is_ok() {
            _ = go.recv_timeout(DEADLINE);
        }
    };
    (Box::new(amid), told, let_go)
}

/// Begins a copy and comes back when its share waits.
fn until_shared(
    unit: &mut Unit,
    command: &[u8; 16],
    list: &[u8],
    told: &Receiver<()>,
) -> (Box<Task>, Buffer) {
    let (mut task, out) = unit.begin(1, command, list);
    // The thread that copies begins with the task's next turns.
    let mut done = Vec::with_capacity(1);
    let begun = Instant::now();
    while told.try_recv().is_err() {
        assert!(begun.elapsed() < DEADLINE, "nothing is shared");
        done.clear();
        unit.lun.poll(&mut done);
        for of in &done {
            assert_eq!(unit.lun.resume(&mut task, of.result), Outcome::Pending);
        }
    }
    (task, out)
}

#[test]
fn of_a_token_that_is_revoked_amid_a_share_nothing_is_shared() {
    let (amid, told, let_go) = waits();
    let Pair { sharer, held, mut units } = pair(Ok(BLOCKS), amid);
    let token = token(&mut units[0].1, &[(0, 4 * CLUSTER as u32)]);
    let using = write_list(0, 0, &token, &[(CLUSTER, 4 * CLUSTER as u32)]);
    let before = medium(&units[1].0);
    let mut command = cdb16(0x83, 0x11, 0, using.len() as u32);
    command[9] = 2;
    let (mut task, _out) = until_shared(&mut units[1].1, &command, &using, &told);
    units[0].1.io(&cdb10(0x2A, 0, 3 * CLUSTER as u32, 1), &[0x77; 512], 0).good();
    let_go.send(()).unwrap();
    let outcome = units[1].1.until_over(&mut task, Outcome::Pending);
    assert_eq!(Answer { outcome, data: Vec::new() }.sense(), REVOKED);
    assert!(medium(&units[1].0) == before);
    assert_eq!(sharer.asked(), [(0, CLUSTER, 4 * CLUSTER)]);
    assert_eq!(moved(&held[1], Op::Write), []);
    assert_eq!(ended(&mut units[1].1, 2)[16..24], [0; 8], "blocks that were copied");
}

#[test]
fn a_copy_that_is_aborted_or_reset_amid_a_share_ends_with_it() {
    for reset in [None, Some(0), Some(1)] {
        let (amid, told, let_go) = waits();
        let Pair { held, mut units, .. } = pair(Ok(BLOCKS), amid);
        let (order, before) = (order(&units), copied(&units, 28));
        let after = copied(&units, COUNT - 76);
        let (mut task, _out) = until_shared(&mut units[0].1, &cdb(order.len()), &order, &told);
        match reset {
            None => {
                task.abort();
                // The thread knows it before its share ends.
                let mut done = Vec::with_capacity(1);
                assert_eq!(units[0].1.lun.poll(&mut done), 1);
                let outcome = units[0].1.lun.resume(&mut task, done[0].result);
                assert_eq!(outcome, Outcome::Pending);
            }
            Some(unit) => units[unit].1.shared.reset(),
        }
        let_go.send(()).unwrap();
        let outcome = units[0].1.until_over(&mut task, Outcome::Pending);
        assert_eq!(outcome, Outcome::Done(Response::bare(Status::TaskAborted)), "{reset:?}");
        let now = medium(&units[1].0);
        assert!(now == before || now == after, "{reset:?}: the share was done or not");
        assert_eq!(moved(&held[1], Op::Write), [(TO, 28)], "{reset:?}");
    }
}

#[test]
fn a_unit_is_there_until_a_share_of_it_is_over() {
    for detached in [0, 1] {
        let (amid, told, let_go) = waits();
        let Pair { mut units, .. } = pair(Ok(BLOCKS), amid);
        let (order, whole) = (order(&units), copied(&units, COUNT));
        let (mut task, _out) = until_shared(&mut units[0].1, &cdb(order.len()), &order, &told);
        let shared = Arc::clone(&units[detached].1.shared);
        let (gone, is_gone) = sync_channel(1);
        let detaching = std::thread::spawn(move || {
            shared.set_replaced(true);
            gone.send(()).unwrap();
        });
        let early = is_gone.recv_timeout(Duration::from_millis(20));
        assert!(early.is_err(), "it went amid the share");
        let part = copied(&units, COUNT - 76);
        let_go.send(()).unwrap();
        let outcome = units[0].1.until_over(&mut task, Outcome::Pending);
        detaching.join().unwrap();
        // Whoever is faster: what is behind the share was copied before it went, or is not.
        match outcome {
            Outcome::Done(Response { status: Status::Good, .. }) => {
                assert!(medium(&units[1].0) == whole);
            }
            _ => {
                assert_eq!(Answer { outcome, data: Vec::new() }.sense(), NOT_REACHABLE);
                assert!(medium(&units[1].0) == part);
            }
        }
    }
}
