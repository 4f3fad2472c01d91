//! What is known of a disk of an array that no device is on.

use uuid::Uuid;

/// A disk as its array tells of it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Medium {
    /// Made of what the disk says of itself, so that it is the same on every host.
    pub identity: Uuid,
    /// Bytes.
    pub block_size: u32,
    /// Bytes.
    pub size: u64,
    /// It takes no writes.
    pub read_only: bool,
    /// It is provisioned thinly.
    pub thin: bool,
}
