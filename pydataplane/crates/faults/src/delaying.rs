//! A bdev whose reads and writes take longer than its base's.

use crate::flight::Flight;
use crate::layer::{Layer, shows_its_base};
use bdev::{
    Bdev, Channel, Completion, Io, IoError, Op, OpenError, Registry, RegistryError, Run, Submit,
};
use fastrand::Rng;
use reactor::{IoContext, Waker, ticks};
use serde_json::{Value, json};
use std::collections::VecDeque;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use uuid::Uuid;

/// Which latency.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Latency {
    /// Of reads, but one of a hundred.
    AverageRead,
    /// Of that one.
    P99Read,
    /// Of writes, but one of a hundred.
    AverageWrite,
    /// Of that one.
    P99Write,
}

/// Latencies in microseconds, in the order of [`Latency`]'s variants.
pub type Latencies = [u64; Latency::COUNT];

impl Latency {
    /// How many there are.
    pub const COUNT: usize = 4;

    /// That of an I/O; `rare`: it is the one of a hundred. `None`: such an I/O is not delayed.
    fn of(op: Op, rare: bool) -> Option<Latency> {
        match (op, rare) {
            (Op::Read, false) => Some(Latency::AverageRead),
            (Op::Read, true) => Some(Latency::P99Read),
            (Op::Write, false) => Some(Latency::AverageWrite),
            (Op::Write, true) => Some(Latency::P99Write),
            (Op::Flush | Op::Unmap | Op::WriteZeroes, _) => None,
        }
    }
}

/// A bdev that answers reads and writes later than its base does.
pub struct Delaying {
    layer: Layer,
    /// Microseconds.
    latencies: Arc<[AtomicU64; Latency::COUNT]>,
}

impl Delaying {
    /// What [`Bdev::product_name`] says, as SPDK's.
    pub const PRODUCT: &'static str = "delay";

    /// The bdev `name` on the bdev `base`, not registered yet.
    ///
    /// # Errors
    /// There is no such base, or somebody has it.
    pub fn create(
        registry: &Registry,
        name: &str,
        base: &str,
        uuid: Option<Uuid>,
        latencies: Latencies,
    ) -> Result<Arc<Delaying>, RegistryError> {
        let layer = Layer::new(registry, "delay", name.to_owned(), base, uuid)?;
        Ok(Arc::new(Delaying { layer, latencies: Arc::new(latencies.map(AtomicU64::new)) }))
    }

    /// Its own part.
    pub fn layer(&self) -> &Layer {
        &self.layer
    }

    /// Microseconds from when the base has answered, from the next I/O that it answers on.
    pub fn set(&self, which: Latency, us: u64) {
        self.latencies[which as usize].store(us, Ordering::Relaxed);
    }

    fn us(&self, which: Latency) -> u64 {
        self.latencies[which as usize].load(Ordering::Relaxed)
    }
}

impl Bdev for Delaying {
    shows_its_base!(Delaying::PRODUCT);

    fn open(&self, io: &IoContext) -> Result<Box<dyn Channel>, OpenError> {
        let base = self.layer.base().open(io)?;
        let flight = Flight::new(base, self.layer.stats.channel(), self.geometry().block_size);
        Ok(Box::new(DelayingChannel {
            flight,
            latencies: self.latencies.clone(),
            answered: Default::default(),
            rng: Rng::new(),
            waker: io.waker(),
        }))
    }

    fn driver_specific(&self) -> Value {
        json!({"delay": {
            "name": self.layer.name,
            "base_bdev_name": self.layer.base().name(),
            "avg_read_latency": self.us(Latency::AverageRead),
            "p99_read_latency": self.us(Latency::P99Read),
            "avg_write_latency": self.us(Latency::AverageWrite),
            "p99_write_latency": self.us(Latency::P99Write),
        }})
    }
}

/// An I/O that the base has answered.
struct Answered {
    at: u16,
    result: Result<(), IoError>,
    /// When it is told, in ticks.
    due: u64,
}

struct DelayingChannel {
    flight: Flight<Option<Latency>>,
    latencies: Arc<[AtomicU64; Latency::COUNT]>,
    /// Of each latency, in the order of the answers. As in SPDK's, a shorter latency is not seen before
    /// what waits for a longer one: that is how an initiator's timeout is provoked.
    answered: [VecDeque<Answered>; Latency::COUNT],
    rng: Rng,
    /// Keeps the thread awake while something waits.
    waker: Waker,
}

impl Channel for DelayingChannel {
    fn submit(&mut self, io: &Io) -> Submit {
        let latency = Latency::of(io.op, self.rng.u8(..100) == 0);
        let Some(at) = self.flight.begin(io, latency) else { return Submit::Full };
        match (self.flight.send(at), latency) {
            (Submit::Full, _) => {
                self.flight.forget(at);
                Submit::Full
            }
            (Submit::Pending, _) => Submit::Pending,
            (Submit::Done(result), None) => self.flight.end_now(at, result),
            (Submit::Done(result), Some(latency)) => {
                self.hold(at, latency, result);
                Submit::Pending
            }
        }
    }

    fn poll(&mut self, done: &mut Vec<Completion>) -> u32 {
        let before = done.len();
        if self.flight.is_handed_over(done) {
            let mut ended = self.flight.ended();
            for Completion { tag, result, .. } in ended.drain(..) {
                match self.flight.slots[tag as u16].more {
                    None => self.flight.end(tag as u16, result, done),
                    Some(latency) => self.hold(tag as u16, latency, result),
                }
            }
            self.flight.keep(ended);
            let now = ticks::now();
            for queue in &mut self.answered {
                while let Some(first) = queue.front().filter(|first| first.due <= now) {
                    self.flight.end(first.at, first.result, done);
                    queue.pop_front();
                }
            }
        }
        if self.answered.iter().any(|queue| !queue.is_empty()) {
            self.waker.wake();
        }
        (done.len() - before) as u32
    }

    fn sparse_run(&mut self, lba: u64, blocks: u64) -> Run {
        self.flight.base().sparse_run(lba, blocks)
    }
}

impl DelayingChannel {
    /// Has an I/O that the base has answered wait.
    fn hold(&mut self, at: u16, latency: Latency, result: Result<(), IoError>) {
        let us = self.latencies[latency as usize].load(Ordering::Relaxed);
        let due = ticks::now().saturating_add(ticks::from_us(us));
        self.answered[latency as usize].push_back(Answered { at, result, due });
        self.waker.wake();
    }
}
