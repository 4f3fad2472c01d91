//! A call from one thread to another that its caller may take back until it has begun.
//!
//! The one primitive for that. It travels by whatever means the other thread has: the queue of a
//! [`crate::Control`], a reactor's mailbox, a channel of orders.

use std::sync::Arc;
use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender, channel};
use std::time::{Duration, Instant};

use parking_lot::Mutex;

/// Why a call was not carried out. Nothing was done.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum NotRun {
    /// The thread was busy all the time.
    Busy,
    /// The thread has ended, or dropped the call.
    Gone,
}

/// A call on its way: what is given with it, and the way back. Dropped, it tells the caller that nobody
/// carries it out.
pub struct Call<T, R> {
    given: Arc<Mutex<Option<T>>>,
    answer: Sender<R>,
}

/// The caller's end.
pub struct Caller<T, R> {
    given: Arc<Mutex<Option<T>>>,
    answer: Receiver<R>,
}

/// A call with `given`, and its caller's end.
pub fn call<T, R>(given: T) -> (Call<T, R>, Caller<T, R>) {
    let given = Arc::new(Mutex::new(Some(given)));
    let (tell, told) = channel();
    (Call { given: Arc::clone(&given), answer: tell }, Caller { given, answer: told })
}

impl<T, R> Call<T, R> {
    /// Carries it out by `f`, unless the caller has taken it back.
    pub fn run(self, f: impl FnOnce(T) -> R) {
        // `f` runs without the lock, which the caller takes when its time is over.
        let given = self.given.lock().take();
        if let Some(given) = given {
            _ = self.answer.send(f(given));
        }
    }
}

impl<T, R> Caller<T, R> {
    /// Waits no longer than `timeout` for the call to begin, and then as long as it takes, because the
    /// caller must know what became of it.
    ///
    /// # Errors
    /// [`NotRun`].
    pub fn wait(self, timeout: Duration) -> Result<R, NotRun> {
        match self.answer.recv_timeout(timeout) {
            Ok(answer) => Ok(answer),
            Err(RecvTimeoutError::Timeout) if self.given.lock().take().is_some() => {
                Err(NotRun::Busy)
            }
            Err(RecvTimeoutError::Timeout) => self.answer.recv().map_err(|_| NotRun::Gone),
            Err(RecvTimeoutError::Disconnected) => Err(NotRun::Gone),
        }
    }

    /// Waits until `end` for the answer, for a caller that has no more time, and knows how to undo what
    /// is done too late.
    ///
    /// # Errors
    /// `Timeout`: it was taken back, or it has begun, goes on, and its answer is lost; `Disconnected`:
    /// nobody carries it out.
    pub fn wait_until(self, end: Instant) -> Result<R, RecvTimeoutError> {
        let answer = self.answer.recv_timeout(end.saturating_duration_since(Instant::now()));
        if matches!(answer, Err(RecvTimeoutError::Timeout)) {
            drop(self.given.lock().take());
        }
        answer
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_call_is_carried_out_once_or_taken_back() {
        let (call, caller) = super::call::<_, u32>(20);
        call.run(|given| given + 1);
        assert_eq!(caller.wait(Duration::ZERO), Ok(21));

        let (call, caller) = super::call::<_, u32>(20);
        assert_eq!(caller.wait(Duration::ZERO), Err(NotRun::Busy));
        call.run(|_| unreachable!("it was taken back"));
    }

    #[test]
    fn a_call_that_began_is_waited_for_and_one_that_was_dropped_is_not() {
        let (call, caller) = super::call::<_, u32>(());
        let (begun, begins) = channel();
        let (go, gone) = channel::<()>();
        let other = std::thread::spawn(move || {
            call.run(|()| {
                _ = begun.send(());
                _ = gone.recv();
                7
            });
        });
        begins.recv().unwrap();
        drop(go);
        assert_eq!(caller.wait(Duration::ZERO), Ok(7));
        other.join().unwrap();

        let (call, caller) = super::call::<_, u32>(());
        drop(call);
        assert_eq!(caller.wait(Duration::MAX), Err(NotRun::Gone));
    }

    #[test]
    fn who_has_no_more_time_takes_a_call_back_or_loses_its_answer() {
        let (call, caller) = super::call::<_, u32>(20);
        call.run(|given| given + 1);
        assert_eq!(caller.wait_until(Instant::now()), Ok(21));

        let (call, caller) = super::call::<_, u32>(20);
        assert_eq!(caller.wait_until(Instant::now()), Err(RecvTimeoutError::Timeout));
        call.run(|_| unreachable!("it was taken back"));

        let (call, caller) = super::call::<_, u32>(20);
        let mut given = 0;
        call.run(|number| {
            assert_eq!(caller.wait_until(Instant::now()), Err(RecvTimeoutError::Timeout));
            given = number;
            number
        });
        assert_eq!(given, 20, "what had begun goes on");

        let (call, caller) = super::call::<_, u32>(());
        drop(call);
        assert_eq!(caller.wait_until(Instant::now()), Err(RecvTimeoutError::Disconnected));
    }
}
