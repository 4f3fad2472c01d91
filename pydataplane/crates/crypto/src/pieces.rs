//! The pieces that I/Os are done in, each with memory of the channel's own for its encrypted data.
//! The only unsafe code of this crate.
#![allow(unsafe_code)]

use bdev::{AlignedBuf, COPY_AT_ONCE, Slots};
use guestmem::{IoVec, Sg};

/// Pieces that a channel can have under way.
pub(crate) const PIECES: u16 = 256;

/// Bytes that memory is taken in: a page, in which whole blocks fit.
const UNIT: usize = 4096;

/// Such units of a channel, taken from the system when they are first used.
const UNITS: u16 = 1024;

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
}

impl Piece {
    fn units(&self) -> &[u16] {
        &self.units[..self.bytes.div_ceil(UNIT)]
    }
}

/// All pieces of a channel, allocated when it is opened.
pub(crate) struct Pieces {
    pieces: Slots<Piece>,
    /// [`PIECE_UNITS`] of each piece.
    runs: Box<[IoVec]>,
    /// The last one is taken next: it is the likeliest to be in the processor's cache.
    free: Vec<u16>,
    /// The first unit.
    base: *mut u8,
    /// Only `base` is used: a reference to all of it would be to what the kernel writes, too.
    _memory: AlignedBuf,
}

impl Pieces {
    pub fn new() -> Self {
        let piece =
            |_| Piece { slot: 0, cursor: 0, bytes: 0, units: [0; PIECE_UNITS], taken: false };
        let mut memory = AlignedBuf::untouched(usize::from(UNITS) * UNIT);
        Pieces {
            pieces: Slots::new(PIECES, piece),
            runs: IoVec::empty(usize::from(PIECES) * PIECE_UNITS),
            free: (0..UNITS).rev().collect(),
            base: memory.as_mut_ptr(),
            _memory: memory,
        }
    }

    /// Takes a piece of the I/O of `slot`, from its block `cursor` on, with memory for `bytes` bytes (at
    /// least one, whole blocks), or for as many of them as there is room for. `None`: there is none.
    pub fn take(&mut self, slot: u16, cursor: u64, bytes: usize) -> Option<u16> {
        let count = bytes.div_ceil(UNIT).min(PIECE_UNITS).min(self.free.len());
        if count == 0 {
            return None;
        }
        let at = self.pieces.take()?;
        let piece = &mut self.pieces[at];
        debug_assert!(!piece.taken);
        *piece = Piece {
            slot,
            cursor,
            bytes: bytes.min(count * UNIT),
            units: [0; PIECE_UNITS],
            taken: true,
        };
        let runs = &mut self.runs[usize::from(at) * PIECE_UNITS..][..count];
        let mut left = piece.bytes;
        for (unit, run) in piece.units.iter_mut().zip(runs) {
            *unit = self.free.pop().expect("there are so many");
            let len = left.min(UNIT);
            // SAFETY: the unit is within the memory, which outlives all I/O of this channel: its base
            // channel is dropped first, and waits for what it has in flight.
            *run = unsafe { IoVec::new(self.base.add(usize::from(*unit) * UNIT), len) };
            left -= len;
        }
        Some(at)
    }

    /// Its memory.
    pub fn sg(&self, at: u16) -> Sg {
        let piece = &self.pieces[at];
        assert!(piece.taken, "piece {at} is not under way");
        let runs = &self.runs[usize::from(at) * PIECE_UNITS..][..piece.units().len()];
        // SAFETY: the list is on the heap, is not changed while the piece is taken, and is freed after the
        // base channel was dropped, which waits for what it has in flight; so is the memory.
        unsafe { Sg::with_len(runs, piece.bytes) }
    }

    /// The slot of its I/O, where in that it begins (in blocks), and its length in bytes.
    pub fn of(&self, at: u16) -> (u16, u64, usize) {
        let piece = &self.pieces[at];
        assert!(piece.taken, "piece {at} is not under way");
        (piece.slot, piece.cursor, piece.bytes)
    }

    /// Calls `f` with each part of its memory, in order, and where in the piece that begins, in bytes,
    /// while it is not given to the base bdev. Ends with the first error.
    pub fn each<E>(
        &mut self,
        at: u16,
        mut f: impl FnMut(usize, &mut [u8]) -> Result<(), E>,
    ) -> Result<(), E> {
        let piece = &self.pieces[at];
        assert!(piece.taken, "piece {at} is not under way");
        for (nth, unit) in piece.units().iter().enumerate() {
            let begin = nth * UNIT;
            let len = (piece.bytes - begin).min(UNIT);
            // SAFETY: `len` initialised bytes of a unit that is this piece's, borrowed exclusively: no
            // I/O uses it now, as the channel calls this before the base bdev has it, and after.
            let bytes = unsafe {
                std::slice::from_raw_parts_mut(self.base.add(usize::from(*unit) * UNIT), len)
            };
            f(begin, bytes)?;
        }
        Ok(())
    }

    /// The piece is over.
    pub fn give_back(&mut self, at: u16) {
        let piece = &mut self.pieces[at];
        assert!(piece.taken, "piece {at} is not under way");
        piece.taken = false;
        self.free.extend_from_slice(piece.units());
        self.pieces.give_back(at);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_piece_has_memory_of_its_own_and_less_where_little_is_left() {
        let mut pieces = Pieces::new();
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
