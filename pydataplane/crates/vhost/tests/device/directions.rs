//! Limits of one direction: what waits for them holds back nobody of the other, in the same queue of the same disk.

use std::time::{Duration, Instant};

use bdev::testing::{Fault, FaultBdev};
use bdev::{IoError, Op, Rate, RateLimits, Share};
use vhost_scsi::{ErrorPolicy, TargetOptions, WaitFor};

use crate::blk::{self, FLUSH, finish, header, host_with, segment, submit};
use crate::blk_suspended::{
    all_end_well, guest_of, put, start_again, wait_until_suspended, wait_until_taken,
};
use crate::guest::*;
use crate::host::*;
use crate::inflight::Region;
use crate::peer::*;

const READ: u8 = 0x28;
const WRITE: u8 = 0x2a;
const ORDERED: u8 = 1;
const HEAD_OF_QUEUE: u8 = 2;
const ABORT_TASK: u32 = 0;
/// VIRTIO_SCSI_S_ABORTED and S_RESET (virtio 1.2 5.6.6.1).
const ABORTED: u8 = 2;
const RESET: u8 = 4;
const MIB: usize = 1 << 20;

/// Limits of one kind of I/O: after one of a sector the next waits for 512 s.
fn hard(share: Share) -> RateLimits {
    let mut to = RateLimits { operation_bytes: 1, ..RateLimits::default() };
    to.operations[share as usize] = Rate { average: 1, ..Rate::default() };
    to
}

/// So many operations a second.
fn operations(share: Share, average: u64) -> RateLimits {
    let mut to = RateLimits::default();
    to.operations[share as usize] = Rate { average, ..Rate::default() };
    to
}

fn limit(host: &Host, name: &str, to: RateLimits) {
    host.registry.limits(name).set(to).unwrap();
}

/// A host with two disks of one guest's, of which the first has these limits, and a guest.
fn limited(to: RateLimits) -> (Host, Guest) {
    let host = Host::with_disk(1);
    host.malloc("disk1");
    host.add(1, "disk1");
    let mut guest = Guest::start(&host.socket(), LINUX, 2);
    (0..2).for_each(|target| guest.ready(target));
    limit(&host, "disk0", to);
    (host, guest)
}

/// A READ or WRITE of a sector of target 0, whose name is that of the sector.
fn ask(guest: &mut Guest, code: u8, lba: u32) -> Request {
    ask_with(guest, 0, code, lba)
}

/// The same, with a task attribute.
fn ask_with(guest: &mut Guest, attribute: u8, code: u8, lba: u32) -> Request {
    let (data_out, data_in): (&[u8], _) =
        if code == READ { (&[], 512) } else { (&[lba as u8; 512], 0) };
    let cdb = rw10(code, lba, 1);
    guest.submit_with(attribute, 2, flat(0), lba.into(), &cdb, data_out, data_in)
}

/// Waits until all that was submitted has been taken and what may begin of it has begun.
fn settle(guest: &mut Guest) {
    for _ in 0..3 {
        let request = guest.submit(3, flat(1), 0, &rw10(READ, 0, 1), &[], 512);
        assert_eq!(guest.finish(&request).status, 0);
    }
}

/// All of `requests` end as GOOD, in whichever order.
fn all_end(guest: &mut Guest, requests: &[Request]) {
    let order = end_in_order(guest, requests);
    assert_eq!(order.len(), requests.len());
}

/// All of `requests` end as GOOD: the place of each among them, in the order in which they ended.
fn end_in_order(guest: &mut Guest, requests: &[Request]) -> Vec<usize> {
    let one = |_| {
        let (head, written) = guest.used(2);
        let nth = requests.iter().position(|r| r.head == head).expect("of these");
        let reply = guest.reply(&requests[nth], written);
        assert_eq!((reply.response, reply.status), (0, 0));
        nth
    };
    (0..requests.len()).map(one).collect()
}

#[test]
fn what_is_not_limited_goes_on_beside_the_other_direction_that_waits() {
    for (share, slow, fast) in [(Share::Write, WRITE, READ), (Share::Read, READ, WRITE)] {
        let (host, mut guest) = limited(hard(share));
        let first = ask(&mut guest, slow, 0);
        assert_eq!(guest.finish(&first).status, 0);
        let waiting: Vec<_> = (1..100).map(|lba| ask(&mut guest, slow, lba)).collect();
        for lba in 200..1200 {
            let request = ask(&mut guest, fast, lba);
            assert_eq!(guest.finish(&request).status, 0);
        }
        limit(&host, "disk0", RateLimits::default());
        let order = end_in_order(&mut guest, &waiting);
        assert!(order.is_sorted(), "in the order in which they were taken: {order:?}");
    }
}

#[test]
fn of_a_virtio_blk_disk_too() {
    let disk = FaultBdev::new("disk", 512, 8192);
    for (share, slow, fast) in [(Share::Write, true, false), (Share::Read, false, true)] {
        let host = host_with(&disk, TargetOptions::default());
        let (mut guest, _) = guest_of(&host, 1, false);
        limit(&host, "disk", hard(share));
        let of = |guest: &mut Guest, writes, sector| match writes {
            true => put(guest, 0, sector, 1),
            false => submit(guest, 0, &header(blk::IN, sector), 512, usize::MAX),
        };
        let first = of(&mut guest, slow, 0);
        assert_eq!(finish(&mut guest, &first).0, blk::OK);
        let waiting: Vec<_> = (1..100).map(|sector| of(&mut guest, slow, sector)).collect();
        for sector in 200..1200 {
            let request = of(&mut guest, fast, sector);
            assert_eq!(finish(&mut guest, &request).0, blk::OK);
        }
        limit(&host, "disk", RateLimits::default());
        all_end_well(&mut guest, &waiting);
    }
}

/// A writer has what its limit gives it, and a reader beside it, in the same queue, all that the disk gives.
#[test]
fn a_writer_at_its_limit_leaves_a_reader_at_full_speed() {
    let (host, mut guest) = limited(RateLimits::default());
    let reads_for = |guest: &mut Guest, until: &mut dyn FnMut() -> bool| {
        let (since, mut reads) = (Instant::now(), 0u32);
        while !until() {
            assert_eq!(guest.read_blocks(0, 300 + reads % 100, 1).status, 0);
            reads += 1;
        }
        f64::from(reads) / since.elapsed().as_secs_f64()
    };
    let end = Instant::now() + Duration::from_millis(300);
    let alone = reads_for(&mut guest, &mut || Instant::now() > end);
    limit(&host, "disk0", operations(Share::Write, 100));
    let began = Instant::now();
    // Eleven begin at once; the others take 490 ms.
    let writes: Vec<_> = (0..60).map(|lba| ask(&mut guest, WRITE, lba)).collect();
    let (since, mut reads, mut left) = (Instant::now(), 0u32, writes.len());
    while left > 0 {
        let request = ask(&mut guest, READ, 300 + reads % 100);
        loop {
            let (head, written) = guest.used(2);
            let of = writes.iter().find(|write| write.head == head);
            assert_eq!(guest.reply(of.unwrap_or(&request), written).status, 0);
            match of {
                Some(_) => left -= 1,
                None => break,
            }
        }
        reads += 1;
    }
    assert!(began.elapsed() > Duration::from_millis(480), "the writes are limited");
    let beside = f64::from(reads) / since.elapsed().as_secs_f64();
    // In one list it has one read for each write.
    assert!(beside > alone / 4.0, "{beside:.0} a second, and {alone:.0} alone");
    assert!(reads > 500, "{reads}");
}

/// Wherever they could go in another order, ORDERED is what it was.
#[test]
fn an_ordered_request_waits_for_both_directions_and_both_wait_for_it() {
    for code in [READ, WRITE] {
        let (host, mut guest) = limited(hard(Share::Write));
        let first = ask(&mut guest, WRITE, 0);
        assert_eq!(guest.finish(&first).status, 0);
        let before = ask(&mut guest, WRITE, 1);
        let passes = ask(&mut guest, READ, 2);
        let ordered = ask_with(&mut guest, ORDERED, code, 3);
        let after = [ask(&mut guest, READ, 4), ask(&mut guest, WRITE, 5), ask(&mut guest, READ, 6)];
        let last = ask_with(&mut guest, ORDERED, READ, 7);
        let behind = ask(&mut guest, READ, 8);
        settle(&mut guest);
        // What was taken before it goes on as if it were not there.
        assert_eq!(guest.finish(&passes).status, 0);
        settle(&mut guest);
        assert_eq!(guest.try_used(2), None, "all behind it wait");
        limit(&host, "disk0", RateLimits::default());
        let all = [before, ordered, after[0], after[1], after[2], last, behind];
        assert_eq!(end_in_order(&mut guest, &all), [0, 1, 2, 3, 4, 5, 6]);
    }
}

#[test]
fn an_ordered_request_that_waits_for_its_limit_keeps_all_behind_it_and_no_other_disk() {
    let (host, mut guest) = limited(hard(Share::Write));
    let first = ask(&mut guest, WRITE, 0);
    assert_eq!(guest.finish(&first).status, 0);
    let ordered = ask_with(&mut guest, ORDERED, WRITE, 1);
    let read = ask(&mut guest, READ, 2);
    settle(&mut guest);
    assert_eq!(guest.try_used(2), None);
    limit(&host, "disk0", RateLimits::default());
    assert_eq!(end_in_order(&mut guest, &[ordered, read]), [0, 1]);
}

#[test]
fn head_of_queue_goes_before_all_that_wait_of_either_direction() {
    let (host, mut guest) = limited(hard(Share::Total));
    let first = ask(&mut guest, WRITE, 0);
    assert_eq!(guest.finish(&first).status, 0);
    let mut all = vec![ask(&mut guest, WRITE, 1), ask(&mut guest, READ, 2)];
    all.push(ask_with(&mut guest, ORDERED, READ, 3));
    all.push(ask_with(&mut guest, HEAD_OF_QUEUE, WRITE, 4));
    settle(&mut guest);
    assert_eq!(guest.try_used(2), None);
    limit(&host, "disk0", RateLimits::default());
    assert_eq!(end_in_order(&mut guest, &all), [3, 0, 1, 2]);
}

/// A host whose first disk does nothing more for 512 s, and what waits there: a write, a read, one that is ORDERED, and
/// one of each behind that.
fn waiting_of_each() -> (Host, Guest, Vec<Request>) {
    let (host, mut guest) = limited(hard(Share::Total));
    let first = ask(&mut guest, READ, 0);
    assert_eq!(guest.finish(&first).status, 0);
    let mut all = vec![ask(&mut guest, WRITE, 1), ask(&mut guest, READ, 2)];
    all.push(ask_with(&mut guest, ORDERED, WRITE, 3));
    all.extend([ask(&mut guest, READ, 4), ask(&mut guest, WRITE, 5)]);
    all.push(ask_with(&mut guest, HEAD_OF_QUEUE, READ, 6));
    settle(&mut guest);
    assert_eq!(guest.try_used(2), None);
    (host, guest, all)
}

#[test]
fn task_management_finds_what_waits_in_each_list() {
    let (host, mut guest, mut all) = waiting_of_each();
    for nth in [5, 2, 1, 0] {
        let request = all.remove(nth);
        let id = nth as u64 + 1;
        assert_eq!(guest.control(&tmf(ABORT_TASK, flat(0), id), 1), [0], "FUNCTION COMPLETE");
        assert_eq!(guest.finish(&request).response, ABORTED);
    }
    limit(&host, "disk0", RateLimits::default());
    all_end(&mut guest, &all);

    let (_host, mut guest, all) = waiting_of_each();
    assert_eq!(guest.control(&tmf(LOGICAL_UNIT_RESET, flat(0), 0), 1), [0]);
    let mut left = all;
    while !left.is_empty() {
        let (head, written) = guest.used(2);
        let nth = left.iter().position(|r| r.head == head).expect("once for each");
        assert_eq!(guest.reply(&left.swap_remove(nth), written).response, RESET);
    }
}

#[test]
fn a_stop_a_change_of_memory_and_an_unplug_wait_for_no_list() {
    let (_host, mut guest, mut left) = waiting_of_each();
    guest.peer.send(GET_VRING_BASE, &words(&[2, 0]), &[]);
    guest.peer.reply(GET_VRING_BASE).unwrap();
    while !left.is_empty() {
        let (head, written) = guest.used(2);
        let nth = left.iter().position(|r| r.head == head).expect("once for each");
        let status = guest.reply(&left.swap_remove(nth), written).status;
        assert!(matches!(status, 0 | 8), "GOOD or BUSY, not {status}");
    }

    let (host, mut guest, all) = waiting_of_each();
    host.controllers.remove_target("vm0", 0).unwrap();
    all_end(&mut guest, &all);

    let (_host, mut guest, all) = waiting_of_each();
    guest.tell_memory();
    all_end(&mut guest, &all);
}

#[test]
fn a_session_that_ends_leaves_nothing_of_either_direction() {
    let (host, guest, _) = waiting_of_each();
    drop(guest);
    host.wait_until_free();
    limit(&host, "disk0", RateLimits::default());
    let mut guest = Guest::start(&host.socket(), LINUX, 1);
    guest.ready(0);
    assert_eq!(guest.read_blocks(0, 0, 1).status, 0);
}

#[test]
fn a_queue_of_virtio_blk_stops_when_what_waits_of_both_directions_is_done() {
    let disk = FaultBdev::new("disk", 512, 8192);
    let host = host_with(&disk, TargetOptions::default());
    limit(&host, "disk", hard(Share::Total));
    let (mut guest, _) = guest_of(&host, 1, false);
    let first = put(&mut guest, 0, 0, 1);
    assert_eq!(finish(&mut guest, &first).0, blk::OK);
    let mut all = vec![put(&mut guest, 0, 1, 2)];
    all.push(submit(&mut guest, 0, &header(blk::IN, 0), 512, usize::MAX));
    all.push(put(&mut guest, 0, 2, 3));
    wait_until_taken(&host, 4);
    assert_eq!(guest.try_used(0), None);
    assert_eq!(guest.peer.base(0), 4);
    all_end_well(&mut guest, &all);
}

/// Both are looked at again 50 ms after they were looked at last. The least of some tries counts: the machine may have
/// other things to do.
#[test]
fn a_changed_limit_is_in_force_for_both_directions_within_100_ms() {
    for to in [RateLimits::default(), operations(Share::Total, 1000)] {
        let took = (0..5).map(|_| {
            let (host, mut guest, all) = waiting_of_each();
            // The reactor sleeps.
            std::thread::sleep(Duration::from_millis(60));
            let since = Instant::now();
            limit(&host, "disk0", to);
            all_end(&mut guest, &all);
            since.elapsed()
        });
        let least = took.min().unwrap();
        assert!(least < Duration::from_millis(100), "{least:?}");
    }
}

/// However many wait of one direction, the other has its turn.
#[test]
fn a_total_is_shared_by_both_directions() {
    for (flood, few) in [(WRITE, READ), (READ, WRITE)] {
        let (_host, mut guest) = limited(operations(Share::Total, 200));
        let flood: Vec<_> = (0..100).map(|lba| ask(&mut guest, flood, lba)).collect();
        settle(&mut guest);
        let (mut done, mut of_flood) = (0, 0);
        // 21 of the flood begin at once.
        while done < 30 {
            let request = ask(&mut guest, few, 300 + done);
            loop {
                let (head, written) = guest.used(2);
                let of = flood.iter().find(|request| request.head == head);
                assert_eq!(guest.reply(of.unwrap_or(&request), written).status, 0);
                match of {
                    Some(_) => of_flood += 1,
                    None => break,
                }
            }
            done += 1;
        }
        assert!((40..=85).contains(&of_flood), "{of_flood} beside {done}");
    }
}

/// What no limit is of stands with the writes, in their order.
#[test]
fn flushes_and_discards_wait_behind_writes_and_pass_reads() {
    const DISCARD: u32 = blk::DISCARD;
    let others = |guest: &mut Guest| {
        let out = [header(DISCARD, 0), segment(100, 1, 0)].concat();
        let discard = submit(guest, 0, &out, 0, usize::MAX);
        [submit(guest, 0, &header(FLUSH, 0), 0, usize::MAX), discard]
    };
    let disk = FaultBdev::new("disk", 512, 8192);
    let host = host_with(&disk, TargetOptions::default());
    let (mut guest, _) = guest_of(&host, 1, false);
    let read = |guest: &mut Guest| submit(guest, 0, &header(blk::IN, 0), 512, usize::MAX);
    limit(&host, "disk", hard(Share::Read));
    let first = read(&mut guest);
    assert_eq!(finish(&mut guest, &first).0, blk::OK);
    let waiting = read(&mut guest);
    let passing = others(&mut guest);
    all_end_well(&mut guest, &passing);
    limit(&host, "disk", hard(Share::Write));
    assert_eq!(finish(&mut guest, &waiting).0, blk::OK);
    let first = put(&mut guest, 0, 1, 1);
    assert_eq!(finish(&mut guest, &first).0, blk::OK);
    let mut behind = vec![put(&mut guest, 0, 100, 2)];
    behind.extend(others(&mut guest));
    let passing = read(&mut guest);
    assert_eq!(finish(&mut guest, &passing).0, blk::OK);
    assert_eq!(guest.try_used(0), None, "the flush is for the write, too");
    limit(&host, "disk", RateLimits::default());
    all_end_well(&mut guest, &behind);
    let (_, data) = blk::ask(&mut guest, blk::IN, 100, &[], 512);
    assert_eq!(data, [0; 512], "it was discarded after it was written");
}

/// What waits for its limit needs no room yet, so it keeps nothing that needs less from it.
#[test]
fn a_large_write_that_waits_for_its_limit_does_not_keep_reads_from_room() {
    let (host, gate) = Host::gated(1);
    let mut guest = Guest::start(&host.socket(), LINUX, 1);
    guest.ready(0);
    limit(&host, "gate", hard(Share::Write));
    let first = ask(&mut guest, WRITE, 0);
    assert_eq!(guest.finish(&first).status, 0);
    gate.shut();
    // With these the unit has as much with its device as leaves no room for the write, but for reads.
    let read = rw10(READ, 0, 2048);
    let mut reads: Vec<_> =
        (0..6).map(|id| guest.submit(2, flat(0), id, &read, &[], MIB)).collect();
    gate.wait_for(6);
    let write = rw10(WRITE, 0, 8191);
    let large = guest.submit(2, flat(0), 9, &write, &vec![1; 8191 * 512], 0);
    reads.extend((10..20).map(|lba| ask(&mut guest, READ, lba)));
    gate.wait_for(16);
    gate.open();
    all_end(&mut guest, &reads);
    limit(&host, "gate", RateLimits::default());
    assert_eq!(guest.finish(&large).status, 0);
}

/// A unit that is suspended begins nothing of either direction, and goes on with all in their order.
#[test]
fn a_suspended_disk_keeps_both_directions_and_loses_none() {
    let error_policy = ErrorPolicy { write: WaitFor::Repair, read: WaitFor::Repair };
    let options = TargetOptions { error_policy, ..TargetOptions::default() };
    let disk = FaultBdev::new("disk", 512, 8192);
    let host = host_with(&disk, options);
    let mut guest = Guest::connect(&host.socket(), blk::BLK);
    let region = Region::of(&mut guest, 1);
    guest.start_queue(0);
    limit(&host, "disk", hard(Share::Write));
    let first = put(&mut guest, 0, 0, 1);
    assert_eq!(finish(&mut guest, &first).0, blk::OK);
    let mut all = vec![put(&mut guest, 0, 1, 2)];
    let read = |guest: &mut Guest| submit(guest, 0, &header(blk::IN, 1), 512, usize::MAX);
    // This one has passed the write when the next one fails.
    let passed = read(&mut guest);
    assert_eq!(finish(&mut guest, &passed).0, blk::OK);
    disk.inject(Fault::always(Op::Read, IoError::ReadMedium));
    all.push(read(&mut guest));
    wait_until_suspended(&host);
    all.push(put(&mut guest, 0, 1, 3));
    all.push(read(&mut guest));
    wait_until_taken(&host, 6);
    disk.clear_faults();
    assert_eq!(guest.try_used(0), None);
    // Its guest is paused, and goes on: what was passed is known from the region.
    let base = guest.peer.base(0);
    assert_eq!(guest.try_used(0), None, "none ends with an error");
    let heads: Vec<u16> = all.iter().map(|r| r.head).collect();
    assert_eq!(region.marked(0), heads);
    limit(&host, "disk", RateLimits::default());
    start_again(&mut guest, &[base]);
    all_end_well(&mut guest, &all);
    assert_eq!(host.stats().controller.errors, 0);
}
