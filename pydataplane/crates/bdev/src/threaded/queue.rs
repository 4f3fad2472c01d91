//! I/Os of all channels of a device on their way to its thread.

use std::sync::Arc;

use crossbeam_queue::ArrayQueue;

use crate::{Waiter, Waiters};

/// I/Os that the thread has not taken.
pub struct ThreadQueue<T> {
    queue: ArrayQueue<T>,
    /// Who found no room, and has nothing under way whose end would have him look again.
    waiters: Waiters,
}

impl<T> ThreadQueue<T> {
    /// With room for so many.
    pub fn new(depth: usize) -> Self {
        ThreadQueue { queue: ArrayQueue::new(depth), waiters: Waiters::default() }
    }

    /// Hands one over.
    ///
    /// # Errors
    /// There is no room; the thread of `waiter` is woken when the device's has taken one.
    pub fn push(&self, one: T, waiter: Option<&Arc<Waiter>>) -> Result<(), T> {
        let Err(one) = self.queue.push(one) else { return Ok(()) };
        let Some(waiter) = waiter else { return Err(one) };
        self.waiters.wait(waiter);
        // All may have been taken before.
        self.queue.push(one)
    }

    /// Takes the oldest.
    pub fn pop(&self) -> Option<T> {
        let one = self.queue.pop()?;
        self.waiters.tell();
        Some(one)
    }

    /// Whether there are none.
    pub fn is_empty(&self) -> bool {
        self.queue.is_empty()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use reactor::IoContext;

    #[test]
    fn who_finds_no_room_is_woken_when_there_is() {
        const EACH: u32 = 2000;
        let queue = ThreadQueue::new(2);
        let mut taken = Vec::new();
        std::thread::scope(|scope| {
            for nth in 0..2 {
                let queue = &queue;
                scope.spawn(move || {
                    let io = IoContext::new().unwrap();
                    let waiter = Waiter::new(io.waker());
                    for number in 0..EACH {
                        while queue.push((nth, number), Some(&waiter)).is_err() {
                            // Ten minutes: a lost wake-up would show as a hang.
                            io.wait(600_000_000).unwrap();
                        }
                    }
                });
            }
            while taken.len() < 2 * EACH as usize {
                match queue.pop() {
                    Some(one) => taken.push(one),
                    None => std::thread::yield_now(),
                }
            }
        });
        assert!(queue.is_empty());
        for nth in 0..2 {
            let of: Vec<_> = taken.iter().filter(|one| one.0 == nth).map(|one| one.1).collect();
            assert_eq!(of, Vec::from_iter(0..EACH), "each once and in order");
        }
    }
}
