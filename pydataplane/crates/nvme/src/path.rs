//! A path: an association with a controller, its end, and the next one.
//!
//! [`Path::step`] goes from `Up` to `Ending`, where the kernel lets go of what is in flight; to `Fencing`, where the
//! controller may still carry it out; to `Down`, where a thread connects anew. A path that is detached is used for what
//! is in flight until that is over, and then goes to `ShuttingDown` before it ends.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::mpsc::{Receiver, TryRecvError, channel};
use std::thread;
use std::time::{Duration, Instant};

use crate::address::Address;
use crate::admin::{Admin, Heard};
use crate::ana::{AnaState, Groups};
use crate::command::property;
use crate::connect::{Association, establish, expires};
use crate::disk::PathInfo;
use crate::identify::{Controller, NAMESPACES_MAX, Namespace};
use crate::queue::{End, Queue};
use crate::worker::Context;

/// How long a controller may take to be shut down.
const SHUT_DOWN_WITHIN: Duration = Duration::from_secs(1);
/// Between two looks at how connections end, and whether a controller is shut down.
const END_POLL: Duration = Duration::from_millis(10);
/// Namespaces of which it is known at a time that it was logged why they are not used.
const REFUSED_MAX: usize = 1024;
/// Between two looks whether I/O waits for too long.
pub(crate) const LATE_POLL: Duration = Duration::from_millis(250);

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum State {
    Up,
    /// Nothing is in flight; until then the controller may take to be shut down.
    ShuttingDown(Instant),
    /// The kernel has to let go of what is in flight.
    Ending,
    /// Until then the controller may tell that it is through, which it does by a reset.
    Draining(Instant),
    /// Until then it may still carry out what it has.
    Fencing(Instant),
    Down,
}

pub(crate) struct Path {
    /// Its number among those of the controller.
    pub number: u8,
    pub address: Address,
    state: State,
    queues: Vec<Queue>,
    admin: Option<Admin>,
    next_queue: usize,
    id: u16,
    connections: u64,
    /// In which a controller that hears nothing ends the association, and all that it carries out.
    expires: Duration,
    /// How long it may take to tell that it is through with all commands; `None`: it does not.
    drains_within: Option<Duration>,
    /// By namespace of the controller: the group that it is in; `None`: it is not there.
    namespaces: Vec<Option<u32>>,
    /// By namespace: it was deleted, as the controller has told since; its I/O goes there all the same, and says so.
    absent: Vec<bool>,
    groups: Option<Groups>,
    /// By number: why namespaces are not used here, as it was logged.
    refused: BTreeMap<u32, String>,
    /// What the controller said of itself, as of the last time that there was a connection.
    controller: Option<Controller>,
    /// By namespace: I/O went there last.
    pub current: Vec<bool>,
    begun: Instant,
    /// What its queues had is collected; of that, something may still be carried out.
    collected: bool,
    unresolved: bool,
    /// As that, and it was given up, so that nobody waits for it.
    doubtful: bool,
    /// When it was asked for its status.
    asked: Option<Instant>,
    /// When it was looked whether a command has no answer for too long.
    looked: Instant,
    connecting: Option<Receiver<Result<Association, String>>>,
    /// No attempt to connect before that.
    next: Instant,
    /// Why there is no connection; it was logged.
    problem: Option<String>,
    /// It is to go.
    pub leaving: bool,
}

impl Path {
    pub(crate) fn new(number: u8, address: Address, now: Instant) -> Path {
        Path {
            number,
            address,
            state: State::Down,
            queues: Vec::new(),
            admin: None,
            next_queue: 0,
            id: 0,
            connections: 0,
            expires: Duration::ZERO,
            drains_within: None,
            namespaces: vec![None; NAMESPACES_MAX],
            absent: vec![false; NAMESPACES_MAX],
            groups: None,
            refused: BTreeMap::new(),
            controller: None,
            current: vec![false; NAMESPACES_MAX],
            begun: now,
            collected: true,
            unresolved: false,
            doubtful: false,
            asked: None,
            looked: now,
            connecting: None,
            next: now,
            problem: None,
            leaving: false,
        }
    }

    pub(crate) fn is_up(&self) -> bool {
        self.state == State::Up
    }

    pub(crate) fn is_down(&self) -> bool {
        self.state == State::Down
    }

    /// Whether something that was given up may still be carried out here.
    pub(crate) fn is_doubtful(&self) -> bool {
        self.doubtful && !self.is_up() && !self.is_down()
    }

    pub(crate) fn doubt(&mut self) {
        self.doubtful = true;
    }

    /// How a namespace can be used here; `None`: it is not there.
    pub(crate) fn access(&self, unit: usize) -> Option<AnaState> {
        let group = self.namespaces[unit].filter(|_| self.is_up())?;
        Some(self.groups.as_ref().map_or(AnaState::Optimized, |groups| groups.of(group)))
    }

    /// A namespace cannot be reached here, until the controller tells anew.
    pub(crate) fn lose(&mut self, unit: usize) {
        if let (Some(group), Some(groups)) = (self.namespaces[unit], &mut self.groups) {
            groups.lose(group);
        }
        if let Some(admin) = &mut self.admin {
            admin.want_groups();
        }
    }

    pub(crate) fn info(&self) -> PathInfo {
        PathInfo {
            address: self.address,
            cntlid: self.id,
            connected: self.is_up(),
            connections: self.connections,
            problem: self.problem.clone(),
            access: (0..self.namespaces.len())
                .map(|unit| self.access(unit).filter(|_| !self.absent[unit]))
                .collect(),
            current: self.current.clone(),
        }
    }

    /// A queue that takes so many commands; `None`: all are full.
    pub(crate) fn queue_for(&mut self, commands: usize) -> Option<&mut Queue> {
        let count = self.queues.len();
        let at = (0..count)
            .map(|n| (self.next_queue + n) % count)
            .find(|at| self.queues[*at].talk.left() >= commands)?;
        self.next_queue = (at + 1) % count;
        Some(&mut self.queues[at])
    }

    /// Takes a controller into use.
    ///
    /// # Errors
    /// A clause: it is not that of before.
    pub(crate) fn join(&mut self, made: Association, with: &mut Context) -> Result<(), String> {
        with.shared.usable(&made)?;
        let failed = |e| format!("no io_uring: {e}");
        let mut queues = Vec::with_capacity(made.queues.len());
        for link in made.queues {
            queues.push(Queue::new(link, &with.io, true).map_err(failed)?);
        }
        let of = &made.controller;
        let kept = made.keep_alive;
        self.expires = expires(kept, of);
        self.drains_within = made.names.resets_when_through().then_some(kept);
        let admin = Admin::new(made.admin, &with.io, with.now, kept, of, made.names.serial)
            .map_err(failed)?;
        (self.queues, self.admin) = (queues, Some(admin));
        self.controller = Some(made.controller);
        self.namespaces.fill(None);
        self.absent.fill(false);
        (self.groups, self.id) = (made.groups, made.id);
        (self.state, self.begun, self.asked) = (State::Up, with.now, None);
        (self.collected, self.unresolved, self.doubtful) = (false, false, false);
        self.connections += 1;
        if self.problem.take().is_some() {
            tracing::info!(controller = with.shared.name(), "{} answers again", self.address);
        }
        made.namespaces.iter().for_each(|each| self.take_over(each, with));
        with.changed = true;
        with.shared.set_given_up(false);
        if !with.others_up {
            with.came_back(&self.address);
        }
        Ok(())
    }

    /// Takes over what a namespace is now; one that is no bdev yet becomes one.
    fn take_over(&mut self, found: &Namespace, with: &Context) {
        let Some(of) = &self.controller else { return };
        match with.shared.accept(found, of) {
            Ok(unit) => {
                (self.namespaces[unit], self.absent[unit]) = (Some(found.group), false);
                self.refused.remove(&found.nsid);
                if self.groups.as_ref().is_some_and(|groups| !groups.has(found.group))
                    && let Some(admin) = &mut self.admin
                {
                    admin.want_groups();
                }
                with.resize(unit, found.geometry.num_blocks);
            }
            // Its size is that of another namespace.
            Err(why) => self.refuse(found.nsid, why, with),
        }
    }

    /// A namespace is not used here, which is logged once.
    fn refuse(&mut self, nsid: u32, why: String, with: &Context) {
        if let Some(unit) = with.shared.units.position(nsid) {
            self.namespaces[unit] = None;
        }
        if self.refused.get(&nsid) == Some(&why) {
            return;
        }
        let (controller, path) = (with.shared.name(), self.address);
        tracing::error!(controller, %path, "a namespace is not used: {why}");
        if self.refused.len() >= REFUSED_MAX {
            self.refused.clear();
        }
        self.refused.insert(nsid, why);
    }

    /// The association is of no more use.
    pub(crate) fn leave(&mut self, why: &str, with: &mut Context) {
        if !self.is_up() {
            return;
        }
        if !self.leaving {
            let name = with.shared.name();
            tracing::warn!(controller = name, "the connection to {} is lost: {why}", self.address);
            self.problem = Some(format!("the connection is lost: {why}"));
        }
        self.end(why, with);
    }

    /// Ends all connections. The controller is not disabled before: one that says that it is may still carry out what
    /// it had (Linux's target does), and its keep-alive timer, by which it would end that, would not run any more.
    fn end(&mut self, why: &str, with: &mut Context) {
        with.changed = true;
        self.queues.iter_mut().for_each(|queue| queue.leave(why));
        if let Some(admin) = &mut self.admin {
            admin.queue.leave(why);
        }
        self.state = State::Ending;
    }

    /// Is used no more, once what is in flight is over.
    pub(crate) fn retire(&mut self, with: &mut Context) {
        self.leaving = true;
        with.changed = true;
    }

    /// Whether nothing is in flight on its queues for I/O.
    fn is_quiet(&self) -> bool {
        self.queues.iter().all(|queue| queue.talk.in_flight() == 0)
    }

    /// Shuts the controller down, as nothing is in flight.
    fn shut_down(&mut self, with: &mut Context) {
        if let Some(admin) = &mut self.admin {
            admin.configure(property::SHUTDOWN);
            self.state = State::ShuttingDown(with.now + SHUT_DOWN_WITHIN);
        }
    }

    /// Hands the kernel what it can have.
    pub(crate) fn pump(&mut self) {
        self.queues.iter_mut().for_each(Queue::pump);
        if let Some(admin) = &mut self.admin {
            admin.queue.pump();
        }
    }

    /// Takes what has come; whether anything has.
    pub(crate) fn poll(&mut self, with: &mut Context) -> bool {
        let mut any = false;
        let mut lost = None;
        let mut elsewhere = None;
        for queue in &mut self.queues {
            any |= queue.poll();
            while let Some(ended) = queue.talk.next_ended() {
                let latch = &with.shared.latch;
                let at = ended.tag as u16;
                elsewhere = with.requests.answered(at, &ended, with.now, latch).or(elsewhere);
            }
            if lost.is_none() {
                lost = queue.broken().map(str::to_owned);
            }
        }
        if let Some(unit) = elsewhere {
            self.lose(usize::from(unit));
            with.changed = true;
        }
        if let Some(admin) = &mut self.admin {
            any |= admin.queue.poll();
        }
        if let Err(why) = self.hear(with) {
            lost.get_or_insert(why);
        }
        if let Some(why) = lost {
            self.leave(&why, with);
        }
        any
    }

    /// What the admin queue has heard.
    fn hear(&mut self, with: &mut Context) -> Result<(), String> {
        while let Some(admin) = &mut self.admin
            && let Some(heard) = admin.next(&with.shared, with.now)?
        {
            with.changed = true;
            match heard {
                Heard::Groups(groups) => self.groups = Some(groups),
                Heard::Namespace(found) => self.take_over(&found, with),
                Heard::Absent(unit) => self.absent[unit] = true,
                Heard::Unusable(nsid, why) => self.refuse(nsid, why, with),
                // Asked for its status until it is shut down.
                Heard::Configured(true) => self.asked = Some(with.now - END_POLL),
                Heard::Configured(false) => return Err("it cannot be shut down".to_owned()),
                Heard::Status(status) if status & 1 == 0 || status >> 2 & 3 == 2 => {
                    self.asked = None;
                    if let State::ShuttingDown(_) = self.state {
                        self.state = State::ShuttingDown(with.now);
                    }
                }
                Heard::Status(_) => self.asked = Some(with.now),
            }
        }
        match self.admin.as_ref().and_then(|admin| admin.queue.broken()) {
            Some(why) => Err(why.to_owned()),
            None => Ok(()),
        }
    }

    /// Does what is due; when there is more to do.
    pub(crate) fn step(&mut self, with: &mut Context) -> Option<Instant> {
        match self.state {
            State::Up if self.leaving && self.is_quiet() => {
                self.shut_down(with);
                Some(with.now + END_POLL)
            }
            State::Up => {
                let (now, shared) = (with.now, Arc::clone(&with.shared));
                let due = self.admin.as_mut().map(|admin| admin.step(&shared, now));
                let mut is_late = false;
                if now - self.looked >= LATE_POLL {
                    self.looked = now;
                    let oldest = with.requests.oldest_sent(self.number).zip(shared.options.timeout);
                    is_late = oldest.is_some_and(|(sent, most)| now - sent >= most);
                }
                match due {
                    Some(Err(why)) => {
                        self.leave(&why, with);
                        Some(now)
                    }
                    _ if is_late => {
                        self.leave("it has not answered a command for too long", with);
                        Some(now)
                    }
                    Some(Ok(due)) => Some(due),
                    None => None,
                }
            }
            State::ShuttingDown(until) => {
                let is_lost =
                    self.admin.as_ref().is_none_or(|admin| admin.queue.broken().is_some());
                if is_lost || until <= with.now {
                    self.end("it is shut down", with);
                    return Some(with.now);
                }
                if self.asked.is_some_and(|at| with.now - at >= END_POLL)
                    && let Some(admin) = &mut self.admin
                {
                    self.asked = None;
                    admin.ask_status();
                }
                Some(with.now + END_POLL)
            }
            State::Ending => self.ended(with),
            State::Draining(until) => self.drain(until, with),
            State::Fencing(until) if with.now < until => Some(until),
            State::Fencing(_) => self.gone(with),
            State::Down => self.connect(with),
        }
    }

    /// Collects what the queues had, once the kernel has let go of all of them.
    fn collect(&mut self, with: &mut Context) {
        if self.collected || !self.queues.iter().all(Queue::is_idle) {
            return;
        }
        self.collected = true;
        for queue in &mut self.queues {
            let (unresolved, doubtful) = (&mut self.unresolved, &mut self.doubtful);
            let (requests, number) = (&mut with.requests, self.number);
            queue.talk.take_unanswered(|tag, handed| {
                let (changes, lost) = requests.unanswered(tag as u16, number, handed);
                *unresolved |= changes;
                *doubtful |= lost;
            });
        }
    }

    /// Waits until the kernel has let go of everything, and ends what can be ended at once.
    fn ended(&mut self, with: &mut Context) -> Option<Instant> {
        self.collect(with);
        let is_idle = self.admin.as_ref().is_none_or(|admin| admin.queue.is_idle());
        if !self.collected || !is_idle {
            return Some(with.now + END_POLL);
        }
        self.admin = None;
        match self.drains_within {
            _ if !self.unresolved => self.gone(with),
            Some(within) => self.drain(with.now + within, with),
            None => self.fence(with),
        }
    }

    /// Waits until the controller tells of each queue that it is through with it.
    fn drain(&mut self, until: Instant, with: &mut Context) -> Option<Instant> {
        let mut all = true;
        for queue in &mut self.queues {
            match queue.drain() {
                End::Reset => {}
                End::Open => all = false,
                End::Lost => return self.fence(with),
            }
        }
        if all {
            return self.gone(with);
        }
        if until <= with.now {
            return self.fence(with);
        }
        self.state = State::Draining(until);
        Some(with.now + END_POLL)
    }

    /// Waits until the controller must have ended all that it had. That time begins now: dropping the connections has
    /// them be reset, so that the kernel sends nothing any more that the controller would take for a sign of this host.
    fn fence(&mut self, with: &mut Context) -> Option<Instant> {
        self.queues.clear();
        let until = Instant::now() + self.expires;
        self.state = State::Fencing(until);
        with.changed = true;
        Some(until)
    }

    /// Nothing can be carried out any more that the controller had.
    fn gone(&mut self, with: &mut Context) -> Option<Instant> {
        self.queues.clear();
        with.requests.release(self.number);
        (self.unresolved, self.doubtful) = (false, false);
        self.state = State::Down;
        // One that is ended at once each time is not to be begun all the time.
        self.next = with.now.max(self.begun + with.shared.options.reconnect_delay);
        with.changed = true;
        Some(self.next)
    }

    /// Connects anew, on a thread of its own, if it is time.
    fn connect(&mut self, with: &mut Context) -> Option<Instant> {
        if self.leaving {
            return None;
        }
        let Some(told) = &self.connecting else {
            if with.now < self.next {
                return Some(self.next);
            }
            let (tell, told) = channel();
            let (shared, address) = (Arc::clone(&with.shared), self.address);
            let work = move || {
                let end = Instant::now() + shared.options.connect_within;
                let known = shared.known();
                _ = tell.send(establish(&address, &shared.identity, &known, end));
                shared.wake();
            };
            match thread::Builder::new().name("nvme connect".into()).spawn(work) {
                Ok(_) => self.connecting = Some(told),
                Err(e) => self.fail(format!("no thread: {e}"), with),
            }
            return Some(self.next);
        };
        match told.try_recv() {
            Err(TryRecvError::Empty) => return None,
            Err(TryRecvError::Disconnected) => self.fail("its thread has ended".to_owned(), with),
            Ok(Err(why)) => self.fail(why, with),
            Ok(Ok(made)) => {
                self.connecting = None;
                if let Err(why) = self.join(made, with) {
                    self.fail(why, with);
                }
            }
        }
        Some(self.next)
    }

    fn fail(&mut self, why: String, with: &mut Context) {
        self.connecting = None;
        self.next = with.now + with.shared.options.reconnect_delay;
        if self.problem.as_ref() != Some(&why) {
            tracing::error!(
                controller = with.shared.name(),
                "no connection to {}: {why}",
                self.address
            );
        }
        self.problem = Some(why);
        with.changed = true;
    }
}
