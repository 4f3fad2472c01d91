//! Block devices that a process serves: Linux's ublk driver (since 6.0).
//!
//! Owns: the layout of its commands, its control device ([`Control`]) and the queue of one device
//! ([`Queue`]). Never knows bdevs, beside the memory that one takes without a copy; `export` serves
//! with it, and the holder has the control device, which needs CAP_SYS_ADMIN.
//!
//! ```text
//!  file system --> /dev/ublkbN --> kernel --io_uring, one command a tag--> Queue --> who serves
//!                                  Control --/dev/ublk-control--^
//! ```
//!
//! A device has one queue of as many tags as I/Os may be in flight. Each tag is at any moment
//! either the kernel's, with a buffer, or ours, with a [`Request`] that holds this buffer: the kernel
//! has copied the data of a write into it before, and takes that of a read when the request is
//! committed. Everything about a queue is done by one thread, which the kernel remembers.
//!
//! # When the process ends
//!
//! The device stays ([`abi::flag::USER_RECOVERY`]): who uses it waits, and what was in flight is asked
//! again ([`abi::flag::USER_RECOVERY_REISSUE`]) of the next process, between [`Control::start_recovery`]
//! and [`Control::end_recovery`]. Nothing has to be kept for that, not even a descriptor: on the
//! contrary, recovery begins only when `/dev/ublkcN` is open nowhere any more. Doing a request twice is
//! right, as for any disk: who asked for it has no answer yet, and promises no order among what is in
//! flight together.
//!
//! Before Linux 6.16 the driver notices the end of a process by the tags that are its own. If the
//! process had all of them, it takes until the first of their requests is [`Control::set_timeout`] old.
//!
//! | file | noun |
//! | --- | --- |
//! | `abi` | commands and their numbers, as linux/ublk_cmd.h has them |
//! | `request` | what the kernel asks for, checked |
//! | `control` | [`Control`]: makes, starts, recovers and removes devices |
//! | `queue` | [`Queue`]: takes requests, commits answers |
//! | `ring`, `map` | io_uring's commands; the kernel's table of requests: all that is unsafe |

#![deny(unsafe_code)]

pub mod abi;
mod control;
#[allow(unsafe_code, reason = "memory of the kernel's")]
mod map;
mod queue;
mod request;
#[allow(unsafe_code, reason = "commands that name memory")]
mod ring;

pub use control::{Control, Device, New, Slow};
pub use queue::{Left, Polled, Queue};
pub use request::{Limits, Malformed, Op, Request, Ticket};
