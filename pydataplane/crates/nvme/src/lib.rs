//! Bdevs on namespaces of NVMe controllers over TCP.
//!
//! Owns: the host's side of NVMe over TCP (NVM Express base specification 2.1, NVMe over TCP transport
//! specification 1.1), connections and their loss, asymmetric namespace access. Never knows JSON-RPC or what lies
//! above; the target's methods call it.
//!
//! A controller has a thread, which has all of its connections: an admin queue and some for I/O, of each path. The
//! thread's io_uring sends and receives the memory of guests itself. Channels hand I/Os over through a queue. Others
//! connect, on threads that may block: nothing here blocks a reactor.
//!
//! # When a connection is lost
//!
//! I/O waits, and what was in flight is sent again with the next association. That is right because
//!
//! - a command that was answered is never sent again, and one that was not is still the guest's to wait for. Two
//!   I/Os that change the same blocks are never in flight together, so what is sent again cannot undo what was
//!   answered;
//! - a change that the controller may have seen is not sent again, nor anything instead of it, before nothing can be
//!   carried out any more of the association that it was sent in. That is so when the time is over in which a
//!   controller has to notice that it hears nothing of its host, and to quiesce (TP4129, in base specification 2.1,
//!   9.6), counted from when this host has reset all connections. What the controller says does not make it shorter:
//!   Linux's target says that it is disabled, and closes connections, while its disks still write. But once it is
//!   through with a queue it resets a connection that was half closed, which is believed. Reads do not wait for it,
//!   and other I/O goes by another path meanwhile;
//! - of a Compare and Write nobody knows whether it found what it wrote: it fails as aborted;
//! - a Flush stands for writes that were answered before. Where a target that comes back may have lost those, each
//!   write is sent with FUA instead ([`Options::write_through`]): by default where it is another host.
//!
//! After [`Options::give_up`] without an answer I/O fails, and further I/O fails at once until there is a connection
//! again. What a namespace is is looked at with each association: its size is taken over, another identification or
//! block size keeps the path without one.
//!
//! | file | noun |
//! | --- | --- |
//! | `address` | [`Address`]: where a controller is |
//! | `wire` | the transport's numbers and headers; [`Terms`] of a connection |
//! | `command` | what is sent |
//! | `buffer` | memory for the data of one command |
//! | `status` | what becomes of a command that was answered |
//! | `identify`, `ana` | what controllers and namespaces say of themselves, checked |
//! | `name` | `Name`: what tells a namespace from all others |
//! | `conversation` | [`Conversation`]: commands and completions on a connection, without I/O |
//! | `queue` | a connection at work |
//! | `connect` | an association, made by a thread that may block |
//! | `units` | the namespaces of a controller that are bdevs |
//! | `requests` | the I/Os of a controller, over all its associations |
//! | `admin` | an admin queue at work: keep-alive, events |
//! | `context` | what the thread and its paths work on |
//! | `path` | an association in use, its end and the next one |
//! | `worker` | the thread |
//! | `options` | what is asked for of a controller, and how it is shown |
//! | `shared` | what a controller, its thread and its channels share |
//! | `controller` | [`Controller`]: a subsystem by its paths |
//! | `namespaces` | [`Found`]: what a subsystem has, without a bdev on it |
//! | `silent` | paths that did not answer |
//! | `disk` | [`Disk`]: the bdev |

mod address;
mod admin;
mod ana;
mod buffer;
mod command;
mod connect;
mod context;
mod controller;
mod conversation;
mod disk;
mod identify;
mod name;
mod namespaces;
mod options;
mod path;
mod queue;
mod requests;
mod shared;
mod silent;
mod status;
mod units;
mod wire;
mod worker;

pub use address::{Address, NQN_MAX, check_nqn};
pub use ana::AnaState;
pub use controller::{Controller, reach};
pub use conversation::{Broken, Conversation, DEPTH, Data, Ended};
pub use disk::{Disk, end_all};
pub use identify::Names;
pub use namespaces::{Found, list, unnamed};
pub use options::{CreateError, Only, Options, PATHS_MAX, PathInfo};
pub use wire::{Completion, Terms};

#[cfg(test)]
mod tests;
