//! Who a controller belongs to: named by callers, recorded when a process connects.

use crate::app::App;
use crate::errors;
use crate::state::{self, Call, Config, Subsystem};
use ::vhost_scsi::{NamedOwner, OwnerInfo, OwnerJournal};
use parking_lot::Mutex;
use peer::{Identity, Process};
use rpc::{Errno, Error, Flags, Methods};
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use serde_json::{Value, json};
use std::io;
use std::sync::Arc;

/// The method that is recorded.
const SET_OWNER: &str = "virtlun_controller_set_owner";

#[derive(Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
struct SetOwner {
    /// Name of the controller.
    ctrlr: String,
    /// Number of the user whose processes may be the first to connect, beside root's. Default: any
    /// user that may open the socket
    #[serde(default)]
    uid: Option<u32>,
    /// Only a process that starts after this call may be the first: for a VM that is about to start.
    /// Default: false
    #[serde(default)]
    fresh: Option<bool>,
    /// Number of the process that it belongs to, in the target's PID namespace. Default: nobody yet,
    /// so that it will belong to the first that connects
    #[serde(default)]
    pid: Option<u32>,
    /// The process as it was recorded, instead of pid. One that has ended is nobody.
    #[serde(default)]
    process: Option<RecordedProcess>,
    /// When a process must have started to be the first, as start_time of a process: recorded where
    /// fresh was given.
    #[serde(default)]
    not_before: Option<u64>,
    /// The boot of the host that process and not_before are of; of another one they mean nothing.
    /// Default: the present one
    #[serde(default)]
    boot_id: Option<String>,
}

/// A process, told from all others of a boot of the host.
#[derive(Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
struct RecordedProcess {
    /// Its number; 0 in another PID namespace.
    pid: u32,
    /// Number of its user.
    uid: u32,
    /// When it started, in hundredths of a second since the boot; 0 where that is not visible.
    start_time: u64,
    /// Inode number of its pidfd; 0 where the kernel gives none that is good for ever.
    inode: u64,
}

impl From<&Identity> for RecordedProcess {
    fn from(i: &Identity) -> Self {
        RecordedProcess { pid: i.pid, uid: i.uid, start_time: i.start_time, inode: i.inode }
    }
}

/// The process that a controller belongs to.
#[derive(Serialize, JsonSchema)]
pub(super) struct OwnerProcess {
    /// Its number; 0 in another PID namespace.
    pid: u32,
    /// Number of its user.
    uid: u32,
    /// When it started, in hundredths of a second since the host's boot; 0 where that is not visible.
    start_time: u64,
    /// Name of its command; empty where that is not visible.
    command: String,
}

impl OwnerProcess {
    /// Of a controller that belongs to one.
    pub(super) fn of(info: OwnerInfo) -> Option<OwnerProcess> {
        let process = info.process?;
        let (pid, uid, start_time) = (process.pid, process.uid, process.start_time);
        Some(OwnerProcess { pid, uid, start_time, command: info.command })
    }
}

fn set_owner(app: &App, p: SetOwner) -> Result<bool, Error> {
    let boot_id = peer::boot_id();
    let now = p.boot_id.as_deref().is_none_or(|id| id == boot_id);
    let process = match (p.pid, p.process) {
        (Some(_), Some(_)) => {
            return Err(Error::os(Errno::Inval, "pid and process are both given; give one"));
        }
        (Some(pid), None) => Some(Process::of_pid(pid).map_err(|why| {
            Error::os(Errno::NoEnt, format_args!("process {pid} cannot be named: {why}"))
        })?),
        (None, Some(r)) if now => Process::find(&Identity {
            uid: r.uid,
            pid: r.pid,
            start_time: r.start_time,
            inode: r.inode,
            boot_id: boot_id.to_owned(),
        }),
        (None, _) => None,
    };
    let not_before = match p.fresh {
        Some(true) => peer::now(),
        _ => p.not_before.filter(|_| now).unwrap_or(0),
    };
    let recorded = json!({
        "ctrlr": p.ctrlr,
        "uid": p.uid,
        "not_before": (not_before != 0).then_some(not_before),
        "process": process.as_ref().map(|process| RecordedProcess::from(process.identity())),
        "boot_id": boot_id,
    });
    let named = NamedOwner { uid: p.uid, not_before, process };
    app.controllers.set_owner(&p.ctrlr, named).map_err(errors::controller)?;
    app.config().record(SET_OWNER, &recorded);
    Ok(true)
}

/// Names the user whose processes may be the first, of a controller that was made just now.
pub(super) fn name_user(app: &App, ctrlr: &str, uid: Option<u32>) -> Result<(), Error> {
    let named = NamedOwner { uid, ..NamedOwner::default() };
    app.controllers.set_owner(ctrlr, named).map_err(errors::controller)?;
    let recorded = json!({"ctrlr": ctrlr, "uid": uid, "boot_id": peer::boot_id()});
    app.config().record(SET_OWNER, &recorded);
    Ok(())
}

/// The configuration as the place where owners are recorded.
pub struct Journal(pub Arc<Mutex<Config>>);

impl OwnerJournal for Journal {
    fn record(&self, name: &str, owner: &Identity) -> io::Result<()> {
        let mut config = self.0.lock();
        let key = state::owner_key(name);
        let mut params = config.get(&key).map(|item| item.call.params.clone()).unwrap_or_default();
        if params.get("boot_id").and_then(Value::as_str) != Some(&owner.boot_id) {
            params.remove("not_before");
        }
        params.insert("ctrlr".into(), json!(name));
        params.insert("process".into(), json!(RecordedProcess::from(owner)));
        params.insert("boot_id".into(), json!(owner.boot_id));
        config.put(Subsystem::VhostScsi, key, Call { method: SET_OWNER.into(), params });
        config.save_owners().map_err(io::Error::other)
    }
}

/// Adds the method.
pub fn add(methods: &mut Methods, app: &Arc<App>) {
    let a = app.clone();
    methods
        .add(
            SET_OWNER,
            "Say who a controller belongs to. Another process that is connected is disconnected. \
             Without this, it belongs to the first process that connects, until that has ended.",
            Flags::WRITE,
            move |p: SetOwner| set_owner(&a, p),
        )
        .errors(&[Errno::NoDev, Errno::NoEnt, Errno::Inval]);
}
