//! T10 protection information: eight bytes beside each block of which whoever reads the block finds out
//! that it is not the one that was written (SBC-4 4.22).
//!
//! Owns: the [`Tuple`], its guard, what it is compared with, and the bdev whose blocks have one
//! ([`ProtectedDisk`]), which lies on a bdev in memory or a file. Never knows SCSI or virtio. The target's
//! methods call it.
//!
//! Below, a tuple lies behind the data of its block, with its bits inverted: zeros are a block that was
//! never written, whose tuple is of FFh, by which nothing is checked.
//!
//! Who lies on such a disk and has numbers of its own for the blocks (an lvol) says so with each I/O
//! ([`bdev::Protected::first`]): its tuples are compared with those, and have the disk's own below.
//!
//! | what became of the block | found by |
//! | --- | --- |
//! | its data changed | the guard |
//! | it is another one of the device | the reference tag, with type 1 |
//! | it is one of another user's | the application tag, where that is compared |
//! | it is an older one of its own place | nothing: such a block was right once |
//!
//! | file | noun |
//! | --- | --- |
//! | `tuple` | [`Tuple`], [`Mismatch`] |
//! | `area` | [`Area`]: tuples in an area of their own, for a device whose blocks have no room for them |
//! | `disk` | [`ProtectedDisk`]: the bdev |
//! | `channel` | the data path: read it from top to bottom |
//! | `block` | one block on its way |
//! | `writing` | which blocks are being written |

// Tests make lists of runs.
#![cfg_attr(not(test), forbid(unsafe_code))]

mod area;
mod block;
mod channel;
mod disk;
mod tuple;
mod writing;

pub use area::{Area, Keepers, Late, Layout, Paused};
pub use disk::ProtectedDisk;
pub use tuple::{Mismatch, Tuple, guard};

#[cfg(test)]
mod tests;
