//! A reactor's inside, as the messages that run on its thread see it.

use std::any::Any;
use std::io;
use std::os::fd::RawFd;

use crate::context::borrow;
use crate::{IoContext, Poller, PollerId, ticks};

/// How long pollers without work wait at most for those that have some, in microseconds, or for a turn that
/// takes longer: then all are looked at.
const LOOK_US: u64 = 20;

/// A poller and what it did.
pub(crate) struct RegisteredPoller {
    id: PollerId,
    pub(crate) poller: Box<dyn Poller>,
    /// How often it was polled.
    pub(crate) runs: u64,
    /// How often it handled something.
    pub(crate) busy: u64,
    /// [`Cx::turns`] at the last of them.
    pub(crate) busy_at: u64,
    /// It was told that others have work, too.
    pub(crate) contended: bool,
    /// It is in [`Cx::with_work`].
    pub(crate) listed: bool,
}

/// One line of `thread_get_pollers`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PollerInfo {
    /// Its identity within the reactor.
    pub id: PollerId,
    /// Its name.
    pub name: String,
    /// How often it was polled.
    pub runs: u64,
    /// How often it handled something.
    pub busy: u64,
}

/// A reactor's inside, given to messages that run on its thread.
pub struct Cx {
    pub(crate) io: IoContext,
    pub(crate) index: usize,
    pub(crate) places: Vec<RegisteredPoller>,
    /// Turns of the loop so far.
    pub(crate) turns: u64,
    /// Places of the pollers that had work in one of the last turns.
    pub(crate) with_work: Vec<usize>,
    /// The place of the next one without that has its turn.
    pub(crate) next: usize,
    /// The next turn is of all.
    pub(crate) look_at_all: bool,
    /// When the last such turn was, beside pollers with work, and after how long there is another, in ticks.
    pub(crate) looked_at: u64,
    pub(crate) look_ticks: u64,
    pub(crate) stop: bool,
    next_id: u64,
}

impl Cx {
    pub(crate) fn new(index: usize, io: IoContext) -> Self {
        Cx {
            io,
            index,
            places: Vec::new(),
            turns: 0,
            with_work: Vec::new(),
            next: 0,
            look_at_all: false,
            looked_at: 0,
            look_ticks: ticks::from_us(LOOK_US),
            stop: false,
            next_id: 1,
        }
    }

    /// This thread's context for bdev channels.
    pub fn io(&self) -> &IoContext {
        &self.io
    }

    /// Index of this reactor.
    pub fn index(&self) -> usize {
        self.index
    }

    /// Adds a poller, last in the order of the loop.
    pub fn add_poller(&mut self, poller: Box<dyn Poller>) -> PollerId {
        let id = PollerId(self.next_id);
        self.next_id += 1;
        self.places.push(RegisteredPoller {
            id,
            poller,
            runs: 0,
            busy: 0,
            busy_at: 0,
            contended: false,
            listed: false,
        });
        self.with_work.reserve(self.places.len());
        id
    }

    /// Removes a poller and returns it.
    pub fn remove_poller(&mut self, id: PollerId) -> Option<Box<dyn Poller>> {
        let at = self.place_of(id)?;
        // The others move up.
        self.with_work.retain(|place| *place != at);
        self.with_work.iter_mut().filter(|place| **place > at).for_each(|place| *place -= 1);
        Some(self.places.remove(at).poller)
    }

    /// The poller `id`, if it exists and is a `T`.
    pub fn poller_mut<T: Poller>(&mut self, id: PollerId) -> Option<&mut T> {
        let place = self.places.iter_mut().find(|p| p.id == id)?;
        let any: &mut dyn Any = &mut *place.poller;
        any.downcast_mut()
    }

    /// All pollers, in the order of the loop.
    pub fn pollers(&self) -> Vec<PollerInfo> {
        let info = |p: &RegisteredPoller| PollerInfo {
            id: p.id,
            name: p.poller.name().to_owned(),
            runs: p.runs,
            busy: p.busy,
        };
        self.places.iter().map(info).collect()
    }

    /// Wakes this reactor when `fd` (an eventfd: a kick) becomes readable while it sleeps; edge
    /// triggered, and the reactor does not read it. The poller `of` has the first turn then.
    ///
    /// # Errors
    /// `fd` is watched already, or cannot be.
    pub fn watch(&mut self, fd: RawFd, of: PollerId) -> io::Result<()> {
        self.io.watch(borrow(fd)?, Some(of))
    }

    /// The place of a poller.
    pub(crate) fn place_of(&self, id: PollerId) -> Option<usize> {
        self.places.iter().position(|p| p.id == id)
    }

    /// Undoes [`Cx::watch`]; call before the fd is closed.
    pub fn unwatch(&mut self, fd: RawFd) {
        if let Ok(fd) = borrow(fd) {
            self.io.unwatch(fd);
        }
    }
}
