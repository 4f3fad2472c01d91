use std::ops::Range;
use std::sync::Arc;

use super::wrapped::{Wrap, Wrapped};
use crate::{Bdev, Geometry, Malloc, Run, Sparse};

/// What says of some blocks of a disk that they are holes. It has their room all the same.
pub struct Holes {
    geometry: Geometry,
    holes: Box<[Range<u64>]>,
}

impl Holes {
    /// The disk, with these holes, which are in order and apart.
    #[must_use]
    pub fn new(disk: Arc<Malloc>, holes: &[Range<u64>]) -> Arc<Wrapped<Self>> {
        let geometry = disk.geometry();
        Wrapped::new(disk, Holes { geometry, holes: holes.into() })
    }

    /// The run that begins at block `lba` of `end`.
    fn until(&self, lba: u64, end: u64) -> Run {
        let next = self.holes.iter().find(|hole| lba < hole.end);
        let (hole, until) = match next {
            Some(next) if next.contains(&lba) => (true, next.end),
            Some(next) => (false, next.start),
            None => (false, end),
        };
        Run { hole, blocks: until.saturating_sub(lba) }
    }
}

impl Sparse for Holes {
    fn run(&self, lba: u64) -> Run {
        self.until(lba, self.geometry.num_blocks)
    }

    fn allocated_bytes(&self) -> u64 {
        let holes: u64 = self.holes.iter().map(|hole| hole.end - hole.start).sum();
        (self.geometry.num_blocks - holes) * u64::from(self.geometry.block_size)
    }
}

impl Wrap for Holes {
    fn sparse<'a>(&'a self, _: Option<&'a dyn Sparse>) -> Option<&'a dyn Sparse> {
        Some(self)
    }

    fn sparse_run(&self, lba: u64, blocks: u64) -> Option<Run> {
        let found = self.until(lba, lba + blocks);
        Some(Run { blocks: found.blocks.min(blocks), ..found })
    }
}
