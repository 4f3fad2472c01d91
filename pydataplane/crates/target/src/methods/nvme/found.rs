//! Namespaces that come to a controller that is attached: each becomes a bdev.

use super::{disks, is_nvme, make_bdev, note_missing, record_namespaces};
use crate::app::App;
use crate::state::bdev_key;
use bdev::Bdev;
use parking_lot::{Condvar, Mutex};
use std::collections::{BTreeMap, BTreeSet};
use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender, channel};
use std::sync::{Arc, Weak};
use std::thread;
use std::time::Duration;

/// How long after an attempt to make a bdev, whose name was taken or whose controller was being attached, the next one
/// is made.
const AGAIN: Duration = Duration::from_secs(2);

/// Controllers that have found namespaces, and those that somebody changes.
pub struct Found {
    sender: Sender<String>,
    /// Until somebody takes it.
    receiver: Mutex<Option<Receiver<String>>>,
    busy: Mutex<BTreeSet<String>>,
    free: Condvar,
}

impl Default for Found {
    fn default() -> Found {
        let (sender, receiver) = channel();
        let receiver = Mutex::new(Some(receiver));
        Found { sender, receiver, busy: Mutex::default(), free: Condvar::new() }
    }
}

impl Found {
    /// Where a controller tells its name when it has found a namespace.
    pub fn sender(&self) -> Sender<String> {
        self.sender.clone()
    }

    /// The namespaces of the controller of that name that are no bdevs are to become some.
    pub fn look(&self, name: &str) {
        _ = self.sender.send(name.to_owned());
    }

    /// Waits until nobody attaches or detaches the controller of that name, or makes bdevs of its namespaces; nobody
    /// does so before the turn is dropped. Whoever has it must not wait for the methods' lock.
    pub fn turn(&self, name: &str) -> Turn<'_> {
        let mut busy = self.busy.lock();
        while !busy.insert(name.to_owned()) {
            self.free.wait(&mut busy);
        }
        Turn { of: self, name: name.to_owned() }
    }

    /// As [`Found::turn`], without waiting.
    pub fn try_turn(&self, name: &str) -> Option<Turn<'_>> {
        let is_free = self.busy.lock().insert(name.to_owned());
        is_free.then(|| Turn { of: self, name: name.to_owned() })
    }
}

/// See [`Found::turn`].
pub struct Turn<'a> {
    of: &'a Found,
    name: String,
}

impl Drop for Turn<'_> {
    fn drop(&mut self) {
        self.of.busy.lock().remove(&self.name);
        self.of.free.notify_all();
    }
}

/// Has a thread make bdevs of those that are found from now on.
pub fn watch(app: &Arc<App>) {
    let Some(receiver) = app.namespaces.receiver.lock().take() else { return };
    let weak = Arc::downgrade(app);
    let work = move || add_all(&weak, &receiver);
    if let Err(e) = thread::Builder::new().name("namespaces".into()).spawn(work) {
        tracing::error!("namespaces that come to NVMe controllers become no bdevs: {e}");
    }
}

/// By controller of which namespaces are no bdevs yet: by bdev, why that could not be made, as it was logged.
type Left = BTreeMap<String, BTreeMap<String, String>>;

/// Until there is no `app` any more. One that is busy, or whose bdev cannot be made, keeps no other waiting.
fn add_all(app: &Weak<App>, found: &Receiver<String>) {
    let mut left = Left::new();
    loop {
        let told = match left.is_empty() {
            true => found.recv().map_err(|_| RecvTimeoutError::Disconnected),
            false => found.recv_timeout(AGAIN),
        };
        match told {
            Ok(name) => _ = left.entry(name).or_default(),
            Err(RecvTimeoutError::Timeout) => {}
            Err(RecvTimeoutError::Disconnected) => return,
        }
        let Some(app) = app.upgrade() else { return };
        left.retain(|name, failed| !add(&app, name, failed));
    }
}

/// Makes bdevs of the namespaces of a controller that are none; whether all of them are now.
fn add(app: &App, name: &str, failed: &mut BTreeMap<String, String>) -> bool {
    let Some(turn) = app.namespaces.try_turn(name) else { return false };
    let made = disks(&app.registry, name);
    let is_recorded = app.config().get(&bdev_key(name)).is_some_and(is_nvme);
    // It may have been detached meanwhile.
    let (Some(first), true) = (made.first(), is_recorded) else { return true };
    let is_made = |index| made.iter().any(|disk| disk.index() == index);
    let (mut added, mut is_whole) = (Vec::new(), true);
    for disk in first.controller().disks() {
        if is_made(disk.index()) {
            continue;
        }
        let bdev = disk.name().to_owned();
        match make_bdev(app, disk, None) {
            Ok(()) => added.push(bdev),
            Err(e) => {
                is_whole = false;
                if failed.get(&bdev) != Some(&e.message) {
                    tracing::error!(bdev, "a namespace is no bdev: {e}");
                    failed.insert(bdev, e.message);
                }
            }
        }
    }
    if !added.is_empty() {
        record_namespaces(app, first.controller());
    }
    note_missing(app, name);
    drop((made, turn));
    if added.is_empty() {
        return is_whole;
    }
    let work = || {
        added.iter().for_each(|bdev| app.note_appeared(bdev));
        app.restore_appeared();
        if let Err(e) = app.commit() {
            tracing::error!("{e}");
        }
    };
    match app.methods() {
        Some(methods) => methods.exclusively(work),
        None => work(),
    }
    is_whole
}
