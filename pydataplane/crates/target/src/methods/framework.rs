//! The process: version, subsystems, configuration, reactors, and its end.

use crate::app::App;
use crate::cpumask::CpuMask;
use crate::state::{Call, Subsystem};
use rpc::{Error, Flags, Methods, NoParams};
use rustix::process::{Signal, getpid, kill_process};
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use std::fs;
use std::sync::Arc;

/// Rate of the ticks in which reactors count, per second: they count nanoseconds.
const NS_HZ: u64 = 1_000_000_000;

#[derive(Serialize, JsonSchema)]
struct Version {
    /// For people.
    version: String,
    fields: VersionFields,
}

#[derive(Serialize, JsonSchema)]
struct VersionFields {
    major: u32,
    minor: u32,
    patch: u32,
    suffix: String,
}

#[derive(Deserialize, JsonSchema)]
enum SignalName {
    #[serde(rename = "SIGINT")]
    Int,
    #[serde(rename = "SIGTERM")]
    Term,
    #[serde(rename = "SIGQUIT")]
    Quit,
    #[serde(rename = "SIGHUP")]
    Hup,
    #[serde(rename = "SIGKILL")]
    Kill,
    #[serde(rename = "SIGUSR1")]
    Usr1,
}

#[derive(Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
struct KillInstance {
    /// Signal to send. SIGTERM, SIGINT and SIGQUIT stop the target in order.
    sig_name: SignalName,
}

#[derive(Serialize, JsonSchema)]
struct SubsystemInfo {
    subsystem: &'static str,
    depends_on: Vec<&'static str>,
}

#[derive(Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
struct GetConfig {
    /// Name of the subsystem, as in framework_get_subsystems.
    name: String,
    /// Keep batch arrays in the result. There are none. Default: false
    #[serde(default)]
    #[allow(dead_code)]
    with_batches: Option<bool>,
}

#[derive(Serialize, JsonSchema)]
struct ReactorList {
    /// Ticks per second of the times below.
    tick_rate: u64,
    pid: i32,
    reactors: Vec<ReactorInfo>,
}

#[derive(Serialize, JsonSchema)]
struct ReactorInfo {
    /// CPU it is pinned to, or its index if to none.
    lcore: usize,
    /// Thread id in the kernel.
    tid: i32,
    /// Ticks in loops that handled something.
    busy: u64,
    /// Ticks in loops that handled nothing, spinning.
    idle: u64,
    /// Ticks asleep (ours).
    sleep: u64,
    /// Times it went to sleep (ours).
    sleeps: u64,
    /// Whether it sleeps when idle.
    in_interrupt: bool,
    /// Clock ticks of the CPU in interrupts (proc(5), /proc/stat).
    irq: u64,
    /// Clock ticks of the CPU in the kernel.
    sys: u64,
    /// Clock ticks of the CPU in user mode.
    usr: u64,
    lw_threads: Vec<LightThread>,
}

#[derive(Serialize, JsonSchema)]
struct LightThread {
    name: String,
    id: usize,
    cpumask: String,
    /// Ticks since it started.
    elapsed: u64,
}

#[derive(Serialize, JsonSchema)]
struct ThreadList {
    /// Ticks per second of the times below.
    tick_rate: u64,
    threads: Vec<ThreadInfo>,
}

#[derive(Serialize, JsonSchema)]
struct ThreadInfo {
    name: String,
    id: usize,
    cpumask: String,
    /// Ticks in loops that handled something.
    busy: u64,
    /// Ticks in loops that handled nothing, or asleep.
    idle: u64,
    active_pollers_count: usize,
    /// There is no such kind.
    timed_pollers_count: usize,
    /// There is no such kind.
    paused_pollers_count: usize,
}

/// The version as SPDK shows its own.
fn version() -> Version {
    let number = |text: &str| text.parse().unwrap_or(0);
    Version {
        version: concat!("virtlun ", env!("CARGO_PKG_VERSION")).into(),
        fields: VersionFields {
            major: number(env!("CARGO_PKG_VERSION_MAJOR")),
            minor: number(env!("CARGO_PKG_VERSION_MINOR")),
            patch: number(env!("CARGO_PKG_VERSION_PATCH")),
            suffix: env!("CARGO_PKG_VERSION_PRE").into(),
        },
    }
}

fn kill(p: &KillInstance) -> Result<bool, Error> {
    let signal = match p.sig_name {
        SignalName::Int => Signal::INT,
        SignalName::Term => Signal::TERM,
        SignalName::Quit => Signal::QUIT,
        SignalName::Hup => Signal::HUP,
        SignalName::Kill => Signal::KILL,
        SignalName::Usr1 => Signal::USR1,
    };
    kill_process(getpid(), signal)
        .map(|()| true)
        .map_err(|e| Error::io("cannot signal the target", &e.into()))
}

fn config_of(app: &App, name: &str) -> Result<Vec<Call>, Error> {
    match Subsystem::named(name) {
        Some(subsystem) => Ok(app.config().shown(subsystem)),
        None => Err(Error::params(format!(
            "there is no subsystem {name}; framework_get_subsystems lists those there are"
        ))),
    }
}

/// Mask of the CPUs a reactor may run on: its own, or all of them.
fn mask_of(cpu: Option<usize>) -> String {
    let all = std::thread::available_parallelism().map_or(1, usize::from);
    let mask = match cpu {
        Some(cpu) => CpuMask::of([cpu]),
        None => CpuMask::of(0..all),
    };
    mask.map(|m| m.to_string()).unwrap_or_default()
}

/// User, system and interrupt time of a CPU, or of all, in clock ticks.
fn cpu_times(cpu: Option<usize>) -> (u64, u64, u64) {
    let stat = fs::read_to_string("/proc/stat").unwrap_or_default();
    let label = cpu.map_or("cpu".to_owned(), |cpu| format!("cpu{cpu}"));
    let line = stat.lines().find(|l| l.split(' ').next() == Some(label.as_str()));
    let fields: Vec<u64> = line
        .into_iter()
        .flat_map(|l| l.split_whitespace().skip(1))
        .map(|field| field.parse().unwrap_or(0))
        .collect();
    let field = |i: usize| fields.get(i).copied().unwrap_or(0);
    (field(0), field(2), field(5))
}

fn reactors(app: &App) -> ReactorList {
    let stats = app.reactors.stats();
    let reactors = stats.iter().enumerate().map(|(i, s)| {
        let (usr, sys, irq) = cpu_times(s.cpu);
        ReactorInfo {
            lcore: s.cpu.unwrap_or(i),
            tid: app.reactor_tids.get(i).copied().unwrap_or(0),
            busy: s.busy_ns,
            idle: s.idle_ns,
            sleep: s.sleep_ns,
            sleeps: s.sleeps,
            in_interrupt: !app.polls,
            irq,
            sys,
            usr,
            lw_threads: vec![LightThread {
                name: format!("reactor_{i}"),
                id: i + 1,
                cpumask: mask_of(s.cpu),
                elapsed: s.busy_ns + s.idle_ns + s.sleep_ns,
            }],
        }
    });
    let pid = getpid().as_raw_nonzero().get();
    ReactorList { tick_rate: NS_HZ, pid, reactors: reactors.collect() }
}

fn threads(app: &App) -> ThreadList {
    let stats = app.reactors.stats();
    let threads = stats.iter().enumerate().map(|(i, s)| ThreadInfo {
        name: format!("reactor_{i}"),
        id: i + 1,
        cpumask: mask_of(s.cpu),
        busy: s.busy_ns,
        idle: s.idle_ns + s.sleep_ns,
        active_pollers_count: app.reactors.handles()[i].call(|cx| cx.pollers().len()),
        timed_pollers_count: 0,
        paused_pollers_count: 0,
    });
    ThreadList { tick_rate: NS_HZ, threads: threads.collect() }
}

/// Adds the methods.
pub fn add(methods: &mut Methods, app: &Arc<App>) {
    methods.add(
        "spdk_get_version",
        "Get the version of the running target.",
        Flags::ALWAYS,
        |_: NoParams| Ok(version()),
    );
    methods.add(
        "spdk_kill_instance",
        "Send a signal to the target.",
        Flags::ALWAYS,
        |p: KillInstance| kill(&p),
    );
    methods.add(
        "framework_get_subsystems",
        "Get the subsystems in initialisation order, each with those it depends on.",
        Flags::ALWAYS,
        |_: NoParams| {
            let info = |s: Subsystem| SubsystemInfo {
                subsystem: s.name(),
                depends_on: s.depends_on().iter().map(|d| d.name()).collect(),
            };
            Ok(Subsystem::ALL.map(info).into_iter().collect::<Vec<_>>())
        },
    );
    let a = app.clone();
    methods.add(
        "framework_get_config",
        "Get the calls that configure a subsystem as it is now. Lvstores and lvols are not among \
         them: they are found on their bdevs.",
        Flags::READ,
        move |p: GetConfig| config_of(&a, &p.name),
    );
    let a = app.clone();
    methods.add(
        "framework_start_init",
        "Restore what was configured and let all methods be called; for a target started with \
         --wait-for-rpc.",
        Flags::STARTUP,
        move |_: NoParams| a.initialise().map(|()| true).map_err(Error::internal),
    );
    let a = app.clone();
    methods.add(
        "framework_wait_init",
        "Do not return until the target is initialised.",
        Flags::ALWAYS,
        move |_: NoParams| {
            a.wait_initialised();
            Ok(true)
        },
    );
    let a = app.clone();
    methods.add(
        "framework_get_reactors",
        "Get all reactors with their times.",
        Flags::READ,
        move |_: NoParams| Ok(reactors(&a)),
    );
    let a = app.clone();
    methods.add(
        "thread_get_stats",
        "Get the times of all polling threads, one per reactor.",
        Flags::READ,
        move |_: NoParams| Ok(threads(&a)),
    );
}
