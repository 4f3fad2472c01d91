//! What a 4 KiB read of a file costs a thread with its io_uring: as it is, with the file or the memory
//! registered, with both, and with completions that are polled for (IOPOLL), which few devices have. And by
//! preadv2, one call for each, which is how the target reads what lies in memory (tmpfs).
//!
//! `cargo run --release -p reactor --example registered_cost -- FILE [READS]`; FILE of at least 256 MiB.
//! Prints thousands of reads a second with 32 in flight, and the thread's CPU time of one in nanoseconds,
//! the kernel's part of it among that: the median of five rounds, in turn.
//!
//! Seen on Linux 6.18, in a virtual machine: on tmpfs 1185 ns as it is, 1195 with a registered file, 1043 with
//! registered memory, 1070 with both, and 1358 by preadv2; but of each second there are 334, 332, 405, 386 and 735
//! thousand reads, as a thread of the kernel does what io_uring is given there. On ext4 on virtio-blk, O_DIRECT, 4510,
//! 4316, 3877 and 3849. Neither has IOPOLL. Registered memory stays pinned: a guest's could not be swapped or
//! ballooned any more.

use std::io::IoSliceMut;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd};
use std::os::unix::fs::OpenOptionsExt;
use std::time::Instant;

use io_uring::{IoUring, opcode, squeue, types};
use rustix::io::{ReadWriteFlags, preadv2};
use rustix::time::{ClockId, clock_gettime};

const DEPTH: usize = 32;
const BLOCK: usize = 4096;
const FILE_BYTES: u64 = 256 << 20;
const ROUNDS: usize = 5;

/// A way to read.
#[derive(Clone, Copy)]
struct Way {
    name: &'static str,
    file: bool,
    memory: bool,
    poll: bool,
}

const WAYS: [Way; 5] = [
    Way { name: "plain", file: false, memory: false, poll: false },
    Way { name: "registered file", file: true, memory: false, poll: false },
    Way { name: "registered memory", file: false, memory: true, poll: false },
    Way { name: "both", file: true, memory: true, poll: false },
    Way { name: "both, IOPOLL", file: true, memory: true, poll: true },
];

fn cpu_ns() -> u64 {
    let spent = clock_gettime(ClockId::ThreadCPUTime);
    spent.tv_sec as u64 * 1_000_000_000 + spent.tv_nsec as u64
}

/// Reads so often; thousands a second, and the thread's nanoseconds of each.
fn read(way: Way, fd: i32, base: *mut u8, reads: u64) -> std::io::Result<(f64, f64)> {
    let mut builder = IoUring::<squeue::Entry>::builder();
    match way.poll {
        true => builder.setup_iopoll().setup_single_issuer(),
        false => builder.setup_single_issuer().setup_defer_taskrun().setup_taskrun_flag(),
    };
    let mut ring = builder.build(256)?;
    if way.file {
        ring.submitter().register_files(&[fd])?;
    }
    if way.memory {
        let all = libc::iovec { iov_base: base.cast(), iov_len: DEPTH * BLOCK };
        // SAFETY: the memory outlives the ring.
        unsafe { ring.submitter().register_buffers(&[all])? };
    }
    let entry = |slot: usize, number: u64| {
        let offset = place(number);
        // SAFETY: block `slot` of the memory.
        let to = unsafe { base.add(slot * BLOCK) };
        let (plain, fixed, len) = (types::Fd(fd), types::Fixed(0), BLOCK as u32);
        let entry = match (way.file, way.memory) {
            (false, false) => opcode::Read::new(plain, to, len).offset(offset).build(),
            (true, false) => opcode::Read::new(fixed, to, len).offset(offset).build(),
            (false, true) => opcode::ReadFixed::new(plain, to, len, 0).offset(offset).build(),
            (true, true) => opcode::ReadFixed::new(fixed, to, len, 0).offset(offset).build(),
        };
        entry.user_data(slot as u64)
    };
    let (mut begun, mut ended) = (0, 0);
    let (clock, cpu) = (Instant::now(), cpu_ns());
    let mut free: Vec<usize> = (0..DEPTH).collect();
    while ended < reads {
        while begun < reads
            && let Some(slot) = free.pop()
        {
            // SAFETY: the memory outlives the ring's reads, which are waited for.
            unsafe { ring.submission().push(&entry(slot, begun)) }.expect("room in the ring");
            begun += 1;
        }
        ring.submit_and_wait(1)?;
        for end in ring.completion() {
            if end.result() != BLOCK as i32 {
                return Err(std::io::Error::from_raw_os_error(-end.result().min(-1)));
            }
            free.push(end.user_data() as usize);
            ended += 1;
        }
    }
    let (took, spent) = (clock.elapsed().as_secs_f64(), cpu_ns() - cpu);
    Ok((reads as f64 / took / 1e3, spent as f64 / reads as f64))
}

/// Reads so often by preadv2; thousands a second, and the thread's nanoseconds of each.
fn call(fd: BorrowedFd<'_>, memory: &mut [u8], reads: u64) -> std::io::Result<(f64, f64)> {
    let (clock, cpu) = (Instant::now(), cpu_ns());
    for number in 0..reads {
        let to = &mut memory[number as usize % DEPTH * BLOCK..][..BLOCK];
        let got = preadv2(fd, &mut [IoSliceMut::new(to)], place(number), ReadWriteFlags::empty())?;
        if got != BLOCK {
            return Err(std::io::ErrorKind::UnexpectedEof.into());
        }
    }
    let (took, spent) = (clock.elapsed().as_secs_f64(), cpu_ns() - cpu);
    Ok((reads as f64 / took / 1e3, spent as f64 / reads as f64))
}

/// Where the read of that number is, in bytes.
fn place(number: u64) -> u64 {
    number.wrapping_mul(0x9e37_79b9_7f4a_7c15) % (FILE_BYTES / BLOCK as u64) * BLOCK as u64
}

fn median(mut values: Vec<f64>) -> f64 {
    values.sort_by(f64::total_cmp);
    values[values.len() / 2]
}

fn main() {
    let mut arguments = std::env::args().skip(1);
    let path = arguments.next().expect("give a file");
    let reads = arguments.next().map_or(200_000, |n| n.parse().expect("reads"));
    let open = |flags| std::fs::OpenOptions::new().read(true).custom_flags(flags).open(&path);
    let file = open(libc::O_DIRECT).or_else(|_| open(0)).expect("the file opens");
    let mut memory = vec![1u8; (DEPTH + 1) * BLOCK];
    let aligned = memory.as_ptr().align_offset(BLOCK);
    let memory = &mut memory[aligned..][..DEPTH * BLOCK];
    let mut seen: Vec<Vec<(f64, f64)>> = vec![Vec::new(); WAYS.len()];
    let mut called = Vec::new();
    for _ in 0..ROUNDS {
        called.push(call(file.as_fd(), memory, reads).expect("the file can be read"));
        for (way, seen) in WAYS.iter().zip(&mut seen) {
            match read(*way, file.as_raw_fd(), memory.as_mut_ptr(), reads) {
                Ok(figures) => seen.push(figures),
                Err(e) => println!("{}: {e}", way.name),
            }
        }
    }
    let names = ["preadv2"].into_iter().chain(WAYS.iter().map(|way| way.name));
    let seen = std::iter::once(called).chain(seen);
    for (name, seen) in names.zip(seen).filter(|(_, seen)| !seen.is_empty()) {
        let (speed, cpu): (Vec<_>, Vec<_>) = seen.into_iter().unzip();
        println!("{name:18} {:7.1} k/s, {:5.0} ns", median(speed), median(cpu));
    }
}
