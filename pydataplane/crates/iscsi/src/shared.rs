//! What is asked for of a device, and what it, its thread and its channels share.

use std::os::fd::OwnedFd;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::Duration;

use bdev::{Closed, Features, FlushLatch, Geometry, ThreadQueue, ThreadRequest};
use parking_lot::Mutex;
use uuid::Uuid;

use crate::address::Address;
use crate::isid::Isid;
use crate::lun::Lun;
use crate::session::Identity;
use crate::unit::Unit;

use Ordering::Relaxed;

/// How long I/O waits for an answer when the process ends.
const END_WITHIN: Duration = Duration::from_secs(2);

/// Seconds without an answer after which I/O fails; 0: never.
static TIMEOUT_S: AtomicU64 = AtomicU64::new(DEFAULT_TIMEOUT_S);

/// [`timeout`], unless it is set.
pub const DEFAULT_TIMEOUT_S: u64 = 60;

/// Sets how long I/O of all devices waits for an answer before it fails; `None`: without end.
pub fn set_timeout(timeout: Option<Duration>) {
    TIMEOUT_S.store(timeout.map_or(0, |timeout| timeout.as_secs().max(1)), Relaxed);
}

/// What [`set_timeout`] has set.
pub fn timeout() -> Option<Duration> {
    Some(TIMEOUT_S.load(Relaxed)).filter(|seconds| *seconds != 0).map(Duration::from_secs)
}

/// What is asked for.
#[derive(Clone, Debug)]
pub struct Options {
    /// Name of the device.
    pub name: String,
    /// Its other name, if it has one.
    pub alias: Option<String>,
    /// The LUN.
    pub address: Address,
    /// Name of the initiator.
    pub initiator: String,
    /// Of its session.
    pub isid: Isid,
    /// Identity; `None`: that of the LUN.
    pub uuid: Option<Uuid>,
    /// Which LUN it has to be; `None`: whatever is there.
    pub expected: Option<Lun>,
    /// It takes no writes, whatever the LUN does.
    pub read_only: bool,
    /// Each write is durable when it is answered (FUA); `None`: where the target is another host, has a cache
    /// and can.
    pub write_through: Option<bool>,
}

/// A device, as all share it.
pub(crate) struct Shared {
    pub(crate) options: Options,
    pub(crate) unit: Unit,
    pub(crate) features: Features,
    pub(crate) write_through: bool,
    pub(crate) num_blocks: AtomicU64,
    pub(crate) queue: ThreadQueue<ThreadRequest>,
    /// The thread sleeps, or is about to.
    pub(crate) asleep: AtomicBool,
    pub(crate) event: OwnedFd,
    pub(crate) stop: AtomicBool,
    /// The process ends: nobody waits for long any more.
    pub(crate) ending: AtomicBool,
    /// Nobody answered for too long: I/O fails until there is a session.
    pub(crate) given_up: AtomicBool,
    pub(crate) connected: AtomicBool,
    pub(crate) sessions: AtomicU64,
    pub(crate) latch: FlushLatch,
    pub(crate) problem: Mutex<Option<String>>,
    pub(crate) closing: Closed,
}

impl Shared {
    pub(crate) fn name(&self) -> &str {
        &self.options.name
    }

    pub(crate) fn identity(&self) -> Identity<'_> {
        let Options { address, initiator, isid, .. } = &self.options;
        Identity { address, initiator, isid: *isid }
    }

    #[inline]
    pub(crate) fn geometry(&self) -> Geometry {
        Geometry { num_blocks: self.num_blocks.load(Relaxed), ..self.unit.capacity.geometry }
    }

    /// Takes a number of blocks over; whether it is another one.
    pub(crate) fn resize(&self, num_blocks: u64) -> bool {
        self.num_blocks.swap(num_blocks, Relaxed) != num_blocks
    }

    #[inline]
    pub(crate) fn has_given_up(&self) -> bool {
        self.given_up.load(Relaxed)
    }

    pub(crate) fn set_given_up(&self, given_up: bool) {
        self.given_up.store(given_up, Relaxed);
    }

    pub(crate) fn give_up(&self) -> Option<Duration> {
        match self.ending.load(Relaxed) {
            true => Some(timeout().map_or(END_WITHIN, |timeout| timeout.min(END_WITHIN))),
            false => timeout(),
        }
    }

    pub(crate) fn is_stopped(&self) -> bool {
        self.stop.load(Relaxed)
    }

    pub(crate) fn set_connected(&self, connected: bool) {
        self.connected.store(connected, Relaxed);
        if connected {
            self.sessions.fetch_add(1, Relaxed);
        }
    }

    pub(crate) fn set_problem(&self, problem: Option<String>) {
        *self.problem.lock() = problem;
    }

    pub(crate) fn closed(&self) {
        self.closing.tell();
    }

    pub(crate) fn next_request(&self) -> Option<ThreadRequest> {
        self.queue.pop()
    }

    /// Wakes the thread, if it sleeps.
    pub(crate) fn wake(&self) {
        if self.asleep.swap(false, Ordering::SeqCst) {
            _ = rustix::io::write(&self.event, &1u64.to_ne_bytes());
        }
    }

    /// The thread is about to sleep; `false`: it must look again.
    pub(crate) fn may_sleep(&self) -> bool {
        self.asleep.swap(true, Ordering::SeqCst);
        self.queue.is_empty() && !self.is_stopped()
    }

    /// The thread has slept, and may have been `woken`.
    pub(crate) fn has_slept(&self, woken: bool) {
        self.asleep.store(false, Ordering::SeqCst);
        if woken {
            let mut count = [0; 8];
            _ = rustix::io::read(&self.event, &mut count);
        }
    }
}
