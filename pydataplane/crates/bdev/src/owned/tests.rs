use super::*;
use crate::{
    Features, FileBdev, FileKind, FileOptions, Geometry, Malloc, MallocOptions, RateLimits,
};
use io_uring::opcode;
use reactor::UringClient;
use std::collections::VecDeque;
use std::sync::Mutex;

fn drain<T>(channel: &mut OwnedChannel<T>, over: &mut Vec<Finished<T>>) {
    while channel.in_flight() > 0 {
        if channel.poll(over) == 0 {
            channel.wait(over, WAIT_US);
        }
    }
}

/// A disk of 64 blocks.
fn memory() -> Arc<Malloc> {
    let options = MallocOptions {
        name: "m0".into(),
        block_size: 512,
        physical_block_size: 0,
        num_blocks: 64,
        uuid: None,
    };
    Malloc::create(options).unwrap()
}

fn both(bdev: &dyn Bdev) {
    let mut channel = OwnedChannel::open(bdev, 8).unwrap();
    let mut over = Vec::new();
    for lba in 0..64u64 {
        while channel.is_full() {
            if channel.poll(&mut over) == 0 {
                channel.wait(&mut over, WAIT_US);
            }
        }
        let mut buf = AlignedBuf::zeroed(8192);
        buf[..512].fill(lba as u8 + 1);
        over.extend(channel.submit(Op::Write, lba, 1, Some(buf), lba));
    }
    drain(&mut channel, &mut over);
    assert_eq!(over.len(), 64);
    assert!(over.drain(..).all(|f| f.result.is_ok() && f.buf.is_some()));
    let buf = Some(AlignedBuf::zeroed(64 * 512));
    over.extend(channel.submit(Op::Read, 0, 64, buf, 7));
    drain(&mut channel, &mut over);
    let read = over.pop().unwrap();
    assert_eq!((read.token, read.result), (7, Ok(())));
    let data = read.buf.unwrap();
    assert!(data.chunks(512).zip(1u8..).all(|(block, n)| block.iter().all(|b| *b == n)));
    over.extend(channel.submit(Op::Read, 0, 2, Some(AlignedBuf::zeroed(512)), 8));
    assert_eq!(over.pop().unwrap().result, Err(IoError::BadLength));
    over.extend(channel.submit(Op::Read, 1 << 40, 1, Some(AlignedBuf::zeroed(512)), 9));
    drain(&mut channel, &mut over);
    assert_eq!(over.pop().unwrap().result, Err(IoError::OutOfRange));
}

#[test]
fn memory_and_file_take_many_at_a_time_and_give_buffers_back() {
    both(&*memory());
    let file = tempfile::NamedTempFile::new().unwrap();
    file.as_file().set_len(64 * 512).unwrap();
    let options = FileOptions {
        name: "f0".into(),
        path: file.path().into(),
        block_size: Some(512),
        read_only: false,
        uuid: None,
        kind: FileKind::Uring,
    };
    both(&*FileBdev::create(options).unwrap());
}

#[test]
fn what_a_limit_keeps_waits_in_its_order_until_somebody_must_not() {
    let bdev = memory();
    let limits = Arc::new(Limits::default());
    // After one block the next one waits for 512 s.
    let mut slow = RateLimits { operation_bytes: 1, ..RateLimits::default() };
    slow.operations[0].average = 1;
    limits.set(slow).unwrap();
    let mut channel = OwnedChannel::open_within(&*bdev, 8, Arc::clone(&limits)).unwrap();
    let mut over = Vec::new();
    let submit = |channel: &mut OwnedChannel<u64>, over: &mut Vec<Finished<u64>>, n: u64| {
        let buf = Some(AlignedBuf::zeroed(512));
        over.extend(channel.submit(Op::Write, n, 1, buf, n));
    };
    let tokens = |over: &mut Vec<Finished<u64>>| -> Vec<u64> {
        over.drain(..).map(|finished| finished.token).collect()
    };
    (0..4).for_each(|n| submit(&mut channel, &mut over, n));
    channel.wait(&mut over, WAIT_US);
    channel.poll(&mut over);
    assert_eq!(tokens(&mut over), [0]);
    // A flush is not limited, and behind them all the same.
    over.extend(channel.submit(Op::Flush, 0, 0, None, 4));
    assert!(tokens(&mut over).is_empty());
    channel.set_unlimited(true);
    drain(&mut channel, &mut over);
    assert_eq!(tokens(&mut over), [1, 2, 3, 4]);
    channel.set_unlimited(false);
    (5..8).for_each(|n| submit(&mut channel, &mut over, n));
    limits.set(RateLimits::default()).unwrap();
    drain(&mut channel, &mut over);
    assert_eq!(tokens(&mut over), [5, 6, 7]);
    limits.set(slow).unwrap();
    (8..12).for_each(|n| submit(&mut channel, &mut over, n));
    // Its end waits for none of them.
    drop(channel);
}

#[test]
fn a_limit_of_one_direction_keeps_nothing_of_the_other() {
    let bdev = memory();
    for (limited, other, place) in [(Op::Write, Op::Read, 2), (Op::Read, Op::Write, 1)] {
        let limits = Arc::new(Limits::default());
        let mut slow = RateLimits { operation_bytes: 1, ..RateLimits::default() };
        slow.operations[place].average = 1;
        limits.set(slow).unwrap();
        let mut channel = OwnedChannel::open_within(&*bdev, 8, limits).unwrap();
        let mut over = Vec::new();
        let ops = [limited, limited, other, limited, other, other];
        for (n, op) in (0u64..).zip(ops) {
            let buf = Some(AlignedBuf::zeroed(512));
            over.extend(channel.submit(op, n, 1, buf, n));
        }
        channel.wait(&mut over, WAIT_US);
        channel.poll(&mut over);
        let mut tokens: Vec<_> = over.drain(..).map(|finished| finished.token).collect();
        tokens.sort_unstable();
        // The first of the limited ones empties their bucket.
        assert_eq!(tokens, [0, 2, 4, 5]);
        channel.set_unlimited(true);
        drain(&mut channel, &mut over);
        assert_eq!(over.len(), 2);
    }
}

#[test]
fn a_limit_of_both_directions_is_shared_in_turns() {
    let bdev = memory();
    let limits = Arc::new(Limits::default());
    let mut slow = RateLimits::default();
    slow.operations[0].average = 100;
    limits.set(slow).unwrap();
    let mut channel = OwnedChannel::open_within(&*bdev, 64, limits).unwrap();
    let mut over = Vec::new();
    // More writes than the bucket has room for, then as many reads as still may wait.
    for n in 0..40u64 {
        let op = if n < 30 { Op::Write } else { Op::Read };
        over.extend(channel.submit(op, n, 1, Some(AlignedBuf::zeroed(512)), n));
    }
    drain(&mut channel, &mut over);
    let order: Vec<_> = over.iter().map(|finished| finished.token).collect();
    let place = |token: u64| order.iter().position(|each| *each == token).unwrap();
    // The reads were asked for last, and the last of them is over before the last writes.
    assert!(place(39) < place(29), "{order:?}");
    let in_order = |from: u64, to: u64| (from..to).map(place).is_sorted();
    assert!(in_order(0, 30) && in_order(30, 40), "{order:?}");
}

/// Gives an I/O to the kernel when it is polled first, as a file does with one that goes on in
/// steps. The kernel ends it before the submission returns.
/// Notes whose its channels are.
#[derive(Default)]
struct Steps(Mutex<Vec<Option<Owner>>>);

struct StepsChannel {
    uring: UringClient,
    tags: VecDeque<u64>,
}

impl Bdev for Steps {
    fn name(&self) -> &str {
        "steps"
    }
    fn aliases(&self) -> Vec<String> {
        Vec::new()
    }
    fn uuid(&self) -> uuid::Uuid {
        uuid::Uuid::nil()
    }
    fn product_name(&self) -> &'static str {
        "Steps"
    }
    fn geometry(&self) -> Geometry {
        Geometry { block_size: 512, physical_block_size: 512, num_blocks: 8 }
    }
    fn features(&self) -> Features {
        Features::default()
    }
    fn open(&self, io: &IoContext) -> Result<Box<dyn Channel>, OpenError> {
        self.0.lock().unwrap().push(io.owner());
        let uring = io.uring().unwrap().client(8);
        Ok(Box::new(StepsChannel { uring, tags: VecDeque::new() }))
    }
    fn driver_specific(&self) -> serde_json::Value {
        serde_json::Value::Null
    }
}

impl Channel for StepsChannel {
    fn submit(&mut self, io: &Io) -> Submit {
        self.tags.push_back(io.tag);
        Submit::Pending
    }

    fn poll(&mut self, done: &mut Vec<Completion>) -> u32 {
        let before = done.len();
        while let Some((tag, _)) = self.uring.next_completion() {
            done.push(Completion { tag: u64::from(tag), result: Ok(()), ticks: 0, ended: 0 });
        }
        while let Some(tag) = self.tags.pop_front() {
            // SAFETY: a no-op names no buffer.
            unsafe { self.uring.push(opcode::Nop::new().build(), tag as u32, 0) }.unwrap();
        }
        (done.len() - before) as u32
    }
}

#[test]
fn each_channel_has_an_owner_of_its_own() {
    let steps = Steps::default();
    let _channels = [0, 1].map(|_| OwnedChannel::<()>::open(&steps, 4).unwrap());
    let owners = steps.0.into_inner().unwrap();
    assert!(owners[0].is_some() && owners[1].is_some(), "its I/O is no metadata: {owners:?}");
    assert_ne!(owners[0], owners[1]);
}

#[test]
fn what_ends_while_it_is_submitted_is_not_slept_through() {
    let mut channel = OwnedChannel::open(&Steps::default(), 4).unwrap();
    let mut over = Vec::new();
    assert!(channel.submit(Op::Flush, 0, 0, None, 'a').is_none());
    assert!(channel.submit(Op::Flush, 0, 0, None, 'b').is_none());
    assert_eq!(channel.poll(&mut over), 2);
    assert_eq!(channel.in_flight(), 0);
}
