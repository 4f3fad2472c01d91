//! The namespaces of a controller as bdevs.

use std::sync::Arc;

use bdev::{
    Bdev, Channel, Features, FlushFailure, FlushLatch, Geometry, OpenError, Registry, Stats,
    SyncChannel, ThreadChannel, ThreadRequest, Threaded, Waiter,
};
use reactor::IoContext;
use serde_json::{Value, json};
use uuid::Uuid;

use crate::ana::AnaState;
use crate::controller::{Controller, StopOnDrop};
use crate::identify::{Names, Namespace};
use crate::namespaces::Found;
use crate::requests::Request;
use crate::units::Unit;

/// A namespace, as its channels have it.
struct User {
    of: Arc<StopOnDrop>,
    unit: u16,
}

impl User {
    #[inline]
    fn unit(&self) -> &Unit {
        &self.of.0.units[usize::from(self.unit)]
    }
}

impl Threaded for User {
    #[inline]
    fn geometry(&self) -> Geometry {
        self.unit().geometry()
    }
    fn features(&self) -> &Features {
        &self.unit().features
    }
    fn latch(&self) -> &FlushLatch {
        &self.of.0.latch
    }
    fn flushes(&self) -> bool {
        self.of.0.cache
    }
    fn has_given_up(&self) -> bool {
        self.of.0.has_given_up()
    }
    fn compared_max(&self) -> u64 {
        self.unit().most.compared
    }
    fn hand_over(
        &self,
        request: ThreadRequest,
        waiter: Option<&Arc<Waiter>>,
    ) -> Result<(), ThreadRequest> {
        let request = Request { of: request, unit: self.unit };
        self.of.0.hand_over(request, waiter).map_err(|request| request.of)
    }
}

/// The process ends, and serves no guest any more: what the rest of it asks of controllers that do not answer fails
/// after a moment.
pub fn end_all(registry: &Registry) {
    for bdev in registry.list() {
        if let Some(disk) = registry.get_as::<Disk>(bdev.name()) {
            disk.controller.shared.end();
        }
    }
}

impl Controller {
    /// A bdev for each of its namespaces, in order; one of a namespace is to be registered at a time.
    pub fn disks(&self) -> Vec<Arc<Disk>> {
        let units = 0..self.shared.units.len();
        units.map(|unit| Arc::new(Disk::new(self, unit))).collect()
    }
}

/// A namespace as a bdev.
pub struct Disk {
    controller: Controller,
    name: String,
    unit: usize,
    stats: Arc<Stats>,
}

impl Disk {
    /// What [`Bdev::product_name`] says, as SPDK's.
    pub const PRODUCT: &'static str = "NVMe disk";

    pub(crate) fn new(controller: &Controller, unit: usize) -> Disk {
        let name = controller.shared.bdev(unit);
        Disk { controller: controller.clone(), name, unit, stats: Stats::new() }
    }

    /// That of which it is a namespace.
    pub fn controller(&self) -> &Controller {
        &self.controller
    }

    /// Number of the namespace.
    pub fn nsid(&self) -> u32 {
        self.unit().namespace.nsid
    }

    /// Which of [`PathInfo::access`] it is.
    pub fn index(&self) -> usize {
        self.unit
    }

    fn unit(&self) -> &Unit {
        &self.controller.shared.units[self.unit]
    }

    /// The namespace as one of its subsystem's.
    pub fn found(&self) -> Found {
        let namespace = Namespace { geometry: self.geometry(), ..self.unit().namespace };
        let is = Ok(namespace.medium(&self.controller.options().subnqn));
        Found { name: namespace.called(), nsid: namespace.nsid, is }
    }

    /// The UUID that it has as a volume of a pool of its subsystem, whether it is one or not; `None`: it can be none.
    pub fn volume(&self) -> Option<Uuid> {
        let name = self.unit().namespace.name?;
        Some(name.volume(&self.controller.options().subnqn))
    }

    /// Lets flushes of all namespaces of the controller through again after one has failed, if the target flushes
    /// them now; one that it does not have any more is left out. Returns what was latched. What was written before that failure may be lost all the same.
    ///
    /// # Errors
    /// The flush fails again, or cannot be tried; then the latch stays.
    pub fn clear_flush_failure(&self) -> Result<Option<FlushFailure>, String> {
        let latch = &self.controller.shared.latch;
        let failure = latch.clear();
        let flush = |unit| {
            let disk = Disk::new(&self.controller, unit);
            let mut channel = SyncChannel::open(&disk).map_err(|e| e.to_string())?;
            channel.flush().map_err(|e| e.to_string())
        };
        let paths = self.controller.paths();
        let is_there = |unit: &usize| {
            let mut up = paths.iter().filter(|path| path.connected).peekable();
            up.peek().is_none() || up.any(|path| path.access[*unit].is_some())
        };
        let all = 0..self.controller.shared.units.len();
        let flushed = all.filter(is_there).try_for_each(flush);
        if let (Err(_), Some(failure)) = (&flushed, failure) {
            latch.restore(failure);
        }
        flushed.map(|()| failure)
    }
}

impl Bdev for Disk {
    fn name(&self) -> &str {
        &self.name
    }
    fn aliases(&self) -> Vec<String> {
        self.controller.shared.alias(self.unit).into_iter().collect()
    }
    fn uuid(&self) -> Uuid {
        self.unit().namespace.identity
    }
    fn product_name(&self) -> &'static str {
        Disk::PRODUCT
    }
    fn geometry(&self) -> Geometry {
        self.unit().geometry()
    }
    fn features(&self) -> Features {
        self.unit().features
    }
    fn open(&self, io: &IoContext) -> Result<Box<dyn Channel>, OpenError> {
        let user = User { of: Arc::clone(&self.controller.stop), unit: self.unit as u16 };
        Ok(Box::new(ThreadChannel::new(user, io, self.stats.channel())))
    }
    fn driver_specific(&self) -> Value {
        let shared = &self.controller.shared;
        let Names { serial, model, firmware } = &shared.names;
        let paths = self.controller.paths();
        let nvme = paths.iter().map(|path| {
            let mut shown = json!({
                "trid": path.address.trid(&shared.options.subnqn),
                "ctrlr_data": {
                    "cntlid": path.cntlid,
                    "model_number": model,
                    "serial_number": serial,
                    "firmware_revision": firmware,
                    "subnqn": shared.options.subnqn,
                },
                "ns_data": {
                    "id": self.unit().namespace.nsid,
                    "ana_state": path.access[self.unit].map_or("none", AnaState::name),
                },
                "connected": path.connected,
                "connections": path.connections,
                "current": path.current[self.unit],
                "write_through": shared.write_through,
                "compare_and_write_blocks": self.unit().most.compared,
            });
            if let Some(problem) = &path.problem {
                shown["problem"] = json!(problem);
            }
            shown
        });
        json!({"nvme": nvme.collect::<Vec<_>>(), "mp_policy": "active_passive"})
    }
    fn stats(&self) -> Option<&Arc<Stats>> {
        Some(&self.stats)
    }
    fn flush_latch(&self) -> Option<&FlushLatch> {
        Some(&self.controller.shared.latch)
    }
}
