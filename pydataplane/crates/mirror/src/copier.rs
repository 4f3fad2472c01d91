//! The copying: some chunks at a time, on a thread of its own, and then the watch over the copy.

use crate::chunks::MIN_CHUNK;
use crate::map::{Map, MapPage};
use crate::shared::{Phase, Shared};
use bdev::{AlignedBuf, Checks, Finished, Op, OwnedChannel, Protected, TUPLE_LEN, Tuples};
use reactor::ticks;
use std::ops::Range;
use std::sync::atomic::Ordering;
use std::thread;
use std::time::{Duration, Instant};

/// How long an I/O of the copy, or a write of the guest that waits for the destination, may have no answer:
/// less than a guest waits before it gives one up.
pub const HANG: Duration = Duration::from_millis(if cfg!(test) { 3_000 } else { 10_000 });

/// Bytes that are read or written by one I/O, at most.
const PIECE: u64 = MIN_CHUNK;
/// I/Os under way at a time.
const DEPTH: u16 = 16;
/// Bytes that are copied at a time: writes of the guest to them wait meanwhile.
const WINDOW: u64 = PIECE * DEPTH as u64;
/// How often a limited copy copies, at least, in a second.
const TURNS: u64 = 10;
/// How often writes in flight are looked at that the copy waits for.
const LOOK: Duration = Duration::from_micros(100);
/// How often a copy that is ready is looked at.
const WATCH: Duration = Duration::from_millis(250);
/// Longest sleep for a limit before that is looked at again.
const NAP: Duration = Duration::from_millis(100);

/// The copy is over; whoever ended it said why.
struct Over;

/// Bytes of the source, and what is done with them.
#[derive(Clone, Copy)]
struct Piece {
    from: u64,
    len: u64,
    step: Step,
    /// The destination has nothing there.
    empty: bool,
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum Step {
    Read,
    Write,
    Zero,
}

/// Copies until the copy is over, and then watches it until it is.
pub(crate) fn run(shared: &Shared, source: Option<&Map>, destination: Option<&Map>) {
    let _ends = Ends(shared);
    if let Err(why) = copy(shared, source, destination) {
        shared.fail(why);
    }
    // Whoever asked for something hears that nobody is there.
    shared.ask(|asked| asked.seal = None);
}

/// Whatever becomes of the thread, nobody waits for it afterwards.
struct Ends<'a>(&'a Shared);

impl Drop for Ends<'_> {
    fn drop(&mut self) {
        self.0.fail("the copying ended by a defect of the target".to_owned());
    }
}

fn copy(shared: &Shared, source: Option<&Map>, destination: Option<&Map>) -> Result<(), String> {
    let open = |bdev: &dyn bdev::Bdev| OwnedChannel::open(bdev, DEPTH).map_err(|e| e.to_string());
    let mut copier = Copier {
        from: open(&*shared.source)?,
        to: open(&*shared.destination)?,
        source_parts: Parts::new(source),
        destination_parts: Parts::new(destination),
        spare: Vec::new(),
        due: Instant::now(),
        shared,
    };
    let mut goes_on = copier.copy_all();
    while goes_on.is_ok() {
        goes_on = copier.watch().and_then(|()| copier.copy_rest());
    }
    // Dropping the channels waits for what they have in flight.
    Ok(())
}

struct Copier<'a> {
    shared: &'a Shared,
    from: OwnedChannel<Piece>,
    to: OwnedChannel<Piece>,
    source_parts: Parts<'a>,
    destination_parts: Parts<'a>,
    spare: Vec<AlignedBuf>,
    /// When more may be read.
    due: Instant,
}

impl Copier<'_> {
    fn copy_all(&mut self) -> Result<(), Over> {
        let (chunks, size) = (&self.shared.chunks, self.shared.chunks.size());
        let mut next = 0;
        while next < chunks.count() {
            self.keep_to_limit()?;
            let most = self.at_once();
            let mut some = Vec::with_capacity(most);
            while next < chunks.count() && some.len() < most {
                if !self.is_skipped(next) {
                    some.push(next);
                }
                next += 1;
                if some.is_empty() {
                    self.shared.copied.store(next as u64 * size, Ordering::Relaxed);
                    self.check()?;
                }
            }
            self.copy_some(&some)?;
            self.shared.copied.store(next as u64 * size, Ordering::Relaxed);
        }
        self.copy_rest()
    }

    /// Copies what is to be copied again, until both have the same and the destination is durable.
    fn copy_rest(&mut self) -> Result<(), Over> {
        loop {
            while self.shared.take_again() {
                let chunks = &self.shared.chunks;
                let all: Vec<_> = (0..chunks.count()).filter(|at| chunks.is_to_copy(*at)).collect();
                let mut left = &all[..];
                while !left.is_empty() {
                    self.keep_to_limit()?;
                    let (some, rest) = left.split_at(left.len().min(self.at_once()));
                    self.copy_some(some)?;
                    left = rest;
                }
            }
            self.flush().map_err(|why| self.fail(why))?;
            if self.shared.ready() {
                return Ok(());
            }
        }
    }

    /// Chunks that are copied at a time.
    fn at_once(&self) -> usize {
        let limit = self.shared.limit.load(Ordering::Relaxed);
        let window = if limit == 0 { WINDOW } else { WINDOW.min(limit / TURNS) };
        (window / self.shared.chunks.size()).max(1) as usize
    }

    /// The bytes of a chunk.
    fn bytes_of(&self, chunk: usize) -> Range<u64> {
        let size = self.shared.chunks.size();
        let first = chunk as u64 * size;
        first..(first + size).min(self.shared.bytes)
    }

    /// Whether there is nothing to copy of a chunk: both have nothing there, as far as their maps say and
    /// nobody wrote to it since.
    fn is_skipped(&mut self, chunk: usize) -> bool {
        let bytes = self.bytes_of(chunk);
        let nothing = |parts: &mut Parts| parts.within(bytes.clone()).is_empty();
        nothing(&mut self.source_parts)
            && nothing(&mut self.destination_parts)
            && self.shared.chunks.skip(chunk)
    }

    /// Copies these chunks, as they are when no write is in flight on them any more.
    fn copy_some(&mut self, some: &[usize]) -> Result<(), Over> {
        some.iter().for_each(|chunk| self.shared.chunks.begin_copy(*chunk));
        for chunk in some {
            while !self.shared.chunks.is_quiet(*chunk) {
                self.check()?;
                thread::sleep(LOOK);
            }
        }
        let mut pieces = Vec::new();
        for chunk in some {
            self.plan(*chunk, &mut pieces);
        }
        let read = pieces.iter().filter(|piece| piece.step == Step::Read).map(|piece| piece.len);
        let read: u64 = read.sum();
        self.carry_out(pieces)?;
        some.iter().for_each(|chunk| self.shared.chunks.end_copy(*chunk));
        self.shared.wake_parked();
        let limit = self.shared.limit.load(Ordering::Relaxed);
        if limit > 0 {
            let takes = Duration::from_secs_f64(read as f64 / limit as f64);
            self.due = self.due.max(Instant::now() - Duration::from_secs(1)) + takes;
        }
        Ok(())
    }

    /// What is to be done for a chunk.
    fn plan(&mut self, chunk: usize, pieces: &mut Vec<Piece>) {
        let bytes = self.bytes_of(chunk);
        let written = self.shared.chunks.was_written(chunk);
        let data = match written {
            true => vec![bytes.clone()],
            false => self.source_parts.within(bytes.clone()),
        };
        let there = match written {
            true => vec![bytes.clone()],
            false => self.destination_parts.within(bytes.clone()),
        };
        let is_empty = |part: &Range<u64>| !there.iter().any(|r| overlap(r, part));
        let mut at = bytes.start;
        for part in data.iter().cloned().chain(std::iter::once(bytes.end..bytes.end)) {
            // What the source has nothing of, and the destination has something.
            for hole in there.iter().map(|r| cut(r, &(at..part.start))).filter(|r| !r.is_empty()) {
                let (from, len) = (hole.start, hole.end - hole.start);
                pieces.push(Piece { from, len, step: Step::Zero, empty: false });
            }
            for from in part.clone().step_by(PIECE as usize) {
                let to = part.end.min(from + PIECE);
                let empty = is_empty(&(from..to));
                pieces.push(Piece { from, len: to - from, step: Step::Read, empty });
            }
            at = part.end;
        }
    }

    /// Reads, and writes what was read; ends when nothing is under way.
    fn carry_out(&mut self, pieces: Vec<Piece>) -> Result<(), Over> {
        let mut left = pieces.into_iter().flat_map({
            let longest = [self.longest(true), self.longest(false)];
            move |piece| cut_up(piece, longest[usize::from(piece.step == Step::Zero)])
        });
        let mut next = left.next();
        let (mut read, mut over) = (Vec::new(), Vec::new());
        let mut answered = Instant::now();
        loop {
            while let Some(piece) = next
                && !self.from.is_full()
                && !self.to.is_full()
                && read.len() + self.to.in_flight() + self.from.in_flight() < usize::from(DEPTH)
            {
                match piece.step {
                    Step::Zero => self.zero(piece, &mut over),
                    _ => {
                        let buf = self.spare.pop();
                        let longest = self.in_memory(PIECE);
                        let buf = buf.unwrap_or_else(|| AlignedBuf::zeroed(longest));
                        let (block, with) = (self.shared.source_block, self.with());
                        let (lba, blocks) = (piece.from / block, piece.len / block);
                        let buf = Some(buf);
                        read.extend(self.from.submit_with(Op::Read, lba, blocks, buf, with, piece));
                    }
                }
                next = left.next();
            }
            self.from.poll(&mut read);
            self.to.poll(&mut over);
            if read.is_empty() && over.is_empty() {
                if self.from.in_flight() + self.to.in_flight() == 0 {
                    debug_assert!(next.is_none(), "there was room");
                    return Ok(());
                }
                self.wait_for_either(answered, &mut read, &mut over)?;
                continue;
            }
            answered = Instant::now();
            for Finished { token, buf, result } in std::mem::take(&mut over) {
                self.spare.extend(buf);
                result.map_err(|e| self.failed(&token, e))?;
            }
            for Finished { token, buf, result } in std::mem::take(&mut read) {
                result.map_err(|e| self.failed(&token, e))?;
                let Some(buf) = buf else { continue };
                self.write(token, buf, &mut over);
            }
            self.check()?;
        }
    }

    /// Gives the destination what was read.
    fn write(&mut self, piece: Piece, buf: AlignedBuf, over: &mut Vec<Finished<Piece>>) {
        let (features, block) = (&self.shared.features, self.shared.block as usize);
        let read = &buf[..self.in_memory(piece.len)];
        let is_nothing = match self.shared.tuples {
            true => is_unwritten(read, block),
            false => is_zero(read),
        };
        if features.thin && is_nothing {
            self.spare.push(buf);
            if !piece.empty {
                self.zero(piece, over);
            }
            return;
        }
        let block = self.shared.block;
        let (lba, blocks) = (piece.from / block, piece.len / block);
        let piece = Piece { step: Step::Write, ..piece };
        let with = self.with();
        over.extend(self.to.submit_with(Op::Write, lba, blocks, Some(buf), with, piece));
    }

    /// What a piece has beside its data: the blocks' tuples, which are taken along as they are.
    fn with(&self) -> Option<Protected> {
        self.shared.tuples.then_some(Protected::new(Tuples::Behind, Checks::NONE))
    }

    /// Bytes that `len` bytes of the source are in memory.
    fn in_memory(&self, len: u64) -> usize {
        let tuples =
            if self.shared.tuples { len / self.shared.block * TUPLE_LEN as u64 } else { 0 };
        (len + tuples) as usize
    }

    /// Makes the destination read as zeros.
    fn zero(&mut self, piece: Piece, over: &mut Vec<Finished<Piece>>) {
        let (block, features) = (self.shared.block, &self.shared.features);
        let op = features.zeroing().filter(|_| features.thin).unwrap_or(Op::WriteZeroes);
        let (lba, blocks) = (piece.from / block, piece.len / block);
        let piece = Piece { step: Step::Zero, ..piece };
        over.extend(self.to.submit(op, lba, blocks, None, piece));
    }

    /// Bytes that one I/O can be of: of both, if it `reads`.
    fn longest(&self, reads: bool) -> u64 {
        let of = |blocks: u32, block: u64| match blocks {
            0 => u64::MAX,
            blocks => u64::from(blocks) * block,
        };
        let (source, shared) = (self.shared.source.features(), self.shared);
        let to = of(shared.features.max_blocks, shared.block);
        let both = to.min(of(source.max_blocks, shared.source_block));
        // Whole blocks of the source.
        if reads { both / shared.source_block * shared.source_block } else { to }
    }

    /// Waits until one of them may have answered something since `answered`; what it has by then is
    /// appended.
    fn wait_for_either(
        &mut self,
        answered: Instant,
        read: &mut Vec<Finished<Piece>>,
        over: &mut Vec<Finished<Piece>>,
    ) -> Result<(), Over> {
        if answered.elapsed() > HANG {
            let bdev = match self.from.in_flight() > 0 {
                true => &self.shared.source,
                false => &self.shared.destination,
            };
            return Err(self.fail(no_answer(bdev.name())));
        }
        // One at a time: both have a thread's ring of their own.
        match (self.from.in_flight(), self.to.in_flight()) {
            (0, _) => self.to.wait(over, 0),
            (_, 0) => self.from.wait(read, 0),
            _ => thread::sleep(LOOK),
        }
        self.check()
    }

    /// Makes the destination durable.
    fn flush(&mut self) -> Result<(), String> {
        let piece = Piece { from: 0, len: 0, step: Step::Write, empty: false };
        let mut over: Vec<_> = self.to.submit(Op::Flush, 0, 0, None, piece).into_iter().collect();
        let since = Instant::now();
        while self.to.in_flight() > 0 && over.is_empty() {
            if self.to.poll(&mut over) == 0 {
                self.to.wait(&mut over, 0);
            }
            if self.shared.is_over() {
                return Err("it was ended".to_owned());
            }
            if since.elapsed() > HANG && over.is_empty() {
                return Err(no_answer(self.shared.destination.name()));
            }
        }
        let result = over.pop().map_or(Ok(()), |finished| finished.result);
        result.map_err(|e| format!("bdev {}: {e}", self.shared.destination.name()))
    }

    /// Watches the copy, and does what it is asked, until something is to be copied again.
    fn watch(&mut self) -> Result<(), Over> {
        loop {
            self.check()?;
            let asked = self.shared.wait(Phase::Ready, WATCH);
            let is_ready = self.shared.phase() != Phase::Copying;
            if let Some(call) = asked.seal {
                call.run(|()| {
                    if !is_ready {
                        return Err("a write failed meanwhile, and is copied again".to_owned());
                    }
                    let sealed = self.flush();
                    if let Err(why) = &sealed {
                        self.fail(why.clone());
                    }
                    sealed
                });
            }
            if !is_ready {
                return Ok(());
            }
        }
    }

    /// Sleeps until more may be read.
    fn keep_to_limit(&mut self) -> Result<(), Over> {
        loop {
            self.check()?;
            let left = self.due.saturating_duration_since(Instant::now());
            if left.is_zero() || self.shared.limit.load(Ordering::Relaxed) == 0 {
                return Ok(());
            }
            // A limit that is raised meanwhile counts at once.
            self.due = self.due.min(Instant::now() + Duration::from_secs(1));
            self.shared.wait(Phase::Copying, left.min(NAP));
        }
    }

    /// Whether the copy goes on; no write of the guest may wait too long.
    fn check(&self) -> Result<(), Over> {
        if let Some(since) = self.shared.oldest_wait() {
            let waited = ticks::to_ns(ticks::now().saturating_sub(since));
            if u128::from(waited) > HANG.as_nanos() {
                return Err(self.fail(no_answer(self.shared.destination.name())));
            }
        }
        if self.shared.is_over() { Err(Over) } else { Ok(()) }
    }

    fn failed(&self, piece: &Piece, error: bdev::IoError) -> Over {
        let bdev = match piece.step {
            Step::Read => &self.shared.source,
            Step::Write | Step::Zero => &self.shared.destination,
        };
        self.fail(format!("bdev {} at byte {}: {error}", bdev.name(), piece.from))
    }

    fn fail(&self, why: String) -> Over {
        let (from, to) = (self.shared.source.name(), self.shared.destination.name());
        self.shared.fail(format!("the copy of bdev {from} to bdev {to} ended: {why}"));
        Over
    }
}

fn no_answer(bdev: &str) -> String {
    format!("bdev {bdev} has not answered for {} s", HANG.as_secs())
}

/// What a map says, asked for page by page in order.
struct Parts<'a> {
    map: Option<&'a Map>,
    page: MapPage,
    /// Where the page begins and ends.
    range: Range<u64>,
}

impl<'a> Parts<'a> {
    fn new(map: Option<&'a Map>) -> Self {
        Parts { map, page: MapPage::default(), range: 0..0 }
    }

    /// What may hold data within `bytes`, which do not begin before those of the last call.
    fn within(&mut self, bytes: Range<u64>) -> Vec<Range<u64>> {
        let (mut found, mut at) = (Vec::new(), bytes.start);
        while at < bytes.end {
            let Some(map) = self.map else {
                found.push(at..bytes.end);
                return found;
            };
            if !self.range.contains(&at) {
                match map(at) {
                    Some(page) => {
                        self.range = at..page.next.unwrap_or(u64::MAX).max(at + 1);
                        self.page = page;
                    }
                    // It is not known any more.
                    None => self.map = None,
                }
                continue;
            }
            let end = bytes.end.min(self.range.end);
            let parts = self.page.parts.iter().map(|(from, len)| *from..from.saturating_add(*len));
            found.extend(parts.map(|part| cut(&part, &(at..end))).filter(|part| !part.is_empty()));
            at = end;
        }
        found
    }
}

fn overlap(a: &Range<u64>, b: &Range<u64>) -> bool {
    !cut(a, b).is_empty()
}

/// The part of `a` that is within `b`.
fn cut(a: &Range<u64>, b: &Range<u64>) -> Range<u64> {
    a.start.max(b.start)..a.end.min(b.end)
}

/// A piece, in parts of at most `longest` bytes.
fn cut_up(piece: Piece, longest: u64) -> impl Iterator<Item = Piece> {
    let end = piece.from + piece.len;
    let step = usize::try_from(longest.min(piece.len).max(1)).unwrap_or(usize::MAX);
    (piece.from..end).step_by(step).map(move |from| {
        let len = longest.min(end - from);
        Piece { from, len, ..piece }
    })
}

/// Whether these are blocks with the tuples of what nobody wrote, or unmapped.
fn is_unwritten(bytes: &[u8], block: usize) -> bool {
    let is_unwritten = |whole: &[u8]| {
        let (data, tuple) = whole.split_at(block);
        tuple == [0xFF; TUPLE_LEN] && is_zero(data)
    };
    bytes.chunks(block + TUPLE_LEN).all(is_unwritten)
}

fn is_zero(bytes: &[u8]) -> bool {
    bytes.chunks(512).all(|some| some.iter().fold(0, |any, byte| any | byte) == 0)
}
