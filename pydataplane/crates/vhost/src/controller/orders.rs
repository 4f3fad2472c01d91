//! What other threads have a controller do.

use std::sync::Arc;
use std::time::{Duration, Instant};

use super::cpu_of;
use super::server::{Removal, Server};
use crate::device::TMF_ID;
use crate::events::Event;
use crate::lun::{Replacement, Target};
use crate::mailbox::{Gone, Order};
use crate::session::End;
use crate::socket::Listener;

/// How long no peer may connect after one blocked a reactor: its guests wait for a small part of
/// the time only.
const RECONNECT_BAN: Duration = Duration::from_secs(30);

impl Server {
    /// Does what was asked.
    pub(super) fn obey(&mut self, order: Order) {
        match order {
            // Whoever waits for the answer sees that there is none.
            Order::Add(_) if self.stopping => {}
            Order::Add(call) => call.run(|target| self.add(target)),
            Order::Replace(_) if self.stopping => {}
            Order::Replace(call) => call.run(|with| self.replace(with)),
            Order::Remove { target, gone } => self.remove(target, gone),
            Order::Resized { target } => self.tell(Event::Resized(target)),
            Order::Accept => self.begin_to_accept(),
            Order::Refuse => self.refuse(),
            Order::KeepAgain => self.kept.renew(),
            Order::OwnerChanged => self.owner_changed(),
            Order::Hold(call) => call.run(|until| self.hold(until)),
            Order::HoldIfSlow(call) => call.run(|until| self.hold_if_slow(until)),
            Order::Release => self.release(),
            Order::HandOver(call) => call.run(|()| self.hand_over()),
            Order::Describe(call) => call.run(|()| self.describe()),
            Order::Prepare(call) => call.run(|coming| self.prepare(coming)),
            Order::TakeOver(call) => call.run(|inherited| self.take_over(inherited)),
            Order::StopUnlessConnected(call) => call.run(|()| self.stop_unless_connected()),
            Order::Stop => {
                self.end_unresumed();
                self.stop();
            }
            Order::Leave => {
                self.leaves_kept();
                self.stop();
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
            Order::Suspended { session, target, error } if session == self.sessions => {
                self.suspended(target, error);
            }
            Order::Resume(call) => call.run(|target| self.resume(target)),
            Order::Move { queue, to } => self.move_queue(queue, to),
            // Of a session that is over.
            Order::Suspended { .. } => {}
            Order::QueueFailed { .. } | Order::MemoryFault { .. } | Order::Blocked { .. } => {}
        }
    }

    fn begin_to_accept(&mut self) {
        if !std::mem::replace(&mut self.accepts, true) {
            self.resume_kept();
        }
        if let Some(Err(why)) = self.listener.as_ref().map(Listener::open) {
            tracing::error!(controller = self.controller.name, "{why}");
        }
    }

    /// A QEMU that connects and has no answer stands still, with all that its guest has.
    fn refuse(&mut self) {
        if self.accepts || self.listener.is_none() {
            return;
        }
        // Its file goes before another one comes.
        self.listener = None;
        match Listener::bind_closed(&self.controller.socket) {
            Ok(listener) => self.listener = Some(listener),
            Err(why) => tracing::error!(controller = self.controller.name, "{why}"),
        }
    }

    fn stop(&mut self) {
        self.stopping = true;
        self.listener = None;
        self.retire();
    }

    /// Returns whether it stops; between the look and that no peer can come.
    fn stop_unless_connected(&mut self) -> bool {
        let idle = self.peer.is_none();
        if idle {
            self.end_unresumed();
            self.stop();
        }
        idle
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

    fn move_queue(&mut self, queue: u16, to: usize) {
        let name = &self.controller.name;
        let reactor = self.controller.reactors.get(to).map_or(to, cpu_of);
        match self.peer.as_mut().map(|peer| peer.handler().device.move_queue(queue, to)) {
            Some(true) => {
                tracing::info!(controller = name, queue, "goes on on the reactor of CPU {reactor}");
            }
            _ => tracing::debug!(controller = name, queue, "stays where it is"),
        }
    }

    /// Has a target go on with another bdev, whose guest notices nothing but, perhaps, a moment without
    /// answers.
    fn replace(&mut self, with: Replacement) -> Result<(), String> {
        let Replacement { number, on, shared, volume, between } = with;
        let (before, limits) = {
            let targets = self.controller.targets();
            let there = targets[usize::from(number)].as_ref().filter(|target| !target.leaving);
            let there = there.ok_or("it is being removed")?;
            if !Arc::ptr_eq(there.shared.bdev(), &on) {
                return Err("it is on another bdev by now".to_owned());
            }
            let claim = volume.as_ref().map_or(&there.claim, |(claim, _)| claim);
            (Arc::clone(&there.shared), claim.limits())
        };
        if self.ending.is_some() || self.retiring.is_some() {
            return Err("I/O of the VM that left has not ended".to_owned());
        }
        shared.replace(&before);
        match &mut self.peer {
            Some(peer) => peer.handler().device.replace(number, (&shared, &limits), between)?,
            None => between()?,
        }
        let resized = shared.tell_difference(&before);
        if let Some(target) = &mut self.controller.targets()[usize::from(number)] {
            target.shared = shared;
            if let Some((claim, options)) = volume {
                (target.claim, target.options) = (claim, options);
            }
        }
        if resized {
            self.tell(Event::Resized(number));
        }
        Ok(())
    }

    fn remove(&mut self, number: u8, gone: Option<Gone>) {
        if let Some(removal) = self.removals.values_mut().find(|r| r.target == number) {
            // Asked a second time: this caller waits too, the first one no longer matters.
            removal.gone = gone.or(removal.gone.take());
            return;
        }
        if let Some(target) = &mut self.controller.targets()[usize::from(number)] {
            target.leaving = true;
        }
        self.next_removal += 1;
        let (id, removal) = (self.next_removal, Removal { target: number, gone });
        match self.with_device(|d| d.leave(number, id)) == Some(true) {
            true => _ = self.removals.insert(id, removal),
            false => self.removed(removal),
        }
    }

    /// Nothing uses the target any more: it is forgotten, and the guest told.
    pub(super) fn removed(&mut self, removal: Removal) {
        self.tell(Event::Removed(removal.target));
        let target = self.controller.targets()[usize::from(removal.target)].take();
        drop(target);
        if let Some(gone) = removal.gone {
            _ = gone.send(());
        }
    }
}
