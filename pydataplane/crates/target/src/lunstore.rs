//! LUNs of an iSCSI target as volumes: they are listed and used. All else is done at the array, and refused here.

use crate::errors;
use crate::pools::{LIST_TIMEOUT, Pool};
use crate::stores::Store;
use lvol::{LvolInfo, LvolOptions, NewLvol, Ranges};
use rpc::{Errno, Error};
use std::collections::BTreeMap;
use std::sync::Arc;

/// A pool of LUNs.
pub struct LunStore {
    /// The pool.
    pub pool: Arc<Pool>,
}

impl LunStore {
    /// What is done at the array; `what` says it.
    fn refused<T>(&self, name: &str, what: &str) -> Result<T, Error> {
        let Pool { name: pool, backend, .. } = &*self.pool;
        let why = format!(
            "{name} is of the pool {pool} {}, whose array {what}: do it there",
            backend.what()
        );
        Err(Error::os(Errno::NotSup, why))
    }
}

impl Store for LunStore {
    fn volumes(&self, _: Option<&str>) -> Result<Vec<LvolInfo>, Error> {
        let all = self.pool.volumes(LIST_TIMEOUT)?;
        Ok(all.iter().map(|volume| self.pool.lvol(volume)).collect())
    }

    fn volume(&self, name: &str) -> Result<LvolInfo, Error> {
        Ok(self.pool.lvol(&self.pool.volume(name)?))
    }

    fn create(&self, _: &str, options: &LvolOptions) -> Result<LvolInfo, Error> {
        self.refused(&format!("{}/{}", self.pool.name, options.name), "makes LUNs")
    }

    fn cancel(&self, name: &str) -> Result<(), Error> {
        let why =
            format!("{name} is of a pool {}, where nothing is zeroed", self.pool.backend.what());
        Err(Error::os(Errno::NoDev, why))
    }

    fn delete(&self, name: &str) -> Result<(), Error> {
        self.refused(name, "deletes LUNs")
    }

    fn resize(&self, name: &str, _: u64) -> Result<(), Error> {
        self.refused(name, "gives LUNs another size, which is seen here within seconds")
    }

    fn rename(&self, name: &str, _: &str) -> Result<(), Error> {
        self.refused(name, "gives LUNs their numbers, which they are called by")
    }

    fn set_read_only(&self, name: &str) -> Result<(), Error> {
        self.refused(name, "says which LUNs are write-protected")
    }

    fn snapshot(&self, of: &str, _: &NewLvol) -> Result<LvolInfo, Error> {
        self.refused(of, "takes snapshots")
    }

    fn snapshot_together(&self, all: &[(&str, &NewLvol)]) -> Result<Vec<LvolInfo>, Error> {
        self.refused(all.first().map_or("", |(of, _)| of), "takes snapshots")
    }

    fn clone_of(&self, snapshot: &str, _: &NewLvol) -> Result<LvolInfo, Error> {
        self.refused(snapshot, "makes clones")
    }

    fn inflate(&self, name: &str) -> Result<(), Error> {
        self.refused(name, "knows what its LUNs share")
    }

    fn decouple_parent(&self, name: &str) -> Result<(), Error> {
        self.inflate(name)
    }

    fn set_parent(&self, name: &str, _: &str) -> Result<(), Error> {
        self.inflate(name)
    }

    fn set_parent_bdev(&self, name: &str, _: &str) -> Result<(), Error> {
        self.inflate(name)
    }

    fn roll_back(&self, name: &str, _: &str) -> Result<(), Error> {
        self.refused(name, "has the snapshots to go back to")
    }

    fn roll_back_together(&self, all: &[(&str, &str)]) -> Result<(), Error> {
        self.roll_back(all.first().map_or("", |(name, _)| name), "")
    }

    fn ranges(&self, name: &str, _: Option<&str>, _: u64, _: usize) -> Result<Ranges, Error> {
        self.refused(name, "alone knows which blocks hold something")
    }

    fn shallow_copy(&self, name: &str, _: &str) -> Result<u32, Error> {
        self.refused(name, "copies LUNs")
    }

    /// Nothing can be noted at a LUN.
    fn xattrs(&self, name: &str) -> Result<BTreeMap<String, String>, Error> {
        match self.pool.knows(name) {
            true => Ok(BTreeMap::new()),
            false => Err(errors::no_volume(name)),
        }
    }

    fn set_xattr(&self, name: &str, _: &str, _: &str) -> Result<(), Error> {
        self.refused(name, "keeps no notes of others at LUNs")
    }

    fn remove_xattr(&self, name: &str, xattr: &str) -> Result<(), Error> {
        Err(errors::no_xattr(name, xattr))
    }
}
