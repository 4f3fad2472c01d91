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
use std::collections::BTreeSet;
use std::io;
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::mpsc::{Receiver, channel};
use std::thread::JoinHandle;
use std::time::Duration;

use reactor::Handle;

use crate::budget::Budget;
use crate::coalescing::SharedCoalescing;
use crate::defs::MAX_TARGETS;
use crate::device::SessionContext;
use crate::front::Front;
use crate::handover::{ControllerState, TargetState};
use crate::keeper::SessionKeeper;
use crate::lun::Target;
use crate::mailbox::{Mailbox, Order, mailbox};
use crate::owner::{Owner, OwnerInfo, OwnerJournal};
use crate::placement::Placement;
use crate::socket::{Listener, SocketOptions};
use crate::stats::{ControllerCounters, ControllerStats};

/// Part of the time that a method may wait for which an orderly end waits for I/O in flight, with
/// the peer still connected. The rest of it is for closing.
const DRAIN_SHARE: (u32, u32) = (4, 5);

mod admission;
mod handover;
mod kept;
mod orders;
mod server;
mod sessions;
mod suspended;

use server::{Begin, Server};

/// How long is waited for I/O in flight. When it does not end, whoever waited goes on, and the I/O
/// keeps what it needs: memory of a VM is never unmapped, and a bdev never closed, before.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Timeouts {
    /// By a method of [`crate::Controllers`]. Shorter than its caller's, who is to hear how it went.
    pub method: Duration,
    /// By a message of a VM: a stop of its rings, a change of its memory. Its QEMU stands still
    /// meanwhile; then its session ends. Longer than disks take to give a request up.
    pub message: Duration,
    /// By requests of a VM that wait for room behind others of it: data of those that have no answer after
    /// that time, or after twice that, takes no room from its other disks any more. Longer than disks take
    /// for what they are given.
    pub answer: Duration,
}

impl Default for Timeouts {
    fn default() -> Self {
        Timeouts {
            method: Duration::from_secs(25),
            message: Duration::from_secs(120),
            answer: Duration::from_millis(500),
        }
    }
}

/// What a controller keeps on disk.
pub(crate) struct Records {
    /// Where its owner is recorded.
    pub(crate) journal: Option<Arc<dyn OwnerJournal>>,
    /// File of the mark that requests may be in flight.
    pub(crate) mark: Option<PathBuf>,
    /// Who keeps its sessions, for the process after this one.
    pub(crate) keeper: Option<Arc<dyn SessionKeeper>>,
}

/// How a controller begins.
pub(crate) struct Setup {
    /// What its guest sees.
    pub(crate) front: Front,
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
    /// What its guest sees.
    pub(crate) front: Front,
    /// Its disk is still to come.
    pub(crate) awaits_disk: AtomicBool,
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
    /// When its guest is called.
    pub(crate) coalescing: Arc<SharedCoalescing>,
    /// Where the queues of its session run.
    pub(crate) placement: Arc<Placement>,
    /// Number of the session, and whether its device runs; 0: nobody is connected.
    session: AtomicU64,
    started: AtomicBool,
    /// Its connection is kept, for the process after this one.
    pub(crate) kept: AtomicBool,
    /// Requests in flight are tracked for that, if the peer does not track them.
    keeps: bool,
    /// As [`crate::SuspendedTarget::overtaken`].
    pub(crate) overtaken: AtomicBool,
    owner: Mutex<Owner>,
    /// `None`: owners are not recorded.
    journal: Option<Arc<dyn OwnerJournal>>,
    pub(crate) mailbox: Mailbox,
    /// How long a message of a peer may wait for I/O in flight.
    message_timeout: Duration,
    /// After which data of a request that has no answer takes no room any more.
    answer_timeout: Duration,
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
        let Setup { front, accepts, timeouts, records, inherits } = setup;
        let (mailbox, inbox) = mailbox()?;
        let counters: Vec<Arc<ControllerCounters>> =
            (0..=reactors.len()).map(|_| Arc::default()).collect();
        let controller = Arc::new(Controller {
            name: name.to_owned(),
            front,
            awaits_disk: AtomicBool::new(false),
            socket,
            targets: Mutex::new((0..MAX_TARGETS).map(|_| None).collect()),
            reserved: Mutex::default(),
            counters,
            coalescing: Arc::default(),
            placement: Placement::new(),
            inherited: Mutex::default(),
            reactors,
            session: AtomicU64::new(0),
            started: AtomicBool::new(false),
            kept: AtomicBool::new(false),
            keeps: records.keeper.is_some(),
            overtaken: AtomicBool::new(false),
            owner: Mutex::default(),
            journal: records.journal,
            mailbox,
            refused: Mutex::default(),
            message_timeout: timeouts.message,
            answer_timeout: timeouts.answer,
            drain_timeout: timeouts.method * DRAIN_SHARE.0 / DRAIN_SHARE.1,
        });
        let begin = Begin {
            listener,
            accepts,
            inbox,
            mark: records.mark,
            keeper: records.keeper,
            inherits,
        };
        let server = Server::new(Arc::clone(&controller), begin);
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

    /// The session goes on without those targets that are not there yet.
    fn forget_sessions(&self) {
        for target in &mut *self.inherited.lock() {
            (target.nexus, target.suspended) = (None, None);
        }
    }

    /// What a session of that number needs, whose task management may take what is left of
    /// `control_budget`.
    fn context(&self, session: u64, control_budget: Budget) -> SessionContext<'_> {
        SessionContext {
            name: &self.name,
            front: self.front,
            session,
            reactors: &self.reactors,
            counters: &self.counters,
            coalescing: &self.coalescing,
            placement: &self.placement,
            mailbox: &self.mailbox,
            message_timeout: self.message_timeout,
            answer_timeout: self.answer_timeout,
            keeps: self.keeps,
            control_budget,
        }
    }

    /// The connected peer: its number, and whether any of its request queues runs.
    pub(crate) fn session(&self) -> Option<(u64, bool)> {
        let session = self.session.load(Ordering::Relaxed);
        (session != 0).then(|| (session, self.started.load(Ordering::Relaxed)))
    }

    /// Request queues of the session that run, each with the CPU of its reactor.
    pub(crate) fn queues(&self) -> Vec<(u16, usize)> {
        let cpu = |place: usize| self.reactors.get(place).map(cpu_of);
        let running = self.placement.running();
        running.filter_map(|(queue, place, _)| Some((queue, cpu(place)?))).collect()
    }

    /// Queues of the session that were not started, and why.
    pub(crate) fn refused(&self) -> MutexGuard<'_, Vec<(u16, String)>> {
        self.refused.lock()
    }

    /// What it did since it was created.
    pub(crate) fn stats(&self) -> ControllerStats {
        self.counters.iter().map(Arc::as_ref).collect()
    }
}

/// The CPU of a reactor; one that is not pinned counts as the CPU of its index.
pub(crate) fn cpu_of(reactor: &Handle) -> usize {
    reactor.cpu().unwrap_or_else(|| reactor.index())
}
