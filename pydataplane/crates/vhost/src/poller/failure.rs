//! What ends a queue or a session from within a poller: a guest that broke the rules, memory that went
//! away, a call that blocked. Only this guest is affected, and its session is told.

use super::DevicePoller;
use super::queue::RequestQueue;
use crate::failure::Failure;

impl DevicePoller {
    /// Closes a queue whose guest broke the rules, and tells the session.
    #[cold]
    pub(super) fn fail(&mut self, at: usize, why: Failure) {
        let queue = &mut self.queues[at];
        queue.close();
        self.counters.malformed.add(1);
        self.notice.queue_failed(queue.index, why);
    }

    /// Some guest's memory went away. If it was this one's, nothing more is done in it, and the
    /// session ends.
    #[cold]
    pub(super) fn memory_lost(&mut self) {
        self.faults = guestmem::faults();
        if self.queues.iter().any(|q| q.ring.is_broken()) {
            self.paused = true;
            self.notice.memory_fault();
        }
    }

    /// The guest's process had a call block the reactor: nothing more is done for it, and the
    /// session ends.
    #[cold]
    pub(super) fn blocked(&mut self) {
        self.paused = true;
        self.queues.iter_mut().for_each(RequestQueue::forget_call);
        self.notice.blocked();
    }
}
