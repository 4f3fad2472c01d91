//! vhost-user: messages of a peer (QEMU) become calls of the [`Device`]. The only importer of the
//! `vhost` crate.
//!
//! Errors: what a message asked and could not be done is answered with a NACK where the peer
//! asked for an answer, is logged, and the session goes on. The session ends when the peer leaves,
//! when the stream cannot be understood any more, and when an error could only be shown by
//! silence to a peer that waits for a reply: it sees the end of the connection instead, at once.

use std::fs::File;
use std::io::{self, Write};
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::sync::{Arc, Mutex, MutexGuard};
use std::time::{Duration, Instant};

use guestmem::{MAX_REGIONS, RegionSpec};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::net::{RecvFlags, recv};
use vhost::vhost_user::message::{
    VhostTransferStateDirection, VhostTransferStatePhase, VhostUserConfigFlags, VhostUserInflight,
    VhostUserLog, VhostUserMemoryRegion, VhostUserProtocolFeatures, VhostUserShMemConfig,
    VhostUserSharedMsg, VhostUserSingleMemoryRegion, VhostUserVringAddrFlags, VhostUserVringState,
};
use vhost::vhost_user::{
    BackendReqHandler, Error, GpuBackend, Result, VhostUserBackendReqHandlerMut,
};
// Two items of the crate are named by its trait but not re-exported with the messages.
use vhost::VhostUserMemoryRegionBase;
use virtqueue::InflightRegion;

use crate::defs::{Config, MAX_QUEUES, MAX_REQUEST_QUEUES, OFFERED_FEATURES};
use crate::device::{Addresses, Device, DeviceError};
use crate::handover::{Fds, Kept, SessionState};
use crate::owner::RefusalLog;

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
}

/// Why a session ended.
#[derive(Debug, thiserror::Error)]
pub(crate) enum End {
    /// The peer closed the connection.
    #[error("the peer disconnected")]
    Disconnected,
    /// We leave, and nothing is in flight.
    #[error("the session ended with nothing in flight")]
    Drained,
    /// We leave, and I/O in flight did not end in time.
    #[error("the session ended with I/O in flight, which the guest is not told of")]
    Undrained,
    /// The peer broke the protocol, or cannot be answered.
    #[error("{0}")]
    Broken(String),
    /// What the peer waits for does not end.
    #[error("{0}; the VM loses its disks")]
    Stuck(String),
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
        Peer { requests, handler, stream, spoke: false, refused: 0 }
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
    ) -> std::result::Result<Self, Box<TakeOverFailed>> {
        let handler = Arc::new(Mutex::new(Handler::new(device)));
        let made = (|| {
            stream.set_nonblocking(false).map_err(|e| e.to_string())?;
            let requests = negotiated(state, &stream, &handler)?;
            let mut lock = handler.lock().expect(POISONED);
            lock.device.prepare(state, fds).map_err(|e| e.to_string())?;
            Ok((stream, requests))
        })();
        match made {
            Ok((stream, requests)) => {
                Ok(Peer { requests, handler, stream, spoke: false, refused: 0 })
            }
            Err(why) => Err(Box::new(TakeOverFailed { why, device: handler_device(handler) })),
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
    pub(crate) fn describe(&self, fds: &mut Fds) -> std::result::Result<SessionState, String> {
        let handler = self.handler();
        let socket = self.stream.as_fd().try_clone_to_owned().map_err(|e| e.to_string())?;
        let state = handler.device.describe(socket, fds).map_err(|e| e.to_string())?;
        Ok(SessionState { protocol_features: handler.protocol, ..state })
    }

    /// What another process needs to go on with this session, whose device is held, and the
    /// device, which is of no more use than to be closed.
    pub(crate) fn hand_over(
        self,
        fds: &mut Fds,
    ) -> (Device, std::result::Result<(SessionState, Kept), String>) {
        let Peer { requests, handler, stream, spoke, refused } = self;
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
        self.is(PollFlags::RDHUP, Duration::ZERO)
    }

    /// Whether the peer has sent at least one message.
    pub(crate) fn spoke(&self) -> bool {
        self.spoke
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

    /// Waits until a message is there as a whole, and there is room for the reply. The library
    /// waits for ever for both (it takes a timeout of the socket for a reason to try again), and a
    /// peer that stops in the middle would keep this thread from all else.
    fn wait_until_whole(&self) -> std::result::Result<(), End> {
        let broken = |why: &str| End::Broken(why.into());
        let since = Instant::now();
        loop {
            let mut header = [0u8; HEADER];
            let seen = match recv(&self.stream, &mut header, RecvFlags::PEEK | RecvFlags::DONTWAIT)
            {
                // The end, or a broken socket: the library finds out, too.
                Ok((_, 0)) => return Ok(()),
                Ok((_, seen)) => seen,
                Err(rustix::io::Errno::AGAIN | rustix::io::Errno::INTR) => 0,
                Err(_) => return Ok(()),
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
                    return Err(broken("it sent descriptors within a header"));
                }
                _ => HEADER,
            };
            if there >= whole as u64 {
                break;
            }
            if self.has_hung_up() {
                return Ok(());
            }
            if since.elapsed() > MESSAGE_TIMEOUT {
                return Err(broken("it stopped in the middle of a message"));
            }
            std::thread::sleep(MESSAGE_PAUSE);
        }
        // The kernel says so only while most of the buffer is free, and no reply is that long.
        match self.is(PollFlags::OUT, MESSAGE_TIMEOUT) {
            true => Ok(()),
            false => Err(broken("it does not take the replies to its messages")),
        }
    }

    /// Waits until the stream is what `flags` say, or broken; `false`: not within `timeout`.
    fn is(&self, flags: PollFlags, timeout: Duration) -> bool {
        let timeout = Timespec {
            tv_sec: timeout.as_secs() as i64,
            tv_nsec: i64::from(timeout.subsec_nanos()),
        };
        let mut fds = [PollFd::new(&self.stream, flags)];
        poll(&mut fds, Some(&timeout)).is_ok_and(|ready| ready != 0)
    }

    /// Receives one message of the peer of `controller`, does what it says and answers. What is refused
    /// is a line in `log`.
    pub(crate) fn handle_message(
        &mut self,
        controller: &str,
        log: &mut RefusalLog,
    ) -> std::result::Result<(), End> {
        self.wait_until_whole()?;
        let result = self.requests.handle_request();
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
) -> std::result::Result<BackendReqHandler<Mutex<Handler>>, String> {
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

/// What messages act on.
pub(crate) struct Handler {
    pub(crate) device: Device,
    /// The session must end: an error that could not be answered.
    fatal: Option<End>,
    /// Protocol features that the peer acknowledged.
    protocol: u64,
}

impl Handler {
    fn new(device: Device) -> Self {
        Handler { device, fatal: None, protocol: 0 }
    }

    /// An error of a message whose sender waits for a reply that will not come.
    fn fatal<T>(&mut self, why: impl ToString) -> Result<T> {
        self.fatal = Some(End::Broken(why.to_string()));
        Err(Error::BackendInternalError)
    }

    /// What the device says to a message. The session does not survive a wait that did not end: the
    /// message was half done.
    fn did<T>(&mut self, outcome: std::result::Result<T, DeviceError>) -> Result<T> {
        match outcome {
            Ok(done) => Ok(done),
            Err(why @ DeviceError::Stuck { .. }) => {
                self.fatal = Some(End::Stuck(why.to_string()));
                Err(Error::BackendInternalError)
            }
            Err(why) => Err(refuse(why)),
        }
    }
}

/// A refusal that the session survives.
fn refuse(why: impl std::error::Error + Send + Sync + 'static) -> Error {
    Error::ReqHandlerError(io::Error::other(why))
}

fn unsupported<T>(what: &'static str) -> Result<T> {
    Err(Error::InvalidOperation(what))
}

fn region(of: &VhostUserMemoryRegion) -> RegionSpec {
    RegionSpec {
        guest_addr: of.guest_phys_addr,
        size: of.memory_size,
        user_addr: of.user_addr,
        mmap_offset: of.mmap_offset,
    }
}

/// The descriptor of a ring, which must be an eventfd. Reactors write to it and wait for it, and
/// anything else may make them wait for whoever is behind it: a pipe, a file of a FUSE mount.
fn eventfd(file: Option<File>) -> Result<Option<OwnedFd>> {
    #[derive(Debug, thiserror::Error)]
    #[error("the descriptor of a ring is {0}; only an eventfd can be used")]
    struct NotAnEventfd(String);
    let Some(file) = file else { return Ok(None) };
    let fd = OwnedFd::from(file);
    match std::fs::read_link(format!("/proc/self/fd/{}", fd.as_raw_fd())) {
        Ok(name) if name.as_os_str() == "anon_inode:[eventfd]" => Ok(Some(fd)),
        Ok(name) => Err(refuse(NotAnEventfd(name.display().to_string()))),
        Err(why) => Err(Error::ReqHandlerError(why)),
    }
}

impl VhostUserBackendReqHandlerMut for Handler {
    fn set_owner(&mut self) -> Result<()> {
        Ok(())
    }

    fn reset_owner(&mut self) -> Result<()> {
        let outcome = self.device.reset();
        self.did(outcome)
    }

    fn reset_device(&mut self) -> Result<()> {
        let outcome = self.device.reset();
        self.did(outcome)
    }

    fn get_features(&mut self) -> Result<u64> {
        Ok(OFFERED_FEATURES)
    }

    fn set_features(&mut self, features: u64) -> Result<()> {
        let outcome = self.device.set_features(features);
        self.did(outcome)
    }

    fn set_mem_table(
        &mut self,
        regions: &[VhostUserMemoryRegion],
        files: Vec<File>,
        _postcopy_listening: Option<bool>,
    ) -> Result<Option<Vec<VhostUserMemoryRegionBase>>> {
        let table: Vec<_> =
            regions.iter().map(region).zip(files.into_iter().map(OwnedFd::from)).collect();
        let outcome = self.device.change_memory(|old| old.replaced(table));
        self.did(outcome).map(|()| None)
    }

    fn set_vring_num(&mut self, index: u32, num: u32) -> Result<()> {
        let outcome = self.device.set_size(index, num);
        self.did(outcome)
    }

    fn set_vring_addr(
        &mut self,
        index: u32,
        flags: VhostUserVringAddrFlags,
        descriptor: u64,
        used: u64,
        available: u64,
        log: u64,
    ) -> Result<()> {
        let logged = flags.contains(VhostUserVringAddrFlags::VHOST_VRING_F_LOG);
        let addresses =
            Addresses { desc: descriptor, avail: available, used, log: logged.then_some(log) };
        let outcome = self.device.set_addresses(index, addresses);
        self.did(outcome)
    }

    fn set_vring_base(&mut self, index: u32, base: u32) -> Result<()> {
        let outcome = self.device.set_base(index, base);
        self.did(outcome)
    }

    fn get_vring_base(&mut self, index: u32) -> Result<VhostUserVringState> {
        match self.device.take_base(index) {
            Ok(base) => Ok(VhostUserVringState::new(index, u32::from(base))),
            Err(why @ DeviceError::Stuck { .. }) => self.did(Err(why)),
            Err(why) => self.fatal(why),
        }
    }

    fn set_vring_kick(&mut self, index: u8, fd: Option<File>) -> Result<()> {
        let outcome = self.device.set_kick(u32::from(index), eventfd(fd)?);
        self.did(outcome)
    }

    fn set_vring_call(&mut self, index: u8, fd: Option<File>) -> Result<()> {
        let outcome = self.device.set_call(u32::from(index), eventfd(fd)?);
        self.did(outcome)
    }

    fn set_vring_err(&mut self, index: u8, fd: Option<File>) -> Result<()> {
        let outcome = self.device.set_err(u32::from(index), eventfd(fd)?);
        self.did(outcome)
    }

    fn get_protocol_features(&mut self) -> Result<VhostUserProtocolFeatures> {
        // The library adds REPLY_ACK. CONFIG is for front ends that ask what the device's limits are;
        // QEMU knows them itself, and since 7.1 says once that it ignores CONFIG for SCSI. Nothing
        // before this message tells who asks.
        Ok(VhostUserProtocolFeatures::MQ
            | VhostUserProtocolFeatures::LOG_SHMFD
            | VhostUserProtocolFeatures::CONFIG
            | VhostUserProtocolFeatures::INFLIGHT_SHMFD
            | VhostUserProtocolFeatures::CONFIGURE_MEM_SLOTS)
    }

    fn set_protocol_features(&mut self, features: u64) -> Result<()> {
        // The library looks at them; none changes the device.
        self.protocol = features;
        Ok(())
    }

    fn get_queue_num(&mut self) -> Result<u64> {
        Ok(MAX_QUEUES as u64)
    }

    fn set_vring_enable(&mut self, index: u32, enable: bool) -> Result<()> {
        let outcome = self.device.set_enabled(index, enable);
        self.did(outcome)
    }

    fn get_config(
        &mut self,
        offset: u32,
        size: u32,
        _flags: VhostUserConfigFlags,
    ) -> Result<Vec<u8>> {
        let config = Config::new(MAX_REQUEST_QUEUES as u32);
        // An error becomes an empty reply.
        config.read(offset as usize, size as usize).ok_or(Error::InvalidParam)
    }

    fn set_config(&mut self, offset: u32, buf: &[u8], _flags: VhostUserConfigFlags) -> Result<()> {
        #[derive(Debug, thiserror::Error)]
        #[error("configuration bytes at {0} are fixed: sense_size is 96 and cdb_size is 32")]
        struct Fixed(u32);
        let config = Config::new(MAX_REQUEST_QUEUES as u32);
        match config.accepts(offset as usize, buf) {
            true => Ok(()),
            false => Err(refuse(Fixed(offset))),
        }
    }

    fn get_max_mem_slots(&mut self) -> Result<u64> {
        Ok(MAX_REGIONS as u64)
    }

    fn add_mem_region(
        &mut self,
        spec: &VhostUserSingleMemoryRegion,
        fd: File,
        _postcopy_listening: Option<bool>,
    ) -> Result<Option<VhostUserMemoryRegionBase>> {
        let (spec, fd) = (region(spec), OwnedFd::from(fd));
        let outcome = self.device.change_memory(|old| old.with_region(spec, &fd));
        self.did(outcome).map(|()| None)
    }

    fn remove_mem_region(&mut self, spec: &VhostUserSingleMemoryRegion) -> Result<()> {
        let spec = region(spec);
        let outcome = self.device.change_memory(|old| old.without_region(spec));
        self.did(outcome)
    }

    fn set_log_base(&mut self, log: &VhostUserLog, file: File) -> Result<()> {
        let (offset, size) = (log.mmap_offset, log.mmap_size);
        let log = self.device.table().make_log(file.as_fd(), offset, size);
        match log {
            Ok(log) => {
                let outcome = self.device.set_log(log);
                self.did(outcome)
            }
            // QEMU waits for a reply that a failure does not get.
            Err(why) => self.fatal(why),
        }
    }

    fn get_inflight_fd(&mut self, of: &VhostUserInflight) -> Result<(VhostUserInflight, File)> {
        let (queues, size) = (of.num_queues, of.queue_size);
        match InflightRegion::make(queues, size) {
            Ok(fd) if usize::from(queues) <= MAX_QUEUES => {
                let bytes = InflightRegion::bytes(queues, size);
                Ok((VhostUserInflight::new(bytes, 0, queues, size), File::from(fd)))
            }
            // The peer waits for a reply that a failure does not get.
            Ok(_) => self.fatal(DeviceError::NoQueue(u32::from(queues) - 1)),
            Err(why) => self.fatal(why),
        }
    }

    fn set_inflight_fd(&mut self, of: &VhostUserInflight, file: File) -> Result<()> {
        let (offset, bytes) = (of.mmap_offset, of.mmap_size);
        let (queues, size) = (of.num_queues, of.queue_size);
        if usize::from(queues) > MAX_QUEUES {
            return Err(refuse(DeviceError::NoQueue(u32::from(queues) - 1)));
        }
        let fd = OwnedFd::from(file);
        let table = self.device.table();
        match InflightRegion::map(table, fd, offset, bytes, queues, size) {
            Ok(region) => {
                let outcome = self.device.set_inflight(region);
                self.did(outcome)
            }
            Err(why) => Err(refuse(why)),
        }
    }

    // Never offered, so never sent by a peer that keeps to the protocol.

    fn set_gpu_socket(&mut self, _: GpuBackend) -> Result<()> {
        unsupported("GPU_SET_SOCKET")
    }

    fn get_shared_object(&mut self, _: VhostUserSharedMsg) -> Result<File> {
        unsupported("GET_SHARED_OBJECT")
    }

    fn set_device_state_fd(
        &mut self,
        _: VhostTransferStateDirection,
        _: VhostTransferStatePhase,
        _: File,
    ) -> Result<Option<File>> {
        unsupported("SET_DEVICE_STATE_FD")
    }

    fn check_device_state(&mut self) -> Result<()> {
        unsupported("CHECK_DEVICE_STATE")
    }

    fn get_shmem_config(&mut self) -> Result<VhostUserShMemConfig> {
        unsupported("GET_SHMEM_CONFIG")
    }
}
