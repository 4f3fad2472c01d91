//! With which version of its volume's map a channel's I/O in flight was translated: clusters which left
//! the map are reused only when nobody reads or writes them any more.

use crate::asked::ChannelShared;
use std::sync::Arc;
use std::sync::atomic::{Ordering, fence};

/// I/Os that were translated with the same version, or a later one.
#[derive(Clone, Copy, Debug, Default)]
struct Group {
    version: u64,
    count: u32,
}

/// The two groups of a channel: I/O under way when the version last changed, and what came since.
/// [`ChannelShared::active`] is always the version of the oldest one with I/O, or 0.
pub(crate) struct Pins {
    shared: Arc<ChannelShared>,
    groups: [Group; 2],
    /// Which group new I/O joins.
    current: usize,
    /// I/Os in flight on the base bdev: those of both groups.
    in_flight: u32,
}

/// The group of an I/O in flight, to be given back to [`Pins::end`].
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Pin(u8);

impl Pins {
    pub fn new(shared: Arc<ChannelShared>) -> Self {
        Pins { shared, groups: [Group::default(); 2], current: 0, in_flight: 0 }
    }

    pub fn shared(&self) -> &Arc<ChannelShared> {
        &self.shared
    }

    /// I/Os in flight on the base bdev.
    #[inline]
    pub fn in_flight(&self) -> u32 {
        self.in_flight
    }

    /// Whether there is another version than that one.
    #[inline]
    pub fn is_outdated(&self, version: u64) -> bool {
        self.shared.version.load(Ordering::Relaxed) != version
    }

    /// Chooses the version with which the next I/O is translated. The map of that version, or a
    /// later one, is the one to use until the next call.
    #[inline]
    pub fn choose_version(&mut self) -> u64 {
        let mut now = self.shared.version.load(Ordering::Acquire);
        if self.in_flight == 0 {
            // Publish, then look again: either this sees the new version, or whoever made it
            // sees that the old one is in use (Dekker; the fence pairs with `Volume::quiet`'s).
            loop {
                self.shared.active.store(now, Ordering::Relaxed);
                fence(Ordering::SeqCst);
                let again = self.shared.version.load(Ordering::Acquire);
                if again == now {
                    break;
                }
                now = again;
            }
            self.groups[self.current].version = now;
        } else if self.groups[self.current].version != now {
            self.turn(now);
        }
        now
    }

    /// The version changed while I/O is in flight. While both groups have some, the later one
    /// keeps its older version: that delays a reuse but is never wrong.
    #[cold]
    fn turn(&mut self, now: u64) {
        let other = 1 - self.current;
        if self.groups[other].count == 0 {
            if self.groups[self.current].count > 0 {
                self.current = other;
            }
            self.groups[self.current].version = now;
        }
    }

    /// An I/O went to the base bdev and is in flight.
    #[inline]
    pub fn begin(&mut self) -> Pin {
        self.groups[self.current].count += 1;
        self.in_flight += 1;
        Pin(self.current as u8)
    }

    /// It is over.
    #[inline]
    pub fn end(&mut self, pin: Pin) {
        let group = usize::from(pin.0);
        self.groups[group].count -= 1;
        self.in_flight -= 1;
        if self.groups[group].count == 0 && self.in_flight > 0 && group != self.current {
            // The older group drained: what remains is the current one.
            let version = self.groups[self.current].version;
            self.shared.active.store(version, Ordering::Release);
        }
    }

    /// After a submit or a poll: nothing in flight means nothing pinned.
    #[inline]
    pub fn relax(&self) {
        if self.in_flight == 0 {
            self.shared.active.store(0, Ordering::Release);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::asked::{Request, SLOTS};
    use crossbeam_queue::ArrayQueue;
    use proptest::prelude::*;
    use reactor::IoContext;
    use std::sync::atomic::AtomicU64;

    fn shared() -> Arc<ChannelShared> {
        Arc::new(ChannelShared {
            version: Arc::new(AtomicU64::new(1)),
            active: AtomicU64::new(0),
            requests: ArrayQueue::<Request>::new(SLOTS),
            replies: ArrayQueue::new(SLOTS),
            writes: Arc::default(),
            waker: IoContext::new().unwrap().waker(),
        })
    }

    proptest! {
        /// Whatever comes and goes: a version is not given up while I/O that was translated with
        /// it is in flight, and it is given up when that ended.
        #[test]
        fn what_is_published_is_never_newer_than_what_is_in_flight(
            steps in prop::collection::vec((0..5u8, any::<prop::sample::Index>()), 1..200)
        ) {
            let mut pins = Pins::new(shared());
            // (pin, version that it was translated with)
            let mut flights: Vec<(Pin, u64)> = Vec::new();
            for (what, which) in steps {
                let version = pins.shared.version.load(Ordering::Relaxed);
                match what {
                    0 => {
                        pins.shared.version.fetch_add(1, Ordering::Relaxed);
                    }
                    1 | 2 => {
                        let chosen = pins.choose_version();
                        prop_assert_eq!(chosen, version);
                        prop_assert!((1..=version).contains(&pins.shared.active.load(Ordering::Relaxed)));
                        flights.push((pins.begin(), chosen));
                    }
                    _ if !flights.is_empty() => {
                        let (pin, _) = flights.swap_remove(which.index(flights.len()));
                        pins.end(pin);
                    }
                    _ => {
                        // An I/O that was over within submit.
                        pins.choose_version();
                        prop_assert_eq!(pins.shared.active.load(Ordering::Relaxed), version);
                    }
                }
                pins.relax();
                let active = pins.shared.active.load(Ordering::Relaxed);
                match flights.iter().map(|(_, v)| *v).min() {
                    None => prop_assert_eq!(active, 0),
                    Some(oldest) => prop_assert!((1..=oldest).contains(&active)),
                }
                prop_assert_eq!(pins.in_flight() as usize, flights.len());
            }
        }

        /// A channel that is never idle still gives old versions up: each I/O lives for a while
        /// only, so what is published follows the present version.
        #[test]
        fn a_busy_channel_goes_on_to_new_versions(depth in 1..20usize) {
            let mut pins = Pins::new(shared());
            let mut flights = std::collections::VecDeque::new();
            for version in 1..200u64 {
                pins.shared.version.store(version, Ordering::Relaxed);
                pins.choose_version();
                flights.push_back(pins.begin());
                if flights.len() > depth {
                    pins.end(flights.pop_front().unwrap());
                }
                let active = pins.shared.active.load(Ordering::Relaxed);
                prop_assert!(active + 3 * depth as u64 + 3 >= version, "{active} at {version}");
            }
        }
    }
}
