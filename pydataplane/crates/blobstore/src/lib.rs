//! Blobstore.

/// Longest name of a store or blob, in bytes.
pub const NAME_MAX: usize = 63;
