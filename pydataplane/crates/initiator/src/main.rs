//! `virtlun-bench`: drives a vhost-user target as a guest does.

#![forbid(unsafe_code)]

use std::io::{stdin, stdout};
use std::path::PathBuf;
use std::process::ExitCode;

use clap::{Args, Parser, Subcommand};
use initiator::bench::{self, Config, Pattern};
use initiator::{Error, Kind, Options, Session};

#[derive(Parser)]
#[command(version, about = "Drives a vhost-user storage target as a guest does")]
struct Cli {
    #[command(subcommand)]
    command: Command,
}

#[derive(Subcommand)]
enum Command {
    /// Measure I/Os per second, latencies, and what they cost the target
    Run(Box<Run>),
    /// Be a guest that sends too much, or nonsense, as a neighbour for others to be measured beside
    Flood {
        /// The target's vhost-user socket
        socket: PathBuf,
        /// What to send
        #[arg(long, value_enum)]
        kind: bench::flood::Flood,
        /// Seconds
        #[arg(long, default_value = "2", value_parser = seconds_more_than_0)]
        time: f64,
        /// Seed of what is random
        #[arg(long, default_value_t = 1)]
        seed: u64,
    },
    /// Execute JSON commands, one a line, from standard input
    Exec {
        /// The target's vhost-user socket
        socket: PathBuf,
    },
    /// Measure the round trip of a cache line between two CPUs
    C2c {
        /// The two CPUs
        #[arg(long, default_value = "0,1", value_parser = pair)]
        cpus: (usize, usize),
    },
}

#[derive(Args)]
struct Run {
    /// The target's vhost-user socket
    socket: PathBuf,
    /// What to do
    #[arg(long, value_enum, default_value = "randread")]
    rw: Pattern,
    /// Bytes of an I/O (4096, 64k, 1m)
    #[arg(long, default_value = "4k", value_parser = size)]
    bs: u64,
    /// I/Os in flight on each queue
    #[arg(long, default_value_t = 32, value_parser = clap::value_parser!(u16).range(1..))]
    iodepth: u16,
    /// Request queues, all driven by one thread
    #[arg(long, default_value = "1", value_parser = queues)]
    queues: usize,
    /// Descriptors of each queue
    #[arg(long, default_value = "256", value_parser = queue_size)]
    queue_size: u16,
    /// Seconds to measure
    #[arg(long, default_value = "2", value_parser = seconds_more_than_0)]
    time: f64,
    /// Seconds to run before that
    #[arg(long, default_value = "0.2", value_parser = seconds)]
    warmup: f64,
    /// Write every block once before measuring
    #[arg(long)]
    fill: bool,
    /// Check every byte read against what was written; implies --fill
    #[arg(long)]
    verify: bool,
    /// Target number of the LUN (virtio-scsi)
    #[arg(long, default_value_t = 0)]
    target: u8,
    /// LUN of the target (virtio-scsi)
    #[arg(long, default_value_t = 0)]
    lun: u16,
    /// So many targets, from --target on, each of them with as many of the I/Os (virtio-scsi); all are as
    /// large as the first
    #[arg(long, default_value_t = 1, value_parser = clap::value_parser!(u16).range(1..=256), conflicts_with_all = ["fill", "verify", "blk"])]
    targets: u16,
    /// Use only the first bytes of the disk (512m)
    #[arg(long, value_parser = size)]
    size: Option<u64>,
    /// Bytes from one sequential I/O to the next, each of which is done once (1m): what first writes to
    /// clusters of a thin volume cost
    #[arg(long, value_parser = size, conflicts_with_all = ["fill", "verify"])]
    stride: Option<u64>,
    /// Seed of the addresses
    #[arg(long, default_value_t = 1)]
    seed: u64,
    /// The target is vhost-user-blk
    #[arg(long)]
    blk: bool,
    /// Guest memory in huge pages
    #[arg(long)]
    hugepages: bool,
    /// Do not use EVENT_IDX
    #[arg(long)]
    no_event_idx: bool,
    /// Do not use indirect descriptors
    #[arg(long)]
    no_indirect: bool,
    /// Keep no in-flight region (QEMU does)
    #[arg(long)]
    no_inflight: bool,
    /// Process of the target: tells its CPU time per I/O and its memory
    #[arg(long)]
    target_pid: Option<u32>,
    /// CPU of this thread and CPU of the target's polling thread: pins the first, and measures
    /// the cache-line round trip between them before and after
    #[arg(long, value_parser = pair)]
    cpus: Option<(usize, usize)>,
    /// Take the most weight the scheduler gives (own session, autogroup -20)
    #[arg(long)]
    heavy: bool,
    /// Let other threads have the CPU while nothing ends: several guests on fewer CPUs are then at
    /// work in turn, instead of each for as long as the scheduler lets it
    #[arg(long = "yield")]
    yields: bool,
    /// Sleep until the target calls while nothing ends, as a guest does that waits for interrupts
    #[arg(long = "sleep", conflicts_with = "yields")]
    sleeps: bool,
    /// One JSON object instead of text
    #[arg(long)]
    json: bool,
}

/// `4096`, `4k`, `2m`, `1g` in bytes.
fn size(text: &str) -> Result<u64, String> {
    let lower = text.to_ascii_lowercase();
    let (digits, shift) = match lower.char_indices().last() {
        Some((at, 'k')) => (&lower[..at], 10),
        Some((at, 'm')) => (&lower[..at], 20),
        Some((at, 'g')) => (&lower[..at], 30),
        _ => (lower.as_str(), 0),
    };
    let number: u64 = digits.parse().map_err(|_| format!("{text:?} is not a size"))?;
    number.checked_mul(1 << shift).ok_or_else(|| format!("{text} is too big"))
}

/// Request queues: more than any target has.
fn queues(text: &str) -> Result<usize, String> {
    const MOST: usize = 128;
    let number = text.parse().ok().filter(|n| (1..=MOST).contains(n));
    number.ok_or_else(|| format!("give a number from 1 to {MOST}"))
}

/// Descriptors of a split virtqueue (virtio 1.2, 2.7).
fn queue_size(text: &str) -> Result<u16, String> {
    let number = text.parse().ok().filter(|n: &u16| *n >= 2 && n.is_power_of_two());
    number.ok_or_else(|| "give a power of two from 2 to 32768".into())
}

/// Seconds, a day at most.
fn seconds(text: &str) -> Result<f64, String> {
    let number = text.parse().ok().filter(|s| (0.0..=86_400.0).contains(s));
    number.ok_or_else(|| "give seconds from 0 to 86400".into())
}

/// Seconds in which something is measured.
fn seconds_more_than_0(text: &str) -> Result<f64, String> {
    seconds(text).and_then(|s| if s > 0.0 { Ok(s) } else { Err("give more than 0 seconds".into()) })
}

/// `0,1` as two CPUs.
fn pair(text: &str) -> Result<(usize, usize), String> {
    let parse = |part: &str| part.trim().parse::<usize>().ok();
    let both = text.split_once(',').and_then(|(a, b)| Some((parse(a)?, parse(b)?)));
    both.ok_or_else(|| format!("{text:?} is not two CPUs like 0,1"))
}

fn run(run: &Run) -> Result<ExitCode, Error> {
    if run.heavy {
        bench::leave_autogroup();
    }
    let bs = u32::try_from(run.bs).map_err(|_| Error::Usage("--bs is too big".into()))?;
    // Rings, then for each I/O its data and less than a page of control structures.
    let in_flight = u64::from(run.iodepth) * run.queues as u64;
    let memory = (32 << 20) + in_flight * (run.bs.next_multiple_of(4096) + 4096);
    let options = Options {
        socket: run.socket.clone(),
        kind: if run.blk { Kind::Blk } else { Kind::Scsi },
        queues: run.queues,
        queue_size: run.queue_size,
        memory: memory.next_multiple_of(2 << 20),
        hugepages: run.hugepages,
        event_idx: !run.no_event_idx,
        indirect: !run.no_indirect,
        inflight: !run.no_inflight,
        ..Options::default()
    };
    let config = Config {
        rw: run.rw,
        bs,
        iodepth: run.iodepth,
        seconds: run.time,
        warmup: run.warmup,
        fill: run.fill,
        verify: run.verify,
        target: run.target,
        lun: run.lun,
        targets: run.targets,
        size: run.size,
        stride: run.stride,
        seed: run.seed,
        target_pid: run.target_pid,
        cpus: run.cpus,
        yields: run.yields,
        sleeps: run.sleeps,
    };
    let mut session = Session::open(options)?;
    let report = bench::run(&mut session, &config)?;
    if run.json {
        println!("{}", serde_json::json!(report));
    } else {
        println!("{report}");
    }
    let good = report.errors == 0 && report.miscompares == 0 && report.ios > 0;
    Ok(if good { ExitCode::SUCCESS } else { ExitCode::FAILURE })
}

fn main() -> ExitCode {
    let done = match Cli::parse().command {
        Command::Run(args) => run(&args),
        Command::Flood { socket, kind, time, seed } => {
            let options = Options { socket, queue_size: 256, ..Options::default() };
            bench::flood::run(&options, kind, time, seed).map(|sent| {
                println!("{}", serde_json::json!(sent));
                ExitCode::SUCCESS
            })
        }
        Command::Exec { socket } => initiator::exec::run(&socket, stdin().lock(), stdout())
            .map(|()| ExitCode::SUCCESS)
            .map_err(|why| Error::Os { what: "talk through standard input and output", why }),
        Command::C2c { cpus } => bench::c2c::measure(cpus.0, cpus.1).map(|trip| {
            println!("{}", serde_json::json!(trip));
            ExitCode::SUCCESS
        }),
    };
    done.unwrap_or_else(|e| {
        eprintln!("virtlun-bench: {e}");
        ExitCode::FAILURE
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use clap::CommandFactory;

    #[test]
    fn the_command_line_is_consistent() {
        Cli::command().debug_assert();
    }

    #[test]
    fn numbers_that_mean_nothing_are_refused() {
        assert_eq!(queues("2"), Ok(2));
        assert_eq!(queue_size("256"), Ok(256));
        assert_eq!(seconds("0"), Ok(0.0));
        assert_eq!(seconds_more_than_0("0.5"), Ok(0.5));
        for text in ["0", "129", "-1", "x"] {
            assert!(queues(text).is_err(), "{text}");
        }
        for text in ["0", "1", "3", "65536"] {
            assert!(queue_size(text).is_err(), "{text}");
        }
        for text in ["nan", "inf", "-1", "1e300", "0"] {
            assert!(seconds_more_than_0(text).is_err(), "{text}");
        }
        assert!(Cli::try_parse_from(["virtlun-bench", "run", "s", "--iodepth", "0"]).is_err());
    }
}
