//! Whose I/O it is.

use std::sync::atomic::{AtomicU64, Ordering::Relaxed};

/// Whoever I/O is done for, such as a guest: what shares a device among them tells them apart by it.
/// All channels that are opened for one owner, by whichever thread, have one share together.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Owner(u64);

impl Owner {
    /// An owner that is none of those before.
    #[expect(clippy::new_without_default, reason = "each is another")]
    pub fn new() -> Self {
        static NEXT: AtomicU64 = AtomicU64::new(1);
        Owner(NEXT.fetch_add(1, Relaxed))
    }
}
