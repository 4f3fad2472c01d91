//! Why a bdev with checksums is not made, loaded, grown or deleted.

use crate::format::Fault;
use bdev::{OpenError, RegistryError, SyncError};

/// One sentence: what was wrong, and where.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// Of the base, or of a name.
    #[error(transparent)]
    Registry(#[from] RegistryError),
    /// Of a name.
    #[error(
        "'{0}' cannot be the name of a bdev with checksums: that is 1 to 63 bytes of printable ASCII without \
         space and '/'"
    )]
    Name(String),
    /// The base is too small or too large.
    #[error("bdev {bdev} has {pages} pages of 4096 bytes, which is {why} for checksums")]
    Size {
        /// The base.
        bdev: String,
        /// Its size.
        pages: u64,
        /// A few words.
        why: &'static str,
    },
    /// The base takes no writes.
    #[error("bdev {0} is read-only, so nothing can be made on it")]
    ReadOnly(String),
    /// There are checksums already.
    #[error("bdev {bdev} holds the checksums of bdev {name} already: delete that first")]
    Exists {
        /// The base.
        bdev: String,
        /// What is on it.
        name: String,
    },
    /// What is there cannot be used.
    #[error("the checksums on bdev {bdev} cannot be used: {what}: {fault}")]
    Damaged {
        /// The base.
        bdev: String,
        /// Which part of it.
        what: &'static str,
        /// Why.
        fault: Fault,
    },
    /// The base is smaller than it was.
    #[error(
        "bdev {bdev} has {pages} pages of 4096 bytes, but {expected} when its checksums were made: it was cut off"
    )]
    Truncated {
        /// The base.
        bdev: String,
        /// Its size.
        pages: u64,
        /// What it was.
        expected: u64,
    },
    /// It is larger than it can become in one go.
    #[error("bdev {bdev} grew from {from} to {to} zones at once: unload it and load it anew")]
    GrewTooMuch {
        /// The base.
        bdev: String,
        /// Zones before.
        from: usize,
        /// Zones now.
        to: u64,
    },
    /// The base does not do what it should.
    #[error(transparent)]
    Io(#[from] SyncError),
    /// The base cannot be opened.
    #[error(transparent)]
    Open(#[from] OpenError),
    /// The system refused.
    #[error("there is no thread for the checksums of bdev {bdev}: {cause}")]
    Thread {
        /// The base.
        bdev: String,
        /// Why.
        cause: String,
    },
}
