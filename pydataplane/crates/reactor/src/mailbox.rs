//! Messages to a reactor: a bounded lock-free queue and the waker behind it.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use crossbeam_queue::ArrayQueue;

use crate::{Cx, Waker};

/// Messages that wait for one reactor at most; a sender waits when there are more.
pub const MAILBOX_DEPTH: usize = 1024;

/// How long a sender sleeps between tries when the mailbox is full, in microseconds.
const FULL_RETRY_US: u64 = 50;

/// A message: runs once on the reactor's thread.
pub type Message = Box<dyn FnOnce(&mut Cx) + Send>;

struct Inner {
    queue: ArrayQueue<Message>,
    closed: AtomicBool,
    waker: Waker,
}

/// Both ends of a mailbox: any thread pushes, the reactor pops.
#[derive(Clone)]
pub(crate) struct Mailbox {
    inner: Arc<Inner>,
}

impl Mailbox {
    pub(crate) fn new(waker: Waker) -> Self {
        let closed = AtomicBool::new(false);
        Mailbox { inner: Arc::new(Inner { queue: ArrayQueue::new(MAILBOX_DEPTH), closed, waker }) }
    }

    /// Queues `message` and wakes the reactor; waits while the mailbox is full. Gives `message`
    /// back, or drops it, if the reactor has stopped.
    pub(crate) fn send(&self, mut message: Message) -> bool {
        loop {
            if self.inner.closed.load(Ordering::SeqCst) {
                return false;
            }
            match self.inner.queue.push(message) {
                Ok(()) => break,
                Err(back) => message = back,
            }
            self.inner.waker.wake();
            std::thread::sleep(Duration::from_micros(FULL_RETRY_US));
        }
        self.inner.waker.wake();
        // Closed between the check and the push: the reactor's own clearing may have come before
        // the push, so clear again. Either it or this call finds the message.
        std::sync::atomic::fence(Ordering::SeqCst);
        if self.inner.closed.load(Ordering::SeqCst) {
            self.clear();
            return false;
        }
        true
    }

    /// The oldest message.
    pub(crate) fn pop(&self) -> Option<Message> {
        self.inner.queue.pop()
    }

    pub(crate) fn is_empty(&self) -> bool {
        self.inner.queue.is_empty()
    }

    /// What notifies the reactor.
    pub(crate) fn waker(&self) -> Waker {
        self.inner.waker.clone()
    }

    /// Notifies the reactor without a message.
    pub(crate) fn wake(&self) {
        self.inner.waker.wake();
    }

    /// Refuses messages from now on and drops those that wait.
    pub(crate) fn close(&self) {
        self.inner.closed.store(true, Ordering::SeqCst);
        std::sync::atomic::fence(Ordering::SeqCst);
        self.clear();
    }

    fn clear(&self) {
        while let Some(message) = self.inner.queue.pop() {
            drop(message);
        }
    }
}
