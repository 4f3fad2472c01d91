//! Checksums of a bdev's blocks, verified when they are read.
//!
//! Owns: the bdev ([`Integrity`]) that shows another one, its base, less the room for a CRC-32C of each
//! block of 4096 bytes, and what is on the base, as `schemas/integrity.md` describes it. Never knows what
//! lies on it (an lvstore, mostly) nor JSON-RPC. The target's methods call it.
//!
//! **Detected**: a block that is not what was last written to it: bit rot, a write that went elsewhere,
//! a write that was lost. Who reads it gets [`bdev::IoError::ReadMedium`], and who writes a part of it; a write of
//! the whole block mends it.
//!
//! **I/O model**: a write changes a block and its checksum, which cannot be done in one step. So a region
//! of 1008 blocks is marked dirty on the medium, durably, before the first write to it, and its checksums
//! stay in memory. When nothing was written to it for some seconds they are written, made durable together
//! with the data, and the region is marked clean. After a crash the checksums of dirty regions are made anew of
//! what is there; those of all others are as they were. So a flush costs nothing more than it did, nor
//! does a write but for the first to a region; but what went bad in a dirty region before a crash is not
//! seen.
//!
//! **Threads**: channels, on reactors, find checksums in a table of atomics, with no lock; what is not
//! there, or not writable, they ask the keeper for, a thread that may block.
//!
//! | file | noun |
//! | --- | --- |
//! | `layout` | zones and regions: where things are |
//! | `format` | superblock, map, page of checksums, on the medium |
//! | `table`, `page` | what channels and keeper share |
//! | `channel`, `part`, `polling` | the data path: read it from top to bottom |
//! | `keeper`, `states`, `cleaning`, `filling` | the thread that keeps checksums |
//! | `medium` | the base as the keeper uses it |
//! | `disk` | [`Integrity`]: the bdev; `sparse`: what its base has nothing of |
//! | `error` | why one is not made, loaded, grown or deleted |

#![forbid(unsafe_code)]

mod channel;
mod disk;
mod error;
pub mod format;
mod keeper;
mod layout;
mod medium;
mod table;

pub use disk::{Counted, Integrity, PRODUCT, probe};
pub use error::Error;

#[cfg(test)]
mod tests;
