//! A SCSI direct-access disk on a bdev channel.
//!
//! Owns: command decoding, INQUIRY and VPD pages, mode pages, sense data, unit attentions and the
//! one table from [`bdev::IoError`] to sense. Never knows vhost or virtqueues; works for any
//! transport that gives it a CDB and two scatter-gather lists.
//!
//! # Objects
//! - [`LunShared`]: one per logical unit, shared by all threads: identity, size as the initiators
//!   know it, read-only flag, and the [`Nexus`]es it must tell of changes.
//! - [`Nexus`]: one per initiator session (SAM-5's I_T nexus), with its pending unit attentions.
//! - [`Lun`]: one per (session, thread): a bdev channel of its own. Never shared.
//! - [`Task`]: one command in flight, embedded in the transport's preallocated slot.
//!
//! # Calls
//! ```text
//! LunShared::new(bdev, options)        attach              (control thread)
//! shared.connect() -> nexus            session start       (control thread)
//! Lun::new(shared, nexus, channel)     on the I/O thread
//!   task.prepare(cdb, out, in); lun.start(task) -> Done | Overrun | Pending
//!   lun.poll(&mut done); for c in done { lun.resume(slot[c.tag].task, c.result) }
//! shared.notify_resized() / reset()    any thread
//! ```

#![forbid(unsafe_code)]

mod lun;
mod response;
mod shared;
mod task;

pub use lun::{Lun, Outcome, missing_lun};
pub use response::{Response, SENSE_LEN, Status};
pub use shared::{LunError, LunOptions, LunShared, Nexus, UnitAttention};
pub use task::{CDB_LEN, Task};
