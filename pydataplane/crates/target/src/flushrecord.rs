//! Failed flushes in the record, so that the next program knows them.
//!
//! A failure is latched by the thread that meets it ([`bdev::FlushLatch`]), mostly a reactor, which
//! wakes a thread here and goes on; that makes the record agree with the latches and has it durable.
//! A FLUSH that fails is not held back meanwhile: who is told of the failure at once knows it even if
//! the process is killed before the record is written, which takes one write that is synced.
//!
//! Whoever clears a latch, stops the target or hands it over calls [`Recorder::record`] itself.

use crate::flusherror::sentence;
use crate::state::{self, BDEV_KEY, Config, Item, StateError};
use bdev::{Bdev, FileBdev, FlushFailure, FlushLatch, Registry};
use nbd::Nbd;
use parking_lot::Mutex;
use std::io;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::{self, JoinHandle};
use std::time::Duration;
use uuid::Uuid;

/// How long after a record that could not be written the next attempt is made.
const AGAIN: Duration = Duration::from_secs(5);

/// What the recording thread and its callers share.
#[derive(Clone)]
struct Shared {
    registry: Registry,
    config: Arc<Mutex<Config>>,
    ends: Arc<AtomicBool>,
}

/// Keeps the record of failed flushes. When it is dropped, its thread ends.
pub struct Recorder {
    shared: Shared,
    thread: Option<JoinHandle<()>>,
}

impl Recorder {
    /// Starts the thread that records in `config` what the latches of `registry`'s bdevs say.
    ///
    /// # Errors
    /// The system gives no thread.
    pub fn start(registry: Registry, config: Arc<Mutex<Config>>) -> io::Result<Recorder> {
        let shared = Shared { registry, config, ends: Arc::default() };
        let work = shared.clone();
        let thread = thread::Builder::new().name("flush errors".into());
        let thread = thread.spawn(move || work.run())?;
        Ok(Recorder { shared, thread: Some(thread) })
    }

    /// Latches what is recorded of `bdev` on `medium`, and follows its latch; before it is registered.
    pub fn attach(&self, bdev: &dyn Bdev, medium: &Path) {
        self.attach_as(bdev.name(), bdev, medium);
    }

    /// As [`Recorder::attach`], of what is recorded under another name.
    pub fn attach_as(&self, name: &str, bdev: &dyn Bdev, medium: &Path) {
        let failure = self.shared.config.lock().flush_failure(name, medium);
        self.follow(bdev, failure);
    }

    /// As [`Recorder::attach`], of what is recorded of the LUN by any name, target portal or pool.
    pub fn attach_lun(&self, bdev: &dyn Bdev, lun: Uuid, medium: &Path) {
        let failure = {
            let config = self.shared.config.lock();
            let its = config.flush_failure(bdev.name(), medium);
            its.or_else(|| config.flush_failure_of_lun(lun))
        };
        self.follow(bdev, failure);
    }

    fn follow(&self, bdev: &dyn Bdev, failure: Option<FlushFailure>) {
        let Some(latch) = bdev.flush_latch() else { return };
        if let Some(failure) = failure {
            tracing::error!(bdev = bdev.name(), "{}", sentence(failure, bdev.name()));
            latch.restore(failure);
        }
        if let Some(thread) = &self.thread {
            latch.follow(thread.thread().clone());
        }
    }

    /// Makes the record agree with the latches; when it returns well, that survives a crash.
    ///
    /// # Errors
    /// The record cannot be written.
    pub fn record(&self) -> Result<(), StateError> {
        self.shared.record()
    }
}

impl Drop for Recorder {
    fn drop(&mut self) {
        self.shared.ends.store(true, Ordering::Release);
        if let Some(thread) = self.thread.take() {
            thread.thread().unpark();
            _ = thread.join();
        }
    }
}

impl Shared {
    fn run(&self) {
        let mut failed = false;
        while !self.ends.load(Ordering::Acquire) {
            match self.record() {
                Ok(()) => {
                    failed = false;
                    thread::park();
                }
                Err(e) => {
                    if !failed {
                        tracing::error!(
                            "a failed flush is not recorded, so a restart would forget it: {e}"
                        );
                    }
                    failed = true;
                    thread::park_timeout(AGAIN);
                }
            }
        }
    }

    fn record(&self) -> Result<(), StateError> {
        // Held while it is looked: a bdev that is deleted leaves the registry first, the record then.
        let mut config = self.config.lock();
        let key = |item: &Item| item.key.starts_with(BDEV_KEY).then(|| item.key.clone());
        let keys: Vec<_> = config.items().filter_map(key).collect();
        for key in keys {
            let name = key.strip_prefix(BDEV_KEY).unwrap_or_default();
            let Some(disk) = disk(&self.registry, name) else { continue };
            let failure = disk.flush_latch().and_then(FlushLatch::failure);
            if config.set_flush_failure(&key, failure)
                && let Some(failure) = failure
            {
                tracing::error!(bdev = name, "{}", sentence(failure, name));
            }
        }
        drop(config);
        state::save(&self.config)
    }
}

/// The bdev of that name, or of the NVMe controller of that name, if it has a latch of its own: others share that of
/// the one below.
pub fn disk(registry: &Registry, name: &str) -> Option<Arc<dyn Bdev>> {
    let file = registry.get_as::<FileBdev>(name).map(|file| file as Arc<dyn Bdev>);
    file.or_else(|| registry.get_as::<Nbd>(name).map(|nbd| nbd as Arc<dyn Bdev>))
        .or_else(|| registry.get_as::<iscsi::Disk>(name).map(|lun| lun as Arc<dyn Bdev>))
        .or_else(|| registry.get_as::<nvme::Disk>(name).map(|disk| disk as Arc<dyn Bdev>))
        .or_else(|| {
            let disks = crate::methods::nvme::disks(registry, name);
            disks.into_iter().next().map(|disk| disk as Arc<dyn Bdev>)
        })
}
