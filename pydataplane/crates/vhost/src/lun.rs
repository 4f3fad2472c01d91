//! A target of a controller: its volume, its logical unit 0 and what was done with it.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{SystemTime, UNIX_EPOCH};

use bdev::{Bdev, Claim};
use parking_lot::Mutex;
use scsi::{Characteristics, ErrorPolicy, LunShared};

use crate::stats::{LunCounters, LunStats, LunTotals};

/// How a volume is shown to the guest.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct TargetOptions {
    /// Serial number; `None`: the volume's UUID.
    pub serial: Option<String>,
    /// Writes are refused.
    pub read_only: bool,
    /// Other controllers may show the same volume, if they ask for it too.
    pub shareable: bool,
    /// The guest sees a removable disk, and can prevent its removal.
    pub removable: bool,
    /// Bytes of a logical block; `None`: the volume's.
    pub block_size: Option<u32>,
    /// What the disk says of itself otherwise.
    pub characteristics: Characteristics,
    /// What becomes of requests whose I/O fails.
    pub error_policy: ErrorPolicy,
}

/// A moment, in seconds since the epoch.
pub(crate) type Moment = f64;

/// When a target came, and when the guest was told of it; each by the clock of the host.
pub(crate) struct Times {
    attached: Moment,
    /// Bits of a [`Moment`]; 0: not yet.
    event: AtomicU64,
    resize_event: AtomicU64,
}

fn now() -> Moment {
    SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default().as_secs_f64()
}

fn moment(bits: &AtomicU64) -> Option<Moment> {
    Some(f64::from_bits(bits.load(Ordering::Relaxed))).filter(|at| *at != 0.0)
}

impl Times {
    /// Of a target that comes now.
    pub(crate) fn new() -> Arc<Self> {
        let times = Times { attached: now(), event: 0.into(), resize_event: 0.into() };
        Arc::new(times)
    }

    /// Of a target that came in another process.
    pub(crate) fn restored(
        attached: Moment,
        event: Option<Moment>,
        resize: Option<Moment>,
    ) -> Self {
        let bits = |moment: Option<Moment>| moment.map_or(0, f64::to_bits).into();
        Times { attached, event: bits(event), resize_event: bits(resize) }
    }

    /// A new session: nothing was told yet.
    pub(crate) fn begin(&self) {
        self.event.store(0, Ordering::Relaxed);
        self.resize_event.store(0, Ordering::Relaxed);
    }

    /// The guest was told that the target came, now.
    pub(crate) fn told(&self) {
        self.event.store(now().to_bits(), Ordering::Relaxed);
    }

    /// The guest was told that its size changed, now.
    pub(crate) fn told_of_resize(&self) {
        self.resize_event.store(now().to_bits(), Ordering::Relaxed);
    }

    /// When it was put in place.
    pub(crate) fn attached_at(&self) -> Moment {
        self.attached
    }

    /// When the event that it came was put into the ring of the present session.
    pub(crate) fn event_at(&self) -> Option<Moment> {
        moment(&self.event)
    }

    /// When the last event that its size changed was.
    pub(crate) fn resize_event_at(&self) -> Option<Moment> {
        moment(&self.resize_event)
    }
}

/// Requests of a target wait because an I/O failed.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Suspension {
    /// How it failed.
    pub error: bdev::IoError,
    /// When, in seconds since the epoch.
    pub since: f64,
}

impl Suspension {
    /// That begins now.
    pub(crate) fn new(error: bdev::IoError) -> Self {
        Suspension { error, since: now() }
    }
}

/// What a target is to go on with.
pub(crate) struct Replacement {
    pub(crate) number: u8,
    /// What it is on now; one that is on another bdev stays there.
    pub(crate) on: Arc<dyn Bdev>,
    /// The unit, of a bdev that shows the same data at the moment of the change.
    pub(crate) shared: Arc<LunShared>,
    /// What it belongs to from then on; `None`: to what it belongs to now.
    pub(crate) volume: Option<(Claim, TargetOptions)>,
    /// Called when nothing of the guest is in flight, before it goes on: an error leaves all as it is.
    pub(crate) between: Between,
}

/// What is to be done while a target has nothing in flight; an error is a clause.
pub type Between = Box<dyn FnOnce() -> Result<(), String> + Send>;

/// A target with its logical unit 0.
pub(crate) struct Target {
    pub(crate) number: u8,
    pub(crate) shared: Arc<LunShared>,
    pub(crate) options: TargetOptions,
    pub(crate) times: Arc<Times>,
    /// Being removed.
    pub(crate) leaving: bool,
    /// What the session that goes on here knows of it, until it has come.
    pub(crate) inherited: Mutex<Option<scsi::NexusState>>,
    /// Since when its requests wait, and for what.
    pub(crate) suspended: Mutex<Option<Suspension>>,
    /// One for each reactor of the controller.
    pub(crate) counters: Vec<Arc<LunCounters>>,
    /// What they were when the process came that the controller belongs to.
    pub(crate) counted_before: Mutex<LunTotals>,
    /// Keeps the volume; dropped last.
    pub(crate) claim: Claim,
}

impl Target {
    /// Name of the volume.
    pub(crate) fn bdev_name(&self) -> &str {
        self.claim.bdev().name()
    }

    /// What the session that goes on here knows of it, until [`Target::forget_inherited`].
    pub(crate) fn inherited(&self) -> Option<scsi::NexusState> {
        *self.inherited.lock()
    }

    /// The next session begins anew.
    pub(crate) fn forget_inherited(&self) {
        *self.inherited.lock() = None;
    }

    /// The session that was to go on here does not: the next one has nothing of it.
    pub(crate) fn begin_anew(&self) {
        self.forget_inherited();
        *self.suspended.lock() = None;
    }

    /// Since when its requests wait, and for what.
    pub(crate) fn suspended(&self) -> Option<Suspension> {
        *self.suspended.lock()
    }

    /// The controller belongs to another process: what that one does is counted from 0.
    pub(crate) fn count_anew(&self) {
        *self.counted_before.lock() = self.counters.iter().map(Arc::as_ref).collect();
    }

    /// What the guest did with it.
    pub(crate) fn stats(&self) -> LunStats {
        self.totals().into()
    }

    /// The same, for a process that goes on with it.
    pub(crate) fn totals(&self) -> LunTotals {
        // Locked first: what is subtracted is never more than what was counted.
        let before = self.counted_before.lock();
        let now: LunTotals = self.counters.iter().map(Arc::as_ref).collect();
        now.since(&before)
    }
}
