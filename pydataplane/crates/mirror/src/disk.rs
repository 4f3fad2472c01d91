//! The bdev: what a unit has in place of its volume while that is copied.

use crate::channel::MirrorChannel;
use crate::copier;
use crate::map::Map;
use crate::shared::{Phase, Progress, Shared};
use bdev::{Bdev, Channel, Features, FlushLatch, Geometry, OpenError, Protection, Sparse, Stats};
use reactor::IoContext;
use serde_json::Value;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::sync::mpsc::RecvTimeoutError;
use std::time::{Duration, Instant};
use uuid::Uuid;

/// How to copy.
#[derive(Default)]
pub struct Options {
    /// Bytes a second that are read, at most; 0: as many as the disks can.
    pub limit: u64,
    /// What may lie on the source; `None`: data everywhere.
    pub source_map: Option<Map>,
    /// The same of the destination, as it is before the copy.
    pub destination_map: Option<Map>,
}

/// Why a bdev cannot be copied to another.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum MirrorError {
    /// It takes no writes.
    #[error("bdev {0} takes no writes")]
    ReadOnly(String),
    /// It is too small.
    #[error("bdev {name} has {have} bytes, and {need} are needed; use a larger one")]
    TooSmall {
        /// Name of the destination.
        name: String,
        /// Its size, in bytes.
        have: u64,
        /// That of the source.
        need: u64,
    },
    /// A block of the source is no whole blocks of the destination.
    #[error("bdev {name} has blocks of {its} bytes, and bdev {source_name} of {ours}")]
    Blocks {
        /// Name of the destination.
        name: String,
        /// Bytes of its blocks.
        its: u32,
        /// Name of the source.
        source_name: String,
        /// Bytes of its blocks.
        ours: u32,
    },
    /// The source's protection information has no place there.
    #[error(
        "bdev {source_name} has protection information, and bdev {name} has none: copy it to one that has"
    )]
    NoProtection {
        /// Name of the destination.
        name: String,
        /// Name of the source.
        source_name: String,
    },
    /// It would mean something else there.
    #[error("bdev {source_name} and bdev {name} have protection information of different types")]
    OtherProtection {
        /// Name of the destination.
        name: String,
        /// Name of the source.
        source_name: String,
    },
    /// It cannot be made to read as zeros.
    #[error("bdev {0} cannot write zeros by itself")]
    Zeroes(String),
}

/// A bdev that is being copied. It is not registered, and shows itself as its source.
pub struct Mirror {
    shared: Arc<Shared>,
    maps: (Option<Map>, Option<Map>),
}

impl Mirror {
    /// `source`, which is about to be copied to `destination`; nobody else may write to either.
    ///
    /// # Errors
    /// [`MirrorError`].
    pub fn new(
        source: Arc<dyn Bdev>,
        destination: Arc<dyn Bdev>,
        options: Options,
    ) -> Result<Arc<Mirror>, MirrorError> {
        let name = || destination.name().to_owned();
        let (its, ours) = (destination.geometry(), source.geometry());
        let features = destination.features();
        if features.read_only {
            return Err(MirrorError::ReadOnly(name()));
        }
        if !features.write_zeroes {
            return Err(MirrorError::Zeroes(name()));
        }
        let source_name = || source.name().to_owned();
        let protection = source.protection();
        if let Some(protection) = protection {
            let there = destination.protection();
            let (name, source_name) = (name(), source_name());
            match there {
                None => return Err(MirrorError::NoProtection { name, source_name }),
                Some(there) if there.kind != protection.kind => {
                    return Err(MirrorError::OtherProtection { name, source_name });
                }
                Some(_) => {}
            }
        }
        let fits = match protection {
            Some(_) => ours.block_size == its.block_size,
            None => ours.block_size.is_multiple_of(its.block_size),
        };
        if !fits {
            return Err(MirrorError::Blocks {
                name: name(),
                its: its.block_size,
                source_name: source_name(),
                ours: ours.block_size,
            });
        }
        if its.bytes() < ours.bytes() {
            let (have, need) = (its.bytes(), ours.bytes());
            return Err(MirrorError::TooSmall { name: name(), have, need });
        }
        let shared = Arc::new(Shared::new(source, destination, options.limit));
        Ok(Arc::new(Mirror { shared, maps: (options.source_map, options.destination_map) }))
    }

    /// Copies, on the calling thread, until the copy fails or is stopped. To be called once, when all
    /// writes to the source come through this bdev.
    pub fn run(&self) {
        copier::run(&self.shared, self.maps.0.as_ref(), self.maps.1.as_ref());
    }

    /// How far it is.
    pub fn progress(&self) -> Progress {
        self.shared.progress()
    }

    /// Limits what is read to so many bytes a second; 0: as many as the disks can.
    pub fn set_limit(&self, bytes: u64) {
        self.shared.limit.store(bytes, Ordering::Relaxed);
        self.shared.wake_all();
    }

    /// Ends the copy for a reason of somebody else's, one sentence, unless it is over.
    pub fn fail(&self, why: String) {
        self.shared.fail(why);
    }

    /// Ends the copy: the source has all.
    pub fn stop(&self) {
        self.shared.stop();
    }

    /// Makes the destination durable, for the unit to go on there: to be called while it has nothing in
    /// flight. Waits at most `most`.
    ///
    /// # Errors
    /// In one sentence: not all is copied, or the copy is over; the destination was not flushed.
    pub fn seal(&self, most: Duration) -> Result<(), String> {
        let (from, to) = (self.shared.source.name(), self.shared.destination.name());
        match self.shared.progress() {
            Progress { phase: Phase::Ready, .. } => {}
            Progress { failure: Some(why), .. } => return Err(why),
            Progress { phase: Phase::Copying, copied, total, .. } => {
                return Err(format!(
                    "{copied} of {total} bytes of bdev {from} are copied to bdev {to}; wait until all are"
                ));
            }
            _ => return Err(format!("the copy of bdev {from} to bdev {to} is over")),
        }
        let (call, caller) = reactor::call(());
        self.shared.ask(|asked| asked.seal = Some(call));
        match caller.wait_until(Instant::now() + most) {
            Ok(sealed) => sealed,
            Err(RecvTimeoutError::Disconnected) => {
                Err(format!("the copy of bdev {from} to bdev {to} is over"))
            }
            Err(RecvTimeoutError::Timeout) => {
                Err(format!("bdev {to} was not flushed within {} s", most.as_secs()))
            }
        }
    }

    /// Whether the destination has answered all I/O of the unit's that it was given.
    pub fn is_quiet(&self) -> bool {
        self.shared.orphans.load(Ordering::Acquire) == 0
    }

    /// The bdev that is copied.
    pub fn source(&self) -> &Arc<dyn Bdev> {
        &self.shared.source
    }

    /// The bdev that it is copied to.
    pub fn destination(&self) -> &Arc<dyn Bdev> {
        &self.shared.destination
    }
}

impl Bdev for Mirror {
    fn name(&self) -> &str {
        self.shared.source.name()
    }
    fn aliases(&self) -> Vec<String> {
        self.shared.source.aliases()
    }
    fn uuid(&self) -> Uuid {
        self.shared.source.uuid()
    }
    fn product_name(&self) -> &'static str {
        self.shared.source.product_name()
    }
    fn geometry(&self) -> Geometry {
        self.shared.source.geometry()
    }
    fn sparse(&self) -> Option<&dyn Sparse> {
        self.shared.source.sparse()
    }
    fn features(&self) -> Features {
        self.shared.source.features()
    }
    fn open(&self, io: &IoContext) -> Result<Box<dyn Channel>, OpenError> {
        let source = self.shared.source.open(io)?;
        // Of a copy that is over the destination is not needed; it may be gone.
        let destination = match self.shared.is_over() {
            true => None,
            false => Some(self.shared.destination.open(io)?),
        };
        Ok(Box::new(MirrorChannel::new(self.shared.clone(), source, destination, io.waker())))
    }
    fn driver_specific(&self) -> Value {
        self.shared.source.driver_specific()
    }
    fn stats(&self) -> Option<&Arc<Stats>> {
        self.shared.source.stats()
    }
    fn flush_latch(&self) -> Option<&FlushLatch> {
        self.shared.source.flush_latch()
    }
    fn protection(&self) -> Option<Protection> {
        self.shared.source.protection()
    }
}
