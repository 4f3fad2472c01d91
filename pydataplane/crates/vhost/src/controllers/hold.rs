//! All controllers held still, at the same time, for another process to go on with them.
//!
//! Guests wait from when the first one is held until all go on elsewhere, so none may wait for another's
//! disk. First each controller is held by itself: one whose I/O ends quickly goes on at once, and one
//! whose I/O takes long stays held until it has ended, while all others are served. Then those others
//! are held, which takes none of them long; where it does, because a disk became slow just now, they go
//! on, and all of it is tried again, each time longer and never beyond the time that is left. A disk
//! that does not answer keeps its own guest waiting, until it is given up, and nobody else.
//!
//! What an old program has with a disk cannot be left to the in-flight region instead: it may reach the
//! disk after the new program wrote newer data there.

use std::collections::BTreeSet;
use std::time::{Duration, Instant};

use super::Controllers;
use super::handover::wait_for;
use crate::error::ControllerError;
use crate::mailbox::Order;

/// How long those whose I/O was quick are held for others of them, the first time; see [`Tries`].
const TRY: Duration = Duration::from_millis(50);
/// How much longer than its I/O the answer of a controller's thread may take.
const MARGIN: Duration = Duration::from_secs(1);

/// How long each try may take: twice as long as the one before, as threads get the processor late where
/// there is little of it, and no longer than is left.
struct Tries(Duration);

impl Tries {
    /// The next one, of which all may take `left` together; `None`: there is no time for it.
    fn next(&mut self, left: Duration) -> Option<Duration> {
        let time = self.0.min(left);
        self.0 *= 2;
        (!time.is_zero()).then_some(time)
    }
}

impl Controllers {
    /// Holds all controllers still, at the same time: no peer, message or request is taken any more,
    /// and what was in flight has ended, within `timeout`. Those whose I/O takes long are held first,
    /// while the others are served. Returns since when no guest is served at all.
    ///
    /// # Errors
    /// [`ControllerError::HandOver`] names a controller whose I/O has not ended; then all go on.
    pub fn hold(&self, timeout: Duration) -> Result<Instant, ControllerError> {
        let held = self.hold_by(Instant::now() + timeout);
        if held.is_err() {
            self.release();
        }
        held
    }

    fn hold_by(&self, end: Instant) -> Result<Instant, ControllerError> {
        let mut held = BTreeSet::new();
        let mut tries = Tries(TRY);
        let mut late = String::new();
        loop {
            self.hold_slow(&mut held, end)?;
            let since = Instant::now();
            let Some(time) = tries.next(end.saturating_duration_since(since)) else { break };
            match self.hold_rest(&held, time) {
                None => return Ok(since),
                Some(name) => late = name,
            }
            self.release_those(|name| !held.contains(name));
        }
        let why = match late.is_empty() {
            true => "I/O that took long ended too late for all others to be held".to_owned(),
            false => format!(
                "controller {late} still waits for I/O of its VM whenever the others do not; see \
                 what its bdevs are on"
            ),
        };
        Err(ControllerError::HandOver(why))
    }

    /// Holds the controllers whose I/O takes long, until `end` at most, and adds their names to `held`.
    fn hold_slow(&self, held: &mut BTreeSet<String>, end: Instant) -> Result<(), ControllerError> {
        for (name, caller) in self.ask(|name| !held.contains(name), Order::HoldIfSlow, |_| end) {
            if wait_for(&name, caller, end + MARGIN)? {
                tracing::info!(controller = name, "held before the others, as its I/O takes long");
                held.insert(name);
            }
        }
        Ok(())
    }

    /// Holds all others than `held`, who may take `time` for it. One that took longer, if there is one.
    fn hold_rest(&self, held: &BTreeSet<String>, time: Duration) -> Option<String> {
        let end = Instant::now() + time;
        let asked = self.ask(|name| !held.contains(name), Order::Hold, |_| end);
        let mut waited = asked.into_iter().map(|(name, caller)| {
            let held = wait_for(&name, caller, end);
            (name, held)
        });
        waited.find(|(_, held)| held.is_err()).map(|(name, _)| name)
    }

    /// Lets all controllers go on.
    pub fn release(&self) {
        self.release_those(|_| true);
    }

    fn release_those(&self, which: impl Fn(&str) -> bool) {
        for (_, entry) in self.entries().iter().filter(|(name, _)| which(name)) {
            entry.controller.mailbox.send(Order::Release);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn tries_grow_and_end_with_the_time() {
        let total = Duration::from_secs(5);
        let mut tries = Tries(TRY);
        let (mut spent, mut all) = (Duration::ZERO, Vec::new());
        while let Some(time) = tries.next(total - spent) {
            spent += time;
            all.push(time);
        }
        assert_eq!(all[..3], [TRY, 2 * TRY, 4 * TRY]);
        // The last one is what was left.
        assert_eq!(spent, total);
        assert_eq!(Tries(TRY).next(Duration::ZERO), None);
        assert_eq!(Tries(TRY).next(TRY / 2), Some(TRY / 2));
    }
}
