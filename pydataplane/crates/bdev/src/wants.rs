//! What channels ask of a thread that may block, as they may not: the keeper of what lies beside a device's
//! blocks. It answers by what it does, and by rounds.

use crossbeam_queue::ArrayQueue;
use parking_lot::Mutex;
use reactor::{Bell, Waker};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, OnceLock};

/// Requests that wait; who finds more asks again.
const WANTS: usize = 1024;

/// A channel as the keeper reaches it.
pub struct Ear {
    /// Something of it waits for the keeper.
    waits: AtomicBool,
    waker: Waker,
}

impl Ear {
    /// Of a channel of the thread that this wakes.
    pub fn new(waker: Waker) -> Arc<Ear> {
        Arc::new(Ear { waits: AtomicBool::new(false), waker })
    }
}

/// The requests, and who is told.
pub struct Wants<W> {
    wants: ArrayQueue<W>,
    /// Rounds in which the keeper answered.
    rounds: AtomicU64,
    bell: OnceLock<Bell>,
    closed: AtomicBool,
    ears: Mutex<Vec<Arc<Ear>>>,
}

impl<W> Default for Wants<W> {
    fn default() -> Self {
        Wants {
            wants: ArrayQueue::new(WANTS),
            rounds: AtomicU64::new(0),
            bell: OnceLock::new(),
            closed: AtomicBool::new(false),
            ears: Mutex::default(),
        }
    }
}

impl<W> Wants<W> {
    /// What wakes the keeper. Once.
    pub fn set_bell(&self, bell: Bell) {
        let _ = self.bell.set(bell);
    }

    /// Wakes the keeper.
    pub fn ring(&self) {
        if let Some(bell) = self.bell.get() {
            bell.ring();
        }
    }

    /// Asks the keeper; returns the number of the round from which on it may be asked again.
    pub fn ask(&self, want: W, ear: &Ear) -> u64 {
        ear.waits.store(true, Ordering::SeqCst);
        let round = self.rounds.load(Ordering::SeqCst);
        // Where the queue is full it is asked again.
        let asked = self.wants.push(want).is_ok();
        self.ring();
        round + if asked { 2 } else { 1 }
    }

    /// Has the keeper go on to its next round, and tell who waits.
    pub fn remind(&self, ear: &Ear) {
        ear.waits.store(true, Ordering::SeqCst);
        self.ring();
    }

    /// Has the keeper tell it when it is through with something.
    pub fn listen(&self, ear: &Ear) {
        ear.waits.store(true, Ordering::SeqCst);
    }

    /// Whether the keeper has come that far.
    #[inline]
    pub fn is_round(&self, round: u64) -> bool {
        self.rounds.load(Ordering::SeqCst) >= round
    }

    /// What is asked for, in order.
    pub fn next_want(&self) -> Option<W> {
        self.wants.pop()
    }

    /// Whether something is asked for.
    pub fn is_asked(&self) -> bool {
        !self.wants.is_empty()
    }

    /// The keeper has answered: wakes the channels that wait.
    pub fn answered(&self) {
        self.rounds.fetch_add(1, Ordering::SeqCst);
        for ear in self.ears.lock().iter() {
            if ear.waits.swap(false, Ordering::SeqCst) {
                ear.waker.wake();
            }
        }
    }

    /// Nobody answers from now on.
    pub fn close(&self) {
        self.closed.store(true, Ordering::SeqCst);
        self.answered();
    }

    /// Whether nobody answers any more.
    #[inline]
    pub fn is_closed(&self) -> bool {
        self.closed.load(Ordering::Acquire)
    }

    /// A channel is there.
    pub fn add_ear(&self, ear: &Arc<Ear>) {
        self.ears.lock().push(ear.clone());
    }

    /// A channel is gone.
    pub fn remove_ear(&self, ear: &Arc<Ear>) {
        self.ears.lock().retain(|other| !Arc::ptr_eq(other, ear));
    }
}
