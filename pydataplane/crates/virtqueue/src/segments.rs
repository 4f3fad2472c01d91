//! The memory of one chain: gathered by a walk along its descriptors, and cut into headers and data.

use std::fmt;
use std::ops::{Deref, DerefMut};
use std::ptr::NonNull;
use std::sync::Arc;

use guestmem::{GuestMemory, IoVec, Sg, prefetch, prefetch_write};

use crate::chain::{ChainError, DESC_LEN, Desc, Head};
use crate::queue::SplitQueue;

/// Runs that one chain may have: virtio-scsi's seg_max of 126 data runs, header and response,
/// and room for runs that cross regions.
pub const MAX_SEGMENTS: usize = 136;
/// Cuts of each part of a chain, at most.
const CUTS: usize = 2;
/// Entries beyond the limit: behind each part one for each cut.
const SPARE: usize = 2 * CUTS;

/// One part of a chain, or what a cut has made of it: entries `start..end`, of `bytes` bytes.
#[derive(Clone, Copy, Debug, Default)]
struct Part {
    start: usize,
    end: usize,
    bytes: usize,
}

/// Which part.
const READABLE: usize = 0;
const WRITABLE: usize = 1;

/// Both parts of a chain, or what was left of them, each cut in two: see [`Segments::split`].
#[derive(Clone, Copy, Debug)]
pub struct Halves {
    /// The device-readable runs before the cut, and those after it.
    pub readable: (Sg, Sg),
    /// The device-writable runs before the cut, and those after it.
    pub writable: (Sg, Sg),
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
    parts: [Part; 2],
    /// What of both is behind the last cut.
    left: [Part; 2],
    cuts: usize,
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

impl SplitQueue {
    /// Walks the chain of `head` into `segments`. On an error these have nothing of the chain, of which
    /// nothing may be used; give it back with `push_used(head, 0)`, unless it is [`ChainError::BadHead`].
    ///
    /// A descriptor beyond its table, whose index the driver wrote, is found by the table's own range; a
    /// circle by the number of descriptors that the table has.
    #[inline]
    pub fn walk(&self, head: &Head, segments: &mut Segments) -> Result<(), ChainError> {
        (segments.parts, segments.left, segments.cuts) = Default::default();
        if head.index >= self.size {
            return Err(ChainError::BadHead { head: head.index, size: self.size });
        }
        // Before any run of it stands in the list.
        if !segments.memory.as_ref().is_some_and(|memory| Arc::ptr_eq(memory, &self.memory)) {
            segments.memory = Some(Arc::clone(&self.memory));
        }
        let limit = segments.limit();
        let mut table = self.desc;
        let mut left = u32::from(self.size);
        let mut within_indirect = false;
        let mut desc = head.first;
        let (mut parts, mut which, mut runs) = ([Part::default(); 2], READABLE, 0);
        loop {
            let (addr, len, flags) = (desc.addr(), desc.len(), desc.flags());
            if flags & Desc::INDIRECT != 0 {
                if within_indirect {
                    return Err(ChainError::NestedIndirect);
                }
                if !self.indirect {
                    return Err(ChainError::IndirectNotNegotiated);
                }
                if flags & Desc::NEXT != 0 {
                    return Err(ChainError::IndirectWithNext);
                }
                // WRITE is ignored here, as 2.7.5.3.2 says.
                if len == 0 || len % DESC_LEN as u32 != 0 {
                    return Err(ChainError::IndirectLength(len));
                }
                let bad = ChainError::BadAddress { addr, len };
                let run = self.memory.run(addr, u64::from(len));
                table = run.filter(|run| run.len() == len as usize).ok_or(bad)?;
                within_indirect = true;
                left = len / DESC_LEN as u32;
                desc = table.get(0).map_err(|_| bad)?;
                continue;
            }
            if len == 0 {
                return Err(ChainError::ZeroLength);
            }
            match (flags & Desc::WRITE != 0, which) {
                (true, READABLE) => {
                    which = WRITABLE;
                    parts[WRITABLE].start = parts[READABLE].end + CUTS;
                    parts[WRITABLE].end = parts[WRITABLE].start;
                }
                (false, WRITABLE) => return Err(ChainError::ReadableAfterWritable),
                _ => {}
            }
            let part = &mut parts[which];
            let (mut at, mut rest) = (addr, u64::from(len));
            while rest > 0 {
                // A buffer goes on in the next region, and never around the end of all addresses.
                let run = self.memory.run(at, rest).filter(|_| at >= addr);
                let run = run.ok_or(ChainError::BadAddress { addr, len })?;
                (at, rest) = (at.wrapping_add(run.len() as u64), rest - run.len() as u64);
                if runs == limit {
                    return Err(ChainError::TooManySegments { limit: limit as u32 });
                }
                // SAFETY: `Segments` keeps the memory that the run came from.
                segments.iov[part.end] = unsafe { run.to_iovec() };
                (part.end, runs) = (part.end + 1, runs + 1);
            }
            part.bytes += len as usize;
            if flags & Desc::NEXT == 0 {
                break;
            }
            left -= 1;
            if left == 0 {
                return Err(ChainError::Loop);
            }
            let next = desc.next();
            let bad = || ChainError::BadNext { next, size: (table.len() / DESC_LEN) as u32 };
            desc = table.get(usize::from(next) * DESC_LEN).map_err(|_| bad())?;
        }
        if parts[READABLE].bytes + parts[WRITABLE].bytes > u32::MAX as usize {
            return Err(ChainError::TooLong);
        }
        (segments.parts, segments.left) = (parts, parts);
        prefetch(segments.iov[parts[READABLE].start].base());
        prefetch_write(segments.iov[parts[WRITABLE].start].base());
        Ok(())
    }
}

impl Segments {
    /// Room for a chain of [`MAX_SEGMENTS`] runs.
    pub fn new() -> Segments {
        Segments::with_limit(MAX_SEGMENTS)
    }

    /// Room for a chain of `limit` runs.
    pub fn with_limit(limit: usize) -> Segments {
        Segments::of(Room::many(1, limit + SPARE).next().expect("one was asked for"))
    }

    /// `count` times room for a chain of `limit` runs, in one allocation whose pages the
    /// system provides when they are first used: most rings never hold as many runs as they could.
    pub fn many(count: usize, limit: usize) -> impl ExactSizeIterator<Item = Segments> {
        Room::many(count, limit + SPARE).map(Segments::of)
    }

    fn of(iov: Room) -> Segments {
        let (parts, left) = Default::default();
        Segments { iov, parts, left, cuts: 0, memory: None }
    }

    /// Runs that a chain may have.
    #[inline]
    pub fn limit(&self) -> usize {
        self.iov.len() - SPARE
    }

    /// Forgets the chain and lets go of the guest memory (when the memory table changes).
    pub fn clear(&mut self) {
        (self.parts, self.left, self.cuts) = Default::default();
        self.memory = None;
    }

    /// Bytes that the device may read.
    #[inline]
    pub fn readable_len(&self) -> u32 {
        self.parts[READABLE].bytes as u32
    }

    /// Bytes that the device may write.
    #[inline]
    pub fn writable_len(&self) -> u32 {
        self.parts[WRITABLE].bytes as u32
    }

    /// All device-readable runs.
    #[inline]
    pub fn readable(&self) -> Sg {
        self.sg(self.parts[READABLE])
    }

    /// All device-writable runs.
    #[inline]
    pub fn writable(&self) -> Sg {
        self.sg(self.parts[WRITABLE])
    }

    /// Cuts what is left of both parts, of a new chain all of them: the readable one after `readable` bytes
    /// and the writable one after `writable`, for a first and a second header. `None`: one of them is
    /// shorter, or both headers were cut off before; nothing changed.
    #[inline]
    pub fn split(&mut self, readable: usize, writable: usize) -> Option<Halves> {
        let [first, second] = &self.left;
        if self.cuts == CUTS || readable > first.bytes || writable > second.bytes {
            return None;
        }
        self.cuts += 1;
        let readable = self.cut(READABLE, readable);
        let writable = self.cut(WRITABLE, writable);
        Some(Halves { readable, writable })
    }

    /// Cuts what is left of a part after `bytes` bytes, no more than it has. A run that is on both sides
    /// becomes two, for which there is a spare entry.
    #[inline(always)]
    fn cut(&mut self, which: usize, bytes: usize) -> (Sg, Sg) {
        let left = self.left[which];
        let (mut at, mut end, mut rest) = (left.start, left.end, bytes);
        while rest > 0 {
            let run = self.iov[at];
            at += 1;
            if rest < run.len() {
                self.iov.copy_within(at..end, at + 1);
                end += 1;
                // SAFETY: both are parts of a run that is valid as long as the whole.
                (self.iov[at - 1], self.iov[at]) = unsafe {
                    let behind = run.base().add(rest);
                    (IoVec::new(run.base(), rest), IoVec::new(behind, run.len() - rest))
                };
                break;
            }
            rest -= run.len();
        }
        let head = Part { start: left.start, end: at, bytes };
        let tail = Part { start: at, end, bytes: left.bytes - bytes };
        (self.left[which], self.parts[which].end) = (tail, end);
        (self.sg(head), self.sg(tail))
    }

    #[inline]
    fn sg(&self, part: Part) -> Sg {
        // SAFETY: the entries are a part of an allocation that stays in place, the runs lie in memory that
        // `self.memory` keeps mapped, and the type's contract keeps both until the I/O is over. `bytes` is
        // their sum: `walk` has that of each part, and `cut` divides it where it says.
        unsafe { Sg::with_len(&self.iov[part.start..part.end], part.bytes) }
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
        let part = self.parts[WRITABLE];
        for run in &self.iov[part.start..part.end] {
            if len == 0 {
                return;
            }
            if offset >= run.len() {
                offset -= run.len();
                continue;
            }
            let marked = len.min(run.len() - offset);
            memory.mark_dirty_host(run, offset, marked);
            offset = 0;
            len -= marked;
        }
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
