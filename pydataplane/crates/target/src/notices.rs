//! What `notify_get_notifications` shows: a ring of what happened to bdevs and lvstores.

use bdev::Event;
use parking_lot::{Condvar, Mutex, MutexGuard};
use schemars::JsonSchema;
use serde::Serialize;
use std::collections::VecDeque;
use std::time::Instant;

/// Notices kept; older ones are overwritten (SPDK's number too).
pub const KEPT: usize = 1024;

/// The types: SPDK's, and ours of lvstores in which little room is left, and enough again.
pub const TYPES: [&str; 5] = [
    "bdev_register",
    "bdev_unregister",
    "bdev_resize",
    "virtlun_lvstore_low_space",
    "virtlun_lvstore_enough_space",
];

/// Something that happened.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, JsonSchema)]
pub struct Notice {
    /// One of `notify_get_types`.
    #[serde(rename = "type")]
    pub kind: String,
    /// Name of the bdev, or of the lvstore.
    pub ctx: String,
    /// Number of the notice, from 0, without gaps.
    pub id: u64,
}

#[derive(Default)]
struct Ring {
    kept: VecDeque<Notice>,
    next_id: u64,
}

/// The ring; thread-safe.
#[derive(Default)]
pub struct Notices {
    ring: Mutex<Ring>,
    more: Condvar,
}

impl Notices {
    fn lock(&self) -> MutexGuard<'_, Ring> {
        self.ring.lock()
    }

    /// Notes an event of the bdev registry.
    pub fn note(&self, event: &Event) {
        let (kind, name) = match event {
            Event::Registered(bdev) => (TYPES[0], bdev.name()),
            Event::Removed(bdev) => (TYPES[1], bdev.name()),
            Event::Resized(bdev) => (TYPES[2], bdev.name()),
            Event::Space { store, low: true, .. } => (TYPES[3], store.as_str()),
            Event::Space { store, low: false, .. } => (TYPES[4], store.as_str()),
        };
        self.push(kind, name);
    }

    fn push(&self, kind: &str, ctx: &str) {
        let mut ring = self.lock();
        if ring.kept.len() == KEPT {
            ring.kept.pop_front();
        }
        let id = ring.next_id;
        ring.kept.push_back(Notice { kind: kind.into(), ctx: ctx.into(), id });
        ring.next_id += 1;
        self.more.notify_all();
    }

    /// At most `max` notices from number `first` on, or from the oldest kept.
    pub fn since(&self, first: u64, max: u64) -> Vec<Notice> {
        let ring = self.lock();
        let max = usize::try_from(max).unwrap_or(usize::MAX);
        ring.kept.iter().filter(|n| n.id >= first).take(max).cloned().collect()
    }

    /// Waits until `found` gives something, looking again after each notice, or until `deadline`.
    pub fn wait_until<T>(&self, deadline: Instant, found: impl Fn() -> Option<T>) -> Option<T> {
        let mut seen = self.lock().next_id;
        loop {
            if let Some(what) = found() {
                return Some(what);
            }
            let mut ring = self.lock();
            while ring.next_id == seen {
                let left = deadline.checked_duration_since(Instant::now())?;
                self.more.wait_for(&mut ring, left);
            }
            seen = ring.next_id;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::time::Duration;

    #[test]
    fn the_oldest_are_overwritten_and_numbers_go_on() {
        let notices = Notices::default();
        for i in 0..KEPT + 5 {
            notices.push(TYPES[0], &format!("b{i}"));
        }
        let all = notices.since(0, u64::MAX);
        assert_eq!((all.len(), all[0].id, all[0].ctx.as_str()), (KEPT, 5, "b5"));
        let last = notices.since(KEPT as u64 + 3, 1);
        assert_eq!((last.len(), last[0].id), (1, KEPT as u64 + 3));
        assert!(notices.since(KEPT as u64 + 5, 9).is_empty());
    }

    #[test]
    fn waiting_ends_with_the_find_or_at_the_deadline() {
        let notices = Notices::default();
        assert_eq!(notices.wait_until(Instant::now(), || None::<u8>), None);
        assert_eq!(notices.wait_until(Instant::now(), || Some(1)), Some(1));
        std::thread::scope(|s| {
            s.spawn(|| notices.push(TYPES[0], "late"));
            let deadline = Instant::now() + Duration::from_secs(60);
            let found =
                notices.wait_until(deadline, || (!notices.since(0, 1).is_empty()).then_some(()));
            assert_eq!(found, Some(()));
        });
    }
}
