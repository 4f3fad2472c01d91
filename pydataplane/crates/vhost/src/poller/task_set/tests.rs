//! All orders in which reactors take, look, begin and end some requests of one unit.

use std::collections::HashSet;

use super::*;
use crate::defs::task_attribute::{HEAD_OF_QUEUE, ORDERED};

const SIMPLE: u8 = 0;

const TARGET: u8 = 200;

/// What is tried.
#[derive(Clone, Copy)]
struct Setup<'a> {
    /// The attributes of the requests that each reactor takes.
    takes: &'a [&'a [u8]],
    /// What was told is looked at before something is taken.
    looks_first: bool,
    /// An ORDERED request waits for what others show.
    asks_others: bool,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
struct Task {
    /// How many were taken before it, by all.
    nth: usize,
    attribute: u8,
    key: u64,
}

/// A reactor with its part of the unit, as `DevicePoller` has it.
struct Reactor {
    place: Place,
    waiting: Vec<Task>,
    in_flight: Vec<Task>,
    taken: usize,
    /// To be looked at, though nothing is told.
    again: bool,
}

struct World<'a> {
    setup: Setup<'a>,
    members: Vec<Arc<Member>>,
    reactors: Vec<Reactor>,
    /// Attributes of all that was taken, in that order, and what has begun and ended of it.
    taken: Vec<u8>,
    begun: HashSet<usize>,
    ended: HashSet<usize>,
    wrong: Option<String>,
}

#[derive(Clone, Copy, Debug)]
enum Step {
    Take,
    Look,
    Begin,
    End(usize),
}

impl<'a> World<'a> {
    fn new(setup: Setup<'a>) -> Self {
        let members: Vec<_> = setup.takes.iter().map(|_| Member::new(None)).collect();
        let set = TaskSet::new(TARGET, &members);
        members.iter().for_each(|member| member.set_serves(true));
        let reactor = |n| Reactor {
            place: Place::new(Arc::clone(&set), n),
            waiting: Vec::new(),
            in_flight: Vec::new(),
            taken: 0,
            again: false,
        };
        let reactors = (0..members.len()).map(reactor).collect();
        let (taken, begun, ended) = Default::default();
        World { setup, members, reactors, taken, begun, ended, wrong: None }
    }

    fn has_ordered(&self, n: usize) -> bool {
        self.reactors[n].in_flight.iter().any(|task| task.attribute == ORDERED)
    }

    fn may_begin(&self, n: usize) -> bool {
        let reactor = &self.reactors[n];
        let Some(first) = reactor.waiting.first() else { return false };
        match first.attribute {
            HEAD_OF_QUEUE => true,
            ORDERED => {
                reactor.in_flight.is_empty()
                    && (!self.setup.asks_others || reactor.place.is_turn_of(first.key))
            }
            _ => !self.has_ordered(n) && reactor.place.is_open_to(first.key),
        }
    }

    fn steps(&self) -> Vec<(usize, Step)> {
        let mut steps = Vec::new();
        for (n, reactor) in self.reactors.iter().enumerate() {
            if reactor.taken < self.setup.takes[n].len() {
                steps.push((n, Step::Take));
            }
            if self.members[n].is_told() || reactor.again {
                steps.push((n, Step::Look));
            }
            if self.may_begin(n) {
                steps.push((n, Step::Begin));
            }
            steps.extend((0..reactor.in_flight.len()).map(|at| (n, Step::End(at))));
        }
        steps
    }

    fn take_step(&mut self, (n, step): (usize, Step)) {
        match step {
            Step::Look => self.look(n),
            Step::Begin => {
                let task = self.reactors[n].waiting.remove(0);
                self.reactors[n].place.begins(task.attribute);
                self.begin(n, task);
            }
            Step::End(at) => {
                let reactor = &mut self.reactors[n];
                self.ended.insert(reactor.in_flight.remove(at).nth);
                reactor.again = true;
            }
            Step::Take => {
                if self.setup.looks_first && self.members[n].is_told() {
                    self.look(n);
                }
                self.take(n);
            }
        }
    }

    fn take(&mut self, n: usize) {
        let ordered = self.has_ordered(n);
        let nth = self.taken.len();
        let reactor = &mut self.reactors[n];
        let attribute = self.setup.takes[n][reactor.taken];
        reactor.taken += 1;
        self.taken.push(attribute);
        let idle = reactor.waiting.is_empty() && !ordered && !reactor.place.is_barred();
        if attribute == HEAD_OF_QUEUE || (attribute == SIMPLE && idle) {
            return self.begin(n, Task { nth, attribute, key: 0 });
        }
        let key = reactor.place.key(attribute);
        reactor.place.waits(attribute);
        reactor.waiting.push(Task { nth, attribute, key });
        reactor.again = true;
    }

    fn look(&mut self, n: usize) {
        let ordered = self.has_ordered(n);
        self.members[n].take(&mut Targets::default());
        let Reactor { place, waiting, in_flight, again, .. } = &mut self.reactors[n];
        let first = match waiting.first() {
            None => First::Nothing,
            Some(of) if of.attribute == HEAD_OF_QUEUE => First::HeadOfQueue,
            Some(of) => First::Key(of.key),
        };
        let ticket = waiting.iter().find(|of| of.attribute == ORDERED).map(|of| of.key);
        place.look((!in_flight.is_empty(), ordered), first, ticket);
        // Whatever of others it waits for is told.
        *again = false;
    }

    /// Nothing begins before what SAM-5 8.6 has before it.
    fn begin(&mut self, n: usize, task: Task) {
        let (begun, ended) = (&self.begun, &self.ended);
        let is_ordered = |other: &usize| self.taken[*other] == ORDERED;
        let others = || (0..self.taken.len()).filter(|other| *other != task.nth);
        let wrong = match task.attribute {
            HEAD_OF_QUEUE => None,
            ORDERED => others().find(|other| match *other < task.nth {
                true => !ended.contains(other),
                false => begun.contains(other) && self.taken[*other] != HEAD_OF_QUEUE,
            }),
            _ => others().filter(is_ordered).find(|other| match *other < task.nth {
                true => !ended.contains(other),
                false => begun.contains(other),
            }),
        };
        if let Some(other) = wrong {
            self.wrong = Some(format!("{} begins, of {:?}, before {other}", task.nth, self.taken));
        }
        self.begun.insert(task.nth);
        self.reactors[n].in_flight.push(task);
        self.reactors[n].again = true;
    }

    /// All that decides what can follow.
    fn state(&self) -> String {
        let of = |r: &Reactor| {
            let Place { waiting, changed, first, clear, heard, others, .. } = &r.place;
            let place = (waiting, changed, first, clear, heard, others);
            format!("{place:?}{:?}{:?}{}{}", r.waiting, r.in_flight, r.taken, r.again)
        };
        let reactors: Vec<_> = self.reactors.iter().map(of).collect();
        let told: Vec<_> = self.members.iter().map(|member| member.is_told()).collect();
        let mut ended: Vec<_> = self.ended.iter().collect();
        ended.sort_unstable();
        format!("{reactors:?}{told:?}{:?}{ended:?}", self.taken)
    }
}

/// How many states there are, and what is wrong: something began too early, or nobody takes a step any more though
/// something waits.
fn explore(setup: Setup<'_>) -> (usize, Option<String>) {
    let mut known = HashSet::new();
    let mut path: Vec<(usize, usize)> = Vec::new();
    loop {
        let mut world = World::new(setup);
        let mut at = 0;
        loop {
            if world.wrong.is_some() {
                return (known.len(), world.wrong);
            }
            let steps = world.steps();
            if at >= path.len() {
                let all: usize = setup.takes.iter().map(|takes| takes.len()).sum();
                if steps.is_empty() && world.ended.len() < all {
                    return (known.len(), Some(format!("stands still: {}", world.state())));
                }
                if steps.is_empty() || !known.insert(world.state()) {
                    break;
                }
                path.push((0, steps.len()));
            }
            world.take_step(steps[path[at].0]);
            at += 1;
        }
        while path.last().is_some_and(|(taken, of)| taken + 1 == *of) {
            path.pop();
        }
        match path.last_mut() {
            Some((taken, _)) => *taken += 1,
            None => return (known.len(), None),
        }
    }
}

/// Attributes of what two or three reactors take.
const TRIED: [&[&[u8]]; 7] = [
    &[&[SIMPLE, SIMPLE], &[ORDERED]],
    &[&[ORDERED, SIMPLE], &[ORDERED, SIMPLE]],
    &[&[SIMPLE, ORDERED, SIMPLE], &[SIMPLE, ORDERED]],
    &[&[ORDERED, ORDERED], &[ORDERED, SIMPLE]],
    &[&[SIMPLE, HEAD_OF_QUEUE], &[ORDERED, SIMPLE]],
    &[&[ORDERED], &[ORDERED], &[ORDERED]],
    &[&[SIMPLE], &[ORDERED], &[ORDERED, SIMPLE]],
];

#[test]
fn no_order_of_steps_breaks_the_order_of_a_task_set_or_has_all_wait() {
    for takes in TRIED {
        let setup = Setup { takes, looks_first: true, asks_others: true };
        let (states, wrong) = explore(setup);
        assert_eq!(wrong, None, "{takes:?}");
        assert!(states > 50, "{states}");
    }
}

/// What the above would find.
#[test]
fn who_does_not_look_before_it_takes_or_does_not_ask_others_breaks_it() {
    let setup = Setup { takes: TRIED[0], looks_first: false, asks_others: true };
    assert!(explore(setup).1.is_some_and(|why| why.contains("begins")));
    let setup = Setup { takes: TRIED[0], looks_first: true, asks_others: false };
    assert!(explore(setup).1.is_some_and(|why| why.contains("begins")));
}

#[test]
fn one_that_has_no_queues_is_not_waited_for_and_looks_before_it_has_one() {
    let members = [Member::new(None), Member::new(None)];
    let set = TaskSet::new(TARGET, &members);
    let [mut own, mut other] = [0, 1].map(|n| Place::new(Arc::clone(&set), n));
    members[0].set_serves(true);
    let ticket = own.key(ORDERED);
    own.waits(ORDERED);
    assert!(own.is_turn_of(ticket));
    assert!(!members[1].is_told());
    members[1].set_serves(true);
    assert!(!own.is_turn_of(ticket), "it can have taken something");
    other.look((false, false), First::Nothing, None);
    assert!(own.is_turn_of(ticket) && other.is_barred());
    let key = other.key(SIMPLE);
    assert!(!other.is_open_to(key));
    own.begins(ORDERED);
    own.look((false, false), First::Nothing, None);
    assert!(members[1].is_told());
    other.look((false, false), First::Key(key), None);
    assert!(other.is_open_to(key) && !other.is_barred());
}

#[test]
fn targets_are_told_each_by_itself_and_taken_once() {
    let member = Member::new(None);
    for target in [0, 63, 64, 254] {
        member.tell(target);
    }
    let mut targets = Targets::default();
    assert!(member.is_told() && member.take(&mut targets) && !member.is_told());
    assert!(!member.take(&mut targets));
    let (mut found, mut from) = (Vec::new(), 0);
    while let Some(target) = targets.next(from) {
        found.push(target);
        from = usize::from(target) + 1;
    }
    assert_eq!(found, [0, 63, 64, 254]);
    found.iter().for_each(|target| targets.remove(*target));
    assert!(targets.is_empty() && !targets.has(63));
}
