//! One io_uring per thread, shared by its channels.
//!
//! Entries are queued in memory and submitted together, at most one `io_uring_enter` per turn of
//! the loop and none when nothing was queued. Completions are read from memory. Where the kernel
//! has it the ring runs with DEFER_TASKRUN and TASKRUN_FLAG: completions of real devices then wait
//! for the thread instead of interrupting it, and a bit in shared memory says when an enter is
//! worth its while.
//!
//! Such a ring does not make its descriptor readable while completions wait in the kernel (seen on
//! Linux 6.18), so the thread's sleep relies on a registered eventfd there, switched on only around
//! the sleep; other rings are watched by their descriptor.
//!
//! Submitting costs the thread what the kernel does before it returns: for a direct read or write it pins
//! every page, and waits where the disk's own queue is full. Seen with `examples/enter_cost` on Linux
//! 6.18, ext4 on virtio-blk: 8 reads of 4 MiB keep the thread 2.3 ms (p99 8.4 ms), or 17 us if the
//! kernel's workers do it (IOSQE_ASYNC), and they end at the same time; 32 reads of 4 KiB take 90 us,
//! or 14 us and then twice as long to end. A polling kernel thread (SQPOLL) costs nothing here, and a
//! CPU there: where it has to share one, its latencies are the worst. A worker is not free either: it
//! pins 4 MiB in 200 us in which no guest has its CPU, and the disk's interrupt lets go of them at once,
//! on whichever CPU it comes to. So small transfers go inline, clients cut what they can into pieces
//! (`bdev`, `file/channel/large`) and hand over a little a turn, all together (`shares`), and what goes
//! beyond [`INLINE_BYTES`] a turn all the same goes to the workers.
//!
//! `user_data` is the client's index, its generation and its token, so that a completion never
//! reaches a client that came later into the same place.

mod files;
mod shares;
mod sleeping;

use std::cell::RefCell;
use std::io;
use std::os::fd::{AsRawFd, BorrowedFd, RawFd};
use std::rc::Rc;
use std::sync::atomic::{Ordering, fence};

use io_uring::{EnterFlags, IoUring, cqueue, squeue};
use rustix::thread::CpuSet;

use self::files::Files;
use self::shares::Shares;
use self::sleeping::Watch;
use crate::Owner;

pub use self::files::FileName;
pub use self::shares::TURN_BYTES;

/// Entries queued between two submissions at most; a fuller queue is submitted early.
const SQ_ENTRIES: u32 = 256;

/// Completions that fit in shared memory; the kernel keeps what goes beyond (NODROP).
const CQ_ENTRIES: u32 = 4096;

/// Bytes that the kernel may pin or copy on this thread in one submission; transfers beyond are made by
/// its workers. A tenth of a millisecond.
const INLINE_BYTES: u32 = 256 << 10;

/// A transfer of no more bytes is never worth a worker.
const INLINE_SMALL: u32 = 16 << 10;

/// Workers of a ring that may wait for files and disks at a time. The kernel's own limit is four times
/// the number of CPUs: a few calls to a disk that does not answer would keep all others waiting.
const WORKERS: u32 = 256;

/// Sets of flags that are tried, best first.
#[cfg(test)]
pub(crate) const FLAVOURS: usize = 4;

/// Clients of one ring at most: the index has 16 bits in `user_data`, and one is that of the watched
/// descriptors.
const CLIENTS_MAX: usize = WATCHES;

/// What stands in place of a client's index in the entries of watched descriptors.
const WATCHES: usize = (1 << 16) - 1;

/// The queue is full; try again later.
#[derive(Clone, Copy, Debug, thiserror::Error)]
#[error("the queue is full")]
pub struct Full;

type List = RefCell<Vec<(u32, i32)>>;

struct Ring {
    ring: IoUring,
    /// Completed but not yet collected, by client; `None`: a free place.
    clients: Vec<(u16, Option<Rc<List>>)>,
    /// Entries that the kernel has not been told of.
    queued: u32,
    /// Bytes of those that the kernel is to transfer inline.
    inline: u32,
    /// Entries of clients, queued or in the kernel.
    in_flight: u32,
    /// Who may hand over a part of a large transfer.
    shares: Shares,
    files: Files,
    /// The end of a turn matters to `shares`.
    shared: bool,
    /// What ends a sleep inside the kernel's enter.
    watches: Vec<Watch>,
    /// The eventfd is the one that wakes (DEFER_TASKRUN).
    deferred: bool,
}

/// One thread's io_uring, shared by its channels.
pub struct Uring {
    ring: Rc<RefCell<Ring>>,
}

impl Uring {
    /// A ring for the calling thread. It moves `event`, which the thread watches, when it has
    /// something between [`Uring::before_sleep`] and [`Uring::after_sleep`].
    pub(crate) fn new(event: BorrowedFd<'_>) -> io::Result<Self> {
        Self::with_flavour(event, 0)
    }

    /// A ring without the `skip` best sets of flags: as older kernels make it.
    pub(crate) fn with_flavour(event: BorrowedFd<'_>, skip: usize) -> io::Result<Self> {
        let (ring, deferred) = setup(skip)?;
        // Older kernels have no such limit, or keep their own.
        _ = ring.submitter().register_iowq_max_workers(&mut [WORKERS, 0]);
        let (clients, watches) = (Vec::new(), Vec::new());
        let mut ring = Ring {
            ring,
            clients,
            queued: 0,
            inline: 0,
            in_flight: 0,
            shares: Shares::new(),
            files: Files::new(),
            shared: false,
            watches,
            deferred,
        };
        if deferred {
            ring.ring.completion().disable_eventfd();
            ring.ring.submitter().register_eventfd(event.as_raw_fd())?;
        }
        Ok(Uring { ring: Rc::new(RefCell::new(ring)) })
    }

    /// Has the kernel's workers run on `cpus` instead of the calling thread's: they copy and zero, and
    /// must not take the CPU of a reactor. Kernels before 5.14 keep them where they are.
    pub(crate) fn place_workers(&self, cpus: &CpuSet) {
        // SAFETY: a set of CPUs is an array of bits; zeros are the empty set.
        let mut set: libc::cpu_set_t = unsafe { std::mem::zeroed() };
        for cpu in (0..CpuSet::MAX_CPU).filter(|cpu| cpus.is_set(*cpu)) {
            // SAFETY: the number is below the set's size, which is CpuSet::MAX_CPU bits.
            unsafe { libc::CPU_SET(cpu, &mut set) };
        }
        _ = self.ring.borrow().ring.submitter().register_iowq_aff(&set);
    }

    /// The descriptor to watch for reading; `None` where the eventfd does it.
    pub(crate) fn fd_to_watch(&self) -> Option<RawFd> {
        let ring = self.ring.borrow();
        (!ring.deferred).then(|| ring.ring.as_raw_fd())
    }

    /// The thread is about to sleep; `false` if it must not, because something is there.
    pub(crate) fn before_sleep(&self) -> bool {
        let mut ring = self.ring.borrow_mut();
        if ring.in_flight == 0 {
            return true;
        }
        if ring.deferred {
            ring.ring.completion().enable_eventfd();
            // The kernel marks the ring, then looks whether the eventfd is on; here it is the
            // other way round, so one of the two sees the other.
            fence(Ordering::SeqCst);
        }
        ring.queued == 0 && !ring.wants_enter() && ring.ring.completion().is_empty()
    }

    /// Undoes [`Uring::before_sleep`], whatever that returned.
    pub(crate) fn after_sleep(&self) {
        let mut ring = self.ring.borrow_mut();
        if ring.deferred && ring.in_flight > 0 {
            ring.ring.completion().disable_eventfd();
        }
    }

    /// A client with a completion list of its own, bounded by `depth` entries in flight, whose I/O is
    /// nobody's.
    pub fn client(&self, depth: u32) -> UringClient {
        self.client_of(None, depth)
    }

    /// As [`Uring::client`], of I/O that is done for `owner`.
    pub fn client_of(&self, owner: Option<Owner>, depth: u32) -> UringClient {
        let list = Rc::new(RefCell::new(Vec::with_capacity(depth as usize)));
        let mut ring = self.ring.borrow_mut();
        let free = ring.clients.iter().position(|(_, c)| c.is_none());
        let index = free.unwrap_or_else(|| {
            assert!(ring.clients.len() < CLIENTS_MAX, "more than {CLIENTS_MAX} clients of a ring");
            ring.clients.push((0, None));
            ring.clients.len() - 1
        });
        let clients = ring.clients.len();
        ring.shares.reserve(clients);
        let place = &mut ring.clients[index];
        place.0 = place.0.wrapping_add(1);
        place.1 = Some(list.clone());
        UringClient {
            ring: self.ring.clone(),
            list,
            taken: Vec::with_capacity(depth as usize),
            next: 0,
            in_order: false,
            place: (index as u64) << 48 | u64::from(place.0) << 32,
            file: None,
            owner,
            depth,
            outstanding: 0,
        }
    }

    /// Hands completions that are in memory to their clients; returns how many.
    #[inline]
    pub(crate) fn harvest(&self) -> u32 {
        self.ring.borrow_mut().harvest()
    }

    /// Submits what was queued and hands completions to their clients; returns how many.
    #[inline]
    pub(crate) fn flush(&self) -> u32 {
        let mut ring = self.ring.borrow_mut();
        if ring.shared {
            ring.shared = ring.shares.next_turn();
        }
        if ring.in_flight == 0 {
            return 0;
        }
        if ring.queued > 0 || ring.wants_enter() {
            ring.enter(0);
        }
        ring.harvest()
    }
}

/// A ring with the best flags that the kernel takes, and whether these have DEFER_TASKRUN, since
/// Linux 6.1; 5.19 has COOP_TASKRUN.
fn setup(skip: usize) -> io::Result<(IoUring, bool)> {
    let mut b = IoUring::builder();
    b.setup_cqsize(CQ_ENTRIES).setup_clamp().setup_submit_all();
    let mut best = b.clone();
    best.setup_single_issuer().setup_defer_taskrun().setup_taskrun_flag();
    let mut good = b.clone();
    good.setup_coop_taskrun().setup_taskrun_flag();
    let mut plain = IoUring::builder();
    plain.setup_cqsize(CQ_ENTRIES).setup_clamp();
    let mut last = io::ErrorKind::Unsupported.into();
    for (i, builder) in [best, good, b, plain].iter().enumerate().skip(skip) {
        match builder.build(SQ_ENTRIES) {
            Ok(ring) => return Ok((ring, i == 0)),
            Err(e) if e.raw_os_error() == Some(libc::EINVAL) => last = e,
            Err(e) => return Err(e),
        }
    }
    Err(last)
}

impl Ring {
    /// Whether completions wait inside the kernel for an enter.
    #[inline]
    fn wants_enter(&mut self) -> bool {
        let sq = self.ring.submission();
        sq.taskrun() || sq.cq_overflow()
    }

    /// Submits, runs deferred work, and waits for `min` completions. What the kernel does not
    /// take now (EAGAIN, EBUSY, EINTR) stays queued for the next time.
    fn enter(&mut self, min: u32) {
        let flags = EnterFlags::GETEVENTS.bits();
        // SAFETY: no argument is passed, and `queued` entries stand in the submission queue.
        let taken =
            unsafe { self.ring.submitter().enter::<libc::sigset_t>(self.queued, min, flags, None) };
        self.inline = 0;
        if let Ok(n) = taken {
            self.queued -= (n as u32).min(self.queued);
        }
    }

    fn harvest(&mut self) -> u32 {
        let mut n = 0;
        for cqe in self.ring.completion() {
            let user = cqe.user_data();
            let (index, generation) = ((user >> 48) as usize, (user >> 32) as u16);
            if index == WATCHES {
                if let Some(watch) = self.watches.get_mut(user as u32 as usize) {
                    watch.armed = cqueue::more(cqe.flags());
                }
                continue;
            }
            n += 1;
            if let Some((g, Some(list))) = self.clients.get(index)
                && *g == generation
            {
                // Never grows: a client has at most `depth` entries outstanding.
                list.borrow_mut().push((user as u32, cqe.result()));
            }
        }
        self.in_flight -= n;
        n
    }
}

/// One user of an io_uring: pushes entries, collects its own completions.
///
/// Dropping it waits for its I/O in flight: the kernel writes into the buffers until then, and
/// their owner may free them afterwards. A caller that must not stall collects everything first,
/// and I/O that may never end by itself (a read of a socket) has to be cancelled before.
pub struct UringClient {
    ring: Rc<RefCell<Ring>>,
    list: Rc<List>,
    /// What is being handed out; swapped with `list` when it is through.
    taken: Vec<(u32, i32)>,
    /// The next of `taken`.
    next: usize,
    /// It stands in the order of those that share out a turn.
    in_order: bool,
    /// Index and generation, in place in `user_data`.
    place: u64,
    /// What [`UringClient::use_file`] was given.
    file: Option<FileName>,
    /// Whose its I/O is.
    owner: Option<Owner>,
    depth: u32,
    /// Entries pushed and not yet collected.
    outstanding: u32,
}

impl UringClient {
    /// Whether [`UringClient::push`] would now give an entry of that weight to one of the kernel's
    /// workers.
    #[inline]
    pub fn needs_worker(&self, weight: u32) -> bool {
        weight > INLINE_SMALL && self.ring.borrow().inline.saturating_add(weight) > INLINE_BYTES
    }

    /// Whether this client may hand the kernel `bytes` of a large transfer now, at most [`TURN_BYTES`],
    /// and then pushes them (with a weight of 0: they are counted here). All clients of the thread share
    /// [`TURN_BYTES`] a turn, in rotation of their owners. If not, it asks again in the next turn, or
    /// leaves ([`UringClient::leave_shares`]).
    #[inline]
    pub fn spend_share(&mut self, bytes: u32) -> bool {
        let mut ring = self.ring.borrow_mut();
        if !self.in_order {
            ring.shares.join(self.index(), self.owner);
            self.in_order = true;
        }
        ring.shared = true;
        ring.shares.spend(self.index(), bytes)
    }

    /// Has nothing to hand over that [`UringClient::spend_share`] was asked for, or cannot: others do not
    /// wait for this client.
    #[inline]
    pub fn leave_shares(&mut self) {
        if self.in_order {
            self.in_order = false;
            self.ring.borrow_mut().shares.leave(self.index());
        }
    }

    /// Whose its I/O is; `None`: nobody's.
    pub fn owner(&self) -> Option<Owner> {
        self.owner
    }

    /// How this client's entries name the file of `fd`, of which it has one: where the kernel can, by a
    /// number that the ring knows until the client is dropped. It makes a system call.
    ///
    /// What the kernel's workers carry out by itself, as an fsync, gains nothing by the number: they would
    /// take the ring's lock to look it up.
    ///
    /// # Panics
    /// It has one already.
    pub fn use_file(&mut self, fd: BorrowedFd<'_>) -> FileName {
        assert!(self.file.is_none(), "a client has one file");
        let ring = &mut *self.ring.borrow_mut();
        *self.file.insert(ring.files.take(&ring.ring, fd))
    }

    /// This client's place in the ring's list, also in `user_data`.
    fn index(&self) -> u16 {
        (self.place >> 48) as u16
    }

    /// Queues `entry`; its completion carries `token`. `weight`: the bytes that the kernel pins or copies
    /// before the submission returns, for direct or buffered transfers; 0 where it does neither. Returns whether
    /// one of the kernel's workers has it, as those of the turn are too many. `Err` when the ring or this
    /// client's depth is full: try again after the next poll.
    ///
    /// # Errors
    /// [`Full`].
    ///
    /// # Safety
    /// Buffers and descriptors that `entry` names stay valid until its completion was collected
    /// or this client was dropped.
    pub unsafe fn push(
        &mut self,
        entry: squeue::Entry,
        token: u32,
        weight: u32,
    ) -> Result<bool, Full> {
        if self.outstanding == self.depth {
            return Err(Full);
        }
        let mut entry = entry.user_data(self.place | u64::from(token));
        let mut ring = self.ring.borrow_mut();
        let inline = ring.inline.saturating_add(weight);
        let by_worker = weight > INLINE_SMALL && inline > INLINE_BYTES;
        if by_worker {
            entry = entry.flags(squeue::Flags::ASYNC);
        } else {
            ring.inline = inline;
        }
        // SAFETY: passed on to the caller.
        if unsafe { ring.ring.submission().push(&entry) }.is_err() {
            ring.enter(0);
            // SAFETY: as above.
            unsafe { ring.ring.submission().push(&entry) }.map_err(|_| Full)?;
        }
        ring.queued += 1;
        ring.in_flight += 1;
        self.outstanding += 1;
        Ok(by_worker)
    }

    /// The next completion that was handed out to this client, as (token, result: bytes or
    /// -errno). A client may push again between two of them.
    #[inline]
    pub fn next_completion(&mut self) -> Option<(u32, i32)> {
        if self.next == self.taken.len() {
            self.taken.clear();
            self.next = 0;
            if self.list.borrow().is_empty() {
                return None;
            }
            std::mem::swap(&mut *self.list.borrow_mut(), &mut self.taken);
        }
        let c = *self.taken.get(self.next)?;
        self.next += 1;
        self.outstanding -= 1;
        Some(c)
    }

    fn in_kernel(&self) -> usize {
        let handed_out = self.list.borrow().len() + self.taken.len() - self.next;
        self.outstanding as usize - handed_out
    }
}

impl Drop for UringClient {
    fn drop(&mut self) {
        self.leave_shares();
        let index = usize::from(self.index());
        while self.in_kernel() > 0 {
            let mut ring = self.ring.borrow_mut();
            ring.enter(1);
            ring.harvest();
        }
        let ring = &mut *self.ring.borrow_mut();
        if let Some(name) = self.file {
            ring.files.release(&ring.ring, name);
        }
        ring.clients[index].1 = None;
    }
}

#[cfg(test)]
mod tests;
