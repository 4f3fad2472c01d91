//! A path is connected, and what its controller says is taken over.

use std::sync::Arc;
use std::sync::mpsc::{TryRecvError, channel};
use std::thread;
use std::time::Instant;

use super::{Path, State};
use crate::admin::Admin;
use crate::connect::{Association, establish, expires};
use crate::context::Context;
use crate::identify::Namespace;
use crate::queue::Queue;

/// Namespaces of which it is known at a time that it was logged why they are not used.
const REFUSED_MAX: usize = 1024;
impl Path {
    /// Takes a controller into use.
    ///
    /// # Errors
    /// A clause: it is not that of before.
    pub(crate) fn join(&mut self, made: Association, with: &mut Context) -> Result<(), String> {
        with.shared.usable(&made)?;
        let failed = |e| format!("no io_uring: {e}");
        let mut queues = Vec::with_capacity(made.queues.len());
        for link in made.queues {
            queues.push(Queue::new(link, &with.io, true).map_err(failed)?);
        }
        let of = &made.controller;
        let kept = made.keep_alive;
        self.expires = expires(kept, of);
        self.drains_within = made.names.resets_when_through().then_some(kept);
        let admin = Admin::new(made.admin, &with.io, with.now, kept, of, made.names.serial)
            .map_err(failed)?;
        (self.queues, self.admin) = (queues, Some(admin));
        self.controller = Some(made.controller);
        self.namespaces.fill(None);
        self.absent.fill(false);
        (self.groups, self.id) = (made.groups, made.id);
        (self.state, self.begun, self.asked) = (State::Up, with.now, None);
        (self.collected, self.unresolved, self.doubtful) = (false, false, false);
        self.connections += 1;
        if self.problem.take().is_some() {
            tracing::info!(controller = with.shared.name(), "{} answers again", self.address);
        }
        made.namespaces.iter().for_each(|each| self.take_over(each, with));
        with.changed = true;
        with.shared.set_given_up(false);
        if !with.others_up {
            with.came_back(&self.address);
        }
        Ok(())
    }

    /// Takes over what a namespace is now; one that is no bdev yet becomes one.
    pub(super) fn take_over(&mut self, found: &Namespace, with: &Context) {
        let Some(of) = &self.controller else { return };
        match with.shared.accept(found, of) {
            Ok(unit) => {
                (self.namespaces[unit], self.absent[unit]) = (Some(found.group), false);
                self.refused.remove(&found.nsid);
                if self.groups.as_ref().is_some_and(|groups| !groups.has(found.group))
                    && let Some(admin) = &mut self.admin
                {
                    admin.want_groups();
                }
                with.resize(unit, found.geometry.num_blocks);
            }
            // Its size is that of another namespace.
            Err(why) => self.refuse(found.nsid, why, with),
        }
    }

    /// A namespace is not used here, which is logged once.
    pub(super) fn refuse(&mut self, nsid: u32, why: String, with: &Context) {
        if let Some(unit) = with.shared.units.position(nsid) {
            self.namespaces[unit] = None;
        }
        if self.refused.get(&nsid) == Some(&why) {
            return;
        }
        let (controller, path) = (with.shared.name(), self.address);
        tracing::error!(controller, %path, "a namespace is not used: {why}");
        if self.refused.len() >= REFUSED_MAX {
            self.refused.clear();
        }
        self.refused.insert(nsid, why);
    }

    /// Connects anew, on a thread of its own, if it is time.
    pub(super) fn connect(&mut self, with: &mut Context) -> Option<Instant> {
        if self.leaving {
            return None;
        }
        let Some(told) = &self.connecting else {
            if with.now < self.next {
                return Some(self.next);
            }
            let (tell, told) = channel();
            let (shared, address) = (Arc::clone(&with.shared), self.address);
            let work = move || {
                let end = Instant::now() + shared.options.connect_within;
                let known = shared.known();
                _ = tell.send(establish(&address, &shared.identity, &known, end));
                shared.wake();
            };
            match thread::Builder::new().name("nvme connect".into()).spawn(work) {
                Ok(_) => self.connecting = Some(told),
                Err(e) => self.fail(format!("no thread: {e}"), with),
            }
            return Some(self.next);
        };
        match told.try_recv() {
            Err(TryRecvError::Empty) => return None,
            Err(TryRecvError::Disconnected) => self.fail("its thread has ended".to_owned(), with),
            Ok(Err(why)) => self.fail(why, with),
            Ok(Ok(made)) => {
                self.connecting = None;
                if let Err(why) = self.join(made, with) {
                    self.fail(why, with);
                }
            }
        }
        Some(self.next)
    }

    pub(super) fn fail(&mut self, why: String, with: &mut Context) {
        self.connecting = None;
        self.next = with.now + with.shared.options.reconnect_delay;
        if self.problem.as_ref() != Some(&why) {
            tracing::error!(
                controller = with.shared.name(),
                "no connection to {}: {why}",
                self.address
            );
        }
        self.problem = Some(why);
        with.changed = true;
    }
}
