//! Harnesses: each takes arbitrary bytes, does with them what a hostile peer could, and panics where
//! an invariant does not hold. One module a boundary; the targets in `fuzz_targets/`, and `corpora.rs`, only call them.
//!
//! | target | who is hostile | what it makes up |
//! | --- | --- | --- |
//! | `ring`, `memory` | guest | rings, chains, descriptors, indirect tables; addresses |
//! | `commands` | guest | CDBs and their data |
//! | `requests` | guest, front end | virtio-scsi requests and task management through a controller's queues; in-flight regions given to it |
//! | `protected` | guest, front end | the same of requests that carry protection information |
//! | `blks` | guest, front end | the same of virtio-blk |
//! | `inflight` | front end | in-flight regions, and rings that they do not belong to |
//! | `messages` | front end | vhost-user messages with descriptors |
//! | `frames` | RPC client | JSON-RPC |
//! | `stores` | whoever had the disk before | metadata of an lvstore with checksums that match |
//! | `checksums` | whoever had the disk before | superblock, maps and checksums of a bdev with those |
//! | `holders` | target | packets to the holder, with descriptors |
//! | `disks` | kernel | requests in the table of a device of ublk |
//! | `upgrades` | another program in the target's place | messages of an upgrade, with descriptors |
//! | `exports` | kernel, holder | FUSE packets, what a process before left of an export |
//! | `servers` | NBD server, NVMe controller | what is agreed on, replies, data and requests for it |

pub mod checksums;
pub mod commands;
pub mod controllers;
pub mod disks;
pub mod exports;
pub mod frames;
mod harness;
pub mod holders;
mod host;
pub mod inflight;
mod input;
pub mod messages;
pub mod requests;
pub mod servers;
pub mod stores;
pub mod upgrades;

pub use harness::{memory, ring};

/// What takes the bytes of one input, and panics where it has found something.
pub type Target = fn(&[u8]);

/// Each target by its name, as `fuzz_targets/` have them for libFuzzer.
pub const TARGETS: [(&str, Target); 16] = [
    ("ring", ring),
    ("memory", memory),
    ("commands", commands::commands),
    ("frames", frames::frames),
    ("messages", messages::messages),
    ("inflight", inflight::inflight),
    ("stores", stores::stores),
    ("requests", requests::requests),
    ("protected", requests::protected),
    ("blks", requests::blks),
    ("exports", exports::exports),
    ("holders", holders::holders),
    ("upgrades", upgrades::upgrades),
    ("disks", disks::disks),
    ("checksums", checksums::checksums),
    ("servers", servers),
];

/// Servers of NBD and controllers of NVMe: see [`servers::servers`] and [`controllers::controllers`].
pub fn servers(data: &[u8]) {
    servers::servers(data);
    controllers::controllers(data);
}
