//! What the SCSI layer costs: nanoseconds of CPU per READ(10) and WRITE(10) of 4 KiB through a logical
//! unit, on a channel that does nothing, beside that channel alone.
//!
//! `cargo run --release -p scsi --example read_cost`. `read_cost read|write COUNT` makes so many of the second
//! kind (pending, polled, resumed) and says nothing, for what counts instructions
//! (`python -m tests.bench.instructions`).

use bdev::{Bdev, Channel, Completion, Features, Geometry, Io, IoError, Op, OpenError, Submit};
use guestmem::{Bounce, Sg};
use reactor::IoContext;
use rustix::time::{ClockId, clock_gettime};
use scsi::{CDB_LEN, Lun, LunOptions, LunShared, Outcome, Task};
use std::hint::black_box;
use std::sync::Arc;
use uuid::Uuid;

const ROUNDS: u32 = 5_000_000;

struct Nothing;

impl Bdev for Nothing {
    fn name(&self) -> &str {
        "nothing"
    }
    fn aliases(&self) -> Vec<String> {
        Vec::new()
    }
    fn uuid(&self) -> Uuid {
        Uuid::nil()
    }
    fn product_name(&self) -> &'static str {
        "Null disk"
    }
    fn geometry(&self) -> Geometry {
        Geometry { block_size: 512, physical_block_size: 512, num_blocks: 1 << 30 }
    }
    fn features(&self) -> Features {
        Features { fua: true, ..Features::default() }
    }
    fn open(&self, _io: &IoContext) -> Result<Box<dyn Channel>, OpenError> {
        Ok(Box::new(NothingChannel { pending: false, tag: 0, done: false }))
    }
    fn driver_specific(&self) -> serde_json::Value {
        serde_json::Value::Null
    }
}

struct NothingChannel {
    pending: bool,
    tag: u64,
    done: bool,
}

impl Channel for NothingChannel {
    #[inline(never)]
    fn submit(&mut self, io: &Io) -> Submit {
        black_box(io);
        if self.pending {
            self.tag = io.tag;
            self.done = true;
            return Submit::Pending;
        }
        Submit::Done(Ok(()))
    }
    fn poll(&mut self, done: &mut Vec<Completion>) -> u32 {
        if !std::mem::take(&mut self.done) {
            return 0;
        }
        done.push(Completion { tag: self.tag, result: Ok::<(), IoError>(()), ticks: 0, ended: 0 });
        1
    }
}

/// CPU time of this thread in nanoseconds: does not count what others do on a busy machine.
fn cpu_ns() -> i64 {
    let now = clock_gettime(ClockId::ThreadCPUTime);
    now.tv_sec * 1_000_000_000 + now.tv_nsec
}

/// Times `one`, or, if `only` is a number, does it so often.
fn measure(only: Option<u32>, what: &str, mut one: impl FnMut(u32)) {
    if let Some(count) = only {
        return (0..count).for_each(one);
    }
    (0..ROUNDS / 10).for_each(&mut one);
    let begun = cpu_ns();
    (0..ROUNDS).for_each(&mut one);
    println!("{what}: {:.1} ns", (cpu_ns() - begun) as f64 / f64::from(ROUNDS));
}

fn cdb(opcode: u8, lba: u32) -> [u8; CDB_LEN] {
    let mut cdb = [0; CDB_LEN];
    cdb[0] = opcode;
    cdb[2..6].copy_from_slice(&(lba & 0xFFFF).to_be_bytes());
    cdb[8] = 8;
    cdb
}

fn main() {
    let mut arguments = std::env::args().skip(1);
    let wanted = arguments.next();
    let only = arguments.next().map(|count| count.parse().expect("a number of I/Os"));
    let buffer = Bounce::new();
    let data = buffer.sg(4096).expect("a whole number of sectors");
    let shared = LunShared::new(Arc::new(Nothing), LunOptions::default()).expect("a valid unit");
    let unit = |pending| {
        let nexus = shared.connect();
        let channel = Box::new(NothingChannel { pending, tag: 0, done: false });
        let mut lun = Lun::new(shared.clone(), nexus, channel);
        let mut task = Task::new(0);
        task.prepare(&[0; CDB_LEN], Sg::EMPTY, Sg::EMPTY);
        assert!(matches!(lun.start(&mut task), Outcome::Done(_)), "the unit attention");
        (lun, task)
    };

    let mut channel: Box<dyn Channel> =
        Box::new(NothingChannel { pending: false, tag: 0, done: false });
    let timed = only.is_none();
    let alone = |i: u32| {
        let io = Io { op: Op::Read, fua: false, lba: i.into(), blocks: 8, sg: data, tag: 0 };
        let _ = black_box(channel.submit(&io));
    };
    if timed {
        measure(only, "channel alone", alone);
    }
    for (name, opcode, sg_out, sg_in) in
        [("READ(10)", 0x28, Sg::EMPTY, data), ("WRITE(10)", 0x2A, data, Sg::EMPTY)]
    {
        if wanted.as_ref().is_some_and(|wanted| !name.to_lowercase().starts_with(wanted)) {
            continue;
        }
        if timed {
            let (mut lun, mut task) = unit(false);
            measure(only, &format!("{name}, done at once"), |i| {
                task.prepare(&cdb(opcode, i), sg_out, sg_in);
                let _ = black_box(lun.start(black_box(&mut task)));
            });
        }
        let (mut lun, mut task) = unit(true);
        let mut done = Vec::with_capacity(8);
        measure(only, &format!("{name}, pending, polled, resumed"), |i| {
            task.prepare(&cdb(opcode, i), sg_out, sg_in);
            let _ = black_box(lun.start(black_box(&mut task)));
            done.clear();
            lun.poll(&mut done);
            let _ = black_box(lun.resume(&mut task, done[0].result));
        });
    }
    if timed {
        println!("a task has {} bytes", size_of::<Task>());
    }
}
