//! Tells when what a bdev had open elsewhere, and closes on a thread of its own, is closed.

use parking_lot::{Condvar, Mutex};
use std::sync::Arc;
use std::time::{Duration, Instant};

/// Whether it is; for those that wait for it after the bdev and its channels are gone.
#[derive(Clone, Default)]
pub struct Closed(Arc<(Mutex<bool>, Condvar)>);

impl Closed {
    /// Waits until it is, `timeout` at most; whether it is.
    pub fn wait(&self, timeout: Duration) -> bool {
        let (closed, changed) = &*self.0;
        let end = Instant::now() + timeout;
        let mut closed = closed.lock();
        while !*closed {
            if changed.wait_until(&mut closed, end).timed_out() {
                return *closed;
            }
        }
        true
    }

    /// It is.
    pub fn tell(&self) {
        let (closed, changed) = &*self.0;
        *closed.lock() = true;
        changed.notify_all();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn who_waits_for_the_end_waits_no_longer_than_he_says() {
        let closing = Closed::default();
        assert!(!closing.wait(Duration::from_millis(1)));
        let other = closing.clone();
        let closes = std::thread::spawn(move || other.tell());
        assert!(closing.wait(Duration::from_secs(600)));
        closes.join().unwrap();
        assert!(closing.wait(Duration::ZERO));
    }
}
