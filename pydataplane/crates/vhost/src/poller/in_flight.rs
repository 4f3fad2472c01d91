//! What the units of a session have with their devices, and whether a request more may begin: if the order that
//! task attributes demand lets it, if there is room for its data, and if the volume's limits
//! ([`bdev::Limits`]) do. [`Units::start`] counts what its device keeps, [`Units::resume`] no longer does.
//!
//! # Room
//! What a guest has in flight keeps its pages pinned, and others stand behind it, so all of it is
//! bounded, however many units and queues it has: [`MAX_BYTES`] of a session, in equal parts for the
//! reactors that serve its queues, so that no reactor asks another one. Of its part
//!
//! - a unit with requests in flight goes on up to a quarter, and all such up to a half: one that is busy, or
//!   whose device does not answer, leaves room for others;
//! - an idle unit begins one request as long as there is room at all. If there is none it is the next to have
//!   some, and until then nobody else begins what takes room: a large request is not overtaken for ever by
//!   small ones. Idle units take turns (`waiting`), and no request is larger than a part;
//! - what takes little of it ([`SMALL`]) an idle unit always begins, whatever others have in flight.
//!
//! A request that its device keeps for long is late: as soon as another one waits for
//! nothing but room it has none of it any more. Only its unit still has it, which begins no more than a
//! quarter, with what is late. So devices that do not answer keep no other unit from anything for longer than
//! that takes, once for each part that they begin, and each has a bound: a quarter, or one request.
//!
//! Nothing here is shared: the room comes back by ends of requests on the reactor that took it, which look
//! at what waits.
//!
//! # What is late
//! No request has its time looked at. Each is of the generation in which its unit got it; there is a new one
//! when the room of the session is short, and not sooner than [`crate::Timeouts::answer`]
//! after the last. What is neither of the present nor of the last generation is late: its device has kept it
//! for at least that time, and so, as far as anybody knows, does not answer.

use std::time::Duration;

use bdev::{IoError, Limits, Op};
use scsi::{Kind, Outcome, Response};

use super::slot::Slot;
use super::units::{OF_ENDING, OF_ORDERED, Units};
use crate::defs::task_attribute::{self, has_others_wait};

/// Bytes of data that a session may have with devices, all its units from all reactors, without what is
/// late: what disks need to be busy, and no more for others to stand behind. Of more than 16 reactors each has a part of one
/// request.
const MAX_BYTES: u64 = 64 << 20;
/// Of which on one reactor (at 7 GB/s it is done in 5 ms).
const MAX_PART: u64 = 32 << 20;
/// The least part: the longest request fits.
const MIN_PART: u64 = scsi::MAX_TRANSFER_BYTES;
/// Bytes of a request that an idle unit may always begin. So beyond a part there are 4 MiB at most.
const SMALL: u64 = 16 << 10;
/// Requests that one unit may have with its device: as many as a channel takes.
const MAX_UNIT_REQUESTS: u32 = 256;

/// Longest time after which what waits for a limit is looked at again, in microseconds: the limit may
/// have changed meanwhile.
const LIMIT_CHANGED_US: u64 = 50_000;

/// What of a request says whether it may begin.
#[derive(Clone, Copy)]
pub(super) struct Wants {
    pub(super) kind: Kind,
    /// SAM task attribute.
    pub(super) attribute: u8,
    /// Its place in its task set ([`super::task_set::Place::key`]), while it waits.
    pub(super) key: u64,
    /// How many were taken before it, while it waits.
    pub(super) order: u64,
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

/// Why a request does not begin.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Obstacle {
    /// New requests do not find its unit.
    Nowhere,
    /// Its unit is suspended or halted, or others of it come first.
    Order,
    /// Its unit, or the session, has as much with devices as it may.
    Room,
    /// The volume does as much as it may until then, in ticks.
    Limit(u64),
}

impl Units {
    /// Whether a request of `target` may begin, which then counts in the volume's limits. `waits`: it is the
    /// next of those that were taken and do not begin yet; else it was just taken.
    #[inline(always)]
    pub(super) fn admit(&self, target: u8, wants: Wants, waits: bool) -> Result<(), Obstacle> {
        let unit = self.units.get(usize::from(target)).and_then(Option::as_ref);
        let Some(unit) = unit.filter(|unit| waits || !unit.hidden) else {
            return Err(Obstacle::Nowhere);
        };
        let is_first = waits || unit.waiting.is_empty();
        // SAM-5 8.6. Where other reactors have a say `lets_go` asks them.
        let in_order = match wants.attribute {
            // Behind older ones that lack room: one that is large would never have it.
            task_attribute::HEAD_OF_QUEUE => waits || !unit.waiting.has_head(),
            task_attribute::ORDERED => {
                let is_next = is_first && unit.in_flight.requests == 0 && unit.place.is_none();
                is_next && unit.bars & OF_ENDING == 0
            }
            _ => is_first && unit.bars == 0,
        };
        if !in_order || unit.suspended || unit.halted {
            return Err(Obstacle::Order);
        }
        if !self.room.fits(target, unit.in_flight, wants.bytes.into()) {
            return Err(Obstacle::Room);
        }
        if unit.limits.is_on() && !wants.counted {
            within_limits(&unit.limits, wants)
        } else {
            Ok(())
        }
    }

    /// Gives a request that may begin to its unit, with which it then is if that is [`Outcome::Pending`]; `waited`: it
    /// did not begin when it was taken. `None`: there is no such unit.
    #[inline(always)]
    pub(super) fn start(&mut self, slot: &mut Slot, waited: bool) -> Option<Outcome> {
        let unit = self.units.get_mut(usize::from(slot.target))?.as_mut()?;
        let outcome = match slot.attribute {
            task_attribute::ACA => Outcome::Done(Response::no_aca()),
            _ => unit.lun.start(&mut slot.task),
        };
        if outcome == Outcome::Pending {
            self.taken += 1;
            if has_others_wait(slot.attribute) {
                unit.holds_back(slot, waited);
            }
            slot.generation = self.room.begin(&mut unit.in_flight, slot.bytes.into());
            if unit.in_flight.requests == 1 {
                self.active.push(slot.target);
            }
        }
        Some(outcome)
    }

    /// Goes on with a request whose I/O ended; it is no longer with its unit if it is not
    /// [`Outcome::Pending`]. `unbars`: so others begin that wait for any one to end ([`Units::bar`]).
    #[inline]
    pub(super) fn resume(
        &mut self,
        slot: &mut Slot,
        result: Result<(), IoError>,
        unbars: bool,
    ) -> Option<Outcome> {
        let unit = self.units.get_mut(usize::from(slot.target))?.as_mut()?;
        let outcome = unit.lun.resume(&mut slot.task, result);
        if outcome == Outcome::Pending {
            return Some(outcome);
        }
        self.taken -= 1;
        if unbars {
            unit.bars &= !OF_ORDERED;
        } else if has_others_wait(slot.attribute) {
            unit.lets_go_on(slot);
        }
        self.room.end(&mut unit.in_flight, slot.bytes.into(), slot.generation);
        if unit.in_flight.requests == 0
            && let Some(nth) = self.active.iter().position(|t| *t == slot.target)
        {
            self.active.swap_remove(nth);
            if let Some(idle) = unit.idle.take() {
                idle();
            }
        }
        Some(outcome)
    }

    /// As [`Units::admit`], of the next request of `target` that waits. If it lacks
    /// nothing but room, it is perhaps the next to have some. `unlimited`: whatever the limits say.
    pub(super) fn lets_go(
        &mut self,
        target: u8,
        wants: Wants,
        unlimited: bool,
    ) -> Result<(), Obstacle> {
        let mut admitted = self.admit(target, wants, true);
        if admitted == Err(Obstacle::Order) && self.asks_again(target) {
            admitted = self.admit(target, wants, true);
        }
        if admitted == Err(Obstacle::Order) && self.is_in_turn(target, wants) {
            // Nothing that is earlier is left.
            let attribute = task_attribute::HEAD_OF_QUEUE;
            admitted = self.admit(target, Wants { attribute, ..wants }, true);
        }
        let Some(unit) = self.units.get(usize::from(target)).and_then(Option::as_ref) else {
            return Err(Obstacle::Nowhere);
        };
        let bytes = u64::from(wants.bytes);
        // What waits for a limit keeps nobody from the room that it lacks, the other direction neither.
        if admitted == Err(Obstacle::Room)
            && !(unlimited || unit.hidden)
            && let Some(at) = limited_until(&unit.limits, wants)
        {
            admitted = Err(Obstacle::Limit(at));
        }
        let lacks_room = admitted == Err(Obstacle::Room);
        if lacks_room {
            self.room.lacks(unit.in_flight, bytes);
        }
        self.room.looked_at(target, lacks_room && unit.in_flight.requests == 0);
        match admitted {
            // What its removal waits for does not wait.
            Err(Obstacle::Limit(_)) if unlimited || unit.hidden => {
                if let Some(op) = wants.limited() {
                    unit.limits.count(op, bytes, reactor::ticks::now());
                }
                Ok(())
            }
            Err(Obstacle::Limit(at)) => {
                self.limited_until = self.limited_until.min(at);
                admitted
            }
            _ => admitted,
        }
    }

    /// Whether nothing that waits of `target` may begin, as some of it is about to be ended.
    pub(super) fn is_ending(&self, target: u8) -> bool {
        let unit = self.units.get(usize::from(target)).and_then(Option::as_ref);
        unit.is_some_and(|unit| unit.bars & OF_ENDING != 0)
    }

    /// Whether a request of `target` which waits and stands first there is the next in its task set, though there are
    /// some that are HEAD OF QUEUE, or reactors besides this one take requests of it.
    fn is_in_turn(&self, target: u8, wants: Wants) -> bool {
        let Some(unit) = self.units.get(usize::from(target)).and_then(Option::as_ref) else {
            return false;
        };
        let (place, key) = (unit.place.as_ref(), wants.key);
        match wants.attribute {
            task_attribute::ORDERED => {
                unit.in_flight.requests == 0 && place.is_some_and(|place| place.is_turn_of(key))
            }
            task_attribute::HEAD_OF_QUEUE => false,
            _ => {
                unit.bars & (OF_ORDERED | OF_ENDING) == 0
                    && unit.heads.let_pass(wants.order)
                    && place.is_none_or(|place| place.is_open_to(key))
            }
        }
    }

    /// The place in `backlog` of the unit that others wait behind.
    pub(super) fn next_in_backlog(&self) -> Option<usize> {
        let next = self.room.next?;
        self.backlog.iter().position(|target| *target == next)
    }

    /// All that waits is about to be looked at.
    pub(super) fn look_anew(&mut self) {
        self.room.short = false;
        self.limited_until = u64::MAX;
    }

    /// Whether something waits only because others have all the room.
    pub(super) fn is_short(&self) -> bool {
        self.room.short
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
        let before = room.taken;
        let unit = |target: &u8| units.get(usize::from(*target))?.as_ref();
        debug_assert!(room.has_all(active.iter().filter_map(unit).map(|u| u.in_flight)));
        room.next_generation(now);
        for target in active.iter() {
            if let Some(unit) = units.get_mut(usize::from(*target)).and_then(Option::as_mut) {
                room.age(&mut unit.in_flight);
            }
        }
        room.taken < before
    }

    /// So many reactors serve the queues of the session.
    pub(super) fn share_room(&mut self, reactors: usize) {
        self.room.share(reactors);
    }
}

/// Counts a request in the limits of its volume.
#[cold]
fn within_limits(limits: &Limits, wants: Wants) -> Result<(), Obstacle> {
    let Some(op) = wants.limited() else { return Ok(()) };
    let now = reactor::ticks::now();
    let admitted = limits.admit(op, wants.bytes.into(), now);
    admitted.map_err(|at| Obstacle::Limit(looked_at(at, now)))
}

/// Until when, in ticks, a request waits for the limits of its volume, in which it does not count then; `None`: it
/// does not.
fn limited_until(limits: &Limits, wants: Wants) -> Option<u64> {
    let op = wants.limited().filter(|_| limits.is_on() && !wants.counted)?;
    let (now, free_at) = (reactor::ticks::now(), limits.free_at(op));
    (free_at > now).then(|| looked_at(free_at, now))
}

/// When to look again, at `now`, at what waits for a limit until `at`, in ticks.
fn looked_at(at: u64, now: u64) -> u64 {
    at.min(now.saturating_add(reactor::ticks::from_us(LIMIT_CHANGED_US)))
}

/// What one unit has in flight.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Load {
    pub(super) requests: u32,
    /// Bytes of their data, with those that are late.
    bytes: u64,
    /// Bytes of those that are of the present generation, and of the last one.
    present: u64,
    last: u64,
}

/// The room of a session on one reactor.
pub(super) struct Room {
    part: u64,
    /// Bytes that its units have in flight and that are not late.
    taken: u64,
    /// The unit that others wait behind, as it is the next to have room: it is idle, and its first request did
    /// not fit.
    next: Option<u8>,
    /// Something was found, since all that waits was last looked at, that others keep from its room.
    short: bool,
    /// The present generation.
    generation: u32,
    /// When it began, in ticks; the first one long ago.
    since: u64,
    /// How long one lasts at least, in ticks.
    least: u64,
}

impl Room {
    /// All that one reactor may have; late is what has no answer after `answer`, or twice that.
    pub(super) fn new(answer: Duration) -> Self {
        let us = u64::try_from(answer.as_micros()).unwrap_or(u64::MAX);
        let least = reactor::ticks::from_us(us);
        Room { part: MAX_PART, taken: 0, next: None, short: false, generation: 0, since: 0, least }
    }

    /// From now on so many `reactors` serve the queues of the session. What is in flight goes on.
    fn share(&mut self, reactors: usize) {
        self.part = (MAX_BYTES / (reactors as u64).max(1)).clamp(MIN_PART, MAX_PART);
    }

    /// Whether there is room for a request of `bytes` bytes of the unit `target`, which has `load`.
    #[inline(always)]
    fn fits(&self, target: u8, load: Load, bytes: u64) -> bool {
        let all = self.taken + bytes;
        if load.requests == 0 {
            return bytes <= SMALL || (self.is_free_to(target) && all <= self.part);
        }
        load.requests < MAX_UNIT_REQUESTS
            && (bytes == 0
                || (self.next.is_none()
                    && load.bytes + bytes <= self.part / 4
                    && all <= self.part / 2))
    }

    /// A unit that has `load` begins a request of `bytes` bytes. Returns its generation.
    #[inline]
    fn begin(&mut self, load: &mut Load, bytes: u64) -> u32 {
        load.requests += 1;
        load.bytes += bytes;
        load.present += bytes;
        self.taken += bytes;
        self.generation
    }

    /// A request of that generation has ended, of a unit that has `load` with it.
    #[inline]
    fn end(&mut self, load: &mut Load, bytes: u64, generation: u32) {
        load.requests -= 1;
        load.bytes -= bytes;
        // Around in 2^32 times half a second, if room is short all that time.
        match self.generation.wrapping_sub(generation) {
            0 => load.present -= bytes,
            1 => load.last -= bytes,
            // It was late.
            _ => return,
        }
        self.taken -= bytes;
    }

    /// There is no room for a request of `bytes` bytes, of a unit that has `load`, which lacks nothing else.
    fn lacks(&mut self, load: Load, bytes: u64) {
        // Else the unit waits for itself.
        self.short |= load.requests == 0
            || (load.requests < MAX_UNIT_REQUESTS && load.bytes + bytes <= self.part / 4);
    }

    /// When the next generation is to begin, in ticks, which gives what waits more room if devices do not
    /// answer; `u64::MAX`: nothing needs it.
    fn wake_at(&self) -> u64 {
        if self.short { self.since.saturating_add(self.least) } else { u64::MAX }
    }

    /// Begins the next generation at `now`, in ticks; [`Room::age`] follows for each unit with requests in
    /// flight.
    fn next_generation(&mut self, now: u64) {
        (self.generation, self.since) = (self.generation.wrapping_add(1), now);
    }

    /// What has become late of `load` has no room any more.
    fn age(&mut self, load: &mut Load) {
        let late = std::mem::replace(&mut load.last, std::mem::take(&mut load.present));
        debug_assert!(load.last + late <= load.bytes);
        self.taken -= late;
    }

    /// Whether `loads`, those of all units with requests in flight, have what is taken.
    fn has_all(&self, loads: impl Iterator<Item = Load>) -> bool {
        self.taken == loads.map(|load| load.present + load.last).sum::<u64>()
    }

    /// The first request of `target` that waits was looked at; `lacks`: the unit is idle, and nothing but
    /// room is missing.
    fn looked_at(&mut self, target: u8, lacks: bool) {
        if self.is_free_to(target) {
            self.next = lacks.then_some(target);
        }
    }

    /// Nothing of `target` waits any more.
    pub(super) fn forget(&mut self, target: u8) {
        self.looked_at(target, false);
    }

    /// Whether no other unit is the next.
    #[inline(always)]
    fn is_free_to(&self, target: u8) -> bool {
        self.next.is_none_or(|next| next == target)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    const MIB: u64 = 1 << 20;

    const NEVER: Duration = Duration::from_secs(1 << 30);

    /// A session's units on one reactor, each with requests of a length of its own that never end of
    /// themselves, begun in turn as `waiting` does.
    struct Units {
        room: Room,
        of: Vec<(Load, u64)>,
        turn: usize,
    }

    impl Units {
        fn new(reactors: usize, lengths: impl IntoIterator<Item = u64>) -> Self {
            let mut room = Room::new(NEVER);
            room.share(reactors);
            let of = lengths.into_iter().map(|len| (Load::default(), len)).collect();
            Units { room, of, turn: 0 }
        }

        /// Begins all that may begin. Returns which units began something.
        fn begin(&mut self) -> Vec<usize> {
            let (mut begun, mut refused) = (Vec::new(), 0);
            if let Some(next) = self.room.next {
                self.turn = usize::from(next);
            }
            while refused < self.of.len() {
                let n = self.turn % self.of.len();
                let (load, bytes) = &mut self.of[n];
                let fits = self.room.fits(n as u8, *load, *bytes);
                self.room.looked_at(n as u8, !fits && load.requests == 0);
                self.turn = n + 1;
                if !fits {
                    refused += 1;
                    continue;
                }
                self.room.begin(load, *bytes);
                begun.push(n);
                refused = 0;
            }
            begun
        }

        fn end(&mut self, n: usize) {
            let (load, bytes) = &mut self.of[n];
            self.room.end(load, *bytes, self.room.generation);
        }

        fn bytes(&self, n: usize) -> u64 {
            self.of[n].0.bytes
        }
    }

    /// As the poller does where room is short, a generation later.
    fn age(units: &mut Units) {
        units.room.next_generation(0);
        for (load, _) in &mut units.of {
            units.room.age(load);
        }
        assert!(units.room.has_all(units.of.iter().map(|(load, _)| *load)));
    }

    #[test]
    fn devices_that_do_not_answer_keep_no_other_from_room_and_have_a_bound() {
        for reactors in [1, 2, 16] {
            let mut units =
                Units::new(reactors, (0..200).map(|n| [4 * MIB, MIB, 100 << 10][n % 3]));
            let part = units.room.part;
            for _ in 0..400 {
                units.begin();
                assert!(units.room.taken <= part);
                age(&mut units);
            }
            assert!((0..200).all(|n| units.bytes(n) > 0), "each has begun something");
            assert!((0..200).all(|n| units.bytes(n) <= (part / 4).max(units.of[n].1)));
            units.begin();
            (0..2).for_each(|_| age(&mut units));
            // Nothing of the others is in their way.
            assert_eq!(units.room.taken, 0);
            units.of.push((Load::default(), 4 * MIB));
            assert_eq!(
                units.begin(),
                if reactors == 16 {
                    [200].to_vec()
                } else {
                    vec![200; (part / 4 / (4 * MIB)).max(1) as usize]
                }
            );
        }
    }

    proptest! {
        #[test]
        fn whatever_ends_when_each_byte_is_given_back_once(
            steps in prop::collection::vec((0..5usize, 0..4usize, 1..=4 * MIB, any::<u16>()), 1..400)
        ) {
            let mut room = Room::new(NEVER);
            let mut loads = [Load::default(); 4];
            // Unit, bytes, generation, and how many generations ago that was.
            let mut in_flight: Vec<(usize, u64, u32, u32)> = Vec::new();
            for (step, unit, bytes, which) in steps {
                match step {
                    0 | 1 if room.fits(unit as u8, loads[unit], bytes) => {
                        let generation = room.begin(&mut loads[unit], bytes);
                        in_flight.push((unit, bytes, generation, 0));
                    }
                    2 | 3 if !in_flight.is_empty() => {
                        let which = usize::from(which) % in_flight.len();
                        let (unit, bytes, generation, _) = in_flight.swap_remove(which);
                        room.end(&mut loads[unit], bytes, generation);
                    }
                    4 => {
                        room.next_generation(0);
                        loads.iter_mut().for_each(|load| room.age(load));
                        in_flight.iter_mut().for_each(|request| request.3 += 1);
                    }
                    _ => {}
                }
                let in_time = in_flight.iter().filter(|request| request.3 < 2);
                prop_assert_eq!(room.taken, in_time.map(|request| request.1).sum::<u64>());
                for (unit, load) in loads.iter().enumerate() {
                    let of_unit = in_flight.iter().filter(|request| request.0 == unit);
                    prop_assert_eq!(load.bytes, of_unit.map(|request| request.1).sum::<u64>());
                    prop_assert!(load.bytes <= room.part / 4);
                }
            }
            for (unit, bytes, generation, _) in in_flight {
                room.end(&mut loads[unit], bytes, generation);
            }
            prop_assert_eq!(room.taken, 0);
            prop_assert_eq!(loads, [Load::default(); 4]);
        }
    }

    #[test]
    fn only_what_others_keep_from_its_room_wakes_the_reactor() {
        let mut room = Room::new(Duration::from_secs(1));
        let (mut busy, second) = (Load::default(), reactor::ticks::from_us(1_000_000));
        (0..8).for_each(|_| _ = room.begin(&mut busy, MIB));
        room.lacks(busy, MIB);
        assert_eq!(room.wake_at(), u64::MAX, "it waits for itself");
        room.lacks(Load::default(), 4 * MIB);
        assert_eq!(room.wake_at(), second, "of the first generation");
        room.next_generation(7 * second);
        assert_eq!(room.wake_at(), 8 * second);
        room.short = false;
        assert_eq!(room.wake_at(), u64::MAX);
    }

    #[test]
    fn all_parts_together_are_what_a_session_may_have_whatever_it_wants() {
        for reactors in 1..=16 {
            let most = MAX_BYTES / reactors as u64;
            for len in [SMALL, SMALL + 512, 64 << 10, MIB, 3 * MIB, 4 * MIB] {
                let mut units = Units::new(reactors, [len; 255]);
                units.begin();
                let small = if len <= SMALL { 255 * SMALL } else { 0 };
                let taken = units.room.taken;
                assert!(taken <= most.min(MAX_PART) + small, "{taken} of {reactors} with {len}");
                assert!(taken > 0);
            }
        }
    }

    #[test]
    fn a_busy_unit_leaves_room_for_others_and_others_leave_some_for_it() {
        let mut units = Units::new(1, [MIB; 4]);
        units.begin();
        // Of the last one only what an idle unit may: the others had half of all.
        let taken: Vec<u64> = (0..4).map(|n| units.bytes(n) / MIB).collect();
        assert_eq!(taken.iter().sum::<u64>(), 16);
        assert!(taken.iter().all(|mib| (1..=8).contains(mib)), "{taken:?}");
        let mut one = Units::new(1, [MIB]);
        one.begin();
        assert_eq!(one.bytes(0), 8 * MIB);
    }

    #[test]
    fn who_lacks_room_has_the_next_and_small_requests_of_idle_units_pass() {
        // Seven with all of their room, and one with two: 30 of 32 MiB.
        let lengths = [4, 4, 4, 4, 4, 4, 4, 2].map(|mib| mib * MIB);
        let mut units = Units::new(1, lengths);
        assert_eq!(units.begin(), [0, 1, 2, 3, 4, 5, 6, 7]);
        units.of.extend([4 * MIB, MIB, 4096, 4096].map(|len| (Load::default(), len)));
        units.turn = 8;
        assert_eq!(units.begin(), [10, 11], "the one behind it would fit");
        assert_eq!(units.room.next, Some(8));
        units.end(0);
        assert_eq!(units.begin(), [8, 9]);
        assert_eq!(units.room.next, Some(0), "the next in turn");
    }

    #[test]
    fn every_unit_has_its_turn_whatever_the_others_want() {
        let lengths = (0..60).map(|n| [4 * MIB, SMALL + 512, 100 << 10, 1023 << 10][n % 4]);
        let mut units = Units::new(2, lengths);
        let mut begun = vec![0u32; 60];
        let mut in_flight = std::collections::VecDeque::new();
        for _ in 0..5_000 {
            for n in units.begin() {
                begun[n] += 1;
                in_flight.push_back(n);
            }
            units.end(in_flight.pop_front().expect("something is always in flight"));
        }
        assert!(begun.iter().all(|count| *count >= 20), "{begun:?}");
    }

    #[test]
    fn a_unit_that_no_longer_waits_holds_nobody_up() {
        let mut room = Room::new(NEVER);
        room.taken = MAX_PART;
        room.looked_at(3, true);
        room.looked_at(4, true);
        assert_eq!(room.next, Some(3));
        room.forget(4);
        assert_eq!(room.next, Some(3));
        room.forget(3);
        assert_eq!(room.next, None);
    }
}
