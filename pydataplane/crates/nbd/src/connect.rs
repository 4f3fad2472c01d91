//! A connection, made by a thread that may block.

use std::io;
use std::os::fd::OwnedFd;
use std::time::{Duration, Instant};

use reactor::stream::{self, receive, transmit};
use rustix::net::{AddressFamily, SendFlags, SocketAddrUnix, connect, send};

use crate::address::{Address, Host};
use crate::handshake::{Handshake, Refused, Terms};

/// How long a server may take to be connected to and to say its terms, the first time.
pub(crate) const CONNECT_TIMEOUT: Duration = Duration::from_secs(4);

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
            stream::unlimit(&fd).map_err(failed("cannot be used"))?;
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
    match host {
        Host::Tcp(addr) => stream::connect_tcp(addr, timeout),
        Host::Unix(path) => {
            let fd = stream::socket(AddressFamily::UNIX, timeout)?;
            connect(&fd, &SocketAddrUnix::new(path)?)?;
            Ok(fd)
        }
    }
}
