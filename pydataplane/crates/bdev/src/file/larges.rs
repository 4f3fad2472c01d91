//! Pieces of large transfers that a file has with its disk, divided among the owners of those.
//!
//! Beyond what a disk's queue in the kernel takes, each submission pins its pages, fails, and is made again by
//! a worker. So all pieces of a file are [`PIECES_MAX`] at most, and each owner ([`Owner`], a guest; the target
//! itself is one more) with large transfers has the same share of them, but one at least: who has many disks
//! in the file, or threads that serve them, has no more than who has one. Of its owner's share a channel has
//! its own share, and where that is less than one they have turns ([`super::room`]).

use std::sync::Arc;
use std::sync::atomic::AtomicU32;
use std::sync::atomic::Ordering::Relaxed;

use parking_lot::Mutex;
use reactor::{Owner, Waker};

use super::room::{Room, RoomShare};

/// Pieces of one file that the kernel has at a time.
pub(super) const PIECES_MAX: u32 = 64;

/// The owners of a file's large transfers.
pub(super) struct Larges {
    /// Owners that have some under way.
    active: AtomicU32,
    /// One for each owner with channels, which have it, too.
    list: Mutex<Vec<Arc<Counts>>>,
}

/// What an owner has, all its channels together.
struct Counts {
    owner: Option<Owner>,
    /// Its channels; changed with the list locked.
    open: AtomicU32,
    /// Channels with large transfers under way.
    channels: AtomicU32,
    /// Pieces.
    room: Room,
}

impl Larges {
    pub(super) fn new() -> Larges {
        Larges { active: AtomicU32::new(0), list: Mutex::new(Vec::new()) }
    }

    /// The counts of `owner`, for one more of its channels.
    fn counts_of(&self, owner: Option<Owner>) -> Arc<Counts> {
        let mut list = self.list.lock();
        if let Some(counts) = list.iter().find(|counts| counts.owner == owner) {
            counts.open.fetch_add(1, Relaxed);
            return Arc::clone(counts);
        }
        let (open, channels) = (AtomicU32::new(1), AtomicU32::new(0));
        let counts = Arc::new(Counts { owner, open, channels, room: Room::new() });
        list.push(Arc::clone(&counts));
        counts
    }

    /// What each owner may have in the kernel.
    #[inline]
    fn of_owner(&self) -> u32 {
        // While two threads count, it may be off for a moment.
        (PIECES_MAX / self.active.load(Relaxed).max(1)).max(1)
    }

    /// Owners that have some under way, and owners that have channels.
    #[cfg(test)]
    pub(super) fn owners(&self) -> (u32, usize) {
        (self.active.load(Relaxed), self.list.lock().len())
    }
}

/// What a channel has of them. Dropped after its ring: then the kernel has nothing of it.
pub(super) struct Pieces {
    shared: Arc<super::Shared>,
    counts: Arc<Counts>,
    share: RoomShare,
    /// There is room for one that has not begun, as the thread had handed over enough in that turn.
    reserved: bool,
    /// Counted among the owner's channels.
    counted: bool,
}

impl Pieces {
    /// Of a channel of `owner`'s on `shared`, whose thread `waker` wakes.
    pub(super) fn new(shared: Arc<super::Shared>, owner: Option<Owner>, waker: Waker) -> Self {
        let counts = shared.larges.counts_of(owner);
        let share = RoomShare::new(waker);
        Pieces { shared, counts, share, reserved: false, counted: false }
    }

    /// Those in the kernel.
    #[inline]
    pub(super) fn flying(&self) -> u32 {
        self.share.held() - u32::from(self.reserved)
    }

    /// Counts the channel, or no longer; `any`: it has large transfers under way.
    #[inline]
    pub(super) fn count(&mut self, any: bool) {
        if self.counted == any {
            return;
        }
        self.counted = any;
        let active = &self.shared.larges.active;
        if any {
            if self.counts.channels.fetch_add(1, Relaxed) == 0 {
                active.fetch_add(1, Relaxed);
            }
        } else if self.counts.channels.fetch_sub(1, Relaxed) == 1 {
            active.fetch_sub(1, Relaxed);
        }
    }

    /// Whether there is room for one more, which is kept until [`Pieces::pushed`]. If not, the thread is
    /// woken when there is.
    pub(super) fn reserve(&mut self) -> bool {
        let limit = self.shared.larges.of_owner();
        let own = (limit / self.counts.channels.load(Relaxed).max(1)).max(1);
        // Others may have come since it reserved one.
        if self.flying() >= own {
            self.release();
            // It looks again when one of its own ends.
            return false;
        }
        if self.reserved {
            return true;
        }
        self.reserved = self.share.begin(&self.counts.room, Some(limit));
        if !self.reserved {
            self.share.wait(&self.counts.room, limit);
        }
        self.reserved
    }

    /// What was reserved is in the kernel.
    #[inline]
    pub(super) fn pushed(&mut self) {
        self.reserved = false;
    }

    /// One is no longer in the kernel.
    #[inline]
    pub(super) fn ended(&mut self) {
        let larges = &self.shared.larges;
        self.share.end(&self.counts.room, || larges.of_owner());
    }

    /// What is reserved is not needed.
    pub(super) fn release(&mut self) {
        if std::mem::take(&mut self.reserved) {
            self.ended();
        }
    }

    /// As if so many more were in the kernel, or fewer.
    #[cfg(test)]
    pub(super) fn pretend(&mut self, more: i32) {
        (0..more).for_each(|_| assert!(self.share.begin(&self.counts.room, None)));
        (more..0).for_each(|_| self.ended());
    }
}

impl Drop for Pieces {
    fn drop(&mut self) {
        self.count(false);
        let larges = &self.shared.larges;
        self.share.close(&self.counts.room, larges.of_owner());
        let mut list = larges.list.lock();
        if self.counts.open.fetch_sub(1, Relaxed) == 1 {
            list.retain(|other| other.owner != self.counts.owner);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::super::open::open;
    use super::*;

    #[test]
    fn an_owner_of_many_threads_has_its_share_and_no_thread_is_left_waiting() {
        let file = tempfile::NamedTempFile::new_in("/var/tmp").unwrap();
        file.as_file().set_len(1 << 20).unwrap();
        let shared = Arc::new(open(file.path(), None, 0, false, None).unwrap());
        // So many others that there is one for each.
        shared.larges.active.fetch_add(PIECES_MAX, Relaxed);
        let (owner, flying) = (Some(Owner::new()), AtomicU32::new(0));
        std::thread::scope(|scope| {
            for _ in 0..3 {
                scope.spawn(|| {
                    let io = reactor::IoContext::new().unwrap();
                    let mut pieces = Pieces::new(shared.clone(), owner, io.waker());
                    for nth in 0..2000 {
                        pieces.count(true);
                        while !pieces.reserve() {
                            // Ten minutes: a lost wake-up would show as a hang.
                            io.wait(600_000_000).unwrap();
                        }
                        if nth % 7 == 0 {
                            pieces.release();
                            continue;
                        }
                        pieces.pushed();
                        // Two threads may both find the last room.
                        assert!(flying.fetch_add(1, Relaxed) < 3);
                        flying.fetch_sub(1, Relaxed);
                        pieces.ended();
                        pieces.count(nth % 5 == 0);
                    }
                });
            }
        });
        assert_eq!(shared.larges.owners(), (PIECES_MAX, 0));
    }
}
