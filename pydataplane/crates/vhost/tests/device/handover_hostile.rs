//! Guests and peers that spoil what another process is to go on with: that ends what is theirs, and
//! keeps nobody else from going on.

use std::os::fd::AsFd;
use std::time::Duration;

use guestmem::RegionSpec;
use rustix::fs::{MemfdFlags, SealFlags, fcntl_add_seals, ftruncate, memfd_create};

use crate::guest::*;
use crate::handover::{DISK, move_on, put_together, taken_apart};
use crate::host::*;
use crate::inflight::{Region, tracked};
use crate::peer::*;

/// Offsets in a queue's part of the in-flight region.
const VERSION_AT: u64 = 8;
const DESC_NUM: u64 = 10;
/// Offset of the index in both rings.
const INDEX: u64 = 2;
/// An index that no ring of these guests has.
const BEYOND: u16 = 50_000;
/// Bytes of a region that no ring is in.
const MORE: u64 = 1 << 20;

/// Where the available ring of `queue` is.
fn avail_at(queue: usize) -> u64 {
    address_word(queue, 3)
}

/// Where its used ring is.
fn used_at(queue: usize) -> u64 {
    address_word(queue, 2)
}

/// Guest address at a place of the body of SET_VRING_ADDR.
fn address_word(queue: usize, at: usize) -> u64 {
    let body = address_body(queue, false);
    let word = u64::from_le_bytes(body[8 * at..8 * (at + 1)].try_into().unwrap());
    word - USER
}

/// What is said of the queues of `vm0` that were not started.
fn stopped(host: &Host) -> Vec<u16> {
    let all = host.controllers.list(None).unwrap();
    let session = all[0].session.as_ref().expect("it is connected");
    session.stopped_queues.iter().map(|(queue, _)| *queue).collect()
}

#[test]
fn a_ring_that_its_guest_spoiled_does_not_start_and_all_else_goes_on() {
    type Spoil = fn(&Guest, &Region);
    let spoils: [Spoil; 4] = [
        |_, region| region.put(2, VERSION_AT, 7),
        |_, region| region.put(2, DESC_NUM, 3),
        |guest, _| guest.write(avail_at(2) + INDEX, &BEYOND.to_le_bytes()),
        |guest, _| guest.write(used_at(2) + INDEX, &BEYOND.to_le_bytes()),
    ];
    for (nth, spoil) in spoils.into_iter().enumerate() {
        let host = Host::with_disk(2);
        let (mut guest, region) = tracked(&host);
        guest.ready(0);
        spoil(&guest, &region);
        move_on(&host);
        wait_until(&format!("spoil {nth} is told of"), || stopped(&host) == [2]);
        // Its driver resets it.
        guest.peer.base(2);
        guest.start_queue(2);
        wait_until(&format!("spoil {nth} is over"), || stopped(&host).is_empty());
        assert_eq!(guest.read_blocks(0, 0, 1).status, 0);
    }
}

#[test]
fn a_ring_that_never_ran_because_it_cannot_be_is_none_there_either() {
    let host = Host::with_disk(2);
    let mut guest = Guest::start(&host.socket(), LINUX, 2);
    guest.ready(0);
    let mut body = words(&[3, 0]);
    body.extend(longs(&[1 << 50, 1 << 50, 1 << 50, 0]));
    assert_eq!(guest.peer.try_ask(SET_VRING_ADDR, &body, &[]), Some(Ack::Refused));
    move_on(&host);
    assert_eq!(guest.read_blocks(0, 0, 1).status, 0);
    guest.start_queue(3);
    move_on(&host);
    assert_eq!(guest.read_blocks(0, 0, 1).status, 0);
}

#[test]
fn a_peer_whose_memory_cannot_be_mapped_any_more_is_disconnected() {
    for truncated in [true, false] {
        let host = Host::with_disk(1);
        let mut guest = Guest::start(&host.socket(), LINUX, 1);
        let flags = MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING;
        let fd = memfd_create("guest", flags).unwrap();
        ftruncate(&fd, MORE).unwrap();
        let (guest_addr, user_addr) = (1 << 40, USER + (1 << 40));
        let spec = RegionSpec { guest_addr, size: MORE, user_addr, mmap_offset: 0 };
        guest.regions.push((spec, fd.try_clone().unwrap()));
        guest.tell_memory();
        guest.ready(0);
        match truncated {
            true => ftruncate(&fd, 0).unwrap(),
            false => fcntl_add_seals(fd.as_fd(), SealFlags::FUTURE_WRITE).unwrap(),
        }
        put_together(&host, taken_apart(&host), &DISK);
        assert!(guest.peer.is_closed());
        assert!(host.controllers.list(None).unwrap()[0].session.is_none());
        // The next session has nothing of this one: POWER ON, RESET, OR BUS DEVICE RESET OCCURRED.
        let mut guest = Guest::start(&host.socket(), LINUX, 1);
        let reply = guest.scsi(0, &[0; 6], &[], 0);
        assert_eq!(reply.status, 2);
        assert_eq!((reply.sense[2] & 15, reply.sense[12]), (6, 0x29));
        guest.ready(0);
    }
}

#[test]
fn a_guest_that_just_left_is_waited_for() {
    let (host, gate) = Host::gated(1);
    let mut guest = Guest::start(&host.socket(), LINUX, 1);
    guest.ready(0);
    gate.shut();
    guest.submit(2, flat(0), 1, &rw10(0x28, 0, 1), &[], 512);
    gate.wait_for(1);
    drop(guest);
    host.wait_until_left();
    std::thread::scope(|scope| {
        let held = scope.spawn(|| host.controllers.hold(DEADLINE));
        std::thread::sleep(Duration::from_millis(20));
        gate.open();
        held.join().unwrap().unwrap();
    });
    host.controllers.release();
    let mut guest = Guest::start(&host.socket(), LINUX, 1);
    guest.ready(0);
}

#[test]
fn a_guest_with_much_to_do_on_a_slow_disk_keeps_nobody_waiting_for_all_of_it() {
    const BUSY: u8 = 8;
    let (host, gate) = Host::gated(1);
    let mut guest = Guest::start(&host.socket(), LINUX, 1);
    guest.ready(0);
    gate.shut();
    let reads = gate.reads();
    // VERIFY (10) of 4 MiB, 64 KiB at a time.
    let long = guest.submit(2, flat(0), 1, &rw10(0x2f, 0, 8192), &[], 0);
    gate.wait_for(1);
    std::thread::scope(|scope| {
        let held = scope.spawn(|| host.controllers.hold(DEADLINE));
        // For longer than is waited for all of it.
        std::thread::sleep(Duration::from_millis(200));
        gate.open();
        held.join().unwrap().unwrap();
    });
    assert_eq!(gate.reads(), reads + 1, "the rest of it was not read");
    let (head, written) = guest.used(2);
    assert_eq!(head, long.head);
    let reply = guest.reply(&long, written);
    assert_eq!((reply.response, reply.status), (0, BUSY));
    host.controllers.release();
    assert_eq!(guest.scsi(0, &rw10(0x2f, 0, 8192), &[], 0).status, 0);
}
