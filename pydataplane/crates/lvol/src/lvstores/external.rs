//! Lvols whose parents are bdevs, and bdevs that come and go while lvols need them.

use super::{Lvstores, Shared};
use crate::error::Error;
use crate::info::{LvolInfo, NewLvol};
use crate::lvol::Lvol;
use crate::lvs::Lvs;
use bdev::Bdev;
use std::sync::{Arc, Weak};
use uuid::Uuid;

impl Lvstores {
    /// Creates a clone of any bdev (an image file that is read-only, for instance): an lvol of its size
    /// that reads as it does, and has nothing of its own yet. The bdev is held, so that nobody writes to
    /// it; its UUID is kept, by which it is found when the lvstore is loaded again.
    ///
    /// # Errors
    /// [`Error::NoLvstore`], [`Error::NoBdev`], [`Error::BadParameter`] (an lvol of that lvstore, a size
    /// of no whole clusters, longer blocks), [`Error::InUse`] while somebody may write to the bdev,
    /// [`Error::AlreadyExists`], [`Error::NoSpace`] (metadata), [`Error::Stopped`], [`Error::Io`].
    pub fn clone_bdev(&self, bdev: &str, lvstore: &str, new: &NewLvol) -> Result<LvolInfo, Error> {
        let lvs = self.shared.find(lvstore)?;
        self.shared.registry.get(bdev).ok_or_else(|| Error::NoBdev { bdev: bdev.to_owned() })?;
        self.shared.not_of(&lvs, bdev, || format!("clone bdev {bdev}"))?;
        lvs.clone_bdev(bdev, new)
    }

    /// Gives a thin lvol that nobody uses a bdev of its size as its parent: where it has nothing of its
    /// own it reads as that.
    ///
    /// # Errors
    /// [`Error::NoLvol`], and as [`Lvstores::clone_bdev`].
    pub fn set_parent_bdev(&self, lvol: &str, bdev: &str) -> Result<(), Error> {
        let (lvs, volume) = self.shared.find_lvol(lvol)?;
        self.shared.registry.get(bdev).ok_or_else(|| Error::NoBdev { bdev: bdev.to_owned() })?;
        let op = || format!("make bdev {bdev} the parent of lvol {}", volume.alias());
        self.shared.not_of(&lvs, bdev, op)?;
        lvs.set_parent_bdev(&volume, bdev)
    }
}

impl Shared {
    /// Refuses a bdev that is an lvol of this lvstore.
    fn not_of(&self, lvs: &Lvs, bdev: &str, op: impl FnOnce() -> String) -> Result<(), Error> {
        let its = self.registry.get(bdev).and_then(|bdev| lvs.volume(bdev.uuid()));
        its.map_or(Ok(()), |_| {
            let why = "it is an lvol of the same lvstore; take a snapshot of it and clone that";
            Err(Error::BadParameter { op: op(), why: why.into() })
        })
    }

    /// Whether an lvstore holds the bdev as a parent.
    pub(super) fn is_external(&self, bdev: &str) -> bool {
        let Some(bdev) = self.registry.get(bdev) else { return false };
        self.stores.lock().iter().any(|lvs| lvs.holds_external(bdev.uuid()))
    }

    /// Has the lvstores take up a bdev if lvols wait for it.
    pub(super) fn externals_come(&self, bdev: &str) -> Result<(), Error> {
        let Some(bdev) = self.registry.get(bdev) else { return Ok(()) };
        let stores = self.stores.lock().clone();
        let waiting = stores.iter().filter(|lvs| lvs.waits_for_external(bdev.uuid()));
        waiting.map(|lvs| lvs.externals_come()).fold(Ok(()), Result::and)
    }
}

/// A bdev is being removed: its holders let go of it.
pub(super) fn removed(shared: &Weak<Shared>, bdev: &Arc<dyn Bdev>) {
    let Some(shared) = shared.upgrade() else { return };
    let stores = shared.stores.lock().clone();
    stores.iter().for_each(|lvs| lvs.external_leaves(bdev));
}

/// An lvol came: if others wait for it, it is taken up by a thread of its own, as a subscriber may not
/// wait. Other bdevs are taken up when they are examined.
pub(super) fn registered(shared: &Weak<Shared>, bdev: Uuid) {
    let Some(shared) = shared.upgrade() else { return };
    let stores = shared.stores.lock().clone();
    let waited_for = stores.iter().any(|lvs| lvs.waits_for_external(bdev));
    if !waited_for || shared.registry.get_as::<Lvol>(&bdev.to_string()).is_none() {
        return;
    }
    let come = move || {
        if let Err(e) = shared.externals_come(&bdev.to_string()) {
            tracing::error!("{e}");
        }
    };
    if let Err(e) = std::thread::Builder::new().name("lvol-parent".into()).spawn(come) {
        tracing::error!("bdev {bdev} cannot be taken up as a parent: {e}");
    }
}
