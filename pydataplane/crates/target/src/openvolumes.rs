//! Volumes of pools as bdevs: opened for the calls that use them, shown without, closed when nobody uses them.

use crate::app::App;
use crate::array::{Array, Found};
use crate::errors;
use crate::methods::rbd::{self as images, Way};
use crate::methods::{iscsi as luns, nvme as namespaces};
use crate::pools::{ALL_TIMEOUT, Backend, Pool};
use crate::restore::bdev_of;
use crate::state::{self, Item};
use crate::volume::Volume;
use bdev::{Bdev, Channel, ClaimMode, Features, Geometry, OpenError};
use rbd::Disk;
use reactor::IoContext;
use rpc::{Errno, Error, Held};
use serde_json::{Value, json};
use std::sync::Arc;
use std::time::Duration;
use uuid::Uuid;

/// Methods that use a bdev, and by which parameter.
const USERS: [(&str, &str); 10] = [
    ("vhost_scsi_controller_add_target", "bdev_name"),
    ("vhost_create_blk_controller", "dev_name"),
    ("virtlun_export_create", "bdev_name"),
    ("ublk_start_disk", "bdev_name"),
    ("bdev_crypto_create", "base_bdev_name"),
    ("bdev_delay_create", "base_bdev_name"),
    ("bdev_error_create", "base_name"),
    ("virtlun_integrity_create", "base_bdev_name"),
    ("virtlun_lun_copy_start", "dst_bdev_name"),
    ("bdev_lvol_clone_bdev", "bdev"),
];
/// Methods that only have to know a bdev, their parameter `name`.
const KNOWERS: [&str; 3] =
    ["virtlun_bdev_set_limits", "bdev_set_qos_limit", "virtlun_bdev_get_limits"];
/// Who holds a volume while a call that is to use it goes on.
const CALL: &str = "a call that has just opened it";
/// How long an image may take to be opened and locked.
const OPEN_TIMEOUT: Duration = Duration::from_secs(60);
/// How long who let go of a volume waits until another host can have it.
pub const CLOSE_TIMEOUT: Duration = Duration::from_secs(2);

/// A volume that is not open.
struct Closed {
    name: String,
    alias: String,
    product: &'static str,
    volume: Volume,
    specific: Value,
}

impl Bdev for Closed {
    fn name(&self) -> &str {
        &self.name
    }
    fn aliases(&self) -> Vec<String> {
        vec![self.alias.clone()]
    }
    fn uuid(&self) -> Uuid {
        self.volume.uuid
    }
    fn product_name(&self) -> &'static str {
        self.product
    }
    fn geometry(&self) -> Geometry {
        Geometry {
            block_size: self.volume.block_size,
            physical_block_size: self.volume.block_size,
            num_blocks: self.volume.size / u64::from(self.volume.block_size),
        }
    }
    fn features(&self) -> Features {
        Features {
            read_only: self.volume.read_only,
            volatile_cache: true,
            unmap: self.volume.thin,
            unmap_zeroes: self.volume.thin,
            unmap_skips: true,
            write_zeroes: true,
            thin: self.volume.thin,
            ..Features::default()
        }
    }
    fn open(&self, _: &IoContext) -> Result<Box<dyn Channel>, OpenError> {
        let why = "the volume is not open".to_owned();
        Err(OpenError { name: self.name.clone(), why })
    }
    fn driver_specific(&self) -> Value {
        self.specific.clone()
    }
}

fn closed(pool: &Pool, volume: Volume) -> Arc<dyn Bdev> {
    let mut specific = json!({"lvol": pool.specific(&volume)});
    let product = match &pool.backend {
        Backend::Ceph { cluster, path, .. } => {
            specific["rbd"] = json!({
                "pool_name": path,
                "rbd_name": volume.name(),
                "cluster_name": cluster.name(),
                "object_size": volume.object_size,
            });
            Disk::PRODUCT
        }
        Backend::Array(array) => {
            specific[array.kind()] = array.specific(&volume);
            array.product()
        }
    };
    let (name, alias) = (volume.uuid.to_string(), pool.alias(&volume));
    Arc::new(Closed { name, alias, product, volume, specific })
}

/// Holds a bdev so that it is not closed.
///
/// # Errors
/// Somebody has it for himself alone.
pub fn hold(app: &App, bdev: &str) -> Result<Held, Error> {
    let held = app.registry.claim_as(bdev, CALL, ClaimMode::Reader);
    held.map(|claim| Some(Box::new(claim) as _)).map_err(errors::registry)
}

impl App {
    /// A volume that is no bdev as it is not open, as far as is known of it, as one that cannot be used.
    pub fn closed_volume(&self, name: &str) -> Option<Arc<dyn Bdev>> {
        let (pool, volume) = self.pools.known(name)?;
        Some(closed(&pool, volume))
    }

    /// As [`App::closed_volume`], as it is now.
    ///
    /// # Errors
    /// The pool does not answer; there is no such volume.
    pub fn look_at_volume(&self, name: &str) -> Result<Option<Arc<dyn Bdev>>, Error> {
        let Some(pool) = self.pools.ask_of(name) else { return Ok(None) };
        let volume = pool.volume(name)?;
        self.check_only_one(&pool, &volume)?;
        Ok(Some(closed(&pool, volume)))
    }

    /// Refuses a volume whose UUID, by which it is called, a namespace has that is a bdev by itself: that is what its
    /// array says.
    fn check_only_one(&self, pool: &Pool, volume: &Volume) -> Result<(), Error> {
        let uuid = volume.uuid.to_string();
        // A volume's bdev has that name.
        let other = self.registry.get_as::<nvme::Disk>(&uuid).filter(|it| it.name() != uuid);
        let Some(other) = other else { return Ok(()) };
        let (alias, other) = (pool.alias(volume), other.name());
        let why = format!(
            "{alias} has the UUID that an array gives to the bdev {other}, {uuid}, so that it could not be told from \
             it: detach that"
        );
        Err(Error::os(Errno::Exist, why))
    }

    /// All volumes that are no bdevs as they are not open.
    pub fn closed_volumes(&self) -> Vec<Arc<dyn Bdev>> {
        let mut all = Vec::new();
        for pool in self.pools.list() {
            let volumes = pool.volumes_or_known().into_iter();
            // By its name, too: an open disk keeps that, whatever has the number now.
            let is_open = |volume: &Volume| {
                self.registry.get(&volume.uuid.to_string()).is_some()
                    || self.registry.get(&pool.alias(volume)).is_some()
            };
            all.extend(volumes.filter(|v| !is_open(v)).map(|volume| closed(&pool, volume)));
        }
        all
    }

    /// What `bdev_get_bdevs` says of a bdev's kind; of an open volume also what its pool knows.
    pub fn specific(&self, bdev: &dyn Bdev) -> Value {
        let mut specific = bdev.driver_specific();
        if self.pools.is_empty() || !self.pools.open().contains(bdev.name()) {
            return specific;
        }
        if let Some((pool, volume)) =
            self.pools.known(bdev.name()).or_else(|| self.open_disk(bdev.name()))
        {
            specific["lvol"] = pool.specific(&volume);
        }
        specific
    }

    /// A disk of an array that is open, whatever its pool lists now.
    fn open_disk(&self, bdev: &str) -> Option<(Arc<Pool>, Volume)> {
        let lun = self.registry.get_as::<iscsi::Disk>(bdev);
        let found = match lun.map(|disk| Found::from(disk.found())) {
            Some(found) => found,
            None => self.registry.get_as::<nvme::Disk>(bdev)?.found().into(),
        };
        let alias = self.registry.get(bdev)?.aliases().into_iter().next()?;
        let pool = self.pools.of(&alias)?;
        let Backend::Array(array) = &pool.backend else { return None };
        let volume = array.volume(found);
        Some((pool, volume))
    }

    /// Makes the bdev of a volume of the pool `pool` of an array known, and that it is open; `item`: it is restored,
    /// by that.
    ///
    /// # Errors
    /// The pool has gone meanwhile; there is such a bdev; it is not wanted any more.
    pub fn add_opened(
        &self,
        pool: &str,
        bdev: Arc<dyn Bdev>,
        found: Found,
        item: Option<&Item>,
    ) -> Result<(), Error> {
        let name = bdev.name().to_owned();
        let Some(pool) = self.pools.get(pool) else {
            let why = format!("bdev {name}: pool {pool} is there no more");
            return Err(Error::os(Errno::NoDev, why));
        };
        pool.note_disk(found);
        // Before anybody can look for it.
        self.pools.open().insert(name.clone());
        let added = match item {
            Some(item) => self.add_restored(bdev, item),
            None => self.register(bdev),
        };
        if added.is_err() {
            self.pools.open().remove(&name);
        }
        added
    }

    /// What the call of a method needs: the volume that it uses, open.
    ///
    /// # Errors
    /// It cannot be opened.
    pub fn before_call(&self, method: &str, params: &Value) -> Result<Held, Error> {
        let text = |name: &str| params.get(name).and_then(Value::as_str);
        let user = USERS.iter().find(|(name, _)| *name == method);
        let used = user.and_then(|(_, param)| text(param));
        let flag = |name: &str| params.get(name).and_then(Value::as_bool).unwrap_or(false);
        if let Some(name) = used
            && let Some(held) = self.hold_guest_disk(name, flag("incoming"))?
        {
            return Ok(Some(held));
        }
        if self.pools.is_empty() {
            return Ok(None);
        }
        if KNOWERS.contains(&method) {
            if let Some(name) = text("name").filter(|name| self.registry.get(name).is_none()) {
                self.look_at_volume(name)?;
            }
            return Ok(None);
        }
        let Some(name) = used else { return Ok(None) };
        let way = Way { shared: flag("shareable"), incoming: flag("incoming") };
        self.open_volume(name, way)
    }

    /// Opens a volume, unless it is open, and holds it so that it is not closed again. `None`: it is none, or
    /// was opened otherwise.
    fn open_volume(&self, name: &str, way: Way) -> Result<Held, Error> {
        let registered = self.registry.get(name).map(|bdev| bdev.name().to_owned());
        let is_ours = |bdev: &String| self.pools.open().contains(bdev);
        let pool = match &registered {
            Some(bdev) if !is_ours(bdev) => return Ok(None),
            _ => self.pools.ask_of(name),
        };
        let Some(pool) = pool else { return Ok(None) };
        let _opening = pool.opening(OPEN_TIMEOUT)?;
        let there = self.registry.get(name).map(|bdev| bdev.name().to_owned());
        if let Some(disk) = there.as_ref().and_then(|bdev| self.registry.get_as::<Disk>(bdev)) {
            let bdev = there.clone().unwrap_or_default();
            // A snapshot is not locked.
            let same = disk.source().shared == way.shared || disk.source().image.contains('@');
            let is_shared = disk.source().shared;
            // One that a VM is to come to is not locked yet.
            let is_locked = way.incoming || disk.is_locked() != Some(false);
            let is_so = same && is_locked && !disk.is_fenced();
            drop(disk);
            if is_so || !self.close_volume(&bdev) {
                return if same {
                    hold(self, &bdev)
                } else {
                    Err(self.opened_otherwise(name, &bdev, is_shared))
                };
            }
        }
        if let Some(bdev) = there.filter(|_| !pool.is_ceph()) {
            // Several VMs of this host share it, or not, as their LUNs say.
            return hold(self, &bdev);
        }
        let volume = pool.volume(name)?;
        self.check_only_one(&pool, &volume)?;
        let bdev = volume.uuid.to_string();
        if self.restoring().contains(&state::bdev_key(&bdev)) {
            let alias = pool.alias(&volume);
            let why = format!("{alias} is being opened again since the target's start: try again");
            return Err(Error::os(Errno::Busy, why));
        }
        match &pool.backend {
            Backend::Ceph { .. } => images::open_volume(self, &pool, &volume, way)?,
            Backend::Array(array) => {
                if let Some(problem) = &volume.problem {
                    let why = format!("{} cannot be used: {problem}", pool.alias(&volume));
                    return Err(Error::os(Errno::Io, why));
                }
                match array {
                    Array::Iscsi { .. } => luns::open_volume(self, &pool, &volume, way)?,
                    Array::Nvme { options, paths } => {
                        namespaces::open_volume(self, &pool.name, (options, paths), &volume)?;
                    }
                }
            }
        }
        hold(self, &bdev)
    }

    /// Why a volume that is in use cannot be opened in the other way, with a lock or without.
    fn opened_otherwise(&self, name: &str, bdev: &str, is_shared: bool) -> Error {
        let owners = self.registry.owners(bdev);
        let owner = owners.first().map_or("", |(owner, _)| owner.as_str());
        let why = match is_shared {
            true => format!(
                "{name} is in use by {owner}, shared with other hosts, so it cannot be locked for this one: \
                 release it there first"
            ),
            false => format!(
                "{name} is in use by {owner}, locked for this host, so it cannot be shared: release it there first"
            ),
        };
        Error::os(Errno::Busy, why)
    }

    /// Closes an open volume that nobody holds; whether it is closed, or will be soon.
    fn close_volume(&self, bdev: &str) -> bool {
        let closing = self.closing(bdev);
        if closing.is_none() || self.registry.unregister_unused(bdev).is_err() {
            return false;
        }
        self.pools.open().remove(bdev);
        self.config().forget(|item| item.key == state::bdev_key(bdev));
        if closing.is_some_and(|closing| !closing.wait(CLOSE_TIMEOUT)) {
            tracing::warn!(
                "volume {bdev} is not used any more, but its pool has not let go of it yet"
            );
        }
        true
    }

    /// Closes the volumes that nobody uses any more; called after each call that may have let go of one.
    pub fn close_unused_volumes(&self) {
        let open: Vec<String> = self.pools.open().iter().cloned().collect();
        for bdev in open {
            if self.registry.get(&bdev).is_none() {
                self.pools.open().remove(&bdev);
                continue;
            }
            // Also by what waits for it.
            let is_wanted = self.config().items().any(|item| bdev_of(item) == Some(&*bdev));
            if is_wanted || !self.registry.owners(&bdev).is_empty() {
                continue;
            }
            let pool = self.pools.of(&bdev);
            // Another call opens it, perhaps, and closes what it does not need.
            let lock = pool.as_ref().map(|pool| pool.try_opening());
            if !matches!(lock, Some(None)) {
                self.close_volume(&bdev);
            }
        }
    }

    /// As [`App::close_unused_volumes`], where no call ends by which that is recorded.
    pub fn close_unused_volumes_for_good(&self) {
        self.close_unused_volumes();
        // The record may be the next process's by now, which closes it once more.
        if self.copies.are_ended() {
            return;
        }
        if let Err(e) = self.commit() {
            tracing::error!("volumes that were closed are not recorded as such: {e}");
        }
    }

    /// Looks at an open volume for what its pool says of it, where that answers soon.
    pub fn refresh_volume(&self, bdev: &str) {
        if self.pools.is_empty() || !self.pools.open().contains(bdev) {
            return;
        }
        // Nothing of it need be known, after the target's start for instance.
        let Some(disk) = self.registry.get_as::<Disk>(bdev) else { return };
        let (source, cluster) = (disk.source(), disk.cluster().name());
        let its = |pool: &Arc<Pool>| match &pool.backend {
            Backend::Ceph { cluster: its, path, .. } => {
                *path == source.pool && its.name() == cluster
            }
            Backend::Array(_) => false,
        };
        if let Some(pool) = self.pools.list().into_iter().find(its) {
            let image = source.image.split('@').next().unwrap_or_default();
            _ = pool.look(image, ALL_TIMEOUT);
        }
    }
}
