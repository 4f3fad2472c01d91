//! `malloc`: a disk in memory. A short I/O is over within `submit`; a long one is copied piece by
//! piece, one piece a `poll`, so that nobody else on the thread waits for megabytes.

use std::collections::VecDeque;
use std::fs::File;
use std::io;
use std::os::fd::OwnedFd;
use std::os::unix::fs::FileExt;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};

use parking_lot::{Mutex, MutexGuard};
use reactor::{IoContext, Waker};
use rustix::fs::{MemfdFlags, SeekFrom, memfd_create, seek};
use rustix::io::Errno;
use serde_json::{Value, json};
use uuid::Uuid;

use crate::ram::{DISCARD_MIN, Ram};
use crate::{
    Bdev, COPY_AT_ONCE, Channel, ChannelStats, Completion, Features, Geometry, Io, Op, OpenError,
    Run, Stats, Submit,
};

/// Bytes that are saved and loaded at once.
const SAVE_AT_ONCE: usize = 64 << 10;

/// Long I/Os of one channel at a time.
const LONG_MAX: usize = 256;

/// Bytes that [`Written`] has a bit for.
const WRITTEN_SHIFT: u32 = 14;

/// Bytes that are looked at for one answer.
const LOOK_AT_ONCE: usize = 64 << 20;

/// Locks of [`Whole`].
const WHOLE: usize = 32;

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
    written: Arc<Written>,
    whole: Option<Arc<Whole>>,
    stats: Arc<Stats>,
}

/// Which parts were ever written: others are zeros, without a look, which would take memory for them.
struct Written(Box<[AtomicU64]>);

impl Written {
    fn new(bytes: usize) -> Self {
        let parts = bytes.div_ceil(1 << WRITTEN_SHIFT);
        Written((0..parts.div_ceil(64)).map(|_| AtomicU64::new(0)).collect())
    }

    /// `len` bytes from `offset` on are about to be written.
    #[inline]
    fn mark(&self, offset: usize, len: usize) {
        let last = (offset + len.max(1) - 1) >> WRITTEN_SHIFT;
        for part in offset >> WRITTEN_SHIFT..=last {
            let (word, bit) = (&self.0[part / 64], 1 << (part % 64));
            // Mostly it was written before, and nobody else's cache line is taken.
            if word.load(Relaxed) & bit == 0 {
                word.fetch_or(bit, Relaxed);
            }
        }
    }

    /// Whether the part that `offset` is in was.
    fn is(&self, offset: usize) -> bool {
        let part = offset >> WRITTEN_SHIFT;
        self.0[part / 64].load(Relaxed) >> (part % 64) & 1 == 1
    }
}

/// Locks, each of some of the blocks, where blocks stay whole whoever else writes them.
#[derive(Default)]
struct Whole([Mutex<()>; WHOLE]);

impl Whole {
    /// Of block `lba`, for as long as it is copied.
    fn lock(&self, lba: usize) -> MutexGuard<'_, ()> {
        self.0[lba % WHOLE].lock()
    }

    /// Of all blocks. Nobody holds one lock and waits for another, but in this order.
    fn lock_all(&self) -> [MutexGuard<'_, ()>; WHOLE] {
        std::array::from_fn(|nth| self.0[nth].lock())
    }
}

const FEATURES: Features = Features {
    read_only: false,
    volatile_cache: false,
    fua: true,
    unmap: true,
    unmap_zeroes: true,
    unmap_skips: false,
    write_zeroes: true,
    thin: true,
    unmap_granularity: 1,
    optimal_blocks: 0,
    max_blocks: 0,
    boot: None,
    remote: false,
};

impl Malloc {
    /// A device of zeros; memory is taken when blocks are first written.
    ///
    /// # Errors
    /// A block size that is not 512 or 4096, no blocks, or more than can be mapped.
    pub fn create(options: MallocOptions) -> Result<Arc<Self>, OpenError> {
        Malloc::with_metadata(options, 0)
    }

    /// As [`Malloc::create`], with so many bytes of metadata behind each block, for a layer that shows the
    /// blocks without: a block is as long as both. Two I/Os at once leave no mix of their bytes in one.
    ///
    /// # Errors
    /// As there.
    pub fn with_metadata(options: MallocOptions, metadata: u32) -> Result<Arc<Self>, OpenError> {
        let MallocOptions { name, block_size, physical_block_size, num_blocks, uuid } = options;
        let fail = |why: String| OpenError { name: name.clone(), why };
        let mut geometry =
            Geometry::checked(block_size, physical_block_size, num_blocks).map_err(&fail)?;
        let block_size = block_size + metadata;
        geometry.block_size = block_size;
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
            written: Arc::new(Written::new(bytes)),
            whole: (metadata > 0).then(Arc::default),
            stats: Stats::new(),
            name,
        }))
    }
}

impl Malloc {
    /// The content as a file in memory, without holes filled, while nobody uses the device.
    ///
    /// # Errors
    /// There is no memory for it.
    pub fn save(&self) -> io::Result<OwnedFd> {
        let file = File::from(memfd_create("malloc", MemfdFlags::CLOEXEC)?);
        let bytes = self.bytes();
        file.set_len(bytes as u64)?;
        let mut piece = vec![0; SAVE_AT_ONCE];
        for at in (0..bytes).step_by(SAVE_AT_ONCE) {
            let piece = &mut piece[..SAVE_AT_ONCE.min(bytes - at)];
            self.ram.copy_to(at, piece);
            if piece.iter().any(|byte| *byte != 0) {
                file.write_all_at(piece, at as u64)?;
            }
        }
        Ok(file.into())
    }

    /// Takes the content of a new device from a file of [`Malloc::save`].
    ///
    /// # Errors
    /// The file has another size, or cannot be read.
    pub fn load(&self, file: OwnedFd) -> io::Result<()> {
        let (file, bytes) = (File::from(file), self.bytes());
        if file.metadata()?.len() != bytes as u64 {
            return Err(io::Error::other(format!("it has not the {bytes} bytes of the device")));
        }
        let mut piece = vec![0; SAVE_AT_ONCE];
        let mut at = 0;
        while at < bytes {
            at = match seek(&file, SeekFrom::Data(at as u64)) {
                Ok(data) => data as usize / SAVE_AT_ONCE * SAVE_AT_ONCE,
                // Nothing but a hole is left.
                Err(Errno::NXIO) => break,
                Err(e) => return Err(e.into()),
            };
            let piece = &mut piece[..SAVE_AT_ONCE.min(bytes - at)];
            file.read_exact_at(piece, at as u64)?;
            self.written.mark(at, piece.len());
            self.ram.copy_from(at, piece);
            at += piece.len();
        }
        Ok(())
    }

    fn bytes(&self) -> usize {
        self.geometry.num_blocks as usize * self.geometry.block_size as usize
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
    fn open(&self, io: &IoContext) -> Result<Box<dyn Channel>, OpenError> {
        Ok(Box::new(MallocChannel {
            ram: self.ram.clone(),
            written: self.written.clone(),
            whole: self.whole.clone(),
            geometry: self.geometry,
            stats: self.stats.channel(),
            long: VecDeque::with_capacity(LONG_MAX),
            waker: io.waker(),
        }))
    }
    fn driver_specific(&self) -> Value {
        json!({})
    }
    fn stats(&self) -> Option<&Arc<Stats>> {
        Some(&self.stats)
    }
    fn known_zeros(&self, lba: u64) -> Option<Run> {
        let (bytes, block) = (self.bytes(), self.geometry.block_size as usize);
        // What zeros mean in blocks with metadata is for the layer above to say.
        if self.whole.is_some() || lba >= self.geometry.num_blocks {
            return None;
        }
        let begin = lba as usize * block;
        let (mut at, mut looked, mut hole) = (begin, 0, None);
        while at < bytes && looked < LOOK_AT_ONCE {
            let next = (((at >> WRITTEN_SHIFT) + 1) << WRITTEN_SHIFT).min(bytes);
            let zeros = !self.written.is(at) || {
                looked += next - at;
                self.ram.is_zero(at, next - at)
            };
            if hole.is_some_and(|hole| hole != zeros) {
                break;
            }
            (hole, at) = (Some(zeros), next);
        }
        Some(Run { hole: hole?, blocks: ((at - begin) / block) as u64 })
    }
}

struct MallocChannel {
    ram: Arc<Ram>,
    written: Arc<Written>,
    whole: Option<Arc<Whole>>,
    geometry: Geometry,
    stats: ChannelStats,
    /// I/Os of more than one piece, in turn.
    long: VecDeque<Long>,
    /// Keeps the thread awake while there are any.
    waker: Waker,
}

/// An I/O that is done piece by piece.
struct Long {
    io: Io,
    /// Bytes done.
    done: usize,
    begun: u64,
}

impl Channel for MallocChannel {
    #[inline]
    fn submit(&mut self, io: &Io) -> Submit {
        if let Err(error) = io.check(&self.geometry, &FEATURES) {
            self.stats.error(error);
            return Submit::Done(Err(error));
        }
        let (piece, all) = (self.piece(io, 0), io.bytes(self.geometry.block_size) as usize);
        if piece < all {
            if self.long.len() == LONG_MAX {
                return Submit::Full;
            }
            self.long.push_back(Long { io: *io, done: 0, begun: reactor::ticks::now() });
            self.waker.wake();
            return Submit::Pending;
        }
        let begun = self.stats.begin();
        self.run(io, 0, piece);
        self.stats.end(io, self.geometry.block_size, begun, Ok(()));
        Submit::Done(Ok(()))
    }

    #[inline]
    fn poll(&mut self, done: &mut Vec<Completion>) -> u32 {
        if done.len() == done.capacity() {
            return 0;
        }
        let Some(mut long) = self.long.pop_front() else { return 0 };
        let piece = self.piece(&long.io, long.done);
        self.run(&long.io, long.done, piece);
        long.done += piece;
        let bytes = long.io.bytes(self.geometry.block_size);
        let over = long.done as u64 == bytes;
        if over {
            let ended = reactor::ticks::now();
            let ticks = ended.saturating_sub(long.begun);
            self.stats.record(long.io.op, bytes, ticks, Ok(()));
            done.push(Completion { tag: long.io.tag, result: Ok(()), ticks, ended });
        } else {
            self.long.push_back(long);
        }
        if !self.long.is_empty() {
            self.waker.wake();
        }
        u32::from(over)
    }
}

impl MallocChannel {
    /// Does `len` bytes of `io` from its byte `at` on.
    #[inline]
    fn run(&self, io: &Io, at: usize, len: usize) {
        let offset = io.lba as usize * self.geometry.block_size as usize + at;
        if let Some(whole) = &self.whole {
            return self.run_whole(whole, io, (offset, at), len);
        }
        match io.op {
            Op::Read => self.ram.read(offset, &io.sg, at, len),
            Op::Write => {
                self.written.mark(offset, len);
                self.ram.write(offset, &io.sg, at, len);
            }
            Op::Unmap | Op::WriteZeroes => self.ram.zero(offset, len),
            Op::Flush => {}
        }
    }

    /// As [`MallocChannel::run`], each block for itself. A lock is held for no longer than a copy of one.
    #[cold]
    fn run_whole(&self, whole: &Whole, io: &Io, (offset, at): (usize, usize), len: usize) {
        let block = self.geometry.block_size as usize;
        if matches!(io.op, Op::Unmap | Op::WriteZeroes) {
            let _all = whole.lock_all();
            return self.ram.zero(offset, len);
        }
        for done in (0..len).step_by(block) {
            let _one = whole.lock((offset + done) / block);
            match io.op {
                Op::Read => self.ram.read(offset + done, &io.sg, at + done, block),
                Op::Write => self.ram.write(offset + done, &io.sg, at + done, block),
                Op::Flush | Op::Unmap | Op::WriteZeroes => {}
            }
        }
    }

    /// Bytes of the next piece of an I/O, `at` bytes of which are done.
    #[inline]
    fn piece(&self, io: &Io, at: usize) -> usize {
        let left = io.bytes(self.geometry.block_size) as usize - at;
        match io.op {
            Op::Read | Op::Write | Op::Flush if self.whole.is_some() => {
                let block = self.geometry.block_size as usize;
                left.min(COPY_AT_ONCE / block * block)
            }
            Op::Read | Op::Write | Op::Flush => left.min(COPY_AT_ONCE),
            // A huge page is given back as a whole, which takes no longer than a copy.
            Op::Unmap | Op::WriteZeroes => {
                let start = io.lba as usize * self.geometry.block_size as usize + at;
                match left.min(self.ram.to_huge_page(start)) {
                    DISCARD_MIN => DISCARD_MIN,
                    fill => fill.min(COPY_AT_ONCE),
                }
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing::model;
    use crate::{IoError, SyncChannel};

    fn disk(block_size: u32, num_blocks: u64) -> Arc<Malloc> {
        let name = "m0".to_owned();
        let o = MallocOptions { name, block_size, physical_block_size: 0, num_blocks, uuid: None };
        Malloc::create(o).unwrap()
    }

    #[test]
    fn content_goes_along_in_a_file_without_its_holes() {
        let (before, after) = (disk(512, 4096), disk(512, 4096));
        before.ram.copy_from(70_000, &[7; 100]);
        before.ram.copy_from(4096 * 512 - 3, &[8; 3]);
        let file = before.save().unwrap();
        assert!(rustix::fs::fstat(&file).unwrap().st_blocks * 512 < 4096 * 512);
        after.load(file.try_clone().unwrap()).unwrap();
        let content = |disk: &Malloc| {
            let mut bytes = vec![0; 4096 * 512];
            disk.ram.copy_to(0, &mut bytes);
            bytes
        };
        assert!(content(&before) == content(&after));
        let why = disk(512, 8).load(file).unwrap_err().to_string();
        assert_eq!(why, "it has not the 4096 bytes of the device");
    }

    #[test]
    fn what_was_never_written_is_known_to_be_zeros_and_so_is_what_looks_so() {
        let part = 32; // blocks
        let d = disk(512, 200 * part);
        let run = |d: &Malloc, lba| d.known_zeros(lba).map(|run| (run.hole, run.blocks));
        assert_eq!(run(&d, 3), Some((true, 200 * part - 3)));
        assert_eq!(run(&d, 200 * part), None);
        let mut c = SyncChannel::open(&*d).unwrap();
        let mut buf = crate::AlignedBuf::zeroed(512);
        buf[511] = 1;
        c.write(70 * part - 1, &buf).unwrap();
        c.write(70 * part, &buf).unwrap();
        c.write(199 * part + 31, &buf).unwrap();
        assert_eq!(run(&d, 0), Some((true, 69 * part)));
        assert_eq!(run(&d, 69 * part + 7), Some((false, 2 * part - 7)));
        assert_eq!(run(&d, 71 * part), Some((true, 128 * part)));
        assert_eq!(run(&d, 199 * part), Some((false, part)));
        // Zeros that were written, and what was unmapped, in part or as a whole.
        c.unmap(70 * part - 1, 1).unwrap();
        assert_eq!(run(&d, 0), Some((true, 70 * part)));
        buf[511] = 0;
        c.write(70 * part, &buf).unwrap();
        assert_eq!(run(&d, 0), Some((true, 199 * part)));
        // It goes along to the next process.
        let after = disk(512, 200 * part);
        after.load(d.save().unwrap()).unwrap();
        let found = [0, 199 * part].map(|lba| run(&after, lba));
        assert_eq!(found, [Some((true, 199 * part)), Some((false, part))]);
        assert!(!after.written.is(0) && after.written.is(199 * 512 * part as usize));

        let name = "m1".to_owned();
        let (block_size, num_blocks) = (512, 64);
        let o = MallocOptions { name, block_size, physical_block_size: 0, num_blocks, uuid: None };
        assert_eq!(Malloc::with_metadata(o, 8).unwrap().known_zeros(0), None);
    }

    #[test]
    fn a_long_write_marks_all_that_it_writes() {
        let d = disk(512, (4 << 20) / 512);
        let mut c = SyncChannel::open(&*d).unwrap();
        let mut buf = crate::AlignedBuf::zeroed(1 << 20);
        buf.fill(1);
        c.write(33, &buf).unwrap();
        let run = |lba| d.known_zeros(lba).map(|run| (run.hole, run.blocks));
        assert_eq!((run(0), run(32)), (Some((true, 32)), Some((false, 2048 + 32))));
        assert_eq!(run(2048 + 64), Some((true, 8192 - 2048 - 64)));
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

    /// A list of runs of odd lengths over `memory`.
    fn scattered(memory: &mut [u8]) -> Vec<guestmem::IoVec> {
        let (base, len) = (memory.as_mut_ptr(), memory.len());
        let cuts: Vec<usize> = (0..len).step_by(24_576 + 512).chain([len]).collect();
        // SAFETY: parts of `memory`, which outlives the list in these tests.
        cuts.windows(2)
            .map(|w| unsafe { guestmem::IoVec::new(base.add(w[0]), w[1] - w[0]) })
            .collect()
    }

    #[test]
    fn a_long_transfer_takes_a_poll_a_piece_and_others_go_between() {
        let d = disk(512, (4 << 20) / 512);
        let io = IoContext::new().unwrap();
        let mut c = d.open(&io).unwrap();
        let pattern = |seed: usize| (0..1 << 20).map(|i| (i / 512 * 7 + seed + i) as u8).collect();
        let (mut a, mut b): (Vec<u8>, Vec<u8>) = (pattern(1), pattern(2));
        let (runs_a, runs_b) = (scattered(&mut a), scattered(&mut b));
        let write = |runs: &[guestmem::IoVec], lba, tag| {
            // SAFETY: the runs outlive the I/O, which ends below.
            let sg = unsafe { guestmem::Sg::new(runs) };
            Io { op: Op::Write, fua: false, lba, blocks: 2048, sg, tag }
        };
        let mut done = Vec::with_capacity(8);
        assert_eq!(c.submit(&write(&runs_a, 0, 1)), Submit::Pending);
        assert_eq!(c.submit(&write(&runs_b, 2048, 2)), Submit::Pending);
        let mut polls = 0;
        while done.len() < 2 {
            // A short one is over at once, whatever else is under way.
            let mut small = [0u8; 512];
            // SAFETY: `small` outlives the list.
            let run = [unsafe { guestmem::IoVec::new(small.as_mut_ptr(), 512) }];
            // SAFETY: `run` outlives the I/O, which is over when `submit` returns.
            let sg = unsafe { guestmem::Sg::new(&run) };
            let read = Io { op: Op::Read, fua: false, lba: 8191, blocks: 1, sg, tag: 3 };
            assert_eq!(c.submit(&read), Submit::Done(Ok(())));
            assert!(io.wait(0).is_ok());
            c.poll(&mut done);
            polls += 1;
        }
        assert_eq!(polls, 2 * (1 << 20) / COPY_AT_ONCE);
        let tags: Vec<u64> = done.iter().map(|c| c.tag).collect();
        assert_eq!(tags, [1, 2], "in turn");
        let mut c = SyncChannel::open(&*d).unwrap();
        let mut read = crate::AlignedBuf::zeroed(2 << 20);
        c.read(0, &mut read).unwrap();
        assert!(read[..1 << 20] == a[..] && read[1 << 20..] == b[..]);
    }

    #[test]
    fn more_long_transfers_than_fit_are_not_taken() {
        let d = disk(512, (4 << 20) / 512);
        let io = IoContext::new().unwrap();
        let mut c = d.open(&io).unwrap();
        let zero = |tag| Io {
            op: Op::WriteZeroes,
            fua: false,
            lba: 1,
            blocks: 8191,
            sg: guestmem::Sg::EMPTY,
            tag,
        };
        for tag in 0..LONG_MAX as u64 {
            assert_eq!(c.submit(&zero(tag)), Submit::Pending);
        }
        assert_eq!(c.submit(&zero(9999)), Submit::Full);
        let mut done = Vec::with_capacity(LONG_MAX);
        while done.len() < LONG_MAX {
            c.poll(&mut done);
        }
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
