//! A thread's means of I/O: its io_uring, its epoll and its waker.

use std::cell::{OnceCell, RefCell};
use std::io;
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd, RawFd};
use std::rc::Rc;
use std::time::Duration;

use rustix::event::epoll::{self, CreateFlags, EventData, EventFlags};
use rustix::thread::CpuSet;
use rustix::time::Timespec;

use crate::waker::Sleeper;
use crate::{Owner, PollerId, Uring, Waker};

/// Events taken from one epoll call; which they are does not matter, and the rest stay.
const EVENTS_MAX: usize = 32;
/// What is of no poller.
const NOBODY: u64 = 0;

struct Inner {
    // Dropped in this order: the ring before the epoll that watches it.
    uring: OnceCell<Uring>,
    /// Where the kernel's threads for it are to run.
    workers: Option<CpuSet>,
    sleeper: Sleeper,
    /// What [`IoContext::watch_always`] was given.
    watched: RefCell<Vec<RawFd>>,
    epoll: OwnedFd,
}

/// What a bdev channel needs of the thread that it lives on: its io_uring and a way to wake it.
/// Every reactor has one; a control thread makes its own for blocking I/O.
#[derive(Clone)]
pub struct IoContext {
    inner: Rc<Inner>,
    owner: Option<Owner>,
}

impl IoContext {
    /// A context for the calling thread, with an io_uring of its own as soon as one is asked for.
    ///
    /// # Errors
    /// No epoll or eventfd left.
    pub fn new() -> io::Result<Self> {
        Self::with_workers_on(None)
    }

    /// As [`IoContext::new`]; what the kernel carries out in threads of its own runs on `cpus`.
    ///
    /// # Errors
    /// As there.
    pub(crate) fn with_workers_on(cpus: Option<CpuSet>) -> io::Result<Self> {
        let epoll = epoll::create(CreateFlags::CLOEXEC)?;
        let sleeper = Sleeper::new()?;
        let flags = EventFlags::IN | EventFlags::ET;
        epoll::add(&epoll, sleeper.event(), EventData::new_u64(0), flags)?;
        let (uring, watched) = (OnceCell::new(), RefCell::default());
        let inner = Rc::new(Inner { uring, workers: cpus, sleeper, watched, epoll });
        Ok(Self { inner, owner: None })
    }

    /// The same thread's context, for channels whose I/O is that of `owner`.
    #[must_use]
    pub fn owned_by(&self, owner: Owner) -> Self {
        Self { inner: Rc::clone(&self.inner), owner: Some(owner) }
    }

    /// Whose I/O channels that are opened with this do; `None`: that of no guest, but of the target
    /// itself (metadata).
    pub fn owner(&self) -> Option<Owner> {
        self.owner
    }

    /// The thread's io_uring, made at the first call.
    ///
    /// # Errors
    /// The kernel refuses (`kernel.io_uring_disabled`, seccomp, no memory).
    pub fn uring(&self) -> io::Result<&Uring> {
        if let Some(u) = self.inner.uring.get() {
            return Ok(u);
        }
        let uring = Uring::new(self.sleeper().event())?;
        if let Some(cpus) = &self.inner.workers {
            uring.place_workers(cpus);
        }
        self.adopt(uring)
    }

    fn adopt(&self, uring: Uring) -> io::Result<&Uring> {
        if let Some(fd) = uring.fd_to_watch() {
            epoll::add(&self.inner.epoll, borrow(fd)?, EventData::new_u64(0), EventFlags::IN)?;
        }
        Ok(self.inner.uring.get_or_init(|| uring))
    }

    /// Wakes the thread from any other thread.
    pub fn waker(&self) -> Waker {
        self.inner.sleeper.waker()
    }

    /// Wakes this thread when `fd` (an eventfd, a socket) becomes readable while it sleeps; edge
    /// triggered, and nobody reads it. It is woken for `of` then ([`IoContext::sleep`]).
    ///
    /// # Errors
    /// `fd` is watched already, or cannot be.
    pub(crate) fn watch(&self, fd: BorrowedFd<'_>, of: Option<PollerId>) -> io::Result<()> {
        let flags = EventFlags::IN | EventFlags::ET;
        let data = EventData::new_u64(of.map_or(NOBODY, |id| id.0));
        Ok(epoll::add(&self.inner.epoll, fd, data, flags)?)
    }

    /// Ends [`IoContext::wait`] when `fd` becomes readable; edge triggered. It stays open as long as
    /// this context.
    ///
    /// # Errors
    /// `fd` is watched already, or cannot be.
    pub fn watch_always(&self, fd: BorrowedFd<'_>) -> io::Result<()> {
        self.watch(fd, None)?;
        self.inner.watched.borrow_mut().push(fd.as_raw_fd());
        Ok(())
    }

    /// Undoes [`IoContext::watch`]; call before the fd is closed.
    pub(crate) fn unwatch(&self, fd: BorrowedFd<'_>) {
        let _ = epoll::delete(&self.inner.epoll, fd);
    }

    /// Submits what was queued and hands out completions to their clients, without blocking;
    /// returns how many completed.
    #[inline]
    pub fn flush(&self) -> u32 {
        self.inner.uring.get().map_or(0, Uring::flush)
    }

    /// Hands out completions that are in memory already, without a system call; returns how many.
    pub fn harvest(&self) -> u32 {
        self.inner.uring.get().map_or(0, Uring::harvest)
    }

    /// As [`IoContext::flush`], but sleeps until something completed, the waker was used or a watched
    /// descriptor moved, at most `timeout_us` microseconds. For control threads, never for reactors'
    /// pollers.
    ///
    /// # Errors
    /// The kernel refuses to wait.
    pub fn wait(&self, timeout_us: u64) -> io::Result<u32> {
        match self.inner.uring.get().filter(|uring| uring.can_sleep()) {
            Some(uring) => self.wait_in(uring, Duration::from_micros(timeout_us)),
            None => self.wait_beside(timeout_us),
        }
    }

    /// Waits inside the ring's enter.
    fn wait_in(&self, uring: &Uring, timeout: Duration) -> io::Result<u32> {
        let done = uring.harvest();
        if done > 0 || self.sleeper().take() || !self.sleeper().asleep() {
            return Ok(done + uring.flush());
        }
        if uring.watched() == 0 {
            uring.watch(self.sleeper().event().as_raw_fd());
        }
        for fd in self.inner.watched.borrow_mut().drain(..) {
            uring.watch(fd);
        }
        let slept = uring.sleep(timeout);
        self.sleeper().awake();
        self.sleeper().take();
        slept
    }

    /// Waits in the epoll.
    fn wait_beside(&self, timeout_us: u64) -> io::Result<u32> {
        let done = self.flush();
        if done > 0 || self.sleeper().take() {
            return Ok(done);
        }
        let timeout = Timespec {
            tv_sec: (timeout_us / 1_000_000) as i64,
            tv_nsec: (timeout_us % 1_000_000 * 1000) as i64,
        };
        self.sleep(Some(&timeout))?;
        self.sleeper().take();
        Ok(self.flush())
    }

    /// Sleeps until the waker was used, a watched descriptor moved or the io_uring has something,
    /// or not at all if the waker was used since [`Sleeper::take`]. Returns whose descriptor woke it, the first of
    /// those that did.
    pub(crate) fn sleep(&self, timeout: Option<&Timespec>) -> io::Result<Option<PollerId>> {
        let uring = self.inner.uring.get();
        if !self.sleeper().asleep() {
            return Ok(None);
        }
        let quiet = uring.is_none_or(Uring::before_sleep);
        let mut waited = Ok(None);
        if quiet {
            let mut events = [MaybeUninit::uninit(); EVENTS_MAX];
            let woken = epoll::wait(self.inner.epoll.as_fd(), &mut events, timeout);
            waited = woken.map(|(moved, _)| {
                let of = moved.iter().map(|event| event.data.u64());
                of.into_iter().find(|of| *of != NOBODY).map(PollerId)
            });
        }
        if let Some(u) = uring {
            u.after_sleep();
        }
        self.sleeper().awake();
        match waited {
            Ok(woken_for) => Ok(woken_for),
            Err(rustix::io::Errno::INTR) => Ok(None),
            Err(e) => Err(e.into()),
        }
    }

    pub(crate) fn sleeper(&self) -> &Sleeper {
        &self.inner.sleeper
    }
}

/// Borrows `fd` for as long as its owner keeps it open.
pub(crate) fn borrow<'a>(fd: RawFd) -> io::Result<BorrowedFd<'a>> {
    if fd < 0 {
        return Err(io::Error::from_raw_os_error(libc::EBADF));
    }
    // SAFETY: not -1; a descriptor that is closed meanwhile only makes the epoll call fail.
    Ok(unsafe { BorrowedFd::borrow_raw(fd) })
}

#[cfg(test)]
mod tests {
    use super::*;
    use io_uring::opcode;

    #[test]
    fn wait_ends_with_a_completion_whatever_flags_the_kernel_takes() {
        for skip in 0..crate::uring::FLAVOURS {
            let io = IoContext::new().unwrap();
            io.adopt(Uring::with_flavour(io.sleeper().event(), skip).unwrap()).unwrap();
            let mut c = io.uring().unwrap().client(1);
            // 5 ms in the kernel: the completion comes while the thread sleeps.
            let ts = io_uring::types::Timespec::new().nsec(5_000_000);
            let entry = opcode::Timeout::new(&ts).build();
            // SAFETY: `ts` lives until the completion is collected below.
            unsafe { c.push(entry, 3, 0) }.unwrap();
            let mut seen = None;
            while seen.is_none() {
                // Ten minutes: a lost wake-up would show as a hang.
                io.wait(600_000_000).unwrap();
                seen = c.next_completion();
            }
            assert_eq!(seen, Some((3, -libc::ETIME)));
        }
    }

    #[test]
    fn wait_ends_with_the_waker_before_or_during_it() {
        let io = IoContext::new().unwrap();
        let waker = io.waker();
        waker.wake();
        assert_eq!(io.wait(60_000_000).unwrap(), 0);
        let t = std::thread::spawn(move || {
            std::thread::sleep(std::time::Duration::from_millis(5));
            waker.wake();
        });
        assert_eq!(io.wait(60_000_000).unwrap(), 0);
        t.join().unwrap();
        assert_eq!(io.wait(1000).unwrap(), 0, "and with its timeout");
    }

    #[test]
    fn wait_ends_with_the_waker_and_with_what_is_watched_also_inside_the_ring() {
        for (skip, inside) in [(0, true), (1, false)] {
            let io = IoContext::new().unwrap();
            io.adopt(Uring::with_flavour(io.sleeper().event(), skip).unwrap()).unwrap();
            assert_eq!(io.uring().unwrap().can_sleep(), inside);
            let (reads, writes) = rustix::pipe::pipe().unwrap();
            io.watch_always(reads.as_fd()).unwrap();
            // Ten minutes: a lost wake-up would show as a hang.
            let long = 600_000_000;
            let (waker, asleep) = (io.waker(), std::sync::mpsc::channel());
            let t = std::thread::spawn(move || {
                for wakes in asleep.1 {
                    std::thread::sleep(std::time::Duration::from_millis(2));
                    match wakes {
                        true => waker.wake(),
                        false => drop(rustix::io::write(&writes, b"x").unwrap()),
                    }
                }
            });
            for wakes in [true, false, true, true, false] {
                asleep.0.send(wakes).unwrap();
                assert_eq!(io.wait(long).unwrap(), 0);
                // One more event may stand for a wake-up that came before the sleep.
                while io.wait(20_000).unwrap() > 0 {}
            }
            drop(asleep.0);
            t.join().unwrap();
        }
    }
}
