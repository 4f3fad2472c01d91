//! SPDK's methods of ublk devices. The devices are exports: what `virtlun_export_create` makes, asked
//! for by a number, and recorded as the same thing.

use crate::app::App;
use crate::cpumask::CpuMask;
use crate::errors;
use crate::moves;
use crate::state::{self, UBLK_KEY};
use ::export::{DEPTH, DISK_NUMBERS, DiskInfo, ExportError, Numbered};
use rpc::{Errno, Error, Flags, Methods, NoParams};
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use std::sync::Arc;

/// Requests of a device at a time where nobody says how many, as SPDK has it.
const QUEUE_DEPTH: u32 = 128;

const START: &str = "ublk_start_disk";

#[derive(Deserialize, Serialize, JsonSchema)]
#[serde(deny_unknown_fields)]
struct CreateTarget {
    /// CPUs of the threads that serve devices, as 0x3 or [0,1]. Default: those that no reactor is bound to
    #[serde(default)]
    cpumask: Option<String>,
    /// Have the kernel copy data to and from the target, as this one always has it. Default: false
    #[serde(default)]
    disable_user_copy: Option<bool>,
}

#[derive(Deserialize, Serialize, JsonSchema)]
#[serde(deny_unknown_fields)]
struct Start {
    /// Bdev to show as a device: name, alias or UUID.
    bdev_name: String,
    /// Number of the device, the N of /dev/ublkbN: 0 to 1048575.
    ublk_id: u32,
    /// Requests at a time; more than 64 are 64. Default: 128
    #[serde(default)]
    queue_depth: Option<u32>,
    /// Queues; more than 1 are 1. Default: 1
    #[serde(default)]
    num_queues: Option<u32>,
    /// Make it parked, as virtlun_export_park does (ours): for a recorded configuration. Default: false
    #[serde(default)]
    parked: Option<bool>,
}

#[derive(Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
struct Recover {
    /// Bdev that the device is of: name, alias or UUID.
    bdev_name: String,
    /// Number of the device.
    ublk_id: u32,
}

#[derive(Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
struct Stop {
    /// Number of the device.
    ublk_id: u32,
}

#[derive(Default, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields, default)]
struct Get {
    /// Number of the device. Default: all devices
    ublk_id: Option<u32>,
}

#[derive(Serialize, JsonSchema)]
struct Disk {
    /// The device.
    ublk_device: String,
    /// Its number.
    id: u32,
    /// Requests at a time.
    queue_depth: u32,
    /// Queues: 1.
    num_queues: u32,
    /// Name of its bdev.
    bdev_name: String,
}

impl Disk {
    fn of(disk: DiskInfo) -> Disk {
        Disk {
            ublk_device: format!("/dev/ublkb{}", disk.number),
            id: disk.number,
            queue_depth: disk.depth.into(),
            num_queues: 1,
            bdev_name: disk.bdev_name,
        }
    }
}

/// The device of that number, if this target serves it.
fn find(app: &App, number: u32) -> Option<DiskInfo> {
    app.exports.disks().into_iter().find(|disk| disk.number == number)
}

fn create_target(app: &App, mut p: CreateTarget) -> Result<bool, Error> {
    let mut target = app.ublk_target.lock();
    if target.is_some() {
        let why = "there is a ublk target already; ublk_destroy_target takes it away";
        return Err(Error::os(Errno::Busy, why));
    }
    let mask = p.cpumask.as_deref().map(str::parse::<CpuMask>).transpose();
    let mask = mask.map_err(|e| Error::os(Errno::Inval, e))?;
    let cpus = mask.map(|mask| mask.cpus().to_vec()).unwrap_or_default();
    // On a thread of its own, which ends bound to them.
    let probe = std::thread::scope(|scope| scope.spawn(|| reactor::bind(&cpus)).join());
    if let Ok(Err(e)) = probe {
        let why = format_args!("the target may run on none of the CPUs {cpus:?}: {e}");
        return Err(Error::os(Errno::Inval, why));
    }
    if !app.exports.has_disks().map_err(errors::export)? {
        return Err(errors::export(ExportError::NoDisks));
    }
    *target = Some(cpus);
    drop(target);
    p.disable_user_copy = p.disable_user_copy.filter(|disable| *disable);
    app.config().record("ublk_create_target", &p);
    Ok(true)
}

fn destroy_target(app: &App) -> Result<bool, Error> {
    let key = UBLK_KEY;
    if app.ublk_target.lock().is_none() && app.config().get(key).is_none() {
        return Err(Error::os(Errno::NoEnt, NO_TARGET));
    }
    let started = |disk: &DiskInfo| {
        let key = state::export_key(&disk.bdev_name);
        app.config().get(&key).is_some_and(|item| item.call.method == START)
    };
    for disk in app.exports.disks().into_iter().filter(started) {
        stop(app, disk)?;
    }
    *app.ublk_target.lock() = None;
    // Those that could not be restored, too.
    app.config().forget(|item| item.key == key || item.call.method == START);
    Ok(true)
}

const NO_TARGET: &str = "there is no ublk target; ublk_create_target makes it";

/// The CPUs of the ublk target.
fn cpus(app: &App) -> Result<Vec<usize>, Error> {
    app.ublk_target.lock().clone().ok_or_else(|| Error::os(Errno::NoDev, NO_TARGET))
}

/// Refuses a number that this target has.
fn check_free(app: &App, number: u32) -> Result<(), Error> {
    if number >= DISK_NUMBERS {
        let most = DISK_NUMBERS - 1;
        let why = format_args!("{number} is no number of a ublk device: 0 to {most} are");
        return Err(Error::os(Errno::Inval, why));
    }
    match find(app, number) {
        None => Ok(()),
        Some(disk) => Err(Error::os(
            Errno::Busy,
            format_args!("/dev/ublkb{number} is bdev {} already", disk.bdev_name),
        )),
    }
}

fn start(app: &App, mut p: Start) -> Result<u32, Error> {
    let bdev = app.bdev(&p.bdev_name)?;
    moves::check_counts(app, bdev.name())?;
    let cpus = cpus(app)?;
    check_free(app, p.ublk_id)?;
    let (depth, queues) = (p.queue_depth.unwrap_or(QUEUE_DEPTH), p.num_queues.unwrap_or(1));
    if depth == 0 || queues == 0 {
        let why = "a device has at least one queue, of at least one request";
        return Err(Error::os(Errno::Inval, why));
    }
    if queues > 1 {
        tracing::warn!("/dev/ublkb{} gets 1 queue instead of {queues}", p.ublk_id);
    }
    let depth = u16::try_from(depth).unwrap_or(DEPTH).min(DEPTH);
    let wish = Numbered { number: p.ublk_id, depth, left: false, cpus };
    let parked = p.parked.unwrap_or(false);
    let disk = app.exports.start_disk(bdev.name(), wish, parked).map_err(errors::export)?;
    // An alias can change; the name stays.
    p.bdev_name = disk.bdev_name.clone();
    p.parked = p.parked.filter(|parked| *parked);
    record(app, p, &disk);
    Ok(disk.number)
}

fn recover(app: &App, p: Recover) -> Result<u32, Error> {
    let cpus = cpus(app)?;
    check_free(app, p.ublk_id)?;
    let bdev = app.bdev(&p.bdev_name)?;
    let wish = Numbered { number: p.ublk_id, depth: DEPTH, left: true, cpus };
    let disk = app.exports.start_disk(bdev.name(), wish, false).map_err(errors::export)?;
    let Recover { ublk_id, .. } = p;
    let bdev_name = disk.bdev_name.clone();
    let start = Start { bdev_name, ublk_id, queue_depth: None, num_queues: None, parked: None };
    record(app, start, &disk);
    Ok(disk.number)
}

/// Records a device as it is.
fn record(app: &App, p: Start, disk: &DiskInfo) {
    let queue_depth = Some(disk.depth.into());
    app.config().record(START, &Start { queue_depth, num_queues: Some(1), ..p });
}

/// Takes a device away, whoever has it open.
fn stop(app: &App, disk: DiskInfo) -> Result<(), Error> {
    let key = state::export_key(&disk.bdev_name);
    let stopped = app.exports.delete(&disk.bdev_name, true);
    // It is gone but for the I/O, and does not come back.
    if matches!(stopped, Ok(()) | Err(ExportError::StillEnding { .. })) {
        app.config().forget(|item| item.key == key);
    }
    stopped.map_err(errors::export)
}

fn no_disk(number: u32) -> Error {
    let why = format_args!(
        "this target serves no /dev/ublkb{number}; ublk_get_disks lists those it does"
    );
    Error::os(Errno::NoDev, why)
}

/// Adds the methods.
pub fn add(methods: &mut Methods, app: &Arc<App>) {
    let a = app.clone();
    methods
        .add(
            "ublk_create_target",
            "Allow devices to be started by ublk_start_disk. Refused where the kernel cannot recover \
             devices, or the holder may not make them.",
            Flags::WRITE,
            move |p: CreateTarget| create_target(&a, p),
        )
        .errors(&[Errno::Busy, Errno::Inval, Errno::NoEnt, Errno::Io]);
    let a = app.clone();
    methods
        .add(
            "ublk_destroy_target",
            "Stop the devices that were started by ublk_start_disk or ublk_recover_disk, and allow no \
             others. Those of virtlun_export_create stay.",
            Flags::WRITE,
            move |_: NoParams| destroy_target(&a),
        )
        .errors(&[Errno::NoEnt, Errno::Busy, Errno::Io]);
    let a = app.clone();
    methods
        .add(
            START,
            "Show a bdev as the block device /dev/ublkbN of the kernel's; returns N. It is an export, as \
             one of virtlun_export_create with device: it is recorded, what has it open waits while the \
             target is away, killed, restarted or exchanged, and nobody else can claim the bdev.",
            Flags::WRITE,
            move |p: Start| start(&a, p),
        )
        .errors(&[
            Errno::NoDev,
            Errno::NoKey,
            Errno::Busy,
            Errno::Exist,
            Errno::Inval,
            Errno::NotSup,
            Errno::NoEnt,
            Errno::Io,
        ]);
    let a = app.clone();
    methods
        .add(
            "ublk_stop_disk",
            "Take a device away, also one of virtlun_export_create, whether or not something has it open: \
             that gets errors, and what a file system on it has not written yet is lost.",
            Flags::WRITE,
            move |p: Stop| {
                let disk = find(&a, p.ublk_id).ok_or_else(|| no_disk(p.ublk_id))?;
                stop(&a, disk).map(|()| true)
            },
        )
        .errors(&[Errno::NoDev, Errno::Busy, Errno::Io]);
    let a = app.clone();
    methods
        .add(
            "ublk_recover_disk",
            "Go on with a device of a bdev that another process has left; returns its number. Only for \
             one that is not recorded here: a target goes on by itself with those that it had.",
            Flags::WRITE,
            move |p: Recover| recover(&a, p),
        )
        .errors(&[
            Errno::NoDev,
            Errno::NoKey,
            Errno::Busy,
            Errno::Exist,
            Errno::Inval,
            Errno::NoEnt,
            Errno::Io,
        ]);
    let a = app.clone();
    methods
        .add(
            "ublk_get_disks",
            "Get one or all devices that this target serves, those of virtlun_export_create too.",
            Flags::READ,
            move |p: Get| match p.ublk_id {
                None => Ok(a.exports.disks().into_iter().map(Disk::of).collect::<Vec<_>>()),
                Some(number) => match find(&a, number) {
                    Some(disk) => Ok(vec![Disk::of(disk)]),
                    None => Err(no_disk(number)),
                },
            },
        )
        .errors(&[Errno::NoDev]);
}
