//! A request queue that goes on on another reactor.
//!
//! It takes nothing new on the one that it leaves until what has begun has ended, so that none of its
//! requests is overtaken by a later one, and then goes on on the other as if it had always been there, with
//! what was taken and had not begun before all else: the guest sees nothing, and kicks the same descriptor.
//! Where its I/O takes long it stays.

use std::time::Duration;

use super::Device;
use crate::front::Role;
use crate::poller::Selector;

/// How long what a queue has in flight may take: its guest waits with what it asks meanwhile.
const DRAIN: Duration = Duration::from_millis(300);

impl Device {
    /// Has a queue go on on the reactor in that place. Whether it does: not if it does not run, is there
    /// already, or has requests that do not end soon.
    pub(crate) fn move_queue(&mut self, queue: u16, to: usize) -> bool {
        let at = usize::from(queue);
        let runs = self.rings.get(at).is_some_and(|ring| ring.running && !ring.owed);
        let still = self.held || self.retired || self.kept || !self.tmfs.is_empty();
        let Role::Requests(n) = self.front.role(at) else { return false };
        if !runs || still || to >= self.workers.len() || self.places[n] == to {
            return false;
        }
        self.worker(at).call(move |p| p.park_queue(queue));
        let countdown = self.start_drain(Selector::Queue(queue), None);
        let drained = countdown.wait("a queue that moves", DRAIN);
        let taken = match drained {
            true => self.worker(at).call(move |p| p.take_queue(queue)),
            false => None,
        };
        // What was taken and had not begun is taken again: until then a task management function does not
        // find it.
        self.catching_up = true;
        let Some(parked) = taken else {
            self.worker(at).call(move |p| p.unpark_queue(queue));
            return false;
        };
        self.worker(at).unwatch(parked.kick_fd());
        self.places[n] = to;
        self.share_room(None);
        self.worker(at).go_on_with(parked, false, self.chains());
        self.placement.set(at, Some(to));
        true
    }
}
