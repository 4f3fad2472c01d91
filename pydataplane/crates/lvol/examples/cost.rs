//! What the lvol layer adds to a malloc disk: nanoseconds of one 4 KiB random I/O, on one thread.
//!
//! ```text
//! cargo run --release -p lvol --example cost
//! ```
//!
//! `cost ram|thick|thin read|write COUNT` makes so many I/Os on a small one whose clusters are all allocated and
//! says nothing, for what counts instructions (`python -m tests.bench.instructions`).

use bdev::{Bdev, Io, Malloc, MallocOptions, Op, Registry, Submit};
use guestmem::Bounce;
use lvol::{ClearMethod, LvolOptions, LvstoreOptions, Lvstores};
use reactor::IoContext;
use std::time::Instant;

const BLOCK: u64 = 512;
const IO_BLOCKS: u64 = 8;
const SIZE: u64 = 256 << 20;
/// Of each volume where nothing is timed.
const SMALL: u64 = 4 << 20;
const IOS: u64 = 2_000_000;
const ROUNDS: usize = 5;

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let size = if arguments.is_empty() { SIZE } else { SMALL };
    let registry = Registry::new();
    let options = MallocOptions {
        name: "ram".into(),
        block_size: BLOCK as u32,
        physical_block_size: 0,
        num_blocks: 2 * size / BLOCK + (64 << 20) / BLOCK,
        uuid: None,
    };
    registry.register(Malloc::create(options)?)?;
    let lvstores = Lvstores::new(registry.clone());
    let options = LvstoreOptions { clear: ClearMethod::WriteZeroes, ..LvstoreOptions::default() };
    lvstores.create_lvstore("ram", "lvs0", &options)?;
    for (name, thin) in [("thick", false), ("thin", true)] {
        let options = LvolOptions {
            dif_type: None,
            name: name.into(),
            size,
            thin,
            uuid: None,
            xattrs: Default::default(),
            key: None,
        };
        lvstores.create_lvol("lvs0", &options)?;
    }
    let io = IoContext::new()?;
    if let [name, op, count] = &arguments[..] {
        let path = if name == "ram" { name.clone() } else { format!("lvs0/{name}") };
        let bdev = registry.require(&path)?;
        let op = if op == "write" { Op::Write } else { Op::Read };
        // Every 4 KiB is written once: it allocates every cluster.
        let lbas = (0..size / BLOCK).step_by(IO_BLOCKS as usize);
        run(&*bdev, &io, Op::Write, lbas);
        run(&*bdev, &io, op, random_lbas(size, count.parse()?));
        return Ok(());
    }
    for op in [Op::Write, Op::Read] {
        for name in ["ram", "lvs0/thick", "lvs0/thin"] {
            let bdev = registry.require(name)?;
            // The first round touches every page and allocates every cluster.
            let ns: Vec<f64> = (0..=ROUNDS).map(|_| one(&*bdev, &io, op)).collect();
            let best = ns[1..].iter().copied().fold(f64::MAX, f64::min);
            println!("{op:?} {name}: {best:.0} ns (first round {:.0})", ns[0]);
        }
    }
    Ok(())
}

fn one(bdev: &dyn Bdev, io: &IoContext, op: Op) -> f64 {
    let begun = Instant::now();
    run(bdev, io, op, random_lbas(SIZE, IOS));
    begun.elapsed().as_nanos() as f64 / IOS as f64
}

/// First blocks of `count` random I/Os within so many bytes.
fn random_lbas(size: u64, count: u64) -> impl Iterator<Item = u64> {
    let mut random = 88_172_645_463_325_252_u64;
    (0..count).map(move |_| {
        random ^= random << 13;
        random ^= random >> 7;
        random ^= random << 17;
        random % (size / BLOCK / IO_BLOCKS) * IO_BLOCKS
    })
}

/// One I/O after the other, at these blocks.
fn run(bdev: &dyn Bdev, io: &IoContext, op: Op, lbas: impl Iterator<Item = u64>) {
    let mut channel = bdev.open(io).expect("it opens");
    let buf = Bounce::new();
    let sg = buf.sg((IO_BLOCKS * BLOCK) as usize).expect("it fits");
    let mut done = Vec::with_capacity(64);
    for (tag, lba) in (0..).zip(lbas) {
        let request = Io { op, fua: false, lba, blocks: IO_BLOCKS, sg, tag };
        match channel.submit(&request) {
            Submit::Done(result) => result.expect("it works"),
            Submit::Pending => {
                done.clear();
                while channel.poll(&mut done) == 0 {
                    io.wait(1_000_000).expect("it waits");
                }
            }
            Submit::Full => unreachable!("one at a time"),
        }
    }
}
