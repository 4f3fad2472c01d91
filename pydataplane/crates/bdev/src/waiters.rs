//! Threads that are woken when something happens that another thread does: without a lock, and without an allocation.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering::SeqCst};

use crossbeam_queue::ArrayQueue;
use reactor::Waker;

/// Who can wait for one thing without looking again and again.
const WAITERS: usize = 1024;

/// One who waits, for one thing at a time.
pub struct Waiter {
    waker: Waker,
    /// It stands in the queue, or was taken from it and is woken next.
    waits: AtomicBool,
}

impl Waiter {
    /// Of the thread that this wakes.
    pub fn new(waker: Waker) -> Arc<Waiter> {
        Arc::new(Waiter { waker, waits: AtomicBool::new(false) })
    }
}

/// Those who wait for one thing.
pub struct Waiters(ArrayQueue<Arc<Waiter>>);

impl Default for Waiters {
    fn default() -> Self {
        Waiters(ArrayQueue::new(WAITERS))
    }
}

impl Waiters {
    /// Has a thread woken by the next [`Waiters::tell`]; `false`: it is to be already. Whoever calls this looks once
    /// more afterwards, as the thing may have happened just before, and whenever it is woken, which may be for what
    /// happened earlier.
    pub fn wait(&self, waiter: &Arc<Waiter>) -> bool {
        if waiter.waits.swap(true, SeqCst) {
            return false;
        }
        if self.0.push(Arc::clone(waiter)).is_err() {
            // Too many wait already: this one looks again and again.
            waiter.waits.store(false, SeqCst);
            waiter.waker.wake();
        }
        true
    }

    /// It has happened: wakes all who wait. What they look at was changed before, with [`SeqCst`].
    #[inline]
    pub fn tell(&self) {
        if !self.0.is_empty() {
            self.wake_all();
        }
    }

    #[cold]
    fn wake_all(&self) {
        self.take_all(|waiter| waiter.waker.wake());
    }

    /// Takes those who wait now out of the queue; each is `woken`.
    fn take_all(&self, woken: impl Fn(&Arc<Waiter>)) {
        // Who is woken may stand there anew at once, for what comes next.
        for _ in 0..self.0.len() {
            let Some(waiter) = self.0.pop() else { break };
            // Before it is woken: then it waits anew.
            waiter.waits.store(false, SeqCst);
            woken(&waiter);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use reactor::IoContext;
    use std::sync::atomic::AtomicU32;

    #[test]
    fn one_waits_once_and_anew_after_it_was_woken() {
        let (io, waiters) = (IoContext::new().unwrap(), Waiters::default());
        let waiter = Waiter::new(io.waker());
        assert!(waiters.wait(&waiter) && !waiters.wait(&waiter));
        waiters.tell();
        // Ten minutes: a lost wake-up would show as a hang.
        io.wait(600_000_000).unwrap();
        assert!(waiters.wait(&waiter));
        waiters.tell();
        io.wait(600_000_000).unwrap();
    }

    #[test]
    fn who_finds_the_queue_full_is_woken_at_once() {
        let (io, waiters) = (IoContext::new().unwrap(), Waiters::default());
        let of_nobody = IoContext::new().unwrap();
        let others: Vec<_> = (0..WAITERS).map(|_| Waiter::new(of_nobody.waker())).collect();
        assert!(others.iter().all(|other| waiters.wait(other)));
        let waiter = Waiter::new(io.waker());
        for _ in 0..2 {
            assert!(waiters.wait(&waiter));
            io.wait(600_000_000).unwrap();
        }
    }

    #[test]
    fn who_waits_anew_as_soon_as_it_is_woken_keeps_nobody_busy() {
        let (io, waiters) = (IoContext::new().unwrap(), Waiters::default());
        let all: Vec<_> = (0..3).map(|_| Waiter::new(io.waker())).collect();
        assert!(all.iter().all(|waiter| waiters.wait(waiter)));
        let woken = AtomicU32::new(0);
        waiters.take_all(|waiter| {
            assert!(woken.fetch_add(1, SeqCst) < 3, "each once");
            assert!(waiters.wait(waiter));
        });
        assert!(!all.iter().any(|waiter| waiters.wait(waiter)), "they wait still");
        waiters.tell();
        io.wait(600_000_000).unwrap();
    }

    #[test]
    fn no_thread_is_left_waiting_for_what_happens_when_others_wait() {
        const ROUNDS: u32 = 3000;
        let (happened, waiters) = (AtomicU32::new(0), Waiters::default());
        std::thread::scope(|scope| {
            for nth in 0..3 {
                let (happened, waiters) = (&happened, &waiters);
                scope.spawn(move || {
                    let io = IoContext::new().unwrap();
                    let waiter = Waiter::new(io.waker());
                    // Each in turn does what the next one waits for.
                    for round in (nth..ROUNDS).step_by(3) {
                        while happened.load(SeqCst) < round {
                            waiters.wait(&waiter);
                            if happened.load(SeqCst) < round {
                                io.wait(600_000_000).unwrap();
                            }
                        }
                        happened.fetch_add(1, SeqCst);
                        waiters.tell();
                    }
                });
            }
        });
        assert_eq!(happened.load(SeqCst), ROUNDS);
    }
}
