use std::ops::Range;
use std::sync::Arc;

use reactor::IoContext;
use serde_json::Value;
use uuid::Uuid;

use crate::{Bdev, Channel, Features, Geometry, Malloc, OpenError, Run, Sparse};

/// A disk in memory that says of some of its blocks that they are holes. It has their room all the same.
pub struct Holes {
    disk: Arc<Malloc>,
    holes: Vec<Range<u64>>,
}

impl Holes {
    /// The disk, with these holes, which are in order and apart.
    #[must_use]
    pub fn new(disk: Arc<Malloc>, holes: &[Range<u64>]) -> Arc<Self> {
        Arc::new(Holes { disk, holes: holes.to_vec() })
    }
}

impl Sparse for Holes {
    fn run(&self, lba: u64) -> Run {
        let end = self.disk.geometry().num_blocks;
        let next = self.holes.iter().find(|hole| lba < hole.end);
        let (hole, until) = match next {
            Some(next) if next.contains(&lba) => (true, next.end),
            Some(next) => (false, next.start),
            None => (false, end),
        };
        Run { hole, blocks: until.saturating_sub(lba) }
    }

    fn allocated_bytes(&self) -> u64 {
        let holes: u64 = self.holes.iter().map(|hole| hole.end - hole.start).sum();
        let geometry = self.disk.geometry();
        (geometry.num_blocks - holes) * u64::from(geometry.block_size)
    }
}

impl Bdev for Holes {
    fn name(&self) -> &str {
        self.disk.name()
    }

    fn aliases(&self) -> Vec<String> {
        self.disk.aliases()
    }

    fn uuid(&self) -> Uuid {
        self.disk.uuid()
    }

    fn product_name(&self) -> &'static str {
        self.disk.product_name()
    }

    fn geometry(&self) -> Geometry {
        self.disk.geometry()
    }

    fn features(&self) -> Features {
        self.disk.features()
    }

    fn open(&self, io: &IoContext) -> Result<Box<dyn Channel>, OpenError> {
        self.disk.open(io)
    }

    fn driver_specific(&self) -> Value {
        self.disk.driver_specific()
    }

    fn sparse(&self) -> Option<&dyn Sparse> {
        Some(self)
    }
}
