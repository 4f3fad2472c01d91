//! The loop of a reactor.

use std::sync::Arc;

use crate::accounting::{Accounting, Doing};
use crate::mailbox::{MAILBOX_DEPTH, Mailbox};
use crate::{Cx, ticks};

/// Turns without an event between two looks at the clock. A turn takes some tens of nanoseconds,
/// so the spin time is kept to about a microsecond.
const CLOCK_EVERY: u32 = 16;

/// What a reactor does when nothing happens.
#[derive(Clone, Copy, Debug)]
pub enum Idle {
    /// Spin for ever (`--poll`).
    Poll,
    /// Spin this many microseconds, then arm wake-ups and sleep.
    Adaptive {
        /// Microseconds without an event before sleeping.
        spin_us: u64,
    },
}

/// Runs the reactor on the calling thread until a message sets [`Cx::stop`].
pub(crate) fn run(cx: &mut Cx, mailbox: &Mailbox, accounting: &Arc<Accounting>, idle: Idle) {
    let spin_ticks = match idle {
        Idle::Poll => None,
        Idle::Adaptive { spin_us } => Some(ticks::from_us(spin_us)),
    };
    let mut doing = Doing::Idle;
    let mut idle_since = ticks::now();
    let mut until_clock = 0;
    while !cx.stop {
        // A turn that finds work is busy from its start. While busy the clock is left alone: the
        // one idle turn that ends a busy stretch counts with it.
        let begun = if doing == Doing::Busy { 0 } else { ticks::now() };
        if turn(cx, mailbox) > 0 {
            if doing != Doing::Busy {
                doing = Doing::Busy;
                accounting.switch(doing, begun);
            }
            continue;
        }
        if doing == Doing::Busy {
            doing = Doing::Idle;
            idle_since = ticks::now();
            accounting.switch(doing, idle_since);
            until_clock = 0;
        }
        let Some(spin_ticks) = spin_ticks else {
            std::hint::spin_loop();
            continue;
        };
        if until_clock > 0 {
            until_clock -= 1;
            std::hint::spin_loop();
            continue;
        }
        until_clock = CLOCK_EVERY;
        if ticks::now().saturating_sub(idle_since) >= spin_ticks {
            sleep(cx, accounting);
            idle_since = ticks::now();
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
    }
    cx.turns += 1;
    for place in &mut cx.places {
        let n = place.poller.poll();
        place.busy += u64::from(n > 0);
        events += n;
    }
    events + cx.io.flush()
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

/// Arms all pollers and sleeps, unless work came meanwhile.
#[cold]
fn sleep(cx: &mut Cx, accounting: &Arc<Accounting>) {
    let mut armed = 0;
    let mut quiet = true;
    for place in &mut cx.places {
        armed += 1;
        if !place.poller.arm() {
            quiet = false;
            break;
        }
    }
    if quiet {
        accounting.switch(Doing::Asleep, ticks::now());
        // No timeout: kicks, the io_uring and the waker are all in the epoll, and none of them
        // can get lost (see `waker`).
        if let Err(e) = cx.io.sleep(None) {
            tracing::error!(reactor = cx.index, "epoll_wait failed, so the reactor spins: {e}");
        }
        accounting.switch(Doing::Idle, ticks::now());
    }
    for place in cx.places.iter_mut().take(armed) {
        place.poller.disarm();
    }
}
