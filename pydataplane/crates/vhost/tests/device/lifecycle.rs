//! Rings that start and stop, memory that changes, peers that leave.

use std::io::Read;
use std::os::fd::AsFd;
use std::os::unix::net::UnixStream;
use std::time::Duration;

use vhost_scsi::{ControllerError, ControllerOptions};

use crate::guest::*;
use crate::host::*;
use crate::peer::*;

#[test]
fn seabios_first_then_linux_on_the_same_connection() {
    let host = Host::with_disk(2);
    // SeaBIOS: no features to speak of, one request queue, polled.
    let mut guest = Guest::connect(&host.socket(), 1 << 32 | F_PROTOCOL);
    guest.start_queue(2);
    for _ in 0..3 {
        guest.ready(0);
    }
    let scan = guest.submit(2, flat(77), 1, &[0x12, 0, 0, 0, 36, 0], &[], 36);
    assert_eq!(guest.finish(&scan).response, 3);
    // It resets the device: QEMU stops the ring.
    let taken = guest.peer.base(2);
    assert!(taken >= 4);
    // Linux starts afresh, with rings of zeros at other features.
    guest.features = LINUX;
    guest.peer.ask(SET_FEATURES, &LINUX.to_le_bytes(), &[]);
    for queue in 0..4 {
        guest.start_queue(queue);
    }
    guest.ready(0);
    assert_eq!(guest.read_blocks(0, 0, 1).status, 0);
    // And a reboot: the same again.
    for queue in 0..4 {
        guest.peer.base(queue);
    }
    guest.start_queue(2);
    guest.ready(0);
}

#[test]
fn get_vring_base_returns_when_the_io_has_ended() {
    let (host, gate) = Host::gated(2);
    let mut guest = Guest::start(&host.socket(), LINUX, 2);
    guest.ready(0);
    gate.shut();
    let before = u32::from(guest.used_index(2));
    let requests: Vec<_> = (0..8u32)
        .map(|n| guest.submit(2, flat(0), u64::from(n), &rw10(0x2a, n, 1), &[3; 512], 0))
        .collect();
    gate.wait_for(8);
    let opener = std::thread::spawn(move || {
        std::thread::sleep(Duration::from_millis(30));
        gate.open();
    });
    assert_eq!(guest.peer.base(2), before + 8);
    // Everything is in the used ring at that moment.
    assert_eq!(u32::from(guest.used_index(2)), before + 8);
    opener.join().unwrap();
    for _ in &requests {
        let (head, written) = guest.try_used(2).unwrap();
        let request = requests.iter().find(|r| r.head == head).unwrap();
        assert_eq!(guest.reply(request, written).status, 0);
    }
    // Stopped: what is offered now waits until the ring goes on where it was.
    let late = guest.submit(2, flat(0), 99, &[0; 6], &[], 0);
    std::thread::sleep(Duration::from_millis(10));
    assert_eq!(guest.try_used(2), None);
    guest.describe_queue(2, (before + 8) as u16, false);
    assert_eq!(guest.finish(&late).response, 0);
}

#[test]
fn requests_that_waited_for_the_ring_to_start_are_seen_without_a_kick() {
    let host = Host::with_disk(1);
    let mut guest = Guest::start(&host.socket(), LINUX, 1);
    guest.ready(0);
    let base = guest.peer.base(2);
    let request = guest.submit(2, flat(0), 1, &[0; 6], &[], 0);
    // The kick went into a descriptor that nobody watches: a fresh one is given.
    guest.describe_queue(2, base as u16, false);
    assert_eq!(guest.finish(&request).status, 0);
}

#[test]
fn rings_are_enabled_as_negotiated() {
    let host = Host::with_disk(1);
    let mut guest = Guest::start(&host.socket(), LINUX, 1);
    guest.ready(0);
    guest.peer.ask(SET_VRING_ENABLE, &words(&[2, 0]), &[]);
    let request = guest.submit(2, flat(0), 1, &[0; 6], &[], 0);
    std::thread::sleep(Duration::from_millis(10));
    assert_eq!(guest.try_used(2), None, "a disabled ring takes nothing");
    guest.peer.ask(SET_VRING_ENABLE, &words(&[2, 1]), &[]);
    assert_eq!(guest.finish(&request).status, 0);
    // RESET_OWNER stops and disables all.
    guest.peer.ask(RESET_OWNER, &[], &[]);
    let request = guest.submit(2, flat(0), 1, &[0; 6], &[], 0);
    std::thread::sleep(Duration::from_millis(10));
    assert_eq!(guest.try_used(2), None);
    let base = guest.used_index(2);
    guest.describe_queue(2, base, false);
    assert_eq!(guest.finish(&request).status, 0);
}

#[test]
fn memory_changes_under_load() {
    let (host, gate) = Host::gated(2);
    host.malloc("disk");
    host.add(1, "disk");
    let mut guest = Guest::start(&host.socket(), LINUX, 2);
    guest.ready(0);
    guest.ready(1);
    for round in 0..20u32 {
        // I/O in flight on both reactors while the table changes.
        gate.shut();
        let waiting = [
            guest.submit(2, flat(0), 1, &rw10(0x2a, round, 1), &[round as u8; 512], 0),
            guest.submit(3, flat(0), 2, &rw10(0x28, 4000, 1), &[], 512),
        ];
        gate.wait_for(2);
        let opener = {
            let gate = gate.clone();
            std::thread::spawn(move || {
                std::thread::sleep(Duration::from_millis(2));
                gate.open();
            })
        };
        match round % 3 {
            0 => {
                let (spec, fd) = region(0x1_0000_0000, 1 << 20);
                let mut body = words(&[0, 0]);
                body.extend(spec_bytes(&spec));
                guest.peer.ask(ADD_MEM_REG, &body, &[fd.as_fd()]);
                guest.regions.push((spec, fd));
            }
            1 => {
                let (spec, _) = guest.regions.pop().unwrap();
                let mut body = words(&[0, 0]);
                body.extend(spec_bytes(&spec));
                guest.peer.ask(REM_MEM_REG, &body, &[]);
            }
            _ => guest.tell_memory(),
        }
        opener.join().unwrap();
        for request in &waiting {
            assert_eq!(guest.finish(request).status, 0, "round {round}");
        }
        assert_eq!(guest.read_blocks(0, round, 1).data, [round as u8; 512]);
        assert_eq!(guest.read_blocks(1, round, 1).status, 0);
    }
}

#[test]
fn a_ring_whose_memory_goes_away_and_comes_back_goes_on_where_it_was() {
    let host = Host::with_disk(1);
    let mut guest = Guest::start(&host.socket(), LINUX, 1);
    guest.ready(0);
    guest.write_blocks(0, 1, &[9; 512]);
    let (spec, fd) = (guest.regions[0].0, guest.regions[0].1.try_clone().unwrap());
    let mut body = words(&[0, 0]);
    body.extend(spec_bytes(&spec));
    guest.peer.ask(REM_MEM_REG, &body, &[]);
    // Offered while the target has no memory at all.
    let request = guest.submit(2, flat(0), 1, &rw10(0x28, 1, 1), &[], 512);
    std::thread::sleep(Duration::from_millis(10));
    assert_eq!(guest.try_used(2), None);
    guest.peer.ask(ADD_MEM_REG, &body, &[fd.as_fd()]);
    assert_eq!(guest.finish(&request).data, [9; 512]);
    assert_eq!(guest.control(&tmf(6, flat(0), 0), 1), [0]);
}

#[test]
fn data_in_a_region_that_was_added_is_reached_and_not_after_it_went() {
    let host = Host::with_disk(1);
    let mut guest = Guest::start(&host.socket(), LINUX, 1);
    guest.ready(0);
    let (spec, fd) = region(0x1_0000_0000, 1 << 20);
    let mut body = words(&[0, 0]);
    body.extend(spec_bytes(&spec));
    guest.peer.ask(ADD_MEM_REG, &body, &[fd.as_fd()]);
    let read_there = |guest: &mut Guest| {
        let mut header = flat(0).to_vec();
        header.extend([0; 11]);
        header.extend(rw10(0x28, 0, 1));
        header.resize(51, 0);
        let (at, response) = (guest.alloc(51), guest.alloc(108));
        guest.write(at, &header);
        let buffers = [
            Buffer { addr: at, len: 51, write: false },
            Buffer { addr: response, len: 108, write: true },
            Buffer { addr: 0x1_0000_0000, len: 512, write: true },
        ];
        let head = guest.indirect(2, &buffers);
        guest.offer(2, head);
        head
    };
    let head = read_there(&mut guest);
    assert_eq!(guest.used(2), (head, 620));
    guest.peer.ask(REM_MEM_REG, &body, &[]);
    read_there(&mut guest);
    wait_until("the chain is refused", || host.stats().controller.malformed == 1);
}

#[test]
fn a_peer_that_leaves_in_the_middle_of_its_io_harms_nobody() {
    let (host, gate) = Host::gated(2);
    for round in 0..5u8 {
        let mut guest = Guest::start(&host.socket(), LINUX, 2);
        guest.ready(0);
        gate.shut();
        for n in 0..16u32 {
            let queue = 2 + n as usize % 2;
            guest.submit(queue, flat(0), 1, &rw10(0x2a, n, 1), &[round; 512], 0);
        }
        gate.wait_for(16);
        let (head, _) = guest.submit_control(&tmf(5, flat(0), 0), 1);
        assert_eq!(head, SIZE.min(head));
        guest.peer.shutdown();
        drop(guest);
        std::thread::sleep(Duration::from_millis(5));
        gate.open();
        host.wait_until_free();
    }
    // What was in flight was finished before the memory was let go.
    let mut guest = Guest::start(&host.socket(), LINUX, 1);
    guest.ready(0);
    for n in 0..16 {
        assert_eq!(guest.read_blocks(0, n, 1).data, [4; 512]);
    }
}

#[test]
fn a_peer_that_truncates_its_memory_is_thrown_out() {
    let host = Host::with_disk(1);
    let mut guest = Guest::start(&host.socket(), LINUX, 1);
    guest.ready(0);
    let request = guest.submit(2, flat(0), 1, &rw10(0x28, 0, 8), &[], 4096);
    guest.finish(&request);
    // The buffers are beyond the new end; the rings are not.
    rustix::fs::ftruncate(&guest.regions[0].1, 0x10_0000).unwrap();
    let rings = Guest::rings_at(2);
    let mut desc = 0x80_0000u64.to_le_bytes().to_vec();
    // 64 bytes to read, and behind them (NEXT, 4) 108 to write.
    desc.extend([64, 0, 0, 0, 1, 0, 4, 0]);
    desc.extend(0x80_1000u64.to_le_bytes());
    desc.extend([108, 0, 0, 0, 2, 0, 0, 0]);
    guest.write(rings + 16 * 3, &desc);
    guest.offer(2, 3);
    assert!(guest.peer.is_closed());
    host.wait_until_free();
    Guest::start(&host.socket(), LINUX, 1).ready(0);
}

#[test]
fn reactors_sleep_and_wake_by_a_kick() {
    let host = Host::with_disk(2);
    let mut guest = Guest::start(&host.socket(), LINUX, 2);
    guest.ready(0);
    for queue in [2, 3, 2, 3] {
        // Long enough for both to be asleep: they spin 20 microseconds.
        std::thread::sleep(Duration::from_millis(20));
        let request = guest.submit(queue, flat(0), 1, &[0; 6], &[], 0);
        assert_eq!(guest.finish(&request).status, 0);
    }
}

#[test]
fn controllers_come_and_go() {
    let host = Host::with_disk(1);
    let all = &host.controllers;
    assert!(matches!(
        all.create("vm0", ControllerOptions::default()),
        Err(ControllerError::Exists(_))
    ));
    assert!(matches!(
        all.create("a/b", ControllerOptions::default()),
        Err(ControllerError::Name(_))
    ));
    let mask = ControllerOptions { cpus: Some(vec![15]), ..Default::default() };
    assert!(matches!(all.create("vm1", mask), Err(ControllerError::NoReactor(_))));
    let mask = ControllerOptions { cpus: Some(vec![0]), ..Default::default() };
    all.create("vm1", mask).unwrap();
    let info = all.list(Some("vm1")).unwrap().remove(0);
    assert_eq!((info.name.as_str(), info.cpus.as_slice()), ("vm1", &[0][..]));
    assert!(info.targets.is_empty() && info.session.is_none());
    let path = host.socket().with_file_name("vm1");
    assert!(path.exists());
    all.delete("vm1", false).unwrap();
    assert!(!path.exists());
    assert!(matches!(all.delete("vm1", false), Err(ControllerError::NotFound(_))));
    assert!(matches!(all.list(Some("vm1")), Err(ControllerError::NotFound(_))));

    let mut guest = Guest::start(&host.socket(), LINUX, 1);
    guest.ready(0);
    // A queue is served a moment before the controller's thread says so.
    let info = || all.list(Some("vm0")).unwrap().remove(0);
    wait_until("it is started", || info().session.is_some_and(|s| s.started));
    let info = info();
    let shown = &info.targets[0];
    assert_eq!((shown.number, shown.bdev_name.as_str()), (0, "disk0"));
    assert!(matches!(all.delete("vm0", false), Err(ControllerError::Connected(_))));
    guest.ready(0);
    all.delete("vm0", true).unwrap();
    assert!(guest.peer.is_closed());
    assert!(host.registry.owners("disk0").is_empty());
}

#[test]
fn whoever_comes_to_a_controller_that_is_not_started_may_be_refused_instead_of_waiting() {
    let host = Host::with_disk(1);
    host.controllers.delete("vm0", false).unwrap();
    let delay = ControllerOptions { delay: true, ..Default::default() };
    host.controllers.create("vm0", delay).unwrap();
    host.add(0, "disk0");
    let mut waiting = UnixStream::connect(host.socket()).unwrap();
    host.controllers.refuse("vm0").unwrap();
    wait_until("one is refused", || UnixStream::connect(host.socket()).is_err());
    let end = waiting.read(&mut [0]);
    assert!(matches!(end, Ok(0) | Err(_)), "nor does it wait that came before: {end:?}");
    host.controllers.start("vm0").unwrap();
    wait_until("it is opened", || UnixStream::connect(host.socket()).is_ok());
    host.wait_until_free();
    host.controllers.refuse("vm0").unwrap();
    let mut guest = Guest::start(&host.socket(), LINUX, 1);
    guest.ready(0);
    assert_eq!(guest.read_blocks(0, 0, 1).status, 0);
}
