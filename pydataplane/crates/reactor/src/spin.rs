//! How long a reactor spins before it sleeps.

use crate::ticks;

/// What wakes a reactor sooner than that after it fell asleep, in microseconds, may have waited for its CPU.
const SOON_US: u64 = 20;

/// What comes that soon after the last event, in microseconds, says nothing of spinning: who falls asleep at
/// once sees it, too.
const AT_ONCE_US: u64 = 2;

/// All of the last waits were short enough to spin for.
const ALL_SHORT: u32 = 1 << 16;

/// A wait counts this much (a power of two) less than all before it together: 1/16 of the mean.
const SHARE: u32 = 4;

/// Fewer than that were: a reactor no longer spins for what is under way.
const ENOUGH_SHORT: u32 = ALL_SHORT / 8 * 7;

/// How long a reactor spins.
///
/// The kernel may need its CPU to end the I/O that it spins for: it ends direct writes in threads of its own,
/// on the CPU of the interrupt, and those wait until the reactor sleeps. They wake it at once then. So after
/// that it spins half as long, until none at all; after a longer sleep, as long as it may.
///
/// And a device's own threads may need it, as those of librbd's do, for I/O that takes longer than a reactor
/// may spin. So while I/O is under way it spins only if nearly all such waits of late were short enough, which
/// it sees by how long it sleeps when it does not spin, too.
pub(crate) struct Spin {
    /// In ticks, at most.
    most: u64,
    /// In ticks, now.
    now: u64,
    soon: u64,
    at_once: u64,
    /// I/O is under way, and how long this wait for it takes is not known yet.
    waits: bool,
    /// How many of the last waits for I/O were no longer than `most`, of [`ALL_SHORT`].
    short: u32,
}

impl Spin {
    pub(crate) fn new(us: u64) -> Self {
        let most = ticks::from_us(us);
        let (soon, at_once) = (ticks::from_us(SOON_US), ticks::from_us(AT_ONCE_US));
        Spin { most, now: most, soon, at_once, waits: false, short: ALL_SHORT }
    }

    /// A turn found nothing, the first since the last event; `waits`: I/O is under way.
    pub(crate) fn begin(&mut self, waits: bool) {
        self.waits = waits;
    }

    /// How many ticks it spins now, from the first turn that found nothing.
    pub(crate) fn length(&self) -> u64 {
        if self.leaves_out() { 0 } else { self.now }
    }

    /// It found something before it fell asleep, so many ticks after the last event.
    pub(crate) fn found(&mut self, ticks: u64) {
        if std::mem::take(&mut self.waits) && ticks > self.at_once {
            self.count(ticks);
        }
    }

    /// It spun for so many ticks, then slept for so many.
    pub(crate) fn slept(&mut self, spun: u64, slept: u64) {
        let soon = slept < self.soon;
        let left_out = self.leaves_out();
        if !left_out {
            self.now = if soon { self.now / 2 } else { self.most };
        }
        // What it kept its CPU from says nothing of the device.
        if std::mem::take(&mut self.waits) && (left_out || !soon) {
            self.count(spun + slept);
        }
    }

    /// A wait for I/O took so many ticks.
    fn count(&mut self, ticks: u64) {
        if ticks <= self.most {
            self.short += (ALL_SHORT - self.short) >> SHARE;
        } else {
            self.short -= self.short >> SHARE;
        }
    }

    /// It does not spin in this wait.
    fn leaves_out(&self) -> bool {
        self.waits && self.short < ENOUGH_SHORT
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_waited_for_its_cpu_has_a_reactor_spin_less() {
        let mut spin = Spin::new(50);
        let us = ticks::from_us;
        let mut lens = Vec::new();
        for slept in [19, 5, 5, 5, 5, 5, 5, 21, 1] {
            spin.slept(spin.now, us(slept));
            lens.push(ticks::to_ns(spin.now).div_ceil(1000));
        }
        assert_eq!(lens, [25, 13, 7, 4, 2, 1, 1, 50, 25]);
        (0..40).for_each(|_| spin.slept(0, 0));
        assert_eq!(spin.now, 0);
    }

    /// A wait that takes so many microseconds; returns for how many of them a reactor would have spun, at most.
    fn wait(spin: &mut Spin, waits: bool, us: u64) -> u64 {
        spin.begin(waits);
        let (length, took) = (spin.length(), ticks::from_us(us));
        if took <= length {
            spin.found(took);
        } else {
            spin.slept(length, took - length);
        }
        ticks::to_ns(length).div_ceil(1000)
    }

    #[test]
    fn for_a_device_that_takes_long_a_reactor_spins_no_more_until_it_is_fast() {
        let mut spin = Spin::new(50);
        let spun = (0..100).filter(|_| wait(&mut spin, true, 300) > 0).count();
        assert_eq!(spun, 3);
        // One end in two comes soon after another, and a reactor would spin in vain for the others.
        let spun = (0..100).filter(|n| wait(&mut spin, true, [10, 300][n % 2]) > 0).count();
        assert_eq!(spun, 0);
        // For a guest's next request it spins as ever, and learns nothing of the device.
        for us in [10, 300, 10] {
            assert_eq!(wait(&mut spin, false, us), 50);
        }
        assert_eq!(wait(&mut spin, true, 300), 0);
        // It was replaced by a fast one.
        let spun = (0..100).filter(|_| wait(&mut spin, true, 30) > 0).count();
        assert!((60..100).contains(&spun), "{spun}");
        assert_eq!(wait(&mut spin, true, 30), 50);
    }

    #[test]
    fn for_a_device_that_is_fast_but_for_some_io_a_reactor_spins() {
        let mut spin = Spin::new(50);
        let waits = (0..1000).map(|n| wait(&mut spin, true, if n % 16 == 0 { 300 } else { 45 }));
        assert!(waits.into_iter().all(|us| us == 50));
    }

    #[test]
    fn what_comes_at_once_does_not_make_a_slow_device_fast() {
        let mut spin = Spin::new(50);
        (0..100).for_each(|_| _ = wait(&mut spin, true, 300));
        for _ in 0..100 {
            spin.begin(true);
            spin.found(ticks::from_us(1));
        }
        assert_eq!(wait(&mut spin, true, 300), 0);
    }

    #[test]
    fn what_waited_for_the_cpu_of_the_reactor_is_not_taken_for_slow() {
        let mut spin = Spin::new(50);
        // It came as soon as the reactor slept, however long that had spun.
        for _ in 0..10 {
            spin.begin(true);
            spin.slept(spin.length(), ticks::from_us(5));
        }
        assert_eq!((spin.short, spin.length()), (ALL_SHORT, ticks::from_us(50) >> 10));
    }
}
