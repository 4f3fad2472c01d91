//! The pieces of I/Os that do not lie in one run of the device, each with room for its own list of
//! memory runs. The only unsafe code of this crate.
#![allow(unsafe_code)]

use crate::pins::Pin;
use bdev::Slots;
use guestmem::{IoVec, Sg};

/// Pieces that a channel can have in flight.
pub(crate) const PARTS: u16 = 256;
/// Memory runs of one piece; a piece that needs more becomes several.
const PART_RUNS: usize = 64;

struct Part {
    slot: u16,
    /// Where in its I/O it begins, in blocks.
    cursor: u64,
    pin: Pin,
    taken: bool,
}

/// All pieces of a channel, allocated when it is opened.
pub(crate) struct Parts {
    parts: Slots<Part>,
    /// [`PART_RUNS`] of each piece.
    runs: Box<[IoVec]>,
}

/// A piece that was cut from an I/O.
pub(crate) struct Cut {
    pub part: u16,
    /// Its data: the first `blocks` blocks of what was asked for, or fewer.
    pub sg: Sg,
    pub blocks: u64,
}

impl Parts {
    pub fn new() -> Self {
        let part = |_| Part { slot: 0, cursor: 0, pin: Pin::default(), taken: false };
        let runs = IoVec::empty(usize::from(PARTS) * PART_RUNS);
        Parts { parts: Slots::new(PARTS, part), runs }
    }

    /// Takes a piece for `blocks` blocks of `block` bytes at byte `offset` of `sg`, or for as many
    /// of them as fit in its runs. `None`: none is free. A piece of 0 blocks (its first block alone
    /// is scattered over too many runs) is not taken.
    ///
    /// `sg` must be the list of the I/O of `slot`, which lives until that I/O is over.
    pub fn cut(
        &mut self,
        slot: u16,
        sg: &Sg,
        offset: usize,
        blocks: u64,
        block: usize,
    ) -> Option<Cut> {
        let at = self.parts.next_free()?;
        let part = &mut self.parts[at];
        debug_assert!(!part.taken);
        let runs = &mut self.runs[usize::from(at) * PART_RUNS..][..PART_RUNS];
        let mut blocks = blocks;
        let used = loop {
            if let Some(used) = sg.slice_into(offset, blocks as usize * block, runs) {
                break used;
            }
            blocks /= 2;
        };
        if blocks == 0 {
            return Some(Cut { part: at, sg: Sg::EMPTY, blocks });
        }
        part.taken = true;
        part.slot = slot;
        // SAFETY: the runs are part of `sg`, whose memory is valid until the I/O of `slot` is over,
        // and that waits for this piece. The list itself is on the heap, is not touched while
        // `taken`, and is freed with the channel after the base channel was dropped, which
        // waits for what it has in flight.
        let sg = unsafe { Sg::new(&runs[..used]) };
        self.parts.take();
        Some(Cut { part: at, sg, blocks })
    }

    /// The piece is in flight, and begins at that block of its I/O.
    pub fn pin(&mut self, part: u16, pin: Pin, cursor: u64) {
        (self.parts[part].pin, self.parts[part].cursor) = (pin, cursor);
    }

    /// Where in its I/O a piece begins that is in flight, in blocks.
    pub fn cursor(&self, part: u16) -> u64 {
        self.parts[part].cursor
    }

    /// The piece is over; returns its I/O's slot.
    pub fn give_back(&mut self, part: u16) -> (u16, Pin) {
        let p = &mut self.parts[part];
        assert!(p.taken, "piece {part} is not in flight");
        p.taken = false;
        let of = (p.slot, p.pin);
        self.parts.give_back(part);
        of
    }
}
