//! I/O that does not end: nobody waits for ever, and nothing it needs is taken away.

use std::os::fd::AsFd;
use std::time::Duration;

use vhost_scsi::{ControllerError, TargetOptions, Timeouts};

use crate::guest::*;
use crate::host::*;
use crate::peer::*;

const SHORT: Duration = Duration::from_millis(100);

/// A host with a shut gate as target 0, a malloc disk as target 1, and a guest with one request of
/// each queue at the gate.
fn stuck(timeouts: Timeouts) -> (Host, Gate, Guest, Request) {
    let host = Host::with_timeouts(2, timeouts);
    let gate = host.gate("gate");
    host.add(0, "gate");
    host.malloc("disk");
    host.add(1, "disk");
    let mut guest = Guest::start(&host.socket(), LINUX, 2);
    guest.ready(0);
    guest.ready(1);
    gate.shut();
    let request = guest.submit(2, flat(0), 1, &rw10(0x28, 0, 1), &[], 512);
    guest.submit(3, flat(0), 2, &rw10(0x2a, 1, 1), &[7; 512], 0);
    gate.wait_for(2);
    (host, gate, guest, request)
}

fn short_timeouts() -> Timeouts {
    Timeouts { message: SHORT, ..Timeouts::default() }
}

#[test]
fn a_message_that_waits_in_vain_ends_the_session_and_not_the_memory() {
    type Message = fn(&mut Guest) -> bool;
    let messages: [Message; 5] = [
        |guest| {
            guest.peer.send(GET_VRING_BASE, &words(&[2, 0]), &[]);
            guest.peer.reply(GET_VRING_BASE).is_none()
        },
        |guest| guest.peer.try_ask(SET_VRING_BASE, &words(&[3, 0]), &[]) != Some(Ack::Done),
        |guest| {
            let mut body = words(&[1, 0]);
            body.extend(spec_bytes(&guest.regions[0].0));
            let fd = guest.regions[0].1.try_clone().unwrap();
            guest.peer.try_ask(SET_MEM_TABLE, &body, &[fd.as_fd()]) != Some(Ack::Done)
        },
        |guest| guest.peer.try_ask(SET_VRING_ENABLE, &words(&[2, 0]), &[]) != Some(Ack::Done),
        |guest| {
            guest.peer.try_ask(SET_FEATURES, &(LINUX & !(1 << 29)).to_le_bytes(), &[])
                != Some(Ack::Done)
        },
    ];
    for (nth, message) in messages.into_iter().enumerate() {
        let (host, gate, mut guest, request) = stuck(short_timeouts());
        let used = [guest.used_index(2), guest.used_index(3)];
        assert!(message(&mut guest), "message {nth} is not done");
        assert!(guest.peer.is_closed());
        // The controller does its work, and the next guest waits for its turn.
        host.malloc("late");
        host.add(2, "late");
        let path = host.socket();
        let next = std::thread::spawn(move || Guest::start(&path, LINUX, 1));
        assert!(host.controllers.list(Some("vm0")).unwrap()[0].session.is_some());
        assert!(!next.is_finished());
        assert_eq!(guest.read(request.data, 512), [0xee; 512]);
        gate.open();
        // What was read went to the guest's memory, which was still there, but it is not told.
        let mut next = next.join().unwrap();
        gate.wait_for(0);
        assert_eq!(guest.read(request.data, 512), [0; 512]);
        assert_eq!([guest.used_index(2), guest.used_index(3)], used, "message {nth}");
        for target in 0..3 {
            next.ready(target);
        }
        assert_eq!(next.read_blocks(0, 1, 1).data, [7; 512]);
    }
}

#[test]
fn a_controller_with_io_that_does_not_end_is_deleted_and_its_bdevs_stay_in_use() {
    let (host, gate, mut guest, _) = stuck(Timeouts { method: SHORT, ..short_timeouts() });
    let delete = |force| host.controllers.delete("vm0", force);
    assert!(matches!(delete(false), Err(ControllerError::Connected(_))));
    let e = delete(true).unwrap_err();
    assert!(matches!(e, ControllerError::StillEnding { .. }), "{e}");
    assert!(guest.peer.is_closed());
    assert!(matches!(delete(true), Err(ControllerError::NotFound(_))));
    assert!(!host.socket().exists());
    // One of the same name is another.
    host.controllers.create("vm0", Default::default()).unwrap();
    let e = host.controllers.add_target("vm0", 0, "gate", TargetOptions::default()).unwrap_err();
    assert!(e.to_string().contains("in use by target 0 of controller vm0"), "{e}");
    gate.open();
    wait_until("the bdev is free", || host.registry.owners("gate").is_empty());
    host.add(0, "gate");
    assert_eq!(guest.used_index(2), 4, "behind the end of the connection the rings are its own");
    let mut guest = Guest::start(&host.socket(), LINUX, 1);
    guest.ready(0);
}

#[test]
fn a_target_whose_io_does_not_end_goes_when_it_does_whatever_the_guest_does() {
    let (host, gate, guest, _) = stuck(Timeouts { method: SHORT, ..short_timeouts() });
    let e = host.controllers.remove_target("vm0", 0).unwrap_err();
    assert!(matches!(e, ControllerError::StillBusy { .. }), "{e}");
    drop(guest);
    let e = host.controllers.remove_target("vm0", 0).unwrap_err();
    assert!(matches!(e, ControllerError::StillBusy { .. }), "{e}");
    // What it has in flight ends; on a busy machine later than a method waits.
    wait_until("the other target is removed", || {
        matches!(
            host.controllers.remove_target("vm0", 1),
            Ok(()) | Err(ControllerError::NoTarget { .. })
        )
    });
    assert_eq!(host.registry.owners("gate").len(), 1);
    gate.open();
    host.wait_until_free();
    wait_until("the bdev is free", || host.registry.owners("gate").is_empty());
}

#[test]
fn while_a_message_waits_methods_give_up_and_leave_nothing_behind() {
    let timeouts =
        Timeouts { method: SHORT, message: Duration::from_secs(60), ..Timeouts::default() };
    let (host, gate, mut guest, _) = stuck(timeouts);
    guest.peer.send(GET_VRING_BASE, &words(&[2, 0]), &[]);
    let add = |bdev: &str| host.controllers.add_target("vm0", -1, bdev, TargetOptions::default());
    // Some may be added before the thread has seen the message.
    let (late, refused) = (0..100)
        .map(|n| {
            let name = format!("late{n}");
            host.malloc(&name);
            let added = add(&name);
            (name, added)
        })
        .find_map(|(name, added)| added.err().map(|why| (name, why)))
        .expect("the message waits");
    assert!(matches!(refused, ControllerError::Waiting { .. }), "{refused}");
    assert!(host.registry.owners(&late).is_empty());
    let e = host.controllers.delete("vm0", false).unwrap_err();
    assert!(matches!(e, ControllerError::Connected(_)), "{e}");
    gate.open();
    assert!(guest.peer.reply(GET_VRING_BASE).is_some());
    add(&late).unwrap();
}

#[test]
fn a_request_of_many_ios_ends_with_the_next_one_when_its_session_ends() {
    let (host, gate, mut guest, _) = stuck(Timeouts { method: SHORT, ..Timeouts::default() });
    let before = gate.reads();
    // VERIFY (10) of 4 MiB.
    guest.submit(2, flat(0), 3, &rw10(0x2f, 0, 8192), &[], 0);
    gate.wait_for(3);
    assert!(host.controllers.delete("vm0", true).is_err());
    assert!(guest.peer.is_closed());
    gate.open();
    wait_until("the bdev is free", || host.registry.owners("gate").is_empty());
    // The one that was there before, and the first piece of this.
    assert_eq!(gate.reads(), before + 2);
}
