//! The requests of one unit that were taken and do not begin yet, in three lists: reads, all others, and those whose
//! task attribute gives them a place of their own. What becomes of them is in `waiting`.
//!
//! A limit of one direction is not to hold back the other, so each has its list, and where the first of one waits for
//! a limit the first of the other may begin. FLUSH, UNMAP, VERIFY and whatever else no limit is of stand with the
//! writes: what changes blocks, or makes changes durable, begins in the order in which it was taken. Where both
//! could begin in a volume with limits, they take turns: a total is shared, however many wait of either. Without
//! limits, the one that was taken first begins first.
//!
//! One that is HEAD OF QUEUE goes before all that are not. Of those that wait, the one that was taken first begins first:
//! all of them are enabled when they are accepted (SAM-5 8.6), which gives them no order, and as a stack the oldest
//! would never begin while newer ones keep coming. One that is ORDERED is a barrier (SAM-5 8.6): it begins after all that
//! were taken before it, of either direction, and none that was taken later begins before it.
//!
//! The slots are the lists' links, so that nothing is allocated, and a list is no longer than there are slots.

use bdev::Slots;
use scsi::Kind;

use super::slot::Slot;
use crate::defs::task_attribute;

/// No request.
pub(super) const NONE: u64 = u64::MAX;

/// Places of the lists.
const READS: usize = 0;
const OTHERS: usize = 1;
/// First those that are HEAD OF QUEUE, and then those that are ORDERED.
const PLACED: usize = 2;
const LISTS: usize = 3;

/// A list, by tag; each slot names the next one.
#[derive(Clone, Copy)]
struct List {
    first: u64,
    last: u64,
}

/// The lists of one unit.
pub(super) struct Waiting {
    lists: [List; LISTS],
    /// The last of those that are HEAD OF QUEUE.
    last_head: u64,
    /// How many requests are in them.
    count: u32,
    /// The direction whose turn it is, [`READS`] or [`OTHERS`].
    turn: usize,
}

impl Waiting {
    /// No request waits.
    pub(super) const NOBODY: Waiting = Waiting {
        lists: [List { first: NONE, last: NONE }; LISTS],
        last_head: NONE,
        count: 0,
        turn: READS,
    };

    /// Whether no request waits.
    #[inline(always)]
    pub(super) fn is_empty(&self) -> bool {
        self.count == 0
    }

    /// The request `tag`, which was just taken, waits: behind all of its list, but if it is HEAD OF QUEUE before those
    /// that are not.
    pub(super) fn push(&mut self, slots: &mut Slots<Slot>, tag: u64) {
        let slot = &slots[tag as u16];
        let list = self.lists[list_of(slot)];
        match slot.attribute {
            task_attribute::HEAD_OF_QUEUE => {
                let after = self.behind_heads(slots);
                self.link(slots, self.last_head, tag, after);
            }
            _ => self.link(slots, list.last, tag, NONE),
        }
    }

    /// The request `tag`, which had begun, waits where it stood: before all of its list that were taken later.
    pub(super) fn insert(&mut self, slots: &mut Slots<Slot>, tag: u64) {
        let slot = &slots[tag as u16];
        let place = |slot: &Slot| (slot.attribute != task_attribute::HEAD_OF_QUEUE, slot.order);
        let stands = place(slot);
        let (mut before, mut after) = (NONE, self.lists[list_of(slot)].first);
        while after != NONE && place(&slots[after as u16]) < stands {
            (before, after) = (after, slots[after as u16].next);
        }
        self.link(slots, before, tag, after);
    }

    fn link(&mut self, slots: &mut Slots<Slot>, before: u64, tag: u64, after: u64) {
        let slot = &mut slots[tag as u16];
        (slot.waits, slot.next) = (true, after);
        if slot.attribute == task_attribute::HEAD_OF_QUEUE && before == self.last_head {
            self.last_head = tag;
        }
        let list = &mut self.lists[list_of(slot)];
        match before {
            NONE => list.first = tag,
            _ => slots[before as u16].next = tag,
        }
        if after == NONE {
            list.last = tag;
        }
        self.count += 1;
    }

    /// Which requests may begin as far as the others that wait are concerned; the second one only where the first
    /// waits for a limit or for another reactor. `limited`: the volume has limits.
    pub(super) fn next(&self, slots: &Slots<Slot>, limited: bool) -> [u64; 2] {
        let order = |tag| if tag == NONE { u64::MAX } else { slots[tag as u16].order };
        let placed = self.lists[PLACED].first;
        if self.has_head() {
            return [placed, NONE];
        }
        let barrier = order(placed);
        let [ours, theirs] = [self.turn, OTHERS - self.turn].map(|list| {
            let first = self.lists[list].first;
            if order(first) < barrier { first } else { NONE }
        });
        match (ours, theirs) {
            (NONE, NONE) => [placed, NONE],
            (one, NONE) | (NONE, one) => [one, NONE],
            (ours, theirs) if limited => [ours, theirs],
            (ours, theirs) => [if order(ours) < order(theirs) { ours } else { theirs }, NONE],
        }
    }

    /// The request that stands before all others: one that is HEAD OF QUEUE, or that which was taken first.
    pub(super) fn first(&self, slots: &Slots<Slot>) -> u64 {
        match self.last_head {
            NONE => self.earliest(slots),
            _ => self.lists[PLACED].first,
        }
    }

    /// Of the first of each list the one that was taken first.
    fn earliest(&self, slots: &Slots<Slot>) -> u64 {
        let firsts = self.lists.iter().map(|list| list.first).filter(|tag| *tag != NONE);
        firsts.min_by_key(|tag| slots[*tag as u16].order).unwrap_or(NONE)
    }

    /// Whether one that is HEAD OF QUEUE waits.
    #[inline(always)]
    pub(super) fn has_head(&self) -> bool {
        self.last_head != NONE
    }

    /// The first of those that are ORDERED.
    pub(super) fn first_ordered(&self, slots: &Slots<Slot>) -> u64 {
        self.behind_heads(slots)
    }

    /// The first of those that have a place of their own and are not HEAD OF QUEUE.
    fn behind_heads(&self, slots: &Slots<Slot>) -> u64 {
        match self.last_head {
            NONE => self.lists[PLACED].first,
            last => slots[last as u16].next,
        }
    }

    /// How many requests were taken before the first of all that wait; the most there is if none does.
    pub(super) fn oldest(&self, slots: &Slots<Slot>) -> u64 {
        match self.earliest(slots) {
            NONE => u64::MAX,
            tag => slots[tag as u16].order,
        }
    }

    /// The request `tag`, of [`Waiting::next`], waits no more. It is the other direction's turn.
    pub(super) fn take(&mut self, slots: &mut Slots<Slot>, tag: u64) {
        let slot = &mut slots[tag as u16];
        let nth = list_of(slot);
        let list = &mut self.lists[nth];
        debug_assert_eq!(list.first, tag, "it is not the first of its list");
        slot.waits = false;
        list.first = std::mem::replace(&mut slot.next, NONE);
        if list.first == NONE {
            list.last = NONE;
        }
        if self.last_head == tag {
            self.last_head = NONE;
        }
        self.count -= 1;
        if nth != PLACED {
            self.turn = OTHERS - nth;
        }
    }

    /// Those that `is_meant` wait no more. Returns the first of them, whose slot names the next.
    pub(super) fn take_out(
        &mut self,
        slots: &mut Slots<Slot>,
        is_meant: impl Fn(&Slot) -> bool,
    ) -> u64 {
        let mut out = List { first: NONE, last: NONE };
        self.last_head = NONE;
        for nth in 0..LISTS {
            let mut tag = std::mem::replace(&mut self.lists[nth], Waiting::NOBODY.lists[nth]).first;
            while tag != NONE {
                let slot = &mut slots[tag as u16];
                let next = std::mem::replace(&mut slot.next, NONE);
                let meant = is_meant(slot);
                let list = if meant { &mut out } else { &mut self.lists[nth] };
                slot.waits = !meant;
                if !meant && slot.attribute == task_attribute::HEAD_OF_QUEUE {
                    self.last_head = tag;
                }
                self.count -= u32::from(meant);
                match std::mem::replace(&mut list.last, tag) {
                    NONE => list.first = tag,
                    last => slots[last as u16].next = tag,
                }
                tag = next;
            }
        }
        out.first
    }
}

/// The list that a request waits in.
fn list_of(slot: &Slot) -> usize {
    match slot.attribute {
        task_attribute::HEAD_OF_QUEUE | task_attribute::ORDERED => PLACED,
        _ if slot.kind == Kind::Read => READS,
        _ => OTHERS,
    }
}

#[cfg(test)]
mod tests {
    use super::super::slot::{Chains, grow, make};
    use super::*;
    use proptest::prelude::*;

    const ORDERED: u8 = task_attribute::ORDERED;
    const HEAD_OF_QUEUE: u8 = task_attribute::HEAD_OF_QUEUE;
    const SIMPLE: u8 = 0;

    fn slots(count: u16) -> Slots<Slot> {
        let mut slots = Slots::with_capacity(count);
        grow(&mut slots, make(0..usize::from(count), Chains::Plain));
        slots
    }

    /// Requests that wait, of these kinds and attributes, each taken after the one before it.
    fn waiting(requests: &[(Kind, u8)]) -> (Slots<Slot>, Waiting) {
        let (mut slots, mut waiting) = (slots(32), Waiting::NOBODY);
        for (nth, (kind, attribute)) in requests.iter().enumerate() {
            let slot = &mut slots[nth as u16];
            (slot.kind, slot.attribute, slot.order) = (*kind, *attribute, nth as u64);
            waiting.push(&mut slots, nth as u64);
        }
        (slots, waiting)
    }

    /// All that waits, each begun as soon as those before it let it.
    fn all(slots: &mut Slots<Slot>, waiting: &mut Waiting, limited: bool) -> Vec<u64> {
        let mut begun = Vec::new();
        while let [tag, _] = waiting.next(slots, limited)
            && tag != NONE
        {
            waiting.take(slots, tag);
            begun.push(tag);
        }
        assert!(waiting.is_empty());
        begun
    }

    #[test]
    fn directions_take_turns_only_where_there_are_limits() {
        use Kind::{Flush, Other, Read, Write};
        let requests = [Write, Flush, Other, Write, Read, Read].map(|kind| (kind, SIMPLE));
        let (mut slots, mut lists) = waiting(&requests);
        assert_eq!(lists.next(&slots, true), [4, 0]);
        assert_eq!(lists.next(&slots, false), [0, NONE]);
        assert_eq!(all(&mut slots, &mut lists, true), [4, 0, 5, 1, 2, 3]);
        let (mut slots, mut lists) = waiting(&requests);
        assert_eq!(all(&mut slots, &mut lists, false), [0, 1, 2, 3, 4, 5]);
    }

    #[test]
    fn what_is_ordered_divides_both_lists_and_head_of_queue_goes_before_all() {
        use Kind::{Read, Write};
        let requests = [
            (Write, SIMPLE),
            (Read, ORDERED),
            (Read, SIMPLE),
            (Write, ORDERED),
            (Write, SIMPLE),
            (Read, HEAD_OF_QUEUE),
            (Write, HEAD_OF_QUEUE),
        ];
        for limited in [true, false] {
            let (mut slots, mut lists) = waiting(&requests);
            assert_eq!(lists.next(&slots, limited), [5, NONE]);
            assert_eq!(lists.oldest(&slots), 0);
            assert_eq!(all(&mut slots, &mut lists, limited), [5, 6, 0, 1, 2, 3, 4]);
            assert_eq!(lists.oldest(&slots), u64::MAX);
        }
        // What had begun and waits again stands before what did not.
        let (mut slots, mut lists) = waiting(&requests[..5]);
        for tag in [0, 1, 2] {
            assert_eq!(lists.next(&slots, true)[0], tag);
            lists.take(&mut slots, tag);
        }
        for tag in [2, 1] {
            lists.insert(&mut slots, tag);
        }
        assert_eq!(all(&mut slots, &mut lists, true), [1, 2, 3, 4]);
    }

    proptest! {
        /// Against a list in the order in which requests were taken.
        #[test]
        fn whatever_happens_none_is_lost_or_begins_before_one_that_it_waits_for(
            steps in prop::collection::vec(
                (0..8u8, prop::sample::select(&[Kind::Read, Kind::Write, Kind::Flush][..]), 0..9u8, any::<bool>()),
                1..300,
            )
        ) {
            let (mut slots, mut lists) = (slots(32), Waiting::NOBODY);
            let mut model: Vec<u16> = Vec::new();
            let mut begun: Vec<u16> = Vec::new();
            let mut taken = 0;
            for (step, kind, attribute, flag) in steps {
                match step {
                    0..4 => {
                        let Some(at) = slots.take() else { continue };
                        let attribute = if attribute > 2 { SIMPLE } else { attribute };
                        let slot = &mut slots[at];
                        (slot.kind, slot.attribute, slot.order) = (kind, attribute, taken);
                        taken += 1;
                        lists.push(&mut slots, at.into());
                        model.push(at);
                    }
                    4..6 => {
                        let next = lists.next(&slots, flag);
                        prop_assert_eq!(next[0] == NONE, model.is_empty());
                        for tag in next.into_iter().filter(|tag| *tag != NONE) {
                            let (of, list) = (&slots[tag as u16], list_of(&slots[tag as u16]));
                            for other in model.iter().map(|at| &slots[*at]) {
                                let earlier = other.order < of.order;
                                let first = other.attribute == HEAD_OF_QUEUE;
                                let must_precede = match of.attribute {
                                    HEAD_OF_QUEUE => first && earlier,
                                    ORDERED => first || earlier,
                                    _ => first || earlier
                                        && (other.attribute == ORDERED || list_of(other) == list),
                                };
                                prop_assert!(!must_precede, "{} before {}", of.order, other.order);
                            }
                        }
                        let tag = next[usize::from(next[1] != NONE && kind == Kind::Read)];
                        if tag != NONE {
                            lists.take(&mut slots, tag);
                            model.retain(|at| u64::from(*at) != tag);
                            begun.push(tag as u16);
                        }
                    }
                    6 => {
                        // One that had begun waits again, or ends.
                        let Some(at) = begun.pop() else { continue };
                        if flag {
                            lists.insert(&mut slots, at.into());
                            model.push(at);
                        } else {
                            slots.give_back(at);
                        }
                    }
                    _ => {
                        let is_meant = |slot: &Slot| slot.order % 3 == u64::from(attribute % 3);
                        let mut out = lists.take_out(&mut slots, is_meant);
                        while out != NONE {
                            let at = out as u16;
                            out = std::mem::replace(&mut slots[at].next, NONE);
                            prop_assert!(model.contains(&at) && !slots[at].waits);
                            model.retain(|waits| *waits != at);
                            slots.give_back(at);
                        }
                        prop_assert!(!model.iter().any(|at| is_meant(&slots[*at])));
                    }
                }
                prop_assert_eq!(lists.is_empty(), model.is_empty());
                prop_assert!(model.iter().all(|at| slots[*at].waits));
                let oldest = model.iter().map(|at| slots[*at].order).min();
                let is_simple = model.iter().all(|at| slots[*at].attribute != HEAD_OF_QUEUE);
                let first = lists.first(&slots);
                if is_simple {
                    prop_assert_eq!(lists.oldest(&slots), oldest.unwrap_or(u64::MAX));
                    prop_assert_eq!((first != NONE).then(|| slots[first as u16].order), oldest);
                } else {
                    prop_assert_eq!(slots[first as u16].attribute, HEAD_OF_QUEUE);
                }
                let ordered = model.iter().filter(|at| slots[**at].attribute == ORDERED);
                let ordered = ordered.min_by_key(|at| slots[**at].order).copied();
                prop_assert_eq!(lists.first_ordered(&slots), ordered.map_or(NONE, u64::from));
            }
            let mut left = all(&mut slots, &mut lists, true);
            left.sort_unstable();
            model.sort_unstable();
            prop_assert!(left.into_iter().eq(model.into_iter().map(u64::from)));
        }
    }
}
