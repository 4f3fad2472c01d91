//! A path: an association with a controller, its end, and the next one.
//!
//! [`Path::step`] goes from `Up` to `Ending`, where the kernel lets go of what is in flight and the controller is
//! disabled, by the admin queue if that is still there; to `Fencing`, where the controller has to notice by itself
//! that this host is gone; to `Down`, where a thread connects anew.

use std::sync::Arc;
use std::sync::mpsc::{Receiver, TryRecvError, channel};
use std::thread;
use std::time::{Duration, Instant};

use crate::address::Address;
use crate::admin::{Admin, Heard};
use crate::ana::{AnaState, Groups};
use crate::command::property;
use crate::connect::{Association, establish};
use crate::disk::PathInfo;
use crate::queue::{End, Queue};
use crate::worker::Desktop;

/// How long a controller may take to be disabled, whatever it says.
const DISABLE_WITHIN: (Duration, Duration) = (Duration::from_secs(1), Duration::from_secs(10));
/// Added to the time in which a controller notices by itself, for what is under way in the network.
const MARGIN: Duration = Duration::from_secs(1);
/// Between two looks at how connections end, and whether a controller is disabled.
const END_POLL: Duration = Duration::from_millis(10);
/// Between two looks whether I/O waits for too long.
pub(crate) const LATE_POLL: Duration = Duration::from_millis(250);

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum State {
    Up,
    /// Until then the controller may take to be disabled; `None`: it cannot be asked.
    Ending(Option<Instant>),
    /// Until then it has to notice by itself.
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
    disable_within: Duration,
    /// By namespace of the controller: the group that it is in; `None`: it is not there.
    namespaces: Vec<Option<u32>>,
    groups: Option<Groups>,
    /// By namespace: I/O went there last.
    pub current: Vec<bool>,
    begun: Instant,
    lost: Instant,
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
    pub(crate) fn new(number: u8, address: Address, units: usize, now: Instant) -> Path {
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
            disable_within: Duration::ZERO,
            namespaces: vec![None; units],
            groups: None,
            current: vec![false; units],
            begun: now,
            lost: now,
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
            access: (0..self.namespaces.len()).map(|unit| self.access(unit)).collect(),
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
    pub(crate) fn join(&mut self, made: Association, with: &mut Desktop) -> Result<(), String> {
        let namespaces = with.shared.compare(&made)?;
        let failed = |e| format!("no io_uring: {e}");
        let mut queues = Vec::with_capacity(made.queues.len());
        for link in made.queues {
            queues.push(Queue::new(link, &with.io, true).map_err(failed)?);
        }
        let of = &made.controller;
        let (kept, tells) = (made.keep_alive, of.tells_namespaces);
        let mut admin = Admin::new(made.admin, &with.io, with.now, kept, tells, made.names.serial)
            .map_err(failed)?;
        if made.groups.is_some() {
            // It may have changed before anything was to be told of.
            admin.want_groups();
        }
        let expires = match of.traffic_based {
            true => kept * 2,
            false => kept + Duration::from_millis(of.keep_alive_step_ms),
        };
        self.expires = expires + Duration::from_millis(of.quiesce_ms) + MARGIN;
        self.disable_within = made.ready_within.clamp(DISABLE_WITHIN.0, DISABLE_WITHIN.1);
        (self.queues, self.admin) = (queues, Some(admin));
        (self.namespaces, self.groups, self.id) = (namespaces, made.groups, made.id);
        (self.state, self.begun, self.asked) = (State::Up, with.now, None);
        (self.collected, self.unresolved, self.doubtful) = (false, false, false);
        self.connections += 1;
        if self.problem.take().is_some() {
            tracing::info!(controller = with.shared.name(), "{} answers again", self.address);
        }
        for unit in 0..with.shared.units.len() {
            let nsid = with.shared.units[unit].namespace.nsid;
            if let Some(found) = made.namespaces.iter().find(|each| each.nsid == nsid) {
                with.resize(unit, found.geometry.num_blocks);
            }
        }
        with.changed = true;
        Ok(())
    }

    /// The association is of no more use.
    pub(crate) fn leave(&mut self, why: &str, with: &mut Desktop) {
        if !self.is_up() {
            return;
        }
        if !self.leaving {
            let name = with.shared.name();
            tracing::warn!(controller = name, "the connection to {} is lost: {why}", self.address);
            self.problem = Some(format!("the connection is lost: {why}"));
        }
        self.lost = with.now;
        with.changed = true;
        self.queues.iter_mut().for_each(|queue| queue.leave(why));
        let alive = self.admin.as_mut().filter(|admin| admin.queue.broken().is_none());
        self.state = match alive {
            Some(admin) => {
                // A controller that is disabled carries nothing out any more (base specification 2.1, 3.6.3).
                let value = if self.leaving { property::SHUTDOWN } else { property::DISABLE };
                admin.configure(value);
                State::Ending(Some(with.now + self.disable_within))
            }
            None => State::Ending(None),
        };
    }

    /// Hands the kernel what it can have.
    pub(crate) fn pump(&mut self) {
        self.queues.iter_mut().for_each(Queue::pump);
        if let Some(admin) = &mut self.admin {
            admin.queue.pump();
        }
    }

    /// Takes what has come; whether anything has.
    pub(crate) fn poll(&mut self, with: &mut Desktop) -> bool {
        let mut any = false;
        let mut lost = None;
        let mut elsewhere = None;
        for queue in &mut self.queues {
            any |= queue.poll();
            while let Some(ended) = queue.talk.next_ended() {
                let latch = &with.shared.latch;
                let at = ended.tag as u16;
                elsewhere = with.desk.answered(at, &ended, with.now, latch).or(elsewhere);
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
    fn hear(&mut self, with: &mut Desktop) -> Result<(), String> {
        let Some(admin) = &mut self.admin else { return Ok(()) };
        while let Some(heard) = admin.next(&with.shared)? {
            with.changed = true;
            match heard {
                Heard::Groups(groups) => self.groups = Some(groups),
                Heard::Namespace(unit, blocks, group) => {
                    self.namespaces[unit] = Some(group);
                    with.resize(unit, blocks);
                }
                // Asked for its status until it is disabled, or shut down.
                Heard::Configured(true) => self.asked = Some(with.now - END_POLL),
                Heard::Configured(false) => return Err("it cannot be disabled".to_owned()),
                Heard::Status(status) => {
                    let (ready, shut_down) = (status & 1, status >> 2 & 3);
                    if ready == 0 || shut_down == 2 {
                        self.asked = None;
                        self.state = State::Fencing(with.now);
                    } else {
                        self.asked = Some(with.now);
                    }
                }
            }
        }
        match admin.queue.broken() {
            Some(why) => Err(why.to_owned()),
            None => Ok(()),
        }
    }

    /// Does what is due; when there is more to do.
    pub(crate) fn step(&mut self, with: &mut Desktop) -> Option<Instant> {
        match self.state {
            State::Up => {
                let (now, shared) = (with.now, Arc::clone(&with.shared));
                let due = self.admin.as_mut().map(|admin| admin.step(&shared, now));
                let mut is_late = false;
                if now - self.looked >= LATE_POLL {
                    self.looked = now;
                    let oldest = with.desk.oldest_sent(self.number).zip(shared.options.timeout);
                    is_late = oldest.is_some_and(|(sent, most)| now - sent >= most);
                }
                match due {
                    Some(Err(why)) => {
                        // It does not answer, so it is not asked to disable anything.
                        if let Some(admin) = &mut self.admin {
                            admin.queue.leave(&why);
                        }
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
            State::Ending(until) => {
                self.collect(with);
                let lost = self.admin.as_ref().is_none_or(|admin| admin.queue.broken().is_some());
                if lost || until.is_none_or(|until| until <= with.now) {
                    if let Some(admin) = &mut self.admin {
                        admin.queue.leave("its queues are lost");
                    }
                    self.state = State::Fencing(self.lost + self.expires);
                } else if self.asked.is_some_and(|at| with.now - at >= END_POLL)
                    && let Some(admin) = &mut self.admin
                {
                    self.asked = None;
                    admin.ask_status();
                }
                Some(with.now + END_POLL)
            }
            State::Fencing(until) => self.fence(until, with),
            State::Down => self.connect(with),
        }
    }

    /// Collects what the queues had, once the kernel has let go of all of them.
    fn collect(&mut self, with: &mut Desktop) {
        if self.collected || !self.queues.iter().all(Queue::is_idle) {
            return;
        }
        self.collected = true;
        for queue in &mut self.queues {
            let (unresolved, doubtful) = (&mut self.unresolved, &mut self.doubtful);
            let (desk, number) = (&mut with.desk, self.number);
            queue.talk.take_unanswered(|tag, handed| {
                let (changes, lost) = desk.unanswered(tag as u16, number, handed);
                *unresolved |= changes;
                *doubtful |= lost;
            });
        }
    }

    /// Waits until nothing can be carried out any more that the controller has: it is disabled; or it has ended all
    /// connections in order; or the time is over in which it has to notice that this host is gone.
    fn fence(&mut self, until: Instant, with: &mut Desktop) -> Option<Instant> {
        self.collect(with);
        let admin = self.admin.iter_mut().map(|admin| &mut admin.queue);
        let ends: Vec<_> = self.queues.iter_mut().chain(admin).map(drain).collect();
        let in_order = ends.iter().all(|end| *end == Some(End::InOrder));
        let is_idle = self.collected && ends.iter().all(Option::is_some);
        if !is_idle || self.unresolved && !in_order && with.now < until {
            let waits = ends.iter().any(|end| matches!(end, None | Some(End::Open)));
            return Some(if waits { with.now + END_POLL } else { until });
        }
        self.queues.clear();
        self.admin = None;
        with.desk.release(self.number);
        (self.unresolved, self.doubtful) = (false, false);
        self.state = State::Down;
        // One that is ended at once each time is not to be begun all the time.
        self.next = with.now.max(self.begun + with.shared.options.reconnect_delay);
        with.changed = true;
        Some(self.next)
    }

    /// Connects anew, on a thread of its own, if it is time.
    fn connect(&mut self, with: &mut Desktop) -> Option<Instant> {
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
                _ = tell.send(establish(&address, &shared.identity, end));
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
                let only = !with.others_up;
                match self.join(made, with) {
                    Ok(()) if only => with.came_back(&self.address),
                    Ok(()) => {}
                    Err(why) => self.fail(why, with),
                }
            }
        }
        Some(self.next)
    }

    fn fail(&mut self, why: String, with: &mut Desktop) {
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

/// How the other side has ended a connection; `None`: the kernel still has some of its memory.
fn drain(queue: &mut Queue) -> Option<End> {
    // One that is in use, as that of a controller that was disabled, is left first.
    queue.leave("the association ends");
    queue.is_idle().then(|| queue.drain())
}
