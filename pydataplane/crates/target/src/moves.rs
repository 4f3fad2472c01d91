//! Volumes that move to another one, also while a guest uses them: which of the two counts.
//!
//! Three things last: what is noted at the new volume ([`MOVE`], a [`Note`] with a [`State`]), whether the old
//! one says that its guest has gone on with the new one ([`MOVED`], a [`Gone`]), and on which of them the
//! target has recorded the guest's disk. [`counts`] decides by them, for all who ask:
//!
//! | recorded | state | old one | counts |
//! | --- | --- | --- | --- |
//! | on the new one | any | any | the new one |
//! | on the old one | any | there, or away | the old one |
//! | on both | any | any | unknown |
//! | nowhere | any | there, does not say that it moved | the old one |
//! | nowhere | pivoted, whole | there, says that it moved here | the new one |
//! | nowhere | copying, mirrored | there, says that it moved here | unknown |
//! | nowhere | any | says that it moved elsewhere, or away | unknown |
//! | nowhere, or on the old one | whole | deleted | the new one |
//! | nowhere, or on the old one | pivoted | deleted | unknown |
//! | nowhere, or on the old one | copying, mirrored | deleted | neither |
//!
//! A record is there as long as its VM runs; what a move records for its own copy is none. What is unknown
//! is shown to no VM, and nothing of it is deleted; but where disks are recorded on both, those on one of them are
//! shown again if what is noted says that this one counts, at the latest when the other one's lvstore comes.
//! An old volume that is deleted leaves no new one pivoted: that is noted before as what it is (`left`), so that a row of
//! such a pair is of what was deleted elsewhere, or with its lvstore's disk.
//! `steps` has the order in which a pivot writes; what cannot be read is an error, and never taken for what is not
//! there. Most volumes have no such note, which is known without asking their lvstore.

mod agree;
mod counts;
mod left;
mod noted;
mod steps;

pub use agree::{other, restored};
pub use counts::{Counts, Side, State};
pub use left::{check_deleted, check_destroyed};
pub use steps::{Lasting, go_over, prepare, stay};

use crate::app::App;
use crate::copies::not_taken_back;
use crate::errors;
use crate::restore;
use crate::state;
use crate::stores::Store;
use agree::{goes_over, stays};
use counts::{Old, Record, counts};
use lvol::Error as LvolError;
use noted::{Gone, MOVE, MOVED, Note, Noted};
use rpc::{Errno, Error};
use std::time::Duration;
use uuid::Uuid;

/// What the names of controllers begin with that a move makes for the copy of what nobody uses.
const OWN_CONTROLLER: &str = "move-";
/// How long a note may wait for its lvstore while a guest's requests do.
const NOTE_TIMEOUT: Duration = Duration::from_secs(1);

fn busy(why: String) -> Error {
    Error::os(Errno::Busy, why)
}

/// A volume that another one moves to, and that.
struct Pair<'a> {
    app: &'a App,
    /// UUID of the new volume.
    new: String,
    note: Note,
}

impl<'a> Pair<'a> {
    /// By the new volume; None: nothing moves to it.
    fn to(app: &'a App, new: &str) -> Result<Option<Pair<'a>>, Error> {
        let note = Note::at_bdev(app, new)?;
        Ok(note.map(|note| Pair { app, new: new.to_owned(), note }))
    }

    fn counts(&self) -> Result<Counts, Error> {
        Ok(counts(self.record(), self.note.state, self.old()?))
    }

    fn record(&self) -> Record {
        record(self.app, &self.note.of, &self.new)
    }

    fn old(&self) -> Result<Old, Error> {
        let lvstores = &self.app.lvstores;
        match noted::at_lvol(self.app, &self.note.of, MOVED) {
            Ok(Some(text)) => Ok(match Gone::read(&text) {
                Some(gone) if gone.to == self.new => Old::There { moved: true },
                _ => Old::OfAnother,
            }),
            Ok(None) => Ok(Old::There { moved: false }),
            Err(LvolError::NoLvol { .. }) => {
                let store = self.note.path.split('/').next().unwrap_or_default();
                Ok(if lvstores.lvstore(store).is_ok() { Old::Gone } else { Old::Away })
            }
            Err(e) => Err(errors::lvol(e)),
        }
    }
}

/// Disks that are recorded on a volume of a move: the controller and the bdev of each. `of` is the UUID of the
/// volume that moves, whose own copy has none.
fn recorded(app: &App, of: &str) -> Vec<(String, String)> {
    let own = format!("{OWN_CONTROLLER}{of}");
    let config = app.config();
    let disks = config.items().filter(|item| restore::is_disk(item)).filter_map(|item| {
        let ctrlr = item.call.params.get("ctrlr")?.as_str()?;
        Some((ctrlr.to_owned(), restore::bdev_of(item)?.to_owned()))
    });
    disks.filter(|(ctrlr, _)| *ctrlr != own).collect()
}

/// On which of the two volumes of a move disks are recorded.
fn record(app: &App, old: &str, new: &str) -> Record {
    let all = recorded(app, old);
    let on = |volume: &str| all.iter().any(|(_, bdev)| bdev == volume);
    match (on(old), on(new)) {
        (false, false) => Record::None,
        (true, false) => Record::On(Side::Old),
        (false, true) => Record::On(Side::New),
        (true, true) => Record::Both,
    }
}

/// As which disk guests know a bdev that is not recorded as one of theirs; None: as itself.
///
/// # Errors
/// It is what another volume is being moved to, or one that has moved, and does not count, or counts and that cannot
/// be noted; what is noted there is no UUID; its notes cannot be read.
pub fn identity(app: &App, bdev: &str) -> Result<Option<Uuid>, Error> {
    let noted = Noted::at(app, bdev)?;
    if let Some(text) = &noted.moved {
        has_moved(app, bdev, text)?;
        // It counts by the record of another disk, which may be gone before this one.
        if app.copies.has(bdev) {
            return Err(busy(format!("bdev {bdev} is being copied: pivot or abort that first")));
        }
        stays(app, bdev, text)?;
    }
    if let Some(text) = &noted.moves {
        let note = Note::read(bdev, text)?;
        let (of, state) = (note.path.clone(), note.state);
        let pair = Pair { app, new: bdev.to_owned(), note };
        // Of what nobody used the move itself has the rest to do. That a guest has gone on with the new one is
        // known by its pause, when the old one is gone, which cannot come back to count then.
        let goes_on = match state {
            State::Copying | State::Mirrored => false,
            State::Pivoted => pair.counts()? == Counts::New,
            State::Whole => {
                let old = pair.old()?;
                let is_used = old == (Old::There { moved: true })
                    || (old == Old::Gone && pair.note.pause_us.is_some());
                is_used && pair.counts()? == Counts::New
            }
        };
        if !goes_on {
            let is_lost = state >= State::Pivoted && pair.old()? == Old::Away;
            let lost = is_lost.then(|| {
                format!(
                    ", or if {of} is lost for good and its VM had gone on with this one, \
                     virtlun_lvol_remove_xattr of its {MOVE}"
                )
            });
            return Err(busy(format!(
                "bdev {bdev} is no disk yet: volume {of} is being moved to it; complete that with `virtlun \
                 volume move`{}",
                lost.unwrap_or_default()
            )));
        }
    }
    let Some(text) = noted.identity else { return Ok(None) };
    Uuid::try_parse_ascii(&text).map(Some).map_err(|_| {
        Error::os(
            Errno::Inval,
            format!(
                "the xattr {} of bdev {bdev} is no UUID; set it to one, or remove it",
                noted::IDENTITY
            ),
        )
    })
}

/// Refuses to export a volume that does not count any more, as what is on it is not what its guest has. What is
/// recorded as exported already comes back.
///
/// # Errors
/// It is one; its notes cannot be read.
pub fn check_counts(app: &App, bdev: &str) -> Result<(), Error> {
    if app.config().get(&state::export_key(bdev)).is_some() {
        return Ok(());
    }
    noted::at_bdev(app, bdev, MOVED)?.map_or(Ok(()), |text| has_moved(app, bdev, &text))
}

/// Refuses a volume whose guest has gone on with another one, as `text` says, or may have.
fn has_moved(app: &App, bdev: &str, text: &[u8]) -> Result<(), Error> {
    let gone = Gone::read(text);
    if let Some(gone) = &gone
        && let Some(pair) = Pair::to(app, &gone.to)?
        && pair.note.of == bdev
    {
        match pair.counts()? {
            Counts::Old => return Ok(()),
            Counts::Unknown => return Err(busy(undecided(app, bdev, &gone.path, pair.record()))),
            Counts::New | Counts::Neither => (),
        }
    }
    let to = gone.map_or_else(|| "another one".to_owned(), |gone| gone.path);
    Err(busy(format!(
        "bdev {bdev} is no disk any more: its VM went on with volume {to}; complete that with `virtlun volume \
         move`"
    )))
}

/// What is said of a volume of which nobody can tell whether it counts, or that it was to move to, `to`.
fn undecided(app: &App, bdev: &str, to: &str, record: Record) -> String {
    if let Some(why) = app.copies.taking_back(bdev) {
        return not_taken_back(bdev, &why);
    }
    if record == Record::Both {
        return format!(
            "bdev {bdev} is no disk: disks are recorded on it and on volume {to}, which it was being moved to; have \
             the controller deleted whose VM has ended"
        );
    }
    format!(
        "bdev {bdev} is no disk: nobody can tell whether it counts or volume {to}, which it was being moved to; \
         `virtlun volume move`, of it to that, says what there is to do"
    )
}

/// What there is to say of a volume that another one moves to.
pub struct Moving {
    /// UUID of the volume that moves.
    pub of: String,
    /// `LVSTORE/NAME` of that.
    pub path: String,
    /// How far it is.
    pub state: State,
    /// Which of them counts.
    pub counts: Counts,
    /// For how long the guest's requests waited, microseconds.
    pub pause_us: Option<u64>,
}

/// Which of the two volumes of a move counts, told by the new one; None: nothing moves to that. Nobody
/// pivots meanwhile. What is noted agrees with that then, but for what cannot be read.
///
/// # Errors
/// There is no such lvol; what is noted cannot be read or taken back.
pub fn check(app: &App, new: &str) -> Result<Option<Moving>, Error> {
    let new = app.lvstores.lvol(new).map_err(errors::lvol)?.uuid.to_string();
    let _turn = app.copies.turn();
    let Some(pair) = Pair::to(app, &new)? else { return Ok(None) };
    let (counts, old) = (pair.counts()?, pair.old()?);
    let Note { of, path, mut state, pause_us } = pair.note.clone();
    match (counts, old) {
        // A copy that goes on takes it back itself.
        (Counts::Old, Old::There { moved: true }) if !app.copies.has(&of) => {
            if let Some(text) = noted::at_bdev(app, &of, MOVED)? {
                stays(app, &of, &text)?;
            }
        }
        // Also where a command that was repeated in the moment of a pivot has noted less at the new one.
        (Counts::New, Old::There { moved }) if !moved || state < State::Pivoted => {
            goes_over(app, pair)?;
            state = State::Pivoted;
        }
        _ => (),
    }
    Ok(Some(Moving { of, path, state, counts, pause_us }))
}

/// Refuses a volume at which nothing can be noted: a pivot would fail, and not be taken back until it can.
fn takes_notes(app: &App, volume: &str) -> Result<(), Error> {
    let path = app.lvstores.lvol(volume).map_err(errors::lvol)?.alias;
    let store = path.split('/').next().unwrap_or_default();
    let lvstore = app.lvstores.lvstore(store).map_err(errors::lvol)?;
    lvstore.stopped.map_or(Ok(()), |why| {
        Err(busy(format!(
            "at volume {path} nobody can note which volume counts, as lvstore {store} takes no changes: {why}; \
             `virtlun bdev clear-flush-error {}` when that is mended, or have `virsh blockcopy` copy it, which notes \
             nothing, to a volume that nothing moves to",
            lvstore.base_bdev
        )))
    })
}

/// What a pivot notes: of a move.
pub struct Marks {
    source: String,
    destination: String,
    note: Note,
    /// `LVSTORE/NAME` of the destination.
    path: String,
}

impl Marks {
    fn new(pair: Pair<'_>) -> Result<Marks, Error> {
        let path = pair.app.lvstores.lvol(&pair.new).map_err(errors::lvol)?.alias;
        let Pair { new: destination, note, .. } = pair;
        Ok(Marks { source: note.of.clone(), destination, note, path })
    }

    /// Of the pivot of a disk of a controller from a bdev to another; None: nobody moves to that while a guest
    /// uses it.
    ///
    /// # Errors
    /// Another volume is being moved to it, or this one in another way; a second disk is recorded on one of the two;
    /// what is noted cannot be read, or nothing more can be noted.
    pub fn of(
        app: &App,
        ctrlr: &str,
        source: &str,
        destination: &str,
    ) -> Result<Option<Marks>, Error> {
        let Some(pair) = Pair::to(app, destination)? else { return Ok(None) };
        let (of, path, state) = (&pair.note.of, &pair.note.path, pair.note.state);
        if of != source {
            return Err(busy(format!(
                "bdev {destination} is what volume {path} is being moved to: copy to another one"
            )));
        }
        if ctrlr == format!("{OWN_CONTROLLER}{source}") && state == State::Copying {
            return Ok(None);
        }
        // After a pivot that came to nothing it may be noted as that still.
        if !matches!(state, State::Mirrored | State::Pivoted) {
            return Err(busy(format!(
                "bdev {destination} is what volume {path} is being moved to: have `virtlun volume move` \
                 complete that, or copy to another one"
            )));
        }
        // One that cannot be shown now would be on what does not count any more, and have it count again.
        let mut all = recorded(app, source);
        all.retain(|(_, bdev)| bdev.as_str() == source || bdev.as_str() == destination);
        // The one that pivots, shown as it is.
        if let Some(its) = all.iter().position(|(name, bdev)| name == ctrlr && bdev == source) {
            all.swap_remove(its);
        }
        if let Some((name, bdev)) = all.first() {
            return Err(busy(format!(
                "bdev {bdev} is recorded as a disk of controller {name} as well, which may not show it now: have \
                 that disk removed first"
            )));
        }
        if app.lvstores.lvol(source).is_err() {
            // A pool may take long to answer, while a guest waits.
            return Err(busy(format!(
                "volume {path} moves from or to a pool: do it while no VM uses it"
            )));
        }
        for volume in [source, destination] {
            takes_notes(app, volume)?;
        }
        Marks::new(pair).map(Some)
    }

    /// Notes at the new volume what it is, lasting.
    ///
    /// # Errors
    /// That cannot be, or nobody knows.
    pub fn note(&self, app: &App, state: State) -> Result<(), Error> {
        self.write(app, &Note { state, ..self.note.clone() })
    }

    /// Notes at the old volume whether its guest has gone on with the new one, lasting. What says that it has gone
    /// on with another one stays: of a later move.
    ///
    /// # Errors
    /// As of [`Marks::note`].
    pub fn moved(&self, app: &App, moved: bool) -> Result<(), Error> {
        let lvstores = &app.lvstores;
        let to = self.destination.clone();
        let done = match moved {
            true => {
                let gone = Gone { to, path: self.path.clone() };
                lvstores.set_xattr_soon(&self.source, MOVED, gone.text().as_bytes(), NOTE_TIMEOUT)
            }
            false => {
                let is_ours = move |text: &[u8]| Gone::read(text).is_some_and(|gone| gone.to == to);
                lvstores.remove_xattr_if(&self.source, MOVED, is_ours)
            }
        };
        done.map_err(errors::lvol)
    }

    /// Whether the new volume is gone, or about to go, as its lvstore is unloaded: its disk was pulled.
    pub fn new_is_gone(&self, app: &App) -> bool {
        app.registry.get(&self.destination).is_none()
    }

    /// Notes for how long the guest's requests waited, at most; unless the move is complete by now.
    pub fn measured(&self, app: &App, pause: Duration) {
        let noted = Note::at_bdev(app, &self.destination);
        let is_there = |note: &Note| note.state == State::Pivoted && note.of == self.source;
        let Ok(Some(note)) = noted.map(|note| note.filter(is_there)) else { return };
        let note = Note { pause_us: u64::try_from(pause.as_micros()).ok(), ..note };
        if let Err(e) = self.write(app, &note) {
            tracing::warn!(volume = self.path, ?pause, "the pause of its move is not noted: {e}");
        }
    }

    fn write(&self, app: &App, note: &Note) -> Result<(), Error> {
        Store::set_xattr(&app.lvstores, &self.destination, MOVE, &note.text())
    }
}
