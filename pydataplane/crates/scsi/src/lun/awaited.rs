//! What a task can wait for that is no I/O of its thread.

use crate::response::Fail;
use crate::shared::LunShared;
use crate::volume::Settling;
use crate::{copy, medium, mode, sanitize};
use std::sync::Arc;

/// One of them.
pub(super) enum Awaited {
    /// A change of reservations.
    Settling(Settling),
    /// A SANITIZE.
    Sanitize(sanitize::Awaited),
    /// Mode parameters.
    Modes(mode::Keeping),
    /// A copy, which has I/O of its own, or the making of a ROD token.
    Copy(copy::Copying),
    /// A flush, after which the unit's medium goes.
    Eject(Arc<LunShared>),
}

impl Awaited {
    /// Whether the task is over; `stopped`: it was to stop.
    pub(super) fn is_over(&self, stopped: bool) -> Result<bool, Fail> {
        match self {
            Awaited::Settling(settling) => settling.is_over(),
            Awaited::Sanitize(sanitize) => sanitize.is_over(),
            Awaited::Modes(keeping) => keeping.is_over(),
            Awaited::Copy(copying) => copying.is_over(stopped),
            Awaited::Eject(unit) => Ok(medium::eject(unit).map(|()| true)?),
        }
    }

    /// Whether it may take so long that nobody can wait for it who has the task stop.
    pub(super) fn is_long(&self) -> bool {
        matches!(self, Awaited::Sanitize(_))
    }
}
