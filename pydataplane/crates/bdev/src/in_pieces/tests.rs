//! I/Os that wait for each other's memory.

use std::cell::{Cell, RefCell};
use std::rc::Rc;

use guestmem::{IoVec, Sg};
use reactor::IoContext;

use super::*;
use crate::{AlignedBuf, Channel, Stats};

const BLOCK: usize = 512;
/// Blocks of the longest piece.
const PIECE: u64 = (COPY_AT_ONCE / BLOCK) as u64;

/// Has as many I/Os as it has room for, until they are to end.
#[derive(Default)]
struct Below {
    room: Cell<usize>,
    ends: Cell<bool>,
    /// What comes ends as it is submitted.
    at_once: Cell<bool>,
    has: RefCell<VecDeque<u64>>,
}

struct BelowChannel(Rc<Below>);

impl Channel for BelowChannel {
    fn submit(&mut self, io: &Io) -> Submit {
        if self.0.has.borrow().len() >= self.0.room.get() {
            return Submit::Full;
        }
        if self.0.at_once.get() {
            return Submit::Done(Ok(()));
        }
        self.0.has.borrow_mut().push_back(io.tag);
        Submit::Pending
    }

    fn poll(&mut self, done: &mut Vec<Completion>) -> u32 {
        let before = done.len();
        while self.0.ends.get()
            && done.len() < done.capacity()
            && let Some(tag) = self.0.has.borrow_mut().pop_front()
        {
            done.push(Completion { tag, result: Ok(()), ticks: 0, ended: 0 });
        }
        (done.len() - before) as u32
    }
}

/// A layer that changes nothing, and counts the pieces that were read.
#[derive(Default)]
struct Plain(Rc<Cell<usize>>);

impl Layer for Plain {
    type With = ();
    const PLAIN: () = ();

    fn block(&self) -> usize {
        BLOCK
    }

    fn block_below(&self) -> usize {
        BLOCK
    }

    fn longest(&self) -> u64 {
        PIECE
    }

    fn check(&self, _: &Io, (): &()) -> Result<(), IoError> {
        Ok(())
    }

    fn fill(&mut self, _: Part<'_, ()>) -> Result<(), IoError> {
        Ok(())
    }

    fn received(&mut self, _: Part<'_, ()>) -> Received {
        self.0.set(self.0.get() + 1);
        Received::Over(Ok(()))
    }
}

/// The first that waits had its turn before, and others took all memory until the next one: the channel below had no
/// room for what they have there, and ends it `at_once` when it has.
fn one_lacks_memory(at_once: bool) {
    let (below, io) = (Rc::new(Below::default()), IoContext::new().unwrap());
    let pieces = Pieces::new(Box::new(BelowChannel(below.clone())));
    let received = Rc::<Cell<usize>>::default();
    let layer = Plain(received.clone());
    let mut channel = InPieces::new(pieces, layer, Stats::new().channel(), io.waker());
    let mut memory = AlignedBuf::zeroed(2 * COPY_AT_ONCE);
    // SAFETY: the memory is there to the end of this test, and nobody reads or writes it.
    let runs = [1, 2].map(|n| unsafe { [IoVec::new(memory.as_mut_ptr(), n * COPY_AT_ONCE)] });
    // SAFETY: as above, and so are the lists.
    let [short, long] = [0, 1].map(|n| unsafe { Sg::new(&runs[n]) });
    let mut tag = 0;
    let mut submit = |channel: &mut InPieces<Plain>, op| {
        tag += 1;
        let (sg, blocks) = if op == Op::Write { (long, 2 * PIECE) } else { (short, PIECE) };
        let submitted = channel.submit(&Io { op, blocks, sg, ..Io::flush(tag) });
        assert_eq!(submitted, Submit::Pending);
    };
    below.room.set(2);
    submit(&mut channel, Op::Write);
    // Its data takes all of the next turn.
    submit(&mut channel, Op::Read);
    let mut done = Vec::with_capacity(256);
    below.ends.set(true);
    channel.poll(&mut done);
    assert_eq!(done.len(), 1, "the read");
    // As if others had all of its room.
    below.room.set(0);
    let all = usize::from(crate::pieces::UNITS) * 4096 / COPY_AT_ONCE;
    (0..all).for_each(|_| submit(&mut channel, Op::Read));
    channel.poll(&mut done);
    assert_eq!(channel.pieces.in_flight(), 0);
    below.room.set(usize::MAX);
    below.at_once.set(at_once);
    // Each turn copies one piece.
    for _ in 0..2 * all {
        let before = received.get();
        channel.poll(&mut done);
        assert!(!at_once || received.get() <= before + 1, "all in one turn");
    }
    assert_eq!(done.len(), all + 2);
}

#[test]
fn one_that_lacks_memory_does_not_keep_those_waiting_that_have_it() {
    one_lacks_memory(false);
}

#[test]
fn those_have_no_longer_turns_for_that() {
    one_lacks_memory(true);
}
