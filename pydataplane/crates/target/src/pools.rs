//! Pools of Ceph whose images are volumes, by name; what is known of them, and which volumes are open.
//!
//! A volume is open, and locked, as long as somebody uses its bdev. Everything else that is asked of a pool
//! opens an image for a moment, without a lock. A pool that does not answer keeps calls about it waiting, as long
//! as their limit says, and calls about everything for some seconds, once.

use crate::errors;
use lvol::{LvolInfo, LvsRef, LvstoreInfo};
use parking_lot::{Condvar, Mutex, MutexGuard};
use rbd::{Cluster, Space, Volume};
use rpc::{Code, Errno, Error};
use serde_json::{Value, json};
use std::collections::BTreeSet;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
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

/// What is asked again and again, by one thread at a time.
struct Asked<T> {
    state: Mutex<State<T>>,
    changed: Condvar,
}

struct State<T> {
    last: Option<T>,
    /// Since when it is being asked.
    asking: Option<Instant>,
    /// How often it was asked, and why it failed last.
    asked: u64,
    failed: Option<Error>,
}

impl<T> Default for Asked<T> {
    fn default() -> Asked<T> {
        let state = State { last: None, asking: None, asked: 0, failed: None };
        Asked { state: Mutex::new(state), changed: Condvar::new() }
    }
}

impl<T: Clone + Send + 'static> Asked<T> {
    /// Asks anew and waits, `timeout` at most. Where it has not been answered for that long already, it does
    /// not wait; nor, unless `patient`, where it was refused when it was asked last.
    fn fresh(
        self: &Arc<Self>,
        (timeout, patient): (Duration, bool),
        ask: impl FnOnce() -> Result<T, Error> + Send + 'static,
    ) -> Result<T, Error> {
        let begun = Instant::now();
        let end = begun + timeout;
        let late = || Error::os(Errno::TimedOut, "the cluster has not answered");
        let mut ask = Some(ask);
        let mut mine = None;
        let mut state = self.state.lock();
        let waits = patient || state.failed.is_none();
        loop {
            match (mine, state.asking) {
                // What was asked after this call began.
                (Some(number), _) if state.asked >= number => {
                    return match &state.failed {
                        Some(why) => Err(why.clone()),
                        None => state.last.clone().ok_or_else(late),
                    };
                }
                (_, Some(since)) if since + timeout < begun => return Err(late()),
                (_, None) => {
                    state.asking = Some(Instant::now());
                    mine = Some(state.asked + 1);
                    let (this, ask) = (Arc::clone(self), ask.take().expect("asked once"));
                    let run = move || this.answer(ask());
                    let started = thread::Builder::new().name("rbd pool".into()).spawn(run);
                    if started.is_err() {
                        state.asking = None;
                        return Err(Error::os(Errno::Again, "there is no thread to ask Ceph"));
                    }
                }
                (_, Some(_)) => {}
            }
            if !waits {
                return Err(late());
            }
            if self.changed.wait_until(&mut state, end).timed_out() && mine != Some(state.asked) {
                return Err(late());
            }
        }
    }

    fn answer(&self, answer: Result<T, Error>) {
        let mut state = self.state.lock();
        state.asking = None;
        state.asked += 1;
        match answer {
            Ok(known) => (state.last, state.failed) = (Some(known), None),
            Err(why) => state.failed = Some(why),
        }
        self.changed.notify_all();
    }

    fn known(&self) -> Option<T> {
        self.state.lock().last.clone()
    }
}

/// A question to a pool.
type Asking<T> = Box<dyn FnOnce() -> Result<T, rbd::Error> + Send>;

/// A pool whose images are volumes.
pub struct Pool {
    /// Name for people, which the aliases of its volumes begin with.
    pub name: String,
    /// Where it is.
    pub cluster: Arc<Cluster>,
    /// `POOL` or `POOL/NAMESPACE`.
    pub path: String,
    /// Identity, the same on every host.
    pub uuid: Uuid,
    /// Bytes of a block of its volumes' bdevs.
    pub block_size: u32,
    /// Bytes of an object of a new image.
    pub object_size: u64,
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
    /// The pool `path` of a cluster, as it is known from earlier on.
    pub fn new(
        (name, cluster, path): (String, Arc<Cluster>, String),
        (uuid, block_size, object_size): (Uuid, u32, u64),
    ) -> Pool {
        Pool {
            name,
            cluster,
            path,
            uuid,
            block_size,
            object_size,
            space: Arc::default(),
            listed: Arc::default(),
            known: Arc::default(),
            calls: Arc::default(),
            opening: Mutex::default(),
        }
    }

    /// What asks the open pool, where a thread may wait for it.
    fn asking<T: 'static>(
        &self,
        ask: impl FnOnce(&rbd::Pool) -> Result<T, rbd::Error> + Send + 'static,
    ) -> Asking<T> {
        let (cluster, path) = (Arc::clone(&self.cluster), self.path.clone());
        Box::new(move || {
            cluster.wait(CONNECT_TIMEOUT)?;
            let pool = rbd::Pool::open(&cluster, &path)?;
            ask(&pool).inspect_err(|why| pool.leave_fenced(why))
        })
    }

    /// Calls the open pool on a thread of its own and waits, `timeout` at most.
    ///
    /// # Errors
    /// Its own; the pool has not answered in time, or earlier calls have not ended yet.
    pub fn call<T: Send + 'static>(
        &self,
        timeout: Duration,
        ask: impl FnOnce(&rbd::Pool) -> Result<T, rbd::Error> + Send + 'static,
    ) -> Result<T, Error> {
        let call = Call(Arc::clone(&self.calls));
        if self.calls.fetch_add(1, Ordering::AcqRel) >= CALLS_MAX {
            let why = format!("pool {} has not answered {CALLS_MAX} calls yet", self.name);
            return Err(Error::os(Errno::TimedOut, why));
        }
        let ask = self.asking(ask);
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
        let ask = self.asking(rbd::Pool::list);
        let known = Arc::clone(&self.known);
        self.listed.fresh((timeout, timeout > ALL_TIMEOUT), move || {
            let listed = ask().map_err(errors::pool)?;
            known.lock().clone_from(&listed);
            Ok(listed)
        })
    }

    /// All volumes, as they were last where the cluster does not answer soon.
    pub fn volumes_or_known(&self) -> Vec<Volume> {
        self.volumes(ALL_TIMEOUT).unwrap_or_else(|_| self.known.lock().clone())
    }

    /// Room in it, as it was last where the cluster does not answer soon.
    fn space(&self) -> Space {
        let ask = self.asking(rbd::Pool::space);
        let fresh = self.space.fresh((ALL_TIMEOUT, false), move || ask().map_err(errors::pool));
        fresh.ok().or_else(|| self.space.known()).unwrap_or_default()
    }

    /// An image and its snapshots, as they are now.
    ///
    /// # Errors
    /// There is no such image; what the cluster says; it does not answer in time.
    pub fn look(&self, image: &str, timeout: Duration) -> Result<Vec<Volume>, Error> {
        let of = image.to_owned();
        let found = self.call(timeout, move |pool| pool.look(&of))?;
        let mut known = self.known.lock();
        known.retain(|volume| volume.image != image);
        known.extend(found.iter().flatten().cloned());
        found.ok_or_else(|| errors::no_volume(&format!("{}/{image}", self.name)))
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
            base_bdev: self.path.clone(),
            total_data_clusters: total / self.object_size,
            free_clusters: free / self.object_size,
            block_size: self.block_size,
            cluster_size: u32::try_from(self.object_size).unwrap_or(u32::MAX),
            max_bdev_size: total,
            format_version: 0,
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
            is_thin_provisioned: true,
            is_snapshot: volume.snapshot.is_some(),
            is_clone: volume.parent.is_some() || volume.is_clone,
            is_esnap_clone: false,
            is_degraded: false,
            external_snapshot_name: None,
            num_allocated_clusters: volume.allocated.div_ceil(volume.object_size),
            lvs: LvsRef { name: self.name.clone(), uuid: self.uuid },
            size: volume.size,
            is_read_only: volume.snapshot.is_some(),
            key_name: None,
            dif_type: None,
            waits_for_key: false,
        }
    }

    /// What `bdev_get_bdevs` says of a volume as an lvol.
    pub fn specific(&self, volume: &Volume) -> Value {
        let mut lvol = json!({
            "lvol_store_uuid": self.uuid,
            "base_bdev": self.path,
            "thin_provision": true,
            // Of clusters as long as those that the pool says it has.
            "num_allocated_clusters": volume.allocated.div_ceil(self.object_size),
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
        if let Some(there) = all.iter().find(|p| p.name == pool.name || p.uuid == pool.uuid) {
            let why =
                format!("pool {} is there already, with the images of {}", there.name, there.path);
            return Err(Error::os(Errno::Exist, why));
        }
        all.push(Arc::new(pool));
        Ok(())
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

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::mpsc;

    /// Longer than any answer here takes.
    const LONG: Duration = Duration::from_secs(60);

    #[test]
    fn what_does_not_answer_is_waited_for_once() {
        let asked: Arc<Asked<u32>> = Arc::default();
        assert_eq!(asked.fresh((LONG, false), || Ok(1)).unwrap(), 1);
        let (answer, answers) = mpsc::channel();
        let hangs = move || Ok(answers.recv().unwrap());
        assert!(asked.fresh((Duration::from_millis(20), false), hangs).is_err());
        assert_eq!(asked.known(), Some(1));
        thread::sleep(Duration::from_millis(20));
        let again = || -> Result<u32, Error> { unreachable!("it is being asked still") };
        assert!(asked.fresh((Duration::from_millis(10), false), again).is_err());
        answer.send(2).unwrap();
        // What was asked before this call is not its answer.
        assert_eq!(asked.fresh((LONG, true), || Ok(3)).unwrap(), 3);
    }

    #[test]
    fn who_is_not_patient_does_not_wait_after_a_refusal() {
        let asked: Arc<Asked<u32>> = Arc::default();
        let refuses = || Err(Error::internal("no"));
        assert_eq!(asked.fresh((LONG, false), refuses).unwrap_err().message, "no");
        let (answer, answers) = mpsc::channel();
        assert!(asked.fresh((LONG, false), move || Ok(answers.recv().unwrap())).is_err());
        answer.send(4).unwrap();
        while asked.known() != Some(4) {
            thread::yield_now();
        }
        assert_eq!(asked.fresh((LONG, false), || Ok(5)).unwrap(), 5);
    }
}
