//! What is told of controllers, their VMs and their targets: facts, in the field's units. How they
//! look in JSON is the caller's.

use std::path::PathBuf;
use std::sync::atomic::Ordering;

use crate::coalescing::Coalescing;
use crate::controller::{Controller, cpu_of};
use crate::front::Front;
use crate::lun::{Suspension, Target};
use crate::owner::OwnerInfo;
use scsi::{Characteristics, ErrorPolicy, NotKnown};

/// A controller.
#[derive(Clone, Debug, PartialEq)]
pub struct ControllerInfo {
    /// Name.
    pub name: String,
    /// What its guest sees.
    pub front: Front,
    /// CPUs of the reactors that its request queues run on.
    pub cpus: Vec<usize>,
    /// Path of the socket.
    pub socket: PathBuf,
    /// Who it belongs to.
    pub owner: OwnerInfo,
    /// The connected VM.
    pub session: Option<SessionInfo>,
    /// When its guest is called.
    pub coalescing: Coalescing,
    /// Its targets, by number; none that is being removed.
    pub targets: Vec<TargetInfo>,
}

/// A connected VM.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SessionInfo {
    /// Number of the session since the controller was created.
    pub number: u64,
    /// Whether any of its request queues runs.
    pub started: bool,
    /// Whether it goes on in the next process if this one is killed.
    pub kept: bool,
    /// Request queues that run, each with the CPU of its reactor.
    pub queues: Vec<(u16, usize)>,
    /// Queues that were not started, and why: what was in flight there cannot be known.
    pub stopped_queues: Vec<(u16, String)>,
}

/// A target with its logical unit 0.
#[derive(Clone, Debug, PartialEq)]
pub struct TargetInfo {
    /// Number.
    pub number: u8,
    /// The bdev that serves it; of one that is being copied the source.
    pub bdev_name: String,
    /// Serial number that the guest sees.
    pub serial: String,
    /// Whether writes are refused.
    pub read_only: bool,
    /// Whether the guest sees a removable disk.
    pub removable: bool,
    /// Bytes of a logical block, as the guest sees it.
    pub block_size: u32,
    /// What it says of itself as its owner chose.
    pub characteristics: Characteristics,
    /// What becomes of requests whose I/O fails.
    pub error_policy: ErrorPolicy,
    /// Since when requests wait because an I/O failed; also while the guest is paused for it.
    pub suspended: Option<Suspension>,
    /// Whether the guest prevents its removal: it is in use, mounted for instance.
    pub removal_prevented: bool,
    /// Whether the guest has ejected its medium, and not loaded it.
    pub ejected: bool,
    /// Why it is not known who has reserved the volume, so that its commands are refused; `None`: it is known.
    pub reservations_not_known: Option<NotKnown>,
    /// When it was put in place, in seconds since the epoch, as the times below.
    pub attached_at: f64,
    /// When the event that it came was put into the ring of the connected guest; none where the
    /// guest was not there, or gave no buffers yet, or scans by itself.
    pub event_at: Option<f64>,
    /// When the connected guest first asked for its capacity.
    pub guest_seen_at: Option<f64>,
    /// When the last event that its size changed was put into the ring of the connected guest.
    pub resize_event_at: Option<f64>,
}

impl From<&Target> for TargetInfo {
    fn from(t: &Target) -> Self {
        TargetInfo {
            number: t.number,
            bdev_name: t.shared.bdev().name().into(),
            serial: t.shared.serial().into(),
            read_only: t.shared.is_read_only(),
            removable: t.shared.is_removable(),
            block_size: t.shared.block_size(),
            characteristics: t.shared.characteristics().clone(),
            error_policy: t.shared.error_policy(),
            suspended: t.suspended(),
            removal_prevented: t.shared.removal_prevented(),
            ejected: t.shared.is_ejected(),
            reservations_not_known: t.shared.reservations_not_known(),
            attached_at: t.times.attached_at(),
            event_at: t.times.event_at(),
            guest_seen_at: t.shared.seen_at().map(|at| at.as_secs_f64()),
            resize_event_at: t.times.resize_event_at(),
        }
    }
}

impl From<&Controller> for ControllerInfo {
    fn from(c: &Controller) -> Self {
        let targets = c.targets();
        ControllerInfo {
            name: c.name.clone(),
            front: c.front,
            cpus: c.reactors.iter().map(cpu_of).collect(),
            socket: c.socket.path.clone(),
            owner: c.owner(),
            session: c.session().map(|(number, started)| SessionInfo {
                number,
                started,
                kept: c.kept.load(Ordering::Relaxed),
                queues: c.queues(),
                stopped_queues: c.refused().clone(),
            }),
            coalescing: c.coalescing.get(),
            targets: targets.iter().flatten().filter(|t| !t.leaving).map(Into::into).collect(),
        }
    }
}
