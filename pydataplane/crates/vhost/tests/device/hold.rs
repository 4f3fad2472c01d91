//! What is held for an upgrade, and when: who waits for a disk, and who does not.

use std::time::Duration;

use vhost_scsi::{ControllerOptions, TargetOptions};

use crate::guest::*;
use crate::handover::{put_together, sent};
use crate::host::*;
use crate::hostile::bystander;
use crate::inflight::{go_on_of, tracked_of};

/// Longer than anybody is held for another's I/O.
const LONG: Duration = Duration::from_millis(300);
/// How long a disk that hangs is waited for.
const TIMEOUT: Duration = Duration::from_millis(500);
/// Status, and task attribute.
const BUSY: u8 = 8;
const ORDERED: u8 = 1;

/// A controller `name` whose target 0 is a gate, and a guest that uses it.
fn gated(host: &Host, name: &str) -> (Gate, Guest) {
    host.controllers.create(name, ControllerOptions::default()).unwrap();
    let gate = host.gate(&format!("gate of {name}"));
    let options = TargetOptions::default();
    let bdev = format!("gate of {name}");
    host.controllers.add_target(name, 0, &bdev, options).unwrap();
    let mut guest = Guest::start(&host.socket().with_file_name(name), LINUX, 1);
    guest.ready(0);
    (gate, guest)
}

/// A write that waits at the `gate` of controller `name`, and one that waits for its end. Both were taken.
fn stuck(host: &Host, name: &str, gate: &Gate, guest: &mut Guest) -> [Request; 2] {
    let taken = || host.controllers.stats(Some(name), None).unwrap()[0].controller.requests;
    let before = taken();
    gate.shut();
    let request = guest.submit(2, flat(0), 1, &rw10(0x2a, 0, 1), &[1; 512], 0);
    gate.wait_for(1);
    let behind = guest.submit_with(ORDERED, 2, flat(0), 2, &[0; 6], &[], 0);
    wait_until("both were taken", || taken() >= before + 2);
    [request, behind]
}

/// Waits until it is tried to hold `guest`, whose request `behind` is to be sent again then.
fn wait_for_hold(guest: &mut Guest, behind: &Request) {
    assert_eq!(guest.finish(behind).status, BUSY);
}

/// `guest` is served, for so long that it must have been held if it is for others.
fn is_served(guest: &mut Guest) {
    let since = std::time::Instant::now();
    let mut rounds = 0u8;
    while since.elapsed() < LONG || rounds < 100 {
        assert_eq!(guest.write_blocks(0, 1, &[rounds; 512]).status, 0);
        assert_eq!(guest.read_blocks(0, 1, 1).data, [rounds; 512]);
        rounds = rounds.wrapping_add(1);
    }
}

/// Nobody is: what `guest` asks for is answered when all go on.
fn is_held(host: &Host, guest: &mut Guest) {
    let request = guest.submit(2, flat(0), 5, &[0; 6], &[], 0);
    std::thread::sleep(Duration::from_millis(20));
    assert_eq!(guest.try_used(2), None);
    host.controllers.release();
    assert_eq!(guest.finish(&request).status, 0);
}

#[test]
fn others_are_served_while_the_io_of_one_is_waited_for() {
    let host = Host::new(1);
    let mut other = bystander(&host);
    let (gate, mut guest) = gated(&host, "slow");
    let [late, behind] = stuck(&host, "slow", &gate, &mut guest);
    std::thread::scope(|scope| {
        let hold = scope.spawn(|| host.controllers.hold(DEADLINE));
        wait_for_hold(&mut guest, &behind);
        is_served(&mut other);
        assert!(!hold.is_finished(), "it waits for the gate");
        gate.open();
        hold.join().unwrap().unwrap();
    });
    // Told before it was held.
    assert_eq!(guest.finish(&late).status, 0);
    is_held(&host, &mut other);
    guest.ready(0);
}

#[test]
fn others_are_served_while_one_is_waited_for_that_was_quick_before() {
    let host = Host::new(1);
    let mut other = bystander(&host);
    let (first_gate, mut first) = gated(&host, "first");
    let (second_gate, mut second) = gated(&host, "second");
    let [late, behind] = stuck(&host, "first", &first_gate, &mut first);
    std::thread::scope(|scope| {
        let hold = scope.spawn(|| host.controllers.hold(DEADLINE));
        wait_for_hold(&mut first, &behind);
        // It is known by now that the first is slow, and the second was not.
        is_served(&mut other);
        let [later, behind] = stuck(&host, "second", &second_gate, &mut second);
        first_gate.open();
        assert_eq!(first.finish(&late).status, 0);
        wait_for_hold(&mut second, &behind);
        is_served(&mut other);
        assert!(!hold.is_finished(), "it waits for the second gate");
        // What came first stays held meanwhile.
        let early = first.submit(2, flat(0), 2, &[0; 6], &[], 0);
        is_served(&mut other);
        assert_eq!(first.try_used(2), None);
        second_gate.open();
        hold.join().unwrap().unwrap();
        assert_eq!(second.finish(&later).status, 0);
        is_held(&host, &mut other);
        assert_eq!(first.finish(&early).status, 0);
    });
}

#[test]
fn a_disk_that_hangs_is_an_error_and_keeps_no_other_guest_waiting() {
    let host = Host::new(1);
    let mut other = bystander(&host);
    let (gate, mut guest) = gated(&host, "slow");
    let [late, behind] = stuck(&host, "slow", &gate, &mut guest);
    std::thread::scope(|scope| {
        let hold = scope.spawn(|| host.controllers.hold(TIMEOUT));
        wait_for_hold(&mut guest, &behind);
        while !hold.is_finished() {
            is_served(&mut other);
        }
        let why = hold.join().unwrap().unwrap_err().to_string();
        assert!(why.contains("controller slow") && why.contains("I/O in flight"), "{why}");
        assert_eq!(why.lines().count(), 1);
    });
    is_served(&mut other);
    gate.open();
    assert_eq!(guest.finish(&late).status, 0);
    guest.ready(0);
    host.controllers.hold(DEADLINE).unwrap();
    is_held(&host, &mut other);
}

#[test]
fn who_was_held_already_goes_on_when_a_later_disk_hangs() {
    let host = Host::new(1);
    let (first_gate, mut first) = gated(&host, "first");
    let (second_gate, mut second) = gated(&host, "second");
    let [late, behind] = stuck(&host, "first", &first_gate, &mut first);
    std::thread::scope(|scope| {
        let hold = scope.spawn(|| host.controllers.hold(DEADLINE / 4));
        wait_for_hold(&mut first, &behind);
        let [later, behind] = stuck(&host, "second", &second_gate, &mut second);
        first_gate.open();
        assert_eq!(first.finish(&late).status, 0);
        wait_for_hold(&mut second, &behind);
        let early = first.submit(2, flat(0), 2, &[0; 6], &[], 0);
        hold.join().unwrap().unwrap_err();
        assert_eq!(first.finish(&early).status, 0);
        second_gate.open();
        assert_eq!(second.finish(&later).status, 0);
    });
    first.ready(0);
    second.ready(0);
}

#[test]
fn who_hears_of_an_upgrade_too_late_is_not_held_for_it() {
    let host = Host::new(1);
    let (gate, mut guest) = gated(&host, "slow");
    let [late, behind] = stuck(&host, "slow", &gate, &mut guest);
    let why = host.controllers.hold(Duration::ZERO).unwrap_err().to_string();
    assert!(why.contains("controller slow had no time"), "{why}");
    host.controllers.describe();
    // Not told that it is busy either.
    std::thread::sleep(Duration::from_millis(20));
    assert_eq!(guest.try_used(2), None);
    gate.open();
    assert_eq!(guest.finish(&late).status, 0);
    assert_eq!(guest.finish(&behind).status, 0);
}

/// What was stopped for an upgrade that was given up goes on, and the guest hears nothing of it.
#[test]
fn a_command_of_many_ios_goes_on_when_an_upgrade_is_given_up() {
    let host = Host::new(1);
    let (gate, mut guest) = gated(&host, "slow");
    gate.shut();
    let reads = gate.reads();
    // VERIFY (10) of 4 MiB, 64 KiB at a time.
    let long = guest.submit(2, flat(0), 1, &rw10(0x2f, 0, 8192), &[], 0);
    gate.wait_for(1);
    host.controllers.hold(TIMEOUT).unwrap_err();
    // A controller answers after it did what it was told before.
    assert_eq!(host.controllers.describe().len(), 2);
    gate.open();
    let reply = guest.finish(&long);
    assert_eq!((reply.response, reply.status), (0, 0));
    assert_eq!(gate.reads(), reads + 64);
}

/// An upgrade that is given up lets go on whom it held, and nobody else.
#[test]
fn nothing_more_is_taken_from_a_vm_that_left_when_an_upgrade_is_given_up() {
    let (host, gate) = Host::gated(1);
    let mut other = bystander(&host);
    let mut guest = Guest::start(&host.socket(), LINUX, 1);
    guest.ready(0);
    gate.shut();
    guest.submit(2, flat(0), 1, &rw10(0x2a, 0, 1), &[1; 512], 0);
    gate.wait_for(1);
    guest.peer.shutdown();
    host.wait_until_left();
    // Its next session may take it, not this one.
    guest.submit(2, flat(0), 2, &[0; 6], &[], 0);
    let used = guest.used_index(2);
    let why = host.controllers.hold(TIMEOUT).unwrap_err().to_string();
    assert!(why.contains("the VM that left controller vm0"), "{why}");
    assert_eq!(host.controllers.describe().len(), 2);
    is_served(&mut other);
    assert_eq!(guest.used_index(2), used);
    gate.open();
    host.wait_until_free();
    assert_eq!(guest.used_index(2), used.wrapping_add(1), "the one that was with the disk");
}

/// What a session before left is in the region, so an upgrade need not wait until all of it was with
/// the disk.
#[test]
fn what_is_not_submitted_again_yet_is_by_whoever_goes_on() {
    /// Of six request queues there is more in flight than a session may have on one reactor.
    const QUEUES: u16 = 8;
    /// Most requests that a turn of a reactor takes at once.
    const BATCH: usize = 32;
    const REACTORS: usize = 2;
    let queues = 2..usize::from(QUEUES);
    let (first, gate) = Host::gated(REACTORS);
    let (mut guest, region) = tracked_of(&first, QUEUES);
    guest.ready(0);
    gate.shut();
    let used_of = |guest: &Guest| queues.clone().map(|q| guest.used_index(q)).collect::<Vec<_>>();
    let marked = || queues.clone().map(|queue| region.marked(queue).len()).sum::<usize>();
    let before = used_of(&guest);
    for queue in queues.clone() {
        (0..SIZE).for_each(|n| {
            guest.submit(queue, flat(0), n.into(), &rw10(0x28, 0, 1), &[], 512);
        });
    }
    let all = queues.len() * usize::from(SIZE);
    wait_until("all are taken", || marked() == all);
    let ended = |guest: &Guest| {
        let now = used_of(guest);
        now.iter().zip(&before).map(|(n, b)| usize::from(n.wrapping_sub(*b))).sum::<usize>()
    };
    // It dies. What it still does is told to nobody, once the reactors have heard of it.
    guest.peer.shutdown();
    first.wait_until_left();
    gate.open();
    first.wait_until_free();
    // A turn whose time is over gives back what it took and did not begin: to the available ring, from
    // which the next session takes it. On a busy machine the last ones were given back just now.
    let given_back = |guest: &Guest| {
        let now = used_of(guest);
        let of_queue = |(at, queue): (usize, usize)| {
            let ended = usize::from(now[at].wrapping_sub(before[at]));
            let known = ended + region.marked(queue).len();
            usize::from(SIZE).checked_sub(known).expect("none is both ended and marked")
        };
        queues.clone().enumerate().map(of_queue).collect::<Vec<_>>()
    };
    let left = given_back(&guest);
    assert!(left.iter().sum::<usize>() <= REACTORS * BATCH, "{left:?} neither ended nor marked");

    let (second, gate) = Host::gated(1);
    gate.shut();
    go_on_of(&mut guest, &region, &second, QUEUES);
    gate.wait_for(256);
    let used = used_of(&guest);
    let controllers = std::thread::scope(|scope| {
        let hold = scope.spawn(|| second.controllers.hold(DEADLINE));
        wait_until("what waits is to be sent again", || used_of(&guest) != used);
        gate.open();
        hold.join().unwrap().unwrap();
        let (controllers, outcome) = second.controllers.hand_over();
        outcome.unwrap();
        controllers.iter().map(sent).collect()
    });
    assert!(marked() > 0, "some were not submitted again");
    // Of what is sent again none is given back, so what is not marked was given back before.
    let still_left = given_back(&guest);
    let none_more = still_left.iter().zip(&left).all(|(still, before)| still <= before);
    assert!(none_more, "{still_left:?} of {left:?} neither ended nor marked");
    put_together(&second, controllers, &[(0, "gate", TargetOptions::default())]);
    wait_until("all end", || ended(&guest) == all);
    for queue in queues.clone() {
        let mut heads: Vec<_> = (0..SIZE).map(|_| guest.used(queue).0).collect();
        heads.sort_unstable();
        heads.dedup();
        assert_eq!(heads.len(), usize::from(SIZE), "each once");
    }
    wait_until("nothing is marked", || marked() == 0);
    queues.clone().for_each(|queue| assert_eq!(guest.try_used(queue), None));
}
