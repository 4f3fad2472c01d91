//! Guest memory as a vhost-user back end sees it.
//!
//! Owns: the mapped regions of one guest, bounds-checked ranges into them, scatter-gather lists
//! built from them, the dirty log of live migration, the guard against peers that truncate their
//! memory, and how much of the process's addresses each of them may take ([`quota`]). Never knows
//! rings, SCSI or sockets. Called by `virtqueue` (rings), `vhost` (requests), `initiator` (its own
//! memory) and, through [`Sg`], by every bdev.
//!
//! A [`GuestMemory`] never changes: a new memory table is a new value that shares the mappings
//! which stayed. The guest may write any byte at any time; nothing here hands out a Rust
//! reference to guest bytes, only copies ([`GuestRange::get`]) and raw runs ([`IoVec`]).
//!
//! | file | noun |
//! | --- | --- |
//! | `memory`, `mapping` | the regions of one guest; a region's mapping |
//! | `range` | checked runs and lists of them |
//! | `log` | the dirty log of live migration |
//! | `bounce` | host memory in place of the guest's own buffers |
//! | `sigbus` | the guard against truncated files |
//! | `quota` | what one peer may take of things that all share |
//!
//! All other crates reach guest bytes only through the checked types here: what `unsafe` they have is
//! for the kernel's interfaces and for buffers of their own.

mod bounce;
mod log;
mod mapping;
mod memory;
pub mod quota;
mod range;
mod sigbus;

pub use bounce::Bounce;
pub use log::{DirtyLog, LOG_PAGE, LogError};
pub use memory::{GuestMemory, MAX_BYTES, MAX_REGIONS, MapError, RegionSpec};
pub use range::{BadAccess, GuestRange, IoVec, Sg, prefetch, prefetch_write};
pub use sigbus::faults;
