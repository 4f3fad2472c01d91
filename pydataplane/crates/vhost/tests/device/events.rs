//! Targets that come, go and change under a running guest.

use std::io;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use scsi::{KeptReservations, NotKnown, ReservationKeeper};
use uuid::Uuid;
use vhost_scsi::{ControllerError, TargetOptions};

use crate::guest::*;
use crate::handover::{put_together, taken_apart};
use crate::host::*;
use crate::peer::*;

const TRANSPORT_RESET: u32 = 1;
const PARAM_CHANGE: u32 = 3;
const MISSED: u32 = 0x8000_0000;
const RESCAN: u32 = 1;
const REMOVED: u32 = 2;

fn lun(target: u8) -> [u8; 8] {
    // Linux reads bytes 2 and 3 as the plain LUN.
    [1, target, 0, 0, 0, 0, 0, 0]
}

#[test]
fn a_target_comes_changes_and_goes() {
    let host = Host::with_disk(2);
    let null = host.null("null");
    let mut guest = Guest::start(&host.socket(), LINUX, 2);
    guest.ready(0);
    let buffers: Vec<_> = (0..3).map(|_| guest.give_event_buffer()).collect();

    host.add(5, "null");
    assert_eq!(guest.event(buffers[0]), (TRANSPORT_RESET, lun(5), RESCAN));
    assert!(guest.called(1, DEADLINE));
    guest.ready(5);

    null.resize(16384).unwrap();
    host.registry.notify_resized("null");
    assert_eq!(guest.event(buffers[1]), (PARAM_CHANGE, lun(5), 0x2a | 0x09 << 8));
    let reply = guest.scsi(5, &[0; 6], &[], 0);
    assert_eq!((reply.sense[2] & 15, reply.sense[12], reply.sense[13]), (6, 0x2a, 9));
    let capacity = guest.scsi(5, &[0x25, 0, 0, 0, 0, 0, 0, 0, 0, 0], &[], 8);
    assert_eq!(capacity.data[..4], 16383u32.to_be_bytes());

    host.controllers.remove_target("vm0", 5).unwrap();
    assert_eq!(guest.event(buffers[2]), (TRANSPORT_RESET, lun(5), REMOVED));
    let request = guest.submit(2, flat(5), 1, &[0; 6], &[], 0);
    assert_eq!(guest.finish(&request).response, 3);
    guest.ready(0);
    let stats = host.stats().controller;
    assert_eq!((stats.events_sent, stats.events_missed), (3, 0));
}

const READ_CAPACITY: [u8; 10] = [0x25, 0, 0, 0, 0, 0, 0, 0, 0, 0];

/// A keeper of reservations that are lost, until somebody removes the record.
#[derive(Default)]
struct Lost {
    removed: AtomicBool,
}

impl ReservationKeeper for Lost {
    fn keep(&self, _: Uuid, _: &KeptReservations) -> io::Result<()> {
        Ok(())
    }

    fn kept(&self, volume: Uuid) -> Result<Option<KeptReservations>, NotKnown> {
        self.look(volume)
    }

    fn look(&self, _: Uuid) -> Result<Option<KeptReservations>, NotKnown> {
        match self.removed.load(Ordering::Relaxed) {
            true => Ok(None),
            false => Err(NotKnown::Lost),
        }
    }

    fn tell_spoiled(&self, _: Uuid) {}
}

#[test]
fn who_booted_while_reservations_were_lost_is_told_when_its_disk_can_be_asked_again() {
    const REPLACE: [u8; 10] = [0x5f, 8, 1, 0, 0, 0, 0, 0, 24, 0];
    for replaced in [true, false] {
        let host = Host::new(1);
        let keeper: Arc<Lost> = Arc::default();
        host.controllers.keep_reservations(keeper.clone());
        host.malloc("disk");
        host.add(3, "disk");
        let not_known = || {
            let controller = host.controllers.list(Some("vm0")).unwrap().remove(0);
            controller.targets[0].reservations_not_known
        };
        let mut guest = Guest::start(&host.socket(), LINUX, 1);
        // Power on.
        guest.scsi(3, &[0; 6], &[], 0);
        let refused = guest.scsi(3, &READ_CAPACITY, &[], 8);
        assert_eq!((refused.sense[2] & 15, refused.sense[12], refused.sense[13]), (7, 0x44, 1));
        assert_eq!(not_known(), Some(NotKnown::Lost));
        let buffer = guest.give_event_buffer();
        if replaced {
            let list = [[0; 8], 7_u64.to_be_bytes(), [0; 8]].concat();
            assert_eq!(guest.scsi(3, &REPLACE, &list, 0).status, 0);
        } else {
            keeper.removed.store(true, Ordering::Relaxed);
        }
        assert_eq!(guest.event(buffer), (PARAM_CHANGE, lun(3), 0x2a | 0x09 << 8));
        let told = guest.scsi(3, &READ_CAPACITY, &[], 8);
        assert_eq!((told.sense[2] & 15, told.sense[12], told.sense[13]), (6, 0x2a, 9));
        assert_eq!(guest.scsi(3, &READ_CAPACITY, &[], 8).data[..4], 8191_u32.to_be_bytes());
        assert_eq!(not_known(), None);
    }
}

#[test]
fn who_booted_while_reservations_were_lost_is_told_by_a_process_that_knows_them_at_once() {
    for paused in [false, true] {
        let host = Host::new(1);
        let keeper: Arc<Lost> = Arc::default();
        host.controllers.keep_reservations(keeper.clone());
        host.malloc("disk");
        host.malloc("known");
        host.add(3, "disk");
        let mut guest = Guest::start(&host.socket(), LINUX, 1);
        // Power on.
        guest.scsi(3, &[0; 6], &[], 0);
        let refused = guest.scsi(3, &READ_CAPACITY, &[], 8);
        assert_eq!((refused.sense[2] & 15, refused.sense[12], refused.sense[13]), (7, 0x44, 1));
        let buffer = guest.give_event_buffer();
        let base = paused.then(|| guest.peer.base(1));
        let mut controllers = taken_apart(&host);
        for _ in 0..2 {
            // A process in between knows no more than the one before.
            put_together(&host, controllers, &[(3, "disk", TargetOptions::default())]);
            controllers = taken_apart(&host);
        }
        keeper.removed.store(true, Ordering::Relaxed);
        put_together(&host, controllers, &[(3, "disk", TargetOptions::default())]);
        if let Some(base) = base {
            guest.describe_queue(1, base as u16, false);
        }
        assert_eq!(guest.event(buffer), (PARAM_CHANGE, lun(3), 0x2a | 0x09 << 8));
        let told = guest.scsi(3, &READ_CAPACITY, &[], 8);
        assert_eq!((told.sense[2] & 15, told.sense[12], told.sense[13]), (6, 0x2a, 9));
        assert_eq!(guest.scsi(3, &READ_CAPACITY, &[], 8).data[..4], 8191_u32.to_be_bytes());
        // Who knows its disk is told nothing by the next.
        let buffer = guest.give_event_buffer();
        let controllers = taken_apart(&host);
        put_together(&host, controllers, &[(3, "disk", TargetOptions::default())]);
        host.add(4, "known");
        assert_eq!(guest.event(buffer), (TRANSPORT_RESET, lun(4), RESCAN));
        assert_eq!(guest.scsi(3, &[0; 6], &[], 0).status, 0);
    }
}

#[test]
fn events_wait_for_buffers_in_order_and_a_loss_is_told() {
    let host = Host::new(1);
    host.malloc("disk");
    let mut guest = Guest::start(&host.socket(), LINUX, 1);
    // 80 events and room for 64.
    for _ in 0..40 {
        host.add(1, "disk");
        host.controllers.remove_target("vm0", 1).unwrap();
    }
    assert_eq!(host.stats().controller.events_missed, 16);
    for nth in 0..64 {
        let buffer = guest.give_event_buffer();
        let (event, at, reason) = guest.event(buffer);
        let missed = if nth == 0 { MISSED } else { 0 };
        assert_eq!((event, at), (TRANSPORT_RESET | missed, lun(1)), "event {nth}");
        assert_eq!(reason, if nth % 2 == 0 { RESCAN } else { REMOVED }, "event {nth}");
    }
    host.add(1, "disk");
    let buffer = guest.give_event_buffer();
    assert_eq!(guest.event(buffer), (TRANSPORT_RESET, lun(1), RESCAN));
}

#[test]
fn a_driver_without_the_features_is_told_nothing() {
    let host = Host::new(1);
    let null = host.null("null");
    let mut guest = Guest::start(&host.socket(), LINUX & !0b110, 1);
    let buffer = guest.give_event_buffer();
    host.add(0, "null");
    null.resize(16384).unwrap();
    host.registry.notify_resized("null");
    guest.ready(0);
    host.controllers.remove_target("vm0", 0).unwrap();
    std::thread::sleep(Duration::from_millis(20));
    assert_eq!(guest.try_used(1), None, "{buffer:?}");
}

#[test]
fn a_driver_that_starts_afresh_gets_no_old_events() {
    let host = Host::with_disk(1);
    host.malloc("disk1");
    let mut guest = Guest::start(&host.socket(), LINUX, 1);
    host.add(1, "disk1");
    guest.peer.base(1);
    guest.start_queue(1);
    let buffer = guest.give_event_buffer();
    host.controllers.remove_target("vm0", 1).unwrap();
    assert_eq!(guest.event(buffer), (TRANSPORT_RESET, lun(1), REMOVED));
}

#[test]
fn a_paused_guest_is_told_when_it_goes_on() {
    for heard in 0..3 {
        let host = Host::new(1);
        let null = host.null("null");
        host.malloc("disk");
        let mut guest = Guest::start(&host.socket(), LINUX, 1);
        let buffers: Vec<_> = (0..8).map(|_| guest.give_event_buffer()).collect();
        let mut buffers = buffers.into_iter();
        for _ in 0..heard {
            host.add(9, "disk");
            assert_eq!(guest.event(buffers.next().unwrap()), (TRANSPORT_RESET, lun(9), RESCAN));
            host.controllers.remove_target("vm0", 9).unwrap();
            assert_eq!(guest.event(buffers.next().unwrap()), (TRANSPORT_RESET, lun(9), REMOVED));
        }
        let taken: Vec<_> = (0..3).map(|queue| guest.peer.base(queue)).collect();
        assert_eq!(taken[1], 2 * heard);
        host.add(1, "null");
        null.resize(16384).unwrap();
        host.registry.notify_resized("null");
        host.controllers.remove_target("vm0", 1).unwrap();
        host.add(2, "disk");
        assert_eq!(guest.try_used(1), None, "it is paused");
        for (queue, base) in taken.into_iter().enumerate() {
            guest.describe_queue(queue, base as u16, false);
        }
        let expected = [
            (TRANSPORT_RESET, lun(1), RESCAN),
            (PARAM_CHANGE, lun(1), 0x2a | 0x09 << 8),
            (TRANSPORT_RESET, lun(1), REMOVED),
            (TRANSPORT_RESET, lun(2), RESCAN),
        ];
        for event in expected {
            assert_eq!(guest.event(buffers.next().unwrap()), event, "{heard} heard before");
        }
        assert!(guest.called(1, DEADLINE));
        guest.ready(2);
    }
}

#[test]
fn events_that_wait_for_buffers_outlive_a_ring_that_is_set_up_again() {
    let host = Host::new(1);
    host.malloc("disk");
    let mut guest = Guest::start(&host.socket(), LINUX, 1);
    let buffer = guest.give_event_buffer();
    host.add(1, "disk");
    assert_eq!(guest.event(buffer), (TRANSPORT_RESET, lun(1), RESCAN));
    host.controllers.remove_target("vm0", 1).unwrap();
    // As a migration does, to have the used ring logged.
    guest.peer.ask(SET_VRING_ADDR, &address_body(1, true), &[]);
    let buffer = guest.give_event_buffer();
    assert_eq!(guest.event(buffer), (TRANSPORT_RESET, lun(1), REMOVED));
}

#[test]
fn a_guest_that_comes_back_is_told_what_happened_meanwhile() {
    let host = Host::with_disk(1);
    host.malloc("disk1");
    host.malloc("disk2");
    let mut guest = Guest::start(&host.socket(), LINUX, 1);
    let buffers: Vec<_> = (0..4).map(|_| guest.give_event_buffer()).collect();
    host.add(1, "disk1");
    assert_eq!(guest.event(buffers[0]), (TRANSPORT_RESET, lun(1), RESCAN));
    guest.ready(0);
    let taken = [0, guest.used_index(1), guest.used_index(2)];
    guest.peer.shutdown();
    host.wait_until_free();
    host.controllers.remove_target("vm0", 1).unwrap();
    host.add(2, "disk2");
    // One that goes away before its rings run changes nothing.
    Guest::connect(&host.socket(), LINUX).peer.shutdown();
    host.wait_until_free();
    guest.reconnect(&host.socket());
    for (queue, base) in taken.into_iter().enumerate() {
        guest.describe_queue(queue, base, false);
    }
    assert_eq!(guest.event(buffers[1]), (TRANSPORT_RESET, lun(1), REMOVED));
    assert_eq!(guest.event(buffers[2]), (TRANSPORT_RESET, lun(2), RESCAN));
    guest.ready(2);
    // The next is another, which scans by itself.
    guest.peer.shutdown();
    host.wait_until_free();
    host.controllers.remove_target("vm0", 2).unwrap();
    let mut guest = Guest::start(&host.socket(), LINUX, 1);
    let buffer = guest.give_event_buffer();
    host.add(2, "disk2");
    assert_eq!(guest.event(buffer), (TRANSPORT_RESET, lun(2), RESCAN));
}

#[test]
fn a_guest_that_reboots_gets_no_events_of_its_life_before() {
    let host = Host::with_disk(1);
    host.malloc("disk1");
    let mut guest = Guest::start(&host.socket(), LINUX, 1);
    let buffer = guest.give_event_buffer();
    host.add(1, "disk1");
    assert_eq!(guest.event(buffer), (TRANSPORT_RESET, lun(1), RESCAN));
    for queue in 0..3 {
        guest.peer.base(queue);
    }
    host.controllers.remove_target("vm0", 1).unwrap();
    for queue in 0..3 {
        guest.start_queue(queue);
    }
    let buffer = guest.give_event_buffer();
    host.add(1, "disk1");
    assert_eq!(guest.event(buffer), (TRANSPORT_RESET, lun(1), RESCAN));
}

#[test]
fn a_buffer_too_small_for_an_event_is_given_back_empty() {
    let host = Host::with_disk(1);
    host.malloc("disk1");
    let mut guest = Guest::start(&host.socket(), LINUX, 1);
    let at = guest.alloc(16);
    let small = guest.chain(1, &[Buffer { addr: at, len: 15, write: true }]);
    guest.offer(1, small);
    let good = guest.give_event_buffer();
    host.add(1, "disk1");
    assert_eq!(guest.used(1), (small, 0));
    assert_eq!(guest.event(good), (TRANSPORT_RESET, lun(1), RESCAN));
}

#[test]
fn removing_waits_for_io_in_flight() {
    let (host, gate) = Host::gated(2);
    let mut guest = Guest::start(&host.socket(), LINUX, 2);
    guest.ready(0);
    let buffer = guest.give_event_buffer();
    gate.shut();
    let request = guest.submit(3, flat(0), 1, &rw10(0x2a, 0, 1), &[7; 512], 0);
    gate.wait_for(1);
    let controllers = host.controllers.clone();
    let remover = std::thread::spawn(move || controllers.remove_target("vm0", 0));
    // New requests find it gone while the old one still waits.
    wait_until("it is leaving", || {
        let request = guest.submit(2, flat(0), 2, &[0; 6], &[], 0);
        guest.finish(&request).response == 3
    });
    assert!(!remover.is_finished());
    assert_eq!(guest.try_used(1), None);
    assert_eq!(host.registry.owners("gate").len(), 1);
    gate.open();
    remover.join().unwrap().unwrap();
    assert_eq!(guest.finish(&request).status, 0);
    assert_eq!(guest.event(buffer), (TRANSPORT_RESET, lun(0), REMOVED));
    assert!(host.registry.owners("gate").is_empty());
    // The number and the volume are free again.
    host.add(0, "gate");
    guest.ready(0);
}

#[test]
fn a_bdev_that_goes_away_takes_its_targets_with_it() {
    let host = Host::with_disk(1);
    let mut guest = Guest::start(&host.socket(), LINUX, 1);
    guest.ready(0);
    let buffer = guest.give_event_buffer();
    host.registry.unregister("disk0").unwrap();
    assert_eq!(guest.event(buffer), (TRANSPORT_RESET, lun(0), REMOVED));
    assert!(host.controllers.list(None).unwrap()[0].targets.is_empty());
}

#[test]
fn what_cannot_be_added_or_removed_is_refused_and_nothing_changes() {
    let host = Host::with_disk(1);
    host.malloc("disk1");
    let add = |number: i64, bdev: &str, options: TargetOptions| {
        host.controllers.add_target("vm0", number, bdev, options)
    };
    let plain = TargetOptions::default;
    assert!(matches!(add(0, "disk1", plain()), Err(ControllerError::TargetTaken { .. })));
    assert!(matches!(add(255, "disk1", plain()), Err(ControllerError::TargetNumber(255))));
    assert!(matches!(add(-2, "disk1", plain()), Err(ControllerError::TargetNumber(-2))));
    let missing = add(1, "nothing", plain()).unwrap_err().to_string();
    assert_eq!(missing, "there is no bdev nothing");
    let taken = add(1, "disk0", plain()).unwrap_err().to_string();
    assert_eq!(taken, "bdev disk0 is in use by target 0 of controller vm0: release it there first");
    let options = TargetOptions { serial: Some("\n".into()), ..plain() };
    assert!(matches!(add(1, "disk1", options), Err(ControllerError::Lun(_))));
    assert!(host.registry.owners("disk1").is_empty(), "nothing is held");
    let remove = |number| host.controllers.remove_target("vm0", number);
    for number in [1, -1, 255, 1000] {
        assert!(matches!(remove(number), Err(ControllerError::NoTarget { .. })), "{number}");
    }
    assert_eq!(add(-1, "disk1", plain()).unwrap(), 1, "the lowest free number");
    assert_eq!(add(254, "disk1", plain()).unwrap_err().to_string().lines().count(), 1);
}

#[test]
fn a_shared_volume_has_to_be_shared_by_all() {
    let host = Host::new(1);
    host.malloc("disk");
    host.controllers.create("vm1", Default::default()).unwrap();
    let shared = TargetOptions { shareable: true, ..Default::default() };
    host.controllers.add_target("vm0", 0, "disk", shared.clone()).unwrap();
    let alone = host.controllers.add_target("vm1", 0, "disk", Default::default()).unwrap_err();
    assert!(alone.to_string().contains("target 0 of controller vm0"), "{alone}");
    host.controllers.add_target("vm1", 0, "disk", shared).unwrap();
    let mut guest = Guest::start(&host.socket(), LINUX, 1);
    guest.ready(0);
    guest.write_blocks(0, 3, &[5; 512]);
    let mut other = Guest::start(&host.socket().with_file_name("vm1"), LINUX, 1);
    other.ready(0);
    assert_eq!(other.read_blocks(0, 3, 1).data, [5; 512]);
}

#[test]
fn all_255_targets_can_be_used_at_once() {
    let host = Host::new(2);
    for target in 0..255u8 {
        host.null(&format!("null{target}"));
        host.add(target, &format!("null{target}"));
    }
    host.malloc("one more");
    let full = host.controllers.add_target("vm0", -1, "one more", Default::default());
    assert!(matches!(full, Err(ControllerError::Full(_))));
    let mut guest = Guest::start(&host.socket(), LINUX, 2);
    for target in 0..255 {
        guest.ready(target);
    }
    let request = guest.submit(
        2,
        [0xc1, 1, 0, 0, 0, 0, 0, 0],
        1,
        &[0xa0, 0, 0, 0, 0, 0, 0, 0, 16, 0, 0, 0],
        &[],
        4096,
    );
    let reply = guest.finish(&request);
    assert_eq!(reply.data[..4], (255u32 * 8).to_be_bytes());
    assert_eq!(reply.data.len(), 8 + 255 * 8);
}
