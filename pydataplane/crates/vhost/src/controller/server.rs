//! The controller's thread: what it waits for, and whose turn it is then.

use std::collections::HashMap;
use std::os::fd::AsFd;
use std::os::unix::net::UnixStream;
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use peer::Process;
use rustix::event::{PollFd, PollFlags, Timespec, poll};

use super::Controller;
use super::kept::KeptSession;
use super::sessions::{Ending, Retiring};
use crate::budget::Budget;
use crate::device::Device;
use crate::events::{Event, Unheard};
use crate::keeper::SessionKeeper;
use crate::mailbox::{Gone, Inbox};
use crate::owner::RefusalLog;
use crate::past::Past;
use crate::session::{End, Peer};
use crate::socket::Listener;

/// How often a control queue without a kick is looked at.
pub(super) const POLLED_CONTROL: Duration = Duration::from_millis(10);

/// How long peers may wait in the socket's backlog until the I/O of the one before them has ended;
/// then they are refused.
const SUCCESSION: Duration = Duration::from_secs(5);

/// The controller's thread.
pub(super) struct Server {
    pub(super) controller: Arc<Controller>,
    /// `None`: it is being deleted.
    pub(super) listener: Option<Listener>,
    /// Whether peers are taken; until then they wait in the socket's backlog.
    pub(super) accepts: bool,
    pub(super) inbox: Inbox,
    pub(super) peer: Option<Peer>,
    /// File of the mark that requests may be in flight.
    pub(super) mark: Option<PathBuf>,
    /// Of the session before: who was at the other end, and what is known of its rings.
    pub(super) past: Option<(String, Past)>,
    /// The end of the peer's session has begun.
    pub(super) retiring: Option<Retiring>,
    /// The process that connected it.
    pub(super) client: Option<Arc<Process>>,
    /// The controller belongs to that process, which is recorded.
    pub(super) claimed: bool,
    /// What the messages of peers may take: of all that come, so that none has more by coming again.
    pub(super) budget: Budget,
    /// As much for the task management of their guests, while no session has it.
    pub(super) control_budget: Budget,
    /// Lines about strangers, and about messages that were refused.
    pub(super) refusals: RefusalLog,
    refused_messages: RefusalLog,
    /// What is kept of the session for the process after this one.
    pub(super) kept: KeptSession,
    /// The session before; while it is there, there is no peer.
    pub(super) ending: Option<Ending>,
    /// Who takes its place then.
    pub(super) successor: Option<(UnixStream, Arc<Process>)>,
    /// What the driver of the session before has not heard: while there is none.
    pub(super) unheard: Option<Unheard>,
    /// It comes from another process, and waits for [`Order::TakeOver`].
    pub(super) inherits: bool,
    /// What was made of its session before it came.
    pub(super) prepared: Option<Prepared>,
    /// Nothing is served, no peer is taken: see [`Order::Hold`].
    pub(super) held: bool,
    /// Another process has everything.
    pub(super) left: bool,
    /// To end as soon as no session is left.
    pub(super) stopping: bool,
    /// Peers so far; names the session of the present one.
    pub(super) sessions: u64,
    pub(super) removals: HashMap<u64, Removal>,
    pub(super) next_removal: u64,
    /// Until when peers wait in the socket's backlog.
    pub(super) banned: Option<Instant>,
    /// How long it took to set the session up.
    pub(super) setup: Duration,
    /// When suspended requests are tried again.
    pub(super) retry_at: Option<Instant>,
    /// Suspensions of this session that were a line in the log.
    pub(super) suspensions_logged: u32,
}

/// What the thread begins with.
pub(super) struct Begin {
    pub(super) listener: Listener,
    pub(super) accepts: bool,
    pub(super) inbox: Inbox,
    pub(super) mark: Option<PathBuf>,
    /// Who keeps its sessions.
    pub(super) keeper: Option<Arc<dyn SessionKeeper>>,
    /// It comes from another process.
    pub(super) inherits: bool,
}

/// Which descriptors are ready.
#[derive(Default)]
struct Ready {
    connection: bool,
    message: bool,
    control: bool,
    event: bool,
}

/// A target being removed: who waits for it.
pub(super) struct Removal {
    pub(super) target: u8,
    pub(super) gone: Option<Gone>,
}

/// A session that is about to come, as far as it can be made before.
pub(super) struct Prepared {
    /// Its number.
    pub(super) sessions: u64,
    pub(super) peer: Peer,
    pub(super) client: Arc<Process>,
}

impl Server {
    /// Serves nobody yet.
    pub(super) fn new(controller: Arc<Controller>, b: Begin) -> Self {
        Server {
            controller,
            listener: Some(b.listener),
            accepts: b.accepts,
            inbox: b.inbox,
            peer: None,
            mark: b.mark,
            past: None,
            retiring: None,
            client: None,
            claimed: false,
            budget: Budget::new(Instant::now()),
            control_budget: Budget::new(Instant::now()),
            refusals: RefusalLog::default(),
            refused_messages: RefusalLog::default(),
            kept: KeptSession::new(b.keeper),
            ending: None,
            successor: None,
            unheard: None,
            inherits: b.inherits,
            prepared: None,
            held: false,
            left: false,
            stopping: false,
            sessions: 0,
            removals: HashMap::new(),
            next_removal: 0,
            banned: None,
            setup: Duration::ZERO,
            retry_at: None,
            suspensions_logged: 0,
        }
    }

    pub(super) fn run(mut self) {
        loop {
            let ready = self.wait();
            // Orders first: a removal is to be seen before more I/O is set up.
            self.inbox.clear_wakeup();
            while let Some(order) = self.inbox.next() {
                self.obey(order);
            }
            if self.retiring.as_ref().is_some_and(|r| Instant::now() >= r.until) {
                self.end(&End::Undrained);
            }
            if self.left || self.stopping && self.peer.is_none() && self.ending.is_none() {
                return;
            }
            if self.held {
                continue;
            }
            self.retry_suspended();
            if !ready.message {
                self.keep_if_due();
            }
            if !ready.message {
                self.with_device(Device::tell_config);
            }
            if ready.control {
                self.with_device(Device::control_kick);
            }
            if ready.event {
                self.with_device(Device::event_kick);
            }
            // Messages before connections: a peer that left makes room for the next. None of one whose
            // session is about to end, which is settled as it is.
            if ready.message
                && self.retiring.is_none()
                && let Err(why) = self.handle_message()
            {
                self.end(&why);
            }
            if ready.message
                && let Some(peer) = &self.peer
            {
                let runs = peer.handler().device.runs();
                let ran = self.controller.started.swap(runs, Ordering::Relaxed);
                if runs && !ran {
                    // The guest goes on, and sends again what was suspended.
                    self.controller.forget_suspensions();
                }
                let overtaken = peer.handler().device.is_overtaken();
                self.controller.overtaken.store(overtaken, Ordering::Relaxed);
                let refused = peer.handler().device.refused();
                *self.controller.refused() = refused;
            }
            // One that hung up is heard to its end first: it has left, and is no reason to refuse
            // its successor.
            let succeeds = self.ending.as_ref().is_none_or(|e| e.since.elapsed() >= SUCCESSION);
            if ready.connection && succeeds && !self.peer.as_ref().is_some_and(Peer::has_hung_up) {
                self.accept();
            }
        }
    }

    /// Sleeps until something is to be done.
    fn wait(&mut self) -> Ready {
        if self.held || self.inherits {
            self.inbox.wait();
            return Ready::default();
        }
        let now = Instant::now();
        // Of a peer that is not heard: not whether it hung up either, which `accept` asks for.
        let held =
            Some(self.budget.wait(now)).filter(|wait| self.peer.is_some() && !wait.is_zero());
        let handler = self.peer.as_ref().map(|p| p.handler());
        let device = handler.as_ref().map(|h| &h.device);
        let mut fds = vec![PollFd::from_borrowed_fd(self.inbox.as_fd(), PollFlags::IN)];
        let mut add = |fd| {
            let at = fds.len();
            fds.extend(fd_of(fd));
            (fds.len() > at).then_some(at)
        };
        let ban = self.banned.map(|end| end.saturating_duration_since(now));
        let ending = self.ending.as_ref().map(|e| SUCCESSION.saturating_sub(e.since.elapsed()));
        let closed = [ban, ending, held].into_iter().flatten().filter(|left| !left.is_zero()).max();
        let accepts = self.accepts && closed.is_none();
        let listener = self.listener.as_ref().filter(|_| accepts);
        let connection = add(listener.map(AsFd::as_fd));
        // Whose session is about to end is not heard any more.
        let heard = self.peer.as_ref().filter(|_| self.retiring.is_none() && held.is_none());
        // Readable, but of no use yet.
        let again = heard.and_then(Peer::looks_again);
        let message = add(heard.filter(|_| again.is_none()).map(Peer::fd));
        let control = add(device.and_then(Device::control_fd));
        let event = add(device.and_then(Device::event_fd));
        let polled = device.is_some_and(Device::control_is_polled);
        let later = device.and_then(Device::backlog);
        let backlog = later.is_some_and(|later| later.is_zero());
        let pause = match (backlog, polled) {
            (true, _) => Some(Duration::ZERO),
            (false, true) => Some(POLLED_CONTROL),
            (false, false) => closed.min(held.or(closed)),
        };
        let retired =
            self.retiring.as_ref().map(|r| r.until.saturating_duration_since(Instant::now()));
        let retry = self.retry_at.map(|at| at.saturating_duration_since(now));
        let config = device.and_then(Device::config_due);
        let config = config.map(|due| due.saturating_duration_since(now));
        let keep = self.kept.due().map(|due| due.saturating_duration_since(now));
        let pause = [pause, later, retired, again, retry, config, keep].into_iter().flatten().min();
        let timeout = pause.map(|pause| Timespec {
            tv_sec: pause.as_secs() as i64,
            tv_nsec: pause.subsec_nanos().into(),
        });
        let polled_now = match poll(&mut fds, timeout.as_ref()) {
            Ok(_) => true,
            Err(rustix::io::Errno::INTR) => return Ready::default(),
            Err(why) => {
                tracing::error!(controller = self.controller.name, "poll: {why}");
                std::thread::sleep(POLLED_CONTROL);
                false
            }
        };
        let is =
            |at: Option<usize>| polled_now && at.is_some_and(|at| !fds[at].revents().is_empty());
        Ready {
            connection: is(connection),
            message: is(message) || again.is_some(),
            control: is(control) || polled || backlog,
            event: is(event) || backlog,
        }
    }

    /// Calls `f` with the device, if there is one: of the peer, or of the one before.
    pub(super) fn with_device<R>(&mut self, f: impl FnOnce(&mut Device) -> R) -> Option<R> {
        match (&self.peer, &mut self.ending) {
            (Some(peer), _) => Some(f(&mut peer.handler().device)),
            (None, Some(ending)) => Some(f(&mut ending.device)),
            (None, None) => None,
        }
    }

    /// Tells the guest, or keeps it for one that may come back.
    pub(super) fn tell(&mut self, event: Event) {
        if self.with_device(|device| device.tell(event)).is_none()
            && let Some(unheard) = &mut self.unheard
        {
            unheard.push(event, None);
        }
    }

    /// Does what the peer's next message asks. Before its first one, the controller becomes its
    /// process's own.
    fn handle_message(&mut self) -> Result<(), End> {
        let Some(peer) = &self.peer else { return Ok(()) };
        // Not where it only hung up: whoever looks whether somebody listens owns nothing.
        if !self.claimed && rustix::io::ioctl_fionread(peer.fd()).is_ok_and(|bytes| bytes > 0) {
            self.claim()?;
        }
        self.begin_change();
        let Some(peer) = &mut self.peer else { return Ok(()) };
        let since = Instant::now();
        let handled = peer.handle_message(&self.controller.name, &mut self.refused_messages);
        self.kept.renew();
        let now = Instant::now();
        self.budget.charge(now - since, now);
        handled
    }
}

fn fd_of(fd: Option<std::os::fd::BorrowedFd<'_>>) -> Option<PollFd<'_>> {
    fd.map(|fd| PollFd::from_borrowed_fd(fd, PollFlags::IN))
}

#[cfg(test)]
mod tests;
