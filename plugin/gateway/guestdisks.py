"""Which disk of the client's a guest's file system is on, in the results of two calls.

libvirtd asks the guest's agent, and finds a disk by the PCI address that the agent gives: for every
disk of ours that is the carrier. The gateway asks it again and puts the disk's own target dev in,
by the serial, which is udev's ID_SERIAL and has our NAA designator in it, or by the SCSI target.
QEMU's own agent leaves that 0 for each disk of a virtio-scsi controller. Where a disk cannot be
known, no name is given, as libvirtd itself does it with disks that it does not find.

The agent's words are a guest's: anything may stand there.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import Any
from uuid import UUID

from plugin.gateway.messages import TypedParam, pack_params
from plugin.gateway.xdr import Reader, Writer
from pydataplane.domain.model import LunPlan

FILESYSTEMS_MAX = 256
"""REMOTE_DOMAIN_FSINFO_MAX, and REMOTE_DOMAIN_FSINFO_DISKS_MAX of disks below each."""
PARAMS_MAX = 2048
"""REMOTE_DOMAIN_GUEST_INFO_PARAMS_MAX."""

ANSWER_MAX = 256 << 10
"""Characters of an agent's answer that are read. To parse one keeps all clients waiting; libvirt
takes several megabytes, which no guest with so few file systems has to say."""

ASK_FILESYSTEMS = '{"execute":"guest-get-fsinfo"}'
ASK_DISKS = '{"execute":"guest-get-disks"}'


@dataclass(frozen=True, slots=True)
class Said:
    """What the agent says of one disk."""

    target: int | None = None
    """Its SCSI target."""
    serial: str = ""


@dataclass(frozen=True, slots=True)
class Names:
    """What is known of a guest's disks."""

    carrier: str
    """Target dev of the disk that stands for our controller."""
    devs: Mapping[int, str]
    """The target devs of the client's disks, by SCSI target."""
    below: Mapping[tuple[str, str], tuple[Said, ...]] = field(default_factory=dict)
    """The disks below each file system, which is known by mount point and name."""
    disks: tuple[Said, ...] = ()
    """All disks, in the agent's order."""
    naas: Mapping[str, str] = field(default_factory=dict)
    """The target devs by NAA designator, 16 hexadecimal digits in lower case."""

    @property
    def _tells_targets(self) -> bool:
        """Whether the agent says of any disk that it is of another target than 0."""
        return any(said.target for said in (*chain(*self.below.values()), *self.disks))

    def of(self, disks: Sequence[Said], nth: int) -> str | None:
        """Returns the target dev of a disk that libvirtd took for the carrier; None: unknown."""
        if len(self.devs) == 1:
            return next(iter(self.devs.values()))
        said = disks[nth] if nth < len(disks) else Said()
        named = [dev for naa, dev in self.naas.items() if naa in said.serial.lower()]
        if len(named) == 1:
            return named[0]
        if said.target is None or not self._tells_targets:
            return None
        return self.devs.get(said.target)


def naa_of(lun: LunPlan) -> str | None:
    """Returns the NAA designator that a disk has in VPD page 83h; None: it cannot be known.

    The target makes it of the UUID that the guest knows it by, where the client gives no wwn
    (crate scsi, `inquiry`).
    """
    if lun.characteristics.wwn is not None or lun.identity is None:
        return lun.characteristics.wwn
    number = UUID(lun.identity).int
    halves = (number >> 64) ^ (number & (1 << 64) - 1)
    return f"3{halves & (1 << 60) - 1:015x}"


def disks_below(text: str) -> dict[tuple[str, str], tuple[Said, ...]]:
    """Reads the agent's answer to ASK_FILESYSTEMS, as far as it is one."""
    return {
        (_text(item.get("mountpoint")), _text(item.get("name"))): tuple(
            _said(disk) for disk in _list(item.get("disk"))
        )
        for item in _returned(text)
        if isinstance(item, dict)
    }


def disks(text: str) -> tuple[Said, ...]:
    """Reads the agent's answer to ASK_DISKS, as far as it is one."""
    return tuple(
        _said(item.get("address")) if isinstance(item, dict) else Said() for item in _returned(text)
    )


def _returned(text: str) -> list[Any]:
    if len(text) > ANSWER_MAX:
        return []
    try:
        answer = json.loads(text)
    except (ValueError, RecursionError):
        return []
    return _list(answer.get("return")) if isinstance(answer, dict) else []


def _list(value: object) -> list[Any]:
    return value if isinstance(value, list) else []


def _text(value: object) -> str:
    return value if isinstance(value, str) else ""


def _said(address: object) -> Said:
    if not isinstance(address, dict):
        return Said()
    target = address.get("target")
    return Said(target if isinstance(target, int) else None, _text(address.get("serial")))


def filesystems(payload: bytes, names: Names) -> bytes:
    """Returns GET_FSINFO's result with the client's disks.

    Raises:
        XdrError: it is no such result.
    """
    reader, writer = Reader(payload), Writer()

    def one() -> tuple[str, str, str, list[str]]:
        head = (reader.string(), reader.string(), reader.string())
        return (*head, reader.array(reader.string, FILESYSTEMS_MAX))

    found = reader.array(one, FILESYSTEMS_MAX)
    result = reader.u32()
    reader.end()

    def write(item: tuple[str, str, str, list[str]]) -> None:
        mountpoint, name, kind, devs = item
        below = names.below.get((mountpoint, name), ())
        if len(below) != len(devs):  # libvirtd did not find each: which are these?
            below = ()
        shown = [names.of(below, n) if dev == names.carrier else dev for n, dev in enumerate(devs)]
        writer.string(mountpoint).string(name).string(kind)
        writer.array([dev for dev in shown if dev is not None], writer.string)

    writer.array(found, write)
    return bytes(writer.u32(result))


def info(payload: bytes, names: Names) -> bytes:
    """Returns GET_GUEST_INFO's result with the client's disks.

    Raises:
        XdrError: it is no such result.
    """
    reader = Reader(payload)
    params = reader.array(lambda: TypedParam.read(reader), PARAMS_MAX)
    reader.end()
    values = {param.field: param.value for param in params}
    shown = []
    for param in params:
        if param.value != names.carrier or not param.field.endswith(".alias"):
            shown.append(param)
            continue
        dev = _dev(param.field, values, names)
        if dev is not None:
            shown.append(TypedParam(param.field, param.kind, dev))
    return pack_params(shown)


def _dev(name: str, values: Mapping[str, object], names: Names) -> str | None:
    """Returns the dev of `fs.N.disk.M.alias` or `disk.N.alias`; None: unknown."""
    match name.split("."):
        case ["fs", fs, "disk", nth, "alias"] if nth.isdecimal():
            key = (str(values.get(f"fs.{fs}.mountpoint")), str(values.get(f"fs.{fs}.name")))
            return names.of(names.below.get(key, ()), int(nth))
        case ["disk", nth, "alias"] if nth.isdecimal():
            return names.of(names.disks, int(nth))
    return None
