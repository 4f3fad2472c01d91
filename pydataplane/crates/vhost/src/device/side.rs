//! A queue that the controller's thread serves itself: control and events.

use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::Arc;

use guestmem::GuestMemory;
use virtqueue::{ConfigError, Head, QueueConfig, Segments, SplitQueue};

use crate::failure::Failure;

/// Runs of memory in a chain of these queues; the longest message has 24 bytes and a response.
const SEGMENTS: usize = 16;

/// Times that kicks are asked for again when the available index moved meanwhile.
const MAX_REARM_RETRIES: u32 = 16;

/// A control or event queue.
pub(super) struct SideQueue {
    ring: SplitQueue,
    config: QueueConfig,
    kick: Option<OwnedFd>,
    call: Option<OwnedFd>,
    /// The guest broke the rules: nothing is taken until the ring is set up anew.
    broken: bool,
}

/// A chain taken from a side queue.
pub(super) struct Chain {
    pub(super) index: u16,
    pub(super) segments: Segments,
}

impl SideQueue {
    /// Of `ring`, which was made of `config`.
    pub(super) fn new(
        mut ring: SplitQueue,
        config: QueueConfig,
        kick: Option<OwnedFd>,
        call: Option<OwnedFd>,
    ) -> Self {
        // Nobody polls these: kicks are always wanted. What is there already is taken at start.
        _ = ring.enable_kick();
        SideQueue { ring, config, kick, call, broken: false }
    }

    pub(super) fn next_avail(&self) -> u16 {
        self.ring.next_avail()
    }

    /// Whether the guest added something that was not taken.
    pub(super) fn has_work(&self) -> bool {
        self.ring.has_work()
    }

    /// Readable after the guest added something.
    pub(super) fn kick(&self) -> Option<BorrowedFd<'_>> {
        self.kick.as_ref().map(AsFd::as_fd)
    }

    /// Clears the kick, before the ring is looked at. `false`: the descriptor is
    /// not usable, and no longer waited for.
    pub(super) fn clear_kick(&mut self) {
        if let Some(fd) = &self.kick
            && reactor::eventfd::clear(fd.as_fd()).is_err()
        {
            self.kick = None;
        }
    }

    pub(super) fn set_call(&mut self, call: Option<OwnedFd>) {
        self.call = call;
        // It may have missed one; one too many does no harm.
        self.call_guest();
    }

    pub(super) fn call_guest(&mut self) {
        if let Some(fd) = &self.call
            && reactor::eventfd::signal(fd.as_fd()).is_err()
        {
            self.call = None;
        }
    }

    /// The next chain, if the guest added one; asks for a kick if not.
    pub(super) fn take(&mut self) -> Result<Option<Chain>, Failure> {
        if self.broken {
            return Ok(None);
        }
        let taken = self.try_take();
        self.broken = taken.is_err();
        taken
    }

    fn try_take(&mut self) -> Result<Option<Chain>, Failure> {
        let mut heads = [Head::default()];
        let mut retries = 0;
        while self.ring.pop(&mut heads).map_err(Failure::Ring)? == 0 {
            retries += 1;
            // A driver whose index comes and goes only loses its own kick.
            if !self.ring.enable_kick() || retries == MAX_REARM_RETRIES {
                return Ok(None);
            }
        }
        let mut segments = Segments::with_limit(SEGMENTS);
        self.ring.walk(&heads[0], &mut segments).map_err(Failure::Chain)?;
        Ok(Some(Chain { index: heads[0].index(), segments }))
    }

    /// Answers a chain with `bytes`, cut to what it has room for, and calls the guest.
    pub(super) fn answer(&mut self, chain: &Chain, bytes: &[u8]) {
        let written = chain.segments.writable().copy_from_slice(0, bytes);
        chain.segments.mark_written(0, written);
        self.ring.push_used(chain.index, written as u32);
        if self.ring.publish() {
            self.call_guest();
        }
    }

    /// Goes on in another memory.
    pub(super) fn remap(&mut self, memory: &Arc<GuestMemory>) -> Result<(), ConfigError> {
        self.ring.remap(Arc::clone(memory), &self.config)
    }
}
