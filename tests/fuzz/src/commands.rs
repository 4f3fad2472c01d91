//! What a guest can ask of a logical unit: any CDB, any data, buffers of any length.

use std::sync::Arc;

use bdev::{Bdev, Completion, Malloc, MallocOptions};
use guestmem::{IoVec, Sg};
use reactor::IoContext;
use scsi::{CDB_LEN, Lun, LunOptions, LunShared, Outcome, SENSE_LEN, Status, Task};

/// Blocks of the disk: few, so that addresses hit its end.
const BLOCKS: u64 = 300;
/// Bytes of a buffer at most.
const LONGEST: usize = 70_000;
/// Bytes around each buffer that nothing may write.
const GAP: usize = 16;
const CANARY: u8 = 0xC5;
/// Polls of one command at most; a job has few steps and memory answers at once.
const MAX_POLLS: u32 = 100_000;

/// A buffer of the guest, with canaries on both sides.
struct Buffer(Vec<u8>, IoVec);

impl Buffer {
    fn new(data: &[u8], len: usize) -> Self {
        let mut memory = vec![CANARY; len + 2 * GAP];
        memory[GAP..GAP + len].fill(0);
        let given = data.len().min(len);
        memory[GAP..GAP + given].copy_from_slice(&data[..given]);
        // SAFETY: the heap block stays where it is as long as this value.
        let run = unsafe { IoVec::new(memory.as_mut_ptr().add(GAP), len) };
        Buffer(memory, run)
    }

    fn sg(&self) -> Sg {
        let runs = std::slice::from_ref(&self.1);
        // SAFETY: list and memory live until the command has ended and the buffer is checked.
        unsafe { Sg::new(if self.1.is_empty() { &[] } else { runs }) }
    }

    fn check(&self) {
        let (head, tail) = (&self.0[..GAP], &self.0[self.0.len() - GAP..]);
        assert!(head.iter().chain(tail).all(|b| *b == CANARY), "written outside of a buffer");
    }
}

/// Commands one after the other, each to its end. No input may make one panic, write outside of its
/// buffers, hang, or answer what SAM-5 does not allow.
pub fn commands(data: &[u8]) {
    let Some((&setup, mut rest)) = data.split_first() else { return };
    let block_size = if setup & 1 == 0 { 512 } else { 4096 };
    let options = MallocOptions {
        name: "fuzz".into(),
        block_size,
        physical_block_size: 0,
        num_blocks: BLOCKS,
        uuid: None,
    };
    let disk: Arc<dyn Bdev> = Malloc::create(options).expect("a disk of 300 blocks");
    let options = LunOptions {
        read_only: setup & 2 != 0,
        removable: setup & 4 != 0,
        ..LunOptions::default()
    };
    let shared = LunShared::new(Arc::clone(&disk), options).expect("a unit");
    let io = IoContext::new().expect("descriptors");
    let channel = disk.open(&io).expect("a channel");
    let nexus = shared.connect();
    let mut lun = Lun::new(Arc::clone(&shared), nexus, channel);
    let mut task = Box::new(Task::new(7));
    while rest.len() > 20 {
        let (head, tail) = rest.split_at(20);
        let mut cdb = [0u8; CDB_LEN];
        cdb[..16].copy_from_slice(&head[..16]);
        let number = |at: usize| usize::from(u16::from_le_bytes([head[at], head[at + 1]]));
        let (out, into) = (number(16) % LONGEST, number(18) % LONGEST);
        let data_out = Buffer::new(tail, out);
        let data_in = Buffer::new(&[], into);
        task.prepare(&cdb, data_out.sg(), data_in.sg());
        check(run(&mut lun, &mut task), out, into);
        data_out.check();
        data_in.check();
        rest = &tail[tail.len().min(out)..];
    }
}

/// Runs a command to its end.
fn run(lun: &mut Lun, task: &mut Task) -> Outcome {
    let mut outcome = lun.start(task);
    let mut done: Vec<Completion> = Vec::with_capacity(8);
    for _ in 0..MAX_POLLS {
        if outcome != Outcome::Pending {
            return outcome;
        }
        lun.poll(&mut done);
        for completion in done.drain(..) {
            assert_eq!(completion.tag, 7, "an I/O that nobody asked for");
            outcome = lun.resume(task, completion.result);
        }
    }
    panic!("the command does not end");
}

fn check(outcome: Outcome, out: usize, into: usize) {
    let Outcome::Done(response) = outcome else { return };
    let good = response.status == Status::Good;
    assert!(good || response.transferred == 0, "data of a command that failed");
    assert!(response.transferred as usize <= out.max(into), "more than there is room for");
    let sense = response.status == Status::CheckCondition;
    assert_eq!(usize::from(response.sense_len), if sense { SENSE_LEN } else { 0 });
}
