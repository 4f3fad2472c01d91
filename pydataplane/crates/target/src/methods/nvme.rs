//! Bdevs on namespaces of NVMe controllers over TCP, by SPDK's methods.
//!
//! What is recorded of a controller is one call, with all its paths and what its namespaces were, under its name.

use super::{NotMade, UuidText, check_name, unsupported};
use crate::app::App;
use crate::state::{Call, Item, NVME_OPTIONS_KEY, bdev_key};
use bdev::{Bdev, FlushLatch, Registry};
use nvme::{Address, Controller, CreateError, Disk, Options, check_nqn};
use rpc::{Errno, Error, Flags, Methods};
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use serde_json::{Value, json};
use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, Instant};
use uuid::Uuid;

/// The method that makes them.
pub const ATTACH: &str = "bdev_nvme_attach_controller";
/// The method that sets what holds for those that are made then.
pub const SET_OPTIONS: &str = "bdev_nvme_set_options";

/// How long connections may take to be closed.
const CLOSE_TIMEOUT: Duration = Duration::from_secs(5);
/// How long after an attempt to restore one the next is made.
pub const RETRY: Duration = Duration::from_secs(2);
/// Most seconds of any of the options: a day.
const SECONDS_MAX: i64 = 86_400;
/// Queues for I/O at most: one thread serves them all.
const QUEUES_MAX: u32 = 8;
/// Defaults: milliseconds of keep-alive and of a connection, seconds without an answer until I/O fails, between two
/// attempts to connect, and until a path is connected anew.
const KEEP_ALIVE_MS: u64 = 10_000;
const CONNECT_MS: u64 = 4000;
const LOSS_S: i64 = 60;
const RECONNECT_S: i64 = 1;
const TIMEOUT_US: u64 = 30_000_000;
/// What a name of this host is made in.
const HOST_SPACE: Uuid = Uuid::from_u128(0x6fa1_2d1b_8a5c_4c5e_9a3e_77a5_6f0c_3d11);

/// Of a path beside the first.
#[derive(Clone, Debug, PartialEq, Deserialize, Serialize, JsonSchema)]
#[serde(deny_unknown_fields)]
struct PathParams {
    /// IP address.
    traddr: String,
    /// Port. Default: 4420
    #[serde(default, skip_serializing_if = "Option::is_none")]
    trsvcid: Option<String>,
}

/// What a namespace has to be.
#[derive(Clone, Debug, PartialEq, Deserialize, Serialize, JsonSchema)]
#[serde(deny_unknown_fields)]
struct Expected {
    /// Number.
    nsid: u32,
    /// Identity.
    uuid: UuidText,
    /// Bytes of a block.
    block_size: u32,
}

#[derive(Clone, Deserialize, Serialize, JsonSchema)]
#[serde(deny_unknown_fields)]
#[expect(dead_code, reason = "some are taken and have no effect")]
struct Attach {
    /// Name of the controller; its bdevs are NAMEn1, NAMEn2 and so on, by the numbers of its namespaces.
    name: String,
    /// Transport: tcp.
    trtype: String,
    /// IP address.
    traddr: String,
    /// Family of the address: ipv4 or ipv6. Default: as it is
    #[serde(default)]
    adrfam: Option<String>,
    /// Port. Default: 4420
    #[serde(default)]
    trsvcid: Option<String>,
    /// Name of the subsystem (NQN).
    #[serde(default)]
    subnqn: Option<String>,
    /// Name of this host (NQN). Default: one made of its machine-id
    #[serde(default)]
    hostnqn: Option<String>,
    /// Headers have a digest, CRC32C. Default: false
    #[serde(default)]
    hdgst: Option<bool>,
    /// Data has a digest, CRC32C; what is sent is copied for it. Default: false
    #[serde(default)]
    ddgst: Option<bool>,
    /// Of a controller that is attached already: "failover" or "multipath" adds this path to it, where I/O goes when
    /// the others are lost or not optimized; "disable" refuses it. Default: failover
    #[serde(default, skip_serializing_if = "Option::is_none")]
    multipath: Option<String>,
    /// Queues for I/O of each path, 8 at most. Default: 1
    #[serde(default)]
    num_io_queues: Option<u32>,
    /// Seconds without an answer after which I/O fails; -1: never. The bdevs stay, and connections are tried for all the
    /// same. Default, and what 0 means: what bdev_nvme_set_options has set, or 60
    #[serde(default)]
    ctrlr_loss_timeout_sec: Option<i64>,
    /// Seconds between two attempts to connect. Default, and what 0 means: what bdev_nvme_set_options has set, or 1
    #[serde(default)]
    reconnect_delay_sec: Option<i64>,
    /// Seconds without an answer after which I/O fails, in place of ctrlr_loss_timeout_sec. Default, and what 0 means:
    /// what bdev_nvme_set_options has set, or that
    #[serde(default)]
    fast_io_fail_timeout_sec: Option<i64>,
    /// Have each write made durable (FUA), so that nothing that was answered is lost where the target goes down and
    /// comes back (ours). Default: true where that is another host and has a volatile cache
    #[serde(default, skip_serializing_if = "Option::is_none")]
    write_through: Option<bool>,
    /// Further paths to the subsystem (ours), as calls with multipath add them.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    paths: Vec<PathParams>,
    /// What the namespaces have to be (ours). Default: what they are, which is recorded
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    namespaces: Vec<Expected>,
    /// Not supported.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    psk: Option<String>,
    /// Not supported.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    dhchap_key: Option<String>,
    /// Not supported.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    dhchap_ctrlr_key: Option<String>,
    /// Not supported.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    hostaddr: Option<String>,
    /// Not supported.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    hostsvcid: Option<String>,
    /// Without effect.
    #[serde(default, skip_serializing)]
    priority: Option<String>,
    /// Without effect: namespaces with metadata are refused.
    #[serde(default, skip_serializing)]
    prchk_reftag: Option<bool>,
    /// Without effect: namespaces with metadata are refused.
    #[serde(default, skip_serializing)]
    prchk_guard: Option<bool>,
    /// Without effect.
    #[serde(default, skip_serializing)]
    fabrics_connect_timeout_us: Option<u64>,
    /// Without effect: all that are made are told.
    #[serde(default, skip_serializing)]
    max_bdevs: Option<u32>,
    /// Without effect.
    #[serde(default, skip_serializing)]
    allow_unrecognized_csi: Option<bool>,
    /// Without effect.
    #[serde(default, skip_serializing)]
    disable_sq_flow_control: Option<bool>,
    /// Without effect.
    #[serde(default, skip_serializing)]
    multipath_opts: Option<Value>,
}

/// Which paths a call is about.
#[derive(Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
#[expect(dead_code, reason = "some are taken and have no effect")]
struct Detach {
    /// Name of the controller.
    name: String,
    /// Of one path: its transport, tcp.
    #[serde(default)]
    trtype: Option<String>,
    /// Of one path: its IP address. Default: all paths, and with the last one the bdevs
    #[serde(default)]
    traddr: Option<String>,
    /// Of one path: the family of its address.
    #[serde(default)]
    adrfam: Option<String>,
    /// Of one path: its port.
    #[serde(default)]
    trsvcid: Option<String>,
    /// Of one path: the name of its subsystem.
    #[serde(default)]
    subnqn: Option<String>,
    /// Without effect.
    #[serde(default)]
    hostaddr: Option<String>,
    /// Without effect.
    #[serde(default)]
    hostsvcid: Option<String>,
}

#[derive(Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
struct OneOrAll {
    /// Name of one. Default: all
    #[serde(default)]
    name: Option<String>,
}

#[derive(Default, Deserialize, Serialize, JsonSchema)]
#[serde(deny_unknown_fields)]
#[expect(dead_code, reason = "some are taken and have no effect")]
struct SetOptions {
    /// Milliseconds within which a controller has to hear of this host, or it ends all that it carries out for it. Default:
    /// 10000
    #[serde(default)]
    keep_alive_timeout_ms: Option<u64>,
    /// Microseconds without an answer to a command after which a path is connected anew; 0: without end. Default:
    /// 30000000
    #[serde(default)]
    timeout_us: Option<u64>,
    /// What is done then: "none" is as a timeout_us of 0, "reset" what there is. Default: reset
    #[serde(default)]
    action_on_timeout: Option<String>,
    /// Milliseconds that a controller may take to be connected to. Default: 4000
    #[serde(default)]
    tcp_connect_timeout_ms: Option<u64>,
    /// See bdev_nvme_attach_controller.
    #[serde(default)]
    ctrlr_loss_timeout_sec: Option<i64>,
    /// See bdev_nvme_attach_controller.
    #[serde(default)]
    reconnect_delay_sec: Option<i64>,
    /// See bdev_nvme_attach_controller.
    #[serde(default)]
    fast_io_fail_timeout_sec: Option<i64>,
    /// Without effect: what a guest flushes is flushed.
    #[serde(default, skip_serializing)]
    enable_flush: Option<bool>,
    /// Without effect.
    #[serde(default, skip_serializing)]
    timeout_admin_us: Option<u64>,
    /// Without effect.
    #[serde(default, skip_serializing)]
    arbitration_burst: Option<u32>,
    /// Without effect.
    #[serde(default, skip_serializing)]
    low_priority_weight: Option<u32>,
    /// Without effect.
    #[serde(default, skip_serializing)]
    medium_priority_weight: Option<u32>,
    /// Without effect.
    #[serde(default, skip_serializing)]
    high_priority_weight: Option<u32>,
    /// Without effect: nothing is polled.
    #[serde(default, skip_serializing)]
    nvme_adminq_poll_period_us: Option<u64>,
    /// Without effect: nothing is polled.
    #[serde(default, skip_serializing)]
    nvme_ioq_poll_period_us: Option<u64>,
    /// Without effect.
    #[serde(default, skip_serializing)]
    io_queue_requests: Option<u32>,
    /// Without effect.
    #[serde(default, skip_serializing)]
    delay_cmd_submit: Option<bool>,
    /// Without effect.
    #[serde(default, skip_serializing)]
    transport_retry_count: Option<u32>,
    /// Without effect.
    #[serde(default, skip_serializing)]
    bdev_retry_count: Option<i32>,
    /// Without effect.
    #[serde(default, skip_serializing)]
    transport_ack_timeout: Option<u32>,
    /// Without effect: I/O goes back to a better path at once.
    #[serde(default, skip_serializing)]
    disable_auto_failback: Option<bool>,
    /// Without effect: a namespace without UUID has one made of what identifies it.
    #[serde(default, skip_serializing)]
    generate_uuids: Option<bool>,
    /// Without effect.
    #[serde(default, skip_serializing)]
    transport_tos: Option<u32>,
    /// Without effect.
    #[serde(default, skip_serializing)]
    nvme_error_stat: Option<bool>,
    /// Without effect.
    #[serde(default, skip_serializing)]
    rdma_srq_size: Option<u32>,
    /// Without effect.
    #[serde(default, skip_serializing)]
    io_path_stat: Option<bool>,
    /// Without effect.
    #[serde(default, skip_serializing)]
    allow_accel_sequence: Option<bool>,
    /// Without effect.
    #[serde(default, skip_serializing)]
    rdma_max_cq_size: Option<u32>,
    /// Without effect.
    #[serde(default, skip_serializing)]
    rdma_cm_event_timeout_ms: Option<u32>,
    /// Without effect.
    #[serde(default, skip_serializing)]
    rdma_umr_per_io: Option<bool>,
    /// Without effect.
    #[serde(default, skip_serializing)]
    dhchap_digests: Option<Vec<String>>,
    /// Without effect.
    #[serde(default, skip_serializing)]
    dhchap_dhgroups: Option<Vec<String>>,
    /// Without effect.
    #[serde(default, skip_serializing)]
    multipath_opts: Option<Value>,
}

/// Where a controller is.
#[derive(Serialize, JsonSchema)]
struct Trid {
    trtype: &'static str,
    adrfam: &'static str,
    traddr: String,
    trsvcid: String,
    subnqn: String,
}

#[derive(Serialize, JsonSchema)]
struct Host {
    nqn: String,
    addr: String,
    svcid: String,
}

/// A path.
#[derive(Serialize, JsonSchema)]
struct PathOfController {
    /// "enabled", or "failed": there is no connection.
    state: &'static str,
    trid: Trid,
    cntlid: u16,
    host: Host,
    /// Why there is no connection (ours).
    #[serde(skip_serializing_if = "Option::is_none")]
    problem: Option<String>,
}

#[derive(Serialize, JsonSchema)]
struct ControllerInfo {
    name: String,
    ctrlrs: Vec<PathOfController>,
}

#[derive(Serialize, JsonSchema)]
struct Transport {
    trtype: &'static str,
    traddr: String,
    trsvcid: String,
    adrfam: &'static str,
}

#[derive(Serialize, JsonSchema)]
struct IoPath {
    bdev_name: String,
    cntlid: u16,
    /// I/O goes there.
    current: bool,
    connected: bool,
    /// The namespace can be used there.
    accessible: bool,
    transport: Transport,
}

#[derive(Serialize, JsonSchema)]
struct PollGroup {
    /// Name of the controller's thread.
    thread: String,
    io_paths: Vec<IoPath>,
}

#[derive(Serialize, JsonSchema)]
struct IoPaths {
    poll_groups: Vec<PollGroup>,
}

impl From<CreateError> for NotMade {
    fn from(e: CreateError) -> NotMade {
        let errno = if e.passes { Errno::Io } else { Errno::Inval };
        NotMade { error: Error::os(errno, &e), passes: e.passes }
    }
}

/// The bdevs of the controller of that name, in order.
pub fn disks(registry: &Registry, name: &str) -> Vec<Arc<Disk>> {
    let all = registry.list().into_iter();
    let mut disks: Vec<_> = all
        .filter_map(|bdev| registry.get_as::<Disk>(bdev.name()))
        .filter(|disk| disk.controller().name() == name)
        .collect();
    disks.sort_by_key(|disk| disk.index());
    disks
}

/// All controllers, in the order of their names, or the one of that name.
fn controllers(app: &App, name: Option<&str>) -> Result<Vec<Controller>, Error> {
    let all = app.registry.list().into_iter();
    let disks = all.filter_map(|bdev| app.registry.get_as::<Disk>(bdev.name()));
    let mut found: Vec<Controller> = disks.map(|disk| disk.controller().clone()).collect();
    found.sort_by(|a, b| a.name().cmp(b.name()));
    found.dedup_by(|a, b| a.name() == b.name());
    let Some(name) = name else { return Ok(found) };
    found.retain(|controller| controller.name() == name);
    match found.is_empty() {
        true => Err(no_controller(name)),
        false => Ok(found),
    }
}

fn no_controller(name: &str) -> Error {
    Error::os(Errno::NoDev, format_args!("there is no NVMe controller {name}"))
}

fn wrong(name: &str, why: impl std::fmt::Display) -> Error {
    Error::os(Errno::Inval, format_args!("controller {name}: {why}"))
}

/// This host's name: the same each time.
fn own_nqn() -> String {
    let id = std::fs::read_to_string("/etc/machine-id").unwrap_or_default();
    let uuid = match id.trim().is_empty() {
        true => Uuid::new_v4(),
        false => Uuid::new_v5(&HOST_SPACE, id.trim().as_bytes()),
    };
    format!("nqn.2014-08.org.nvmexpress:uuid:{uuid}")
}

/// What [`SET_OPTIONS`] has set.
fn options(app: &App) -> SetOptions {
    let config = app.config();
    let item = config.get(NVME_OPTIONS_KEY);
    let params = item.map(|item| Value::Object(item.call.params.clone()));
    params.and_then(|params| SetOptions::deserialize(params).ok()).unwrap_or_default()
}

impl SetOptions {
    fn check(&self) -> Result<(), Error> {
        let bad = |why: String| Err(Error::os(Errno::Inval, why));
        if self.keep_alive_timeout_ms.is_some_and(|ms| !(100..=3_600_000).contains(&ms)) {
            return bad(
                "keep_alive_timeout_ms is 100 to 3600000: without it nobody knows when a controller that is lost \
                 has ended what it had to do"
                    .to_owned(),
            );
        }
        if self.tcp_connect_timeout_ms.is_some_and(|ms| ms > 60_000) {
            return bad("tcp_connect_timeout_ms is 0 to 60000".to_owned());
        }
        if let Some(action) = &self.action_on_timeout
            && !["none", "reset"].contains(&action.as_str())
        {
            return bad(format!("action_on_timeout is none or reset, not {action}"));
        }
        let given = [
            ("ctrlr_loss_timeout_sec", self.ctrlr_loss_timeout_sec, -1),
            ("reconnect_delay_sec", self.reconnect_delay_sec, 0),
            ("fast_io_fail_timeout_sec", self.fast_io_fail_timeout_sec, 0),
        ];
        for (what, given, least) in given {
            if given.is_some_and(|seconds| !(least..=SECONDS_MAX).contains(&seconds)) {
                return bad(format!("{what} is {least} to {SECONDS_MAX}"));
            }
        }
        Ok(())
    }

    fn timeout(&self) -> Option<Duration> {
        let us = match self.action_on_timeout.as_deref() {
            Some("none") => 0,
            _ => self.timeout_us.unwrap_or(TIMEOUT_US),
        };
        Some(us).filter(|us| *us != 0).map(Duration::from_micros)
    }
}

impl Attach {
    /// Its paths, the first one first.
    fn addresses(&self) -> Result<Vec<Address>, Error> {
        let first = Address::parse(&self.traddr, self.trsvcid.as_deref(), self.adrfam.as_deref());
        let others =
            self.paths.iter().map(|p| Address::parse(&p.traddr, p.trsvcid.as_deref(), None));
        let all: Result<Vec<_>, _> = std::iter::once(first).chain(others).collect();
        all.map_err(|why| wrong(&self.name, why))
    }

    fn check(&self, app: &App) -> Result<(), Error> {
        check_name(&self.name)?;
        if !self.trtype.eq_ignore_ascii_case("tcp") {
            return Err(Error::os(
                Errno::NotSup,
                format_args!("controller {}: trtype is tcp, not {}", self.name, self.trtype),
            ));
        }
        unsupported(
            ATTACH,
            &[
                ("psk", self.psk.is_some()),
                ("dhchap_key", self.dhchap_key.is_some()),
                ("dhchap_ctrlr_key", self.dhchap_ctrlr_key.is_some()),
                ("hostaddr", self.hostaddr.is_some()),
                ("hostsvcid", self.hostsvcid.is_some()),
            ],
        )?;
        if !app.network {
            return Err(Error::os(
                Errno::NotSup,
                format_args!(
                    "controller {}: the target may make no network connections: start it with --network",
                    self.name
                ),
            ));
        }
        let subnqn = self.subnqn.as_deref().unwrap_or_default();
        let checked = check_nqn("subnqn", subnqn).and_then(|()| match &self.hostnqn {
            None => Ok(()),
            Some(name) => check_nqn("hostnqn", name),
        });
        checked.map_err(|why| wrong(&self.name, why))?;
        match self.multipath.as_deref() {
            None | Some("disable" | "failover" | "multipath") => {}
            Some(other) => {
                let why = format!("multipath is disable, failover or multipath, not {other}");
                return Err(wrong(&self.name, why));
            }
        }
        if self.num_io_queues == Some(0) {
            return Err(wrong(&self.name, "num_io_queues is 1 or more"));
        }
        let own = SetOptions {
            ctrlr_loss_timeout_sec: self.ctrlr_loss_timeout_sec,
            reconnect_delay_sec: self.reconnect_delay_sec,
            fast_io_fail_timeout_sec: self.fast_io_fail_timeout_sec,
            ..SetOptions::default()
        };
        own.check().map_err(|e| wrong(&self.name, e.message))
    }

    fn options(&self, app: &App) -> Options {
        let set = options(app);
        let given = |own: Option<i64>, set: Option<i64>| {
            own.filter(|n| *n != 0).or_else(|| set.filter(|n| *n != 0))
        };
        let seconds = |n: i64| Duration::from_secs(n.unsigned_abs());
        let loss = given(self.ctrlr_loss_timeout_sec, set.ctrlr_loss_timeout_sec);
        let fast = given(self.fast_io_fail_timeout_sec, set.fast_io_fail_timeout_sec);
        let give_up = fast.or(loss).unwrap_or(LOSS_S);
        let reconnect = given(self.reconnect_delay_sec, set.reconnect_delay_sec);
        let connect_ms = set.tcp_connect_timeout_ms.filter(|ms| *ms != 0);
        Options {
            name: self.name.clone(),
            subnqn: self.subnqn.clone().unwrap_or_default(),
            hostnqn: self.hostnqn.clone().unwrap_or_else(own_nqn),
            header_digest: self.hdgst.unwrap_or(false),
            data_digest: self.ddgst.unwrap_or(false),
            queues: self.num_io_queues.unwrap_or(1).min(QUEUES_MAX) as u16,
            keep_alive: Duration::from_millis(set.keep_alive_timeout_ms.unwrap_or(KEEP_ALIVE_MS)),
            connect_within: Duration::from_millis(connect_ms.unwrap_or(CONNECT_MS)),
            reconnect_delay: seconds(reconnect.unwrap_or(RECONNECT_S)),
            give_up: (give_up > 0).then(|| seconds(give_up)),
            timeout: set.timeout(),
            write_through: self.write_through,
            expected: self.namespaces.iter().map(|e| (e.nsid, e.uuid.0, e.block_size)).collect(),
        }
    }
}

fn names_of(disks: &[Arc<Disk>]) -> Vec<String> {
    disks.iter().map(|disk| disk.name().to_owned()).collect()
}

fn attach(app: &App, mut p: Attach, item: Option<&Item>) -> Result<Vec<String>, NotMade> {
    p.check(app)?;
    let addresses = p.addresses()?;
    if item.is_none()
        && let Some(there) = controllers(app, Some(&p.name)).ok().and_then(|mut all| all.pop())
    {
        return Ok(add_path(app, &p, &there, addresses[0])?);
    }
    // One that waits for its target; or a bdev, as both are recorded under their names.
    let recorded = app.config().get(&bdev_key(&p.name)).map(is_nvme);
    if let Some(is_controller) = recorded.filter(|_| item.is_none()) {
        let why = match is_controller {
            true => format!("there is a controller {} already, which is not connected", p.name),
            false => format!("there is a bdev {}: give the controller another name", p.name),
        };
        return Err(Error::os(Errno::Exist, why).into());
    }
    let options = p.options(app);
    p.hostnqn = Some(options.hostnqn.clone());
    let subnqn = options.subnqn.clone();
    let wait = app.waits.begin(format!("bdev {}", p.name), format!("{} to answer", addresses[0]));
    let (controller, disks) = Controller::create(&app.registry, options, &addresses)?;
    drop(wait);
    if let Some(first) = disks.first() {
        app.flush_errors.attach_as(&p.name, &**first, Path::new(&subnqn));
    }
    p.namespaces = controller
        .namespaces()
        .into_iter()
        .map(|(nsid, uuid, block_size)| Expected { nsid, uuid: UuidText(uuid), block_size })
        .collect();
    for (n, disk) in disks.iter().enumerate() {
        let bdev: Arc<dyn Bdev> = disk.clone();
        let added = match item {
            Some(item) => app.add_restored(bdev, item),
            None => app.add_bdev(bdev),
        };
        if let Err(e) = added {
            for made in &disks[..n] {
                _ = app.registry.unregister(made.name());
            }
            return Err(e.into());
        }
    }
    record(app, &p);
    Ok(names_of(&disks))
}

/// Records a controller, unless it was detached meanwhile.
fn record(app: &App, p: &Attach) {
    let Some(disk) = disks(&app.registry, &p.name).pop() else { return };
    let mut config = app.config();
    config.record(ATTACH, p);
    let failure = disk.flush_latch().and_then(FlushLatch::failure);
    config.set_flush_failure(&bdev_key(&p.name), failure);
}

/// Adds a path to a controller that is there.
fn add_path(
    app: &App,
    p: &Attach,
    controller: &Controller,
    address: Address,
) -> Result<Vec<String>, Error> {
    let (name, is) = (&p.name, controller.options());
    if p.multipath.as_deref() == Some("disable") {
        return Err(Error::os(Errno::Exist, format!("there is a controller {name} already")));
    }
    let same = p.subnqn.as_deref() == Some(is.subnqn.as_str())
        && p.hostnqn.as_ref().is_none_or(|given| *given == is.hostnqn)
        && p.hdgst.unwrap_or(false) == is.header_digest
        && p.ddgst.unwrap_or(false) == is.data_digest;
    if !same {
        let why =
            "all its paths are to the same subsystem, of the same host, with the same digests";
        return Err(wrong(name, why));
    }
    if controller.paths().iter().any(|path| path.address == address) {
        let why = format!("controller {name} has the path {address} already");
        return Err(Error::os(Errno::Exist, why));
    }
    controller.add_path(address).map_err(|e| NotMade::from(e).error)?;
    let key = bdev_key(name);
    let mut config = app.config();
    let mut paths = recorded_paths(config.get(&key));
    paths.push(PathParams { traddr: address.traddr(), trsvcid: Some(address.trsvcid()) });
    config.set_param(&key, "paths", json!(paths));
    drop(config);
    Ok(names_of(&disks(&app.registry, name)))
}

fn recorded_paths(item: Option<&Item>) -> Vec<PathParams> {
    let paths = item.and_then(|item| item.call.params.get("paths"));
    paths.and_then(|paths| Vec::deserialize(paths).ok()).unwrap_or_default()
}

/// Whether `item` attaches a controller.
pub fn is_nvme(item: &Item) -> bool {
    item.call.method == ATTACH
}

fn params(call: &Call) -> Result<Attach, Error> {
    let params = Value::Object(call.params.clone());
    let wrong = |e| Error::params(format!("wrong parameters of {ATTACH}: {e}"));
    Attach::deserialize(params).map_err(wrong)
}

/// Whether the path of `call`, which attaches a controller, is configured already.
pub fn is_there(app: &App, call: &Call) -> bool {
    let Ok(p) = params(call) else { return false };
    let recorded = app.config().get(&bdev_key(&p.name)).map(|item| item.call.clone());
    let Some(Ok(there)) = recorded.as_ref().map(params) else { return false };
    let (Ok(asked), Ok(has)) = (p.addresses(), there.addresses()) else { return false };
    asked.iter().all(|address| has.contains(address))
}

/// Attaches the controller of `item`, one of [`is_nvme`], again; not if the item is deleted or replaced meanwhile.
///
/// # Errors
/// As those of the method; or it is not wanted any more. Whether the target may be there later.
pub fn restore(app: &App, item: &Item) -> Result<(), (Error, bool)> {
    let made = params(&item.call).map_err(NotMade::from).and_then(|p| attach(app, p, Some(item)));
    made.map(drop).map_err(|e| (e.error, e.passes))
}

/// Asks for the namespaces of `item`, one of [`is_nvme`], which another process may use meanwhile.
///
/// # Errors
/// In one clause: the target does not answer, lets nobody in, or has none.
pub fn ask(app: &App, item: &Item) -> Result<(), String> {
    let p = params(&item.call).map_err(|e| e.message)?;
    p.check(app).map_err(|e| e.message)?;
    let addresses = p.addresses().map_err(|e| e.message)?;
    nvme::reach(&p.options(app), &addresses)
}

fn detach(app: &App, p: &Detach) -> Result<bool, Error> {
    let found = controllers(app, Some(&p.name));
    let Some(controller) = found.ok().and_then(|mut all| all.pop()) else {
        // One that could not be restored is forgotten.
        let is_known = app.config().get(&bdev_key(&p.name)).is_some_and(is_nvme);
        return match is_known {
            true => app.remove_bdev(&p.name).map(|()| true),
            false => Err(no_controller(&p.name)),
        };
    };
    let paths = controller.paths();
    let is_meant = |path: &&nvme::PathInfo| {
        let is = |given: &Option<String>, has: &str| {
            given.as_ref().is_none_or(|given| given.eq_ignore_ascii_case(has))
        };
        is(&p.trtype, "tcp")
            && is(&p.traddr, &path.address.traddr())
            && is(&p.trsvcid, &path.address.trsvcid())
            && is(&p.adrfam, path.address.adrfam())
            && is(&p.subnqn, &controller.options().subnqn)
    };
    let gone: Vec<_> = paths.iter().filter(is_meant).map(|path| path.address).collect();
    if gone.is_empty() {
        let why = format!("controller {} has no such path", p.name);
        return Err(Error::os(Errno::NoDev, why));
    }
    if gone.len() < paths.len() {
        gone.iter().for_each(|address| controller.remove_path(*address));
        let left: Vec<_> =
            paths.iter().map(|path| path.address).filter(|path| !gone.contains(path)).collect();
        forget_paths(app, &p.name, &left);
        return Ok(true);
    }
    let closing = controller.closing();
    drop(controller);
    for disk in disks(&app.registry, &p.name) {
        let name = disk.name().to_owned();
        drop(disk);
        app.remove_bdev(&name)?;
    }
    let key = bdev_key(&p.name);
    app.restoring().remove(&key);
    app.config().forget(|item| item.key == key);
    if !closing.wait(CLOSE_TIMEOUT) {
        tracing::warn!("controller {} is detached, but still in use, or not closed yet", p.name);
    }
    Ok(true)
}

/// Only `left` are its paths from now on.
fn forget_paths(app: &App, name: &str, left: &[Address]) {
    let key = bdev_key(name);
    let mut config = app.config();
    let (first, others) = match left {
        [first, others @ ..] => (first, others),
        [] => return,
    };
    let others = others
        .iter()
        .map(|path| PathParams { traddr: path.traddr(), trsvcid: Some(path.trsvcid()) });
    let others: Vec<_> = others.collect();
    config.set_param(&key, "traddr", json!(first.traddr()));
    config.set_param(&key, "trsvcid", json!(first.trsvcid()));
    config.set_param(&key, "adrfam", json!(first.adrfam()));
    config.set_param(&key, "paths", if others.is_empty() { Value::Null } else { json!(others) });
}

fn get_controllers(app: &App, p: &OneOrAll) -> Result<Vec<ControllerInfo>, Error> {
    let found = controllers(app, p.name.as_deref())?;
    let info = |controller: Controller| {
        let Options { subnqn, hostnqn, .. } = controller.options();
        let paths = controller.paths().into_iter().map(|path| PathOfController {
            state: if path.connected { "enabled" } else { "failed" },
            trid: Trid {
                trtype: "TCP",
                adrfam: path.address.adrfam(),
                traddr: path.address.traddr(),
                trsvcid: path.address.trsvcid(),
                subnqn: subnqn.clone(),
            },
            cntlid: path.cntlid,
            host: Host { nqn: hostnqn.clone(), addr: String::new(), svcid: String::new() },
            problem: path.problem,
        });
        ControllerInfo { name: controller.name().to_owned(), ctrlrs: paths.collect() }
    };
    Ok(found.into_iter().map(info).collect())
}

fn get_io_paths(app: &App, p: &OneOrAll) -> Result<IoPaths, Error> {
    if let Some(name) = &p.name {
        super::of_kind(app, name, Disk::PRODUCT)?;
    }
    let mut poll_groups = Vec::new();
    for controller in controllers(app, None)? {
        let mut io_paths = Vec::new();
        for disk in disks(&app.registry, controller.name()) {
            if p.name.as_ref().is_some_and(|name| name != disk.name()) {
                continue;
            }
            io_paths.extend(controller.paths().into_iter().map(|path| IoPath {
                bdev_name: disk.name().to_owned(),
                cntlid: path.cntlid,
                current: path.current[disk.index()],
                connected: path.connected,
                accessible: path.access[disk.index()].is_some_and(|access| access.is_usable()),
                transport: Transport {
                    trtype: "TCP",
                    traddr: path.address.traddr(),
                    trsvcid: path.address.trsvcid(),
                    adrfam: path.address.adrfam(),
                },
            }));
        }
        if !io_paths.is_empty() {
            poll_groups.push(PollGroup { thread: format!("nvme {}", controller.name()), io_paths });
        }
    }
    Ok(IoPaths { poll_groups })
}

fn set_options(app: &App, p: &SetOptions) -> Result<bool, Error> {
    p.check()?;
    let mut config = app.config();
    // What is not given stays as it was, as SPDK's client takes it.
    let before = config.get(NVME_OPTIONS_KEY).map(|item| item.call.params.clone());
    let mut all = before.unwrap_or_default();
    if let Ok(Value::Object(given)) = serde_json::to_value(p) {
        all.extend(given.into_iter().filter(|(_, value)| !value.is_null()));
    }
    config.record(SET_OPTIONS, &all);
    Ok(true)
}

/// Waits until what was unregistered has closed its connections, until `end`.
pub fn wait_closed(closing: Vec<(String, bdev::Closed)>, end: Instant) {
    for (controller, closing) in closing {
        if !closing.wait(end.saturating_duration_since(Instant::now())) {
            tracing::warn!(
                controller,
                "its target does not answer, so its connections are not closed in order"
            );
        }
    }
}

/// Adds the methods.
pub fn add(methods: &mut Methods, app: &Arc<App>) {
    let a = app.clone();
    methods
        .add(
            ATTACH,
            "Connect to an NVMe controller over TCP, and create a bdev of each of its namespaces; or add a path to one \
             that is attached. Where a connection is lost, I/O waits and what was not answered is sent again. An \
             lvstore on a bdev is loaded. Needs the option --network.",
            Flags::LONG_WRITE,
            move |p: Attach| attach(&a, p, None).map_err(|e| e.error),
        )
        .errors(&[Errno::Io, Errno::Exist, Errno::Inval, Errno::NotSup]);
    let a = app.clone();
    methods
        .add(
            "bdev_nvme_detach_controller",
            "Delete the bdevs of an NVMe controller, and disconnect; an lvstore on one is unloaded first. Or use one of \
             its paths no more.",
            Flags::LONG_WRITE,
            move |p: Detach| detach(&a, &p),
        )
        .errors(&[Errno::NoDev, Errno::Busy]);
    let a = app.clone();
    methods
        .add(
            "bdev_nvme_get_controllers",
            "Get all NVMe controllers, or one, with their paths.",
            Flags::READ,
            move |p: OneOrAll| get_controllers(&a, &p),
        )
        .errors(&[Errno::NoDev]);
    let a = app.clone();
    methods
        .add(
            "bdev_nvme_get_io_paths",
            "Get the paths of all bdevs on NVMe controllers, or of one bdev.",
            Flags::READ,
            move |p: OneOrAll| get_io_paths(&a, &p),
        )
        .errors(&[Errno::NoDev]);
    let a = app.clone();
    methods
        .add(
            SET_OPTIONS,
            "Set what holds for all NVMe controllers that are attached from now on.",
            Flags::WRITE,
            move |p: SetOptions| set_options(&a, &p),
        )
        .errors(&[Errno::Inval]);
}
