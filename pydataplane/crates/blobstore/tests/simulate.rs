//! The store under operations of every kind, by chance, on a device that fails in every way that
//! `schemas/blobstore.md` has in its fault model, beside a model of what it should hold.
//!
//! A seed that fails prints its reproduction, such as
//! `VIRTLUN_SIM_SEED=17 cargo test -p blobstore --test blobs simulate`.

use crate::simulator::run::{Base, Tried, simulate};
use std::io::Write;
use std::sync::Mutex;
use std::sync::atomic::{AtomicU64, Ordering};

/// Seeds of a run by day; `VIRTLUN_SIM_SEEDS` says another number.
const SEEDS: u64 = 250;
/// Operations of a seed.
const STEPS: u64 = 40;

fn number(name: &str) -> Option<u64> {
    std::env::var(name).ok().map(|text| text.parse().expect("a number"))
}

#[test]
fn seeds_lose_nothing_and_nothing_is_silently_wrong() {
    let seeds = match number("VIRTLUN_SIM_SEED") {
        Some(one) => one..one + 1,
        None => {
            let first = number("VIRTLUN_SIM_FIRST").unwrap_or(1);
            first..first + number("VIRTLUN_SIM_SEEDS").unwrap_or(SEEDS)
        }
    };
    let next = AtomicU64::new(seeds.start);
    let all = Mutex::new((Tried::default(), Vec::new()));
    let work = || {
        let bases = [Base::new(2), Base::new(1)];
        loop {
            let seed = next.fetch_add(1, Ordering::Relaxed);
            if seed >= seeds.end {
                break;
            }
            let outcome = std::panic::catch_unwind(|| simulate(seed, STEPS, &bases));
            let outcome = outcome.unwrap_or_else(|_| Err("a panic".into()));
            let mut all = all.lock().unwrap();
            match outcome {
                Ok(tried) => all.0.add(&tried),
                Err(why) => all.1.push((seed, why)),
            }
        }
    };
    std::thread::scope(|scope| {
        for _ in 0..std::thread::available_parallelism().map_or(1, |n| n.get()) {
            scope.spawn(work);
        }
    });
    let (tried, failed) = all.into_inner().unwrap();
    // Past the test's own output, which is shown only when it fails.
    _ = writeln!(std::io::stderr(), "simulated: {tried:?}");
    for (seed, why) in failed.iter().filter(|_| std::env::var("VIRTLUN_SIM_ALL").is_ok()) {
        println!("seed {seed}: {}", why.lines().last().unwrap_or_default());
    }
    if let Some((seed, why)) = failed.iter().min() {
        panic!(
            "{} seeds failed; seed {seed}: {why}\n\
             VIRTLUN_SIM_SEED={seed} cargo test -p blobstore --test blobs simulate",
            failed.len()
        );
    }
}
