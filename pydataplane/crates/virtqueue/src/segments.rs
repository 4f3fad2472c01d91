//! The memory of one chain.

use std::fmt;
use std::ops::{Deref, DerefMut};
use std::ptr::NonNull;
use std::sync::Arc;

use guestmem::{GuestMemory, IoVec, Sg, prefetch, prefetch_write};

/// Runs that one chain may have: virtio-scsi's seg_max of 126 data runs, header and response,
/// and room for runs that cross regions.
pub const MAX_SEGMENTS: usize = 136;
/// Entries beyond the limit, for two cuts of each part.
const SPLITS: usize = 4;

/// One part of a chain: entries `start..end`, of `bytes` bytes.
#[derive(Clone, Copy, Debug, Default)]
struct Part {
    start: u32,
    end: u32,
    bytes: u32,
}

/// Both parts of a chain, or what was left of them, each cut in two: see [`Segments::split`].
#[derive(Clone, Copy, Debug)]
pub struct Halves {
    /// The device-readable runs before the cut, and those after it.
    pub readable: (Sg, Sg),
    /// The device-writable runs before the cut, and those after it.
    pub writable: (Sg, Sg),
}

/// What a walk along a chain has found of one part.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Gathered {
    pub(crate) runs: u32,
    pub(crate) bytes: u64,
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
    /// Entries of a chain that is being walked.
    pushed: usize,
    readable: Part,
    writable: Part,
    /// What of both is behind the last cut.
    left: (Part, Part),
    cuts: u8,
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

    /// `count` times room for a chain of `limit` runs, in one allocation whose pages the
    /// system provides when they are first used: most rings never hold as many runs as they could.
    pub fn many(count: usize, limit: usize) -> impl ExactSizeIterator<Item = Segments> {
        Room::many(count, limit + SPLITS).map(Segments::of)
    }

    fn of(iov: Room) -> Segments {
        let (readable, writable) = (Part::default(), Part::default());
        let left = (readable, writable);
        Segments { iov, pushed: 0, readable, writable, left, cuts: 0, memory: None }
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
        self.cuts = 0;
        self.memory = None;
    }

    /// Starts a chain in `memory`; until [`Segments::finish`] it is an empty one.
    #[inline(always)]
    pub(crate) fn begin(&mut self, memory: &Arc<GuestMemory>) {
        self.readable = Part::default();
        self.writable = Part::default();
        (self.pushed, self.cuts) = (0, 0);
        if !self.memory.as_ref().is_some_and(|m| Arc::ptr_eq(m, memory)) {
            self.memory = Some(Arc::clone(memory));
        }
    }

    /// Appends a run; the caller keeps readable before writable. `false`: too many.
    #[inline(always)]
    pub(crate) fn push(&mut self, run: IoVec) -> bool {
        if self.pushed >= self.limit() {
            return false;
        }
        self.iov[self.pushed] = run;
        self.pushed += 1;
        true
    }

    /// Ends a chain that has these two parts, each less than 4 GiB, and prefetches where they begin.
    #[inline(always)]
    pub(crate) fn finish(&mut self, readable: Gathered, writable: Gathered) {
        debug_assert_eq!(readable.runs as usize + writable.runs as usize, self.pushed);
        let (mid, end) = (readable.runs, readable.runs + writable.runs);
        self.readable = Part { start: 0, end: mid, bytes: readable.bytes as u32 };
        self.writable = Part { start: mid, end, bytes: writable.bytes as u32 };
        if let Some(run) = self.iov.first() {
            prefetch(run.base());
        }
        if let Some(run) = self.iov.get(mid as usize) {
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
        self.sg(self.readable)
    }

    /// All device-writable runs.
    #[inline]
    pub fn writable(&self) -> Sg {
        self.sg(self.writable)
    }

    /// Cuts the readable part after `readable` bytes and the writable one after `writable`, once a chain.
    /// `None`: one of them is shorter, or they were cut before; nothing changed.
    #[inline]
    pub fn split(&mut self, readable: usize, writable: usize) -> Option<Halves> {
        let enough =
            readable <= self.readable.bytes as usize && writable <= self.writable.bytes as usize;
        if self.cuts != 0 || !enough {
            return None;
        }
        Some(self.cut_both((self.readable, self.writable), (readable, writable)))
    }

    /// Cuts what [`Segments::split`] has left of both parts, once a chain: the device-writable list before
    /// that cut is of no use any more. `None`: one of them is shorter, there was no first cut, or there was
    /// a second one; nothing changed.
    pub fn split_again(&mut self, readable: usize, writable: usize) -> Option<Halves> {
        let left = self.left;
        let enough = readable <= left.0.bytes as usize && writable <= left.1.bytes as usize;
        if self.cuts != 1 || !enough {
            return None;
        }
        Some(self.cut_both(left, (readable, writable)))
    }

    #[inline(always)]
    fn cut_both(&mut self, parts: (Part, Part), bytes: (usize, usize)) -> Halves {
        self.cuts += 1;
        let (mut first, mut second) = parts;
        let (mut at, grown) = self.cut(second, bytes.1);
        second.end += grown;
        self.writable.end += grown;
        let (readable_at, grown) = self.cut(first, bytes.0);
        // The writable part lies behind.
        first.end += grown;
        self.readable.end += grown;
        (second.start, second.end, at) = (second.start + grown, second.end + grown, at + grown);
        (self.writable.start, self.writable.end) =
            (self.writable.start + grown, self.writable.end + grown);
        let halves = |part: Part, at: u32, bytes: usize| {
            let head = Part { start: part.start, end: at, bytes: bytes as u32 };
            (head, Part { start: at, end: part.end, bytes: part.bytes - bytes as u32 })
        };
        let (readable, writable) =
            (halves(first, readable_at, bytes.0), halves(second, at, bytes.1));
        self.left = (readable.1, writable.1);
        Halves {
            readable: (self.sg(readable.0), self.sg(readable.1)),
            writable: (self.sg(writable.0), self.sg(writable.1)),
        }
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
    fn sg(&self, part: Part) -> Sg {
        // SAFETY: the entries are a part of an allocation that stays in place, the runs lie in memory that
        // `self.memory` keeps mapped, and the type's contract keeps both until the I/O is over. `bytes` is
        // their sum: `finish` has that of each part, and `split` cuts where it says.
        unsafe {
            let runs = &self.iov[part.start as usize..part.end as usize];
            Sg::with_len(runs, part.bytes as usize)
        }
    }

    /// Makes `bytes`, no more than `part` has, a boundary between two of its entries: the index of the one
    /// behind it, and how many entries were inserted. There is room: two spare entries for each part, and
    /// each part is cut at most twice.
    #[inline]
    fn cut(&mut self, part: Part, bytes: usize) -> (u32, u32) {
        let mut left = bytes;
        for at in part.start..part.end {
            if left == 0 {
                return (at, 0);
            }
            let run = self.iov[at as usize];
            if left < run.len() {
                let (at, end) = (at as usize, self.writable.end as usize);
                self.iov.copy_within(at..end, at + 1);
                // SAFETY: both are parts of a run that is valid as long as the whole.
                let (head, tail) = unsafe {
                    let rest = run.base().add(left);
                    (IoVec::new(run.base(), left), IoVec::new(rest, run.len() - left))
                };
                (self.iov[at], self.iov[at + 1]) = (head, tail);
                return (at as u32 + 1, 1);
            }
            left -= run.len();
        }
        (part.end, 0)
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
