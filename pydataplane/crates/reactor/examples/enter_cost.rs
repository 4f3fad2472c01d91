//! How long `io_uring_enter` keeps a thread that submits large O_DIRECT reads: as they are, through the
//! kernel's workers (IOSQE_ASYNC), and with a submission thread of the kernel (SQPOLL).
//!
//! `cargo run --release -p reactor --example enter_cost -- FILE [BYTES_OF_A_READ] [BATCH]`; FILE of at
//! least 256 MiB, on the file system in question. Prints microseconds of one submission of a batch.

use std::os::fd::AsRawFd;
use std::os::unix::fs::OpenOptionsExt;
use std::time::Instant;

use io_uring::{IoUring, opcode, squeue, types};

const ROUNDS: usize = 200;
const FILE_BYTES: u64 = 256 << 20;

fn main() {
    let mut arguments = std::env::args().skip(1);
    let path = arguments.next().expect("give a file");
    let bytes: usize = arguments.next().map_or(4 << 20, |n| n.parse().expect("bytes of a read"));
    let batch: usize = arguments.next().map_or(1, |n| n.parse().expect("reads of a batch"));
    let open = |flags| std::fs::OpenOptions::new().read(true).custom_flags(flags).open(&path);
    let file = open(libc::O_DIRECT).or_else(|_| open(0)).expect("the file opens");
    let mut memory = vec![0u8; bytes * batch + 4096];
    memory.fill(1);
    let at = memory.as_mut_ptr();
    // SAFETY: within the vector, which has a page to spare.
    let base = unsafe { at.add(at.align_offset(4096)) };
    for (name, flags, poll) in [
        ("inline", squeue::Flags::empty(), false),
        ("async", squeue::Flags::ASYNC, false),
        ("sqpoll", squeue::Flags::empty(), true),
    ] {
        let mut builder = IoUring::<squeue::Entry>::builder();
        if poll {
            builder.setup_sqpoll(1000);
        } else {
            builder.setup_single_issuer().setup_defer_taskrun();
        }
        let mut ring = builder.build(256).expect("a ring");
        let (mut submit, mut total) = (Vec::new(), Vec::new());
        for round in 0..ROUNDS {
            for n in 0..batch {
                let offset = ((round * batch + n) * bytes) as u64 % (FILE_BYTES - bytes as u64);
                // SAFETY: piece `n` of the vector.
                let to = unsafe { base.add(n * bytes) };
                let read = opcode::Read::new(types::Fd(file.as_raw_fd()), to, bytes as u32)
                    .offset(offset / 4096 * 4096)
                    .build()
                    .flags(flags);
                // SAFETY: the memory outlives the ring's reads, which are waited for below.
                unsafe { ring.submission().push(&read) }.expect("room in the ring");
            }
            let begun = Instant::now();
            ring.submit().expect("submitted");
            submit.push(begun.elapsed().as_micros() as u64);
            let mut left = batch;
            while left > 0 {
                ring.submit_and_wait(left).expect("waited");
                for end in ring.completion() {
                    assert!(end.result() >= 0, "a read failed with errno {}", -end.result());
                    left -= 1;
                }
            }
            total.push(begun.elapsed().as_micros() as u64);
        }
        submit.sort_unstable();
        total.sort_unstable();
        let of = |all: &[u64], percent: usize| all[(all.len() - 1) * percent / 100];
        println!(
            "{name:>7}: submission p50 {} p90 {} p99 {} us; until all ended p50 {} p99 {} us",
            of(&submit, 50),
            of(&submit, 90),
            of(&submit, 99),
            of(&total, 50),
            of(&total, 99)
        );
    }
}
