//! Eventfds that a stranger shares.
//!
//! A reactor writes to an eventfd of a guest's process (its call). O_NONBLOCK belongs to the open
//! file, which that process shares: it can clear the flag after it gave the descriptor away, fill
//! the counter, and the next write blocks the reactor for ever, and every other guest on it. The
//! kernel has no write to an eventfd that never blocks, whatever the flags. So each call says in a
//! slot of its thread that it is under way, which costs two stores, and a watching thread that
//! finds the same call under way twice interrupts it with a signal (SIGURG, whose handler does
//! nothing and restarts nothing). That thread looks every few milliseconds while calls are made, so
//! that a call that blocks costs other guests no more, and sleeps while none are: the first call
//! after that wakes it.

use std::io;
use std::os::fd::BorrowedFd;
use std::sync::atomic::{AtomicBool, AtomicI32, AtomicU64, AtomicUsize, Ordering};
use std::sync::{Once, OnceLock};
use std::thread::Thread;
use std::time::Duration;

use rustix::io::Errno;

/// Threads that can be watched at a time; calls of further ones are not.
const MAX_THREADS: usize = 1024;
/// How often the watching thread looks while calls are made: a call that blocks does so for one to
/// two times this.
const WATCH: Duration = Duration::from_millis(2);
/// A peer that fills its call descriptor holds the thread that much longer.
const _: () = assert!(WATCH.as_millis() <= 5);
/// Looks at which no call was made, one after the other, before it sleeps for longer.
const IDLE_LOOKS: u32 = 25;
/// How long it sleeps at most then: a call that is made just before may not wake it.
const IDLE_TIMEOUT: Duration = Duration::from_millis(100);

/// The descriptor blocked although it must not: whoever shares it means harm. Use it no more.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("an eventfd blocks its user: its other owner cleared O_NONBLOCK and filled or emptied it")]
pub struct Blocked;

struct Slot {
    /// Thread id; 0 while the slot is free.
    thread: AtomicI32,
    /// Odd while a call is under way, and another one for each.
    calls: AtomicU64,
}

static SLOTS: [Slot; MAX_THREADS] =
    [const { Slot { thread: AtomicI32::new(0), calls: AtomicU64::new(0) } }; MAX_THREADS];
/// Slots ever taken: the watching thread looks no further.
static HIGH: AtomicUsize = AtomicUsize::new(0);
static START: Once = Once::new();
static WATCHER: OnceLock<Thread> = OnceLock::new();
/// The watching thread looks every [`WATCH`].
static AWAKE: AtomicBool = AtomicBool::new(false);

/// This thread's slot, as long as the thread lives.
struct Own(Option<&'static Slot>);

thread_local! {
    static OWN: Own = Own::take();
}

impl Own {
    fn take() -> Own {
        START.call_once(start);
        // SAFETY: no arguments, and it cannot fail.
        let id = unsafe { libc::gettid() };
        let claim = |s: &&Slot| {
            s.thread.compare_exchange(0, id, Ordering::Relaxed, Ordering::Relaxed).is_ok()
        };
        let at = SLOTS.iter().position(|s| claim(&s));
        if let Some(at) = at {
            HIGH.fetch_max(at + 1, Ordering::Release);
        }
        Own(at.map(|at| &SLOTS[at]))
    }
}

impl Drop for Own {
    fn drop(&mut self) {
        if let Some(slot) = self.0 {
            slot.thread.store(0, Ordering::Relaxed);
        }
    }
}

/// Adds 1 to the eventfd `fd`, which should be non-blocking. One whose counter is full was added
/// to before, which is as good.
///
/// # Errors
/// [`Blocked`]: it blocked, for a few milliseconds.
#[inline]
pub fn signal(fd: BorrowedFd<'_>) -> Result<(), Blocked> {
    match watched(|| rustix::io::write(fd, &1u64.to_ne_bytes())) {
        Err(Errno::INTR) => Err(Blocked),
        _ => Ok(()),
    }
}

/// Sets the counter of the eventfd `fd`, which should be non-blocking, to 0.
///
/// # Errors
/// It cannot be read, or blocked (EINTR). Not where the counter is 0 already.
pub fn clear(fd: BorrowedFd<'_>) -> io::Result<()> {
    match watched(|| rustix::io::read(fd, &mut [0u8; 8])) {
        Ok(0) => Err(io::ErrorKind::UnexpectedEof.into()),
        Ok(_) | Err(Errno::AGAIN) => Ok(()),
        Err(why) => Err(why.into()),
    }
}

#[inline]
fn watched<T>(call: impl Fn() -> Result<T, Errno>) -> Result<T, Errno> {
    let slot = OWN.try_with(|own| own.0).ok().flatten();
    let Some(slot) = slot else { return call() };
    let calls = slot.calls.load(Ordering::Relaxed);
    slot.calls.store(calls.wrapping_add(1), Ordering::Relaxed);
    if !AWAKE.load(Ordering::Relaxed) {
        wake();
    }
    let result = call();
    slot.calls.store(calls.wrapping_add(2), Ordering::Relaxed);
    result
}

/// Wakes the watching thread where no call was made for a while.
#[cold]
fn wake() {
    if !AWAKE.swap(true, Ordering::Relaxed)
        && let Some(watcher) = WATCHER.get()
    {
        watcher.unpark();
    }
}

fn start() {
    extern "C" fn nothing(_: libc::c_int) {}
    // SAFETY: `action` is fully initialised; the handler does nothing. Without SA_RESTART, so that
    // a call that blocks returns.
    unsafe {
        let mut action: libc::sigaction = std::mem::zeroed();
        action.sa_sigaction = nothing as *const () as usize;
        action.sa_flags = libc::SA_ONSTACK;
        libc::sigemptyset(&mut action.sa_mask);
        libc::sigaction(libc::SIGURG, &action, std::ptr::null_mut());
    }
    let spawned = std::thread::Builder::new().name("eventfd watch".into()).spawn(watch);
    match spawned {
        Ok(watcher) => _ = WATCHER.set(watcher.thread().clone()),
        Err(why) => {
            tracing::error!(
                "no thread watches over eventfds, so a guest can block a reactor: {why}"
            );
        }
    }
}

fn watch() {
    let process = std::process::id() as libc::pid_t;
    let mut seen = [0u64; MAX_THREADS];
    let mut idle = 0;
    loop {
        if idle < IDLE_LOOKS {
            std::thread::sleep(WATCH);
        } else {
            AWAKE.store(false, Ordering::Relaxed);
            std::thread::park_timeout(IDLE_TIMEOUT);
            AWAKE.store(true, Ordering::Relaxed);
        }
        idle += 1;
        for (slot, seen) in SLOTS[..HIGH.load(Ordering::Acquire)].iter().zip(&mut seen) {
            let thread = slot.thread.load(Ordering::Relaxed);
            let calls = slot.calls.load(Ordering::Relaxed);
            if thread != 0 && calls % 2 == 1 && calls == *seen {
                // SAFETY: numbers only; a thread that has ended is an error, and one that is not
                // in a call has its handler run and goes on.
                unsafe { libc::syscall(libc::SYS_tgkill, process, thread, libc::SIGURG) };
            }
            if calls % 2 == 1 || calls != *seen {
                idle = 0;
            }
            *seen = calls;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use rustix::event::{EventfdFlags, eventfd};
    use std::os::fd::AsFd;

    #[test]
    fn a_signal_counts_and_a_full_counter_is_as_good() {
        let fd = eventfd(0, EventfdFlags::NONBLOCK).unwrap();
        assert_eq!(signal(fd.as_fd()), Ok(()));
        clear(fd.as_fd()).unwrap();
        clear(fd.as_fd()).unwrap();
        rustix::io::write(&fd, &(u64::MAX - 1).to_ne_bytes()).unwrap();
        assert_eq!(signal(fd.as_fd()), Ok(()));
    }

    #[test]
    fn an_eventfd_that_blocks_is_left() {
        let full = eventfd(0, EventfdFlags::empty()).unwrap();
        rustix::io::write(&full, &(u64::MAX - 1).to_ne_bytes()).unwrap();
        assert_eq!(signal(full.as_fd()), Err(Blocked));
        let empty = eventfd(0, EventfdFlags::empty()).unwrap();
        assert_eq!(clear(empty.as_fd()).unwrap_err().kind(), io::ErrorKind::Interrupted);
    }

    #[test]
    fn a_call_wakes_the_watching_thread_that_sleeps() {
        let full = eventfd(0, EventfdFlags::empty()).unwrap();
        rustix::io::write(&full, &(u64::MAX - 1).to_ne_bytes()).unwrap();
        for _ in 0..3 {
            // Other tests make calls meanwhile, and end.
            while AWAKE.load(Ordering::Relaxed) {
                std::thread::sleep(WATCH);
            }
            assert_eq!(signal(full.as_fd()), Err(Blocked));
            assert!(WATCHER.get().is_some());
        }
    }

    #[test]
    fn threads_that_end_give_their_slots_back() {
        for _ in 0..2 * MAX_THREADS {
            let fd = eventfd(0, EventfdFlags::NONBLOCK).unwrap();
            std::thread::spawn(move || signal(fd.as_fd())).join().unwrap().unwrap();
        }
        let own = std::thread::spawn(|| OWN.with(|own| own.0.is_some()));
        assert!(own.join().unwrap());
    }
}
