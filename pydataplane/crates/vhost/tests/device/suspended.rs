//! Requests whose I/O failed and that wait for somebody to do something about it: none is lost, none
//! overtakes another, and nobody waits for them for ever.

use std::sync::{Arc, Mutex};

use bdev::testing::{Fault, FaultBdev};
use bdev::{Bdev, Channel, Completion, Features, Geometry, Io, IoError, Op, OpenError, Submit};
use reactor::IoContext;
use uuid::Uuid;
use vhost_scsi::{ErrorPolicy, TargetOptions, WaitFor};

use crate::guest::*;
use crate::handover::{put_together, taken_apart};
use crate::host::*;
use crate::inflight::{go_on, tracked};

const ABORT_TASK: u32 = 0;
const BUSY: u8 = 8;
const ABORTED: u8 = 2;
const BAD_TARGET: u8 = 3;
const RESET: u8 = 4;

/// As libvirt's default: writes wait for room, reads for nothing.
fn room() -> TargetOptions {
    with(WaitFor::Room, WaitFor::Nothing)
}

fn with(write: WaitFor, read: WaitFor) -> TargetOptions {
    TargetOptions { error_policy: ErrorPolicy { write, read }, ..Default::default() }
}

/// A host with a full disk as target 0, and the disk.
fn full(options: TargetOptions) -> (Host, Arc<FaultBdev>) {
    let host = Host::new(1);
    let disk = add_full(&host, options);
    (host, disk)
}

fn add_full(host: &Host, options: TargetOptions) -> Arc<FaultBdev> {
    let disk = FaultBdev::new("disk", 512, 8192);
    disk.inject(Fault::always(Op::Write, IoError::NoSpace));
    host.registry.register(disk.clone()).unwrap();
    host.controllers.add_target("vm0", 0, "disk", options).unwrap();
    disk
}

/// Submits a write of one block.
fn write(guest: &mut Guest, id: u64, lba: u32, byte: u8) -> Request {
    guest.submit(2, flat(0), id, &rw10(0x2a, lba, 1), &[byte; 512], 0)
}

/// Waits until requests of target 0 wait, because of `error`.
fn wait_until_suspended(host: &Host, error: IoError) {
    wait_until("requests wait", || {
        let all = host.controllers.suspended(None).unwrap();
        all.iter().any(|t| (t.number, t.suspension.error) == (0, error))
    });
}

/// Submits with `submit` and waits until the device took as many `requests` as that is.
fn until_taken<T>(host: &Host, requests: u64, submit: impl FnOnce() -> T) -> T {
    let taken = || host.stats().controller.requests;
    let before = taken();
    let submitted = submit();
    wait_until("all were taken", || taken() >= before + requests);
    submitted
}

fn is_suspended(host: &Host) -> bool {
    !host.controllers.suspended(Some("vm0")).unwrap().is_empty()
}

#[test]
fn writes_without_room_wait_and_go_on_in_their_order() {
    let (host, disk) = full(room());
    let mut guest = Guest::start(&host.socket(), LINUX, 1);
    guest.ready(0);
    let first = write(&mut guest, 1, 7, 1);
    wait_until_suspended(&host, IoError::NoSpace);
    // Behind it, whatever they are.
    let second = write(&mut guest, 2, 7, 2);
    let third = guest.submit(2, flat(0), 3, &rw10(0x28, 7, 1), &[], 512);
    let told = &host.controllers.suspended(None).unwrap()[0];
    assert_eq!((told.ctrlr.as_str(), told.bdev_name.as_str()), ("vm0", "disk"));
    // There is none yet: it waits again.
    assert_eq!(host.controllers.resume("vm0", None).unwrap(), 1);
    wait_until_suspended(&host, IoError::NoSpace);
    assert_eq!(guest.try_used(2), None);
    disk.clear_faults();
    host.controllers.resume("vm0", Some(0)).unwrap();
    for request in [first, second] {
        assert_eq!(guest.finish(&request).status, 0);
    }
    assert_eq!(guest.finish(&third).data, [2; 512]);
    assert!(!is_suspended(&host));
    assert_eq!(host.controllers.resume("vm0", None).unwrap(), 0);
}

#[test]
fn what_nobody_resumes_goes_on_by_itself_when_there_is_room() {
    let (host, disk) = full(room());
    let mut guest = Guest::start(&host.socket(), LINUX, 1);
    guest.ready(0);
    let request = write(&mut guest, 1, 7, 1);
    wait_until_suspended(&host, IoError::NoSpace);
    disk.clear_faults();
    assert_eq!(guest.finish(&request).status, 0);
    wait_until("it is told no more", || !is_suspended(&host));
}

#[test]
fn errors_are_told_as_the_policy_says() {
    let no_space = [7, 0x27, 7];
    let told = |reply: &Reply| [reply.sense[2] & 15, reply.sense[12], reply.sense[13]];
    let (host, disk) = full(TargetOptions::default());
    let mut guest = Guest::start(&host.socket(), LINUX, 1);
    guest.ready(0);
    assert_eq!(told(&guest.write_blocks(0, 1, &[1; 512])), no_space);
    drop((guest, host));

    let (host, other) = full(room());
    let mut guest = Guest::start(&host.socket(), LINUX, 1);
    guest.ready(0);
    // Room is not what these want.
    other.clear_faults();
    for (op, error) in [(Op::Read, IoError::ReadMedium), (Op::Write, IoError::WriteMedium)] {
        other.inject(Fault::always(op, error));
    }
    assert_eq!(told(&guest.write_blocks(0, 1, &[1; 512])), [3, 0x0c, 0]);
    assert_eq!(told(&guest.read_blocks(0, 1, 1)), [3, 0x11, 0]);
    assert!(!is_suspended(&host));
    drop((guest, host, disk));

    let (host, disk) = full(with(WaitFor::Repair, WaitFor::Repair));
    let mut guest = Guest::start(&host.socket(), LINUX, 1);
    guest.ready(0);
    disk.clear_faults();
    for (op, error, cdb) in [
        (Op::Read, IoError::ReadMedium, rw10(0x28, 1, 1)),
        (Op::Flush, IoError::Resources, rw10(0x35, 0, 0)),
    ] {
        disk.inject(Fault::always(op, error));
        let len = if op == Op::Read { 512 } else { 0 };
        let request = guest.submit(2, flat(0), 1, &cdb, &[], len);
        wait_until_suspended(&host, error);
        disk.clear_faults();
        host.controllers.resume("vm0", None).unwrap();
        assert_eq!(guest.finish(&request).status, 0, "{op:?}");
    }
}

/// What a flush was to make durable may be lost when it fails, also where the next one succeeds.
#[test]
fn a_flush_that_failed_is_told_whatever_the_policy_says() {
    let (host, disk) = full(with(WaitFor::Repair, WaitFor::Repair));
    let mut guest = Guest::start(&host.socket(), LINUX, 1);
    guest.ready(0);
    for error in [IoError::Flush, IoError::WriteMedium] {
        disk.clear_faults();
        assert_eq!(guest.write_blocks(0, 7, &[1; 512]).status, 0);
        disk.inject(Fault { count: 1, ..Fault::always(Op::Flush, error) });
        let request = guest.submit(2, flat(0), 1, &rw10(0x35, 0, 0), &[], 0);
        let reply = guest.finish(&request);
        assert_eq!((reply.response, reply.status), (0, 2), "{error:?}");
        assert!(!is_suspended(&host));
        // As when an administrator has let flushes through again.
        _ = disk.flush_latch().map(bdev::FlushLatch::clear);
        assert_eq!(guest.scsi(0, &rw10(0x35, 0, 0), &[], 0).status, 0);
    }
}

#[test]
fn what_waits_is_aborted_and_reset_as_other_requests() {
    let (host, disk) = full(room());
    let mut guest = Guest::start(&host.socket(), LINUX, 1);
    guest.ready(0);
    let first = write(&mut guest, 1, 7, 1);
    wait_until_suspended(&host, IoError::NoSpace);
    let [second, third] =
        until_taken(&host, 2, || [2, 3].map(|n| write(&mut guest, n.into(), 7, n)));
    assert_eq!(guest.control(&tmf(ABORT_TASK, flat(0), 1), 1), [0]);
    assert_eq!(guest.finish(&first).response, ABORTED);
    assert_eq!(guest.try_used(2), None);
    assert_eq!(guest.control(&tmf(LOGICAL_UNIT_RESET, flat(0), 0), 1), [0]);
    for _ in 0..2 {
        let (head, written) = guest.used(2);
        let request = [second, third].into_iter().find(|r| r.head == head).unwrap();
        assert_eq!(guest.reply(&request, written).response, RESET);
    }
    // Nothing waits any more.
    disk.clear_faults();
    guest.ready(0);
    assert_eq!(guest.write_blocks(0, 7, &[4; 512]).status, 0);
    assert_eq!(guest.read_blocks(0, 7, 1).data, [4; 512]);
}

#[test]
fn a_target_that_goes_ends_what_waits() {
    let (host, _disk) = full(room());
    let mut guest = Guest::start(&host.socket(), LINUX, 1);
    guest.ready(0);
    let request = write(&mut guest, 1, 7, 1);
    wait_until_suspended(&host, IoError::NoSpace);
    host.controllers.remove_target("vm0", 0).unwrap();
    assert_eq!(guest.finish(&request).response, BAD_TARGET);
    assert!(!is_suspended(&host));
}

#[test]
fn a_guest_that_is_paused_sends_again_what_waited() {
    for with_region in [true, false] {
        let (host, disk) = full(room());
        let (mut guest, region) = match with_region {
            true => {
                let (guest, region) = tracked(&host);
                (guest, Some(region))
            }
            false => (Guest::start(&host.socket(), LINUX, 2), None),
        };
        guest.ready(0);
        let requests =
            until_taken(&host, 2, || [write(&mut guest, 1, 7, 1), write(&mut guest, 2, 8, 2)]);
        wait_until_suspended(&host, IoError::NoSpace);
        // A change of memory, then the stop of all rings, as QEMU does them.
        guest.tell_memory();
        for _ in &requests {
            let (head, written) = guest.used(2);
            let request = requests.iter().find(|r| r.head == head).unwrap();
            assert_eq!(guest.reply(request, written).status, BUSY);
        }
        let again = until_taken(&host, 1, || write(&mut guest, 1, 7, 1));
        let bases: Vec<_> = (0..4).map(|queue| guest.peer.base(queue)).collect();
        assert_eq!(guest.finish(&again).status, BUSY);
        assert_eq!(bases[2], u32::from(guest.used_index(2)));
        if let Some(region) = region {
            assert!(region.marked(2).is_empty());
        }
        // Whoever paused it finds why.
        assert!(is_suspended(&host));
        disk.clear_faults();
        for (queue, base) in bases.into_iter().enumerate() {
            guest.describe_queue(queue, base as u16, false);
        }
        wait_until("the guest goes on", || !is_suspended(&host));
        assert_eq!(guest.write_blocks(0, 7, &[1; 512]).status, 0);
    }
}

#[test]
fn an_orderly_end_leaves_marked_what_waits_or_has_it_sent_again() {
    let (host, _disk) = full(room());
    let (mut guest, region) = tracked(&host);
    guest.ready(0);
    let request = write(&mut guest, 1, 7, 1);
    wait_until_suspended(&host, IoError::NoSpace);
    host.controllers.delete("vm0", true).unwrap();
    assert_eq!((guest.try_used(2), region.marked(2)), (None, vec![request.head]));

    // The next has room.
    let second = Host::with_disk(2);
    go_on(&mut guest, &region, &second);
    let reply = guest.finish(&request);
    assert!(reply.status == 0 || reply.sense[2] & 15 == 6, "done, or sent again after POWER ON");

    let (host, _disk) = full(room());
    let mut guest = Guest::start(&host.socket(), LINUX, 1);
    guest.ready(0);
    let request = write(&mut guest, 1, 7, 1);
    wait_until_suspended(&host, IoError::NoSpace);
    host.controllers.delete("vm0", true).unwrap();
    assert_eq!(guest.finish(&request).status, BUSY);
}

#[test]
fn what_waited_when_the_target_died_waits_again_and_is_done_once_there_is_room() {
    let (first, _disk) = full(room());
    let (mut guest, region) = tracked(&first);
    guest.ready(0);
    let requests =
        until_taken(&first, 4, || [1, 2, 3, 4].map(|n| write(&mut guest, n.into(), 7, n)));
    wait_until_suspended(&first, IoError::NoSpace);
    guest.peer.shutdown();
    first.wait_until_free();
    assert!(!is_suspended(&first));
    assert_eq!(region.marked(2), requests.iter().map(|r| r.head).collect::<Vec<_>>());

    let second = Host::new(1);
    let disk = add_full(&second, room());
    go_on(&mut guest, &region, &second);
    wait_until_suspended(&second, IoError::NoSpace);
    disk.clear_faults();
    second.controllers.resume("vm0", None).unwrap();
    for _ in &requests {
        let (head, written) = guest.used(2);
        let request = requests.iter().find(|r| r.head == head).unwrap();
        // The new nexus has a unit attention, which one of them hears.
        let reply = guest.reply(request, written);
        assert!(reply.status == 0 || reply.sense[2] & 15 == 6);
    }
    assert_eq!(disk.image()[7 * 512..8 * 512], [4; 512]);
}

#[test]
fn another_process_goes_on_without_waiting_for_room() {
    let (host, disk) = full(room());
    let mut guest = Guest::start(&host.socket(), LINUX, 2);
    guest.ready(0);
    let request = write(&mut guest, 1, 7, 1);
    wait_until_suspended(&host, IoError::NoSpace);
    put_together(&host, taken_apart(&host), &[(0, "disk", room())]);
    assert_eq!(guest.finish(&request).status, BUSY);
    wait_until("the guest is to send it again", || !is_suspended(&host));

    // Of a guest that is paused for it, that is known on the other side.
    write(&mut guest, 2, 7, 1);
    wait_until_suspended(&host, IoError::NoSpace);
    (0..4).for_each(|queue| _ = guest.peer.base(queue));
    let since = host.controllers.suspended(None).unwrap()[0].suspension.since;
    put_together(&host, taken_apart(&host), &[(0, "disk", room())]);
    assert_eq!(host.controllers.suspended(None).unwrap()[0].suspension.since, since);
    disk.clear_faults();
}

/// A disk that answers the last I/O first, and notes in which order it does them when it is not full.
struct Reversed(Arc<Mutex<Order>>);

struct Order {
    full: bool,
    done: Vec<u64>,
    waiting: Vec<u64>,
}

impl Bdev for Reversed {
    fn name(&self) -> &str {
        "reversed"
    }
    fn aliases(&self) -> Vec<String> {
        Vec::new()
    }
    fn uuid(&self) -> Uuid {
        Uuid::new_v5(&Uuid::NAMESPACE_OID, b"reversed")
    }
    fn product_name(&self) -> &'static str {
        "Reversed"
    }
    fn geometry(&self) -> Geometry {
        Geometry { block_size: 512, physical_block_size: 512, num_blocks: 8192 }
    }
    fn features(&self) -> Features {
        Features::default()
    }
    fn open(&self, _io: &IoContext) -> Result<Box<dyn Channel>, OpenError> {
        Ok(Box::new(ReversedChannel(self.0.clone())))
    }
    fn driver_specific(&self) -> serde_json::Value {
        serde_json::Value::Null
    }
}

/// I/Os that end together.
const TOGETHER: usize = 8;

struct ReversedChannel(Arc<Mutex<Order>>);

impl Channel for ReversedChannel {
    fn submit(&mut self, io: &Io) -> Submit {
        let mut order = self.0.lock().unwrap();
        if order.full {
            order.waiting.push(io.tag);
            return Submit::Pending;
        }
        order.done.push(io.lba);
        Submit::Done(Ok(()))
    }

    fn poll(&mut self, done: &mut Vec<Completion>) -> u32 {
        let mut order = self.0.lock().unwrap();
        if order.waiting.len() < TOGETHER {
            return 0;
        }
        let ended = std::mem::take(&mut order.waiting);
        let count = ended.len() as u32;
        done.extend(ended.into_iter().rev().map(|tag| Completion {
            tag,
            result: Err(IoError::NoSpace),
            ticks: 0,
            ended: 0,
        }));
        count
    }
}

#[test]
fn what_failed_in_another_order_goes_on_in_that_of_the_ring() {
    let order = Arc::new(Mutex::new(Order { full: true, done: vec![], waiting: vec![] }));
    let host = Host::new(1);
    host.registry.register(Arc::new(Reversed(order.clone()))).unwrap();
    host.controllers.add_target("vm0", 0, "reversed", room()).unwrap();
    let mut guest = Guest::start(&host.socket(), LINUX, 1);
    guest.ready(0);
    let lbas: Vec<u32> = (10..10 + TOGETHER as u32).collect();
    lbas.iter().for_each(|lba| _ = write(&mut guest, 1, *lba, 1));
    wait_until_suspended(&host, IoError::NoSpace);
    wait_until("all have failed", || order.lock().unwrap().waiting.is_empty());
    order.lock().unwrap().full = false;
    host.controllers.resume("vm0", None).unwrap();
    lbas.iter().for_each(|_| _ = guest.used(2));
    let done: Vec<_> = order.lock().unwrap().done.iter().map(|lba| *lba as u32).collect();
    assert_eq!(done, lbas);
}
