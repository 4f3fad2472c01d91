//! The unit's data path: one queue pair on a bdev that is being copied, on top of one on its source and one
//! on its destination.
//!
//! A read, and a write that the destination need not have yet, goes to the source as it is. A write that it
//! needs is given to the source from the guest's memory and to the destination in pieces, copied into the
//! channel's own: at most [`COPY_AT_ONCE`] bytes within `submit` or one `poll`. Nothing here allocates in
//! the long run, locks or waits, but for the first use of a piece and for the end of the copy.

use crate::pieces::{PIECE, Pieces};
use crate::shared::{Phase, Shared, Watched};
use bdev::{
    COPY_AT_ONCE, Channel, Completion, Io, IoError, Late, Mismatches, Op, Protected, Slots, Submit,
    TUPLE_LEN, Tuples,
};
use reactor::{Waker, ticks};
use std::collections::VecDeque;
use std::ops::RangeInclusive;
use std::sync::Arc;
use std::sync::atomic::Ordering;

/// I/Os that a channel can have in flight.
const SLOTS: u16 = 256;
/// Completions taken from a channel below at a time.
const DONE: usize = 64;

/// An I/O under way.
#[derive(Clone)]
struct Slot {
    io: Io,
    /// What a read or write has beside its data.
    with: Option<Protected>,
    /// Counts I/Os: of two writes the earlier one has the lower number.
    number: u64,
    /// When it came, in ticks.
    started: u64,
    state: State,
    /// How the source ended it.
    source: Option<Result<(), IoError>>,
    /// Chunks on which it counts as a write in flight.
    chunks: Option<RangeInclusive<u32>>,
    /// The destination has to have it, too.
    mirrored: bool,
    /// It did not take all of it, as its protection information is wrong there.
    refused: bool,
    /// Bytes from the start that the destination was given.
    cursor: u64,
    /// Pieces that are not over.
    pending: u32,
    /// A piece that the destination had no room for.
    prepared: Option<u16>,
    /// In [`MirrorChannel::waiting`].
    waits: bool,
    /// Since when it waits for the copier or the destination, in ticks.
    since: u64,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum State {
    Free,
    /// In [`MirrorChannel::parked`].
    Parked,
    /// The source was given it.
    Going,
}

/// What became of an I/O that was to begin.
#[derive(PartialEq, Eq)]
enum Begun {
    Going,
    /// It is to wait: for the copier, or for an earlier write.
    Later,
    /// The source has no room.
    Full,
}

impl Slot {
    fn new(io: Io, with: Option<&Protected>) -> Self {
        Slot {
            io,
            with: with.copied(),
            number: 0,
            started: 0,
            state: State::Free,
            source: None,
            chunks: None,
            mirrored: false,
            refused: false,
            cursor: 0,
            pending: 0,
            prepared: None,
            waits: false,
            since: 0,
        }
    }
}

/// Whether the unit gives tuples of its own, one of each block.
fn brings_tuples(with: &Protected) -> bool {
    matches!(with.tuples, Tuples::Apart(..) | Tuples::Behind)
}

pub(crate) struct MirrorChannel {
    source: Box<dyn Channel>,
    /// `None`: it was over when this was opened. Dropped before `pieces`, or never.
    destination: Option<Box<dyn Channel>>,
    pieces: Pieces,
    shared: Arc<Shared>,
    watched: Arc<Watched>,
    waker: Waker,
    slots: Slots<Slot>,
    /// Numbers given out.
    numbers: u64,
    /// Slots that do not begin yet, in order.
    parked: VecDeque<u16>,
    /// Slots whose next piece had no room, or no turn, in order.
    waiting: VecDeque<u16>,
    /// Slots, with their numbers, that waited for the copier or the destination, in that order.
    since: VecDeque<(u16, u64)>,
    late: Late,
    mismatches: Mismatches,
    below: Vec<Completion>,
    /// I/Os that the source has.
    with_source: u32,
    /// Bytes that may still be copied in this turn.
    turn: usize,
    /// It has seen that the copy is over.
    over: bool,
    /// And is still to end what waited for the destination alone.
    sweeps: bool,
}

impl Channel for MirrorChannel {
    #[inline]
    fn submit(&mut self, io: &Io) -> Submit {
        self.take(io, None)
    }

    fn submit_protected(&mut self, io: &Io, with: &Protected) -> Submit {
        if !self.shared.tuples {
            return Submit::Done(Err(IoError::Unsupported));
        }
        self.take(io, Some(with).filter(|_| matches!(io.op, Op::Read | Op::Write)))
    }

    fn mismatch(&mut self, tag: u64) -> Option<u64> {
        self.mismatches.take(tag)
    }

    #[inline]
    fn poll(&mut self, done: &mut Vec<Completion>) -> u32 {
        let before = done.len();
        if !self.late.hand_over(done) {
            return (done.len() - before) as u32;
        }
        self.turn = COPY_AT_ONCE;
        if !self.over && self.shared.is_over() {
            self.copy_is_over();
        }
        if self.with_source > 0 {
            self.poll_source(done);
        }
        if self.pieces.taken() > 0 {
            self.poll_destination(done);
        }
        if !self.parked.is_empty() {
            self.begin_parked(done);
        }
        if !self.waiting.is_empty() {
            self.go_on_waiting(done);
        }
        if !self.over && self.shared.is_over() {
            self.copy_is_over();
        }
        if std::mem::take(&mut self.sweeps) {
            (0..SLOTS).for_each(|at| self.finish_if_over(at, done));
        }
        if !self.since.is_empty() {
            self.note_oldest();
        }
        (done.len() - before) as u32
    }

    fn sparse_run(&mut self, lba: u64, blocks: u64) -> bdev::Run {
        self.source.sparse_run(lba, blocks)
    }
}

impl MirrorChannel {
    /// On queue pairs of both that were opened on the calling thread, which `waker` wakes.
    pub fn new(
        shared: Arc<Shared>,
        source: Box<dyn Channel>,
        destination: Option<Box<dyn Channel>>,
        waker: Waker,
    ) -> Self {
        let slots = usize::from(SLOTS);
        MirrorChannel {
            source,
            over: destination.is_none(),
            destination,
            pieces: Pieces::new(),
            watched: shared.add_channel(waker.clone()),
            shared,
            waker,
            slots: Slots::new(SLOTS, |_| Slot::new(Io::flush(0), None)),
            numbers: 0,
            parked: VecDeque::with_capacity(slots),
            waiting: VecDeque::with_capacity(slots),
            since: VecDeque::with_capacity(2 * slots),
            late: Late::with_capacity(SLOTS),
            mismatches: Mismatches::default(),
            below: Vec::with_capacity(DONE),
            with_source: 0,
            turn: 0,
            sweeps: false,
        }
    }

    /// Takes an I/O of the unit's.
    #[inline]
    fn take(&mut self, io: &Io, with: Option<&Protected>) -> Submit {
        if self.over || io.op == Op::Read {
            return self.pass(io, with);
        }
        if io.op == Op::Flush && self.shared.phase() != Phase::Ready {
            return self.pass(io, with);
        }
        // The whole of it, before the destination has a part.
        let (source, at) = (&self.shared.source, self.slots.next_free());
        let (geometry, features) = (source.geometry(), source.features());
        let checked = match with {
            None => io.check(&geometry, &features),
            Some(with) => with.check(io, &geometry, &features),
        };
        if let Err(e) = checked {
            return Submit::Done(Err(e));
        }
        if io.op != Op::Flush && io.blocks == 0 {
            return Submit::Done(Ok(()));
        }
        let Some(at) = at else { return Submit::Full };
        self.turn = COPY_AT_ONCE;
        self.numbers += 1;
        let (number, started) = (self.numbers, ticks::now());
        self.slots[at] = Slot { number, started, ..Slot::new(*io, with) };
        self.slots.take();
        match self.begin(at) {
            Begun::Full => {
                self.slots[at].state = State::Free;
                self.slots.give_back(at);
                return Submit::Full;
            }
            Begun::Later => self.park(at),
            Begun::Going => {}
        }
        if self.shared.is_over() {
            self.copy_is_over();
        }
        self.note_oldest();
        match self.ended(at) {
            Some(result) => {
                self.release(at);
                Submit::Done(result)
            }
            None => Submit::Pending,
        }
    }

    /// Gives the source alone an I/O, as it is.
    fn pass(&mut self, io: &Io, with: Option<&Protected>) -> Submit {
        let Some(at) = self.slots.next_free() else { return Submit::Full };
        let submit = self.give_source(at, io, with);
        if submit == Submit::Pending {
            self.slots.take();
            let (started, state) = (ticks::now(), State::Going);
            self.slots[at] = Slot { started, state, ..Slot::new(*io, with) };
            self.with_source += 1;
        }
        submit
    }

    /// Gives the source an I/O under the number of its slot.
    fn give_source(&mut self, at: u16, io: &Io, with: Option<&Protected>) -> Submit {
        let given = Io { tag: u64::from(at), ..*io };
        let submit = match with {
            None => self.source.submit(&given),
            Some(with) => self.source.submit_protected(&given, with),
        };
        if let Submit::Done(result) = submit {
            self.keep_mismatch(at, io.tag, result);
        }
        submit
    }

    /// The source ended the I/O of a slot, the unit's with that tag, so.
    fn keep_mismatch(&mut self, at: u16, tag: u64, result: Result<(), IoError>) {
        if result.is_err_and(IoError::is_mismatch)
            && let Some(block) = self.source.mismatch(u64::from(at))
        {
            self.mismatches.keep(tag, block);
        }
    }

    /// Has an I/O that may not begin yet wait.
    fn park(&mut self, at: u16) {
        self.slots[at].state = State::Parked;
        self.parked.push_back(at);
        self.shared.parked.fetch_add(1, Ordering::AcqRel);
        // The copier may have ended with the chunk before it saw that somebody waits.
        self.waker.wake();
    }

    /// Begins an I/O: with the source, and where that is needed with the destination.
    fn begin(&mut self, at: u16) -> Begun {
        let Slot { io, with, number, .. } = self.slots[at];
        let over = self.over || self.shared.is_over();
        let mut mirrored = !over && io.op == Op::Flush;
        let mut chunks = None;
        if !over && io.op != Op::Flush {
            let block = self.shared.source_block;
            let range = self.shared.chunks.touched_by(io.lba * block, io.blocks * block);
            let Ok(copied) = self.shared.chunks.begin_write(range.clone()) else {
                self.waits_from_now(at);
                return Begun::Later;
            };
            if copied && self.follows(&io, number) {
                self.shared.chunks.end_write(range);
                return Begun::Later;
            }
            (mirrored, chunks) = (copied, Some(range));
        }
        let given = if mirrored { self.for_both(&io) } else { io };
        let source = match self.give_source(at, &given, with.as_ref()) {
            Submit::Done(result) => Some(result),
            Submit::Pending => {
                self.with_source += 1;
                None
            }
            Submit::Full => {
                chunks.into_iter().for_each(|range| self.shared.chunks.end_write(range));
                return Begun::Full;
            }
        };
        let slot = &mut self.slots[at];
        (slot.source, slot.chunks, slot.mirrored, slot.state) =
            (source, chunks, mirrored, State::Going);
        if mirrored {
            self.waits_from_now(at);
            self.advance(at);
        }
        Begun::Going
    }

    /// What the source is given of an I/O that the destination has to have, too: an UNMAP that it may carry out in part
    /// leaves what the destination, where all reads as zeros, would not have.
    fn for_both(&self, io: &Io) -> Io {
        let zeroing = || self.shared.source.features().zeroing().unwrap_or(Op::Unmap);
        let op = if io.op == Op::Unmap { zeroing() } else { io.op };
        Io { op, ..*io }
    }

    /// Whether both may have something else after an I/O: the source failed, or carried it out in part.
    fn may_differ(&self, slot: &Slot) -> bool {
        let in_part = || self.shared.source.features().zeroing().is_none();
        slot.source.is_some_and(|result| result.is_err()) || (slot.io.op == Op::Unmap && in_part())
    }

    /// Whether an earlier write to the same blocks has not ended.
    fn follows(&self, io: &Io, number: u64) -> bool {
        let same = |slot: &Slot| {
            slot.state != State::Free
                && slot.number != 0
                && slot.number < number
                && slot.io.op.is_write()
                && slot.io.lba < io.lba + io.blocks
                && io.lba < slot.io.lba + slot.io.blocks
        };
        self.slots.iter().any(same)
    }

    /// An I/O waits for the copier or the destination, unless it did before.
    fn waits_from_now(&mut self, at: u16) {
        let slot = &mut self.slots[at];
        if slot.since == 0 {
            slot.since = ticks::now().max(1);
            self.since.push_back((at, slot.number));
        }
    }

    /// Tells the copier since when the oldest does.
    fn note_oldest(&mut self) {
        let mut oldest = 0;
        while let Some((at, number)) = self.since.front().copied() {
            let slot = &self.slots[at];
            let waits = slot.state != State::Free
                && slot.number == number
                && (slot.state == State::Parked || !self.destination_has(at));
            if waits {
                oldest = slot.since;
                break;
            }
            self.since.pop_front();
        }
        self.watched.since.store(oldest, Ordering::Relaxed);
    }

    /// Bytes that the destination is to be given of an I/O.
    fn bytes_of(&self, io: &Io) -> u64 {
        match io.op {
            Op::Flush => 1, // one piece, of nothing
            _ => io.blocks * self.shared.source_block,
        }
    }

    /// Whether the destination has all of an I/O that it needs.
    fn destination_has(&self, at: u16) -> bool {
        let slot = &self.slots[at];
        !slot.mirrored || (slot.pending == 0 && slot.cursor >= self.bytes_of(&slot.io))
    }

    /// Takes an I/O to the destination as far as it goes now.
    fn advance(&mut self, at: u16) {
        loop {
            let slot = &mut self.slots[at];
            let (io, cursor, prepared) = (slot.io, slot.cursor, slot.prepared.take());
            if !slot.mirrored || cursor >= self.bytes_of(&io) {
                return;
            }
            let Some(piece) = prepared.or_else(|| self.prepare(at, &io, cursor)) else {
                return self.wait(at);
            };
            if !self.send(at, piece, &io, cursor) {
                return self.wait(at);
            }
        }
    }

    /// Has an I/O wait until there is room, or its next turn.
    fn wait(&mut self, at: u16) {
        if !self.slots[at].waits {
            self.slots[at].waits = true;
            self.waiting.push_back(at);
        }
        if self.turn == 0 {
            self.waker.wake();
        }
    }

    /// Bytes of the piece at `cursor`, which is not the end.
    fn length_at(&self, io: &Io, cursor: u64) -> u64 {
        let longest = match self.shared.features.max_blocks {
            0 => u64::MAX,
            blocks => u64::from(blocks) * self.shared.block,
        };
        let left = self.bytes_of(io) - cursor;
        let block = self.shared.block;
        let room = match self.shared.tuples {
            true => PIECE as u64 / (block + TUPLE_LEN as u64) * block,
            false => PIECE as u64,
        };
        match io.op {
            Op::Write => left.min(longest).min(room),
            _ => left.min(longest),
        }
    }

    /// The piece at `cursor`; `None`: there is no memory, or its turn is over.
    fn prepare(&mut self, at: u16, io: &Io, cursor: u64) -> Option<u16> {
        if io.op != Op::Write {
            return self.pieces.take(at, 0, |_| {});
        }
        if self.turn == 0 {
            return None;
        }
        let (len, from) = (self.length_at(io, cursor) as usize, cursor as usize);
        let Some(with) = self.slots[at].with.filter(brings_tuples) else {
            let piece = self.pieces.take(at, len, |to| _ = io.sg.copy_to_slice(from, to))?;
            self.turn = self.turn.saturating_sub(len);
            return Some(piece);
        };
        let block = self.shared.block as usize;
        let (whole, first) = (block + TUPLE_LEN, from / block);
        let len = len / block * whole;
        let piece = self.pieces.take(at, len, |to| match with.tuples {
            Tuples::Apart(tuples, skipped) => {
                for (nth, one) in to.chunks_exact_mut(whole).enumerate() {
                    let (data, tuple) = one.split_at_mut(block);
                    io.sg.copy_to_slice((first + nth) * block, data);
                    tuples.copy_to_slice((skipped as usize + first + nth) * TUPLE_LEN, tuple);
                }
            }
            _ => _ = io.sg.copy_to_slice(first * whole, to),
        })?;
        self.turn = self.turn.saturating_sub(len);
        Some(piece)
    }

    /// Gives the destination a piece; false: it has no room.
    fn send(&mut self, at: u16, piece: u16, io: &Io, cursor: u64) -> bool {
        let length = self.length_at(io, cursor);
        let (block, features) = (self.shared.block, self.shared.features);
        let op = match io.op {
            // What its blocks read as after that must not differ from the source's.
            Op::Unmap => features.zeroing().unwrap_or(Op::WriteZeroes),
            op => op,
        };
        let first = io.lba * self.shared.source_block + cursor;
        let given = Io {
            op,
            fua: io.fua && op == Op::Write && features.fua,
            lba: if op == Op::Flush { 0 } else { first / block },
            blocks: if op == Op::Flush { 0 } else { length / block },
            sg: self.pieces.sg(piece),
            tag: u64::from(piece),
        };
        let with = self.slots[at].with.map(|with| {
            let further = with.further(io.lba, cursor / block);
            let tuples = if brings_tuples(&with) { Tuples::Behind } else { with.tuples };
            Protected { tuples, ..further }
        });
        let Some(destination) = &mut self.destination else { return false };
        let submit = match with {
            None => destination.submit(&given),
            Some(with) => destination.submit_protected(&given, &with),
        };
        match submit {
            Submit::Done(result) => {
                self.slots[at].cursor += length;
                self.pieces.give_back(piece);
                self.note(at, result);
            }
            Submit::Pending => {
                self.slots[at].cursor += length;
                self.slots[at].pending += 1;
            }
            Submit::Full => {
                self.slots[at].prepared = Some(piece);
                return false;
            }
        }
        true
    }

    /// The destination ended something of an I/O so: an error is the end of the copy, unless the source finds something
    /// wrong with it, too.
    fn note(&mut self, at: u16, result: Result<(), IoError>) {
        if result.is_err_and(IoError::is_mismatch) {
            self.slots[at].refused = true;
        } else {
            self.note_failure(result);
        }
    }

    fn note_failure(&self, result: Result<(), IoError>) {
        if let Err(error) = result {
            let (from, to) = (self.shared.source.name(), self.shared.destination.name());
            self.shared.fail(format!("the copy of bdev {from} ended, as of bdev {to} {error}"));
        }
    }

    /// The copy is over: nothing waits for the destination any more.
    #[cold]
    fn copy_is_over(&mut self) {
        (self.over, self.sweeps) = (true, true);
        // This thread may be the first to know.
        self.waker.wake();
        self.waiting.clear();
        for at in 0..SLOTS {
            let slot = &mut self.slots[at];
            slot.waits = false;
            if slot.state != State::Going || !slot.mirrored {
                continue;
            }
            slot.mirrored = false;
            if let Some(piece) = slot.prepared.take() {
                self.pieces.give_back(piece);
            }
            let abandoned = self.pieces.abandon(at);
            self.shared.orphans.fetch_add(abandoned, Ordering::AcqRel);
        }
    }

    /// How an I/O ended, if it has.
    fn ended(&self, at: u16) -> Option<Result<(), IoError>> {
        let slot = &self.slots[at];
        slot.source.filter(|_| slot.state == State::Going && self.destination_has(at))
    }

    /// Ends an I/O if both have done it.
    fn finish_if_over(&mut self, at: u16, done: &mut Vec<Completion>) {
        let Some(result) = self.ended(at) else { return };
        let ended = ticks::now();
        let (tag, started) = (self.slots[at].io.tag, self.slots[at].started);
        self.release(at);
        let ticks = ended.saturating_sub(started);
        self.late.push(Completion { tag, result, ticks, ended }, done);
    }

    /// A slot is free again, and its chunks.
    fn release(&mut self, at: u16) {
        let slot = &mut self.slots[at];
        slot.state = State::Free;
        if slot.refused && slot.source == Some(Ok(())) {
            self.note_failure(Err(IoError::Guard));
        }
        if let Some(chunks) = self.slots[at].chunks.take() {
            let slot = &self.slots[at];
            if slot.mirrored && self.may_differ(slot) {
                self.shared.copy_again(chunks.clone());
            }
            self.shared.chunks.end_write(chunks);
        }
        self.slots.give_back(at);
    }

    fn poll_source(&mut self, done: &mut Vec<Completion>) {
        let mut below = std::mem::take(&mut self.below);
        loop {
            below.clear();
            self.source.poll(&mut below);
            self.with_source -= below.len() as u32;
            for c in &below {
                let at = c.tag as u16;
                self.keep_mismatch(at, self.slots[at].io.tag, c.result);
                self.slots[at].source = Some(c.result);
                self.finish_if_over(at, done);
            }
            if below.len() < DONE {
                break;
            }
        }
        self.below = below;
    }

    fn poll_destination(&mut self, done: &mut Vec<Completion>) {
        let mut below = std::mem::take(&mut self.below);
        loop {
            below.clear();
            let Some(destination) = &mut self.destination else { break };
            destination.poll(&mut below);
            for c in &below {
                let piece = c.tag as u16;
                let slot = self.pieces.slot(piece);
                self.pieces.give_back(piece);
                let Some(at) = slot else {
                    self.shared.orphans.fetch_sub(1, Ordering::AcqRel);
                    continue;
                };
                self.slots[at].pending -= 1;
                self.note(at, c.result);
                self.finish_if_over(at, done);
            }
            if below.len() < DONE {
                break;
            }
        }
        self.below = below;
    }

    /// Begins what waited for the copier or for an earlier write.
    fn begin_parked(&mut self, done: &mut Vec<Completion>) {
        for _ in 0..self.parked.len() {
            let Some(at) = self.parked.pop_front() else { return };
            if self.begin(at) != Begun::Going {
                self.parked.push_back(at);
                continue;
            }
            self.shared.parked.fetch_sub(1, Ordering::AcqRel);
            self.finish_if_over(at, done);
        }
    }

    /// Goes on with what had no room, or whose turn was over.
    fn go_on_waiting(&mut self, done: &mut Vec<Completion>) {
        for _ in 0..self.waiting.len() {
            let Some(at) = self.waiting.pop_front() else { break };
            self.slots[at].waits = false;
            self.advance(at);
            if !self.slots[at].waits {
                self.finish_if_over(at, done);
                continue;
            }
            if self.turn > 0 {
                // Still no room: it stays the first.
                self.waiting.rotate_right(1);
            }
            break;
        }
    }
}

impl Drop for MirrorChannel {
    fn drop(&mut self) {
        self.shared.drop_channel(&self.watched);
        if self.pieces.taken() == 0 || !self.shared.is_over() {
            return;
        }
        // What a destination that does not answer still has must not keep the thread: it keeps the
        // memory, its channel, and itself.
        tracing::warn!(
            bdev = self.shared.destination.name(),
            "I/O of a copy that is over has no answer; the bdev stays in use until the target ends"
        );
        std::mem::forget(self.destination.take());
        std::mem::forget(std::mem::replace(&mut self.pieces, Pieces::new()));
        std::mem::forget(self.shared.clone());
    }
}
