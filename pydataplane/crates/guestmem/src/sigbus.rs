//! The guard against SIGBUS.
//!
//! A peer owns the file behind its memory and may truncate it; the next access to a lost page
//! raises SIGBUS in *our* process, which serves other guests too. The handler puts zeroed
//! anonymous memory in the place of the whole mapping and flags it as broken; whoever owns the
//! session sees the flag ([`faults`], `GuestMemory::is_broken`) and ends that session alone. A
//! SIGBUS anywhere else keeps its default meaning.
//!
//! The whole mapping, because page by page each lost one would split it, and a peer could use up
//! what the kernel lets a process have of mappings (`vm.max_map_count`) before its session ends.

use parking_lot::Mutex;
use std::sync::Once;
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering, fence};

/// Mappings that can be guarded at a time, over all guests. Miri looks at the whole table each time
/// that a part of it is borrowed.
pub(crate) const MAX_GUARDED: usize = if cfg!(miri) { 256 } else { 16_384 };

struct Slot {
    /// Counts the changes, twice each: odd while one is being made (a sequence lock, whose reader
    /// never waits).
    version: AtomicUsize,
    /// First byte; 0 while the slot is free.
    start: AtomicUsize,
    /// One beyond the last byte.
    end: AtomicUsize,
    /// Bytes of a page of this mapping (4 KiB or a huge page).
    page: AtomicUsize,
    broken: AtomicBool,
}

static SLOTS: [Slot; MAX_GUARDED] = [const {
    Slot {
        version: AtomicUsize::new(0),
        start: AtomicUsize::new(0),
        end: AtomicUsize::new(0),
        page: AtomicUsize::new(0),
        broken: AtomicBool::new(false),
    }
}; MAX_GUARDED];
/// Slots ever used: the handler looks no further.
static HIGH: AtomicUsize = AtomicUsize::new(0);
static FAULTS: AtomicU64 = AtomicU64::new(0);
static ALLOC: Mutex<()> = Mutex::new(());
static INSTALL: Once = Once::new();

/// Mappings of guest memory that were lost under us since the process started. One relaxed load:
/// compare it with the last value seen to learn cheaply that some memory may be broken.
#[inline]
pub fn faults() -> u64 {
    FAULTS.load(Ordering::Relaxed)
}

impl Slot {
    /// Changes what the slot says, under [`ALLOC`].
    fn set(&self, start: usize, end: usize, page: usize) {
        let version = self.version.load(Ordering::Relaxed);
        self.version.store(version + 1, Ordering::Relaxed);
        // Whoever sees one of these stores sees that the slot was being changed: see `find`.
        fence(Ordering::Release);
        self.start.store(start, Ordering::Relaxed);
        self.end.store(end, Ordering::Relaxed);
        self.page.store(page, Ordering::Relaxed);
        self.broken.store(false, Ordering::Relaxed);
        self.version.store(version + 2, Ordering::Release);
    }
}

/// A registered mapping; free it before the memory is unmapped.
#[derive(Debug)]
pub(crate) struct Guard(usize);

impl Guard {
    /// Guards `len` bytes at `start`, whose pages have `page` bytes. `None`: the table is full.
    pub(crate) fn new(start: usize, len: usize, page: usize) -> Option<Guard> {
        // Miri knows no signals.
        if !cfg!(miri) {
            INSTALL.call_once(install);
        }
        let _one = ALLOC.lock();
        let index = SLOTS.iter().position(|s| s.start.load(Ordering::Relaxed) == 0)?;
        SLOTS[index].set(start, start + len, page);
        HIGH.fetch_max(index + 1, Ordering::Release);
        Some(Guard(index))
    }

    /// Whether a page of this mapping was lost.
    pub(crate) fn is_broken(&self) -> bool {
        SLOTS[self.0].broken.load(Ordering::Relaxed)
    }
}

impl Drop for Guard {
    fn drop(&mut self) {
        let _one = ALLOC.lock();
        SLOTS[self.0].set(0, 0, 0);
    }
}

fn install() {
    // SAFETY: `action` is fully initialised, `on_sigbus` has the signature that SA_SIGINFO asks
    // for and calls only async-signal-safe functions.
    unsafe {
        let mut action: libc::sigaction = std::mem::zeroed();
        action.sa_sigaction = on_sigbus as *const () as usize;
        action.sa_flags = libc::SA_SIGINFO | libc::SA_NODEFER | libc::SA_ONSTACK;
        libc::sigemptyset(&mut action.sa_mask);
        libc::sigaction(libc::SIGBUS, &action, std::ptr::null_mut());
    }
}

/// The guarded mapping that `addr` lies in: slot, first byte, bytes, bytes of a page.
///
/// Other threads free and fill slots meanwhile. The mapping of `addr` itself stays, because the
/// thread that faulted uses it; but the start of one mapping must not be taken together with the
/// end of another one in the same slot, or all between them would be replaced.
fn find(addr: usize) -> Option<(&'static Slot, usize, usize, usize)> {
    SLOTS[..HIGH.load(Ordering::Acquire)].iter().find_map(|slot| {
        let version = slot.version.load(Ordering::Acquire);
        let start = slot.start.load(Ordering::Relaxed);
        let end = slot.end.load(Ordering::Relaxed);
        let page = slot.page.load(Ordering::Relaxed);
        fence(Ordering::Acquire);
        let whole = version.is_multiple_of(2) && slot.version.load(Ordering::Relaxed) == version;
        (whole && (start..end).contains(&addr)).then(|| (slot, start, end - start, page))
    })
}

/// Whether `addr` belongs to a guarded mapping, which could be replaced.
fn replace(addr: usize) -> bool {
    let Some((slot, start, len, page)) = find(addr) else { return false };
    // The page alone where the system does not promise that much memory.
    if !put_zeros(start, len) && !put_zeros(addr & !(page - 1), page) {
        return false;
    }
    slot.broken.store(true, Ordering::Relaxed);
    FAULTS.fetch_add(1, Ordering::Relaxed);
    true
}

/// Replaces `len` bytes at `start`, which lie in a guarded mapping.
fn put_zeros(start: usize, len: usize) -> bool {
    // SAFETY: the bytes lie in a mapping that `Mapping` owns and that stays mapped while it is
    // guarded; MAP_FIXED replaces exactly them. What else was in the mapping is the guest's, who
    // broke it.
    let new = unsafe {
        libc::mmap(
            start as *mut libc::c_void,
            len,
            libc::PROT_READ | libc::PROT_WRITE,
            libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_FIXED | libc::MAP_NORESERVE,
            -1,
            0,
        )
    };
    new != libc::MAP_FAILED
}

extern "C" fn on_sigbus(
    signal: libc::c_int,
    info: *mut libc::siginfo_t,
    _context: *mut libc::c_void,
) {
    // SAFETY: the kernel gives a valid siginfo to an SA_SIGINFO handler; errno is this thread's.
    unsafe {
        let errno = libc::__errno_location();
        let saved = *errno;
        if !replace((*info).si_addr() as usize) {
            // Not ours: give the signal its default meaning; the access faults again and ends
            // the process with a core that shows the real place.
            libc::signal(signal, libc::SIG_DFL);
        }
        *errno = saved;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_mapping_is_found_as_it_is_while_others_come_and_go() {
        // Numbers only: nothing is mapped there, and nothing faults.
        const LOW: usize = 0x10_0000_0000;
        const MINE: usize = 0x20_0000_0000;
        const HIGH: usize = 0x30_0000_0000;
        let rounds = if cfg!(miri) { 20 } else { 100_000 };
        let done = AtomicBool::new(false);
        std::thread::scope(|threads| {
            // The others fill the slots before mine.
            let spare: Vec<_> = (0..2).map(|_| Guard::new(1, 1, 1)).collect();
            let mine = Guard::new(MINE, 0x2000, 0x1000).expect("a slot");
            drop(spare);
            threads.spawn(|| {
                for _ in 0..rounds {
                    drop(Guard::new(LOW, 0x1000, 0x1000));
                    drop(Guard::new(HIGH, 0x1000, 0x1000));
                }
                done.store(true, Ordering::Relaxed);
            });
            while !done.load(Ordering::Relaxed) {
                let found = find(MINE + 0x1fff).map(|(_, start, len, page)| (start, len, page));
                assert_eq!(found, Some((MINE, 0x2000, 0x1000)));
            }
            drop(mine);
        });
        assert!(find(MINE).is_none());
    }
}
