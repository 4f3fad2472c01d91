//! How long calls of a guest are held back, so that one of them tells of more than one request.

use std::sync::atomic::{AtomicU64, Ordering};

/// When calls are held back, each of a queue's.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Coalescing {
    /// As long as an eighth of what the guest waits for takes to end, while much of it does. A guest that has
    /// few requests in flight, or a slow disk, is called for each at once.
    #[default]
    Adaptive,
    /// From a rate on, for longer the higher it is.
    Fixed {
        /// What a call is held back for at twice the threshold, in microseconds; it grows with the rate:
        /// `delay_base_us * (rate - threshold) / threshold`. 0: none is.
        delay_base_us: u32,
        /// Requests a second from which on calls are held back; more than 0.
        iops_threshold: u32,
    },
}

/// Requests a second of a queue from which on calls count (SPDK's default for its own kind).
pub const IOPS_THRESHOLD: u32 = 60_000;

/// A [`Coalescing`] that all threads of a controller see; 0 is the adaptive one.
#[derive(Debug, Default)]
pub(crate) struct SharedCoalescing(AtomicU64);

impl SharedCoalescing {
    /// From the next request that ends on.
    pub(crate) fn set(&self, to: Coalescing) {
        let both = match to {
            Coalescing::Adaptive => 0,
            Coalescing::Fixed { delay_base_us, iops_threshold } => {
                u64::from(delay_base_us) << 32 | u64::from(iops_threshold.max(1))
            }
        };
        self.0.store(both, Ordering::Relaxed);
    }

    #[inline(always)]
    pub(crate) fn get(&self) -> Coalescing {
        match self.0.load(Ordering::Relaxed) {
            0 => Coalescing::Adaptive,
            both => Coalescing::Fixed {
                delay_base_us: (both >> 32) as u32,
                iops_threshold: both as u32,
            },
        }
    }
}
