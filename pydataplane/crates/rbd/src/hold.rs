//! Whether an image may be written here, while its guest moves from host to host.
//!
//! Who opens an image for a guest that is still to come leaves the lock to the host where it runs, and takes
//! it when it runs here. Where it has stopped to go on elsewhere, the lock is let go, but only if another
//! client has the image open: it is taken again if the guest goes on here after all. What is written meanwhile
//! waits. One thread at a time sees to it, as Ceph may take its time.

use std::sync::Weak;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::thread;
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

/// What is wanted of the lock.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Wish {
    /// That it stays as it is.
    Nothing,
    /// To have it, from whoever has it now.
    Take,
    /// To let another client have it.
    LetGo,
}

struct State {
    wish: Wish,
    /// A thread sees to it.
    busy: bool,
    /// Channels, to be woken when it comes.
    rings: Vec<Weak<Ring>>,
}

/// Whether an image may be written here.
pub(crate) struct Hold {
    held: AtomicBool,
    /// How often what waited was given up.
    given_up: AtomicU64,
    state: Mutex<State>,
}

impl Hold {
    pub(crate) fn new(held: bool) -> Hold {
        let state = State { wish: Wish::Nothing, busy: false, rings: Vec::new() };
        Hold { held: held.into(), given_up: 0.into(), state: Mutex::new(state) }
    }

    /// Whether writes may begin.
    #[inline]
    pub(crate) fn is_held(&self) -> bool {
        self.held.load(Ordering::Acquire)
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

    /// Whether somebody has to begin to see to it.
    pub(crate) fn wish(&self, wish: Wish) -> bool {
        let mut state = self.state.lock();
        state.wish = wish;
        let begins = !state.busy && self.is_open(wish);
        state.busy |= begins;
        begins
    }

    /// What still waits for the lock is not to be done any more, whenever it comes.
    pub(crate) fn give_up(&self) {
        let mut state = self.state.lock();
        if state.wish == Wish::Take {
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
            Wish::Take => !self.is_held(),
            Wish::LetGo => self.is_held(),
        }
    }

    /// What is to be done next; `Nothing`: whoever sees to it has ended.
    fn next(&self) -> Wish {
        let mut state = self.state.lock();
        if !self.is_open(state.wish) {
            (state.wish, state.busy) = (Wish::Nothing, false);
        }
        state.wish
    }

    /// The lock has come; whether it is still wanted.
    fn came(&self) -> bool {
        let state = self.state.lock();
        let wanted = state.wish == Wish::Take;
        if wanted {
            self.held.store(true, Ordering::Release);
            Hold::wake(&state);
        }
        wanted
    }

    /// The lock is about to be let go; whether it still may.
    fn goes(&self) -> bool {
        let state = self.state.lock();
        let may = state.wish == Wish::LetGo;
        if may {
            self.held.store(false, Ordering::Release);
        }
        may
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
    while let Some(image) = image.upgrade() {
        let pause = match image.hold.next() {
            Wish::Nothing => return,
            Wish::Take => waiting.take(&image),
            Wish::LetGo => let_go(&image),
        };
        drop(image);
        thread::sleep(pause);
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
        let is_live = |owner: &String| !image.cluster().is_of_the_past(owner);
        let just_asked = self.asked.is_some_and(|asked| asked.elapsed() < ASK);
        if just_asked && image.opened().lock_owners().iter().any(is_live) {
            return LOOK;
        }
        self.asked = Some(Instant::now());
        let path = image.source().path();
        match image.opened().lock() {
            Ok(()) if image.hold.came() => {
                let waited = since.elapsed().as_millis();
                tracing::info!("image {path} is locked for its guest, after {waited} ms");
                image.look_again();
                Duration::ZERO
            }
            Ok(()) => {
                release(image);
                Duration::ZERO
            }
            Err(why) if why.errno() == EBLOCKLISTED => {
                image.fence();
                image.hold.give_up();
                Duration::ZERO
            }
            Err(why) => {
                let is_locked = matches!(why, Error::Locked { .. });
                if since.elapsed() > SAY && self.said.is_none_or(|said| said.elapsed() > SAY) {
                    self.said = Some(Instant::now());
                    let seconds = since.elapsed().as_secs();
                    tracing::warn!("the guest waits with its writes for {seconds} s: {why}");
                }
                if is_locked { LOOK } else { ASK }
            }
        }
    }
}

fn let_go(image: &Image) -> Duration {
    let others = image.opened().is_open_elsewhere();
    match others {
        Ok(true) if image.hold.goes() => release(image),
        // It was saved, perhaps, or goes on here already.
        Ok(_) => image.hold.drop_wish(Wish::LetGo),
        Err(why) => {
            tracing::warn!("image {} stays locked: {why}", image.source().path());
            image.hold.drop_wish(Wish::LetGo);
        }
    }
    Duration::ZERO
}

fn release(image: &Image) {
    let path = image.source().path();
    match image.opened().unlock() {
        Ok(()) => tracing::info!("image {path} is let go, as its guest goes on elsewhere"),
        Err(why) => tracing::warn!("image {path} stays locked until it is closed: {why}"),
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
