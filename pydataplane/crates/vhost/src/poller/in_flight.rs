//! How much data a session may have with devices.
//!
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
//! A request that its device keeps for long is late ([`super::load`]): as soon as another one waits for
//! nothing but room it has none of it any more. Only its unit still has it, which begins no more than a
//! quarter, with what is late. So devices that do not answer keep no other unit from anything for longer than
//! that takes, once for each part that they begin, and each has a bound: a quarter, or one request.
//!
//! Nothing here is shared: the room comes back by ends of requests on the reactor that took it, which look
//! at what waits.

use std::time::Duration;

use super::load::{Generation, Load};

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

/// The room of a session on one reactor.
pub(super) struct Room {
    part: u64,
    /// Bytes that its units have in flight and that are not late.
    taken: u64,
    /// The unit that is the next to have room: it is idle, and its first request did not fit.
    next: Option<u8>,
    /// Something was found, since all that waits was last looked at, that others keep from its room.
    short: bool,
    generation: Generation,
}

impl Room {
    /// All that one reactor may have; late is what has no answer after `answer`, or twice that.
    pub(super) fn new(answer: Duration) -> Self {
        let generation = Generation::new(answer);
        Room { part: MAX_PART, taken: 0, next: None, short: false, generation }
    }

    /// From now on so many `reactors` serve the queues of the session. What is in flight goes on.
    pub(super) fn share(&mut self, reactors: usize) {
        self.part = (MAX_BYTES / (reactors as u64).max(1)).clamp(MIN_PART, MAX_PART);
    }

    /// Whether there is room for a request of `bytes` bytes of the unit `target`, which has `load`.
    #[inline(always)]
    pub(super) fn fits(&self, target: u8, load: Load, bytes: u64) -> bool {
        let all = self.taken + bytes;
        if load.requests() == 0 {
            return bytes <= SMALL || (self.is_free_to(target) && all <= self.part);
        }
        load.requests() < MAX_UNIT_REQUESTS
            && (bytes == 0
                || (self.next.is_none()
                    && load.bytes() + bytes <= self.part / 4
                    && all <= self.part / 2))
    }

    /// A unit that has `load` begins a request of `bytes` bytes, of the present generation.
    #[inline]
    pub(super) fn begin(&mut self, load: &mut Load, bytes: u64) {
        load.add(bytes);
        self.taken += bytes;
    }

    /// A request of that generation has ended, of a unit that has `load` with it.
    #[inline]
    pub(super) fn end(&mut self, load: &mut Load, bytes: u64, generation: u32) {
        if load.remove(bytes, self.generation.age_of(generation)) {
            self.taken -= bytes;
        }
    }

    /// That of what begins now.
    #[inline]
    pub(super) fn generation(&self) -> u32 {
        self.generation.number()
    }

    /// All that waits is about to be looked at.
    pub(super) fn look_anew(&mut self) {
        self.short = false;
    }

    /// There is no room for a request of `bytes` bytes, of a unit that has `load`, which lacks nothing else.
    pub(super) fn lacks(&mut self, load: Load, bytes: u64) {
        // Else the unit waits for itself.
        self.short |= load.requests() == 0
            || (load.requests() < MAX_UNIT_REQUESTS && load.bytes() + bytes <= self.part / 4);
    }

    /// Bytes in flight that are not late.
    pub(super) fn taken(&self) -> u64 {
        self.taken
    }

    /// Whether something waits only because others have all the room.
    pub(super) fn is_short(&self) -> bool {
        self.short
    }

    /// When the next generation is to begin, in ticks, which gives what waits more room if devices do not
    /// answer; `u64::MAX`: nothing needs it.
    pub(super) fn wake_at(&self) -> u64 {
        if self.short { self.generation.ends() } else { u64::MAX }
    }

    /// Begins the next generation at `now`, in ticks; [`Room::age`] follows for each unit with requests in
    /// flight.
    pub(super) fn next_generation(&mut self, now: u64) {
        self.generation.next(now);
    }

    /// What has become late of `load` has no room any more.
    pub(super) fn age(&mut self, load: &mut Load) {
        self.taken -= load.age();
    }

    /// Whether `loads`, those of all units with requests in flight, have what is taken.
    pub(super) fn has_all(&self, loads: impl Iterator<Item = Load>) -> bool {
        self.taken == loads.map(|load| load.in_time()).sum::<u64>()
    }

    /// The first request of `target` that waits was looked at; `lacks`: the unit is idle, and nothing but
    /// room is missing.
    pub(super) fn looked_at(&mut self, target: u8, lacks: bool) {
        if self.is_free_to(target) {
            self.next = lacks.then_some(target);
        }
    }

    /// Nothing of `target` waits any more.
    pub(super) fn forget(&mut self, target: u8) {
        self.looked_at(target, false);
    }

    /// The unit that others wait behind.
    pub(super) fn next(&self) -> Option<u8> {
        self.next
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
            if let Some(next) = self.room.next() {
                self.turn = usize::from(next);
            }
            while refused < self.of.len() {
                let n = self.turn % self.of.len();
                let (load, bytes) = &mut self.of[n];
                let fits = self.room.fits(n as u8, *load, *bytes);
                self.room.looked_at(n as u8, !fits && load.requests() == 0);
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
            self.room.end(load, *bytes, self.room.generation());
        }

        fn bytes(&self, n: usize) -> u64 {
            self.of[n].0.bytes()
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
                        room.begin(&mut loads[unit], bytes);
                        in_flight.push((unit, bytes, room.generation(), 0));
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
                    prop_assert_eq!(load.bytes(), of_unit.map(|request| request.1).sum::<u64>());
                    prop_assert!(load.bytes() <= room.part / 4);
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
        (0..8).for_each(|_| room.begin(&mut busy, MIB));
        room.lacks(busy, MIB);
        assert_eq!(room.wake_at(), u64::MAX, "it waits for itself");
        room.lacks(Load::default(), 4 * MIB);
        assert_eq!(room.wake_at(), second, "of the first generation");
        room.next_generation(7 * second);
        assert_eq!(room.wake_at(), 8 * second);
        room.look_anew();
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
        assert_eq!(units.room.next(), Some(8));
        units.end(0);
        assert_eq!(units.begin(), [8, 9]);
        assert_eq!(units.room.next(), Some(0), "the next in turn");
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
        assert_eq!(room.next(), Some(3));
        room.forget(4);
        assert_eq!(room.next(), Some(3));
        room.forget(3);
        assert_eq!(room.next(), None);
    }
}
