//! Requests of a virtio-blk disk that wait because an I/O failed, and later ones that end or have ended
//! meanwhile: the ring offers them from the used index on as long as that can be, and where it does not,
//! the peer's region keeps them, or their guest is told.

use std::os::fd::AsFd;
use std::sync::atomic::Ordering;
use std::sync::{Arc, Mutex};

use bdev::testing::FaultBdev;
use bdev::{Bdev, Channel, Completion, Features, Geometry, Io, IoError, OpenError, Submit};
use guestmem::DirtyLog;
use reactor::{IoContext, Waker};
use uuid::Uuid;
use vhost_scsi::ControllerOptions;

use crate::blk::*;
use crate::blk_full::crowded_with;
use crate::blk_suspended::*;
use crate::guest::*;
use crate::handover::taken_apart;
use crate::host::*;
use crate::inflight::Region;
use crate::peer::*;

/// What ends after an earlier one has failed is not told before that: else nobody could take that again.
#[test]
fn what_ends_while_an_earlier_one_waits_is_done_again_behind_it() {
    for (stops, by_memory) in [(false, false), (false, true), (true, false)] {
        let disk = Late::default();
        let host = disk.host();
        let (mut guest, region) = guest_of(&host, 1, true);
        let mut requests = vec![put(&mut guest, 0, 1, 9), put(&mut guest, 0, 0, 1)];
        requests.push(put(&mut guest, 0, 1, 2));
        disk.wait_for(3);
        // The first fails, one that was taken before and one that was taken later are done then.
        disk.fail();
        wait_until_suspended(&host);
        let stopper = disk.clone();
        let base = match (stops, by_memory) {
            (true, _) => Some(base_while(&mut guest, move || stopper.end())),
            (false, by_memory) => {
                disk.end();
                wait_until("what was taken before is told", || guest.used_index(0) == 1);
                std::thread::sleep(std::time::Duration::from_millis(50));
                if by_memory {
                    guest.tell_memory();
                    wait_until_taken(&host, 5);
                    None
                } else {
                    Some(guest.peer.base(0))
                }
            }
        };
        let early = requests.remove(0);
        assert_eq!(finish(&mut guest, &early).0, OK);
        assert_eq!(guest.try_used(0), None);
        let heads: Vec<u16> = requests.iter().map(|r| r.head).collect();
        assert_eq!(region.unwrap().marked(0), heads);
        disk.make_room();
        match base {
            // From there on the ring has both.
            Some(base) => {
                assert_eq!(base, 1);
                start_again(&mut guest, &[base]);
            }
            None => _ = host.controllers.resume("vm0", None).unwrap(),
        }
        all_end_well(&mut guest, &requests);
    }
}

/// Where queue 0 has to go on that stops, while `meanwhile` happens.
fn base_while(guest: &mut Guest, meanwhile: impl FnOnce() + Send + 'static) -> u32 {
    let happens = std::thread::spawn(move || {
        std::thread::sleep(std::time::Duration::from_millis(50));
        meanwhile();
    });
    let base = guest.peer.base(0);
    happens.join().unwrap();
    base
}

/// Queues have no order among each other, so one that stops does not wait behind what failed of another.
#[test]
fn what_ends_of_a_ring_that_stops_is_told_though_one_of_another_ring_waits() {
    let disk = Late::default();
    let host = disk.host();
    let (mut guest, _) = guest_of(&host, 2, false);
    let other = put(&mut guest, 1, 0, 1);
    disk.wait_for(1);
    let stopped = put(&mut guest, 0, 1, 2);
    disk.wait_for(2);
    disk.fail();
    wait_until_suspended(&host);
    let ends = disk.clone();
    assert_eq!(base_while(&mut guest, move || ends.end()), 1);
    assert_eq!(finish(&mut guest, &stopped).0, OK);
    assert_eq!(guest.try_used(1), None);
    disk.make_room();
    host.controllers.resume("vm0", None).unwrap();
    assert_eq!(finish(&mut guest, &other).0, OK);
}

/// As its unit is suspended it does not go on when others have ended, either.
#[test]
fn what_is_half_done_of_a_ring_that_stops_is_kept_where_one_of_another_ring_waits() {
    let disk = Late::default();
    let (host, queue) = crowded_with(1, Arc::new(disk.clone()));
    let (mut guest, _) = guest_of(&host, 2, false);
    let mut others = vec![put(&mut guest, 1, 0, 1)];
    disk.wait_for(1);
    let out = [header(DISCARD, 0), segment(1, 4096, 0)].concat();
    let stopped = submit(&mut guest, 0, &out, 0, usize::MAX);
    disk.wait_for(2);
    others.push(put(&mut guest, 1, 1, 3));
    disk.wait_for(3);
    disk.fail();
    wait_until_suspended(&host);
    queue.fill();
    let ends = disk.clone();
    assert_eq!(base_while(&mut guest, move || ends.end()), 0);
    assert_eq!(guest.try_used(0), None);
    queue.empty();
    disk.make_room();
    host.controllers.resume("vm0", None).unwrap();
    all_end_well(&mut guest, &others);
    start_again(&mut guest, &[0]);
    all_end_well(&mut guest, &[stopped]);
    assert_eq!(host.stats().controller.errors, 0);
}

/// A disk whose I/Os to sectors 0 and 1 do not end before they are told to: those to sector 0 without room,
/// until it has some.
#[derive(Clone, Default)]
struct Late(Arc<Mutex<State>>);

#[derive(Default)]
struct State {
    has_room: bool,
    fails: bool,
    ends: bool,
    waiting: Vec<(u64, u64)>,
    waker: Option<Waker>,
}

impl Late {
    fn host(&self) -> Host {
        let host = Host::new(1);
        host.controllers.delete("vm0", false).unwrap();
        host.registry.register(Arc::new(self.clone())).unwrap();
        create(&host, room()).unwrap();
        host
    }

    fn wait_for(&self, ios: usize) {
        wait_until("all are with the disk", || self.0.lock().unwrap().waiting.len() == ios);
    }

    /// What waits fails now.
    fn fail(&self) {
        let mut state = self.0.lock().unwrap();
        state.fails = true;
        state.waker.iter().for_each(Waker::wake);
    }

    /// The others end.
    fn end(&self) {
        let mut state = self.0.lock().unwrap();
        state.ends = true;
        state.waker.iter().for_each(Waker::wake);
    }

    fn make_room(&self) {
        self.0.lock().unwrap().has_room = true;
    }
}

impl Bdev for Late {
    fn name(&self) -> &str {
        "disk"
    }
    fn aliases(&self) -> Vec<String> {
        Vec::new()
    }
    fn uuid(&self) -> Uuid {
        Uuid::new_v5(&Uuid::NAMESPACE_OID, b"late")
    }
    fn product_name(&self) -> &'static str {
        "Late"
    }
    fn geometry(&self) -> Geometry {
        Geometry { block_size: 512, physical_block_size: 512, num_blocks: 8192 }
    }
    fn features(&self) -> Features {
        Features { unmap: true, write_zeroes: true, ..Features::default() }
    }
    fn open(&self, io: &IoContext) -> Result<Box<dyn Channel>, OpenError> {
        self.0.lock().unwrap().waker = Some(io.waker());
        Ok(Box::new(self.clone()))
    }
    fn driver_specific(&self) -> serde_json::Value {
        serde_json::Value::Null
    }
}

impl Channel for Late {
    fn submit(&mut self, io: &Io) -> Submit {
        let mut state = self.0.lock().unwrap();
        if state.has_room || io.lba > 1 || (state.ends && io.lba == 1) {
            return Submit::Done(Ok(()));
        }
        if state.fails && io.lba == 0 {
            return Submit::Done(Err(IoError::NoSpace));
        }
        state.waiting.push((io.lba, io.tag));
        Submit::Pending
    }

    fn poll(&mut self, done: &mut Vec<Completion>) -> u32 {
        let mut state = self.0.lock().unwrap();
        let (fails, ends) = (state.fails, state.ends);
        let ended = state.waiting.extract_if(.., |(lba, _)| if *lba == 0 { fails } else { ends });
        let before = done.len();
        done.extend(ended.map(|(lba, tag)| {
            let result = if lba == 0 { Err(IoError::NoSpace) } else { Ok(()) };
            Completion { tag, result, ticks: 0, ended: 0 }
        }));
        (done.len() - before) as u32
    }
}

/// A guest one of whose requests waits, while one that it was given later has ended.
fn overtaken(disk: &Late, host: &Host, tracked: bool) -> (Guest, Option<Region>, Pending) {
    let (mut guest, region) = guest_of(host, 1, tracked);
    let first = put(&mut guest, 0, 0, 1);
    disk.wait_for(1);
    write(&mut guest, 5, &[2; 512]);
    disk.fail();
    wait_until_suspended(host);
    (guest, region, first)
}

#[test]
fn what_was_overtaken_stays_marked_where_the_peer_has_a_region() {
    let disk = Late::default();
    let host = disk.host();
    let (mut guest, region, first) = overtaken(&disk, &host, true);
    let region = region.unwrap();
    // The ring from the used index on has not this one: it would be lost.
    let base = guest.peer.base(0);
    assert_eq!((base, guest.try_used(0), region.marked(0)), (2, None, vec![first.head]));
    // It is not to be saved now; nor if another process has it.
    let overtaken = || host.controllers.suspended(None).unwrap()[0].overtaken;
    wait_until("it is told", overtaken);
    let controllers = taken_apart(&host);
    host.controllers.inherit(controllers).unwrap();
    host.controllers.expect_blk("vm0", ControllerOptions::default()).unwrap();
    create(&host, room()).unwrap();
    host.controllers.take_over().unwrap();
    host.controllers.release();
    assert!(overtaken());
    start_again(&mut guest, &[base]);
    wait_until("it waits again", || is_suspended(&host) && !overtaken());
    guest.tell_memory();
    wait_until_suspended(&host);
    disk.make_room();
    host.controllers.resume("vm0", None).unwrap();
    assert_eq!(finish(&mut guest, &first).0, OK);
    assert!(region.marked(0).is_empty());
    assert_eq!((guest.peer.base(0), host.stats().controller.errors), (2, 0));
}

/// As what a poller may have taken is bounded, some of them are not taken again before those of other rings end.
#[test]
fn what_was_not_taken_again_when_its_ring_stops_is_done_if_a_full_device_is_about_to_have_room() {
    const EACH: usize = 250;
    let (host, queue) = crowded_with(1, FaultBdev::new("disk", 512, 8192));
    let (mut guest, _) = guest_of(&host, 5, false);
    queue.fill();
    let mut requests: Vec<Vec<_>> = Vec::new();
    requests.push((0..EACH).map(|n| put(&mut guest, 0, n as u64, 1)).collect());
    // That the ring offers them, too, says nobody any more.
    let id = submit(&mut guest, 0, &header(GET_ID, 0), 20, usize::MAX);
    assert_eq!(finish(&mut guest, &id).0, OK);
    for ring in 1..5 {
        requests.push((0..EACH).map(|n| put(&mut guest, ring, n as u64, 2)).collect());
    }
    wait_until_taken(&host, 1024);
    guest.tell_memory();
    queue.wait_until_seldom_asked();
    queue.refuses.store(3, Ordering::Release);
    queue.empty();
    assert_eq!(guest.peer.base(0), 1 + EACH as u32);
    requests.iter().for_each(|of_ring| all_end_well(&mut guest, of_ring));
    assert_eq!(host.stats().controller.errors, 0);
}

/// Only its number is known, so all that can be done is to say so.
#[test]
fn a_guest_that_was_saved_while_one_was_overtaken_does_not_lose_it_in_silence() {
    let disk = Late::default();
    let host = disk.host();
    let (mut guest, _, _) = overtaken(&disk, &host, true);
    let base = guest.peer.base(0);
    guest.peer.shutdown();
    host.wait_until_free();
    guest.reconnect(&host.socket());
    let _region = Region::of(&mut guest, 1);
    guest.describe_queue(0, base as u16, false);
    let stopped =
        || host.controllers.list(None).unwrap()[0].session.clone().unwrap().stopped_queues;
    wait_until("it is told", || !stopped().is_empty());
    let (queue, why) = stopped().remove(0);
    assert_eq!(queue, 0);
    assert!(why.contains("saved or migrated"), "{why}");
    // Its driver starts afresh.
    guest.peer.base(0);
    guest.start_queue(0);
    write(&mut guest, 5, &[2; 512]);
}

#[test]
fn what_was_overtaken_ends_with_an_error_where_nobody_could_know_of_it() {
    // Without a region.
    let disk = Late::default();
    let host = disk.host();
    let (mut guest, _, first) = overtaken(&disk, &host, false);
    // A change of memory is no end.
    guest.tell_memory();
    wait_until_taken(&host, 3);
    assert_eq!(guest.try_used(0), None);
    assert_eq!(guest.peer.base(0), 2);
    assert_eq!(finish(&mut guest, &first).0, IOERR);
    assert!(guest.called(0, DEADLINE));

    // While QEMU migrates the guest, which the region does not go with.
    let disk = Late::default();
    let host = disk.host();
    let (mut guest, region, first) = overtaken(&disk, &host, true);
    let (_, fd) = crate::guest::region(0, 4096 / 8);
    let log = DirtyLog::new(fd.as_fd(), 0, 4096 / 8).unwrap();
    guest.peer.send(SET_LOG_BASE, &longs(&[4096 / 8, 0]), &[fd.as_fd()]);
    guest.peer.reply(SET_LOG_BASE).expect("a reply");
    guest.peer.ask(SET_FEATURES, &(BLK | F_LOG_ALL).to_le_bytes(), &[]);
    wait_until_taken(&host, 3);
    assert_eq!(guest.peer.base(0), 2);
    assert!(log.is_marked(first.space));
    assert_eq!(finish(&mut guest, &first).0, IOERR);
    assert!(region.unwrap().marked(0).is_empty());

    // At an orderly end.
    let disk = Late::default();
    let host = disk.host();
    let (mut guest, _, first) = overtaken(&disk, &host, false);
    host.controllers.delete("vm0", true).unwrap();
    assert_eq!(finish(&mut guest, &first).0, IOERR);
}
