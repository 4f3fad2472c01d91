//! How parts of I/Os end: answered, without an answer, or given up.

use std::time::{Duration, Instant};

use bdev::{FlushCause, FlushLatch, IoError, Op, ThreadRequest};

use super::{DEPTH, Kind, Paths, Request, Requests, State};
use crate::conversation::Ended;
use crate::status::Verdict;

/// First and longest pause before a controller that is busy has a command again.
const PAUSE: Duration = Duration::from_millis(10);
const PAUSE_MAX: Duration = Duration::from_secs(1);
/// Times that data may come damaged, or a command end without a reason of its own, before that is an error.
const TRIES: u32 = 5;

impl Requests {
    /// A part was answered. Returns the namespace, where that cannot be reached there. A flush that failed is latched
    /// before anybody is told.
    pub(crate) fn answered(
        &mut self,
        at: u16,
        how: &Ended,
        now: Instant,
        latch: &FlushLatch,
    ) -> Option<u16> {
        if self.parts[at].state == State::Free {
            return None;
        }
        let (kind, index) = (self.parts[at].kind, self.parts[at].entry);
        let entry = &mut self.entries[index];
        let Some(Request { of: request, unit }) = &entry.request else { return None };
        let (op, fua, unit) = (request.io.op, request.io.fua, *unit);
        // Also of what makes zeros durable.
        let of = if kind == Kind::Flush { Op::Flush } else { op };
        let mut verdict = how.completion.verdict(of);
        let tries = self.parts[at].tries;
        if how.damaged && verdict == Verdict::Done {
            verdict = Verdict::Later;
        }
        let is_fused = matches!(kind, Kind::Compare(_) | Kind::WriteIf);
        match verdict {
            Verdict::Done => {
                entry.since = now;
                let cached = &mut self.cached[usize::from(unit)];
                if of == Op::Flush {
                    cached.flushed = cached.flushed.max(entry.changes);
                } else if op.is_write() && self.cache && !self.write_through && !fua {
                    cached.changes += 1;
                }
                self.over(at, None);
            }
            // The other one says why.
            _ if is_fused && how.completion.is_of_other() => self.over(at, Some(IoError::Aborted)),
            // It may have begun.
            Verdict::Later if is_fused => self.over(at, Some(IoError::Aborted)),
            Verdict::Elsewhere if is_fused => {
                self.over(at, Some(IoError::Aborted));
                return Some(unit);
            }
            Verdict::Later if tries < TRIES || self.waits_for(how) => self.send_later(at, now),
            Verdict::Later => self.over(at, Some(of.failed())),
            Verdict::Elsewhere => {
                self.send_later(at, now);
                return Some(unit);
            }
            Verdict::Failed(error) => {
                if of == Op::Flush {
                    latch.set(FlushCause::Flush, None);
                }
                self.over(at, Some(error));
            }
        }
        None
    }

    /// Has a part be sent again, after a pause that is longer each time.
    pub(super) fn send_later(&mut self, at: u16, now: Instant) {
        let part = &mut self.parts[at];
        let pause = (PAUSE * 2u32.saturating_pow(part.tries.min(10))).min(PAUSE_MAX);
        (part.state, part.tries) = (State::Waits, part.tries.saturating_add(1));
        self.later.push((now + pause, at));
    }

    /// Whether the controller says that it takes time: interrupted, not ready, sanitize or format under way.
    pub(super) fn waits_for(&self, how: &Ended) -> bool {
        matches!(how.completion.code(), 0x01D | 0x021 | 0x082 | 0x084)
    }

    /// A part is over.
    pub(super) fn over(&mut self, at: u16, error: Option<IoError>) {
        let part = &mut self.parts[at];
        part.state = State::Free;
        let index = part.entry;
        self.parts.give_back(at);
        let entry = &mut self.entries[index];
        entry.parts -= 1;
        if let Some(error) = error {
            // What the comparison came to goes before that it was given up.
            if entry.error.is_none_or(|was| was == IoError::Aborted) {
                entry.error = Some(error);
            }
            // Nothing more of it is asked for.
            entry.cut = entry.bytes;
            self.cutting.retain(|cut| *cut != index);
        }
        if entry.parts > 0 || entry.cut < entry.bytes {
            return self.cut();
        }
        let Some(Request { of: ThreadRequest { io, .. }, .. }) = &entry.request else { return };
        let durable = self.cache && (io.fua || self.write_through);
        if io.op == Op::Unmap && durable && entry.error.is_none() && !entry.flushing {
            entry.flushing = true;
            if let Some(flush) = self.add_part(index, Kind::Flush, 0, 0) {
                self.ready.push_back(flush);
                return;
            }
        }
        self.finish(index);
        self.cut();
    }

    /// An I/O is over.
    pub(super) fn finish(&mut self, at: u16) {
        let entry = &mut self.entries[at];
        let Some(request) = entry.request.take() else { return };
        request.of.end(entry.error.map_or(Ok(()), Err));
        self.cutting.retain(|cut| *cut != at);
        self.entries.give_back(at);
        let cutting = &mut self.cutting;
        self.overlaps.remove(at, |at| cutting.push_back(at));
    }

    /// The connections of a path are over, and the kernel has let go of everything of theirs: a part of an I/O has
    /// no answer, and the controller may have seen it (`handed`). Returns whether it may still change something
    /// there, and whether nobody will wait for that.
    pub(crate) fn unanswered(&mut self, at: u16, path: u8, handed: bool) -> (bool, bool) {
        if self.parts[at].state != State::Sent(path) {
            return (false, false);
        }
        let part = &self.parts[at];
        let entry = &self.entries[part.entry];
        let changes =
            handed && entry.request.as_ref().is_some_and(|request| request.of.io.op.is_write());
        // What a comparison came to is not known.
        if matches!(part.kind, Kind::Compare(_) | Kind::WriteIf) {
            self.over(at, Some(IoError::Aborted));
            return (changes, changes);
        }
        if entry.error.is_some() {
            self.over(at, None);
            return (changes, changes);
        }
        if changes && part.kind == Kind::Plain {
            self.parts[at].state = State::Fenced(path);
            return (true, false);
        }
        self.parts[at].state = State::Waits;
        self.ready.push_back(at);
        self.sort();
        (false, false)
    }

    /// What was sent again goes in the order in which it came.
    pub(super) fn sort(&mut self) {
        let parts = &self.parts;
        self.ready.make_contiguous().sort_unstable_by_key(|at| parts[*at].serial);
    }

    /// Nothing that a path had can be carried out there any more.
    pub(crate) fn release(&mut self, path: u8) {
        for at in 0..DEPTH {
            if self.parts[at].state == State::Fenced(path) {
                self.parts[at].state = State::Waits;
                self.ready.push_back(at);
            }
        }
        self.sort();
    }

    /// Ends those that have waited since then. Returns the paths that have commands of them still, which end with
    /// their connections, and those where one that was given up may still be carried out.
    pub(crate) fn fail_since(&mut self, before: Instant) -> (Paths, Paths) {
        let (mut busy, mut doubtful) = (0, 0);
        for index in 0..DEPTH {
            let entry = &mut self.entries[index];
            let Some(request) = entry.request.as_ref().filter(|_| entry.since <= before) else {
                continue;
            };
            entry.error.get_or_insert(request.of.io.op.failed());
            entry.cut = entry.bytes;
            self.cutting.retain(|cut| *cut != index);
            for at in 0..DEPTH {
                if self.parts[at].entry != index {
                    continue;
                }
                match self.parts[at].state {
                    State::Free => {}
                    State::Sent(path) => busy |= 1 << path,
                    State::Fenced(path) => {
                        doubtful |= 1 << path;
                        self.drop_part(at);
                    }
                    State::Waits => self.drop_part(at),
                }
            }
            if self.entries[index].parts == 0 {
                self.finish(index);
            }
        }
        self.cut();
        (busy, doubtful)
    }

    /// Of an I/O that has failed.
    pub(super) fn drop_part(&mut self, at: u16) {
        self.ready.retain(|ready| *ready != at);
        self.later.retain(|(_, later)| *later != at);
        let part = &mut self.parts[at];
        part.state = State::Free;
        self.entries[part.entry].parts -= 1;
        self.parts.give_back(at);
    }
}
