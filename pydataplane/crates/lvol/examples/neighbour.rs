//! What a volume that floods the metadata thread costs its neighbour in the same lvstore.
//!
//! The victim writes 4 KiB to a cluster that it does not have yet, one at a time. Beside it another
//! volume does nothing, allocates, or unmaps, 64 requests at a time.
//!
//! ```text
//! cargo run --release -p lvol --example neighbour -- /path/on/a/disk [seconds]
//! ```

use bdev::{AlignedBuf, Bdev, FileBdev, FileKind, FileOptions, Op, OwnedChannel, Registry};
use lvol::{ClearMethod, LvolOptions, LvstoreOptions, Lvstores};
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

const CLUSTER: u64 = 64 << 10;
const BLOCK: u64 = 512;
const PER_CLUSTER: u64 = CLUSTER / BLOCK;
const SIZE: u64 = 4 << 30;
const DEPTH: u16 = 64;

type Fault = Box<dyn std::error::Error>;

fn main() -> Result<(), Fault> {
    let mut args = std::env::args().skip(1);
    let dir = PathBuf::from(args.next().unwrap_or_else(|| ".".into()));
    let seconds = args.next().map_or(Ok(5), |s| s.parse())?;
    for flood in [None, Some(Op::Write), Some(Op::Unmap)] {
        let (mut latencies, others) = run(&dir, flood, Duration::from_secs(seconds))?;
        latencies.sort_unstable();
        let at = |share: usize| latencies.get(latencies.len() * share / 100).copied();
        let us = |d: Option<Duration>| d.unwrap_or_default().as_micros();
        println!(
            "beside {:<6} victim {:>6.0} IOPS, p50 {:>7} us, p99 {:>7} us; neighbour {:>7.0} IOPS",
            flood.map_or("idle".into(), |op| format!("{op:?}").to_lowercase()),
            latencies.len() as f64 / seconds as f64,
            us(at(50)),
            us(at(99)),
            others as f64 / seconds as f64,
        );
    }
    Ok(())
}

fn run(
    dir: &std::path::Path,
    flood: Option<Op>,
    time: Duration,
) -> Result<(Vec<Duration>, u64), Fault> {
    let file = tempfile::NamedTempFile::new_in(dir)?;
    file.as_file().set_len(2 * SIZE + (64 << 20))?;
    let registry = Registry::new();
    registry.register(FileBdev::create(FileOptions {
        name: "disk0".into(),
        path: file.path().into(),
        block_size: Some(BLOCK as u32),
        read_only: false,
        uuid: None,
        kind: FileKind::Uring,
    })?)?;
    let lvstores = Lvstores::new(registry.clone());
    let options = LvstoreOptions {
        cluster_size: Some(CLUSTER as u32),
        clear: ClearMethod::None,
        ..LvstoreOptions::default()
    };
    lvstores.create_lvstore("disk0", "lvs0", &options)?;
    for name in ["victim", "flood"] {
        let options = LvolOptions {
            dif_type: None,
            name: name.into(),
            size: SIZE,
            thin: true,
            uuid: None,
            xattrs: Default::default(),
            key: None,
        };
        lvstores.create_lvol("lvs0", &options)?;
    }
    let (victim, other) = (registry.require("lvs0/victim")?, registry.require("lvs0/flood")?);
    if flood == Some(Op::Unmap) {
        fill(&*other)?;
    }
    let stop = Arc::new(AtomicBool::new(false));
    let neighbour = {
        let stop = stop.clone();
        std::thread::spawn(move || flood.map_or(0, |op| floods(&*other, op, &stop)))
    };
    let latencies = allocates(&*victim, time)?;
    stop.store(true, Ordering::Relaxed);
    let others = neighbour.join().map_err(|_| "the neighbour panicked")?;
    lvstores.unload("lvs0")?;
    Ok((latencies, others))
}

/// Writes to every cluster.
fn fill(bdev: &dyn Bdev) -> Result<(), Fault> {
    let mut channel = bdev::SyncChannel::open(bdev)?;
    let buf = AlignedBuf::zeroed(16 << 20);
    for cluster in (0..SIZE / CLUSTER).step_by(256) {
        channel.write(cluster * PER_CLUSTER, &buf)?;
    }
    Ok(())
}

fn allocates(bdev: &dyn Bdev, time: Duration) -> Result<Vec<Duration>, Fault> {
    let mut channel = bdev::SyncChannel::open(bdev)?;
    let buf = AlignedBuf::zeroed(4096);
    let mut latencies = Vec::new();
    let begun = Instant::now();
    for cluster in 0..SIZE / CLUSTER {
        if begun.elapsed() >= time {
            break;
        }
        let before = Instant::now();
        channel.write(cluster * PER_CLUSTER, &buf)?;
        latencies.push(before.elapsed());
    }
    Ok(latencies)
}

/// Allocates (or unmaps) one cluster after the other; those of the odd half first, so that each is
/// a run of its own.
fn floods(bdev: &dyn Bdev, op: Op, stop: &AtomicBool) -> u64 {
    let mut channel = OwnedChannel::open(bdev, DEPTH).expect("it opens");
    let clusters = SIZE / CLUSTER;
    let mut order =
        (0..clusters).map(|i| (i * 2) % clusters + u64::from(i * 2 >= clusters)).peekable();
    let (mut over, mut done) = (Vec::new(), 0);
    loop {
        while !channel.is_full()
            && !stop.load(Ordering::Relaxed)
            && let Some(cluster) = order.next()
        {
            let (blocks, buf) = match op {
                Op::Write => (4096 / BLOCK, Some(AlignedBuf::zeroed(4096))),
                _ => (PER_CLUSTER, None),
            };
            over.extend(channel.submit(op, cluster * PER_CLUSTER, blocks, buf, ()));
        }
        if channel.poll(&mut over) == 0 {
            if channel.in_flight() == 0 && (stop.load(Ordering::Relaxed) || order.peek().is_none())
            {
                return done;
            }
            channel.wait(&mut over, 1000);
        }
        for finished in over.drain(..) {
            finished.result.expect("it works");
            done += 1;
        }
    }
}
