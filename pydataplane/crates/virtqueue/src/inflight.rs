//! Requests in flight, in memory that outlives the device (vhost-user, "Inflight I/O tracking").
//!
//! Owns: the region that the front end keeps while no back end is there, and the part of each
//! split virtqueue in it. A [`SplitQueue`](crate::SplitQueue) that tracks marks a chain when it is
//! taken, before the request can have any effect, and clears the mark when the driver has been
//! shown that it was used. Whoever sets the queue up next, be it after kill -9 in the midst of any
//! of it, finds what is to be submitted again.
//!
//! ```text
//! QueueRegionSplit, at multiples of 64 bytes      DescStateSplit, 16 bytes, one a descriptor
//!   0  u64 features         0                       0  u8  inflight  1: taken and not used
//!   8  u16 version          1; 0: not yet used      1  u8  (padding) 1 or 2: cannot be done a second time
//!  10  u16 desc_num         entries of desc         2  u32 (padding) with 1: the low half of its counter
//!                                                   6  u16 next      the head before in its batch
//!  12  u16 last_batch_head  the last head pushed    8  u64 counter   when it was taken
//!  14  u16 used_idx         index of the used ring
//!  16  desc[desc_num]
//! ```
//! Bytes 1 to 5 are ours alone; to others they are padding, and may be left by an earlier request of the same head. So
//! they count while `inflight` does and, but for the moment in which the counter is written anew (2), of that counter
//! alone. All in the machine's byte order. The front end can write any byte at any time: each value is read once,
//! checked, then used.
//!
//! A process that is killed has made its stores up to some instruction and none behind it, so it
//! is the compiler alone that must keep their order.

use std::io;
use std::os::fd::{BorrowedFd, OwnedFd};
use std::sync::Arc;
use std::sync::atomic::{Ordering, compiler_fence};

use guestmem::{GuestMemory, GuestRange, MapError, RegionSpec};
use rustix::fs::{MemfdFlags, SealFlags, fcntl_add_seals, ftruncate, memfd_create};

use crate::chain::MAX_QUEUE_SIZE;
use crate::steps::step;

/// `version` of a region in use.
const VERSION: u16 = 1;
const FEATURES: usize = 0;
const VERSION_AT: usize = 8;
const DESC_NUM: usize = 10;
const LAST_BATCH_HEAD: usize = 12;
const USED_IDX: usize = 14;
const DESC: usize = 16;
/// Bytes of a `DescStateSplit`.
const STATE: usize = 16;
const INFLIGHT: usize = 0;
const UNREPEATABLE: usize = 1;
/// `inflight` and the mark at once: what was marked as unrepeatable under the same head is over.
const TAKEN: u16 = u16::from_ne_bytes([1, 0]);
const NOT_TAKEN: u16 = 0;
/// Of the request with [`MARKED_COUNTER`], or of whichever stands there.
const MARKED: u8 = 1;
const MARKED_ANYHOW: u8 = 2;
const MARKED_COUNTER: usize = 2;
const NEXT: usize = 6;
const COUNTER: usize = 8;
/// Each queue's part begins at a multiple of this many bytes, as with other back ends.
const ALIGNMENT: u64 = 64;
/// Bytes that `mmap_offset` must be a multiple of, for the counters.
const OFFSET_ALIGNMENT: u64 = 8;

/// Why a region, or a queue's part of it, cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum InflightError {
    /// Queues without descriptors, or too large.
    #[error("in-flight region for queues of {0} descriptors: 1 to {MAX_QUEUE_SIZE} are possible")]
    QueueSize(u16),
    /// No queues.
    #[error("in-flight region for no queues")]
    NoQueues,
    /// Not aligned.
    #[error("in-flight region at byte {0} of its file: must be a multiple of {OFFSET_ALIGNMENT}")]
    Offset(u64),
    /// Too short for its queues.
    #[error("in-flight region of {size} bytes: its queues need {needed}")]
    TooShort {
        /// Bytes of it.
        size: u64,
        /// Bytes that it should have.
        needed: u64,
    },
    /// The file cannot be mapped.
    #[error("in-flight region: {0}")]
    Map(#[from] MapError),
    /// No memory file could be made.
    #[error("cannot make an in-flight region: {0}")]
    Make(io::Error),
    /// The queue has more descriptors than its part tells of.
    #[error("the in-flight region has room for {room} descriptors, the queue has {size}")]
    QueueTooLarge {
        /// Descriptors of the region.
        room: u16,
        /// Descriptors of the queue.
        size: u16,
    },
    /// Written by somebody else, or damaged.
    #[error("the in-flight region says version {version} and {desc_num} descriptors")]
    Format {
        /// `version`.
        version: u16,
        /// `desc_num`.
        desc_num: u16,
    },
    /// It tells of another ring than the one that it comes with.
    #[error(
        "the in-flight region does not belong to the ring: {in_flight} in flight at used index \
         {used_idx}, but the ring is at {used} with {avail} available"
    )]
    OtherRing {
        /// Marked in the region.
        in_flight: u16,
        /// `used_idx`, before it was repaired.
        used_idx: u16,
        /// Index of the used ring.
        used: u16,
        /// Index of the available ring.
        avail: u16,
    },
}

/// The region of a session: what GET_INFLIGHT_FD makes and SET_INFLIGHT_FD gives.
#[derive(Clone, Debug)]
pub struct InflightRegion {
    memory: Arc<GuestMemory>,
    queues: u16,
    size: u16,
}

impl InflightRegion {
    /// Bytes for so many queues of so many descriptors.
    pub fn bytes(queues: u16, queue_size: u16) -> u64 {
        u64::from(queues) * part(queue_size)
    }

    /// GET_INFLIGHT_FD: a file of zeros, whose size nobody can change, for `queues` queues of
    /// `queue_size` descriptors each; its length in bytes is [`InflightRegion::bytes`].
    pub fn make(queues: u16, queue_size: u16) -> Result<OwnedFd, InflightError> {
        check(queues, queue_size)?;
        let make = || {
            let flags = MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING;
            let fd = memfd_create("virtlun-inflight", flags)?;
            ftruncate(&fd, Self::bytes(queues, queue_size))?;
            fcntl_add_seals(&fd, SealFlags::GROW | SealFlags::SHRINK | SealFlags::SEAL)?;
            Ok(fd)
        };
        make().map_err(|why: rustix::io::Errno| InflightError::Make(why.into()))
    }

    /// SET_INFLIGHT_FD: maps `bytes` bytes of `fd` from byte `offset`, which count as the guest's with
    /// `memory`. Its content is looked at when a queue starts.
    pub fn map(
        memory: &GuestMemory,
        fd: OwnedFd,
        offset: u64,
        bytes: u64,
        queues: u16,
        queue_size: u16,
    ) -> Result<InflightRegion, InflightError> {
        check(queues, queue_size)?;
        if !offset.is_multiple_of(OFFSET_ALIGNMENT) {
            return Err(InflightError::Offset(offset));
        }
        let needed = Self::bytes(queues, queue_size);
        if bytes < needed {
            return Err(InflightError::TooShort { size: bytes, needed });
        }
        let spec = RegionSpec { guest_addr: 0, size: needed, user_addr: 0, mmap_offset: offset };
        let memory = Arc::new(memory.beside(spec, fd)?);
        Ok(InflightRegion { memory, queues, size: queue_size })
    }

    /// The part of virtqueue `index`; `None`: the region has none.
    pub fn queue(&self, index: u16) -> Option<Inflight> {
        if index >= self.queues {
            return None;
        }
        let range = self.memory.range(u64::from(index) * part(self.size), part(self.size))?;
        // SAFETY: `Inflight` holds `memory` as long as the range.
        let region = unsafe { range.detach() };
        let (batch, memory) = (Box::default(), Arc::clone(&self.memory));
        Some(Inflight { region, size: self.size, counter: 0, last: 0, batch, memory })
    }

    /// What [`InflightRegion::map`] was given, for another process: file, offset, queues, descriptors
    /// of each.
    pub fn file(&self) -> Option<(BorrowedFd<'_>, u64, u16, u16)> {
        let (spec, file) = self.memory.files().next()?;
        Some((file, spec.mmap_offset, self.queues, self.size))
    }

    /// Whether the front end truncated the file under us.
    pub fn is_broken(&self) -> bool {
        self.memory.is_broken()
    }
}

/// Bytes of a queue's part.
fn part(queue_size: u16) -> u64 {
    (DESC as u64 + u64::from(queue_size) * STATE as u64).next_multiple_of(ALIGNMENT)
}

fn check(queues: u16, queue_size: u16) -> Result<(), InflightError> {
    match (queues, queue_size) {
        (0, _) => Err(InflightError::NoQueues),
        (_, 1..=MAX_QUEUE_SIZE) => Ok(()),
        _ => Err(InflightError::QueueSize(queue_size)),
    }
}

/// What the last user of a region left of one queue.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Left {
    /// Nothing: the region is new.
    Fresh,
    /// These heads were in flight, the first taken first.
    InFlight {
        /// All of them.
        heads: Box<[u16]>,
        /// Those that cannot be done a second time.
        unrepeatable: Box<[u16]>,
    },
}

/// One queue's `QueueRegionSplit`.
#[derive(Debug)]
pub struct Inflight {
    region: GuestRange<'static>,
    /// Entries of `desc`.
    size: u16,
    /// Of the next chain that is taken.
    counter: u64,
    /// `last_batch_head`.
    last: u16,
    /// Heads pushed and not yet shown, by their slot of the used ring, of which there is a power of
    /// two: what the region says of them is not trusted.
    batch: Box<[u16]>,
    /// Keeps the range above; the last field, dropped last.
    memory: Arc<GuestMemory>,
}

impl Inflight {
    /// Whether nobody has used the region yet.
    pub fn is_fresh(&self) -> bool {
        self.get(VERSION_AT) == 0
    }

    /// Whether the front end truncated the file under us.
    #[inline]
    pub(crate) fn is_broken(&self) -> bool {
        self.memory.is_broken()
    }

    /// Index of the used ring as it was last noted.
    pub fn used_index(&self) -> u16 {
        self.get(USED_IDX)
    }

    /// Whether anything is marked as in flight.
    pub fn has_marks(&self) -> bool {
        let marked = |head| self.region.get::<u8>(state(head) + INFLIGHT).expect(CHECKED) == 1;
        !self.is_fresh() && (0..self.size).any(marked)
    }

    /// Forgets everything: the next who looks finds a new region.
    pub fn reset(&mut self) {
        self.put(VERSION_AT, 0);
        compiler_fence(Ordering::SeqCst);
        (0..self.size).for_each(|head| self.unmark(head));
    }

    /// "When reconnecting", for a ring of `ring_size` descriptors whose indexes are `used` and
    /// `avail`: repairs what a crash between two steps left, and says what was in flight.
    pub(crate) fn recover(
        &mut self,
        ring_size: u16,
        used: u16,
        avail: u16,
    ) -> Result<Left, InflightError> {
        if ring_size > self.size {
            return Err(InflightError::QueueTooLarge { room: self.size, size: ring_size });
        }
        self.batch = vec![0; usize::from(ring_size)].into_boxed_slice();
        let version = self.get(VERSION_AT);
        let desc_num = self.get(DESC_NUM);
        if version == 0 {
            self.begin(used);
            return Ok(Left::Fresh);
        }
        if version != VERSION || desc_num != self.size {
            return Err(InflightError::Format { version, desc_num });
        }
        let used_idx = self.get(USED_IDX);
        let batch = used.wrapping_sub(used_idx);
        if batch <= ring_size {
            // Steps 1.a and 1.b: the last batch was shown, its marks may be there still. A list
            // that loops or leads astray ends with the batch.
            let mut head = self.get(LAST_BATCH_HEAD);
            for _ in 0..batch {
                if head >= self.size {
                    break;
                }
                self.unmark(head);
                head = self.get(state(head) + NEXT);
            }
        }
        let mut heads = Vec::with_capacity(usize::from(ring_size));
        for head in 0..self.size {
            let marked = self.region.get::<u8>(state(head) + INFLIGHT).expect(CHECKED) == 1;
            if marked && head < ring_size {
                let counter: u64 = self.region.get(state(head) + COUNTER).expect(CHECKED);
                heads.push((counter, head));
            }
        }
        let in_flight = heads.len() as u16;
        let available = avail.wrapping_sub(used);
        if batch > ring_size || available > ring_size || in_flight > available {
            return Err(InflightError::OtherRing { in_flight, used_idx, used, avail });
        }
        compiler_fence(Ordering::SeqCst);
        // Step 1.c.
        self.put(USED_IDX, used);
        heads.sort_unstable();
        // Numbered anew, the first first, so that each number grows no larger than it was: a crash in
        // between leaves the order, and no number that somebody wrote makes the next ones overflow.
        self.counter = 0;
        let mut unrepeatable = Vec::new();
        for &(counter, head) in &heads {
            let marked = self.is_unrepeatable(head, counter);
            if marked {
                self.put_mark(head, MARKED_ANYHOW, 0);
                unrepeatable.push(head);
            }
            self.number(head);
            step!();
            if marked {
                self.mark_unrepeatable(head);
            }
        }
        let heads: Box<[u16]> = heads.into_iter().map(|(_, head)| head).collect();
        Ok(Left::InFlight { heads, unrepeatable: unrepeatable.into() })
    }

    /// Whether `head`, in flight with that counter, is marked as one that cannot be done a second time.
    fn is_unrepeatable(&self, head: u16, counter: u64) -> bool {
        match self.region.get(state(head) + UNREPEATABLE).expect(CHECKED) {
            MARKED => self.region.get(state(head) + MARKED_COUNTER) == Ok(counter as u32),
            mark => mark == MARKED_ANYHOW,
        }
    }

    /// `head`, which is in flight, cannot be done a second time. Before anything is done that makes it so.
    pub(crate) fn mark_unrepeatable(&mut self, head: u16) {
        let counter: u64 = self.region.get(state(head) + COUNTER).expect(CHECKED);
        self.put_mark(head, MARKED, counter);
    }

    /// In one store: mark and counter are of the same request.
    fn put_mark(&self, head: u16, mark: u8, counter: u64) {
        let [a, b, c, d] = (counter as u32).to_ne_bytes();
        let [e, f] = self.get(state(head) + NEXT).to_ne_bytes();
        compiler_fence(Ordering::SeqCst);
        let marked = u64::from_ne_bytes([1, mark, a, b, c, d, e, f]);
        self.region.put(state(head), marked).expect(CHECKED);
        step!();
        compiler_fence(Ordering::SeqCst);
    }

    /// Begins to use a new region. The version comes last: until then it is a new one.
    fn begin(&mut self, used: u16) {
        (0..self.size).for_each(|head| self.unmark(head));
        self.region.put(FEATURES, 0u64).expect(CHECKED);
        step!();
        self.put(DESC_NUM, self.size);
        self.put(LAST_BATCH_HEAD, 0);
        self.put(USED_IDX, used);
        compiler_fence(Ordering::SeqCst);
        self.put(VERSION_AT, VERSION);
        self.counter = 0;
    }

    /// "When receiving available buffers", steps 2 to 4: `head`, less than the size of the ring,
    /// was taken. Before anything is done about it.
    #[inline(always)]
    pub(crate) fn take(&mut self, head: u16) {
        self.number(head);
        step!();
        self.put(state(head) + INFLIGHT, TAKEN);
        compiler_fence(Ordering::SeqCst);
    }

    #[inline(always)]
    fn number(&mut self, head: u16) {
        self.region.put(state(head) + COUNTER, self.counter).expect(CHECKED);
        self.counter = self.counter.wrapping_add(1);
    }

    /// `head` was given back to the available ring, untouched.
    #[inline]
    pub(crate) fn untake(&mut self, head: u16) {
        self.unmark(head);
    }

    /// "When supplying used buffers", steps 2 and 3: `head` stands in the used ring at `next_used`
    /// and is not shown yet.
    #[inline(always)]
    pub(crate) fn link(&mut self, head: u16, next_used: u16) {
        self.put(state(head) + NEXT, self.last);
        self.put(LAST_BATCH_HEAD, head);
        self.last = head;
        let slot = usize::from(next_used) & (self.batch.len() - 1);
        self.batch[slot] = head;
    }

    /// Steps 6 and 7: the used ring's index went from `shown` to `used`.
    #[inline]
    pub(crate) fn clear(&mut self, shown: u16, used: u16) {
        compiler_fence(Ordering::SeqCst);
        let mut at = shown;
        while at != used {
            self.unmark(self.batch[usize::from(at) & (self.batch.len() - 1)]);
            at = at.wrapping_add(1);
        }
        compiler_fence(Ordering::SeqCst);
        self.put(USED_IDX, used);
    }

    /// `head` is not in flight, nor one that cannot be done a second time, be it that somebody else takes it next.
    #[inline(always)]
    fn unmark(&self, head: u16) {
        self.put(state(head) + INFLIGHT, NOT_TAKEN);
    }

    #[inline(always)]
    fn get(&self, offset: usize) -> u16 {
        self.region.get(offset).expect(CHECKED)
    }

    #[inline(always)]
    fn put(&self, offset: usize, value: u16) {
        self.region.put(offset, value).expect(CHECKED);
        step!();
    }
}

/// Why an access to the region cannot fail.
const CHECKED: &str = "the region is as long as its queues need, and heads are checked";

/// Byte of the `DescStateSplit` of a head.
#[inline(always)]
fn state(head: u16) -> usize {
    DESC + usize::from(head) * STATE
}
