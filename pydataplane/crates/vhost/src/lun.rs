//! A target of a controller: its volume, its logical unit 0 and what was done with it.

use std::sync::Arc;

use bdev::{Claim, OpenError};
use reactor::Cx;
use scsi::{Lun, LunShared, Nexus};

use crate::poller::Unit;
use crate::stats::{LunCounters, LunStats};

/// How a volume is shown to the guest.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct TargetOptions {
    /// Serial number; `None`: the volume's UUID.
    pub serial: Option<String>,
    /// Writes are refused.
    pub read_only: bool,
    /// Other controllers may show the same volume, if they ask for it too.
    pub shareable: bool,
}

/// A target with its logical unit 0.
pub(crate) struct Target {
    pub(crate) number: u8,
    pub(crate) shared: Arc<LunShared>,
    pub(crate) options: TargetOptions,
    /// Being removed.
    pub(crate) leaving: bool,
    /// One for each reactor of the controller.
    pub(crate) counters: Vec<Arc<LunCounters>>,
    /// Keeps the volume; dropped last.
    pub(crate) claim: Claim,
}

impl Target {
    /// Name of the volume.
    pub(crate) fn bdev_name(&self) -> &str {
        self.claim.bdev().name()
    }

    /// What the guest did with it.
    pub(crate) fn stats(&self) -> LunStats {
        let mut stats = LunStats::default();
        self.counters.iter().for_each(|c| stats.add(c));
        stats
    }
}

/// Opens the logical unit on the reactor of `cx`, for the session `nexus`.
pub(crate) fn open(
    cx: &Cx,
    shared: &Arc<LunShared>,
    nexus: Arc<Nexus>,
    counters: Arc<LunCounters>,
) -> Result<Unit, OpenError> {
    let channel = shared.bdev().open(cx.io())?;
    Ok(Unit::new(Lun::new(Arc::clone(shared), nexus, channel), counters))
}
