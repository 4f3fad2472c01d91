//! The loop of a reactor, and where its time goes: the loop writes at each change between busy, idle and
//! asleep; other threads read at any time.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering, fence};

use rustix::time::Timespec;

use crate::cx::RegisteredPoller;
use crate::mailbox::{MAILBOX_DEPTH, Mailbox};
use crate::spin::Spin;
use crate::{Cx, ticks};

/// Turns without an event between two looks at the clock. A turn takes some tens of nanoseconds,
/// so the spin time is kept to about a microsecond.
const CLOCK_EVERY: u32 = 16;

/// A poller has work if it had some in one of so many turns: a guest that waits for its disk has none in most.
const WITH_WORK_TURNS: u64 = 1024;

/// Pollers without work that have their turn beside all that have some. So one guest is served as fast beside
/// many that do nothing, each of which is looked at some turns later.
const IDLE_POLLERS: usize = 2;

/// What a reactor does when nothing happens.
#[derive(Clone, Copy, Debug)]
pub enum Idle {
    /// Spin for ever (`--poll`).
    Poll,
    /// Spin, then arm wake-ups and sleep.
    Adaptive {
        /// Microseconds without an event before sleeping, at most: see [`Spin`].
        spin_us: u64,
    },
}

/// Runs the reactor on the calling thread until a message sets [`Cx::stop`].
pub(crate) fn run(cx: &mut Cx, mailbox: &Mailbox, accounting: &Arc<Accounting>, idle: Idle) {
    let mut spin = match idle {
        Idle::Poll => None,
        Idle::Adaptive { spin_us } => Some(Spin::new(spin_us)),
    };
    let mut doing = Doing::Idle;
    let mut idle_since = ticks::now();
    let mut until_clock = 0;
    // Nothing was found since, either.
    let mut looked_at_all = false;
    while !cx.stop {
        // A turn that finds work is busy from its start. While busy the clock is left alone here: the
        // one idle turn that ends a busy stretch counts with it.
        let begun = if doing == Doing::Busy { 0 } else { ticks::now() };
        if turn(cx, mailbox) > 0 {
            if doing != Doing::Busy {
                doing = Doing::Busy;
                accounting.switch(doing, begun);
                if let Some(spin) = &mut spin {
                    spin.found(begun.saturating_sub(idle_since));
                }
            }
            looked_at_all = false;
            continue;
        }
        if doing == Doing::Busy {
            doing = Doing::Idle;
            idle_since = ticks::now();
            accounting.switch(doing, idle_since);
            until_clock = 0;
            if let Some(spin) = &mut spin {
                let mut with_work = cx.with_work.iter();
                spin.begin(with_work.any(|at| cx.places[*at].poller.is_waiting()));
            }
        }
        let Some(spin) = &mut spin else {
            std::hint::spin_loop();
            continue;
        };
        if until_clock > 0 {
            until_clock -= 1;
            std::hint::spin_loop();
            continue;
        }
        until_clock = CLOCK_EVERY;
        let now = ticks::now();
        let spun = now.saturating_sub(idle_since);
        if spun >= spin.length() {
            if cx.places.len() > IDLE_POLLERS && !looked_at_all {
                // The io_uring may have something for one that had no turn since.
                (cx.look_at_all, looked_at_all, until_clock) = (true, true, 0);
                continue;
            }
            let (slept, found) = sleep(cx, accounting);
            idle_since = ticks::now();
            // Where anything was found, all were looked at.
            (cx.look_at_all, looked_at_all) = (found == 0, false);
            if let Some(woke) = slept {
                spin.slept(spun, woke.saturating_sub(now));
            }
            if found > 0 {
                doing = Doing::Busy;
                spin.found(0);
            }
            until_clock = 0;
        }
    }
}

/// One turn: messages, pollers, io_uring. Returns how many events were handled.
#[inline]
fn turn(cx: &mut Cx, mailbox: &Mailbox) -> u32 {
    let mut events = 0;
    if cx.io.sleeper().take() {
        events += messages(cx, mailbox);
        cx.look_at_all = true;
    }
    cx.turns += 1;
    let busy = cx.with_work.len();
    if busy > 0 && cx.places.len() > busy + IDLE_POLLERS {
        let now = ticks::now();
        cx.look_at_all |= now.saturating_sub(cx.looked_at) > cx.look_ticks;
        if cx.look_at_all {
            cx.looked_at = now;
        }
    }
    let mut n = 0;
    while let Some(at) = cx.with_work.get(n).copied() {
        let place = &mut cx.places[at];
        events += poll(place, cx.turns, busy > 1);
        if cx.turns - place.busy_at > WITH_WORK_TURNS {
            place.listed = false;
            cx.with_work.swap_remove(n);
        } else {
            n += 1;
        }
    }
    let idle = cx.places.len() - cx.with_work.len();
    let all = std::mem::take(&mut cx.look_at_all);
    let mut left = if all { idle } else { IDLE_POLLERS.min(idle) };
    while left > 0 {
        cx.next = if cx.next + 1 < cx.places.len() { cx.next + 1 } else { 0 };
        let place = &mut cx.places[cx.next];
        if place.listed {
            continue;
        }
        left -= 1;
        let found = poll(place, cx.turns, busy > 0);
        if found > 0 {
            place.listed = true;
            cx.with_work.push(cx.next);
        }
        events += found;
    }
    events + cx.io.flush()
}

/// Polls one poller in turn `now`; `contended`: others have work.
#[inline(always)]
fn poll(place: &mut RegisteredPoller, now: u64, contended: bool) -> u32 {
    if contended != place.contended {
        place.contended = contended;
        place.poller.set_contended(contended);
    }
    place.runs += 1;
    let found = place.poller.poll();
    if found > 0 {
        place.busy += 1;
        place.busy_at = now;
    }
    found
}

/// Runs the messages that wait. The notification that brought us here counts as an event of its
/// own: whoever sent it wants the pollers to look.
#[cold]
fn messages(cx: &mut Cx, mailbox: &Mailbox) -> u32 {
    for _ in 0..MAILBOX_DEPTH {
        match mailbox.pop() {
            Some(message) => message(cx),
            None => return 1,
        }
        if cx.stop {
            return 1;
        }
    }
    if !mailbox.is_empty() {
        mailbox.wake();
    }
    1
}

/// Arms all pollers and sleeps, unless work came meanwhile. Returns when it woke, if it slept, in ticks, and how many
/// events the poller handled that it was woken for, and the others then: that has its turn before the others are so
/// much as looked at, as of what they have in memory little is in this processor's cache by then.
#[cold]
fn sleep(cx: &mut Cx, accounting: &Arc<Accounting>) -> (Option<u64>, u32) {
    let mut armed = 0;
    let mut quiet = true;
    let mut wake_at = u64::MAX;
    for place in &mut cx.places {
        armed += 1;
        if !place.poller.arm() {
            quiet = false;
            break;
        }
        wake_at = wake_at.min(place.poller.wake_at());
    }
    let (mut woke, mut found, mut first) = (None, 0, None);
    if quiet {
        let now = ticks::now();
        accounting.switch(Doing::Asleep, now);
        // Kicks, the io_uring and the waker are all in the epoll, and none of them can get lost (see
        // `waker`): time wakes it only where a poller waits for that.
        let timeout = (wake_at != u64::MAX).then(|| timespec(wake_at.saturating_sub(now)));
        let woken_for = cx.io.sleep(timeout.as_ref()).unwrap_or_else(|e| {
            tracing::error!(reactor = cx.index, "epoll_wait failed, so the reactor spins: {e}");
            None
        });
        let now = ticks::now();
        accounting.switch(Doing::Idle, now);
        woke = Some(now);
        if let Some(at) = woken_for.and_then(|id| cx.place_of(id)) {
            found = first_turn(cx, at);
            first = (found > 0).then_some(at);
        }
        if found > 0 {
            accounting.switch(Doing::Busy, now);
        }
    }
    for place in cx.places.iter_mut().take(armed) {
        place.poller.disarm();
    }
    if let Some(at) = first {
        found += turn_of_others(cx, at);
    }
    (woke, found)
}

/// The turn of the poller at that place, for which the reactor woke. Returns how many events it handled. That
/// others have no work is not known yet.
fn first_turn(cx: &mut Cx, at: usize) -> u32 {
    cx.places[at].poller.disarm();
    let contended = cx.places.len() > 1;
    let found = poll_and_list(cx, at, contended);
    if found > 0 {
        cx.io.flush();
    }
    found
}

/// The turn of all others after that, as the reactor woke for one and more may have been called: none of them waits
/// for two turns of that one. Returns how many events they handled.
fn turn_of_others(cx: &mut Cx, first: usize) -> u32 {
    cx.looked_at = ticks::now();
    let others = (0..cx.places.len()).filter(|at| *at != first);
    let found = others.map(|at| poll_and_list(cx, at, true)).sum();
    if found > 0 {
        cx.io.flush();
    }
    found
}

/// Polls the poller at that place, which counts as one with work if it had some.
fn poll_and_list(cx: &mut Cx, at: usize, contended: bool) -> u32 {
    let place = &mut cx.places[at];
    let found = poll(place, cx.turns, contended);
    if found > 0 && !place.listed {
        place.listed = true;
        cx.with_work.push(at);
    }
    found
}

/// So many ticks, and up to a microsecond more: a sleep that long does not end before.
fn timespec(ticks: u64) -> Timespec {
    let ns = ticks::to_ns(ticks).saturating_add(1000);
    Timespec { tv_sec: (ns / 1_000_000_000) as i64, tv_nsec: (ns % 1_000_000_000) as i64 }
}

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
    fn time_adds_up_by_what_it_was_spent_on() {
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
