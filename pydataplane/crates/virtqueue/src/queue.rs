//! The rings of one queue.

use std::sync::Arc;
use std::sync::atomic::{Ordering, fence};

use guestmem::{GuestMemory, GuestRange};

use crate::chain::{DESC_LEN, Desc, Head, MAX_QUEUE_SIZE};
use crate::inflight::{Inflight, InflightError, Left};
use crate::steps::step;

/// Byte offset of `idx` in both rings; `flags` is at 0.
const IDX: usize = 2;
/// Byte offset of the first entry of both rings.
const RING: usize = 4;
/// Bytes of an entry of the available ring.
const AVAIL_ENTRY: usize = 2;
/// Bytes of an entry of the used ring.
const USED_ENTRY: usize = 8;
/// VIRTQ_AVAIL_F_NO_INTERRUPT (2.7.6).
const NO_INTERRUPT: u16 = 1;
/// VIRTQ_USED_F_NO_NOTIFY (2.7.8).
const NO_NOTIFY: u16 = 1;

/// Whose addresses the rings of a [`QueueConfig`] are.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum AddressSpace {
    /// Guest physical ones.
    Guest,
    /// The peer's own ones, as in vhost-user's SET_VRING_ADDR.
    User,
}

/// Where and how a queue is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct QueueConfig {
    /// Descriptors: a power of two up to [`MAX_QUEUE_SIZE`].
    pub size: u16,
    /// Whose addresses follow.
    pub space: AddressSpace,
    /// Descriptor table, aligned to 16 bytes.
    pub desc: u64,
    /// Available ring, aligned to 2 bytes.
    pub avail: u64,
    /// Used ring, aligned to 4 bytes.
    pub used: u64,
    /// Guest physical address under which writes to the used ring are logged
    /// (VHOST_VRING_F_LOG); `None`: they are not.
    pub used_log: Option<u64>,
    /// VIRTIO_F_EVENT_IDX was negotiated.
    pub event_idx: bool,
    /// VIRTIO_F_INDIRECT_DESC was negotiated.
    pub indirect: bool,
    /// Where to go on in the available ring (SET_VRING_BASE).
    pub next_avail: u16,
}

/// Why a queue could not be set up.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum ConfigError {
    /// Not a power of two, none, or more than [`MAX_QUEUE_SIZE`].
    #[error("a queue of {0} descriptors: must be a power of two up to {MAX_QUEUE_SIZE}")]
    Size(u16),
    /// A ring is not, or not wholly, within one region of guest memory.
    #[error("the {ring} at {addr:#x} is not within one region of guest memory")]
    Address {
        /// Which.
        ring: &'static str,
        /// Where it should be.
        addr: u64,
    },
    /// A ring is not aligned (2.7: 16, 2 and 4 bytes).
    #[error("the {ring} at {addr:#x} is not aligned to {align} bytes")]
    Alignment {
        /// Which.
        ring: &'static str,
        /// Where it is.
        addr: u64,
        /// What it must be aligned to, in bytes.
        align: u8,
    },
}

/// The driver broke the ring itself; the queue takes no more until it is set up anew.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum QueueError {
    /// More chains available than the queue has descriptors (2.7.6).
    #[error("the available index {idx} is more than {size} ahead of {next}")]
    AvailIndex {
        /// What the driver wrote.
        idx: u16,
        /// Where the device is.
        next: u16,
        /// Descriptors of the queue.
        size: u16,
    },
}

/// The device's side of a split virtqueue. How it walks a chain is in `segments`.
#[derive(Debug)]
pub struct SplitQueue {
    pub(crate) desc: GuestRange<'static>,
    avail: GuestRange<'static>,
    used: GuestRange<'static>,
    pub(crate) size: u16,
    event_idx: bool,
    pub(crate) indirect: bool,
    /// Next entry of the available ring to take.
    next_avail: u16,
    /// The available index as last read.
    seen_avail: u16,
    /// Next entry of the used ring to fill.
    next_used: u16,
    /// The used index as the driver sees it.
    shown: u16,
    /// The used index when a call was last decided on.
    published: u16,
    /// No call was decided on yet: the first one is always made.
    fresh: bool,
    used_log: Option<u64>,
    /// Where chains taken and not yet used are marked.
    inflight: Option<Inflight>,
    /// Chains that were in flight when the queue was set up, in order. They come before what is in
    /// the available ring, as its last entries before `seen_avail`, while `replaying`.
    replay: Box<[u16]>,
    /// Those of them that were marked as unrepeatable and of which nobody was told yet.
    unrepeatable: Vec<u16>,
    replaying: bool,
    /// Keeps what the ranges above point to; the last field, dropped last.
    pub(crate) memory: Arc<GuestMemory>,
}

impl SplitQueue {
    /// The queue `config` in `memory`. Goes on in the used ring where its index stands.
    pub fn new(memory: Arc<GuestMemory>, config: &QueueConfig) -> Result<SplitQueue, ConfigError> {
        let size = config.size;
        if !size.is_power_of_two() || size > MAX_QUEUE_SIZE {
            return Err(ConfigError::Size(size));
        }
        let n = usize::from(size);
        let event = if config.event_idx { 2 } else { 0 };
        let resolve = |ring, addr, len: usize, align: u8| {
            let range = match config.space {
                AddressSpace::Guest => memory.range(addr, len as u64),
                AddressSpace::User => memory.range_uva(addr, len as u64),
            };
            let range = range.ok_or(ConfigError::Address { ring, addr })?;
            if !(range.as_ptr() as usize).is_multiple_of(usize::from(align)) {
                return Err(ConfigError::Alignment { ring, addr, align });
            }
            // SAFETY: the queue holds `memory` as long as the ranges.
            Ok(unsafe { range.detach() })
        };
        let desc = resolve("descriptor table", config.desc, n * DESC_LEN, 16)?;
        let avail = resolve("available ring", config.avail, RING + n * AVAIL_ENTRY + event, 2)?;
        let used = resolve("used ring", config.used, RING + n * USED_ENTRY + event, 4)?;
        let next_used = index(&used);
        Ok(SplitQueue {
            desc,
            avail,
            used,
            size,
            event_idx: config.event_idx,
            indirect: config.indirect,
            next_avail: config.next_avail,
            seen_avail: config.next_avail,
            next_used,
            shown: next_used,
            published: next_used,
            fresh: true,
            used_log: config.used_log,
            inflight: None,
            replay: Box::default(),
            unrepeatable: Vec::new(),
            replaying: false,
            memory,
        })
    }

    /// From now on marks in `inflight` what is in flight; for a queue that has taken nothing yet.
    /// What was in flight when the region was last used is taken first, in its old order, and the
    /// available ring goes on behind it, whatever base the queue was set up with. Returns whether
    /// the region was in use before. On an error the queue is as it was.
    pub fn track(&mut self, mut inflight: Inflight) -> Result<bool, InflightError> {
        let left = inflight.recover(self.size, self.next_used, index(&self.avail))?;
        self.inflight = Some(inflight);
        let Left::InFlight { heads, unrepeatable } = left else { return Ok(false) };
        // Whoever was killed may have stored the index and not logged it.
        self.mark_used(0, 4);
        self.next_avail = self.next_used;
        self.seen_avail = self.next_used.wrapping_add(heads.len() as u16);
        self.replaying = !heads.is_empty();
        self.replay = heads;
        self.unrepeatable = unrepeatable.into();
        Ok(true)
    }

    /// Whether what was taken last was taken before.
    #[inline]
    pub fn is_replaying(&self) -> bool {
        self.replaying
    }

    /// Whether the chain `head`, which was taken while the queue [is replaying](SplitQueue::is_replaying), was
    /// [marked so](SplitQueue::mark_unrepeatable) when the queue was set up. Told once: what has that head later
    /// is another request.
    pub fn take_unrepeatable(&mut self, head: u16) -> bool {
        let at = self.unrepeatable.iter().position(|marked| *marked == head);
        at.map(|at| self.unrepeatable.swap_remove(at)).is_some()
    }

    /// From now on the chain `head`, which was taken, cannot be done a second time: whoever finds it in flight is told.
    #[cold]
    pub fn mark_unrepeatable(&mut self, head: u16) {
        if let Some(inflight) = &mut self.inflight {
            inflight.mark_unrepeatable(head);
        }
    }

    /// Chains that were in flight when the queue was set up and have not been taken again yet.
    #[inline]
    pub fn to_replay(&self) -> u16 {
        match self.replaying {
            true => self.seen_avail.wrapping_sub(self.next_avail),
            false => 0,
        }
    }

    /// Whether it marks what is in flight.
    #[inline]
    pub fn is_tracking(&self) -> bool {
        self.inflight.is_some()
    }

    /// Whether the peer truncated memory that the queue uses.
    pub fn is_broken(&self) -> bool {
        self.memory.is_broken() || self.inflight.as_ref().is_some_and(Inflight::is_broken)
    }

    /// Index of the available ring as the driver last showed it.
    pub fn avail_index(&self) -> u16 {
        index(&self.avail)
    }

    /// Descriptors of the queue.
    #[inline]
    pub fn size(&self) -> u16 {
        self.size
    }

    /// The memory it lies in.
    #[inline]
    pub fn memory(&self) -> &Arc<GuestMemory> {
        &self.memory
    }

    /// Where to go on in the available ring (GET_VRING_BASE).
    #[inline]
    pub fn next_avail(&self) -> u16 {
        self.next_avail
    }

    /// Where to go on in the used ring.
    #[inline]
    pub fn next_used(&self) -> u16 {
        self.next_used
    }

    /// Goes on at the same addresses in a new memory table. On an error it is as it was.
    pub fn remap(
        &mut self,
        memory: Arc<GuestMemory>,
        config: &QueueConfig,
    ) -> Result<(), ConfigError> {
        let SplitQueue { desc, avail, used, memory, .. } = SplitQueue::new(memory, config)?;
        (self.desc, self.avail, self.used, self.memory) = (desc, avail, used, memory);
        Ok(())
    }

    /// Whether [`SplitQueue::pop`] has something to take. At most one read of guest memory.
    #[inline(always)]
    pub fn has_work(&self) -> bool {
        self.has_seen_more() || index(&self.avail) != self.next_avail
    }

    /// Whether chains are known that [`SplitQueue::pop`] has not taken yet. Reads no guest memory.
    #[inline(always)]
    pub fn has_seen_more(&self) -> bool {
        self.seen_avail != self.next_avail
    }

    /// Takes up to `heads.len()` chains; returns how many. Reads the available index only when
    /// all that was seen is taken.
    #[inline]
    pub fn pop(&mut self, heads: &mut [Head]) -> Result<usize, QueueError> {
        if self.seen_avail == self.next_avail {
            let idx = index(&self.avail);
            if idx == self.next_avail {
                return Ok(0);
            }
            if idx.wrapping_sub(self.next_avail) > self.size {
                return Err(QueueError::AvailIndex { idx, next: self.next_avail, size: self.size });
            }
            self.seen_avail = idx;
            self.replaying = false;
        }
        let ready = usize::from(self.seen_avail.wrapping_sub(self.next_avail));
        let count = ready.min(heads.len());
        let heads = &mut heads[..count];
        if self.replaying {
            let from = self.replay.len() - ready;
            for (head, index) in heads.iter_mut().zip(&self.replay[from..]) {
                head.index = *index;
            }
        } else {
            for (i, head) in heads.iter_mut().enumerate() {
                let slot = self.next_avail.wrapping_add(i as u16) & (self.size - 1);
                let at = RING + usize::from(slot) * AVAIL_ENTRY;
                head.index = u16::from_le(self.avail.get(at).expect(CHECKED));
                self.desc.prefetch(usize::from(head.index) * DESC_LEN);
            }
            if let Some(inflight) = &mut self.inflight {
                for head in heads.iter().filter(|head| head.index < self.size) {
                    inflight.take(head.index);
                }
            }
        }
        for head in heads.iter_mut() {
            head.first = match head.index < self.size {
                true => self.desc.get(usize::from(head.index) * DESC_LEN).expect(CHECKED),
                false => Desc::default(),
            };
            if head.first.flags() & Desc::INDIRECT != 0
                && let Some(table) = self.memory.run(head.first.addr(), DESC_LEN as u64)
            {
                table.prefetch(0);
            }
        }
        self.next_avail = self.next_avail.wrapping_add(count as u16);
        Ok(count)
    }

    /// Gives `heads`, the last chains taken, back to the available ring, as if never taken: for a
    /// caller whose turn is over.
    #[inline]
    pub fn undo_pop(&mut self, heads: &[Head]) {
        self.next_avail = self.next_avail.wrapping_sub(heads.len() as u16);
        if let Some(inflight) = &mut self.inflight
            && !self.replaying
        {
            // The last one first: at any time those marked are the first ones.
            for head in heads.iter().rev().filter(|head| head.index < self.size) {
                inflight.untake(head.index);
            }
        }
    }

    /// Chains that were taken and are not used are taken again, in this order, before anything else: those
    /// `heads`, and none other. Their marks stay.
    pub fn take_again(&mut self, heads: &[u16]) {
        if heads.is_empty() {
            return;
        }
        let rest = self.unreplayed();
        // What this process has taken it knows all about.
        self.unrepeatable.retain(|head| rest.contains(head));
        // Behind all that was taken; what was seen there is looked at again.
        self.seen_avail = self.next_avail;
        self.next_avail = self.seen_avail.wrapping_sub((heads.len() + rest.len()) as u16);
        self.replay = heads.iter().chain(&rest).copied().collect();
        self.replaying = true;
    }

    /// Chains that were in flight when the queue was set up and were not taken again yet, in order: they
    /// count as taken from now on.
    pub fn unreplayed(&mut self) -> Box<[u16]> {
        let count = usize::from(self.to_replay());
        if count == 0 {
            return Box::default();
        }
        (self.next_avail, self.replaying) = (self.seen_avail, false);
        let replay = std::mem::take(&mut self.replay);
        replay[replay.len() - count..].into()
    }

    /// Gives `heads`, all that was taken and is not used, back to the available ring, as if never taken:
    /// whoever goes on at the used index takes them again. `false`, and nothing was done: others that were
    /// taken later are used, so the ring from there on has not these (2.7.8: in any order).
    #[must_use]
    pub fn give_back(&mut self, heads: &[u16]) -> bool {
        let taken = self.next_avail.wrapping_sub(self.next_used);
        if self.to_replay() != 0 || usize::from(taken) != heads.len() || taken > self.size {
            return false;
        }
        let mut given = heads.to_vec();
        let mut there: Vec<u16> = (0..taken).map(|n| self.offered(self.next_used, n)).collect();
        given.sort_unstable();
        there.sort_unstable();
        if given != there {
            return false;
        }
        (self.next_avail, self.seen_avail) = (self.next_used, self.next_used);
        true
    }

    /// Whether [`SplitQueue::give_back`] would take all that was taken and is not used, of which `is_left` says whether
    /// a head is. The driver can have written other ones into the ring meanwhile.
    pub fn may_give_back(&self, is_left: impl Fn(u16) -> bool) -> bool {
        let taken = self.next_avail.wrapping_sub(self.next_used);
        let offered = |n| self.offered(self.next_used, n);
        self.to_replay() == 0 && taken <= self.size && (0..taken).all(|n| is_left(offered(n)))
    }

    /// What the driver wrote into the available ring, so many entries behind `from`.
    fn offered(&self, from: u16, behind: u16) -> u16 {
        let slot = from.wrapping_add(behind) & (self.size - 1);
        let at = RING + usize::from(slot) * AVAIL_ENTRY;
        u16::from_le(self.avail.get(at).expect(CHECKED))
    }

    /// The chain that begins at descriptor `index`, to be walked again.
    pub fn head(&self, index: u16) -> Head {
        let first = match index < self.size {
            true => self.desc.get(usize::from(index) * DESC_LEN).expect(CHECKED),
            false => Desc::default(),
        };
        Head { index, first }
    }

    /// Puts the chain `head` into the used ring, with the bytes written to it from its start
    /// (2.7.8). The driver sees it after [`SplitQueue::publish`].
    #[inline(always)]
    pub fn push_used(&mut self, head: u16, written: u32) {
        let slot = self.next_used & (self.size - 1);
        let at = RING + usize::from(slot) * USED_ENTRY;
        let entry = [u32::from(head).to_le(), written.to_le()];
        self.used.put(at, entry).expect(CHECKED);
        step!();
        self.mark_used(at, USED_ENTRY);
        if let Some(inflight) = &mut self.inflight {
            inflight.link(head, self.next_used);
        }
        self.next_used = self.next_used.wrapping_add(1);
    }

    /// Lets a driver that looks by itself see what was pushed. [`SplitQueue::publish`] follows, and
    /// decides whether to call for this too.
    #[inline]
    pub fn show(&mut self) {
        if self.next_used != self.shown {
            self.used.store_release_u16(IDX, self.next_used).expect(CHECKED);
            step!();
            if let Some(inflight) = &mut self.inflight {
                inflight.clear(self.shown, self.next_used);
            }
            self.shown = self.next_used;
            self.mark_used(IDX, 2);
        }
    }

    /// Lets the driver see what was pushed. Returns whether it wants to be called (2.7.7,
    /// 2.7.10); `false` where nothing was pushed since the last time.
    #[inline]
    #[must_use]
    pub fn publish(&mut self) -> bool {
        let wanted = self.wants_call();
        self.mark_published();
        wanted
    }

    /// As [`SplitQueue::publish`], but nothing is marked as published: it is asked again for the same, and what
    /// comes until then. A driver that has looked by itself meanwhile wants no call any more.
    #[inline]
    #[must_use]
    pub fn wants_call(&mut self) -> bool {
        if self.next_used == self.published {
            return false;
        }
        self.show();
        // The index must be visible before the driver's wish is read: it writes its wish, then
        // looks at the index again.
        fence(Ordering::SeqCst);
        if self.event_idx {
            let at = RING + usize::from(self.size) * AVAIL_ENTRY;
            let event = u16::from_le(self.avail.get(at).expect(CHECKED));
            self.fresh || need_event(event, self.next_used, self.published)
        } else {
            let flags = u16::from_le(self.avail.get(0).expect(CHECKED));
            flags & NO_INTERRUPT == 0
        }
    }

    /// The driver is called for all that was pushed, or wanted no call for it.
    #[inline(always)]
    pub fn mark_published(&mut self) {
        self.fresh &= self.next_used == self.published;
        self.published = self.next_used;
    }

    /// How much was pushed since the last [`SplitQueue::mark_published`].
    #[inline]
    pub fn unpublished(&self) -> u16 {
        self.next_used.wrapping_sub(self.published)
    }

    /// Asks the driver for kicks, then looks again: `true` means that chains came in between
    /// and the caller must pop before it sleeps.
    #[must_use]
    pub fn enable_kick(&mut self) -> bool {
        if self.event_idx {
            self.put_avail_event(self.next_avail);
        } else {
            self.put_used_flags(0);
        }
        // As in `publish`, with the roles exchanged.
        fence(Ordering::SeqCst);
        self.has_work()
    }

    /// Asks the driver for no kicks. A wish only: with VIRTIO_F_EVENT_IDX one may still come
    /// (2.7.10.1: the event index can only be left behind).
    pub fn disable_kick(&mut self) {
        if self.event_idx {
            // Behind everything that the driver may be adding now: passed again only after
            // 65535 - size more chains.
            self.put_avail_event(self.next_avail.wrapping_sub(self.size + 1));
        } else {
            self.put_used_flags(NO_NOTIFY);
        }
    }

    fn put_avail_event(&mut self, value: u16) {
        let at = RING + usize::from(self.size) * USED_ENTRY;
        self.used.store_release_u16(at, value).expect(CHECKED);
        self.mark_used(at, 2);
    }

    fn put_used_flags(&mut self, value: u16) {
        self.used.store_release_u16(0, value).expect(CHECKED);
        self.mark_used(0, 2);
    }

    #[inline(always)]
    fn mark_used(&self, offset: usize, len: usize) {
        if let Some(gpa) = self.used_log {
            self.memory.mark_dirty(gpa.wrapping_add(offset as u64), len as u64);
        }
    }
}

/// Why an access to a ring cannot fail.
const CHECKED: &str = "rings are checked against the queue size when the queue is set up";

/// The index of a ring, with acquire ordering: the entries before it are visible.
#[inline(always)]
fn index(ring: &GuestRange<'_>) -> u16 {
    ring.load_acquire_u16(IDX).expect(CHECKED)
}

/// `vring_need_event` (2.7.10): whether the other side's event index was passed between the
/// indexes `old` and `new`.
#[inline(always)]
fn need_event(event: u16, new: u16, old: u16) -> bool {
    new.wrapping_sub(event).wrapping_sub(1) < new.wrapping_sub(old)
}
