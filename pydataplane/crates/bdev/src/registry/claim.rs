//! Who holds a device.

use std::fmt;
use std::sync::Arc;

use super::{Registry, RegistryError};
use crate::{Bdev, Limits};

/// Who else may hold a device beside a claim.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ClaimMode {
    /// Nobody.
    Exclusive,
    /// Others that also share it.
    Shared,
    /// Anybody: the holder only reads, or does not care who writes, and just has the device stay
    /// until it let go.
    Reader,
    /// Those that only read, and others of this mode: what is on the device does not change.
    Unchanged,
}

impl ClaimMode {
    /// Whether a device may be held in both ways at once. `fixed`: it takes no writes.
    fn agrees(self, other: ClaimMode, fixed: bool) -> bool {
        use ClaimMode::{Exclusive, Reader, Shared, Unchanged};
        match (self, other) {
            (Reader, _) | (_, Reader) | (Shared, Shared) | (Unchanged, Unchanged) => true,
            (Exclusive, Exclusive | Shared) | (Shared, Exclusive) => false,
            (Unchanged, Exclusive | Shared) | (Exclusive | Shared, Unchanged) => fixed,
        }
    }
}

pub(super) struct Holder {
    pub id: u64,
    pub owner: String,
    pub mode: ClaimMode,
}

impl Registry {
    /// Holds the device for `owner` alone until the [`Claim`] is dropped. `owner` is a clause that
    /// completes "in use by", such as `lvstore lvs0`.
    ///
    /// # Errors
    /// [`RegistryError::NotFound`]; [`RegistryError::Claimed`] naming the present holder.
    pub fn claim(&self, key: &str, owner: &str) -> Result<Claim, RegistryError> {
        self.claim_as(key, owner, ClaimMode::Exclusive)
    }

    /// As [`Registry::claim`], with the mode as a parameter.
    ///
    /// # Errors
    /// See [`Registry::claim`].
    pub fn claim_as(
        &self,
        key: &str,
        owner: &str,
        mode: ClaimMode,
    ) -> Result<Claim, RegistryError> {
        let missing = || RegistryError::NotFound(key.to_owned());
        let name = self.find(key).ok_or_else(missing)?.name().to_owned();
        let mut state = self.lock();
        let id = state.id();
        let entry = state.entries.get_mut(&name).filter(|e| !e.removing).ok_or_else(missing)?;
        let fixed = entry.bdev.features().read_only;
        let conflict = entry.holders.iter().find(|h| !mode.agrees(h.mode, fixed));
        if let Some(h) = conflict {
            return Err(RegistryError::Claimed { name, owner: h.owner.clone() });
        }
        entry.holders.push(Holder { id, owner: owner.to_owned(), mode });
        let bdev = entry.bdev.clone();
        Ok(Claim { registry: self.clone(), bdev, id })
    }

    /// Who holds the device, as given to [`Registry::claim`].
    pub fn owners(&self, key: &str) -> Vec<(String, ClaimMode)> {
        let Some(bdev) = self.find(key) else { return Vec::new() };
        let state = self.lock();
        let holders = state.named(bdev.name()).map(|e| &e.holders[..]).unwrap_or_default();
        holders.iter().map(|h| (h.owner.clone(), h.mode)).collect()
    }
}

/// A device held by an owner; dropping it lets go.
#[must_use]
pub struct Claim {
    registry: Registry,
    bdev: Arc<dyn Bdev>,
    id: u64,
}

impl Claim {
    /// The device.
    pub fn bdev(&self) -> &Arc<dyn Bdev> {
        &self.bdev
    }

    /// How much I/O it does at most.
    pub fn limits(&self) -> Arc<Limits> {
        self.registry.limits(self.bdev.name())
    }
}

impl Claim {
    /// Holds the device for somebody else, too, whom this holder lets in; in the same way.
    pub fn also(&self, owner: &str) -> Claim {
        let mut state = self.registry.lock();
        let id = state.id();
        if let Some(entry) = state.entries.get_mut(self.bdev.name()) {
            let mine = entry.holders.iter().find(|holder| holder.id == self.id);
            let mode = mine.map_or(ClaimMode::Exclusive, |holder| holder.mode);
            entry.holders.push(Holder { id, owner: owner.to_owned(), mode });
        }
        Claim { registry: self.registry.clone(), bdev: self.bdev.clone(), id }
    }
}

impl fmt::Debug for Claim {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("Claim").field(&self.bdev.name()).finish()
    }
}

impl Drop for Claim {
    fn drop(&mut self) {
        let mut state = self.registry.lock();
        let mut gone = None;
        if let Some(e) = state.entries.get_mut(self.bdev.name()) {
            e.holders.retain(|h| h.id != self.id);
            // Whoever removed it may have given up waiting.
            if e.removing && e.holders.is_empty() {
                gone = state.remove(self.bdev.name());
            }
        }
        drop(state);
        drop(gone);
        self.registry.inner.released.notify_all();
    }
}
