//! Nanoseconds that the tuples of 4 KiB cost, eight blocks of 512 bytes with type 1: `cargo run --release -p
//! protection --example tuple_cost`. `tuple_cost read|write COUNT` does so many requests and says nothing, for
//! what counts instructions (`python -m tests.bench.instructions`).
//!
//! A read compares each block with its tuple, a write makes them; all of it is in cache. The least of many rounds.

use std::hint::black_box;
use std::time::Instant;

use bdev::{Checks, ProtectionType, TUPLE_LEN};
use protection::Tuple;

const ROUNDS: u32 = 60;
const REQUESTS: u32 = 10_000;
const BLOCK: usize = 512;
const BLOCKS: usize = 8;
const KIND: ProtectionType = ProtectionType::Type1;

fn make(data: &[u8], tuples: &mut [u8], lba: u64) {
    let all = data.chunks(BLOCK).zip(tuples.chunks_mut(TUPLE_LEN)).zip(lba..);
    all.for_each(|((block, tuple), lba)| {
        tuple.copy_from_slice(&Tuple::of(KIND, lba, block).to_bytes());
    });
}

fn compare(data: &[u8], tuples: &[u8], lba: u64) {
    let (tuples, _) = tuples.as_chunks::<TUPLE_LEN>();
    for ((block, tuple), lba) in data.chunks(BLOCK).zip(tuples).zip(lba..) {
        Tuple::from_bytes(*tuple)
            .check(KIND, Checks::ALL, lba, block)
            .expect("it is the block's own");
    }
}

fn main() {
    let mut arguments = std::env::args().skip(1);
    let wanted = arguments.next();
    let count: Option<u32> = arguments.next().map(|n| n.parse().expect("a number of requests"));
    let data: Vec<u8> = (0..BLOCK * BLOCKS).map(|at| (at * 7 + at / BLOCK) as u8).collect();
    let mut tuples = vec![0; TUPLE_LEN * BLOCKS];
    make(&data, &mut tuples, 64);
    for name in ["read", "write"] {
        if wanted.as_ref().is_some_and(|wanted| wanted != name) {
            continue;
        }
        let mut run = |count| {
            for _ in 0..count {
                match name {
                    "read" => compare(black_box(&data), black_box(&tuples), 64),
                    _ => make(black_box(&data), black_box(&mut tuples), 64),
                }
            }
        };
        if let Some(count) = count {
            run(count);
            continue;
        }
        let mut least = f64::INFINITY;
        for _ in 0..ROUNDS {
            let begun = Instant::now();
            run(REQUESTS);
            least = least.min(begun.elapsed().as_nanos() as f64 / f64::from(REQUESTS));
        }
        println!("{name}: {least:.1} ns");
    }
}
