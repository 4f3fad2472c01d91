//! Task management and asynchronous notification.

use std::time::{Duration, Instant};

use crate::guest::*;
use crate::host::*;
use crate::inflight::tracked;
use crate::peer::words;

const ABORT_TASK: u32 = 0;
const ABORT_TASK_SET: u32 = 1;
const CLEAR_ACA: u32 = 2;
const CLEAR_TASK_SET: u32 = 3;
const QUERY_TASK: u32 = 6;
const QUERY_TASK_SET: u32 = 7;

const COMPLETE: u8 = 0;
const BAD_TARGET: u8 = 3;
const SUCCEEDED: u8 = 10;
const REJECTED: u8 = 11;
const INCORRECT_LUN: u8 = 12;

#[test]
fn functions_about_nothing_in_flight_are_complete_at_once() {
    let host = Host::with_disk(2);
    let mut guest = Guest::start(&host.socket(), LINUX, 2);
    guest.ready(0);
    for (function, response) in [
        (ABORT_TASK, COMPLETE),
        (ABORT_TASK_SET, COMPLETE),
        (CLEAR_ACA, REJECTED),
        (CLEAR_TASK_SET, COMPLETE),
        (I_T_NEXUS_RESET, COMPLETE),
        (LOGICAL_UNIT_RESET, COMPLETE),
        (QUERY_TASK, COMPLETE),
        (QUERY_TASK_SET, COMPLETE),
        (8, REJECTED),
    ] {
        assert_eq!(guest.control(&tmf(function, flat(0), 1), 1), [response], "TMF {function}");
    }
    assert_eq!(guest.control(&tmf(QUERY_TASK, flat(1), 1), 1), [BAD_TARGET]);
    let other = [1, 0, 0x40, 1, 0, 0, 0, 0];
    assert_eq!(guest.control(&tmf(LOGICAL_UNIT_RESET, other, 1), 1), [INCORRECT_LUN]);
}

#[test]
fn a_guest_that_asks_without_end_is_answered_all_the_same() {
    /// Longer than what it has in advance lasts.
    const LONG: Duration = Duration::from_secs(3);
    let host = Host::with_disk(1);
    let mut guest = Guest::start(&host.socket(), LINUX, 1);
    guest.ready(0);
    let since = Instant::now();
    while since.elapsed() < LONG {
        let ask = |guest: &mut Guest| guest.submit_control(&tmf(QUERY_TASK_SET, flat(0), 0), 1);
        let mut asked: Vec<_> = (0..100).map(|_| ask(&mut guest)).collect();
        while !asked.is_empty() {
            let (head, written) = guest.used(0);
            let nth = asked.iter().position(|(h, _)| *h == head).expect("once for each");
            let (_, at) = asked.swap_remove(nth);
            assert_eq!((written, guest.read(at, 1)), (1, vec![COMPLETE]));
            guest.free(0, head, 2);
        }
        // Others of its requests are none of this.
        guest.ready(0);
    }
}

/// Each may be a call of every reactor: what they take is bounded as it is for a peer's messages.
#[test]
fn task_management_has_its_part_of_the_time() {
    /// What one costs at most that a reactor answers late (`budget::MOST`), what a controller has in
    /// advance, and the part of time that it earns.
    const COST: Duration = Duration::from_millis(50);
    const BURST: Duration = Duration::from_secs(1);
    const EARNED: u32 = 8;
    const FUNCTIONS: u32 = 30;
    let host = Host::with_disk(1);
    let (mut guest, region) = tracked(&host);
    guest.ready(0);
    let since = Instant::now();
    for _ in 0..FUNCTIONS {
        // Answered when the ones before are paid for.
        assert_eq!(guest.control(&tmf(QUERY_TASK, flat(1), 1), 1), [BAD_TARGET]);
        let kept = host.keep_reactor();
        let (head, at) = guest.submit_control(&tmf(QUERY_TASK_SET, flat(0), 0), 1);
        wait_until("it is taken", || region.marked(0) == [head]);
        std::thread::sleep(COST);
        drop(kept);
        assert_eq!((guest.used(0), guest.read(at, 1)), ((head, 1), vec![COMPLETE]));
        guest.free(0, head, 2);
    }
    // The least that it can have taken; a slow machine takes longer.
    let least = (COST * (FUNCTIONS - 1) - BURST) * EARNED;
    assert!(since.elapsed() >= least, "{:?} of {least:?}", since.elapsed());
}

#[test]
fn reset_is_told_by_unit_attention() {
    let host = Host::with_disk(1);
    let mut guest = Guest::start(&host.socket(), LINUX, 1);
    for function in [LOGICAL_UNIT_RESET, I_T_NEXUS_RESET] {
        guest.ready(0);
        assert_eq!(guest.control(&tmf(function, flat(0), 0), 1), [COMPLETE]);
        let reply = guest.scsi(0, &[0; 6], &[], 0);
        assert_eq!((reply.status, reply.sense[2] & 15, reply.sense[12]), (2, 6, 0x29));
    }
}

#[test]
fn a_task_is_found_and_aborted_when_its_io_has_ended() {
    let host = Host::new(2);
    let gate = host.gate("gate");
    host.add(3, "gate");
    let mut guest = Guest::start(&host.socket(), LINUX, 2);
    guest.ready(3);
    gate.shut();
    let first = guest.submit(2, flat(3), 41, &rw10(0x2a, 0, 1), &[1; 512], 0);
    let second = guest.submit(3, flat(3), 42, &rw10(0x2a, 1, 1), &[2; 512], 0);
    gate.wait_for(2);
    assert_eq!(guest.control(&tmf(QUERY_TASK, flat(3), 42), 1), [SUCCEEDED]);
    assert_eq!(guest.control(&tmf(QUERY_TASK, flat(3), 43), 1), [COMPLETE]);
    assert_eq!(guest.control(&tmf(QUERY_TASK_SET, flat(3), 0), 1), [SUCCEEDED]);

    let (head, answer) = guest.submit_control(&tmf(ABORT_TASK, flat(3), 42), 1);
    // Not before the I/O has ended; meanwhile the control queue goes on.
    std::thread::sleep(Duration::from_millis(20));
    assert_eq!(guest.try_used(0), None);
    gate.open();
    assert_eq!(guest.used(0), (head, 1));
    assert_eq!(guest.read(answer, 1), [COMPLETE]);
    // It came back before the answer did, as aborted; the other one went on.
    let (head, written) = guest.try_used(3).expect("the task ended before the function");
    assert_eq!(head, second.head);
    assert_eq!(guest.reply(&second, written).response, 2, "VIRTIO_SCSI_S_ABORTED");
    assert_eq!(guest.finish(&first).status, 0);
}

#[test]
fn a_reset_ends_all_tasks_of_the_unit_and_only_those() {
    for (function, response) in
        [(LOGICAL_UNIT_RESET, 4), (I_T_NEXUS_RESET, 4), (ABORT_TASK_SET, 2), (CLEAR_TASK_SET, 2)]
    {
        let host = Host::new(2);
        let (gate, other) = (host.gate("gate"), host.gate("other"));
        host.add(0, "gate");
        host.add(1, "other");
        let mut guest = Guest::start(&host.socket(), LINUX, 2);
        guest.ready(0);
        guest.ready(1);
        gate.shut();
        other.shut();
        let kept = guest.submit(2, flat(1), 1, &rw10(0x28, 0, 1), &[], 512);
        let ended = [
            guest.submit(3, flat(0), 2, &rw10(0x28, 0, 1), &[], 512),
            guest.submit(3, flat(0), 3, &rw10(0x2a, 0, 1), &[0; 512], 0),
        ];
        gate.wait_for(2);
        other.wait_for(1);
        let (head, answer) = guest.submit_control(&tmf(function, flat(0), 0), 1);
        // As seen by a second message: the first one was taken.
        assert_eq!(guest.control(&tmf(QUERY_TASK_SET, flat(1), 0), 1), [SUCCEEDED]);
        gate.open();
        assert_eq!(guest.used(0), (head, 1));
        assert_eq!(guest.read(answer, 1), [COMPLETE]);
        for _ in &ended {
            let (head, written) = guest.used(3);
            let request = ended.iter().find(|r| r.head == head).unwrap();
            assert_eq!(guest.reply(request, written).response, response, "TMF {function}");
        }
        assert_eq!(guest.try_used(2), None);
        other.open();
        assert_eq!(guest.finish(&kept).status, 0);
    }
}

#[test]
fn the_control_queue_stops_only_after_its_functions_were_answered() {
    let (host, gate) = Host::gated(1);
    let mut guest = Guest::start(&host.socket(), LINUX, 1);
    guest.ready(0);
    gate.shut();
    let request = guest.submit(2, flat(0), 5, &rw10(0x28, 0, 1), &[], 512);
    gate.wait_for(1);
    let (head, _) = guest.submit_control(&tmf(ABORT_TASK, flat(0), 5), 1);
    // The function is taken before the message behind it.
    assert_eq!(guest.control(&tmf(QUERY_TASK, flat(9), 0), 1), [BAD_TARGET]);
    let opener = std::thread::spawn(move || {
        std::thread::sleep(Duration::from_millis(30));
        gate.open();
    });
    assert_eq!(guest.peer.base(0), 2);
    assert_eq!(guest.try_used(0), Some((head, 1)));
    assert_eq!(guest.finish(&request).response, 2);
    opener.join().unwrap();
}

#[test]
fn asynchronous_notification_has_no_events() {
    let host = Host::with_disk(1);
    let mut guest = Guest::start(&host.socket(), LINUX, 1);
    for kind in [1, 2] {
        let mut message = words(&[kind]);
        message.extend(flat(0));
        message.extend(words(&[0x7e]));
        assert_eq!(guest.control(&message, 5), [0, 0, 0, 0, COMPLETE]);
        message[5] = 77;
        assert_eq!(guest.control(&message, 5), [0, 0, 0, 0, BAD_TARGET]);
    }
}

#[test]
fn nonsense_on_the_control_queue_is_answered_or_stops_that_queue_only() {
    let host = Host::with_disk(1);
    let mut guest = Guest::start(&host.socket(), LINUX, 1);
    guest.ready(0);
    assert_eq!(guest.control(&words(&[77]), 1), [9]);
    assert_eq!(guest.control(&tmf(QUERY_TASK, flat(0), 0)[..20], 1), [9]);
    let bad = guest.chain(0, &[Buffer { addr: 1 << 40, len: 24, write: false }]);
    guest.offer(0, bad);
    wait_until("it is counted", || host.stats().controller.malformed == 3);
    guest.ready(0);
    guest.peer.base(0);
    guest.start_queue(0);
    assert_eq!(guest.control(&tmf(QUERY_TASK, flat(0), 0), 1), [COMPLETE]);
}
