//! Crash-safe allocation of the clusters of one block device to blobs.
//!
//! Owns: the on-disk format (`schemas/blobstore.md`), the journal, the free-space maps, and the
//! operations on blobs and their xattrs. Never knows bdevs, reactors or RPC: it drives anything
//! that implements [`Disk`], synchronously, on the one thread that owns the [`Store`]. The `lvol`
//! crate puts it on a bdev and adds the asynchronous data path; a program that wants to keep
//! objects on a raw device can use it as it is (`examples/hello-blob`, `examples/kv`):
//!
//! ```
//! use blobstore::{BlobOptions, HistoryOptions, MemDisk, Store, StoreOptions};
//! use uuid::Uuid;
//!
//! # fn main() -> Result<(), blobstore::Error> {
//! let options = StoreOptions { name: "store".into(), uuid: Uuid::new_v4(), cluster_size: 1 << 20 };
//! let mut store = Store::create_store(MemDisk::new(64 << 20), &options)?;
//! let (name, uuid, xattrs) = ("blob".into(), Uuid::new_v4(), Default::default());
//! let blob = store.create(&BlobOptions { dif: None, name, uuid, size: 4, thin: true, xattrs })?;
//! store.write(blob, 4096, b"hello")?;
//! store.sync()?; // what was written is durable now; the blob was when it was created
//!
//! let (name, uuid, xattrs) = ("before".into(), Uuid::new_v4(), Default::default());
//! // The number stays with what was written; the blob goes on under a new one.
//! let (before, blob) = (blob, store.snapshot(&[(blob, HistoryOptions { name, uuid, xattrs })])?[0]);
//! store.write(blob, 4096, b"HELLO")?;
//! let mut bytes = [0; 5];
//! store.read(before, 4096, &mut bytes)?;
//! assert_eq!(&bytes, b"hello");
//! # Ok(())
//! # }
//! ```
//!
//! | file | noun |
//! | --- | --- |
//! | `disk` | [`Disk`]: what a store needs of a device; [`FileDisk`], [`MemDisk`] |
//! | `format/` | pages, superblock, blob root, journal record: bytes to types and back |
//! | `layout` | where things lie on a device of some size |
//! | `bitmap` | used and free pages and clusters; a [`Run`] of them |
//! | `blob` | a blob in memory |
//! | `store` | [`Store`]: state; `journal`: commit, checkpoint; `replay`: the journal, read again |
//! | `load` | from the medium to a [`Store`], refusing what is damaged |
//! | `check` | [`Checked`]: the medium beside memory, and repair |
//! | `dump` | [`Dumped`]: what is on the medium, page by page |
//! | `scrub` | [`Scrubbed`]: whether all data can be read |
//! | `ops` | create, delete, resize, rename, xattrs: one transaction each |
//! | `history` | [`HistoryOptions`]: snapshots and clones, and their end |
//! | `share` | [`Shared`]: clusters with several owners |
//! | `shows` | what a blob is read from where it has nothing of its own |
//! | `extents` | what an extents page says; `brought`: which of them are in memory |
//! | `entries` | what stands for a cluster: set and removed |
//! | `external` | parents outside of the store |
//! | `fill` | [`Fill`]: what a cluster has before a blob owns it |
//! | `zeros` | free clusters that are known to read as zeros; `cleared`: how that comes to be |
//! | `thin` | [`Batch`]: allocation on demand and unmapping, many in one record |
//! | `grow` | taking over what the device has gained |
//! | `data` | reading and writing a blob's contents |
//! | `error` | [`Error`] |
//!
//! Errors: one sentence that names object, operation, cause and next step. After a metadata write
//! or flush failed, nothing is known about the medium and the store refuses every further change.

#![forbid(unsafe_code)]

// For what its tests share with those beside it.
#[cfg(test)]
extern crate self as blobstore;

mod bitmap;
mod blob;
mod brought;
mod check;
mod cleared;
mod data;
mod disk;
mod dump;
mod entries;
mod error;
mod extents;
mod external;
mod fill;
mod format;
mod grow;
mod history;
mod layout;
mod load;
mod ops;
mod owners;
mod recount;
mod scrub;
mod share;
mod shows;
mod store;
#[cfg(test)]
mod testing;
mod thin;
mod zeros;

pub use bitmap::Run;
pub use blob::{BlobId, BlobInfo, Dif, DifType};
pub use check::{Checked, Problem};
pub use disk::{Disk, DiskError, FileDisk, MemDisk};
pub use dump::{Dumped, Entry};
pub use error::Error;
pub use fill::{Fill, Over};
pub use format::{
    CLUSTER_MAX, CLUSTER_MIN, HOLE, NAME_MAX, PAGE_SIZE, XATTR_NAME_MAX, XATTR_VALUE_MAX,
};
pub use history::{Deleted, HistoryOptions};
pub use ops::BlobOptions;
pub use scrub::{Scrubbed, Unreadable};
pub use share::{SHARE_MAX, Shared};
pub use store::{Freed, Identity, Reservation, Store, StoreInfo, StoreOptions};
pub use thin::{Batch, BatchDone, Lost};
