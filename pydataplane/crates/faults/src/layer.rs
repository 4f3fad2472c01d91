//! What the bdevs of this crate have in common: a name of their own, and all else of their base.

use bdev::{Bdev, Claim, Registry, RegistryError, Stats};
use std::sync::Arc;
use uuid::Uuid;

/// A bdev's own part. It has its base for itself.
pub struct Layer {
    pub(crate) name: String,
    pub(crate) uuid: Uuid,
    pub(crate) stats: Arc<Stats>,
    base: Claim,
}

impl Layer {
    /// That of the bdev `name`, of the kind `kind` to people, on `base` (by name, alias or UUID).
    ///
    /// # Errors
    /// There is no such base, or somebody has it.
    pub(crate) fn new(
        registry: &Registry,
        kind: &str,
        name: String,
        base: &str,
        uuid: Option<Uuid>,
    ) -> Result<Layer, RegistryError> {
        let base = registry.claim(base, &format!("{kind} bdev {name}"))?;
        let uuid = uuid.unwrap_or_else(Uuid::new_v4);
        Ok(Layer { name, uuid, stats: Stats::new(), base })
    }

    /// The bdev below.
    #[inline]
    pub fn base(&self) -> &Arc<dyn Bdev> {
        self.base.bdev()
    }
}

/// The part of [`Bdev`] that is the base's or the layer's.
macro_rules! shows_its_base {
    ($product:expr) => {
        fn name(&self) -> &str {
            &self.layer().name
        }
        fn aliases(&self) -> Vec<String> {
            Vec::new()
        }
        fn uuid(&self) -> uuid::Uuid {
            self.layer().uuid
        }
        fn product_name(&self) -> &'static str {
            $product
        }
        fn geometry(&self) -> bdev::Geometry {
            self.layer().base().geometry()
        }
        fn features(&self) -> bdev::Features {
            self.layer().base().features()
        }
        fn stats(&self) -> Option<&std::sync::Arc<bdev::Stats>> {
            Some(&self.layer().stats)
        }
        fn flush_latch(&self) -> Option<&bdev::FlushLatch> {
            self.layer().base().flush_latch()
        }
        fn sparse(&self) -> Option<&dyn bdev::Sparse> {
            self.layer().base().sparse()
        }
        fn below(&self) -> Option<&str> {
            Some(self.layer().base().name())
        }
    };
}
pub(crate) use shows_its_base;
