//! Requests of a virtio-blk driver that are several I/Os, the next one of which a disk does not take for now.

use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use bdev::Op;
use bdev::testing::FaultBdev;

use crate::blk::*;
use crate::blk_full::{Queue, crowded_with};
use crate::blk_suspended::*;
use crate::guest::*;
use crate::host::*;
use crate::inflight::Region;
use crate::moving::{carried_out, places};

/// A request of four I/Os.
fn discard(guest: &mut Guest, sector: u64) -> Pending {
    let out = [header(DISCARD, 0), segment(sector, 4096, 0)].concat();
    submit(guest, 0, &out, 0, usize::MAX)
}

fn steps(sector: u64) -> [(Op, u64); 4] {
    [0, 1024, 2048, 3072].map(|at| (Op::Unmap, sector + at))
}

#[test]
fn each_io_of_a_request_is_done_once_however_often_the_queue_is_full() {
    for deferred in [None, Some(3)] {
        let disk = FaultBdev::new("disk", 512, 8192);
        disk.defer(deferred);
        let (host, queue) = crowded_with(1, disk.clone());
        let mut guest = start(&host, BLK, 1);
        queue.is_tight.store(true, Ordering::Release);
        let requests =
            [discard(&mut guest, 0), discard(&mut guest, 4096), put(&mut guest, 0, 8000, 1)];
        all_end_well(&mut guest, &requests);
        let mut taken = queue.taken.lock().unwrap().clone();
        taken.sort_unstable_by_key(|(_, lba)| *lba);
        let mut expected = [steps(0), steps(4096)].concat();
        expected.push((Op::Write, 8000));
        assert_eq!(taken, expected);
        assert_eq!(host.stats().controller.errors, 0);
    }
}

/// A guest with a request of four I/Os one of which is done, and one that was taken later and is answered.
fn half_done(tracked: bool) -> (Host, Arc<Queue>, Guest, Option<Region>, Pending) {
    let disk = FaultBdev::new("disk", 512, 8192);
    disk.defer(Some(3));
    let (host, queue) = crowded_with(1, disk.clone());
    let (mut guest, region) = guest_of(&host, 1, tracked);
    disk.hold();
    let first = discard(&mut guest, 0);
    let second = put(&mut guest, 0, 8000, 1);
    wait_until("both are with the disk", || disk.held() == 2);
    queue.fill();
    disk.release();
    assert_eq!(finish(&mut guest, &second).0, OK);
    queue.wait_until_asked_again();
    (host, queue, guest, region, first)
}

#[test]
fn what_is_half_done_goes_on_or_is_left_in_the_region_when_its_ring_stops() {
    let (host, queue, mut guest, _, first) = half_done(false);
    queue.empty();
    all_end_well(&mut guest, &[first]);
    assert_eq!(queue.taken.lock().unwrap().iter().filter(|(op, _)| *op == Op::Unmap).count(), 4);
    drop((guest, host));

    let (host, queue, mut guest, region, first) = half_done(true);
    assert_eq!(guest.peer.base(0), 2);
    assert_eq!((guest.try_used(0), region.unwrap().marked(0)), (None, vec![first.head]));
    queue.empty();
    start_again(&mut guest, &[2]);
    all_end_well(&mut guest, &[first]);
    assert_eq!(host.stats().controller.errors, 0);
    drop((guest, host));

    // Without a region nobody could know of it.
    let (host, _, mut guest, _, first) = half_done(false);
    assert_eq!(guest.peer.base(0), 2);
    assert_eq!(finish(&mut guest, &first).0, IOERR);
    assert_eq!(host.stats().controller.errors, 1);
}

/// Nobody could know of it without a region.
#[test]
fn what_is_half_done_and_was_overtaken_is_done_if_its_ring_stops_while_there_is_no_room_for_a_moment()
 {
    let disk = FaultBdev::new("disk", 512, 8192);
    disk.defer(Some(3));
    let (host, queue) = crowded_with(1, disk.clone());
    let mut guest = start(&host, BLK, 1);
    disk.hold();
    let requests = [discard(&mut guest, 0), put(&mut guest, 0, 8000, 1)];
    wait_until("both are with the disk", || disk.held() == 2);
    let ends = std::thread::spawn(move || {
        // While it stops.
        std::thread::sleep(Duration::from_millis(50));
        queue.refuses.store(4, Ordering::Release);
        disk.release();
    });
    assert_eq!(guest.peer.base(0), 2);
    ends.join().unwrap();
    all_end_well(&mut guest, &requests);
    assert_eq!(host.stats().controller.errors, 0);
}

/// However seldom it was asked before that, as it had been full for long.
#[test]
fn what_was_overtaken_is_done_if_its_ring_stops_when_a_device_that_was_full_for_long_is_about_to_have_room()
 {
    let (host, queue, mut guest, _, first) = half_done(false);
    queue.wait_until_seldom_asked();
    queue.refuses.store(3, Ordering::Release);
    queue.empty();
    assert_eq!(guest.peer.base(0), 2);
    all_end_well(&mut guest, &[first]);
    assert_eq!(host.stats().controller.errors, 0);
}

/// Its guest does not wait for it until the move is given up.
#[test]
fn a_queue_moves_whose_request_has_no_room_for_its_next_io_meanwhile() {
    let disk = FaultBdev::new("disk", 512, 8192);
    disk.defer(Some(3));
    let (host, queue) = crowded_with(2, disk.clone());
    let mut guest = start(&host, BLK, 1);
    disk.hold();
    let request = discard(&mut guest, 0);
    wait_until("it is with the disk", || disk.held() == 1);
    queue.fill();
    let to = 1 - places(&host)[0].1;
    let releases = disk.clone();
    let ends = std::thread::spawn(move || {
        // While it is to move.
        std::thread::sleep(Duration::from_millis(50));
        releases.release();
    });
    host.controllers.move_queue("vm0", 0, to);
    carried_out(&host);
    ends.join().unwrap();
    assert_eq!(places(&host), [(0, to)], "at the first try");
    queue.empty();
    all_end_well(&mut guest, &[request]);
    assert_eq!(host.stats().controller.errors, 0);
}
