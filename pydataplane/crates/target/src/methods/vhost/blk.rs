//! vhost-user-blk controllers: one disk each.

use super::policy::{ReadPolicy, WritePolicy};
use super::{OWN_SOCKET, cpus_of, make_folder, own_folder, recorded};
use crate::app::App;
use crate::errors;
use crate::methods::lvol::OF_POOLS;
use crate::methods::{UuidText, owner};
use crate::moves;
use crate::state::{self, Call};
use ::vhost_scsi::{ControllerOptions, ErrorPolicy, TargetOptions};
use rpc::{Errno, Error, Flags, Methods};
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use serde_json::Value;
use std::fs;
use std::path::{Path, PathBuf};
use std::sync::Arc;

/// The method.
pub const CREATE: &str = "vhost_create_blk_controller";

/// The only transport.
const TRANSPORT: &str = "vhost_user_blk";

#[derive(Deserialize, Serialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub(super) struct Create {
    /// Name of the controller, and of its socket in the folder of sockets.
    ctrlr: String,
    /// Bdev to show as its disk: name, alias or UUID.
    dev_name: String,
    /// CPUs of the reactors that serve it, as 0x3 or [0,1]. Default: all reactors
    #[serde(default)]
    cpumask: Option<String>,
    /// Refuse writes. Default: false
    #[serde(default)]
    readonly: Option<bool>,
    /// How it is reached: vhost_user_blk, the only one. Default: that
    #[serde(default, skip_serializing)]
    transport: Option<String>,
    /// Offer the packed ring. Not supported but for false. Default: false
    #[serde(default, skip_serializing)]
    packed_ring: Option<bool>,
    /// Recover a packed ring after a crash. Not supported but for false. Default: false
    #[serde(default, skip_serializing)]
    packed_ring_recovery: Option<bool>,
    /// Serial number that the guest sees, of which it reads 20 characters (ours). Default: the bdev's
    /// UUID
    #[serde(default, skip_serializing_if = "Option::is_none")]
    serial: Option<String>,
    /// UUID as which the guest sees the disk: its serial, where none was chosen (ours). Default: what
    /// the xattr virtlun.identity of a volume says, or the bdev's
    #[serde(default, skip_serializing_if = "Option::is_none")]
    uuid: Option<UuidText>,
    /// Let other controllers show the same bdev if they ask for it too (ours). Default: false
    #[serde(default, skip_serializing_if = "Option::is_none")]
    shareable: Option<bool>,
    /// Bytes of a logical block that the guest sees, 512 or 4096, and no less than the bdev's (ours).
    /// Default: the bdev's
    #[serde(default, skip_serializing_if = "Option::is_none")]
    block_size: Option<u32>,
    /// Bytes of a physical block that the guest sees, a power of two, no less than a logical one and 2097152 at
    /// most (ours). Default: the bdev's
    #[serde(default, skip_serializing_if = "Option::is_none")]
    physical_block_size: Option<u32>,
    /// The VM comes from another host, which has the volume until the VM runs here: an image of Ceph is
    /// locked for this target only then (ours). Default: false
    #[serde(default, skip_serializing, rename = "incoming")]
    _incoming: Option<bool>,
    /// Let the guest discard blocks, where the bdev takes that (ours). Default: true
    #[serde(default, skip_serializing_if = "Option::is_none")]
    discard: Option<bool>,
    /// What becomes of a write whose I/O fails, as of vhost_scsi_controller_add_target: report, enospc or
    /// stop (ours). Default: report
    #[serde(default, skip_serializing_if = "Option::is_none")]
    write_error_policy: Option<WritePolicy>,
    /// The same of a read: report or stop (ours). Default: report
    #[serde(default, skip_serializing_if = "Option::is_none")]
    read_error_policy: Option<ReadPolicy>,
    /// Let VMs that connect wait until vhost_start_scsi_controller (ours). Default: false
    #[serde(default)]
    delay: Option<bool>,
    /// As own_folder of vhost_create_scsi_controller (ours). Default: false
    #[serde(default, skip_serializing_if = "Option::is_none")]
    own_folder: Option<bool>,
    /// Where its socket is in the folder of sockets: NAME, or NAME in a folder of there, FOLDER/NAME, as in that
    /// of another controller's own (ours). Default: the controller's name
    #[serde(default, skip_serializing_if = "Option::is_none")]
    socket: Option<String>,
    /// As socket_gid of vhost_create_scsi_controller (ours). Default: as the target's options say
    #[serde(default, skip_serializing_if = "Option::is_none")]
    socket_gid: Option<u32>,
    /// As owner_uid of vhost_create_scsi_controller (ours). Default: any user that may open the socket
    #[serde(default, skip_serializing)]
    owner_uid: Option<u32>,
}

impl Create {
    fn check(&self) -> Result<(), Error> {
        let packed = self.packed_ring == Some(true) || self.packed_ring_recovery == Some(true);
        if packed {
            return Err(Error::os(
                Errno::NotSup,
                "packed_ring is not supported: leave it out, and drivers use the split ring, which all \
                 of them have",
            ));
        }
        match self.transport.as_deref() {
            None | Some(TRANSPORT) => Ok(()),
            Some(other) => Err(Error::os(
                Errno::NotSup,
                format_args!(
                    "transport {other:?} is not supported: leave it out, or give {TRANSPORT}"
                ),
            )),
        }
    }
}

/// Where its socket is to be, in a folder of its own or where `socket` says; `None`: under its name.
fn socket_of(app: &App, p: &Create) -> Result<Option<PathBuf>, Error> {
    let Some(below) = &p.socket else {
        let folder = own_folder(app, &p.ctrlr).filter(|_| p.own_folder == Some(true));
        return Ok(folder.map(|folder| folder.join(OWN_SOCKET)));
    };
    let mut parts = below.split('/');
    let named = parts.all(|part| !matches!(part, "" | "." | "..") && !part.contains('\0'));
    if !named || below.split('/').count() > 2 || p.own_folder == Some(true) {
        return Err(Error::os(
            Errno::Inval,
            format_args!(
                "socket {below:?} is not NAME or FOLDER/NAME, or own_folder is set as well: give one of both"
            ),
        ));
    }
    Ok(Some(app.paths.vhost_dir.join(below)))
}

/// How it is made.
fn options(app: &App, p: &Create) -> Result<ControllerOptions, Error> {
    let cpus = cpus_of(app, &p.ctrlr, p.cpumask.as_deref())?;
    Ok(ControllerOptions {
        cpus,
        // Until it is recorded, and with it whose it is.
        delay: true,
        socket: socket_of(app, p)?,
        socket_gid: p.socket_gid,
        ..ControllerOptions::default()
    })
}

/// Makes the folder that a socket has, if it is not that of all; returns it if it was not there.
fn folder_of(app: &App, options: &ControllerOptions) -> Result<Option<PathBuf>, Error> {
    let folder = options.socket.as_deref().and_then(Path::parent);
    let Some(folder) = folder.filter(|folder| *folder != app.paths.vhost_dir) else {
        return Ok(None);
    };
    // One that was there may be mounted elsewhere.
    let made = (!folder.exists()).then(|| folder.to_owned());
    make_folder(folder)?;
    Ok(made)
}

/// Makes the controller of a recorded call, not started and still without its disk.
///
/// # Errors
/// As of the method.
pub fn expect(app: &App, call: &Call) -> Result<(), Error> {
    let params = Value::Object(call.params.clone());
    let p: Create = serde_json::from_value(params).map_err(|e| Error::os(Errno::Inval, e))?;
    let options = options(app, &p)?;
    folder_of(app, &options)?;
    app.controllers.expect_blk(&p.ctrlr, options).map_err(errors::controller)
}

fn create(app: &App, mut p: Create) -> Result<bool, Error> {
    p.check()?;
    let bdev = app.bdev(&p.dev_name)?;
    let key = state::controller_key(&p.ctrlr);
    // One that is restored is as it was recorded, also while a pool does not answer. Of one that is shown
    // the controllers say so.
    let is_hidden = app.controllers.unit(&p.ctrlr, 0).is_err();
    let is_recorded = match is_hidden {
        true => recorded::is(app, &key, "dev_name", &*bdev)?,
        false => app.config().get(&key).is_some(),
    };
    if !is_recorded {
        let identity = moves::identity(app, bdev.name())?.map(UuidText);
        p.uuid = p.uuid.or(identity);
    } else if is_hidden {
        moves::restored(app, &p.ctrlr, bdev.name())?;
    }
    let options = options(app, &p)?;
    let made = folder_of(app, &options)?;
    let mut disk = TargetOptions {
        serial: p.serial.clone(),
        read_only: p.readonly.unwrap_or(false),
        shareable: p.shareable.unwrap_or(false),
        block_size: p.block_size,
        error_policy: ErrorPolicy {
            write: p.write_error_policy.unwrap_or_default().into(),
            read: p.read_error_policy.unwrap_or_default().into(),
        },
        ..TargetOptions::default()
    };
    disk.characteristics.physical_block_size = p.physical_block_size;
    disk.characteristics.no_unmap = p.discard == Some(false);
    disk.characteristics.uuid = p.uuid.as_ref().map(|uuid| uuid.0);
    if let Err(e) = app.controllers.create_blk(&p.ctrlr, options, bdev.name(), disk) {
        _ = made.map(fs::remove_dir);
        return Err(errors::controller(e));
    }
    // Whether it was delayed is of this run only: a restart delays all until they are complete.
    let delay = p.delay.take();
    // An alias can change; the name stays.
    p.dev_name = bdev.name().to_owned();
    app.config().record(CREATE, &p);
    if let Err(why) = begin(app, &p, delay) {
        // It is whole, or not there.
        _ = super::delete(app, &super::Delete { ctrlr: p.ctrlr, force: Some(true) });
        return Err(why);
    }
    Ok(true)
}

/// What follows when it is recorded: whose it is, and that VMs may connect.
fn begin(app: &App, p: &Create, delay: Option<bool>) -> Result<(), Error> {
    if p.owner_uid.is_some() {
        owner::name_user(app, &p.ctrlr, p.owner_uid)?;
    }
    if delay != Some(true) {
        app.controllers.start(&p.ctrlr).map_err(errors::controller)?;
    }
    Ok(())
}

/// Adds the method.
pub(super) fn add(methods: &mut Methods, app: &Arc<App>) {
    let a = app.clone();
    methods
        .add(
            CREATE,
            "Create a controller whose guest sees one virtio-blk disk, and that listens on its socket.",
            Flags::WRITE,
            move |p: Create| create(&a, p),
        )
        .errors(&[
            Errno::NoDev,
            Errno::NoKey,
            Errno::Exist,
            Errno::Inval,
            Errno::Busy,
            Errno::NameTooLong,
            Errno::NotSup,
            Errno::Io,
        ])
        .errors(OF_POOLS);
}
