//! Harnesses: each takes arbitrary bytes, does with them what a hostile peer could, and panics where
//! an invariant does not hold. One module a boundary; the targets in `fuzz_targets/` only call them.
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
