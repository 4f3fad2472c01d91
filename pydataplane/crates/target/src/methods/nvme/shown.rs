//! What is shown of controllers and their paths.

use super::{controllers, disks};
use crate::app::App;
use crate::methods::of_kind;
use bdev::Bdev;
use nvme::{Controller, Disk, Options};
use rpc::Error;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

#[derive(Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub(super) struct OneOrAll {
    /// Name of one. Default: all
    #[serde(default)]
    name: Option<String>,
}

/// Where a controller is.
#[derive(Serialize, JsonSchema)]
struct Trid {
    trtype: &'static str,
    adrfam: &'static str,
    traddr: String,
    trsvcid: String,
    subnqn: String,
}

#[derive(Serialize, JsonSchema)]
struct Host {
    nqn: String,
    addr: String,
    svcid: String,
}

/// A path.
#[derive(Serialize, JsonSchema)]
struct PathOfController {
    /// "enabled", or "failed": there is no connection.
    state: &'static str,
    trid: Trid,
    cntlid: u16,
    host: Host,
    /// Why there is no connection (ours).
    #[serde(skip_serializing_if = "Option::is_none")]
    problem: Option<String>,
}

#[derive(Serialize, JsonSchema)]
pub(super) struct ControllerInfo {
    name: String,
    ctrlrs: Vec<PathOfController>,
}

#[derive(Serialize, JsonSchema)]
struct Transport {
    trtype: &'static str,
    traddr: String,
    trsvcid: String,
    adrfam: &'static str,
}

#[derive(Serialize, JsonSchema)]
struct IoPath {
    bdev_name: String,
    cntlid: u16,
    /// I/O goes there.
    current: bool,
    connected: bool,
    /// The namespace can be used there.
    accessible: bool,
    transport: Transport,
}

#[derive(Serialize, JsonSchema)]
struct PollGroup {
    /// Name of the controller's thread.
    thread: String,
    io_paths: Vec<IoPath>,
}

#[derive(Serialize, JsonSchema)]
pub(super) struct IoPaths {
    poll_groups: Vec<PollGroup>,
}

pub(super) fn get_controllers(app: &App, p: &OneOrAll) -> Result<Vec<ControllerInfo>, Error> {
    let found = controllers(app, p.name.as_deref())?;
    let info = |controller: Controller| {
        let Options { subnqn, hostnqn, .. } = controller.options();
        let paths = controller.paths().into_iter().map(|path| PathOfController {
            state: if path.connected { "enabled" } else { "failed" },
            trid: Trid {
                trtype: "TCP",
                adrfam: path.address.adrfam(),
                traddr: path.address.traddr(),
                trsvcid: path.address.trsvcid(),
                subnqn: subnqn.clone(),
            },
            cntlid: path.cntlid,
            host: Host { nqn: hostnqn.clone(), addr: String::new(), svcid: String::new() },
            problem: path.problem,
        });
        ControllerInfo { name: controller.name().to_owned(), ctrlrs: paths.collect() }
    };
    Ok(found.into_iter().map(info).collect())
}

pub(super) fn get_io_paths(app: &App, p: &OneOrAll) -> Result<IoPaths, Error> {
    if let Some(name) = &p.name {
        of_kind(app, name, Disk::PRODUCT)?;
    }
    let mut poll_groups = Vec::new();
    for controller in controllers(app, None)? {
        let mut io_paths = Vec::new();
        for disk in disks(&app.registry, controller.name()) {
            if p.name.as_ref().is_some_and(|name| name != disk.name()) {
                continue;
            }
            io_paths.extend(controller.paths().into_iter().map(|path| IoPath {
                bdev_name: disk.name().to_owned(),
                cntlid: path.cntlid,
                current: path.current[disk.index()],
                connected: path.connected,
                accessible: path.access[disk.index()].is_some_and(|access| access.is_usable()),
                transport: Transport {
                    trtype: "TCP",
                    traddr: path.address.traddr(),
                    trsvcid: path.address.trsvcid(),
                    adrfam: path.address.adrfam(),
                },
            }));
        }
        if !io_paths.is_empty() {
            poll_groups.push(PollGroup { thread: format!("nvme {}", controller.name()), io_paths });
        }
    }
    Ok(IoPaths { poll_groups })
}
