//! Two changes of the same blocks are never in flight together: one whose answer is lost is sent again, and must
//! not undo another that was answered.

use crate::Io;

#[derive(Clone, Copy)]
struct Change {
    /// Of which medium.
    unit: u16,
    /// In which order it came.
    number: u64,
    lba: u64,
    blocks: u64,
}

impl Change {
    fn overlaps(&self, other: &Change) -> bool {
        self.unit == other.unit
            && self.lba < other.lba + other.blocks
            && other.lba < self.lba + self.blocks
    }
}

/// The changes that a device has, by the numbers of the slots where they are, and which of them wait for others.
pub struct Overlaps {
    changes: Vec<Option<Change>>,
    /// Those that wait, in the order in which they came.
    held: Vec<u16>,
    count: u64,
}

impl Overlaps {
    /// Of so many I/Os at most. Allocates all that it will ever need.
    pub fn new(depth: u16) -> Overlaps {
        let depth = usize::from(depth);
        Overlaps { changes: vec![None; depth], held: Vec::with_capacity(depth), count: 0 }
    }

    /// Whether a change waits for one that came before it.
    fn has_to_wait(&self, at: u16) -> bool {
        let Some(change) = self.changes[usize::from(at)] else { return false };
        let before = self.changes.iter().flatten().filter(|other| other.number < change.number);
        before.into_iter().any(|other| change.overlaps(other))
    }

    /// An I/O has come, which was checked against the geometry of its medium, one of the device's. Returns whether
    /// it may begin; else [`Overlaps::remove`] tells when.
    pub fn add(&mut self, at: u16, unit: u16, io: &Io) -> bool {
        self.count += 1;
        let (number, lba, blocks) = (self.count, io.lba, io.blocks);
        self.changes[usize::from(at)] =
            io.op.is_write().then_some(Change { unit, number, lba, blocks });
        let waits = self.has_to_wait(at);
        if waits {
            self.held.push(at);
        }
        !waits
    }

    /// An I/O is over, also one that has not begun. Calls `begin` with each that may begin now, in order.
    pub fn remove(&mut self, at: u16, mut begin: impl FnMut(u16)) {
        if self.changes[usize::from(at)].take().is_none() || self.held.is_empty() {
            return;
        }
        self.held.retain(|held| *held != at);
        let mut next = 0;
        while let Some(at) = self.held.get(next).copied() {
            if self.has_to_wait(at) {
                next += 1;
            } else {
                self.held.remove(next);
                begin(at);
            }
        }
    }

    /// Whether an I/O has not begun.
    pub fn is_held(&self, at: u16) -> bool {
        self.held.contains(&at)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Op;

    fn io(op: Op, lba: u64, blocks: u64) -> Io {
        Io { op, lba, blocks, ..Io::flush(0) }
    }

    fn remove(of: &mut Overlaps, at: u16) -> Vec<u16> {
        let mut begun = Vec::new();
        of.remove(at, |at| begun.push(at));
        begun
    }

    #[test]
    fn a_change_waits_for_those_of_the_same_blocks_that_came_before_it() {
        let mut of = Overlaps::new(8);
        assert!(of.add(5, 0, &io(Op::Write, 10, 4)));
        assert!(!of.add(1, 0, &io(Op::Unmap, 13, 4)));
        assert!(!of.add(7, 0, &io(Op::WriteZeroes, 16, 4)), "that waits for one that waits");
        assert!(!of.add(0, 0, &io(Op::Write, 19, 1)));
        // Beside them, on another medium, and no changes.
        assert!(of.add(2, 0, &io(Op::Write, 20, 1)));
        assert!(of.add(3, 1, &io(Op::Write, 10, 4)));
        assert!(of.add(4, 0, &io(Op::Read, 10, 4)) && of.add(6, 0, &Io::flush(0)));
        assert!(of.is_held(1) && !of.is_held(5));
        for other in [2, 3, 4, 6] {
            assert!(remove(&mut of, other).is_empty());
        }
        assert_eq!(remove(&mut of, 5), [1]);
        assert!(!of.is_held(1) && of.is_held(7));
        // One that is given up before it begins lets those behind it begin.
        assert_eq!(remove(&mut of, 7), [0]);
        assert!(remove(&mut of, 1).is_empty() && remove(&mut of, 0).is_empty());
    }

    #[test]
    fn those_that_may_begin_do_so_in_the_order_in_which_they_came() {
        let mut of = Overlaps::new(4);
        assert!(of.add(0, 0, &io(Op::Write, 0, 100)));
        assert!(!of.add(3, 0, &io(Op::Write, 50, 1)));
        assert!(!of.add(1, 0, &io(Op::Write, 10, 1)));
        assert!(!of.add(2, 0, &io(Op::Write, 50, 1)));
        assert_eq!(remove(&mut of, 0), [3, 1]);
        assert_eq!(remove(&mut of, 3), [2]);
    }
}
