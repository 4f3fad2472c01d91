//! A clock that costs a few nanoseconds.

use std::time::Instant;

/// Ticks of the processor's time stamp counter (nanoseconds where there is none).
#[inline(always)]
pub fn ticks() -> u64 {
    #[cfg(target_arch = "x86_64")]
    // SAFETY: RDTSC is always there on x86_64 and has no effect.
    unsafe {
        std::arch::x86_64::_rdtsc()
    }
    #[cfg(not(target_arch = "x86_64"))]
    {
        use std::sync::OnceLock;
        static START: OnceLock<Instant> = OnceLock::new();
        START.get_or_init(Instant::now).elapsed().as_nanos() as u64
    }
}

/// The rate of [`ticks`], measured against the monotonic clock.
#[derive(Clone, Copy, Debug)]
pub struct Clock {
    per_ns: f64,
}

impl Clock {
    /// Measures the rate for 20 ms.
    pub fn calibrate() -> Clock {
        let (start, from) = (Instant::now(), ticks());
        while start.elapsed().as_millis() < 20 {
            std::hint::spin_loop();
        }
        Clock { per_ns: (ticks() - from) as f64 / start.elapsed().as_nanos() as f64 }
    }

    /// Ticks of `seconds`.
    pub fn ticks_of(&self, seconds: f64) -> u64 {
        (seconds * 1e9 * self.per_ns) as u64
    }

    /// Nanoseconds of `ticks`.
    pub fn ns_of(&self, ticks: u64) -> f64 {
        ticks as f64 / self.per_ns
    }
}
