//! Upgrade in place: a new program takes everything over from the one that serves, and guests notice
//! a pause.
//!
//! The new program is started beside the old one (`--take-over`), does whatever needs nothing of the
//! old one's, and connects to its upgrade socket. Then:
//!
//! | new | old |
//! | --- | --- |
//! | `hello`: the versions of the messages that it understands | checks who it is; `welcome` |
//! | `ready` | lets RPC requests end; `outlook`, a `controller` each, `end` |
//! | makes controllers, maps the memory of their guests, opens files and reads a block of each; `expecting` | |
//! | | holds the controllers whose I/O takes long, then all: nothing is in flight, and guests wait |
//! | | closes bdevs and lvstores; `target`, a `controller` each, `end` |
//! | locks those files, opens block devices, loads lvstores, sets every session up, held; `prepared` | |
//! | | `go`, and from there on touches nothing |
//! | serves; `serving` | ends |
//!
//! Up to `go` the new program has served nothing, and written nothing but what loading an lvstore
//! writes (its count of loads); anything that goes wrong (it ends, is silent for too long, says
//! `failed`) has the old one end it, wait until it is gone, load again, and go on from the very values
//! that it sent. After `go` the old one never goes on: two that serve would be worse than
//! none. A new program that ends after `go` is a crash of the target like any other.
//!
//! - `message`: what is said; `schemas/upgrade` has its schema. `channel`: how, with descriptors.
//! - `keys`: how keys go along, which no message has.
//! - `leave`: the old program's part. `arrive`: the new one's; `unsaid`: what it learns otherwise of an
//!   older release.

mod arrive;
mod channel;
mod keys;
mod leave;
mod message;
mod unsaid;

pub use arrive::{Arrival, Arrived, Taken};
pub use channel::{Channel, ChannelError};
pub use leave::{Successor, UpgradeListener, leave};
pub use message::Message;

use std::path::{Path, PathBuf};
use std::time::Duration;

/// Newest version of the messages that this program understands, and says if the other one does.
pub const VERSION: u32 = 2;
/// From this one on the old program tells of all failed flushes in `target`.
const SAYS_ALL: u32 = 2;
/// Oldest version of them that it understands.
pub const OLDEST: u32 = 1;

/// How long the answer to a message may take that waits for nothing.
const ANSWER_TIMEOUT: Duration = Duration::from_secs(10);
/// How long a new program may take to become ready; the old one serves meanwhile.
const READY_TIMEOUT: Duration = Duration::from_secs(60);
/// How long RPC requests that run may take to end.
const RPC_TIMEOUT: Duration = Duration::from_secs(5);
/// How long a new program may take to make what it can while guests are served: RPC clients wait.
const EXPECT_TIMEOUT: Duration = Duration::from_secs(20);
/// How long a new program may take to load everything: every guest waits.
const PREPARE_TIMEOUT: Duration = Duration::from_secs(20);
/// How long a process that was killed may take to be gone.
const DEATH_TIMEOUT: Duration = Duration::from_secs(10);

/// Where the target of that RPC socket waits for a new program.
pub fn socket_path(rpc_socket: &Path) -> PathBuf {
    let mut path = rpc_socket.as_os_str().to_owned();
    path.push(".upgrade");
    path.into()
}

/// Nanoseconds of the clock that all processes of the host share.
fn now_ns() -> u64 {
    let now = rustix::time::clock_gettime(rustix::time::ClockId::Monotonic);
    now.tv_sec as u64 * 1_000_000_000 + now.tv_nsec as u64
}
