//! Task management functions that end requests of several reactors, and of several controllers with the volume: none
//! of what they end begins as that which it waited for was ended, whatever comes between.

use std::sync::mpsc::Sender;
use std::time::Duration;

use bdev::testing::FaultBdev;
use bdev::{RateLimits, Share};
use vhost_scsi::{ControllerOptions, TargetOptions};

use crate::blk;
use crate::guest::*;
use crate::host::*;
use crate::inflight::{go_on_of, tracked_of};
use crate::moving::{moves, places};
use crate::ordered::{Log, Traced, gated, good, pass_by, read, traced};
use crate::ordered_limits::{ask, begun, ends, hard, limit};

const READ: u8 = 0x28;
const WRITE: u8 = 0x2a;
const SIMPLE: u8 = 0;
const ORDERED: u8 = 1;
const HEAD_OF_QUEUE: u8 = 2;
const ABORT_TASK_SET: u32 = 1;
const CLEAR_TASK_SET: u32 = 3;
/// Responses of virtio-scsi (virtio 1.2 5.6.6.1), and a status.
const ABORTED: u8 = 2;
const RESET: u8 = 4;
const TASK_ABORTED: u8 = 0x40;
/// Longer than what is wrong takes.
const WHILE: Duration = Duration::from_millis(30);

/// A WRITE that waits for its limit on the first of three reactors, and an ORDERED READ on the last one for that.
fn two(guest: &mut Guest) -> [Request; 2] {
    let first = ask(guest, SIMPLE, 2, WRITE, 0);
    assert_eq!(ends(guest, &[&first]), [(0, 0)]);
    let waits = ask(guest, SIMPLE, 2, WRITE, 1);
    pass_by(guest, 2);
    let ordered = ask(guest, ORDERED, 4, READ, 2);
    pass_by(guest, 4);
    [waits, ordered]
}

/// A host with such a guest, and the log of its disk from there on.
fn waiting() -> (Host, Log, Guest, [Request; 2]) {
    let (host, trace) = traced(3);
    let mut guest = Guest::start(&host.socket(), LINUX, 3);
    (0..2).for_each(|target| guest.ready(target));
    limit(&host, hard(Share::Write));
    let requests = two(&mut guest);
    trace.log.lock().unwrap().clear();
    (host, trace.log.clone(), guest, requests)
}

/// Asks for a function of target 0 while the second of three reactors does not answer: it is in the midst of its calls
/// when this returns, until the sender is dropped. Head and place of the answer.
fn halfway(host: &Host, guest: &mut Guest, function: u32) -> (Sender<()>, (u16, u64)) {
    let kept = host.keep(1);
    let asked = guest.submit_control(&tmf(function, flat(0), 0), 1);
    std::thread::sleep(WHILE);
    (kept, asked)
}

fn answered(guest: &mut Guest, (head, answer): (u16, u64)) {
    assert_eq!((guest.used(0), guest.read(answer, 1)), ((head, 1), vec![0]));
    guest.free(0, head, 2);
}

/// The unit attention is told, and then all goes on.
fn goes_on(host: &Host, guest: &mut Guest, queues: std::ops::Range<usize>) {
    limit(host, RateLimits::default());
    let reply = guest.scsi(0, &[0; 6], &[], 0);
    assert_eq!((reply.status, reply.sense[2] & 15, reply.sense[12]), (2, 6, 0x29));
    guest.ready(0);
    for queue in queues {
        for (n, attribute) in [SIMPLE, ORDERED, HEAD_OF_QUEUE].into_iter().enumerate() {
            let request = read(guest, attribute, queue, 100 + n as u64);
            good(guest, &request);
        }
    }
}

#[test]
fn sam5_7_7_what_waits_for_a_limit_ends_with_what_waits_for_it() {
    for (function, response) in [
        (LOGICAL_UNIT_RESET, RESET),
        (I_T_NEXUS_RESET, RESET),
        (ABORT_TASK_SET, ABORTED),
        (CLEAR_TASK_SET, ABORTED),
    ] {
        let (host, log, mut guest, [waits, ordered]) = waiting();
        let (kept, asked) = halfway(&host, &mut guest, function);
        // Nothing ends before all reactors know of it.
        assert_eq!([0, 2, 4].map(|queue| guest.try_used(queue)), [None; 3], "TMF {function}");
        drop(kept);
        let all = ends(&mut guest, &[&waits, &ordered]);
        assert!(all.iter().all(|end| end.0 == response), "TMF {function}: {all:?}");
        answered(&mut guest, asked);
        assert!(begun(&log).is_empty(), "TMF {function}");
    }
}

/// One is with its device when it is ended: the ORDERED one does not begin when its I/O has ended.
#[test]
fn sam5_7_7_what_waits_for_a_task_in_flight_that_is_ended_does_not_begin() {
    for (function, response) in [(LOGICAL_UNIT_RESET, RESET), (ABORT_TASK_SET, ABORTED)] {
        for attribute in [SIMPLE, ORDERED, HEAD_OF_QUEUE] {
            let tried =
                (0..20).any(|_| is_ended_with_what_it_waits_for(function, response, attribute));
            assert!(tried, "the first reactor never knew of it in time");
        }
    }
}

/// Whether the first reactor had marked the one in flight, whose attribute this is, before its I/O ended.
fn is_ended_with_what_it_waits_for(function: u32, response: u8, attribute: u8) -> bool {
    let (host, gate, mut guest) = gated(3);
    gate.shut();
    let first = read(&mut guest, attribute, 2, 0);
    gate.wait_for(1);
    pass_by(&mut guest, 2);
    let later = if attribute == SIMPLE { ORDERED } else { SIMPLE };
    let later = read(&mut guest, later, 4, 1);
    pass_by(&mut guest, 4);
    let reads = gate.reads();
    let (kept, asked) = halfway(&host, &mut guest, function);
    gate.open();
    let first = guest.finish(&first);
    if first.status == 0 && first.response == 0 {
        return false;
    }
    assert_eq!(first.response, response);
    std::thread::sleep(WHILE);
    assert_eq!([0, 4].map(|queue| guest.try_used(queue)), [None; 2]);
    drop(kept);
    assert_eq!(guest.finish(&later).response, response);
    answered(&mut guest, asked);
    assert_eq!(gate.reads(), reads + 1, "it was not begun");
    true
}

/// There is no task set that others have a place in.
#[test]
fn sam5_7_7_on_one_reactor_what_waits_ends_with_what_it_waits_for() {
    for (function, response) in [
        (LOGICAL_UNIT_RESET, RESET),
        (I_T_NEXUS_RESET, RESET),
        (ABORT_TASK_SET, ABORTED),
        (CLEAR_TASK_SET, ABORTED),
    ] {
        let (_host, gate, mut guest) = gated(1);
        for attribute in [SIMPLE, ORDERED, HEAD_OF_QUEUE] {
            gate.shut();
            let first = read(&mut guest, attribute, 2, 0);
            gate.wait_for(1);
            let waits = [ORDERED, SIMPLE].map(|waits| read(&mut guest, waits, 2, 1));
            pass_by(&mut guest, 2);
            let reads = gate.reads();
            let asked = guest.submit_control(&tmf(function, flat(0), 0), 1);
            let ended = ends(&mut guest, &[&waits[0], &waits[1]]);
            gate.open();
            let all = [ends(&mut guest, &[&first]), ended].concat();
            let are_ended = all.iter().all(|end| end.0 == response);
            assert!(are_ended, "TMF {function}, attribute {attribute}: {all:?}");
            answered(&mut guest, asked);
            assert_eq!(gate.reads(), reads + 1, "nothing that waited has begun");
            if response == RESET {
                is_told_of_reset(&mut guest);
            }
        }
    }
}

#[test]
fn what_comes_between_the_steps_of_a_reset_is_not_ended_or_all_of_it() {
    let (host, _, mut guest, [waits, ordered]) = waiting();
    let (kept, asked) = halfway(&host, &mut guest, ABORT_TASK_SET);
    // Of the other direction, and for the reactor that has marked, for the one that has not, and for the last one.
    let later = [2, 3, 4].map(|queue| ask(&mut guest, SIMPLE, queue, READ, 10 + queue as u32));
    pass_by(&mut guest, 2);
    pass_by(&mut guest, 4);
    drop(kept);
    let all = ends(&mut guest, &[&waits, &ordered, &later[0], &later[1], &later[2]]);
    assert_eq!(([all[0].0, all[1].0], all[2]), ([ABORTED; 2], (0, 0)), "{all:?}");
    // The last one was there before its reactor marked; the other one lay in its ring then, or was taken by then.
    assert!((all[3] == (0, 0) || all[3].0 == ABORTED) && all[4].0 == ABORTED, "{all:?}");
    answered(&mut guest, asked);
}

#[test]
fn a_function_that_waits_for_another_one_finds_nothing_left_and_is_answered() {
    let (host, log, mut guest, [waits, ordered]) = waiting();
    let (kept, first) = halfway(&host, &mut guest, LOGICAL_UNIT_RESET);
    let second = guest.submit_control(&tmf(I_T_NEXUS_RESET, flat(0), 0), 1);
    drop(kept);
    assert!(ends(&mut guest, &[&waits, &ordered]).iter().all(|end| end.0 == RESET));
    // In either order: of the second there was nothing left.
    let heads = [guest.used(0), guest.used(0)];
    for (head, answer) in [first, second] {
        assert!(heads.contains(&(head, 1)), "{heads:?}");
        assert_eq!(guest.read(answer, 1), [0]);
        guest.free(0, head, 2);
    }
    assert!(begun(&log).is_empty());
    goes_on(&host, &mut guest, 2..5);
}

#[test]
fn a_guest_that_leaves_before_the_end_of_a_reset_leaves_nothing_of_it() {
    let (host, log, mut guest, _) = waiting();
    let (kept, _) = halfway(&host, &mut guest, LOGICAL_UNIT_RESET);
    drop(guest);
    std::thread::sleep(WHILE);
    drop(kept);
    host.wait_until_free();
    assert!(begun(&log).is_empty());
    let mut guest = Guest::start(&host.socket(), LINUX, 3);
    goes_on(&host, &mut guest, 2..5);
}

#[test]
fn a_disk_that_is_to_be_removed_in_the_midst_of_a_reset_goes_after_it() {
    let (host, log, mut guest, [waits, ordered]) = waiting();
    let (kept, asked) = halfway(&host, &mut guest, LOGICAL_UNIT_RESET);
    std::thread::scope(|scope| {
        scope.spawn(|| host.controllers.remove_target("vm0", 0).unwrap());
        std::thread::sleep(WHILE);
        drop(kept);
        assert!(ends(&mut guest, &[&waits, &ordered]).iter().all(|end| end.0 == RESET));
        answered(&mut guest, asked);
    });
    assert!(begun(&log).is_empty());
    pass_by(&mut guest, 4);
    host.add(0, "traced");
    goes_on(&host, &mut guest, 2..5);
}

#[test]
fn a_queue_moves_before_a_reset_or_after_it() {
    let (host, log, mut guest, [waits, ordered]) = waiting();
    let (kept, asked) = halfway(&host, &mut guest, LOGICAL_UNIT_RESET);
    host.controllers.move_queue("vm0", 2, 1);
    host.controllers.move_queue("vm0", 4, 0);
    drop(kept);
    assert!(ends(&mut guest, &[&waits, &ordered]).iter().all(|end| end.0 == RESET));
    answered(&mut guest, asked);
    assert!(begun(&log).is_empty());
    moves(&host, 2, 1);
    moves(&host, 4, 0);
    goes_on(&host, &mut guest, 2..5);
}

#[test]
fn a_reactor_that_sleeps_has_its_part_in_a_reset() {
    for _ in 0..10 {
        let (host, log, mut guest, [waits, ordered]) = waiting();
        std::thread::sleep(Duration::from_millis(5));
        assert_eq!(guest.control(&tmf(LOGICAL_UNIT_RESET, flat(0), 0), 1), [0]);
        assert!(ends(&mut guest, &[&waits, &ordered]).iter().all(|end| end.0 == RESET));
        assert!(begun(&log).is_empty());
        goes_on(&host, &mut guest, 2..5);
    }
}

/// What is left to the next one is not overtaken by what is ORDERED behind it.
#[test]
fn a_target_that_stops_does_nothing_that_is_ordered_behind_what_it_leaves() {
    let host = Host::new(3);
    let disk = FaultBdev::new("traced", 512, 8192);
    disk.defer(Some(1));
    let log = Log::default();
    let traced = std::sync::Arc::new(Traced { disk, log: log.clone() });
    host.registry.register(traced).unwrap();
    host.malloc("disk");
    host.add(0, "traced");
    host.add(1, "disk");
    let (mut guest, region) = tracked_of(&host, 5);
    (0..2).for_each(|target| guest.ready(target));
    limit(&host, hard(Share::Write));
    let requests = two(&mut guest);
    log.lock().unwrap().clear();
    let kept = host.keep(1);
    std::thread::scope(|scope| {
        scope.spawn(|| host.controllers.delete("vm0", true).unwrap());
        std::thread::sleep(2 * WHILE);
        drop(kept);
    });
    assert!(guest.peer.is_closed());
    assert_eq!((begun(&log), guest.try_used(2), guest.try_used(4)), (vec![], None, None));
    assert_eq!([region.marked(2), region.marked(4)], requests.map(|request| vec![request.head]));
    let second = Host::with_disk(3);
    go_on_of(&mut guest, &region, &second, 5);
    for request in requests {
        let reply = guest.finish(&request);
        assert!(reply.status == 0 || reply.sense[2] & 15 == 6);
    }
}

/// Two guests whose disk is the same, on so many reactors; the first one's controller is `vm0`.
fn shared(reactors: usize, bdev: &str, host: &Host) -> [Guest; 2] {
    host.controllers.create("vm1", ControllerOptions::default()).unwrap();
    host.malloc("disk");
    for controller in ["vm0", "vm1"] {
        for (target, bdev) in [(0, bdev), (1, "disk")] {
            let shared = TargetOptions { shareable: true, ..Default::default() };
            host.controllers.add_target(controller, target, bdev, shared).unwrap();
        }
    }
    let mut guests = ["vm0", "vm1"]
        .map(|name| Guest::start(&host.socket().with_file_name(name), LINUX, reactors));
    for guest in &mut guests {
        (0..2).for_each(|target| guest.ready(target));
    }
    assert_eq!(places(host).len(), reactors);
    guests
}

fn is_told_of_reset(guest: &mut Guest) {
    let reply = guest.scsi(0, &[0; 6], &[], 0);
    assert_eq!((reply.status, reply.sense[2] & 15, reply.sense[12]), (2, 6, 0x29));
    guest.ready(0);
}

#[test]
fn sam5_7_7_a_reset_through_one_controller_ends_what_waits_in_another_one_with_the_volume() {
    let host = Host::new(2);
    let gate = host.gate("gate");
    let [mut own, mut other] = shared(2, "gate", &host);
    // Both orders: the ORDERED one on either reactor.
    for (one, two) in [(2, 3), (3, 2)] {
        gate.shut();
        let simple = read(&mut other, SIMPLE, one, 0);
        gate.wait_for(1);
        let ordered = read(&mut other, ORDERED, two, 1);
        pass_by(&mut other, two);
        let reads = gate.reads();
        assert_eq!(own.control(&tmf(LOGICAL_UNIT_RESET, flat(0), 0), 1), [0]);
        gate.open();
        let ended = [other.finish(&simple), other.finish(&ordered)];
        let ended = ended.map(|reply| (reply.response, reply.status));
        assert_eq!((ended, gate.reads()), ([(0, TASK_ABORTED); 2], reads + 1));
        [&mut own, &mut other].into_iter().for_each(is_told_of_reset);
        for (n, queue) in [2, 3].into_iter().enumerate() {
            let ordered = read(&mut other, ORDERED, queue, n as u64);
            good(&mut other, &ordered);
        }
    }
}

#[test]
fn sam5_7_7_what_waits_for_a_limit_ends_by_the_reset_of_another_controller() {
    let host = Host::new(2);
    host.malloc("traced");
    let [mut own, mut other] = shared(2, "traced", &host);
    limit(&host, hard(Share::Write));
    let first = ask(&mut other, SIMPLE, 2, WRITE, 0);
    assert_eq!(ends(&mut other, &[&first]), [(0, 0)]);
    let waits = ask(&mut other, SIMPLE, 2, WRITE, 1);
    pass_by(&mut other, 2);
    let ordered = ask(&mut other, ORDERED, 3, READ, 2);
    pass_by(&mut other, 3);
    let behind = ask(&mut other, SIMPLE, 2, READ, 3);
    pass_by(&mut other, 2);
    assert_eq!(own.control(&tmf(LOGICAL_UNIT_RESET, flat(0), 0), 1), [0]);
    assert_eq!(ends(&mut other, &[&waits, &ordered, &behind]), [(0, TASK_ABORTED); 3]);
    // That of one nexus is not theirs.
    is_told_of_reset(&mut other);
    let waits = ask(&mut other, SIMPLE, 2, WRITE, 1);
    pass_by(&mut other, 2);
    is_told_of_reset(&mut own);
    assert_eq!(own.control(&tmf(I_T_NEXUS_RESET, flat(0), 0), 1), [0]);
    std::thread::sleep(WHILE);
    assert_eq!(other.try_used(2), None);
    limit(&host, RateLimits::default());
    assert_eq!(ends(&mut other, &[&waits]), [(0, 0)]);
}

#[test]
fn resets_through_both_controllers_at_once_end_all_of_both_once() {
    let host = Host::new(2);
    let gate = host.gate("gate");
    let mut guests = shared(2, "gate", &host);
    let mut are_ended = 0;
    for round in 0..20 {
        gate.shut();
        let mut requests = Vec::new();
        for (n, guest) in guests.iter_mut().enumerate() {
            let simple = read(guest, SIMPLE, 2 + n, 0);
            gate.wait_for(n + 1);
            let ordered = read(guest, ORDERED, 3 - n, 1);
            pass_by(guest, 3 - n);
            requests.push([simple, ordered]);
        }
        let reads = gate.reads();
        let message = tmf(LOGICAL_UNIT_RESET, flat(0), 0);
        let asked = guests.each_mut().map(|guest| guest.submit_control(&message, 1));
        // As long as both need, every other time.
        if round % 2 == 0 {
            std::thread::sleep(WHILE);
        }
        gate.open();
        let (mut begun, mut ended) = (0, 0);
        for ((guest, requests), asked) in guests.iter_mut().zip(requests).zip(asked) {
            answered(guest, asked);
            let all = ends(guest, &[&requests[0], &requests[1]]);
            // The first may have gone through before, and then the other one, too.
            let is_ended = |end: &(u8, u8)| *end == (0, TASK_ABORTED) || end.0 == RESET;
            assert!(is_ended(&all[1]) || all == [(0, 0); 2], "{all:?}");
            assert!(is_ended(&all[0]) || all[0] == (0, 0), "{all:?}");
            begun += 1 + u64::from(all[1] == (0, 0));
            ended += all.iter().filter(|end| is_ended(end)).count();
        }
        // One that has begun, after the first had gone through, is ended as well.
        let most = if ended == 4 { 2 } else { 4 };
        assert!((begun..=most).contains(&(gate.reads() - reads)), "{ended} of 4 are ended");
        are_ended += usize::from(ended == 4);
        guests.iter_mut().for_each(is_told_of_reset);
    }
    assert!(are_ended > 0, "both resets never came in time");
}

/// A driver of virtio-blk knows of no reset: what waits there goes on.
#[test]
fn what_waits_of_a_virtio_blk_disk_is_not_ended_by_the_reset_of_a_lun_with_its_volume() {
    let disk = FaultBdev::new("disk", 512, 8192);
    let options = || TargetOptions { shareable: true, ..Default::default() };
    let host = blk::host_with(&disk, options());
    host.controllers.create("vm1", ControllerOptions::default()).unwrap();
    host.controllers.add_target("vm1", 0, "disk", options()).unwrap();
    let mut scsi = Guest::start(&host.socket().with_file_name("vm1"), LINUX, 2);
    scsi.ready(0);
    let mut guest = blk::start(&host, blk::BLK, 2);
    host.registry.limits("disk").set(hard(Share::Write)).unwrap();
    blk::write(&mut guest, 0, &[1; 512]);
    let taken = host.stats().controller.requests;
    let out = [blk::header(1, 7), vec![2; 512]].concat();
    let waits = blk::submit(&mut guest, 0, &out, 0, out.len());
    wait_until("it is taken", || host.stats().controller.requests > taken);
    assert_eq!(scsi.control(&tmf(LOGICAL_UNIT_RESET, flat(0), 0), 1), [0]);
    std::thread::sleep(WHILE);
    assert_eq!(guest.try_used(0), None);
    host.registry.limits("disk").set(RateLimits::default()).unwrap();
    assert_eq!(blk::finish(&mut guest, &waits).0, blk::OK);
}
