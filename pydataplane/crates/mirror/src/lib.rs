//! Copying a bdev to another while it is written to.
//!
//! Owns: [`Mirror`], a bdev that reads from its source and writes to its source and, where that was copied
//! already, to its destination; and the copying itself ([`Mirror::run`]). Never knows SCSI, vhost or lvols.
//! The target's methods put one between a logical unit and its volume, and later the destination in its
//! place (pivot) or the source again (abort).
//!
//! ```text
//!   unit's channel ── read ───────────────> source
//!        │                                    │ read
//!        └─ write, UNMAP, WRITE ZEROES ─┬─> source     copier, on a thread of its own
//!                                       └─> destination <─┘ write
//! ```
//!
//! # Order of the unit's writes and of the copying
//! The source is cut into chunks. Each has a word that all threads share: whether it is to be copied, is
//! being copied, or is copied; how many writes of the unit are in flight on it; whether any was.
//! - A write to chunks of which none is copied goes to the source alone: the copier reads it there.
//! - A write that touches a chunk that is copied goes to both, and is complete when both are done.
//! - A write that touches a chunk that is being copied waits in its channel until that is copied, for as
//!   long as a few chunks take.
//! - The copier first says that it copies a chunk, so that no further write begins on it, then waits for
//!   those in flight, then reads and writes.
//!
//! So no older data overtakes a write on its way to the destination. Two writes of one channel to the same
//! blocks go to both disks in the same order, too: the second begins when the first has ended.
//!
//! UNMAP and WRITE ZEROES are writes. An UNMAP that goes to both is one that leaves zeros on both: one that the source may
//! carry out in part, as a volume does with parts of clusters, is WRITE ZEROES to it. FLUSH goes to both once all is copied ([`Phase::Ready`]); before that
//! nothing on the destination can count, and afterwards both have the same, also after a power cut.
//!
//! # Memory
//! What goes to the destination is copied from the guest's memory first, as bounded pieces of the
//! channel's own: a destination that does not answer keeps nothing of the guest's.
//!
//! # Errors
//! An error of the source is that of the I/O. One of the destination, a read of the copier's that fails, or
//! an I/O that has no answer for [`HANG`] ends the copy, with one sentence ([`Phase::Failed`]): writes that
//! wait for the destination are complete as their source says, and from then on all go to the source
//! alone. The guest's I/O never fails because of a copy.
//!
//! What a write that the source fails has changed is not known, nor whether it is the same on both. So the chunks of one
//! that went to both are copied again, and the copy is not ready until they are.
//!
//! # Protection information
//! Tuples of the source's blocks are copied as they are, unchecked, to a destination that has some of the same type:
//! what is wrong stays as wrong. Those that the unit brings go to both, and both check them as it asks. What the
//! destination does not take, as it is wrong, is no error of the copy where the source does not take it either, though
//! each may have written another part of it before; it is one where the source took it.
//!
//! # Zeros
//! Parts that a [`Map`] of the source says nothing was written to are not read, and what reads as zeros is
//! not written where the destination is thin, but unmapped, unless its own map says that it has nothing
//! there.
//!
//! # After a crash
//! Nothing of a copy is recorded: the source has every write, and the destination counts for nothing before
//! the pivot was. Whoever pivots stops the unit's I/O, calls [`Mirror::seal`], records that the unit is on
//! the destination, and only then has it go on there; what was recorded is right at each moment, as both
//! are equal meanwhile.
//!
//! | file | noun |
//! | --- | --- |
//! | `chunks` | [`chunks::Chunks`]: the words |
//! | `shared` | what channels and copier share: phase, failure, who is to be woken |
//! | `map` | [`Map`]: where there may be data |
//! | `disk` | [`Mirror`]: the bdev |
//! | `channel` | the unit's data path |
//! | `pieces` | memory for what goes to the destination; the only `unsafe` |
//! | `copier` | the copying |

#![deny(unsafe_code)]

mod channel;
mod chunks;
mod copier;
mod disk;
mod map;
mod pieces;
mod shared;

pub use copier::HANG;
pub use disk::{Mirror, MirrorError, Options};
pub use map::{Map, MapPage};
pub use shared::{Phase, Progress};

#[cfg(test)]
mod tests;
