//! A SCSI direct-access disk on a bdev channel.
//!
//! Owns: command decoding, INQUIRY and VPD pages, mode pages, sense data, unit attentions, the answers
//! for units that are not there and for the REPORT LUNS well-known one ([`report_luns_unit`]), and the
//! one table from [`bdev::IoError`] to sense. Never knows vhost or virtqueues; works for any
//! transport that gives it a CDB and two scatter-gather lists.
//!
//! # Objects
//! - `Volume`: one per volume, shared by its units of all controllers: persistent reservations
//!   (`reservations`), a SANITIZE or FORMAT UNIT (`sanitize`), what MODE SELECT has set (`mode`), and who may read, decide
//!   and write.
//! - [`LunShared`]: one per logical unit, shared by all threads: identity, size as the initiators
//!   know it, read-only flag, and the [`Nexus`]es it must tell of changes.
//! - [`Nexus`]: one per initiator session (SAM-5's I_T nexus), with its pending unit attentions.
//! - [`Lun`]: one per (session, thread): a bdev channel of its own. Never shared.
//! - [`Task`]: one command in flight, embedded in the transport's preallocated slot.
//!
//! # Files
//! | file | noun |
//! | --- | --- |
//! | `lun`, `task` | one command from the CDB to the response: read them from top to bottom |
//! | `opcode`, `block`, `protect` | the fields of a CDB; commands on blocks, with and without protection information |
//! | `diagnostic`, `medium` | the self-test; a medium that can be removed |
//! | `job` | the bdev I/Os that a command takes |
//! | `inquiry`, `mode`, `log`, `report`, `ports`, `reply` | commands that answer from memory |
//! | `sense`, `response`, `policy` | how a command ended; whether it is answered or waits |
//! | `shared`, `nexus`, `options`, `characteristics` | a unit as all threads, and as one initiator, know it |
//! | `volume`, `reservations`, `sanitize`, `records` | a volume as all its units share it; what outlives the process |
//! | `copy` | EXTENDED COPY, and copies by ROD token (ODX) |
//! | `aside` | threads that work for commands |
//! | `watch` | blocks of a volume that do not change unnoticed, or not at all |
//! | `missing`, `well_known` | units that are not there, and the one of REPORT LUNS |
//!
//! # Calls
//! ```text
//! LunShared::new(bdev, options)        attach              (control thread)
//! shared.connect() -> nexus            session start       (control thread)
//! Lun::new(shared, nexus, channel)     on the I/O thread
//!   task.prepare(cdb, out, in); lun.start(task) -> Done | Overrun | Pending | Suspended
//!   lun.poll(&mut done); for c in done { lun.resume(slot[c.tag].task, c.result) }
//! shared.notify_resized() / reset()    any thread
//! ```
//! A transport without CDBs has [`Task::prepare_plain`]: the same jobs, policies and
//! reservations, without unit attentions.
//!
//! # One command
//! [`Lun`] decodes the CDB by one table (also that of REPORT SUPPORTED OPERATION CODES), reports
//! a pending unit attention, refuses reserved bits, and either answers from memory or plans a job:
//! `[flush] [step ...] [flush] [verify step ...]`, each a bdev I/O, one after the other. READ and WRITE are one
//! step straight between the initiator's buffers and the bdev.
//!
//! What is no I/O of the thread's (a record that is to be kept, a SANITIZE, a copy of `copy`) is done
//! by a thread of its own, and the task is looked at again until that has ended.
//!
//! # Blocks
//! A unit's logical blocks may be larger than the bdev's ([`LunOptions::block_size`]). Everything
//! here counts the unit's; [`Lun`] turns them into the bdev's where it makes an I/O.
//!
//! # Protection information
//! Where the bdev's blocks have it, the bdev compares it with them in all reads and writes. A command whose
//! CDB asks to carry it (`protect`) is a step of its own, with the initiator's tuples beside its data or in it.
//!
//! # Errors
//! Every [`bdev::IoError`] has its sense in one exhaustive match; none becomes GOOD. A full channel
//! is TASK SET FULL, an internal buffer in use is BUSY, a reset or abort is TASK ABORTED. Where the unit's
//! [`ErrorPolicy`] says so, a command is not answered but handed back ([`Outcome::Suspended`]).
//!
//! # Guest memory
//! Nothing is trusted twice: the CDB is a copy, and each descriptor of UNMAP is copied, checked and
//! used, for itself, whenever it is looked at.

#![forbid(unsafe_code)]

mod aside;
mod block;
mod characteristics;
mod copy;
mod diagnostic;
mod inquiry;
mod interrupted;
mod job;
mod log;
mod lun;
mod medium;
mod missing;
mod mode;
mod nexus;
mod opcode;
mod options;
mod policy;
mod ports;
mod protect;
mod records;
mod reply;
mod report;
mod reservations;
mod response;
mod sanitize;
mod sense;
mod shared;
mod task;
mod volume;
mod watch;
mod well_known;

pub use characteristics::{Characteristics, CharacteristicsError};
pub use interrupted::interrupted;
pub use lun::Lun;
pub use missing::missing_lun;
pub use nexus::{Nexus, NexusState, UnitAttention};
pub use opcode::{CDB_LEN, Kind};
pub use options::{LunError, LunOptions, Transport};
pub use policy::{ErrorPolicy, WaitFor, told};
pub use records::{Record, RecordKeeper};
pub use reservations::{KeptReservations, NotKnown, ReservationKeeper};
pub use response::{Outcome, Response, Status};
pub use sense::SENSE_LEN;
pub use shared::{
    LunShared, MAX_SERIAL, MAX_TRANSFER_BYTES, MAX_UNMAP_BYTES, MAX_UNMAP_DESCRIPTORS,
    MAX_WRITE_SAME_BLOCKS,
};
pub use task::{Plain, Task};
pub use well_known::report_luns_unit;
