//! What the methods work on: everything of the process, wired together.

use crate::above;
use crate::awaited::Awaited;
use crate::balance::Balance;
use crate::cli::Cli;
use crate::copies::Copies;
use crate::errors;
use crate::flushrecord::Recorder;
use crate::guestdisks::GuestDisks;
use crate::heldsessions::HeldSessions;
use crate::holding;
use crate::logging::LogControl;
use crate::methods::{Journal, crypto as encryption, limits, nvme as controller};
use crate::notices::Notices;
use crate::pools::Pools;
use crate::privilege;
use crate::records::RecordFiles;
use crate::reservations::ReservationFiles;
use crate::restore;
use crate::state::{self, Config, Item};
use crate::upgrade::Taken;
use crate::waits::Waits;
use bdev::{Bdev, Event, FileBdev, FlushLatch, Malloc, Registry, RegistryError, Subscription};
use crypto::{Crypto, Keys};
use export::Exports;
use holder::Client;
use integrity::Integrity;
use lvol::Lvstores;
use parking_lot::{Condvar, Mutex, MutexGuard};
use rbd::{Clusters, Disk};
use reactor::{Idle, Reactors};
use rpc::{Error, Methods, Phase};
use serde::Serialize;
use std::collections::{BTreeMap, BTreeSet};
use std::io;
use std::os::fd::OwnedFd;
use std::path::PathBuf;
use std::sync::{Arc, OnceLock, Weak};
use std::time::{Duration, Instant};
use vhost_scsi::{Controllers, Settings, Timeouts};

/// How long users of files that let go of them may take to be through with them.
const CLOSE_TIMEOUT: Duration = Duration::from_secs(1);

/// How long images of Ceph may take to be closed, all of them together.
const IMAGES_TIMEOUT: Duration = Duration::from_secs(5);

/// How long connections to NVMe controllers may take to be closed, all of them together.
const CONTROLLERS_TIMEOUT: Duration = Duration::from_secs(3);

/// Where the process keeps what it needs.
#[derive(Clone, Debug)]
pub struct Paths {
    /// JSON-RPC socket.
    pub rpc_socket: PathBuf,
    /// Folder of the controllers' sockets.
    pub vhost_dir: PathBuf,
    /// Folder of the recorded configuration.
    pub state_dir: PathBuf,
    /// Folder where exported bdevs are files.
    pub export_dir: PathBuf,
    /// Where the holder of those files listens, be it there or not.
    pub holder_socket: PathBuf,
}

/// Everything of the process. Shared by all methods; thread-safe.
pub struct App {
    /// All bdevs.
    pub registry: Registry,
    /// All lvstores.
    pub lvstores: Lvstores,
    /// All vhost-user-scsi controllers.
    pub controllers: Controllers,
    /// Targets whose bdevs are being copied.
    pub copies: Arc<Copies>,
    /// Sessions of VMs that the holder keeps.
    held_sessions: Arc<HeldSessions>,
    /// Whether it is to keep them.
    holds_sessions: bool,
    /// All exports: bdevs as files for the kernel.
    pub exports: Exports,
    /// CPUs of the threads of devices that are started from now on, none: any; where SPDK's ublk target
    /// was created.
    pub ublk_target: Mutex<Option<Vec<usize>>>,
    /// Clusters of Ceph.
    pub clusters: Clusters,
    /// Pools of those whose images are volumes.
    pub pools: Pools,
    /// Bdevs that go when no guest has them.
    pub guest_disks: GuestDisks,
    /// Namespaces that come to NVMe controllers.
    pub namespaces: controller::Found,
    /// All polling threads.
    pub reactors: Reactors,
    /// Kernel thread ids of the reactors, in their order.
    pub reactor_tids: Vec<i32>,
    /// Whether they never sleep.
    pub polls: bool,
    /// How long an upgrade waits for I/O in flight: the guest whose it is waits.
    pub drain_timeout: Duration,
    /// What happens to system calls that are not expected, as `--sandbox` says.
    pub sandbox: &'static str,
    /// Whether the process may make network connections.
    pub network: bool,
    /// Where things are.
    pub paths: Paths,
    /// When the process started.
    pub started: Instant,
    /// What happened to bdevs.
    pub notices: Arc<Notices>,
    /// The log's level.
    pub log: LogControl,
    /// Configuration to apply after the recorded one.
    config_file: Option<PathBuf>,
    /// What is configured: [`App::config`], or for [`state::save`].
    pub config: Arc<Mutex<Config>>,
    /// Keeps what failed flushes leave behind beyond this process.
    pub flush_errors: Recorder,
    /// By name: the content of bdevs in memory that are to be made.
    memory: Mutex<BTreeMap<String, OwnedFd>>,
    /// What it took over from the program before, if it did.
    pub upgrade: OnceLock<Taken>,
    /// By bdev: why the lvstore on it cannot be loaded.
    lvstore_problems: Mutex<BTreeMap<String, String>>,
    /// Keys of encrypted bdevs, in memory only.
    pub keys: Keys,
    /// What waits for one.
    pub awaited: Awaited,
    /// What waits for a disk.
    pub waits: Waits,
    /// Keys of what is still being restored, because its disk has not answered.
    restoring: Mutex<BTreeSet<String>>,
    /// Bdevs that came since the last change was recorded.
    appeared: Arc<Mutex<BTreeSet<String>>>,
    /// The method table, once it is made; through it what is recorded comes back.
    methods: OnceLock<Weak<Methods>>,
    initialised: Mutex<bool>,
    initialisation: Condvar,
    _balance: Balance,
    _events: Subscription,
    _encrypted: Subscription,
    _checked: Subscription,
    _of_tests: Subscription,
}

impl App {
    /// Starts the reactors and wires everything, without bdevs or controllers. `holder` keeps exports
    /// while the process is away.
    pub fn new(
        cli: &Cli,
        config: Config,
        log: LogControl,
        holder: Option<Arc<Client>>,
    ) -> io::Result<App> {
        let cpus: Vec<_> = match &cli.cpumask {
            Some(mask) => mask.cpus().iter().copied().map(Some).collect(),
            None => vec![None],
        };
        let idle = match cli.poll {
            true => Idle::Poll,
            false => Idle::Adaptive { spin_us: cli.spin_us },
        };
        let reactors = Reactors::start(&cpus, idle)?;
        // Before any other thread is started that works for a guest.
        let bound: Vec<_> = cpus.iter().flatten().copied().collect();
        if let Err(why) = reactor::leave(&bound) {
            tracing::warn!("other threads may run on the reactors' CPUs: {why}");
        }
        let reactor_tids = reactors
            .handles()
            .iter()
            .map(|handle| handle.call(|_| rustix::thread::gettid().as_raw_nonzero().get()))
            .collect();
        let registry = Registry::new();
        let settings = Settings {
            directory: cli.vhost_dir.clone(),
            mode: cli.socket_mode,
            uid: None,
            gid: cli.socket_group,
            timeouts: Timeouts::default(),
            marks: Some(cli.state_dir.join("in-flight")),
        };
        let notices = Arc::new(Notices::default());
        let noted = notices.clone();
        let appeared: Arc<Mutex<BTreeSet<String>>> = Arc::default();
        let came = appeared.clone();
        let copies: Arc<Copies> = Arc::default();
        let copied = copies.clone();
        let awaited = Awaited::default();
        let waiting = awaited.clone();
        let on_event = move |event: &Event| {
            noted.note(event);
            copied.note(event);
            match event {
                Event::Registered(bdev) => _ = came.lock().insert(bdev.name().to_owned()),
                Event::Removed(bdev) => waiting.release_base(bdev.name()),
                Event::Resized(_) | Event::Space { .. } => {}
            }
        };
        let keys = Keys::default();
        if cli.hold_sessions && holder.is_none() {
            tracing::warn!("VMs' connections end with this process: there is no virtlun-holder");
        }
        let holds_sessions = cli.hold_sessions && holder.is_some();
        let exports = holding::exports(cli, &config, &registry, holder);
        let config = Arc::new(Mutex::new(config));
        let controllers = Controllers::new(registry.clone(), reactors.handles(), settings);
        controllers.record_owners(Arc::new(Journal(Arc::clone(&config))));
        controllers.keep_reservations(Arc::new(ReservationFiles::of(&cli.state_dir)));
        controllers.keep_records(Arc::new(RecordFiles::of(&cli.state_dir)));
        let held_sessions = Arc::new(HeldSessions::of(&holding::socket(cli), &cli.state_dir));
        if holds_sessions {
            HeldSessions::keep(&held_sessions, &controllers)?;
        }
        let flush_errors = Recorder::start(registry.clone(), Arc::clone(&config))?;
        let balance = Balance::start(&controllers, reactors.handles().len())?;
        Ok(App {
            lvstores: Lvstores::with_keys(registry.clone(), keys.clone()),
            controllers,
            held_sessions,
            holds_sessions,
            copies,
            exports,
            ublk_target: Mutex::default(),
            clusters: Clusters::new(Some(cli.state_dir.join(rbd::CLIENTS))),
            pools: Pools::default(),
            guest_disks: GuestDisks::default(),
            namespaces: controller::Found::default(),
            reactors,
            reactor_tids,
            polls: cli.poll,
            drain_timeout: Duration::from_secs(cli.drain_timeout),
            sandbox: cli.sandbox().name(),
            network: privilege::has_network(cli),
            paths: Paths {
                rpc_socket: cli.rpc_socket.clone(),
                vhost_dir: cli.vhost_dir.clone(),
                state_dir: cli.state_dir.clone(),
                export_dir: cli.export_dir.clone(),
                holder_socket: holding::socket(cli),
            },
            started: Instant::now(),
            log,
            config_file: cli.config.clone(),
            config,
            flush_errors,
            memory: Mutex::default(),
            upgrade: OnceLock::new(),
            lvstore_problems: Mutex::default(),
            keys,
            awaited,
            waits: Waits::default(),
            restoring: Mutex::default(),
            appeared,
            methods: OnceLock::new(),
            initialised: Mutex::new(false),
            initialisation: Condvar::new(),
            _balance: balance,
            _events: registry.subscribe(on_event),
            _encrypted: Crypto::follow(&registry),
            _checked: Integrity::follow(&registry),
            _of_tests: faults::follow(&registry),
            notices,
            registry,
        })
    }

    /// Says where the methods are; once.
    pub fn set_methods(&self, methods: &Arc<Methods>) {
        let _ = self.methods.set(Arc::downgrade(methods));
    }

    /// Restores what was configured and lets all methods be called; a disk that does not answer is
    /// waited for by a thread of its own ([`restore::recorded`]). Safe to repeat.
    pub fn initialise(self: &Arc<Self>) -> Result<(), String> {
        self.initialise_with(|methods| {
            restore::recorded(self, methods, restore::Made::default());
            // What was closed then is not to be opened by the next start.
            if let Err(e) = self.commit() {
                tracing::error!("what was restored is not recorded as it is: {e}");
            }
            if let Some(path) = &self.config_file {
                restore::file(self, methods, path)?;
            }
            self.end_other_sessions();
            Ok(())
        })
    }

    /// Has the holder let go of sessions of processes before that nobody goes on with. Waits for the
    /// holder: not while guests wait.
    pub fn end_other_sessions(&self) {
        // A controller may still wait for its disk. Where none are kept, an earlier process had other
        // options.
        let configured = |name: &str| self.config().get(&state::controller_key(name)).is_some();
        self.held_sessions.end_others(|name| self.holds_sessions && configured(name));
    }

    /// Whether VMs' sessions go on in the next process, as far as it is up to the holder.
    pub fn holds_sessions(&self) -> bool {
        self.holds_sessions && self.held_sessions.works()
    }

    /// Calls `f` with the methods, while no client calls any.
    ///
    /// # Errors
    /// There are none yet.
    pub fn with_methods<R>(&self, f: impl FnOnce(&Arc<Methods>) -> R) -> Result<R, String> {
        let methods = self.methods.get().and_then(Weak::upgrade);
        let methods = methods.ok_or("the methods are not there yet")?;
        Ok(methods.exclusively(|| f(&methods)))
    }

    /// As [`App::initialise`], with `restore` for what was configured.
    pub fn initialise_with(
        &self,
        restore: impl FnOnce(&Arc<Methods>) -> Result<(), String>,
    ) -> Result<(), String> {
        let mut initialised = self.initialised.lock();
        let methods = self.methods.get().and_then(Weak::upgrade);
        let methods = methods.ok_or("the methods are not there yet")?;
        if !*initialised {
            methods.exclusively(|| restore(&methods))?;
            methods.set_phase(Phase::Runtime);
            *initialised = true;
            self.initialisation.notify_all();
        }
        Ok(())
    }

    /// Waits until [`App::initialise`] is done.
    pub fn wait_initialised(&self) {
        let mut initialised = self.initialised.lock();
        while !*initialised {
            self.initialisation.wait(&mut initialised);
        }
    }

    /// Keys of what is still being restored. What is deleted is taken out. Lock it before the
    /// configuration.
    pub fn restoring(&self) -> MutexGuard<'_, BTreeSet<String>> {
        self.restoring.lock()
    }

    /// What is configured.
    pub fn config(&self) -> MutexGuard<'_, Config> {
        self.config.lock()
    }

    /// Brings back what waits for a bdev that came meanwhile; called after each mutating method, and by what else
    /// makes bdevs, with the methods' lock.
    pub fn restore_appeared(&self) {
        let Some(methods) = self.methods() else { return };
        loop {
            let appeared = std::mem::take(&mut *self.appeared.lock());
            let keys = self.awaited.take_keys();
            for key in &keys {
                if let Err(e) = self.lvstores.key_comes(key) {
                    tracing::error!("{e}");
                }
            }
            if appeared.is_empty() && keys.is_empty() {
                break;
            }
            // What is restored may make bdevs, which others wait for.
            restore::of_bdevs(self, &methods, &appeared, &keys);
        }
        let held = self.awaited.held();
        held.iter().for_each(|ctrlr| restore::start_if_complete(self, &methods, ctrlr));
    }

    /// The methods, while they are there.
    pub fn methods(&self) -> Option<Arc<Methods>> {
        self.methods.get().and_then(Weak::upgrade)
    }

    /// A bdev that was there already, but in use, can be used now.
    pub fn note_appeared(&self, bdev: &str) {
        if let Some(bdev) = self.registry.get(bdev) {
            self.appeared.lock().insert(bdev.name().to_owned());
        }
    }

    /// What waits for a bdev that is there already is restored by the caller.
    pub fn forget_appeared(&self) {
        self.appeared.lock().clear();
    }

    /// Records what changed; called after each mutating method. Others may use the configuration meanwhile.
    pub fn commit(&self) -> Result<(), Error> {
        state::save(&self.config).map_err(errors::state)
    }

    /// The bdev with this name, alias or UUID; a volume of a pool that is not open, too, to be named only.
    pub fn bdev(&self, name: &str) -> Result<Arc<dyn Bdev>, Error> {
        let found = self.registry.get(name).or_else(|| self.closed_volume(name));
        found.ok_or_else(|| self.no_bdev(name))
    }

    /// Why there is no such bdev.
    pub fn no_bdev(&self, name: &str) -> Error {
        match self.lvstores.awaited_key(name) {
            None => errors::no_bdev(name),
            Some(key) => errors::waits_for_key(name, &key),
        }
    }

    /// Makes a new bdev known, and the lvols on it if it holds an lvstore. An lvstore that cannot
    /// be loaded does not take the bdev with it: it is noted as a problem.
    pub fn add_bdev(&self, bdev: Arc<dyn Bdev>) -> Result<(), Error> {
        let name = bdev.name().to_owned();
        // Both are recorded under their names.
        let key = state::bdev_key(&name);
        if self.config().get(&key).is_some_and(controller::is_nvme) {
            let why = format!("there is an NVMe controller {name}: give the bdev another name");
            return Err(Error::os(rpc::Errno::Exist, why));
        }
        self.register(bdev)?;
        self.load_lvstore(&name);
        Ok(())
    }

    /// Makes a new bdev known, whatever is on it.
    pub fn register(&self, bdev: Arc<dyn Bdev>) -> Result<(), Error> {
        self.registry.register(bdev).map_err(errors::registry)
    }

    /// As [`App::add_bdev`], for a bdev that `item` made; not if that was deleted or replaced while it
    /// was made.
    pub fn add_restored(&self, bdev: Arc<dyn Bdev>, item: &Item) -> Result<(), Error> {
        let name = bdev.name().to_owned();
        {
            let restoring = self.restoring.lock();
            if !restoring.contains(&item.key) || !self.config().holds(item) {
                return Err(errors::not_wanted(&item.key));
            }
            self.register(bdev)?;
        }
        // A guest's disk is not looked at.
        if !self.pools.open().contains(&name) && !self.guest_disks.has(&name) {
            self.load_lvstore(&name);
        }
        Ok(())
    }

    /// Whether what `item` makes is being restored, and was neither deleted nor replaced meanwhile.
    pub fn is_to_be_restored(&self, item: &Item) -> bool {
        let restoring = self.restoring.lock();
        restoring.contains(&item.key) && self.config().holds(item)
    }

    /// Loads what a new bdev holds; what cannot be loaded is noted as a problem.
    pub fn load_lvstore(&self, bdev: &str) {
        if let Err(e) = self.examine(bdev) {
            tracing::error!(bdev, "{e}");
        }
    }

    /// Records the call that made `bdev`, unless that was deleted meanwhile.
    pub fn record_bdev(&self, bdev: &Arc<dyn Bdev>, method: &str, params: &impl Serialize) {
        // Deleting takes a bdev out of the registry first, out of the configuration then.
        let mut config = self.config();
        if self.registry.get(bdev.name()).is_some_and(|there| Arc::ptr_eq(&there, bdev)) {
            config.record(method, params);
            let failure = bdev.flush_latch().and_then(FlushLatch::failure);
            config.set_flush_failure(&state::bdev_key(bdev.name()), failure);
        }
    }

    /// Whether a bdev that is recorded lies on that one, which it may not have yet.
    fn is_base(&self, name: &str) -> bool {
        let on_it = |item: &Item| {
            item.key.starts_with(state::BDEV_KEY) && restore::bdev_of(item) == Some(name)
        };
        self.config().items().any(on_it)
    }

    /// Loads what a bdev holds: checksums, with what lies on those, or an lvstore. What shows through
    /// another bdev is loaded from that.
    pub fn examine(&self, name: &str) -> Result<(), Error> {
        if self.is_base(name) {
            return Ok(());
        }
        let answer = "its disk, which is looked at for an lvstore, to answer";
        // Until the outcome is noted.
        let _wait = self.waits.begin(format!("bdev {name}"), answer.into());
        let outcome = match self.examine_for_checksums(name) {
            Ok(true) => Ok(None),
            Ok(false) => self.lvstores.examine(name).map_err(errors::lvol),
            Err(e) => Err(e),
        };
        let mut problems = self.lvstore_problems();
        match &outcome {
            Ok(found) => {
                problems.remove(name);
                if let Some(uuid) = found {
                    tracing::info!(bdev = name, %uuid, "lvstore loaded");
                }
            }
            Err(e) => {
                problems.insert(name.to_owned(), e.message.clone());
            }
        }
        outcome.map(|_| ())
    }

    /// Loads the bdev with checksums that lies on another, and what lies on it; whether there is one.
    fn examine_for_checksums(&self, name: &str) -> Result<bool, Error> {
        let Some(base) = self.registry.get(name) else { return Ok(false) };
        if let Some(there) = Integrity::on(&self.registry, base.name()) {
            self.examine(there.name())?;
            return Ok(true);
        }
        match Integrity::load(&self.registry, base.name()) {
            Ok(None) => Ok(false),
            // Who has it knows what is on it.
            Err(integrity::Error::Registry(RegistryError::Claimed { .. })) => Ok(false),
            Ok(Some(found)) => {
                tracing::info!(bdev = found.name(), base = base.name(), "checksums loaded");
                self.add_bdev(found)?;
                Ok(true)
            }
            Err(e) => Err(errors::integrity(e)),
        }
    }

    /// Takes a bdev away: first what lies on it, and forgets all of that and the targets that it was
    /// behind. One that could not be restored is just forgotten. Refused
    /// while it, or an lvol on it, is exported: what is mounted on it would lose its data.
    pub fn remove_bdev(&self, name: &str) -> Result<(), Error> {
        let key = state::bdev_key(name);
        let mut restoring = self.restoring.lock();
        let registered = self.registry.get(name);
        // Where its disk answers after all, it does not come back.
        restoring.remove(&key);
        let Some(bdev) = registered else {
            let unrestored = |item: &Item| item.key == key && item.problem.is_some();
            self.awaited.release(name);
            let forgotten = self.config().forget(unrestored);
            return match forgotten {
                true => {
                    limits::forget(self, name);
                    Ok(())
                }
                false => Err(errors::no_bdev(name)),
            };
        };
        drop(restoring);
        let name = bdev.name().to_owned();
        let gone = above::with_what_is_on(self, &name)?;
        self.check_not_exported(&gone)?;
        let keys = above::take_away(self, &gone)?;
        self.check_not_exported(&gone)?;
        let removed = self.registry.unregister(&name);
        keys.iter().for_each(|key| encryption::let_go(self, key));
        // One that somebody still holds goes when that lets go, and does not come back.
        if let Ok(_) | Err(RegistryError::StillHeld { .. }) = &removed {
            self.lvstore_problems().remove(&name);
            self.forget_bdevs(&gone);
        }
        removed.map(drop).map_err(errors::registry)
    }

    /// Whether a bdev may be taken away with what lies on it.
    ///
    /// # Errors
    /// It, or what lies on it, is exported.
    pub fn check_removable(&self, name: &str) -> Result<(), Error> {
        self.check_not_exported(&above::with_what_is_on(self, name)?)
    }

    fn check_not_exported(&self, bdevs: &[String]) -> Result<(), Error> {
        match self.exports.list().into_iter().find(|e| bdevs.contains(&e.bdev_name)) {
            None => Ok(()),
            Some(export) => Err(errors::exported(&export)),
        }
    }

    /// Forgets bdevs that are gone, the targets they were behind, and controllers whose disk they were.
    pub fn forget_bdevs(&self, gone: &[String]) {
        // What was on it, such as an lvol, comes back with it, and is limited then.
        let made = |name: &&String| self.config().get(&state::bdev_key(name)).is_some();
        let deleted: Vec<_> = gone.iter().filter(made).collect();
        deleted.into_iter().for_each(|name| limits::forget(self, name));
        let mut config = self.config();
        let ctrlr = |item: &state::Item| Some(item.call.params.get("ctrlr")?.as_str()?.to_owned());
        let without_disk: Vec<_> = config
            .items()
            .filter(|item| {
                let disk = item.call.params.get("dev_name").and_then(|v| v.as_str());
                disk.is_some_and(|disk| gone.iter().any(|name| name == disk))
            })
            .filter_map(ctrlr)
            .collect();
        config.forget(|item| {
            if ctrlr(item).is_some_and(|ctrlr| without_disk.contains(&ctrlr)) {
                return true;
            }
            let behind = item.call.params.get("bdev_name").and_then(|v| v.as_str());
            gone.iter().any(|name| item.key == state::bdev_key(name) || behind == Some(name))
        });
    }

    /// By bdev: why the lvstore on it cannot be loaded.
    pub fn lvstore_problems(&self) -> MutexGuard<'_, BTreeMap<String, String>> {
        self.lvstore_problems.lock()
    }

    /// Whether each bdev that is configured is there, and the lvstore on it, if any, loaded.
    pub fn storage_is_complete(&self) -> bool {
        let is_bdev = |key: &str| key.starts_with(state::BDEV_KEY);
        // What goes on first, for it ends with a problem or without.
        let goes_on = self.restoring().iter().any(|key| is_bdev(key)) || self.waits.any(is_bdev);
        let is_lost = self.config().problems().keys().any(|key| is_bdev(key));
        !goes_on && !is_lost && self.lvstore_problems().is_empty()
    }

    /// Stops in order: nothing is served any more, then the lvstores let go of their bdevs with
    /// everything durable, then the threads end. Where I/O does not end, the process ends
    /// as if it was killed: the kernel holds what that I/O needs, and the lvstores are recovered.
    pub fn stop(self) {
        self.stop_serving();
        self.reactors.stop();
    }

    /// As [`App::stop`], but for the reactors' threads: for when a thread that waits for a disk still
    /// needs the rest.
    pub fn stop_serving(&self) {
        if let Err(why) = self.copies.end_all("the target ends") {
            tracing::error!("{why}");
        }
        faults::end_all(&self.registry);
        if !self.controllers.stop() {
            tracing::error!("not stopped in order: I/O of a VM has not ended");
            rbd::exit(1);
        }
        if !self.exports.stop() {
            tracing::error!("not stopped in order: I/O of an export has not ended");
            rbd::exit(1);
        }
        *self.ublk_target.lock() = None;
        nbd::end_all(&self.registry);
        iscsi::end_all(&self.registry);
        nvme::end_all(&self.registry);
        if let Err(e) = self.close_storage() {
            tracing::error!("not stopped in order: {e}");
            rbd::exit(1);
        }
        self.pools.clear();
        self.clusters.clear();
        rbd::wait_until_quiet(CLOSE_TIMEOUT);
    }

    /// Unloads all lvstores and closes all bdevs, which nobody uses; a flush that failed, also of
    /// that, is recorded.
    ///
    /// # Errors
    /// In one sentence: an lvstore does not come to its end, or a failed flush cannot be recorded. What
    /// was closed before stays closed.
    pub fn close_storage(&self) -> Result<(), String> {
        above::close_layers(self)?;
        for lvs in self.lvstores.lvstores() {
            if let Err(e) = self.lvstores.unload(&lvs.uuid.to_string()) {
                if matches!(e, lvol::Error::Waiting { .. }) {
                    return Err(format!("lvstore {} is not unloaded: {e}", lvs.name));
                }
                tracing::error!(lvstore = lvs.name, "not unloaded in order: {e}");
            }
        }
        self.flush_errors.record().map_err(|e| format!("a failed flush is not recorded: {e}"))?;
        let mut closing = Vec::new();
        let mut images = Vec::new();
        let mut controllers = Vec::new();
        for bdev in self.registry.list().into_iter().rev() {
            let name = bdev.name();
            let file = self.registry.get_as::<FileBdev>(name);
            closing.extend(file.map(|file| (name.to_owned(), file.closing())));
            let image = self.registry.get_as::<Disk>(name);
            images.extend(image.map(|image| (name.to_owned(), image.closing())));
            let disk = self.registry.get_as::<nvme::Disk>(name);
            controllers.extend(
                disk.map(|disk| (disk.controller().name().to_owned(), disk.controller().closing())),
            );
            if let Err(e) = self.registry.unregister(name) {
                tracing::error!("not closed in order: {e}");
            }
        }
        controller::wait_closed(controllers, Instant::now() + CONTROLLERS_TIMEOUT);
        // A thread that let go of one a moment ago may still have to end its use.
        let end = Instant::now() + CLOSE_TIMEOUT;
        for (bdev, file) in closing {
            if !file.wait(end.saturating_duration_since(Instant::now())) {
                tracing::error!(bdev, "still in use, so no other process can open its file");
            }
        }
        let end = Instant::now() + IMAGES_TIMEOUT;
        for (bdev, image) in images {
            if !image.wait(end.saturating_duration_since(Instant::now())) {
                return Err(format!(
                    "bdev {bdev}: its cluster does not answer, so its image is not closed"
                ));
            }
        }
        Ok(())
    }

    /// The content of all bdevs in memory, each as a file, for [`App::inherit_memory`].
    ///
    /// # Errors
    /// In one sentence: there is no memory for a copy.
    pub fn save_memory(&self) -> Result<Vec<(String, OwnedFd)>, String> {
        let names = self.registry.list().into_iter().map(|bdev| bdev.name().to_owned());
        let disks = names.filter_map(|name| Some((self.registry.get_as::<Malloc>(&name)?, name)));
        let saved = disks.map(|(disk, name)| match disk.save() {
            Ok(file) => Ok((name, file)),
            Err(e) => Err(format!("the content of bdev {name} cannot be saved: {e}")),
        });
        saved.collect()
    }

    /// The bdevs in memory that are made next have this content.
    pub fn inherit_memory(&self, saved: Vec<(String, OwnedFd)>) {
        *self.memory.lock() = saved.into_iter().collect();
    }

    /// What the bdev in memory of that name has as its content, once.
    pub fn inherited_memory(&self, name: &str) -> Option<OwnedFd> {
        self.memory.lock().remove(name)
    }
}
