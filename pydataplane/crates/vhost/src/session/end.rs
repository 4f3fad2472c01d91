//! How sessions end.

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
