//! A request queue goes on on another reactor: its guest sees nothing, and no request is lost, done twice
//! or overtaken.

use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use bdev::RateLimits;
use bdev::testing::FaultBdev;
use vhost_scsi::TargetOptions;

use crate::blk::{self, finish, host_with};
use crate::blk_suspended::{guest_of, put};
use crate::guest::*;
use crate::host::*;
use crate::inflight::{Region, go_on};
use crate::peer::*;

/// Where the queues run: index and CPU.
pub fn places(host: &Host) -> Vec<(u16, usize)> {
    host.controllers.list(Some("vm0")).unwrap()[0].session.as_ref().unwrap().queues.clone()
}

/// Has a queue move, and waits until it is there.
pub fn moves(host: &Host, queue: u16, to: usize) {
    wait_until("the queue has moved", || {
        host.controllers.move_queue("vm0", queue, to);
        std::thread::sleep(Duration::from_millis(2));
        places(host).contains(&(queue, to))
    });
}

/// Waits until the controller's thread has done all that it was asked.
pub fn carried_out(host: &Host) {
    host.controllers.resume("vm0", None).unwrap();
}

/// A guest with two queues, and what its QEMU keeps of what is in flight.
fn tracked(host: &Host) -> (Guest, Region) {
    let mut guest = Guest::connect(&host.socket(), LINUX);
    let region = Region::of(&mut guest, 4);
    (0..4).for_each(|queue| guest.start_queue(queue));
    guest.ready(0);
    (guest, region)
}

/// Writes of 1 to 29 to one block that were taken and wait for a limit, named by what they write.
fn waiting(host: &Host, guest: &mut Guest) -> Vec<Request> {
    // After an I/O of a sector the next one waits for 512 s.
    let mut slow = RateLimits { operation_bytes: 1, ..RateLimits::default() };
    slow.operations[0].average = 1;
    host.registry.limits("disk0").set(slow).unwrap();
    assert_eq!(guest.write_blocks(0, 7, &[0; 512]).status, 0);
    let taken = host.stats().controller.requests;
    let write = |n: u8| guest.submit(2, flat(0), n.into(), &rw10(0x2a, 7, 1), &[n; 512], 0);
    let requests: Vec<_> = (1..30u8).map(write).collect();
    wait_until("all are taken", || host.stats().controller.requests >= taken + 29);
    requests
}

/// A WRITE and a READ, one behind the other.
fn goes_on(guest: &mut Guest, queue: usize, byte: u8) {
    let write = guest.submit(queue, flat(0), 1, &rw10(0x2a, 5, 1), &[byte; 512], 0);
    assert_eq!(guest.finish(&write).status, 0);
    let read = guest.submit(queue, flat(0), 2, &rw10(0x28, 5, 1), &[], 512);
    assert_eq!(guest.finish(&read).data, [byte; 512]);
}

#[test]
fn a_guest_that_is_idle_is_served_there_when_it_kicks() {
    let host = Host::with_disk(2);
    let mut guest = Guest::start(&host.socket(), LINUX, 2);
    guest.ready(0);
    assert_eq!(places(&host), [(2, 0), (3, 1)]);
    for n in 0..20 {
        moves(&host, 2, n % 2);
        // The reactors sleep by now.
        std::thread::sleep(Duration::from_millis(1));
        goes_on(&mut guest, 2, n as u8);
        goes_on(&mut guest, 3, n as u8);
    }
    moves(&host, 2, 0);
    host.controllers.move_queue("vm0", 2, 7);
    host.controllers.move_queue("vm0", 9, 1);
    host.controllers.move_queue("vm0", 0, 1);
    host.controllers.move_queue("nobody", 2, 1);
    goes_on(&mut guest, 2, 77);
    assert_eq!(places(&host), [(2, 0), (3, 1)]);
}

#[test]
fn a_guest_that_never_stops_asking_has_all_answers_in_their_order() {
    let host = Host::with_disk(2);
    let mut guest = Guest::start(&host.socket(), LINUX, 1);
    guest.ready(0);
    let (controllers, done) = (host.controllers.clone(), AtomicBool::new(false));
    std::thread::scope(|scope| {
        scope.spawn(|| {
            let mut to = 0;
            while !done.load(Ordering::Relaxed) {
                to = 1 - to;
                controllers.move_queue("vm0", 2, to);
                std::thread::sleep(Duration::from_micros(300));
            }
        });
        for round in 0..200u32 {
            // The last one is what stays, if none overtakes another.
            let requests: Vec<_> = (0..16u8)
                .map(|n| {
                    let byte = (round as u8).wrapping_mul(16).wrapping_add(n);
                    guest.submit(2, flat(0), u64::from(n), &rw10(0x2a, 7, 1), &[byte; 512], 0)
                })
                .collect();
            for request in &requests {
                assert_eq!(guest.finish(request).status, 0);
            }
            let last = (round as u8).wrapping_mul(16).wrapping_add(15);
            assert_eq!(guest.read_blocks(0, 7, 1).data, [last; 512]);
        }
        done.store(true, Ordering::Relaxed);
    });
    let stats = host.stats().controller;
    assert_eq!(stats.malformed, 0);
}

#[test]
fn one_whose_disk_does_not_answer_stays_and_is_served_on() {
    let (host, gate) = Host::gated(2);
    let mut guest = Guest::start(&host.socket(), LINUX, 2);
    guest.ready(0);
    gate.shut();
    let hangs = guest.submit(2, flat(0), 1, &rw10(0x28, 7, 1), &[], 512);
    gate.wait_for(1);
    host.controllers.move_queue("vm0", 2, 1);
    // What it is asked meanwhile is not lost.
    let later = guest.submit(2, flat(0), 2, &rw10(0x28, 8, 1), &[], 512);
    carried_out(&host);
    wait_until("it is taken, too", || gate.waiting() == 2);
    assert_eq!(places(&host), [(2, 0), (3, 1)]);
    gate.open();
    for _ in 0..2 {
        // The disk answers in any order.
        let (head, written) = guest.used(2);
        let request = [&hangs, &later].into_iter().find(|r| r.head == head).expect("of these");
        assert_eq!(guest.reply(request, written).status, 0);
    }
    moves(&host, 2, 1);
    let after = guest.submit(2, flat(0), 3, &rw10(0x28, 8, 1), &[], 512);
    assert_eq!(guest.finish(&after).status, 0);
}

#[test]
fn what_was_taken_and_has_not_begun_goes_along_in_its_order() {
    let host = Host::with_disk(2);
    let (mut guest, _region) = tracked(&host);
    let requests = waiting(&host, &mut guest);
    moves(&host, 2, 1);
    moves(&host, 2, 0);
    moves(&host, 2, 1);
    assert_eq!(guest.try_used(2), None);
    host.registry.limits("disk0").set(RateLimits::default()).unwrap();
    for request in &requests {
        assert_eq!(guest.finish(request).status, 0);
    }
    assert_eq!(guest.read_blocks(0, 7, 1).data, [29; 512]);
}

#[test]
fn a_task_that_is_aborted_while_its_queue_moves_is_not_done_afterwards() {
    for _ in 0..20 {
        let host = Host::with_disk(2);
        let (mut guest, _region) = tracked(&host);
        let requests = waiting(&host, &mut guest);
        for (n, request) in requests.iter().enumerate().rev() {
            host.controllers.move_queue("vm0", 2, 1 - n % 2);
            /// ABORT TASK (virtio 1.2 5.6.6.2), and VIRTIO_SCSI_S_ABORTED.
            const ABORT: (u32, u8) = (0, 2);
            assert_eq!(guest.control(&tmf(ABORT.0, flat(0), n as u64 + 1), 1), [0]);
            assert_eq!(guest.finish(request).response, ABORT.1);
        }
        host.registry.limits("disk0").set(RateLimits::default()).unwrap();
        assert_eq!(guest.read_blocks(0, 7, 1).data, [0; 512]);
    }
}

#[test]
fn where_no_region_tells_of_it_what_was_taken_stays_with_its_queue() {
    let host = Host::with_disk(2);
    let mut guest = Guest::start(&host.socket(), LINUX, 2);
    guest.ready(0);
    let requests = waiting(&host, &mut guest);
    host.controllers.move_queue("vm0", 2, 1);
    carried_out(&host);
    assert_eq!(places(&host), [(2, 0), (3, 1)]);
    host.registry.limits("disk0").set(RateLimits::default()).unwrap();
    for request in &requests {
        assert_eq!(guest.finish(request).status, 0);
    }
    moves(&host, 2, 1);
    goes_on(&mut guest, 2, 5);
}

#[test]
fn it_stops_starts_and_changes_its_memory_where_it_is() {
    let host = Host::with_disk(2);
    let mut guest = Guest::start(&host.socket(), LINUX, 2);
    guest.ready(0);
    moves(&host, 2, 1);
    goes_on(&mut guest, 2, 1);
    guest.tell_memory();
    goes_on(&mut guest, 2, 2);
    guest.peer.send(GET_VRING_BASE, &words(&[2, 0]), &[]);
    let base = guest.peer.reply(GET_VRING_BASE).unwrap();
    assert_eq!(places(&host), [(3, 1)]);
    host.controllers.move_queue("vm0", 2, 0);
    guest.describe_queue(2, u32::from_ne_bytes(base[4..8].try_into().unwrap()) as u16, false);
    goes_on(&mut guest, 2, 3);
    moves(&host, 2, 0);
    goes_on(&mut guest, 2, 4);
}

#[test]
fn a_guest_that_breaks_the_rules_meanwhile_is_not_served_again() {
    let host = Host::with_disk(2);
    let mut guest = Guest::start(&host.socket(), LINUX, 2);
    guest.ready(0);
    guest.offer(2, u16::MAX);
    guest.kick(2);
    wait_until("it is noticed", || host.stats().controller.malformed == 1);
    host.controllers.move_queue("vm0", 2, 1);
    goes_on(&mut guest, 3, 1);
    guest.offer(2, 0);
    guest.kick(2);
    goes_on(&mut guest, 3, 2);
    assert_eq!(guest.try_used(2), None);
}

/// Waits for all of these, in any order. Heads of those that ended otherwise than GOOD, and what was told of them: sense
/// key, additional sense code and its qualifier.
fn told_of(guest: &mut Guest, mut requests: Vec<Request>) -> Vec<(u16, [u8; 3])> {
    let mut told = Vec::new();
    while !requests.is_empty() {
        let (head, written) = guest.used(2);
        let at = requests.iter().position(|request| request.head == head);
        let reply = guest.reply(&requests.swap_remove(at.expect("answered once")), written);
        if reply.status != 0 {
            told.push((head, [reply.sense[2] & 15, reply.sense[12], reply.sense[13]]));
        }
    }
    told
}

#[test]
fn what_a_killed_target_began_is_told_once_and_not_of_a_later_request_of_the_same_chain() {
    let first = Host::with_disk(2);
    let (mut guest, region) = tracked(&first);
    let requests = waiting(&first, &mut guest);
    let begun = requests[7].head;
    region.mark_unrepeatable(2, begun);
    guest.peer.shutdown();
    let second = Host::with_disk(2);
    go_on(&mut guest, &region, &second);
    /// ABORTED COMMAND, I/O PROCESS TERMINATED; UNIT ATTENTION, POWER ON, RESET, OR BUS DEVICE RESET OCCURRED.
    const TERMINATED: [u8; 3] = [0xB, 0x00, 0x06];
    const NEW_SESSION: [u8; 3] = [6, 0x29, 0x00];
    let told = told_of(&mut guest, requests);
    assert_eq!(told.iter().find(|(head, _)| *head == begun), Some(&(begun, TERMINATED)));
    assert!(told.iter().all(|(head, told)| *head == begun || *told == NEW_SESSION), "{told:?}");

    // One of these has its head, and is taken again by the other reactor.
    guest.ready(0);
    let requests = waiting(&second, &mut guest);
    assert!(requests.iter().any(|request| request.head == begun));
    moves(&second, 2, 1);
    second.registry.limits("disk0").set(RateLimits::default()).unwrap();
    assert_eq!(told_of(&mut guest, requests), []);
}

#[test]
fn the_queue_of_a_virtio_blk_disk_moves_as_well() {
    let disk = FaultBdev::new("disk", 512, 8192);
    let host = host_with(&disk, TargetOptions::default());
    let (mut guest, _) = guest_of(&host, 2, true);
    for n in 1..20u8 {
        moves(&host, 0, usize::from(n % 2));
        let request = put(&mut guest, 0, u64::from(n), n);
        assert_eq!(finish(&mut guest, &request).0, blk::OK);
    }
}
