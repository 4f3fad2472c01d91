//! How the target is.

use crate::app::App;
use crate::flushrecord;
use crate::waits::Wait;
use bdev::Bdev;
use rpc::{Flags, Methods, NoParams};
use schemars::JsonSchema;
use serde::Serialize;
use std::sync::Arc;

#[derive(Serialize, JsonSchema)]
struct Status {
    version: &'static str,
    pid: u32,
    /// Seconds since it started.
    uptime_s: f64,
    rpc_socket: String,
    vhost_dir: String,
    state_dir: String,
    /// Where the holder of exported files listens, be it there or not.
    holder_socket: String,
    /// Whether the holder keeps connections of VMs, for which the end of this process is a pause then.
    holds_sessions: bool,
    user: User,
    /// What happens to system calls that the target is not known to make: `enforce` (they fail),
    /// `log` or `off`.
    sandbox: &'static str,
    /// Names of system calls that were refused; each is a fault of the target, or an intruder.
    refused_calls: Vec<&'static str>,
    /// Whether reactors never sleep.
    poll: bool,
    reactors: Vec<Reactor>,
    bdevs: usize,
    lvstores: usize,
    controllers: usize,
    /// What it took over, if it was not started but upgraded to.
    upgrade: Option<Upgrade>,
    /// What was configured and is not there, each in a sentence.
    restore_problems: Vec<String>,
    /// Whether each bdev that is configured is there, with the lvstore on it: an lvol that is not
    /// there then is in no lvstore that this target was told of.
    storage_complete: bool,
    /// Bdevs whose flushes fail because one did, each in a sentence.
    flush_errors: Vec<String>,
    /// What waits for a disk that does not answer.
    waiting: Vec<Waiting>,
    images: Images,
    iscsi: Luns,
    /// Whether it may make network connections, by `--network` or `--rbd`.
    network: bool,
}

/// Whether it serves LUNs of iSCSI targets.
#[derive(Serialize, JsonSchema)]
struct Luns {
    /// Whether it was started with `--iscsi`.
    asked: bool,
    /// Why it cannot, although it was.
    problem: Option<String>,
}

/// Whether it serves images of Ceph.
#[derive(Serialize, JsonSchema)]
struct Images {
    /// Whether it was started with `--rbd`.
    asked: bool,
    /// Why it cannot, although it was.
    problem: Option<String>,
}

#[derive(Serialize, JsonSchema)]
struct Waiting {
    /// What waits, such as "bdev d0".
    name: String,
    /// What for, as a clause such as "/dev/sdx to be opened".
    waits_for: String,
    /// Seconds since it began to.
    since_s: f64,
}

/// Whom the process runs as: files and block devices of bdevs must be this user's.
#[derive(Serialize, JsonSchema)]
struct User {
    name: String,
    uid: u32,
    gid: u32,
}

#[derive(Serialize, JsonSchema)]
struct Upgrade {
    /// Process of the program before.
    from_pid: u32,
    /// Milliseconds during which guests were not served.
    pause_ms: f64,
}

#[derive(Serialize, JsonSchema)]
struct Reactor {
    index: usize,
    /// CPU it is pinned to.
    cpu: Option<usize>,
    /// Nanoseconds in loops that handled something.
    busy_ns: u64,
    /// Nanoseconds in loops that handled nothing.
    idle_ns: u64,
    /// Nanoseconds asleep.
    sleep_ns: u64,
    /// Times it went to sleep.
    sleeps: u64,
}

fn status(app: &App) -> Status {
    let reactors = app.reactors.stats().into_iter().enumerate().map(|(index, s)| Reactor {
        index,
        cpu: s.cpu,
        busy_ns: s.busy_ns,
        idle_ns: s.idle_ns,
        sleep_ns: s.sleep_ns,
        sleeps: s.sleeps,
    });
    let mut problems: Vec<_> = app
        .config()
        .items()
        .filter_map(|i| i.problem.as_ref().map(|p| format!("{} is not restored: {p}", i.key)))
        .collect();
    problems.extend(app.lvstore_problems().values().cloned());
    let uid = rustix::process::geteuid().as_raw();
    Status {
        version: env!("CARGO_PKG_VERSION"),
        pid: std::process::id(),
        uptime_s: app.started.elapsed().as_secs_f64(),
        rpc_socket: app.paths.rpc_socket.display().to_string(),
        vhost_dir: app.paths.vhost_dir.display().to_string(),
        state_dir: app.paths.state_dir.display().to_string(),
        holder_socket: app.paths.holder_socket.display().to_string(),
        holds_sessions: app.holds_sessions(),
        user: User {
            name: sandbox::user::name_of(uid),
            uid,
            gid: rustix::process::getegid().as_raw(),
        },
        sandbox: app.sandbox,
        refused_calls: sandbox::trap::refused_calls(),
        poll: app.polls,
        reactors: reactors.collect(),
        bdevs: app.registry.list().len(),
        lvstores: app.lvstores.lvstores().len(),
        controllers: app.controllers.list(None).map_or(0, |all| all.len()),
        upgrade: app.upgrade.get().map(|taken| Upgrade {
            from_pid: taken.from_pid,
            pause_ms: taken.pause.as_secs_f64() * 1e3,
        }),
        restore_problems: problems,
        storage_complete: app.storage_is_complete(),
        flush_errors: flush_errors(app),
        waiting: app.waits.long().into_iter().map(Waiting::from).collect(),
        images: images(),
        iscsi: luns(),
        network: app.network,
    }
}

fn luns() -> Luns {
    match iscsi::Library::loaded() {
        Ok(_) => Luns { asked: true, problem: None },
        Err(iscsi::LibraryError::NotLoaded) => Luns { asked: false, problem: None },
        Err(why) => Luns { asked: true, problem: Some(why.to_string()) },
    }
}

fn images() -> Images {
    match rbd::Library::loaded() {
        Ok(_) => Images { asked: true, problem: None },
        Err(rbd::LibraryError::NotLoaded) => Images { asked: false, problem: None },
        Err(why) => Images { asked: true, problem: Some(why.to_string()) },
    }
}

impl From<Wait> for Waiting {
    fn from(wait: Wait) -> Waiting {
        let since_s = wait.since.elapsed().as_secs_f64();
        Waiting { name: wait.name, waits_for: wait.waits_for, since_s }
    }
}

/// Of the disks alone: the lvols on them share their errors.
fn flush_errors(app: &App) -> Vec<String> {
    let disks = app.registry.list().into_iter();
    let disks = disks.filter(|bdev| flushrecord::disk(&app.registry, bdev.name()).is_some());
    let of = |bdev: Arc<dyn Bdev>| {
        let error = super::bdev::flush_error(&*bdev)?;
        Some(format!("bdev {}: {error}", bdev.name()))
    };
    disks.filter_map(of).collect()
}

/// Adds the methods.
pub fn add(methods: &mut Methods, app: &Arc<App>) {
    let a = app.clone();
    methods.add(
        "virtlun_get_status",
        "Get what the target is, how its reactors spend their time, and what could not be restored.",
        Flags::READ,
        move |_: NoParams| Ok(status(&a)),
    );
}
