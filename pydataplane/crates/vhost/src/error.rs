//! Why a method of [`Controllers`](crate::Controllers) did nothing, or not all.

use std::io;
use std::time::Duration;

use bdev::{OpenError, RegistryError};
use scsi::LunError;

use crate::defs::MAX_TARGETS;
use crate::socket::SocketError;

/// Bytes of a controller's name, at most.
pub const MAX_NAME: usize = 64;

/// Why a request about controllers was not done. Nothing changed.
#[derive(Debug, thiserror::Error)]
pub enum ControllerError {
    /// Empty, too long, or not a plain file name.
    #[error(
        "controller name {0:?} is not a file name of 1 to {MAX_NAME} bytes; choose letters, digits, '-', '_' and '.'"
    )]
    Name(String),
    /// It is there already.
    #[error("controller {0} exists already; delete it first or choose another name")]
    Exists(String),
    /// There is none.
    #[error("there is no controller {0}")]
    NotFound(String),
    /// A VM uses it.
    #[error("controller {0} is in use: a VM is connected; stop the VM first")]
    Connected(String),
    /// No reactor runs on any of these CPUs.
    #[error("no reactor runs on CPU {}", join(.0))]
    NoReactor(Vec<usize>),
    /// Not 0 to 254.
    #[error("target number {0} is not 0 to {max}, nor -1 for the lowest that is free", max = MAX_TARGETS - 1)]
    TargetNumber(i64),
    /// The number is taken.
    #[error(
        "target {target} of controller {controller} is taken by bdev {bdev}; choose another number"
    )]
    TargetTaken {
        /// Name of the controller.
        controller: String,
        /// The number.
        target: u8,
        /// What it shows.
        bdev: String,
    },
    /// All numbers are taken.
    #[error("controller {0} has no free target number; all {MAX_TARGETS} are taken")]
    Full(String),
    /// Its disk is its only one.
    #[error(
        "controller {0} shows one virtio-blk disk: it has no targets to add or remove; make a SCSI \
         controller for that"
    )]
    NotScsi(String),
    /// There is no such target.
    #[error("controller {controller} has no target {target}")]
    NoTarget {
        /// Name of the controller.
        controller: String,
        /// The number.
        target: i64,
    },
    /// The guest prevents the removal. Nothing was done.
    #[error(
        "the guest of controller {controller} has target {target} in use and prevents its removal; unmount the disk in the guest, or remove it without unless_prevented"
    )]
    Prevented {
        /// Name of the controller.
        controller: String,
        /// The number.
        target: u8,
    },
    /// I/O of the guest did not end in time; the target goes away when it does.
    #[error(
        "target {target} of controller {controller} still has I/O in flight after {} s; it will be removed when that ends",
        waited.as_secs()
    )]
    StillBusy {
        /// Name of the controller.
        controller: String,
        /// The number.
        target: u8,
        /// How long was waited.
        waited: Duration,
    },
    /// The thread of the controller waits for I/O of its guest. Nothing was done.
    #[error(
        "controller {controller} still waits for I/O of its VM after {} s; see what its bdevs are on, and try again",
        waited.as_secs()
    )]
    Waiting {
        /// Name of the controller.
        controller: String,
        /// How long was waited.
        waited: Duration,
    },
    /// I/O of the guest did not end in time; the controller is gone but for that.
    #[error(
        "controller {controller} is deleted, but still has I/O in flight after {} s; its bdevs stay in use until that ends",
        waited.as_secs()
    )]
    StillEnding {
        /// Name of the controller.
        controller: String,
        /// How long was waited.
        waited: Duration,
    },
    /// Another bdev does not take the place of a target's. The sentence of whoever asked for it.
    #[error("target {target} of controller {controller} stays with bdev {bdev}: {why}")]
    Stays {
        /// Name of the controller.
        controller: String,
        /// The number.
        target: u8,
        /// What it shows.
        bdev: String,
        /// Why.
        why: String,
    },
    /// The volume is not there, or somebody else holds it.
    #[error(transparent)]
    Registry(#[from] RegistryError),
    /// The volume cannot be a disk as asked.
    #[error(transparent)]
    Lun(#[from] LunError),
    /// The volume cannot be opened.
    #[error(transparent)]
    Open(#[from] OpenError),
    /// The socket cannot be made.
    #[error(transparent)]
    Socket(#[from] SocketError),
    /// A controller does not go on in another process, or here again.
    #[error("{0}")]
    HandOver(String),
    /// A thread or a descriptor could not be had.
    #[error("cannot start controller {name}: {why}")]
    Start {
        /// Name of the controller.
        name: String,
        /// The cause.
        why: io::Error,
    },
}

/// Numbers as a sentence has them: `1, 2`.
fn join(numbers: &[usize]) -> String {
    numbers.iter().map(usize::to_string).collect::<Vec<_>>().join(", ")
}
