//! The bdev.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::thread;

use bdev::{
    Bdev, Channel, Closed, Features, FlushFailure, FlushLatch, Geometry, OpenError, Registry,
    Stats, SyncChannel, ThreadChannel, ThreadQueue, ThreadRequest, Threaded, Waiter,
};
use parking_lot::Mutex;
use reactor::IoContext;
use rustix::event::{EventfdFlags, eventfd};
use serde_json::{Value, json};
use uuid::Uuid;

use crate::address::Address;
use crate::isid::Isid;
use crate::lun::Lun;
use crate::luns::Found;
use crate::session::{Identity, Session};
use crate::shared::{Options, Shared};
use crate::unit::{Capacity, Unit};
use crate::worker::Worker;

use Ordering::Relaxed;

/// I/Os of all channels that the thread has not taken.
const QUEUE: usize = 4096;

/// Why there is no such device.
#[derive(Debug, thiserror::Error)]
#[error("cannot open {name}: {why}")]
pub struct CreateError {
    /// Name of the device.
    pub name: String,
    /// The cause, as a clause.
    pub why: String,
    /// The target may be there, or let in, later.
    pub passes: bool,
    /// It has not answered for too long.
    pub silent: bool,
}

/// The process ends, and serves no guest any more: what the rest of it asks of targets that do not answer fails
/// after a moment.
pub fn end_all(registry: &Registry) {
    for bdev in registry.list() {
        if let Some(disk) = registry.get_as::<Disk>(bdev.name()) {
            disk.shared.ending.store(true, Relaxed);
            disk.shared.wake();
        }
    }
}

/// Logs in, as somebody else than any device, and finds out what the LUN is; takes some seconds at most.
///
/// # Errors
/// In one clause: the target is not there, lets nobody in, or has no such disk.
pub fn reach(address: &Address, initiator: &str) -> Result<(), String> {
    let identity = Identity { address, initiator, isid: Isid::random() };
    let established = Session::establish(identity, None, &mut || true);
    let (session, _) = established.map_err(|no| no.why)?;
    session.log_out();
    Ok(())
}

/// Ends the device's thread with its last user.
struct StopOnDrop(Arc<Shared>);

impl Drop for StopOnDrop {
    fn drop(&mut self) {
        self.0.stop.store(true, Relaxed);
        self.0.wake();
    }
}

/// The device, as its channels have it.
struct User(Arc<StopOnDrop>);

impl Threaded for User {
    #[inline]
    fn geometry(&self) -> Geometry {
        self.0.0.geometry()
    }
    fn features(&self) -> &Features {
        &self.0.0.features
    }
    fn latch(&self) -> &FlushLatch {
        &self.0.0.latch
    }
    fn flushes(&self) -> bool {
        self.0.0.unit.mode.cache
    }
    fn has_given_up(&self) -> bool {
        self.0.0.has_given_up()
    }
    fn compared_max(&self) -> u64 {
        self.0.0.unit.limits.compared.into()
    }
    fn hand_over(
        &self,
        request: ThreadRequest,
        waiter: Option<&Arc<Waiter>>,
    ) -> Result<(), ThreadRequest> {
        let pushed = self.0.0.queue.push(request, waiter);
        self.0.0.wake();
        pushed
    }
}

/// A LUN of an iSCSI target as a bdev.
pub struct Disk {
    shared: Arc<Shared>,
    stop: Arc<StopOnDrop>,
    uuid: Uuid,
    stats: Arc<Stats>,
}

impl Disk {
    /// What [`Bdev::product_name`] says, as SPDK's.
    pub const PRODUCT: &'static str = "iSCSI LUN";

    /// Logs in; takes some seconds at most. `registry` is told when the size changes.
    ///
    /// # Errors
    /// There is no library; the target is not there or lets nobody in; or the LUN is no disk that a bdev can
    /// have.
    pub fn create(registry: &Registry, options: Options) -> Result<Arc<Disk>, CreateError> {
        let name = options.name.clone();
        let failed =
            |why: String, passes| CreateError { name: name.clone(), why, passes, silent: false };
        crate::Library::loaded().map_err(|e| failed(e.to_string(), false))?;
        let Options { address, initiator, isid, .. } = &options;
        let identity = Identity { address, initiator, isid: *isid };
        let (session, unit) = Session::establish(identity, None, &mut || true).map_err(|no| {
            CreateError { silent: no.silent, ..failed(format!("{address}: {}", no.why), true) }
        })?;
        let can = unit.mode.fua && unit.mode.cache;
        if options.write_through == Some(true) && unit.mode.cache && !unit.mode.fua {
            let why = format!("{address}: its LUN makes no write durable by itself (FUA)");
            return Err(failed(why, false));
        }
        let write_through = can && options.write_through.unwrap_or(!address.is_local());
        if let Some(expected) = options.expected {
            expected.check(unit.lun()).map_err(|why| failed(format!("{address}: {why}"), true))?;
        }
        if unit.mode.cache && !write_through && !address.is_local() {
            tracing::warn!(
                bdev = name,
                "its LUN has a volatile cache, and no write is made durable by itself (FUA): after a loss of the \
                 session flushes fail until that is cleared"
            );
        }
        let uuid = options.uuid.unwrap_or(unit.identity);
        let mut features = unit.features(write_through);
        features.read_only |= options.read_only;
        let event = eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)
            .map_err(|e| failed(e.to_string(), false))?;
        let shared = Arc::new(Shared {
            unit,
            features,
            write_through,
            num_blocks: AtomicU64::new(unit.capacity.geometry.num_blocks),
            queue: ThreadQueue::new(QUEUE),
            asleep: AtomicBool::new(false),
            event,
            stop: AtomicBool::new(false),
            ending: AtomicBool::new(false),
            given_up: AtomicBool::new(false),
            connected: AtomicBool::new(true),
            sessions: AtomicU64::new(1),
            latch: FlushLatch::default(),
            problem: Mutex::default(),
            closing: Closed::default(),
            options,
        });
        let stop = Arc::new(StopOnDrop(Arc::clone(&shared)));
        let worker = Worker::new(Arc::clone(&shared), registry.clone(), session);
        let started = thread::Builder::new().name("iscsi".into()).spawn(|| worker.run());
        started.map_err(|e| failed(e.to_string(), false))?;
        Ok(Arc::new(Disk { shared, stop, uuid, stats: Stats::new() }))
    }

    /// Which LUN it is.
    pub fn lun(&self) -> Lun {
        self.shared.unit.lun()
    }

    /// The LUN as one of its target's.
    pub fn found(&self) -> Found {
        let capacity = Capacity { geometry: self.geometry(), ..self.shared.unit.capacity };
        let medium = Unit { capacity, ..self.shared.unit }.medium();
        Found { lun: self.shared.options.address.lun(), is: Ok(medium) }
    }

    /// Tells when it has logged out.
    pub fn closing(&self) -> Closed {
        self.shared.closing.clone()
    }

    /// Lets flushes through again after one has failed, if the target flushes now. Returns what was latched.
    /// What was written before that failure may be lost all the same.
    ///
    /// # Errors
    /// The flush fails again, or cannot be tried; then the latch stays.
    pub fn clear_flush_failure(&self) -> Result<Option<FlushFailure>, String> {
        let failure = self.shared.latch.clear();
        let flushed = SyncChannel::open(self)
            .map_err(|e| e.to_string())
            .and_then(|mut channel| channel.flush().map_err(|e| e.to_string()));
        if let (Err(_), Some(failure)) = (&flushed, failure) {
            self.shared.latch.restore(failure);
        }
        flushed.map(|()| failure)
    }
}

impl Bdev for Disk {
    fn name(&self) -> &str {
        self.shared.name()
    }
    fn aliases(&self) -> Vec<String> {
        self.shared.options.alias.iter().cloned().collect()
    }
    fn uuid(&self) -> Uuid {
        self.uuid
    }
    fn product_name(&self) -> &'static str {
        Disk::PRODUCT
    }
    fn geometry(&self) -> Geometry {
        self.shared.geometry()
    }
    fn features(&self) -> Features {
        self.shared.features
    }
    fn open(&self, io: &IoContext) -> Result<Box<dyn Channel>, OpenError> {
        let user = User(Arc::clone(&self.stop));
        Ok(Box::new(ThreadChannel::new(user, io, self.stats.channel())))
    }
    fn driver_specific(&self) -> Value {
        let Shared { options, unit, .. } = &*self.shared;
        let mut iscsi = json!({
            "initiator_iqn": options.initiator,
            "url": options.address.to_string(),
            "isid": options.isid.to_string(),
            "lun_uuid": unit.identity,
            "lun_block_size": unit.capacity.geometry.block_size,
            "connected": self.shared.connected.load(Relaxed),
            "sessions": self.shared.sessions.load(Relaxed),
            "write_through": self.shared.write_through,
            "compare_and_write_blocks": unit.limits.compared,
        });
        if let Some(problem) = &*self.shared.problem.lock() {
            iscsi["problem"] = json!(problem);
        }
        json!({"iscsi": iscsi})
    }
    fn stats(&self) -> Option<&Arc<Stats>> {
        Some(&self.stats)
    }
    fn flush_latch(&self) -> Option<&FlushLatch> {
        Some(&self.shared.latch)
    }
}
