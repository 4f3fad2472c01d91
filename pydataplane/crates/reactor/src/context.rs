//! A thread's means of I/O: its io_uring, its epoll and its waker.

use std::cell::OnceCell;
use std::io;
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd, RawFd};
use std::rc::Rc;

use rustix::event::epoll::{self, CreateFlags, EventData, EventFlags};
use rustix::thread::CpuSet;
use rustix::time::Timespec;

use crate::waker::Sleeper;
use crate::{Uring, Waker};

/// Events taken from one epoll call; which they are does not matter, and the rest stay.
const EVENTS_MAX: usize = 32;

struct Inner {
    // Dropped in this order: the ring before the epoll that watches it.
    uring: OnceCell<Uring>,
    /// Where the kernel's threads for it are to run.
    workers: Option<CpuSet>,
    sleeper: Sleeper,
    epoll: OwnedFd,
}

/// What a bdev channel needs of the thread that it lives on: its io_uring and a way to wake it.
/// Every reactor has one; a control thread makes its own for blocking I/O.
#[derive(Clone)]
pub struct IoContext {
    inner: Rc<Inner>,
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
        Ok(Self { inner: Rc::new(Inner { uring: OnceCell::new(), workers: cpus, sleeper, epoll }) })
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
    /// triggered, and nobody reads it.
    ///
    /// # Errors
    /// `fd` is watched already, or cannot be.
    pub fn watch(&self, fd: BorrowedFd<'_>) -> io::Result<()> {
        let flags = EventFlags::IN | EventFlags::ET;
        Ok(epoll::add(&self.inner.epoll, fd, EventData::new_u64(0), flags)?)
    }

    /// Undoes [`IoContext::watch`]; call before the fd is closed.
    pub fn unwatch(&self, fd: BorrowedFd<'_>) {
        let _ = epoll::delete(&self.inner.epoll, fd);
    }

    /// Submits what was queued and hands out completions to their clients, without blocking;
    /// returns how many completed.
    #[inline]
    pub fn flush(&self) -> u32 {
        self.inner.uring.get().map_or(0, Uring::flush)
    }

    /// As `flush`, but sleeps until something completed or the waker was used, at most
    /// `timeout_us` microseconds. For control threads, never for reactors' pollers.
    ///
    /// # Errors
    /// The kernel refuses to wait.
    pub fn wait(&self, timeout_us: u64) -> io::Result<u32> {
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
    /// or not at all if the waker was used since [`Sleeper::take`]. Returns whether it slept.
    pub(crate) fn sleep(&self, timeout: Option<&Timespec>) -> io::Result<bool> {
        let uring = self.inner.uring.get();
        if !self.sleeper().asleep() {
            return Ok(false);
        }
        let quiet = uring.is_none_or(Uring::before_sleep);
        let mut waited = Ok(());
        if quiet {
            let mut events = [MaybeUninit::uninit(); EVENTS_MAX];
            waited = epoll::wait(self.inner.epoll.as_fd(), &mut events, timeout).map(|_| ());
        }
        if let Some(u) = uring {
            u.after_sleep();
        }
        self.sleeper().awake();
        match waited {
            Ok(()) | Err(rustix::io::Errno::INTR) => Ok(quiet),
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
}
