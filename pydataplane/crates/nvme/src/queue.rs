//! A connection at work: a thread's io_uring sends and receives for its conversation.
//!
//! One call sends all that waits, with the caller's own memory, and one receives. When the connection is lost
//! the kernel first lets go of that memory.

use std::os::fd::{AsRawFd, OwnedFd};
use std::sync::Arc;

use guestmem::IoVec;
use io_uring::types::{CancelBuilder, Fd};
use io_uring::{opcode, squeue};
use reactor::{IoContext, UringClient};
use rustix::net::{RecvFlags, Shutdown, recv, shutdown};

use crate::conversation::{Conversation, RUNS};

/// What an entry of the io_uring is.
const SEND: u32 = 0;
const RECEIVE: u32 = 1;
const CANCEL: u32 = 2;
/// Entries at a time: each once, and a cancellation that was repeated.
const ENTRIES: u32 = 4;
/// Bytes of a connection that ends, read at once.
const DRAIN: usize = 16 << 10;

/// A message for sendmsg or recvmsg, which stays in place.
struct Message {
    header: libc::msghdr,
    runs: Box<[IoVec]>,
    /// The kernel has it.
    out: bool,
}

impl Message {
    fn new() -> Box<Message> {
        // SAFETY: all zeros are a message header without anything.
        let header = unsafe { std::mem::zeroed() };
        Box::new(Message { header, runs: IoVec::empty(RUNS), out: false })
    }

    /// The header, for so many runs.
    fn of(&mut self, count: usize) -> *mut libc::msghdr {
        self.header.msg_iov = self.runs.as_mut_ptr().cast();
        self.header.msg_iovlen = count as _;
        &raw mut self.header
    }
}

/// A connection, and what is known of what goes over it.
pub(crate) struct Link {
    pub fd: OwnedFd,
    pub talk: Conversation,
}

/// How the other side has ended a connection.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum End {
    /// Not yet.
    Open,
    /// By a reset, after it was told that nothing more comes. Linux's target does that once it is through with all that
    /// it was sent.
    Reset,
    /// Otherwise. Of what it was sent that says nothing: Linux's target closes the connections of a controller that it
    /// gives up, and carries out what it has all the same.
    Lost,
}

/// Has the kernel let go of a connection when it is dropped: what waits on it ends.
struct ShutdownOnDrop(Option<Arc<OwnedFd>>);

impl Drop for ShutdownOnDrop {
    fn drop(&mut self) {
        if let Some(fd) = &self.0 {
            _ = shutdown(&**fd, Shutdown::Both);
        }
    }
}

pub(crate) struct Queue {
    // In this order: then dropping the client waits until the kernel has let go of all the rest.
    shutdown_on_drop: ShutdownOnDrop,
    uring: UringClient,
    fd: Arc<OwnedFd>,
    pub(crate) talk: Conversation,
    sends: Box<Message>,
    receives: Box<Message>,
    /// A cancellation is to be pushed.
    cancels: bool,
    /// Listens although nothing is in flight.
    listens: bool,
    /// Why the connection is of no more use.
    why: Option<String>,
    end: End,
    /// The other side was told that nothing more comes.
    half_closed: bool,
}

impl Queue {
    /// Takes a connection; one that does not listen notices its end only while something is in flight.
    pub(crate) fn new(link: Link, io: &IoContext, listens: bool) -> std::io::Result<Queue> {
        let fd = Arc::new(link.fd);
        Ok(Queue {
            shutdown_on_drop: ShutdownOnDrop(Some(Arc::clone(&fd))),
            uring: io.uring()?.client_of(io.owner(), ENTRIES),
            fd,
            talk: link.talk,
            sends: Message::new(),
            receives: Message::new(),
            cancels: false,
            listens,
            why: None,
            end: End::Open,
            half_closed: false,
        })
    }

    /// Why the connection is of no more use; `None`: it is in use.
    pub(crate) fn broken(&self) -> Option<&str> {
        self.why.as_deref()
    }

    /// Whether the kernel has none of the memory of commands.
    pub(crate) fn is_idle(&self) -> bool {
        !self.sends.out && !self.receives.out
    }

    /// Hands the kernel what it can have.
    pub(crate) fn pump(&mut self) {
        if self.why.is_some() {
            return;
        }
        let fd = Fd(self.fd.as_raw_fd());
        if !self.sends.out {
            let (count, bytes) = self.talk.to_send(&mut self.sends.runs);
            if count > 0 {
                let message = self.sends.of(count);
                let entry =
                    opcode::SendMsg::new(fd, message).flags(libc::MSG_NOSIGNAL as u32).build();
                self.sends.out = self.push(entry, SEND, bytes as u32);
            }
        }
        if !self.receives.out && (self.listens || self.talk.in_flight() > 0) {
            let count = self.talk.room(&mut self.receives.runs);
            let message = self.receives.of(count);
            let entry = opcode::RecvMsg::new(fd, message).build();
            self.receives.out = self.push(entry, RECEIVE, 0);
        }
    }

    fn push(&mut self, entry: squeue::Entry, token: u32, weight: u32) -> bool {
        // SAFETY: the messages are boxed, and what their runs name stays as it is until the entry is over
        // (`Conversation`); the socket is open until then, too. All of it lives as long as this queue,
        // whose client waits in its drop, which comes first.
        unsafe { self.uring.push(entry, token, weight) }.is_ok()
    }

    /// The connection is of no more use. The other side is told that nothing more comes, which ends what was being
    /// sent at a point of its own.
    pub(crate) fn leave(&mut self, why: impl ToString) {
        if self.why.is_none() {
            self.why = Some(why.to_string());
            self.cancels = !self.is_idle();
            self.cancel();
        }
    }

    fn cancel(&mut self) {
        if self.cancels {
            let all = CancelBuilder::fd(Fd(self.fd.as_raw_fd())).all();
            let entry = opcode::AsyncCancel2::new(all).build();
            self.cancels = !self.push(entry, CANCEL, 0);
        }
    }

    /// Takes what the kernel is through with; whether there was anything.
    pub(crate) fn poll(&mut self) -> bool {
        let mut any = false;
        while let Some((token, result)) = self.uring.next_completion() {
            any = true;
            self.completed(token, result);
        }
        self.cancel();
        any
    }

    fn completed(&mut self, token: u32, result: i32) {
        match (token, usize::try_from(result)) {
            (SEND, Ok(bytes)) => {
                self.sends.out = false;
                if self.why.is_none()
                    && let Err(e) = self.talk.was_sent(bytes)
                {
                    self.leave(e);
                }
            }
            (RECEIVE, Ok(0)) => {
                self.receives.out = false;
                self.end = End::Lost;
                self.leave("the controller has closed it");
            }
            (RECEIVE, Ok(bytes)) => {
                self.receives.out = false;
                if self.why.is_none()
                    && let Err(e) = self.talk.was_received(bytes)
                {
                    self.leave(e);
                }
            }
            (SEND, Err(_)) => {
                self.sends.out = false;
                self.failed(result);
            }
            (RECEIVE, Err(_)) => {
                self.receives.out = false;
                self.failed(result);
            }
            // Of no such kind of cancellation (before Linux 5.19).
            _ if result == -libc::EINVAL => {
                // What is read from then on is no word of the other side's.
                self.end = End::Lost;
                _ = shutdown(&*self.fd, Shutdown::Both);
            }
            _ => {}
        }
    }

    fn failed(&mut self, result: i32) {
        // It is pushed again; or it was cancelled.
        if [-libc::EINTR, -libc::EAGAIN, -libc::ECANCELED].contains(&result) {
            return;
        }
        self.end = End::Lost;
        self.leave(std::io::Error::from_raw_os_error(-result));
    }

    /// Goes on with the end of a connection that is of no more use, and of which the kernel has no memory any more:
    /// tells the other side that nothing more comes, and reads what it still says. How it has ended it.
    pub(crate) fn drain(&mut self) -> End {
        if self.end != End::Open || !self.is_idle() {
            return self.end;
        }
        let mut bytes = [0; DRAIN];
        loop {
            match recv(&*self.fd, &mut bytes[..], RecvFlags::DONTWAIT) {
                Ok((0, _)) => self.end = End::Lost,
                Ok(_) | Err(rustix::io::Errno::INTR) => continue,
                Err(rustix::io::Errno::AGAIN) => {}
                Err(rustix::io::Errno::CONNRESET) if self.half_closed => self.end = End::Reset,
                Err(_) => self.end = End::Lost,
            }
            break;
        }
        if self.end == End::Open && !std::mem::replace(&mut self.half_closed, true) {
            _ = shutdown(&*self.fd, Shutdown::Write);
        }
        self.end
    }

    /// The connection, for another thread; only while nothing is in flight on one that does not listen.
    pub(crate) fn into_link(self) -> Option<Link> {
        if !self.is_idle() {
            return None;
        }
        let Queue { mut shutdown_on_drop, uring, fd, talk, .. } = self;
        shutdown_on_drop.0 = None;
        drop(uring);
        Some(Link { fd: Arc::into_inner(fd)?, talk })
    }
}
