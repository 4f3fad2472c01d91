//! Brings back what was configured.

use crate::app::App;
use crate::state::{self, Call, ConfigFile, Item, Subsystem};
use rpc::Methods;
use serde_json::{Value, json};
use std::collections::BTreeSet;
use std::fs;
use std::path::Path;

/// Restores what the state directory records: bdevs (and with each the lvstore on it), then
/// controllers, not started until they have their targets. What fails is logged, kept, and shown
/// by `virtlun_get_status`; the rest goes on.
pub fn recorded(app: &App, methods: &Methods) {
    let items: Vec<_> = app.config().items().cloned().collect();
    let (mut restored, mut failed) = (0, 0);
    for item in &items {
        match restore(app, methods, item) {
            true => restored += 1,
            false => failed += 1,
        }
    }
    for item in items.iter().filter(|i| i.subsystem == Subsystem::VhostScsi) {
        if item.call.method == "vhost_create_scsi_controller" {
            start_controller(app, methods, item.call.params.get("ctrlr"));
        }
    }
    if restored + failed > 0 {
        tracing::info!(restored, failed, "configuration restored");
    }
}

/// Restores one item; what fails is logged and noted.
fn restore(app: &App, methods: &Methods, item: &Item) -> bool {
    let mut params = Value::Object(item.call.params.clone());
    if item.call.method == "vhost_create_scsi_controller" {
        params["delay"] = json!(true);
    }
    let restored = methods.call(&item.call.method, params);
    if let Err(e) = &restored {
        tracing::error!("{} could not be restored: {e}", item.key);
        app.config().set_problem(&item.key, e.message.clone());
    }
    restored.is_ok()
}

/// Restores what could not be at the start because its bdev was not there, and is now: exports,
/// then targets, of which a connected guest is told.
pub fn of_bdevs(app: &App, methods: &Methods, appeared: &BTreeSet<String>) {
    let waits = |item: &Item| {
        let bdev = item.call.params.get("bdev_name").and_then(Value::as_str);
        item.problem.is_some() && bdev.is_some_and(|name| appeared.contains(name))
    };
    let items: Vec<_> = app.config().items().filter(|item| waits(item)).cloned().collect();
    for item in items {
        if restore(app, methods, &item) {
            tracing::info!("{} restored: its bdev is there now", item.key);
        }
    }
}

/// Whether what a call makes is configured already. A target whose number is to be chosen is the one
/// of that controller with that bdev.
fn is_there(app: &App, call: &Call) -> bool {
    let text = |call: &Call, name: &str| Some(call.params.get(name)?.as_str()?.to_owned());
    let chosen = call.params.get("scsi_target_num").and_then(Value::as_i64) == Some(-1);
    if call.method != "vhost_scsi_controller_add_target" || !chosen {
        let (_, key) = state::identify(call);
        return app.config().get(&key).is_some();
    }
    let (ctrlr, bdev) = (text(call, "ctrlr"), text(call, "bdev_name"));
    let bdev = bdev.map(|name| app.registry.get(&name).map_or(name, |b| b.name().to_owned()));
    let same = |item: &Item| {
        item.call.method == call.method
            && text(&item.call, "ctrlr") == ctrlr
            && text(&item.call, "bdev_name") == bdev
    };
    app.config().items().any(same)
}

fn start_controller(app: &App, methods: &Methods, ctrlr: Option<&Value>) {
    let Some(ctrlr) = ctrlr.and_then(Value::as_str) else { return };
    let key = state::controller_key(ctrlr);
    if app.config().get(&key).is_none_or(|item| item.problem.is_some()) {
        return;
    }
    if let Err(e) = methods.call("vhost_start_scsi_controller", json!({"ctrlr": ctrlr})) {
        tracing::error!("{key} could not be started: {e}");
        app.config().set_problem(&key, e.message);
    }
}

/// Applies a file of `spdk-rpc save_config`. What the state directory brought back already is
/// skipped; the first call that fails ends it, with a sentence.
pub fn file(app: &App, methods: &Methods, path: &Path) -> Result<(), String> {
    let shown = path.display();
    let text = fs::read_to_string(path).map_err(|e| format!("cannot read {shown}: {e}"))?;
    let calls =
        ConfigFile::parse(&text).map_err(|e| format!("{shown} is no configuration: {e}"))?;
    for call in calls {
        if is_there(app, &call) {
            continue;
        }
        let Call { method, params } = call;
        methods
            .call(&method, Value::Object(params))
            .map_err(|e| format!("{shown}: {method} failed: {e}"))?;
    }
    app.commit().map_err(|e| e.message)
}
