//! What was counted, as numbers: a snapshot of [`super::Stats`].

use crate::{IoError, Op};

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

    pub(super) fn add(&mut self, other: &IoStat) {
        for (a, b) in self.ops.iter_mut().zip(&other.ops) {
            a.add(b);
        }
        for (a, b) in self.errors.iter_mut().zip(&other.errors) {
            *a += b;
        }
    }

    /// What was counted since `base`; maximum and minimum stay.
    pub(super) fn since(mut self, base: &IoStat) -> IoStat {
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
