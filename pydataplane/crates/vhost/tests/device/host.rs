//! The side under test: reactors, bdevs and one controller `vm0`.

use std::path::PathBuf;
use std::sync::mpsc::{Sender, channel};
use std::sync::{Arc, Mutex};
use std::time::Instant;

use bdev::testing::FaultBdev;
use bdev::{
    Bdev, Channel, Completion, Features, Geometry, Io, Malloc, MallocOptions, Null, Op, OpenError,
    Registry, Submit,
};
use reactor::{Idle, IoContext, Reactors};
use uuid::Uuid;
use vhost_scsi::{ControllerOptions, Controllers, Settings, TargetOptions, Timeouts};

use crate::guest::DEADLINE;

pub struct Host {
    pub controllers: Controllers,
    pub registry: Registry,
    reactors: Option<Reactors>,
    dir: Arc<tempfile::TempDir>,
}

impl Host {
    /// Reactors that go to sleep soon, and the controller `vm0` without targets.
    pub fn new(reactors: usize) -> Host {
        Host::with_timeouts(reactors, Timeouts::default())
    }

    /// As `new`, waiting for I/O no longer than that.
    pub fn with_timeouts(reactors: usize, timeouts: Timeouts) -> Host {
        let host = Host::in_folder(reactors, timeouts, Arc::new(tempfile::tempdir().unwrap()));
        host.controllers.create("vm0", ControllerOptions::default()).unwrap();
        host
    }

    /// Another process with the same folders, which has no controller yet.
    pub fn beside(&self, reactors: usize) -> Host {
        Host::in_folder(reactors, Timeouts::default(), self.dir.clone())
    }

    fn in_folder(reactors: usize, timeouts: Timeouts, dir: Arc<tempfile::TempDir>) -> Host {
        let reactors =
            Reactors::start(&vec![None; reactors], Idle::Adaptive { spin_us: 20 }).unwrap();
        let registry = Registry::new();
        let directory = dir.path().into();
        let marks = Some(dir.path().join("marks"));
        let settings = Settings { directory, mode: 0o660, uid: None, gid: None, timeouts, marks };
        let controllers = Controllers::new(registry.clone(), reactors.handles(), settings);
        Host { controllers, registry, reactors: Some(reactors), dir }
    }

    /// As `new`, with a malloc disk of 4 MiB as target 0.
    pub fn with_disk(reactors: usize) -> Host {
        let host = Host::new(reactors);
        host.malloc("disk0");
        host.add(0, "disk0");
        host
    }

    pub fn socket(&self) -> PathBuf {
        self.dir.path().join("vm0")
    }

    /// The mark that requests of `vm0` may be in flight.
    pub fn mark(&self) -> PathBuf {
        self.dir.path().join("marks/vm0")
    }

    pub fn malloc(&self, name: &str) {
        let options = MallocOptions {
            name: name.into(),
            block_size: 512,
            physical_block_size: 0,
            num_blocks: 8192,
            uuid: None,
        };
        self.registry.register(Malloc::create(options).unwrap()).unwrap();
    }

    pub fn null(&self, name: &str) -> Arc<Null> {
        let null = Null::create(name, 512, 8192, None).unwrap();
        self.registry.register(null.clone()).unwrap();
        null
    }

    /// A host whose target 0 is a gate.
    pub fn gated(reactors: usize) -> (Host, Gate) {
        let host = Host::new(reactors);
        let gate = host.gate("gate");
        host.add(0, "gate");
        (host, gate)
    }

    pub fn gate(&self, name: &str) -> Gate {
        let disk = FaultBdev::new(name, 512, 8192);
        disk.defer(Some(1));
        self.registry.register(disk.clone()).unwrap();
        Gate(disk)
    }

    pub fn turnstile(&self, name: &str) -> Arc<Turnstile> {
        let turnstile = Turnstile::new(name);
        self.registry.register(turnstile.clone()).unwrap();
        turnstile
    }

    pub fn add(&self, target: u8, bdev: &str) {
        let options = TargetOptions::default();
        assert_eq!(
            self.controllers.add_target("vm0", i64::from(target), bdev, options).unwrap(),
            target
        );
    }

    /// What target 0 is on.
    pub fn shown(&self) -> Arc<dyn Bdev> {
        let (_, unit) = self.controllers.unit("vm0", 0).unwrap();
        Arc::clone(unit.bdev())
    }

    /// Waits until the controller has seen that its peer left, whose I/O may be in flight.
    pub fn wait_until_left(&self) {
        // Its thread answers when it is through with the last message, which may have started the rings.
        self.controllers.describe();
        wait_until("the peer left", || {
            let session = self.controllers.list(Some("vm0")).unwrap().remove(0).session;
            session.is_none_or(|s| !s.started)
        });
    }

    /// Waits until nobody is connected.
    pub fn wait_until_free(&self) {
        wait_until("the peer is gone", || {
            self.controllers.list(Some("vm0")).unwrap()[0].session.is_none()
        });
    }

    /// Keeps the first reactor from all else until the sender is dropped.
    pub fn keep_reactor(&self) -> Sender<()> {
        self.keep(0)
    }

    /// As `keep_reactor`, the one in that place.
    pub fn keep(&self, place: usize) -> Sender<()> {
        let (keep, kept) = channel::<()>();
        let (begin, begun) = channel();
        self.reactors.as_ref().unwrap().handles()[place].send(move |_| {
            begin.send(()).unwrap();
            _ = kept.recv();
        });
        begun.recv().unwrap();
        keep
    }

    pub fn stats(&self) -> vhost_scsi::StatsInfo {
        self.controllers.stats(Some("vm0"), None).unwrap().remove(0)
    }
}

impl Drop for Host {
    fn drop(&mut self) {
        // However short the time is that methods have here.
        let stopped = self.controllers.stop_within(DEADLINE);
        assert!(stopped || std::thread::panicking(), "no I/O is left");
        self.reactors.take().unwrap().stop();
    }
}

pub fn wait_until(what: &str, mut is: impl FnMut() -> bool) {
    let since = Instant::now();
    while !is() {
        assert!(since.elapsed() < DEADLINE, "{what}: never");
        std::thread::yield_now();
    }
}

/// A disk of 4 MiB that keeps every I/O waiting while its gate is shut.
#[derive(Clone)]
pub struct Gate(Arc<FaultBdev>);

impl Gate {
    pub fn shut(&self) {
        self.0.hold();
    }

    pub fn open(&self) {
        self.0.release();
    }

    /// Reads that went through.
    pub fn reads(&self) -> u64 {
        self.0.stats().unwrap().snapshot().op(Op::Read).ops
    }

    /// Writes that went through.
    pub fn writes(&self) -> u64 {
        self.0.stats().unwrap().snapshot().op(Op::Write).ops
    }

    pub fn uuid(&self) -> Uuid {
        self.0.uuid()
    }

    /// I/Os that wait at the gate.
    pub fn waiting(&self) -> usize {
        self.0.held()
    }

    /// Waits until so many I/Os wait at the gate.
    pub fn wait_for(&self, waiting: usize) {
        wait_until(&format!("{waiting} I/Os wait"), || self.0.held() == waiting);
    }
}

/// A disk that takes no more than four I/Os at a time.
pub struct Narrow(pub Arc<FaultBdev>);

impl Bdev for Narrow {
    fn name(&self) -> &str {
        self.0.name()
    }
    fn aliases(&self) -> Vec<String> {
        Vec::new()
    }
    fn uuid(&self) -> Uuid {
        self.0.uuid()
    }
    fn product_name(&self) -> &'static str {
        "Narrow"
    }
    fn geometry(&self) -> Geometry {
        self.0.geometry()
    }
    fn features(&self) -> Features {
        self.0.features()
    }
    fn open(&self, io: &IoContext) -> Result<Box<dyn Channel>, OpenError> {
        Ok(Box::new(NarrowChannel { inner: self.0.open(io)?, in_flight: 0 }))
    }
    fn driver_specific(&self) -> serde_json::Value {
        serde_json::Value::Null
    }
}

struct NarrowChannel {
    inner: Box<dyn Channel>,
    in_flight: u32,
}

impl Channel for NarrowChannel {
    fn submit(&mut self, io: &Io) -> Submit {
        if self.in_flight == 4 {
            return Submit::Full;
        }
        let submitted = self.inner.submit(io);
        self.in_flight += u32::from(submitted == Submit::Pending);
        submitted
    }

    fn poll(&mut self, done: &mut Vec<Completion>) -> u32 {
        let count = self.inner.poll(done);
        self.in_flight -= count;
        count
    }
}

/// A disk whose every I/O is over within `submit`, which waits for the test to let it through: the
/// reactor stands still meanwhile.
pub struct Turnstile {
    name: String,
    uuid: Uuid,
    shared: Arc<Mutex<Passes>>,
}

#[derive(Default)]
struct Passes {
    waiting: usize,
    allowed: usize,
}

impl Turnstile {
    fn new(name: &str) -> Arc<Turnstile> {
        let uuid = Uuid::new_v5(&Uuid::NAMESPACE_OID, name.as_bytes());
        Arc::new(Turnstile { name: name.into(), uuid, shared: Arc::default() })
    }

    /// Waits until that many I/Os (one a reactor) stand before it.
    pub fn wait_for(&self, waiting: usize) {
        wait_until("an I/O waits", || self.shared.lock().unwrap().waiting == waiting);
    }

    /// Whether all that were let through are, and another one stands before it.
    pub fn is_at_end(&self) -> bool {
        let passes = self.shared.lock().unwrap();
        (passes.waiting, passes.allowed) == (1, 0)
    }

    /// Lets so many more through.
    pub fn let_through(&self, count: usize) {
        self.shared.lock().unwrap().allowed += count;
    }
}

impl Bdev for Turnstile {
    fn name(&self) -> &str {
        &self.name
    }
    fn aliases(&self) -> Vec<String> {
        Vec::new()
    }
    fn uuid(&self) -> Uuid {
        self.uuid
    }
    fn product_name(&self) -> &'static str {
        "Turnstile"
    }
    fn geometry(&self) -> Geometry {
        Geometry { block_size: 512, physical_block_size: 512, num_blocks: 8192 }
    }
    fn features(&self) -> Features {
        Features::default()
    }
    fn open(&self, _io: &IoContext) -> Result<Box<dyn Channel>, OpenError> {
        Ok(Box::new(TurnstileChannel(self.shared.clone())))
    }
    fn driver_specific(&self) -> serde_json::Value {
        serde_json::Value::Null
    }
}

struct TurnstileChannel(Arc<Mutex<Passes>>);

impl Channel for TurnstileChannel {
    fn submit(&mut self, _io: &Io) -> Submit {
        self.0.lock().unwrap().waiting += 1;
        wait_until("it is let through", || {
            let mut passes = self.0.lock().unwrap();
            let through = passes.allowed > 0;
            passes.allowed -= usize::from(through);
            passes.waiting -= usize::from(through);
            through
        });
        Submit::Done(Ok(()))
    }

    fn poll(&mut self, _done: &mut Vec<Completion>) -> u32 {
        0
    }
}
