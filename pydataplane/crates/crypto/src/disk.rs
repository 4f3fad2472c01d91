//! The bdev: what it is of, and what becomes of it when its base changes.

use crate::channel::CryptoChannel;
use crate::xts::Xts;
use crate::{Key, KeyError};
use bdev::{
    Bdev, Channel, Claim, Event, Features, FlushLatch, Geometry, OpenError, Registry,
    RegistryError, Sparse, Stats, Subscription,
};
use reactor::IoContext;
use serde_json::{Value, json};
use std::sync::Arc;
use uuid::{Uuid, uuid};

/// What [`Bdev::product_name`] says, as SPDK's.
pub const PRODUCT: &str = "crypto";

/// The namespace (RFC 9562, 5.5) of UUIDs, which are made of that of the base: SPDK's, so that a bdev is
/// known by the same UUID there.
const NAMESPACE: Uuid = uuid!("078e3cf7-f4b4-4545-b2c3-d40045a64ae2");

/// Why there is no encrypted bdev.
#[derive(Debug, thiserror::Error)]
pub enum CreateError {
    /// Of the base bdev.
    #[error(transparent)]
    Registry(#[from] RegistryError),
    /// Of the key.
    #[error(transparent)]
    Key(#[from] KeyError),
}

/// A bdev whose blocks lie encrypted on another, its base, which it has for itself. It has the size, the
/// blocks and the abilities of its base, and nothing on it but data.
pub struct Crypto(Arc<Inner>);

struct Inner {
    name: String,
    uuid: Uuid,
    base: Claim,
    key: Arc<Key>,
    stats: Arc<Stats>,
}

impl Inner {
    #[inline]
    pub fn base(&self) -> &Arc<dyn Bdev> {
        self.base.bdev()
    }
}

impl Crypto {
    /// The bdev `name` on the bdev `base`, by name, alias or UUID; not registered yet.
    ///
    /// # Errors
    /// There is no such base, or somebody has it; the library does not take the key.
    pub fn create(
        registry: &Registry,
        name: &str,
        base: &str,
        key: Arc<Key>,
    ) -> Result<Arc<Crypto>, CreateError> {
        let base = registry.claim(base, &format!("crypto bdev {name}"))?;
        let block = base.bdev().geometry().block_size as usize;
        Xts::new(&key, block).map_err(|e| key.library(&e))?;
        let uuid = Uuid::new_v5(&NAMESPACE, base.bdev().uuid().as_bytes());
        let (name, stats) = (name.to_owned(), Stats::new());
        Ok(Arc::new(Crypto(Arc::new(Inner { name, uuid, base, key, stats }))))
    }

    /// The bdev that its data lies on.
    pub fn base(&self) -> &Arc<dyn Bdev> {
        self.0.base()
    }

    /// Its key.
    pub fn key(&self) -> &Arc<Key> {
        &self.0.key
    }

    /// All that are registered, in the order of registration.
    pub fn all(registry: &Registry) -> Vec<Arc<Crypto>> {
        let ours = registry.list().into_iter().filter(|bdev| bdev.product_name() == PRODUCT);
        ours.filter_map(|bdev| registry.get_as(bdev.name())).collect()
    }

    /// The one on that bdev, by the bdev's name.
    pub fn on(registry: &Registry, base: &str) -> Option<Arc<Crypto>> {
        registry.get_as(registry.above(base)?.name())
    }

    /// Has encrypted bdevs follow their bases until the subscription is dropped: the size, and the end of
    /// one whose base is taken away by somebody who knows nothing of it.
    pub fn follow(registry: &Registry) -> Subscription {
        let known = registry.clone();
        registry.subscribe(move |event| match event {
            Event::Resized(base) => {
                if let Some(crypto) = Crypto::on(&known, base.name()) {
                    known.notify_resized(crypto.name());
                }
            }
            Event::Removed(base) => {
                if let Some(crypto) = Crypto::on(&known, base.name()) {
                    known.unregister_beside(crypto.name());
                }
            }
            Event::Registered(_) | Event::Space { .. } => {}
        })
    }
}

/// Opens a queue pair on `disk` that shows its blocks decrypted with `key`, and encrypts what is written;
/// `stats` counts what it does.
///
/// # Errors
/// `disk` cannot be opened, or the library does not take the key.
pub fn open(
    disk: &Arc<dyn Bdev>,
    key: &Arc<Key>,
    stats: &Arc<Stats>,
    io: &IoContext,
) -> Result<Box<dyn Channel>, OpenError> {
    let base = disk.open(io)?;
    let xts = Xts::new(key, disk.geometry().block_size as usize).map_err(|e| OpenError {
        name: disk.name().to_owned(),
        why: key.library(&e).to_string(),
    })?;
    let with = (xts, key.clone());
    Ok(Box::new(CryptoChannel::new(disk.clone(), base, with, stats, io.waker())))
}

impl Bdev for Crypto {
    fn name(&self) -> &str {
        &self.0.name
    }

    fn aliases(&self) -> Vec<String> {
        Vec::new()
    }

    fn uuid(&self) -> Uuid {
        self.0.uuid
    }

    fn product_name(&self) -> &'static str {
        PRODUCT
    }

    fn geometry(&self) -> Geometry {
        self.base().geometry()
    }

    fn features(&self) -> Features {
        self.base().features()
    }

    fn open(&self, io: &IoContext) -> Result<Box<dyn Channel>, OpenError> {
        open(self.base(), self.key(), &self.0.stats, io)
    }

    fn driver_specific(&self) -> Value {
        json!({"crypto": {
            "base_bdev_name": self.base().name(),
            "name": self.0.name,
            "key_name": self.key().name(),
        }})
    }

    fn stats(&self) -> Option<&Arc<Stats>> {
        Some(&self.0.stats)
    }

    /// A block of zeros on the base reads as zeros, and so does what the base has not.
    fn sparse(&self) -> Option<&dyn Sparse> {
        self.0.base().sparse()
    }

    fn below(&self) -> Option<&str> {
        Some(self.0.base().name())
    }

    fn flush_latch(&self) -> Option<&FlushLatch> {
        self.base().flush_latch()
    }
}
