//! What a unit has with its device, and for how long.
//!
//! No request has its time looked at. Each is of the generation in which its unit got it; there is a new one
//! when the room of the session is short ([`super::room`]), and not sooner than [`crate::Timeouts::answer`]
//! after the last. What is neither of the present nor of the last generation is late: its device has kept it
//! for at least that time, and so, as far as anybody knows, does not answer.

use std::time::Duration;

/// What one unit has in flight.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Load {
    requests: u32,
    /// Bytes of their data, with those that are late.
    bytes: u64,
    /// Bytes of those that are of the present generation, and of the last one.
    present: u64,
    last: u64,
}

impl Load {
    #[inline]
    pub(super) fn requests(&self) -> u32 {
        self.requests
    }

    #[inline]
    pub(super) fn bytes(&self) -> u64 {
        self.bytes
    }

    /// One more, of the present generation.
    #[inline]
    pub(super) fn add(&mut self, bytes: u64) {
        self.requests += 1;
        self.bytes += bytes;
        self.present += bytes;
    }

    /// One has ended that is so many generations old. Whether it was not late.
    #[inline]
    pub(super) fn remove(&mut self, bytes: u64, age: u32) -> bool {
        self.requests -= 1;
        self.bytes -= bytes;
        match age {
            0 => self.present -= bytes,
            1 => self.last -= bytes,
            _ => return false,
        }
        true
    }

    /// There is a new generation. Returns the bytes of what is late from now on.
    pub(super) fn age(&mut self) -> u64 {
        let late = std::mem::replace(&mut self.last, std::mem::take(&mut self.present));
        debug_assert!(self.last + late <= self.bytes);
        late
    }

    /// Bytes of what is not late.
    pub(super) fn in_time(&self) -> u64 {
        self.present + self.last
    }
}

/// The present generation.
pub(super) struct Generation {
    number: u32,
    /// When it began, in ticks; the first one long ago.
    since: u64,
    /// How long one lasts at least, in ticks.
    least: u64,
}

impl Generation {
    /// The first one, each of which lasts for `least` or longer.
    pub(super) fn new(least: Duration) -> Self {
        let us = u64::try_from(least.as_micros()).unwrap_or(u64::MAX);
        Generation { number: 0, since: 0, least: reactor::ticks::from_us(us) }
    }

    #[inline]
    pub(super) fn number(&self) -> u32 {
        self.number
    }

    /// How many generations old a request is.
    #[inline]
    pub(super) fn age_of(&self, generation: u32) -> u32 {
        // Around in 2^32 times half a second, if room is short all that time.
        self.number.wrapping_sub(generation)
    }

    /// When the next one may begin, in ticks.
    pub(super) fn ends(&self) -> u64 {
        self.since.saturating_add(self.least)
    }

    /// Begins the next one at `now`, in ticks.
    pub(super) fn next(&mut self, now: u64) {
        (self.number, self.since) = (self.number.wrapping_add(1), now);
    }
}
