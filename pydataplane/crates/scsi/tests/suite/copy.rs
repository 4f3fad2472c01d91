//! EXTENDED COPY and RECEIVE COPY RESULTS (SPC-4 6.4, 6.17 to 6.23), between units with channels of their own.

use crate::rig::*;
use crate::unit::{BLOCKS, Held, Unit, disk, malloc, medium, on, two, two_of};
use bdev::testing::Holes;
use bdev::{Bdev, Malloc, MallocOptions, Op, SyncChannel};
use scsi::{LunShared, Outcome, Response, Status, Task};
use std::sync::Arc;

const LIST_FIELD: (u8, u16) = (0x5, 0x2600);
const LIST_LENGTH: (u8, u16) = (0x5, 0x1A00);
pub const NOT_REACHABLE: (u8, u16) = (0xA, 0x0D02);
pub const ABORTED: (u8, u16) = (0xA, 0);
const CONFLICT: Outcome = Outcome::Done(Response::bare(Status::ReservationConflict));

/// An identification descriptor of a unit: the first designator of its page 83h, or the UUID.
pub fn cscd(disk: &Arc<dyn Bdev>, by_uuid: bool) -> Vec<u8> {
    let mut descriptor = vec![0; 32];
    let (high, low) = disk.uuid().as_u64_pair();
    let naa = ((high ^ low) & (u64::MAX >> 4)) | 3 << 60;
    let uuid = [&[0x10, 0], &disk.uuid().as_bytes()[..]].concat();
    let (kind, designator) = if by_uuid { (0xA, uuid) } else { (3, naa.to_be_bytes().to_vec()) };
    descriptor[0] = 0xE4;
    descriptor[4..8].copy_from_slice(&[1, kind, 0, designator.len() as u8]);
    descriptor[8..8 + designator.len()].copy_from_slice(&designator);
    descriptor[30..].copy_from_slice(&512u16.to_be_bytes());
    descriptor
}

pub fn segment(from: (u16, u64), to: (u16, u64), blocks: u16) -> Vec<u8> {
    let mut descriptor = vec![0x02, 0, 0, 0x18];
    descriptor
        .extend([from.0.to_be_bytes(), to.0.to_be_bytes(), [0, 0], blocks.to_be_bytes()].concat());
    descriptor.extend([from.1.to_be_bytes(), to.1.to_be_bytes()].concat());
    descriptor
}

/// A parameter list with identifier 9.
pub fn list(cscds: &[Vec<u8>], segments: &[Vec<u8>]) -> Vec<u8> {
    let (cscds, segments) = (cscds.concat(), segments.concat());
    let mut list = vec![0; 16];
    list[0] = 9;
    list[2..4].copy_from_slice(&(cscds.len() as u16).to_be_bytes());
    list[8..12].copy_from_slice(&(segments.len() as u32).to_be_bytes());
    [list, cscds, segments].concat()
}

pub fn cdb(length: usize) -> [u8; 16] {
    let mut cdb = cdb16(0x83, 0, 0, 0);
    cdb[10..14].copy_from_slice(&(length as u32).to_be_bytes());
    cdb
}

pub fn copy(unit: &mut Unit, list: &[u8]) -> Answer {
    unit.io(&cdb(list.len()), list, 0)
}

pub fn status(unit: &mut Unit, list_id: u8) -> Answer {
    let mut cdb = cdb16(0x84, 0, 0, 0);
    (cdb[2], cdb[13]) = (list_id, 12);
    unit.io(&cdb, &[], 12)
}

#[test]
fn blocks_are_copied_between_units_of_a_controller() {
    let [(a, mut unit), (b, _other)] = two();
    let (before_a, before_b) = (medium(&a), medium(&b));
    status(&mut unit, 9).invalid_cdb(2, None);
    let cscds = [cscd(&a, false), cscd(&b, true)];
    // More than is read at a time; and one back.
    let segments = [segment((0, 10), (1, 5000), 3000), segment((1, 0), (0, 8191), 1)];
    copy(&mut unit, &list(&cscds, &segments)).good();
    let (mut expected_a, mut expected_b) = (before_a.clone(), before_b.clone());
    expected_b[5000 * 512..8000 * 512].copy_from_slice(&before_a[10 * 512..3010 * 512]);
    expected_a[8191 * 512..].copy_from_slice(&before_b[..512]);
    assert!(medium(&a) == expected_a && medium(&b) == expected_b);
    // TRANSFER COUNT: 3001 blocks, in bytes.
    assert_eq!(status(&mut unit, 9).good(), [0, 0, 0, 8, 1, 0, 2, 0, 0, 0x17, 0x72, 0]);
    status(&mut unit, 8).invalid_cdb(2, None);
}

#[test]
fn a_copy_within_a_unit_may_overlap_both_ways() {
    for (from, to) in [(100, 101), (101, 100), (100, 3100), (50, 50)] {
        let [(a, mut unit), _] = two();
        let mut expected = medium(&a);
        let source = expected[from * 512..][..4000 * 512].to_vec();
        expected[to * 512..][..4000 * 512].copy_from_slice(&source);
        let segment = segment((0, from as u64), (0, to as u64), 4000);
        copy(&mut unit, &list(&[cscd(&a, false)], &[segment])).good();
        assert!(medium(&a) == expected, "from {from} to {to}");
    }
}

#[test]
fn no_unit_of_another_controller_can_be_named() {
    let [(a, mut unit), _] = two();
    let (c, _stranger) = (disk(3), ());
    let _other = Unit::new(&c, on("another-vm:0"));
    let cscds = [cscd(&a, false), cscd(&c, false)];
    for (from, to) in [((1, 0), (0, 0)), ((0, 0), (1, 0)), ((0, 0), (2, 0))] {
        let list = list(&cscds, &[segment(from, to, 1)]);
        assert_eq!(copy(&mut unit, &list).sense(), NOT_REACHABLE);
    }
}

#[test]
fn blocks_beyond_the_end_are_not_copied() {
    let [(a, mut unit), (b, _other)] = two();
    let cscds = [cscd(&a, false), cscd(&b, false)];
    let end = BLOCKS;
    for (from, to, blocks) in [(end, 0, 1), (0, end - 1, 2), (u64::MAX, 0, 1), (0, u64::MAX - 1, 9)]
    {
        let list = list(&cscds, &[segment((0, from), (1, to), blocks)]);
        assert_eq!(copy(&mut unit, &list).sense(), ABORTED);
    }
    copy(&mut unit, &list(&cscds, &[segment((0, end), (1, 0), 0)])).good();
}

#[test]
fn what_is_kept_from_a_unit_is_not_copied_to_it() {
    let [(a, mut unit), (b, mut other)] = two();
    let cscds = [cscd(&a, false), cscd(&b, false)];
    let to_b = list(&cscds, &[segment((0, 0), (1, 0), 8)]);
    let from_b = list(&cscds, &[segment((1, 0), (0, 0), 8)]);
    // Write exclusive, of another nexus of b.
    let mut holder = Unit::new(&b, on("holder:0"));
    let keys = |new: u64| [[0; 8], new.to_be_bytes(), [0; 8]].concat();
    let out = |action: u8| [0x5F, action, 1, 0, 0, 0, 0, 0, 24, 0];
    holder.io(&out(0), &keys(1), 0).good();
    holder.io(&out(1), &[1u64.to_be_bytes(), [0; 8], [0; 8]].concat(), 0).good();
    assert_eq!(copy(&mut unit, &to_b).sense(), NOT_REACHABLE);
    copy(&mut unit, &from_b).good();
    assert_eq!(copy(&mut other, &to_b).outcome, CONFLICT);
    holder.io(&out(3), &[1u64.to_be_bytes(), [0; 8], [0; 8]].concat(), 0).good();
    // Software write protection.
    let swp = [&[0; 4][..], &[10, 10, 0x22, 0x10, 8, 0x40, 0, 0, 0, 0, 0, 0]].concat();
    other.io(&[0x15, 0x10, 0, 0, 16, 0], &swp, 0).good();
    assert_eq!(copy(&mut unit, &to_b).sense(), (0x7, 0x2702));
    copy(&mut unit, &from_b).good();
}

#[test]
fn nothing_is_copied_to_a_unit_that_was_replaced() {
    let [(a, mut unit), (b, other)] = two();
    let cscds = [cscd(&a, false), cscd(&b, false)];
    let to_b = list(&cscds, &[segment((0, 0), (1, 0), 8)]);
    other.shared.set_replaced(true);
    assert_eq!(copy(&mut unit, &to_b).sense(), NOT_REACHABLE);
    // Whoever has taken its place is found by the same name.
    let c = disk(3);
    let place = LunShared::new(Arc::clone(&c), other.shared.options()).unwrap();
    copy(&mut unit, &to_b).good();
    assert_eq!(medium(&c)[..8 * 512], medium(&a)[..8 * 512]);
    assert_ne!(medium(&b)[..8 * 512], medium(&a)[..8 * 512]);
    drop(place);
    other.shared.set_replaced(false);
    copy(&mut unit, &to_b).good();
}

#[test]
fn one_that_is_aborted_or_reset_ends_after_its_present_io() {
    for reset in [false, true] {
        let [(a, mut unit), _] = two();
        let many = vec![segment((0, 0), (0, 4096), 4096); 64];
        let list = list(&[cscd(&a, false)], &many);
        let out = Buffer::new(&list, list.len());
        let mut task = Task::new(7);
        task.prepare(&pad(&cdb(list.len())), out.sg(), Buffer::new(&[], 1).sg());
        let outcome = unit.lun.start(&mut task);
        assert_eq!(outcome, Outcome::Pending);
        if reset {
            unit.shared.reset()
        } else {
            task.abort()
        }
        let Outcome::Done(ended) = unit.until_over(&mut task, outcome) else { panic!() };
        assert_eq!(ended.status, Status::TaskAborted);
        // Not all of it was done; what there was is told.
        if reset {
            assert_eq!(unit.run(&[0; 6]).sense(), (0x6, 0x2900));
        }
        let answer = status(&mut unit, 9);
        assert_eq!(answer.good()[4], 2);
    }
}

#[test]
fn parameter_lists_that_are_refused() {
    let [(a, mut unit), (b, _other)] = two();
    let cscds = [cscd(&a, false), cscd(&b, false)];
    let one = segment((0, 0), (1, 0), 1);
    let good = list(&cscds, std::slice::from_ref(&one));
    let with = |at: usize, value: u8| {
        let mut list = good.clone();
        list[at] = value;
        list
    };
    let many = |count: usize, what: &Vec<u8>| vec![what.clone(); count];
    for (list, expected) in [
        (good[..15].to_vec(), LIST_LENGTH),
        (good[..60].to_vec(), LIST_LENGTH),
        (good[..good.len() - 1].to_vec(), LIST_LENGTH),
        (list(&cscds, &[one[..27].to_vec()]), LIST_LENGTH),
        (list(&[cscds[0].clone(), cscds[1][..31].to_vec()], &[]), LIST_LENGTH),
        (list(&many(9, &cscds[0]), &many(1, &one)), (0x5, 0x2606)),
        (list(&cscds, &many(65, &one)), (0x5, 0x2608)),
        (list(&many(9, &cscds[0]), &many(80, &one)), LIST_LENGTH),
        (with(16, 0xE0), (0x5, 0x2607)),
        (with(16 + 64, 0x03), (0x5, 0x2609)),
        (with(16 + 64 + 3, 0x17), LIST_FIELD),
        (with(15, 1), LIST_FIELD),                    // inline data
        (with(1, 0x08), LIST_FIELD),                  // LIST ID USAGE 01b
        (with(1, 0x18), LIST_FIELD),                  // 11b with an identifier
        (with(16 + 5, 0x13), LIST_FIELD),             // a designator of a port
        (with(16 + 7, 21), LIST_FIELD),               // longer than there is room
        (with(16 + 30, 0x10), LIST_FIELD),            // blocks of another size
        (with(16 + 9, !good[16 + 9]), NOT_REACHABLE), // nobody's name
    ] {
        assert_eq!(copy(&mut unit, &list).sense(), expected, "{list:x?}");
    }
    let short = unit.io(&cdb(good.len()), &good[..good.len() - 1], 0);
    assert_eq!(short.outcome, Outcome::Overrun);
    unit.run(&cdb(0)).good();
    copy(&mut unit, &good).good();
}

#[test]
fn spc4_6_19_and_7_8_17_what_is_told_of_copies_is_the_same() {
    let [(_, mut unit), _] = two();
    let mut cdb = cdb16(0x84, 3, 0, 0);
    cdb[13] = 255;
    let answer = unit.io(&cdb, &[], 255);
    let told = answer.good();
    assert_eq!((told.len(), told[3]), (46, 42));
    assert_eq!(told[8..12], [0, 8, 0, 64]);
    assert_eq!(told[43..], [2, 0x02, 0xE4]);
    let page = unit.io(&[0x12, 1, 0x8F, 4, 0, 0], &[], 1024);
    let page = page.good();
    assert_eq!(usize::from(u16::from_be_bytes([page[2], page[3]])), page.len() - 4);
    let (mut rest, mut found) = (&page[4..], Vec::new());
    while !rest.is_empty() {
        let length = usize::from(u16::from_be_bytes([rest[2], rest[3]]));
        assert!(length.is_multiple_of(4));
        found.push((u16::from_be_bytes([rest[0], rest[1]]), &rest[4..4 + length]));
        rest = &rest[4 + length..];
    }
    let kinds: Vec<u16> = found.iter().map(|(kind, _)| *kind).collect();
    assert_eq!(kinds, [0x0000, 0x0001, 0x0004, 0x0008, 0x000C, 0x0106, 0x0108, 0x8001]);
    // 64 ranges, an hour, a minute, 256 MiB, 64 MiB.
    assert_eq!(found[0].1[6..16], [0, 64, 0, 0, 14, 16, 0, 0, 0, 60]);
    assert_eq!(
        found[0].1[16..],
        [(512u64 << 10).to_be_bytes(), (128u64 << 10).to_be_bytes()].concat()
    );
    let commands = [0x83, 5, 0, 1, 0x10, 0x11, 0x1C, 0x84, 5, 0, 3, 4, 5, 7];
    assert_eq!((found[1].1[0], &found[1].1[1..15]), (14, &commands[..]));
    assert_eq!(found[2].1[4..12], told[8..16]);
    assert_eq!(found[5].1[20..24], 3600u32.to_be_bytes());
    assert_eq!(found[5].1[42..48], [0, 48, 0, 0, 0, 44]);
    assert_eq!(found[5].1[52..60], (256u64 << 20).to_be_bytes());
    // In and out; zeros, in.
    assert_eq!(found[6].1[2..12], [0, 128, 0, 0x80, 0, 1, 3, 0, 0, 1][..]);
    assert_eq!(found[6].1[68..73], [0xFF, 0xFF, 0, 1, 2]);
    assert_eq!(found[7].1[8..12], told[16..20]);
}

/// The parameter list with a 4-byte list identifier.
fn list4(flags: (u8, u8), list_id: u32, cscds: &[Vec<u8>], segments: &[Vec<u8>]) -> Vec<u8> {
    let (cscds, segments) = (cscds.concat(), segments.concat());
    let mut list = vec![0; 48];
    (list[0], list[1], list[3], list[15], list[16]) = (1, flags.0, 32, flags.1, 0xFF);
    list[20..24].copy_from_slice(&list_id.to_be_bytes());
    list[42..44].copy_from_slice(&(cscds.len() as u16).to_be_bytes());
    list[44..46].copy_from_slice(&(segments.len() as u16).to_be_bytes());
    [list, cscds, segments].concat()
}

fn copy4(unit: &mut Unit, list: &[u8]) -> Answer {
    let mut cdb = cdb(list.len());
    cdb[1] = 1;
    unit.io(&cdb, list, 0)
}

/// RECEIVE COPY STATUS(LID4).
fn status4(unit: &mut Unit, list_id: u32) -> Answer {
    let mut cdb = cdb16(0x84, 5, 0, 0);
    cdb[2..6].copy_from_slice(&list_id.to_be_bytes());
    cdb[13] = 255;
    unit.io(&cdb, &[], 255)
}

#[test]
fn spc4_6_5_a_copy_may_have_four_bytes_of_identifier() {
    let [(a, mut unit), (b, _other)] = two();
    let cscds = [cscd(&a, false), cscd(&b, true)];
    let segments = [segment((0, 10), (1, 5000), 3000), segment((0, 0), (1, 0), 1)];
    let mut expected = medium(&b);
    expected[5000 * 512..8000 * 512].copy_from_slice(&medium(&a)[10 * 512..3010 * 512]);
    expected[..512].copy_from_slice(&medium(&a)[..512]);
    status4(&mut unit, 0x0102_0304).invalid_cdb(2, None);
    copy4(&mut unit, &list4((0, 0), 0x0102_0304, &cscds, &segments)).good();
    assert!(medium(&b) == expected);
    let answer = status4(&mut unit, 0x0102_0304);
    let told = answer.good();
    assert_eq!((told.len(), told[3], told[4], told[5]), (32, 28, 1, 1));
    assert_eq!(told[15], 0, "bytes");
    assert_eq!(told[16..24], (3001u64 * 512).to_be_bytes());
    assert_eq!(told[24..26], [0, 2]);
    // One byte is four that are small.
    copy(&mut unit, &list(&cscds, &segments)).good();
    assert_eq!(status4(&mut unit, 9).good()[4..6], [0, 1]);
    // With nothing to ask for.
    copy4(&mut unit, &list4((0x18, 0), 0, &cscds, &segments)).good();
    status4(&mut unit, 0).invalid_cdb(2, None);
}

#[test]
fn with_immed_a_copy_is_waited_for_too() {
    let [(a, mut unit), (b, _other)] = two();
    let mut expected = medium(&b);
    expected[..4096 * 512].copy_from_slice(&medium(&a)[4096 * 512..]);
    let one = segment((0, 4096), (1, 0), 4096);
    copy4(&mut unit, &list4((0, 1), 77, &[cscd(&a, false), cscd(&b, false)], &[one])).good();
    assert!(medium(&b) == expected);
    assert_eq!(status4(&mut unit, 77).good()[4..6], [1, 1]);
}

#[test]
fn parameter_lists_of_four_byte_identifiers_that_are_refused() {
    let [(a, mut unit), (b, _other)] = two();
    let cscds = [cscd(&a, false), cscd(&b, false)];
    let one = segment((0, 0), (1, 0), 1);
    let good = list4((0, 0), 5, &cscds, std::slice::from_ref(&one));
    let with = |at: usize, value: u8| {
        let mut list = good.clone();
        list[at] = value;
        list
    };
    let many = |count: usize, what: &Vec<u8>| vec![what.clone(); count];
    for (list, expected) in [
        (good[..47].to_vec(), LIST_LENGTH),
        (good[..good.len() - 1].to_vec(), LIST_LENGTH),
        (with(0, 0), LIST_FIELD),  // another format
        (with(3, 0), LIST_FIELD),  // no header CSCD descriptor
        (with(16, 0), LIST_FIELD), // of another type
        (with(47, 1), LIST_FIELD), // inline data
        (with(1, 0x18), LIST_FIELD),
        (list4((0x18, 1), 0, &cscds, &[]), LIST_FIELD), // nobody could ask for it
        (list4((0, 0), 5, &many(9, &cscds[0]), &many(1, &one)), (0x5, 0x2606)),
        (list4((0, 0), 5, &cscds, &many(65, &one)), (0x5, 0x2608)),
        (with(48, 0xE0), (0x5, 0x2607)),
        (with(48 + 64, 0x03), (0x5, 0x2609)),
    ] {
        assert_eq!(copy4(&mut unit, &list).sense(), expected, "{list:x?}");
    }
    copy4(&mut unit, &good).good();
}

#[test]
fn other_commands_of_threads_are_done_while_copies_go_on() {
    let gate = Held::new(disk(0));
    let [(a, mut unit), (b, _other)] = two_of([gate.clone(), disk(1)]);
    let cscds = [cscd(&a, false), cscd(&b, false)];
    let mut expected = medium(&b);
    expected[..4096 * 512].copy_from_slice(&medium(&a)[..4096 * 512]);
    let of = |id: u8| {
        let mut list = list(&cscds, &[segment((0, 0), (1, 0), 4096)]);
        list[0] = id;
        list
    };
    let cdb = cdb(of(0).len());
    let (mut first, _out) = unit.begin(1, &cdb, &of(1));
    let (mut second, _more) = unit.begin(2, &cdb, &of(2));
    gate.until_held(2);
    // PERSISTENT RESERVE OUT, and MODE SELECT of the caching page: the write cache is off.
    let keys = [&[0; 8], &1u64.to_be_bytes()[..], &[0; 8]].concat();
    let no_cache = [&[0; 4][..], &[8, 18], &[0; 18]].concat();
    for (cdb, data) in [
        (&[0x5F, 0, 0, 0, 0, 0, 0, 0, 24, 0][..], &keys),
        (&[0x15, 0x10, 0, 0, 24, 0][..], &no_cache),
    ] {
        let (out, mut task) = (Buffer::new(data, 24), Task::new(3));
        task.prepare(&pad(cdb), out.sg(), Buffer::new(&[], 1).sg());
        let outcome = unit.lun.start(&mut task);
        let others = &mut [&mut *first, &mut *second];
        let outcome = unit.until_over_beside(&mut task, outcome, others);
        assert!(matches!(outcome, Outcome::Done(r) if r.status == Status::Good), "{outcome:?}");
    }
    // Each unit has eight copies at most.
    let mut more: Vec<_> = (3..9).map(|n| unit.begin(n, &cdb, &of(n as u8))).collect();
    let out = Buffer::new(&of(9), 4096);
    let mut ninth = Task::new(9);
    ninth.prepare(&pad(&cdb), out.sg(), Buffer::new(&[], 1).sg());
    assert_eq!(unit.lun.start(&mut ninth), Outcome::Done(Response::bare(Status::Busy)));
    gate.let_go(u64::MAX);
    let mut tasks: Vec<&mut Task> = vec![&mut first, &mut second];
    tasks.extend(more.iter_mut().map(|(task, _)| &mut **task));
    let mut done = Vec::with_capacity(1);
    while !tasks.is_empty() {
        done.clear();
        unit.lun.poll(&mut done);
        for of in &done {
            let at = tasks.iter().position(|task| task.tag() == of.tag).unwrap();
            match unit.lun.resume(tasks[at], of.result) {
                Outcome::Pending => {}
                Outcome::Done(Response { status: Status::Good, .. }) => drop(tasks.remove(at)),
                other => panic!("{other:?}"),
            }
        }
    }
    assert!(medium(&b) == expected);
}

#[test]
fn an_aborted_copy_is_told_over_when_its_io_is_however_many_tasks_wait_for_their_turn() {
    let gate = Held::new(disk(0));
    let [(a, mut unit), (b, _other)] = two_of([gate.clone(), disk(1)]);
    let before = medium(&b);
    let order = list(&[cscd(&a, false), cscd(&b, false)], &[segment((0, 0), (1, 0), 4096)]);
    let (mut task, _out) = unit.begin(1, &cdb(order.len()), &order);
    gate.until_held(1);
    // UNMAPs of more ranges than are done in a turn.
    let mut done = Vec::with_capacity(1);
    assert_eq!(unit.lun.poll(&mut done), 1);
    let ranges = [&8000u64.to_be_bytes()[..], &[0, 0, 0, 1, 0, 0, 0, 0]].concat().repeat(9);
    let ranges = [&[0, 150, 0, 144, 0, 0, 0, 0][..], &ranges].concat();
    let unmap = cdb10(0x42, 0, 0, ranges.len() as u16);
    let others: Vec<_> = (2..130).map(|tag| unit.begin(tag, &unmap, &ranges)).collect();
    assert_eq!(others.len(), 128);
    assert_eq!(unit.lun.resume(&mut task, done[0].result), Outcome::Pending);
    task.abort();
    loop {
        done.clear();
        assert_eq!(unit.lun.poll(&mut done), 1);
        if done[0].tag == 1 {
            break;
        }
    }
    assert_eq!(unit.lun.resume(&mut task, done[0].result), Outcome::Pending);
    // What it reads is not written any more.
    gate.let_go(1);
    let outcome = unit.until_over(&mut task, Outcome::Pending);
    assert_eq!(outcome, Outcome::Done(Response::bare(Status::TaskAborted)));
    assert!(medium(&b) == before);
}

/// A copy of 4000 blocks that is to stop once so many I/Os of it have begun, of which the last one is let go then; if it
/// `goes_on`, when it is not to stop any more.
fn stopped(to: u64, ios: u64, goes_on: bool) -> (Outcome, bool) {
    let gate = Held::new(disk(0));
    let [(a, mut unit), _other] = two_of([gate.clone(), disk(1)]);
    let order = list(&[cscd(&a, false)], &[segment((0, 0), (0, to), 4000)]);
    let (mut task, _out) = unit.begin(1, &cdb(order.len()), &order);
    if ios > 0 {
        let mut done = Vec::with_capacity(1);
        for _ in 0..2 {
            done.clear();
            unit.lun.poll(&mut done);
            assert_eq!(unit.lun.resume(&mut task, Ok(())), Outcome::Pending);
        }
        gate.let_go(ios - 1);
        gate.until_held(1);
    }
    let unrepeatable = task.is_unrepeatable();
    task.stop();
    if ios > 0 {
        // The thread knows it before its I/O ends, or it would begin one more, which nobody lets go.
        let mut done = Vec::with_capacity(1);
        unit.lun.poll(&mut done);
        assert_eq!(unit.lun.resume(&mut task, Ok(())), Outcome::Pending);
    }
    if goes_on {
        task.go_on();
    }
    gate.let_go(1);
    (unit.until_over(&mut task, Outcome::Pending), unrepeatable)
}

#[test]
fn spc4_6_4_a_copy_onto_its_own_source_that_is_stopped_is_not_done_again_but_told() {
    // Nothing was changed yet.
    for ios in [0, 1] {
        let (outcome, unrepeatable) = stopped(100, ios, false);
        assert_eq!(outcome, Outcome::Done(Response::bare(Status::Busy)));
        assert_eq!(unrepeatable, ios > 0);
    }
    let (outcome, unrepeatable) = stopped(100, 3, false);
    assert_eq!(Answer { outcome, data: Vec::new() }.sense(), (0xA, 0x0006));
    assert!(unrepeatable);
    // Done again, this one copies the same.
    let (outcome, unrepeatable) = stopped(4000, 3, false);
    assert_eq!(outcome, Outcome::Done(Response::bare(Status::TaskAborted)));
    assert!(!unrepeatable);
}

#[test]
fn a_copy_that_was_stopped_and_whose_task_goes_on_is_not_told_as_aborted_by_somebody() {
    let (outcome, _) = stopped(100, 3, true);
    assert_eq!(Answer { outcome, data: Vec::new() }.sense(), (0xA, 0x0006));
    let (outcome, _) = stopped(4000, 3, true);
    assert_eq!(outcome, Outcome::Done(Response::bare(Status::Busy)));
}

#[test]
fn what_a_segment_reads_that_a_later_one_writes_makes_a_copy_unrepeatable() {
    let (near, far) = (segment((0, 0), (1, 0), 8), segment((1, 0), (0, 4), 8));
    let away = segment((1, 0), (0, 8), 8);
    for (segments, expected) in [
        (vec![near.clone()], false),
        (vec![near.clone(), away], false),
        (vec![near.clone(), far.clone()], true),
        (vec![far, near], true),
        (vec![segment((0, 0), (1, 0), 8), segment((1, 0), (1, 8), 8)], false),
    ] {
        let [(a, mut unit), (b, _other)] = two();
        let order = list(&[cscd(&a, false), cscd(&b, false)], &segments);
        let (mut task, _out) = unit.begin(1, &cdb(order.len()), &order);
        let mut done = Vec::with_capacity(1);
        unit.lun.poll(&mut done);
        let outcome = unit.lun.resume(&mut task, Ok(()));
        assert_eq!(task.is_unrepeatable(), expected, "{segments:x?}");
        let outcome = unit.until_over(&mut task, outcome);
        assert!(matches!(outcome, Outcome::Done(r) if r.status == Status::Good), "{outcome:?}");
    }
}

#[test]
fn what_the_source_has_no_room_for_is_zeroed_and_neither_read_nor_written() {
    // A hole that begins within what is read at a time, and one in the middle of that.
    let source = malloc(0);
    let mut channel = SyncChannel::open(&*source).unwrap();
    let holes = [100..6000, 6500..6508];
    for hole in &holes {
        channel.write_zeroes(hole.start, hole.end - hole.start).unwrap();
    }
    for (from, to, within) in [(0, 8, false), (50, 0, true), (0, 50, true)] {
        let source = Held::new(Holes::new(source.clone(), &holes));
        let target = Held::new(disk(1));
        let [(a, mut unit), (b, _other)] = two_of([source.clone(), target.clone()]);
        source.let_go(u64::MAX);
        target.let_go(u64::MAX);
        let source_had = medium(&a);
        let (disk, on, asked) = if within { (&a, 0, &source) } else { (&b, 1, &target) };
        let mut expected = medium(disk);
        expected[to * 512..][..8000 * 512].copy_from_slice(&source_had[from * 512..][..8000 * 512]);
        let segment = segment((0, from as u64), (on, to as u64), 8000);
        copy(&mut unit, &list(&[cscd(&a, false), cscd(&b, false)], &[segment])).good();
        assert!(medium(disk) == expected, "from {from} to {to}");
        let of = |held: &Held, op| {
            held.asked().into_iter().filter(|io| io.0 == op).map(|io| io.2).sum::<u64>()
        };
        // The disk is thin.
        let (read, written) = (of(&source, Op::Read), of(asked, Op::Write));
        assert_eq!((read, written + of(asked, Op::Unmap)), (written, 8000));
        match (within, to > from) {
            // From the end on, in steps of 2048 blocks.
            (true, true) => assert_eq!(read, 8000 - 2 * 2048),
            _ => assert_eq!(read, 8000 - 5900 - 8),
        }
        if !within {
            assert_eq!(of(&target, Op::Unmap), 5908);
        }
        // What the next round begins with.
        channel.write(0, &source_had).unwrap();
    }
}

#[test]
fn what_the_source_has_no_room_for_is_zeroed_from_the_end_on_wherever_it_ends() {
    const AT_ONCE: u64 = (32 << 20) / 512;
    let source = MallocOptions {
        name: "large".to_owned(),
        block_size: 512,
        physical_block_size: 0,
        num_blocks: AT_ONCE + 4000,
        uuid: None,
    };
    let source = Malloc::create(source).unwrap();
    let mut channel = SyncChannel::open(&*source).unwrap();
    // No step from its end on ends where zeroing is cut.
    let (to, blocks) = (AT_ONCE - 1500, 5000);
    channel.write(to, &vec![0xAA; blocks as usize * 512]).unwrap();
    let hole = 0..8000;
    let source = Holes::new(source, std::slice::from_ref(&hole));
    let [(a, mut unit), _other] = two_of([source, disk(1)]);
    let segment = segment((0, 0), (0, to), blocks as u16);
    copy(&mut unit, &list(&[cscd(&a, false)], &[segment])).good();
    let mut written = vec![1; blocks as usize * 512];
    channel.read(to, &mut written).unwrap();
    let stayed = written.chunks(512).position(|block| block != [0; 512]);
    assert_eq!(stayed, None, "block of what was copied");
}
