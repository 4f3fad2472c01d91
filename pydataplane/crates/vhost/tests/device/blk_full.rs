//! Requests of a virtio-blk driver, which has no status for "later", that a disk does not take for now as others
//! have all of its queue: they wait, and nobody waits for them.

use std::sync::Arc;
use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::Duration;

use bdev::testing::{Fault, FaultBdev, Wrap, Wrapped};
use bdev::{Bdev, Features, Io, IoError, Op, Submit};
use vhost_scsi::ControllerOptions;

use crate::blk::*;
use crate::blk_suspended::*;
use crate::guest::*;
use crate::handover::taken_apart;
use crate::host::*;
use crate::inflight::{Region, go_on_of};
use crate::moving::{moves, places};

/// A virtio-blk controller `vm0` whose disk that is.
fn host_of(reactors: usize, disk: Arc<dyn Bdev>) -> Host {
    let host = Host::new(reactors);
    host.controllers.delete("vm0", false).unwrap();
    host.registry.register(disk).unwrap();
    create(&host, room()).unwrap();
    host
}

/// Times that requests waited as others had all of the disk's queue.
fn full_waits(host: &Host) -> u64 {
    host.stats().targets[0].2.full_waits
}

#[test]
fn what_a_full_device_does_not_take_waits_and_is_done() {
    const REQUESTS: usize = 120;
    let disk = FaultBdev::new("disk", 512, 8192);
    disk.defer(Some(7));
    let host = host_of(2, Arc::new(Narrow(disk.clone())));
    let mut guest = start(&host, BLK, 2);
    disk.hold();
    let mut waiting = std::collections::HashMap::new();
    for n in 0..2 * REQUESTS {
        let request = put(&mut guest, n % 2, n as u64, n as u8);
        waiting.insert((n % 2, request.head), request);
    }
    wait_until("the device is full on both reactors", || disk.held() == 8);
    disk.release();
    while !waiting.is_empty() {
        for queue in 0..2 {
            let Some((head, written)) = guest.try_used(queue) else { continue };
            let request = waiting.remove(&(queue, head)).expect("once");
            assert_eq!(reply(&mut guest, &request, written).0, OK);
        }
    }
    let image = disk.image();
    for n in 0..2 * REQUESTS {
        assert_eq!(image[n * 512..(n + 1) * 512], [n as u8; 512], "request {n}");
    }
    assert_eq!(host.stats().controller.errors, 0);
    assert_eq!(full_waits(&host), 0, "all of the queue is its own");
}

/// The queue of a disk that others fill, as while its connection is lost.
#[derive(Default)]
pub struct Queue {
    is_full: AtomicBool,
    /// So many I/Os from now on it does not take.
    pub refuses: AtomicU64,
    /// It takes every second I/O.
    pub is_tight: AtomicBool,
    asked: AtomicU64,
    pub taken: Mutex<Vec<(Op, u64)>>,
}

impl Queue {
    pub fn fill(&self) {
        self.is_full.store(true, Ordering::Release);
    }

    pub fn empty(&self) {
        self.is_full.store(false, Ordering::Release);
    }

    /// Waits until it was asked in vain more than once.
    pub fn wait_until_asked_again(&self) {
        let asked = self.asked.load(Ordering::Acquire);
        wait_until("it is asked again", || self.asked.load(Ordering::Acquire) >= asked + 3);
    }

    /// Waits until it was asked in vain so often that the pauses have grown as long as they get.
    pub fn wait_until_seldom_asked(&self) {
        (0..4).for_each(|_| self.wait_until_asked_again());
    }
}

struct Crowded(Arc<Queue>);

impl Wrap for Crowded {
    fn features(&self, of: Features) -> Features {
        Features { max_blocks: 1024, ..of }
    }

    fn instead(&self, io: &Io) -> Option<Submit> {
        let nth = self.0.asked.fetch_add(1, Ordering::AcqRel);
        let tight = self.0.is_tight.load(Ordering::Acquire) && nth.is_multiple_of(2);
        let less = |left: u64| left.checked_sub(1);
        let refused =
            self.0.refuses.fetch_update(Ordering::AcqRel, Ordering::Acquire, less).is_ok();
        if self.0.is_full.load(Ordering::Acquire) || tight || refused {
            return Some(Submit::Full);
        }
        self.0.taken.lock().unwrap().push((io.op, io.lba));
        None
    }
}

/// A host with `disk`, whose queue others fill; each of its I/Os is of no more than 1024 blocks.
pub fn crowded_with(reactors: usize, disk: Arc<dyn Bdev>) -> (Host, Arc<Queue>) {
    let queue = Arc::<Queue>::default();
    (host_of(reactors, Wrapped::new(disk, Crowded(Arc::clone(&queue)))), queue)
}

fn crowded(reactors: usize) -> (Host, Arc<FaultBdev>, Arc<Queue>) {
    let disk = FaultBdev::new("disk", 512, 8192);
    let (host, queue) = crowded_with(reactors, disk.clone());
    (host, disk, queue)
}

#[test]
fn a_device_whose_queue_others_have_is_asked_again_though_nothing_ends() {
    let (host, disk, queue) = crowded(1);
    let mut guest = start(&host, BLK, 2);
    for round in 1..=3u8 {
        queue.fill();
        let mut requests = Vec::new();
        for n in 0..6u8 {
            requests.push(put(&mut guest, usize::from(n % 2), 7, 6 * round + n));
            // Two queues have no order among them but that in which their requests were taken.
            wait_until_taken(&host, 6 * (u64::from(round) - 1) + u64::from(n) + 1);
        }
        queue.wait_until_asked_again();
        assert!((0..2).all(|queue| guest.try_used(queue).is_none()));
        queue.empty();
        for request in &requests {
            assert_eq!(finish(&mut guest, request).0, OK, "in their order");
        }
        assert_eq!(disk.image()[7 * 512..8 * 512], [6 * round + 5; 512]);
        assert_eq!(full_waits(&host), u64::from(round), "however often it was asked");
    }
    assert_eq!(host.stats().controller.errors, 0);
}

/// A guest three of whose writes to sector 7 wait, for as long as the queue is full.
struct Waiting {
    guest: Guest,
    region: Option<Region>,
    requests: Vec<Pending>,
}

impl Waiting {
    fn new(host: &Host, queue: &Queue, tracked: bool) -> Waiting {
        let (mut guest, region) = guest_of(host, 1, tracked);
        queue.fill();
        let requests: Vec<_> = (1..=3).map(|n| put(&mut guest, 0, 7, n)).collect();
        wait_until_taken(host, 3);
        queue.wait_until_asked_again();
        Waiting { guest, region, requests }
    }

    /// None was answered, and all are marked.
    fn are_left(&mut self) {
        assert_eq!((self.guest.try_used(0), self.guest.used_index(0)), (None, 0));
        if let Some(region) = &self.region {
            let heads: Vec<u16> = self.requests.iter().map(|r| r.head).collect();
            assert_eq!(region.marked(0), heads);
        }
    }

    /// They go on in the next session.
    fn connects(&mut self, host: &Host) {
        match &self.region {
            Some(region) => go_on_of(&mut self.guest, region, host, 1),
            // As QEMU does after the target went: at the used index.
            None => {
                self.guest.reconnect(&host.socket());
                self.guest.describe_queue(0, 0, false);
            }
        }
    }

    /// There is room: all are done, in their order.
    fn end_well(&mut self, host: &Host, disk: &FaultBdev, queue: &Queue) {
        queue.empty();
        all_end_well(&mut self.guest, &self.requests);
        assert_eq!(disk.image()[7 * 512..8 * 512], [3; 512]);
        assert_eq!(host.stats().controller.errors, 0);
        if let Some(region) = &self.region {
            assert!(region.marked(0).is_empty());
        }
        assert_eq!(self.guest.peer.base(0), 3);
    }
}

#[test]
fn a_ring_stops_while_a_queue_stays_full() {
    for tracked in [true, false] {
        let (host, disk, queue) = crowded(2);
        let mut waiting = Waiting::new(&host, &queue, tracked);
        for again in 1..=2 {
            // On another host, too, they are taken again.
            assert_eq!(waiting.guest.peer.base(0), 0);
            waiting.are_left();
            start_again(&mut waiting.guest, &[0]);
            wait_until_taken(&host, 3 * (again + 1));
            queue.wait_until_asked_again();
        }
        assert!(!is_suspended(&host), "nobody is told that it waits for anything");
        waiting.end_well(&host, &disk, &queue);
    }
}

#[test]
fn memory_changes_while_a_queue_stays_full() {
    for tracked in [true, false] {
        let (host, disk, queue) = crowded(2);
        let mut waiting = Waiting::new(&host, &queue, tracked);
        waiting.guest.tell_memory();
        wait_until_taken(&host, 6);
        waiting.are_left();
        waiting.end_well(&host, &disk, &queue);
    }
}

#[test]
fn a_peer_leaves_and_comes_again_while_a_queue_stays_full() {
    for tracked in [true, false] {
        let (host, disk, queue) = crowded(2);
        let mut waiting = Waiting::new(&host, &queue, tracked);
        waiting.guest.peer.shutdown();
        host.wait_until_free();
        waiting.are_left();
        waiting.connects(&host);
        wait_until_taken(&host, 6);
        queue.wait_until_asked_again();
        waiting.end_well(&host, &disk, &queue);
    }
}

#[test]
fn a_controller_ends_while_a_queue_stays_full() {
    for tracked in [true, false] {
        let (first, _, queue) = crowded(2);
        let mut waiting = Waiting::new(&first, &queue, tracked);
        first.controllers.delete("vm0", true).unwrap();
        waiting.are_left();
        let (second, disk, queue) = crowded(2);
        waiting.connects(&second);
        waiting.end_well(&second, &disk, &queue);
    }
}

#[test]
fn another_process_goes_on_while_a_queue_stays_full() {
    for tracked in [true, false] {
        let (host, disk, queue) = crowded(2);
        let mut waiting = Waiting::new(&host, &queue, tracked);
        // One that is not handed over after all goes on here.
        host.controllers.hold(Duration::from_secs(20)).unwrap();
        host.controllers.release();
        queue.wait_until_asked_again();
        for _ in 0..2 {
            let controllers = taken_apart(&host);
            waiting.are_left();
            host.controllers.inherit(controllers).unwrap();
            host.controllers.expect_blk("vm0", ControllerOptions::default()).unwrap();
            create(&host, room()).unwrap();
            host.controllers.take_over().unwrap();
            host.controllers.release();
            queue.wait_until_asked_again();
        }
        waiting.end_well(&host, &disk, &queue);
    }
}

#[test]
fn a_queue_moves_while_the_disks_stays_full() {
    let (host, disk, queue) = crowded(2);
    let mut waiting = Waiting::new(&host, &queue, true);
    let to = 1 - places(&host)[0].1;
    moves(&host, 0, to);
    queue.wait_until_asked_again();
    waiting.are_left();
    waiting.end_well(&host, &disk, &queue);
}

#[test]
fn another_bdev_takes_what_waits_for_a_full_one() {
    let (host, disk, queue) = crowded(1);
    let mut waiting = Waiting::new(&host, &queue, true);
    let roomy = FaultBdev::new("roomy", 512, 8192);
    host.registry.register(roomy.clone()).unwrap();
    let on = host.shown();
    host.controllers.replace("vm0", 0, &on, roomy.clone(), None, Box::new(|| Ok(()))).unwrap();
    all_end_well(&mut waiting.guest, &waiting.requests);
    assert_eq!(roomy.image()[7 * 512..8 * 512], [3; 512]);
    assert_eq!(disk.image()[7 * 512..8 * 512], [0; 512]);
}

#[test]
fn a_disk_that_goes_ends_what_waits_for_it() {
    let (host, _, queue) = crowded(2);
    let mut waiting = Waiting::new(&host, &queue, true);
    host.registry.unregister("disk").unwrap();
    for request in &waiting.requests {
        assert_eq!(finish(&mut waiting.guest, request).0, IOERR);
    }
}

#[test]
fn a_driver_that_starts_afresh_has_nothing_of_what_waited_for_a_queue() {
    let (host, disk, queue) = crowded(2);
    let mut waiting = Waiting::new(&host, &queue, true);
    // As QEMU does when the device is reset: the rings stop, and it asks for another region.
    waiting.guest.peer.base(0);
    waiting.region = None;
    let region = Region::of(&mut waiting.guest, 1);
    waiting.guest.start_queue(0);
    queue.empty();
    let request = put(&mut waiting.guest, 0, 3, 5);
    assert_eq!(finish(&mut waiting.guest, &request).0, OK);
    assert_eq!(disk.image()[7 * 512..8 * 512], [0; 512]);
    assert!(region.marked(0).is_empty());
}

/// What waits behind others of a ring that goes on does not keep the one that stops waiting, when these are
/// refused again or fail.
#[test]
fn a_ring_stops_while_others_of_its_disk_wait_or_are_suspended() {
    for fails in [false, true] {
        let disk = FaultBdev::new("disk", 512, 8192);
        disk.defer(Some(1));
        let (host, queue) = crowded_with(1, disk.clone());
        let mut guest = start(&host, BLK, 2);
        disk.hold();
        let mut others = vec![put(&mut guest, 1, 1, 1)];
        wait_until("it is with the disk", || disk.held() == 1);
        queue.fill();
        others.push(put(&mut guest, 1, 2, 2));
        wait_until_taken(&host, 2);
        let stopped = put(&mut guest, 0, 3, 3);
        wait_until_taken(&host, 3);
        if fails {
            disk.inject(Fault::always(Op::Write, IoError::NoSpace));
        }
        let releases = disk.clone();
        let ends = std::thread::spawn(move || {
            // While it stops.
            std::thread::sleep(Duration::from_millis(50));
            releases.release();
        });
        assert_eq!(guest.peer.base(0), 0);
        ends.join().unwrap();
        assert_eq!(guest.try_used(0), None);
        if fails {
            wait_until_suspended(&host);
        }
        disk.clear_faults();
        queue.empty();
        host.controllers.resume("vm0", None).unwrap();
        all_end_well(&mut guest, &others);
        start_again(&mut guest, &[0]);
        all_end_well(&mut guest, &[stopped]);
    }
}
