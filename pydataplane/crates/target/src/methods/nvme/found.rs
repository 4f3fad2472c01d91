//! Namespaces that come to a controller that is attached: each becomes a bdev.

use super::{expected, is_nvme};
use crate::app::App;
use crate::state::bdev_key;
use bdev::Bdev;
use nvme::Disk;
use parking_lot::{Mutex, RwLock};
use serde_json::json;
use std::sync::mpsc::{Receiver, Sender, channel};
use std::sync::{Arc, Weak};
use std::thread;

/// The namespaces that controllers have found and that are no bdevs yet.
pub struct Found {
    sender: Sender<Arc<Disk>>,
    /// Until somebody takes them.
    receiver: Mutex<Option<Receiver<Arc<Disk>>>>,
    /// Read by those who attach a controller, until it is recorded.
    pub attaching: RwLock<()>,
}

impl Default for Found {
    fn default() -> Found {
        let (sender, receiver) = channel();
        Found { sender, receiver: Mutex::new(Some(receiver)), attaching: RwLock::default() }
    }
}

impl Found {
    /// Where a controller puts them.
    pub fn sender(&self) -> Sender<Arc<Disk>> {
        self.sender.clone()
    }
}

/// Has a thread make bdevs of those that are found from now on.
pub fn watch(app: &Arc<App>) {
    let Some(receiver) = app.namespaces.receiver.lock().take() else { return };
    let weak = Arc::downgrade(app);
    let work = move || receiver.iter().for_each(|disk| add(&weak, disk));
    if let Err(e) = thread::Builder::new().name("namespaces".into()).spawn(work) {
        tracing::error!("namespaces that come to NVMe controllers become no bdevs: {e}");
    }
}

fn add(app: &Weak<App>, disk: Arc<Disk>) {
    let Some(app) = app.upgrade() else { return };
    let controller = disk.controller().clone();
    let (name, key) = (disk.name().to_owned(), bdev_key(controller.name()));
    // Whoever attaches it has recorded it then.
    drop(app.namespaces.attaching.write());
    let is_known = || app.config().get(&key).is_some_and(is_nvme);
    if !is_known() {
        return;
    }
    if let Err(e) = app.add_bdev(disk) {
        return tracing::error!(bdev = name, "a namespace that has come is no bdev: {e}");
    }
    let work = || {
        if !is_known() {
            // It was detached meanwhile.
            _ = app.registry.unregister(&name);
            return;
        }
        app.config().set_param(&key, "namespaces", json!(expected(&controller)));
        if controller.missing().is_empty() {
            app.config().clear_problem(&key);
        }
        app.note_appeared(&name);
        app.restore_appeared();
        if let Err(e) = app.commit() {
            tracing::error!("{e}");
        }
    };
    match app.methods() {
        Some(methods) => methods.exclusively(work),
        None => work(),
    }
}
