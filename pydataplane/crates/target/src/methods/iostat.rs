//! I/O statistics of bdevs.

use crate::app::App;
use bdev::{Bdev, IoError, IoStat, Op, StatsReset};
use rpc::{Errno, Error, Flags, Methods};
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;
use std::sync::Arc;

#[derive(Clone, Copy, PartialEq, Eq, Deserialize, JsonSchema)]
#[serde(rename_all = "lowercase")]
enum ResetMode {
    All,
    MaxMin,
    Error,
    None,
}

#[derive(Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
struct GetIostat {
    /// Names of bdevs. Default: all
    #[serde(default)]
    names: Option<Vec<String>>,
    /// Name of one bdev (ours; SPDK has `names` alone).
    #[serde(default)]
    name: Option<String>,
    /// Show each channel of the one named bdev. Default: false
    #[serde(default)]
    per_channel: Option<bool>,
    /// What to forget afterwards. Default: none
    #[serde(default)]
    reset_mode: Option<ResetMode>,
}

#[derive(Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
struct ResetIostat {
    /// Name of one bdev. Default: all
    #[serde(default)]
    name: Option<String>,
    /// What to forget. Default: all
    #[serde(default)]
    mode: Option<ResetMode>,
}

#[derive(Serialize, JsonSchema)]
#[serde(untagged)]
enum Iostat {
    /// Of bdevs.
    Bdevs {
        /// Ticks per second.
        tick_rate: u64,
        /// Now.
        ticks: u64,
        bdevs: Vec<BdevStat>,
    },
    /// Of the channels of one.
    Channels {
        /// Ticks per second.
        tick_rate: u64,
        /// Now.
        ticks: u64,
        name: String,
        channels: Vec<ChannelStat>,
    },
}

#[derive(Serialize, JsonSchema)]
struct BdevStat {
    name: String,
    #[serde(flatten)]
    counters: Counters,
}

#[derive(Serialize, JsonSchema)]
struct ChannelStat {
    /// Number of the channel.
    thread_id: usize,
    /// Name of the thread it belongs to (ours).
    thread: String,
    #[serde(flatten)]
    counters: Counters,
}

/// Counters with SPDK's names; latencies in ticks.
#[derive(Serialize, JsonSchema)]
struct Counters {
    bytes_read: u64,
    num_read_ops: u64,
    bytes_written: u64,
    num_write_ops: u64,
    bytes_unmapped: u64,
    num_unmap_ops: u64,
    bytes_copied: u64,
    num_copy_ops: u64,
    read_latency_ticks: u64,
    max_read_latency_ticks: u64,
    min_read_latency_ticks: u64,
    write_latency_ticks: u64,
    max_write_latency_ticks: u64,
    min_write_latency_ticks: u64,
    unmap_latency_ticks: u64,
    max_unmap_latency_ticks: u64,
    min_unmap_latency_ticks: u64,
    copy_latency_ticks: u64,
    max_copy_latency_ticks: u64,
    min_copy_latency_ticks: u64,
    /// Flushes (ours).
    num_flush_ops: u64,
    /// Ticks in flushes (ours).
    flush_latency_ticks: u64,
    /// Blocks made zero without data, in bytes (ours).
    bytes_zeroed: u64,
    /// How often (ours).
    num_write_zeroes_ops: u64,
    /// Failed I/Os by kind, those that happened.
    io_error: BTreeMap<String, u64>,
}

impl From<IoStat> for Counters {
    fn from(s: IoStat) -> Counters {
        let [read, write, unmap, flush, zero] =
            [Op::Read, Op::Write, Op::Unmap, Op::Flush, Op::WriteZeroes].map(|op| *s.op(op));
        let io_error = IoError::ALL
            .iter()
            .map(|e| (format!("{e:?}"), s.errors_of(*e)))
            .filter(|(_, count)| *count > 0)
            .collect();
        Counters {
            bytes_read: read.bytes,
            num_read_ops: read.ops,
            bytes_written: write.bytes,
            num_write_ops: write.ops,
            bytes_unmapped: unmap.bytes,
            num_unmap_ops: unmap.ops,
            bytes_copied: 0,
            num_copy_ops: 0,
            read_latency_ticks: read.ticks,
            max_read_latency_ticks: read.max_ticks,
            min_read_latency_ticks: read.min_ticks,
            write_latency_ticks: write.ticks,
            max_write_latency_ticks: write.max_ticks,
            min_write_latency_ticks: write.min_ticks,
            unmap_latency_ticks: unmap.ticks,
            max_unmap_latency_ticks: unmap.max_ticks,
            min_unmap_latency_ticks: unmap.min_ticks,
            copy_latency_ticks: 0,
            max_copy_latency_ticks: 0,
            min_copy_latency_ticks: 0,
            num_flush_ops: flush.ops,
            flush_latency_ticks: flush.ticks,
            bytes_zeroed: zero.bytes,
            num_write_zeroes_ops: zero.ops,
            io_error,
        }
    }
}

fn reset(bdev: &dyn Bdev, mode: ResetMode) {
    let what = match mode {
        ResetMode::All => StatsReset::All,
        ResetMode::MaxMin => StatsReset::MaxMin,
        ResetMode::Error | ResetMode::None => return,
    };
    if let Some(stats) = bdev.stats() {
        stats.reset(what);
    }
}

/// Errors are counted with the rest; forgetting them alone is not possible.
fn check_mode(mode: ResetMode) -> Result<ResetMode, Error> {
    match mode {
        ResetMode::Error => {
            Err(Error::os(Errno::NotSup, "error counters cannot be reset alone; use mode \"all\""))
        }
        mode => Ok(mode),
    }
}

fn get_iostat(app: &App, p: GetIostat) -> Result<Iostat, Error> {
    let mode = check_mode(p.reset_mode.unwrap_or(ResetMode::None))?;
    let named: Option<Vec<String>> = match (p.names, p.name) {
        (None, None) => None,
        (names, name) => Some(names.into_iter().flatten().chain(name).collect()),
    };
    let bdevs = match &named {
        None => app.registry.list(),
        Some(names) => names.iter().map(|name| app.bdev(name)).collect::<Result<_, _>>()?,
    };
    let (tick_rate, ticks) = (reactor::ticks::hz(), reactor::ticks::now());
    let answer = if p.per_channel.unwrap_or(false) {
        let ([bdev], Some(_)) = (&bdevs[..], named) else {
            return Err(Error::os(Errno::Inval, "per_channel needs exactly one named bdev"));
        };
        let channels = bdev.stats().map(|s| s.per_channel()).unwrap_or_default();
        let channels = channels.into_iter().enumerate().map(|(thread_id, (thread, stat))| {
            ChannelStat { thread_id, thread, counters: stat.into() }
        });
        let name = bdev.name().to_owned();
        Iostat::Channels { tick_rate, ticks, name, channels: channels.collect() }
    } else {
        let stat = |bdev: &Arc<dyn Bdev>| BdevStat {
            name: bdev.name().to_owned(),
            counters: bdev.stats().map(|s| s.snapshot()).unwrap_or_default().into(),
        };
        Iostat::Bdevs { tick_rate, ticks, bdevs: bdevs.iter().map(stat).collect() }
    };
    bdevs.iter().for_each(|bdev| reset(&**bdev, mode));
    Ok(answer)
}

fn reset_iostat(app: &App, p: &ResetIostat) -> Result<bool, Error> {
    let mode = check_mode(p.mode.unwrap_or(ResetMode::All))?;
    match &p.name {
        Some(name) => reset(&*app.bdev(name)?, mode),
        None => app.registry.list().iter().for_each(|bdev| reset(&**bdev, mode)),
    }
    Ok(true)
}

/// Adds the methods.
pub fn add(methods: &mut Methods, app: &Arc<App>) {
    let a = app.clone();
    methods
        .add(
            "bdev_get_iostat",
            "Get I/O statistics of all bdevs, of some, or of each channel of one.",
            Flags::READ,
            move |p: GetIostat| get_iostat(&a, p),
        )
        .errors(&[Errno::NoDev, Errno::NoKey, Errno::Inval, Errno::NotSup]);
    let a = app.clone();
    methods
        .add(
            "bdev_reset_iostat",
            "Reset I/O statistics of all bdevs or of one, for all who look at them.",
            Flags::READ,
            move |p: ResetIostat| reset_iostat(&a, &p),
        )
        .errors(&[Errno::NoDev, Errno::NoKey, Errno::NotSup]);
}
