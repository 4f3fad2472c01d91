//! Whether a cluster's monitors answer, asked by whoever wants to know.

use std::sync::Arc;
use std::time::{Duration, Instant};

use parking_lot::{Condvar, Mutex};

use crate::calls::spawn;

/// One cluster's monitors, which one thread at a time asks: a call that is not answered stays until they are back.
#[derive(Default)]
pub(crate) struct Monitors {
    state: Mutex<State>,
    changed: Condvar,
}

#[derive(Default)]
struct State {
    /// Since when they are being asked.
    asking: Option<Instant>,
    /// How often they have answered.
    answered: u64,
}

impl Monitors {
    /// Whether they answer `ask` `within` that time. Who comes while they are being asked waits for that
    /// answer, and no longer than the first.
    pub(crate) fn answer(
        self: &Arc<Monitors>,
        within: Duration,
        ask: impl FnOnce() + Send + 'static,
    ) -> bool {
        let mut state = self.state.lock();
        let since = match state.asking {
            Some(since) => since,
            None => {
                let this = Arc::clone(self);
                let asked = spawn("rbd monitors", move || {
                    ask();
                    let mut state = this.state.lock();
                    state.asking = None;
                    state.answered += 1;
                    this.changed.notify_all();
                });
                if asked.is_err() {
                    // Of which nobody else is told: it says nothing of them.
                    return true;
                }
                *state.asking.insert(Instant::now())
            }
        };
        let before = state.answered;
        let waits = |state: &mut State| state.answered == before;
        _ = self.changed.wait_while_until(&mut state, waits, since + within);
        state.answered != before
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::mpsc;

    /// Longer than any answer here takes.
    const LONG: Duration = Duration::from_secs(60);

    #[test]
    fn who_comes_while_they_are_asked_waits_for_that_answer_as_long_as_the_first_would() {
        let monitors = Arc::<Monitors>::default();
        let (answer, answers) = mpsc::channel::<()>();
        let first = monitors.answer(Duration::ZERO, move || _ = answers.recv());
        assert!(!first, "it takes longer");
        let not_asked = || panic!("one that is not answered yet is not asked again");
        assert!(!monitors.answer(Duration::ZERO, not_asked), "nor waited for any more");
        let other = Arc::clone(&monitors);
        let second = std::thread::spawn(move || other.answer(LONG, not_asked));
        // It waits, and looks in vain.
        while !monitors.changed.notify_one() {
            std::thread::yield_now();
        }
        answer.send(()).unwrap();
        assert!(second.join().unwrap());
        assert!(monitors.answer(LONG, || ()), "asked anew");
    }
}
