//! vhost-user-scsi and vhost-user-blk: the virtio-scsi or virtio-blk device of a VM, served over a UNIX
//! socket.
//!
//! Owns: the controllers with their sockets and targets, the vhost-user session of each, the
//! request, control and event queues of its device. Turns requests of guests into tasks of
//! [`scsi`], which are jobs of bdev I/Os whoever asks; knows nothing of SCSI commands beyond what each counts as, and nothing of JSON-RPC.
//! Called by the target's RPC methods through [`Controllers`].
//!
//! ```text
//!  RPC threads          controller's thread                       reactors
//!  -----------          -------------------                       --------
//!  Controllers ──order──> controller: accepts, waits
//!                         session: vhost-user messages  ──call──> poller: request queues,
//!                         device: memory, rings, events <─notice─         units
//! ```
//! - `controllers`: the set of controllers ([`Controllers`]); `info`: what is told of them.
//! - `controller`: one controller; its thread (`server`), who may connect (`admission`), what it is told
//!   (`orders`); `socket`, `mailbox`: how it is reached.
//! - `owner`: whose it is; `budget`: what its messages may cost; `lun`: its targets; `stats`: what it
//!   counts.
//! - `session`: the conversation with the peer, and what its `messages` do. The only importers of the
//!   `vhost` crate.
//! - `front`: which device the guest sees, and what follows; what differs for requests is in
//!   `poller/front`, for the configuration space in `virtio_blk`. All else serves both.
//! - `device`: what was negotiated; ring life cycle; control queue, event queue; `events`: what waits for
//!   that one's buffers; `past`: what is known of rings from sessions before.
//! - `placement`: which reactor each queue runs on; `balance`: when one moves, as `device/moving` does it.
//! - `poller`: the I/O path, from the available ring to the used ring. Read it first. `coalescing`: how long
//!   its calls may wait. [`PollerAlone`]: on a thread of its own, to be measured.
//! - [`handover`]: a controller on its way to another process. `keeper`: a session that outlives this one,
//!   kept and gone on with by `controller/kept`.
//! - `defs`: the structures of virtio 1.2 section 5.6.
//! - `error`: why a method of [`Controllers`] did nothing; `failure`: what a guest did that its queue is
//!   closed for.
//!
//! Errors: a guest that breaks the rules of virtio has the queue in question stopped, is counted
//! and logged once; a peer that breaks vhost-user is disconnected; neither harms anybody else.
//! I/O that does not end ends the session that waits for it, after [`Timeouts`]; its memory stays
//! mapped and its volumes claimed until the I/O ends, and until then no other peer is served.

#![forbid(unsafe_code)]

mod balance;
mod budget;
mod coalescing;
mod controller;
mod controllers;
mod defs;
mod device;
mod error;
mod events;
mod failure;
mod front;
pub mod handover;
mod info;
mod keeper;
mod lun;
mod mailbox;
mod owner;
mod past;
mod placement;
mod poller;
mod session;
mod socket;
mod stats;

pub use balance::Balancer;
pub use coalescing::{Coalescing, IOPS_THRESHOLD};
pub use controller::Timeouts;
pub use controllers::{
    ControllerOptions, Controllers, Settings, StatsInfo, SuspendedTarget, TargetConfig,
};
pub use error::{ControllerError, MAX_NAME};
pub use front::Front;
pub use info::{ControllerInfo, SessionInfo, TargetInfo};
pub use keeper::SessionKeeper;
pub use lun::{Between, Suspension, TargetOptions};
pub use owner::{NamedOwner, OwnerInfo, OwnerJournal};
pub use poller::PollerAlone;
pub use scsi::{Characteristics, ErrorPolicy, WaitFor};
pub use socket::{MAX_PATH, SocketError, SocketOptions};
pub use stats::{ControllerStats, LunStats, LunTotals};
