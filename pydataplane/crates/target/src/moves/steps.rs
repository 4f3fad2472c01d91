//! What a pivot writes, in which order, and how it is taken back.
//!
//! [`prepare`] is before the guest's requests wait, [`go_over`] while they do and both volumes have the same.
//! When [`go_over`] has failed, nobody knows what of it lasts. So the copy goes on until [`stay`] has
//! succeeded: then all that lasts says that the old volume counts. When this process ends before, the record
//! decides, and [`restored`] makes the notes agree with it.
//!
//! While the copy goes on both have the same, but it may fail: from then on the guest's writes are on the old
//! volume alone. So [`stay`] does not end at what cannot be written: that the new one is no more than mirrored
//! is enough for it not to count when the VM has ended. Only where that cannot be noted either, or where a
//! record that was said to have failed lasts and none has been written since, a copy that fails, followed by
//! the end of this process, has the new one count without what was written then.
//!
//! A new volume that is gone, as its disk was pulled, takes no note, perhaps for ever. That the old one does not say
//! that it moved there is enough as well, whatever the new one says should it come back.

use super::counts::{Counts, Side, State};

/// What lasts of a move. Each call is lasting when it has succeeded; one that fails may be so.
pub trait Lasting {
    /// Notes at the new volume what it is.
    fn note(&self, state: State) -> Result<(), String>;
    /// Notes at the old volume whether its guest has gone on with the new one.
    fn moved(&self, moved: bool) -> Result<(), String>;
    /// Records on which of them the disk is.
    fn record(&self, side: Side) -> Result<(), String>;
    /// Whether the new volume is gone, or about to go, so that nothing can be noted at it any more.
    fn new_is_gone(&self) -> bool;
}

/// Does what can be done beforehand: alone it means nothing.
pub fn prepare(to: &impl Lasting) -> Result<(), String> {
    to.note(State::Pivoted)
}

/// Has the new volume count. The notes are first: from the record on the guest may write to it.
pub fn go_over(to: &impl Lasting) -> Result<(), String> {
    to.moved(true)?;
    to.record(Side::New)
}

/// Has the old volume count, which the disk is on. The record is before the old volume's note: as long as it
/// may name the new one, the old one does not count alone. What the new one is goes without either, and where that
/// is gone they go without it.
///
/// # Errors
/// The first thing that could not be written; all that can be is.
pub fn stay(to: &impl Lasting) -> Result<(), String> {
    let old = to.record(Side::Old).and_then(|()| to.moved(false));
    let new = if to.new_is_gone() { Ok(()) } else { to.note(State::Mirrored) };
    old.and(new)
}

/// Has the notes agree with the record of a disk on the old volume that is about to be shown, as a process ended
/// in a pivot. What is recorded on the new one has them already.
///
/// # Errors
/// They cannot: it is not to be shown, as the new one would count when the record is gone.
pub fn restored(to: &impl Lasting) -> Result<(), String> {
    to.moved(false).or_else(|why| to.note(State::Mirrored).map_err(|_| why))
}

/// The old volume is about to be deleted, when so counts and the new one says that: what this is without it, it
/// says itself from then on. Until the old one is gone the same counts.
///
/// # Errors
/// It cannot: the old one is not to be deleted, as nobody could tell then.
pub fn leaves(to: &impl Lasting, counts: Counts, state: State) -> Result<(), String> {
    match (counts, state) {
        (Counts::New, State::Copying | State::Mirrored | State::Pivoted) => to.note(State::Whole),
        // It was overtaken.
        (Counts::Old | Counts::Unknown, State::Pivoted) => to.note(State::Mirrored),
        _ => Ok(()),
    }
}

#[cfg(test)]
mod tests {
    use super::super::counts::{Old, Record, counts, is_shown_again};
    use super::*;
    use std::cell::{Cell, RefCell};

    /// What becomes of one write.
    #[derive(Clone, Copy, Debug, PartialEq)]
    enum Fate {
        Done,
        /// It is said to have failed, and has not.
        FailedLasting,
        Failed,
        /// The process ends, before or after it.
        KilledLasting,
        Killed,
    }

    const FATES: [Fate; 5] =
        [Fate::Done, Fate::FailedLasting, Fate::Failed, Fate::KilledLasting, Fate::Killed];

    #[derive(Clone, Copy, Debug, PartialEq)]
    struct Medium {
        state: State,
        moved: bool,
        record: Side,
    }

    impl Medium {
        fn counts(&self, record: Record) -> Counts {
            counts(record, self.state, Old::There { moved: self.moved })
        }
    }

    /// What lasts, and the fates of the writes to come; those without one are done.
    struct Model {
        medium: Cell<Medium>,
        fates: RefCell<Vec<Fate>>,
        killed: Cell<bool>,
        /// What was to be noted last at the new volume, and whether it lasts.
        noted: Cell<Option<(State, bool)>>,
        /// The new volume is gone, and takes no note.
        gone: Cell<bool>,
    }

    impl Model {
        fn new(medium: Medium, mut fates: Vec<Fate>) -> Model {
            fates.reverse();
            Model {
                medium: medium.into(),
                fates: fates.into(),
                killed: false.into(),
                noted: None.into(),
                gone: false.into(),
            }
        }

        fn write(&self, change: impl FnOnce(&mut Medium)) -> Result<(), String> {
            if self.killed.get() {
                return Err("killed".into());
            }
            let fate = self.fates.borrow_mut().pop().unwrap_or(Fate::Done);
            if matches!(fate, Fate::Done | Fate::FailedLasting | Fate::KilledLasting) {
                let mut medium = self.medium.get();
                change(&mut medium);
                self.medium.set(medium);
            }
            self.killed.set(matches!(fate, Fate::Killed | Fate::KilledLasting));
            if fate == Fate::Done { Ok(()) } else { Err("failed".into()) }
        }
    }

    impl Lasting for Model {
        fn note(&self, state: State) -> Result<(), String> {
            if self.gone.get() {
                return Err("gone".into());
            }
            let done = self.write(|medium| medium.state = state);
            self.noted.set(Some((state, self.medium.get().state == state)));
            done
        }
        fn moved(&self, moved: bool) -> Result<(), String> {
            self.write(|medium| medium.moved = moved)
        }
        fn record(&self, side: Side) -> Result<(), String> {
            self.write(|medium| medium.record = side)
        }
        fn new_is_gone(&self) -> bool {
            self.gone.get()
        }
    }

    /// All rows of fates of that many writes.
    fn rows(length: u32) -> impl Iterator<Item = Vec<Fate>> {
        let count = FATES.len();
        (0..count.pow(length)).map(move |mut row| {
            (0..length)
                .map(|_| {
                    let fate = FATES[row % count];
                    row /= count;
                    fate
                })
                .collect()
        })
    }

    /// The VM may end at any time, also the whole host: what counts then is what its guest wrote last to, or
    /// nobody knows. `newest` is None while both have the same.
    fn check(medium: Medium, newest: Option<Side>, why: &dyn std::fmt::Debug) {
        let alone = medium.counts(Record::None);
        let recorded = medium.counts(Record::On(medium.record));
        match newest {
            Some(Side::Old) => assert_ne!(alone, Counts::New, "{medium:?} {why:?}"),
            Some(Side::New) => assert_ne!(alone, Counts::Old, "{medium:?} {why:?}"),
            None => (),
        }
        if let Some(side) = newest {
            let expected = if side == Side::Old { Counts::Old } else { Counts::New };
            assert_eq!(recorded, expected, "{medium:?} {why:?}");
        }
    }

    /// Somebody deletes the old volume when no disk is recorded, or one on the new one: either it stays, with what
    /// counted before, or the move is at its end.
    fn delete(medium: Medium, newest: Option<Side>, why: &dyn std::fmt::Debug) {
        for record in [Record::None, Record::On(medium.record)] {
            let before = medium.counts(record);
            for fate in FATES {
                let model = Model::new(medium, vec![fate]);
                let deleted = leaves(&model, before, medium.state).is_ok();
                let left = model.medium.get();
                let why = (why, record, fate);
                if !deleted {
                    assert_eq!(left.counts(record), before, "{left:?} {why:?}");
                    check(left, newest, &why);
                    continue;
                }
                // Its record goes with its VM.
                for record in [Record::None, record] {
                    let after = counts(record, left.state, Old::Gone);
                    match before {
                        Counts::New => assert_eq!(after, Counts::New, "{left:?} {why:?}"),
                        _ if record == Record::On(Side::New) => (),
                        _ => assert_eq!(after, Counts::Neither, "{left:?} {why:?}"),
                    }
                    assert!(after != Counts::New || newest != Some(Side::Old), "{left:?} {why:?}");
                }
            }
        }
    }

    const BEGUN: Medium = Medium { state: State::Mirrored, moved: false, record: Side::Old };

    /// A process that starts, with the fates of its writes, and its guest writes.
    fn start_again(medium: Medium, fates: Vec<Fate>, before: &Vec<Fate>) {
        let model = Model::new(medium, fates.clone());
        let shown = medium.record == Side::New || restored(&model).is_ok();
        let medium = model.medium.get();
        check(medium, shown.then_some(medium.record), &(before, fates));
    }

    /// A process that starts where the disk of another controller is recorded on the other volume.
    fn start_with_two(medium: Medium, newest: Option<Side>, before: &Vec<Fate>) {
        let (state, old) = (medium.state, Old::There { moved: medium.moved });
        let is_shown = |side| is_shown_again(side, Record::Both, state, old);
        let (on_old, on_new) = (is_shown(Side::Old), is_shown(Side::New));
        assert!(!(on_old && on_new), "{medium:?} {before:?}");
        // What is shown is what the guest wrote to, and nothing that its notes do not say already.
        assert!(!on_new || newest != Some(Side::Old), "{medium:?} {before:?}");
        assert!(!on_old || (newest != Some(Side::New) && !medium.moved), "{medium:?} {before:?}");
    }

    /// What becomes of a copy between a pivot that fails and what takes that back.
    #[derive(Clone, Copy, PartialEq)]
    enum Then {
        GoesOn,
        Fails,
        /// It fails, as the new volume goes, which is there again when a process starts.
        NewIsGone,
    }

    /// A pivot, and what takes it back once where it fails.
    fn pivots(fates: &Vec<Fate>, then: Then) -> bool {
        let model = Model::new(BEGUN, fates.clone());
        let pivoted = prepare(&model).and_then(|()| go_over(&model)).is_ok();
        let copy_fails = then != Then::GoesOn;
        model.gone.set(then == Then::NewIsGone);
        let alone = copy_fails && !pivoted && !model.killed.get();
        // What is left of the fates is of this.
        let stays = !pivoted && stay(&model).is_ok();
        let medium = model.medium.get();
        // Nothing is said where that can be noted nowhere, or of a record that lasts against what was said.
        let missed = alone && medium.counts(Record::None) == Counts::New;
        let lasts = |(state, lasts): (State, bool)| lasts || state == State::Pivoted;
        let noted = !model.gone.get() && model.noted.get().is_some_and(lasts);
        assert!(!missed || model.killed.get() || !noted, "{medium:?} {fates:?}");
        let newest = match (pivoted, stays || (alone && !missed && medium.record == Side::Old)) {
            (true, _) => Some(Side::New),
            (_, true) => Some(Side::Old),
            _ => None,
        };
        check(medium, newest, fates);
        delete(medium, newest, fates);
        start_with_two(medium, newest, fates);
        for later in rows(2) {
            start_again(medium, later, fates);
        }
        pivoted
    }

    #[test]
    fn whatever_fails_and_whenever_it_is_killed_what_was_written_last_counts() {
        let over = rows(6).filter(|fates| pivots(fates, Then::GoesOn)).count();
        assert_eq!(over, FATES.len().pow(3), "the first three writes are those of a pivot");
    }

    #[test]
    fn a_copy_that_fails_after_its_pivot_has_the_new_one_count_only_where_nothing_can_be_noted() {
        rows(6).for_each(|fates| _ = pivots(&fates, Then::Fails));
    }

    #[test]
    fn a_new_volume_that_is_gone_never_counts_once_the_old_one_says_that_it_stays() {
        rows(6).for_each(|fates| _ = pivots(&fates, Then::NewIsGone));
        let gone = Model::new(Medium { state: State::Pivoted, moved: true, ..BEGUN }, Vec::new());
        gone.gone.set(true);
        stay(&gone).unwrap();
        assert_eq!(gone.medium.get(), Medium { state: State::Pivoted, ..BEGUN });
        // As long as the old one cannot say so it is not over.
        let gone = Model::new(Medium { moved: true, ..BEGUN }, vec![Fate::Done, Fate::Failed]);
        gone.gone.set(true);
        stay(&gone).unwrap_err();
        // Nor does a pivot begin.
        prepare(&gone).unwrap_err();
    }
}
