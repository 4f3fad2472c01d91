//! The owners of the requests that a file has with its disk, and what each of them may have there.
//!
//! An owner ([`Owner`]) is a guest, whose channels are many: one for each of its disks in the file and each
//! reactor. What they have in the kernel is counted in one place, so that who has many disks has no more of
//! the disk below. What is beyond the share waits in its channel, in order. Alone, an owner has no limit.
//! The target's own I/O (metadata) has no owner, and is neither counted nor limited.
//!
//! What a channel has of its owner's share, and how the owner's channels have turns, is in [`super::room`].
//!
//! No lock in the way of an I/O: a look at all owners, once in [`LOOK_US`], is left out when somebody else
//! has them.

mod policy;

use std::sync::Arc;
use std::sync::atomic::Ordering::Relaxed;
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64};

use parking_lot::Mutex;
use reactor::Owner;

pub(super) use self::policy::NO_LIMIT;
use self::policy::{Policy, Seen};
use super::room::Room;

/// Between two looks.
const LOOK_US: u64 = 1000;
/// An owner is active for so long after its last request.
const ACTIVE_US: u64 = 50_000;
/// What an owner has with the disk, all its channels together.
pub(super) struct Counts {
    pub(super) owner: Owner,
    /// Requests in the kernel, or pieces of large ones.
    pub(super) room: Room,
    /// When it last asked for one, in ticks.
    pub(super) asked: AtomicU64,
    /// A request had to wait since the last look.
    pub(super) pressed: AtomicBool,
    /// Requests that ended since the last look, and the time that they took in ticks.
    pub(super) ended: AtomicU64,
    pub(super) ticks: AtomicU64,
}

/// The owners of a file's requests.
pub(super) struct Owners {
    /// What each may have in the kernel.
    pub(super) share: AtomicU32,
    /// When to look again, in ticks.
    next_look: AtomicU64,
    look_ticks: u64,
    active_ticks: u64,
    all: Mutex<All>,
}

struct All {
    /// One for each owner with channels, which have it, too.
    list: Vec<Arc<Counts>>,
    policy: Policy,
}

impl Owners {
    pub(super) fn new() -> Self {
        Owners {
            share: AtomicU32::new(NO_LIMIT),
            next_look: AtomicU64::new(0),
            look_ticks: reactor::ticks::from_us(LOOK_US),
            active_ticks: reactor::ticks::from_us(ACTIVE_US),
            all: Mutex::new(All { list: Vec::new(), policy: Policy::new() }),
        }
    }

    /// The counts of `owner`, for one more of its channels.
    pub(super) fn counts_of(&self, owner: Owner) -> Arc<Counts> {
        let mut all = self.all.lock();
        if let Some(counts) = all.list.iter().find(|counts| counts.owner == owner) {
            return Arc::clone(counts);
        }
        let counts = Arc::new(Counts {
            owner,
            room: Room::new(),
            asked: AtomicU64::new(0),
            pressed: AtomicBool::new(false),
            ended: AtomicU64::new(0),
            ticks: AtomicU64::new(0),
        });
        all.list.push(Arc::clone(&counts));
        counts
    }

    /// One channel less has `counts`, its own of them.
    pub(super) fn leave(&self, counts: Arc<Counts>) {
        let mut all = self.all.lock();
        // This one, and that in the list.
        if Arc::strong_count(&counts) == 2 {
            all.list.retain(|other| other.owner != counts.owner);
        }
        // Before others count.
        drop(counts);
    }

    /// Decides anew what each may have, if it is time and nobody else does.
    #[inline]
    pub(super) fn look(&self, now: u64) {
        if now >= self.next_look.load(Relaxed) {
            self.look_now(now);
        }
    }

    #[cold]
    fn look_now(&self, now: u64) {
        let Some(mut all) = self.all.try_lock() else { return };
        self.next_look.store(now.saturating_add(self.look_ticks), Relaxed);
        let mut seen = Seen::default();
        for counts in &all.list {
            let idle = now.saturating_sub(counts.asked.load(Relaxed)) > self.active_ticks;
            seen.owners += usize::from(!idle || counts.room.taken() > 0);
            seen.pressed += usize::from(counts.pressed.swap(false, Relaxed));
            seen.ended += counts.ended.swap(0, Relaxed);
            seen.ticks += counts.ticks.swap(0, Relaxed);
        }
        let share = all.policy.look(now, &seen);
        self.share.store(share, Relaxed);
    }

    /// Requests that an owner has in the kernel; `None`: it has no channel.
    #[cfg(test)]
    pub(super) fn flying_of(&self, owner: Owner) -> Option<u32> {
        let all = self.all.lock();
        let counts = all.list.iter().find(|counts| counts.owner == owner)?;
        Some(counts.room.taken())
    }

    /// Has each owner have `share` from now on.
    #[cfg(test)]
    pub(super) fn fix(&self, share: u32) {
        self.share.store(share, Relaxed);
        self.next_look.store(u64::MAX, Relaxed);
    }
}

#[cfg(test)]
mod tests {
    use super::super::open::open;
    use super::super::room::Share;
    use super::policy::FLOOR;
    use super::*;
    use reactor::Waker;

    fn waker() -> Waker {
        reactor::IoContext::new().unwrap().waker()
    }

    fn shares<const N: usize>() -> ([Share; N], tempfile::NamedTempFile) {
        let file = tempfile::NamedTempFile::new_in("/var/tmp").unwrap();
        file.as_file().set_len(1 << 20).unwrap();
        let shared = Arc::new(open(file.path(), None, 0, false, None).unwrap());
        let share = |_| Share::new(shared.clone(), Some(Owner::new()), waker());
        (std::array::from_fn(share), file)
    }

    /// How many more an owner may have at `now`; they have all ended afterwards.
    fn room(share: &mut Share, now: u64) -> u32 {
        let count = (0..1000).take_while(|_| share.begin(now)).count() as u32;
        (0..count).for_each(|_| share.end(None));
        count
    }

    #[test]
    fn the_limit_comes_and_goes_with_the_second_owner() {
        let ([mut a, mut b], _file) = shares();
        let ms = reactor::ticks::from_us(1000);
        let mut now = 1000 * ms;
        assert_eq!(room(&mut a, now), 1000);
        assert!(b.begin(now));
        now += 2 * ms;
        assert_eq!(room(&mut a, now), FLOOR);
        // However long its request takes.
        now += 1000 * ms;
        assert_eq!(room(&mut a, now), FLOOR);
        b.end(None);
        now += 2 * ms;
        assert_eq!(room(&mut a, now), 1000, "it has asked for nothing for long");
        assert!(b.begin(now));
        b.end(None);
        now += 2 * ms;
        assert_eq!(room(&mut a, now), FLOOR, "it may ask again at once");
    }

    #[test]
    fn threads_with_room_for_one_of_them_all_go_on() {
        let file = tempfile::NamedTempFile::new_in("/var/tmp").unwrap();
        file.as_file().set_len(1 << 20).unwrap();
        let shared = Arc::new(open(file.path(), None, 0, false, None).unwrap());
        let owner = Owner::new();
        shared.owners.fix(1);
        std::thread::scope(|scope| {
            for _ in 0..3 {
                scope.spawn(|| {
                    let io = reactor::IoContext::new().unwrap();
                    let mut share = Share::new(shared.clone(), Some(owner), io.waker());
                    for now in 0..2000 {
                        while !share.begin(now) {
                            share.wait();
                            // Ten minutes: a lost wake-up would show as a hang.
                            io.wait(600_000_000).unwrap();
                        }
                        share.end(None);
                    }
                });
            }
        });
        assert_eq!(shared.owners.flying_of(owner), None);
    }

    #[test]
    fn what_the_target_does_itself_has_no_limit_and_limits_nobody() {
        let ([mut a], _file) = shares();
        let mut own = Share::new(a.shared.clone(), None, waker());
        let ms = reactor::ticks::from_us(1000);
        for now in (0..100).map(|nth| nth * ms) {
            assert!((0..1000).all(|_| own.begin(now)));
            assert_eq!(room(&mut a, now), 1000);
        }
    }
}
