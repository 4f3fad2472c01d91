//! Notifications: what happened to bdevs, for clients that poll.

use crate::app::App;
use crate::notices::TYPES;
use rpc::{Flags, Methods, NoParams};
use schemars::JsonSchema;
use serde::Deserialize;
use std::sync::Arc;

#[derive(Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
struct GetNotifications {
    /// Number of the first notification to return. Default: 0, the oldest kept
    #[serde(default)]
    id: Option<u64>,
    /// Most notifications to return. Default: no limit
    #[serde(default)]
    max: Option<u64>,
}

/// Adds the methods.
pub fn add(methods: &mut Methods, app: &Arc<App>) {
    methods.add(
        "notify_get_types",
        "Get the types of notifications.",
        Flags::READ,
        |_: NoParams| Ok(TYPES.to_vec()),
    );
    let a = app.clone();
    methods.add(
        "notify_get_notifications",
        "Get notifications from a number on. The last 1024 are kept.",
        Flags::READ,
        move |p: GetNotifications| {
            Ok(a.notices.since(p.id.unwrap_or(0), p.max.unwrap_or(u64::MAX)))
        },
    );
}
