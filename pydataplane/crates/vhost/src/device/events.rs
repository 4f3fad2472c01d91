//! The event queue: telling the guest that a target came, went or changed.

use std::os::fd::BorrowedFd;
use std::sync::Arc;

use zerocopy::IntoBytes;

use super::Device;
use super::side::SideQueue;
use crate::defs::{EVENT_QUEUE, EventRecord};
use crate::events::{Event, MAX_PENDING, Unheard};
use crate::front::Front;

impl Device {
    /// Tells the guest, now or when it has given a buffer, or when it is no longer paused. A guest
    /// whose event queue does not run yet scans by itself when it starts.
    pub(crate) fn tell(&mut self, event: Event) {
        if self.front == Front::Blk {
            return self.config_may_have_changed();
        }
        let target = self.attached[usize::from(event.target())].as_ref();
        let times = target.map(|target| Arc::clone(&target.times));
        let kept = match &mut self.unheard {
            Some(unheard) => unheard.push(event, times),
            None if self.events.is_none() => return,
            None => self.pending_events.push(event, times, self.features),
        };
        if !kept {
            self.counters.events_missed.add(1);
        }
        self.send_events();
    }

    /// The event queue is about to run. A driver that goes on where it was is told what it has not
    /// heard; one that starts afresh scans by itself, and its queue begins at 0, without buffers:
    /// it gives them when the device runs.
    ///
    /// `resumed`: the driver had another back end before. Where nobody knows what that one had not
    /// told, the driver is told that it missed something (5.6.6.3), and each disk's size.
    pub(super) fn begin_events(&mut self, queue: SideQueue, resumed: bool) {
        let goes_on = resumed || self.held || queue.next_avail() != 0 || queue.has_work();
        let unheard = self.unheard.take().filter(|_| goes_on);
        let unknown = unheard.is_none() && resumed;
        self.pending_events = unheard.map(|unheard| unheard.events).unwrap_or_default();
        if unknown {
            let there = (0..=u8::MAX).zip(&self.attached).filter(|(_, slot)| slot.is_some());
            self.pending_events.miss(there.map(|(target, _)| target), self.features);
        }
        self.events = Some(queue);
    }

    /// The event queue runs no longer; returns it. Its driver may go on with it.
    pub(super) fn end_events(&mut self) -> Option<SideQueue> {
        let queue = self.events.take()?;
        let events = std::mem::take(&mut self.pending_events);
        self.unheard = Some(Unheard { events, features: self.features });
        Some(queue)
    }

    /// What the driver has not heard, for a session that it may go on in.
    pub(crate) fn take_unheard(&mut self) -> Option<Unheard> {
        self.unheard.take()
    }

    /// The guest gave buffers.
    pub(crate) fn event_kick(&mut self) {
        if let Some(queue) = &mut self.events {
            queue.clear_kick();
        }
        self.send_events();
    }

    /// Descriptor to wait on for [`Device::event_kick`].
    pub(crate) fn event_fd(&self) -> Option<BorrowedFd<'_>> {
        self.events.as_ref()?.kick()
    }

    /// Puts what waits into the buffers that are there.
    pub(super) fn send_events(&mut self) {
        self.event_backlog = false;
        let serves = !self.retired && !self.held;
        let Some(queue) = self.events.as_mut().filter(|_| serves) else { return };
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
