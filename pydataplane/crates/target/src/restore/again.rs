//! What was taken apart is put together again within one process: an upgrade has failed late.

use super::{
    bring_back_appeared, clusters, is_on_server, restore, restore_disk, restore_later,
    start_controllers,
};
use crate::app::App;
use crate::methods::nvme::{self as controller, is_nvme};
use crate::methods::pool::is_pool;
use crate::methods::rbd::is_cluster;
use crate::state::Item;
use bdev::Bdev;
use rpc::Methods;
use serde_json::Value;
use std::sync::Arc;
use std::thread;

/// Brings back, within one process, what is recorded and was taken apart; what is there is left alone,
/// but for lvstores, which are loaded where they are not.
pub fn again(app: &Arc<App>, methods: &Arc<Methods>) {
    let items: Vec<_> = app.config().items().cloned().collect();
    clusters(app, &items);
    for item in items.iter().filter(|item| !is_cluster(item) && !is_pool(item)) {
        let name = item.call.params.get("name").and_then(Value::as_str);
        let disks = name.map_or_else(Vec::new, |name| controller::disks(&app.registry, name));
        if is_nvme(item) && !disks.is_empty() {
            let names = disks.iter().map(|disk| disk.name());
            // A volume is not looked at.
            let looked_at = names.filter(|name| !app.pools.open().contains(*name));
            looked_at.for_each(|name| _ = app.examine(name));
            continue;
        }
        let bdev = name.filter(|_| item.key.starts_with("bdev "));
        match bdev.filter(|name| app.registry.get(name).is_some()) {
            // A guest's disk, or a volume, is not looked at.
            Some(name) if app.guest_disks.has(name) || app.pools.open().contains(name) => (),
            Some(name) => _ = app.examine(name),
            None if is_on_server(item) => restore_again(app, methods, item),
            None => _ = restore(app, methods, item),
        }
    }
    start_controllers(app, methods);
}

/// Restores a bdev on a server within one process. One whose server is not there now brings back what depends on it
/// when it is.
fn restore_again(app: &Arc<App>, methods: &Arc<Methods>, item: &Item) {
    app.restoring().insert(item.key.clone());
    if !restore_disk(app, item, None) {
        return;
    }
    let (for_thread, methods, item) = (app.clone(), methods.clone(), item.clone());
    let key = item.key.clone();
    let work = move || {
        if restore_later(&for_thread, &item) {
            bring_back_appeared(&for_thread, &methods);
        }
    };
    if let Err(e) = thread::Builder::new().name("restore".into()).spawn(work) {
        tracing::error!("no thread to restore {key}: {e}");
    }
}
