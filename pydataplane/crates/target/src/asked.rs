//! A question that is asked again and again, and of which the last answer is known.

use parking_lot::{Condvar, Mutex};
use rpc::{Errno, Error};
use std::sync::Arc;
use std::thread;
use std::time::{Duration, Instant};

/// What is asked again and again, by one thread at a time.
pub struct Asked<T> {
    state: Mutex<State<T>>,
    changed: Condvar,
}

struct State<T> {
    last: Option<T>,
    /// Since when it is being asked.
    asking: Option<Instant>,
    /// How often it was asked, and why it failed last.
    asked: u64,
    failed: Option<Error>,
}

impl<T> Default for Asked<T> {
    fn default() -> Asked<T> {
        let state = State { last: None, asking: None, asked: 0, failed: None };
        Asked { state: Mutex::new(state), changed: Condvar::new() }
    }
}

impl<T: Clone + Send + 'static> Asked<T> {
    /// Asks anew and waits, `timeout` at most. Where it has not been answered for that long already, it does
    /// not wait; nor, unless `patient`, where it was refused when it was asked last.
    pub fn fresh(
        self: &Arc<Self>,
        (timeout, patient): (Duration, bool),
        ask: impl FnOnce() -> Result<T, Error> + Send + 'static,
    ) -> Result<T, Error> {
        let begun = Instant::now();
        let end = begun + timeout;
        let late = || Error::os(Errno::TimedOut, "it has not answered");
        let mut ask = Some(ask);
        let mut mine = None;
        let mut state = self.state.lock();
        let waits = patient || state.failed.is_none();
        loop {
            match (mine, state.asking) {
                // What was asked after this call began.
                (Some(number), _) if state.asked >= number => {
                    return match &state.failed {
                        Some(why) => Err(why.clone()),
                        None => state.last.clone().ok_or_else(late),
                    };
                }
                (_, Some(since)) if since + timeout < begun => return Err(late()),
                (_, None) => {
                    state.asking = Some(Instant::now());
                    mine = Some(state.asked + 1);
                    let (this, ask) = (Arc::clone(self), ask.take().expect("asked once"));
                    let run = move || this.answer(ask());
                    let started = thread::Builder::new().name("pool".into()).spawn(run);
                    if started.is_err() {
                        state.asking = None;
                        return Err(Error::os(Errno::Again, "there is no thread to ask it"));
                    }
                }
                (_, Some(_)) => {}
            }
            if !waits {
                return Err(late());
            }
            if self.changed.wait_until(&mut state, end).timed_out() && mine != Some(state.asked) {
                return Err(late());
            }
        }
    }

    fn answer(&self, answer: Result<T, Error>) {
        let mut state = self.state.lock();
        state.asking = None;
        state.asked += 1;
        match answer {
            Ok(known) => (state.last, state.failed) = (Some(known), None),
            Err(why) => state.failed = Some(why),
        }
        self.changed.notify_all();
    }

    /// What was answered last.
    pub fn known(&self) -> Option<T> {
        self.state.lock().last.clone()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::mpsc;

    /// Longer than any answer here takes.
    const LONG: Duration = Duration::from_secs(60);

    #[test]
    fn what_does_not_answer_is_waited_for_once() {
        let asked: Arc<Asked<u32>> = Arc::default();
        assert_eq!(asked.fresh((LONG, false), || Ok(1)).unwrap(), 1);
        let (answer, answers) = mpsc::channel();
        let hangs = move || Ok(answers.recv().unwrap());
        assert!(asked.fresh((Duration::from_millis(20), false), hangs).is_err());
        assert_eq!(asked.known(), Some(1));
        thread::sleep(Duration::from_millis(20));
        let again = || -> Result<u32, Error> { unreachable!("it is being asked still") };
        assert!(asked.fresh((Duration::from_millis(10), false), again).is_err());
        answer.send(2).unwrap();
        // What was asked before this call is not its answer.
        assert_eq!(asked.fresh((LONG, true), || Ok(3)).unwrap(), 3);
    }

    #[test]
    fn who_is_not_patient_does_not_wait_after_a_refusal() {
        let asked: Arc<Asked<u32>> = Arc::default();
        let refuses = || Err(Error::internal("no"));
        assert_eq!(asked.fresh((LONG, false), refuses).unwrap_err().message, "no");
        let (answer, answers) = mpsc::channel();
        assert!(asked.fresh((LONG, false), move || Ok(answers.recv().unwrap())).is_err());
        answer.send(4).unwrap();
        while asked.known() != Some(4) {
            thread::yield_now();
        }
        assert_eq!(asked.fresh((LONG, false), || Ok(5)).unwrap(), 5);
    }
}
