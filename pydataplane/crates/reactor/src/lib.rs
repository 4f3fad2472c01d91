//! Polling threads.
//!
//! Owns: one pinned thread per reactor, its pollers, its bounded mailbox, its io_uring, the idle
//! policy (spin, then sleep in one epoll) and busy/idle accounting. Never knows what is polled.
//!
//! Cross-thread work is a message: a closure sent through [`Handle`] runs on the reactor's own
//! thread with its [`Cx`]. A poller is owned by exactly one reactor and is never locked.

pub mod ticks;

use std::any::Any;
use std::io;
use std::os::fd::RawFd;
use std::rc::Rc;

/// What a reactor runs in its loop. Owned by one reactor thread.
pub trait Poller: Any {
    /// Name shown by `thread_get_pollers`.
    fn name(&self) -> &str;
    /// Does what can be done now without blocking; returns how many events were handled
    /// (0 means idle).
    fn poll(&mut self) -> u32;
    /// The reactor is about to sleep: ask for wake-ups (enable kicks). Returns `false` if work
    /// arrived meanwhile, and then the reactor does not sleep.
    fn arm(&mut self) -> bool {
        true
    }
    /// The reactor is awake again: wake-ups are no longer needed (suppress kicks).
    fn disarm(&mut self) {}
}

/// Identifies a poller within its reactor.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct PollerId(pub u64);

/// What a bdev channel needs of the thread that it lives on: its io_uring and a way to wake it.
/// Every reactor has one; a control thread makes its own for blocking I/O.
#[derive(Clone)]
pub struct IoContext {
    _inner: Rc<()>,
}

impl IoContext {
    /// A context for the calling thread, with an io_uring of its own.
    pub fn new() -> io::Result<Self> {
        Ok(Self { _inner: Rc::new(()) })
    }
    /// The thread's io_uring.
    pub fn uring(&self) -> &Uring {
        todo!()
    }
    /// Wakes the thread from any other thread.
    pub fn waker(&self) -> Waker {
        todo!()
    }
    /// Submits what was queued and hands out completions to their clients, without blocking;
    /// returns how many completed.
    pub fn flush(&self) -> u32 {
        0
    }
    /// As `flush`, but sleeps until something completed or the waker was used, at most
    /// `timeout_us` microseconds. For control threads, never for reactors' pollers.
    pub fn wait(&self, _timeout_us: u64) -> io::Result<u32> {
        Ok(0)
    }
}

/// Wakes a thread that sleeps in its reactor's epoll or in [`IoContext::wait`]. Costs one atomic
/// load when that thread is awake.
#[derive(Clone)]
pub struct Waker {}

impl Waker {
    /// Wakes the thread.
    pub fn wake(&self) {
        todo!()
    }
}

/// One thread's io_uring, shared by its channels.
pub struct Uring {}

impl Uring {
    /// A client with a completion list of its own, bounded by `depth` entries in flight.
    pub fn client(&self, _depth: u32) -> UringClient {
        todo!()
    }
}

/// One user of an io_uring: pushes entries, collects its own completions.
pub struct UringClient {}

impl UringClient {
    /// Queues `entry`; its completion carries `token`. `Err` when the ring or this client's depth
    /// is full: try again after the next poll.
    ///
    /// # Safety
    /// Buffers and descriptors that `entry` names stay valid until its completion was taken.
    pub unsafe fn push(
        &mut self,
        _entry: io_uring::squeue::Entry,
        _token: u32,
    ) -> Result<(), Full> {
        todo!()
    }
    /// Hands each completion since the last call to `f` as (token, result: bytes or -errno).
    pub fn completions(&mut self, _f: impl FnMut(u32, i32)) {
        todo!()
    }
}

/// The queue is full; try again later.
#[derive(Clone, Copy, Debug, thiserror::Error)]
#[error("the queue is full")]
pub struct Full;

/// A reactor's inside, given to messages that run on its thread.
pub struct Cx {}

impl Cx {
    /// This thread's context for bdev channels.
    pub fn io(&self) -> &IoContext {
        todo!()
    }
    /// Index of this reactor.
    pub fn index(&self) -> usize {
        todo!()
    }
    /// Adds a poller.
    pub fn add_poller(&mut self, _p: Box<dyn Poller>) -> PollerId {
        todo!()
    }
    /// Removes a poller and returns it.
    pub fn remove_poller(&mut self, _id: PollerId) -> Option<Box<dyn Poller>> {
        todo!()
    }
    /// The poller `id`, if it exists and is a `T`.
    pub fn poller_mut<T: Poller>(&mut self, _id: PollerId) -> Option<&mut T> {
        todo!()
    }
    /// Wakes this reactor when `fd` (an eventfd: a kick) becomes readable while it sleeps; edge
    /// triggered, and the reactor does not read it.
    pub fn watch(&mut self, _fd: RawFd) -> io::Result<()> {
        todo!()
    }
    /// Undoes [`Cx::watch`]; call before the fd is closed.
    pub fn unwatch(&mut self, _fd: RawFd) {
        todo!()
    }
}

/// A message: runs once on the reactor's thread.
pub type Message = Box<dyn FnOnce(&mut Cx) + Send>;

/// A reactor as other threads see it.
#[derive(Clone)]
pub struct Handle {}

impl Handle {
    /// Index of the reactor.
    pub fn index(&self) -> usize {
        todo!()
    }
    /// Sends a message; waits while the mailbox is full (never call from a reactor thread).
    pub fn send(&self, _m: impl FnOnce(&mut Cx) + Send + 'static) {
        todo!()
    }
    /// Runs `f` on the reactor and returns its result (never call from a reactor thread).
    pub fn call<R: Send + 'static>(&self, _f: impl FnOnce(&mut Cx) -> R + Send + 'static) -> R {
        todo!()
    }
}

/// What a reactor does when nothing happens.
#[derive(Clone, Copy, Debug)]
pub enum Idle {
    /// Spin for ever (`--poll`).
    Poll,
    /// Spin this many microseconds, then arm wake-ups and sleep.
    Adaptive {
        /// Microseconds without an event before sleeping.
        spin_us: u64,
    },
}

/// A snapshot of one reactor's accounting.
#[derive(Clone, Copy, Debug, Default)]
pub struct Stats {
    /// CPU that it is pinned to.
    pub cpu: Option<usize>,
    /// Nanoseconds in loops that handled at least one event.
    pub busy_ns: u64,
    /// Nanoseconds in loops that handled none, spinning.
    pub idle_ns: u64,
    /// Nanoseconds asleep in epoll.
    pub sleep_ns: u64,
    /// Times it went to sleep.
    pub sleeps: u64,
}

/// All reactors of the process.
pub struct Reactors {}

impl Reactors {
    /// Starts one thread per entry of `cpus` (`None`: not pinned).
    pub fn start(_cpus: &[Option<usize>], _idle: Idle) -> io::Result<Self> {
        todo!()
    }
    /// All handles, in index order.
    pub fn handles(&self) -> &[Handle] {
        todo!()
    }
    /// Accounting of each reactor.
    pub fn stats(&self) -> Vec<Stats> {
        todo!()
    }
    /// Stops and joins all threads, dropping their pollers on their own threads.
    pub fn stop(self) {
        todo!()
    }
}
