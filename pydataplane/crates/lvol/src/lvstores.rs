//! The manager: finds an object by name or UUID, and hands each operation to its lvstore. Those on lvols
//! are in [`lvols`].

mod encryption;
mod external;
mod lvols;
mod medium;

use crate::copying::Copies;
use crate::disk::BdevDisk;
use crate::error::Error;
use crate::info::{LvstoreInfo, LvstoreOptions};
use crate::lvs::Lvs;
use crate::translate::not_loaded;
use crate::volume::Volume;
use bdev::{Claim, Event, FlushLatch, Registry, RegistryError, Subscription};
use blobstore::{Error as StoreError, Identity, Store};
use crypto::Keys;
use parking_lot::Mutex;
use std::sync::{Arc, Weak};
use std::time::Duration;
use uuid::Uuid;

/// How long an operation on an lvstore waits for those before it: clients wait 30 s for an answer, and
/// are to hear that nothing was done.
const OPERATION_TIMEOUT: Duration = Duration::from_secs(20);

struct Shared {
    registry: Registry,
    keys: Keys,
    timeout: Duration,
    stores: Mutex<Vec<Arc<Lvs>>>,
    /// Names and UUIDs of lvstores that come, go or change their name: each has one operation at a
    /// time, which may wait for its disk while others go on.
    coming: Mutex<Vec<String>>,
    copies: Copies,
}

/// All lvstores of the process. Thread-safe; its methods block, so they are for control threads and
/// never for reactors.
///
/// An `lvstore` argument is a name or a UUID; an `lvol` argument is a UUID or `LVSTORE/LVOL`.
///
/// Operations on an lvstore, of which one is done at a time, give up with [`Error::Waiting`] when those
/// before them do not end: the bdev under it does not answer, for instance.
///
/// When the bdev under an lvstore is unregistered, the lvstore is unloaded: its lvols leave the
/// registry and the claim on the bdev ends.
pub struct Lvstores {
    shared: Arc<Shared>,
    _subscription: Subscription,
}

impl Lvstores {
    /// A manager without lvstores, whose lvols will be bdevs of `registry`.
    pub fn new(registry: Registry) -> Self {
        Lvstores::with_keys(registry, Keys::default())
    }

    /// As [`Lvstores::new`], for lvols with keys of their own, too: some of `keys`.
    pub fn with_keys(registry: Registry, keys: Keys) -> Self {
        Lvstores::with(registry, keys, OPERATION_TIMEOUT)
    }

    /// As [`Lvstores::new`]; an operation on an lvstore waits for those before it no longer than that.
    pub fn with_timeout(registry: Registry, timeout: Duration) -> Self {
        Lvstores::with(registry, Keys::default(), timeout)
    }

    fn with(registry: Registry, keys: Keys, timeout: Duration) -> Self {
        let shared = Arc::new(Shared {
            registry: registry.clone(),
            keys,
            timeout,
            stores: Mutex::default(),
            coming: Mutex::default(),
            copies: Copies::default(),
        });
        let weak = Arc::downgrade(&shared);
        let subscription = registry.subscribe(move |event| match event {
            Event::Removed(bdev) => {
                external::removed(&weak, bdev);
                base_removed(&weak, bdev.name());
            }
            Event::Registered(bdev) => external::registered(&weak, bdev.uuid()),
            _ => {}
        });
        Lvstores { shared, _subscription: subscription }
    }

    /// Creates an lvstore on the bdev `bdev`, claims the bdev, and returns the lvstore's UUID.
    ///
    /// # Errors
    /// [`Error::NoBdev`], [`Error::InUse`], [`Error::AlreadyExists`] (name or UUID),
    /// [`Error::HoldsLvstore`], [`Error::BadParameter`] (cluster size, device too small),
    /// [`Error::BadName`], [`Error::NameTooLong`], [`Error::ReadOnlyBdev`], [`Error::Io`].
    pub fn create_lvstore(
        &self,
        bdev: &str,
        name: &str,
        options: &LvstoreOptions,
    ) -> Result<Uuid, Error> {
        let op = format!("create lvstore {name}");
        let options =
            LvstoreOptions { uuid: Some(options.uuid.unwrap_or_else(Uuid::new_v4)), ..*options };
        let keys = [Some(name.to_owned()), options.uuid.map(|uuid| uuid.to_string())];
        let _coming = self.shared.coming(&op, keys.iter().flatten())?;
        for key in keys.iter().flatten() {
            if self.shared.find(key).is_ok() {
                return Err(Error::AlreadyExists { what: format!("lvstore {key}") });
            }
        }
        let claim = self.shared.claim(bdev, name, &op)?;
        if claim.bdev().features().read_only {
            return Err(Error::ReadOnlyBdev { op, bdev: claim.bdev().name().to_owned() });
        }
        if let Some(found) = probe(&claim)? {
            let bdev = claim.bdev().name().to_owned();
            return Err(Error::HoldsLvstore { bdev, name: found.name, uuid: found.uuid });
        }
        let timeout = self.shared.timeout;
        let lvs = Lvs::create(self.shared.world(), claim, name, &options, timeout)?;
        let uuid = lvs.uuid;
        self.shared.stores.lock().push(Arc::new(lvs));
        tracing::info!(lvstore = name, %uuid, bdev, "lvstore created");
        Ok(uuid)
    }

    /// Loads the lvstore on `bdev`, if there is one, and registers its lvols. `None`: the bdev holds
    /// no lvstore. Loading one that is loaded already returns its UUID. While a failed flush of the
    /// bdev is latched the lvstore is loaded without writing anything, and takes no changes until
    /// [`Lvstores::reload_on`]. A bdev that lvols wait for as their external parent is taken up.
    ///
    /// # Errors
    /// [`Error::NoBdev`], [`Error::InUse`], [`Error::Damaged`] (also for a truncated device),
    /// [`Error::AlreadyExists`] (another lvstore has its name or UUID), [`Error::Io`].
    pub fn examine(&self, bdev: &str) -> Result<Option<Uuid>, Error> {
        if self.shared.is_external(bdev) {
            return Ok(None);
        }
        let examined = self.load_from(bdev);
        let come = self.shared.externals_come(bdev);
        let held = self.shared.is_external(bdev);
        match examined {
            // It was taken up in between.
            Err(Error::InUse { .. }) if held => come.map(|()| None),
            examined => examined.and_then(|found| come.map(|()| found)),
        }
    }

    fn load_from(&self, bdev: &str) -> Result<Option<Uuid>, Error> {
        let found = self.shared.registry.get(bdev);
        let name = found.ok_or_else(|| Error::NoBdev { bdev: bdev.to_owned() })?.name().to_owned();
        if let Some(lvs) = self.shared.on(&name) {
            return Ok(Some(lvs.uuid));
        }
        let claim = self.shared.claim(&name, &format!("on {name}"), "examine the bdev")?;
        let Some(identity) = probe(&claim)? else { return Ok(None) };
        drop(claim);
        let op = format!("load lvstore {}", identity.name);
        let keys = [identity.name.clone(), identity.uuid.to_string()];
        let coming = self.shared.coming(&op, &keys)?;
        for key in &keys {
            if let Ok(other) = self.shared.find(key) {
                let what = format!("lvstore {key} on bdev {}", other.base.name());
                return Err(Error::AlreadyExists { what });
            }
        }
        let claim = self.shared.claim(&name, &identity.name, &op)?;
        if claim.bdev().features().read_only {
            return Err(Error::ReadOnlyBdev { op, bdev: claim.bdev().name().to_owned() });
        }
        let lvs = Arc::new(Lvs::load(self.shared.world(), claim, self.shared.timeout)?);
        self.shared.stores.lock().push(lvs.clone());
        drop(coming);
        if let Err(e) = lvs.register_all() {
            let _ = self.unload(&identity.uuid.to_string());
            return Err(e);
        }
        if lvs.can_reload() {
            // The failed flush was cleared while this was loaded in spite of it.
            lvs.reload()?;
        } else if let Some(why) = lvs.info().stopped {
            tracing::error!(lvstore = identity.name, bdev, "loaded, but takes no changes: {why}");
        }
        tracing::info!(lvstore = identity.name, uuid = %identity.uuid, bdev, "lvstore loaded");
        Ok(Some(identity.uuid))
    }

    /// Unregisters the lvols of an lvstore and releases its bdev; what is on the medium stays.
    ///
    /// # Errors
    /// [`Error::NoLvstore`]; [`Error::Io`] when its journal could not be emptied (it is unloaded
    /// all the same, and replayed at the next load).
    pub fn unload(&self, lvstore: &str) -> Result<(), Error> {
        self.shared.close(lvstore, false)
    }

    /// Deletes an lvstore with all its lvols.
    ///
    /// # Errors
    /// [`Error::NoLvstore`], [`Error::InUse`] while one of its lvols is, [`Error::Io`].
    pub fn destroy_lvstore(&self, lvstore: &str) -> Result<(), Error> {
        self.shared.close(lvstore, true)
    }

    /// Gives an lvstore another name; the aliases of its lvols follow.
    ///
    /// # Errors
    /// [`Error::NoLvstore`], [`Error::AlreadyExists`], [`Error::BadName`],
    /// [`Error::NameTooLong`], [`Error::Stopped`], [`Error::Io`].
    pub fn rename_lvstore(&self, lvstore: &str, new_name: &str) -> Result<(), Error> {
        let lvs = self.shared.find(lvstore)?;
        let op = format!("rename lvstore {} to {new_name}", lvs.name());
        let _coming = self.shared.coming(&op, [&new_name.to_owned()])?;
        match self.shared.find(new_name) {
            Ok(other) if other.uuid == lvs.uuid && other.name() == new_name => Ok(()),
            Ok(_) => Err(Error::AlreadyExists { what: format!("lvstore {new_name}") }),
            Err(_) => lvs.rename(new_name),
        }
    }

    /// Gives an lvstore, in use or not, the newest version of its format, which has snapshots. With `share_clusters`,
    /// copies between its lvols share clusters from then on. Targets that are older than that refuse it from
    /// then on.
    ///
    /// # Errors
    /// [`Error::NoLvstore`], [`Error::Stopped`], [`Error::Io`]; then it has the version that it had.
    pub fn upgrade_lvstore(
        &self,
        lvstore: &str,
        share_clusters: bool,
    ) -> Result<LvstoreInfo, Error> {
        let lvs = self.shared.find(lvstore)?;
        lvs.upgrade(share_clusters)?;
        Ok(lvs.info())
    }

    /// Grows an lvstore, in use or not, to the present size of its bdev; nothing changes where that
    /// is the same.
    ///
    /// # Errors
    /// [`Error::NoLvstore`], [`Error::Shrunk`], [`Error::CannotGrow`], [`Error::Stopped`],
    /// [`Error::Io`].
    pub fn grow_lvstore(&self, lvstore: &str) -> Result<LvstoreInfo, Error> {
        let lvs = self.shared.find(lvstore)?;
        let grown = lvs.grow()?;
        let info = lvs.info();
        if grown {
            let clusters = info.total_data_clusters;
            tracing::info!(lvstore = info.name, clusters, bdev = info.base_bdev, "lvstore grown");
        }
        Ok(info)
    }

    /// One lvstore.
    ///
    /// # Errors
    /// [`Error::NoLvstore`].
    pub fn lvstore(&self, lvstore: &str) -> Result<LvstoreInfo, Error> {
        self.shared.find(lvstore).map(|lvs| lvs.info())
    }

    /// All lvstores, by name.
    pub fn lvstores(&self) -> Vec<LvstoreInfo> {
        let mut all: Vec<_> = self.shared.stores.lock().iter().map(|lvs| lvs.info()).collect();
        all.sort_by(|a, b| a.name.cmp(&b.name));
        all
    }

    /// Loads anew, in use, each lvstore on a device of that latch that has stopped taking changes.
    /// What had failed half-way happened or did not, as the medium says. Returns their names.
    ///
    /// # Errors
    /// [`Error::Damaged`], [`Error::Stopped`] while a failed flush is latched, [`Error::Waiting`],
    /// [`Error::Io`].
    pub fn reload_on(&self, latch: &FlushLatch) -> Result<Vec<String>, Error> {
        let stores = self.shared.stores.lock().clone();
        let same = |lvs: &&Arc<Lvs>| lvs.base.flush_latch().is_some_and(|l| std::ptr::eq(l, latch));
        let mut reloaded = Vec::new();
        for lvs in stores.iter().filter(same) {
            let Some(resized) = lvs.reload()? else { continue };
            for volume in resized {
                self.shared.registry.notify_resized(&volume.id.uuid.to_string());
            }
            tracing::info!(lvstore = lvs.name(), "lvstore loaded anew");
            reloaded.push(lvs.name());
        }
        Ok(reloaded)
    }
}

/// The right to an operation on an lvstore, see [`Shared::coming`].
struct Coming<'a> {
    shared: &'a Shared,
    keys: Vec<String>,
}

impl Drop for Coming<'_> {
    fn drop(&mut self) {
        self.shared.coming.lock().retain(|key| !self.keys.contains(key));
    }
}

impl Shared {
    /// Where lvols are shown, and what with.
    fn world(&self) -> (&Registry, &Keys) {
        (&self.registry, &self.keys)
    }

    /// The lvstore of that name or UUID.
    fn find(&self, id: &str) -> Result<Arc<Lvs>, Error> {
        let uuid = Uuid::try_parse(id).ok();
        let stores = self.stores.lock();
        let named = stores.iter().find(|lvs| lvs.name() == id);
        let found = named.or_else(|| stores.iter().find(|lvs| Some(lvs.uuid) == uuid));
        found.cloned().ok_or_else(|| Error::NoLvstore { id: id.to_owned() })
    }

    /// The lvstore on that bdev.
    fn on(&self, bdev: &str) -> Option<Arc<Lvs>> {
        self.stores.lock().iter().find(|lvs| lvs.base.name() == bdev).cloned()
    }

    fn find_lvol(&self, id: &str) -> Result<(Arc<Lvs>, Arc<Volume>), Error> {
        let gone = || Error::NoLvol { id: id.to_owned() };
        let bdev = self.registry.get(id).map(|bdev| bdev.uuid());
        if let Some(uuid) = bdev.or_else(|| Uuid::try_parse(id).ok()) {
            let stores = self.stores.lock().clone();
            let of = |lvs: Arc<Lvs>| lvs.volume(uuid).map(|volume| (lvs, volume));
            return stores.into_iter().find_map(of).ok_or_else(gone);
        }
        // It is no bdev at the moment, or its lvstore is given by UUID.
        let (lvstore, name) = id.split_once('/').ok_or_else(gone)?;
        let lvs = self.find(lvstore).map_err(|_| gone())?;
        lvs.volume_named(name).map(|volume| (lvs, volume)).ok_or_else(gone)
    }

    /// Begins an operation on the lvstore of these names or UUIDs, which no other one may be about.
    fn coming<'a>(
        &self,
        op: &str,
        keys: impl IntoIterator<Item = &'a String>,
    ) -> Result<Coming<'_>, Error> {
        let keys: Vec<String> = keys.into_iter().cloned().collect();
        let mut all = self.coming.lock();
        if let Some(key) = keys.iter().find(|key| all.contains(key)) {
            let by = format!("another operation on lvstore {key}");
            return Err(Error::InUse { op: op.to_owned(), by });
        }
        all.extend(keys.iter().cloned());
        Ok(Coming { shared: self, keys })
    }

    fn claim(&self, bdev: &str, lvstore: &str, op: &str) -> Result<Claim, Error> {
        self.registry.claim(bdev, &format!("lvstore {lvstore}")).map_err(|e| match e {
            RegistryError::NotFound(bdev) => Error::NoBdev { bdev },
            RegistryError::Claimed { name, owner } => {
                Error::InUse { op: format!("{op} on bdev {name}"), by: owner }
            }
            e => Error::InUse { op: op.to_owned(), by: e.to_string() },
        })
    }

    fn close(&self, lvstore: &str, destroy: bool) -> Result<(), Error> {
        let lvs = self.find(lvstore)?;
        let op = format!("close lvstore {}", lvs.name());
        let _coming = self.coming(&op, [&lvs.uuid.to_string()])?;
        let closed = lvs.close(destroy);
        if matches!(closed, Err(Error::InUse { .. } | Error::Waiting { .. })) {
            return closed;
        }
        self.stores.lock().retain(|other| other.uuid != lvs.uuid);
        closed
    }
}

/// The lvstore on a claimed bdev, looked at from the calling thread.
fn probe(claim: &Claim) -> Result<Option<Identity>, Error> {
    let bdev = claim.bdev();
    let mut disk = BdevDisk::open(bdev)
        .map_err(|e| Error::Io { op: format!("open bdev {}", e.name), cause: e.why })?;
    Store::probe(&mut disk).map_err(|e| match e {
        StoreError::Data(e) => {
            Error::Io { op: format!("examine bdev {}", bdev.name()), cause: e.to_string() }
        }
        e => not_loaded(e, bdev.name()),
    })
}

/// Unloads the lvstore on a bdev that is being removed, on a thread of its own: a subscriber may not
/// wait.
fn base_removed(shared: &Weak<Shared>, bdev: &str) {
    let Some(shared) = shared.upgrade() else { return };
    let Some(lvs) = shared.on(bdev) else { return };
    let name = lvs.name();
    drop(lvs);
    tracing::warn!("bdev {bdev} is being removed, so lvstore {name} on it is unloaded");
    let unload = move || {
        if let Err(e) = shared.close(&name, false) {
            tracing::error!("{e}");
        }
    };
    if let Err(e) = std::thread::Builder::new().name("lvstore-unload".into()).spawn(unload) {
        tracing::error!("lvstore on bdev {bdev} cannot be unloaded: {e}");
    }
}
