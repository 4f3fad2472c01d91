//! The LUNs of a target, without a device on them.

use bdev::Medium;

use crate::address::Address;
use crate::isid::Isid;
use crate::session::{Identity, NoSession, Session};
use crate::unit::Unit;

/// A disk among the LUNs of a target.
#[derive(Clone, Debug)]
pub struct Found {
    /// Number of the LUN.
    pub lun: u16,
    /// What it is; a clause: it does not say, or is none that a bdev can be on.
    pub is: Result<Medium, String>,
}

/// Why the LUNs of a target are not known.
#[derive(Debug, thiserror::Error)]
#[error("{why}")]
pub struct ListError {
    /// In one clause.
    pub why: String,
    /// The target has not answered for too long.
    pub silent: bool,
}

impl From<NoSession> for ListError {
    fn from(no: NoSession) -> ListError {
        ListError { why: no.why, silent: no.silent }
    }
}

impl Unit {
    pub(crate) fn medium(self) -> Medium {
        Medium {
            identity: self.identity,
            block_size: self.capacity.geometry.block_size,
            size: self.capacity.geometry.bytes(),
            read_only: self.mode.write_protected,
            thin: self.capacity.thin,
        }
    }
}

impl Found {
    fn new(lun: u16, unit: Result<Unit, String>) -> Found {
        Found { lun, is: unit.map(Unit::medium) }
    }
}

/// Who asks.
fn identity<'a>(address: &'a Address, initiator: &'a str) -> Result<Identity<'a>, ListError> {
    let no = |e: crate::LibraryError| ListError { why: e.to_string(), silent: false };
    crate::Library::loaded().map_err(no)?;
    Ok(Identity { address, initiator, isid: Isid::random() })
}

/// Logs in to the target of `address`, in a session of its own, and returns the disks among its LUNs; takes some
/// seconds at most, and as many for each LUN that does not answer, a minute altogether.
///
/// # Errors
/// The target is not there, lets nobody in, or does not tell its LUNs.
pub fn list(address: &Address, initiator: &str) -> Result<Vec<Found>, ListError> {
    let listed = Session::list(identity(address, initiator)?)?;
    Ok(listed.into_iter().map(|(lun, unit)| Found::new(lun, unit)).collect())
}

/// Logs in, in a session of its own, and returns what the LUN of `address` is, which alone is asked; takes some
/// seconds at most. `None`: there is no such disk.
///
/// # Errors
/// The target is not there, or lets nobody in; the LUN does not answer.
pub fn look(address: &Address, initiator: &str) -> Result<Option<Found>, ListError> {
    let told = Session::look(identity(address, initiator)?)?;
    Ok(told.map(|unit| Found::new(address.lun(), unit)))
}
