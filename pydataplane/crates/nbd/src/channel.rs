//! A queue pair on a connection of its own: its thread's io_uring sends and receives.
//!
//! One call sends all requests that wait, with the caller's own memory, and one receives. When the
//! connection is lost the kernel first lets go of that memory, then the keeper has the socket, to see the
//! server's end of it, and brings another connection.

use std::os::fd::{AsRawFd, OwnedFd};
use std::sync::Arc;

use bdev::{Channel, ChannelStats, Completion, FlushCause, Geometry, Io, IoError, Op, Submit};
use guestmem::IoVec;
use io_uring::types::{CancelBuilder, Fd};
use io_uring::{opcode, squeue};
use reactor::{IoContext, UringClient, ticks};
use rustix::net::{Shutdown, shutdown};

use crate::channelstate::ChannelState;
use crate::connect::say_goodbye;
use crate::conversation::{Conversation, Note, RUNS};
use crate::life::Life;
use crate::shared::Shared;

/// What an entry of the io_uring is.
const SEND: u32 = 0;
const RECEIVE: u32 = 1;
const CANCEL: u32 = 2;
/// Entries at a time: each once, and a cancellation that was repeated.
const ENTRIES: u32 = 4;

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

enum Link {
    /// In use.
    Up(OwnedFd),
    /// Of no more use; the kernel still has some of our memory.
    Ending(OwnedFd),
    /// The keeper has been asked for one.
    Down,
}

pub(crate) struct NbdChannel {
    // First: dropping it waits until the kernel has let go of all the rest.
    uring: UringClient,
    link: Link,
    talk: Conversation,
    sends: Box<Message>,
    receives: Box<Message>,
    /// A cancellation is to be pushed, as there was no room for it.
    cancels: bool,
    /// Nobody answered for too long: I/O fails until there is a connection.
    given_up: bool,
    /// Listens although nothing is in flight.
    listens: bool,
    state: Arc<ChannelState>,
    stats: Option<ChannelStats>,
    shared: Arc<Shared>,
    geometry: Geometry,
    answers: u64,
    _life: Option<Arc<Life>>,
}

impl NbdChannel {
    /// Without `stats` nothing is counted. Without `life` it is the only one of the device, and notices the
    /// end of its connection also while nothing is in flight.
    pub(crate) fn open(
        shared: &Arc<Shared>,
        io: &IoContext,
        stats: Option<ChannelStats>,
        life: Option<Arc<Life>>,
    ) -> std::io::Result<Self> {
        let uring = io.uring()?.client_of(io.owner(), ENTRIES);
        let state = shared.register(io.waker());
        shared.ask_for_connection(&state, None);
        Ok(NbdChannel {
            uring,
            link: Link::Down,
            talk: Conversation::new(shared.rules()),
            sends: Message::new(),
            receives: Message::new(),
            cancels: false,
            given_up: false,
            listens: life.is_none(),
            state,
            stats,
            geometry: shared.geometry(),
            shared: shared.clone(),
            answers: 0,
            _life: life,
        })
    }

    fn count_error(&mut self, error: IoError) {
        if let Some(stats) = &mut self.stats {
            stats.error(error);
        }
    }

    /// Hands the kernel what it can have.
    fn pump(&mut self) {
        let Link::Up(fd) = &self.link else { return };
        let fd = Fd(fd.as_raw_fd());
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
        // (`Conversation`); the socket is open until then, too. All of it lives as long as this channel,
        // whose client waits in its drop, which comes first.
        unsafe { self.uring.push(entry, token, weight) }.is_ok()
    }

    /// The connection is of no more use.
    fn leave(&mut self, why: &dyn std::fmt::Display) {
        match std::mem::replace(&mut self.link, Link::Down) {
            Link::Up(fd) => {
                tracing::warn!(
                    bdev = self.shared.name(),
                    "a connection to its server is lost: {why}"
                );
                self.link = Link::Ending(fd);
                self.cancels = true;
                self.end();
            }
            other => self.link = other,
        }
    }

    /// Goes on with the end of a connection.
    fn end(&mut self) {
        let Link::Ending(fd) = &self.link else { return };
        if self.sends.out || self.receives.out {
            if self.cancels {
                let all = CancelBuilder::fd(Fd(fd.as_raw_fd())).all();
                let entry = opcode::AsyncCancel2::new(all).build();
                self.cancels = !self.push(entry, CANCEL, 0);
            }
            return;
        }
        if let Link::Ending(fd) = std::mem::replace(&mut self.link, Link::Down) {
            self.cancels = false;
            self.shared.ask_for_connection(&self.state, Some(fd));
        }
        match self.given_up {
            true => self.talk.fail_all(),
            false => self.talk.begin_anew(),
        }
    }

    fn completed(&mut self, token: u32, result: i32) {
        match token {
            SEND => {
                self.sends.out = false;
                match usize::try_from(result) {
                    Ok(bytes) if matches!(self.link, Link::Up(_)) => {
                        if let Err(e) = self.talk.was_sent(bytes) {
                            self.leave(&e);
                        }
                    }
                    Ok(_) => {}
                    Err(_) => self.failed(result),
                }
            }
            RECEIVE => {
                self.receives.out = false;
                match usize::try_from(result) {
                    Ok(0) => self.leave(&"the server has closed it"),
                    Ok(bytes) if matches!(self.link, Link::Up(_)) => {
                        if let Err(e) = self.talk.was_received(bytes) {
                            self.leave(&e);
                        }
                    }
                    Ok(_) => {}
                    Err(_) => self.failed(result),
                }
            }
            // Of no such kind of cancellation (before Linux 5.19).
            _ => {
                if let Link::Ending(fd) = &self.link
                    && result == -libc::EINVAL
                {
                    _ = shutdown(fd, Shutdown::Both);
                }
            }
        }
    }

    fn failed(&mut self, result: i32) {
        // It is pushed again.
        if ![-libc::EINTR, -libc::EAGAIN].contains(&result) {
            self.leave(&std::io::Error::from_raw_os_error(-result));
        }
    }

    /// The keeper has seen no answer for too long.
    #[cold]
    fn expired(&mut self) {
        self.state.expired.store(false, std::sync::atomic::Ordering::Relaxed);
        if !self.state.is_late(self.shared.give_up_ticks()) {
            return;
        }
        self.given_up = true;
        let seconds = self.shared.give_up().as_secs();
        match self.link {
            Link::Up(_) => self.leave(&format_args!("it has not answered for {seconds} s")),
            Link::Ending(_) => {}
            Link::Down => {
                let name = self.shared.name();
                tracing::error!(bdev = name, "I/O fails: there was no server for {seconds} s");
                self.talk.fail_all();
            }
        }
    }

    /// Sees to the connection; before anything else of a poll.
    fn look(&mut self) {
        if self.state.expired.load(std::sync::atomic::Ordering::Relaxed) {
            self.expired();
        }
        match self.link {
            Link::Up(_) => {}
            Link::Ending(_) => self.end(),
            Link::Down => {
                if let Some(fd) = self.state.arrived.pop() {
                    self.link = Link::Up(fd);
                    self.given_up = false;
                }
            }
        }
    }

    /// How an I/O ended, as the device's latch has it.
    fn result_of(&self, io: &Io, note: Note, result: Result<(), IoError>) -> Result<(), IoError> {
        // A failed flush was told to one; what others wait for may be lost as well.
        if result.is_ok() && io.is_durable() && self.shared.latch.failures() != note.failures {
            return Err(IoError::Flush);
        }
        result
    }
}

impl Channel for NbdChannel {
    fn submit(&mut self, io: &Io) -> Submit {
        let geometry = Geometry { num_blocks: self.shared.num_blocks(), ..self.geometry };
        if let Err(e) = io.check(&geometry, &self.shared.features) {
            self.count_error(e);
            return Submit::Done(Err(e));
        }
        if io.op == Op::Flush && !self.shared.flushes() || io.op != Op::Flush && io.blocks == 0 {
            return Submit::Done(Ok(()));
        }
        if io.is_durable() && self.shared.latch.is_set() {
            self.count_error(IoError::Flush);
            return Submit::Done(Err(IoError::Flush));
        }
        if self.given_up {
            self.look();
        }
        if self.given_up {
            let e = io.op.failed();
            self.count_error(e);
            return Submit::Done(Err(e));
        }
        let begun = ticks::now();
        let is_first = self.talk.in_flight() == 0;
        let failures = if io.is_durable() { self.shared.latch.failures() } else { 0 };
        if !self.talk.submit(io, Note { begun, failures }) {
            return Submit::Full;
        }
        if is_first {
            self.state.waits_since(begun);
        }
        if !self.sends.out {
            self.pump();
        }
        Submit::Pending
    }

    fn poll(&mut self, done: &mut Vec<Completion>) -> u32 {
        self.look();
        while let Some((token, result)) = self.uring.next_completion() {
            self.completed(token, result);
        }
        if matches!(self.link, Link::Ending(_)) {
            self.end();
        }
        if let Some(error) = self.talk.take_flush_error() {
            self.shared.latch.set(FlushCause::Flush, i32::try_from(error).ok());
        }
        let (before, mut now) = (done.len(), None);
        while done.len() < done.capacity()
            && let Some(ended) = self.talk.next_ended()
        {
            let now = *now.get_or_insert_with(ticks::now);
            let took = now.saturating_sub(ended.note.begun);
            let result = self.result_of(&ended.io, ended.note, ended.result);
            if let Some(stats) = &mut self.stats {
                let bytes = ended.io.bytes(self.geometry.block_size);
                stats.record(ended.io.op, bytes, took, result);
            }
            done.push(Completion { tag: ended.io.tag, result, ticks: took, ended: now });
        }
        if self.talk.in_flight() == 0 {
            self.state.waits_since(0);
        } else if self.talk.answers() != self.answers {
            self.answers = self.talk.answers();
            self.state.waits_since(now.unwrap_or_else(ticks::now));
        }
        self.pump();
        (done.len() - before) as u32
    }
}

impl Drop for NbdChannel {
    fn drop(&mut self) {
        if let Link::Up(fd) | Link::Ending(fd) = &self.link {
            if self.talk.in_flight() == 0 {
                say_goodbye(fd);
            }
            // Ends what the kernel waits for, so that the io_uring lets go of it.
            _ = shutdown(fd, Shutdown::Both);
        }
    }
}
