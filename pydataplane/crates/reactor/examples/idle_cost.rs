//! What it costs that each poller has a turn when nothing happens, by number of pollers, and how long a
//! message to a spinning and to a sleeping reactor takes.
//!
//! `cargo run --release -p reactor --example idle_cost [CPU]`

use std::hint::black_box;
use std::sync::Arc;
use std::sync::atomic::{AtomicU16, Ordering::Acquire};
use std::thread;
use std::time::{Duration, Instant};

use reactor::{Idle, Poller, Reactors};

/// Looks at one word that another thread could change: an idle queue's index.
struct IdleQueue {
    index: Arc<AtomicU16>,
    seen: u16,
}

impl Poller for IdleQueue {
    fn name(&self) -> &str {
        "idle queue"
    }
    fn poll(&mut self) -> u32 {
        u32::from(black_box(self.index.load(Acquire)) != self.seen)
    }
}

fn main() -> std::io::Result<()> {
    let cpu = std::env::args().nth(1).and_then(|a| a.parse().ok());
    for pollers in [0, 1, 8, 64, 256] {
        let r = Reactors::start(&[cpu], Idle::Poll)?;
        let h = &r.handles()[0];
        h.call(move |cx| {
            for _ in 0..pollers {
                let index = Arc::new(AtomicU16::new(7));
                cx.add_poller(Box::new(IdleQueue { index, seen: 7 }));
            }
        });
        // A marker that tells how often all had their turn.
        let id = h.call(|cx| cx.add_poller(Box::new(IdleQueue { index: Arc::default(), seen: 0 })));
        let runs =
            || h.call(move |cx| cx.pollers().into_iter().find(|p| p.id == id).map(|p| p.runs));
        let mut best = f64::INFINITY;
        for _ in 0..5 {
            let (t, a) = (Instant::now(), runs());
            thread::sleep(Duration::from_millis(200));
            let (ns, b) = (t.elapsed().as_nanos() as f64, runs());
            best = best.min(ns / (b.unwrap_or(1) - a.unwrap_or(0)) as f64);
        }
        println!("{:3} pollers: {best:.1} ns until all had a turn", pollers + 1);
        r.stop();
    }
    for (label, idle) in [("spinning", Idle::Poll), ("sleeping", Idle::Adaptive { spin_us: 0 })] {
        let r = Reactors::start(&[cpu], idle)?;
        let h = &r.handles()[0];
        let mut best = Duration::MAX;
        for _ in 0..2000 {
            thread::sleep(Duration::from_micros(100));
            let t = Instant::now();
            h.call(|_| ());
            best = best.min(t.elapsed());
        }
        let cpu_ns = h.stats().busy_ns + h.stats().idle_ns;
        println!(
            "call to a {label} reactor: {best:?} at best, {} sleeps, {} ms awake",
            h.stats().sleeps,
            cpu_ns / 1_000_000
        );
        r.stop();
    }
    Ok(())
}
