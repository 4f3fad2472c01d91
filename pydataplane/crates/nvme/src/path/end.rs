//! An association ends, and what it had.

use std::time::{Duration, Instant};

use super::{END_POLL, Path, State};
use crate::command::property;
use crate::context::Context;
use crate::queue::{End, Queue};

/// How long a controller may take to be shut down.
const SHUT_DOWN_WITHIN: Duration = Duration::from_secs(1);
impl Path {
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
    pub(super) fn end(&mut self, why: &str, with: &mut Context) {
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
    pub(super) fn is_quiet(&self) -> bool {
        self.queues.iter().all(|queue| queue.talk.in_flight() == 0)
    }

    /// Shuts the controller down, as nothing is in flight.
    pub(super) fn shut_down(&mut self, with: &mut Context) {
        if let Some(admin) = &mut self.admin {
            admin.configure(property::SHUTDOWN);
            self.state = State::ShuttingDown(with.now + SHUT_DOWN_WITHIN);
        }
    }

    /// Collects what the queues had, once the kernel has let go of all of them.
    pub(super) fn collect(&mut self, with: &mut Context) {
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
    pub(super) fn ended(&mut self, with: &mut Context) -> Option<Instant> {
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
    pub(super) fn drain(&mut self, until: Instant, with: &mut Context) -> Option<Instant> {
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
    pub(super) fn fence(&mut self, with: &mut Context) -> Option<Instant> {
        self.queues.clear();
        let until = Instant::now() + self.expires;
        self.state = State::Fencing(until);
        with.changed = true;
        Some(until)
    }

    /// Nothing can be carried out any more that the controller had.
    pub(super) fn gone(&mut self, with: &mut Context) -> Option<Instant> {
        self.queues.clear();
        with.requests.release(self.number);
        (self.unresolved, self.doubtful) = (false, false);
        self.state = State::Down;
        // One that is ended at once each time is not to be begun all the time.
        self.next = with.now.max(self.begun + with.shared.options.reconnect_delay);
        with.changed = true;
        Some(self.next)
    }
}
