//! One loaded lvstore: its claim on the bdev, its thread, its volumes in the registry.

use crate::disk::BdevDisk;
use crate::error::Error;
use crate::info::{ClearMethod, LvolInfo, LvolOptions, LvsRef, LvstoreInfo, LvstoreOptions};
use crate::map::Map;
use crate::meta::{Bell, Gauges, Meta, MetaThread, NotRun};
use crate::translate::{not_loaded, refused};
use crate::volume::{Identity, Lvol, Names, Volume};
use bdev::{Bdev, Claim, Registry, RegistryError};
use blobstore::{BlobInfo, BlobOptions, Disk, Store, StoreInfo, StoreOptions};
use parking_lot::{Condvar, Mutex};
use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;
use uuid::Uuid;

/// A loaded lvstore.
pub(crate) struct Lvs {
    pub uuid: Uuid,
    pub base: Arc<dyn Bdev>,
    name: Mutex<String>,
    /// As it was loaded or created.
    info: StoreInfo,
    registry: Registry,
    volumes: Mutex<BTreeMap<Uuid, Arc<Volume>>>,
    gauges: Arc<Gauges>,
    control: Turns,
    /// How long an operation waits for its turn, and for the thread's.
    timeout: Duration,
    thread: MetaThread,
    /// Let go last.
    _claim: Claim,
}

/// One control operation at a time. The one whose turn it is may wait for I/O that does not end; the
/// others do not wait with it for ever.
#[derive(Default)]
struct Turns {
    taken: Mutex<bool>,
    free: Condvar,
}

/// The right of a control operation to go on.
pub(crate) struct Turn<'a>(&'a Turns);

impl Turns {
    fn take(&self, timeout: Duration) -> Option<Turn<'_>> {
        let mut taken = self.taken.lock();
        self.free.wait_while_for(&mut taken, |taken| *taken, timeout);
        if *taken {
            return None;
        }
        *taken = true;
        Some(Turn(self))
    }
}

impl Drop for Turn<'_> {
    fn drop(&mut self) {
        *self.0.taken.lock() = false;
        self.0.free.notify_one();
    }
}

/// What the metadata thread found when it started.
type Found = (StoreInfo, Vec<Arc<Volume>>);

impl Lvs {
    /// Creates an lvstore on a claimed bdev.
    pub fn create(
        registry: &Registry,
        claim: Claim,
        name: &str,
        options: &LvstoreOptions,
        timeout: Duration,
    ) -> Result<Lvs, Error> {
        let op = format!("create lvstore {name}");
        let uuid = options.uuid.unwrap_or_else(Uuid::new_v4);
        let (name, options) = (name.to_owned(), *options);
        Lvs::start(registry, claim, timeout, move |disk| {
            let how = StoreOptions { name, uuid, cluster_size: options.cluster_size };
            let say = |e| refused(e, &op, options.cluster_size);
            let mut store = Store::create_store(disk, &how).map_err(say)?;
            let info = store.info();
            let cluster = u64::from(info.cluster_size);
            let data = (info.first_data_cluster * cluster, info.data_clusters * cluster);
            let cleared = match options.clear {
                ClearMethod::None => Ok(()),
                ClearMethod::Unmap => store.disk_mut().unmap(data.0, data.1),
                ClearMethod::WriteZeroes => store.disk_mut().write_zeroes(data.0, data.1),
            };
            if let Err(e) = cleared {
                let _ = store.destroy();
                return Err(Error::Io { op, cause: e.to_string() });
            }
            Ok(store)
        })
    }

    /// Loads the lvstore on a claimed bdev.
    pub fn load(registry: &Registry, claim: Claim, timeout: Duration) -> Result<Lvs, Error> {
        let bdev = claim.bdev().name().to_owned();
        Lvs::start(registry, claim, timeout, move |disk| {
            Store::load(disk).map_err(|e| not_loaded(e, &bdev))
        })
    }

    fn start(
        registry: &Registry,
        claim: Claim,
        timeout: Duration,
        open: impl FnOnce(BdevDisk) -> Result<Store<BdevDisk>, Error> + Send + 'static,
    ) -> Result<Lvs, Error> {
        let base = claim.bdev().clone();
        let gauges = Arc::new(Gauges::default());
        let (thread, (info, found)) = {
            let (base, gauges) = (base.clone(), gauges.clone());
            MetaThread::start(move |bell| -> Result<(Meta, Found), Error> {
                let opened = BdevDisk::open(&*base)
                    .map_err(|e| Error::Io { op: format!("open bdev {}", e.name), cause: e.why })?;
                let store = open(opened)?;
                let info = store.info();
                let volumes: Vec<_> =
                    store.blobs().map(|blob| volume(&store, &info, &blob, &base, &bell)).collect();
                let mut meta = Meta::new(store, Vec::new(), gauges);
                volumes.iter().for_each(|v| meta.add_volume(v.clone()));
                Ok((meta, (info, volumes)))
            })?
        };
        let lvs = Lvs {
            uuid: info.uuid,
            base,
            name: Mutex::new(info.name.clone()),
            info,
            registry: registry.clone(),
            volumes: Mutex::default(),
            gauges,
            control: Turns::default(),
            timeout,
            thread,
            _claim: claim,
        };
        lvs.volumes.lock().extend(found.into_iter().map(|v| (v.id.uuid, v)));
        Ok(lvs)
    }

    /// Makes the volumes that were found bdevs. Not part of [`Lvs::load`], so that subscribers of
    /// the registry find the lvstore already.
    pub fn register_all(&self) -> Result<(), Error> {
        let _turn = self.turn("register lvols")?;
        self.volumes().iter().try_for_each(|volume| self.register(volume))
    }

    pub fn name(&self) -> String {
        self.name.lock().clone()
    }

    pub fn info(&self) -> LvstoreInfo {
        LvstoreInfo {
            uuid: self.uuid,
            name: self.name(),
            base_bdev: self.base.name().to_owned(),
            total_data_clusters: self.gauges.data_clusters.load(Ordering::Relaxed),
            free_clusters: self.gauges.free_clusters.load(Ordering::Relaxed),
            block_size: self.base.geometry().block_size,
            cluster_size: self.info.cluster_size,
            max_bdev_size: self.info.max_device_size,
            stopped: self.gauges.stopped.get().cloned(),
        }
    }

    fn turn(&self, op: &str) -> Result<Turn<'_>, Error> {
        self.control.take(self.timeout).ok_or_else(|| self.waiting(op))
    }

    fn waiting(&self, op: &str) -> Error {
        let (bdev, seconds) = (self.base.name().to_owned(), self.timeout.as_secs());
        Error::Waiting { op: op.to_owned(), bdev, seconds }
    }

    pub fn volumes(&self) -> Vec<Arc<Volume>> {
        self.volumes.lock().values().cloned().collect()
    }

    pub fn volume_info(&self, volume: &Volume) -> LvolInfo {
        LvolInfo {
            alias: volume.alias(),
            uuid: volume.id.uuid,
            name: volume.names().lvol,
            is_thin_provisioned: volume.id.thin,
            is_snapshot: false,
            is_clone: false,
            is_esnap_clone: false,
            is_degraded: false,
            num_allocated_clusters: volume.allocated.load(Ordering::Relaxed),
            lvs: LvsRef { uuid: self.uuid, name: self.name() },
            size: volume.size(),
            is_read_only: volume.is_read_only(),
        }
    }

    /// Runs a job on the metadata thread.
    pub fn meta<R: Send + 'static>(
        &self,
        op: &str,
        f: impl FnOnce(&mut Meta) -> Result<R, Error> + Send + 'static,
    ) -> Result<R, Error> {
        self.meta_within(self.timeout, op, f)
    }

    /// As [`Lvs::meta`], with a limit of the caller's.
    fn meta_within<R: Send + 'static>(
        &self,
        timeout: Duration,
        op: &str,
        f: impl FnOnce(&mut Meta) -> Result<R, Error> + Send + 'static,
    ) -> Result<R, Error> {
        self.thread.call(timeout, f).unwrap_or_else(|why| match why {
            NotRun::Busy => Err(self.waiting(op)),
            NotRun::Gone => {
                Err(Error::Stopped { op: op.to_owned(), cause: "its thread ended".into() })
            }
        })
    }

    /// Whole clusters for a size in bytes.
    fn clusters(&self, op: &str, size: u64) -> Result<u64, Error> {
        if size == 0 {
            let why = "a size of 0 bytes is not possible; give the size that is needed".into();
            return Err(Error::BadParameter { op: op.to_owned(), why });
        }
        Ok(size.div_ceil(u64::from(self.info.cluster_size)))
    }

    fn register(&self, volume: &Arc<Volume>) -> Result<(), Error> {
        self.registry.register(Arc::new(Lvol(volume.clone()))).map_err(|e| match e {
            RegistryError::NameTaken { name, .. } => {
                Error::AlreadyExists { what: format!("bdev {name}") }
            }
            e => Error::InUse { op: "register an lvol".into(), by: e.to_string() },
        })
    }

    /// Refuses when somebody claims one of `volumes`.
    fn unused(&self, op: &str, volumes: &[Arc<Volume>]) -> Result<(), Error> {
        for volume in volumes {
            let owners = self.registry.owners(&volume.id.uuid.to_string());
            if let Some((by, _)) = owners.into_iter().next() {
                return Err(Error::InUse { op: op.to_owned(), by });
            }
        }
        Ok(())
    }

    /// Takes a volume that nobody claims out of the registry.
    fn hide(&self, op: &str, volume: &Volume) -> Result<(), Error> {
        match self.registry.unregister_unused(&volume.id.uuid.to_string()) {
            Ok(_) | Err(RegistryError::NotFound(_)) => Ok(()),
            Err(RegistryError::Claimed { owner, .. }) => {
                Err(Error::InUse { op: op.to_owned(), by: owner })
            }
            Err(e) => Err(Error::InUse { op: op.to_owned(), by: e.to_string() }),
        }
    }

    fn unregister(&self, op: &str, volume: &Volume) -> Result<(), Error> {
        match self.registry.unregister(&volume.id.uuid.to_string()) {
            Ok(_) | Err(RegistryError::NotFound(_)) => Ok(()),
            Err(e) => Err(Error::InUse { op: op.to_owned(), by: e.to_string() }),
        }
    }

    fn unregister_all(&self) {
        for volume in self.volumes() {
            if let Err(e) = self.unregister("unload an lvstore", &volume) {
                tracing::warn!("{e}");
            }
        }
    }

    pub fn create_lvol(&self, options: &LvolOptions) -> Result<LvolInfo, Error> {
        let alias = format!("{}/{}", self.name(), options.name);
        let op = format!("create lvol {alias}");
        let _turn = self.turn(&op)?;
        let uuid = options.uuid.unwrap_or_else(Uuid::new_v4);
        for key in [&alias, &uuid.to_string()] {
            if self.registry.get(key).is_some() {
                return Err(Error::AlreadyExists { what: format!("lvol {key}") });
            }
        }
        let size = self.clusters(&op, options.size)?;
        let blob = BlobOptions { name: options.name.clone(), uuid, size, thin: options.thin };
        let (base, info) = (self.base.clone(), self.info.clone());
        let job_op = op.clone();
        let bell = self.thread.bell();
        let lvstore = self.name();
        let volume = self.meta(&op, move |meta| {
            let say = |e| refused(e, &job_op, info.cluster_size);
            meta.store(&job_op)?.check_create(&blob).map_err(say)?;
            let clusters = if blob.thin { 0 } else { blob.size };
            let reservation = meta.reserve_zeroed(&job_op, clusters)?;
            let store = meta.store(&job_op)?;
            let id = store.create_reserved(&blob, reservation).map_err(say)?;
            let blob = store.blob(id).map_err(say)?;
            let info = StoreInfo { name: lvstore, ..info };
            let volume = volume(store, &info, &blob, &base, &bell);
            meta.add_volume(volume.clone());
            Ok(volume)
        })?;
        if let Err(e) = self.register(&volume) {
            self.meta_within(Duration::MAX, &op.clone(), move |meta| meta.delete(&op, &volume))?;
            return Err(e);
        }
        let info = self.volume_info(&volume);
        self.volumes.lock().insert(uuid, volume);
        Ok(info)
    }

    pub fn delete_lvol(&self, volume: &Arc<Volume>) -> Result<(), Error> {
        let op = format!("delete lvol {}", volume.alias());
        let _turn = self.turn(&op)?;
        self.hide(&op, volume)?;
        let deleted = {
            let (op, volume) = (op.clone(), volume.clone());
            self.meta(&op.clone(), move |meta| meta.delete(&op, &volume))
        };
        if let Err(e) = deleted {
            // It is still there, as far as anybody knows: its data can be read.
            self.register(volume)?;
            return Err(e);
        }
        self.volumes.lock().remove(&volume.id.uuid);
        Ok(())
    }

    /// Returns whether the size changed.
    pub fn resize_lvol(&self, volume: &Arc<Volume>, size: u64) -> Result<bool, Error> {
        let op = format!("resize lvol {} to {size} bytes", volume.alias());
        let _turn = self.turn(&op)?;
        let clusters = self.clusters(&op, size)?;
        let before = volume.size();
        let job = volume.clone();
        self.meta(&op.clone(), move |meta| meta.resize(&op, &job, clusters))?;
        Ok(volume.size() != before)
    }

    pub fn rename_lvol(&self, volume: &Arc<Volume>, new_name: &str) -> Result<(), Error> {
        let op = format!("rename lvol {} to {new_name}", volume.alias());
        let _turn = self.turn(&op)?;
        let alias = format!("{}/{new_name}", self.name());
        if let Some(other) = self.registry.get(&alias)
            && other.uuid() != volume.id.uuid
        {
            return Err(Error::AlreadyExists { what: format!("lvol {alias}") });
        }
        let (job, name) = (volume.id.blob, new_name.to_owned());
        let cluster_size = self.info.cluster_size;
        self.meta(&op.clone(), move |meta| {
            meta.store(&op)?.rename(job, &name).map_err(|e| refused(e, &op, cluster_size))
        })?;
        volume.rename(|names| names.lvol = new_name.to_owned());
        Ok(())
    }

    pub fn set_read_only(&self, volume: &Arc<Volume>) -> Result<(), Error> {
        let op = format!("make lvol {} read-only", volume.alias());
        let _turn = self.turn(&op)?;
        if volume.is_read_only() {
            return Ok(());
        }
        self.hide(&op, volume)?;
        let (job, cluster_size) = (volume.id.blob, self.info.cluster_size);
        let done = self.meta(&op.clone(), move |meta| {
            meta.store(&op)?.set_read_only(job).map_err(|e| refused(e, &op, cluster_size))
        });
        if done.is_ok() {
            volume.set_read_only();
            volume.bump();
        }
        self.register(volume)?;
        done
    }

    pub fn rename(&self, new_name: &str) -> Result<(), Error> {
        let op = format!("rename lvstore {} to {new_name}", self.name());
        let _turn = self.turn(&op)?;
        let (name, cluster_size) = (new_name.to_owned(), self.info.cluster_size);
        self.meta(&op.clone(), move |meta| {
            meta.store(&op)?.rename_store(&name).map_err(|e| refused(e, &op, cluster_size))
        })?;
        *self.name.lock() = new_name.to_owned();
        for volume in self.volumes() {
            volume.rename(|names| names.lvstore = new_name.to_owned());
        }
        Ok(())
    }

    /// Takes over what the bdev has gained. Returns whether there was anything.
    pub fn grow(&self) -> Result<bool, Error> {
        let op = format!("grow lvstore {}", self.name());
        let _turn = self.turn(&op)?;
        let (base, cluster_size) = (self.base.clone(), self.info.cluster_size);
        self.meta(&op.clone(), move |meta| {
            let store = meta.store(&op)?;
            store.disk_mut().resized(base.geometry().num_blocks);
            store.grow().map_err(|e| refused(e, &op, cluster_size))
        })
    }

    /// Takes the lvstore out of use; `destroy` deletes it, and then its volumes must not be in use.
    pub fn close(&self, destroy: bool) -> Result<(), Error> {
        let op = format!("{} lvstore {}", if destroy { "delete" } else { "unload" }, self.name());
        let _turn = self.turn(&op)?;
        if destroy {
            self.unused(&op, &self.volumes())?;
        }
        self.unregister_all();
        self.volumes.lock().clear();
        // There is no way back.
        self.meta_within(Duration::MAX, &op.clone(), move |meta| meta.close(&op, destroy))
    }
}

/// The volume of a blob, with its map.
fn volume(
    store: &Store<BdevDisk>,
    info: &StoreInfo,
    blob: &BlobInfo,
    base: &Arc<dyn Bdev>,
    bell: &Bell,
) -> Arc<Volume> {
    let map = Map::new(blob.size);
    for (cluster, to) in store.clusters(blob.id).into_iter().flatten() {
        map.set(cluster, to);
    }
    let per_cluster = info.cluster_size / base.geometry().block_size;
    let id = Identity {
        blob: blob.id,
        uuid: blob.uuid,
        lvstore: info.uuid,
        thin: blob.thin,
        shift: per_cluster.trailing_zeros(),
    };
    let names = Names { lvstore: info.name.clone(), lvol: blob.name.clone() };
    Volume::new(id, names, blob.read_only, base.clone(), map, bell.clone())
}
