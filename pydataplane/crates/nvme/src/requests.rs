//! The I/Os that the thread of a controller has: which are to be sent, which are in flight, and what they come to.
//! Without connections: what is here outlives each.
//!
//! An I/O is cut into parts of what a command takes; each part is a command.

mod ended;

use std::collections::VecDeque;
use std::sync::Arc;
use std::time::Instant;

use bdev::{IoError, Op, Overlaps, Slots, ThreadRequest, WriteHow};
use guestmem::{IoVec, Sg};

use crate::command::{self, Command, RANGE_LEN};
use crate::conversation::Data;
use crate::identify::NAMESPACES_MAX;
use crate::units::Units;

/// I/Os at a time at most, and parts of them.
pub(crate) const DEPTH: u16 = 256;
/// Parts of an I/O at a time at most, so that a long one leaves room for others.
const PARTS_MAX: u16 = 16;
/// A set of paths, by number.
pub(crate) type Paths = u32;

/// An I/O on its way to the thread.
pub(crate) struct Request {
    pub of: ThreadRequest,
    /// Of which namespace of the controller.
    pub unit: u16,
}

struct Entry {
    request: Option<Request>,
    /// When it came, or was answered in part last.
    since: Instant,
    /// Bytes that are cut into parts.
    cut: u64,
    bytes: u64,
    /// Parts that are not over.
    parts: u16,
    /// What was changed is being made durable.
    flushing: bool,
    /// Changes that had been answered before it came.
    changes: u64,
    error: Option<IoError>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum State {
    Free,
    /// In `ready` or `later`; or, of a second command, with its first.
    Waits,
    /// On a path.
    Sent(u8),
    /// It was, and may still be carried out there.
    Fenced(u8),
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Kind {
    Plain,
    Flush,
    /// The two commands of a Compare and Write; the first knows the other.
    Compare(u16),
    WriteIf,
}

struct Part {
    entry: u16,
    kind: Kind,
    state: State,
    /// Where in its I/O it begins, and how much it is, in bytes.
    offset: u64,
    len: u64,
    /// Which of all it is.
    serial: u64,
    sent: Instant,
    tries: u32,
    /// What is deallocated.
    range: [u8; RANGE_LEN],
    list: [IoVec; 1],
}

/// A command that is to be sent.
pub(crate) struct Sending {
    pub command: Command,
    pub data: Data,
}

/// See the file's comment.
pub(crate) struct Requests {
    entries: Slots<Entry>,
    parts: Slots<Part>,
    units: Arc<Units>,
    write_through: bool,
    /// There is something to flush.
    cache: bool,
    /// I/Os of which something is not cut yet, in turn.
    cutting: VecDeque<u16>,
    ready: VecDeque<u16>,
    later: Vec<(Instant, u16)>,
    overlaps: Overlaps,
    serial: u64,
    /// By namespace: changes that were answered, and how many of them a flush has made durable.
    cached: Vec<Cached>,
}

/// What a volatile cache may have of a namespace.
#[derive(Clone, Copy, Default)]
struct Cached {
    changes: u64,
    flushed: u64,
}

impl Requests {
    pub(crate) fn new(units: Arc<Units>, cache: bool, write_through: bool) -> Requests {
        let now = Instant::now();
        let entry = |_| Entry {
            request: None,
            since: now,
            cut: 0,
            bytes: 0,
            parts: 0,
            flushing: false,
            changes: 0,
            error: None,
        };
        let part = |_| Part {
            entry: 0,
            kind: Kind::Plain,
            state: State::Free,
            offset: 0,
            len: 0,
            serial: 0,
            sent: now,
            tries: 0,
            range: [0; RANGE_LEN],
            list: [IoVec::EMPTY],
        };
        let depth = usize::from(DEPTH);
        let cached = vec![Cached::default(); NAMESPACES_MAX];
        Requests {
            entries: Slots::new(DEPTH, entry),
            parts: Slots::new(DEPTH, part),
            units,
            write_through,
            cache,
            cutting: VecDeque::with_capacity(depth),
            ready: VecDeque::with_capacity(depth),
            later: Vec::with_capacity(depth),
            overlaps: Overlaps::new(DEPTH),
            serial: 0,
            cached,
        }
    }

    /// Whether it has I/Os.
    pub(crate) fn is_empty(&self) -> bool {
        self.entries.taken() == 0
    }

    /// Whether it takes no more for now.
    pub(crate) fn is_full(&self) -> bool {
        self.entries.is_full()
    }

    /// Takes I/Os that have come, as far as there is room. Two that change the same blocks are never in flight
    /// together: one whose answer is lost is sent again, and must not undo another that was answered.
    pub(crate) fn take(&mut self, now: Instant, mut next: impl FnMut() -> Option<Request>) {
        while let Some(at) = self.entries.next_free()
            && let Some(request) = next()
        {
            self.entries.take();
            let block_size = self.units[usize::from(request.unit)].block_size();
            let changes = self.cached[usize::from(request.unit)].changes;
            let entry = &mut self.entries[at];
            entry.bytes = match request.of.io.op {
                // One command.
                Op::Flush => 1,
                _ => request.of.io.blocks * block_size,
            };
            (entry.since, entry.changes) = (now, changes);
            (entry.cut, entry.parts, entry.flushing, entry.error) = (0, 0, false, None);
            let begins = self.overlaps.add(at, request.unit, &request.of.io);
            entry.request = Some(request);
            if begins {
                self.cutting.push_back(at);
            }
        }
        self.cut();
    }

    /// Makes parts of I/Os in turn, as long as there is room.
    fn cut(&mut self) {
        let mut skipped = 0;
        while skipped < self.cutting.len() {
            let at = self.cutting[0];
            let entry = &self.entries[at];
            let Some(Request { of: ThreadRequest { io, how, .. }, unit }) = &entry.request else {
                self.cutting.pop_front();
                continue;
            };
            let (op, how, unit) = (io.op, *how, &self.units[usize::from(*unit)]);
            let needs = if how == WriteHow::Compared { 2 } else { 1 };
            if entry.parts >= PARTS_MAX {
                self.cutting.rotate_left(1);
                skipped += 1;
                continue;
            }
            if self.parts.len() - self.parts.taken() < needs {
                return;
            }
            skipped = 0;
            let left = entry.bytes - entry.cut;
            let len = match (op, how) {
                (Op::Flush, _) | (_, WriteHow::Compared) => left,
                (Op::Read | Op::Write, _) => left.min(unit.most.transfer),
                (Op::Unmap, _) => left.min(unit.most.deallocated * unit.block_size()),
                (Op::WriteZeroes, _) => left.min(unit.most.zeroed * unit.block_size()),
            };
            let offset = entry.cut;
            self.entries[at].cut += len;
            match self.entries[at].cut == self.entries[at].bytes {
                true => _ = self.cutting.pop_front(),
                false => self.cutting.rotate_left(1),
            }
            let Some(first) = self.add_part(at, Kind::Plain, offset, len) else { return };
            if how == WriteHow::Compared
                && let Some(second) = self.add_part(at, Kind::WriteIf, offset, len)
            {
                self.parts[first].kind = Kind::Compare(second);
            }
            self.ready.push_back(first);
        }
    }

    fn add_part(&mut self, entry: u16, kind: Kind, offset: u64, len: u64) -> Option<u16> {
        let at = self.parts.take()?;
        self.serial += 1;
        self.entries[entry].parts += 1;
        let part = &mut self.parts[at];
        (part.entry, part.kind, part.state) = (entry, kind, State::Waits);
        (part.offset, part.len, part.serial, part.tries) = (offset, len, self.serial, 0);
        Some(at)
    }

    /// Calls `send` with each part that is to be sent, its namespace, whether it changes anything, and how many
    /// commands it is, in order; what it returns is the path that it went to, if any.
    pub(crate) fn send(
        &mut self,
        now: Instant,
        mut send: impl FnMut(&mut Requests, u16, u16, bool, usize) -> Option<u8>,
    ) {
        let mut at = 0;
        while at < self.later.len() {
            match self.later[at].0 <= now {
                true => self.ready.push_back(self.later.swap_remove(at).1),
                false => at += 1,
            }
        }
        for _ in 0..self.ready.len() {
            let Some(at) = self.ready.pop_front() else { return };
            let part = &self.parts[at];
            let Some(Request { unit, of }) = &self.entries[part.entry].request else {
                continue;
            };
            let (unit, changes) = (*unit, of.io.op.is_write());
            let second = match part.kind {
                Kind::Compare(second) => Some(second),
                _ => None,
            };
            let commands = if second.is_some() { 2 } else { 1 };
            match send(self, at, unit, changes, commands) {
                Some(path) => {
                    for at in [Some(at), second].into_iter().flatten() {
                        (self.parts[at].state, self.parts[at].sent) = (State::Sent(path), now);
                    }
                }
                // The order stays, as all of them are looked at.
                None => self.ready.push_back(at),
            }
        }
    }

    /// The second of two commands that go together.
    pub(crate) fn second_of(&self, at: u16) -> Option<u16> {
        match self.parts[at].kind {
            Kind::Compare(second) => Some(second),
            _ => None,
        }
    }

    /// What a part sends.
    pub(crate) fn command(&mut self, at: u16) -> Option<Sending> {
        let part = &mut self.parts[at];
        let Request { of: ThreadRequest { io, .. }, unit } =
            self.entries[part.entry].request.as_ref()?;
        let unit = &self.units[usize::from(*unit)];
        let (nsid, block_size) = (unit.namespace.nsid, unit.block_size());
        let (lba, blocks) = (io.lba + part.offset / block_size, (part.len / block_size) as u32);
        let (offset, len) = (part.offset as usize, part.len as usize);
        let durable = io.fua || self.write_through;
        let (command, data) = match (part.kind, io.op) {
            (Kind::Flush, _) | (_, Op::Flush) => (command::flush(nsid), Data::None),
            (Kind::Compare(_), _) => {
                (command::compare(nsid, lba, blocks), Data::Out(io.sg, 0, len))
            }
            (Kind::WriteIf, _) => {
                (command::write_if(nsid, lba, blocks, durable), Data::Out(io.sg, len, len))
            }
            (_, Op::Read) => (command::read(nsid, lba, blocks), Data::In(io.sg, offset, len)),
            (_, Op::Write) => {
                (command::write(nsid, lba, blocks, durable), Data::Out(io.sg, offset, len))
            }
            (_, Op::WriteZeroes) => {
                let deallocate = unit.namespace.zeroing_deallocates;
                let command = command::write_zeroes(nsid, lba, blocks, durable, deallocate);
                (command, Data::None)
            }
            (_, Op::Unmap) => {
                part.range = command::range(lba, blocks);
                // SAFETY: slots stay in place, and this one as it is until the command is over.
                part.list = unsafe { [IoVec::new(part.range.as_mut_ptr(), RANGE_LEN)] };
                // SAFETY: as above.
                let sg = unsafe { Sg::new(&part.list) };
                (command::deallocate(nsid), Data::Out(sg, 0, RANGE_LEN))
            }
        };
        Some(Sending { command, data })
    }

    /// When a command went off on a path that has waited longest for its answer.
    pub(crate) fn oldest_sent(&self, path: u8) -> Option<Instant> {
        let sent = self.parts.iter().filter(|part| part.state == State::Sent(path));
        sent.map(|part| part.sent).min()
    }

    /// When the next one is to be sent that waits for its time.
    pub(crate) fn next_due(&self) -> Option<Instant> {
        self.later.iter().map(|(at, _)| *at).min()
    }

    /// Since when the I/O waits that waits longest.
    pub(crate) fn oldest(&self) -> Option<Instant> {
        let there = self.entries.iter().filter(|entry| entry.request.is_some());
        there.map(|entry| entry.since).min()
    }

    /// Whether something was answered that no flush has made durable. The next call only knows of what comes then.
    pub(crate) fn take_unflushed(&mut self) -> bool {
        let mut any = false;
        for cached in &mut self.cached {
            any |= std::mem::replace(&mut cached.flushed, cached.changes) < cached.changes;
        }
        any
    }
}

#[cfg(test)]
mod tests;
