//! Images of Ceph (RBD) as bdevs, by librbd.
//!
//! Owns: how librados and librbd are found and called, clients of clusters, open images with their locks,
//! and the bdev. Never links with those libraries, never lets one of their threads touch anything of the
//! target's but a ring of ended I/Os, and never waits on a reactor. Called by the target's methods.
//!
//! | file | noun |
//! | --- | --- |
//! | `ffi` | [`Library`]: the functions of both libraries, found at run time |
//! | `cluster` | [`Cluster`]: a client, which connects on a thread of its own; [`within`]: calls with a limit |
//! | `clusters` | [`Clusters`]: those of a process |
//! | `clients` | the addresses of clients, recorded for the next process |
//! | `answers` | whether a cluster answers what its images were asked |
//! | `monitors` | whether its monitors answer |
//! | `image` | [`OpenedImage`], [`Source`]: an image, its lock, its size |
//! | `close` | how an image is closed |
//! | `hold` | whether an image may be written here, while its guest moves from host to host |
//! | `kind` | whether an image is one host's at a time, or several share it |
//! | `lock` | the lock of an open image, that of a client that is gone broken |
//! | `disk` | [`Disk`]: the bdev |
//! | `channel` | its queue pair: the whole I/O path |
//! | `pool` | [`Pool`], [`Volume`]: the images of a pool, made, changed and listed without a lock |
//! | `pool::lease` | what is kept for a limited time |
//! | `pool::together` | snapshots of several images at one instant, all or none |
//! | `pool::rollback` | images that read as their snapshots, all or none, whatever ends meanwhile |
//! | `watchers` | which clients have an image open |
//! | `ring` | how ended I/Os come back from librbd's threads |
//! | `errno` | what a guest's I/O ends with |
//! | `error` | [`Error`]: why something cannot be done |
//!
//! An image that is to be written is locked for this host alone, unless it is shared, about which all who use it have
//! to agree: another client's write is refused by the cluster, and a client that the cluster has fenced
//! (blocklisted) has every I/O fail at once. A cluster that does not answer keeps I/O of its own images waiting, and
//! threads that open and close them, nothing else.

mod answers;
mod calls;
mod channel;
mod clients;
mod close;
mod cluster;
mod clusters;
mod disk;
mod errno;
mod error;
mod ffi;
mod generation;
mod hold;
mod image;
mod kind;
mod lock;
mod monitors;
mod pool;
mod ring;
mod watchers;

pub use clients::CLIENTS;
pub use cluster::{Cluster, ClusterOptions, ConfigFile, exit, is_quiet, wait_until_quiet, within};
pub use clusters::Clusters;
pub use disk::{Disk, HeldBack};
pub use error::Error;
pub use ffi::{Library, LibraryError};
pub use image::{OpenedImage, Source};
pub use pool::{Member, Notes, Pool, Ranges, Space, Volume};
