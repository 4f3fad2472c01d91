//! Bdevs for tests of faults, by SPDK's methods: errors and delays on top of another bdev.

use super::{BdevName, UuidText, check_name};
use crate::app::App;
use crate::errors;
use bdev::{Bdev, Op};
use faults::{Delaying, Failing, Fault, Injection, Latency};
use rpc::{Errno, Error, Flags, Methods};
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use serde_json::json;
use std::sync::Arc;

/// The methods that make them.
const CREATE_ERROR: &str = "bdev_error_create";
const CREATE_DELAY: &str = "bdev_delay_create";

#[derive(Deserialize, Serialize, JsonSchema)]
#[serde(deny_unknown_fields)]
struct CreateFailing {
    /// Bdev to show; the new one is named EE_ and its name.
    base_name: String,
    /// UUID. Default: a random one
    #[serde(default)]
    uuid: Option<UuidText>,
}

#[derive(Clone, Copy, Deserialize, JsonSchema)]
#[serde(rename_all = "lowercase")]
enum IoType {
    Clear,
    Read,
    Write,
    Unmap,
    Flush,
    All,
}

#[derive(Clone, Copy, PartialEq, Eq, Deserialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
enum ErrorType {
    Failure,
    Pending,
    CorruptData,
    Nomem,
}

#[derive(Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
struct Inject {
    /// Name of the bdev.
    name: String,
    /// I/Os that are to go wrong; clear: none any more.
    io_type: IoType,
    /// What becomes of them: failure; pending until bdev_error_resume_pending; corrupt_data, a byte of it;
    /// nomem, which is tried again.
    error_type: ErrorType,
    /// How many. Default: 1
    #[serde(default)]
    num: Option<u32>,
    /// Only those beside so many others in flight. Default: 0
    #[serde(default)]
    queue_depth: Option<u32>,
    /// Byte of the data of an I/O that is changed. Default: 0
    #[serde(default)]
    corrupt_offset: Option<u64>,
    /// What it is combined with by XOR, 1 to 255; for corrupt_data.
    #[serde(default)]
    corrupt_value: Option<u8>,
    /// Not supported but for 0: no bdev of this target speaks of NVMe.
    #[serde(default)]
    nvme_sct: Option<u32>,
    /// Not supported but for 0.
    #[serde(default)]
    nvme_sc: Option<u32>,
}

#[derive(Deserialize, Serialize, JsonSchema)]
#[serde(deny_unknown_fields)]
struct CreateDelaying {
    /// Bdev to show.
    base_bdev_name: String,
    /// Name.
    name: String,
    /// UUID. Default: a random one
    #[serde(default)]
    uuid: Option<UuidText>,
    /// Microseconds that reads take longer.
    avg_read_latency: u64,
    /// The same of one read of a hundred.
    p99_read_latency: u64,
    /// Microseconds that writes take longer.
    avg_write_latency: u64,
    /// The same of one write of a hundred.
    p99_write_latency: u64,
}

#[derive(Clone, Copy, Deserialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
enum LatencyType {
    AvgRead,
    P99Read,
    AvgWrite,
    P99Write,
}

#[derive(Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
struct UpdateLatency {
    /// Name of the bdev.
    delay_bdev_name: String,
    /// Which latency.
    latency_type: LatencyType,
    /// Microseconds.
    latency_us: u64,
}

/// Longest latency, in microseconds: a day.
const MAX_LATENCY: u64 = 86_400_000_000;

fn failing(app: &App, name: &str) -> Result<Arc<Failing>, Error> {
    let bdev = super::of_kind(app, name, Failing::PRODUCT)?;
    app.registry.get_as(bdev.name()).ok_or_else(|| errors::no_bdev(name))
}

fn create_failing(app: &App, mut p: CreateFailing) -> Result<bool, Error> {
    // An alias can change; the name stays.
    p.base_name = app.bdev(&p.base_name)?.name().to_owned();
    let uuid = p.uuid.map(|uuid| uuid.0);
    let made = Failing::create(&app.registry, &p.base_name, uuid).map_err(errors::registry)?;
    p.uuid = Some(UuidText(made.uuid()));
    super::created(app, made, CREATE_ERROR, &p)?;
    Ok(true)
}

fn inject(app: &App, p: &Inject) -> Result<bool, Error> {
    let bdev = failing(app, &p.name)?;
    let refused = |why: String| Err(Error::os(Errno::Inval, why));
    if p.nvme_sct.unwrap_or(0) != 0 || p.nvme_sc.unwrap_or(0) != 0 {
        return refused(format!(
            "bdev {}: nvme_sct and nvme_sc are not supported, as no bdev here has such a status; take \
             error_type failure",
            p.name
        ));
    }
    let value = p.corrupt_value.unwrap_or(0);
    if p.error_type == ErrorType::CorruptData && value == 0 {
        return refused(format!(
            "bdev {}: corrupt_value is 0, which changes nothing; give 1 to 255",
            p.name
        ));
    }
    let fault = match p.error_type {
        ErrorType::Failure => Fault::Failure,
        ErrorType::Pending => Fault::Pending,
        ErrorType::CorruptData => Fault::Corrupt { offset: p.corrupt_offset.unwrap_or(0), value },
        ErrorType::Nomem => Fault::NoMemory,
    };
    let (times, queue_depth) = (p.num.unwrap_or(1), p.queue_depth.unwrap_or(0));
    let injection = Injection { fault, times, queue_depth };
    const ALL: &[Op] = &[Op::Read, Op::Write, Op::Unmap, Op::Flush];
    let (ops, injection) = match p.io_type {
        IoType::Clear => (ALL, None),
        IoType::All => (ALL, Some(injection)),
        IoType::Read => (&[Op::Read][..], Some(injection)),
        IoType::Write => (&[Op::Write][..], Some(injection)),
        IoType::Unmap => (&[Op::Unmap][..], Some(injection)),
        IoType::Flush => (&[Op::Flush][..], Some(injection)),
    };
    bdev.inject(ops, injection);
    Ok(true)
}

fn create_delaying(app: &App, mut p: CreateDelaying) -> Result<String, Error> {
    check_name(&p.name)?;
    p.base_bdev_name = app.bdev(&p.base_bdev_name)?.name().to_owned();
    let latencies =
        [p.avg_read_latency, p.p99_read_latency, p.avg_write_latency, p.p99_write_latency];
    latencies.iter().try_for_each(|us| check_latency(&p.name, *us))?;
    let uuid = p.uuid.map(|uuid| uuid.0);
    let made = Delaying::create(&app.registry, &p.name, &p.base_bdev_name, uuid, latencies);
    let made = made.map_err(errors::registry)?;
    p.uuid = Some(UuidText(made.uuid()));
    super::created(app, made, CREATE_DELAY, &p)
}

fn check_latency(name: &str, us: u64) -> Result<(), Error> {
    if us <= MAX_LATENCY {
        return Ok(());
    }
    let why = format!(
        "bdev {name}: a latency of {us} us is too long; give {MAX_LATENCY}, a day, at most"
    );
    Err(Error::os(Errno::Inval, why))
}

fn update_latency(app: &App, p: &UpdateLatency) -> Result<bool, Error> {
    let name = &p.delay_bdev_name;
    check_latency(name, p.latency_us)?;
    let bdev = super::of_kind(app, name, Delaying::PRODUCT)?;
    let delaying: Arc<Delaying> =
        app.registry.get_as(bdev.name()).ok_or_else(|| errors::no_bdev(name))?;
    let (which, param) = match p.latency_type {
        LatencyType::AvgRead => (Latency::AverageRead, "avg_read_latency"),
        LatencyType::P99Read => (Latency::P99Read, "p99_read_latency"),
        LatencyType::AvgWrite => (Latency::AverageWrite, "avg_write_latency"),
        LatencyType::P99Write => (Latency::P99Write, "p99_write_latency"),
    };
    delaying.set(which, p.latency_us);
    app.config().set_param(&crate::state::bdev_key(bdev.name()), param, json!(p.latency_us));
    Ok(true)
}

/// Adds the methods.
pub fn add(methods: &mut Methods, app: &Arc<App>) {
    let a = app.clone();
    methods
        .add(
            CREATE_ERROR,
            "Create a bdev that shows another, which it has for itself, and the errors of \
             bdev_error_inject_error: for tests.",
            Flags::WRITE,
            move |p: CreateFailing| create_failing(&a, p),
        )
        .errors(&[Errno::NoDev, Errno::NoKey, Errno::Exist, Errno::Busy]);
    let a = app.clone();
    methods
        .add(
            "bdev_error_inject_error",
            "Have the next I/Os of a kind go wrong, in place of what was asked for before. Nothing of it is \
             recorded.",
            Flags::READ,
            move |p: Inject| inject(&a, &p),
        )
        .errors(&[Errno::NoDev, Errno::Inval]);
    let a = app.clone();
    methods
        .add(
            "bdev_error_resume_pending",
            "Have I/Os go on that bdev_error_inject_error has pending.",
            Flags::READ,
            move |p: BdevName| {
                failing(&a, &p.name)?.resume_pending();
                Ok(true)
            },
        )
        .errors(&[Errno::NoDev]);
    let what = "Delete a bdev of bdev_error_create. What is pending has to go on before.";
    super::add_delete(methods, app, "bdev_error_delete", what, Failing::PRODUCT);
    let a = app.clone();
    methods
        .add(
            CREATE_DELAY,
            "Create a bdev that shows another, which it has for itself, and answers reads and writes later \
             than that: for tests.",
            Flags::WRITE,
            move |p: CreateDelaying| create_delaying(&a, p),
        )
        .errors(&[Errno::NoDev, Errno::NoKey, Errno::Exist, Errno::Busy, Errno::Inval]);
    let a = app.clone();
    methods
        .add(
            "bdev_delay_update_latency",
            "Change a latency of a bdev of bdev_delay_create, in use or not.",
            Flags::WRITE,
            move |p: UpdateLatency| update_latency(&a, &p),
        )
        .errors(&[Errno::NoDev, Errno::Inval]);
    let what = "Delete a bdev of bdev_delay_create.";
    super::add_delete(methods, app, "bdev_delay_delete", what, Delaying::PRODUCT);
}
