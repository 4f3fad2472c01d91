//! LUNs of an iSCSI target, or namespaces of an NVMe subsystem, as volumes: they are listed and used. All else is done at the array, and refused here.

use crate::array::Array;
use crate::errors;
use crate::pools::{LIST_TIMEOUT, Pool};
use crate::stores::Store;
use lvol::{LvolInfo, LvolOptions, NewLvol, Ranges};
use rpc::{Errno, Error};
use std::collections::BTreeMap;
use std::sync::Arc;

/// A pool of an array.
pub struct LunStore {
    /// The pool.
    pub pool: Arc<Pool>,
    /// The array.
    pub array: Array,
}

impl LunStore {
    /// What is done at the array; `what` says it, given what its disks are.
    fn refused<T>(&self, name: &str, what: impl Fn(&str) -> String) -> Result<T, Error> {
        let (pool, what) = (&self.pool.name, what(self.array.disks()));
        let of = self.array.what();
        let why = format!("{name} is of the pool {pool} {of}, whose array {what}: do it there");
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
        self.refused(&format!("{}/{}", self.pool.name, options.name), |disks| {
            format!("makes {disks}")
        })
    }

    fn cancel(&self, name: &str) -> Result<(), Error> {
        let why =
            format!("{name} is of a pool {}, where nothing is zeroed", self.pool.backend.what());
        Err(Error::os(Errno::NoDev, why))
    }

    fn delete(&self, name: &str) -> Result<(), Error> {
        self.refused(name, |disks| format!("deletes {disks}"))
    }

    fn resize(&self, name: &str, _: u64) -> Result<(), Error> {
        self.refused(name, |disks| {
            format!("gives {disks} another size, which is seen here within seconds")
        })
    }

    fn rename(&self, name: &str, _: &str) -> Result<(), Error> {
        self.refused(name, |disks| {
            format!("gives {disks} their {}, which they are called by", self.array.called_by())
        })
    }

    fn set_read_only(&self, name: &str) -> Result<(), Error> {
        self.refused(name, |disks| format!("says which {disks} are write-protected"))
    }

    fn snapshot(&self, of: &str, _: &NewLvol) -> Result<LvolInfo, Error> {
        self.refused(of, |_| "takes snapshots".to_owned())
    }

    fn snapshot_together(&self, all: &[(&str, &NewLvol)]) -> Result<Vec<LvolInfo>, Error> {
        self.refused(all.first().map_or("", |(of, _)| of), |_| "takes snapshots".to_owned())
    }

    fn clone_of(&self, snapshot: &str, _: &NewLvol) -> Result<LvolInfo, Error> {
        self.refused(snapshot, |_| "makes clones".to_owned())
    }

    fn inflate(&self, name: &str) -> Result<(), Error> {
        self.refused(name, |disks| format!("knows what its {disks} share"))
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
        self.refused(name, |_| "has the snapshots to go back to".to_owned())
    }

    fn roll_back_together(&self, all: &[(&str, &str)]) -> Result<(), Error> {
        self.roll_back(all.first().map_or("", |(name, _)| name), "")
    }

    fn ranges(&self, name: &str, _: Option<&str>, _: u64, _: usize) -> Result<Ranges, Error> {
        self.refused(name, |_| "alone knows which blocks hold something".to_owned())
    }

    fn shallow_copy(&self, name: &str, _: &str) -> Result<u32, Error> {
        self.refused(name, |disks| format!("copies {disks}"))
    }

    /// Nothing can be noted at a disk of an array.
    fn xattrs(&self, name: &str) -> Result<BTreeMap<String, String>, Error> {
        match self.pool.knows(name) {
            true => Ok(BTreeMap::new()),
            false => Err(errors::no_volume(name)),
        }
    }

    fn set_xattr(&self, name: &str, _: &str, _: &str) -> Result<(), Error> {
        self.refused(name, |disks| format!("keeps no notes of others at {disks}"))
    }

    fn remove_xattr(&self, name: &str, xattr: &str) -> Result<(), Error> {
        Err(errors::no_xattr(name, xattr))
    }
}
