//! Peers and guests that mean harm: whatever one of them does, its controller still obeys, and
//! another guest on the same reactor goes on.

use std::os::fd::{AsFd, OwnedFd};
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use vhost_scsi::ControllerOptions;

use crate::guest::*;
use crate::host::*;
use crate::peer::*;

/// A second controller `vm1` with a disk of its own, and a guest that uses it.
pub fn bystander(host: &Host) -> Guest {
    host.controllers.create("vm1", ControllerOptions::default()).unwrap();
    host.malloc("other");
    let options = vhost_scsi::TargetOptions::default();
    host.controllers.add_target("vm1", 0, "other", options).unwrap();
    let mut guest = Guest::start(&host.socket().with_file_name("vm1"), LINUX, 1);
    guest.ready(0);
    guest
}

/// The bystander is served, and the controller under attack obeys.
pub fn all_is_well(host: &Host, bystander: &mut Guest) {
    assert_eq!(bystander.write_blocks(0, 1, &[7; 512]).status, 0);
    assert_eq!(bystander.read_blocks(0, 1, 1).data, [7; 512]);
    host.malloc("well");
    host.add(9, "well");
    host.controllers.remove_target("vm0", 9).unwrap();
    host.registry.unregister("well").unwrap();
}

/// A header of a message with `size` bytes of body.
fn header(code: u32, size: u32) -> Vec<u8> {
    words(&[code, 1, size])
}

#[test]
fn a_peer_that_stops_in_the_middle_of_a_message_is_left() {
    let host = Host::with_disk(1);
    let mut other = bystander(&host);
    for part in [
        header(SET_FEATURES, 8)[..5].to_vec(),
        header(SET_FEATURES, 8),
        [header(SET_FEATURES, 8), vec![0; 7]].concat(),
    ] {
        let mut peer = Peer::connect(&host.socket());
        peer.get_u64(GET_FEATURES);
        peer.send_bytes(&part);
        all_is_well(&host, &mut other);
        assert!(peer.is_closed());
    }
    // One that goes away in the middle is gone at once.
    let mut peer = Peer::connect(&host.socket());
    peer.send_bytes(&header(SET_FEATURES, 8));
    drop(peer);
    Guest::start(&host.socket(), LINUX, 1).ready(0);
}

#[test]
fn a_message_in_pieces_is_one_message() {
    let host = Host::with_disk(1);
    let mut peer = Peer::connect(&host.socket());
    let message = [header(GET_FEATURES, 0), header(GET_PROTOCOL_FEATURES, 0)].concat();
    for byte in &message {
        peer.send_bytes(&[*byte]);
    }
    peer.reply(GET_FEATURES).unwrap();
    peer.reply(GET_PROTOCOL_FEATURES).unwrap();
}

#[test]
fn half_a_message_keeps_nobody_waiting() {
    const TRIES: u32 = 10;
    let host = Host::with_disk(1);
    let message: Vec<u8> = header(GET_FEATURES, 0);
    // Half a message is waited for, for a second; a machine may stand still for as long.
    let goes_on = (0..TRIES).any(|_| {
        let mut peer = Peer::connect(&host.socket());
        peer.get_u64(GET_FEATURES);
        peer.send_bytes(&message[..6]);
        // So that it has been looked at.
        std::thread::sleep(Duration::from_millis(100));
        host.controllers.hold(DEADLINE).unwrap();
        // More than that second: if its end had been waited for, the session would be over.
        std::thread::sleep(Duration::from_millis(1100));
        let sent = peer.try_send_bytes(&message[6..]);
        host.controllers.release();
        let replied = sent && peer.reply(GET_FEATURES).is_some();
        drop(peer);
        host.wait_until_free();
        replied
    });
    assert!(goes_on);
}

#[test]
fn a_peer_that_takes_no_replies_is_left() {
    let host = Host::with_disk(1);
    let mut other = bystander(&host);
    let mut peer = Peer::connect(&host.socket());
    // More replies than a socket holds.
    while peer.try_send_bytes(&header(GET_FEATURES, 0)) {}
    all_is_well(&host, &mut other);
    host.wait_until_free();
}

#[test]
fn only_eventfds_are_taken_for_rings() {
    let host = Host::with_disk(1);
    let mut guest = Guest::connect(&host.socket(), LINUX);
    let file = OwnedFd::from(tempfile::tempfile().unwrap());
    let (read, write) = rustix::pipe::pipe().unwrap();
    for code in [SET_VRING_KICK, SET_VRING_CALL, SET_VRING_ERR] {
        for fd in [&file, &read, &write] {
            let body = 2u64.to_le_bytes();
            assert_eq!(guest.peer.try_ask(code, &body, &[fd.as_fd()]), Some(Ack::Refused));
        }
    }
    for _ in 0..300 {
        match guest.peer.try_ask(SET_VRING_KICK, &2u64.to_le_bytes(), &[file.as_fd()]) {
            Some(ack) => assert_eq!(ack, Ack::Refused),
            None => return,
        }
    }
    panic!("a peer whose every message is refused stays");
}

/// Makes `heads` available for ever, in turn: whenever the device has taken some, there are more.
fn flood(guest: &Guest, queue: usize, heads: &[u16], stop: &AtomicBool) {
    let rings = Guest::rings_at(queue);
    for (slot, head) in (0..u64::from(SIZE)).zip(heads.iter().cycle()) {
        guest.write(rings + 0x4004 + 2 * slot, &head.to_le_bytes());
    }
    let avail = guest.memory.range(rings + 0x4000, 4).unwrap();
    guest.kick(queue);
    while !stop.load(Ordering::Relaxed) {
        avail.store_release_u16(2, guest.used_index(queue).wrapping_add(SIZE)).unwrap();
    }
}

/// Runs `flood` of chains of the same buffers while the controller is asked to work. In a request
/// queue each chain has a head of its own, as one that is in flight may not come again.
fn flooded(queue: usize, buffers: impl FnOnce(&mut Guest) -> Vec<Buffer>) {
    let host = Host::with_disk(1);
    let mut other = bystander(&host);
    let mut guest = Guest::start(&host.socket(), LINUX, 1);
    guest.ready(0);
    let buffers = buffers(&mut guest);
    let heads: Vec<u16> = match queue {
        0 | 1 => vec![guest.chain(queue, &buffers)],
        _ => (0..SIZE).map(|_| guest.indirect(queue, &buffers)).collect(),
    };
    let stop = AtomicBool::new(false);
    std::thread::scope(|scope| {
        scope.spawn(|| flood(&guest, queue, &heads, &stop));
        all_is_well(&host, &mut other);
        all_is_well(&host, &mut other);
        stop.store(true, Ordering::Relaxed);
    });
    assert_eq!(guest.peer.base(queue as u32), u32::from(guest.used_index(queue)));
    assert!(queue < 2 || host.stats().controller.malformed == 0);
}

#[test]
fn a_control_queue_that_is_never_empty_keeps_the_controller_from_nothing() {
    flooded(0, |guest| {
        let (message, answer) = (guest.alloc(24), guest.alloc(1));
        guest.write(message, &tmf(6, flat(0), 1));
        vec![
            Buffer { addr: message, len: 24, write: false },
            Buffer { addr: answer, len: 1, write: true },
        ]
    });
}

#[test]
fn event_buffers_that_are_too_small_are_not_taken_for_ever() {
    flooded(1, |guest| vec![Buffer { addr: guest.alloc(4), len: 4, write: true }]);
}

#[test]
fn a_request_queue_that_is_never_empty_leaves_others_their_turn() {
    flooded(2, |guest| {
        let (request, answer, data) = (guest.alloc(51), guest.alloc(108), guest.alloc(1 << 20));
        let mut header = flat(0).to_vec();
        header.resize(19, 0);
        header.extend(rw10(0x28, 0, 8192));
        header.resize(51, 0);
        guest.write(request, &header);
        let mut buffers = vec![
            Buffer { addr: request, len: 51, write: false },
            Buffer { addr: answer, len: 108, write: true },
        ];
        buffers.extend([Buffer { addr: data, len: 1 << 20, write: true }; 4]);
        buffers
    });
}

#[test]
fn an_eventfd_that_blocks_its_writers_does_not_block_a_reactor() {
    let host = Host::with_disk(1);
    let mut other = bystander(&host);
    let mut guest = Guest::start(&host.socket(), LINUX & !F_EVENT_IDX, 1);
    guest.ready(0);
    let call = rustix::event::eventfd(0, rustix::event::EventfdFlags::empty()).unwrap();
    guest.peer.vring_fd(SET_VRING_CALL, 2, Some(&call));
    // It is called as soon as it is set.
    wait_until("it is called", || rustix::io::read(&call, &mut [0; 8]).is_ok());
    // The target made it non-blocking; it is the peer's too.
    rustix::io::ioctl_fionbio(&call, false).unwrap();
    rustix::io::write(&call, &(u64::MAX - 1).to_ne_bytes()).unwrap();
    guest.submit(2, flat(0), 1, &[0; 6], &[], 0);
    host.wait_until_free();
    assert!(guest.peer.is_closed());
    all_is_well(&host, &mut other);
}

#[test]
fn a_peer_that_left_with_messages_unread_makes_room_for_the_next() {
    let host = Host::with_disk(1);
    for _ in 0..50 {
        let mut gone = Peer::connect(&host.socket());
        for _ in 0..20 {
            gone.send(GET_FEATURES, &[], &[]);
        }
        drop(gone);
        Peer::connect(&host.socket()).get_u64(GET_FEATURES);
    }
}

#[test]
fn more_task_management_than_is_taken_at_a_time_waits_in_the_ring() {
    let (host, gate) = Host::gated(2);
    let mut other = bystander(&host);
    let mut guest = Guest::start(&host.socket(), LINUX, 1);
    guest.ready(0);
    gate.shut();
    let before = guest.used_index(0);
    guest.submit(2, flat(0), 1, &rw10(0x28, 0, 1), &[], 512);
    gate.wait_for(1);
    let answers: Vec<u64> =
        (0..20).map(|_| guest.submit_control(&tmf(5, flat(0), 0), 1).1).collect();
    all_is_well(&host, &mut other);
    assert_eq!(guest.used_index(0), before, "all wait for the same I/O");
    gate.open();
    for _ in &answers {
        guest.used(0);
    }
    assert!(answers.iter().all(|at| guest.read(*at, 1) == [0]));
}
