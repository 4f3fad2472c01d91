//! What is in flight, on a channel or in a session: a table of slots and the list of those that are free.

use std::ops::{Index, IndexMut};

/// A table of `T`, whose places are taken and given back by number. A number fits into the tag of an
/// I/O, and so leads from its completion back to its slot.
#[derive(Debug)]
pub struct Slots<T> {
    slots: Vec<T>,
    /// The last one is taken next: it is the likeliest to be in the processor's cache.
    free: Vec<u16>,
}

impl<T> Slots<T> {
    /// `count` free slots, each made by `slot`. Allocates all that it will ever need.
    pub fn new(count: u16, slot: impl FnMut(u16) -> T) -> Self {
        let mut slots = Slots::with_capacity(count);
        slots.grow((0..count).map(slot).collect());
        slots
    }

    /// No slots, with memory for the numbers and the slots of `most`.
    pub fn with_capacity(most: u16) -> Self {
        let most = usize::from(most);
        Slots { slots: Vec::with_capacity(most), free: Vec::with_capacity(most) }
    }

    /// More slots, which are free; their numbers follow those that are there ([`Slots::len`]). The first
    /// of them is the first to be taken, after all that are free now.
    ///
    /// # Panics
    /// They are more than there is memory for: nothing is allocated here.
    pub fn grow(&mut self, mut more: Vec<T>) {
        let old = self.slots.len();
        assert!(old + more.len() <= self.slots.capacity(), "there are as many as there may be");
        self.slots.append(&mut more);
        self.free.splice(0..0, (old as u16..self.slots.len() as u16).rev());
    }

    /// How many slots there are.
    pub fn len(&self) -> usize {
        self.slots.len()
    }

    /// Whether there are none.
    pub fn is_empty(&self) -> bool {
        self.slots.is_empty()
    }

    /// All slots, also those that are free.
    pub fn iter(&self) -> std::slice::Iter<'_, T> {
        self.slots.iter()
    }

    /// All slots, also those that are free.
    pub fn iter_mut(&mut self) -> std::slice::IterMut<'_, T> {
        self.slots.iter_mut()
    }

    /// The slot that [`Slots::take`] takes next; `None`: all are taken. It may be filled already.
    #[inline]
    pub fn next_free(&self) -> Option<u16> {
        self.free.last().copied()
    }

    /// Takes a free slot, with whatever was left in it.
    #[inline]
    pub fn take(&mut self) -> Option<u16> {
        self.free.pop()
    }

    /// Makes a slot that was taken free again.
    #[inline]
    pub fn give_back(&mut self, at: u16) {
        debug_assert!(!self.free.contains(&at), "slot {at} is free already");
        self.free.push(at);
    }

    /// Whether none is free.
    #[inline]
    pub fn is_full(&self) -> bool {
        self.free.is_empty()
    }

    /// How many are taken.
    #[inline]
    pub fn taken(&self) -> usize {
        self.slots.len() - self.free.len()
    }
}

impl<T> Index<u16> for Slots<T> {
    type Output = T;

    #[inline]
    fn index(&self, at: u16) -> &T {
        &self.slots[usize::from(at)]
    }
}

impl<T> IndexMut<u16> for Slots<T> {
    #[inline]
    fn index_mut(&mut self, at: u16) -> &mut T {
        &mut self.slots[usize::from(at)]
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_slot_is_taken_once_until_it_is_given_back() {
        let mut slots = Slots::new(3, u32::from);
        let all: Vec<u16> = std::iter::from_fn(|| slots.take()).collect();
        assert_eq!(all, [0, 1, 2]);
        assert!(slots.is_full() && slots.next_free().is_none());
        assert_eq!(slots.taken(), 3);
        slots[1] = 17;
        slots.give_back(1);
        assert_eq!((slots.next_free(), slots.taken()), (Some(1), 2));
        assert_eq!(slots.take(), Some(1));
        assert_eq!((slots[0], slots[1], slots[2]), (0, 17, 2));
    }

    #[test]
    fn a_table_grows_behind_what_is_free_and_no_further_than_it_was_made_for() {
        let mut slots = Slots::with_capacity(4);
        assert!(slots.is_empty() && slots.take().is_none());
        slots.grow(vec![10, 11]);
        assert_eq!(slots.take(), Some(0));
        slots.grow(vec![12, 13]);
        assert_eq!(slots.len(), 4);
        slots.give_back(0);
        assert_eq!([slots.take(), slots.take(), slots.take()], [Some(0), Some(1), Some(2)]);
        assert_eq!(slots.iter().copied().collect::<Vec<_>>(), [10, 11, 12, 13]);
        slots.iter_mut().for_each(|slot| *slot += 1);
        assert_eq!(slots[3], 14);
    }

    #[test]
    #[should_panic(expected = "as many as there may be")]
    fn a_table_does_not_grow_beyond_what_it_was_made_for() {
        Slots::with_capacity(1).grow(vec![1; 9]);
    }

    #[test]
    #[should_panic(expected = "slot 2 is free already")]
    #[cfg(debug_assertions)]
    fn a_slot_that_is_free_cannot_be_given_back() {
        Slots::new(3, |_| ()).give_back(2);
    }
}
