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
//! So one device that does not answer keeps no other unit from anything. Where many do not, which together
//! have all but a request's length of a part, larger requests of the session's other units there wait for
//! them: that is what a bound means.
//!
//! Nothing here is shared: the room comes back by ends of requests on the reactor that took it, which look
//! at what waits.

/// Bytes of data that a session may have with devices, all its units from all reactors: what disks need to
/// be busy, and no more for others to stand behind. Of more than 16 reactors each has a part of one
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

/// What is in flight: of a unit, or of all.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Load {
    pub(super) requests: u32,
    /// Bytes of their data.
    pub(super) bytes: u64,
}

impl Load {
    #[inline]
    pub(super) fn add(&mut self, bytes: u64) {
        self.requests += 1;
        self.bytes += bytes;
    }

    #[inline]
    pub(super) fn remove(&mut self, bytes: u64) {
        self.requests -= 1;
        self.bytes -= bytes;
    }
}

/// The room of a session on one reactor.
pub(super) struct Room {
    part: u64,
    /// What its units have in flight.
    pub(super) taken: Load,
    /// The unit that is the next to have room: it is idle, and its first request did not fit.
    next: Option<u8>,
}

impl Room {
    /// All that one reactor may have.
    pub(super) fn new() -> Self {
        Room { part: MAX_PART, taken: Load::default(), next: None }
    }

    /// From now on so many `reactors` serve the queues of the session. What is in flight goes on.
    pub(super) fn share(&mut self, reactors: usize) {
        self.part = (MAX_BYTES / (reactors as u64).max(1)).clamp(MIN_PART, MAX_PART);
    }

    /// Whether there is room for a request of `bytes` bytes of the unit `target`, which has `load`.
    #[inline(always)]
    pub(super) fn fits(&self, target: u8, load: Load, bytes: u64) -> bool {
        let all = self.taken.bytes + bytes;
        if load.requests == 0 {
            return bytes <= SMALL || (self.is_free_to(target) && all <= self.part);
        }
        load.requests < MAX_UNIT_REQUESTS
            && (bytes == 0
                || (self.next.is_none()
                    && load.bytes + bytes <= self.part / 4
                    && all <= self.part / 2))
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

    const MIB: u64 = 1 << 20;

    /// A session's units on one reactor, each with requests of a length of its own that never end of
    /// themselves, begun in turn as `waiting` does.
    struct Units {
        room: Room,
        of: Vec<(Load, u64)>,
        turn: usize,
    }

    impl Units {
        fn new(reactors: usize, lengths: impl IntoIterator<Item = u64>) -> Self {
            let mut room = Room::new();
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
                self.room.looked_at(n as u8, !fits && load.requests == 0);
                self.turn = n + 1;
                if !fits {
                    refused += 1;
                    continue;
                }
                load.add(*bytes);
                self.room.taken.add(*bytes);
                begun.push(n);
                refused = 0;
            }
            begun
        }

        fn end(&mut self, n: usize) {
            let (load, bytes) = &mut self.of[n];
            load.remove(*bytes);
            self.room.taken.remove(*bytes);
        }

        fn bytes(&self, n: usize) -> u64 {
            self.of[n].0.bytes
        }
    }

    #[test]
    fn all_parts_together_are_what_a_session_may_have_whatever_it_wants() {
        for reactors in 1..=16 {
            let most = MAX_BYTES / reactors as u64;
            for len in [SMALL, SMALL + 512, 64 << 10, MIB, 3 * MIB, 4 * MIB] {
                let mut units = Units::new(reactors, [len; 255]);
                units.begin();
                let small = if len <= SMALL { 255 * SMALL } else { 0 };
                let taken = units.room.taken.bytes;
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
        let mut room = Room::new();
        room.taken.add(MAX_PART);
        room.looked_at(3, true);
        room.looked_at(4, true);
        assert_eq!(room.next(), Some(3));
        room.forget(4);
        assert_eq!(room.next(), Some(3));
        room.forget(3);
        assert_eq!(room.next(), None);
    }
}
