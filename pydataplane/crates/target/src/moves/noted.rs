//! What is noted at volumes of a move, as their xattrs have it.

use super::State;
use crate::app::App;
use crate::errors;
use crate::stores::{Store, StoreOf};
use lvol::Error as LvolError;
use rpc::{Errno, Error};
use serde::{Deserialize, Serialize};
use serde_json::json;

/// Xattr of a volume that has come in the place of another: the UUID as which guests know that.
pub(super) const IDENTITY: &str = "virtlun.identity";
/// Xattr of a volume that another one is being moved to: a [`Note`].
pub(super) const MOVE: &str = "virtlun.move";
/// Xattr of a volume whose guest has gone on with another one: a [`Gone`].
pub(super) const MOVED: &str = "virtlun.moved";

/// What is noted at an lvol under a name; None: nothing. Its lvstore is asked only where something may be, which
/// few volumes have.
///
/// # Errors
/// There is no such lvol; it cannot be read.
pub(super) fn at_lvol(app: &App, lvol: &str, name: &str) -> Result<Option<Vec<u8>>, LvolError> {
    if !app.lvstores.may_have_xattr(lvol, name)? {
        return Ok(None);
    }
    match app.lvstores.xattr(lvol, name) {
        Ok(text) => Ok(Some(text)),
        Err(LvolError::NoXattr { .. }) => Ok(None),
        Err(e) => Err(e),
    }
}

/// As [`at_lvol`], of any bdev: what is no lvol has nothing.
///
/// # Errors
/// It cannot be read.
pub(super) fn at_bdev(app: &App, bdev: &str, name: &str) -> Result<Option<Vec<u8>>, Error> {
    match at_lvol(app, bdev, name) {
        Err(LvolError::NoLvol { .. }) => Ok(None),
        found => found.map_err(errors::lvol),
    }
}

/// What a new volume is made for.
#[derive(Clone, Serialize, Deserialize)]
pub(super) struct Note {
    /// UUID of the volume that moves.
    pub of: String,
    /// `LVSTORE/NAME` of that.
    pub path: String,
    /// How far it is.
    pub state: State,
    /// For how long the guest's requests waited at most when it went on with this volume, microseconds.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub pause_us: Option<u64>,
}

impl Note {
    /// What is noted at a bdev, if that is an lvol; None: nothing moves to it.
    pub fn at_bdev(app: &App, bdev: &str) -> Result<Option<Note>, Error> {
        at_bdev(app, bdev, MOVE)?.map(|text| Note::read(bdev, &text)).transpose()
    }

    pub fn read(bdev: &str, text: &[u8]) -> Result<Note, Error> {
        serde_json::from_slice(text).map_err(|_| {
            let why = format!(
                "bdev {bdev} is no disk: nobody can read its xattr {MOVE}, which says what moves to it; delete the \
                 volume if what should move there is whole, or remove the xattr if this one is"
            );
            Error::os(Errno::Busy, why)
        })
    }

    pub fn text(&self) -> String {
        json!(self).to_string()
    }
}

/// Which volume a guest has gone on with.
#[derive(Serialize, Deserialize)]
pub(super) struct Gone {
    /// UUID of that.
    pub to: String,
    /// `LVSTORE/NAME` that it had then.
    pub path: String,
}

impl Gone {
    pub fn read(text: &[u8]) -> Option<Gone> {
        serde_json::from_slice(text).ok()
    }

    pub fn text(&self) -> String {
        json!(self).to_string()
    }
}

/// What of a volume's notes matters to who shows it.
#[derive(Default)]
pub(super) struct Noted {
    pub identity: Option<Vec<u8>>,
    pub moves: Option<Vec<u8>>,
    pub moved: Option<Vec<u8>>,
}

impl Noted {
    /// Of any bdev; what has no notes has none.
    ///
    /// # Errors
    /// They cannot be read.
    pub fn at(app: &App, bdev: &str) -> Result<Noted, Error> {
        Ok(match app.store_of(bdev) {
            StoreOf::Lvstores(_) => {
                let noted = |name| at_bdev(app, bdev, name);
                Noted { identity: noted(IDENTITY)?, moves: noted(MOVE)?, moved: noted(MOVED)? }
            }
            // A LUN keeps no notes.
            StoreOf::Luns(_) => Noted::default(),
            StoreOf::Images(images) => {
                let mut noted = Store::xattrs(&images, bdev)?;
                let mut taken = |name| noted.remove(name).map(String::into_bytes);
                Noted { identity: taken(IDENTITY), moves: taken(MOVE), moved: taken(MOVED) }
            }
        })
    }
}
