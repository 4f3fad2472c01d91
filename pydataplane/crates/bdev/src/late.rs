//! Completions for which a caller's list had no room.

use crate::Completion;
use std::collections::VecDeque;

/// What a channel's `poll` hands over the next time.
#[derive(Debug)]
pub struct Late(VecDeque<Completion>);

impl Late {
    /// None, with memory for as many as a channel has slots.
    pub fn with_capacity(slots: u16) -> Self {
        Late(VecDeque::with_capacity(usize::from(slots)))
    }

    /// Whether there are none.
    #[inline]
    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// Puts those of before into `done`, as far as that has room; whether that were all.
    #[inline]
    pub fn hand_over(&mut self, done: &mut Vec<Completion>) -> bool {
        while done.len() < done.capacity()
            && let Some(completion) = self.0.pop_front()
        {
            done.push(completion);
        }
        self.0.is_empty()
    }

    /// Puts one into `done`, or keeps it for the next time.
    #[inline]
    pub fn push(&mut self, completion: Completion, done: &mut Vec<Completion>) {
        if done.len() < done.capacity() {
            done.push(completion);
        } else {
            self.0.push_back(completion);
        }
    }
}
