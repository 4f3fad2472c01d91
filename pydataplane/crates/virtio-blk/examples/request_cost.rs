//! Nanoseconds that a request of a virtio-blk driver costs to read: `cargo run --release -p virtio-blk --example
//! request_cost`. `request_cost read|write COUNT` reads so many and says nothing, for what counts instructions
//! (`python -m tests.bench.instructions`).
//!
//! One request: its header is copied out of the guest's memory, and says what is to be done with 4 KiB of
//! data. The least of many rounds.

use std::hint::black_box;
use std::time::Instant;

use bdev::Op;
use guestmem::{Bounce, Sg};
use virtio_blk::{Access, HEADER_SIZE, Header, Request};

const ROUNDS: u32 = 60;
const REQUESTS: u32 = 100_000;
const DATA: usize = 4096;

/// Reads so many requests.
fn run(header: &Sg, op: Op, data_out: &Sg, data_in: &Sg, count: u32) {
    for _ in 0..count {
        let mut bytes = [0u8; HEADER_SIZE];
        black_box(header).copy_to_slice(0, &mut bytes);
        let header: Header = zerocopy::transmute!(bytes);
        match black_box(Request::decode(&header, black_box(data_out), black_box(data_in))) {
            Ok(Request::Access(Access { op: found, sectors: 8, .. })) => assert_eq!(found, op),
            other => panic!("it is read as {other:?}"),
        }
    }
}

fn main() {
    let mut arguments = std::env::args().skip(1);
    let wanted = arguments.next();
    let count = arguments.next().map(|count| count.parse().expect("a number of requests"));
    let (headers, buffer) = (Bounce::new(), Bounce::new());
    let data = buffer.sg(DATA).expect("a whole number of sectors");
    let place = headers.sg(512).expect("a sector");
    for (name, op, kind, data_out, data_in) in
        [("read", Op::Read, 0u32, Sg::EMPTY, data), ("write", Op::Write, 1, data, Sg::EMPTY)]
    {
        if wanted.as_ref().is_some_and(|wanted| wanted != name) {
            continue;
        }
        place.copy_from_slice(0, &kind.to_le_bytes());
        if let Some(count) = count {
            run(&place, op, &data_out, &data_in, count);
            continue;
        }
        let round = |_| {
            let begun = Instant::now();
            run(&place, op, &data_out, &data_in, REQUESTS);
            begun.elapsed().as_nanos() as f64 / f64::from(REQUESTS)
        };
        let least = (0..ROUNDS).map(round).fold(f64::INFINITY, f64::min);
        println!("{name}: {least:.1} ns");
    }
}
