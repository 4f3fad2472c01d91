//! I/Os without connections.

use std::cell::Cell;
use std::time::Duration;

use bdev::{Completions, FlushLatch, Io};
use reactor::IoContext;

use super::*;
use crate::conversation::Ended;
use crate::identify::tests::{controller_data, namespace_data};
use crate::identify::{Controller, Namespace};
use crate::name::Identified;
use crate::units::Unit;
use crate::wire::Completion;

/// Two namespaces of a controller with a volatile cache.
fn units() -> Arc<Units> {
    let controller = Controller::parse(&controller_data(), 0).unwrap();
    let unit = |nsid| {
        let of = Namespace::parse(nsid, &namespace_data(64, 9), Identified::default()).unwrap();
        Unit::new(of, &controller, false)
    };
    Arc::new(Units::new([1, 2].into_iter().map(unit)))
}

/// Takes I/Os of namespaces, and has each command be answered with a status.
fn carry_out(requests: &mut Requests, now: Instant, ios: Vec<(u16, Io)>, status: u16) {
    let io = IoContext::new().unwrap();
    let completions = Completions::new(&io);
    let request = ios
        .into_iter()
        .map(|(unit, io)| Request { of: completions.request(io, WriteHow::Plain), unit });
    let mut left = request;
    requests.take(now, || left.next());
    let sent = Cell::new(Vec::new());
    requests.send(now, |_, at, _, _, _| {
        let mut all = sent.take();
        all.push(at);
        sent.set(all);
        Some(0)
    });
    let latch = FlushLatch::default();
    for at in sent.take() {
        let completion = Completion { result: 0, status };
        let ended = Ended { tag: u32::from(at), completion, damaged: false };
        requests.answered(at, &ended, now, &latch);
    }
}

fn write() -> Io {
    Io { op: Op::Write, lba: 0, blocks: 1, ..Io::flush(0) }
}

#[test]
fn a_flush_of_one_namespace_makes_nothing_of_another_durable() {
    let (mut requests, now) = (Requests::new(units(), true, false), Instant::now());
    carry_out(&mut requests, now, vec![(0, write())], 0);
    carry_out(&mut requests, now, vec![(1, Io::flush(0))], 0);
    assert!(requests.take_unflushed());
    carry_out(&mut requests, now, vec![(0, write())], 0);
    carry_out(&mut requests, now, vec![(0, Io::flush(0))], 0);
    assert!(!requests.take_unflushed());
    assert!(requests.is_empty());
}

#[test]
fn what_is_put_off_again_and_again_is_given_up_as_what_has_no_answer() {
    // Not ready; inaccessible.
    for status in [0x082, 0x302] {
        let (mut requests, now) = (Requests::new(units(), false, false), Instant::now());
        carry_out(&mut requests, now, vec![(0, write())], status);
        let mut at = now;
        for _ in 0..8 {
            let due = requests.next_due().unwrap();
            assert!(due > at, "each pause is one");
            at = due;
            carry_out(&mut requests, at, vec![], status);
        }
        assert!(at - now > Duration::from_secs(1), "pauses grow");
        assert_eq!(requests.oldest(), Some(now));
        requests.fail_since(now);
        assert!(requests.is_empty());
    }
}
