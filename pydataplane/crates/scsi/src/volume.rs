//! What all logical units of one volume share, whichever controllers they are of: reservations, and who
//! reads, decides and writes now.

mod known;
mod waiting;

use crate::mode::ModeState;
use crate::nexus::UnitAttention;
use crate::records::RecordKeeper;
use crate::reservations::{
    Access, Changed, Keeping, NexusName, Order, Refusal, ReservationKeeper, Reservations, Saved,
    Told, transport_id,
};
use crate::response::Fail;
use crate::sanitize::Sanitize;
use crate::sense::{Code, Key, Sense};
use crate::shared::LunShared;
use crate::watch::{Kept, Range, Watches};
use known::Unknown;
use parking_lot::{Mutex, MutexGuard};
use std::collections::HashMap;
use std::sync::{Arc, OnceLock, Weak};
use std::time::{Duration, Instant};
use uuid::Uuid;

/// How long a preempted nexus' threads may take to see that they are, at most: what began a moment before
/// is counted by then.
const SEEN: Duration = Duration::from_millis(1);

/// State of a volume that is the same for all initiators. Found by the volume's UUID.
pub(crate) struct Volume {
    /// No other lock is taken with it held, and no nexus is let go: its end takes it.
    reserved: Mutex<Reserved>,
    /// One reads at a time what is kept. Taken before `reserved`.
    reading: Mutex<()>,
    keeping: Option<Keeping>,
    uuid: Uuid,
    records: Option<Arc<dyn RecordKeeper>>,
    pub(crate) sanitize: Sanitize,
    pub(crate) modes: ModeState,
    pub(crate) watches: Watches,
}

#[derive(Default)]
struct Reserved {
    reservations: Reservations,
    /// They are not known: what is said of them above is what was known last.
    unknown: Option<Unknown>,
    /// What was kept was read when no other program served any more: nothing read later overrules it.
    settled: bool,
    /// A session of this program has begun: no other program serves.
    is_served: bool,
    /// They were not known at some time.
    was_unknown: bool,
    /// Counts the changes that are to be kept.
    changes: u64,
    units: Vec<Weak<LunShared>>,
}

/// What has to be waited for before a change of reservations is acknowledged.
pub(crate) struct Settling {
    volume: Arc<Volume>,
    change: u64,
    /// Nexuses whose tasks are aborted, and since when.
    aborted: Vec<Arc<LunShared>>,
    since: Instant,
    /// Who replaces what is lost: a later change may be saved where that one could not be.
    replaces: Option<NexusName>,
}

impl Volume {
    /// That of the volume as which units show themselves. It lasts as long as any unit has it; the first
    /// one says where its reservations are kept, and its records. Takes a lock and reads what was kept: for
    /// control threads.
    pub(crate) fn of(
        uuid: Uuid,
        keeper: Option<Arc<dyn ReservationKeeper>>,
        records: Option<Arc<dyn RecordKeeper>>,
    ) -> Arc<Volume> {
        static VOLUMES: OnceLock<Mutex<HashMap<Uuid, Weak<Volume>>>> = OnceLock::new();
        let mut volumes = VOLUMES.get_or_init(Mutex::default).lock();
        volumes.retain(|_, volume| volume.strong_count() > 0);
        if let Some(there) = volumes.get(&uuid).and_then(Weak::upgrade) {
            return there;
        }
        crate::watch::has_barrier();
        let keeping = keeper.map(|keeper| Keeping::new(keeper, uuid));
        let mut reserved = Reserved::default();
        reserved.take(keeping.as_ref().map_or(Ok(Reservations::default()), Keeping::kept));
        let reserved = Mutex::new(reserved);
        let volume = Arc::new(Volume {
            reserved,
            reading: Mutex::default(),
            keeping,
            uuid,
            records,
            sanitize: Sanitize::new(),
            modes: ModeState::default(),
            watches: Watches::default(),
        });
        volumes.insert(uuid, Arc::downgrade(&volume));
        drop(volumes);
        waiting::reads_until_known(&volume);
        volume
    }

    /// `unit` is one of its units from now on.
    pub(crate) fn join(&self, unit: &Arc<LunShared>) {
        let mut reserved = self.reserved.lock();
        reserved.units.retain(|unit| unit.strong_count() > 0);
        reserved.units.push(Arc::downgrade(unit));
        unit.set_access(reserved.access(unit.nexus_name()));
        drop(reserved);
        self.tell_watched(unit);
    }

    /// Its UUID.
    pub(crate) fn uuid(&self) -> Uuid {
        self.uuid
    }

    /// Where its records are kept.
    pub(crate) fn records(&self) -> Option<&Arc<dyn RecordKeeper>> {
        self.records.as_ref()
    }

    /// Its units. Takes the lock of its reservations.
    pub(crate) fn units(&self) -> Vec<Arc<LunShared>> {
        self.reserved.lock().units.iter().filter_map(Weak::upgrade).collect()
    }

    /// Ends all tasks of `which` of its units while none takes the place of another one ([`LunShared::replace`]), which
    /// would not know whether its own are ended, too.
    pub(crate) fn abort_tasks(&self, which: &[Arc<LunShared>]) {
        self.look(|_| which.iter().for_each(|unit| unit.abort_tasks()));
    }

    /// As [`Volume::abort_tasks`], of all its units, which it returns.
    pub(crate) fn abort_all_tasks(&self) -> Vec<Arc<LunShared>> {
        let reserved = self.reserved.lock();
        let units: Vec<_> = reserved.units.iter().filter_map(Weak::upgrade).collect();
        units.iter().for_each(|unit| unit.abort_tasks());
        units
    }

    /// Whether it has one.
    pub(crate) fn has_units(&self) -> bool {
        self.reserved.lock().units.iter().any(|unit| unit.strong_count() > 0)
    }

    /// Whether a registration can outlive a loss of power.
    pub(crate) fn can_persist(&self) -> bool {
        self.keeping.is_some()
    }

    /// Looks at the reservations. Holds a lock that is never held for longer than a change in memory.
    pub(crate) fn look<T>(&self, at: impl FnOnce(&Reservations) -> T) -> T {
        at(&self.reserved.lock().reservations)
    }

    /// Does what PERSISTENT RESERVE OUT of the unit's nexus orders. All units know of it when this returns;
    /// what has to be waited for before it is acknowledged is returned.
    pub(crate) fn order(
        self: &Arc<Self>,
        unit: &LunShared,
        order: Order,
    ) -> Result<Settling, Fail> {
        let nexus = unit.nexus_name();
        let mut reserved = self.reserved.lock();
        reserved.check_order(Some(&order))?;
        let before = reserved.reservations.clone();
        let of = &mut reserved.reservations;
        let changed = match order {
            Order::Register { key, new, persist } => of.register(nexus, key, new, persist),
            Order::Reserve { key, kind } => of.reserve(nexus, key, kind),
            Order::Release { key, kind } => of.release(nexus, key, kind),
            Order::Clear { key } => of.clear(nexus, key),
            Order::Preempt { key, of: victim, kind, .. } => of.preempt(nexus, key, victim, kind),
            Order::Move { key, new, to, ends, persist } => {
                let to = reserved.named(&to).filter(|to| to != nexus);
                let to = to.ok_or(Sense::invalid_parameter(24))?;
                let of = &mut reserved.reservations;
                let changed = of.hand_over(nexus, key, &to, new, ends);
                of.persist = if changed.is_ok() { persist } else { of.persist };
                changed
            }
            Order::Replace { new, kind, persist } => {
                *of = Reservations::replaced(nexus, new, kind, persist);
                Ok(Changed::default())
            }
        };
        let Changed { told, preempted } = changed?;
        let replaces = matches!(order, Order::Replace { .. });
        let is_new = replaces || reserved.reservations != before;
        reserved.changes += u64::from(is_new);
        if replaces {
            reserved.replace_lost();
        }
        reserved.tell_access();
        let with_units = |(nexus, told)| (reserved.of(&nexus).collect::<Vec<_>>(), told);
        let told: Vec<_> = told.into_iter().map(with_units).collect();
        let mut aborted = Vec::new();
        if matches!(order, Order::Preempt { abort: true, .. }) {
            aborted.extend(preempted.iter().flat_map(|nexus| reserved.of(nexus)));
        }
        let change = reserved.changes;
        drop(reserved);
        for (units, told) in told {
            units.iter().for_each(|unit| unit.post(told.into()));
        }
        self.abort_tasks(&aborted);
        if is_new {
            self.save(change);
        }
        let (volume, since) = (Arc::clone(self), Instant::now());
        let replaces = replaces.then(|| Arc::clone(nexus));
        Ok(Settling { volume, change, aborted, since, replaces })
    }

    /// Has the change saved by a thread of its own.
    fn save(self: &Arc<Self>, change: u64) {
        let Some(keeping) = &self.keeping else { return };
        let volume = Arc::clone(self);
        let begun = crate::aside::run("reservations", move || {
            let now = || {
                let reserved = volume.reserved.lock();
                (reserved.changes, reserved.reservations.clone())
            };
            let ended = |change, is_saved| volume.saved(change, is_saved);
            volume.keeping.iter().for_each(|keeping| keeping.save(now, ended));
        });
        if !begun {
            self.saved(change, false);
            keeping.give_up(change);
        }
    }

    /// RESERVE(6) and RELEASE(6) of the unit's nexus.
    pub(crate) fn reserve_unit(&self, unit: &LunShared, release: bool) -> Result<(), Fail> {
        let mut reserved = self.reserved.lock();
        reserved.check_order(None)?;
        let of = &mut reserved.reservations;
        let done: Result<(), Refusal> = match release {
            false => of.reserve_unit(unit.nexus_name()),
            true => of.release_unit(unit.nexus_name()),
        };
        reserved.tell_access();
        done.map_err(Fail::from)
    }

    /// What RESERVE(6) has reserved is free: all of it (a reset), or what that nexus had (it is lost).
    pub(crate) fn forget_reserved(&self, by: Option<&NexusName>) {
        let mut reserved: MutexGuard<'_, Reserved> = self.reserved.lock();
        if reserved.reservations.reserved.is_some() {
            reserved.reservations.forget_reserved(by.map(|by| &**by));
            reserved.tell_access();
        }
    }
}

impl Reserved {
    /// The units of a nexus.
    fn of(&self, nexus: &NexusName) -> impl Iterator<Item = Arc<LunShared>> {
        let nexus = Arc::clone(nexus);
        let units: Vec<_> = self.units.iter().filter_map(Weak::upgrade).collect();
        units.into_iter().filter(move |unit| *unit.nexus_name() == nexus)
    }

    /// What the nexus may do.
    fn access(&self, nexus: &str) -> Access {
        self.unknown.as_ref().map_or_else(|| self.reservations.access(nexus), Unknown::access)
    }

    /// Each unit knows what its nexus may do.
    fn tell_access(&self) {
        for unit in self.units.iter().filter_map(Weak::upgrade) {
            unit.set_access(self.access(unit.nexus_name()));
        }
    }

    /// The nexus of that TransportID: one that has a unit, or is registered.
    fn named(&self, id: &[u8; 24]) -> Option<NexusName> {
        let units = self.units.iter().filter_map(Weak::upgrade);
        let names = units.map(|unit| Arc::clone(unit.nexus_name()));
        let registered = self.reservations.registrants.iter().map(|r| Arc::clone(&r.nexus));
        names.chain(registered).find(|name| transport_id(name) == *id)
    }
}

impl From<Told> for UnitAttention {
    fn from(told: Told) -> Self {
        match told {
            Told::ReservationsPreempted => UnitAttention::ReservationsPreempted,
            Told::ReservationsReleased => UnitAttention::ReservationsReleased,
            Told::RegistrationsPreempted => UnitAttention::RegistrationsPreempted,
        }
    }
}

impl Settling {
    /// Whether it can be acknowledged: it is saved, and no task of a preempted nexus has I/O any more.
    ///
    /// # Errors
    /// It could not be saved: the change counts, but would be lost with the process.
    pub(crate) fn is_over(&self) -> Result<bool, Fail> {
        let saved =
            self.volume.keeping.as_ref().map_or(Saved::Yes, |keeping| keeping.became(self.change));
        let is_thrown_away = |by: &NexusName| !self.volume.look(|of| of.is_held_by(by));
        let is_lost = saved == Saved::Yes && self.replaces.as_ref().is_some_and(is_thrown_away);
        if saved == Saved::Failed || is_lost {
            return Err(Sense::new(Key::HardwareError, Code::INTERNAL_TARGET_FAILURE).into());
        }
        let is_quiet = self.aborted.iter().all(|unit| !unit.is_busy());
        let is_seen = self.aborted.is_empty() || self.since.elapsed() >= SEEN;
        Ok(saved == Saved::Yes && is_quiet && is_seen)
    }
}

/// A thread's right to read, decide and write alone (COMPARE AND WRITE, ORWRITE), for one of its tasks at
/// a time: whatever changes the same blocks is over before, or waits.
pub(crate) struct Exclusive {
    volume: Arc<Volume>,
    kept: Option<Kept>,
}

impl Exclusive {
    pub(crate) fn new(volume: Arc<Volume>) -> Self {
        Exclusive { volume, kept: None }
    }

    /// Takes it for these blocks; `false`: another task has it, of any initiator, or it is not for now.
    pub(crate) fn take(&mut self, range: Range) -> bool {
        if self.kept.is_none() {
            self.kept = self.volume.keep_blocks(range);
            return self.kept.is_some();
        }
        false
    }

    /// Whether what began before it was taken is over.
    pub(crate) fn is_quiet(&mut self) -> bool {
        self.kept.as_mut().is_none_or(Kept::is_quiet)
    }

    /// Gives it back.
    pub(crate) fn give_back(&mut self) {
        self.kept = None;
    }
}

/// [`Access`] as a unit has it for its commands to look at.
pub(crate) fn access_of(code: u32) -> Access {
    match code {
        0 => Access::Full,
        1 => Access::Read,
        2 => Access::Nothing,
        3 => Access::Reserved,
        4 => Access::Unread,
        _ => Access::Lost,
    }
}

#[cfg(test)]
mod tests {
    use std::thread::{scope, sleep};
    use std::time::Duration;

    use bdev::testing::FaultBdev;

    use super::*;
    use crate::LunOptions;

    /// Else one that comes between what it reads and what it writes is not counted, or counted for what came later.
    #[test]
    fn a_unit_takes_the_place_of_another_one_before_all_tasks_are_ended_or_after_that() {
        let disk = FaultBdev::new("disk", 512, 8);
        let [before, after] =
            [(); 2].map(|()| LunShared::new(disk.clone(), LunOptions::default()).unwrap());
        before.reset();
        before.reset();
        after.abort_tasks();
        let of_both = [before.epoch(), after.epoch()];
        scope(|scope| {
            before.volume.look(|_| {
                scope.spawn(|| after.replace(&before));
                scope.spawn(|| before.reset());
                sleep(Duration::from_millis(20));
                assert_eq!([before.epoch(), after.epoch()], of_both);
            });
        });
        assert_eq!(after.epoch(), before.epoch());
    }
}
