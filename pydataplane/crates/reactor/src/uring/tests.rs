//! What a client pushes, it collects.

use std::io::Write;
use std::os::fd::AsFd;

use io_uring::{opcode, types};

use super::*;

fn uring() -> Uring {
    let event = rustix::event::eventfd(0, rustix::event::EventfdFlags::NONBLOCK).unwrap();
    // The ring keeps the eventfd alive by itself.
    Uring::new(event.as_fd()).unwrap()
}

fn nop() -> squeue::Entry {
    opcode::Nop::new().build()
}

fn collect(c: &mut UringClient) -> Vec<(u32, i32)> {
    std::iter::from_fn(|| c.next_completion()).collect()
}

#[test]
fn completions_reach_their_own_client() {
    let u = uring();
    let (mut a, mut b) = (u.client(8), u.client(8));
    for t in 0..4 {
        // SAFETY: a no-op names no buffer.
        unsafe { a.push(nop(), t, 0) }.unwrap();
        // SAFETY: as above.
        unsafe { b.push(nop(), t + 100, 0) }.unwrap();
    }
    assert_eq!(u.flush(), 8);
    assert_eq!(collect(&mut a), [(0, 0), (1, 0), (2, 0), (3, 0)]);
    assert_eq!(collect(&mut b), [(100, 0), (101, 0), (102, 0), (103, 0)]);
    assert_eq!(u.flush(), 0);
}

#[test]
fn depth_bounds_what_is_outstanding_even_uncollected() {
    let u = uring();
    let mut a = u.client(2);
    // SAFETY: a no-op names no buffer.
    let push = |a: &mut UringClient| unsafe { a.push(nop(), 7, 0) };
    push(&mut a).unwrap();
    push(&mut a).unwrap();
    assert!(push(&mut a).is_err());
    u.flush();
    assert!(push(&mut a).is_err());
    assert_eq!(collect(&mut a).len(), 2);
    push(&mut a).unwrap();
    assert_eq!(a.outstanding, 1);
}

#[test]
fn what_weighs_more_than_a_turn_may_take_goes_to_the_workers() {
    let u = uring();
    let mut a = u.client(16);
    // SAFETY: a no-op names no buffer.
    let push = |a: &mut UringClient, weight| unsafe { a.push(nop(), 1, weight) }.unwrap();
    push(&mut a, INLINE_BYTES);
    assert_eq!(u.ring.borrow().inline, INLINE_BYTES);
    push(&mut a, INLINE_SMALL + 1);
    assert_eq!(u.ring.borrow().inline, INLINE_BYTES, "a worker has it");
    push(&mut a, INLINE_SMALL);
    assert_eq!(u.ring.borrow().inline, INLINE_BYTES + INLINE_SMALL, "too small for one");
    u.flush();
    assert_eq!(u.ring.borrow().inline, 0, "a new turn");
    let mut seen = 0;
    while seen < 3 {
        u.flush();
        seen += collect(&mut a).len();
    }
}

#[test]
fn clients_of_one_owner_share_what_one_client_of_another_has() {
    let u = uring();
    let (many, one) = (Some(Owner::new()), Some(Owner::new()));
    let mut clients: Vec<_> = (0..64).map(|_| u.client_of(many, 1)).collect();
    clients.push(u.client_of(one, 1));
    let mut given = vec![0u32; clients.len()];
    for _ in 0..640 {
        for (client, given) in clients.iter_mut().zip(&mut given) {
            while client.spend_share(TURN_BYTES) {
                *given += 1;
            }
        }
        u.flush();
    }
    let (one, many) = given.split_last().unwrap();
    // What was alone when it came has one turn more.
    assert!((319..=320).contains(one), "{given:?}");
    assert!(many.iter().all(|of_one| (5..=6).contains(of_one)), "{given:?}");
}

#[test]
fn more_entries_than_the_queue_holds_are_submitted_early() {
    let u = uring();
    let n = SQ_ENTRIES * 40;
    let mut a = u.client(n);
    for t in 0..n {
        // SAFETY: a no-op names no buffer.
        unsafe { a.push(nop(), t, 0) }.unwrap();
    }
    let mut seen = 0;
    while seen < n {
        u.flush();
        seen += collect(&mut a).len() as u32;
    }
    assert_eq!(u.ring.borrow().in_flight, 0);
}

#[test]
fn a_dropped_client_waits_for_its_io_and_its_successor_gets_none_of_it() {
    let u = uring();
    let (r, w) = rustix::pipe::pipe().unwrap();
    let mut w = std::fs::File::from(w);
    let mut buf = [0u8; 8];
    let mut a = u.client(4);
    let mut other = u.client(4);
    let read = opcode::Read::new(types::Fd(r.as_raw_fd()), buf.as_mut_ptr(), 8).build();
    // SAFETY: `buf` outlives `a`, whose drop waits.
    unsafe { a.push(read, 1, 8) }.unwrap();
    // SAFETY: a no-op names no buffer.
    unsafe { other.push(nop(), 2, 0) }.unwrap();
    u.flush();
    let writer = std::thread::spawn(move || {
        std::thread::sleep(std::time::Duration::from_millis(20));
        w.write_all(b"12345678").unwrap();
    });
    let place = a.place;
    drop(a);
    assert_eq!(&buf, b"12345678");
    writer.join().unwrap();
    let mut next = u.client(4);
    assert_eq!(next.place >> 48, place >> 48, "the same place");
    assert_ne!(next.place, place, "another generation");
    assert!(collect(&mut next).is_empty());
    assert_eq!(collect(&mut other), [(2, 0)]);
}
