//! How much of the reactors' time the messages of one peer may take, and as much again the task
//! management of its guest. Both belong to the controller and outlive sessions: who connects again
//! has no more.
//!
//! Most messages of vhost-user have reactors stop, drain or swap something, so a peer that sends them
//! without end would keep them from the guests of others. Time is what is bounded, as messages cost
//! very different amounts: a peer has some in advance, enough for any start, reset or migration of a
//! VM, and earns more as time goes by. One that has used it up is heard later, and nobody else waits.

use std::time::{Duration, Instant};

/// Time that a peer has in advance.
const BURST: Duration = Duration::from_secs(1);
/// Of how many units of time that go by one is earned: in the long run its messages take an eighth.
const EARNED: u32 = 8;
/// What a message takes at least: reading and answering it.
const LEAST: Duration = Duration::from_micros(20);
/// What a message takes at most: I/O that it waits for takes no time of a reactor's.
const MOST: Duration = Duration::from_millis(50);

/// What one peer has left.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Budget {
    left: Duration,
    /// Time that it may not be heard for, beyond `left`, which is zero then.
    debt: Duration,
    since: Instant,
}

impl Budget {
    /// Of a peer that came at `now`.
    pub(crate) fn new(now: Instant) -> Budget {
        Budget { left: BURST, debt: Duration::ZERO, since: now }
    }

    /// A message took that long, and ended at `now`.
    pub(crate) fn charge(&mut self, took: Duration, now: Instant) {
        self.earn(now);
        let took = took.clamp(LEAST, MOST);
        let paid = took.min(self.left);
        self.left -= paid;
        self.debt += took - paid;
    }

    /// How long its next message has to wait, from `now`; zero: not at all.
    pub(crate) fn wait(&self, now: Instant) -> Duration {
        (self.debt * EARNED).saturating_sub(now.saturating_duration_since(self.since))
    }

    fn earn(&mut self, now: Instant) {
        let mut earned = now.saturating_duration_since(self.since) / EARNED;
        self.since = now;
        let paid = earned.min(self.debt);
        self.debt -= paid;
        earned -= paid;
        self.left = (self.left + earned).min(BURST);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_peer_that_sends_without_end_has_an_eighth_of_the_time() {
        let began = Instant::now();
        let (mut now, mut used) = (began, Duration::ZERO);
        let mut budget = Budget::new(began);
        let message = Duration::from_millis(2);
        while now - began < Duration::from_secs(100) {
            now += budget.wait(now);
            now += message;
            used += message;
            budget.charge(message, now);
        }
        let most = BURST + (now - began) / EARNED + message;
        assert!(used <= most, "{used:?} of {:?}", now - began);
        assert!(used >= most.mul_f64(0.95), "{used:?}: it is not kept from more than that");
    }

    #[test]
    fn a_start_of_a_vm_never_waits_and_a_message_that_waited_for_io_costs_little() {
        let mut now = Instant::now();
        let mut budget = Budget::new(now);
        for _ in 0..66 * 6 {
            assert_eq!(budget.wait(now), Duration::ZERO);
            now += Duration::from_millis(2);
            budget.charge(Duration::from_millis(2), now);
        }
        let mut budget = Budget::new(now);
        now += Duration::from_secs(120);
        budget.charge(Duration::from_secs(120), now);
        assert_eq!(budget.wait(now), Duration::ZERO);
    }

    #[test]
    fn time_that_goes_by_is_earned_but_not_without_end() {
        let mut now = Instant::now();
        let mut budget = Budget::new(now);
        now += Duration::from_secs(3600);
        for _ in 0..100_000 {
            budget.charge(Duration::ZERO, now);
        }
        // 2 s of messages, of which 1 s was there.
        assert_eq!(budget.wait(now), EARNED * Duration::from_secs(1));
    }
}
