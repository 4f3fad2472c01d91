//! All controllers of the process: what the RPC methods call.

use parking_lot::{Mutex, MutexGuard};
use std::collections::BTreeMap;
use std::path::PathBuf;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{Receiver, RecvTimeoutError};
use std::sync::{Arc, OnceLock, Weak};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use bdev::{Event, Registry, Subscription};
use reactor::{Handle, NotRun};
use scsi::{RecordKeeper, ReservationKeeper};

use crate::balance::{Balancer, Load, Move};
use crate::coalescing::Coalescing;
use crate::controller::{Controller, Records, Setup, Timeouts, cpu_of};
use crate::error::{ControllerError, MAX_NAME};
use crate::front::Front;
use crate::handover::Inherited;
use crate::info::ControllerInfo;
use crate::keeper::SessionKeeper;
use crate::lun::{Suspension, TargetOptions};
use crate::mailbox::Order;
use crate::owner::{NamedOwner, OwnerJournal};
use crate::socket::{Listener, SocketOptions};
use crate::stats::{ControllerStats, LunStats};

mod handover;
mod hold;
mod targets;

/// Where the sockets are and who may connect.
#[derive(Clone, Debug)]
pub struct Settings {
    /// Directory of the sockets; each is named as its controller.
    pub directory: PathBuf,
    /// Permission bits of a socket.
    pub mode: u32,
    /// Owner of a socket, if not the process's user.
    pub uid: Option<u32>,
    /// Group of a socket, if not the process's group.
    pub gid: Option<u32>,
    /// How long is waited for I/O in flight.
    pub timeouts: Timeouts,
    /// Directory of marks that requests may be in flight, which a crash leaves; `None`: none are
    /// made.
    pub marks: Option<PathBuf>,
}

/// How a controller is made.
#[derive(Clone, Debug, Default)]
pub struct ControllerOptions {
    /// What its guest sees.
    pub front: Front,
    /// Path of the socket, if not `<directory>/<name>`.
    pub socket: Option<PathBuf>,
    /// CPUs on whose reactors its queues run; `None`: on all reactors.
    pub cpus: Option<Vec<usize>>,
    /// Let VMs that connect wait until [`Controllers::start`]: for targets that must be there
    /// first, as after a restart.
    pub delay: bool,
    /// Group that may connect, if not that of [`Settings`]; then the socket's mode is 0660.
    pub socket_gid: Option<u32>,
}

/// A target as it was added, for saving the configuration.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TargetConfig {
    /// Number.
    pub number: u8,
    /// The volume behind it.
    pub bdev_name: String,
    /// How it is shown.
    pub options: TargetOptions,
}

/// A target whose requests wait because an I/O failed.
#[derive(Clone, Debug, PartialEq)]
pub struct SuspendedTarget {
    /// Name of the controller.
    pub ctrlr: String,
    /// Number.
    pub number: u8,
    /// The volume behind it.
    pub bdev_name: String,
    /// Since when and for what.
    pub suspension: Suspension,
    /// Its rings have stopped, and later requests of theirs had ended: nothing but the peer's in-flight
    /// region tells of it. A guest that is saved or migrated would lose it.
    pub overtaken: bool,
}

/// Counters of a controller and its targets.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct StatsInfo {
    /// Name of the controller.
    pub ctrlr: String,
    /// Of the controller.
    pub controller: ControllerStats,
    /// Of each target: number, bdev, counters.
    pub targets: Vec<(u8, String, LunStats)>,
}

struct Entry {
    controller: Arc<Controller>,
    options: ControllerOptions,
    thread: JoinHandle<()>,
    /// Closed by the thread when it ends.
    ended: Receiver<()>,
}

struct Inner {
    registry: Registry,
    reactors: Vec<Handle>,
    settings: Settings,
    /// Held for look-ups and while a controller is made; never while a controller's thread, which
    /// may wait for I/O of its guest, is waited for.
    entries: Mutex<BTreeMap<String, Entry>>,
    /// Unset: owners are not recorded.
    journal: OnceLock<Arc<dyn OwnerJournal>>,
    /// Of reservations; without one they end with the process.
    keeper: OnceLock<Arc<dyn ReservationKeeper>>,
    records: OnceLock<Arc<dyn RecordKeeper>>,
    /// Of sessions; without one they end with the process.
    sessions: OnceLock<Arc<dyn SessionKeeper>>,
    /// Controllers that came from another process and are not made yet.
    inherited: Mutex<BTreeMap<String, Inherited>>,
    /// Controllers are made of what is to come from another process.
    prepares: AtomicBool,
}

/// All controllers. Cheap to clone; every clone is the same set. Every method may wait for
/// reactors and for I/O: for control threads.
#[derive(Clone)]
pub struct Controllers {
    inner: Arc<Inner>,
    /// Keeps the registry's events coming.
    _events: Arc<Subscription>,
}

impl Controllers {
    /// No controllers yet; their queues will run on `reactors`, of which there is at least one.
    pub fn new(registry: Registry, reactors: &[Handle], settings: Settings) -> Self {
        assert!(!reactors.is_empty(), "controllers need a reactor");
        let inner = Arc::new(Inner {
            registry: registry.clone(),
            reactors: reactors.to_vec(),
            settings,
            entries: Mutex::default(),
            journal: OnceLock::new(),
            keeper: OnceLock::new(),
            records: OnceLock::new(),
            sessions: OnceLock::new(),
            inherited: Mutex::default(),
            prepares: AtomicBool::new(false),
        });
        let weak = Arc::downgrade(&inner);
        let events = registry.subscribe(move |event| on_event(&weak, event));
        Controllers { inner, _events: Arc::new(events) }
    }

    fn entries(&self) -> MutexGuard<'_, BTreeMap<String, Entry>> {
        self.inner.entries()
    }

    fn method_timeout(&self) -> Duration {
        self.inner.settings.timeouts.method
    }

    fn find(&self, name: &str) -> Result<Arc<Controller>, ControllerError> {
        let entries = self.entries();
        let entry = entries.get(name).ok_or_else(|| ControllerError::NotFound(name.into()))?;
        Ok(Arc::clone(&entry.controller))
    }

    /// Makes a controller that listens on its socket.
    pub fn create(&self, name: &str, options: ControllerOptions) -> Result<(), ControllerError> {
        check_name(name)?;
        let mut entries = self.entries();
        if entries.contains_key(name) {
            return Err(ControllerError::Exists(name.into()));
        }
        let mut reactors = self.reactors_of(options.cpus.as_deref())?;
        // Each controller begins on another reactor, as most have few queues.
        let first = entries.len() % reactors.len();
        reactors.rotate_left(first);
        let settings = &self.inner.settings;
        let socket = SocketOptions {
            path: options.socket.clone().unwrap_or_else(|| settings.directory.join(name)),
            mode: options.socket_gid.map_or(settings.mode, |_| 0o660),
            uid: settings.uid,
            gid: options.socket_gid.or(settings.gid),
        };
        let inherited = self.inherited_listener(name, &socket.path)?;
        let inherits = inherited.is_some();
        let listener = match inherited {
            Some(listener) => listener,
            None => Listener::bind(&socket)?,
        };
        let setup = Setup {
            front: options.front,
            accepts: !options.delay,
            timeouts: settings.timeouts,
            records: Records {
                journal: self.inner.journal.get().cloned(),
                mark: settings.marks.as_ref().map(|marks| marks.join(name)),
                keeper: self.inner.sessions.get().cloned(),
            },
            inherits,
        };
        let started = Controller::start(name, socket, listener, reactors, setup);
        let (controller, thread, ended) =
            started.map_err(|why| ControllerError::Start { name: name.into(), why })?;
        self.begin(&controller);
        entries.insert(name.into(), Entry { controller, options, thread, ended });
        Ok(())
    }

    /// Where the reservations of volumes are kept, before any target is added.
    pub fn keep_reservations(&self, keeper: Arc<dyn ReservationKeeper>) {
        _ = self.inner.keeper.set(keeper);
    }

    /// Where what else of volumes is to outlive the process is kept, before any target is added.
    pub fn keep_records(&self, records: Arc<dyn RecordKeeper>) {
        _ = self.inner.records.set(records);
    }

    /// Who keeps the sessions of controllers that are made from now on, once: they go on in the next
    /// process if this one is killed, and the front end notices no more than a pause.
    pub fn keep_sessions(&self, keeper: Arc<dyn SessionKeeper>) {
        _ = self.inner.sessions.set(keeper);
    }

    /// Has all sessions kept anew: whoever keeps them has lost them.
    pub fn keep_sessions_again(&self) {
        self.entries().values().for_each(|e| e.controller.mailbox.send(Order::KeepAgain));
    }

    /// Has the owners of controllers that are made from now on recorded in `journal`; once.
    pub fn record_owners(&self, journal: Arc<dyn OwnerJournal>) {
        _ = self.inner.journal.set(journal);
    }

    /// Says who a controller belongs to. Whoever is connected and is another process is
    /// disconnected, soon after this returned. Not recorded by this.
    pub fn set_owner(&self, name: &str, named: NamedOwner) -> Result<(), ControllerError> {
        self.find(name)?.change_owner(|owner| owner.set(named));
        Ok(())
    }

    /// Lets VMs connect to a controller that was made with `delay`. Does nothing to a started one.
    pub fn start(&self, name: &str) -> Result<(), ControllerError> {
        self.find(name)?.mailbox.send(Order::Accept);
        Ok(())
    }

    /// Has VMs that connect to a controller that is not started refused, so that they try again
    /// instead of standing still. Does nothing to a started one.
    pub fn refuse(&self, name: &str) -> Result<(), ControllerError> {
        self.find(name)?.mailbox.send(Order::Refuse);
        Ok(())
    }

    /// Deletes a controller with its targets and its socket. One that a VM is connected to is
    /// left alone, unless `force`: then the VM loses its disks. A VM that connects meanwhile is
    /// connected, or finds no controller. I/O that does not end keeps the VM's
    /// memory and the bdevs, not the controller ([`ControllerError::StillEnding`]).
    pub fn delete(&self, name: &str, force: bool) -> Result<(), ControllerError> {
        let controller = self.find(name)?;
        if !force {
            let (call, caller) = reactor::call(());
            controller.mailbox.send(Order::StopUnlessConnected(call));
            // A thread that does not answer waits for I/O of a peer's.
            let stops = caller.wait(self.method_timeout());
            if matches!(stops, Ok(false) | Err(NotRun::Busy)) {
                return Err(ControllerError::Connected(name.into()));
            }
        }
        let entry = self.entries().remove(name);
        let entry = entry.ok_or_else(|| ControllerError::NotFound(name.into()))?;
        let waited = self.method_timeout();
        match entry.stop(waited) {
            true => Ok(()),
            false => Err(ControllerError::StillEnding { controller: name.into(), waited }),
        }
    }

    /// All controllers, or the one named.
    pub fn list(&self, name: Option<&str>) -> Result<Vec<ControllerInfo>, ControllerError> {
        let entries = self.entries();
        if let Some(name) = name {
            let entry = entries.get(name).ok_or_else(|| ControllerError::NotFound(name.into()))?;
            return Ok(vec![entry.controller.as_ref().into()]);
        }
        Ok(entries.values().map(|e| e.controller.as_ref().into()).collect())
    }

    /// Names of all controllers with their options and targets, for saving the configuration.
    pub fn config(&self) -> Vec<(String, ControllerOptions, Vec<TargetConfig>)> {
        let entries = self.entries();
        let one = |(name, entry): (&String, &Entry)| {
            let targets = entry.controller.targets();
            let targets = targets.iter().flatten().filter(|t| !t.leaving).map(|t| TargetConfig {
                number: t.number,
                bdev_name: t.bdev_name().into(),
                options: t.options.clone(),
            });
            (name.clone(), entry.options.clone(), targets.collect())
        };
        entries.iter().map(one).collect()
    }

    /// Counters of all controllers, or of the one named; of its targets all, or the one of that number.
    pub fn stats(
        &self,
        name: Option<&str>,
        target: Option<u8>,
    ) -> Result<Vec<StatsInfo>, ControllerError> {
        let entries = self.entries();
        if let Some(name) = name
            && !entries.contains_key(name)
        {
            return Err(ControllerError::NotFound(name.into()));
        }
        let wanted = entries.iter().filter(|(n, _)| name.is_none_or(|name| name == n.as_str()));
        let one = |(name, entry): (&String, &Entry)| {
            let targets = entry.controller.targets();
            let targets = targets.iter().flatten();
            let targets = targets.filter(|t| target.is_none_or(|target| target == t.number));
            StatsInfo {
                ctrlr: name.clone(),
                controller: entry.controller.stats(),
                targets: targets.map(|t| (t.number, t.bdev_name().into(), t.stats())).collect(),
            }
        };
        Ok(wanted.map(one).collect())
    }

    /// The targets whose requests wait because an I/O failed, of all controllers or of the one named.
    pub fn suspended(&self, name: Option<&str>) -> Result<Vec<SuspendedTarget>, ControllerError> {
        let controllers: Vec<_> = match name {
            Some(name) => vec![self.find(name)?],
            None => self.entries().values().map(|e| Arc::clone(&e.controller)).collect(),
        };
        let of = |controller: &Arc<Controller>| {
            let ctrlr = controller.name.clone();
            let all = controller.suspended().into_iter();
            let overtaken = controller.overtaken.load(Ordering::Relaxed);
            all.map(move |(number, bdev_name, suspension)| SuspendedTarget {
                ctrlr: ctrlr.clone(),
                number,
                bdev_name,
                suspension,
                overtaken,
            })
        };
        Ok(controllers.iter().flat_map(of).collect())
    }

    /// Begins what waits because an I/O failed, of one target or of all of a controller. What fails
    /// again waits again. Returns of how many targets.
    pub fn resume(&self, name: &str, number: Option<u8>) -> Result<usize, ControllerError> {
        let controller = self.find(name)?;
        let (call, caller) = reactor::call(number);
        controller.mailbox.send(Order::Resume(call));
        let waited = self.method_timeout();
        caller.wait(waited).map_err(|why| match why {
            NotRun::Busy => ControllerError::Waiting { controller: name.into(), waited },
            NotRun::Gone => ControllerError::NotFound(name.into()),
        })
    }

    /// Sets when the guest of a controller is called, from now on and for those to come.
    ///
    /// # Errors
    /// [`ControllerError::NotFound`].
    pub fn set_coalescing(&self, name: &str, to: Coalescing) -> Result<(), ControllerError> {
        self.find(name)?.coalescing.set(to);
        Ok(())
    }

    /// Looks where queues run, and has one move if a reactor has more to do than it can; to be called once
    /// a second or so. The move is done soon after this returned, where the queue's I/O ends quickly.
    pub fn balance(&self, balancer: &mut Balancer) {
        let reactors = &self.inner.reactors;
        let mut loads = Vec::new();
        for (name, entry) in &*self.entries() {
            let controller = &entry.controller;
            if !controller.session().is_some_and(|(_, runs)| runs) {
                continue;
            }
            let of_it: Vec<usize> = controller.reactors.iter().map(Handle::index).collect();
            loads.extend(controller.placement.running().map(|(queue, place, requests)| Load {
                ctrlr: name.clone(),
                queue,
                place,
                reactors: of_it.clone(),
                requests,
            }));
        }
        let stats: Vec<_> = reactors.iter().map(Handle::stats).collect();
        if let Some(Move { ctrlr, queue, to }) = balancer.look(Instant::now(), &stats, loads) {
            self.move_queue(&ctrlr, queue, to);
        }
    }

    /// Has a request queue of a controller's session go on on another of its reactors, by its place among
    /// them, if its I/O ends quickly. Does nothing where there is no such controller, queue or reactor.
    pub fn move_queue(&self, name: &str, queue: u16, to: usize) {
        if let Ok(controller) = self.find(name) {
            controller.mailbox.send(Order::Move { queue, to });
        }
    }

    /// As [`Controllers::stop_within`], within the time that a method may take.
    #[must_use]
    pub fn stop(&self) -> bool {
        self.stop_within(self.method_timeout())
    }

    /// Ends all sessions, but leaves those that are kept to the next process, and removes all
    /// controllers: before the reactors stop. `false`: I/O of some has not ended within `timeout`, so that
    /// reactors and bdevs must be left as they are.
    #[must_use]
    pub fn stop_within(&self, timeout: Duration) -> bool {
        let all = std::mem::take(&mut *self.entries());
        all.values().for_each(|e| e.controller.mailbox.send(Order::Leave));
        let end = Instant::now() + timeout;
        let mut ended = true;
        for entry in all.into_values() {
            ended &= entry.stop(end.saturating_duration_since(Instant::now()));
        }
        ended
    }

    /// Whether a reactor is on one of these CPUs.
    pub fn have_reactor(&self, cpus: &[usize]) -> bool {
        self.inner.reactors.iter().any(|reactor| cpus.contains(&cpu_of(reactor)))
    }

    fn reactors_of(&self, cpus: Option<&[usize]>) -> Result<Vec<Handle>, ControllerError> {
        let all = &self.inner.reactors;
        let Some(cpus) = cpus else { return Ok(all.clone()) };
        let chosen: Vec<_> = all.iter().filter(|r| cpus.contains(&cpu_of(r))).cloned().collect();
        match chosen.is_empty() {
            true => Err(ControllerError::NoReactor(cpus.to_vec())),
            false => Ok(chosen),
        }
    }
}

impl Entry {
    /// Ends its session and its thread; `false`: not in time, and the thread goes on until the I/O
    /// has ended.
    fn stop(self, timeout: Duration) -> bool {
        self.controller.mailbox.send(Order::Stop);
        let name = &self.controller.name;
        if self.ended.recv_timeout(timeout) == Err(RecvTimeoutError::Timeout) {
            tracing::error!(controller = name, "deleted, but I/O of its VM has not ended");
            return false;
        }
        _ = self.thread.join();
        true
    }
}

impl Inner {
    fn entries(&self) -> MutexGuard<'_, BTreeMap<String, Entry>> {
        self.entries.lock()
    }
}

/// A bdev changed: its targets follow.
fn on_event(inner: &Weak<Inner>, event: &Event) {
    let Some(inner) = inner.upgrade() else { return };
    let (bdev, resized) = match event {
        Event::Registered(_) | Event::Space { .. } => return,
        Event::Resized(bdev) => (bdev, true),
        Event::Removed(bdev) => (bdev, false),
    };
    for entry in inner.entries().values() {
        let controller = &entry.controller;
        for target in controller.targets().iter().flatten() {
            if target.bdev_name() != bdev.name() {
                continue;
            }
            let number = target.number;
            if resized {
                target.shared.notify_resized();
                controller.mailbox.send(Order::Resized { target: number });
            } else {
                controller.mailbox.send(Order::Remove { target: number, gone: None });
            }
        }
    }
}

fn check_name(name: &str) -> Result<(), ControllerError> {
    let plain = |c: char| c.is_ascii_alphanumeric() || matches!(c, '-' | '_' | '.' | ':' | '@');
    let ok = (1..=MAX_NAME).contains(&name.len()) && name.chars().all(plain);
    match ok && name != "." && name != ".." {
        true => Ok(()),
        false => Err(ControllerError::Name(name.into())),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_are_plain_file_names() {
        for good in ["vm-1", "vhost.0", "vm-0f8a2c5e-6c5a-4a9b-9d8e-000000000001"] {
            assert!(check_name(good).is_ok(), "{good}");
        }
        for bad in ["", ".", "..", "a/b", "a b", "é", &"n".repeat(65)] {
            assert!(check_name(bad).is_err(), "{bad}");
        }
    }
}
