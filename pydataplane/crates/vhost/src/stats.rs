//! Counters of controllers and logical units.
//!
//! Each counter has one writer, the thread that does the work, so that counting is a plain add;
//! readers on other threads see a value that is at most a moment old.

use std::sync::atomic::{AtomicU64, Ordering};

use scsi::Kind;

use crate::handover::{ControllerTotals, LunTotals};

/// A counter with a single writing thread.
#[derive(Debug, Default)]
pub(crate) struct Counter(AtomicU64);

impl Counter {
    /// Adds `n`. Only ever called by the one writer: load and store, no locked instruction.
    #[inline(always)]
    pub(crate) fn add(&self, n: u64) {
        self.0.store(self.0.load(Ordering::Relaxed).wrapping_add(n), Ordering::Relaxed);
    }

    /// The value now.
    pub(crate) fn get(&self) -> u64 {
        self.0.load(Ordering::Relaxed)
    }
}

/// Counters of one controller on one thread.
#[derive(Debug, Default)]
pub(crate) struct ControllerCounters {
    pub(crate) requests: Counter,
    pub(crate) errors: Counter,
    pub(crate) malformed: Counter,
    pub(crate) interrupts: Counter,
    pub(crate) events_sent: Counter,
    pub(crate) events_missed: Counter,
}

/// What a controller did since it was created.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct ControllerStats {
    /// Requests taken from request queues.
    pub requests: u64,
    /// Requests that ended with a response other than OK or a status other than GOOD.
    pub errors: u64,
    /// Descriptor chains that broke the rules of virtio; each stopped its queue, unless it could
    /// be answered.
    pub malformed: u64,
    /// Interrupts given to the guest (writes to a call eventfd).
    pub interrupts: u64,
    /// Events put into the event queue.
    pub events_sent: u64,
    /// Events lost because the guest gave no buffers; it was told that some were.
    pub events_missed: u64,
}

impl ControllerStats {
    pub(crate) fn add(&mut self, counters: &ControllerCounters) {
        self.requests += counters.requests.get();
        self.errors += counters.errors.get();
        self.malformed += counters.malformed.get();
        self.interrupts += counters.interrupts.get();
        self.events_sent += counters.events_sent.get();
        self.events_missed += counters.events_missed.get();
    }
}

impl ControllerCounters {
    /// Begins with what another process counted; before anybody counts here.
    pub(crate) fn begin_with(&self, t: &ControllerTotals) {
        self.requests.add(t.requests);
        self.errors.add(t.errors);
        self.malformed.add(t.malformed);
        self.interrupts.add(t.interrupts);
        self.events_sent.add(t.events_sent);
        self.events_missed.add(t.events_missed);
    }

    /// Adds what was counted to `t`.
    pub(crate) fn add_to(&self, t: &mut ControllerTotals) {
        t.requests += self.requests.get();
        t.errors += self.errors.get();
        t.malformed += self.malformed.get();
        t.interrupts += self.interrupts.get();
        t.events_sent += self.events_sent.get();
        t.events_missed += self.events_missed.get();
    }
}

impl LunCounters {
    /// Begins with what another process counted; before anybody counts here.
    pub(crate) fn begin_with(&self, t: &LunTotals) {
        self.reads.add(t.reads);
        self.read_bytes.add(t.read_bytes);
        self.read_ticks.add(t.read_ticks);
        self.writes.add(t.writes);
        self.write_bytes.add(t.write_bytes);
        self.write_ticks.add(t.write_ticks);
        self.flushes.add(t.flushes);
        self.flush_ticks.add(t.flush_ticks);
        self.others.add(t.others);
        self.errors.add(t.errors);
    }

    /// Adds what was counted to `t`.
    pub(crate) fn add_to(&self, t: &mut LunTotals) {
        t.reads += self.reads.get();
        t.read_bytes += self.read_bytes.get();
        t.read_ticks += self.read_ticks.get();
        t.writes += self.writes.get();
        t.write_bytes += self.write_bytes.get();
        t.write_ticks += self.write_ticks.get();
        t.flushes += self.flushes.get();
        t.flush_ticks += self.flush_ticks.get();
        t.others += self.others.get();
        t.errors += self.errors.get();
    }
}

/// Counters of one logical unit on one thread.
#[derive(Debug, Default)]
pub(crate) struct LunCounters {
    pub(crate) reads: Counter,
    pub(crate) read_bytes: Counter,
    pub(crate) read_ticks: Counter,
    pub(crate) writes: Counter,
    pub(crate) write_bytes: Counter,
    pub(crate) write_ticks: Counter,
    pub(crate) flushes: Counter,
    pub(crate) flush_ticks: Counter,
    pub(crate) others: Counter,
    pub(crate) errors: Counter,
}

/// What the guest did with one logical unit since it was added (libvirt's block statistics).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct LunStats {
    /// READ commands that ended.
    pub reads: u64,
    /// Bytes that they moved.
    pub read_bytes: u64,
    /// Nanoseconds from ring to ring, summed over them.
    pub read_ns: u64,
    /// WRITE and WRITE SAME commands that ended.
    pub writes: u64,
    /// Bytes that they moved.
    pub write_bytes: u64,
    /// Nanoseconds from ring to ring, summed over them.
    pub write_ns: u64,
    /// SYNCHRONIZE CACHE commands that ended.
    pub flushes: u64,
    /// Nanoseconds from ring to ring, summed over them.
    pub flush_ns: u64,
    /// All other commands that ended.
    pub others: u64,
    /// Commands that ended with a status other than GOOD.
    pub errors: u64,
}

impl LunStats {
    pub(crate) fn add(&mut self, counters: &LunCounters) {
        self.reads += counters.reads.get();
        self.read_bytes += counters.read_bytes.get();
        self.read_ns += reactor::ticks::to_ns(counters.read_ticks.get());
        self.writes += counters.writes.get();
        self.write_bytes += counters.write_bytes.get();
        self.write_ns += reactor::ticks::to_ns(counters.write_ticks.get());
        self.flushes += counters.flushes.get();
        self.flush_ns += reactor::ticks::to_ns(counters.flush_ticks.get());
        self.others += counters.others.get();
        self.errors += counters.errors.get();
    }
}

impl LunCounters {
    /// Counts a command that ended; `timed` is how long it took, in ticks, and for how many it
    /// counts.
    #[inline]
    pub(crate) fn count(&self, kind: Kind, bytes: u32, timed: Option<(u64, u32)>, good: bool) {
        let ticks = timed.map_or(0, |(ticks, weight)| ticks * u64::from(weight));
        match kind {
            Kind::Read => {
                self.reads.add(1);
                self.read_bytes.add(u64::from(bytes));
                self.read_ticks.add(ticks);
            }
            Kind::Write => {
                self.writes.add(1);
                self.write_bytes.add(u64::from(bytes));
                self.write_ticks.add(ticks);
            }
            Kind::Flush => {
                self.flushes.add(1);
                self.flush_ticks.add(ticks);
            }
            Kind::Other => self.others.add(1),
        }
        if !good {
            self.errors.add(1);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn commands_are_counted_by_kind() {
        let counters = LunCounters::default();
        counters.count(Kind::of(0x28), 4096, Some((10, 1)), true);
        counters.count(Kind::of(0x88), 512, Some((5, 16)), false);
        counters.count(Kind::of(0x2a), 1024, Some((7, 1)), true);
        counters.count(Kind::of(0x35), 0, None, true);
        counters.count(Kind::of(0x12), 36, Some((1, 1)), true);
        let mut stats = LunStats::default();
        stats.add(&counters);
        let expected = LunStats {
            reads: 2,
            read_bytes: 4608,
            read_ns: reactor::ticks::to_ns(10 + 5 * 16),
            writes: 1,
            write_bytes: 1024,
            write_ns: reactor::ticks::to_ns(7),
            flushes: 1,
            flush_ns: 0,
            others: 1,
            errors: 1,
        };
        assert_eq!(stats, expected);
    }
}
