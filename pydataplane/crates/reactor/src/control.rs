//! A thread that owns some state, does its own work, and runs what other threads ask of it.
//!
//! For a thread that may block, as an lvstore's for metadata does, beside the reactors, which may not.
//! Others hand it closures and wait for the result, with a limit until the closure begins
//! ([`crate::call()`]).

use std::collections::VecDeque;
use std::io;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc;
use std::sync::{Arc, OnceLock};
use std::thread::{self, JoinHandle, Thread};
use std::time::Duration;

use parking_lot::Mutex;

use crate::call::{self, NotRun};

/// Wakes a [`Control`] thread. Costs one atomic swap when it was rung already.
#[derive(Clone, Default)]
pub struct Bell(Arc<BellState>);

#[derive(Default)]
struct BellState {
    rung: AtomicBool,
    thread: OnceLock<Thread>,
}

impl Bell {
    /// Publish the work first, then ring.
    pub fn ring(&self) {
        if !self.0.rung.swap(true, Ordering::AcqRel)
            && let Some(thread) = self.0.thread.get()
        {
            thread.unpark();
        }
    }
}

/// When a thread looks for its own work again.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Next {
    /// At once: there is more to do.
    Now,
    /// When the bell rings, or after that time.
    Within(Duration),
    /// When the bell rings.
    WhenRung,
}

/// What a [`Control`] thread does of its own accord.
pub trait Work {
    /// One bounded piece of its own work; between two of them it runs what others ask.
    fn round(&mut self) -> Next;
    /// The thread ends.
    fn end(self);
}

type Queued<S> = Box<dyn FnOnce(&mut S) + Send>;

struct Shared<S> {
    /// In order; `None` once the thread ended, so that nobody waits for ever.
    calls: Mutex<Option<VecDeque<Queued<S>>>>,
    bell: Bell,
    stop: AtomicBool,
}

struct End<S>(Arc<Shared<S>>);

impl<S> Drop for End<S> {
    fn drop(&mut self) {
        let left = self.0.calls.lock().take();
        drop(left);
    }
}

/// The thread as others see it. Dropping it ends the thread after what it was given before.
pub struct Control<S> {
    shared: Arc<Shared<S>>,
    join: Mutex<Option<JoinHandle<()>>>,
}

impl<S: Work + 'static> Control<S> {
    /// Starts the thread, which makes its state with `open` first and hands out what `open` found.
    ///
    /// # Errors
    /// What `open` says; `failed` makes its error where there is no thread.
    pub fn start<R: Send + 'static, E: Send + 'static>(
        name: &str,
        open: impl FnOnce(Bell) -> Result<(S, R), E> + Send + 'static,
        failed: impl FnOnce(io::Error) -> E,
    ) -> Result<(Control<S>, R), E> {
        let shared = Arc::new(Shared {
            calls: Mutex::new(Some(VecDeque::new())),
            bell: Bell::default(),
            stop: AtomicBool::new(false),
        });
        let (tell, told) = mpsc::channel();
        let its = shared.clone();
        let thread = thread::Builder::new().name(name.into()).spawn(move || {
            let _ = its.bell.0.thread.set(thread::current());
            let _end = End(its.clone());
            match open(its.bell.clone()) {
                Ok((state, found)) => {
                    let _ = tell.send(Ok(found));
                    run(&its, state);
                }
                Err(e) => drop(tell.send(Err(e))),
            }
        });
        match thread {
            Ok(join) => match told.recv() {
                Ok(found) => {
                    found.map(|found| (Control { shared, join: Mutex::new(Some(join)) }, found))
                }
                Err(e) => Err(failed(io::Error::other(e))),
            },
            Err(e) => Err(failed(e)),
        }
    }

    /// Runs `f` on the thread and returns its result. Waits no longer than `timeout` for it to begin,
    /// and then as long as it takes.
    ///
    /// # Errors
    /// [`NotRun`].
    pub fn call<R: Send + 'static>(
        &self,
        timeout: Duration,
        f: impl FnOnce(&mut S) -> R + Send + 'static,
    ) -> Result<R, NotRun> {
        self.shared.call(timeout, f)
    }

    /// The means to call the thread for who does not own it. A call ends as [`NotRun::Gone`] once it has ended.
    pub fn ask(&self) -> Ask<S> {
        Ask(Arc::clone(&self.shared))
    }

    /// Has the thread run `f`, after what it was told before, and waits for nothing. Where it has ended `f` is
    /// dropped.
    pub fn tell(&self, f: impl FnOnce(&mut S) + Send + 'static) {
        self.shared.tell(f);
    }

    /// Wakes the thread.
    pub fn bell(&self) -> Bell {
        self.shared.bell.clone()
    }
}

impl<S> Shared<S> {
    fn call<R: Send + 'static>(
        &self,
        timeout: Duration,
        f: impl FnOnce(&mut S) -> R + Send + 'static,
    ) -> Result<R, NotRun>
    where
        S: 'static,
    {
        let (call, caller) = call::call(f);
        self.tell(move |state| call.run(|f| f(state)));
        caller.wait(timeout)
    }

    fn tell(&self, f: impl FnOnce(&mut S) + Send + 'static) {
        let queued: Queued<S> = Box::new(f);
        match self.calls.lock().as_mut() {
            Some(calls) => calls.push_back(queued),
            None => drop(queued),
        }
        self.bell.ring();
    }
}

/// The means to call a [`Control`] thread, which does not keep it.
pub struct Ask<S>(Arc<Shared<S>>);

impl<S: 'static> Ask<S> {
    /// As [`Control::call`].
    ///
    /// # Errors
    /// [`NotRun`].
    pub fn call<R: Send + 'static>(
        &self,
        timeout: Duration,
        f: impl FnOnce(&mut S) -> R + Send + 'static,
    ) -> Result<R, NotRun> {
        self.0.call(timeout, f)
    }
}

fn run<S: Work>(shared: &Shared<S>, mut state: S) {
    loop {
        shared.bell.0.rung.swap(false, Ordering::AcqRel);
        let call = shared.calls.lock().as_mut().and_then(VecDeque::pop_front);
        let called = call.is_some();
        if let Some(call) = call {
            call(&mut state);
        } else if shared.stop.load(Ordering::Acquire) {
            return state.end();
        }
        let next = state.round();
        if called || shared.bell.0.rung.load(Ordering::Acquire) {
            continue;
        }
        match next {
            Next::Now => {}
            Next::Within(time) => thread::park_timeout(time),
            Next::WhenRung => thread::park(),
        }
    }
}

impl<S> Drop for Control<S> {
    fn drop(&mut self) {
        self.shared.stop.store(true, Ordering::Release);
        self.shared.bell.ring();
        if let Some(join) = self.join.lock().take() {
            let _ = join.join();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    struct Counter {
        calls: u32,
        ended: mpsc::Sender<u32>,
    }

    impl Work for Counter {
        fn round(&mut self) -> Next {
            Next::WhenRung
        }
        fn end(self) {
            let _ = self.ended.send(self.calls);
        }
    }

    fn counter() -> (Control<Counter>, mpsc::Receiver<u32>) {
        let (ended, end) = mpsc::channel();
        let open = move |_| Ok((Counter { calls: 0, ended }, ()));
        let (control, ()) = Control::start("counter", open, |e: io::Error| e).unwrap();
        (control, end)
    }

    #[test]
    fn calls_run_in_order_on_the_state_and_all_of_them_before_the_end() {
        let (control, end) = counter();
        let add = |counter: &mut Counter| {
            counter.calls += 1;
            counter.calls
        };
        assert_eq!(control.call(Duration::MAX, add), Ok(1));
        assert_eq!(control.call(Duration::MAX, add), Ok(2));
        drop(control);
        assert_eq!(end.recv(), Ok(2));
    }

    #[test]
    fn a_call_that_did_not_begin_in_time_never_runs() {
        let (control, end) = counter();
        let (go, gone) = mpsc::channel::<()>();
        thread::scope(|scope| {
            let (begun, begins) = mpsc::channel();
            let long = scope.spawn({
                let control = &control;
                move || {
                    control.call(Duration::MAX, move |_| {
                        let _ = begun.send(());
                        let _ = gone.recv();
                    })
                }
            });
            begins.recv().unwrap();
            let late = control.call(Duration::from_millis(1), |counter| counter.calls += 100);
            assert_eq!(late, Err(NotRun::Busy));
            drop(go);
            assert_eq!(long.join().unwrap(), Ok(()));
        });
        drop(control);
        assert_eq!(end.recv(), Ok(0));
    }

    #[test]
    fn who_does_not_own_the_thread_calls_it_until_it_ends() {
        let (control, end) = counter();
        let ask = control.ask();
        let add = |counter: &mut Counter| {
            counter.calls += 1;
            counter.calls
        };
        assert_eq!(ask.call(Duration::MAX, add), Ok(1));
        drop(control);
        assert_eq!(end.recv(), Ok(1));
        assert_eq!(ask.call(Duration::MAX, add), Err(NotRun::Gone));
    }

    #[test]
    fn what_open_says_is_the_error() {
        let open = |_| Err::<(Counter, ()), _>("no".to_owned());
        let started = Control::start("counter", open, |e| e.to_string());
        assert_eq!(started.err().as_deref(), Some("no"));
    }
}
