//! The slots of requests in flight: one pool for all queues of a session on one reactor.
//!
//! A slot has room for the longest chain, some 2 KiB, and a peer can have 64 queues of 1024
//! descriptors: with a slot for each that were 160 MB, which cost the peer nothing. But no more than
//! [`MAX_TAKEN`] requests of a session wait on one reactor, and that is what the pool has at most: 2.5 MB,
//! or as many as all its queues have descriptors, if those are fewer. It grows while a queue is started,
//! never on the I/O path, and a slot that became free is the next one taken: it is in the cache.

use std::ops::{Index, IndexMut, Range};

use scsi::{Kind, Task};
use virtqueue::Segments;

use super::{BATCH, MAX_TAKEN};
use crate::defs::{RequestHeader, response};

/// Slots of one pool: those that may wait, and one batch more.
pub(super) const MAX_SLOTS: usize = MAX_TAKEN as usize + BATCH;

/// A request in flight.
pub(crate) struct Slot {
    pub(super) task: Task,
    pub(super) segments: Segments,
    /// Its virtqueue, and the head of its chain.
    pub(super) queue: u16,
    pub(super) head: u16,
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
    /// Its place in [`Slots::listed`].
    place: Option<u16>,
    /// Its unit has it; not so if it ends before.
    pub(super) busy: bool,
}

impl Slot {
    fn new(at: usize, segments: Segments) -> Self {
        Slot {
            task: Task::new(at as u64),
            segments,
            queue: 0,
            head: 0,
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
            busy: false,
        }
    }

    /// Takes the request of `header` for LUN 0 of `target`, with `bytes` of data; `order`: how many were
    /// taken before it; `begun`: when, in ticks.
    #[inline]
    pub(super) fn occupy(
        &mut self,
        target: u8,
        header: &RequestHeader,
        bytes: u32,
        order: u64,
        begun: u64,
    ) {
        self.target = target;
        self.id = header.id.get();
        self.kind = Kind::of(header.cdb[0]);
        self.attribute = header.task_attr;
        self.bytes = bytes;
        self.order = order;
        self.begun = begun;
        self.ended_by = response::OK;
        self.busy = true;
    }
}

/// New slots for a pool, at these places of it. Not to be made on a reactor.
pub(crate) fn make(places: Range<usize>) -> Vec<Slot> {
    let room = Segments::many(places.len());
    places.zip(room).map(|(at, segments)| Slot::new(at, segments)).collect()
}

/// The pool. Slots are named by their place, which is the tag of their task, too.
pub(super) struct Slots {
    all: Vec<Slot>,
    /// The last one is the next to be taken.
    free: Vec<u16>,
    /// Slots of requests that did not end at once, in no order. What is about requests in flight looks
    /// at these.
    listed: Vec<u16>,
    /// Slots before this one have had a chain of the present memory, and so keep that mapped.
    used: usize,
}

impl Slots {
    /// Without slots, but with the capacity for all.
    pub(super) fn new() -> Self {
        Slots {
            all: Vec::with_capacity(MAX_SLOTS),
            free: Vec::with_capacity(MAX_SLOTS),
            listed: Vec::with_capacity(MAX_SLOTS),
            used: 0,
        }
    }

    /// Places of the slots that are missing for queues of so many descriptors in all.
    pub(super) fn missing(&self, descriptors: usize) -> Range<usize> {
        self.all.len()..descriptors.min(MAX_SLOTS).max(self.all.len())
    }

    /// Takes what was made for [`Slots::missing`].
    pub(super) fn grow(&mut self, mut slots: Vec<Slot>) {
        let old = self.all.len();
        assert!(slots.first().is_none_or(|s| s.task.tag() == old as u64), "made for other places");
        assert!(old + slots.len() <= MAX_SLOTS, "there are as many as there may be");
        self.all.append(&mut slots);
        // The first ones are the first to be taken: the pages of those behind are perhaps never used.
        self.free.splice(0..0, (old as u16..self.all.len() as u16).rev());
    }

    /// Takes a slot, for the chain that begins at `head` of `queue`.
    #[inline(always)]
    pub(super) fn take(&mut self, queue: u16, head: u16) -> u16 {
        let at =
            self.free.pop().expect("there is a slot for each descriptor, or for all that wait");
        self.used = self.used.max(usize::from(at) + 1);
        let slot = &mut self[at];
        (slot.queue, slot.head) = (queue, head);
        at
    }

    /// Gives a slot back.
    #[inline]
    pub(super) fn give_back(&mut self, at: u16) {
        let slot = &mut self[at];
        slot.busy = false;
        if let Some(place) = slot.place.take() {
            self.listed.swap_remove(usize::from(place));
            if let Some(moved) = self.listed.get(usize::from(place)) {
                self.all[usize::from(*moved)].place = Some(place);
            }
        }
        self.free.push(at);
    }

    /// The request of a slot did not end at once.
    #[inline]
    pub(super) fn list(&mut self, at: u16) {
        let place = self.listed.len() as u16;
        let slot = &mut self[at];
        if slot.place.is_none() {
            slot.place = Some(place);
            self.listed.push(at);
        }
    }

    /// The requests that did not end at once.
    pub(super) fn listed(&self) -> impl Iterator<Item = &Slot> {
        self.listed.iter().map(|at| &self[*at])
    }

    /// Calls `f` with each request that did not end at once.
    pub(super) fn each_listed(&mut self, mut f: impl FnMut(&mut Slot)) {
        self.listed.iter().for_each(|at| f(&mut self.all[usize::from(*at)]));
    }

    /// Lets go of the guest memory, with nothing in flight.
    pub(super) fn forget_memory(&mut self) {
        let used = std::mem::take(&mut self.used);
        self.all[..used].iter_mut().for_each(|slot| slot.segments.clear());
    }
}

impl Index<u16> for Slots {
    type Output = Slot;

    #[inline(always)]
    fn index(&self, at: u16) -> &Slot {
        &self.all[usize::from(at)]
    }
}

impl IndexMut<u16> for Slots {
    #[inline(always)]
    fn index_mut(&mut self, at: u16) -> &mut Slot {
        &mut self.all[usize::from(at)]
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_pool_grows_with_its_queues_to_what_may_wait_and_no_further() {
        let mut slots = Slots::new();
        let mut descriptors = 0;
        for size in [128, 128, 256, 1024, 1024, 32768] {
            descriptors += size;
            let missing = slots.missing(descriptors);
            slots.grow(make(missing));
            assert_eq!(slots.free.len(), descriptors.min(MAX_SLOTS));
        }
        assert!(slots.missing(66 * 32768).is_empty());
        // Queues that stop leave their slots to the next.
        assert!(slots.missing(128).is_empty());
        let taken: Vec<_> = (0..MAX_SLOTS).map(|head| slots.take(2, head as u16)).collect();
        let mut sorted = taken.clone();
        sorted.sort_unstable();
        assert!(sorted.iter().copied().eq(0..MAX_SLOTS as u16), "each of them once");
        assert!(taken.iter().all(|at| slots[*at].task.tag() == u64::from(*at)));
    }

    #[test]
    fn the_slot_that_was_given_back_last_is_the_next() {
        let mut slots = Slots::new();
        slots.grow(make(0..8));
        assert_eq!([slots.take(2, 5), slots.take(2, 6), slots.take(3, 5)], [0, 1, 2]);
        slots.list(0);
        slots.list(1);
        slots.list(2);
        slots.list(1);
        slots.give_back(0);
        assert_eq!(slots.listed().map(|s| (s.queue, s.head)).collect::<Vec<_>>(), [(3, 5), (2, 6)]);
        assert_eq!(slots.take(4, 7), 0);
        slots.give_back(2);
        assert_eq!(slots.listed().map(|s| s.task.tag()).collect::<Vec<_>>(), [1]);
    }
}
