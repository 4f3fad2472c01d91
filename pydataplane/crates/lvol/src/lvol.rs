//! The bdev face of an lvol.

use crate::channel::LvolChannel;
use crate::volume::Volume;
use bdev::{Bdev, Channel, Features, FlushLatch, Geometry, OpenError, Protection, Sparse, Stats};
use crypto::Key;
use reactor::IoContext;
use serde_json::{Value, json};
use std::sync::Arc;
use std::sync::atomic::Ordering;
use uuid::Uuid;

/// The bdev of a volume, as the registry holds it.
pub(crate) struct Lvol {
    pub volume: Arc<Volume>,
    /// What its data is encrypted with; without, its blocks are shown as they lie.
    key: Option<Arc<Key>>,
}

impl Lvol {
    pub fn new(volume: Arc<Volume>, key: Option<Arc<Key>>) -> Self {
        Lvol { volume, key }
    }
}

impl Bdev for Lvol {
    fn name(&self) -> &str {
        &self.volume.name
    }

    fn aliases(&self) -> Vec<String> {
        vec![self.volume.alias()]
    }

    fn uuid(&self) -> Uuid {
        self.volume.id.uuid
    }

    fn product_name(&self) -> &'static str {
        "Logical Volume"
    }

    fn geometry(&self) -> Geometry {
        self.volume.geometry()
    }

    fn features(&self) -> Features {
        self.volume.features()
    }

    fn open(&self, io: &IoContext) -> Result<Box<dyn Channel>, OpenError> {
        let volume = &self.volume;
        if let Some(key) = &self.key {
            // What lies below is counted there.
            let as_it_lies: Arc<dyn Bdev> = Arc::new(Lvol::new(volume.clone(), None));
            return crypto::open(&as_it_lies, key, &volume.stats, io);
        }
        let stats = match volume.id.encryption {
            Some(_) => &Stats::new(),
            None => &volume.stats,
        };
        let base = volume.base.open(io)?;
        Ok(Box::new(LvolChannel::new(volume.clone(), base, stats, io)))
    }

    fn driver_specific(&self) -> Value {
        let v = &self.volume;
        let (thin, snapshot, parent, external) =
            v.kin(|kin| (kin.thin, kin.snapshot, kin.parent.clone(), kin.external.clone()));
        let mut lvol = json!({
            "lvol_store_uuid": v.id.lvstore,
            "base_bdev": v.base.name(),
            "thin_provision": thin,
            "num_allocated_clusters": v.allocated.load(Ordering::Relaxed),
            "snapshot": snapshot,
            "clone": parent.is_some(),
            "esnap_clone": external.is_some(),
        });
        if let Some(parent) = parent {
            lvol["base_snapshot"] = json!(parent.names().lvol);
        }
        if let Some(external) = external {
            lvol["external_snapshot_name"] = json!(external.uuid.to_string());
        }
        let mut clones: Vec<_> = v.clones().iter().map(|v| v.names().lvol).collect();
        clones.sort();
        if let Some(encryption) = &v.id.encryption {
            lvol["key_name"] = json!(encryption.key);
        }
        if !clones.is_empty() {
            lvol["clones"] = json!(clones);
        }
        json!({ "lvol": lvol })
    }

    fn stats(&self) -> Option<&Arc<Stats>> {
        Some(&self.volume.stats)
    }

    fn flush_latch(&self) -> Option<&FlushLatch> {
        self.volume.base.flush_latch()
    }

    fn sparse(&self) -> Option<&dyn Sparse> {
        Some(&*self.volume)
    }

    fn protection(&self) -> Option<Protection> {
        self.volume.protection()
    }
}
