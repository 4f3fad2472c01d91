//! A thread that sleeps inside `io_uring_enter`: one system call submits what was queued, sleeps, and
//! ends with the completions in memory. With an epoll beside the ring it takes three: the kernel moves
//! an eventfd, that ends the epoll, and only the enter after it takes the completion. Seen on a
//! volume of a pod (4 KiB at depth 16, ext4 on virtio-blk, Linux 6.18, two CPUs): a seventh more reads
//! and writes a second; at depth 1 it makes no difference.
//!
//! Descriptors that are to end the sleep are polled by the ring, all the time. Reactors do not sleep
//! so: theirs come and go, and are many.

use std::io;
use std::os::fd::RawFd;
use std::time::Duration;

use io_uring::types::{CancelBuilder, Fd, SubmitArgs, Timespec};
use io_uring::{EnterFlags, opcode};

use super::{Ring, Uring, WATCHES};

/// A descriptor that ends the sleep whenever it becomes readable.
pub(super) struct Watch {
    fd: RawFd,
    /// Whether the kernel polls it.
    pub(super) armed: bool,
}

impl Uring {
    /// Whether [`Uring::sleep`] is possible: since Linux 6.1.
    pub(crate) fn can_sleep(&self) -> bool {
        self.ring.borrow().deferred
    }

    /// Has `fd`, which stays open as long as the ring, end each later [`Uring::sleep`] when it
    /// becomes readable (edge triggered).
    pub(crate) fn watch(&self, fd: RawFd) {
        self.ring.borrow_mut().watches.push(Watch { fd, armed: false });
    }

    /// Descriptors that are watched.
    pub(crate) fn watched(&self) -> usize {
        self.ring.borrow().watches.len()
    }

    /// Submits what was queued and sleeps until an entry completes, a watched descriptor becomes
    /// readable or `timeout` is over, and hands completions to their clients; returns how many.
    ///
    /// # Errors
    /// The kernel refuses to wait.
    pub(crate) fn sleep(&self, timeout: Duration) -> io::Result<u32> {
        let mut ring = self.ring.borrow_mut();
        if ring.shared {
            ring.shared = ring.shares.next_turn();
        }
        let waited = match ring.arm() {
            true => ring.enter_and_sleep(timeout),
            // The queue is full: it sleeps the next time.
            false => {
                ring.enter(0);
                Ok(())
            }
        };
        let done = ring.harvest();
        waited.map(|()| done)
    }
}

impl Ring {
    /// Has the kernel poll what is watched and is not polled; `false`: there is no room for that.
    fn arm(&mut self) -> bool {
        for (at, watch) in self.watches.iter_mut().enumerate().filter(|(_, watch)| !watch.armed) {
            let poll = opcode::PollAdd::new(Fd(watch.fd), libc::POLLIN as u32).multi(true).build();
            let poll = poll.user_data((WATCHES as u64) << 48 | at as u64);
            // SAFETY: the entry names a descriptor, of which the kernel takes a reference, and no
            // memory.
            if unsafe { self.ring.submission().push(&poll) }.is_err() {
                return false;
            }
            self.queued += 1;
            watch.armed = true;
        }
        true
    }

    fn enter_and_sleep(&mut self, timeout: Duration) -> io::Result<()> {
        let mut flags = EnterFlags::GETEVENTS | EnterFlags::EXT_ARG;
        if self.in_flight == 0 && self.ring.params().is_feature_no_iowait() {
            // Polls alone are no I/O that the CPU would be said to wait for.
            flags |= EnterFlags::NO_IOWAIT;
        }
        let timeout = Timespec::from(timeout);
        let args = SubmitArgs::new().timespec(&timeout);
        // SAFETY: `args` is what EXT_ARG announces, `timeout` outlives the call, and `queued` entries
        // stand in the submission queue.
        let taken =
            unsafe { self.ring.submitter().enter(self.queued, 1, flags.bits(), Some(&args)) };
        self.inline = 0;
        match taken {
            Ok(n) => self.queued -= (n as u32).min(self.queued),
            Err(e) => match e.raw_os_error() {
                // What it does not take now stays queued for the next time.
                Some(libc::ETIME | libc::EINTR | libc::EAGAIN | libc::EBUSY) => {}
                _ => return Err(e),
            },
        }
        Ok(())
    }
}

impl Drop for Ring {
    fn drop(&mut self) {
        // Polls hold their files open, and the kernel ends a ring some time after it was closed.
        if self.watches.iter().any(|watch| watch.armed) {
            _ = self.ring.submitter().register_sync_cancel(None, CancelBuilder::any());
            // They end in work that waits for this thread.
            self.enter(0);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::fd::AsRawFd;

    #[test]
    fn a_watched_descriptor_ends_each_sleep_once_and_is_let_go_with_the_ring() {
        let event = rustix::event::eventfd(0, rustix::event::EventfdFlags::NONBLOCK).unwrap();
        let uring = Uring::new(std::os::fd::AsFd::as_fd(&event)).unwrap();
        assert!(uring.can_sleep(), "Linux 6.1");
        let (reads, writes) = rustix::pipe::pipe().unwrap();
        uring.watch(reads.as_raw_fd());
        assert_eq!(uring.watched(), 1);
        // Ten minutes: a lost wake-up would show as a hang.
        let long = Duration::from_secs(600);
        for _ in 0..3 {
            assert_eq!(uring.sleep(Duration::from_millis(1)).unwrap(), 0);
            rustix::io::write(&writes, b"x").unwrap();
            assert_eq!(uring.sleep(long).unwrap(), 0, "it is no client's");
        }
        let mut client = uring.client(1);
        // SAFETY: a no-op names no buffer.
        unsafe { client.push(opcode::Nop::new().build(), 7, 0) }.unwrap();
        while uring.sleep(long).unwrap() == 0 {}
        assert_eq!(client.next_completion(), Some((7, 0)));
        drop((client, uring, reads));
        assert!(rustix::io::write(&writes, b"x").is_err(), "the ring's poll kept it open");
    }
}
