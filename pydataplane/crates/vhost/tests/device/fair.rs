//! Requests that wait: for room, so that nobody has a device or a reactor for himself, and for their
//! task attributes, where one reactor takes them; `ordered` has what several take.

use std::time::{Duration, Instant};

use bdev::testing::{FaultBdev, Wrap, Wrapped};

use crate::guest::*;
use crate::host::*;
use crate::peer::*;

const MIB: usize = 1 << 20;
/// Bytes that one unit may have with its device.
const ROOM: usize = 8 * MIB;

const ORDERED: u8 = 1;
const HEAD_OF_QUEUE: u8 = 2;
const ACA: u8 = 3;
const ABORT_TASK: u32 = 0;
const QUERY_TASK: u32 = 6;
const QUERY_TASK_SET: u32 = 7;

/// A host with a gate as target 0 and a malloc disk as target 1, and a guest with one request queue.
fn gated() -> (Host, Gate, Guest) {
    gated_with(1)
}

/// As [`gated`], with so many request queues.
fn gated_with(queues: usize) -> (Host, Gate, Guest) {
    let (host, gate) = Host::gated(1);
    host.malloc("disk");
    host.add(1, "disk");
    let mut guest = Guest::start(&host.socket(), LINUX, queues);
    guest.ready(0);
    guest.ready(1);
    (host, gate, guest)
}

/// Makes `count` READs of 1 MiB of target 0 available, whose names are 0 and so on.
fn flood(guest: &mut Guest, count: u64) -> Vec<Request> {
    (0..count).map(|id| guest.submit(2, flat(0), id, &rw10(0x28, 0, 2048), &[], MIB)).collect()
}

/// A read of target 1, from start to end, which is in the ring behind all that was made available.
fn pass_by(guest: &mut Guest) {
    pass_by_on(guest, 2);
}

/// The same on another queue.
fn pass_by_on(guest: &mut Guest, queue: usize) {
    let request = guest.submit(queue, flat(1), 999, &rw10(0x28, 0, 8), &[], 4096);
    assert_eq!(guest.finish(&request).status, 0);
}

#[test]
fn a_unit_with_much_to_do_keeps_no_other_of_its_queue_waiting() {
    let (_host, gate, mut guest) = gated();
    gate.shut();
    let requests = flood(&mut guest, 20);
    gate.wait_for(ROOM / MIB);
    for _ in 0..50 {
        pass_by(&mut guest);
    }
    gate.wait_for(ROOM / MIB);
    gate.open();
    for _ in &requests {
        let (head, written) = guest.used(2);
        let request = requests.iter().find(|r| r.head == head).unwrap();
        let reply = guest.reply(request, written);
        assert_eq!((reply.response, reply.status, reply.data.len()), (0, 0, MIB));
    }
    assert_eq!(guest.control(&tmf(QUERY_TASK_SET, flat(0), 0), 1), [0], "none is left");
    pass_by(&mut guest);
}

#[test]
fn more_than_may_wait_stays_in_the_rings_and_has_its_turn() {
    const QUEUES: std::ops::Range<usize> = 2..8;
    const EACH: u64 = SIZE as u64 - 6;
    let (host, gate) = Host::gated(1);
    let mut guest = Guest::start(&host.socket(), LINUX, QUEUES.len());
    guest.ready(0);
    for _ in 0..2 {
        gate.shut();
        let read = rw10(0x28, 0, 1);
        let submit = |guest: &mut Guest, queue| -> Vec<Request> {
            (0..EACH).map(|id| guest.submit(queue, flat(0), id, &read, &[], 512)).collect()
        };
        let mut requests: Vec<_> = QUEUES.map(|queue| submit(&mut guest, queue)).collect();
        // As many as a channel takes; most of the others were taken, but not all 1500.
        gate.wait_for(256);
        gate.open();
        for (queue, requests) in QUEUES.zip(&mut requests) {
            while !requests.is_empty() {
                let (head, written) = guest.used(queue);
                let nth = requests.iter().position(|r| r.head == head).expect("once for each");
                let reply = guest.reply(&requests.swap_remove(nth), written);
                assert_eq!((reply.response, reply.status, reply.data.len()), (0, 0, 512));
            }
        }
    }
    assert_eq!(guest.control(&tmf(QUERY_TASK_SET, flat(0), 0), 1), [0], "none is left");
}

#[test]
fn what_waits_is_ended_by_task_management_at_once() {
    let (_host, gate, mut guest) = gated();
    gate.shut();
    let requests = flood(&mut guest, 12);
    gate.wait_for(ROOM / MIB);
    pass_by(&mut guest);
    let reads = gate.reads();
    // In the midst, at the end and at the front of those that wait.
    for id in [9, 11, 8] {
        assert_eq!(guest.control(&tmf(QUERY_TASK, flat(0), id), 1), [10]);
        assert_eq!(guest.control(&tmf(ABORT_TASK, flat(0), id), 1), [0]);
        let reply = guest.finish(&requests[id as usize]);
        assert_eq!(reply.response, 2, "ABORTED");
        assert_eq!(guest.control(&tmf(QUERY_TASK, flat(0), id), 1), [0]);
    }
    gate.open();
    let mut left: Vec<u16> =
        (0..12).filter(|n| ![8, 9, 11].contains(n)).map(|n| requests[n].head).collect();
    while !left.is_empty() {
        let (head, written) = guest.used(2);
        left.retain(|h| *h != head);
        let request = requests.iter().find(|r| r.head == head).unwrap();
        assert_eq!(guest.reply(request, written).response, 0);
    }
    assert_eq!(gate.reads(), reads + 9);
}

#[test]
fn a_session_that_ends_leaves_nothing_that_waits() {
    let (host, gate, mut guest) = gated();
    gate.shut();
    flood(&mut guest, 12);
    gate.wait_for(ROOM / MIB);
    let reads = gate.reads();
    drop(guest);
    // Until the controller has seen that, there is no reason not to begin what waits.
    host.wait_until_left();
    gate.open();
    host.wait_until_free();
    assert!(gate.reads() <= reads + 8, "what waited was begun for nobody");
    let mut guest = Guest::start(&host.socket(), LINUX, 1);
    guest.ready(0);
}

#[test]
fn an_ordered_request_has_its_unit_for_itself() {
    let (_host, gate, mut guest) = gated();
    gate.shut();
    let submit = |guest: &mut Guest, attribute, id| {
        guest.submit_with(attribute, 2, flat(0), id, &rw10(0x28, id as u32, 1), &[], 512)
    };
    let simple = [submit(&mut guest, 0, 0), submit(&mut guest, 0, 1)];
    let ordered = submit(&mut guest, ORDERED, 2);
    let later = [submit(&mut guest, 0, 3), submit(&mut guest, 0, 4)];
    let last = submit(&mut guest, ORDERED, 5);
    let head = submit(&mut guest, HEAD_OF_QUEUE, 6);
    // All of them were taken, and another unit has its own order.
    pass_by(&mut guest);
    gate.wait_for(3);
    gate.open();
    let order: Vec<u16> = (0..7)
        .map(|_| {
            let (head, _) = guest.used(2);
            head
        })
        .collect();
    let set = |heads: &[u16]| {
        let mut heads = heads.to_vec();
        heads.sort_unstable();
        heads
    };
    assert_eq!(set(&order[..3]), set(&[simple[0].head, simple[1].head, head.head]));
    assert_eq!(order[3], ordered.head);
    assert_eq!(set(&order[4..6]), set(&[later[0].head, later[1].head]));
    assert_eq!(order[6], last.head);
}

#[test]
fn an_ordered_request_alone_begins_at_once_and_others_follow() {
    let (_host, gate, mut guest) = gated();
    gate.shut();
    let ordered = guest.submit_with(ORDERED, 2, flat(0), 1, &rw10(0x28, 0, 1), &[], 512);
    let simple = guest.submit(2, flat(0), 2, &rw10(0x28, 1, 1), &[], 512);
    pass_by(&mut guest);
    gate.wait_for(1);
    gate.open();
    assert_eq!(guest.used(2).0, ordered.head);
    assert_eq!(guest.used(2).0, simple.head);
}

/// A READ of one block of target 0.
fn read_with(guest: &mut Guest, attribute: u8, queue: usize, id: u64) -> Request {
    guest.submit_with(attribute, queue, flat(0), id, &rw10(0x28, id as u32, 1), &[], 512)
}

#[test]
fn order_is_kept_among_the_queues_of_one_reactor() {
    let (_host, gate, mut guest) = gated_with(2);
    gate.shut();
    let simple = read_with(&mut guest, 0, 2, 0);
    gate.wait_for(1);
    let ordered = read_with(&mut guest, ORDERED, 3, 1);
    pass_by_on(&mut guest, 3);
    let later = read_with(&mut guest, 0, 2, 2);
    pass_by_on(&mut guest, 2);
    assert_eq!(gate.waiting(), 1, "the ordered one waits, and what came after it");
    let head = read_with(&mut guest, HEAD_OF_QUEUE, 3, 3);
    gate.wait_for(2);
    gate.open();
    assert_eq!([guest.used(3).0, guest.used(3).0], [head.head, ordered.head]);
    assert_eq!([guest.used(2).0, guest.used(2).0], [simple.head, later.head]);
}

#[test]
fn the_attribute_aca_is_refused() {
    let (_host, _gate, mut guest) = gated();
    let request = guest.submit_with(ACA, 2, flat(1), 1, &rw10(0x28, 0, 1), &[], 512);
    let reply = guest.finish(&request);
    assert_eq!((reply.response, reply.status), (0, 2));
    // ILLEGAL REQUEST, INVALID MESSAGE ERROR.
    assert_eq!((reply.sense[2], reply.sense[12], reply.sense[13]), (5, 0x49, 0));
    assert_eq!(reply.data, [0xee; 0][..]);
    pass_by(&mut guest);
}

#[test]
fn a_queue_that_is_stopped_does_not_wait_for_all_that_its_guest_wants() {
    const BUSY: u8 = 8;
    let (_host, gate, mut guest) = gated();
    gate.shut();
    // VERIFY (10) of 4 MiB, 64 KiB at a time.
    let long = guest.submit(2, flat(0), 100, &rw10(0x2f, 0, 8192), &[], 0);
    let requests = flood(&mut guest, 12);
    gate.wait_for(1 + ROOM / MIB);
    pass_by(&mut guest);
    let reads = gate.reads();
    guest.peer.send(GET_VRING_BASE, &words(&[2, 0]), &[]);
    // What did not begin yet is the guest's again at once, whatever the disk does.
    for _ in ROOM / MIB..requests.len() {
        let (head, written) = guest.used(2);
        let request = requests.iter().find(|r| r.head == head).unwrap();
        let reply = guest.reply(request, written);
        assert_eq!((reply.response, reply.status), (0, BUSY));
    }
    gate.open();
    let base = guest.peer.reply(GET_VRING_BASE).unwrap();
    // What was with the disk ended as it did, and the long one after a piece.
    for _ in 0..=ROOM / MIB {
        let (head, written) = guest.try_used(2).expect("all have ended");
        let (request, status) = match head == long.head {
            true => (&long, BUSY),
            false => (requests.iter().find(|r| r.head == head).unwrap(), 0),
        };
        let reply = guest.reply(request, written);
        assert_eq!((reply.response, reply.status), (0, status));
    }
    assert_eq!(gate.reads(), reads + 9);
    let base = u16::from_le_bytes([base[4], base[5]]);
    guest.describe_queue(2, base, false);
    pass_by(&mut guest);
}

/// A disk that takes longer than a turn to say what has ended.
struct Slow;

impl Wrap for Slow {
    fn polls(&self) {
        let since = Instant::now();
        while since.elapsed() < Duration::from_micros(60) {
            std::hint::spin_loop();
        }
    }
}

#[test]
fn a_reactor_does_not_sleep_before_all_disks_were_asked_however_slow_others_are() {
    const SLOW: u8 = 7;
    let (host, gate) = Host::gated(1);
    let mut guest = Guest::start(&host.socket(), LINUX, 1);
    let slow: Vec<_> = (1..=SLOW).map(|n| FaultBdev::new(&format!("slow{n}"), 512, 8192)).collect();
    for (n, disk) in (1..).zip(&slow) {
        disk.defer(Some(1));
        disk.hold();
        host.registry.register(Wrapped::new(disk.clone(), Slow)).unwrap();
        host.add(n, &format!("slow{n}"));
    }
    (0..=SLOW).for_each(|n| guest.ready(n));
    let read = |guest: &mut Guest, target| {
        guest.submit(2, flat(target), target.into(), &rw10(0x28, 0, 8), &[], 4096)
    };
    let stuck: Vec<Request> = (1..=SLOW).map(|target| read(&mut guest, target)).collect();
    for _ in 0..30 {
        gate.shut();
        let request = read(&mut guest, 0);
        gate.wait_for(1);
        // It has spun for long enough, and sleeps.
        std::thread::sleep(Duration::from_millis(2));
        gate.open();
        assert_eq!(guest.finish(&request).status, 0);
    }
    slow.iter().for_each(|disk| disk.release());
    for _ in &stuck {
        let (head, written) = guest.used(2);
        let request = stuck.iter().find(|r| r.head == head).unwrap();
        assert_eq!(guest.reply(request, written).status, 0);
    }
}
