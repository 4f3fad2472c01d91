//! All orders in which reactors take, look, begin and end some requests of one unit, and in which a reset ends them.

use std::collections::HashSet;

use super::super::heads::Heads;
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
    /// One that is HEAD OF QUEUE has a ticket, and has later ones of its reactor wait.
    counts_heads: bool,
    /// It waits for a limit first.
    limits_heads: bool,
    /// There is a task management function, and whether all reactors mark what it ends before any ends it.
    reset: Option<bool>,
}

/// As the poller has it.
const AS_IT_IS: Setup<'_> = Setup {
    takes: &[],
    looks_first: true,
    asks_others: true,
    counts_heads: true,
    limits_heads: false,
    reset: None,
};

#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
struct Task {
    /// How many were taken before it, by all.
    nth: usize,
    attribute: u8,
    key: u64,
    /// Where it is counted, if it is HEAD OF QUEUE.
    group: u8,
    /// A task management function ends it.
    marked: bool,
}

/// A reactor with its part of the unit, as `DevicePoller` has it.
struct Reactor {
    place: Place,
    waiting: Vec<Task>,
    in_flight: Vec<Task>,
    heads: Heads,
    taken: usize,
    /// To be looked at, though nothing is told.
    again: bool,
    /// Nothing that waits begins.
    ending: bool,
}

struct World<'a> {
    setup: Setup<'a>,
    members: Vec<Arc<Member>>,
    reactors: Vec<Reactor>,
    /// Attributes of all that was taken, in that order, and what has begun and ended of it.
    taken: Vec<u8>,
    begun: HashSet<usize>,
    ended: HashSet<usize>,
    /// How many calls of reactors the task management function has made, and what it has ended.
    calls: usize,
    reset: HashSet<usize>,
    wrong: Option<String>,
}

#[derive(Clone, Copy, Debug)]
enum Step {
    Take,
    Look,
    Begin,
    End(usize),
    /// The task management function calls the next reactor.
    Call,
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
            heads: Heads::NONE,
            taken: 0,
            again: false,
            ending: false,
        };
        let reactors = (0..members.len()).map(reactor).collect();
        let (taken, begun, ended, reset) = Default::default();
        World { setup, members, reactors, taken, begun, ended, calls: 0, reset, wrong: None }
    }

    fn has_ordered(&self, n: usize) -> bool {
        self.reactors[n].in_flight.iter().any(|task| task.attribute == ORDERED)
    }

    fn may_begin(&self, n: usize) -> bool {
        let reactor = &self.reactors[n];
        let Some(first) = reactor.waiting.first().filter(|_| !reactor.ending) else {
            return false;
        };
        match first.attribute {
            HEAD_OF_QUEUE => true,
            ORDERED => {
                reactor.in_flight.is_empty()
                    && (!self.setup.asks_others || reactor.place.is_turn_of(first.key))
            }
            _ => {
                !self.has_ordered(n)
                    && reactor.heads.let_pass(first.nth as u64)
                    && reactor.place.is_open_to(first.key)
            }
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
        let calls = self.setup.reset.map_or(0, |first_marks| 1 + usize::from(first_marks));
        if self.calls < calls * self.reactors.len() {
            steps.push((self.calls % self.reactors.len(), Step::Call));
        }
        steps
    }

    fn take_step(&mut self, (n, step): (usize, Step)) {
        match step {
            Step::Look => self.look(n),
            Step::Begin => {
                let task = self.reactors[n].waiting.remove(0);
                self.leaves_list(n, &task);
                self.begin(n, task);
            }
            Step::End(at) => {
                let task = self.reactors[n].in_flight.remove(at);
                self.leaves(n, &task);
                self.has_ended(n, &task);
            }
            Step::Call => {
                self.call(n);
                self.calls += 1;
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
        let barred = ordered || reactor.ending || reactor.place.is_barred();
        let idle = reactor.waiting.is_empty() && reactor.heads.is_empty() && !barred;
        let is_head = attribute == HEAD_OF_QUEUE;
        let waits = if is_head { self.setup.limits_heads } else { attribute == ORDERED || !idle };
        let counts = !is_head || self.setup.counts_heads;
        let key = if counts && (is_head || waits) { reactor.place.key(attribute) } else { 0 };
        let mut task = Task { nth, attribute, key, group: 0, marked: false };
        if !waits {
            return self.begin(n, task);
        }
        reactor.place.waits(attribute);
        self.comes(n, &mut task);
        let reactor = &mut self.reactors[n];
        let heads = reactor.waiting.iter().filter(|task| task.attribute == HEAD_OF_QUEUE).count();
        reactor.waiting.insert(if is_head { heads } else { reactor.waiting.len() }, task);
        reactor.again = true;
    }

    /// As [`Unit::add_head`](super::super::units::Unit) and what goes with it.
    fn comes(&mut self, n: usize, task: &mut Task) {
        if task.attribute == HEAD_OF_QUEUE && self.setup.counts_heads {
            let reactor = &mut self.reactors[n];
            task.group = reactor.heads.add(task.nth as u64, task.key);
            reactor.place.set_changed();
        }
    }

    fn leaves(&mut self, n: usize, task: &Task) {
        if task.attribute == HEAD_OF_QUEUE && self.setup.counts_heads {
            self.reactors[n].heads.remove(task.group);
            self.reactors[n].place.set_changed();
        }
    }

    fn leaves_list(&mut self, n: usize, task: &Task) {
        self.reactors[n].place.begins(task.attribute);
        self.leaves(n, task);
    }

    fn has_ended(&mut self, n: usize, task: &Task) {
        self.ended.insert(task.nth);
        if task.marked {
            self.reset.insert(task.nth);
        }
        self.reactors[n].again = true;
    }

    /// As the controller's thread, once or twice.
    fn call(&mut self, n: usize) {
        let marks = self.calls < self.reactors.len();
        let reactor = &mut self.reactors[n];
        if marks {
            reactor
                .waiting
                .iter_mut()
                .chain(&mut reactor.in_flight)
                .for_each(|of| of.marked = true);
            reactor.ending = self.setup.reset == Some(true);
        }
        if !marks || !reactor.ending {
            reactor.ending = false;
            let (marked, kept) = reactor.waiting.drain(..).partition(|of| of.marked);
            reactor.waiting = kept;
            let marked: Vec<Task> = marked;
            for task in marked {
                self.leaves_list(n, &task);
                self.has_ended(n, &task);
            }
        }
    }

    fn look(&mut self, n: usize) {
        let ordered = self.has_ordered(n);
        self.members[n].take(&mut Targets::default());
        let Reactor { place, waiting, in_flight, heads, again, ending, .. } = &mut self.reactors[n];
        let first = match waiting.first() {
            None => First::Nothing,
            Some(of) if of.attribute == HEAD_OF_QUEUE => First::HeadOfQueue,
            Some(of) => First::Key(of.key),
        };
        let first_ordered = waiting.iter().find(|of| of.attribute == ORDERED).map(|of| of.key);
        let (in_flight, first_head) = (!in_flight.is_empty(), heads.first_ticket());
        let ending = *ending;
        place.look(&Here { in_flight, ordered, first, first_ordered, first_head, ending });
        // Whatever of others it waits for is told.
        *again = ending;
    }

    /// Nothing begins before what SAM-5 8.6 has before it.
    fn begin(&mut self, n: usize, mut task: Task) {
        let (begun, ended) = (&self.begun, &self.ended);
        let has_others_wait = |other: &usize| self.taken[*other] != SIMPLE;
        let others = || (0..self.taken.len()).filter(|other| *other != task.nth);
        let wrong = match task.attribute {
            HEAD_OF_QUEUE => None,
            ORDERED => others().find(|other| match *other < task.nth {
                true => !ended.contains(other),
                false => begun.contains(other) && self.taken[*other] != HEAD_OF_QUEUE,
            }),
            _ => others().filter(has_others_wait).find(|other| match *other < task.nth {
                true => !ended.contains(other),
                false => begun.contains(other) && self.taken[*other] == ORDERED,
            }),
        };
        if let Some(other) = wrong {
            self.wrong = Some(format!("{} begins, of {:?}, before {other}", task.nth, self.taken));
        }
        // One that is about to be ended itself, as that which it waited for was.
        let is_next = task.marked || (self.setup.reset.is_some() && self.calls <= n);
        let follows = |other: &usize| match task.attribute {
            HEAD_OF_QUEUE => false,
            ORDERED => *other < task.nth,
            _ => *other < task.nth && has_others_wait(other),
        };
        if task.marked || (is_next && self.reset.iter().any(follows)) {
            self.wrong =
                Some(format!("{} outlives, of {:?}: {:?}", task.nth, self.taken, self.reset));
        }
        self.begun.insert(task.nth);
        self.comes(n, &mut task);
        self.reactors[n].in_flight.push(task);
        self.reactors[n].again = true;
    }

    /// All that decides what can follow.
    fn state(&self) -> String {
        let of = |r: &Reactor| {
            let Place { waiting, changed, first_ordered, first, clear, heard, others, .. } =
                &r.place;
            let place = (waiting, changed, first_ordered, first, clear, heard, others);
            let lists = (&r.waiting, &r.in_flight, &r.heads);
            format!("{place:?}{lists:?}{}{}{}", r.taken, r.again, r.ending)
        };
        let reactors: Vec<_> = self.reactors.iter().map(of).collect();
        let told: Vec<_> = self.members.iter().map(|member| member.is_told()).collect();
        let mut ended: Vec<_> = self.ended.iter().collect();
        ended.sort_unstable();
        let mut reset: Vec<_> = self.reset.iter().collect();
        reset.sort_unstable();
        format!("{reactors:?}{told:?}{:?}{ended:?}{}{reset:?}", self.taken, self.calls)
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
const TRIED: [&[&[u8]]; 12] = [
    &[&[SIMPLE, SIMPLE], &[ORDERED]],
    &[&[ORDERED, SIMPLE], &[ORDERED, SIMPLE]],
    &[&[SIMPLE, ORDERED, SIMPLE], &[SIMPLE, ORDERED]],
    &[&[ORDERED, ORDERED], &[ORDERED, SIMPLE]],
    &[&[SIMPLE, HEAD_OF_QUEUE], &[ORDERED, SIMPLE]],
    &[&[ORDERED], &[ORDERED], &[ORDERED]],
    &[&[SIMPLE], &[ORDERED], &[ORDERED, SIMPLE]],
    &[&[HEAD_OF_QUEUE, SIMPLE], &[SIMPLE]],
    &[&[HEAD_OF_QUEUE, HEAD_OF_QUEUE, SIMPLE], &[SIMPLE, SIMPLE]],
    &[&[HEAD_OF_QUEUE, SIMPLE], &[ORDERED, HEAD_OF_QUEUE]],
    &[&[ORDERED, HEAD_OF_QUEUE], &[HEAD_OF_QUEUE, ORDERED]],
    &[&[HEAD_OF_QUEUE], &[SIMPLE, ORDERED], &[SIMPLE]],
];

/// Where a task management function comes between.
const ENDED: [&[&[u8]]; 5] = [
    &[&[SIMPLE, SIMPLE], &[ORDERED]],
    &[&[ORDERED], &[SIMPLE, ORDERED]],
    &[&[HEAD_OF_QUEUE], &[SIMPLE, ORDERED]],
    &[&[SIMPLE], &[ORDERED, SIMPLE]],
    &[&[SIMPLE], &[SIMPLE], &[ORDERED]],
];

#[test]
fn no_order_of_steps_breaks_the_order_of_a_task_set_or_has_all_wait() {
    for takes in TRIED {
        for limits_heads in [false, true] {
            let (states, wrong) = explore(Setup { takes, limits_heads, ..AS_IT_IS });
            assert_eq!(wrong, None, "{takes:?}");
            assert!(states > 30, "{states}");
        }
    }
}

#[test]
fn what_is_ended_with_that_which_it_waits_for_does_not_begin_before() {
    for takes in ENDED {
        let (states, wrong) = explore(Setup { takes, reset: Some(true), ..AS_IT_IS });
        assert_eq!(wrong, None, "{takes:?}");
        assert!(states > 50, "{states}");
    }
}

/// What the above would find.
#[test]
fn who_does_not_look_before_it_takes_or_does_not_ask_others_breaks_it() {
    let setup = Setup { takes: TRIED[0], looks_first: false, ..AS_IT_IS };
    assert!(explore(setup).1.is_some_and(|why| why.contains("begins")));
    let setup = Setup { takes: TRIED[0], asks_others: false, ..AS_IT_IS };
    assert!(explore(setup).1.is_some_and(|why| why.contains("begins")));
    let setup = Setup { takes: TRIED[7], counts_heads: false, ..AS_IT_IS };
    assert!(explore(setup).1.is_some_and(|why| why.contains("begins")));
    let setup = Setup { takes: ENDED[0], reset: Some(false), ..AS_IT_IS };
    assert!(explore(setup).1.is_some_and(|why| why.contains("outlives")));
}

/// Nothing is there.
const IDLE: Here = Here {
    in_flight: false,
    ordered: false,
    first: First::Nothing,
    first_ordered: None,
    first_head: NONE,
    ending: false,
};

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
    other.look(&IDLE);
    assert!(own.is_turn_of(ticket) && other.is_barred());
    let key = other.key(SIMPLE);
    assert!(!other.is_open_to(key));
    own.begins(ORDERED);
    own.look(&IDLE);
    assert!(members[1].is_told());
    other.look(&Here { first: First::Key(key), ..IDLE });
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
