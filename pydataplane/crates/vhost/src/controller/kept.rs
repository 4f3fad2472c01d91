//! The session as it is kept for the process after this one, and how that one goes on with it.
//!
//! A target that is killed, or stopped, leaves its connections to whoever keeps them, where there is
//! somebody ([`crate::keeper`]): no front end notices. The next one goes on as if the front end had connected
//! again and said the same as before: the in-flight region says where each ring stands. A session with a
//! ring that no region tells of is not kept, nor is one whose peer has said nothing yet.

use std::io;
use std::net::Shutdown;
use std::os::fd::AsFd;
use std::os::unix::net::UnixStream;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use bdev::IoError;
use peer::Process;

use super::server::Server;
use crate::front::DISK;
use crate::handover::{ControllerState, Fds, Inherited};
use crate::keeper::{Record, SessionKeeper};
use crate::session::Peer;
use crate::stats::ControllerStats;

/// How long a peer says nothing before what it said is kept. Front ends say many things at a time.
const QUIET: Duration = Duration::from_millis(2);
/// How long after a failure it is tried again.
const AGAIN: Duration = Duration::from_secs(5);

/// What is kept of the present session.
pub(super) struct KeptSession {
    keeper: Option<Arc<dyn SessionKeeper>>,
    record: Option<Record>,
    /// When it is to be kept anew.
    due: Option<Instant>,
    /// When whoever may have one of the process before is asked again.
    asks_at: Option<Instant>,
    /// The last time it was not, which was told.
    failed: bool,
    /// The session is left to the next process, with what is in flight marked.
    left: bool,
}

impl KeptSession {
    /// Nothing yet. Without a `keeper` nothing ever is.
    pub(super) fn new(keeper: Option<Arc<dyn SessionKeeper>>) -> Self {
        KeptSession { keeper, record: None, due: None, asks_at: None, failed: false, left: false }
    }

    /// Whether the session is not ended, but left to the next process.
    pub(super) fn is_left(&self) -> bool {
        self.left
    }

    /// When something is to be done.
    pub(super) fn due(&self) -> Option<Instant> {
        [self.due, self.asks_at].into_iter().flatten().min()
    }

    /// All is to be kept anew, soon.
    pub(super) fn renew(&mut self) {
        if self.keeper.is_some() {
            self.due = Some(Instant::now() + QUIET);
        }
    }
}

impl Server {
    /// The peer is about to change what it says.
    pub(super) fn begin_change(&mut self) {
        self.controller.kept.store(false, Ordering::Relaxed);
        let begun = self.kept.record.as_ref().map_or(Ok(()), Record::begin_change);
        if let Err(why) = &begun {
            tracing::error!(controller = self.controller.name, "its record: {why}");
        }
        if begun.is_err() {
            self.end_kept();
        }
    }

    /// Goes on with a session that could not be asked for, or keeps the present one, if the peer has said
    /// all for now.
    pub(super) fn keep_if_due(&mut self) {
        if self.kept.asks_at.is_some_and(|at| Instant::now() >= at) {
            self.resume_kept();
        }
        if self.kept.left || self.kept.due.is_none_or(|due| Instant::now() < due) {
            return;
        }
        self.kept.due = None;
        let kept = self.keep();
        let held = matches!(kept, Ok(true));
        match kept {
            Ok(true) => self.kept.failed = false,
            Ok(false) => self.end_kept(),
            Err(why) => {
                if !std::mem::replace(&mut self.kept.failed, true) {
                    let name = &self.controller.name;
                    tracing::error!(controller = name, "its VM's connection is not kept: {why}");
                }
                self.end_kept();
                self.kept.due = Some(Instant::now() + AGAIN);
            }
        }
        self.controller.kept.store(held, Ordering::Relaxed);
    }

    /// This process ends: what is kept stays so.
    pub(super) fn leaves_kept(&mut self) {
        if self.kept.due.is_some() {
            self.kept.due = Some(Instant::now());
            self.keep_if_due();
        }
        self.kept.left = self.controller.kept.load(Ordering::Relaxed) && self.retiring.is_none();
    }

    /// Whether there was something to keep.
    fn keep(&mut self) -> io::Result<bool> {
        let Some(keeper) = &self.kept.keeper else { return Ok(false) };
        let going = self.peer.as_ref().filter(|peer| peer.spoke() && self.retiring.is_none());
        let Some(peer) = going.filter(|peer| peer.handler().device.is_tracked()) else {
            return Ok(false);
        };
        let mut fds = Fds::default();
        let state = peer.describe_all(&mut fds).map_err(io::Error::other)?;
        let record = match &mut self.kept.record {
            Some(record) => record,
            none => none.insert(Record::new()?),
        };
        let all: Vec<_> =
            std::iter::once(record.as_fd()).chain(fds.iter().map(AsFd::as_fd)).collect();
        // What it has from before has other descriptors.
        record.begin_change()?;
        keeper.keep(&self.controller.name, &all)?;
        record.write(&state)?;
        Ok(true)
    }

    /// Nobody has the session any more, be it kept by this process or by the one that handed it over.
    pub(super) fn forget_kept(&self) {
        if let Some(keeper) = &self.kept.keeper {
            keeper.end(&self.controller.name);
        }
    }

    /// The session ends: nobody goes on with it.
    pub(super) fn end_kept(&mut self) {
        self.kept.due = None;
        // What is left of it says that it is not to be gone on with.
        let record = self.kept.record.take();
        _ = record.as_ref().map(Record::begin_change);
        self.controller.kept.store(false, Ordering::Relaxed);
        if record.is_some() {
            self.forget_kept();
        }
    }

    /// A VM that was paused for an I/O error, and whose region alone tells of requests: it is not to be
    /// saved or migrated, which would lose them.
    fn tell_overtaken(&mut self) {
        let overtaken = |peer: &Peer| peer.handler().device.is_overtaken();
        if self.peer.as_ref().is_some_and(overtaken) {
            self.suspended(DISK, IoError::WriteMedium);
        }
    }

    /// The controller goes, and with it the session that nobody went on with.
    pub(super) fn end_unresumed(&self) {
        if self.peer.is_none() && !self.stopping {
            self.forget_kept();
        }
    }

    /// Goes on with the session of a process that has ended, if it was kept.
    pub(super) fn resume_kept(&mut self) {
        self.kept.asks_at = None;
        let free = self.peer.is_none() && self.ending.is_none() && !self.inherits;
        let Some(keeper) = self.kept.keeper.clone().filter(|_| free && !self.stopping) else {
            return;
        };
        let name = self.controller.name.clone();
        let mut fds = match keeper.take(&name) {
            Ok(Some(fds)) if !fds.is_empty() => fds,
            Ok(_) => return,
            Err(why) => {
                if !std::mem::replace(&mut self.kept.failed, true) {
                    tracing::error!(controller = name, "whether a VM waits is not known: {why}");
                }
                self.kept.asks_at = Some(Instant::now() + AGAIN);
                return;
            }
        };
        let connection = fds.get(1).and_then(|fd| fd.try_clone().ok()).map(UnixStream::from);
        // From the first message on it is not whole while there is one.
        let record = self.kept.record.insert(Record::adopt(fds.remove(0)));
        let (session, fds) = (record.read(), Fds::new(fds));
        let resumed = session.and_then(|session| {
            let connection = connection.as_ref().ok_or("it came without its connection")?;
            let client = Process::of_peer(connection).map_err(|why| why.to_string())?;
            let admitted = self.controller.owner.lock().admit(&client);
            admitted.map_err(|why| format!("{client} may not connect: {why}"))?;
            let state = ControllerState {
                name: name.clone(),
                socket: self.controller.socket.path.clone(),
                listener: 0,
                sessions: self.sessions + 1,
                session: Some(session),
                unheard: None,
                targets: Vec::new(),
                counters: ControllerStats::default(),
            };
            self.go_on(Inherited { state, fds })
        });
        self.tell_overtaken();
        self.release();
        match (resumed, &self.client) {
            (Ok(()), Some(client)) if self.peer.is_some() => {
                tracing::info!(controller = name, "{client} goes on, its connection was kept");
                self.kept.renew();
                return;
            }
            (Ok(()), _) => {}
            (Err(why), _) => {
                tracing::warn!(controller = name, "the kept connection of its VM ends: {why}");
            }
        }
        // Whoever else has descriptors of it.
        _ = connection.map(|connection| connection.shutdown(Shutdown::Both));
        self.end_kept();
    }
}
