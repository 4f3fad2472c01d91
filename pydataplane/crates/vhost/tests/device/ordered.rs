//! The task attributes ORDERED and HEAD OF QUEUE among requests that several reactors take.

use std::collections::HashMap;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use bdev::testing::{Fault, FaultBdev};
use bdev::{Bdev, Channel, Completion, Features, Geometry, Io, IoError, Op, OpenError, Submit};
use reactor::IoContext;
use uuid::Uuid;
use vhost_scsi::{ControllerOptions, TargetOptions};

use crate::guest::*;
use crate::host::*;
use crate::moving::{moves, places};

const SIMPLE: u8 = 0;
const ORDERED: u8 = 1;
const HEAD_OF_QUEUE: u8 = 2;
const BUSY: u8 = 8;
const ABORT_TASK: u32 = 0;

/// A host with a gate as target 0 and a malloc disk as target 1, and a guest with a queue on each reactor.
pub fn gated(reactors: usize) -> (Host, Gate, Guest) {
    let (host, gate) = Host::gated(reactors);
    host.malloc("disk");
    host.add(1, "disk");
    let mut guest = Guest::start(&host.socket(), LINUX, reactors);
    guest.ready(0);
    guest.ready(1);
    let places = places(&host);
    assert!((0..reactors).all(|n| places[n] == (n as u16 + 2, n)), "{places:?}");
    (host, gate, guest)
}

/// A READ of the block `id` of target 0.
pub fn read(guest: &mut Guest, attribute: u8, queue: usize, id: u64) -> Request {
    guest.submit_with(attribute, queue, flat(0), id, &rw10(0x28, id as u32, 1), &[], 512)
}

/// A read of target 1, so that all that is before it in the ring was taken.
pub fn pass_by(guest: &mut Guest, queue: usize) {
    let request = guest.submit(queue, flat(1), 999, &rw10(0x28, 0, 8), &[], 4096);
    assert_eq!(guest.finish(&request).status, 0);
}

/// A SIMPLE request in flight on queue 2, and an ORDERED one behind it on queue 3, which was taken.
fn one_behind_another(guest: &mut Guest, gate: &Gate) -> (Request, Request) {
    gate.shut();
    let simple = read(guest, SIMPLE, 2, 0);
    gate.wait_for(1);
    let ordered = read(guest, ORDERED, 3, 1);
    pass_by(guest, 3);
    (simple, ordered)
}

pub fn good(guest: &mut Guest, request: &Request) {
    let reply = guest.finish(request);
    assert_eq!((reply.response, reply.status), (0, 0));
}

#[test]
fn order_is_kept_among_the_queues_of_two_reactors() {
    let (_host, gate, mut guest) = gated(2);
    let (simple, ordered) = one_behind_another(&mut guest, &gate);
    let later = read(&mut guest, SIMPLE, 2, 2);
    pass_by(&mut guest, 2);
    std::thread::sleep(Duration::from_millis(20));
    assert_eq!(gate.waiting(), 1, "the ordered one waits, and what came after it");
    // Begins beside them, on either reactor.
    let heads = [read(&mut guest, HEAD_OF_QUEUE, 2, 3), read(&mut guest, HEAD_OF_QUEUE, 3, 4)];
    gate.wait_for(3);
    gate.open();
    assert_eq!([guest.used(3).0, guest.used(3).0], [heads[1].head, ordered.head]);
    let mut first = [guest.used(2).0, guest.used(2).0];
    first.sort_unstable();
    let mut both = [simple.head, heads[0].head];
    both.sort_unstable();
    assert_eq!((first, guest.used(2).0), (both, later.head));
}

#[test]
fn while_an_ordered_request_is_with_its_device_only_those_at_the_head_begin_elsewhere() {
    let (_host, gate, mut guest) = gated(3);
    gate.shut();
    let ordered = read(&mut guest, ORDERED, 3, 1);
    gate.wait_for(1);
    let later = read(&mut guest, SIMPLE, 2, 2);
    pass_by(&mut guest, 2);
    std::thread::sleep(Duration::from_millis(20));
    assert_eq!(gate.waiting(), 1);
    let head = read(&mut guest, HEAD_OF_QUEUE, 4, 3);
    gate.wait_for(2);
    gate.open();
    for request in [ordered, later, head] {
        good(&mut guest, &request);
    }
}

#[test]
fn of_two_reactors_with_an_ordered_request_each_the_first_to_take_its_own_is_first() {
    let (host, trace) = traced(2);
    let mut guest = Guest::start(&host.socket(), LINUX, 2);
    guest.ready(0);
    guest.ready(1);
    for round in 0..20 {
        trace.disk.hold();
        trace.log.lock().unwrap().clear();
        let (one, other) = (2 + round % 2, 3 - round % 2);
        let simple = read(&mut guest, SIMPLE, other, 0);
        wait_until("it has begun", || trace.disk.held() == 1);
        let sent =
            [(ORDERED, one), (SIMPLE, one), (ORDERED, other), (SIMPLE, other), (ORDERED, one)];
        let mut requests = vec![simple];
        for (n, (attribute, queue)) in sent.into_iter().enumerate() {
            requests.push(read(&mut guest, attribute, queue, n as u64 + 1));
            pass_by(&mut guest, queue);
        }
        trace.disk.release();
        for request in &requests {
            let (head, written) = guest.used(request.queue);
            assert_eq!(head, request.head);
            assert_eq!(guest.reply(request, written).status, 0);
        }
        let log = trace.log.lock().unwrap();
        let begun: Vec<u64> = log.iter().filter(|(begins, _)| *begins).map(|(_, id)| *id).collect();
        assert_eq!(begun, [0, 1, 2, 3, 4, 5], "as they were taken");
        assert!(log.chunks(2).all(|pair| pair[0].1 == pair[1].1), "one after the other: {log:?}");
    }
}

#[test]
fn a_reactor_that_sleeps_is_woken_for_an_ordered_request_of_another_one() {
    let (_host, gate, mut guest) = gated(3);
    gate.open();
    for n in 0..30 {
        std::thread::sleep(Duration::from_millis(2));
        let request = read(&mut guest, ORDERED, 2 + n % 3, n as u64);
        good(&mut guest, &request);
    }
}

#[test]
fn an_ordered_request_that_is_aborted_while_it_waits_lets_the_others_go_on() {
    for function in [ABORT_TASK, LOGICAL_UNIT_RESET] {
        let (_host, gate, mut guest) = gated(2);
        let (simple, ordered) = one_behind_another(&mut guest, &gate);
        let later = read(&mut guest, SIMPLE, 3, 2);
        pass_by(&mut guest, 3);
        let (asked, _) = guest.submit_control(&tmf(function, flat(0), 1), 1);
        let mut ended = vec![guest.used(3).0];
        if function != ABORT_TASK {
            ended.push(guest.used(3).0);
        }
        assert!(ended.contains(&ordered.head), "at once: {ended:?}");
        if function == ABORT_TASK {
            gate.wait_for(2);
        }
        gate.open();
        assert_eq!((guest.used(0).0, guest.used(2).0), (asked, simple.head));
        match function {
            ABORT_TASK => assert_eq!(guest.used(3).0, later.head),
            _ => assert!(ended.contains(&later.head)),
        }
        [2, 3].into_iter().for_each(|queue| pass_by(&mut guest, queue));
        // Else a unit attention.
        if function == ABORT_TASK {
            let request = read(&mut guest, ORDERED, 2, 5);
            assert_eq!(guest.used(2).0, request.head);
        }
    }
}

#[test]
fn a_queue_that_stops_with_an_ordered_request_that_waits_lets_the_others_go_on() {
    let (_host, gate, mut guest) = gated(2);
    let (simple, ordered) = one_behind_another(&mut guest, &gate);
    let later = read(&mut guest, SIMPLE, 2, 2);
    pass_by(&mut guest, 2);
    assert_eq!(gate.waiting(), 1);
    let base = guest.peer.base(3);
    let (head, written) = guest.used(3);
    assert_eq!((head, guest.reply(&ordered, written).status), (ordered.head, BUSY));
    gate.wait_for(2);
    gate.open();
    let mut ended = [guest.used(2).0, guest.used(2).0];
    ended.sort_unstable();
    let mut both = [simple.head, later.head];
    both.sort_unstable();
    assert_eq!(ended, both);
    // A reactor without queues is not waited for, and one that has a queue again is.
    let alone = read(&mut guest, ORDERED, 2, 3);
    assert_eq!(guest.used(2).0, alone.head);
    guest.describe_queue(3, base as u16, false);
    pass_by(&mut guest, 3);
    gate.shut();
    let simple = read(&mut guest, SIMPLE, 3, 4);
    gate.wait_for(1);
    let ordered = read(&mut guest, ORDERED, 2, 5);
    pass_by(&mut guest, 2);
    assert_eq!(gate.waiting(), 1);
    gate.open();
    assert_eq!((guest.used(3).0, guest.used(2).0), (simple.head, ordered.head));
}

#[test]
fn an_ordered_request_that_fails_lets_the_others_go_on() {
    let (host, trace) = traced(2);
    let mut guest = Guest::start(&host.socket(), LINUX, 2);
    guest.ready(0);
    guest.ready(1);
    for n in 0..20 {
        let (one, other) = (2 + n % 2, 3 - n % 2);
        // Beyond the end: it ends before it comes to the disk; then one that fails there.
        let beyond = guest.submit_with(ORDERED, one, flat(0), 1, &rw10(0x28, 8192, 1), &[], 512);
        assert_eq!(guest.finish(&beyond).status, 2);
        trace.disk.inject(Fault::always(Op::Read, IoError::ReadMedium));
        let failed = read(&mut guest, ORDERED, other, 2);
        assert_eq!(guest.finish(&failed).status, 2);
        trace.disk.clear_faults();
        let simple = read(&mut guest, SIMPLE, one, 3);
        good(&mut guest, &simple);
    }
}

#[test]
fn a_session_that_ends_while_an_ordered_request_waits_leaves_nothing_of_it() {
    let (host, gate, mut guest) = gated(2);
    one_behind_another(&mut guest, &gate);
    let reads = gate.reads();
    drop(guest);
    host.wait_until_left();
    gate.open();
    host.wait_until_free();
    assert_eq!(gate.reads(), reads + 1, "the ordered one was begun for nobody");
    let mut guest = Guest::start(&host.socket(), LINUX, 2);
    guest.ready(0);
    let ordered = read(&mut guest, ORDERED, 3, 1);
    good(&mut guest, &ordered);
}

#[test]
fn a_change_of_memory_waits_for_an_ordered_request_and_what_waits_for_it() {
    let (_host, gate, mut guest) = gated(2);
    let (simple, ordered) = one_behind_another(&mut guest, &gate);
    let later = read(&mut guest, SIMPLE, 2, 2);
    pass_by(&mut guest, 2);
    std::thread::scope(|scope| {
        scope.spawn(|| {
            std::thread::sleep(Duration::from_millis(50));
            gate.open();
        });
        guest.tell_memory();
    });
    assert_eq!(guest.used(3).0, ordered.head);
    assert_eq!([guest.used(2).0, guest.used(2).0], [simple.head, later.head]);
}

/// The task set of a controller is its own (TST 001b).
#[test]
fn an_ordered_request_does_not_wait_for_another_controller_with_the_volume() {
    let host = Host::new(2);
    let gate = host.gate("gate");
    host.controllers.create("vm1", ControllerOptions::default()).unwrap();
    for controller in ["vm0", "vm1"] {
        let shared = TargetOptions { shareable: true, ..Default::default() };
        host.controllers.add_target(controller, 0, "gate", shared).unwrap();
    }
    let mut guest = Guest::start(&host.socket(), LINUX, 2);
    let mut other = Guest::start(&host.socket().with_file_name("vm1"), LINUX, 2);
    guest.ready(0);
    other.ready(0);
    gate.shut();
    let simple = read(&mut guest, SIMPLE, 2, 1);
    gate.wait_for(1);
    let ordered = read(&mut other, ORDERED, 3, 1);
    gate.wait_for(2);
    gate.open();
    good(&mut guest, &simple);
    good(&mut other, &ordered);
}

#[test]
fn a_queue_moves_only_once_its_ordered_request_has_ended() {
    let (host, gate, mut guest) = gated(2);
    let (simple, ordered) = one_behind_another(&mut guest, &gate);
    // Given up after a while: what it would wait for is on the other reactor.
    host.controllers.move_queue("vm0", 3, 0);
    crate::moving::carried_out(&host);
    assert_eq!((places(&host)[1], gate.waiting()), ((3, 1), 1));
    gate.open();
    good(&mut guest, &simple);
    good(&mut guest, &ordered);
    moves(&host, 3, 0);
    gate.shut();
    let simple = read(&mut guest, SIMPLE, 2, 2);
    gate.wait_for(1);
    let ordered = read(&mut guest, ORDERED, 3, 3);
    pass_by(&mut guest, 3);
    assert_eq!(gate.waiting(), 1);
    gate.open();
    good(&mut guest, &simple);
    good(&mut guest, &ordered);
}

/// A disk that notes which reads begin and end, by their block.
pub struct Traced {
    pub disk: Arc<FaultBdev>,
    pub log: Log,
}

/// Whether it begins, and its block.
pub type Log = Arc<Mutex<Vec<(bool, u64)>>>;

impl Bdev for Traced {
    fn name(&self) -> &str {
        self.disk.name()
    }
    fn aliases(&self) -> Vec<String> {
        Vec::new()
    }
    fn uuid(&self) -> Uuid {
        self.disk.uuid()
    }
    fn product_name(&self) -> &'static str {
        "Traced"
    }
    fn geometry(&self) -> Geometry {
        self.disk.geometry()
    }
    fn features(&self) -> Features {
        self.disk.features()
    }
    fn open(&self, io: &IoContext) -> Result<Box<dyn Channel>, OpenError> {
        let (inner, log) = (self.disk.open(io)?, self.log.clone());
        Ok(Box::new(TracedChannel { inner, log, blocks: HashMap::new() }))
    }
    fn driver_specific(&self) -> serde_json::Value {
        serde_json::Value::Null
    }
}

struct TracedChannel {
    inner: Box<dyn Channel>,
    log: Log,
    blocks: HashMap<u64, u64>,
}

impl Channel for TracedChannel {
    fn submit(&mut self, io: &Io) -> Submit {
        self.log.lock().unwrap().push((true, io.lba));
        self.blocks.insert(io.tag, io.lba);
        self.inner.submit(io)
    }

    fn poll(&mut self, done: &mut Vec<Completion>) -> u32 {
        let before = done.len();
        let count = self.inner.poll(done);
        let ended = done[before..].iter().map(|of| (false, self.blocks[&of.tag]));
        self.log.lock().unwrap().extend(ended);
        count
    }
}

/// A host with a disk that is traced as target 0 and a malloc disk as target 1.
pub fn traced(reactors: usize) -> (Host, Arc<Traced>) {
    let host = Host::new(reactors);
    let disk = FaultBdev::new("traced", 512, 8192);
    disk.defer(Some(1));
    let traced = Arc::new(Traced { disk, log: Log::default() });
    host.registry.register(traced.clone()).unwrap();
    host.add(0, "traced");
    host.malloc("disk");
    host.add(1, "disk");
    (host, traced)
}

/// Requests of a guest in order: attribute and queue, by their block.
type Sent = Vec<(u8, usize)>;

/// Sends what `next` says, so many of it, some at a time on each queue. Returns what was sent.
fn send(
    guest: &mut Guest,
    queues: usize,
    count: usize,
    mut next: impl FnMut(usize) -> u8,
    mut meanwhile: impl FnMut(usize),
) -> Sent {
    const DEPTH: usize = 24;
    let mut sent = Sent::new();
    let mut in_flight: Vec<Vec<Request>> = vec![Vec::new(); queues];
    while sent.len() < count || in_flight.iter().any(|of| !of.is_empty()) {
        for (n, requests) in in_flight.iter_mut().enumerate() {
            if sent.len() < count && requests.len() < DEPTH {
                let attribute = next(sent.len());
                requests.push(read(guest, attribute, 2 + n, sent.len() as u64));
                sent.push((attribute, n));
                meanwhile(sent.len());
            }
            while let Some((head, written)) = guest.try_used(2 + n) {
                let nth = requests.iter().position(|r| r.head == head).expect("once for each");
                let reply = guest.reply(&requests.swap_remove(nth), written);
                assert_eq!((reply.response, reply.status), (0, 0));
            }
        }
        if sent.len() == count {
            std::thread::yield_now();
        }
    }
    sent
}

/// Every request began and ended once; nothing but HEAD OF QUEUE is in flight beside what is ORDERED, and nothing
/// of its queue passes that, nor is anything SIMPLE in flight beside one of its queue that is HEAD OF QUEUE and older. Returns how many began while others of other queues were in flight.
fn check(log: &[(bool, u64)], sent: &Sent) -> usize {
    let mut in_flight: Vec<u64> = Vec::new();
    let mut together = 0;
    let mut begun: Vec<Vec<u64>> = vec![Vec::new(); 8];
    let of = |id: &u64| sent[*id as usize];
    for (begins, id) in log {
        let (attribute, queue) = of(id);
        if !begins {
            let at = in_flight.iter().position(|other| other == id).expect("it has begun");
            in_flight.swap_remove(at);
            continue;
        }
        let others = || in_flight.iter().filter(|other| of(other).0 != HEAD_OF_QUEUE);
        match attribute {
            HEAD_OF_QUEUE => {}
            ORDERED => assert_eq!(others().count(), 0, "{id} is ordered: {in_flight:?}"),
            _ => {
                assert!(others().all(|other| of(other).0 != ORDERED), "{id}: {in_flight:?}");
                // What lies in other rings may be newer.
                let behind = |other: &u64| of(other) == (HEAD_OF_QUEUE, queue) && other < id;
                assert!(!in_flight.iter().any(behind), "{id}: {in_flight:?}");
            }
        }
        together += usize::from(others().any(|other| of(other).1 != queue));
        in_flight.push(*id);
        if attribute != HEAD_OF_QUEUE {
            begun[queue].push(*id);
        }
    }
    assert_eq!((in_flight.len(), log.len()), (0, 2 * sent.len()));
    assert!(begun.iter().all(|ids| ids.is_sorted()), "each queue's in its order");
    together
}

#[test]
fn whatever_attributes_come_on_three_reactors_order_holds_and_all_end() {
    const QUEUES: usize = 3;
    let (host, trace) = traced(QUEUES);
    let mut guest = Guest::start(&host.socket(), LINUX, QUEUES);
    guest.ready(0);
    for (seed, often) in [(1u64, 2), (2, 10), (3, 30)] {
        let mut random = seed.wrapping_mul(0x9E37_79B9_7F4A_7C15);
        let mut next = |_| {
            random = random.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
            match random >> 33 {
                n if n % often == 0 => ORDERED,
                n if n % often == 1 && often > 2 => HEAD_OF_QUEUE,
                _ => SIMPLE,
            }
        };
        // Until reactors had some at the same time, which is the machine's matter.
        let mut together = 0;
        for _ in 0..100 {
            trace.log.lock().unwrap().clear();
            let sent = send(&mut guest, QUEUES, 900, &mut next, |_| ());
            together += check(&trace.log.lock().unwrap(), &sent);
            if together > 50 {
                break;
            }
        }
        assert!(together > 50, "{together} beside others");
    }
}

#[test]
fn a_guest_that_sends_nothing_else_has_them_all_answered_and_others_of_the_reactors_go_on() {
    const QUEUES: usize = 3;
    let (host, trace) = traced(QUEUES);
    host.controllers.create("vm1", ControllerOptions::default()).unwrap();
    host.malloc("other");
    host.controllers.add_target("vm1", 0, "other", TargetOptions::default()).unwrap();
    let mut bystander = Guest::start(&host.socket().with_file_name("vm1"), LINUX, QUEUES);
    bystander.ready(0);
    let mut guest = Guest::start(&host.socket(), LINUX, QUEUES);
    guest.ready(0);
    trace.log.lock().unwrap().clear();
    let beside = |n: usize| {
        if n.is_multiple_of(10) {
            assert_eq!(bystander.read_blocks(0, 0, 8).status, 0);
        }
    };
    let sent = send(&mut guest, QUEUES, 1500, |_| ORDERED, beside);
    assert_eq!(check(&trace.log.lock().unwrap(), &sent), 0);
}
