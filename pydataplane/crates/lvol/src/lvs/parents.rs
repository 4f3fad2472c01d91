//! Bdevs that are to be the parents of an lvstore's volumes: which can be, and that they are held. One that is an
//! lvol itself has its map in memory from then on.

use crate::error::Error;
use crate::external::{External, Externals};
use crate::lvol::Lvol;
use std::sync::Arc;

impl Externals {
    /// The bdev of this name, alias or UUID, held.
    pub fn hold(&self, op: &str, bdev: &str) -> Result<Arc<External>, Error> {
        let found = self.registry.get(bdev);
        let found = found.ok_or_else(|| Error::NoBdev { bdev: bdev.to_owned() })?;
        let external = self.get(found.uuid());
        if external.is_missing() {
            self.take(op, &external)?;
        }
        Ok(external)
    }

    /// Holds those missing ones that are there now. Whether there were any.
    pub fn come(&self) -> bool {
        let mut any = false;
        for external in self.missing() {
            if self.registry.get(&external.uuid.to_string()).is_none() {
                continue;
            }
            match self.take("use it as a parent", &external) {
                Ok(()) => any = true,
                Err(e) => tracing::warn!("bdev {} is there, but: {e}", external.uuid),
            }
        }
        any
    }

    fn take(&self, op: &str, external: &External) -> Result<(), Error> {
        let key = external.uuid.to_string();
        let refuse = |why: &str| Err(Error::BadParameter { op: op.to_owned(), why: why.into() });
        let its = self.registry.get_as::<Lvol>(&key);
        if its.is_some_and(|lvol| lvol.volume.id.lvstore == self.lvstore) {
            return refuse("it is an lvol of the same lvstore; clone a snapshot of it");
        }
        let its = self.registry.get_as::<Lvol>(&key);
        if its.is_some_and(|lvol| lvol.area().is_some()) {
            return refuse("it keeps its protection information itself; clone a snapshot of it");
        }
        let claim = self.claim(op, &key)?;
        if let Some(lvol) = self.registry.get_as::<Lvol>(&key) {
            lvol.volume.keep_map();
        }
        self.arrive(external, claim);
        Ok(())
    }
}
