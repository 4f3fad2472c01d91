//! Which device has an alias or a UUID, without asking each device for its names.

use std::collections::{HashMap, VecDeque};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use parking_lot::Mutex;
use uuid::Uuid;

use crate::Bdev;

/// How often names of devices have changed in this process; the first indexes are of none.
static CHANGES: AtomicU64 = AtomicU64::new(1);

/// Names of the devices of the last changes, the latest last.
static CHANGED: Mutex<VecDeque<String>> = Mutex::new(VecDeque::new());

/// How many of them are remembered: who has missed more asks all devices.
pub(super) const REMEMBERED: usize = 64;

/// Says that the device of that name has other aliases from now on. A device that changes what its
/// [`Bdev::aliases`] returns calls it afterwards: until then it is found by the former ones.
pub fn aliases_changed(name: &str) {
    let mut changed = CHANGED.lock();
    if changed.len() == REMEMBERED {
        changed.pop_front();
    }
    changed.push_back(name.to_owned());
    CHANGES.fetch_add(1, Ordering::Release);
}

/// The names of the devices that changed theirs since, and how many changes there are now; `None`: not all of
/// them are remembered.
fn changed_since(as_of: u64) -> Option<(Vec<String>, u64)> {
    let changed = CHANGED.lock();
    let now = CHANGES.load(Ordering::Acquire);
    let missed = usize::try_from(now - as_of).ok()?;
    let first = changed.len().checked_sub(missed)?;
    Some((changed.iter().skip(first).cloned().collect(), now))
}

/// What a device is found by, beside its name.
pub(super) struct Keys {
    /// The changes there had been before it was asked.
    as_of: u64,
    pub aliases: Vec<String>,
    pub uuid: Uuid,
}

impl Keys {
    /// Asks `bdev`. An alias may stand behind a lock of the device's: hold none of the registry's.
    pub fn of(bdev: &dyn Bdev) -> Keys {
        let as_of = CHANGES.load(Ordering::Acquire);
        Keys { as_of, aliases: bdev.aliases(), uuid: bdev.uuid() }
    }
}

/// Names of devices by alias and by UUID.
#[derive(Default)]
pub(super) struct Index {
    /// The changes there had been before the first of them was asked.
    as_of: u64,
    by_alias: HashMap<String, String>,
    by_uuid: HashMap<Uuid, String>,
    keys: HashMap<String, Keys>,
}

impl Index {
    /// Asks each of `bdevs`, as [`Keys::of`] does.
    pub fn of(bdevs: &[Arc<dyn Bdev>]) -> Index {
        let as_of = CHANGES.load(Ordering::Acquire);
        let mut index = Index { as_of, ..Index::default() };
        for bdev in bdevs {
            index.insert(bdev.name(), Keys::of(&**bdev));
        }
        index
    }

    /// Whether no device has changed its names since.
    pub fn is_current(&self) -> bool {
        self.as_of == CHANGES.load(Ordering::Acquire)
    }

    /// The names of the devices that are to be asked again, and what [`Index::renew`] is told then; `None`: all
    /// are.
    pub fn stale(&self) -> Option<(Vec<String>, u64)> {
        changed_since(self.as_of)
    }

    /// Takes up what the devices of [`Index::stale`] have said, of the changes that there were then.
    pub fn renew(&mut self, renamed: Vec<(String, Keys)>, as_of: u64) {
        // One may have the alias that another one had.
        renamed.iter().for_each(|(name, _)| self.remove(name));
        for (name, keys) in renamed {
            self.insert(&name, keys);
        }
        self.as_of = as_of;
    }

    /// Takes up a device.
    pub fn insert(&mut self, name: &str, keys: Keys) {
        self.as_of = self.as_of.min(keys.as_of);
        let aliases = keys.aliases.iter().cloned();
        self.by_alias.extend(aliases.map(|alias| (alias, name.to_owned())));
        self.by_uuid.insert(keys.uuid, name.to_owned());
        self.keys.insert(name.to_owned(), keys);
    }

    /// Forgets a device, if it has it.
    pub fn remove(&mut self, name: &str) {
        let Some(keys) = self.keys.remove(name) else { return };
        for alias in keys.aliases {
            if self.by_alias.get(&alias).is_some_and(|of| of == name) {
                self.by_alias.remove(&alias);
            }
        }
        if self.by_uuid.get(&keys.uuid).is_some_and(|of| of == name) {
            self.by_uuid.remove(&keys.uuid);
        }
    }

    /// Name of the device with this alias or UUID.
    pub fn get(&self, key: &str) -> Option<&str> {
        let by_uuid = || Uuid::try_parse(key).ok().and_then(|uuid| self.by_uuid.get(&uuid));
        self.by_alias.get(key).or_else(by_uuid).map(String::as_str)
    }
}
