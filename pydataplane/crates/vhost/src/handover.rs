//! A controller as it goes on in another process: its socket, its session and what its guest was
//! told, without what any of it is made of here.
//!
//! The same values carry a controller over to a new program and back into this one when the new
//! program does not come up, so there is one way in and one way out. Nothing is in flight in a
//! session while it is a value: the rings are described by where to go on in them.
//!
//! Before that, while the guest is served, the same description says what is to come, as far as it is
//! known ([`crate::Controllers::describe`]), so that a new program has done what takes time, above
//! all mapped the guest's memory, when the guest begins to wait.
//!
//! Descriptors stand beside the description, which names each by its place among them. What a
//! field means must not change; new ones need a default, so that a newer program understands what
//! an older one wrote. `schemas/upgrade` describes all of it.

use std::fmt;
use std::os::fd::OwnedFd;
use std::path::PathBuf;
use std::sync::Arc;

use guestmem::GuestMemory;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use crate::lun::Suspension;
use crate::stats::{ControllerStats, LunTotals};

/// Place of a descriptor among those of its controller.
pub type FdIndex = u32;

/// A controller on its way: what it is, and its descriptors.
#[derive(Debug)]
pub struct ControllerHandover {
    /// What it is.
    pub state: ControllerState,
    /// The descriptors that `state` names by their places.
    pub fds: Fds,
    /// What is taken apart later, in the process that leaves.
    pub dropped_later: DroppedLater,
}

/// What a session was made of. To unmap a guest's memory takes time, in which guests would wait.
#[derive(Default)]
pub struct DroppedLater {
    _queues: Option<Box<dyn Send>>,
    _memory: Option<Arc<GuestMemory>>,
}

impl DroppedLater {
    /// Keeps these until the value is dropped.
    pub(crate) fn new(queues: impl Send + 'static, memory: Arc<GuestMemory>) -> Self {
        DroppedLater { _queues: Some(Box::new(queues)), _memory: Some(memory) }
    }
}

impl fmt::Debug for DroppedLater {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("DroppedLater")
    }
}

/// A controller and the session of its peer.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
pub struct ControllerState {
    /// Name.
    pub name: String,
    /// Path of its socket.
    pub socket: PathBuf,
    /// The listening socket.
    pub listener: FdIndex,
    /// Sessions so far.
    pub sessions: u64,
    /// The connected peer, if there is one.
    pub session: Option<SessionState>,
    /// Events that the driver of the last session has not heard.
    pub unheard: Option<UnheardState>,
    /// Its targets.
    pub targets: Vec<TargetState>,
    /// What it did since it was created.
    #[serde(default)]
    pub counters: ControllerStats,
}

/// The session of a connected peer. Where it was handed over, its queues are stopped and nothing is with a
/// device; where it was kept for the case that this process ends, the in-flight region says what is.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
pub struct SessionState {
    /// The connection; what the peer sent and nobody read is still in it.
    pub socket: FdIndex,
    /// Whether the peer said anything yet.
    pub spoke: bool,
    /// Messages refused so far.
    pub refused: u32,
    /// Features that it acknowledged (SET_FEATURES).
    pub features: u64,
    /// Protocol features that it acknowledged (SET_PROTOCOL_FEATURES).
    pub protocol_features: u64,
    /// Its memory table.
    pub memory: Vec<RegionState>,
    /// Its dirty log, if it gave one (SET_LOG_BASE).
    pub log: Option<LogState>,
    /// Where it keeps what is in flight, if it does (SET_INFLIGHT_FD), or the target's own place for that. What is marked there was left by
    /// a session before and is still to be submitted again.
    #[serde(default)]
    pub inflight: Option<InflightState>,
    /// The channel for messages to it (SET_BACKEND_REQ_FD).
    #[serde(default)]
    pub backend: Option<FdIndex>,
    /// Queues that may have requests in flight which nobody knows of, as a target died that served
    /// them without such a region.
    #[serde(default)]
    pub unknown_queues: Vec<u16>,
    /// What it said about its virtqueues.
    pub rings: Vec<RingState>,
}

/// A memory region (SET_MEM_TABLE, ADD_MEM_REG).
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct RegionState {
    /// Guest address of its first byte.
    pub guest_addr: u64,
    /// Bytes.
    pub size: u64,
    /// The same byte in the peer's own address space.
    pub user_addr: u64,
    /// Byte of the file where it starts.
    pub mmap_offset: u64,
    /// The file.
    pub file: FdIndex,
}

/// A dirty log.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct LogState {
    /// The file.
    pub file: FdIndex,
    /// Byte of the file where it starts.
    pub offset: u64,
    /// Bytes.
    pub size: u64,
}

/// A region of what is in flight.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct InflightState {
    /// The file.
    pub file: FdIndex,
    /// Byte of the file where it starts.
    pub offset: u64,
    /// Queues that it tells of.
    pub queues: u16,
    /// Descriptors of each.
    pub queue_size: u16,
    /// It is the target's own: the peer does not know of it.
    #[serde(default)]
    pub ours: bool,
}

/// A virtqueue that the peer said something about.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct RingState {
    /// Its index.
    pub index: u32,
    /// Descriptors; 0: not told yet.
    pub size: u16,
    /// Where it lies, in the peer's own addresses.
    pub addresses: Option<RingAddresses>,
    /// Where to go on in the available ring.
    pub base: u16,
    /// How the peer tells that it added requests; none: the ring is stopped.
    pub kick: Option<KickState>,
    /// Written after requests ended.
    pub call: Option<FdIndex>,
    /// Written when the ring failed.
    pub err: Option<FdIndex>,
    /// SET_VRING_ENABLE.
    pub enabled: bool,
    /// Has run in this session, up to `base`.
    pub ran: bool,
    /// Ran when it was held, or kept.
    pub running: bool,
}

/// Where a ring lies, in the peer's own addresses.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct RingAddresses {
    /// Descriptor table.
    pub desc: u64,
    /// Available ring.
    pub avail: u64,
    /// Used ring.
    pub used: u64,
    /// Guest address under which the used ring is logged, if it is.
    pub log: Option<u64>,
}

/// How a peer kicks a ring.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum KickState {
    /// It writes this eventfd.
    Fd(FdIndex),
    /// Not at all: the ring is polled.
    Polled,
}

/// Events that a guest has not heard.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct UnheardState {
    /// Features of its driver.
    pub features: u64,
    /// In order.
    pub events: Vec<EventState>,
    /// Some were lost, which it is to be told.
    pub missed: bool,
}

/// An event about LUN 0 of a target.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum EventState {
    /// The target of this number came.
    Added(u8),
    /// It went.
    Removed(u8),
    /// Its size changed.
    Resized(u8),
}

/// What a target was and did, beside its configuration.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
pub struct TargetState {
    /// Number.
    pub number: u8,
    /// When it was put in place, in seconds since the epoch.
    pub attached_at: f64,
    /// When the present guest was told that it came.
    pub event_at: Option<f64>,
    /// When it was last told that the size changed.
    pub resize_event_at: Option<f64>,
    /// What the present session knows of it; none without a session.
    pub nexus: Option<NexusState>,
    /// What guests did with it.
    #[serde(default)]
    pub counters: LunTotals,
    /// An I/O failed, and the guest has not gone on since.
    #[serde(default)]
    pub suspended: Option<SuspensionState>,
}

/// Requests wait because an I/O failed.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
pub struct SuspensionState {
    /// How it failed, as `error` of virtlun_vhost_get_suspended.
    pub error: String,
    /// When, in seconds since the epoch.
    pub since: f64,
}

impl From<Suspension> for SuspensionState {
    fn from(of: Suspension) -> Self {
        SuspensionState { error: of.error.name().to_owned(), since: of.since }
    }
}

/// None where the error is one that only a newer program knows.
impl From<SuspensionState> for Option<Suspension> {
    fn from(of: SuspensionState) -> Self {
        let error = bdev::IoError::ALL.into_iter().find(|error| error.name() == of.error)?;
        Some(Suspension { error, since: of.since })
    }
}

/// A session's view of a logical unit (an I_T nexus).
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct NexusState {
    /// Unit attentions that wait, as bits: 1 reset, 2 LUNs changed, 4 capacity changed, 8 inquiry
    /// data changed.
    pub attentions: u32,
    /// Whether it prevents the removal of the medium.
    pub prevents: bool,
    /// First READ CAPACITY, in microseconds since the epoch; 0: not yet.
    pub seen_us: u64,
    /// It has not learned the capacity, perhaps as it was not known what is reserved: it is to be told when it can
    /// ask again.
    #[serde(default)]
    pub could_not_ask: bool,
}

/// A controller that came from another process, or is about to.
pub(crate) struct Inherited {
    pub(crate) state: ControllerState,
    pub(crate) fds: Fds,
}

/// The descriptors of a controller on its way.
#[derive(Debug, Default)]
pub struct Fds(Vec<Option<OwnedFd>>);

/// Why a description cannot be followed.
#[derive(Debug, thiserror::Error)]
#[error("descriptor {0} is missing or was used before")]
pub struct MissingFd(FdIndex);

impl Fds {
    /// Those that came with a description, in their order.
    pub fn new(fds: Vec<OwnedFd>) -> Self {
        Fds(fds.into_iter().map(Some).collect())
    }

    /// Adds one; its place.
    pub fn put(&mut self, fd: OwnedFd) -> FdIndex {
        self.0.push(Some(fd));
        (self.0.len() - 1) as FdIndex
    }

    /// The one of that place, which was not taken.
    pub(crate) fn get(&self, at: FdIndex) -> Option<&OwnedFd> {
        self.0.get(at as usize)?.as_ref()
    }

    /// Takes the one of that place, once.
    ///
    /// # Errors
    /// There is none, or it was taken before.
    pub fn take(&mut self, at: FdIndex) -> Result<OwnedFd, MissingFd> {
        self.0.get_mut(at as usize).and_then(Option::take).ok_or(MissingFd(at))
    }

    /// All, in the order of their places, to be sent.
    pub fn iter(&self) -> impl Iterator<Item = &OwnedFd> {
        self.0.iter().flatten()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_descriptor_is_taken_once() {
        let file = || OwnedFd::from(tempfile::tempfile().unwrap());
        let mut fds = Fds::new(vec![file()]);
        assert_eq!(fds.put(file()), 1);
        assert_eq!(fds.iter().count(), 2);
        assert!(fds.take(1).is_ok());
        assert_eq!(
            fds.take(1).unwrap_err().to_string(),
            "descriptor 1 is missing or was used before"
        );
        assert!(fds.take(2).is_err());
    }

    #[test]
    fn what_an_older_program_left_out_has_a_default() {
        let text = r#"{"name": "v", "socket": "/s", "listener": 0, "sessions": 1, "session": null,
                       "unheard": null, "targets": [], "of_a_newer_one": 1}"#;
        let state: ControllerState = serde_json::from_str(text).unwrap();
        assert_eq!(state.counters, ControllerStats::default());
    }
}
