//! Brings back what was configured.

mod again;

use crate::app::App;
use crate::methods::crypto::{awaited_key, is_crypto, key_of};
use crate::methods::file::{self, is_disk as is_file};
use crate::methods::iscsi::{self as lun, is_lun};
use crate::methods::limits;
use crate::methods::nbd::{self as server, is_nbd};
use crate::methods::nvme::{self as controller, is_nvme};
use crate::methods::pool::{self, is_pool};
use crate::methods::rbd::{self as image, is_cluster, is_image};
use crate::methods::vhost::blk;
use crate::moves;
use crate::state::{self, Call, ConfigFile, Item};
pub use again::again;
use bdev::Bdev;
use parking_lot::{Condvar, Mutex};
use rpc::Methods;
use serde_json::{Value, json};
use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::path::Path;
use std::sync::Arc;
use std::sync::mpsc::{self, RecvTimeoutError};
use std::thread;
use std::time::{Duration, Instant};

/// How long the target's start waits for disks. What has not come back by then is waited for by
/// threads of its own.
const DISKS_TIMEOUT: Duration = Duration::from_secs(10);

/// How long [`open_disks`] waits; less than the other program waits for this one at that step.
const ASK_TIMEOUT: Duration = Duration::from_secs(5);

const CREATE_CONTROLLER: [&str; 2] = ["vhost_create_scsi_controller", blk::CREATE];

/// Whether it makes a controller.
fn is_controller(item: &Item) -> bool {
    CREATE_CONTROLLER.contains(&item.call.method.as_str())
}

/// What is there before the rest of what is recorded is restored: [`recorded`] goes on from it as far as
/// that is configured in the same way.
#[derive(Default)]
pub struct Made {
    /// What is made, by key.
    pub calls: BTreeMap<String, Call>,
    /// What bdevs are on that are not made, by key.
    pub opened: BTreeMap<String, (Call, Opened)>,
}

/// What a bdev is on, opened ahead.
pub enum Opened {
    /// A file or block device.
    File(bdev::OpenedFile),
    /// An image of Ceph.
    Image(Box<rbd::OpenedImage>),
}

impl Opened {
    /// Opens what `item` is on, one of [`may_wait`], and waits until that has answered; `None`: there is nothing
    /// to be opened, or restoring it has to say why it cannot be.
    ///
    /// # Errors
    /// In one clause: its server is not there.
    fn ahead(app: &App, item: &Item) -> Result<Option<Opened>, String> {
        Ok(match () {
            () if is_image(item) => {
                image::ahead(app, item).map(|image| Opened::Image(Box::new(image)))
            }
            () if is_nbd(item) => server::ask(app, item).map(|()| None)?,
            () if is_lun(item) => lun::ask(app, item).map(|()| None)?,
            () if is_nvme(item) => controller::ask(app, item).map(|()| None)?,
            () => file::ahead(item).map(Opened::File),
        })
    }
}

/// Whether `item` makes a bdev on a server, which may be away and come back.
fn is_on_server(item: &Item) -> bool {
    is_nbd(item) || is_lun(item) || is_nvme(item)
}

/// Whether `item` makes a bdev on something that may take its time to answer.
fn may_wait(item: &Item) -> bool {
    is_file(item) || is_image(item) || is_on_server(item)
}

/// The threads that restore bdevs on disks.
struct Disks {
    /// Those that are not through.
    left: Mutex<usize>,
    through: Condvar,
}

/// Things that are restored together: a controller with its targets, or one thing of another kind.
struct Unit {
    ctrlr: Option<String>,
    items: Vec<Item>,
}

impl Unit {
    /// All units of `items`, in order, without what of them is made already.
    fn all<'a>(
        items: impl Iterator<Item = &'a Item>,
        is_made: impl Fn(&Item) -> bool,
    ) -> Vec<Unit> {
        let mut units: Vec<Unit> = Vec::new();
        for item in items {
            let ctrlr = item.call.params.get("ctrlr").and_then(Value::as_str).map(str::to_owned);
            let left = (!is_made(item)).then(|| item.clone());
            match units.iter_mut().find(|unit| ctrlr.is_some() && unit.ctrlr == ctrlr) {
                Some(unit) => unit.items.extend(left),
                None => units.push(Unit { ctrlr, items: left.into_iter().collect() }),
            }
        }
        units
    }

    /// Whether all bdevs that it names are there, and nobody looks any more what is on them: whoever
    /// does has them for himself.
    fn has_its_bdevs(&self, app: &App) -> bool {
        let restoring = app.restoring();
        let is_free = |name: &str| {
            let bdev = app.registry.get(name);
            bdev.is_some_and(|bdev| !restoring.contains(&item_of(app, bdev.name())))
        };
        self.items.iter().filter_map(bdev_of).all(is_free)
    }

    /// Restores it; a controller is not started before it has its targets.
    fn restore(&self, app: &App, methods: &Methods) {
        for item in &self.items {
            restore(app, methods, item);
        }
        if let Some(ctrlr) = &self.ctrlr {
            start_if_complete(app, methods, ctrlr);
        }
    }
}

/// Key of what makes the bdev of that name.
fn item_of(app: &App, bdev: &str) -> String {
    let disk = app.registry.get_as::<nvme::Disk>(bdev);
    state::bdev_key(disk.as_ref().map_or(bdev, |disk| disk.controller().name()))
}

/// The bdev that a thing is on.
pub fn bdev_of(item: &Item) -> Option<&str> {
    let params = &item.call.params;
    const NAMES: [&str; 4] = ["bdev_name", "base_bdev_name", "base_name", "dev_name"];
    NAMES.iter().find_map(|name| params.get(*name)?.as_str())
}

/// Whether it shows a guest a bdev as a disk.
pub fn is_disk(item: &Item) -> bool {
    ["vhost_scsi_controller_add_target", blk::CREATE].contains(&item.call.method.as_str())
}

/// Restores what the state directory records: bdevs (and with each the lvstore on it), those on
/// disks all at the same time; then exports and controllers, each as soon as its bdevs are there. What
/// fails is logged, kept, and shown by `virtlun_get_status`; the rest goes on. So does what waits for
/// a disk: it is restored when the disk answers, with the targets and exports on it.
///
/// What is `made` already is left out.
pub fn recorded(app: &Arc<App>, methods: &Arc<Methods>, made: Made) {
    controller::watch(app);
    let Made { calls, mut opened } = made;
    let mut items: Vec<_> = app.config().items().cloned().collect();
    let configured = items.len();
    // They are there before anybody does I/O.
    let first = |item: &Item| is_limit(item) || lun::is_options(item);
    let (limits, others): (Vec<_>, Vec<_>) = items.into_iter().partition(first);
    limits.iter().for_each(|item| _ = restore(app, methods, item));
    clusters(app, &others);
    items = others;
    items.retain(|item| !is_cluster(item) && !is_pool(item));
    let is_made = |item: &Item| calls.get(&item.key) == Some(&item.call);
    // One on another, such as an encrypted one, has to wait for that as all that is on a bdev.
    let is_bdev = |item: &&Item| item.key.starts_with(state::BDEV_KEY) && bdev_of(item).is_none();
    // A controller that is made is still to be started.
    let mut units = Unit::all(items.iter().filter(|item| !is_bdev(item)), is_made);
    items.retain(|item| !is_made(item));
    let deadline = Instant::now() + DISKS_TIMEOUT;
    let disks = Arc::new(Disks { left: Mutex::new(0), through: Condvar::new() });
    for item in items.iter().filter(|item| may_wait(item)) {
        let ahead = opened.remove(&item.key).filter(|(call, _)| *call == item.call);
        restore_beside(app, methods, &disks, item, ahead.map(|(_, opened)| opened));
    }
    app.clusters.keep_none();
    for item in items.iter().filter(|item| is_bdev(item) && !may_wait(item)) {
        restore(app, methods, item);
    }
    loop {
        // Counted first: what comes while units are restored is seen in the next turn.
        let before = *disks.left.lock();
        units.retain(|unit| {
            let ready = unit.has_its_bdevs(app);
            if ready {
                unit.restore(app, methods);
            }
            !ready
        });
        if before == 0 {
            break;
        }
        let mut left = disks.left.lock();
        let time = deadline.saturating_duration_since(Instant::now());
        let through = disks.through.wait_while_for(&mut left, |left| *left == before, time);
        if through.timed_out() {
            break;
        }
    }
    {
        let restoring = app.restoring();
        let mut config = app.config();
        for item in items.iter().filter(|item| restoring.contains(&item.key)) {
            let (key, seconds) = (&item.key, DISKS_TIMEOUT.as_secs());
            tracing::error!("{key} waits for its disk for {seconds} s already; the others go on");
            let problem = "its disk does not answer; it is restored when the disk does".to_owned();
            config.set_restored(item, Some(problem));
        }
    }
    // What comes from here on brings back what names it ([`of_bdevs`]).
    app.forget_appeared();
    units.iter().for_each(|unit| unit.restore(app, methods));
    // Each as soon as its own bdevs were there.
    let has_other = |item: &&Item| waits_for_other(app, item, |o| app.registry.get(o).is_some());
    failed(app).iter().filter(has_other).for_each(|item| restore_late(app, methods, item));
    let failed = failed(app).len();
    if configured != 0 {
        tracing::info!(restored = configured - failed, failed, "configuration restored");
    }
    // Such as what a disk was copied to when the process before ended. Of what is not there yet nobody knows what
    // it uses.
    if failed == 0 && app.restoring().is_empty() {
        app.close_unused_volumes();
    }
}

/// Makes the controllers that are recorded, without targets, not started, and names their owners: what
/// needs no bdev. Returns what is made, by key; a virtio-blk controller is made when it has its disk. What
/// fails is left to [`recorded`].
pub fn controllers(app: &App, methods: &Methods) -> BTreeMap<String, Call> {
    const OF_CONTROLLERS: [&str; 2] = [CREATE_CONTROLLER[0], "virtlun_controller_set_owner"];
    let items: Vec<_> = app.config().items().cloned().collect();
    for item in items.iter().filter(|item| item.call.method == blk::CREATE) {
        if let Err(why) = blk::expect(app, &item.call) {
            tracing::warn!("{} cannot be made yet: {why}", item.key);
        }
    }
    let items = items.into_iter().filter(|i| OF_CONTROLLERS.contains(&i.call.method.as_str()));
    let made = items.filter(|item| restore(app, methods, item));
    made.map(|item| (item.key, item.call)).collect()
}

/// Registers the clusters of Ceph among `items`, which connect when they answer: images wait for them. And the
/// pools of them.
fn clusters(app: &App, items: &[Item]) {
    let clusters = items.iter().filter(|item| is_cluster(item));
    for item in clusters.chain(items.iter().filter(|item| is_pool(item))) {
        let restored = match is_pool(item) {
            true => pool::restore(app, item),
            false => image::restore_cluster(app, item),
        };
        if let Err(e) = &restored {
            tracing::error!("{} could not be restored: {e}", item.key);
        }
        app.config().set_restored(item, restored.err().map(|e| e.message));
    }
}

/// Opens the files and images of all disks that are recorded, and waits until they have answered: [`recorded`]
/// is not to find out with all guests held that one does not, nor to wait for what a slow one takes to open.
/// None is locked, as another process uses them. Returns those that are open, by key.
///
/// # Errors
/// One of them does not answer, or the server of one is not there: for a guest that is a pause now, and would be
/// an error then.
pub fn open_disks(app: &Arc<App>) -> Result<BTreeMap<String, (Call, Opened)>, String> {
    let items: Vec<_> = app.config().items().cloned().collect();
    clusters(app, &items);
    let items: Vec<_> = items.into_iter().filter(may_wait).collect();
    let deadline = Instant::now() + ASK_TIMEOUT;
    let mut asked = Vec::with_capacity(items.len());
    for item in items {
        let (tell, told) = mpsc::channel();
        let Item { key, call, .. } = item.clone();
        let app = app.clone();
        let ask = move || {
            _ = tell.send(Opened::ahead(&app, &item));
        };
        let started = thread::Builder::new().name("ask disk".into()).spawn(ask);
        started.map_err(|e| format!("no thread to ask the disk of {key}: {e}"))?;
        asked.push((key, call, told));
    }
    let mut opened = BTreeMap::new();
    for (key, call, told) in asked {
        let left = deadline.saturating_duration_since(Instant::now());
        match told.recv_timeout(left) {
            Ok(Ok(Some(there))) => _ = opened.insert(key, (call, there)),
            Ok(Ok(None)) | Err(RecvTimeoutError::Disconnected) => {}
            Ok(Err(why)) => {
                return Err(format!(
                    "{key} could not be made again: {why}; no guest was held for it: try again when its \
                     server answers, or delete the bdev"
                ));
            }
            Err(RecvTimeoutError::Timeout) => {
                let seconds = ASK_TIMEOUT.as_secs();
                return Err(format!(
                    "the disk of {key} has not answered for {seconds} s; no guest was held for it: \
                     try again when it does, or delete the bdev"
                ));
            }
        }
    }
    Ok(opened)
}

/// Restores a bdev on a thread of its own, of what is `opened` for it if that is. One that is late brings back what
/// depends on it.
fn restore_beside(
    app: &Arc<App>,
    methods: &Arc<Methods>,
    disks: &Arc<Disks>,
    item: &Item,
    opened: Option<Opened>,
) {
    *disks.left.lock() += 1;
    app.restoring().insert(item.key.clone());
    let work = {
        let (app, methods, disks, item) =
            (app.clone(), methods.clone(), disks.clone(), item.clone());
        move || {
            let comes_later = restore_disk(&app, &item, opened);
            // What names it may have found it in use by the search for an lvstore.
            note_appeared(&app, &item);
            {
                let mut left = disks.left.lock();
                *left -= 1;
                disks.through.notify_all();
            }
            if comes_later && !restore_later(&app, &item) {
                return;
            }
            bring_back_appeared(&app, &methods);
        }
    };
    let started = thread::Builder::new().name("restore".into()).spawn(work);
    if let Err(e) = started {
        tracing::error!("no thread to restore {}: {e}", item.key);
        *disks.left.lock() -= 1;
        _ = restore_disk(app, item, None);
    }
}

/// Brings back what names the bdevs that have come; while the target starts, when the rest has been restored.
fn bring_back_appeared(app: &App, methods: &Methods) {
    methods.exclusively(|| {
        app.restore_appeared();
        if let Err(e) = app.commit() {
            tracing::error!("{e}");
        }
    });
}

/// A failure to restore something that does not come by itself.
fn never_later(error: rpc::Error) -> (rpc::Error, bool) {
    (error, false)
}

/// Restores a bdev on a disk, and notes how that went, unless it was deleted or replaced meanwhile:
/// what has its name then is somebody else's. Whether it may be there later.
fn restore_disk(app: &App, item: &Item, opened: Option<Opened>) -> bool {
    let restored = match opened {
        Some(Opened::Image(image)) => image::restore(app, item, Some(*image)),
        Some(Opened::File(file)) => file::restore(app, item, Some(file)).map_err(never_later),
        None if is_image(item) => image::restore(app, item, None),
        None if is_nbd(item) => server::restore(app, item),
        None if is_lun(item) => lun::restore(app, item),
        None if is_nvme(item) => controller::restore(app, item),
        None => file::restore(app, item, None).map_err(never_later),
    };
    let comes_later = restored.as_ref().is_err_and(|(_, later)| *later);
    let problem = match restored {
        Ok(()) => None,
        Err((e, _)) => Some(e.message),
    };
    let mut restoring = app.restoring();
    if !restoring.remove(&item.key) {
        if let Some(why) = problem {
            tracing::info!("not restored: {why}");
        }
        return false;
    }
    if problem.is_none() && is_nvme(item) {
        // What is recorded of it may be another call by now.
        controller::note_missing_of(app, item);
        return false;
    }
    let mut config = app.config();
    let known = config.get(&item.key).and_then(|item| item.problem.clone());
    if let Some(why) = problem.as_ref().filter(|why| known.as_ref() != Some(why)) {
        tracing::error!("{} could not be restored: {why}", item.key);
    }
    // Also where it went well: the start may have noted that the disk does not answer.
    config.set_restored(item, problem);
    comes_later
}

/// Restores a bdev that could not be had, when it can; `false`: it is not wanted any more.
fn restore_later(app: &App, item: &Item) -> bool {
    let delay = match () {
        () if is_lun(item) => lun::RETRY,
        () if is_nvme(item) => controller::RETRY,
        () if is_image(item) => image::RETRY,
        () => server::retry_delay(item),
    };
    loop {
        thread::sleep(delay);
        {
            let mut restoring = app.restoring();
            let config = app.config();
            let still = config.get(&item.key).filter(|there| there.call == item.call);
            if still.is_none_or(|there| there.problem.is_none()) {
                return false;
            }
            restoring.insert(item.key.clone());
        }
        if !restore_disk(app, item, None) {
            break;
        }
    }
    note_appeared(app, item);
    true
}

/// What names the bdev of `item` is brought back next.
fn note_appeared(app: &App, item: &Item) {
    let Some(name) = item.call.params.get("name").and_then(Value::as_str) else { return };
    app.note_appeared(name);
    for disk in controller::disks(&app.registry, name).into_iter().filter(|_| is_nvme(item)) {
        app.note_appeared(disk.name());
    }
}

/// Whether it limits the I/O of a bdev.
fn is_limit(item: &Item) -> bool {
    item.call.method == limits::SET
}

/// Restores one item; what fails is logged and noted.
fn restore(app: &App, methods: &Methods, item: &Item) -> bool {
    let mut params = Value::Object(item.call.params.clone());
    if is_controller(item) {
        params["delay"] = json!(true);
    }
    let restored = match () {
        () if is_limit(item) => limits::restore(app, item),
        () if is_image(item) => image::again(app, item),
        () => methods.call(&item.call.method, params).map(drop),
    };
    if let Err(e) = &restored {
        tracing::error!("{} could not be restored: {e}", item.key);
        app.config().set_restored(item, Some(e.message.clone()));
    }
    restored.is_ok()
}

/// Restores what could not be at the start because its bdev, or its key, or what says whether that counts, was not
/// there, and is now: encrypted bdevs, exports, then targets, of which a connected guest is told.
pub fn of_bdevs(
    app: &App,
    methods: &Methods,
    appeared: &BTreeSet<String>,
    keys: &BTreeSet<String>,
) {
    let waits = |item: &Item| {
        let on_bdev = bdev_of(item).is_some_and(|name| appeared.contains(name));
        let with_key = is_crypto(item) && key_of(item).is_some_and(|name| keys.contains(name));
        on_bdev || with_key || waits_for_other(app, item, |other| appeared.contains(other))
    };
    failed(app).iter().filter(|item| waits(item)).for_each(|item| restore_late(app, methods, item));
}

/// What could not be restored.
fn failed(app: &App) -> Vec<Item> {
    app.config().items().filter(|item| item.problem.is_some()).cloned().collect()
}

/// Whether it shows a volume of a move whose other volume may say whether it counts, and which came as `is_there`
/// says.
fn waits_for_other(app: &App, item: &Item, is_there: impl Fn(&str) -> bool) -> bool {
    let bdev = Some(item).filter(|item| is_disk(item)).and_then(bdev_of);
    bdev.and_then(|bdev| moves::other(app, bdev)).is_some_and(|other| is_there(&other))
}

/// Restores what could not be before.
fn restore_late(app: &App, methods: &Methods, item: &Item) {
    if !restore(app, methods, item) {
        return;
    }
    tracing::info!("{} restored: what it waited for is there now", item.key);
    let ctrlr = item.call.params.get("ctrlr").and_then(Value::as_str);
    if let Some(ctrlr) = ctrlr.filter(|_| is_controller(item)) {
        restore_owner(app, methods, ctrlr);
        start_if_complete(app, methods, ctrlr);
    }
}

/// Restores whom a controller belongs to that was not there when that was to be restored.
fn restore_owner(app: &App, methods: &Methods, ctrlr: &str) {
    let owner = app.config().get(&state::owner_key(ctrlr)).cloned();
    if let Some(item) = owner.filter(|item| item.problem.is_some()) {
        restore(app, methods, &item);
    }
}

/// Whether what a call makes is configured already. A target whose number is to be chosen is the one
/// of that controller with that bdev.
fn is_there(app: &App, call: &Call) -> bool {
    if call.method == controller::ATTACH {
        return controller::is_there(app, call);
    }
    let text = |call: &Call, name: &str| Some(call.params.get(name)?.as_str()?.to_owned());
    let chosen = call.params.get("scsi_target_num").and_then(Value::as_i64) == Some(-1);
    if call.method != "vhost_scsi_controller_add_target" || !chosen {
        let (_, key) = state::identify(call);
        return app.config().get(&key).is_some();
    }
    let (ctrlr, bdev) = (text(call, "ctrlr"), text(call, "bdev_name"));
    let bdev = bdev.map(|name| app.registry.get(&name).map_or(name, |b| b.name().to_owned()));
    let same = |item: &Item| {
        item.call.method == call.method
            && text(&item.call, "ctrlr") == ctrlr
            && text(&item.call, "bdev_name") == bdev
    };
    app.config().items().any(same)
}

fn start_controllers(app: &App, methods: &Methods) {
    let items: Vec<_> = app.config().items().cloned().collect();
    for item in items.iter().filter(|item| is_controller(item)) {
        if let Some(ctrlr) = item.call.params.get("ctrlr").and_then(Value::as_str) {
            start_if_complete(app, methods, ctrlr);
        }
    }
}

/// Starts a controller that is configured, unless one of its targets waits for its key. Then its guest
/// waits, as it does while the target is away: without its disk it would have I/O errors.
pub fn start_if_complete(app: &App, methods: &Methods, ctrlr: &str) {
    let of_it = |item: &&Item| {
        let its = item.call.params.get("ctrlr").and_then(Value::as_str);
        its == Some(ctrlr) && item.problem.is_some()
    };
    let (is_there, bdevs) = {
        let config = app.config();
        let bdevs = config.items().filter(of_it).filter_map(bdev_of).map(str::to_owned);
        (config.get(&state::controller_key(ctrlr)).is_some(), bdevs.collect::<Vec<_>>())
    };
    match bdevs.iter().find_map(|bdev| Some((bdev, awaited_key(app, bdev)?))) {
        Some((bdev, key)) if is_there => {
            if app.awaited.hold(ctrlr) {
                // Restored, it is there, or its problem is told.
                _ = app.controllers.refuse(ctrlr);
                tracing::warn!(
                    "controller {ctrlr} is not started, so that its guest waits: bdev {bdev} waits \
                     for the key {key}"
                );
            }
        }
        _ => {
            app.awaited.let_start(ctrlr);
            start_controller(app, methods, ctrlr);
        }
    }
}

fn start_controller(app: &App, methods: &Methods, ctrlr: &str) {
    let key = state::controller_key(ctrlr);
    if app.config().get(&key).is_none_or(|item| item.problem.is_some()) {
        return;
    }
    match methods.call("vhost_start_scsi_controller", json!({"ctrlr": ctrlr})) {
        Ok(_) => tracing::info!("{key} restored"),
        Err(e) => {
            tracing::error!("{key} could not be started: {e}");
            app.config().set_problem(&key, e.message);
        }
    }
}

/// Applies a file of `spdk-rpc save_config`. What the state directory brought back already is
/// skipped; the first call that fails ends it, with a sentence.
pub fn file(app: &App, methods: &Methods, path: &Path) -> Result<(), String> {
    let shown = path.display();
    let text = fs::read_to_string(path).map_err(|e| format!("cannot read {shown}: {e}"))?;
    let calls =
        ConfigFile::parse(&text).map_err(|e| format!("{shown} is no configuration: {e}"))?;
    for call in calls {
        if is_there(app, &call) {
            continue;
        }
        let Call { method, params } = call;
        methods
            .call(&method, Value::Object(params))
            .map_err(|e| format!("{shown}: {method} failed: {e}"))?;
    }
    app.commit().map_err(|e| e.message)
}
