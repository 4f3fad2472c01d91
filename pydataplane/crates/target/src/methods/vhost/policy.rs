//! The words for what becomes of requests whose I/O fails: libvirt's.

use ::vhost_scsi::WaitFor;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

/// Of writes and flushes.
#[derive(Clone, Copy, Default, Deserialize, Serialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
#[schemars(inline)]
pub(super) enum WritePolicy {
    #[default]
    Report,
    Enospc,
    Stop,
}

/// Of reads.
#[derive(Clone, Copy, Default, Deserialize, Serialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
#[schemars(inline)]
pub(super) enum ReadPolicy {
    #[default]
    Report,
    Stop,
}

impl From<WritePolicy> for WaitFor {
    fn from(policy: WritePolicy) -> Self {
        match policy {
            WritePolicy::Report => WaitFor::Nothing,
            WritePolicy::Enospc => WaitFor::Room,
            WritePolicy::Stop => WaitFor::Repair,
        }
    }
}

impl From<ReadPolicy> for WaitFor {
    fn from(policy: ReadPolicy) -> Self {
        match policy {
            ReadPolicy::Report => WaitFor::Nothing,
            ReadPolicy::Stop => WaitFor::Repair,
        }
    }
}

/// The word for it.
pub(super) fn word(wait_for: WaitFor) -> &'static str {
    match wait_for {
        WaitFor::Nothing => "report",
        WaitFor::Room => "enospc",
        WaitFor::Repair => "stop",
    }
}
