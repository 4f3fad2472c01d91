//! Histograms of bdevs' latencies: SPDK's methods, and one that tells of operations one by one.

use super::BdevName;
use crate::app::App;
use bdev::{Bdev, HistogramOptions, Latencies, Layout, Op};
use rpc::{Errno, Error, Flags, Methods};
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use std::sync::Arc;

/// SPDK's.
const GRANULARITY: u8 = 7;
/// Borders that one call may have.
const BORDERS_MAX: usize = 1000;

#[derive(Clone, Copy, PartialEq, Eq, Deserialize, Serialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
enum Operation {
    Read,
    Write,
    Flush,
    Unmap,
    WriteZeroes,
}

impl Operation {
    const ALL: [(Operation, Op); Op::COUNT] = [
        (Operation::Read, Op::Read),
        (Operation::Write, Op::Write),
        (Operation::Flush, Op::Flush),
        (Operation::Unmap, Op::Unmap),
        (Operation::WriteZeroes, Op::WriteZeroes),
    ];
}

#[derive(Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
struct EnableHistogram {
    /// Name of the bdev.
    name: String,
    /// Whether to count; if it was, counting begins anew.
    enable: bool,
    /// The one operation to count. Default: each
    #[serde(default)]
    opc: Option<Operation>,
    /// Buckets of each range, as a power of two, at most 10. Default: 7
    #[serde(default)]
    granularity: Option<u8>,
    /// Shortest latency that has a bucket of its own, in nanoseconds. Default: 0
    #[serde(default)]
    min_nsec: Option<u64>,
    /// Latencies from this one on share the last bucket, in nanoseconds. Default: none do
    #[serde(default)]
    max_nsec: Option<u64>,
}

#[derive(Serialize, JsonSchema)]
struct Histogram {
    /// Counts of the buckets, 64 bits each, little endian, in base64.
    histogram: String,
    /// Buckets of each range, as a power of two.
    granularity: u8,
    /// The first range.
    min_range: u8,
    /// The last range.
    max_range: u8,
    /// Ticks per second.
    tsc_rate: u64,
}

#[derive(Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
struct GetBorders {
    /// Name of the bdev.
    name: String,
    /// Latencies in microseconds, ascending.
    borders: Vec<u64>,
}

#[derive(Serialize, JsonSchema)]
struct Borders {
    /// How many operations took less than each border, and how many there were.
    borders_count: Vec<u64>,
}

#[derive(Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
struct GetLatencies {
    /// Names of bdevs. Default: all that have a histogram
    #[serde(default)]
    names: Option<Vec<String>>,
    /// Latencies in nanoseconds, ascending.
    borders_ns: Vec<u64>,
}

#[derive(Serialize, JsonSchema)]
struct BdevLatencies {
    /// Name of the bdev.
    name: String,
    operations: Vec<OperationLatencies>,
}

#[derive(Serialize, JsonSchema)]
struct OperationLatencies {
    operation: Operation,
    /// How many took less than each border, and how many there were.
    counts: Vec<u64>,
}

fn from_ns(ns: u64) -> u64 {
    let ticks = u128::from(ns) * u128::from(reactor::ticks::hz()) / 1_000_000_000;
    u64::try_from(ticks).unwrap_or(u64::MAX)
}

fn enable(app: &App, p: &EnableHistogram) -> Result<bool, Error> {
    let bdev = app.bdev(&p.name)?;
    let Some(stats) = bdev.stats() else {
        let why = format!("bdev {} has no statistics, and so no histogram", bdev.name());
        return Err(Error::os(Errno::NotSup, why));
    };
    if !p.enable {
        stats.set_histogram(None);
        return Ok(true);
    }
    let layout = Layout::new(
        p.granularity.unwrap_or(GRANULARITY),
        p.min_nsec.map_or(0, from_ns),
        p.max_nsec.map_or(u64::MAX, from_ns),
    );
    let refused = |why| Error::os(Errno::Inval, format!("no histogram of bdev {}: {why}", p.name));
    let op = p.opc.and_then(|named| Operation::ALL.into_iter().find(|(name, _)| *name == named));
    stats.set_histogram(Some(HistogramOptions {
        layout: layout.map_err(refused)?,
        op: op.map(|(_, op)| op),
    }));
    Ok(true)
}

fn latencies(bdev: &dyn Bdev) -> Option<Latencies> {
    bdev.stats()?.latencies()
}

/// What was counted of the bdev of that name.
fn counted(app: &App, name: &str) -> Result<Latencies, Error> {
    latencies(&*app.bdev(name)?).ok_or_else(|| {
        let why = format!("bdev {name} has no histogram: call bdev_enable_histogram first");
        Error::os(Errno::NoData, why)
    })
}

fn histogram(app: &App, p: &BdevName) -> Result<Histogram, Error> {
    let counted = counted(app, &p.name)?;
    let bytes: Vec<u8> = counted.all().into_iter().flat_map(u64::to_le_bytes).collect();
    let layout = counted.options.layout;
    Ok(Histogram {
        histogram: openssl::base64::encode_block(&bytes),
        granularity: layout.granularity(),
        min_range: layout.min_range(),
        max_range: layout.max_range(),
        tsc_rate: reactor::ticks::hz(),
    })
}

fn check_borders(borders: &[u64]) -> Result<(), Error> {
    if borders.len() > BORDERS_MAX {
        let why = format!("{} borders are more than {BORDERS_MAX}", borders.len());
        return Err(Error::os(Errno::Inval, why));
    }
    match borders.is_sorted() {
        true => Ok(()),
        false => Err(Error::os(Errno::Inval, "the borders do not ascend")),
    }
}

fn borders(app: &App, p: &GetBorders) -> Result<Borders, Error> {
    check_borders(&p.borders)?;
    let counted = counted(app, &p.name)?;
    let ticks: Vec<_> = p.borders.iter().map(|us| from_ns(us.saturating_mul(1000))).collect();
    Ok(Borders { borders_count: counted.below(&counted.all(), &ticks) })
}

fn of_operations(app: &App, p: GetLatencies) -> Result<Vec<BdevLatencies>, Error> {
    check_borders(&p.borders_ns)?;
    let ticks: Vec<_> = p.borders_ns.iter().map(|ns| from_ns(*ns)).collect();
    let all = match p.names {
        Some(names) => names
            .into_iter()
            .map(|name| Ok((counted(app, &name)?, name)))
            .collect::<Result<_, Error>>()?,
        None => {
            let each = app.registry.list().into_iter();
            each.filter_map(|b| Some((latencies(&*b)?, b.name().to_owned()))).collect::<Vec<_>>()
        }
    };
    let shown = |(counted, name): (Latencies, String)| {
        let operations = Operation::ALL.into_iter().filter_map(|(operation, op)| {
            let counts = counted.below(counted.of(op)?, &ticks);
            Some(OperationLatencies { operation, counts })
        });
        BdevLatencies { name, operations: operations.collect() }
    };
    Ok(all.into_iter().map(shown).collect())
}

/// Adds the methods.
pub fn add(methods: &mut Methods, app: &Arc<App>) {
    let a = app.clone();
    methods
        .add(
            "bdev_enable_histogram",
            "Count in a histogram how long a bdev's operations take, or end that. It is not recorded, and ends with the \
             bdev. Each queue of a disk in memory, whose I/O ends at once, may leave out its first 15.",
            Flags::READ,
            move |p: EnableHistogram| enable(&a, &p),
        )
        .errors(&[Errno::NoDev, Errno::NoKey, Errno::Inval, Errno::NotSup]);
    let a = app.clone();
    methods
        .add(
            "bdev_get_histogram",
            "Get the histogram of a bdev: how often its operations took how long, in ticks.",
            Flags::READ,
            move |p: BdevName| histogram(&a, &p),
        )
        .errors(&[Errno::NoDev, Errno::NoKey, Errno::NoData]);
    let a = app.clone();
    methods
        .add(
            "bdev_get_histogram_borders",
            "Get how many operations of a bdev's histogram took less than each of some latencies.",
            Flags::READ,
            move |p: GetBorders| borders(&a, &p),
        )
        .errors(&[Errno::NoDev, Errno::NoKey, Errno::NoData, Errno::Inval]);
    let a = app.clone();
    methods
        .add(
            "virtlun_bdev_get_latencies",
            "Get how many of each operation took less than each of some latencies, of all bdevs that have a histogram or of some.",
            Flags::READ,
            move |p: GetLatencies| of_operations(&a, p),
        )
        .errors(&[Errno::NoDev, Errno::NoKey, Errno::NoData, Errno::Inval]);
}
