//! Bdevs on namespaces of NVMe controllers over TCP, by SPDK's methods.
//!
//! What is recorded of a controller is one call, with all its paths and what its namespaces were, under its name.

mod call;
mod detach;
mod found;
mod options;
mod shown;
mod volume;

use super::{NotMade, UuidText};
use crate::app::App;
use crate::state::{Call, Item, bdev_key};
use bdev::{Bdev, FlushLatch, Registry};
pub use call::{Attach, PathParams, own_nqn};
use call::{Expected, params};
use detach::{Detach, detach, record_paths};
pub use found::{Found, watch};
use nvme::{Address, Controller, CreateError, Disk, Only};
use options::{SetOptions, set_options};
use rpc::{Errno, Error, Flags, Methods};
use serde_json::{Value, json};
use shown::{OneOrAll, get_controllers, get_io_paths};
use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, Instant};
use volume::only_one;
pub use volume::open_volume;

/// The method that makes them.
pub const ATTACH: &str = "bdev_nvme_attach_controller";
/// The method that sets what holds for those that are made then.
pub const SET_OPTIONS: &str = "bdev_nvme_set_options";

/// How long connections may take to be closed.
const CLOSE_TIMEOUT: Duration = Duration::from_secs(5);
/// How long after an attempt to restore one the next is made.
pub const RETRY: Duration = Duration::from_secs(2);
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

fn names_of(disks: &[Arc<Disk>]) -> Vec<String> {
    disks.iter().map(|disk| disk.name().to_owned()).collect()
}

/// The controller of that name.
fn controller(app: &App, name: &str) -> Option<Controller> {
    disks(&app.registry, name).first().map(|disk| disk.controller().clone())
}

/// Refuses the name of one that waits for its target; or of a bdev, as both are recorded under their names.
fn check_unrecorded(app: &App, name: &str) -> Result<(), Error> {
    let why = match app.config().get(&bdev_key(name)).map(is_nvme) {
        None => return Ok(()),
        Some(true) => format!("there is a controller {name} already, which is not connected"),
        Some(false) => format!("there is a bdev {name}: give the controller another name"),
    };
    Err(Error::os(Errno::Exist, why))
}

fn attach(app: &App, mut p: Attach, item: Option<&Item>) -> Result<Vec<String>, NotMade> {
    p.check(app)?;
    let addresses = p.addresses()?;
    let is_there = || controller(app, &p.name).filter(|_| item.is_none());
    if item.is_none() && is_there().is_none() {
        // Nobody has to wait for that.
        check_unrecorded(app, &p.name)?;
    }
    let turn = app.namespaces.turn(&p.name);
    if let Some(there) = is_there() {
        drop(turn);
        return Ok(add_path(app, &p, &there, addresses[0])?);
    }
    if item.is_none() {
        check_unrecorded(app, &p.name)?;
    }
    let options = p.options(app);
    p.hostnqn = Some(options.hostnqn.clone());
    let subnqn = options.subnqn.clone();
    let wait = app.waits.begin(format!("bdev {}", p.name), format!("{} to answer", addresses[0]));
    let found = app.namespaces.sender();
    let controller = Controller::create(&app.registry, options, &addresses, found)?;
    drop(wait);
    // Else its pool may go before it is recorded.
    let is_new = p.pool.is_some() && item.is_none();
    let making = is_new.then(|| app.guest_disks.making.lock());
    let made = make_bdevs(app, &controller, item, Path::new(&subnqn))?;
    p.namespaces = expected(&controller, &made);
    record(app, &p);
    drop(making);
    note_missing(app, &p.name);
    if made.len() < controller.disks().len() {
        app.namespaces.look(&p.name);
    }
    Ok(names_of(&made))
}

/// Makes bdevs of the namespaces of a new controller. One whose name or UUID another bdev has keeps no other away; it
/// becomes one when that is gone.
///
/// # Errors
/// None can be made; or what `item` says is not wanted any more, and none is left.
fn make_bdevs(
    app: &App,
    of: &Controller,
    item: Option<&Item>,
    subsystem: &Path,
) -> Result<Vec<Arc<Disk>>, Error> {
    let mut made: Vec<Arc<Disk>> = Vec::new();
    let mut failed = None;
    for disk in of.disks() {
        if made.is_empty() {
            app.flush_errors.attach_as(of.name(), &*disk, subsystem);
        }
        match make_bdev(app, disk.clone(), item) {
            Ok(()) => made.push(disk),
            Err(e) if item.is_some_and(|item| !app.is_to_be_restored(item)) => {
                made.iter().for_each(|disk| _ = app.registry.unregister(disk.name()));
                return Err(e);
            }
            Err(e) => {
                tracing::error!(bdev = disk.name(), "a namespace is no bdev: {e}");
                failed.get_or_insert(e);
            }
        }
    }
    match failed {
        Some(e) if made.is_empty() => Err(e),
        _ => Ok(made),
    }
}

/// Makes a bdev of a namespace.
///
/// # Errors
/// There is another one of its name, also one that is recorded and not there yet, of its UUID, or of the same namespace;
/// or what `item` says is not wanted any more.
fn make_bdev(app: &App, disk: Arc<Disk>, item: Option<&Item>) -> Result<(), Error> {
    let name = disk.name();
    let _turn = only_one(app, &disk)?;
    if let Some(Only { pool, .. }) = &disk.controller().options().only {
        let (pool, found) = (pool.clone(), disk.found());
        return app.add_opened(&pool, disk, found.into(), item);
    }
    if app.config().get(&bdev_key(name)).is_some() {
        return Err(Error::os(Errno::Exist, format_args!("there is another bdev {name}")));
    }
    match item {
        Some(item) => app.add_restored(disk, item),
        None => app.add_bdev(disk),
    }
}

/// What the namespaces of a controller have to be: those that had to be it before, and those that are bdevs.
fn expected(of: &Controller, made: &[Arc<Disk>]) -> Vec<Expected> {
    let before = &of.options().expected;
    let is_meant = |nsid: u32| {
        before.iter().any(|(before, ..)| *before == nsid)
            || made.iter().any(|disk| disk.nsid() == nsid)
    };
    let all = of.namespaces().into_iter().filter(|(nsid, ..)| is_meant(*nsid));
    all.map(|(nsid, uuid, block_size)| Expected { nsid, uuid: UuidText(uuid), block_size })
        .collect()
}

/// Records what the namespaces of a controller have to be.
fn record_namespaces(app: &App, of: &Controller) {
    let made = disks(&app.registry, of.name());
    app.config().set_param(&bdev_key(of.name()), "namespaces", json!(expected(of, &made)));
}

/// As [`note_missing`], of the controller that `item` attaches.
pub fn note_missing_of(app: &App, item: &Item) {
    if let Some(name) = item.call.params.get("name").and_then(Value::as_str) {
        note_missing(app, name);
    }
}

/// Notes which namespaces of a controller are not there or no bdevs, as a problem of it, or that there are none such.
fn note_missing(app: &App, name: &str) {
    // Held meanwhile, so that whoever comes last notes what is so then.
    let mut config = app.config();
    let made = disks(&app.registry, name);
    let Some(controller) = made.first().map(|disk| disk.controller()) else { return };
    let missing: Vec<u32> = controller.missing().into_iter().map(|(nsid, ..)| nsid).collect();
    let all = controller.namespaces().into_iter().map(|(nsid, ..)| nsid);
    let unmade: Vec<u32> = all
        .filter(|nsid| !missing.contains(nsid) && !made.iter().any(|disk| disk.nsid() == *nsid))
        .collect();
    let list = |of: &[u32]| of.iter().map(u32::to_string).collect::<Vec<_>>().join(", ");
    let mut problems = Vec::new();
    if !missing.is_empty() {
        let numbers = list(&missing);
        problems.push(format!(
            "of its namespaces these are not there, or others than before: {numbers}; detach the controller to do \
             without"
        ));
    }
    if !unmade.is_empty() {
        let numbers = list(&unmade);
        problems.push(format!(
            "of its namespaces these are no bdevs, as others are on them or have their names or UUIDs: {numbers}; \
             delete those"
        ));
    }
    let problem =
        (!problems.is_empty()).then(|| format!("controller {name}: {}", problems.join("; and ")));
    if config.note(&bdev_key(name), problem.clone())
        && let Some(problem) = problem
    {
        tracing::error!("{problem}");
    }
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
    if p.multipath.as_deref() == Some("disable") || p.pool.is_some() {
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
    if controller.addresses().contains(&address) {
        let why = format!("controller {name} has the path {address} already");
        return Err(Error::os(Errno::Exist, why));
    }
    controller.add_path(address).map_err(|e| NotMade::from(e).error)?;
    record_paths(app, controller);
    Ok(names_of(&disks(&app.registry, name)))
}

/// Whether `item` attaches a controller.
pub fn is_nvme(item: &Item) -> bool {
    item.call.method == ATTACH
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
            move |p: Attach| {
                watch(&a);
                attach(&a, p, None).map_err(|e| e.error)
            },
        )
        .errors(&[Errno::Io, Errno::Exist, Errno::Inval, Errno::NotSup]);
    let a = app.clone();
    methods
        .add(
            "bdev_nvme_detach_controller",
            "Delete the bdevs of an NVMe controller, and disconnect; an lvstore on one is unloaded first. Where one of \
             them stays, the others come back. Or use one of its paths no more.",
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
