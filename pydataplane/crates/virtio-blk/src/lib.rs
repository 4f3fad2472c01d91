//! The virtio-blk device (virtio 1.2 section 5.2): what a driver reads of it, and what it may ask for.
//!
//! Owns: the configuration space and the feature bits that follow from a disk, the layout of requests,
//! and the checks of all that a driver writes there. Knows nothing of rings, sessions or bdevs' channels:
//! the `vhost` crate takes requests from a ring, has them done, and answers with a [`status`].
//!
//! - `config`: [`Disk`], its features and its [`Config`].
//! - `request`: [`Header`], [`Request`].
//!
//! Guests are hostile: header and segments are copied out of guest memory once, and only the copy is
//! looked at. Whether a range lies on the disk is checked by whoever does the I/O, as sizes change.
//!
//! Not offered: VIRTIO_BLK_F_CONFIG_WCE (a back end that was killed could not know what the driver had
//! written there, as front ends do not say it again), secure erase, lifetime, zones, and requests with
//! SCSI commands of the legacy device.

#![forbid(unsafe_code)]

mod config;
mod request;

pub use config::{
    Config, Disk, F_BLK_SIZE, F_DISCARD, F_FLUSH, F_MQ, F_RO, F_SEG_MAX, F_SIZE_MAX, F_TOPOLOGY,
    F_WRITE_ZEROES, KNOWN_FEATURES,
};
pub use request::{
    Access, HEADER_SIZE, Header, ID_SIZE, MAX_DISCARD_BYTES, MAX_WRITE_ZEROES_BYTES, Request,
    status,
};

/// Bytes of a sector, the unit of addresses and of the capacity whatever the block size (5.2.4).
pub const SECTOR: u64 = 512;
