//! Whether an image may be used here, while its guest moves from host to host.
//!
//! Who opens an image for a guest that is still to come leaves the lock to the host where it runs, and takes
//! it when it runs here. Where it has stopped to go on elsewhere, the lock is let go, but only if another
//! client has the image open: it is taken again if the guest goes on here after all, and nobody else had it. I/O
//! waits meanwhile. One thread at a time sees to it, as Ceph may take its time.

use std::sync::Weak;
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering};
use std::thread::{self, Thread};
use std::time::{Duration, Instant};

use parking_lot::Mutex;

use crate::Error;
use crate::ffi::EBLOCKLISTED;
use crate::image::Image;
use crate::ring::Ring;

/// How often it is looked whether another client has let go.
const LOOK: Duration = Duration::from_millis(10);
/// How often the lock is asked for while another client has it: one that is gone has to be found out.
const ASK: Duration = Duration::from_secs(1);
/// After how long, and how often from then on, it is said that a guest waits.
const SAY: Duration = Duration::from_secs(10);

/// How often it is tried to let go of it.
const UNLOCKS: u32 = 5;

/// What is wanted of the lock.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Wish {
    /// That it stays as it is.
    Nothing,
    /// To have it, as soon as nobody else has the image open: its guest has come, and is paused.
    Inherit,
    /// To have it, from whoever has it now.
    Take,
    /// To let another client have it.
    LetGo,
}

struct State {
    wish: Wish,
    /// A thread sees to it.
    busy: bool,
    /// That thread, once it runs.
    thread: Option<Thread>,
    /// Channels, to be woken when it comes.
    rings: Vec<Weak<Ring>>,
}

/// Whether an image may be used here.
pub(crate) struct Hold {
    held: AtomicBool,
    /// How many have I/O wait; changed with `state` locked.
    held_back: AtomicU32,
    /// How often what waited was given up.
    given_up: AtomicU64,
    state: Mutex<State>,
}

impl Hold {
    pub(crate) fn new(held: bool) -> Hold {
        let state = State { wish: Wish::Nothing, busy: false, thread: None, rings: Vec::new() };
        Hold {
            held: held.into(),
            held_back: 0.into(),
            given_up: 0.into(),
            state: Mutex::new(state),
        }
    }

    /// Whether I/O may begin.
    #[inline]
    pub(crate) fn may_begin(&self) -> bool {
        self.is_held() && self.held_back.load(Ordering::Acquire) == 0
    }

    /// Whether the image may be used here.
    #[inline]
    pub(crate) fn is_held(&self) -> bool {
        self.held.load(Ordering::Acquire)
    }

    /// Has I/O that begins from now on wait until [`Hold::go_on`], and the lock stay here until then; `false`: the
    /// lock is not here.
    pub(crate) fn hold_back(&self) -> bool {
        let _state = self.state.lock();
        let held = self.is_held();
        if held {
            self.held_back.fetch_add(1, Ordering::AcqRel);
        }
        held
    }

    /// The end of [`Hold::hold_back`].
    pub(crate) fn go_on(&self) {
        let state = self.state.lock();
        self.held_back.fetch_sub(1, Ordering::AcqRel);
        Hold::wake(&state);
    }

    /// How often what waited was given up.
    pub(crate) fn given_up(&self) -> u64 {
        self.given_up.load(Ordering::Acquire)
    }

    /// Has the channel with that ring woken when the lock comes.
    pub(crate) fn add(&self, ring: Weak<Ring>) {
        let mut state = self.state.lock();
        state.rings.retain(|ring| ring.strong_count() > 0);
        state.rings.push(ring);
    }

    /// For how long the oldest I/O has not been answered; `None`: there is none.
    pub(crate) fn unanswered(&self) -> Option<Duration> {
        let state = self.state.lock();
        state.rings.iter().filter_map(Weak::upgrade).filter_map(|ring| ring.unanswered()).max()
    }

    /// Whether somebody has to begin to see to it.
    pub(crate) fn wish(&self, wish: Wish) -> bool {
        let mut state = self.state.lock();
        state.wish = wish;
        let begins = !state.busy && self.is_open(wish);
        state.busy |= begins;
        if let Some(thread) = &state.thread {
            thread.unpark();
        }
        begins
    }

    /// What still waits for the lock is not to be done any more, whenever it comes.
    pub(crate) fn give_up(&self) {
        let mut state = self.state.lock();
        if matches!(state.wish, Wish::Take | Wish::Inherit) {
            state.wish = Wish::Nothing;
        }
        self.given_up.fetch_add(1, Ordering::AcqRel);
        Hold::wake(&state);
    }

    fn wake(state: &State) {
        state.rings.iter().filter_map(Weak::upgrade).for_each(|ring| ring.wake());
    }

    /// Whether there is something to do for it.
    fn is_open(&self, wish: Wish) -> bool {
        match wish {
            Wish::Nothing => false,
            Wish::Take | Wish::Inherit => !self.is_held(),
            Wish::LetGo => self.is_held(),
        }
    }

    /// What is to be done next; `Nothing`: whoever sees to it has ended.
    fn next(&self) -> Wish {
        let mut state = self.state.lock();
        if !self.is_open(state.wish) {
            (state.wish, state.busy, state.thread) = (Wish::Nothing, false, None);
        }
        state.wish
    }

    /// The lock has come; whether it is still wanted.
    fn came(&self) -> bool {
        let state = self.state.lock();
        let wanted = matches!(state.wish, Wish::Take | Wish::Inherit);
        if wanted {
            self.held.store(true, Ordering::Release);
            Hold::wake(&state);
        }
        wanted
    }

    /// The lock is about to be let go; whether it still may.
    fn goes(&self) -> bool {
        let state = self.state.lock();
        let may = state.wish == Wish::LetGo && self.held_back.load(Ordering::Acquire) == 0;
        if may {
            self.held.store(false, Ordering::Release);
        }
        may
    }

    /// A thread begins to see to it.
    fn begun(&self) {
        self.state.lock().thread = Some(thread::current());
    }

    fn is_wished(&self, wish: Wish) -> bool {
        self.state.lock().wish == wish
    }

    /// A wish is not to be fulfilled, unless there is another one by now.
    fn drop_wish(&self, wish: Wish) {
        let mut state = self.state.lock();
        if state.wish == wish {
            state.wish = Wish::Nothing;
        }
    }
}

/// Sees to what is wanted of an image's lock until that is so.
pub(crate) fn see_to(image: &Weak<Image>) {
    let mut waiting = Waiting::default();
    if let Some(image) = image.upgrade() {
        image.hold.begun();
    }
    while let Some(image) = image.upgrade() {
        let pause = match image.hold.next() {
            Wish::Nothing => return,
            Wish::Inherit => inherit(&image),
            Wish::Take => waiting.take(&image),
            Wish::LetGo => let_go(&image),
        };
        drop(image);
        // A new wish ends it.
        thread::park_timeout(pause);
    }
}

/// A guest that waits for the lock.
#[derive(Default)]
struct Waiting {
    since: Option<Instant>,
    asked: Option<Instant>,
    said: Option<Instant>,
}

impl Waiting {
    /// Takes the lock if it is free, or its owner gone; how long to wait before it is tried again.
    fn take(&mut self, image: &Image) -> Duration {
        let since = *self.since.get_or_insert_with(Instant::now);
        let waited = since.elapsed();
        let is_live = |owner: &String| !image.cluster().is_of_the_past(owner);
        let just_asked = self.asked.is_some_and(|asked| asked.elapsed() < ASK);
        if just_asked && image.opened().lock_owners().iter().any(is_live) {
            return look_after(waited);
        }
        self.asked = Some(Instant::now());
        match take_now(image, since) {
            Ok(()) => Duration::ZERO,
            Err(why) => {
                if waited > SAY && self.said.is_none_or(|said| said.elapsed() > SAY) {
                    self.said = Some(Instant::now());
                    tracing::warn!(
                        "the guest waits for its disk for {} s: {why}",
                        waited.as_secs()
                    );
                }
                if matches!(why, Error::Locked { .. }) { look_after(waited) } else { ASK }
            }
        }
    }
}

/// How long to wait until it is looked again: a migration takes milliseconds, and what takes longer may take
/// long.
fn look_after(waited: Duration) -> Duration {
    (waited / 10).clamp(LOOK, ASK)
}

/// Takes the lock, which is wanted `since`; an error is one that may pass.
fn take_now(image: &Image, since: Instant) -> Result<(), Error> {
    let path = image.source().path();
    match image.opened().lock_again() {
        Ok(_) if image.hold.came() => {
            let waited = since.elapsed().as_millis();
            tracing::info!("image {path} is locked for its guest, after {waited} ms");
            image.look_again();
            Ok(())
        }
        Ok(before) => {
            if let Err(why) = image.opened().take_back(before) {
                tracing::warn!("{why}");
            }
            release(image);
            Ok(())
        }
        Err(why) if why.errno() == EBLOCKLISTED => {
            image.fence();
            image.hold.give_up();
            Ok(())
        }
        // Who shares it may have written to it.
        Err(why @ (Error::Overtaken { .. } | Error::Shared { .. })) => {
            image.overtaken(&why);
            Ok(())
        }
        Err(why) => Err(why),
    }
}

/// Takes the lock if nobody has it, nor the image open.
fn inherit(image: &Image) -> Duration {
    // Where a host died with its lock somebody has to ask for it.
    let is_free = image.opened().owners().is_ok_and(|owners| owners.is_empty());
    let is_closed = is_free && matches!(image.opened().is_open_elsewhere(), Ok(false));
    match is_closed.then(|| take_now(image, Instant::now())) {
        Some(Ok(())) => Duration::ZERO,
        _ => ASK,
    }
}

fn let_go(image: &Image) -> Duration {
    let others = image.opened().is_open_elsewhere();
    match others {
        Ok(true) if image.hold.goes() => release(image),
        // Its I/O is held back.
        Ok(true) if image.hold.is_wished(Wish::LetGo) => return LOOK,
        // It was saved, perhaps, or goes on here already.
        Ok(_) => image.hold.drop_wish(Wish::LetGo),
        Err(why) if why.errno() == EBLOCKLISTED => {
            image.fence();
            image.hold.drop_wish(Wish::LetGo);
        }
        Err(why) => {
            tracing::warn!("image {} stays locked for now: {why}", image.source().path());
            return ASK;
        }
    }
    Duration::ZERO
}

fn release(image: &Image) {
    let path = image.source().path();
    for tried in 1..=UNLOCKS {
        match image.opened().unlock() {
            Ok(()) => {
                tracing::info!("image {path} is let go, as its guest goes on elsewhere");
                return;
            }
            Err(why) if tried < UNLOCKS && !image.hold.is_wished(Wish::Take) => {
                tracing::warn!("image {path} stays locked for now: {why}");
                thread::park_timeout(ASK);
            }
            Err(why) => tracing::warn!("image {path} stays locked until it is closed: {why}"),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use reactor::IoContext;
    use std::sync::Arc;

    #[test]
    fn what_is_so_already_needs_nobody_to_see_to_it() {
        let hold = Hold::new(true);
        assert!(!hold.wish(Wish::Take));
        assert_eq!(hold.next(), Wish::Nothing);
        let hold = Hold::new(false);
        assert!(!hold.wish(Wish::LetGo));
    }

    #[test]
    fn one_at_a_time_sees_to_it_and_the_last_wish_counts() {
        let hold = Hold::new(true);
        assert!(hold.wish(Wish::LetGo) && !hold.wish(Wish::LetGo));
        assert!(hold.goes() && !hold.is_held());
        // The guest goes on here after all, while the lock is let go.
        assert!(!hold.wish(Wish::Take), "who let it go takes it again");
        assert_eq!(hold.next(), Wish::Take);
        assert!(hold.came() && hold.is_held());
        assert_eq!(hold.next(), Wish::Nothing);
        assert!(hold.wish(Wish::LetGo), "who saw to it has ended");
    }

    #[test]
    fn a_guest_that_goes_on_here_keeps_the_lock_that_was_about_to_go() {
        let hold = Hold::new(true);
        assert!(hold.wish(Wish::LetGo));
        hold.wish(Wish::Take);
        assert!(!hold.goes() && hold.is_held());
        assert_eq!(hold.next(), Wish::Nothing);
    }

    #[test]
    fn a_guest_that_runs_does_not_wait_for_the_next_look_of_who_would_inherit() {
        let hold = Hold::new(false);
        assert!(hold.wish(Wish::Inherit));
        hold.begun();
        assert_eq!(hold.next(), Wish::Inherit);
        assert!(!hold.wish(Wish::Take), "who sees to it is told");
        // Ten minutes: a wake-up that is lost would show as a hang.
        thread::park_timeout(Duration::from_secs(600));
        assert_eq!(hold.next(), Wish::Take);
        assert!(hold.came() && hold.next() == Wish::Nothing);
    }

    #[test]
    fn what_is_held_back_stays_locked_and_goes_on_when_nobody_holds_it_back() {
        let hold = Hold::new(true);
        assert!(hold.hold_back() && hold.hold_back());
        assert!(hold.is_held() && !hold.may_begin());
        assert!(hold.wish(Wish::LetGo) && !hold.goes(), "the lock stays meanwhile");
        hold.go_on();
        assert!(!hold.may_begin());
        hold.go_on();
        assert!(hold.may_begin() && hold.goes());
        assert!(!hold.hold_back(), "there is nothing to hold back without the lock");
    }

    #[test]
    fn who_waits_long_looks_less_often() {
        assert_eq!(look_after(Duration::ZERO), LOOK);
        assert_eq!(look_after(Duration::from_secs(1)), Duration::from_millis(100));
        assert_eq!(look_after(Duration::from_secs(3600)), ASK);
    }

    #[test]
    fn a_lock_that_comes_too_late_is_not_taken_and_who_waits_is_woken_to_give_up() {
        let io = IoContext::new().unwrap();
        let ring = Ring::new(1, io.waker());
        let hold = Hold::new(false);
        hold.add(Arc::downgrade(&ring));
        assert!(hold.wish(Wish::Take));
        hold.give_up();
        // Ten minutes: a wake-up that is lost would show as a hang.
        io.wait(600_000_000).unwrap();
        assert_eq!(hold.given_up(), 1);
        assert!(!hold.came() && !hold.is_held());
        assert_eq!(hold.next(), Wish::Nothing);
    }
}
