use std::sync::Arc;

use reactor::IoContext;
use serde_json::Value;
use uuid::Uuid;

use crate::{
    Bdev, Channel, Completion, Features, FlushLatch, Geometry, Io, OpenError, Run, Sparse, Stats,
    Submit,
};

/// What [`Wrapped`] does otherwise than the device; each does as that unless it says so.
pub trait Wrap: Send + Sync + 'static {
    /// See [`Bdev::features`], with those of the device.
    fn features(&self, of: Features) -> Features {
        of
    }
    /// How an I/O ends that the device does not get; `None`: it gets it.
    fn instead(&self, _io: &Io) -> Option<Submit> {
        None
    }
    /// The device is about to be asked what has ended ([`Channel::poll`]).
    fn polls(&self) {}
    /// See [`Bdev::sparse`], with what the device tells.
    fn sparse<'a>(&'a self, of: Option<&'a dyn Sparse>) -> Option<&'a dyn Sparse> {
        of
    }
    /// See [`Channel::sparse_run`]; `None`: as the device.
    fn sparse_run(&self, _lba: u64, _blocks: u64) -> Option<Run> {
        None
    }
}

/// A device that is another one but for some of it, of the same name.
pub struct Wrapped<W> {
    disk: Arc<dyn Bdev>,
    with: Arc<W>,
}

impl<W: Wrap> Wrapped<W> {
    /// `disk`, which does otherwise what `with` says.
    pub fn new(disk: Arc<dyn Bdev>, with: W) -> Arc<Self> {
        Arc::new(Wrapped { disk, with: Arc::new(with) })
    }
}

struct WrappedChannel<W> {
    disk: Box<dyn Channel>,
    with: Arc<W>,
}

impl<W: Wrap> Channel for WrappedChannel<W> {
    fn submit(&mut self, io: &Io) -> Submit {
        self.with.instead(io).unwrap_or_else(|| self.disk.submit(io))
    }

    fn poll(&mut self, done: &mut Vec<Completion>) -> u32 {
        self.with.polls();
        self.disk.poll(done)
    }

    fn sparse_run(&mut self, lba: u64, blocks: u64) -> Run {
        self.with.sparse_run(lba, blocks).unwrap_or_else(|| self.disk.sparse_run(lba, blocks))
    }
}

impl<W: Wrap> Bdev for Wrapped<W> {
    fn name(&self) -> &str {
        self.disk.name()
    }

    fn aliases(&self) -> Vec<String> {
        self.disk.aliases()
    }

    fn uuid(&self) -> Uuid {
        self.disk.uuid()
    }

    fn product_name(&self) -> &'static str {
        self.disk.product_name()
    }

    fn geometry(&self) -> Geometry {
        self.disk.geometry()
    }

    fn features(&self) -> Features {
        self.with.features(self.disk.features())
    }

    fn open(&self, io: &IoContext) -> Result<Box<dyn Channel>, OpenError> {
        Ok(Box::new(WrappedChannel { disk: self.disk.open(io)?, with: Arc::clone(&self.with) }))
    }

    fn driver_specific(&self) -> Value {
        self.disk.driver_specific()
    }

    fn stats(&self) -> Option<&Arc<Stats>> {
        self.disk.stats()
    }

    fn flush_latch(&self) -> Option<&FlushLatch> {
        self.disk.flush_latch()
    }

    fn sparse(&self) -> Option<&dyn Sparse> {
        self.with.sparse(self.disk.sparse())
    }
}
