//! Keeps FUSE mounts and connections of VMs, and the descriptors that they need, while the process
//! that serves them is away: killed, restarted or exchanged for a newer one.
//!
//! Owns: the mounts below one folder, and for each a *session*: the descriptor of `/dev/fuse` that
//! the mount was made with, and a memfd in which whoever serves it keeps what its successor must
//! know. The kernel ends a FUSE connection when its last descriptor is closed; as long as the
//! holder has one, what the mount's users ask for just waits. Never reads or answers a request, and
//! never looks into a memfd: it knows nothing of bdevs, and depends on no version of the target.
//!
//! ```text
//!  target --- SOCK_SEQPACKET, SCM_RIGHTS ---> holder ---> mount(2), descriptors
//!                                               |  with systemd: its file descriptor store
//! ```
//!
//! It is the only process that needs CAP_SYS_ADMIN for exports; it makes the system calls of
//! `sandbox::calls::HOLDER` and no other. It outlives the target, and the
//! target outlives it: whoever of the two is there has the descriptors, and gives them to the other
//! when that comes back. A target starts one of its own, with the option `--exit-when-idle`, where
//! none is set up. With systemd, or in a pod of its own, it runs by itself; systemd then has a copy
//! of each descriptor (`FDSTORE=1`, sd_notify(3)), so that even the holder can be restarted while
//! no target runs.
//!
//! Where the kernel has the ublk driver with user recovery (Linux 6.5), it also makes devices for a
//! target: that takes CAP_SYS_ADMIN, too. It passes their queues on and keeps none; the kernel keeps
//! the devices.
//!
//! It also keeps the connections of VMs that a target gives it ([`vms`]), until their front ends close
//! them: what a guest asks of a target that was killed waits for the next one.
//!
//! Sessions that nobody serves for [`Options::wait`] are given up: their users get errors (ENOTCONN;
//! EIO through a loop device) instead of waiting for ever.
//!
//! | file | noun |
//! | --- | --- |
//! | `wire` | the packets between the two: one line of text, and descriptors |
//! | `mounts` | a folder of FUSE mounts: make, put back, take away |
//! | `server` | the holder |
//! | `disks` | devices of the ublk driver, where the kernel has it |
//! | `links` | which of these is whose, for who mounts |
//! | `vms` | connections of VMs |
//! | `store` | systemd's file descriptor store |
//! | `rights` | what it may do to its host, for who asks |
//! | `client` | the target's end |
//! | `cli` | the program `virtlun-holder` |

#![deny(unsafe_code)]

pub mod cli;
mod client;
mod disks;
mod links;
mod mounts;
mod rights;
mod server;
mod store;
mod vms;
pub mod wire;

pub use client::{Client, ClientError};
pub use disks::{Disk, Found};
pub use mounts::{FS_TYPE, MountError, Mounts, is_mounted};
pub use server::{Options, serve};

use std::os::fd::OwnedFd;

/// Bytes of a session's memfd; it cannot shrink or grow.
pub const RECORD_BYTES: u64 = 128 * 1024;

/// Sessions of one holder at most: their names fit into one packet.
pub const SESSIONS_MAX: usize = 4096;

/// The descriptors of a mount.
#[derive(Debug)]
pub struct Session {
    /// `/dev/fuse`, not blocking.
    pub fuse: OwnedFd,
    /// A memfd of [`RECORD_BYTES`], zeros at first: what the one who serves wrote down.
    pub record: OwnedFd,
}
