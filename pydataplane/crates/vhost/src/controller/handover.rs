//! A controller that leaves for another process, or came from one.

use std::os::unix::net::UnixStream;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use peer::Process;

use super::Server;
use crate::device::{Device, SessionContext};
use crate::events::Unheard;
use crate::handover::{
    ControllerHandover, ControllerState, ControllerTotals, Fds, LunTotals, TargetState,
};
use crate::lun::Target;
use crate::past::{Mark, Past};
use crate::session::{Peer, TakeOverFailed};

/// A controller that came from another process. Its listening socket is taken out already.
pub(crate) struct Inherited {
    pub(crate) state: ControllerState,
    pub(crate) fds: Fds,
}

impl Server {
    /// Serves nothing any more: no peer, no message, no request; those in flight have ended then.
    pub(super) fn hold(&mut self, patience: Duration) -> Result<(), String> {
        let name = &self.controller.name;
        if self.ending.is_some() || self.retiring.is_some() || self.stopping {
            return Err(format!("I/O of the VM that left controller {name} has not ended"));
        }
        if let Some(peer) = &self.peer {
            let held = peer.handler().device.hold(patience);
            held.map_err(|why| format!("controller {name}: {why}"))?;
        }
        self.held = true;
        Ok(())
    }

    /// Goes on after [`Server::hold`] or [`Server::take_over`].
    pub(super) fn release(&mut self) {
        self.held = false;
        self.with_device(Device::release);
        // What the process before could not do any more.
        if let Some(peer) = &self.peer {
            let runs = peer.handler().device.runs();
            self.controller.started.store(runs, Ordering::Relaxed);
            let refused = peer.handler().device.refused();
            *self.controller.refused() = refused;
        }
    }

    /// Takes everything apart for another process. The thread returns; the socket's file stays.
    pub(super) fn hand_over(&mut self) -> Result<ControllerHandover, String> {
        let name = self.controller.name.clone();
        let listener = self.listener.take().filter(|_| self.held);
        let listener = listener.ok_or_else(|| format!("controller {name} is not held"))?;
        let path = self.controller.socket.path.clone();
        let mut fds = Fds::default();
        let listener = listener.hand_over().map_err(|e| format!("controller {name}: {e}"))?;
        let listener = fds.put(listener);
        // Nothing is in flight, so what was being removed is free.
        for (_, removal) in std::mem::take(&mut self.removals) {
            self.with_device(|d| d.close(removal.target));
            self.removed(removal);
        }
        let targets = self.describe_targets();
        self.left = true;
        let session = match self.peer.take() {
            Some(peer) => {
                let (mut device, state) = peer.hand_over(&mut fds);
                device.close_all();
                self.unheard = device.take_unheard();
                Some(state.map_err(|why| format!("controller {name}: {why}"))?)
            }
            None => None,
        };
        let mut counters = ControllerTotals::default();
        self.controller.counters.iter().for_each(|c| c.add_to(&mut counters));
        let state = ControllerState {
            name,
            socket: path,
            listener,
            sessions: self.sessions,
            session,
            unheard: self.unheard.as_ref().map(Unheard::state),
            targets,
            counters,
        };
        Ok(ControllerHandover { state, fds })
    }

    fn describe_targets(&self) -> Vec<TargetState> {
        let handler = self.peer.as_ref().map(Peer::handler);
        let targets = self.controller.targets();
        let describe = |target: &Target| {
            let mut counters = LunTotals::default();
            target.counters.iter().for_each(|c| c.add_to(&mut counters));
            TargetState {
                number: target.number,
                attached_at: target.times.attached_at(),
                event_at: target.times.event_at(),
                resize_event_at: target.times.resize_event_at(),
                nexus: handler.as_ref().and_then(|h| h.device.nexus(target.number)),
                counters,
            }
        };
        targets.iter().flatten().map(describe).collect()
    }

    /// Goes on with what came from another process, when all targets are there; held until
    /// [`Server::release`].
    pub(super) fn take_over(&mut self) -> Result<(), String> {
        let Some(Inherited { state, mut fds }) = self.inherited.take() else { return Ok(()) };
        let controller = Arc::clone(&self.controller);
        let name = &controller.name;
        let targets = controller.targets();
        let unheard = self.unheard_elsewhere.take().map(|unheard| {
            let times = |target: u8| {
                let target = targets.get(usize::from(target)).and_then(Option::as_ref);
                target.map(|t| Arc::clone(&t.times))
            };
            Unheard::restored(&unheard, times)
        });
        self.held = true;
        let Some(session) = &state.session else {
            self.unheard = unheard;
            return Ok(());
        };
        let stream = fds.take(session.socket);
        let stream = UnixStream::from(stream.map_err(|e| format!("controller {name}: {e}"))?);
        let client = match Process::of_peer(&stream) {
            Ok(client) => Arc::new(client),
            Err(why) => {
                tracing::info!(controller = name, "the peer left during the upgrade: {why}");
                return Ok(());
            }
        };
        // What was in flight has ended and was told, whatever a mark says.
        let (mark, _) = Mark::of_peer(self.mark.clone(), &client);
        let context = SessionContext {
            name,
            session: self.sessions,
            reactors: &controller.reactors,
            counters: &controller.counters,
            mailbox: &controller.mailbox,
            message_timeout: controller.message_timeout,
        };
        let there = targets.iter().flatten().filter(|t| !t.leaving);
        let mut device = Device::new(&context, there.clone(), unheard, Past::default(), mark);
        targets.iter().flatten().for_each(Target::forget_inherited);
        if let Some(target) = there.clone().find(|t| device.nexus(t.number).is_none()) {
            let (number, bdev) = (target.number, target.bdev_name());
            device.close_all();
            return Err(format!("target {number} of controller {name}: {bdev} cannot be opened"));
        }
        drop(targets);
        match Peer::take_over(session, stream, &mut fds, device) {
            Ok(peer) => {
                // Whose the controller is was restored with it.
                self.claimed = controller.owner.lock().is(&client);
                self.client = Some(client);
                self.peer = Some(peer);
                self.controller.session.store(self.sessions, Ordering::Relaxed);
                self.setup = Duration::ZERO;
                Ok(())
            }
            Err(failed) => {
                let TakeOverFailed { why, mut device } = *failed;
                device.close_all();
                Err(format!("the session of controller {name} does not go on: {why}"))
            }
        }
    }
}
