//! Paths by which a subsystem did not answer when it was asked last: they come after the others, as one that is dead
//! keeps whoever asks waiting for seconds. They are asked again all the same by who is not told all by those, as a
//! controller comes back; how soon goes by how long they kept waiting. What this process has seen counts for all who ask.

use std::collections::BTreeMap;
use std::time::{Duration, Instant};

use parking_lot::Mutex;

use crate::address::Address;

/// Paths that are known of; then all are forgotten.
const MOST: usize = 1024;
/// How many times as long as it kept waiting a path is left alone by who has an answer of another.
const REST: u32 = 10;
/// The longest that it is.
const REST_MAX: Duration = Duration::from_secs(30);

/// Until when each is left alone.
static SILENT: Mutex<BTreeMap<(String, Address), Instant>> = Mutex::new(BTreeMap::new());

/// A path, as it is to be tried.
pub(crate) struct Known {
    pub address: Address,
    /// It did not answer just now: one asks it who has no answer of another.
    pub rests: bool,
}

/// A path to the subsystem of that name has been tried, which took that long.
pub(crate) fn note(subnqn: &str, address: &Address, answers: bool, took: Duration) {
    let path = (subnqn.to_owned(), *address);
    let mut silent = SILENT.lock();
    if answers {
        silent.remove(&path);
        return;
    }
    if silent.len() >= MOST {
        silent.clear();
    }
    silent.insert(path, Instant::now() + took.saturating_mul(REST).min(REST_MAX));
}

/// The paths in the order in which they are to be tried: first those that answer, then those that have rested longest.
pub(crate) fn last(subnqn: &str, paths: &[Address]) -> Vec<Known> {
    let silent = SILENT.lock();
    let until = |path: &Address| silent.get(&(subnqn.to_owned(), *path)).copied();
    let mut all: Vec<_> = paths.iter().map(|path| (*path, until(path))).collect();
    drop(silent);
    all.sort_by_key(|(_, until)| *until);
    let now = Instant::now();
    let known = |(address, until): (Address, Option<Instant>)| {
        let rests = until.is_some_and(|until| now < until);
        Known { address, rests }
    };
    all.into_iter().map(known).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    const NQN: &str = "nqn.2026-11.org.virtlun:silent";
    const LONG: Duration = Duration::from_secs(4);

    fn path(port: u16) -> Address {
        Address::parse("192.0.2.1", Some(&port.to_string()), None).unwrap()
    }

    #[test]
    fn what_did_not_answer_comes_last_until_it_does() {
        let paths = [path(1), path(2), path(3)];
        let order = || last(NQN, &paths).iter().map(|each| each.address).collect::<Vec<_>>();
        assert_eq!(order(), paths);
        note(NQN, &path(1), false, LONG);
        note(NQN, &path(2), false, LONG);
        note("nqn.2026-11.org.virtlun:other", &path(3), false, LONG);
        assert_eq!(order(), [path(3), path(1), path(2)]);
        assert!(last(NQN, &paths).iter().map(|each| each.rests).eq([false, true, true]));
        note(NQN, &path(2), true, LONG);
        assert_eq!(order(), [path(2), path(3), path(1)]);
        note(NQN, &path(1), true, LONG);
        assert_eq!(order(), paths);
    }

    #[test]
    fn it_is_left_alone_for_as_long_as_it_kept_waiting_some_times_over() {
        let nqn = "nqn.2026-11.org.virtlun:rests";
        let paths = [path(1), path(2), path(3)];
        let long = Duration::from_millis(100);
        note(nqn, &path(1), false, Duration::MAX);
        note(nqn, &path(2), false, long);
        let known = || {
            let all = last(nqn, &paths).into_iter();
            all.map(|each| (each.address, each.rests)).collect::<Vec<_>>()
        };
        assert_eq!(known(), [(path(3), false), (path(2), true), (path(1), true)]);
        std::thread::sleep(long * REST);
        assert_eq!(known(), [(path(3), false), (path(2), false), (path(1), true)]);
        let left = SILENT.lock()[&(nqn.to_owned(), path(1))] - Instant::now();
        assert!(left <= REST_MAX, "{left:?}");
    }
}
