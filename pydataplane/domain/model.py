"""The nouns of the translation: settings in, plans out. No behaviour beyond small properties."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal, NamedTuple

from pydataplane.domain.histograms import Histograms
from pydataplane.domain.limits import NONE, Limits
from pydataplane.domain.names import blk_controller_name

FrontEnd = Literal["scsi", "blk"]
"""What a disk of ours is to its guest: LUN 0 of a target of its domain's vhost-user-scsi
controller, or the virtio-blk disk of a vhost-user-blk controller of its own."""

FrontEndSetting = Literal["auto", "scsi", "blk"]
"""Which of them a disk gets; auto: as its bus says, and as its domain's QEMU can."""

RECONNECT_S = 1
"""QEMU's reconnect interval where nobody chose one: a target that starts again is there by then."""


def none_reconnects(path: str | None, arch: str | None) -> bool:
    """Takes every QEMU for one that does not connect again."""
    return False


def none_known_to_protect(path: str | None, arch: str | None) -> bool | None:
    """Says of every QEMU that it is not known whether its guests carry protection information."""
    return None


def none_lacks_scsi(path: str | None, arch: str | None) -> bool:
    """Takes every QEMU for one that has vhost-user-scsi."""
    return False


class Allowed(NamedTuple):
    """What this host's configuration lets disks over the network reach; see plugin.config."""

    own_keyring: bool = False
    """Images of Ceph without a secret, opened with the target's keyring."""
    nbd_sockets: Sequence[str] = ()
    """Folders below which UNIX sockets of NBD servers are."""
    iscsi_portals: Sequence[str] = ()
    """Names, addresses and networks (10.0.0.0/24) of iSCSI targets; * is any."""


ANY = Allowed(True, ("/",), ("*",))
"""Whatever there is."""
NOTHING = Allowed()
"""What needs nobody's leave alone."""


@dataclass(frozen=True, slots=True)
class Settings:
    """What the translation needs of the configuration; see plugin.config for the file."""

    vhost_dir: str = "/run/virtlun/vhost"
    """Folder of the controllers' sockets; the socket is named as the controller."""
    path_prefix: str = "/dev/virtlun/"
    """<source dev=|file=> that begins so is LVSTORE/LVOL of ours."""
    rbd_prefix: str = "virtlun/"
    """<source protocol='rbd' name=> that begins so is ours; '' switches this way off."""
    protocol: str = "lvol"
    """<source protocol=> that is ours; '' switches this way off."""
    pool_prefix: str = "virtlun-"
    """<source pool=> that begins so is ours; '' switches this way off."""
    max_queues: int = 8
    """Upper bound of the request queues of a controller; the lower is the number of vCPUs."""
    reconnect_s: int | None = None
    """QEMU's reconnect interval in seconds; 0 for none. Needs QEMU 8.2 (7.2 refuses to start).
    None: RECONNECT_S where `qemu_reconnects`, else none."""
    qemu_reconnects: Callable[[str | None, str | None], bool] = none_reconnects
    """Whether a domain's QEMU connects again to a target that restarted; it is given the path of
    its <emulator> and the architecture of its <type>, None for what it lacks. It may block. See
    pydataplane.emulator.reconnects."""
    front_end: FrontEndSetting = "auto"
    """What a disk that is new becomes."""
    network: frozenset[str] = frozenset()
    """Protocols of <source protocol=> whose disks are ours, too; see domain.xml.network."""
    on_request: frozenset[str] = frozenset()
    """Those whose disks are where their domain asks for it; see translate.networkchoice."""
    allowed: Allowed = NOTHING
    """Which disks of all these; others are QEMU's."""
    qemu_lacks_scsi: Callable[[str | None, str | None], bool] = none_lacks_scsi
    """Whether a domain's QEMU has no vhost-user-scsi; as `qemu_reconnects`. See
    pydataplane.emulator.lacks_scsi."""
    protection: bool = False
    """Whether guests are to carry protection information, where their QEMU lets them."""
    qemu_protects: Callable[[str | None, str | None], bool | None] = none_known_to_protect
    """Whether a domain's QEMU does, None where it is not known; as `qemu_reconnects`. See
    pydataplane.emulator.protects."""

    @property
    def may_serve(self) -> frozenset[str]:
        """Returns the protocols whose disks are ours, or can be."""
        return self.network | self.on_request


def local(settings: Settings) -> Settings:
    """Returns settings under which all disks over the network are QEMU's."""
    return replace(settings, network=frozenset())


def serving(settings: Settings, protocol: str) -> Settings:
    """Returns settings under which a disk over the network that is ours already is so again."""
    network = settings.network | {protocol}
    return replace(settings, network=network, allowed=ANY)


@dataclass(frozen=True, slots=True)
class Host:
    """A server: its name or address and port, or the path of a UNIX socket."""

    name: str
    port: int | None
    """None: the default, or it is a socket."""

    @property
    def text(self) -> str:
        """Returns NAME:PORT, an address of IPv6 in brackets."""
        name = f"[{self.name}]" if ":" in self.name else self.name
        return name if self.port is None else f"{name}:{self.port}"


@dataclass(frozen=True, slots=True)
class SecretRef:
    """A secret of libvirt's: one of the two."""

    uuid: str | None
    usage: str | None


@dataclass(frozen=True, slots=True)
class NetworkSource:
    """What a disk over the network is opened by, but for the value of its secret."""

    protocol: str
    pool: str
    """POOL or POOL/NAMESPACE of Ceph; the name of an iSCSI target; of others empty."""
    image: str
    """IMAGE or IMAGE@SNAPSHOT; the number of a LUN; the name of an NBD export, which may be empty.
    """
    hosts: tuple[Host, ...]
    """In an order of their own: that in which a client writes them means nothing."""
    config: str | None
    """Path of Ceph's configuration."""
    user: str | None
    """Of Ceph, without client.; that of CHAP."""
    secret: SecretRef | None
    """The user's key or password."""
    read_only: bool
    shared: bool
    initiator: str | None = None
    """Name of the iSCSI initiator; None: one that is made of the domain's UUID."""


@dataclass(frozen=True, slots=True)
class VolumeRef:
    """A logical volume by name, or what else a disk of ours is on.

    An image of Ceph that its client names by cluster and pool is `rbd:POOL` and IMAGE, an NBD
    export `nbd:HOST` and its name, a LUN of an iSCSI target `iscsi:TARGET` and its number.
    """

    lvstore: str
    lvol: str
    source: NetworkSource | None = None
    """Of one that is no volume of an lvstore or pool that the target has."""

    @property
    def alias(self) -> str:
        """Returns LVSTORE/LVOL, the bdev alias under which the target knows the volume."""
        return f"{self.lvstore}/{self.lvol}"

    @property
    def image(self) -> tuple[object, ...]:
        """Returns what it is, by whichever way it is reached: equal for the same volume or image.

        An export without a name of its own is known by its server alone.
        """
        if self.source is None:
            return (self.lvstore, self.lvol)
        named = (self.source.protocol, self.source.pool, self.source.image)
        is_named = self.source.protocol != "nbd" or self.source.image != ""
        return named if is_named else (*named, self.source.hosts)

    def path(self, prefix: str) -> str:
        """Returns the path by which libvirt's calls know it; `prefix` is that of volumes."""
        if self.source is None:
            return prefix + self.alias
        if self.source.protocol == "nbd":  # the name of an export may be any disk's target dev
            return self.alias
        return f"{self.source.pool}/{self.source.image}".lstrip("/")


@dataclass(frozen=True, slots=True)
class Characteristics:
    """What a disk says of itself to its guest, where the client chose; else the volume's own."""

    wwn: str | None = None
    """World wide name, 16 hexadecimal digits in lower case, the first 2, 3 or 5."""
    vendor: str | None = None
    """Up to 8 printable ASCII characters."""
    product: str | None = None
    """Up to 16 printable ASCII characters."""
    rotation_rate: int | None = None
    """Turns a minute, 1025 to 65534, or 1 for a disk that does not rotate."""
    physical_block_size: int | None = None
    """Bytes of a physical block: a power of two, from a logical block to 2 MiB."""
    removable: bool = False
    discard: bool = True
    """Whether the guest may discard blocks, where the volume takes that."""
    write_cache: bool = True
    """Whether a write is durable only after a flush; False: before it is completed."""


OWN = Characteristics()
"""Nothing was chosen."""


@dataclass(frozen=True, slots=True)
class ErrorPolicy:
    """What becomes of requests whose I/O fails; the words are those of the target's JSON-RPC.

    `report` tells the guest. Otherwise the request waits and the domain is paused: `enospc` where
    there is no room, `stop` for whatever can be mended. That a flush failed is told always.
    """

    write: str = "enospc"
    """Of writes: report, enospc or stop."""
    read: str = "report"
    """Of reads: report or stop."""


ON_ERROR = ErrorPolicy()
"""As libvirt and QEMU have it where nothing was chosen."""


class KnownAs(NamedTuple):
    """As what a guest knows an image that is reached otherwise since it got it."""

    uuid: str
    """UUID of the bdev that the image was then: serial and designators follow of it."""
    way: str
    """How it was reached, of which that UUID is made: see domain.xml.network."""


class DiskAddress(NamedTuple):
    """Which disk of the target: its controller, and its SCSI target there."""

    controller: str
    target: int
    """SCSI target number; 0 of a virtio-blk controller, which has one disk."""


def disk_address(controller: str, number: int, front: FrontEnd) -> DiskAddress:
    """Returns the address in the target of a disk of the domain that has this controller."""
    if front == "scsi":
        return DiskAddress(controller, number)
    return DiskAddress(blk_controller_name(controller, number), 0)


@dataclass(frozen=True, slots=True)
class LunPlan:
    """One disk of ours: which volume is LUN 0 of which SCSI target of the controller.

    Or, where `front` says so, the virtio-blk disk of which controller.
    """

    target: int
    """SCSI target number, 0..254; of a virtio-blk disk the number in its controller's name. It is
    the disk's alone in the domain."""
    dev: str
    """The client's <target dev=>."""
    volume: VolumeRef
    uuid: str | None = None
    """The volume's UUID (the lvol bdev's name), when it was known at define or attach."""
    serial: str | None = None
    read_only: bool = False
    shareable: bool = False
    block_size: int | None = None
    """Bytes of a logical block, 512 or 4096; None: the volume's own."""
    characteristics: Characteristics = OWN
    error_policy: ErrorPolicy = ON_ERROR
    limits: Limits = NONE
    histograms: Histograms = ()
    """Which latencies are counted, and how they are put together."""
    front: FrontEnd = "scsi"
    known_as: KnownAs | None = None
    """None: as the volume is."""

    @property
    def identity(self) -> str | None:
        """Returns the UUID that its guest knows it by, None if it is not known."""
        return self.uuid if self.known_as is None else self.known_as.uuid

    @property
    def bdev_name(self) -> str:
        """Returns the name to give to the target: the UUID where known, else LVSTORE/LVOL."""
        return self.uuid or self.volume.alias

    def address(self, controller: str) -> DiskAddress:
        """Returns its address in the target; `controller` is the name of the domain's."""
        return disk_address(controller, self.target, self.front)


@dataclass(frozen=True, slots=True)
class Plan:
    """What a domain needs of the target."""

    domain: str
    """The domain's name, for messages."""
    controller: str
    """Name of its vhost-user-scsi controller, which the names of its disks' controllers begin with.
    """
    socket: str
    """Path of that controller's socket as QEMU is told; the others are in the same folder."""
    num_queues: int
    """Request queues of each controller."""
    luns: tuple[LunPlan, ...]
    """By target number."""
    uid: int | None = field(default=None, compare=False)
    """Number of the user that QEMU runs as; None: libvirt does not say (yet)."""
    others: tuple[str, ...] = field(default=(), compare=False)
    """Controllers that devices of the domain name, and of which its metadata says nothing."""
    has_scsi: bool = True
    """Whether it has the vhost-user-scsi controller; else all of its disks are virtio-blk."""
    incoming: bool = field(default=False, compare=False)
    """Whether the guest comes from another host, which has its volumes until it runs here."""
    cpus: frozenset[frozenset[int]] = field(default=frozenset(), compare=False)
    """Sets of the host's CPUs that its vCPUs are bound to; empty: one may run on any."""
    protection: bool = False
    """Whether the guest can carry protection information with the vhost-user-scsi controller."""

    @property
    def controllers(self) -> dict[str, tuple[LunPlan, ...]]:
        """Returns all controllers by name, each with its disks."""
        found: dict[str, tuple[LunPlan, ...]] = {self.controller: ()} if self.has_scsi else {}
        for lun in self.luns:
            name = lun.address(self.controller).controller
            found[name] = (*found.get(name, ()), lun)
        return found

    @property
    def sockets(self) -> list[str]:
        """Returns the paths of all controllers' sockets."""
        folder = self.socket.rpartition("/")[0]
        return [f"{folder}/{name}" for name in self.controllers]


@dataclass(frozen=True, slots=True)
class Definition:
    """Outcome of `define`."""

    xml: str
    """What to hand to libvirtd; the very string given if nothing had to change."""
    plan: Plan | None
    """None if the domain has no controller of ours."""


@dataclass(frozen=True, slots=True)
class Change:
    """Outcome of `attach`, `detach` and `update` for one side (live or persistent) of a domain."""

    lun: LunPlan
    """The disk: added, removed, or as it is after the update."""
    alias: str
    """The disk's alias as clients see it, for the device-added and device-removed events."""
    metadata_xml: str
    """For virDomainSetMetadata(VIR_DOMAIN_METADATA_ELEMENT, key=PREFIX, uri=NAMESPACE). No element
    of it is in a namespace, for libvirtd puts them all into ours (and refuses a declaration)."""
    domain_xml: str | None
    """The whole domain after the change, for virDomainDefineXML; None for the running side."""
    redefine: bool
    """The persistent side needs `domain_xml`: more than the metadata changed (the controller came,
    or the boot disk is another). False: setting `metadata_xml` alone says the same."""
    plan: Plan | None
    """The domain's plan after the change; None if no controller is left."""
    device_xml: str | None = None
    """The device that libvirtd is to attach to the running domain, or to detach from it, which a
    virtio-blk disk is; None where that has nothing to do with it."""
