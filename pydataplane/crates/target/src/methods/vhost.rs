//! vhost-user-scsi controllers and their targets; vhost-user-blk controllers are in `blk`.

use super::UuidText;
use super::lvol::OF_POOLS;
use crate::app::App;
use crate::cpumask::CpuMask;
use crate::errors;
use crate::moves;
use crate::state;
use ::vhost_scsi::{
    Characteristics, ControllerError, ControllerOptions, ErrorPolicy, Front, TargetOptions,
};
use rpc::{Errno, Error, Flags, Methods, NoParams};
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;

pub mod blk;
mod policy;
mod recorded;
mod shown;

use policy::{ReadPolicy, WritePolicy};
use shown::{Controller, Stats, Suspended};

#[derive(Deserialize, Serialize, JsonSchema)]
#[serde(deny_unknown_fields)]
struct Create {
    /// Name of the controller, and of its socket in the folder of sockets.
    ctrlr: String,
    /// CPUs of the reactors that serve it, as 0x3 or [0,1]. Default: all reactors
    #[serde(default)]
    cpumask: Option<String>,
    /// Let VMs that connect wait until vhost_start_scsi_controller. Default: false
    #[serde(default)]
    delay: Option<bool>,
    /// Put its socket, named vhost.sock, into a folder of its own that is named as the controller
    /// and stays when the target restarts, to be mounted elsewhere (ours). Default: false
    #[serde(default, skip_serializing_if = "Option::is_none")]
    own_folder: Option<bool>,
    /// Number of the group that may connect, besides the target's user: the socket gets this group
    /// and mode 0660 (ours). Default: as the target's options say
    #[serde(default, skip_serializing_if = "Option::is_none")]
    socket_gid: Option<u32>,
    /// Number of the user whose processes may be the first to connect, beside root's (ours): as uid
    /// of virtlun_controller_set_owner. Default: any user that may open the socket
    #[serde(default, skip_serializing)]
    owner_uid: Option<u32>,
}

#[derive(Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
struct Ctrlr {
    /// Name of the controller.
    ctrlr: String,
}

#[derive(Deserialize, Serialize, JsonSchema)]
#[serde(deny_unknown_fields)]
struct AddTarget {
    /// Name of the controller.
    ctrlr: String,
    /// Number of the target, 0 to 254, or -1 for the lowest that is free.
    scsi_target_num: i32,
    /// Bdev to show as its LUN 0: name, alias or UUID.
    bdev_name: String,
    /// Unit serial number that the guest sees (ours). Default: the bdev's UUID
    #[serde(default)]
    serial: Option<String>,
    /// Refuse writes (ours). Default: false
    #[serde(default)]
    read_only: Option<bool>,
    /// Let other controllers show the same bdev if they ask for it too (ours). Default: false
    #[serde(default)]
    shareable: Option<bool>,
    /// Show a removable disk: the guest says with PREVENT ALLOW MEDIUM REMOVAL while it uses it (ours).
    /// Default: false
    #[serde(default)]
    removable: Option<bool>,
    /// Bytes of a logical block that the guest sees, 512 or 4096, and no less than the bdev's (ours).
    /// Default: the bdev's
    #[serde(default)]
    block_size: Option<u32>,
    /// The VM comes from another host, which has the volume until the VM runs here: an image of Ceph is
    /// locked for this target only then (ours). Default: false
    #[serde(default, skip_serializing, rename = "incoming")]
    _incoming: Option<bool>,
    /// UUID as which the guest sees the disk: what follows of it where it was not chosen, serial and wwn
    /// among them (ours). Default: what the xattr virtlun.identity of a volume says, or the bdev's
    #[serde(default, skip_serializing_if = "Option::is_none")]
    uuid: Option<UuidText>,
    /// World wide name that the guest sees, 16 hexadecimal digits, the first 2, 3 or 5 (ours).
    /// Default: one made of the bdev's UUID
    #[serde(default, skip_serializing_if = "Option::is_none")]
    wwn: Option<String>,
    /// Vendor that the guest sees, up to 8 printable ASCII characters (ours). Default: VIRTLUN
    #[serde(default, skip_serializing_if = "Option::is_none")]
    vendor: Option<String>,
    /// Product that the guest sees, up to 16 printable ASCII characters (ours). Default: the bdev's
    #[serde(default, skip_serializing_if = "Option::is_none")]
    product: Option<String>,
    /// Turns a minute that the guest sees, 1025 to 65534, or 1 for a disk that does not rotate (ours).
    /// Default: 1
    #[serde(default, skip_serializing_if = "Option::is_none")]
    rotation_rate: Option<u16>,
    /// Bytes of a physical block that the guest sees, a power of two, no less than a logical one and 2097152 at
    /// most (ours). Default: the bdev's
    #[serde(default, skip_serializing_if = "Option::is_none")]
    physical_block_size: Option<u32>,
    /// Let the guest discard blocks, where the bdev takes that (ours). Default: true
    #[serde(default, skip_serializing_if = "Option::is_none")]
    discard: Option<bool>,
    /// Show a volatile cache, where the bdev has one: a completed write needs a flush. Without, each is
    /// durable before it is completed (ours). Default: true
    #[serde(default, skip_serializing_if = "Option::is_none")]
    write_cache: Option<bool>,
    /// What becomes of a write whose I/O fails: report tells the guest; enospc has it wait where there is no
    /// room, stop for whatever can be mended (virtlun_vhost_get_suspended). That a flush failed is always
    /// told, as what it was to make durable may be lost (ours). Default: report
    #[serde(default, skip_serializing_if = "Option::is_none")]
    write_error_policy: Option<WritePolicy>,
    /// The same of a read: report or stop (ours). Default: report
    #[serde(default, skip_serializing_if = "Option::is_none")]
    read_error_policy: Option<ReadPolicy>,
}

#[derive(Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
struct RemoveTarget {
    /// Name of the controller.
    ctrlr: String,
    /// Number of the target.
    scsi_target_num: u32,
    /// Refuse while the guest prevents the removal of a removable disk, which it has in use (ours).
    /// Default: false
    #[serde(default)]
    unless_prevented: Option<bool>,
}

#[derive(Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
struct Delete {
    /// Name of the controller.
    ctrlr: String,
    /// Delete it although a VM is connected, which then loses its disks (ours). Default: false
    #[serde(default)]
    force: Option<bool>,
}

#[derive(Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
struct Coalescing {
    /// Name of the controller.
    ctrlr: String,
    /// Microseconds that an interrupt is held back for at twice the threshold; more at a higher rate, 1 ms at
    /// most, and only while more of the queue is in flight. 0: none is
    delay_base_us: u32,
    /// I/Os per second of a queue from which on its interrupts are held back, more than 0
    iops_threshold: u32,
    /// As of a controller for which nothing was set: by what is in flight and what becomes of it, whatever
    /// the other two say (ours). Default: false
    #[serde(default, skip_serializing_if = "Option::is_none")]
    adaptive: Option<bool>,
}

#[derive(Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
struct OfController {
    /// Name of one controller. Default: all
    #[serde(default)]
    name: Option<String>,
}

#[derive(Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
struct StatsOf {
    /// Name of one controller. Default: all
    #[serde(default)]
    name: Option<String>,
    /// Number of one target. Default: all
    #[serde(default)]
    scsi_target_num: Option<u8>,
}

#[derive(Serialize, JsonSchema)]
struct ScsiDevice {
    id: usize,
    device_name: String,
}

#[derive(Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
struct Resume {
    /// Name of the controller.
    ctrlr: String,
    /// Number of the target. Default: all of the controller
    #[serde(default)]
    scsi_target_num: Option<u8>,
}

const SET_COALESCING: &str = "vhost_controller_set_coalescing";
/// The socket of a controller with a folder of its own.
const OWN_SOCKET: &str = "vhost.sock";

/// The folder of a controller's own, if its name can be one; else it is refused anyway.
fn own_folder(app: &App, ctrlr: &str) -> Option<PathBuf> {
    let plain = Path::new(ctrlr).file_name() == Some(ctrlr.as_ref());
    plain.then(|| app.paths.vhost_dir.join(ctrlr))
}

/// Makes a controller's folder, which other users may enter: the socket has rights of its own.
fn make_folder(folder: &Path) -> Result<(), Error> {
    fs::create_dir_all(folder)
        .and_then(|()| fs::set_permissions(folder, fs::Permissions::from_mode(0o755)))
        .map_err(|why| {
            Error::os(Errno::Io, format!("folder {} cannot be made: {why}", folder.display()))
        })
}

/// CPUs of the reactors that are to serve a controller; `None`: all do. One that is recorded may name CPUs
/// that have no reactor, as the target was started with others since: its VM is not to lose its disks.
fn cpus_of(app: &App, ctrlr: &str, mask: Option<&str>) -> Result<Option<Vec<usize>>, Error> {
    let mask = mask.map(str::parse::<CpuMask>).transpose();
    let mask = mask.map_err(|e| Error::os(Errno::Inval, e))?;
    let Some(mask) = mask else { return Ok(None) };
    let is_recorded = app.config().get(&state::controller_key(ctrlr)).is_some();
    if is_recorded && !app.controllers.have_reactor(mask.cpus()) {
        tracing::warn!("no reactor is on a CPU of controller {ctrlr}, {mask}: all serve it");
        return Ok(None);
    }
    Ok(Some(mask.cpus().to_vec()))
}

fn create(app: &App, mut p: Create) -> Result<bool, Error> {
    let cpus = cpus_of(app, &p.ctrlr, p.cpumask.as_deref())?;
    let folder = own_folder(app, &p.ctrlr).filter(|_| p.own_folder == Some(true));
    // One that was there may be mounted elsewhere.
    let made = folder.clone().filter(|folder| !folder.exists());
    if let Some(folder) = &folder {
        make_folder(folder)?;
    }
    let options = ControllerOptions {
        cpus,
        // Until it is recorded, and with it whose it is.
        delay: true,
        socket: folder.map(|folder| folder.join(OWN_SOCKET)),
        socket_gid: p.socket_gid,
        ..ControllerOptions::default()
    };
    if let Err(e) = app.controllers.create(&p.ctrlr, options) {
        _ = made.map(fs::remove_dir);
        return Err(errors::controller(e));
    }
    // Whether it was delayed is of this run only: a restart delays all until they are complete.
    let delay = p.delay.take();
    app.config().record("vhost_create_scsi_controller", &p);
    if p.owner_uid.is_some() {
        super::owner::name_user(app, &p.ctrlr, p.owner_uid)?;
    }
    if delay != Some(true) {
        app.controllers.start(&p.ctrlr).map_err(errors::controller)?;
    }
    Ok(true)
}

/// What the disk is to say of itself.
fn characteristics(p: &AddTarget) -> Result<Characteristics, Error> {
    let wwn = p.wwn.as_deref().map(|text| {
        let digits = text.len() == 16 && text.bytes().all(|b| b.is_ascii_hexdigit());
        let number = digits.then(|| u64::from_str_radix(text, 16).ok()).flatten();
        number.ok_or_else(|| {
            Error::os(Errno::Inval, format!("wwn {text:?} is not 16 hexadecimal digits"))
        })
    });
    Ok(Characteristics {
        uuid: p.uuid.map(|uuid| uuid.0),
        wwn: wwn.transpose()?,
        vendor: p.vendor.clone(),
        product: p.product.clone(),
        rotation_rate: p.rotation_rate,
        physical_block_size: p.physical_block_size,
        no_unmap: p.discard == Some(false),
        write_through: p.write_cache == Some(false),
    })
}

fn add_target(app: &App, mut p: AddTarget) -> Result<u8, Error> {
    let bdev = app.bdev(&p.bdev_name)?;
    let wanted = recorded::number(app, &p.ctrlr, i64::from(p.scsi_target_num))?;
    // One that is restored is as it was recorded, also while a pool does not answer. Of one that is shown
    // the controller says so.
    let place = u8::try_from(wanted).ok();
    let hidden = place.filter(|&number| app.controllers.unit(&p.ctrlr, number).is_err());
    let key = state::target_key(&p.ctrlr, u64::try_from(wanted).unwrap_or(u64::MAX));
    let is_recorded = match hidden {
        Some(_) => recorded::is(app, &key, "bdev_name", &*bdev)?,
        None => app.config().get(&key).is_some(),
    };
    if !is_recorded {
        let identity = moves::identity(app, bdev.name())?.map(UuidText);
        p.uuid = p.uuid.or(identity);
    } else if hidden.is_some() {
        moves::restored(app, &p.ctrlr, bdev.name())?;
    }
    let options = TargetOptions {
        serial: p.serial.clone(),
        read_only: p.read_only.unwrap_or(false),
        shareable: p.shareable.unwrap_or(false),
        removable: p.removable.unwrap_or(false),
        block_size: p.block_size,
        characteristics: characteristics(&p)?,
        error_policy: ErrorPolicy {
            write: p.write_error_policy.unwrap_or_default().into(),
            read: p.read_error_policy.unwrap_or_default().into(),
        },
    };
    let added = app.controllers.add_target(&p.ctrlr, wanted, bdev.name(), options);
    let number = added.map_err(errors::controller)?;
    p.scsi_target_num = i32::from(number);
    // An alias can change; the name stays.
    p.bdev_name = bdev.name().to_owned();
    app.config().record("vhost_scsi_controller_add_target", &p);
    Ok(number)
}

/// Whether an error says that there is no such controller, or target.
fn is_gone(error: &ControllerError) -> bool {
    matches!(error, ControllerError::NotFound(_) | ControllerError::NoTarget { .. })
}

fn remove_target(app: &App, p: &RemoveTarget) -> Result<bool, Error> {
    let key = state::target_key(&p.ctrlr, u64::from(p.scsi_target_num));
    let number = i64::from(p.scsi_target_num);
    let removed = match p.unless_prevented {
        Some(true) => app.controllers.remove_target_unless_prevented(&p.ctrlr, number),
        _ => app.controllers.remove_target(&p.ctrlr, number),
    };
    let lingers = matches!(removed, Err(ControllerError::StillBusy { .. }));
    let is_gone = removed.as_ref().is_err_and(is_gone);
    // What lingers goes when its I/O ends, and does not come back.
    let goes = removed.is_ok() || lingers;
    // What is no number of a target has no copy; without a number all of the controller would be meant.
    if let (true, Ok(number)) = (goes || is_gone, u8::try_from(p.scsi_target_num)) {
        app.copies.forget(&p.ctrlr, Some(number));
    }
    // One that could not be restored, or ended with its bdev, is just forgotten.
    let forgotten =
        app.config().forget(|item| item.key == key && (goes || is_gone || item.problem.is_some()));
    match removed {
        Err(e) if lingers || !forgotten => Err(errors::controller(e)),
        _ => Ok(true),
    }
}

fn delete(app: &App, p: &Delete) -> Result<bool, Error> {
    let key = state::controller_key(&p.ctrlr);
    let deleted = app.controllers.delete(&p.ctrlr, p.force.unwrap_or(false));
    // It is gone but for the I/O, and does not come back.
    let lingers = matches!(deleted, Err(ControllerError::StillEnding { .. }));
    let is_gone = deleted.as_ref().is_err_and(is_gone);
    if deleted.is_err()
        && !lingers
        && app.config().get(&key).is_none_or(|item| item.problem.is_none() && !is_gone)
    {
        return deleted.map(|()| true).map_err(errors::controller);
    }
    app.copies.forget(&p.ctrlr, None);
    app.config().forget(|item| {
        item.call.params.get("ctrlr").and_then(|v| v.as_str()) == Some(p.ctrlr.as_str())
    });
    // Only an empty folder is removed, and a socket that is none is left alone.
    _ = own_folder(app, &p.ctrlr).map(fs::remove_dir);
    match deleted {
        Err(e) if lingers => Err(errors::controller(e)),
        _ => Ok(true),
    }
}

fn set_coalescing(app: &App, p: &Coalescing) -> Result<bool, Error> {
    if p.iops_threshold == 0 {
        return Err(Error::os(Errno::Inval, "iops_threshold is 0; it must be more"));
    }
    let to = match p.adaptive {
        Some(true) => ::vhost_scsi::Coalescing::Adaptive,
        _ => ::vhost_scsi::Coalescing::Fixed {
            delay_base_us: p.delay_base_us,
            iops_threshold: p.iops_threshold,
        },
    };
    app.controllers.set_coalescing(&p.ctrlr, to).map_err(errors::controller)?;
    app.config().record(SET_COALESCING, p);
    Ok(true)
}

/// Adds the methods.
pub fn add(methods: &mut Methods, app: &Arc<App>) {
    add_controllers(methods, app);
    blk::add(methods, app);
    add_targets(methods, app);
    add_suspended(methods, app);
    let a = app.clone();
    methods
        .add(
            "virtlun_vhost_get_stats",
            "Get what controllers and their targets did, seen from the guest's rings.",
            Flags::READ,
            move |p: StatsOf| {
                let stats = a
                    .controllers
                    .stats(p.name.as_deref(), p.scsi_target_num)
                    .map_err(errors::controller)?;
                Ok(stats.into_iter().map(Stats::from).collect::<Vec<_>>())
            },
        )
        .errors(&[Errno::NoDev]);
}

fn add_suspended(methods: &mut Methods, app: &Arc<App>) {
    let a = app.clone();
    methods
        .add(
            "virtlun_vhost_get_suspended",
            "Get the targets whose requests wait because an I/O failed, as their error policies have it: \
             until they go on, the VM does after a pause, or it ends.",
            Flags::READ,
            move |p: OfController| {
                let all = a.controllers.suspended(p.name.as_deref()).map_err(errors::controller)?;
                Ok(all.into_iter().map(Suspended::from).collect::<Vec<_>>())
            },
        )
        .errors(&[Errno::NoDev]);
    let a = app.clone();
    methods
        .add(
            "virtlun_vhost_resume",
            "Begin what waits because an I/O failed and return of how many targets. What fails again waits \
             again. While the VM runs that is also done every few seconds.",
            Flags::READ,
            move |p: Resume| {
                a.controllers.resume(&p.ctrlr, p.scsi_target_num).map_err(errors::controller)
            },
        )
        .errors(&[Errno::NoDev, Errno::Busy]);
}

fn add_controllers(methods: &mut Methods, app: &Arc<App>) {
    let a = app.clone();
    methods
        .add(
            "vhost_create_scsi_controller",
            "Create a controller that listens on its socket.",
            Flags::WRITE,
            move |p: Create| create(&a, p),
        )
        .errors(&[Errno::Exist, Errno::Inval, Errno::Busy, Errno::NameTooLong, Errno::Io]);
    let a = app.clone();
    methods
        .add(
            "vhost_start_scsi_controller",
            "Let VMs connect to a controller that was created with delay.",
            Flags::WRITE,
            move |p: Ctrlr| {
                a.controllers.start(&p.ctrlr).map(|()| true).map_err(errors::controller)
            },
        )
        .errors(&[Errno::NoDev]);
    let a = app.clone();
    methods
        .add(
            "vhost_delete_controller",
            "Delete a controller with its targets; refused while a VM is connected.",
            Flags::WRITE,
            move |p: Delete| delete(&a, &p),
        )
        .errors(&[Errno::NoDev, Errno::Busy]);
    let a = app.clone();
    methods
        .add(
            "vhost_get_controllers",
            "Get all controllers with their targets and sessions, or one.",
            Flags::READ,
            move |p: OfController| {
                let found = a.controllers.list(p.name.as_deref()).map_err(errors::controller)?;
                Ok(found.into_iter().map(Controller::from).collect::<Vec<_>>())
            },
        )
        .errors(&[Errno::NoDev]);
    let a = app.clone();
    methods
        .add(
            SET_COALESCING,
            "Control how long a controller's interrupts are held back, so that one tells of several I/Os.",
            Flags::WRITE,
            move |p: Coalescing| set_coalescing(&a, &p),
        )
        .errors(&[Errno::NoDev, Errno::Inval]);
}

fn add_targets(methods: &mut Methods, app: &Arc<App>) {
    let a = app.clone();
    methods
        .add(
            "vhost_scsi_controller_add_target",
            "Show a bdev as a target of a controller and return its number. A connected guest sees \
             the new disk at once.",
            Flags::WRITE,
            move |p: AddTarget| add_target(&a, p),
        )
        .errors(&[
            Errno::NoDev,
            Errno::NoKey,
            Errno::Exist,
            Errno::Busy,
            Errno::NoSpc,
            Errno::Inval,
        ])
        .errors(OF_POOLS);
    let a = app.clone();
    methods
        .add(
            "vhost_scsi_controller_remove_target",
            "Take a target away when its I/O in flight has ended. A connected guest sees the disk go.",
            Flags::WRITE,
            move |p: RemoveTarget| remove_target(&a, &p),
        )
        .errors(&[Errno::NoDev, Errno::Busy]);
    let a = app.clone();
    methods.add(
        "scsi_get_devices",
        "Get all SCSI devices: the targets of all controllers.",
        Flags::READ,
        move |_: NoParams| {
            let all = a.controllers.list(None).map_err(errors::controller)?;
            let scsi = all.into_iter().filter(|c| c.front == Front::Scsi);
            let devices = scsi.flat_map(|c| {
                let name = c.name;
                c.targets.into_iter().map(move |t| format!("{name} Target {}", t.number))
            });
            let numbered = devices.enumerate();
            Ok(numbered.map(|(id, device_name)| ScsiDevice { id, device_name }).collect::<Vec<_>>())
        },
    );
}
