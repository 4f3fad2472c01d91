//! `null`: takes every write and forgets it, answers every read without touching the buffer.
//! For measuring what lies above it.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};

use reactor::IoContext;
use serde_json::{Value, json};
use uuid::Uuid;

use crate::{
    Bdev, Channel, ChannelStats, Completion, Features, Geometry, Io, OpenError, Stats, Submit,
};

/// A device without a medium, of any size.
pub struct Null {
    name: String,
    uuid: Uuid,
    block_size: u32,
    num_blocks: Arc<AtomicU64>,
    stats: Arc<Stats>,
}

const FEATURES: Features = Features {
    read_only: false,
    volatile_cache: false,
    fua: true,
    unmap: true,
    unmap_zeroes: false,
    unmap_skips: false,
    write_zeroes: true,
    thin: false,
    unmap_granularity: 1,
    optimal_blocks: 0,
    max_blocks: 0,
    boot: None,
    remote: false,
};

impl Null {
    /// A null device; `uuid`: a random one for `None`.
    ///
    /// # Errors
    /// A block size that is not 512 or 4096, or no blocks.
    pub fn create(
        name: &str,
        block_size: u32,
        num_blocks: u64,
        uuid: Option<Uuid>,
    ) -> Result<Arc<Self>, OpenError> {
        Geometry::checked(block_size, 0, num_blocks)
            .map_err(|why| OpenError { name: name.to_owned(), why })?;
        Ok(Arc::new(Null {
            name: name.to_owned(),
            uuid: uuid.unwrap_or_else(Uuid::new_v4),
            block_size,
            num_blocks: Arc::new(AtomicU64::new(num_blocks)),
            stats: Stats::new(),
        }))
    }

    /// Changes the size; the caller tells the registry ([`crate::Registry::notify_resized`]).
    ///
    /// # Errors
    /// No blocks.
    pub fn resize(&self, num_blocks: u64) -> Result<(), OpenError> {
        Geometry::checked(self.block_size, 0, num_blocks)
            .map_err(|why| OpenError { name: self.name.clone(), why })?;
        self.num_blocks.store(num_blocks, Relaxed);
        Ok(())
    }
}

impl Bdev for Null {
    fn name(&self) -> &str {
        &self.name
    }
    fn aliases(&self) -> Vec<String> {
        Vec::new()
    }
    fn uuid(&self) -> Uuid {
        self.uuid
    }
    fn product_name(&self) -> &'static str {
        "Null disk"
    }
    fn geometry(&self) -> Geometry {
        Geometry {
            block_size: self.block_size,
            physical_block_size: self.block_size,
            num_blocks: self.num_blocks.load(Relaxed),
        }
    }
    fn features(&self) -> Features {
        FEATURES
    }
    fn open(&self, _io: &IoContext) -> Result<Box<dyn Channel>, OpenError> {
        Ok(Box::new(NullChannel {
            block_size: self.block_size,
            num_blocks: self.num_blocks.clone(),
            stats: self.stats.channel(),
        }))
    }
    fn driver_specific(&self) -> Value {
        json!({})
    }
    fn stats(&self) -> Option<&Arc<Stats>> {
        Some(&self.stats)
    }
}

struct NullChannel {
    block_size: u32,
    num_blocks: Arc<AtomicU64>,
    stats: ChannelStats,
}

impl Channel for NullChannel {
    fn submit(&mut self, io: &Io) -> Submit {
        let begun = self.stats.begin();
        let geometry = Geometry {
            block_size: self.block_size,
            physical_block_size: self.block_size,
            num_blocks: self.num_blocks.load(Relaxed),
        };
        let result = io.check(&geometry, &FEATURES);
        self.stats.end(io, self.block_size, begun, result);
        Submit::Done(result)
    }
    fn poll(&mut self, _done: &mut Vec<Completion>) -> u32 {
        0
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{AlignedBuf, IoError, SyncChannel};

    #[test]
    fn a_resize_is_seen_by_an_open_channel() {
        let d = Null::create("n0", 4096, 4, None).unwrap();
        let mut c = SyncChannel::open(&*d).unwrap();
        let mut buf = AlignedBuf::zeroed(4096);
        assert_eq!(c.read(4, &mut buf).unwrap_err().cause, IoError::OutOfRange);
        d.resize(5).unwrap();
        c.read(4, &mut buf).unwrap();
        assert_eq!(d.geometry().num_blocks, 5);
        assert!(d.resize(0).is_err());
        assert_eq!(d.geometry().num_blocks, 5);
    }

    #[test]
    fn counts_what_it_takes() {
        let d = Null::create("n0", 512, 1 << 40, None).unwrap();
        let mut c = SyncChannel::open(&*d).unwrap();
        let buf = AlignedBuf::zeroed(1024);
        c.write(0, &buf).unwrap();
        c.write_zeroes(0, 1 << 40).unwrap();
        c.unmap(7, 1).unwrap();
        c.flush().unwrap();
        let s = d.stats().unwrap().snapshot();
        let of = |op| (s.op(op).ops, s.op(op).bytes);
        use crate::Op;
        assert_eq!(of(Op::Write), (1, 1024));
        assert_eq!(of(Op::WriteZeroes), (1, 512 << 40));
        assert_eq!(of(Op::Unmap), (1, 512));
        assert_eq!(of(Op::Flush), (1, 0));
        assert!(s.op(Op::Write).max_ticks > 0, "the first I/O is timed");
    }
}
