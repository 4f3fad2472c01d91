//! What the lvol layer adds to a malloc disk: nanoseconds of one 4 KiB random I/O, on one thread.
//!
//! ```text
//! cargo run --release -p lvol --example cost
//! ```

use bdev::{Bdev, Io, Malloc, MallocOptions, Op, Registry, Submit};
use guestmem::Bounce;
use lvol::{ClearMethod, LvolOptions, LvstoreOptions, Lvstores};
use reactor::IoContext;
use std::time::Instant;

const BLOCK: u64 = 512;
const IO_BLOCKS: u64 = 8;
const SIZE: u64 = 256 << 20;
const IOS: u64 = 2_000_000;
const ROUNDS: usize = 5;

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let registry = Registry::new();
    let options = MallocOptions {
        name: "ram".into(),
        block_size: BLOCK as u32,
        physical_block_size: 0,
        num_blocks: 2 * SIZE / BLOCK + (64 << 20) / BLOCK,
        uuid: None,
    };
    registry.register(Malloc::create(options)?)?;
    let lvstores = Lvstores::new(registry.clone());
    let options = LvstoreOptions { clear: ClearMethod::WriteZeroes, ..LvstoreOptions::default() };
    lvstores.create_lvstore("ram", "lvs0", &options)?;
    for (name, thin) in [("thick", false), ("thin", true)] {
        let options = LvolOptions {
            name: name.into(),
            size: SIZE,
            thin,
            uuid: None,
            xattrs: Default::default(),
            key: None,
        };
        lvstores.create_lvol("lvs0", &options)?;
    }
    let io = IoContext::new()?;
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
    let mut channel = bdev.open(io).expect("it opens");
    let buf = Bounce::new();
    let sg = buf.sg((IO_BLOCKS * BLOCK) as usize).expect("it fits");
    let mut done = Vec::with_capacity(64);
    let mut random = 88_172_645_463_325_252_u64;
    let begun = Instant::now();
    for tag in 0..IOS {
        random ^= random << 13;
        random ^= random >> 7;
        random ^= random << 17;
        let lba = random % (SIZE / BLOCK / IO_BLOCKS) * IO_BLOCKS;
        let request = Io { op, fua: false, lba, blocks: IO_BLOCKS, sg, tag };
        match channel.submit(&request) {
            Submit::Done(result) => result.expect("it works"),
            Submit::Pending => {
                done.clear();
                while channel.poll(&mut done) == 0 {
                    std::hint::spin_loop();
                }
            }
            Submit::Full => unreachable!("one at a time"),
        }
    }
    begun.elapsed().as_nanos() as f64 / IOS as f64
}
