//! The dirty log of live migration.

use std::os::fd::AsFd;

use guestmem::{DirtyLog, LOG_PAGE};

use crate::guest::*;
use crate::host::*;
use crate::peer::*;

/// Pages of guest memory that the log covers.
const PAGES: u64 = 4096;

/// A log of its own file, shared with the target by SET_LOG_BASE.
fn share_log(guest: &mut Guest) -> DirtyLog {
    let (_, fd) = region(0, PAGES / 8);
    let log = DirtyLog::new(fd.as_fd(), 0, PAGES / 8).unwrap();
    guest.peer.send(SET_LOG_BASE, &longs(&[PAGES / 8, 0]), &[fd.as_fd()]);
    assert!(guest.peer.reply(SET_LOG_BASE).is_some(), "SET_LOG_BASE is answered by a message");
    log
}

#[test]
fn everything_the_target_writes_is_logged_while_migration_is_on() {
    let host = Host::with_disk(1);
    let mut guest = Guest::start(&host.socket(), LINUX, 1);
    guest.ready(0);
    let log = share_log(&mut guest);
    // Not on yet.
    let request = guest.submit(2, flat(0), 1, &rw10(0x28, 0, 32), &[], 16384);
    guest.finish(&request);
    assert!(!(0..PAGES).any(|page| log.is_marked(page * LOG_PAGE)));

    // As QEMU does on a running device: features, then the rings' log addresses.
    guest.peer.ask(SET_FEATURES, &(LINUX | F_LOG_ALL).to_le_bytes(), &[]);
    for queue in 0..3 {
        guest.peer.ask(SET_VRING_ADDR, &address_body(queue, true), &[]);
    }
    let request = guest.submit(2, flat(0), 1, &rw10(0x28, 0, 32), &[], 16384);
    assert_eq!(guest.finish(&request).status, 0);
    for at in (0..16384).step_by(4096) {
        assert!(log.is_marked(request.data + at), "data at {at}");
    }
    assert!(log.is_marked(request.response), "response");
    assert!(log.is_marked(Guest::rings_at(2) + 0x8000), "used ring");
    assert!(!log.is_marked(Guest::rings_at(2)), "the descriptor table is only read");

    // Data to the device is not written by it.
    let far = guest.alloc(64 * 1024);
    let header = guest.alloc(51);
    let mut bytes = flat(0).to_vec();
    bytes.extend([0; 11]);
    bytes.extend(rw10(0x2a, 0, 1));
    bytes.resize(51, 0);
    guest.write(header, &bytes);
    let response = guest.alloc(108);
    let buffers = [
        Buffer { addr: header, len: 51, write: false },
        Buffer { addr: far + 32768, len: 512, write: false },
        Buffer { addr: response, len: 108, write: true },
    ];
    let head = guest.indirect(2, &buffers);
    guest.offer(2, head);
    guest.used(2);
    assert!(!log.is_marked(far + 32768));

    // The control queue and the event queue too.
    guest.control(&tmf(6, flat(0), 0), 1);
    assert!(log.is_marked(Guest::rings_at(0) + 0x8000));
    let buffer = guest.give_event_buffer();
    host.malloc("disk1");
    host.add(1, "disk1");
    guest.event(buffer);
    assert!(log.is_marked(buffer.1) && log.is_marked(Guest::rings_at(1) + 0x8000));

    // A new log takes the place of the old one, and off is off.
    let second = share_log(&mut guest);
    let request = guest.submit(2, flat(0), 1, &rw10(0x28, 0, 1), &[], 512);
    guest.finish(&request);
    assert!(second.is_marked(request.response));
    guest.peer.ask(SET_FEATURES, &LINUX.to_le_bytes(), &[]);
    let third = share_log(&mut guest);
    guest.ready(0);
    assert!(!(0..PAGES).any(|page| third.is_marked(page * LOG_PAGE)));
}

#[test]
fn io_in_flight_when_logging_starts_is_logged() {
    let (host, gate) = Host::gated(1);
    let mut guest = Guest::start(&host.socket(), LINUX, 1);
    guest.ready(0);
    gate.shut();
    let request = guest.submit(2, flat(0), 1, &rw10(0x28, 0, 8), &[], 4096);
    gate.wait_for(1);
    let log = share_log(&mut guest);
    let opener = std::thread::spawn(move || {
        std::thread::sleep(std::time::Duration::from_millis(20));
        gate.open();
    });
    // Answered when nothing is in flight that the log does not know of: QEMU copies all memory
    // after this answer.
    guest.peer.ask(SET_FEATURES, &(LINUX | F_LOG_ALL).to_le_bytes(), &[]);
    let (head, _) = guest.try_used(2).expect("it ended before logging started");
    assert_eq!(head, request.head);
    opener.join().unwrap();
    drop(log);
}
