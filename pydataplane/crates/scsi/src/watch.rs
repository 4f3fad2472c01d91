//! Blocks of a volume that must not change unnoticed, as a ROD token stands for them (`copy::token`), or not at all,
//! while a command reads, decides and writes; and what waits until the I/O that is under way has ended.
//!
//! # Why no change is missed
//! Whoever watches puts its ranges into a slot, sets [`Gate::Watched`] of all units of the volume, and then waits
//! until all commands have ended that may have begun before ([`Volume::settle`]). Each I/O that changes blocks
//! looks at the gate just before it is submitted, within its command. So it sees the gate, and marks the slot
//! before the medium changes; or its command had begun before the gate was there, and is waited for. What is read
//! between the end of the wait and a look at the slot that finds it unmarked is what the blocks were all the time.
//!
//! While nothing is watched or kept an I/O finds no gate, which it looks for anyhow, and neither locks nor allocates
//! here. Whoever keeps blocks, on an I/O thread too, takes locks that are held for microseconds, and allocates.
//!
//! # Why nothing comes between
//! COMPARE AND WRITE and ORWRITE keep their blocks ([`Volume::keep_blocks`]): the range, [`Gate::Kept`], and the same wait.
//! What began after the wait did and would change these blocks gives way until they are let go; what began before
//! does not, as it is waited for. One at a time keeps blocks or settles; who would be the second is answered BUSY,
//! and so nobody waits for one who waits for him.
//!
//! # Commands that are under way
//! Each thread counts its own, without a lock, on one of two sides, which its unit names. Who waits has a unit
//! name the other side, and waits until the first one has none left: what begins meanwhile counts on the other,
//! so that this ends on a busy unit, too. A thread counts, and then looks whether the side is still that one: by a
//! barrier of all threads after the change ([`everyone_sees`]) it is counted where it is waited for, or sees the
//! other side, and whatever was stored before that. What waits itself for work of other threads, and has no write of its
//! own, is not waited for.

use crate::shared::{Gate, LunShared};
use crate::volume::Volume;
use parking_lot::Mutex;
use rustix::thread::{MembarrierCommand, membarrier};
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering, compiler_fence};
use std::sync::{Arc, OnceLock, Weak};
use std::thread;
use std::time::{Duration, Instant};

/// Watches of a volume at a time.
const MAX_WATCHES: usize = 64;
/// Ranges of a watch.
pub(crate) const MAX_RANGES: usize = 64;
/// Between two looks at what is waited for; and longer than a thread takes to see what another has stored.
const PAUSE: Duration = Duration::from_millis(1);

/// Whether a barrier of all threads can be had, which is found out, and asked for, at the first call: that may take
/// milliseconds.
pub(crate) fn has_barrier() -> bool {
    static REGISTERED: OnceLock<bool> = OnceLock::new();
    *REGISTERED.get_or_init(|| membarrier(MembarrierCommand::RegisterPrivateExpedited).is_ok())
}

/// From now on every thread sees what was stored before, and what it had stored by then is seen here
/// (membarrier(2)): microseconds. `false`: the kernel has no such call, and that is so after [`PAUSE`].
fn everyone_sees() -> bool {
    has_barrier() && membarrier(MembarrierCommand::PrivateExpedited).is_ok()
}

/// Bytes of a volume: the first one, and how many.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Range {
    pub(crate) at: u64,
    pub(crate) bytes: u64,
}

/// What has become of what is watched.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u32)]
pub(crate) enum Watched {
    Unchanged = 1,
    /// It was changed, or is about to be.
    Changed = 2,
    /// Nobody used the watch for as long as was agreed.
    Expired = 3,
    /// Nobody needs it any more.
    Deleted = 4,
}

struct Slot {
    /// A [`Watch`] has it.
    taken: AtomicBool,
    /// [`Watched`]; 0: it watches nothing.
    state: AtomicU32,
    count: AtomicU32,
    /// First byte, and the one after the last, of `count` ranges.
    ranges: [(AtomicU64, AtomicU64); MAX_RANGES],
    /// Who uses it now.
    users: AtomicU32,
    /// When it expires, in milliseconds of [`now_ms`].
    expires: AtomicU64,
}

fn now_ms() -> u64 {
    static BEGUN: OnceLock<Instant> = OnceLock::new();
    BEGUN.get_or_init(Instant::now).elapsed().as_millis() as u64
}

impl Slot {
    fn new() -> Self {
        Slot {
            taken: AtomicBool::new(false),
            state: AtomicU32::new(0),
            count: AtomicU32::new(0),
            ranges: std::array::from_fn(|_| Default::default()),
            users: AtomicU32::new(0),
            expires: AtomicU64::new(0),
        }
    }

    fn is_live(&self) -> bool {
        self.state.load(Ordering::SeqCst) == Watched::Unchanged as u32
    }

    fn end(&self, how: Watched) {
        let (live, ended) = (Watched::Unchanged as u32, how as u32);
        _ = self.state.compare_exchange(live, ended, Ordering::SeqCst, Ordering::SeqCst);
    }

    fn ranges(&self) -> impl Iterator<Item = &(AtomicU64, AtomicU64)> {
        let count = self.count.load(Ordering::Acquire) as usize;
        self.ranges.iter().take(count)
    }

    fn overlaps(&self, range: Range) -> bool {
        let end = range.at.saturating_add(range.bytes);
        self.ranges().any(|(first, last)| {
            first.load(Ordering::Relaxed) < end && range.at < last.load(Ordering::Relaxed)
        })
    }

    fn expire(&self, now: u64) {
        if self.users.load(Ordering::SeqCst) == 0 && now >= self.expires.load(Ordering::SeqCst) {
            self.end(Watched::Expired);
        }
    }
}

/// The watches of a volume.
#[derive(Default)]
pub(crate) struct Watches {
    slots: OnceLock<Box<[Slot]>>,
    /// A watch begins, or a gate is set or opened.
    changing: Mutex<()>,
    /// [`Volume::settle`] and [`Volume::keep_blocks`], one after the other.
    settling: AtomicBool,
    /// First byte that is kept, and the one after the last.
    kept: (AtomicU64, AtomicU64),
}

impl Watches {
    fn slots(&self) -> &[Slot] {
        self.slots.get().map_or(&[], |slots| slots)
    }

    fn any(&self) -> bool {
        self.slots().iter().any(Slot::is_live)
    }

    /// Whether any of these bytes is kept.
    fn keeps(&self, range: Range) -> bool {
        let (first, last) = (&self.kept.0, &self.kept.1);
        let end = range.at.saturating_add(range.bytes);
        first.load(Ordering::SeqCst) < end && range.at < last.load(Ordering::SeqCst)
    }

    fn set_kept(&self, range: Range) {
        // Empty in between.
        self.kept.1.store(0, Ordering::SeqCst);
        self.kept.0.store(range.at, Ordering::SeqCst);
        self.kept.1.store(range.at.saturating_add(range.bytes), Ordering::SeqCst);
    }

    /// The right to name sides; `None`: another one has it.
    fn settling(&self) -> Option<Settling<'_>> {
        (!self.settling.swap(true, Ordering::Acquire)).then(|| Settling(self))
    }
}

/// Gives back the right to name sides.
struct Settling<'a>(&'a Watches);

impl Drop for Settling<'_> {
    fn drop(&mut self) {
        self.0.settling.store(false, Ordering::Release);
    }
}

/// Blocks that nothing else changes as long as it is there.
pub(crate) struct Kept {
    volume: Arc<Volume>,
    /// Units, and the side on which what is waited for is counted.
    waits: Vec<(Weak<LunShared>, u32)>,
    /// Not everyone may have seen it before.
    seen: Option<Instant>,
}

impl Kept {
    /// Whether what began before has ended; once it has, that stays so.
    pub(crate) fn is_quiet(&mut self) -> bool {
        let goes_on = |(unit, side): &(Weak<LunShared>, u32)| {
            unit.upgrade().is_some_and(|unit| unit.is_writing(*side))
        };
        if self.seen.is_some_and(|seen| Instant::now() < seen) || self.waits.iter().any(goes_on) {
            return false;
        }
        // A thread may count on such a side for a moment, until it looks again.
        self.waits.clear();
        self.seen = None;
        true
    }
}

impl Drop for Kept {
    fn drop(&mut self) {
        let watches = &self.volume.watches;
        let _changing = watches.changing.lock();
        watches.set_kept(Range { at: 0, bytes: 0 });
        self.volume.units().iter().for_each(|unit| unit.set_gate(Gate::Kept, false));
        watches.settling.store(false, Ordering::Release);
    }
}

/// Some blocks of a volume are watched as long as it is there.
pub(crate) struct Watch {
    volume: Arc<Volume>,
    slot: usize,
    timeout: Duration,
}

/// A watch does not expire meanwhile.
pub(crate) struct InUse<'a>(&'a Watch);

impl Watch {
    fn slot(&self) -> &Slot {
        &self.volume.watches.slots()[self.slot]
    }

    /// What has become of the blocks.
    pub(crate) fn state(&self) -> Watched {
        self.slot().expire(now_ms());
        match self.slot().state.load(Ordering::SeqCst) {
            1 => Watched::Unchanged,
            3 => Watched::Expired,
            4 => Watched::Deleted,
            _ => Watched::Changed,
        }
    }

    /// It is used: it does not expire, and when that is over, as long from then on as was agreed.
    pub(crate) fn in_use(&self) -> InUse<'_> {
        self.slot().users.fetch_add(1, Ordering::SeqCst);
        InUse(self)
    }

    /// Nobody needs it any more.
    pub(crate) fn delete(&self) {
        self.slot().end(Watched::Deleted);
    }

    /// As if the blocks had changed.
    pub(crate) fn revoke(&self) {
        self.slot().end(Watched::Changed);
    }

    fn begin_timeout(&self) {
        let expires = now_ms().saturating_add(self.timeout.as_millis() as u64);
        self.slot().expires.store(expires, Ordering::SeqCst);
    }
}

impl Drop for InUse<'_> {
    fn drop(&mut self) {
        self.0.begin_timeout();
        self.0.slot().users.fetch_sub(1, Ordering::SeqCst);
    }
}

impl Drop for Watch {
    fn drop(&mut self) {
        self.slot().state.store(0, Ordering::SeqCst);
        self.slot().taken.store(false, Ordering::SeqCst);
    }
}

impl Volume {
    /// Watches blocks, up to [`MAX_RANGES`] ranges, until nobody has used the watch for `timeout`; `None`: there
    /// are too many watches. Only after [`Volume::settle`] no change is missed. Takes locks: not for I/O threads.
    pub(crate) fn watch(self: &Arc<Self>, ranges: &[Range], timeout: Duration) -> Option<Watch> {
        debug_assert!(ranges.len() <= MAX_RANGES);
        let _changing = self.watches.changing.lock();
        let make = || (0..MAX_WATCHES).map(|_| Slot::new()).collect();
        let slots = self.watches.slots.get_or_init(make);
        let index = slots.iter().position(|slot| !slot.taken.load(Ordering::SeqCst))?;
        let slot = &slots[index];
        slot.taken.store(true, Ordering::SeqCst);
        for ((first, last), range) in slot.ranges.iter().zip(ranges) {
            first.store(range.at, Ordering::Relaxed);
            last.store(range.at.saturating_add(range.bytes), Ordering::Relaxed);
        }
        slot.count.store(ranges.len() as u32, Ordering::Release);
        let watch = Watch { volume: Arc::clone(self), slot: index, timeout };
        watch.begin_timeout();
        slot.state.store(Watched::Unchanged as u32, Ordering::SeqCst);
        self.units().iter().for_each(|unit| unit.set_gate(Gate::Watched, true));
        Some(watch)
    }

    /// Blocks are about to change. For a unit at [`Gate::Watched`], on any thread; never waits.
    #[cold]
    pub(crate) fn changes(&self, unit: &LunShared, range: Range) {
        let now = now_ms();
        for slot in self.watches.slots().iter().filter(|slot| slot.is_live()) {
            match slot.overlaps(range) {
                true => slot.end(Watched::Changed),
                false => slot.expire(now),
            }
        }
        if !self.watches.any()
            && let Some(_changing) = self.watches.changing.try_lock()
            && !self.watches.any()
        {
            unit.set_gate(Gate::Watched, false);
        }
    }

    /// All blocks are about to change.
    pub(crate) fn all_changes(&self) {
        self.watches.slots().iter().for_each(|slot| slot.end(Watched::Changed));
    }

    /// A unit that has joined the volume knows whether any block is watched.
    pub(crate) fn tell_watched(&self, unit: &LunShared) {
        let _changing = self.watches.changing.lock();
        if self.watches.any() {
            unit.set_gate(Gate::Watched, true);
        }
        if self.watches.keeps(Range { at: 0, bytes: u64::MAX }) {
            unit.set_gate(Gate::Kept, true);
        }
    }

    /// Keeps blocks for one command, which may go on when that [is quiet](Kept::is_quiet) and is not waited for itself
    /// ([`InFlight::wait`]); `None`: not now. Takes locks that are held for microseconds, and allocates.
    pub(crate) fn keep_blocks(self: &Arc<Self>, range: Range) -> Option<Kept> {
        let settling = self.watches.settling()?;
        // What another one, who was cancelled, has left on the other side.
        if self.units().iter().any(|unit| unit.is_writing(unit.side() ^ 1)) {
            return None;
        }
        let changing = self.watches.changing.lock();
        self.watches.set_kept(range);
        // One that joins from now on has the gate, and nothing under way.
        let units = self.units();
        units.iter().for_each(|unit| unit.set_gate(Gate::Kept, true));
        drop(changing);
        let turn = |unit: &Arc<LunShared>| {
            let side = unit.side();
            unit.set_side(side ^ 1);
            (Arc::downgrade(unit), side)
        };
        let waits = units.iter().map(turn).collect();
        std::mem::forget(settling);
        let seen = (!everyone_sees()).then(|| Instant::now() + PAUSE);
        Some(Kept { volume: Arc::clone(self), waits, seen })
    }

    /// Whether a command, counted on that side, is to wait before it changes these blocks. For a unit at
    /// [`Gate::Kept`], on any thread.
    #[cold]
    pub(crate) fn is_kept_from(&self, unit: &LunShared, side: u32, range: Range) -> bool {
        self.watches.keeps(range) && unit.side() == side
    }

    /// Waits until all commands of all units of the volume have ended that may not have seen what was stored
    /// before, as long as `goes_on`; says whether they have. For threads that may wait, not for I/O threads.
    pub(crate) fn settle(&self, goes_on: impl Fn() -> bool) -> bool {
        let wait = |over: &dyn Fn() -> bool| {
            while !over() {
                if !goes_on() {
                    return false;
                }
                thread::sleep(PAUSE);
            }
            true
        };
        let settling = loop {
            match self.watches.settling() {
                Some(settling) => break settling,
                None if goes_on() => thread::sleep(PAUSE),
                None => return false,
            }
        };
        for unit in self.units() {
            // What another one, who was cancelled, has left on that side.
            let side = unit.side();
            if !wait(&|| !unit.is_writing(side ^ 1)) {
                return false;
            }
            unit.set_side(side ^ 1);
            if !everyone_sees() {
                thread::sleep(PAUSE);
            }
            if !wait(&|| !unit.is_writing(side)) {
                return false;
            }
        }
        drop(settling);
        true
    }
}

/// Commands of one thread that are not over, on two sides: of each how many there are, in the lower half, and how
/// many of them wait for work of other threads, in the upper one.
#[derive(Default)]
pub(crate) struct Counts([AtomicU64; 2]);

impl Counts {
    const WAITS: u64 = 1 << 32;

    fn of(&self, side: u32) -> &AtomicU64 {
        &self.0[side as usize & 1]
    }

    /// All that are not over.
    pub(crate) fn all(&self) -> u32 {
        self.0.iter().map(|side| side.load(Ordering::SeqCst) as u32).sum()
    }

    /// Whether there is one, on that side, that does not wait for others.
    pub(crate) fn has_writing(&self, side: u32) -> bool {
        let count = self.of(side).load(Ordering::SeqCst);
        count as u32 != (count / Self::WAITS) as u32
    }
}

/// Commands of one thread that are not over, told to whoever has to wait for them: stored by that thread
/// alone, without a lock.
#[derive(Default)]
pub(crate) struct InFlight(Arc<Counts>);

impl InFlight {
    /// For others to look at.
    pub(crate) fn shared(&self) -> Weak<Counts> {
        Arc::downgrade(&self.0)
    }

    /// A command of `unit` begins, on the side that it names now, which is returned.
    #[inline]
    pub(crate) fn begin(&self, unit: &LunShared) -> u32 {
        loop {
            let side = unit.side();
            let of = self.0.of(side);
            of.store(of.load(Ordering::Relaxed) + 1, Ordering::Release);
            // What comes first here is first for everybody, as of [`everyone_sees`].
            compiler_fence(Ordering::SeqCst);
            if unit.side() == side {
                return side;
            }
            self.end(side, false);
        }
    }

    /// It waits for work of other threads, or for all that began before it, from now on.
    #[cold]
    pub(crate) fn wait(&self, side: u32) {
        let of = self.0.of(side);
        of.store(of.load(Ordering::Relaxed) + Counts::WAITS, Ordering::Release);
    }

    /// It ends; `waits`: after [`InFlight::wait`].
    #[inline]
    pub(crate) fn end(&self, side: u32, waits: bool) {
        let of = self.0.of(side);
        let one = 1 + if waits { Counts::WAITS } else { 0 };
        of.store(of.load(Ordering::Relaxed).saturating_sub(one), Ordering::Release);
    }
}
