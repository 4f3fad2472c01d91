//! The queue of one device.

use bdev::AlignedBuf;
use rustix::io::Errno;
use std::io;
use std::marker::PhantomData;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

use crate::map::Table;
use crate::request::{Limits, Op, Request, Ticket};
use crate::ring::Tags;

/// What [`Queue::poll`] found.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Polled {
    /// The device goes on.
    Served,
    /// The device was stopped and has no tags any more: nothing is asked again.
    Over,
}

/// The queue of a device, which belongs to the thread that made it: the kernel takes commands from
/// no other. It ends by [`Queue::leave`] while tags are the kernel's.
pub struct Queue {
    // Before the device: its commands name that.
    tags: Tags,
    table: Table,
    limits: Limits,
    /// Requests that are not answered.
    open: usize,
    /// Not this thread's any more where it would be sent to another.
    _here: PhantomData<*const ()>,
    _device: OwnedFd,
}

impl Queue {
    /// Of the device whose `/dev/ublkcN` is `device`, made with these limits. Gives all tags to the
    /// kernel, so that [`crate::Control::start`] or [`crate::Control::end_recovery`] returns.
    ///
    /// # Errors
    /// The kernel's: the device is served by somebody else, no memory, no ring.
    pub fn new(device: OwnedFd, limits: Limits) -> io::Result<Queue> {
        let table = Table::new(device.as_fd(), limits.depth)?;
        let mut tags = Tags::new(device.as_fd(), limits.depth)?;
        for tag in 0..limits.depth {
            // Few devices have ever so many requests at a time, and the kernel tries again where it cannot
            // fault a page in (ublk_dispatch_req).
            tags.lend(tag, None, AlignedBuf::untouched(limits.max_io_bytes as usize));
        }
        let mut queue = Queue { tags, table, limits, open: 0, _here: PhantomData, _device: device };
        queue.tags.submit(false)?;
        Ok(queue)
    }

    /// Becomes readable when [`Queue::poll`] has something; edge triggered.
    pub fn fd(&self) -> BorrowedFd<'_> {
        self.tags.fd()
    }

    /// Tells the kernel what was committed and appends to `requests` what it asks for.
    ///
    /// # Errors
    /// The ring is broken.
    pub fn poll(&mut self, requests: &mut Vec<Request>) -> io::Result<Polled> {
        self.turn(requests, false)
    }

    /// As [`Queue::poll`], and sleeps until there is something.
    ///
    /// # Errors
    /// The ring is broken.
    pub fn wait(&mut self, requests: &mut Vec<Request>) -> io::Result<Polled> {
        self.turn(requests, true)
    }

    fn turn(&mut self, requests: &mut Vec<Request>, wait: bool) -> io::Result<Polled> {
        self.tags.submit(wait && self.tags.count() > 0)?;
        while let Some((tag, buf, result)) = self.tags.next() {
            // NODEV: the device was stopped, or this queue was ended. Any other refusal, of a
            // commit for instance, has the same end: the tag does not come back.
            if result != 0 {
                continue;
            }
            let desc = self.table.read(tag);
            match self.limits.check(&desc, buf.as_ptr().addr() as u64) {
                Ok((op, offset, bytes)) => {
                    let done = match op {
                        Op::Read | Op::Write { .. } => bytes as i32,
                        Op::Flush | Op::Discard | Op::WriteZeroes => 0,
                    };
                    let ticket = Ticket { tag, done };
                    self.open += 1;
                    requests.push(Request { ticket, op, offset, bytes, buf });
                }
                Err(_) => self.tags.lend(tag, Some(-Errno::INVAL.raw_os_error()), buf),
            }
        }
        // What was refused just now.
        self.tags.submit(false)?;
        Ok(if self.tags.count() + self.open == 0 { Polled::Over } else { Polled::Served })
    }

    /// Answers a request, with its buffer. A failed one says why; the answer is told to the kernel by
    /// the next [`Queue::poll`].
    ///
    /// # Panics
    /// The buffer is too short to be a tag's.
    pub fn commit(&mut self, ticket: Ticket, buf: AlignedBuf, result: Result<(), Errno>) {
        assert!(buf.len() >= self.limits.max_io_bytes as usize, "the buffer is not of a tag");
        let result = result.map_or_else(|e| -e.raw_os_error(), |()| ticket.done);
        self.open -= 1;
        self.tags.lend(ticket.tag, Some(result), buf);
    }

    /// Ends the queue; its tags stay the kernel's for now, and the requests that are not answered are
    /// lost to this process. The thread ends next, and what is returned is dropped after that.
    pub fn leave(self) -> Left {
        let Queue { tags, _device, .. } = self;
        Left { _tags: tags, _device }
    }
}

/// What a queue had, to be dropped by another thread than its own when that has ended: its device waits
/// for recovery then. Where the ring is closed while the thread still runs, the kernel ends its
/// commands for a thread that is about to end, and with Linux 6.12 that was seen to fault
/// (io_req_caches_free). The buffers that the kernel had are lost to this process.
pub struct Left {
    // Before the device: its commands name that.
    _tags: Tags,
    _device: OwnedFd,
}
