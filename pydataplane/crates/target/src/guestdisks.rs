//! Bdevs that are there for guests to have as disks: what they hold is not looked at, and they go when nobody
//! uses them any more.

use crate::app::App;
use crate::openvolumes::{CLOSE_TIMEOUT, hold};
use crate::restore::bdev_of;
use crate::state;
use parking_lot::Mutex;
use rbd::Disk;
use rpc::{Error, Held};
use std::collections::BTreeMap;
use std::time::{Duration, Instant};

/// How long one that is new is kept for whoever made it to use.
const NEW: Duration = Duration::from_secs(60);

/// Their names. Shared by all methods; thread-safe.
#[derive(Default)]
pub struct GuestDisks {
    /// When it was made, of one that nobody has used yet.
    all: Mutex<BTreeMap<String, Option<Instant>>>,
}

impl GuestDisks {
    /// One more, which is to be used soon.
    pub fn add(&self, name: &str) {
        self.all.lock().insert(name.to_owned(), Some(Instant::now()));
    }

    /// One more, which somebody uses, or will as soon as it is restored.
    pub fn add_used(&self, name: &str) {
        self.all.lock().insert(name.to_owned(), None);
    }

    /// Whether it is one.
    pub fn has(&self, name: &str) -> bool {
        self.all.lock().contains_key(name)
    }

    fn remove(&self, name: &str) {
        self.all.lock().remove(name);
    }

    /// Those that are not new any more, or have been used.
    fn settled(&self, now: Instant) -> Vec<String> {
        let all = self.all.lock();
        let is_new = |made: &Option<Instant>| made.is_some_and(|made| now < made + NEW);
        all.iter().filter(|(_, made)| !is_new(made)).map(|(name, _)| name.clone()).collect()
    }
}

impl App {
    /// Holds a guest's disk for the call that is to use it. `None`: it is none.
    ///
    /// # Errors
    /// Somebody has it for himself alone.
    pub fn hold_guest_disk(&self, name: &str) -> Result<Held, Error> {
        let Some(bdev) = self.registry.get(name).map(|bdev| bdev.name().to_owned()) else {
            return Ok(None);
        };
        if !self.guest_disks.has(&bdev) {
            return Ok(None);
        }
        let held = hold(self, &bdev)?;
        self.guest_disks.add_used(&bdev);
        Ok(held)
    }

    /// Closes those that nobody uses any more; called after each call that may have let go of one.
    pub fn close_unused_guest_disks(&self) {
        for bdev in self.guest_disks.settled(Instant::now()) {
            if self.registry.get(&bdev).is_none() {
                self.guest_disks.remove(&bdev);
                continue;
            }
            // Also by what waits for it.
            let is_wanted = self.config().items().any(|item| bdev_of(item) == Some(&*bdev));
            if is_wanted || !self.registry.owners(&bdev).is_empty() {
                continue;
            }
            let closing = self.registry.get_as::<Disk>(&bdev).map(|disk| disk.closing());
            if self.registry.unregister_unused(&bdev).is_err() {
                continue;
            }
            self.guest_disks.remove(&bdev);
            let keys = [state::bdev_key(&bdev), state::limits_key(&bdev)];
            self.config().forget(|item| keys.contains(&item.key));
            if closing.is_some_and(|closing| !closing.wait(CLOSE_TIMEOUT)) {
                tracing::warn!("bdev {bdev} is closed, but its cluster has not let go of it yet");
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn one_is_kept_until_it_was_used_or_is_not_new_any_more() {
        let disks = GuestDisks::default();
        disks.add("new");
        disks.add("used");
        disks.add_used("used");
        let now = Instant::now();
        assert_eq!(disks.settled(now), ["used"]);
        assert_eq!(disks.settled(now + NEW), ["new", "used"]);
        disks.remove("used");
        assert!(disks.has("new") && !disks.has("used"));
    }
}
