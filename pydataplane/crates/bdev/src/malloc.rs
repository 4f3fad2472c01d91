//! `malloc`: a disk in memory. Every I/O is over within `submit`.

use std::sync::Arc;

use reactor::IoContext;
use serde_json::{Value, json};
use uuid::Uuid;

use crate::ram::Ram;
use crate::{
    Bdev, Channel, ChannelStats, Completion, Features, Geometry, Io, IoError, Op, OpenError, Stats,
    Submit,
};

/// What `bdev_malloc_create` asks for.
#[derive(Clone, Debug)]
pub struct MallocOptions {
    /// Name of the device.
    pub name: String,
    /// Bytes of a logical block: 512 or 4096.
    pub block_size: u32,
    /// Bytes of a physical block, a power-of-two multiple of `block_size`; 0: as `block_size`.
    pub physical_block_size: u32,
    /// Logical blocks.
    pub num_blocks: u64,
    /// Identity; `None`: a random one.
    pub uuid: Option<Uuid>,
}

/// A disk in memory.
pub struct Malloc {
    name: String,
    uuid: Uuid,
    geometry: Geometry,
    ram: Arc<Ram>,
    stats: Arc<Stats>,
}

const FEATURES: Features = Features {
    read_only: false,
    volatile_cache: false,
    fua: true,
    unmap: true,
    unmap_zeroes: true,
    write_zeroes: true,
    thin: true,
    unmap_granularity: 1,
    max_blocks: 0,
};

impl Malloc {
    /// A device of zeros; memory is taken when blocks are first written.
    ///
    /// # Errors
    /// A block size that is not 512 or 4096, no blocks, or more than can be mapped.
    pub fn create(options: MallocOptions) -> Result<Arc<Self>, OpenError> {
        let MallocOptions { name, block_size, physical_block_size, num_blocks, uuid } = options;
        let fail = |why: String| OpenError { name: name.clone(), why };
        let geometry =
            Geometry::checked(block_size, physical_block_size, num_blocks).map_err(&fail)?;
        let bytes = num_blocks
            .checked_mul(u64::from(block_size))
            .and_then(|b| usize::try_from(b).ok())
            .ok_or_else(|| fail(format!("{num_blocks} blocks are more than can be addressed")))?;
        let ram = Ram::new(bytes)
            .map_err(|e| fail(format!("{bytes} bytes of memory cannot be mapped: {e}")))?;
        Ok(Arc::new(Malloc {
            uuid: uuid.unwrap_or_else(Uuid::new_v4),
            geometry,
            ram: Arc::new(ram),
            stats: Stats::new(),
            name,
        }))
    }
}

impl Bdev for Malloc {
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
        "Malloc disk"
    }
    fn geometry(&self) -> Geometry {
        self.geometry
    }
    fn features(&self) -> Features {
        FEATURES
    }
    fn open(&self, _io: &IoContext) -> Result<Box<dyn Channel>, OpenError> {
        Ok(Box::new(MallocChannel {
            ram: self.ram.clone(),
            geometry: self.geometry,
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

struct MallocChannel {
    ram: Arc<Ram>,
    geometry: Geometry,
    stats: ChannelStats,
}

impl MallocChannel {
    #[inline]
    fn run(&self, io: &Io) -> Result<(), IoError> {
        io.check(&self.geometry, &FEATURES)?;
        let block = self.geometry.block_size as usize;
        let offset = io.lba as usize * block;
        match io.op {
            Op::Read => self.ram.read(offset, &io.sg),
            Op::Write => self.ram.write(offset, &io.sg),
            Op::Unmap | Op::WriteZeroes => self.ram.zero(offset, io.blocks as usize * block),
            Op::Flush => {}
        }
        Ok(())
    }
}

impl Channel for MallocChannel {
    fn submit(&mut self, io: &Io) -> Submit {
        let begun = self.stats.begin();
        let result = self.run(io);
        self.stats.end(io, self.geometry.block_size, begun, result);
        Submit::Done(result)
    }
    fn poll(&mut self, _done: &mut Vec<Completion>) -> u32 {
        0
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::SyncChannel;
    use crate::testing::model;

    fn disk(block_size: u32, num_blocks: u64) -> Arc<Malloc> {
        let name = "m0".to_owned();
        let o = MallocOptions { name, block_size, physical_block_size: 0, num_blocks, uuid: None };
        Malloc::create(o).unwrap()
    }

    #[test]
    fn refuses_odd_geometry_in_one_sentence() {
        let o = |block_size, num_blocks| MallocOptions {
            name: "m0".into(),
            block_size,
            physical_block_size: 0,
            num_blocks,
            uuid: None,
        };
        let text = |o| Malloc::create(o).err().unwrap().to_string();
        assert_eq!(text(o(520, 8)), "cannot open m0: a block is 512 or 4096 bytes, not 520");
        assert_eq!(text(o(512, 0)), "cannot open m0: it would have no blocks");
        assert!(text(o(4096, u64::MAX / 2)).contains("more than can be addressed"));
    }

    #[test]
    fn checks_range_and_length() {
        let d = disk(512, 8);
        let mut c = SyncChannel::open(&*d).unwrap();
        let mut buf = crate::AlignedBuf::zeroed(1024);
        assert_eq!(c.read(7, &mut buf).unwrap_err().cause, IoError::OutOfRange);
        assert_eq!(c.write(u64::MAX, &buf).unwrap_err().cause, IoError::OutOfRange);
        assert_eq!(c.unmap(8, 1).unwrap_err().cause, IoError::OutOfRange);
        assert!(c.unmap(8, 0).is_ok());
        assert!(c.write_zeroes(0, 8).is_ok());
        assert_eq!(d.stats().unwrap().snapshot().errors_of(IoError::OutOfRange), 3);
    }

    #[test]
    fn large_ranges_read_as_zeros_after_unmap() {
        let blocks = (16 << 20) / 4096;
        let d = disk(4096, blocks);
        let mut c = SyncChannel::open(&*d).unwrap();
        let mut buf = crate::AlignedBuf::zeroed(16 << 20);
        buf.fill(0xa5);
        c.write(0, &buf).unwrap();
        c.unmap(3, blocks - 5).unwrap();
        c.read(0, &mut buf).unwrap();
        let (a, b) = (3 * 4096, buf.len() - 2 * 4096);
        assert!(buf[..a].iter().all(|x| *x == 0xa5));
        assert!(buf[a..b].iter().all(|x| *x == 0));
        assert!(buf[b..].iter().all(|x| *x == 0xa5));
    }

    #[test]
    fn behaves_as_a_byte_array() {
        for block in [512, 4096] {
            model::check(|blocks| disk(block, blocks));
        }
    }

    #[test]
    fn two_threads_at_once_keep_whole_blocks_apart() {
        let d = disk(512, 64);
        std::thread::scope(|s| {
            for t in 0..2u64 {
                let d = d.clone();
                s.spawn(move || {
                    let mut c = SyncChannel::open(&*d).unwrap();
                    let mut buf = crate::AlignedBuf::zeroed(512);
                    for i in 0..2000u64 {
                        let lba = (i * 2 + t) % 64;
                        buf.fill(i as u8);
                        c.write(lba, &buf).unwrap();
                        buf.fill(0xff);
                        c.read(lba, &mut buf).unwrap();
                        assert!(buf.iter().all(|b| *b == i as u8));
                    }
                });
            }
        });
        assert_eq!(d.stats().unwrap().snapshot().op(Op::Write).ops, 4000);
    }
}
