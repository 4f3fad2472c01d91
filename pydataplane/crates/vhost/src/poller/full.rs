//! Devices that take no more for now: when each is asked again.
//!
//! While a unit has requests with its device, the end of one is room for another. Where it has none, others have all
//! of the device's queue, and nothing says when that changes: so it is asked again after a pause, which grows, and
//! sooner if the thread was woken, as some devices do that when they have room. All of it is of front ends whose driver
//! knows no status for "later" (`front::blk`).

use reactor::ticks;

use super::units::{OF_ORDERED, Unit, Units};

/// How long a device that took no more when nothing was in flight is left alone, in microseconds: at first, and
/// where that was in vain twice as long each time, up to the second.
const ASK_AGAIN_US: u64 = 100;
const ASK_AGAIN_MOST_US: u64 = 10_000;
/// How often it is asked for what a queue that stops could not give back: at once, and until it would be left alone
/// for the longest time, 12.7 ms later.
const ASKS_OF_STOP: u32 = 8;

impl Units {
    /// Nothing of `target` begins until one of its requests has ended that is in flight, or if there is none until
    /// its device is asked again ([`Units::asks_again`]): others have all of its queue. Whether there is none.
    pub(super) fn bar(&mut self, target: u8) -> bool {
        let Some(unit) = self.at(target) else { return false };
        unit.bars |= OF_ORDERED;
        if unit.in_flight.requests > 0 {
            return false;
        }
        if unit.pause == 0 {
            unit.counters.full_waits.add(1);
        }
        let most = ticks::from_us(ASK_AGAIN_MOST_US);
        unit.pause = (2 * unit.pause).clamp(ticks::from_us(ASK_AGAIN_US), most);
        unit.again = ticks::now().saturating_add(unit.pause).max(1);
        self.asks_of_stop = self.asks_of_stop.saturating_sub(1);
        true
    }

    /// The thread was woken, or found work when it was about to sleep, perhaps as a device has room: none is left
    /// alone for longer than the shortest time. Not at once, as that can be as often as a thread may look.
    pub(super) fn ask_all(&mut self) {
        if self.asks_of_stop > 0 {
            return;
        }
        let least = ticks::from_us(ASK_AGAIN_US);
        for target in &self.backlog {
            if let Some(unit) = self.units.get_mut(usize::from(*target)).and_then(Option::as_mut)
                && unit.again != 0
                && unit.pause > least
            {
                unit.again = unit.again.saturating_sub(unit.pause - least).max(1);
                unit.pause = least;
            }
        }
    }

    /// A queue is about to stop, for which the device of `target` is asked [`ASKS_OF_STOP`] times more, at once first
    /// if it takes no more, however long that has been so.
    pub(super) fn ask_for_stop(&mut self, target: u8) {
        self.asks_of_stop = ASKS_OF_STOP;
        if let Some(unit) = self.at(target).filter(|unit| unit.again != 0) {
            // Doubled, the shortest one.
            (unit.again, unit.pause) = (1, ticks::from_us(ASK_AGAIN_US) / 2);
        }
    }

    /// It has stopped.
    pub(super) fn has_stopped(&mut self) {
        self.asks_of_stop = 0;
    }

    /// The first request of `target` that waited has begun, or waits again.
    pub(super) fn has_asked(&mut self, target: u8) {
        let Some(unit) = self.at(target).filter(|unit| unit.again == 0) else { return };
        unit.pause = 0;
        if self.asks_of_stop > 0 {
            // Each of its I/Os as often.
            self.asks_of_stop = ASKS_OF_STOP;
        }
    }

    /// Whether the device of `target` takes no more and is asked again for a queue that stops.
    pub(super) fn asks_for_stop(&self, target: u8) -> bool {
        let unit = self.units.get(usize::from(target)).and_then(Option::as_ref);
        let is_asked = |unit: &Unit| unit.again != 0 && !unit.suspended && !unit.halted;
        self.asks_of_stop > 0 && unit.is_some_and(is_asked)
    }

    /// Whether it is time to ask the device of `target` again, which took no more when nothing was in flight; if
    /// it is not yet, that is when to look again.
    #[cold]
    pub(super) fn asks_again(&mut self, target: u8) -> bool {
        let Some(unit) = self.at(target) else { return false };
        let again = unit.again;
        // Whoever has it go on has what waits looked at.
        if again == 0 || unit.suspended || unit.halted {
            return false;
        }
        if ticks::now() < again {
            self.limited_until = self.limited_until.min(again);
            return false;
        }
        unit.again = 0;
        unit.bars &= !OF_ORDERED;
        true
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;
    use std::time::Duration;

    use bdev::testing::FaultBdev;
    use reactor::IoContext;
    use scsi::{Lun, LunOptions, LunShared};

    use super::super::slot::{Chains, make};
    use super::*;

    /// A unit 0 with nothing in flight, one of whose requests waits.
    fn units() -> Units {
        let disk = FaultBdev::new("disk", 512, 8);
        let shared = LunShared::new(disk, LunOptions::default()).unwrap();
        let channel = shared.bdev().open(&IoContext::new().unwrap()).unwrap();
        let lun = Lun::new(Arc::clone(&shared), shared.connect(), channel);
        let mut units = Units::new(Duration::from_secs(1));
        units.insert(0, Unit::new(lun, Arc::default(), Arc::default(), None));
        units.postponed(0, &mut make(0..1, Chains::Plain)[0]);
        units
    }

    fn unit(units: &mut Units) -> &mut Unit {
        units.at(0).expect("it is there")
    }

    /// It is asked in vain, however long it was to be left alone; returns when next, and the pause.
    fn refused(units: &mut Units) -> (u64, u64) {
        unit(units).again = 1;
        assert!(units.asks_again(0) && units.bar(0));
        let Unit { again, pause, .. } = *unit(units);
        (again, pause)
    }

    #[test]
    fn whoever_looks_however_often_a_device_is_not_asked_sooner_than_after_the_shortest_pause() {
        let mut units = units();
        let least = ticks::from_us(ASK_AGAIN_US);
        assert!(units.bar(0));
        let (again, pause) = (0..5).map(|_| refused(&mut units)).last().expect("five");
        assert_eq!(pause, 32 * least);
        for _ in 0..3 {
            units.ask_all();
            assert_eq!(
                (unit(&mut units).again, unit(&mut units).pause),
                (again - 31 * least, least)
            );
        }
        // From there on it is left alone for longer each time.
        assert_eq!(refused(&mut units).1, 2 * least);
        // One that takes what comes stays so.
        unit(&mut units).again = 0;
        units.ask_all();
        assert_eq!(unit(&mut units).again, 0);
    }

    #[test]
    fn a_stop_asks_a_full_device_so_often_and_as_often_again_once_it_took_something() {
        let mut units = units();
        assert!(units.bar(0) && !units.asks_for_stop(0));
        (0..12).for_each(|_| _ = refused(&mut units));
        let all = |units: &mut Units| {
            let mut waited = 0;
            for ask in 1..=ASKS_OF_STOP {
                assert!(units.asks_for_stop(0), "{ask}");
                let pause = refused(units).1;
                // Woken meanwhile: its asks are not used up sooner.
                units.ask_all();
                waited += if ask < ASKS_OF_STOP { pause } else { 0 };
            }
            assert!(!units.asks_for_stop(0));
            waited
        };
        units.ask_for_stop(0);
        assert_eq!(unit(&mut units).again, 1, "at once");
        assert_eq!(all(&mut units), 127 * ticks::from_us(ASK_AGAIN_US));
        units.ask_for_stop(0);
        refused(&mut units);
        unit(&mut units).again = 0;
        units.has_asked(0);
        assert!(units.bar(0));
        (0..ASKS_OF_STOP - 2).for_each(|_| _ = refused(&mut units));
        assert!(units.asks_for_stop(0));
        // Nothing would ask it.
        unit(&mut units).halted = true;
        assert!(!units.asks_for_stop(0));
    }
}
