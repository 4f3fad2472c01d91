//! What is in flight on a channel: a table of slots and the list of those that are free.

use std::ops::{Index, IndexMut};

/// A table of `T`, allocated once, whose places are taken and given back by number. A number fits
/// into the tag of an I/O, and so leads from its completion back to its slot.
#[derive(Debug)]
pub struct Slots<T> {
    slots: Box<[T]>,
    /// The last one is taken next: it is the likeliest to be in the processor's cache.
    free: Vec<u16>,
}

impl<T> Slots<T> {
    /// `count` free slots, each made by `slot`. Allocates all that it will ever need.
    pub fn new(count: u16, slot: impl FnMut(u16) -> T) -> Self {
        Slots { slots: (0..count).map(slot).collect(), free: (0..count).rev().collect() }
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
    #[should_panic(expected = "slot 2 is free already")]
    #[cfg(debug_assertions)]
    fn a_slot_that_is_free_cannot_be_given_back() {
        Slots::new(3, |_| ()).give_back(2);
    }
}
