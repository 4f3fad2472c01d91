//! A path: an association with a controller, its end, and the next one.
//!
//! [`Path::step`] goes from `Up` to `Ending`, where the kernel lets go of what is in flight; to `Fencing`, where the
//! controller may still carry it out; to `Down`, where a thread connects anew. A path that is detached is used for what
//! is in flight until that is over, and then goes to `ShuttingDown` before it ends.

mod begin;
mod end;

use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::mpsc::Receiver;
use std::time::{Duration, Instant};

use crate::address::Address;
use crate::admin::{Admin, Heard};
use crate::ana::{AnaState, Groups};
use crate::connect::Association;
use crate::context::Context;
use crate::identify::{Controller, NAMESPACES_MAX};
use crate::options::PathInfo;
use crate::queue::Queue;

/// Between two looks at how connections end, and whether a controller is shut down.
const END_POLL: Duration = Duration::from_millis(10);
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
}
