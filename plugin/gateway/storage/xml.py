"""XML of pools and volumes: as clients see them, and what they ask for."""

from __future__ import annotations

from dataclasses import dataclass
from uuid import UUID

from plugin.gateway.errors import Code, Refused
from plugin.gateway.storage.pools import Pool
from pydataplane.domain.xml.document import Document, Node, NotXmlError, escape, number
from pydataplane.lvols import Volume
from pydataplane.volumenames import BYTES_MAX, VOLUME_NAME

TYPE = "zfs"
"""What our pools are to clients; see this package."""

FORMAT = "raw"

_BYTES = ("", "b", "byte", "bytes")
_POWERS = {letter: power for power, letter in enumerate("kmgtpe", 1)}


def pool_xml(pool: Pool) -> str:
    """Returns a pool's XML; sizes in bytes."""
    store = pool.store
    sizes = "".join(
        f"  <{name} unit='bytes'>{size}</{name}>\n"
        for name, size in (
            ("capacity", store.total),
            ("allocation", store.total - store.free),
            ("available", store.free),
        )
    )
    return (
        f"<pool type='{TYPE}'>\n"
        f"  <name>{escape(pool.name)}</name>\n"
        f"  <uuid>{store.uuid}</uuid>\n"
        f"{sizes}"
        f"  <source>\n    <name>{escape(store.name)}</name>\n  </source>\n"
        f"  <target>\n    <path>{escape(pool.path)}</path>\n  </target>\n"
        "</pool>\n"
    )


def volume_xml(pool: Pool, volume: Volume) -> str:
    """Returns a volume's XML; sizes in bytes."""
    path = escape(pool.volume_path(volume.name))
    sizes = "".join(
        f"  <{name} unit='bytes'>{size}</{name}>\n"
        for name, size in (
            ("capacity", volume.size),
            ("allocation", volume.allocated),
            ("physical", volume.allocated),
        )
    )
    return (
        "<volume type='block'>\n"
        f"  <name>{escape(volume.name)}</name>\n"
        f"  <key>{path}</key>\n"
        f"{sizes}"
        f"  <target>\n    <path>{path}</path>\n    <format type='{FORMAT}'/>\n  </target>\n"
        "</volume>\n"
    )


@dataclass(frozen=True)
class PoolRequest:
    """What a client's XML of a pool says that matters; None: nothing."""

    kind: str | None
    name: str | None
    uuid: str | None
    source: str | None


def read_pool(text: str) -> PoolRequest | None:
    """Reads a client's pool; None: it is none, and libvirtd says why."""
    try:
        root = Document(text).root
    except NotXmlError:
        return None
    if root.name != "pool":
        return None
    source = root.at("source", "name")
    return PoolRequest(
        root.attrs.get("type"), _text(root, "name"), _text(root, "uuid"), _stripped(source)
    )


def check_same(pool: Pool, wanted: PoolRequest) -> None:
    """Refuses XML that is of another pool than this one.

    Raises:
        Refused: with what differs.
    """
    if wanted.kind != TYPE or wanted.source not in (None, pool.store.name):
        raise Refused(
            Code.XML_ERROR,
            f"pool {pool.name} is lvstore {pool.store.name}: define it with the XML that"
            f" pool-dumpxml shows (type '{TYPE}', source name {pool.store.name}), or choose another"
            " name",
        )
    if wanted.uuid is not None and _uuid(wanted.uuid) != UUID(pool.store.uuid):
        raise Refused(
            Code.OPERATION_FAILED,
            f"pool '{pool.name}' is already defined with uuid {pool.store.uuid}",
        )


@dataclass(frozen=True)
class VolumeRequest:
    """A volume that a client asks for; bytes."""

    name: str
    capacity: int
    allocation: int | None
    """None: as much, as libvirt has it."""

    @property
    def thin(self) -> bool:
        """Whether not all of it is to be allocated at once."""
        return self.allocation is not None and self.allocation < self.capacity


def read_volume(text: str, pool: str, *, capacity: int | None = None) -> VolumeRequest:
    """Reads a client's volume for a pool of this name.

    `capacity` is what it has at least, where it is a copy, bytes; None: the XML has to say it.

    Raises:
        Refused: it is not XML of a volume, or asks for what is not possible.
    """
    try:
        root = Document(text).root
    except NotXmlError as error:
        raise Refused(Code.XML_ERROR, f"the volume's XML cannot be read: {error}") from error
    if root.name != "volume":
        raise Refused(Code.XML_ERROR, "unknown root element for storage vol")
    name = _text(root, "name")
    if name is None:
        raise Refused(Code.XML_ERROR, "missing volume name element")
    if not VOLUME_NAME.fullmatch(name) or "@" in name:
        raise Refused(
            Code.XML_ERROR,
            f"pool {pool}: '{name}' is no volume's name: use letters, digits and . _ - (63 at"
            " most), with a letter or digit first",
        )
    _check_plain(root, f"{pool}/{name}")
    wanted = _size(root, "capacity")
    if wanted is None and capacity is None:
        raise Refused(Code.XML_ERROR, "missing capacity element")
    size = max(wanted or 0, capacity or 0)
    if not 0 < size <= BYTES_MAX:
        raise Refused(
            Code.INVALID_ARG, f"volume {pool}/{name} cannot have {size} bytes: give 1 or more"
        )
    return VolumeRequest(name, size, _size(root, "allocation"))


def _check_plain(root: Node, volume: str) -> None:
    """Refuses what our volumes do not have.

    Raises:
        Refused: one sentence.
    """
    kind = root.value("target/format", "type")
    if kind not in (None, FORMAT):
        raise Refused(
            Code.CONFIG_UNSUPPORTED,
            f"volume {volume}: format '{kind}' is not possible, as a volume is a disk and no file:"
            " leave it out, or give raw",
        )
    if root.at("target", "encryption") is not None or root.child("encryption") is not None:
        raise Refused(
            Code.CONFIG_UNSUPPORTED,
            f"volume {volume}: libvirt's <encryption> is not possible: make an encrypted volume"
            " with `virtlun volume create --key`",
        )
    if _stripped(root.at("backingStore", "path")) is not None:
        raise Refused(
            Code.CONFIG_UNSUPPORTED,
            f"volume {volume}: <backingStore> is not possible: make a copy with vol-clone, or a"
            " clone of a snapshot with `virtlun volume clone`",
        )


def _size(root: Node, name: str) -> int | None:
    """Returns a size in bytes, with libvirt's units; None: there is none.

    Raises:
        Refused: it is no size.
    """
    node = root.child(name)
    if node is None:
        return None
    value, unit = number(node.text.strip()), node.attrs.get("unit", "bytes").strip().lower()
    factor = _factor(unit)
    if value is None or factor is None:
        raise Refused(Code.XML_ERROR, f"malformed {name} element")
    return value * factor


def _factor(unit: str) -> int | None:
    """Returns the bytes of a unit as virScaleInteger knows it; None: it does not."""
    if unit in _BYTES:
        return 1
    power = _POWERS.get(unit[0])
    if power is None or unit[1:] not in ("", "b", "ib"):
        return None
    base: int = 1000 if unit[1:] == "b" else 1024
    factor: int = base**power
    return factor


def _text(root: Node, name: str) -> str | None:
    return _stripped(root.child(name))


def _stripped(node: Node | None) -> str | None:
    return (node.text.strip() or None) if node is not None else None


def _uuid(text: str) -> UUID | None:
    try:
        return UUID("".join(text.split()))
    except ValueError:
        return None
