//! Events that wait for a buffer in the guest's event queue.

use std::collections::VecDeque;

use crate::defs::{EventRecord, F_CHANGE, F_HOTPLUG, LunAddress, event};

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

/// Events in order, bounded; what does not fit is lost, and the guest is told that it was.
#[derive(Debug, Default)]
pub(crate) struct PendingEvents {
    queue: VecDeque<EventRecord>,
    missed: bool,
}

impl PendingEvents {
    /// Adds `event` if the driver negotiated it. Returns `false` if it was lost.
    pub(crate) fn push(&mut self, event: Event, features: u64) -> bool {
        if features & event.feature() == 0 {
            return true;
        }
        if self.queue.len() >= MAX_PENDING {
            self.missed = true;
            return false;
        }
        self.queue.push_back(event.record());
        true
    }

    /// Whether there is anything to tell.
    pub(crate) fn is_empty(&self) -> bool {
        self.queue.is_empty() && !self.missed
    }

    /// The next record for the guest; the first one after a loss carries EVENTS_MISSED.
    pub(crate) fn pop(&mut self) -> Option<EventRecord> {
        let missed = std::mem::take(&mut self.missed);
        let mut record = match self.queue.pop_front() {
            Some(record) => record,
            None if missed => EventRecord { event: event::T_NO_EVENT.into(), ..Default::default() },
            None => return None,
        };
        if missed {
            record.event = (record.event.get() | event::T_EVENTS_MISSED).into();
        }
        Some(record)
    }

    /// Forgets everything: the driver starts afresh and scans by itself.
    pub(crate) fn clear(&mut self) {
        self.queue.clear();
        self.missed = false;
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
        assert!(pending.push(Event::Added(3), BOTH));
        assert!(pending.push(Event::Removed(4), BOTH));
        assert!(pending.push(Event::Resized(5), BOTH));
        let mut next = || pending.pop().unwrap();
        assert_eq!(next().as_bytes(), [1, 0, 0, 0, 1, 3, 0, 0, 0, 0, 0, 0, 1, 0, 0, 0]);
        assert_eq!(next().as_bytes(), [1, 0, 0, 0, 1, 4, 0, 0, 0, 0, 0, 0, 2, 0, 0, 0]);
        assert_eq!(next().as_bytes(), [3, 0, 0, 0, 1, 5, 0, 0, 0, 0, 0, 0, 0x2a, 9, 0, 0]);
        assert_eq!(pending.pop(), None);
    }

    #[test]
    fn what_was_not_negotiated_is_not_told() {
        let mut pending = PendingEvents::default();
        assert!(pending.push(Event::Added(1), F_CHANGE));
        assert!(pending.push(Event::Removed(1), F_CHANGE));
        assert!(pending.push(Event::Resized(1), F_HOTPLUG));
        assert!(pending.is_empty());
    }

    #[test]
    fn loss_is_told_with_the_next_record() {
        let mut pending = PendingEvents::default();
        for _ in 0..MAX_PENDING {
            assert!(pending.push(Event::Added(1), BOTH));
        }
        assert!(!pending.push(Event::Added(2), BOTH));
        let first = pending.pop().unwrap();
        assert_eq!(first.event.get(), event::T_TRANSPORT_RESET | event::T_EVENTS_MISSED);
        assert_eq!(pending.pop().unwrap().event.get(), event::T_TRANSPORT_RESET);
        while pending.pop().is_some() {}
        for _ in 0..=MAX_PENDING {
            pending.push(Event::Added(1), BOTH);
        }
        pending.queue.clear();
        assert!(!pending.is_empty());
        let alone = pending.pop().unwrap();
        assert_eq!(alone.event.get(), event::T_NO_EVENT | event::T_EVENTS_MISSED);
        assert!(pending.is_empty());
    }
}
