//! The driver's side of a split virtqueue (virtio 1.2, 2.7).

use std::sync::Arc;
use std::sync::atomic::{Ordering, fence};

use guestmem::{GuestMemory, GuestRange};
use virtqueue::Desc;

use crate::error::Error;

/// Where the parts of a ring are, as guest addresses.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Layout {
    /// Descriptors.
    pub size: u16,
    /// Descriptor table.
    pub desc: u64,
    /// Available ring.
    pub avail: u64,
    /// Used ring.
    pub used: u64,
}

/// Whether the device wants to hear of new chains.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[must_use]
pub enum Kick {
    /// Write to the kick descriptor.
    Needed,
    /// The device is polling, or was kicked for these already.
    NotNeeded,
}

/// One entry of the used ring.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Used {
    /// The chain's head.
    pub head: u32,
    /// Bytes that the device wrote.
    pub len: u32,
}

/// A driver's ring. Free descriptors are the caller's business.
#[derive(Debug)]
pub struct Ring {
    layout: Layout,
    desc: GuestRange<'static>,
    avail: GuestRange<'static>,
    used: GuestRange<'static>,
    event_idx: bool,
    /// The available index, with what is not yet published.
    next_avail: u16,
    /// The available index as last published.
    published: u16,
    /// Entries of the used ring seen.
    next_used: u16,
    /// The used index as last read.
    seen_used: u16,
    _memory: Arc<GuestMemory>,
}

impl Ring {
    /// Bytes that a ring of `size` descriptors takes, its parts aligned to 64.
    pub fn bytes(size: u16) -> u64 {
        let n = u64::from(size);
        (n * 16).next_multiple_of(64) + (6 + n * 2).next_multiple_of(64) + 6 + n * 8
    }

    /// The parts of a ring of `size` descriptors, one after the other from `gpa`.
    pub fn layout(gpa: u64, size: u16) -> Layout {
        let n = u64::from(size);
        let avail = gpa + (n * 16).next_multiple_of(64);
        Layout { size, desc: gpa, avail, used: avail + (6 + n * 2).next_multiple_of(64) }
    }

    /// A ring, zeroed.
    pub fn new(memory: Arc<GuestMemory>, layout: Layout, event_idx: bool) -> Result<Ring, Error> {
        let n = u64::from(layout.size);
        let part = |gpa, len| {
            let range = memory.range(gpa, len).ok_or(Error::NoRoom { wanted: len })?;
            range.fill(0);
            // SAFETY: the ring keeps `memory` as long as the ranges.
            Ok::<_, Error>(unsafe { range.detach() })
        };
        Ok(Ring {
            layout,
            desc: part(layout.desc, n * 16)?,
            avail: part(layout.avail, 6 + n * 2)?,
            used: part(layout.used, 6 + n * 8)?,
            event_idx,
            next_avail: 0,
            published: 0,
            next_used: 0,
            seen_used: 0,
            _memory: memory,
        })
    }

    /// Where its parts are.
    pub fn at(&self) -> Layout {
        self.layout
    }

    /// The available index, unpublished chains included.
    pub fn next_avail(&self) -> u16 {
        self.next_avail
    }

    /// Writes descriptor `index` of the table.
    #[inline]
    pub fn set_desc(&self, index: u16, desc: Desc) -> Result<(), Error> {
        Ok(self.desc.put(usize::from(index) * 16, desc)?)
    }

    /// Puts `head` into the available ring; the device sees it after [`Ring::publish`].
    #[inline(always)]
    pub fn add(&mut self, head: u16) {
        let slot = usize::from(self.next_avail & (self.layout.size - 1));
        self.avail.put(4 + slot * 2, head.to_le()).expect(CHECKED);
        self.next_avail = self.next_avail.wrapping_add(1);
    }

    /// Lets the device see what was added.
    #[inline(always)]
    pub fn publish(&mut self) -> Kick {
        let (old, new) = (self.published, self.next_avail);
        if old == new {
            return Kick::NotNeeded;
        }
        self.avail.store_release_u16(2, new).expect(CHECKED);
        self.published = new;
        fence(Ordering::SeqCst);
        let needed = if self.event_idx {
            let at = 4 + usize::from(self.layout.size) * 8;
            let event = u16::from_le(self.used.get(at).expect(CHECKED));
            new.wrapping_sub(event).wrapping_sub(1) < new.wrapping_sub(old)
        } else {
            u16::from_le(self.used.get::<u16>(0).expect(CHECKED)) & 1 == 0
        };
        if needed { Kick::Needed } else { Kick::NotNeeded }
    }

    /// Writes any value as the available index (misbehaviour).
    pub fn force_avail_idx(&mut self, idx: u16) -> Result<(), Error> {
        self.next_avail = idx;
        self.published = idx;
        Ok(self.avail.store_release_u16(2, idx)?)
    }

    /// The next used entry, if there is one.
    #[inline(always)]
    pub fn poll(&mut self) -> Option<Used> {
        if self.seen_used == self.next_used {
            self.seen_used = self.used.load_acquire_u16(2).expect(CHECKED);
            if self.seen_used == self.next_used {
                return None;
            }
        }
        let slot = usize::from(self.next_used & (self.layout.size - 1));
        let [head, len]: [u32; 2] = self.used.get(4 + slot * 8).expect(CHECKED);
        self.next_used = self.next_used.wrapping_add(1);
        Some(Used { head: u32::from_le(head), len: u32::from_le(len) })
    }

    /// Asks for a call at the next used entry; `true`: there is one already.
    pub fn enable_call(&mut self) -> bool {
        if self.event_idx {
            self.put_used_event(self.next_used);
        } else {
            self.avail.store_release_u16(0, 0).expect(CHECKED);
        }
        fence(Ordering::SeqCst);
        self.used.load_acquire_u16(2).expect(CHECKED) != self.next_used
    }

    /// Asks for no calls.
    pub fn disable_call(&mut self) {
        if self.event_idx {
            self.put_used_event(self.next_used.wrapping_sub(self.layout.size + 1));
        } else {
            self.avail.store_release_u16(0, 1).expect(CHECKED);
        }
    }

    fn put_used_event(&mut self, value: u16) {
        let at = 4 + usize::from(self.layout.size) * 2;
        self.avail.store_release_u16(at, value).expect(CHECKED);
    }
}

/// Why an access to a ring cannot fail.
const CHECKED: &str = "a ring's parts have the size that its number of descriptors asks for";

#[cfg(test)]
mod tests {
    use super::*;
    use virtqueue::{AddressSpace, Head, QueueConfig, Segments, SplitQueue};

    /// Both sides of a ring on the same memory.
    fn pair(event_idx: bool) -> (Ring, SplitQueue) {
        let memory = Arc::new(GuestMemory::memfd(&[(0, 0x10000)]).expect("memory"));
        let at = Ring::layout(0x1000, 8);
        let ring = Ring::new(memory.clone(), at, event_idx).expect("ring");
        let config = QueueConfig {
            size: 8,
            space: AddressSpace::Guest,
            desc: at.desc,
            avail: at.avail,
            used: at.used,
            used_log: None,
            event_idx,
            indirect: true,
            next_avail: 0,
        };
        (ring, SplitQueue::new(memory, &config).expect("queue"))
    }

    #[test]
    fn what_the_driver_offers_comes_back_used() {
        for event_idx in [false, true] {
            let (mut ring, mut queue) = pair(event_idx);
            let mut segments = Segments::new();
            let mut heads = [Head::default(); 8];
            for round in 0..40_000u32 {
                let head = (round % 8) as u16;
                ring.set_desc(head, Desc::new(0x8000, 64, Desc::WRITE, 0)).expect("desc");
                ring.add(head);
                assert_eq!(ring.poll(), None);
                let _ = ring.publish();
                assert_eq!(queue.pop(&mut heads), Ok(1));
                assert_eq!(queue.walk(&heads[0], &mut segments), Ok(()));
                queue.push_used(heads[0].index(), round);
                let _ = queue.publish();
                assert_eq!(ring.poll(), Some(Used { head: head.into(), len: round }));
            }
        }
    }

    #[test]
    fn kicks_and_calls_come_only_where_asked_for() {
        for event_idx in [false, true] {
            let (mut ring, mut queue) = pair(event_idx);
            let mut heads = [Head::default(); 8];
            ring.set_desc(0, Desc::new(0x8000, 64, 0, 0)).expect("desc");
            let mut go = |kick_on: bool, call_on: bool| {
                if kick_on {
                    assert!(!queue.enable_kick());
                } else {
                    queue.disable_kick();
                }
                ring.add(0);
                let kick = ring.publish();
                assert_eq!(queue.pop(&mut heads), Ok(1));
                if call_on {
                    assert!(!ring.enable_call());
                } else {
                    ring.disable_call();
                }
                queue.push_used(0, 0);
                let call = queue.publish();
                assert!(ring.poll().is_some());
                (kick == Kick::Needed, call)
            };
            assert_eq!(go(true, true), (true, true));
            for (kick, call) in [(false, false), (true, false), (false, true), (true, true)] {
                assert_eq!(go(kick, call), (kick, call), "event_idx {event_idx}");
            }
        }
    }
}
