//! A part of an I/O: blocks of one region, that are read or changed together.

use crate::format;
use crate::layout::{BlockLocation, PAGE, REGION_BLOCKS};
use crate::table::{Page, Table};
use bdev::{COPY_AT_ONCE, Io, Op, Pieces};
use std::sync::atomic::Ordering;

/// Blocks of a part that has data.
pub(super) const PART_BLOCKS: usize = COPY_AT_ONCE / PAGE;

/// The entry of a block of zeros.
pub(crate) const ZEROS: u32 = 0x98f9_4189;

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) enum Kind {
    /// Blocks are read and verified.
    #[default]
    Read,
    /// The same while they are held: they did not match.
    Recheck,
    /// A block that is changed in part is read and verified, and held.
    Merge,
    /// Blocks are written.
    Write,
    /// They are made zeros.
    Zero,
    /// They are deallocated.
    Unmap,
}

#[derive(Clone, Copy, Debug)]
pub(super) struct Part {
    pub kind: Kind,
    /// The slot of its I/O.
    pub slot: u16,
    /// The cache page of its region, pinned.
    pub page: u16,
    /// Where its first block is.
    pub location: BlockLocation,
    /// Blocks.
    pub count: u16,
    /// Bytes of the first block before what it is about.
    pub skip: usize,
    /// Where that begins in its I/O, in bytes.
    pub from: usize,
    /// Its bytes.
    pub bytes: usize,
    /// It is under way, and so pins its page.
    pub used: bool,
    /// It is a change that was admitted.
    pub admitted: bool,
    /// It holds its blocks.
    pub held: bool,
    /// Entries of what is written.
    pub entries: [u32; PART_BLOCKS],
}

impl Default for Part {
    fn default() -> Self {
        Part {
            kind: Kind::Read,
            slot: 0,
            page: 0,
            location: BlockLocation { region: 0, index: 0, page: 0 },
            count: 0,
            skip: 0,
            from: 0,
            bytes: 0,
            used: false,
            admitted: false,
            held: false,
            entries: [0; PART_BLOCKS],
        }
    }
}

impl Part {
    /// What can be done at a time of `left` bytes that begin `skip` bytes into the block at `location`; the
    /// base takes `longest` blocks. A block that is changed in part is a part of its own.
    pub fn cut(op: Op, location: BlockLocation, skip: usize, left: u64, longest: u64) -> Part {
        let block = PAGE as u64;
        let within =
            (REGION_BLOCKS - location.index).min(u16::try_from(longest).unwrap_or(u16::MAX));
        let data = within.min(PART_BLOCKS as u16);
        let in_part = skip != 0 || left < block;
        let (kind, count) = match op {
            Op::Read => {
                let wanted = (skip as u64 + left).div_ceil(block);
                (Kind::Read, wanted.min(u64::from(data)))
            }
            _ if in_part => (Kind::Merge, 1),
            Op::WriteZeroes => (Kind::Zero, (left / block).min(u64::from(within))),
            Op::Unmap => (Kind::Unmap, (left / block).min(u64::from(within))),
            Op::Write | Op::Flush => (Kind::Write, (left / block).min(u64::from(data))),
        };
        let bytes = (count * block - skip as u64).min(left) as usize;
        Part { kind, location, count: count as u16, skip, bytes, used: true, ..Part::default() }
    }

    /// Memory that it needs, in bytes; a piece has some in any case.
    pub fn memory(&self) -> usize {
        match self.kind {
            Kind::Zero | Kind::Unmap => PAGE,
            _ => usize::from(self.count) * PAGE,
        }
    }

    /// There is memory for so many bytes only.
    pub fn fit(&mut self, memory: usize) {
        if memory < self.memory() {
            self.count = (memory / PAGE) as u16;
            self.bytes = self.bytes.min(usize::from(self.count) * PAGE - self.skip);
        }
    }

    /// What the base is asked for.
    pub fn op(&self) -> Op {
        match self.kind {
            Kind::Read | Kind::Recheck | Kind::Merge => Op::Read,
            Kind::Write => Op::Write,
            Kind::Zero => Op::WriteZeroes,
            Kind::Unmap => Op::Unmap,
        }
    }

    /// Copies what `io` writes into its memory, and takes the checksums of that.
    pub fn take_data(&mut self, pieces: &mut Pieces, piece: u16, io: &Io) {
        let (skip, from, bytes) = (self.skip, self.from, self.bytes);
        let entries = &mut self.entries;
        let done = pieces.each::<()>(piece, |begin, block| {
            let (first, end) = within(begin, skip, bytes);
            let wanted = &mut block[first..end];
            match io.op {
                Op::Write => _ = io.sg.copy_to_slice(from + begin + first - skip, wanted),
                _ => wanted.fill(0),
            }
            entries[begin / PAGE] = format::entry(block);
            Ok(())
        });
        debug_assert!(done.is_ok());
    }

    /// Verifies what was read, and copies what `io` reads.
    ///
    /// # Errors
    /// The number of a block that is not what its entry says; those before it were copied.
    pub fn verify(
        &self,
        pieces: &mut Pieces,
        piece: u16,
        page: &Page,
        io: &Io,
    ) -> Result<(), usize> {
        pieces.each(piece, |begin, block| {
            let nth = begin / PAGE;
            let entry = page.entry(usize::from(self.location.index) + nth);
            if entry != 0 && entry != format::entry(block) {
                return Err(nth);
            }
            if io.op == Op::Read {
                let (first, end) = within(begin, self.skip, self.bytes);
                io.sg.copy_from_slice(self.from + begin + first - self.skip, &block[first..end]);
            }
            Ok(())
        })
    }

    /// Sets the entries of what it changed. Where that failed nobody knows what is there.
    pub fn set_entries(&self, table: &Table, well: bool, unmap_zeroes: bool) {
        if !self.used || !self.admitted || !self.held || self.kind == Kind::Merge {
            return;
        }
        let page = table.page(self.page);
        page.changed.store(true, Ordering::Release);
        page.last.store(table.clock.load(Ordering::Relaxed), Ordering::Relaxed);
        for nth in 0..self.count {
            let entry = match self.kind {
                _ if !well => 0,
                Kind::Write => self.entries[usize::from(nth)],
                Kind::Zero => ZEROS,
                Kind::Unmap if unmap_zeroes => ZEROS,
                _ => 0,
            };
            page.set_entry(usize::from(self.location.index + nth), entry);
        }
    }

    /// Takes its blocks for a change, if nobody has one of them.
    pub fn hold(&self, page: &Page) -> bool {
        page.holds.hold(u32::from(self.location.index), u32::from(self.count))
    }

    /// Lets go of its blocks and its page.
    pub fn release(&mut self, table: &Table) {
        if !std::mem::take(&mut self.used) {
            return;
        }
        let page = table.page(self.page);
        if std::mem::take(&mut self.held) {
            page.holds.let_go(u32::from(self.location.index), u32::from(self.count));
        }
        if std::mem::take(&mut self.admitted) {
            page.gate.leave();
        }
        page.unpin();
    }
}

/// Bytes of the block that begins `begin` bytes into a part, of what begins `skip` bytes into it and is
/// `bytes` long.
fn within(begin: usize, skip: usize, bytes: usize) -> (usize, usize) {
    let (first, end) = (skip.max(begin), (skip + bytes).min(begin + PAGE));
    (first - begin, end.max(first) - begin)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::layout::locate;

    #[test]
    fn a_part_ends_with_its_region_and_a_block_changed_in_part_is_alone() {
        let cut = |op, block, skip, left, longest| {
            let part = Part::cut(op, locate(block), skip, left, longest);
            (part.kind, part.count, part.bytes)
        };
        let all = u64::MAX;
        assert_eq!(cut(Op::Read, 0, 512, 512, all), (Kind::Read, 1, 512));
        assert_eq!(cut(Op::Read, 0, 512, 4096, all), (Kind::Read, 2, 4096));
        assert_eq!(cut(Op::Read, 0, 0, 1 << 20, all), (Kind::Read, 16, 65536));
        assert_eq!(cut(Op::Read, 1000, 512, 1 << 20, all), (Kind::Read, 8, 8 * 4096 - 512));
        assert_eq!(cut(Op::Write, 7, 512, 1 << 20, all), (Kind::Merge, 1, 3584));
        assert_eq!(cut(Op::Write, 7, 0, 4095, all), (Kind::Merge, 1, 4095));
        assert_eq!(cut(Op::Write, 7, 0, 3 * 4096 + 512, all), (Kind::Write, 3, 3 * 4096));
        assert_eq!(cut(Op::Write, 7, 0, 1 << 20, 4), (Kind::Write, 4, 4 * 4096));
        assert_eq!(cut(Op::Unmap, 1, 0, 1 << 30, all), (Kind::Unmap, 1007, 1007 * 4096));
        assert_eq!(cut(Op::WriteZeroes, 1, 512, 512, all), (Kind::Merge, 1, 512));
    }

    #[test]
    fn the_entry_of_zeros_is_that() {
        assert_eq!(format::entry(&[0; PAGE]), ZEROS);
    }

    #[test]
    fn what_is_meant_of_each_block() {
        assert_eq!(within(0, 512, 1024), (512, 1536));
        assert_eq!(within(0, 512, 8192), (512, 4096));
        assert_eq!(within(4096, 512, 8192), (0, 4096));
        assert_eq!(within(8192, 512, 8192), (0, 512));
    }
}
