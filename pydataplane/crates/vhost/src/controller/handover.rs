//! A controller that leaves for another process, or came from one.

use std::os::fd::AsFd;
use std::os::unix::net::UnixStream;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use peer::Process;

use super::server::{Prepared, Server};
use crate::device::Device;
use crate::events::Unheard;
use crate::handover::{
    ControllerHandover, ControllerState, DroppedLater, FdIndex, Fds, Inherited, SessionState,
    TargetState,
};
use crate::lun::Target;
use crate::past::{Mark, Past};
use crate::session::{Peer, TakeOverFailed};

/// How long it may take at most until nothing is in flight, of a controller whose I/O does not take
/// long. Less than its device waits before it has the guest send again what did not begin.
const QUICK: Duration = Duration::from_millis(15);

impl Server {
    /// Serves nothing any more: no peer, no message, no request; those in flight have ended then.
    /// They have until `until`; an order that comes later, as its thread had something else to do, holds
    /// nobody.
    pub(super) fn hold(&mut self, until: Instant) -> Result<(), String> {
        let left = || until.saturating_duration_since(Instant::now());
        if left().is_zero() {
            return Err(format!("controller {} had no time to hold still", self.controller.name));
        }
        // A VM that left a moment ago, or does again and again, is no reason to give up.
        if self.ending.as_ref().is_some_and(|ending| ending.device.wait_until_ended(left())) {
            self.ended();
        }
        let name = &self.controller.name;
        if self.ending.is_some() || self.retiring.is_some() || self.stopping {
            return Err(format!("I/O of the VM that left controller {name} has not ended"));
        }
        if let Some(peer) = &self.peer {
            let held = peer.handler().device.hold(left());
            held.map_err(|why| format!("controller {name}: {why}"))?;
        }
        self.held = true;
        Ok(())
    }

    /// As [`Server::hold`], but goes on at once if its I/O ended quickly; whether it is held.
    pub(super) fn hold_if_slow(&mut self, until: Instant) -> Result<bool, String> {
        if self.held {
            return Ok(true);
        }
        let since = Instant::now();
        self.hold(until)?;
        let slow = since.elapsed() > QUICK;
        if !slow {
            self.release();
        }
        Ok(slow)
    }

    /// Goes on after [`Server::hold`] or [`Server::take_over`]; nothing where it was not held. A session
    /// that is about to end, for one, takes nothing more.
    pub(super) fn release(&mut self) {
        if !std::mem::take(&mut self.held) {
            return;
        }
        self.peer.iter_mut().for_each(Peer::was_held);
        // What is kept is not whole since it was handed over.
        self.kept.renew();
        self.with_device(Device::release);
        // What the process before could not do any more.
        if let Some(peer) = &self.peer {
            let runs = peer.handler().device.runs();
            self.controller.started.store(runs, Ordering::Relaxed);
            if runs {
                // What was suspended is sent again by the guest.
                self.controller.forget_suspensions();
            }
            let refused = peer.handler().device.refused();
            *self.controller.refused() = refused;
        }
    }

    /// What there is, for a process that is about to take it over: not yet where its rings stand.
    pub(super) fn describe(&self) -> Result<ControllerHandover, String> {
        let name = &self.controller.name;
        let failed = |why: &dyn std::fmt::Display| format!("controller {name}: {why}");
        let listener = self.listener.as_ref().ok_or_else(|| failed(&"it is being deleted"))?;
        let mut fds = Fds::default();
        let listener = listener.as_fd().try_clone_to_owned().map_err(|e| failed(&e))?;
        let listener = fds.put(listener);
        let session = self.peer.as_ref().map(|peer| peer.describe(&mut fds)).transpose();
        let session = session.map_err(|why| failed(&why))?;
        Ok(self.handover(listener, session, Vec::new(), fds, DroppedLater::default()))
    }

    fn handover(
        &self,
        listener: FdIndex,
        session: Option<SessionState>,
        targets: Vec<TargetState>,
        fds: Fds,
        dropped_later: DroppedLater,
    ) -> ControllerHandover {
        let state = ControllerState {
            name: self.controller.name.clone(),
            socket: self.controller.socket.path.clone(),
            listener,
            sessions: self.sessions,
            session,
            unheard: self.unheard.as_ref().map(Unheard::state),
            targets,
            counters: self.controller.stats(),
        };
        ControllerHandover { state, fds, dropped_later }
    }

    /// Takes everything apart for another process. The thread returns; the socket's file stays.
    pub(super) fn hand_over(&mut self) -> Result<ControllerHandover, String> {
        let name = self.controller.name.clone();
        let listener = self.listener.take().filter(|_| self.held);
        let listener = listener.ok_or_else(|| format!("controller {name} is not held"))?;
        // Whoever goes on keeps it anew, unless that is an older program: then nobody may.
        self.begin_change();
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
        let mut dropped_later = DroppedLater::default();
        let session = match self.peer.take() {
            Some(peer) => {
                let (mut device, state) = peer.hand_over(&mut fds);
                device.leave_all();
                self.unheard = device.take_unheard();
                let (state, of_session) =
                    state.map_err(|why| format!("controller {name}: {why}"))?;
                dropped_later = of_session;
                Some(state)
            }
            None => None,
        };
        Ok(self.handover(listener, session, targets, fds, dropped_later))
    }

    fn describe_targets(&self) -> Vec<TargetState> {
        let handler = self.peer.as_ref().map(Peer::handler);
        let targets = self.controller.targets();
        let describe = |target: &Target| TargetState {
            number: target.number,
            attached_at: target.times.attached_at(),
            event_at: target.times.event_at(),
            resize_event_at: target.times.resize_event_at(),
            nexus: handler.as_ref().and_then(|h| h.device.nexus(target.number)),
            counters: target.totals(),
            suspended: target.suspended().map(Into::into),
        };
        targets.iter().flatten().map(describe).collect()
    }

    /// Makes what takes time of a session that is about to come, without its targets and rings: its
    /// guest's memory is mapped.
    pub(super) fn prepare(&mut self, coming: Option<Inherited>) -> Result<(), String> {
        let Some(Inherited { state, mut fds }) = coming.filter(|_| self.inherits) else {
            return Ok(());
        };
        // Where it ended, it does when it comes.
        let made = self.make_session(&state, &mut fds);
        self.prepared = made.map_err(|failure| failure.why)?;
        Ok(())
    }

    /// The session that `state` describes, without targets and rings; none where it has ended.
    fn make_session(
        &self,
        state: &ControllerState,
        fds: &mut Fds,
    ) -> Result<Option<Prepared>, NotMade> {
        let Some(session) = &state.session else { return Ok(None) };
        let controller = &self.controller;
        let failed = |why: &dyn std::fmt::Display, is_the_peers| {
            let name = &controller.name;
            let why = format!("the session of controller {name} does not go on: {why}");
            NotMade { why, is_the_peers }
        };
        let stream = UnixStream::from(fds.take(session.socket).map_err(|e| failed(&e, false))?);
        let client = match Process::of_peer(&stream) {
            Ok(client) => Arc::new(client),
            Err(why) => {
                let name = &controller.name;
                tracing::info!(controller = name, "the peer left during the upgrade: {why}");
                return Ok(None);
            }
        };
        let context = controller.context(state.sessions, self.control_budget);
        // No targets yet, and no files that another process still needs.
        let none = std::iter::empty();
        let device = Device::new(&context, none, None, Past::default(), Mark::default());
        match Peer::prepare(session, stream, fds, device) {
            Ok(peer) => Ok(Some(Prepared { sessions: state.sessions, peer, client })),
            Err(failure) => {
                let TakeOverFailed { why, is_the_peers, mut device } = *failure;
                device.leave_all();
                Err(failed(&why, is_the_peers))
            }
        }
    }

    /// Goes on with what came from another process, when all targets are there; held until
    /// [`Server::release`].
    pub(super) fn take_over(&mut self, inherited: Option<Inherited>) -> Result<(), String> {
        if !std::mem::take(&mut self.inherits) {
            return Ok(());
        }
        let missing =
            || format!("controller {} was announced and has not come", self.controller.name);
        self.go_on(inherited.ok_or_else(missing)?)
    }

    /// Goes on with `inherited`; held until [`Server::release`].
    pub(super) fn go_on(&mut self, inherited: Inherited) -> Result<(), String> {
        let controller = Arc::clone(&self.controller);
        let name = &controller.name;
        let Inherited { state, mut fds } = inherited;
        self.sessions = state.sessions;
        self.held = true;
        controller.forget_sessions();
        let targets = controller.targets();
        let unheard = state.unheard.as_ref().map(|unheard| {
            let times = |target: u8| {
                let target = targets.get(usize::from(target)).and_then(Option::as_ref);
                target.map(|t| Arc::clone(&t.times))
            };
            Unheard::restored(unheard, times)
        });
        let prepared = match self.prepared.take() {
            Some(prepared) if prepared.is_of(&state, &fds) => Some(prepared),
            other => {
                if let Some(Prepared { peer, .. }) = other {
                    peer.into_device().leave_all();
                }
                match self.make_session(&state, &mut fds) {
                    Err(NotMade { why, is_the_peers: true }) => {
                        tracing::warn!(controller = name, "{why}; the peer is disconnected");
                        self.forget_kept();
                        None
                    }
                    made => made.map_err(|failure| failure.why)?,
                }
            }
        };
        let (Some(Prepared { mut peer, client, .. }), Some(session)) = (prepared, &state.session)
        else {
            targets.iter().flatten().for_each(Target::begin_anew);
            self.unheard = unheard;
            return Ok(());
        };
        // What was in flight has ended and was told, whatever the mark says; what nobody knows of is in
        // the state of the session.
        let (mark, _) = Mark::of_peer(self.mark.clone(), &client);
        let there: Vec<_> = targets.iter().flatten().filter(|t| !t.leaving).collect();
        peer.go_on(session);
        let taken = peer.handler().device.take_over(session, &mut fds, &there, unheard, mark);
        targets.iter().flatten().for_each(Target::forget_inherited);
        drop(targets);
        if let Err(failure) = taken {
            let mut device = peer.into_device();
            device.leave_all();
            let why = format!("the session of controller {name} does not go on: {failure}");
            if !failure.is_the_peers() {
                return Err(why);
            }
            tracing::warn!(controller = name, "{why}; the peer is disconnected");
            self.forget_kept();
            controller.forget_suspensions();
            self.unheard = device.take_unheard();
            return Ok(());
        }
        // Whose the controller is was restored with it, perhaps without what tells that it ended.
        self.claimed = {
            let mut owner = controller.owner.lock();
            let own = owner.is(&client);
            if own && !owner.is_bound_to(&client) {
                owner.bind(Arc::clone(&client));
            }
            own
        };
        // At once, as whoever asks next may be faster than the release.
        controller.started.store(peer.handler().device.runs(), Ordering::Relaxed);
        controller.overtaken.store(peer.handler().device.is_overtaken(), Ordering::Relaxed);
        self.client = Some(client);
        self.peer = Some(peer);
        self.controller.session.store(self.sessions, Ordering::Relaxed);
        self.setup = Duration::ZERO;
        Ok(())
    }
}

/// A session that was not made.
struct NotMade {
    /// Why, in one sentence.
    why: String,
    /// The peer did it: its session ends, and all else goes on.
    is_the_peers: bool,
}

impl Prepared {
    /// Whether it is the session of `state`, whose descriptors are `fds`, and what was made of it
    /// still holds.
    fn is_of(&self, state: &ControllerState, fds: &Fds) -> bool {
        let same = |session: &SessionState| self.peer.is_prepared_for(session, fds);
        self.sessions == state.sessions && state.session.as_ref().is_some_and(same)
    }
}
