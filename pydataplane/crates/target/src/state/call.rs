//! Calls as `spdk-rpc save_config` writes them, and whose they are.

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};

/// Who a configured thing belongs to.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum Subsystem {
    /// Block devices.
    Bdev,
    /// Devices of the kernel's ublk driver.
    Ublk,
    /// SCSI: nothing of its own to configure.
    Scsi,
    /// vhost-user-blk controllers.
    VhostBlk,
    /// vhost-user-scsi controllers and their targets, and whom controllers belong to.
    VhostScsi,
}

impl Subsystem {
    /// All, in the order in which they are initialised.
    pub const ALL: [Subsystem; 5] = [
        Subsystem::Bdev,
        Subsystem::Ublk,
        Subsystem::Scsi,
        Subsystem::VhostBlk,
        Subsystem::VhostScsi,
    ];

    /// SPDK's name.
    pub fn name(self) -> &'static str {
        match self {
            Subsystem::Bdev => "bdev",
            Subsystem::Ublk => "ublk",
            Subsystem::Scsi => "scsi",
            Subsystem::VhostBlk => "vhost_blk",
            Subsystem::VhostScsi => "vhost_scsi",
        }
    }

    /// The subsystem of that name.
    pub fn named(name: &str) -> Option<Subsystem> {
        Subsystem::ALL.into_iter().find(|s| s.name() == name)
    }

    /// What is initialised before it.
    pub fn depends_on(self) -> &'static [Subsystem] {
        match self {
            Subsystem::Bdev => &[],
            Subsystem::Ublk | Subsystem::Scsi | Subsystem::VhostBlk => &[Subsystem::Bdev],
            Subsystem::VhostScsi => &[Subsystem::Scsi],
        }
    }
}

/// A method call as it stands in the file.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
pub struct Call {
    /// Name of the method.
    pub method: String,
    /// Its parameters.
    #[serde(default)]
    pub params: Map<String, Value>,
}

/// Calls of a batch are made one after the other.
#[derive(Deserialize, JsonSchema)]
#[serde(untagged)]
enum CallOrBatch {
    Call(Call),
    Batch(Vec<Call>),
}

/// One subsystem in the file.
#[derive(Deserialize, JsonSchema)]
pub struct SubsystemFile {
    /// Its name.
    #[allow(dead_code, reason = "each call says itself what it makes")]
    subsystem: String,
    /// Its calls; null where it has nothing to configure.
    config: Option<Vec<CallOrBatch>>,
}

/// The file: what `spdk-rpc save_config` writes and `--config` reads.
#[derive(Deserialize, JsonSchema)]
pub struct ConfigFile {
    /// In the order of initialisation.
    subsystems: Vec<SubsystemFile>,
}

impl ConfigFile {
    /// The calls, in order, batches taken apart.
    pub fn parse(text: &str) -> Result<Vec<Call>, serde_json::Error> {
        serde_json::from_str(text).map(|ConfigFile { subsystems }| calls(subsystems))
    }
}

/// The calls of a file, in order, batches taken apart.
pub(super) fn calls(subsystems: Vec<SubsystemFile>) -> Vec<Call> {
    let entries = subsystems.into_iter().flat_map(|s| s.config.unwrap_or_default());
    let calls = entries.flat_map(|entry| match entry {
        CallOrBatch::Call(call) => vec![call],
        CallOrBatch::Batch(calls) => calls,
    });
    calls.collect()
}
