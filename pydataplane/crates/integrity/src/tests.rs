//! What is promised, on the device for tests.

mod crash;
mod damage;
mod data;
mod holes;
mod silent;

use crate::disk::{How, Integrity};
use crate::keeper::Times;
use crate::layout::{PAGE, REGION_BLOCKS, locate};
use bdev::testing::FaultBdev;
use bdev::{AlignedBuf, Registry, SyncChannel};
use std::sync::Arc;
use std::time::Duration;

/// Cleans only when it is told to.
const BY_HAND: How = How { pages: 8, times: Times { turn: Duration::from_secs(3600), quiet: 1 } };

/// Blocks of data that a base of the tests has: three regions and a bit.
const BLOCKS: u64 = 3 * REGION_BLOCKS as u64 + 40;

/// A base in a registry.
struct Host {
    registry: Registry,
    base: Arc<FaultBdev>,
}

impl Host {
    fn new(block_size: u32) -> Host {
        let pages = crate::layout::HEAD + BLOCKS;
        let blocks = pages * PAGE as u64 / u64::from(block_size);
        Host::on(FaultBdev::new("base", block_size, blocks))
    }

    fn on(base: Arc<FaultBdev>) -> Host {
        let registry = Registry::new();
        registry.register(base.clone()).unwrap();
        Host { registry, base }
    }

    fn create(&self) -> Arc<Integrity> {
        Integrity::create_as(&self.registry, "sums", "base", BY_HAND).unwrap()
    }

    fn load(&self) -> Arc<Integrity> {
        Integrity::load_as(&self.registry, "base", BY_HAND).unwrap().expect("it is there")
    }

    /// Bytes of block `block` of the data, on the base.
    fn at(block: u64) -> usize {
        locate(block).page as usize * PAGE
    }
}

/// `blocks` blocks of [`PAGE`] bytes that tell `seed`.
fn pattern(blocks: usize, seed: u64) -> AlignedBuf {
    let mut buf = AlignedBuf::zeroed(blocks * PAGE);
    for (nth, word) in buf.chunks_exact_mut(8).enumerate() {
        let value = (nth as u64 ^ seed << 32).wrapping_mul(0x9e37_79b9_7f4a_7c15);
        word.copy_from_slice(&value.to_le_bytes());
    }
    buf
}

/// A queue pair that counts in blocks of [`PAGE`] bytes.
struct Pages {
    channel: SyncChannel,
    per: u64,
}

impl Pages {
    fn open(disk: &Integrity) -> Pages {
        let channel = SyncChannel::open(disk).unwrap();
        let per = PAGE as u64 / u64::from(channel.block_size());
        Pages { channel, per }
    }

    fn write(&mut self, block: u64, data: &[u8]) -> Result<(), bdev::IoError> {
        self.channel.write(block * self.per, data).map_err(|e| e.cause)
    }

    fn read(&mut self, block: u64, blocks: usize) -> Result<AlignedBuf, bdev::IoError> {
        let mut buf = AlignedBuf::zeroed(blocks * PAGE);
        self.channel.read(block * self.per, &mut buf).map_err(|e| e.cause)?;
        Ok(buf)
    }

    fn is(&mut self, block: u64, data: &[u8]) {
        let found = self.read(block, data.len() / PAGE).unwrap();
        assert!(found[..] == data[..], "block {block} is not what was written");
    }
}
