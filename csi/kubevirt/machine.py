"""What a hook reads of a VirtualMachineInstance: its pods, and its volumes that are claims."""

from __future__ import annotations

import json
import sys
from collections.abc import Container, Mapping
from dataclasses import dataclass
from typing import Any

from csi.errors import invalid
from csi.objects import Object, Vmi
from pydataplane.domain.xml.disk import PHYSICAL_BLOCK_SIZES

JSON_BYTES_MAX = 4 << 20
"""Far above what the API server stores of one object."""
SERIAL_BYTES_MAX = 255
VOLUMES_MAX = 1024
"""More than the disks that a machine can have; each is looked up."""


@dataclass(frozen=True)
class MachineVolume:
    """A volume of a virtual machine that is a claim, and is there when it starts."""

    name: str
    """In the VirtualMachineInstance; its disk has the alias ua-NAME."""
    claim: str
    """The claim's name, in the machine's namespace."""
    serial: str | None
    read_only: bool
    bus: str
    """libvirt's name of the bus that the disk asks for; empty: none."""
    block_size: int | None
    """Bytes of a logical block that the disk asks for; None: as the claim has it."""
    physical_block_size: int | None
    """Likewise of a physical block, a power of two from 512 to 2097152."""
    unsuited: str | None
    """Why its disk cannot be a LUN, whatever the claim is; None if it can."""


def parse(text: bytes) -> Vmi:
    """Reads a VirtualMachineInstance as KubeVirt gives it to hooks.

    Raises:
        Failure: INVALID_ARGUMENT, it is none.
    """
    try:
        if len(text) > JSON_BYTES_MAX:
            raise ValueError(f"it has more than {JSON_BYTES_MAX} bytes")
        found = json.loads(text)
        found.setdefault("apiVersion", "kubevirt.io/v1")
        found.setdefault("kind", "VirtualMachineInstance")
        return Vmi.of(found)
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        why = f"{type(error).__name__}: {error}"
        raise invalid(f"the hook was not given a VirtualMachineInstance as JSON ({why})") from error


def volumes(vmi: Vmi) -> list[MachineVolume]:
    """Returns the volumes of a machine that are claims and have a disk, but for hotplugged ones.

    KubeVirt attaches the hotplugged ones by itself, to a machine that runs.

    Raises:
        Failure: INVALID_ARGUMENT, it is no VirtualMachineInstance.
    """
    try:
        spec = vmi.object["spec"]
        devices = (spec.get("domain") or {}).get("devices") or {}
        disks = {disk["name"]: disk for disk in devices.get("disks") or ()}
        told = {
            each["name"]: each
            for each in (vmi.object.get("status") or {}).get("volumeStatus") or ()
        }
        found = []
        if len(spec.get("volumes") or ()) > VOLUMES_MAX:
            raise ValueError(f"it has more than {VOLUMES_MAX} volumes")
        for volume in spec.get("volumes") or ():
            name = volume["name"]
            status = told.get(name) or {}
            claim, read_only = _claim(volume, status)
            if claim and name in disks and status.get("hotplugVolume") is None:
                found.append(_volume(name, claim, disks[name], read_only=read_only))
        return found
    except (KeyError, TypeError, AttributeError, ValueError) as error:
        raise invalid(
            f"virtual machine {vmi.namespace}/{vmi.name} cannot be read: {type(error).__name__}: "
            f"{error}"
        ) from error


def boot_disk(text: bytes, names: Container[str]) -> str | None:
    """Returns which of some volumes a machine boots first, if it boots one of them.

    Raises:
        Failure: INVALID_ARGUMENT, it is no VirtualMachineInstance.
    """
    return next((name for name in boot_order(parse(text)) if name in names), None)


def boot_order(vmi: Vmi) -> list[str]:
    """Returns the names of a machine's disks as it boots them: by bootOrder, then as they stand."""
    devices = (vmi.object["spec"].get("domain") or {}).get("devices") or {}
    disks = sorted(
        devices.get("disks") or (), key=lambda disk: disk.get("bootOrder") or sys.maxsize
    )
    return [str(disk["name"]) for disk in disks]


def _claim(volume: Mapping[str, Any], status: Mapping[str, Any]) -> tuple[str | None, bool]:
    """Returns the claim of a volume and whether it is read-only; None for another kind."""
    for kind, key in (("persistentVolumeClaim", "claimName"), ("dataVolume", "name")):
        source = volume.get(kind)
        if source is not None:
            if source.get("hotpluggable"):
                return None, False
            return source[key], bool(source.get("readOnly"))
    if volume.get("hostDisk") is not None:  # what virt-handler makes of a claim in Filesystem mode
        return (status.get("persistentVolumeClaimInfo") or {}).get("claimName"), False
    return None, False


def _volume(name: str, claim: str, disk: Object, *, read_only: bool) -> MachineVolume:
    device = disk.get("disk") or disk.get("lun") or {}
    serial = disk.get("serial") or None
    # Of none, and of matchVolume, both are the volume's, as pods see it.
    blocks = (disk.get("blockSize") or {}).get("custom") or {}
    physical = blocks.get("physical")
    is_possible = type(physical) is int and physical in PHYSICAL_BLOCK_SIZES
    unsuited = None
    if disk.get("cdrom") is not None:
        unsuited = f"disk {name} is a CD-ROM, which the controller does not have"
    elif disk.get("shareable"):
        unsuited = f"disk {name} is shareable, and a LUN is of one virtual machine alone"
    elif serial and (len(serial.encode()) > SERIAL_BYTES_MAX or not serial.isascii()):
        unsuited = f"disk {name} has a serial number that SCSI cannot carry"
    elif physical is not None and not is_possible:
        unsuited = (
            f"disk {name} asks for a physical block that no disk has: make blockSize.custom."
            f"physical a power of two from 512 to {max(PHYSICAL_BLOCK_SIZES)}"
        )
    return MachineVolume(
        name=name,
        claim=claim,
        serial=serial,
        read_only=read_only or bool(device.get("readonly")),
        bus=str(device.get("bus") or ""),
        block_size=blocks.get("logical"),
        physical_block_size=physical if is_possible else None,
        unsuited=unsuited,
    )
