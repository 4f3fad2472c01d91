//! What can go wrong with an lvstore or an lvol. Each text is one sentence: object, operation,
//! cause, next step.

use std::io;

/// Why an operation on an lvstore or an lvol was refused or failed.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Error {
    /// No bdev of that name.
    #[error("bdev {bdev} does not exist; create it first or give another name")]
    NoBdev {
        /// The name asked for.
        bdev: String,
    },
    /// No lvstore of that name or UUID.
    #[error("lvstore {id} does not exist; list the lvstores to see what is loaded")]
    NoLvstore {
        /// The name or UUID asked for.
        id: String,
    },
    /// No lvol of that name, alias or UUID.
    #[error("lvol {id} does not exist; list the lvols to see what is there")]
    NoLvol {
        /// The alias or UUID asked for.
        id: String,
    },
    /// The lvol has no such xattr.
    #[error("lvol {lvol} has no xattr {name}; list its xattrs to see what is there")]
    NoXattr {
        /// The lvol.
        lvol: String,
        /// The xattr asked for.
        name: String,
    },
    /// The name or UUID is taken.
    #[error("cannot create {what}: it already exists; choose another name or use the existing one")]
    AlreadyExists {
        /// The object, such as `lvol lvs0/data`.
        what: String,
    },
    /// A name is longer than [`blobstore::NAME_MAX`] bytes.
    #[error("the name {name} has {len} characters, but at most {max} are possible; shorten it")]
    NameTooLong {
        /// The name asked for.
        name: String,
        /// Its length in bytes.
        len: usize,
        /// The longest length in bytes.
        max: usize,
    },
    /// A name is empty or has characters other than printable ASCII without space and slash.
    #[error("the name {name:?} cannot be used: {why}; choose another")]
    BadName {
        /// The name asked for.
        name: String,
        /// The cause, as a clause.
        why: &'static str,
    },
    /// A parameter is out of its range.
    #[error("cannot {op}: {why}")]
    BadParameter {
        /// The operation, such as `create lvstore lvs0`.
        op: String,
        /// The cause with the range, as a clause.
        why: String,
    },
    /// The lvstore has too few free clusters.
    #[error(
        "cannot {op}: {needed} bytes are needed but only {free} bytes are free; \
         delete volumes, or use a smaller size or a thin volume"
    )]
    NoSpace {
        /// The operation.
        op: String,
        /// Bytes that the operation needs.
        needed: u64,
        /// Bytes that are free.
        free: u64,
    },
    /// The bdev under the lvstore has no room for clusters that the lvstore has free.
    #[error(
        "cannot {op}: {cause}; what lies under the lvstore is full, and what was taken is given \
         back: make room there, or use a smaller size or a thin volume"
    )]
    DeviceFull {
        /// The operation.
        op: String,
        /// What failed.
        cause: String,
    },
    /// The bdev under an lvstore in use has become smaller.
    #[error("cannot {op}: {why}")]
    Shrunk {
        /// The operation.
        op: String,
        /// The cause with the sizes, as a clause.
        why: String,
    },
    /// The bdev is larger than the lvstore can become.
    #[error("cannot {op}: {why}")]
    CannotGrow {
        /// The operation.
        op: String,
        /// The cause with the limit, as a clause.
        why: String,
    },
    /// A snapshot that more than one clone needs.
    #[error("cannot {op}: {clones} need it; delete or inflate them, all but one, first")]
    HasClones {
        /// The operation.
        op: String,
        /// Aliases of the clones.
        clones: String,
    },
    /// Not a snapshot.
    #[error("cannot {op}: {name} is not a snapshot; take one of it first")]
    NotASnapshot {
        /// The operation.
        op: String,
        /// Name of the lvol.
        name: String,
    },
    /// An lvol without a parent.
    #[error("cannot {op}: it has none")]
    NoParent {
        /// The operation.
        op: String,
    },
    /// The bdev is its parent already.
    #[error("cannot {op}: it is its parent already")]
    AlreadyParent {
        /// The operation.
        op: String,
    },
    /// I/O that was in flight at a snapshot does not end.
    #[error(
        "cannot {op}: I/O of it has not ended within {seconds} s; see whether its disk answers, and try \
         again"
    )]
    SlowIo {
        /// The operation.
        op: String,
        /// How long it was waited for.
        seconds: u64,
    },
    /// Somebody uses the object.
    #[error("cannot {op}: it is in use by {by}; detach it there first")]
    InUse {
        /// The operation.
        op: String,
        /// Who uses it.
        by: String,
    },
    /// The lvstore is busy with another operation, or its bdev does not answer. Nothing was done.
    #[error(
        "cannot {op}: the lvstore is still busy with another change after {seconds} s; see whether \
         bdev {bdev} answers, and try again"
    )]
    Waiting {
        /// The operation.
        op: String,
        /// The bdev under the lvstore.
        bdev: String,
        /// How long was waited, in seconds.
        seconds: u64,
    },
    /// The volume is being created or grown.
    #[error(
        "cannot {op}: lvol {lvol} is being zeroed, {done} of {total} bytes are; wait for its end, or \
         cancel it with virtlun_lvol_cancel"
    )]
    Underway {
        /// The operation.
        op: String,
        /// The volume.
        lvol: String,
        /// Bytes that are zeroed.
        done: u64,
        /// Bytes in all.
        total: u64,
    },
    /// Somebody cancelled the operation. Nothing was done.
    #[error("cannot {op}: it was cancelled")]
    Cancelled {
        /// The operation.
        op: String,
    },
    /// The bdev holds no lvstore.
    #[error("bdev {bdev} holds no lvstore: {why}; create one with bdev_lvol_create_lvstore")]
    NotAnLvstore {
        /// The bdev.
        bdev: String,
        /// What was found instead, as a clause.
        why: String,
    },
    /// The bdev already holds an lvstore, and creating another would destroy it.
    #[error(
        "bdev {bdev} already holds lvstore {name} ({uuid}); delete that lvstore first, \
         or load it as it is"
    )]
    HoldsLvstore {
        /// The bdev.
        bdev: String,
        /// Name of the lvstore on it.
        name: String,
        /// UUID of the lvstore on it.
        uuid: uuid::Uuid,
    },
    /// The bdev holds an lvstore that cannot be loaded.
    #[error("the lvstore on bdev {bdev} cannot be loaded: {why}")]
    Damaged {
        /// The bdev.
        bdev: String,
        /// The damaged place, its cause and the next step.
        why: String,
    },
    /// The lvol is read-only.
    #[error("cannot {op}: the lvol is read-only")]
    ReadOnly {
        /// The operation.
        op: String,
    },
    /// The lvol is not read-only.
    #[error("cannot {op}: the lvol is not read-only; take a snapshot of it and copy that")]
    NotReadOnly {
        /// The operation.
        op: String,
    },
    /// The bdev is read-only.
    #[error("cannot {op}: bdev {bdev} is read-only; use another one")]
    ReadOnlyBdev {
        /// The operation.
        op: String,
        /// The bdev.
        bdev: String,
    },
    /// An earlier metadata I/O failed, so the lvstore's state on the medium is not known.
    #[error(
        "cannot {op}: the lvstore stopped taking changes because {cause}; \
         mend the device, then clear its flush error, which loads the lvstore again"
    )]
    Stopped {
        /// The operation.
        op: String,
        /// The first failure.
        cause: String,
    },
    /// The medium failed during this operation.
    #[error(
        "cannot {op}: {cause}; mend the device, then load the lvstore again to see \
         whether the operation happened"
    )]
    Io {
        /// The operation.
        op: String,
        /// What failed.
        cause: String,
    },
}

impl Error {
    /// The negative errno with which SPDK reports this condition (its JSON-RPC error code).
    pub fn errno(&self) -> i32 {
        -match self {
            Error::NoBdev { .. }
            | Error::NoLvstore { .. }
            | Error::NoLvol { .. }
            | Error::NotAnLvstore { .. } => ENODEV,
            Error::NoXattr { .. } => ENODATA,
            Error::AlreadyExists { .. }
            | Error::AlreadyParent { .. }
            | Error::HoldsLvstore { .. } => EEXIST,
            Error::NameTooLong { .. }
            | Error::BadName { .. }
            | Error::BadParameter { .. }
            | Error::NotASnapshot { .. }
            | Error::NoParent { .. } => EINVAL,
            Error::NoSpace { .. } | Error::DeviceFull { .. } | Error::CannotGrow { .. } => ENOSPC,
            Error::InUse { .. }
            | Error::Waiting { .. }
            | Error::Underway { .. }
            | Error::SlowIo { .. } => EBUSY,
            Error::Cancelled { .. } => ECANCELED,
            Error::Damaged { .. } | Error::Shrunk { .. } => EILSEQ,
            Error::ReadOnly { .. }
            | Error::NotReadOnly { .. }
            | Error::ReadOnlyBdev { .. }
            | Error::HasClones { .. } => EPERM,
            Error::Stopped { .. } | Error::Io { .. } => EIO,
        }
    }
}

impl From<Error> for io::Error {
    fn from(e: Error) -> Self {
        io::Error::other(e)
    }
}

const EPERM: i32 = 1;
const EIO: i32 = 5;
const EBUSY: i32 = 16;
const EEXIST: i32 = 17;
const ENODEV: i32 = 19;
const EINVAL: i32 = 22;
const ENOSPC: i32 = 28;
const ENODATA: i32 = 61;
const EILSEQ: i32 = 84;
const ECANCELED: i32 = 125;
