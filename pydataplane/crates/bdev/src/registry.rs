//! Names of devices, who holds them, and who wants to hear about changes.

use parking_lot::{Condvar, Mutex, MutexGuard};
use std::collections::HashMap;
use std::fmt;
use std::sync::Arc;
use std::time::{Duration, Instant};

use uuid::Uuid;

use crate::Bdev;

/// How long [`Registry::unregister`] waits for the holders of a device to let go.
pub const UNREGISTER_TIMEOUT: Duration = Duration::from_secs(10);

/// What happened to a device. Delivered on the thread that caused it, with no lock held.
#[derive(Clone)]
pub enum Event {
    /// It can be found and opened from now on.
    Registered(Arc<dyn Bdev>),
    /// Its [`crate::Geometry::num_blocks`] changed.
    Resized(Arc<dyn Bdev>),
    /// It can no longer be found: close its channels and drop its claims.
    Removed(Arc<dyn Bdev>),
}

impl fmt::Debug for Event {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (what, bdev) = match self {
            Event::Registered(b) => ("Registered", b),
            Event::Resized(b) => ("Resized", b),
            Event::Removed(b) => ("Removed", b),
        };
        f.debug_tuple(what).field(&bdev.name()).finish()
    }
}

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
}

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

struct Holder {
    id: u64,
    owner: String,
    mode: ClaimMode,
}

struct Entry {
    bdev: Arc<dyn Bdev>,
    /// Position in [`Registry::list`].
    order: u64,
    /// Being unregistered: not found any more.
    removing: bool,
    holders: Vec<Holder>,
}

type Subscriber = Arc<dyn Fn(&Event) + Send + Sync>;

#[derive(Default)]
struct State {
    entries: HashMap<String, Entry>,
    subscribers: Vec<(u64, Subscriber)>,
    next_id: u64,
}

impl State {
    fn id(&mut self) -> u64 {
        self.next_id += 1;
        self.next_id
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

    fn emit(&self, event: &Event) {
        let subscribers: Vec<Subscriber> =
            self.lock().subscribers.iter().map(|(_, s)| s.clone()).collect();
        for s in subscribers {
            s(event);
        }
    }

    /// The device with this name, alias or UUID. Devices are asked with no lock held, because an
    /// alias may stand behind a lock of theirs.
    fn find(&self, key: &str) -> Option<Arc<dyn Bdev>> {
        let all: Vec<_> = {
            let state = self.lock();
            if let Some(e) = state.named(key) {
                return Some(e.bdev.clone());
            }
            state.entries.values().filter(|e| !e.removing).map(|e| e.bdev.clone()).collect()
        };
        let uuid = Uuid::try_parse(key).ok();
        all.into_iter()
            .find(|b| uuid.is_some_and(|u| u == b.uuid()) || b.aliases().iter().any(|a| a == key))
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
        for key in bdev.aliases().into_iter().chain([bdev.uuid().to_string()]) {
            if let Some(e) = self.find(&key) {
                return Err(taken(key, &*e));
            }
        }
        if let Some(e) = self.find(&name) {
            return Err(taken(name, &*e));
        }
        {
            let mut state = self.lock();
            // One that is being removed still has its name; and somebody may have been quicker.
            if let Some(e) = state.entries.get(&name) {
                return Err(taken(name, &*e.bdev));
            }
            let order = state.id();
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
                        state.entries.remove(&name);
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
            state.entries.remove(&name).ok_or_else(missing)?.bdev
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

    /// As [`Registry::get`], for a device of type `T`: `None` if it is of another.
    pub fn get_as<T: Bdev>(&self, key: &str) -> Option<Arc<T>> {
        let any: Arc<dyn std::any::Any + Send + Sync> = self.get(key)?;
        any.downcast().ok()
    }

    /// As [`Registry::get`], with the error that a caller would make of `None`.
    ///
    /// # Errors
    /// [`RegistryError::NotFound`].
    pub fn require(&self, key: &str) -> Result<Arc<dyn Bdev>, RegistryError> {
        self.get(key).ok_or_else(|| RegistryError::NotFound(key.to_owned()))
    }

    /// All devices, in the order of registration.
    pub fn list(&self) -> Vec<Arc<dyn Bdev>> {
        let state = self.lock();
        let mut all: Vec<_> =
            state.entries.values().filter(|e| !e.removing).map(|e| (e.order, &e.bdev)).collect();
        all.sort_by_key(|(order, _)| *order);
        all.into_iter().map(|(_, b)| b.clone()).collect()
    }

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
        let conflict = entry.holders.iter().find(|h| {
            h.mode != ClaimMode::Reader
                && mode != ClaimMode::Reader
                && (h.mode == ClaimMode::Exclusive || mode == ClaimMode::Exclusive)
        });
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

    /// Calls `f` for each event until the [`Subscription`] is dropped. `f` runs on the thread
    /// that caused the event; it may use the registry, but not wait for a device's removal.
    pub fn subscribe(&self, f: impl Fn(&Event) + Send + Sync + 'static) -> Subscription {
        let mut state = self.lock();
        let id = state.id();
        state.subscribers.push((id, Arc::new(f)));
        Subscription { registry: self.clone(), id }
    }
}

impl Inner {
    fn lock(&self) -> MutexGuard<'_, State> {
        // A panic elsewhere leaves the maps whole: every change is one insert or remove.
        self.state.lock()
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
                gone = state.entries.remove(self.bdev.name());
            }
        }
        drop(state);
        drop(gone);
        self.registry.inner.released.notify_all();
    }
}

/// Ends a subscription when dropped. An event that is being delivered meanwhile may still arrive.
#[must_use]
pub struct Subscription {
    registry: Registry,
    id: u64,
}

impl Drop for Subscription {
    fn drop(&mut self) {
        // The closure is dropped outside the lock: it may own claims.
        let mut state = self.registry.lock();
        let at = state.subscribers.iter().position(|(id, _)| *id == self.id);
        let removed = at.map(|at| state.subscribers.remove(at));
        drop(state);
        drop(removed);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Null;
    use std::thread;

    fn null(name: &str) -> Arc<Null> {
        Null::create(name, 512, 8, None).unwrap()
    }

    #[test]
    fn found_by_name_and_uuid_and_listed_in_order() {
        let r = Registry::new();
        for n in ["b", "a", "c"] {
            r.register(null(n)).unwrap();
        }
        let a = r.get("a").unwrap();
        assert_eq!(r.get(&a.uuid().to_string()).unwrap().name(), "a");
        assert_eq!(r.get(&a.uuid().to_string().to_uppercase()).unwrap().name(), "a");
        assert!(r.get("d").is_none());
        let names: Vec<_> = r.list().iter().map(|b| b.name().to_owned()).collect();
        assert_eq!(names, ["b", "a", "c"]);
        assert!(r.get_as::<Null>("a").is_some());
        assert!(r.get_as::<crate::Malloc>("a").is_none());
    }

    #[test]
    fn a_taken_name_or_uuid_is_refused_and_nothing_changes() {
        let r = Registry::new();
        let a = null("a");
        r.register(a.clone()).unwrap();
        let e = r.register(null("a")).unwrap_err();
        assert_eq!(e.to_string(), "the name a is taken by the Null disk a: choose another");
        let twin = Null::create("b", 512, 8, Some(a.uuid())).unwrap();
        assert!(matches!(r.register(twin), Err(RegistryError::NameTaken { .. })));
        assert_eq!(r.list().len(), 1);
    }

    #[test]
    fn a_claim_names_its_owner_and_ends_with_its_guard() {
        let r = Registry::new();
        r.register(null("a")).unwrap();
        let claim = r.claim("a", "lvstore lvs0").unwrap();
        let e = r.claim_as("a", "controller vm-1", ClaimMode::Shared).unwrap_err();
        assert_eq!(e.to_string(), "bdev a is in use by lvstore lvs0: release it there first");
        drop(claim);
        let one = r.claim_as("a", "controller vm-1", ClaimMode::Shared).unwrap();
        let two = r.claim_as("a", "controller vm-2", ClaimMode::Shared).unwrap();
        assert!(r.claim("a", "x").is_err());
        assert_eq!(r.owners("a").len(), 2);
        drop((one, two));
        assert!(r.owners("a").is_empty());
        let _held = r.claim("a", "x").unwrap();
    }

    #[test]
    fn unregister_hides_tells_and_waits_for_holders() {
        let r = Registry::new();
        r.register(null("a")).unwrap();
        let held = Arc::new(Mutex::new(Some(r.claim("a", "me").unwrap())));
        let seen = Arc::new(Mutex::new(Vec::new()));
        let sub = {
            let (held, seen) = (held.clone(), seen.clone());
            r.subscribe(move |e| {
                seen.lock().push(format!("{e:?}"));
                if matches!(e, Event::Removed(_)) {
                    let held = held.lock().take();
                    std::thread::spawn(move || drop(held));
                }
            })
        };
        assert_eq!(r.unregister("a").unwrap().name(), "a");
        assert!(r.get("a").is_none());
        assert_eq!(*seen.lock(), ["Removed(\"a\")"]);
        r.register(null("a")).unwrap();
        r.notify_resized("a");
        drop(sub);
        r.notify_resized("a");
        assert_eq!(seen.lock().len(), 3);
    }

    #[test]
    fn a_holder_that_stays_is_named_and_a_second_try_goes_on() {
        let r = Registry::new();
        r.register(null("a")).unwrap();
        let held = r.claim("a", "lvstore lvs0").unwrap();
        let e = r.unregister_within("a", Duration::ZERO).unwrap_err();
        assert_eq!(
            e.to_string(),
            "bdev a is removed, but lvstore lvs0 has not let go of it after 0 s"
        );
        assert!(r.get("a").is_none());
        assert!(r.register(null("a")).is_err(), "the name is taken until the removal ends");
        let e = r.unregister_within("a", Duration::ZERO).unwrap_err();
        assert!(matches!(e, RegistryError::StillHeld { .. }), "{e}");
        thread::scope(|s| {
            let waits = s.spawn(|| r.unregister_within("a", Duration::from_secs(60)));
            drop(held);
            // It may have come too late to wait.
            if let Err(e) = waits.join().unwrap() {
                assert!(matches!(e, RegistryError::NotFound(_)), "{e}");
            }
        });
        assert!(matches!(r.unregister("a"), Err(RegistryError::NotFound(_))));
    }

    #[test]
    fn a_device_in_use_is_not_removed_by_who_asks_for_an_unused_one() {
        let r = Registry::new();
        r.register(null("a")).unwrap();
        let seen = Arc::new(Mutex::new(Vec::new()));
        let notes = seen.clone();
        let _sub = r.subscribe(move |e| notes.lock().push(format!("{e:?}")));
        let held = r.claim_as("a", "export e", ClaimMode::Reader).unwrap();
        let e = r.unregister_unused("a").unwrap_err();
        assert!(matches!(&e, RegistryError::Claimed { owner, .. } if owner == "export e"), "{e}");
        assert!(r.get("a").is_some() && seen.lock().is_empty());
        drop(held);
        assert_eq!(r.unregister_unused("a").unwrap().name(), "a");
        assert_eq!(*seen.lock(), ["Removed(\"a\")"]);
        assert!(matches!(r.unregister_unused("a"), Err(RegistryError::NotFound(_))));
        r.register(null("a")).unwrap();
    }

    #[test]
    fn a_device_whose_removal_was_given_up_goes_with_its_last_holder() {
        let r = Registry::new();
        r.register(null("a")).unwrap();
        let held = [
            r.claim_as("a", "one", ClaimMode::Shared).unwrap(),
            r.claim_as("a", "two", ClaimMode::Shared).unwrap(),
        ];
        assert!(r.unregister_within("a", Duration::ZERO).is_err());
        let [one, two] = held;
        drop(one);
        assert!(r.register(null("a")).is_err(), "the second has it");
        drop(two);
        r.register(null("a")).unwrap();
        let _held = r.claim("a", "three").unwrap();
        assert!(r.get("a").is_some());
    }
}
