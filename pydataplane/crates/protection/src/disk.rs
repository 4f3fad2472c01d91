//! The bdev: blocks with their protection information, on one whose blocks are as long as both.

use crate::channel::ProtectedChannel;
use crate::writing::{Writer, Writing};
use bdev::{
    Bdev, Channel, Features, FlushLatch, Geometry, OpenError, Protection, Stats, TUPLE_LEN,
};
use reactor::IoContext;
use serde_json::Value;
use std::sync::Arc;
use uuid::Uuid;

/// Blocks in which the next place begins where a page does: the best alignment of UNMAP.
const UNMAP_ALIGNMENT: u32 = 512;

/// A bdev with protection information. It has the name and the identity of the one below, which nobody
/// else has, and shows its blocks without their last [`TUPLE_LEN`] bytes.
pub struct ProtectedDisk {
    below: Arc<dyn Bdev>,
    protection: Protection,
    stats: Arc<Stats>,
    writing: Arc<Writing>,
}

impl ProtectedDisk {
    /// On `below`, whose blocks are of 512 or 4096 bytes of data and [`TUPLE_LEN`] more.
    pub fn new(below: Arc<dyn Bdev>, protection: Protection) -> Arc<ProtectedDisk> {
        Arc::new(ProtectedDisk { below, protection, stats: Stats::new(), writing: Arc::default() })
    }

    /// One more that writes.
    #[cfg(test)]
    pub(crate) fn writer(&self) -> Writer {
        Writer::new(&self.writing)
    }
}

impl Bdev for ProtectedDisk {
    fn name(&self) -> &str {
        self.below.name()
    }

    fn aliases(&self) -> Vec<String> {
        self.below.aliases()
    }

    fn uuid(&self) -> Uuid {
        self.below.uuid()
    }

    fn product_name(&self) -> &'static str {
        self.below.product_name()
    }

    fn geometry(&self) -> Geometry {
        let below = self.below.geometry();
        let block_size = below.block_size - TUPLE_LEN as u32;
        Geometry { block_size, physical_block_size: block_size, ..below }
    }

    fn features(&self) -> Features {
        let below = self.below.features();
        let unmap_granularity = if below.unmap { UNMAP_ALIGNMENT } else { 0 };
        Features { unmap_granularity, ..below }
    }

    fn open(&self, io: &IoContext) -> Result<Box<dyn Channel>, OpenError> {
        let below = (self.below.open(io)?, self.below.clone());
        let kind = self.protection.kind;
        Ok(Box::new(ProtectedChannel::new(
            below,
            kind,
            &self.stats,
            Writer::new(&self.writing),
            io.waker(),
        )))
    }

    fn driver_specific(&self) -> Value {
        self.below.driver_specific()
    }

    fn stats(&self) -> Option<&Arc<Stats>> {
        Some(&self.stats)
    }

    fn flush_latch(&self) -> Option<&FlushLatch> {
        self.below.flush_latch()
    }

    fn protection(&self) -> Option<Protection> {
        Some(self.protection)
    }

    fn bare(&self) -> Option<Arc<dyn Bdev>> {
        Some(self.below.clone())
    }
}
