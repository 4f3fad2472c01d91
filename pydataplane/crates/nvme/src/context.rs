//! What the thread of a controller and its paths work on.

use std::sync::Arc;
use std::time::Instant;

use bdev::{FlushCause, Registry};
use reactor::IoContext;

use crate::address::Address;
use crate::requests::Requests;
use crate::shared::Shared;

/// What the paths work on.
pub(crate) struct Context {
    pub shared: Arc<Shared>,
    pub registry: Registry,
    pub io: IoContext,
    pub requests: Requests,
    /// Of this turn.
    pub now: Instant,
    /// What is shown of the paths has changed.
    pub changed: bool,
    /// There is a connection by another path than the one at work.
    pub others_up: bool,
}

impl Context {
    /// Takes a number of blocks over.
    pub(crate) fn resize(&self, unit: usize, blocks: u64) {
        let of = &self.shared.units[unit];
        let old = of.geometry().num_blocks;
        if of.resize(blocks) {
            let bdev = self.shared.bdev(unit);
            match blocks < old {
                true => tracing::warn!(bdev, "its namespace shrank from {old} blocks to {blocks}"),
                false => tracing::info!(bdev, "its namespace grew from {old} blocks to {blocks}"),
            }
            self.registry.notify_resized(&bdev);
        }
    }

    /// There was no connection, and is one again: what its cache held may be gone.
    pub(crate) fn came_back(&mut self, address: &Address) {
        if self.requests.take_unflushed() && self.shared.loses_cache(address) {
            tracing::error!(
                controller = self.shared.name(),
                "what was written since the last flush may be lost: its target was away, and has a volatile cache"
            );
            self.shared.latch.set(FlushCause::Flush, None);
        }
    }
}
