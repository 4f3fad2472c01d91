//! Blocking I/O for control threads: metadata, formatting, examination, copies. Never for a
//! reactor's thread.

use std::alloc::{Layout, alloc_zeroed, dealloc, handle_alloc_error};
use std::ops::{Deref, DerefMut};
use std::ptr::NonNull;

use guestmem::{IoVec, Sg};
use reactor::IoContext;

use crate::{
    AppTags, Bdev, Channel, Checks, Completion, Geometry, Io, IoError, Op, OpenError, Protected,
    Run, Submit, Tuples,
};

/// Alignment of [`AlignedBuf`], in bytes: a page, which satisfies every O_DIRECT device.
pub const BUF_ALIGN: usize = 4096;

/// Longest single wait for a completion before the device is polled again, in microseconds.
const WAIT_US: u64 = 100_000;

/// A zero-initialised buffer aligned for direct I/O.
pub struct AlignedBuf {
    base: NonNull<u8>,
    len: usize,
    /// What the allocator gave, and what it was asked for.
    whole: NonNull<u8>,
    layout: Layout,
}

// SAFETY: it owns its memory like a Box<[u8]>.
unsafe impl Send for AlignedBuf {}
// SAFETY: as above.
unsafe impl Sync for AlignedBuf {}

impl AlignedBuf {
    /// `len` zero bytes, aligned to [`BUF_ALIGN`]. They are written, so that they are in memory: where the
    /// kernel copies a request of FUSE to a process that is being killed and has to fault a page in for that,
    /// it gives up, and who asked gets EIO.
    pub fn zeroed(len: usize) -> Self {
        let layout =
            Layout::from_size_align(len.max(1), BUF_ALIGN).expect("a buffer fits in memory");
        let whole = Self::allocate(layout);
        AlignedBuf { base: whole, len, whole, layout }
    }

    /// As [`AlignedBuf::zeroed`], but a large one takes no memory before it is used. For the kernel only
    /// where it tries again when it cannot fault a page in, as ublk does.
    pub fn untouched(len: usize) -> Self {
        // The allocator writes zeros to all that it aligns to pages.
        let size = len.checked_add(BUF_ALIGN);
        let layout = size.and_then(|size| Layout::from_size_align(size, 1).ok());
        let layout = layout.expect("a buffer fits in memory");
        let whole = Self::allocate(layout);
        let skipped = whole.as_ptr().align_offset(BUF_ALIGN);
        // SAFETY: less than the BUF_ALIGN bytes that were allocated beside `len`.
        let base = unsafe { whole.add(skipped) };
        AlignedBuf { base, len, whole, layout }
    }

    fn allocate(layout: Layout) -> NonNull<u8> {
        // SAFETY: the layout's size is not 0.
        let whole = unsafe { alloc_zeroed(layout) };
        NonNull::new(whole).unwrap_or_else(|| handle_alloc_error(layout))
    }
}

impl Drop for AlignedBuf {
    fn drop(&mut self) {
        // SAFETY: allocated with the same layout.
        unsafe { dealloc(self.whole.as_ptr(), self.layout) }
    }
}

impl Deref for AlignedBuf {
    type Target = [u8];
    fn deref(&self) -> &[u8] {
        // SAFETY: `len` initialised bytes that this value owns.
        unsafe { std::slice::from_raw_parts(self.base.as_ptr(), self.len) }
    }
}

impl DerefMut for AlignedBuf {
    fn deref_mut(&mut self) -> &mut [u8] {
        // SAFETY: as above, borrowed exclusively.
        unsafe { std::slice::from_raw_parts_mut(self.base.as_ptr(), self.len) }
    }
}

impl Clone for AlignedBuf {
    fn clone(&self) -> Self {
        let mut b = Self::zeroed(self.len);
        b.copy_from_slice(self);
        b
    }
}

impl std::fmt::Debug for AlignedBuf {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "AlignedBuf({} bytes)", self.len)
    }
}

/// A blocking I/O failed.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{op:?} of {blocks} blocks at block {lba} of bdev {name} failed: {cause}")]
pub struct SyncError {
    /// Name of the device.
    pub name: String,
    /// What was tried.
    pub op: Op,
    /// First block.
    pub lba: u64,
    /// Number of blocks.
    pub blocks: u64,
    /// How it ended.
    #[source]
    pub cause: IoError,
}

/// What an I/O has beside its data whose blocks are to have these application tags.
fn tagged(tags: AppTags) -> Option<Protected> {
    (!tags.is_none()).then(|| Protected::PLAIN.tagged(tags))
}

/// A channel with blocking calls, on an I/O context of its own. Belongs to the thread that opened
/// it; buffers of whole blocks, best an [`AlignedBuf`] (others are copied by the file backend).
pub struct SyncChannel {
    channel: Box<dyn Channel>,
    io: IoContext,
    name: String,
    geometry: Geometry,
    done: Vec<Completion>,
}

impl SyncChannel {
    /// Opens `bdev` for the calling thread.
    ///
    /// # Errors
    /// What [`Bdev::open`] says, or that the kernel has no I/O context left.
    pub fn open(bdev: &dyn Bdev) -> Result<Self, OpenError> {
        let name = bdev.name().to_owned();
        let io = IoContext::new().map_err(|e| OpenError {
            name: name.clone(),
            why: format!("no I/O context for this thread: {e}"),
        })?;
        let channel = bdev.open(&io)?;
        let geometry = bdev.geometry();
        Ok(SyncChannel { channel, io, name, geometry, done: Vec::with_capacity(1) })
    }

    /// Bytes of a logical block.
    pub fn block_size(&self) -> u32 {
        self.geometry.block_size
    }

    /// Reads `buf.len()` bytes from block `lba` on.
    ///
    /// # Errors
    /// [`SyncError`]; [`IoError::BadLength`] when `buf` is not whole blocks.
    pub fn read(&mut self, lba: u64, buf: &mut [u8]) -> Result<(), SyncError> {
        self.transfer(Op::Read, lba, buf.as_mut_ptr(), buf.len(), false, None)
    }

    /// As [`SyncChannel::read`], of blocks with their protection information, each behind its block.
    ///
    /// # Errors
    /// As there; [`IoError::Unsupported`] where the blocks have none.
    pub fn read_protected(
        &mut self,
        lba: u64,
        buf: &mut [u8],
        checks: Checks,
    ) -> Result<(), SyncError> {
        let with = Some(Protected::new(Tuples::Behind, checks));
        self.transfer(Op::Read, lba, buf.as_mut_ptr(), buf.len(), false, with)
    }

    /// As [`SyncChannel::read`], of blocks whose application tags are to be these.
    ///
    /// # Errors
    /// As there; [`IoError::Unsupported`] where the blocks have none.
    pub fn read_tagged(
        &mut self,
        lba: u64,
        buf: &mut [u8],
        tags: AppTags,
    ) -> Result<(), SyncError> {
        self.transfer(Op::Read, lba, buf.as_mut_ptr(), buf.len(), false, tagged(tags))
    }

    /// As [`SyncChannel::write`], of blocks that get these application tags.
    ///
    /// # Errors
    /// As [`SyncChannel::read_tagged`].
    pub fn write_tagged(&mut self, lba: u64, buf: &[u8], tags: AppTags) -> Result<(), SyncError> {
        self.transfer(Op::Write, lba, buf.as_ptr().cast_mut(), buf.len(), false, tagged(tags))
    }

    /// As [`SyncChannel::write`], of blocks with their protection information, each behind its block.
    ///
    /// # Errors
    /// As [`SyncChannel::read_protected`].
    pub fn write_protected(
        &mut self,
        lba: u64,
        buf: &[u8],
        checks: Checks,
    ) -> Result<(), SyncError> {
        let with = Some(Protected::new(Tuples::Behind, checks));
        self.transfer(Op::Write, lba, buf.as_ptr().cast_mut(), buf.len(), false, with)
    }

    /// As [`Channel::mismatch`], of the last I/O.
    pub fn mismatch(&mut self) -> Option<u64> {
        self.channel.mismatch(0)
    }

    /// Writes `buf` from block `lba` on; durable after the next [`SyncChannel::flush`].
    ///
    /// # Errors
    /// As [`SyncChannel::read`].
    pub fn write(&mut self, lba: u64, buf: &[u8]) -> Result<(), SyncError> {
        self.transfer(Op::Write, lba, buf.as_ptr().cast_mut(), buf.len(), false, None)
    }

    /// As [`SyncChannel::write`], and durable when it returns.
    ///
    /// # Errors
    /// As [`SyncChannel::read`]; [`IoError::Unsupported`] without [`crate::Features::fua`].
    pub fn write_fua(&mut self, lba: u64, buf: &[u8]) -> Result<(), SyncError> {
        self.transfer(Op::Write, lba, buf.as_ptr().cast_mut(), buf.len(), true, None)
    }

    /// Makes all completed writes durable.
    ///
    /// # Errors
    /// [`SyncError`] with [`IoError::Flush`]: earlier writes may be lost.
    pub fn flush(&mut self) -> Result<(), SyncError> {
        self.run(Op::Flush, 0, 0, Sg::EMPTY, false, None)
    }

    /// Deallocates blocks.
    ///
    /// # Errors
    /// [`SyncError`]; [`IoError::Unsupported`] without [`crate::Features::unmap`].
    pub fn unmap(&mut self, lba: u64, blocks: u64) -> Result<(), SyncError> {
        self.run(Op::Unmap, lba, blocks, Sg::EMPTY, false, None)
    }

    /// Makes blocks read as zeros.
    ///
    /// # Errors
    /// [`SyncError`]; [`IoError::Unsupported`] without [`crate::Features::write_zeroes`].
    pub fn write_zeroes(&mut self, lba: u64, blocks: u64) -> Result<(), SyncError> {
        self.run(Op::WriteZeroes, lba, blocks, Sg::EMPTY, false, None)
    }

    /// As [`Channel::sparse_run`].
    pub fn sparse_run(&mut self, lba: u64, blocks: u64) -> Run {
        self.channel.sparse_run(lba, blocks)
    }

    fn transfer(
        &mut self,
        op: Op,
        lba: u64,
        base: *mut u8,
        len: usize,
        fua: bool,
        with: Option<Protected>,
    ) -> Result<(), SyncError> {
        let block = self.geometry.block_size as usize;
        let block = with.map_or(block, |with| with.in_list(block));
        if !len.is_multiple_of(block) {
            return Err(self.failed(op, lba, (len / block) as u64, IoError::BadLength));
        }
        // SAFETY: the caller's buffer is borrowed until `run` returns, and `run` returns only
        // after the completion; a write only reads it.
        let iov = unsafe { [IoVec::new(base, len)] };
        // SAFETY: `iov` lives until `run` has returned.
        let sg = unsafe { Sg::new(&iov) };
        self.run(op, lba, (len / block) as u64, sg, fua, with)
    }

    fn failed(&self, op: Op, lba: u64, blocks: u64, cause: IoError) -> SyncError {
        SyncError { name: self.name.clone(), op, lba, blocks, cause }
    }

    fn run(
        &mut self,
        op: Op,
        lba: u64,
        blocks: u64,
        sg: Sg,
        fua: bool,
        with: Option<Protected>,
    ) -> Result<(), SyncError> {
        let io = Io { op, fua, lba, blocks, sg, tag: 0 };
        let result = loop {
            let submit = match &with {
                None => self.channel.submit(&io),
                Some(with) => self.channel.submit_protected(&io, with),
            };
            match submit {
                Submit::Done(result) => break result,
                Submit::Pending => break self.finish(),
                // Nothing of ours is in flight, but what lies below may wait for being polled.
                Submit::Full => {
                    self.done.clear();
                    self.channel.poll(&mut self.done);
                    self.idle();
                }
            }
        };
        result.map_err(|cause| self.failed(op, lba, blocks, cause))
    }

    /// Waits for the one I/O in flight. A context that cannot wait any more is polled: returning
    /// before the completion would give the buffer back while the kernel still writes to it.
    fn finish(&mut self) -> Result<(), IoError> {
        loop {
            self.done.clear();
            self.io.flush();
            if self.channel.poll(&mut self.done) > 0
                && let Some(c) = self.done.first()
            {
                return c.result;
            }
            self.idle();
        }
    }

    fn idle(&mut self) {
        if self.io.wait(WAIT_US).is_err() {
            std::thread::yield_now();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// KiB of memory that the mapping with an address has.
    fn resident(address: usize) -> usize {
        let maps = std::fs::read_to_string("/proc/self/smaps").unwrap();
        let mut lines = maps.lines().skip_while(|line| {
            let bounds = line.split_once(' ').and_then(|(range, _)| range.split_once('-'));
            let hex = |text| usize::from_str_radix(text, 16).unwrap();
            !bounds.is_some_and(|(from, to)| (hex(from)..hex(to)).contains(&address))
        });
        let line = lines.find(|line| line.starts_with("Rss:")).unwrap();
        line.split_whitespace().nth(1).unwrap().parse().unwrap()
    }

    #[test]
    fn a_buffer_is_aligned_and_zero_and_its_own() {
        for make in [AlignedBuf::zeroed, AlignedBuf::untouched] {
            for len in [0, 1, 512, BUF_ALIGN, 3 * BUF_ALIGN + 1, 1 << 20] {
                let mut buf = make(len);
                assert_eq!((buf.len(), buf.as_ptr().addr() % BUF_ALIGN), (len, 0));
                assert!(buf.iter().all(|byte| *byte == 0));
                buf.fill(7);
                assert!(buf.clone().iter().all(|byte| *byte == 7));
            }
        }
    }

    #[test]
    #[cfg_attr(miri, ignore = "it asks the kernel")]
    fn a_large_untouched_buffer_has_no_memory_before_it_is_used() {
        let mut buf = AlignedBuf::untouched(256 << 20);
        let before = resident(buf.as_ptr().addr());
        assert!(before < 64 << 10, "{before} KiB");
        buf[..128 << 20].fill(1);
        assert!(resident(buf.as_ptr().addr()) >= 128 << 10);
        assert!(resident(AlignedBuf::zeroed(64 << 20).as_ptr().addr()) >= 64 << 10);
    }
}
