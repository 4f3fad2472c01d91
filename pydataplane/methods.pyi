"""The types of methods.py. Made by `python -m tests.methods` from schemas/rpc; do not edit.

A real SPDK target, or one of another release, may leave out what is required here: where one is
expected, fields are read with `get`.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, NotRequired, TypedDict, overload


class CryptoKey(TypedDict):
    """A key, with SPDK's fields but for the key itself."""

    bits: int
    """Bits of AES: 128 or 256 (ours)."""
    cipher: Literal["AES_CBC", "AES_XTS"]
    destroy_with_last: bool
    """Whether it goes with the last bdev that uses it (ours)."""
    name: str
    tweak_mode: Literal["SIMPLE_LBA", "JOIN_NEG_LBA_WITH_LBA", "INCR_512_FULL_LBA", "INCR_512_UPPER_LBA"]
    used_by: list[str]
    """Encrypted bdevs and lvols that use it (ours)."""


class RateLimits(TypedDict):
    """SPDK's: what of the limits of a bdev its method can say. 0 means unlimited."""

    r_mbytes_per_sec: int
    rw_ios_per_sec: int
    rw_mbytes_per_sec: int
    w_mbytes_per_sec: int


class DifCheckTypes(TypedDict):
    """What is compared when a block is read or written."""

    apptag: bool
    guard: bool
    reftag: bool


class Bdev(TypedDict):
    """A bdev, with SPDK's fields."""

    aliases: list[str]
    assigned_rate_limits: RateLimits
    """SPDK's: what of the limits of a bdev its method can say. 0 means unlimited."""
    block_size: int
    """Bytes of a logical block, with its metadata where that is part of it (md_interleave)."""
    claim_type: NotRequired[str | None]
    claimed: bool
    """Whether somebody holds it."""
    claimed_by: NotRequired[list[str]]
    """Who holds it (ours)."""
    dif_is_head_of_md: NotRequired[bool]
    dif_pi_format: NotRequired[int]
    dif_type: NotRequired[int]
    """Type of its protection information: 1 or 3."""
    driver_specific: Any
    """What its kind alone has, under the kind's name."""
    enabled_dif_check_types: NotRequired[DifCheckTypes]
    """What is compared when a block is read or written."""
    flush_error: NotRequired[str | None]
    """Why every flush fails until virtlun_bdev_clear_flush_error, if so (ours)."""
    has_limits: bool
    """Whether it has any limit: virtlun_bdev_get_limits tells which (ours)."""
    md_interleave: NotRequired[bool]
    """It lies behind the block's data, and block_size is of both."""
    md_size: NotRequired[int]
    """Bytes of a block's metadata."""
    name: str
    num_blocks: int
    """Size in logical blocks."""
    preferred_unmap_granularity: int
    product_name: str
    supported_io_types: dict[str, bool]
    uuid: str
    zoned: bool


class Histogram(TypedDict):
    """In the result of bdev_get_histogram."""

    granularity: int
    """Buckets of each range, as a power of two."""
    histogram: str
    """Counts of the buckets, 64 bits each, little endian, in base64."""
    max_range: int
    """The last range."""
    min_range: int
    """The first range."""
    tsc_rate: int
    """Ticks per second."""


class HistogramBorders(TypedDict):
    """In the result of bdev_get_histogram_borders."""

    borders_count: list[int]
    """How many operations took less than each border, and how many there were."""


class BdevIostat(TypedDict):
    """Counters with SPDK's names; latencies in ticks."""

    bytes_copied: int
    bytes_read: int
    bytes_unmapped: int
    bytes_written: int
    bytes_zeroed: int
    """Blocks made zero without data, in bytes (ours)."""
    copy_latency_ticks: int
    flush_latency_ticks: int
    """Ticks in flushes (ours)."""
    io_error: dict[str, int]
    """Failed I/Os by kind, those that happened."""
    max_copy_latency_ticks: int
    max_read_latency_ticks: int
    max_unmap_latency_ticks: int
    max_write_latency_ticks: int
    min_copy_latency_ticks: int
    min_read_latency_ticks: int
    min_unmap_latency_ticks: int
    min_write_latency_ticks: int
    name: str
    num_copy_ops: int
    num_flush_ops: int
    """Flushes (ours)."""
    num_read_ops: int
    num_unmap_ops: int
    num_write_ops: int
    num_write_zeroes_ops: int
    """How often (ours)."""
    read_latency_ticks: int
    unmap_latency_ticks: int
    write_latency_ticks: int


class Iostat(TypedDict):
    """Of bdevs."""

    bdevs: list[BdevIostat]
    tick_rate: int
    """Ticks per second."""
    ticks: int
    """Now."""


class ChannelIostat(TypedDict):
    """Counters with SPDK's names; latencies in ticks."""

    bytes_copied: int
    bytes_read: int
    bytes_unmapped: int
    bytes_written: int
    bytes_zeroed: int
    """Blocks made zero without data, in bytes (ours)."""
    copy_latency_ticks: int
    flush_latency_ticks: int
    """Ticks in flushes (ours)."""
    io_error: dict[str, int]
    """Failed I/Os by kind, those that happened."""
    max_copy_latency_ticks: int
    max_read_latency_ticks: int
    max_unmap_latency_ticks: int
    max_write_latency_ticks: int
    min_copy_latency_ticks: int
    min_read_latency_ticks: int
    min_unmap_latency_ticks: int
    min_write_latency_ticks: int
    num_copy_ops: int
    num_flush_ops: int
    """Flushes (ours)."""
    num_read_ops: int
    num_unmap_ops: int
    num_write_ops: int
    num_write_zeroes_ops: int
    """How often (ours)."""
    read_latency_ticks: int
    thread: str
    """Name of the thread it belongs to (ours)."""
    thread_id: int
    """Number of the channel."""
    unmap_latency_ticks: int
    write_latency_ticks: int


class ChannelsIostat(TypedDict):
    """Of the channels of one."""

    channels: list[ChannelIostat]
    name: str
    tick_rate: int
    """Ticks per second."""
    ticks: int
    """Now."""


class ShallowCopyState(TypedDict):
    """In the result of bdev_lvol_check_shallow_copy."""

    copied_clusters: int
    error: NotRequired[str | None]
    state: str
    """`in progress`, `complete` or `error`."""
    total_clusters: int


class LvolStore(TypedDict):
    """In the result of bdev_lvol_get_lvols."""

    name: str
    uuid: str


class Lvol(TypedDict):
    """An lvol, with SPDK's fields."""

    alias: str
    """LVSTORE/LVOL."""
    dif_type: NotRequired[int | None]
    """Type of the protection information that it keeps itself (ours)."""
    external_snapshot_name: NotRequired[str | None]
    """UUID of the bdev whose clone it is (ours; SPDK has it in bdev_get_bdevs only)."""
    is_clone: bool
    is_degraded: bool
    is_esnap_clone: bool
    is_read_only: bool
    """Whether it refuses writes (ours)."""
    is_snapshot: bool
    is_thin_provisioned: bool
    key_name: NotRequired[str | None]
    """Name of the key that its data is encrypted with (ours)."""
    lvs: LvolStore
    name: str
    num_allocated_clusters: int
    size: int
    """Bytes (ours)."""
    uuid: str
    """Identity, and the name of its bdev."""
    waits_for_key: bool
    """Whether it is no bdev because that key is not here (ours)."""


class Zeroing(TypedDict):
    """A thick lvol whose clusters are being zeroed."""

    alias: str
    """LVSTORE/LVOL."""
    done: int
    """Bytes that are zeroed."""
    total: int
    """Bytes to be zeroed."""
    uuid: str


class Lvstore(TypedDict):
    """An lvstore, with SPDK's fields."""

    base_bdev: str
    block_size: int
    """Bytes of a block."""
    cluster_size: int
    """Bytes of a cluster."""
    format_version: int
    """Version of its format on the disk; one before 2 has no snapshots (ours)."""
    free_clusters: int
    kind: NotRequired[str | None]
    """What it is, if it is no lvstore: `rbd`, a pool of Ceph; `iscsi`, one of LUNs of an iSCSI
    target (ours).
    """
    max_bdev_size: int
    """Bytes of the largest bdev that it can be grown to (ours)."""
    name: str
    share_clusters: NotRequired[bool]
    """Whether copies between its lvols share clusters, if so (ours)."""
    stopped: NotRequired[str | None]
    """Why it takes no more changes, if so (ours)."""
    total_data_clusters: int
    uuid: str
    zeroing: NotRequired[list[Zeroing]]
    """Thick lvols that are being created or grown (ours)."""


class ShallowCopyBegun(TypedDict):
    """In the result of bdev_lvol_start_shallow_copy."""

    operation_id: int
    """For bdev_lvol_check_shallow_copy."""


class ExpectedNamespace(TypedDict):
    """What a namespace has to be."""

    block_size: int
    """Bytes of a block."""
    nsid: int
    """Number."""
    uuid: str
    """Identity."""


class NvmePathOf(TypedDict):
    """A path."""

    traddr: str
    """IP address."""
    trsvcid: NotRequired[str | None]
    """Port. Default: 4420"""


class NvmeHost(TypedDict):
    """In the result of bdev_nvme_get_controllers."""

    addr: str
    nqn: str
    svcid: str


class NvmeTrid(TypedDict):
    """Where a controller is."""

    adrfam: str
    subnqn: str
    traddr: str
    trsvcid: str
    trtype: str


class NvmePath(TypedDict):
    """A path."""

    cntlid: int
    host: NvmeHost
    problem: NotRequired[str | None]
    """Why there is no connection (ours)."""
    state: str
    """"enabled", or "failed": there is no connection."""
    trid: NvmeTrid
    """Where a controller is."""


class NvmeController(TypedDict):
    """In the result of bdev_nvme_get_controllers."""

    ctrlrs: list[NvmePath]
    name: str


class NvmeTransport(TypedDict):
    """In the result of bdev_nvme_get_io_paths."""

    adrfam: str
    traddr: str
    trsvcid: str
    trtype: str


class NvmeIoPath(TypedDict):
    """In the result of bdev_nvme_get_io_paths."""

    accessible: bool
    """The namespace can be used there."""
    bdev_name: str
    cntlid: int
    connected: bool
    current: bool
    """I/O goes there."""
    transport: NvmeTransport


class NvmePollGroup(TypedDict):
    """In the result of bdev_nvme_get_io_paths."""

    io_paths: list[NvmeIoPath]
    thread: str
    """Name of the controller's thread."""


class NvmeIoPaths(TypedDict):
    """In the result of bdev_nvme_get_io_paths."""

    poll_groups: list[NvmePollGroup]


class RbdCluster(TypedDict):
    """A cluster, with SPDK's fields."""

    bdevs: list[str]
    """Bdevs on its images (ours)."""
    cluster_name: str
    config_file: NotRequired[str | None]
    config_param: NotRequired[dict[str, str] | None]
    """Without keys."""
    connected: bool
    """Whether the target is connected to it (ours)."""
    core_mask: NotRequired[str | None]
    key_file: NotRequired[str | None]
    problem: NotRequired[str | None]
    """Why it is not; where it is, what has not been answered (ours)."""
    user_id: NotRequired[str | None]


class ConfigCall(TypedDict):
    """A method call as it stands in the file."""

    method: str
    """Name of the method."""
    params: dict[str, Any]
    """Its parameters."""


class LwThread(TypedDict):
    """In the result of framework_get_reactors."""

    cpumask: str
    elapsed: int
    """Ticks since it started."""
    id: int
    name: str


class Reactor(TypedDict):
    """In the result of framework_get_reactors."""

    busy: int
    """Ticks in loops that handled something."""
    idle: int
    """Ticks in loops that handled nothing, spinning."""
    in_interrupt: bool
    """Whether it sleeps when idle."""
    irq: int
    """Clock ticks of the CPU in interrupts (proc(5), /proc/stat)."""
    lcore: int
    """CPU it is pinned to, or its index if to none."""
    lw_threads: list[LwThread]
    sleep: int
    """Ticks asleep (ours)."""
    sleeps: int
    """Times it went to sleep (ours)."""
    sys: int
    """Clock ticks of the CPU in the kernel."""
    tid: int
    """Thread id in the kernel."""
    usr: int
    """Clock ticks of the CPU in user mode."""


class Reactors(TypedDict):
    """In the result of framework_get_reactors."""

    pid: int
    reactors: list[Reactor]
    tick_rate: int
    """Ticks per second of the times below."""


class Subsystem(TypedDict):
    """In the result of framework_get_subsystems."""

    depends_on: list[str]
    subsystem: str


class Notification(TypedDict):
    """Something that happened."""

    ctx: str
    """Name of the bdev, or of the lvstore."""
    id: int
    """Number of the notice, from 0, without gaps."""
    type: str
    """One of `notify_get_types`."""


class ScsiDevice(TypedDict):
    """In the result of scsi_get_devices."""

    device_name: str
    id: int


class VersionFields(TypedDict):
    """In the result of spdk_get_version."""

    major: int
    minor: int
    patch: int
    suffix: str


class Version(TypedDict):
    """In the result of spdk_get_version."""

    fields: VersionFields
    version: str
    """For people."""


class Thread(TypedDict):
    """In the result of thread_get_stats."""

    active_pollers_count: int
    busy: int
    """Ticks in loops that handled something."""
    cpumask: str
    id: int
    idle: int
    """Ticks in loops that handled nothing, or asleep."""
    name: str
    paused_pollers_count: int
    """There is no such kind."""
    timed_pollers_count: int
    """There is no such kind."""


class ThreadStats(TypedDict):
    """In the result of thread_get_stats."""

    threads: list[Thread]
    tick_rate: int
    """Ticks per second of the times below."""


class UblkDisk(TypedDict):
    """In the result of ublk_get_disks."""

    bdev_name: str
    """Name of its bdev."""
    id: int
    """Its number."""
    num_queues: int
    """Queues: 1."""
    queue_depth: int
    """Requests at a time."""
    ublk_device: str
    """The device."""


class BlockDisk(TypedDict):
    """One virtio-blk disk."""

    bdev: str | None
    """Name of the bdev; null once that is gone."""
    block_size: int | None
    """Bytes of a logical block, as the guest sees it."""
    discard: bool
    """Whether the guest may discard blocks, where the bdev takes that."""
    physical_block_size: int | None
    """Bytes of a physical block, null where none was chosen: the bdev's."""
    read_error_policy: str
    """The same of reads."""
    readonly: bool
    """Whether writes are refused."""
    reservations: str
    """As of a target of SCSI."""
    resize_event_at: float | None
    """When the connected guest's front end was last told to look at the size again, in seconds
    since the epoch.
    """
    serial: str | None
    """Serial number that the guest sees, of which it reads 20 characters (ours, as all that
    follows).
    """
    uuid: str | None
    """UUID as which the guest sees the disk, where it was chosen."""
    write_error_policy: str
    """What becomes of writes whose I/O fails: report, enospc or stop."""


class Lun(TypedDict):
    """In the result of vhost_get_controllers."""

    attached_at: float
    """When it was put in place, in seconds since the epoch, as all times."""
    bdev_name: str
    block_size: int
    """Bytes of a logical block, as the guest sees it."""
    discard: bool
    """Whether the guest may discard blocks, where the bdev takes that."""
    ejected: bool
    """Whether the guest has ejected the medium of a removable disk: it is in again when the guest
    loads it or starts anew, and when the target does.
    """
    event_at: float | None
    """When the event that it came was put into the connected guest's ring; null if it was not: the
    guest gave no buffers yet, or started later and scans by itself.
    """
    guest_seen_at: float | None
    """When the connected guest first asked for its capacity; null if it did not."""
    id: int
    physical_block_size: int | None
    """Bytes of a physical block, null where none was chosen: the bdev's."""
    product: str | None
    read_error_policy: str
    """The same of reads."""
    read_only: bool
    """Whether writes are refused."""
    removable: bool
    """Whether the guest sees a removable disk."""
    removal_prevented: bool
    """Whether the guest prevents its removal: Linux does while the disk is open or mounted."""
    reservations: str
    """Whether it is known who has reserved the volume: known, lost, as its record is damaged, or
    unread, as that cannot be read for now. Of one that is not known commands are refused.
    """
    resize_event_at: float | None
    """When the last event that its size changed was put into the connected guest's ring."""
    rotation_rate: int | None
    serial: str
    """Unit serial number that the guest sees (ours, as all that follows)."""
    uuid: str | None
    """UUID as which the guest sees the disk, null where none was chosen: the bdev's."""
    vendor: str | None
    write_cache: bool
    """Whether the guest sees the bdev's volatile cache, if it has one."""
    write_error_policy: str
    """What becomes of writes whose I/O fails: report, enospc or stop."""
    wwn: str | None
    """World wide name, vendor, product and rotation rate, null where none was chosen."""


class ScsiTarget(TypedDict):
    """In the result of vhost_get_controllers."""

    id: int
    luns: list[Lun]
    scsi_dev_num: int
    """Number of the target."""
    target_name: str


class BackendSpecific(TypedDict):
    """What the guest sees of it: one of these."""

    block: NotRequired[BlockDisk]
    """One virtio-blk disk."""
    scsi: NotRequired[list[ScsiTarget]]
    """Targets."""


class Owner(TypedDict):
    """The process that it belongs to; null if to none yet (ours)."""

    command: str
    """Name of its command; empty where that is not visible."""
    pid: int
    """Its number; 0 in another PID namespace."""
    start_time: int
    """When it started, in hundredths of a second since the host's boot; 0 where that is not
    visible.
    """
    uid: int
    """Number of its user."""


class RunningQueue(TypedDict):
    """In the result of vhost_get_controllers."""

    cpu: int
    """CPU of its reactor."""
    queue: int
    """Index of the virtqueue."""


class StoppedQueue(TypedDict):
    """In the result of vhost_get_controllers."""

    queue: int
    """Index of the virtqueue."""
    reason: str


class Session(TypedDict):
    """In the result of vhost_get_controllers."""

    kept: bool
    """Whether it goes on if this process is killed: virtlun-holder has its connection."""
    name: str
    queues: list[RunningQueue]
    """Request queues that run, and where.

    One moves where its reactor has more to do than it can.
    """
    started: bool
    """Whether the VM uses its queues."""
    stopped_queues: list[StoppedQueue]
    """Queues that wait for their driver to reset them, as what was in flight there cannot be known.
    """
    vid: int


class Controller(TypedDict):
    """A controller, with SPDK's fields."""

    adaptive_coalescing: bool
    """They are held back by what is in flight and what becomes of it, as nothing was set (ours)."""
    backend_specific: BackendSpecific
    """What the guest sees of it: one of these."""
    cpumask: str
    ctrlr: str
    delay_base_us: int
    """Microseconds that interrupts are held back for at twice the threshold; 0: by that they are
    not.
    """
    iops_threshold: int
    """I/Os per second of a queue from which on they are."""
    owner: Owner | None
    """The process that it belongs to; null if to none yet (ours)."""
    owner_uid: int | None
    """Number of the user whose processes may be the first to connect, beside root's; null: any that
    may open the socket (ours).
    """
    sessions: list[Session]
    """Connected VMs: one at most."""
    socket: str
    """Path of its socket."""


class OperationLatencies(TypedDict):
    """In the result of virtlun_bdev_get_latencies."""

    counts: list[int]
    """How many took less than each border, and how many there were."""
    operation: Literal["read", "write", "flush", "unmap", "write_zeroes"]


class BdevLatencies(TypedDict):
    """In the result of virtlun_bdev_get_latencies."""

    name: str
    """Name of the bdev."""
    operations: list[OperationLatencies]


class IoLimits(TypedDict):
    """0: not limited."""

    read_bytes_sec: int
    """Bytes a second of reads."""
    read_bytes_sec_max: int
    """Bytes a second of reads in a burst."""
    read_bytes_sec_max_length: int
    """Seconds of such a burst of read_bytes_sec_max; 0 as 1."""
    read_iops_sec: int
    """Reads a second."""
    read_iops_sec_max: int
    """Reads a second in a burst."""
    read_iops_sec_max_length: int
    """Seconds of such a burst of read_iops_sec_max; 0 as 1."""
    size_iops_sec: int
    """Bytes of an operation: one of twice as many counts twice; 0: any counts once."""
    total_bytes_sec: int
    """Bytes a second of reads and writes."""
    total_bytes_sec_max: int
    """Bytes a second of reads and writes in a burst."""
    total_bytes_sec_max_length: int
    """Seconds of such a burst of total_bytes_sec_max; 0 as 1."""
    total_iops_sec: int
    """Reads and writes a second."""
    total_iops_sec_max: int
    """Reads and writes a second in a burst."""
    total_iops_sec_max_length: int
    """Seconds of such a burst of total_iops_sec_max; 0 as 1."""
    write_bytes_sec: int
    """Bytes a second of writes."""
    write_bytes_sec_max: int
    """Bytes a second of writes in a burst."""
    write_bytes_sec_max_length: int
    """Seconds of such a burst of write_bytes_sec_max; 0 as 1."""
    write_iops_sec: int
    """Writes a second."""
    write_iops_sec_max: int
    """Writes a second in a burst."""
    write_iops_sec_max_length: int
    """Seconds of such a burst of write_iops_sec_max; 0 as 1."""


class OwnerProcess(TypedDict):
    """The process as it was recorded, instead of pid. One that has ended is nobody."""

    inode: int
    """Inode number of its pidfd; 0 where the kernel gives none that is good for ever."""
    pid: int
    """Its number; 0 in another PID namespace."""
    start_time: int
    """When it started, in hundredths of a second since the boot; 0 where that is not visible."""
    uid: int
    """Number of its user."""


class NewExport(TypedDict):
    """In the result of virtlun_export_create."""

    path: str
    """The file: for `losetup --direct-io=on`. Or the device, `/dev/ublkbN`."""


class ExportDevices(TypedDict):
    """In the result of virtlun_export_get_devices."""

    resizes: bool
    """Whether such a device takes its bdev's new size while it is used."""
    ublk: bool
    """Whether `device` of virtlun_export_create can make devices of ublk."""
    why: str
    """Why not; empty where both can be had."""


class Export(TypedDict):
    """In the result of virtlun_export_list."""

    bdev_name: str
    """Name of the bdev."""
    flush_error: NotRequired[str | None]
    """Why every flush of it, and so fsync(2) and the like, fails, if so."""
    opens: int
    """How often the file is open, by a loop device for instance.

    Of a device 1 where something has it alone, as a mount has.
    """
    parked: bool
    """Whether another face may have the bdev, and writes are refused for now."""
    path: str
    """The file, or the device `/dev/ublkbN`."""
    read_only: bool
    """Whether writes are refused."""
    size: int
    """Size in bytes, now."""
    survives: str
    """What becomes of it when the target does not serve it: `crash`: whoever has it open waits for
    the next target, also when this one is killed. `restart`: that waits for an orderly restart;
    when this target is killed it gets errors (Linux before 6.9). `nothing`: it gets errors.
    """
    uuid: str
    """UUID of the bdev, the name of the file."""


class StatusImages(TypedDict):
    """Whether it serves images of Ceph."""

    asked: bool
    """Whether it was started with `--rbd`."""
    problem: str | None
    """Why it cannot, although it was."""


class StatusIscsi(TypedDict):
    """Whether it serves LUNs of iSCSI targets."""

    asked: bool
    """Whether it was started with `--iscsi`."""
    problem: str | None
    """Why it cannot, although it was."""


class StatusReactor(TypedDict):
    """In the result of virtlun_get_status."""

    busy_ns: int
    """Nanoseconds in loops that handled something."""
    cpu: int | None
    """CPU it is pinned to."""
    idle_ns: int
    """Nanoseconds in loops that handled nothing."""
    index: int
    sleep_ns: int
    """Nanoseconds asleep."""
    sleeps: int
    """Times it went to sleep."""


class StatusUpgrade(TypedDict):
    """What it took over, if it was not started but upgraded to."""

    from_pid: int
    """Process of the program before."""
    pause_ms: float
    """Milliseconds during which guests were not served."""


class StatusUser(TypedDict):
    """Whom the process runs as: files and block devices of bdevs must be this user's."""

    gid: int
    name: str
    uid: int


class StatusWaiting(TypedDict):
    """In the result of virtlun_get_status."""

    name: str
    """What waits, such as "bdev d0"."""
    since_s: float
    """Seconds since it began to."""
    waits_for: str
    """What for, as a clause such as "/dev/sdx to be opened"."""


class Status(TypedDict):
    """In the result of virtlun_get_status."""

    bdevs: int
    controllers: int
    flush_errors: list[str]
    """Bdevs whose flushes fail because one did, each in a sentence."""
    holder_socket: str
    """Where the holder of exported files listens, be it there or not."""
    holds_sessions: bool
    """Whether the holder keeps connections of VMs, for which the end of this process is a pause
    then.
    """
    images: StatusImages
    """Whether it serves images of Ceph."""
    iscsi: StatusIscsi
    """Whether it serves LUNs of iSCSI targets."""
    lvstores: int
    network: bool
    """Whether it may make network connections, by `--network` or `--rbd`."""
    pid: int
    poll: bool
    """Whether reactors never sleep."""
    reactors: list[StatusReactor]
    refused_calls: list[str]
    """Names of system calls that were refused; each is a fault of the target, or an intruder."""
    restore_problems: list[str]
    """What was configured and is not there, each in a sentence."""
    rpc_socket: str
    sandbox: str
    """What happens to system calls that the target is not known to make: `enforce` (they fail),
    `log` or `off`.
    """
    state_dir: str
    storage_complete: bool
    """Whether each bdev that is configured is there, with the lvstore on it: an lvol that is not
    there then is in no lvstore that this target was told of.
    """
    upgrade: StatusUpgrade | None
    """What it took over, if it was not started but upgraded to."""
    uptime_s: float
    """Seconds since it started."""
    user: StatusUser
    """Whom the process runs as: files and block devices of bdevs must be this user's."""
    version: str
    vhost_dir: str
    waiting: list[StatusWaiting]
    """What waits for a disk that does not answer."""


class CheckedBdev(TypedDict):
    """A bdev with checksums."""

    base_bdev_name: str
    """Bdev that it lies on."""
    cached_regions: int
    """Regions whose checksums are in memory."""
    damaged_blocks: list[int]
    """Numbers of such blocks, of 4096 bytes: some of them."""
    damaged_checksum_pages: int
    """Pages of checksums that were damaged when they were read."""
    damaged_maps: int
    """Maps that were damaged when it was loaded: the checksums of that part were made anew."""
    dirty_regions: int
    """Regions of 1008 blocks that are written to: after a crash their checksums are made anew."""
    mismatches: int
    """Reads, since it was loaded, that met a block which is not what was written to it."""
    name: str
    """Name."""
    stale_regions: int
    """Regions whose checksums are still to be made anew."""


class LunCopy(TypedDict):
    """A copy."""

    bytes_per_second: int
    """Bytes a second that are read at most; 0: as many as the disks can."""
    copied_bytes: int
    """Bytes from the start of the bdev that were dealt with, of so many."""
    ctrlr: str
    dst_bdev_name: str
    """Bdev that it is copied to."""
    error: str | None
    """Why it failed, in one sentence."""
    scsi_target_num: int
    src_bdev_name: str
    """Bdev that is copied, which the target is on."""
    state: str
    """copying; ready: both have the same, and it can be pivoted; failed: it is over, and waits for
    its abort.
    """
    total_bytes: int


class AllocatedRange(TypedDict):
    """A part of an lvol, of whole clusters."""

    length: int
    """Bytes."""
    offset: int
    """Where it begins, in bytes."""


class AllocatedRanges(TypedDict):
    """Parts of an lvol, in order."""

    next_offset: int | None
    """Where the next call is to begin, in bytes; null after the last."""
    ranges: list[AllocatedRange]
    """None may be told though more follow."""


class ChangedRange(TypedDict):
    """A part of an lvol, of whole clusters."""

    length: int
    """Bytes."""
    offset: int
    """Where it begins, in bytes."""


class ChangedRanges(TypedDict):
    """Parts of an lvol, in order."""

    next_offset: int | None
    """Where the next call is to begin, in bytes; null after the last."""
    ranges: list[ChangedRange]
    """None may be told though more follow."""


class LvolSizes(TypedDict):
    """What an lvol takes."""

    allocated: int
    """Bytes of the clusters that it owns."""
    size: int
    """Its size, bytes."""


class LvolSpace(TypedDict):
    """What an lvol shares, bytes."""

    exclusive: int
    """Of its own clusters that nobody else shows: what its deletion frees."""
    shared: int
    """Of clusters of its snapshots that it shows, and of its own that a clone shows."""


class Moving(TypedDict):
    """In the result of virtlun_lvol_move_check."""

    counts: str
    """old; new; neither: the old volume is gone, and the new one has not all of it; unknown: none
    of them is shown to a VM, nor to be deleted.
    """
    of: str
    """UUID of the volume that moves."""
    path: str
    """LVSTORE/LVOL of that."""
    pause_us: int | None
    """Microseconds for which the guest's requests waited when it went on with the new one; null:
    that is not known.
    """
    state: str
    """What is noted at the new volume: copying, mirrored, pivoted or whole."""


class RollBackOf(TypedDict):
    """In the result of virtlun_lvol_roll_back_together."""

    lvol_name: str
    """UUID or LVSTORE/LVOL."""
    snapshot_name: str
    """UUID or LVSTORE/LVOL of the snapshot."""


class SnapshotOf(TypedDict):
    """In the result of virtlun_lvol_snapshot_together."""

    lvol_name: str
    """UUID or LVSTORE/LVOL of what it is taken of."""
    lvol_uuid: NotRequired[str | None]
    """UUID of the snapshot (ours). Default: a random one"""
    snapshot_name: str
    """Name of the snapshot, without the lvstore."""
    xattrs: NotRequired[dict[str, str] | None]
    """Xattrs that the snapshot has from the beginning, name to text (ours). Default: none"""


class LvstoreProblem(TypedDict):
    """Something on the medium that is not as it should be."""

    cause: str
    """What is wrong."""
    place: str
    """Where."""
    repaired: bool
    """It was written anew."""


class CheckedLvstore(TypedDict):
    """What a check of an lvstore found."""

    pages: int
    """Metadata pages that were looked at."""
    problems: list[LvstoreProblem]
    """What was wrong."""


class DumpEntry(TypedDict):
    """A page, or a record of the journal; schemas/blobstore.md says what the facts mean."""

    facts: dict[str, str]
    """What it says, by name."""
    kind: str
    """superblock, record, bitmap, root, extents, index, xattrs, or page for one that cannot be
    read.
    """
    offset: int
    """Where it begins on the device, in bytes."""
    problem: str | None
    """Why it cannot be read; null: it can."""


class DumpedLvstore(TypedDict):
    """Some of what an lvstore has on its medium."""

    entries: list[DumpEntry]
    """In the order of their places."""
    next_page: int | None
    """Metadata page that the next call is to begin with; null after the last."""


class UnreadableOf(TypedDict):
    """An lvol that has data which cannot be read."""

    alias: str
    """LVSTORE/LVOL."""
    offset: int
    """Where it begins there, in bytes."""


class Unreadable(TypedDict):
    """Data that cannot be read."""

    cause: str
    """What the device says."""
    length: int
    """Bytes."""
    lvols: list[UnreadableOf]
    """Whose it is."""
    offset: int
    """Where it begins on the device, in bytes."""


class Scrubbed(TypedDict):
    """Some of the data of an lvstore's lvols, read."""

    bytes: int
    """Bytes that were read, or could not be."""
    next_offset: int | None
    """Byte of the device that the next call is to begin with; null after the last."""
    unreadable: list[Unreadable]
    """What could not be."""


class TargetStats(TypedDict):
    """In the result of virtlun_vhost_get_stats."""

    bdev_name: str
    errors: int
    """Commands that ended with a status other than GOOD."""
    flush_ns: int
    """Nanoseconds from ring to ring, summed."""
    flushes: int
    full_waits: int
    """Times that requests of a virtio-blk disk waited as others had all of the bdev's queue."""
    others: int
    """Other commands."""
    read_bytes: int
    read_ns: int
    """Nanoseconds from ring to ring, summed."""
    reads: int
    scsi_target_num: int
    write_bytes: int
    write_ns: int
    """Nanoseconds from ring to ring, summed."""
    writes: int


class ControllerStats(TypedDict):
    """What a controller and its targets did (libvirt's block statistics)."""

    ctrlr: str
    errors: int
    """Requests that did not end well."""
    events_missed: int
    """Events lost because the guest gave no buffers."""
    events_sent: int
    """Events put into the event queue."""
    interrupts: int
    """Interrupts given to the guest."""
    malformed: int
    """Descriptor chains that broke the rules of virtio."""
    requests: int
    """Requests taken from request queues."""
    targets: list[TargetStats]


class SuspendedTarget(TypedDict):
    """A target whose requests wait because an I/O failed."""

    bdev_name: str
    ctrlr: str
    error: str
    """How the I/O failed: no_space, read_medium, write_medium or resources."""
    overtaken: bool
    """Whether the VM is not to be saved or migrated: its queues have stopped, and requests of a
    virtio-blk disk's are known to QEMU's in-flight region alone, which does not go along.
    """
    scsi_target_num: int
    since: float
    """When, in seconds since the epoch."""


class BdevGetBdevsParams(TypedDict):
    """The parameters of bdev_get_bdevs, in a batch."""

    name: NotRequired[str | None]
    timeout: NotRequired[int | None]


class BdevLvolGetLvstoresParams(TypedDict):
    """The parameters of bdev_lvol_get_lvstores, in a batch."""

    lvs_name: NotRequired[str | None]
    uuid: NotRequired[str | None]


class VirtlunLvolGetXattrsParams(TypedDict):
    """The parameters of virtlun_lvol_get_xattrs, in a batch."""

    name: str


class VirtlunVhostGetStatsParams(TypedDict):
    """The parameters of virtlun_vhost_get_stats, in a batch."""

    name: NotRequired[str | None]
    scsi_target_num: NotRequired[int | None]


class Rpc(ABC):
    @abstractmethod
    def call_raw(self, method: str, **params: Any) -> Any: ...

    # Give the target a key. It is kept in memory only, goes along in an upgrade, and has to be
    # given again after a restart: then the bdevs that wait for it come back. Another key than
    # theirs is refused.
    @overload
    def call(
        self,
        method: Literal["accel_crypto_key_create"],
        /,
        *,
        cipher: Literal["AES_CBC", "AES_XTS"],
        destroy_with_last: bool | None = ...,
        key: str,
        key2: str | None = ...,
        name: str,
        tweak_mode: Literal["SIMPLE_LBA", "JOIN_NEG_LBA_WITH_LBA", "INCR_512_FULL_LBA", "INCR_512_UPPER_LBA"] | None = ...,
    ) -> bool: ...

    # Wipe a key; refused while a bdev uses it.
    @overload
    def call(
        self,
        method: Literal["accel_crypto_key_destroy"],
        /,
        *,
        key_name: str,
    ) -> bool: ...

    # Get all keys, or one: what they are, never the keys themselves.
    @overload
    def call(
        self,
        method: Literal["accel_crypto_keys_get"],
        /,
        *,
        key_name: str | None = ...,
    ) -> list[CryptoKey]: ...

    # Create a bdev on a file or block device. An lvstore on it is loaded.
    @overload
    def call(
        self,
        method: Literal["bdev_aio_create"],
        /,
        *,
        block_size: int | None = ...,
        dif_type: int | None = ...,
        fallocate: bool | None = ...,
        filename: str,
        name: str,
        nowait: bool | None = ...,
        readonly: bool | None = ...,
        uuid: str | None = ...,
    ) -> str: ...

    # Delete a bdev; an lvstore on it is unloaded first. The file stays.
    @overload
    def call(
        self,
        method: Literal["bdev_aio_delete"],
        /,
        *,
        name: str,
    ) -> bool: ...

    # Take over the size that the file or block device has now.
    @overload
    def call(
        self,
        method: Literal["bdev_aio_rescan"],
        /,
        *,
        name: str,
    ) -> bool: ...

    # Create a bdev whose blocks lie encrypted on another, which it has for itself. An lvstore on it
    # is loaded. An lvol notes which key its data is encrypted with, as a check value.
    @overload
    def call(
        self,
        method: Literal["bdev_crypto_create"],
        /,
        *,
        base_bdev_name: str,
        cipher: Literal["AES_CBC", "AES_XTS"] | None = ...,
        crypto_pmd: str | None = ...,
        key: str | None = ...,
        key2: str | None = ...,
        key_check: str | None = ...,
        key_name: str | None = ...,
        name: str,
    ) -> str: ...

    # Delete an encrypted bdev; an lvstore on it is unloaded first. The encrypted data stays.
    @overload
    def call(
        self,
        method: Literal["bdev_crypto_delete"],
        /,
        *,
        name: str,
    ) -> bool: ...

    # Create a bdev that shows another, which it has for itself, and answers reads and writes later
    # than that: for tests.
    @overload
    def call(
        self,
        method: Literal["bdev_delay_create"],
        /,
        *,
        avg_read_latency: int,
        avg_write_latency: int,
        base_bdev_name: str,
        name: str,
        p99_read_latency: int,
        p99_write_latency: int,
        uuid: str | None = ...,
    ) -> str: ...

    # Delete a bdev of bdev_delay_create.
    @overload
    def call(
        self,
        method: Literal["bdev_delay_delete"],
        /,
        *,
        name: str,
    ) -> bool: ...

    # Change a latency of a bdev of bdev_delay_create, in use or not.
    @overload
    def call(
        self,
        method: Literal["bdev_delay_update_latency"],
        /,
        *,
        delay_bdev_name: str,
        latency_type: Literal["avg_read", "p99_read", "avg_write", "p99_write"],
        latency_us: int,
    ) -> bool: ...

    # Count in a histogram how long a bdev's operations take, or end that. It is not recorded, and
    # ends with the bdev. Each queue of a disk in memory, whose I/O ends at once, may leave out its
    # first 15.
    @overload
    def call(
        self,
        method: Literal["bdev_enable_histogram"],
        /,
        *,
        enable: bool,
        granularity: int | None = ...,
        max_nsec: int | None = ...,
        min_nsec: int | None = ...,
        name: str,
        opc: Literal["read", "write", "flush", "unmap", "write_zeroes"] | None = ...,
    ) -> bool: ...

    # Create a bdev that shows another, which it has for itself, and the errors of
    # bdev_error_inject_error: for tests.
    @overload
    def call(
        self,
        method: Literal["bdev_error_create"],
        /,
        *,
        base_name: str,
        uuid: str | None = ...,
    ) -> bool: ...

    # Delete a bdev of bdev_error_create. What is pending has to go on before.
    @overload
    def call(
        self,
        method: Literal["bdev_error_delete"],
        /,
        *,
        name: str,
    ) -> bool: ...

    # Have the next I/Os of a kind go wrong, in place of what was asked for before. Nothing of it is
    # recorded.
    @overload
    def call(
        self,
        method: Literal["bdev_error_inject_error"],
        /,
        *,
        corrupt_offset: int | None = ...,
        corrupt_value: int | None = ...,
        error_type: Literal["failure", "pending", "corrupt_data", "nomem"],
        io_type: Literal["clear", "read", "write", "unmap", "flush", "all"],
        name: str,
        num: int | None = ...,
        nvme_sc: int | None = ...,
        nvme_sct: int | None = ...,
        queue_depth: int | None = ...,
    ) -> bool: ...

    # Have I/Os go on that bdev_error_inject_error has pending.
    @overload
    def call(
        self,
        method: Literal["bdev_error_resume_pending"],
        /,
        *,
        name: str,
    ) -> bool: ...

    # Look for an lvstore on a bdev and load it; for one that could not be loaded before.
    @overload
    def call(
        self,
        method: Literal["bdev_examine"],
        /,
        *,
        name: str,
    ) -> bool: ...

    # Get all bdevs, or one.
    @overload
    def call(
        self,
        method: Literal["bdev_get_bdevs"],
        /,
        *,
        name: str | None = ...,
        timeout: int | None = ...,
    ) -> list[Bdev]: ...

    # Get the histogram of a bdev: how often its operations took how long, in ticks.
    @overload
    def call(
        self,
        method: Literal["bdev_get_histogram"],
        /,
        *,
        name: str,
    ) -> Histogram: ...

    # Get how many operations of a bdev's histogram took less than each of some latencies.
    @overload
    def call(
        self,
        method: Literal["bdev_get_histogram_borders"],
        /,
        *,
        borders: list[int],
        name: str,
    ) -> HistogramBorders: ...

    # Get I/O statistics of all bdevs, of some, or of each channel of one.
    @overload
    def call(
        self,
        method: Literal["bdev_get_iostat"],
        /,
        *,
        name: str | None = ...,
        names: list[str] | None = ...,
        per_channel: Literal[False] | None = ...,
        reset_mode: Literal["all", "maxmin", "error", "none"] | None = ...,
    ) -> Iostat: ...

    # Get I/O statistics of all bdevs, of some, or of each channel of one.
    @overload
    def call(
        self,
        method: Literal["bdev_get_iostat"],
        /,
        *,
        name: str | None = ...,
        names: list[str] | None = ...,
        per_channel: Literal[True],
        reset_mode: Literal["all", "maxmin", "error", "none"] | None = ...,
    ) -> ChannelsIostat: ...

    # Create a bdev on a LUN of an iSCSI target. Where the session is lost, I/O waits and what was
    # not answered is sent again. An lvstore on it is loaded. Needs the option --iscsi and Debian's
    # package libiscsi7.
    @overload
    def call(
        self,
        method: Literal["bdev_iscsi_create"],
        /,
        *,
        guest_disk: bool | None = ...,
        initiator_iqn: str,
        isid: str | None = ...,
        lun_block_size: int | None = ...,
        lun_uuid: str | None = ...,
        name: str,
        password: str | None = ...,
        pool: str | None = ...,
        read_only: bool | None = ...,
        shared: bool | None = ...,
        url: str,
        user: str | None = ...,
        uuid: str | None = ...,
        write_through: bool | None = ...,
    ) -> str: ...

    # Delete a bdev on a LUN of an iSCSI target, and log out; an lvstore on it is unloaded first.
    # The LUN stays as it is.
    @overload
    def call(
        self,
        method: Literal["bdev_iscsi_delete"],
        /,
        *,
        name: str,
    ) -> bool: ...

    # Set what holds for all bdevs on LUNs of iSCSI targets, from now on.
    @overload
    def call(
        self,
        method: Literal["bdev_iscsi_set_options"],
        /,
        *,
        timeout_sec: int | None = ...,
    ) -> bool: ...

    # Get how far a shallow copy has come; one that has ended is told once.
    @overload
    def call(
        self,
        method: Literal["bdev_lvol_check_shallow_copy"],
        /,
        *,
        operation_id: int,
    ) -> ShallowCopyState: ...

    # Create a clone of a snapshot and return its UUID. It takes nothing until it is written.
    @overload
    def call(
        self,
        method: Literal["bdev_lvol_clone"],
        /,
        *,
        clone_name: str,
        lvol_uuid: str | None = ...,
        snapshot_name: str,
        xattrs: dict[str, str] | None = ...,
    ) -> str: ...

    # Create a clone of any bdev, such as a read-only image file, and return its UUID. It takes
    # nothing until it is written; nobody may write to the bdev meanwhile.
    @overload
    def call(
        self,
        method: Literal["bdev_lvol_clone_bdev"],
        /,
        *,
        bdev: str,
        clone_name: str,
        lvol_uuid: str | None = ...,
        lvs_name: str,
        xattrs: dict[str, str] | None = ...,
    ) -> str: ...

    # Create an lvol and return its UUID, which is the name of its bdev.
    @overload
    def call(
        self,
        method: Literal["bdev_lvol_create"],
        /,
        *,
        clear_method: Literal["default", "none", "unmap", "write_zeroes"] | None = ...,
        dif_type: int | None = ...,
        key_name: str | None = ...,
        lvol_name: str,
        lvol_uuid: str | None = ...,
        lvs_name: str | None = ...,
        size_in_mib: int,
        thin_provision: bool | None = ...,
        uuid: str | None = ...,
        xattrs: dict[str, str] | None = ...,
    ) -> str: ...

    # Create an lvstore on a bdev and return its UUID.
    @overload
    def call(
        self,
        method: Literal["bdev_lvol_create_lvstore"],
        /,
        *,
        bdev_name: str,
        clear_method: Literal["none", "unmap", "write_zeroes"] | None = ...,
        cluster_sz: int | None = ...,
        lvs_name: str,
        md_page_size: int | None = ...,
        num_md_pages_per_cluster_ratio: int | None = ...,
        share_clusters: bool | None = ...,
        uuid: str | None = ...,
    ) -> str: ...

    # Give an lvol, in use or not, what its parent itself has: it has that one's parent then, or
    # none.
    @overload
    def call(
        self,
        method: Literal["bdev_lvol_decouple_parent"],
        /,
        *,
        name: str,
    ) -> bool: ...

    # Delete an lvol and its data; refused while it is in use. A snapshot's one clone takes over
    # what it shows; one with more clones is refused.
    @overload
    def call(
        self,
        method: Literal["bdev_lvol_delete"],
        /,
        *,
        name: str,
    ) -> bool: ...

    # Delete an lvstore with all its lvols; refused while one of them is in use.
    @overload
    def call(
        self,
        method: Literal["bdev_lvol_delete_lvstore"],
        /,
        *,
        lvs_name: str | None = ...,
        uuid: str | None = ...,
    ) -> bool: ...

    # Get the lvols of all lvstores, or of one.
    @overload
    def call(
        self,
        method: Literal["bdev_lvol_get_lvols"],
        /,
        *,
        lvs_name: str | None = ...,
        lvs_uuid: str | None = ...,
    ) -> list[Lvol]: ...

    # Get all lvstores, or one.
    @overload
    def call(
        self,
        method: Literal["bdev_lvol_get_lvstores"],
        /,
        *,
        lvs_name: str | None = ...,
        uuid: str | None = ...,
    ) -> list[Lvstore]: ...

    # Grow an lvstore, in use or not, to the size that its bdev has now.
    @overload
    def call(
        self,
        method: Literal["bdev_lvol_grow_lvstore"],
        /,
        *,
        lvs_name: str | None = ...,
        uuid: str | None = ...,
    ) -> bool: ...

    # Give an lvol, in use or not, all clusters that it lacks: it is thick then, without a parent.
    @overload
    def call(
        self,
        method: Literal["bdev_lvol_inflate"],
        /,
        *,
        name: str,
    ) -> bool: ...

    # Rename an lvol. Its UUID, the name of its bdev, stays.
    @overload
    def call(
        self,
        method: Literal["bdev_lvol_rename"],
        /,
        *,
        new_name: str,
        old_name: str,
    ) -> bool: ...

    # Rename an lvstore; the aliases of its lvols follow.
    @overload
    def call(
        self,
        method: Literal["bdev_lvol_rename_lvstore"],
        /,
        *,
        new_name: str,
        old_name: str,
    ) -> bool: ...

    # Grow or shrink an lvol, in use or not.
    @overload
    def call(
        self,
        method: Literal["bdev_lvol_resize"],
        /,
        *,
        name: str,
        size_in_mib: int,
    ) -> bool: ...

    # Give a thin lvol that nobody uses a snapshot of its size as its parent.
    @overload
    def call(
        self,
        method: Literal["bdev_lvol_set_parent"],
        /,
        *,
        lvol_name: str,
        parent_name: str,
    ) -> bool: ...

    # Give a thin lvol that nobody uses a bdev of its size as its parent.
    @overload
    def call(
        self,
        method: Literal["bdev_lvol_set_parent_bdev"],
        /,
        *,
        lvol_name: str,
        parent_name: str,
    ) -> bool: ...

    # Make an lvol read-only for good; refused while it is in use.
    @overload
    def call(
        self,
        method: Literal["bdev_lvol_set_read_only"],
        /,
        *,
        name: str,
    ) -> bool: ...

    # Take a snapshot of an lvol, in use or not, and return its UUID. What was written before is
    # durable then.
    @overload
    def call(
        self,
        method: Literal["bdev_lvol_snapshot"],
        /,
        *,
        lvol_name: str,
        lvol_uuid: str | None = ...,
        snapshot_name: str,
        xattrs: dict[str, str] | None = ...,
    ) -> str: ...

    # Begin to copy what a read-only lvol itself has, without what its snapshots have, to the same
    # places of a bdev.
    @overload
    def call(
        self,
        method: Literal["bdev_lvol_start_shallow_copy"],
        /,
        *,
        dst_bdev_name: str,
        src_lvol_name: str,
    ) -> ShallowCopyBegun: ...

    # Create a bdev in memory. Its contents survive an upgrade, but no restart, of the target.
    @overload
    def call(
        self,
        method: Literal["bdev_malloc_create"],
        /,
        *,
        block_size: int,
        dif_is_head_of_md: bool | None = ...,
        dif_pi_format: int | None = ...,
        dif_type: int | None = ...,
        md_interleave: bool | None = ...,
        md_size: int | None = ...,
        name: str | None = ...,
        num_blocks: int,
        numa_id: int | None = ...,
        optimal_io_boundary: int | None = ...,
        physical_block_size: int | None = ...,
        uuid: str | None = ...,
    ) -> str: ...

    # Delete a bdev in memory.
    @overload
    def call(
        self,
        method: Literal["bdev_malloc_delete"],
        /,
        *,
        name: str,
    ) -> bool: ...

    # Create a bdev that takes every write and reads as nothing in particular.
    @overload
    def call(
        self,
        method: Literal["bdev_null_create"],
        /,
        *,
        block_size: int,
        dif_is_head_of_md: bool | None = ...,
        dif_pi_format: int | None = ...,
        dif_type: int | None = ...,
        md_size: int | None = ...,
        name: str,
        num_blocks: int,
        optimal_write_size: int | None = ...,
        physical_block_size: int | None = ...,
        preferred_unmap_alignment: int | None = ...,
        preferred_unmap_granularity: int | None = ...,
        preferred_write_alignment: int | None = ...,
        preferred_write_granularity: int | None = ...,
        uuid: str | None = ...,
    ) -> str: ...

    # Delete a null bdev.
    @overload
    def call(
        self,
        method: Literal["bdev_null_delete"],
        /,
        *,
        name: str,
    ) -> bool: ...

    # Change the size of a null bdev, in use or not.
    @overload
    def call(
        self,
        method: Literal["bdev_null_resize"],
        /,
        *,
        name: str,
        new_size: int,
    ) -> bool: ...

    # Connect to an NVMe controller over TCP, and create a bdev of each of its namespaces; or add a
    # path to one that is attached. Where a connection is lost, I/O waits and what was not answered
    # is sent again. An lvstore on a bdev is loaded. Needs the option --network.
    @overload
    def call(
        self,
        method: Literal["bdev_nvme_attach_controller"],
        /,
        *,
        adrfam: str | None = ...,
        allow_unrecognized_csi: bool | None = ...,
        ctrlr_loss_timeout_sec: int | None = ...,
        ddgst: bool | None = ...,
        dhchap_ctrlr_key: str | None = ...,
        dhchap_key: str | None = ...,
        disable_sq_flow_control: bool | None = ...,
        fabrics_connect_timeout_us: int | None = ...,
        fast_io_fail_timeout_sec: int | None = ...,
        hdgst: bool | None = ...,
        hostaddr: str | None = ...,
        hostnqn: str | None = ...,
        hostsvcid: str | None = ...,
        max_bdevs: int | None = ...,
        multipath: str | None = ...,
        multipath_opts: Any | None = ...,
        name: str,
        namespaces: list[ExpectedNamespace] | None = ...,
        num_io_queues: int | None = ...,
        paths: list[NvmePathOf] | None = ...,
        pool: str | None = ...,
        prchk_guard: bool | None = ...,
        prchk_reftag: bool | None = ...,
        priority: str | None = ...,
        psk: str | None = ...,
        reconnect_delay_sec: int | None = ...,
        subnqn: str | None = ...,
        traddr: str,
        trsvcid: str | None = ...,
        trtype: str,
        write_through: bool | None = ...,
    ) -> list[str]: ...

    # Delete the bdevs of an NVMe controller, and disconnect; an lvstore on one is unloaded first.
    # Where one of them stays, the others come back. Or use one of its paths no more.
    @overload
    def call(
        self,
        method: Literal["bdev_nvme_detach_controller"],
        /,
        *,
        adrfam: str | None = ...,
        hostaddr: str | None = ...,
        hostsvcid: str | None = ...,
        name: str,
        subnqn: str | None = ...,
        traddr: str | None = ...,
        trsvcid: str | None = ...,
        trtype: str | None = ...,
    ) -> bool: ...

    # Get all NVMe controllers, or one, with their paths.
    @overload
    def call(
        self,
        method: Literal["bdev_nvme_get_controllers"],
        /,
        *,
        name: str | None = ...,
    ) -> list[NvmeController]: ...

    # Get the paths of all bdevs on NVMe controllers, or of one bdev.
    @overload
    def call(
        self,
        method: Literal["bdev_nvme_get_io_paths"],
        /,
        *,
        name: str | None = ...,
    ) -> NvmeIoPaths: ...

    # Set what holds for all NVMe controllers that are attached from now on.
    @overload
    def call(
        self,
        method: Literal["bdev_nvme_set_options"],
        /,
        *,
        action_on_timeout: str | None = ...,
        allow_accel_sequence: bool | None = ...,
        arbitration_burst: int | None = ...,
        bdev_retry_count: int | None = ...,
        ctrlr_loss_timeout_sec: int | None = ...,
        delay_cmd_submit: bool | None = ...,
        dhchap_dhgroups: list[str] | None = ...,
        dhchap_digests: list[str] | None = ...,
        disable_auto_failback: bool | None = ...,
        enable_flush: bool | None = ...,
        fast_io_fail_timeout_sec: int | None = ...,
        generate_uuids: bool | None = ...,
        high_priority_weight: int | None = ...,
        io_path_stat: bool | None = ...,
        io_queue_requests: int | None = ...,
        keep_alive_timeout_ms: int | None = ...,
        low_priority_weight: int | None = ...,
        medium_priority_weight: int | None = ...,
        multipath_opts: Any | None = ...,
        nvme_adminq_poll_period_us: int | None = ...,
        nvme_error_stat: bool | None = ...,
        nvme_ioq_poll_period_us: int | None = ...,
        rdma_cm_event_timeout_ms: int | None = ...,
        rdma_max_cq_size: int | None = ...,
        rdma_srq_size: int | None = ...,
        rdma_umr_per_io: bool | None = ...,
        reconnect_delay_sec: int | None = ...,
        tcp_connect_timeout_ms: int | None = ...,
        timeout_admin_us: int | None = ...,
        timeout_us: int | None = ...,
        transport_ack_timeout: int | None = ...,
        transport_retry_count: int | None = ...,
        transport_tos: int | None = ...,
    ) -> bool: ...

    # Create a bdev on an image of Ceph, which is locked for this target unless it is shared or
    # read-only. An lvstore on it is loaded.
    @overload
    def call(
        self,
        method: Literal["bdev_rbd_create"],
        /,
        *,
        block_size: int,
        cluster_name: str | None = ...,
        config: dict[str, str] | None = ...,
        config_file: str | None = ...,
        guest_disk: bool | None = ...,
        incoming: bool | None = ...,
        name: str | None = ...,
        pool: str | None = ...,
        pool_name: str,
        rbd_name: str,
        read_only: bool | None = ...,
        shared: bool | None = ...,
        user_id: str | None = ...,
        uuid: str | None = ...,
    ) -> str: ...

    # Delete a bdev on an image; an lvstore on it is unloaded first. The image stays.
    @overload
    def call(
        self,
        method: Literal["bdev_rbd_delete"],
        /,
        *,
        name: str,
    ) -> bool: ...

    # Get all clusters that are registered, or one; an error where there is none, as SPDK.
    @overload
    def call(
        self,
        method: Literal["bdev_rbd_get_clusters_info"],
        /,
        *,
        name: str | None = ...,
    ) -> RbdCluster | list[RbdCluster]: ...

    # Connect to a cluster of Ceph, whose images bdevs can be on then. Needs the option --rbd and
    # Debian's package librbd1.
    @overload
    def call(
        self,
        method: Literal["bdev_rbd_register_cluster"],
        /,
        *,
        config_file: str | None = ...,
        config_param: dict[str, str] | None = ...,
        core_mask: str | None = ...,
        key_file: str | None = ...,
        name: str,
        user_id: str | None = ...,
    ) -> str: ...

    # Make an image larger, in use or not. One that another client resizes is noticed without.
    @overload
    def call(
        self,
        method: Literal["bdev_rbd_resize"],
        /,
        *,
        name: str,
        new_size: int,
    ) -> bool: ...

    # End the connection to a cluster; refused while there are bdevs on its images.
    @overload
    def call(
        self,
        method: Literal["bdev_rbd_unregister_cluster"],
        /,
        *,
        name: str,
    ) -> bool: ...

    # Reset I/O statistics of all bdevs or of one, for all who look at them.
    @overload
    def call(
        self,
        method: Literal["bdev_reset_iostat"],
        /,
        *,
        mode: Literal["all", "maxmin", "error", "none"] | None = ...,
        name: str | None = ...,
    ) -> bool: ...

    # Limit how much I/O a bdev does a second, of all who use it together, at once and after each
    # start. As SPDK's, which knows no bursts: a limit that is given has none from then on.
    @overload
    def call(
        self,
        method: Literal["bdev_set_qos_limit"],
        /,
        *,
        name: str,
        r_mbytes_per_sec: int | None = ...,
        rw_ios_per_sec: int | None = ...,
        rw_mbytes_per_sec: int | None = ...,
        w_mbytes_per_sec: int | None = ...,
    ) -> bool: ...

    # Create a bdev on a file or block device. An lvstore on it is loaded.
    @overload
    def call(
        self,
        method: Literal["bdev_uring_create"],
        /,
        *,
        block_size: int | None = ...,
        dif_type: int | None = ...,
        filename: str,
        name: str,
        uuid: str | None = ...,
    ) -> str: ...

    # Delete a bdev; an lvstore on it is unloaded first. The file stays.
    @overload
    def call(
        self,
        method: Literal["bdev_uring_delete"],
        /,
        *,
        name: str,
    ) -> bool: ...

    # Take over the size that the file or block device has now.
    @overload
    def call(
        self,
        method: Literal["bdev_uring_rescan"],
        /,
        *,
        name: str,
    ) -> bool: ...

    # Return when all bdevs have been examined, which here is before a bdev is shown at all.
    @overload
    def call(
        self,
        method: Literal["bdev_wait_for_examine"],
        /,
    ) -> bool: ...

    # Get the calls that configure a subsystem as it is now. Lvstores and lvols are not among them:
    # they are found on their bdevs.
    @overload
    def call(
        self,
        method: Literal["framework_get_config"],
        /,
        *,
        name: str,
        with_batches: bool | None = ...,
    ) -> list[ConfigCall]: ...

    # Get all reactors with their times.
    @overload
    def call(
        self,
        method: Literal["framework_get_reactors"],
        /,
    ) -> Reactors: ...

    # Get the subsystems in initialisation order, each with those it depends on.
    @overload
    def call(
        self,
        method: Literal["framework_get_subsystems"],
        /,
    ) -> list[Subsystem]: ...

    # Restore what was configured and let all methods be called; for a target started with --wait-
    # for-rpc.
    @overload
    def call(
        self,
        method: Literal["framework_start_init"],
        /,
    ) -> bool: ...

    # Do not return until the target is initialised.
    @overload
    def call(
        self,
        method: Literal["framework_wait_init"],
        /,
    ) -> bool: ...

    # Get the least severity that is logged. Log level and print level are one.
    @overload
    def call(
        self,
        method: Literal["log_get_level"],
        /,
    ) -> Literal["ERROR", "WARNING", "NOTICE", "INFO", "DEBUG"]: ...

    # Get the least severity that is logged. Log level and print level are one.
    @overload
    def call(
        self,
        method: Literal["log_get_print_level"],
        /,
    ) -> Literal["ERROR", "WARNING", "NOTICE", "INFO", "DEBUG"]: ...

    # Set the least severity that is logged. Log level and print level are one.
    @overload
    def call(
        self,
        method: Literal["log_set_level"],
        /,
        *,
        level: Literal["ERROR", "WARNING", "NOTICE", "INFO", "DEBUG"],
    ) -> bool: ...

    # Set the least severity that is logged. Log level and print level are one.
    @overload
    def call(
        self,
        method: Literal["log_set_print_level"],
        /,
        *,
        level: Literal["ERROR", "WARNING", "NOTICE", "INFO", "DEBUG"],
    ) -> bool: ...

    # Get notifications from a number on. The last 1024 are kept.
    @overload
    def call(
        self,
        method: Literal["notify_get_notifications"],
        /,
        *,
        id: int | None = ...,
        max: int | None = ...,
    ) -> list[Notification]: ...

    # Get the types of notifications.
    @overload
    def call(
        self,
        method: Literal["notify_get_types"],
        /,
    ) -> list[str]: ...

    # Get an array of supported RPC methods.
    @overload
    def call(
        self,
        method: Literal["rpc_get_methods"],
        /,
        *,
        current: bool | None = ...,
        include_aliases: bool | None = ...,
    ) -> list[str]: ...

    # Get all SCSI devices: the targets of all controllers.
    @overload
    def call(
        self,
        method: Literal["scsi_get_devices"],
        /,
    ) -> list[ScsiDevice]: ...

    # Get the version of the running target.
    @overload
    def call(
        self,
        method: Literal["spdk_get_version"],
        /,
    ) -> Version: ...

    # Send a signal to the target.
    @overload
    def call(
        self,
        method: Literal["spdk_kill_instance"],
        /,
        *,
        sig_name: Literal["SIGINT", "SIGTERM", "SIGQUIT", "SIGHUP", "SIGKILL", "SIGUSR1"],
    ) -> bool: ...

    # Get the times of all polling threads, one per reactor.
    @overload
    def call(
        self,
        method: Literal["thread_get_stats"],
        /,
    ) -> ThreadStats: ...

    # Allow devices to be started by ublk_start_disk. Refused where the kernel cannot recover
    # devices, or the holder may not make them.
    @overload
    def call(
        self,
        method: Literal["ublk_create_target"],
        /,
        *,
        cpumask: str | None = ...,
        disable_user_copy: bool | None = ...,
    ) -> bool: ...

    # Stop the devices that were started by ublk_start_disk or ublk_recover_disk, and allow no
    # others. Those of virtlun_export_create stay.
    @overload
    def call(
        self,
        method: Literal["ublk_destroy_target"],
        /,
    ) -> bool: ...

    # Get one or all devices that this target serves, those of virtlun_export_create too.
    @overload
    def call(
        self,
        method: Literal["ublk_get_disks"],
        /,
        *,
        ublk_id: int | None = ...,
    ) -> list[UblkDisk]: ...

    # Go on with a device of a bdev that another process has left; returns its number. Only for one
    # that is not recorded here: a target goes on by itself with those that it had.
    @overload
    def call(
        self,
        method: Literal["ublk_recover_disk"],
        /,
        *,
        bdev_name: str,
        ublk_id: int,
    ) -> int: ...

    # Show a bdev as the block device /dev/ublkbN of the kernel's; returns N. It is an export, as
    # one of virtlun_export_create with device: it is recorded, what has it open waits while the
    # target is away, killed, restarted or exchanged, and nobody else can claim the bdev.
    @overload
    def call(
        self,
        method: Literal["ublk_start_disk"],
        /,
        *,
        bdev_name: str,
        num_queues: int | None = ...,
        parked: bool | None = ...,
        queue_depth: int | None = ...,
        ublk_id: int,
    ) -> int: ...

    # Take a device away, also one of virtlun_export_create, whether or not something has it open:
    # that gets errors, and what a file system on it has not written yet is lost.
    @overload
    def call(
        self,
        method: Literal["ublk_stop_disk"],
        /,
        *,
        ublk_id: int,
    ) -> bool: ...

    # Control how long a controller's interrupts are held back, so that one tells of several I/Os.
    @overload
    def call(
        self,
        method: Literal["vhost_controller_set_coalescing"],
        /,
        *,
        adaptive: bool | None = ...,
        ctrlr: str,
        delay_base_us: int,
        iops_threshold: int,
    ) -> bool: ...

    # Create a controller whose guest sees one virtio-blk disk, and that listens on its socket.
    @overload
    def call(
        self,
        method: Literal["vhost_create_blk_controller"],
        /,
        *,
        block_size: int | None = ...,
        cpumask: str | None = ...,
        ctrlr: str,
        delay: bool | None = ...,
        dev_name: str,
        discard: bool | None = ...,
        incoming: bool | None = ...,
        own_folder: bool | None = ...,
        owner_uid: int | None = ...,
        packed_ring: bool | None = ...,
        packed_ring_recovery: bool | None = ...,
        physical_block_size: int | None = ...,
        read_error_policy: Literal["report", "stop"] | None = ...,
        readonly: bool | None = ...,
        serial: str | None = ...,
        shareable: bool | None = ...,
        socket: str | None = ...,
        socket_gid: int | None = ...,
        transport: str | None = ...,
        uuid: str | None = ...,
        write_error_policy: Literal["report", "enospc", "stop"] | None = ...,
    ) -> bool: ...

    # Create a controller that listens on its socket.
    @overload
    def call(
        self,
        method: Literal["vhost_create_scsi_controller"],
        /,
        *,
        cpumask: str | None = ...,
        ctrlr: str,
        delay: bool | None = ...,
        own_folder: bool | None = ...,
        owner_uid: int | None = ...,
        socket_gid: int | None = ...,
    ) -> bool: ...

    # Delete a controller with its targets; refused while a VM is connected.
    @overload
    def call(
        self,
        method: Literal["vhost_delete_controller"],
        /,
        *,
        ctrlr: str,
        force: bool | None = ...,
    ) -> bool: ...

    # Get all controllers with their targets and sessions, or one.
    @overload
    def call(
        self,
        method: Literal["vhost_get_controllers"],
        /,
        *,
        name: str | None = ...,
    ) -> list[Controller]: ...

    # Show a bdev as a target of a controller and return its number. A connected guest sees the new
    # disk at once.
    @overload
    def call(
        self,
        method: Literal["vhost_scsi_controller_add_target"],
        /,
        *,
        bdev_name: str,
        block_size: int | None = ...,
        ctrlr: str,
        discard: bool | None = ...,
        incoming: bool | None = ...,
        physical_block_size: int | None = ...,
        product: str | None = ...,
        read_error_policy: Literal["report", "stop"] | None = ...,
        read_only: bool | None = ...,
        removable: bool | None = ...,
        rotation_rate: int | None = ...,
        scsi_target_num: int,
        serial: str | None = ...,
        shareable: bool | None = ...,
        uuid: str | None = ...,
        vendor: str | None = ...,
        write_cache: bool | None = ...,
        write_error_policy: Literal["report", "enospc", "stop"] | None = ...,
        wwn: str | None = ...,
    ) -> int: ...

    # Take a target away when its I/O in flight has ended. A connected guest sees the disk go.
    @overload
    def call(
        self,
        method: Literal["vhost_scsi_controller_remove_target"],
        /,
        *,
        ctrlr: str,
        scsi_target_num: int,
        unless_prevented: bool | None = ...,
    ) -> bool: ...

    # Let VMs connect to a controller that was created with delay.
    @overload
    def call(
        self,
        method: Literal["vhost_start_scsi_controller"],
        /,
        *,
        ctrlr: str,
    ) -> bool: ...

    # Let flushes of a bdev, and of all on the same file or block device, through again after one
    # failed, and load a stopped lvstore on it anew; false if there was nothing to clear. Until then
    # the failure is known, also after a restart, a crash or an upgrade of the target; deleting the
    # bdev forgets it.
    @overload
    def call(
        self,
        method: Literal["virtlun_bdev_clear_flush_error"],
        /,
        *,
        name: str,
    ) -> bool: ...

    # Get how many of each operation took less than each of some latencies, of all bdevs that have a
    # histogram or of some.
    @overload
    def call(
        self,
        method: Literal["virtlun_bdev_get_latencies"],
        /,
        *,
        borders_ns: list[int],
        names: list[str] | None = ...,
    ) -> list[BdevLatencies]: ...

    # Get how much I/O a bdev does a second at most.
    @overload
    def call(
        self,
        method: Literal["virtlun_bdev_get_limits"],
        /,
        *,
        name: str,
    ) -> IoLimits: ...

    # Limit how much I/O a bdev does a second, in place of all limits that it had: of all who use it
    # together, at once and after each start, until the bdev is deleted. Reads and writes are
    # limited, by the data that goes with them, not flushes and unmapping. The words are those of
    # libvirt's iotune. A burst goes on at its rate for its length, and then at that of the limit;
    # without one, at most a tenth of a second's worth begins at once.
    @overload
    def call(
        self,
        method: Literal["virtlun_bdev_set_limits"],
        /,
        *,
        name: str,
        read_bytes_sec: int | None = ...,
        read_bytes_sec_max: int | None = ...,
        read_bytes_sec_max_length: int | None = ...,
        read_iops_sec: int | None = ...,
        read_iops_sec_max: int | None = ...,
        read_iops_sec_max_length: int | None = ...,
        size_iops_sec: int | None = ...,
        total_bytes_sec: int | None = ...,
        total_bytes_sec_max: int | None = ...,
        total_bytes_sec_max_length: int | None = ...,
        total_iops_sec: int | None = ...,
        total_iops_sec_max: int | None = ...,
        total_iops_sec_max_length: int | None = ...,
        write_bytes_sec: int | None = ...,
        write_bytes_sec_max: int | None = ...,
        write_bytes_sec_max_length: int | None = ...,
        write_iops_sec: int | None = ...,
        write_iops_sec_max: int | None = ...,
        write_iops_sec_max_length: int | None = ...,
    ) -> bool: ...

    # Say who a controller belongs to. Another process that is connected is disconnected. Without
    # this, it belongs to the first process that connects, until that has ended.
    @overload
    def call(
        self,
        method: Literal["virtlun_controller_set_owner"],
        /,
        *,
        boot_id: str | None = ...,
        ctrlr: str,
        fresh: bool | None = ...,
        not_before: int | None = ...,
        pid: int | None = ...,
        process: OwnerProcess | None = ...,
        uid: int | None = ...,
    ) -> bool: ...

    # Show a bdev as a file for the kernel and return its path; a loop device on it is a block
    # device. An exported bdev cannot be a target of a controller. Repeating it changes nothing.
    @overload
    def call(
        self,
        method: Literal["virtlun_export_create"],
        /,
        *,
        bdev_name: str,
        block_size: int | None = ...,
        device: bool | None = ...,
        parked: bool | None = ...,
        read_only: bool | None = ...,
        shareable: bool | None = ...,
    ) -> NewExport: ...

    # Take the file of a bdev away. Refused while it is open, after a wait of 2 s.
    @overload
    def call(
        self,
        method: Literal["virtlun_export_delete"],
        /,
        *,
        bdev_name: str,
        force: bool | None = ...,
    ) -> bool: ...

    # Get what devices of ublk exports can be, as the holder and its kernel say.
    @overload
    def call(
        self,
        method: Literal["virtlun_export_get_devices"],
        /,
    ) -> ExportDevices: ...

    # Get all exports, in the order in which they were made.
    @overload
    def call(
        self,
        method: Literal["virtlun_export_list"],
        /,
    ) -> list[Export]: ...

    # Let another face have an exported bdev, a target of a controller for instance, which an export
    # else prevents. Its file stays, with whatever has it open: reads are served, writes fail with
    # EROFS. Returns when the writes in flight have ended, or is refused after 10 s and changes
    # nothing. Repeating it changes nothing.
    @overload
    def call(
        self,
        method: Literal["virtlun_export_park"],
        /,
        *,
        bdev_name: str,
    ) -> bool: ...

    # Take the bdev of a parked export back: its file takes writes again. Refused while another face
    # has it, and then it stays parked. What the kernel cached of the file meanwhile is stale
    # (BLKFLSBUF drops it). Repeating it changes nothing.
    @overload
    def call(
        self,
        method: Literal["virtlun_export_unpark"],
        /,
        *,
        bdev_name: str,
    ) -> bool: ...

    # Get what the target is, how its reactors spend their time, and what could not be restored.
    @overload
    def call(
        self,
        method: Literal["virtlun_get_status"],
        /,
    ) -> Status: ...

    # Close a bdev that was made with guest_disk, at once though it is new; one that anybody uses
    # stays. False where there is none.
    @overload
    def call(
        self,
        method: Literal["virtlun_guest_disk_close"],
        /,
        *,
        name: str,
    ) -> bool: ...

    # Create a bdev that keeps a checksum of each 4096 bytes on the bdev that it lies on, which it
    # has for itself, and verifies what is read: what is damaged is a medium error. It is noted on
    # the base, and comes with it.
    @overload
    def call(
        self,
        method: Literal["virtlun_integrity_create"],
        /,
        *,
        base_bdev_name: str,
        name: str,
    ) -> str: ...

    # Delete a bdev with checksums, and all that is on it; refused while something uses it, such as
    # an lvstore.
    @overload
    def call(
        self,
        method: Literal["virtlun_integrity_delete"],
        /,
        *,
        name: str,
    ) -> bool: ...

    # Get all bdevs with checksums, or one: what they found.
    @overload
    def call(
        self,
        method: Literal["virtlun_integrity_get"],
        /,
        *,
        name: str | None = ...,
    ) -> list[CheckedBdev]: ...

    # Have the LUNs of an iSCSI target as volumes POOL/lun-NUMBER, which the methods on lvols list
    # and those that use bdevs open; return the pool's UUID, the same on every host. Needs the
    # option --iscsi and Debian's package libiscsi7.
    @overload
    def call(
        self,
        method: Literal["virtlun_iscsi_pool_create"],
        /,
        *,
        initiator_iqn: str,
        name: str,
        password: str | None = ...,
        portal: str,
        target_iqn: str,
        user: str | None = ...,
    ) -> str: ...

    # Have the LUNs of an iSCSI target as volumes no more; refused while one is in use. The LUNs
    # stay.
    @overload
    def call(
        self,
        method: Literal["virtlun_iscsi_pool_delete"],
        /,
        *,
        name: str,
    ) -> bool: ...

    # End the copy of a target's bdev, one that failed as well: the target goes on with its bdev,
    # and the other is free.
    @overload
    def call(
        self,
        method: Literal["virtlun_lun_copy_abort"],
        /,
        *,
        ctrlr: str,
        scsi_target_num: int,
    ) -> bool: ...

    # Get how far the copies of targets' bdevs have come, of all or of one. One that failed is told
    # until it is aborted.
    @overload
    def call(
        self,
        method: Literal["virtlun_lun_copy_check"],
        /,
        *,
        ctrlr: str | None = ...,
        scsi_target_num: int | None = ...,
    ) -> list[LunCopy]: ...

    # Have a target whose bdev is copied, and ready, go on with the copy, as the same disk to its
    # guest: also after a crash, once this has returned.
    @overload
    def call(
        self,
        method: Literal["virtlun_lun_copy_pivot"],
        /,
        *,
        ctrlr: str,
        scsi_target_num: int,
    ) -> bool: ...

    # Limit the copy of a target's bdev to so many bytes a second.
    @overload
    def call(
        self,
        method: Literal["virtlun_lun_copy_set_limit"],
        /,
        *,
        bytes_per_second: int,
        ctrlr: str,
        scsi_target_num: int,
    ) -> bool: ...

    # Begin to copy the bdev of a target to another, while its guest uses it: what it writes
    # meanwhile goes to both. The copy is lost when this process ends before its pivot.
    @overload
    def call(
        self,
        method: Literal["virtlun_lun_copy_start"],
        /,
        *,
        bytes_per_second: int | None = ...,
        ctrlr: str,
        dst_bdev_name: str,
        scsi_target_num: int,
    ) -> bool: ...

    # Cancel the creation or growth of a thick lvol that is being zeroed; nothing of it stays.
    @overload
    def call(
        self,
        method: Literal["virtlun_lvol_cancel"],
        /,
        *,
        name: str,
    ) -> bool: ...

    # Get parts of an lvol that may hold anything but zeros, page by page; no data is read.
    @overload
    def call(
        self,
        method: Literal["virtlun_lvol_get_allocated_ranges"],
        /,
        *,
        max_ranges: int | None = ...,
        name: str,
        offset: int | None = ...,
    ) -> AllocatedRanges: ...

    # Get parts of an lvol that may differ from a snapshot, page by page; no data is read.
    @overload
    def call(
        self,
        method: Literal["virtlun_lvol_get_changed_ranges"],
        /,
        *,
        max_ranges: int | None = ...,
        name: str,
        offset: int | None = ...,
        since: str,
    ) -> ChangedRanges: ...

    # Get the sizes of many lvols, by the name that was given; one that is not there is left out.
    @overload
    def call(
        self,
        method: Literal["virtlun_lvol_get_sizes"],
        /,
        *,
        names: list[str],
    ) -> dict[str, LvolSizes]: ...

    # Get what lvols share with their snapshots and clones, by the name that was given; one that is
    # not there is left out. Each of their clusters is looked at.
    @overload
    def call(
        self,
        method: Literal["virtlun_lvol_get_space"],
        /,
        *,
        names: list[str],
    ) -> dict[str, LvolSpace]: ...

    # Get all xattrs of an lvol, name to value.
    @overload
    def call(
        self,
        method: Literal["virtlun_lvol_get_xattrs"],
        /,
        *,
        name: str,
    ) -> dict[str, str]: ...

    # Get which of the two volumes of a move counts, by what is noted at both, and recorded of the
    # disks on them.
    @overload
    def call(
        self,
        method: Literal["virtlun_lvol_move_check"],
        /,
        *,
        name: str,
    ) -> Moving: ...

    # Remove an xattr of an lvol.
    @overload
    def call(
        self,
        method: Literal["virtlun_lvol_remove_xattr"],
        /,
        *,
        name: str,
        xattr_name: str,
    ) -> bool: ...

    # Have an lvol that nobody uses read as a snapshot which it is made of, with its size; snapshots
    # that were taken since stay.
    @overload
    def call(
        self,
        method: Literal["virtlun_lvol_roll_back"],
        /,
        *,
        lvol_name: str,
        snapshot_name: str,
    ) -> bool: ...

    # Have several lvols of one lvstore that nobody uses read as snapshots in it, each with its
    # snapshot's size and thin: all or none, also if the target or its host ends meanwhile. A
    # snapshot need not be one of the lvol.
    @overload
    def call(
        self,
        method: Literal["virtlun_lvol_roll_back_together"],
        /,
        *,
        rollbacks: list[RollBackOf],
    ) -> bool: ...

    # Set an xattr of an lvol.
    @overload
    def call(
        self,
        method: Literal["virtlun_lvol_set_xattr"],
        /,
        *,
        name: str,
        xattr_name: str,
        xattr_value: str,
    ) -> bool: ...

    # Take snapshots of several lvols of one lvstore, all at one instant, and return their UUIDs in
    # order; all are taken or none.
    @overload
    def call(
        self,
        method: Literal["virtlun_lvol_snapshot_together"],
        /,
        *,
        snapshots: list[SnapshotOf],
    ) -> list[str]: ...

    # Compare the metadata of an lvstore on the medium with what the target knows, while it is used,
    # and write anew what has gone bad; or look at one that is not loaded.
    @overload
    def call(
        self,
        method: Literal["virtlun_lvstore_check"],
        /,
        *,
        bdev_name: str | None = ...,
        lvs_name: str | None = ...,
        repair: bool | None = ...,
        uuid: str | None = ...,
    ) -> CheckedLvstore: ...

    # Tell what an lvstore has on its medium, page by page: superblock, journal, metadata. Nothing
    # is judged, and nothing written.
    @overload
    def call(
        self,
        method: Literal["virtlun_lvstore_dump"],
        /,
        *,
        bdev_name: str | None = ...,
        lvs_name: str | None = ...,
        page: int | None = ...,
        uuid: str | None = ...,
    ) -> DumpedLvstore: ...

    # Read some of the data of an lvstore's lvols, while they are used, and tell what cannot be
    # read.
    @overload
    def call(
        self,
        method: Literal["virtlun_lvstore_scrub"],
        /,
        *,
        lvs_name: str | None = ...,
        offset: int | None = ...,
        uuid: str | None = ...,
    ) -> Scrubbed: ...

    # Give an lvstore, in use or not, the newest version of its format; older targets refuse it
    # then.
    @overload
    def call(
        self,
        method: Literal["virtlun_lvstore_upgrade"],
        /,
        *,
        lvs_name: str | None = ...,
        share_clusters: bool | None = ...,
        uuid: str | None = ...,
    ) -> bool: ...

    # Create a bdev whose base is an export of an NBD server. Where the connection is lost, I/O
    # waits and is sent again. An lvstore on it is loaded.
    @overload
    def call(
        self,
        method: Literal["virtlun_nbd_create"],
        /,
        *,
        block_size: int | None = ...,
        give_up_s: int | None = ...,
        guest_disk: bool | None = ...,
        name: str,
        readonly: bool | None = ...,
        reconnect_delay_s: int | None = ...,
        shared: bool | None = ...,
        uri: str,
        uuid: str | None = ...,
        write_through: bool | None = ...,
    ) -> str: ...

    # Delete a bdev of virtlun_nbd_create; an lvstore on it is unloaded first. The export stays as
    # it is.
    @overload
    def call(
        self,
        method: Literal["virtlun_nbd_delete"],
        /,
        *,
        name: str,
    ) -> bool: ...

    # Have the namespaces of an NVMe subsystem over TCP as volumes POOL/uuid.UUID, or POOL/eui. and
    # their NGUID or EUI-64, which the methods on lvols list and those that use bdevs open; return
    # the pool's UUID, the same on every host. Needs the option --network.
    @overload
    def call(
        self,
        method: Literal["virtlun_nvme_pool_create"],
        /,
        *,
        ddgst: bool | None = ...,
        hdgst: bool | None = ...,
        hostnqn: str | None = ...,
        name: str,
        num_io_queues: int | None = ...,
        paths: list[NvmePathOf],
        subnqn: str,
    ) -> str: ...

    # Have the namespaces of an NVMe subsystem as volumes no more; refused while one is in use. The
    # namespaces stay.
    @overload
    def call(
        self,
        method: Literal["virtlun_nvme_pool_delete"],
        /,
        *,
        name: str,
    ) -> bool: ...

    # Have the images of a pool of Ceph as volumes, which the methods on lvols work on as on those
    # of an lvstore; return its UUID, the same on every host.
    @overload
    def call(
        self,
        method: Literal["virtlun_rbd_pool_create"],
        /,
        *,
        block_size: int | None = ...,
        cluster_name: str,
        name: str,
        object_size: int | None = ...,
        pool_name: str,
        uuid: str | None = ...,
    ) -> str: ...

    # Have the images of a pool as volumes no more; refused while one is in use. The images stay.
    @overload
    def call(
        self,
        method: Literal["virtlun_rbd_pool_delete"],
        /,
        *,
        name: str,
    ) -> bool: ...

    # Get what controllers and their targets did, seen from the guest's rings.
    @overload
    def call(
        self,
        method: Literal["virtlun_vhost_get_stats"],
        /,
        *,
        name: str | None = ...,
        scsi_target_num: int | None = ...,
    ) -> list[ControllerStats]: ...

    # Get the targets whose requests wait because an I/O failed, as their error policies have it:
    # until they go on, the VM does after a pause, or it ends.
    @overload
    def call(
        self,
        method: Literal["virtlun_vhost_get_suspended"],
        /,
        *,
        name: str | None = ...,
    ) -> list[SuspendedTarget]: ...

    # Begin what waits because an I/O failed and return of how many targets. What fails again waits
    # again. While the VM runs that is also done every few seconds.
    @overload
    def call(
        self,
        method: Literal["virtlun_vhost_resume"],
        /,
        *,
        ctrlr: str,
        scsi_target_num: int | None = ...,
    ) -> int: ...


class BatchRpc(Rpc):
    @abstractmethod
    def call_for_each_raw(
        self, method: str, names: Sequence[str], params: Callable[[str], Mapping[str, Any]]
    ) -> dict[str, Any]: ...

    @overload
    def call_for_each(
        self,
        method: Literal["bdev_get_bdevs"],
        names: Sequence[str],
        params: Callable[[str], BdevGetBdevsParams],
    ) -> dict[str, list[Bdev]]: ...

    @overload
    def call_for_each(
        self,
        method: Literal["bdev_lvol_get_lvstores"],
        names: Sequence[str],
        params: Callable[[str], BdevLvolGetLvstoresParams],
    ) -> dict[str, list[Lvstore]]: ...

    @overload
    def call_for_each(
        self,
        method: Literal["virtlun_lvol_get_xattrs"],
        names: Sequence[str],
        params: Callable[[str], VirtlunLvolGetXattrsParams],
    ) -> dict[str, dict[str, str]]: ...

    @overload
    def call_for_each(
        self,
        method: Literal["virtlun_vhost_get_stats"],
        names: Sequence[str],
        params: Callable[[str], VirtlunVhostGetStatsParams],
    ) -> dict[str, list[ControllerStats]]: ...
