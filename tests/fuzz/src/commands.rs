//! What a guest can ask of a logical unit: any CDB, any data, buffers of any length.

use std::sync::Arc;

use bdev::{Bdev, Completion, Malloc, MallocOptions, Protection, ProtectionType, TUPLE_LEN};
use guestmem::{IoVec, Sg};
use protection::ProtectedDisk;
use reactor::IoContext;
use scsi::{CDB_LEN, Lun, LunOptions, LunShared, Outcome, SENSE_LEN, Status, Task};

/// Blocks of the disk: few, so that addresses hit its end.
const BLOCKS: u64 = 300;
/// Bytes of a buffer at most.
const LONGEST: usize = 70_000;
/// Bytes around each buffer that nothing may write.
const GAP: usize = 16;
const CANARY: u8 = 0xC5;
/// Polls after which a command waits for another thread, as SANITIZE does.
const PATIENCE: u32 = 1000;
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
    let kind = match setup & 0x18 {
        0x08 => Some(ProtectionType::Type1),
        0x18 => Some(ProtectionType::Type3),
        _ => None,
    };
    let metadata = if kind.is_some() { TUPLE_LEN as u32 } else { 0 };
    let below = Malloc::with_metadata(options, metadata).expect("a disk of 300 blocks");
    let disk: Arc<dyn Bdev> = match kind {
        None => below,
        Some(kind) => {
            ProtectedDisk::new(below, Protection { kind, interleaved: true, at_head: false })
        }
    };
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
        // As long as the data's, in lists of their own or in none.
        let of =
            |len: usize| if setup & 0x20 != 0 { len / block_size as usize * TUPLE_LEN } else { 0 };
        let (tuples_out, tuples_in) = (Buffer::new(tail, of(out)), Buffer::new(&[], of(into)));
        task.prepare(&cdb, data_out.sg(), data_in.sg());
        task.set_tuples(tuples_out.sg(), tuples_in.sg());
        check(run(&mut lun, &mut task), out, into);
        data_out.check();
        data_in.check();
        tuples_out.check();
        tuples_in.check();
        rest = &tail[tail.len().min(out)..];
    }
}

/// Runs a command to its end.
fn run(lun: &mut Lun, task: &mut Task) -> Outcome {
    let mut outcome = lun.start(task);
    let mut done: Vec<Completion> = Vec::with_capacity(8);
    for polls in 0..MAX_POLLS {
        if outcome != Outcome::Pending {
            return outcome;
        }
        if polls > PATIENCE {
            std::thread::sleep(std::time::Duration::from_micros(50));
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
    // Of the fixed format, or with D_SENSE of the other.
    let lengths: &[usize] = if sense { &[SENSE_LEN, 8, 16, 20] } else { &[0] };
    assert!(lengths.contains(&usize::from(response.sense_len)));
}
