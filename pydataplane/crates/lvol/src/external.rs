//! Bdevs that are the parents of lvols (external snapshots): who they are, and whether they are there.
//!
//! The store keeps the UUID alone. An lvstore holds each such bdev as long as one of its lvols needs it,
//! so that nobody writes to it; while it is missing the lvols that show it are degraded.

use crate::error::Error;
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
    pub registry: Registry,
    pub lvstore: Uuid,
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

    /// Those that are missing.
    pub fn missing(&self) -> Vec<Arc<External>> {
        let all = self.all.lock();
        all.values().filter(|external| external.is_missing()).cloned().collect()
    }

    /// Has nobody change a bdev that is to be a parent, named as the registry knows it.
    pub fn claim(&self, op: &str, key: &str) -> Result<Claim, Error> {
        let owner = format!("lvstore {}, as a parent", self.lvstore);
        let held = self.registry.claim_as(key, &owner, ClaimMode::Unchanged);
        let claim = held.map_err(|e| match e {
            RegistryError::NotFound(bdev) => Error::NoBdev { bdev },
            RegistryError::Claimed { owner, .. } => Error::InUse { op: op.to_owned(), by: owner },
            e => Error::InUse { op: op.to_owned(), by: e.to_string() },
        })?;
        let its = claim.bdev().geometry().block_size;
        if its > self.block_size || !self.block_size.is_multiple_of(its) {
            let why = format!("its blocks have {its} bytes, and the lvstore's {}", self.block_size);
            return Err(Error::BadParameter { op: op.to_owned(), why });
        }
        Ok(claim)
    }

    /// One is there, and held.
    pub fn arrive(&self, external: &External, claim: Claim) {
        let mut held = external.held.lock();
        if held.is_none() {
            *held = Some(claim);
            let presence = self.came.fetch_add(1, Ordering::Relaxed) + 1;
            external.presence.store(presence, Ordering::Release);
        }
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
