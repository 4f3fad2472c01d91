//! What an extents page says, in memory: all of it, a few runs, or only a checksum until it is wanted again.

use crate::format::{HOLE, POINTERS, crc32c};
use zerocopy::IntoBytes;
use zerocopy::little_endian::U32;

/// Runs of a page's entries that stay in memory at most, when a store is loaded: 128 bytes.
pub(crate) const RUNS_MAX: usize = 16;

/// Entries from `first` on: of one value if that is 0 or [`HOLE`], else of ascending ones.
#[derive(Clone, Copy)]
pub(crate) struct Piece {
    first: u16,
    value: u32,
}

/// The entries of an extents page.
pub(crate) enum Extents {
    All(Box<[u32; POINTERS]>),
    Runs(Box<[Piece]>),
    /// In the page only; the CRC-32C that they have there.
    Away(u32),
}

impl Extents {
    /// Without any.
    pub fn new() -> Self {
        Extents::All(Box::new([0; POINTERS]))
    }

    /// Those of a page; more than `most` runs of them are left in the page.
    pub fn of(entries: &[U32; POINTERS], most: usize) -> Self {
        match pieces(entries.iter().map(|entry| entry.get()), most) {
            Some(runs) => Extents::Runs(runs),
            None => Extents::Away(crc32c(&[entries.as_bytes()])),
        }
    }

    pub fn is_away(&self) -> bool {
        matches!(self, Extents::Away(_))
    }

    /// One of the entries.
    ///
    /// # Panics
    /// When they are not in memory: whoever looks at them brings them first.
    pub fn get(&self, entry: usize) -> u32 {
        match self {
            Extents::All(all) => all[entry],
            Extents::Runs(runs) => {
                let at = runs.partition_point(|piece| usize::from(piece.first) <= entry);
                let piece = runs[at - 1];
                match piece.value {
                    0 | HOLE => piece.value,
                    value => value + (entry - usize::from(piece.first)) as u32,
                }
            }
            Extents::Away(_) => panic!("an extents page was not brought into memory"),
        }
    }

    /// All entries.
    pub fn iter(&self) -> impl Iterator<Item = u32> + '_ {
        (0..POINTERS).map(|entry| self.get(entry))
    }

    /// Sets an entry; returns what it was.
    pub fn replace(&mut self, entry: usize, to: u32) -> u32 {
        if let Extents::Runs(_) = self {
            let mut all = Box::new([0; POINTERS]);
            all.iter_mut().zip(self.iter()).for_each(|(to, from)| *to = from);
            *self = Extents::All(all);
        }
        match self {
            Extents::All(all) => std::mem::replace(&mut all[entry], to),
            _ => panic!("an extents page was not brought into memory"),
        }
    }

    /// Lets go of them where they are more than `most` runs, if `away`.
    pub fn shrink(&mut self, most: usize, away: bool) {
        let entries: [U32; POINTERS] = match self {
            Extents::Away(_) => return,
            Extents::Runs(runs) if runs.len() <= most => return,
            _ => std::array::from_fn(|entry| U32::new(self.get(entry))),
        };
        let small = Extents::of(&entries, most);
        if away || !small.is_away() {
            *self = small;
        }
    }
}

/// Entries as at most `most` runs.
fn pieces(entries: impl Iterator<Item = u32>, most: usize) -> Option<Box<[Piece]>> {
    let mut all: Vec<Piece> = Vec::with_capacity(most.min(RUNS_MAX));
    let mut last = None;
    for (first, value) in (0..).zip(entries) {
        let goes_on = match (last, value) {
            (None, _) => false,
            (Some(before), 0 | HOLE) => before == value,
            (Some(before), _) => before != 0 && before != HOLE && before + 1 == value,
        };
        last = Some(value);
        if goes_on {
            continue;
        }
        if all.len() == most {
            return None;
        }
        all.push(Piece { first, value });
    }
    Some(all.into_boxed_slice())
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn runs_go_on_only_where_the_entries_do() {
        let of = |entries: &[u32]| pieces(entries.iter().copied(), 99).unwrap().len();
        assert_eq!(of(&[5, 6, 7, 0, 0, HOLE, HOLE, 9]), 4);
        assert_eq!(of(&[0, 1, 2]), 2, "0 is not before 1");
        assert_eq!(of(&[HOLE - 1, HOLE]), 2, "a hole is not behind a cluster");
        assert!(pieces([1, 3, 5].into_iter(), 2).is_none());
    }

    proptest! {
        /// Whatever the entries, they are the same as runs, and after a change.
        #[test]
        fn runs_are_the_same_entries(
            starts in prop::collection::vec((0..POINTERS, 0..6u32, 1..400usize), 0..12),
            change in (0..POINTERS, 0..9u32),
        ) {
            let mut entries = [0; POINTERS];
            for (at, value, count) in starts {
                for (i, entry) in entries.iter_mut().skip(at).take(count).enumerate() {
                    *entry = match value {
                        0 => 0,
                        1 => HOLE,
                        value => value * 1000 + i as u32,
                    };
                }
            }
            let words = entries.map(U32::new);
            let mut extents = Extents::of(&words, POINTERS);
            prop_assert!(extents.iter().eq(entries));
            prop_assert_eq!(extents.replace(change.0, change.1), entries[change.0]);
            entries[change.0] = change.1;
            prop_assert!(extents.iter().eq(entries));
            extents.shrink(RUNS_MAX, true);
            if !extents.is_away() {
                prop_assert!(extents.iter().eq(entries));
            }
        }
    }
}
