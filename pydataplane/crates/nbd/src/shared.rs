//! What the device, its threads and its channels share.

use std::os::fd::OwnedFd;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering::Relaxed};
use std::sync::{Arc, Weak};
use std::time::Duration;

use bdev::{Features, FlushLatch, Geometry};
use parking_lot::Mutex;
use reactor::{Waker, ticks};

use crate::channelstate::{ChannelState, Orders, tell_late};
use crate::conversation::Rules;
use crate::wire::flag;
use crate::{Address, Terms};

/// How long I/O waits for an answer when the process ends.
const END_WITHIN: Duration = Duration::from_secs(2);

/// A device, as all share it.
pub(crate) struct Shared {
    pub(crate) name: String,
    pub(crate) address: Address,
    pub(crate) terms: Terms,
    pub(crate) features: Features,
    pub(crate) block_size: u32,
    pub(crate) physical_block_size: u32,
    pub(crate) num_blocks: AtomicU64,
    pub(crate) write_through: bool,
    pub(crate) reconnect_delay: Duration,
    pub(crate) give_up: Duration,
    /// The process ends: nobody waits for long any more.
    pub(crate) ending: AtomicBool,
    pub(crate) latch: FlushLatch,
    pub(crate) orders: Orders,
    pub(crate) states: Mutex<Vec<Weak<ChannelState>>>,
    /// A connection that nobody has used.
    pub(crate) spare: Mutex<Option<OwnedFd>>,
    /// All that want a connection have one.
    pub(crate) connected: AtomicBool,
    /// Connections that channels have had.
    pub(crate) connections: AtomicU64,
    /// Why there is no connection.
    pub(crate) problem: Mutex<Option<String>>,
}

impl Shared {
    pub(crate) fn name(&self) -> &str {
        &self.name
    }

    pub(crate) fn address(&self) -> &Address {
        &self.address
    }

    pub(crate) fn terms(&self) -> &Terms {
        &self.terms
    }

    pub(crate) fn multi_conn(&self) -> bool {
        self.terms.multi_conn()
    }

    /// Whether the server takes flushes.
    pub(crate) fn flushes(&self) -> bool {
        self.terms.has(flag::SEND_FLUSH)
    }

    #[inline]
    pub(crate) fn num_blocks(&self) -> u64 {
        self.num_blocks.load(Relaxed)
    }

    pub(crate) fn grow(&self, num_blocks: u64) {
        self.num_blocks.store(num_blocks, Relaxed);
    }

    pub(crate) fn geometry(&self) -> Geometry {
        Geometry {
            block_size: self.block_size,
            physical_block_size: self.physical_block_size,
            num_blocks: self.num_blocks(),
        }
    }

    pub(crate) fn rules(&self) -> Rules {
        Rules {
            block_size: self.block_size,
            payload_max: self.terms.payload_max,
            write_through: self.write_through,
        }
    }

    pub(crate) fn reconnect_delay(&self) -> Duration {
        self.reconnect_delay
    }

    pub(crate) fn give_up(&self) -> Duration {
        match self.ending.load(Relaxed) {
            true => self.give_up.min(END_WITHIN),
            false => self.give_up,
        }
    }

    pub(crate) fn give_up_ticks(&self) -> u64 {
        let us = u64::try_from(self.give_up().as_micros()).unwrap_or(u64::MAX);
        ticks::from_us(us)
    }

    pub(crate) fn set_problem(&self, problem: Option<String>) {
        *self.problem.lock() = problem;
    }

    /// Returns the state of a new channel, of the thread that `waker` wakes.
    pub(crate) fn register(&self, waker: Waker) -> Arc<ChannelState> {
        let state = Arc::new(ChannelState::new(waker));
        let mut states = self.states.lock();
        states.retain(|state| state.strong_count() > 0);
        states.push(Arc::downgrade(&state));
        state
    }

    /// Has the keeper bring a connection, after the end of the `old` one.
    pub(crate) fn ask_for_connection(&self, state: &Arc<ChannelState>, old: Option<OwnedFd>) {
        self.orders.want(state, old);
    }

    pub(crate) fn find_late(&self) {
        tell_late(&self.states.lock(), self.give_up_ticks());
    }
}
