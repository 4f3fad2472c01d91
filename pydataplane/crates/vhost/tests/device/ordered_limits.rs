//! ORDERED on several reactors in a volume one direction of which is limited.

use std::sync::Arc;
use std::time::{Duration, Instant};

use bdev::{Rate, RateLimits, Share};

use crate::guest::*;
use crate::host::*;
use crate::moving::places;
use crate::ordered::{Log, Traced, traced};

const READ: u8 = 0x28;
const WRITE: u8 = 0x2a;
const SIMPLE: u8 = 0;
const ORDERED: u8 = 1;
const BUSY: u8 = 8;
const ABORT_TASK: u32 = 0;
/// VIRTIO_SCSI_S_ABORTED with TASK ABORTED, and S_RESET (virtio 1.2 5.6.6.1).
const ABORTED: (u8, u8) = (2, 0x40);
const RESET: u8 = 4;

/// So many operations a second.
fn operations(share: Share, average: u64) -> RateLimits {
    let mut to = RateLimits::default();
    to.operations[share as usize] = Rate { average, ..Rate::default() };
    to
}

/// After one I/O of a sector the next one waits for 512 s.
pub fn hard(share: Share) -> RateLimits {
    RateLimits { operation_bytes: 1, ..operations(share, 1) }
}

/// A host with a traced disk as target 0 and another one as target 1, and a guest with a queue on each reactor.
pub fn start(reactors: usize) -> (Host, Arc<Traced>, Guest) {
    let (host, trace) = traced(reactors);
    let mut guest = Guest::start(&host.socket(), LINUX, reactors);
    (0..2).for_each(|target| guest.ready(target));
    let places = places(&host);
    assert!((0..reactors).all(|n| places[n] == (n as u16 + 2, n)), "{places:?}");
    (host, trace, guest)
}

pub fn limit(host: &Host, to: RateLimits) {
    host.registry.limits("traced").set(to).unwrap();
}

/// A READ or WRITE of one sector of target 0, whose name is that of the sector.
pub fn ask(guest: &mut Guest, attribute: u8, queue: usize, code: u8, lba: u32) -> Request {
    let (data_out, data_in): (&[u8], _) =
        if code == READ { (&[], 512) } else { (&[lba as u8; 512], 0) };
    let cdb = rw10(code, lba, 1);
    guest.submit_with(attribute, queue, flat(0), lba.into(), &cdb, data_out, data_in)
}

/// A read of target 1: all that is before it in the ring was taken.
fn pass_by(guest: &mut Guest, queue: usize) {
    let request = guest.submit(queue, flat(1), 9999, &rw10(READ, 0, 8), &[], 4096);
    assert_eq!(guest.finish(&request).status, 0);
}

/// The requests end in whichever order; response and status of each.
pub fn ends(guest: &mut Guest, requests: &[&Request]) -> Vec<(u8, u8)> {
    let mut replies = vec![None; requests.len()];
    let end = Instant::now() + Duration::from_secs(5);
    while let Some(missing) = replies.iter().position(Option::is_none) {
        let queue = requests[missing].queue;
        let Some((head, written)) = guest.try_used(queue) else {
            assert!(Instant::now() < end, "the {missing}th did not end: {replies:?}");
            std::thread::yield_now();
            continue;
        };
        let of = |r: &&Request| (r.queue, r.head) == (queue, head);
        let nth = requests.iter().position(of).expect("one of these");
        let reply = guest.reply(requests[nth], written);
        assert!(replies[nth].replace((reply.response, reply.status)).is_none(), "once for each");
    }
    replies.into_iter().map(|reply| reply.expect("all ended")).collect()
}

/// What waits: a request of `slow` on queue 2 for its limit, one that is ORDERED on queue 3 for that, and one of
/// the other direction on queue 2 for the ORDERED one. Before them one of each direction has gone by.
fn three(guest: &mut Guest, slow: u8) -> [Request; 3] {
    let fast = if slow == READ { WRITE } else { READ };
    // More than one, so that one of them has waited.
    let firsts = [ask(guest, SIMPLE, 2, slow, 0), ask(guest, SIMPLE, 2, fast, 1)];
    assert_eq!(ends(guest, &[&firsts[0], &firsts[1]]), [(0, 0); 2]);
    let waits = ask(guest, SIMPLE, 2, slow, 2);
    pass_by(guest, 2);
    let ordered = ask(guest, ORDERED, 3, fast, 3);
    pass_by(guest, 3);
    let behind = ask(guest, SIMPLE, 2, fast, 4);
    pass_by(guest, 2);
    assert_eq!((guest.try_used(2), guest.try_used(3)), (None, None));
    [waits, ordered, behind]
}

pub fn begun(log: &Log) -> Vec<u64> {
    log.lock().unwrap().iter().filter(|(begins, _)| *begins).map(|(_, lba)| *lba).collect()
}

/// What waits for its limit begins as soon as that lets it, though one of the other direction, which stands
/// behind it, waits for an ORDERED request of another reactor that itself waits for the first.
#[test]
fn what_waits_for_its_limit_is_not_held_back_by_what_waits_for_another_reactor() {
    for (slow, share) in [(WRITE, Share::Write), (READ, Share::Read)] {
        let (host, trace, mut guest) = start(2);
        limit(&host, operations(share, 4));
        trace.log.lock().unwrap().clear();
        let [waits, ordered, behind] = three(&mut guest, slow);
        assert_eq!(ends(&mut guest, &[&waits, &ordered, &behind]), [(0, 0); 3]);
        assert_eq!(begun(&trace.log)[2..], [2, 3, 4]);
    }
}

#[test]
fn whatever_ends_one_of_those_that_wait_lets_the_others_go_on() {
    for (slow, share) in [(WRITE, Share::Write), (READ, Share::Read)] {
        let begin = || {
            let (host, trace, mut guest) = start(2);
            limit(&host, hard(share));
            let three = three(&mut guest, slow);
            (host, trace, guest, three)
        };
        // The ORDERED one is aborted: the other direction passes what waits for its limit.
        let (host, _, mut guest, [waits, ordered, behind]) = begin();
        assert_eq!(guest.control(&tmf(ABORT_TASK, flat(0), 3), 1), [0]);
        assert_eq!(ends(&mut guest, &[&ordered, &behind]), [ABORTED, (0, 0)]);
        assert_eq!(guest.try_used(2), None);
        limit(&host, RateLimits::default());
        assert_eq!(ends(&mut guest, &[&waits]), [(0, 0)]);
        // The one that waits for its limit is.
        let (_host, _, mut guest, [waits, ordered, behind]) = begin();
        assert_eq!(guest.control(&tmf(ABORT_TASK, flat(0), 2), 1), [0]);
        let all = ends(&mut guest, &[&waits, &ordered, &behind]);
        assert_eq!(all, [ABORTED, (0, 0), (0, 0)]);
        // All are.
        for _ in 0..10 {
            let (_host, _, mut guest, [waits, ordered, behind]) = begin();
            assert_eq!(guest.control(&tmf(LOGICAL_UNIT_RESET, flat(0), 0), 1), [0]);
            let all = ends(&mut guest, &[&waits, &ordered, &behind]);
            assert!(all.iter().all(|(response, _)| *response == RESET), "{all:?}");
        }
        // A queue stops.
        let (_host, _, mut guest, [waits, ordered, behind]) = begin();
        guest.peer.base(2);
        let all = ends(&mut guest, &[&waits, &ordered, &behind]);
        assert_eq!(all, [(0, BUSY), (0, 0), (0, BUSY)]);
        let (_host, _, mut guest, [waits, ordered, behind]) = begin();
        guest.peer.base(3);
        assert_eq!(ends(&mut guest, &[&ordered, &behind]), [(0, BUSY), (0, 0)]);
        guest.peer.base(2);
        assert_eq!(ends(&mut guest, &[&waits]), [(0, BUSY)]);
        // The memory changes, the disk goes, and the guest does.
        let (_host, _, mut guest, [waits, ordered, behind]) = begin();
        guest.tell_memory();
        assert_eq!(ends(&mut guest, &[&waits, &ordered, &behind]), [(0, 0); 3]);
        let (host, _, mut guest, [waits, ordered, behind]) = begin();
        host.controllers.remove_target("vm0", 0).unwrap();
        assert_eq!(ends(&mut guest, &[&waits, &ordered, &behind]), [(0, 0); 3]);
        let (host, _, guest, _) = begin();
        drop(guest);
        host.wait_until_free();
    }
}

/// Whether a request is ORDERED, its queue, and whether it writes, by its block.
type Sent = Vec<(bool, usize, bool)>;

/// Nothing is in flight beside what is ORDERED, and of a queue nothing passes that, nor what is of its own direction.
fn check(log: &[(bool, u64)], sent: &Sent) {
    let mut in_flight: Vec<u64> = Vec::new();
    let mut begun: Vec<Vec<u64>> = vec![Vec::new(); 8];
    for (begins, id) in log {
        if !begins {
            let at = in_flight.iter().position(|other| other == id).expect("it has begun");
            in_flight.swap_remove(at);
            continue;
        }
        let (ordered, queue, writes) = sent[*id as usize];
        let beside = in_flight.iter().any(|other| ordered || sent[*other as usize].0);
        assert!(!beside, "{id} beside {in_flight:?}");
        in_flight.push(*id);
        let earlier = begun[queue].iter().filter(|other| {
            let (of, _, other_writes) = sent[**other as usize];
            ordered || of || other_writes == writes
        });
        assert!(earlier.max().is_none_or(|last| last < id), "{id} of queue {queue}");
        begun[queue].push(*id);
    }
    assert_eq!((in_flight.len(), log.len()), (0, 2 * sent.len()));
}

#[test]
fn ordered_requests_of_two_reactors_hold_in_a_volume_with_limits_and_all_end() {
    const DEPTH: usize = 16;
    const COUNT: usize = 600;
    let (host, trace, mut guest) = start(2);
    for (seed, share, often) in
        [(1u64, Share::Write, 5), (2, Share::Read, 20), (3, Share::Total, 10), (4, Share::Write, 2)]
    {
        limit(&host, operations(share, 2000));
        trace.log.lock().unwrap().clear();
        let mut random = seed.wrapping_mul(0x9E37_79B9_7F4A_7C15);
        let mut next = || {
            random = random.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
            random >> 33
        };
        let mut sent = Sent::new();
        let mut in_flight: Vec<Vec<Request>> = vec![Vec::new(); 2];
        let end = Instant::now() + Duration::from_secs(20);
        while sent.len() < COUNT || in_flight.iter().any(|of| !of.is_empty()) {
            assert!(Instant::now() < end, "{share:?}: they do not end, after {}", sent.len());
            for (n, requests) in in_flight.iter_mut().enumerate() {
                if sent.len() < COUNT && requests.len() < DEPTH {
                    let (ordered, writes) = (next() % often == 0, next() % 2 == 0);
                    let (attribute, code) = (u8::from(ordered), if writes { WRITE } else { READ });
                    let lba = sent.len() as u32;
                    requests.push(ask(&mut guest, attribute, 2 + n, code, lba));
                    sent.push((ordered, n, writes));
                }
                while let Some((head, written)) = guest.try_used(2 + n) {
                    let nth = requests.iter().position(|r| r.head == head).expect("once for each");
                    let reply = guest.reply(&requests.swap_remove(nth), written);
                    assert_eq!((reply.response, reply.status), (0, 0));
                }
            }
            std::thread::yield_now();
        }
        check(&trace.log.lock().unwrap(), &sent);
    }
}
