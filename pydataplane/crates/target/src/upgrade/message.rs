//! What the two programs say to each other. A field's meaning never changes; a new one has a
//! default, so that a newer program understands what an older one says. What an older one would
//! misunderstand needs a new [`super::VERSION`].

use crate::flusherror::FlushError;
use crate::logging::Level;
use crate::state::Call;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;
use vhost_scsi::handover::{ControllerState, FdIndex};

/// A message. Its descriptors stand beside it; it names each by its place among them.
#[derive(Debug, Serialize, Deserialize, JsonSchema)]
#[serde(tag = "message", rename_all = "snake_case")]
pub enum Message {
    /// New: here I am.
    Hello(Hello),
    /// Old: you may become ready.
    Welcome(Welcome),
    /// New: everything that needs nothing of you is done.
    Ready,
    /// Old, while it serves: what is about to come, but for the controllers.
    Outlook(Box<OutlookState>),
    /// New: everything that can be done before guests have to wait is done.
    Expecting,
    /// Old: all but the controllers.
    Target(Box<TargetState>),
    /// Old: one controller, as it is or, in the outlook, as far as it is known.
    Controller(Box<ControllerState>),
    /// Old: these were all.
    End {
        /// How many controllers there were.
        controllers: usize,
    },
    /// New: all of it is opened, loaded and set up, and nothing is served yet.
    Prepared,
    /// Old: it is yours. From here on it touches nothing.
    Go,
    /// New: it serves.
    Serving {
        /// How long guests were not served, in microseconds.
        pause_us: u64,
    },
    /// Either: it does not go on, and why, in one sentence.
    Failed {
        /// The sentence.
        why: String,
    },
}

/// Who the new program is.
#[derive(Debug, Serialize, Deserialize, JsonSchema)]
pub struct Hello {
    /// Oldest version of the messages that it understands.
    pub oldest: u32,
    /// Newest version of the messages that it understands.
    pub newest: u32,
    /// Version of the program, for people.
    pub program: String,
}

/// Who the old program is.
#[derive(Debug, Serialize, Deserialize, JsonSchema)]
pub struct Welcome {
    /// Version of all messages from here on.
    pub version: u32,
    /// Version of the program, for people.
    pub program: String,
    /// Its process.
    pub pid: u32,
}

/// What is about to come. RPC clients wait from here on, so only who owns a controller may change.
#[derive(Debug, Serialize, Deserialize, JsonSchema)]
pub struct OutlookState {
    /// The lock of the state directory.
    pub state_lock: FdIndex,
    /// What is configured, as calls.
    pub config: Vec<Call>,
    /// Least severity that is logged.
    pub log_level: Level,
}

/// The target but for its controllers.
#[derive(Debug, Serialize, Deserialize, JsonSchema)]
pub struct TargetState {
    /// The lock of the state directory.
    pub state_lock: FdIndex,
    /// What is configured, as calls.
    pub config: Vec<Call>,
    /// What of it is not restored, by its key, and why.
    pub unrestored: BTreeMap<String, String>,
    /// By bdev: why the lvstore on it is not loaded.
    pub unloaded: BTreeMap<String, String>,
    /// By bdev: the flush that failed, until that is cleared.
    #[serde(default)]
    pub flush_errors: BTreeMap<String, FlushError>,
    /// Least severity that is logged.
    pub log_level: Level,
    /// The RPC socket.
    pub rpc: RpcState,
    /// Content of bdevs in memory.
    pub memory: Vec<MemoryState>,
    /// Keys of encrypted bdevs.
    #[serde(default)]
    pub keys: Vec<KeyState>,
    /// When guests were last served, in nanoseconds of CLOCK_MONOTONIC.
    pub held_at_ns: u64,
}

/// The RPC socket and its clients.
#[derive(Debug, Serialize, Deserialize, JsonSchema)]
pub struct RpcState {
    /// The listening socket.
    pub listener: FdIndex,
    /// Its connected clients.
    pub clients: Vec<RpcClientState>,
}

/// A connected client of the RPC socket.
#[derive(Debug, Serialize, Deserialize, JsonSchema)]
pub struct RpcClientState {
    /// The connection.
    pub stream: FdIndex,
    /// What came of its next request.
    pub received: Vec<u8>,
}

/// Content of a bdev in memory.
#[derive(Debug, Serialize, Deserialize, JsonSchema)]
pub struct MemoryState {
    /// Name of the bdev.
    pub bdev: String,
    /// A file with its content.
    pub file: FdIndex,
}

/// A key, which itself stands in memory that only the two programs have.
#[derive(Debug, Serialize, Deserialize, JsonSchema)]
pub struct KeyState {
    /// Its name.
    pub name: String,
    /// Whether it goes with the last bdev that uses it.
    pub destroy_with_last: bool,
    /// A file in memory with its bytes.
    pub secret: FdIndex,
}
