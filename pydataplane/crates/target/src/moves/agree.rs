//! Has what is noted at the two volumes of a move agree with what is recorded, before a guest writes.

use super::counts::{Record, Side, State, is_shown_again};
use super::noted::{self, Gone, MOVED, Note};
use super::steps::Lasting;
use super::{Marks, OWN_CONTROLLER, Pair, busy, record};
use crate::app::App;
use crate::errors;
use rpc::{Errno, Error};

/// A recorded disk that is not shown is about to be, on this bdev: so that counts, and its notes are to say so
/// before its guest writes.
///
/// # Errors
/// Another disk is recorded on the other volume of its move, and this one does not count by the notes; they cannot
/// be read, or written: it is not to be shown.
pub fn restored(app: &App, ctrlr: &str, bdev: &str) -> Result<(), Error> {
    if let Some(text) = noted::at_bdev(app, bdev, MOVED)? {
        stays(app, bdev, &text)?;
    }
    let Some(pair) = Pair::to(app, bdev)? else { return Ok(()) };
    if ctrlr == format!("{OWN_CONTROLLER}{}", pair.note.of) {
        return Ok(());
    }
    let (record, state) = (pair.record(), pair.note.state);
    if record == Record::Both && !is_shown_again(Side::New, record, state, pair.old()?) {
        return Err(on_both(bdev, &pair.note.path));
    }
    if record == Record::On(Side::New)
        && state == State::Mirrored
        && let Err(e) = goes_over(app, pair)
    {
        tracing::error!(bdev, "that its guest has gone on with it is not noted: {e}");
    }
    Ok(())
}

/// The other volume of the move that a bdev is noted to be of; None: that cannot be told.
pub fn other(app: &App, bdev: &str) -> Option<String> {
    match noted::at_bdev(app, bdev, MOVED).ok()? {
        Some(text) => Gone::read(&text).map(|gone| gone.to),
        None => Note::at_bdev(app, bdev).ok()?.map(|note| note.of),
    }
}

/// Refuses a disk while there is one on the other volume of its move, of which more is known.
fn on_both(bdev: &str, other: &str) -> Error {
    busy(format!(
        "bdev {bdev} does not count while another disk is recorded on volume {other}, of a move between the two: \
         have the controller of that deleted first if its VM has ended, or else this one"
    ))
}

/// Notes what a pivot does, as the disk is recorded on the new volume: an older target, which notes nothing,
/// has gone over to it.
pub(super) fn goes_over(app: &App, pair: Pair<'_>) -> Result<(), Error> {
    let marks = Marks::new(pair)?;
    marks.moved(app, true)?;
    marks.note(app, State::Pivoted)
}

/// What is noted at both, where nothing is recorded.
pub(super) struct Notes<'a>(pub &'a App, pub &'a Marks);

impl Lasting for Notes<'_> {
    fn note(&self, state: State) -> Result<(), String> {
        self.1.note(self.0, state).map_err(|e| e.message)
    }
    fn moved(&self, moved: bool) -> Result<(), String> {
        self.1.moved(self.0, moved).map_err(|e| e.message)
    }
    fn record(&self, _: Side) -> Result<(), String> {
        Ok(())
    }
    fn new_is_gone(&self) -> bool {
        self.1.new_is_gone(self.0)
    }
}

/// Takes back what the old volume of a move says of having moved (`text`), as a disk is recorded on it.
pub(super) fn stays(app: &App, bdev: &str, text: &[u8]) -> Result<(), Error> {
    let gone = Gone::read(text);
    // The other one may be away, and its disk be recorded all the same.
    let is_other =
        |gone: &&Gone| matches!(record(app, bdev, &gone.to), Record::Both | Record::On(Side::New));
    if let Some(gone) = gone.as_ref().filter(is_other) {
        return Err(on_both(bdev, &gone.path));
    }
    let pair = gone.map(|gone| Pair::to(app, &gone.to)).transpose();
    let marks = match pair {
        Ok(Some(Some(pair))) if pair.note.of == bdev => Some(Marks::new(pair)?),
        _ => None,
    };
    let Some(marks) = marks else {
        let text = text.to_owned();
        let removed = app.lvstores.remove_xattr_if(bdev, MOVED, move |now| now == text);
        return removed.map_err(errors::lvol);
    };
    let settled = super::steps::restored(&Notes(app, &marks));
    settled.map_err(|why| {
        Error::os(
            Errno::Io,
            format_args!(
                "bdev {bdev} counts, and is noted to have moved to another one, which cannot be taken back: {why}"
            ),
        )
    })
}
