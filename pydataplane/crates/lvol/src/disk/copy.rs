//! Ranges that are filled within a bdev, or from another, several pieces at a time.
//!
//! What is copied within a bdev with protection information is copied with it, and nothing is compared: a
//! block that was damaged is not made right by it, and who reads it finds out. What comes from outside has
//! none, as nobody made it any.

use bdev::{
    AlignedBuf, Bdev, Checks, Finished, IoError, Op, OpenError, OwnedChannel, Protected, TUPLE_LEN,
    Tuples,
};
use blobstore::Fill;
use protection::Tuple;

/// Pieces under way at a time, and bytes of one at most.
const DEPTH: u16 = 32;
const PIECE: u64 = 128 << 10;
/// Where the protection information of a piece is that is copied with it.
const TUPLES: Tuples = Tuples::Behind;
/// How long nothing is waited for where nothing is in flight, in microseconds: that does not happen.
const IDLE_US: u64 = 1000;

/// What protection information a piece is written with.
#[derive(Clone, Copy)]
enum Info {
    /// What the bdev makes.
    Made,
    /// That of what it was copied from, which begins at this byte.
    Carried(u64),
    /// That of blocks that nobody wrote: nothing of them is checked. Any application tag could be a wrong one.
    Unwritten,
}

/// A piece under way: `len` bytes at byte `at` of a range.
#[derive(Clone, Copy)]
struct Piece {
    /// Which of the ranges.
    range: usize,
    at: u64,
    len: u64,
    /// First byte that is read; `None`: nothing is, or it was.
    reads: Option<u64>,
    to: u64,
    info: Info,
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
    /// Its blocks have protection information.
    is_protected: bool,
    spare: Vec<AlignedBuf>,
}

impl Copier {
    /// For pieces of clusters, which are read and written whole. `longest`: the bdev takes no more bytes
    /// at once.
    pub fn open(bdev: &dyn Bdev, block: u64, longest: u64) -> Result<Self, OpenError> {
        let channel = OwnedChannel::open(bdev, DEPTH)?;
        let piece = PIECE.min(longest / block * block);
        let is_protected = bdev.protection().is_some();
        Ok(Copier { channel, block, piece, is_protected, spare: Vec::new() })
    }

    /// Fills ranges of `len` bytes. Ends when nothing is under way any more.
    pub fn fill(&mut self, fills: &[Fill<'_>], len: u64) -> Result<(), Failed> {
        let is_protected = self.is_protected;
        let carried = |from| if is_protected { Info::Carried(from) } else { Info::Made };
        let mut left = pieces(fills, len, self.piece, carried);
        let (mut over, mut result) = (Vec::new(), Ok(()));
        loop {
            while result.is_ok()
                && !self.channel.is_full()
                && over.len() < usize::from(DEPTH)
                && let Some(piece) = left.next()
            {
                let buf = self.buf();
                over.extend(match piece.reads {
                    Some(from) => {
                        let (lba, blocks) = (from / self.block, piece.len / self.block);
                        let carries = matches!(piece.info, Info::Carried(_));
                        let with = carries.then(|| Protected::new(TUPLES, Checks::NONE));
                        self.channel.submit_with(Op::Read, lba, blocks, Some(buf), with, piece)
                    }
                    None => self.write(fills, piece, buf),
                });
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
                if let Err(error) = ended {
                    let (op, offset) = token.reads.map_or(("write", token.to), |at| ("read", at));
                    result = result.and(Err(Failed { op, offset, error }));
                }
                match buf {
                    Some(buf) if token.reads.is_some() && result.is_ok() => {
                        over.extend(self.write(fills, Piece { reads: None, ..token }, buf));
                    }
                    buf => self.spare.extend(buf),
                }
            }
        }
    }

    /// As [`Copier::fill`], from places of `source`: some pieces are read, then they are written.
    pub fn fill_from(
        &mut self,
        source: &mut Source,
        fills: &[Fill<'_>],
        len: u64,
    ) -> Result<(), Failed> {
        let step = self.piece.min(source.longest / self.block * self.block).max(self.block);
        let info = if self.is_protected { Info::Unwritten } else { Info::Made };
        let all: Vec<Piece> = pieces(fills, len, step, |_| info).collect();
        for some in all.chunks(usize::from(DEPTH)) {
            let mut over = Vec::new();
            for piece in some {
                let buf = Some(self.buf());
                let Some(from) = piece.reads else {
                    over.push(Finished { token: *piece, buf, result: Ok(()) });
                    continue;
                };
                let (lba, blocks) = (from / source.block, piece.len / source.block);
                over.extend(source.channel.submit(Op::Read, lba, blocks, buf, *piece));
            }
            let read = drain(&mut source.channel, over);
            let mut over = Vec::new();
            let result = first_failure(&read);
            for Finished { token, buf, .. } in read {
                match buf {
                    Some(buf) if result.is_ok() => {
                        over.extend(self.write(fills, Piece { reads: None, ..token }, buf));
                    }
                    buf => self.spare.extend(buf),
                }
            }
            result?;
            let written = drain(&mut self.channel, over);
            let result = first_failure(&written);
            self.spare.extend(written.into_iter().filter_map(|finished| finished.buf));
            result?;
        }
        Ok(())
    }

    fn buf(&mut self) -> AlignedBuf {
        let tuples = if self.is_protected { self.piece / self.block } else { 0 };
        let piece = self.piece as usize + tuples as usize * TUPLE_LEN;
        self.spare.pop().unwrap_or_else(|| AlignedBuf::zeroed(piece))
    }

    /// Writes a piece that was read, where that was needed, with what lies over it.
    fn write(
        &mut self,
        fills: &[Fill<'_>],
        piece: Piece,
        mut buf: AlignedBuf,
    ) -> Option<Finished<Piece>> {
        let (lba, blocks) = (piece.to / self.block, piece.len / self.block);
        let with = match piece.info {
            Info::Made => {
                fills[piece.range].complete(piece.at, &mut buf[..piece.len as usize]);
                None
            }
            Info::Carried(from) => {
                let first = Some((from / self.block) as u32);
                Some(Protected { first, ..Protected::new(TUPLES, Checks::NONE) })
            }
            Info::Unwritten => {
                part(&mut buf, self.block as usize, blocks as usize);
                Some(Protected::new(TUPLES, Checks::NONE))
            }
        };
        self.channel.submit_with(Op::Write, lba, blocks, Some(buf), with, piece)
    }
}

/// Moves blocks apart and puts the tuple of one that nobody wrote behind each.
fn part(buf: &mut [u8], block: usize, blocks: usize) {
    for nth in (0..blocks).rev() {
        let to = nth * (block + TUPLE_LEN);
        buf.copy_within(nth * block..(nth + 1) * block, to);
        buf[to + block..][..TUPLE_LEN].copy_from_slice(&Tuple::UNWRITTEN.to_bytes());
    }
}

/// Ranges of `len` bytes in pieces of `step` bytes at most; none is read yet. `info` is that of one read from this
/// byte on. Where something lies over a range, protection information is compared, and made anew.
fn pieces(
    fills: &[Fill<'_>],
    len: u64,
    step: u64,
    info: impl Fn(u64) -> Info + Copy,
) -> impl Iterator<Item = Piece> {
    fills.iter().enumerate().flat_map(move |(range, fill)| {
        (0..len).step_by(step as usize).map(move |at| {
            let len = step.min(len - at);
            let reads = fill.read_from(at, len);
            let info = reads.filter(|_| fill.over.is_empty()).map_or(Info::Made, info);
            Piece { range, at, len, reads, to: fill.to + at, info }
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

fn first_failure(over: &[Finished<Piece>]) -> Result<(), Failed> {
    let failed = over.iter().find_map(|finished| Some((finished.token, finished.result.err()?)));
    failed.map_or(Ok(()), |(piece, error)| {
        let (op, offset) = piece.reads.map_or(("write", piece.to), |at| ("read", at));
        Err(Failed { op, offset, error })
    })
}
