//! The pieces that a layer does I/Os in, each with memory of that layer's own, which the channel below
//! gets: for one that changes data on its way, or has to see it before a guest does.

use crate::{AlignedBuf, COPY_AT_ONCE, Channel, Completion, Io, IoError, Op, Run, Slots, Submit};
use guestmem::{IoVec, Sg};

/// Pieces that a channel can have under way.
pub const PIECES: u16 = 256;

/// Marks the tag of a piece's I/O, among those of the channel below.
const PIECE_TAG: u64 = 1 << 32;

/// Bytes that memory is taken in: a page, in which whole blocks fit. Of blocks that do not fit into a page
/// without a rest, it is as many as do, or one.
const UNIT: usize = 4096;

/// Such units of a channel, taken from the system when they are first used.
pub(crate) const UNITS: u16 = 1024;

/// Units of one piece, so that it is encrypted or decrypted within a turn.
const PIECE_UNITS: usize = COPY_AT_ONCE / UNIT;

#[derive(Clone, Copy)]
struct Piece {
    /// The slot of its I/O.
    slot: u16,
    /// Where in its I/O it begins, in blocks.
    cursor: u64,
    bytes: usize,
    /// Numbers of its units, as many as its bytes need.
    units: [u16; PIECE_UNITS],
    taken: bool,
    /// The channel below has it.
    given: bool,
}

impl Piece {
    fn units(&self, unit: usize) -> &[u16] {
        &self.units[..self.bytes.div_ceil(unit)]
    }
}

/// A channel that is gone.
struct Gone;

impl Channel for Gone {
    fn submit(&mut self, _: &Io) -> Submit {
        Submit::Done(Err(IoError::Removed))
    }

    fn poll(&mut self, _: &mut Vec<Completion>) -> u32 {
        0
    }
}

/// All pieces of a channel, allocated when it is opened, and the channel below, which it owns, so that
/// their memory outlives what that does with it.
pub struct Pieces {
    /// Dropped first: it waits for what is in flight.
    below: Box<dyn Channel>,
    /// I/Os that it has.
    in_flight: u32,
    pieces: Slots<Piece>,
    /// [`PIECE_UNITS`] of each piece.
    runs: Box<[IoVec]>,
    /// The last one is taken next: it is the likeliest to be in the processor's cache.
    free: Vec<u16>,
    /// Bytes of a unit.
    unit: usize,
    /// The first unit.
    base: *mut u8,
    /// Only `base` is used: a reference to all of it would be to what the kernel writes, too.
    _memory: AlignedBuf,
}

impl Pieces {
    /// None under way, on `below`.
    pub fn new(below: Box<dyn Channel>) -> Self {
        Pieces::of_blocks(below, UNIT)
    }

    /// As [`Pieces::new`], for blocks of so many bytes: none lies in two parts of a piece's memory.
    pub fn of_blocks(below: Box<dyn Channel>, block: usize) -> Self {
        let unit = (UNIT / block * block).max(block);
        let units = [0; PIECE_UNITS];
        let piece = |_| Piece { slot: 0, cursor: 0, bytes: 0, units, taken: false, given: false };
        let mut memory = AlignedBuf::untouched(usize::from(UNITS) * unit);
        Pieces {
            below,
            in_flight: 0,
            pieces: Slots::new(PIECES, piece),
            runs: IoVec::empty(usize::from(PIECES) * PIECE_UNITS),
            free: (0..UNITS).rev().collect(),
            unit,
            base: memory.as_mut_ptr(),
            _memory: memory,
        }
    }

    /// Bytes that a piece has at most.
    pub fn longest(&self) -> usize {
        PIECE_UNITS * self.unit
    }

    /// Takes a piece of the I/O of `slot`, from its block `cursor` on, with memory for `bytes` bytes (at
    /// least one, whole blocks), or for as many of them as there is room for. `None`: there is none.
    pub fn take(&mut self, slot: u16, cursor: u64, bytes: usize) -> Option<u16> {
        let unit = self.unit;
        let count = bytes.div_ceil(unit).min(PIECE_UNITS).min(self.free.len());
        if count == 0 {
            return None;
        }
        let at = self.pieces.take()?;
        let piece = &mut self.pieces[at];
        debug_assert!(!piece.taken);
        *piece = Piece {
            slot,
            cursor,
            bytes: bytes.min(count * unit),
            units: [0; PIECE_UNITS],
            taken: true,
            given: false,
        };
        let runs = &mut self.runs[usize::from(at) * PIECE_UNITS..][..count];
        let mut left = piece.bytes;
        for (number, run) in piece.units.iter_mut().zip(runs) {
            *number = self.free.pop().expect("there are so many");
            let len = left.min(unit);
            // SAFETY: the unit is within the memory, which outlives all I/O of the channel below: that is
            // dropped first, and waits for what it has in flight.
            *run = unsafe { IoVec::new(self.base.add(usize::from(*number) * unit), len) };
            left -= len;
        }
        Some(at)
    }

    /// Gives a piece to the channel below: `io` with its memory as the data, if that has data. Where it is
    /// pending it is told by [`Pieces::poll`].
    pub fn submit(&mut self, at: u16, io: &Io) -> Submit {
        let sg = match io.op {
            Op::Read | Op::Write => self.sg(at),
            Op::Flush | Op::Unmap | Op::WriteZeroes => Sg::EMPTY,
        };
        let submit = self.below.submit(&Io { sg, tag: PIECE_TAG | u64::from(at), ..*io });
        if submit == Submit::Pending {
            self.pieces[at].given = true;
            self.in_flight += 1;
        }
        submit
    }

    /// Gives an I/O as it is, with a tag below 2^32, to the channel below.
    #[inline]
    pub fn pass(&mut self, io: &Io) -> Submit {
        debug_assert_eq!(io.tag & PIECE_TAG, 0);
        let submit = self.below.submit(io);
        self.in_flight += u32::from(submit == Submit::Pending);
        submit
    }

    /// As [`Channel::sparse_run`], of the channel below.
    pub fn sparse_run(&mut self, lba: u64, blocks: u64) -> Run {
        self.below.sparse_run(lba, blocks)
    }

    /// As [`Channel::poll`], of the channel below.
    #[inline]
    pub fn poll(&mut self, done: &mut Vec<Completion>) {
        let before = done.len();
        self.below.poll(done);
        for c in &done[before..] {
            self.in_flight -= 1;
            if let Some(at) = Pieces::tagged(c.tag) {
                self.pieces[at].given = false;
            }
        }
    }

    /// Drops the channel below, which waits for what it has; what is given to this afterwards is refused.
    pub fn end(&mut self) {
        self.below = Box::new(Gone);
        self.in_flight = 0;
        self.pieces.iter_mut().for_each(|piece| piece.given = false);
    }

    /// The piece whose I/O has that tag; `None`: it is one that was passed on.
    #[inline]
    pub fn tagged(tag: u64) -> Option<u16> {
        (tag & PIECE_TAG != 0).then_some(tag as u16)
    }

    /// I/Os that the channel below has.
    #[inline]
    pub fn in_flight(&self) -> u32 {
        self.in_flight
    }

    /// Its memory.
    fn sg(&self, at: u16) -> Sg {
        let piece = &self.pieces[at];
        assert!(piece.taken && !piece.given, "piece {at} is not ours");
        let runs = &self.runs[usize::from(at) * PIECE_UNITS..][..piece.units(self.unit).len()];
        // SAFETY: the list is on the heap, is not changed while the piece is given, and is freed after the
        // channel below was dropped, which waits for what it has in flight; so is the memory.
        unsafe { Sg::with_len(runs, piece.bytes) }
    }

    /// The slot of its I/O, where in that it begins (in blocks), and its length in bytes.
    ///
    /// # Panics
    /// It is not under way.
    pub fn of(&self, at: u16) -> (u16, u64, usize) {
        let piece = &self.pieces[at];
        assert!(piece.taken, "piece {at} is not under way");
        (piece.slot, piece.cursor, piece.bytes)
    }

    /// Calls `f` with each part of its memory, in order, and where in the piece that begins, in bytes,
    /// while the channel below does not have it. Ends with the first error.
    ///
    /// # Errors
    /// That of `f`.
    ///
    /// # Panics
    /// The piece is not under way, or the channel below has it.
    pub fn each<E>(
        &mut self,
        at: u16,
        mut f: impl FnMut(usize, &mut [u8]) -> Result<(), E>,
    ) -> Result<(), E> {
        let piece = &self.pieces[at];
        assert!(piece.taken && !piece.given, "piece {at} is not ours");
        for (nth, number) in piece.units(self.unit).iter().enumerate() {
            let begin = nth * self.unit;
            let len = (piece.bytes - begin).min(self.unit);
            // SAFETY: `len` initialised bytes of a unit that is this piece's, borrowed exclusively: no
            // I/O uses it now, as the channel below does not have it.
            let bytes = unsafe {
                std::slice::from_raw_parts_mut(self.base.add(usize::from(*number) * self.unit), len)
            };
            f(begin, bytes)?;
        }
        Ok(())
    }

    /// The piece is over.
    ///
    /// # Panics
    /// As [`Pieces::each`].
    pub fn give_back(&mut self, at: u16) {
        let piece = &mut self.pieces[at];
        assert!(piece.taken && !piece.given, "piece {at} is not ours");
        piece.taken = false;
        self.free.extend_from_slice(piece.units(self.unit));
        self.pieces.give_back(at);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Bdev;

    #[test]
    fn a_piece_has_memory_of_its_own_and_less_where_little_is_left() {
        let disk = crate::Null::create("n0", 512, 8, None).unwrap();
        let below = disk.open(&reactor::IoContext::new().unwrap()).unwrap();
        let mut pieces = Pieces::new(below);
        let mut taken = Vec::new();
        // Of 15 units each, so that fewer are left for the last one.
        while let Some(at) = pieces.take(7, taken.len() as u64, 15 * UNIT - 512) {
            taken.push(at);
        }
        assert_eq!(taken.len(), usize::from(UNITS).div_ceil(15));
        for (nth, at) in taken.iter().enumerate() {
            assert_eq!((pieces.of(*at).0, pieces.of(*at).1), (7, nth as u64));
            pieces
                .each(*at, |_, bytes| -> Result<(), ()> {
                    bytes.fill(nth as u8);
                    Ok(())
                })
                .unwrap();
        }
        for (nth, at) in taken.iter().enumerate() {
            let (sg, mut bytes) = (pieces.sg(*at), vec![0; 15 * UNIT]);
            let len = if nth == taken.len() - 1 { 4 * UNIT } else { 15 * UNIT - 512 };
            assert_eq!((sg.len(), sg.copy_to_slice(0, &mut bytes)), (len, len));
            assert!(bytes[..len].iter().all(|byte| *byte == nth as u8));
        }
        taken.iter().for_each(|at| pieces.give_back(*at));
        assert_eq!(pieces.free.len(), usize::from(UNITS));
        for slot in 0..PIECES {
            assert!(pieces.take(slot, 0, 512).is_some());
        }
        assert!(pieces.take(0, 0, 512).is_none(), "memory is left, but no piece");
        assert_eq!(pieces.free.len(), usize::from(UNITS - PIECES));
    }
}
