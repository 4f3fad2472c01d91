//! Whose turn it is to change an lvstore.

use parking_lot::{Condvar, Mutex};
use std::time::Duration;

/// One control operation at a time. The one whose turn it is may wait for I/O that does not end; the
/// others do not wait with it for ever.
#[derive(Default)]
pub(super) struct Turns {
    taken: Mutex<bool>,
    free: Condvar,
}

/// The right of a control operation to go on.
pub(super) struct Turn<'a>(&'a Turns);

impl Turns {
    /// The turn, within `timeout`.
    pub(super) fn take(&self, timeout: Duration) -> Option<Turn<'_>> {
        let mut taken = self.taken.lock();
        self.free.wait_while_for(&mut taken, |taken| *taken, timeout);
        if *taken {
            return None;
        }
        *taken = true;
        Some(Turn(self))
    }
}

impl Drop for Turn<'_> {
    fn drop(&mut self) {
        *self.0.taken.lock() = false;
        self.0.free.notify_one();
    }
}
