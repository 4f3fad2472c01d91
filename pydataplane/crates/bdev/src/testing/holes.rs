use std::ops::Range;
use std::sync::Arc;

use reactor::IoContext;
use serde_json::Value;
use uuid::Uuid;

use crate::{
    Bdev, Channel, Completion, Features, Geometry, Io, Malloc, OpenError, Run, Sparse, Submit,
};

/// A disk in memory that says of some of its blocks that they are holes. It has their room all the same.
pub struct Holes {
    disk: Arc<Malloc>,
    holes: Arc<[Range<u64>]>,
}

/// The run that begins at block `lba` of `end`.
fn run(holes: &[Range<u64>], lba: u64, end: u64) -> Run {
    let next = holes.iter().find(|hole| lba < hole.end);
    let (hole, until) = match next {
        Some(next) if next.contains(&lba) => (true, next.end),
        Some(next) => (false, next.start),
        None => (false, end),
    };
    Run { hole, blocks: until.saturating_sub(lba) }
}

/// The disk's own, which knows the holes.
struct HolesChannel {
    disk: Box<dyn Channel>,
    holes: Arc<[Range<u64>]>,
}

impl Channel for HolesChannel {
    fn submit(&mut self, io: &Io) -> Submit {
        self.disk.submit(io)
    }

    fn poll(&mut self, done: &mut Vec<Completion>) -> u32 {
        self.disk.poll(done)
    }

    fn sparse_run(&mut self, lba: u64, blocks: u64) -> Run {
        let found = run(&self.holes, lba, lba + blocks);
        Run { blocks: found.blocks.min(blocks), ..found }
    }
}

impl Holes {
    /// The disk, with these holes, which are in order and apart.
    #[must_use]
    pub fn new(disk: Arc<Malloc>, holes: &[Range<u64>]) -> Arc<Self> {
        Arc::new(Holes { disk, holes: holes.into() })
    }
}

impl Sparse for Holes {
    fn run(&self, lba: u64) -> Run {
        run(&self.holes, lba, self.disk.geometry().num_blocks)
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
        let disk = self.disk.open(io)?;
        Ok(Box::new(HolesChannel { disk, holes: self.holes.clone() }))
    }

    fn driver_specific(&self) -> Value {
        self.disk.driver_specific()
    }

    fn sparse(&self) -> Option<&dyn Sparse> {
        Some(self)
    }
}
