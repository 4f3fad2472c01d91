//! A cheap monotonic clock for statistics and idle decisions: the time stamp counter where the
//! processor keeps it constant (a few nanoseconds to read), else `CLOCK_MONOTONIC`.
//!
//! Not ordered against memory accesses: good to some tens of nanoseconds.

use std::sync::OnceLock;
use std::time::{Duration, Instant};

/// How long the counter is compared with the system clock, once in the life of the process.
const CALIBRATION: Duration = Duration::from_millis(10);

/// The counter's rate, in ticks a second. The first call takes [`CALIBRATION`].
pub fn hz() -> u64 {
    static HZ: OnceLock<u64> = OnceLock::new();
    *HZ.get_or_init(counter::calibrate)
}

/// Now, in ticks since an arbitrary point in the past, the same for all threads.
#[inline]
pub fn now() -> u64 {
    counter::now()
}

/// `ticks` in nanoseconds.
pub fn to_ns(ticks: u64) -> u64 {
    (u128::from(ticks) * 1_000_000_000 / u128::from(hz())) as u64
}

/// `us` microseconds in ticks.
pub fn from_us(us: u64) -> u64 {
    u64::try_from(u128::from(us) * u128::from(hz()) / 1_000_000).unwrap_or(u64::MAX)
}

#[cfg(target_arch = "x86_64")]
mod counter {
    use super::{CALIBRATION, Instant};

    #[inline]
    pub(super) fn now() -> u64 {
        // SAFETY: RDTSC is part of every x86-64 and has no preconditions in user mode under Linux.
        unsafe { core::arch::x86_64::_rdtsc() }
    }

    pub(super) fn calibrate() -> u64 {
        let (t0, c0) = (Instant::now(), now());
        std::thread::sleep(CALIBRATION);
        let (t1, c1) = (Instant::now(), now());
        let ns = (t1 - t0).as_nanos().max(1);
        ((u128::from(c1 - c0) * 1_000_000_000 / ns) as u64).max(1)
    }
}

#[cfg(not(target_arch = "x86_64"))]
mod counter {
    use super::{CALIBRATION, Instant};
    use std::sync::OnceLock;

    pub(super) fn now() -> u64 {
        static START: OnceLock<Instant> = OnceLock::new();
        START.get_or_init(Instant::now).elapsed().as_nanos() as u64
    }

    pub(super) fn calibrate() -> u64 {
        let _ = CALIBRATION;
        1_000_000_000
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
    }
}
