//! Bdevs that are there for guests to have as disks: what they hold is not looked at, and they go when nobody
//! uses them any more.

use crate::app::App;
use crate::errors;
use crate::methods::{limits, rbd as images};
use crate::openvolumes::{CLOSE_TIMEOUT, hold};
use crate::restore::bdev_of;
use crate::state::{self, Item};
use bdev::Closed;
use parking_lot::Mutex;
use rbd::Disk;
use rpc::{Errno, Error, Held};
use serde_json::Value;
use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::{Duration, Instant};

/// A guest's disk on what its server keeps nobody from writing to.
pub struct Unlocked {
    /// Name of the bdev.
    pub name: String,
    /// What it is on, for people.
    pub on: String,
    /// Whether it is written to.
    pub writes: bool,
    /// Whether others that say so, too, may.
    pub shared: bool,
}

impl Unlocked {
    /// Refuses one that is on the same as `others`, also as one that waits for its server, and written to as they
    /// are.
    ///
    /// # Errors
    /// Names the other.
    pub fn check_free(&self, others: impl IntoIterator<Item = Unlocked>) -> Result<(), Error> {
        let in_the_way = |other: &Unlocked| {
            other.name != self.name && self.writes && other.writes && !(self.shared && other.shared)
        };
        match others.into_iter().find(in_the_way) {
            None => Ok(()),
            Some(other) => Err(Error::os(
                Errno::Busy,
                format_args!(
                    "{} is written to as bdev {} by another guest: detach it there first, or give the disk \
                     <shareable/> in both domains",
                    self.on, other.name
                ),
            )),
        }
    }
}

/// How long one that is new is kept for whoever made it to use.
const NEW: Duration = Duration::from_secs(60);

/// Their names. Shared by all methods; thread-safe.
#[derive(Default)]
pub struct GuestDisks {
    /// When it was made, or asked for again, of one that nobody has used since.
    all: Mutex<BTreeMap<String, Option<Instant>>>,
    /// Held while one that is on a server which does not lock it is made known and recorded.
    pub making: Mutex<()>,
    /// Whether a thread closes those that nobody uses in time.
    watched: AtomicBool,
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

    /// One that is there is asked for again, and is to be used soon. `false`: it is none.
    pub fn renew(&self, name: &str) -> bool {
        let mut all = self.all.lock();
        all.get_mut(name).map(|made| *made = Some(Instant::now())).is_some()
    }

    /// Whether any is new; if not, nobody watches them any more.
    fn go_on_watching(&self) -> bool {
        let all = self.all.lock();
        let any = all.values().any(Option::is_some);
        self.watched.store(any, Ordering::Relaxed);
        any
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
    /// Holds a guest's disk for the call that is to use it; `incoming`: for a VM that comes from another host.
    /// `None`: it is none.
    ///
    /// # Errors
    /// Somebody has it for himself alone; it was opened for a VM that was to come, and cannot be locked now.
    pub fn hold_guest_disk(&self, name: &str, incoming: bool) -> Result<Held, Error> {
        let Some(bdev) = self.registry.get(name).map(|bdev| bdev.name().to_owned()) else {
            return Ok(None);
        };
        if !self.guest_disks.has(&bdev) {
            return Ok(None);
        }
        if !incoming && let Some(item) = self.close_awaiting_guest_disk(&bdev) {
            images::open_again(self, &item)?;
        }
        if !incoming && self.awaits_guest(&bdev) {
            let why = format!(
                "bdev {bdev} waits for a VM that comes from another host, so no other can have it: try again when \
                 that is here or given up"
            );
            return Err(Error::os(Errno::Busy, why));
        }
        let held = hold(self, &bdev)?;
        self.guest_disks.add_used(&bdev);
        Ok(held)
    }

    /// Closes one that nobody uses now, though it is new, when the call at hand ends. `false`: it is none.
    pub fn let_go_of_guest_disk(&self, name: &str) -> bool {
        let is_one = self.guest_disks.has(name);
        if is_one {
            self.guest_disks.add_used(name);
        }
        is_one
    }

    /// Tells when what a bdev is on has let go of it, where that takes its time.
    pub fn closing(&self, bdev: &str) -> Option<Closed> {
        let image = self.registry.get_as::<Disk>(bdev).map(|disk| disk.closing());
        let lun = || self.registry.get_as::<iscsi::Disk>(bdev).map(|disk| disk.closing());
        let namespace = || {
            let disk = self.registry.get_as::<nvme::Disk>(bdev)?;
            Some(disk.controller().closing())
        };
        image.or_else(lun).or_else(namespace)
    }

    /// Closes an image that was opened for a VM that was to come from another host, and that nobody uses: it is not
    /// locked, and what was known of who had it last may be out of date. What was recorded of it; `None`: it is none.
    pub fn close_awaiting_guest_disk(&self, bdev: &str) -> Option<Item> {
        let awaits = self.awaits_guest(bdev);
        let item = self.config().get(&state::bdev_key(bdev)).filter(|_| awaits).cloned()?;
        let closing = self.unregister_guest_disk(bdev).ok()?;
        wait_until_closed(bdev, closing);
        Some(item)
    }

    /// Whether it is an image that is to be locked for this host, and is not.
    fn awaits_guest(&self, bdev: &str) -> bool {
        let disk = self.registry.get_as::<Disk>(bdev);
        disk.is_some_and(|disk| disk.is_locked() == Some(false))
    }

    /// Takes one that nobody uses out of what there is; what tells when it is closed, where that takes its time.
    ///
    /// # Errors
    /// Somebody uses it.
    fn unregister_guest_disk(&self, bdev: &str) -> Result<Option<Closed>, Error> {
        let closing = self.closing(bdev);
        self.registry.unregister_unused(bdev).map_err(errors::registry)?;
        self.guest_disks.remove(bdev);
        self.config().forget(|item| item.key == state::bdev_key(bdev));
        Ok(closing)
    }

    /// Closes those that nobody uses any more; called after each call that may have let go of one.
    pub fn close_unused_guest_disks(&self) {
        self.forget_unused_guest_disks();
        for bdev in self.guest_disks.settled(Instant::now()) {
            if self.registry.get(&bdev).is_none() {
                // One that is recorded is just being restored.
                if self.config().get(&state::bdev_key(&bdev)).is_none() {
                    self.guest_disks.remove(&bdev);
                }
                continue;
            }
            // Also by what waits for it.
            let is_wanted = self.config().items().any(|item| bdev_of(item) == Some(&*bdev));
            if is_wanted || !self.registry.owners(&bdev).is_empty() {
                continue;
            }
            let Ok(closing) = self.unregister_guest_disk(&bdev) else { continue };
            limits::forget(self, &bdev);
            wait_until_closed(&bdev, closing);
        }
    }
}

fn wait_until_closed(bdev: &str, closing: Option<Closed>) {
    if closing.is_some_and(|closing| !closing.wait(CLOSE_TIMEOUT)) {
        tracing::warn!("bdev {bdev} is closed, but its server has not let go of it yet");
    }
}

/// Has those that are new now closed in time, also where no call comes that would do it.
pub fn watch(app: &Arc<App>) {
    if app.guest_disks.watched.swap(true, Ordering::Relaxed) {
        return;
    }
    let weak = Arc::downgrade(app);
    let work = move || {
        loop {
            thread::sleep(NEW);
            let Some(app) = weak.upgrade() else { return };
            app.close_unused_guest_disks();
            if let Err(e) = app.commit() {
                tracing::error!("guests' disks that were closed are not recorded as such: {e}");
            }
            if !app.guest_disks.go_on_watching() {
                return;
            }
        }
    };
    if let Err(e) = thread::Builder::new().name("guest disks".into()).spawn(work) {
        app.guest_disks.watched.store(false, Ordering::Relaxed);
        tracing::warn!("guests' disks that nobody uses are closed with the next call: {e}");
    }
}

impl App {
    /// Refuses to make a guest's disk that is being made again since the target's start; has one that is there
    /// stay for whoever asks for it. What an earlier attempt left of an image that waits, or that somebody else has
    /// had since, goes before one is opened for a VM that is `incoming`.
    ///
    /// # Errors
    /// It is being opened again; it was fenced, and somebody uses it.
    pub fn ask_for_guest_disk(&self, name: &str, incoming: bool) -> Result<(), Error> {
        if self.restoring().contains(&state::bdev_key(name)) {
            let why =
                format!("bdev {name} is being opened again since the target's start: try again");
            return Err(Error::os(Errno::Busy, why));
        }
        let is_fenced = || self.registry.get_as::<Disk>(name).is_some_and(|disk| disk.is_fenced());
        if (incoming || is_fenced()) && self.close_awaiting_guest_disk(name).is_some() {
            limits::forget(self, name);
        }
        if is_fenced() {
            let why = format!(
                "bdev {name} was fenced by its cluster, and somebody has it still: detach it from all guests, \
                 then try again"
            );
            return Err(Error::os(Errno::Busy, why));
        }
        self.guest_disks.renew(name);
        Ok(())
    }

    /// Forgets those that could not be restored yet, and that nobody waits for any more.
    fn forget_unused_guest_disks(&self) {
        let config = self.config();
        let name = |item: &Item| item.call.params.get("name")?.as_str().map(str::to_owned);
        let waits = |item: &Item| {
            item.call.params.get("guest_disk") == Some(&Value::Bool(true))
                && name(item).is_some_and(|name| self.registry.get(&name).is_none())
        };
        let is_wanted = |name: &str| config.items().any(|item| bdev_of(item) == Some(name));
        let waiting = config.items().filter(|item| waits(item)).filter_map(name);
        let unused: Vec<_> = waiting.filter(|name| !is_wanted(name)).collect();
        drop(config);
        for bdev in unused {
            // One that is being restored at this moment goes at the end of a later call.
            _ = self.remove_bdev(&bdev);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn several_write_to_one_only_where_each_shares_it() {
        let disk = |name: &str, writes, shared| Unlocked {
            name: name.to_owned(),
            on: "LUN 1".to_owned(),
            writes,
            shared,
        };
        let this = disk("a", true, false);
        assert!(this.check_free([]).is_ok());
        assert!(this.check_free([disk("a", true, false), disk("b", false, false)]).is_ok());
        let why = this.check_free([disk("b", true, true)]).unwrap_err();
        assert!(why.message.contains("LUN 1 is written to as bdev b by"), "{}", why.message);
        assert!(disk("a", true, true).check_free([disk("b", true, true)]).is_ok());
        assert!(disk("a", false, false).check_free([disk("b", true, false)]).is_ok());
    }

    #[test]
    fn one_is_kept_until_it_was_used_or_is_not_new_any_more() {
        let disks = GuestDisks::default();
        disks.add("new");
        disks.add("used");
        disks.add_used("used");
        let now = Instant::now();
        assert_eq!(disks.settled(now), ["used"]);
        assert_eq!(disks.settled(now + NEW), ["new", "used"]);
        assert!(disks.renew("used") && !disks.renew("other"));
        assert_eq!(disks.settled(now), Vec::<String>::new());
        assert!(disks.go_on_watching());
        disks.add_used("new");
        disks.add_used("used");
        assert!(!disks.go_on_watching());
        disks.remove("used");
        assert!(disks.has("new") && !disks.has("used"));
    }
}
