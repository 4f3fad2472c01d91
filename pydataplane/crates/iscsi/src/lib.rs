//! LUNs of iSCSI targets as bdevs, by libiscsi.
//!
//! Owns: how libiscsi is found and called, sessions with targets and their loss, what a LUN says of itself, and
//! the bdev. Never links with the library, never waits on a reactor, and never knows JSON-RPC or what lies
//! above; the target's methods call it.
//!
//! libiscsi serves a session on one thread, so each device has one: it logs in, sends the I/O of all channels,
//! and waits for the socket. Channels hand I/Os over through a queue without a lock, and have completions
//! back the same way. Data goes between the socket and the guest's memory.
//!
//! # When a session is lost
//!
//! I/O waits, and what was not answered is sent again in the next session. That is right because
//!
//! - a command that was answered is never sent again;
//! - two I/Os that change the same blocks are never in flight together ([`bdev::Overlaps`]): one whose answer was
//!   lost is the last that changed its blocks, so done twice it is as done once;
//! - nothing is sent in a new session before the target has ended what it had of the old one: each login of a
//!   device has the same identifier (ISID), and the target ends the session that has it before it lets in
//!   (session reinstatement, RFC 7143 6.3.5). So does that of a process that comes after one that was killed, as
//!   the identifier is recorded. (tgtd does not wait for what its threads still carry out: not our doing, and a
//!   reset of the LUN would harm other hosts.) libiscsi's own reconnection takes another one, and is off;
//! - a COMPARE AND WRITE is not sent again, as it would find what it wrote: it fails as aborted;
//! - a SYNCHRONIZE CACHE stands for writes that were answered before. Where a target that comes back may have
//!   lost those, each write is sent with FUA instead ([`Options::write_through`]): by default where it is
//!   another host.
//!
//! A target that hangs is waited for. After [`timeout`] without an answer the session is given up, I/O fails,
//! and further I/O fails at once until there is a session again. A LUN that tells of a change is looked at in a new
//! session before anything more is sent (`sense`). One that has another identification
//! or block size than before keeps the device without one.
//!
//! | file | noun |
//! | --- | --- |
//! | `ffi` | [`Library`]: the functions of libiscsi, found at run time |
//! | `address` | [`Address`]: where a LUN is, as a URL |
//! | `command` | what is sent |
//! | `unit` | what a LUN says of itself, checked |
//! | `sense` | what becomes of a command that was answered |
//! | `lun` | [`Lun`]: which one it is |
//! | `luns` | what a target has |
//! | `isid` | [`Isid`], which tells sessions apart |
//! | `session` | a session: all calls of the library |
//! | `requests` | the I/Os of a device, over all its sessions |
//! | `shared` | what is asked for of a device, and what it, its thread and its channels share |
//! | `worker` | its thread |
//! | `disk` | [`Disk`]: the bdev |

mod address;
mod command;
mod disk;
mod ffi;
mod isid;
mod lun;
mod luns;
mod requests;
mod sense;
mod session;
mod shared;
mod unit;
mod worker;

pub use address::{Address, LUN_MAX};
pub use disk::{CreateError, Disk, end_all, reach};
pub use ffi::{Library, LibraryError};
pub use isid::Isid;
pub use lun::Lun;
pub use luns::{Found, ListError, list, look};
pub use shared::{DEFAULT_TIMEOUT_S, Options, set_timeout, timeout};
