//! The server: one thread per client, so that a slow one holds up nobody else. Where there are as many
//! clients as can be, one that waits for nothing gives way to the next: whoever connects is served,
//! unless all others have requests that run.

use crate::code::{Code, Errno, Error};
use crate::frame::Framer;
use crate::methods::{Methods, encode_failure};
use crate::socket::{Listener, SocketError, SocketOptions};
use parking_lot::{Condvar, Mutex, MutexGuard};
use rustix::event::{EventfdFlags, PollFd, PollFlags, Timespec};
use std::collections::HashMap;
use std::io::{self, ErrorKind, Read, Write};
use std::net::Shutdown;
use std::os::fd::OwnedFd;
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

/// Clients connected at the same time (SPDK's limit too).
pub const MAX_CONNECTIONS: usize = 64;

/// How long a client may pause within a request before its syntax so far is looked at.
const SYNTAX_PAUSE: Duration = Duration::from_millis(50);

/// How long a client may not take its reply before it is dropped.
const WRITE_TIMEOUT: Duration = Duration::from_secs(30);

/// How long requests that run may take to finish when the server stops.
const STOP_TIMEOUT: Duration = Duration::from_secs(5);

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

/// A client that is not served for now.
pub struct ParkedClient {
    /// The connection.
    pub stream: UnixStream,
    /// What came of its next request, if it has begun.
    pub received: Vec<u8>,
}

#[derive(Default)]
struct Clients {
    connected: Mutex<HashMap<u64, Client>>,
    parked: Mutex<Vec<ParkedClient>>,
    changed: Condvar,
    next_id: AtomicU64,
}

/// A connected client.
struct Client {
    stream: UnixStream,
    /// A request of it runs.
    busy: bool,
    /// When its last request ended, or it connected.
    since: Instant,
    /// It was told to go, and its thread ends.
    evicted: bool,
}

impl Clients {
    fn lock(&self) -> MutexGuard<'_, HashMap<u64, Client>> {
        self.connected.lock()
    }

    fn remove(&self, id: u64) {
        self.lock().remove(&id);
        self.changed.notify_all();
    }

    /// A request of a client begins, or has ended and its reply was taken. `false`: it begins too
    /// late, the client was told to go.
    fn set_busy(&self, id: u64, busy: bool) -> bool {
        self.lock().get_mut(&id).is_some_and(|client| {
            client.busy = busy;
            client.since = Instant::now();
            !client.evicted
        })
    }
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
        let door = Door {
            wake: self.wake.clone(),
            clients: self.clients.clone(),
            methods: self.methods.clone(),
        };
        for ParkedClient { stream, received } in clients {
            door.welcome(stream, received);
        }
        let accept = move || {
            accept_loop(&listener, &door);
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
        let parked = Parked { listener, clients: std::mem::take(&mut *self.clients.parked.lock()) };
        let running = self.clients.lock().len();
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
        let deadline = Instant::now() + timeout;
        let mut streams = self.clients.lock();
        while !streams.is_empty() {
            let Some(left) = deadline.checked_duration_since(Instant::now()) else { break };
            self.clients.changed.wait_for(&mut streams, left);
        }
        Some(listener)
    }

    fn shut_down(&mut self) {
        let listener = self.quiet(STOP_TIMEOUT);
        let streams = self.clients.lock();
        if listener.is_some() && !streams.is_empty() {
            tracing::warn!(clients = streams.len(), "RPC clients cut off while stopping");
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
struct Door {
    wake: Arc<OwnedFd>,
    clients: Arc<Clients>,
    methods: Arc<Methods>,
}

fn accept_loop(listener: &Listener, door: &Door) {
    loop {
        let mut fds = [
            PollFd::new(listener.socket(), PollFlags::IN),
            PollFd::new(&*door.wake, PollFlags::IN),
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
            Ok((stream, _)) => door.welcome(stream, Vec::new()),
            Err(e) if matches!(e.kind(), ErrorKind::WouldBlock | ErrorKind::Interrupted) => {}
            Err(e) => {
                tracing::warn!("an RPC client could not be accepted: {e}");
                thread::sleep(ACCEPT_PAUSE);
            }
        }
    }
}

impl Door {
    /// Serves a client, of whose next request there is `received` already, on a thread of its own.
    fn welcome(&self, stream: UnixStream, received: Vec<u8>) {
        let refuse = |mut stream: &UnixStream, message: String| {
            tracing::warn!("an RPC client was refused: {message}");
            let _ = stream.set_nonblocking(true);
            let _ = stream.write_all(&encode_failure(&Error::os(Errno::Again, message)));
        };
        let mut streams = self.clients.lock();
        let full = streams.values().filter(|client| !client.evicted).count() >= MAX_CONNECTIONS;
        if full && !evict_the_idlest(&mut streams) {
            let message = format!(
                "{MAX_CONNECTIONS} RPC clients have requests that run, which is the limit; try again"
            );
            return refuse(&stream, message);
        }
        let ready = stream.set_nonblocking(false).and_then(|()| stream.try_clone());
        let own = match ready {
            Ok(own) => own,
            Err(e) => return refuse(&stream, format!("the connection cannot be set up: {e}")),
        };
        let id = self.clients.next_id.fetch_add(1, Ordering::Relaxed);
        let client = Client { stream, busy: false, since: Instant::now(), evicted: false };
        streams.insert(id, client);
        drop(streams);
        let Door { wake, clients, methods } = self.clone();
        let spawned = thread::Builder::new().name("rpc-client".into()).spawn(move || {
            let mut framer = Framer::default();
            framer.push(&received);
            let set_busy = |busy| clients.set_busy(id, busy);
            match serve(&own, &methods, &wake, &mut framer, set_busy) {
                Ok(Served::Parked) => {
                    let received = framer.into_rest();
                    clients.parked.lock().push(ParkedClient { stream: own, received });
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
        if let Err(e) = spawned {
            let refused = self.clients.lock().remove(&id);
            if let Some(client) = refused {
                refuse(&client.stream, format!("no thread for the connection: {e}"));
            }
        }
    }
}

/// Ends the connection of the client that has had no request for the longest time; `false`: all have
/// one that runs.
fn evict_the_idlest(clients: &mut HashMap<u64, Client>) -> bool {
    let idle = clients.values_mut().filter(|client| !client.busy && !client.evicted);
    let Some(client) = idle.min_by_key(|client| client.since) else { return false };
    tracing::info!(
        idle_s = client.since.elapsed().as_secs(),
        "an RPC client that asks nothing gives way: {MAX_CONNECTIONS} are connected"
    );
    client.evicted = true;
    let _ = client.stream.shutdown(Shutdown::Both);
    true
}

/// Why a client is served no more.
enum Served {
    /// It left.
    Left,
    /// Nobody is served any more.
    Parked,
}

/// Answers requests until the client leaves or sends what is no JSON, or `wake` becomes readable. Tells
/// `set_busy` when a request begins (`false`: it must not) and when its reply was taken.
fn serve(
    mut stream: &UnixStream,
    methods: &Methods,
    wake: &OwnedFd,
    framer: &mut Framer,
    set_busy: impl Fn(bool) -> bool,
) -> io::Result<Served> {
    stream.set_write_timeout(Some(WRITE_TIMEOUT))?;
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
                    return hang_up(stream, &e);
                }
                continue;
            }
            Ok(_) if !fds[1].revents().is_empty() => return Ok(Served::Parked),
            Ok(_) => {}
            Err(rustix::io::Errno::INTR) => continue,
            Err(e) => return Err(e.into()),
        }
        match stream.read(&mut buffer) {
            Ok(0) => return Ok(Served::Left),
            Ok(n) => {
                framer.push(&buffer[..n]);
                checked = false;
            }
            Err(e) if e.kind() == ErrorKind::Interrupted => continue,
            Err(e) => return Err(e),
        }
        loop {
            match framer.next_value() {
                Ok(Some(message)) => {
                    if !set_busy(true) {
                        return Ok(Served::Left);
                    }
                    if let Some(reply) = methods.answer(message) {
                        stream.write_all(&reply)?;
                    }
                    set_busy(false);
                }
                Ok(None) => break,
                Err(e) => return hang_up(stream, &e),
            }
        }
    }
}

fn hang_up(mut stream: &UnixStream, e: &Error) -> io::Result<Served> {
    debug_assert!(matches!(e.code, Code::Parse | Code::InvalidRequest));
    stream.write_all(&encode_failure(e))?;
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
