//! Failed flushes in the record, so that the next program knows them.
//!
//! A failure is latched by the thread that meets it ([`bdev::FlushLatch`]), mostly a reactor, which
//! wakes a thread here and goes on; that makes the record agree with the latches and has it durable.
//! A FLUSH that fails is not held back meanwhile: who is told of the failure at once knows it even if
//! the process is killed before the record is written, which takes one write that is synced.
//!
//! Whoever clears a latch, stops the target or hands it over calls [`Recorder::record`] itself.

use crate::methods::file::is_disk;
use crate::state::{Config, Item, StateError, bdev_key};
use bdev::{Bdev, FileBdev, FlushCause, FlushFailure, Registry};
use parking_lot::Mutex;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use std::io;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::{self, JoinHandle};
use std::time::{Duration, SystemTime};

/// How long after a record that could not be written the next attempt is made.
const AGAIN: Duration = Duration::from_secs(5);

/// What failed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
enum Cause {
    /// A flush.
    Flush,
    /// A write that was to be durable at once (FUA).
    DurableWrite,
    /// A write of the metadata of an lvstore on the bdev.
    Metadata,
}

/// A failed flush as it is recorded.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct FlushError {
    /// What failed.
    cause: Cause,
    /// Positive errno of the operating system, where it gave one.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    errno: Option<i32>,
    /// When, in seconds since 1970.
    at: u64,
}

impl From<FlushFailure> for FlushError {
    fn from(failure: FlushFailure) -> FlushError {
        let cause = match failure.cause {
            FlushCause::Flush => Cause::Flush,
            FlushCause::DurableWrite => Cause::DurableWrite,
            FlushCause::Metadata => Cause::Metadata,
        };
        let at = failure.at.duration_since(SystemTime::UNIX_EPOCH).unwrap_or_default().as_secs();
        FlushError { cause, errno: failure.errno, at }
    }
}

impl From<&FlushError> for FlushFailure {
    fn from(error: &FlushError) -> FlushFailure {
        let cause = match error.cause {
            Cause::Flush => FlushCause::Flush,
            Cause::DurableWrite => FlushCause::DurableWrite,
            Cause::Metadata => FlushCause::Metadata,
        };
        let at = SystemTime::UNIX_EPOCH.checked_add(Duration::from_secs(error.at));
        FlushFailure { cause, errno: error.errno, at: at.unwrap_or(SystemTime::UNIX_EPOCH) }
    }
}

/// Why every flush of a bdev fails until that is cleared, as a clause for people.
pub fn sentence(failure: FlushFailure, bdev: &str) -> String {
    format!(
        "{failure}; what was written before may be lost, so flushes fail until that is cleared with \
         `virtlun bdev clear-flush-error {bdev}` (virtlun_bdev_clear_flush_error)"
    )
}

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

    /// Latches what is recorded of `bdev`, and follows its latch; before it is registered.
    pub fn attach(&self, bdev: &FileBdev) {
        let Some(latch) = bdev.flush_latch() else { return };
        if let Some(failure) = self.shared.config.lock().flush_failure(bdev.name(), bdev.path()) {
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
        // Held throughout: a bdev that is deleted leaves the registry first, the record then.
        let mut config = self.config.lock();
        let name = |item: &Item| Some(item.call.params.get("name")?.as_str()?.to_owned());
        let disks: Vec<_> = config.items().filter(|item| is_disk(item)).filter_map(name).collect();
        for name in disks {
            let Some(disk) = self.registry.get_as::<FileBdev>(&name) else { continue };
            let failure = disk.flush_latch().and_then(bdev::FlushLatch::failure);
            if config.set_flush_failure(&bdev_key(&name), failure)
                && let Some(failure) = failure
            {
                tracing::error!(bdev = name, "{}", sentence(failure, &name));
            }
        }
        config.save()
    }
}

/// Whether the call of `item` makes a bdev on the file `path`.
pub fn is_on(item: &Item, path: &Path) -> bool {
    let file = item.call.params.get("filename").and_then(serde_json::Value::as_str);
    file.is_some_and(|file| Path::new(file) == path)
}
