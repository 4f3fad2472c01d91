//! Guest memory as a vhost-user back end sees it.
//!
//! Owns: the mapped regions of one guest, bounds-checked ranges into them, scatter-gather lists
//! built from them, and the dirty log of live migration. Never knows rings, SCSI or sockets.
//! Called by `virtqueue` (rings), `vhost` (requests) and, through [`Sg`], by every bdev.
//!
//! This is one of the few crates with `unsafe`: all others reach guest bytes only through the
//! checked types here.

mod iov;

pub use iov::{IoVec, Sg};
