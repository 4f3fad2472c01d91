//! A vhost-user front end: it drives a target through shared memory as a guest does.
//!
//! Owns: guest memory of its own ([`Arena`]), the vhost-user connection ([`Connection`]), the
//! driver's side of the split ring ([`Ring`]), virtio-scsi and virtio-blk framing ([`scsi`],
//! [`blk`]), a session that puts them together and keeps the in-flight region ([`Session`]), a
//! line-driven script for tests ([`exec`]) and the benchmark ([`bench`]). Never knows how a target is
//! built: QEMU's storage daemon, SPDK's vhost and virtlun-target are all driven alike.
//!
//! It is a driver that may be told to misbehave: raw descriptors, indexes and memory tables go
//! to the target as given, so that tests can see that the target survives them.

mod arena;
pub mod bench;
pub mod blk;
mod connection;
mod error;
pub mod exec;
mod inflight;
mod ring;
pub mod scsi;
mod session;

pub use arena::Arena;
pub use connection::{Connection, Vring, feature};
pub use error::Error;
pub use inflight::{Extent, Inflight, QueueState};
pub use ring::{Kick, Layout, Ring, Used};
pub use session::{Done, Kind, Options, Session, Transfer};
