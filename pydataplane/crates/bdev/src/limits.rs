//! How much I/O a device does a second at most, as its owner has it: bytes and operations, of reads, of
//! writes, and of both together.
//!
//! Each limit is a bucket that leaks at its rate, kept as the moment at which it is empty again, so that
//! nobody has to empty it and nothing is locked: what takes from it moves that moment. An I/O begins if no
//! bucket that it is of is full, and only then counts in all of them; so a long one is never kept for ever,
//! and several threads go beyond a limit by one I/O each at most. A bucket has room for a tenth of a second;
//! one with a burst rate for what that rate brings within the burst's length, and if that is longer than a
//! second a second bucket keeps the burst itself to its rate.
//!
//! Only reads and writes are limited, by the data that goes with them: who flushes waits for writes that
//! have counted, and unmapping moves no data.

use std::sync::atomic::Ordering::{AcqRel, Acquire, Relaxed, Release};
use std::sync::atomic::{AtomicBool, AtomicU64};

use parking_lot::Mutex;

use crate::Op;

/// Of how much of a second a bucket without bursts has room, as a divisor.
const SMOOTH: u64 = 10;
/// Highest rate, and longest burst together with its rate, of bytes or operations.
const MOST: u64 = 1_000_000_000_000_000;

/// A rate and its burst; 0: not limited.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Rate {
    /// A second, in the long run.
    pub average: u64,
    /// A second, in a burst; 0: there are none.
    pub burst: u64,
    /// How long a burst lasts at most, in seconds; 0 as 1.
    pub burst_s: u64,
}

/// What a device does at most.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct RateLimits {
    /// Bytes, in the order of [`Share`].
    pub bytes: [Rate; Share::COUNT],
    /// Operations, in the same order.
    pub operations: [Rate; Share::COUNT],
    /// An operation that is longer counts as many times as it is longer than so many bytes; 0: as one.
    pub operation_bytes: u64,
}

/// Which I/Os a limit is of.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Share {
    /// Reads and writes.
    Total,
    /// Reads.
    Read,
    /// Writes.
    Write,
}

impl Share {
    /// How many there are.
    pub const COUNT: usize = 3;
}

/// The limits that an operation is of, as places among [`RateLimits`]'; `None`: it is not limited.
fn shares(op: Op) -> Option<[usize; 2]> {
    match op {
        Op::Read => Some([Share::Total as usize, Share::Read as usize]),
        Op::Write => Some([Share::Total as usize, Share::Write as usize]),
        Op::Flush | Op::Unmap | Op::WriteZeroes => None,
    }
}

impl Rate {
    fn length(&self) -> u64 {
        self.burst_s.max(1)
    }

    fn check(&self, what: &str) -> Result<(), String> {
        match *self {
            Rate { average: 0, burst: 1.., .. } => {
                Err(format!("a burst of {what} needs a limit of {what}"))
            }
            Rate { burst: 0, burst_s: 1.., .. } => {
                Err(format!("the length of a burst of {what} needs a rate of the burst"))
            }
            Rate { average, burst: burst @ 1.., .. } if burst < average => Err(format!(
                "a burst of {what} is slower than the limit: {burst} and not {average}"
            )),
            Rate { average, burst, .. } => {
                match average.max(burst).checked_mul(self.length()).is_some_and(|most| most <= MOST)
                {
                    true => Ok(()),
                    false => Err(format!("a limit of {what}, with its burst, is above {MOST}")),
                }
            }
        }
    }
}

impl RateLimits {
    /// Whether anything is limited.
    pub fn is_limited(&self) -> bool {
        self.bytes.iter().chain(&self.operations).any(|rate| rate.average != 0)
    }

    /// Checks that the limits agree with each other, by the rules of QEMU's `throttling` options.
    ///
    /// # Errors
    /// A clause that says which do not.
    pub fn check(&self) -> Result<(), String> {
        for (rates, unit) in [(&self.bytes, "bytes"), (&self.operations, "operations")] {
            let [total, read, write] = rates;
            if total.average != 0 && (read.average != 0 || write.average != 0) {
                return Err(format!(
                    "{unit} in total and {unit} of reads or writes cannot be limited together"
                ));
            }
            if total.burst != 0 && (read.burst != 0 || write.burst != 0) {
                return Err(format!(
                    "bursts of {unit} in total and of reads or writes cannot be limited together"
                ));
            }
            total.check(&format!("{unit} in total"))?;
            read.check(&format!("{unit} of reads"))?;
            write.check(&format!("{unit} of writes"))?;
        }
        if self.operation_bytes != 0 && self.operations.iter().all(|rate| rate.average == 0) {
            return Err("the size of an operation needs a limit of operations".to_owned());
        }
        Ok(())
    }
}

/// A bucket.
#[derive(Debug, Default)]
struct Bucket {
    /// Bits of how many ticks one unit takes to leak, an `f64`; 0: there is no bucket.
    ticks_each: AtomicU64,
    /// Of how many ticks it has room.
    room: AtomicU64,
    /// When it is empty, in ticks.
    empty_at: AtomicU64,
}

impl Bucket {
    /// Leaks `rate` units a second and has room for `room`; empty.
    fn set(&self, rate: u64, room: u64, hz: u64) {
        let each = if rate == 0 { 0.0 } else { hz as f64 / rate as f64 };
        self.room.store((each * room as f64) as u64, Relaxed);
        self.ticks_each.store(each.to_bits(), Release);
        self.empty_at.store(0, Release);
    }

    /// When it is not full any more, in ticks; not later than `now`: it is not.
    #[inline]
    fn free_at(&self) -> u64 {
        match self.ticks_each.load(Relaxed) {
            0 => 0,
            _ => self.empty_at.load(Relaxed).saturating_sub(self.room.load(Relaxed)),
        }
    }

    fn take(&self, units: f64, now: u64) {
        let each = self.ticks_each.load(Acquire);
        let takes = (f64::from_bits(each) * units) as u64;
        if takes != 0 {
            let later = |empty_at: u64| Some(empty_at.max(now).saturating_add(takes));
            _ = self.empty_at.fetch_update(AcqRel, Acquire, later);
            if self.ticks_each.load(Acquire) != each {
                // By the rate before, of a bucket that was emptied.
                self.empty_at.store(0, Release);
            }
        }
    }
}

/// A limit: its rate, and that of its bursts.
#[derive(Debug, Default)]
struct Limit {
    average: Bucket,
    burst: Bucket,
}

impl Limit {
    fn set(&self, rate: Rate, hz: u64) {
        let Rate { average, burst, .. } = rate;
        let room = if burst == 0 { average / SMOOTH } else { burst * rate.length() };
        self.average.set(average, room, hz);
        let limited = if rate.length() > 1 { burst } else { 0 };
        self.burst.set(limited, limited / SMOOTH, hz);
    }

    #[inline]
    fn free_at(&self) -> u64 {
        self.average.free_at().max(self.burst.free_at())
    }

    fn take(&self, units: f64, now: u64) {
        self.average.take(units, now);
        self.burst.take(units, now);
    }
}

/// The limits of a device, for all threads that do I/O on it.
#[derive(Debug, Default)]
pub struct Limits {
    /// Anything is limited.
    on: AtomicBool,
    bytes: [Limit; Share::COUNT],
    operations: [Limit; Share::COUNT],
    operation_bytes: AtomicU64,
    set: Mutex<RateLimits>,
}

impl Limits {
    /// Whether anything is limited.
    #[inline(always)]
    pub fn is_on(&self) -> bool {
        self.on.load(Relaxed)
    }

    /// What is limited.
    pub fn get(&self) -> RateLimits {
        *self.set.lock()
    }

    /// Limits that from now on, in place of what was limited; all buckets are empty.
    ///
    /// # Errors
    /// See [`RateLimits::check`]; nothing changed.
    pub fn set(&self, to: RateLimits) -> Result<(), String> {
        to.check()?;
        let mut set = self.set.lock();
        if *set == to {
            return Ok(());
        }
        let hz = reactor::ticks::hz();
        for n in 0..Share::COUNT {
            self.bytes[n].set(to.bytes[n], hz);
            self.operations[n].set(to.operations[n], hz);
        }
        self.operation_bytes.store(to.operation_bytes, Relaxed);
        self.on.store(to.is_limited(), Relaxed);
        *set = to;
        Ok(())
    }

    /// Counts an I/O of `bytes` bytes that is about to begin at `now`, in ticks. Never blocks.
    ///
    /// # Errors
    /// It is not to begin, and did not count: when to ask again, in ticks.
    pub fn admit(&self, op: Op, bytes: u64, now: u64) -> Result<(), u64> {
        let Some(of) = shares(op) else { return Ok(()) };
        let free_at = self.free_at(op);
        if free_at > now {
            return Err(free_at);
        }
        self.take(of, bytes, now);
        Ok(())
    }

    /// When an I/O may begin that is asked for then, in ticks; none counts.
    pub fn free_at(&self, op: Op) -> u64 {
        let limits = |n: usize| [&self.bytes[n], &self.operations[n]];
        let of = shares(op).into_iter().flatten().flat_map(limits);
        of.map(Limit::free_at).max().unwrap_or(0)
    }

    /// Counts an I/O that begins whatever the limits say.
    pub fn count(&self, op: Op, bytes: u64, now: u64) {
        if let Some(of) = shares(op) {
            self.take(of, bytes, now);
        }
    }

    fn take(&self, of: [usize; 2], bytes: u64, now: u64) {
        let operations = match self.operation_bytes.load(Relaxed) {
            0 => 1.0,
            each => (bytes as f64 / each as f64).max(1.0),
        };
        for n in of {
            self.bytes[n].take(bytes as f64, now);
            self.operations[n].take(operations, now);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const KIB: u64 = 1 << 10;

    fn rate(average: u64) -> Rate {
        Rate { average, ..Rate::default() }
    }

    fn limits(to: RateLimits) -> Limits {
        let limits = Limits::default();
        limits.set(to).unwrap();
        limits
    }

    fn seconds(s: f64) -> u64 {
        (s * reactor::ticks::hz() as f64) as u64
    }

    /// How many I/Os of `bytes` begin from `from` on within `s` seconds, if as many are asked for as may be.
    fn begun(limits: &Limits, op: Op, bytes: u64, from: u64, s: f64) -> u64 {
        let (mut now, end, mut begun) = (from, from + seconds(s), 0);
        while now < end {
            match limits.admit(op, bytes, now) {
                Ok(()) => begun += 1,
                Err(at) => {
                    assert!(at > now);
                    now = at;
                }
            }
        }
        begun
    }

    #[test]
    fn what_is_not_limited_always_begins() {
        let none = Limits::default();
        assert!(!none.is_on());
        let bytes = [rate(0), rate(4096), rate(0)];
        let reads = limits(RateLimits { bytes, ..RateLimits::default() });
        assert!(reads.is_on());
        for _ in 0..1000 {
            none.admit(Op::Read, 1 << 20, 0).unwrap();
            reads.admit(Op::Write, 1 << 20, 0).unwrap();
            reads.admit(Op::Flush, 0, 0).unwrap();
            reads.admit(Op::Unmap, 1 << 30, 0).unwrap();
        }
        assert!((0..10).any(|_| reads.admit(Op::Read, 4096, 0).is_err()));
    }

    #[test]
    fn in_the_long_run_as_much_begins_as_the_rate_says() {
        for (op, share) in [(Op::Read, 0), (Op::Write, 0), (Op::Read, 1), (Op::Write, 2)] {
            let mut to = RateLimits::default();
            to.operations[share] = rate(500);
            let ops = begun(&limits(to), op, 4096, seconds(5.0), 10.0);
            assert!((5000..=5055).contains(&ops), "{ops}");
            let mut to = RateLimits::default();
            to.bytes[share] = rate(1 << 20);
            let bytes = begun(&limits(to), op, 64 * KIB, seconds(5.0), 10.0) * 64 * KIB;
            assert!((10 << 20..=(10 << 20) + (1 << 20) / 10 + 65536).contains(&bytes), "{bytes}");
        }
    }

    #[test]
    fn reads_and_writes_share_a_total() {
        let operations = [rate(100), rate(0), rate(0)];
        let total = limits(RateLimits { operations, ..RateLimits::default() });
        let at = seconds(7.0);
        assert_eq!(begun(&total, Op::Read, 512, at, 1e-6), 11);
        let until = total.free_at(Op::Write);
        assert_eq!(total.admit(Op::Write, 512, at), Err(until));
        assert_eq!(total.free_at(Op::Flush), 0);
        // Whoever only asks takes nothing.
        assert_eq!(total.free_at(Op::Read), until);
    }

    #[test]
    fn a_burst_is_as_fast_and_as_long_as_it_is_said_to_be() {
        let burst = Rate { average: 100, burst: 1000, burst_s: 5 };
        let operations = [burst, rate(0), rate(0)];
        let bursting = limits(RateLimits { operations, ..RateLimits::default() });
        let at = seconds(3.0);
        let second = begun(&bursting, Op::Write, 512, at, 1.0);
        assert!((1000..=1105).contains(&second), "{second}");
        // 5,000 and what leaks meanwhile, and then the average.
        let minute = second + begun(&bursting, Op::Write, 512, at + seconds(1.0), 59.0);
        assert!((10_900..=11_150).contains(&minute), "{minute}");
        // At once, within a second.
        let short = Rate { burst_s: 0, ..burst };
        let operations = [short, rate(0), rate(0)];
        let at_once = limits(RateLimits { operations, ..RateLimits::default() });
        assert_eq!(begun(&at_once, Op::Write, 512, at, 1e-6), 1001);
    }

    #[test]
    fn a_long_operation_counts_as_several_and_still_begins() {
        let operations = [rate(0), rate(10), rate(0)];
        let to = RateLimits { operations, operation_bytes: 4096, ..RateLimits::default() };
        let long = limits(to);
        let at = seconds(1.0);
        long.admit(Op::Read, 1 << 20, at).unwrap();
        let again = long.admit(Op::Read, 512, at).unwrap_err();
        // 256 operations of 10 a second, of which one is room.
        let waited = (again - at) as f64 / seconds(1.0) as f64;
        assert!((25.4..25.6).contains(&waited), "{waited}");
    }

    #[test]
    fn what_begins_in_any_case_counts_all_the_same() {
        let operations = [rate(10), rate(0), rate(0)];
        let slow = limits(RateLimits { operations, ..RateLimits::default() });
        let at = seconds(1.0);
        (0..20).for_each(|_| slow.count(Op::Read, 512, at));
        slow.count(Op::Flush, 0, at);
        let waited =
            (slow.admit(Op::Write, 512, at).unwrap_err() - at) as f64 / seconds(1.0) as f64;
        assert!((1.89..1.91).contains(&waited), "{waited}");
    }

    #[test]
    fn other_limits_begin_anew_and_the_same_change_nothing() {
        let mut to = RateLimits::default();
        to.bytes[0] = rate(1);
        let slow = limits(to);
        let at = seconds(1.0);
        slow.admit(Op::Read, 4096, at).unwrap();
        slow.set(to).unwrap();
        assert!(slow.admit(Op::Read, 4096, at).is_err());
        slow.set(RateLimits::default()).unwrap();
        assert!(!slow.is_on() && slow.admit(Op::Read, 4096, at).is_ok());
        assert_eq!(slow.get(), RateLimits::default());
    }

    #[test]
    fn limits_that_contradict_each_other_are_refused_in_a_clause() {
        let with = |change: fn(&mut RateLimits)| {
            let mut to = RateLimits::default();
            change(&mut to);
            let limits = Limits::default();
            let refused = limits.set(to).unwrap_err();
            assert!(!limits.is_on() && limits.get() == RateLimits::default());
            refused
        };
        let both = with(|to| (to.bytes[0], to.bytes[2]) = (rate(1), rate(1)));
        assert_eq!(both, "bytes in total and bytes of reads or writes cannot be limited together");
        let alone = with(|to| to.operations[1].burst = 5);
        assert_eq!(alone, "a burst of operations of reads needs a limit of operations of reads");
        let slower = with(|to| to.bytes[0] = Rate { average: 5, burst: 4, burst_s: 0 });
        assert_eq!(slower, "a burst of bytes in total is slower than the limit: 4 and not 5");
        let length = with(|to| to.bytes[0] = Rate { average: 5, burst: 0, burst_s: 2 });
        assert!(length.contains("needs a rate of the burst"), "{length}");
        let most = with(|to| to.bytes[0] = Rate { average: 5, burst: MOST, burst_s: u64::MAX });
        assert!(most.contains("is above"), "{most}");
        let size = with(|to| to.operation_bytes = 4096);
        assert_eq!(size, "the size of an operation needs a limit of operations");
    }

    #[test]
    fn threads_together_have_what_one_would_have() {
        let operations = [rate(1_000_000), rate(0), rate(0)];
        let shared = limits(RateLimits { operations, ..RateLimits::default() });
        let at = seconds(1.0);
        let begun = std::thread::scope(|scope| {
            let threads: Vec<_> =
                (0..4).map(|_| scope.spawn(|| begun(&shared, Op::Read, 512, at, 1e-9))).collect();
            threads.into_iter().map(|thread| thread.join().unwrap()).sum::<u64>()
        });
        // Ticks are whole.
        assert!((100_000..=100_200).contains(&begun), "{begun}");
    }
}
