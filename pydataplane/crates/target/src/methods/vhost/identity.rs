//! What is noted at a volume that matters to who shows it: as which disk guests know it, and whether it is
//! one yet.

use crate::app::App;
use crate::stores::{Store, StoreOf};
use rpc::{Errno, Error};
use serde::Deserialize;
use uuid::Uuid;

/// Xattr of a volume that has come in the place of another: the UUID as which guests know that.
const IDENTITY: &str = "virtlun.identity";
/// Xattr of a volume that another one is being moved to.
const MOVE: &str = "virtlun.move";

/// Of a move, what matters here.
#[derive(Deserialize)]
struct Move {
    /// LVSTORE/NAME of what moves.
    path: String,
}

/// As which disk guests know a bdev; None: as itself.
///
/// # Errors
/// It is what another volume is being moved to; what is noted there is no UUID; its pool does not answer.
pub(super) fn of(app: &App, bdev: &str) -> Result<Option<Uuid>, Error> {
    let (identity, moves) = match app.store_of(bdev) {
        // It has none, or is no lvol: what else is noted there does not matter.
        StoreOf::Lvstores(lvstores) => {
            (lvstores.xattr(bdev, IDENTITY).ok(), lvstores.xattr(bdev, MOVE).ok())
        }
        // A LUN keeps no notes.
        StoreOf::Luns(_) => (None, None),
        StoreOf::Images(images) => {
            let mut noted = images.xattrs(bdev)?;
            let mut taken = |name| noted.remove(name).map(String::into_bytes);
            (taken(IDENTITY), taken(MOVE))
        }
    };
    if let Some(noted) = moves {
        let of = serde_json::from_slice(&noted).map(|of: Move| of.path);
        let of = of.unwrap_or_else(|_| "another one".to_owned());
        return Err(Error::os(
            Errno::Busy,
            format!(
                "bdev {bdev} is no disk yet: volume {of} is being moved to it; complete that with \
                 `virtlun volume move`"
            ),
        ));
    }
    let Some(noted) = identity else { return Ok(None) };
    Uuid::try_parse_ascii(&noted).map(Some).map_err(|_| {
        Error::os(
            Errno::Inval,
            format!("the xattr {IDENTITY} of bdev {bdev} is no UUID; set it to one, or remove it"),
        )
    })
}
