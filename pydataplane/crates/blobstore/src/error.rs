//! What can go wrong with a store or a blob.

use crate::disk::DiskError;
use uuid::Uuid;

/// Why a store or blob operation was refused or failed. Sizes are in bytes unless said otherwise.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Error {
    /// Neither superblock copy is one of ours.
    #[error("the device holds no blobstore: {why}; create one, or name the right device")]
    NotAStore {
        /// What was found instead, as a clause.
        why: String,
    },
    /// The device is smaller than it was when the store was created or grown last.
    #[error(
        "store {name} cannot be loaded: the device has {have} bytes but had {need} bytes when the \
         store was created or grown, so it was truncated; give the whole device back"
    )]
    Truncated {
        /// Name of the store.
        name: String,
        /// Bytes that the store needs.
        need: u64,
        /// Bytes that the device has.
        have: u64,
    },
    /// The device under a store in use has become smaller.
    #[error(
        "the store cannot become smaller: the device has {have} bytes but the store needs {need}; \
         give the whole device back"
    )]
    Shrunk {
        /// Name of the store.
        name: String,
        /// Bytes that the store needs.
        need: u64,
        /// Bytes that the device has.
        have: u64,
    },
    /// The device is larger than the metadata region, whose size stays, is good for.
    #[error(
        "the device has {have} bytes, but the metadata that the store was created with is good for \
         {max} at most; make the device no larger, or create another store"
    )]
    CannotGrow {
        /// Name of the store.
        name: String,
        /// Bytes that the device has.
        have: u64,
        /// Bytes that it may have.
        max: u64,
    },
    /// Made by a newer version, or with features that this one does not know.
    #[error("the store cannot be loaded: {why}; use the version that created it, or a newer one")]
    Unsupported {
        /// The cause, as a clause.
        why: String,
    },
    /// A structure on the medium contradicts itself or another.
    #[error(
        "the store cannot be loaded: {place} is damaged ({cause}); \
         restore the device from a copy, nothing was changed"
    )]
    Damaged {
        /// Which page, such as `metadata page 7 at byte 176128`.
        place: String,
        /// What is wrong with it.
        cause: String,
    },
    /// The device is too small, or a cluster size that is not possible.
    #[error("cannot create store {name}: {why}")]
    BadOption {
        /// Name of the store.
        name: String,
        /// The cause with the range, as a clause.
        why: String,
    },
    /// A name that is too long.
    #[error("the name {name} has {len} characters, but at most {max} are possible; shorten it")]
    NameTooLong {
        /// The name.
        name: String,
        /// Its length in bytes.
        len: usize,
        /// The longest in bytes.
        max: usize,
    },
    /// A name that is empty or has characters that are not possible.
    #[error("the name {name:?} cannot be used: {why}; choose another")]
    BadName {
        /// The name.
        name: String,
        /// The cause, as a clause.
        why: &'static str,
    },
    /// The name is taken.
    #[error("cannot use the name {name}: another blob has it; choose another name")]
    NameTaken {
        /// The name.
        name: String,
    },
    /// The UUID is taken.
    #[error("cannot use the UUID {uuid}: another blob has it; choose another UUID")]
    UuidTaken {
        /// The UUID.
        uuid: Uuid,
    },
    /// No such blob.
    #[error("blob {id} does not exist")]
    NoBlob {
        /// What was looked for.
        id: u64,
    },
    /// No such xattr.
    #[error("blob {blob} has no xattr {name}")]
    NoXattr {
        /// Name of the blob.
        blob: String,
        /// Name of the xattr.
        name: String,
    },
    /// An xattr that does not fit.
    #[error("cannot set xattr {name} of blob {blob}: {why}")]
    BadXattr {
        /// Name of the blob.
        blob: String,
        /// Name of the xattr.
        name: String,
        /// The cause with the limit, as a clause.
        why: String,
    },
    /// Too few free clusters.
    #[error("the store has too little room: {needed} clusters are needed, {free} are free")]
    NoSpace {
        /// Clusters needed.
        needed: u64,
        /// Clusters free.
        free: u64,
    },
    /// Too few free metadata pages.
    #[error(
        "the store has too little room for metadata: {needed} pages are needed, {free} are free; \
         delete blobs, or use a store with larger clusters"
    )]
    NoMetadataSpace {
        /// Pages needed.
        needed: u64,
        /// Pages free.
        free: u64,
    },
    /// A blob larger than the format can map.
    #[error(
        "a blob of {clusters} clusters is not possible: at most {max} are; use larger clusters"
    )]
    TooLarge {
        /// Clusters asked for.
        clusters: u64,
        /// Most clusters.
        max: u64,
    },
    /// A snapshot in a store whose format has none.
    #[error(
        "store {store} has version {version} of the format, which has no snapshots; upgrade it \
         first (virtlun lvstore upgrade)"
    )]
    OldFormat {
        /// Name of the store.
        store: String,
        /// Its version.
        version: u32,
    },
    /// Not a snapshot, or one that is being deleted.
    #[error("blob {name} is not a snapshot; take one of it first")]
    NotASnapshot {
        /// Name of the blob.
        name: String,
    },
    /// Deletion of a snapshot that more than one blob needs.
    #[error(
        "snapshot {name} has the clones {}; delete or inflate them, all but one, first",
        clones.join(", ")
    )]
    HasClones {
        /// Name of the snapshot.
        name: String,
        /// Names of its clones.
        clones: Vec<String>,
    },
    /// No parent, and nothing to be taken from it.
    #[error("blob {name} has no parent")]
    NoParent {
        /// Name of the blob.
        name: String,
    },
    /// A parent that is still needed.
    #[error("blob {name} still lacks clusters that its parent has; allocate those first")]
    StillShared {
        /// Name of the blob.
        name: String,
    },
    /// A parent of another size.
    #[error("blob {name} and snapshot {parent} have not the same size; resize the blob first")]
    OtherSize {
        /// Name of the blob.
        name: String,
        /// Name of the snapshot.
        parent: String,
    },
    /// A parent with other protection information of its own, or with some where the blob has none, or the
    /// other way.
    #[error(
        "blob {name} and {parent} do not keep the same protection information; clone that one instead"
    )]
    OtherDif {
        /// Name of the blob.
        name: String,
        /// Name of what was to be its parent.
        parent: String,
    },
    /// Clusters that a blob cannot have together with others.
    #[error("blob {name} cannot share clusters: {why}; copy them instead")]
    CannotShare {
        /// Name of the blob.
        name: String,
        /// The cause, as a clause.
        why: &'static str,
    },
    /// More blobs than one record can change.
    #[error("{count} blobs at once are too many: at most {most} are possible")]
    TooMany {
        /// How many were asked for.
        count: u64,
        /// Most of them.
        most: u64,
    },
    /// A write to a read-only blob.
    #[error("blob {name} is read-only")]
    ReadOnly {
        /// Name of the blob.
        name: String,
    },
    /// Reading or writing past the end of a blob.
    #[error("blob {name} ends at byte {size}, before the end of the access at byte {end}")]
    OutOfRange {
        /// Name of the blob.
        name: String,
        /// Its size.
        size: u64,
        /// Where the access ends.
        end: u64,
    },
    /// The device failed; the operation did not happen.
    #[error("the device failed: {0}")]
    Data(DiskError),
    /// The device failed in the middle of a metadata change: whether it happened is not known, and
    /// the store takes no more.
    #[error(
        "the device failed while metadata was written ({0}); the store takes no more changes: \
         mend the device and load the store again"
    )]
    Metadata(DiskError),
    /// Refused because of an earlier [`Error::Metadata`].
    #[error(
        "the store takes no more changes because {cause}; mend the device and load the store again"
    )]
    Stopped {
        /// The earlier failure.
        cause: String,
    },
}
