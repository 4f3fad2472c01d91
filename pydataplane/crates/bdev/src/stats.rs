//! What `bdev_get_iostat` shows: operations, bytes, latencies and errors of a device.
//!
//! Each channel writes counters of its own with relaxed loads and stores (one writer, no locked
//! instruction); readers add them up on demand. A reset moves a baseline and never touches them.

use parking_lot::{Mutex, MutexGuard};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};

use crate::{Io, IoError, Op};

/// A channel that completes in `submit` times one I/O of so many and counts it for all of them:
/// reading the clock twice costs more than a null I/O.
pub const SYNC_SAMPLE: u32 = 16;

/// Counters of one operation.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct OpStat {
    /// Operations that succeeded.
    pub ops: u64,
    /// Bytes that they moved, unmapped or zeroed.
    pub bytes: u64,
    /// Sum of their latencies, in ticks ([`reactor::ticks::hz`] per second).
    pub ticks: u64,
    /// Longest latency, in ticks.
    pub max_ticks: u64,
    /// Shortest latency, in ticks; 0 if nothing was timed.
    pub min_ticks: u64,
}

impl OpStat {
    fn add(&mut self, o: &OpStat) {
        self.ops += o.ops;
        self.bytes += o.bytes;
        self.ticks += o.ticks;
        self.max_ticks = self.max_ticks.max(o.max_ticks);
        self.min_ticks = match (self.min_ticks, o.min_ticks) {
            (0, m) | (m, 0) => m,
            (a, b) => a.min(b),
        };
    }
}

/// A snapshot of a device's or a channel's counters.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct IoStat {
    /// By operation, in the order of [`Op::ALL`].
    pub ops: [OpStat; Op::COUNT],
    /// Failed I/Os by kind, in the order of [`IoError::ALL`].
    pub errors: [u64; IoError::COUNT],
}

impl IoStat {
    /// Counters of `op`.
    pub fn op(&self, op: Op) -> &OpStat {
        &self.ops[op as usize]
    }

    /// Failed I/Os that ended in `error`.
    pub fn errors_of(&self, error: IoError) -> u64 {
        self.errors[error as usize]
    }

    fn add(&mut self, other: &IoStat) {
        for (a, b) in self.ops.iter_mut().zip(&other.ops) {
            a.add(b);
        }
        for (a, b) in self.errors.iter_mut().zip(&other.errors) {
            *a += b;
        }
    }

    /// What was counted since `base`; maximum and minimum stay.
    fn since(mut self, base: &IoStat) -> IoStat {
        for (a, b) in self.ops.iter_mut().zip(&base.ops) {
            a.ops -= b.ops;
            a.bytes -= b.bytes;
            a.ticks -= b.ticks;
        }
        for (a, b) in self.errors.iter_mut().zip(&base.errors) {
            *a -= b;
        }
        self
    }
}

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
}

#[derive(Default)]
struct Shared {
    live: Vec<Live>,
    /// Counted by closed channels since the last reset.
    closed: IoStat,
}

/// Statistics of one device.
#[derive(Default)]
pub struct Stats {
    shared: Mutex<Shared>,
    /// Counts resets of the maxima and minima.
    epoch: AtomicU64,
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
        let live = Live { counters: counters.clone(), thread, base: IoStat::default() };
        self.lock().live.push(live);
        ChannelStats { stats: self.clone(), counters, until_sample: 0 }
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
    until_sample: u32,
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
        let c = &self.counters.ops[op as usize];
        bump(&c.ops, 1);
        bump(&c.bytes, bytes);
        let epoch = self.stats.epoch.load(Relaxed);
        if self.counters.epoch.load(Relaxed) != epoch {
            self.forget_extremes(epoch);
        }
        bump(&c.ticks, ticks);
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

    /// Begins an I/O that will end within `submit`: the time, for one of [`SYNC_SAMPLE`] of them.
    #[inline]
    pub fn begin(&mut self) -> Option<u64> {
        if self.until_sample == 0 {
            self.until_sample = SYNC_SAMPLE - 1;
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
        let c = &self.counters.ops[io.op as usize];
        match (result, begun) {
            (Err(e), _) => self.error(e),
            (Ok(()), None) => {
                bump(&c.ops, 1);
                bump(&c.bytes, bytes);
            }
            (Ok(()), Some(begun)) => {
                let ticks = reactor::ticks::now().saturating_sub(begun);
                // The others' time.
                bump(&c.ticks, ticks * u64::from(SYNC_SAMPLE - 1));
                self.record(io.op, bytes, ticks, result);
            }
        }
    }

    #[cold]
    fn forget_extremes(&self, epoch: u64) {
        for c in &self.counters.ops {
            c.max.store(0, Relaxed);
            c.min.store(0, Relaxed);
        }
        self.counters.epoch.store(epoch, Relaxed);
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
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sums_over_open_and_closed_channels() {
        let s = Stats::new();
        let (mut a, mut b) = (s.channel(), s.channel());
        a.record(Op::Read, 4096, 10, Ok(()));
        b.record(Op::Read, 512, 30, Ok(()));
        b.record(Op::Write, 512, 5, Err(IoError::NoSpace));
        drop(b);
        let sum = s.snapshot();
        let read = OpStat { ops: 2, bytes: 4608, ticks: 40, max_ticks: 30, min_ticks: 10 };
        assert_eq!(*sum.op(Op::Read), read);
        assert_eq!(*sum.op(Op::Write), OpStat::default());
        assert_eq!(sum.errors_of(IoError::NoSpace), 1);
        assert_eq!(sum.errors.iter().sum::<u64>(), 1);
        assert_eq!(s.per_channel().len(), 1);
    }

    #[test]
    fn a_reset_forgets_all_or_only_the_extremes() {
        let s = Stats::new();
        let mut a = s.channel();
        a.record(Op::Write, 512, 7, Ok(()));
        s.reset(StatsReset::MaxMin);
        let w = *s.snapshot().op(Op::Write);
        assert_eq!((w.ops, w.ticks, w.max_ticks, w.min_ticks), (1, 7, 0, 0));
        a.record(Op::Write, 512, 3, Ok(()));
        let w = *s.snapshot().op(Op::Write);
        assert_eq!((w.ops, w.ticks, w.max_ticks, w.min_ticks), (2, 10, 3, 3));
        s.reset(StatsReset::All);
        assert_eq!(s.snapshot(), IoStat::default());
        a.record(Op::Write, 512, 4, Ok(()));
        drop(a);
        let w = *s.snapshot().op(Op::Write);
        assert_eq!((w.ops, w.bytes, w.ticks, w.max_ticks), (1, 512, 4, 4));
    }

    #[test]
    fn the_order_of_the_tables_is_that_of_the_discriminants() {
        assert!(Op::ALL.iter().enumerate().all(|(i, op)| *op as usize == i));
        assert!(IoError::ALL.iter().enumerate().all(|(i, e)| *e as usize == i));
    }
}
