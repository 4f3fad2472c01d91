//! SAM-5 8.6: a SIMPLE request does not begin before the older ones that are HEAD OF QUEUE have ended.

use std::time::{Duration, Instant};

use bdev::{RateLimits, Share};

use crate::guest::*;
use crate::host::*;
use crate::inflight::{go_on_of, tracked_of};
use crate::moving::{carried_out, moves, places};
use crate::ordered::{gated, good, pass_by, read, traced};
use crate::ordered_limits::{ask, begun, ends, hard, limit, start};

const READ: u8 = 0x28;
const WRITE: u8 = 0x2a;
const SIMPLE: u8 = 0;
const ORDERED: u8 = 1;
const HEAD_OF_QUEUE: u8 = 2;
const BUSY: u8 = 8;
const ABORT_TASK: u32 = 0;
const ABORTED: u8 = 2;
const RESET: u8 = 4;
const MIB: usize = 1 << 20;
/// Longer than what is wrong takes.
const WHILE: Duration = Duration::from_millis(20);

/// One that is HEAD OF QUEUE in flight on queue `of`, and a SIMPLE one on queue `on` that was taken later.
fn behind(guest: &mut Guest, gate: &Gate, of: usize, on: usize) -> [Request; 2] {
    gate.shut();
    let head = read(guest, HEAD_OF_QUEUE, of, 1);
    gate.wait_for(1);
    pass_by(guest, of);
    let simple = read(guest, SIMPLE, on, 2);
    pass_by(guest, on);
    [head, simple]
}

#[test]
fn what_is_simple_waits_for_older_ones_at_the_head_whichever_reactors_have_them() {
    for (reactors, of, on) in [(1, 2, 2), (2, 2, 2), (2, 2, 3), (2, 3, 2), (3, 4, 2)] {
        let (_host, gate, mut guest) = gated(reactors);
        for _ in 0..10 {
            let [head, simple] = behind(&mut guest, &gate, of, on);
            // A second one begins beside the first: it waits for none of them.
            let second = read(&mut guest, HEAD_OF_QUEUE, on, 3);
            gate.wait_for(2);
            std::thread::sleep(Duration::from_millis(3));
            assert_eq!(gate.waiting(), 2, "queues {of} and {on}");
            gate.open();
            assert_eq!(ends(&mut guest, &[&head, &simple, &second]), [(0, 0); 3]);
        }
    }
}

#[test]
fn an_older_one_does_not_wait_for_what_comes_to_the_head_and_others_wait_in_their_order() {
    let (_host, gate, mut guest) = gated(2);
    gate.shut();
    let older = read(&mut guest, SIMPLE, 2, 0);
    gate.wait_for(1);
    let head = read(&mut guest, HEAD_OF_QUEUE, 3, 1);
    gate.wait_for(2);
    pass_by(&mut guest, 3);
    let ordered = read(&mut guest, ORDERED, 2, 2);
    pass_by(&mut guest, 2);
    let later = read(&mut guest, SIMPLE, 3, 3);
    pass_by(&mut guest, 3);
    std::thread::sleep(WHILE);
    assert_eq!(gate.waiting(), 2);
    gate.open();
    assert_eq!(ends(&mut guest, &[&older, &head, &ordered, &later]), [(0, 0); 4]);
}

/// Each ends with the next I/O of its disk, and there is always another one.
#[test]
fn newer_ones_without_end_hold_back_nothing_for_ever() {
    const DEPTH: usize = 6;
    let (host, trace) = traced(2);
    let mut guest = Guest::start(&host.socket(), LINUX, 2);
    (0..2).for_each(|target| guest.ready(target));
    for on in [2, 3] {
        let mut in_flight: Vec<Request> = Vec::new();
        let (mut simple, mut left) = (None, 200);
        let end = Instant::now() + DEADLINE;
        while left > 0 {
            assert!(Instant::now() < end, "of those on queue {on} {left} are left");
            while in_flight.len() < DEPTH {
                in_flight.push(read(&mut guest, HEAD_OF_QUEUE, 2, 1));
            }
            simple.get_or_insert_with(|| read(&mut guest, SIMPLE, on, 2));
            for queue in [2, 3] {
                while let Some((head, written)) = guest.try_used(queue) {
                    let is = |r: &Request| (r.queue, r.head) == (queue, head);
                    let request = match simple.take_if(|request| is(request)) {
                        Some(request) => {
                            left -= 1;
                            request
                        }
                        None => {
                            let at = in_flight.iter().position(is).expect("once for each");
                            in_flight.swap_remove(at)
                        }
                    };
                    assert_eq!(guest.reply(&request, written).status, 0);
                }
            }
        }
        let rest: Vec<&Request> = in_flight.iter().chain(&simple).collect();
        assert!(ends(&mut guest, &rest).iter().all(|end| *end == (0, 0)));
    }
    assert_eq!(trace.disk.held(), 0);
}

/// Of those that lack room the first one begins first, and newer ones that would fit do not pass a large one.
#[test]
fn those_at_the_head_that_wait_for_room_begin_in_their_order() {
    let (host, trace) = traced(1);
    let mut guest = Guest::start(&host.socket(), LINUX, 1);
    (0..2).for_each(|target| guest.ready(target));
    trace.disk.hold();
    let head = |guest: &mut Guest, lba: u32, bytes: usize| {
        let cdb = rw10(READ, lba, (bytes / 512) as u16);
        guest.submit_with(HEAD_OF_QUEUE, 2, flat(0), lba.into(), &cdb, &[], bytes)
    };
    trace.log.lock().unwrap().clear();
    let mut all: Vec<Request> = (0..7).map(|lba| head(&mut guest, lba, MIB)).collect();
    all.push(head(&mut guest, 7, 4 * MIB - 8192));
    all.extend((8..11).map(|lba| head(&mut guest, lba, 512)));
    pass_by(&mut guest, 2);
    assert_eq!(begun(&trace.log), [0, 1, 2, 3, 4, 5, 6]);
    trace.disk.release();
    let all: Vec<&Request> = all.iter().collect();
    assert!(ends(&mut guest, &all).iter().all(|end| *end == (0, 0)));
    assert!(begun(&trace.log).is_sorted(), "{:?}", begun(&trace.log));
}

/// One at the head that waits for its limit on queue 2, and what waits for it: a SIMPLE one of the other direction on
/// queue 3, an ORDERED one there, and a SIMPLE one on queue 2. Before them one of each direction has gone by.
fn limited(guest: &mut Guest, slow: u8) -> [Request; 4] {
    let fast = if slow == READ { WRITE } else { READ };
    let firsts = [ask(guest, SIMPLE, 2, slow, 0), ask(guest, SIMPLE, 2, fast, 1)];
    assert_eq!(ends(guest, &[&firsts[0], &firsts[1]]), [(0, 0); 2]);
    let head = ask(guest, HEAD_OF_QUEUE, 2, slow, 2);
    pass_by(guest, 2);
    let simple = ask(guest, SIMPLE, 3, fast, 3);
    let ordered = ask(guest, ORDERED, 3, fast, 4);
    pass_by(guest, 3);
    let last = ask(guest, SIMPLE, 2, fast, 5);
    pass_by(guest, 2);
    std::thread::sleep(WHILE);
    assert_eq!((guest.try_used(2), guest.try_used(3)), (None, None));
    [head, simple, ordered, last]
}

#[test]
fn one_at_the_head_that_waits_for_its_limit_has_all_wait_and_then_go_on_in_order() {
    for (slow, share) in [(WRITE, Share::Write), (READ, Share::Read)] {
        let (host, trace, mut guest) = start(2);
        limit(&host, hard(share));
        trace.log.lock().unwrap().clear();
        let all = limited(&mut guest, slow);
        limit(&host, RateLimits::default());
        assert_eq!(ends(&mut guest, &all.each_ref()), [(0, 0); 4]);
        assert_eq!(begun(&trace.log)[2..], [2, 3, 4, 5]);
    }
}

#[test]
fn whatever_ends_one_at_the_head_that_waits_lets_the_others_go_on() {
    for (slow, share) in [(WRITE, Share::Write), (READ, Share::Read)] {
        let begin = || {
            let (host, trace, mut guest) = start(2);
            limit(&host, hard(share));
            let all = limited(&mut guest, slow);
            (host, trace, guest, all)
        };
        let (_host, _, mut guest, all) = begin();
        assert_eq!(guest.control(&tmf(ABORT_TASK, flat(0), 2), 1), [0]);
        let ended = ends(&mut guest, &all.each_ref());
        assert_eq!((ended[0].0, &ended[1..]), (ABORTED, &[(0, 0); 3][..]));
        let (_host, _, mut guest, all) = begin();
        assert_eq!(guest.control(&tmf(LOGICAL_UNIT_RESET, flat(0), 0), 1), [0]);
        assert!(ends(&mut guest, &all.each_ref()).iter().all(|end| end.0 == RESET));
        // Its queue stops, or another one.
        let (_host, _, mut guest, all) = begin();
        guest.peer.base(2);
        let ended = ends(&mut guest, &all.each_ref());
        assert_eq!(ended, [(0, BUSY), (0, 0), (0, 0), (0, BUSY)]);
        let (host, _, mut guest, [head, simple, ordered, last]) = begin();
        guest.peer.base(3);
        assert_eq!(ends(&mut guest, &[&simple, &ordered]), [(0, BUSY); 2]);
        limit(&host, RateLimits::default());
        assert_eq!(ends(&mut guest, &[&head, &last]), [(0, 0); 2]);
        // The memory changes, the disk goes, and the guest does.
        let (_host, _, mut guest, all) = begin();
        guest.tell_memory();
        assert_eq!(ends(&mut guest, &all.each_ref()), [(0, 0); 4]);
        let (host, trace, mut guest, all) = begin();
        host.controllers.remove_target("vm0", 0).unwrap();
        assert_eq!(ends(&mut guest, &all.each_ref()), [(0, 0); 4]);
        assert_eq!(begun(&trace.log)[2..], [2, 3, 4, 5]);
        let (host, _, guest, _) = begin();
        drop(guest);
        host.wait_until_free();
    }
}

#[test]
fn a_queue_does_not_move_while_something_waits_for_one_at_the_head() {
    let (host, gate, mut guest) = gated(2);
    let [head, simple] = behind(&mut guest, &gate, 2, 3);
    // Given up after a while: what it waits for is on the other reactor, and that is with its device.
    for queue in [3, 2] {
        host.controllers.move_queue("vm0", queue, 3 - queue as usize);
        carried_out(&host);
        assert_eq!((places(&host), gate.waiting()), (vec![(2, 0), (3, 1)], 1));
    }
    gate.open();
    good(&mut guest, &head);
    good(&mut guest, &simple);
    moves(&host, 3, 0);
    moves(&host, 2, 1);
    for (of, on) in [(2, 3), (3, 2)] {
        let [head, simple] = behind(&mut guest, &gate, of, on);
        std::thread::sleep(WHILE);
        assert_eq!(gate.waiting(), 1);
        gate.open();
        good(&mut guest, &head);
        good(&mut guest, &simple);
    }
}

#[test]
fn a_disk_that_is_removed_while_requests_wait_for_each_other_has_them_all_done() {
    let (host, gate, mut guest) = gated(2);
    let [head, simple] = behind(&mut guest, &gate, 2, 3);
    let ordered = read(&mut guest, ORDERED, 2, 3);
    pass_by(&mut guest, 2);
    let last = read(&mut guest, SIMPLE, 3, 4);
    pass_by(&mut guest, 3);
    std::thread::scope(|scope| {
        scope.spawn(|| host.controllers.remove_target("vm0", 0).unwrap());
        std::thread::sleep(WHILE);
        assert_eq!(gate.waiting(), 1);
        gate.open();
        assert_eq!(ends(&mut guest, &[&head, &simple, &ordered, &last]), [(0, 0); 4]);
    });
    host.add(0, "gate");
    guest.ready(0);
    let [head, simple] = behind(&mut guest, &gate, 3, 2);
    gate.open();
    assert_eq!(ends(&mut guest, &[&head, &simple]), [(0, 0); 2]);
}

/// The next target receives anew what one that was killed had not ended.
#[test]
fn what_waits_for_each_other_when_a_target_is_killed_is_done_by_the_next() {
    for _ in 0..5 {
        let first = Host::new(2);
        let gate = first.gate("gate");
        first.malloc("disk");
        first.add(0, "gate");
        first.add(1, "disk");
        let (mut guest, region) = tracked_of(&first, 4);
        (0..2).for_each(|target| guest.ready(target));
        let [head, simple] = behind(&mut guest, &gate, 2, 3);
        let ordered = [2, 3].map(|queue| {
            let ordered = read(&mut guest, ORDERED, queue, 10 + queue as u64);
            pass_by(&mut guest, queue);
            ordered
        });
        let reads = gate.reads();
        guest.peer.shutdown();
        first.wait_until_left();
        gate.open();
        first.wait_until_free();
        assert_eq!(gate.reads(), reads + 1, "what waited was begun for nobody");
        assert_eq!(region.marked(2), [head.head, ordered[0].head]);
        assert_eq!(region.marked(3), [simple.head, ordered[1].head]);
        let (second, trace) = traced(2);
        go_on_of(&mut guest, &region, &second, 4);
        let all = ends(&mut guest, &[&head, &simple, &ordered[0], &ordered[1]]);
        // The unit attention of the new session is told once.
        assert!(all.iter().all(|end| matches!(end, (0, 0 | 2))), "{all:?}");
        assert!(all.iter().filter(|end| end.1 == 2).count() <= 1, "{all:?}");
        let begun = begun(&trace.log);
        assert!(begun.len() >= 3, "{begun:?}");
        (0..2).for_each(|target| guest.ready(target));
        for queue in [2, 3] {
            let request = read(&mut guest, ORDERED, queue, 5);
            good(&mut guest, &request);
        }
    }
}
