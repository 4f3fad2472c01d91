//! The bdev.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering::Relaxed};
use std::thread;
use std::time::Duration;

use bdev::{
    Bdev, Channel, Features, FlushFailure, FlushLatch, Geometry, OpenError, Registry, Stats,
    SyncChannel,
};
use parking_lot::Mutex;
use reactor::IoContext;
use serde_json::{Value, json};
use uuid::Uuid;

use crate::Address;
use crate::carrier::{self, CarriedChannel};
use crate::channel::NbdChannel;
use crate::channelstate::Orders;
use crate::connect::{CONNECT_TIMEOUT, ConnectError, establish};
use crate::keeper::Keeper;
use crate::life::Life;
use crate::shared::Shared;
use crate::wire::flag;

/// What is asked for.
#[derive(Clone, Debug)]
pub struct Options {
    /// Name of the device.
    pub name: String,
    /// The server and its export.
    pub address: Address,
    /// Bytes of a logical block, 512 or 4096; `None`: the least that the server takes.
    pub block_size: Option<u32>,
    /// Refuse writes.
    pub read_only: bool,
    /// Identity; `None`: a random one.
    pub uuid: Option<Uuid>,
    /// Each write is durable when it is answered (FUA); `None`: where the server is another host and can.
    pub write_through: Option<bool>,
    /// Time between two attempts to connect.
    pub reconnect_delay: Duration,
    /// Time without an answer after which I/O fails.
    pub give_up: Duration,
}

/// Why there is no such device.
#[derive(Debug, thiserror::Error)]
#[error("cannot open {name}: {why}")]
pub struct CreateError {
    /// Name of the device.
    pub name: String,
    /// The cause, as a clause.
    pub why: String,
    /// The errno of the operating system, if it is that which said no.
    pub errno: Option<i32>,
    /// The server may be there later.
    pub unreachable: bool,
}

/// The process ends, and serves no guest any more: what the rest of it, such as an lvstore that is unloaded, asks
/// of servers that do not answer fails after a moment.
pub fn end_all(registry: &Registry) {
    for bdev in registry.list() {
        if let Some(nbd) = registry.get_as::<Nbd>(bdev.name()) {
            nbd.shared.ending.store(true, Relaxed);
            nbd.shared.orders.wake();
        }
    }
}

/// A disk that an NBD server has.
pub struct Nbd {
    shared: Arc<Shared>,
    life: Arc<Life>,
    uuid: Uuid,
    stats: Arc<Stats>,
}

impl Nbd {
    /// [`Bdev::product_name`].
    pub const PRODUCT: &str = "NBD disk";

    /// Connects to the server; takes some seconds at most. `registry` is told when the size changes.
    ///
    /// # Errors
    /// The server is not there, or does not answer; there is no agreement with it; or it has nothing of
    /// what was asked for.
    pub fn create(registry: &Registry, options: Options) -> Result<Arc<Nbd>, CreateError> {
        let Options { name, address, block_size, read_only, uuid, write_through, .. } = options;
        let wrong =
            |why: String| CreateError { name: name.clone(), why, errno: None, unreachable: false };
        let failed = |e: ConnectError| CreateError {
            errno: e.errno(),
            unreachable: e.errno().is_some(),
            ..wrong(e.to_string())
        };
        let os =
            |e: std::io::Error| CreateError { errno: e.raw_os_error(), ..wrong(e.to_string()) };
        let (fd, terms) = establish(&address, CONNECT_TIMEOUT).map_err(failed)?;
        let geometry = terms.geometry(block_size).map_err(|e| wrong(format!("{address}: {e}")))?;
        let durable = terms.has(flag::SEND_FUA);
        if write_through == Some(true) && !durable {
            return Err(wrong(format!(
                "{address}: the server makes no write durable by itself (FUA)"
            )));
        }
        let write_through = write_through.unwrap_or(durable && !address.is_local());
        let shared = Arc::new(Shared {
            features: terms.features(&geometry, read_only, write_through),
            terms,
            address,
            block_size: geometry.block_size,
            physical_block_size: geometry.physical_block_size,
            num_blocks: AtomicU64::new(geometry.num_blocks),
            write_through,
            reconnect_delay: options.reconnect_delay,
            give_up: options.give_up,
            ending: AtomicBool::new(false),
            latch: FlushLatch::default(),
            orders: Orders::new().map_err(os)?,
            states: Mutex::default(),
            spare: Mutex::default(),
            connected: AtomicBool::new(true),
            connections: AtomicU64::new(0),
            problem: Mutex::default(),
            name: name.clone(),
        });
        let keeper = Keeper::new(shared.clone(), registry.clone(), fd);
        // Before anything can fail: it ends the thread.
        let mut life = Life { shared: shared.clone(), carrier: None };
        thread::Builder::new().name("nbd keeper".into()).spawn(|| keeper.run()).map_err(os)?;
        if !shared.multi_conn() {
            life.carrier = Some(carrier::start(&shared).map_err(os)?);
        }
        Ok(Arc::new(Nbd {
            shared,
            life: Arc::new(life),
            uuid: uuid.unwrap_or_else(Uuid::new_v4),
            stats: Stats::new(),
        }))
    }

    /// The server and its export.
    pub fn address(&self) -> &Address {
        &self.shared.address
    }

    /// Lets flushes through again after one has failed, if the server flushes now. Returns what was
    /// latched. What was written before that failure may be lost all the same.
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

impl Bdev for Nbd {
    fn name(&self) -> &str {
        &self.shared.name
    }
    fn aliases(&self) -> Vec<String> {
        Vec::new()
    }
    fn uuid(&self) -> Uuid {
        self.uuid
    }
    fn product_name(&self) -> &'static str {
        Self::PRODUCT
    }
    fn geometry(&self) -> Geometry {
        self.shared.geometry()
    }
    fn features(&self) -> Features {
        self.shared.features
    }
    fn open(&self, io: &IoContext) -> Result<Box<dyn Channel>, OpenError> {
        let stats = self.stats.channel();
        if let Some(carrier) = &self.life.carrier {
            let channel = CarriedChannel::new(&self.shared, carrier, io, stats, self.life.clone());
            return Ok(Box::new(channel));
        }
        let life = Some(self.life.clone());
        let channel =
            NbdChannel::open(&self.shared, io, Some(stats), life).map_err(|e| OpenError {
                name: self.shared.name.clone(),
                why: format!(
                    "the kernel gives no io_uring ({e}): check kernel.io_uring_disabled and seccomp"
                ),
            })?;
        Ok(Box::new(channel))
    }
    fn driver_specific(&self) -> Value {
        let shared = &self.shared;
        let mut nbd = json!({
            "uri": shared.address.to_string(),
            "connected": shared.connected.load(Relaxed),
            "connections": shared.connections.load(Relaxed),
            "multi_conn": shared.multi_conn(),
            "max_request_bytes": shared.terms.payload_max,
            "write_through": shared.write_through,
            "reconnect_delay_s": shared.reconnect_delay.as_secs(),
            "give_up_s": shared.give_up.as_secs(),
        });
        if let Some(problem) = &*shared.problem.lock() {
            nbd["problem"] = json!(problem);
        }
        json!({"nbd": nbd})
    }
    fn stats(&self) -> Option<&Arc<Stats>> {
        Some(&self.stats)
    }
    fn flush_latch(&self) -> Option<&FlushLatch> {
        Some(&self.shared.latch)
    }
}
