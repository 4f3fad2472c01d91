//! Block devices.
//!
//! Owns: the [`Bdev`] and [`Channel`] traits, the registry with its claims and events, I/O
//! statistics, and the backends `malloc`, `null` and `file`. Never knows SCSI, vhost or lvols, which
//! call it, as exports and the target's methods do.
//!
//! A bdev is shared and thread-safe; a channel is a queue pair that belongs to one thread, with
//! `submit` and `poll`, and a layer above owns one channel of the layer below.
//!
//! | file | noun |
//! | --- | --- |
//! | `io` | [`Io`], [`IoError`], [`Channel`]: one I/O from submit to completion |
//! | `device` | [`Bdev`], [`Geometry`], [`Features`], [`Sparse`], [`Sharing`] |
//! | `latch` | [`FlushLatch`]: a failed flush, remembered |
//! | `registry` | [`Registry`]: names, [`Claim`]s, [`Event`]s |
//! | `gate` | [`Gate`], [`Holds`]: who may write where |
//! | `limits` | [`Limits`]: how much I/O a device does a second at most |
//! | `late` | [`Late`]: completions that a caller had no room for |
//! | `protection` | [`Protected`]: what an I/O has beside its data |
//! | `pieces` | [`Pieces`]: parts of I/Os with memory of a layer's own |
//! | `in_pieces` | [`InPieces`]: a queue pair that works on data in pieces, for a [`Layer`] |
//! | `threaded` | [`ThreadChannel`]: a queue pair of a device whose I/O a thread carries out |
//! | `overlaps` | [`Overlaps`]: which changes wait for others of the same blocks |
//! | `slots` | [`Slots`]: what is in flight on a channel |
//! | `stats` | [`Stats`]: what `bdev_get_iostat` shows |
//! | `histogram` | [`Latencies`]: how often an operation took how long |
//! | `malloc`, `ram` | [`Malloc`]: a disk in memory |
//! | `null` | [`Null`]: takes everything, keeps nothing |
//! | `file` | [`FileBdev`]: a file or block device through io_uring |
//! | `waiters` | [`Waiters`]: who is woken when something happens elsewhere |
//! | `wants` | [`Wants`]: what channels ask of a thread that may block |
//! | `sync` | [`SyncChannel`], [`AlignedBuf`]: blocking I/O for control threads |
//! | `medium` | [`Medium`]: a disk of an array that no device is on |
//! | `closed` | [`Closed`]: what waits until something is closed elsewhere |
//! | `owned` | [`OwnedChannel`]: many I/Os at a time, safely, for threads that are no reactors |
//! | `testing` | `FaultBdev`: power cuts and injected errors; `Wrapped`, `Holes` (feature `testing`) |
//!
//! Errors: an I/O ends in an [`IoError`], a small closed set that the SCSI layer turns into sense
//! without a wildcard; control operations fail with one sentence that names object and cause.

mod closed;
mod device;
mod file;
mod gate;
mod histogram;
mod in_pieces;
mod io;
mod latch;
mod late;
mod limits;
mod malloc;
mod medium;
mod null;
mod overlaps;
mod owned;
mod pieces;
mod protection;
mod ram;
mod registry;
mod slots;
mod stats;
mod sync;
#[cfg(any(test, feature = "testing"))]
pub mod testing;
mod threaded;
mod waiters;
mod wants;

/// Bytes that a channel copies or zeroes at once, within `submit` or one `poll`: what is longer is done
/// in pieces, so that nobody else on the thread waits for it (64 KiB take some ten microseconds).
pub const COPY_AT_ONCE: usize = 64 << 10;

pub use closed::Closed;
pub use device::{
    Bdev, Features, Geometry, GuestEvent, OpenError, Run, Shared, Sharing, Sparse, host_boot,
};
pub use file::{Closing, FileBdev, FileKind, FileOptions, OpenedFile};
pub use gate::{Gate, Holds};
pub use histogram::{HistogramOptions, Latencies, Layout};
pub use in_pieces::{InPieces, Layer, Part, Received};
pub use io::{Channel, Completion, Io, IoError, Op, Submit};
pub use latch::{FlushCause, FlushFailure, FlushLatch};
pub use late::Late;
pub use limits::{Limits, Rate, RateLimits, Share};
pub use malloc::{Malloc, MallocOptions};
pub use medium::{Medium, identity_in};
pub use null::Null;
pub use overlaps::Overlaps;
pub use owned::{Finished, OwnedChannel};
pub use pieces::{PIECES, Pieces};
pub use protection::{
    AppTags, Checks, Mismatches, Protected, Protection, ProtectionType, TAG_RUNS, TUPLE_LEN, Tuples,
};
pub use registry::{
    Claim, ClaimMode, Event, Registry, RegistryError, Subscription, UNREGISTER_TIMEOUT,
    aliases_changed,
};
pub use slots::Slots;
pub use stats::{ChannelStats, IoStat, OpStat, SYNC_SAMPLE, Stats, StatsReset};
pub use sync::{AlignedBuf, BUF_ALIGN, SyncChannel, SyncError};
pub use threaded::{Completions, ThreadChannel, ThreadQueue, ThreadRequest, Threaded, WriteHow};
pub use waiters::{Waiter, Waiters};
pub use wants::{Ear, Wants};
