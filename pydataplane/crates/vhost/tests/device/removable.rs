//! Removable targets, and when a guest learned of its targets.

use std::os::unix::fs::MetadataExt;
use std::time::{SystemTime, UNIX_EPOCH};

use vhost_scsi::{ControllerError, ControllerOptions, TargetInfo, TargetOptions};

use crate::guest::*;
use crate::host::*;

const PREVENT: [u8; 6] = [0x1e, 0, 0, 0, 1, 0];
const ALLOW: [u8; 6] = [0x1e, 0, 0, 0, 0, 0];
const READ_CAPACITY: [u8; 10] = [0x25, 0, 0, 0, 0, 0, 0, 0, 0, 0];

fn lun(host: &Host) -> TargetInfo {
    let controller = host.controllers.list(Some("vm0")).unwrap().remove(0);
    controller.targets[0].clone()
}

/// A host with a removable disk as target 3.
fn with_removable() -> Host {
    let host = Host::new(2);
    host.malloc("disk");
    let options = TargetOptions { removable: true, ..Default::default() };
    host.controllers.add_target("vm0", 3, "disk", options).unwrap();
    host
}

fn now() -> f64 {
    SystemTime::now().duration_since(UNIX_EPOCH).unwrap().as_secs_f64()
}

#[test]
fn prevention_is_shown_until_the_guest_allows_resets_or_leaves() {
    let host = with_removable();
    let mut guest = Guest::start(&host.socket(), LINUX, 2);
    let inquiry = guest.scsi(3, &[0x12, 0, 0, 0, 36, 0], &[], 36);
    assert_eq!(inquiry.data[1], 0x80);
    assert!(lun(&host).removable && !lun(&host).removal_prevented);
    let prevent = |guest: &mut Guest| {
        guest.ready(3);
        assert_eq!(guest.scsi(3, &PREVENT, &[], 0).status, 0);
        assert!(lun(&host).removal_prevented);
        let eject = guest.scsi(3, &[0x1b, 0, 0, 0, 2, 0], &[], 0);
        assert_eq!((eject.sense[2] & 15, eject.sense[12], eject.sense[13]), (5, 0x53, 2));
    };

    prevent(&mut guest);
    assert_eq!(guest.scsi(3, &ALLOW, &[], 0).status, 0);
    assert!(!lun(&host).removal_prevented);
    let eject = |guest: &mut Guest| {
        guest.ready(3);
        assert!(!lun(&host).ejected);
        assert_eq!(guest.scsi(3, &[0x1b, 0, 0, 0, 2, 0], &[], 0).status, 0);
        assert!(lun(&host).ejected);
        let absent = guest.scsi(3, &READ_CAPACITY, &[], 8);
        assert_eq!((absent.sense[2] & 15, absent.sense[12], absent.sense[13]), (2, 0x3a, 0));
    };
    eject(&mut guest);
    assert_eq!(guest.scsi(3, &[0x1b, 0, 0, 0, 3, 0], &[], 0).status, 0);
    eject(&mut guest);
    // A guest that boots anew finds its disk.
    guest.peer.base(2);
    guest.start_queue(2);
    assert!(!lun(&host).ejected);
    for reset in [LOGICAL_UNIT_RESET, I_T_NEXUS_RESET] {
        prevent(&mut guest);
        assert_eq!(guest.control(&tmf(reset, flat(3), 0), 1), [0]);
        assert!(!lun(&host).removal_prevented, "{reset}");
    }

    // A paused guest goes on as it was.
    prevent(&mut guest);
    let base = guest.peer.base(2) as u16;
    guest.describe_queue(2, base, false);
    assert!(lun(&host).removal_prevented);
    // One that was reset scans anew.
    guest.peer.base(2);
    guest.start_queue(2);
    assert!(!lun(&host).removal_prevented);

    prevent(&mut guest);
    drop(guest);
    host.wait_until_free();
    assert!(!lun(&host).removal_prevented);
}

#[test]
fn what_is_ejected_stays_so_on_another_bdev() {
    let host = with_removable();
    host.malloc("other");
    let mut guest = Guest::start(&host.socket(), LINUX, 2);
    guest.ready(3);
    let replace = |from: &str, to: &str| {
        let bdev = |name| host.registry.get(name).unwrap();
        let (from, to) = (bdev(from), bdev(to));
        host.controllers.replace("vm0", 3, &from, to, None, Box::new(|| Ok(()))).unwrap();
    };
    assert_eq!(guest.scsi(3, &[0x1b, 0, 0, 0, 2, 0], &[], 0).status, 0);
    replace("disk", "other");
    assert!(lun(&host).ejected);
    let absent = guest.scsi(3, &READ_CAPACITY, &[], 8);
    assert_eq!((absent.sense[2] & 15, absent.sense[12], absent.sense[13]), (2, 0x3a, 0));
    assert_eq!(guest.scsi(3, &[0x1b, 0, 0, 0, 3, 0], &[], 0).status, 0);
    replace("other", "disk");
    assert!(!lun(&host).ejected);
    assert_eq!(guest.scsi(3, &READ_CAPACITY, &[], 8).status, 0);
}

#[test]
fn a_disk_in_use_is_removed_only_by_force() {
    let host = with_removable();
    host.malloc("fixed");
    host.controllers.add_target("vm0", 4, "fixed", TargetOptions::default()).unwrap();
    let mut guest = Guest::start(&host.socket(), LINUX, 1);
    let remove = |number| host.controllers.remove_target_unless_prevented("vm0", number);
    guest.ready(3);
    guest.ready(4);
    for target in [3, 4] {
        assert_eq!(guest.scsi(target, &PREVENT, &[], 0).status, 0);
    }
    remove(4).unwrap();
    let e = remove(3).unwrap_err();
    assert!(matches!(e, ControllerError::Prevented { target: 3, .. }), "{e}");
    assert_eq!(guest.read_blocks(3, 0, 1).status, 0);
    assert!(lun(&host).removal_prevented);
    assert_eq!(guest.scsi(3, &ALLOW, &[], 0).status, 0);
    remove(3).unwrap();
    assert_eq!(guest.scsi(3, &PREVENT, &[], 0).response, 3, "BAD TARGET");
    for number in [3, 255, -1] {
        let e = remove(number).unwrap_err();
        assert!(matches!(e, ControllerError::NoTarget { .. }), "{e}");
    }

    let options = TargetOptions { removable: true, ..Default::default() };
    host.controllers.add_target("vm0", 3, "disk", options).unwrap();
    assert_eq!(guest.scsi(3, &PREVENT, &[], 0).status, 0);
    remove(3).unwrap_err();
    host.controllers.remove_target("vm0", 3).unwrap();
}

/// However they meet: a guest that was told that it prevents the removal keeps its disk.
#[test]
fn a_removal_and_a_prevention_at_the_same_time_end_as_one_of_them_says() {
    let host = Host::new(1);
    host.malloc("disk");
    let mut guest = Guest::start(&host.socket(), LINUX, 1);
    for round in 0..300 {
        let options = TargetOptions { removable: true, ..Default::default() };
        host.controllers.add_target("vm0", 3, "disk", options).unwrap();
        let controllers = host.controllers.clone();
        let remover = std::thread::spawn(move || {
            (0..round % 30 * 200).for_each(|_| std::hint::spin_loop());
            controllers.remove_target_unless_prevented("vm0", 3)
        });
        let answer = guest.scsi(3, &PREVENT, &[], 0);
        let prevented = (answer.response, answer.status) == (0, 0);
        let removed = remover.join().unwrap();
        assert_eq!(prevented, matches!(removed, Err(ControllerError::Prevented { .. })));
        assert_eq!(prevented, removed.is_err(), "{removed:?}");
        if prevented {
            assert!(lun(&host).removal_prevented);
            host.controllers.remove_target("vm0", 3).unwrap();
        } else if answer.response == 0 {
            assert_eq!((answer.sense[2] & 15, answer.sense[12], answer.sense[13]), (5, 0x25, 0));
        }
    }
}

#[test]
fn a_restart_meets_a_removable_disk_without_an_attention() {
    let host = with_removable();
    let null = host.null("null");
    let options = TargetOptions { removable: true, ..Default::default() };
    host.controllers.add_target("vm0", 4, "null", options).unwrap();
    let mut guest = Guest::start(&host.socket(), LINUX, 1);
    assert_eq!(guest.read_blocks(3, 0, 1).status, 0);
    // Growth is told by the event alone.
    let buffer = guest.give_event_buffer();
    null.resize(16384).unwrap();
    host.registry.notify_resized("null");
    assert_eq!(guest.event(buffer).2, 0x2a | 0x09 << 8);
    assert_eq!(guest.read_blocks(4, 16383, 1).status, 0);
}

#[test]
fn it_is_told_when_the_guest_was_told_and_when_it_looked() {
    let host = Host::new(1);
    let null = host.null("null");
    let mut guest = Guest::start(&host.socket(), LINUX, 1);
    let before = now();
    let options = TargetOptions { serial: Some("s1".into()), ..Default::default() };
    host.controllers.add_target("vm0", 3, "null", options).unwrap();
    let info = lun(&host);
    assert_eq!((info.serial.as_str(), info.read_only, info.removable), ("s1", false, false));
    assert!((before..=now()).contains(&info.attached_at), "{info:?}");
    // The guest has given no buffer yet.
    assert_eq!((info.event_at, info.guest_seen_at, info.resize_event_at), (None, None, None));

    let buffer = guest.give_event_buffer();
    guest.event(buffer);
    wait_until("the event is noted", || lun(&host).event_at.is_some());
    let event_at = lun(&host).event_at;
    assert!((info.attached_at..=now()).contains(&event_at.unwrap()));
    guest.ready(3);
    assert_eq!(lun(&host).guest_seen_at, None);
    guest.scsi(3, &READ_CAPACITY, &[], 8);
    let seen = lun(&host).guest_seen_at;
    assert!(seen >= event_at, "{seen:?} {event_at:?}");
    guest.scsi(3, &READ_CAPACITY, &[], 8);

    null.resize(16384).unwrap();
    host.registry.notify_resized("null");
    let buffer = guest.give_event_buffer();
    guest.event(buffer);
    wait_until("the growth is noted", || lun(&host).resize_event_at.is_some());
    let told = lun(&host);
    assert!(told.resize_event_at >= seen);
    assert_eq!((told.event_at, told.guest_seen_at), (event_at, seen));

    // The next guest scans by itself.
    drop(guest);
    host.wait_until_free();
    let mut guest = Guest::start(&host.socket(), LINUX, 1);
    let next = lun(&host);
    assert_eq!(next.attached_at, info.attached_at);
    assert_eq!((next.event_at, next.guest_seen_at, next.resize_event_at), (None, None, None));
    guest.ready(3);
    guest.scsi(3, &READ_CAPACITY, &[], 8);
    assert!(lun(&host).guest_seen_at > seen);
}

#[test]
fn the_socket_is_of_the_group_asked_for() {
    let host = Host::new(1);
    let options = ControllerOptions { socket_gid: Some(4242), ..Default::default() };
    host.controllers.create("vm1", options).unwrap();
    let made = host.socket().with_file_name("vm1").metadata().unwrap();
    assert_eq!((made.gid(), made.mode() & 0o7777), (4242, 0o660));
    let (_, options, _) = host.controllers.config().remove(1);
    assert_eq!(options.socket_gid, Some(4242));
}
