//! The bdev face of an lvol.

use crate::channel::LvolChannel;
use crate::meta::Meta;
use crate::volume::Volume;
use bdev::{
    Bdev, Channel, Features, FlushLatch, Geometry, OpenError, Protection, ProtectionType, Run,
    Sharing, Sparse, Stats,
};
use crypto::Key;
use protection::{Area, Keepers};
use reactor::{Ask, IoContext};
use serde_json::{Value, json};
use std::io;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use uuid::Uuid;

/// The bdev of a volume, as the registry holds it.
pub(crate) struct Lvol {
    pub volume: Arc<Volume>,
    /// What its data is encrypted with; without, its blocks are shown as they lie.
    key: Option<Arc<Key>>,
    /// The protection information that it keeps itself; without, its clusters are shown as they lie.
    area: Option<Area>,
    /// What its channels do.
    stats: Arc<Stats>,
    /// By which its metadata thread is asked for what no channel asks for; without, it lies below another one.
    ask: Option<Ask<Meta>>,
}

impl Lvol {
    /// One whose maps of protection information, if it keeps that, are kept by a thread of `keepers`; `ask`: its metadata
    /// thread.
    ///
    /// # Errors
    /// There is no such thread.
    pub fn new(
        volume: Arc<Volume>,
        key: Option<Arc<Key>>,
        ask: Ask<Meta>,
        keepers: impl FnOnce() -> io::Result<Arc<Keepers>>,
    ) -> io::Result<Self> {
        let area = match volume.id.dif {
            None => None,
            Some((kind, layout)) => {
                let below = Arc::new(Lvol::below(volume.clone(), key.clone()));
                Some(Area::new(&keepers()?, below, layout, kind))
            }
        };
        Ok(Lvol { area, key, stats: volume.stats.clone(), volume, ask: Some(ask) })
    }

    /// What lies below its protection information, or below its encryption, which is counted there.
    fn below(volume: Arc<Volume>, key: Option<Arc<Key>>) -> Self {
        Lvol { volume, key, area: None, stats: Stats::new(), ask: None }
    }

    /// By which its metadata thread is asked.
    pub fn ask(&self) -> Option<&Ask<Meta>> {
        self.ask.as_ref()
    }

    /// The protection information that it keeps itself.
    pub fn area(&self) -> Option<&Area> {
        self.area.as_ref()
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
        self.area.as_ref().map_or_else(|| self.volume.geometry(), Area::geometry)
    }

    fn features(&self) -> Features {
        self.area.as_ref().map_or_else(|| self.volume.features(), Area::features)
    }

    fn open(&self, io: &IoContext) -> Result<Box<dyn Channel>, OpenError> {
        let volume = &self.volume;
        if let Some(area) = &self.area {
            return area.open(&self.stats, io);
        }
        if let Some(key) = &self.key {
            let as_it_lies: Arc<dyn Bdev> = Arc::new(Lvol::below(volume.clone(), None));
            return crypto::open(&as_it_lies, key, &self.stats, io);
        }
        let base = volume.base.open(io)?;
        Ok(Box::new(LvolChannel::new(volume.clone(), base, &self.stats, io)))
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
        if let Some((kind, _)) = v.id.dif {
            lvol["dif_type"] = json!(if kind == ProtectionType::Type1 { 1 } else { 3 });
        }
        if !clones.is_empty() {
            lvol["clones"] = json!(clones);
        }
        json!({ "lvol": lvol })
    }

    fn stats(&self) -> Option<&Arc<Stats>> {
        Some(&self.stats)
    }

    fn flush_latch(&self) -> Option<&FlushLatch> {
        self.volume.base.flush_latch()
    }

    fn sparse(&self) -> Option<&dyn Sparse> {
        match self.area {
            Some(_) => Some(self),
            None => Some(&*self.volume),
        }
    }

    fn sharing(&self) -> Option<&dyn Sharing> {
        self.ask.as_ref().map(|_| self as &dyn Sharing)
    }

    fn protection(&self) -> Option<Protection> {
        match &self.area {
            Some(area) => {
                Some(Protection { kind: area.kind(), interleaved: false, at_head: false })
            }
            None => self.volume.protection(),
        }
    }
}

/// Of one that keeps its own protection information.
impl Sparse for Lvol {
    fn run(&self, lba: u64) -> Run {
        self.area.as_ref().map_or_else(|| self.volume.run(lba), |area| area.run(lba))
    }

    fn allocated_bytes(&self) -> u64 {
        self.volume.allocated_bytes().min(self.geometry().bytes())
    }

    fn free_bytes(&self) -> Option<u64> {
        self.volume.free_bytes()
    }
}
