//! Which reactor each request queue runs on, where one has more to do than it can.
//!
//! A queue begins on the reactor that its number and its controller's say. Guests are not alike, so one
//! reactor may have all that is to be done and others nothing. Once in a while whoever has the reactors
//! looks ([`crate::Controllers::balance`]): if one has hardly any time left, and another would have more
//! with one of its queues, that queue moves. One at a time, because what it needs is only known by how much
//! came through it, and none again soon, so that a load that changes its place does not send queues after it.

use std::collections::HashMap;
use std::time::{Duration, Instant};

use reactor::Stats;

/// The share of its time in which a reactor is busy from which on queues move away from it.
const FULL: f64 = 0.85;
/// By how much of a reactor's time the busier of both has to have less to do after a move.
const GAIN: f64 = 0.15;
/// How long a queue stays that has moved, or was to.
const STAYS: Duration = Duration::from_secs(5);
/// Shortest time that says how busy anybody is.
const LEAST: Duration = Duration::from_millis(100);

/// A queue, and what came through it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Load {
    pub(crate) ctrlr: String,
    pub(crate) queue: u16,
    /// Where it runs, in `reactors`.
    pub(crate) place: usize,
    /// Indexes of the reactors that it may run on.
    pub(crate) reactors: Vec<usize>,
    /// Requests, since the session began.
    pub(crate) requests: u64,
}

impl Load {
    fn key(&self) -> (String, u16) {
        (self.ctrlr.clone(), self.queue)
    }
}

/// A queue that is to move.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Move {
    pub(crate) ctrlr: String,
    pub(crate) queue: u16,
    /// To there, in the reactors of its controller.
    pub(crate) to: usize,
}

/// What was seen the last time.
#[derive(Debug, Default)]
pub struct Balancer {
    requests: HashMap<(String, u16), u64>,
    /// Busy and other nanoseconds of each reactor.
    spent: Vec<(u64, u64)>,
    at: Option<Instant>,
    moved: HashMap<(String, u16), Instant>,
}

impl Balancer {
    /// Which queue is to move at `now`, if one is, of all `loads`, of reactors that are so, in the order
    /// of their indexes.
    pub(crate) fn look(
        &mut self,
        now: Instant,
        reactors: &[Stats],
        loads: Vec<Load>,
    ) -> Option<Move> {
        if self.at.is_some_and(|at| now.duration_since(at) < LEAST) {
            return None;
        }
        self.at = Some(now);
        let spent = reactors.iter().map(|stats| (stats.busy_ns, stats.idle_ns + stats.sleep_ns));
        let spent: Vec<(u64, u64)> = spent.collect();
        let before = std::mem::replace(&mut self.spent, spent);
        let busy = before.iter().zip(&self.spent).map(|(before, now)| {
            let (busy, other) = (now.0.saturating_sub(before.0), now.1.saturating_sub(before.1));
            busy as f64 / (busy + other).max(1) as f64
        });
        let busy: Vec<f64> = busy.collect();
        self.moved.retain(|_, at| now.duration_since(*at) < STAYS);
        let before = std::mem::take(&mut self.requests);
        self.requests = loads.iter().map(|load| (load.key(), load.requests)).collect();
        let since = |mut load: Load| {
            // A queue that was not there has begun from 0, or with another session.
            let earlier = before.get(&load.key()).copied().unwrap_or(load.requests);
            load.requests = load.requests.saturating_sub(earlier);
            load
        };
        let loads: Vec<Load> = loads.into_iter().map(since).collect();
        let stays = |load: &Load| self.moved.contains_key(&load.key());
        let chosen = choose(&busy, &loads, stays)?;
        self.moved.insert((chosen.ctrlr.clone(), chosen.queue), now);
        Some(chosen)
    }
}

/// The move after which the busier one of two reactors has least to do, of those that are worth it.
/// `busy`: the share of its time of each reactor; `loads`: with the requests of that time.
fn choose(busy: &[f64], loads: &[Load], stays: impl Fn(&Load) -> bool) -> Option<Move> {
    let mut full: Vec<(usize, f64)> =
        busy.iter().copied().enumerate().filter(|(_, busy)| *busy >= FULL).collect();
    full.sort_by(|a, b| b.1.total_cmp(&a.1));
    full.into_iter().find_map(|(from, most)| choose_from(from, most, busy, loads, &stays))
}

/// As [`choose`], of the queues of one reactor, which is busy for so much of its time.
fn choose_from(
    from: usize,
    most: f64,
    busy: &[f64],
    loads: &[Load],
    stays: &impl Fn(&Load) -> bool,
) -> Option<Move> {
    let at = |load: &Load| load.reactors.get(load.place).copied();
    let there = || loads.iter().filter(|load| at(load) == Some(from));
    let all: u64 = there().map(|load| load.requests).sum();
    let mut best: Option<(f64, Move)> = None;
    for load in there().filter(|load| load.requests != 0 && !stays(load)) {
        let takes = most * load.requests as f64 / all as f64;
        for (to, reactor) in load.reactors.iter().enumerate() {
            let Some(other) = busy.get(*reactor).filter(|_| *reactor != from) else { continue };
            let after = (most - takes).max(other + takes);
            if after <= most - GAIN && best.as_ref().is_none_or(|(least, _)| after < *least) {
                best = Some((after, Move { ctrlr: load.ctrlr.clone(), queue: load.queue, to }));
            }
        }
    }
    best.map(|(_, chosen)| chosen)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn load(ctrlr: &str, queue: u16, place: usize, requests: u64) -> Load {
        Load { ctrlr: ctrlr.into(), queue, place, reactors: vec![0, 1, 2], requests }
    }

    fn moves(busy: &[f64], loads: &[Load]) -> Option<(String, u16, usize)> {
        choose(busy, loads, |_| false).map(|m| (m.ctrlr, m.queue, m.to))
    }

    #[test]
    fn a_queue_moves_from_a_reactor_without_time_to_the_one_with_most() {
        let loads = [load("a", 2, 0, 500), load("b", 2, 0, 500), load("c", 2, 1, 300)];
        assert_eq!(moves(&[1.0, 0.4, 0.0], &loads), Some(("a".into(), 2, 2)));
        assert_eq!(moves(&[0.8, 0.4, 0.0], &loads), None, "it has time");
        assert_eq!(moves(&[1.0, 0.9, 0.9], &loads), None, "nobody has");
    }

    #[test]
    fn what_is_all_that_a_reactor_does_would_only_take_that_along() {
        let loads = [load("a", 2, 0, 500), load("b", 2, 0, 1)];
        assert_eq!(moves(&[1.0, 0.1, 0.9], &loads), None);
        assert_eq!(moves(&[1.0, 0.1, 0.9], &[]), None);
        let even = [load("a", 2, 0, 500), load("a", 3, 0, 100), load("a", 4, 0, 400)];
        assert_eq!(moves(&[1.0, 0.0, 0.9], &even), Some(("a".into(), 2, 1)), "half of it");
        let uneven = [load("a", 2, 0, 800), load("a", 3, 0, 200)];
        assert_eq!(moves(&[1.0, 0.5, 0.9], &uneven), Some(("a".into(), 3, 1)), "what fits there");
    }

    #[test]
    fn what_counts_is_what_came_and_was_spent_since_the_last_look() {
        let began = Instant::now();
        let at = |s: u64| began + Duration::from_secs(s);
        let stats = |busy: [u64; 2], all: u64| {
            busy.map(|busy| Stats { busy_ns: busy, sleep_ns: all - busy, ..Stats::default() })
        };
        let two = |a, b, place| vec![load("a", 2, place, a), load("b", 2, 0, b)];
        let mut balancer = Balancer::default();
        assert_eq!(balancer.look(at(0), &stats([0, 0], 0), two(900, 0, 0)), None);
        // All of a second on the first one, for as much of each.
        let found = balancer.look(at(1), &stats([1000, 0], 1000), two(1400, 500, 0)).unwrap();
        assert_eq!((&*found.ctrlr, found.queue, found.to), ("a", 2, 1));
        assert_eq!(balancer.look(at(1), &stats([1000, 0], 1000), two(1400, 500, 0)), None);
        // It has not moved, as its I/O took long: not asked again so soon.
        let found = balancer.look(at(2), &stats([2000, 0], 2000), two(2400, 1500, 0)).unwrap();
        assert_eq!(&*found.ctrlr, "b");
        assert_eq!(balancer.look(at(3), &stats([3000, 0], 3000), two(3400, 2500, 0)), None);
        let found = balancer.look(at(14), &stats([14_000, 0], 14_000), two(9000, 8000, 0));
        assert!(found.is_some());
        // Where one moved, nobody has too much to do any more.
        assert_eq!(balancer.look(at(15), &stats([14_500, 500], 15_000), two(9500, 8500, 1)), None);
    }

    #[test]
    fn one_with_a_queue_alone_does_not_keep_others_from_being_relieved() {
        let loads = [load("a", 2, 0, 900), load("b", 2, 1, 400), load("c", 2, 1, 400)];
        assert_eq!(moves(&[1.0, 0.98, 0.0], &loads), Some(("b".into(), 2, 2)));
    }

    #[test]
    fn it_stays_on_the_reactors_of_its_controller_and_where_it_has_just_come() {
        let mut only = load("a", 2, 0, 500);
        only.reactors = vec![0, 2];
        let other = Load { reactors: vec![0], ..load("b", 2, 0, 500) };
        let loads = [only, other];
        assert_eq!(moves(&[1.0, 0.0, 0.2], &loads), Some(("a".into(), 2, 1)));
        assert_eq!(choose(&[1.0, 0.0, 0.2], &loads, |load| load.ctrlr == "a"), None);
    }
}
