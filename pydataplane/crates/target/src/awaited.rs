//! Keys that came, and what waits for one.

use bdev::{Claim, Registry};
use parking_lot::Mutex;
use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

/// What is waited for with keys. Cheap to clone; every clone is the same.
#[derive(Clone, Default)]
pub struct Awaited(Arc<Inner>);

#[derive(Default)]
struct Inner {
    /// Keys that came since the last change was recorded.
    given: Mutex<BTreeSet<String>>,
    /// Controllers that are not started, as a target of theirs waits for its key: their guests wait, too.
    held: Mutex<BTreeSet<String>>,
    /// By encrypted bdev that waits for its key: its base, so that nobody takes what is on that for
    /// data, or writes over it.
    reserved: Mutex<BTreeMap<String, Claim>>,
}

impl Awaited {
    /// A key came.
    pub fn note_key(&self, key: &str) {
        self.0.given.lock().insert(key.to_owned());
    }

    /// The keys that came since this was called last.
    pub fn take_keys(&self) -> BTreeSet<String> {
        std::mem::take(&mut *self.0.given.lock())
    }

    /// A controller is to be started when its targets have their keys; whether that is new.
    pub fn hold(&self, ctrlr: &str) -> bool {
        self.0.held.lock().insert(ctrlr.to_owned())
    }

    /// The controllers that are to be started then.
    pub fn held(&self) -> BTreeSet<String> {
        self.0.held.lock().clone()
    }

    /// A controller is started, or gone.
    pub fn let_start(&self, ctrlr: &str) {
        self.0.held.lock().remove(ctrlr);
    }

    /// The encrypted bdev `name` waits for `key`: nobody may have its `base` meanwhile, if that is there and
    /// free.
    pub fn reserve(&self, registry: &Registry, name: &str, base: &str, key: &str) {
        let owner = format!("crypto bdev {name}, which waits for its key {key}");
        match registry.claim(base, &owner) {
            Ok(claim) => _ = self.0.reserved.lock().insert(name.to_owned(), claim),
            Err(e) => tracing::warn!("crypto bdev {name} waits for its key {key}: {e}"),
        }
    }

    /// The encrypted bdev `name` does not wait any more.
    pub fn release(&self, name: &str) {
        let claim = self.0.reserved.lock().remove(name);
        drop(claim);
    }

    /// A bdev is taken away: who waits for a key on it lets go.
    pub fn release_base(&self, base: &str) {
        let mut let_go = Vec::new();
        {
            let mut reserved = self.0.reserved.lock();
            let of_it = |(name, claim): (&String, &Claim)| {
                (claim.bdev().name() == base).then(|| name.clone())
            };
            let names: Vec<_> = reserved.iter().filter_map(of_it).collect();
            let_go.extend(names.iter().filter_map(|name| reserved.remove(name)));
        }
        // Not under the lock: who waits for the claims' end may look at them.
        drop(let_go);
    }
}
