//! Where a reactor's time went. The reactor writes at each change between busy, idle and asleep;
//! other threads read at any time.

use std::sync::atomic::{AtomicU64, Ordering, fence};

use crate::ticks;

/// A snapshot of one reactor's accounting.
#[derive(Clone, Copy, Debug, Default)]
pub struct Stats {
    /// CPU that it is pinned to.
    pub cpu: Option<usize>,
    /// Nanoseconds in loops that handled at least one event.
    pub busy_ns: u64,
    /// Nanoseconds in loops that handled none, spinning.
    pub idle_ns: u64,
    /// Nanoseconds asleep in epoll.
    pub sleep_ns: u64,
    /// Times it went to sleep.
    pub sleeps: u64,
}

/// What a reactor is doing.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Doing {
    Busy = 0,
    Idle = 1,
    Asleep = 2,
}

/// One reactor's accounting: a single writer, guarded by a sequence counter.
pub(crate) struct Accounting {
    /// Odd while the writer is at it.
    sequence: AtomicU64,
    /// Ticks spent, by [`Doing`].
    spent: [AtomicU64; 3],
    doing: AtomicU64,
    /// When it began to do so, in ticks.
    since: AtomicU64,
    sleeps: AtomicU64,
}

impl Accounting {
    pub(crate) fn new() -> Self {
        Accounting {
            sequence: AtomicU64::new(0),
            spent: Default::default(),
            doing: AtomicU64::new(Doing::Idle as u64),
            since: AtomicU64::new(ticks::now()),
            sleeps: AtomicU64::new(0),
        }
    }

    /// The reactor does `next` from `now` on. Only called by its own thread.
    pub(crate) fn switch(&self, next: Doing, now: u64) {
        use Ordering::Relaxed;
        let sequence = self.sequence.load(Relaxed);
        self.sequence.store(sequence + 1, Relaxed);
        fence(Ordering::Release);
        let spent = &self.spent[self.doing.load(Relaxed) as usize];
        let stretch = now.saturating_sub(self.since.load(Relaxed));
        spent.store(spent.load(Relaxed) + stretch, Relaxed);
        self.since.store(now, Relaxed);
        self.doing.store(next as u64, Relaxed);
        if next == Doing::Asleep {
            self.sleeps.store(self.sleeps.load(Relaxed) + 1, Relaxed);
        }
        self.sequence.store(sequence + 2, Ordering::Release);
    }

    /// The state of affairs now, the present stretch included.
    pub(crate) fn read(&self, cpu: Option<usize>) -> Stats {
        use Ordering::Relaxed;
        loop {
            let before = self.sequence.load(Ordering::Acquire);
            let mut spent = [0; 3];
            for (to, from) in spent.iter_mut().zip(&self.spent) {
                *to = from.load(Relaxed);
            }
            let stretch = ticks::now().saturating_sub(self.since.load(Relaxed));
            spent[self.doing.load(Relaxed) as usize] += stretch;
            let sleeps = self.sleeps.load(Relaxed);
            fence(Ordering::Acquire);
            if before.is_multiple_of(2) && self.sequence.load(Relaxed) == before {
                let [busy, idle, asleep] = spent.map(ticks::to_ns);
                return Stats { cpu, busy_ns: busy, idle_ns: idle, sleep_ns: asleep, sleeps };
            }
            std::hint::spin_loop();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn adds_up_by_what_it_did() {
        let a = Accounting::new();
        let t = a.since.load(Ordering::Relaxed);
        a.switch(Doing::Busy, t + 10);
        a.switch(Doing::Asleep, t + 30);
        a.switch(Doing::Idle, t + 70);
        let spent: Vec<_> = a.spent.iter().map(|s| s.load(Ordering::Relaxed)).collect();
        assert_eq!(spent, [20, 10, 40]);
        let s = a.read(Some(1));
        assert_eq!((s.sleeps, s.cpu), (1, Some(1)));
        assert!(s.idle_ns >= ticks::to_ns(10));
    }
}
