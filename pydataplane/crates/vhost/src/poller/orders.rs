//! What the session thread asks of a poller, through the reactor's mailbox.
//!
//! Everything that must wait for I/O in flight is two steps: stop what would start more, and
//! [`DevicePoller::drain`]; the answer comes when the last of it has ended. Only then the second
//! message (remove, remap) follows.

use std::ops::Range;
use std::os::fd::{OwnedFd, RawFd};
use std::sync::Arc;
use std::time::Duration;

use bdev::{Limits, OpenError, Slots};
use guestmem::GuestMemory;
use reactor::IoContext;
use scsi::{Lun, LunShared, Nexus};
use virtqueue::Head;

use super::front::{Blk, ProtectedScsi, Scsi};
use super::queue::RequestQueue;
use super::slot::{self, MAX_SLOTS, Slot};
use super::task_set::{Member, Targets};
use super::units::{Unit, Units};
use super::{BATCH, COMPLETIONS, DevicePoller, SETTLE_US, SUBMISSION_US, TURN_US};
use crate::coalescing::SharedCoalescing;
use crate::defs::{MAX_QUEUES, MAX_TARGETS};
use crate::failure::Failure;
use crate::front::{DISK, Front};
use crate::mailbox::Notice;
use crate::stats::ControllerCounters;

/// Which requests in flight are meant.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Selector {
    /// Every one.
    All,
    /// Those of one virtqueue, by its index.
    Queue(u16),
    /// Those of one target.
    Target(u8),
    /// One command of a target, by the guest's name for it.
    Task(u8, u64),
}

/// Somebody waits until requests that were in flight have ended.
pub(crate) struct Drain {
    selector: Selector,
    /// Only those taken before.
    before: u64,
    /// How many of them are in flight. Counted once: a guest with many queues, whose requests take
    /// their time, must not have the reactor look through all their slots in each turn.
    left: u32,
    then: Box<dyn FnOnce() + Send>,
}

impl Drain {
    /// A request has ended, whose slot is not free yet. Whether it was the last one.
    #[cold]
    pub(super) fn note(&mut self, slot: &Slot) -> bool {
        if slot.order < self.before && self.selector.has(slot) {
            self.left -= 1;
        }
        self.left == 0
    }
}

impl DevicePoller {
    /// A poller without queues or units; `answer`: [`crate::Timeouts::answer`]; `member`: as the others of its session
    /// reach it.
    pub(crate) fn new(
        name: String,
        front: Front,
        (counters, coalescing): (Arc<ControllerCounters>, Arc<SharedCoalescing>),
        notice: Notice,
        answer: Duration,
        member: Arc<Member>,
    ) -> Self {
        DevicePoller {
            name,
            front,
            protected: false,
            write_through: false,
            queues: Vec::with_capacity(MAX_QUEUES),
            slots: Slots::with_capacity(MAX_SLOTS),
            units: Units::new(answer),
            member,
            in_order: Targets::default(),
            paused: false,
            heads: [Head::default(); BATCH],
            done: Vec::with_capacity(COMPLETIONS),
            lets_go: false,
            unlimited: false,
            taken: 0,
            drains: Vec::new(),
            drained: false,
            counters,
            coalescing,
            held: false,
            notice,
            faults: guestmem::faults(),
            untimed: 0,
            first: 0,
            first_active: 0,
            next_backlog: 0,
            turn_ticks: reactor::ticks::from_us(TURN_US),
            submission_ticks: reactor::ticks::from_us(SUBMISSION_US),
            settle_at: 0,
        }
    }

    /// Somebody waits for what was taken: while `on`, it begins whatever the limits say.
    pub(crate) fn set_unlimited(&mut self, on: bool) {
        self.unlimited = on;
    }

    /// Has what is written from now on durable when its request ends, or not.
    pub(crate) fn set_write_through(&mut self, on: bool) {
        self.write_through = on;
    }

    /// How many slots there are.
    pub(crate) fn slots(&self) -> usize {
        self.slots.len()
    }

    /// Has requests carry protection information from now on, or not, while no queue is there. `slots`: as
    /// many as there are, for such requests. Returns the ones that were there before.
    pub(crate) fn set_protected(&mut self, on: bool, slots: Vec<Slot>) -> Slots<Slot> {
        assert!(self.queues.is_empty() && self.slots.taken() == 0, "nothing is in flight");
        let mut pool = Slots::with_capacity(MAX_SLOTS);
        slot::grow(&mut pool, slots);
        self.protected = on;
        std::mem::replace(&mut self.slots, pool)
    }

    /// So many reactors serve the queues of the session from now on, this one perhaps among them.
    pub(crate) fn share_room(&mut self, reactors: usize) {
        self.units.share_room(reactors);
    }

    /// Places of the slots that are to be made before queues of so many `descriptors` can start.
    pub(crate) fn missing_slots(&self, descriptors: usize) -> Range<usize> {
        let there: usize = self.queues.iter().map(|q| usize::from(q.ring.size())).sum();
        slot::missing(&self.slots, there + descriptors)
    }

    /// Takes the slots that were missing, for queues that are about to start.
    pub(crate) fn add_slots(&mut self, slots: Vec<Slot>) {
        slot::grow(&mut self.slots, slots);
    }

    /// Starts a queue, with the slots that were missing. Returns the descriptor to watch while the
    /// reactor sleeps.
    pub(crate) fn add_queue(&mut self, queue: RequestQueue, slots: Vec<Slot>) -> Option<RawFd> {
        slot::grow(&mut self.slots, slots);
        assert!(self.queues.iter().all(|q| q.index != queue.index), "the queue was removed before");
        if self.queues.is_empty() {
            // Nobody told it of anything meanwhile.
            self.member.set_serves(true);
            self.in_order = Targets::ALL;
            self.member.look_again();
        }
        let kick = queue.kick_fd();
        self.queues.push(queue);
        kick
    }

    /// Calls the guest for a queue that goes on: whoever served it before may have shown a request
    /// as used and ended before it called.
    pub(crate) fn call_again(&mut self, index: u16) {
        if let Some(queue) = self.queues.iter_mut().find(|q| q.index == index)
            && queue.call().is_err()
        {
            self.blocked();
        }
    }

    /// Requests of a queue that were in flight before it started and were not submitted again yet;
    /// 0 also where they will not be, as the queue is closed or nothing is taken any more.
    pub(crate) fn to_replay(&self, index: u16) -> u16 {
        let mut queues = self.queues.iter().filter(|_| !self.paused);
        queues.find(|q| q.index == index).map_or(0, RequestQueue::to_replay)
    }

    /// Queues that have given back all that they took, and the index of both rings. Nothing is in flight.
    pub(crate) fn drained_queues(&mut self) -> Vec<(u16, u16)> {
        self.give_back_all();
        let drained = self.queues.iter().filter(|q| q.ring.next_avail() == q.ring.next_used());
        drained.map(|q| (q.index, q.ring.next_used())).collect()
    }

    /// As [`DevicePoller::to_replay`], of all queues.
    pub(crate) fn replays(&self) -> bool {
        self.queues.iter().any(|q| q.to_replay() != 0)
    }

    /// Takes no more requests. Queues that track what is in flight end it with its next I/O: what is
    /// half done then stays marked.
    pub(crate) fn leave(&mut self, again: bool) {
        self.hold_back_no_more();
        self.pause();
        self.queues.iter_mut().filter(|_| again).for_each(RequestQueue::leave);
        let leaving = self.queues.iter().filter(|q| q.leaving);
        self.end_early(leaving.fold(0, |set, q| set | 1 << q.index));
        self.let_go(true);
    }

    /// The requests in flight: those that did not end at once. At most [`MAX_SLOTS`] are looked at.
    pub(super) fn in_flight(&mut self) -> impl Iterator<Item = &mut Slot> {
        self.slots.iter_mut().filter(|slot| slot.busy)
    }

    /// Every request in flight of the queues whose bits are set ends with its next I/O, one that did
    /// not begin yet with none.
    fn end_early(&mut self, queues: u128) {
        const { assert!(MAX_QUEUES <= u128::BITS as usize) };
        self.in_flight().for_each(|slot| match (queues >> slot.queue & 1, slot.waits) {
            (0, _) => {}
            (_, true) => slot.task.abort(),
            (_, false) => slot.task.stop(),
        });
        self.end_all_aborted();
    }

    /// Ends the requests that did not begin yet and were aborted.
    pub(super) fn end_all_aborted(&mut self) {
        for target in 0..=u8::MAX {
            if self.units.backlog.contains(&target) {
                self.end_aborted(target);
            }
        }
    }

    /// Takes no more requests from a queue, which is to drain soon: the peer, and with it the management
    /// of its VM, waits for that, and a guest can have given work for minutes. So a request of
    /// many I/Os stops between two of them, and one that did not begin yet does not; both end as BUSY,
    /// which has an initiator send them again (SAM-5 5.3.1; Linux does so without counting), and
    /// all such commands may be done twice: UNMAP, WRITE SAME, VERIFY, and transfers as a whole.
    ///
    /// A driver of virtio-blk would take that for an error, so there all of it is done first, but for what
    /// waits because an I/O failed or as others have all of the device's queue: that is kept (`suspended`).
    pub(crate) fn close_queue(&mut self, index: u16) {
        let Some(at) = self.queues.iter().position(|q| q.index == index) else { return };
        if self.front.knows_busy() {
            self.queues[at].stop();
            self.end_early(1 << index);
        } else {
            self.queues[at].stop();
            self.ask_for_stop();
            if self.units.stands_still(DISK) {
                self.stand_still(DISK);
            }
        }
        self.publish(at);
    }

    /// As [`DevicePoller::close_queue`] of all queues, of a poller that is paused: they are not closed.
    pub(crate) fn end_soon(&mut self) {
        self.hold_back_no_more();
        if !self.front.knows_busy() {
            return;
        }
        self.queues.iter_mut().for_each(|queue| queue.end_soon(true));
        self.end_early(self.queues.iter().fold(0, |set, q| set | 1 << q.index));
        (0..self.queues.len()).for_each(|at| self.publish(at));
    }

    /// Removes a queue that was closed and drained. Its kick is open, and to be unwatched, until
    /// the queue is dropped. `marks_last`: as of `give_back`.
    pub(crate) fn remove_queue(&mut self, index: u16, marks_last: bool) -> Option<RequestQueue> {
        let at = self.queues.iter().position(|q| q.index == index)?;
        self.units.has_stopped();
        self.give_back(at, marks_last);
        Some(self.take_out(at))
    }

    /// Takes a queue out of which nothing is in flight; the last one stands in its place from now on.
    fn take_out(&mut self, at: usize) -> RequestQueue {
        let queue = self.queues.swap_remove(at);
        assert_eq!(queue.in_flight, 0, "queue {} is taken out before it was drained", queue.index);
        let last = self.queues.len();
        let moved = self.slots.iter_mut().filter(|slot| usize::from(slot.at) == last);
        moved.for_each(|slot| slot.at = at as u16);
        self.note_queues();
        queue
    }

    /// Takes no requests of a queue until it is unparked, and keeps those of it that were taken and have
    /// not begun, to be taken again where it goes on; but for those that wait because an I/O failed. Where
    /// nobody would know of what is kept if the queue ended before that, nothing is.
    pub(crate) fn park_queue(&mut self, index: u16) {
        let Some(queue) = self.queues.iter_mut().find(|q| q.index == index) else { return };
        if !queue.park() || (self.front.knows_busy() && !queue.ring.is_tracking()) {
            return;
        }
        // Who others wait for since it was taken in the last turn is known only then.
        self.keep_order();
        for target in (0..MAX_TARGETS).map(|target| target as u8) {
            // Where others wait for it, or it for others, it stays where it was received.
            let moves = !self.units.is_suspended(target) && !self.in_order.has(target);
            if self.units.backlog.contains(&target) && moves {
                // It is received anew.
                self.end_reset(target);
                self.keep_waiting(target, Some(index));
            }
        }
        (0..self.queues.len()).for_each(|at| self.publish(at));
    }

    /// Takes requests of a queue again that was parked.
    pub(crate) fn unpark_queue(&mut self, index: u16) {
        self.queues.iter_mut().filter(|q| q.index == index).for_each(RequestQueue::unpark);
    }

    /// A queue is gone out of which nothing is in flight: without any the poller has received nothing.
    fn note_queues(&self) {
        if self.queues.is_empty() {
            self.member.set_serves(false);
        }
    }

    /// Gives away a queue that is parked, for another reactor to go on with; `None`: something of it is
    /// left here. Its kick is still to be unwatched.
    pub(crate) fn take_queue(&mut self, index: u16) -> Option<RequestQueue> {
        // One that is paused may be so for what the guest's process did, and the session ends.
        let leaves = |q: &RequestQueue| q.index == index && q.may_leave() && !self.paused;
        let at = self.queues.iter().position(leaves)?;
        // Nothing of it is in flight, so no call of it waits any longer.
        self.publish(at);
        let mut queue = self.take_out(at);
        queue.unpark();
        Some(queue)
    }

    /// Removes all queues, of a poller that is paused and drained. Their kicks are open, and to be
    /// unwatched, until the queues are dropped.
    pub(crate) fn take_queues(&mut self) -> Vec<RequestQueue> {
        self.give_back_all();
        let queues = std::mem::take(&mut self.queues);
        let idle = queues.iter().all(|queue| queue.in_flight == 0);
        assert!(idle, "queues are removed before they were drained");
        self.note_queues();
        queues
    }

    /// Replaces the call descriptor of a queue.
    pub(crate) fn set_call(&mut self, index: u16, call: Option<OwnedFd>) {
        if let Some(queue) = self.queues.iter_mut().find(|q| q.index == index) {
            let called = queue.set_call(call);
            if called.is_err() {
                self.blocked();
            }
        }
    }

    /// The reactor cannot watch the kick of a queue: it must not sleep while the queue is there.
    pub(crate) fn forget_kick(&mut self, index: u16) {
        if let Some(queue) = self.queues.iter_mut().find(|q| q.index == index) {
            queue.forget_kick();
        }
    }

    /// Descriptors that the reactor watches for this poller.
    pub(crate) fn kick_fds(&self) -> Vec<RawFd> {
        self.queues.iter().filter_map(RequestQueue::kick_fd).collect()
    }

    /// Takes no requests from any queue until [`DevicePoller::remap`].
    pub(crate) fn pause(&mut self) {
        self.paused = true;
        self.call_late();
    }

    /// Takes requests again, in the memory that it has. What was to end soon and has not goes on: to the
    /// guest its end would be one that nobody asked for.
    pub(crate) fn unpause(&mut self) {
        (self.paused, self.lets_go) = (false, false);
        self.queues.iter_mut().for_each(|queue| queue.end_soon(false));
        self.take_kept_again();
        let stopping = self.queues.iter().filter(|queue| queue.stopping);
        let stopping = stopping.fold(0u128, |set, queue| set | 1 << queue.index);
        self.in_flight().for_each(|slot| {
            if stopping >> slot.queue & 1 == 0 {
                slot.task.go_on();
            }
        });
    }

    /// What queues without requests in flight keep is for whoever goes on with them.
    pub(crate) fn give_back_all(&mut self) {
        (0..self.queues.len()).for_each(|at| self.give_back(at, true));
    }

    /// Tells the guest nothing more: requests that end are forgotten. Paused.
    pub(crate) fn mute(&mut self) {
        self.queues.iter_mut().for_each(RequestQueue::mute);
    }

    /// Goes on in another memory table; paused and drained. Returns the queues that are not in
    /// it: they were closed and removed.
    pub(crate) fn remap(&mut self, memory: &Arc<GuestMemory>) -> Vec<(RequestQueue, Failure)> {
        (self.paused, self.lets_go) = (false, false);
        self.slots.iter_mut().for_each(|slot| slot.segments.clear());
        let mut lost = Vec::new();
        for mut queue in std::mem::take(&mut self.queues) {
            match queue.remap(memory) {
                Ok(()) => {
                    queue.take_again();
                    self.queues.push(queue);
                }
                Err(why) => {
                    // Its rings are still there, in the memory that it had.
                    self.queues.push(queue);
                    self.give_back(self.queues.len() - 1, true);
                    lost.extend(self.queues.pop().map(|queue| (queue, Failure::Config(why))));
                }
            }
        }
        self.note_queues();
        lost
    }

    /// Puts a unit in place, which requests do not find until [`DevicePoller::show_unit`].
    pub(crate) fn add_unit(&mut self, target: u8, unit: Unit) {
        self.units.insert(target, unit);
    }

    /// New requests find a unit from now on.
    pub(crate) fn show_unit(&mut self, target: u8) {
        self.units.show(target);
    }

    /// New requests for `target` no longer find it.
    pub(crate) fn leave_unit(&mut self, target: u8) {
        self.units.leave(target);
        self.end_removed(target);
    }

    /// Closes the unit of `target`, which was left and drained.
    pub(crate) fn remove_unit(&mut self, target: u8) {
        self.units.remove(target);
    }

    /// Makes what the unit of `target` is to go on with, in the place of the one that is there now: with
    /// that bdev, for that session, on this thread.
    pub(crate) fn prepare_unit(
        &mut self,
        target: u8,
        io: &IoContext,
        shared: &Arc<LunShared>,
        (nexus, limits): (Arc<Nexus>, Arc<Limits>),
    ) -> Result<(), OpenError> {
        let channel = shared.bdev().open(io)?;
        self.units.prepare(target, Lun::new(Arc::clone(shared), nexus, channel), limits);
        Ok(())
    }

    /// Nothing of `target` begins any more; calls `idle` as soon as nothing is with its device, perhaps at
    /// once.
    pub(crate) fn halt_unit(&mut self, target: u8, idle: impl FnOnce() + Send + 'static) {
        self.units.halt(target, Box::new(idle));
    }

    /// Takes what the device of `target` has to say, though nothing of a guest's is with it.
    pub(crate) fn settle_unit(&mut self, target: u8) {
        let mut done = std::mem::take(&mut self.done);
        if let Some(unit) = self.units.at(target) {
            unit.lun.poll(&mut done);
        }
        for completion in done.drain(..) {
            match self.front {
                Front::Scsi if self.protected => self.resume::<ProtectedScsi>(&completion),
                Front::Scsi => self.resume::<Scsi>(&completion),
                Front::Blk => self.resume::<Blk>(&completion),
            }
        }
        self.done = done;
    }

    /// Has the devices without I/O see what changed of them: a volume whose map was let go of has its
    /// channels woken, which have it until then.
    pub(super) fn settle_idle(&mut self) {
        let now = reactor::ticks::now();
        if now < self.settle_at {
            return;
        }
        self.settle_at = now.saturating_add(reactor::ticks::from_us(SETTLE_US));
        for target in (0..MAX_TARGETS).map(|target| target as u8) {
            if !self.units.active.contains(&target) && self.units.at(target).is_some() {
                self.settle_unit(target);
            }
        }
    }

    /// The unit of `target`, which is halted and idle, has what was prepared for it.
    pub(crate) fn switch_unit(&mut self, target: u8) {
        self.units.switch(target);
    }

    /// What waited since the unit of `target` was halted begins again; what was prepared and not used is
    /// closed.
    pub(crate) fn go_on_unit(&mut self, target: u8) {
        self.units.go_on(target);
    }

    /// How many of the selected requests are in flight.
    pub(crate) fn count(&self, selector: Selector) -> u32 {
        self.slots.iter().filter(|slot| selector.has(slot)).count() as u32
    }

    /// Calls `then` as soon as the selected requests that are in flight now have ended, perhaps
    /// at once.
    pub(crate) fn drain(&mut self, selector: Selector, then: impl FnOnce() + Send + 'static) {
        match self.count(selector) {
            0 => then(),
            left => {
                let (before, then) = (self.taken, Box::new(then));
                self.drains.push(Drain { selector, before, left, then });
            }
        }
    }

    /// Answers the drains whose requests have all ended; after these were published.
    #[cold]
    pub(super) fn answer_drains(&mut self) {
        self.drained = false;
        let mut at = 0;
        while let Some(drain) = self.drains.get(at) {
            match drain.left {
                0 => (self.drains.swap_remove(at).then)(),
                _ => at += 1,
            }
        }
    }
}

impl Selector {
    /// The target of all of them; `None`: they are of any.
    pub(crate) fn target(self) -> Option<u8> {
        match self {
            Selector::All | Selector::Queue(_) => None,
            Selector::Target(target) | Selector::Task(target, _) => Some(target),
        }
    }

    pub(super) fn has(self, slot: &Slot) -> bool {
        slot.busy
            && match self {
                Selector::All => true,
                Selector::Queue(index) => index == slot.queue,
                Selector::Target(target) => target == slot.target,
                Selector::Task(target, id) => target == slot.target && id == slot.id,
            }
    }
}
