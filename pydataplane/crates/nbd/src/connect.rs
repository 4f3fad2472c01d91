//! A connection, made by a thread that may block.

use std::io;
use std::os::fd::OwnedFd;
use std::time::{Duration, Instant};

use rustix::net::sockopt::{self, Timeout};
use rustix::net::{
    AddressFamily, RecvFlags, SendFlags, SocketAddrUnix, SocketFlags, SocketType, connect, recv,
    send, socket_with,
};

use crate::address::{Address, Host};
use crate::handshake::{Handshake, Refused, Terms};

/// How long a server may take to be connected to and to say its terms, the first time.
pub(crate) const CONNECT_TIMEOUT: Duration = Duration::from_secs(4);

/// Of TCP: silence after which it asks whether the peer is there, time between two such questions, and how
/// many are not answered before the connection is given up.
const KEEPALIVE_IDLE: Duration = Duration::from_secs(5);
const KEEPALIVE_INTERVAL: Duration = Duration::from_secs(2);
const KEEPALIVE_COUNT: u32 = 5;
/// And how long what was sent may stay without acknowledgement, in milliseconds.
const UNACKNOWLEDGED_MS: u32 = 15_000;

/// Why there is no connection: a clause.
#[derive(Debug, thiserror::Error)]
pub enum ConnectError {
    /// The operating system says no, or nobody answers.
    #[error("{address} {how}: {source}")]
    Os {
        /// The server.
        address: Address,
        /// What failed, as a clause without its subject.
        how: &'static str,
        /// The cause.
        source: io::Error,
    },
    /// There is no agreement.
    #[error("{address}: {source}")]
    Refused {
        /// The server.
        address: Address,
        /// The cause.
        source: Refused,
    },
}

impl ConnectError {
    /// The errno of the operating system, if it is that which said no.
    pub fn errno(&self) -> Option<i32> {
        match self {
            ConnectError::Os { source, .. } => source.raw_os_error(),
            ConnectError::Refused { .. } => None,
        }
    }
}

/// Connects to a server and hears its terms; takes some seconds at most.
///
/// # Errors
/// It is not there, does not answer in time, or there is no agreement.
pub fn reach(address: &Address) -> Result<Terms, ConnectError> {
    let (fd, terms) = establish(address, CONNECT_TIMEOUT)?;
    say_goodbye(&fd);
    Ok(terms)
}

/// As [`reach`], with the connection.
pub(crate) fn establish(
    address: &Address,
    timeout: Duration,
) -> Result<(OwnedFd, Terms), ConnectError> {
    let end = Instant::now() + timeout;
    let failed = |how| move |source| ConnectError::Os { address: address.clone(), how, source };
    let fd = open(&address.host, timeout).map_err(failed("cannot be connected to"))?;
    let (mut handshake, mut answer) = (Handshake::new(&address.export), Vec::new());
    loop {
        let mut bytes = vec![0; handshake.wants()];
        receive(&fd, &mut bytes, end).map_err(failed("does not answer as an NBD server does"))?;
        let terms = handshake.take(&bytes, &mut answer);
        let terms =
            terms.map_err(|source| ConnectError::Refused { address: address.clone(), source })?;
        if !answer.is_empty() {
            transmit(&fd, &answer, end).map_err(failed("cannot be spoken to"))?;
            answer.clear();
        }
        if let Some(terms) = terms {
            for which in [Timeout::Recv, Timeout::Send] {
                let unlimited = sockopt::set_socket_timeout(&fd, which, None);
                unlimited.map_err(|e| failed("cannot be used")(e.into()))?;
            }
            return Ok((fd, terms));
        }
    }
}

/// Has the server end a connection on which nothing is in flight, as far as that can be said at once.
pub(crate) fn say_goodbye(fd: &OwnedFd) {
    let flags = SendFlags::DONTWAIT | SendFlags::NOSIGNAL;
    _ = send(fd, &crate::wire::disconnect(), flags);
}

fn open(host: &Host, timeout: Duration) -> io::Result<OwnedFd> {
    let family = match host {
        Host::Unix(_) => AddressFamily::UNIX,
        Host::Tcp(addr) if addr.is_ipv4() => AddressFamily::INET,
        Host::Tcp(_) => AddressFamily::INET6,
    };
    let fd = socket_with(family, SocketType::STREAM, SocketFlags::CLOEXEC, None)?;
    // It limits connect(2), too.
    sockopt::set_socket_timeout(&fd, Timeout::Send, Some(timeout))?;
    match host {
        Host::Unix(path) => connect(&fd, &SocketAddrUnix::new(path)?)?,
        Host::Tcp(addr) => {
            sockopt::set_tcp_nodelay(&fd, true)?;
            sockopt::set_socket_keepalive(&fd, true)?;
            sockopt::set_tcp_keepidle(&fd, KEEPALIVE_IDLE)?;
            sockopt::set_tcp_keepintvl(&fd, KEEPALIVE_INTERVAL)?;
            sockopt::set_tcp_keepcnt(&fd, KEEPALIVE_COUNT)?;
            sockopt::set_tcp_user_timeout(&fd, UNACKNOWLEDGED_MS)?;
            match connect(&fd, addr) {
                // Of a timeout of ours.
                Err(rustix::io::Errno::INPROGRESS) => return Err(io::ErrorKind::TimedOut.into()),
                connected => connected?,
            }
        }
    }
    Ok(fd)
}

/// Sets how long the next call may take; an error where no time is left.
fn limit(fd: &OwnedFd, which: Timeout, end: Instant) -> io::Result<()> {
    let left = end.saturating_duration_since(Instant::now());
    if left.is_zero() {
        return Err(io::Error::from_raw_os_error(libc::ETIMEDOUT));
    }
    Ok(sockopt::set_socket_timeout(fd, which, Some(left.max(Duration::from_millis(1))))?)
}

fn timed_out(e: rustix::io::Errno) -> io::Error {
    match e {
        rustix::io::Errno::AGAIN => io::Error::from_raw_os_error(libc::ETIMEDOUT),
        e => e.into(),
    }
}

fn receive(fd: &OwnedFd, mut bytes: &mut [u8], end: Instant) -> io::Result<()> {
    while !bytes.is_empty() {
        limit(fd, Timeout::Recv, end)?;
        match recv(fd, &mut *bytes, RecvFlags::empty()) {
            Ok((0, _)) => return Err(io::Error::from_raw_os_error(libc::ECONNRESET)),
            Ok((n, _)) => bytes = &mut bytes[n..],
            Err(rustix::io::Errno::INTR) => {}
            Err(e) => return Err(timed_out(e)),
        }
    }
    Ok(())
}

fn transmit(fd: &OwnedFd, mut bytes: &[u8], end: Instant) -> io::Result<()> {
    while !bytes.is_empty() {
        limit(fd, Timeout::Send, end)?;
        match send(fd, bytes, SendFlags::NOSIGNAL) {
            Ok(n) => bytes = &bytes[n..],
            Err(rustix::io::Errno::INTR) => {}
            Err(e) => return Err(timed_out(e)),
        }
    }
    Ok(())
}
