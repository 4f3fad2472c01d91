//! A volume as one that shares clusters with others of its lvstore: which copies that is possible for.
//!
//! Not where what is read depends on the place or the volume: of one that is encrypted, or has protection information,
//! its own or its bdev's (whose application tags a copy makes anew). Nor of a thick source, which has its
//! room for itself, and to a thick volume.

use crate::lvol::Lvol;
use crate::share::Clusters;
use crate::volume::Volume;
use bdev::{Bdev, IoError, Shared, Sharing};
use blobstore::SHARE_MAX;
use std::any::Any;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

/// How long the metadata thread may be busy with something else before the data is copied instead.
const WAIT: Duration = Duration::from_secs(1);

/// Whether all that depends on the place of a volume's blocks is the same elsewhere.
fn is_plain(volume: &Volume) -> bool {
    volume.id.encryption.is_none()
        && volume.id.dif.is_none()
        && volume.base.protection().is_none()
        && volume.kin(|kin| kin.thin)
}

/// The volume of a bdev, if it is of the same lvstore as `beside`.
fn volume_beside<'a>(bdev: &'a Arc<dyn Bdev>, beside: &Volume) -> Option<&'a Arc<Volume>> {
    let any: &dyn Any = &**bdev;
    let volume = &any.downcast_ref::<Lvol>()?.volume;
    Arc::ptr_eq(&volume.thread.gauges, &beside.thread.gauges).then_some(volume)
}

impl Sharing for Lvol {
    fn part(
        &self,
        from: &Arc<dyn Bdev>,
        from_lba: u64,
        lba: u64,
        blocks: u64,
    ) -> Option<(u64, u64)> {
        let to = &self.volume;
        if !to.thread.gauges.shares_clusters.load(Ordering::Relaxed) {
            return None;
        }
        let source = volume_beside(from, to)?;
        if !is_plain(source) || !is_plain(to) || to.is_read_only() {
            return None;
        }
        let same = Arc::ptr_eq(source, to);
        if same && from_lba < lba.saturating_add(blocks) && lba < from_lba.saturating_add(blocks) {
            return None;
        }
        let cluster = 1u64 << to.id.shift;
        if from_lba % cluster != lba % cluster {
            return None;
        }
        let before = lba.next_multiple_of(cluster) - lba;
        let whole = blocks.checked_sub(before)? / cluster * cluster;
        (whole > 0).then_some((before, whole))
    }

    fn share(
        &self,
        from: &Arc<dyn Bdev>,
        from_lba: u64,
        lba: u64,
        blocks: u64,
        still: Box<dyn FnOnce() -> bool + Send>,
    ) -> Result<Shared, IoError> {
        let (to, shift) = (&self.volume, self.volume.id.shift);
        let (Some((0, whole)), Some(ask)) = (self.part(from, from_lba, lba, blocks), self.ask())
        else {
            return Ok(Shared::Not);
        };
        let Some(source) = volume_beside(from, to) else { return Ok(Shared::Not) };
        let count = (whole >> shift).min(SHARE_MAX);
        let ours = |volume: &Arc<Volume>, lba: u64| -> Clusters { (volume.clone(), lba >> shift) };
        let (source, target) = (ours(source, from_lba), ours(to, lba));
        let shared = ask.call(WAIT, move |meta| {
            let shared = meta.share(&source, &target, count, still);
            meta.publish();
            shared
        });
        match shared {
            Ok(Ok(shared)) => Ok(shared),
            Ok(Err(e)) => {
                tracing::error!("{e}");
                Err(IoError::WriteMedium)
            }
            Err(_) => Ok(Shared::Not),
        }
    }
}
