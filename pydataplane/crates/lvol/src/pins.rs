//! Which version of the map a channel's I/O in flight was translated with, so that clusters which
//! left the map are reused only when nobody reads or writes them any more.

use crate::volume::ChannelShared;
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
}

/// The group of an I/O in flight, to be given back to [`Pins::end`].
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Pin(u8);

impl Pins {
    pub fn new(shared: Arc<ChannelShared>) -> Self {
        Pins { shared, groups: [Group::default(); 2], current: 0 }
    }

    pub fn shared(&self) -> &Arc<ChannelShared> {
        &self.shared
    }

    /// I/Os in flight on the base bdev.
    #[inline]
    pub fn in_flight(&self) -> u32 {
        self.groups[0].count + self.groups[1].count
    }

    /// Settles the version with which the next I/O is translated. `version` reads the present
    /// one. The map of that version, or a later one, is the one to use until the next call.
    #[inline]
    pub fn settle(&mut self, version: impl Fn() -> u64) -> u64 {
        let mut now = version();
        if self.in_flight() == 0 {
            // Publish, then look again: either this sees the new version, or whoever made it
            // sees that the old one is in use (Dekker; the fence pairs with `Volume::quiet`'s).
            loop {
                self.shared.active.store(now, Ordering::Relaxed);
                fence(Ordering::SeqCst);
                let again = version();
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
        Pin(self.current as u8)
    }

    /// It is over.
    #[inline]
    pub fn end(&mut self, pin: Pin) {
        let group = usize::from(pin.0);
        self.groups[group].count -= 1;
        if self.groups[group].count == 0 && self.in_flight() > 0 && group != self.current {
            // The older group drained: what remains is the current one.
            let version = self.groups[self.current].version;
            self.shared.active.store(version, Ordering::Release);
        }
    }

    /// After a submit or a poll: nothing in flight means nothing pinned.
    #[inline]
    pub fn relax(&self) {
        if self.in_flight() == 0 {
            self.shared.active.store(0, Ordering::Release);
        }
    }
}
