//! The round trip of one cache line between two cores.

use std::hint::spin_loop;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::time::Instant;

use serde::Serialize;

use super::place::{pin, unpin};
use crate::error::Error;

/// Round trips of one sample.
const TRIPS: u32 = 200;
/// Samples.
const SAMPLES: usize = 200;

/// Nanoseconds of a round trip, over many samples of 200 trips.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct RoundTrip {
    /// The least.
    pub min: f64,
    /// The middle.
    pub median: f64,
    /// Nine of ten are below.
    pub p90: f64,
}

#[repr(align(128))]
struct Line(AtomicU32);

/// Measures between CPUs `a` (the calling thread, moved there meanwhile) and `b`.
pub fn measure(a: usize, b: usize) -> Result<RoundTrip, Error> {
    if a == b {
        return Err(Error::Usage(format!("a round trip needs two CPUs, not {a} twice")));
    }
    let line = Arc::new(Line(AtomicU32::new(0)));
    let stop = Arc::new(AtomicBool::new(false));
    let (ready, wait) = std::sync::mpsc::channel();
    let echo = {
        let (line, stop) = (line.clone(), stop.clone());
        std::thread::spawn(move || {
            let pinned = pin(b).map(drop);
            let failed = pinned.is_err();
            let _ = ready.send(pinned);
            let mut expect = 1;
            while !failed && !stop.load(Ordering::Relaxed) {
                if line.0.load(Ordering::Acquire) == expect {
                    line.0.store(expect + 1, Ordering::Release);
                    expect += 2;
                } else {
                    spin_loop();
                }
            }
        })
    };
    let started = wait.recv().map_err(|_| Error::Usage("the echo thread died".into()))?;
    let before = started.and_then(|()| pin(a));
    let mut samples = Vec::with_capacity(SAMPLES);
    if before.is_ok() {
        let mut turn = 0;
        for _ in 0..SAMPLES {
            let start = Instant::now();
            for _ in 0..TRIPS {
                line.0.store(turn + 1, Ordering::Release);
                turn += 2;
                while line.0.load(Ordering::Acquire) != turn {
                    spin_loop();
                }
            }
            samples.push(start.elapsed().as_nanos() as f64 / f64::from(TRIPS));
        }
    }
    stop.store(true, Ordering::Relaxed);
    let _ = echo.join();
    unpin(&before?);
    samples.sort_by(f64::total_cmp);
    let at = |share: usize| (samples[(SAMPLES - 1) * share / 10] * 10.0).round() / 10.0;
    Ok(RoundTrip { min: at(0), median: at(5), p90: at(9) })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_round_trip_takes_time_and_needs_two_cpus() {
        assert!(measure(0, 0).is_err());
        assert!(measure(0, 100_000).is_err());
        let cpus: Vec<usize> = {
            let set = rustix::thread::sched_getaffinity(None).expect("affinity");
            (0..rustix::thread::CpuSet::MAX_CPU).filter(|c| set.is_set(*c)).collect()
        };
        if let [a, b, ..] = cpus[..] {
            let trip = measure(a, b).expect("two CPUs");
            assert!(trip.min > 0.0 && trip.min <= trip.median && trip.median <= trip.p90);
        }
    }
}
