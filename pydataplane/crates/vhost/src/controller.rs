//! One controller: a socket, the targets behind it, and the thread that serves both.
//!
//! The socket outlives its peers: when one leaves, its I/O is ended, its memory let go, and the
//! next is waited for. It belongs to the process whose message came first ([`crate::owner`]): others
//! are refused at once while that is there, by closing their connections. One peer is served at a
//! time. A second one is refused in the same way: a peer that were left waiting would hang, as QEMU
//! does its handshakes in its main loop, and one that replaced the first would take the disks away
//! under a running VM. Only a peer that never said anything, or whose process has ended and left its
//! connection to another, gives way to the next.

use parking_lot::{Mutex, MutexGuard};
use std::collections::{BTreeSet, HashMap};
use std::io;
use std::os::fd::AsFd;
use std::os::unix::net::UnixStream;
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::mpsc::{Receiver, channel};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use peer::Process;
use reactor::Handle;
use rustix::event::{PollFd, PollFlags, Timespec, poll};

use crate::budget::Budget;
use crate::controllers::Timeouts;
use crate::defs::MAX_TARGETS;
use crate::device::{Device, SessionContext, TMF_ID};
use crate::events::{Event, Unheard};
use crate::handover::{ControllerState, TargetState};
use crate::lun::Target;
use crate::mailbox::{Inbox, Mailbox, Order, Reply, mailbox};
use crate::owner::{Owner, OwnerInfo, OwnerJournal, Refusal, RefusalLog};
use crate::past::{Mark, Past};
use crate::session::{Connection, End, Peer};
use crate::socket::{Listener, SocketOptions};
use crate::stats::{ControllerCounters, ControllerStats};

/// How often a control queue without a kick is looked at.
const POLLED_CONTROL: Duration = Duration::from_millis(10);

/// How long no peer may connect after one blocked a reactor: its guests wait for a small part of
/// the time only.
const RECONNECT_BAN: Duration = Duration::from_secs(30);

/// How many times as long as a session took to set up and to end nobody may connect: peers that
/// come and go keep the reactors from other guests for a small part of the time.
const COOLDOWN_FACTOR: u32 = 4;

/// How long peers may wait in the socket's backlog until the I/O of the one before them has ended;
/// then they are refused.
const SUCCESSION: Duration = Duration::from_secs(5);

/// Part of the time that a method may wait for which an orderly end waits for I/O in flight, with
/// the peer still connected. The rest of it is for closing.
const DRAIN_SHARE: (u32, u32) = (4, 5);

/// Connections taken one after the other: strangers that come in great numbers keep the thread
/// neither from its peer nor, for long, the owner from its turn.
const MAX_ACCEPTS: u32 = 32;
/// How long nobody is let in after that many.
const ACCEPT_PAUSE: Duration = Duration::from_millis(2);

mod handover;

pub(crate) use handover::Inherited;
use handover::Prepared;

/// What a controller keeps on disk.
pub(crate) struct Records {
    /// Where its owner is recorded.
    pub(crate) journal: Option<Arc<dyn OwnerJournal>>,
    /// File of the mark that requests may be in flight.
    pub(crate) mark: Option<PathBuf>,
}

/// How a controller begins.
pub(crate) struct Setup {
    /// Whether peers are taken at once.
    pub(crate) accepts: bool,
    pub(crate) timeouts: Timeouts,
    pub(crate) records: Records,
    /// Whether it comes from another process; then it does nothing until [`Order::TakeOver`].
    pub(crate) inherits: bool,
}

/// A controller as all threads see it.
pub(crate) struct Controller {
    pub(crate) name: String,
    pub(crate) socket: SocketOptions,
    /// Where its request queues run, in the order in which queues are given out.
    pub(crate) reactors: Vec<Handle>,
    targets: Mutex<Vec<Option<Target>>>,
    /// Numbers of targets that are being added.
    reserved: Mutex<BTreeSet<u8>>,
    /// Targets as they were in the process before, until they are added here.
    inherited: Mutex<Vec<TargetState>>,
    /// One for each reactor, then one for the thread.
    counters: Vec<Arc<ControllerCounters>>,
    /// Number of the session, and whether its device runs; 0: nobody is connected.
    session: AtomicU64,
    started: AtomicBool,
    owner: Mutex<Owner>,
    /// `None`: owners are not recorded.
    journal: Option<Arc<dyn OwnerJournal>>,
    pub(crate) mailbox: Mailbox,
    /// How long a message of a peer may wait for I/O in flight.
    message_timeout: Duration,
    /// Queues of the session that were not started, and why.
    refused: Mutex<Vec<(u16, String)>>,
    /// How long an orderly end of a session waits for I/O in flight.
    drain_timeout: Duration,
}

impl Controller {
    /// Listens on the socket and starts the thread. Unless it `accepts` at once, peers that
    /// connect wait until [`Order::Accept`].
    pub(crate) fn start(
        name: &str,
        socket: SocketOptions,
        listener: Listener,
        reactors: Vec<Handle>,
        setup: Setup,
    ) -> io::Result<(Arc<Self>, JoinHandle<()>, Receiver<()>)> {
        let Setup { accepts, timeouts, records, inherits } = setup;
        let (mailbox, inbox) = mailbox()?;
        let counters: Vec<Arc<ControllerCounters>> =
            (0..=reactors.len()).map(|_| Arc::default()).collect();
        let controller = Arc::new(Controller {
            name: name.to_owned(),
            socket,
            targets: Mutex::new((0..MAX_TARGETS).map(|_| None).collect()),
            reserved: Mutex::default(),
            counters,
            inherited: Mutex::default(),
            reactors,
            session: AtomicU64::new(0),
            started: AtomicBool::new(false),
            owner: Mutex::default(),
            journal: records.journal,
            mailbox,
            refused: Mutex::default(),
            message_timeout: timeouts.message,
            drain_timeout: timeouts.method * DRAIN_SHARE.0 / DRAIN_SHARE.1,
        });
        let server = Server {
            controller: Arc::clone(&controller),
            listener: Some(listener),
            accepts,
            inbox,
            peer: None,
            mark: records.mark,
            past: None,
            retiring: None,
            client: None,
            claimed: false,
            budget: Budget::new(Instant::now()),
            refusals: RefusalLog::default(),
            ending: None,
            successor: None,
            unheard: None,
            inherits,
            prepared: None,
            held: false,
            left: false,
            stopping: false,
            sessions: 0,
            removals: HashMap::new(),
            next_removal: 0,
            banned: None,
            setup: Duration::ZERO,
        };
        // The kernel keeps 15 bytes of a thread's name.
        let thread = std::thread::Builder::new().name(format!("vhost {name}"));
        let (runs, ended) = channel();
        let thread = thread.spawn(move || {
            server.run();
            // Closed when all of it is gone.
            drop(runs);
        })?;
        Ok((controller, thread, ended))
    }

    /// Numbers of targets that are being added; locked before [`Controller::targets`].
    pub(crate) fn reserved(&self) -> MutexGuard<'_, BTreeSet<u8>> {
        self.reserved.lock()
    }

    /// The targets, by number. Changed by the controller's thread only.
    pub(crate) fn targets(&self) -> MutexGuard<'_, Vec<Option<Target>>> {
        self.targets.lock()
    }

    /// Who it belongs to.
    pub(crate) fn owner(&self) -> OwnerInfo {
        self.owner.lock().info()
    }

    /// Changes who it belongs to; a peer of another process is disconnected.
    pub(crate) fn change_owner(&self, change: impl FnOnce(&mut Owner)) {
        change(&mut self.owner.lock());
        self.mailbox.send(Order::OwnerChanged);
    }

    /// Counts on from where it was in the process before; its targets begin as they were there. Before
    /// they are added.
    pub(crate) fn begin_as(&self, state: &ControllerState) {
        self.counters[0].begin_with(&state.counters);
        self.inherited.lock().clone_from(&state.targets);
    }

    /// What the target of that number was in the process before, for the first who asks.
    pub(crate) fn inherited(&self, number: u8) -> Option<TargetState> {
        let mut all = self.inherited.lock();
        let at = all.iter().position(|t| t.number == number)?;
        Some(all.swap_remove(at))
    }

    /// What a session of that number needs.
    fn context(&self, session: u64) -> SessionContext<'_> {
        SessionContext {
            name: &self.name,
            session,
            reactors: &self.reactors,
            counters: &self.counters,
            mailbox: &self.mailbox,
            message_timeout: self.message_timeout,
        }
    }

    /// The connected peer: its number, and whether any of its request queues runs.
    pub(crate) fn session(&self) -> Option<(u64, bool)> {
        let session = self.session.load(Ordering::Relaxed);
        (session != 0).then(|| (session, self.started.load(Ordering::Relaxed)))
    }

    /// Queues of the session that were not started, and why.
    pub(crate) fn refused(&self) -> MutexGuard<'_, Vec<(u16, String)>> {
        self.refused.lock()
    }

    /// What it did since it was created.
    pub(crate) fn stats(&self) -> ControllerStats {
        let mut stats = ControllerStats::default();
        self.counters.iter().for_each(|c| stats.add(c));
        stats
    }
}

/// The CPU of a reactor; one that is not pinned counts as the CPU of its index.
pub(crate) fn cpu_of(reactor: &Handle) -> usize {
    reactor.cpu().unwrap_or_else(|| reactor.index())
}

/// A target being removed: who waits for it.
struct Removal {
    target: u8,
    reply: Option<Reply<()>>,
}

/// A session that is about to end: its peer is there until what is in flight has ended.
struct Retiring {
    /// Of the countdown of its I/O.
    id: u64,
    /// When it ends whatever is in flight.
    until: Instant,
}

/// A session whose peer is gone and whose I/O has not all ended.
struct Ending {
    device: Device,
    /// Of the countdown of its I/O.
    id: u64,
    since: Instant,
    /// How long its end kept the reactors, so far.
    took: Duration,
}

/// The controller's thread.
struct Server {
    controller: Arc<Controller>,
    /// `None`: it is being deleted.
    listener: Option<Listener>,
    /// Whether peers are taken; until then they wait in the socket's backlog.
    accepts: bool,
    inbox: Inbox,
    peer: Option<Peer>,
    /// File of the mark that requests may be in flight.
    mark: Option<PathBuf>,
    /// Of the session before: who was at the other end, and what is known of its rings.
    past: Option<(String, Past)>,
    /// The end of the peer's session has begun.
    retiring: Option<Retiring>,
    /// The process that connected it.
    client: Option<Arc<Process>>,
    /// The controller belongs to that process, which is recorded.
    claimed: bool,
    /// What the peer's messages may take.
    budget: Budget,
    refusals: RefusalLog,
    /// The session before; while it is there, there is no peer.
    ending: Option<Ending>,
    /// Who takes its place then.
    successor: Option<(UnixStream, Arc<Process>)>,
    /// What the driver of the session before has not heard: while there is none.
    unheard: Option<Unheard>,
    /// It comes from another process, and waits for [`Order::TakeOver`].
    inherits: bool,
    /// What was made of its session before it came.
    prepared: Option<Prepared>,
    /// Nothing is served, no peer is taken: see [`Order::Hold`].
    held: bool,
    /// Another process has everything.
    left: bool,
    /// To end as soon as no session is left.
    stopping: bool,
    /// Peers so far; names the session of the present one.
    sessions: u64,
    removals: HashMap<u64, Removal>,
    next_removal: u64,
    /// Until when peers wait in the socket's backlog.
    banned: Option<Instant>,
    /// How long it took to set the session up.
    setup: Duration,
}

/// Which descriptors are ready.
#[derive(Default)]
struct Ready {
    connection: bool,
    message: bool,
    control: bool,
    event: bool,
}

impl Server {
    fn run(mut self) {
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
            if ready.control {
                self.with_device(Device::control_kick);
            }
            if ready.event {
                self.with_device(Device::event_kick);
            }
            // Messages before connections: a peer that left makes room for the next.
            if ready.message
                && let Err(why) = self.handle_message()
            {
                self.end(&why);
            }
            if ready.message
                && let Some(peer) = &self.peer
            {
                let runs = peer.handler().device.runs();
                self.controller.started.store(runs, Ordering::Relaxed);
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
        let message = add(heard.map(Peer::fd));
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
        let pause = [pause, later, retired].into_iter().flatten().min();
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
            message: is(message),
            control: is(control) || polled || backlog,
            event: is(event) || backlog,
        }
    }

    /// Calls `f` with the device, if there is one: of the peer, or of the one before.
    fn with_device<R>(&mut self, f: impl FnOnce(&mut Device) -> R) -> Option<R> {
        match (&self.peer, &mut self.ending) {
            (Some(peer), _) => Some(f(&mut peer.handler().device)),
            (None, Some(ending)) => Some(f(&mut ending.device)),
            (None, None) => None,
        }
    }

    /// Tells the guest, or keeps it for one that may come back.
    fn tell(&mut self, event: Event) {
        if self.with_device(|device| device.tell(event)).is_none()
            && let Some(unheard) = &mut self.unheard
        {
            unheard.push(event, None);
        }
    }

    /// Takes the connections that wait, until one is served.
    fn accept(&mut self) {
        for _ in 0..MAX_ACCEPTS {
            let stream = match self.listener.as_ref().map(Listener::accept) {
                Some(Ok(Some(stream))) => stream,
                None | Some(Ok(None)) => return,
                Some(Err(why)) => {
                    let name = &self.controller.name;
                    tracing::error!(controller = name, "cannot accept a connection: {why}");
                    // Out of descriptors, most likely: do not spin.
                    std::thread::sleep(POLLED_CONTROL);
                    return;
                }
            };
            let comer = match Process::of_peer(&stream) {
                Ok(comer) => Arc::new(comer),
                Err(why) => {
                    let name = &self.controller.name;
                    tracing::debug!(controller = name, "a peer that cannot be told is gone: {why}");
                    continue;
                }
            };
            let admitted = self.controller.owner.lock().admit(&comer);
            match admitted {
                Ok(()) => return self.welcome(stream, comer),
                Err(why) => self.refusals.refused(&self.controller.name, &comer, &why),
            }
        }
        self.banned = self.banned.max(Some(Instant::now() + ACCEPT_PAUSE));
    }

    /// Serves a peer that may connect, if there is no other.
    fn welcome(&mut self, stream: UnixStream, comer: Arc<Process>) {
        let name = &self.controller.name;
        let there = self.client.as_ref().filter(|_| self.peer.is_some());
        match (&self.peer, there) {
            // Whoever has the connection of a process that ended is another.
            (Some(_), Some(client)) if client.is_gone() => {
                self.end(&End::Broken(format!("{client} has ended, and {comer} came")));
                self.successor = Some((stream, comer));
            }
            (Some(peer), Some(client)) if peer.spoke() => {
                let why =
                    format!("a second peer: {client} is connected, and a controller serves one VM");
                self.refusals.refused(name, &comer, &why);
                self.banned = Some(Instant::now() + POLLED_CONTROL);
            }
            (Some(_), _) => {
                self.end(&End::Broken("it never said anything, and another came".into()));
                self.successor = Some((stream, comer));
            }
            (None, _) if self.ending.is_some() => {
                let why = "I/O of the peer before has not ended; see what its volumes are on";
                self.refusals.refused(name, &comer, &why);
                self.banned = Some(Instant::now() + POLLED_CONTROL);
            }
            (None, _) => self.begin(stream, comer),
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
        let Some(peer) = &mut self.peer else { return Ok(()) };
        let since = Instant::now();
        let handled = peer.handle_message();
        let now = Instant::now();
        self.budget.charge(now - since, now);
        handled
    }

    /// Makes the controller the peer's own, recorded.
    fn claim(&mut self) -> Result<(), End> {
        let Some(client) = &self.client else { return Ok(()) };
        let controller = &self.controller;
        let refused = |why: Refusal| End::Broken(format!("{client} may not use it: {why}"));
        let own = {
            let mut owner = controller.owner.lock();
            owner.admit(client).map_err(refused)?;
            owner.is(client)
        };
        if !own {
            // Not under the lock, which others take to look: this waits for a disk.
            if let Some(journal) = &controller.journal {
                journal.record(&controller.name, client.identity()).map_err(|why| {
                    End::Broken(format!("that {client} owns it cannot be recorded: {why}"))
                })?;
            }
            let mut owner = controller.owner.lock();
            owner.admit(client).map_err(refused)?;
            owner.bind(Arc::clone(client));
            tracing::info!(controller = controller.name, "it belongs to {client}");
        }
        self.claimed = true;
        Ok(())
    }

    /// Somebody named an owner: a peer of another process has to go.
    fn owner_changed(&mut self) {
        self.claimed = false;
        let (Some(peer), Some(client)) = (&self.peer, &self.client) else { return };
        let stays = {
            let mut owner = self.controller.owner.lock();
            owner.is(client) || (!peer.spoke() && owner.admit(client).is_ok())
        };
        if !stays {
            let why = format!("it belongs to {client} no more");
            self.end(&End::Broken(why));
        }
    }

    fn begin(&mut self, stream: UnixStream, comer: Arc<Process>) {
        let since = Instant::now();
        let controller = Arc::clone(&self.controller);
        let connection = match Connection::new(stream) {
            Ok(connection) => connection,
            Err(why) => {
                tracing::error!(controller = controller.name, "cannot serve a peer: {why}");
                return;
            }
        };
        let (mark, marked) = Mark::of_peer(self.mark.clone(), &comer);
        let mut past =
            self.past.take().filter(|(peer, _)| peer == mark.peer()).unwrap_or_default().1;
        past.unknown |= marked;
        self.sessions += 1;
        let context = controller.context(self.sessions);
        let targets = controller.targets();
        let there = targets.iter().flatten().filter(|t| !t.leaving);
        let device = Device::new(&context, there, self.unheard.take(), past, mark);
        drop(targets);
        tracing::info!(controller = controller.name, "{comer} connected");
        self.peer = Some(Peer::new(connection, device));
        self.client = Some(comer);
        self.claimed = false;
        self.budget = Budget::new(Instant::now());
        self.controller.session.store(self.sessions, Ordering::Relaxed);
        self.setup = since.elapsed();
    }

    /// Begins the orderly end of the session, if there is one: its peer is left when what is in
    /// flight has ended, and the guest was told.
    fn retire(&mut self) {
        let Some(peer) = self.peer.as_ref().filter(|_| self.retiring.is_none()) else { return };
        self.next_removal += 1;
        let id = self.next_removal;
        peer.handler().device.retire(id);
        self.retiring =
            Some(Retiring { id, until: Instant::now() + self.controller.drain_timeout });
    }

    /// Ends the session: closes the connection at once, and the rest ([`Server::ended`]) when its
    /// I/O has ended. Memory that I/O may go to is never unmapped before, however long it takes.
    fn end(&mut self, why: &End) {
        let Some(peer) = self.peer.take() else { return };
        self.retiring = None;
        let since = Instant::now();
        self.next_removal += 1;
        let id = self.next_removal;
        // Before the peer sees that it is alone with its rings.
        let muted = matches!(why, End::Stuck(_) | End::Undrained);
        peer.handler().device.disconnect(id, muted);
        let device = peer.into_device();
        self.ending = Some(Ending { device, id, since, took: since.elapsed() });
        self.controller.started.store(false, Ordering::Relaxed);
        let name = &self.controller.name;
        match why {
            End::Disconnected | End::Drained => tracing::info!(controller = name, "{why}"),
            End::Broken(_) | End::Undrained => {
                tracing::warn!(controller = name, "the session ended: {why}")
            }
            End::Stuck(_) => tracing::error!(controller = name, "the session ended: {why}"),
        }
    }

    /// The last I/O of a session has ended: its rings and its memory go, targets that were being
    /// removed are free, and the next peer may come.
    fn ended(&mut self) {
        let Some(mut ending) = self.ending.take() else { return };
        let since = Instant::now();
        self.past = Some(ending.device.close_all());
        self.controller.refused().clear();
        self.unheard = ending.device.take_unheard();
        let took = ending.took + since.elapsed();
        drop(ending);
        // Not for the time that its I/O took.
        let pause = (self.setup + took.min(self.setup)) * COOLDOWN_FACTOR;
        self.banned = self.banned.max(Some(Instant::now() + pause));
        self.controller.session.store(0, Ordering::Relaxed);
        for (_, removal) in std::mem::take(&mut self.removals) {
            self.removed(removal);
        }
        if let Some((stream, comer)) = self.successor.take().filter(|_| !self.stopping) {
            self.begin(stream, comer);
        }
    }

    /// Does what was asked.
    fn obey(&mut self, order: Order) {
        match order {
            // Whoever waits for the reply sees that there is none.
            Order::Add { .. } if self.stopping => {}
            Order::Add { target, reply } => {
                if let Some(target) = target.take() {
                    _ = reply.send(self.add(target));
                }
            }
            Order::Remove { target, reply } => self.remove(target, reply),
            Order::Resized { target } => self.tell(Event::Resized(target)),
            Order::Accept => self.accepts = true,
            Order::OwnerChanged => self.owner_changed(),
            Order::Hold { patience, reply } => _ = reply.send(self.hold(patience)),
            Order::Release => self.release(),
            Order::HandOver { reply } => _ = reply.send(self.hand_over()),
            Order::Describe { reply } => _ = reply.send(self.describe()),
            Order::Prepare { coming, reply } => _ = reply.send(self.prepare(coming)),
            Order::TakeOver { inherited, reply } => {
                _ = reply.send(self.take_over(inherited));
            }
            Order::IsConnected { reply } => _ = reply.send(self.peer.is_some()),
            Order::Stop => {
                self.stopping = true;
                self.listener = None;
                self.retire();
            }
            Order::Drained { id } if id & TMF_ID != 0 => {
                self.with_device(|d| d.tmf_drained(id));
            }
            Order::Drained { id } if self.retiring.as_ref().is_some_and(|r| r.id == id) => {
                self.end(&End::Drained);
            }
            Order::Drained { id } if self.ending.as_ref().is_some_and(|e| e.id == id) => {
                self.ended();
            }
            Order::Drained { id } => {
                if let Some(removal) = self.removals.remove(&id) {
                    self.with_device(|d| d.close(removal.target));
                    self.removed(removal);
                }
            }
            Order::QueueFailed { session, queue, why } if session == self.sessions => {
                self.with_device(|d| d.queue_failed(queue, why));
            }
            Order::MemoryFault { session } if session == self.sessions => {
                let broken = self.peer.as_ref().is_some_and(|p| p.handler().device.is_broken());
                if broken {
                    self.end(&End::Broken("it truncated the memory that it shares".into()));
                }
            }
            Order::Blocked { session } if session == self.sessions => {
                self.end(&End::Broken("its eventfd blocks whoever writes to it".into()));
                self.banned = Some(Instant::now() + RECONNECT_BAN);
            }
            // Of a session that is over.
            Order::QueueFailed { .. } | Order::MemoryFault { .. } | Order::Blocked { .. } => {}
        }
    }

    fn add(&mut self, target: Target) -> Result<(), bdev::OpenError> {
        let number = target.number;
        if let Some(peer) = &self.peer {
            peer.handler().device.open(&target)?;
        }
        self.controller.targets()[usize::from(number)] = Some(target);
        self.tell(Event::Added(number));
        Ok(())
    }

    fn remove(&mut self, number: u8, reply: Option<Reply<()>>) {
        if let Some(removal) = self.removals.values_mut().find(|r| r.target == number) {
            // Asked a second time: this caller waits too, the first one no longer matters.
            removal.reply = reply.or(removal.reply.take());
            return;
        }
        if let Some(target) = &mut self.controller.targets()[usize::from(number)] {
            target.leaving = true;
        }
        self.next_removal += 1;
        let (id, removal) = (self.next_removal, Removal { target: number, reply });
        match self.with_device(|d| d.leave(number, id)) == Some(true) {
            true => _ = self.removals.insert(id, removal),
            false => self.removed(removal),
        }
    }

    /// Nothing uses the target any more: it is forgotten, and the guest told.
    fn removed(&mut self, removal: Removal) {
        self.tell(Event::Removed(removal.target));
        let target = self.controller.targets()[usize::from(removal.target)].take();
        drop(target);
        if let Some(reply) = removal.reply {
            _ = reply.send(());
        }
    }
}

fn fd_of(fd: Option<std::os::fd::BorrowedFd<'_>>) -> Option<PollFd<'_>> {
    fd.map(|fd| PollFd::from_borrowed_fd(fd, PollFlags::IN))
}
