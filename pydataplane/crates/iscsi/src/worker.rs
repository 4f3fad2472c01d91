//! The thread of a device: it alone uses the session, carries the I/O of all channels over it, and logs in anew
//! when it is lost.

use std::os::fd::AsFd;
use std::sync::Arc;
use std::time::{Duration, Instant};

use bdev::{FlushCause, Registry};
use rustix::event::{PollFd, PollFlags, Timespec, poll};

use crate::command::{self, CAPACITY_LEN};
use crate::requests::{Part, Requests};
use crate::session::Session;
use crate::shared::Shared;
use crate::unit::{Capacity, Unit};

/// How often the LUN is asked for its capacity, which is also when it tells of what has changed.
const LOOK: Duration = Duration::from_secs(2);
/// First and longest pause between two attempts to log in.
const PAUSE: Duration = Duration::from_millis(250);
const PAUSE_MAX: Duration = Duration::from_secs(5);
/// Longest sleep.
const SLEEP: Duration = Duration::from_secs(1);

pub(crate) struct Worker {
    shared: Arc<Shared>,
    registry: Registry,
    requests: Requests,
    session: Option<Session>,
    /// When the session began.
    begun: Instant,
    /// When the LUN was looked at; in the past: it is to be looked at.
    looked: Instant,
    looking: bool,
    /// When it was.
    asked: Instant,
    /// No attempt to log in before that, and the pause after the next one.
    next: Instant,
    pause: Duration,
    /// The sentence that was logged last.
    said: Option<String>,
}

impl Worker {
    pub(crate) fn new(shared: Arc<Shared>, registry: Registry, session: Session) -> Worker {
        let now = Instant::now();
        let requests = Requests::new(shared.unit, shared.write_through);
        Worker {
            shared,
            registry,
            requests,
            session: Some(session),
            begun: now,
            looked: now,
            looking: false,
            asked: now,
            next: now,
            pause: PAUSE,
            said: None,
        }
    }

    /// Until it is told to stop, when nobody has I/O any more.
    pub(crate) fn run(mut self) {
        while !self.shared.is_stopped() {
            let shared = Arc::clone(&self.shared);
            self.requests.take(|| shared.next_request());
            match self.session.take() {
                Some(session) => self.serve(session),
                None => self.reconnect(),
            }
        }
        if let Some(session) = self.session.take() {
            session.log_out();
        }
        self.requests.fail_all();
        self.shared.closed();
    }

    /// One round on the session.
    fn serve(&mut self, mut session: Session) {
        self.send(&mut session);
        let until = self.sleeps_until(true);
        let time = match self.shared.may_sleep() {
            true => until.saturating_duration_since(Instant::now()),
            // There is no room for what waits; or there is, and it is taken at once.
            false if self.requests.is_full() || session.has_early() => {
                until.saturating_duration_since(Instant::now())
            }
            false => Duration::ZERO,
        };
        let woken = session.wait(Some(self.shared.event.as_fd()), time);
        self.shared.has_slept(woken);
        self.collect(&mut session);
        if session.is_lost() {
            // Before anything is sent again: what it had is of no more use then, and no memory is used by it.
            drop(session);
            self.lose();
        } else if is_late(&self.requests, &self.shared) {
            drop(session);
            self.shared.set_connected(false);
            self.give_up();
            self.next = Instant::now();
        } else if self.has_silent() {
            drop(session);
            if let Some(before) = self.shared.give_up().and_then(|t| Instant::now().checked_sub(t))
            {
                self.requests.fail_sent_before(before);
            }
            self.lose();
        } else {
            self.session = Some(session);
        }
    }

    /// Whether a command has no answer for too long, although others may have.
    fn has_silent(&self) -> bool {
        let asked = Some(self.asked).filter(|_| self.looking);
        let oldest = asked.into_iter().chain(self.requests.oldest_sent()).min();
        let waits = oldest.map(|since| since.elapsed());
        waits.zip(self.shared.give_up()).is_some_and(|(waits, most)| waits >= most)
    }

    fn send(&mut self, session: &mut Session) {
        if !self.looking && self.looked.elapsed() >= LOOK {
            self.asked = Instant::now();
            self.looking = session.send_own(&command::read_capacity(), CAPACITY_LEN).is_ok();
        }
        while !session.is_lost()
            && !session.has_early()
            && let Some(at) = self.requests.next_ready()
        {
            let sent = match self.requests.part(at) {
                // SAFETY: what the runs name is the I/O's until it has ended, and the requests' until the part was
                // answered or the session dropped.
                Ok(Part { cdb, data, runs }) => unsafe { session.send(at, &cdb, data, runs) },
                Err(error) => {
                    self.requests.finish(at, Err(error));
                    continue;
                }
            };
            if sent.is_err() {
                self.requests.put_back(at);
            }
        }
    }

    fn sleeps_until(&self, has_session: bool) -> Instant {
        let now = Instant::now();
        let looks = has_session && !self.looking;
        let look = looks.then(|| self.looked + LOOK);
        let give_up = self.requests.waits_since().zip(self.shared.give_up()).map(|(a, b)| a + b);
        let asked = Some(self.asked).filter(|_| has_session && self.looking);
        let oldest = asked.into_iter().chain(self.requests.oldest_sent()).min();
        let silent = oldest.zip(self.shared.give_up()).map(|(a, b)| a + b);
        let dues = [look, give_up, silent, self.requests.next_due()];
        dues.into_iter().flatten().fold(now + SLEEP, Instant::min)
    }

    fn collect(&mut self, session: &mut Session) {
        let patience = self.shared.give_up();
        let mut answered = false;
        if session.take_late_failure() {
            self.shared.latch.set(FlushCause::Flush, None);
        }
        while let Some((at, answer)) = session.next_answer() {
            answered = true;
            if answer.is_attention() {
                self.look_soon();
            }
            self.requests.answered(at, answer, patience, &self.shared.latch);
            if answer.is_doubtful() || answer.is_partial() {
                // What was answered after that may be of another LUN, so it is not taken for an answer.
                session.end();
                break;
            }
        }
        if answered {
            self.requests.is_answered();
        }
        let Some((answer, told)) = session.own_answer() else { return };
        self.looking = false;
        self.looked = Instant::now();
        if answer.is_doubtful() {
            return session.end();
        }
        if answer.is_attention() {
            return self.look_soon();
        }
        let told = match answer.is_good() {
            true => Capacity::parse(told),
            // It is no disk any more, or is busy.
            false if answer.is_later() => return,
            false => Err("its LUN does not tell its capacity any more".to_owned()),
        };
        match told.and_then(|capacity| self.take_over(&Unit { capacity, ..self.shared.unit })) {
            Ok(()) => self.all_is_well(),
            Err(why) => {
                session.end();
                self.say(why);
            }
        }
    }

    /// The LUN has something to tell: it is asked again at once.
    fn look_soon(&mut self) {
        self.looked = self.looked.checked_sub(LOOK).unwrap_or(self.looked);
    }

    /// Takes over what the LUN is now.
    ///
    /// # Errors
    /// It is another one.
    fn take_over(&self, unit: &Unit) -> Result<(), String> {
        unit.can_replace(&self.shared.unit)?;
        let (old, new) = (self.shared.geometry().num_blocks, unit.capacity.geometry.num_blocks);
        if self.shared.resize(new) {
            let name = self.shared.name();
            match new < old {
                true => tracing::warn!(bdev = name, "its LUN shrank from {old} blocks to {new}"),
                false => tracing::info!(bdev = name, "its LUN grew from {old} blocks to {new}"),
            }
            self.registry.notify_resized(name);
        }
        Ok(())
    }

    fn all_is_well(&mut self) {
        if self.said.take().is_some() {
            tracing::info!(bdev = self.shared.name(), "its LUN answers again");
        }
        self.shared.set_problem(None);
    }

    fn say(&mut self, why: String) {
        if self.said.as_ref() != Some(&why) {
            tracing::error!(bdev = self.shared.name(), "{why}");
        }
        self.shared.set_problem(Some(why.clone()));
        self.said = Some(why);
    }

    /// The session is gone.
    fn lose(&mut self) {
        tracing::warn!(bdev = self.shared.name(), "the session with its target is lost");
        self.shared.set_connected(false);
        self.looking = false;
        self.requests.begin_anew();
        // One that is ended at once each time is not to be begun all the time.
        let had = self.begun.elapsed();
        self.next = Instant::now() + PAUSE_MAX.min(Duration::from_secs(1)).saturating_sub(had);
    }

    /// Nobody has answered for too long.
    fn give_up(&mut self) {
        self.looking = false;
        give_up(&mut self.requests, &self.shared);
    }

    /// Attempts to log in, if it is time.
    fn reconnect(&mut self) {
        let left = self.next.saturating_duration_since(Instant::now());
        if !left.is_zero() {
            self.shared.may_sleep();
            let sleep =
                left.min(self.sleeps_until(false).saturating_duration_since(Instant::now()));
            let mut fds = [PollFd::new(&self.shared.event, PollFlags::IN)];
            _ = poll(&mut fds, Timespec::try_from(sleep.min(PAUSE)).ok().as_ref());
            self.shared.has_slept(true);
            return self.be_late();
        }
        let shared = Arc::clone(&self.shared);
        let requests = &mut self.requests;
        let mut wanted = || {
            shared.has_slept(true);
            requests.take(|| shared.next_request());
            if is_late(requests, &shared) {
                give_up(requests, &shared);
            }
            shared.may_sleep();
            !shared.is_stopped()
        };
        let wake = Some(self.shared.event.as_fd());
        let established = Session::establish(self.shared.identity(), wake, &mut wanted);
        self.shared.has_slept(true);
        let taken = established.map_err(|no| no.why).and_then(|(session, unit)| {
            self.take_over(&unit)?;
            Ok(session)
        });
        match taken {
            Ok(mut session) => {
                // Its host may have been down, and what its cache held is gone then. The cache of one on this host
                // goes with this process.
                let may_be_lost =
                    self.requests.take_unflushed() && !self.shared.identity().address.is_local();
                if may_be_lost || session.take_late_failure() {
                    let name = self.shared.name();
                    tracing::error!(
                        bdev = name,
                        "what was written since the last flush may be lost: its target has ended the session, and has a volatile cache"
                    );
                    self.shared.latch.set(FlushCause::Flush, None);
                }
                self.session = Some(session);
                self.begun = Instant::now();
                self.looked = self.begun;
                self.pause = PAUSE;
                self.all_is_well();
                self.shared.set_given_up(false);
                self.shared.set_connected(true);
            }
            Err(why) => {
                self.next = Instant::now() + self.pause;
                self.pause = (self.pause * 2).min(PAUSE_MAX);
                if !self.shared.is_stopped() {
                    self.say(format!("no session with its target: {why}"));
                }
                self.be_late();
            }
        }
    }

    fn be_late(&mut self) {
        if is_late(&self.requests, &self.shared) {
            self.give_up();
        }
    }
}

fn is_late(requests: &Requests, shared: &Shared) -> bool {
    let waits = requests.waits_since().map(|since| since.elapsed());
    waits.zip(shared.give_up()).is_some_and(|(waits, most)| waits >= most)
}

/// All I/O fails, and further I/O at once, until there is a session. Nothing may be in flight.
fn give_up(requests: &mut Requests, shared: &Shared) {
    let seconds = shared.give_up().unwrap_or_default().as_secs();
    if !shared.has_given_up() {
        let name = shared.name();
        tracing::error!(bdev = name, "I/O fails: its target has not answered for {seconds} s");
    }
    shared.set_given_up(true);
    requests.fail_all();
    while let Some(request) = shared.next_request() {
        let failed = request.io.op.failed();
        request.end(Err(failed));
    }
}
