//! The sessions of a controller, one after the other: how one begins, and how it ends.

use std::os::unix::net::UnixStream;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use peer::Process;

use super::server::Server;
use crate::device::Device;
use crate::past::Mark;
use crate::session::{Connection, End, Peer};

/// How many times as long as a session took to set up and to end nobody may connect: peers that
/// come and go keep the reactors from other guests for a small part of the time.
const COOLDOWN_FACTOR: u32 = 4;

/// A session that is about to end: its peer is there until what is in flight has ended.
pub(super) struct Retiring {
    /// Of the countdown of its I/O.
    pub(super) id: u64,
    /// When it ends whatever is in flight.
    pub(super) until: Instant,
}

/// A session whose peer is gone and whose I/O has not all ended.
pub(super) struct Ending {
    pub(super) device: Device,
    /// Of the countdown of its I/O.
    pub(super) id: u64,
    pub(super) since: Instant,
    /// How long its end kept the reactors, so far.
    pub(super) took: Duration,
}

impl Server {
    pub(super) fn begin(&mut self, stream: UnixStream, comer: Arc<Process>) {
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
        past.unknown = past.unknown.union(marked);
        self.sessions += 1;
        (self.retry_at, self.suspensions_logged) = (None, 0);
        let context = controller.context(self.sessions, self.control_budget);
        let targets = controller.targets();
        let there = targets.iter().flatten().filter(|t| !t.leaving);
        let device = Device::new(&context, there, self.unheard.take(), past, mark);
        drop(targets);
        tracing::info!(controller = controller.name, "{comer} connected");
        self.peer = Some(Peer::new(connection, device));
        self.client = Some(comer);
        self.claimed = false;
        self.controller.session.store(self.sessions, Ordering::Relaxed);
        self.setup = since.elapsed();
    }

    /// Begins the orderly end of the session, if there is one: its peer is left when what is in
    /// flight has ended, and the guest was told.
    pub(super) fn retire(&mut self) {
        let Some(peer) = self.peer.as_ref().filter(|_| self.retiring.is_none()) else { return };
        self.next_removal += 1;
        let id = self.next_removal;
        peer.handler().device.retire(id, self.kept.is_left());
        self.retiring =
            Some(Retiring { id, until: Instant::now() + self.controller.drain_timeout });
    }

    /// Ends the session: closes the connection at once, and the rest ([`Server::ended`]) when its
    /// I/O has ended. Memory that I/O may go to is never unmapped before, however long it takes.
    pub(super) fn end(&mut self, why: &End) {
        let Some(peer) = self.peer.take() else { return };
        self.retiring = None;
        let leaves = self.kept.is_left() && matches!(why, End::Drained | End::Undrained);
        if !leaves {
            self.end_kept();
        }
        let since = Instant::now();
        self.next_removal += 1;
        let id = self.next_removal;
        // Before the peer sees that it is alone with its rings.
        let muted = matches!(why, End::Stuck(_) | End::Undrained);
        peer.handler().device.disconnect(id, muted);
        if !leaves {
            peer.shut();
        }
        let device = peer.into_device();
        self.ending = Some(Ending { device, id, since, took: since.elapsed() });
        self.controller.started.store(false, Ordering::Relaxed);
        let name = &self.controller.name;
        match why {
            End::Drained | End::Undrained if leaves => {
                tracing::info!(controller = name, "its VM waits for the next target");
            }
            End::Disconnected | End::Drained => tracing::info!(controller = name, "{why}"),
            End::Broken(_) | End::Undrained => {
                tracing::warn!(controller = name, "the session ended: {why}")
            }
            End::Stuck(_) => tracing::error!(controller = name, "the session ended: {why}"),
        }
    }

    /// The last I/O of a session has ended: its rings and its memory go, targets that were being
    /// removed are free, and the next peer may come.
    pub(super) fn ended(&mut self) {
        let Some(mut ending) = self.ending.take() else { return };
        let since = Instant::now();
        self.past = Some(ending.device.close_all());
        self.control_budget = ending.device.control_budget;
        self.controller.refused().clear();
        self.controller.overtaken.store(false, Ordering::Relaxed);
        self.controller.forget_suspensions();
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
}
