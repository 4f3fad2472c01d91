//! Messages of the peer before any I/O.

use std::os::unix::net::UnixStream;
use std::time::{Duration, Instant};

use crate::guest::*;
use crate::host::*;
use crate::peer::*;

const OFFERED: u64 = 0b1111 | 1 << 26 | 1 << 27 | F_INDIRECT | F_EVENT_IDX | F_PROTOCOL | 1 << 32;

#[test]
fn features_are_what_the_guest_and_qemu_need() {
    let host = Host::new(1);
    let mut peer = Peer::connect(&host.socket());
    assert_eq!(peer.get_u64(GET_FEATURES), OFFERED);
    // MQ, LOG_SHMFD, REPLY_ACK, CONFIG, INFLIGHT_SHMFD, CONFIGURE_MEM_SLOTS.
    let protocol = peer.get_u64(GET_PROTOCOL_FEATURES);
    assert_eq!(protocol, 1 | 1 << 1 | 1 << 3 | 1 << 9 | 1 << 12 | 1 << 15);
    peer.send(SET_PROTOCOL_FEATURES, &protocol.to_le_bytes(), &[]);
    assert_eq!(peer.get_u64(GET_QUEUE_NUM), 66);
    assert_eq!(peer.get_u64(GET_MAX_MEM_SLOTS), 509);
}

#[test]
fn hotplug_and_change_are_taken_from_a_peer_that_was_not_asked() {
    // QEMU ORs both into what the guest acknowledges, and exits when they are refused.
    let host = Host::new(1);
    let mut peer = Peer::connect(&host.socket());
    peer.get_u64(GET_FEATURES);
    peer.send(SET_PROTOCOL_FEATURES, &(1u64 << 3).to_le_bytes(), &[]);
    peer.ask(SET_FEATURES, &(F_PROTOCOL | 0b110).to_le_bytes(), &[]);
    peer.ask(SET_FEATURES, &LINUX.to_le_bytes(), &[]);
}

#[test]
fn features_that_were_not_offered_are_refused_and_the_session_goes_on() {
    let host = Host::new(1);
    let mut guest = Guest::connect(&host.socket(), LINUX);
    let packed = (LINUX | 1 << 34).to_le_bytes();
    assert_eq!(guest.peer.try_ask(SET_FEATURES, &packed, &[]), Some(Ack::Refused));
    guest.peer.ask(SET_FEATURES, &LINUX.to_le_bytes(), &[]);
}

#[test]
fn config_has_the_limits_of_the_device_at_any_size() {
    let host = Host::new(1);
    let mut guest = Guest::connect(&host.socket(), LINUX);
    let config = guest.peer.config(0, 36);
    let word = |at: usize| u32::from_le_bytes(config[at..at + 4].try_into().unwrap());
    assert_eq!(word(0), 64, "num_queues");
    assert_eq!(word(16), 16, "event_info_size");
    assert_eq!((word(20), word(24)), (96, 32), "sense_size, cdb_size");
    assert_eq!(config[28..32], [0, 0, 255, 0], "max_channel, max_target");
    assert_eq!(word(32), 16383, "max_lun");
    // SPDK's initiator reads 256 bytes of any device.
    let whole = guest.peer.config(0, 256);
    assert_eq!((whole.len(), &whole[..36]), (256, &config[..]));
    assert_eq!(guest.peer.config(20, 4), config[20..24]);
    assert_eq!(guest.peer.config(100, 1), [0]);
    // Beyond the space: an empty reply, as the protocol says, and the session goes on.
    assert!(guest.peer.config(0, 257).is_empty());
    assert_eq!(guest.peer.config(4, 4).len(), 4);
}

#[test]
fn config_may_be_written_only_as_it_is() {
    let host = Host::new(1);
    let mut guest = Guest::connect(&host.socket(), LINUX);
    let set = |offset: u32, value: u32| words(&[offset, 4, 0, value]);
    guest.peer.ask(SET_CONFIG, &set(20, 96), &[]);
    guest.peer.ask(SET_CONFIG, &set(24, 32), &[]);
    for (offset, value) in [(20, 64), (24, 16), (0, 1)] {
        let ack = guest.peer.try_ask(SET_CONFIG, &set(offset, value), &[]);
        assert_eq!(ack, Some(Ack::Refused), "{value} at {offset}");
    }
}

#[test]
fn wrong_values_are_refused_and_the_session_goes_on() {
    let host = Host::with_disk(1);
    let mut guest = Guest::connect(&host.socket(), LINUX);
    let beyond = words(&[66, 64]);
    for (code, body) in [
        (SET_VRING_NUM, beyond.clone()),
        (SET_VRING_NUM, words(&[2, 63])),
        (SET_VRING_NUM, words(&[2, 0])),
        (SET_VRING_NUM, words(&[2, 65536])),
        (SET_VRING_NUM, words(&[2, 2048])),
        (SET_VRING_BASE, beyond.clone()),
        (SET_VRING_BASE, words(&[2, 65536])),
        (SET_VRING_ENABLE, words(&[66, 1])),
        (SET_VRING_ADDR, address_body(66, false)),
        (SET_VRING_KICK, (66u64 | 0x100).to_le_bytes().to_vec()),
        (SET_VRING_CALL, (66u64 | 0x100).to_le_bytes().to_vec()),
        (SET_VRING_ERR, (66u64 | 0x100).to_le_bytes().to_vec()),
    ] {
        let ack = guest.peer.try_ask(code, &body, &[]);
        assert_eq!(ack, Some(Ack::Refused), "message {code} {body:?}");
    }
    // Regions that overlap, and one that is not there to be removed.
    use std::os::fd::AsFd;
    let (spec, fd) = region(0x1000, 0x1000);
    let mut body = words(&[0, 0]);
    body.extend(spec_bytes(&spec));
    assert_eq!(guest.peer.try_ask(ADD_MEM_REG, &body, &[fd.as_fd()]), Some(Ack::Refused));
    let (spec, _) = region(0x4000_0000, 0x1000);
    let mut body = words(&[0, 0]);
    body.extend(spec_bytes(&spec));
    assert_eq!(guest.peer.try_ask(REM_MEM_REG, &body, &[]), Some(Ack::Refused));
    // After all that it works.
    (0..3).for_each(|queue| guest.start_queue(queue));
    guest.ready(0);
}

#[test]
fn rings_that_are_not_in_memory_are_refused() {
    let host = Host::with_disk(1);
    let mut guest = Guest::connect(&host.socket(), LINUX);
    guest.peer.ask(SET_VRING_NUM, &words(&[2, 64]), &[]);
    let nowhere = USER + (1 << 40);
    let mut body = words(&[2, 0]);
    body.extend(longs(&[nowhere, nowhere + 0x8000, nowhere + 0x4000, 0]));
    guest.peer.ask(SET_VRING_ADDR, &body, &[]);
    guest.peer.vring_fd(SET_VRING_KICK, 2, None);
    let ack = guest.peer.try_ask(SET_VRING_ENABLE, &words(&[2, 1]), &[]);
    assert_eq!(ack, Some(Ack::Refused));
    (0..3).for_each(|queue| guest.start_queue(queue));
    guest.ready(0);
}

#[test]
fn garbage_ends_the_session_and_the_next_peer_is_served() {
    let host = Host::with_disk(1);
    for garbage in [&b"GET / HTTP/1.1\r\nHost: example\r\n\r\n"[..], &[0xff; 64], &[0; 12]] {
        let mut peer = Peer::connect(&host.socket());
        peer.send_bytes(garbage);
        assert!(peer.is_closed());
        host.wait_until_free();
    }
    // A message whose type we never offered.
    let mut guest = Guest::connect(&host.socket(), LINUX);
    guest.peer.send(99, &[], &[]);
    assert!(guest.peer.is_closed());
    host.wait_until_free();
    Guest::start(&host.socket(), LINUX, 1).ready(0);
}

#[test]
fn an_error_that_cannot_be_answered_ends_the_session_at_once() {
    let host = Host::new(1);
    let mut guest = Guest::connect(&host.socket(), LINUX);
    // GET_VRING_BASE has no way to say no.
    guest.peer.send(GET_VRING_BASE, &words(&[66, 0]), &[]);
    assert_eq!(guest.peer.reply(GET_VRING_BASE), None);
    host.wait_until_free();
    // Nor has SET_LOG_BASE: a log beyond the end of its file.
    use std::os::fd::AsFd;
    let mut guest = Guest::connect(&host.socket(), LINUX);
    let (_, fd) = region(0, 4096);
    guest.peer.send(SET_LOG_BASE, &longs(&[8192, 0]), &[fd.as_fd()]);
    assert_eq!(guest.peer.reply(SET_LOG_BASE), None);
}

#[test]
fn a_second_peer_is_refused_at_once_and_the_first_is_not_disturbed() {
    let host = Host::with_disk(1);
    let mut guest = Guest::start(&host.socket(), LINUX, 1);
    guest.ready(0);
    let since = Instant::now();
    let mut second = Peer::connect(&host.socket());
    second.send(GET_FEATURES, &[], &[]);
    assert_eq!(second.reply(GET_FEATURES), None);
    // Promptly: QEMU waits for the reply in its main loop. A generous bound for a busy machine.
    assert!(since.elapsed() < Duration::from_secs(10));
    guest.ready(0);
    drop(guest);
    host.wait_until_free();
    Guest::start(&host.socket(), LINUX, 1).ready(0);
}

#[test]
fn a_peer_that_says_nothing_gives_way() {
    let host = Host::with_disk(1);
    let _silent = UnixStream::connect(host.socket()).unwrap();
    wait_until("it is accepted", || host.controllers.list(None).unwrap()[0].session.is_some());
    Guest::start(&host.socket(), LINUX, 1).ready(0);
}

#[test]
fn a_peer_that_stops_within_a_message_is_thrown_out() {
    let host = Host::with_disk(1);
    let mut peer = Peer::connect(&host.socket());
    assert_eq!(peer.get_u64(GET_FEATURES), OFFERED);
    // A header that promises 8 bytes, and no more.
    peer.send_bytes(&words(&[SET_FEATURES, 1, 8]));
    assert!(peer.is_closed());
    host.wait_until_free();
    Guest::start(&host.socket(), LINUX, 1).ready(0);
}
