//! Bdevs as files for the kernel: the face of a volume for ordinary pods and for tools.
//!
//! Owns: one FUSE mount, in it a file per exported bdev named by its UUID, and the thread that
//! serves each file. A loop device on such a file (`losetup --direct-io=on`) is a block device of
//! the volume. Never knows lvols, vhost or RPC, and never runs on a reactor.
//!
//! ```text
//!  kernel --/dev/fuse--> dispatcher (1 thread) --mailbox--> worker (1 thread per export)
//!                             |  attributes, open            | an OwnedChannel, DEPTH I/Os at a time
//!                             v                              v
//!                          [`Exports`]                      bdev
//! ```
//!
//! An export has a thread and a channel of its own, so one whose bdev stalls delays nobody else's
//! data. The kernel keeps nothing: the files are opened with direct I/O, and attributes are asked
//! for each time, so that a grown bdev is a grown file at once.
//!
//! | call | becomes |
//! | --- | --- |
//! | read, write | read, write; a read need not be whole blocks, a write must (EINVAL) |
//! | fsync | flush |
//! | fallocate, punch hole | unmap where it reads as zeros afterwards, else write of zeros |
//! | fallocate, zero range | write of zeros |
//! | truncate, chmod, chown | EPERM: the bdev's methods do that |
//!
//! The mount is mount(2) by root on `/dev/fuse`; neither libfuse nor fusermount is used. When the
//! process dies, however it does, the kernel ends the connection: all I/O in flight and later gives
//! an error (ENOTCONN; EIO through a loop device), nothing hangs. The next process detaches the
//! dead mount and mounts anew at the same path; files that were open stay dead, so a loop device
//! on one must be detached and set up again.
//!
//! Claims: an export holds its bdev alone, so a volume has one face at a time. A parked export keeps
//! its file and whatever is on it, a loop device that a container has open for instance, and lets
//! another face have the volume: it refuses writes, serves reads, and claims no more than that the
//! bdev stays.
//!
//! | file | noun |
//! | --- | --- |
//! | `exports` | [`Exports`]: create, delete, list, stop |
//! | `volume` | one exported bdev: its claim, its attributes, its mailbox |
//! | `worker` | the thread that serves it |
//! | `request` | what the kernel asks, in blocks; what it gets |
//! | `fs` | the FUSE calls |
//! | `mount` | the mount, and what a dead process left of one |
//! | `errors` | [`ExportError`], and an errno for each [`bdev::IoError`] |

#![forbid(unsafe_code)]

mod errors;
mod exports;
mod fs;
mod mount;
mod request;
mod volume;
mod worker;

pub use errors::ExportError;
pub use exports::{Exports, Info, PARK_TIMEOUT, RELEASE_TIMEOUT};
pub use request::MAX_IO_BYTES;
pub use worker::DEPTH;
