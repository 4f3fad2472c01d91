//! What is kept for a limited time, though who keeps it may hang.

use std::sync::Arc;
use std::sync::mpsc::{self, RecvTimeoutError};
use std::time::Instant;

use parking_lot::Mutex;

use crate::Error;
use crate::calls::spawn;

/// Something that is dropped with this, or at a time if that is earlier.
pub(super) struct Lease<T> {
    kept: Arc<Mutex<Option<T>>>,
    /// Dropped: nobody has to look at the time any more.
    _end: mpsc::Sender<()>,
}

impl<T: Send + 'static> Lease<T> {
    /// Keeps something, until `until` at the latest.
    ///
    /// # Errors
    /// There is no thread to look at the time.
    pub(super) fn new(kept: T, until: Instant) -> Result<Lease<T>, Error> {
        let kept = Arc::new(Mutex::new(Some(kept)));
        let (end, ended) = mpsc::channel();
        let late = Arc::clone(&kept);
        spawn("rbd lease", move || {
            let left = until.saturating_duration_since(Instant::now());
            if ended.recv_timeout(left) == Err(RecvTimeoutError::Timeout) {
                let kept = late.lock().take();
                drop(kept);
            }
        })?;
        Ok(Lease { kept, _end: end })
    }

    /// Whether it is still kept.
    pub(super) fn is_kept(&self) -> bool {
        self.kept.lock().is_some()
    }

    /// Drops it; whether it had been kept until now.
    pub(super) fn end(self) -> bool {
        let kept = self.kept.lock().take();
        kept.is_some()
    }
}

impl<T> Drop for Lease<T> {
    fn drop(&mut self) {
        let kept = self.kept.lock().take();
        drop(kept);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::mpsc::Receiver;
    use std::time::Duration;

    /// What tells when it is dropped.
    fn told() -> (mpsc::Sender<()>, Receiver<()>) {
        mpsc::channel()
    }

    #[test]
    fn what_is_kept_goes_with_its_lease_and_it_is_said_that_it_was_there() {
        let far = Instant::now() + Duration::from_secs(600);
        let (kept, gone) = told();
        let lease = Lease::new(kept, far).unwrap();
        assert!(lease.is_kept());
        assert!(lease.end());
        assert!(gone.recv().is_err());
        let (kept, gone) = told();
        drop(Lease::new(kept, far).unwrap());
        assert!(gone.recv().is_err());
    }

    #[test]
    fn what_is_kept_goes_in_time_while_its_lease_hangs() {
        let (kept, gone) = told();
        let lease = Lease::new(kept, Instant::now()).unwrap();
        // It would wait for ever otherwise.
        assert!(gone.recv().is_err());
        assert!(!lease.is_kept() && !lease.end());
    }
}
