//! Room for the runs of many chains, in one allocation.

use std::ops::{Deref, DerefMut};
use std::ptr::NonNull;
use std::sync::Arc;

use guestmem::IoVec;

/// Entries of one chain: a part of a block that no other room has. Stays in place when it is moved.
pub(crate) struct Room {
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
    pub(crate) fn many(count: usize, len: usize) -> impl ExactSizeIterator<Item = Room> {
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
