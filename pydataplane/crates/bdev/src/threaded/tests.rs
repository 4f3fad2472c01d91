//! A device whose thread is the test.

use std::collections::VecDeque;
use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, Ordering::SeqCst};

use super::*;
use crate::{FlushCause, Stats, Waiters};

/// Keeps the I/Os that it is handed.
#[derive(Default)]
struct Device {
    features: Features,
    latch: FlushLatch,
    has_given_up: AtomicBool,
    is_full: AtomicBool,
    waiters: Waiters,
    has: Mutex<VecDeque<ThreadRequest>>,
}

impl Device {
    fn next(&self) -> ThreadRequest {
        self.has.lock().unwrap().pop_front().unwrap()
    }
}

impl Threaded for Arc<Device> {
    fn geometry(&self) -> Geometry {
        Geometry { block_size: 512, physical_block_size: 512, num_blocks: 64 }
    }
    fn features(&self) -> &Features {
        &self.features
    }
    fn latch(&self) -> &FlushLatch {
        &self.latch
    }
    fn flushes(&self) -> bool {
        true
    }
    fn has_given_up(&self) -> bool {
        self.has_given_up.load(SeqCst)
    }
    fn compared_max(&self) -> u64 {
        1
    }
    fn hand_over(
        &self,
        request: ThreadRequest,
        waiter: Option<&Arc<Waiter>>,
    ) -> Result<(), ThreadRequest> {
        if self.is_full.load(SeqCst) {
            waiter.map(|waiter| self.waiters.wait(waiter));
            return Err(request);
        }
        self.has.lock().unwrap().push_back(request);
        Ok(())
    }
}

/// A channel of a device, and memory for one block.
struct Bench {
    device: Arc<Device>,
    stats: Arc<Stats>,
    channel: ThreadChannel<Arc<Device>>,
    io: IoContext,
    _block: AlignedBuf,
    run: Box<[IoVec; 1]>,
    done: Vec<Completion>,
}

impl Bench {
    fn new() -> Bench {
        let (device, stats) = (Arc::new(Device::default()), Stats::new());
        let io = IoContext::new().unwrap();
        let channel = ThreadChannel::new(Arc::clone(&device), &io, stats.channel());
        let mut block = AlignedBuf::zeroed(512);
        // SAFETY: boxed, as the list is, and as long as the channel.
        let run = unsafe { Box::new([IoVec::new(block.as_mut_ptr(), 512)]) };
        Bench { device, stats, channel, io, _block: block, run, done: Vec::with_capacity(256) }
    }

    fn sg(&self) -> Sg {
        // SAFETY: see `new`.
        unsafe { Sg::new(&*self.run) }
    }

    fn write(&self, tag: u64) -> Io {
        Io { op: Op::Write, lba: 0, blocks: 1, sg: self.sg(), ..Io::flush(tag) }
    }

    /// What has ended: the tag and how.
    fn ended(&mut self) -> Vec<(u64, Result<(), IoError>)> {
        self.channel.poll(&mut self.done);
        self.done.drain(..).map(|over| (over.tag, over.result)).collect()
    }
}

#[test]
fn one_comparison_at_a_time_is_under_way() {
    let mut bench = Bench::new();
    let (first, second, sg) = (bench.write(1), bench.write(2), bench.sg());
    assert_eq!(bench.channel.submit_if(&first, &sg), Submit::Pending);
    assert_eq!(bench.channel.submit_if(&second, &sg), Submit::Full);
    let request = bench.device.next();
    assert_eq!((request.how, request.io.sg.len()), (WriteHow::Compared, 1024));
    request.end(Err(IoError::Miscompare));
    assert_eq!(bench.ended(), [(1, Err(IoError::Miscompare))]);
    assert_eq!(bench.channel.submit_if(&second, &sg), Submit::Pending);
    bench.device.next().end(Ok(()));
    assert_eq!(bench.ended(), [(2, Ok(()))]);
}

#[test]
fn what_the_thread_has_no_room_for_takes_no_place_of_the_channel() {
    let mut bench = Bench::new();
    bench.device.is_full.store(true, SeqCst);
    for tag in 0..2 * u64::from(DEPTH) {
        assert_eq!(bench.channel.submit(&bench.write(tag)), Submit::Full);
    }
    let (write, sg) = (bench.write(0), bench.sg());
    assert_eq!(bench.channel.submit_if(&write, &sg), Submit::Full);
    bench.device.is_full.store(false, SeqCst);
    assert_eq!(bench.channel.submit_if(&write, &sg), Submit::Pending);
    for tag in 1..u64::from(DEPTH) {
        assert_eq!(bench.channel.submit(&bench.write(tag)), Submit::Pending);
    }
    assert_eq!(bench.channel.submit(&bench.write(999)), Submit::Full);
    for _ in 0..DEPTH {
        bench.device.next().end(Ok(()));
    }
    assert_eq!(bench.ended().len(), usize::from(DEPTH));
}

#[test]
fn who_has_nothing_under_way_is_woken_when_the_thread_has_room() {
    let mut bench = Bench::new();
    bench.device.is_full.store(true, SeqCst);
    assert_eq!(bench.channel.submit(&bench.write(1)), Submit::Full);
    bench.device.is_full.store(false, SeqCst);
    bench.device.waiters.tell();
    // Ten minutes: a lost wake-up would show as a hang.
    bench.io.wait(600_000_000).unwrap();
    assert_eq!(bench.channel.submit(&bench.write(1)), Submit::Pending);
    bench.device.next().end(Ok(()));
    assert_eq!(bench.ended(), [(1, Ok(()))]);
}

#[test]
fn a_flush_of_another_that_failed_meanwhile_is_a_failure_of_this_one() {
    let mut bench = Bench::new();
    assert_eq!(bench.channel.submit(&Io::flush(5)), Submit::Pending);
    bench.device.latch.set(FlushCause::Flush, None);
    bench.device.next().end(Ok(()));
    assert_eq!(bench.ended(), [(5, Err(IoError::Flush))]);
    assert_eq!(bench.channel.submit(&Io::flush(6)), Submit::Done(Err(IoError::Flush)));
    assert_eq!(bench.channel.submit(&bench.write(7)), Submit::Pending, "it is not durable");
    bench.device.next().end(Ok(()));
}

#[test]
fn io_of_a_device_that_was_given_up_fails_at_once_and_counts() {
    let mut bench = Bench::new();
    bench.device.has_given_up.store(true, SeqCst);
    let error = Op::Write.failed();
    assert_eq!(bench.channel.submit(&bench.write(1)), Submit::Done(Err(error)));
    assert!(bench.device.has.lock().unwrap().is_empty());
    assert_eq!(bench.stats.snapshot().errors_of(error), 1);
}

#[test]
fn an_io_that_the_thread_drops_is_aborted() {
    let mut bench = Bench::new();
    assert_eq!(bench.channel.submit(&bench.write(3)), Submit::Pending);
    drop(bench.device.next());
    assert_eq!(bench.ended(), [(3, Err(IoError::Aborted))]);
}

#[test]
fn a_channel_is_gone_when_nothing_of_it_is_in_flight() {
    let mut bench = Bench::new();
    assert_eq!(bench.channel.submit(&bench.write(1)), Submit::Pending);
    let (request, is_over) = (bench.device.next(), Arc::new(AtomicBool::new(false)));
    let tells = Arc::clone(&is_over);
    let thread = thread::spawn(move || {
        thread::sleep(Duration::from_millis(30));
        tells.store(true, SeqCst);
        request.end(Ok(()));
    });
    drop(bench);
    assert!(is_over.load(SeqCst));
    thread.join().unwrap();
}
