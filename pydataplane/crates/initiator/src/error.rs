//! What can go wrong in the front end.

use std::io;
use std::path::PathBuf;

use guestmem::{BadAccess, MapError};

/// Why the front end could not do what it was told.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// Nobody listens there.
    #[error("cannot connect to {path}: {why}; is the target running?")]
    Connect {
        /// The socket.
        path: PathBuf,
        /// The cause.
        why: io::Error,
    },
    /// A vhost-user message was refused, or the target hung up.
    #[error("vhost-user {message} failed: {why}")]
    Protocol {
        /// Which message.
        message: &'static str,
        /// The cause, in the words of the `vhost` crate.
        why: String,
    },
    /// Guest memory could not be made.
    #[error(transparent)]
    Memory(#[from] MapError),
    /// An address outside guest memory.
    #[error("guest memory: {0}")]
    Access(#[from] BadAccess),
    /// The front end's own guest memory is used up.
    #[error("no room for {wanted} more bytes of guest memory; give the session more")]
    NoRoom {
        /// Bytes.
        wanted: u64,
    },
    /// All descriptors of the queue are in use.
    #[error("queue {0} has no free descriptor")]
    QueueFull(usize),
    /// No such queue.
    #[error("there is no queue {0}")]
    NoQueue(usize),
    /// The request did not complete in time.
    #[error("no answer within {ms} ms{detail}")]
    Timeout {
        /// Milliseconds waited.
        ms: u64,
        /// What else is known.
        detail: &'static str,
    },
    /// The kernel refused.
    #[error("cannot {what}: {why}")]
    Os {
        /// What was tried.
        what: &'static str,
        /// The cause.
        why: io::Error,
    },
    /// A command of the script, or an option, makes no sense.
    #[error("{0}")]
    Usage(String),
}

impl Error {
    pub(crate) fn os(what: &'static str) -> impl Fn(io::Error) -> Error {
        move |why| Error::Os { what, why }
    }
}
