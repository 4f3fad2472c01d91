//! In-flight regions: what a back end that dies leaves is done by the next one, once and in order.

use std::os::fd::{AsFd, OwnedFd};
use std::time::Duration;

use guestmem::{GuestMemory, RegionSpec};
use rustix::fs::{MemfdFlags, SealFlags, fcntl_get_seals, fstat, ftruncate, memfd_create};
use uuid::Uuid;
use vhost_scsi::Timeouts;

use crate::copying::extended_copy;
use crate::guest::*;
use crate::handover::move_on;
use crate::host::*;
use crate::peer::*;

/// Queues of every guest here: control, event, two request queues.
const QUEUES: u16 = 4;
/// Bytes of a queue's part: 16 and 16 a descriptor, to a multiple of 64.
const PART: u64 = (16 + 16 * SIZE as u64).next_multiple_of(64);

/// The body of GET_INFLIGHT_FD and SET_INFLIGHT_FD, as C lays it out.
fn message(bytes: u64, offset: u64, queues: u16, size: u16) -> Vec<u8> {
    let mut body = longs(&[bytes, offset]);
    body.extend(queues.to_le_bytes());
    body.extend(size.to_le_bytes());
    body.extend([0; 4]);
    body
}

/// The region of a guest, as its QEMU keeps it.
pub struct Region {
    fd: OwnedFd,
    bytes: Vec<u8>,
    memory: GuestMemory,
}

impl Region {
    /// Asks for a region, and gives it back to be used.
    fn new(guest: &mut Guest) -> Region {
        Region::of(guest, QUEUES)
    }

    /// As `new`, for so many queues.
    pub fn of(guest: &mut Guest, queues: u16) -> Region {
        let body = message(0, 0, queues, SIZE);
        guest.peer.send(GET_INFLIGHT_FD, &body, &[]);
        let (bytes, fd) = guest.peer.reply_with_fd(GET_INFLIGHT_FD).expect("a reply");
        let fd = fd.expect("a file");
        let len = u64::from_le_bytes(bytes[..8].try_into().unwrap());
        let spec = RegionSpec { guest_addr: 0, size: len, user_addr: 0, mmap_offset: 0 };
        let memory = GuestMemory::map(vec![(spec, fd.try_clone().unwrap())]).unwrap();
        let region = Region { fd, bytes, memory };
        region.give(guest);
        region
    }

    fn give(&self, guest: &mut Guest) {
        guest.peer.ask(SET_INFLIGHT_FD, &self.bytes, &[self.fd.as_fd()]);
    }

    fn field(&self, queue: usize, at: u64) -> u16 {
        self.memory.range(PART * queue as u64 + at, 2).unwrap().get(0).unwrap()
    }

    pub fn put(&self, queue: usize, at: u64, value: u16) {
        self.memory.range(PART * queue as u64 + at, 2).unwrap().put(0, value).unwrap();
    }

    /// Marks a head as in flight.
    pub fn mark(&self, queue: usize, head: u16) {
        self.put(queue, 16 + 16 * u64::from(head), 1);
    }

    /// Marks a head that is in flight as one that cannot be done a second time.
    pub fn mark_unrepeatable(&self, queue: usize, head: u16) {
        let range = self.memory.range(PART * queue as u64 + 16 + 16 * u64::from(head), 16).unwrap();
        range.put(2, range.get::<u64>(8).unwrap() as u32).unwrap();
        range.put(1, 1u8).unwrap();
    }

    /// Whether a head is marked as one that cannot be done a second time.
    pub fn is_unrepeatable(&self, queue: usize, head: u16) -> bool {
        let at = PART * queue as u64 + 16 + 16 * u64::from(head) + 1;
        self.memory.range(at, 1).unwrap().get::<u8>(0).unwrap() == 1
    }

    /// Heads marked as in flight, in the order of their counters.
    pub fn marked(&self, queue: usize) -> Vec<u16> {
        let state = |head: u16| {
            let at = PART * queue as u64 + 16 + 16 * u64::from(head);
            let range = self.memory.range(at, 16).unwrap();
            (range.get::<u8>(0).unwrap(), range.get::<u64>(8).unwrap())
        };
        let mut heads: Vec<_> =
            (0..SIZE).filter(|h| state(*h).0 == 1).map(|h| (state(h).1, h)).collect();
        heads.sort_unstable();
        heads.into_iter().map(|(_, head)| head).collect()
    }
}

/// A guest with two request queues that tracks what is in flight.
pub fn tracked(host: &Host) -> (Guest, Region) {
    tracked_of(host, QUEUES)
}

/// A guest with so many queues in all that tracks what is in flight.
pub fn tracked_of(host: &Host, queues: u16) -> (Guest, Region) {
    let mut guest = Guest::connect(&host.socket(), LINUX);
    let region = Region::of(&mut guest, queues);
    (0..usize::from(queues)).for_each(|queue| guest.start_queue(queue));
    (guest, region)
}

/// The guest's QEMU connects to another back end: all queues go on where the used rings stand.
pub fn go_on(guest: &mut Guest, region: &Region, host: &Host) {
    go_on_of(guest, region, host, QUEUES);
}

/// The same, with so many queues in all.
pub fn go_on_of(guest: &mut Guest, region: &Region, host: &Host, queues: u16) {
    guest.reconnect(&host.socket());
    region.give(guest);
    for queue in 0..usize::from(queues) {
        let base = guest.used_index(queue);
        guest.describe_queue(queue, base, false);
    }
}

#[test]
fn a_region_is_a_sealed_file_of_zeros_for_all_queues() {
    let host = Host::with_disk(1);
    let mut guest = Guest::connect(&host.socket(), LINUX);
    let region = Region::new(&mut guest);
    let word = |at: usize| u64::from_le_bytes(region.bytes[at..at + 8].try_into().unwrap());
    assert_eq!((word(0), word(8)), (PART * u64::from(QUEUES), 0));
    assert_eq!(region.bytes[16..18], QUEUES.to_le_bytes());
    assert_eq!(region.bytes[18..20], SIZE.to_le_bytes());
    assert_eq!(fstat(&region.fd).unwrap().st_size as u64, word(0));
    let seals = fcntl_get_seals(&region.fd).unwrap();
    assert!(seals.contains(SealFlags::GROW | SealFlags::SHRINK | SealFlags::SEAL));
    let mut bytes = vec![1; word(0) as usize];
    region.memory.range(0, word(0)).unwrap().read_slice(0, &mut bytes).unwrap();
    assert!(bytes.iter().all(|b| *b == 0));
    // Used from the start of a queue on: version, desc_num, used_idx.
    guest.start_queue(2);
    assert_eq!((region.field(2, 8), region.field(2, 10), region.field(2, 14)), (1, SIZE, 0));
    guest.ready(0);
    assert_eq!(region.field(2, 14), guest.used_index(2));
    assert!(region.marked(2).is_empty());
    assert_eq!(region.field(3, 8), 0, "a queue that did not run");
}

#[test]
fn what_is_in_flight_is_marked_until_the_guest_was_told() {
    let (host, gate) = Host::gated(2);
    let (mut guest, region) = tracked(&host);
    guest.ready(0);
    gate.shut();
    let requests: Vec<_> =
        (0..6).map(|n| guest.submit(2, flat(0), n, &rw10(0x28, 0, 1), &[], 512)).collect();
    gate.wait_for(6);
    let heads: Vec<_> = requests.iter().map(|r| r.head).collect();
    assert_eq!(region.marked(2), heads);
    gate.open();
    requests.iter().for_each(|_| _ = guest.used(2));
    wait_until("the marks are cleared", || region.marked(2).is_empty());
    wait_until("the index follows", || region.field(2, 14) == guest.used_index(2));
}

#[test]
fn requests_in_flight_are_submitted_again_in_their_order_and_once() {
    let (first, gate) = Host::gated(2);
    let (mut guest, region) = tracked(&first);
    guest.ready(0);
    // So that heads are taken in another order than that of their numbers.
    gate.shut();
    let some: Vec<_> =
        (0..5).map(|n| guest.submit(2, flat(0), n, &rw10(0x28, 0, 1), &[], 512)).collect();
    gate.wait_for(5);
    gate.open();
    for _ in 0..5 {
        let (head, written) = guest.used(2);
        let request = some.iter().find(|r| r.head == head).unwrap();
        assert_eq!(guest.reply(request, written).status, 0);
    }
    gate.shut();
    let mut requests: Vec<_> = (1..9u8)
        .map(|n| guest.submit(2, flat(0), n.into(), &rw10(0x2a, 7, 1), &[n; 512], 0))
        .collect();
    requests.push(guest.submit(3, flat(0), 99, &rw10(0x2a, 8, 1), &[99; 512], 0));
    gate.wait_for(9);
    let used = [guest.used_index(2), guest.used_index(3)];
    // It dies. What it still does is told to nobody.
    guest.peer.shutdown();
    first.wait_until_left();
    // One that the next finds in the available ring, behind those.
    requests.push(guest.submit(2, flat(0), 9, &rw10(0x2a, 7, 1), &[9; 512], 0));
    gate.open();
    first.wait_until_free();
    assert_eq!([guest.used_index(2), guest.used_index(3)], used);

    // One block is written by one after the other: the last one is what was asked for last.
    let second = Host::with_disk(2);
    let mut other = 99;
    go_on(&mut guest, &region, &second);
    for queue in [2, 2, 2, 2, 2, 2, 2, 2, 2, 3] {
        let (head, written) = guest.used(queue);
        let at = requests.iter().position(|r| (r.queue, r.head) == (queue, head));
        let request = requests.remove(at.expect("answered once"));
        let reply = guest.reply(&request, written);
        // The new nexus has a unit attention, which the first of one queue hears, and is not done.
        assert!(reply.response == 0 && (reply.status == 0 || reply.sense[2] & 15 == 6));
        if queue == 3 && reply.status != 0 {
            other = 0;
        }
    }
    guest.ready(0);
    assert_eq!(guest.read_blocks(0, 7, 1).data, [9; 512]);
    assert_eq!(guest.read_blocks(0, 8, 1).data, [other; 512]);
    assert_eq!((guest.try_used(2), guest.try_used(3)), (None, None));
    assert_eq!((region.marked(2), region.marked(3)), (vec![], vec![]));
}

/// What a guest is told of a command that a killed target leaves, as the second I/O of its disk is under way: I/Os
/// before that, whether sense data are to be in descriptors; and whether the command is marked by then.
fn interrupted(cdb: &[u8], data: &[u8], before: usize, in_descriptors: bool) -> (Reply, bool) {
    let first = Host::new(1);
    let disk = first.turnstile("turnstile");
    first.add(0, "turnstile");
    let (mut guest, region) = tracked(&first);
    guest.ready(0);
    let request = guest.submit(2, flat(0), 1, cdb, data, 0);
    disk.let_through(before);
    wait_until("all but one I/O are done", || disk.is_at_end());
    let marked = region.is_unrepeatable(2, request.head);
    assert_eq!(region.marked(2), [request.head]);
    guest.peer.shutdown();

    // The first one stands still meanwhile.
    let second = Host::new(1);
    second.turnstile("turnstile").let_through(100);
    second.add(0, "turnstile");
    if in_descriptors {
        // D_SENSE of the control page, which outlives its session.
        let mut other = Guest::start(&second.socket(), LINUX, 1);
        other.ready(0);
        let mut page = other.scsi(0, &[0x1A, 8, 0x0A, 0, 16, 0], &[], 16).data;
        (page[0], page[2], page[4]) = (0, 0, 0x0A);
        page[6] |= 0x04;
        assert_eq!(other.scsi(0, &[0x15, 0x10, 0, 0, 16, 0], &page, 0).status, 0);
        other.peer.shutdown();
        second.wait_until_free();
    }
    go_on(&mut guest, &region, &second);
    let (head, written) = guest.used(2);
    assert_eq!(head, request.head);
    let reply = guest.reply(&request, written);
    wait_until("the mark is cleared", || region.marked(2).is_empty());
    disk.let_through(100);
    (reply, marked)
}

/// EXTENDED COPY of 8 blocks within the disk, from its first one on.
fn copy_to(lba: u64) -> (Vec<u8>, Vec<u8>) {
    let disk = Uuid::new_v5(&Uuid::NAMESPACE_OID, b"turnstile");
    extended_copy((disk, 0), (disk, lba), 8)
}

#[test]
fn what_cannot_be_done_a_second_time_is_told_by_the_next_back_end() {
    let mut compare_and_write = vec![0; 16];
    (compare_and_write[0], compare_and_write[13]) = (0x89, 1);
    let told = |(reply, marked): (Reply, bool)| {
        let key = (reply.sense[2] & 15, u16::from_be_bytes([reply.sense[12], reply.sense[13]]));
        (reply.response, reply.status, key, marked)
    };
    const CHECK: u8 = 2;
    let new_session = (0, CHECK, (6, 0x2900), false);
    // As it reads it is submitted again, and hears that the session is new.
    assert_eq!(told(interrupted(&compare_and_write, &[0; 1024], 0, false)), new_session);
    let terminated = (0, CHECK, (0xB, 0x0006), true);
    assert_eq!(told(interrupted(&compare_and_write, &[0; 1024], 1, false)), terminated);
    let (cdb, list) = copy_to(8);
    assert_eq!(told(interrupted(&cdb, &list, 1, false)), new_session);
    let (cdb, list) = copy_to(4);
    assert_eq!(told(interrupted(&cdb, &list, 1, false)), (0, CHECK, (0xA, 0x0006), true));
    // Key, code and qualifier in the descriptor format (SPC-4 4.5.2).
    let (reply, _) = interrupted(&cdb, &list, 1, true);
    assert_eq!((reply.status, &reply.sense[..8]), (CHECK, &[0x72, 0xA, 0, 6, 0, 0, 0, 0][..]));
}

#[test]
fn a_guest_that_was_not_called_for_what_was_shown_is_called() {
    let first = Host::with_disk(1);
    let (mut guest, region) = tracked(&first);
    guest.ready(0);
    guest.peer.shutdown();
    first.wait_until_free();
    while guest.called(2, Duration::ZERO) {}
    let second = Host::with_disk(1);
    go_on(&mut guest, &region, &second);
    assert!(guest.called(2, DEADLINE));
}

#[test]
fn a_queue_stops_and_goes_on_with_its_region_and_starts_afresh_with_a_new_one() {
    let host = Host::with_disk(2);
    let (mut guest, region) = tracked(&host);
    for _ in 0..3 {
        guest.ready(0);
        // Paused and continued, as QEMU does it: the same region again.
        let base = guest.peer.base(2) as u16;
        assert_eq!(base, guest.used_index(2));
        region.give(&mut guest);
        guest.describe_queue(2, base, false);
        guest.ready(0);
        guest.tell_memory();
    }
    // The driver starts afresh. QEMU takes a new region; a peer that keeps the old one is served too.
    guest.peer.base(2);
    guest.start_queue(2);
    guest.ready(0);
    assert_eq!(region.field(2, 14), guest.used_index(2));
    guest.peer.base(2);
    let new = Region::new(&mut guest);
    guest.start_queue(2);
    guest.ready(0);
    assert_eq!(new.field(2, 14), guest.used_index(2));
    assert!(new.marked(2).is_empty());
}

/// No target was there when it did, and the peer has kept the region of the driver before, as QEMU does.
#[test]
fn a_driver_that_started_afresh_is_served_though_it_has_asked_before_its_queue_starts() {
    let first = Host::with_disk(1);
    let (mut guest, region) = tracked(&first);
    guest.ready(0);
    guest.peer.shutdown();
    first.wait_until_free();
    guest.make_queue(2);
    let early: Vec<_> = (0..3).map(|n| guest.submit(2, flat(0), n, &[0; 6], &[], 0)).collect();
    let second = Host::with_disk(1);
    go_on(&mut guest, &region, &second);
    early.iter().for_each(|request| assert_eq!(guest.finish(request).response, 0));
    assert_eq!((region.field(2, 14), region.marked(2)), (3, vec![]));
}

#[test]
fn a_queue_whose_requests_were_half_submitted_again_is_stopped_behind_them() {
    let (first, gate) = Host::gated(2);
    let (mut guest, region) = tracked(&first);
    guest.ready(0);
    gate.shut();
    let before = guest.used_index(2);
    for n in 0..40 {
        guest.submit(2, flat(0), n, &rw10(0x28, 0, 1), &[], 512);
    }
    gate.wait_for(40);
    guest.peer.shutdown();
    first.wait_until_left();
    gate.open();
    first.wait_until_free();
    let second = Host::with_disk(1);
    go_on(&mut guest, &region, &second);
    // As a migration does at once: the one who goes on has no region.
    assert_eq!(guest.peer.base(2) as u16, before + 40);
    assert_eq!(guest.used_index(2), before + 40);
}

#[test]
fn task_management_waits_for_what_is_submitted_again_and_is_answered() {
    let (first, gate) = Host::gated(2);
    let (mut guest, region) = tracked(&first);
    guest.ready(0);
    gate.shut();
    let request = guest.submit(3, flat(0), 5, &rw10(0x2a, 7, 1), &[5; 512], 0);
    gate.wait_for(1);
    let (head, answer) = guest.submit_control(&tmf(LOGICAL_UNIT_RESET, flat(0), 0), 1);
    wait_until("it is taken", || region.marked(0) == [head]);
    guest.peer.shutdown();
    first.wait_until_left();
    gate.open();
    first.wait_until_free();

    let second = Host::with_disk(2);
    guest.reconnect(&second.socket());
    region.give(&mut guest);
    for queue in [0, 1, 2] {
        let base = guest.used_index(queue);
        guest.describe_queue(queue, base, false);
    }
    std::thread::sleep(Duration::from_millis(50));
    assert_eq!(guest.try_used(0), None, "the request that it is about is not submitted yet");
    let base = guest.used_index(3);
    guest.describe_queue(3, base, false);
    let (back, written) = guest.used(3);
    assert_eq!(back, request.head);
    let reply = guest.reply(&request, written);
    assert!(reply.status == 0 || reply.response != 0 || reply.sense[2] & 15 == 6);
    assert_eq!(guest.used(0), (head, 1));
    assert_eq!(guest.read(answer, 1), [0]);
}

#[test]
fn a_driver_whose_events_nobody_knows_is_told_to_look() {
    const MISSED: u32 = 0x8000_0000;
    const PARAM_CHANGE: u32 = 3;
    let first = Host::with_disk(1);
    let (mut guest, region) = tracked(&first);
    guest.ready(0);
    let buffer = guest.give_event_buffer();
    guest.peer.shutdown();
    first.wait_until_free();
    let second = Host::with_disk(1);
    go_on(&mut guest, &region, &second);
    assert_eq!(guest.event(buffer), (MISSED | PARAM_CHANGE, [1, 0, 0, 0, 0, 0, 0, 0], 0x092a));
    // The same back end knows them.
    guest.peer.shutdown();
    second.wait_until_free();
    second.malloc("late");
    second.add(3, "late");
    go_on(&mut guest, &region, &second);
    let buffer = guest.give_event_buffer();
    assert_eq!(guest.event(buffer).0, 1);
}

#[test]
fn an_orderly_end_tells_what_was_in_flight_before_the_peer_is_left() {
    for with_region in [true, false] {
        let (host, gate) = Host::gated(2);
        let mut guest = Guest::connect(&host.socket(), LINUX);
        let region = with_region.then(|| Region::new(&mut guest));
        (0..usize::from(QUEUES)).for_each(|queue| guest.start_queue(queue));
        guest.ready(0);
        gate.shut();
        let before = guest.used_index(2);
        for n in 0..8u32 {
            guest.submit(2, flat(0), n.into(), &rw10(0x2a, n, 1), &[7; 512], 0);
        }
        gate.wait_for(8);
        let opener = std::thread::spawn(move || {
            std::thread::sleep(Duration::from_millis(30));
            gate.open();
        });
        host.controllers.delete("vm0", true).unwrap();
        assert!(guest.peer.is_closed());
        opener.join().unwrap();
        assert_eq!(guest.used_index(2), before + 8);
        if let Some(region) = region {
            assert_eq!((region.marked(2), region.field(2, 14)), (vec![], before + 8));
        }
    }
}

#[test]
fn an_orderly_end_leaves_what_takes_too_long_to_the_next_one() {
    let short = Duration::from_millis(200);
    let host = Host::with_timeouts(2, Timeouts { method: short, ..Timeouts::default() });
    let gate = host.gate("gate");
    host.add(0, "gate");
    let (mut guest, region) = tracked(&host);
    guest.ready(0);
    gate.shut();
    let before = guest.used_index(2);
    // VERIFY (10) of 4 MiB, which is many reads, and one write.
    let verify = guest.submit(2, flat(0), 1, &rw10(0x2f, 0, 8192), &[], 0);
    let write = guest.submit(2, flat(0), 2, &rw10(0x2a, 0, 1), &[7; 512], 0);
    gate.wait_for(2);
    assert!(host.controllers.delete("vm0", true).is_err());
    assert!(guest.peer.is_closed());
    gate.open();
    assert_eq!(guest.used_index(2), before);
    assert_eq!(region.marked(2), [verify.head, write.head]);
    let second = Host::with_disk(1);
    go_on(&mut guest, &region, &second);
    for _ in 0..2 {
        let (head, written) = guest.used(2);
        let request = if head == verify.head { verify } else { write };
        let reply = guest.reply(&request, written);
        assert!(reply.status == 0 || reply.sense[2] & 15 == 6);
    }
}

#[test]
fn a_request_of_many_ios_is_left_half_done_and_done_again() {
    let (first, gate) = Host::gated(2);
    let (mut guest, region) = tracked(&first);
    guest.ready(0);
    let before = gate.reads();
    gate.shut();
    let verify = guest.submit(2, flat(0), 1, &rw10(0x2f, 0, 8192), &[], 0);
    let write = guest.submit(2, flat(0), 2, &rw10(0x2a, 0, 1), &[7; 512], 0);
    gate.wait_for(2);
    let opener = {
        let gate = gate.clone();
        std::thread::spawn(move || {
            // Nothing shows that its queues leave: that has begun by then on a busy machine, too.
            std::thread::sleep(Duration::from_secs(1));
            gate.open();
        })
    };
    first.controllers.delete("vm0", true).unwrap();
    opener.join().unwrap();
    assert_eq!(gate.reads(), before + 1);
    let (head, written) = guest.used(2);
    assert_eq!((head, guest.try_used(2)), (write.head, None));
    assert_eq!(guest.reply(&write, written).status, 0);
    assert_eq!(region.marked(2), [verify.head]);
    let second = Host::with_disk(1);
    go_on(&mut guest, &region, &second);
    let reply = guest.finish(&verify);
    assert!(reply.status == 0 || reply.sense[2] & 15 == 6);
}

#[test]
fn what_a_reset_aborted_is_not_left_to_the_next_one() {
    let (first, gate) = Host::gated(2);
    let (mut guest, region) = tracked(&first);
    guest.ready(0);
    gate.shut();
    let writes: Vec<_> =
        (0..3).map(|n| guest.submit(2, flat(0), n, &rw10(0x2a, 7, 1), &[7; 512], 0)).collect();
    gate.wait_for(3);
    let (head, answer) = guest.submit_control(&tmf(LOGICAL_UNIT_RESET, flat(0), 0), 1);
    wait_until("it is taken", || region.marked(0) == [head]);
    let opener = std::thread::spawn(move || {
        std::thread::sleep(Duration::from_millis(50));
        gate.open();
    });
    first.controllers.delete("vm0", true).unwrap();
    opener.join().unwrap();
    assert_eq!((guest.used(0), guest.read(answer, 1)), ((head, 1), vec![0]));
    assert_eq!((region.marked(0), region.marked(2)), (vec![], vec![]));
    for _ in 0..3 {
        let (head, written) = guest.used(2);
        let write = writes.iter().find(|w| w.head == head).unwrap();
        assert_eq!(guest.reply(write, written).response, 4, "reset");
    }
    // The next one has nothing to submit again.
    let second = Host::with_disk(2);
    go_on(&mut guest, &region, &second);
    guest.ready(0);
    assert_eq!(guest.try_used(2), None);
    assert_eq!(guest.read_blocks(0, 7, 1).data, [0; 512]);
}

#[test]
fn regions_that_cannot_be_are_refused() {
    let host = Host::with_disk(1);
    let (mut guest, region) = tracked(&host);
    let whole = PART * u64::from(QUEUES);
    let pipe = rustix::pipe::pipe().unwrap().0;
    // Of more queues than the device has.
    let many = PART * 67;
    let large = rustix::fs::memfd_create("region", rustix::fs::MemfdFlags::CLOEXEC).unwrap();
    rustix::fs::ftruncate(&large, many).unwrap();
    for (body, fd) in [
        (message(many, 0, 67, SIZE), &large),
        (message(whole - 1, 0, QUEUES, SIZE), &region.fd),
        (message(whole, 8, QUEUES, SIZE), &region.fd),
        (message(whole, 4, QUEUES, SIZE), &region.fd),
        (message(u64::MAX, u64::MAX - 7, QUEUES, SIZE), &region.fd),
        (message(whole, 0, QUEUES + 1, SIZE), &region.fd),
        (message(whole, 0, QUEUES, 2 * SIZE), &region.fd),
        (message(u64::MAX, 0, 1, 1025), &region.fd),
        (message(whole, 0, QUEUES, SIZE), &pipe),
    ] {
        assert_ne!(guest.peer.try_ask(SET_INFLIGHT_FD, &body, &[fd.as_fd()]), Some(Ack::Done));
    }
    guest.ready(0);
    // One who waits for a reply that cannot be sees the end of the connection.
    guest.peer.send(GET_INFLIGHT_FD, &message(0, 0, 67, SIZE), &[]);
    assert!(guest.peer.reply(GET_INFLIGHT_FD).is_none());
}

#[test]
fn a_queue_whose_region_tells_of_another_ring_is_not_started() {
    type Damage = fn(&Region, u16);
    let damages: [Damage; 4] = [
        |r, _| r.put(2, 8, 2),
        |r, _| r.put(2, 10, SIZE / 2),
        // Used far behind the ring.
        |r, used| r.put(2, 14, used.wrapping_sub(1000)),
        // More in flight than is available.
        |r, _| (0..20).for_each(|head| r.put(2, 16 + 16 * head, 1)),
    ];
    for (nth, damage) in damages.into_iter().enumerate() {
        let first = Host::with_disk(1);
        let (mut guest, region) = tracked(&first);
        guest.ready(0);
        guest.peer.shutdown();
        first.wait_until_free();
        let late = guest.submit(2, flat(0), 1, &[0; 6], &[], 0);
        damage(&region, guest.used_index(2));
        let second = Host::with_disk(1);
        go_on(&mut guest, &region, &second);
        std::thread::sleep(Duration::from_millis(20));
        assert_eq!(guest.try_used(2), None, "damage {nth}");
        let other = guest.submit(3, flat(0), 1, &[0; 6], &[], 0);
        assert_eq!(guest.finish(&other).response, 0);
        // Until its driver starts afresh.
        assert_ne!(late.head, SIZE);
        guest.peer.base(2);
        let _new = Region::new(&mut guest);
        guest.start_queue(2);
        guest.ready(0);
    }
}

#[test]
fn a_peer_that_truncates_its_region_is_thrown_out() {
    let host = Host::with_disk(1);
    let mut guest = Guest::connect(&host.socket(), LINUX);
    let fd = memfd_create("region", MemfdFlags::CLOEXEC).unwrap();
    let whole = PART * u64::from(QUEUES);
    ftruncate(&fd, whole).unwrap();
    guest.peer.ask(SET_INFLIGHT_FD, &message(whole, 0, QUEUES, SIZE), &[fd.as_fd()]);
    guest.start_queue(2);
    guest.ready(0);
    ftruncate(&fd, 0).unwrap();
    guest.submit(2, flat(0), 1, &[0; 6], &[], 0);
    assert!(guest.peer.is_closed());
    host.wait_until_free();
    Guest::start(&host.socket(), LINUX, 1).ready(0);
}

/// A guest without a region, with `count` requests in flight in its first request queue that are
/// ended out of order.
fn untracked(host: &Host, gate: &Gate, count: u32) -> Guest {
    let mut guest = Guest::start(&host.socket(), LINUX, 2);
    guest.ready(0);
    gate.shut();
    for n in 0..count {
        guest.submit(2, flat(0), n.into(), &rw10(0x28, n, 1), &[], 512);
    }
    gate.wait_for(count as usize);
    guest
}

/// The guest's QEMU connects again, without a region.
fn go_on_untracked(guest: &mut Guest, host: &Host) {
    guest.reconnect(&host.socket());
    for queue in 0..usize::from(QUEUES) {
        let base = guest.used_index(queue);
        guest.describe_queue(queue, base, false);
    }
}

fn stopped_queues(host: &Host) -> Vec<(u16, String)> {
    let session = host.controllers.list(Some("vm0")).unwrap().remove(0).session;
    session.map(|s| s.stopped_queues).unwrap_or_default()
}

#[test]
fn without_a_region_a_queue_goes_on_after_a_crash_only_where_nothing_was_in_flight() {
    let (first, gate) = Host::gated(2);
    let mut guest = untracked(&first, &gate, 4);
    // The first target dies: its mark stays.
    let second = Host::with_disk(2);
    std::fs::create_dir_all(second.mark().parent().unwrap()).unwrap();
    std::fs::copy(first.mark(), second.mark()).unwrap();
    go_on_untracked(&mut guest, &second);
    wait_until("it is told", || !stopped_queues(&second).is_empty());
    let stopped = stopped_queues(&second);
    assert_eq!(stopped[0].0, 2);
    assert!(stopped[0].1.contains("requests were in flight"), "{}", stopped[0].1);
    assert_eq!(stopped.len(), 1);
    let quiet = guest.submit(3, flat(0), 1, &[0; 6], &[], 0);
    assert_eq!(guest.finish(&quiet).response, 0);
    // Its driver resets it.
    guest.peer.base(2);
    guest.start_queue(2);
    guest.ready(0);
    assert_eq!(stopped_queues(&second), []);
    // An orderly end leaves no mark; the mark of another process means nothing.
    second.controllers.delete("vm0", true).unwrap();
    assert!(!second.mark().exists());
    let third = Host::with_disk(1);
    std::fs::create_dir_all(third.mark().parent().unwrap()).unwrap();
    std::fs::write(third.mark(), "1 2 3").unwrap();
    let late = guest.submit(2, flat(0), 1, &[0; 6], &[], 0);
    go_on_untracked(&mut guest, &third);
    assert_eq!(guest.finish(&late).response, 0);
    gate.open();
    drop(first);
}

/// A host that found the mark of `other`, as after `kill -9`.
fn successor(other: &Host) -> Host {
    let host = Host::with_disk(1);
    std::fs::create_dir_all(host.mark().parent().unwrap()).unwrap();
    std::fs::copy(other.mark(), host.mark()).unwrap();
    host
}

#[test]
fn a_queue_that_cannot_be_known_stays_stopped_until_its_driver_resets_it() {
    let (first, gate) = Host::gated(2);
    let mut guest = untracked(&first, &gate, 4);
    let lost = successor(&first);
    let is_stopped = |host: &Host| {
        wait_until("it is told", || !stopped_queues(host).is_empty());
        let stopped = stopped_queues(host);
        assert_eq!(stopped.iter().map(|(queue, _)| *queue).collect::<Vec<_>>(), [2]);
        assert!(stopped[0].1.contains("requests were in flight"), "{}", stopped[0].1);
    };
    go_on_untracked(&mut guest, &lost);
    is_stopped(&lost);
    // Its QEMU connects again, once without a word about any queue.
    guest.peer.shutdown();
    lost.wait_until_free();
    guest.reconnect(&lost.socket());
    guest.peer.shutdown();
    lost.wait_until_free();
    go_on_untracked(&mut guest, &lost);
    is_stopped(&lost);
    // An upgrade.
    move_on(&lost);
    is_stopped(&lost);
    // What could be known goes on, and is no matter of the mark any more.
    let quiet = guest.submit(3, flat(0), 1, &[0; 6], &[], 0);
    assert_eq!(guest.finish(&quiet).response, 0);
    let late = guest.submit(3, flat(0), 1, &[0; 6], &[], 0);
    assert_eq!(guest.finish(&late).response, 0);
    // An orderly restart.
    lost.controllers.delete("vm0", true).unwrap();
    let next = successor(&lost);
    let waits = guest.submit(3, flat(0), 1, &[0; 6], &[], 0);
    go_on_untracked(&mut guest, &next);
    is_stopped(&next);
    assert_eq!(guest.finish(&waits).response, 0);
    assert_eq!(guest.used_index(2), guest.peer.base(2) as u16);
    guest.start_queue(2);
    guest.ready(0);
    assert_eq!(stopped_queues(&next), []);
    next.controllers.delete("vm0", true).unwrap();
    assert!(!next.mark().exists());
    gate.open();
    drop(first);
}

#[test]
fn without_a_region_a_queue_that_drained_after_its_peer_left_goes_on_where_it_ended() {
    let (host, gate) = Host::gated(2);
    let mut guest = untracked(&host, &gate, 4);
    let sampled = guest.used_index(2);
    guest.peer.shutdown();
    host.wait_until_left();
    gate.open();
    host.wait_until_free();
    assert_eq!(guest.used_index(2), sampled + 4);
    assert!(!host.mark().exists());
    let late = guest.submit(2, flat(0), 9, &[0; 6], &[], 0);
    guest.reconnect(&host.socket());
    // What QEMU saw when the connection broke.
    guest.describe_queue(2, sampled, false);
    while guest.used(2).0 != late.head {}
    assert_eq!(guest.used_index(2), sampled + 5);
}
