//! Room for what an owner may have with its disk at a time, given to its channels in turn: a busy disk of a guest,
//! which asks again in the moment in which there is room, does not keep the guest's other disks from the kernel for
//! as long as it is busy.
//!
//! A channel that has something there looks again when that ends. One that has nothing, and finds no room,
//! stands in the owner's queue; room goes to the first of that queue before anybody else may take it, and its
//! thread is woken. So whoever asks again in the moment in which there is room keeps nobody from it.

use std::sync::Arc;
use std::sync::atomic::AtomicU32;
use std::sync::atomic::Ordering::{Relaxed, SeqCst};

use crossbeam_queue::ArrayQueue;
use reactor::{Owner, Waker};

use super::Shared;
use super::owners::{Counts, NO_LIMIT};

/// Channels of one owner that can wait without looking again and again.
const WAITERS: usize = 256;

/// What the channels of one owner have of one kind, all together.
pub(super) struct Room {
    /// What is in the kernel, and room that was given and not used yet.
    taken: AtomicU32,
    /// Channels that wait and have nothing in the kernel, in order.
    waiting: ArrayQueue<Arc<Waiter>>,
}

/// A channel that waits for room.
struct Waiter {
    waker: Waker,
    /// [`NOTHING`], [`GIVEN`] or [`GONE`].
    given: AtomicU32,
}

/// It waits, or does not.
const NOTHING: u32 = 0;
/// There is room for one, which is counted already.
const GIVEN: u32 = 1;
/// The channel is closed.
const GONE: u32 = 2;

impl Waiter {
    /// Gives it room for one; whether it is still there.
    fn give(&self) -> bool {
        let there = self.given.compare_exchange(NOTHING, GIVEN, SeqCst, SeqCst).is_ok();
        if there {
            self.waker.wake();
        }
        there
    }

    /// Takes the room that it was given, if it was.
    fn take(&self) -> bool {
        self.given.compare_exchange(GIVEN, NOTHING, SeqCst, SeqCst).is_ok()
    }
}

impl Room {
    pub(super) fn new() -> Room {
        Room { taken: AtomicU32::new(0), waiting: ArrayQueue::new(WAITERS) }
    }

    /// How much of it is taken.
    #[inline]
    pub(super) fn taken(&self) -> u32 {
        self.taken.load(Relaxed)
    }

    /// Gives what there is to those that wait, in order; all have `limit` together.
    #[cold]
    fn hand_out(&self, limit: u32) {
        while self.taken.load(SeqCst) < limit {
            let Some(waiter) = self.waiting.pop() else { return };
            self.taken.fetch_add(1, SeqCst);
            if !waiter.give() {
                self.taken.fetch_sub(1, SeqCst);
            }
        }
    }
}

/// A channel's part of its owner's room.
pub(super) struct RoomShare {
    /// Of what is taken, what this channel has.
    held: u32,
    waiter: Arc<Waiter>,
    /// It stands in the owner's queue, or was given room that it has not used.
    waits: bool,
}

impl RoomShare {
    /// Of a channel whose thread `waker` wakes.
    pub(super) fn new(waker: Waker) -> RoomShare {
        let waiter = Arc::new(Waiter { waker, given: AtomicU32::new(NOTHING) });
        RoomShare { held: 0, waiter, waits: false }
    }

    /// What it has.
    #[inline]
    pub(super) fn held(&self) -> u32 {
        self.held
    }

    /// Takes room for one of `room`, of which all have `limit` together (`None`: without end), until
    /// [`RoomShare::end`]. Whether there is.
    #[inline]
    pub(super) fn begin(&mut self, room: &Room, limit: Option<u32>) -> bool {
        if self.waits {
            // Its turn comes, also where there is no limit any more: what is in the kernel ends.
            if !self.waiter.take() {
                return false;
            }
            self.waits = false;
        } else {
            // Two threads may both find the last room: one more does not matter.
            if limit.is_some_and(|limit| room.taken() >= limit || !room.waiting.is_empty()) {
                return false;
            }
            room.taken.fetch_add(1, Relaxed);
        }
        self.held += 1;
        true
    }

    /// One that began is no longer in the kernel.
    #[inline]
    pub(super) fn end(&mut self, room: &Room, limit: impl FnOnce() -> u32) {
        self.held -= 1;
        // First counted, then looked: who waits stands in the queue before it looks a last time.
        room.taken.fetch_sub(1, SeqCst);
        if !room.waiting.is_empty() {
            room.hand_out(limit());
        }
    }

    /// The channel has something that waits. Has its thread woken when it may begin it, if nothing of the
    /// channel is in the kernel whose end does that.
    pub(super) fn wait(&mut self, room: &Room, limit: u32) {
        if self.held > 0 {
            return;
        }
        if !self.waits {
            self.waits = room.waiting.push(Arc::clone(&self.waiter)).is_ok();
            if !self.waits {
                self.waiter.waker.wake();
            }
        }
        room.hand_out(limit);
    }

    /// Gives back all that it has, and what it was given: the channel is closed.
    pub(super) fn close(&mut self, room: &Room, limit: u32) {
        let unused = u32::from(self.waiter.given.swap(GONE, SeqCst) == GIVEN);
        room.taken.fetch_sub(std::mem::take(&mut self.held) + unused, SeqCst);
        room.hand_out(limit);
    }
}

/// What a channel knows of its owner's counts. Dropped after its ring: then the kernel has nothing of it.
pub(super) struct Share {
    pub(super) shared: Arc<Shared>,
    /// `None`: without an owner.
    counts: Option<Arc<Counts>>,
    share: RoomShare,
}

impl Share {
    /// Of a channel of `owner`'s on `shared`, whose thread `waker` wakes.
    pub(super) fn new(shared: Arc<Shared>, owner: Option<Owner>, waker: Waker) -> Self {
        let counts = owner.map(|owner| shared.owners.counts_of(owner));
        Share { shared, counts, share: RoomShare::new(waker) }
    }

    /// Whether the kernel may be given one more request at `now`, in ticks, which is then counted until
    /// [`Share::end`].
    #[inline]
    pub(super) fn begin(&mut self, now: u64) -> bool {
        let Some(counts) = &self.counts else { return true };
        let owners = &self.shared.owners;
        counts.asked.store(now, Relaxed);
        owners.look(now);
        let share = owners.share.load(Relaxed);
        let there = self.share.begin(&counts.room, (share != NO_LIMIT).then_some(share));
        if !there {
            counts.pressed.store(true, Relaxed);
        }
        there
    }

    #[cfg(test)]
    pub(super) fn owner(&self) -> Option<Owner> {
        self.counts.as_ref().map(|counts| counts.owner)
    }

    /// One that began is no longer in the kernel. `took`: how long it was there, in ticks, if that says
    /// something about the disk.
    #[inline]
    pub(super) fn end(&mut self, took: Option<u64>) {
        let Some(counts) = &self.counts else { return };
        let owners = &self.shared.owners;
        if let Some(ticks) = took
            && owners.share.load(Relaxed) != NO_LIMIT
        {
            counts.ended.fetch_add(1, Relaxed);
            counts.ticks.fetch_add(ticks, Relaxed);
        }
        self.share.end(&counts.room, || owners.share.load(Relaxed));
    }

    /// The channel has requests that wait. Has its thread woken when it may begin one, if nothing of the
    /// channel is in the kernel whose end does that.
    pub(super) fn wait(&mut self) {
        let Some(counts) = &self.counts else { return };
        self.share.wait(&counts.room, self.shared.owners.share.load(Relaxed));
    }
}

impl Drop for Share {
    fn drop(&mut self) {
        let Some(counts) = self.counts.take() else { return };
        let owners = &self.shared.owners;
        self.share.close(&counts.room, owners.share.load(Relaxed));
        owners.leave(counts);
    }
}
