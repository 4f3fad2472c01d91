//! Somebody deletes the old volume of a move, and with it what that says.

use super::agree::Notes;
use super::noted::{self, Gone, MOVED};
use super::{Counts, Marks, Pair, busy, steps};
use crate::app::App;
use crate::errors;
use lvol::LvolInfo;
use rpc::Error;
use std::collections::HashSet;

/// Volumes are about to be deleted, while nobody pivots. What a volume is that one of them moves to is noted at
/// that: nothing else says it when they are gone. Whether there is one; then nobody pivots until they are gone.
///
/// # Errors
/// That cannot be noted, or the volume is not there: nothing is to be deleted, as nobody could tell then whether
/// it counts.
pub fn check_deleted(app: &App, lvols: &[LvolInfo]) -> Result<bool, Error> {
    for lvol in lvols {
        check_there(app, lvol)?;
    }
    let left = left(app, lvols)?;
    let is_of_move = !left.is_empty();
    for (new, pair) in left {
        let (counts, state, path) = (pair.counts()?, pair.note.state, pair.note.path.clone());
        let marks = Marks::new(pair)?;
        steps::leaves(&Notes(app, &marks), counts, state).map_err(|why| {
            busy(format!(
                "volume {path} was being moved to {new}, at which nobody can note whether that counts without it: \
                 {why}; delete {new} first if it is not wanted, or {path} when this is mended"
            ))
        })?;
    }
    Ok(is_of_move)
}

/// Refuses to delete an lvstore, with all its `lvols`, one of which has moved: of a volume whose lvstore is not there
/// nobody can tell whether it is gone.
///
/// # Errors
/// It has one; what counts cannot be told.
pub fn check_destroyed(app: &App, lvols: &[LvolInfo]) -> Result<(), Error> {
    for (new, pair) in left(app, lvols)? {
        if pair.counts()? == Counts::New {
            return Err(busy(format!(
                "volume {path} has moved to {new}: complete that with `virtlun volume move`, or delete {path} first",
                path = pair.note.path
            )));
        }
    }
    Ok(())
}

/// The volumes, `LVSTORE/NAME`, that some of `lvols` are being moved to, or have, and that are there without them.
fn left<'a>(app: &'a App, lvols: &[LvolInfo]) -> Result<Vec<(String, Pair<'a>)>, Error> {
    let go: HashSet<String> = lvols.iter().map(|lvol| lvol.uuid.to_string()).collect();
    let all = app.lvstores.lvols(None).map_err(errors::lvol)?;
    let stay = all.into_iter().map(|new| (new.uuid.to_string(), new.alias));
    let stay = stay.filter(|(uuid, _)| !go.contains(uuid));
    // What is noted there and cannot be read is of no move.
    let pairs = stay.filter_map(|(uuid, alias)| Some((alias, Pair::to(app, &uuid).ok()??)));
    Ok(pairs.filter(|(_, pair)| go.contains(&pair.note.of)).collect())
}

/// Refuses a volume whose guest has gone on with one that is not there to be told.
fn check_there(app: &App, lvol: &LvolInfo) -> Result<(), Error> {
    let Ok(Some(text)) = noted::at_bdev(app, &lvol.uuid.to_string(), MOVED) else { return Ok(()) };
    let Some(gone) = Gone::read(&text) else { return Ok(()) };
    let store = gone.path.split('/').next().unwrap_or_default();
    if app.lvstores.lvol(&gone.to).is_ok() || app.lvstores.lvstore(store).is_ok() {
        return Ok(());
    }
    Err(busy(format!(
        "the guest of volume {path} went on with {to}, and lvstore {store} is not there: load it first, as nobody could \
         tell then that {to} counts; or if it is lost for good, virtlun_lvol_remove_xattr of the {MOVED} of {path}",
        path = lvol.alias,
        to = gone.path
    )))
}
