//! One request queue and the slots of its requests.

use std::os::fd::{AsFd, AsRawFd, OwnedFd, RawFd};
use std::sync::Arc;

use guestmem::GuestMemory;
use reactor::eventfd::Blocked;
use scsi::{Kind, Task};
use virtqueue::{ChainError, ConfigError, Head, QueueConfig, Segments, SplitQueue};
use zerocopy::IntoBytes;

use super::{Drain, Failure};
use crate::defs::{ResponseHeader, response};

/// What a request queue is made of.
#[derive(Debug)]
pub(crate) struct QueueSetup {
    /// Index of the virtqueue, from [`crate::defs::FIRST_REQUEST_QUEUE`].
    pub(crate) index: u16,
    pub(crate) config: QueueConfig,
    /// Made of `config`.
    pub(crate) ring: SplitQueue,
    /// The guest writes it after adding requests; `None`: it only ever adds them.
    pub(crate) kick: Option<OwnedFd>,
    /// Written after requests ended; `None`: the guest looks by itself.
    pub(crate) call: Option<OwnedFd>,
}

/// A request queue of one session on one reactor.
pub(crate) struct RequestQueue {
    pub(super) index: u16,
    pub(super) ring: SplitQueue,
    /// One for each descriptor: the head of a chain is unique in flight, so it names the slot.
    pub(super) slots: Box<[Slot]>,
    pub(super) in_flight: u32,
    /// Slots of requests that did not end at once, in no order; capacity for all. What is about
    /// requests in flight looks at these, not at thousands of slots.
    pub(super) listed: Vec<u16>,
    /// Slots that had a chain of the present memory, and so keep that mapped; capacity for all.
    used: Vec<u16>,
    /// Takes requests. Not while it is being stopped, nor after the guest broke the rules.
    open: bool,
    /// What ends is not told to the guest.
    pub(super) muted: bool,
    /// What ends half done is not told to the guest: it is done again later.
    pub(super) leaving: bool,
    /// What ends half done is to be sent again by the guest.
    pub(super) stopping: bool,
    config: QueueConfig,
    kick: Option<OwnedFd>,
    call: Option<OwnedFd>,
}

/// A request in flight.
pub(super) struct Slot {
    pub(super) task: Task,
    pub(super) segments: Segments,
    /// When it was taken, in ticks.
    pub(super) begun: u64,
    /// How many were taken before it.
    pub(super) order: u64,
    /// The guest's name for it.
    pub(super) id: u64,
    pub(super) target: u8,
    /// Response code if a task management function ends it.
    pub(super) ended_by: u8,
    pub(super) kind: Kind,
    /// SAM task attribute.
    pub(super) attribute: u8,
    /// Bytes of its data.
    pub(super) bytes: u32,
    /// It does not begin yet: it stands in its unit's list.
    pub(super) waits: bool,
    /// The next one in that list.
    pub(super) next: u64,
    /// Its place in [`RequestQueue::listed`].
    place: Option<u16>,
    /// It stands in [`RequestQueue::used`].
    used: bool,
    busy: bool,
    /// Its chain was walked, and it is about to begin.
    ready: bool,
}

impl Slot {
    fn new(queue: u16, index: u16, segments: Segments) -> Self {
        Slot {
            task: Task::new(u64::from(queue) << 16 | u64::from(index)),
            segments,
            begun: 0,
            order: 0,
            id: 0,
            target: 0,
            ended_by: response::OK,
            kind: Kind::Other,
            attribute: 0,
            bytes: 0,
            waits: false,
            next: 0,
            place: None,
            used: false,
            busy: false,
            ready: false,
        }
    }

    /// Queue and slot of a task's tag.
    #[inline]
    pub(super) fn from_tag(tag: u64) -> (u16, u16) {
        ((tag >> 16) as u16, tag as u16)
    }

    #[inline]
    pub(super) fn is_busy(&self) -> bool {
        self.busy
    }

    /// Clears `ready`: the request begins.
    #[inline]
    pub(super) fn begin(&mut self) {
        self.ready = false;
    }

    #[inline]
    pub(super) fn occupy(&mut self, target: u8, id: u64, order: u64, begun: u64) {
        self.target = target;
        self.id = id;
        self.order = order;
        self.begun = begun;
        self.ended_by = response::OK;
        self.busy = true;
    }
}

impl RequestQueue {
    /// Allocates everything that the queue will ever need: megabytes, so not on a reactor.
    pub(crate) fn new(setup: QueueSetup) -> Self {
        let mut ring = setup.ring;
        ring.disable_kick();
        let size = usize::from(ring.size());
        let room = (0..ring.size()).zip(Segments::many(size));
        let slots = room.map(|(i, segments)| Slot::new(setup.index, i, segments)).collect();
        RequestQueue {
            index: setup.index,
            ring,
            slots,
            in_flight: 0,
            listed: Vec::with_capacity(size),
            used: Vec::with_capacity(size),
            open: true,
            muted: false,
            leaving: false,
            stopping: false,
            config: setup.config,
            kick: setup.kick,
            call: setup.call,
        }
    }

    /// Whether the guest added requests that may be taken. At most one read of guest memory.
    #[inline(always)]
    pub(super) fn has_work(&self) -> bool {
        self.open && self.ring.has_work()
    }

    /// Walks the chain of `head` into its slot, which makes the processor fetch its header.
    #[inline(always)]
    pub(super) fn look(&mut self, head: &Head) -> Result<(), Failure> {
        let index = head.index();
        let Some(slot) = self.slots.get_mut(usize::from(index)) else {
            let size = self.ring.size();
            return Err(Failure::Chain(ChainError::BadHead { head: index, size }));
        };
        if slot.busy || slot.ready {
            return Err(Failure::HeadInUse(index));
        }
        if !slot.used {
            slot.used = true;
            self.used.push(index);
        }
        self.ring.walk(head, &mut slot.segments).map_err(Failure::Chain)?;
        slot.ready = true;
        Ok(())
    }

    /// The request of a slot has ended: the slot is free. Whether one of `drains`, of which there is
    /// none most of the time, has waited for it as the last one.
    #[inline]
    pub(super) fn vacate(&mut self, index: u16, drains: &mut [Drain]) -> bool {
        self.in_flight -= 1;
        let slot = &mut self.slots[usize::from(index)];
        let mut last = false;
        for drain in drains {
            last |= drain.note(self.index, slot);
        }
        slot.busy = false;
        if let Some(place) = slot.place.take() {
            self.listed.swap_remove(usize::from(place));
            if let Some(moved) = self.listed.get(usize::from(place)) {
                self.slots[usize::from(*moved)].place = Some(place);
            }
        }
        last
    }

    /// The request of a slot did not end at once.
    #[inline]
    pub(super) fn list(&mut self, index: u16) {
        let slot = &mut self.slots[usize::from(index)];
        if slot.place.is_none() {
            slot.place = Some(self.listed.len() as u16);
            self.listed.push(index);
        }
    }

    /// Answers a chain that is whole but too short to be a request.
    #[cold]
    pub(super) fn refuse(&mut self, index: u16) {
        let segments = &self.slots[usize::from(index)].segments;
        let header = ResponseHeader { response: response::FAILURE, ..Default::default() };
        let written = segments.writable().copy_from_slice(0, header.as_bytes());
        segments.mark_written(0, written);
        self.ring.push_used(index, written as u32);
    }

    /// Calls the guest.
    #[inline]
    pub(super) fn call(&mut self) -> Result<(), Blocked> {
        match &self.call {
            Some(fd) => reactor::eventfd::signal(fd.as_fd()),
            None => Ok(()),
        }
    }

    /// Calls the guest no more.
    pub(super) fn forget_call(&mut self) {
        self.call = None;
    }

    /// Replaces the call descriptor and calls the guest. QEMU does not wait for the answer to this
    /// message when it unmasks an interrupt, so what ended before it came went to a descriptor that
    /// nobody looks at any more, and the guest would wait forever. One call too many does no harm.
    pub(super) fn set_call(&mut self, call: Option<OwnedFd>) -> Result<(), Blocked> {
        self.call = call;
        self.call()
    }

    /// Before the reactor sleeps: `false` if there is work, or no kick to be woken by.
    pub(super) fn arm(&mut self) -> bool {
        !self.open || (self.kick.is_some() && !self.ring.enable_kick())
    }

    /// After the reactor woke.
    pub(super) fn disarm(&mut self) {
        if self.open {
            self.ring.disable_kick();
        }
    }

    /// Takes no more requests.
    pub(super) fn close(&mut self) {
        self.open = false;
    }

    /// Takes no more requests, and ends those in flight that are not done with their next I/O.
    pub(super) fn stop(&mut self) {
        self.close();
        self.stopping = true;
        self.end_early();
    }

    /// Every request in flight ends with its next I/O, one that did not begin yet with none.
    fn end_early(&mut self) {
        for index in &self.listed {
            let slot = &mut self.slots[usize::from(*index)];
            match slot.waits {
                true => slot.task.abort(),
                false => slot.task.stop(),
            }
        }
    }

    /// Requests of the time before that are still to be submitted again, if they will be.
    pub(super) fn to_replay(&self) -> u16 {
        if self.open { self.ring.to_replay() } else { 0 }
    }

    /// Every request in flight ends with its next I/O, one that did not begin yet with none, and
    /// those that are not done then are not answered: they stay marked as in flight. Only of a queue
    /// that tracks them.
    pub(super) fn leave(&mut self) {
        if !self.ring.is_tracking() {
            return;
        }
        self.leaving = true;
        self.end_early();
    }

    /// Writes nothing into the guest's rings any more. What was pushed and not published stays so.
    pub(super) fn mute(&mut self) {
        self.muted = true;
        self.open = false;
        self.call = None;
    }

    /// Index of the virtqueue.
    pub(crate) fn index(&self) -> u16 {
        self.index
    }

    /// Where to go on in the available ring.
    pub(crate) fn next_avail(&self) -> u16 {
        self.ring.next_avail()
    }

    /// The reactor cannot be woken by the kick: look all the time.
    pub(super) fn forget_kick(&mut self) {
        self.kick = None;
    }

    /// Descriptor to wake the reactor by.
    pub(crate) fn kick_fd(&self) -> Option<RawFd> {
        self.kick.as_ref().map(AsRawFd::as_raw_fd)
    }

    /// Goes on in new memory, with nothing in flight. On an error the queue lets go of the old
    /// memory and is closed.
    pub(super) fn remap(&mut self, memory: &Arc<GuestMemory>) -> Result<(), ConfigError> {
        for index in self.used.drain(..) {
            let slot = &mut self.slots[usize::from(index)];
            slot.segments.clear();
            slot.used = false;
        }
        self.ring.remap(Arc::clone(memory), &self.config)
    }
}
