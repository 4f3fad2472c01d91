//! The data that a session has with devices is bounded, over all its units and reactors.

use std::time::Duration;

use vhost_scsi::{ControllerOptions, TargetOptions, Timeouts};

use crate::guest::*;
use crate::host::*;
use crate::peer::*;

const MIB: usize = 1 << 20;
/// Bytes of the longest transfer.
const LONGEST: usize = 4 * MIB;
/// Requests of that length which a session may have with devices: from one reactor, and in all.
const OF_REACTOR: usize = 8;
const OF_SESSION: usize = 16;
/// And from one unit.
const OF_UNIT: usize = 2;

/// A host with so many gates, shut, as targets 0 and so on, two malloc disks as the targets behind them,
/// and a guest with a request queue for each reactor.
fn gates(reactors: usize, count: u8) -> (Host, Vec<Gate>, Guest) {
    // However slow this machine is, nothing is late.
    let never = Duration::from_secs(1 << 30);
    gates_of(reactors, count, Timeouts { answer: never, ..Timeouts::default() })
}

fn gates_of(reactors: usize, count: u8, timeouts: Timeouts) -> (Host, Vec<Gate>, Guest) {
    let host = Host::with_timeouts(reactors, timeouts);
    let gates: Vec<Gate> = (0..count).map(|n| host.gate(&format!("gate{n}"))).collect();
    (0..count).for_each(|n| host.add(n, &format!("gate{n}")));
    for (target, name) in [(count, "disk"), (count + 1, "another disk")] {
        host.malloc(name);
        host.add(target, name);
    }
    let mut guest = Guest::start(&host.socket(), LINUX, reactors);
    (0..count + 2).for_each(|n| guest.ready(n));
    gates.iter().for_each(Gate::shut);
    (host, gates, guest)
}

/// A READ of target `target`, of so many bytes.
fn read(guest: &mut Guest, queue: usize, target: u8, bytes: usize) -> Request {
    let cdb = rw10(0x28, 0, (bytes / 512) as u16);
    guest.submit(queue, flat(target), u64::from(target), &cdb, &[], bytes)
}

/// A small read of `target`, from start to end, which is in the ring behind all that was made available:
/// that was taken, and has begun or waits.
fn pass_by(guest: &mut Guest, queue: usize, target: u8) {
    let request = guest.submit(queue, flat(target), 999, &rw10(0x28, 0, 8), &[], 4096);
    let (head, written) = guest.used(queue);
    assert_eq!(head, request.head, "nothing else has ended");
    assert_eq!(guest.reply(&request, written).status, 0);
}

/// Waits for all of `requests`, which end in any order.
fn finish_all(guest: &mut Guest, queue: usize, mut requests: Vec<Request>) {
    while !requests.is_empty() {
        let (head, written) = guest.used(queue);
        let nth = requests.iter().position(|r| r.head == head).expect("once for each");
        let request = requests.swap_remove(nth);
        let reply = guest.reply(&request, written);
        assert_eq!((reply.response, reply.status, reply.residual), (0, 0, 0));
    }
}

fn held(gates: &[Gate]) -> usize {
    gates.iter().map(Gate::waiting).sum()
}

#[test]
fn many_idle_units_have_no_more_than_their_session_may() {
    let (host, gates, mut guest) = gates(1, 12);
    host.controllers.create("vm1", ControllerOptions::default()).unwrap();
    host.malloc("other");
    host.controllers.add_target("vm1", 0, "other", TargetOptions::default()).unwrap();
    let mut neighbour = Guest::start(&host.socket().with_file_name("vm1"), LINUX, 1);
    neighbour.ready(0);
    let mut requests = Vec::new();
    for target in (0..12).chain(0..12) {
        requests.push(read(&mut guest, 2, target, LONGEST));
    }
    for _ in 0..20 {
        pass_by(&mut guest, 2, 12);
        assert_eq!(held(&gates), OF_REACTOR);
    }
    assert!(gates.iter().all(|gate| gate.waiting() <= 1));
    // Another session has its own.
    let long = read(&mut neighbour, 2, 0, LONGEST);
    finish_all(&mut neighbour, 2, vec![long]);
    gates.iter().for_each(Gate::open);
    finish_all(&mut guest, 2, requests);
    assert!(gates.iter().all(|gate| gate.reads() >= 2));
    assert_eq!(held(&gates), 0);
}

#[test]
fn reactors_share_what_a_session_may_have() {
    for (reactors, units) in [(2, 10), (4, 5)] {
        let (_host, gates, mut guest) = gates(reactors, units);
        let queues = 2..2 + reactors;
        let mut requests: Vec<Vec<Request>> = Vec::new();
        for queue in queues.clone() {
            let all = (0..units).map(|target| read(&mut guest, queue, target, LONGEST));
            requests.push(all.collect());
        }
        queues.clone().for_each(|queue| pass_by(&mut guest, queue, units));
        assert_eq!(held(&gates), OF_SESSION, "{reactors} reactors");
        gates.iter().for_each(Gate::open);
        for (queue, requests) in queues.clone().zip(requests) {
            finish_all(&mut guest, queue, requests);
        }
        // With one queue left its reactor has more again.
        for queue in queues.skip(1) {
            guest.peer.send(GET_VRING_BASE, &words(&[queue as u32, 0]), &[]);
            guest.peer.reply(GET_VRING_BASE).unwrap();
        }
        gates.iter().for_each(Gate::shut);
        let more = (0..units).map(|target| read(&mut guest, 2, target, LONGEST)).collect();
        pass_by(&mut guest, 2, units);
        assert_eq!(held(&gates), OF_REACTOR.min(usize::from(units)));
        gates.iter().for_each(Gate::open);
        finish_all(&mut guest, 2, more);
    }
}

#[test]
fn a_unit_that_waits_for_room_is_not_overtaken_by_what_would_fit() {
    let (_host, gates, mut guest) = gates(1, 9);
    let mut requests: Vec<Request> =
        (0..7).map(|target| read(&mut guest, 2, target, LONGEST)).collect();
    requests.push(read(&mut guest, 2, 7, LONGEST / 2));
    pass_by(&mut guest, 2, 9);
    assert_eq!(held(&gates), 8);
    // 30 of 32 MiB: this one has to wait, and the other would not.
    let long = read(&mut guest, 2, 8, LONGEST);
    pass_by(&mut guest, 2, 9);
    let behind = read(&mut guest, 2, 10, 32 << 10);
    pass_by(&mut guest, 2, 9);
    assert_eq!((gates[8].waiting(), guest.try_used(2)), (0, None));
    gates[0].open();
    let first = requests.swap_remove(0);
    finish_all(&mut guest, 2, vec![first, behind]);
    gates[8].wait_for(1);
    gates.iter().for_each(Gate::open);
    requests.push(long);
    finish_all(&mut guest, 2, requests);
}

#[test]
fn units_that_do_not_answer_keep_no_other_from_its_turn() {
    let (_host, gates, mut guest) = gates(1, 3);
    let mut requests: Vec<Request> = Vec::new();
    for target in [0, 1, 2].repeat(12) {
        requests.push(read(&mut guest, 2, target, MIB));
    }
    pass_by(&mut guest, 2, 3);
    // Half of all, and the third unit its first one at least.
    assert!((16..=18).contains(&held(&gates)), "{}", held(&gates));
    assert!(gates.iter().all(|gate| (1..=8).contains(&gate.waiting())));
    for _ in 0..20 {
        let one = read(&mut guest, 2, 3, LONGEST);
        finish_all(&mut guest, 2, vec![one]);
    }
    gates.iter().for_each(Gate::open);
    finish_all(&mut guest, 2, requests);
}

/// As `gates`, whose requests are late soon.
fn hung(reactors: usize, count: u8) -> (Host, Vec<Gate>, Guest) {
    let answer = Duration::from_millis(10);
    gates_of(reactors, count, Timeouts { answer, ..Timeouts::default() })
}

#[test]
fn one_disk_that_hangs_with_all_the_room_keeps_no_other_of_its_guest_waiting() {
    // Of so many reactors each has room for one long request.
    const REACTORS: usize = 16;
    let (_host, gates, mut guest) = hung(REACTORS, 1);
    for _ in 0..5 {
        let mut stuck: Vec<Vec<Request>> = Vec::new();
        for queue in 2..2 + REACTORS {
            let lengths = [LONGEST, 64 << 10];
            stuck.push(lengths.map(|bytes| read(&mut guest, queue, 0, bytes)).into());
        }
        gates[0].wait_for(REACTORS);
        for queue in 2..2 + REACTORS {
            // Nothing wakes the reactor for the first but the time.
            for _ in 0..2 {
                let one = read(&mut guest, queue, 1, MIB);
                finish_all(&mut guest, queue, vec![one]);
            }
        }
        assert_eq!(held(&gates), REACTORS, "it has no more than before");
        gates[0].open();
        for (queue, requests) in (2..).zip(stuck) {
            finish_all(&mut guest, queue, requests);
        }
        gates[0].shut();
    }
}

#[test]
fn many_disks_that_hang_keep_no_other_waiting_and_have_a_bound_each() {
    const GATES: u8 = 12;
    let (_host, gates, mut guest) = hung(1, GATES);
    for round in 0..4 {
        let mut stuck: Vec<Request> = Vec::new();
        for target in 0..GATES {
            let lengths = [LONGEST, LONGEST, 64 << 10];
            stuck.extend(lengths.map(|bytes| read(&mut guest, 2, target, bytes)));
        }
        for target in [GATES, GATES + 1] {
            let one = read(&mut guest, 2, target, MIB);
            finish_all(&mut guest, 2, vec![one]);
        }
        // Each of them has begun what an idle unit may, more than all the room, and goes on to a quarter.
        wait_until("each has all it may", || held(&gates) == usize::from(GATES) * OF_UNIT);
        for _ in 0..5 {
            let one = read(&mut guest, 2, GATES, MIB);
            finish_all(&mut guest, 2, vec![one]);
            assert!(gates.iter().all(|gate| gate.waiting() == OF_UNIT));
        }
        // They answer in an order that is another one each time.
        for n in 0..usize::from(GATES) {
            gates[(n * 5 + round) % usize::from(GATES)].open();
        }
        finish_all(&mut guest, 2, stuck);
        gates.iter().for_each(Gate::shut);
    }
}
