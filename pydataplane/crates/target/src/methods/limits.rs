//! How much I/O a bdev does a second at most: SPDK's method, and ours with all that libvirt's `iotune` says.
//!
//! The limits are of the name of a bdev, and recorded. At a start they are there before the bdev is.

use super::{BdevName, MIB, mib_to_bytes};
use crate::app::App;
use crate::state::{self, Item};
use bdev::{Rate, RateLimits, Share};
use rpc::{Errno, Error, Flags, Methods};
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};
use std::sync::Arc;

/// What is recorded.
pub const SET: &str = "virtlun_bdev_set_limits";

/// The words for all limits of one kind, and the words for what is set and shown.
macro_rules! limits {
    ($($name:ident: $kind:ident[$share:ident].$part:ident, $doc:literal;)*) => {
        #[derive(Deserialize, Serialize, JsonSchema)]
        #[serde(deny_unknown_fields)]
        struct SetLimits {
            /// Name of the bdev.
            name: String,
            $(#[doc = concat!($doc, " Default: 0, which is no limit")]
            #[serde(default)]
            $name: u64,)*
            /// Bytes of an operation: one of twice as many counts twice. Default: 0, any as one
            #[serde(default)]
            size_iops_sec: u64,
        }

        /// 0: not limited.
        #[derive(Serialize, JsonSchema)]
        struct ShownLimits {
            $(#[doc = $doc]
            $name: u64,)*
            /// Bytes of an operation: one of twice as many counts twice; 0: any counts once.
            size_iops_sec: u64,
        }

        impl From<&SetLimits> for RateLimits {
            fn from(p: &SetLimits) -> RateLimits {
                let mut to =
                    RateLimits { operation_bytes: p.size_iops_sec, ..RateLimits::default() };
                $(to.$kind[Share::$share as usize].$part = p.$name;)*
                to
            }
        }

        impl From<RateLimits> for ShownLimits {
            fn from(limits: RateLimits) -> ShownLimits {
                ShownLimits {
                    $($name: limits.$kind[Share::$share as usize].$part,)*
                    size_iops_sec: limits.operation_bytes,
                }
            }
        }
    };
}

limits! {
    total_bytes_sec: bytes[Total].average, "Bytes a second of reads and writes.";
    read_bytes_sec: bytes[Read].average, "Bytes a second of reads.";
    write_bytes_sec: bytes[Write].average, "Bytes a second of writes.";
    total_iops_sec: operations[Total].average, "Reads and writes a second.";
    read_iops_sec: operations[Read].average, "Reads a second.";
    write_iops_sec: operations[Write].average, "Writes a second.";
    total_bytes_sec_max: bytes[Total].burst, "Bytes a second of reads and writes in a burst.";
    read_bytes_sec_max: bytes[Read].burst, "Bytes a second of reads in a burst.";
    write_bytes_sec_max: bytes[Write].burst, "Bytes a second of writes in a burst.";
    total_iops_sec_max: operations[Total].burst, "Reads and writes a second in a burst.";
    read_iops_sec_max: operations[Read].burst, "Reads a second in a burst.";
    write_iops_sec_max: operations[Write].burst, "Writes a second in a burst.";
    total_bytes_sec_max_length: bytes[Total].burst_s,
        "Seconds of such a burst of total_bytes_sec_max; 0 as 1.";
    read_bytes_sec_max_length: bytes[Read].burst_s,
        "Seconds of such a burst of read_bytes_sec_max; 0 as 1.";
    write_bytes_sec_max_length: bytes[Write].burst_s,
        "Seconds of such a burst of write_bytes_sec_max; 0 as 1.";
    total_iops_sec_max_length: operations[Total].burst_s,
        "Seconds of such a burst of total_iops_sec_max; 0 as 1.";
    read_iops_sec_max_length: operations[Read].burst_s,
        "Seconds of such a burst of read_iops_sec_max; 0 as 1.";
    write_iops_sec_max_length: operations[Write].burst_s,
        "Seconds of such a burst of write_iops_sec_max; 0 as 1.";
}

/// SPDK's; what is not given stays as it is.
#[derive(Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
struct SetQosLimit {
    /// Name of the bdev.
    name: String,
    /// Reads and writes a second; 0: no limit. Default: as it is
    #[serde(default)]
    rw_ios_per_sec: Option<u64>,
    /// MiB a second of reads and writes; 0: no limit. Default: as it is
    #[serde(default)]
    rw_mbytes_per_sec: Option<u64>,
    /// MiB a second of reads; 0: no limit. Default: as it is
    #[serde(default)]
    r_mbytes_per_sec: Option<u64>,
    /// MiB a second of writes; 0: no limit. Default: as it is
    #[serde(default)]
    w_mbytes_per_sec: Option<u64>,
}

/// SPDK's: what of the limits of a bdev its method can say. 0 means unlimited.
#[derive(Serialize, JsonSchema)]
#[schemars(inline)]
pub(super) struct RateLimitsInfo {
    rw_ios_per_sec: u64,
    rw_mbytes_per_sec: u64,
    r_mbytes_per_sec: u64,
    w_mbytes_per_sec: u64,
}

/// The limits of the bdev of that name; a part of a MiB is shown as one.
pub(super) fn assigned(app: &App, name: &str) -> RateLimitsInfo {
    let limits = app.registry.limits(name).get();
    let mib = |share: Share| limits.bytes[share as usize].average.div_ceil(MIB);
    RateLimitsInfo {
        rw_ios_per_sec: limits.operations[Share::Total as usize].average,
        rw_mbytes_per_sec: mib(Share::Total),
        r_mbytes_per_sec: mib(Share::Read),
        w_mbytes_per_sec: mib(Share::Write),
    }
}

/// Limits the bdev of that name, as it is registered, and records it.
fn limit(app: &App, name: &str, to: RateLimits) -> Result<bool, Error> {
    let refused = |why| Error::params(format!("bdev {name} is not limited so: {why}"));
    app.registry.limits(name).set(to).map_err(refused)?;
    match to.is_limited() {
        true => app.config().record(SET, &recorded(name, to)),
        false => _ = app.config().forget(|item| item.key == state::limits_key(name)),
    }
    Ok(true)
}

/// The parameters that set `limits`, without those that are 0.
fn recorded(name: &str, limits: RateLimits) -> Map<String, Value> {
    let shown = serde_json::to_value(ShownLimits::from(limits)).unwrap_or_default();
    let shown = shown.as_object().cloned().unwrap_or_default().into_iter();
    let mut params: Map<_, _> = shown.filter(|(_, value)| *value != 0).collect();
    params.insert("name".to_owned(), name.into());
    params
}

/// Sets what is recorded of a bdev that may not be there yet.
///
/// # Errors
/// In one sentence: it cannot be understood.
pub fn restore(app: &App, item: &Item) -> Result<(), Error> {
    let params = Value::Object(item.call.params.clone());
    let p: SetLimits = serde_json::from_value(params).map_err(|e| Error::params(e.to_string()))?;
    app.registry.limits(&p.name).set(RateLimits::from(&p)).map_err(Error::params)
}

/// The bdev of that name is gone for good.
pub fn forget(app: &App, name: &str) {
    app.registry.forget_limits(name);
    app.config().forget(|item| item.key == state::limits_key(name));
}

fn set_qos_limit(app: &App, p: &SetQosLimit) -> Result<bool, Error> {
    let name = app.bdev(&p.name)?.name().to_owned();
    let mut limits = app.registry.limits(&name).get();
    let bytes = [
        (Share::Total, p.rw_mbytes_per_sec),
        (Share::Read, p.r_mbytes_per_sec),
        (Share::Write, p.w_mbytes_per_sec),
    ];
    if p.rw_ios_per_sec.is_none() && bytes.iter().all(|(_, given)| given.is_none()) {
        return Err(Error::params("no rate limit is given: give at least one"));
    }
    let average = |average| Rate { average, ..Rate::default() };
    if let Some(ios) = p.rw_ios_per_sec {
        limits.operations[Share::Total as usize] = average(ios);
    }
    for (share, mib) in bytes {
        if let Some(mib) = mib {
            limits.bytes[share as usize] = average(mib_to_bytes(mib)?);
        }
    }
    if limits.operations.iter().all(|rate| rate.average == 0) {
        limits.operation_bytes = 0;
    }
    limit(app, &name, limits)
}

/// Adds the methods.
pub fn add(methods: &mut Methods, app: &Arc<App>) {
    let a = app.clone();
    methods
        .add(
            "bdev_set_qos_limit",
            "Limit how much I/O a bdev does a second, of all who use it together, at once and after \
             each start. As SPDK's, which knows no bursts: a limit that is given has none from then on.",
            Flags::WRITE,
            move |p: SetQosLimit| set_qos_limit(&a, &p),
        )
        .errors(&[Errno::NoDev, Errno::NoKey, Errno::Inval]);
    let a = app.clone();
    methods
        .add(
            SET,
            "Limit how much I/O a bdev does a second, in place of all limits that it had: of all who \
             use it together, at once and after each start, until the bdev is deleted. Reads and writes \
             are limited, by the data that goes with them, not flushes and unmapping. The words are those of libvirt's iotune. A \
             burst goes on at its rate for its length, and then at that of the limit; without one, at most \
             a tenth of a second's worth begins at once.",
            Flags::WRITE,
            move |p: SetLimits| limit(&a, a.bdev(&p.name)?.name(), RateLimits::from(&p)),
        )
        .errors(&[Errno::NoDev, Errno::NoKey]);
    let a = app.clone();
    methods
        .add(
            "virtlun_bdev_get_limits",
            "Get how much I/O a bdev does a second at most.",
            Flags::READ,
            move |p: BdevName| {
                let limits = a.registry.limits(a.bdev(&p.name)?.name());
                Ok(ShownLimits::from(limits.get()))
            },
        )
        .errors(&[Errno::NoDev, Errno::NoKey]);
}
