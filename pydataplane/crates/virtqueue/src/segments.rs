//! The memory of one chain.

use std::fmt;
use std::ops::{Deref, DerefMut};
use std::ptr::NonNull;
use std::sync::Arc;

use guestmem::{GuestMemory, IoVec, Sg, prefetch, prefetch_write};

/// Runs that one chain may have: virtio-scsi's seg_max of 126 data runs, header and response,
/// and room for runs that cross regions.
pub const MAX_SEGMENTS: usize = 136;
/// Entries beyond the limit, for one split of each part.
const SPLITS: usize = 2;

/// One part of a chain: entries `start..end` of `bytes` bytes, of which `start..mid` of `head` bytes
/// were split off.
#[derive(Clone, Copy, Debug, Default)]
struct Part {
    start: u32,
    mid: u32,
    end: u32,
    bytes: u32,
    head: u32,
}

/// The runs of one chain: the device-readable ones, then the device-writable ones (2.7.4.2).
///
/// Allocated once, in a request slot, and used for one chain after the other. It keeps the guest
/// memory of its last chain mapped; [`Segments::clear`] lets go of it.
///
/// The [`Sg`]s it gives out stay valid until it walks another chain, is cleared or dropped; the
/// slot does neither while an I/O is under way.
pub struct Segments {
    iov: Room,
    readable: Part,
    writable: Part,
    memory: Option<Arc<GuestMemory>>,
}

impl Default for Segments {
    fn default() -> Self {
        Segments::new()
    }
}

impl fmt::Debug for Segments {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Segments")
            .field("readable", &self.readable().as_slice())
            .field("writable", &self.writable().as_slice())
            .finish()
    }
}

impl Segments {
    /// Room for a chain of [`MAX_SEGMENTS`] runs.
    pub fn new() -> Segments {
        Segments::with_limit(MAX_SEGMENTS)
    }

    /// Room for a chain of `limit` runs.
    pub fn with_limit(limit: usize) -> Segments {
        Segments::of(Room::many(1, limit + SPLITS).next().expect("one was asked for"))
    }

    /// `count` times room for a chain of [`MAX_SEGMENTS`] runs, in one allocation whose pages the
    /// system provides when they are first used: most rings never hold as many runs as they could.
    pub fn many(count: usize) -> impl ExactSizeIterator<Item = Segments> {
        Room::many(count, MAX_SEGMENTS + SPLITS).map(Segments::of)
    }

    fn of(iov: Room) -> Segments {
        Segments { iov, readable: Part::default(), writable: Part::default(), memory: None }
    }

    /// Runs that a chain may have.
    #[inline]
    pub fn limit(&self) -> usize {
        self.iov.len() - SPLITS
    }

    /// Forgets the chain and lets go of the guest memory (when the memory table changes).
    pub fn clear(&mut self) {
        self.readable = Part::default();
        self.writable = Part::default();
        self.memory = None;
    }

    /// Starts a chain in `memory`.
    #[inline(always)]
    pub(crate) fn begin(&mut self, memory: &Arc<GuestMemory>) {
        self.readable = Part::default();
        self.writable = Part::default();
        if !self.memory.as_ref().is_some_and(|m| Arc::ptr_eq(m, memory)) {
            self.memory = Some(Arc::clone(memory));
        }
    }

    /// Appends a run; the caller keeps readable before writable. `false`: too many.
    #[inline(always)]
    pub(crate) fn push(&mut self, run: IoVec, writable: bool) -> bool {
        let at = self.writable.end as usize;
        if at >= self.limit() {
            return false;
        }
        self.iov[at] = run;
        self.writable.end += 1;
        if !writable {
            self.readable.end = self.writable.end;
            self.writable.start = self.writable.end;
            self.writable.mid = self.writable.end;
        }
        true
    }

    /// Ends a chain of these lengths in bytes, and prefetches where each part begins.
    #[inline(always)]
    pub(crate) fn finish(&mut self, readable: u32, writable: u32) {
        self.readable.bytes = readable;
        self.writable.bytes = writable;
        if let Some(run) = self.iov.first() {
            prefetch(run.base());
        }
        if let Some(run) = self.iov.get(self.writable.start as usize) {
            prefetch_write(run.base());
        }
    }

    /// Bytes that the device may read.
    #[inline]
    pub fn readable_len(&self) -> u32 {
        self.readable.bytes
    }

    /// Bytes that the device may write.
    #[inline]
    pub fn writable_len(&self) -> u32 {
        self.writable.bytes
    }

    /// All device-readable runs.
    #[inline]
    pub fn readable(&self) -> Sg {
        self.sg(self.readable.start, self.readable.end, self.readable.bytes)
    }

    /// All device-writable runs.
    #[inline]
    pub fn writable(&self) -> Sg {
        self.sg(self.writable.start, self.writable.end, self.writable.bytes)
    }

    /// The readable runs before the split (none if there was no split).
    #[inline]
    pub fn readable_head(&self) -> Sg {
        self.sg(self.readable.start, self.readable.mid, self.readable.head)
    }

    /// The readable runs after the split (all if there was no split).
    #[inline]
    pub fn readable_tail(&self) -> Sg {
        let left = self.readable.bytes - self.readable.head;
        self.sg(self.readable.mid, self.readable.end, left)
    }

    /// The writable runs before the split (none if there was no split).
    #[inline]
    pub fn writable_head(&self) -> Sg {
        self.sg(self.writable.start, self.writable.mid, self.writable.head)
    }

    /// The writable runs after the split (all if there was no split).
    #[inline]
    pub fn writable_tail(&self) -> Sg {
        let left = self.writable.bytes - self.writable.head;
        self.sg(self.writable.mid, self.writable.end, left)
    }

    /// Splits the readable part after `bytes` bytes, once a chain. `false`: it is shorter, or was
    /// split before.
    #[inline]
    #[must_use]
    pub fn split_readable(&mut self, bytes: usize) -> bool {
        if self.readable.mid != self.readable.start {
            return false;
        }
        let Some((mid, grown)) = self.split(self.readable, bytes) else { return false };
        self.readable.mid = mid;
        self.readable.head = bytes as u32;
        if grown {
            self.readable.end += 1;
            self.writable.start += 1;
            self.writable.mid += 1;
            self.writable.end += 1;
        }
        true
    }

    /// Splits the writable part after `bytes` bytes, once a chain. `false`: it is shorter, or was
    /// split before.
    #[inline]
    #[must_use]
    pub fn split_writable(&mut self, bytes: usize) -> bool {
        if self.writable.mid != self.writable.start {
            return false;
        }
        let Some((mid, grown)) = self.split(self.writable, bytes) else { return false };
        self.writable.mid = mid;
        self.writable.head = bytes as u32;
        self.writable.end += u32::from(grown);
        true
    }

    /// Copies the first `header.len()` readable bytes out, once, and splits them off: what is
    /// left is [`Segments::readable_tail`]. `false`: the part is shorter; nothing changed.
    #[inline]
    #[must_use]
    pub fn take_header(&mut self, header: &mut [u8]) -> bool {
        if !self.split_readable(header.len()) {
            return false;
        }
        self.readable_head().copy_to_slice(0, header) == header.len()
    }

    /// Marks `len` writable bytes from byte `offset` in the dirty log, if migration is under way.
    /// Call it after they were written and before the chain is given back.
    #[inline]
    pub fn mark_written(&self, offset: usize, len: usize) {
        if let Some(memory) = &self.memory
            && memory.log().is_some()
        {
            self.mark_in(memory, offset, len);
        }
    }

    #[cold]
    fn mark_in(&self, memory: &GuestMemory, mut offset: usize, mut len: usize) {
        for run in &self.iov[self.writable.start as usize..self.writable.end as usize] {
            if len == 0 {
                return;
            }
            if offset >= run.len() {
                offset -= run.len();
                continue;
            }
            let part = len.min(run.len() - offset);
            memory.mark_dirty_host(run, offset, part);
            offset = 0;
            len -= part;
        }
    }

    #[inline]
    fn sg(&self, start: u32, end: u32, bytes: u32) -> Sg {
        // SAFETY: the entries are a part of an allocation that stays in place, the runs lie in memory that
        // `self.memory` keeps mapped, and the type's contract keeps both until the I/O is over. `bytes` is
        // their sum: `finish` has that of each part, and `split` cuts where it says.
        unsafe { Sg::with_len(&self.iov[start as usize..end as usize], bytes as usize) }
    }

    /// Makes `bytes` a boundary between two entries of `part`: its index, and whether an entry
    /// had to be inserted.
    #[inline]
    fn split(&mut self, part: Part, bytes: usize) -> Option<(u32, bool)> {
        if bytes > part.bytes as usize {
            return None;
        }
        let mut left = bytes;
        for at in part.start..part.end {
            if left == 0 {
                return Some((at, false));
            }
            let run = self.iov[at as usize];
            if left < run.len() {
                self.cut(at as usize, left);
                return Some((at + 1, true));
            }
            left -= run.len();
        }
        Some((part.end, false))
    }

    /// Cuts entry `at` in two after `bytes` bytes. There is room: one spare entry for each part,
    /// and each part is split at most once.
    fn cut(&mut self, at: usize, bytes: usize) {
        let run = self.iov[at];
        let end = self.writable.end as usize;
        self.iov.copy_within(at..end, at + 1);
        // SAFETY: both are parts of a run that is valid as long as the whole.
        let (head, tail) = unsafe {
            let rest = run.base().add(bytes);
            (IoVec::new(run.base(), bytes), IoVec::new(rest, run.len() - bytes))
        };
        self.iov[at] = head;
        self.iov[at + 1] = tail;
    }
}

/// Entries of one chain: a part of a block that no other room has. Stays in place when it is moved.
struct Room {
    at: NonNull<IoVec>,
    len: usize,
    /// Keeps the part allocated.
    _block: Arc<Block>,
}

/// An allocation, freed with its last room.
struct Block(NonNull<[IoVec]>);

// SAFETY: the block is plain memory; each part of it is reached through its one room only.
unsafe impl Send for Block {}
// SAFETY: as above; nothing is reached through the block itself.
unsafe impl Sync for Block {}
// SAFETY: a room is the only way to its part, as a box would be, and entries are Send.
unsafe impl Send for Room {}
// SAFETY: as above, and entries are Sync.
unsafe impl Sync for Room {}

impl Room {
    /// `count` rooms of `len` empty entries each.
    fn many(count: usize, len: usize) -> impl ExactSizeIterator<Item = Room> {
        let all = count.checked_mul(len).expect("a ring's room fits into memory");
        let block = NonNull::from(Box::leak(IoVec::empty(all)));
        let (start, block) = (block.cast::<IoVec>(), Arc::new(Block(block)));
        (0..count).map(move |n| {
            // SAFETY: n < count, so it lies within the allocation.
            let at = unsafe { start.add(n * len) };
            Room { at, len, _block: Arc::clone(&block) }
        })
    }
}

impl Deref for Room {
    type Target = [IoVec];

    #[inline(always)]
    fn deref(&self) -> &[IoVec] {
        // SAFETY: `len` entries that the block keeps, written before (zeros are a value) and reached
        // through this room only.
        unsafe { std::slice::from_raw_parts(self.at.as_ptr(), self.len) }
    }
}

impl DerefMut for Room {
    #[inline(always)]
    fn deref_mut(&mut self) -> &mut [IoVec] {
        // SAFETY: as above, and the room is borrowed alone.
        unsafe { std::slice::from_raw_parts_mut(self.at.as_ptr(), self.len) }
    }
}

impl Drop for Block {
    fn drop(&mut self) {
        // SAFETY: leaked by `Room::many` from a box, and no room is left.
        drop(unsafe { Box::from_raw(self.0.as_ptr()) });
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rooms_are_apart_and_outlive_each_other() {
        let mut rooms: Vec<Room> = Room::many(3, 4).collect();
        assert!(rooms.iter().all(|room| room.len() == 4 && room.iter().all(IoVec::is_empty)));
        let mut byte = 7;
        // SAFETY: never used.
        rooms[1].fill(unsafe { IoVec::new(&raw mut byte, 1) });
        let last = rooms.pop().unwrap();
        assert!(rooms[0].iter().chain(&*last).all(IoVec::is_empty));
        assert!(rooms[1].iter().all(|run| run.len() == 1));
        drop(rooms);
        assert_eq!(last.len(), 4);
        assert_eq!(Room::many(0, 4).len(), 0);
    }
}
