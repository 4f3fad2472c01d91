//! Unmaps and zeroing of ranges of a file, which go to the kernel part by part.
//!
//! A fallocate holds the file's lock, for which all its reads and writes wait, for as long as it finds
//! extents: seen on ext4 with `discard`, 1 to 4 ms for each, so a second and more for 1 GiB of a file in
//! 4,000 pieces, and 8 s for 16 MiB in pieces of 4 KiB. Part by part, the others have their turn in
//! between. How long a part may be is found out by how long the last one took: where there is little to
//! free, a call takes some microseconds, whatever its length.
//!
//! In its owner's share of a disk a part is one request, and the next one has its turn behind all others of
//! the owner's: who unmaps much takes no more of the disk than who reads, and its own reads go on.
//!
//! Parts end at multiples of their length, so they cut no block of a file system. A block device knows no
//! such lock, and may free larger units than those: its ranges go as they are.

use super::{Shared, Slot};
use crate::Op;

/// Bytes of the first part of a range, at most.
const FIRST: u64 = 256 << 10;
/// Bytes that a part may always have.
const LEAST: u64 = 64 << 10;
/// Bytes of a part at most.
const MOST: u64 = 8 << 20;
/// One that took less, in microseconds, is followed by one of four times its length.
const QUICK_US: u64 = 2_000;
/// One that took more, in microseconds, is followed by one of a quarter of its length.
const SLOW_US: u64 = 10_000;

/// The parts of a range.
#[derive(Clone, Copy)]
pub(super) struct Parts {
    /// Bytes of the next one at most, a power of two.
    most: u64,
    /// Bytes of that in the kernel.
    len: u64,
}

impl Parts {
    /// Nothing was handed over.
    pub(super) const NONE: Parts = Parts { most: FIRST, len: 0 };

    /// Bytes of the part in the kernel.
    pub(super) fn len(&self) -> u64 {
        self.len
    }

    /// The next part, of the `left` bytes (at least one) at `offset`.
    fn next(&mut self, offset: u64, left: u64) {
        self.len = left.min(self.most - offset % self.most);
    }

    /// The part in the kernel took so many microseconds.
    fn took(&mut self, us: u64) {
        if us > SLOW_US {
            self.most = (self.most / 4).max(LEAST);
        } else if us < QUICK_US {
            self.most = (self.most * 4).min(MOST);
        }
    }
}

impl Slot {
    /// Whether its step is a fallocate.
    #[inline]
    pub(super) fn is_range(&self) -> bool {
        matches!(self.io.op, Op::Unmap | Op::WriteZeroes) && self.step == super::Step::Plain
    }

    /// Settles which part of a range goes to the kernel now.
    pub(super) fn next_part(&mut self, shared: &Shared) {
        let block = u64::from(shared.block_size);
        let left = self.io.blocks * block - self.done;
        if shared.ranges_whole {
            self.parts.len = left;
        } else {
            self.parts.next(self.io.lba * block + self.done, left);
        }
        self.sent = reactor::ticks::now();
    }

    /// The part in the kernel is done.
    pub(super) fn part_done(&mut self) {
        let took = reactor::ticks::now().saturating_sub(self.sent);
        self.parts.took(reactor::ticks::to_ns(took) / 1000);
        self.done += self.parts.len;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The lengths of the parts of a range, each of which takes so long.
    fn lens(mut offset: u64, mut left: u64, us: impl Fn(u64) -> u64) -> Vec<u64> {
        let mut parts = Parts::NONE;
        let mut lens = Vec::new();
        while left > 0 {
            parts.next(offset, left);
            parts.took(us(parts.len));
            (offset, left) = (offset + parts.len, left - parts.len);
            lens.push(parts.len);
        }
        lens
    }

    #[test]
    fn parts_are_longer_where_they_are_quick() {
        let lens = lens(0, 1 << 30, |_| 5);
        assert_eq!(lens[..4], [FIRST, 3 * FIRST, 3 << 20, 4 << 20]);
        assert!(lens[4..].iter().all(|len| *len == MOST), "{lens:?}");
    }

    #[test]
    fn parts_are_shorter_where_they_are_slow() {
        // Of extents of 4 KiB, each of which takes 2 ms.
        let lens = lens(0, 16 << 20, |len| (len >> 12) * 2000);
        assert_eq!(lens[1..], vec![LEAST; 252], "after one of {}", lens[0]);
    }

    #[test]
    fn parts_cover_a_range_and_end_at_multiples_of_64_kib() {
        for (offset, left) in [(512, 1), (4096, 100 << 20), (LEAST - 512, 1024), (7 << 20, 9 << 20)]
        {
            let lens = lens(offset, left, |len| (len * 7919) % 20_000);
            assert_eq!(lens.iter().sum::<u64>(), left);
            let mut at = offset;
            for len in &lens[..lens.len() - 1] {
                at += len;
                assert_eq!(at % LEAST, 0, "{lens:?}");
            }
        }
    }
}
