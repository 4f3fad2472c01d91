//! How other threads reach a controller's thread, and how it waits for reactors.

use parking_lot::{Condvar, Mutex, MutexGuard};
use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::Arc;
use std::sync::mpsc::{Receiver, Sender, channel};
use std::time::{Duration, Instant};

use reactor::Call;
use rustix::event::{EventfdFlags, PollFd, PollFlags, eventfd, poll};

use crate::failure::Failure;
use crate::handover::{ControllerHandover, Inherited};
use crate::lun::{Replacement, Target};

/// Tells whoever waits, if somebody still does, that a target is gone. Not a [`Call`]'s answer: a removal
/// cannot be taken back, and ends long after the order was carried out.
pub(crate) type Gone = Sender<()>;

/// What a controller's thread is asked or told.
pub(crate) enum Order {
    /// Put a target in place, if it is still wanted; the place is free and reserved.
    Add(Call<Target, Result<(), bdev::OpenError>>),
    /// Take a target away; it is gone when nothing is in flight on it.
    Remove { target: u8, gone: Option<Gone> },
    /// Have a target go on with another bdev.
    Replace(Call<Replacement, Result<(), String>>),
    /// The size of the bdev behind a target changed.
    Resized { target: u8 },
    /// Take connections from now on.
    Accept,
    /// Refuse connections until [`Order::Accept`], where they wait for that; else nothing.
    Refuse,
    /// Who the controller belongs to was changed by somebody else.
    OwnerChanged,
    /// As [`Order::Stop`], but a session that is kept is left for the next process.
    Leave,
    /// Whoever keeps sessions has lost them.
    KeepAgain,
    /// Unless a peer is connected: remove the socket and return, with nobody served from then on.
    /// Answers whether that is done.
    StopUnlessConnected(Call<(), bool>),
    /// End the session, remove the socket and return.
    Stop,
    /// Serve nothing, and answer when nothing is in flight any more. An error where that is not so at the
    /// time that is given, after which nobody waits for it.
    Hold(Call<Instant, Result<(), String>>),
    /// The same, but go on at once if that was quick. The answer: whether it is held.
    HoldIfSlow(Call<Instant, Result<bool, String>>),
    /// Go on after [`Order::Hold`] or [`Order::TakeOver`].
    Release,
    /// While held: return, and leave the rest to whoever gets the answer.
    HandOver(Call<(), Result<ControllerHandover, String>>),
    /// Say what there is, for a process that is about to take it over, and go on.
    Describe(Call<(), Result<ControllerHandover, String>>),
    /// Make what takes time of a session that is about to come.
    Prepare(Call<Option<Inherited>, Result<(), String>>),
    /// Go on with what came from another process, if it did; held until [`Order::Release`].
    TakeOver(Call<Option<Inherited>, Result<(), String>>),
    /// A countdown reached zero.
    Drained { id: u64 },
    /// A request queue was closed because the guest broke the rules.
    QueueFailed { session: u64, queue: u16, why: Failure },
    /// An I/O of a target failed, and its requests wait.
    Suspended { session: u64, target: u8, error: bdev::IoError },
    /// Begin what waits because I/O of a target failed, or of all; answers with how many targets that
    /// were.
    Resume(Call<Option<u8>, usize>),
    /// Have a queue go on on the reactor in that place, if that takes no time.
    Move { queue: u16, to: usize },
    /// Some guest memory of this process went away: perhaps this guest's.
    MemoryFault { session: u64 },
    /// The peer's eventfd blocked a reactor.
    Blocked { session: u64 },
}

/// Sends orders to a controller's thread, from any thread.
#[derive(Clone)]
pub(crate) struct Mailbox {
    orders: Sender<Order>,
    wake: Arc<OwnedFd>,
}

/// The receiving end, on the controller's thread.
pub(crate) struct Inbox {
    orders: Receiver<Order>,
    wake: Arc<OwnedFd>,
}

/// A mailbox and its inbox.
pub(crate) fn mailbox() -> io::Result<(Mailbox, Inbox)> {
    let wake = Arc::new(eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)?);
    let (sender, receiver) = channel();
    Ok((Mailbox { orders: sender, wake: Arc::clone(&wake) }, Inbox { orders: receiver, wake }))
}

impl Mailbox {
    /// Sends an order. It is lost if the thread has ended; whoever waits for a reply sees that.
    pub(crate) fn send(&self, order: Order) {
        if self.orders.send(order).is_ok() {
            _ = rustix::io::write(&self.wake, &1u64.to_ne_bytes());
        }
    }
}

impl Inbox {
    /// The next order, if there is one.
    pub(crate) fn next(&self) -> Option<Order> {
        self.orders.try_recv().ok()
    }

    /// Sleeps until an order comes.
    pub(crate) fn wait(&self) {
        let mut fds = [PollFd::new(&*self.wake, PollFlags::IN)];
        // Interrupted or failed: whoever waits looks again.
        _ = poll(&mut fds, None);
    }

    /// Clears the wake-up, before the orders are taken.
    pub(crate) fn clear_wakeup(&self) {
        _ = rustix::io::read(&self.wake, &mut [0u8; 8]);
    }
}

impl AsFd for Inbox {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.wake.as_fd()
    }
}

/// How a poller tells its session's thread what went wrong. Rare: not on the I/O path.
#[derive(Clone)]
pub(crate) struct Notice {
    pub(crate) mailbox: Mailbox,
    /// Which session of the controller: a late notice must not hit the next one.
    pub(crate) session: u64,
}

impl Notice {
    pub(crate) fn queue_failed(&self, queue: u16, why: Failure) {
        self.mailbox.send(Order::QueueFailed { session: self.session, queue, why });
    }

    pub(crate) fn suspended(&self, target: u8, error: bdev::IoError) {
        self.mailbox.send(Order::Suspended { session: self.session, target, error });
    }

    pub(crate) fn memory_fault(&self) {
        self.mailbox.send(Order::MemoryFault { session: self.session });
    }

    pub(crate) fn blocked(&self) {
        self.mailbox.send(Order::Blocked { session: self.session });
    }
}

/// Counts down as reactors answer.
pub(crate) struct Countdown {
    left: Mutex<usize>,
    zero: Condvar,
    /// Whom to tell about zero, and by what name.
    tell: Option<(Mailbox, u64)>,
}

impl Countdown {
    /// From `from` to zero; at zero sends [`Order::Drained`] to `tell`.
    pub(crate) fn new(from: usize, tell: Option<(Mailbox, u64)>) -> Arc<Self> {
        Arc::new(Countdown { left: Mutex::new(from), zero: Condvar::new(), tell })
    }

    fn lock(&self) -> MutexGuard<'_, usize> {
        self.left.lock()
    }

    /// Whether it came to zero.
    pub(crate) fn is_zero(&self) -> bool {
        *self.lock() == 0
    }

    /// One less.
    pub(crate) fn count(&self) {
        let mut left = self.lock();
        *left -= 1;
        if *left == 0 {
            self.zero.notify_all();
            if let Some((mailbox, id)) = &self.tell {
                mailbox.send(Order::Drained { id: *id });
            }
        }
    }

    /// Waits for zero, but not longer than `most`; whether it came. Says what it waits for, as `what`
    /// completes it, while it takes long.
    pub(crate) fn wait(&self, what: &str, most: Duration) -> bool {
        /// How often a long wait is logged.
        const EVERY: Duration = Duration::from_secs(5);
        self.wait_saying(most, EVERY, || {
            tracing::warn!("still waiting for I/O in flight: {what}");
        })
    }

    fn wait_saying(&self, most: Duration, every: Duration, say: impl Fn()) -> bool {
        let end = Instant::now() + most;
        loop {
            let pause = every.min(end.saturating_duration_since(Instant::now()));
            let mut left = self.lock();
            self.zero.wait_while_for(&mut left, |left| *left > 0, pause);
            if *left == 0 {
                return true;
            }
            // Reactors take the lock to count, and a line in the log may take its time.
            drop(left);
            if Instant::now() >= end {
                return false;
            }
            say();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn whoever_counts_does_not_wait_for_what_is_said_meanwhile() {
        let countdown = Countdown::new(1, None);
        // Counting in the midst of it would never return if the lock were held.
        let counter = Arc::clone(&countdown);
        let say = move || {
            let counter = Arc::clone(&counter);
            let (done, counted) = channel();
            std::thread::spawn(move || {
                counter.count();
                _ = done.send(());
            });
            counted.recv_timeout(Duration::from_secs(20)).expect("it counts");
        };
        assert!(countdown.wait_saying(Duration::from_secs(60), Duration::from_millis(1), say));
        let never = Countdown::new(1, None);
        assert!(!never.wait_saying(Duration::from_millis(5), Duration::from_millis(1), || ()));
    }
}
