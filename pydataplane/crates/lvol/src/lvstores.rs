//! The manager: finds an object by name or UUID, and hands each operation to the metadata thread of
//! its lvstore.

use crate::{Error, LvolInfo, LvolOptions, LvstoreInfo, LvstoreOptions};
use bdev::Registry;
use uuid::Uuid;

/// All lvstores of the process. Thread-safe; its methods block, so they are for control threads and
/// never for reactors.
///
/// An `lvstore` argument is a name or a UUID; an `lvol` argument is a UUID or `LVSTORE/LVOL`.
pub struct Lvstores {
    registry: Registry,
}

impl Lvstores {
    /// A manager without lvstores, whose lvols will be bdevs of `registry`.
    pub fn new(registry: Registry) -> Self {
        Lvstores { registry }
    }

    /// Creates an lvstore on the bdev `bdev`, claims the bdev, and returns the lvstore's UUID.
    pub fn create_lvstore(
        &self,
        bdev: &str,
        name: &str,
        options: &LvstoreOptions,
    ) -> Result<Uuid, Error> {
        let _ = (&self.registry, bdev, name, options);
        todo!()
    }

    /// Loads the lvstore on `bdev`, if there is one, and registers its lvols. `None`: the bdev holds
    /// no lvstore. Loading one that is loaded already returns its UUID.
    pub fn examine(&self, bdev: &str) -> Result<Option<Uuid>, Error> {
        let _ = bdev;
        todo!()
    }

    /// Unregisters the lvols of an lvstore and releases its bdev; what is on the medium stays.
    pub fn unload(&self, lvstore: &str) -> Result<(), Error> {
        let _ = lvstore;
        todo!()
    }

    /// Deletes an lvstore with all its lvols; refused while one of them is in use.
    pub fn destroy_lvstore(&self, lvstore: &str) -> Result<(), Error> {
        let _ = lvstore;
        todo!()
    }

    /// Gives an lvstore another name; the aliases of its lvols follow.
    pub fn rename_lvstore(&self, lvstore: &str, new_name: &str) -> Result<(), Error> {
        let _ = (lvstore, new_name);
        todo!()
    }

    /// One lvstore.
    pub fn lvstore(&self, lvstore: &str) -> Result<LvstoreInfo, Error> {
        let _ = lvstore;
        todo!()
    }

    /// All lvstores, by name.
    pub fn lvstores(&self) -> Vec<LvstoreInfo> {
        todo!()
    }

    /// Creates an lvol, registers its bdev, and returns what was made. A thick one reads as zeros
    /// from the start.
    pub fn create_lvol(&self, lvstore: &str, options: &LvolOptions) -> Result<LvolInfo, Error> {
        let _ = (lvstore, options);
        todo!()
    }

    /// Deletes an lvol; refused while it is in use (claimed).
    pub fn delete_lvol(&self, lvol: &str) -> Result<(), Error> {
        let _ = lvol;
        todo!()
    }

    /// Grows or shrinks an lvol, in use or not, to `size` bytes rounded up to whole clusters.
    pub fn resize_lvol(&self, lvol: &str, size: u64) -> Result<LvolInfo, Error> {
        let _ = (lvol, size);
        todo!()
    }

    /// Gives an lvol another name (`new_name` without the lvstore).
    pub fn rename_lvol(&self, lvol: &str, new_name: &str) -> Result<LvolInfo, Error> {
        let _ = (lvol, new_name);
        todo!()
    }

    /// Makes an lvol read-only for good; refused while it is in use.
    pub fn set_read_only(&self, lvol: &str) -> Result<LvolInfo, Error> {
        let _ = lvol;
        todo!()
    }

    /// Sets an xattr.
    pub fn set_xattr(&self, lvol: &str, name: &str, value: &[u8]) -> Result<(), Error> {
        let _ = (lvol, name, value);
        todo!()
    }

    /// The value of an xattr.
    pub fn xattr(&self, lvol: &str, name: &str) -> Result<Vec<u8>, Error> {
        let _ = (lvol, name);
        todo!()
    }

    /// Removes an xattr.
    pub fn remove_xattr(&self, lvol: &str, name: &str) -> Result<(), Error> {
        let _ = (lvol, name);
        todo!()
    }

    /// The names of an lvol's xattrs, in order.
    pub fn xattrs(&self, lvol: &str) -> Result<Vec<String>, Error> {
        let _ = lvol;
        todo!()
    }

    /// One lvol.
    pub fn lvol(&self, lvol: &str) -> Result<LvolInfo, Error> {
        let _ = lvol;
        todo!()
    }

    /// The lvols of one lvstore, or of all, by alias.
    pub fn lvols(&self, lvstore: Option<&str>) -> Result<Vec<LvolInfo>, Error> {
        let _ = lvstore;
        todo!()
    }
}
