//! Calling the guest, and when that is put off for more to come ([`crate::Coalescing`]).
//!
//! What ended is shown in the used ring at once, whoever looks there. Only the call waits, and only
//! while more of the queue is in flight: a driver that has an answer to all that it asked for would
//! wait for nothing.

use std::os::fd::AsFd;

use super::{DevicePoller, RequestQueue};
use crate::coalescing::{Coalescing, IOPS_THRESHOLD};

/// How often the rate of a queue is looked at, in microseconds.
const WINDOW_US: u64 = 10_000;
/// What a call is held back for at most, in microseconds: a delay that a guest can bear whatever it was
/// set to and at any rate.
const MAX_DELAY_US: u64 = 1_000;
/// The same where nobody set anything: a fifth of what a fast SSD takes.
const ADAPTIVE_MAX_US: u64 = 20;
/// One call tells of such a part of what a guest has in flight, where nobody set anything: the requests of
/// the guest take longer by half of that part.
const ADAPTIVE_PART: u64 = 8;
/// How late a thread may be that sleeps until a moment, in microseconds (PR_SET_TIMERSLACK).
const WAKE_UP_US: u64 = 60;
/// With fewer in flight a call would tell of one more request at best.
const ADAPTIVE_DEPTH: u32 = 16;

/// What a queue's calls wait for.
#[derive(Debug, Default)]
pub(super) struct Pace {
    /// When the rate was looked at, in ticks, and what the used index was then.
    window: u64,
    index: u16,
    /// Requests since, as far as an index counts them: only who wants calls asks.
    ended: u32,
    /// Most that the guest waited for since.
    depth: u32,
    /// How long after a call the next one may be.
    delay: u64,
    /// No call before.
    not_before: u64,
    /// One waits.
    waits: bool,
}

impl Pace {
    /// Whether a call at `now` is to wait, of a queue whose used index is `used`, to a guest that waits
    /// for so many requests.
    fn holds(&mut self, setting: Coalescing, used: u16, depth: u32, now: u64) -> bool {
        self.ended = self.ended.saturating_add(u32::from(used.wrapping_sub(self.index)));
        self.index = used;
        self.depth = self.depth.max(depth);
        let since = now.saturating_sub(self.window);
        if since >= reactor::ticks::from_us(WINDOW_US) {
            self.delay = self.delay_of(setting, since);
            (self.window, self.ended, self.depth) = (now, 0, 0);
        }
        now < self.not_before
    }

    /// How long after a call the next one may be, as so many requests ended in `since` ticks.
    fn delay_of(&self, setting: Coalescing, since: u64) -> u64 {
        let us = reactor::ticks::from_us;
        let ended = u64::from(self.ended);
        // In ticks both, so that a window that took longer counts as what it was.
        let rate = u128::from(ended) * u128::from(us(1_000_000)) / u128::from(since.max(1));
        let rate = u64::try_from(rate).unwrap_or(u64::MAX);
        match setting {
            Coalescing::Fixed { delay_base_us, iops_threshold } => {
                let threshold = u64::from(iops_threshold);
                let above = rate.saturating_sub(threshold);
                let delay_us = u64::from(delay_base_us).saturating_mul(above) / threshold.max(1);
                us(delay_us.min(MAX_DELAY_US))
            }
            Coalescing::Adaptive if rate < IOPS_THRESHOLD.into() => 0,
            Coalescing::Adaptive if self.depth < ADAPTIVE_DEPTH => 0,
            Coalescing::Adaptive => {
                let part =
                    u64::from(self.depth).saturating_mul(since) / (ADAPTIVE_PART * ended.max(1));
                part.min(us(ADAPTIVE_MAX_US))
            }
        }
    }

    /// The guest is called.
    #[inline(always)]
    fn called(&mut self, now: impl FnOnce() -> u64) {
        if self.delay != 0 {
            self.not_before = now().saturating_add(self.delay);
        }
    }
}

impl DevicePoller {
    /// Lets the guest see what ended in one queue, and calls it if it wants that.
    #[inline]
    pub(super) fn publish(&mut self, at: usize) {
        let queue = &mut self.queues[at];
        queue.pace.waits = false;
        if queue.muted {
            return;
        }
        if queue.ring.wants_call() {
            if !self.paused && queue.has_more() && queue.holds_call(self.coalescing.get()) {
                (queue.pace.waits, self.held) = (true, true);
                return;
            }
            queue.pace.called(reactor::ticks::now);
            self.counters.interrupts.add(1);
            if let Some(fd) = &queue.call
                && reactor::eventfd::signal(fd.as_fd()).is_err()
            {
                self.blocked();
            }
        }
        self.queues[at].ring.mark_published();
    }

    /// Makes the calls that have waited for long enough, all of a poller that is paused.
    pub(super) fn call_late(&mut self) {
        let now = reactor::ticks::now();
        for at in 0..self.queues.len() {
            let queue = &self.queues[at];
            let is_due = self.paused || now >= queue.pace.not_before || !queue.has_more();
            if queue.pace.waits && is_due {
                self.publish(at);
            }
        }
        self.held = self.queues.iter().any(|queue| queue.pace.waits);
    }

    /// Whether a call is due that soon that a reactor which sleeps would be late for it.
    pub(super) fn calls_soon(&self) -> bool {
        self.held && self.call_at() < reactor::ticks::now() + reactor::ticks::from_us(WAKE_UP_US)
    }

    /// When the first call is due that waits, in ticks.
    pub(super) fn call_at(&self) -> u64 {
        if !self.held {
            return u64::MAX;
        }
        let waiting = self.queues.iter().map(|q| &q.pace).filter(|pace| pace.waits);
        waiting.map(|pace| pace.not_before).min().unwrap_or(u64::MAX)
    }
}

impl RequestQueue {
    /// Whether more of it is to end: it is in flight, or waits in the ring.
    fn has_more(&self) -> bool {
        self.in_flight != 0 || (self.open && self.ring.has_work())
    }

    /// Whether a call that the guest wants is to wait for more.
    fn holds_call(&mut self, setting: Coalescing) -> bool {
        if matches!(setting, Coalescing::Fixed { delay_base_us: 0, .. }) {
            self.pace.delay = 0;
            return false;
        }
        let depth = self.in_flight + u32::from(self.ring.unpublished());
        self.pace.holds(setting, self.ring.next_used(), depth, reactor::ticks::now())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const SETTING: Coalescing = Coalescing::Fixed { delay_base_us: 50, iops_threshold: 10_000 };

    fn us(n: u64) -> u64 {
        reactor::ticks::from_us(n)
    }

    /// The delay after a window in which so many ended, in microseconds, with so many in flight.
    fn delay_us(setting: Coalescing, ended: u16, depth: u32) -> f64 {
        let mut pace = Pace { window: us(1), ..Pace::default() };
        let now = us(1) + us(WINDOW_US);
        assert!(!pace.holds(setting, ended, depth, now));
        pace.delay as f64 / us(1_000) as f64 * 1_000.0
    }

    #[test]
    fn calls_are_held_back_for_longer_the_higher_the_rate() {
        let mut pace = Pace { window: us(1), ..Pace::default() };
        let mut now = us(1) + us(WINDOW_US);
        // 20,000 a second, twice the threshold.
        assert!(!pace.holds(SETTING, 200, 2, now));
        pace.called(|| now);
        let delay = pace.not_before - now;
        assert!((us(49)..=us(51)).contains(&delay), "{delay}");
        assert!(pace.holds(SETTING, 201, 2, now + us(20)));
        assert!(!pace.holds(SETTING, 202, 2, now + us(60)));
        // 40,000 a second, over the end of the index.
        pace.index = u16::MAX - 99;
        pace.ended = 0;
        now += us(WINDOW_US);
        assert!(!pace.holds(SETTING, 300, 2, now));
        pace.called(|| now);
        assert!((us(148)..=us(152)).contains(&(pace.not_before - now)));
    }

    #[test]
    fn no_call_is_held_back_at_the_threshold_or_for_longer_than_a_guest_can_bear() {
        assert_eq!(delay_us(SETTING, 100, 64), 0.0);
        let off = Coalescing::Fixed { delay_base_us: 0, iops_threshold: 10_000 };
        assert_eq!(delay_us(off, 60_000, 64), 0.0);
        let most = Coalescing::Fixed { delay_base_us: u32::MAX, iops_threshold: 1 };
        assert!((delay_us(most, 5_000, 64) - 1_000.0).abs() < 5.0);
    }

    #[test]
    fn where_nobody_set_anything_a_call_tells_of_an_eighth_of_what_is_in_flight() {
        let adaptive = |ended, depth| delay_us(Coalescing::Adaptive, ended, depth);
        // 100,000 a second: ten microseconds each.
        assert!((adaptive(1_000, 16) - 20.0).abs() < 0.5);
        assert!((adaptive(2_000, 32) - 20.0).abs() < 0.5);
        assert!((adaptive(4_000, 32) - 10.0).abs() < 0.5);
        assert!((adaptive(1_000, 128) - 20.0).abs() < 0.5, "no longer than that");
        assert_eq!(adaptive(1_000, 15), 0.0, "few in flight");
        assert_eq!(adaptive(599, 128), 0.0, "a slow disk");
    }
}
