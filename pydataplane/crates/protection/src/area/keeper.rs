//! What keeps the maps of a volume: says in them what is about to be written, takes that back when it is over,
//! and looks through what was being written when a process ended.
//!
//! It alone changes maps, and may wait for the device below. Channels ask it with [`Want`]s. All volumes of an
//! lvstore have one thread for it ([`super::Keepers`]).

mod looking;

use super::layout::{PAGE, REGION_BLOCKS};
use super::map;
use super::shared::{Shared, Unit, Want, Zone};
use bdev::{AlignedBuf, Bdev, FlushLatch, IoError, SyncChannel, SyncError};
use looking::Looking;
use reactor::Next;
use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

/// How long those who are at work are waited for, together.
const PATIENCE: Duration = Duration::from_secs(1);
/// How long maps are written for a pause. Units of others stay marked.
const PAUSING: Duration = Duration::from_secs(1);
/// Zones that are cleaned at a time, while those who want something wait.
const ZONES_AT_ONCE: usize = 16;
/// Requests that are answered at a time.
const WANTS_AT_ONCE: usize = 256;

/// I/Os that fail because a map cannot be read, before it is taken for lost.
const MAP_TRIES: u32 = 8;

/// How long a unit stays writable.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Times {
    /// The keeper looks for units to clean this often.
    pub turn: Duration,
    /// Turns without a write after which one is cleaned.
    pub quiet: u32,
    /// What could not be looked through is tried again after so long, and for so long a map that cannot be read.
    pub again: Duration,
}

impl Default for Times {
    fn default() -> Self {
        Times { turn: Duration::from_secs(1), quiet: 5, again: Duration::from_secs(60) }
    }
}

/// A unit: its zone, and which one of that.
type Number = (u64, u64);

/// A unit that its map may say is being written to.
#[derive(Clone, Copy, Debug, Default)]
struct Marked {
    /// No power cut takes that back: its gate may be open.
    durably: bool,
    /// Turns since it was written to.
    quiet: u32,
    /// It is not looked through or cleaned before, as that failed.
    not_before: Option<Instant>,
    /// Regions of which blocks could not be read when it was looked through, each as a bit.
    unreadable: u64,
}

pub(crate) struct Keeper {
    shared: Arc<Shared>,
    below: Arc<dyn Bdev>,
    /// While there is anything to do.
    channel: Option<SyncChannel>,
    /// It was used since the last turn.
    used: bool,
    /// Zones whose map was read.
    known: BTreeSet<u64>,
    /// Zones whose map is unreadable: how often in a row, and since when.
    unreadable: BTreeMap<u64, (u32, Instant)>,
    /// All units of those that their map may say are being written to.
    marked: BTreeMap<Number, Marked>,
    /// From which one on those that were quiet are to be cleaned.
    cleaning: Option<Number>,
    /// There may be one that is to be looked through.
    suspects: bool,
    looking: Option<Looking>,
    /// Nothing becomes writable: a snapshot is being taken.
    paused: bool,
    /// What is to become writable then.
    put_off: BTreeSet<Number>,
    times: Times,
    next_turn: Instant,
}

impl Keeper {
    pub fn new(shared: Arc<Shared>, below: Arc<dyn Bdev>, times: Times) -> Keeper {
        let failures = below.flush_latch().map_or(0, FlushLatch::failures);
        shared.failures.store(failures, Ordering::SeqCst);
        Keeper {
            shared,
            below,
            channel: None,
            used: false,
            known: BTreeSet::new(),
            unreadable: BTreeMap::new(),
            marked: BTreeMap::new(),
            cleaning: None,
            suspects: false,
            looking: None,
            paused: false,
            put_off: BTreeSet::new(),
            times,
            next_turn: Instant::now() + times.turn,
        }
    }

    /// Whether nobody uses it any more.
    pub fn is_over(&self) -> bool {
        self.shared.wants.is_closed()
    }

    /// Runs `f` with the channel below, opened if it is not.
    fn with<R>(
        &mut self,
        f: impl FnOnce(&mut SyncChannel) -> Result<R, SyncError>,
    ) -> Result<R, IoError> {
        if self.channel.is_none() {
            match SyncChannel::open(&*self.below) {
                Ok(channel) => self.channel = Some(channel),
                Err(e) => {
                    tracing::error!("{e}");
                    return Err(IoError::Resources);
                }
            }
        }
        self.used = true;
        let done = f(self.channel.as_mut().expect("opened above")).map_err(|e| e.cause);
        // Where a failed flush is remembered, everybody is told anyhow.
        if done.as_ref().err() == Some(&IoError::Flush) && !self.is_latched() {
            self.shared.flush_failed();
            self.shared.owe_failure();
        }
        done
    }

    fn is_read_only(&self) -> bool {
        self.below.features().read_only
    }

    /// Whether a flush failed and nobody looked into it: nothing can be made durable.
    fn is_latched(&self) -> bool {
        self.below.flush_latch().is_some_and(FlushLatch::is_set)
    }

    /// Where a flush has failed, whosever it was, it may have lost data and not its tuples, or the other way.
    fn look_at_flushes(&mut self) {
        let failures = self.below.flush_latch().map_or(0, FlushLatch::failures);
        let failed = self.shared.unsettled();
        if failed.is_none() && failures == self.shared.failures.load(Ordering::SeqCst) {
            return;
        }
        self.suspect_all();
        self.shared.failures.store(failures, Ordering::SeqCst);
        if let Some(failed) = failed {
            self.shared.settle(failed);
        }
    }

    /// No block that was written since the map said so is known to have its tuple.
    pub fn suspect_all(&mut self) {
        for (zone, nth) in self.marked.keys() {
            self.shared.unit(*zone, *nth).iter().for_each(|unit| unit.suspect());
        }
        self.suspects = true;
    }

    /// Reads the map of a zone.
    fn look(&mut self, number: u64) {
        let layout = self.shared.layout;
        let zones = layout.zones(layout.data_blocks(self.below.geometry().num_blocks));
        let shared = self.shared.clone();
        let Some(zone) = shared.make_zone(number).filter(|zone| !zone.is_known()) else { return };
        if number >= zones {
            return;
        }
        let mut page = AlignedBuf::zeroed(PAGE);
        if let Err(e) = self.with(|channel| channel.read(layout.map(number), &mut page)) {
            let name = self.below.name();
            tracing::error!("the protection map of zone {number} of {name} cannot be read: {e}");
            if !self.is_lost(number, e) {
                return zone.fail(e);
            }
            // It is not one, and so taken for a damaged one.
            page.fill(0xFF);
        } else {
            self.unreadable.remove(&number);
        }
        let dirty = map::decode(number, &page);
        if let Err(why) = &dirty {
            let name = self.below.name();
            tracing::error!("the protection map of zone {number} of {name} is damaged: {why}");
        }
        for (nth, unit) in (0..).zip(&*zone.units) {
            if dirty.as_ref().map_or(true, |dirty| dirty(nth)) {
                unit.suspect();
                // Nothing of one that is only read is ever changed.
                if !self.is_read_only() {
                    self.marked.entry((number, nth)).or_default();
                    self.suspects = true;
                }
            }
        }
        self.known.insert(number);
        zone.set_known();
    }

    /// Whether a map that could not be read is taken for lost: it will not come back, and be written anew.
    fn is_lost(&mut self, zone: u64, error: IoError) -> bool {
        let now = Instant::now();
        let (failed, since) = self.unreadable.entry(zone).or_insert((0, now));
        *failed += 1;
        let lost = error == IoError::ReadMedium
            && *failed >= MAP_TRIES
            && now.duration_since(*since) >= self.times.again;
        if lost {
            self.unreadable.remove(&zone);
        }
        lost
    }

    /// Answers what is asked for; `false`: that waits for the end of a pause.
    fn serve(&mut self) -> bool {
        let (mut served, mut looked) = (0, false);
        while served < WANTS_AT_ONCE
            && let Some(want) = self.shared.wants.next_want()
        {
            match want {
                Want::Look(zone) => {
                    self.look(zone);
                    looked = true;
                }
                Want::Write(zone, unit) => _ = self.put_off.insert((zone, unit)),
            }
            served += 1;
        }
        if self.put_off.is_empty() {
            return true;
        }
        if self.paused {
            return looked;
        }
        let mut zones: BTreeMap<u64, BTreeSet<u64>> = BTreeMap::new();
        for (zone, unit) in std::mem::take(&mut self.put_off) {
            zones.entry(zone).or_default().insert(unit);
        }
        zones.iter().for_each(|(zone, units)| self.admit(*zone, units));
        true
    }

    /// Makes units writable, durably first.
    fn admit(&mut self, number: u64, wanted: &BTreeSet<u64>) {
        let shared = self.shared.clone();
        // It may be gone meanwhile: who asks finds out.
        let Some(zone) = shared.zone(number).filter(|zone| zone.is_known()) else { return };
        let marked = self.mark(number, wanted);
        for (nth, unit) in
            wanted.iter().filter_map(|nth| Some((nth, zone.units.get(*nth as usize)?)))
        {
            match marked {
                Ok(()) => {
                    self.marked.entry((number, *nth)).or_default().quiet = 0;
                    unit.gate.open();
                }
                Err(e) => unit.gate.refuse(e),
            }
        }
    }

    /// Has the map of a zone say durably that units are being written to.
    fn mark(&mut self, zone: u64, wanted: &BTreeSet<u64>) -> Result<(), IoError> {
        let is_marked = |nth: &u64| self.marked.get(&(zone, *nth)).is_some_and(|its| its.durably);
        if wanted.iter().all(is_marked) {
            return Ok(());
        }
        let dirty: BTreeSet<u64> = self.marked_in(zone).chain(wanted.iter().copied()).collect();
        if let Err(e) = self.write_map(zone, &dirty, true) {
            let name = self.below.name();
            tracing::error!("blocks of zone {zone} of {name} take no writes: {e}");
            return Err(e);
        }
        for nth in dirty {
            self.marked.entry((zone, nth)).or_default().durably = true;
        }
        Ok(())
    }

    /// Units of a zone that its map may say are being written to.
    fn marked_in(&self, zone: u64) -> impl Iterator<Item = u64> + '_ {
        self.marked.range((zone, 0)..=(zone, u64::MAX)).map(|((_, nth), _)| *nth)
    }

    fn write_map(
        &mut self,
        zone: u64,
        dirty: &BTreeSet<u64>,
        durably: bool,
    ) -> Result<(), IoError> {
        let mut page = AlignedBuf::zeroed(PAGE);
        map::encode(zone, dirty.iter().copied(), &mut page);
        let (at, fua) = (self.shared.layout.map(zone), self.below.features().fua);
        self.with(|channel| match (durably, fua) {
            (true, true) => channel.write_fua(at, &page),
            (true, false) => channel.write(at, &page).and_then(|()| channel.flush()),
            (false, _) => channel.write(at, &page),
        })
    }

    /// Counts the turns in which units were not written to, and has those cleaned that were quiet for some.
    fn turn(&mut self) {
        for (number, its) in &mut self.marked {
            let touched = self.shared.unit(number.0, number.1).is_some_and(Unit::take_touched);
            its.quiet = if touched { 0 } else { its.quiet.saturating_add(1) };
        }
        self.cleaning = Some((0, 0));
    }

    fn can_clean(&mut self) -> bool {
        self.look_at_flushes();
        !self.is_read_only() && !self.is_latched()
    }

    /// Cleans some of those that were quiet.
    fn clean_some(&mut self) {
        let Some(from) = self.cleaning.take() else { return };
        if !self.can_clean() {
            return;
        }
        let now = Instant::now();
        let quiet = |(_, its): &(&Number, &Marked)| {
            its.quiet >= self.times.quiet && its.not_before.is_none_or(|time| time <= now)
        };
        let mut zones = BTreeSet::new();
        let mut units = Vec::new();
        for (number, _) in self.marked.range(from..).filter(quiet) {
            if !zones.contains(&number.0) && zones.len() == ZONES_AT_ONCE {
                self.cleaning = Some(*number);
                break;
            }
            if self.unit(*number).is_some_and(|unit| unit.doubts() == 0 && unit.gate.close()) {
                zones.insert(number.0);
                units.push(*number);
            }
        }
        self.clean_units(units, None);
    }

    /// Has maps say no more that units are being written to, of all, as far as that can be done until then.
    pub fn clean_all(&mut self, until: Option<Instant>) {
        if !self.can_clean() {
            return;
        }
        let mut closed = Vec::new();
        for number in self.marked.keys() {
            if let Some(unit) = self.unit(*number).filter(|unit| unit.doubts() == 0) {
                unit.gate.shut();
                closed.push(*number);
            }
        }
        let patience = Instant::now() + PATIENCE;
        let is_empty = |number: &Number| self.unit(*number).is_some_and(|u| u.gate.is_empty());
        while !closed.iter().all(is_empty) && Instant::now() < patience {
            std::thread::sleep(Duration::from_micros(100));
        }
        let (closed, busy): (Vec<_>, Vec<_>) = closed.into_iter().partition(is_empty);
        busy.iter().for_each(|number| self.reopen(*number));
        self.clean_units(closed, until);
    }

    /// Has maps say no more that units are being written to into which nobody is let any more.
    fn clean_units(&mut self, closed: Vec<Number>, until: Option<Instant>) {
        if closed.is_empty() {
            return;
        }
        let flushed = self.with(SyncChannel::flush).is_ok();
        self.look_at_flushes();
        let well = flushed && !self.is_latched();
        let mut zones: BTreeMap<u64, BTreeSet<u64>> = BTreeMap::new();
        for number in closed {
            match well && self.unit(number).is_some_and(|unit| unit.doubts() == 0) {
                true => _ = zones.entry(number.0).or_default().insert(number.1),
                false => self.reopen(number),
            }
        }
        for (zone, over) in zones {
            if until.is_some_and(|until| Instant::now() > until) {
                over.iter().for_each(|nth| self.reopen((zone, *nth)));
                continue;
            }
            let stays: BTreeSet<u64> =
                self.marked_in(zone).filter(|nth| !over.contains(nth)).collect();
            let written = self.write_map(zone, &stays, false);
            if let Err(e) = &written {
                tracing::warn!("the protection map of zone {zone} of {}: {e}", self.below.name());
            }
            for nth in over {
                match (&written, self.marked.get_mut(&(zone, nth))) {
                    (Ok(()), _) => _ = self.marked.remove(&(zone, nth)),
                    // Nobody knows what the map says.
                    (Err(_), Some(its)) => {
                        its.durably = false;
                        self.delay((zone, nth));
                    }
                    (Err(_), None) => {}
                }
            }
        }
        // Who wants to write there meanwhile waits.
        self.shared.wants.answered();
    }

    /// What failed is not tried again at once.
    fn delay(&mut self, number: Number) {
        let again = Instant::now() + self.times.again;
        if let Some(its) = self.marked.get_mut(&number) {
            its.not_before = Some(again);
        }
    }

    /// Writes may go on, as the map still says so.
    fn reopen(&self, number: Number) {
        if self.marked.get(&number).is_some_and(|its| its.durably) {
            self.shared.unit(number.0, number.1).iter().for_each(|unit| unit.gate.open());
        }
    }

    /// Has all maps say that nothing is being written, where that is so, and nothing become writable before
    /// [`Keeper::resume`].
    pub fn pause(&mut self) {
        // The next flush, for which those who write wait, has little to do then.
        if self.can_clean() && !self.marked.is_empty() {
            let _ = self.with(SyncChannel::flush);
        }
        self.clean_all(Some(Instant::now() + PAUSING));
        self.paused = true;
    }

    /// Ends that, and what [`Keeper::begin_reload`] began.
    pub fn resume(&mut self) {
        self.paused = false;
        self.marked.keys().for_each(|number| self.reopen(*number));
        self.serve();
        self.shared.wants.answered();
    }

    /// Nobody begins to write before [`Keeper::resume`], and nothing is known to have its tuple.
    pub fn begin_reload(&mut self) {
        self.paused = true;
        self.suspect_all();
        for number in self.marked.keys() {
            self.unit(*number).iter().for_each(|unit| unit.gate.shut());
        }
    }

    /// Maps may say what they said at another time: they are read anew, and what they said until now that is
    /// being written to is so still, but not durably.
    pub fn reloaded(&mut self) {
        self.forget_zones();
        for its in self.marked.values_mut() {
            its.durably = false;
        }
        self.suspect_all();
        for number in std::mem::take(&mut self.known) {
            self.shared.zone(number).iter().for_each(|zone| zone.shut());
        }
        // Who is in the midst of a write does not ask.
        let is_in =
            |number: &&Number| self.unit(**number).is_some_and(|unit| !unit.gate.is_empty());
        let busy: Vec<Number> = self.marked.keys().filter(is_in).copied().collect();
        for (zone, nth) in busy {
            self.look(zone);
            if self.knows(zone) {
                // Where that fails it is marked before the next write.
                let _ = self.mark(zone, &BTreeSet::from([nth]));
            }
        }
    }

    /// Whether the map of a zone was read.
    fn knows(&self, zone: u64) -> bool {
        self.shared.zone(zone).is_some_and(Zone::is_known)
    }

    /// What is known of zones that the device has no more does not count, should it have them again.
    pub fn forget_zones(&mut self) {
        let layout = self.shared.layout;
        let zones = layout.zones(layout.data_blocks(self.below.geometry().num_blocks));
        for number in self.known.split_off(&zones) {
            self.shared.zone(number).iter().for_each(|zone| zone.forget());
        }
        self.marked.split_off(&(zones, 0));
        self.looking = None;
    }

    /// Cleans all that can be, and answers nobody any more. Safe to repeat.
    pub fn close(&mut self) {
        if self.is_over() {
            return;
        }
        self.clean_all(None);
        for (zone, nth) in self.marked.keys() {
            self.shared.unit(*zone, *nth).iter().for_each(|unit| unit.gate.shut());
        }
        self.channel = None;
        self.shared.wants.close();
    }

    /// What failed is tried again at once.
    #[cfg(test)]
    pub fn look_again(&mut self) {
        self.marked.values_mut().for_each(|its| its.not_before = None);
        self.suspects = true;
    }

    #[cfg(test)]
    pub fn is_waited_for(&self) -> bool {
        !self.put_off.is_empty()
    }

    fn unit(&self, (zone, nth): Number) -> Option<&Unit> {
        self.shared.unit(zone, nth)
    }

    /// A bounded piece of its work.
    pub fn round(&mut self) -> Next {
        if self.serve() {
            self.shared.wants.answered();
        }
        let lost = self.shared.take_lost_pages();
        if lost > 0 {
            tracing::error!(
                "{lost} times protection information of {} could not be read and was written anew: up to \
                 {REGION_BLOCKS} blocks each have none until they are written again",
                self.below.name()
            );
        }
        self.look_at_flushes();
        self.suspects |= self.shared.suspects.swap(false, Ordering::SeqCst);
        let now = Instant::now();
        if now >= self.next_turn {
            self.next_turn = now + self.times.turn;
            self.turn();
            if self.marked.is_empty() && !std::mem::take(&mut self.used) {
                self.channel = None;
            }
        }
        if !self.paused {
            self.clean_some();
        }
        let later = self.look_through();
        if later == Next::Now
            || self.cleaning.is_some() && !self.paused
            || self.shared.wants.is_asked()
        {
            return Next::Now;
        }
        if self.marked.is_empty() && self.channel.is_none() {
            return Next::WhenRung;
        }
        let turn = self.next_turn.saturating_duration_since(now);
        match later {
            Next::Within(time) => Next::Within(time.min(turn)),
            _ => Next::Within(turn),
        }
    }
}
