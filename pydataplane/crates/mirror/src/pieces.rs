//! The pieces that the destination is given, each with memory of the channel's own for its data.
//! The only unsafe code of this crate.
#![allow(unsafe_code)]

use bdev::{AlignedBuf, COPY_AT_ONCE, Slots};
use guestmem::{IoVec, Sg};

/// Pieces that a channel can have under way.
pub(crate) const PIECES: u16 = 128;
/// Bytes of data of one, at most: what a thread copies in one turn.
pub(crate) const PIECE: usize = COPY_AT_ONCE;

struct Piece {
    /// The slot of its I/O; `None`: nobody waits for it.
    slot: Option<u16>,
    /// Taken from the system when it is first used.
    memory: Option<AlignedBuf>,
    len: usize,
    taken: bool,
}

/// All pieces of a channel.
pub(crate) struct Pieces {
    pieces: Slots<Piece>,
    /// One of each piece.
    runs: Box<[IoVec]>,
}

impl Pieces {
    pub fn new() -> Self {
        let piece = |_| Piece { slot: None, memory: None, len: 0, taken: false };
        Pieces { pieces: Slots::new(PIECES, piece), runs: IoVec::empty(usize::from(PIECES)) }
    }

    /// Takes a piece of the I/O of `slot`, with `len` bytes (at most [`PIECE`]) that `fill` puts there. `None`: all
    /// are under way.
    pub fn take(&mut self, slot: u16, len: usize, fill: impl FnOnce(&mut [u8])) -> Option<u16> {
        assert!(len <= PIECE, "a piece has {PIECE} bytes at most");
        let at = self.pieces.take()?;
        let piece = &mut self.pieces[at];
        debug_assert!(!piece.taken);
        (piece.slot, piece.len, piece.taken) = (Some(slot), len, true);
        if len > 0 {
            let memory = piece.memory.get_or_insert_with(|| AlignedBuf::untouched(PIECE));
            fill(&mut memory[..len]);
            // SAFETY: memory that this piece keeps, and nobody else touches while it is taken; it outlives
            // all I/O, as the channel of the destination is dropped first, or never with these.
            self.runs[usize::from(at)] = unsafe { IoVec::new(memory.as_mut_ptr(), len) };
        }
        Some(at)
    }

    /// Its data.
    pub fn sg(&self, at: u16) -> Sg {
        let piece = &self.pieces[at];
        assert!(piece.taken, "piece {at} is not under way");
        if piece.len == 0 {
            return Sg::EMPTY;
        }
        // SAFETY: the list is on the heap and is not changed while the piece is taken; it and the memory
        // outlive all I/O, as above.
        unsafe { Sg::with_len(&self.runs[usize::from(at)..=usize::from(at)], piece.len) }
    }

    /// The slot that waits for it.
    pub fn slot(&self, at: u16) -> Option<u16> {
        self.pieces[at].slot
    }

    /// Nobody waits any more for those of `slot`; how many that are.
    pub fn abandon(&mut self, slot: u16) -> u32 {
        let of = self.pieces.iter_mut().filter(|p| p.taken && p.slot == Some(slot));
        of.map(|piece| piece.slot = None).count() as u32
    }

    /// It is over.
    pub fn give_back(&mut self, at: u16) {
        let piece = &mut self.pieces[at];
        assert!(piece.taken, "piece {at} is not under way");
        piece.taken = false;
        self.pieces.give_back(at);
    }

    /// How many are under way.
    pub fn taken(&self) -> usize {
        self.pieces.taken()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_piece_has_the_data_as_it_was_and_is_abandoned_by_its_slot() {
        let mut pieces = Pieces::new();
        let mut data = AlignedBuf::zeroed(2 * PIECE);
        data.fill(1);
        // SAFETY: `data` lives to the end of this test and nothing else has a reference to it meanwhile.
        let iov = [unsafe { IoVec::new(data.as_mut_ptr(), data.len()) }];
        // SAFETY: as above; `iov` lives as long.
        let sg = unsafe { Sg::new(&iov) };
        let first = pieces.take(7, PIECE, |to| _ = sg.copy_to_slice(0, to)).unwrap();
        sg.zero(0, PIECE);
        let second = pieces.take(7, 512, |to| _ = sg.copy_to_slice(0, to)).unwrap();
        let mut bytes = vec![9; PIECE];
        assert_eq!(pieces.sg(first).copy_to_slice(0, &mut bytes), PIECE);
        assert!(bytes.iter().all(|byte| *byte == 1), "what the guest does later does not count");
        assert_eq!(pieces.sg(second).copy_to_slice(0, &mut bytes), 512);
        assert!(bytes[..512].iter().all(|byte| *byte == 0));
        let other = pieces.take(8, 0, |_| {}).unwrap();
        assert!(pieces.sg(other).is_empty());
        assert_eq!((pieces.abandon(7), pieces.abandon(7)), (2, 0));
        assert_eq!((pieces.slot(first), pieces.slot(other)), (None, Some(8)));
        [first, second, other].into_iter().for_each(|at| pieces.give_back(at));
        assert_eq!(pieces.taken(), 0);
        for _ in 0..PIECES {
            pieces.take(1, 512, |_| {}).unwrap();
        }
        assert_eq!(pieces.take(1, 512, |_| {}), None);
    }
}
