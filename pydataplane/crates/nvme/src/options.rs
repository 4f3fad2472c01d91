//! What is asked for of a controller, and how it and its paths are shown.

use std::time::Duration;

use uuid::Uuid;

use crate::address::Address;
use crate::ana::AnaState;

/// Paths of a controller at most.
pub const PATHS_MAX: usize = 8;

/// What is asked for.
#[derive(Clone, Debug)]
pub struct Options {
    /// Name of the controller, with which the names of its bdevs begin.
    pub name: String,
    /// Name of the subsystem.
    pub subnqn: String,
    /// Name of this host.
    pub hostnqn: String,
    /// Headers have digests.
    pub header_digest: bool,
    /// Data has digests.
    pub data_digest: bool,
    /// Queues for I/O; each is a connection.
    pub queues: u16,
    /// How often a controller has to hear of this host.
    pub keep_alive: Duration,
    /// How long a controller may take to be connected to.
    pub connect_within: Duration,
    /// Between two attempts to connect.
    pub reconnect_delay: Duration,
    /// Time without an answer after which I/O fails; `None`: never.
    pub give_up: Option<Duration>,
    /// Time without an answer after which a path is connected anew; `None`: never.
    pub timeout: Option<Duration>,
    /// Each write is durable when it is answered (FUA); `None`: where the target is another host and has a cache.
    pub write_through: Option<bool>,
    /// By number: which namespaces there have to be, with their identification and bytes of a block. None: whatever is
    /// there.
    pub expected: Vec<(u32, Uuid, u32)>,
    /// The one namespace that is used, whatever others there are; `None`: all are.
    pub only: Option<Only>,
}

/// The one namespace of a controller that is used: its bdev has the controller's name.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Only {
    /// Of the volume, made of the names of the subsystem and the namespace.
    pub identity: Uuid,
    /// Bytes that a block of it has to have.
    pub block_size: u32,
    /// The number that it had last, where it is looked for first.
    pub nsid: u32,
    /// Name of the pool that it is a volume of, by which it is called as well: POOL/NAME.
    pub pool: String,
}

/// Why there is no such controller.
#[derive(Debug, thiserror::Error)]
#[error("controller {name}: {why}")]
pub struct CreateError {
    /// Name of the controller.
    pub name: String,
    /// The cause, as a clause.
    pub why: String,
    /// It may be there, or let in, later.
    pub passes: bool,
}

/// A path, as it is shown.
#[derive(Clone, Debug)]
pub struct PathInfo {
    /// Where it leads.
    pub address: Address,
    /// Number of the controller, as of the last time that there was a connection.
    pub cntlid: u16,
    /// There is a connection.
    pub connected: bool,
    /// Connections that there were.
    pub connections: u64,
    /// Why there is none.
    pub problem: Option<String>,
    /// By namespace of the controller: how it can be used there; `None`: it is not there.
    pub access: Vec<Option<AnaState>>,
    /// By namespace: I/O goes there.
    pub current: Vec<bool>,
}
