//! Nanoseconds of one `submit` on null and malloc, and of reads and writes on a file: one on tmpfs is read and
//! written within `submit` (preadv2), any other through io_uring. The thread's CPU time is told beside.
//!
//! `cargo run --release -p bdev --example submit_cost [FILE [IOS]]`

use std::hint::black_box;
use std::sync::Arc;
use std::time::Instant;

use bdev::{
    AlignedBuf, Bdev, Completion, FileBdev, FileKind, FileOptions, Io, Malloc, MallocOptions, Null,
    Op, Submit,
};
use guestmem::{IoVec, Sg};
use reactor::IoContext;
use rustix::time::{ClockId, clock_gettime};

const BLOCK: usize = 4096;
const ROUNDS: usize = 5;

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let clock = cost(10_000_000, |_| {
        black_box(reactor::ticks::now());
    });
    println!("reading the clock: {clock:.1} ns");
    let null = Null::create("null", 512, 1 << 30, None)?;
    synchronous("null read 4 KiB", &*null, Op::Read, 1)?;
    for (label, mib) in [("malloc, in the cache,", 1), ("malloc, 512 MiB,", 512)] {
        let disk = Malloc::create(MallocOptions {
            name: "malloc".into(),
            block_size: 512,
            physical_block_size: 0,
            num_blocks: mib * 2048,
            uuid: None,
        })?;
        for op in [Op::Write, Op::Read] {
            synchronous(&format!("{label} {op:?} 4 KiB"), &*disk, op, mib * 256)?;
        }
    }
    if let Some(path) = std::env::args_os().nth(1) {
        let disk = FileBdev::create(FileOptions {
            name: "file".into(),
            path: path.into(),
            block_size: Some(512),
            read_only: false,
            uuid: None,
            kind: FileKind::Uring,
        })?;
        println!(
            "the file is opened for {} I/O",
            if disk.is_direct() { "direct" } else { "buffered" }
        );
        let count = std::env::args().nth(2).map_or(Ok(100_000), |n| n.parse())?;
        for depth in [1, 32, 128] {
            for op in [Op::Read, Op::Write] {
                queued(&disk, op, depth, count)?;
            }
        }
    }
    Ok(())
}

/// CPU time of this thread, in nanoseconds.
fn cpu_ns() -> u64 {
    let spent = clock_gettime(ClockId::ThreadCPUTime);
    spent.tv_sec as u64 * 1_000_000_000 + spent.tv_nsec as u64
}

/// The least of several rounds: what it costs when nothing disturbs, in nanoseconds.
fn cost(n: u64, mut f: impl FnMut(u64)) -> f64 {
    let round = |f: &mut dyn FnMut(u64)| {
        let start = Instant::now();
        for i in 0..n {
            f(i);
        }
        start.elapsed().as_nanos() as f64 / n as f64
    };
    (0..ROUNDS).map(|_| round(&mut f)).fold(f64::INFINITY, f64::min)
}

fn synchronous(
    label: &str,
    bdev: &dyn Bdev,
    op: Op,
    pages: u64,
) -> Result<(), Box<dyn std::error::Error>> {
    let io = IoContext::new()?;
    let mut c = bdev.open(&io)?;
    let mut buf = AlignedBuf::zeroed(BLOCK);
    // SAFETY: `buf` outlives the channel's I/O, which ends within submit.
    let iov = unsafe { [IoVec::new(buf.as_mut_ptr(), BLOCK)] };
    // SAFETY: as above.
    let sg = unsafe { Sg::new(&iov) };
    let n = if pages > 1 { 1_000_000 } else { 20_000_000 };
    let ns = cost(n, |i| {
        let page = i.wrapping_mul(0x9e37_79b9_7f4a_7c15) % pages;
        let io = Io { op, fua: false, lba: page * 8, blocks: 8, sg, tag: i };
        assert_eq!(black_box(c.submit(black_box(&io))), Submit::Done(Ok(())));
    });
    println!("{label}: {ns:.1} ns");
    Ok(())
}

fn queued(
    bdev: &Arc<FileBdev>,
    op: Op,
    depth: usize,
    total: u64,
) -> Result<(), Box<dyn std::error::Error>> {
    let io = IoContext::new()?;
    let mut c = bdev.open(&io)?;
    let mut buf = AlignedBuf::zeroed(BLOCK * depth);
    let pages = bdev.geometry().bytes() / BLOCK as u64;
    // SAFETY: parts of `buf`, which outlives the channel.
    let iov: Vec<_> = (0..depth)
        .map(|i| [unsafe { IoVec::new(buf.as_mut_ptr().add(i * BLOCK), BLOCK) }])
        .collect();
    let mut done: Vec<Completion> = Vec::with_capacity(depth);
    let (total, mut sent, mut ended) = (total, 0u64, 0u64);
    let mut free: Vec<u64> = (0..depth as u64).collect();
    let (start, cpu) = (Instant::now(), cpu_ns());
    while ended < total {
        while sent < total
            && let Some(tag) = free.pop()
        {
            let page = sent.wrapping_mul(0x9e37_79b9_7f4a_7c15) % pages;
            // SAFETY: as above.
            let sg = unsafe { Sg::new(&iov[tag as usize]) };
            let one = Io { op, fua: false, lba: page * 8, blocks: 8, sg, tag };
            sent += 1;
            match c.submit(&one) {
                Submit::Pending => {}
                Submit::Done(r) => {
                    r?;
                    ended += 1;
                    free.push(tag);
                }
                Submit::Full => return Err("a channel with less than its depth is full".into()),
            }
        }
        if ended == total {
            // All of it ended within `submit`: nothing would wake this thread.
            break;
        }
        io.wait(1_000_000)?;
        done.clear();
        ended += u64::from(c.poll(&mut done));
        for d in &done {
            d.result?;
            free.push(d.tag);
        }
    }
    let ns = start.elapsed().as_nanos() as f64 / total as f64;
    let cpu = (cpu_ns() - cpu) as f64 / total as f64;
    println!(
        "file {op:?} 4 KiB, depth {depth}: {ns:.0} ns ({cpu:.0} of the thread), {:.0} KIOPS",
        1e6 / ns
    );
    Ok(())
}
