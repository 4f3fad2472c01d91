//! The server: one thread per client, so that a slow one holds up nobody else. Where there are as many
//! clients as can be, one that asks nothing, or does not take its reply, gives way to the next
//! ([`crate::clients`]): whoever connects is served, unless all others have requests that run.

use crate::clients::{Clients, Doing, MAX_CONNECTIONS, ParkedClient, Room};
use crate::code::{Code, Errno, Error};
use crate::frame::Framer;
use crate::methods::{Methods, encode_failure};
use crate::socket::{Listener, SocketError, SocketOptions};
use rustix::event::{EventfdFlags, PollFd, PollFlags, Timespec};
use std::io::{self, ErrorKind, Read, Write};
use std::net::Shutdown;
use std::os::fd::OwnedFd;
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::sync::Arc;
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

/// How long a client may pause within a request before its syntax so far is looked at.
const SYNTAX_PAUSE: Duration = Duration::from_millis(50);

/// How long a client may take for one reply, at any rate, before it is dropped.
const WRITE_TIMEOUT: Duration = Duration::from_secs(30);

/// How long requests that run may take to finish when the server stops.
const STOP_TIMEOUT: Duration = Duration::from_secs(5);

/// How long the thread of a client takes to end whose connection was shut down.
const CUT_OFF_TIMEOUT: Duration = Duration::from_secs(1);

/// How long who connects waits at once for room, before it is seen whether the server ends.
const ROOM_PAUSE: Duration = Duration::from_millis(20);

/// Bytes written at once.
const WRITE_BYTES: usize = 32 * 1024;

/// Bytes read at once.
const READ_BYTES: usize = 16 * 1024;

/// Pause after the system refused a connection (out of descriptors).
const ACCEPT_PAUSE: Duration = Duration::from_millis(100);

/// A listening server.
pub struct Server {
    /// Readable while nobody is to be served any more.
    wake: Arc<OwnedFd>,
    /// Returns the socket that it listened on.
    acceptor: Option<JoinHandle<Listener>>,
    clients: Arc<Clients>,
    methods: Arc<Methods>,
}

/// A server that serves nobody: its socket, whose file stays, and its clients. Nothing that a client
/// asked runs; what came of the next request is kept.
pub struct Parked {
    /// The listening socket.
    pub listener: Listener,
    /// The clients.
    pub clients: Vec<ParkedClient>,
}

impl Server {
    /// Listens at `path` and serves `methods`. When it returns, clients can connect.
    pub fn start(
        path: &Path,
        options: SocketOptions,
        methods: Arc<Methods>,
    ) -> Result<Server, SocketError> {
        let parked = Parked { listener: Listener::bind(path, options)?, clients: Vec::new() };
        Server::resume(parked, methods).map_err(|source| SocketError::Os {
            path: path.display().to_string(),
            operation: "start a thread for",
            source,
        })
    }

    /// Serves `methods` where a server, of this process or another, was parked.
    ///
    /// # Errors
    /// No thread or no descriptor is left.
    pub fn resume(parked: Parked, methods: Arc<Methods>) -> io::Result<Server> {
        let flags = EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK;
        let wake = Arc::new(rustix::event::eventfd(0, flags)?);
        let clients = Arc::default();
        let mut server = Server { wake, acceptor: None, clients, methods };
        server.go_on(parked)?;
        Ok(server)
    }

    fn go_on(&mut self, parked: Parked) -> io::Result<()> {
        let Parked { listener, clients } = parked;
        let service = Service {
            wake: self.wake.clone(),
            clients: self.clients.clone(),
            methods: self.methods.clone(),
        };
        for ParkedClient { stream, received } in clients {
            service.serve_client(stream, received);
        }
        let accept = move || {
            accept_loop(&listener, &service);
            listener
        };
        self.acceptor = Some(thread::Builder::new().name("rpc-accept".into()).spawn(accept)?);
        Ok(())
    }

    /// Serves nobody any more once the requests that run have finished, within `timeout`. Clients
    /// stay connected, and others may connect and wait.
    ///
    /// # Errors
    /// How many requests still run then; the server goes on.
    pub fn park(mut self, timeout: Duration) -> Result<Parked, (Server, String)> {
        let Some(listener) = self.quiet(timeout) else {
            return Err((self, "the RPC server has stopped already".into()));
        };
        let parked = Parked { listener, clients: self.clients.take_parked() };
        let running = self.clients.count();
        if running == 0 {
            return Ok(parked);
        }
        _ = rustix::io::read(&*self.wake, &mut [0; 8]);
        if let Err(e) = self.go_on(parked) {
            tracing::error!("the RPC socket is no longer served: {e}");
        }
        Err((self, format!("{running} RPC requests still run after {} s", timeout.as_secs())))
    }

    /// Stops listening, lets requests that run finish (a few seconds at most) and closes.
    pub fn stop(mut self) {
        self.shut_down();
    }

    /// Has all threads return, for which clients have `timeout`; the socket that was listened on.
    fn quiet(&mut self, timeout: Duration) -> Option<Listener> {
        let acceptor = self.acceptor.take()?;
        let _ = rustix::io::write(&*self.wake, &1u64.to_ne_bytes());
        let listener = acceptor.join().ok()?;
        if !self.clients.wait_for_all(timeout) {
            self.clients.cut_off_who_takes_no_reply();
            self.clients.wait_for_all(CUT_OFF_TIMEOUT);
        }
        Some(listener)
    }

    fn shut_down(&mut self) {
        let listener = self.quiet(STOP_TIMEOUT);
        let left = self.clients.count();
        if listener.is_some() && left > 0 {
            tracing::warn!(clients = left, "RPC clients cut off while stopping");
        }
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        self.shut_down();
    }
}

/// What the threads of a server have in common.
#[derive(Clone)]
struct Service {
    wake: Arc<OwnedFd>,
    clients: Arc<Clients>,
    methods: Arc<Methods>,
}

fn accept_loop(listener: &Listener, service: &Service) {
    loop {
        let mut fds = [
            PollFd::new(listener.socket(), PollFlags::IN),
            PollFd::new(&*service.wake, PollFlags::IN),
        ];
        match rustix::event::poll(&mut fds, None) {
            Ok(_) | Err(rustix::io::Errno::INTR) => {}
            Err(e) => {
                tracing::error!("the RPC socket can no longer be watched: {e}");
                return;
            }
        }
        if !fds[1].revents().is_empty() {
            return;
        }
        match listener.socket().accept() {
            Ok((stream, _)) => match service.wait_for_room() {
                Some(true) => service.serve_client(stream, Vec::new()),
                Some(false) => {
                    let message = format!(
                        "{MAX_CONNECTIONS} RPC clients have requests that run, which is the limit; \
                         try again"
                    );
                    refuse(&stream, message);
                }
                // It is served where the server goes on.
                None => return service.clients.park(ParkedClient { stream, received: Vec::new() }),
            },
            Err(e) if matches!(e.kind(), ErrorKind::WouldBlock | ErrorKind::Interrupted) => {}
            Err(e) => {
                tracing::warn!("an RPC client could not be accepted: {e}");
                thread::sleep(ACCEPT_PAUSE);
            }
        }
    }
}

impl Service {
    /// Waits until one more client may be served; `false`: there is no room, `None`: the server is to
    /// serve nobody any more.
    fn wait_for_room(&self) -> Option<bool> {
        let since = Instant::now();
        loop {
            match self.clients.make_room(ROOM_PAUSE, since.elapsed()) {
                Room::Is => return Some(true),
                Room::None => return Some(false),
                Room::Later => {}
            }
            let mut fds = [PollFd::new(&*self.wake, PollFlags::IN)];
            let at_once = Timespec { tv_sec: 0, tv_nsec: 0 };
            if rustix::event::poll(&mut fds, Some(&at_once)) == Ok(1) {
                return None;
            }
        }
    }

    /// Serves a client, of whose next request there is `received` already, on a thread of its own.
    fn serve_client(&self, stream: UnixStream, received: Vec<u8>) {
        let ready = stream.set_nonblocking(false).and_then(|()| stream.try_clone());
        let own = match ready {
            Ok(own) => own,
            Err(e) => return refuse(&stream, format!("the connection cannot be set up: {e}")),
        };
        let id = self.clients.add(stream);
        let Service { wake, clients, methods } = self.clone();
        let spawned = thread::Builder::new().name("rpc-client".into()).spawn(move || {
            let mut framer = Framer::default();
            framer.push(&received);
            let now = |doing| clients.set(id, doing);
            match serve(&own, &methods, &wake, &mut framer, now) {
                Ok(Served::Parked) => {
                    clients.park(ParkedClient { stream: own, received: framer.into_rest() });
                }
                outcome => {
                    if let Err(e) = outcome {
                        tracing::debug!("an RPC client left: {e}");
                    }
                    let _ = own.shutdown(Shutdown::Both);
                }
            }
            // First: who waits for the last client takes apart what the methods hold.
            drop(methods);
            clients.remove(id);
        });
        if let Err(e) = spawned
            && let Some(stream) = self.clients.remove(id)
        {
            refuse(&stream, format!("no thread for the connection: {e}"));
        }
    }
}

fn refuse(mut stream: &UnixStream, message: String) {
    tracing::warn!("an RPC client was refused: {message}");
    let _ = stream.set_nonblocking(true);
    let _ = stream.write_all(&encode_failure(&Error::os(Errno::Again, message)));
}

/// Why a client is served no more.
enum Served {
    /// It left.
    Left,
    /// Nobody is served any more.
    Parked,
}

/// Answers requests until the client leaves or sends what is no JSON, or `wake` becomes readable. Tells
/// `now` what it does for the client from now on (`false`: it must not, the client was told to go).
fn serve(
    mut stream: &UnixStream,
    methods: &Methods,
    wake: &OwnedFd,
    framer: &mut Framer,
    now: impl Fn(Doing) -> bool,
) -> io::Result<Served> {
    let mut buffer = vec![0; READ_BYTES];
    let mut checked = false;
    loop {
        let pause = (framer.is_incomplete() && !checked).then_some(SYNTAX_PAUSE);
        let pause = pause.map(|pause| Timespec {
            tv_sec: pause.as_secs() as i64,
            tv_nsec: pause.subsec_nanos().into(),
        });
        let mut fds = [PollFd::new(stream, PollFlags::IN), PollFd::new(wake, PollFlags::IN)];
        match rustix::event::poll(&mut fds, pause.as_ref()) {
            Ok(0) => {
                checked = true;
                if let Err(e) = framer.check_syntax() {
                    return hang_up(stream, &e, now);
                }
                continue;
            }
            Ok(_) if !fds[1].revents().is_empty() => return Ok(Served::Parked),
            Ok(_) => {}
            Err(rustix::io::Errno::INTR) => continue,
            Err(e) => return Err(e.into()),
        }
        // Before it is read: from then on nobody else sees that something came.
        if !now(Doing::Request) {
            return Ok(Served::Left);
        }
        match stream.read(&mut buffer) {
            Ok(0) => return Ok(Served::Left),
            Ok(n) => {
                framer.push(&buffer[..n]);
                checked = false;
            }
            Err(e) if e.kind() == ErrorKind::Interrupted => {}
            Err(e) => return Err(e),
        }
        loop {
            match framer.next_value() {
                Ok(Some(message)) => {
                    if let Some(reply) = methods.answer(message) {
                        now(Doing::Reply);
                        write_reply(stream, &reply, &now)?;
                        if !now(Doing::Request) {
                            return Ok(Served::Left);
                        }
                    }
                }
                Ok(None) => break,
                Err(e) => return hang_up(stream, &e, now),
            }
        }
        now(Doing::Nothing);
    }
}

/// Writes all of a reply within [`WRITE_TIMEOUT`], however little of it the client takes at once. Tells
/// `now` of each piece that was taken: who takes a long reply slowly is not one who takes none.
fn write_reply(
    mut stream: &UnixStream,
    reply: &[u8],
    now: impl Fn(Doing) -> bool,
) -> io::Result<()> {
    let end = Instant::now() + WRITE_TIMEOUT;
    let mut rest = reply;
    while !rest.is_empty() {
        let Some(left) = end.checked_duration_since(Instant::now()).filter(|left| !left.is_zero())
        else {
            return Err(ErrorKind::TimedOut.into());
        };
        stream.set_write_timeout(Some(left))?;
        // The kernel's timeout begins anew with each piece of a long write that was taken.
        match stream.write(&rest[..rest.len().min(WRITE_BYTES)]) {
            Ok(0) => return Err(ErrorKind::WriteZero.into()),
            Ok(n) => {
                rest = &rest[n..];
                now(Doing::Reply);
            }
            Err(e) if e.kind() == ErrorKind::Interrupted => {}
            Err(e) => return Err(e),
        }
    }
    Ok(())
}

/// Tells a client what is wrong with what it sent, and reads the rest of that.
fn hang_up(mut stream: &UnixStream, e: &Error, now: impl Fn(Doing) -> bool) -> io::Result<Served> {
    now(Doing::Reply);
    debug_assert!(matches!(e.code, Code::Parse | Code::InvalidRequest));
    write_reply(stream, &encode_failure(e), &now)?;
    // Unread bytes would turn the close into a reset, which loses the reply just written.
    stream.shutdown(Shutdown::Write)?;
    stream.set_read_timeout(Some(SYNTAX_PAUSE))?;
    let mut rest = [0; 4096];
    let mut left = crate::frame::MAX_REQUEST_BYTES;
    while let Ok(n) = stream.read(&mut rest) {
        if n == 0 || n > left {
            break;
        }
        left -= n;
    }
    Ok(Served::Left)
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::cell::{Cell, RefCell};

    #[test]
    fn what_was_asked_as_the_client_gives_way_is_answered() {
        let methods = Methods::default();
        let wake = rustix::event::eventfd(0, EventfdFlags::CLOEXEC).unwrap();
        let clients = Clients::default();
        let (near, mut far) = UnixStream::pair().unwrap();
        let id = clients.add(near.try_clone().unwrap());
        let ask = br#"{"jsonrpc": "2.0", "id": 7, "method": "none"}"#;
        far.write_all(ask).unwrap();
        far.write_all(ask).unwrap();
        assert!(!clients.give_way(id));
        let now = |doing| clients.set(id, doing);
        let served = serve(&near, &methods, &wake, &mut Framer::default(), now).unwrap();
        assert!(matches!(served, Served::Left));
        near.shutdown(Shutdown::Both).unwrap();
        let mut replies = String::new();
        far.read_to_string(&mut replies).unwrap();
        assert_eq!(replies.matches("-32601").count(), 2, "both are told: {replies}");
    }

    #[test]
    fn nobody_gives_way_whose_request_is_read_but_not_begun() {
        let methods = Methods::default();
        let wake = rustix::event::eventfd(0, EventfdFlags::CLOEXEC).unwrap();
        let (near, mut far) = UnixStream::pair().unwrap();
        far.write_all(br#"{"jsonrpc": "2.0", "id": 1, "method": "none"} "#).unwrap();
        far.shutdown(Shutdown::Write).unwrap();
        let told = RefCell::new(Vec::new());
        let now = |doing| {
            let unread = rustix::io::ioctl_fionread(&near).unwrap();
            told.borrow_mut().push((doing, unread > 0));
            true
        };
        serve(&near, &methods, &wake, &mut Framer::default(), now).unwrap();
        let told = told.into_inner();
        assert_eq!(told[0], (Doing::Request, true), "before it is read");
        let reply = told.iter().position(|(doing, _)| *doing == Doing::Reply).unwrap();
        assert!(told[..reply].iter().all(|(doing, _)| *doing == Doing::Request), "{told:?}");
    }

    #[test]
    fn each_piece_of_a_reply_that_is_taken_counts_as_taking_it() {
        let (near, mut far) = UnixStream::pair().unwrap();
        let reply = vec![b'x'; 50 * WRITE_BYTES];
        let taken = Cell::new(0);
        thread::scope(|scope| {
            scope.spawn(|| far.read_exact(&mut vec![0; 50 * WRITE_BYTES]).unwrap());
            let now = |doing| {
                assert_eq!(doing, Doing::Reply);
                taken.set(taken.get() + 1);
                true
            };
            write_reply(&near, &reply, now).unwrap();
        });
        assert!(taken.get() >= 50, "{}", taken.get());
    }
}
