//! One loaded lvstore: its claim on the bdev, its thread, its volumes in the registry. What is done with
//! one of these is in `lvols`.

use crate::asked::MetaThread;
use crate::disk::BdevDisk;
use crate::error::Error;
use crate::external::Externals;
use crate::gauges::Gauges;
use crate::info::{
    ClearMethod, LvolInfo, LvolSizes, LvsRef, LvstoreInfo, LvstoreOptions, ZeroingInfo,
    default_cluster_size,
};
use crate::lvol::Lvol;
use crate::map::View;
use crate::meta::Meta;
use crate::reload::Reloaded;
use crate::translate::{not_loaded, refused};
use crate::volume::Volume;
use crate::zeroing::Zeroings;
use bdev::{Bdev, Claim, FlushLatch, Registry, RegistryError};
use blobstore::{DiskError, HOLE, Run, Store, StoreInfo, StoreOptions};
use crypto::Keys;
use parking_lot::Mutex;
use protection::{Area, Keepers};
use reactor::{Control, NotRun};
use std::collections::BTreeMap;
use std::io;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;
use uuid::Uuid;

mod encryption;
mod external;
mod history;
mod lvols;
mod medium;
mod parents;
mod turns;

pub(crate) use encryption::not_reserved;
use turns::{Turn, Turns};

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
    externals: Arc<Externals>,
    keys: Keys,
    control: Turns,
    zeroings: Zeroings,
    /// Of the volumes that keep protection information themselves, once there is one.
    keepers: Mutex<Option<Arc<Keepers>>>,
    /// How long an operation waits for its turn, and for the thread's.
    timeout: Duration,
    thread: Control<Meta>,
    /// Let go last.
    _claim: Claim,
}

/// What volumes keep themselves needs the metadata thread for its end.
impl Drop for Lvs {
    fn drop(&mut self) {
        for volume in self.volumes() {
            self.lvol_of(&volume).iter().filter_map(|lvol| lvol.area()).for_each(Area::close);
        }
    }
}

/// Why a store on `base` takes no changes from the beginning.
fn earlier_failure(base: &dyn Bdev) -> DiskError {
    let cause = format!("bdev {}: an earlier one failed", base.name());
    DiskError { op: "flush", offset: 0, len: 0, cause, no_space: false }
}

/// What the metadata thread found when it started.
type Found = (StoreInfo, Vec<Arc<Volume>>, Arc<Externals>);

impl Lvs {
    /// Creates an lvstore on a claimed bdev.
    pub fn create(
        world: (&Registry, &Keys),
        claim: Claim,
        name: &str,
        options: &LvstoreOptions,
        timeout: Duration,
    ) -> Result<Lvs, Error> {
        let op = format!("create lvstore {name}");
        let uuid = options.uuid.unwrap_or_else(Uuid::new_v4);
        let (name, options) = (name.to_owned(), *options);
        let bytes = claim.bdev().geometry().bytes();
        Lvs::start(world, claim, timeout, move |disk| {
            let cluster_size = options.cluster_size.unwrap_or_else(|| default_cluster_size(bytes));
            let how = StoreOptions { name, uuid, cluster_size };
            let say = |e| refused(e, &op, cluster_size);
            let mut store = Store::create_store(disk, &how).map_err(say)?;
            if options.share_clusters {
                store.share_clusters().map_err(say)?;
            }
            let info = store.info();
            let data = Run { first: info.first_data_cluster, count: info.data_clusters };
            let cleared = match options.clear {
                ClearMethod::None => {
                    store.learn_zeros();
                    Ok(())
                }
                ClearMethod::Unmap => store.discard(data),
                ClearMethod::WriteZeroes => store.wipe(data),
            };
            if let Err(e) = cleared {
                let _ = store.destroy();
                return Err(Error::Io { op, cause: e.to_string() });
            }
            Ok(store)
        })
    }

    /// Loads the lvstore on a claimed bdev. While a failed flush of that is latched nothing is written,
    /// and the lvstore takes no changes until it is loaded anew ([`Lvs::reload`]).
    pub fn load(world: (&Registry, &Keys), claim: Claim, timeout: Duration) -> Result<Lvs, Error> {
        let base = claim.bdev().clone();
        Lvs::start(world, claim, timeout, move |disk| {
            let loaded = match base.flush_latch().is_some_and(FlushLatch::is_set) {
                false => Store::load(disk),
                true => Store::load_stopped(disk, earlier_failure(&*base)),
            };
            loaded.map_err(|e| not_loaded(e, base.name()))
        })
    }

    fn start(
        (registry, keys): (&Registry, &Keys),
        claim: Claim,
        timeout: Duration,
        open: impl FnOnce(BdevDisk) -> Result<Store<BdevDisk>, Error> + Send + 'static,
    ) -> Result<Lvs, Error> {
        let base = claim.bdev().clone();
        let gauges = Arc::new(Gauges::default());
        let (thread, (info, found, externals)) = {
            let (base, gauges) = (base.clone(), gauges.clone());
            let its_registry = registry.clone();
            let open = move |bell| -> Result<(Meta, Found), Error> {
                let thread = MetaThread::new(bell, gauges);
                let opened = BdevDisk::open(&base)
                    .map_err(|e| Error::Io { op: format!("open bdev {}", e.name), cause: e.why })?;
                let mut store = open(opened)?;
                let info = store.info();
                let block_size = base.geometry().block_size;
                let externals =
                    Arc::new(Externals::new(its_registry.clone(), info.uuid, block_size));
                store.disk_mut().set_externals(externals.clone());
                let volumes: Vec<_> = store
                    .blobs()
                    .map(|blob| Volume::of_blob(&store, &info, &blob, &base, &thread))
                    .collect();
                let mut meta = Meta::new(base, store, thread, externals, its_registry);
                volumes.iter().for_each(|v| meta.add_volume(v.clone()));
                meta.relate_all();
                let externals = meta.externals.clone();
                Ok((meta, (info, volumes, externals)))
            };
            Control::start("lvstore", open, |e| Error::Io {
                op: "start the lvstore's thread".into(),
                cause: e.to_string(),
            })?
        };
        let lvs = Lvs {
            externals,
            keys: keys.clone(),
            uuid: info.uuid,
            base,
            name: Mutex::new(info.name.clone()),
            info,
            registry: registry.clone(),
            volumes: Mutex::default(),
            gauges,
            control: Turns::default(),
            zeroings: Zeroings::default(),
            keepers: Mutex::default(),
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
        self.externals.come();
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
            format_version: self.gauges.format_version.load(Ordering::Relaxed),
            shares_clusters: self.gauges.shares_clusters.load(Ordering::Relaxed),
            stopped: self.stopped(),
            zeroing: self
                .zeroings
                .list()
                .iter()
                .map(|z| ZeroingInfo {
                    alias: z.alias.clone(),
                    uuid: z.uuid,
                    done: z.done.load(Ordering::Relaxed),
                    total: z.total.load(Ordering::Relaxed),
                })
                .collect(),
        }
    }

    /// Whether it takes no more changes although no failed flush is latched any more.
    pub fn can_reload(&self) -> bool {
        let latched = self.base.flush_latch().is_some_and(FlushLatch::is_set);
        !latched && self.gauges.stopped.lock().is_some()
    }

    /// Why it takes no more changes, if it does not.
    fn stopped(&self) -> Option<String> {
        let latched = || {
            let failure = self.base.flush_latch()?.failure()?;
            Some(format!("on bdev {} {failure}", self.base.name()))
        };
        latched().or_else(|| self.gauges.stopped.lock().clone())
    }

    /// How long a job may wait to begin.
    pub(crate) fn timeout(&self) -> Duration {
        self.timeout
    }

    fn turn(&self, op: &str) -> Result<Turn<'_>, Error> {
        self.control.take(self.timeout).ok_or_else(|| self.waiting(op))
    }

    /// What keeps the tuples of a volume waits for the device.
    fn slow(&self, op: &str) -> Error {
        Error::SlowIo { op: op.to_owned(), seconds: self.timeout.as_secs() }
    }

    fn waiting(&self, op: &str) -> Error {
        let (bdev, seconds) = (self.base.name().to_owned(), self.timeout.as_secs());
        Error::Waiting { op: op.to_owned(), bdev, seconds }
    }

    pub fn volumes(&self) -> Vec<Arc<Volume>> {
        self.volumes.lock().values().cloned().collect()
    }

    /// The volume with this UUID.
    pub fn volume(&self, uuid: Uuid) -> Option<Arc<Volume>> {
        self.volumes.lock().get(&uuid).cloned()
    }

    /// The volume of this name. Looks through all.
    pub fn volume_named(&self, name: &str) -> Option<Arc<Volume>> {
        self.volumes.lock().values().find(|volume| volume.is_named(name)).cloned()
    }

    pub fn volume_info(&self, volume: &Volume) -> LvolInfo {
        let (is_thin_provisioned, is_snapshot, is_clone, external) = volume.kin(|kin| {
            let external = kin.external.as_ref().map(|external| external.uuid.to_string());
            (kin.thin, kin.snapshot, kin.parent.is_some(), external)
        });
        LvolInfo {
            alias: volume.alias(),
            uuid: volume.id.uuid,
            name: volume.names().lvol,
            is_thin_provisioned,
            is_snapshot,
            is_clone,
            is_esnap_clone: external.is_some(),
            is_degraded: volume.is_degraded(),
            external_snapshot_name: external,
            num_allocated_clusters: volume.allocated.load(Ordering::Relaxed),
            lvs: LvsRef { uuid: self.uuid, name: self.name() },
            size: volume.size(),
            is_read_only: volume.is_read_only(),
            dif_type: volume.id.dif.map(|(kind, _)| kind),
            waits_for_key: self.waits_for_key(volume),
            key_name: volume.id.encryption.as_ref().map(|encryption| encryption.key.clone()),
        }
    }

    pub fn sizes(&self, volume: &Volume) -> LvolSizes {
        let clusters = volume.allocated.load(Ordering::Relaxed);
        LvolSizes { size: volume.size(), allocated: clusters * u64::from(self.info.cluster_size) }
    }

    /// The view of a volume, with its map.
    pub fn view_of(&self, op: &str, volume: &Arc<Volume>) -> Result<View, Error> {
        let (job, volume) = (op.to_owned(), volume.clone());
        self.meta(op, move |meta| meta.view_of(&job, &volume))
    }

    /// The clusters that a volume itself has, in order.
    pub fn clusters_of(&self, op: &str, volume: &Arc<Volume>) -> Result<Vec<u64>, Error> {
        let (job, volume, cluster_size) = (op.to_owned(), volume.clone(), self.info.cluster_size);
        self.meta(op, move |meta| {
            let mut clusters = Vec::new();
            let each = |cluster, to| {
                if to != HOLE {
                    clusters.push(cluster)
                }
            };
            let read = meta.look(&job)?.each_cluster(volume.blob(), 0, each);
            read.map_err(|e| refused(e, &job, cluster_size)).map(|()| clusters)
        })
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
    pub(crate) fn meta_within<R: Send + 'static>(
        &self,
        timeout: Duration,
        op: &str,
        f: impl FnOnce(&mut Meta) -> Result<R, Error> + Send + 'static,
    ) -> Result<R, Error> {
        let and_publish = move |meta: &mut Meta| {
            let result = f(meta);
            // The caller may look at the gauges at once.
            meta.publish();
            result
        };
        self.thread.call(timeout, and_publish).unwrap_or_else(|why| match why {
            NotRun::Busy => Err(self.waiting(op)),
            NotRun::Gone => {
                Err(Error::Stopped { op: op.to_owned(), cause: "its thread ended".into() })
            }
        })
    }

    /// Makes a volume a bdev. One that is degraded is made one when its parent comes, and one that is
    /// encrypted when its key does.
    fn register(&self, volume: &Arc<Volume>) -> Result<(), Error> {
        if volume.is_degraded() {
            tracing::warn!("lvol {} is degraded: its external parent is missing", volume.alias());
            return Ok(());
        }
        let key = match &volume.id.encryption {
            None => None,
            Some(encryption) => match encryption.find(&self.keys) {
                Some(key) => Some(key),
                None => {
                    let key = &encryption.key;
                    tracing::warn!("lvol {} waits for its key {key}", volume.alias());
                    return Ok(());
                }
            },
        };
        if let Some(block_size) = volume.other_block_size() {
            tracing::error!(
                "lvol {} is not shown: it keeps protection information of blocks of {block_size} bytes, and \
                 bdev {} has others; give the lvstore a bdev with blocks of that size",
                volume.alias(),
                self.base.name()
            );
            return Ok(());
        }
        let ask = self.thread.ask();
        let lvol = Lvol::new(volume.clone(), key, ask, || self.keepers()).map_err(|e| {
            Error::Io { op: format!("show lvol {}", volume.alias()), cause: e.to_string() }
        })?;
        self.registry.register(Arc::new(lvol)).map_err(|e| match e {
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

    /// The thread that keeps the maps of volumes that have some, which begins with the first.
    fn keepers(&self) -> io::Result<Arc<Keepers>> {
        let mut keepers = self.keepers.lock();
        if let Some(keepers) = &*keepers {
            return Ok(keepers.clone());
        }
        Ok(keepers.insert(Arc::new(Keepers::start(self.timeout)?)).clone())
    }

    /// A volume as a bdev, if it is one.
    fn lvol_of(&self, volume: &Volume) -> Option<Arc<Lvol>> {
        // Another lvstore may be a copy of this one, with volumes of the same UUIDs.
        let found: Option<Arc<Lvol>> = self.registry.get_as(&volume.name);
        found.filter(|lvol| std::ptr::eq(&*lvol.volume, volume))
    }

    /// Takes a volume that nobody claims out of the registry.
    fn hide(&self, op: &str, volume: &Volume) -> Result<(), Error> {
        let lvol = self.lvol_of(volume);
        match self.registry.unregister_unused(&volume.id.uuid.to_string()) {
            Ok(_) | Err(RegistryError::NotFound(_)) => {
                lvol.iter().filter_map(|lvol| lvol.area()).for_each(Area::close);
                Ok(())
            }
            Err(RegistryError::Claimed { owner, .. }) => {
                Err(Error::InUse { op: op.to_owned(), by: owner })
            }
            Err(e) => Err(Error::InUse { op: op.to_owned(), by: e.to_string() }),
        }
    }

    fn unregister(&self, op: &str, volume: &Volume) -> Result<(), Error> {
        let lvol = self.lvol_of(volume);
        let done = self.registry.unregister(&volume.id.uuid.to_string());
        lvol.iter().filter_map(|lvol| lvol.area()).for_each(Area::close);
        match done {
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

    /// Loads the lvstore anew if it has stopped, in use; `false`: it has not. Returns the volumes of
    /// another size as well.
    pub fn reload(&self) -> Result<Option<Vec<Arc<Volume>>>, Error> {
        let op = format!("load lvstore {} anew", self.name());
        let _turn = self.turn(&op)?;
        let volumes = if self.can_reload() { self.volumes() } else { Vec::new() };
        let lvols: Vec<_> = volumes.iter().filter_map(|its| self.lvol_of(its)).collect();
        let _paused: Vec<_> = lvols.iter().filter_map(|lvol| Some(lvol.area()?.reload())).collect();
        let job = op.clone();
        let found = self.meta(&op, move |meta| meta.reload(&job))?;
        let Some(Reloaded { gone, new, resized, name }) = found else { return Ok(None) };
        *self.name.lock() = name.clone();
        self.externals.come();
        for volume in gone {
            self.unregister(&op, &volume)?;
            self.volumes.lock().remove(&volume.id.uuid);
        }
        for volume in new {
            self.register(&volume)?;
            self.volumes.lock().insert(volume.id.uuid, volume);
        }
        for volume in self.volumes() {
            volume.rename(|names| names.lvstore.clone_from(&name));
            // Clusters that were not durably its own may be lost, and so may be a change of its size.
            self.lvol_of(&volume).iter().filter_map(|lvol| lvol.area()).for_each(Area::reloaded);
        }
        Ok(Some(resized))
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

    /// Gives the lvstore the newest version of its format; with `share_clusters`, it shares clusters from then on.
    pub fn upgrade(&self, share_clusters: bool) -> Result<(), Error> {
        let op = format!("upgrade the format of lvstore {}", self.name());
        let _turn = self.turn(&op)?;
        let cluster_size = self.info.cluster_size;
        self.meta(&op.clone(), move |meta| {
            let store = meta.store(&op)?;
            let upgraded = store.upgrade().and_then(|()| match share_clusters {
                true => store.share_clusters(),
                false => Ok(()),
            });
            upgraded.map_err(|e| refused(e, &op, cluster_size))
        })
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
        // Zeros that were still written afterwards could hit what somebody else puts there.
        if !self.zeroings.end(self.timeout) {
            return Err(self.waiting(&op));
        }
        self.unregister_all();
        self.volumes.lock().clear();
        // There is no way back.
        self.meta_within(Duration::MAX, &op.clone(), move |meta| meta.close(&op, destroy))
    }
}
