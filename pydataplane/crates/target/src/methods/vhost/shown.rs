//! What is shown of controllers: SPDK's form of what the crate `vhost-scsi` tells.

use super::super::owner::OwnerProcess;
use super::policy::word;
use crate::cpumask::CpuMask;
use ::vhost_scsi::{
    Coalescing, ControllerInfo, Front, IOPS_THRESHOLD, SessionInfo, StatsInfo, SuspendedTarget,
    TargetInfo,
};
use schemars::JsonSchema;
use scsi::NotKnown;
use serde::Serialize;

/// A controller, with SPDK's fields.
#[derive(Serialize, JsonSchema)]
pub(super) struct Controller {
    ctrlr: String,
    cpumask: String,
    /// Microseconds that interrupts are held back for at twice the threshold; 0: by that they are not.
    delay_base_us: u32,
    /// I/Os per second of a queue from which on they are.
    iops_threshold: u32,
    /// They are held back by what is in flight and what becomes of it, as nothing was set (ours).
    adaptive_coalescing: bool,
    /// Path of its socket.
    socket: String,
    /// The process that it belongs to; null if to none yet (ours).
    owner: Option<OwnerProcess>,
    /// Number of the user whose processes may be the first to connect, beside root's; null: any that
    /// may open the socket (ours).
    owner_uid: Option<u32>,
    /// Connected VMs: one at most.
    sessions: Vec<Session>,
    backend_specific: Backend,
}

#[derive(Serialize, JsonSchema)]
pub(super) struct Session {
    vid: u64,
    name: String,
    /// Whether the VM uses its queues.
    started: bool,
    /// Whether it goes on if this process is killed: virtlun-holder has its connection.
    kept: bool,
    /// Request queues that run, and where. One moves where its reactor has more to do than it can.
    queues: Vec<RunningQueue>,
    /// Queues that wait for their driver to reset them, as what was in flight there cannot be known.
    stopped_queues: Vec<StoppedQueue>,
}

#[derive(Serialize, JsonSchema)]
pub(super) struct RunningQueue {
    /// Index of the virtqueue.
    queue: u16,
    /// CPU of its reactor.
    cpu: usize,
}

#[derive(Serialize, JsonSchema)]
pub(super) struct StoppedQueue {
    /// Index of the virtqueue.
    queue: u16,
    reason: String,
}

/// What the guest sees of it: one of these.
#[derive(Default, Serialize, JsonSchema)]
pub(super) struct Backend {
    /// Targets.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schemars(with = "Vec<Target>")]
    scsi: Option<Vec<Target>>,
    /// One virtio-blk disk.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schemars(with = "Block")]
    block: Option<Block>,
}

#[derive(Serialize, JsonSchema)]
pub(super) struct Block {
    /// Name of the bdev; null once that is gone.
    bdev: Option<String>,
    /// Whether writes are refused.
    readonly: bool,
    /// Serial number that the guest sees, of which it reads 20 characters (ours, as all that follows).
    serial: Option<String>,
    /// UUID as which the guest sees the disk, where it was chosen.
    uuid: Option<String>,
    /// Bytes of a logical block, as the guest sees it.
    block_size: Option<u32>,
    /// Bytes of a physical block, null where none was chosen: the bdev's.
    physical_block_size: Option<u32>,
    /// Whether the guest may discard blocks, where the bdev takes that.
    discard: bool,
    /// What becomes of writes whose I/O fails: report, enospc or stop.
    write_error_policy: &'static str,
    /// The same of reads.
    read_error_policy: &'static str,
    /// When the connected guest's front end was last told to look at the size again, in seconds since the
    /// epoch.
    resize_event_at: Option<f64>,
    /// As of a target of SCSI.
    reservations: &'static str,
}

/// Whether it is known who has reserved a volume.
fn reservations(not_known: Option<NotKnown>) -> &'static str {
    match not_known {
        None => "known",
        Some(NotKnown::Unread) => "unread",
        Some(NotKnown::Lost) => "lost",
    }
}

impl From<Option<TargetInfo>> for Block {
    fn from(disk: Option<TargetInfo>) -> Block {
        let policy = disk.as_ref().map(|d| d.error_policy).unwrap_or_default();
        Block {
            write_error_policy: word(policy.write),
            read_error_policy: word(policy.read),
            readonly: disk.as_ref().is_some_and(|d| d.read_only),
            block_size: disk.as_ref().map(|d| d.block_size),
            physical_block_size: disk.as_ref().and_then(|d| d.characteristics.physical_block_size),
            discard: disk.as_ref().is_some_and(|d| !d.characteristics.no_unmap),
            resize_event_at: disk.as_ref().and_then(|d| d.resize_event_at),
            reservations: reservations(disk.as_ref().and_then(|d| d.reservations_not_known)),
            serial: disk.as_ref().map(|d| d.serial.clone()),
            uuid: disk.as_ref().and_then(|d| d.characteristics.uuid).map(|uuid| uuid.to_string()),
            bdev: disk.map(|d| d.bdev_name),
        }
    }
}

#[derive(Serialize, JsonSchema)]
pub(super) struct Target {
    /// Number of the target.
    scsi_dev_num: u8,
    id: u8,
    target_name: String,
    luns: Vec<Lun>,
}

#[derive(Serialize, JsonSchema)]
pub(super) struct Lun {
    id: u16,
    bdev_name: String,
    /// Unit serial number that the guest sees (ours, as all that follows).
    serial: String,
    /// Whether writes are refused.
    read_only: bool,
    /// Whether the guest sees a removable disk.
    removable: bool,
    /// Bytes of a logical block, as the guest sees it.
    block_size: u32,
    /// UUID as which the guest sees the disk, null where none was chosen: the bdev's.
    uuid: Option<String>,
    /// World wide name, vendor, product and rotation rate, null where none was chosen.
    wwn: Option<String>,
    vendor: Option<String>,
    product: Option<String>,
    rotation_rate: Option<u16>,
    /// Bytes of a physical block, null where none was chosen: the bdev's.
    physical_block_size: Option<u32>,
    /// Whether the guest may discard blocks, where the bdev takes that.
    discard: bool,
    /// Whether the guest sees the bdev's volatile cache, if it has one.
    write_cache: bool,
    /// What becomes of writes whose I/O fails: report, enospc or stop.
    write_error_policy: &'static str,
    /// The same of reads.
    read_error_policy: &'static str,
    /// Whether the guest prevents its removal: Linux does while the disk is open or mounted.
    removal_prevented: bool,
    /// Whether the guest has ejected the medium of a removable disk: it is in again when the guest loads it or
    /// starts anew, and when the target does.
    ejected: bool,
    /// Whether it is known who has reserved the volume: known, lost, as its record is damaged, or unread, as that
    /// cannot be read for now. Of one that is not known commands are refused.
    reservations: &'static str,
    /// When it was put in place, in seconds since the epoch, as all times.
    attached_at: f64,
    /// When the event that it came was put into the connected guest's ring; null if it was not:
    /// the guest gave no buffers yet, or started later and scans by itself.
    event_at: Option<f64>,
    /// When the connected guest first asked for its capacity; null if it did not.
    guest_seen_at: Option<f64>,
    /// When the last event that its size changed was put into the connected guest's ring.
    resize_event_at: Option<f64>,
}

impl From<TargetInfo> for Target {
    fn from(t: TargetInfo) -> Target {
        Target {
            scsi_dev_num: t.number,
            id: t.number,
            target_name: format!("Target {}", t.number),
            luns: vec![Lun {
                id: 0,
                bdev_name: t.bdev_name,
                serial: t.serial,
                read_only: t.read_only,
                removable: t.removable,
                block_size: t.block_size,
                uuid: t.characteristics.uuid.map(|uuid| uuid.to_string()),
                wwn: t.characteristics.wwn.map(|wwn| format!("{wwn:016x}")),
                vendor: t.characteristics.vendor,
                product: t.characteristics.product,
                rotation_rate: t.characteristics.rotation_rate,
                physical_block_size: t.characteristics.physical_block_size,
                discard: !t.characteristics.no_unmap,
                write_cache: !t.characteristics.write_through,
                write_error_policy: word(t.error_policy.write),
                read_error_policy: word(t.error_policy.read),
                removal_prevented: t.removal_prevented,
                ejected: t.ejected,
                reservations: reservations(t.reservations_not_known),
                attached_at: t.attached_at,
                event_at: t.event_at,
                guest_seen_at: t.guest_seen_at,
                resize_event_at: t.resize_event_at,
            }],
        }
    }
}

impl From<ControllerInfo> for Controller {
    fn from(c: ControllerInfo) -> Controller {
        let session = |s: SessionInfo| Session {
            vid: s.number,
            name: format!("{}s{}", c.name, s.number),
            started: s.started,
            kept: s.kept,
            queues: s.queues.into_iter().map(|(queue, cpu)| RunningQueue { queue, cpu }).collect(),
            stopped_queues: s
                .stopped_queues
                .into_iter()
                .map(|(queue, reason)| StoppedQueue { queue, reason })
                .collect(),
        };
        let (delay_base_us, iops_threshold) = match c.coalescing {
            Coalescing::Adaptive => (0, IOPS_THRESHOLD),
            Coalescing::Fixed { delay_base_us, iops_threshold } => (delay_base_us, iops_threshold),
        };
        let cpumask = CpuMask::of(c.cpus).expect("a controller has a reactor").to_string();
        Controller {
            sessions: c.session.map(session).into_iter().collect(),
            ctrlr: c.name,
            cpumask,
            delay_base_us,
            iops_threshold,
            adaptive_coalescing: c.coalescing == Coalescing::Adaptive,
            socket: c.socket.display().to_string(),
            owner_uid: c.owner.uid,
            owner: OwnerProcess::of(c.owner),
            backend_specific: match c.front {
                Front::Scsi => Backend {
                    scsi: Some(c.targets.into_iter().map(Target::from).collect()),
                    ..Backend::default()
                },
                Front::Blk => Backend {
                    block: Some(c.targets.into_iter().next().into()),
                    ..Backend::default()
                },
            },
        }
    }
}

/// A target whose requests wait because an I/O failed.
#[derive(Serialize, JsonSchema)]
pub(super) struct Suspended {
    ctrlr: String,
    scsi_target_num: u8,
    bdev_name: String,
    /// How the I/O failed: no_space, read_medium, write_medium or resources.
    error: &'static str,
    /// When, in seconds since the epoch.
    since: f64,
    /// Whether the VM is not to be saved or migrated: its queues have stopped, and requests of a virtio-blk
    /// disk's are known to QEMU's in-flight region alone, which does not go along.
    overtaken: bool,
}

impl From<SuspendedTarget> for Suspended {
    fn from(t: SuspendedTarget) -> Suspended {
        Suspended {
            ctrlr: t.ctrlr,
            scsi_target_num: t.number,
            bdev_name: t.bdev_name,
            error: t.suspension.error.name(),
            since: t.suspension.since,
            overtaken: t.overtaken,
        }
    }
}

/// What a controller and its targets did (libvirt's block statistics).
#[derive(Serialize, JsonSchema)]
pub(super) struct Stats {
    ctrlr: String,
    /// Requests taken from request queues.
    requests: u64,
    /// Requests that did not end well.
    errors: u64,
    /// Descriptor chains that broke the rules of virtio.
    malformed: u64,
    /// Interrupts given to the guest.
    interrupts: u64,
    /// Events put into the event queue.
    events_sent: u64,
    /// Events lost because the guest gave no buffers.
    events_missed: u64,
    targets: Vec<TargetStats>,
}

#[derive(Serialize, JsonSchema)]
pub(super) struct TargetStats {
    scsi_target_num: u8,
    bdev_name: String,
    reads: u64,
    read_bytes: u64,
    /// Nanoseconds from ring to ring, summed.
    read_ns: u64,
    writes: u64,
    write_bytes: u64,
    /// Nanoseconds from ring to ring, summed.
    write_ns: u64,
    flushes: u64,
    /// Nanoseconds from ring to ring, summed.
    flush_ns: u64,
    /// Other commands.
    others: u64,
    /// Commands that ended with a status other than GOOD.
    errors: u64,
    /// Times that requests of a virtio-blk disk waited as others had all of the bdev's queue.
    full_waits: u64,
}

impl From<StatsInfo> for Stats {
    fn from(i: StatsInfo) -> Stats {
        let target = |(number, bdev_name, s): (u8, String, ::vhost_scsi::LunStats)| TargetStats {
            scsi_target_num: number,
            bdev_name,
            reads: s.reads,
            read_bytes: s.read_bytes,
            read_ns: s.read_ns,
            writes: s.writes,
            write_bytes: s.write_bytes,
            write_ns: s.write_ns,
            flushes: s.flushes,
            flush_ns: s.flush_ns,
            others: s.others,
            errors: s.errors,
            full_waits: s.full_waits,
        };
        Stats {
            ctrlr: i.ctrlr,
            requests: i.controller.requests,
            errors: i.controller.errors,
            malformed: i.controller.malformed,
            interrupts: i.controller.interrupts,
            events_sent: i.controller.events_sent,
            events_missed: i.controller.events_missed,
            targets: i.targets.into_iter().map(target).collect(),
        }
    }
}
