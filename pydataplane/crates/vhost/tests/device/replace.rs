//! A target goes on with another bdev: the guest sees the same disk, and waits a moment at most.

use std::sync::Arc;
use std::sync::mpsc::channel;

use bdev::{Bdev, Claim};
use scsi::UnitAttention;
use vhost_scsi::{ControllerError, TargetOptions};

use crate::guest::*;
use crate::host::*;

fn bdev(host: &Host, name: &str) -> Arc<dyn Bdev> {
    host.registry.get(name).unwrap()
}

/// Has target 0 go on with a bdev; it still belongs to its own.
fn replace(host: &Host, name: &str) -> Result<(), ControllerError> {
    host.controllers.replace("vm0", 0, &host.shown(), bdev(host, name), None, Box::new(|| Ok(())))
}

fn owners(host: &Host, name: &str) -> Vec<String> {
    host.registry.owners(name).into_iter().map(|(owner, _)| owner).collect()
}

#[test]
fn the_guest_goes_on_where_it_is_put_and_sees_the_same_disk() {
    let host = Host::with_disk(2);
    host.malloc("disk1");
    let mut guest = Guest::start(&host.socket(), LINUX, 2);
    guest.ready(0);
    let page = [0x12, 1, 0x83, 0, 255, 0];
    let before = guest.submit(2, flat(0), 1, &page, &[], 255);
    let before = guest.finish(&before).data;
    assert_eq!(guest.write_blocks(0, 3, &[1; 512]).status, 0);
    replace(&host, "disk1").unwrap();
    // Neither a unit attention nor another name.
    assert_eq!(guest.read_blocks(0, 3, 1).data, [0; 512]);
    let after = guest.submit(2, flat(0), 2, &page, &[], 255);
    assert_eq!(guest.finish(&after).data, before);
    assert_eq!(guest.write_blocks(0, 3, &[2; 512]).status, 0);
    replace(&host, "disk0").unwrap();
    assert_eq!(guest.read_blocks(0, 3, 1).data, [1; 512]);
    assert_eq!(owners(&host, "disk0"), ["target 0 of controller vm0"]);
    assert!(owners(&host, "disk1").is_empty());
}

#[test]
fn requests_that_come_meanwhile_wait_and_begin_in_their_order() {
    let (host, gate) = Host::gated(1);
    host.malloc("disk1");
    let mut guest = Guest::start(&host.socket(), LINUX, 1);
    guest.ready(0);
    gate.shut();
    let first = guest.submit(2, flat(0), 1, &rw10(0x2a, 7, 1), &[1; 512], 0);
    gate.wait_for(1);
    let (reached, is_reached) = channel();
    let (go_on, goes_on) = channel::<()>();
    std::thread::scope(|scope| {
        let controllers = host.controllers.clone();
        let (own, other) = (host.shown(), bdev(&host, "disk1"));
        let replaced = scope.spawn(move || {
            let between = Box::new(move || {
                reached.send(()).unwrap();
                goes_on.recv().map_err(|e| e.to_string())
            });
            controllers.replace("vm0", 0, &own, other, None, between)
        });
        // What is in flight is waited for.
        assert!(is_reached.try_recv().is_err());
        gate.open();
        is_reached.recv().unwrap();
        assert_eq!(guest.finish(&first).status, 0);
        let later: Vec<_> = (2..6)
            .map(|id| guest.submit(2, flat(0), id, &rw10(0x2a, 7, 1), &[id as u8; 512], 0))
            .collect();
        let read = guest.submit(2, flat(0), 9, &rw10(0x28, 7, 1), &[], 512);
        assert_eq!(guest.try_used(2), None, "nothing begins");
        go_on.send(()).unwrap();
        replaced.join().unwrap().unwrap();
        for request in &later {
            assert_eq!(guest.finish(request).status, 0);
        }
        assert_eq!(guest.finish(&read).data, [5; 512]);
    });
}

#[test]
fn what_was_to_be_done_first_fails_and_all_is_as_it_was() {
    let host = Host::with_disk(1);
    host.malloc("disk1");
    let mut guest = Guest::start(&host.socket(), LINUX, 1);
    guest.ready(0);
    assert_eq!(guest.write_blocks(0, 3, &[1; 512]).status, 0);
    let between = Box::new(|| Err("the journal is full".to_owned()));
    let claim: Claim = host.registry.claim("disk1", "a copy").unwrap();
    let volume = Some((claim.also("target 0 of controller vm0"), TargetOptions::default()));
    let said =
        host.controllers.replace("vm0", 0, &host.shown(), bdev(&host, "disk1"), volume, between);
    let said = said.unwrap_err().to_string();
    assert_eq!(said, "target 0 of controller vm0 stays with bdev disk0: the journal is full");
    assert_eq!(guest.read_blocks(0, 3, 1).data, [1; 512]);
    assert_eq!(owners(&host, "disk1"), ["a copy"], "who held it still does");
}

#[test]
fn a_disk_that_does_not_answer_keeps_its_target() {
    let (host, gate) = Host::gated(1);
    host.malloc("disk1");
    let mut guest = Guest::start(&host.socket(), LINUX, 1);
    guest.ready(0);
    gate.shut();
    let hangs = guest.submit(2, flat(0), 1, &rw10(0x28, 7, 1), &[], 512);
    gate.wait_for(1);
    let said = replace(&host, "disk1").unwrap_err().to_string();
    assert!(said.contains("its I/O in flight has not ended after 5 s"), "{said}");
    // And serves on.
    gate.open();
    assert_eq!(guest.finish(&hangs).status, 0);
    assert_eq!(guest.read_blocks(0, 8, 1).status, 0);
    replace(&host, "disk1").unwrap();
}

#[test]
fn with_a_volume_the_target_belongs_to_it_also_without_a_guest() {
    let host = Host::with_disk(1);
    host.malloc("disk1");
    let claim = host.registry.claim("disk1", "target 0 of controller vm0").unwrap();
    let identity = bdev(&host, "disk0").uuid();
    let mut options = TargetOptions::default();
    options.characteristics.uuid = Some(identity);
    let volume = Some((claim, options.clone()));
    host.controllers
        .replace("vm0", 0, &host.shown(), bdev(&host, "disk1"), volume, Box::new(|| Ok(())))
        .unwrap();
    assert!(owners(&host, "disk0").is_empty());
    let (_, _, targets) = host.controllers.config().remove(0);
    assert_eq!((&*targets[0].bdev_name, &targets[0].options), ("disk1", &options));
    let (name, unit) = host.controllers.unit("vm0", 0).unwrap();
    assert_eq!(
        (&*name, unit.identity(), unit.serial()),
        ("disk1", identity, &*identity.to_string())
    );
    let mut guest = Guest::start(&host.socket(), LINUX, 1);
    guest.ready(0);
    assert_eq!(guest.write_blocks(0, 3, &[1; 512]).status, 0);
    // It goes with its own bdev now.
    host.registry.unregister("disk0").unwrap();
    assert_eq!(guest.read_blocks(0, 3, 1).data, [1; 512]);
}

#[test]
fn unit_attentions_that_wait_are_not_lost_and_what_differs_is_told() {
    let host = Host::with_disk(1);
    let null = bdev::Null::create("larger", 512, 16384, None).unwrap();
    host.registry.register(null).unwrap();
    let mut guest = Guest::start(&host.socket(), LINUX, 1);
    guest.ready(0);
    let (_, unit) = host.controllers.unit("vm0", 0).unwrap();
    unit.post(UnitAttention::LunsChanged);
    replace(&host, "larger").unwrap();
    let mut sense = || {
        let reply = guest.submit(2, flat(0), 1, &[0; 6], &[], 0);
        let reply = guest.finish(&reply);
        let told = reply.sense.get(..14).map(|sense| [sense[2] & 15, sense[12], sense[13]]);
        (reply.status, told.unwrap_or_default())
    };
    assert_eq!(sense(), (2, [6, 0x3f, 0x0e]), "that of before");
    assert_eq!(sense(), (2, [6, 0x2a, 0x09]), "it is larger");
    assert_eq!(sense(), (2, [6, 0x3f, 0x03]), "and of another kind");
    assert_eq!(sense().0, 0);
}

#[test]
fn what_is_on_another_bdev_by_now_stays_there_and_that_is_shown() {
    let host = Host::with_disk(1);
    host.malloc("disk1");
    host.malloc("disk2");
    let mut guest = Guest::start(&host.socket(), LINUX, 1);
    guest.ready(0);
    let before = host.shown();
    replace(&host, "disk1").unwrap();
    let shown = || host.controllers.list(None).unwrap()[0].targets[0].bdev_name.clone();
    assert_eq!(shown(), "disk1");
    assert_eq!(guest.write_blocks(0, 3, &[1; 512]).status, 0);
    let late = || Box::new(|| panic!("its I/O is not held up"));
    for other in ["disk0", "disk2"] {
        let said = host.controllers.replace("vm0", 0, &before, bdev(&host, other), None, late());
        let said = said.unwrap_err().to_string();
        assert!(said.ends_with("it is on another bdev by now"), "{said}");
    }
    assert_eq!(guest.read_blocks(0, 3, 1).data, [1; 512]);
    assert_eq!(shown(), "disk1");
}

#[test]
fn there_is_no_such_target() {
    let host = Host::with_disk(1);
    let other = || bdev(&host, "disk0");
    let none = |name, number| {
        let done =
            host.controllers.replace(name, number, &other(), other(), None, Box::new(|| Ok(())));
        done.unwrap_err().to_string()
    };
    assert_eq!(none("vm0", 7), "controller vm0 has no target 7");
    assert_eq!(none("vm9", 0), "there is no controller vm9");
}
