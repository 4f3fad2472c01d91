//! A controller, which is a subsystem by one or more paths, and its namespaces as bdevs.

use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
use std::sync::mpsc::{self, Sender};
use std::sync::{Arc, OnceLock};
use std::thread;
use std::time::{Duration, Instant};

use bdev::{
    Bdev, Channel, Closed, Features, FlushFailure, FlushLatch, Geometry, OpenError, Registry,
    Stats, SyncChannel, ThreadChannel, ThreadRequest, Threaded,
};
use crossbeam_queue::{ArrayQueue, SegQueue};
use parking_lot::Mutex;
use reactor::{IoContext, Waker};
use serde_json::{Value, json};
use uuid::Uuid;

use crate::address::Address;
use crate::ana::AnaState;
use crate::connect::{Association, Identity, establish};
use crate::identify::{self, NAMESPACES_MAX, Names, Namespace};
use crate::requests::Request;
use crate::units::{Unit, Units};
use crate::worker::Worker;

/// I/Os of all channels that the thread has not taken.
const QUEUE: usize = 4096;
/// How long I/O waits for an answer when the process ends.
const END_WITHIN: Duration = Duration::from_secs(2);
/// Paths of a controller at most.
pub const PATHS_MAX: usize = 8;

/// What is asked for.
#[derive(Clone, Debug)]
pub struct Options {
    /// Name of the controller, with which the names of its bdevs begin.
    pub name: String,
    /// Name of the subsystem.
    pub subnqn: String,
    /// Name of this host.
    pub hostnqn: String,
    /// Headers have digests.
    pub header_digest: bool,
    /// Data has digests.
    pub data_digest: bool,
    /// Queues for I/O; each is a connection.
    pub queues: u16,
    /// How often a controller has to hear of this host.
    pub keep_alive: Duration,
    /// How long a controller may take to be connected to.
    pub connect_within: Duration,
    /// Between two attempts to connect.
    pub reconnect_delay: Duration,
    /// Time without an answer after which I/O fails; `None`: never.
    pub give_up: Option<Duration>,
    /// Time without an answer after which a path is connected anew; `None`: never.
    pub timeout: Option<Duration>,
    /// Each write is durable when it is answered (FUA); `None`: where the target is another host and has a cache.
    pub write_through: Option<bool>,
    /// By number: which namespaces there have to be, with their identification and bytes of a block. None: whatever is
    /// there.
    pub expected: Vec<(u32, Uuid, u32)>,
}

/// Why there is no such controller.
#[derive(Debug, thiserror::Error)]
#[error("controller {name}: {why}")]
pub struct CreateError {
    /// Name of the controller.
    pub name: String,
    /// The cause, as a clause.
    pub why: String,
    /// It may be there, or let in, later.
    pub passes: bool,
}

/// A path, as it is shown.
#[derive(Clone, Debug)]
pub struct PathInfo {
    /// Where it leads.
    pub address: Address,
    /// Number of the controller, as of the last time that there was a connection.
    pub cntlid: u16,
    /// There is a connection.
    pub connected: bool,
    /// Connections that there were.
    pub connections: u64,
    /// Why there is none.
    pub problem: Option<String>,
    /// By namespace of the controller: how it can be used there; `None`: it is not there.
    pub access: Vec<Option<AnaState>>,
    /// By namespace: I/O goes there.
    pub current: Vec<bool>,
}

/// What the thread is asked for.
pub(crate) enum Order {
    /// Use another path, which is connected to, or will be.
    Add(Address, Option<Box<Association>>),
    /// Use one no more.
    Remove(Address),
}

/// What the controller, its thread and its channels share.
pub(crate) struct Shared {
    pub options: Options,
    pub identity: Identity,
    pub units: Arc<Units>,
    pub names: Names,
    /// There is a volatile cache, to be flushed.
    pub cache: bool,
    pub write_through: bool,
    queue: ArrayQueue<Request>,
    waker: OnceLock<Waker>,
    orders: SegQueue<Order>,
    /// The paths that it is to have. Orders are given with it held.
    paths: Mutex<Vec<Address>>,
    stop: AtomicBool,
    /// The process ends: nobody waits for long any more.
    ending: AtomicBool,
    /// Nobody answered for too long: I/O fails until there is a connection.
    given_up: AtomicBool,
    pub latch: FlushLatch,
    shown: Mutex<Vec<PathInfo>>,
    closing: Closed,
    /// Is told its name when a namespace has come.
    found: Sender<String>,
}

impl Shared {
    pub(crate) fn name(&self) -> &str {
        &self.options.name
    }

    /// Name of the bdev of a namespace.
    pub(crate) fn bdev(&self, unit: usize) -> String {
        format!("{}n{}", self.options.name, self.units[unit].namespace.nsid)
    }

    #[inline]
    pub(crate) fn has_given_up(&self) -> bool {
        self.given_up.load(Relaxed)
    }

    pub(crate) fn set_given_up(&self, given_up: bool) {
        self.given_up.store(given_up, Relaxed);
    }

    pub(crate) fn give_up(&self) -> Option<Duration> {
        let give_up = self.options.give_up;
        match self.ending.load(Relaxed) {
            true => Some(give_up.map_or(END_WITHIN, |most| most.min(END_WITHIN))),
            false => give_up,
        }
    }

    pub(crate) fn is_stopped(&self) -> bool {
        self.stop.load(Relaxed)
    }

    pub(crate) fn set_waker(&self, waker: Waker) {
        _ = self.waker.set(waker);
    }

    pub(crate) fn wake(&self) {
        if let Some(waker) = self.waker.get() {
            waker.wake();
        }
    }

    pub(crate) fn closed(&self) {
        self.closing.tell();
    }

    pub(crate) fn show(&self, paths: Vec<PathInfo>) {
        *self.shown.lock() = paths;
    }

    pub(crate) fn next_request(&self) -> Option<Request> {
        self.queue.pop()
    }

    pub(crate) fn has_requests(&self) -> bool {
        !self.queue.is_empty()
    }

    pub(crate) fn next_order(&self) -> Option<Order> {
        self.orders.pop()
    }

    /// Whether the volatile cache of a target goes with a path: that of another host may have gone down.
    pub(crate) fn loses_cache(&self, address: &Address) -> bool {
        self.cache && !self.write_through && !address.is_local()
    }

    /// Numbers of the namespaces that are bdevs or are to be.
    pub(crate) fn known(&self) -> Vec<u32> {
        let units = self.units.iter().map(|unit| unit.namespace.nsid);
        units.chain(self.options.expected.iter().map(|(nsid, ..)| *nsid)).collect()
    }

    /// With how many of the namespaces that are bdevs guests can go on by another association.
    ///
    /// # Errors
    /// A clause: with none, as what is there is not what it was; or not with its controller.
    pub(crate) fn usable(&self, with: &Association) -> Result<usize, String> {
        if with.controller.cache && !self.cache {
            return Err("its controller has a volatile cache now".to_owned());
        }
        let (mut usable, mut refused) = (0, None);
        for is in &with.namespaces {
            let Some(at) = self.units.position(is.nsid) else { continue };
            match self.units[at].can_go_on(is, &with.controller, self.write_through) {
                Ok(()) => usable += 1,
                Err(why) => _ = refused.get_or_insert(why),
            }
        }
        match refused {
            Some(why) if usable == 0 => Err(why),
            _ => Ok(usable),
        }
    }

    /// A path has a namespace: its number among the units. One that is not among them yet becomes a bdev.
    ///
    /// # Errors
    /// A clause: it is not to be used there.
    pub(crate) fn accept(
        &self,
        found: &Namespace,
        with: &identify::Controller,
    ) -> Result<usize, String> {
        match self.units.position(found.nsid) {
            Some(at) => self.units[at].can_go_on(found, with, self.write_through).map(|()| at),
            None => self.add(found, with),
        }
    }

    fn add(&self, found: &Namespace, with: &identify::Controller) -> Result<usize, String> {
        is_expected(&self.options.expected, found)?;
        let unit = Unit::new(*found, with, self.write_through);
        let at = self.units.add(unit).ok_or_else(|| {
            format!("namespace {} is one of more than {NAMESPACES_MAX}", found.nsid)
        })?;
        tracing::info!(controller = self.name(), "namespace {} is there", found.nsid);
        _ = self.found.send(self.name().to_owned());
        Ok(at)
    }
}

/// Whether a namespace is what one of its number has to be, if there is any such.
///
/// # Errors
/// A clause: it is another one.
fn is_expected(expected: &[(u32, Uuid, u32)], found: &Namespace) -> Result<(), String> {
    match expected.iter().find(|(nsid, ..)| *nsid == found.nsid) {
        Some((nsid, uuid, size))
            if found.identity != *uuid || found.geometry.block_size != *size =>
        {
            Err(format!(
                "namespace {nsid} is another one than before: detach the controller to use what is there"
            ))
        }
        _ => Ok(()),
    }
}

/// Ends the controller's thread with its last user.
struct StopOnDrop(Arc<Shared>);

impl Drop for StopOnDrop {
    fn drop(&mut self) {
        self.0.stop.store(true, Relaxed);
        self.0.wake();
    }
}

/// A namespace, as its channels have it.
struct User {
    of: Arc<StopOnDrop>,
    unit: u16,
}

impl User {
    #[inline]
    fn unit(&self) -> &Unit {
        &self.of.0.units[usize::from(self.unit)]
    }
}

impl Threaded for User {
    #[inline]
    fn geometry(&self) -> Geometry {
        self.unit().geometry()
    }
    fn features(&self) -> &Features {
        &self.unit().features
    }
    fn latch(&self) -> &FlushLatch {
        &self.of.0.latch
    }
    fn flushes(&self) -> bool {
        self.of.0.cache
    }
    fn has_given_up(&self) -> bool {
        self.of.0.has_given_up()
    }
    fn compared_max(&self) -> u64 {
        self.unit().most.compared
    }
    fn hand_over(&self, request: ThreadRequest) -> Result<(), ThreadRequest> {
        let pushed = self.of.0.queue.push(Request { of: request, unit: self.unit });
        self.of.0.wake();
        pushed.map_err(|request| request.of)
    }
}

/// A subsystem, by one or more of its controllers. It ends with the last of its bdevs and of those who have it.
#[derive(Clone)]
pub struct Controller {
    shared: Arc<Shared>,
    stop: Arc<StopOnDrop>,
}

impl Controller {
    /// Connects by the first of `paths` that can be, the others later; takes some seconds at most. `registry` is
    /// told when the size of a namespace changes, and `found` the name of the controller when namespaces come later.
    ///
    /// # Errors
    /// None is there or lets this host in; or none has a namespace that a bdev can be on, and that is expected.
    pub fn create(
        registry: &Registry,
        options: Options,
        paths: &[Address],
        found: Sender<String>,
    ) -> Result<Controller, CreateError> {
        let name = options.name.clone();
        let failed = |why: String, passes| CreateError { name: name.clone(), why, passes };
        let identity = identity_of(&options);
        let known: Vec<u32> = options.expected.iter().map(|(nsid, ..)| *nsid).collect();
        let mut first = None;
        let mut why = "it has no path".to_owned();
        for address in paths {
            let end = Instant::now() + options.connect_within;
            match establish(address, &identity, &known, end) {
                Ok(association) => {
                    first = Some((*address, association));
                    break;
                }
                Err(e) => why = format!("{address}: {e}"),
            }
        }
        let Some((address, association)) = first else { return Err(failed(why, true)) };
        let Association { controller, namespaces, names, .. } = &association;
        let is_there = |(nsid, uuid, block_size): &(u32, Uuid, u32)| {
            namespaces.iter().any(|is| {
                (is.nsid, is.identity, is.geometry.block_size) == (*nsid, *uuid, *block_size)
            })
        };
        let missing = options.expected.iter().find(|each| !is_there(each));
        if let Some((nsid, ..)) = missing {
            let why = format!(
                "{address}: namespace {nsid} is not there, or another one than before: detach the controller to \
                 use what is there"
            );
            // The others are used all the same.
            if !options.expected.iter().any(is_there) {
                return Err(failed(why, true));
            }
        }
        let cache = controller.cache;
        let is_local = paths.iter().all(Address::is_local);
        let write_through = cache && options.write_through.unwrap_or(!is_local);
        let used = namespaces.iter().filter(|each| is_expected(&options.expected, each).is_ok());
        let units = used.map(|namespace| Unit::new(*namespace, controller, write_through));
        let shared = Arc::new(Shared {
            identity,
            units: Arc::new(Units::new(units)),
            names: names.clone(),
            cache,
            write_through,
            queue: ArrayQueue::new(QUEUE),
            waker: OnceLock::new(),
            orders: SegQueue::new(),
            paths: Mutex::new(paths.to_vec()),
            stop: AtomicBool::new(false),
            ending: AtomicBool::new(false),
            given_up: AtomicBool::new(false),
            latch: FlushLatch::default(),
            shown: Mutex::default(),
            closing: Closed::default(),
            found,
            options,
        });
        shared.orders.push(Order::Add(address, Some(Box::new(association))));
        for other in paths.iter().filter(|other| **other != address) {
            shared.orders.push(Order::Add(*other, None));
        }
        let stop = Arc::new(StopOnDrop(Arc::clone(&shared)));
        let (tell, told) = mpsc::channel();
        let (for_thread, registry) = (Arc::clone(&shared), registry.clone());
        let work = move || match Worker::new(for_thread, registry) {
            Ok(worker) => worker.run(|| _ = tell.send(Ok(()))),
            Err(e) => _ = tell.send(Err(e)),
        };
        let os = |e: std::io::Error| failed(e.to_string(), false);
        thread::Builder::new().name("nvme".into()).spawn(work).map_err(os)?;
        told.recv().map_err(std::io::Error::other).and_then(|started| started).map_err(os)?;
        Ok(Controller { shared, stop })
    }

    /// A bdev for each of its namespaces, in order; one of a namespace is to be registered at a time.
    pub fn disks(&self) -> Vec<Arc<Disk>> {
        let units = 0..self.shared.units.len();
        units.map(|unit| Arc::new(Disk::new(self, unit))).collect()
    }

    /// Connects by another path to the same subsystem; takes some seconds at most.
    ///
    /// # Errors
    /// It is not there, or leads elsewhere.
    pub fn add_path(&self, address: Address) -> Result<(), CreateError> {
        let shared = &self.shared;
        let failed = |why: String, passes| CreateError {
            name: shared.name().to_owned(),
            why: format!("{address}: {why}"),
            passes,
        };
        if self.addresses().len() >= PATHS_MAX {
            return Err(failed(format!("it has {PATHS_MAX} paths already"), false));
        }
        let end = Instant::now() + shared.options.connect_within;
        let association = establish(&address, &shared.identity, &shared.known(), end)
            .map_err(|why| failed(why, true))?;
        if shared.usable(&association).map_err(|why| failed(why, false))? == 0 {
            return Err(failed("none of its namespaces is there".to_owned(), false));
        }
        if self.paths().iter().any(|path| path.connected && path.cntlid == association.id) {
            return Err(failed("it leads to the same controller".to_owned(), false));
        }
        let mut wanted = shared.paths.lock();
        if wanted.len() >= PATHS_MAX {
            return Err(failed(format!("it has {PATHS_MAX} paths already"), false));
        }
        if wanted.contains(&address) {
            return Err(failed("it has this path already".to_owned(), false));
        }
        wanted.push(address);
        shared.orders.push(Order::Add(address, Some(Box::new(association))));
        shared.wake();
        Ok(())
    }

    /// Uses paths no more, once what is in flight there is over. `false`: it would have none left, and nothing
    /// changed.
    #[must_use]
    pub fn remove_paths(&self, gone: &[Address]) -> bool {
        let shared = &self.shared;
        let mut wanted = shared.paths.lock();
        if wanted.iter().all(|path| gone.contains(path)) {
            return false;
        }
        wanted.retain(|path| !gone.contains(path));
        for address in gone {
            shared.orders.push(Order::Remove(*address));
        }
        shared.wake();
        true
    }

    /// The paths that it is to have, in the order in which they came.
    pub fn addresses(&self) -> Vec<Address> {
        self.shared.paths.lock().clone()
    }

    /// Its name.
    pub fn name(&self) -> &str {
        self.shared.name()
    }

    /// What was asked for.
    pub fn options(&self) -> &Options {
        &self.shared.options
    }

    /// Its paths, in the order in which they came.
    pub fn paths(&self) -> Vec<PathInfo> {
        self.shared.shown.lock().clone()
    }

    /// By number: its namespaces, with their identification and bytes of a block; also those that are expected and
    /// are not there.
    pub fn namespaces(&self) -> Vec<(u32, Uuid, u32)> {
        let of = |unit: &Unit| {
            let Namespace { nsid, identity, geometry, .. } = unit.namespace;
            (nsid, identity, geometry.block_size)
        };
        let mut all: Vec<_> = self.shared.units.iter().map(of).collect();
        all.extend(self.missing());
        all.sort_unstable_by_key(|(nsid, ..)| *nsid);
        all
    }

    /// As [`Controller::namespaces`]: those that are expected and have not been there.
    pub fn missing(&self) -> Vec<(u32, Uuid, u32)> {
        let Shared { options, units, .. } = &*self.shared;
        let missing = options.expected.iter().filter(|(nsid, ..)| units.position(*nsid).is_none());
        missing.copied().collect()
    }

    /// Tells when its connections are closed.
    pub fn closing(&self) -> Closed {
        self.shared.closing.clone()
    }
}

/// Who connects, by what is asked for. The host's identifier is made of its name, so it is the same each time.
fn identity_of(options: &Options) -> Identity {
    let hostnqn = &options.hostnqn;
    let own = hostnqn.rsplit_once("uuid:").and_then(|(_, uuid)| Uuid::parse_str(uuid).ok());
    Identity {
        subnqn: options.subnqn.clone(),
        hostnqn: hostnqn.clone(),
        host: own.unwrap_or_else(|| Uuid::new_v5(&Uuid::NAMESPACE_OID, hostnqn.as_bytes())),
        header_digest: options.header_digest,
        data_digest: options.data_digest,
        queues: options.queues,
        keep_alive: options.keep_alive,
    }
}

/// Connects, as no device, and finds out whether there are namespaces.
///
/// # Errors
/// In one clause: none of the paths leads to such a controller.
pub fn reach(options: &Options, paths: &[Address]) -> Result<(), String> {
    let identity = identity_of(options);
    let mut why = "it has no path".to_owned();
    for address in paths {
        match establish(address, &identity, &[], Instant::now() + options.connect_within) {
            Ok(_) => return Ok(()),
            Err(e) => why = format!("{address}: {e}"),
        }
    }
    Err(why)
}

/// The process ends, and serves no guest any more: what the rest of it asks of controllers that do not answer fails
/// after a moment.
pub fn end_all(registry: &Registry) {
    for bdev in registry.list() {
        if let Some(disk) = registry.get_as::<Disk>(bdev.name()) {
            let shared = &disk.controller.shared;
            shared.ending.store(true, Relaxed);
            shared.wake();
        }
    }
}

/// A namespace as a bdev.
pub struct Disk {
    controller: Controller,
    name: String,
    unit: usize,
    stats: Arc<Stats>,
}

impl Disk {
    /// What [`Bdev::product_name`] says, as SPDK's.
    pub const PRODUCT: &'static str = "NVMe disk";

    fn new(controller: &Controller, unit: usize) -> Disk {
        let name = controller.shared.bdev(unit);
        Disk { controller: controller.clone(), name, unit, stats: Stats::new() }
    }

    /// That of which it is a namespace.
    pub fn controller(&self) -> &Controller {
        &self.controller
    }

    /// Number of the namespace.
    pub fn nsid(&self) -> u32 {
        self.unit().namespace.nsid
    }

    /// Which of [`PathInfo::access`] it is.
    pub fn index(&self) -> usize {
        self.unit
    }

    fn unit(&self) -> &Unit {
        &self.controller.shared.units[self.unit]
    }

    /// Lets flushes of all namespaces of the controller through again after one has failed, if the target flushes
    /// them now; one that it does not have any more is left out. Returns what was latched. What was written before that failure may be lost all the same.
    ///
    /// # Errors
    /// The flush fails again, or cannot be tried; then the latch stays.
    pub fn clear_flush_failure(&self) -> Result<Option<FlushFailure>, String> {
        let latch = &self.controller.shared.latch;
        let failure = latch.clear();
        let flush = |unit| {
            let disk = Disk::new(&self.controller, unit);
            let mut channel = SyncChannel::open(&disk).map_err(|e| e.to_string())?;
            channel.flush().map_err(|e| e.to_string())
        };
        let paths = self.controller.paths();
        let is_there = |unit: &usize| {
            let mut up = paths.iter().filter(|path| path.connected).peekable();
            up.peek().is_none() || up.any(|path| path.access[*unit].is_some())
        };
        let all = 0..self.controller.shared.units.len();
        let flushed = all.filter(is_there).try_for_each(flush);
        if let (Err(_), Some(failure)) = (&flushed, failure) {
            latch.restore(failure);
        }
        flushed.map(|()| failure)
    }
}

impl Bdev for Disk {
    fn name(&self) -> &str {
        &self.name
    }
    fn aliases(&self) -> Vec<String> {
        Vec::new()
    }
    fn uuid(&self) -> Uuid {
        self.unit().namespace.identity
    }
    fn product_name(&self) -> &'static str {
        Disk::PRODUCT
    }
    fn geometry(&self) -> Geometry {
        self.unit().geometry()
    }
    fn features(&self) -> Features {
        self.unit().features
    }
    fn open(&self, io: &IoContext) -> Result<Box<dyn Channel>, OpenError> {
        let user = User { of: Arc::clone(&self.controller.stop), unit: self.unit as u16 };
        Ok(Box::new(ThreadChannel::new(user, io, self.stats.channel())))
    }
    fn driver_specific(&self) -> Value {
        let shared = &self.controller.shared;
        let Names { serial, model, firmware } = &shared.names;
        let paths = self.controller.paths();
        let nvme = paths.iter().map(|path| {
            let mut shown = json!({
                "trid": {
                    "trtype": "TCP",
                    "adrfam": path.address.adrfam(),
                    "traddr": path.address.traddr(),
                    "trsvcid": path.address.trsvcid(),
                    "subnqn": shared.options.subnqn,
                },
                "ctrlr_data": {
                    "cntlid": path.cntlid,
                    "model_number": model,
                    "serial_number": serial,
                    "firmware_revision": firmware,
                    "subnqn": shared.options.subnqn,
                },
                "ns_data": {
                    "id": self.unit().namespace.nsid,
                    "ana_state": path.access[self.unit].map_or("none", AnaState::name),
                },
                "connected": path.connected,
                "connections": path.connections,
                "current": path.current[self.unit],
                "write_through": shared.write_through,
                "compare_and_write_blocks": self.unit().most.compared,
            });
            if let Some(problem) = &path.problem {
                shown["problem"] = json!(problem);
            }
            shown
        });
        json!({"nvme": nvme.collect::<Vec<_>>(), "mp_policy": "active_passive"})
    }
    fn stats(&self) -> Option<&Arc<Stats>> {
        Some(&self.stats)
    }
    fn flush_latch(&self) -> Option<&FlushLatch> {
        Some(&self.controller.shared.latch)
    }
}
