//! The log's level. There is one output, so its level and SPDK's "print level" are the same.

use crate::app::App;
use crate::logging::Level;
use rpc::{Error, Flags, Methods, NoParams};
use schemars::JsonSchema;
use serde::Deserialize;
use std::sync::Arc;

#[derive(Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
struct SetLevel {
    /// Least severity that is logged.
    level: Level,
}

/// Adds the methods.
pub fn add(methods: &mut Methods, app: &Arc<App>) {
    for (set, get) in
        [("log_set_level", "log_get_level"), ("log_set_print_level", "log_get_print_level")]
    {
        let a = app.clone();
        methods.add(
            set,
            "Set the least severity that is logged. Log level and print level are one.",
            Flags::ALWAYS,
            move |p: SetLevel| a.log.set(p.level).map(|()| true).map_err(Error::internal),
        );
        let a = app.clone();
        methods.add(
            get,
            "Get the least severity that is logged. Log level and print level are one.",
            Flags::ALWAYS,
            move |_: NoParams| Ok(a.log.level()),
        );
    }
}
