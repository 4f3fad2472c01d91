//! A logical unit as one initiator's session knows it: unit attentions that wait, and whether it
//! prevents the removal of the medium.

use crate::copy::Copies;
use crate::reservations::NexusName;
use crate::sense::{Code, Key, Sense};
use crate::volume::Volume;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering};
use std::time::{Duration, SystemTime};

/// A unit attention condition (SAM-5 5.14), in order of precedence.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u32)]
pub enum UnitAttention {
    /// 29h/00h POWER ON, RESET, OR BUS DEVICE RESET OCCURRED.
    Reset = 1,
    /// 3Fh/0Eh REPORTED LUNS DATA HAS CHANGED.
    LunsChanged = 2,
    /// 2Ah/09h CAPACITY DATA HAS CHANGED.
    CapacityChanged = 4,
    /// 3Fh/03h INQUIRY DATA HAS CHANGED.
    InquiryChanged = 8,
    /// 2Ah/03h RESERVATIONS PREEMPTED.
    ReservationsPreempted = 16,
    /// 2Ah/04h RESERVATIONS RELEASED.
    ReservationsReleased = 32,
    /// 2Ah/05h REGISTRATIONS PREEMPTED.
    RegistrationsPreempted = 64,
    /// 2Ah/01h MODE PARAMETERS CHANGED.
    ModeChanged = 128,
    /// 28h/00h NOT READY TO READY CHANGE, MEDIUM MAY HAVE CHANGED.
    MediumChanged = 256,
}

impl UnitAttention {
    const BY_PRECEDENCE: [UnitAttention; 9] = [
        UnitAttention::Reset,
        UnitAttention::MediumChanged,
        UnitAttention::LunsChanged,
        UnitAttention::CapacityChanged,
        UnitAttention::InquiryChanged,
        UnitAttention::ModeChanged,
        UnitAttention::ReservationsPreempted,
        UnitAttention::RegistrationsPreempted,
        UnitAttention::ReservationsReleased,
    ];

    fn sense(self) -> Sense {
        let code = match self {
            UnitAttention::Reset => Code::POWER_ON_OR_RESET,
            UnitAttention::LunsChanged => Code::REPORTED_LUNS_DATA_HAS_CHANGED,
            UnitAttention::CapacityChanged => Code::CAPACITY_DATA_HAS_CHANGED,
            UnitAttention::InquiryChanged => Code::INQUIRY_DATA_HAS_CHANGED,
            UnitAttention::ReservationsPreempted => Code::RESERVATIONS_PREEMPTED,
            UnitAttention::ReservationsReleased => Code::RESERVATIONS_RELEASED,
            UnitAttention::RegistrationsPreempted => Code::REGISTRATIONS_PREEMPTED,
            UnitAttention::MediumChanged => Code::MEDIUM_MAY_HAVE_CHANGED,
            UnitAttention::ModeChanged => Code::MODE_PARAMETERS_CHANGED,
        };
        Sense::new(Key::UnitAttention, code)
    }
}

/// One initiator session (I_T nexus) of a logical unit.
///
/// A removable unit has no unit attentions but that its medium was loaded, against SAM-5. Linux takes each one
/// from a removable unit as a changed medium (`scsi_io_completion_action`): it fails the command and drops what it
/// has cached, or, since 6.6, shuts the mounted file system down; so growth, a restart of the
/// target or a reset by the guest itself would take a mounted disk away from it (tests/guest has
/// all but the restart). Growth reaches the driver by the transport's event, and who resets knows.
pub struct Nexus {
    /// Bits of [`UnitAttention`].
    pending: AtomicU32,
    /// Whether it prevents the removal of the medium (SBC-3 4.11).
    prevents: AtomicBool,
    /// Those of the unit that do.
    preventers: Arc<Preventers>,
    /// First READ CAPACITY, in microseconds since the epoch; 0: not yet.
    seen_us: AtomicU64,
    /// What RESERVE(6) has reserved by its name is free when it ends.
    reserves: (Arc<Volume>, NexusName),
    /// Copies that it has begun, and that end with it.
    copies: Arc<Copies>,
}

impl Nexus {
    pub(crate) fn new(
        first: Option<UnitAttention>,
        preventers: Arc<Preventers>,
        reserves: (Arc<Volume>, NexusName),
        copies: Arc<Copies>,
    ) -> Self {
        Nexus {
            reserves,
            copies,
            pending: AtomicU32::new(first.map_or(0, |attention| attention as u32)),
            prevents: AtomicBool::new(false),
            preventers,
            seen_us: AtomicU64::new(0),
        }
    }

    pub(crate) fn post(&self, attention: UnitAttention) {
        self.pending.fetch_or(attention as u32, Ordering::Release);
    }

    /// The nexus prevents the removal of the medium from now on; `false`: it is decided that the
    /// unit goes.
    pub(crate) fn prevent(&self) -> bool {
        // Counted first: what was answered is counted, whatever other reactors do meanwhile.
        let counted = self.preventers.add();
        if counted && self.prevents.swap(true, Ordering::AcqRel) {
            self.preventers.sub();
        }
        counted
    }

    /// The initiator allows the removal, lost the nexus or started afresh: what it prevented is
    /// over (SBC-3 4.11).
    pub fn forget_prevention(&self) {
        if self.prevents.swap(false, Ordering::AcqRel) {
            self.preventers.sub();
        }
    }

    /// The nexus is lost, or starts afresh: what RESERVE(6) has reserved is free (SPC-2 5.5.1).
    pub(crate) fn forget_reserved(&self) {
        let (volume, name) = &self.reserves;
        volume.forget_reserved(Some(name));
    }

    /// The initiator looked how big the unit is: whoever scans does.
    #[cold]
    pub(crate) fn note_seen(&self) {
        if self.seen_us.load(Ordering::Relaxed) == 0 {
            let now = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).unwrap_or_default();
            let us = u64::try_from(now.as_micros()).unwrap_or(u64::MAX).max(1);
            _ = self.seen_us.compare_exchange(0, us, Ordering::Relaxed, Ordering::Relaxed);
        }
    }

    /// Whether an attention is pending.
    #[inline]
    pub(crate) fn has_attention(&self) -> bool {
        self.pending.load(Ordering::Relaxed) != 0
    }

    /// Takes the first pending attention, which is then reported and gone.
    #[cold]
    pub(crate) fn take(&self) -> Option<Sense> {
        UnitAttention::BY_PRECEDENCE.into_iter().find(|a| self.clear(*a)).map(UnitAttention::sense)
    }

    /// Forgets `attention`; says whether it was pending.
    pub(crate) fn clear(&self, attention: UnitAttention) -> bool {
        let bit = attention as u32;
        self.pending.fetch_and(!bit, Ordering::AcqRel) & bit != 0
    }
}

/// What a session knows of a logical unit, for one that goes on with it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct NexusState {
    /// Bits of the [`UnitAttention`]s that wait.
    pub attentions: u32,
    /// Whether it prevents the removal of the medium.
    pub prevents: bool,
    /// First READ CAPACITY, in microseconds since the epoch; 0: not yet.
    pub seen_us: u64,
    /// It has not learned the capacity, perhaps as it was not known what is reserved: who knows that tells it to ask
    /// again, as nobody may have.
    pub could_not_ask: bool,
}

impl Nexus {
    /// What is to be known to go on with it. Takes the lock of the volume's reservations.
    pub fn state(&self) -> NexusState {
        let seen_us = self.seen_us.load(Ordering::Relaxed);
        NexusState {
            could_not_ask: seen_us == 0 && self.reserves.0.was_unknown(),
            attentions: self.pending.load(Ordering::Acquire),
            prevents: self.prevents.load(Ordering::Acquire),
            seen_us,
        }
    }

    /// Goes on where another, of the unit that was here before, is.
    pub fn follow(&self, before: &Nexus) {
        self.restore(before.state());
    }

    /// Goes on where `state` says.
    pub(crate) fn restore(&self, state: NexusState) {
        let known = UnitAttention::BY_PRECEDENCE.into_iter().fold(0, |bits, a| bits | a as u32);
        self.pending.store(state.attentions & known, Ordering::Release);
        self.seen_us.store(state.seen_us, Ordering::Relaxed);
        if state.prevents {
            self.prevent();
        }
    }

    /// When the initiator first asked for the capacity, since the epoch; `None`: not yet.
    pub(crate) fn seen_at(&self) -> Option<Duration> {
        let us = self.seen_us.load(Ordering::Relaxed);
        (us != 0).then(|| Duration::from_micros(us))
    }
}

impl Drop for Nexus {
    fn drop(&mut self) {
        self.forget_prevention();
        self.forget_reserved();
        self.copies.cancel();
        self.copies.forget_failures();
    }
}

/// How many nexuses of a unit prevent the removal of its medium, until it is decided that the unit
/// goes: then none does, and none can any more.
#[derive(Default)]
pub(crate) struct Preventers(AtomicU32);

impl Preventers {
    const CLOSED: u32 = u32::MAX;

    /// One more; `false`: closed.
    fn add(&self) -> bool {
        let more = |count| (count != Self::CLOSED).then(|| count + 1);
        self.0.fetch_update(Ordering::AcqRel, Ordering::Acquire, more).is_ok()
    }

    /// One of those that were added less.
    fn sub(&self) {
        self.0.fetch_sub(1, Ordering::AcqRel);
    }

    /// Whether there is one.
    pub(crate) fn any(&self) -> bool {
        !matches!(self.0.load(Ordering::Acquire), 0 | Self::CLOSED)
    }

    /// Closes it if there is none; whether it is closed now.
    pub(crate) fn close(&self) -> bool {
        let closed = self.0.compare_exchange(0, Self::CLOSED, Ordering::AcqRel, Ordering::Acquire);
        matches!(closed, Ok(_) | Err(Self::CLOSED))
    }
}
