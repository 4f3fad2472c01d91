//! Bdevs that are the parents of lvols (external snapshots): who they are, and whether they are there.
//!
//! The store keeps the UUID alone. An lvstore holds each such bdev as long as one of its lvols needs it,
//! so that nobody writes to it; while it is missing the lvols that show it are degraded.

use crate::error::Error;
use crate::lvol::Lvol;
use bdev::{Bdev, Claim, ClaimMode, Registry, RegistryError};
use parking_lot::Mutex;
use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use uuid::Uuid;

/// A bdev that is somebody's parent.
pub(crate) struct External {
    pub uuid: Uuid,
    held: Mutex<Option<Claim>>,
    /// Another number each time that it came; 0 while it is missing.
    presence: AtomicU64,
}

impl External {
    /// Another number each time that it came; 0: it is missing.
    #[inline]
    pub fn presence(&self) -> u64 {
        self.presence.load(Ordering::Acquire)
    }

    pub fn is_missing(&self) -> bool {
        self.presence() == 0
    }

    /// The bdev, while it is there.
    pub fn bdev(&self) -> Option<Arc<dyn Bdev>> {
        self.held.lock().as_ref().map(|claim| claim.bdev().clone())
    }
}

/// Those of an lvstore.
pub(crate) struct Externals {
    registry: Registry,
    lvstore: Uuid,
    /// Bytes of a block of the lvstore's bdev.
    block_size: u32,
    all: Mutex<BTreeMap<Uuid, Arc<External>>>,
    /// How often one came.
    came: AtomicU64,
}

impl Externals {
    pub fn new(registry: Registry, lvstore: Uuid, block_size: u32) -> Self {
        let (all, came) = (Mutex::default(), AtomicU64::new(0));
        Externals { registry, lvstore, block_size, all, came }
    }

    /// The one with this UUID, which may be missing.
    pub fn get(&self, uuid: Uuid) -> Arc<External> {
        let new =
            || Arc::new(External { uuid, held: Mutex::default(), presence: AtomicU64::new(0) });
        self.all.lock().entry(uuid).or_insert_with(new).clone()
    }

    /// Whether there are none.
    pub fn is_empty(&self) -> bool {
        self.all.lock().is_empty()
    }

    /// Whether an lvol has, or had, the bdev with this UUID as its parent.
    pub fn has(&self, uuid: Uuid) -> bool {
        self.all.lock().contains_key(&uuid)
    }

    /// Whether this one is held now.
    pub fn holds(&self, uuid: Uuid) -> bool {
        self.all.lock().get(&uuid).is_some_and(|external| !external.is_missing())
    }

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
        let missing: Vec<_> = self.all.lock().values().cloned().collect();
        let mut any = false;
        for external in missing.iter().filter(|external| external.is_missing()) {
            if self.registry.get(&external.uuid.to_string()).is_none() {
                continue;
            }
            match self.take("use it as a parent", external) {
                Ok(()) => any = true,
                Err(e) => tracing::warn!("bdev {} is there, but: {e}", external.uuid),
            }
        }
        any
    }

    fn take(&self, op: &str, external: &External) -> Result<(), Error> {
        let key = external.uuid.to_string();
        let its = self.registry.get_as::<Lvol>(&key);
        let refuse = |why: String| Err(Error::BadParameter { op: op.to_owned(), why });
        if its.is_some_and(|lvol| lvol.volume.id.lvstore == self.lvstore) {
            return refuse("it is an lvol of the same lvstore; clone a snapshot of it".into());
        }
        let its = self.registry.get_as::<Lvol>(&key);
        if its.is_some_and(|lvol| lvol.area().is_some()) {
            return refuse(
                "it keeps its protection information itself; clone a snapshot of it".into(),
            );
        }
        let owner = format!("lvstore {}, as a parent", self.lvstore);
        let held = self.registry.claim_as(&key, &owner, ClaimMode::Unchanged);
        let claim = held.map_err(|e| match e {
            RegistryError::NotFound(bdev) => Error::NoBdev { bdev },
            RegistryError::Claimed { owner, .. } => Error::InUse { op: op.to_owned(), by: owner },
            e => Error::InUse { op: op.to_owned(), by: e.to_string() },
        })?;
        let its = claim.bdev().geometry().block_size;
        if its > self.block_size || !self.block_size.is_multiple_of(its) {
            let ours = self.block_size;
            return refuse(format!("its blocks have {its} bytes, and the lvstore's {ours}"));
        }
        if let Some(lvol) = self.registry.get_as::<Lvol>(&key) {
            lvol.volume.keep_map();
        }
        let mut held = external.held.lock();
        if held.is_none() {
            *held = Some(claim);
            let presence = self.came.fetch_add(1, Ordering::Relaxed) + 1;
            external.presence.store(presence, Ordering::Release);
        }
        Ok(())
    }

    /// Lets go of a bdev that is being removed. Whether it was one of these.
    pub fn leave(&self, bdev: &Arc<dyn Bdev>) -> bool {
        let Some(external) = self.all.lock().get(&bdev.uuid()).cloned() else { return false };
        let mut held = external.held.lock();
        let same = |claim: &Claim| Arc::ptr_eq(claim.bdev(), bdev);
        if !held.as_ref().is_some_and(same) {
            return false;
        }
        external.presence.store(0, Ordering::Release);
        let claim = held.take();
        drop(held);
        drop(claim);
        true
    }

    /// Lets go of those that no lvol needs.
    pub fn keep(&self, needed: &BTreeSet<Uuid>) {
        let mut all = self.all.lock();
        let gone: Vec<_> = all.values().filter(|e| !needed.contains(&e.uuid)).cloned().collect();
        all.retain(|uuid, _| needed.contains(uuid));
        drop(all);
        for external in gone {
            external.presence.store(0, Ordering::Release);
            let claim = external.held.lock().take();
            drop(claim);
        }
    }
}
