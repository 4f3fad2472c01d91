//! Volumes of an lvstore whose parents are bdevs: made, and registered when their parents come.

use super::Lvs;
use super::history::{no_tuples_of_its_own, thin};
use crate::error::Error;
use crate::external::External;
use crate::info::{LvolInfo, NewLvol};
use crate::volume::Volume;
use bdev::Bdev;
use std::sync::Arc;
use std::time::Duration;
use uuid::Uuid;

impl Lvs {
    /// Creates a clone of a bdev.
    pub fn clone_bdev(&self, bdev: &str, new: &NewLvol) -> Result<LvolInfo, Error> {
        let op = format!("clone bdev {bdev}");
        let _turn = self.turn(&op)?;
        let options = self.options(&op, new)?;
        let (external, clusters) = self.parent(&op, bdev)?;
        let job = op.clone();
        let clone = self.meta_within(Duration::MAX, &op, move |meta| {
            let clone = meta.clone_external(&job, &external, clusters, &options);
            meta.keep_externals();
            clone
        })?;
        self.shown(&clone)
    }

    /// Gives a volume that nobody uses a bdev as its parent.
    pub fn set_parent_bdev(&self, volume: &Arc<Volume>, bdev: &str) -> Result<(), Error> {
        let op = format!("make bdev {bdev} the parent of lvol {}", volume.alias());
        let _turn = self.turn(&op)?;
        // What a guest reads must not change under it.
        self.unused(&op, std::slice::from_ref(volume))?;
        thin(&op, volume)?;
        no_tuples_of_its_own(&op, volume)?;
        if volume.id.encryption.is_some() {
            let why = "it is encrypted, and would read the bdev's data wrongly".to_owned();
            return Err(Error::BadParameter { op, why });
        }
        let (external, clusters) = self.parent(&op, bdev)?;
        let same = |of: &Arc<External>| of.uuid == external.uuid;
        if volume.kin(|kin| kin.external.as_ref().is_some_and(same)) {
            return Err(Error::AlreadyParent { op });
        }
        let (was, job) = (volume.is_degraded(), volume.clone());
        self.meta_within(Duration::MAX, &op.clone(), move |meta| {
            let set = meta.set_external_parent(&op, &job, &external, clusters);
            meta.keep_externals();
            set
        })?;
        self.register_whole(was)
    }

    /// Makes those volumes bdevs that are not because one was degraded, if it `was`.
    pub(super) fn register_whole(&self, was: bool) -> Result<(), Error> {
        for volume in if was { self.volumes() } else { Vec::new() } {
            if !volume.is_degraded() && self.registry.get(&volume.name).is_none() {
                self.register(&volume)?;
            }
        }
        Ok(())
    }

    /// A bdev that is to be a parent, held, and its size in clusters.
    fn parent(&self, op: &str, bdev: &str) -> Result<(Arc<External>, u64), Error> {
        let external = self.externals.hold(op, bdev);
        let checked = external.and_then(|external| {
            let gone = || Error::NoBdev { bdev: bdev.to_owned() };
            let geometry = external.bdev().ok_or_else(gone)?.geometry();
            let bytes = geometry.num_blocks * u64::from(geometry.block_size);
            let cluster = u64::from(self.info.cluster_size);
            if bytes == 0 || !bytes.is_multiple_of(cluster) {
                let why = format!(
                    "it has {bytes} bytes, which are not whole clusters of {cluster} bytes; give \
                     it another size"
                );
                return Err(Error::BadParameter { op: op.to_owned(), why });
            }
            Ok((external, bytes / cluster))
        });
        if checked.is_err() {
            let forget = |meta: &mut crate::meta::Meta| {
                meta.keep_externals();
                Ok(())
            };
            let _ = self.meta(op, forget);
        }
        checked
    }

    /// Whether an lvol has the bdev with this UUID as its parent, and that is missing.
    pub fn waits_for_external(&self, uuid: Uuid) -> bool {
        self.externals.has(uuid) && !self.externals.holds(uuid)
    }

    /// Whether such a bdev is held.
    pub fn holds_external(&self, uuid: Uuid) -> bool {
        self.externals.holds(uuid)
    }

    /// Takes up parents that were missing and are there now: the lvols that waited for them become
    /// bdevs.
    pub fn externals_come(&self) -> Result<(), Error> {
        if self.externals.is_empty() {
            return Ok(());
        }
        let _turn = self.turn("take up the parent of an lvol")?;
        let came = self.externals.come();
        self.register_whole(came)
    }

    /// Lets go of a bdev that is being removed. What it shows cannot be read until it comes again.
    pub fn external_leaves(&self, bdev: &Arc<dyn Bdev>) {
        if self.externals.leave(bdev) {
            let (name, lvstore) = (bdev.name(), self.name());
            tracing::warn!("bdev {name}, a parent of lvols of lvstore {lvstore}, is being removed");
        }
    }
}
