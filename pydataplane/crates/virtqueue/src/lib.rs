//! The split virtqueue, device side (virtio 1.2, 2.7).
//!
//! Owns: where a driver's rings lie, taking chains from the available ring in batches, walking a
//! chain into a flat list of checked runs, giving chains back through the used ring, and when to
//! notify. Never knows what a request means, nor eventfds: [`SplitQueue::publish`] says whether
//! to call, the caller does it.
//!
//! One request, in order:
//! 1. [`SplitQueue::pop`] takes the heads that are ready: one read of the available index for a
//!    batch, prefetching descriptors and indirect tables;
//! 2. [`SplitQueue::walk`] turns a head into [`Segments`]: device-readable runs first, then
//!    device-writable ones, each within guest memory, or one [`ChainError`];
//! 3. the caller splits them by byte offset ([`Segments::split`]), as any framing is
//!    allowed (VIRTIO_F_ANY_LAYOUT, 2.7.4), and does the I/O;
//! 4. [`SplitQueue::push_used`] for each, then one [`SplitQueue::publish`].
//!
//! | file | noun |
//! | --- | --- |
//! | `queue` | the rings of one queue |
//! | `chain` | descriptors, and what can be wrong with a chain of them |
//! | `segments` | the memory of one chain: the walk along it, and cuts |
//! | `inflight` | requests in flight, in memory that outlives the process |
//! | `steps`, `crash` | tests: a process that is killed after any store |
//!
//! A queue may track what is in flight in memory that the front end keeps ([`Inflight`]), so that
//! after a crash of this process the next one submits it again ([`SplitQueue::track`]).
//!
//! Each value of the guest is read exactly once into a local, checked, then used. A queue
//! belongs to one thread; nothing on this path allocates, locks, logs or blocks: all room for chains
//! is allocated when a queue is set up.

mod chain;
mod inflight;
mod queue;
mod segments;
mod steps;

// Miri has no memfd.
#[cfg(all(test, not(miri)))]
mod crash;

pub use chain::{ChainError, Desc, Head, MAX_QUEUE_SIZE};
pub use inflight::{Inflight, InflightError, InflightRegion};
pub use queue::{AddressSpace, ConfigError, QueueConfig, QueueError, SplitQueue};
pub use segments::{Halves, MAX_SEGMENTS, Segments};
