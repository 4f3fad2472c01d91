//! vhost-user: the conversation with a peer (QEMU). What its messages do is in `messages`; the two are
//! the only importers of the `vhost` crate.
//!
//! Errors: what a message asked and could not be done is answered with a NACK where the peer
//! asked for an answer, is logged, and the session goes on. The session ends when the peer leaves,
//! when the stream cannot be understood any more, and when an error could only be shown by
//! silence to a peer that waits for a reply: it sees the end of the connection instead, at once.

use std::io::{self, IoSliceMut, Write};
use std::mem::MaybeUninit;
use std::net::Shutdown;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::sync::{Arc, Mutex, MutexGuard};
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::net::{RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, recv, recvmsg};
use vhost::vhost_user::{BackendReqHandler, Error};

use crate::device::Device;
use crate::handover::{DroppedLater, Fds, SessionState};
use crate::owner::RefusalLog;

mod end;
mod messages;

pub(crate) use end::End;
use messages::Handler;

/// How long a peer may take over the rest of a message that it began, or over taking a reply.
const MESSAGE_TIMEOUT: Duration = Duration::from_secs(1);
/// How often a message that is not whole yet is looked at. Front ends send it with one call.
const MESSAGE_PAUSE: Duration = Duration::from_millis(1);
/// Bytes of a message before its body: request, flags, size of the body.
const HEADER: usize = 12;
/// Bytes of a body at most; the library refuses more when it sees the header.
const MAX_BODY: usize = 4096;
/// Messages of one session that may be refused.
const MAX_REFUSED: u32 = 256;

/// The library wants a lock of the standard library, which a panic poisons; a panic ends the process.
const POISONED: &str = "no thread panicked with the session";

/// A connected peer and its device.
pub(crate) struct Peer {
    requests: BackendReqHandler<Mutex<Handler>>,
    handler: Arc<Mutex<Handler>>,
    stream: UnixStream,
    /// Said anything yet: one that did not gives way to the next.
    spoke: bool,
    /// Messages refused so far.
    refused: u32,
    /// Since when a message is there that cannot be handled yet.
    unready: Option<Instant>,
}

/// A connection as a session needs it. What can fail is done before the session has a device, whose
/// pollers and channels would stay on the reactors without an owner.
pub(crate) struct Connection {
    stream: UnixStream,
    copy: UnixStream,
}

impl Connection {
    /// Of one that was just accepted.
    pub(crate) fn new(stream: UnixStream) -> io::Result<Self> {
        stream.set_nonblocking(false)?;
        let copy = stream.try_clone()?;
        Ok(Connection { stream, copy })
    }
}

impl Peer {
    /// A session.
    pub(crate) fn new(connection: Connection, device: Device) -> Self {
        let Connection { stream, copy } = connection;
        let handler = Arc::new(Mutex::new(Handler::new(device)));
        let requests = BackendReqHandler::from_stream(copy, Arc::clone(&handler));
        Peer { requests, handler, stream, spoke: false, refused: 0, unready: None }
    }

    /// A session as `state` describes it, of a new device, but for its targets and rings.
    ///
    /// # Errors
    /// In one sentence: what does not go on. Then the peer is connected still for whoever has its
    /// socket.
    pub(crate) fn prepare(
        state: &SessionState,
        stream: UnixStream,
        fds: &mut Fds,
        device: Device,
    ) -> Result<Self, Box<TakeOverFailed>> {
        let handler = Arc::new(Mutex::new(Handler::new(device)));
        let made = (|| {
            let ours = |why| (why, false);
            stream.set_nonblocking(false).map_err(|e| ours(e.to_string()))?;
            let requests = negotiated(state, &stream, &handler).map_err(ours)?;
            let mut lock = handler.lock().expect(POISONED);
            let prepared = lock.device.prepare(state, fds);
            prepared.map_err(|e| (e.to_string(), e.is_the_peers()))?;
            Ok((stream, requests))
        })();
        match made {
            Ok((stream, requests)) => {
                Ok(Peer { requests, handler, stream, spoke: false, refused: 0, unready: None })
            }
            Err((why, is_the_peers)) => {
                let device = handler_device(handler);
                Err(Box::new(TakeOverFailed { why, is_the_peers, device }))
            }
        }
    }

    /// Whether [`Peer::prepare`] with `state` would make the same of this very connection.
    pub(crate) fn is_prepared_for(&self, state: &SessionState, fds: &Fds) -> bool {
        let handler = self.handler();
        handler.protocol == state.protocol_features && handler.device.is_prepared_for(state, fds)
    }

    /// The conversation goes on where `state` says; so does the device by [`Device::take_over`].
    pub(crate) fn go_on(&mut self, state: &SessionState) {
        (self.spoke, self.refused) = (state.spoke, state.refused);
    }

    /// What is known already of the session that another process is about to go on with.
    pub(crate) fn describe(&self, fds: &mut Fds) -> Result<SessionState, String> {
        let handler = self.handler();
        let socket = self.stream.as_fd().try_clone_to_owned().map_err(|e| e.to_string())?;
        let state = handler.device.describe(socket, fds).map_err(|e| e.to_string())?;
        Ok(SessionState { protocol_features: handler.protocol, ..state })
    }

    /// All that is known of the session, which goes on.
    pub(crate) fn describe_all(&self, fds: &mut Fds) -> Result<SessionState, String> {
        let handler = self.handler();
        let socket = self.stream.as_fd().try_clone_to_owned().map_err(|e| e.to_string())?;
        let state = handler.device.describe_all(socket, fds).map_err(|e| e.to_string())?;
        let (spoke, refused) = (self.spoke, self.refused);
        Ok(SessionState { spoke, refused, protocol_features: handler.protocol, ..state })
    }

    /// What another process needs to go on with this session, whose device is held, and the
    /// device, which is of no more use than to be closed.
    pub(crate) fn hand_over(
        self,
        fds: &mut Fds,
    ) -> (Device, Result<(SessionState, DroppedLater), String>) {
        let Peer { requests, handler, stream, spoke, refused, .. } = self;
        let protocol_features = handler.lock().expect(POISONED).protocol;
        drop(requests);
        let mut device = handler_device(handler);
        let state = device.hand_over(stream.into(), fds);
        let state =
            state.map(|(s, kept)| (SessionState { spoke, refused, protocol_features, ..s }, kept));
        (device, state.map_err(|e| e.to_string()))
    }

    /// Readable when there is a message.
    pub(crate) fn fd(&self) -> BorrowedFd<'_> {
        self.stream.as_fd()
    }

    /// Whether the peer has closed the connection; messages that it sent before may be unread.
    pub(crate) fn has_hung_up(&self) -> bool {
        self.is(PollFlags::RDHUP)
    }

    /// Whether the peer has sent at least one message.
    pub(crate) fn spoke(&self) -> bool {
        self.spoke
    }

    /// Ends the connection, whoever else has descriptors of it.
    pub(crate) fn shut(&self) {
        _ = self.stream.shutdown(Shutdown::Both);
    }

    /// Closes the connection and leaves the device.
    pub(crate) fn into_device(self) -> Device {
        let Peer { requests, handler, .. } = self;
        drop(requests);
        handler_device(handler)
    }

    /// The device. Only the controller's thread takes this lock, never while it handles a message.
    pub(crate) fn handler(&self) -> MutexGuard<'_, Handler> {
        self.handler.lock().expect(POISONED)
    }

    /// Whether a message is there as a whole, and room for the reply. The library waits for ever for
    /// both (it takes a timeout of the socket for a reason to try again), and a peer that stops in the
    /// middle would keep this thread from all else, an upgrade for which all guests wait among it.
    fn is_ready(&mut self) -> Result<bool, End> {
        let Some(why) = self.missing()? else {
            self.unready = None;
            return Ok(true);
        };
        let since = *self.unready.get_or_insert_with(Instant::now);
        match since.elapsed() > MESSAGE_TIMEOUT {
            true => Err(End::Broken(why.into())),
            false => Ok(false),
        }
    }

    /// What is missing for a message to be handled; `None`: nothing.
    fn missing(&self) -> Result<Option<&'static str>, End> {
        const HALF: Option<&str> = Some("it stopped in the middle of a message");
        let mut header = [0u8; HEADER];
        let seen = match recv(&self.stream, &mut header, RecvFlags::PEEK | RecvFlags::DONTWAIT) {
            // The end, or a broken socket: the library finds out, too.
            Ok((_, 0)) => return Ok(None),
            Ok((_, seen)) => seen,
            Err(rustix::io::Errno::AGAIN | rustix::io::Errno::INTR) => 0,
            Err(_) => return Ok(None),
        };
        let there =
            rustix::io::ioctl_fionread(&self.stream).map_err(|e| End::Broken(e.to_string()))?;
        let whole = match seen {
            HEADER => {
                let [.., a, b, c, d] = header;
                let body = u32::from_ne_bytes([a, b, c, d]) as usize;
                if body > MAX_BODY { HEADER } else { HEADER + body }
            }
            _ if there >= HEADER as u64 => {
                return Err(End::Broken("it sent descriptors within a header".into()));
            }
            _ => HEADER,
        };
        if there < whole as u64 {
            return Ok(HALF.filter(|_| !self.has_hung_up()));
        }
        // The kernel says so only while most of the buffer is free, and no reply is that long.
        match self.is(PollFlags::OUT) {
            true => Ok(None),
            false => Ok(Some("it does not take the replies to its messages")),
        }
    }

    /// The descriptor of the message that is there, if that is SET_BACKEND_REQ_FD. The library wants one as
    /// well, checks it, and sends no message through it that is of use here: so it is looked at and left.
    fn backend_channel(&self) -> Option<OwnedFd> {
        const SET_BACKEND_REQ_FD: u32 = 21;
        let mut header = [0u8; HEADER];
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
        let mut ancillary = RecvAncillaryBuffer::new(&mut space);
        let peeked = recv(&self.stream, &mut header, RecvFlags::PEEK | RecvFlags::DONTWAIT);
        let is_it = peeked.is_ok_and(|(_, seen)| seen == HEADER)
            && header[..4] == SET_BACKEND_REQ_FD.to_ne_bytes();
        if !is_it {
            return None;
        }
        let flags = RecvFlags::PEEK | RecvFlags::DONTWAIT | RecvFlags::CMSG_CLOEXEC;
        let mut parts = [IoSliceMut::new(&mut header)];
        recvmsg(&self.stream, &mut parts, &mut ancillary, flags).ok()?;
        let mut fds = ancillary.drain().filter_map(|message| match message {
            RecvAncillaryMessage::ScmRights(fds) => Some(fds),
            _ => None,
        });
        fds.next()?.next()
    }

    /// Whether a message is there that is not handled yet, and how soon it is to be looked at again.
    pub(crate) fn looks_again(&self) -> Option<Duration> {
        self.unready.map(|_| MESSAGE_PAUSE)
    }

    /// The time for which nobody looked is not the peer's.
    pub(crate) fn was_held(&mut self) {
        self.unready = None;
    }

    /// Whether the stream is what `flags` say, or broken.
    fn is(&self, flags: PollFlags) -> bool {
        let now = Timespec { tv_sec: 0, tv_nsec: 0 };
        let mut fds = [PollFd::new(&self.stream, flags)];
        poll(&mut fds, Some(&now)).is_ok_and(|ready| ready != 0)
    }

    /// Receives one message of the peer of `controller`, if it is there, does what it says and answers.
    /// What is refused is a line in `log`.
    pub(crate) fn handle_message(
        &mut self,
        controller: &str,
        log: &mut RefusalLog,
    ) -> Result<(), End> {
        if !self.is_ready()? {
            return Ok(());
        }
        let channel = self.backend_channel();
        let result = self.requests.handle_request();
        if result.is_ok() && channel.is_some() {
            self.handler().device.set_config_channel(channel);
        }
        self.handler().device.heard();
        if let Some(why) = self.handler().fatal.take() {
            return Err(why);
        }
        match result {
            Ok(()) => {
                self.spoke = true;
                Ok(())
            }
            Err(Error::Disconnected) => Err(End::Disconnected),
            // Our own refusals: answered with a NACK if the peer wanted an answer.
            Err(Error::ReqHandlerError(why)) => {
                log.refused(controller, &"a message", &why);
                self.refused += 1;
                match self.refused {
                    ..MAX_REFUSED => Ok(()),
                    _ => Err(End::Broken(format!("{MAX_REFUSED} of its messages were refused"))),
                }
            }
            // SET_VRING_ENABLE by a peer that negotiated no protocol features: rings are enabled
            // already, and it expects no reply.
            Err(Error::InactiveFeature(_)) => Ok(()),
            Err(why) => Err(End::Broken(why.to_string())),
        }
    }
}

/// A session that did not go on here.
pub(crate) struct TakeOverFailed {
    /// What did not, in one sentence.
    pub(crate) why: String,
    /// The peer did it.
    pub(crate) is_the_peers: bool,
    /// To be closed.
    pub(crate) device: Device,
}

/// The device of a handler whose connection is gone.
fn handler_device(handler: Arc<Mutex<Handler>>) -> Device {
    let handler = Arc::into_inner(handler).expect("the connection had the only other one");
    handler.into_inner().expect(POISONED).device
}

/// A connection that stands where the peer's stood in another process. The library keeps what was
/// negotiated to itself, so it is told by the messages that negotiate, on a socket pair, before it
/// gets the peer's socket.
fn negotiated(
    state: &SessionState,
    stream: &UnixStream,
    handler: &Arc<Mutex<Handler>>,
) -> Result<BackendReqHandler<Mutex<Handler>>, String> {
    /// GET_FEATURES, SET_FEATURES, SET_PROTOCOL_FEATURES: codes of the front end's messages.
    const MESSAGES: [u32; 3] = [1, 2, 16];
    /// Version 1, no reply wanted.
    const FLAGS: u32 = 1;
    let bodies: [Option<u64>; 3] = [None, Some(state.features), Some(state.protocol_features)];
    let (pair, mut ours) = UnixStream::pair().map_err(|e| e.to_string())?;
    let mut refused = None;
    let requests = reactor::fd::begin_with(pair, stream.as_fd(), |pair| {
        let mut requests = BackendReqHandler::from_stream(pair, Arc::clone(handler));
        for (code, body) in MESSAGES.into_iter().zip(bodies) {
            let size = body.map_or(0, |_| size_of::<u64>() as u32);
            let mut message: Vec<u8> =
                [code, FLAGS, size].iter().flat_map(|word| word.to_ne_bytes()).collect();
            message.extend(body.into_iter().flat_map(u64::to_ne_bytes));
            ours.write_all(&message)?;
            // The reply to the first stays in the pair.
            if let Err(why) = requests.handle_request() {
                refused.get_or_insert(format!("what the peer negotiated is not taken: {why}"));
            }
        }
        Ok(requests)
    });
    match refused {
        Some(why) => Err(why),
        None => requests.map_err(|e| e.to_string()),
    }
}
