//! Holes: blocks of which the base says that it has nothing, also where it lies in several zones.
//!
//! A hole is told without its checksum being looked at, as its data is not read either.

use super::Integrity;
use crate::layout::{PAGE, clipped, on_base};
use bdev::{Bdev, Run, Sparse};

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
