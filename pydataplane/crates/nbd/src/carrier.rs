//! The one connection of a server that does not serve several as one: a thread has it, and carries the I/O
//! of all channels. They hand I/Os over through a queue, and have completions back through one of their own.

use std::io;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
use std::sync::mpsc;
use std::thread;
use std::time::Duration;

use bdev::{
    Channel, ChannelStats, Completion, Geometry, Io, Op, Slots, Submit, ThreadQueue, Waiter,
};
use crossbeam_queue::ArrayQueue;
use reactor::{IoContext, ticks};

use crate::channel::NbdChannel;
use crate::conversation::DEPTH;
use crate::lane::{Carried, Carrier, Lane};
use crate::life::Life;
use crate::shared::Shared;

/// I/Os of a channel at a time at most.
const LANE_DEPTH: u16 = 128;

/// I/Os of all channels that the thread has not taken.
const QUEUE: usize = 4096;

/// Longest wait of the thread, in microseconds.
const WAIT_US: u64 = 250_000;

/// Between two looks at I/Os that a channel waits for as it is closed.
const CLOSING_POLL: Duration = Duration::from_micros(200);

/// Starts the thread, which opens the only channel with a connection.
pub(crate) fn start(shared: &Arc<Shared>) -> io::Result<Arc<Carrier>> {
    let (tell, told) = mpsc::channel();
    let shared = shared.clone();
    let work = move || {
        let opened = IoContext::new().and_then(|io| {
            let channel = NbdChannel::open(&shared, &io, None, None)?;
            Ok((io, channel))
        });
        match opened {
            Ok((io, channel)) => {
                let (queue, waker) = (ThreadQueue::new(QUEUE), io.waker());
                let carrier = Arc::new(Carrier { queue, waker, stop: AtomicBool::new(false) });
                _ = tell.send(Ok(carrier.clone()));
                run(&carrier, &io, channel);
            }
            Err(e) => _ = tell.send(Err(e)),
        }
    };
    thread::Builder::new().name("nbd carrier".into()).spawn(work)?;
    told.recv().map_err(io::Error::other)?
}

fn run(carrier: &Carrier, io: &IoContext, mut channel: NbdChannel) {
    // By tag: whose I/O it is, and its own tag.
    let mut slots = Slots::new(DEPTH, |_| None::<(Arc<Lane>, u64)>);
    let mut done = Vec::with_capacity(usize::from(DEPTH));
    let mut held: Option<Carried> = None;
    while !carrier.stop.load(Relaxed) {
        while let Some(at) = slots.next_free()
            && let Some(Carried { lane, io }) = held.take().or_else(|| carrier.queue.pop())
        {
            let tag = io.tag;
            match channel.submit(&Io { tag: u64::from(at), ..io }) {
                Submit::Done(result) => {
                    lane.give(Completion { tag, result, ticks: 0, ended: 0 });
                }
                Submit::Pending => {
                    slots.take();
                    slots[at] = Some((lane, tag));
                }
                Submit::Full => {
                    held = Some(Carried { lane, io });
                    break;
                }
            }
        }
        io.flush();
        done.clear();
        channel.poll(&mut done);
        for completion in &done {
            let at = completion.tag as u16;
            if let Some((lane, tag)) = slots[at].take() {
                lane.give(Completion { tag, ..*completion });
            }
            slots.give_back(at);
        }
        let more = done.len() == done.capacity() || !carrier.queue.is_empty() && !slots.is_full();
        if !more && io.wait(WAIT_US).is_err() {
            thread::yield_now();
        }
    }
}

struct Slot {
    op: Op,
    bytes: u64,
    tag: u64,
    begun: u64,
}

/// A channel whose I/O the thread carries.
pub(crate) struct CarriedChannel {
    lane: Arc<Lane>,
    carrier: Arc<Carrier>,
    waiter: Arc<Waiter>,
    slots: Slots<Slot>,
    stats: ChannelStats,
    shared: Arc<Shared>,
    geometry: Geometry,
    _life: Arc<Life>,
}

impl CarriedChannel {
    pub(crate) fn new(
        shared: &Arc<Shared>,
        carrier: &Arc<Carrier>,
        io: &IoContext,
        stats: ChannelStats,
        life: Arc<Life>,
    ) -> Self {
        let done = ArrayQueue::new(usize::from(LANE_DEPTH));
        CarriedChannel {
            lane: Arc::new(Lane { done, waker: io.waker() }),
            carrier: carrier.clone(),
            waiter: Waiter::new(io.waker()),
            slots: Slots::new(LANE_DEPTH, |_| Slot { op: Op::Flush, bytes: 0, tag: 0, begun: 0 }),
            stats,
            geometry: shared.geometry(),
            shared: shared.clone(),
            _life: life,
        }
    }
}

impl Channel for CarriedChannel {
    fn submit(&mut self, io: &Io) -> Submit {
        let geometry = Geometry { num_blocks: self.shared.num_blocks(), ..self.geometry };
        if let Err(e) = io.check(&geometry, &self.shared.features) {
            self.stats.error(e);
            return Submit::Done(Err(e));
        }
        let Some(at) = self.slots.next_free() else { return Submit::Full };
        let (bytes, begun) = (io.bytes(self.geometry.block_size), ticks::now());
        self.slots[at] = Slot { op: io.op, bytes, tag: io.tag, begun };
        let carried = Carried { lane: self.lane.clone(), io: Io { tag: u64::from(at), ..*io } };
        // Else one of its own ends, and it looks again.
        let waiter = (self.slots.taken() == 0).then_some(&self.waiter);
        if self.carrier.queue.push(carried, waiter).is_err() {
            return Submit::Full;
        }
        self.slots.take();
        self.carrier.waker.wake();
        Submit::Pending
    }

    fn poll(&mut self, done: &mut Vec<Completion>) -> u32 {
        let before = done.len();
        while done.len() < done.capacity()
            && let Some(over) = self.lane.done.pop()
        {
            let at = over.tag as u16;
            let Slot { op, bytes, tag, begun } = self.slots[at];
            let ended = if over.ended == 0 { ticks::now() } else { over.ended };
            let took = ended.saturating_sub(begun);
            self.stats.record(op, bytes, took, over.result);
            self.slots.give_back(at);
            done.push(Completion { tag, result: over.result, ticks: took, ended });
        }
        (done.len() - before) as u32
    }
}

impl Drop for CarriedChannel {
    /// Waits for what is in flight: its memory is the caller's.
    fn drop(&mut self) {
        let mut left = self.slots.taken();
        while left > 0 {
            match self.lane.done.pop() {
                Some(_) => left -= 1,
                None => thread::sleep(CLOSING_POLL),
            }
        }
    }
}
