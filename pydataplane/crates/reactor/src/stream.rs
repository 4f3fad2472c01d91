//! A stream to a peer on the network, from a thread that may block.

use std::io;
use std::net::SocketAddr;
use std::os::fd::OwnedFd;
use std::time::{Duration, Instant};

use rustix::io::Errno;
use rustix::net::sockopt::{self, Timeout};
use rustix::net::{
    AddressFamily, RecvFlags, SendFlags, SocketFlags, SocketType, connect, recv, send, socket_with,
};

/// Of TCP: silence after which it asks whether the peer is there, time between two such questions, and how
/// many are not answered before the connection is given up.
const KEEPALIVE_IDLE: Duration = Duration::from_secs(5);
const KEEPALIVE_INTERVAL: Duration = Duration::from_secs(2);
const KEEPALIVE_COUNT: u32 = 5;
/// And how long what was sent may stay without acknowledgement, in milliseconds.
const UNACKNOWLEDGED_MS: u32 = 15_000;

/// A stream socket that is not connected; connecting it, and each call that sends, may take `timeout`.
///
/// # Errors
/// Of the operating system.
pub fn socket(family: AddressFamily, timeout: Duration) -> io::Result<OwnedFd> {
    let fd = socket_with(family, SocketType::STREAM, SocketFlags::CLOEXEC, None)?;
    // It limits connect(2), too.
    sockopt::set_socket_timeout(&fd, Timeout::Send, Some(timeout))?;
    Ok(fd)
}

/// Connects by TCP within `timeout`; a peer that is silent later is given up by TCP's own keep-alive.
///
/// # Errors
/// Of the operating system, or [`io::ErrorKind::TimedOut`].
pub fn connect_tcp(addr: &SocketAddr, timeout: Duration) -> io::Result<OwnedFd> {
    let family = if addr.is_ipv4() { AddressFamily::INET } else { AddressFamily::INET6 };
    let fd = socket(family, timeout)?;
    sockopt::set_tcp_nodelay(&fd, true)?;
    sockopt::set_socket_keepalive(&fd, true)?;
    sockopt::set_tcp_keepidle(&fd, KEEPALIVE_IDLE)?;
    sockopt::set_tcp_keepintvl(&fd, KEEPALIVE_INTERVAL)?;
    sockopt::set_tcp_keepcnt(&fd, KEEPALIVE_COUNT)?;
    sockopt::set_tcp_user_timeout(&fd, UNACKNOWLEDGED_MS)?;
    match connect(&fd, addr) {
        // Of a timeout of ours.
        Err(Errno::INPROGRESS) => Err(io::ErrorKind::TimedOut.into()),
        connected => Ok(connected.map(|()| fd)?),
    }
}

/// No call on the stream has a limit any more.
///
/// # Errors
/// Of the operating system.
pub fn unlimit(fd: &OwnedFd) -> io::Result<()> {
    for which in [Timeout::Recv, Timeout::Send] {
        sockopt::set_socket_timeout(fd, which, None)?;
    }
    Ok(())
}

/// Sets how long the next call may take; an error where no time is left.
fn limit(fd: &OwnedFd, which: Timeout, end: Instant) -> io::Result<()> {
    let left = end.saturating_duration_since(Instant::now());
    if left.is_zero() {
        return Err(io::Error::from_raw_os_error(libc::ETIMEDOUT));
    }
    Ok(sockopt::set_socket_timeout(fd, which, Some(left.max(Duration::from_millis(1))))?)
}

fn timed_out(e: Errno) -> io::Error {
    match e {
        Errno::AGAIN => io::Error::from_raw_os_error(libc::ETIMEDOUT),
        e => e.into(),
    }
}

/// Receives all of `bytes` until `end`.
///
/// # Errors
/// Of the operating system; ETIMEDOUT; or ECONNRESET where the peer ends the stream.
pub fn receive(fd: &OwnedFd, mut bytes: &mut [u8], end: Instant) -> io::Result<()> {
    while !bytes.is_empty() {
        limit(fd, Timeout::Recv, end)?;
        match recv(fd, &mut *bytes, RecvFlags::empty()) {
            Ok((0, _)) => return Err(io::Error::from_raw_os_error(libc::ECONNRESET)),
            Ok((n, _)) => bytes = &mut bytes[n..],
            Err(Errno::INTR) => {}
            Err(e) => return Err(timed_out(e)),
        }
    }
    Ok(())
}

/// Sends all of `bytes` until `end`.
///
/// # Errors
/// Of the operating system; or ETIMEDOUT.
pub fn transmit(fd: &OwnedFd, mut bytes: &[u8], end: Instant) -> io::Result<()> {
    while !bytes.is_empty() {
        limit(fd, Timeout::Send, end)?;
        match send(fd, bytes, SendFlags::NOSIGNAL) {
            Ok(n) => bytes = &bytes[n..],
            Err(Errno::INTR) => {}
            Err(e) => return Err(timed_out(e)),
        }
    }
    Ok(())
}
