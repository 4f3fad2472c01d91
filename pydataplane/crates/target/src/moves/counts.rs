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

/// What is noted at the new volume.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum State {
    /// What nobody uses is copied to it.
    Copying,
    /// It gets what a guest writes to the old one.
    Mirrored,
    /// The guest goes on with it, if the old one says so too.
    Pivoted,
    /// It has all of what nobody used.
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
            State::Pivoted | State::Whole => Counts::New,
            State::Copying | State::Mirrored => Counts::Neither,
        },
        (Record::None, Old::Away | Old::OfAnother) => Counts::Unknown,
        (Record::None, Old::There { moved: false }) => Counts::Old,
        (Record::None, Old::There { moved: true }) => match state {
            State::Pivoted => Counts::New,
            // That the old one says so is written after this state, and taken back before it.
            State::Copying | State::Mirrored | State::Whole => Counts::Unknown,
        },
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
            [Its, New, Unknown, New, Unknown],
            [Its, Unknown, Unknown, New, Unknown],
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
                        || (state == State::Pivoted && old == Old::There { moved: true })
                        || (matches!(state, State::Pivoted | State::Whole) && old == Old::Gone);
                    let decided = counts(record, state, old);
                    assert!(decided != Counts::New || says, "{record:?} {state:?} {old:?}");
                }
            }
        }
    }
}
