//! What a pivot changes that lasts: what is recorded of the target, and what is noted of a move.

use super::one::Copy;
use crate::app::App;
use crate::moves::{Lasting, Marks, Side, State};
use crate::state;
use bdev::Bdev;
use rpc::Error;
use serde_json::{Value, json};
use std::sync::{Arc, Weak};
use vhost_scsi::TargetOptions;

/// How a target is added that shows itself as `unit` on another bdev.
pub(super) fn options_there(copy: &Copy, unit: &scsi::LunShared, bdev: &dyn Bdev) -> TargetOptions {
    let mut options = copy.options.clone();
    let shown = unit.options();
    options.characteristics.uuid = Some(unit.identity());
    if bdev.product_name() != copy.mirror.source().product_name() {
        options.characteristics.product = shown.characteristics.product;
    }
    if bdev.geometry().block_size != unit.block_size() {
        options.block_size = shown.block_size;
    }
    options.read_only = shown.read_only;
    options
}

/// What a pivot changes that lasts.
pub(super) struct Change {
    app: Weak<App>,
    /// Of a move.
    marks: Option<Arc<Marks>>,
    record: Record,
}

impl Change {
    pub fn new(app: &Arc<App>, marks: Option<Arc<Marks>>, record: Record) -> Change {
        Change { app: Arc::downgrade(app), marks, record }
    }

    fn app(&self) -> Result<Arc<App>, String> {
        self.app.upgrade().ok_or_else(|| "the target ends".to_owned())
    }

    fn mark(&self, f: impl FnOnce(&Marks, &App) -> Result<(), Error>) -> Result<(), String> {
        let Some(marks) = &self.marks else { return Ok(()) };
        let done = f(marks, &*self.app()?);
        done.map_err(|e| format!("that cannot be noted at the volumes: {e}"))
    }
}

impl Lasting for Change {
    fn note(&self, state: State) -> Result<(), String> {
        self.mark(|marks, app| marks.note(app, state))
    }

    fn moved(&self, moved: bool) -> Result<(), String> {
        self.mark(|marks, app| marks.moved(app, moved))
    }

    fn record(&self, side: Side) -> Result<(), String> {
        let app = self.app()?;
        self.record.put(&app, side == Side::New);
        state::save(&app.config).map_err(|e| format!("that cannot be recorded: {e}"))
    }

    fn new_is_gone(&self) -> bool {
        let app = self.app.upgrade();
        self.marks.as_ref().zip(app).is_some_and(|(marks, app)| marks.new_is_gone(&app))
    }
}

/// What is recorded of a target, before a pivot and after it.
pub(super) struct Record {
    key: String,
    /// Names of parameters, that of the bdev first, before and after.
    params: Vec<(&'static str, Value, Value)>,
}

impl Record {
    /// Of a LUN.
    pub fn of_lun(app: &App, key: String, options: &TargetOptions, bdev: &dyn Bdev) -> Record {
        let after = [
            ("bdev_name", json!(bdev.name())),
            ("uuid", json!(options.characteristics.uuid.map(|uuid| uuid.to_string()))),
            ("product", json!(options.characteristics.product)),
            ("block_size", json!(options.block_size)),
            ("read_only", json!(options.read_only.then_some(true))),
        ];
        Record::new(app, key, after)
    }

    /// Of a virtio-blk controller with its disk.
    pub fn of_blk(app: &App, ctrlr: &str, options: &TargetOptions, bdev: &dyn Bdev) -> Record {
        let after = [
            ("dev_name", json!(bdev.name())),
            ("uuid", json!(options.characteristics.uuid.map(|uuid| uuid.to_string()))),
            ("block_size", json!(options.block_size)),
            ("readonly", json!(options.read_only.then_some(true))),
        ];
        Record::new(app, state::controller_key(ctrlr), after)
    }

    /// What has null stays as it is recorded.
    fn new<const N: usize>(app: &App, key: String, after: [(&'static str, Value); N]) -> Record {
        let config = app.config();
        let now = |name: &str| {
            let item = config.get(&key);
            item.and_then(|item| item.call.params.get(name)).cloned().unwrap_or_default()
        };
        let params = after.map(|(name, after)| {
            let before = now(name);
            let after = if after.is_null() { before.clone() } else { after };
            (name, before, after)
        });
        Record { key: key.clone(), params: params.into() }
    }

    fn put(&self, app: &App, pivoted: bool) {
        let mut config = app.config();
        // What is recorded there by now may be another disk, or the same one in a later run of its VM.
        let is_ours = self.params.first().is_some_and(|(name, before, after)| {
            let item = config.get(&self.key);
            let now = item.and_then(|item| item.call.params.get(*name));
            now == Some(if pivoted { before } else { after })
        });
        for (name, before, after) in self.params.iter().filter(|_| is_ours) {
            let value = if pivoted { after } else { before };
            config.set_param(&self.key, name, value.clone());
        }
    }
}
