//! What a measurement says.

use hdrhistogram::Histogram;
use serde::Serialize;

use super::c2c::RoundTrip;
use super::{Config, Pattern};
use crate::session::Kind;

/// The numbers of one run. Latencies are in nanoseconds.
#[derive(Clone, Debug, Serialize)]
#[allow(missing_docs)]
pub struct Report {
    pub kind: Kind,
    pub rw: Pattern,
    pub bs: u32,
    pub iodepth: u16,
    pub queues: usize,
    pub seconds: f64,
    pub ios: u64,
    pub errors: u64,
    /// Reads whose bytes were not the ones written (`verify`).
    pub miscompares: u64,
    pub iops: f64,
    pub mib_per_s: f64,
    pub mean_ns: f64,
    pub p50_ns: u64,
    pub p99_ns: u64,
    pub p999_ns: u64,
    pub max_ns: u64,
    /// Kicks written, per I/O.
    pub kicks_per_io: f64,
    /// What the guest's own loop takes for an I/O: the time of its passes over the queues in which something
    /// had ended, cache misses on what the target wrote included, by the I/Os.
    pub guest_busy_ns_per_io: f64,
    /// CPU time of the target's threads, per I/O. A target that spins uses all there is.
    pub target_cpu_ns_per_io: Option<f64>,
    /// CPU time of the target's threads, in CPUs.
    pub target_cpus: Option<f64>,
    /// Resident memory of the target without shared memory, and with it.
    pub target_rss_kib: Option<u64>,
    pub target_rss_shared_kib: Option<u64>,
    /// Cache-line round trip between the two cores, before and after.
    pub c2c_before_ns: Option<RoundTrip>,
    pub c2c_after_ns: Option<RoundTrip>,
}

/// What the loop counted while it was measured.
pub(crate) struct Counted {
    pub(crate) seconds: f64,
    pub(crate) ios: u64,
    pub(crate) errors: u64,
    pub(crate) miscompares: u64,
    pub(crate) kicks: u64,
    pub(crate) busy_ns: f64,
    pub(crate) cpu_ns: Option<u64>,
}

impl Report {
    pub(crate) fn new(
        config: &Config,
        kind: Kind,
        queues: usize,
        counted: &Counted,
        latency: &Histogram<u64>,
    ) -> Report {
        let ios = counted.ios as f64;
        let per_io = |n: f64| if counted.ios == 0 { 0.0 } else { n / ios };
        let rss = config.target_pid.and_then(super::process::rss_kib);
        let iops = ios / counted.seconds;
        Report {
            kind,
            rw: config.rw,
            bs: config.bs,
            iodepth: config.iodepth,
            queues,
            seconds: counted.seconds,
            ios: counted.ios,
            errors: counted.errors,
            miscompares: counted.miscompares,
            iops,
            mib_per_s: iops * f64::from(config.bs) / 1_048_576.0,
            mean_ns: latency.mean(),
            p50_ns: latency.value_at_quantile(0.5),
            p99_ns: latency.value_at_quantile(0.99),
            p999_ns: latency.value_at_quantile(0.999),
            max_ns: latency.max(),
            kicks_per_io: per_io(counted.kicks as f64),
            guest_busy_ns_per_io: per_io(counted.busy_ns),
            target_cpu_ns_per_io: counted.cpu_ns.map(|ns| per_io(ns as f64)),
            target_cpus: counted.cpu_ns.map(|ns| ns as f64 / counted.seconds / 1e9),
            target_rss_kib: rss.map(|r| r.0),
            target_rss_shared_kib: rss.map(|r| r.1),
            c2c_before_ns: None,
            c2c_after_ns: None,
        }
    }
}

impl std::fmt::Display for Report {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let us = |ns: f64| ns / 1000.0;
        writeln!(
            f,
            "{:?} {} B, {} in flight on each of {} queue(s), {:.2} s",
            self.rw, self.bs, self.iodepth, self.queues, self.seconds
        )?;
        writeln!(
            f,
            "  {:.0} IOPS, {:.1} MiB/s, {} I/Os, {} errors, {} miscompares",
            self.iops, self.mib_per_s, self.ios, self.errors, self.miscompares
        )?;
        writeln!(
            f,
            "  latency us: mean {:.2}  p50 {:.2}  p99 {:.2}  p99.9 {:.2}  max {:.1}",
            us(self.mean_ns),
            us(self.p50_ns as f64),
            us(self.p99_ns as f64),
            us(self.p999_ns as f64),
            us(self.max_ns as f64)
        )?;
        write!(f, "  kicks per I/O {:.4}", self.kicks_per_io)?;
        write!(f, ", the guest's loop {:.0} ns per I/O", self.guest_busy_ns_per_io)?;
        if let (Some(ns), Some(cpus)) = (self.target_cpu_ns_per_io, self.target_cpus) {
            write!(f, ", target CPU {ns:.0} ns per I/O ({cpus:.2} CPUs)")?;
        }
        if let Some(kib) = self.target_rss_kib {
            write!(f, ", target RSS {:.1} MiB", kib as f64 / 1024.0)?;
        }
        if let (Some(before), Some(after)) = (self.c2c_before_ns, self.c2c_after_ns) {
            write!(
                f,
                "\n  cache-line round trip {:.0} ns before, {:.0} ns after",
                before.median, after.median
            )?;
        }
        Ok(())
    }
}
