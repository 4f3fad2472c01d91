//! A request in flight. All queues of a session on one reactor have one pool of slots for them.
//!
//! A slot has room for the longest chain, some 2 KiB, and a peer can have 64 queues of 1024
//! descriptors: with a slot for each that were 160 MB, which cost the peer nothing. But no more than
//! [`MAX_TAKEN`] requests of a session wait on one reactor, and that is what the pool has at most: 2.5 MB,
//! or as many as all its queues have descriptors, if those are fewer; twice that with protection
//! information. It grows while a queue is started,
//! never on the I/O path.

use std::ops::Range;

use bdev::Slots;
use scsi::{Kind, Task};
use virtqueue::{MAX_SEGMENTS, Segments};

use super::in_flight::Wants;
use super::{BATCH, MAX_TAKEN};
use crate::defs::{SEG_MAX, response};

/// Slots of one pool: those that may wait, and one batch more.
pub(super) const MAX_SLOTS: u16 = MAX_TAKEN as u16 + BATCH as u16;

/// A request in flight. Its number in the pool is the tag of its task, too.
pub(crate) struct Slot {
    pub(super) task: Task,
    pub(super) segments: Segments,
    /// Its virtqueue, and the head of its chain.
    pub(super) queue: u16,
    pub(super) head: u16,
    /// Where that queue stands among those of the poller.
    pub(super) at: u16,
    /// When it was taken, in ticks.
    pub(super) begun: u64,
    /// How many were taken before it.
    pub(super) order: u64,
    /// Where it stands in its task set, while it waits ([`super::task_set::Place::key`]).
    pub(super) key: u64,
    /// Where it is counted, if it is HEAD OF QUEUE ([`super::heads`]).
    pub(super) group: u8,
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
    /// The generation in which its unit got it ([`super::in_flight`]).
    pub(super) generation: u32,
    /// It counts in its volume's limits.
    pub(super) counted: bool,
    /// The in-flight region says that it cannot be done a second time.
    pub(super) marked: bool,
    /// It does not begin yet: it stands in its unit's list.
    pub(super) waits: bool,
    /// The next one in that list.
    pub(super) next: u64,
    /// It is in flight: a unit has it, or it waits for one. Not so in a slot that is free, and of a
    /// request that ends before it came to a unit.
    pub(super) busy: bool,
}

impl Slot {
    fn new(at: usize, segments: Segments) -> Self {
        Slot {
            task: Task::new(at as u64),
            segments,
            queue: 0,
            head: 0,
            at: 0,
            begun: 0,
            order: 0,
            key: 0,
            group: 0,
            id: 0,
            target: 0,
            ended_by: response::OK,
            kind: Kind::Other,
            attribute: 0,
            bytes: 0,
            generation: 0,
            counted: false,
            marked: false,
            waits: false,
            next: 0,
            busy: false,
        }
    }

    /// What says whether it may begin.
    pub(super) fn wants(&self) -> Wants {
        let Slot { kind, attribute, key, order, bytes, counted, .. } = *self;
        Wants { kind, attribute, key, order, bytes, counted }
    }
}

/// The numbers of the slots that `pool` lacks for queues of so many descriptors in all.
pub(super) fn missing(pool: &Slots<Slot>, descriptors: usize) -> Range<usize> {
    pool.len()..descriptors.min(MAX_SLOTS.into()).max(pool.len())
}

/// Runs that the longest chain of a session has.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) enum Chains {
    Plain,
    /// With protection information, which may lie in as many runs as the data.
    Protected,
}

impl Chains {
    fn limit(self) -> usize {
        match self {
            Chains::Plain => MAX_SEGMENTS,
            Chains::Protected => MAX_SEGMENTS + SEG_MAX as usize,
        }
    }
}

/// New slots for a pool, with these numbers. Not to be made on a reactor.
pub(crate) fn make(numbers: Range<usize>, chains: Chains) -> Vec<Slot> {
    let room = Segments::many(numbers.len(), chains.limit());
    numbers.zip(room).map(|(at, segments)| Slot::new(at, segments)).collect()
}

/// Puts what was made for [`missing`] into `pool`.
pub(super) fn grow(pool: &mut Slots<Slot>, slots: Vec<Slot>) {
    let first = slots.first().map_or(pool.len() as u64, |slot| slot.task.tag());
    assert_eq!(first, pool.len() as u64, "made for other places");
    pool.grow(slots);
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_pool_grows_with_its_queues_to_what_may_wait_and_no_further() {
        let mut pool = Slots::with_capacity(MAX_SLOTS);
        let most = usize::from(MAX_SLOTS);
        let mut descriptors = 0;
        for size in [128, 128, 256, 1024, 1024, 32768] {
            descriptors += size;
            let missing = missing(&pool, descriptors);
            grow(&mut pool, make(missing, Chains::Plain));
            assert_eq!(pool.len(), descriptors.min(most));
        }
        assert!(missing(&pool, 66 * 32768).is_empty());
        // Queues that stop leave their slots to the next.
        assert!(missing(&pool, 128).is_empty());
        let mut taken: Vec<_> = (0..most).filter_map(|_| pool.take()).collect();
        assert!(taken.iter().all(|at| pool[*at].task.tag() == u64::from(*at)));
        taken.sort_unstable();
        assert!(taken.into_iter().eq(0..MAX_SLOTS), "each of them once");
    }
}
