//! Holes: blocks of which the base says that it has nothing, also where it lies in several zones.
//!
//! A hole is told without its checksum being looked at, as its data is not read either.

use crate::disk::Integrity;
use crate::layout::{PAGE, ZONE_BLOCKS, locate};
use bdev::{Bdev, Run, Sparse};

/// What begins at block `lba`, at most `left` of them: where that is on the base, and how many of them lie there
/// in one piece. `per` blocks are a page.
pub(crate) fn on_base(lba: u64, left: u64, per: u64) -> (u64, u64) {
    let (block, skip) = (lba / per, lba % per);
    let until_end_of_zone = (ZONE_BLOCKS - block % ZONE_BLOCKS) * per - skip;
    (locate(block).page * per + skip, left.min(until_end_of_zone))
}

/// What `found` on the base is of the `most` blocks that lie there in one piece.
pub(crate) fn clipped(found: Run, most: u64) -> Run {
    Run { blocks: found.blocks.min(most), ..found }
}

impl Sparse for Integrity {
    fn run(&self, lba: u64) -> Run {
        let geometry = self.geometry();
        let left = geometry.num_blocks.saturating_sub(lba);
        let (at, most) = on_base(lba, left, PAGE as u64 / u64::from(geometry.block_size));
        match self.base().sparse() {
            Some(sparse) if most > 0 => clipped(sparse.run(at), most),
            _ => Run { hole: false, blocks: most },
        }
    }

    /// With the checksums' own room, which is little.
    fn allocated_bytes(&self) -> u64 {
        let all = self.geometry().bytes();
        self.base().sparse().map_or(all, |sparse| sparse.allocated_bytes().min(all))
    }
}
