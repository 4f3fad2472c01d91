//! The I/O path: one request from the available ring to the used ring, in order, in this file.
//!
//! ```text
//! poll ── take ──> look ──> begin ──> start ──┬─ Done ──> finish ──> push_used ──┐
//!      │                      │               └─ Pending: the slot waits         │
//!      │                      └─ not yet: see `waiting`                          │
//!      └─ reap ──> Lun::poll ──> resume ── Done ─> finish ──> push_used ─────────┴─> publish
//! ```
//! A request whose I/O failed may wait for somebody to do something about it: see `suspended`.
//!
//! Other guests wait while a session has its turn, so a turn is bounded: by the clock
//! ([`TURN_US`], [`CONTENDED_TURN_US`]), to which what the reactor has to submit at its end is added beforehand; by requests
//! ([`MAX_TAKEN`]); and devices copy no more than [`bdev::COPY_AT_ONCE`] bytes at once. What is over
//! waits in its ring or its slot. How much data a session has with devices is bounded as well: see
//! `in_flight`.
//!
//! A [`DevicePoller`] belongs to one reactor: it owns the request queues of one session that were
//! given to this reactor and a channel of its own to each logical unit. Nothing on this path
//! allocates, locks, logs or blocks. What other threads ask of it is in `orders`.
//!
//! What the bytes of a request mean is the front end's: see `front`.

mod alone;
mod calls;
mod ending;
mod failure;
mod front;
mod full;
mod heads;
mod in_flight;
mod lists;
mod ordered;
mod orders;
mod queue;
mod slot;
mod suspended;
mod task_set;
mod units;
mod waiting;

use std::sync::Arc;

use bdev::{Completion, Slots};
use reactor::Poller;
use scsi::{Outcome, Response, Status};
use virtqueue::{ChainError, Head};

use crate::coalescing::SharedCoalescing;
use crate::defs::response;
use crate::failure::Failure;
use crate::front::Front;
use crate::mailbox::Notice;
use crate::stats::ControllerCounters;

pub use alone::PollerAlone;
pub(crate) use orders::{Drain, Selector};
pub(crate) use queue::{QueueSetup, RequestQueue};
pub(crate) use task_set::{Member, Place, TaskSet};
pub(crate) use units::Unit;

pub(crate) use slot::{Chains, Slot, make as make_slots};

use front::{Answer, Blk, FrontEnd, ProtectedScsi, Read, Scsi};
use in_flight::Obstacle;
use task_set::Targets;
use units::Units;

/// Requests taken from one queue before they are published and the next queue has its turn.
const BATCH: usize = 32;
/// How long one poll may go on, in microseconds: more than 32 small requests take.
const TURN_US: u64 = 50;
/// And while other sessions of the reactor have requests, which wait for up to two such polls: about as
/// long as 32 small ones take, so that a neighbour with large ones is no worse than one with many.
const CONTENDED_TURN_US: u64 = 20;
/// How often devices without I/O are looked at, at most, in microseconds.
const SETTLE_US: u64 = 10_000;
/// What a request that goes to the io_uring is counted as beforehand, in microseconds: it is submitted
/// when the turn is over (`reactor/examples/enter_cost.rs`).
const SUBMISSION_US: u64 = 1;
/// Requests of a session on one reactor that wait for devices or to begin; more stay in their rings, so
/// that task management looks at no more than these, and no more slots are needed. Linux keeps 128 in
/// flight on each unit.
const MAX_TAKEN: u32 = 1024;
/// Requests of a batch that go together: their chains are walked before the first of them begins, so
/// that the processor fetches all their headers, and the lines that their responses are written to, at
/// once. With fewer it waits for these where the driver is on a core that is far away.
const AHEAD: usize = 8;
/// A small batch goes in two halves, of no fewer than these: the driver goes on with the first half
/// while the second is served.
const AHEAD_LEAST: usize = 4;
/// Bytes of data of the longest transfer.
const MAX_DATA: usize = scsi::MAX_TRANSFER_BYTES as usize;
/// Completions taken from one logical unit at a time.
const COMPLETIONS: usize = 256;
/// One of so many requests that end at once is timed, and counts for all of them: reading the
/// clock for each would cost more than a null device does.
const TIMED: u32 = 16;

/// The request queues of a session on one reactor, and the logical units as they see them.
pub(crate) struct DevicePoller {
    name: String,
    /// What the guest sees.
    front: Front,
    /// Requests may carry protection information (virtio-scsi).
    protected: bool,
    /// What is written is durable when its request ends (virtio-blk without a flush command).
    write_through: bool,
    queues: Vec<RequestQueue>,
    slots: Slots<Slot>,
    units: Units,
    /// This poller as the others of its session reach it.
    member: Arc<Member>,
    /// Targets whose task sets are looked at in each turn.
    in_order: Targets,
    /// The memory table is about to change: take nothing.
    paused: bool,
    heads: [Head; BATCH],
    done: Vec<Completion>,
    /// Requests that would be suspended end as BUSY: somebody waits for all that is in flight.
    lets_go: bool,
    /// What waits for a limit begins: somebody waits for what was taken.
    unlimited: bool,
    /// Requests taken so far; tells those before a [`Drain`] from those after it.
    taken: u64,
    drains: Vec<Drain>,
    /// The last request of a drain has ended.
    drained: bool,
    counters: Arc<ControllerCounters>,
    coalescing: Arc<SharedCoalescing>,
    /// Calls of a queue wait.
    held: bool,
    notice: Notice,
    /// Value of [`guestmem::faults`] last seen.
    faults: u64,
    untimed: u32,
    /// Queue that the next turn begins with.
    first: usize,
    /// Unit in flight that the next turn begins with.
    first_active: usize,
    /// Unit with requests that wait that the next one is of.
    next_backlog: usize,
    /// [`TURN_US`] or [`CONTENDED_TURN_US`] in ticks.
    turn_ticks: u64,
    /// [`SUBMISSION_US`] in ticks.
    submission_ticks: u64,
    /// When devices without I/O are looked at again before the reactor sleeps, in ticks.
    settle_at: u64,
}

impl Poller for DevicePoller {
    fn name(&self) -> &str {
        &self.name
    }

    fn poll(&mut self) -> u32 {
        match self.front {
            Front::Scsi if self.protected => self.turn::<ProtectedScsi>(),
            Front::Scsi => self.turn::<Scsi>(),
            Front::Blk => self.turn::<Blk>(),
        }
    }

    fn set_contended(&mut self, contended: bool) {
        let us = if contended { CONTENDED_TURN_US } else { TURN_US };
        self.turn_ticks = reactor::ticks::from_us(us);
    }

    fn arm(&mut self) -> bool {
        if self.calls_soon() {
            return false;
        }
        self.settle_idle();
        // A paused poller waits for a message, which wakes the reactor; one that has taken as much as it
        // may, for a device.
        self.paused
            || self.units.taken >= MAX_TAKEN
            || self.queues.iter_mut().all(RequestQueue::arm)
    }

    fn is_waiting(&self) -> bool {
        !self.units.active.is_empty()
    }

    fn wake_at(&self) -> u64 {
        self.units.wake_at().min(self.call_at())
    }

    fn disarm(&mut self) {
        self.queues.iter_mut().for_each(RequestQueue::disarm);
        self.units.ask_all();
    }
}

impl DevicePoller {
    /// The session's turn on its reactor. Returns how much was done.
    #[inline(always)]
    fn turn<F: FrontEnd>(&mut self) -> u32 {
        let mut events = 0;
        let mut turn_end = None;
        if self.member.is_told() {
            events += self.keep_order();
        }
        // What begins in this turn goes to its device when the turn is over.
        let in_flight = !self.units.active.is_empty();
        if !self.paused {
            let mut at = self.first;
            for _ in 0..self.queues.len() {
                if at >= self.queues.len() {
                    at = 0;
                }
                if self.units.taken >= MAX_TAKEN {
                    self.first = at;
                    break;
                }
                let queue = &self.queues[at];
                if queue.open && queue.ring.has_work() {
                    let (taken, over) = self.take::<F>(at, &mut turn_end);
                    events += taken;
                    if over {
                        self.first = at + 1;
                        break;
                    }
                }
                at += 1;
            }
        }
        if in_flight || !self.units.backlog.is_empty() {
            events += self.reap::<F>(turn_end);
        }
        if self.held {
            self.call_late();
        }
        if self.drained {
            self.answer_drains();
        }
        if events != 0 && guestmem::faults() != self.faults {
            self.memory_lost();
        }
        events
    }

    /// Takes a batch of requests from one queue, starts each, and publishes those that ended.
    /// Returns how many it took, and whether the turn that ends at `turn_end` (set by the first
    /// queue) is over: the rest of the requests wait in their rings for the next.
    fn take<F: FrontEnd>(&mut self, at: usize, turn_end: &mut Option<u64>) -> (u32, bool) {
        let now = reactor::ticks::now();
        let mut end = *turn_end.get_or_insert(now.saturating_add(self.turn_ticks));
        if now > end {
            return (0, true);
        }
        let popped = match self.queues[at].ring.pop(&mut self.heads) {
            Ok(popped) => popped,
            Err(why) => {
                self.fail(at, Failure::Ring(why));
                return (1, false);
            }
        };
        // Whatever the guest knew when it made these available.
        if self.member.is_told() {
            self.keep_order();
        }
        let ahead = (popped / 2).clamp(AHEAD_LEAST, AHEAD);
        let (mut count, mut over) = (popped, false);
        let again = self.queues[at].ring.is_replaying();
        let mut next = 0;
        while next < popped {
            if next > 0 {
                if reactor::ticks::now() > end {
                    self.queues[at].ring.undo_pop(&self.heads[next..popped]);
                    (count, over) = (next, true);
                    break;
                }
                // A driver that looks by itself goes on with these at the same time. One that has more in
                // the ring needs not: this moves the ring's cache line to and fro.
                let ring = &mut self.queues[at].ring;
                if !ring.has_seen_more() {
                    ring.show();
                }
            }
            let group = next..popped.min(next + ahead);
            let mut good = [0; AHEAD];
            let (mut looked, mut bad) = (0, None);
            for n in group.clone() {
                match self.look(at, n) {
                    Ok(slot) => good[looked] = slot,
                    Err(failure) => {
                        bad = Some((n, failure));
                        break;
                    }
                }
                looked += 1;
            }
            for slot in &good[..looked] {
                if again && self.end_interrupted::<F>(at, *slot) {
                    continue;
                }
                if !self.begin::<F>(at, *slot, now) {
                    // Pending: submitted when the clock is not looked at any more.
                    end -= self.submission_ticks;
                }
            }
            if let Some((n, failure)) = bad {
                // Nothing was done about it, nor about those behind it.
                self.queues[at].ring.undo_pop(&self.heads[n..popped]);
                self.fail(at, failure);
                break;
            }
            next = group.end;
        }
        *turn_end = Some(end);
        self.counters.requests.add(count as u64);
        self.queues[at].count(count as u64);
        self.publish(at);
        (count as u32, over)
    }

    /// Answers a request that was in flight in another process and cannot be done a second time. Whether it did.
    #[cold]
    fn end_interrupted<F: FrontEnd>(&mut self, at: usize, index: u16) -> bool {
        let head = self.slots[index].head;
        if !self.queues[at].ring.take_unrepeatable(head) {
            return false;
        }
        let Some(outcome) = F::interrupted(self, index) else { return false };
        self.finish::<F>(at, index, Ok(outcome), None);
        true
    }

    /// Walks the chain of the `n`th head into a slot, which makes the processor fetch its header. Returns
    /// the slot.
    #[inline(always)]
    fn look(&mut self, at: usize, n: usize) -> Result<u16, Failure> {
        let (queue, head) = (&mut self.queues[at], self.heads[n]);
        let Some(of_head) = queue.slots.get_mut(usize::from(head.index())) else {
            let (head, size) = (head.index(), queue.ring.size());
            return Err(Failure::Chain(ChainError::BadHead { head, size }));
        };
        if *of_head != queue::NONE {
            return Err(Failure::HeadInUse(head.index()));
        }
        let index = self.slots.take();
        let index = index.expect("there is a slot for each descriptor, or for all that wait");
        let slot = &mut self.slots[index];
        (slot.queue, slot.head, slot.at) = (queue.index, head.index(), at as u16);
        if let Err(why) = queue.ring.walk(&head, &mut slot.segments) {
            self.slots.give_back(index);
            return Err(Failure::Chain(why));
        }
        *of_head = index;
        Ok(index)
    }

    /// Begins the request of a slot, whose chain was walked, unless it has to wait. Whether it ended, or waits
    /// here.
    #[inline(always)]
    fn begin<F: FrontEnd>(&mut self, at: usize, index: u16, now: u64) -> bool {
        let end = match F::read(self, index) {
            Read::Nothing => {
                self.counters.malformed.add(1);
                self.queues[at].refuse::<F>(&self.slots[index]);
                self.vacate(at, index);
                return true;
            }
            Read::End(end) => end,
            Read::Request => {
                let slot = &mut self.slots[index];
                slot.counted = false;
                let admitted = self.units.admit(slot.target, slot.wants(), false);
                if admitted != Err(Obstacle::Nowhere) {
                    (slot.begun, slot.order) = (now, self.taken);
                    (slot.ended_by, slot.busy) = (response::OK, true);
                    (slot.counted, slot.marked) = (admitted.is_ok(), false);
                    self.taken += 1;
                    self.queues[at].in_flight += 1;
                    if admitted.is_ok() {
                        return self.start::<F>(at, index, now, false);
                    }
                    self.postpone(index);
                    return true;
                }
                Err(response::BAD_TARGET)
            }
        };
        let ticks = self.sample(now);
        self.finish::<F>(at, index, end, ticks);
        true
    }

    /// Gives a request to its unit; `waited`: it did not begin when it was taken. Whether it ended, or waits here.
    #[inline(always)]
    fn start<F: FrontEnd>(&mut self, at: usize, index: u16, now: u64, waited: bool) -> bool {
        let Some(outcome) = self.units.start(&mut self.slots[index], waited) else { return true };
        match outcome {
            Outcome::Pending => return false,
            Outcome::Suspended(error) => {
                self.units.waits_anew(&mut self.slots[index], waited);
                self.suspend(at, index, error);
            }
            _ if F::WAITS_FOR_DEVICE && is_put_off(&outcome) => self.put_off(index),
            _ => {
                let ticks = self.sample(now);
                self.finish::<F>(at, index, Ok(outcome), ticks);
            }
        }
        true
    }

    /// Collects what the logical units finished, goes on with each, begins what waited for that, and
    /// publishes. A unit at least has its turn, whether or not it is over (`turn_end`).
    fn reap<F: FrontEnd>(&mut self, turn_end: Option<u64>) -> u32 {
        let mut events = 0;
        let units = self.units.active.len();
        // One unit alone, for which nothing waits, has its turn whatever the clock says.
        let end = match turn_end {
            Some(end) => end,
            None if units <= 1 && self.units.backlog.is_empty() => u64::MAX,
            None => reactor::ticks::now().saturating_add(self.turn_ticks),
        };
        let mut next = if self.first_active < units { self.first_active } else { 0 };
        for left in (0..units).rev() {
            if next >= self.units.active.len() {
                next = 0;
            }
            let Some(&target) = self.units.active.get(next) else { break };
            let mut done = std::mem::take(&mut self.done);
            if let Some(unit) = self.units.at(target) {
                events += unit.lun.poll(&mut done);
            }
            for completion in done.drain(..) {
                self.resume::<F>(&completion);
            }
            self.done = done;
            // A unit that became idle leaves the list, and another takes its place.
            next += usize::from(self.units.active.get(next) == Some(&target));
            if left > 0 && reactor::ticks::now() > end {
                // The reactor does not sleep before the others were asked, whose wake-ups it has taken.
                events += 1;
                break;
            }
        }
        self.first_active = next;
        if !self.units.backlog.is_empty() {
            events += self.begin_waiting::<F>(end);
        }
        if events != 0 {
            for at in 0..self.queues.len() {
                self.publish(at);
            }
        }
        events
    }

    /// Goes on with the request whose I/O ended.
    #[inline]
    fn resume<F: FrontEnd>(&mut self, completion: &Completion) {
        let (at, index) = self.position(completion.tag);
        let slot = &mut self.slots[index];
        let begun = slot.begun;
        // With its end there is room for what the device did not take.
        let resumed = self.units.resume(slot, completion.result, F::WAITS_FOR_DEVICE);
        let outcome = match resumed {
            None => return,
            Some(Outcome::Pending) => {
                if slot.task.is_unrepeatable() && !slot.marked {
                    slot.marked = true;
                    self.queues[at].ring.mark_unrepeatable(slot.head);
                }
                return;
            }
            Some(Outcome::Suspended(error)) => return self.suspend(at, index, error),
            Some(outcome) => outcome,
        };
        if F::WAITS_FOR_DEVICE && is_put_off(&outcome) {
            return self.put_off(index);
        }
        if F::WAITS_FOR_DEVICE && self.overtakes(at, index, &outcome) {
            return;
        }
        // The device has read the clock, if it took any time.
        let ended = match completion.ended {
            0 => reactor::ticks::now(),
            ended => ended,
        };
        let timed = Some((ended.saturating_sub(begun), 1));
        self.finish::<F>(at, index, Ok(outcome), timed);
    }

    /// Writes the response of a request and puts it into the used ring. `Err` is a response code of
    /// virtio-scsi's without a SCSI status; `timed` is how long it took, in ticks, and for how many it counts.
    #[inline]
    fn finish<F: FrontEnd>(
        &mut self,
        at: usize,
        index: u16,
        end: Result<Outcome, u8>,
        timed: Option<(u64, u32)>,
    ) {
        let queue = &mut self.queues[at];
        let slot = &mut self.slots[index];
        // What a task management function ended is told, as that is answered: the guest goes on as if
        // it were not done, and nobody may do it again.
        let stays_marked = queue.leaving && slot.ended_by == response::OK && is_half_done(&end);
        if queue.muted || stays_marked {
            // Paused: this one was in flight.
            return self.vacate(at, index);
        }
        let Answer { is_good, transferred, used } = F::answer(slot, end, queue.stopping);
        if slot.busy
            && let Some(unit) = self.units.at(slot.target)
        {
            unit.counters.count(slot.kind, transferred, timed, is_good);
        }
        if !is_good {
            self.counters.errors.add(1);
        }
        queue.ring.push_used(slot.head, used);
        self.vacate(at, index);
    }

    /// The request of a slot has ended: the slot is free, and who waits for it as the last one is answered
    /// when the turn is over.
    #[inline]
    fn vacate(&mut self, at: usize, index: u16) {
        let (queue, slot) = (&mut self.queues[at], &mut self.slots[index]);
        if slot.busy {
            queue.in_flight -= 1;
            // There is none most of the time.
            for drain in &mut self.drains {
                self.drained |= drain.note(slot);
            }
        }
        slot.busy = false;
        queue.slots[usize::from(slot.head)] = queue::NONE;
        self.slots.give_back(index);
    }

    /// As [`DevicePoller::finish`], of whichever front end.
    #[cold]
    fn end(&mut self, at: usize, index: u16, end: Result<Outcome, u8>) {
        match self.front {
            Front::Scsi if self.protected => self.finish::<ProtectedScsi>(at, index, end, None),
            Front::Scsi => self.finish::<Scsi>(at, index, end, None),
            Front::Blk => self.finish::<Blk>(at, index, end, None),
        }
    }

    /// The time since `begun` for one of [`TIMED`] calls.
    #[inline]
    fn sample(&mut self, begun: u64) -> Option<(u64, u32)> {
        if self.untimed == 0 {
            self.untimed = TIMED - 1;
            return Some((reactor::ticks::now().saturating_sub(begun), TIMED));
        }
        self.untimed -= 1;
        None
    }

    /// The queue and the slot that a tag names.
    #[inline]
    fn position(&self, tag: u64) -> (usize, u16) {
        let index = tag as u16;
        (self.slots[index].at.into(), index)
    }
}

/// Whether the device did not take a request, or not all of it, for now.
#[inline(always)]
fn is_put_off(outcome: &Outcome) -> bool {
    matches!(outcome, Outcome::Done(Response { status: Status::TaskSetFull | Status::Busy, .. }))
}

/// Whether a request was stopped between two of its I/Os.
fn is_half_done(end: &Result<Outcome, u8>) -> bool {
    matches!(end, Ok(Outcome::Done(answer)) if answer.status == Status::TaskAborted)
}
