//! Exports: bdevs as files for the kernel (ours).

use crate::app::App;
use crate::errors;
use crate::moves;
use crate::state::{self, Item};
use ::export::{ExportError, Info, Survives};
use rpc::{Errno, Error, Flags, Methods, NoParams};
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use serde_json::{Value, json};
use std::sync::Arc;
use uuid::Uuid;

#[derive(Deserialize, Serialize, JsonSchema)]
#[serde(deny_unknown_fields)]
struct Create {
    /// Bdev to export: name, alias or UUID.
    bdev_name: String,
    /// Refuse writes. Default: false, or as the bdev is
    #[serde(default)]
    read_only: Option<bool>,
    /// Make it parked, as virtlun_export_park does: for a recorded configuration. One that is
    /// parked stays so either way. Default: false
    #[serde(default)]
    parked: Option<bool>,
    /// Make it a block device of the kernel's (ublk) where that can recover one and the holder may make
    /// it, else a file. One that is there stays what it is. Default: false
    #[serde(default)]
    device: Option<bool>,
    /// Least bytes of a new device's logical block, a power of two from 512 to 4096. Default: as the bdev
    /// has it
    #[serde(default)]
    block_size: Option<u32>,
    /// Of a volume of a pool of Ceph: other hosts may write to it, too, where each asks for it; else it is
    /// locked for this one. Default: false
    #[serde(default)]
    shareable: Option<bool>,
}

#[derive(Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
struct Exported {
    /// Exported bdev: name, alias or UUID.
    bdev_name: String,
}

#[derive(Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
struct Delete {
    /// Exported bdev: name, alias or UUID.
    bdev_name: String,
    /// Delete it although its file is open; what has it open then gets errors. Default: false
    #[serde(default)]
    force: Option<bool>,
}

#[derive(Serialize, JsonSchema)]
struct Created {
    /// The file: for `losetup --direct-io=on`. Or the device, `/dev/ublkbN`.
    path: String,
}

#[derive(Serialize, JsonSchema)]
struct Export {
    /// Name of the bdev.
    bdev_name: String,
    /// UUID of the bdev, the name of the file.
    uuid: String,
    /// The file, or the device `/dev/ublkbN`.
    path: String,
    /// Whether writes are refused.
    read_only: bool,
    /// Whether another face may have the bdev, and writes are refused for now.
    parked: bool,
    /// How often the file is open, by a loop device for instance. Of a device 1 where something has it
    /// alone, as a mount has.
    opens: u32,
    /// Size in bytes, now.
    size: u64,
    /// What becomes of it when the target does not serve it: `crash`: whoever has it open waits for
    /// the next target, also when this one is killed. `restart`: that waits for an orderly restart;
    /// when this target is killed it gets errors (Linux before 6.9). `nothing`: it gets errors.
    survives: &'static str,
    /// Why every flush of it, and so fsync(2) and the like, fails, if so.
    #[serde(skip_serializing_if = "Option::is_none")]
    flush_error: Option<String>,
}

impl Export {
    fn of(app: &App, i: Info) -> Export {
        let flush_error = app.registry.get(&i.bdev_name);
        Export {
            flush_error: flush_error.and_then(|bdev| super::bdev::flush_error(&*bdev)),
            bdev_name: i.bdev_name,
            uuid: i.uuid.to_string(),
            path: i.path.display().to_string(),
            read_only: i.read_only,
            parked: i.parked,
            opens: i.opens,
            size: i.size,
            survives: match i.survives {
                Survives::Crash => "crash",
                Survives::Restart => "restart",
                Survives::Nothing => "nothing",
            },
        }
    }
}

#[derive(Serialize, JsonSchema)]
struct Devices {
    /// Whether `device` of virtlun_export_create can make devices of ublk.
    ublk: bool,
    /// Whether such a device takes its bdev's new size while it is used.
    resizes: bool,
    /// Why not; empty where both can be had.
    why: String,
}

fn create(app: &App, mut p: Create) -> Result<Created, Error> {
    let block_size = p.block_size.unwrap_or(0);
    if block_size != 0 && !(block_size.is_power_of_two() && (512..=4096).contains(&block_size)) {
        return Err(Error::params("block_size is a power of two from 512 to 4096"));
    }
    let bdev = app.bdev(&p.bdev_name)?;
    moves::check_counts(app, bdev.name())?;
    let read_only = p.read_only.unwrap_or(false);
    let path = match (p.device.unwrap_or(false), p.parked.unwrap_or(false)) {
        (true, parked) => app.exports.create_disk(bdev.name(), read_only, parked, block_size),
        (false, true) => app.exports.create_parked(bdev.name(), read_only),
        (false, false) => app.exports.create(bdev.name(), read_only),
    };
    let path = path.map_err(errors::export)?;
    // An alias can change; the name stays.
    p.bdev_name = bdev.name().to_owned();
    p.read_only = p.read_only.filter(|read_only| *read_only);
    p.device = p.device.filter(|device| *device);
    p.shareable = p.shareable.filter(|shareable| *shareable);
    let now = app.exports.list().into_iter().find(|e| e.bdev_name == p.bdev_name);
    p.parked = now.map(|export| export.parked).filter(|parked| *parked);
    app.config().record("virtlun_export_create", &p);
    Ok(Created { path: path.display().to_string() })
}

/// Deletes an export, or forgets one that could not be restored.
fn delete(app: &App, p: &Delete) -> Result<bool, Error> {
    let name =
        app.registry.get(&p.bdev_name).map_or_else(|| p.bdev_name.clone(), |b| b.name().into());
    let key = state::export_key(&name);
    let deleted = app.exports.delete(&name, p.force.unwrap_or(false));
    let forgotten = match deleted {
        Ok(()) => app.config().forget(|item| item.key == key),
        // It is gone but for the I/O, and does not come back.
        Err(e @ ExportError::StillEnding { .. }) => {
            app.config().forget(|item| item.key == key);
            return Err(errors::export(e));
        }
        Err(e) => {
            let unrestored = |item: &Item| item.key == key && item.problem.is_some();
            if !app.config().forget(unrestored) {
                return Err(errors::export(e));
            }
            // Its name is the UUID that its file has.
            if let Ok(uuid) = Uuid::try_parse(&name) {
                app.exports.forget(uuid).map_err(errors::export)?;
            }
            true
        }
    };
    tracing::debug!(bdev = name, forgotten, "export deleted");
    Ok(true)
}

/// Parks an export, or unparks it, and records that.
fn park(app: &App, p: &Exported, parked: bool) -> Result<bool, Error> {
    let name = app.registry.get(&p.bdev_name).map(|b| b.name().to_owned());
    let name = name.unwrap_or_else(|| p.bdev_name.clone());
    let done = match parked {
        true => app.exports.park(&name),
        false => app.exports.unpark(&name),
    };
    done.map_err(errors::export)?;
    let value = if parked { json!(true) } else { Value::Null };
    app.config().set_param(&state::export_key(&name), "parked", value);
    Ok(true)
}

/// Adds the methods.
pub fn add(methods: &mut Methods, app: &Arc<App>) {
    let a = app.clone();
    methods
        .add(
            "virtlun_export_create",
            "Show a bdev as a file for the kernel and return its path; a loop device on it is a \
             block device. An exported bdev cannot be a target of a controller. Repeating it \
             changes nothing.",
            Flags::WRITE,
            move |p: Create| create(&a, p),
        )
        .errors(&[Errno::NoDev, Errno::NoKey, Errno::Busy, Errno::Exist, Errno::NotSup, Errno::Io]);
    let a = app.clone();
    methods
        .add(
            "virtlun_export_delete",
            "Take the file of a bdev away. Refused while it is open, after a wait of 2 s.",
            Flags::WRITE,
            move |p: Delete| delete(&a, &p),
        )
        .errors(&[Errno::NoDev, Errno::Busy]);
    let a = app.clone();
    methods
        .add(
            "virtlun_export_park",
            "Let another face have an exported bdev, a target of a controller for instance, which \
             an export else prevents. Its file stays, with whatever has it open: reads are served, \
             writes fail with EROFS. Returns when the writes in flight have ended, or is refused \
             after 10 s and changes nothing. Repeating it changes nothing.",
            Flags::WRITE,
            move |p: Exported| park(&a, &p, true),
        )
        .errors(&[Errno::NoDev, Errno::Busy]);
    let a = app.clone();
    methods
        .add(
            "virtlun_export_unpark",
            "Take the bdev of a parked export back: its file takes writes again. Refused while \
             another face has it, and then it stays parked. What the kernel cached of the file \
             meanwhile is stale (BLKFLSBUF drops it). Repeating it changes nothing.",
            Flags::WRITE,
            move |p: Exported| park(&a, &p, false),
        )
        .errors(&[Errno::NoDev, Errno::Busy]);
    let a = app.clone();
    methods.add(
        "virtlun_export_get_devices",
        "Get what devices of ublk exports can be, as the holder and its kernel say.",
        Flags::READ,
        move |_: NoParams| {
            let ::export::Abilities { ublk, resizes, why } = a.exports.disk_abilities();
            Ok(Devices { ublk, resizes, why })
        },
    );
    let a = app.clone();
    methods.add(
        "virtlun_export_list",
        "Get all exports, in the order in which they were made.",
        Flags::READ,
        move |_: NoParams| {
            Ok(a.exports.list().into_iter().map(|i| Export::of(&a, i)).collect::<Vec<_>>())
        },
    );
}
