//! The server: one thread per client, so that a slow one holds up nobody else.

use crate::code::{Code, Errno, Error};
use crate::frame::Framer;
use crate::methods::{Methods, encode_failure};
use crate::socket::{Listener, SocketError, SocketOptions};
use parking_lot::{Condvar, Mutex, MutexGuard};
use rustix::event::{EventfdFlags, PollFd, PollFlags};
use std::collections::HashMap;
use std::io::{self, ErrorKind, Read, Write};
use std::net::Shutdown;
use std::os::fd::OwnedFd;
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::sync::Arc;
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
    wake: Arc<OwnedFd>,
    acceptor: Option<JoinHandle<()>>,
    clients: Arc<Clients>,
}

#[derive(Default)]
struct Clients {
    streams: Mutex<HashMap<u64, UnixStream>>,
    changed: Condvar,
}

impl Clients {
    fn lock(&self) -> MutexGuard<'_, HashMap<u64, UnixStream>> {
        self.streams.lock()
    }

    fn remove(&self, id: u64) {
        self.lock().remove(&id);
        self.changed.notify_all();
    }
}

impl Server {
    /// Listens at `path` and serves `methods`. When it returns, clients can connect.
    pub fn start(
        path: &Path,
        options: SocketOptions,
        methods: Arc<Methods>,
    ) -> Result<Server, SocketError> {
        let failed = |operation| {
            move |e: io::Error| SocketError::Os {
                path: path.display().to_string(),
                operation,
                source: e,
            }
        };
        let wake = rustix::event::eventfd(0, EventfdFlags::CLOEXEC)
            .map_err(|e| failed("create an event for")(e.into()))?;
        let wake = Arc::new(wake);
        let listener = Listener::bind(path, options)?;
        let clients = Arc::new(Clients::default());
        let acceptor = {
            let (wake, clients) = (wake.clone(), clients.clone());
            thread::Builder::new()
                .name("rpc-accept".into())
                .spawn(move || accept_loop(&listener, &wake, &clients, &methods))
                .map_err(failed("start a thread for"))?
        };
        Ok(Server { wake, acceptor: Some(acceptor), clients })
    }

    /// Stops listening, lets requests that run finish (a few seconds at most) and closes.
    pub fn stop(mut self) {
        self.shut_down();
    }

    fn shut_down(&mut self) {
        let Some(acceptor) = self.acceptor.take() else {
            return;
        };
        let _ = rustix::io::write(&*self.wake, &1u64.to_ne_bytes());
        let _ = acceptor.join();
        let deadline = Instant::now() + STOP_TIMEOUT;
        let mut streams = self.clients.lock();
        for stream in streams.values() {
            let _ = stream.shutdown(Shutdown::Read);
        }
        while !streams.is_empty() {
            let Some(left) = deadline.checked_duration_since(Instant::now()) else {
                tracing::warn!(clients = streams.len(), "RPC clients cut off while stopping");
                break;
            };
            self.clients.changed.wait_for(&mut streams, left);
        }
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        self.shut_down();
    }
}

fn accept_loop(
    listener: &Listener,
    wake: &OwnedFd,
    clients: &Arc<Clients>,
    methods: &Arc<Methods>,
) {
    for id in 0u64.. {
        let mut fds =
            [PollFd::new(listener.socket(), PollFlags::IN), PollFd::new(wake, PollFlags::IN)];
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
            Ok((stream, _)) => welcome(id, stream, clients, methods),
            Err(e) if matches!(e.kind(), ErrorKind::WouldBlock | ErrorKind::Interrupted) => {}
            Err(e) => {
                tracing::warn!("an RPC client could not be accepted: {e}");
                thread::sleep(ACCEPT_PAUSE);
            }
        }
    }
}

fn welcome(id: u64, stream: UnixStream, clients: &Arc<Clients>, methods: &Arc<Methods>) {
    let refuse = |mut stream: &UnixStream, message: String| {
        tracing::warn!("an RPC client was refused: {message}");
        let _ = stream.set_nonblocking(true);
        let _ = stream.write_all(&encode_failure(&Error::os(Errno::Again, message)));
    };
    let mut streams = clients.lock();
    if streams.len() >= MAX_CONNECTIONS {
        let message = format!(
            "{MAX_CONNECTIONS} RPC clients are connected, which is the limit; close one and try \
             again"
        );
        return refuse(&stream, message);
    }
    let ready = stream.set_nonblocking(false).and_then(|()| stream.try_clone());
    let own = match ready {
        Ok(own) => own,
        Err(e) => return refuse(&stream, format!("the connection cannot be set up: {e}")),
    };
    streams.insert(id, stream);
    drop(streams);
    let (methods, for_thread) = (methods.clone(), clients.clone());
    let spawned = thread::Builder::new().name("rpc-client".into()).spawn(move || {
        if let Err(e) = serve(&own, &methods) {
            tracing::debug!("an RPC client left: {e}");
        }
        let _ = own.shutdown(Shutdown::Both);
        // First: who waits for the last client takes apart what the methods hold.
        drop(methods);
        for_thread.remove(id);
    });
    if let Err(e) = spawned {
        let refused = clients.lock().remove(&id);
        if let Some(stream) = refused {
            refuse(&stream, format!("no thread for the connection: {e}"));
        }
    }
}

/// Answers requests until the client leaves or sends what is no JSON.
fn serve(mut stream: &UnixStream, methods: &Methods) -> io::Result<()> {
    stream.set_write_timeout(Some(WRITE_TIMEOUT))?;
    let mut framer = Framer::default();
    let mut buffer = vec![0; READ_BYTES];
    let mut checked = false;
    loop {
        let pause = (framer.is_incomplete() && !checked).then_some(SYNTAX_PAUSE);
        stream.set_read_timeout(pause)?;
        match stream.read(&mut buffer) {
            Ok(0) => return Ok(()),
            Ok(n) => {
                framer.push(&buffer[..n]);
                checked = false;
            }
            Err(e) if e.kind() == ErrorKind::Interrupted => continue,
            Err(e) if e.kind() == ErrorKind::WouldBlock => {
                checked = true;
                if let Err(e) = framer.check_syntax() {
                    return hang_up(stream, &e);
                }
                continue;
            }
            Err(e) => return Err(e),
        }
        loop {
            match framer.next_value() {
                Ok(Some(message)) => {
                    if let Some(reply) = methods.answer(message) {
                        stream.write_all(&reply)?;
                    }
                }
                Ok(None) => break,
                Err(e) => return hang_up(stream, &e),
            }
        }
    }
}

fn hang_up(mut stream: &UnixStream, e: &Error) -> io::Result<()> {
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
    Ok(())
}
