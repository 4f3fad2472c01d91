//! How many requests each owner may have with a disk that several share.
//!
//! A disk serves what it has more or less in order. Who keeps 32 requests with it makes everybody else's
//! wait for 32, and gains little itself once the disk is as busy as it can be: then a deeper queue means
//! longer waits alone. So while several owners are active each may have the same number of requests with
//! the disk. That is [`FLOOR`] to begin with; what they take then is the disk's own time, and the number
//! grows for as long as they hardly take longer with it, or for as long as all active owners want more: then
//! nobody waits for others longer than they for him, and the disk is best used. A fast disk, which does many things at a time, so
//! ends with no limit that anybody notices; one whose requests queue stays near [`FLOOR`]. Who needs less
//! than that leaves the rest of the disk to the others.
//!
//! What the disk's own time is is measured again every [`AGAIN_US`], as the disk may have changed.

/// Requests that each owner may always have with the disk.
pub(super) const FLOOR: u32 = 4;
/// No limit.
pub(in crate::file) const NO_LIMIT: u32 = u32::MAX;
/// As many as a channel takes: a limit of so many is none for most.
const MOST: u32 = 256;
/// Requests that have to end before their time says anything.
const SAMPLES: u64 = 32;
/// Between two measurements of the disk's own time.
const AGAIN_US: u64 = 2_000_000;

/// What happened since the last look.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Seen {
    /// Owners that were active lately.
    pub owners: usize,
    /// Those of them that had a request which had to wait for its share.
    pub pressed: usize,
    /// Requests that ended and whose time counts.
    pub ended: u64,
    /// That time, in ticks.
    pub ticks: u64,
}

/// What is being found out.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Phase {
    /// One owner at most: nothing.
    Alone,
    /// The number has just become [`FLOOR`]: what had been sent before has to end.
    Settling,
    /// The disk's own time.
    Measuring,
    /// Whether there is room for more.
    Trying,
}

/// The number, and what it was decided by.
#[derive(Debug)]
pub(super) struct Policy {
    phase: Phase,
    /// The number that was found, at least [`FLOOR`].
    share: u32,
    /// Mean time of a request with [`FLOOR`] of each owner, in ticks.
    own_time: u64,
    /// When that was measured, in ticks.
    measured: u64,
    /// Not yet enough to decide by.
    so_far: Seen,
    again_ticks: u64,
}

impl Policy {
    pub(super) fn new() -> Self {
        Policy {
            phase: Phase::Alone,
            share: FLOOR,
            own_time: 0,
            measured: 0,
            so_far: Seen::default(),
            again_ticks: reactor::ticks::from_us(AGAIN_US),
        }
    }

    /// Requests that each owner may have with the disk from `now` (in ticks) on.
    pub(super) fn look(&mut self, now: u64, seen: &Seen) -> u32 {
        if seen.owners < 2 {
            self.begin(Phase::Alone);
            return NO_LIMIT;
        }
        if self.phase == Phase::Alone {
            self.begin(Phase::Settling);
            return FLOOR;
        }
        self.so_far.ended += seen.ended;
        self.so_far.ticks += seen.ticks;
        self.so_far.pressed = self.so_far.pressed.max(seen.pressed);
        self.so_far.owners = self.so_far.owners.max(seen.owners);
        if self.so_far.ended >= SAMPLES {
            self.decide(now, self.so_far.ticks / self.so_far.ended);
        }
        if self.phase == Phase::Trying { self.share } else { FLOOR }
    }

    fn begin(&mut self, phase: Phase) {
        self.phase = phase;
        self.so_far = Seen::default();
    }

    /// Goes on after requests that took `mean` ticks each.
    fn decide(&mut self, now: u64, mean: u64) {
        let Seen { owners, pressed, .. } = self.so_far;
        match self.phase {
            Phase::Alone | Phase::Settling => return self.begin(Phase::Measuring),
            Phase::Measuring => {
                (self.own_time, self.measured) = (mean, now);
                // From where it was: a fast disk is not to begin again each time.
                return self.begin(Phase::Trying);
            }
            Phase::Trying => {}
        }
        let step = (self.share / 4).max(1);
        if pressed == owners {
            self.share = (self.share + step).min(MOST);
        } else if mean > self.own_time.saturating_mul(3) / 2 {
            self.share = (self.share - step).max(FLOOR);
        } else if pressed > 0 && mean <= self.own_time.saturating_mul(5) / 4 {
            self.share = (self.share + step).min(MOST);
        }
        self.own_time = self.own_time.min(mean);
        let old = now.saturating_sub(self.measured) > self.again_ticks;
        self.begin(if old { Phase::Settling } else { Phase::Trying });
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Looks of a millisecond at a disk that does `parallel` requests at a time, each in 100 us. `hogs` want
    /// 64 each, and others one each.
    fn share_after(
        policy: &mut Policy,
        looks: u64,
        (hogs, others): (usize, usize),
        parallel: u64,
    ) -> u32 {
        let ms = reactor::ticks::from_us(1000);
        let mut share = FLOOR;
        for nth in 1..=looks {
            let flying = u64::from(share.min(64)) * hogs as u64 + others as u64;
            let ended = parallel.min(flying) * 10;
            let each = ms / 10 * flying.max(parallel) / parallel;
            let pressed = if share < 64 { hogs } else { 0 };
            let seen = Seen { owners: hogs + others, pressed, ended, ticks: ended * each };
            share = policy.look(nth * ms, &seen);
        }
        share
    }

    #[test]
    fn a_lone_owner_has_no_limit() {
        let mut policy = Policy::new();
        let seen = Seen { owners: 1, pressed: 1, ended: 100, ticks: 1 << 40 };
        for now in 0..100 {
            assert_eq!(policy.look(now, &seen), NO_LIMIT);
        }
        let seen = Seen { owners: 2, ..seen };
        assert_eq!(policy.look(100, &seen), FLOOR);
        assert_eq!(policy.look(101, &Seen { owners: 1, ..seen }), NO_LIMIT);
        assert_eq!(policy.look(102, &Seen { owners: 0, ..seen }), NO_LIMIT);
    }

    #[test]
    fn where_requests_queue_each_owner_has_few() {
        for parallel in [1, 4] {
            for owners in [(1, 1), (4, 4), (31, 1)] {
                let mut policy = Policy::new();
                let share = share_after(&mut policy, 1000, owners, parallel);
                assert!(share <= FLOOR + 2, "{share} for {owners:?} of {parallel} at a time");
            }
        }
    }

    #[test]
    fn where_all_want_more_each_has_about_what_it_wants() {
        for owners in [(2, 0), (32, 0)] {
            let mut policy = Policy::new();
            share_after(&mut policy, 300, owners, 4);
            assert!((40..=100).contains(&policy.share), "{} for {owners:?}", policy.share);
            // Until one comes that does not.
            let share = share_after(&mut policy, 500, (owners.0, 1), 4);
            assert!(share <= FLOOR + 2, "{share} for {owners:?}");
        }
    }

    #[test]
    fn a_disk_that_does_many_things_at_a_time_ends_without_a_limit() {
        let mut policy = Policy::new();
        assert!(share_after(&mut policy, 60, (1, 1), 128) >= 64);
        // It is asked again how fast it is, and goes on from there.
        let few = (1..20).filter(|_| share_after(&mut policy, 300, (1, 1), 128) < 64).count();
        assert!(few < 3, "{few}");
        // It is slower from now on.
        assert!(share_after(&mut policy, 5000, (1, 1), 2) <= FLOOR + 2);
    }

    #[test]
    fn a_disk_that_became_slower_and_does_many_things_at_a_time_ends_without_a_limit() {
        let mut policy = Policy::new();
        let ms = reactor::ticks::from_us(1000);
        let mut looks = 0;
        let mut share_after = |each: u64, count: u64| {
            let mut share = FLOOR;
            for _ in 0..count {
                looks += 1;
                let pressed = usize::from(share < 64);
                let seen = Seen { owners: 2, pressed, ended: SAMPLES, ticks: SAMPLES * each };
                share = policy.look(looks * ms, &seen);
            }
            share
        };
        assert!(share_after(ms / 10, 60) >= 64);
        assert!(share_after(ms, 60) <= FLOOR + 2, "each takes longer than with few of them");
        // With few of them, too.
        assert!(share_after(ms, 2 * AGAIN_US / 1000) >= 64);
    }

    #[test]
    fn the_disks_own_time_is_the_least_that_was_seen() {
        let mut policy = Policy::new();
        let mut look = |mean: u64| {
            let seen = Seen { owners: 2, pressed: 1, ended: SAMPLES, ticks: SAMPLES * mean };
            policy.look(0, &seen)
        };
        // Something else kept the disk busy while it was measured.
        for _ in 0..3 {
            assert_eq!(look(1000), FLOOR);
        }
        let more = look(400);
        assert!(more > FLOOR);
        // Less than was measured, but more than the disk has been seen to take.
        assert!(look(900) < more);
    }

    #[test]
    fn nothing_is_decided_by_few_requests() {
        let mut policy = Policy::new();
        let seen = Seen { owners: 2, pressed: 1, ended: SAMPLES - 1, ticks: 1000 };
        policy.look(0, &seen);
        policy.look(1, &seen);
        assert_eq!(policy.phase, Phase::Settling);
        policy.look(2, &seen);
        assert_eq!(policy.phase, Phase::Measuring);
    }
}
