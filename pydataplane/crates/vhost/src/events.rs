//! Events that wait for a buffer in the guest's event queue.

use std::collections::VecDeque;
use std::sync::Arc;

use crate::defs::{EventRecord, F_CHANGE, F_HOTPLUG, LunAddress, event};
use crate::handover::{EventState, UnheardState};
use crate::lun::Times;

/// Events that wait at most; Linux posts 8 buffers.
pub(crate) const MAX_PENDING: usize = 64;

/// Something that a guest is told about one of its targets (LUN 0).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Event {
    /// The target came.
    Added(u8),
    /// The target went.
    Removed(u8),
    /// The target's size changed.
    Resized(u8),
}

impl Event {
    /// The target that it is about.
    pub(crate) fn target(self) -> u8 {
        match self {
            Event::Added(target) | Event::Removed(target) | Event::Resized(target) => target,
        }
    }

    /// The event that a record tells of.
    fn of(record: &EventRecord) -> Option<Event> {
        let target = record.lun[1];
        let all = [Event::Added(target), Event::Removed(target), Event::Resized(target)];
        all.into_iter().find(|event| event.record() == *record)
    }

    /// The record of virtio 1.2 5.6.6.3.
    fn record(self) -> EventRecord {
        let (kind, target, reason) = match self {
            Event::Added(target) => (event::T_TRANSPORT_RESET, target, event::RESET_RESCAN),
            Event::Removed(target) => (event::T_TRANSPORT_RESET, target, event::RESET_REMOVED),
            Event::Resized(target) => {
                (event::T_PARAM_CHANGE, target, event::CAPACITY_DATA_HAS_CHANGED)
            }
        };
        EventRecord { event: kind.into(), lun: LunAddress::event(target, 0), reason: reason.into() }
    }

    /// The feature without which a driver must not see this event.
    fn feature(self) -> u64 {
        match self {
            Event::Added(_) | Event::Removed(_) => F_HOTPLUG,
            Event::Resized(_) => F_CHANGE,
        }
    }
}

/// A record for the guest, and whose clock is to note that it was given.
pub(crate) struct Pending {
    pub(crate) record: EventRecord,
    event: Option<(Event, Arc<Times>)>,
}

impl Pending {
    /// The record is in the guest's ring.
    pub(crate) fn told(&self) {
        match &self.event {
            Some((Event::Added(_), times)) => times.told(),
            Some((Event::Resized(_), times)) => times.told_of_resize(),
            Some((Event::Removed(_), _)) | None => {}
        }
    }
}

/// Events in order, bounded; what does not fit is lost, and the guest is told that it was.
#[derive(Default)]
pub(crate) struct PendingEvents {
    queue: VecDeque<Pending>,
    missed: bool,
}

/// What a driver has not heard whose event queue is stopped, and which may go on: its VM is paused,
/// or its QEMU lost the connection.
#[derive(Default)]
pub(crate) struct Unheard {
    pub(crate) events: PendingEvents,
    /// What the driver negotiated.
    pub(crate) features: u64,
}

impl Unheard {
    /// What is to be known to go on telling it elsewhere.
    pub(crate) fn state(&self) -> UnheardState {
        let events = self.events.queue.iter().filter_map(|p| Event::of(&p.record));
        let events = events.map(|event| match event {
            Event::Added(target) => EventState::Added(target),
            Event::Removed(target) => EventState::Removed(target),
            Event::Resized(target) => EventState::Resized(target),
        });
        UnheardState {
            features: self.features,
            events: events.collect(),
            missed: self.events.missed,
        }
    }

    /// Goes on with `state`; `times` knows the clock of a target.
    pub(crate) fn restored(
        state: &UnheardState,
        times: impl Fn(u8) -> Option<Arc<Times>>,
    ) -> Unheard {
        let mut unheard = Unheard { features: state.features, ..Unheard::default() };
        unheard.events.missed = state.missed;
        for event in &state.events {
            let event = match *event {
                EventState::Added(target) => Event::Added(target),
                EventState::Removed(target) => Event::Removed(target),
                EventState::Resized(target) => Event::Resized(target),
            };
            unheard.push(event, times(event.target()));
        }
        unheard
    }

    /// Adds `event`, of the target with `times`; `false` if it was lost.
    pub(crate) fn push(&mut self, event: Event, times: Option<Arc<Times>>) -> bool {
        self.events.push(event, times, self.features)
    }
}

impl PendingEvents {
    /// Adds `event`, of the target with `times`, if the driver negotiated it. Returns `false` if it
    /// was lost.
    pub(crate) fn push(&mut self, event: Event, times: Option<Arc<Times>>, features: u64) -> bool {
        if features & event.feature() == 0 {
            return true;
        }
        if self.queue.len() >= MAX_PENDING {
            self.missed = true;
            return false;
        }
        let record = event.record();
        self.queue.push_back(Pending { record, event: times.map(|times| (event, times)) });
        true
    }

    /// The driver, which negotiated `features`, may have missed events that are not known any more:
    /// it is told so, and looks which targets there are. Linux does not look at their sizes then,
    /// so it is told that each may have changed. `targets` are those that there are, each once, so
    /// their number needs no bound of its own.
    pub(crate) fn miss(&mut self, targets: impl Iterator<Item = u8>, features: u64) {
        self.missed = true;
        let resized = targets.map(Event::Resized);
        let told = resized.filter(|event| features & event.feature() != 0);
        self.queue.extend(told.map(|event| Pending { record: event.record(), event: None }));
    }

    /// Whether there is anything to tell.
    pub(crate) fn is_empty(&self) -> bool {
        self.queue.is_empty() && !self.missed
    }

    /// The next record for the guest; the first one after a loss carries EVENTS_MISSED.
    pub(crate) fn pop(&mut self) -> Option<Pending> {
        let missed = std::mem::take(&mut self.missed);
        let nothing = || EventRecord { event: event::T_NO_EVENT.into(), ..Default::default() };
        let mut next = match self.queue.pop_front() {
            Some(next) => next,
            None if missed => Pending { record: nothing(), event: None },
            None => return None,
        };
        if missed {
            next.record.event = (next.record.event.get() | event::T_EVENTS_MISSED).into();
        }
        Some(next)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use zerocopy::IntoBytes;

    const BOTH: u64 = F_HOTPLUG | F_CHANGE;

    #[test]
    fn records_are_what_linux_decodes() {
        let mut pending = PendingEvents::default();
        assert!(pending.push(Event::Added(3), None, BOTH));
        assert!(pending.push(Event::Removed(4), None, BOTH));
        assert!(pending.push(Event::Resized(5), None, BOTH));
        let mut next = || pending.pop().unwrap().record;
        assert_eq!(next().as_bytes(), [1, 0, 0, 0, 1, 3, 0, 0, 0, 0, 0, 0, 1, 0, 0, 0]);
        assert_eq!(next().as_bytes(), [1, 0, 0, 0, 1, 4, 0, 0, 0, 0, 0, 0, 2, 0, 0, 0]);
        assert_eq!(next().as_bytes(), [3, 0, 0, 0, 1, 5, 0, 0, 0, 0, 0, 0, 0x2a, 9, 0, 0]);
        assert!(pending.pop().is_none());
    }

    #[test]
    fn what_was_not_negotiated_is_not_told() {
        let mut pending = PendingEvents::default();
        assert!(pending.push(Event::Added(1), None, F_CHANGE));
        assert!(pending.push(Event::Removed(1), None, F_CHANGE));
        assert!(pending.push(Event::Resized(1), None, F_HOTPLUG));
        assert!(pending.is_empty());
    }

    #[test]
    fn loss_is_told_with_the_next_record() {
        let mut pending = PendingEvents::default();
        for _ in 0..MAX_PENDING {
            assert!(pending.push(Event::Added(1), None, BOTH));
        }
        assert!(!pending.push(Event::Added(2), None, BOTH));
        let first = pending.pop().unwrap().record;
        assert_eq!(first.event.get(), event::T_TRANSPORT_RESET | event::T_EVENTS_MISSED);
        assert_eq!(pending.pop().unwrap().record.event.get(), event::T_TRANSPORT_RESET);
        while pending.pop().is_some() {}
        for _ in 0..=MAX_PENDING {
            pending.push(Event::Added(1), None, BOTH);
        }
        pending.queue.clear();
        assert!(!pending.is_empty());
        let alone = pending.pop().unwrap().record;
        assert_eq!(alone.event.get(), event::T_NO_EVENT | event::T_EVENTS_MISSED);
        assert!(pending.is_empty());
    }

    #[test]
    fn unknown_events_are_told_as_a_loss_and_a_size_for_each_target() {
        let mut pending = PendingEvents::default();
        pending.miss(0..=254, BOTH);
        let first = pending.pop().unwrap().record;
        assert_eq!(first.event.get(), event::T_PARAM_CHANGE | event::T_EVENTS_MISSED);
        let rest: Vec<_> = std::iter::from_fn(|| pending.pop()).map(|p| p.record.lun[1]).collect();
        assert_eq!(rest, (1..=254).collect::<Vec<u8>>());
        pending.miss(0..=254, F_HOTPLUG);
        let alone = pending.pop().unwrap().record;
        assert_eq!(alone.event.get(), event::T_NO_EVENT | event::T_EVENTS_MISSED);
        assert!(pending.is_empty());
    }

    #[test]
    fn what_was_told_is_noted_when_it_was_not_before() {
        let (times, other) = (Times::new(), Times::new());
        let mut pending = PendingEvents::default();
        assert!(pending.push(Event::Added(1), Some(times.clone()), BOTH));
        assert!(pending.push(Event::Resized(1), Some(times.clone()), BOTH));
        pending.pop().unwrap().told();
        assert!(times.event_at().unwrap() >= times.attached_at());
        assert_eq!((times.resize_event_at(), other.event_at()), (None, None));
        pending.pop().unwrap().told();
        assert!(times.resize_event_at() >= times.event_at());
        times.begin();
        assert_eq!((times.event_at(), times.resize_event_at()), (None, None));
    }
}
