//! What is in flight on a queue pair of the base, and how it ends on the one above.

use bdev::{Channel, ChannelStats, Completion, Io, IoError, Late, Slots, Submit};

/// I/Os that a channel can have in flight.
const SLOTS: u16 = 256;
/// Completions taken from the base at a time.
const BASE_DONE: usize = 64;

/// An I/O, with what a layer keeps of it.
#[derive(Clone, Copy)]
pub(crate) struct Slot<T> {
    pub io: Io,
    pub more: T,
    begun: Option<u64>,
}

/// A queue pair of the base with the I/Os that are under way.
pub(crate) struct Flight<T> {
    base: Box<dyn Channel>,
    pub slots: Slots<Slot<T>>,
    base_done: Vec<Completion>,
    late: Late,
    stats: ChannelStats,
    block: u32,
}

impl<T: Copy + Default> Flight<T> {
    pub fn new(base: Box<dyn Channel>, stats: ChannelStats, block: u32) -> Self {
        let none = Slot { io: Io::flush(0), more: T::default(), begun: None };
        Flight {
            base,
            slots: Slots::new(SLOTS, |_| none),
            base_done: Vec::with_capacity(BASE_DONE),
            late: Late::with_capacity(SLOTS),
            stats,
            block,
        }
    }

    pub fn base(&mut self) -> &mut dyn Channel {
        &mut *self.base
    }

    /// Begins an I/O; `None`: there is no slot for it.
    pub fn begin(&mut self, io: &Io, more: T) -> Option<u16> {
        let at = self.slots.take()?;
        let begun = self.stats.begin();
        self.slots[at] = Slot { io: *io, more, begun };
        Some(at)
    }

    /// Gives an I/O that began to the base, as it is.
    pub fn send(&mut self, at: u16) -> Submit {
        self.base.submit(&Io { tag: u64::from(at), ..self.slots[at].io })
    }

    /// Takes back the beginning of an I/O.
    pub fn forget(&mut self, at: u16) {
        self.slots.give_back(at);
    }

    /// Ends an I/O within its `submit`.
    pub fn end_now(&mut self, at: u16, result: Result<(), IoError>) -> Submit {
        let slot = self.slots[at];
        self.stats.end(&slot.io, self.block, slot.begun, result);
        self.slots.give_back(at);
        Submit::Done(result)
    }

    /// Ends an I/O that was pending.
    pub fn end(&mut self, at: u16, result: Result<(), IoError>, done: &mut Vec<Completion>) {
        let tag = self.slots[at].io.tag;
        _ = self.end_now(at, result);
        self.late.push(Completion { tag, result, ticks: 0, ended: 0 }, done);
    }

    /// Whether all that ended before has been handed over, and there is room for more.
    pub fn is_handed_over(&mut self, done: &mut Vec<Completion>) -> bool {
        self.late.hand_over(done)
    }

    /// What the base has ended since, by tag, which is the slot; to be given to [`Flight::keep`] when all of
    /// it is dealt with.
    pub fn ended(&mut self) -> Vec<Completion> {
        let mut ended = std::mem::take(&mut self.base_done);
        if self.slots.taken() > 0 {
            self.base.poll(&mut ended);
        }
        ended
    }

    /// Keeps the memory of [`Flight::ended`].
    pub fn keep(&mut self, ended: Vec<Completion>) {
        self.base_done = ended;
    }
}
