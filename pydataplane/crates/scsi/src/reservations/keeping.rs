//! Reservations outlive the process: each change is saved before it is acknowledged. What is not to
//! survive a loss of power is kept as well, for the same boot of the host: to the initiators, which run on,
//! a restart of the target is none.

use super::Reservations;
use bdev::host_boot;
use parking_lot::Mutex;
use serde::{Deserialize, Serialize};
use std::io;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use uuid::Uuid;

/// What is kept of a volume: its reservations, and during which boot of the host they were made.
#[derive(Clone, Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct KeptReservations {
    reservations: Reservations,
    boot: Option<Uuid>,
}

impl KeptReservations {
    /// What counts of it now.
    fn counts(self) -> Option<Reservations> {
        let same_boot = self.boot.is_some() && self.boot == present_boot();
        (self.reservations.persist || same_boot).then_some(self.reservations)
    }

    /// Whether nobody has registered: nothing has to be kept.
    pub fn is_empty(&self) -> bool {
        self.reservations.registrants.is_empty()
    }
}

/// Why it is not known what was kept.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum NotKnown {
    /// It cannot be read for now.
    Unread,
    /// What is read cannot be understood: it is lost.
    Lost,
}

/// Where the reservations of volumes are kept.
pub trait ReservationKeeper: Send + Sync {
    /// Keeps those of a volume, durably, instead of what was kept of it. Called on a thread of its own.
    ///
    /// # Errors
    /// What was kept before may still be.
    fn keep(&self, volume: Uuid, kept: &KeptReservations) -> io::Result<()>;
    /// Those that were kept of a volume; `None`: none were. Called on threads that may wait, and again and again
    /// while it is not known.
    ///
    /// # Errors
    /// It is not known what was kept, of which the keeper has told once; commands that a reservation could keep from
    /// the volume are.
    fn kept(&self, volume: Uuid) -> Result<Option<KeptReservations>, NotKnown>;
    /// As `kept`, of a volume whose reservations are known whatever is kept: tells nobody.
    ///
    /// # Errors
    /// It is not known what is kept.
    fn look(&self, volume: Uuid) -> Result<Option<KeptReservations>, NotKnown>;
    /// What was kept of a volume is there no more, or is another's: it is about to be kept anew.
    fn tell_spoiled(&self, volume: Uuid);
}

fn present_boot() -> Option<Uuid> {
    host_boot().map(Uuid::from_u128)
}

/// How a change was saved.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Saved {
    NotYet,
    Yes,
    Failed,
}

/// Saves the changes of one volume.
pub(crate) struct Keeping {
    keeper: Arc<dyn ReservationKeeper>,
    volume: Uuid,
    /// One at a time, in order.
    turn: Mutex<()>,
    /// The last change that is saved, and the last that could not be.
    saved: AtomicU64,
    failed: AtomicU64,
}

impl Keeping {
    pub(crate) fn new(keeper: Arc<dyn ReservationKeeper>, volume: Uuid) -> Self {
        Keeping {
            keeper,
            volume,
            turn: Mutex::default(),
            saved: AtomicU64::default(),
            failed: AtomicU64::default(),
        }
    }

    /// What was kept and counts.
    ///
    /// # Errors
    /// It is not known.
    pub(crate) fn kept(&self) -> Result<Reservations, NotKnown> {
        let kept = self.keeper.kept(self.volume)?;
        Ok(kept.and_then(KeptReservations::counts).unwrap_or_default())
    }

    /// Saves what `now` returns, with the number of the change that it is of. `ended` has that number, and
    /// whether it is saved, before anybody else.
    pub(crate) fn save(
        &self,
        now: impl FnOnce() -> (u64, Reservations),
        ended: impl FnOnce(u64, bool),
    ) {
        let _turn = self.turn.lock();
        let (change, reservations) = now();
        if self.saved.load(Ordering::Acquire) >= change {
            return;
        }
        let kept =
            self.keeper.keep(self.volume, &KeptReservations { reservations, boot: present_boot() });
        ended(change, kept.is_ok());
        let told = if kept.is_ok() { &self.saved } else { &self.failed };
        told.store(change, Ordering::Release);
    }

    /// Keeps what `now` returns, with the number of the change that it is of, where that was saved and somebody
    /// has damaged, changed or removed it since. What cannot be read for now stays.
    pub(crate) fn mend(&self, now: impl FnOnce() -> (u64, Reservations)) {
        // Who has it is about to keep them all.
        let Some(_turn) = self.turn.try_lock() else { return };
        let (change, known) = now();
        if self.saved.load(Ordering::Acquire) != change {
            return;
        }
        let known = Reservations { reserved: None, ..known };
        let is_kept = match self.keeper.look(self.volume) {
            Ok(kept) => kept.and_then(KeptReservations::counts).unwrap_or_default() == known,
            Err(NotKnown::Unread) => true,
            Err(NotKnown::Lost) => false,
        };
        if !is_kept {
            self.keeper.tell_spoiled(self.volume);
            let anew = KeptReservations { reservations: known, boot: present_boot() };
            // The keeper tells where that fails; what is known counts.
            _ = self.keeper.keep(self.volume, &anew);
        }
    }

    /// Nobody saves that change.
    pub(crate) fn give_up(&self, change: u64) {
        self.failed.store(change, Ordering::Release);
    }

    /// What became of a change.
    pub(crate) fn became(&self, change: u64) -> Saved {
        match change {
            change if self.saved.load(Ordering::Acquire) >= change => Saved::Yes,
            change if self.failed.load(Ordering::Acquire) >= change => Saved::Failed,
            _ => Saved::NotYet,
        }
    }
}
