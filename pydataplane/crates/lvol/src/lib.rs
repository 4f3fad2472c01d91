//! Logical volumes: blobs of a blobstore as bdevs.
//!
//! Owns: the [`Lvstores`] manager (create, load, destroy and list lvstores and lvols), one metadata
//! thread per lvstore, and the lvol bdev with its data path. Never knows SCSI, vhost or JSON-RPC;
//! called by the target's method implementations and, through [`bdev::Bdev`], by whoever does I/O.

mod error;
mod info;
mod lvstores;

pub use error::Error;
pub use info::{
    ClearMethod, DEFAULT_CLUSTER_SIZE, LvolInfo, LvolOptions, LvsRef, LvstoreInfo, LvstoreOptions,
};
pub use lvstores::Lvstores;
