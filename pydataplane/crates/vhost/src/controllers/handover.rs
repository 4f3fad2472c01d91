//! All controllers leave for another process, or come from one.
//!
//! In the process that leaves: [`Controllers::hold`], then [`Controllers::hand_over`]; in the one
//! that goes on, which may be the same: [`Controllers::inherit`], then the controllers and their
//! targets are made as after a restart, then [`Controllers::take_over`] and, when nothing can fail
//! any more, [`Controllers::release`].
//!
//! Before all that, while guests are served: [`Controllers::describe`] there, [`Controllers::expect`]
//! here, then the controllers are made, without targets, and [`Controllers::prepare`]. Sessions that
//! were not described, or are others when they come, are made as if nobody had.

use std::collections::BTreeMap;
use std::path::Path;
use std::sync::atomic::Ordering;
use std::sync::mpsc::RecvTimeoutError;
use std::time::{Duration, Instant};

use reactor::{Call, Caller};

use super::Controllers;
use crate::controller::Controller;
use crate::error::ControllerError;
use crate::handover::{ControllerHandover, Inherited};
use crate::mailbox::Order;
use crate::socket::Listener;

/// How long a controller's thread may take for a step that waits for no I/O.
const STEP_TIMEOUT: Duration = Duration::from_secs(20);
/// How long the description of all controllers, whose guests are served, may take.
const DESCRIBE_TIMEOUT: Duration = Duration::from_secs(2);

/// A question to the thread of the controller of that name: `T` is given with it, `R` its answer.
type Asked<T, R> = (String, Caller<T, Result<R, String>>);

impl Controllers {
    /// Takes all controllers apart, which are held. Their sockets' files stay; their bdevs are free.
    ///
    /// # Errors
    /// [`ControllerError::HandOver`] names the one that could not be; the others are in the answer
    /// all the same, and it is lost.
    pub fn hand_over(&self) -> (Vec<ControllerHandover>, Result<(), ControllerError>) {
        let asked = self.ask(|_| true, Order::HandOver, |_| ());
        let mut outcome = Ok(());
        let mut all = Vec::with_capacity(asked.len());
        for (name, caller) in asked {
            match wait_for(&name, caller, Instant::now() + STEP_TIMEOUT) {
                Ok(controller) => all.push(controller),
                Err(why) => {
                    // It holds what it has until it can stop.
                    if let Ok(controller) = self.find(&name) {
                        controller.mailbox.send(Order::Stop);
                    }
                    outcome = Err(why);
                }
            }
        }
        let entries = std::mem::take(&mut *self.entries());
        for entry in entries.into_values() {
            // It returned after its answer, if that is what was asked for.
            _ = entry.ended.recv_timeout(STEP_TIMEOUT);
        }
        (all, outcome)
    }

    /// What there is, for a process that is about to take it over; all go on. A controller that does
    /// not answer is left out.
    pub fn describe(&self) -> Vec<ControllerHandover> {
        let end = Instant::now() + DESCRIBE_TIMEOUT;
        let asked = self.ask(|_| true, Order::Describe, |_| ());
        let answers = asked.into_iter().map(|(name, caller)| wait_for(&name, caller, end));
        answers.filter_map(Result::ok).collect()
    }

    /// Controllers of these names are about to come, and may be made before they do.
    ///
    /// # Errors
    /// [`ControllerError::HandOver`]: there are controllers already.
    pub fn expect(&self, controllers: Vec<ControllerHandover>) -> Result<(), ControllerError> {
        self.set_inherited(controllers)?;
        self.inner.prepares.store(true, Ordering::Relaxed);
        Ok(())
    }

    /// Makes what takes time of the sessions that are about to come. What cannot be made now is, or
    /// fails, when they do.
    pub fn prepare(&self) {
        let mut coming = std::mem::take(&mut *self.inner.inherited.lock());
        let asked = self.ask(|_| true, Order::Prepare, |name| coming.remove(name));
        let end = Instant::now() + STEP_TIMEOUT;
        for (name, caller) in asked {
            if let Err(why) = wait_for(&name, caller, end) {
                tracing::debug!("{why}");
            }
        }
    }

    /// The controllers of these names, or the next ones where there are none, are these.
    ///
    /// # Errors
    /// [`ControllerError::HandOver`]: there are controllers already that nobody expected them to be.
    pub fn inherit(&self, controllers: Vec<ControllerHandover>) -> Result<(), ControllerError> {
        if self.inner.prepares.swap(false, Ordering::Relaxed) {
            *self.inner.inherited.lock() = named(controllers);
            self.entries().values().for_each(|entry| self.begin(&entry.controller));
            return Ok(());
        }
        self.set_inherited(controllers)
    }

    fn set_inherited(&self, controllers: Vec<ControllerHandover>) -> Result<(), ControllerError> {
        if !self.entries().is_empty() {
            let why = "there are controllers already, so none can be taken over";
            return Err(ControllerError::HandOver(why.into()));
        }
        *self.inner.inherited.lock() = named(controllers);
        Ok(())
    }

    /// Has a controller go on where it was, if it came and is not only about to.
    pub(super) fn begin(&self, controller: &Controller) {
        if !self.inner.prepares.load(Ordering::Relaxed)
            && let Some(Inherited { state, .. }) = self.inner.inherited.lock().get(&controller.name)
        {
            controller.begin_as(state);
        }
    }

    /// The sessions of the controllers that were inherited go on, but held still.
    ///
    /// # Errors
    /// [`ControllerError::HandOver`] names one that does not, or a controller that was inherited and
    /// not made.
    pub fn take_over(&self) -> Result<(), ControllerError> {
        let mut inherited = std::mem::take(&mut *self.inner.inherited.lock());
        let asked = self.ask(|_| true, Order::TakeOver, |name| inherited.remove(name));
        let end = Instant::now() + STEP_TIMEOUT;
        let taken: Result<Vec<()>, _> =
            asked.into_iter().map(|(name, caller)| wait_for(&name, caller, end)).collect();
        if let Some(name) = inherited.into_keys().next() {
            let why = format!("controller {name} was not made again");
            return Err(ControllerError::HandOver(why));
        }
        taken.map(drop)
    }

    /// The listening socket of the controller of that name, at `path`, if it comes from another
    /// process.
    pub(super) fn inherited_listener(
        &self,
        name: &str,
        path: &Path,
    ) -> Result<Option<Listener>, ControllerError> {
        let mut inherited = self.inner.inherited.lock();
        inherited.get_mut(name).map(|inherited| inherited.listener(path)).transpose()
    }

    /// Sends the threads of the controllers of whose names `which` is true an order that is a call, each with
    /// what `given` says for its name.
    pub(super) fn ask<T, R>(
        &self,
        which: impl Fn(&str) -> bool,
        order: fn(Call<T, Result<R, String>>) -> Order,
        mut given: impl FnMut(&str) -> T,
    ) -> Vec<Asked<T, R>> {
        let ask = |(name, entry): (&String, &super::Entry)| {
            let (call, caller) = reactor::call(given(name));
            entry.controller.mailbox.send(order(call));
            (name.clone(), caller)
        };
        self.entries().iter().filter(|(name, _)| which(name)).map(ask).collect()
    }
}

fn named(controllers: Vec<ControllerHandover>) -> BTreeMap<String, Inherited> {
    let named = controllers.into_iter().map(|ControllerHandover { state, fds, .. }| {
        (state.name.clone(), Inherited { state, fds })
    });
    named.collect()
}

/// Waits until `end` for the answer of the thread of controller `name`.
pub(super) fn wait_for<T, R>(
    name: &str,
    caller: Caller<T, Result<R, String>>,
    end: Instant,
) -> Result<R, ControllerError> {
    let why = match caller.wait_until(end) {
        Ok(Ok(done)) => return Ok(done),
        Ok(Err(why)) => why,
        Err(RecvTimeoutError::Timeout) => {
            format!("controller {name} still waits for I/O of its VM; see what its bdevs are on")
        }
        Err(RecvTimeoutError::Disconnected) => format!("controller {name} is gone"),
    };
    Err(ControllerError::HandOver(why))
}

impl Inherited {
    /// Its listening socket, which is at `path`, as the controller is to be.
    pub(super) fn listener(&mut self, path: &Path) -> Result<Listener, ControllerError> {
        let name = &self.state.name;
        if self.state.socket != path {
            let (there, wanted) = (self.state.socket.display(), path.display());
            return Err(ControllerError::HandOver(format!(
                "controller {name} listens on {there}, and cannot go on at {wanted}: start the new \
                 program with the same folder of sockets"
            )));
        }
        let fd = self.fds.take(self.state.listener);
        let fd = fd.map_err(|e| ControllerError::HandOver(format!("controller {name}: {e}")))?;
        Ok(Listener::adopt(fd, path)?)
    }
}

impl From<crate::handover::NexusState> for scsi::NexusState {
    fn from(state: crate::handover::NexusState) -> Self {
        let crate::handover::NexusState { attentions, prevents, seen_us, could_not_ask } = state;
        scsi::NexusState { attentions, prevents, seen_us, could_not_ask }
    }
}
