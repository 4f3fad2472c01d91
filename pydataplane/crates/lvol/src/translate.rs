//! From a blobstore's errors to an lvstore's, and to those of an I/O.

use crate::error::Error;
use bdev::IoError;
use blobstore::{DiskError, Error as StoreError};

/// What a caller of `op` is told. Clusters become bytes.
pub(crate) fn refused(e: StoreError, op: &str, cluster_size: u32) -> Error {
    let op = op.to_owned();
    let bytes = |clusters: u64| clusters.saturating_mul(u64::from(cluster_size));
    match e {
        StoreError::NoSpace { needed, free } => {
            Error::NoSpace { op, needed: bytes(needed), free: bytes(free) }
        }
        StoreError::NoMetadataSpace { needed, free } => {
            Error::NoSpace { op, needed: needed * 4096, free: free * 4096 }
        }
        StoreError::NameTooLong { name, len, max } => Error::NameTooLong { name, len, max },
        StoreError::BadName { name, why } => Error::BadName { name, why },
        StoreError::NameTaken { name } => Error::AlreadyExists { what: format!("lvol {name}") },
        StoreError::UuidTaken { uuid } => Error::AlreadyExists { what: format!("lvol {uuid}") },
        StoreError::NoBlob { .. } => Error::NoLvol { id: op },
        StoreError::NoXattr { blob, name } => Error::NoXattr { lvol: blob, name },
        StoreError::ReadOnly { .. } => Error::ReadOnly { op },
        StoreError::BadOption { why, .. } | StoreError::BadXattr { why, .. } => {
            Error::BadParameter { op, why }
        }
        StoreError::HasClones { clones, .. } => Error::HasClones { op, clones: clones.join(", ") },
        StoreError::NotASnapshot { name } => Error::NotASnapshot { op, name },
        StoreError::NoParent { .. } => Error::NoParent { op },
        e @ (StoreError::TooLarge { .. }
        | StoreError::OutOfRange { .. }
        | StoreError::OldFormat { .. }
        | StoreError::StillShared { .. }
        | StoreError::OtherSize { .. }
        | StoreError::OtherDif { .. }
        | StoreError::CannotShare { .. }
        | StoreError::TooMany { .. }) => Error::BadParameter { op, why: e.to_string() },
        e @ StoreError::Shrunk { .. } => Error::Shrunk { op, why: e.to_string() },
        e @ StoreError::CannotGrow { .. } => Error::CannotGrow { op, why: e.to_string() },
        StoreError::Stopped { cause } => Error::Stopped { op, cause },
        StoreError::Data(e) => not_written(&e, op),
        StoreError::Metadata(e) => Error::Io { op, cause: e.to_string() },
        e @ (StoreError::NotAStore { .. }
        | StoreError::Truncated { .. }
        | StoreError::Unsupported { .. }
        | StoreError::Damaged { .. }) => Error::Io { op, cause: e.to_string() },
    }
}

/// Why `op` could not write zeros; nothing of it happened.
pub(crate) fn not_written(e: &DiskError, op: String) -> Error {
    let cause = e.to_string();
    if e.no_space { Error::DeviceFull { op, cause } } else { Error::Io { op, cause } }
}

/// Why the lvstore on `bdev` could not be loaded.
pub(crate) fn not_loaded(e: StoreError, bdev: &str) -> Error {
    match e {
        StoreError::NotAStore { why } => Error::NotAnLvstore { bdev: bdev.to_owned(), why },
        e => Error::Damaged { bdev: bdev.to_owned(), why: e.to_string() },
    }
}

/// What the I/O that waited for the store ends with.
pub(crate) fn io_error(e: &StoreError) -> IoError {
    match e {
        StoreError::NoSpace { .. } | StoreError::NoMetadataSpace { .. } => IoError::NoSpace,
        StoreError::Data(e) | StoreError::Metadata(e) if e.no_space => IoError::NoSpace,
        StoreError::Data(_) | StoreError::Metadata(_) | StoreError::Stopped { .. } => {
            IoError::WriteMedium
        }
        StoreError::OutOfRange { .. } => IoError::OutOfRange,
        StoreError::ReadOnly { .. } => IoError::ReadOnly,
        StoreError::NoBlob { .. } => IoError::Removed,
        StoreError::NotAStore { .. }
        | StoreError::Truncated { .. }
        | StoreError::Unsupported { .. }
        | StoreError::Damaged { .. }
        | StoreError::Shrunk { .. }
        | StoreError::CannotGrow { .. }
        | StoreError::BadOption { .. }
        | StoreError::NameTooLong { .. }
        | StoreError::BadName { .. }
        | StoreError::NameTaken { .. }
        | StoreError::UuidTaken { .. }
        | StoreError::NoXattr { .. }
        | StoreError::BadXattr { .. }
        | StoreError::OldFormat { .. }
        | StoreError::NotASnapshot { .. }
        | StoreError::HasClones { .. }
        | StoreError::NoParent { .. }
        | StoreError::StillShared { .. }
        | StoreError::OtherSize { .. }
        | StoreError::OtherDif { .. }
        | StoreError::CannotShare { .. }
        | StoreError::TooMany { .. }
        | StoreError::TooLarge { .. } => IoError::WriteMedium,
    }
}
