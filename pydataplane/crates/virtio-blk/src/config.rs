//! Feature bits and the configuration space (virtio 1.2, 5.2.3 and 5.2.4).

use zerocopy::little_endian::{U16, U32, U64};
use zerocopy::{Immutable, IntoBytes, KnownLayout, Unaligned};

use crate::SECTOR;
use crate::request::{MAX_DISCARD_BYTES, MAX_WRITE_ZEROES_BYTES};

/// Feature bit: a segment has at most `size_max` bytes.
pub const F_SIZE_MAX: u64 = 1 << 1;
/// Feature bit: a request has at most `seg_max` segments.
pub const F_SEG_MAX: u64 = 1 << 2;
/// Feature bit: the disk is read-only.
pub const F_RO: u64 = 1 << 5;
/// Feature bit: `blk_size` is there.
pub const F_BLK_SIZE: u64 = 1 << 6;
/// Feature bit: the flush command is there; without it every write is durable when it ends (5.2.6.2).
pub const F_FLUSH: u64 = 1 << 9;
/// Feature bit: `topology` is there.
pub const F_TOPOLOGY: u64 = 1 << 10;
/// Feature bit: more than one request queue.
pub const F_MQ: u64 = 1 << 12;
/// Feature bit: the discard command.
pub const F_DISCARD: u64 = 1 << 13;
/// Feature bit: the write zeroes command.
pub const F_WRITE_ZEROES: u64 = 1 << 14;

/// All feature bits of 5.2.3 that any disk of ours offers.
pub const KNOWN_FEATURES: u64 = F_SIZE_MAX
    | F_SEG_MAX
    | F_RO
    | F_BLK_SIZE
    | F_FLUSH
    | F_TOPOLOGY
    | F_MQ
    | F_DISCARD
    | F_WRITE_ZEROES;

/// Data segments of one request, at most (`seg_max`).
const SEG_MAX: u32 = 126;
/// Bytes of a segment, at most (`size_max`): with all of them a request has less than 4 MiB.
const SIZE_MAX: u32 = 32 << 10;

/// A disk, as far as a driver is told of it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Disk {
    /// Its size in sectors; what does not fill a block is left out.
    pub sectors: u64,
    /// Bytes of a logical block: 512 or 4096.
    pub block_size: u32,
    /// log2 of how many logical blocks a physical one has.
    pub physical_exponent: u8,
    /// Writes are refused.
    pub read_only: bool,
    /// Blocks can be deallocated.
    pub discard: bool,
    /// Best alignment and length for that, in logical blocks; 0: any.
    pub discard_granularity: u32,
    /// Blocks can be made zero without data.
    pub write_zeroes: bool,
    /// What is deallocated reads as zeros.
    pub unmap_zeroes: bool,
    /// Best length of long requests, in logical blocks; 0: none.
    pub optimal_blocks: u32,
    /// Bytes of data of the longest request, at least one block.
    pub max_transfer: u32,
}

/// `struct virtio_blk_config` up to the fields for secure erase (5.2.4).
#[derive(Clone, Copy, Debug, IntoBytes, Immutable, KnownLayout, Unaligned)]
#[repr(C)]
pub struct Config {
    /// Sectors.
    pub capacity: U64,
    /// Bytes of a segment.
    pub size_max: U32,
    /// Segments of a request.
    pub seg_max: U32,
    /// Cylinders, heads, sectors: of no disk of today.
    pub geometry: [u8; 4],
    /// Bytes of a logical block.
    pub blk_size: U32,
    /// log2 of logical blocks in a physical one.
    pub physical_block_exp: u8,
    /// Offset of the first aligned logical block.
    pub alignment_offset: u8,
    /// Best smallest I/O, in logical blocks.
    pub min_io_size: U16,
    /// Best largest I/O, in logical blocks; 0: not told.
    pub opt_io_size: U32,
    /// Write-back (1); no driver may change it.
    pub writeback: u8,
    /// Unused.
    pub unused0: u8,
    /// Request queues.
    pub num_queues: U16,
    /// Sectors of a discard.
    pub max_discard_sectors: U32,
    /// Segments of a discard.
    pub max_discard_seg: U32,
    /// Alignment of a discard, in sectors.
    pub discard_sector_alignment: U32,
    /// Sectors of a write zeroes.
    pub max_write_zeroes_sectors: U32,
    /// Segments of a write zeroes.
    pub max_write_zeroes_seg: U32,
    /// Whether a write zeroes may deallocate.
    pub write_zeroes_may_unmap: u8,
    /// Unused.
    pub unused1: [u8; 3],
}
const _: () = assert!(size_of::<Config>() == 60);

/// Bytes that GET_CONFIG may reach: SPDK's initiator reads 256 whatever the device.
const CONFIG_SPACE: usize = 256;

impl Disk {
    /// The feature bits of 5.2.3 that it offers.
    pub fn features(&self) -> u64 {
        let bit = |is: bool, bit: u64| if is { bit } else { 0 };
        let always = F_SIZE_MAX | F_SEG_MAX | F_BLK_SIZE | F_FLUSH | F_TOPOLOGY | F_MQ;
        always
            | bit(self.read_only, F_RO)
            | bit(self.discard && !self.read_only, F_DISCARD)
            | bit(self.write_zeroes && !self.read_only, F_WRITE_ZEROES)
    }

    /// Its configuration space, with `queues` request queues.
    pub fn config(&self, queues: u16) -> Config {
        let block_sectors = (u64::from(self.block_size) / SECTOR) as u32;
        let size_max = self.max_transfer.min(SIZE_MAX);
        let features = self.features();
        let (discard, zeroes) = (features & F_DISCARD != 0, features & F_WRITE_ZEROES != 0);
        let sectors = |is: bool, bytes: u64| if is { (bytes / SECTOR) as u32 } else { 0 };
        Config {
            capacity: self.sectors.into(),
            size_max: size_max.into(),
            seg_max: (self.max_transfer / size_max.max(1)).clamp(1, SEG_MAX).into(),
            geometry: [0; 4],
            blk_size: self.block_size.into(),
            physical_block_exp: self.physical_exponent,
            alignment_offset: 0,
            min_io_size: (1u16 << self.physical_exponent.min(15)).into(),
            opt_io_size: self.optimal_blocks.into(),
            writeback: 1,
            unused0: 0,
            num_queues: queues.into(),
            max_discard_sectors: sectors(discard, MAX_DISCARD_BYTES).into(),
            max_discard_seg: u32::from(discard).into(),
            discard_sector_alignment: match discard {
                true => self.discard_granularity.max(1).saturating_mul(block_sectors),
                false => 0,
            }
            .into(),
            max_write_zeroes_sectors: sectors(zeroes, MAX_WRITE_ZEROES_BYTES).into(),
            max_write_zeroes_seg: u32::from(zeroes).into(),
            write_zeroes_may_unmap: (zeroes && self.discard && self.unmap_zeroes).into(),
            unused1: [0; 3],
        }
    }
}

impl Config {
    /// `size` bytes from `offset`, zeros beyond the structure; `None` beyond 256 bytes.
    pub fn read(&self, offset: usize, size: usize) -> Option<Vec<u8>> {
        let mut space = [0u8; CONFIG_SPACE];
        space[..size_of::<Config>()].copy_from_slice(self.as_bytes());
        space.get(offset..offset.checked_add(size)?).map(<[u8]>::to_vec)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const DISK: Disk = Disk {
        sectors: 0x1_0000_0008,
        block_size: 4096,
        physical_exponent: 2,
        read_only: false,
        discard: true,
        discard_granularity: 256,
        write_zeroes: true,
        unmap_zeroes: true,
        optimal_blocks: 8192,
        max_transfer: 4 << 20,
    };

    fn word(bytes: &[u8], at: usize) -> u32 {
        u32::from_le_bytes(bytes[at..at + 4].try_into().unwrap())
    }

    #[test]
    fn each_field_is_where_the_standard_has_it() {
        let bytes = DISK.config(64).read(0, 60).unwrap();
        assert_eq!(u64::from_le_bytes(bytes[..8].try_into().unwrap()), 0x1_0000_0008);
        let words: Vec<u32> = [8, 12, 20, 28, 36, 40, 44, 48, 52].map(|at| word(&bytes, at)).into();
        assert_eq!(words, [32 << 10, 126, 4096, 8192, 1 << 20, 1, 2048, 1 << 17, 1]);
        assert_eq!((bytes[24], bytes[32], bytes[34], bytes[56]), (2, 1, 64, 1));
        assert_eq!(bytes[26..28], [4, 0]);
    }

    #[test]
    fn the_longest_request_that_a_driver_may_make_is_no_longer_than_the_disk_takes() {
        for max_transfer in [512, 4096, 32 << 10, 100 << 10, 1 << 20, 4 << 20] {
            let config = Disk { max_transfer, ..DISK }.config(1);
            let longest = config.size_max.get() * config.seg_max.get();
            assert!((1..=max_transfer).contains(&longest), "{longest} of {max_transfer}");
        }
    }

    #[test]
    fn what_a_disk_cannot_do_is_not_offered() {
        let all = F_SIZE_MAX | F_SEG_MAX | F_BLK_SIZE | F_FLUSH | F_TOPOLOGY | F_MQ;
        assert_eq!(DISK.features(), all | F_DISCARD | F_WRITE_ZEROES);
        let read_only = Disk { read_only: true, ..DISK };
        assert_eq!(read_only.features(), all | F_RO);
        let plain = Disk { discard: false, write_zeroes: false, ..DISK };
        assert_eq!(plain.features(), all);
        for disk in [read_only, plain] {
            let bytes = disk.config(1).read(36, 21).unwrap();
            assert_eq!(bytes, [0; 21], "{disk:?}");
        }
        assert_eq!(DISK.features() & !KNOWN_FEATURES, 0);
        let thin = Disk { unmap_zeroes: false, ..DISK };
        assert_eq!(thin.config(1).write_zeroes_may_unmap, 0);
    }

    #[test]
    fn config_is_read_at_any_offset_and_size_up_to_256_bytes() {
        let config = DISK.config(1);
        for offset in 0..=CONFIG_SPACE {
            for size in 0..=CONFIG_SPACE - offset {
                assert_eq!(config.read(offset, size).map(|b| b.len()), Some(size));
            }
        }
        assert_eq!(config.read(60, 36).unwrap(), [0; 36]);
        assert_eq!(config.read(0, 257), None);
        assert_eq!(config.read(usize::MAX, 2), None);
    }
}
