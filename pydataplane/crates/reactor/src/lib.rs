//! Polling threads.
//!
//! Owns: one pinned thread per reactor, its pollers, its bounded mailbox, its io_uring, the idle
//! policy (spin, then sleep in one epoll) and busy/idle accounting. Never knows what is polled.
//!
//! Cross-thread work is a message: a closure sent through [`Handle`] runs on the reactor's own
//! thread with its [`Cx`]. A poller is owned by exactly one reactor and is never locked.
//!
//! | file | noun |
//! | --- | --- |
//! | `poller` | [`Poller`]: what a reactor runs |
//! | `run` | the loop: mailbox, pollers, io_uring, idle policy; [`Stats`]: busy, idle and sleep time |
//! | `cx` | [`Cx`]: the reactor's inside, as messages see it |
//! | `mailbox` | the bounded queue of messages |
//! | `waker` | [`Waker`]: the protocol that never loses a wake-up |
//! | `context` | [`IoContext`]: a thread's io_uring, epoll and waker |
//! | `owner` | [`Owner`]: whose I/O it is |
//! | `uring` | [`Uring`], [`UringClient`]; `shares`: large transfers a turn; `sleeping`: in the call that submits |
//! | `eventfd` | using an eventfd that a guest shares |
//! | `fd` | another file under a descriptor in use |
//! | `stream` | a stream to a peer on the network, from a thread that may block |
//! | `call` | [`call()`]: a call to another thread that its caller may take back until it has begun |
//! | `control` | [`Control`]: a thread that may block and runs what others ask |
//! | `threads` | [`Reactors`], [`Handle`] |
//! | `memory` | where large blocks of memory come from |
//! | `place` | which thread runs on which CPU |
//! | `ticks` | the cheap clock |
//!
//! One turn of the loop costs, when nothing happens, one relaxed load for the mailbox, one read
//! of the clock, one call per poller and, with I/O in flight, two loads for the io_uring; no system call.

mod call;
mod context;
mod control;
mod cx;
pub mod eventfd;
pub mod fd;
mod mailbox;
pub mod memory;
mod owner;
mod place;
mod poller;
mod run;
mod spin;
pub mod stream;
mod threads;
pub mod ticks;
mod uring;
mod waker;

pub use call::{Call, Caller, NotRun, call};
pub use context::IoContext;
pub use control::{Ask, Bell, Control, Next, Work};
pub use cx::{Cx, PollerInfo};
pub use mailbox::{MAILBOX_DEPTH, Message};
pub use owner::Owner;
pub use place::{bind, leave};
pub use poller::{Poller, PollerId};
pub use run::{Idle, Stats};
pub use threads::{Handle, Reactors, Stopped};
pub use uring::{FileName, Full, TURN_BYTES, Uring, UringClient};
pub use waker::Waker;
