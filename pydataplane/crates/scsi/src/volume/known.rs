//! What was kept of a volume's reservations and cannot be read (SPC-4 5.13.5.2, 5.13.5.3): it is read again, or an
//! initiator replaces it. Until then its units take no command that a reservation could keep from them.

use super::{Reserved, Volume, waiting};
use crate::aside;
use crate::reservations::{Access, Keeping, NotKnown, Order, Reservations, refused};
use crate::response::{Fail, Status};
use crate::sense::{Code, Sense};
use std::sync::Arc;
use std::time::{Duration, Instant};

/// What could not be read is tried again after so long.
const AGAIN: Duration = Duration::from_millis(200);

/// That it is not known.
pub(super) struct Unknown {
    why: NotKnown,
    /// When it was read last; `None`: it is being read.
    read: Option<Instant>,
    /// The change that replaces it, which is not saved yet.
    replacing: Option<u64>,
}

impl Unknown {
    pub(super) fn new(why: NotKnown) -> Self {
        Unknown { why, read: Some(Instant::now()), replacing: None }
    }

    /// Whether it is to be read again.
    fn is_due(&self) -> bool {
        self.replacing.is_none() && self.read.is_some_and(|at| at.elapsed() >= AGAIN)
    }

    /// What any nexus may do.
    pub(super) fn access(&self) -> Access {
        match self.why {
            NotKnown::Unread => Access::Unread,
            NotKnown::Lost => Access::Lost,
        }
    }
}

impl Volume {
    /// A session begins: takes what is kept, if that was not read since this program serves the volume, or is not
    /// known. A program that takes over from another has read it while that one still served. What is known stays
    /// so, and is kept anew where somebody has spoiled it. For control threads.
    pub(crate) fn reload(self: &Arc<Self>) {
        let Some(keeping) = &self.keeping else { return };
        if !self.read(keeping, true) {
            self.mend(keeping);
        }
    }

    /// Nobody asks: what is not known is read again. Before a session has begun it is not taken for what no other
    /// program can change any more, as one may still serve. For threads that may wait.
    pub(super) fn read_unknown(self: &Arc<Self>) {
        if let Some(keeping) = self.keeping.as_ref().filter(|_| self.is_unknown()) {
            self.read(keeping, false);
        }
    }

    /// Takes what is kept, `false`: that does not count any more. Read since a session has begun, as one does if
    /// `begins`, it settles the matter.
    fn read(self: &Arc<Self>, keeping: &Keeping, begins: bool) -> bool {
        // Who reads first takes first.
        let reading = self.reading.lock();
        let (is_as_kept, settles) = {
            let mut reserved = self.reserved.lock();
            reserved.is_served |= begins;
            (reserved.is_as_kept(), reserved.is_served)
        };
        let Some(changes) = is_as_kept else { return false };
        // Read before the lock is taken, which nobody holds for I/O.
        let kept = keeping.kept();
        let mut reserved = self.reserved.lock();
        if reserved.is_as_kept() == Some(changes) {
            reserved.settled |= settles && kept.is_ok();
            let was_known = reserved.unknown.is_none();
            reserved.take(kept);
            reserved.tell_access();
            let is_known = reserved.unknown.is_none();
            drop((reserved, reading));
            match is_known {
                true if was_known => {}
                true => self.tell_known(),
                false => waiting::reads_until_known(self),
            }
        } else if let Some(unknown) = &mut reserved.unknown {
            unknown.read = Some(Instant::now());
        }
        true
    }

    /// It is known now what was not: who could not ask the disk for what it needs asks again. No lock is held.
    fn tell_known(&self) {
        self.units().iter().for_each(|unit| unit.can_be_asked_again());
    }

    /// Whether it is not known what is kept.
    pub(super) fn is_unknown(&self) -> bool {
        self.reserved.lock().unknown.is_some()
    }

    /// Whether it was not known at some time since this program has it.
    pub(crate) fn was_unknown(&self) -> bool {
        self.reserved.lock().was_unknown
    }

    fn mend(&self, keeping: &Keeping) {
        if self.reserved.lock().unknown.is_none() {
            keeping.mend(|| {
                let reserved = self.reserved.lock();
                (reserved.changes, reserved.reservations.clone())
            });
        }
    }

    /// A nexus with `access` was refused: what is not known is read again, by a thread of its own.
    pub(crate) fn read_again(self: &Arc<Self>, access: Access) {
        if !matches!(access, Access::Unread | Access::Lost) {
            return;
        }
        let set_read = |is_due: fn(&Unknown) -> bool, read| {
            let mut reserved = self.reserved.lock();
            let due = reserved.unknown.iter_mut().find(|unknown| is_due(unknown));
            due.map(|unknown| unknown.read = read).is_some()
        };
        let volume = Arc::clone(self);
        // Nobody else begins before that is over.
        if set_read(Unknown::is_due, None) && !aside::run("reservations", move || volume.reload()) {
            set_read(|_| true, Some(Instant::now()));
        }
    }

    /// All changes up to that one are saved, or could not be: what is lost is replaced only by what is saved.
    pub(super) fn saved(&self, change: u64, is_saved: bool) {
        let mut reserved = self.reserved.lock();
        let Some(unknown) = &mut reserved.unknown else { return };
        if unknown.replacing.is_none_or(|replacing| replacing > change) {
            return;
        }
        let again = Unknown::new(unknown.why);
        if is_saved {
            reserved.unknown = None;
        } else {
            reserved.unknown = Some(again);
            reserved.reservations = Reservations::default();
        }
        reserved.tell_access();
        drop(reserved);
        if is_saved {
            self.tell_known();
        }
    }
}

impl Reserved {
    /// How many changes there are, if what is kept counts: it is not known, or may be another program's that served
    /// until now.
    fn is_as_kept(&self) -> Option<u64> {
        let is_as_kept = match &self.unknown {
            None => self.changes == 0 && !self.settled,
            Some(unknown) => unknown.replacing.is_none(),
        };
        is_as_kept.then_some(self.changes)
    }

    /// Takes what was read.
    pub(super) fn take(&mut self, kept: Result<Reservations, NotKnown>) {
        match kept {
            Ok(kept) => {
                let reserved = self.reservations.reserved.take();
                self.reservations = Reservations { reserved, ..kept };
                self.unknown = None;
            }
            Err(why) => {
                self.unknown = Some(Unknown::new(why));
                self.was_unknown = true;
            }
        }
    }

    /// Whether the order is for now; `None`: one of RESERVE(6) or RELEASE(6).
    ///
    /// # Errors
    /// Of what is not known nothing is changed. REPLACE LOST RESERVATION is for what is lost, else it ends as INVALID
    /// RELEASE OF PERSISTENT RESERVATION (SPC-4 5.13.11.3); BUSY while another nexus' is being saved.
    pub(super) fn check_order(&self, order: Option<&Order>) -> Result<(), Fail> {
        let replaces = matches!(order, Some(Order::Replace { .. }));
        match (&self.unknown, replaces) {
            (None, false) => Ok(()),
            (None, true) => {
                Err(Sense::illegal(Code::INVALID_RELEASE_OF_PERSISTENT_RESERVATION).into())
            }
            (Some(Unknown { why: NotKnown::Lost, replacing, .. }), true) => match replacing {
                None => Ok(()),
                Some(_) => Err(Fail::Bare(Status::Busy)),
            },
            (Some(unknown), _) => Err(refused(unknown.access())),
        }
    }

    /// The last change replaces what is lost, once it is saved.
    pub(super) fn replace_lost(&mut self) {
        let change = self.changes;
        self.unknown.iter_mut().for_each(|unknown| unknown.replacing = Some(change));
    }
}
