//! One request queue.

use std::os::fd::{AsFd, AsRawFd, OwnedFd, RawFd};
use std::sync::Arc;

use guestmem::GuestMemory;
use reactor::eventfd::Blocked;
use virtqueue::{ConfigError, QueueConfig, SplitQueue};

use super::calls::Pace;
use super::front::FrontEnd;
use super::slot::Slot;
use crate::placement::Placement;

/// No slot: a pool has fewer.
pub(super) const NONE: u16 = u16::MAX;

/// What a request queue is made of.
#[derive(Debug)]
pub(crate) struct QueueSetup {
    /// Index of the virtqueue.
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
    /// Of each descriptor the slot of the chain that it is the head of, while that is in flight.
    pub(super) slots: Box<[u16]>,
    pub(super) in_flight: u32,
    pub(super) pace: Pace,
    /// Where its requests are counted.
    placement: Arc<Placement>,
    /// Takes requests. Not while it is being stopped or parked, nor after the guest broke the rules.
    pub(super) open: bool,
    /// It takes none until it goes on, here or on another reactor.
    pub(super) parked: bool,
    /// What ends is not told to the guest.
    pub(super) muted: bool,
    /// What ends half done is not told to the guest: it is done again later, unless a task management
    /// function ended it.
    pub(super) leaving: bool,
    /// What ends half done is to be sent again by the guest, or is taken again.
    pub(super) stopping: bool,
    /// Requests that were suspended and neither ended nor stay in their slots: their heads, and how many
    /// were taken before each. See `suspended`.
    kept: Vec<(u64, u16)>,
    config: QueueConfig,
    kick: Option<OwnedFd>,
    pub(super) call: Option<OwnedFd>,
}

impl RequestQueue {
    /// A queue that takes requests as soon as a poller has it.
    pub(crate) fn new(setup: QueueSetup, placement: Arc<Placement>) -> Self {
        let mut ring = setup.ring;
        ring.disable_kick();
        let slots = vec![NONE; usize::from(ring.size())].into_boxed_slice();
        RequestQueue {
            index: setup.index,
            ring,
            slots,
            in_flight: 0,
            pace: Pace::default(),
            placement,
            open: true,
            parked: false,
            muted: false,
            leaving: false,
            stopping: false,
            kept: Vec::new(),
            config: setup.config,
            kick: setup.kick,
            call: setup.call,
        }
    }

    /// The request of a slot is not answered: it waits for the queue to go on, or whoever does instead.
    #[cold]
    pub(super) fn keep(&mut self, slot: &Slot) {
        self.kept.push((slot.order, slot.head));
    }

    /// Whether a request was kept that was taken before the one with that `order`.
    #[inline(always)]
    pub(super) fn kept_before(&self, order: u64) -> bool {
        self.kept.iter().any(|kept| kept.0 < order)
    }

    /// Whether one that was taken later than another that is not used is: who goes on at the used index finds not all.
    pub(super) fn is_overtaken(&self) -> bool {
        let has_slot = |head| self.slots.get(usize::from(head)).is_some_and(|slot| *slot != NONE);
        let is_kept = |head| self.kept.iter().any(|kept| kept.1 == head);
        !self.ring.may_give_back(|head| has_slot(head) || is_kept(head))
    }

    /// The heads of what was kept, in the order in which they were taken.
    pub(super) fn take_kept(&mut self) -> Vec<u16> {
        let mut kept = std::mem::take(&mut self.kept);
        kept.sort_unstable();
        kept.into_iter().map(|(_, head)| head).collect()
    }

    /// Takes again what was kept, before all else.
    pub(super) fn take_again(&mut self) {
        if !self.muted && !self.stopping {
            let kept = self.take_kept();
            self.ring.take_again(&kept);
        }
    }

    /// Answers a chain that is whole but too short to be a request.
    #[cold]
    pub(super) fn refuse<F: FrontEnd>(&mut self, slot: &Slot) {
        let written = F::refuse(&slot.segments);
        self.ring.push_used(slot.head, written);
    }

    /// Calls the guest, whatever it wants.
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
        (self.open, self.parked) = (false, false);
    }

    /// Takes no requests until [`RequestQueue::unpark`]. Whether it did before.
    pub(super) fn park(&mut self) -> bool {
        if self.open {
            (self.open, self.parked) = (false, true);
        }
        self.parked
    }

    /// Goes on after [`RequestQueue::park`], unless it was closed meanwhile.
    pub(super) fn unpark(&mut self) {
        if std::mem::take(&mut self.parked) {
            self.open = true;
            self.take_again();
        }
    }

    /// Whether it is parked, and another reactor can go on with it: nothing of it is left here.
    pub(super) fn may_leave(&self) -> bool {
        let rests = self.in_flight == 0 && self.ring.to_replay() == 0;
        self.parked && rests && !self.muted && !self.leaving && !self.stopping
    }

    /// So many requests were taken.
    #[inline(always)]
    pub(super) fn count(&self, requests: u64) {
        self.placement.count(self.index, requests);
    }

    /// Takes no more requests; those in flight that are not done are to end with their next I/O.
    pub(super) fn stop(&mut self) {
        self.close();
        self.stopping = true;
    }

    /// As [`RequestQueue::stop`], for as long as `soon`: it takes requests again after that.
    pub(super) fn end_soon(&mut self, soon: bool) {
        // One that is closed has its own reason.
        if self.open {
            self.stopping = soon;
        }
    }

    /// Requests of the time before that are still to be submitted again, if they will be.
    pub(super) fn to_replay(&self) -> u16 {
        if self.open { self.ring.to_replay() } else { 0 }
    }

    /// Requests that are not done with their next I/O are not answered: they stay marked as in
    /// flight. Only of a queue that tracks them.
    pub(super) fn leave(&mut self) {
        self.leaving = self.ring.is_tracking();
    }

    /// Writes nothing into the guest's rings any more. What was pushed and not published stays so.
    pub(super) fn mute(&mut self) {
        self.muted = true;
        self.close();
        self.call = None;
    }

    /// Index of the virtqueue.
    pub(crate) fn index(&self) -> u16 {
        self.index
    }

    /// Its descriptors.
    pub(crate) fn size(&self) -> u16 {
        self.config.size
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
        self.ring.remap(Arc::clone(memory), &self.config)
    }
}
