//! ROD tokens (SPC-4 5.17.6; SBC-3 4.28): POPULATE TOKEN, WRITE USING TOKEN, RECEIVE ROD TOKEN INFORMATION.

use crate::rig::*;
use crate::unit::{BLOCKS, DEADLINE, Unit, disk, medium, on, two};
use scsi::{LunOptions, Outcome, Plain, Response, Status, Task};
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};
use uuid::Uuid;

const LIST_FIELD: (u8, u16) = (0x5, 0x2600);
const LIST_LENGTH: (u8, u16) = (0x5, 0x1A00);
const TOO_MANY: (u8, u16) = (0x5, 0x2608);
const UNKNOWN: (u8, u16) = (0x5, 0x2304);
pub const REVOKED: (u8, u16) = (0x5, 0x2306);
const IMMED: u8 = 0x01;

pub type Range = (u64, u32);

fn descriptors(ranges: &[Range]) -> Vec<u8> {
    let one =
        |(lba, blocks): &Range| [&lba.to_be_bytes()[..], &blocks.to_be_bytes(), &[0; 4]].concat();
    ranges.iter().flat_map(one).collect()
}

/// A POPULATE TOKEN parameter list.
fn populate_list(flags: u8, timeout_s: u32, ranges: &[Range]) -> Vec<u8> {
    let ranges = descriptors(ranges);
    let mut list = vec![0; 16];
    list[..2].copy_from_slice(&(14 + ranges.len() as u16).to_be_bytes());
    list[2] = flags;
    list[4..8].copy_from_slice(&timeout_s.to_be_bytes());
    list[14..].copy_from_slice(&(ranges.len() as u16).to_be_bytes());
    [list, ranges].concat()
}

/// A WRITE USING TOKEN one.
pub fn write_list(flags: u8, offset: u64, token: &[u8], ranges: &[Range]) -> Vec<u8> {
    let ranges = descriptors(ranges);
    let mut list = vec![0; 536];
    list[..2].copy_from_slice(&(534 + ranges.len() as u16).to_be_bytes());
    list[2] = flags;
    list[8..16].copy_from_slice(&offset.to_be_bytes());
    list[16..528].copy_from_slice(token);
    list[534..].copy_from_slice(&(ranges.len() as u16).to_be_bytes());
    [list, ranges].concat()
}

fn cdb(action: u8, list_id: u32, length: usize) -> [u8; 16] {
    let mut cdb = cdb16(0x83, action, 0, length as u32);
    cdb[6..10].copy_from_slice(&list_id.to_be_bytes());
    cdb
}

fn populate(unit: &mut Unit, list_id: u32, list: &[u8]) -> Answer {
    unit.io(&cdb(0x10, list_id, list.len()), list, 0)
}

pub fn write(unit: &mut Unit, list_id: u32, list: &[u8]) -> Answer {
    unit.io(&cdb(0x11, list_id, list.len()), list, 0)
}

fn information_cdb(list_id: u32) -> [u8; 16] {
    let mut cdb = cdb16(0x84, 7, 0, 1024);
    cdb[2..6].copy_from_slice(&list_id.to_be_bytes());
    cdb
}

fn information(unit: &mut Unit, list_id: u32) -> Answer {
    unit.io(&information_cdb(list_id), &[], 1024)
}

/// What is told when the operation has ended.
pub fn ended(unit: &mut Unit, list_id: u32) -> Vec<u8> {
    let begun = Instant::now();
    loop {
        assert!(begun.elapsed() < DEADLINE, "it does not end");
        let told = information(unit, list_id).good().to_vec();
        assert_eq!(u32::from_be_bytes(told[..4].try_into().unwrap()) as usize, told.len() - 4);
        if told[5] & 0x10 == 0 {
            return told;
        }
    }
}

/// A token of these blocks.
fn token_for(unit: &mut Unit, timeout_s: u32, ranges: &[Range]) -> Vec<u8> {
    populate(unit, 1, &populate_list(0, timeout_s, ranges)).good();
    let told = ended(unit, 1);
    assert_eq!(told.len(), 32 + 4 + 2 + 512);
    told[38..].to_vec()
}

pub fn token(unit: &mut Unit, ranges: &[Range]) -> Vec<u8> {
    token_for(unit, 0, ranges)
}

fn zeros() -> Vec<u8> {
    let mut token = vec![0; 512];
    token[..4].copy_from_slice(&[0xFF, 0xFF, 0, 1]);
    token[6..8].copy_from_slice(&[1, 0xF8]);
    token
}

#[test]
fn blocks_are_copied_by_a_token_between_units_of_a_controller() {
    let [(a, mut source), (b, mut target)] = two();
    let (of_a, mut expected) = (medium(&a), medium(&b));
    information(&mut source, 1).invalid_cdb(2, None);
    // More than is read at a time, in pieces that are no pieces of the target's.
    let token = token(&mut source, &[(100, 3000), (7, 0), (5000, 10), (4, 3)]);
    let told = information(&mut source, 1).good().to_vec();
    assert_eq!((told[4], told[5], told[12], told[13], told[15]), (0x10, 1, 0, 0, 0xF1));
    assert_eq!(told[16..24], 3013u64.to_be_bytes());
    assert_eq!(told[32..38], [0, 0, 2, 2, 0, 0]);
    let list = write_list(0, 2, &token, &[(8000, 1), (10, 2500), (3000, 510)]);
    write(&mut target, 0x0102_0304, &list).good();
    let data =
        [&of_a[100 * 512..3100 * 512], &of_a[5000 * 512..5010 * 512], &of_a[4 * 512..7 * 512]]
            .concat();
    let data = &data[2 * 512..];
    expected[8000 * 512..8001 * 512].copy_from_slice(&data[..512]);
    expected[10 * 512..2510 * 512].copy_from_slice(&data[512..2501 * 512]);
    expected[3000 * 512..3510 * 512].copy_from_slice(&data[2501 * 512..]);
    assert!(medium(&b) == expected && medium(&a) == of_a);
    let told = ended(&mut target, 0x0102_0304);
    assert_eq!((told.len(), told[4], told[5], told[15]), (36, 0x11, 1, 0xF1));
    assert_eq!(told[16..24], 3011u64.to_be_bytes());
    // More than there is: as much as there is.
    write(&mut target, 2, &write_list(0, 3010, &token, &[(0, 8)])).good();
    expected[..3 * 512].copy_from_slice(&of_a[4 * 512..7 * 512]);
    assert!(medium(&b) == expected);
    let told = ended(&mut target, 2);
    assert_eq!((told[5], &told[16..24]), (4, &3u64.to_be_bytes()[..]));
    // Within the unit, too.
    write(&mut source, 2, &write_list(0, 0, &token, &[(7000, 1)])).good();
    assert_eq!(medium(&a)[7000 * 512..7001 * 512], of_a[100 * 512..101 * 512]);
}

#[test]
fn spc4_6_32_a_token_says_what_it_stands_for() {
    let [(a, mut source), _] = two();
    let token = token(&mut source, &[(0, 16)]);
    assert_eq!(token[..8], [0, 0x80, 0, 1, 0, 0, 1, 0xF8]);
    let (high, low) = a.uuid().as_u64_pair();
    let naa = ((high ^ low) & (u64::MAX >> 4)) | 3 << 60;
    assert_eq!(token[16..24], [0xE4, 0, 0, 0, 1, 3, 0, 8]);
    assert_eq!(token[24..32], naa.to_be_bytes());
    assert_eq!(token[44..48], [0, 0, 2, 0]);
    assert_eq!(token[48..64], (16u128 * 512).to_be_bytes());
    assert_eq!(token[96..100], 512u32.to_be_bytes());
    let other = token_for(&mut source, 0, &[(0, 16)]);
    for at in (160..224).step_by(16) {
        assert_ne!(token[at..at + 16], other[at..at + 16]);
    }
}

#[test]
fn a_token_that_is_not_one_is_refused() {
    let [(_, mut source), (b, mut target)] = two();
    let before = medium(&b);
    let token = token(&mut source, &[(0, 16)]);
    let with = |at: usize, value: u8| {
        let mut token = token.clone();
        token[at] ^= value;
        write_list(0, 0, &token, &[(0, 16)])
    };
    for at in (8..512).filter(|at| *at < 16 || *at > 150) {
        assert_eq!(write(&mut target, 2, &with(at, 1)).sense(), UNKNOWN, "byte {at}");
    }
    assert_eq!(write(&mut target, 2, &with(3, 1)).sense(), (0x5, 0x2301));
    assert_eq!(write(&mut target, 2, &with(7, 1)).sense(), (0x5, 0x230A));
    assert!(medium(&b) == before);
    // Nor is one of another controller, whoever knows it.
    let mut stranger = Unit::new(&disk(3), on("another-vm:0"));
    let list = write_list(0, 0, &token, &[(0, 16)]);
    assert_eq!(write(&mut stranger, 2, &list).sense(), UNKNOWN);
    write(&mut target, 2, &list).good();
    // Nor one of a unit that is gone.
    drop(source);
    assert_eq!(write(&mut target, 2, &list).sense(), UNKNOWN);
}

/// Changes blocks 20 to 23 of a unit.
type Change = fn(&mut Unit);

#[test]
fn a_change_of_its_blocks_revokes_a_token_and_no_other_does() {
    let changes: [(&str, Change); 9] = [
        ("WRITE(10)", |unit| _ = unit.io(&cdb10(0x2A, 0, 20, 4), &[0x77; 2048], 0).good()),
        ("WRITE(16)", |unit| _ = unit.io(&cdb16(0x8A, 0, 20, 4), &[0x77; 2048], 0).good()),
        ("WRITE AND VERIFY", |unit| _ = unit.io(&cdb10(0x2E, 0, 20, 4), &[0x77; 2048], 0).good()),
        ("WRITE SAME", |unit| _ = unit.io(&cdb16(0x93, 0, 20, 4), &[0x77; 512], 0).good()),
        ("WRITE SAME of zeros", |unit| _ = unit.io(&cdb16(0x93, 0x01, 20, 4), &[], 0).good()),
        ("ORWRITE", |unit| _ = unit.io(&cdb16(0x8B, 0, 20, 4), &[0x77; 2048], 0).good()),
        ("COMPARE AND WRITE", |unit| {
            let now = unit.io(&cdb10(0x28, 0, 20, 4), &[], 2048).good().to_vec();
            let mut cdb = cdb16(0x89, 0, 20, 0);
            cdb[13] = 4;
            unit.io(&cdb, &[now, vec![0x77; 2048]].concat(), 0).good();
        }),
        ("UNMAP", |unit| {
            let list = [&[0, 22, 0, 16, 0, 0, 0, 0][..], &descriptors(&[(20, 4)])].concat();
            unit.io(&[0x42, 0, 0, 0, 0, 0, 0, 0, 24, 0], &list, 0).good();
        }),
        ("virtio-blk's", |unit| {
            let plain = Plain { op: bdev::Op::Write, durable: false, lba: 20, blocks: 4 };
            let out = Buffer::new(&[0x77; 2048], 700);
            let mut task = Task::new(7);
            task.prepare_plain(plain, out.sg(), Buffer::new(&[], 1).sg());
            let outcome = unit.lun.start(&mut task);
            let Outcome::Done(response) = unit.until_over(&mut task, outcome) else { panic!() };
            assert_eq!(response.status, Status::Good);
        }),
    ];
    for (name, change) in changes {
        let [(a, mut source), (b, mut target)] = two();
        // On the same controller or not, it is the same volume.
        let mut other = Unit::new(&a, on("another-vm:0"));
        let before = token(&mut source, &[(0, 20), (24, 100)]);
        let hit = token(&mut source, &[(500, 10), (23, 1)]);
        change(&mut other);
        write(&mut target, 2, &write_list(0, 0, &before, &[(0, 120)])).good();
        let untouched = medium(&b);
        let list = write_list(0, 0, &hit, &[(1000, 11)]);
        assert_eq!(write(&mut target, 2, &list).sense(), REVOKED, "{name}");
        assert!(medium(&b) == untouched, "{name}");
        // What has been refused has not begun: nothing is told of it.
        assert_eq!(ended(&mut target, 2)[5], 1);
        // A new one is good.
        let again = token(&mut source, &[(20, 4)]);
        write(&mut target, 2, &write_list(0, 0, &again, &[(0, 4)])).good();
        assert_eq!(medium(&b)[..2048], medium(&a)[20 * 512..24 * 512], "{name}");
    }
}

#[test]
fn what_is_copied_over_its_blocks_revokes_a_token() {
    let [(_, mut source), (_, mut target)] = two();
    let hit = token(&mut target, &[(40, 4)]);
    let by = token(&mut source, &[(0, 4)]);
    write(&mut target, 2, &write_list(0, 0, &by, &[(42, 4)])).good();
    assert_eq!(write(&mut source, 2, &write_list(0, 0, &hit, &[(0, 4)])).sense(), REVOKED);
    let hit = token(&mut target, &[(40, 4)]);
    write(&mut target, 2, &write_list(0, 0, &zeros(), &[(43, 1)])).good();
    assert_eq!(write(&mut source, 2, &write_list(0, 0, &hit, &[(0, 4)])).sense(), REVOKED);
}

#[test]
fn a_token_ends_with_what_it_was_made_of() {
    // Replaced.
    let [(_, mut source), (_, mut target)] = two();
    let of = |unit: &mut Unit| write_list(0, 0, &token(unit, &[(BLOCKS - 8, 8)]), &[(0, 8)]);
    let list = of(&mut source);
    source.shared.set_replaced(true);
    assert_eq!(write(&mut target, 2, &list).sense(), UNKNOWN);
    source.shared.set_replaced(false);
    assert_eq!(write(&mut target, 2, &list).sense(), REVOKED);
    // Sanitized.
    let list = of(&mut source);
    let pattern = [&[0x01, 0, 0, 1][..], &[0xA5]].concat();
    source.io(&[0x48, 0x01, 0, 0, 0, 0, 0, 0, 5, 0], &pattern, 0).good();
    assert_eq!(write(&mut target, 2, &list).sense(), REVOKED);
}

#[test]
fn a_unit_that_shrinks_revokes_what_it_has_no_more() {
    let mut rig = Setup { mode: Mode::Later, ..Setup::default() }.build();
    let tokens: Vec<Vec<u8>> = [(0, 4000), (4000, 96)]
        .into_iter()
        .map(|range| {
            let list = populate_list(0, 0, &[range]);
            rig.io(&cdb(0x10, 1, list.len()), &list, 0).good();
            rig.io(&information_cdb(1), &[], 1024).good()[38..].to_vec()
        })
        .collect();
    rig.disk.num_blocks.store(4000, Ordering::Relaxed);
    rig.shared.notify_resized();
    assert_eq!(rig.run(&[0; 6]).sense(), (0x6, 0x2A09));
    let mut using = |token: &[u8]| {
        let list = write_list(0, 0, token, &[(0, 8)]);
        rig.io(&cdb(0x11, 2, list.len()), &list, 0)
    };
    assert_eq!(using(&tokens[1]).sense(), REVOKED);
    // The rig's disk has no channel for it.
    assert_eq!(using(&tokens[0]).sense(), (0xA, 0x0D02));
}

/// A unit whose volume has a write under way that does not end by itself: it keeps a token from being handed out.
fn held() -> (Rig, Rig, Box<Task>, Buffer) {
    let rig = Setup { mode: Mode::Later, ..Setup::default() }.build();
    let mut other = rig.another_unit(on("another-vm:0"));
    let (task, out) = pending(&mut other, 1);
    (rig, other, task, out)
}

/// Begins a write of block 8.
fn pending(other: &mut Rig, tag: u64) -> (Box<Task>, Buffer) {
    let out = Buffer::new(&[0x55; 512], 700);
    let mut task = Box::new(Task::new(tag));
    task.prepare(&pad(&cdb10(0x2A, 0, 8, 1)), out.sg(), Buffer::new(&[], 1).sg());
    assert_eq!(other.lun.start(&mut task), Outcome::Pending);
    (task, out)
}

/// Ends it, GOOD.
fn let_go(other: &mut Rig, task: &mut Task) {
    assert_eq!(end(other, task), Status::Good);
}

/// Ends it; its status.
fn end(other: &mut Rig, task: &mut Task) -> Status {
    let mut done = Vec::with_capacity(1);
    assert_eq!(other.lun.poll(&mut done), 1);
    assert_eq!(done[0].tag, task.tag());
    match other.lun.resume(task, done[0].result) {
        Outcome::Done(response) => response.status,
        other => panic!("{other:?}"),
    }
}

/// POPULATE TOKEN in the background.
fn begin(rig: &mut Rig, list_id: u32) -> Answer {
    let list = populate_list(IMMED, 0, &[(0, 64)]);
    rig.io(&cdb(0x10, list_id, list.len()), &list, 0)
}

fn told(rig: &mut Rig, list_id: u32) -> Vec<u8> {
    rig.io(&information_cdb(list_id), &[], 1024).good().to_vec()
}

/// What is told when the operation has ended, of a rig's.
fn told_at_end(rig: &mut Rig, list_id: u32) -> Vec<u8> {
    let begun = Instant::now();
    loop {
        assert!(begun.elapsed() < DEADLINE, "it does not end");
        let told = told(rig, list_id);
        if told[5] & 0x10 == 0 {
            return told;
        }
    }
}

#[test]
fn a_token_is_not_handed_out_before_writes_that_began_earlier_are_over() {
    let (mut rig, mut other, mut first, _out) = held();
    begin(&mut rig, 1).good();
    for _ in 0..20 {
        std::thread::sleep(Duration::from_millis(2));
        assert_eq!(told(&mut rig, 1)[5], 0x12, "handed out before the write was over");
    }
    // On a busy unit, one write begins before another ends: the later one is not waited for.
    let (mut second, _more) = pending(&mut other, 2);
    let_go(&mut other, &mut first);
    let told = told_at_end(&mut rig, 1);
    assert_eq!(told[5], 1);
    // But it has revoked the token.
    let list = write_list(0, 0, &told[38..], &[(0, 8)]);
    assert_eq!(rig.io(&cdb(0x11, 2, list.len()), &list, 0).sense(), REVOKED);
    let_go(&mut other, &mut second);
}

#[test]
fn spc4_6_3_one_in_the_background_is_told_of_and_can_be_aborted() {
    let (mut rig, mut other, mut writes, _out) = held();
    let abort = |list_id| [0x83, 0x1C, 0, 0, 0, list_id, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0];
    rig.run(&abort(1)).invalid_cdb(2, None);
    begin(&mut rig, 1).good();
    let running = told(&mut rig, 1);
    assert_eq!((running.len(), running[4], running[5]), (36, 0x10, 0x12));
    assert_ne!(running[8..12], [0; 4], "when to ask again");
    assert_eq!(begin(&mut rig, 1).sense(), (0x5, 0x0016));
    rig.run(&abort(1)).good();
    let ended = told_at_end(&mut rig, 1);
    assert_eq!((ended.len(), ended[5], ended[12]), (36, 0x60, 0x40));
    rig.run(&abort(1)).invalid_cdb(2, None);
    // So does a reset of the unit, and the end of a session.
    begin(&mut rig, 1).good();
    rig.shared.reset();
    assert_eq!(rig.run(&[0; 6]).sense(), (0x6, 0x2900));
    assert_eq!(told_at_end(&mut rig, 1)[5], 0x60);
    begin(&mut rig, 1).good();
    drop(rig.shared.connect());
    assert_eq!(told_at_end(&mut rig, 1)[5], 0x60);
    // Eight at a time.
    (1..=8).for_each(|list_id| _ = begin(&mut rig, list_id).good());
    assert_eq!(begin(&mut rig, 9).outcome, Outcome::Done(Response::bare(Status::Busy)));
    assert_eq!(end(&mut other, &mut writes), Status::TaskAborted, "by the reset");
    (1..=8).for_each(|list_id| assert_eq!(told_at_end(&mut rig, list_id)[5], 1));
    begin(&mut rig, 9).good();
    assert_eq!(told_at_end(&mut rig, 9)[5], 1);
}

#[test]
fn populations_of_one_volume_at_a_time_do_not_wait_for_each_other() {
    let [(a, mut source), _] = two();
    let mut other = Unit::new(&a, on("another-vm:0"));
    let list = populate_list(0, 0, &[(0, 8)]);
    let command = pad(&cdb(0x10, 1, list.len()));
    let out = Buffer::new(&list, list.len());
    let (mut one, mut two) = (Task::new(7), Task::new(7));
    one.prepare(&command, out.sg(), Buffer::new(&[], 1).sg());
    two.prepare(&command, out.sg(), Buffer::new(&[], 1).sg());
    let first = source.lun.start(&mut one);
    let second = other.lun.start(&mut two);
    for (unit, task, outcome) in [(&mut source, &mut one, first), (&mut other, &mut two, second)] {
        let outcome = unit.until_over(task, outcome);
        assert!(matches!(outcome, Outcome::Done(Response { status: Status::Good, .. })));
    }
}

#[test]
fn a_token_that_nobody_uses_expires() {
    let [(_, mut source), (_, mut target)] = two();
    let token = token_for(&mut source, 1, &[(0, 8)]);
    let list = write_list(0, 0, &token, &[(0, 8)]);
    std::thread::sleep(Duration::from_millis(1100));
    assert_eq!(write(&mut target, 2, &list).sense(), (0x5, 0x2307));
}

#[test]
fn a_token_that_is_not_needed_any_more_is_deleted() {
    let [(_, mut source), (_, mut target)] = two();
    let token = token(&mut source, &[(0, 8)]);
    write(&mut target, 2, &write_list(0x02, 0, &token, &[(0, 4)])).good();
    assert_eq!(write(&mut target, 2, &write_list(0, 4, &token, &[(4, 4)])).sense(), (0x5, 0x2309));
}

#[test]
fn of_too_many_tokens_the_oldest_is_forgotten() {
    let [(_, mut source), (_, mut target)] = two();
    let tokens: Vec<Vec<u8>> = (0..17).map(|lba| token(&mut source, &[(lba, 1)])).collect();
    let mut using = |token: &[u8]| write(&mut target, 2, &write_list(0, 0, token, &[(0, 1)]));
    assert_eq!(using(&tokens[0]).sense(), UNKNOWN);
    tokens[1..].iter().for_each(|token| _ = using(token).good());
    // One that is not good any more goes first.
    source.io(&cdb10(0x2A, 0, 9, 1), &[1; 512], 0).good();
    let one_more = token_for(&mut source, 0, &[(30, 1)]);
    assert_eq!(using(&tokens[9]).sense(), UNKNOWN);
    using(&tokens[1]).good();
    using(&one_more).good();
}

#[test]
fn a_volume_has_so_many_tokens_whoever_has_them() {
    let disk = disk(0);
    let mut units: Vec<Unit> =
        (0..5).map(|vm| Unit::new(&disk, on(&format!("{}:{vm}", Uuid::new_v4())))).collect();
    let list = populate_list(0, 0, &[(0, 1)]);
    for unit in &mut units[..4] {
        (0..16).for_each(|_| _ = populate(unit, 1, &list).good());
    }
    assert_eq!(populate(&mut units[4], 1, &list).sense(), (0x5, 0x550D));
    let told = ended(&mut units[4], 1);
    assert_eq!((told.len(), told[5], told[12], told[13], told[14]), (56, 2, 2, 20, 18));
    assert_eq!(key_code(&told[32..50]), (0x5, 0x550D));
    // Those that are not good any more make room.
    units[0].io(&cdb10(0x2A, 0, 0, 1), &[1; 512], 0).good();
    populate(&mut units[4], 1, &list).good();
}

#[test]
fn zeros_need_no_token() {
    let [(a, mut unit), _] = two();
    let mut expected = medium(&a);
    write(&mut unit, 5, &write_list(0, 0, &zeros(), &[(10, 5000), (8191, 1)])).good();
    expected[10 * 512..5010 * 512].fill(0);
    expected[8191 * 512..].fill(0);
    assert!(medium(&a) == expected);
    let told = ended(&mut unit, 5);
    assert_eq!((told[5], &told[16..24]), (1, &5001u64.to_be_bytes()[..]));
    let mut wrong = zeros();
    wrong[7] = 0;
    assert_eq!(write(&mut unit, 5, &write_list(0, 0, &wrong, &[(0, 1)])).sense(), (0x5, 0x230A));
}

#[test]
fn with_immed_a_token_is_made_in_the_background_and_what_writes_is_waited_for() {
    let [(a, mut source), (b, mut target)] = two();
    populate(&mut source, 6, &populate_list(IMMED, 0, &[(0, 4096)])).good();
    let token = ended(&mut source, 6)[38..].to_vec();
    write(&mut target, 6, &write_list(IMMED, 0, &token, &[(4096, 4096)])).good();
    assert!(medium(&b)[4096 * 512..] == medium(&a)[..4096 * 512]);
    let told = information(&mut target, 6).good().to_vec();
    assert_eq!((told[5], &told[16..24]), (1, &4096u64.to_be_bytes()[..]));
}

#[test]
fn what_is_copied_is_whole_blocks_of_both_units() {
    let controller = Uuid::new_v4();
    let (a, b) = (disk(0), disk(1));
    let mut source = Unit::new(&a, on(&format!("{controller}:0")));
    let large = LunOptions { block_size: Some(4096), ..on(&format!("{controller}:1")) };
    let mut target = Unit::new(&b, large);
    let pieces = (0..8).map(|nth| (nth * 2, 1)).collect::<Vec<_>>();
    let token = token_for(&mut source, 0, &pieces);
    assert_eq!(write(&mut target, 2, &write_list(0, 0, &token, &[(1, 1)])).sense(), LIST_FIELD);
    let token = token_for(&mut source, 0, &[(3, 8), (40, 16)]);
    // And what the target's tokens stand for has changed.
    let changed = token_for(&mut target, 0, &[(2, 1)]);
    write(&mut target, 2, &write_list(0, 0, &token, &[(1, 3)])).good();
    let (from, to) = (medium(&a), medium(&b));
    assert!(to[4096..2 * 4096] == from[3 * 512..11 * 512]);
    assert!(to[2 * 4096..4 * 4096] == from[40 * 512..56 * 512]);
    assert_eq!(write(&mut source, 3, &write_list(0, 0, &changed, &[(0, 8)])).sense(), REVOKED);
}

#[test]
fn one_that_is_aborted_or_reset_ends() {
    for reset in [false, true] {
        let (mut rig, mut other, mut writes, _out) = held();
        let list = populate_list(0, 0, &[(0, 8)]);
        let data = Buffer::new(&list, list.len());
        let mut task = Task::new(7);
        task.prepare(&pad(&cdb(0x10, 1, list.len())), data.sg(), Buffer::new(&[], 1).sg());
        let mut outcome = rig.lun.start(&mut task);
        assert_eq!(outcome, Outcome::Pending);
        if reset {
            rig.shared.reset()
        } else {
            task.abort()
        }
        let mut done = Vec::with_capacity(1);
        let begun = Instant::now();
        while outcome == Outcome::Pending {
            assert!(begun.elapsed() < DEADLINE, "it does not end");
            done.clear();
            rig.lun.poll(&mut done);
            outcome = rig.lun.resume(&mut task, done[0].result);
        }
        assert_eq!(outcome, Outcome::Done(Response::bare(Status::TaskAborted)));
        // A reset is of the volume, whoever has it.
        let ends_as = if reset { Status::TaskAborted } else { Status::Good };
        assert_eq!(end(&mut other, &mut writes), ends_as);
        if reset {
            assert_eq!(rig.run(&[0; 6]).sense(), (0x6, 0x2900));
        }
        let told = rig.io(&information_cdb(1), &[], 1024);
        assert_eq!((told.good().len(), told.good()[5]), (36, 0x60));
        // The side that it has left is waited for by the next one.
        rig.io(&cdb(0x10, 1, list.len()), &list, 0).good();
    }
}

#[test]
fn what_is_kept_from_a_unit_is_not_copied_to_it() {
    let [(a, mut source), (b, mut target)] = two();
    let token = token(&mut source, &[(0, 8)]);
    let list = write_list(0, 0, &token, &[(0, 8)]);
    let keys = |key: u64, new: u64| [key.to_be_bytes(), new.to_be_bytes(), [0; 8]].concat();
    let out = |action: u8, kind: u8| [0x5F, action, kind, 0, 0, 0, 0, 0, 24, 0];
    // Write exclusive on the target, then exclusive access on the source, of others.
    for (disk, kind) in [(&b, 1), (&a, 3)] {
        let mut holder = Unit::new(disk, on("holder:0"));
        holder.io(&out(0, 0), &keys(0, 1), 0).good();
        holder.io(&out(1, kind), &keys(1, 0), 0).good();
        let refused = write(&mut target, 2, &list);
        if kind == 1 {
            assert_eq!(refused.outcome, Outcome::Done(Response::bare(Status::ReservationConflict)));
        } else {
            assert_eq!(refused.sense(), (0xA, 0x0D02));
            let conflict = populate(&mut source, 1, &populate_list(0, 0, &[(0, 8)]));
            assert_eq!(conflict.outcome, refused_by_reservation());
        }
        holder.io(&out(3, 0), &keys(1, 0), 0).good();
        _ = target.run(&[0; 6]);
        _ = source.run(&[0; 6]);
    }
    write(&mut target, 2, &list).good();
    // Write protection.
    let swp = [&[0; 4][..], &[10, 10, 0x22, 0x10, 8, 0x40, 0, 0, 0, 0, 0, 0]].concat();
    target.io(&[0x15, 0x10, 0, 0, 16, 0], &swp, 0).good();
    assert_eq!(write(&mut target, 2, &list).sense(), (0x7, 0x2702));
    let options = LunOptions { read_only: true, ..on("readers:0") };
    let mut reader = Unit::new(&a, options);
    assert_eq!(write(&mut reader, 2, &list).sense(), (0x7, 0x2700));
    token_for(&mut reader, 0, &[(0, 8)]);
}

fn refused_by_reservation() -> Outcome {
    Outcome::Done(Response::bare(Status::ReservationConflict))
}

#[test]
fn parameter_lists_that_are_refused() {
    let [(_, mut unit), _] = two();
    let good = populate_list(0, 0, &[(0, 8), (8, 8)]);
    let with = |at: usize, bytes: &[u8]| {
        let mut list = good.clone();
        list[at..at + bytes.len()].copy_from_slice(bytes);
        list
    };
    let many = |count: u64| (0..count).map(|lba| (2 * lba, 1)).collect::<Vec<Range>>();
    for (list, expected) in [
        (good[..15].to_vec(), LIST_LENGTH),
        (good[..good.len() - 1].to_vec(), LIST_LENGTH),
        (with(0, &[0, 29]), LIST_FIELD),
        (with(0, &[0, 30]), LIST_LENGTH), // less than the ranges take
        (with(14, &[0, 15]), LIST_FIELD),
        (with(14, &[0, 48]), LIST_LENGTH),
        (with(4, &3601u32.to_be_bytes()), LIST_FIELD),
        (with(2, &[2]), LIST_FIELD), // of type 0, which has no token
        (populate_list(0, 0, &[(BLOCKS, 1)]), OUT_OF_RANGE),
        (populate_list(0, 0, &[(BLOCKS - 1, 2)]), OUT_OF_RANGE),
        (populate_list(0, 0, &[(u64::MAX, 1)]), OUT_OF_RANGE),
        (populate_list(0, 0, &[(0, 8), (7, 8)]), LIST_FIELD),
        (populate_list(0, 0, &[(0, 0)]), LIST_FIELD),
        (populate_list(0, 0, &many(65)), TOO_MANY),
        (populate_list(0, 0, &many(200)), LIST_LENGTH),
    ] {
        assert_eq!(populate(&mut unit, 1, &list).sense(), expected, "{list:x?}");
    }
    populate(&mut unit, 1, &populate_list(0, 0, &many(64))).good();
    populate(&mut unit, 1, &with(14, &[0, 31])).good(); // the last one is not whole
    // The type that it has, by name.
    for kind in [[0, 0x80, 0, 1], [0, 0x80, 0xFF, 0xFF]] {
        let mut list = with(8, &kind);
        list[2] = 2;
        populate(&mut unit, 1, &list).good();
    }
    let short = unit.io(&cdb(0x10, 1, good.len()), &good[..good.len() - 1], 0);
    assert_eq!(short.outcome, Outcome::Overrun);
    unit.run(&cdb(0x10, 1, 0)).good();
    unit.run(&cdb(0x11, 1, 0)).good();
    let token = token(&mut unit, &[(0, 8)]);
    let good = write_list(0, 0, &token, &[(100, 8)]);
    let with = |at: usize, bytes: &[u8]| {
        let mut list = good.clone();
        list[at..at + bytes.len()].copy_from_slice(bytes);
        list
    };
    for (list, expected) in [
        (good[..535].to_vec(), LIST_LENGTH),
        (good[..good.len() - 1].to_vec(), LIST_LENGTH),
        (with(0, &[0x02, 0x25]), LIST_FIELD),
        (with(534, &[0, 15]), LIST_FIELD),
        (with(534, &[0, 32]), LIST_LENGTH),
        (with(8, &8u64.to_be_bytes()), LIST_FIELD), // the offset
        (with(8, &u64::MAX.to_be_bytes()), LIST_FIELD),
        (write_list(0, 0, &token, &[(BLOCKS, 1)]), OUT_OF_RANGE),
        (write_list(0, 0, &token, &[(100, 8), (107, 1)]), LIST_FIELD),
        (write_list(0, 0, &token, &many(65)), TOO_MANY),
        (write_list(0, 0, &token, &many(66)), LIST_LENGTH),
    ] {
        assert_eq!(write(&mut unit, 1, &list).sense(), expected, "{list:x?}");
    }
    write(&mut unit, 1, &write_list(0, 0, &token, &[(100, 0)])).good();
    write(&mut unit, 1, &good).good();
    // A disk of more than one token may have.
    let big = Setup { num_blocks: 1 << 22, ..Setup::default() };
    let mut rig = big.build();
    for (blocks, is_good) in [(512 << 10, true), ((512 << 10) + 1, false)] {
        let list = populate_list(0, 0, &[(0, blocks)]);
        let answer = rig.io(&cdb(0x10, 1, list.len()), &list, 0);
        if is_good {
            answer.good();
        } else {
            assert_eq!(answer.sense(), LIST_FIELD);
        }
    }
}
