//! What the kernel asks for, in blocks of the bdev.

use bdev::{AlignedBuf, Features, Geometry, Op};
use rustix::io::Errno;

/// I/Os of one export that are with its bdev at a time; more wait with the kernel.
pub const DEPTH: u16 = 64;

/// Longest write that the kernel may send, in bytes.
pub const MAX_IO_BYTES: u32 = 1024 * 1024;

/// Longest read: as many pages as a write of [`MAX_IO_BYTES`] from anywhere in memory touches.
pub(crate) const MAX_READ_BYTES: u32 = MAX_IO_BYTES + PAGE;

/// Bytes of a page, in which FUSE counts.
pub(crate) const PAGE: u32 = 4096;

/// Least that a bdev must take at once, in bytes.
const MIN_IO_BYTES: u64 = 128 * 1024;

/// What a read may need beyond what was asked for, in bytes: a block at each end.
const CUT_BYTES: u64 = 2 * 4096;

/// Longest unmap or write of zeros that is given to a bdev at once, in bytes: one discard of a
/// whole disk must not keep the others waiting.
pub(crate) const MAX_CLEAR_BYTES: u64 = 1 << 30;

/// fallocate(2): the size stays.
const KEEP_SIZE: i32 = 0x01;
/// fallocate(2): deallocate.
const PUNCH_HOLE: i32 = 0x02;
/// fallocate(2): read as zeros.
const ZERO_RANGE: i32 = 0x10;

/// A range of bytes as blocks that cover it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Span {
    /// First block.
    pub lba: u64,
    /// Number of blocks.
    pub blocks: u64,
    /// Bytes of the first block before the range.
    pub skip: usize,
    /// Bytes of the range.
    pub len: usize,
}

impl Span {
    /// What a read of `len` bytes at `offset` covers; `None` at or beyond the end. It need not be
    /// whole blocks, and ends at the end of the device.
    pub fn of_read(g: &Geometry, offset: u64, len: u32) -> Option<Span> {
        let left = g.bytes().checked_sub(offset).filter(|left| *left > 0)?;
        let len = left.min(u64::from(len));
        let block = u64::from(g.block_size);
        let lba = offset / block;
        let blocks = (offset + len).div_ceil(block) - lba;
        // At most MAX_READ_BYTES and less than a block: both fit.
        Some(Span { lba, blocks, skip: (offset % block) as usize, len: len as usize })
    }

    /// Whole blocks within the device, for everything that changes it.
    pub fn exact(g: &Geometry, offset: u64, len: u64) -> Result<Span, Errno> {
        let block = u64::from(g.block_size);
        if !offset.is_multiple_of(block) || !len.is_multiple_of(block) || len == 0 {
            return Err(Errno::INVAL);
        }
        match offset.checked_add(len) {
            Some(end) if end <= g.bytes() => Ok(Span {
                lba: offset / block,
                blocks: len / block,
                skip: 0,
                len: usize::try_from(len).map_err(|_| Errno::INVAL)?,
            }),
            _ => Err(Errno::NOSPC),
        }
    }
}

/// What fallocate with `mode` is to a bdev with `features`.
pub(crate) fn clearing(mode: i32, features: &Features) -> Result<Op, Errno> {
    let op = match mode & !KEEP_SIZE {
        PUNCH_HOLE => features.zeroing().ok_or(Errno::OPNOTSUPP)?,
        ZERO_RANGE if features.write_zeroes => Op::WriteZeroes,
        _ => return Err(Errno::OPNOTSUPP),
    };
    if features.read_only { Err(Errno::ROFS) } else { Ok(op) }
}

/// Longest read for a bdev with these limits, in bytes, a multiple of a page; the error is the least
/// that a bdev must take at once.
pub(crate) fn longest_io(g: &Geometry, features: &Features) -> Result<u32, u64> {
    let most = match features.max_blocks {
        0 => u64::MAX,
        blocks => u64::from(blocks) * u64::from(g.block_size),
    };
    let page = u64::from(PAGE);
    let pages = most.saturating_sub(CUT_BYTES).min(u64::from(MAX_READ_BYTES)) / page;
    match pages * page {
        bytes if bytes >= MIN_IO_BYTES => Ok(bytes as u32),
        _ => Err(MIN_IO_BYTES + CUT_BYTES),
    }
}

/// What the kernel may send at once.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Limits {
    /// Longest write, in bytes.
    pub max_write: u32,
    /// Pages of memory that one request touches at most.
    pub max_pages: u16,
}

impl Limits {
    /// For a bdev that takes `longest` bytes at once and a kernel that has `pages_limit` pages for a
    /// request.
    ///
    /// A write of a memory that does not begin on a page touches one page more than it has bytes
    /// for, and is cut where its pages end: in the midst of a block. So there is always a page to
    /// spare; and a power of two, so that long writes are cut into equal parts.
    pub fn new(longest: u32, pages_limit: u32) -> Limits {
        let pages = (longest / PAGE).min(pages_limit).clamp(2, u32::from(u16::MAX));
        let max_write = (1 << (pages - 1).ilog2()) * PAGE;
        Limits { max_write, max_pages: pages as u16 }
    }
}

/// Pages that the kernel has for a request: `fs.fuse.max_pages_limit` since Linux 6.13, 256 before.
pub(crate) fn pages_limit() -> u32 {
    /// What it is where nobody has changed it.
    const PAGES: u32 = 256;
    let text = std::fs::read_to_string("/proc/sys/fs/fuse/max_pages_limit");
    text.ok().and_then(|text| text.trim().parse().ok()).unwrap_or(PAGES)
}

/// What waits for an I/O.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Wants {
    /// A reader, `len` bytes after the first `skip`.
    Data { skip: usize, len: usize },
    /// A writer of `len` bytes; `durably`: they are still to be flushed.
    Written { len: u32, durably: bool },
    /// fsync or fallocate.
    Done,
}

/// One request of the kernel's, or a part of it.
#[derive(Debug)]
pub(crate) struct Request {
    /// Its name.
    pub unique: u64,
    /// What to do.
    pub op: Op,
    /// First block.
    pub lba: u64,
    /// Number of blocks.
    pub blocks: u64,
    /// Data of a write, room for a read.
    pub buf: Option<AlignedBuf>,
    /// What it is answered with.
    pub wants: Wants,
}

impl Request {
    /// To make durable what was written.
    pub fn flush(unique: u64, wants: Wants) -> Request {
        Request { unique, op: Op::Flush, lba: 0, blocks: 0, buf: None, wants }
    }
}

/// Most blocks of `op` that are given to a bdev at once.
pub(crate) fn longest(op: Op, g: &Geometry, features: &Features) -> u64 {
    match op {
        Op::Unmap | Op::WriteZeroes => {
            let most = MAX_CLEAR_BYTES / u64::from(g.block_size);
            match features.max_blocks {
                0 => most,
                limit => most.min(u64::from(limit)),
            }
        }
        Op::Read | Op::Write | Op::Flush => u64::MAX,
    }
}

/// Buffers, so that an I/O does not allocate; grows to what was in flight at most,
/// [`DEPTH`] kept. The last one that came back is the next one that is taken, so that small
/// I/Os touch few pages.
#[derive(Debug, Default)]
pub(crate) struct Pool(Vec<AlignedBuf>);

impl Pool {
    /// Room for the longest I/O and the blocks that it cuts at both ends.
    pub fn take(&mut self) -> AlignedBuf {
        let bytes = MAX_READ_BYTES as usize + CUT_BYTES as usize;
        self.0.pop().unwrap_or_else(|| AlignedBuf::zeroed(bytes))
    }

    /// Takes one back.
    pub fn put(&mut self, buf: AlignedBuf) {
        if self.0.len() < usize::from(DEPTH) {
            self.0.push(buf);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn geometry(block_size: u32, num_blocks: u64) -> Geometry {
        Geometry { block_size, physical_block_size: block_size, num_blocks }
    }

    #[test]
    fn a_read_is_cut_at_the_end_and_widened_to_blocks() {
        let g = geometry(512, 4);
        let span = |lba, blocks, skip, len| Some(Span { lba, blocks, skip, len });
        assert_eq!(Span::of_read(&g, 0, 512), span(0, 1, 0, 512));
        assert_eq!(Span::of_read(&g, 100, 1000), span(0, 3, 100, 1000));
        assert_eq!(Span::of_read(&g, 1024, 1024), span(2, 2, 0, 1024));
        assert_eq!(Span::of_read(&g, 2000, 4096), span(3, 1, 464, 48));
        assert_eq!(Span::of_read(&g, 2048, 1), None);
        assert_eq!(Span::of_read(&g, u64::MAX, 1), None);
        assert_eq!(Span::of_read(&g, 5, 0), span(0, 1, 5, 0));
    }

    #[test]
    fn a_change_is_of_whole_blocks_within_the_device() {
        let g = geometry(4096, 4);
        let exact = |offset, len| Span::exact(&g, offset, len).map(|s| (s.lba, s.blocks));
        assert_eq!(exact(4096, 8192), Ok((1, 2)));
        assert_eq!(exact(512, 4096), Err(Errno::INVAL));
        assert_eq!(exact(0, 512), Err(Errno::INVAL));
        assert_eq!(exact(0, 0), Err(Errno::INVAL));
        assert_eq!(exact(4096, 16384), Err(Errno::NOSPC));
        assert_eq!(exact(u64::MAX - 4095, 4096), Err(Errno::NOSPC));
    }

    #[test]
    fn holes_read_as_zeros_whatever_the_bdev_can() {
        let unmaps = Features { unmap: true, unmap_zeroes: true, ..Features::default() };
        let both = Features { write_zeroes: true, ..unmaps };
        let vague = Features { unmap_zeroes: false, ..both };
        assert_eq!(clearing(3, &both), Ok(Op::Unmap));
        assert_eq!(clearing(3, &vague), Ok(Op::WriteZeroes));
        assert_eq!(clearing(0x11, &both), Ok(Op::WriteZeroes));
        assert_eq!(clearing(0x11, &unmaps), Err(Errno::OPNOTSUPP));
        assert_eq!(clearing(0, &both), Err(Errno::OPNOTSUPP));
        assert_eq!(clearing(0x08, &both), Err(Errno::OPNOTSUPP));
        assert_eq!(clearing(3, &Features { read_only: true, ..both }), Err(Errno::ROFS));
    }

    #[test]
    fn a_discard_of_a_whole_disk_is_cut() {
        let g = geometry(512, 1 << 40);
        let none = Features::default();
        assert_eq!(longest(Op::Unmap, &g, &none), 1 << 21);
        assert_eq!(longest(Op::Unmap, &g, &Features { max_blocks: 8, ..none }), 8);
        assert_eq!(longest(Op::Read, &g, &none), u64::MAX);
    }

    #[test]
    fn ios_are_as_long_as_the_bdev_takes() {
        let g = geometry(512, 1 << 40);
        let features = |max_blocks| Features { max_blocks, ..Features::default() };
        assert_eq!(longest_io(&g, &features(0)), Ok(MAX_READ_BYTES));
        assert_eq!(longest_io(&g, &features(1 << 20)), Ok(MAX_READ_BYTES));
        assert_eq!(longest_io(&g, &features(1024)), Ok(512 * 1024 - 8192));
        assert_eq!(longest_io(&g, &features(256)), Err(128 * 1024 + 8192));
    }

    #[test]
    fn a_write_fits_in_its_pages_wherever_it_begins_in_memory() {
        assert_eq!(Limits::new(MAX_READ_BYTES, 256).max_write, 512 * 1024);
        let most = Limits { max_write: MAX_IO_BYTES, max_pages: 257 };
        assert_eq!(Limits::new(MAX_READ_BYTES, 65535), most);
        for pages_limit in 2..600 {
            for longest in [MIN_IO_BYTES as u32, 300 * 1024, MAX_READ_BYTES] {
                let Limits { max_write, max_pages } = Limits::new(longest, pages_limit);
                assert!(max_write.is_multiple_of(PAGE) && max_write > 0);
                assert!(max_write + PAGE <= u32::from(max_pages) * PAGE);
                assert!(u32::from(max_pages) <= pages_limit);
                assert!(u32::from(max_pages) * PAGE <= longest);
            }
        }
        assert!((1..=65535).contains(&pages_limit()));
    }

    #[test]
    fn the_pool_gives_the_same_buffers_again_and_has_a_bound() {
        let mut pool = Pool::default();
        let buf = pool.take();
        let at = buf.as_ptr();
        pool.put(buf);
        assert_eq!(pool.take().as_ptr(), at);
        for _ in 0..2 * DEPTH {
            pool.put(AlignedBuf::zeroed(1));
        }
        assert_eq!(pool.0.len(), usize::from(DEPTH));
    }
}
