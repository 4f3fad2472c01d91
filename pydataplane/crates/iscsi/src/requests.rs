//! The I/Os that the thread of a device has: which are to be sent, which are in flight, and what they come to.
//! Without a connection: what is here outlives each session.

use std::collections::VecDeque;
use std::time::{Duration, Instant};

use bdev::{
    AlignedBuf, FlushCause, FlushLatch, IoError, Op, Overlaps, Slots, ThreadRequest, WriteHow,
};
use guestmem::{IoVec, Sg};

use crate::command::{self, Cdb, UNMAP_LEN};
use crate::sense::{Answer, Verdict};
use crate::session::{DEPTH, Data};
use crate::unit::Unit;

/// Runs of memory that one command takes at most (`IOV_MAX`).
pub(crate) const RUNS: usize = 1024;
/// First and longest pause before a target that is busy has a command again.
const PAUSE: Duration = Duration::from_millis(10);
const PAUSE_MAX: Duration = Duration::from_secs(1);

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum State {
    Free,
    /// In `ready` or `later`.
    Waits,
    /// For another change of the same blocks.
    Held,
    /// With the session.
    Sent,
}

struct Entry {
    request: Option<ThreadRequest>,
    state: State,
    /// What was to be compared and written in one step, of a LUN that turned out not to have the command: a WRITE of
    /// the second half. Whoever asks has compared, so it is right where no other host writes.
    second_half: bool,
    /// In which order it came.
    number: u64,
    since: Instant,
    /// Changes that had been answered before its part went off.
    changes: u64,
    /// When its part went off.
    sent: Instant,
    /// Bytes that are done.
    done: u64,
    /// Bytes of the part that is with the session; 0: what is done is made durable.
    part: u64,
    pause: Duration,
    /// Of the part: the library changes it while it has it.
    runs: Vec<IoVec>,
    list: Box<[u8; UNMAP_LEN]>,
}

/// A command that is to be sent.
pub(crate) struct Part<'a> {
    pub cdb: Cdb,
    pub data: Data,
    pub runs: &'a mut [IoVec],
}

/// See the file's comment.
pub(crate) struct Requests {
    unit: Unit,
    write_through: bool,
    slots: Slots<Entry>,
    ready: VecDeque<u16>,
    later: Vec<(Instant, u16)>,
    overlaps: Overlaps,
    count: u64,
    zeros: AlignedBuf,
    /// Since when nothing was answered although something waits.
    since: Option<Instant>,
    /// Changes that were answered, and how many of them a flush has made durable.
    changes: u64,
    flushed: u64,
}

impl Requests {
    pub(crate) fn new(unit: Unit, write_through: bool) -> Requests {
        let free = |_| Entry {
            request: None,
            state: State::Free,
            second_half: false,
            number: 0,
            since: Instant::now(),
            changes: 0,
            sent: Instant::now(),
            done: 0,
            part: 0,
            pause: PAUSE,
            runs: Vec::new(),
            list: Box::new([0; UNMAP_LEN]),
        };
        Requests {
            unit,
            write_through,
            slots: Slots::new(DEPTH, free),
            ready: VecDeque::with_capacity(usize::from(DEPTH)),
            later: Vec::with_capacity(usize::from(DEPTH)),
            overlaps: Overlaps::new(DEPTH),
            count: 0,
            zeros: AlignedBuf::zeroed(unit.capacity.geometry.block_size as usize),
            since: None,
            changes: 0,
            flushed: 0,
        }
    }

    fn block_size(&self) -> u64 {
        u64::from(self.unit.capacity.geometry.block_size)
    }

    /// Whether it has I/Os.
    pub(crate) fn is_empty(&self) -> bool {
        self.slots.taken() == 0
    }

    /// Whether it takes no more for now.
    pub(crate) fn is_full(&self) -> bool {
        self.slots.is_full()
    }

    /// Since when nothing was answered although something waits.
    pub(crate) fn waits_since(&self) -> Option<Instant> {
        self.since.filter(|_| !self.is_empty())
    }

    /// Something was answered.
    pub(crate) fn is_answered(&mut self) {
        self.since = Some(Instant::now());
    }

    /// Takes I/Os that have come, as far as there is room. Two that change the same blocks are never in flight
    /// together: one whose answer is lost is sent again, and must not undo another that was answered.
    pub(crate) fn take(&mut self, mut next: impl FnMut() -> Option<ThreadRequest>) {
        while let Some(at) = self.slots.next_free()
            && let Some(request) = next()
        {
            if self.is_empty() {
                self.since = Some(Instant::now());
            }
            self.slots.take();
            self.count += 1;
            let begins = self.overlaps.add(at, 0, &request.io);
            let entry = &mut self.slots[at];
            entry.state = if begins { State::Waits } else { State::Held };
            (entry.request, entry.second_half) = (Some(request), false);
            (entry.number, entry.since) = (self.count, Instant::now());
            (entry.done, entry.pause) = (0, PAUSE);
            if begins {
                self.ready.push_back(at);
            }
        }
    }

    /// The next one to be sent.
    pub(crate) fn next_ready(&mut self) -> Option<u16> {
        let now = Instant::now();
        let due = self.later.iter().position(|(at, _)| *at <= now);
        if let Some(at) = due {
            self.ready.push_back(self.later.swap_remove(at).1);
        }
        self.ready.pop_front()
    }

    /// When the next one is to be sent that waits for its time.
    pub(crate) fn next_due(&self) -> Option<Instant> {
        self.later.iter().map(|(at, _)| *at).min()
    }

    /// The next part of an I/O, which is with the session from now on.
    ///
    /// # Errors
    /// It cannot be sent.
    pub(crate) fn part(&mut self, at: u16) -> Result<Part<'_>, IoError> {
        let (block_size, unit, write_through) = (self.block_size(), self.unit, self.write_through);
        let zeros = self.zeros.as_mut_ptr();
        let entry = &mut self.slots[at];
        let Some(ThreadRequest { io, how, .. }) = &entry.request else {
            return Err(IoError::Aborted);
        };
        let compares = *how == WriteHow::Compared && !entry.second_half;
        let left = (io.blocks * block_size).saturating_sub(entry.done);
        let lba = io.lba + entry.done / block_size;
        let fua = io.fua || write_through;
        (entry.state, entry.sent) = (State::Sent, Instant::now());
        entry.changes = self.changes;
        entry.runs.clear();
        let (cdb, data);
        match io.op {
            Op::Read | Op::Write if compares => {
                entry.part = left;
                runs_of(&io.sg, 0, io.sg.len() as u64, block_size, &mut entry.runs);
                (cdb, data) = (command::compare_and_write(lba, io.blocks as u8, fua), Data::Out);
            }
            Op::Read | Op::Write => {
                let most = left.min(unit.part_max());
                let skipped = if entry.second_half { io.sg.len() as u64 / 2 } else { 0 };
                let from = skipped + entry.done;
                entry.part = runs_of(&io.sg, from, most, block_size, &mut entry.runs);
                if entry.part == 0 {
                    return Err(IoError::Resources);
                }
                let blocks = (entry.part / block_size) as u32;
                (cdb, data) = match io.op {
                    Op::Read => (command::read(lba, blocks), Data::In),
                    _ => (command::write(lba, blocks, fua), Data::Out),
                };
            }
            Op::Flush => {
                entry.part = 0;
                (cdb, data) = (command::synchronize_cache(0, 0), Data::None);
            }
            Op::Unmap | Op::WriteZeroes if left == 0 => {
                // There is no FUA for these.
                entry.part = 0;
                let blocks = u32::try_from(io.blocks).unwrap_or(0);
                (cdb, data) = (command::synchronize_cache(io.lba, blocks), Data::None);
            }
            Op::Unmap if unit.unmaps() => {
                let blocks = (left / block_size).min(u64::from(unit.unmap_max()));
                entry.part = blocks * block_size;
                (cdb, *entry.list) = command::unmap(lba, blocks as u32);
                // SAFETY: the list is boxed, and is not touched while the part is with the session.
                entry.runs.push(unsafe { IoVec::new(entry.list.as_mut_ptr(), UNMAP_LEN) });
                data = Data::Out;
            }
            Op::Unmap | Op::WriteZeroes => {
                let blocks = (left / block_size).min(u64::from(unit.same_max()));
                entry.part = blocks * block_size;
                // SAFETY: a block of zeros, which stays as long as this, and is only read.
                entry.runs.push(unsafe { IoVec::new(zeros, block_size as usize) });
                let unmap = io.op == Op::Unmap;
                (cdb, data) = (command::write_same(lba, blocks as u32, unmap), Data::Out);
            }
        }
        Ok(Part { cdb, data, runs: &mut entry.runs })
    }

    /// An I/O was not taken by the session after all.
    pub(crate) fn put_back(&mut self, at: u16) {
        self.slots[at].state = State::Waits;
        self.ready.push_front(at);
    }

    /// A part of an I/O was answered. It waits no longer than `patience`, if there is one, for a target that is
    /// busy. A flush that failed is latched before anybody is told.
    pub(crate) fn answered(
        &mut self,
        at: u16,
        answer: Answer,
        patience: Option<Duration>,
        latch: &FlushLatch,
    ) {
        let block_size = self.block_size();
        let (write_through, cache) = (self.write_through, self.unit.mode.cache);
        let entry = &mut self.slots[at];
        let Some(ThreadRequest { io, how, .. }) = &entry.request else { return };
        let compares = *how == WriteHow::Compared && !entry.second_half;
        let (op, all) = (io.op, io.blocks * block_size);
        let syncs = entry.part == 0;
        if compares && answer.is_unsupported() {
            entry.second_half = true;
            entry.state = State::Waits;
            return self.ready.push_back(at);
        }
        // It may have begun.
        if compares && answer.is_aborted() {
            return self.finish(at, Err(IoError::Aborted));
        }
        // Also of what makes zeros durable.
        let of = if syncs { Op::Flush } else { op };
        match answer.verdict(of) {
            Verdict::Done => {
                entry.done += entry.part;
                if op == Op::Flush {
                    self.flushed = self.flushed.max(entry.changes);
                } else if op.is_write() && cache && !write_through && !io.fua {
                    self.changes += 1;
                }
                let durable = write_through || io.fua && cache;
                let needs_sync = durable && matches!(op, Op::Unmap | Op::WriteZeroes);
                if syncs || (entry.done == all && !needs_sync) {
                    self.finish(at, Ok(()));
                } else {
                    entry.pause = PAUSE;
                    entry.state = State::Waits;
                    self.ready.push_back(at);
                }
            }
            // It keeps nothing in a cache.
            Verdict::Failed(_) if syncs && answer.is_unsupported() => self.finish(at, Ok(())),
            Verdict::Failed(error) => {
                if syncs && error == IoError::Flush {
                    latch.set(FlushCause::Flush, None);
                }
                self.finish(at, Err(error));
            }
            Verdict::Again | Verdict::Later
                if patience.is_some_and(|most| entry.since.elapsed() >= most) =>
            {
                self.finish(at, Err(op.failed()));
            }
            Verdict::Again | Verdict::Later => {
                entry.state = State::Waits;
                self.later.push((Instant::now() + entry.pause, at));
                entry.pause = (entry.pause * 2).min(PAUSE_MAX);
            }
        }
    }

    /// Whether something was answered that no flush has made durable. The next call only knows of what comes then.
    pub(crate) fn take_unflushed(&mut self) -> bool {
        std::mem::replace(&mut self.flushed, self.changes) < self.changes
    }

    /// When the command went off that has waited longest for its answer.
    pub(crate) fn oldest_sent(&self) -> Option<Instant> {
        let sent = self.slots.iter().filter(|entry| entry.state == State::Sent);
        sent.map(|entry| entry.sent).min()
    }

    /// Ends those that went off so long ago. Nothing may be in flight any more.
    pub(crate) fn fail_sent_before(&mut self, before: Instant) {
        for at in 0..DEPTH {
            let entry = &self.slots[at];
            if entry.state == State::Sent
                && entry.sent <= before
                && let Some(ThreadRequest { io, .. }) = &entry.request
            {
                let error = io.op.failed();
                self.finish(at, Err(error));
            }
        }
    }

    /// The session is gone, and nothing of what it had is in flight any more: what was not answered is sent again
    /// in the order in which it came. What a comparison came to is not known.
    pub(crate) fn begin_anew(&mut self) {
        let is_unknown = |entry: &Entry| {
            let how = entry.request.as_ref().map(|request| request.how);
            how == Some(WriteHow::Compared) && !entry.second_half && entry.state == State::Sent
        };
        for at in 0..DEPTH {
            if is_unknown(&self.slots[at]) {
                self.finish(at, Err(IoError::Aborted));
            }
        }
        self.ready.clear();
        self.later.clear();
        let mut all: Vec<(u64, u16)> = Vec::with_capacity(self.slots.taken());
        for at in 0..DEPTH {
            let entry = &mut self.slots[at];
            if matches!(entry.state, State::Waits | State::Sent) {
                entry.state = State::Waits;
                // Zeros that were to be made durable may be gone.
                let zeroes = |r: &ThreadRequest| matches!(r.io.op, Op::Unmap | Op::WriteZeroes);
                if entry.request.as_ref().is_some_and(zeroes) {
                    entry.done = 0;
                }
                all.push((entry.number, at));
            }
        }
        all.sort_unstable();
        self.ready.extend(all.into_iter().map(|(_, at)| at));
    }

    /// Ends all without an answer. Nothing may be in flight.
    pub(crate) fn fail_all(&mut self) {
        for at in 0..DEPTH {
            if let Some(ThreadRequest { io, .. }) = &self.slots[at].request {
                let error = io.op.failed();
                self.finish(at, Err(error));
            }
        }
        self.ready.clear();
        self.later.clear();
        self.since = None;
    }

    pub(crate) fn finish(&mut self, at: u16, result: Result<(), IoError>) {
        let entry = &mut self.slots[at];
        entry.state = State::Free;
        if let Some(request) = entry.request.take() {
            self.slots.give_back(at);
            request.end(result);
            let (slots, ready) = (&mut self.slots, &mut self.ready);
            self.overlaps.remove(at, |at| {
                slots[at].state = State::Waits;
                ready.push_back(at);
            });
        }
    }
}

/// Fills `runs` with those that make up `most` bytes from byte `offset`, or as many whole blocks as [`RUNS`] of
/// them do; returns the bytes.
fn runs_of(sg: &Sg, offset: u64, most: u64, block_size: u64, runs: &mut Vec<IoVec>) -> u64 {
    runs.resize(sg.as_slice().len().min(RUNS), IoVec::EMPTY);
    let mut bytes = most;
    loop {
        if let Some(count) = sg.slice_into(offset as usize, bytes as usize, runs) {
            runs.truncate(count);
            return bytes;
        }
        // `runs` has the first ones, as many as it takes.
        let fits = runs.iter().map(|run| run.len() as u64).sum::<u64>() / block_size * block_size;
        if fits == 0 || fits >= bytes {
            return 0;
        }
        bytes = fits;
    }
}

#[cfg(test)]
mod tests;
