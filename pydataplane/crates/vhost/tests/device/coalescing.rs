//! Calls that are held back for more to come.

use std::time::{Duration, Instant};

use vhost_scsi::Coalescing;

use crate::guest::*;
use crate::host::*;

/// Above any threshold of 1 after some requests, and with the longest delay.
const MOST: Coalescing = Coalescing::Fixed { delay_base_us: u32::MAX, iops_threshold: 1 };
const OFF: Coalescing = Coalescing::Fixed { delay_base_us: 0, iops_threshold: 1 };
/// The driver of Linux, called after every request that it did not see.
const PLAIN: u64 = LINUX & !F_EVENT_IDX;
const ROUND: u64 = 100;

/// A guest with a write that waits at the gate, target 0; what it asks of target 1 ends at once.
fn host() -> (Host, Gate, Guest, Request) {
    let (host, gate) = Host::gated(1);
    host.malloc("fast");
    host.add(1, "fast");
    let mut guest = Guest::start(&host.socket(), PLAIN, 1);
    guest.ready(0);
    guest.ready(1);
    gate.shut();
    let waits = guest.submit(2, flat(0), 1, &rw10(0x2a, 0, 1), &[1; 512], 0);
    gate.wait_for(1);
    (host, gate, guest, waits)
}

/// Has calls of the guest of `host` held back so from now on.
fn set(host: &Host, to: Coalescing) {
    let socket = host.socket();
    let name = socket.file_name().unwrap().to_str().unwrap();
    host.controllers.set_coalescing(name, to).unwrap();
}

/// Calls in a round of requests, one after the other.
fn calls(host: &Host, guest: &mut Guest) -> u64 {
    let before = host.stats().controller.interrupts;
    (0..ROUND).for_each(|_| assert_eq!(guest.read_blocks(1, 0, 1).status, 0));
    host.stats().controller.interrupts - before
}

#[test]
fn one_call_tells_of_more_than_one_request_while_others_are_in_flight() {
    let (host, gate, mut guest, waits) = host();
    assert!(calls(&host, &mut guest) >= ROUND - 1);
    set(&host, MOST);
    // A busy machine may be slower than the delay.
    let end = Instant::now() + DEADLINE;
    while calls(&host, &mut guest) > ROUND / 2 {
        assert!(Instant::now() < end, "calls are not held back");
    }
    set(&host, OFF);
    calls(&host, &mut guest);
    assert!(calls(&host, &mut guest) >= ROUND - 1);
    gate.open();
    assert_eq!(guest.finish(&waits).status, 0);
}

#[test]
fn a_call_that_waits_is_made_though_nothing_else_happens() {
    let (host, gate, mut guest, waits) = host();
    set(&host, MOST);
    for _ in 0..20 {
        calls(&host, &mut guest);
        // What was called before is not what is waited for.
        while guest.called(2, Duration::from_millis(20)) {}
        let request = guest.submit(2, flat(1), 7, &rw10(0x28, 0, 1), &[], 512);
        assert!(guest.called(2, DEADLINE), "the guest is called while the other one is in flight");
        assert_eq!(guest.finish(&request).status, 0);
    }
    gate.open();
    assert_eq!(guest.finish(&waits).status, 0);
    assert!(guest.called(2, DEADLINE));
}

#[test]
fn a_ring_that_was_stopped_has_called_for_all_that_ended() {
    let (host, gate, mut guest, waits) = host();
    set(&host, MOST);
    for _ in 0..20 {
        calls(&host, &mut guest);
    }
    while guest.called(2, Duration::from_millis(20)) {}
    let used = guest.used_index(2);
    let request = guest.submit(2, flat(1), 7, &rw10(0x28, 0, 1), &[], 512);
    wait_until("it has ended", || guest.used_index(2) != used);
    gate.open();
    guest.peer.base(2);
    assert!(guest.called(2, Duration::from_millis(1)), "nothing calls after that");
    let mut ended = [guest.used(2).0, guest.used(2).0];
    ended.sort_unstable();
    let mut heads = [waits.head, request.head];
    heads.sort_unstable();
    assert_eq!(ended, heads);
}
