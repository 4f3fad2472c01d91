//! What holds for all controllers that are attached from then on.

use super::SET_OPTIONS;
use crate::app::App;
use crate::state::NVME_OPTIONS_KEY;
use rpc::{Errno, Error};
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use serde_json::Value;
use std::time::Duration;

/// Most seconds of any of the options: a day.
const SECONDS_MAX: i64 = 86_400;
/// Defaults: milliseconds of keep-alive and of a connection, seconds without an answer until I/O fails, between two
/// attempts to connect, and until a path is connected anew.
pub(super) const KEEP_ALIVE_MS: u64 = 10_000;
pub(super) const CONNECT_MS: u64 = 4000;
pub(super) const LOSS_S: i64 = 60;
pub(super) const RECONNECT_S: i64 = 1;
const TIMEOUT_US: u64 = 30_000_000;
#[derive(Default, Deserialize, Serialize, JsonSchema)]
#[serde(deny_unknown_fields)]
#[expect(dead_code, reason = "some are taken and have no effect")]
pub(super) struct SetOptions {
    /// Milliseconds within which a controller has to hear of this host, or it ends all that it carries out for it. Default:
    /// 10000
    #[serde(default)]
    pub keep_alive_timeout_ms: Option<u64>,
    /// Microseconds without an answer to a command after which a path is connected anew; 0: without end. Default:
    /// 30000000
    #[serde(default)]
    pub timeout_us: Option<u64>,
    /// What is done then: "none" is as a timeout_us of 0, "reset" what there is. Default: reset
    #[serde(default)]
    pub action_on_timeout: Option<String>,
    /// Milliseconds that a controller may take to be connected to. Default: 4000
    #[serde(default)]
    pub tcp_connect_timeout_ms: Option<u64>,
    /// See bdev_nvme_attach_controller.
    #[serde(default)]
    pub ctrlr_loss_timeout_sec: Option<i64>,
    /// See bdev_nvme_attach_controller.
    #[serde(default)]
    pub reconnect_delay_sec: Option<i64>,
    /// See bdev_nvme_attach_controller.
    #[serde(default)]
    pub fast_io_fail_timeout_sec: Option<i64>,
    /// Without effect: what a guest flushes is flushed.
    #[serde(default, skip_serializing)]
    pub enable_flush: Option<bool>,
    /// Without effect.
    #[serde(default, skip_serializing)]
    pub timeout_admin_us: Option<u64>,
    /// Without effect.
    #[serde(default, skip_serializing)]
    pub arbitration_burst: Option<u32>,
    /// Without effect.
    #[serde(default, skip_serializing)]
    pub low_priority_weight: Option<u32>,
    /// Without effect.
    #[serde(default, skip_serializing)]
    pub medium_priority_weight: Option<u32>,
    /// Without effect.
    #[serde(default, skip_serializing)]
    pub high_priority_weight: Option<u32>,
    /// Without effect: nothing is polled.
    #[serde(default, skip_serializing)]
    pub nvme_adminq_poll_period_us: Option<u64>,
    /// Without effect: nothing is polled.
    #[serde(default, skip_serializing)]
    pub nvme_ioq_poll_period_us: Option<u64>,
    /// Without effect.
    #[serde(default, skip_serializing)]
    pub io_queue_requests: Option<u32>,
    /// Without effect.
    #[serde(default, skip_serializing)]
    pub delay_cmd_submit: Option<bool>,
    /// Without effect.
    #[serde(default, skip_serializing)]
    pub transport_retry_count: Option<u32>,
    /// Without effect.
    #[serde(default, skip_serializing)]
    pub bdev_retry_count: Option<i32>,
    /// Without effect.
    #[serde(default, skip_serializing)]
    pub transport_ack_timeout: Option<u32>,
    /// Without effect: I/O goes back to a better path at once.
    #[serde(default, skip_serializing)]
    pub disable_auto_failback: Option<bool>,
    /// Without effect: a namespace without UUID has one made of what identifies it.
    #[serde(default, skip_serializing)]
    pub generate_uuids: Option<bool>,
    /// Without effect.
    #[serde(default, skip_serializing)]
    pub transport_tos: Option<u32>,
    /// Without effect.
    #[serde(default, skip_serializing)]
    pub nvme_error_stat: Option<bool>,
    /// Without effect.
    #[serde(default, skip_serializing)]
    pub rdma_srq_size: Option<u32>,
    /// Without effect.
    #[serde(default, skip_serializing)]
    pub io_path_stat: Option<bool>,
    /// Without effect.
    #[serde(default, skip_serializing)]
    pub allow_accel_sequence: Option<bool>,
    /// Without effect.
    #[serde(default, skip_serializing)]
    pub rdma_max_cq_size: Option<u32>,
    /// Without effect.
    #[serde(default, skip_serializing)]
    pub rdma_cm_event_timeout_ms: Option<u32>,
    /// Without effect.
    #[serde(default, skip_serializing)]
    pub rdma_umr_per_io: Option<bool>,
    /// Without effect.
    #[serde(default, skip_serializing)]
    pub dhchap_digests: Option<Vec<String>>,
    /// Without effect.
    #[serde(default, skip_serializing)]
    pub dhchap_dhgroups: Option<Vec<String>>,
    /// Without effect.
    #[serde(default, skip_serializing)]
    pub multipath_opts: Option<Value>,
}

/// What [`SET_OPTIONS`] has set.
pub(super) fn options(app: &App) -> SetOptions {
    let config = app.config();
    let item = config.get(NVME_OPTIONS_KEY);
    let params = item.map(|item| Value::Object(item.call.params.clone()));
    params.and_then(|params| SetOptions::deserialize(params).ok()).unwrap_or_default()
}

impl SetOptions {
    pub fn check(&self) -> Result<(), Error> {
        let bad = |why: String| Err(Error::os(Errno::Inval, why));
        if self.keep_alive_timeout_ms.is_some_and(|ms| !(100..=3_600_000).contains(&ms)) {
            return bad(
                "keep_alive_timeout_ms is 100 to 3600000: without it nobody knows when a controller that is lost \
                 has ended what it had to do"
                    .to_owned(),
            );
        }
        if self.tcp_connect_timeout_ms.is_some_and(|ms| ms > 60_000) {
            return bad("tcp_connect_timeout_ms is 0 to 60000".to_owned());
        }
        if let Some(action) = &self.action_on_timeout
            && !["none", "reset"].contains(&action.as_str())
        {
            return bad(format!("action_on_timeout is none or reset, not {action}"));
        }
        let given = [
            ("ctrlr_loss_timeout_sec", self.ctrlr_loss_timeout_sec, -1),
            ("reconnect_delay_sec", self.reconnect_delay_sec, 0),
            ("fast_io_fail_timeout_sec", self.fast_io_fail_timeout_sec, 0),
        ];
        for (what, given, least) in given {
            if given.is_some_and(|seconds| !(least..=SECONDS_MAX).contains(&seconds)) {
                return bad(format!("{what} is {least} to {SECONDS_MAX}"));
            }
        }
        Ok(())
    }

    pub fn timeout(&self) -> Option<Duration> {
        let us = match self.action_on_timeout.as_deref() {
            Some("none") => 0,
            _ => self.timeout_us.unwrap_or(TIMEOUT_US),
        };
        Some(us).filter(|us| *us != 0).map(Duration::from_micros)
    }
}

/// The method.
pub(super) fn set_options(app: &App, p: &SetOptions) -> Result<bool, Error> {
    p.check()?;
    let mut config = app.config();
    // What is not given stays as it was, as SPDK's client takes it.
    let before = config.get(NVME_OPTIONS_KEY).map(|item| item.call.params.clone());
    let mut all = before.unwrap_or_default();
    if let Ok(Value::Object(given)) = serde_json::to_value(p) {
        all.extend(given.into_iter().filter(|(_, value)| !value.is_null()));
    }
    config.record(SET_OPTIONS, &all);
    Ok(true)
}
