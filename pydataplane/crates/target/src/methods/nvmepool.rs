//! NVMe subsystems whose namespaces are volumes, beside those of lvstores.

use super::arraypool::{self, Adding};
use super::nvme::{Attach, PathParams, own_nqn};
use super::pool::{self, Name};
use crate::app::App;
use crate::array::Array;
use rpc::{Errno, Error, Flags, Methods};
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use std::sync::Arc;

/// The method that adds such a pool.
pub const CREATE: &str = "virtlun_nvme_pool_create";

/// See [`CREATE`].
#[derive(Deserialize, Serialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct Create {
    /// Name, which the names of its volumes begin with.
    name: String,
    /// Where the subsystem is: its paths, eight at most. I/O goes by the first one that is optimized (ANA), else not
    /// optimized.
    paths: Vec<PathParams>,
    /// Name of the subsystem (NQN).
    subnqn: String,
    /// Name of this host (NQN). Default: one made of its machine-id, which is recorded
    #[serde(default)]
    hostnqn: Option<String>,
    /// Headers have a digest, CRC32C. Default: false
    #[serde(default, skip_serializing_if = "Option::is_none")]
    hdgst: Option<bool>,
    /// Data has a digest, CRC32C; what is sent is copied for it. Default: false
    #[serde(default, skip_serializing_if = "Option::is_none")]
    ddgst: Option<bool>,
    /// Queues for I/O of each path, 8 at most. Default: 1
    #[serde(default, skip_serializing_if = "Option::is_none")]
    num_io_queues: Option<u32>,
}

impl Adding for Create {
    const METHOD: &'static str = CREATE;

    fn name(&self) -> &str {
        &self.name
    }

    fn array(&self, app: &App) -> Result<Array, Error> {
        let wrong = |why: String| Error::os(Errno::Inval, format!("pool {}: {why}", self.name));
        let Some((first, others)) = self.paths.split_first() else {
            return Err(wrong("it has no path".to_owned()));
        };
        if others.len() >= nvme::PATHS_MAX {
            return Err(wrong(format!("it has {} paths at most", nvme::PATHS_MAX)));
        }
        let attach = Attach {
            name: self.name.clone(),
            trtype: "tcp".to_owned(),
            traddr: first.traddr.clone(),
            trsvcid: first.trsvcid.clone(),
            subnqn: Some(self.subnqn.clone()),
            hostnqn: self.hostnqn.clone(),
            hdgst: self.hdgst,
            ddgst: self.ddgst,
            num_io_queues: self.num_io_queues,
            paths: others.to_vec(),
            ..Attach::default()
        };
        let of_pool = |mut e: Error| {
            e.message = e.message.replacen("controller ", "pool ", 1);
            e
        };
        attach.check(app).map_err(of_pool)?;
        let paths = attach.addresses().map_err(of_pool)?;
        if let Some(twice) = paths.iter().enumerate().find(|(at, path)| paths[..*at].contains(path))
        {
            return Err(wrong(format!("it has the path {} twice", twice.1)));
        }
        Ok(Array::Nvme { options: Box::new(attach.options(app)), paths })
    }
}

fn create(app: &App, mut p: Create) -> Result<String, Error> {
    p.hostnqn.get_or_insert_with(own_nqn);
    arraypool::create(app, &p)
}

/// Adds the methods.
pub fn add(methods: &mut Methods, app: &Arc<App>) {
    let a = app.clone();
    methods
        .add(
            CREATE,
            "Have the namespaces of an NVMe subsystem over TCP as volumes POOL/uuid.UUID, or POOL/eui. and their NGUID \
             or EUI-64, which the methods on lvols list and those that use bdevs open; return the pool's UUID, the \
             same on every host. Needs the option --network.",
            Flags::LONG_WRITE,
            move |p: Create| create(&a, p),
        )
        .errors(&[Errno::Exist, Errno::Inval, Errno::Io, Errno::NotSup, Errno::TimedOut]);
    let a = app.clone();
    methods
        .add(
            "virtlun_nvme_pool_delete",
            "Have the namespaces of an NVMe subsystem as volumes no more; refused while one is in use. The namespaces \
             stay.",
            Flags::LONG_WRITE,
            move |p: Name| pool::delete(&a, &p.name, "nvme"),
        )
        .errors(&[Errno::NoDev, Errno::Busy]);
}
