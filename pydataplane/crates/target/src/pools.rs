//! Pools whose volumes are elsewhere, by name: images of Ceph, or disks of an array; what is known of them, and which
//! volumes are open.
//!
//! A volume is open, and an image locked, as long as somebody uses its bdev. Everything else that is asked of a pool
//! opens an image for a moment, without a lock, or logs in to list the disks of an array. A pool that does not answer keeps calls about it waiting, as long
//! as their limit says, and calls about everything for some seconds, once.

use crate::array::{self, Array, CLUSTER, Found, lun_number};
use crate::asked::Asked;
use crate::errors;
use crate::volume::Volume;
use lvol::{LvolInfo, LvsRef, LvstoreInfo};
use parking_lot::{Mutex, MutexGuard};
use rbd::{Cluster, Space};
use rpc::{Code, Errno, Error};
use serde_json::{Value, json};
use std::collections::BTreeSet;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::mpsc;
use std::thread;
use std::time::{Duration, Instant};
use uuid::Uuid;

/// How long a call about one volume may take that changes or reads little.
pub const CALL_TIMEOUT: Duration = Duration::from_secs(30);
/// How long a call about all volumes of a pool waits.
pub const LIST_TIMEOUT: Duration = Duration::from_secs(15);
/// How long a call waits that is about all there is, before it goes by what was last known.
pub const ALL_TIMEOUT: Duration = Duration::from_secs(3);
/// How long the data of an image may take to be deleted, copied or rolled back.
pub const DATA_TIMEOUT: Duration = Duration::from_secs(3600);
/// How long a pool waits for its cluster to be connected.
const CONNECT_TIMEOUT: Duration = Duration::from_secs(5);
/// Calls of one pool that have not ended, at most: each has a thread.
const CALLS_MAX: usize = 64;
/// Bytes of a block where nothing is known of it.
const BLOCK_SIZE: u32 = 512;

/// Where the data of a pool is.
#[derive(Clone)]
pub enum Backend {
    /// A pool of Ceph.
    Ceph {
        /// Its cluster.
        cluster: Arc<Cluster>,
        /// `POOL` or `POOL/NAMESPACE`.
        path: String,
        /// Bytes of a block of its volumes' bdevs.
        block_size: u32,
        /// Bytes of an object of a new image.
        object_size: u64,
    },
    /// An array.
    Array(Array),
}

impl Backend {
    /// Which kind of pool is there, as the methods call it.
    pub fn kind(&self) -> &'static str {
        match self {
            Backend::Ceph { .. } => "rbd",
            Backend::Array(array) => array.kind(),
        }
    }

    /// As that, for people.
    pub fn what(&self) -> &'static str {
        match self {
            Backend::Ceph { .. } => "of Ceph",
            Backend::Array(array) => array.what(),
        }
    }

    /// Which one it is, without passwords: the pool of Ceph, or the target and where it is.
    pub fn path(&self) -> String {
        match self {
            Backend::Ceph { path, .. } => path.clone(),
            Backend::Array(array) => array.path(),
        }
    }
}

/// A question to a pool of Ceph.
type Asking<T> = Box<dyn FnOnce() -> Result<T, rbd::Error> + Send>;
/// What lists the volumes of a pool.
type Listing = Box<dyn FnOnce() -> Result<Vec<Volume>, Error> + Send>;

/// A pool.
pub struct Pool {
    /// Name for people, which the aliases of its volumes begin with.
    pub name: String,
    /// Where it is.
    pub backend: Backend,
    /// Identity, the same on every host.
    pub uuid: Uuid,
    space: Arc<Asked<Space>>,
    listed: Arc<Asked<Vec<Volume>>>,
    /// What is known of volumes, by the last answers.
    known: Arc<Mutex<Vec<Volume>>>,
    calls: Arc<AtomicUsize>,
    /// Held while a volume of it is opened or closed.
    opening: Mutex<()>,
}

/// One that is under way.
struct Call(Arc<AtomicUsize>);

impl Drop for Call {
    fn drop(&mut self) {
        self.0.fetch_sub(1, Ordering::AcqRel);
    }
}

impl Pool {
    /// The pool at `backend`, as it is known from earlier on.
    pub fn new(name: String, backend: Backend, uuid: Uuid) -> Pool {
        Pool {
            name,
            backend,
            uuid,
            space: Arc::default(),
            listed: Arc::default(),
            known: Arc::default(),
            calls: Arc::default(),
            opening: Mutex::default(),
        }
    }

    /// Bytes of a cluster, as an lvstore has them: of an object.
    pub fn cluster_size(&self) -> u64 {
        match &self.backend {
            Backend::Ceph { object_size, .. } => *object_size,
            Backend::Array(_) => CLUSTER,
        }
    }

    /// Whether it is one of Ceph.
    pub fn is_ceph(&self) -> bool {
        matches!(self.backend, Backend::Ceph { .. })
    }

    /// What asks the open pool of Ceph, where a thread may wait for it.
    ///
    /// # Errors
    /// It is none of Ceph.
    fn asking<T: 'static>(
        &self,
        ask: impl FnOnce(&rbd::Pool) -> Result<T, rbd::Error> + Send + 'static,
    ) -> Result<Asking<T>, Error> {
        let Backend::Ceph { cluster, path, .. } = &self.backend else {
            let why = format!("pool {} is none of Ceph", self.name);
            return Err(Error::os(Errno::NotSup, why));
        };
        let (cluster, path) = (Arc::clone(cluster), path.clone());
        Ok(Box::new(move || {
            cluster.wait(CONNECT_TIMEOUT)?;
            let pool = rbd::Pool::open(&cluster, &path)?;
            ask(&pool).inspect_err(|why| pool.leave_fenced(why))
        }))
    }

    /// Calls the open pool of Ceph on a thread of its own and waits, `timeout` at most.
    ///
    /// # Errors
    /// Its own; the pool has not answered in time, or earlier calls have not ended yet.
    pub fn call<T: Send + 'static>(
        &self,
        timeout: Duration,
        ask: impl FnOnce(&rbd::Pool) -> Result<T, rbd::Error> + Send + 'static,
    ) -> Result<T, Error> {
        let call = self.one_more()?;
        let ask = self.asking(ask)?;
        let what = format!("pool {}", self.name);
        let answer = rbd::within(timeout, (what, "answered"), move || {
            let _call = call;
            ask()
        });
        answer.map_err(errors::pool)
    }

    /// Held while a volume of it is opened or closed.
    ///
    /// # Errors
    /// Another volume of it has been opened or closed for that long.
    pub fn opening(&self, timeout: Duration) -> Result<MutexGuard<'_, ()>, Error> {
        self.opening.try_lock_for(timeout).ok_or_else(|| {
            let why = format!("pool {} has not answered while a volume was opened", self.name);
            Error::os(Errno::TimedOut, why)
        })
    }

    /// As [`Pool::opening`], without waiting.
    pub fn try_opening(&self) -> Option<MutexGuard<'_, ()>> {
        self.opening.try_lock()
    }

    /// All volumes, as they are now.
    ///
    /// # Errors
    /// What the cluster says; it does not answer in time.
    pub fn volumes(&self, timeout: Duration) -> Result<Vec<Volume>, Error> {
        let ask = self.listing()?;
        let known = Arc::clone(&self.known);
        self.listed.fresh((timeout, timeout > ALL_TIMEOUT), move || {
            let listed = ask()?;
            known.lock().clone_from(&listed);
            Ok(listed)
        })
    }

    /// What lists it, where a thread may wait for it.
    fn listing(&self) -> Result<Listing, Error> {
        if let Backend::Array(array) = &self.backend {
            let (array, name, known) = (array.clone(), self.name.clone(), Arc::clone(&self.known));
            return Ok(Box::new(move || {
                let listed = array.list(&name)?;
                Ok(array.volumes(listed, &known.lock()))
            }));
        }
        let (ask, block_size) = (self.asking(rbd::Pool::list)?, self.block_size());
        Ok(Box::new(move || {
            let listed = ask().map_err(errors::pool)?;
            Ok(listed.into_iter().map(|volume| Volume::image_of(volume, block_size)).collect())
        }))
    }

    /// Bytes of a block of new volumes.
    fn block_size(&self) -> u32 {
        match &self.backend {
            Backend::Ceph { block_size, .. } => *block_size,
            Backend::Array(_) => BLOCK_SIZE,
        }
    }

    /// All volumes, as they were last where the cluster does not answer soon.
    pub fn volumes_or_known(&self) -> Vec<Volume> {
        self.volumes(ALL_TIMEOUT).unwrap_or_else(|_| self.known.lock().clone())
    }

    /// Room in it, as it was last where the cluster does not answer soon; none where nobody tells.
    fn space(&self) -> Space {
        let Ok(ask) = self.asking(rbd::Pool::space) else { return Space::default() };
        let fresh = self.space.fresh((ALL_TIMEOUT, false), move || ask().map_err(errors::pool));
        fresh.ok().or_else(|| self.space.known()).unwrap_or_default()
    }

    /// An image and its snapshots, or a disk of an array, as they are now.
    ///
    /// # Errors
    /// There is no such image; what the cluster says; it does not answer in time.
    pub fn look(&self, image: &str, timeout: Duration) -> Result<Vec<Volume>, Error> {
        let no_such = || errors::no_volume(&format!("{}/{image}", self.name));
        if let Backend::Array(array) = &self.backend {
            return self.look_at_disk(array, image, timeout).map(|disk| vec![disk]);
        }
        let (of, block_size) = (image.to_owned(), self.block_size());
        let found = self.call(timeout, move |pool| pool.look(&of))?;
        let found = found.map(|all| {
            let all = all.into_iter();
            all.map(|volume| Volume::image_of(volume, block_size)).collect::<Vec<_>>()
        });
        let mut known = self.known.lock();
        known.retain(|volume| volume.image != image);
        known.extend(found.iter().flatten().cloned());
        found.ok_or_else(no_such)
    }

    /// A disk of an array as it is now. A LUN alone is asked, by its number, unless it is another one than when all
    /// were asked last: then nobody knows yet whether another has the same identification. Of namespaces all are
    /// asked, as their numbers are not what they are called by.
    fn look_at_disk(&self, array: &Array, image: &str, timeout: Duration) -> Result<Volume, Error> {
        let begun = Instant::now();
        let no_such = || errors::no_volume(&format!("{}/{image}", self.name));
        if let Array::Iscsi { address, initiator } = array {
            let address = address.at(lun_number(image).ok_or_else(no_such)?);
            let (name, as_) = (self.name.clone(), initiator.clone());
            let asked = self.on_thread(timeout, move || {
                iscsi::look(&address, &as_).map_err(|e| array::luns(&name, &e))
            });
            let Some(found) = asked? else {
                self.forget(image);
                return Err(no_such());
            };
            let lun = array.volume(found.into());
            if lun.problem.is_some() {
                return Ok(lun);
            }
            let is_same = |known: &&mut Volume| known.image == image && known.uuid == lun.uuid;
            if let Some(known) = self.known.lock().iter_mut().find(is_same) {
                known.clone_from(&lun);
                return Ok(lun);
            }
        }
        let all = self.volumes(timeout.saturating_sub(begun.elapsed()))?;
        all.into_iter().find(|disk| disk.image == image).ok_or_else(no_such)
    }

    /// Calls something that may wait, on a thread of its own.
    ///
    /// # Errors
    /// Its own; it has not answered in time, or earlier calls have not ended yet.
    fn on_thread<T: Send + 'static>(
        &self,
        timeout: Duration,
        ask: impl FnOnce() -> Result<T, Error> + Send + 'static,
    ) -> Result<T, Error> {
        let call = self.one_more()?;
        let (tell, told) = mpsc::channel();
        let run = move || {
            let _call = call;
            _ = tell.send(ask());
        };
        thread::Builder::new()
            .name("pool call".into())
            .spawn(run)
            .map_err(|_| Error::os(Errno::Again, "there is no thread to ask it"))?;
        told.recv_timeout(timeout).unwrap_or_else(|_| {
            let seconds = timeout.as_secs();
            let why = format!("pool {} has not answered within {seconds} s", self.name);
            Err(Error::os(Errno::TimedOut, why))
        })
    }

    /// Counts a call, until it ends.
    ///
    /// # Errors
    /// Too many have not ended yet.
    fn one_more(&self) -> Result<Call, Error> {
        let call = Call(Arc::clone(&self.calls));
        if self.calls.fetch_add(1, Ordering::AcqRel) >= CALLS_MAX {
            let why = format!("pool {} has not answered {CALLS_MAX} calls yet", self.name);
            return Err(Error::os(Errno::TimedOut, why));
        }
        Ok(call)
    }

    /// As [`Pool::volume`], as it was last where the cluster does not answer soon.
    pub fn volume_or_known(&self, name: &str) -> Option<Volume> {
        let known = || self.known.lock().iter().find(|v| self.is_called(v, name)).cloned();
        let image = match Uuid::parse_str(name) {
            Ok(_) => known()?.image,
            Err(_) => name.rsplit('/').next()?.split('@').next()?.to_owned(),
        };
        match self.look(&image, ALL_TIMEOUT) {
            Ok(found) => found.into_iter().find(|volume| self.is_called(volume, name)),
            Err(why) if why.code == Code::Os(Errno::NoDev) => None,
            Err(_) => known(),
        }
    }

    /// Whether it is the volume of that UUID or POOL/NAME.
    pub fn is_called(&self, volume: &Volume, name: &str) -> bool {
        volume.uuid.to_string() == name || self.alias(volume) == name
    }

    /// Whether a volume of that UUID or POOL/NAME was there when it was last asked.
    pub fn knows(&self, name: &str) -> bool {
        self.known.lock().iter().any(|volume| self.is_called(volume, name))
    }

    /// Notes what an open disk of an array is, where nothing need be known of it yet.
    pub fn note_disk(&self, found: Found) {
        let Backend::Array(array) = &self.backend else { return };
        let volume = array.volume(found);
        let mut known = self.known.lock();
        known.retain(|other| other.image != volume.image && other.uuid != volume.uuid);
        known.push(volume);
    }

    /// Forgets what is known of an image that is gone.
    pub fn forget(&self, image: &str) {
        self.known.lock().retain(|volume| volume.image != image);
    }

    /// The volume that is called `name` (NAME, POOL/NAME, or UUID), as it is now.
    ///
    /// # Errors
    /// As of [`Pool::look`].
    pub fn volume(&self, name: &str) -> Result<Volume, Error> {
        let uuid = Uuid::parse_str(name).ok();
        let wanted = match uuid {
            Some(uuid) => self.find(uuid).ok_or_else(|| errors::no_volume(name))?.name(),
            None => name.rsplit('/').next().unwrap_or(name).to_owned(),
        };
        let image = wanted.split('@').next().unwrap_or(&wanted);
        let found = self.look(image, CALL_TIMEOUT)?;
        let is_it = |volume: &Volume| match uuid {
            Some(uuid) => volume.uuid == uuid,
            None => volume.name() == wanted,
        };
        if let Some(volume) = found.into_iter().find(is_it) {
            return Ok(volume);
        }
        // Renamed, perhaps.
        let all = if uuid.is_some() { self.volumes(LIST_TIMEOUT)? } else { Vec::new() };
        all.into_iter().find(is_it).ok_or_else(|| errors::no_volume(name))
    }

    /// What is known of the volume of that UUID; without asking.
    fn find(&self, uuid: Uuid) -> Option<Volume> {
        self.known.lock().iter().find(|volume| volume.uuid == uuid).cloned()
    }

    /// `POOL/NAME` of a volume.
    pub fn alias(&self, volume: &Volume) -> String {
        format!("{}/{}", self.name, volume.name())
    }

    /// Clusters, as an lvstore counts them: objects.
    pub fn info(&self) -> LvstoreInfo {
        let Space { total, free } = self.space();
        LvstoreInfo {
            uuid: self.uuid,
            name: self.name.clone(),
            base_bdev: self.backend.path(),
            total_data_clusters: total / self.cluster_size(),
            free_clusters: free / self.cluster_size(),
            block_size: self.block_size(),
            cluster_size: u32::try_from(self.cluster_size()).unwrap_or(u32::MAX),
            max_bdev_size: total,
            format_version: 0,
            shares_clusters: false,
            stopped: None,
            zeroing: Vec::new(),
        }
    }

    /// A volume as an lvol.
    pub fn lvol(&self, volume: &Volume) -> LvolInfo {
        LvolInfo {
            alias: self.alias(volume),
            uuid: volume.uuid,
            name: volume.name(),
            is_thin_provisioned: volume.thin,
            is_snapshot: volume.snapshot.is_some(),
            is_clone: volume.parent.is_some() || volume.is_clone,
            is_esnap_clone: false,
            is_degraded: false,
            external_snapshot_name: None,
            num_allocated_clusters: volume.allocated.div_ceil(volume.object_size),
            lvs: LvsRef { name: self.name.clone(), uuid: self.uuid },
            size: volume.size,
            is_read_only: volume.read_only,
            key_name: None,
            dif_type: None,
            waits_for_key: false,
        }
    }

    /// What `bdev_get_bdevs` says of a volume as an lvol.
    pub fn specific(&self, volume: &Volume) -> Value {
        let mut lvol = json!({
            "lvol_store_uuid": self.uuid,
            "base_bdev": self.backend.path(),
            "thin_provision": volume.thin,
            // Of clusters as long as those that the pool says it has.
            "num_allocated_clusters": volume.allocated.div_ceil(self.cluster_size()),
            "snapshot": volume.snapshot.is_some(),
            "clone": volume.parent.is_some() || volume.is_clone,
            "esnap_clone": false,
        });
        if let Some(parent) = &volume.parent {
            lvol["base_snapshot"] = json!(parent);
        }
        if !volume.clones.is_empty() {
            lvol["clones"] = json!(volume.clones);
        }
        lvol
    }
}

/// All pools. Shared by all methods; thread-safe.
#[derive(Default)]
pub struct Pools {
    all: Mutex<Vec<Arc<Pool>>>,
    /// Bdevs that are open volumes.
    open: Mutex<BTreeSet<String>>,
}

impl Pools {
    /// Whether there are none.
    pub fn is_empty(&self) -> bool {
        self.all.lock().is_empty()
    }

    /// All, in the order in which they were added.
    pub fn list(&self) -> Vec<Arc<Pool>> {
        self.all.lock().clone()
    }

    /// The pool of that name or UUID.
    pub fn get(&self, name: &str) -> Option<Arc<Pool>> {
        let uuid = Uuid::parse_str(name).ok();
        let all = self.all.lock();
        all.iter().find(|pool| pool.name == name || Some(pool.uuid) == uuid).cloned()
    }

    /// Adds a pool.
    ///
    /// # Errors
    /// It, or another of its name, is there.
    pub fn add(&self, pool: Pool) -> Result<(), Error> {
        let mut all = self.all.lock();
        check_new(&all, &pool)?;
        all.push(Arc::new(pool));
        Ok(())
    }

    /// Whether a pool can be added.
    ///
    /// # Errors
    /// It, or another of its name, is there.
    pub fn check_new(&self, pool: &Pool) -> Result<(), Error> {
        check_new(&self.all.lock(), pool)
    }

    /// Forgets a pool.
    pub fn remove(&self, name: &str) -> Option<Arc<Pool>> {
        let mut all = self.all.lock();
        let at = all.iter().position(|pool| pool.name == name)?;
        Some(all.remove(at))
    }

    /// Lets go of all.
    pub fn clear(&self) {
        let all = std::mem::take(&mut *self.all.lock());
        drop(all);
    }

    /// The pool with the volume `name` (POOL/NAME, or the UUID of one), as far as is known without asking. A
    /// volume of that name need not be there.
    pub fn of(&self, name: &str) -> Option<Arc<Pool>> {
        if let Some((pool, _)) = name.split_once('/') {
            return self.get(pool);
        }
        let uuid = Uuid::parse_str(name).ok()?;
        self.list().into_iter().find(|pool| pool.find(uuid).is_some())
    }

    /// As [`Pools::of`], and asks pools where a UUID is not known.
    pub fn ask_of(&self, name: &str) -> Option<Arc<Pool>> {
        if let Some(pool) = self.of(name) {
            return Some(pool);
        }
        let uuid = Uuid::parse_str(name).ok()?;
        let has = |pool: &Arc<Pool>| pool.volumes_or_known().iter().any(|v| v.uuid == uuid);
        self.list().into_iter().find(has)
    }

    /// What is known of the volume `name`, without asking.
    pub fn known(&self, name: &str) -> Option<(Arc<Pool>, Volume)> {
        let pool = self.of(name)?;
        let found = pool.known.lock().iter().find(|v| pool.is_called(v, name)).cloned();
        found.map(|volume| (pool, volume))
    }

    /// Names of the bdevs that are open volumes.
    pub fn open(&self) -> MutexGuard<'_, BTreeSet<String>> {
        self.open.lock()
    }
}

fn check_new(all: &[Arc<Pool>], pool: &Pool) -> Result<(), Error> {
    match all.iter().find(|p| p.name == pool.name || p.uuid == pool.uuid) {
        None => Ok(()),
        Some(there) => {
            let (name, path) = (&there.name, there.backend.path());
            let why = format!("pool {name} is there already, with the volumes of {path}");
            Err(Error::os(Errno::Exist, why))
        }
    }
}
