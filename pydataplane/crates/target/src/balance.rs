//! The thread that has request queues move to other reactors where theirs has more to do than it can.

use std::io;
use std::sync::mpsc::{RecvTimeoutError, Sender, channel};
use std::thread::{self, JoinHandle};
use std::time::Duration;

use ::vhost_scsi::{Balancer, Controllers};

/// How often it looks.
const EVERY: Duration = Duration::from_secs(1);

/// It looks as long as this is there.
pub struct Balance {
    /// Closed: it ends.
    ends: Option<Sender<()>>,
    thread: Option<JoinHandle<()>>,
}

impl Balance {
    /// Looks at `controllers` once a second, whose queues run on so many `reactors`; with one there is
    /// nothing to do.
    ///
    /// # Errors
    /// There is no thread to be had.
    pub fn start(controllers: &Controllers, reactors: usize) -> io::Result<Balance> {
        if reactors < 2 {
            return Ok(Balance { ends: None, thread: None });
        }
        let (ends, ended) = channel::<()>();
        let controllers = controllers.clone();
        let thread = thread::Builder::new().name("balance".into()).spawn(move || {
            let mut balancer = Balancer::default();
            while ended.recv_timeout(EVERY) == Err(RecvTimeoutError::Timeout) {
                controllers.balance(&mut balancer);
            }
        })?;
        Ok(Balance { ends: Some(ends), thread: Some(thread) })
    }
}

impl Drop for Balance {
    fn drop(&mut self) {
        drop(self.ends.take());
        if let Some(thread) = self.thread.take() {
            _ = thread.join();
        }
    }
}
