//! The data path: one queue pair on a bdev with protection information, on top of one on the bdev below.
//!
//! A write is copied out of the guest's memory into memory of the channel's own, where each block is put
//! before its tuple and compared with it: what the guest does to its memory meanwhile makes no
//! difference. Of a read a guest gets a block once it is known to be the right one. [`InPieces`] has the
//! rest.

use crate::block;
use crate::tuple::Mismatch;
use crate::writing::Writer;
use bdev::{
    Bdev, COPY_AT_ONCE, Channel, Completion, InPieces, Io, IoError, Layer, Mismatches, PIECES,
    Part, Pieces, Protected, ProtectionType, Received, Stats, Submit, TUPLE_LEN,
};
use reactor::{Waker, ticks};
use std::sync::Arc;

/// Times that a block is read whose tuple is wrong: the page cache may show one half written.
const TRIES: u8 = 8;
/// How long that goes on while it may be being written, in milliseconds.
const WRITTEN_MS: u64 = 1000;

pub(crate) struct ProtectedChannel(InPieces<Protecting>);

struct Protecting {
    kind: ProtectionType,
    /// Bytes of a block's data.
    block: usize,
    /// Blocks of a piece at most.
    longest: u64,
    /// Of each piece.
    known: Box<[Known]>,
    mismatches: Mismatches,
    writer: Writer,
    below: Arc<dyn Bdev>,
}

/// How far the blocks of a piece that was read are known to be the right ones.
#[derive(Clone, Copy, Default)]
struct Known {
    blocks: usize,
    /// Times that the next one was wrong while nobody wrote it.
    wrong: u8,
    /// When it first was, in ticks.
    since: u64,
}

impl Channel for ProtectedChannel {
    #[inline]
    fn submit(&mut self, io: &Io) -> Submit {
        self.0.submit(io)
    }

    #[inline]
    fn poll(&mut self, done: &mut Vec<Completion>) -> u32 {
        self.0.poll(done)
    }

    fn submit_protected(&mut self, io: &Io, with: &Protected) -> Submit {
        self.0.submit_with(io, with)
    }

    fn mismatch(&mut self, tag: u64) -> Option<u64> {
        self.0.layer.mismatches.take(tag)
    }
}

impl ProtectedChannel {
    /// On a queue pair of `below`, whose blocks have a tuple of that kind each.
    pub(crate) fn new(
        (channel, below): (Box<dyn Channel>, Arc<dyn Bdev>),
        kind: ProtectionType,
        stats: &Arc<Stats>,
        writer: Writer,
        waker: Waker,
    ) -> Self {
        let whole = below.geometry().block_size as usize;
        let pieces = Pieces::of_blocks(channel, whole);
        let most = (pieces.longest().min(COPY_AT_ONCE) / whole) as u64;
        let longest = match below.features().max_blocks {
            0 => most,
            blocks => most.min(u64::from(blocks)),
        };
        let layer = Protecting {
            kind,
            block: whole - TUPLE_LEN,
            longest,
            known: vec![Known::default(); usize::from(PIECES)].into(),
            mismatches: Mismatches::default(),
            writer,
            below,
        };
        ProtectedChannel(InPieces::new(pieces, layer, stats.channel(), waker))
    }
}

impl Layer for Protecting {
    type With = Protected;
    const PLAIN: Protected = Protected::PLAIN;

    fn block(&self) -> usize {
        self.block
    }

    fn block_below(&self) -> usize {
        self.block + TUPLE_LEN
    }

    fn longest(&self) -> u64 {
        self.longest
    }

    /// Also the lists of an I/O against each other.
    fn check(&self, io: &Io, with: &Protected) -> Result<(), IoError> {
        let (mut geometry, features) = (self.below.geometry(), self.below.features());
        geometry.block_size = self.block as u32;
        with.check(io, &geometry, &features)
    }

    fn fill(&mut self, part: Part<'_, Protected>) -> Result<(), IoError> {
        let Part { io, with, is_well, at, cursor, pieces } = part;
        let (whole, kind) = (self.block_below(), self.kind);
        let taken = pieces.each(at, |begin, bytes| {
            let first = cursor as usize + begin / whole;
            for (nth, one) in bytes.chunks_exact_mut(whole).enumerate() {
                let lba = io.lba + (first + nth) as u64;
                let taken = block::take(block::cut(one), kind, (first + nth, lba), &io.sg, &with);
                taken.map_err(|mismatch| (mismatch, lba))?;
            }
            Ok(())
        });
        taken.map_err(|(mismatch, lba)| self.mismatched(&io, is_well, mismatch, lba))
    }

    fn reads(&mut self, piece: u16) {
        self.known[usize::from(piece)] = Known::default();
    }

    /// Compares what was read with its tuples.
    fn received(&mut self, part: Part<'_, Protected>) -> Received {
        let Part { io, with, is_well, at, cursor, pieces } = part;
        let (whole, kind) = (self.block_below(), self.kind);
        let known = &mut self.known[usize::from(at)];
        let given = pieces.each(at, |begin, bytes| {
            let first = begin / whole;
            for (nth, one) in
                bytes.chunks_exact_mut(whole).enumerate().skip(known.blocks.saturating_sub(first))
            {
                let of_io = cursor as usize + first + nth;
                let lba = io.lba + of_io as u64;
                let (data, tuple) = block::cut(one);
                let given = block::give((data, tuple), kind, (of_io, lba), &io.sg, &with);
                given.map_err(|mismatch| (mismatch, lba))?;
                *known = Known { blocks: first + nth + 1, ..Known::default() };
            }
            Ok(())
        });
        match given {
            Ok(()) => Received::Over(Ok(())),
            // Whoever writes it may go on meanwhile. A tuple, too, may be half old: of a block that was
            // unmapped with the new guard and no reference tag yet.
            Err((_, lba)) if self.may_become_right(at, lba) => Received::Again,
            Err((mismatch, lba)) => {
                Received::Over(Err(self.mismatched(&io, is_well, mismatch, lba)))
            }
        }
    }

    fn begins(&mut self, lba: u64, blocks: u64) {
        self.writer.begin(lba, blocks);
    }

    fn ends(&mut self, lba: u64, blocks: u64) {
        self.writer.end(lba, blocks);
    }
}

impl Protecting {
    /// Whether a piece is to be read again whose block `lba` has a wrong tuple.
    #[cold]
    fn may_become_right(&mut self, piece: u16, lba: u64) -> bool {
        let (known, now) = (&mut self.known[usize::from(piece)], ticks::now());
        if known.since == 0 {
            known.since = now;
        }
        if !self.writer.is_written(lba) {
            known.wrong += 1;
            return known.wrong < TRIES;
        }
        ticks::to_ns(now.saturating_sub(known.since)) < WRITTEN_MS * 1_000_000
    }

    /// Keeps what was found at block `lba`, if it is the first of its I/O; how that ends.
    #[cold]
    fn mismatched(&mut self, io: &Io, is_first: bool, mismatch: Mismatch, lba: u64) -> IoError {
        if is_first {
            self.mismatches.keep(io.tag, lba - io.lba);
        }
        mismatch.into()
    }
}
