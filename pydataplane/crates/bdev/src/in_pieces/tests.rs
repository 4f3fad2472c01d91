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
    has: RefCell<VecDeque<u64>>,
}

struct BelowChannel(Rc<Below>);

impl Channel for BelowChannel {
    fn submit(&mut self, io: &Io) -> Submit {
        if self.0.has.borrow().len() >= self.0.room.get() {
            return Submit::Full;
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

/// A layer that changes nothing.
struct Plain;

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
        Received::Over(Ok(()))
    }
}

/// The first that waits had its turn before, and others took all memory until the next one: the channel below had no
/// room for what they have there.
#[test]
fn one_that_lacks_memory_does_not_keep_those_waiting_that_have_it() {
    let (below, io) = (Rc::new(Below::default()), IoContext::new().unwrap());
    let pieces = Pieces::new(Box::new(BelowChannel(below.clone())));
    let mut channel = InPieces::new(pieces, Plain, Stats::new().channel(), io.waker());
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
    // Each turn copies one piece.
    (0..2 * all).for_each(|_| _ = channel.poll(&mut done));
    assert_eq!(done.len(), all + 2);
}
