//! What a device with protection information says of it, and what an I/O that brings or wants some has
//! beside its data (SBC-4 4.22). The tuples themselves are of the crate `protection`.

use crate::{Features, Geometry, Io, IoError};
use guestmem::Sg;
use std::collections::VecDeque;

/// Bytes of the protection information of a block: guard, application tag, reference tag.
pub const TUPLE_LEN: usize = 8;

/// The tuple of a block that nobody wrote.
const UNWRITTEN: [u8; TUPLE_LEN] = [0xFF; TUPLE_LEN];

/// What the tags of a device's tuples mean (SBC-4 4.22.2).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ProtectionType {
    /// The reference tag is the lower half of the block's number.
    Type1,
    /// The reference tag is of whoever writes the block.
    Type3,
}

/// The protection information that a device's blocks have, and how the device shows it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Protection {
    /// What the tags mean.
    pub kind: ProtectionType,
    /// SPDK's `md_interleave`: a tuple lies behind the data of its block.
    pub interleaved: bool,
    /// SPDK's `dif_is_head_of_md`: a tuple comes first in the metadata, which has nothing but it here.
    pub at_head: bool,
}

/// What is compared of a tuple.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Checks {
    /// The guard with the block's data.
    pub guard: bool,
    /// The application tag with this one, of any block; [`Protected::tags`] has those of several.
    pub app_tag: Option<u16>,
    /// The reference tag with the block's number, where the type has it so.
    pub reference: bool,
}

impl Checks {
    /// What a device finds out by itself.
    pub const ALL: Checks = Checks { guard: true, app_tag: None, reference: true };
    /// Nothing.
    pub const NONE: Checks = Checks { guard: false, app_tag: None, reference: false };
}

/// Runs of blocks with one application tag each of which an I/O can say it.
pub const TAG_RUNS: usize = 4;

/// The application tags that the blocks of an I/O are to have: a tag and how many blocks have it, from the first
/// block on. Of blocks behind the last run it is not known.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct AppTags([(u16, u32); TAG_RUNS]);

impl AppTags {
    /// It is not known of any.
    pub const NONE: AppTags = AppTags([(0, 0); TAG_RUNS]);

    /// Of runs, [`TAG_RUNS`] at most; those without blocks are left out.
    pub fn new(runs: impl IntoIterator<Item = (u16, u64)>) -> AppTags {
        let mut tags = AppTags::NONE;
        let runs = runs.into_iter().filter(|(_, blocks)| *blocks > 0);
        for (to, (tag, blocks)) in tags.0.iter_mut().zip(runs) {
            *to = (tag, u32::try_from(blocks).unwrap_or(u32::MAX));
        }
        tags
    }

    /// Whether it is not known of any block.
    pub fn is_none(&self) -> bool {
        self.0[0].1 == 0
    }

    /// That of the `nth` block.
    #[inline]
    pub fn of(&self, nth: u64) -> Option<u16> {
        let mut end = 0;
        for (tag, blocks) in self.0 {
            if blocks == 0 {
                return None;
            }
            end += u64::from(blocks);
            if nth < end {
                return Some(tag);
            }
        }
        None
    }

    /// Those from block `blocks` on.
    #[must_use]
    fn further(&self, blocks: u64) -> AppTags {
        let mut skipped = blocks;
        AppTags::new(self.0.into_iter().map(|(tag, count)| {
            let gone = skipped.min(count.into());
            skipped -= gone;
            (tag, u64::from(count) - gone)
        }))
    }
}

/// Where the tuples of an I/O are.
#[derive(Clone, Copy, Debug)]
pub enum Tuples {
    /// Nowhere: the device makes those of a write, and keeps those of a read for itself.
    None,
    /// In a list of their own, one after the other; that of the first block comes after so many others.
    Apart(Sg, u64),
    /// Each behind its block, in the list of the data.
    Behind,
    /// Of a write: this one is every block's; with type 1 the block's number, as its reference tag has it,
    /// is added to its reference tag.
    Like([u8; TUPLE_LEN]),
}

/// What an I/O has beside its data.
#[derive(Clone, Copy, Debug)]
pub struct Protected {
    /// The tuples.
    pub tuples: Tuples,
    /// What is checked of them, before anything is written, or given to whoever reads.
    pub checks: Checks,
    /// The application tags that its blocks are to have: what those of tuples are compared with, and what the device
    /// gives the tuples that it makes, also of [`Tuples::Like`] one that is to be checked.
    pub tags: AppTags,
    /// The lower half of the number that the first block has for whoever submits the I/O: what the
    /// reference tags of its tuples count from, with type 1. The device moves them to its own numbers and
    /// back, so that a wrong one stays as wrong as it is. `None`: the device's number.
    pub first: Option<u32>,
}

impl Protected {
    /// An I/O without tuples of its own.
    pub const PLAIN: Protected = Protected::new(Tuples::None, Checks::ALL);

    /// One with tuples that have the device's own block numbers.
    pub const fn new(tuples: Tuples, checks: Checks) -> Protected {
        Protected { tuples, checks, tags: AppTags::NONE, first: None }
    }

    /// The same with these application tags.
    #[must_use]
    pub const fn tagged(self, tags: AppTags) -> Protected {
        Protected { tags, ..self }
    }

    /// What is checked of the `nth` block.
    #[inline]
    pub fn checks_of(&self, nth: u64) -> Checks {
        Checks { app_tag: self.checks.app_tag.or_else(|| self.tags.of(nth)), ..self.checks }
    }

    /// Checks an I/O with it against a device, as [`Io::check`], and its lists, which may be longer than
    /// it takes.
    ///
    /// # Errors
    /// It is over with that.
    pub fn check(&self, io: &Io, geometry: &Geometry, features: &Features) -> Result<(), IoError> {
        match self.tuples {
            Tuples::None | Tuples::Like(_) => io.check(geometry, features),
            Tuples::Behind => {
                let block_size = geometry.block_size + TUPLE_LEN as u32;
                io.check_room(&Geometry { block_size, ..*geometry }, features)
            }
            Tuples::Apart(list, skipped) => {
                io.check_room(geometry, features)?;
                let there = (list.len() / TUPLE_LEN) as u64;
                match skipped.checked_add(io.blocks).is_some_and(|end| end <= there) {
                    true => Ok(()),
                    false => Err(IoError::BadLength),
                }
            }
        }
    }

    /// That of what is `blocks` blocks further in the I/O, which begins at `lba`.
    #[must_use]
    pub fn further(&self, lba: u64, blocks: u64) -> Protected {
        let first = self.first.unwrap_or(lba as u32).wrapping_add(blocks as u32);
        let tuples = match self.tuples {
            Tuples::Apart(list, skipped) => Tuples::Apart(list, skipped + blocks),
            other => other,
        };
        Protected { tuples, tags: self.tags.further(blocks), first: Some(first), ..*self }
    }

    /// Gives whoever reads the tuples of blocks that nobody wrote, by which nothing is checked (SBC-4
    /// 4.22.2): of `blocks` blocks of `block` bytes, from the I/O's block `from` on.
    pub fn give_unwritten(&self, sg: &Sg, from: u64, blocks: u64, block: usize) {
        for nth in from..from + blocks {
            match self.tuples {
                Tuples::None | Tuples::Like(_) => return,
                Tuples::Apart(list, skipped) => {
                    list.copy_from_slice((skipped + nth) as usize * TUPLE_LEN, &UNWRITTEN);
                }
                Tuples::Behind => {
                    let at = nth as usize * (block + TUPLE_LEN) + block;
                    sg.copy_from_slice(at, &UNWRITTEN);
                }
            }
        }
    }

    /// Bytes that a block of `block` bytes has in the list of the data.
    pub fn in_list(&self, block: usize) -> usize {
        match self.tuples {
            Tuples::Behind => block + TUPLE_LEN,
            Tuples::None | Tuples::Apart(..) | Tuples::Like(_) => block,
        }
    }
}

/// I/Os whose mismatch is known until somebody asks.
const MISMATCHES: usize = 64;

/// What [`crate::Channel::mismatch`] tells: tags of I/Os that failed, and which of their blocks was wrong. The
/// oldest goes when there are many; it never allocates after it was made.
pub struct Mismatches(VecDeque<(u64, u64)>);

impl Default for Mismatches {
    fn default() -> Self {
        Mismatches(VecDeque::with_capacity(MISMATCHES))
    }
}

impl Mismatches {
    /// Keeps that of the I/O named `tag`.
    #[cold]
    pub fn keep(&mut self, tag: u64, block: u64) {
        // Nobody asked for that of an earlier one with this name.
        self.take(tag);
        if self.0.len() == MISMATCHES {
            self.0.pop_front();
        }
        self.0.push_back((tag, block));
    }

    /// Tells it, once.
    pub fn take(&mut self, tag: u64) -> Option<u64> {
        let found = self.0.iter().position(|(of, _)| *of == tag)?;
        self.0.remove(found).map(|(_, block)| block)
    }
}

impl IoError {
    /// Whether a block's protection information is what was wrong.
    pub fn is_mismatch(self) -> bool {
        matches!(self, IoError::Guard | IoError::AppTag | IoError::RefTag)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn application_tags_of_what_comes_later_in_an_io_are_those_of_the_same_blocks() {
        let tags = AppTags::new([(1, 0), (7, 3), (8, 1), (9, 2)]);
        let all: Vec<_> = (0..8).map(|nth| tags.of(nth)).collect();
        let known = [7, 7, 7, 8, 9, 9].map(Some);
        assert_eq!(all, [&known[..], &[None; 2]].concat());
        let with = Protected::PLAIN.tagged(tags);
        for gone in 0..8 {
            let further = with.further(100, gone);
            let rest: Vec<_> = (0..8 - gone).map(|nth| further.tags.of(nth)).collect();
            assert_eq!(rest, all[gone as usize..], "{gone}");
            assert_eq!(further.checks_of(0).app_tag, all[gone as usize]);
        }
        assert!(with.further(100, 6).tags.is_none() && AppTags::NONE.is_none() && !tags.is_none());
    }
}
