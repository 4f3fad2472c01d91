//! The bdev face of an lvol.

use crate::channel::LvolChannel;
use crate::volume::Volume;
use bdev::{Bdev, Channel, Features, FlushLatch, Geometry, OpenError, Stats};
use reactor::IoContext;
use serde_json::{Value, json};
use std::sync::Arc;
use std::sync::atomic::Ordering;
use uuid::Uuid;

/// The bdev of a volume, as the registry holds it.
pub(crate) struct Lvol(pub Arc<Volume>);

impl Bdev for Lvol {
    fn name(&self) -> &str {
        &self.0.name
    }

    fn aliases(&self) -> Vec<String> {
        vec![self.0.alias()]
    }

    fn uuid(&self) -> Uuid {
        self.0.id.uuid
    }

    fn product_name(&self) -> &'static str {
        "Logical Volume"
    }

    fn geometry(&self) -> Geometry {
        self.0.geometry()
    }

    fn features(&self) -> Features {
        self.0.features()
    }

    fn open(&self, io: &IoContext) -> Result<Box<dyn Channel>, OpenError> {
        let base = self.0.base.open(io)?;
        Ok(Box::new(LvolChannel::new(self.0.clone(), base, io)))
    }

    fn driver_specific(&self) -> Value {
        let v = &self.0;
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
        if !clones.is_empty() {
            lvol["clones"] = json!(clones);
        }
        json!({ "lvol": lvol })
    }

    fn stats(&self) -> Option<&Arc<Stats>> {
        Some(&self.0.stats)
    }

    fn flush_latch(&self) -> Option<&FlushLatch> {
        self.0.base.flush_latch()
    }
}
