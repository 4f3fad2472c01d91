//! What `bdev_get_iostat` shows: operations, bytes, latencies and errors of a device.
//!
//! Each channel writes counters of its own with relaxed loads and stores (one writer, no locked
//! instruction); readers add them up on demand. A reset moves a baseline and never touches them. A channel
//! learns of a reset, and of a histogram that it is to count in, by a revision that it compares.

mod iostat;

use parking_lot::{Mutex, MutexGuard};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};

use crate::histogram::Histogram;
use crate::{HistogramOptions, Io, IoError, Latencies, Op};

pub use iostat::{IoStat, OpStat};

/// A channel that completes in `submit` times one I/O of so many and counts it for all of them, while it has
/// no histogram: reading the clock twice costs more than a null I/O.
pub const SYNC_SAMPLE: u32 = 16;

/// What a reset forgets (SPDK's `reset_mode`).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum StatsReset {
    /// Everything.
    All,
    /// Only the longest and the shortest latency.
    MaxMin,
}

#[derive(Default)]
#[repr(align(64))]
struct Counter {
    ops: AtomicU64,
    bytes: AtomicU64,
    ticks: AtomicU64,
    max: AtomicU64,
    min: AtomicU64,
}

#[derive(Default)]
struct Counters {
    ops: [Counter; Op::COUNT],
    errors: [AtomicU64; IoError::COUNT],
    /// [`Stats::epoch`] that `max` and `min` belong to.
    epoch: AtomicU64,
}

impl Counters {
    fn read(&self, epoch: u64) -> IoStat {
        let fresh = self.epoch.load(Relaxed) == epoch;
        let mut s = IoStat::default();
        for (to, from) in s.ops.iter_mut().zip(&self.ops) {
            *to = OpStat {
                ops: from.ops.load(Relaxed),
                bytes: from.bytes.load(Relaxed),
                ticks: from.ticks.load(Relaxed),
                max_ticks: if fresh { from.max.load(Relaxed) } else { 0 },
                min_ticks: if fresh { from.min.load(Relaxed) } else { 0 },
            };
        }
        for (to, from) in s.errors.iter_mut().zip(&self.errors) {
            *to = from.load(Relaxed);
        }
        s
    }
}

struct Live {
    counters: Arc<Counters>,
    /// Name of the thread that opened the channel.
    thread: String,
    /// Counted before the last reset.
    base: IoStat,
    histogram: Option<Arc<Histogram>>,
}

#[derive(Default)]
struct Shared {
    live: Vec<Live>,
    /// Counted by closed channels since the last reset.
    closed: IoStat,
    /// What the histograms count; `None`: there are none.
    histogram: Option<HistogramOptions>,
    /// Those of closed channels. The next ones to open go on with them.
    spare: Vec<Arc<Histogram>>,
}

impl Shared {
    /// One for a channel, if there are any.
    fn histogram(&mut self) -> Option<Arc<Histogram>> {
        let options = self.histogram?;
        Some(self.spare.pop().unwrap_or_else(|| Arc::new(Histogram::new(options))))
    }
}

/// Statistics of one device.
#[derive(Default)]
pub struct Stats {
    shared: Mutex<Shared>,
    /// Counts resets of the maxima and minima.
    epoch: AtomicU64,
    /// Counts what channels are to look at: those resets, and new histograms.
    revision: AtomicU64,
}

impl Stats {
    /// All zero.
    pub fn new() -> Arc<Self> {
        Arc::default()
    }

    fn lock(&self) -> MutexGuard<'_, Shared> {
        self.shared.lock()
    }

    /// Counters for a new channel of the calling thread.
    pub fn channel(self: &Arc<Self>) -> ChannelStats {
        let counters = Arc::new(Counters::default());
        counters.epoch.store(self.epoch.load(Relaxed), Relaxed);
        let thread = std::thread::current().name().unwrap_or("control").to_owned();
        let mut shared = self.lock();
        let histogram = shared.histogram();
        shared.live.push(Live {
            counters: counters.clone(),
            thread,
            base: IoStat::default(),
            histogram: histogram.clone(),
        });
        let mut channel = ChannelStats {
            stats: self.clone(),
            counters,
            revision: self.revision.load(Relaxed),
            every: SYNC_SAMPLE,
            until_sample: 0,
            histogram: None,
        };
        channel.count_in(histogram);
        channel
    }

    /// Counts latencies in new histograms from now on; `None`: not any more.
    ///
    /// An I/O that is under way at this moment may be counted in them or not. A channel whose I/O ends within
    /// `submit` counts from the next one on that it times: it finds out with that.
    pub fn set_histogram(&self, options: Option<HistogramOptions>) {
        let mut shared = self.lock();
        shared.histogram = options;
        shared.spare.clear();
        for live in &mut shared.live {
            live.histogram = options.map(|options| Arc::new(Histogram::new(options)));
        }
        self.revision.fetch_add(1, Relaxed);
    }

    /// What the histograms of all channels, open and closed, counted; `None`: there are none.
    pub fn latencies(&self) -> Option<Latencies> {
        let shared = self.lock();
        let mut sum = Latencies::new(shared.histogram?);
        let live = shared.live.iter().filter_map(|live| live.histogram.as_ref());
        live.chain(&shared.spare).for_each(|histogram| sum.add(histogram));
        Some(sum)
    }

    /// Sum over all channels, open and closed, since the last reset.
    pub fn snapshot(&self) -> IoStat {
        let shared = self.lock();
        let epoch = self.epoch.load(Relaxed);
        let mut sum = shared.closed;
        for l in &shared.live {
            sum.add(&l.counters.read(epoch).since(&l.base));
        }
        sum
    }

    /// Open channels since the last reset, each with the name of its thread.
    pub fn per_channel(&self) -> Vec<(String, IoStat)> {
        let shared = self.lock();
        let epoch = self.epoch.load(Relaxed);
        let one = |l: &Live| (l.thread.clone(), l.counters.read(epoch).since(&l.base));
        shared.live.iter().map(one).collect()
    }

    /// Starts counting anew.
    pub fn reset(&self, what: StatsReset) {
        let mut shared = self.lock();
        let epoch = self.epoch.fetch_add(1, Relaxed) + 1;
        self.revision.fetch_add(1, Relaxed);
        match what {
            StatsReset::All => {
                shared.closed = IoStat::default();
                for l in &mut shared.live {
                    l.base = l.counters.read(epoch);
                }
            }
            StatsReset::MaxMin => {
                for o in &mut shared.closed.ops {
                    (o.max_ticks, o.min_ticks) = (0, 0);
                }
            }
        }
    }
}

/// One channel's counters: written by the thread that owns the channel, and only by it.
pub struct ChannelStats {
    stats: Arc<Stats>,
    counters: Arc<Counters>,
    /// [`Stats::revision`] that the channel has looked at.
    revision: u64,
    /// One I/O of so many is timed, where it ends within `submit`.
    every: u32,
    /// I/Os that are not, before the next one is.
    until_sample: u32,
    histogram: Option<Arc<Histogram>>,
}

#[inline]
fn bump(a: &AtomicU64, by: u64) {
    a.store(a.load(Relaxed).wrapping_add(by), Relaxed);
}

impl ChannelStats {
    /// Counts an I/O that took `ticks`.
    #[inline]
    pub fn record(&mut self, op: Op, bytes: u64, ticks: u64, result: Result<(), IoError>) {
        if let Err(e) = result {
            return self.error(e);
        }
        self.look();
        let c = &self.counters.ops[op as usize];
        bump(&c.ops, 1);
        bump(&c.bytes, bytes);
        bump(&c.ticks, ticks);
        if let Some(histogram) = &self.histogram {
            histogram.tally(op, ticks);
        }
        if ticks > c.max.load(Relaxed) {
            c.max.store(ticks, Relaxed);
        }
        let min = c.min.load(Relaxed);
        if min == 0 || ticks < min {
            c.min.store(ticks.max(1), Relaxed);
        }
    }

    /// Counts a failed I/O.
    #[cold]
    pub fn error(&mut self, error: IoError) {
        bump(&self.counters.errors[error as usize], 1);
    }

    /// Begins an I/O that will end within `submit`: the time, for one of [`SYNC_SAMPLE`] of them, or for each
    /// where there is a histogram.
    #[inline]
    pub fn begin(&mut self) -> Option<u64> {
        if self.until_sample == 0 {
            self.until_sample = self.every - 1;
            return Some(reactor::ticks::now());
        }
        self.until_sample -= 1;
        None
    }

    /// Ends what [`ChannelStats::begin`] began.
    #[inline(always)]
    pub fn end(
        &mut self,
        io: &Io,
        block_size: u32,
        begun: Option<u64>,
        result: Result<(), IoError>,
    ) {
        let bytes = io.bytes(block_size);
        match (result, begun) {
            (Err(e), _) => self.error(e),
            (Ok(()), None) => {
                let c = &self.counters.ops[io.op as usize];
                bump(&c.ops, 1);
                bump(&c.bytes, bytes);
            }
            (Ok(()), Some(begun)) => self.end_timed(io.op, bytes, begun),
        }
    }

    /// Apart from `end`, which is in each I/O's way where one in [`SYNC_SAMPLE`] comes here.
    #[inline(never)]
    fn end_timed(&mut self, op: Op, bytes: u64, begun: u64) {
        let ticks = reactor::ticks::now().saturating_sub(begun);
        self.look();
        // The others' time.
        let others = ticks * u64::from(self.every - 1);
        bump(&self.counters.ops[op as usize].ticks, others);
        self.record(op, bytes, ticks, Ok(()));
    }

    /// Takes note of a reset or of a new histogram, if there was one.
    #[inline]
    fn look(&mut self) {
        let revision = self.stats.revision.load(Relaxed);
        if self.revision != revision {
            self.catch_up(revision);
        }
    }

    #[cold]
    fn catch_up(&mut self, revision: u64) {
        // Whoever reads or resets at this moment delays no I/O: the next one looks again.
        let stats = Arc::clone(&self.stats);
        let Some(shared) = stats.shared.try_lock() else { return };
        let epoch = stats.epoch.load(Relaxed);
        if self.counters.epoch.load(Relaxed) != epoch {
            for c in &self.counters.ops {
                c.max.store(0, Relaxed);
                c.min.store(0, Relaxed);
            }
            self.counters.epoch.store(epoch, Relaxed);
        }
        let own = shared.live.iter().find(|l| Arc::ptr_eq(&l.counters, &self.counters));
        self.count_in(own.and_then(|live| live.histogram.clone()));
        // The one at hand is timed.
        self.until_sample = self.every - 1;
        self.revision = revision;
    }

    /// Counts in that histogram from now on, and times each I/O for it.
    fn count_in(&mut self, histogram: Option<Arc<Histogram>>) {
        self.every = if histogram.is_some() { 1 } else { SYNC_SAMPLE };
        self.histogram = histogram;
    }
}

impl Drop for ChannelStats {
    fn drop(&mut self) {
        let mut shared = self.stats.lock();
        let epoch = self.stats.epoch.load(Relaxed);
        if let Some(at) = shared.live.iter().position(|l| Arc::ptr_eq(&l.counters, &self.counters))
        {
            let l = shared.live.swap_remove(at);
            shared.closed.add(&l.counters.read(epoch).since(&l.base));
            shared.spare.extend(l.histogram);
        }
    }
}

#[cfg(test)]
mod tests;
