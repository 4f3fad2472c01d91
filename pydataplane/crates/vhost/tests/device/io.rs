//! Requests: data, addressing, framing, suppression, several queues.

use std::time::Duration;

use vhost_scsi::{ControllerError, TargetOptions};

use crate::guest::*;
use crate::host::*;

fn pattern(seed: u8, len: usize) -> Vec<u8> {
    (0..len).map(|i| (i as u8).wrapping_mul(31).wrapping_add((i >> 8) as u8) ^ seed).collect()
}

#[test]
fn data_comes_back_as_written_with_every_set_of_ring_features() {
    let host = Host::with_disk(1);
    let sets = [
        LINUX,
        LINUX & !F_EVENT_IDX,
        LINUX & !F_INDIRECT,
        LINUX & !F_PROTOCOL,
        LINUX & !(F_PROTOCOL | F_EVENT_IDX | F_INDIRECT),
        // A driver of before virtio 1.0, such as SeaBIOS.
        F_PROTOCOL,
    ];
    for (seed, features) in sets.into_iter().enumerate() {
        let mut guest = Guest::start(&host.socket(), features, 1);
        guest.ready(0);
        let data = pattern(seed as u8, 512 * 64);
        let written = guest.write_blocks(0, 100, &data);
        assert_eq!((written.response, written.status, written.residual), (0, 0, 0));
        let read = guest.read_blocks(0, 100, 64);
        assert_eq!((read.response, read.status, read.residual), (0, 0, 0));
        assert_eq!(read.data, data, "features {features:#x}");
        assert!(guest.called(2, DEADLINE), "features {features:#x}");
        drop(guest);
        host.wait_until_free();
    }
}

#[test]
fn both_lun_formats_reach_the_disk() {
    let host = Host::with_disk(1);
    let mut guest = Guest::start(&host.socket(), LINUX, 1);
    guest.ready(0);
    // Linux says 0x40, SPDK's initiator 0x00.
    for lun in [[1, 0, 0x40, 0, 0, 0, 0, 0], [1, 0, 0x00, 0, 0, 0, 0, 0]] {
        let inquiry = guest.submit(2, lun, 1, &[0x12, 0, 0, 0, 36, 0], &[], 36);
        let reply = guest.finish(&inquiry);
        assert_eq!((reply.response, reply.status, reply.data[0]), (0, 0, 0), "{lun:?}");
        assert_eq!(reply.data.len(), 36);
    }
}

#[test]
fn a_target_may_have_larger_blocks_than_its_volume_and_grows_by_whole_ones() {
    let host = Host::with_disk(1);
    let null = host.null("null");
    let add = |size: u32| {
        let options = TargetOptions { block_size: Some(size), ..Default::default() };
        host.controllers.add_target("vm0", 5, "null", options)
    };
    for wrong in [0, 1024, 8192] {
        assert!(matches!(add(wrong), Err(ControllerError::Lun(_))), "{wrong}");
    }
    assert!(host.registry.owners("null").is_empty(), "nothing is held");
    add(4096).unwrap();
    let shown = host.controllers.list(Some("vm0")).unwrap().remove(0).targets;
    assert_eq!(shown.iter().map(|t| t.block_size).collect::<Vec<_>>(), [512, 4096]);

    let mut guest = Guest::start(&host.socket(), LINUX, 1);
    guest.ready(5);
    let capacity = |guest: &mut Guest| {
        let reply = guest.scsi(5, &[0x25, 0, 0, 0, 0, 0, 0, 0, 0, 0], &[], 8);
        let (last, size) = reply.data.split_at(4);
        assert_eq!(size, 4096u32.to_be_bytes());
        u32::from_be_bytes(last.try_into().unwrap())
    };
    assert_eq!(capacity(&mut guest), 8192 / 8 - 1);
    let read = guest.scsi(5, &rw10(0x28, 1023, 1), &[], 4096);
    assert_eq!((read.status, read.residual), (0, 0));
    assert_eq!(guest.scsi(5, &rw10(0x28, 1024, 1), &[], 4096).sense[12], 0x21);

    let buffer = guest.give_event_buffer();
    null.resize(16384 + 7).unwrap();
    host.registry.notify_resized("null");
    assert_eq!(guest.event(buffer).2, 0x2a | 0x09 << 8);
    guest.ready(5);
    assert_eq!(capacity(&mut guest), 16384 / 8 - 1);
}

#[test]
fn what_is_not_there_is_answered_as_the_standards_say() {
    let host = Host::with_disk(1);
    let mut guest = Guest::start(&host.socket(), LINUX, 1);
    guest.ready(0);
    let inquiry = [0x12, 0, 0, 0, 36, 0];
    let mut ask = |lun: [u8; 8], cdb: &[u8], data_in: usize| {
        let request = guest.submit(2, lun, 1, cdb, &[], data_in);
        guest.finish(&request)
    };
    // No such target (virtio 1.2 5.6.6.1): BAD_TARGET, which Linux takes as nothing there.
    for lun in [flat(1), flat(254), flat(255), [0; 8], [2, 0, 0, 0, 0, 0, 0, 0]] {
        let reply = ask(lun, &inquiry, 36);
        assert_eq!((reply.response, reply.residual), (3, 36), "{lun:?}");
    }
    // A target without that LUN: qualifier 011b and type 1Fh (SPC-4 6.6.2).
    for lun in [[1, 0, 0x40, 1, 0, 0, 0, 0], [1, 0, 0x7f, 0xff, 0, 0, 0, 0]] {
        let reply = ask(lun, &inquiry, 36);
        assert_eq!((reply.response, reply.status, reply.data[0]), (0, 0, 0x7f), "{lun:?}");
        // ... and LOGICAL UNIT NOT SUPPORTED for everything else.
        let reply = ask(lun, &[0; 6], 0);
        assert_eq!((reply.response, reply.status), (0, 2));
        assert_eq!((reply.sense[2] & 15, reply.sense[12], reply.sense[13]), (5, 0x25, 0));
    }
    // The REPORT LUNS well-known unit lists the targets.
    let well_known = [0xc1, 1, 0, 0, 0, 0, 0, 0];
    let reply = ask(well_known, &[0xa0, 0, 0, 0, 0, 0, 0, 0, 0, 64, 0, 0], 64);
    assert_eq!((reply.response, reply.status), (0, 0));
    assert_eq!(reply.data, [0, 0, 0, 8, 0, 0, 0, 0, 1, 0, 0x40, 0, 0, 0, 0, 0]);
    let reply = ask(well_known, &inquiry, 36);
    assert_eq!((reply.status, reply.data[0]), (0, 0x1e));
    assert_eq!(ask(well_known, &[0; 6], 0).status, 0);
    assert_eq!(ask(well_known, &rw10(0x28, 0, 1), 512).status, 2);
}

#[test]
fn residual_tells_what_was_not_used() {
    let host = Host::with_disk(1);
    let mut guest = Guest::start(&host.socket(), LINUX, 1);
    guest.ready(0);
    let reply = guest.scsi(0, &[0x12, 0, 0, 0, 36, 0], &[], 100);
    assert_eq!((reply.status, reply.residual, reply.data.len()), (0, 64, 36));
    // Less room than the command moves: OVERRUN, and nothing was done.
    let reply = guest.scsi(0, &rw10(0x28, 0, 8), &[], 512);
    assert_eq!(reply.response, 1);
    // An error: sense data, everything residual.
    let reply = guest.scsi(0, &rw10(0x28, 8192, 1), &[], 512);
    assert_eq!((reply.response, reply.status, reply.residual), (0, 2, 512));
    assert_eq!((reply.sense.len(), reply.sense[2] & 15, reply.sense[12]), (18, 5, 0x21));
}

#[test]
fn any_framing_of_header_data_and_response_is_taken() {
    let host = Host::with_disk(1);
    let mut guest = Guest::start(&host.socket(), LINUX, 1);
    guest.ready(0);
    let data = pattern(9, 1024);
    // VIRTIO_F_ANY_LAYOUT: header and data in one buffer, cut at odd places.
    let mut out = flat(0).to_vec();
    out.extend([0; 11]);
    out.extend(rw10(0x2a, 7, 2));
    out.resize(51, 0);
    out.extend(&data);
    for cuts in [vec![], vec![1, 50, 52, 600], vec![10, 20, 30, 51], vec![1074]] {
        let at = guest.alloc(out.len());
        guest.write(at, &out);
        let response = guest.alloc(108);
        let mut buffers = Vec::new();
        let mut from = 0;
        for cut in cuts.iter().copied().chain([out.len()]) {
            let len = (cut - from) as u32;
            buffers.push(Buffer { addr: at + from as u64, len, write: false });
            from = cut;
        }
        // The response in three pieces.
        for (from, len) in [(0, 5), (5, 7), (12, 96)] {
            buffers.push(Buffer { addr: response + from, len, write: true });
        }
        guest.write(response, &[0xee; 12]);
        let head = guest.indirect(2, &buffers);
        guest.offer(2, head);
        assert_eq!(guest.used(2), (head, 108));
        assert_eq!(guest.read(response, 12), [0; 12], "cuts {cuts:?}");
        assert_eq!(guest.read_blocks(0, 7, 2).data, data);
        guest.write_blocks(0, 7, &[0; 1024]);
    }
}

#[test]
fn a_request_that_is_too_short_gets_a_failure_and_the_queue_goes_on() {
    let host = Host::with_disk(1);
    let mut guest = Guest::start(&host.socket(), LINUX, 1);
    guest.ready(0);
    for (readable, writable) in [(50, 108), (51, 107), (1, 12)] {
        let (a, b) = (guest.alloc(64), guest.alloc(128));
        guest.write(a, &[0; 64]);
        let buffers = [
            Buffer { addr: a, len: readable, write: false },
            Buffer { addr: b, len: writable, write: true },
        ];
        let head = guest.chain(2, &buffers);
        guest.offer(2, head);
        assert_eq!(guest.used(2), (head, 12));
        assert_eq!(guest.read(b, 12)[11], 9, "VIRTIO_SCSI_S_FAILURE");
    }
    assert_eq!(host.stats().controller.malformed, 3);
    guest.ready(0);
}

#[test]
fn a_malformed_chain_stops_its_queue_and_nothing_else() {
    let host = Host::with_disk(2);
    let mut guest = Guest::start(&host.socket(), LINUX, 2);
    guest.ready(0);
    let flags = rustix::event::EventfdFlags::CLOEXEC | rustix::event::EventfdFlags::NONBLOCK;
    let err = rustix::event::eventfd(0, flags).unwrap();
    guest.peer.vring_fd(crate::peer::SET_VRING_ERR, 3, Some(&err));
    // A buffer outside memory, on the second request queue.
    let bad = [Buffer { addr: 1 << 40, len: 51, write: false }];
    let head = guest.chain(3, &bad);
    guest.offer(3, head);
    wait_until("it is counted", || host.stats().controller.malformed == 1);
    let mut told = [0; 8];
    wait_until("the peer is told", || rustix::io::read(&err, &mut told).is_ok());
    assert_eq!(u64::from_ne_bytes(told), 1, "the peer is told by the error descriptor");
    // The queue takes no more; the others do not notice.
    let ignored = guest.submit(3, flat(0), 1, &[0; 6], &[], 0);
    for _ in 0..20 {
        guest.ready(0);
    }
    assert_eq!(guest.try_used(3), None);
    assert_ne!(ignored.head, head);
    // Nothing was taken. A driver that resets the queue can use it again.
    assert_eq!(guest.peer.base(3), 0);
    guest.start_queue(3);
    let request = guest.submit(3, flat(0), 1, &[0; 6], &[], 0);
    assert_eq!(guest.finish(&request).response, 0);
}

#[test]
fn every_kind_of_broken_ring_is_counted() {
    type Break = fn(&mut Guest);
    let breaks: [Break; 5] = [
        // The available index runs away.
        |g| {
            let avail = g.memory.range(Guest::rings_at(2) + 0x4000, 4).unwrap();
            avail.store_release_u16(2, 1000).unwrap();
            g.kick(2);
        },
        // A head beyond the table.
        |g| g.offer(2, SIZE),
        // A chain that loops.
        |g| {
            let table = Guest::rings_at(2);
            let mut desc = 0x20_0000u64.to_le_bytes().to_vec();
            desc.extend([8, 0, 0, 0, 1, 0, 5, 0]);
            g.write(table + 16 * 5, &desc);
            g.offer(2, 5);
        },
        // Readable behind writable.
        |g| {
            let buffers = [
                Buffer { addr: 0x20_0000, len: 108, write: true },
                Buffer { addr: 0x20_1000, len: 51, write: false },
            ];
            let head = g.chain(2, &buffers);
            g.offer(2, head);
        },
        // A buffer of no bytes.
        |g| {
            let head = g.chain(2, &[Buffer { addr: 0x20_0000, len: 0, write: false }]);
            g.offer(2, head);
        },
    ];
    let host = Host::with_disk(1);
    for (nth, break_it) in breaks.into_iter().enumerate() {
        let mut guest = Guest::start(&host.socket(), LINUX, 1);
        guest.ready(0);
        break_it(&mut guest);
        wait_until("it is counted", || host.stats().controller.malformed == nth as u64 + 1);
        drop(guest);
        host.wait_until_free();
    }
    Guest::start(&host.socket(), LINUX, 1).ready(0);
}

#[test]
fn the_same_head_twice_stops_the_queue() {
    let (host, gate) = Host::gated(1);
    let mut guest = Guest::start(&host.socket(), LINUX, 1);
    guest.ready(0);
    gate.shut();
    let request = guest.submit(2, flat(0), 1, &rw10(0x28, 0, 1), &[], 512);
    gate.wait_for(1);
    guest.offer(2, request.head);
    wait_until("it is counted", || host.stats().controller.malformed == 1);
    // The request that was in flight ends all the same.
    gate.open();
    assert_eq!(guest.finish(&request).status, 0);
}

#[test]
fn the_same_head_twice_in_one_batch_is_served_once() {
    let host = Host::new(1);
    let turnstile = host.turnstile("slow");
    host.add(0, "slow");
    let mut guest = Guest::start(&host.socket(), LINUX, 1);
    guest.ready(0);
    let before = guest.used_index(2);
    // The reactor is in the first one while the others come.
    let first = guest.submit(2, flat(0), 1, &rw10(0x28, 0, 1), &[], 512);
    turnstile.wait_for(1);
    let second = guest.submit(2, flat(0), 2, &rw10(0x28, 1, 1), &[], 512);
    guest.offer(2, second.head);
    turnstile.let_through(2);
    assert_eq!(guest.finish(&first).status, 0);
    assert_eq!(guest.finish(&second).status, 0);
    wait_until("it is counted", || host.stats().controller.malformed == 1);
    assert_eq!(guest.used_index(2), before.wrapping_add(2), "nothing else came back");
}

#[test]
fn what_ended_is_shown_before_the_rest_of_its_batch_ended() {
    let host = Host::new(1);
    let turnstile = host.turnstile("slow");
    host.add(0, "slow");
    let mut guest = Guest::start(&host.socket(), LINUX, 1);
    guest.ready(0);
    let mut submit = |nth| guest.submit(2, flat(0), nth, &rw10(0x28, nth as u32, 1), &[], 512);
    let first = submit(0);
    turnstile.wait_for(1);
    // One batch, because the reactor is in the first one; it stays in the last of these.
    let rest: Vec<_> = (1..=20).map(&mut submit).collect();
    turnstile.let_through(20);
    assert_eq!(guest.finish(&first).status, 0);
    // All but the last group of eight, wherever the reactor's turn ended meanwhile.
    for request in &rest[..12] {
        assert_eq!(guest.finish(request).status, 0);
    }
    turnstile.let_through(1);
    for request in &rest[12..] {
        assert_eq!(guest.finish(request).status, 0);
    }
}

#[test]
fn many_requests_in_flight_on_several_queues_and_reactors() {
    let (host, gate) = Host::gated(2);
    host.malloc("disk");
    host.add(9, "disk");
    let mut guest = Guest::start(&host.socket(), LINUX, 3);
    guest.ready(0);
    guest.ready(9);
    gate.shut();
    let mut waiting = Vec::new();
    for nth in 0..90u32 {
        let data = pattern(nth as u8, 512);
        let queue = 2 + nth as usize % 3;
        let id = u64::from(nth);
        waiting.push(guest.submit(queue, flat(0), id, &rw10(0x2a, nth, 1), &data, 0));
    }
    gate.wait_for(90);
    // Another disk on the same queues is not held up.
    for queue in 2..5 {
        let data = pattern(queue as u8, 512);
        let request = guest.submit(queue, flat(9), 1000, &rw10(0x2a, 5, 1), &data, 0);
        assert_eq!(guest.finish(&request).status, 0);
        let request = guest.submit(queue, flat(9), 1001, &rw10(0x28, 5, 1), &[], 512);
        assert_eq!(guest.finish(&request).data, data);
    }
    gate.open();
    for queue in 2..5 {
        for _ in 0..30 {
            let (head, written) = guest.used(queue);
            let at = waiting.iter().position(|r| r.queue == queue && r.head == head).unwrap();
            let request = waiting.swap_remove(at);
            assert_eq!(guest.reply(&request, written).status, 0);
        }
    }
    for nth in 0..90 {
        assert_eq!(guest.read_blocks(0, nth, 1).data, pattern(nth as u8, 512));
    }
}

#[test]
fn a_queue_that_stops_leaves_what_others_have_in_flight_to_them() {
    let (host, gate) = Host::gated(1);
    let mut guest = Guest::start(&host.socket(), LINUX, 3);
    guest.ready(0);
    for stopped in 2..5 {
        guest.write_blocks(0, 7, &pattern(stopped as u8, 512));
        gate.shut();
        let others = (2..5).filter(|queue| *queue != stopped);
        let read = |queue| guest.submit(queue, flat(0), 1, &rw10(0x28, 7, 1), &[], 512);
        let requests: Vec<_> = others.map(read).collect();
        gate.wait_for(2);
        let base = guest.peer.base(stopped as u32);
        gate.open();
        for request in &requests {
            assert_eq!(guest.finish(request).data, pattern(stopped as u8, 512));
        }
        guest.describe_queue(stopped, base as u16, false);
    }
}

#[test]
fn calls_are_suppressed_as_the_driver_asks() {
    let host = Host::with_disk(1);
    // VIRTQ_AVAIL_F_NO_INTERRUPT without EVENT_IDX.
    let mut guest = Guest::start(&host.socket(), LINUX & !F_EVENT_IDX, 1);
    guest.ready(0);
    while guest.called(2, Duration::from_millis(50)) {}
    guest.write(Guest::rings_at(2) + 0x4000, &1u16.to_le_bytes());
    guest.ready(0);
    assert!(!guest.called(2, Duration::from_millis(50)));
    guest.write(Guest::rings_at(2) + 0x4000, &0u16.to_le_bytes());
    guest.ready(0);
    assert!(guest.called(2, DEADLINE));
}

#[test]
fn a_queue_without_descriptors_is_served_by_looking() {
    let host = Host::with_disk(1);
    let mut guest = Guest::start(&host.socket(), LINUX, 1);
    guest.peer.vring_fd(crate::peer::SET_VRING_KICK, 2, None);
    guest.peer.vring_fd(crate::peer::SET_VRING_CALL, 2, None);
    std::thread::sleep(Duration::from_millis(5));
    guest.ready(0);
    // A call that was missed is made up for when there is a descriptor again.
    let call = rustix::event::eventfd(0, rustix::event::EventfdFlags::NONBLOCK).unwrap();
    guest.peer.vring_fd(crate::peer::SET_VRING_CALL, 2, Some(&call));
    let mut count = [0; 8];
    wait_until("it is called", || rustix::io::read(&call, &mut count).is_ok());
}

#[test]
fn a_new_call_descriptor_is_called_though_the_old_one_was() {
    let host = Host::with_disk(1);
    let mut guest = Guest::start(&host.socket(), LINUX, 1);
    // As QEMU starts a queue: until its second SET_VRING_CALL is read, requests end with a call to
    // a descriptor that QEMU does not look at (vhost_virtqueue_mask's).
    guest.ready(0);
    let call = rustix::event::eventfd(0, rustix::event::EventfdFlags::NONBLOCK).unwrap();
    guest.peer.vring_fd(crate::peer::SET_VRING_CALL, 2, Some(&call));
    let mut count = [0; 8];
    wait_until("it is called", || rustix::io::read(&call, &mut count).is_ok());
}

#[test]
fn statistics_count_what_the_guest_did() {
    let host = Host::with_disk(1);
    let mut guest = Guest::start(&host.socket(), LINUX, 1);
    guest.ready(0);
    guest.write_blocks(0, 0, &[1; 2048]);
    guest.read_blocks(0, 0, 2);
    guest.read_blocks(0, 0, 1);
    guest.scsi(0, &[0x35, 0, 0, 0, 0, 0, 0, 0, 0, 0], &[], 0);
    guest.read_blocks(0, 9000, 1);
    let stats = host.stats();
    let (number, name, lun) = &stats.targets[0];
    assert_eq!((*number, name.as_str()), (0, "disk0"));
    assert_eq!((lun.writes, lun.write_bytes), (1, 2048));
    assert_eq!((lun.reads, lun.read_bytes), (3, 1536));
    assert_eq!(lun.flushes, 1);
    assert!(lun.errors >= 1 && lun.others >= 1);
    assert!(stats.controller.requests >= 7 && stats.controller.errors >= 1);
    assert!(stats.controller.interrupts >= 1);
}
