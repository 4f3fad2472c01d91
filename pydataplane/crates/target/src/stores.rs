//! What has volumes, of any kind: the lvstores, pools of Ceph, and of arrays. The methods ask here which it is.

use crate::app::App;
use crate::errors;
use crate::imagestore::ImageStore;
use crate::lunstore::LunStore;
use crate::pools::{Backend, DATA_TIMEOUT, LIST_TIMEOUT, Pool};
use lvol::{LvolInfo, LvolOptions, Lvstores, NewLvol, Ranges};
use rpc::{Errno, Error};
use std::collections::BTreeMap;
use std::ops::Deref;
use std::sync::Arc;
use uuid::Uuid;

/// Something that has volumes. Names of volumes are UUIDs or STORE/NAME.
pub trait Store {
    /// The volumes of the store `name`, or of all of its kind.
    fn volumes(&self, name: Option<&str>) -> Result<Vec<LvolInfo>, Error>;
    /// One volume.
    fn volume(&self, name: &str) -> Result<LvolInfo, Error>;
    /// Makes a volume in the store of that name.
    fn create(&self, store: &str, options: &LvolOptions) -> Result<LvolInfo, Error>;
    /// Ends the making of a volume.
    fn cancel(&self, name: &str) -> Result<(), Error>;
    /// Deletes a volume and its data.
    fn delete(&self, name: &str) -> Result<(), Error>;
    /// Gives a volume a new size, in bytes.
    fn resize(&self, name: &str, size: u64) -> Result<(), Error>;
    /// Gives a volume another name.
    fn rename(&self, name: &str, new: &str) -> Result<(), Error>;
    /// Has a volume take no writes any more.
    fn set_read_only(&self, name: &str) -> Result<(), Error>;
    /// Takes a snapshot.
    fn snapshot(&self, of: &str, new: &NewLvol) -> Result<LvolInfo, Error>;
    /// Takes snapshots of one instant.
    fn snapshot_together(&self, all: &[(&str, &NewLvol)]) -> Result<Vec<LvolInfo>, Error>;
    /// Makes a clone of a snapshot.
    fn clone_of(&self, snapshot: &str, new: &NewLvol) -> Result<LvolInfo, Error>;
    /// Gives a volume all that it shows of others.
    fn inflate(&self, name: &str) -> Result<(), Error>;
    /// Gives a volume all that it shows of its parent.
    fn decouple_parent(&self, name: &str) -> Result<(), Error>;
    /// Gives a volume another parent, a snapshot.
    fn set_parent(&self, name: &str, parent: &str) -> Result<(), Error>;
    /// As that, any bdev.
    fn set_parent_bdev(&self, name: &str, bdev: &str) -> Result<(), Error>;
    /// Has a volume read as a snapshot.
    fn roll_back(&self, name: &str, snapshot: &str) -> Result<(), Error>;
    /// As that, several volumes, all or none.
    fn roll_back_together(&self, all: &[(&str, &str)]) -> Result<(), Error>;
    /// Parts of a volume that may hold something, or differ from a snapshot.
    fn ranges(
        &self,
        name: &str,
        since: Option<&str>,
        offset: u64,
        most: usize,
    ) -> Result<Ranges, Error>;
    /// Begins to copy what a volume itself has.
    fn shallow_copy(&self, name: &str, bdev: &str) -> Result<u32, Error>;
    /// What is noted at a volume.
    fn xattrs(&self, name: &str) -> Result<BTreeMap<String, String>, Error>;
    /// Notes something at a volume.
    fn set_xattr(&self, name: &str, xattr: &str, value: &str) -> Result<(), Error>;
    /// Removes a note.
    fn remove_xattr(&self, name: &str, xattr: &str) -> Result<(), Error>;
}

impl Store for Lvstores {
    fn volumes(&self, name: Option<&str>) -> Result<Vec<LvolInfo>, Error> {
        self.lvols(name).map_err(errors::lvol)
    }
    fn volume(&self, name: &str) -> Result<LvolInfo, Error> {
        self.lvol(name).map_err(errors::lvol)
    }
    fn create(&self, store: &str, options: &LvolOptions) -> Result<LvolInfo, Error> {
        self.create_lvol(store, options).map_err(errors::lvol)
    }
    fn cancel(&self, name: &str) -> Result<(), Error> {
        self.cancel(name).map_err(errors::lvol)
    }
    fn delete(&self, name: &str) -> Result<(), Error> {
        self.delete_lvol(name).map_err(errors::lvol)
    }
    fn resize(&self, name: &str, size: u64) -> Result<(), Error> {
        self.resize_lvol(name, size).map(drop).map_err(errors::lvol)
    }
    fn rename(&self, name: &str, new: &str) -> Result<(), Error> {
        self.rename_lvol(name, new).map(drop).map_err(errors::lvol)
    }
    fn set_read_only(&self, name: &str) -> Result<(), Error> {
        self.set_read_only(name).map(drop).map_err(errors::lvol)
    }
    fn snapshot(&self, of: &str, new: &NewLvol) -> Result<LvolInfo, Error> {
        self.snapshot(of, new).map_err(errors::lvol)
    }
    fn snapshot_together(&self, all: &[(&str, &NewLvol)]) -> Result<Vec<LvolInfo>, Error> {
        self.snapshot_together(all).map_err(errors::lvol)
    }
    fn clone_of(&self, snapshot: &str, new: &NewLvol) -> Result<LvolInfo, Error> {
        self.clone_lvol(snapshot, new).map_err(errors::lvol)
    }
    fn inflate(&self, name: &str) -> Result<(), Error> {
        self.inflate(name).map_err(errors::lvol)
    }
    fn decouple_parent(&self, name: &str) -> Result<(), Error> {
        self.decouple_parent(name).map_err(errors::lvol)
    }
    fn set_parent(&self, name: &str, parent: &str) -> Result<(), Error> {
        self.set_parent(name, parent).map_err(errors::lvol)
    }
    fn set_parent_bdev(&self, name: &str, bdev: &str) -> Result<(), Error> {
        self.set_parent_bdev(name, bdev).map_err(errors::lvol)
    }
    fn roll_back(&self, name: &str, snapshot: &str) -> Result<(), Error> {
        self.roll_back(name, snapshot).map(drop).map_err(errors::lvol)
    }
    fn roll_back_together(&self, all: &[(&str, &str)]) -> Result<(), Error> {
        self.roll_back_together(all).map_err(errors::lvol)
    }
    fn ranges(
        &self,
        name: &str,
        since: Option<&str>,
        offset: u64,
        most: usize,
    ) -> Result<Ranges, Error> {
        self.ranges(name, since, offset, most).map_err(errors::lvol)
    }
    fn shallow_copy(&self, name: &str, bdev: &str) -> Result<u32, Error> {
        self.start_shallow_copy(name, bdev).map_err(errors::lvol)
    }
    fn xattrs(&self, name: &str) -> Result<BTreeMap<String, String>, Error> {
        let names = Lvstores::xattrs(self, name).map_err(errors::lvol)?;
        let value = |xattr: String| {
            let value = self.xattr(name, &xattr).map_err(errors::lvol)?;
            let value = String::from_utf8(value).map_err(|_| {
                let why = format!("the value of xattr {xattr} of lvol {name} is not text");
                Error::os(Errno::IlSeq, why)
            })?;
            Ok((xattr, value))
        };
        names.into_iter().map(value).collect()
    }
    fn set_xattr(&self, name: &str, xattr: &str, value: &str) -> Result<(), Error> {
        self.set_xattr(name, xattr, value.as_bytes()).map_err(errors::lvol)
    }
    fn remove_xattr(&self, name: &str, xattr: &str) -> Result<(), Error> {
        self.remove_xattr(name, xattr).map_err(errors::lvol)
    }
}

/// The one that is asked for.
pub enum StoreOf<'a> {
    /// The lvstores.
    Lvstores(&'a Lvstores),
    /// A pool of Ceph.
    Images(ImageStore<'a>),
    /// A pool of an array.
    Luns(LunStore),
}

impl<'a> StoreOf<'a> {
    fn of_pool(app: &'a App, pool: Arc<Pool>) -> StoreOf<'a> {
        match pool.backend.clone() {
            Backend::Ceph { .. } => StoreOf::Images(ImageStore { app, pool }),
            Backend::Array(array) => StoreOf::Luns(LunStore { pool, array }),
        }
    }
}

impl<'a> Deref for StoreOf<'a> {
    type Target = dyn Store + 'a;
    fn deref(&self) -> &Self::Target {
        match self {
            StoreOf::Lvstores(lvstores) => *lvstores,
            StoreOf::Images(store) => store,
            StoreOf::Luns(store) => store,
        }
    }
}

impl App {
    /// What has the volume `name` (UUID or STORE/NAME), or would have it.
    pub fn store_of(&self, name: &str) -> StoreOf<'_> {
        if self.pools.is_empty() {
            return StoreOf::Lvstores(&self.lvstores);
        }
        let is_lvol = !name.contains('/') && self.lvstores.lvol(name).is_ok();
        match (!is_lvol).then(|| self.pools.ask_of(name)).flatten() {
            Some(pool) => StoreOf::of_pool(self, pool),
            None => StoreOf::Lvstores(&self.lvstores),
        }
    }

    /// Completes the deletion of a volume (UUID or STORE/NAME) that is no more in its pool's list, but in its
    /// trash, as an earlier call was cut off; whether there was one.
    ///
    /// # Errors
    /// A pool does not answer, or somebody has the image open.
    pub fn complete_deletion(&self, name: &str) -> Result<bool, Error> {
        let uuid = Uuid::parse_str(name).ok();
        let of = name.split_once('/').map(|(pool, _)| pool);
        let is_asked = |pool: &Arc<Pool>| uuid.is_some() || Some(&*pool.name) == of;
        let mut completed = 0;
        let pools = self.pools.list().into_iter().filter(|pool| pool.is_ceph());
        for pool in pools.filter(is_asked) {
            if !pool.call(LIST_TIMEOUT, rbd::Pool::has_trash)? {
                continue;
            }
            let wanted = name.rsplit('/').next().unwrap_or(name).to_owned();
            completed += pool.call(DATA_TIMEOUT, move |pool| {
                pool.complete(|image, its| uuid.map_or(image == wanted, |uuid| its == uuid))
            })?;
        }
        Ok(completed > 0)
    }

    /// The store of that name or UUID, or what would have it.
    pub fn store(&self, name: &str) -> StoreOf<'_> {
        match self.pools.get(name) {
            Some(pool) => StoreOf::of_pool(self, pool),
            None => StoreOf::Lvstores(&self.lvstores),
        }
    }

    /// Refuses a name that a pool has.
    ///
    /// # Errors
    /// It has.
    pub fn check_no_pool(&self, name: &str) -> Result<(), Error> {
        match self.pools.get(name) {
            None => Ok(()),
            Some(pool) => {
                let what = pool.backend.what();
                let why = format!("there is a pool {name} {what}: choose another name");
                Err(Error::os(Errno::Exist, why))
            }
        }
    }

    /// Refuses what is done to lvstores only.
    ///
    /// # Errors
    /// It is a pool; `instead` says what to do with one of Ceph.
    pub fn only_lvstores(&self, name: &str, instead: &str) -> Result<(), Error> {
        match self.pools.get(name) {
            None => Ok(()),
            Some(pool) => {
                let kind = pool.backend.kind();
                let instead = match pool.is_ceph() {
                    true => instead.to_owned(),
                    false => {
                        format!(
                            "virtlun_{kind}_pool_delete lets go of it, and the array does the rest"
                        )
                    }
                };
                let (name, what) = (&pool.name, pool.backend.what());
                let why = format!("{name} is a pool {what}, not an lvstore: {instead}");
                Err(Error::os(Errno::NotSup, why))
            }
        }
    }
}
