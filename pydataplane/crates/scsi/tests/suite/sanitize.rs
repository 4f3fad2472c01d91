//! SANITIZE (SBC-3 4.11, 5.22), on a disk with channels of its own.

use crate::rig::*;
use crate::unit::{DEADLINE, Unit};
use bdev::testing::{Holes, Wrap, Wrapped};
use bdev::{Bdev, Features, Malloc, MallocOptions, SyncChannel};
use parking_lot::{Mutex, MutexGuard};
use scsi::{LunOptions, Outcome, Record, RecordKeeper, Status, Task};
use std::io;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};
use uuid::Uuid;

pub const BLOCKS: u64 = 4096;
const IN_PROGRESS: (u8, u16) = (0x2, 0x041B);
pub const FORMAT_IN_PROGRESS: (u8, u16) = (0x2, 0x0404);
const FAILED: (u8, u16) = (0x3, 0x3103);
pub const KEPT_NOT: (u8, u16) = (0x4, 0x4400);
pub const LIST_FIELD: (u8, u16) = (0x5, 0x2600);
pub const ERASE: [u8; 10] = [0x48, 0x02, 0, 0, 0, 0, 0, 0, 0, 0];
pub const EXIT: [u8; 10] = [0x48, 0x1F, 0, 0, 0, 0, 0, 0, 0, 0];
const IMMED: u8 = 0x80;
const AUSE: u8 = 0x20;

/// Keeps in memory; nothing is begun while somebody has `gate`.
#[derive(Default)]
pub struct Keeper {
    pub text: Mutex<Option<String>>,
    pub gate: Arc<Mutex<()>>,
    pub fails_to_keep: AtomicBool,
    pub fails_to_forget: AtomicBool,
}

/// Another process that has it.
struct Held(Arc<Mutex<()>>);

impl Drop for Held {
    fn drop(&mut self) {
        // SAFETY: the guard was forgotten in `lock`.
        unsafe { self.0.force_unlock() }
    }
}

impl RecordKeeper for Keeper {
    fn keep(&self, record: Record, _: Uuid, text: Option<&str>) -> io::Result<()> {
        assert_eq!(record, Record::Sanitize);
        let fails = if text.is_some() { &self.fails_to_keep } else { &self.fails_to_forget };
        if fails.load(Ordering::Relaxed) {
            return Err(io::Error::other("no room"));
        }
        *self.text.lock() = text.map(str::to_owned);
        Ok(())
    }

    fn kept(&self, record: Record, _: Uuid) -> io::Result<Option<String>> {
        let text = (record == Record::Sanitize).then(|| self.text.lock().clone());
        Ok(text.flatten())
    }

    fn lock(&self, _: Record, _: Uuid) -> io::Result<Box<dyn Send>> {
        std::mem::forget(self.gate.lock());
        Ok(Box::new(Held(Arc::clone(&self.gate))))
    }
}

/// A unit whose records are kept.
pub fn kept_unit(disk: &Arc<dyn Bdev>, keeper: &Arc<Keeper>, options: LunOptions) -> Unit {
    let records: Arc<dyn RecordKeeper> = keeper.clone();
    Unit::new(disk, LunOptions { records: Some(records), ..options })
}

/// Until the unit is as before, or what it answers instead.
pub fn settled(unit: &mut Unit) -> Option<(u8, u16)> {
    let begun = Instant::now();
    loop {
        let answer = unit.run(&[0; 6]).response();
        let said = (answer.status != Status::Good).then(|| key_code(&answer.sense));
        if !matches!(said, Some(IN_PROGRESS | FORMAT_IN_PROGRESS)) {
            return said;
        }
        assert!(begun.elapsed() < DEADLINE, "it does not end");
        std::thread::sleep(Duration::from_millis(1));
    }
}

/// A disk that tells what it has: all but the blocks 100 to 199, and ten more.
pub fn disk() -> Arc<dyn Bdev> {
    let name = Uuid::new_v4().to_string();
    let options = MallocOptions {
        name,
        block_size: 512,
        physical_block_size: 0,
        num_blocks: BLOCKS,
        uuid: None,
    };
    let disk: Arc<dyn Bdev> = Holes::new(Malloc::create(options).unwrap(), &[100..200, 300..310]);
    let mut channel = SyncChannel::open(&*disk).unwrap();
    channel.write(0, &[0xA5; 100 * 512]).unwrap();
    channel.write(200, &[0xA5; 100 * 512]).unwrap();
    channel.write(310, &vec![0xA5; (BLOCKS as usize - 310) * 512]).unwrap();
    disk
}

pub fn medium(disk: &Arc<dyn Bdev>) -> Vec<u8> {
    let mut data = vec![0; BLOCKS as usize * 512];
    SyncChannel::open(&**disk).unwrap().read(0, &mut data).unwrap();
    data
}

pub fn unit() -> (Arc<dyn Bdev>, Arc<Keeper>, Unit) {
    let (disk, keeper) = (disk(), Arc::default());
    let unit = kept_unit(&disk, &keeper, LunOptions::default());
    (disk, keeper, unit)
}

/// Its CDB for a parameter list, which it has: header and pattern.
fn overwrite(flags: u8, pattern: &[u8]) -> ([u8; 10], Vec<u8>) {
    let length = (4 + pattern.len() as u16).to_be_bytes();
    let of_pattern = (pattern.len() as u16).to_be_bytes();
    let cdb = [0x48, 0x01, 0, 0, 0, 0, 0, length[0], length[1], 0];
    (cdb, [&[flags, 0, of_pattern[0], of_pattern[1]], pattern].concat())
}

#[test]
fn what_was_erased_is_gone_and_what_is_written_then_stays() {
    let (disk, keeper, mut unit) = unit();
    unit.run(&ERASE).good();
    assert_eq!(medium(&disk), vec![0; BLOCKS as usize * 512]);
    assert_eq!(*keeper.text.lock(), None);
    unit.io(&cdb10(0x2A, 0, 5, 1), &[7; 512], 0).good();
    // Not even after a restart.
    drop(unit);
    let mut unit = kept_unit(&disk, &keeper, LunOptions::default());
    assert_eq!(unit.io(&cdb10(0x28, 0, 5, 1), &[], 512).good(), [7; 512]);
}

#[test]
fn each_block_begins_with_the_pattern() {
    let (disk, _, mut unit) = unit();
    for (flags, expected) in [(0x01, [1, 2, 3]), (0x83, [1, 2, 3]), (0x82, [0xFE, 0xFD, 0xFC])] {
        let (cdb, list) = overwrite(flags, &[1, 2, 3]);
        unit.io(&cdb, &list, 0).good();
        for block in medium(&disk).chunks(512) {
            assert!(block.iter().zip(expected.iter().cycle()).all(|(a, b)| a == b));
        }
    }
    // Blocks of the unit's size, which is not the disk's.
    let options = LunOptions { block_size: Some(4096), ..LunOptions::default() };
    let keeper = Arc::default();
    drop(unit);
    let mut unit = kept_unit(&disk, &keeper, options);
    let pattern: Vec<u8> = (0..4096u32).map(|at| (at / 512) as u8).collect();
    let (cdb, list) = overwrite(1, &pattern);
    unit.io(&cdb, &list, 0).good();
    assert!(medium(&disk).chunks(4096).all(|block| block == pattern));
}

#[test]
fn sbc3_4_11_2_nothing_else_is_done_while_it_runs() {
    let (disk, keeper, mut unit) = unit();
    let mut other = kept_unit(&disk, &keeper, LunOptions::default());
    let held: MutexGuard<()> = keeper.gate.lock();
    let nothing = Buffer::new(&[], 1);
    let mut erase = Task::new(8);
    erase.prepare(&pad(&ERASE), nothing.sg(), nothing.sg());
    assert_eq!(unit.lun.start(&mut erase), Outcome::Pending);
    let refused: [&[u8]; 6] = [
        &[0; 6],
        &cdb10(0x28, 0, 0, 1),
        &cdb10(0x25, 0, 0, 0),
        &[0x1B, 0, 0, 0, 1, 0],
        &ERASE,
        &EXIT,
    ];
    for cdb in refused {
        let answer = other.io(cdb, &[], 512);
        assert_eq!(answer.sense(), IN_PROGRESS, "{cdb:x?}");
        assert_eq!(answer.response().sense[15..18], [0x80, 0, 0]);
    }
    assert_eq!(key_code(other.io(&[3, 0, 0, 0, 18, 0], &[], 18).good()), IN_PROGRESS);
    other.io(&[0x12, 0, 0, 0, 96, 0], &[], 96).good();
    // A reset ends the command that waits, not what it began.
    unit.shared.reset();
    let mut done = Vec::with_capacity(4);
    assert_eq!(unit.lun.poll(&mut done), 1);
    let Outcome::Done(ended) = unit.lun.resume(&mut erase, Ok(())) else { panic!("it goes on") };
    assert_eq!(key_code(&ended.sense), IN_PROGRESS);
    drop(held);
    for unit in [&mut other, &mut unit] {
        assert_eq!((settled(unit), settled(unit)), (Some((0x6, 0x2900)), None));
    }
    assert_eq!(medium(&disk), vec![0; BLOCKS as usize * 512]);
}

#[test]
fn with_immed_it_is_answered_when_it_has_begun() {
    let (disk, keeper, mut unit) = unit();
    let mut erase = ERASE;
    erase[1] |= IMMED;
    unit.run(&erase).good();
    assert_eq!(settled(&mut unit), None);
    assert_eq!(medium(&disk), vec![0; BLOCKS as usize * 512]);
    // Nothing has begun that is not kept.
    keeper.fails_to_keep.store(true, Ordering::Relaxed);
    unit.io(&cdb10(0x2A, 0, 0, 1), &[7; 512], 0).good();
    assert_eq!(unit.run(&erase).sense(), KEPT_NOT);
    assert_eq!(settled(&mut unit), None);
    assert_eq!(unit.io(&cdb10(0x28, 0, 0, 1), &[], 512).good(), [7; 512]);
}

#[test]
fn what_a_process_did_not_end_the_next_one_does() {
    let (disk, keeper, unit) = unit();
    let uuid = disk.uuid();
    drop(unit);
    let text =
        r#"{"method": "block-erase", "block_size": 512, "unrestricted": false, "failed": false}"#;
    keeper.keep(Record::Sanitize, uuid, Some(text)).unwrap();
    // The one before still has it.
    let held = keeper.gate.lock();
    let mut unit = kept_unit(&disk, &keeper, LunOptions::default());
    assert_eq!(unit.run(&[0; 6]).sense(), IN_PROGRESS);
    assert_ne!(medium(&disk)[..512], [0; 512]);
    drop(held);
    assert_eq!(settled(&mut unit), None);
    assert_eq!(medium(&disk), vec![0; BLOCKS as usize * 512]);
    assert_eq!(*keeper.text.lock(), None);
}

/// As if on a server.
struct Remote;

impl Wrap for Remote {
    fn features(&self, of: Features) -> Features {
        Features { remote: true, ..of }
    }
}

#[test]
fn what_another_host_may_have_used_meanwhile_is_not_erased_without_a_new_order() {
    let (disk, keeper, unit) = unit();
    drop(unit);
    let text =
        r#"{"method": "block-erase", "block_size": 512, "unrestricted": true, "failed": false}"#;
    *keeper.text.lock() = Some(text.to_owned());
    let remote: Arc<dyn Bdev> = Wrapped::new(Arc::clone(&disk), Remote);
    let mut unit = kept_unit(&remote, &keeper, LunOptions::default());
    assert_eq!(settled(&mut unit), Some(FAILED));
    assert_eq!(medium(&disk)[..512], [0xA5; 512]);
    unit.run(&EXIT).good();
    assert_eq!(settled(&mut unit), None);
    assert_eq!(medium(&disk)[..512], [0xA5; 512]);
}

#[test]
fn what_another_process_has_ended_is_not_done_again() {
    let (disk, keeper, unit) = unit();
    drop(unit);
    let text =
        r#"{"method": "block-erase", "block_size": 512, "unrestricted": false, "failed": false}"#;
    *keeper.text.lock() = Some(text.to_owned());
    let held = keeper.gate.lock();
    let mut unit = kept_unit(&disk, &keeper, LunOptions::default());
    assert_eq!(unit.run(&[0; 6]).sense(), IN_PROGRESS);
    *keeper.text.lock() = None;
    drop(held);
    assert_eq!(settled(&mut unit), None);
    assert_eq!(medium(&disk)[..512], [0xA5; 512]);
}

#[test]
fn sbc3_5_22_one_that_failed_is_told_until_it_is_done_or_left() {
    let (disk, keeper, mut unit) = unit();
    keeper.fails_to_forget.store(true, Ordering::Relaxed);
    let mut unrestricted = ERASE;
    unrestricted[1] |= AUSE;
    assert_eq!(unit.run(&unrestricted).sense(), FAILED);
    assert_eq!(unit.io(&cdb10(0x28, 0, 0, 1), &[], 512).sense(), FAILED);
    assert_eq!(key_code(unit.io(&[3, 0, 0, 0, 18, 0], &[], 18).good()), FAILED);
    unit.io(&cdb10(0x25, 0, 0, 0), &[], 8).good();
    // So it is after a restart; and it cannot be left where that would not be kept.
    drop(unit);
    let mut unit = kept_unit(&disk, &keeper, LunOptions::default());
    assert_eq!(unit.run(&EXIT).sense(), KEPT_NOT);
    assert_eq!(settled(&mut unit), Some(FAILED));
    keeper.fails_to_forget.store(false, Ordering::Relaxed);
    unit.run(&EXIT).good();
    assert_eq!(settled(&mut unit), None);
    // Without AUSE only another one helps, without AUSE.
    keeper.fails_to_forget.store(true, Ordering::Relaxed);
    assert_eq!(unit.run(&ERASE).sense(), FAILED);
    keeper.fails_to_forget.store(false, Ordering::Relaxed);
    unit.run(&EXIT).invalid_cdb(1, Some(4));
    unit.run(&unrestricted).invalid_cdb(1, Some(5));
    unit.run(&ERASE).good();
    assert_eq!(settled(&mut unit), None);
    unit.run(&EXIT).good();
}

#[test]
fn a_record_that_cannot_be_understood_is_a_failure() {
    let (disk, keeper, unit) = unit();
    drop(unit);
    *keeper.text.lock() = Some("{".to_owned());
    let mut unit = kept_unit(&disk, &keeper, LunOptions::default());
    assert_eq!(settled(&mut unit), Some(FAILED));
    unit.run(&ERASE).good();
    assert_eq!(settled(&mut unit), None);
}

#[test]
fn parameter_lists_that_are_refused() {
    let (disk, keeper, mut unit) = unit();
    let whole = vec![0x55; 512];
    for length in [0, 1, 4, 4 + 513] {
        let (mut cdb, mut list) = overwrite(1, &whole);
        cdb[7..9].copy_from_slice(&u16::to_be_bytes(length));
        list.resize(1024, 0);
        unit.io(&cdb, &list, 0).invalid_cdb(7, None);
    }
    // A count of 0, bits for tests, a reserved byte, and a pattern that is not the rest of the list.
    for (at, value) in [(0, 0), (0, 0x21), (0, 0x41), (1, 1), (2, 0), (3, 1)] {
        let (cdb, mut list) = overwrite(1, &whole);
        list[at] = value;
        assert_eq!(unit.io(&cdb, &list, 0).sense(), LIST_FIELD, "byte {at}: {value:#x}");
    }
    let (cdb, list) = overwrite(1, &whole);
    assert_eq!(unit.io(&cdb, &list[..list.len() - 1], 0).outcome, Outcome::Overrun);
    for cdb in [ERASE, EXIT] {
        let mut with_list = cdb;
        with_list[8] = 8;
        unit.io(&with_list, &[0; 8], 0).invalid_cdb(7, None);
    }
    // CRYPTO ERASE is not there.
    unit.run(&[0x48, 0x03, 0, 0, 0, 0, 0, 0, 0, 0]).invalid_cdb(1, Some(4));
    assert_eq!(medium(&disk)[..512], [0xA5; 512]);
    let read_only = LunOptions { read_only: true, ..LunOptions::default() };
    let mut unit = kept_unit(&disk, &keeper, read_only);
    assert_eq!(unit.run(&ERASE).sense(), WRITE_PROTECTED);
}

#[test]
fn erasing_blocks_is_for_disks_that_tell_what_they_have() {
    let mut rig = Rig::new();
    rig.run(&ERASE).invalid_cdb(1, Some(4));
    let listed = |rig: &mut Rig, action| {
        rig.input(&[0xA3, 0x0C, 2, 0x48, 0, action, 0, 0, 0, 64, 0, 0], 64).good()[1] & 7
    };
    assert_eq!((listed(&mut rig, 1), listed(&mut rig, 2), listed(&mut rig, 0x1F)), (3, 1, 3));
    let (_, _, mut unit) = unit();
    // WABEREQ: 01b.
    assert_eq!(unit.io(&[0x12, 1, 0xB1, 0, 64, 0], &[], 64).good()[7] >> 6, 1);
}
