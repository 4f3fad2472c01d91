//! Where each request queue of a session runs, and how many requests came through it: written by the
//! session's thread and by the reactor that has the queue, read by anybody.

use std::sync::Arc;
use std::sync::atomic::{AtomicU8, Ordering};

use crate::defs::MAX_QUEUES;
use crate::stats::Counter;

/// It does not run.
const NOWHERE: u8 = u8::MAX;

#[derive(Debug)]
#[repr(align(64))]
struct Queue {
    /// Place in the controller's reactors.
    place: AtomicU8,
    requests: Counter,
}

/// All queues of a controller's session.
#[derive(Debug)]
pub(crate) struct Placement(Box<[Queue]>);

impl Placement {
    /// Nothing runs.
    pub(crate) fn new() -> Arc<Self> {
        let queue = |_| Queue { place: AtomicU8::new(NOWHERE), requests: Counter::default() };
        Arc::new(Placement((0..MAX_QUEUES).map(queue).collect()))
    }

    /// A queue runs there from now on; `None`: nowhere.
    pub(crate) fn set(&self, queue: usize, place: Option<usize>) {
        if let Some(queue) = self.0.get(queue) {
            let place = place.and_then(|place| u8::try_from(place).ok()).unwrap_or(NOWHERE);
            queue.place.store(place, Ordering::Relaxed);
        }
    }

    /// None runs.
    pub(crate) fn clear(&self) {
        (0..self.0.len()).for_each(|queue| self.set(queue, None));
    }

    /// Queues that run: number, place and requests so far.
    pub(crate) fn running(&self) -> impl Iterator<Item = (u16, usize, u64)> {
        self.0.iter().enumerate().filter_map(|(number, queue)| {
            let place = queue.place.load(Ordering::Relaxed);
            (place != NOWHERE).then(|| (number as u16, usize::from(place), queue.requests.get()))
        })
    }

    /// So many requests came, on the reactor that has the queue.
    #[inline(always)]
    pub(crate) fn count(&self, queue: u16, requests: u64) {
        if let Some(queue) = self.0.get(usize::from(queue)) {
            queue.requests.add(requests);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_runs_is_told_with_its_place() {
        let placement = Placement::new();
        assert_eq!(placement.running().count(), 0);
        placement.set(3, Some(1));
        placement.count(3, 40);
        placement.count(3, 2);
        placement.set(MAX_QUEUES + 7, Some(0));
        assert_eq!(placement.running().collect::<Vec<_>>(), [(3, 1, 42)]);
        placement.set(3, None);
        assert_eq!(placement.running().count(), 0);
    }
}
