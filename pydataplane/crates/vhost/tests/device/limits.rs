//! Requests that wait because their volume does as much as it may. Nobody else waits with them, and
//! whatever has to wait for them does not.

use std::sync::Arc;
use std::time::{Duration, Instant};

use bdev::testing::FaultBdev;
use bdev::{Rate, RateLimits};
use vhost_scsi::TargetOptions;

use crate::blk::{self, finish, host_with};
use crate::blk_suspended::{guest_of, put, wait_until_taken};
use crate::guest::*;
use crate::host::*;
use crate::peer::*;

/// More than any test takes.
const LONG: Duration = Duration::from_secs(200);

/// After an I/O of a sector the next one waits for 512 s.
fn limit(host: &Host, name: &str) {
    let mut to = RateLimits { operation_bytes: 1, ..RateLimits::default() };
    to.operations[0] = Rate { average: 1, ..Rate::default() };
    host.registry.limits(name).set(to).unwrap();
}

fn unlimit(host: &Host, name: &str) {
    host.registry.limits(name).set(RateLimits::default()).unwrap();
}

/// A host with two disks, of which the first is limited, and a guest.
fn limited() -> (Host, Guest) {
    let host = Host::with_disk(1);
    host.malloc("disk1");
    host.add(1, "disk1");
    limit(&host, "disk0");
    let mut guest = Guest::start(&host.socket(), LINUX, 2);
    (0..2).for_each(|target| guest.ready(target));
    (host, guest)
}

/// A READ of a sector of target 0.
fn read(guest: &mut Guest, queue: usize, id: u64) -> Request {
    guest.submit(queue, flat(0), id, &rw10(0x28, 0, 1), &[], 512)
}

#[test]
fn no_other_disk_waits_and_a_limit_that_is_taken_away_lets_all_go() {
    let (host, mut guest) = limited();
    assert_eq!(guest.read_blocks(0, 0, 1).status, 0);
    let waiting: Vec<_> = (1..5).map(|id| read(&mut guest, 2, id)).collect();
    for lba in 0..20 {
        assert_eq!(guest.read_blocks(1, lba, 1).status, 0);
    }
    assert_eq!(guest.try_used(2), None);
    unlimit(&host, "disk0");
    for request in &waiting {
        assert_eq!(guest.finish(request).status, 0);
    }
    // And is not forgotten: what counts is what it is now.
    limit(&host, "disk0");
    assert_eq!(guest.read_blocks(0, 0, 1).status, 0);
    let last = read(&mut guest, 2, 9);
    assert_eq!(guest.read_blocks(1, 0, 1).status, 0);
    unlimit(&host, "disk0");
    assert_eq!(guest.finish(&last).status, 0);
}

#[test]
fn what_waits_is_aborted_at_once() {
    let (host, mut guest) = limited();
    assert_eq!(guest.read_blocks(0, 0, 1).status, 0);
    let before = host.stats().controller.requests;
    let waiting = read(&mut guest, 2, 77);
    // What was not taken yet is not there to be aborted.
    wait_until_taken(&host, before + 1);
    /// ABORT TASK (virtio 1.2 5.6.6.2).
    const ABORT_TASK: u32 = 0;
    let began = Instant::now();
    let answer = guest.control(&tmf(ABORT_TASK, flat(0), 77), 1);
    assert_eq!(answer, [0], "FUNCTION COMPLETE");
    /// VIRTIO_SCSI_S_ABORTED.
    const ABORTED: u8 = 2;
    assert_eq!(guest.finish(&waiting).response, ABORTED);
    assert!(began.elapsed() < LONG);
}

#[test]
fn a_queue_that_stops_does_not_wait_for_limits() {
    let (host, mut guest) = limited();
    assert_eq!(guest.read_blocks(0, 0, 1).status, 0);
    let before = host.stats().controller.requests;
    let waiting: Vec<_> = (1..5).map(|id| read(&mut guest, 2, id)).collect();
    // What was not taken yet stays in the ring.
    wait_until_taken(&host, before + 4);
    let began = Instant::now();
    guest.peer.send(GET_VRING_BASE, &words(&[2, 0]), &[]);
    guest.peer.reply(GET_VRING_BASE).unwrap();
    assert!(began.elapsed() < LONG);
    let mut left = waiting;
    while !left.is_empty() {
        let (head, written) = guest.used(2);
        let nth = left.iter().position(|request| request.head == head).expect("once for each");
        let status = guest.reply(&left.swap_remove(nth), written).status;
        assert!(matches!(status, 0 | 8), "GOOD or BUSY, not {status}");
    }
}

#[test]
fn the_queue_of_a_virtio_blk_disk_stops_when_all_that_waits_is_done() {
    let disk = FaultBdev::new("disk", 512, 8192);
    let host = host_with(&disk, TargetOptions::default());
    limit(&host, "disk");
    let (mut guest, _) = guest_of(&host, 1, false);
    let requests: Vec<_> = (1..=5).map(|n| put(&mut guest, 0, u64::from(n), n)).collect();
    wait_until_taken(&host, 5);
    assert_eq!(finish(&mut guest, &requests[0]).0, blk::OK);
    assert_eq!(guest.try_used(0), None);
    let began = Instant::now();
    guest.peer.send(GET_VRING_BASE, &words(&[0, 0]), &[]);
    guest.peer.reply(GET_VRING_BASE).unwrap();
    assert!(began.elapsed() < LONG);
    for request in &requests[1..] {
        assert_eq!(finish(&mut guest, request).0, blk::OK);
    }
}

#[test]
fn a_disk_that_is_taken_away_does_not_wait_for_its_limits() {
    let (host, mut guest) = limited();
    assert_eq!(guest.read_blocks(0, 0, 1).status, 0);
    let waiting: Vec<_> = (1..5).map(|id| read(&mut guest, 2, id)).collect();
    assert_eq!(guest.read_blocks(1, 0, 1).status, 0);
    let began = Instant::now();
    host.controllers.remove_target("vm0", 0).unwrap();
    assert!(began.elapsed() < LONG);
    for request in &waiting {
        assert_eq!(guest.finish(request).status, 0);
    }
}

#[test]
fn the_memory_changes_while_requests_wait() {
    let (host, mut guest) = limited();
    assert_eq!(guest.read_blocks(0, 0, 1).status, 0);
    let waiting = read(&mut guest, 2, 1);
    assert_eq!(guest.read_blocks(1, 0, 1).status, 0);
    let began = Instant::now();
    guest.tell_memory();
    assert_eq!(guest.finish(&waiting).status, 0);
    assert!(began.elapsed() < LONG);
    // It waits for its limit again.
    let waiting = read(&mut guest, 2, 1);
    assert_eq!(guest.read_blocks(1, 0, 1).status, 0);
    assert_eq!(guest.try_used(2), None);
    unlimit(&host, "disk0");
    assert_eq!(guest.finish(&waiting).status, 0);
}

#[test]
fn a_target_that_goes_on_with_another_volume_has_its_limits() {
    let (host, mut guest) = limited();
    host.malloc("disk2");
    let claim = host.registry.claim("disk2", "target 0 of controller vm0").unwrap();
    let mut options = TargetOptions::default();
    options.characteristics.uuid = Some(host.registry.get("disk0").unwrap().uuid());
    let bdev = Arc::clone(claim.bdev());
    let volume = Some((claim, options));
    host.controllers.replace("vm0", 0, &host.shown(), bdev, volume, Box::new(|| Ok(()))).unwrap();
    for lba in 0..20 {
        assert_eq!(guest.read_blocks(0, lba, 1).status, 0);
    }
    limit(&host, "disk2");
    assert_eq!(guest.read_blocks(0, 0, 1).status, 0);
    let waiting = read(&mut guest, 2, 1);
    assert_eq!(guest.read_blocks(1, 0, 1).status, 0);
    assert_eq!(guest.try_used(2), None);
    unlimit(&host, "disk2");
    assert_eq!(guest.finish(&waiting).status, 0);
}
