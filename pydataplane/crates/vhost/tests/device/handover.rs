//! A controller that is taken apart, described, and goes on from the description, as in another
//! process: the guest and its peer notice a pause.

use std::fs::File;
use std::io::Seek;
use std::os::fd::{AsFd, AsRawFd, OwnedFd};
use std::time::Duration;

use guestmem::GuestMemory;
use rustix::fs::{MemfdFlags, memfd_create};

use vhost_scsi::handover::{ControllerHandover, ControllerState, DroppedLater, Fds};
use vhost_scsi::{Characteristics, ControllerOptions, ErrorPolicy, TargetOptions, WaitFor};

use crate::guest::*;
use crate::host::*;
use crate::peer::*;

const HOLD: Duration = Duration::from_secs(20);
const RESCAN: u32 = 1;

/// As they arrive in another process: the description from its text, descriptors of their own.
pub fn sent(controller: &ControllerHandover) -> ControllerHandover {
    let text = serde_json::to_string(&controller.state).unwrap();
    let state: ControllerState = serde_json::from_str(&text).unwrap();
    assert_eq!(state, controller.state);
    let fds = controller.fds.iter().map(|fd| fd.try_clone().unwrap()).collect::<Vec<OwnedFd>>();
    ControllerHandover { state, fds: Fds::new(fds), dropped_later: DroppedLater::default() }
}

/// Holds the controllers of `host` and takes them apart; nothing of them is left here.
pub fn taken_apart(host: &Host) -> Vec<ControllerHandover> {
    host.controllers.hold(HOLD).unwrap();
    let (controllers, outcome) = host.controllers.hand_over();
    outcome.unwrap();
    assert!(host.controllers.list(None).unwrap().is_empty());
    controllers.iter().map(sent).collect()
}

/// Makes `vm0` again with `targets`, and lets it go on.
pub fn put_together(
    host: &Host,
    controllers: Vec<ControllerHandover>,
    targets: &[(u8, &str, TargetOptions)],
) {
    host.controllers.inherit(controllers).unwrap();
    let delay = ControllerOptions { delay: true, ..Default::default() };
    host.controllers.create("vm0", delay).unwrap();
    go_on(host, targets);
}

/// Lets `vm0`, which came, go on with `targets`.
fn go_on(host: &Host, targets: &[(u8, &str, TargetOptions)]) {
    for (number, bdev, options) in targets {
        host.controllers.add_target("vm0", i64::from(*number), bdev, options.clone()).unwrap();
    }
    host.controllers.start("vm0").unwrap();
    host.controllers.take_over().unwrap();
    host.controllers.release();
}

/// Takes `vm0` with `disk0` apart and puts it together again.
pub fn move_on(host: &Host) {
    let controllers = taken_apart(host);
    // Whoever serves now has them alone.
    drop(host.registry.claim("disk0", "nobody else").unwrap());
    put_together(host, controllers, &[(0, "disk0", TargetOptions::default())]);
}

#[test]
fn a_guest_goes_on_with_its_queues_memory_and_features() {
    let host = Host::with_disk(2);
    let mut guest = Guest::start(&host.socket(), LINUX, 2);
    guest.ready(0);
    let before = host.controllers.list(None).unwrap();
    for turn in 0..10u8 {
        assert_eq!(guest.write_blocks(0, u32::from(turn), &[turn; 512]).status, 0);
        let requests = host.stats().controller.requests;
        move_on(&host);
        // Called once, whatever was missed.
        assert!(guest.called(2, DEADLINE));
        // No unit attention: nothing happened to the unit.
        assert_eq!(guest.read_blocks(0, u32::from(turn), 1).data, [turn; 512]);
        assert!(host.stats().controller.requests > requests);
        // The connection is the same, and the peer may say what it negotiated before.
        assert_eq!(guest.peer.ask(SET_VRING_ENABLE, &words(&[2, 1]), &[]), ());
    }
    let after = host.controllers.list(None).unwrap();
    assert_eq!(after[0].session, before[0].session);
    let lun = |all: &[vhost_scsi::ControllerInfo]| all[0].targets[0].clone();
    assert_eq!(lun(&after), lun(&before));
    // Its driver stops the rings in order, and knows where they are.
    let taken = guest.peer.base(2);
    assert_eq!(taken, u32::from(guest.used_index(2)));
}

#[test]
fn what_the_guest_and_its_peer_did_meanwhile_is_found() {
    let host = Host::with_disk(1);
    let mut guest = Guest::start(&host.socket(), LINUX, 1);
    guest.ready(0);
    let controllers = taken_apart(&host);
    let request = guest.submit(2, flat(0), 1, &rw10(0x2a, 3, 1), &[9; 512], 0);
    guest.peer.send(GET_QUEUE_NUM, &[], &[]);
    let second = Peer::connect(&host.socket());
    assert_eq!(guest.try_used(2), None);
    put_together(&host, controllers, &[(0, "disk0", TargetOptions::default())]);
    assert_eq!(guest.finish(&request).status, 0);
    assert!(guest.peer.reply(GET_QUEUE_NUM).is_some());
    assert_eq!(guest.read_blocks(0, 3, 1).data, [9; 512]);
    drop(second);
}

#[test]
fn held_controllers_take_nothing_and_go_on_when_they_are_released() {
    let host = Host::with_disk(2);
    let mut guest = Guest::start(&host.socket(), LINUX, 2);
    guest.ready(0);
    host.controllers.hold(HOLD).unwrap();
    let request = guest.submit(2, flat(0), 1, &[0; 6], &[], 0);
    let (head, answer) = guest.submit_control(&tmf(0, 1), 1);
    std::thread::sleep(Duration::from_millis(20));
    assert_eq!((guest.try_used(2), guest.try_used(0)), (None, None));
    host.controllers.release();
    assert_eq!(guest.finish(&request).status, 0);
    assert_eq!(guest.used(0), (head, 1));
    assert_eq!(guest.read(answer, 1), [0]);
}

/// A task management function of `subtype` for a target: its bytes.
fn tmf(target: u8, subtype: u32) -> Vec<u8> {
    let mut bytes = words(&[0, subtype]);
    bytes.extend([1, target, 0x40, 0, 0, 0, 0, 0]);
    bytes.extend([0; 8]);
    bytes
}

#[test]
fn io_that_does_not_end_leaves_all_as_it_was() {
    let host = Host::with_disk(2);
    let gate = host.gate("gate");
    host.add(1, "gate");
    let mut guest = Guest::start(&host.socket(), LINUX, 2);
    guest.ready(0);
    guest.ready(1);
    gate.shut();
    let stuck = guest.submit(2, flat(1), 1, &rw10(0x2a, 0, 1), &[1; 512], 0);
    gate.wait_for(1);
    let why = host.controllers.hold(Duration::from_millis(50)).unwrap_err().to_string();
    assert!(why.contains("controller vm0") && why.contains("I/O in flight"), "{why}");
    let other = guest.submit(3, flat(0), 2, &[0; 6], &[], 0);
    assert_eq!(guest.finish(&other).status, 0);
    gate.open();
    assert_eq!(guest.finish(&stuck).status, 0);
    host.controllers.hold(HOLD).unwrap();
    host.controllers.release();
    guest.ready(1);
}

#[test]
fn attentions_prevention_and_events_that_wait_go_along() {
    let host = Host::with_disk(1);
    host.malloc("removable");
    host.malloc("late");
    let removable = TargetOptions { removable: true, ..Default::default() };
    host.controllers.add_target("vm0", 3, "removable", removable.clone()).unwrap();
    let mut guest = Guest::start(&host.socket(), LINUX, 1);
    guest.ready(3);
    assert_eq!(guest.scsi(3, &[0x1e, 0, 0, 0, 1, 0], &[], 0).status, 0);
    // No buffers yet: the event waits. The attention of target 0 does, too.
    host.add(7, "late");
    let controllers = taken_apart(&host);
    let targets = [
        (0, "disk0", TargetOptions::default()),
        (3, "removable", removable),
        (7, "late", TargetOptions::default()),
    ];
    put_together(&host, controllers, &targets);
    let buffer = guest.give_event_buffer();
    assert_eq!(guest.event(buffer), (1, [1, 7, 0, 0, 0, 0, 0, 0], RESCAN));
    let info = host.controllers.list(None).unwrap().remove(0).targets;
    assert!(info[1].removal_prevented);
    assert!(info[2].event_at >= Some(info[2].attached_at));
    let reply = guest.scsi(0, &[0; 6], &[], 0);
    assert_eq!((reply.sense[2] & 15, reply.sense[12]), (6, 0x29));
    guest.ready(0);
}

#[test]
fn a_migration_that_is_under_way_goes_on() {
    let host = Host::with_disk(1);
    let mut guest = Guest::start(&host.socket(), LINUX, 1);
    guest.ready(0);
    let log = rustix::fs::memfd_create("log", rustix::fs::MemfdFlags::CLOEXEC).unwrap();
    rustix::fs::ftruncate(&log, 4096).unwrap();
    guest.peer.send(SET_LOG_BASE, &longs(&[4096, 0]), &[log.as_fd()]);
    assert!(guest.peer.reply(SET_LOG_BASE).is_some());
    guest.peer.ask(SET_FEATURES, &(LINUX | F_LOG_ALL).to_le_bytes(), &[]);
    move_on(&host);
    let marks = guestmem::DirtyLog::new(log.as_fd(), 0, 4096).unwrap();
    let lun = [1, 0, 0x40, 0, 0, 0, 0, 0];
    let request = guest.submit(2, lun, 7, &rw10(0x28, 0, 1), &[], 512);
    let page = request.data;
    assert_eq!(guest.finish(&request).status, 0);
    assert!(marks.is_marked(page));
}

#[test]
fn controllers_without_a_peer_and_their_sockets_go_along() {
    let host = Host::with_disk(1);
    let waiting = taken_apart(&host);
    assert!(host.socket().exists());
    // It waits in the backlog of a socket that nobody serves.
    let mut early = Peer::connect(&host.socket());
    early.send(GET_FEATURES, &[], &[]);
    put_together(&host, waiting, &[(0, "disk0", TargetOptions::default())]);
    assert!(early.reply(GET_FEATURES).is_some());
}

#[test]
fn a_controller_that_is_not_made_again_or_a_folder_that_changed_is_named() {
    let host = Host::with_disk(1);
    let controllers = taken_apart(&host);
    let moved = controllers.iter().map(sent).map(|mut c| {
        c.state.socket = "/elsewhere/vm0".into();
        c
    });
    host.controllers.inherit(moved.collect()).unwrap();
    let why = host.controllers.create("vm0", ControllerOptions::default()).unwrap_err().to_string();
    assert!(why.contains("/elsewhere/vm0, and cannot go on at"), "{why}");
    host.controllers.inherit(controllers).unwrap();
    let why = host.controllers.take_over().unwrap_err().to_string();
    assert!(why.contains("controller vm0 was not made again"), "{why}");
}

#[test]
fn a_session_that_cannot_go_on_is_an_error_and_can_be_tried_again() {
    let host = Host::with_disk(1);
    let mut guest = Guest::start(&host.socket(), LINUX, 1);
    guest.ready(0);
    let controllers = taken_apart(&host);
    type Change = fn(&mut vhost_scsi::handover::SessionState);
    let changes: [(Change, &str); 5] = [
        (|s| s.features |= 1 << 50, "were not offered"),
        (|s| s.memory[0].size = 0, "has no bytes"),
        (|s| s.memory[0].file = 1000, "descriptor 1000 is missing"),
        (|s| s.rings[2].size = 3, "virtqueue 2"),
        (|s| s.memory.clear(), "does not start"),
    ];
    for (change, expected) in changes {
        let mut bad: Vec<_> = controllers.iter().map(sent).collect();
        change(bad[0].state.session.as_mut().unwrap());
        host.controllers.inherit(bad).unwrap();
        let delay = ControllerOptions { delay: true, ..Default::default() };
        host.controllers.create("vm0", delay).unwrap();
        host.controllers.add_target("vm0", 0, "disk0", TargetOptions::default()).unwrap();
        let why = host.controllers.take_over().unwrap_err().to_string();
        assert!(why.contains(expected), "{why}");
        // What was made of it goes, and leaves the socket to the next.
        host.controllers.hold(HOLD).unwrap();
        drop(host.controllers.hand_over());
    }
    put_together(&host, controllers, &[(0, "disk0", TargetOptions::default())]);
    assert_eq!(guest.read_blocks(0, 0, 1).status, 0);
}

/// Another process that expects the controllers of `host` and has made all that it can.
fn expecting(host: &Host) -> Host {
    let new = host.beside(1);
    new.malloc("disk0");
    new.controllers.expect(host.controllers.describe().iter().map(sent).collect()).unwrap();
    let delay = ControllerOptions { delay: true, ..Default::default() };
    new.controllers.create("vm0", delay).unwrap();
    new.controllers.prepare();
    new
}

pub const DISK: [(u8, &str, TargetOptions); 1] = [(
    0,
    "disk0",
    TargetOptions {
        serial: None,
        read_only: false,
        shareable: false,
        removable: false,
        block_size: None,
        characteristics: Characteristics {
            uuid: None,
            wwn: None,
            vendor: None,
            product: None,
            rotation_rate: None,
            physical_block_size: None,
            no_unmap: false,
            write_through: false,
        },
        error_policy: ErrorPolicy { write: WaitFor::Nothing, read: WaitFor::Nothing },
    },
)];

#[test]
fn memory_is_mapped_while_the_guest_is_still_served() {
    let host = Host::with_disk(2);
    let mut guest = Guest::start(&host.socket(), LINUX, 2);
    guest.ready(0);
    let new = expecting(&host);
    assert_eq!(guest.write_blocks(0, 0, &[1; 512]).status, 0);
    let requests = host.stats().controller.requests;
    let mut controllers = taken_apart(&host);
    // Only for reading: it cannot be mapped any more, and need not.
    let mut fds: Vec<OwnedFd> =
        controllers[0].fds.iter().map(|fd| fd.try_clone().unwrap()).collect();
    for region in &controllers[0].state.session.as_ref().unwrap().memory {
        let fd = &mut fds[region.file as usize];
        let path = format!("/proc/self/fd/{}", fd.as_raw_fd());
        *fd = File::open(path).unwrap().into();
    }
    controllers[0].fds = Fds::new(fds);
    new.controllers.inherit(controllers).unwrap();
    go_on(&new, &DISK);
    assert_eq!(guest.write_blocks(0, 0, &[2; 512]).status, 0);
    assert_eq!(guest.read_blocks(0, 0, 1).data, [2; 512]);
    assert!(new.stats().controller.requests > requests);
}

#[test]
fn a_session_that_is_another_by_then_is_made_anew() {
    let host = Host::with_disk(1);
    let mut guest = Guest::start(&host.socket(), LINUX, 1);
    guest.ready(0);
    let new = expecting(&host);
    // Its memory moves into another file, at the same addresses.
    for (spec, fd) in &mut guest.regions {
        let moved = memfd_create("moved", MemfdFlags::CLOEXEC).unwrap();
        let (mut from, mut to) = (File::from(fd.try_clone().unwrap()), File::from(moved));
        from.rewind().unwrap();
        assert_eq!(std::io::copy(&mut from, &mut to).unwrap(), spec.size);
        *fd = to.into();
    }
    let copies = guest.regions.iter().map(|(spec, fd)| (*spec, fd.try_clone().unwrap()));
    guest.memory = GuestMemory::map(copies.collect()).unwrap();
    guest.tell_memory();
    guest.ready(0);
    new.controllers.inherit(taken_apart(&host)).unwrap();
    go_on(&new, &DISK);
    assert_eq!(guest.read_blocks(0, 0, 1).status, 0);
    // And back again, meanwhile with another peer.
    let old = expecting(&new);
    drop(guest);
    new.wait_until_free();
    let mut guest = Guest::start(&new.socket(), LINUX, 1);
    guest.ready(0);
    old.controllers.inherit(taken_apart(&new)).unwrap();
    go_on(&old, &DISK);
    assert_eq!(guest.read_blocks(0, 0, 1).status, 0);
}

#[test]
fn a_controller_that_was_expected_and_does_not_come_is_named() {
    let host = Host::with_disk(1);
    let new = expecting(&host);
    new.controllers.inherit(Vec::new()).unwrap();
    let why = new.controllers.take_over().unwrap_err().to_string();
    assert!(why.contains("controller vm0 was announced and has not come"), "{why}");
}

#[test]
fn the_mark_of_a_guest_without_a_region_stays_until_its_requests_have_ended() {
    let host = Host::with_disk(1);
    let mut guest = Guest::start(&host.socket(), LINUX, 1);
    guest.ready(0);
    assert!(host.mark().exists());
    move_on(&host);
    guest.ready(0);
    assert!(host.mark().exists());
    drop(guest);
    host.wait_until_free();
    assert!(!host.mark().exists());
}
