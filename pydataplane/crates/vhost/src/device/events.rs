//! The event queue: telling the guest that a target came, went or changed.

use std::os::fd::BorrowedFd;
use std::sync::Arc;

use zerocopy::IntoBytes;

use super::Device;
use crate::defs::{EVENT_QUEUE, EventRecord};
use crate::events::{Event, MAX_PENDING};

impl Device {
    /// Tells the guest, now or when it has given a buffer. A guest whose event queue does not
    /// run yet scans by itself when it starts.
    pub(crate) fn tell(&mut self, event: Event) {
        if self.events.is_none() {
            return;
        }
        let seat = self.seats[usize::from(event.target())].as_ref();
        let times = seat.map(|seat| Arc::clone(&seat.times));
        if !self.pending_events.push(event, times, self.features) {
            self.counters.events_missed.add(1);
        }
        self.send_events();
    }

    /// The guest gave buffers.
    pub(crate) fn event_kick(&mut self) {
        if let Some(queue) = &mut self.events {
            queue.rest();
        }
        self.send_events();
    }

    /// Descriptor to wait on for [`Device::event_kick`].
    pub(crate) fn event_fd(&self) -> Option<BorrowedFd<'_>> {
        self.events.as_ref()?.kick()
    }

    /// Puts what waits into the buffers that are there.
    fn send_events(&mut self) {
        self.event_backlog = false;
        let Some(queue) = &mut self.events else { return };
        // Bounded, as a guest can add buffers that are too small for ever.
        for _ in 0..BATCH {
            if self.pending_events.is_empty() {
                return;
            }
            match queue.take() {
                Ok(Some(chain)) if chain.segments.writable_len() as usize >= RECORD => {
                    if let Some(next) = self.pending_events.pop() {
                        queue.answer(&chain, next.record.as_bytes());
                        next.told();
                        self.counters.events_sent.add(1);
                    }
                }
                // Too small for any event: given back empty.
                Ok(Some(chain)) => {
                    self.counters.malformed.add(1);
                    queue.answer(&chain, &[]);
                }
                Ok(None) => return,
                Err(why) => {
                    self.counters.malformed.add(1);
                    self.queue_failed(EVENT_QUEUE as u16, why);
                    return;
                }
            }
        }
        self.event_backlog = !self.pending_events.is_empty();
    }
}

/// Buffers taken before the controller's thread looks at its orders again: all events that can
/// wait, and some that are of no use.
const BATCH: usize = 2 * MAX_PENDING;
const RECORD: usize = size_of::<EventRecord>();
