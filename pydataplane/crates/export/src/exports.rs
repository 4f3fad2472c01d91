//! All exports of the process.

use bdev::{Registry, Subscription};
use holder::{Client, ClientError, Mounts};
use parking_lot::{Mutex, RwLock};
use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::thread;
use std::time::{Duration, Instant};
use uuid::Uuid;

use crate::errors::ExportError;
use crate::keeper::{Abilities, Keeper};
use crate::shape::Shape;
use crate::shared::Order;
use crate::volume::{Ending, Face, Volume, Way};

mod disks;
mod watch;
pub use disks::DiskInfo;
use watch::{on_event, watch_holder};

/// How long [`Exports::delete`] waits for a file to be closed: the kernel tells of a close, and a
/// loop device lets go, a moment later.
pub const RELEASE_TIMEOUT: Duration = Duration::from_secs(2);

/// How long [`Exports::park`] waits for what is being written.
pub const PARK_TIMEOUT: Duration = Duration::from_secs(10);

/// How long [`Exports::delete`] and [`Exports::stop`] wait for I/O in flight to end.
pub const END_TIMEOUT: Duration = Duration::from_secs(10);

/// How often it looks meanwhile.
const RELEASE_POLL: Duration = Duration::from_millis(5);

/// What becomes of an export when the process does not serve it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Survives {
    /// It ends: whoever has it open gets errors.
    Nothing,
    /// An orderly restart: I/O waits. When the process is killed it ends, since the kernel, older
    /// than Linux 6.9, cannot send again what the process had taken.
    Restart,
    /// A killed process, too: I/O waits.
    Crash,
}

/// An export.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Info {
    /// Name of the bdev.
    pub bdev_name: String,
    /// UUID of the bdev, the name of the file.
    pub uuid: Uuid,
    /// The file, or the device.
    pub path: PathBuf,
    /// Whether writes are refused.
    pub read_only: bool,
    /// Whether others may claim the bdev, and writes are refused for now.
    pub parked: bool,
    /// How often the file is open; of a device 1 where something has it alone.
    pub opens: u32,
    /// Size in bytes.
    pub size: u64,
    /// What it survives.
    pub survives: Survives,
}

/// How a bdev is to be exported.
struct Make {
    read_only: bool,
    parked: bool,
    shape: Shape,
}

struct Inner {
    registry: Registry,
    keeper: Keeper,
    /// Held during a control operation; the number of the next export.
    control: Mutex<u64>,
    table: RwLock<BTreeMap<Uuid, Arc<Volume>>>,
    /// Devices of bdevs that are gone, which nobody could take away yet.
    unstopped: Mutex<BTreeSet<Uuid>>,
}

/// All exports. Every method may wait for I/O: for control threads.
pub struct Exports {
    inner: Arc<Inner>,
    _events: Subscription,
}

impl Exports {
    /// None yet; they will be mounts in `dir`, and end with this process.
    pub fn new(registry: Registry, dir: &Path) -> Exports {
        let (mounts, trees) = (Mounts::new(dir), Mutex::default());
        Exports::with(registry, Keeper::Here { mounts, trees })
    }

    /// As [`Exports::new`], with mounts that the holder behind `client` makes in `dir` and keeps
    /// when this process ends.
    pub fn held(registry: Registry, dir: &Path, client: Arc<Client>) -> Exports {
        let mounts = Mounts::new(dir);
        let exports = Exports::with(registry, Keeper::Holder { client: client.clone(), mounts });
        let inner = Arc::downgrade(&exports.inner);
        let watch = thread::Builder::new().name("holder-watch".into());
        if let Err(e) = watch.spawn(move || watch_holder(&client, &inner)) {
            tracing::error!("a holder that is restarted will not be noticed: {e}");
        }
        exports
    }

    fn with(registry: Registry, keeper: Keeper) -> Exports {
        let inner = Arc::new(Inner {
            registry: registry.clone(),
            keeper,
            control: Mutex::new(0),
            table: RwLock::default(),
            unstopped: Mutex::default(),
        });
        let weak = Arc::downgrade(&inner);
        let events = registry.subscribe(move |event| on_event(&weak, event));
        Exports { inner, _events: events }
    }

    /// Shows the bdev (name, alias or UUID) as a file and returns its path. One that is exported
    /// the same way already stays as it is; one that another process has left goes on.
    ///
    /// # Errors
    /// [`ExportError`]: no such bdev, another face has it, exported the other way, no mount.
    pub fn create(&self, key: &str, read_only: bool) -> Result<PathBuf, ExportError> {
        self.make(key, Make { read_only, parked: false, shape: Shape::File })
    }

    /// As [`Exports::create`] or [`Exports::create_parked`], as a device of ublk's where the holder
    /// can have one made, else as a file. One that is exported already stays what it is, and a device
    /// takes the bdev's size. A new device has blocks of `block_size` bytes, a power of two, where the
    /// bdev's are shorter.
    ///
    /// # Errors
    /// Those of [`Exports::create_parked`]; [`ExportError::DiskInUse`].
    pub fn create_disk(
        &self,
        key: &str,
        read_only: bool,
        parked: bool,
        block_size: u32,
    ) -> Result<PathBuf, ExportError> {
        let path =
            self.make(key, Make { read_only, parked, shape: Shape::DiskOrFile { block_size } })?;
        if parked {
            self.park(key)?;
        }
        Ok(path)
    }

    /// As [`Exports::create`], and it is parked when this returns: a new one was never anything
    /// else, so that the bdev may be in use already.
    ///
    /// # Errors
    /// Those of [`Exports::create`] and [`Exports::park`].
    pub fn create_parked(&self, key: &str, read_only: bool) -> Result<PathBuf, ExportError> {
        let path = self.make(key, Make { read_only, parked: true, shape: Shape::File })?;
        self.park(key)?;
        Ok(path)
    }

    fn make(&self, key: &str, make: Make) -> Result<PathBuf, ExportError> {
        let Make { read_only, parked, shape } = make;
        let inner = &self.inner;
        let mut control = inner.control.lock();
        let bdev = inner.registry.require(key)?;
        let uuid = bdev.uuid();
        let path = inner.keeper.path(uuid);
        if let Some(there) = inner.named(bdev.name()) {
            if matches!(shape, Shape::Disk(_)) && !there.is_over() {
                let path = there.disk_path().unwrap_or(path);
                return Err(ExportError::Exported { name: bdev.name().into(), path });
            }
            if there.read_only != (read_only || bdev.features().read_only) {
                let how = if there.read_only { "read-only" } else { "for writing" };
                return Err(ExportError::OtherMode { name: bdev.name().into(), how });
            }
            if !there.is_over() {
                if let Some(path) = there.disk_path() {
                    there.fit_disk(&inner.keeper);
                    return Ok(path);
                }
                inner.keeper.put_back(uuid)?;
                return Ok(path);
            }
            // Aborted behind our back: nobody is served by it any more.
            inner.end(&there, Order::Refuse)?.wait(END_TIMEOUT);
        }
        let owner = format!("the export {}", path.display());
        let way = Way { number: *control, read_only, parked, shape, owner };
        let volume = Volume::start(&inner.registry, bdev.name(), &inner.keeper, way)?;
        *control += 1;
        let path = volume.disk_path().unwrap_or(path);
        inner.table.write().insert(uuid, Arc::new(volume));
        Ok(path)
    }

    /// Takes the file of a bdev away. While it is open it stays, unless `force`: then what has it
    /// open gets errors.
    ///
    /// # Errors
    /// [`ExportError::NotExported`]; [`ExportError::Open`] after [`RELEASE_TIMEOUT`];
    /// [`ExportError::StillEnding`] after `END_TIMEOUT`, and then it is deleted;
    /// [`ExportError::Holder`]: nobody can take a device away, and it is served on.
    pub fn delete(&self, key: &str, force: bool) -> Result<(), ExportError> {
        self.delete_within(key, force, END_TIMEOUT)
    }

    fn delete_within(&self, key: &str, force: bool, timeout: Duration) -> Result<(), ExportError> {
        let inner = &self.inner;
        let control = inner.control.lock();
        let name = inner.registry.get(key).map_or_else(|| key.to_owned(), |b| b.name().to_owned());
        let end = Instant::now() + RELEASE_TIMEOUT;
        let volume = loop {
            let volume =
                inner.named(&name).ok_or_else(|| ExportError::NotExported(key.to_owned()))?;
            // Where nobody can tell whether a device is open, nobody can take it away either.
            if (force || inner.opens(&volume)? == 0) && volume.close(force) {
                break volume;
            }
            if Instant::now() > end {
                return Err(ExportError::Open { name, opens: inner.opens(&volume)? });
            }
            thread::sleep(RELEASE_POLL);
        };
        let ending = inner.end_in_order(&volume)?;
        drop(control);
        let seconds = timeout.as_secs();
        match ending.wait(timeout) {
            true => Ok(()),
            false => Err(ExportError::StillEnding { name, seconds }),
        }
    }

    /// Gives up what another process has left of the export of the bdev with this UUID, which is not
    /// there and so cannot be served: what has it open gets errors. Fine where there is none.
    ///
    /// # Errors
    /// [`ExportError::Holder`], [`ExportError::Os`].
    pub fn forget(&self, uuid: Uuid) -> Result<(), ExportError> {
        let _control = self.inner.control.lock();
        match self.inner.table.read().contains_key(&uuid) {
            true => Ok(()),
            false => self.inner.keeper.end(uuid),
        }
    }

    /// What devices of ublk can be had. Asks the holder.
    pub fn disk_abilities(&self) -> Abilities {
        self.inner.keeper.disk_abilities()
    }

    /// Lets others claim an exported bdev, a controller for a VM above all: writes to its file fail
    /// from now on (EROFS), those in flight have ended when this returns, reads are served on. The
    /// file and what has it open stay. Does nothing to a parked one.
    ///
    /// # Errors
    /// [`ExportError::NotExported`]; [`ExportError::Changing`] after [`PARK_TIMEOUT`].
    pub fn park(&self, key: &str) -> Result<(), ExportError> {
        self.require(key)?.park(&self.inner.registry, PARK_TIMEOUT)
    }

    /// Claims the bdev of a parked export alone again and takes writes. Does nothing to one that is
    /// not parked. What the kernel cached of the file while others wrote the bdev is not dropped.
    ///
    /// # Errors
    /// [`ExportError::NotExported`]; [`ExportError::Registry`] when somebody holds the bdev, and
    /// then it stays parked.
    pub fn unpark(&self, key: &str) -> Result<(), ExportError> {
        self.require(key)?.unpark(&self.inner.registry)
    }

    /// The export of a bdev (name, alias or UUID).
    fn require(&self, key: &str) -> Result<Arc<Volume>, ExportError> {
        let registry = &self.inner.registry;
        let name = registry.get(key).map_or_else(|| key.to_owned(), |b| b.name().to_owned());
        self.inner.named(&name).ok_or_else(|| ExportError::NotExported(key.to_owned()))
    }

    /// All exports, in the order in which they were made.
    pub fn list(&self) -> Vec<Info> {
        let inner = &self.inner;
        let mut volumes: Vec<_> = inner.table.read().values().cloned().collect();
        volumes.sort_by_key(|volume| volume.number);
        let info = |v: Arc<Volume>| Info {
            bdev_name: v.bdev.name().to_owned(),
            uuid: v.uuid,
            path: v.disk_path().unwrap_or_else(|| inner.keeper.path(v.uuid)),
            read_only: v.read_only,
            parked: v.is_parked(),
            // Where nobody can tell, it is taken to be so.
            opens: inner.opens(&v).unwrap_or(1),
            size: v.bdev.geometry().bytes(),
            survives: match inner.keeper.outlives() || v.disk_path().is_some() {
                false => Survives::Nothing,
                true if v.survives_a_crash() => Survives::Crash,
                true => Survives::Restart,
            },
        };
        volumes.into_iter().map(info).collect()
    }

    /// Ends all exports: before lvstores are unloaded. What is open is left to the process that
    /// comes next, if the mounts are held: its users wait. Else they get errors.
    /// `false`: I/O of some has not ended after `END_TIMEOUT`, so that bdevs must be left as they
    /// are.
    #[must_use]
    pub fn stop(&self) -> bool {
        let inner = &self.inner;
        let _control = inner.control.lock();
        let all = std::mem::take(&mut *inner.table.write());
        let leave = |volume: &Volume| match volume.face {
            Face::File { .. } => inner.keeper.outlives() && !volume.close(false),
            // The kernel keeps it, and its number.
            Face::Disk { .. } => true,
        };
        let end = |volume: &Arc<Volume>| match leave(volume) {
            true => volume.end(Order::Leave),
            false => inner.take_away(volume, Order::Refuse).unwrap_or_else(|e| {
                tracing::warn!("{e}");
                volume.end(Order::Refuse)
            }),
        };
        let endings: Vec<_> = all.values().map(end).collect();
        let end = Instant::now() + END_TIMEOUT;
        let left = || end.saturating_duration_since(Instant::now());
        // Each is looked at, also after one that has not ended.
        let ended: Vec<_> = endings.into_iter().map(|ending| ending.wait(left())).collect();
        ended.into_iter().all(|ended| ended)
    }
}

impl Drop for Exports {
    fn drop(&mut self) {
        _ = self.stop();
        if let Keeper::Holder { client, .. } = &self.inner.keeper {
            client.disconnect();
        }
    }
}

impl Inner {
    /// The export of the bdev of that name.
    fn named(&self, name: &str) -> Option<Arc<Volume>> {
        self.table.read().values().find(|v| v.bdev.name() == name).cloned()
    }

    /// How often an export is open, as far as one can tell of a device.
    fn opens(&self, volume: &Volume) -> Result<u32, ExportError> {
        match volume.face {
            Face::File { .. } => Ok(volume.opens()),
            Face::Disk { .. } => Ok(u32::from(self.keeper.is_disk_open(volume.uuid)?)),
        }
    }

    /// Takes an export's mount away and has its thread end.
    fn take_away(&self, volume: &Volume, how: Order) -> Result<Ending, ExportError> {
        let ending = volume.end(how);
        match volume.face {
            Face::File { .. } => self.keeper.end(volume.uuid)?,
            Face::Disk { .. } => self.keeper.end_disk(volume.uuid)?,
        }
        Ok(ending)
    }

    /// As [`Inner::take_away`], and out of the table.
    fn end(&self, volume: &Volume, how: Order) -> Result<Ending, ExportError> {
        let ending = self.take_away(volume, how);
        self.table.write().remove(&volume.uuid);
        ending
    }

    /// As [`Inner::end`] of one whose bdev is there: a device is served until the kernel has taken it
    /// away, so that it stays as it is where nobody can have that done.
    fn end_in_order(&self, volume: &Volume) -> Result<Ending, ExportError> {
        if let Face::Disk { .. } = volume.face {
            match self.keeper.end_disk(volume.uuid) {
                // The kernel does, as soon as the I/O ends.
                Ok(()) | Err(ExportError::Holder(ClientError::Late { .. })) => {}
                Err(e) => return Err(e),
            }
            self.table.write().remove(&volume.uuid);
            return Ok(volume.end(Order::Refuse));
        }
        self.end(volume, Order::Refuse)
    }
}

#[cfg(test)]
mod tests;
