//! Nanoseconds of thread CPU time that one request costs in the ring: `cargo run --release -p virtqueue
//! --example ring_cost`. `ring_cost [untracked] read|write COUNT` takes so many requests through it, with an
//! in-flight region or without, and says nothing, for what counts instructions (`python -m
//! tests.bench.instructions`).
//!
//! One request: pop, walk (51 byte header, 108 byte response, 4 KiB of data), copy the header
//! out, write the 12 byte head of the response, give the chain back, publish, and decide on a
//! call. Two regions, a ring of 256, EVENT_IDX, no data copied, everything in cache, with and without
//! an in-flight region. The least of many rounds; the driver's part (about 1 ns) is in it.

use std::hint::black_box;
use std::sync::Arc;

use guestmem::GuestMemory;
use rustix::time::{ClockId, clock_gettime};
use virtqueue::{AddressSpace, Desc, Head, InflightRegion, QueueConfig, Segments, SplitQueue};

const SIZE: u16 = 256;
const DESC: u64 = 0x1_0000;
const AVAIL: u64 = 0x2_0000;
const USED: u64 = 0x3_0000;
const TABLES: u64 = 0x4_0000;
const HEADERS: u64 = 0x10_0000;
const DATA: u64 = 1 << 32;
const ROUNDS: usize = 60;
const BATCHES: usize = 2_000;
/// Requests that a poller takes at a time.
const BATCH: u16 = 32;

fn thread_ns() -> u64 {
    let t = clock_gettime(ClockId::ThreadCPUTime);
    t.tv_sec as u64 * 1_000_000_000 + t.tv_nsec as u64
}

/// The least nanoseconds per request over all rounds.
fn measure(regions: usize, indirect: bool, batch: u16, tracked: bool) -> f64 {
    let ring = Ring { regions, indirect, batch, tracked, write: false };
    run(&ring, ROUNDS, BATCHES, thread_ns)
}

/// What a ring is like.
struct Ring {
    regions: usize,
    /// Chains are in tables of their own.
    indirect: bool,
    /// Requests that come at a time.
    batch: u16,
    /// There is an in-flight region.
    tracked: bool,
    /// The data is the driver's.
    write: bool,
}

fn run(ring: &Ring, rounds: usize, batches: usize, now: fn() -> u64) -> f64 {
    let &Ring { regions, indirect, batch, tracked, write } = ring;
    let mut areas = vec![(0, 256 << 20), (DATA, 256 << 20)];
    areas.extend((2..regions as u64).map(|i| ((1 << 40) + (i << 30), 1 << 20)));
    let memory = Arc::new(GuestMemory::memfd(&areas).expect("memory"));
    let put = |table: u64, i: u64, desc: Desc| {
        memory.range(table + i * 16, 16).expect("range").put(0, desc).expect("put");
    };
    for i in 0..u64::from(SIZE) {
        let (base, step) = if indirect { (TABLES + i * 64, 0) } else { (DESC, (i % 64) * 4) };
        if indirect {
            put(DESC, i, Desc::new(TABLES + i * 64, 48, Desc::INDIRECT, 0));
        } else if i >= 64 {
            continue;
        }
        let header = HEADERS + i * 256;
        put(base, step, Desc::new(header, 51, Desc::NEXT, step as u16 + 1));
        let flags = Desc::NEXT | Desc::WRITE;
        let data = DATA + i * 4096;
        if write {
            put(base, step + 1, Desc::new(data, 4096, Desc::NEXT, step as u16 + 2));
            put(base, step + 2, Desc::new(header + 64, 108, Desc::WRITE, 0));
        } else {
            put(base, step + 1, Desc::new(header + 64, 108, flags, step as u16 + 2));
            put(base, step + 2, Desc::new(data, 4096, Desc::WRITE, 0));
        }
    }
    let config = QueueConfig {
        size: SIZE,
        space: AddressSpace::Guest,
        desc: DESC,
        avail: AVAIL,
        used: USED,
        used_log: None,
        event_idx: true,
        indirect: true,
        next_avail: 0,
    };
    let mut queue = SplitQueue::new(memory.clone(), &config).expect("queue");
    if tracked {
        let fd = InflightRegion::make(1, SIZE).expect("a region");
        let bytes = InflightRegion::bytes(1, SIZE);
        let region =
            InflightRegion::map(&GuestMemory::empty(), fd, 0, bytes, 1, SIZE).expect("a region");
        queue.track(region.queue(0).expect("its queue")).expect("a new region");
    }
    let avail = memory.range(AVAIL, 0x1000).expect("avail");
    for slot in 0..usize::from(SIZE) {
        let head = if indirect { slot as u16 } else { (slot as u16 % 64) * 4 };
        avail.put(4 + slot * 2, head).expect("head");
    }
    let mut segments = Segments::new();
    let mut heads = [Head::default(); 64];
    let mut idx = 0u16;
    let mut best = f64::MAX;
    for _ in 0..rounds {
        let start = now();
        for _ in 0..batches {
            idx = idx.wrapping_add(batch);
            avail.store_release_u16(2, idx).expect("idx");
            let taken = queue.pop(&mut heads).expect("pop");
            for head in &heads[..taken] {
                queue.walk(head, &mut segments).expect("walk");
                let mut header = [0u8; 51];
                let halves = segments.split(header.len(), 108).expect("both parts are long enough");
                halves.readable.0.copy_to_slice(0, &mut header);
                black_box(&header);
                black_box(halves.writable.1);
                segments.writable().copy_from_slice(0, &[0u8; 12]);
                queue.push_used(head.index(), if write { 108 } else { 4204 });
            }
            black_box(queue.publish());
        }
        let spent = now() - start;
        best = best.min(spent as f64 / (batches * usize::from(batch)) as f64);
    }
    best
}

fn main() {
    let mut arguments = std::env::args().skip(1).peekable();
    let tracked = arguments.next_if_eq("untracked").is_none();
    if let (Some(op), Some(count)) = (arguments.next(), arguments.next()) {
        let count: usize = count.parse().expect("a number of requests");
        let write = op == "write";
        let ring = Ring { regions: 2, indirect: true, batch: BATCH, tracked, write };
        // valgrind has no clock that rustix could ask.
        run(&ring, 1, count / usize::from(BATCH), || 0);
        return;
    }
    println!(
        "{:>8} {:>9} {:>6} {:>11} {:>11}",
        "regions", "chain", "batch", "ns/request", "in flight"
    );
    for (regions, indirect, batch) in
        [(2, true, 32), (2, true, 1), (2, false, 32), (8, true, 32), (64, true, 32), (64, true, 1)]
    {
        let ns = measure(regions, indirect, batch, false);
        let tracked = measure(regions, indirect, batch, true);
        let chain = if indirect { "indirect" } else { "chained" };
        println!("{regions:>8} {chain:>9} {batch:>6} {ns:>11.1} {tracked:>11.1}");
    }
}
