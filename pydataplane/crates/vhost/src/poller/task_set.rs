//! The task set of a unit whose requests several reactors take: the order that ORDERED demands (SAM-5 8.6) holds
//! among all of them, and a request that is SIMPLE writes nothing that another reactor reads.
//!
//! # What is promised
//! A task set is of one controller, an I_T nexus, as the Control mode page says (TST 001b). Its requests are received
//! as reactors take them from the rings:
//!
//! - what any reactor had taken before it learned of an ORDERED request ends before that begins, but for what it takes
//!   itself at the same time, which is either;
//! - what is made available once the guest can know that the ORDERED request was taken, at the latest by its end, begins
//!   after that has ended;
//! - of two that are ORDERED all reactors agree which is first: the one that was taken first;
//! - HEAD OF QUEUE begins at once, on whichever reactor, also beside an ORDERED request that has begun, but behind
//!   older ones there that wait for their volume's limits or for room;
//! - a SIMPLE request that is made available once the guest can know that one which is HEAD OF QUEUE was taken begins
//!   after that has ended.
//!
//! What still lies in a ring when the ORDERED request is taken from another one comes after it. What waits in a queue that
//! goes on elsewhere, on another reactor or in another process, is received there anew.
//!
//! # How
//! Each ORDERED request draws a ticket when it is taken, and so does each that is HEAD OF QUEUE and does not end at once.
//! Each reactor shows two words of its own: the first of its
//! tickets that has not ended, and up to which ticket all that it received before has ended. It tells the others when one
//! of them changes, by a flag that each looks at once for what it takes from a ring, after the ring, and once in a turn.
//!
//! - Who is told has what it takes from then on wait for the tickets that are drawn by then.
//! - An ORDERED request begins when nothing of its unit is in flight here, and all others have shown that what they
//!   received before its ticket has ended. The lowest ticket always comes to that: nothing that it waits for waits for
//!   another one. So any number of them on any number of reactors goes on, in the order of their tickets.
//! - One that is HEAD OF QUEUE waits for nothing but its volume's limits and room, and older ones that do, on its own
//!   reactor, so whoever waits for it has it end. A first ticket that is shown may be lower than that (see `heads`): who waits for it waits, too,
//!   for some that are HEAD OF QUEUE and newer.
//! - A reactor without queues has received nothing, and is not asked. It looks at all task sets before it takes
//!   something from its first queue, so that either it sees the ticket or whoever drew that sees that it has a queue.
//!
//! What a guest that sends nothing but such requests gets others to do is bounded by its requests: for each, every
//! reactor with a queue of its session is told twice and answers once. What waits are slots, of which there are so many.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering, fence};

use reactor::Waker;

use crate::defs::{MAX_TARGETS, task_attribute};

/// No ticket.
const NONE: u64 = u64::MAX;
const WORDS: usize = MAX_TARGETS.div_ceil(64);

/// A set of targets.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Targets([u64; WORDS]);

impl Targets {
    pub(super) const ALL: Targets = Targets([u64::MAX; WORDS]);

    pub(super) fn remove(&mut self, target: u8) {
        self.0[usize::from(target) / 64] &= !(1 << (target % 64));
    }

    pub(super) fn has(&self, target: u8) -> bool {
        self.0[usize::from(target) / 64] >> (target % 64) & 1 != 0
    }

    pub(super) fn is_empty(&self) -> bool {
        self.0 == [0; WORDS]
    }

    /// The least one from `from` on.
    pub(super) fn next(&self, from: usize) -> Option<u8> {
        (from / 64..WORDS).find_map(|word| {
            let skipped = if word == from / 64 { from % 64 } else { 0 };
            let rest = self.0[word] & (u64::MAX << skipped);
            (rest != 0).then(|| (64 * word) as u8 + rest.trailing_zeros() as u8)
        })
    }
}

/// A poller of a session as the others reach it.
#[derive(Default)]
#[repr(align(128))]
pub(crate) struct Member {
    /// A task set is to be looked at.
    told: AtomicBool,
    /// It has queues.
    serves: AtomicBool,
    /// Which task sets, by target.
    targets: [AtomicU64; WORDS],
    /// Of its reactor; `None`: it is the only one.
    waker: Option<Waker>,
}

impl Member {
    /// The poller on the reactor that `waker` wakes.
    pub(crate) fn new(waker: Option<Waker>) -> Arc<Self> {
        Arc::new(Member { waker, ..Member::default() })
    }

    /// Whether a task set is to be looked at. Also true after a read from a ring that shows what the guest knew.
    #[inline(always)]
    pub(super) fn is_told(&self) -> bool {
        self.told.load(Ordering::Relaxed)
    }

    /// Adds the task sets that it was told of to `targets`. Whether there were any.
    pub(super) fn take(&self, targets: &mut Targets) -> bool {
        self.told.swap(false, Ordering::AcqRel);
        let mut any = 0;
        for (to, from) in targets.0.iter_mut().zip(&self.targets) {
            let told = from.swap(0, Ordering::AcqRel);
            *to |= told;
            any |= told;
        }
        any != 0
    }

    /// By the poller itself: something is to be looked at again.
    pub(super) fn look_again(&self) {
        self.told.store(true, Ordering::Relaxed);
    }

    /// By the poller itself: it has queues from now on, before it takes anything from them, or none any more, and
    /// then nothing that it took.
    pub(super) fn set_serves(&self, serves: bool) {
        self.serves.store(serves, Ordering::SeqCst);
        fence(Ordering::SeqCst);
    }

    /// That task set is to be looked at when it has its turn. Whether it was already.
    fn mark(&self, target: u8) -> bool {
        let (word, bit) = (&self.targets[usize::from(target) / 64], 1 << (target % 64));
        let before = word.fetch_or(bit, Ordering::AcqRel);
        self.told.store(true, Ordering::Release);
        before & bit != 0
    }

    /// Has it look at that task set. Whoever marked that first wakes it, or is it, in its turn and so awake.
    fn tell(&self, target: u8) {
        let is_marked = self.mark(target);
        if let Some(waker) = self.waker.as_ref().filter(|_| !is_marked) {
            waker.wake();
        }
    }
}

/// What one poller shows the others of a task set.
struct Shown {
    /// The first ticket of its own that has not ended, or one that is lower; [`NONE`]: it has none.
    first: AtomicU64,
    /// All that it received before this ticket, and before any lower one, has ended.
    clear: AtomicU64,
}

/// The task set of one target of a session.
pub(crate) struct TaskSet {
    target: u8,
    members: Box<[Arc<Member>]>,
    /// Tickets drawn so far.
    tickets: AtomicU64,
    shown: Box<[Shown]>,
}

impl TaskSet {
    /// A task set of `target` of which all `members` may take requests.
    pub(crate) fn new(target: u8, members: &[Arc<Member>]) -> Arc<Self> {
        let shown = || Shown { first: AtomicU64::new(NONE), clear: AtomicU64::new(0) };
        let shown = members.iter().map(|_| shown()).collect();
        Arc::new(TaskSet { target, members: members.into(), tickets: AtomicU64::new(0), shown })
    }

    /// All members but `me`.
    fn others(&self, me: usize) -> impl Iterator<Item = (&Member, &Shown)> {
        let all = self.members.iter().zip(&self.shown).enumerate();
        all.filter(move |(n, _)| *n != me).map(|(_, (member, shown))| (&**member, shown))
    }
}

/// What stands first among the requests of a unit that wait on a reactor.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum First {
    Nothing,
    /// It has the attribute HEAD OF QUEUE.
    HeadOfQueue,
    /// A request with this [key](Place::key).
    Key(u64),
}

/// What a poller has of a unit.
#[derive(Clone, Copy, Debug)]
pub(super) struct Here {
    /// Some of its requests are with its device.
    pub(super) in_flight: bool,
    /// One of these is ORDERED.
    pub(super) ordered: bool,
    /// What stands first of those that wait.
    pub(super) first: First,
    /// The first ticket of those that wait and are ORDERED, if that [has changed](Place::has_changed).
    pub(super) first_ordered: Option<u64>,
    /// The first ticket of those that are HEAD OF QUEUE, or a lower one; [`u64::MAX`]: there are none.
    pub(super) first_head: u64,
    /// Some are about to be ended here and on other reactors: what has ended is not shown.
    pub(super) ending: bool,
}

/// The task set of a unit as one poller has it.
pub(crate) struct Place {
    set: Arc<TaskSet>,
    me: usize,
    /// Requests that are ORDERED and wait here.
    waiting: u32,
    /// Which ticket is the first is to be found again.
    changed: bool,
    /// The first of those that are ORDERED, or a lower one.
    first_ordered: u64,
    /// As it is shown.
    first: u64,
    clear: u64,
    /// Tickets drawn when it was looked at last.
    heard: u64,
    /// All tickets below this one of the others had ended then.
    others: u64,
}

impl Place {
    /// The place of the `me`th member.
    pub(crate) fn new(set: Arc<TaskSet>, me: usize) -> Self {
        let (first, others) = (NONE, NONE);
        let (waiting, changed, first_ordered) = (0, false, NONE);
        Place { set, me, waiting, changed, first_ordered, first, clear: 0, heard: 0, others }
    }

    /// The key of a request that was taken just now and waits, or is HEAD OF QUEUE. That one, or one that is ORDERED,
    /// draws its ticket, which it is; any other one waits for all tickets below its key. Whatever had begun before has
    /// the key 0.
    pub(super) fn key(&mut self, attribute: u8) -> u64 {
        if !task_attribute::has_others_wait(attribute) {
            return self.heard;
        }
        let ticket = self.draw();
        if attribute == task_attribute::ORDERED {
            self.first_ordered = self.first_ordered.min(ticket);
        }
        self.changed = true;
        self.set.members[self.me].mark(self.set.target);
        self.tell_others();
        ticket
    }

    fn draw(&mut self) -> u64 {
        let (set, own) = (&*self.set, &self.set.shown[self.me]);
        if self.first != NONE {
            // Its earlier ones are shown.
            return set.tickets.fetch_add(1, Ordering::SeqCst);
        }
        // Who sees the ticket drawn is to see that it has not ended.
        own.first.store(set.tickets.load(Ordering::Relaxed), Ordering::SeqCst);
        let ticket = set.tickets.fetch_add(1, Ordering::SeqCst);
        own.first.store(ticket, Ordering::SeqCst);
        self.first = ticket;
        ticket
    }

    /// A request with this attribute waits here.
    pub(super) fn waits(&mut self, attribute: u8) {
        if attribute == task_attribute::ORDERED {
            (self.waiting, self.changed) = (self.waiting + 1, true);
        }
    }

    /// A request with this attribute no longer waits: it begins, or ends without that.
    pub(super) fn begins(&mut self, attribute: u8) {
        if attribute == task_attribute::ORDERED {
            (self.waiting, self.changed) = (self.waiting - 1, true);
        }
    }

    /// One that is HEAD OF QUEUE came, or went.
    pub(super) fn set_changed(&mut self) {
        self.changed = true;
    }

    /// Whether the first of the tickets here that are ORDERED is to be found for [`Place::look`].
    pub(super) fn has_changed(&self) -> bool {
        self.changed && self.waiting > 0
    }

    /// Whether the request with this `ticket`, which waits and stands first here, where nothing is in flight, may begin.
    pub(super) fn is_turn_of(&self, ticket: u64) -> bool {
        let may = |(member, shown): (&Member, &Shown)| {
            !member.serves.load(Ordering::SeqCst) || shown.clear.load(Ordering::Acquire) > ticket
        };
        self.set.others(self.me).all(may)
    }

    /// Whether all that has others wait and was received by other reactors before the request with this `key` had ended
    /// when it was looked at last.
    pub(super) fn is_open_to(&self, key: u64) -> bool {
        key <= self.others
    }

    /// Whether what is taken now waits for others.
    pub(super) fn is_barred(&self) -> bool {
        self.others < self.heard
    }

    /// Looks at what the others show, and shows what there is here. Whether it is to be looked at again, though nothing
    /// is told.
    pub(super) fn look(&mut self, here: &Here) -> bool {
        if self.changed && !here.ending {
            if !here.ordered {
                (self.changed, self.first_ordered) = (false, here.first_ordered.unwrap_or(NONE));
            }
            self.show_first(self.first_ordered.min(here.first_head));
        }
        let (set, own) = (&*self.set, &self.set.shown[self.me]);
        // In this order: see `key`.
        self.heard = set.tickets.load(Ordering::SeqCst);
        let firsts = set.others(self.me).map(|(_, shown)| shown.first.load(Ordering::SeqCst));
        self.others = firsts.min().unwrap_or(NONE);
        let clear = match here.first {
            _ if here.in_flight || here.ending => self.clear,
            First::Nothing => self.heard,
            First::Key(key) => key.min(self.heard),
            First::HeadOfQueue => self.clear,
        };
        if clear != self.clear {
            self.clear = clear;
            own.clear.store(clear, Ordering::Release);
            let waits = |(_, shown): &(&Member, &Shown)| shown.first.load(Ordering::SeqCst) != NONE;
            set.others(self.me).filter(waits).for_each(|(member, _)| member.tell(set.target));
        }
        self.first != NONE || self.clear < self.heard || self.is_barred() || here.ending
    }

    fn show_first(&mut self, first: u64) {
        if first != self.first {
            self.first = first;
            self.set.shown[self.me].first.store(first, Ordering::SeqCst);
            self.tell_others();
        }
    }

    fn tell_others(&self) {
        // Who has its first queue from now on looks by itself.
        fence(Ordering::SeqCst);
        let serving = self.set.others(self.me).map(|(member, _)| member);
        let serving = serving.filter(|member| member.serves.load(Ordering::SeqCst));
        serving.for_each(|member| member.tell(self.set.target));
    }
}

#[cfg(test)]
#[path = "task_set/tests.rs"]
mod tests;
