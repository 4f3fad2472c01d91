//! Requests of a virtio-blk disk that wait because an I/O failed. Its driver knows no status for "later", so
//! whatever stops its rings has them taken again, or left for whoever goes on: none is lost, none is answered
//! with an error that the policy keeps from the guest, and nobody waits for them for ever.

use std::sync::Arc;

use bdev::testing::{Fault, FaultBdev};
use bdev::{IoError, Op};
use vhost_scsi::{ControllerOptions, ErrorPolicy, TargetOptions, WaitFor};

use crate::blk::*;
use crate::guest::*;
use crate::handover::taken_apart;
use crate::host::*;
use crate::inflight::{Region, go_on_of};

/// As libvirt's default: writes wait for room, reads for nothing.
pub fn room() -> TargetOptions {
    with(WaitFor::Room, WaitFor::Nothing)
}

fn with(write: WaitFor, read: WaitFor) -> TargetOptions {
    TargetOptions { error_policy: ErrorPolicy { write, read }, ..Default::default() }
}

/// A host whose disk is full, and the disk.
fn full() -> (Host, Arc<FaultBdev>) {
    let disk = FaultBdev::new("disk", 512, 8192);
    disk.inject(Fault::always(Op::Write, IoError::NoSpace));
    (host_with(&disk, room()), disk)
}

/// A guest with so many queues, and what its QEMU keeps of what is in flight, `if_tracked`.
pub fn guest_of(host: &Host, queues: usize, if_tracked: bool) -> (Guest, Option<Region>) {
    let mut guest = Guest::connect(&host.socket(), BLK);
    let region = if_tracked.then(|| Region::of(&mut guest, queues as u16));
    (0..queues).for_each(|queue| guest.start_queue(queue));
    (guest, region)
}

/// Submits a write of one sector.
pub fn put(guest: &mut Guest, queue: usize, sector: u64, byte: u8) -> Pending {
    let out = [&header(OUT, sector)[..], &[byte; 512]].concat();
    submit(guest, queue, &out, 0, usize::MAX)
}

pub fn is_suspended(host: &Host) -> bool {
    !host.controllers.suspended(Some("vm0")).unwrap().is_empty()
}

pub fn wait_until_suspended(host: &Host) {
    wait_until("requests wait", || is_suspended(host));
}

/// Waits until so many requests were taken in all.
pub fn wait_until_taken(host: &Host, requests: u64) {
    wait_until("all were taken", || host.stats().controller.requests >= requests);
}

/// All of `requests` end well, in whichever order.
pub fn all_end_well(guest: &mut Guest, requests: &[Pending]) {
    for _ in requests {
        let (head, written) = guest.used(requests[0].queue);
        let request = requests.iter().find(|r| r.head == head).expect("of these");
        assert_eq!(reply(guest, request, written).0, OK);
    }
}

/// Starts again the rings that stopped with these bases.
pub fn start_again(guest: &mut Guest, bases: &[u32]) {
    for (queue, base) in bases.iter().enumerate() {
        guest.describe_queue(queue, *base as u16, false);
    }
}

#[test]
fn writes_without_room_wait_and_go_on_in_their_order() {
    let (host, disk) = full();
    let (mut guest, _) = guest_of(&host, 1, false);
    let first = put(&mut guest, 0, 7, 1);
    wait_until_suspended(&host);
    // Behind it, whatever they are.
    let second = put(&mut guest, 0, 7, 2);
    let third = submit(&mut guest, 0, &header(IN, 7), 512, usize::MAX);
    wait_until_taken(&host, 3);
    let told = &host.controllers.suspended(None).unwrap()[0];
    assert_eq!((told.number, told.bdev_name.as_str()), (0, "disk"));
    assert_eq!(host.controllers.resume("vm0", None).unwrap(), 1);
    wait_until_suspended(&host);
    assert_eq!(guest.try_used(0), None, "there is no room yet");
    disk.clear_faults();
    host.controllers.resume("vm0", None).unwrap();
    for request in [first, second] {
        assert_eq!(finish(&mut guest, &request).0, OK);
    }
    assert_eq!(finish(&mut guest, &third), (OK, vec![2; 512]));
    assert!(!is_suspended(&host));
}

#[test]
fn errors_are_told_as_the_policy_says() {
    let (host, disk) = full();
    let (mut guest, _) = guest_of(&host, 1, false);
    disk.clear_faults();
    for (op, error) in [(Op::Read, IoError::ReadMedium), (Op::Write, IoError::WriteMedium)] {
        disk.inject(Fault::always(op, error));
    }
    assert_eq!(ask(&mut guest, OUT, 0, &[1; 512], 0).0, IOERR, "room is not what it wants");
    assert_eq!(ask(&mut guest, IN, 0, &[], 512).0, IOERR);
    assert!(!is_suspended(&host));
    drop((guest, host));

    let disk = FaultBdev::new("disk", 512, 8192);
    let host = host_with(&disk, with(WaitFor::Repair, WaitFor::Repair));
    let (mut guest, _) = guest_of(&host, 1, false);
    for (op, error, kind, data_in) in
        [(Op::Read, IoError::ReadMedium, IN, 512), (Op::WriteZeroes, IoError::NoSpace, 13, 0)]
    {
        disk.inject(Fault::always(op, error));
        let out = match kind {
            IN => header(IN, 3),
            _ => [header(kind, 0), segment(3, 1, 0)].concat(),
        };
        let request = submit(&mut guest, 0, &out, data_in, usize::MAX);
        wait_until_suspended(&host);
        disk.clear_faults();
        host.controllers.resume("vm0", None).unwrap();
        assert_eq!(finish(&mut guest, &request).0, OK, "{op:?}");
    }
    // What it was to make durable may be lost.
    disk.inject(Fault { count: 1, ..Fault::always(Op::Flush, IoError::Flush) });
    assert_eq!(ask(&mut guest, FLUSH, 0, &[], 0).0, IOERR);
}

#[test]
fn a_guest_that_is_paused_has_taken_again_what_waited() {
    for tracked in [true, false] {
        let (host, disk) = full();
        let (mut guest, region) = guest_of(&host, 2, tracked);
        let mut requests: Vec<_> = (1..=3).map(|n| put(&mut guest, 0, 7, n)).collect();
        let other = put(&mut guest, 1, 9, 9);
        wait_until_taken(&host, 4);
        wait_until_suspended(&host);
        let heads: Vec<u16> = requests.iter().map(|r| r.head).collect();
        for again in 0..3u8 {
            // All of them are behind the used index: on another host, too, they are taken again.
            let bases = [0, 1].map(|queue| guest.peer.base(queue));
            assert_eq!(bases, [0, 0]);
            assert_eq!((guest.try_used(0), guest.try_used(1)), (None, None));
            if let Some(region) = &region {
                assert_eq!((region.marked(0), region.marked(1)), (heads.clone(), vec![other.head]));
            }
            // Whoever paused it finds why.
            assert!(is_suspended(&host));
            assert!(!host.controllers.suspended(None).unwrap()[0].overtaken);
            start_again(&mut guest, &bases);
            if again < 2 {
                // Without room it waits again.
                wait_until("it waits again", || is_suspended(&host) && guest.try_used(0).is_none());
                wait_until_taken(&host, 4 * u64::from(again + 2));
            }
            if again == 1 {
                disk.clear_faults();
            }
        }
        requests.push(put(&mut guest, 0, 8, 8));
        all_end_well(&mut guest, &requests);
        all_end_well(&mut guest, &[other]);
        assert_eq!(disk.image()[7 * 512..8 * 512], [3; 512], "in their order");
        if let Some(region) = region {
            assert!(region.marked(0).is_empty());
        }
        assert_eq!(guest.peer.base(0), u32::from(guest.used_index(0)));
        assert_eq!(host.stats().controller.errors, 0);
    }
}

#[test]
fn a_guest_that_was_saved_or_migrated_has_taken_again_what_waited() {
    let (host, _) = full();
    let (mut guest, region) = guest_of(&host, 1, true);
    let requests: Vec<_> = (1..=3).map(|n| put(&mut guest, 0, 7, n)).collect();
    wait_until_taken(&host, 3);
    wait_until_suspended(&host);
    let base = guest.peer.base(0);
    guest.peer.shutdown();
    host.wait_until_free();
    drop(region);
    // Memory and base are all that comes along: the region is a new one.
    let disk = FaultBdev::new("disk", 512, 8192);
    let second = host_with(&disk, room());
    guest.reconnect(&second.socket());
    let region = Region::of(&mut guest, 1);
    guest.describe_queue(0, base as u16, false);
    all_end_well(&mut guest, &requests);
    assert!(region.marked(0).is_empty());
    assert_eq!(disk.image()[7 * 512..8 * 512], [3; 512]);
}

#[test]
fn a_change_of_memory_has_taken_again_what_waited() {
    for tracked in [true, false] {
        let (host, disk) = full();
        let (mut guest, _) = guest_of(&host, 1, tracked);
        let requests: Vec<_> = (1..=3).map(|n| put(&mut guest, 0, 7, n)).collect();
        wait_until_taken(&host, 3);
        wait_until_suspended(&host);
        guest.tell_memory();
        wait_until_taken(&host, 6);
        wait_until_suspended(&host);
        assert_eq!(guest.try_used(0), None);
        disk.clear_faults();
        host.controllers.resume("vm0", None).unwrap();
        all_end_well(&mut guest, &requests);
        assert_eq!(disk.image()[7 * 512..8 * 512], [3; 512], "in their order");
    }
}

#[test]
fn what_waited_when_the_target_died_waits_again_and_is_done_once_there_is_room() {
    let (first, _) = full();
    let (mut guest, region) = guest_of(&first, 1, true);
    let region = region.unwrap();
    let requests: Vec<_> = (1..=4).map(|n| put(&mut guest, 0, 7, n)).collect();
    wait_until_taken(&first, 4);
    wait_until_suspended(&first);
    guest.peer.shutdown();
    first.wait_until_free();
    assert!(!is_suspended(&first));
    assert_eq!(region.marked(0), requests.iter().map(|r| r.head).collect::<Vec<_>>());

    let (second, disk) = full();
    go_on_of(&mut guest, &region, &second, 1);
    wait_until_suspended(&second);
    disk.clear_faults();
    second.controllers.resume("vm0", None).unwrap();
    all_end_well(&mut guest, &requests);
    assert_eq!(disk.image()[7 * 512..8 * 512], [4; 512]);
}

#[test]
fn a_target_that_ends_in_order_leaves_what_waited_to_the_next() {
    for tracked in [true, false] {
        let (first, _) = full();
        let (mut guest, region) = guest_of(&first, 1, tracked);
        let requests: Vec<_> = (1..=3).map(|n| put(&mut guest, 0, 7, n)).collect();
        wait_until_taken(&first, 3);
        wait_until_suspended(&first);
        first.controllers.delete("vm0", true).unwrap();
        assert_eq!((guest.try_used(0), guest.used_index(0)), (None, 0));

        let disk = FaultBdev::new("disk", 512, 8192);
        let second = host_with(&disk, room());
        match region {
            Some(region) => go_on_of(&mut guest, &region, &second, 1),
            // As QEMU does after the target went: at the used index.
            None => {
                guest.reconnect(&second.socket());
                guest.describe_queue(0, 0, false);
            }
        }
        all_end_well(&mut guest, &requests);
        assert_eq!(disk.image()[7 * 512..8 * 512], [3; 512]);
    }
}

#[test]
fn a_peer_that_leaves_and_comes_again_finds_what_waited() {
    let (host, disk) = full();
    let (mut guest, _) = guest_of(&host, 1, false);
    let requests: Vec<_> = (1..=3).map(|n| put(&mut guest, 0, 7, n)).collect();
    wait_until_taken(&host, 3);
    wait_until_suspended(&host);
    guest.peer.shutdown();
    host.wait_until_free();
    disk.clear_faults();
    guest.reconnect(&host.socket());
    guest.describe_queue(0, 0, false);
    all_end_well(&mut guest, &requests);
}

#[test]
fn another_process_goes_on_with_what_waited() {
    for tracked in [true, false] {
        let (host, disk) = full();
        let (mut guest, _region) = guest_of(&host, 2, tracked);
        let requests: Vec<_> = (1..=3).map(|n| put(&mut guest, 0, 7, n)).collect();
        wait_until_taken(&host, 3);
        wait_until_suspended(&host);
        // One that is not handed over after all goes on here.
        host.controllers.hold(std::time::Duration::from_secs(20)).unwrap();
        host.controllers.release();
        wait_until_suspended(&host);
        for _ in 0..2 {
            let controllers = taken_apart(&host);
            assert_eq!(guest.try_used(0), None);
            host.controllers.inherit(controllers).unwrap();
            host.controllers.expect_blk("vm0", ControllerOptions::default()).unwrap();
            create(&host, room()).unwrap();
            host.controllers.take_over().unwrap();
            host.controllers.release();
            wait_until_suspended(&host);
        }
        disk.clear_faults();
        host.controllers.resume("vm0", None).unwrap();
        all_end_well(&mut guest, &requests);
        assert_eq!(disk.image()[7 * 512..8 * 512], [3; 512], "in their order");
    }
}

#[test]
fn a_disk_that_goes_ends_what_waits() {
    let (host, _) = full();
    let (mut guest, _) = guest_of(&host, 1, true);
    let request = put(&mut guest, 0, 7, 1);
    wait_until_suspended(&host);
    host.registry.unregister("disk").unwrap();
    assert_eq!(finish(&mut guest, &request).0, IOERR);
    assert!(!is_suspended(&host));
}

#[test]
fn a_driver_that_starts_afresh_has_nothing_of_what_waited() {
    let (host, disk) = full();
    let (mut guest, region) = guest_of(&host, 1, true);
    put(&mut guest, 0, 7, 1);
    wait_until_suspended(&host);
    // As QEMU does when the device is reset: the rings stop, and it asks for another region.
    guest.peer.base(0);
    drop(region);
    let region = Region::of(&mut guest, 1);
    guest.start_queue(0);
    disk.clear_faults();
    write(&mut guest, 3, &[5; 512]);
    assert_eq!(disk.image()[7 * 512..8 * 512], [0; 512]);
    assert!(region.marked(0).is_empty());
}

#[test]
fn what_waits_goes_on_with_another_bdev_in_the_place_of_its_own() {
    let (host, full) = full();
    let (mut guest, _) = guest_of(&host, 1, true);
    let requests: Vec<_> = (1..=3).map(|n| put(&mut guest, 0, 7, n)).collect();
    wait_until_taken(&host, 3);
    wait_until_suspended(&host);
    let roomy = FaultBdev::new("roomy", 512, 8192);
    host.registry.register(roomy.clone()).unwrap();
    let on = host.shown();
    host.controllers.replace("vm0", 0, &on, roomy.clone(), None, Box::new(|| Ok(()))).unwrap();
    host.controllers.resume("vm0", None).unwrap();
    all_end_well(&mut guest, &requests);
    assert_eq!(roomy.image()[7 * 512..8 * 512], [3; 512]);
    assert_eq!(full.image()[7 * 512..8 * 512], [0; 512]);
}
