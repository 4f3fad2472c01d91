//! The owners of the requests that a file has with its disk, and what each of them may have there.
//!
//! An owner ([`Owner`]) is a guest, whose channels are many: one for each of its disks in the file and each
//! reactor. What they have in the kernel is counted in one place, so that who has many disks has no more of
//! the disk below. What is beyond the share waits in its channel, in order. Alone, an owner has no limit.
//! The target's own I/O (metadata) has no owner, and is neither counted nor limited.
//!
//! An owner's channels have turns ([`super::room`]): a busy disk of a guest, which asks again in the moment in
//! which there is room, does not keep the guest's other disks from the kernel for as long as it is busy.
//!
//! No lock in the way of an I/O: a look at all owners, once in [`LOOK_US`], is left out when somebody else
//! has them.

mod policy;

use std::sync::Arc;
use std::sync::atomic::Ordering::Relaxed;
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64};

use parking_lot::Mutex;
use reactor::{Owner, Waker};

use self::policy::{NO_LIMIT, Policy, Seen};
use super::room::{Room, RoomShare};

/// Between two looks.
const LOOK_US: u64 = 1000;
/// An owner is active for so long after its last request.
const ACTIVE_US: u64 = 50_000;
/// What an owner has with the disk, all its channels together.
struct Counts {
    owner: Owner,
    /// Requests in the kernel, or pieces of large ones.
    room: Room,
    /// When it last asked for one, in ticks.
    asked: AtomicU64,
    /// A request had to wait since the last look.
    pressed: AtomicBool,
    /// Requests that ended since the last look, and the time that they took in ticks.
    ended: AtomicU64,
    ticks: AtomicU64,
}

/// The owners of a file's requests.
pub(super) struct Owners {
    /// What each may have in the kernel.
    share: AtomicU32,
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
    fn counts_of(&self, owner: Owner) -> Arc<Counts> {
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

    /// Decides anew what each may have, if it is time and nobody else does.
    #[inline]
    fn look(&self, now: u64) {
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

/// What a channel knows of its owner's counts. Dropped after its ring: then the kernel has nothing of it.
pub(super) struct Share {
    shared: Arc<super::Shared>,
    /// `None`: without an owner.
    counts: Option<Arc<Counts>>,
    share: RoomShare,
}

impl Share {
    /// Of a channel of `owner`'s on `shared`, whose thread `waker` wakes.
    pub(super) fn new(shared: Arc<super::Shared>, owner: Option<Owner>, waker: Waker) -> Self {
        let counts = owner.map(|owner| shared.owners.counts_of(owner));
        Share { shared, counts, share: RoomShare::new(waker) }
    }

    /// Whether the kernel may be given one more request at `now`, in ticks, which is then counted until
    /// [`Share::end`].
    #[inline]
    pub(super) fn begin(&mut self, now: u64) -> bool {
        let Some(counts) = &self.counts else { return true };
        let owners = &self.shared.owners;
        counts.asked.store(now, Relaxed);
        owners.look(now);
        let share = owners.share.load(Relaxed);
        let there = self.share.begin(&counts.room, (share != NO_LIMIT).then_some(share));
        if !there {
            counts.pressed.store(true, Relaxed);
        }
        there
    }

    #[cfg(test)]
    pub(super) fn owner(&self) -> Option<Owner> {
        self.counts.as_ref().map(|counts| counts.owner)
    }

    /// One that began is no longer in the kernel. `took`: how long it was there, in ticks, if that says
    /// something about the disk.
    #[inline]
    pub(super) fn end(&mut self, took: Option<u64>) {
        let Some(counts) = &self.counts else { return };
        let owners = &self.shared.owners;
        if let Some(ticks) = took
            && owners.share.load(Relaxed) != NO_LIMIT
        {
            counts.ended.fetch_add(1, Relaxed);
            counts.ticks.fetch_add(ticks, Relaxed);
        }
        self.share.end(&counts.room, || owners.share.load(Relaxed));
    }

    /// The channel has requests that wait. Has its thread woken when it may begin one, if nothing of the
    /// channel is in the kernel whose end does that.
    pub(super) fn wait(&mut self) {
        let Some(counts) = &self.counts else { return };
        self.share.wait(&counts.room, self.shared.owners.share.load(Relaxed));
    }
}

impl Drop for Share {
    fn drop(&mut self) {
        let Some(counts) = self.counts.take() else { return };
        let owners = &self.shared.owners;
        self.share.close(&counts.room, owners.share.load(Relaxed));
        let mut all = owners.all.lock();
        // This one, and that in the list.
        if Arc::strong_count(&counts) == 2 {
            all.list.retain(|other| other.owner != counts.owner);
        }
        // Before others count.
        drop(counts);
    }
}

#[cfg(test)]
mod tests {
    use super::super::open::open;
    use super::policy::FLOOR;
    use super::*;

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
