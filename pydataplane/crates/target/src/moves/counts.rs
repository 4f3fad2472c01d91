//! Which of the two volumes of a move counts, by all that lasts and nothing else.

use serde::{Deserialize, Serialize};

/// One of the two.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Side {
    /// The volume that moves.
    Old,
    /// The one that it moves to.
    New,
}

/// What is noted at the new volume, in the order in which a move goes on.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum State {
    /// What nobody uses is copied to it.
    Copying,
    /// It gets what a guest writes to the old one.
    Mirrored,
    /// The guest goes on with it, if the old one says so too.
    Pivoted,
    /// It has all of what nobody used, or its guest has gone on with it: the old one is about to be deleted.
    Whole,
}

/// Which of them the disks are on that the target has recorded, but for those that a move makes for itself.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Record {
    /// There is none.
    None,
    /// All of them.
    On(Side),
    /// Some are on the one, and some on the other.
    Both,
}

/// What there is of the old volume.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Old {
    /// It is there; whether it says that its guest has gone on with the new one.
    There {
        /// It does.
        moved: bool,
    },
    /// It is there, and says that its guest has gone on with a third one.
    OfAnother,
    /// It has been deleted.
    Gone,
    /// Its lvstore is not there.
    Away,
}

/// Which one counts.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Counts {
    /// The old one.
    Old,
    /// The new one.
    New,
    /// The old one is gone, and the new one has not all of it.
    Neither,
    /// Nobody can tell: neither is shown, and none is deleted.
    Unknown,
}

/// The one place where that is decided; the table is in the module above.
pub fn counts(record: Record, state: State, old: Old) -> Counts {
    match (record, old) {
        (Record::Both, _) => Counts::Unknown,
        (Record::On(Side::New), _) => Counts::New,
        // A record of what is gone says nothing of what is left.
        (Record::On(Side::Old), Old::There { .. } | Old::OfAnother | Old::Away) => Counts::Old,
        (Record::On(Side::Old) | Record::None, Old::Gone) => match state {
            State::Whole => Counts::New,
            // Whether the old one had moved is gone with it.
            State::Pivoted => Counts::Unknown,
            State::Copying | State::Mirrored => Counts::Neither,
        },
        (Record::None, Old::Away | Old::OfAnother) => Counts::Unknown,
        (Record::None, Old::There { moved: false }) => Counts::Old,
        (Record::None, Old::There { moved: true }) => match state {
            State::Pivoted | State::Whole => Counts::New,
            // That the old one says so is written after those states, and taken back before them.
            State::Copying | State::Mirrored => Counts::Unknown,
        },
    }
}

/// Whether a disk that is recorded on one of them is shown there again. Where others are recorded on the other
/// one, what is noted has to say the same: both together never are.
pub fn is_shown_again(side: Side, record: Record, state: State, old: Old) -> bool {
    let counting = if side == Side::Old { Counts::Old } else { Counts::New };
    match record {
        Record::Both => counts(Record::None, state, old) == counting,
        Record::On(_) | Record::None => counts(record, state, old) == counting,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const STATES: [State; 4] = [State::Copying, State::Mirrored, State::Pivoted, State::Whole];
    const RECORDS: [Record; 4] =
        [Record::None, Record::On(Side::Old), Record::On(Side::New), Record::Both];
    const OLDS: [Old; 5] = [
        Old::There { moved: false },
        Old::There { moved: true },
        Old::OfAnother,
        Old::Gone,
        Old::Away,
    ];

    /// All combinations, as rows of states and columns of what there is of the old one.
    #[test]
    fn each_combination_is_decided() {
        use Counts::{Neither, New, Old as Its, Unknown};
        let without_record = [
            [Its, Unknown, Unknown, Neither, Unknown],
            [Its, Unknown, Unknown, Neither, Unknown],
            [Its, New, Unknown, Unknown, Unknown],
            [Its, New, Unknown, New, Unknown],
        ];
        for (row, state) in without_record.iter().zip(STATES) {
            for (&expected, old) in row.iter().zip(OLDS) {
                assert_eq!(counts(Record::None, state, old), expected, "{state:?} {old:?}");
                assert_eq!(counts(Record::Both, state, old), Unknown);
                assert_eq!(counts(Record::On(Side::New), state, old), New);
                let recorded = if old == Old::Gone { expected } else { Its };
                assert_eq!(counts(Record::On(Side::Old), state, old), recorded);
            }
        }
    }

    /// Nobody loses what he cannot do without: where the old volume may hold the only whole copy, and
    /// nothing says that a guest has left it, the new one does not count.
    #[test]
    fn the_new_one_counts_only_where_something_lasting_says_so() {
        for state in STATES {
            for old in OLDS {
                for record in RECORDS {
                    let says = record == Record::On(Side::New)
                        || (matches!(state, State::Pivoted | State::Whole)
                            && old == Old::There { moved: true })
                        || (state == State::Whole && old == Old::Gone);
                    let decided = counts(record, state, old);
                    assert!(decided != Counts::New || says, "{record:?} {state:?} {old:?}");
                }
            }
        }
    }
    /// Disks that are recorded are shown again when a process starts, one after the other.
    #[test]
    fn of_two_that_are_recorded_at_most_one_is_shown_again() {
        for state in STATES {
            for old in OLDS {
                for record in RECORDS {
                    let shown =
                        [Side::Old, Side::New].map(|side| is_shown_again(side, record, state, old));
                    let noted = counts(Record::None, state, old);
                    let expected = match record {
                        Record::None | Record::Both => [noted == Counts::Old, noted == Counts::New],
                        Record::On(Side::New) => [false, true],
                        Record::On(Side::Old) if old == Old::Gone => [false, noted == Counts::New],
                        Record::On(Side::Old) => [true, false],
                    };
                    assert_eq!(shown, expected, "{record:?} {state:?} {old:?}");
                    assert_ne!(shown, [true; 2]);
                }
            }
        }
    }
}
