//! A cheap monotonic clock for statistics and idle decisions: the time stamp counter where the
//! processor keeps it constant (a few nanoseconds to read), else, and under Miri, `CLOCK_MONOTONIC`.
//!
//! Not ordered against memory accesses: good to some tens of nanoseconds.

use std::sync::OnceLock;
#[cfg(all(target_arch = "x86_64", not(miri)))]
use std::time::{Duration, Instant};

#[cfg(all(target_arch = "x86_64", not(miri)))]
/// How long the counter is compared with the system clock, once in the life of the process.
const CALIBRATION: Duration = Duration::from_millis(10);

/// The counter's rate, in ticks a second. The first call takes 10 ms.
pub fn hz() -> u64 {
    static HZ: OnceLock<u64> = OnceLock::new();
    *HZ.get_or_init(counter::calibrate)
}

pub use counter::now;

/// `ticks` in nanoseconds.
pub fn to_ns(ticks: u64) -> u64 {
    (u128::from(ticks) * 1_000_000_000 / u128::from(hz())) as u64
}

/// `us` microseconds in ticks.
pub fn from_us(us: u64) -> u64 {
    u64::try_from(u128::from(us) * u128::from(hz()) / 1_000_000).unwrap_or(u64::MAX)
}

/// How often the clocks are read at either end of it.
#[cfg(all(target_arch = "x86_64", not(miri)))]
const READINGS: usize = 16;

#[cfg(all(target_arch = "x86_64", not(miri)))]
mod counter {
    use std::arch::x86_64::{__cpuid, _rdtsc};
    use std::sync::atomic::{AtomicBool, Ordering::Relaxed};

    use super::{CALIBRATION, Instant, READINGS, system};

    /// The counter does not run at one rate: the system clock is used. Set by the calibration,
    /// which comes before the first reactor.
    static UNSTABLE: AtomicBool = AtomicBool::new(false);

    /// Now, in ticks since an arbitrary point in the past, the same for all threads.
    #[inline]
    pub fn now() -> u64 {
        if UNSTABLE.load(Relaxed) {
            return system::now();
        }
        // SAFETY: RDTSC is part of every x86-64 and has no preconditions in user mode under Linux.
        unsafe { _rdtsc() }
    }

    pub(super) fn calibrate() -> u64 {
        if !is_invariant() {
            UNSTABLE.store(true, Relaxed);
            return system::HZ;
        }
        let (c0, t0) = both();
        std::thread::sleep(CALIBRATION);
        let (c1, t1) = both();
        let ns = (t1 - t0).as_nanos().max(1);
        ((u128::from(c1 - c0) * 1_000_000_000 / ns) as u64).max(1)
    }

    /// Both clocks at one moment. A thread that loses its CPU between them, which on a busy host takes a
    /// noticeable part of the calibration, would have all times wrong for the life of the process.
    fn both() -> (u64, Instant) {
        tightest(std::array::from_fn(|_| (now(), Instant::now(), now())))
    }

    /// Of readings of the system clock, each between two of the counter, the one that took the least; with the
    /// counter's middle.
    pub(super) fn tightest<T: Copy>(readings: [(u64, T, u64); READINGS]) -> (u64, T) {
        let (before, at, after) = readings
            .into_iter()
            .min_by_key(|(before, _, after)| after.saturating_sub(*before))
            .expect("there are some");
        (before + after.saturating_sub(before) / 2, at)
    }

    /// The processor promises one rate in all power states (CPUID 80000007h, EDX bit 8).
    fn is_invariant() -> bool {
        __cpuid(0x8000_0000).eax >= 0x8000_0007 && __cpuid(0x8000_0007).edx & (1 << 8) != 0
    }
}

#[cfg(not(all(target_arch = "x86_64", not(miri))))]
mod counter {
    pub use super::system::now;

    pub(super) fn calibrate() -> u64 {
        super::system::HZ
    }
}

/// `CLOCK_MONOTONIC` in nanoseconds.
mod system {
    use rustix::time::{ClockId, clock_gettime};

    pub(super) const HZ: u64 = 1_000_000_000;

    /// Now, in nanoseconds since an arbitrary point in the past, the same for all threads.
    pub fn now() -> u64 {
        let t = clock_gettime(ClockId::Monotonic);
        t.tv_sec as u64 * HZ + t.tv_nsec as u64
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn conversions_agree_with_the_system_clock_within_a_percent() {
        let hz = hz();
        assert!(hz >= 1_000_000);
        assert_eq!(to_ns(hz), 1_000_000_000);
        assert_eq!(from_us(1_000_000), hz);
        assert_eq!(from_us(u64::MAX), u64::MAX);
        let (a, b) = (now(), now());
        assert!(b >= a);
        let (a, b) = (system::now(), system::now());
        assert!(b >= a && a > 0);
    }
    #[cfg(all(target_arch = "x86_64", not(miri)))]
    #[test]
    fn who_loses_the_processor_between_the_clocks_is_not_believed() {
        let mut readings = [(0, 'a', 1_000_000); READINGS];
        readings[5] = (100, 'b', 140);
        readings[9] = (200, 'c', 100_200);
        assert_eq!(counter::tightest(readings), (120, 'b'));
    }
}
