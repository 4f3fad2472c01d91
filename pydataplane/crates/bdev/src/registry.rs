//! Names of devices, who holds them, and who wants to hear about changes.

mod claim;
mod event;
mod index;

use parking_lot::{Condvar, Mutex, MutexGuard};
use std::collections::HashMap;
use std::sync::Arc;
use std::time::{Duration, Instant};

use crate::{Bdev, Limits, RateLimits};

use self::claim::Holder;
use self::event::Subscriber;
use self::index::{Index, Keys};

pub use self::claim::{Claim, ClaimMode};
pub use self::event::{Event, Subscription};
pub use self::index::aliases_changed;

/// How long [`Registry::unregister`] waits for the holders of a device to let go.
pub const UNREGISTER_TIMEOUT: Duration = Duration::from_secs(10);

/// Why the registry refused.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum RegistryError {
    /// No device of that name, alias or UUID.
    #[error("there is no bdev {0}")]
    NotFound(String),
    /// The name, an alias or the UUID belongs to another device.
    #[error("the name {name} is taken by the {product} {owner}: choose another")]
    NameTaken {
        /// The name, alias or UUID in question.
        name: String,
        /// Name of the device that has it.
        owner: String,
        /// Its product name.
        product: String,
    },
    /// Another holder does not share the device.
    #[error("bdev {name} is in use by {owner}: release it there first")]
    Claimed {
        /// Name of the device.
        name: String,
        /// Who holds it.
        owner: String,
    },
    /// A holder did not let go within [`UNREGISTER_TIMEOUT`]; the device stays hidden.
    #[error("bdev {name} is removed, but {owner} has not let go of it after {seconds} s")]
    StillHeld {
        /// Name of the device.
        name: String,
        /// Who holds it.
        owner: String,
        /// How long was waited, in seconds.
        seconds: u64,
    },
}

struct Entry {
    bdev: Arc<dyn Bdev>,
    /// Position in [`Registry::list`].
    order: u64,
    /// Being unregistered: not found any more.
    removing: bool,
    holders: Vec<Holder>,
}

#[derive(Default)]
struct State {
    entries: HashMap<String, Entry>,
    index: Index,
    /// Names of devices by those of the devices that they show ([`Bdev::below`]).
    above: HashMap<String, String>,
    /// How often a device came or went.
    changes: u64,
    subscribers: Vec<(u64, Subscriber)>,
    /// By name of a device, also of those that are not there now.
    limits: HashMap<String, Arc<Limits>>,
    next_id: u64,
}

impl State {
    fn id(&mut self) -> u64 {
        self.next_id += 1;
        self.next_id
    }

    /// Takes a device away.
    fn remove(&mut self, name: &str) -> Option<Entry> {
        self.changes += 1;
        if self.limits.get(name).is_some_and(|limits| !limits.is_on()) {
            self.limits.remove(name);
        }
        self.index.remove(name);
        let entry = self.entries.remove(name)?;
        if let Some(below) = entry.bdev.below() {
            self.above.remove(below);
        }
        Some(entry)
    }

    /// The entry with this name, unless it is being removed.
    fn named(&self, name: &str) -> Option<&Entry> {
        self.entries.get(name).filter(|e| !e.removing)
    }
}

#[derive(Default)]
struct Inner {
    state: Mutex<State>,
    released: Condvar,
}

/// All block devices of the process. Cheap to clone; every clone is the same registry.
#[derive(Clone, Default)]
pub struct Registry {
    inner: Arc<Inner>,
}

impl Registry {
    /// An empty registry.
    pub fn new() -> Self {
        Self::default()
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.inner.lock()
    }

    /// The device with this name, alias or UUID. Where names have changed, the devices are asked for
    /// theirs, with no lock held, because an alias may stand behind a lock of a device.
    fn find(&self, key: &str) -> Option<Arc<dyn Bdev>> {
        if let Some(e) = self.lock().named(key) {
            return Some(e.bdev.clone());
        }
        self.ask_renamed();
        let (all, changes) = {
            let state = self.lock();
            if state.index.is_current() {
                let name = state.index.get(key)?;
                return state.named(name).map(|e| e.bdev.clone());
            }
            let there = state.entries.values().filter(|e| !e.removing);
            (there.map(|e| e.bdev.clone()).collect::<Vec<_>>(), state.changes)
        };
        let index = Index::of(&all);
        let found = index.get(key).map(str::to_owned);
        let mut state = self.lock();
        if state.changes == changes {
            state.index = index; // of all that are there still
        }
        found.and_then(|name| state.named(&name).map(|e| e.bdev.clone()))
    }

    /// Brings the index up to date where few names have changed, and no device comes or goes meanwhile.
    fn ask_renamed(&self) {
        let (renamed, as_of, changes) = {
            let state = self.lock();
            if state.index.is_current() {
                return;
            }
            let Some((names, as_of)) = state.index.stale() else { return };
            let there = names.iter().filter_map(|name| state.entries.get(name));
            (there.map(|e| e.bdev.clone()).collect::<Vec<_>>(), as_of, state.changes)
        };
        let keys = |bdev: &Arc<dyn Bdev>| (bdev.name().to_owned(), Keys::of(&**bdev));
        let renamed = renamed.iter().map(keys).collect();
        let mut state = self.lock();
        if state.changes == changes {
            state.index.renew(renamed, as_of);
        }
    }

    /// Makes `bdev` known and emits [`Event::Registered`].
    ///
    /// # Errors
    /// [`RegistryError::NameTaken`] when its name, an alias or its UUID belongs to another device.
    pub fn register(&self, bdev: Arc<dyn Bdev>) -> Result<(), RegistryError> {
        let taken = |name: String, e: &dyn Bdev| RegistryError::NameTaken {
            name,
            owner: e.name().to_owned(),
            product: e.product_name().to_owned(),
        };
        let name = bdev.name().to_owned();
        let keys = Keys::of(&*bdev);
        for key in keys.aliases.iter().chain([&keys.uuid.to_string(), &name]) {
            if let Some(e) = self.find(key) {
                return Err(taken(key.clone(), &*e));
            }
        }
        {
            let mut state = self.lock();
            // One that is being removed still has its name; and somebody may have been quicker.
            if let Some(e) = state.entries.get(&name) {
                return Err(taken(name, &*e.bdev));
            }
            let order = state.id();
            state.changes += 1;
            state.index.insert(&name, keys);
            if let Some(below) = bdev.below() {
                state.above.insert(below.to_owned(), name.clone());
            }
            state.entries.insert(
                name,
                Entry { bdev: bdev.clone(), order, removing: false, holders: Vec::new() },
            );
        }
        self.emit(&Event::Registered(bdev));
        Ok(())
    }

    /// Hides the device, emits [`Event::Removed`] so that its holders close it, and waits until
    /// all claims are dropped. Channels that stay open answer as long as they exist.
    /// Never call it on a reactor thread or inside a subscriber.
    ///
    /// # Errors
    /// [`RegistryError::NotFound`]; [`RegistryError::StillHeld`] after [`UNREGISTER_TIMEOUT`]: then
    /// the device goes, and its name is free, when the last claim is dropped; until then a second
    /// call goes on waiting.
    pub fn unregister(&self, key: &str) -> Result<Arc<dyn Bdev>, RegistryError> {
        self.unregister_within(key, UNREGISTER_TIMEOUT)
    }

    /// As [`Registry::unregister`], on a thread of its own, for subscribers, where nobody may wait: the
    /// device that `key` lies on was removed, and waits for its end. What fails is logged.
    pub fn unregister_beside(&self, key: &str) {
        let (registry, name) = (self.clone(), key.to_owned());
        let remove = move || {
            if let Err(e) = registry.unregister(&name) {
                tracing::error!("not removed with its base: {e}");
            }
        };
        if let Err(e) = std::thread::Builder::new().name("bdev removal".into()).spawn(remove) {
            tracing::error!("no thread to remove bdev {key} with its base: {e}");
        }
    }

    /// As [`Registry::unregister`], with a time limit of the caller's.
    ///
    /// # Errors
    /// See [`Registry::unregister`].
    pub fn unregister_within(
        &self,
        key: &str,
        timeout: Duration,
    ) -> Result<Arc<dyn Bdev>, RegistryError> {
        let found = self.find(key);
        let (name, bdev, first) = {
            let mut state = self.lock();
            // By its name alone also one whose removal was begun and timed out.
            let name = found.map_or_else(|| key.to_owned(), |b| b.name().to_owned());
            let entry = state
                .entries
                .get_mut(&name)
                .ok_or_else(|| RegistryError::NotFound(key.to_owned()))?;
            let first = !std::mem::replace(&mut entry.removing, true);
            (name, entry.bdev.clone(), first)
        };
        if first {
            self.emit(&Event::Removed(bdev.clone()));
        }
        let deadline = Instant::now() + timeout;
        let mut state = self.lock();
        loop {
            let owner = match state.entries.get(&name) {
                // Another caller finished the removal, or a new device took the name.
                None => return Ok(bdev),
                Some(e) if !Arc::ptr_eq(&e.bdev, &bdev) => return Ok(bdev),
                Some(e) => match e.holders.first() {
                    None => {
                        state.remove(&name);
                        return Ok(bdev);
                    }
                    Some(h) => h.owner.clone(),
                },
            };
            let left = deadline.saturating_duration_since(Instant::now());
            if left.is_zero() {
                let seconds = timeout.as_secs();
                return Err(RegistryError::StillHeld { name, owner, seconds });
            }
            self.inner.released.wait_for(&mut state, left);
        }
    }

    /// As [`Registry::unregister`], if nobody holds the device; nobody can claim it in between.
    ///
    /// # Errors
    /// [`RegistryError::NotFound`]; [`RegistryError::Claimed`] naming a holder, and nothing changed.
    pub fn unregister_unused(&self, key: &str) -> Result<Arc<dyn Bdev>, RegistryError> {
        let missing = || RegistryError::NotFound(key.to_owned());
        let name = self.find(key).ok_or_else(missing)?.name().to_owned();
        let bdev = {
            let mut state = self.lock();
            let entry = state.named(&name).ok_or_else(missing)?;
            if let Some(h) = entry.holders.first() {
                return Err(RegistryError::Claimed { name, owner: h.owner.clone() });
            }
            state.remove(&name).ok_or_else(missing)?.bdev
        };
        self.emit(&Event::Removed(bdev.clone()));
        Ok(bdev)
    }

    /// Emits [`Event::Resized`]; whoever changed a device's size calls it afterwards.
    pub fn notify_resized(&self, key: &str) {
        if let Some(bdev) = self.get(key) {
            self.emit(&Event::Resized(bdev));
        }
    }

    /// The device with this name, alias or UUID.
    pub fn get(&self, key: &str) -> Option<Arc<dyn Bdev>> {
        self.find(key)
    }

    /// The device that shows the one of this name as a whole, be that one there or not.
    pub fn above(&self, name: &str) -> Option<Arc<dyn Bdev>> {
        let state = self.lock();
        state.above.get(name).and_then(|above| state.named(above)).map(|e| e.bdev.clone())
    }

    /// As [`Registry::get`], for a device of type `T`, be it with protection information: `None` if it is
    /// of another.
    pub fn get_as<T: Bdev>(&self, key: &str) -> Option<Arc<T>> {
        let bdev = self.get(key)?;
        let any: Arc<dyn std::any::Any + Send + Sync> = bdev.bare().unwrap_or(bdev);
        any.downcast().ok()
    }

    /// As [`Registry::get`], with the error that a caller would make of `None`.
    ///
    /// # Errors
    /// [`RegistryError::NotFound`].
    pub fn require(&self, key: &str) -> Result<Arc<dyn Bdev>, RegistryError> {
        self.get(key).ok_or_else(|| RegistryError::NotFound(key.to_owned()))
    }

    /// The limits of the device with this name, be it there or not: whoever sets some before it is there
    /// has it limited from the first I/O on.
    pub fn limits(&self, name: &str) -> Arc<Limits> {
        let mut state = self.lock();
        match state.limits.get(name) {
            Some(limits) => Arc::clone(limits),
            None => Arc::clone(state.limits.entry(name.to_owned()).or_default()),
        }
    }

    /// The device with this name has no limits any more, be it there or not.
    pub fn forget_limits(&self, name: &str) {
        let mut state = self.lock();
        if let Some(limits) = state.limits.get(name) {
            _ = limits.set(RateLimits::default());
        }
        if !state.entries.contains_key(name) {
            state.limits.remove(name);
        }
    }

    /// All devices, in the order of registration.
    pub fn list(&self) -> Vec<Arc<dyn Bdev>> {
        let state = self.lock();
        let mut all: Vec<_> =
            state.entries.values().filter(|e| !e.removing).map(|e| (e.order, &e.bdev)).collect();
        all.sort_by_key(|(order, _)| *order);
        all.into_iter().map(|(_, b)| b.clone()).collect()
    }
}

impl Inner {
    fn lock(&self) -> MutexGuard<'_, State> {
        // A panic elsewhere leaves the maps whole: every change is one insert or remove.
        self.state.lock()
    }
}

#[cfg(test)]
mod tests;
