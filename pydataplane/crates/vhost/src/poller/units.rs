//! The logical units of a session as one reactor has them, and when a request may begin on one.

use std::sync::Arc;
use std::time::Duration;

use bdev::{Limits, Op, OpenError};
use guestmem::Sg;
use reactor::{Cx, Owner};
use scsi::{CDB_LEN, Kind, Lun, LunShared, Nexus, Outcome};

use super::load::Load;
use super::room::Room;
use crate::defs::{LunAddress, MAX_TARGETS, task_attribute};
use crate::stats::LunCounters;

/// Longest time after which what waits for a limit is looked at again, in microseconds: the limit may
/// have changed meanwhile.
const LIMIT_CHANGED_US: u64 = 50_000;

/// What of a request says whether it may begin.
#[derive(Clone, Copy)]
pub(super) struct Wants {
    pub(super) kind: Kind,
    /// SAM task attribute.
    pub(super) attribute: u8,
    /// Bytes of its data.
    pub(super) bytes: u32,
    /// It counts in the volume's limits already.
    pub(super) counted: bool,
}

impl Wants {
    /// What it does, if that is limited.
    fn limited(self) -> Option<Op> {
        match self.kind {
            Kind::Read => Some(Op::Read),
            Kind::Write => Some(Op::Write),
            Kind::Flush | Kind::Other => None,
        }
    }
}

/// LUN 0 of one target on one reactor.
pub(crate) struct Unit {
    pub(super) lun: Lun,
    pub(super) counters: Arc<LunCounters>,
    /// The volume's.
    limits: Arc<Limits>,
    /// Requests that wait for the device.
    in_flight: Load,
    /// One of them has the task attribute ORDERED, or the device takes no more until one has ended.
    ordered: bool,
    /// Requests that were taken and do not begin yet.
    pub(super) waiting: Waiting,
    /// An I/O failed, and what waits begins when somebody says so.
    pub(super) suspended: bool,
    /// Nothing begins: it is about to go on with another channel.
    halted: bool,
    /// Who is told when nothing is with the device any more, while it is halted.
    idle: Option<Box<dyn FnOnce() + Send>>,
    /// What it is to go on with.
    next: Option<(Lun, Arc<Limits>)>,
    /// Not yet to be found by new requests, or no longer.
    hidden: bool,
}

impl Unit {
    /// Opens the logical unit on the reactor of `cx`, for the session `nexus`, whose I/O is `owner`'s;
    /// hidden until [`Units::show`].
    pub(crate) fn open(
        cx: &Cx,
        owner: Owner,
        shared: &Arc<LunShared>,
        nexus: Arc<Nexus>,
        (counters, limits): (Arc<LunCounters>, Arc<Limits>),
    ) -> Result<Unit, OpenError> {
        let channel = shared.bdev().open(&cx.io().owned_by(owner))?;
        Ok(Unit::new(Lun::new(Arc::clone(shared), nexus, channel), counters, limits))
    }

    fn new(lun: Lun, counters: Arc<LunCounters>, limits: Arc<Limits>) -> Self {
        Unit {
            lun,
            counters,
            limits,
            in_flight: Load::default(),
            ordered: false,
            waiting: Waiting::NOBODY,
            suspended: false,
            halted: false,
            idle: None,
            next: None,
            hidden: true,
        }
    }

    /// Whether a request before which none waits may begin in the order that its task attribute demands
    /// (SAM-5 8.6), of a unit that is not suspended.
    #[inline(always)]
    fn is_ready_for(&self, attribute: u8) -> bool {
        !self.suspended
            && !self.halted
            && match attribute {
                task_attribute::ORDERED => self.in_flight.requests() == 0,
                task_attribute::HEAD_OF_QUEUE => true,
                _ => !self.ordered,
            }
    }

    /// Counts a request in the volume's limits that may begin but for them.
    ///
    /// # Errors
    /// When to ask again, in ticks.
    #[inline(always)]
    fn counts(&self, wants: Wants) -> Result<(), u64> {
        if !self.limits.is_on() || wants.counted {
            return Ok(());
        }
        self.is_within_limits(wants)
    }

    #[cold]
    fn is_within_limits(&self, wants: Wants) -> Result<(), u64> {
        let Some(op) = wants.limited() else { return Ok(()) };
        let now = reactor::ticks::now();
        let looked_at = now.saturating_add(reactor::ticks::from_us(LIMIT_CHANGED_US));
        self.limits.admit(op, wants.bytes.into(), now).map_err(|at| at.min(looked_at))
    }
}

/// No request.
pub(super) const NONE: u64 = u64::MAX;

/// The requests of one unit that were taken and do not begin yet, by tag; each slot names the next one.
/// What becomes of them is in `waiting`.
pub(super) struct Waiting {
    pub(super) first: u64,
    pub(super) last: u64,
}

impl Waiting {
    /// No request waits.
    pub(super) const NOBODY: Waiting = Waiting { first: NONE, last: NONE };
}

/// All targets, by number, and which of them have requests in flight.
pub(super) struct Units {
    units: Box<[Option<Unit>]>,
    /// Targets with requests in flight, in no order; capacity for all.
    pub(super) active: Vec<u8>,
    /// How much data they may have with devices, and have.
    room: Room,
    /// How many requests wait for a device or to begin.
    pub(super) taken: u32,
    /// Targets with requests that do not begin yet, in no order; capacity for all.
    pub(super) backlog: Vec<u8>,
    /// When a limit lets something begin that waits, in ticks.
    limited_until: u64,
}

impl Units {
    /// No units; `answer`: [`crate::Timeouts::answer`].
    pub(super) fn new(answer: Duration) -> Self {
        Units {
            units: (0..MAX_TARGETS).map(|_| None).collect(),
            active: Vec::with_capacity(MAX_TARGETS),
            room: Room::new(answer),
            taken: 0,
            backlog: Vec::with_capacity(MAX_TARGETS),
            limited_until: u64::MAX,
        }
    }

    /// The unit that new requests for `target` go to.
    #[inline]
    pub(super) fn find(&mut self, target: u8) -> Option<&mut Unit> {
        self.at(target).filter(|unit| !unit.hidden)
    }

    /// The unit of `target`, even if it is being removed.
    #[inline]
    pub(super) fn at(&mut self, target: u8) -> Option<&mut Unit> {
        self.units.get_mut(usize::from(target))?.as_mut()
    }

    /// Whether a request for `target` that was just taken may begin at once, and then counts; `None`: new
    /// requests do not find the target.
    #[inline(always)]
    pub(super) fn admits(&self, target: u8, wants: Wants) -> Option<bool> {
        let unit = self.units.get(usize::from(target))?.as_ref().filter(|unit| !unit.hidden)?;
        let first = unit.waiting.first == NONE;
        Some(
            (first || wants.attribute == task_attribute::HEAD_OF_QUEUE)
                && unit.is_ready_for(wants.attribute)
                && self.room.fits(target, unit.in_flight, wants.bytes.into())
                && unit.counts(wants).is_ok(),
        )
    }

    /// Whether the first request of `target` that waits may begin, and then counts. If it lacks nothing
    /// but room, it is perhaps the next to have some. `unlimited`: whatever the limits say.
    pub(super) fn lets_go(&mut self, target: u8, wants: Wants, unlimited: bool) -> bool {
        let Some(unit) = self.units.get(usize::from(target)).and_then(Option::as_ref) else {
            return false;
        };
        let (ready, bytes) = (unit.is_ready_for(wants.attribute), u64::from(wants.bytes));
        let fits = self.room.fits(target, unit.in_flight, bytes);
        if ready && !fits {
            self.room.lacks(unit.in_flight, bytes);
        }
        self.room.looked_at(target, ready && !fits && unit.in_flight.requests() == 0);
        if !ready || !fits {
            return false;
        }
        // What its removal waits for does not wait.
        match unit.counts(wants) {
            Err(at) if !unlimited && !unit.hidden => {
                self.limited_until = self.limited_until.min(at);
                false
            }
            Err(_) => {
                if let Some(op) = wants.limited() {
                    unit.limits.count(op, bytes, reactor::ticks::now());
                }
                true
            }
            Ok(()) => true,
        }
    }

    /// The place in `backlog` of the unit that others wait behind.
    pub(super) fn next_in_backlog(&self) -> Option<usize> {
        let next = self.room.next()?;
        self.backlog.iter().position(|target| *target == next)
    }

    /// All that waits is about to be looked at.
    pub(super) fn look_anew(&mut self) {
        self.room.look_anew();
        self.limited_until = u64::MAX;
    }

    /// Whether something waits only because others have all the room.
    pub(super) fn is_short(&self) -> bool {
        self.room.is_short()
    }

    /// When to look at it again, in ticks, though nothing has ended; `u64::MAX`: not before.
    pub(super) fn wake_at(&self) -> u64 {
        match self.backlog.is_empty() {
            true => u64::MAX,
            false => self.room.wake_at().min(self.limited_until),
        }
    }

    /// Room is short at `now`, in ticks. Whether there is more, as some of what is in flight is late.
    pub(super) fn age(&mut self, now: u64) -> bool {
        let Units { units, active, room, .. } = self;
        if room.wake_at() > now {
            return false;
        }
        let before = room.taken();
        let unit = |target: &u8| units.get(usize::from(*target))?.as_ref();
        debug_assert!(room.has_all(active.iter().filter_map(unit).map(|u| u.in_flight)));
        room.next_generation(now);
        for target in active.iter() {
            if let Some(unit) = units.get_mut(usize::from(*target)).and_then(Option::as_mut) {
                room.age(&mut unit.in_flight);
            }
        }
        room.taken() < before
    }

    /// So many reactors serve the queues of the session.
    pub(super) fn share_room(&mut self, reactors: usize) {
        self.room.share(reactors);
    }

    /// A request of `target` with `bytes` of data waits for the device; `ordered`: it has that task
    /// attribute. Returns its generation.
    #[inline]
    pub(super) fn started(&mut self, target: u8, bytes: u64, ordered: bool) -> u32 {
        self.taken += 1;
        if let Some(unit) = self.units.get_mut(usize::from(target)).and_then(Option::as_mut) {
            unit.ordered |= ordered;
            self.room.begin(&mut unit.in_flight, bytes);
            if unit.in_flight.requests() == 1 {
                self.active.push(target);
            }
        }
        self.room.generation()
    }

    /// Nothing of `target` begins until one of its requests has ended that is in flight. `false`: there is
    /// none.
    pub(super) fn bar(&mut self, target: u8) -> bool {
        let Some(unit) = self.at(target) else { return false };
        unit.ordered = unit.in_flight.requests() != 0;
        unit.ordered
    }

    /// A request of `target` that waited, with `bytes` of data and of that `generation`, has ended.
    #[inline]
    pub(super) fn ended(&mut self, target: u8, bytes: u64, generation: u32, ordered: bool) {
        self.taken -= 1;
        if let Some(unit) = self.units.get_mut(usize::from(target)).and_then(Option::as_mut) {
            self.room.end(&mut unit.in_flight, bytes, generation);
            unit.ordered &= !ordered;
            if unit.in_flight.requests() == 0
                && let Some(nth) = self.active.iter().position(|t| *t == target)
            {
                self.active.swap_remove(nth);
                if let Some(idle) = unit.idle.take() {
                    idle();
                }
            }
        }
    }

    /// Nothing of `target` begins any more; calls `idle` as soon as nothing is with its device, perhaps
    /// at once.
    pub(super) fn halt(&mut self, target: u8, idle: Box<dyn FnOnce() + Send>) {
        match self.at(target) {
            Some(unit) if unit.in_flight.requests() > 0 => {
                (unit.halted, unit.idle) = (true, Some(idle));
            }
            Some(unit) => {
                unit.halted = true;
                idle();
            }
            None => idle(),
        }
    }

    /// What waited since [`Units::halt`] begins again.
    pub(super) fn go_on(&mut self, target: u8) {
        if let Some(unit) = self.at(target) {
            (unit.halted, unit.idle, unit.next) = (false, None, None);
        }
    }

    /// `target` is to go on with `lun`, of a volume with these limits, after [`Units::switch`].
    pub(super) fn prepare(&mut self, target: u8, lun: Lun, limits: Arc<Limits>) {
        if let Some(unit) = self.at(target) {
            unit.next = Some((lun, limits));
        }
    }

    /// `target`, which is halted and has nothing with its device, has what it was to go on with.
    pub(super) fn switch(&mut self, target: u8) {
        if let Some(unit) = self.at(target) {
            assert!(unit.halted && unit.in_flight.requests() == 0, "target {target} is in use");
            if let Some(next) = unit.next.take() {
                (unit.lun, unit.limits) = next;
            }
        }
    }

    /// A request of `target` stands in its list of those that do not begin yet.
    pub(super) fn postponed(&mut self, target: u8) {
        self.taken += 1;
        if !self.backlog.contains(&target) {
            self.backlog.push(target);
        }
    }

    /// A request of `target` left that list.
    pub(super) fn begins(&mut self, target: u8) {
        self.taken -= 1;
        if self.at(target).is_some_and(|unit| unit.waiting.first != NONE) {
            return;
        }
        self.room.forget(target);
        if let Some(nth) = self.backlog.iter().position(|t| *t == target) {
            self.backlog.swap_remove(nth);
        }
    }

    /// Puts a unit in place; the place must be free.
    pub(super) fn insert(&mut self, target: u8, unit: Unit) {
        let place = &mut self.units[usize::from(target)];
        assert!(place.is_none(), "target {target} is there already");
        *place = Some(unit);
    }

    /// New requests find `target` from now on.
    pub(super) fn show(&mut self, target: u8) {
        if let Some(unit) = self.at(target) {
            unit.hidden = false;
        }
    }

    /// Whether the unit of `target` is suspended.
    pub(super) fn is_suspended(&self, target: u8) -> bool {
        let unit = self.units.get(usize::from(target)).and_then(Option::as_ref);
        unit.is_some_and(|unit| unit.suspended)
    }

    /// Whether the unit of `target` is being removed, or not yet in use.
    pub(super) fn is_hidden(&self, target: u8) -> bool {
        let unit = self.units.get(usize::from(target)).and_then(Option::as_ref);
        unit.is_none_or(|unit| unit.hidden)
    }

    /// New requests no longer find `target`.
    pub(super) fn leave(&mut self, target: u8) {
        if let Some(unit) = self.at(target) {
            unit.hidden = true;
        }
    }

    /// Takes the unit of `target` out; nothing is in flight on it.
    pub(super) fn remove(&mut self, target: u8) -> Option<Unit> {
        let unit = self.units[usize::from(target)].take();
        let idle = |u: &Unit| u.in_flight.requests() == 0 && u.waiting.first == NONE;
        assert!(unit.as_ref().is_none_or(idle), "target {target} is in use");
        unit
    }

    /// Answers the REPORT LUNS well-known logical unit: it lists LUN 0 of every target.
    #[cold]
    pub(super) fn well_known(&self, cdb: &[u8; CDB_LEN], data_in: &Sg) -> Outcome {
        let there = |(_, unit): &(usize, &Option<Unit>)| unit.as_ref().is_some_and(|u| !u.hidden);
        let luns = self.units.iter().enumerate().filter(there);
        let luns = luns.map(|(target, _)| LunAddress::flat(target as u8, 0));
        scsi::report_luns_unit(cdb, data_in, luns)
    }
}
