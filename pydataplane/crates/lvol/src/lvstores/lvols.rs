//! Operations on lvols, each handed to its lvstore.

use super::Lvstores;
use crate::disk::BdevDisk;
use crate::error::Error;
use crate::info::{LvolInfo, LvolOptions, LvolSizes};
use crate::lvs::Lvs;
use crate::translate::refused;
use blobstore::{Error as StoreError, Store};
use std::collections::{HashMap, HashSet};
use std::sync::Arc;
use uuid::Uuid;

impl Lvstores {
    /// Creates an lvol, registers its bdev, and returns what was made. All of it reads as zeros.
    ///
    /// # Errors
    /// [`Error::NoLvstore`], [`Error::AlreadyExists`] (name or UUID), [`Error::NoSpace`],
    /// [`Error::BadParameter`], [`Error::BadName`], [`Error::NameTooLong`], [`Error::Stopped`],
    /// [`Error::Io`].
    pub fn create_lvol(&self, lvstore: &str, options: &LvolOptions) -> Result<LvolInfo, Error> {
        self.shared.find(lvstore)?.create_lvol(options)
    }

    /// Deletes an lvol.
    ///
    /// # Errors
    /// [`Error::NoLvol`], [`Error::InUse`] while somebody claims it, [`Error::Stopped`],
    /// [`Error::Io`].
    pub fn delete_lvol(&self, lvol: &str) -> Result<(), Error> {
        let (lvs, volume) = self.shared.find_lvol(lvol)?;
        lvs.delete_lvol(&volume)
    }

    /// Grows or shrinks an lvol, in use or not, to `size` bytes rounded up to whole clusters. What is
    /// added reads as zeros; what is cut off is lost. Emits [`Event::Resized`].
    ///
    /// # Errors
    /// [`Error::NoLvol`], [`Error::NoSpace`], [`Error::BadParameter`], [`Error::ReadOnly`],
    /// [`Error::Stopped`], [`Error::Io`].
    pub fn resize_lvol(&self, lvol: &str, size: u64) -> Result<LvolInfo, Error> {
        let (lvs, volume) = self.shared.find_lvol(lvol)?;
        if lvs.resize_lvol(&volume, size)? {
            self.shared.registry.notify_resized(&volume.id.uuid.to_string());
        }
        Ok(lvs.volume_info(&volume))
    }

    /// Cancels the creation or growth of a thick lvol that is under way.
    ///
    /// # Errors
    /// [`Error::NoLvol`]: none of that alias or UUID is.
    pub fn cancel(&self, lvol: &str) -> Result<(), Error> {
        let stores = self.shared.stores.lock().clone();
        match stores.iter().any(|lvs| lvs.cancel(lvol)) {
            true => Ok(()),
            false => Err(Error::NoLvol { id: format!("{lvol} that is being zeroed") }),
        }
    }

    /// Gives an lvol another name (`new_name` without the lvstore), in use or not.
    ///
    /// # Errors
    /// [`Error::NoLvol`], [`Error::AlreadyExists`], [`Error::BadName`], [`Error::NameTooLong`],
    /// [`Error::Stopped`], [`Error::Io`].
    pub fn rename_lvol(&self, lvol: &str, new_name: &str) -> Result<LvolInfo, Error> {
        let (lvs, volume) = self.shared.find_lvol(lvol)?;
        lvs.rename_lvol(&volume, new_name)?;
        Ok(lvs.volume_info(&volume))
    }

    /// Makes an lvol read-only for good.
    ///
    /// # Errors
    /// [`Error::NoLvol`], [`Error::InUse`] while somebody claims it, [`Error::Stopped`],
    /// [`Error::Io`].
    pub fn set_read_only(&self, lvol: &str) -> Result<LvolInfo, Error> {
        let (lvs, volume) = self.shared.find_lvol(lvol)?;
        lvs.set_read_only(&volume)?;
        Ok(lvs.volume_info(&volume))
    }

    /// Sets an xattr: a name of 1 to 255 printable characters, a value of at most 3072 bytes.
    ///
    /// # Errors
    /// [`Error::NoLvol`], [`Error::BadParameter`], [`Error::NoSpace`], [`Error::Stopped`],
    /// [`Error::Io`].
    pub fn set_xattr(&self, lvol: &str, name: &str, value: &[u8]) -> Result<(), Error> {
        let (name_owned, value) = (name.to_owned(), value.to_vec());
        self.on_blob(lvol, format!("set xattr {name}"), true, move |store, blob| {
            store.set_xattr(blob, &name_owned, &value)
        })
    }

    /// The value of an xattr.
    ///
    /// # Errors
    /// [`Error::NoLvol`], [`Error::NoXattr`].
    pub fn xattr(&self, lvol: &str, name: &str) -> Result<Vec<u8>, Error> {
        let name_owned = name.to_owned();
        self.on_blob(lvol, format!("get xattr {name}"), false, move |store, blob| {
            store.xattr(blob, &name_owned).map(<[u8]>::to_vec)
        })
    }

    /// Removes an xattr.
    ///
    /// # Errors
    /// [`Error::NoLvol`], [`Error::NoXattr`], [`Error::Stopped`], [`Error::Io`].
    pub fn remove_xattr(&self, lvol: &str, name: &str) -> Result<(), Error> {
        let name_owned = name.to_owned();
        self.on_blob(lvol, format!("remove xattr {name}"), true, move |store, blob| {
            store.remove_xattr(blob, &name_owned)
        })
    }

    /// The names of an lvol's xattrs, in order.
    ///
    /// # Errors
    /// [`Error::NoLvol`].
    pub fn xattrs(&self, lvol: &str) -> Result<Vec<String>, Error> {
        self.on_blob(lvol, "list xattrs".into(), false, |store, blob| store.xattrs(blob))
    }

    /// One lvol.
    ///
    /// # Errors
    /// [`Error::NoLvol`].
    pub fn lvol(&self, lvol: &str) -> Result<LvolInfo, Error> {
        let (lvs, volume) = self.shared.find_lvol(lvol)?;
        Ok(lvs.volume_info(&volume))
    }

    /// The lvols of one lvstore, or of all, by alias.
    ///
    /// # Errors
    /// [`Error::NoLvstore`].
    pub fn lvols(&self, lvstore: Option<&str>) -> Result<Vec<LvolInfo>, Error> {
        let stores = match lvstore {
            Some(id) => vec![self.shared.find(id)?],
            None => self.shared.stores.lock().clone(),
        };
        let of = |lvs: &Arc<Lvs>| {
            let volumes = lvs.volumes();
            volumes.iter().map(|v| lvs.volume_info(v)).collect::<Vec<_>>()
        };
        let mut all: Vec<_> = stores.iter().flat_map(of).collect();
        all.sort_by(|a, b| a.alias.cmp(&b.alias));
        Ok(all)
    }

    /// Sizes of those of these lvols (UUID or `LVSTORE/LVOL`) that are there, by what was given.
    ///
    /// One look at each volume, however many are asked for.
    pub fn sizes<'a>(&self, lvols: &'a [String]) -> Vec<(&'a str, LvolSizes)> {
        let given = lvols.iter().map(String::as_str);
        let (aliases, uuids): (Vec<_>, Vec<_>) = given.partition(|name| name.contains('/'));
        let uuids = uuids.into_iter().filter_map(|name| Some((Uuid::try_parse(name).ok()?, name)));
        let by_uuid: HashMap<Uuid, &str> = uuids.collect();
        let by_alias: HashSet<&str> = aliases.into_iter().collect();
        let stores = self.shared.stores.lock().clone();
        let mut found = Vec::with_capacity(by_uuid.len() + by_alias.len());
        for lvs in stores {
            for volume in lvs.volumes() {
                let sizes = lvs.sizes(&volume);
                found.extend(by_uuid.get(&volume.id.uuid).map(|name| (*name, sizes)));
                if !by_alias.is_empty() {
                    found.extend(by_alias.get(&*volume.alias()).map(|name| (*name, sizes)));
                }
            }
        }
        found
    }

    /// Runs `f` on an lvol's blob, on the metadata thread.
    fn on_blob<R: Send + 'static>(
        &self,
        lvol: &str,
        what: String,
        changes: bool,
        f: impl FnOnce(&mut Store<BdevDisk>, blobstore::BlobId) -> Result<R, StoreError>
        + Send
        + 'static,
    ) -> Result<R, Error> {
        let (lvs, volume) = self.shared.find_lvol(lvol)?;
        let op = format!("{what} of lvol {}", volume.alias());
        let cluster_size = lvs.info().cluster_size;
        lvs.meta(&op.clone(), move |meta| {
            let store = if changes { meta.store(&op) } else { meta.look(&op) };
            f(store?, volume.id.blob).map_err(|e| refused(e, &op, cluster_size))
        })
    }
}
