//! Copies within a bdev, and into it from another, several pieces at a time.

use bdev::{AlignedBuf, Bdev, Finished, IoError, Op, OpenError, OwnedChannel};

/// Pieces under way at a time, and bytes of one at most.
const DEPTH: u16 = 32;
const PIECE: u64 = 128 << 10;
/// How long nothing is waited for where nothing is in flight, in microseconds: that does not happen.
const IDLE_US: u64 = 1000;

/// A piece under way: bytes of the bdev.
#[derive(Clone, Copy)]
struct Piece {
    from: u64,
    to: u64,
    len: u64,
    /// It was read.
    writes: bool,
}

/// What failed: the operation, and the first byte that it was of.
pub(super) struct Failed {
    pub op: &'static str,
    pub offset: u64,
    pub error: IoError,
}

/// A bdev outside of the store, to be read from.
pub(super) struct Source {
    channel: OwnedChannel<Piece>,
    block: u64,
    /// Bytes that one submit can take.
    longest: u64,
    /// Which time that it came this is of.
    pub presence: u64,
}

impl Source {
    pub fn open(bdev: &dyn Bdev, presence: u64) -> Result<Self, OpenError> {
        let block = u64::from(bdev.geometry().block_size);
        let longest = match bdev.features().max_blocks {
            0 => u64::MAX,
            most => u64::from(most) * block,
        };
        Ok(Source { channel: OwnedChannel::open(bdev, DEPTH)?, block, longest, presence })
    }
}

pub(super) struct Copier {
    channel: OwnedChannel<Piece>,
    block: u64,
    /// Bytes of a piece.
    piece: u64,
    spare: Vec<AlignedBuf>,
}

impl Copier {
    /// For pieces of clusters, which are read and written whole. `longest`: the bdev takes no more bytes
    /// at once.
    pub fn open(bdev: &dyn Bdev, block: u64, longest: u64) -> Result<Self, OpenError> {
        let channel = OwnedChannel::open(bdev, DEPTH)?;
        let piece = PIECE.min(longest / block * block);
        Ok(Copier { channel, block, piece, spare: Vec::new() })
    }

    /// Copies `len` bytes from each first byte to the second. Ends when nothing is under way any more.
    pub fn copy(&mut self, pairs: &[(u64, u64)], len: u64) -> Result<(), Failed> {
        let step = self.piece;
        let mut left = pieces(pairs, len, step);
        let (mut over, mut result) = (Vec::new(), Ok(()));
        loop {
            while result.is_ok()
                && !self.channel.is_full()
                && over.len() < usize::from(DEPTH)
                && let Some(piece) = left.next()
            {
                let buf = self.spare.pop().unwrap_or_else(|| AlignedBuf::zeroed(step as usize));
                let (lba, blocks) = (piece.from / self.block, piece.len / self.block);
                over.extend(self.channel.submit(Op::Read, lba, blocks, Some(buf), piece));
            }
            if over.is_empty() {
                if self.channel.in_flight() == 0 {
                    return result;
                }
                if self.channel.poll(&mut over) == 0 {
                    self.channel.wait(&mut over, IDLE_US);
                }
            }
            for Finished { token, buf, result: ended } in std::mem::take(&mut over) {
                let (op, offset) = match token.writes {
                    true => ("write", token.to),
                    false => ("read", token.from),
                };
                if let Err(error) = ended {
                    result = result.and(Err(Failed { op, offset, error }));
                }
                if token.writes || result.is_err() {
                    self.spare.extend(buf);
                    continue;
                }
                let piece = Piece { writes: true, ..token };
                let (lba, blocks) = (token.to / self.block, token.len / self.block);
                over.extend(self.channel.submit(Op::Write, lba, blocks, buf, piece));
            }
        }
    }

    /// As [`Copier::copy`], from places of `source`: some pieces are read, then they are written.
    pub fn copy_from(
        &mut self,
        source: &mut Source,
        pairs: &[(u64, u64)],
        len: u64,
    ) -> Result<(), Failed> {
        let step = self.piece.min(source.longest / self.block * self.block).max(self.block);
        let all: Vec<Piece> = pieces(pairs, len, step).collect();
        for some in all.chunks(usize::from(DEPTH)) {
            let mut over = Vec::new();
            for piece in some {
                let buf =
                    self.spare.pop().unwrap_or_else(|| AlignedBuf::zeroed(self.piece as usize));
                let (lba, blocks) = (piece.from / source.block, piece.len / source.block);
                over.extend(source.channel.submit(Op::Read, lba, blocks, Some(buf), *piece));
            }
            let read = drain(&mut source.channel, over);
            let mut over = Vec::new();
            let result = first_failure("read", &read);
            for Finished { token, buf, .. } in read {
                if result.is_err() {
                    self.spare.extend(buf);
                    continue;
                }
                let (lba, blocks) = (token.to / self.block, token.len / self.block);
                over.extend(self.channel.submit(Op::Write, lba, blocks, buf, token));
            }
            result?;
            let written = drain(&mut self.channel, over);
            let result = first_failure("write", &written);
            self.spare.extend(written.into_iter().filter_map(|finished| finished.buf));
            result?;
        }
        Ok(())
    }
}

/// `len` bytes from each first byte to the second, in pieces of `step` bytes at most; none is read yet.
fn pieces(pairs: &[(u64, u64)], len: u64, step: u64) -> impl Iterator<Item = Piece> + '_ {
    pairs.iter().flat_map(move |(from, to)| {
        (0..len).step_by(step as usize).map(move |at| {
            let len = step.min(len - at);
            Piece { from: from + at, to: to + at, len, writes: false }
        })
    })
}

/// All that a channel was given, when it is over.
fn drain(
    channel: &mut OwnedChannel<Piece>,
    mut over: Vec<Finished<Piece>>,
) -> Vec<Finished<Piece>> {
    while channel.in_flight() > 0 {
        if channel.poll(&mut over) == 0 {
            channel.wait(&mut over, IDLE_US);
        }
    }
    over
}

fn first_failure(op: &'static str, over: &[Finished<Piece>]) -> Result<(), Failed> {
    let failed = over.iter().find_map(|finished| Some((finished.token, finished.result.err()?)));
    failed.map_or(Ok(()), |(piece, error)| {
        let offset = if op == "read" { piece.from } else { piece.to };
        Err(Failed { op, offset, error })
    })
}
