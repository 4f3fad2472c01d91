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

/// The identity of the disk `disk` of the array `array`, the same on every host; no other array's is the same, whatever
/// its disks say of themselves. Names of arrays have no zero byte.
pub fn identity_in(array: &str, disk: &[u8]) -> Uuid {
    Uuid::new_v5(&Uuid::NAMESPACE_OID, &[array.as_bytes(), &[0], disk].concat())
}
