//! I/Os that were asked for and do not begin yet, in two rows: reads, and all others.
//!
//! A limit of one direction is not to hold back the other, so each has its row. What flushes or unmaps stands
//! with the writes. Where both could begin they take turns, so that a limit of both together is shared.

use std::collections::VecDeque;

use crate::Op;

/// The rows. They allocate nothing: together they are no longer than there are slots.
#[derive(Debug)]
pub(super) struct Rows {
    rows: [Row; 2],
    /// Which row's turn it is.
    turn: usize,
}

#[derive(Debug)]
struct Row {
    /// Numbers of slots, in order.
    slots: VecDeque<u16>,
    /// When a limit lets the first of them begin, in ticks; `None`: none keeps it.
    until: Option<u64>,
}

fn row_of(op: Op) -> usize {
    usize::from(op != Op::Read)
}

impl Rows {
    /// Room for `depth` I/Os.
    pub(super) fn new(depth: u16) -> Rows {
        let row = || Row { slots: VecDeque::with_capacity(usize::from(depth)), until: None };
        Rows { rows: [row(), row()], turn: 0 }
    }

    /// How many I/Os wait.
    pub(super) fn len(&self) -> usize {
        self.rows.iter().map(|row| row.slots.len()).sum()
    }

    /// The I/O of the slot `at` waits behind all of its row.
    pub(super) fn push(&mut self, op: Op, at: u16) {
        self.rows[row_of(op)].slots.push_back(at);
    }

    /// The first of each row, that whose turn it is before the other.
    pub(super) fn firsts(&self) -> [Option<u16>; 2] {
        [self.turn, 1 - self.turn].map(|row| self.rows[row].slots.front().copied())
    }

    /// The first of the row of `op` begins: the other's turn is next.
    pub(super) fn begin(&mut self, op: Op) {
        self.rows[row_of(op)].slots.pop_front();
        self.turn = 1 - row_of(op);
    }

    /// A limit keeps what is asked for as `op` until then, in ticks, or none does.
    pub(super) fn limit(&mut self, op: Op, until: Option<u64>) {
        self.rows[row_of(op)].until = until;
    }

    /// Until when a limit keeps what is asked for as `op`, in ticks.
    pub(super) fn limited_until(&self, op: Op) -> Option<u64> {
        self.rows[row_of(op)].until
    }

    /// When the first I/O may begin that a limit keeps, in ticks; `None`: none is kept.
    pub(super) fn until(&self) -> Option<u64> {
        self.rows.iter().filter_map(|row| row.until).min()
    }
}
