//! Counters of controllers and logical units.
//!
//! Each counter has one writer, the thread that does the work, so that counting is a plain add;
//! readers on other threads see a value that is at most a moment old. What the threads counted is added
//! up on demand, and goes on in another process ([`crate::handover`]). What a logical unit did begins
//! anew with each process that the controller comes to belong to: no counter is touched, a sum is kept.

use std::sync::atomic::{AtomicU64, Ordering};

use schemars::JsonSchema;
use scsi::Kind;
use serde::{Deserialize, Serialize};

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

/// Defines the counters of one thread, and the sum of what all threads counted.
macro_rules! counters {
    (
        $(#[$of_counters:meta])* $counters:ident,
        $(#[$of_sum:meta])* $sum:ident { $($(#[$of_field:meta])* $field:ident,)* }
    ) => {
        $(#[$of_counters])*
        #[derive(Debug, Default)]
        pub(crate) struct $counters { $(pub(crate) $field: Counter,)* }

        $(#[$of_sum])*
        #[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
        #[serde(default)]
        pub struct $sum { $($(#[$of_field])* pub $field: u64,)* }

        impl $counters {
            /// Begins with what another process counted; before anybody counts here.
            pub(crate) fn begin_with(&self, sum: &$sum) {
                $(self.$field.add(sum.$field);)*
            }
        }

        impl $sum {
            /// What was counted after this was `earlier`.
            #[allow(dead_code, reason = "of what begins anew alone")]
            pub(crate) fn since(&self, earlier: &$sum) -> $sum {
                $sum { $($field: self.$field.wrapping_sub(earlier.$field),)* }
            }
        }

        impl<'a> FromIterator<&'a $counters> for $sum {
            fn from_iter<I: IntoIterator<Item = &'a $counters>>(all: I) -> Self {
                let mut sum = $sum::default();
                for counters in all {
                    $(sum.$field += counters.$field.get();)*
                }
                sum
            }
        }
    };
}

counters! {
    /// Counters of one controller on one thread.
    ControllerCounters,
    /// What a controller did since it was created.
    ControllerStats {
        /// Requests taken from request queues.
        requests,
        /// Requests that ended with a response other than OK or a status other than GOOD.
        errors,
        /// Descriptor chains that broke the rules of virtio; each stopped its queue, unless it could
        /// be answered.
        malformed,
        /// Interrupts given to the guest (writes to a call eventfd).
        interrupts,
        /// Events put into the event queue.
        events_sent,
        /// Events lost because the guest gave no buffers; it was told that some were.
        events_missed,
    }
}

counters! {
    /// Counters of one logical unit on one thread.
    LunCounters,
    /// What guests did with a logical unit; times in ticks of the host's clock.
    LunTotals {
        /// READ commands that ended.
        reads,
        /// Bytes that they moved.
        read_bytes,
        /// Ticks from ring to ring, summed over them.
        read_ticks,
        /// WRITE and WRITE SAME commands that ended.
        writes,
        /// Bytes that they moved.
        write_bytes,
        /// Ticks from ring to ring, summed over them.
        write_ticks,
        /// SYNCHRONIZE CACHE commands that ended.
        flushes,
        /// Ticks from ring to ring, summed over them.
        flush_ticks,
        /// All other commands that ended.
        others,
        /// Commands that ended with a status other than GOOD.
        errors,
        /// Times that virtio-blk requests waited as others had all of the bdev's queue.
        full_waits,
    }
}

/// What the guest did with one logical unit since its process came, or since the unit was added
/// (libvirt's block statistics).
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
    /// Times that virtio-blk requests waited as others had all of the bdev's queue.
    pub full_waits: u64,
}

impl From<LunTotals> for LunStats {
    fn from(totals: LunTotals) -> Self {
        LunStats {
            reads: totals.reads,
            read_bytes: totals.read_bytes,
            read_ns: reactor::ticks::to_ns(totals.read_ticks),
            writes: totals.writes,
            write_bytes: totals.write_bytes,
            write_ns: reactor::ticks::to_ns(totals.write_ticks),
            flushes: totals.flushes,
            flush_ns: reactor::ticks::to_ns(totals.flush_ticks),
            others: totals.others,
            errors: totals.errors,
            full_waits: totals.full_waits,
        }
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
        let stats = LunStats::from(LunTotals::from_iter([&counters]));
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
            full_waits: 0,
        };
        assert_eq!(stats, expected);
    }

    #[test]
    fn what_threads_and_another_process_counted_is_added_up() {
        let (a, b) = (ControllerCounters::default(), ControllerCounters::default());
        a.begin_with(&ControllerStats { requests: 5, events_missed: 1, ..Default::default() });
        a.requests.add(2);
        b.requests.add(3);
        b.errors.add(4);
        let sum: ControllerStats = [&a, &b].into_iter().collect();
        let expected =
            ControllerStats { requests: 10, errors: 4, events_missed: 1, ..Default::default() };
        assert_eq!(sum, expected);
    }
}
